"""How the experiments' tables look: no frame, and every column to the right but the ones that hold words."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from rich.table import Table


def plain_table(title: str, columns: Iterable[str], words: Collection[str], *, no_wrap: bool = False) -> Table:
    """A table without rows yet. `words` names the columns that hold text."""
    table = Table(title=title, box=None, pad_edge=False, header_style="bold underline")
    for column in columns:
        table.add_column(column, justify="left" if column in words else "right", no_wrap=no_wrap)
    return table

"""One table, for a terminal or a document: a heading and a function of the record for each column."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeVar

from rich.table import Table

from protocol.cli.console import plain_table

T = TypeVar("T")
Columns = Mapping[str, Callable[[T], object]]
# One entry of a result file, as `--json` writes it. Any: numbers, names, and lists and mappings of them.
Record = Mapping[str, Any]


def on_terminal(title: str, columns: Columns[T], records: Iterable[T], words: Collection[str] = ()) -> Table:
    """Return a table to print. All columns but `words` are aligned to the right."""
    table = plain_table(title, columns, words)
    for record in records:
        table.add_row(*(_cell(column(record)) for column in columns.values()))
    return table


def in_markdown(columns: Columns[T], records: Iterable[T]) -> str:
    return markdown(columns, ([column(record) for column in columns.values()] for record in records))


def markdown(headings: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """Return a Markdown table of rows whose headings are known only from the data."""
    headings = list(headings)
    body = "".join(f"| {' | '.join(map(_cell, row))} |\n" for row in rows)
    return f"| {' | '.join(headings)} |\n|{'---|' * len(headings)}\n{body}"


def _cell(value: object) -> str:
    """Return the text of a cell; whole numbers get thousands separators."""
    return f"{value:,}" if isinstance(value, int) else str(value)

"""What every command shows a person: progress, results as JSON, and errors that say what to do."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from rich.bar import Bar
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from protocol.files import write_atomically
from protocol.places import STANDARD_OUTPUT

# Tables need room; where there is no terminal to ask, a page that a person can still read.
PAGE_WIDTH = 120
BAR_WIDTH = 30


class Printed(Console):
    """What goes to one of the two outputs. Whoever closes it early (`| head`) ends the printing, not the work."""

    def print(self, *objects: Any, **how: Any) -> None:  # Any: whatever rich prints, and how
        """As rich prints, but of a table nothing is cut off."""
        super().print(*(folded(each) if isinstance(each, Table) else each for each in objects), **how)

    def on_broken_pipe(self) -> None:
        """Called by rich where nobody reads any more."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno() if self.stderr else sys.stdout.fileno())


out = Printed(width=None if sys.stdout.isatty() else PAGE_WIDTH)
err = Printed(stderr=True, width=None if sys.stderr.isatty() else PAGE_WIDTH)


def folded(table: Table) -> Table:
    """The table as it is shown in little room: a word that is too long goes on in the next line."""
    room = fits(table)
    for column in table.columns:
        column.overflow = "fold"
        # Of a column that may not be broken rich would cut off the end, without a sign.
        column.no_wrap = column.no_wrap and room
    return table


def fits(table: Table) -> bool:
    """Whether a table needs no folding to be shown here."""
    return out.measure(table, options=out.options.update(max_width=sys.maxsize)).maximum <= out.width


def add_bars(table: Table) -> None:
    """A column for bars: it is the first to shrink, and all bars in it shrink alike."""
    table.add_column("", max_width=BAR_WIDTH)


def bar(value: int, largest: int) -> Bar:
    """A bar as long as the room that its column has for the largest; a negative noisy count has none."""
    return Bar(largest, 0, max(0, value))


def say(text: str, style: str | None = None) -> None:
    """One line on standard output as it is: nothing in it is markup, and a terminal, not we, breaks a long one."""
    out.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


class Advance(Protocol):
    """Tell the progress bar that more is done, and what is going on."""

    def __call__(self, amount: int = 1, /, *, note: str = "") -> None: ...


@contextmanager
def progress(what: str, total: int) -> Iterator[Advance]:
    """A bar on a terminal, a plain line every tenth of the way otherwise, always on standard error."""
    if err.is_terminal:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=err, transient=True) as bar:
            task = bar.add_task(what, total=total)

            def advance(amount: int = 1, /, *, note: str = "") -> None:
                bar.update(task, advance=amount, description=f"{what} {note}".strip())

            yield advance
    else:
        done = 0
        shown = -1

        def advance(amount: int = 1, /, *, note: str = "") -> None:
            nonlocal done, shown
            done += amount
            tenth = 10 * done // max(total, 1)
            if tenth > shown:
                shown = tenth
                err.print(f"{what}: {done} of {total} {note}".rstrip(), markup=False, highlight=False)

        yield advance


def write_json(path: Path | None, result: object) -> None:
    """Write a result as JSON, whole or not at all: an interrupted run leaves no half file to be mistaken for one."""
    if path is None:
        return
    document = json.dumps(result, indent=2) + "\n"
    if path == STANDARD_OUTPUT:
        sys.stdout.write(document)
        sys.stdout.flush()
    elif path.exists() and not path.is_file():
        # A pipe or a device such as /dev/null is written to, never replaced.
        path.write_text(document)
    else:
        write_atomically(path, document.encode())

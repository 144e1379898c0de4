"""What commands show: lines, tables, progress bars, JSON documents and figures.

Everything goes through the two consoles `out` and `err`, so that `--json -` and `--quiet` hold for every command. Files
are written atomically. Figures need matplotlib, which is imported only when one is drawn.
"""

from __future__ import annotations

import io
import json
import os
import re
import sys
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from rich.bar import Bar
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from protocol.errors import ErrorKind, TrefoilError
from protocol.files import write_atomically

STANDARD_OUTPUT = Path("-")
# The width of tables where standard output is not a terminal.
DEFAULT_WIDTH = 120
BAR_WIDTH = 30
# A table of so many is shown one cell a line where the terminal is too narrow for it.
MANY_COLUMNS = 5


class PipeConsole(Console):
    """A rich console that folds tables instead of truncating them, and survives a closed pipe (`| head`)."""

    def print(self, *objects: Any, **how: Any) -> None:  # Any: whatever rich prints, and how
        """Print as rich does, with every column of every table folded; a table that is much too wide is turned."""
        super().print(*(fold(turned(each)) if isinstance(each, Table) else each for each in objects), **how)

    def on_broken_pipe(self) -> None:
        """Discard all further output; the command itself goes on. Called by rich."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno() if self.stderr else sys.stdout.fileno())


out = PipeConsole(width=None if sys.stdout.isatty() else DEFAULT_WIDTH)
err = PipeConsole(stderr=True, width=None if sys.stderr.isatty() else DEFAULT_WIDTH)


def say(text: str, style: str | None = None) -> None:
    """Print one line verbatim: no markup, and the terminal rather than rich wraps it."""
    out.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def write_json(path: Path | None, result: object) -> None:
    """Write a result as JSON, atomically: an interrupted run must not leave a truncated document."""
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


class Advance(Protocol):
    """Advance a progress bar by `amount`, with a note on what is being done."""

    def __call__(self, amount: int = 1, /, *, note: str = "") -> None: ...


@contextmanager
def progress(what: str, total: int) -> Iterator[Advance]:
    """Show a bar on a terminal, and otherwise a plain line every tenth of the way; always on standard error."""
    if err.is_terminal:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=err, transient=True) as bar:
            task = bar.add_task(what, total=total)

            def advance(amount: int = 1, /, *, note: str = "") -> None:
                bar.update(task, advance=amount, description=f"{what} {note}".strip())

            yield advance
    else:
        done = 0
        printed = -1

        def advance(amount: int = 1, /, *, note: str = "") -> None:
            nonlocal done, printed
            done += amount
            tenth = 10 * done // max(total, 1)
            if tenth > printed:
                printed = tenth
                err.print(f"{what}: {done} of {total} {note}".rstrip(), markup=False, highlight=False)

        yield advance


def fold(table: Table) -> Table:
    """Let every column wrap long words where the console is too narrow, and return the table."""
    wide_enough = fits(table)
    for column in table.columns:
        column.overflow = "fold"
        # rich silently truncates a column that may not wrap.
        column.no_wrap = column.no_wrap and wide_enough
    return table


def turned(table: Table) -> Table:
    """Return a table of many columns with one line for each cell, if the console would break words or numbers."""
    if len(table.columns) < MANY_COLUMNS or fits(table) or not _breaks_words(fold(table)):
        return table
    title_width = min(out.width, len(str(table.title or "")))
    below = Table(title=table.title, box=None, pad_edge=False, show_header=False, min_width=title_width)
    below.add_column(style="bold")
    below.add_column()
    for row in zip(*(column.cells for column in table.columns), strict=True):
        for column, cell in zip(table.columns, row, strict=True):
            below.add_row(column.header, cell)
        below.add_row("", "")
    return below


def _breaks_words(table: Table) -> bool:
    """Return whether a word of a table would not be whole at the console's width."""
    screen = Console(file=io.StringIO(), width=out.width, color_system=None)
    with screen.capture() as captured:
        screen.print(table)
    whole = set(re.split(r"[\s│┃]+", captured.get()))
    cells = [cell for column in table.columns for cell in (column.header, *column.cells) if isinstance(cell, str)]
    return any(word not in whole for cell in cells for word in cell.split())


def fits(table: Table) -> bool:
    return out.measure(table, options=out.options.update(max_width=sys.maxsize)).maximum <= out.width


def plain_table(title: str, columns: Iterable[str], words: Collection[str], *, no_wrap: bool = False) -> Table:
    """Return an empty table without a frame; all columns but `words` (text) are aligned to the right."""
    table = Table(title=title, box=None, pad_edge=False, header_style="bold underline")
    for column in columns:
        table.add_column(column, justify="left" if column in words else "right", no_wrap=no_wrap)
    return table


def add_bars(table: Table) -> None:
    """Add a column for bars, which shrinks before any other does."""
    table.add_column("", max_width=BAR_WIDTH)


def bar(value: int, largest: int) -> Bar:
    """Return a bar in proportion to `largest`; it is empty for a negative noisy count."""
    return Bar(largest, 0, max(0, value))


PICTURES = (".png", ".svg", ".pdf")
DOTS_PER_INCH = 130
# Without dates, so that the same numbers draw the same file.
_UNDATED = {".png": {}, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
COLOURS = ("#4c72b0", "#dd8452", "#8b1a8b", "#2a9d8f", "#b5651d", "#555555")
MARKERS = ("s", "^", "o", "D", "v", "P")
# The longest line of a legend, in characters: half a plot. And the inches that a figure has for its height.
LEGEND_WIDTH = 30
LEGEND_HEIGHT = 0.5


def is_picture(path: Path) -> bool:
    return path.suffix.lower() in PICTURES


def picture_file(place: Path, name: str, *, only: bool = True, ending: str = ".png") -> Path:
    """Return the file for one image of a command whose `--plot` is `place`; `only` if it draws no other."""
    if not is_picture(place):
        return place / f"{name}{ending}"
    return place if only else place.with_name(f"{place.stem}-{name}{place.suffix}")


def not_installed(what: str) -> TrefoilError:
    """Return the error for a package that a plain installation lacks."""
    hint = "Install it with: pip install 'trefoil[experiments]'"
    return TrefoilError(what, hint, kind=ErrorKind.MISSING_DEPENDENCY)


def new_figure(width: float, height: float) -> Any:  # Any: matplotlib has no types
    """Return an empty figure of this size in inches, which needs no display."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise not_installed("drawing needs matplotlib") from None
    return Figure(figsize=(width, height), layout="constrained")


def new_plot(body: Callable[[Any], None]) -> Any:  # Any: matplotlib has no types
    """Return a figure with one plot that `body` draws, in the style of the benchmarks and experiments."""
    figure = new_figure(5.4, 3.9)
    axes = figure.add_subplot()
    axes.grid(visible=True, which="major", alpha=0.3)
    body(axes)
    return figure


def legend_above(axes: Any, columns: int = 4) -> None:
    """Put the legend above the plot, where it hides no data, with as many columns as the plot is wide."""
    handles, labels = axes.get_legend_handles_labels()
    wrapped = ["\n".join(textwrap.wrap(label, LEGEND_WIDTH)) for label in labels]
    for count in range(min(columns, max(1, len(labels))), 0, -1):
        legend = axes.legend(
            handles, wrapped, fontsize=7, ncols=count, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False
        )
        # Measured apart: until the figure has grown, a long legend could leave no plot at all.
        legend.set_in_layout(False)
        axes.figure.draw_without_rendering()
        if legend.get_window_extent().width <= axes.get_window_extent().width:
            break
    # A long legend takes paper, not the plot.
    excess = legend.get_window_extent().height / axes.figure.dpi - LEGEND_HEIGHT
    axes.figure.set_figheight(axes.figure.get_figheight() + max(0.0, excess))
    legend.set_in_layout(True)


def save_figure(path: Path, figure: Any) -> None:  # Any: matplotlib has no types
    """Write a figure in the format that the file name ends in."""
    if not is_picture(path):
        raise TrefoilError(
            f"cannot draw {path}", "Use a name that ends in .png, .svg or .pdf.", kind=ErrorKind.INVALID_VALUE
        )
    suffix, image = path.suffix.lower(), io.BytesIO()
    figure.savefig(image, format=suffix[1:], dpi=DOTS_PER_INCH, metadata=_UNDATED[suffix])
    try:
        write_atomically(path, image.getvalue())
    except OSError as error:
        raise TrefoilError(
            f"cannot draw {path}: {error.strerror}",
            "Choose another file with --plot.",
            kind=ErrorKind.FILE_UNWRITABLE,
        ) from None

"""`trefoil query --every day` as a person sees it: a table over time, and each bucket with its interval as a line."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.table import Table

from protocol.collector.store import StoreReader
from protocol.console import err, fits, out, say
from protocol.drawing import new_figure, save_figure
from protocol.errors import TrefoilError
from protocol.helper_set import HelperSet
from protocol.keys import load_identity
from protocol.places import picture_file
from protocol.querier.ask import Querier
from protocol.querier.every import Every
from protocol.querier.saved_query import QueryOptions
from protocol.querier.series import Period, PeriodAnswer, Series, closed_periods, shelves_of_kind
from protocol.querier.worth import CONFIDENCE

PLOT_WIDTH = 56
LEAST_PLOT_WIDTH = 16
MAX_BUCKETS = 8


def ask_over_time(
    folder: Path,
    helpers: Path,
    site_key: Path | None,
    options: QueryOptions,
    clock: Callable[[], int],
    *,
    every: Every,
    kind: str,
    plot: Path | None,
) -> dict[str, object]:
    """Ask about every closed period that has no answer yet. What is there is printed also if this is interrupted."""
    if site_key is None:
        raise TrefoilError("a query needs the key that signs it", "Name it with --site-key.")
    helper_set, key = HelperSet.load(helpers), load_identity(site_key)
    answers: list[PeriodAnswer] = []
    with StoreReader(folder) as store:
        shelves = shelves_of_kind(store, kind)
        periods = closed_periods(folder, shelves, every, clock())
        series = Series(store, Querier(helper_set), key, options)
        try:
            asyncio.run(_ask_all(series, periods, clock, answers))
        finally:
            # Whatever ended it: what has been answered is shown, and stays on disk.
            _show(answers, len(periods), every)
            if plot is not None and any(answer.histogram for answer in answers):
                plot_series(picture_file(plot, "series"), answers, every)
    site, name = shelves[0].site, shelves[0].kind
    listed = [answer.to_json() for answer in answers]
    return {"site": site, "kind": name, "every": every.value, "confidence": CONFIDENCE, "periods": listed}


async def _ask_all(
    series: Series, periods: Sequence[Period], clock: Callable[[], int], answers: list[PeriodAnswer]
) -> None:
    for place, period in enumerate(periods):
        err.print(f"{period.name}: {place + 1} of {len(periods)}", markup=False, highlight=False)
        answers.append(await series.ask(period, clock()))


def _show(answers: Sequence[PeriodAnswer], periods: int, every: Every) -> None:
    if not periods:
        say(f"no {every.value} is over yet: one is closed an hour after its end (UTC)")
        return
    buckets = max((len(answer.histogram) for answer in answers), default=0)
    tables = (_table(answers, periods, every, shown) for shown in range(min(buckets, MAX_BUCKETS), -1, -1))
    out.print(next((table for table in tables if fits(table)), _table(answers, periods, every, 0)))
    for answer in answers:
        if answer.refused:
            say(f"{answer.name}: {answer.refused}")
    for line in interval_lines(answers, out.width):
        say(line)
    if buckets > MAX_BUCKETS:
        say(f"{buckets - MAX_BUCKETS} more buckets; --json has them all")


def _table(answers: Sequence[PeriodAnswer], periods: int, every: Every, buckets: int) -> Table:
    """Every period with as many of its buckets as are asked for."""
    table = Table(title=f"{len(answers)} of {periods} {every.value}s")
    table.add_column(every.value)
    for heading in ("reports", "counted", "late", *(f"bucket {place}" for place in range(buckets))):
        table.add_column(heading, justify="right")
    table.add_column(f"± ({CONFIDENCE:.0%})", justify="right")
    for answer in answers:
        shown = [f"{number:,}" for number in answer.histogram[:buckets]] or [""] * buckets
        width = "refused" if answer.refused else f"{answer.half_width:,}"
        table.add_row(answer.name, f"{answer.reports:,}", f"{answer.counted:,}", f"{answer.late:,}", *shown, width)
    return table


def interval_lines(answers: Sequence[PeriodAnswer], width: int) -> list[str]:
    """Each bucket over time: a point for the answer within the interval that its noise allows."""
    numbered = [answer for answer in answers if answer.histogram]
    if not numbered:
        return []
    low = min(0, *(min(answer.histogram) - answer.half_width for answer in numbered))
    high = max(1, *(max(answer.histogram) + answer.half_width for answer in numbered))
    # What is beside the plot: the period, and a number with its interval.
    longest = max(len(f"{low:,}"), len(f"{high:,}"))
    beside = max(len(answer.name) for answer in numbered) + 2 * longest + len("    ± ") + 1
    room = max(LEAST_PLOT_WIDTH, min(PLOT_WIDTH, width - beside))

    def at(value: int) -> int:
        return round((value - low) * (room - 1) / (high - low))

    lines = [f"from {low:,} to {high:,}; the interval holds the exact number with probability {CONFIDENCE:.0%}"]
    for bucket in range(min(MAX_BUCKETS, max(len(answer.histogram) for answer in numbered))):
        lines.append(f"bucket {bucket}")
        for answer in numbered:
            value, half = answer.histogram[bucket], answer.half_width
            row = [" "] * room
            row[at(0)] = "│"
            row[at(value - half) : at(value + half) + 1] = "─" * (at(value + half) - at(value - half) + 1)
            row[at(value - half)], row[at(value + half)], row[at(value)] = "├", "┤", "●"
            lines.append(f"  {answer.name} {''.join(row)} {value:,} ± {half:,}")
    return lines


def plot_series(path: Path, answers: Sequence[PeriodAnswer], every: Every) -> None:
    """A line for every bucket over time, with the interval that its noise allows."""
    numbered = [answer for answer in answers if answer.histogram]
    figure = new_figure(8, 4)
    axes = figure.add_subplot()
    names, halves = [answer.name for answer in numbered], [answer.half_width for answer in numbered]
    for bucket in range(min(MAX_BUCKETS, len(numbered[0].histogram))):
        values = [answer.histogram[bucket] for answer in numbered]
        axes.errorbar(names, values, yerr=halves, marker="o", capsize=3, label=f"bucket {bucket}")
    axes.set_title(f"each {every.value}, {CONFIDENCE:.0%} intervals of the noise")
    axes.tick_params(axis="x", rotation=45)
    axes.legend()
    save_figure(path, figure)

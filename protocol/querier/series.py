"""`trefoil query series`: one query for each day or week of a collector's reports, each period queried once.

A period is closed an hour after its end, when no device's clock is still in it. Its reports are exported to a batch
that never changes; the query is saved beside it before it is sent, and then its answer. A series that is interrupted
therefore resumes where it stopped. The result is a table over time, and a plot of each bucket with its interval.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from http import HTTPStatus
from pathlib import Path

from rich.table import Table

from protocol.batch import BatchReader
from protocol.cli.console import err, fits, new_figure, out, picture_file, save_figure, say
from protocol.collector.batches import Every, closed_shelves, date_of, export
from protocol.collector.store import Shelf, StoreReader
from protocol.errors import ErrorKind, ProtocolError, TrefoilError
from protocol.files import write_atomically
from protocol.helper_set import HelperSet
from protocol.keys import IdentityKey, load_identity
from protocol.net.json_message import JsonObject, decode_json
from protocol.querier.ask import Querier
from protocol.querier.failure import QueryFailed
from protocol.querier.query_folder import QueryFolder, ask_batch
from protocol.querier.result import CONFIDENCE
from protocol.querier.saved_query import QueryOptions
from protocol.querier.spending import check_choice

FOLDER = "asked"


@dataclass(frozen=True, slots=True)
class Period:
    """A closed period of one kind of reports, with the paths of its batch and answer."""

    start: int
    shelves: tuple[Shelf, ...]
    batch: Path

    @property
    def name(self) -> str:
        """Return the first day (UTC), which names the period."""
        return date_of(self.start)

    @property
    def answer(self) -> Path:
        return self.batch.with_suffix(".answer.json")


@dataclass(frozen=True, slots=True)
class PeriodAnswer:
    """The answer of one period. `late` reports arrived after its batch was exported, and are in no answer.

    `refused` is the helpers' reason if the query was permanently rejected; then there are no numbers.
    """

    name: str
    reports: int
    late: int
    histogram: tuple[int, ...] = ()
    half_width: int = 0
    counted: int = 0
    refused: str = ""

    def to_json(self) -> dict[str, object]:
        common: dict[str, object] = {"period": self.name, "reports": self.reports, "late": self.late}
        if self.refused:
            return common | {"refused": self.refused}
        return common | {"answer": list(self.histogram), "half_width": self.half_width, "counted": self.counted}


def closed_periods(folder: Path, shelves: Sequence[Shelf], every: Every, now: int) -> list[Period]:
    """Return the closed periods, oldest first. All shelves are of one kind."""
    return [
        Period(
            start,
            tuple(group),
            folder / FOLDER / f"{group[0].site}-{group[0].kind}-{every.value}-{date_of(start)}.batch",
        )
        for (_, start), group in sorted(closed_shelves(shelves, every, now).items())
    ]


def queried_kinds(folder: Path, every: Every) -> set[str]:
    """Return the kinds that a series over such periods has queried before, by the names of its batches."""
    name = re.compile(rf".*-([0-9a-f]{{8}})-{every.value}-[^-]+-[^-]+-[^-]+\.batch")
    names = (name.fullmatch(path.name) for path in (folder / FOLDER).glob("*.batch"))
    return {match[1] for match in names if match}


def shelves_of_kind(store: StoreReader, kind: str, queried: Collection[str] = ()) -> list[Shelf]:
    """Return the shelves of `kind`: by default of the one queried before, or else of the only kind that there is.

    Anyone can post a report of another kind, and an unattended series must go on all the same.
    """
    shelves = store.shelves()
    kinds = {shelf.kind: f"{shelf.kind} ({shelf.site}, {shelf.description})" for shelf in shelves}
    if not kinds:
        hint = "Wait until devices have posted some."
        raise TrefoilError("this collector has no reports yet", hint, kind=ErrorKind.TOO_FEW)
    if not kind and len(queried) == 1:
        (kind,) = queried
        if others := len(kinds.keys() - queried):
            say(f"goes on with kind {kind}; {others} other kinds are left alone: trefoil batch ls lists them")
    if not kind and len(kinds) > 1:
        message = f"this collector has {len(kinds)} kinds of reports"
        raise TrefoilError(message, f"Choose one with --kind: {_few(kinds)}", kind=ErrorKind.MISSING_OPTION)
    if kind and kind not in kinds:
        message = f"this collector has no reports of kind {kind!r}"
        raise TrefoilError(message, f"It has: {_few(kinds)}", kind=ErrorKind.UNKNOWN_NAME)
    return [shelf for shelf in shelves if not kind or shelf.kind == kind]


class Series:
    """Queries one period after the other and saves the answers."""

    def __init__(self, store: StoreReader, querier: Querier, key: IdentityKey, options: QueryOptions) -> None:
        self._store = store
        self._querier = querier
        self._key = key
        self._options = options

    async def ask(self, period: Period, now: int) -> PeriodAnswer:
        """Return the saved answer of a period, or query it. Raise `QueryFailed` if the query should be retried."""
        if not period.answer.exists():
            try:
                await self._query(period, now)
            except QueryFailed as error:
                # A wrong key is wrong for every period; any other refusal may concern this one alone.
                if error.retryable or error.http_status == HTTPStatus.FORBIDDEN:
                    raise
                return PeriodAnswer(period.name, *_counts(period), refused=str(error))
        return _read(period)

    async def _query(self, period: Period, now: int) -> None:
        if not period.batch.exists():
            export(self._store, period.shelves, period.batch)
        batch, options = BatchReader(period.batch), self._options
        if (saved := QueryFolder(period.batch).newest()) is not None:
            # A period is queried once: one that an earlier run began goes on as it began.
            options = replace(options, keeps_rest=saved.query.keeps_rest)
        else:
            check_choice(batch, options)
        result = await ask_batch(self._querier, batch, options, self._key, now)
        write_atomically(period.answer, (json.dumps(result.to_json(), indent=2) + "\n").encode())


def _counts(period: Period) -> tuple[int, int]:
    """Return how many reports are in the batch, and how many came later."""
    reports = len(BatchReader(period.batch)) if period.batch.exists() else 0
    return reports, max(0, sum(shelf.reports for shelf in period.shelves) - reports)


def _read(period: Period) -> PeriodAnswer:
    try:
        stored = JsonObject(decode_json(period.answer.read_bytes()), "file")
        histogram = stored.value("answer")
        if not isinstance(histogram, list) or not all(type(number) is int for number in histogram):
            raise ProtocolError("it has no histogram", kind=ErrorKind.MISSING_FIELD)
        half, counted = stored.whole("half_width"), stored.whole("reports_counted")
    except ProtocolError as error:
        message = f"{period.answer} is not a saved answer: {error}"
        hint = "Move it away: the helpers may still have the answer."
        raise TrefoilError(message, hint, kind=ErrorKind.FILE_DAMAGED) from None
    return PeriodAnswer(period.name, *_counts(period), tuple(histogram), half, counted)


def _few(kinds: dict[str, str]) -> str:
    """Return at most five kinds: a client can post reports of any number of them."""
    return "; ".join(sorted(kinds.values())[:5]) + ("; …" if len(kinds) > 5 else "")


MAX_BUCKETS = 8


def ask_over_time(
    folder: Path,
    helpers: Path,
    site_key: Path,
    options: QueryOptions,
    clock: Callable[[], int],
    *,
    every: Every,
    kind: str,
    plot: Path | None,
) -> dict[str, object]:
    """Query every closed period without an answer, print the series, also when interrupted, and return it as JSON."""
    helper_set, key = HelperSet.load(helpers), load_identity(site_key)
    answers: list[PeriodAnswer] = []
    with StoreReader(folder) as store:
        shelves = shelves_of_kind(store, kind, queried_kinds(folder, every))
        periods = closed_periods(folder, shelves, every, clock())
        options = _as_before(options, periods)
        series = Series(store, Querier(helper_set), key, options)
        try:
            asyncio.run(_ask_all(series, periods, clock, answers))
        finally:
            # Also after an error: the answers so far are saved.
            _show(answers, len(periods), every)
            if plot is not None and any(answer.histogram for answer in answers):
                plot_series(picture_file(plot, "series"), answers, every)
    site, name = shelves[0].site, shelves[0].kind
    listed = [answer.to_json() for answer in answers]
    return {"site": site, "kind": name, "every": every.value, "confidence": CONFIDENCE, "periods": listed}


def _as_before(options: QueryOptions, periods: Sequence[Period]) -> QueryOptions:
    """Return options that do with the rest of reports what the last queried period did, unless they say it.

    A series that runs unattended must not stop at an upgrade: one that was saved earlier goes on to use reports up.
    """
    queried = (QueryFolder(period.batch).newest() for period in reversed(periods))
    last = next((saved for saved in queried if saved is not None), None)
    if options.keeps_rest is not None or last is None:
        return options
    return replace(options, keeps_rest=last.query.keeps_rest)


async def _ask_all(
    series: Series, periods: Sequence[Period], clock: Callable[[], int], answers: list[PeriodAnswer]
) -> None:
    for place, period in enumerate(periods):
        err.print(f"{period.name}: {place + 1} of {len(periods)}", markup=False, highlight=False)
        answers.append(await series.ask(period, clock()))


def _show(answers: Sequence[PeriodAnswer], periods: int, every: Every) -> None:
    if not periods:
        say(f"no {every.value} is closed yet: that is an hour after its end (UTC)")
        return
    buckets = max((len(answer.histogram) for answer in answers), default=0)
    columns = min(buckets, MAX_BUCKETS)
    while columns and not fits(_table(answers, periods, every, columns)):
        columns -= 1
    out.print(_table(answers, periods, every, columns))
    for answer in answers:
        if answer.refused:
            say(f"{answer.name}: {answer.refused}")
    if buckets > columns:
        say(f"{buckets - columns} more buckets; --json has them all")


def _table(answers: Sequence[PeriodAnswer], periods: int, every: Every, buckets: int) -> Table:
    table = Table(title=f"{len(answers)} of {periods} {every.value}s")
    table.add_column(every.value)
    for heading in ("reports", "counted", "late", *(f"bucket {place}" for place in range(buckets))):
        table.add_column(heading, justify="right")
    table.add_column(f"± ({CONFIDENCE:.0%})", justify="right")
    for answer in answers:
        cells = [f"{number:,}" for number in answer.histogram[:buckets]] or [""] * buckets
        width = "refused" if answer.refused else f"{answer.half_width:,}"
        table.add_row(answer.name, f"{answer.reports:,}", f"{answer.counted:,}", f"{answer.late:,}", *cells, width)
    return table


def plot_series(path: Path, answers: Sequence[PeriodAnswer], every: Every) -> None:
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

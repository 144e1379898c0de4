"""Measurements over time: one query for each day or week of what a collector has, each period asked about once.

A period is closed an hour after its end, when no device's clock is still in it. Its reports become a batch that never
changes; the query is kept beside it before it leaves, and its answer when it comes. So whatever interrupts a series,
the same command goes on where it stopped.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

from protocol.batch import BatchReader
from protocol.collector.batches import date_of, export
from protocol.collector.store import Shelf, StoreReader
from protocol.errors import ProtocolError, TrefoilError
from protocol.files import write_atomically
from protocol.json_message import JsonObject, decode_json
from protocol.keys import IdentityKey
from protocol.querier.ask import Querier
from protocol.querier.every import Every
from protocol.querier.query_failed import QueryFailed
from protocol.querier.query_folder import ask_batch
from protocol.querier.saved_query import QueryOptions
from protocol.seconds import HOUR

FOLDER = "asked"


@dataclass(frozen=True, slots=True)
class Period:
    """A closed period of one kind of reports, and where its batch and answer are."""

    start: int
    shelves: tuple[Shelf, ...]
    batch: Path

    @property
    def name(self) -> str:
        """Its first day, UTC."""
        return date_of(self.start)

    @property
    def answer(self) -> Path:
        """Where its answer is kept."""
        return self.batch.with_suffix(".answer.json")


@dataclass(frozen=True, slots=True)
class PeriodAnswer:
    """What one period says; `late` reports came after its batch was made, and are in no answer.

    `refused` is the helpers' sentence where they will never answer; then there are no numbers.
    """

    name: str
    reports: int
    late: int
    histogram: tuple[int, ...] = ()
    half_width: int = 0
    counted: int = 0
    refused: str = ""

    def to_json(self) -> dict[str, object]:
        """For programs."""
        common: dict[str, object] = {"period": self.name, "reports": self.reports, "late": self.late}
        if self.refused:
            return common | {"refused": self.refused}
        return common | {"answer": list(self.histogram), "half_width": self.half_width, "counted": self.counted}


def closed_periods(folder: Path, shelves: Sequence[Shelf], every: Every, now: int) -> list[Period]:
    """The periods that no device can still add to, oldest first. All shelves are of one kind."""
    found: dict[int, list[Shelf]] = {}
    for shelf in shelves:
        start = every.start_of(shelf.hour)
        if start + every.length + HOUR <= now:
            found.setdefault(start, []).append(shelf)
    return [
        Period(start, tuple(found[start]), folder / FOLDER / _file_name(found[start][0], every, start))
        for start in sorted(found)
    ]


def shelves_of_kind(store: StoreReader, kind: str) -> list[Shelf]:
    """The shelves of the kind that is named, or of the only one there is."""
    shelves = store.shelves()
    kinds = {shelf.kind: f"{shelf.kind} ({shelf.site}, {shelf.description})" for shelf in shelves}
    if not kinds:
        raise TrefoilError("this collector has no reports yet", "Wait until devices have posted some.")
    if not kind and len(kinds) > 1:
        raise TrefoilError(
            f"this collector has {len(kinds)} kinds of reports", f"Choose one with --kind: {_few(kinds)}"
        )
    if kind and kind not in kinds:
        raise TrefoilError(f"this collector has no reports of kind {kind!r}", f"It has: {_few(kinds)}")
    return [shelf for shelf in shelves if not kind or shelf.kind == kind]


class Series:
    """Run by a querier: asks about one period after the other and keeps what it hears."""

    def __init__(self, store: StoreReader, querier: Querier, key: IdentityKey, options: QueryOptions) -> None:
        self._store = store
        self._querier = querier
        self._key = key
        self._options = options

    async def ask(self, period: Period, now: int) -> PeriodAnswer:
        """The answer of one period: the one that is kept, or a new one. `QueryFailed` if it should be tried again."""
        kept = _kept(period)
        if kept is not None:
            return kept
        if not period.batch.exists():
            export(self._store, period.shelves, period.batch)
        batch = BatchReader(period.batch)
        late = sum(shelf.reports for shelf in period.shelves) - len(batch)
        try:
            result = await ask_batch(self._querier, batch, self._options, self._key, now)
        except QueryFailed as error:
            # A wrong key is wrong for every period; what else is refused may be a matter of this one alone.
            if error.again or error.http_status == HTTPStatus.FORBIDDEN:
                raise
            return PeriodAnswer(period.name, len(batch), late, refused=str(error))
        write_atomically(period.answer, (json.dumps(result.to_json(), indent=2) + "\n").encode())
        return _read(period, len(batch), late)


def _kept(period: Period) -> PeriodAnswer | None:
    if not period.answer.exists():
        return None
    reports = len(BatchReader(period.batch)) if period.batch.exists() else 0
    return _read(period, reports, max(0, sum(shelf.reports for shelf in period.shelves) - reports))


def _read(period: Period, reports: int, late: int) -> PeriodAnswer:
    try:
        stored = JsonObject(decode_json(period.answer.read_bytes()), "file")
        histogram = stored.value("answer")
        if not isinstance(histogram, list) or not all(type(number) is int for number in histogram):
            raise ProtocolError("it has no histogram")
        half, counted = stored.whole("half_width"), stored.whole("reports_counted")
    except ProtocolError as error:
        raise TrefoilError(
            f"{period.answer} is not a kept answer: {error}", "Move it away: the helpers may still have the answer."
        ) from None
    return PeriodAnswer(period.name, reports, late, tuple(histogram), half, counted)


def _file_name(shelf: Shelf, every: Every, start: int) -> str:
    day = datetime.datetime.fromtimestamp(start, datetime.UTC)
    return f"{shelf.site}-{shelf.kind}-{every.value}-{day:%Y-%m-%d}.batch"


def _few(kinds: dict[str, str]) -> str:
    """Kinds are made by whoever posts: of very many, some."""
    return "; ".join(sorted(kinds.values())[:5]) + ("; …" if len(kinds) > 5 else "")

"""Batches of sealed reports: summarise, check, merge, split and export them. Only public headers are read."""

from __future__ import annotations

import datetime
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from itertools import groupby
from pathlib import Path

from protocol.batch import BatchReader, BatchWriter
from protocol.collector.limits import ReportKind
from protocol.collector.store import Shelf, StoreReader
from protocol.errors import ErrorKind, TrefoilError
from protocol.files import DRAFT_NAME, remove_on_failure
from protocol.header import decode_header_or_none
from protocol.report import SealedReport
from protocol.units import DAY, HOUR

_LAST_DATE = int(datetime.datetime(9999, 12, 31, tzinfo=datetime.UTC).timestamp())


@dataclass(frozen=True, slots=True)
class CountingQuery:
    """A query for one kind of a batch's reports, at that kind's ε, and how many reports of the batch it counts."""

    kind: str
    description: str
    reports: int


@dataclass(frozen=True, slots=True)
class BatchSummary:
    """The public contents of a batch.

    `repeated` counts the copies of reports beyond the first of each, `malformed` the records that are no reports.
    """

    path: Path
    kinds: tuple[str, ...]
    descriptions: tuple[str, ...]
    sites: tuple[str, ...]
    reports: int
    repeated: int
    oldest: int
    newest: int
    malformed: int = 0
    # One for each kind, that which counts most first.
    counted_by: tuple[CountingQuery, ...] = ()

    def to_json(self) -> dict[str, object]:
        stated = asdict(self)
        return {"batch": str(stated.pop("path")), **stated}


def summary(path: Path) -> BatchSummary:
    """Read every record of a batch and return its summary; an error names the damaged record."""
    kinds: Counter[ReportKind] = Counter()
    digests: Counter[bytes] = Counter()
    hours: set[int] = set()
    malformed = 0
    for report in BatchReader(path):
        if (header := decode_header_or_none(report.header)) is None:
            malformed += 1
            continue
        kinds[ReportKind.of(header)] += 1
        digests[report.digest] += 1
        hours.add(header.terms.time)
    return BatchSummary(
        path,
        tuple(kind.name for kind in kinds),
        tuple(kind.describe() for kind in kinds),
        tuple(sorted({kind.terms.site for kind in kinds})),
        digests.total(),
        digests.total() - len(digests),
        min(hours, default=0),
        max(hours, default=0),
        malformed,
        _counting_queries(kinds),
    )


def _counting_queries(kinds: Counter[ReportKind]) -> tuple[CountingQuery, ...]:
    """Return for the query of each kind how many reports it counts: helpers take those that paid for its ε or more.

    Reports to an earlier helper set count too. Nearly linear in the kinds: devices can make any number of them.
    """
    alike: dict[ReportKind, list[ReportKind]] = {}
    for kind in kinds:
        terms = replace(kind.terms, epsilon_micros=1)
        alike.setdefault(ReportKind(terms, b"", kind.suite), []).append(kind)
    queries = []
    for group in alike.values():
        counted = 0
        largest_first = sorted(group, key=lambda kind: -kind.terms.epsilon_micros)
        for _, same in groupby(largest_first, key=lambda kind: kind.terms.epsilon_micros):
            several = list(same)
            counted += sum(kinds[kind] for kind in several)
            queries += [CountingQuery(kind.name, kind.describe(), counted) for kind in several]
    return tuple(sorted(queries, key=lambda query: (-query.reports, query.kind)))


def check(path: Path) -> BatchSummary:
    """Return the summary of a batch that one query can count in full; raise an error for any other."""
    batch = summary(path)
    if not batch.reports:
        raise TrefoilError(f"{path} holds no reports", kind=ErrorKind.TOO_FEW)
    if batch.malformed:
        raise TrefoilError(
            f"{path} has {batch.malformed} records that are no reports; helpers leave them out",
            "Remove them: trefoil batch merge",
            kind=ErrorKind.MALFORMED,
        )
    most = batch.counted_by[0]
    if most.reports < batch.reports:
        raise TrefoilError(
            f"{path} mixes {len(batch.kinds)} kinds of reports, and no query counts them all; "
            f"--kind {most.kind} counts {most.reports:,} of {batch.reports:,} ({most.description})",
            "Split it: trefoil batch split --by kind",
            kind=ErrorKind.INCONSISTENT,
        )
    if batch.repeated:
        raise TrefoilError(
            f"{path} has {batch.repeated} duplicates; helpers count each report once",
            "Remove them: trefoil batch merge",
            kind=ErrorKind.DUPLICATE,
        )
    return batch


def merge(paths: Sequence[Path], target: Path) -> int:
    """Write the reports of several batches of one site to a new one, without duplicates, and return their number."""
    return write_batch(target, _of_one_site(paths))


def _of_one_site(paths: Sequence[Path]) -> Iterator[SealedReport]:
    """Yield all reports that decode; raise an error at a second site, because one query counts one site."""
    site = ""
    for path in paths:
        for report in BatchReader(path):
            if (header := decode_header_or_none(report.header)) is None:
                continue
            terms = header.terms
            site = site or terms.site
            if terms.site != site:
                raise TrefoilError(
                    f"{path} has reports of {terms.site}; those before are of {site}",
                    "Merge batches of one site.",
                    kind=ErrorKind.INCONSISTENT,
                )
            yield report


def split(path: Path, folder: Path, *, by_kind: bool = False) -> list[Path]:
    """Write one batch for each day (UTC) or kind to `folder` and return their paths. No file is overwritten.

    A record that does not decode is in none of them.
    """
    names: dict[str, list[int]] = {}
    reader = BatchReader(path)
    for place, report in enumerate(reader):
        if (header := decode_header_or_none(report.header)) is None:
            continue
        name = ReportKind.of(header).name if by_kind else date_of(header.terms.time)
        names.setdefault(name, []).append(place)
    targets = {name: folder / f"{path.stem}-{name}.batch" for name in sorted(names)}
    for target in targets.values():
        _refuse_existing(target)
    with remove_on_failure(*targets.values()):
        folder.mkdir(parents=True, exist_ok=True)
        for name, target in targets.items():
            write_batch(target, (reader[place] for place in names[name]))
    return list(targets.values())


def export(store: StoreReader, shelves: Sequence[Shelf], target: Path) -> int:
    """Write the reports of some shelves, all of one kind, to a new batch and return their number."""
    if len({shelf.kind for shelf in shelves}) != 1:
        raise TrefoilError(
            "a batch holds one kind of report",
            "Choose one with --kind; trefoil batch ls lists them.",
            kind=ErrorKind.INCONSISTENT,
        )
    return write_batch(target, store.reports([shelf.number for shelf in shelves]))


class Every(Enum):
    """The length of a period (UTC). Weeks begin on Mondays, as in ISO 8601; 1 January 1970 was a Thursday."""

    DAY = "day"
    WEEK = "week"

    @property
    def length(self) -> int:
        return 7 * DAY if self is Every.WEEK else DAY

    def start_of(self, time: int) -> int:
        first = 4 * DAY if self is Every.WEEK else 0
        return time - (time - first) % self.length


def closed_shelves(shelves: Iterable[Shelf], every: Every, now: int) -> dict[tuple[str, int], list[Shelf]]:
    """Return the shelves by kind and period, of the periods that ended at least an hour ago (clocks differ)."""
    closed: dict[tuple[str, int], list[Shelf]] = {}
    for shelf in shelves:
        start = every.start_of(shelf.hour)
        if start + every.length + HOUR <= now:
            closed.setdefault((shelf.kind, start), []).append(shelf)
    return closed


def date_of(time: int) -> str:
    """Return the day of a time (UTC) as YYYY-MM-DD. A header may hold any year, and a calendar ends with 9999."""
    if time > _LAST_DATE:
        return "after-9999"
    return datetime.datetime.fromtimestamp(time, datetime.UTC).strftime("%Y-%m-%d")


def write_batch(target: Path, reports: Iterable[SealedReport]) -> int:
    """Write a new batch atomically, without duplicates, and return the number of its reports."""
    _refuse_existing(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name[:DRAFT_NAME]}.{os.getpid()}")
    seen: set[bytes] = set()
    try:
        with BatchWriter(draft) as writer:
            for report in reports:
                if report.digest not in seen:
                    seen.add(report.digest)
                    writer.add(report)
        if not seen:
            raise TrefoilError("there are no reports for this batch", kind=ErrorKind.TOO_FEW)
        draft.rename(target)
    except OSError as error:
        error.filename = str(target)
        raise
    finally:
        draft.unlink(missing_ok=True)
    return len(seen)


def _refuse_existing(target: Path) -> None:
    if os.path.lexists(target):
        raise TrefoilError(
            f"{target} exists already", "Name a new file, or move that one away.", kind=ErrorKind.FILE_EXISTS
        )

"""Batches as a querier handles them: what is in one, several made one, one cut by day, and whether it is whole."""

from __future__ import annotations

import datetime
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from protocol.batch import BatchReader, BatchWriter
from protocol.collector.kind import ReportKind
from protocol.collector.store import Shelf, StoreReader
from protocol.errors import TrefoilError
from protocol.header import Header
from protocol.report import SealedReport
from protocol.seconds import DAY, HOUR


@dataclass(frozen=True, slots=True)
class BatchSummary:
    """What a batch holds, from public headers alone."""

    path: Path
    kinds: tuple[str, ...]
    descriptions: tuple[str, ...]
    sites: tuple[str, ...]
    reports: int
    repeated: int
    oldest: int
    newest: int

    def to_json(self) -> dict[str, object]:
        """For programs."""
        return {
            "batch": str(self.path),
            "sites": list(self.sites),
            "kinds": list(self.kinds),
            "descriptions": list(self.descriptions),
            "reports": self.reports,
            "repeated": self.repeated,
            "oldest": self.oldest,
            "newest": self.newest,
        }


def summary(path: Path) -> BatchSummary:
    """Read every record once: damage is an error that names the record."""
    kinds: dict[str, ReportKind] = {}
    digests: Counter[bytes] = Counter()
    hours: set[int] = set()
    for report in BatchReader(path):
        header = Header.decode(report.header)
        kind = ReportKind.of(header)
        kinds[kind.name] = kind
        digests[report.digest] += 1
        hours.add(header.terms.time)
    return BatchSummary(
        path,
        tuple(kinds),
        tuple(kind.describe() for kind in kinds.values()),
        tuple(sorted({kind.site for kind in kinds.values()})),
        digests.total(),
        digests.total() - len(digests),
        min(hours, default=0),
        max(hours, default=0),
    )


def check(path: Path) -> BatchSummary:
    """Whole, of one kind, and no report twice; else an error that says what to do."""
    found = summary(path)
    if not found.reports:
        raise TrefoilError(f"{path} holds no reports")
    if len(found.kinds) > 1:
        raise TrefoilError(
            f"{path} holds {len(found.kinds)} kinds of reports, which no query can count together",
            "Cut it by kind: trefoil batch split --by kind",
        )
    if found.repeated:
        raise TrefoilError(
            f"{found.repeated} reports of {path} are there twice; helpers count each once",
            "Leave them out: trefoil batch merge",
        )
    return found


def merge(paths: Sequence[Path], target: Path) -> int:
    """All reports of several batches of one site in a new one, each once. Gives how many."""
    return write_batch(target, _of_one_site(paths))


def _of_one_site(paths: Sequence[Path]) -> Iterator[SealedReport]:
    """No query counts reports of two sites, so that a batch of both would lose one of them."""
    site = ""
    for path in paths:
        for report in BatchReader(path):
            terms = report.terms()
            site = site or terms.site
            if terms.site != site:
                raise TrefoilError(
                    f"{path} has reports of {terms.site}, and the first one of {site}", "Merge one site."
                )
            yield report


def split(path: Path, folder: Path, *, by_kind: bool = False) -> list[Path]:
    """One batch for each day (UTC), or for each kind, in `folder`. A day or kind that is there already is refused."""
    names: dict[str, list[int]] = {}
    reader = BatchReader(path)
    for place, report in enumerate(reader):
        header = Header.decode(report.header)
        name = ReportKind.of(header).name if by_kind else date_of(header.terms.time)
        names.setdefault(name, []).append(place)
    targets = {name: folder / f"{path.stem}-{name}.batch" for name in sorted(names)}
    for target in targets.values():
        _refuse_existing(target)
    folder.mkdir(parents=True, exist_ok=True)
    for name, target in targets.items():
        write_batch(target, (reader[place] for place in names[name]))
    return list(targets.values())


def export(store: StoreReader, shelves: Sequence[Shelf], target: Path) -> int:
    """A batch of what a collector has on some shelves, all of one kind."""
    if len({shelf.kind for shelf in shelves}) != 1:
        raise TrefoilError("a batch is of one kind of report", "Choose one with --kind; trefoil batch ls names them.")
    return write_batch(target, store.reports([shelf.number for shelf in shelves]))


def days(shelves: Iterable[Shelf], now: int) -> dict[tuple[str, str], list[Shelf]]:
    """Shelves by kind and day (UTC), of days that are over for every device: an hour past midnight."""
    found: dict[tuple[str, str], list[Shelf]] = {}
    for shelf in shelves:
        if shelf.hour - shelf.hour % DAY + DAY + HOUR <= now:
            found.setdefault((shelf.kind, date_of(shelf.hour)), []).append(shelf)
    return found


def date_of(time: int) -> str:
    """The day of a time, UTC."""
    return datetime.datetime.fromtimestamp(time, datetime.UTC).strftime("%Y-%m-%d")


def write_batch(target: Path, reports: Iterable[SealedReport]) -> int:
    """A new batch, whole or not at all, each report once."""
    _refuse_existing(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    seen: set[bytes] = set()
    try:
        with BatchWriter(draft) as writer:
            for report in reports:
                if report.digest not in seen:
                    seen.add(report.digest)
                    writer.add(report)
        if not seen:
            raise TrefoilError("there are no reports for this batch")
        draft.rename(target)
    finally:
        draft.unlink(missing_ok=True)
    return len(seen)


def _refuse_existing(target: Path) -> None:
    if target.exists():
        raise TrefoilError(f"{target} exists already", "Name a new file, or move that one away.")

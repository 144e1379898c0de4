"""The durable store: one SQLite file, each report exactly once, grouped in shelves by kind and hour.

Storing is idempotent: a report is identified by its digest, so that a device may post it again after a lost response.
Reports stay sealed; the collector reads the public header alone.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from protocol.collector.limits import MAX_KINDS, CollectorLimits, PostRefusal, ReportKind, ReportRefused
from protocol.errors import ErrorKind, TrefoilError
from protocol.header import Header
from protocol.report import SealedReport
from protocol.units import DAY

FILE_NAME = "reports.sqlite"
_APPLICATION_ID = 0x7472_636C
_VERSION = 1
_LOG_BYTES = 2**23
_SCHEMA = """
CREATE TABLE shelf (
    shelf INTEGER PRIMARY KEY, site TEXT NOT NULL, kind TEXT NOT NULL, description TEXT NOT NULL,
    hour INTEGER NOT NULL, reports INTEGER NOT NULL, bytes INTEGER NOT NULL, UNIQUE (kind, hour)
) STRICT;
CREATE TABLE report (
    place INTEGER PRIMARY KEY, digest BLOB NOT NULL UNIQUE, shelf INTEGER NOT NULL REFERENCES shelf,
    content BLOB NOT NULL
) STRICT;
CREATE INDEX report_shelf ON report (shelf);
"""


# SQLite's overhead per report: rows and indexes, and for a large one the unused rest of its last page. Measured with
# one shelf per report, the worst case, and rounded up.
_BESIDES, _LARGE, _PAGE = 512, 2000, 4096


def stored_size(size: int) -> int:
    """Return the bytes that a report of `size` bytes takes of its site's quota, overhead included."""
    return size + _BESIDES + (_PAGE if size > _LARGE else 0)


@dataclass(frozen=True, slots=True)
class Shelf:
    """All reports of one kind and hour."""

    number: int
    site: str
    kind: str
    description: str
    hour: int
    reports: int


# By site and kind.
StoredBytes = dict[str, dict[str, int]]


@dataclass(frozen=True, slots=True)
class Receipt:
    """The acknowledgement of one report; `new` is False if it was stored before."""

    digest: bytes
    new: bool


class ReportStore:
    """The one writer of a collector's folder; a `StoreReader` may read it at the same time."""

    def __init__(self, folder: Path, limits: CollectorLimits) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.path = folder / FILE_NAME
        self._limits = limits
        self._lock = threading.Lock()
        with _translate_errors(self.path):
            self._db = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False, timeout=5)
            self.path.chmod(0o600)
            self._db.executescript("PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL; PRAGMA foreign_keys=ON;")
            # Truncate the write-ahead log after a burst of large reports.
            self._db.execute(f"PRAGMA journal_size_limit={_LOG_BYTES}")
            _check_or_make(self._db, self.path)
            # Stored bytes by site and kind, cached: every report is checked against them.
            self._held = self._sum_bytes()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._db.close()

    def add(self, reports: Sequence[tuple[Header, SealedReport]]) -> list[Receipt | ReportRefused]:
        """Store many reports in one durable transaction and return the outcome of each; a failing disk refuses all."""
        with self._lock, _translate_errors(self.path):
            held = {site: dict(kinds) for site, kinds in self._held.items()}
            with self._transaction():
                outcomes = [self._file(header, report, held) for header, report in reports]
            self._held = held
            return outcomes

    def forget(self, now: int) -> int:
        """Delete the reports that helpers would reject for their age, and return how many there were."""
        with self._lock, _translate_errors(self.path):
            oldest = now - self._limits.lifetime_days * DAY
            with self._transaction():
                gone = "SELECT shelf FROM shelf WHERE hour <= ?"
                removed = self._db.execute(f"DELETE FROM report WHERE shelf IN ({gone})", (oldest,)).rowcount  # noqa: S608  (constant)
                self._db.execute("DELETE FROM shelf WHERE hour <= ?", (oldest,))
            self._held = self._sum_bytes()
            return removed

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            with suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")
            raise

    def _sum_bytes(self) -> StoredBytes:
        held: StoredBytes = {}
        rows = self._db.execute("SELECT site, kind, sum(bytes) FROM shelf GROUP BY site, kind")
        for site, kind, stored in rows.fetchall():
            held.setdefault(site, {})[kind] = stored
        return held

    def _file(self, header: Header, report: SealedReport, held: StoredBytes) -> Receipt | ReportRefused:
        digest, content, site = report.digest, report.encode(), header.terms.site
        if self._db.execute("SELECT 1 FROM report WHERE digest = ?", (digest,)).fetchone():
            return Receipt(digest, new=False)
        kind, size = ReportKind.of(header), stored_size(len(content))
        kinds = held.setdefault(site, {})
        if not _fits(kinds, kind.name, size, self._limits.site_bytes):
            message = f"the quota of {site}, or of this kind of report, is used up"
            return ReportRefused(PostRefusal.SITE_FULL, message, "Its oldest reports expire first.")
        if sum(sum(each.values()) for each in held.values()) + size > self._limits.total_bytes:
            return ReportRefused(PostRefusal.FULL, "this collector is full", "Retry later.")
        shelf = self._shelf(kind, header.terms.time, size)
        self._db.execute("INSERT INTO report (digest, shelf, content) VALUES (?, ?, ?)", (digest, shelf, content))
        kinds[kind.name] = kinds.get(kind.name, 0) + size
        return Receipt(digest, new=True)

    def _shelf(self, kind: ReportKind, hour: int, size: int) -> int:
        row = self._db.execute(
            "INSERT INTO shelf (site, kind, description, hour, reports, bytes) VALUES (?, ?, ?, ?, 1, ?)"
            " ON CONFLICT (kind, hour) DO UPDATE SET reports = reports + 1, bytes = bytes + excluded.bytes"
            " RETURNING shelf",
            (kind.terms.site, kind.name, kind.describe(), hour, size),
        ).fetchone()
        return int(row[0])


def _fits(kinds: Mapping[str, int], kind: str, size: int, quota: int) -> bool:
    """Return whether a site's quota has space for `size` bytes more of a kind.

    Each kind that is stored keeps a sixteenth of the quota to itself, and so does the next that comes: junk of other
    kinds cannot keep honest devices out.
    """
    share = quota // MAX_KINDS
    all_kinds = {*kinds, kind}
    if len(all_kinds) > MAX_KINDS:
        return False
    kept = sum(max(0, share - kinds[other]) for other in kinds if other != kind)
    kept += share if len(all_kinds) < MAX_KINDS else 0
    return sum(kinds.values()) + size + kept <= quota


class StoreReader:
    """Read access to a collector's folder, also while the collector runs."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE_NAME
        if not self.path.exists():
            raise TrefoilError(
                f"{folder} holds no collected reports",
                "Name the folder of trefoil collect.",
                kind=ErrorKind.FILE_MISSING,
            )
        with _translate_errors(self.path):
            self._db = sqlite3.connect(f"{self.path.absolute().as_uri()}?mode=ro", uri=True, timeout=5)
            _check(self._db, self.path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._db.close()

    def shelves(self) -> list[Shelf]:
        """Return all shelves, ordered by site, kind and hour."""
        with _translate_errors(self.path):
            rows = self._db.execute(
                "SELECT shelf, site, kind, description, hour, reports FROM shelf ORDER BY site, kind, hour"
            ).fetchall()
        return [Shelf(*row) for row in rows]

    def report(self, digest: bytes) -> SealedReport | None:
        with _translate_errors(self.path):
            row = self._db.execute("SELECT content FROM report WHERE digest = ?", (digest,)).fetchone()
        return None if row is None else SealedReport.decode(row[0])

    def reports(self, shelves: Sequence[int]) -> Iterator[SealedReport]:
        """Yield the reports of some shelves, in order of arrival."""
        with _translate_errors(self.path):
            for shelf in shelves:
                for (content,) in self._db.execute(
                    "SELECT content FROM report WHERE shelf = ? ORDER BY place", (shelf,)
                ):
                    yield SealedReport.decode(content)


@contextmanager
def _translate_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.DatabaseError as error:
        raise TrefoilError(
            f"{path} cannot be used: {error}",
            "Check the disk, and that no other collector uses the folder.",
            kind=ErrorKind.FILE_DAMAGED,
        ) from None


def _check_or_make(db: sqlite3.Connection, path: Path) -> None:
    if db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
        _check(db, path)
        return
    db.executescript(
        f"BEGIN; {_SCHEMA} PRAGMA application_id={_APPLICATION_ID}; PRAGMA user_version={_VERSION}; COMMIT;"
    )


def _check(db: sqlite3.Connection, path: Path) -> None:
    version = (db.execute("PRAGMA application_id").fetchone()[0], db.execute("PRAGMA user_version").fetchone()[0])
    if version != (_APPLICATION_ID, _VERSION):
        message = f"{path} is not a collector's file of version {_VERSION}"
        raise TrefoilError(message, "Name another folder.", kind=ErrorKind.UNKNOWN_VERSION)

"""The reports on disk: one SQLite file, each report exactly once, filed by site, kind and hour.

A report is known by its digest, so a device that posts again after a lost answer adds nothing. Contents stay sealed:
what is read is the public header.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from protocol.collector.kind import ReportKind
from protocol.collector.limits import CollectorLimits, NotTaken, Refused
from protocol.errors import TrefoilError
from protocol.header import Header
from protocol.report import SealedReport
from protocol.seconds import DAY

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


# What a report takes on disk besides its own bytes: rows and indexes, and for one that fills pages of its own the rest
# of the last page. Measured with reports that all have shelves of their own, then rounded up.
_BESIDES, _LARGE, _PAGE = 512, 2000, 4096


def room_for(size: int) -> int:
    """How much of a site's room a report of `size` bytes takes."""
    return size + _BESIDES + (_PAGE if size > _LARGE else 0)


@dataclass(frozen=True, slots=True)
class Shelf:
    """All reports of one kind and hour; `room` is what they take of the disk."""

    number: int
    site: str
    kind: str
    description: str
    hour: int
    reports: int
    room: int


@dataclass(frozen=True, slots=True)
class Filed:
    """What became of one report: stored now, or known before."""

    digest: bytes
    new: bool


class ReportStore:
    """Held by one collector at a time for writing; `open_for_reading` may look at it meanwhile."""

    def __init__(self, folder: Path, limits: CollectorLimits) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.path = folder / FILE_NAME
        self._limits = limits
        self._lock = threading.Lock()
        with _clear_errors(self.path):
            self._db = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False, timeout=5)
            self.path.chmod(0o600)
            self._db.executescript("PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL; PRAGMA foreign_keys=ON;")
            # A burst of large reports makes the log long once; it must not stay so.
            self._db.execute(f"PRAGMA journal_size_limit={_LOG_BYTES}")
            _check_or_make(self._db, self.path)
            held = self._db.execute("SELECT site, sum(bytes) FROM shelf GROUP BY site").fetchall()
        # The room taken, by site: what is asked for every report need not be asked of the disk.
        self._held: dict[str, int] = dict(held)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._db.close()

    def add(self, reports: Sequence[tuple[Header, SealedReport]]) -> list[Filed | NotTaken]:
        """File many reports in one durable transaction. Each has its own outcome; a failing disk refuses all."""
        with self._lock, _clear_errors(self.path):
            held = dict(self._held)
            self._db.execute("BEGIN IMMEDIATE")
            try:
                outcomes = [self._file(header, report, held) for header, report in reports]
                self._db.execute("COMMIT")
            except BaseException:
                with suppress(sqlite3.Error):
                    self._db.execute("ROLLBACK")
                raise
            self._held = held
            return outcomes

    def forget(self, now: int) -> int:
        """Remove reports that helpers would refuse for their age. Gives how many."""
        with self._lock, _clear_errors(self.path):
            oldest = now - self._limits.lifetime_days * DAY
            self._db.execute("BEGIN IMMEDIATE")
            try:
                gone = "SELECT shelf FROM shelf WHERE hour <= ?"
                removed = self._db.execute(f"DELETE FROM report WHERE shelf IN ({gone})", (oldest,)).rowcount  # noqa: S608  (constant)
                self._db.execute("DELETE FROM shelf WHERE hour <= ?", (oldest,))
                self._db.execute("COMMIT")
            except BaseException:
                with suppress(sqlite3.Error):
                    self._db.execute("ROLLBACK")
                raise
            self._held = dict(self._db.execute("SELECT site, sum(bytes) FROM shelf GROUP BY site").fetchall())
            return removed

    def _file(self, header: Header, report: SealedReport, held: dict[str, int]) -> Filed | NotTaken:
        digest, content, site = report.digest, report.encode(), header.terms.site
        if self._db.execute("SELECT 1 FROM report WHERE digest = ?", (digest,)).fetchone():
            return Filed(digest, new=False)
        room = room_for(len(content))
        if held.get(site, 0) + room > self._limits.site_bytes:
            return NotTaken(Refused.SITE_FULL, f"{site} has used its room", "Its oldest reports expire first.")
        if sum(held.values()) + room > self._limits.total_bytes:
            return NotTaken(Refused.FULL, "this collector is full", "Post it again later.")
        shelf = self._shelf(header, room)
        self._db.execute("INSERT INTO report (digest, shelf, content) VALUES (?, ?, ?)", (digest, shelf, content))
        held[site] = held.get(site, 0) + room
        return Filed(digest, new=True)

    def _shelf(self, header: Header, room: int) -> int:
        kind = ReportKind.of(header)
        row = self._db.execute(
            "INSERT INTO shelf (site, kind, description, hour, reports, bytes) VALUES (?, ?, ?, ?, 1, ?)"
            " ON CONFLICT (kind, hour) DO UPDATE SET reports = reports + 1, bytes = bytes + excluded.bytes"
            " RETURNING shelf",
            (kind.site, kind.name, kind.describe(), header.terms.time, room),
        ).fetchone()
        return int(row[0])


class StoreReader:
    """A look at a collector's reports, also while it runs."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE_NAME
        if not self.path.exists():
            raise TrefoilError(f"{folder} holds no collected reports", "Name the folder of trefoil collect.")
        with _clear_errors(self.path):
            self._db = sqlite3.connect(f"{self.path.absolute().as_uri()}?mode=ro", uri=True, timeout=5)
            _check(self._db, self.path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._db.close()

    def shelves(self) -> list[Shelf]:
        """Everything that is there, by site, kind and hour."""
        with _clear_errors(self.path):
            rows = self._db.execute(
                "SELECT shelf, site, kind, description, hour, reports, bytes FROM shelf ORDER BY site, kind, hour"
            ).fetchall()
        return [Shelf(*row) for row in rows]

    def report(self, digest: bytes) -> SealedReport | None:
        """One report, if it is there."""
        with _clear_errors(self.path):
            row = self._db.execute("SELECT content FROM report WHERE digest = ?", (digest,)).fetchone()
        return None if row is None else SealedReport.decode(row[0])

    def reports(self, shelves: Sequence[int]) -> Iterator[SealedReport]:
        """The reports of some shelves, in the order they came."""
        with _clear_errors(self.path):
            for shelf in shelves:
                for (content,) in self._db.execute(
                    "SELECT content FROM report WHERE shelf = ? ORDER BY place", (shelf,)
                ):
                    yield SealedReport.decode(content)


@contextmanager
def _clear_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.DatabaseError as error:
        raise TrefoilError(
            f"{path} cannot be used: {error}", "Check the disk, and that no other collector uses the folder."
        ) from None


def _check_or_make(db: sqlite3.Connection, path: Path) -> None:
    if db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
        _check(db, path)
        return
    db.executescript(
        f"BEGIN; {_SCHEMA} PRAGMA application_id={_APPLICATION_ID}; PRAGMA user_version={_VERSION}; COMMIT;"
    )


def _check(db: sqlite3.Connection, path: Path) -> None:
    found = (db.execute("PRAGMA application_id").fetchone()[0], db.execute("PRAGMA user_version").fetchone()[0])
    if found != (_APPLICATION_ID, _VERSION):
        raise TrefoilError(f"{path} is not a collector's file of version {_VERSION}", "Name another folder.")

"""The file of a device database: how it is created, and how it is validated before it is touched."""

from __future__ import annotations

import os
import sqlite3
import struct
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import quote

from device.errors import DatabaseError, DatabaseUnavailable
from device.stores.instance import InstanceToken, fresh_token, last_report_beside
from protocol.errors import ErrorKind, TrefoilError

APPLICATION_ID = 0x54464C31  # "TFL1"
VERSION = 4
_HEADER_SIZE = 100
_SQLITE_MAGIC = b"SQLite format 3\0"
_TRANSIENT = {
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_CANTOPEN,
}
_DAMAGE = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}

_TABLES = """
CREATE TABLE device (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    token BLOB NOT NULL,
    counter INTEGER NOT NULL,
    debug INTEGER NOT NULL,
    epoch_length INTEGER NOT NULL,
    enabled INTEGER NOT NULL,
    epoch_start INTEGER,
    barrier INTEGER
);
CREATE TABLE impression (
    id INTEGER PRIMARY KEY,
    time INTEGER NOT NULL,
    expires INTEGER NOT NULL,
    site TEXT NOT NULL,
    caller TEXT NOT NULL,
    histogram_index INTEGER NOT NULL,
    match_value INTEGER NOT NULL,
    priority INTEGER NOT NULL,
    conversion_sites TEXT NOT NULL,
    conversion_callers TEXT NOT NULL
);
CREATE INDEX impression_time ON impression (time);
-- One row for all epochs of a filter, so that a call touches as many rows for one epoch as for twenty
-- (PrivacyFilter.encode).
CREATE TABLE filter (
    kind INTEGER NOT NULL,
    site TEXT NOT NULL,
    paid BLOB NOT NULL,
    PRIMARY KEY (kind, site)
) WITHOUT ROWID;
CREATE TABLE log (id INTEGER PRIMARY KEY, time INTEGER NOT NULL, record BLOB NOT NULL);
CREATE TABLE action (
    action TEXT NOT NULL,
    site TEXT NOT NULL,
    time INTEGER NOT NULL,
    PRIMARY KEY (action, site)
) WITHOUT ROWID;
CREATE TABLE conversion (
    id INTEGER PRIMARY KEY,
    time INTEGER NOT NULL,
    expires INTEGER NOT NULL,
    site TEXT NOT NULL,
    caller TEXT NOT NULL,
    label INTEGER NOT NULL,
    publishers TEXT NOT NULL
);
CREATE INDEX conversion_time ON conversion (time);
CREATE TABLE service (name TEXT PRIMARY KEY, signed_set BLOB NOT NULL) WITHOUT ROWID;
-- What was chosen at creation, by the names of `DeviceLimits`; whatever is absent has its default.
CREATE TABLE setting (name TEXT PRIMARY KEY, value NOT NULL) WITHOUT ROWID;
"""
Settings = Mapping[str, int | str]


def create_database(
    path: Path,
    *,
    epoch_length: int,
    epoch_start: int | None = None,
    debug: bool = False,
    settings: Settings | None = None,
) -> None:
    """Create a database at `path` atomically, under another name, and link it into place.

    Debug and epochs are fixed here; without a start, the first lookup fixes it. If an earlier database at this path was
    lost and left its token, the epochs it may have charged stay closed.
    """
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(unfinished, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
    except OSError as error:
        raise TrefoilError(f"cannot create {path}: {error.strerror}", kind=ErrorKind.FILE_UNWRITABLE) from None
    try:
        token = fresh_token()
        _fill(unfinished, (token, debug, epoch_length, epoch_start, last_report_beside(path)), settings or {})
        _link(unfinished, path)
        instance = InstanceToken(path)
        instance.replace(token, 0)
        instance.close()
    except sqlite3.Error as error:
        raise TrefoilError(
            f"cannot create {path}: {error}", "Is the disk full?", kind=ErrorKind.FILE_UNWRITABLE
        ) from None
    finally:
        unfinished.unlink(missing_ok=True)


def _fill(path: Path, row: tuple[bytes, bool, int, int | None, int | None], settings: Settings) -> None:
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        connection.executescript(
            f"PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {VERSION}; {_TABLES}"
        )
        connection.execute(
            "INSERT INTO device (one, token, counter, debug, epoch_length, enabled, epoch_start, barrier)"
            " VALUES (1, ?, 0, ?, ?, 1, ?, ?)",
            row,
        )
        connection.executemany("INSERT INTO setting VALUES (?, ?)", settings.items())
        # Only now, so that version and tables are in the file itself and not in a log beside it.
        connection.execute("PRAGMA journal_mode = WAL")
    finally:
        connection.close()


def check_header(path: Path) -> None:
    """Raise unless the first bytes say SQLite, this program, and a supported version. Does not open the database."""
    try:
        with path.open("rb") as file:
            header = file.read(_HEADER_SIZE)
    except FileNotFoundError:
        raise DatabaseError(
            f"there is no device database at {path}",
            "Make one: trefoil device create --db FILE",
            kind=ErrorKind.FILE_MISSING,
        ) from None
    except OSError as error:
        raise DatabaseError(f"cannot read {path}: {error.strerror}", kind=ErrorKind.FILE_UNREADABLE) from None
    if len(header) < _HEADER_SIZE or not header.startswith(_SQLITE_MAGIC):
        raise damaged(path, "it is not a database")
    (version,) = struct.unpack_from(">I", header, 60)
    (application,) = struct.unpack_from(">I", header, 68)
    if application != APPLICATION_ID:
        raise DatabaseError(
            f"{path} is a database of another program",
            "Choose another file; this one was not touched.",
            kind=ErrorKind.WRONG_FILE,
        )
    check_version(path, version)


def check_version(path: Path, version: int) -> None:
    """Raise unless the file has this program's format."""
    if version != VERSION:
        raise DatabaseError(
            f"{path} has format {version}; this program knows format {VERSION}",
            "Use the program that wrote it, or a newer one. The file was not touched.",
            kind=ErrorKind.UNKNOWN_VERSION,
        )


def connect(path: Path, wait: float) -> sqlite3.Connection:
    """Return a connection that waits for locks at most `wait` seconds and commits durably."""
    try:
        connection = sqlite3.connect(path, timeout=wait, isolation_level=None, check_same_thread=False)
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA secure_delete = ON")
    except sqlite3.Error as error:
        raise refusal(path, error) from None
    return connection


def inspect(path: Path, wait: float, epoch_length: int) -> bool:
    """Validate the file. Return whether it is a debug device's.

    Raise on a damaged file, and on another epoch length than its own, which would restart its filters from zero.
    """
    with _reading(path, wait) as connection:
        verdict = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
        row = connection.execute("SELECT epoch_length, debug FROM device").fetchone()
    if verdict != "ok" or row is None:
        raise damaged(path, verdict if row else "its settings are missing")
    if row[0] != epoch_length:
        raise DatabaseError(
            f"{path} has epochs of {row[0]} seconds, not {epoch_length}",
            "Use its own limits.",
            kind=ErrorKind.INCONSISTENT,
        )
    return bool(row[1])


def read_settings(path: Path) -> Settings:
    """Return what was chosen when the database was created."""
    with _reading(path, wait=2.0) as connection:
        return dict(connection.execute("SELECT name, value FROM setting ORDER BY name"))


@contextmanager
def _reading(path: Path, wait: float) -> Iterator[sqlite3.Connection]:
    """Open a file of this program read-only."""
    check_header(path)
    try:
        with closing(sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True, timeout=wait)) as connection:
            yield connection
    except sqlite3.Error as error:
        raise refusal(path, error) from None


def refusal(path: Path, error: sqlite3.Error) -> TrefoilError:
    """Return the error for an SQLite error: transient, damaged, or a defect of this program."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code in _TRANSIENT:
        return DatabaseUnavailable(f"{path} cannot be used now: {error}", "Check the disk, and retry.")
    if code in _DAMAGE:
        return damaged(path, error)
    hint = "The file was not changed. Please report this."
    return DatabaseError(f"{path} cannot be used: {error}", hint, kind=ErrorKind.UNAVAILABLE)


def damaged(path: Path, why: object) -> DatabaseError:
    return DatabaseError(
        f"{path} is damaged: {why}", "The file was not changed. Move it away to start afresh; do not restore a backup."
    )


def _link(unfinished: Path, path: Path) -> None:
    """Link the finished file into place: unlike renaming, this never replaces a file."""
    try:
        path.hardlink_to(unfinished)
    except FileExistsError:
        raise TrefoilError(
            f"{path} exists already", "Choose another file, or use this one.", kind=ErrorKind.FILE_EXISTS
        ) from None
    except OSError as error:
        raise TrefoilError(f"cannot create {path}: {error.strerror}", kind=ErrorKind.FILE_UNWRITABLE) from None

"""The device database on disk: how one is made, and how a file is known to be a good one before it is touched."""

from __future__ import annotations

import os
import sqlite3
import struct
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

from device.errors import DatabaseError, DatabaseUnavailable
from device.instance import InstanceToken, fresh_token, last_report_beside
from protocol.errors import TrefoilError

APPLICATION_ID = 0x54464C31  # "TFL1"
VERSION = 3
_HEADER_SIZE = 100
_SQLITE_MAGIC = b"SQLite format 3\0"
_NOT_NOW = {
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
"""
_CONVERSION = (
    """
CREATE TABLE conversion (
    id INTEGER PRIMARY KEY,
    time INTEGER NOT NULL,
    expires INTEGER NOT NULL,
    site TEXT NOT NULL,
    caller TEXT NOT NULL,
    label INTEGER NOT NULL,
    publishers TEXT NOT NULL
)""",
    "CREATE INDEX conversion_time ON conversion (time)",
)
_SERVICE = ("CREATE TABLE service (name TEXT PRIMARY KEY, signed_set BLOB NOT NULL) WITHOUT ROWID",)
# What makes a file of each version one of the next. Nothing that an older program wrote is touched.
_UPGRADES = {1: _CONVERSION, 2: _SERVICE}


def create_database(path: Path, *, epoch_length: int, epoch_start: int | None, debug: bool) -> None:
    """A new database at `path`, complete or not at all: it is made under another name and linked into place.

    Where another one was lost and left its token, what that one may have spent stays closed.
    """
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(unfinished, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
    except OSError as error:
        raise TrefoilError(f"cannot create {path}: {error.strerror}") from None
    try:
        token = fresh_token()
        _fill(unfinished, (token, debug, epoch_length, epoch_start, last_report_beside(path)))
        _link(unfinished, path)
        instance = InstanceToken(path)
        instance.replace(token, 0)
        instance.close()
    except sqlite3.Error as error:
        raise TrefoilError(f"cannot create {path}: {error}", "Is the disk full?") from None
    finally:
        unfinished.unlink(missing_ok=True)


def _fill(path: Path, row: tuple[bytes, bool, int, int | None, int | None]) -> None:
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        connection.executescript(
            f"PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {VERSION}; {_TABLES}"
        )
        for statement in (*_CONVERSION, *_SERVICE):
            connection.execute(statement)
        connection.execute(
            "INSERT INTO device (one, token, counter, debug, epoch_length, enabled, epoch_start, barrier)"
            " VALUES (1, ?, 0, ?, ?, 1, ?, ?)",
            row,
        )
        # Only now, so that version and tables are in the file itself and not in a log beside it.
        connection.execute("PRAGMA journal_mode = WAL")
    finally:
        connection.close()


def check_header(path: Path) -> None:
    """Look at the first bytes without opening the database: SQLite, ours, and of a version we know."""
    try:
        with path.open("rb") as file:
            header = file.read(_HEADER_SIZE)
    except FileNotFoundError:
        raise DatabaseError(
            f"there is no device database at {path}", "Make one: trefoil device create --db FILE"
        ) from None
    except OSError as error:
        raise DatabaseError(f"cannot read {path}: {error.strerror}") from None
    if len(header) < _HEADER_SIZE or not header.startswith(_SQLITE_MAGIC):
        raise damaged(path, "it is not a database")
    (version,) = struct.unpack_from(">I", header, 60)
    (application,) = struct.unpack_from(">I", header, 68)
    if application != APPLICATION_ID:
        raise DatabaseError(
            f"{path} is a database of another program", "Choose another file; this one was not touched."
        )
    if version not in _UPGRADES:
        check_version(path, version)


def check_version(path: Path, version: int) -> None:
    """Refuse a file that is not of this program's format."""
    if version != VERSION:
        raise DatabaseError(
            f"{path} has format {version}; this program knows format {VERSION}",
            "Use the program that wrote it, or a newer one. The file was not touched.",
        )


def upgrade(connection: sqlite3.Connection, path: Path) -> None:
    """Bring an older file to this version, whole or not at all: in one transaction, on disk when this returns."""
    try:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version == VERSION:
            return
        connection.execute("BEGIN IMMEDIATE")
        # Once more: another process may have done it while we waited.
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        while version in _UPGRADES:
            for statement in _UPGRADES[version]:
                connection.execute(statement)
            version += 1
        connection.execute(f"PRAGMA user_version = {version}")
        connection.execute("COMMIT")
    except sqlite3.Error as error:
        connection.close()
        raise refusal(path, error) from None


def connect(path: Path, wait: float) -> sqlite3.Connection:
    """A connection that waits for locks at most `wait` seconds and loses nothing it has committed."""
    try:
        connection = sqlite3.connect(path, timeout=wait, isolation_level=None, check_same_thread=False)
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA secure_delete = ON")
    except sqlite3.Error as error:
        raise refusal(path, error) from None
    return connection


def inspect(path: Path, wait: float, epoch_length: int) -> bool:
    """Look through the file on a connection that cannot write; whether it is a debug device's.

    Refuses a damaged file, and other epochs than its own: their filters would start again from zero.
    """
    check_header(path)
    try:
        with closing(sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True, timeout=wait)) as connection:
            verdict = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
            row = connection.execute("SELECT epoch_length, debug FROM device").fetchone()
    except sqlite3.Error as error:
        raise refusal(path, error) from None
    if verdict != "ok" or row is None:
        raise damaged(path, verdict if row else "its settings are missing")
    if row[0] != epoch_length:
        raise DatabaseError(f"{path} counts in epochs of {row[0]} seconds, not {epoch_length}", "Use its own limits.")
    return bool(row[1])


def refusal(path: Path, error: sqlite3.Error) -> TrefoilError:
    """What an error of SQLite means: not now, never again, or that this program asked for something it cannot do."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code in _NOT_NOW:
        return DatabaseUnavailable(f"{path} cannot be used now: {error}", "Check the disk, and try again.")
    if code in _DAMAGE:
        return damaged(path, error)
    return DatabaseError(f"{path} cannot be used: {error}", "It was left as it is. Please report this.")


def damaged(path: Path, why: object) -> DatabaseError:
    """The error for a file that cannot be trusted."""
    return DatabaseError(
        f"{path} is damaged: {why}", "It was left as it is. Move it away to start afresh; do not restore a backup."
    )


def _link(unfinished: Path, path: Path) -> None:
    """Give the finished file its name, unless the name is taken: unlike renaming, this never replaces a file."""
    try:
        path.hardlink_to(unfinished)
    except FileExistsError:
        raise TrefoilError(f"{path} exists already", "Choose another file, or use this one.") from None
    except OSError as error:
        raise TrefoilError(f"cannot create {path}: {error.strerror}") from None

"""The embedded engine: one SQLite file, created atomically, opened only by its owner, refused untouched if damaged."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from mpc_helpers.ledger.engine import (
    NEVER_RESTORE,
    OTHER_VERSION,
    LedgerClosed,
    LedgerConnection,
    LedgerError,
    LedgerOwner,
    check_chain,
    check_owner,
    damaged,
)
from mpc_helpers.ledger.schema import (
    AFTER,
    APPLICATION_ID,
    ELSEWHERE,
    FIRST_ATTEMPT,
    NEVER_PRUNED,
    NO_DAY,
    REPORTS,
    RULES,
    SCHEMA_VERSION,
    TABLES,
    UNDATED,
    Rule,
    reports_rules,
)
from protocol.errors import ErrorKind

# Four times SQLite's default. A batch of a large ledger touches many pages, each of which is found, checksummed in the
# log and copied back: larger ones are fewer. Pages of 32 KiB take less time still, and write twice as much for a small
# query. A file keeps the size that it was created with.
PAGE_BYTES = 2**14
# The write-ahead log is copied back when it has so many pages, and truncated between transactions to just above that.
# With the smaller pages of an older file it is copied back sooner.
_LOG_PAGES = 250
LOG_BYTES = 2**22
# The last format without days, which `upgrade` reads.
UNDATED_VERSION = 4
_MAGIC = b"SQLite format 3\x00"


class SqliteConnection(sqlite3.Connection):
    """A `LedgerConnection`, most of which the library's own is."""

    def begin(self) -> None:
        """Take the write lock before anything is read that could change meanwhile."""
        self.execute("BEGIN IMMEDIATE")

    def commit(self) -> None:
        """Commit and sync. Raises if no transaction is open any more, where the library's own would return."""
        self.execute("COMMIT")

    def roll_back(self) -> None:
        """Roll back, unless the file was closed meanwhile: closing rolls back, too."""
        with suppress(sqlite3.ProgrammingError):
            self.rollback()


class SqliteEngine:
    """The `LedgerEngine` of a ledger in a file."""

    places = (
        "WITH RECURSIVE places (place) AS"
        " (SELECT 0 WHERE :count > 0 UNION ALL SELECT place + 1 FROM places WHERE place + 1 < :count)"
    )

    def __init__(self, path: Path) -> None:
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    def exists(self) -> bool:
        """Return whether there is a file at the ledger's path."""
        return self.path.exists()

    def create(self, owner: LedgerOwner, ledger_id: bytes) -> None:
        """Create an empty ledger. Run once, with a helper's new keys; an existing file is never replaced."""
        with self.draft() as draft, draft.errors(), closing(draft._connect_new()) as db:
            # Before anything is written.
            db.execute(f"PRAGMA page_size = {PAGE_BYTES}")
            db.execute("PRAGMA journal_mode = WAL")
            db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            db.executescript("BEGIN;" + TABLES)
            db.execute("INSERT INTO ledger VALUES (1, ?, ?, ?, 0)", (ledger_id, owner.party, owner.identity_key))
            db.execute(FIRST_ATTEMPT, {"attempt": ELSEWHERE, "nobody": bytes(32), "newest": NEVER_PRUNED})
            self.add_reports_table(db, UNDATED)
            for rule in RULES:
                db.execute(_trigger(rule, "BEFORE"))
            db.execute("COMMIT")

    @contextmanager
    def draft(self) -> Iterator[SqliteEngine]:
        """Yield an engine for a temporary file that becomes this ledger's atomically when the block succeeds."""
        draft = self.path.with_name(self.path.name + ".new")
        for leftover in _files_of(draft):
            leftover.unlink(missing_ok=True)
        try:
            yield SqliteEngine(draft)
            # Closing writes the log back, but reports no error. What was not written would be removed with the log.
            if _size(draft.with_name(f"{draft.name}-wal")):
                message = f"the log of {draft} could not be written back"
                raise LedgerError(message, "Free disk space, and repeat it.", kind=ErrorKind.NO_SPACE)
            _sync(draft)
            os.link(draft, self.path)
            _sync(self.path.parent)
        except FileExistsError:
            message = f"{self.path} exists and is not replaced"
            raise LedgerError(message, NEVER_RESTORE, kind=ErrorKind.FILE_EXISTS) from None
        finally:
            for leftover in _files_of(draft):
                leftover.unlink(missing_ok=True)

    def open(self, owner: LedgerOwner) -> SqliteConnection:
        """Open the ledger of `owner`, locked by this process. A damaged, newer or foreign file is refused, untouched.

        Reads the file's header, the owner and the last moves, and nothing that grows with the ledger.
        """
        # Read-only first: closing a writable connection would checkpoint the log into a file we then refuse.
        self.check_readable(owner)
        with self.errors():
            return self._open_locked()

    def check_readable(self, owner: LedgerOwner) -> None:
        """Raise a `LedgerError` unless this is the ledger of `owner`, and no process has it open. Writes nothing."""
        self._check_header(SCHEMA_VERSION)
        with self.errors(), closing(_connect(self.path, "ro")) as db:
            check_owner(db, self, owner)
            check_chain(db, self)

    def _connect_new(self) -> SqliteConnection:
        self.path.touch(mode=0o600)
        return _connect(self.path, "rw")

    def _open_locked(self) -> SqliteConnection:
        db = _connect(self.path, "rw")
        try:
            db.execute("PRAGMA locking_mode = EXCLUSIVE")
            db.execute("PRAGMA journal_mode = WAL")
            # COMMIT.md: losing the last commit to a power cut is the same as restoring an old backup.
            db.execute("PRAGMA synchronous = FULL")
            # What is erased is overwritten, not only unlinked: sealed shares that were never released, most of all.
            db.execute("PRAGMA secure_delete = ON")
            db.execute("PRAGMA cache_size = -16384")
            # A large batch makes the log as long as all its reports; truncate it afterwards.
            db.execute(f"PRAGMA wal_autocheckpoint = {_LOG_PAGES}")
            db.execute(f"PRAGMA journal_size_limit = {LOG_BYTES}")
            db.begin()
            db.commit()
        except sqlite3.Error:
            db.close()
            raise
        return db

    def end_other_sessions(self, _: LedgerOwner) -> int:
        """Refuse: only a process of this host can have a file open, and the operator can stop that."""
        message = f"{self} is a file, which only processes of this host can have open"
        raise LedgerError(message, "Stop the process that has it open.", kind=ErrorKind.WRONG_FILE)

    def verify(self, connection: LedgerConnection) -> None:
        """Read every page of the file. Raise if one is damaged."""
        (verdict,) = connection.execute("PRAGMA quick_check(1)").fetchone()
        if verdict != "ok":
            raise damaged(self, verdict)

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Translate SQLite's errors into errors that an operator can act on."""
        try:
            yield
        except sqlite3.IntegrityError as error:
            raise LedgerError(f"the ledger {self} refused a change: {error}", kind=ErrorKind.REFUSED) from None
        except sqlite3.OperationalError as error:
            hint, kind = "Free disk space or repair the disk. Voted attempts resume by themselves.", ErrorKind.NO_SPACE
            if "locked" in str(error):
                hint, kind = "Another process has it open. Stop that helper first.", ErrorKind.BUSY
            raise LedgerError(f"cannot use the ledger {self}: {error}", hint, kind=kind) from None
        except sqlite3.ProgrammingError as error:
            raise LedgerClosed(f"the ledger {self} is not open: {error}") from None
        except sqlite3.DatabaseError as error:
            raise damaged(self, error) from None

    def erase_log(self, connection: LedgerConnection) -> None:
        """Checkpoint and truncate the log, so that erased data is gone from it too.

        Best effort: the move before it is durable, and SQLite checkpoints the log eventually anyway.
        """
        with suppress(sqlite3.Error):
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def upsert(self, connection: LedgerConnection, insert: str, update: str, values: Mapping[str, Any]) -> int:
        """Insert rows, or update those that exist. Return how many were either."""
        return connection.execute(insert + update, values).rowcount

    def add_reports_table(self, connection: LedgerConnection, table: str) -> None:
        """Create an empty table of reports with its triggers."""
        connection.execute(REPORTS.format(table=table))
        for rule in reports_rules(table):
            connection.execute(_trigger(rule, "AFTER"))

    def drop_reports_table(self, connection: LedgerConnection, table: str) -> None:
        """Drop a table of reports. Its triggers go with it."""
        connection.execute(f"DROP TABLE {table}")

    def measure(self) -> None:
        """Do nothing: the size of a file is at hand."""

    def sizes(self) -> tuple[int, int]:
        """Return the bytes of the file and its write-ahead log together, and of the log."""
        log = _size(self.path.with_name(f"{self.path.name}-wal"))
        return _size(self.path) + log, log

    def upgrade(self, owner: LedgerOwner) -> None:
        """Upgrade a ledger without days, in one transaction: killed at any moment, it is the old or the new one.

        No row is rewritten: a row does not say its report's day, so the old table becomes `undated`.
        """
        self._check_header(UNDATED_VERSION)
        with self.errors():
            with closing(_connect(self.path, "ro")) as db:
                check_owner(db, self, owner)
                self.verify(db)
                check_chain(db, self, recent=None)
            with closing(self._open_locked()) as db:
                db.begin()
                # Killed after its commit, the last run left the new version in the log, and the old in the header.
                if db.execute("PRAGMA user_version").fetchone() != (SCHEMA_VERSION,):
                    self._date(db)
                db.commit()

    def _date(self, db: sqlite3.Connection) -> None:
        """Make the tables and triggers of the new format around the old rows."""
        for (trigger,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall():
            db.execute(f"DROP TRIGGER {trigger}")
        # Every attempt used its reports up: released ones leave nothing, aborted ones all that the header says.
        db.execute("ALTER TABLE attempts ADD COLUMN whole INTEGER NOT NULL DEFAULT 1 CHECK (whole IN (0, 1))")
        db.execute("UPDATE attempts SET whole = 0 WHERE attempt = ?", (ELSEWHERE,))
        db.execute("ALTER TABLE reports RENAME TO undated")
        db.execute("ALTER TABLE undated ADD COLUMN before INTEGER")
        db.execute(f"ALTER TABLE undated ADD COLUMN after INTEGER NOT NULL DEFAULT 0 {AFTER}")
        db.execute("CREATE TABLE days (day INTEGER PRIMARY KEY, newest INTEGER NOT NULL)")
        for rule in reports_rules(UNDATED):
            db.execute(_trigger(rule, "AFTER"))
        for rule in RULES:
            db.execute(_trigger(rule, "BEFORE"))
        # Reports of peers have no upper bound here. All others are not later than the newest of their attempt.
        (newest,) = db.execute(
            "SELECT max(newest) FROM attempts WHERE attempt <> ? OR EXISTS (SELECT 1 FROM undated WHERE attempt = ?)",
            (ELSEWHERE, ELSEWHERE),
        ).fetchone()
        (watermark,) = db.execute("SELECT watermark FROM ledger").fetchone()
        if newest is not None and newest > watermark:
            db.execute("INSERT INTO days VALUES (?, ?)", (NO_DAY, newest))
        db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")

    def _check_header(self, wanted: int) -> None:
        try:
            with self.path.open("rb") as file:
                header = file.read(100)
        except FileNotFoundError:
            message = f"there is no ledger at {self}"
            raise LedgerError(message, NEVER_RESTORE, kind=ErrorKind.FILE_MISSING) from None
        except OSError as error:
            message = f"cannot read the ledger {self}: {error.strerror}"
            raise LedgerError(message, kind=ErrorKind.FILE_UNREADABLE) from None
        kind, version = int.from_bytes(header[68:72], "big"), int.from_bytes(header[60:64], "big")
        if len(header) < 100 or header[:16] != _MAGIC or kind != APPLICATION_ID:
            message = f"{self} is not a report ledger, or its header is damaged"
            raise LedgerError(message, NEVER_RESTORE, kind=ErrorKind.WRONG_FILE)
        if version != wanted:
            raise LedgerError(
                f"{self} is a ledger of version {version}; expected version {wanted}",
                _version_hint(version),
                kind=ErrorKind.UNKNOWN_VERSION,
            )


def _version_hint(version: int) -> str:
    if version == UNDATED_VERSION:
        return "Stop the helper, then upgrade its ledger: trefoil ledger upgrade"
    return "It needs no upgrade." if version == SCHEMA_VERSION else OTHER_VERSION


def _trigger(rule: Rule, when: str) -> str:
    return (
        f"CREATE TRIGGER {rule.name} {when} {rule.change.value} ON {rule.table} WHEN {rule.refused}"
        f" BEGIN SELECT RAISE(ABORT, '{rule.message}'); END"
    )


def _connect(path: Path, mode: str) -> SqliteConnection:
    uri = f"{path.absolute().as_uri()}?mode={mode}"
    # Calls are serialised by the ledger's own lock, so they may come from any thread.
    return sqlite3.connect(
        uri, uri=True, isolation_level=None, check_same_thread=False, timeout=1.0, factory=SqliteConnection
    )


def _files_of(path: Path) -> Iterator[Path]:
    return (path.with_name(path.name + suffix) for suffix in ("", "-wal", "-shm", "-journal"))


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

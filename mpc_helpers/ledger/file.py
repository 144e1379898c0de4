"""The ledger's file: created atomically, opened only by its owner, refused untouched if damaged or foreign."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from mpc_helpers.ledger.schema import APPLICATION_ID, ELSEWHERE, SCHEMA_VERSION, TABLES, TRIGGERS
from protocol.errors import ErrorKind, ProtocolError, TrefoilError
from protocol.wire import tagged_hash

LEDGER_ID_SIZE = 16
# Later than any report: what was spent elsewhere is never pruned.
NEVER_PRUNED = 2**62
# The write-ahead log is truncated to this between transactions: just above SQLite's checkpoint at 1,000 pages of 4 KiB.
LOG_BYTES = 2**22
_MAGIC = b"SQLite format 3\x00"
_NEVER_RESTORE = (
    "Never restore a ledger from a backup: rebuild it from both peers' entries, or retire this helper's keys."
)


class LedgerError(TrefoilError):
    """The ledger cannot be used, or refused a change; nothing was written."""

    kind = ErrorKind.UNAVAILABLE


class LedgerClosed(LedgerError):
    """The ledger was closed under a task that outlived it."""

    kind = ErrorKind.INTERRUPTED


@dataclass(frozen=True, slots=True)
class LedgerOwner:
    """The helper that a ledger belongs to."""

    party: int
    identity_key: bytes

    def __post_init__(self) -> None:
        if self.party not in (0, 1, 2) or len(self.identity_key) != 32:
            raise ProtocolError("a ledger belongs to helper 0, 1 or 2 and its 32-byte identity key")


@dataclass(frozen=True, slots=True)
class LedgerHead:
    """The head of a ledger's hash chain. Peers remember it, so that no ledger rolls back unnoticed."""

    ledger_id: bytes
    sequence: int
    digest: bytes

    def __post_init__(self) -> None:
        if len(self.ledger_id) != LEDGER_ID_SIZE or len(self.digest) != 32 or not (0 <= self.sequence < 2**63):
            raise ProtocolError("a ledger head is an id of 16 bytes, a sequence number and a digest of 32 bytes")


def first_head(ledger_id: bytes) -> bytes:
    """Return the chain's head before the first move."""
    return tagged_hash("ledger chain", ledger_id)


def next_head(head: bytes, sequence: int, attempt_id: bytes, state: str) -> bytes:
    """Return the chain's head after one more move."""
    return tagged_hash("ledger chain", head, sequence.to_bytes(8, "big"), attempt_id, state.encode())


@contextmanager
def translate_errors(path: Path) -> Iterator[None]:
    """Translate SQLite's errors about `path` into errors that an operator can act on."""
    try:
        yield
    except sqlite3.IntegrityError as error:
        raise LedgerError(f"the ledger {path} refused a change: {error}", kind=ErrorKind.REFUSED) from None
    except sqlite3.OperationalError as error:
        hint, kind = "Free disk space or repair the disk. Voted attempts resume by themselves.", ErrorKind.NO_SPACE
        if "locked" in str(error):
            hint, kind = "Another process has it open. Stop that helper first.", ErrorKind.BUSY
        raise LedgerError(f"cannot use the ledger {path}: {error}", hint, kind=kind) from None
    except sqlite3.ProgrammingError as error:
        raise LedgerClosed(f"the ledger {path} is not open: {error}") from None
    except sqlite3.DatabaseError as error:
        raise _damaged(path, error) from None


def create(path: Path, owner: LedgerOwner, ledger_id: bytes) -> None:
    """Create an empty ledger. Run once, with a helper's new keys; an existing file is never replaced."""
    with new_file(path) as draft, translate_errors(path), closing(_connect(draft, "rwc")) as db:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        db.executescript("BEGIN;" + TABLES)
        db.execute("INSERT INTO ledger VALUES (1, ?, ?, ?, 0)", (ledger_id, owner.party, owner.identity_key))
        nobody, reason = bytes(32), "spent before this ledger began"
        db.execute(
            "INSERT INTO attempts VALUES (?, ?, ?, ?, 0, NULL, ?, 'released', 0, NULL, ?, 1, NULL)",
            (ELSEWHERE, nobody, nobody, nobody, NEVER_PRUNED, reason),
        )
        for trigger in TRIGGERS:
            db.execute(trigger)
        db.execute("COMMIT")


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path that becomes `path` atomically when the block succeeds."""
    draft = path.with_name(path.name + ".new")
    for leftover in _files_of(draft):
        leftover.unlink(missing_ok=True)
    draft.touch(mode=0o600)
    try:
        yield draft
        _sync(draft)
        os.link(draft, path)
        _sync(path.parent)
    except FileExistsError:
        raise LedgerError(f"{path} exists and is not replaced", _NEVER_RESTORE, kind=ErrorKind.FILE_EXISTS) from None
    finally:
        for leftover in _files_of(draft):
            leftover.unlink(missing_ok=True)


def open_connection(path: Path, owner: LedgerOwner) -> sqlite3.Connection:
    """Open the ledger of `owner`, locked by this process. A damaged, newer or foreign file is refused, untouched."""
    # Read-only first: closing a writable connection would checkpoint the log into a file we then refuse.
    check_readable(path, owner)
    with translate_errors(path):
        db = _connect(path, "rw")
        try:
            db.execute("PRAGMA locking_mode = EXCLUSIVE")
            db.execute("PRAGMA journal_mode = WAL")
            # COMMIT.md: losing the last commit to a power cut is the same as restoring an old backup.
            db.execute("PRAGMA synchronous = FULL")
            # What is erased is overwritten, not only unlinked: sealed shares that were never released, most of all.
            db.execute("PRAGMA secure_delete = ON")
            db.execute("PRAGMA cache_size = -16384")
            # A large batch makes the log as long as all its reports; truncate it afterwards.
            db.execute(f"PRAGMA journal_size_limit = {LOG_BYTES}")
            db.execute("BEGIN IMMEDIATE")
            db.execute("COMMIT")
        except sqlite3.Error:
            db.close()
            raise
    return db


def check_readable(path: Path, owner: LedgerOwner) -> None:
    """Raise a `LedgerError` unless this is the whole ledger of `owner`, and no process has it open. Writes nothing."""
    _check_header(path)
    with translate_errors(path), closing(_connect(path, "ro")) as db:
        _check_owner(db, path, owner)
        _check_contents(db, path)


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    uri = f"{path.absolute().as_uri()}?mode={mode}"
    # Calls are serialised by the ledger's own lock, so they may come from any thread.
    return sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False, timeout=1.0)


def _check_header(path: Path) -> None:
    try:
        with path.open("rb") as file:
            header = file.read(100)
    except FileNotFoundError:
        raise LedgerError(f"there is no ledger at {path}", _NEVER_RESTORE, kind=ErrorKind.FILE_MISSING) from None
    except OSError as error:
        raise LedgerError(f"cannot read the ledger {path}: {error.strerror}", kind=ErrorKind.FILE_UNREADABLE) from None
    kind, version = int.from_bytes(header[68:72], "big"), int.from_bytes(header[60:64], "big")
    if len(header) < 100 or header[:16] != _MAGIC or kind != APPLICATION_ID:
        raise LedgerError(
            f"{path} is not a report ledger, or its header is damaged", _NEVER_RESTORE, kind=ErrorKind.WRONG_FILE
        )
    if version != SCHEMA_VERSION:
        raise LedgerError(
            f"{path} is a ledger of version {version}; this helper knows version {SCHEMA_VERSION}",
            "Run the version of Trefoil that wrote it.",
            kind=ErrorKind.UNKNOWN_VERSION,
        )


def _check_owner(db: sqlite3.Connection, path: Path, owner: LedgerOwner) -> None:
    party, identity_key = db.execute("SELECT party, identity_key FROM ledger").fetchone()
    if (party, identity_key) != (owner.party, owner.identity_key):
        raise LedgerError(
            f"{path} is the ledger of helper {party + 1} with another identity key",
            "A ledger belongs to its keys. Check the helper's configuration.",
            kind=ErrorKind.WRONG_KEY,
        )


def _check_contents(db: sqlite3.Connection, path: Path) -> None:
    (verdict,) = db.execute("PRAGMA quick_check(1)").fetchone()
    if verdict != "ok":
        raise _damaged(path, verdict)
    head = first_head(db.execute("SELECT ledger_id FROM ledger").fetchone()[0])
    last: dict[int, str] = {}
    moves = db.execute(
        "SELECT sequence, moves.attempt, attempt_id, moves.state, head FROM moves JOIN attempts USING (attempt)"
        " ORDER BY sequence"
    )
    for sequence, attempt, attempt_id, state, stored in moves:
        head = next_head(head, sequence, attempt_id, state)
        last[attempt] = state
        if head != stored:
            raise _damaged(path, f"move {sequence} breaks the chain")
    states = dict(db.execute("SELECT attempt, state FROM attempts WHERE attempt <> ?", (ELSEWHERE,)))
    if states != last:
        raise _damaged(path, "an attempt's state is not its last move")


def _damaged(path: Path, detail: object) -> LedgerError:
    return LedgerError(f"the ledger {path} is damaged: {detail}", _NEVER_RESTORE, kind=ErrorKind.FILE_DAMAGED)


def _files_of(path: Path) -> Iterator[Path]:
    return (path.with_name(path.name + suffix) for suffix in ("", "-wal", "-shm", "-journal"))


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

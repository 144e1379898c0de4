"""The seam between a ledger and its database: an embedded SQLite file, or PostgreSQL.

Every rule and every statement is written once, in SQL that both understand, with `?` and `:name` for values. An engine
does what they do differently: create and open a ledger, hold it exclusively, run transactions, translate errors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from mpc_helpers.ledger.schema import ELSEWHERE
from protocol.errors import ErrorKind, ProtocolError, TrefoilError
from protocol.wire import tagged_hash

LEDGER_ID_SIZE = 16
# How much of the chain is verified on opening: a bound, so that opening takes no longer as a ledger grows.
RECENT_MOVES = 1000
NEVER_RESTORE = (
    "Never restore a ledger from a backup: rebuild it from both peers' entries, or retire this helper's keys."
)
OTHER_VERSION = (
    "Run the version of Trefoil that wrote it. Or configure another place for the ledger, and rebuild it there from"
    " both peers' entries: trefoil ledger rebuild"
)


class LedgerError(TrefoilError):
    """The ledger cannot be used, or refused a change. Nothing is half written; a commit that failed may be durable."""

    kind = ErrorKind.UNAVAILABLE


class LedgerClosed(LedgerError):
    """The ledger was closed under a task that outlived it."""

    kind = ErrorKind.INTERRUPTED


class LedgerTakenOver(LedgerClosed):
    """Another process holds the ledger by now; this one never changes it again."""

    retryable = False
    kind = ErrorKind.FENCED

    def __init__(self, ledger: object) -> None:
        hint = "Start this helper again only to take the ledger back, when the other one has stopped."
        super().__init__(f"the ledger {ledger} was taken over by another process", hint)


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


class Cursor(Protocol):
    """The result of a statement."""

    @property
    def rowcount(self) -> int: ...

    def fetchone(self) -> Any: ...

    def fetchall(self) -> list[Any]: ...

    def __iter__(self) -> Iterator[Any]: ...


class LedgerConnection(Protocol):
    """An open ledger. Outside a transaction of `begin`, each statement is one."""

    def execute(self, statement: str, values: Sequence[Any] | Mapping[str, Any] = (), /) -> Cursor: ...

    def begin(self) -> None:
        """Begin a transaction under which nothing of the ledger changes, or raise if this process was fenced."""

    def commit(self) -> None:
        """Commit durably, or raise."""

    def roll_back(self) -> None:
        """Roll back, if a transaction is open. Never raises."""

    def interrupt(self) -> None:
        """Have the statement that another thread waits for fail; in PostgreSQL every later one, too."""

    def close(self) -> None: ...


class LedgerEngine(Protocol):
    """One ledger's database. `str` of an engine names the ledger to a person, without secrets."""

    # Yields the numbers 0 to :count - 1 as `places (place)`: a batch's digests are one value, read by place.
    places: str

    def exists(self) -> bool:
        """Return whether there is something where the ledger should be."""

    def create(self, owner: LedgerOwner, ledger_id: bytes) -> None:
        """Create an empty ledger atomically. An existing one is never replaced."""

    def draft(self) -> AbstractContextManager[LedgerEngine]:
        """Yield an engine whose ledger becomes this one atomically when the block succeeds."""

    def open(self, owner: LedgerOwner) -> LedgerConnection:
        """Open the ledger of `owner`, locked by this process. A damaged, newer or foreign one is refused, untouched."""

    def end_other_sessions(self, owner: LedgerOwner) -> int:
        """Fence the process that holds the ledger and end its sessions, where the database has sessions."""

    def check_readable(self, owner: LedgerOwner) -> None:
        """Raise a `LedgerError` unless this is the ledger of `owner`. Writes nothing and takes it from nobody."""

    def verify(self, connection: Any) -> None:
        """Verify what the database stores, in time that grows with it. Raise if it is damaged."""

    def errors(self) -> AbstractContextManager[None]:
        """Translate the database's errors into a `LedgerError` that an operator can act on."""

    def erase_log(self, connection: Any) -> None:
        """Remove erased data from the log too, best effort."""

    def upsert(self, connection: Any, insert: str, update: str, values: Mapping[str, Any]) -> int:
        """Insert rows, or update those that exist. Return how many were either.

        `insert` is a whole statement, and `update` what follows it for rows that exist: ON CONFLICT and the rest.
        """

    def add_reports_table(self, connection: Any, table: str) -> None:
        """Create an empty table of reports with its rules, in the current transaction."""

    def drop_reports_table(self, connection: Any, table: str) -> None:
        """Drop a table of reports with its rules, in the current transaction."""

    def measure(self) -> None:
        """Measure what `sizes` returns, where that takes a database's time."""

    def sizes(self) -> tuple[int, int]:
        """Return the bytes of the ledger with its log, and of the log. Never waits for a database."""


def first_head(ledger_id: bytes) -> bytes:
    """Return the chain's head before the first move."""
    return tagged_hash("ledger chain", ledger_id)


def next_head(head: bytes, sequence: int, attempt_id: bytes, state: str) -> bytes:
    """Return the chain's head after one more move."""
    return tagged_hash("ledger chain", head, sequence.to_bytes(8, "big"), attempt_id, state.encode())


def damaged(ledger: object, detail: object) -> LedgerError:
    """Return the error for a ledger that must not be used again."""
    return LedgerError(f"the ledger {ledger} is damaged: {detail}", NEVER_RESTORE, kind=ErrorKind.FILE_DAMAGED)


def check_owner(connection: LedgerConnection, ledger: object, owner: LedgerOwner) -> None:
    """Raise unless the ledger belongs to `owner`."""
    party, identity_key = connection.execute("SELECT party, identity_key FROM ledger").fetchone()
    if (party, identity_key) != (owner.party, owner.identity_key):
        raise LedgerError(
            f"{ledger} is the ledger of helper {party + 1} with another identity key",
            "A ledger belongs to its keys. Check the helper's configuration.",
            kind=ErrorKind.WRONG_KEY,
        )


def check_chain(connection: LedgerConnection, ledger: object, *, recent: int | None = RECENT_MOVES) -> None:
    """Verify the hash chain over the last `recent` moves, or all of them, and the states of their attempts."""
    (ledger_id,) = connection.execute("SELECT ledger_id FROM ledger").fetchone()
    (length,) = connection.execute("SELECT coalesce(max(sequence), 0) FROM moves").fetchone()
    start = 0 if recent is None else max(length - recent, 0)
    head = first_head(ledger_id)
    if start:
        (head,) = connection.execute("SELECT head FROM moves WHERE sequence = ?", (start,)).fetchone() or (b"",)
    moves = connection.execute(
        "SELECT sequence, moves.attempt, attempt_id, moves.state, head, attempts.state FROM moves"
        " JOIN attempts ON attempts.attempt = moves.attempt WHERE sequence > ? ORDER BY sequence",
        (start,),
    ).fetchall()
    last = _verify_moves(moves, head, ledger)
    if len(moves) != length - start:
        raise damaged(ledger, "a move is missing")
    if any(state != now for state, now in last.values()):
        raise damaged(ledger, "an attempt's state is not its last move")
    if not start:
        (recorded,) = connection.execute("SELECT count(*) FROM attempts WHERE attempt <> ?", (ELSEWHERE,)).fetchone()
        if recorded != len(last):
            raise damaged(ledger, "an attempt has no move")


def _verify_moves(
    moves: Iterable[tuple[int, int, bytes, str, bytes, str]], head: bytes, ledger: object
) -> dict[int, tuple[str, str]]:
    """Return each attempt's last state in the chain and in its own row."""
    last: dict[int, tuple[str, str]] = {}
    for sequence, attempt, attempt_id, state, stored, now in moves:
        head = next_head(head, sequence, attempt_id, state)
        if head != stored:
            raise damaged(ledger, f"move {sequence} breaks the chain")
        last[attempt] = (state, now)
    return last

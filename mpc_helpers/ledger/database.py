"""A ledger's open database, and the hash chain of its moves.

One caller at a time, one transaction for each change, failpoints around each commit. `Chain` and `PeerHeads` record how
far this ledger and each peer's have come; peers compare them, so that no ledger rolls back unnoticed (COMMIT.md, "A
lost ledger").
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from mpc_helpers.ledger.attempt import AttemptState, Failpoint
from mpc_helpers.ledger.engine import (
    Cursor,
    LedgerConnection,
    LedgerEngine,
    LedgerHead,
    LedgerOwner,
    first_head,
    next_head,
)

# How long closing waits for a statement in progress before it is interrupted.
CLOSE_SECONDS = 10.0
# How long a check waits for other callers before it looks whether they get on.
BUSY_SECONDS = 10.0


class Database:
    """Shared by everything that reads or writes one ledger; `failpoint` is called where COMMIT.md says."""

    def __init__(self, engine: LedgerEngine, owner: LedgerOwner, failpoint: Callable[[Failpoint], None]) -> None:
        self.engine = engine
        self.connection = engine.open(owner)
        self.failpoint = failpoint
        # Wall-clock and processor time spent on reports and moves since the ledger was opened, for metrics.
        self.seconds = 0.0
        self.cpu_seconds = 0.0
        # Statements that have ended. Each shows that the database responds.
        self.statements = 0
        self._lock = threading.RLock()
        self._committed: list[Callable[[], None]] = []

    def on_commit(self, call: Callable[[], None]) -> None:
        """Run `call` after the commit of the current transaction, under the lock. It must not raise."""
        self._committed.append(call)

    def close(self) -> None:
        """Close the connection. An open transaction is rolled back, as in a crash."""
        # A caller may wait for a database that hangs, and would hold the lock as long.
        if not self._lock.acquire(timeout=CLOSE_SECONDS):
            self.connection.interrupt()
            if not self._lock.acquire(timeout=CLOSE_SECONDS):
                # The end of the process closes it, which is a crash like any other.
                return
        try:
            self.connection.close()
        finally:
            self._lock.release()

    def check_held(self) -> None:
        """Raise unless the database responds and this process still holds the ledger. Changes nothing.

        A large batch keeps the lock for minutes. While its statements end, the database responds; the rest can wait.
        """
        ended = self.statements
        while not self._lock.acquire(timeout=BUSY_SECONDS):
            if self.statements != ended:
                return
        try:
            with self.reading():
                try:
                    self.connection.begin()
                finally:
                    self.connection.roll_back()
        finally:
            self._lock.release()

    def erase_log(self) -> None:
        """Remove erased data from the database's log too, best effort."""
        with self._lock:
            self.engine.erase_log(self.connection)

    @contextmanager
    def reading(self) -> Iterator[LedgerConnection]:
        """Hold the lock, and translate the database's errors."""
        with self._lock, self.engine.errors():
            yield _Counted(self)

    def value(self, query: str, *values: bytes | int) -> Any:
        """Return the single value that `query` selects."""
        with self.reading() as connection:
            return connection.execute(query, values).fetchone()[0]

    @contextmanager
    def timed(self) -> Iterator[LedgerConnection]:
        """Do as `reading`, and add to `seconds` and `cpu_seconds`."""
        with self.reading() as connection:
            began, began_cpu = time.perf_counter(), time.thread_time()
            try:
                yield connection
            finally:
                self.seconds += time.perf_counter() - began
                self.cpu_seconds += time.thread_time() - began_cpu

    @contextmanager
    def transaction(
        self, before: Failpoint | None = None, after: Failpoint | None = None
    ) -> Iterator[LedgerConnection]:
        """Run the block atomically; its effect is durable when the block has ended."""
        with self.timed() as connection:
            self._committed.clear()
            try:
                self.connection.begin()
                yield connection
                if before:
                    self.failpoint(before)
                self.connection.commit()
                for call in self._committed:
                    call()
            except BaseException:
                self.connection.roll_back()
                raise
        # Outside the lock: a test that stops the helper here closes the ledger.
        if after:
            self.failpoint(after)


class _Counted:
    """The connection of a database, which counts the statements that have ended."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._connection = database.connection

    def execute(self, statement: str, values: Sequence[Any] | Mapping[str, Any] = (), /) -> Cursor:
        cursor = self._connection.execute(statement, values)
        self._database.statements += 1
        return cursor

    def __getattr__(self, name: str) -> Any:
        """Return what only an engine knows of its own connection."""
        return getattr(self._connection, name)


class PeerHeads:
    """The `peer_heads` table: the last head seen of each peer's ledger."""

    def __init__(self, database: Database) -> None:
        self._database = database
        with database.reading() as connection:
            rows = connection.execute("SELECT party, ledger_id, sequence, head FROM peer_heads").fetchall()
        self._heads = {party: LedgerHead(*head) for party, *head in rows}

    def of(self, party: int) -> LedgerHead | None:
        """Return the last head seen of a peer's ledger."""
        return self._heads.get(party)

    def remember(self, party: int, head: LedgerHead) -> None:
        """Remember a head in memory. It is persisted with this ledger's next move, so no move outlives its cause."""
        self._heads[party] = head

    def save(self) -> None:
        """Persist the remembered heads now."""
        with self._database.transaction() as connection:
            self.write(connection)

    def write(self, connection: LedgerConnection) -> None:
        """Persist the remembered heads in the current transaction."""
        for party, head in list(self._heads.items()):
            row = (party, head.ledger_id, head.sequence, head.digest)
            connection.execute(
                "INSERT INTO peer_heads VALUES (?, ?, ?, ?) ON CONFLICT (party) DO UPDATE"
                " SET ledger_id = excluded.ledger_id, sequence = excluded.sequence, head = excluded.head",
                row,
            )

    def forget(self, party: int) -> None:
        """Forget a peer's head. Run by an operator who has verified that the peer's new ledger was rebuilt."""
        with self._database.transaction() as connection:
            self._heads.pop(party, None)
            connection.execute("DELETE FROM peer_heads WHERE party = ?", (party,))


class Chain:
    """The `moves` table: every move of every attempt, each hashed over the one before."""

    def __init__(self, database: Database, peer_heads: PeerHeads) -> None:
        self._database = database
        self._peer_heads = peer_heads
        self.ledger_id: bytes = database.value("SELECT ledger_id FROM ledger")
        self._head = self._read_head()

    @property
    def head(self) -> LedgerHead:
        """Return the head of the last committed move. Never blocks on a transaction."""
        return self._head

    def head_at(self, sequence: int) -> bytes | None:
        """Return the chain's head after move `sequence`, or None if there is no such move."""
        if sequence == 0:
            return first_head(self.ledger_id)
        with self._database.reading() as connection:
            row = connection.execute("SELECT head FROM moves WHERE sequence = ?", (sequence,)).fetchone()
        return row[0] if row else None

    def append(self, connection: LedgerConnection, attempt_id: bytes, state: AttemptState) -> None:
        """Append a move, and persist the peers' heads, in the transaction that makes it."""
        # Read from the table, not from `head`: one transaction may make several moves, and none is committed yet.
        last = self._read_head()
        head = LedgerHead(
            self.ledger_id, last.sequence + 1, next_head(last.digest, last.sequence + 1, attempt_id, state.value)
        )
        connection.execute(
            "INSERT INTO moves SELECT ?, attempt, ?, ? FROM attempts WHERE attempt_id = ?",
            (head.sequence, state.value, head.digest, attempt_id),
        )
        self._peer_heads.write(connection)
        # Not read again: a connection that is lost after the commit would have a durable move reported as failed.
        self._database.on_commit(lambda: setattr(self, "_head", head))

    def _read_head(self) -> LedgerHead:
        with self._database.reading() as connection:
            row = connection.execute("SELECT sequence, head FROM moves ORDER BY sequence DESC LIMIT 1").fetchone()
        sequence, digest = row or (0, first_head(self.ledger_id))
        return LedgerHead(self.ledger_id, sequence, digest)

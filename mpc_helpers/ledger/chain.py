"""How far ledgers have come: this one's chain of moves, and the furthest that each peer's chain was seen.

Peers compare the two, so that no ledger goes back unnoticed (COMMIT.md, "A lost ledger").
"""

from __future__ import annotations

import sqlite3

from mpc_helpers.ledger.attempt import AttemptState
from mpc_helpers.ledger.database import Database
from mpc_helpers.ledger.file import LedgerHead, first_head, next_head


class PeerHeads:
    """The `peer_heads` table."""

    def __init__(self, database: Database) -> None:
        self._database = database
        with database.reading() as connection:
            rows = connection.execute("SELECT party, ledger_id, sequence, head FROM peer_heads").fetchall()
        self._heads = {party: LedgerHead(*known) for party, *known in rows}

    def of(self, party: int) -> LedgerHead | None:
        """The furthest this helper has seen a peer's ledger."""
        return self._heads.get(party)

    def remember(self, party: int, head: LedgerHead) -> None:
        """Noted at once, and durable with this ledger's next move: nothing it made us do can be forgotten."""
        self._heads[party] = head

    def save(self) -> None:
        """Make what is remembered durable now."""
        with self._database.transaction() as connection:
            self.write(connection)

    def write(self, connection: sqlite3.Connection) -> None:
        """Make what is remembered durable with the transaction under way."""
        for party, head in list(self._heads.items()):
            row = (party, head.ledger_id, head.sequence, head.digest)
            connection.execute("INSERT OR REPLACE INTO peer_heads VALUES (?, ?, ?, ?)", row)

    def forget(self, party: int) -> None:
        """Run by an operator who has made sure that the peer's new ledger is a rebuilt one."""
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
        database.on_commit(self._refresh)

    @property
    def head(self) -> LedgerHead:
        """How far this ledger has come on disk. Never waits for a move that is under way."""
        return self._head

    def head_at(self, sequence: int) -> bytes | None:
        """The chain's head after move `sequence`, if the ledger came that far."""
        if sequence == 0:
            return first_head(self.ledger_id)
        with self._database.reading() as connection:
            row = connection.execute("SELECT head FROM moves WHERE sequence = ?", (sequence,)).fetchone()
        return row[0] if row else None

    def append(self, connection: sqlite3.Connection, attempt_id: bytes, state: AttemptState) -> None:
        """One more move, in the transaction that makes it, and with it what is remembered of the peers."""
        # Read from the table, not from `head`: one transaction may make several moves, and none is committed yet.
        last = self._read_head()
        digest = next_head(last.digest, last.sequence + 1, attempt_id, state.value)
        connection.execute(
            "INSERT INTO moves SELECT ?, attempt, ?, ? FROM attempts WHERE attempt_id = ?",
            (last.sequence + 1, state.value, digest, attempt_id),
        )
        self._peer_heads.write(connection)

    def _read_head(self) -> LedgerHead:
        with self._database.reading() as connection:
            row = connection.execute("SELECT sequence, head FROM moves ORDER BY sequence DESC LIMIT 1").fetchone()
        sequence, digest = row or (0, first_head(self.ledger_id))
        return LedgerHead(self.ledger_id, sequence, digest)

    def _refresh(self) -> None:
        self._head = self._read_head()

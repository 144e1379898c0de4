"""The report ledger: one helper's durable memory of which reports are spent, and of every attempt to spend them.

Each move of an attempt is one transaction that must change exactly one row (COMMIT.md); a report is locked exactly
while the attempt it points to is not aborted, so voting, releasing and freeing touch one row whatever the batch's size.
Methods block on the disk and may be called from any thread; each is atomic.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mpc_helpers.ledger import file as ledger_file
from mpc_helpers.ledger.attempt import DIGEST_SIZE, AttemptRecord, HeardVote, QueryName, Reservation, State, Step
from mpc_helpers.ledger.file import LEDGER_ID_SIZE, LedgerError, LedgerHead, Owner
from mpc_helpers.ledger.queries import QueryBook
from mpc_helpers.ledger.schema import ELSEWHERE
from protocol.batch import DigestRows, Digests
from protocol.vote import Vote

__all__ = ["Conflict", "Entries", "Fenced", "LedgerError", "LedgerHead", "Owner", "ReportLedger", "Standing"]

Standings = npt.NDArray[np.uint8]
# Digests in one statement: inserting takes half the time of one statement each, and larger ones are no faster.
_CHUNK = 500


class Standing(IntEnum):
    """What a ledger knows of a report, from the point of view of one query."""

    FREE = 0
    BUSY = 1
    SEEN = 2


class Fenced(LedgerError):
    """The attempt is no longer in the state this move starts from: whoever asked should be dead."""


class Conflict(LedgerError):
    """An accepted report cannot be reserved. The attempt is aborted, so that this helper may say NO to it."""


@dataclass(frozen=True, slots=True)
class Entries:
    """What one ledger hands out so that a peer can rebuild a lost one: every report that is not free, ascending."""

    watermark: int
    digests: Digests = field(repr=False)


class ReportLedger:
    """One helper's ledger, open and held by this process. `step` is called at each crash point of COMMIT.md."""

    def __init__(self, path: Path, owner: Owner, *, step: Callable[[Step], None] = lambda _: None) -> None:
        self.path = path
        self.owner = owner
        self._step = step
        # Spent on reports and moves since the ledger was opened, for whoever watches this helper.
        self.seconds = 0.0
        self._lock = threading.RLock()
        self._db = ledger_file.open_connection(path, owner)
        self.ledger_id: bytes = self._value("SELECT ledger_id FROM ledger")
        self._head = self._read_head()
        heads = self._db.execute("SELECT helper, ledger_id, sequence, head FROM peer_heads")
        self._peer_heads = {helper: LedgerHead(*known) for helper, *known in heads}
        self.queries = QueryBook(self._db, self._lock, path)

    @classmethod
    def create(cls, path: Path, owner: Owner, *, entropy: Callable[[int], bytes] = os.urandom) -> None:
        """Run when a helper's keys are made, and never to replace a ledger that was lost: see `rebuild`."""
        ledger_file.create(path, owner, entropy(LEDGER_ID_SIZE))

    @classmethod
    def rebuild(
        cls, path: Path, owner: Owner, entries: Sequence[Entries], *, entropy: Callable[[int], bytes] = os.urandom
    ) -> None:
        """After a loss: a new ledger that counts everything both peers hold as spent, or no ledger at all."""
        if len(entries) != 2:
            raise LedgerError(
                "a lost ledger is rebuilt from the entries of both peers", "Or retire this helper's keys."
            )
        with ledger_file.drafted(path) as draft:
            draft.unlink()
            cls.create(draft, owner, entropy=entropy)
            ledger = cls(draft, owner)
            try:
                for peer in entries:
                    ledger._import_as_spent(peer)
            finally:
                ledger.close()

    def close(self) -> None:
        """Let go of the file. An open transaction is rolled back, as in a crash."""
        with self._lock:
            self._db.close()

    # The moves of an attempt.

    def reserve(self, reservation: Reservation) -> list[bytes]:
        """→ reserved. Requires all three proposals. Gives the attempts it took reports from; else `Conflict`."""
        try:
            with self._transaction(Step.RESERVE_BEFORE_COMMIT, Step.RESERVE_AFTER_COMMIT):
                return self._point_reports(self._insert(reservation), reservation)
        except Conflict as conflict:
            # In one more transaction, so that the NO we then say is on disk and not from ignorance.
            with self._transaction(Step.GIVE_UP_BEFORE_COMMIT, Step.GIVE_UP_AFTER_COMMIT):
                self._insert(reservation)
                self._move(reservation.attempt_id, State.RESERVED, State.ABORTED, reason=str(conflict))
            raise

    def vote(self, attempt_id: bytes, sealed_share: bytes) -> None:
        """reserved → voted. Requires RESERVED from both peers and the MPC done; the share is sealed to the querier."""
        with self._transaction(Step.VOTE_BEFORE_COMMIT, Step.VOTE_AFTER_COMMIT):
            self._move(attempt_id, State.RESERVED, State.VOTED, share=sealed_share)

    def release(self, attempt_id: bytes, votes: Sequence[HeardVote]) -> None:
        """voted → released, with YES from both peers; on disk before the first byte of the share leaves."""
        with self._transaction(Step.RELEASE_BEFORE_COMMIT, Step.RELEASE_AFTER_COMMIT):
            self._move(attempt_id, State.VOTED, State.RELEASED, votes=votes)

    def renounce(self, attempt_id: bytes, votes: Sequence[HeardVote], reason: str) -> None:
        """voted → renounced, when a peer says NO; the reports stay locked."""
        with self._transaction(Step.RENOUNCE_BEFORE_COMMIT, Step.RENOUNCE_AFTER_COMMIT):
            self._move(attempt_id, State.VOTED, State.RENOUNCED, votes=votes, reason=reason)

    def free(self, attempt_id: bytes, votes: Sequence[HeardVote], reason: str) -> None:
        """renounced → aborted, with NO from both peers; the reports are free again."""
        with self._transaction(Step.FREE_BEFORE_COMMIT, Step.FREE_AFTER_COMMIT):
            self._move(attempt_id, State.RENOUNCED, State.ABORTED, votes=votes, reason=reason)

    def abort(self, attempt_id: bytes, reason: str) -> None:
        """reserved → aborted: deadline, error or conflict; the reports are free again."""
        with self._transaction(Step.GIVE_UP_BEFORE_COMMIT, Step.GIVE_UP_AFTER_COMMIT):
            self._move(attempt_id, State.RESERVED, State.ABORTED, reason=reason)

    def sweep(self) -> list[bytes]:
        """On start, before listening: every reserved attempt is aborted, for a worker that died can never vote."""
        self._step(Step.START_BEFORE_SWEEP)
        swept = [record.attempt_id for record in self.unsettled() if record.state is State.RESERVED]
        for attempt_id in swept:
            with self._transaction(Step.SWEEP_BEFORE_COMMIT, Step.SWEEP_AFTER_COMMIT):
                self._move(attempt_id, State.RESERVED, State.ABORTED, reason="the helper restarted")
        self._step(Step.START_AFTER_SWEEP)
        return swept

    def record_votes(self, attempt_id: bytes, votes: Sequence[HeardVote]) -> None:
        """Keep votes that move nothing, for a dispute."""
        with self._transaction(None, None):
            self._insert_votes(attempt_id, votes)

    # What the ledger knows.

    def lookup(self, digests: DigestRows, query_key: bytes) -> Standings:
        """The standing of each report for `query_key`; what that query may take from a larger one counts as free."""
        standings = np.zeros(len(digests), dtype=np.uint8)
        known: dict[int, Standing] = {}
        with self._timed():
            for index, chunk in enumerate(_chunks(digests)):
                held = dict(self._holders(chunk))
                for attempt in set(held.values()) - set(known):
                    known[attempt] = self._standing(attempt, query_key)
                if held:  # a digest may be in a batch twice
                    found = [known[held[digest]] if digest in held else Standing.FREE for digest in chunk]
                    standings[index * _CHUNK : index * _CHUNK + len(chunk)] = found
        return standings

    def record(self, attempt_id: bytes) -> AttemptRecord | None:
        """The attempt of this id, if this ledger ever held it."""
        records = self._records("attempt_id = ?", attempt_id)
        return records[0] if records else None

    def live(self, query_key: bytes) -> AttemptRecord | None:
        """The one attempt of this query that is not aborted."""
        records = self._records("query_key = ? AND state <> 'aborted'", query_key)
        return records[0] if records else None

    def unsettled(self) -> list[AttemptRecord]:
        """Every attempt that is neither released nor aborted."""
        return self._records("state IN ('reserved', 'voted', 'renounced')")

    def last_number(self, query_key: bytes) -> int:
        """The highest attempt number this query has used here; 0 if none."""
        number: int = self._value("SELECT coalesce(max(number), 0) FROM attempts WHERE query_key = ?", query_key)
        return number

    # Pruning: the watermark never goes back, and admission refuses reports at or below it.

    @property
    def watermark(self) -> int:
        """Reports of this time or before are refused: the ledger may have forgotten them."""
        watermark: int = self._value("SELECT watermark FROM ledger")
        return watermark

    def advance_watermark(self, time: int) -> int:
        """Forget the reports of attempts whose newest report is not after `time`. Gives how many were forgotten."""
        with self._transaction(None, None):
            self._db.execute("UPDATE ledger SET watermark = max(watermark, ?)", (time,))
            gone = "SELECT attempt FROM attempts WHERE newest <= (SELECT watermark FROM ledger)"
            return self._db.execute(f"DELETE FROM reports WHERE attempt IN ({gone})").rowcount  # noqa: S608  (constant)

    # The chain, and what is remembered of the peers' chains.

    @property
    def head(self) -> LedgerHead:
        """How far this ledger has come on disk. Never waits for a move that is under way."""
        return self._head

    def head_at(self, sequence: int) -> bytes | None:
        """The chain's head after move `sequence`, if the ledger came that far."""
        if sequence == 0:
            return ledger_file.first_head(self.ledger_id)
        with self._lock, ledger_file.clear_errors(self.path):
            row = self._db.execute("SELECT head FROM moves WHERE sequence = ?", (sequence,)).fetchone()
        return row[0] if row else None

    def peer_head(self, helper: int) -> LedgerHead | None:
        """The furthest this helper has seen a peer's ledger."""
        return self._peer_heads.get(helper)

    def remember_peer(self, helper: int, head: LedgerHead) -> None:
        """Noted at once, and durable with this ledger's next move: nothing it made us do can be forgotten."""
        self._peer_heads[helper] = head

    def save_peer_heads(self) -> None:
        """Make what is remembered of the peers durable now."""
        with self._transaction(None, None):
            self._write_heads()

    def forget_peer(self, helper: int) -> None:
        """Run by an operator who has made sure that the peer's new ledger is a rebuilt one."""
        with self._transaction(None, None):
            self._peer_heads.pop(helper, None)
            self._db.execute("DELETE FROM peer_heads WHERE helper = ?", (helper,))

    # Rebuilding a peer's lost ledger.

    def export_entries(self) -> Entries:
        """Every report that is not free here, and the watermark: what a peer that lost its ledger needs."""
        with self._lock, ledger_file.clear_errors(self.path):
            rows = self._db.execute(
                "SELECT digest FROM reports JOIN attempts USING (attempt) WHERE state <> 'aborted' ORDER BY digest"
            )
            held = b"".join(digest for (digest,) in rows)
            return Entries(self.watermark, np.frombuffer(held, dtype=np.uint8).reshape(-1, DIGEST_SIZE))

    def _import_as_spent(self, entries: Entries) -> None:
        with self._transaction(None, None):
            self._db.execute("UPDATE ledger SET watermark = max(watermark, ?)", (entries.watermark,))
            statement = "INSERT INTO reports VALUES (?, ?, NULL) ON CONFLICT DO NOTHING"
            self._db.executemany(
                statement, ((digest, ELSEWHERE) for chunk in _chunks(entries.digests) for digest in chunk)
            )

    # Inside a transaction.

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """One caller at a time, and how long it took."""
        with self._lock, ledger_file.clear_errors(self.path):
            began = time.perf_counter()
            try:
                yield
            finally:
                self.seconds += time.perf_counter() - began

    @contextmanager
    def _transaction(self, before: Step | None, after: Step | None) -> Iterator[None]:
        with self._timed():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                if before:
                    self._step(before)
                self._db.execute("COMMIT")
                self._head = self._read_head()
            except BaseException:
                with suppress(sqlite3.ProgrammingError):  # closed meanwhile, which rolls back as well
                    if self._db.in_transaction:
                        self._db.execute("ROLLBACK")
                raise
        if after:
            self._step(after)

    def _insert(self, reservation: Reservation) -> int:
        name = reservation.query
        cursor = self._db.execute(
            "INSERT INTO attempts (attempt_id, query_key, query_digest, number, debug, newest, state)"
            " VALUES (?, ?, ?, ?, ?, ?, 'reserved')",
            (
                reservation.attempt_id,
                name.key,
                name.digest,
                reservation.number,
                reservation.debug,
                reservation.newest,
            ),
        )
        self._append(reservation.attempt_id, State.RESERVED)
        if cursor.lastrowid is None:
            raise LedgerError("the ledger did not number the attempt")
        return cursor.lastrowid

    def _point_reports(self, attempt: int, reservation: Reservation) -> list[bytes]:
        """Point every accepted report at `attempt`, taking what may be taken. `Conflict` undoes the transaction."""
        if len(reservation.digests) and reservation.oldest <= self.watermark:
            raise Conflict("a report is not newer than the watermark any more")
        digests = reservation.digests
        missing = len(digests) - self._point(attempt, reservation)
        if not missing:
            return []
        taken = self._take_from(attempt, reservation.query.key, digests)
        if self._point(attempt, reservation) != missing:
            raise Conflict("a report is held by another query")
        return taken

    def _point(self, attempt: int, reservation: Reservation) -> int:
        # One pass: a digest that a live attempt holds is left alone and missing from the count.
        pointed = 0
        for index, chunk in enumerate(_chunks(reservation.digests)):
            kinds = reservation.debug_reports[index * _CHUNK : index * _CHUNK + len(chunk)].tolist()
            rows = ",".join(f"(?, {attempt:d}, {debug:d})" for debug in kinds)
            pointed += self._db.execute(
                f"INSERT INTO reports VALUES {rows}"  # noqa: S608  (integers)
                " ON CONFLICT (digest) DO UPDATE SET attempt = excluded.attempt"
                " WHERE (SELECT state FROM attempts WHERE attempt = reports.attempt) = 'aborted'",
                chunk,
            ).rowcount
        return pointed

    def _take_from(self, attempt: int, query_key: bytes, digests: DigestRows) -> list[bytes]:
        """COMMIT.md, "Conflicts": abort the reserved attempts of larger queries that are in this one's way."""
        holders = {holder for chunk in _chunks(digests) for _, holder in self._holders(chunk)} - {attempt}
        taken = []
        for holder in sorted(holders):
            if self._standing(holder, query_key) is not Standing.FREE:
                raise Conflict("a report is held by another query")
            (attempt_id,) = self._db.execute("SELECT attempt_id FROM attempts WHERE attempt = ?", (holder,)).fetchone()
            self._move(
                attempt_id, State.RESERVED, State.ABORTED, reason="its reports went to a query with a smaller id"
            )
            taken.append(attempt_id)
        return taken

    def _standing(self, attempt: int, query_key: bytes) -> Standing:
        row = self._db.execute("SELECT state, query_key FROM attempts WHERE attempt = ?", (attempt,)).fetchone()
        state = State(row[0])
        if state is State.RELEASED:
            return Standing.SEEN
        if state is State.ABORTED or (state is State.RESERVED and row[1] > query_key):
            return Standing.FREE
        return Standing.BUSY

    def _holders(self, chunk: list[bytes]) -> list[tuple[bytes, int]]:
        marks = ",".join("?" * len(chunk))
        return self._db.execute(f"SELECT digest, attempt FROM reports WHERE digest IN ({marks})", chunk).fetchall()  # noqa: S608  (only question marks)

    def _move(
        self,
        attempt_id: bytes,
        old: State,
        new: State,
        *,
        share: bytes | None = None,
        votes: Sequence[HeardVote] = (),
        reason: str = "",
    ) -> None:
        """The fence of COMMIT.md: exactly one row changes, or this caller acts on a state that is gone."""
        self._insert_votes(attempt_id, votes)
        changed = self._db.execute(
            "UPDATE attempts SET state = ?, sealed_share = coalesce(?, sealed_share), reason = ?"
            " WHERE attempt_id = ? AND state = ?",
            (new.value, share, reason, attempt_id, old.value),
        ).rowcount
        if changed != 1:
            raise Fenced(f"the attempt is not {old.value} any more, so it cannot become {new.value}")
        self._append(attempt_id, new)

    def _insert_votes(self, attempt_id: bytes, votes: Sequence[HeardVote]) -> None:
        for heard in votes:
            self._db.execute(
                "INSERT OR IGNORE INTO votes SELECT attempt, ?, ?, ? FROM attempts WHERE attempt_id = ?",
                (heard.helper, heard.vote.value, heard.message, attempt_id),
            )

    def _read_head(self) -> LedgerHead:
        row = self._db.execute("SELECT sequence, head FROM moves ORDER BY sequence DESC LIMIT 1").fetchone()
        sequence, digest = row or (0, ledger_file.first_head(self.ledger_id))
        return LedgerHead(self.ledger_id, sequence, digest)

    def _append(self, attempt_id: bytes, state: State) -> None:
        head = self._read_head()
        digest = ledger_file.next_head(head.digest, head.sequence + 1, attempt_id, state.value)
        self._db.execute(
            "INSERT INTO moves SELECT ?, attempt, ?, ? FROM attempts WHERE attempt_id = ?",
            (head.sequence + 1, state.value, digest, attempt_id),
        )
        self._write_heads()

    def _write_heads(self) -> None:
        for helper, head in list(self._peer_heads.items()):
            row = (helper, head.ledger_id, head.sequence, head.digest)
            self._db.execute("INSERT OR REPLACE INTO peer_heads VALUES (?, ?, ?, ?)", row)

    def _records(self, condition: str, *values: bytes) -> list[AttemptRecord]:
        columns = "attempt, attempt_id, query_key, query_digest, number, state, sealed_share, reason"
        with self._lock, ledger_file.clear_errors(self.path):
            # The conditions are constants of this module; values are bound.
            rows = self._db.execute(f"SELECT {columns} FROM attempts WHERE {condition} ORDER BY attempt", values)  # noqa: S608
            return [self._as_record(row) for row in rows.fetchall()]

    def _as_record(self, row: tuple[int, bytes, bytes, bytes, int, str, bytes | None, str]) -> AttemptRecord:
        attempt, attempt_id, key, digest, number, state, share, reason = row
        votes = self._db.execute("SELECT helper, vote, message FROM votes WHERE attempt = ?", (attempt,))
        heard = tuple(HeardVote(helper, Vote.of_text(vote), message) for helper, vote, message in votes)
        return AttemptRecord(attempt_id, QueryName(key, digest), number, State(state), share, reason, heard)

    def _value(self, query: str, *values: bytes) -> Any:
        with self._lock, ledger_file.clear_errors(self.path):
            return self._db.execute(query, values).fetchone()[0]


def _chunks(digests: DigestRows) -> Iterator[list[bytes]]:
    """As SQLite takes them, so many at a time that a batch of any size takes little memory."""
    for start in range(0, len(digests), _CHUNK):
        data = np.ascontiguousarray(digests[start : start + _CHUNK]).tobytes()
        yield [data[at : at + DIGEST_SIZE] for at in range(0, len(data), DIGEST_SIZE)]

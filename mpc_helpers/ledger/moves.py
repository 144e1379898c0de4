"""The moves of an attempt, and what the ledger knows of attempts.

Each move is one transaction that must change exactly one row (COMMIT.md). That is also the fence: whoever acts on a
state that is gone changes no row and is refused.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Sequence

from mpc_helpers.ledger.attempt import AttemptRecord, AttemptState, HeardVote, QueryName, Reservation, Step
from mpc_helpers.ledger.chain import Chain
from mpc_helpers.ledger.database import Database
from mpc_helpers.ledger.file import LedgerError
from mpc_helpers.ledger.reports import Conflict, Reports
from protocol.vote import Vote

_RESTARTED = "the helper restarted"
_TAKEN = "its reports went to a query with a smaller id"


class Fenced(LedgerError):
    """The attempt is no longer in the state this move starts from: whoever asked should be dead."""


class Attempts:
    """The `attempts` and `votes` tables, read."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def find(self, attempt_id: bytes) -> AttemptRecord | None:
        """The attempt of this id, if this ledger ever held it."""
        records = self._select("attempt_id = ?", attempt_id)
        return records[0] if records else None

    def live(self, query_key: bytes) -> AttemptRecord | None:
        """The one attempt of this query that is not aborted."""
        records = self._select("query_key = ? AND state <> 'aborted'", query_key)
        return records[0] if records else None

    def unsettled(self) -> list[AttemptRecord]:
        """Every attempt that is neither released nor aborted."""
        return self._select("state IN ('reserved', 'voted', 'renounced')")

    def last_number(self, query_key: bytes) -> int:
        """The highest attempt number this query has used here; 0 if none."""
        highest = "SELECT coalesce(max(number), 0) FROM attempts WHERE query_key = ?"
        number: int = self._database.value(highest, query_key)
        return number

    def draws(self, query_key: bytes) -> int:
        """How many attempts at this query came to nothing after their noise was drawn, or may have been."""
        failed = "SELECT count(*) FROM attempts WHERE query_key = ? AND state = 'aborted' AND drawn"
        count: int = self._database.value(failed, query_key)
        return count

    def gave_up(self, query_key: bytes) -> Counter[int]:
        """Which parties ended such attempts, by their own signed word, and how many each."""
        ended = (
            "SELECT party, count(*) FROM attempts JOIN votes USING (attempt)"
            " WHERE query_key = ? AND state = 'aborted' AND drawn AND vote = 'aborted' GROUP BY party"
        )
        with self._database.reading() as connection:
            return Counter(dict(connection.execute(ended, (query_key,)).fetchall()))

    def _select(self, condition: str, *values: bytes) -> list[AttemptRecord]:
        columns = "attempt, attempt_id, query_key, query_digest, number, state, voted, sealed_share, reason"
        with self._database.reading() as connection:
            # The conditions are constants of this class; values are bound.
            rows = connection.execute(f"SELECT {columns} FROM attempts WHERE {condition} ORDER BY attempt", values)  # noqa: S608
            return [_decode(connection, row) for row in rows.fetchall()]


def _decode(
    connection: sqlite3.Connection, row: tuple[int, bytes, bytes, bytes, int, str, int, bytes | None, str]
) -> AttemptRecord:
    attempt, attempt_id, key, digest, number, state, voted, share, reason = row
    votes = connection.execute("SELECT party, vote, message FROM votes WHERE attempt = ?", (attempt,))
    heard = tuple(HeardVote(party, Vote.of_text(vote), message) for party, vote, message in votes)
    name, now = QueryName(key, digest), AttemptState(state)
    return AttemptRecord(attempt_id, name, number, now, bool(voted), share, reason, heard)


class Moves:
    """The `attempts` and `votes` tables, written: one method for each move of COMMIT.md."""

    def __init__(self, database: Database, chain: Chain, reports: Reports, attempts: Attempts) -> None:
        self._database = database
        self._chain = chain
        self._reports = reports
        self._attempts = attempts
        # Reserved by this process, and no byte of its MPC was sent. What is not known to be so counts as drawn.
        self._before_mpc: set[bytes] = set()

    def reserve(self, reservation: Reservation) -> list[bytes]:
        """→ reserved. Requires all three proposals. Gives the attempts it took reports from; else `Conflict`."""
        try:
            with self._database.transaction(Step.RESERVE_BEFORE_COMMIT, Step.RESERVE_AFTER_COMMIT) as connection:
                return self._point_reports(connection, self._insert(connection, reservation), reservation)
        except Conflict as conflict:
            # In one more transaction, so that the NO we then say is on disk and not from ignorance.
            with self._database.transaction(Step.GIVE_UP_BEFORE_COMMIT, Step.GIVE_UP_AFTER_COMMIT) as connection:
                self._insert(connection, reservation)
                attempt_id = reservation.attempt_id
                self._move(connection, attempt_id, AttemptState.RESERVED, AttemptState.ABORTED, reason=str(conflict))
            raise

    def begin(self, attempt_id: bytes) -> None:
        """Before the first byte of the MPC: from here on the attempt counts as a draw, however it ends.

        Nothing is written, as the reservation has counted it already; but an abort takes that back until now.
        """
        with self._database.reading():
            if attempt_id not in self._before_mpc:
                raise Fenced("the attempt has ended, so its MPC cannot begin")
            self._before_mpc.remove(attempt_id)

    def vote(self, attempt_id: bytes, sealed_share: bytes) -> None:
        """reserved → voted. Requires RESERVED from both peers and the MPC done; the share is sealed to the querier."""
        with self._database.transaction(Step.VOTE_BEFORE_COMMIT, Step.VOTE_AFTER_COMMIT) as connection:
            self._move(connection, attempt_id, AttemptState.RESERVED, AttemptState.VOTED, share=sealed_share)

    def release(self, attempt_id: bytes, votes: Sequence[HeardVote]) -> None:
        """voted → released, with YES from both peers; on disk before the first byte of the share leaves."""
        with self._database.transaction(Step.RELEASE_BEFORE_COMMIT, Step.RELEASE_AFTER_COMMIT) as connection:
            self._move(connection, attempt_id, AttemptState.VOTED, AttemptState.RELEASED, votes=votes)

    def renounce(self, attempt_id: bytes, votes: Sequence[HeardVote], reason: str) -> None:
        """voted → renounced, when a peer says NO; the reports stay locked, and the share is erased."""
        with self._database.transaction(Step.RENOUNCE_BEFORE_COMMIT, Step.RENOUNCE_AFTER_COMMIT) as connection:
            self._move(connection, attempt_id, AttemptState.VOTED, AttemptState.RENOUNCED, votes=votes, reason=reason)
        self._database.forget_log()

    def free(self, attempt_id: bytes, votes: Sequence[HeardVote], reason: str) -> None:
        """renounced → aborted, with NO from both peers; the reports are free again."""
        with self._database.transaction(Step.FREE_BEFORE_COMMIT, Step.FREE_AFTER_COMMIT) as connection:
            self._move(connection, attempt_id, AttemptState.RENOUNCED, AttemptState.ABORTED, votes=votes, reason=reason)

    def abort(self, attempt_id: bytes, reason: str, votes: Sequence[HeardVote] = ()) -> None:
        """reserved → aborted: deadline, error, conflict, or a NO of a peer; the reports are free again."""
        with self._database.transaction(Step.GIVE_UP_BEFORE_COMMIT, Step.GIVE_UP_AFTER_COMMIT) as connection:
            self._move(connection, attempt_id, AttemptState.RESERVED, AttemptState.ABORTED, votes=votes, reason=reason)

    def forget_answer(self, query_key: bytes) -> None:
        """The share of a released attempt is kept no longer. The attempt stays released, and its reports spent."""
        with self._database.transaction() as connection:
            connection.execute(
                "UPDATE attempts SET sealed_share = NULL WHERE query_key = ? AND state = 'released'", (query_key,)
            )

    def sweep(self) -> list[bytes]:
        """On start, before listening: every reserved attempt is aborted, for a worker that died can never vote."""
        self._database.step(Step.START_BEFORE_SWEEP)
        unsettled = self._attempts.unsettled()
        swept = [record.attempt_id for record in unsettled if record.state is AttemptState.RESERVED]
        for attempt_id in swept:
            with self._database.transaction(Step.SWEEP_BEFORE_COMMIT, Step.SWEEP_AFTER_COMMIT) as connection:
                self._move(connection, attempt_id, AttemptState.RESERVED, AttemptState.ABORTED, reason=_RESTARTED)
        self._database.step(Step.START_AFTER_SWEEP)
        return swept

    def keep_votes(self, attempt_id: bytes, votes: Sequence[HeardVote]) -> None:
        """Keep votes that move nothing, for a dispute."""
        with self._database.transaction() as connection:
            _insert_votes(connection, attempt_id, votes)

    def _insert(self, connection: sqlite3.Connection, reservation: Reservation) -> int:
        name = reservation.query
        cursor = connection.execute(
            "INSERT INTO attempts"
            " (attempt_id, query_key, query_digest, number, debug, newest, most_draws, state, voted)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, 'reserved', 0)",
            (
                reservation.attempt_id,
                name.key,
                name.digest,
                reservation.number,
                reservation.debug,
                reservation.newest,
                reservation.most_draws,
            ),
        )
        self._before_mpc.add(reservation.attempt_id)
        self._chain.append(connection, reservation.attempt_id, AttemptState.RESERVED)
        if cursor.lastrowid is None:
            raise LedgerError("the ledger did not number the attempt")
        return cursor.lastrowid

    def _point_reports(self, connection: sqlite3.Connection, attempt: int, reservation: Reservation) -> list[bytes]:
        """Point every accepted report at `attempt`, taking what may be taken. `Conflict` undoes the transaction."""
        # Once more, though admission has looked: the watermark may have risen since, and the ledger forgotten.
        if len(reservation.digests) and reservation.oldest <= self._reports.watermark:
            raise Conflict("a report is not newer than the watermark any more")
        # And the noise may have been drawn for another query meanwhile.
        if self._reports.any_drawn_too_often(reservation):
            raise Conflict("a report was in as many draws as this query allows")
        missing = len(reservation.digests) - self._reports.point(connection, attempt, reservation)
        if not missing:
            return []
        taken = self._reports.in_the_way(connection, attempt, reservation)
        for attempt_id in taken:
            self._move(connection, attempt_id, AttemptState.RESERVED, AttemptState.ABORTED, reason=_TAKEN)
        # The second pass finds exactly those that the first had to leave, or something else holds one of them.
        if self._reports.point(connection, attempt, reservation) != missing:
            raise Conflict("a report is held by another query")
        return taken

    def _move(
        self,
        connection: sqlite3.Connection,
        attempt_id: bytes,
        old: AttemptState,
        new: AttemptState,
        *,
        share: bytes | None = None,
        votes: Sequence[HeardVote] = (),
        reason: str = "",
    ) -> None:
        """The fence of COMMIT.md: exactly one row changes, or this caller acts on a state that is gone."""
        # Votes first: the triggers count them when the state changes.
        _insert_votes(connection, attempt_id, votes)
        drawn = new is not AttemptState.ABORTED or attempt_id not in self._before_mpc
        self._before_mpc.discard(attempt_id)
        changed = connection.execute(
            "UPDATE attempts SET state = :new, voted = voted OR :new = 'voted', reason = :reason, drawn = :drawn,"
            # Kept on release alone: whatever else follows a vote, this share will never leave.
            " sealed_share = CASE WHEN :new = 'released' THEN sealed_share ELSE :share END"
            " WHERE attempt_id = :attempt_id AND state = :old",
            {
                "new": new.value,
                "share": share,
                "reason": reason,
                "drawn": drawn,
                "attempt_id": attempt_id,
                "old": old.value,
            },
        ).rowcount
        if changed != 1:
            raise Fenced(f"the attempt is not {old.value} any more, so it cannot become {new.value}")
        self._chain.append(connection, attempt_id, new)


def _insert_votes(connection: sqlite3.Connection, attempt_id: bytes, votes: Sequence[HeardVote]) -> None:
    for heard in votes:
        connection.execute(
            "INSERT OR IGNORE INTO votes SELECT attempt, ?, ?, ? FROM attempts WHERE attempt_id = ?",
            (heard.party, heard.vote.value, heard.message, attempt_id),
        )

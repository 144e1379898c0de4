"""Attempts in the ledger: their records, and the moves (state transitions) between their states.

Each move is one transaction that must change exactly one row (COMMIT.md). That is also the fence: a stale actor changes
no row and is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from mpc_helpers.ledger.attempt import AttemptRecord, AttemptState, Failpoint, QueryName, ReceivedVote, Reservation
from mpc_helpers.ledger.database import Chain, Database
from mpc_helpers.ledger.engine import LedgerConnection, LedgerError
from mpc_helpers.ledger.reports import Conflict, Reports
from mpc_helpers.ledger.share_keys import ShareKeys
from protocol.errors import ErrorKind
from protocol.vote import Vote

_RESTARTED = "the helper restarted"
_TAKEN = "its reports went to a query with a smaller key"


class Fenced(LedgerError):
    """The attempt is no longer in the state this move starts from: the caller is stale."""

    kind = ErrorKind.FENCED


class Attempts:
    """The `attempts` and `votes` tables, read."""

    def __init__(self, database: Database, share_keys: ShareKeys) -> None:
        self._database = database
        self._share_keys = share_keys

    def find(self, attempt_id: bytes) -> AttemptRecord | None:
        """Return the attempt of this id, if this ledger ever held it."""
        records = self._select("attempt_id = ?", attempt_id)
        return records[0] if records else None

    def live(self, query_key: bytes) -> AttemptRecord | None:
        """Return the one attempt of this query that is not aborted."""
        records = self._select("query_key = ? AND state <> 'aborted'", query_key)
        return records[0] if records else None

    def released(self, query_key: bytes) -> AttemptRecord | None:
        """Return the query's released attempt while its sealed share is kept."""
        records = self._select("query_key = ? AND state = 'released' AND sealed_share IS NOT NULL", query_key)
        return records[0] if records else None

    def stores_share(self, attempt_id: bytes) -> bool:
        """Return whether the share of this attempt is stored, with its key or without."""
        stored = "SELECT count(*) FROM attempts WHERE attempt_id = ? AND sealed_share IS NOT NULL"
        return bool(self._database.value(stored, attempt_id))

    def pending(self) -> list[AttemptRecord]:
        """Return every attempt that is neither released nor aborted."""
        return self._select("state IN ('reserved', 'voted', 'renounced')")

    def last_number(self, query_key: bytes) -> int:
        """Return the highest attempt number this query has used here; 0 if none."""
        highest = "SELECT coalesce(max(number), 0) FROM attempts WHERE query_key = ?"
        number: int = self._database.value(highest, query_key)
        return number

    def draws(self, query_key: bytes) -> int:
        """Return the number of aborted attempts that consumed a noise draw (pessimistic after a crash). Durable."""
        failed = "SELECT count(*) FROM attempts WHERE query_key = ? AND state = 'aborted' AND drawn = 1"
        count: int = self._database.value(failed, query_key)
        return count

    def aborts_by_party(self, query_key: bytes) -> Counter[int]:
        """Return how many such attempts each party aborted, by its signed votes."""
        ended = (
            "SELECT party, count(*) FROM attempts JOIN votes USING (attempt)"
            " WHERE query_key = ? AND state = 'aborted' AND drawn = 1 AND vote = 'aborted' GROUP BY party"
        )
        with self._database.reading() as connection:
            return Counter(dict(connection.execute(ended, (query_key,)).fetchall()))

    def voted_since(self, party: int, sequence: int) -> bool:
        """Return whether `party` voted YES, or may have, for an attempt that was reserved here after move `sequence`.

        A YES is stored with the move that it allows. While this ledger holds an attempt as voted or renounced, it may
        have been received and not stored, and the attempt may still be released.
        """
        later = (
            "SELECT count(*) FROM moves JOIN attempts ON attempts.attempt = moves.attempt"
            " WHERE moves.state = 'reserved' AND moves.sequence > ? AND (attempts.state IN ('voted', 'renounced')"
            " OR EXISTS (SELECT 1 FROM votes"
            " WHERE votes.attempt = moves.attempt AND votes.party = ? AND votes.vote = 'yes'))"
        )
        return bool(self._database.value(later, sequence, party))

    def _select(self, condition: str, *values: bytes) -> list[AttemptRecord]:
        columns = "attempt, attempt_id, query_key, query_digest, number, state, voted, sealed_share, reason"
        with self._database.reading() as connection:
            # The conditions are constants of this class; values are bound.
            rows = connection.execute(f"SELECT {columns} FROM attempts WHERE {condition} ORDER BY attempt", values)  # noqa: S608
            return [self._decode(connection, row) for row in rows.fetchall()]

    def _decode(
        self, connection: LedgerConnection, row: tuple[int, bytes, bytes, bytes, int, str, int, bytes | None, str]
    ) -> AttemptRecord:
        attempt, attempt_id, key, digest, number, state, voted, stored, reason = row
        votes = connection.execute("SELECT party, vote, message FROM votes WHERE attempt = ?", (attempt,))
        received = tuple(ReceivedVote(party, Vote.of_text(vote), message) for party, vote, message in votes)
        name, now, share = QueryName(key, digest), AttemptState(state), self._share_keys.open(attempt_id, stored)
        return AttemptRecord(attempt_id, name, number, now, bool(voted), share, reason, received)


class Moves:
    """The `attempts` and `votes` tables, written: one method for each move of COMMIT.md."""

    def __init__(
        self, database: Database, chain: Chain, reports: Reports, attempts: Attempts, share_keys: ShareKeys
    ) -> None:
        self._database = database
        self._share_keys = share_keys
        self._chain = chain
        self._reports = reports
        self._attempts = attempts
        # Attempts reserved by this process of whose MPC no byte was sent, and whether it may still begin. Any other
        # attempt counts as drawn.
        self._before_mpc: dict[bytes, bool] = {}

    def reserve(self, reservation: Reservation) -> list[bytes]:
        """Reserve (→ reserved). Requires all three proposals. Return the attempts it preempted, or raise `Conflict`."""
        try:
            with self._database.transaction(
                Failpoint.RESERVE_BEFORE_COMMIT, Failpoint.RESERVE_AFTER_COMMIT
            ) as connection:
                taken = self._point_reports(connection, self._insert(connection, reservation), reservation)
        except Conflict as conflict:
            # In another transaction, so that our NO is backed by a durable record.
            with self._database.transaction(
                Failpoint.GIVE_UP_BEFORE_COMMIT, Failpoint.GIVE_UP_AFTER_COMMIT
            ) as connection:
                self._insert(connection, reservation)
                attempt_id = reservation.attempt_id
                self._move(connection, attempt_id, AttemptState.RESERVED, AttemptState.ABORTED, reason=str(conflict))
            self._forget([attempt_id])
            raise
        self._end(taken)
        return taken

    def begin(self, attempt_id: bytes) -> None:
        """Mark the point of no return for the draw count, before the first byte of the MPC.

        `reserve` counted the draw; `abort` uncounts it only if `begin` was not called. In memory only.
        """
        with self._database.reading():
            if not self._before_mpc.get(attempt_id):
                raise Fenced("the attempt has ended, so its MPC cannot begin")
            del self._before_mpc[attempt_id]

    def vote(self, attempt_id: bytes, sealed_share: bytes) -> None:
        """Vote (reserved → voted), after RESERVED from both peers and the MPC. The share is sealed to the querier."""
        share = self._share_keys.seal(attempt_id, sealed_share)
        with self._database.transaction(Failpoint.VOTE_BEFORE_COMMIT, Failpoint.VOTE_AFTER_COMMIT) as connection:
            self._move(connection, attempt_id, AttemptState.RESERVED, AttemptState.VOTED, share=share)

    def release(self, attempt_id: bytes, votes: Sequence[ReceivedVote]) -> None:
        """Release (voted → released), with YES from both peers. Durable before the first byte of the share is sent."""
        with self._database.transaction(Failpoint.RELEASE_BEFORE_COMMIT, Failpoint.RELEASE_AFTER_COMMIT) as connection:
            self._move(connection, attempt_id, AttemptState.VOTED, AttemptState.RELEASED, votes=votes)

    def renounce(self, attempt_id: bytes, votes: Sequence[ReceivedVote], reason: str) -> None:
        """Renounce (voted → renounced), when a peer voted NO. The reports stay locked, and the share is erased."""
        with self._database.transaction(
            Failpoint.RENOUNCE_BEFORE_COMMIT, Failpoint.RENOUNCE_AFTER_COMMIT
        ) as connection:
            self._move(connection, attempt_id, AttemptState.VOTED, AttemptState.RENOUNCED, votes=votes, reason=reason)
        self._share_keys.erase(attempt_id)
        self._database.erase_log()

    def free(self, attempt_id: bytes, votes: Sequence[ReceivedVote], reason: str) -> None:
        """Free (renounced → aborted), with NO from both peers. The reports are free again."""
        with self._database.transaction(Failpoint.FREE_BEFORE_COMMIT, Failpoint.FREE_AFTER_COMMIT) as connection:
            self._move(connection, attempt_id, AttemptState.RENOUNCED, AttemptState.ABORTED, votes=votes, reason=reason)

    def abort(self, attempt_id: bytes, reason: str, votes: Sequence[ReceivedVote] = ()) -> None:
        """Abort (reserved → aborted): deadline, error, conflict, or a peer's NO. The reports are free again."""
        with self._database.transaction(Failpoint.GIVE_UP_BEFORE_COMMIT, Failpoint.GIVE_UP_AFTER_COMMIT) as connection:
            self._move(connection, attempt_id, AttemptState.RESERVED, AttemptState.ABORTED, votes=votes, reason=reason)
        self._end([attempt_id])

    def forget_answer(self, query_key: bytes) -> None:
        """Erase the share of a released attempt. It stays released, and its reports spent."""
        live = self._attempts.live(query_key)
        with self._database.transaction() as connection:
            connection.execute(
                "UPDATE attempts SET sealed_share = NULL WHERE query_key = ? AND state = 'released'", (query_key,)
            )
        if live is not None and live.state is AttemptState.RELEASED:
            self._share_keys.erase(live.attempt_id)

    def sweep(self) -> list[bytes]:
        """Abort every reserved attempt. Run on start, before listening: a worker that died can never vote."""
        self._database.failpoint(Failpoint.START_BEFORE_SWEEP)
        pending = self._attempts.pending()
        swept = [record.attempt_id for record in pending if record.state is AttemptState.RESERVED]
        for attempt_id in swept:
            with self._database.transaction(Failpoint.SWEEP_BEFORE_COMMIT, Failpoint.SWEEP_AFTER_COMMIT) as connection:
                self._move(connection, attempt_id, AttemptState.RESERVED, AttemptState.ABORTED, reason=_RESTARTED)
        self._forget(swept)
        self._share_keys.erase_unless(self._attempts.stores_share)
        self._database.failpoint(Failpoint.START_AFTER_SWEEP)
        return swept

    def keep_votes(self, attempt_id: bytes, votes: Sequence[ReceivedVote]) -> None:
        """Persist votes that allow no move, as evidence in a dispute."""
        with self._database.transaction() as connection:
            _insert_votes(connection, attempt_id, votes)

    def _insert(self, connection: LedgerConnection, reservation: Reservation) -> int:
        name = reservation.query
        (attempt,) = connection.execute("SELECT max(attempt) + 1 FROM attempts").fetchone()
        connection.execute(
            "INSERT INTO attempts"
            " (attempt, attempt_id, query_key, query_digest, number, debug, newest, most_draws, whole, state, voted)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, 'reserved', 0)",
            (
                attempt,
                reservation.attempt_id,
                name.key,
                name.digest,
                reservation.number,
                int(reservation.debug),
                reservation.newest,
                reservation.most_draws,
                int(reservation.whole),
            ),
        )
        self._before_mpc[reservation.attempt_id] = True
        self._chain.append(connection, reservation.attempt_id, AttemptState.RESERVED)
        return int(attempt)

    def _point_reports(self, connection: LedgerConnection, attempt: int, reservation: Reservation) -> list[bytes]:
        """Point every accepted report at `attempt`, preempting attempts with larger keys. `Conflict` rolls back."""
        # Checked at admission already, but the watermark may have risen since, and reports been pruned.
        if len(reservation.digests) and reservation.oldest <= self._reports.watermark:
            raise Conflict("a report is not newer than the watermark any more", kind=ErrorKind.EXPIRED)
        # Another query may have drawn noise for them meanwhile.
        if self._reports.any_drawn_too_often(reservation):
            raise Conflict("a report was in as many draws as this query allows", kind=ErrorKind.REFUSED)
        missing = len(reservation.digests) - self._reports.point(connection, attempt, reservation)
        if not missing:
            return []
        taken = self._reports.conflicting_attempts(connection, attempt, reservation)
        for attempt_id in taken:
            self._move(connection, attempt_id, AttemptState.RESERVED, AttemptState.ABORTED, reason=_TAKEN)
        # The second pass points exactly those that the first could not, unless another attempt holds one of them.
        if self._reports.point(connection, attempt, reservation) != missing:
            raise Conflict("a report is held by another query")
        return taken

    def _move(
        self,
        connection: LedgerConnection,
        attempt_id: bytes,
        old: AttemptState,
        new: AttemptState,
        *,
        share: bytes | None = None,
        votes: Sequence[ReceivedVote] = (),
        reason: str = "",
    ) -> None:
        """Change exactly one row, or raise `Fenced`: the caller acts on a stale state."""
        # Votes first: the triggers count them when the state changes.
        _insert_votes(connection, attempt_id, votes)
        drawn = new is not AttemptState.ABORTED or attempt_id not in self._before_mpc
        if drawn:
            self._forget([attempt_id])
        else:
            # Its MPC must not begin from here on: a commit that is reported as failed may be durable. Until it is
            # known to be, the attempt is not forgotten, or the retry would count a draw that nobody made.
            self._before_mpc[attempt_id] = False
        changed = connection.execute(
            "UPDATE attempts SET state = :new, reason = :reason, drawn = :drawn,"
            " voted = CASE WHEN :new = 'voted' THEN 1 ELSE voted END,"
            # Kept on release only: after any other move this share will never be sent.
            " sealed_share = CASE WHEN :new = 'released' THEN sealed_share ELSE :share END"
            " WHERE attempt_id = :attempt_id AND state = :old",
            {
                "new": new.value,
                "share": share,
                "reason": reason,
                "drawn": int(drawn),
                "attempt_id": attempt_id,
                "old": old.value,
            },
        ).rowcount
        if changed != 1:
            self._forget([attempt_id])
            raise Fenced(f"the attempt is not {old.value} any more, so it cannot become {new.value}")
        self._chain.append(connection, attempt_id, new)

    def _forget(self, attempt_ids: Iterable[bytes]) -> None:
        for attempt_id in attempt_ids:
            self._before_mpc.pop(attempt_id, None)

    def _end(self, attempt_ids: Sequence[bytes]) -> None:
        """Forget attempts that were aborted, with the keys of shares that a vote sealed and could not store."""
        self._forget(attempt_ids)
        for attempt_id in attempt_ids:
            self._share_keys.erase(attempt_id)


def _insert_votes(connection: LedgerConnection, attempt_id: bytes, votes: Sequence[ReceivedVote]) -> None:
    for received in votes:
        connection.execute(
            "INSERT INTO votes SELECT attempt, ?, ?, ? FROM attempts WHERE attempt_id = ? ON CONFLICT DO NOTHING",
            (received.party, received.vote.value, received.message, attempt_id),
        )

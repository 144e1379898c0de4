"""Phase two: from the vote to the release, or to the abort that frees the reports (COMMIT.md).

A YES vote promises that this helper's sealed share can be released. It is released only with YES from both peers,
renounced when one votes NO, and freed only when both have voted NO. Until then `OutcomePoller` asks the peers, without
a timeout: a participant in doubt must not decide alone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import assert_never

from mpc_helpers.agreement.messages import Ask, Body, StateMessage
from mpc_helpers.agreement.negotiation import Disputed
from mpc_helpers.agreement.peers import Context, Parties, RetryPolicy
from mpc_helpers.ledger.attempt import (
    AttemptOutcome,
    AttemptRecord,
    AttemptState,
    Failpoint,
    ReceivedVote,
    VoteStatus,
    equivocators_among,
    vote_status,
)
from mpc_helpers.ledger.engine import LedgerClosed, LedgerError
from mpc_helpers.ledger.moves import Fenced
from protocol.errors import ErrorKind, ProtocolError
from protocol.net.listening import RateLimitFilter, cancel_all
from protocol.vote import SignedVote, Vote

logger = logging.getLogger(__name__)
# A malicious peer can have messages rejected without end. Alarms are errors, and always pass.
logger.addFilter(RateLimitFilter(burst=10, unlimited=logging.ERROR))


def state_message(parties: Parties, attempt_id: bytes, record: AttemptRecord | None) -> StateMessage:
    """Return the STATE for an attempt: this helper's vote status, with the votes that prove it."""
    status = vote_status(record.state if record else None)
    if record is None or status in (VoteStatus.WORKING, VoteStatus.UNKNOWN):
        return StateMessage(attempt_id, status, ())
    return StateMessage(attempt_id, status, (_own_vote(parties, record), *_supporting_votes(record)))


def _own_vote(parties: Parties, record: AttemptRecord) -> SignedVote:
    # The two NO votes differ: only ABORTED states that this helper never voted YES, and so can prove equivocation.
    no = Vote.RENOUNCED if record.voted_once else Vote.ABORTED
    return parties.sign_vote(record.attempt_id, Vote.YES if vote_status(record.state) is VoteStatus.YES else no)


def _supporting_votes(record: AttemptRecord) -> list[SignedVote]:
    """Return the peers' votes to attach to a STATE message.

    Both YES if released; the original ABORTED vote if this helper renounced (required) or aborted (so that a third
    helper that was told YES learns of the equivocation).
    """
    if record.state is AttemptState.RELEASED:
        return [SignedVote.decode(vote.message) for vote in record.votes if vote.vote is Vote.YES]
    if vote_status(record.state) is VoteStatus.NO:
        return [SignedVote.decode(vote.message) for vote in record.votes if vote.vote is Vote.ABORTED][:1]
    return []


def verify_votes(parties: Parties, sender: int, state: StateMessage) -> list[ReceivedVote]:
    """Return the peers' votes in a STATE, verified. A RENOUNCED vote needs the ABORTED vote that caused it."""
    for vote in state.votes:
        parties.verify_vote(vote)
    own = [vote.vote for vote in state.votes if vote.party == sender]
    aborted_by = {vote.party for vote in state.votes if vote.vote is Vote.ABORTED}
    if state.status is VoteStatus.YES and own != [Vote.YES]:
        raise ProtocolError("a YES without the sender's own vote", kind=ErrorKind.BAD_PROOF)
    if state.status is VoteStatus.NO and not (aborted_by and len(own) == 1 and own[0].is_no):
        raise ProtocolError("a NO without the original ABORTED vote", kind=ErrorKind.BAD_PROOF)
    if parties.party in aborted_by:
        return []  # An echo of this helper's own NO, which its ledger holds already.
    others = (vote for vote in state.votes if vote.party != parties.party)
    return [ReceivedVote(vote.party, vote.vote, vote.encode()) for vote in others]


def _abort_reason(nos: Iterable[ReceivedVote]) -> str:
    parties = sorted({vote.party + 1 for vote in nos if vote.vote is Vote.ABORTED})
    return f"helper {' and '.join(map(str, parties))} aborted it" if parties else ""


class OutcomePoller:
    """Polls both peers for the outcome of each voted attempt. `ask_once` returns whether the attempt has ended."""

    def __init__(self, ask_once: Callable[[bytes], Awaitable[bool]], retry: RetryPolicy) -> None:
        self._ask_once = ask_once
        self._retry = retry
        self._tasks: dict[bytes, asyncio.Task[None]] = {}
        self._logged: set[str] = set()

    def poll(self, attempt_id: bytes) -> None:
        """Poll until the attempt has ended, single-flight. A timeout never frees reports."""
        if attempt_id not in self._tasks:
            task = asyncio.get_running_loop().create_task(self._until_ended(attempt_id))
            self._tasks[attempt_id] = task
            task.add_done_callback(lambda done: self._stopped(attempt_id, done))

    async def close(self) -> None:
        """Stop polling. It resumes from the ledger after the next start."""
        await cancel_all(self._tasks.values())

    @contextmanager
    def tolerating_ledger_errors(self) -> Iterator[None]:
        """Log a failed ledger write (disk full, locked) and go on: it changed nothing, and the next poll retries it.

        Each text is logged once until a write succeeds.
        """
        try:
            yield
        except LedgerClosed:
            raise
        except LedgerError as error:
            if str(error) not in self._logged:
                self._logged.add(str(error))
                logger.error("the ledger failed, retrying: %s", error)

    def ledger_recovered(self) -> None:
        """Log the next ledger error even if its text is the same."""
        self._logged.clear()

    async def _until_ended(self, attempt_id: bytes) -> None:
        delay = self._retry.first_delay
        while True:
            with self.tolerating_ledger_errors():
                if await self._ask_once(attempt_id):
                    return
            await asyncio.sleep(delay)
            delay = min(2 * delay, self._retry.max_poll_delay)

    def _stopped(self, attempt_id: bytes, task: asyncio.Task[None]) -> None:
        self._tasks.pop(attempt_id, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("polling for an outcome failed: %r", error)


class Voting:
    """One helper's votes on all its attempts."""

    def __init__(self, context: Context) -> None:
        self._ledger = context.ledger
        self._parties = context.parties
        self._peers = context.peers
        self._negotiations = context.negotiations
        self._offload = context.offload
        self._failpoint = context.hooks.failpoint
        self.poller = OutcomePoller(self._ask_once, context.retry)
        # One event for each attempt that somebody waits for, set at its next change.
        self._changes: dict[bytes, asyncio.Event] = {}
        self._received: dict[bytes, dict[tuple[int, Vote], ReceivedVote]] = {}
        self._locks: dict[bytes, asyncio.Lock] = {}
        # Reserved attempts that this helper wants to abort but could not write; and why.
        self._pending_aborts: dict[bytes, str] = {}

    async def vote(self, attempt_id: bytes, sealed_share: bytes) -> AttemptOutcome:
        """Vote YES and wait for the outcome. Requires RESERVED from both peers, and the share sealed to the querier."""
        # Shielded: a cancelled caller must not leave a durable vote that nobody polls for.
        casting = asyncio.get_running_loop().create_task(self._cast(attempt_id, sealed_share))
        try:
            await asyncio.shield(casting)
        except Fenced:
            return AttemptOutcome.ABORTED
        return await self.outcome(attempt_id)

    async def _cast(self, attempt_id: bytes, sealed_share: bytes) -> None:
        try:
            await self._offload(lambda: self._ledger.moves.vote(attempt_id, sealed_share))
        except LedgerError:
            # A commit may be durable and still be reported as failed. If it is not, the poller ends at once.
            self.poller.poll(attempt_id)
            raise
        # Before anything that can fail: from here on only polling is sure to end the attempt.
        self.poller.poll(attempt_id)
        self._changed(attempt_id, AttemptState.VOTED)
        with self.poller.tolerating_ledger_errors():
            await self.broadcast_state(attempt_id, Failpoint.YES_SENT_TO_ONE)
            # The peers' votes may have arrived before our own.
            await self.decide(attempt_id)

    async def outcome(self, attempt_id: bytes) -> AttemptOutcome:
        """Wait for an attempt's outcome, without a timeout; raise `Disputed` if a peer equivocated."""
        while True:
            # Taken before the ledger is read, or a change in between is missed.
            changed = self._changes.setdefault(attempt_id, asyncio.Event())
            with self.poller.tolerating_ledger_errors():
                record = await self._offload(lambda: self._ledger.attempts.find(attempt_id))
                if (outcome := _outcome_of(record)) is not None:
                    return outcome
            # Usually polled already; not if the ledger could not be read when this helper started.
            self.poller.poll(attempt_id)
            await changed.wait()

    async def abort(self, attempt_id: bytes, reason: str) -> bool:
        """Abort a reserved attempt and tell the peers. Return False if it was not reserved any more.

        If the ledger write fails, retry until it succeeds: no one else can abort this attempt, and the peers are
        blocked on our vote.
        """
        try:
            await self._offload(lambda: self._ledger.moves.abort(attempt_id, reason))
        except Fenced:
            self._pending_aborts.pop(attempt_id, None)
            return False
        except LedgerClosed:
            raise
        except LedgerError:
            self.abort_later(attempt_id, reason)
            raise
        self._pending_aborts.pop(attempt_id, None)
        await self.announce_abort(attempt_id)
        return True

    def abort_later(self, attempt_id: bytes, reason: str) -> None:
        """Abort an attempt, if it is reserved, as soon as the ledger can be written."""
        self._pending_aborts[attempt_id] = reason
        self.poller.poll(attempt_id)

    async def announce_abort(self, attempt_id: bytes) -> None:
        """Tell local waiters and both peers that the ledger holds this attempt as aborted."""
        self._changed(attempt_id, AttemptState.ABORTED)
        await self.broadcast_state(attempt_id)

    async def broadcast_state(self, attempt_id: bytes, failpoint: Failpoint | None = None) -> None:
        """Send this helper's STATE to both peers. Run after the commit that the STATE reports."""
        state = await self.state(attempt_id)
        for index, party in enumerate(self._parties.others):
            # The status is part of the subject: a NO must not wait for a YES that is still in flight.
            self._peers.post(party, ("state", attempt_id, state.status), state, self._handle_reply)
            # Yield, so that the first message is out and the second is not when the failpoint fires.
            await asyncio.sleep(0)
            if index == 0 and failpoint:
                self._failpoint(failpoint)

    async def state(self, attempt_id: bytes) -> StateMessage:
        record = await self._offload(lambda: self._ledger.attempts.find(attempt_id))
        return state_message(self._parties, attempt_id, record)

    async def state_once_voted(self, query_key: bytes) -> StateMessage | None:
        """Return the STATE of a query's live attempt if this helper has voted for it."""
        record = await self._offload(lambda: self._ledger.attempts.live(query_key))
        if record is None or record.state is AttemptState.RESERVED:
            return None
        return state_message(self._parties, record.attempt_id, record)

    async def handle_state(self, sender: int, state: StateMessage) -> None:
        """Apply a peer's STATE. WORKING and UNKNOWN have no effect; a NO is final."""
        try:
            votes = verify_votes(self._parties, sender, state)
        except ProtocolError as error:
            logger.warning("a STATE of helper %d is rejected: %s", sender + 1, error)
            return
        with self.poller.tolerating_ledger_errors():
            # Votes on unknown attempts are dropped: otherwise a malicious peer could fill our memory with them.
            if votes and await self._offload(lambda: self._ledger.attempts.find(state.attempt_id)) is not None:
                # Forwarded votes first: another helper's NO caused the sender's own, and its author is to blame.
                for vote in sorted(votes, key=lambda vote: vote.party == sender):
                    self._received.setdefault(state.attempt_id, {})[vote.party, vote.vote] = vote
                    await self.decide(state.attempt_id)

    async def decide(self, attempt_id: bytes) -> AttemptRecord | None:
        """Make every transition that the votes allow. Return the attempt's record after it."""
        # Serialise per attempt: concurrent deciders would race to the same transition, and the loser would get a
        # spurious `Fenced`.
        async with self._locks.setdefault(attempt_id, asyncio.Lock()):
            while (record := await self._offload(lambda: self._ledger.attempts.find(attempt_id))) is not None:
                votes = {(vote.party, vote.vote): vote for vote in record.votes} | self._received.get(attempt_id, {})
                if not await self._move(record, list(votes.values())):
                    break
        if record is None or record.state in (AttemptState.RELEASED, AttemptState.ABORTED):
            if record is not None and attempt_id in self._changes:
                self._changed(attempt_id, record.state)  # again, if the move was durable but reported as failed
            self._received.pop(attempt_id, None)
            self._locks.pop(attempt_id, None)
        return record

    async def _move(self, record: AttemptRecord, votes: list[ReceivedVote]) -> bool:
        """Make one transition if `votes` allow one, durably, and then tell the peers."""
        allowed = self._next_move(record, votes)
        if allowed is None:
            await self._store_equivocation(record, votes)
            return False
        new, move = allowed
        try:
            await self._offload(move)
        except Fenced:
            # Another actor made a transition between our read and our write: read again.
            return True
        self.poller.ledger_recovered()
        self._changed(record.attempt_id, new)
        # The reply to a STATE is the peer's own STATE, so this also polls.
        renounced = Failpoint.ASK_SENT_TO_ONE if new is AttemptState.RENOUNCED else None
        await self.broadcast_state(record.attempt_id, renounced)
        return True

    def _next_move(
        self, record: AttemptRecord, votes: list[ReceivedVote]
    ) -> tuple[AttemptState, Callable[[], None]] | None:
        """Return the transition of COMMIT.md's table. A NO takes precedence over a YES, because it is final."""
        nos = [vote for vote in votes if vote.vote.is_no]
        yes = [vote for vote in votes if vote.vote is Vote.YES]
        attempt_id, reason, moves = record.attempt_id, _abort_reason(nos), self._ledger.moves
        both = set(self._parties.others)
        match record.state:
            case AttemptState.RESERVED if nos:
                return AttemptState.ABORTED, lambda: moves.abort(attempt_id, reason, nos)
            case AttemptState.VOTED if nos:
                return AttemptState.RENOUNCED, lambda: moves.renounce(attempt_id, votes, reason)
            case AttemptState.VOTED if {vote.party for vote in yes} == both:
                return AttemptState.RELEASED, lambda: moves.release(attempt_id, yes)
            case AttemptState.RENOUNCED if {vote.party for vote in nos} == both:
                return AttemptState.ABORTED, lambda: moves.free(attempt_id, votes, reason)
            case (
                AttemptState.RESERVED
                | AttemptState.VOTED
                | AttemptState.RENOUNCED
                | AttemptState.RELEASED
                | AttemptState.ABORTED
            ):
                return None
            case _:
                assert_never(record.state)

    async def _store_equivocation(self, record: AttemptRecord, votes: Sequence[ReceivedVote]) -> None:
        """Persist a YES and an ABORTED vote of one helper, which prove that it equivocated: the query is disputed."""
        parties = equivocators_among(votes)
        if parties - record.equivocators:
            logger.error("DISPUTED: helpers %s equivocated", sorted(party + 1 for party in parties))
            proof = [vote for vote in votes if vote.party in parties]
            await self._offload(lambda: self._ledger.moves.keep_votes(record.attempt_id, proof))
            self._wake(record.attempt_id)

    async def _ask_once(self, attempt_id: bytes) -> bool:
        """Ask both peers once; return True if the attempt has ended. First retry the writes that failed earlier."""
        if (reason := self._pending_aborts.get(attempt_id)) is not None:
            await self.abort(attempt_id, reason)
        record = await self.decide(attempt_id)
        if record is None or record.state not in (AttemptState.VOTED, AttemptState.RENOUNCED):
            return True
        for index, party in enumerate(self._parties.others):
            self._peers.post(party, ("ask", attempt_id), Ask(attempt_id), self._handle_reply)
            # As in `broadcast_state`: the failpoint lies between the two.
            await asyncio.sleep(0)
            if index == 0 and record.state is AttemptState.RENOUNCED:
                self._failpoint(Failpoint.ASK_SENT_TO_ONE)
        return False

    async def _handle_reply(self, sender: int, body: Body) -> None:
        if isinstance(body, StateMessage):
            await self.handle_state(sender, body)

    def _changed(self, attempt_id: bytes, state: AttemptState) -> None:
        self._negotiations.attempt_moved(attempt_id, state)
        self._wake(attempt_id)
        if state is AttemptState.RENOUNCED:
            self.poller.poll(attempt_id)

    def _wake(self, attempt_id: bytes) -> None:
        if (event := self._changes.pop(attempt_id, None)) is not None:
            event.set()


def _outcome_of(record: AttemptRecord | None) -> AttemptOutcome | None:
    if record is None or record.state is AttemptState.ABORTED:
        return AttemptOutcome.ABORTED
    if record.state is AttemptState.RELEASED:
        return AttemptOutcome.RELEASED
    if record.equivocators:
        raise Disputed(min(record.equivocators))
    return None

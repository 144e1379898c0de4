"""Spend, its second half: from the vote to the release, or to reports that are free again (COMMIT.md).

A vote promises that this helper's sealed share can be released. It is released only with YES from both peers, renounced
when one says NO, and freed only when both have said NO; until then the peers are asked for ever, which costs nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import assert_never

from mpc_helpers.agreement.asking import Asking, Changes
from mpc_helpers.agreement.ballots import blame, checked_votes, state_of
from mpc_helpers.agreement.errors import Disputed
from mpc_helpers.agreement.messages import Ask, Body, StateMessage
from mpc_helpers.agreement.surroundings import Surroundings
from mpc_helpers.ledger.attempt import AttemptOutcome, AttemptRecord, AttemptState, HeardVote, Step, liars_among
from mpc_helpers.ledger.file import LedgerClosed, LedgerError
from mpc_helpers.ledger.moves import Fenced
from protocol.errors import ProtocolError
from protocol.vote import Vote

logger = logging.getLogger(__name__)


class Voting:
    """One helper's votes on all its attempts."""

    def __init__(self, around: Surroundings) -> None:
        self._ledger = around.ledger
        self._parties = around.parties
        self._peers = around.peers
        self._negotiations = around.negotiations
        self._offload = around.offload
        self._step = around.hooks.step
        self.asking = Asking(self._ask_once, around.pace)
        self._changes = Changes()
        self._heard: dict[bytes, dict[tuple[int, Vote], HeardVote]] = {}
        self._locks: dict[bytes, asyncio.Lock] = {}
        # Reserved, and given up by this helper, but the ledger could not write that; and why.
        self._given_up: dict[bytes, str] = {}

    async def vote(self, attempt_id: bytes, sealed_share: bytes) -> AttemptOutcome:
        """Vote and wait for the outcome. Requires RESERVED from both peers, and the share sealed to the querier."""
        # Shielded: a caller that is cancelled must not leave a vote on disk that nobody asks about.
        casting = asyncio.get_running_loop().create_task(self._cast(attempt_id, sealed_share))
        try:
            await asyncio.shield(casting)
        except Fenced:
            return AttemptOutcome.ABORTED
        return await self.outcome(attempt_id)

    async def outcome(self, attempt_id: bytes) -> AttemptOutcome:
        """How an attempt ends, waited for as long as it takes; `Disputed` where waiting longer changes nothing."""
        while True:
            changed = self._changes.next(attempt_id)
            with self.asking.taking_over():
                record = await self._offload(lambda: self._ledger.attempts.find(attempt_id))
                if (outcome := _outcome_of(record)) is not None:
                    return outcome
            # Usually asked about already; not so if the ledger could not be read when this helper started.
            self.asking.keep(attempt_id)
            await changed.wait()

    async def abort(self, attempt_id: bytes, reason: str) -> bool:
        """Give up what is still reserved, and say so. False if it was not reserved any more.

        Where the ledger fails it is tried again until it works: nobody else would, and the peers wait for our word.
        """
        try:
            await self._offload(lambda: self._ledger.moves.abort(attempt_id, reason))
        except Fenced:
            self._given_up.pop(attempt_id, None)
            return False
        except LedgerClosed:
            raise
        except LedgerError:
            self._given_up[attempt_id] = reason
            self.asking.keep(attempt_id)
            raise
        self._given_up.pop(attempt_id, None)
        await self.ended(attempt_id)
        return True

    async def ended(self, attempt_id: bytes) -> None:
        """An attempt was aborted in the ledger: let everyone know."""
        self._moved(attempt_id, AttemptState.ABORTED)
        await self.push(attempt_id)

    async def push(self, attempt_id: bytes, step: Step | None = None) -> None:
        """Push this helper's STATE to both peers, after the commit that made it so."""
        state = await self.state(attempt_id)
        for index, party in enumerate(self._parties.others):
            # The word is part of the subject: a NO must not wait for a YES that is still in flight.
            self._peers.post(party, ("state", attempt_id, state.word), state, self._hear_reply)
            # Lets the post begin, so that a helper stopped at the step below has sent to one peer and not the other.
            await asyncio.sleep(0)
            if index == 0 and step:
                self._step(step)

    async def state(self, attempt_id: bytes) -> StateMessage:
        """STATE: what this helper answers about an attempt, with the votes that prove it."""
        record = await self._offload(lambda: self._ledger.attempts.find(attempt_id))
        return state_of(self._parties, attempt_id, record)

    async def state_after_vote(self, query_key: bytes) -> StateMessage | None:
        """STATE of the attempt that this query was voted for, if it was."""
        record = await self._offload(lambda: self._ledger.attempts.live(query_key))
        if record is None or record.state is AttemptState.RESERVED:
            return None
        return state_of(self._parties, record.attempt_id, record)

    async def hear(self, sender: int, state: StateMessage) -> None:
        """A peer's STATE. Working and unknown have no effect; a NO is final."""
        try:
            votes = checked_votes(self._parties, sender, state)
        except ProtocolError as error:
            logger.warning("a STATE of helper %d is refused: %s", sender + 1, error)
            return
        with self.asking.taking_over():
            # Votes on attempts that this ledger does not hold are dropped: a peer could else fill our memory with them.
            if votes and await self._offload(lambda: self._ledger.attempts.find(state.attempt_id)) is not None:
                # What is passed on comes first: a NO of another caused the sender's own, and its author is to blame.
                for vote in sorted(votes, key=lambda vote: vote.party == sender):
                    self._heard.setdefault(state.attempt_id, {})[vote.party, vote.vote] = vote
                    await self.decide(state.attempt_id)

    async def decide(self, attempt_id: bytes) -> AttemptRecord | None:
        """Make every move the votes heard so far allow. Gives the attempt as it then stands."""
        # One at a time for each attempt: two would make the same move, and the second be fenced off for nothing.
        async with self._locks.setdefault(attempt_id, asyncio.Lock()):
            while (record := await self._offload(lambda: self._ledger.attempts.find(attempt_id))) is not None:
                votes = {(vote.party, vote.vote): vote for vote in record.votes} | self._heard.get(attempt_id, {})
                if not await self._move(record, list(votes.values())):
                    break
        if record is None or record.state in (AttemptState.RELEASED, AttemptState.ABORTED):
            if record is not None and self._changes.awaited(attempt_id):
                self._moved(attempt_id, record.state)  # again, if the move was on disk but reported as failed
            self._heard.pop(attempt_id, None)
            self._locks.pop(attempt_id, None)
        return record

    async def _cast(self, attempt_id: bytes, sealed_share: bytes) -> None:
        try:
            await self._offload(lambda: self._ledger.moves.vote(attempt_id, sealed_share))
        except LedgerError:
            # A commit may reach the disk and still be reported as failed. If it did not, asking ends at once.
            self.asking.keep(attempt_id)
            raise
        # Before anything that can fail: from here on only asking is sure to bring the attempt to its end.
        self.asking.keep(attempt_id)
        self._moved(attempt_id, AttemptState.VOTED)
        with self.asking.taking_over():
            await self.push(attempt_id, Step.YES_SENT_TO_ONE)
            # The peers' votes may have come before our own.
            await self.decide(attempt_id)

    async def _move(self, record: AttemptRecord, votes: list[HeardVote]) -> bool:
        """Make one move if `votes` allow one, on disk first, and then tell the peers."""
        allowed = self._next_move(record, votes)
        if allowed is None:
            await self._keep_proof(record, votes)
            return False
        new, move = allowed
        try:
            await self._offload(move)
        except Fenced:
            # Someone else moved it between our reading and our writing: look again.
            return True
        self.asking.ledger_works()
        self._moved(record.attempt_id, new)
        # The reply to a pushed STATE is the peer's own, so pushing is also asking.
        await self.push(record.attempt_id, Step.ASK_SENT_TO_ONE if new is AttemptState.RENOUNCED else None)
        return True

    def _next_move(
        self, record: AttemptRecord, votes: list[HeardVote]
    ) -> tuple[AttemptState, Callable[[], None]] | None:
        """The rows of COMMIT.md's table. A NO goes before a YES: it is final, and a YES is not."""
        nos = [vote for vote in votes if vote.vote.is_no]
        yes = [vote for vote in votes if vote.vote is Vote.YES]
        attempt_id, reason, both, moves = record.attempt_id, blame(nos), set(self._parties.others), self._ledger.moves
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

    async def _keep_proof(self, record: AttemptRecord, votes: Sequence[HeardVote]) -> None:
        """A signed YES and a signed first-hand NO of one helper prove that it lied: the query is disputed."""
        lied = liars_among(votes)
        if lied - record.liars:
            logger.error("DISPUTED: helpers %s voted both ways", sorted(party + 1 for party in lied))
            proof = [vote for vote in votes if vote.party in lied]
            await self._offload(lambda: self._ledger.moves.keep_votes(record.attempt_id, proof))
            self._changes.tell(record.attempt_id)

    async def _ask_once(self, attempt_id: bytes) -> bool:
        """True if nothing is left to ask. First makes the moves that the ledger could not take when they were due."""
        if (reason := self._given_up.get(attempt_id)) is not None:
            await self.abort(attempt_id, reason)
        record = await self.decide(attempt_id)
        if record is None or record.state not in (AttemptState.VOTED, AttemptState.RENOUNCED):
            return True
        for index, party in enumerate(self._parties.others):
            self._peers.post(party, ("ask", attempt_id), Ask(attempt_id), self._hear_reply)
            # As in `push`: the crash point lies between the two.
            await asyncio.sleep(0)
            if index == 0 and record.state is AttemptState.RENOUNCED:
                self._step(Step.ASK_SENT_TO_ONE)
        return False

    async def _hear_reply(self, sender: int, body: Body) -> None:
        """The reply to an ASK or a pushed STATE."""
        if isinstance(body, StateMessage):
            await self.hear(sender, body)

    def _moved(self, attempt_id: bytes, state: AttemptState) -> None:
        self._negotiations.attempt_moved(attempt_id, state)
        self._changes.tell(attempt_id)
        if state is AttemptState.RENOUNCED:
            self.asking.keep(attempt_id)


def _outcome_of(record: AttemptRecord | None) -> AttemptOutcome | None:
    if record is None or record.state is AttemptState.ABORTED:
        return AttemptOutcome.ABORTED
    if record.state is AttemptState.RELEASED:
        return AttemptOutcome.RELEASED
    if record.liars:
        raise Disputed(min(record.liars))
    return None

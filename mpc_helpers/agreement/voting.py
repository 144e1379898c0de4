"""Spend: from the vote to the release, or to reports that are free again (COMMIT.md).

A vote promises that this helper's sealed share can be released. It is released only with YES from both peers, renounced
when one says NO, and freed only when both have said NO; until then the peers are asked for ever, which costs nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeVar, assert_never

from mpc_helpers.agreement import messages
from mpc_helpers.agreement.messages import Ask, Body
from mpc_helpers.agreement.peers import Peers
from mpc_helpers.ledger.attempt import AttemptRecord, HeardVote, Outcome, State, Step, Word, word_about
from mpc_helpers.ledger.file import LedgerClosed, LedgerError
from mpc_helpers.ledger.ledger import Fenced, ReportLedger
from protocol.errors import ProtocolError
from protocol.vote import SignedVote, Vote

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Offload(Protocol):
    """Runs a blocking call of the ledger away from the event loop, one at a time and in order."""

    def __call__(self, call: Callable[[], T]) -> Awaitable[T]:
        """The call's result."""


class Voting:
    """One helper's votes. `changed` is told of every attempt whose state has moved here."""

    def __init__(
        self,
        ledger: ReportLedger,
        peers: Peers,
        *,
        offload: Offload,
        step: Callable[[Step], None],
        changed: Callable[[bytes, State], None],
        first_wait: float,
        longest_wait: float,
    ) -> None:
        self._ledger = ledger
        self._peers = peers
        self._offload = offload
        self._step = step
        self._changed = changed
        self._waits = (first_wait, longest_wait)
        self._heard: dict[bytes, dict[tuple[int, Vote], HeardVote]] = {}
        self._locks: dict[bytes, asyncio.Lock] = {}
        self._asking: dict[bytes, asyncio.Task[None]] = {}
        self._settled: dict[bytes, asyncio.Event] = {}
        self._troubles: set[str] = set()

    async def vote(self, attempt_id: bytes, sealed_share: bytes, deadline: float) -> Outcome:
        """Vote and wait for the outcome. Requires RESERVED from both peers, and the share sealed to the querier."""
        settled = self._settled.setdefault(attempt_id, asyncio.Event())
        # Shielded: a caller that is cancelled must not leave a vote on disk that nobody asks about.
        casting = asyncio.get_running_loop().create_task(self._cast(attempt_id, sealed_share))
        try:
            await asyncio.shield(casting)
            async with asyncio.timeout_at(deadline):
                await settled.wait()
        except Fenced:
            return Outcome.ABORTED
        except TimeoutError:
            return Outcome.UNDECIDED
        record = await self._offload(lambda: self._ledger.record(attempt_id))
        if record is not None and record.state in (State.VOTED, State.RENOUNCED):
            return Outcome.UNDECIDED  # disputed: waiting longer changes nothing
        released = record is not None and record.state is State.RELEASED
        return Outcome.RELEASED if released else Outcome.ABORTED

    async def _cast(self, attempt_id: bytes, sealed_share: bytes) -> None:
        try:
            await self._offload(lambda: self._ledger.vote(attempt_id, sealed_share))
        except LedgerError:
            # A commit may reach the disk and still be reported as failed. If it did not, asking ends at once.
            self.keep_asking(attempt_id)
            raise
        self.keep_asking(attempt_id)
        self._changed(attempt_id, State.VOTED)
        with self._left_to_asking():
            await self.tell(attempt_id, Step.YES_SENT_TO_ONE)
            await self.decide(attempt_id)

    async def abort(self, attempt_id: bytes, reason: str) -> bool:
        """Give up what is still reserved, and say so. False if it was not reserved any more."""
        try:
            await self._offload(lambda: self._ledger.abort(attempt_id, reason))
        except Fenced:
            return False
        await self.ended(attempt_id)
        return True

    async def ended(self, attempt_id: bytes) -> None:
        """An attempt was aborted in the ledger: let everyone know."""
        self._settle(attempt_id, State.ABORTED)
        await self.tell(attempt_id)

    async def tell(self, attempt_id: bytes, step: Step | None = None) -> None:
        """Push this helper's STATE to both peers, after the commit that made it so."""
        state = await self.state(attempt_id)
        for index, peer in enumerate(self._peers.others):
            self._peers.post(peer, ("state", attempt_id, state.word), state, self.hear_reply)
            await asyncio.sleep(0)
            if index == 0 and step:
                self._step(step)

    async def state(self, attempt_id: bytes) -> messages.State:
        """STATE: what this helper answers about an attempt, with the votes that prove it."""
        record = await self._offload(lambda: self._ledger.record(attempt_id))
        word = word_about(record.state if record else None)
        if record is None or word in (Word.WORKING, Word.UNKNOWN):
            return messages.State(attempt_id, word, ())
        return messages.State(attempt_id, word, (self._own_vote(record), *_supporting(record)))

    async def hear_reply(self, peer: int, body: Body) -> None:
        """The reply to an ASK or a pushed STATE."""
        if isinstance(body, messages.State):
            await self.hear(peer, body)

    async def hear(self, peer: int, state: messages.State) -> None:
        """A peer's STATE. Working and unknown have no effect; a NO is final."""
        try:
            votes = self._checked_votes(peer, state)
        except ProtocolError as error:
            logger.warning("a STATE of helper %d is refused: %s", peer + 1, error)
            return
        with self._left_to_asking():
            if votes and await self._offload(lambda: self._ledger.record(state.attempt_id)) is not None:
                heard = self._heard.setdefault(state.attempt_id, {})
                heard.update({(vote.helper, vote.vote): vote for vote in votes})
                await self.decide(state.attempt_id)

    async def decide(self, attempt_id: bytes) -> AttemptRecord | None:
        """Make every move the votes heard so far allow. Gives the attempt as it then stands."""
        async with self._locks.setdefault(attempt_id, asyncio.Lock()):
            while (record := await self._offload(lambda: self._ledger.record(attempt_id))) is not None:
                votes = {(vote.helper, vote.vote): vote for vote in record.votes} | self._heard.get(attempt_id, {})
                if not await self._move(record, list(votes.values())):
                    break
        if record is None or record.state in (State.RELEASED, State.ABORTED):
            if record is not None and attempt_id in self._settled:
                self._settle(attempt_id, record.state)  # again, if the move was on disk but reported as failed
            for memory in (self._heard, self._locks, self._settled):
                memory.pop(attempt_id, None)
        return record

    def keep_asking(self, attempt_id: bytes) -> None:
        """ASK both peers for ever about a voted or renounced attempt. Never free on a timeout."""
        if attempt_id not in self._asking:
            task = asyncio.get_running_loop().create_task(self._ask_until_settled(attempt_id))
            self._asking[attempt_id] = task
            task.add_done_callback(lambda done: self._stopped_asking(attempt_id, done))

    async def close(self) -> None:
        """Stop asking; what is on disk is asked for again after the next start."""
        tasks = list(self._asking.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

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
            return True
        self._troubles.clear()
        self._settle(record.attempt_id, new)
        # The reply to a pushed STATE is the peer's own, so telling is also asking.
        await self.tell(record.attempt_id, Step.ASK_SENT_TO_ONE if new is State.RENOUNCED else None)
        return True

    def _next_move(self, record: AttemptRecord, votes: list[HeardVote]) -> tuple[State, Callable[[], None]] | None:
        """The rows of COMMIT.md's table. A NO goes before a YES: it is final, and a YES is not."""
        nos = [vote for vote in votes if vote.vote.is_no]
        yes = [vote for vote in votes if vote.vote is Vote.YES]
        attempt_id, reason, both = record.attempt_id, _blame(nos), set(self._peers.others)
        match record.state:
            case State.RESERVED if nos:
                return State.ABORTED, lambda: self._ledger.abort(attempt_id, reason)
            case State.VOTED if nos:
                return State.RENOUNCED, lambda: self._ledger.renounce(attempt_id, votes, reason)
            case State.VOTED if {vote.helper for vote in yes} == both:
                return State.RELEASED, lambda: self._ledger.release(attempt_id, yes)
            case State.RENOUNCED if {vote.helper for vote in nos} == both:
                return State.ABORTED, lambda: self._ledger.free(attempt_id, votes, reason)
            case State.RESERVED | State.VOTED | State.RENOUNCED | State.RELEASED | State.ABORTED:
                return None
            case _:
                assert_never(record.state)

    async def _keep_proof(self, record: AttemptRecord, votes: Sequence[HeardVote]) -> None:
        """A signed YES and a signed first-hand NO of one helper prove that it lied: the query is disputed."""
        lied = {vote.helper for vote in votes if vote.vote is Vote.YES} & {
            vote.helper for vote in votes if vote.vote is Vote.ABORTED
        }
        if lied - record.liars:
            logger.error("DISPUTED: helpers %s voted both ways", sorted(helper + 1 for helper in lied))
            proof = [vote for vote in votes if vote.helper in lied]
            await self._offload(lambda: self._ledger.record_votes(record.attempt_id, proof))
            if record.attempt_id in self._settled:
                self._settled[record.attempt_id].set()

    async def _ask_until_settled(self, attempt_id: bytes) -> None:
        wait, longest = self._waits
        while True:
            with self._left_to_asking():
                if await self._ask_once(attempt_id):
                    return
            await asyncio.sleep(wait)
            wait = min(2 * wait, longest)

    async def _ask_once(self, attempt_id: bytes) -> bool:
        """True if nothing is left to ask. First makes the moves that the ledger could not take when they were due."""
        record = await self.decide(attempt_id)
        if record is None or record.state not in (State.VOTED, State.RENOUNCED):
            return True
        for index, peer in enumerate(self._peers.others):
            self._peers.post(peer, ("ask", attempt_id), Ask(attempt_id), self.hear_reply)
            await asyncio.sleep(0)
            if index == 0 and record.state is State.RENOUNCED:
                self._step(Step.ASK_SENT_TO_ONE)
        return False

    @contextmanager
    def _left_to_asking(self) -> Iterator[None]:
        """A ledger that fails (disk full, locked) has moved nothing and freed nothing; the next ASK tries again.

        Logged once for each text until a move succeeds.
        """
        try:
            yield
        except LedgerClosed:
            raise
        except LedgerError as error:
            if str(error) not in self._troubles:
                self._troubles.add(str(error))
                logger.error("waiting for the ledger: %s", error)

    def _settle(self, attempt_id: bytes, state: State) -> None:
        self._changed(attempt_id, state)
        if state in (State.RELEASED, State.ABORTED) and attempt_id in self._settled:
            self._settled[attempt_id].set()
        if state is State.RENOUNCED:
            self.keep_asking(attempt_id)

    def _stopped_asking(self, attempt_id: bytes, task: asyncio.Task[None]) -> None:
        self._asking.pop(attempt_id, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("asking about an attempt failed: %r", error)

    def _own_vote(self, record: AttemptRecord) -> SignedVote:
        if word_about(record.state) is Word.YES:
            vote = Vote.YES
        else:
            vote = Vote.RENOUNCED if record.voted_once else Vote.ABORTED
        return SignedVote.sign(self._peers.helper, record.attempt_id, vote, self._peers.identity)

    def _checked_votes(self, peer: int, state: messages.State) -> list[HeardVote]:
        """The peers' votes in a STATE, if they are what its word says. A renounced NO needs the NO it goes back to."""
        for vote in state.votes:
            vote.verify(self._peers.keys[vote.helper])
        own = [vote.vote for vote in state.votes if vote.helper == peer]
        first_hand = {vote.helper for vote in state.votes if vote.vote is Vote.ABORTED}
        if state.word is Word.YES and own != [Vote.YES]:
            raise ProtocolError("a YES without the sender's own vote")
        if state.word is Word.NO and not (first_hand and len(own) == 1 and own[0].is_no):
            raise ProtocolError("a NO without the first-hand NO behind it")
        if self._peers.helper in first_hand:
            return []  # An echo of this helper's own NO: its ledger knows better.
        others = (vote for vote in state.votes if vote.helper != self._peers.helper)
        return [HeardVote(vote.helper, vote.vote, vote.encode()) for vote in others]


def _supporting(record: AttemptRecord) -> list[SignedVote]:
    """A released helper hands its three YES out with its share; a renounced one shows the NO it heard."""
    if record.state is State.RELEASED:
        return [SignedVote.decode(vote.message) for vote in record.votes if vote.vote is Vote.YES]
    if record.voted_once and word_about(record.state) is Word.NO:
        return [SignedVote.decode(vote.message) for vote in record.votes if vote.vote is Vote.ABORTED][:1]
    return []


def _blame(nos: Sequence[HeardVote]) -> str:
    helpers = sorted({vote.helper + 1 for vote in nos if vote.vote is Vote.ABORTED})
    return f"helper {' and '.join(map(str, helpers))} gave it up" if helpers else ""

"""Agree and Spend between three helpers without a coordinator: what the helper's page calls.

The rules are COMMIT.md's, to the letter; the durable half of them is the room `ledger`. Messages may be lost, delayed,
repeated and reordered, and every one may be handled again without harm.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from mpc_helpers.agreement.hooks import Hooks, OneThread, Pace
from mpc_helpers.agreement.negotiation import AdmittedBatch, Attempt, AttemptTerms, Negotiation
from mpc_helpers.agreement.negotiations import Negotiations
from mpc_helpers.agreement.negotiator import Announcer, Negotiator
from mpc_helpers.agreement.parties import Parties
from mpc_helpers.agreement.peers import Alarms, Peers, Send
from mpc_helpers.agreement.reception import Reception
from mpc_helpers.agreement.surroundings import Surroundings
from mpc_helpers.agreement.voting import Voting
from mpc_helpers.ledger.attempt import AttemptOutcome, AttemptState
from mpc_helpers.ledger.ledger import ReportLedger
from protocol.vote import SignedVote, Vote


@dataclass(frozen=True, slots=True)
class Release:
    """What a released helper hands out: its share and all three signed YES."""

    attempt_id: bytes
    sealed_share: bytes = field(repr=False)
    votes: tuple[SignedVote, ...]


class Agreement:
    """One per helper daemon. Deadlines are times of the running event loop (`loop.time()`).

    `send` carries bytes to a peer and brings its reply, which is whatever that peer's `receive` gave.
    """

    def __init__(
        self,
        ledger: ReportLedger,
        parties: Parties,
        send: Send,
        *,
        pace: Pace | None = None,
        hooks: Hooks | None = None,
    ) -> None:
        pace, hooks = pace or Pace(), hooks or Hooks()
        self._ledger = ledger
        self.parties = parties
        self._threads = (OneThread("report-ledger"), OneThread("check-shares"))
        self._offload = hooks.offload or self._threads[0]
        compute = hooks.offload or self._threads[1]
        negotiations = Negotiations()
        self.alarms = Alarms(negotiations.wake)
        self.peers = Peers(
            ledger,
            parties,
            send,
            self.alarms,
            offload=self._offload,
            entropy=hooks.entropy,
            patience=pace.patience,
        )
        around = Surroundings(
            ledger, parties, self.peers, self.alarms, negotiations, self._offload, compute, pace, hooks
        )
        self._left_out = hooks.left_out
        self._voting = Voting(around)
        self._reception = Reception(self.peers, negotiations, self._voting, compute)
        self._negotiator = Negotiator(around, self._voting, Announcer(around, self._reception.hear))

    async def recover(self) -> None:
        """On start, before listening: abort what was reserved, and take up asking about what was voted."""
        swept = await self._offload(self._ledger.moves.sweep)
        for attempt_id in swept:
            await self._voting.push(attempt_id)
        for record in await self._offload(self._ledger.attempts.unsettled):
            self._voting.asking.keep(record.attempt_id)

    async def agree(self, terms: AttemptTerms, batch: AdmittedBatch, deadline: float) -> Negotiation:
        """Agree: three proposals of one number, and so one set of reports; or `AgreementError`. Nothing is held yet."""
        negotiation = Negotiation(self.parties.party, terms, batch, deadline)
        try:
            await self._negotiator.agree(negotiation)
        finally:
            self._left_out(negotiation.left_out_besides())
        return negotiation

    async def reserve(self, agreed: Negotiation) -> Attempt:
        """Spend: those reports on disk at all three, or `AgreementError` with everything free again.

        Agrees again, by itself and until the deadline, where a helper could not reserve what was agreed.
        """
        return await self._negotiator.reserve(agreed)

    @asynccontextmanager
    async def spend(self, agreed: Negotiation) -> AsyncIterator[Attempt]:
        """`reserve`, for a block that ends with `commit`. If it fails before its vote the reports are free again."""
        attempt = await self.reserve(agreed)
        try:
            yield attempt
        except BaseException as error:
            # Shielded: a query that is stopped still says so, or its peers wait for a vote that never comes.
            await asyncio.shield(self.give_up(attempt, str(error) or "the query was stopped"))
            raise

    async def give_up(self, attempt: Attempt, reason: str) -> bool:
        """Abort an attempt that has not been voted for; False if it is too late or was done already."""
        return await self._voting.abort(attempt.attempt_id, reason)

    async def commit(self, attempt: Attempt, sealed_share: bytes) -> AttemptOutcome:
        """Spend for good: vote with the share sealed to the querier, release when both peers say YES.

        RELEASED is on disk when this returns, so the share may leave. Until the outcome is known the reports stay
        locked and the peers are asked, for as long as it takes.
        """
        return await self._voting.vote(attempt.attempt_id, sealed_share)

    async def outcome(self, query_key: bytes) -> AttemptOutcome:
        """How the last attempt at a query ended, waited for if it was voted for. ABORTED: another may follow."""
        record = await self._offload(lambda: self._ledger.attempts.live(query_key))
        if record is None or record.state is AttemptState.RESERVED:
            return AttemptOutcome.ABORTED
        return await self._voting.outcome(record.attempt_id)

    async def has_live_attempt(self, query_key: bytes) -> bool:
        """Whether some attempt at the query is not aborted: then it has, or may still get, its answer."""
        return await self._offload(lambda: self._ledger.attempts.live(query_key)) is not None

    async def draws(self, query_key: bytes) -> int:
        """How many attempts at a query came to nothing after their noise was drawn, or may have been; on disk."""
        return await self._offload(lambda: self._ledger.attempts.draws(query_key))

    async def given_up_by(self, attempt: Attempt) -> int | None:
        """Which peer ended an attempt, by its own signed word; None if none has said so, or both."""
        record = await self._offload(lambda: self._ledger.attempts.find(attempt.attempt_id))
        said = {vote.party for vote in record.votes if vote.vote is Vote.ABORTED} if record else set()
        return said.pop() if len(said) == 1 else None

    async def answer(self, query_key: bytes) -> Release | None:
        """The released share, for as long as the ledger lives: a retry gets the same bytes."""
        record = await self._offload(lambda: self._ledger.attempts.live(query_key))
        if record is None or record.state is not AttemptState.RELEASED or record.sealed_share is None:
            return None
        return Release(record.attempt_id, record.sealed_share, (await self._voting.state(record.attempt_id)).votes)

    async def forget_answer(self, query_key: bytes) -> None:
        """Keep the released share no longer."""
        await self._offload(lambda: self._ledger.moves.forget_answer(query_key))

    async def receive(self, sender: int, message: bytes) -> bytes | None:
        """Called by the daemon with what helper `sender` (known from TLS) sent. Gives the reply, if there is one."""
        return await self._reception.receive(sender, message)

    async def close(self) -> None:
        """Stop talking. The ledger stays open."""
        await self._voting.asking.close()
        await self.peers.close()
        for thread in self._threads:
            thread.close()

"""Agree and Spend between three helpers: a commit protocol without a coordinator, as one participant runs it.

`Agreement` is what `Helper` calls and what the daemon passes the peers' messages to. Phase one is `Preparation`
(propose, check, reserve), phase two is `Voting` (vote, release or abort). The rules are COMMIT.md's; the durable half
is the package `ledger`. Messages may be lost, delayed, repeated and reordered: handling one is idempotent.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import assert_never

from mpc_helpers.agreement.messages import (
    Ask,
    Body,
    Head,
    Hello,
    Propose,
    Refuse,
    Reserved,
    Show,
    Shown,
    StateMessage,
)
from mpc_helpers.agreement.negotiation import AdmittedBatch, Attempt, AttemptTerms, Negotiation, Negotiations
from mpc_helpers.agreement.peers import Alarms, Context, Hooks, Parties, Peers, RetryPolicy, Send, SerialExecutor
from mpc_helpers.agreement.preparation import Preparation
from mpc_helpers.agreement.voting import Voting
from mpc_helpers.ledger.attempt import AttemptOutcome, AttemptState, VoteStatus
from mpc_helpers.ledger.ledger import ReportLedger
from protocol.vote import Vote


class Agreement:
    """One helper's part in the commit protocol; one per daemon. Deadlines are times of the running event loop.

    `send` carries bytes to a peer and returns its reply, which is what that peer's `receive` returned.
    `ledger` is read and written through `offload` only: it may block for seconds.
    """

    def __init__(
        self,
        ledger: ReportLedger,
        parties: Parties,
        send: Send,
        *,
        retry: RetryPolicy | None = None,
        hooks: Hooks | None = None,
        rebuilt_from: Mapping[int, int] | None = None,
    ) -> None:
        retry, hooks = retry or RetryPolicy(), hooks or Hooks()
        self.ledger = ledger
        self.parties = parties
        self._executors = (SerialExecutor("report-ledger"), SerialExecutor("check-shares"))
        self.offload = hooks.offload or self._executors[0]
        self._compute = hooks.offload or self._executors[1]
        self._negotiations = Negotiations()
        self.alarms = Alarms(self._negotiations.wake)
        self.peers = Peers(
            ledger,
            parties,
            send,
            self.alarms,
            offload=self.offload,
            entropy=hooks.entropy,
            reply_timeout=retry.reply_timeout,
            rebuilt_from=rebuilt_from or {},
        )
        context = Context(
            ledger, parties, self.peers, self.alarms, self._negotiations, self.offload, self._compute, retry, hooks
        )
        self._left_out = hooks.left_out
        self.voting = Voting(context)
        self.preparation = Preparation(context, self.voting, self._handle)

    async def recover(self) -> None:
        """Abort every reserved attempt and resume polling for every voted one. Run on start, before listening."""
        swept = await self.offload(self.ledger.moves.sweep)
        for attempt_id in swept:
            await self.voting.broadcast_state(attempt_id)
        for record in await self.offload(self.ledger.attempts.pending):
            self.voting.poller.poll(record.attempt_id)

    async def close(self) -> None:
        """Stop polling and sending. The ledger stays open."""
        await self.voting.poller.close()
        await self.peers.close()
        for executor in self._executors:
            executor.close()

    # The phases of one attempt, in order.

    async def agree(self, terms: AttemptTerms, batch: AdmittedBatch, deadline: float) -> Negotiation:
        """Agree with both peers on one set of reports, or raise `AgreementError`. Nothing is reserved yet."""
        negotiation = Negotiation(self.parties.party, terms, batch, deadline)
        try:
            await self.preparation.collect_proposals(negotiation)
        finally:
            self._left_out(negotiation.rejected_after_admission)
        return negotiation

    @asynccontextmanager
    async def spend(self, agreed: Negotiation) -> AsyncIterator[Attempt]:
        """Reserve the agreed reports at all three helpers for a block that ends with `commit`.

        If the block raises before its vote, abort: the reports are free again.
        """
        attempt = await self.preparation.reserve(agreed)
        try:
            yield attempt
        except BaseException as error:
            # Shielded: a cancelled query must still abort, or its peers wait for a vote that never comes.
            await asyncio.shield(self.abort(attempt, str(error) or "the query was stopped"))
            raise

    async def abort(self, attempt: Attempt, reason: str) -> bool:
        """Abort an attempt that has not been voted for. Return False if it was voted for or aborted already."""
        return await self.voting.abort(attempt.attempt_id, reason)

    async def commit(self, attempt: Attempt, sealed_share: bytes) -> AttemptOutcome:
        """Vote YES with the share sealed to the querier, and release once both peers voted YES.

        On return the outcome is durable. Until it is known the reports stay locked and the peers are polled, without a
        timeout.
        """
        return await self.voting.vote(attempt.attempt_id, sealed_share)

    async def outcome(self, query_key: bytes) -> AttemptOutcome:
        """Return how the last attempt at a query ended, waiting if it was voted for. ABORTED: another may follow."""
        record = await self.offload(lambda: self.ledger.attempts.live(query_key))
        if record is None or record.state is AttemptState.RESERVED:
            return AttemptOutcome.ABORTED
        return await self.voting.outcome(record.attempt_id)

    async def aborted_by(self, attempt: Attempt) -> int | None:
        """Return the peer that aborted an attempt, by its signed vote; None if neither or both did."""
        record = await self.offload(lambda: self.ledger.attempts.find(attempt.attempt_id))
        parties = {vote.party for vote in record.votes if vote.vote is Vote.ABORTED} if record else set()
        return parties.pop() if len(parties) == 1 else None

    # Messages from peers.

    async def receive(self, sender: int, message: bytes) -> bytes | None:
        """Handle a message of helper `sender`, authenticated by TLS. Return the sealed reply, if there is one."""
        body = await self.peers.accept(sender, message)
        if body is None:
            return None
        # Before the reply, which then already reflects it.
        await self._handle(sender, body)
        reply = await self._reply_to(body)
        return None if reply is None else self.peers.seal(reply)

    async def _handle(self, sender: int, body: Body) -> None:
        """Apply a message, or a reply to one of ours. Idempotent."""
        match body:
            case Propose():
                await self._handle_proposal(sender, body)
            case Reserved():
                await self._handle_reserved(sender, body)
            case StateMessage():
                self._negotiations.heard(sender, body.attempt_id)
                await self.voting.handle_state(sender, body)
            case Refuse():
                if negotiation := self._negotiations.find(body.query_key):
                    negotiation.heard.add(sender)
                    negotiation.refusals[sender] = body.reason
            case Ask() | Hello() | Head() | Show() | Shown():
                pass
            case _:
                assert_never(body)

    async def _handle_proposal(self, sender: int, proposal: Propose) -> None:
        negotiation = self._negotiations.find(proposal.query.key)
        if negotiation is None:
            return
        negotiation.heard.add(sender)
        negotiation.receive_proposal(sender, proposal)
        if negotiation.attempt_id is not None and negotiation.superseded():
            # The peer has left this attempt and will never vote for it. Fenced if we have voted already.
            await self.voting.abort(negotiation.attempt_id, f"helper {sender + 1} began another attempt")

    async def _handle_reserved(self, sender: int, reserved: Reserved) -> None:
        negotiation = self._negotiations.find(reserved.query.key)
        if negotiation is None or negotiation.query != reserved.query:
            return
        negotiation.heard.add(sender)
        negotiation.receive_reserved(sender, reserved)
        # Not only at the barrier: the contradiction may arrive when this helper is past it and computes already.
        if negotiation.attempt_id is not None and negotiation.contradicts(reserved):
            await self.voting.abort(negotiation.attempt_id, f"helper {sender + 1} computed another attempt id")

    async def _reply_to(self, body: Body) -> Body | None:
        match body:
            case Hello():
                return await self.peers.answer_hello(body)
            case Propose():
                return await self._answer_proposal(body)
            case Reserved():
                return await self._answer_reserved(body)
            case StateMessage() | Ask():
                return await self.voting.state(body.attempt_id)
            case Show():
                return await self._answer_show(body)
            case Refuse() | Head() | Shown():
                return None
            case _:
                assert_never(body)

    async def _answer_proposal(self, proposal: Propose) -> Body:
        # The ledger before the negotiation: after a vote, no new attempt is proposed before the old one has ended.
        if (state := await self.voting.state_once_voted(proposal.query.key)) is not None:
            return state
        negotiation = self._negotiations.find(proposal.query.key)
        if negotiation is not None and negotiation.own is not None:
            return negotiation.own
        return Refuse(proposal.query.key, self._negotiations.refusal(proposal.query.key))

    async def _answer_reserved(self, reserved: Reserved) -> Body:
        negotiation = self._negotiations.find(reserved.query.key)
        same = negotiation is not None and negotiation.attempt_id == reserved.attempt_id
        if negotiation is not None and same and not negotiation.ended.is_set():
            return Reserved(negotiation.query, negotiation.number, reserved.attempt_id)
        state = await self.voting.state(reserved.attempt_id)
        # An attempt that this helper never saw: reply with its own proposal, which carries its number.
        if state.status is VoteStatus.UNKNOWN and negotiation is not None and negotiation.own is not None:
            return negotiation.own
        return state

    async def _answer_show(self, question: Show) -> Body:
        """Return block hashes or blocks. Safe in any state: for an honest report a block reveals nothing new.

        The requester can compute what an honest report's block holds from its own.
        """
        negotiation = self._negotiations.find(question.query.key)
        evidence = negotiation.batch.evidence if negotiation is not None else None
        if negotiation is None or evidence is None or negotiation.query != question.query:
            return Refuse(question.query.key, self._negotiations.refusal(question.query.key))
        if evidence.check_root != question.check_root:
            return Refuse(question.query.key, "has recomputed its check shares and proposed again")
        if not question.blocks:
            return Shown(question, (b"".join(evidence.blocks),))
        if question.blocks[-1] >= len(evidence.blocks):
            return Refuse(question.query.key, "has no such block")
        blocks = await self._compute(lambda: evidence.show(question.blocks))
        if blocks is None:
            return Refuse(question.query.key, "its recomputed check shares differ from the first ones")
        return Shown(question, tuple(blocks))

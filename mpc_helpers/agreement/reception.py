"""What peers say, taken in and answered. Every message may come late, twice or out of order, without harm."""

from __future__ import annotations

from typing import assert_never

from mpc_helpers.agreement.hooks import Offload
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
from mpc_helpers.agreement.negotiations import Negotiations
from mpc_helpers.agreement.peers import Peers
from mpc_helpers.agreement.voting import Voting
from mpc_helpers.ledger.attempt import Word


class Reception:
    """Run by one helper for everything its peers send, asked for or not."""

    def __init__(self, peers: Peers, negotiations: Negotiations, voting: Voting, compute: Offload) -> None:
        self._peers = peers
        self._negotiations = negotiations
        self._voting = voting
        self._compute = compute

    async def receive(self, sender: int, message: bytes) -> bytes | None:
        """What helper `sender` (known from TLS) sent. Gives the reply, if there is one."""
        body = await self._peers.accept(sender, message)
        if body is None:
            return None
        # Heard first, so that the reply is what this helper says now that it knows.
        await self.hear(sender, body)
        reply = await self._reply_to(body)
        return None if reply is None else self._peers.seal(reply)

    async def hear(self, sender: int, body: Body) -> None:
        """Take in a message or a reply; whichever it is, it may have been heard before."""
        match body:
            case Propose():
                await self._hear_proposal(sender, body)
            case Reserved():
                await self._hear_reserved(sender, body)
            case StateMessage():
                await self._voting.hear(sender, body)
            case Refuse():
                if negotiation := self._negotiations.find(body.query_key):
                    negotiation.reasons[sender] = body.reason
            case Ask() | Hello() | Head() | Show() | Shown():
                pass
            case _:
                assert_never(body)

    async def _reply_to(self, body: Body) -> Body | None:
        match body:
            case Hello():
                return await self._peers.answer_hello(body)
            case Propose():
                return await self._answer_proposal(body)
            case Reserved():
                return await self._answer_reserved(body)
            case StateMessage() | Ask():
                return await self._voting.state(body.attempt_id)
            case Show():
                return await self._answer_show(body)
            case Refuse() | Head() | Shown():
                return None
            case _:
                assert_never(body)

    async def _answer_show(self, question: Show) -> Body:
        """Whatever this helper's own state: of an honest report a block shows what the peer who asks has itself."""
        negotiation = self._negotiations.find(question.query.key)
        evidence = negotiation.batch.evidence if negotiation is not None else None
        if negotiation is None or evidence is None or negotiation.query != question.query:
            return Refuse(question.query.key, self._negotiations.refusal(question.query.key))
        if evidence.check_root != question.check_root:
            return Refuse(question.query.key, "has checked again, and says so in another proposal")
        if not question.blocks:
            return Shown(question, (b"".join(evidence.blocks),))
        if question.blocks[-1] >= len(evidence.blocks):
            return Refuse(question.query.key, "has no such block")
        shown = await self._compute(lambda: evidence.show(question.blocks))
        if shown is None:
            return Refuse(question.query.key, "its check shares came out otherwise than before")
        return Shown(question, tuple(shown))

    async def _hear_proposal(self, sender: int, proposal: Propose) -> None:
        negotiation = self._negotiations.find(proposal.query.key)
        if negotiation is None:
            return
        negotiation.hear_proposal(sender, proposal)
        if negotiation.attempt_id is not None and negotiation.overtaken():
            # The peer is past this attempt and will never vote for it. Fenced off if we have voted already.
            await self._voting.abort(negotiation.attempt_id, f"helper {sender + 1} began another attempt")

    async def _hear_reserved(self, sender: int, reserved: Reserved) -> None:
        negotiation = self._negotiations.find(reserved.query.key)
        if negotiation is None or negotiation.query != reserved.query:
            return
        negotiation.hear_reserved(sender, reserved)
        # Not at the barrier only: a peer may say so when this helper is past it and computes already.
        if negotiation.attempt_id is not None and negotiation.contradicted_by(reserved):
            await self._voting.abort(negotiation.attempt_id, f"helper {sender + 1} computed another attempt id")

    async def _answer_proposal(self, proposal: Propose) -> Body:
        # The ledger before the negotiation: after a vote no new attempt is talked about before the old one's end.
        if (state := await self._voting.state_after_vote(proposal.query.key)) is not None:
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
        state = await self._voting.state(reserved.attempt_id)
        # An attempt that this helper never saw: its own proposal says how far it is.
        if state.word is Word.UNKNOWN and negotiation is not None and negotiation.own is not None:
            return negotiation.own
        return state

"""Agree and Spend between three helpers without a coordinator: who proposes what, reserves when, votes and releases.

The rules are COMMIT.md's, to the letter; the durable half of them is `ledger`, the votes are `voting`. Messages
may be lost, delayed, repeated and reordered, and every one may be handled again without harm.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar, assert_never

import numpy as np

from mpc_helpers.agreement import messages
from mpc_helpers.agreement.messages import Ask, Body, Head, Hello, Propose, Refuse, Reserved
from mpc_helpers.agreement.negotiation import AdmittedBatch, Attempt, AttemptTerms, Negotiation
from mpc_helpers.agreement.peers import Peers, Send
from mpc_helpers.agreement.voting import Offload, Voting
from mpc_helpers.ledger.attempt import (
    AgreementError,
    AlreadyReleased,
    Outcome,
    State,
    Step,
    TooFewReports,
    Word,
)
from mpc_helpers.ledger.ledger import Conflict, ReportLedger, Standing
from protocol.helper_set import realm
from protocol.keys import IdentityKey
from protocol.vote import SignedVote

__all__ = ["AdmittedBatch", "Agreement", "Attempt", "AttemptTerms", "Pace", "Release"]

logger = logging.getLogger(__name__)
T = TypeVar("T")
_REMEMBERED_REFUSALS = 1000


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds: between repeats of a message (doubling from `first`), and until a reply counts as lost."""

    first: float = 0.05
    longest_agree: float = 1.0
    longest_ask: float = 30.0
    patience: float = 10.0


@dataclass(frozen=True, slots=True)
class Release:
    """What a released helper hands out: its share and all three signed YES."""

    attempt_id: bytes
    sealed_share: bytes = field(repr=False)
    votes: tuple[SignedVote, ...]


class Agreement:
    """One per helper daemon and ledger. Deadlines are times of the running event loop (`loop.time()`).

    `keys` are the three helpers' identity keys in order; `send` carries bytes to a peer and brings its reply, which is
    whatever that peer's `receive` gave. `step` and `offload` are for tests.
    """

    def __init__(
        self,
        ledger: ReportLedger,
        identity: IdentityKey,
        keys: Sequence[bytes],
        helper_set_digest: bytes,
        send: Send,
        *,
        pace: Pace | None = None,
        entropy: Callable[[int], bytes] = os.urandom,
        step: Callable[[Step], None] = lambda _: None,
        offload: Offload | None = None,
    ) -> None:
        pace = pace or Pace()
        realm_ = realm(helper_set_digest)
        self._ledger = ledger
        self._pace = pace
        self._entropy = entropy
        self._step = step
        self._thread = ThreadPoolExecutor(1, "report-ledger")
        self._do: Offload = offload or self._in_thread
        self.peers = Peers(
            ledger, identity, keys, realm_, send, alarmed=self._wake, entropy=entropy, patience=pace.patience
        )
        self._spending = Voting(
            ledger,
            self.peers,
            offload=self._do,
            step=step,
            changed=self._attempt_changed,
            first_wait=pace.first,
            longest_wait=pace.longest_ask,
        )
        self._talks: dict[bytes, Negotiation] = {}
        self._refusals: dict[bytes, str] = {}

    # What the helper's page calls: Agree, Spend.

    async def recover(self) -> None:
        """On start, before listening: abort what was reserved, and take up asking about what was voted."""
        swept = await self._do(self._ledger.sweep)
        for attempt_id in swept:
            await self._spending.tell(attempt_id)
        for record in await self._do(self._ledger.unsettled):
            self._spending.keep_asking(record.attempt_id)

    async def agree(self, terms: AttemptTerms, batch: AdmittedBatch, deadline: float) -> Attempt:
        """Agree: one set of reports, reserved by all three, or `AgreementError` with everything free again."""
        key = terms.query.key
        if key in self._talks and not self._talks[key].agreed:
            raise AgreementError("this query is already being agreed on")
        talk = Negotiation(self.peers.helper, terms, batch)
        self._talks[key] = talk
        self._refusals.pop(key, None)
        try:
            async with asyncio.timeout_at(deadline):
                return await self._until_agreed(talk)
        except TimeoutError:
            error = talk.explain()
            await self._drop(talk, str(error))
            raise error from None
        except BaseException as error:
            await self._drop(talk, str(error))
            raise

    async def commit(self, attempt: Attempt, sealed_share: bytes, deadline: float) -> Outcome:
        """Spend: vote with the share sealed to the querier, release when both peers say YES.

        RELEASED is on disk when this returns, so the share may leave. UNDECIDED at the deadline: it stays locked, and
        peers are asked for ever; the ledger's `live` record, or a later `agree`, shows the end of it.
        """
        return await self._spending.vote(attempt.attempt_id, sealed_share, deadline)

    async def give_up(self, attempt: Attempt, reason: str) -> bool:
        """Abort an attempt that has not been voted for; False if it is too late or was done already."""
        return await self._spending.abort(attempt.attempt_id, reason)

    async def answer(self, query_key: bytes) -> Release | None:
        """The released share, for as long as the ledger lives: a retry gets the same bytes."""
        record = await self._do(lambda: self._ledger.live(query_key))
        if record is None or record.state is not State.RELEASED or record.sealed_share is None:
            return None
        return Release(record.attempt_id, record.sealed_share, (await self._spending.state(record.attempt_id)).votes)

    async def liars(self, query_key: bytes) -> set[int]:
        """The helpers proven to have voted both ways on this query's attempt: it is disputed."""
        record = await self._do(lambda: self._ledger.live(query_key))
        return record.liars if record else set()

    async def receive(self, peer: int, message: bytes) -> bytes | None:
        """Called by the daemon with what helper `peer` (known from TLS) sent. Gives the reply, if there is one."""
        body = await self.peers.accept(peer, message)
        reply = None if body is None else await self._react(peer, body)
        return None if reply is None else self.peers.seal(reply)

    async def close(self) -> None:
        """Stop talking. The ledger stays open."""
        await self._spending.close()
        await self.peers.close()
        self._thread.shutdown(wait=False)

    # Agree, step by step.

    async def _until_agreed(self, talk: Negotiation) -> Attempt:
        rest = self._pace.first
        while True:
            await self._wait_for_older(talk)
            free, seen = await self._wait_while_busy(talk)
            await self._propose(talk, free, seen)
            if await self._collect(talk) and await self._reserve(talk) and await self._barrier(talk):
                talk.agreed = True
                return talk.attempt()
            talk.withdraw()
            # Whatever is heard meanwhile: a helper that tells two stories could else wear the ledgers out.
            await asyncio.sleep(rest)
            rest = min(2 * rest, self._pace.longest_agree)

    async def _wait_for_older(self, talk: Negotiation) -> None:
        """COMMIT.md, "New attempt": only when this query has no live attempt here."""
        while (record := await self._do(lambda: self._ledger.live(talk.query.key))) is not None:
            if record.state is State.RELEASED:
                raise AlreadyReleased("this query has its answer already", "Fetch the stored answer.")
            if record.liars:
                names = ", ".join(str(helper + 1) for helper in sorted(record.liars))
                raise AgreementError(f"disputed: helper {names} voted both ways", helper=min(record.liars))
            talk.waiting = "the outcome of an earlier attempt"
            if record.state is State.RESERVED:
                await self._spending.abort(record.attempt_id, "a new attempt was asked for")
            else:
                self._spending.keep_asking(record.attempt_id)
                await self._pause(talk, self._pace.longest_agree)

    async def _wait_while_busy(self, talk: Negotiation) -> tuple[messages.Mask, int]:
        """Which admitted reports are free here, and how many are spent. While some are busy: wait, holding nothing."""
        batch = talk.batch
        while True:
            self._heed_alarms()
            standings = await self._do(lambda: self._ledger.lookup(batch.digests, talk.query.key))
            busy = np.count_nonzero(batch.admitted & (standings == Standing.BUSY))
            if not busy:
                seen = batch.admitted & (standings == Standing.SEEN)
                return batch.admitted & ~seen, int(np.count_nonzero(seen))
            talk.waiting = f"{busy} reports that another query holds"
            await self._pause(talk, self._pace.longest_agree)

    def _heed_alarms(self) -> None:
        """Nothing new is begun with a ledger that went back. Called where nothing has been voted for yet."""
        for helper, text in self.peers.alarms.items():
            raise AgreementError(text, "Its operator must rebuild the ledger or retire its keys.", helper=helper)

    async def _propose(self, talk: Negotiation, free: messages.Mask, seen: int) -> None:
        """A number above every one used here, and the highest heard if that is higher; a salt never used before."""
        talk.floor = await self._do(lambda: self._ledger.last_number(talk.query.key))
        proposal = talk.propose(max(talk.floor + 1, talk.heard), free, seen, self._entropy(messages.SALT_SIZE))
        await self._send_both(talk, proposal, Step.PROPOSE_SENT_TO_ONE)

    async def _collect(self, talk: Negotiation) -> bool:
        """Until all three proposals for this number are in; False when a peer is at a higher one."""
        talk.waiting = "proposals"
        wait = self._pace.first
        while talk.heard <= talk.number:
            self._heed_alarms()
            if talk.failure:
                raise talk.failure
            if talk.complete():
                return True
            await self._pause(talk, wait)
            wait = min(2 * wait, self._pace.longest_agree)
            self._repeat(talk, talk.own, talk.lacking_proposal)
        return False

    async def _reserve(self, talk: Negotiation) -> bool:
        """Reserve the accepted reports here. The set never shrinks after agreement: a conflict ends the attempt."""
        talk.frozen = True
        reservation = await self._do(talk.reservation)
        if (accepted := len(reservation.digests)) < talk.terms.minimum:
            raise TooFewReports(
                f"only {accepted} reports are acceptable to all three helpers; {talk.terms.minimum} are needed"
                + talk.left_out_by_peers(),
                "Look at the helpers' rejections, or wait for more reports. Nothing was spent.",
            )
        try:
            taken = await self._do(lambda: self._ledger.reserve(reservation))
        except Conflict as conflict:
            talk.waiting = str(conflict)
            await self._spending.ended(reservation.attempt_id)
            return False
        talk.attempt_id = reservation.attempt_id
        for attempt_id in taken:
            await self._spending.ended(attempt_id)
        return True

    async def _barrier(self, talk: Negotiation) -> bool:
        """RESERVED to both peers and from both peers, for this very attempt; no MPC byte earlier."""
        talk.waiting = "the reservations of the other helpers"
        await self._send_both(talk, self._reserved(talk), Step.RESERVED_SENT_TO_ONE)
        wait = self._pace.first
        while not talk.ended.is_set():
            self._heed_alarms()
            if not any(talk.lacking_reserved(peer) for peer in self.peers.others):
                return True
            if talk.heard > talk.number or any(map(talk.contradicted_by, talk.reserved.values())):
                await self._abort(talk, "the helpers computed different accepted roots, or one began anew")
                return False
            await self._pause(talk, wait)
            wait = min(2 * wait, self._pace.longest_agree)
            self._repeat(talk, self._reserved(talk), talk.lacking_reserved)
        return False

    def _reserved(self, talk: Negotiation) -> Reserved | None:
        if talk.attempt_id is None:
            return None
        return Reserved(talk.query, talk.number, talk.attempt_id)

    async def _send_both(self, talk: Negotiation, body: Propose | Reserved | None, step: Step) -> None:
        for index, peer in enumerate(self.peers.others):
            if body is not None:
                self.peers.post(peer, (body.kind, talk.query.key, body.number), body, self._hear)
                await asyncio.sleep(0)
            if index == 0:
                self._step(step)

    def _repeat(self, talk: Negotiation, body: Propose | Reserved | None, lacking: Callable[[int], bool]) -> None:
        for peer in self.peers.others:
            if body is not None and lacking(peer):
                self.peers.post(peer, (body.kind, talk.query.key, body.number), body, self._hear)

    async def _pause(self, talk: Negotiation, seconds: float) -> None:
        """Until something was heard about this query, or `seconds` passed."""
        try:
            async with asyncio.timeout(seconds):
                await talk.changed.wait()
        except TimeoutError:
            pass
        talk.changed.clear()

    async def _abort(self, talk: Negotiation, reason: str) -> None:
        if talk.attempt_id is not None:
            await self._spending.abort(talk.attempt_id, reason)

    async def _drop(self, talk: Negotiation, reason: str) -> None:
        """Agreement failed: free what this query reserved here, and remember why for peers that still wait."""
        self._talks.pop(talk.query.key, None)
        while len(self._refusals) >= _REMEMBERED_REFUSALS:
            self._refusals.pop(next(iter(self._refusals)))
        self._refusals[talk.query.key] = reason
        record = await self._do(lambda: self._ledger.live(talk.query.key))
        if record is not None and record.state is State.RESERVED:
            await self._spending.abort(record.attempt_id, reason)

    # What peers say.

    async def _react(self, peer: int, body: Body) -> Body | None:
        await self._hear(peer, body)
        match body:
            case Hello():
                return self.peers.answer_hello(body)
            case Propose():
                return await self._answer_proposal(body)
            case Reserved():
                return await self._answer_reserved(body)
            case messages.State() | Ask():
                return await self._spending.state(body.attempt_id)
            case Refuse() | Head():
                return None
            case _:
                assert_never(body)

    async def _hear(self, peer: int, body: Body) -> None:
        """Take in a message or a reply; whichever it is, it may have been heard before."""
        match body:
            case Propose():
                await self._hear_proposal(peer, body)
            case Reserved():
                await self._hear_reserved(peer, body)
            case messages.State():
                await self._spending.hear(peer, body)
            case Refuse():
                if talk := self._talks.get(body.query_key):
                    talk.reasons[peer] = body.reason
            case Ask() | Hello() | Head():
                pass
            case _:
                assert_never(body)

    async def _hear_proposal(self, peer: int, proposal: Propose) -> None:
        talk = self._talks.get(proposal.query.key)
        if talk is None:
            return
        talk.reasons.pop(peer, None)
        talk.hear_proposal(peer, proposal)
        if talk.attempt_id is not None and talk.heard > talk.number:
            # The peer is past this attempt and will never vote for it. Fenced off if we have voted already.
            await self._abort(talk, f"helper {peer + 1} began another attempt")

    async def _hear_reserved(self, peer: int, reserved: Reserved) -> None:
        talk = self._talks.get(reserved.query.key)
        if talk is None or talk.query != reserved.query:
            return
        talk.hear_reserved(peer, reserved)
        if talk.contradicted_by(reserved):
            await self._abort(talk, f"helper {peer + 1} computed another accepted root")

    async def _answer_proposal(self, proposal: Propose) -> Body:
        key = proposal.query.key
        record = await self._do(lambda: self._ledger.live(key))
        if record is not None and record.state is not State.RESERVED:
            return await self._spending.state(record.attempt_id)
        talk = self._talks.get(key)
        if talk is not None and talk.own is not None:
            return talk.own
        waiting = f"waiting for {talk.waiting}" if talk else "has not begun this query"
        return Refuse(key, self._refusals.get(key, waiting))

    async def _answer_reserved(self, reserved: Reserved) -> Body:
        talk = self._talks.get(reserved.query.key)
        if talk is not None and talk.attempt_id == reserved.attempt_id and not talk.ended.is_set():
            return Reserved(talk.query, talk.number, reserved.attempt_id)
        state = await self._spending.state(reserved.attempt_id)
        return talk.own if state.word is Word.UNKNOWN and talk is not None and talk.own is not None else state

    def _attempt_changed(self, attempt_id: bytes, state: State) -> None:
        """Told by Spend after each commit."""
        self._wake()
        for talk in list(self._talks.values()):
            if talk.attempt_id == attempt_id and state is not State.VOTED:
                talk.ended.set()
                if talk.agreed:
                    self._talks.pop(talk.query.key, None)

    def _wake(self) -> None:
        """Let every query that waits look again."""
        for talk in self._talks.values():
            talk.changed.set()

    def _in_thread(self, call: Callable[[], T]) -> Awaitable[T]:
        return asyncio.get_running_loop().run_in_executor(self._thread, call)

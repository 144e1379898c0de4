"""Agree and Spend, step by step: propose, collect three proposals of one number, check, reserve, wait for both peers.

The rules are COMMIT.md's, to the letter. Messages may be lost, delayed, repeated and reordered, so each one is sent
again until its answer is in. What peers say in between is taken in by `Reception`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import assert_never

import numpy as np

from mpc_helpers.agreement.checker import Checker
from mpc_helpers.agreement.errors import AlreadyReleased
from mpc_helpers.agreement.messages import SALT_SIZE, Mask, Propose, Reserved
from mpc_helpers.agreement.negotiation import Attempt, Negotiation, drawn_too_often, too_few, too_late
from mpc_helpers.agreement.peers import Handle
from mpc_helpers.agreement.surroundings import Surroundings
from mpc_helpers.agreement.voting import Voting
from mpc_helpers.ledger.attempt import AttemptState, Step
from mpc_helpers.ledger.moves import Fenced
from mpc_helpers.ledger.reports import Conflict, Standing
from protocol.header import TIME_STEP


class Announcer:
    """Tells both peers, and tells them again. `hear` takes in what they reply."""

    def __init__(self, around: Surroundings, hear: Handle) -> None:
        self._parties = around.parties
        self._peers = around.peers
        self._step = around.hooks.step
        self._hear = hear

    async def tell_both(self, body: Propose | Reserved, step: Step) -> None:
        """For the first time; the crash point lies between the two."""
        for index, party in enumerate(self._parties.others):
            self._post(party, body)
            # Lets the post begin, so that a helper stopped at the step below has sent to one peer and not the other.
            await asyncio.sleep(0)
            if index == 0:
                self._step(step)

    def repeat(self, body: Propose | Reserved | None, lacking: Callable[[int], bool]) -> None:
        """To those who have not answered. Nothing once the body has been withdrawn."""
        for party in self._parties.others:
            if body is not None and lacking(party):
                self._post(party, body)

    def _post(self, party: int, body: Propose | Reserved) -> None:
        self._peers.post(party, (body.kind, body.query.key, body.number), body, self._hear)


class Negotiator:
    """Run by one helper for all its queries."""

    def __init__(self, around: Surroundings, voting: Voting, announcer: Announcer) -> None:
        self._ledger = around.ledger
        self._parties = around.parties
        self._alarms = around.alarms
        self._negotiations = around.negotiations
        self._offload = around.offload
        self._pace = around.pace
        self._hooks = around.hooks
        self._voting = voting
        self._announcer = announcer
        self._checker = Checker(around)

    async def agree(self, negotiation: Negotiation) -> None:
        """Until all three proposals of one number are in. Nothing is reserved yet, here or elsewhere."""
        self._negotiations.begin(negotiation)
        async with self._or_free(negotiation):
            await self._until_complete(negotiation, self._pace.first)

    async def reserve(self, negotiation: Negotiation) -> Attempt:
        """Until all three have the accepted reports reserved, agreeing again where one of them could not."""
        async with self._or_free(negotiation):
            rest = self._pace.first
            while not await self._reserved_by_all(negotiation):
                rest = await self._rest(negotiation, rest)
                await self._until_complete(negotiation, rest)
            negotiation.agreed = True
            return negotiation.attempt()

    @asynccontextmanager
    async def _or_free(self, negotiation: Negotiation) -> AsyncIterator[None]:
        """By the deadline, or with everything free again and the reason kept for peers that still wait."""
        try:
            async with asyncio.timeout_at(negotiation.deadline):
                yield
        except TimeoutError:
            error = self._alarms.error() or too_late(negotiation)
            await self._fail(negotiation, str(error))
            raise error from None
        except BaseException as error:
            await self._fail(negotiation, str(error))
            raise

    async def _fail(self, negotiation: Negotiation, reason: str) -> None:
        self._negotiations.fail(negotiation, reason)
        # Asked of the ledger, not of the negotiation: we may have been stopped between its commit and our noting it.
        record = await self._offload(lambda: self._ledger.attempts.live(negotiation.query.key))
        if record is not None and record.state is AttemptState.RESERVED:
            await self._voting.abort(record.attempt_id, reason)

    async def _until_complete(self, negotiation: Negotiation, rest: float) -> None:
        while True:
            await self._wait_for_older(negotiation)
            free = await self._wait_while_busy(negotiation)
            await self._propose(negotiation, free)
            if await self._collect(negotiation) and await self._check(negotiation):
                return
            rest = await self._rest(negotiation, rest)

    async def _rest(self, negotiation: Negotiation, seconds: float) -> float:
        """Hold nothing for a while. Gives how long to rest the next time."""
        negotiation.withdraw()
        # Whatever is heard meanwhile: a helper that says two different things could else wear the ledgers out.
        await asyncio.sleep(seconds)
        return min(2 * seconds, self._pace.longest_agree)

    async def _wait_for_older(self, negotiation: Negotiation) -> None:
        """COMMIT.md, "New attempt": only when this query has no live attempt here."""
        while (record := await self._offload(lambda: self._ledger.attempts.live(negotiation.query.key))) is not None:
            match record.state:
                case AttemptState.RELEASED:
                    raise AlreadyReleased("this query has its answer already", "Fetch the stored answer.")
                case AttemptState.RESERVED:
                    # Of an earlier call that was stopped. Nobody works on it any more, so nobody will vote for it.
                    await self._voting.abort(record.attempt_id, "a new attempt was asked for")
                case AttemptState.VOTED | AttemptState.RENOUNCED:
                    negotiation.waiting = "the outcome of an earlier attempt"
                    await self._voting.outcome(record.attempt_id)
                case AttemptState.ABORTED:
                    return
                case _:
                    assert_never(record.state)

    async def _wait_while_busy(self, negotiation: Negotiation) -> Mask:
        """Which admitted reports are free here. While some are busy: wait, holding nothing (or two could deadlock)."""
        batch, key, most_draws = negotiation.batch, negotiation.query.key, negotiation.terms.most_draws
        while True:
            self._alarms.heed()
            standings = await self._offload(lambda: self._ledger.reports.lookup(batch.digests, key, most_draws))
            # The watermark may have risen since Admit. What it has passed is left out, not the whole query with it.
            watermark = await self._offload(lambda: self._ledger.reports.watermark)
            expired = batch.admitted & (batch.hours <= watermark // TIME_STEP)
            admitted = batch.admitted & ~expired
            seen = admitted & (standings == Standing.SEEN)
            invalid = admitted & batch.invalid & ~seen
            free: Mask = admitted & ~seen & ~invalid
            if drawn := int(np.count_nonzero(free & (standings == Standing.DRAWN))):
                ended_by = await self._offload(lambda: self._ledger.attempts.gave_up(key))
                raise drawn_too_often(negotiation, drawn, ended_by)
            busy = np.count_nonzero(free & (standings == Standing.BUSY))
            if not busy:
                negotiation.note(seen=seen, invalid=invalid, expired=expired)
                return free
            negotiation.waiting = f"{busy} reports that another query holds"
            await negotiation.pause(self._pace.longest_agree)

    async def _propose(self, negotiation: Negotiation, free: Mask) -> None:
        """A number above every one used here, and the highest heard if that is higher; a salt never used before."""
        key = negotiation.query.key
        negotiation.last_used = await self._offload(lambda: self._ledger.attempts.last_number(key))
        number = max(negotiation.last_used + 1, negotiation.highest_heard, negotiation.least_number)
        # The salt makes the attempt id one that this helper has never seen, so no old vote or session fits it.
        proposal = negotiation.propose(number, free, self._hooks.entropy(SALT_SIZE))
        await self._announcer.tell_both(proposal, Step.PROPOSE_SENT_TO_ONE)

    async def _collect(self, negotiation: Negotiation) -> bool:
        """Until all three proposals for this number are in; False when a peer is at a higher one."""
        negotiation.waiting = "proposals"
        wait = self._pace.first
        while not negotiation.overtaken():
            self._alarms.heed()
            if negotiation.failure:
                raise negotiation.failure
            if negotiation.complete():
                return True
            await negotiation.pause(wait)
            wait = min(2 * wait, self._pace.longest_agree)
            self._announcer.repeat(negotiation.own, negotiation.lacking_proposal)
        return False

    async def _check(self, negotiation: Negotiation) -> bool:
        """Whether the numbers of every accepted report are valid. False: propose again, without what is not."""
        # Before the first await: a proposal that arrives during the check must not change what is reserved.
        negotiation.frozen = True
        accepted = await self._offload(negotiation.accepted_by_all)
        if (count := int(np.count_nonzero(accepted))) < negotiation.terms.minimum:
            raise too_few(negotiation, count)
        if await self._checker.check(negotiation, accepted):
            return True
        negotiation.least_number = negotiation.number + 1
        return False

    async def _reserved_by_all(self, negotiation: Negotiation) -> bool:
        reserved = await self._reserve_here(negotiation)
        if reserved is None or not await self._barrier(negotiation, reserved):
            return False
        try:
            await self._offload(lambda: self._ledger.moves.begin(reserved.attempt_id))
        except Fenced:
            # Aborted since we looked, and not counted as a draw: then no byte of its MPC may leave.
            return False
        return True

    async def _reserve_here(self, negotiation: Negotiation) -> Reserved | None:
        """Reserve the accepted reports here. The set never shrinks after agreement: a conflict ends the attempt."""
        reservation = await self._offload(negotiation.reservation)
        try:
            taken = await self._offload(lambda: self._ledger.moves.reserve(reservation))
        except Conflict as conflict:
            negotiation.waiting = str(conflict)
            await self._voting.ended(reservation.attempt_id)
            return None
        negotiation.attempt_id = reservation.attempt_id
        for attempt_id in taken:
            await self._voting.ended(attempt_id)
        return Reserved(negotiation.query, reservation.number, reservation.attempt_id)

    async def _barrier(self, negotiation: Negotiation, message: Reserved) -> bool:
        """RESERVED to both peers and from both peers, for this very attempt; no MPC byte earlier."""
        negotiation.waiting = "the reservations of the other helpers"
        await self._announcer.tell_both(message, Step.RESERVED_SENT_TO_ONE)
        wait = self._pace.first
        while not negotiation.ended.is_set():
            self._alarms.heed()
            if not any(map(negotiation.lacking_reserved, self._parties.others)):
                return True
            if negotiation.overtaken() or any(map(negotiation.contradicted_by, negotiation.reserved.values())):
                reason = "the helpers computed different attempt ids, or one began again"
                await self._voting.abort(message.attempt_id, reason)
                return False
            await negotiation.pause(wait)
            wait = min(2 * wait, self._pace.longest_agree)
            self._announcer.repeat(message, negotiation.lacking_reserved)
        return False

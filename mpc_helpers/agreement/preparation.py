"""Phase one, prepare: propose, collect three proposals of one number, check, reserve, and wait for both peers.

The rules are COMMIT.md's. Messages may be lost, delayed, repeated and reordered, so each is retransmitted until it is
answered; what peers send meanwhile is applied by `Agreement`.

`ShareCheck` decides, before anything is reserved, whether the numbers of the accepted reports are valid. Each helper
has computed check shares of every report's residues alone (`admission.residues`). Where all three are equal, the
residues are zero. So proposals carry one hash over all of them; where those differ, the helpers exchange the hashes of
blocks, and where those differ, the blocks. A report is *confirmed* if its shares are equal, and *invalid* if they lie
on one line and are not. If they do not lie on a line, some helper's share is wrong and the query fails: no report is
rejected for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import assert_never

import numpy as np

from mpc_helpers.admission.column import BLOCK, Block, block_hash, check_root, fit
from mpc_helpers.agreement.messages import MAX_SHOWN, SALT_SIZE, Mask, Propose, Refuse, Reserved, Show, Shown
from mpc_helpers.agreement.negotiation import (
    NOT_BEGUN,
    AgreementError,
    AlreadyReleased,
    Attempt,
    DrawnTooOften,
    Evidence,
    Negotiation,
    TooFewReports,
    public_error,
)
from mpc_helpers.agreement.peers import Context, Handle
from mpc_helpers.agreement.voting import Voting
from mpc_helpers.ledger.attempt import AttemptState, Failpoint
from mpc_helpers.ledger.engine import LedgerClosed, LedgerError
from mpc_helpers.ledger.moves import Fenced
from mpc_helpers.ledger.reports import Conflict, Standing
from protocol.errors import ErrorKind, ProtocolError, Rejection
from protocol.header import TIME_STEP
from protocol.shares import PARTIES
from protocol.status import Shortfall
from protocol.wire import HASH_SIZE

_ASK_OPERATORS = "Ask the three operators to compare their logs for this query. Nothing was spent."


class Preparation:
    """Phase one for all queries of one helper. `handle` applies what peers reply."""

    def __init__(self, context: Context, voting: Voting, handle: Handle) -> None:
        self._ledger = context.ledger
        self._parties = context.parties
        self._peers = context.peers
        self._alarms = context.alarms
        self._negotiations = context.negotiations
        self._offload = context.offload
        self._retry = context.retry
        self._hooks = context.hooks
        self._voting = voting
        self._handle = handle
        self._share_check = ShareCheck(context)

    async def collect_proposals(self, negotiation: Negotiation) -> None:
        """Propose until all three proposals of one number are in and checked. Nothing is reserved yet."""
        self._negotiations.begin(negotiation)
        async with self._or_abort(negotiation):
            await self._until_complete(negotiation, self._retry.first_delay)

    async def reserve(self, negotiation: Negotiation) -> Attempt:
        """Reserve the accepted reports at all three helpers, proposing again where one of them could not."""
        async with self._or_abort(negotiation):
            delay = self._retry.first_delay
            while not await self._reserved_by_all(negotiation):
                delay = await self._back_off(negotiation, delay)
                await self._until_complete(negotiation, delay)
            negotiation.agreed = True
            return negotiation.attempt()

    @asynccontextmanager
    async def _or_abort(self, negotiation: Negotiation) -> AsyncIterator[None]:
        """Enforce the deadline. On any error abort, and keep the reason for peers that still wait."""
        try:
            async with asyncio.timeout_at(negotiation.deadline):
                yield
        except TimeoutError:
            error = self._alarms.error() or _too_late(negotiation)
            await self._fail(negotiation, str(error))
            raise error from None
        except BaseException as error:
            await self._fail(negotiation, str(public_error(error)))
            raise

    async def _fail(self, negotiation: Negotiation, reason: str) -> None:
        self._negotiations.fail(negotiation, reason)
        # Read the ledger, not the negotiation: we may have been cancelled between the commit and recording it.
        try:
            record = await self._offload(lambda: self._ledger.attempts.live(negotiation.query.key))
        except LedgerError as error:
            # The query ends here and nobody reads again, so the attempt would stay reserved until a restart.
            if negotiation.reserving is not None and not isinstance(error, LedgerClosed):
                self._voting.abort_later(negotiation.reserving, reason)
            raise
        if record is not None and record.state is AttemptState.RESERVED:
            await self._voting.abort(record.attempt_id, reason)

    async def _until_complete(self, negotiation: Negotiation, delay: float) -> None:
        while True:
            await self._wait_for_older(negotiation)
            free = await self._wait_while_busy(negotiation)
            await self._propose(negotiation, free)
            if await self._collect(negotiation) and await self._check(negotiation):
                return
            delay = await self._back_off(negotiation, delay)

    async def _back_off(self, negotiation: Negotiation, seconds: float) -> float:
        """Withdraw the proposal and sleep. Return the next delay."""
        negotiation.withdraw()
        # Sleep even if messages arrive: otherwise an equivocating helper could drive us through unbounded retries.
        await asyncio.sleep(seconds)
        return min(2 * seconds, self._retry.max_agree_delay)

    async def _wait_for_older(self, negotiation: Negotiation) -> None:
        """Wait until this query has no live attempt here (COMMIT.md, "New attempt")."""
        while (record := await self._offload(lambda: self._ledger.attempts.live(negotiation.query.key))) is not None:
            match record.state:
                case AttemptState.RELEASED:
                    raise AlreadyReleased("this query was answered already", "Fetch the stored answer.")
                case AttemptState.RESERVED:
                    # Left by an earlier call that was cancelled: no worker is left to vote for it.
                    await self._voting.abort(record.attempt_id, "a new attempt was started")
                case AttemptState.VOTED | AttemptState.RENOUNCED:
                    negotiation.waiting_for = "the outcome of an earlier attempt"
                    await self._voting.outcome(record.attempt_id)
                case AttemptState.ABORTED:
                    return
                case _:
                    assert_never(record.state)

    async def _wait_while_busy(self, negotiation: Negotiation) -> Mask:
        """Return the admitted reports that are free here. Wait for busy ones, holding nothing (no deadlock)."""
        batch, key, most_draws = negotiation.batch, negotiation.query.key, negotiation.terms.most_draws
        while True:
            self._alarms.check()
            standings = await self._offload(
                lambda: self._ledger.reports.lookup(
                    batch.digests, batch.hours, key, most_draws, batch.amounts, site=batch.site
                )
            )
            # The watermark may have risen since Admit. Reports below it are left out; the query goes on.
            watermark = await self._offload(lambda: self._ledger.reports.watermark)
            expired = batch.admitted & (batch.hours <= watermark // TIME_STEP)
            admitted = batch.admitted & ~expired
            seen = admitted & (standings == Standing.SEEN)
            little = admitted & (standings == Standing.LITTLE)
            invalid = admitted & batch.invalid & ~seen & ~little
            free: Mask = admitted & ~seen & ~little & ~invalid
            if drawn := int(np.count_nonzero(free & (standings == Standing.DRAWN))):
                aborts = await self._offload(lambda: self._ledger.attempts.aborts_by_party(key))
                raise _drawn_too_often(negotiation, drawn, aborts)
            busy = np.count_nonzero(free & (standings == Standing.BUSY))
            if not busy:
                rejected = {Rejection.SEEN: seen, Rejection.TOO_LITTLE_LEFT: little}
                negotiation.set_rejections(rejected | {Rejection.INVALID: invalid, Rejection.EXPIRED: expired})
                return free
            negotiation.waiting_for = f"{busy} reports that another query holds"
            await negotiation.pause(self._retry.max_agree_delay)

    async def _propose(self, negotiation: Negotiation, free: Mask) -> None:
        """Propose under a number above every one used here (or the highest seen), with a fresh salt."""
        key = negotiation.query.key
        negotiation.last_used = await self._offload(lambda: self._ledger.attempts.last_number(key))
        number = max(negotiation.last_used + 1, negotiation.highest_number_seen, negotiation.least_number)
        # The salt makes the attempt id fresh for this helper, so no old vote or session can be replayed into it.
        proposal = negotiation.propose(number, free, self._hooks.entropy(SALT_SIZE))
        await self._broadcast(proposal, Failpoint.PROPOSE_SENT_TO_ONE)

    async def _collect(self, negotiation: Negotiation) -> bool:
        """Return True once all three proposals for this number are in, False if a peer is at a higher one."""
        negotiation.waiting_for = "proposals"
        delay = self._retry.first_delay
        while not negotiation.superseded():
            self._alarms.check()
            if negotiation.failure:
                raise negotiation.failure
            if negotiation.complete():
                return True
            await negotiation.pause(delay)
            delay = min(2 * delay, self._retry.max_agree_delay)
            self._retransmit(negotiation.own, negotiation.lacks_proposal)
        return False

    async def _check(self, negotiation: Negotiation) -> bool:
        """Return whether every accepted report is valid. If not, propose again without the invalid ones."""
        # Before the first await: a proposal that arrives during the check must not change what is reserved.
        negotiation.frozen = True
        accepted = await self._offload(negotiation.accepted_by_all)
        if (count := int(np.count_nonzero(accepted))) < negotiation.terms.minimum:
            raise _too_few(negotiation, count, await self._offload(lambda: self._affordable(negotiation)))
        if await self._share_check.check(negotiation, accepted):
            return True
        negotiation.least_number = negotiation.number + 1
        return False

    def _affordable(self, negotiation: Negotiation) -> int | None:
        """Return the largest ε at which this helper would propose as many reports as the query needs."""
        batch, reports = negotiation.batch, self._ledger.reports
        if batch.amounts is None:
            return None
        left = reports.left(batch.digests, batch.hours, batch.amounts, negotiation.query.key, site=batch.site)
        left[~batch.admitted | batch.invalid | (batch.hours <= reports.watermark // TIME_STEP)] = 0
        return batch.amounts.affordable(left, negotiation.terms.minimum, negotiation.terms.sensitivity)

    async def _reserved_by_all(self, negotiation: Negotiation) -> bool:
        reserved = await self._reserve_here(negotiation)
        if reserved is None or not await self._barrier(negotiation, reserved):
            return False
        try:
            await self._offload(lambda: self._ledger.moves.begin(reserved.attempt_id))
        except Fenced:
            # Aborted meanwhile, and not counted as a draw: no byte of its MPC may be sent.
            return False
        return True

    async def _reserve_here(self, negotiation: Negotiation) -> Reserved | None:
        """Reserve the accepted reports here, all or none: a conflict aborts the attempt."""
        reservation = await self._offload(negotiation.reservation)
        negotiation.reserving = reservation.attempt_id
        try:
            taken = await self._offload(lambda: self._ledger.moves.reserve(reservation))
        except Conflict as conflict:
            negotiation.waiting_for = str(conflict)
            await self._voting.announce_abort(reservation.attempt_id)
            return None
        negotiation.attempt_id = reservation.attempt_id
        for attempt_id in taken:
            await self._voting.announce_abort(attempt_id)
        return Reserved(negotiation.query, reservation.number, reservation.attempt_id)

    async def _barrier(self, negotiation: Negotiation, message: Reserved) -> bool:
        """Exchange RESERVED for this attempt with both peers. No byte of the MPC is sent earlier."""
        negotiation.waiting_for = "the reservations of the other helpers"
        negotiation.heard = set()
        await self._broadcast(message, Failpoint.RESERVED_SENT_TO_ONE)
        delay = self._retry.first_delay
        while not negotiation.ended.is_set():
            self._alarms.check()
            if not any(map(negotiation.lacks_reserved, self._parties.others)):
                return True
            if negotiation.superseded() or any(map(negotiation.contradicts, negotiation.reserved.values())):
                reason = "the helpers computed different attempt ids, or one began again"
                await self._voting.abort(message.attempt_id, reason)
                return False
            await negotiation.pause(delay)
            delay = min(2 * delay, self._retry.max_agree_delay)
            self._retransmit(message, negotiation.lacks_reserved)
        return False

    async def _broadcast(self, body: Propose | Reserved, failpoint: Failpoint) -> None:
        """Send `body` to both peers for the first time."""
        for index, party in enumerate(self._parties.others):
            self._post(party, body)
            # Yield, so that the first message is out and the second is not when the failpoint fires.
            await asyncio.sleep(0)
            if index == 0:
                self._hooks.failpoint(failpoint)

    def _retransmit(self, body: Propose | Reserved | None, lacks: Callable[[int], bool]) -> None:
        """Send `body` again to each peer whose answer is missing, unless it was withdrawn."""
        for party in self._parties.others:
            if body is not None and lacks(party):
                self._post(party, body)

    def _post(self, party: int, body: Propose | Reserved) -> None:
        self._peers.post(party, (body.kind, body.query.key, body.number), body, self._handle)


def _too_few(negotiation: Negotiation, accepted: int, affordable: int | None = None) -> TooFewReports:
    """Return the error for too few accepted reports. Its counts show a helper that rejects everything.

    `affordable` is the largest ε at which this helper would propose enough of them (`Amounts.affordable`).
    """
    first, second, third = (negotiation.proposals[party].rejection_counts for party in range(PARTIES))
    needed = negotiation.terms.minimum
    return TooFewReports(
        Shortfall(len(negotiation.batch.digests), accepted, needed, (first, second, third)),
        f"only {accepted} reports are acceptable to all three helpers; {needed} are needed",
        "Wait for more reports, or ask for fewer.",
        affordable=affordable,
    )


def _drawn_too_often(negotiation: Negotiation, reports: int, aborts: Mapping[int, int]) -> DrawnTooOften:
    """Return the error for exhausted draws: a malicious helper that aborts until it likes a draw gets no other.

    The signed NOs say who aborted. They blame no one: a malicious helper can make an honest one abort.
    """
    names = ", ".join(f"helper {party + 1} aborted {count}" for party, count in sorted(aborts.items()))
    message = (
        f"{reports} reports were in {negotiation.terms.most_draws} attempts that were aborted after their noise was"
        " drawn, and no further attempt with this kind of noise may use them; nothing was spent"
    )
    return DrawnTooOften(
        f"{message} ({names} of this query's)" if names else message,
        "Ask again with joint noise, if all three helpers run it. With local noise, one of them can shift the answer.",
    )


def _too_late(negotiation: Negotiation) -> AgreementError:
    """Return the error for a missed deadline, blaming the helper that did not answer if it is one.

    A helper that answers, but with something else, may be waiting for the third: then it is one of the two.
    """
    lacking = negotiation.lacks_reserved if negotiation.attempt_id else negotiation.lacks_proposal
    silent = [party for party in range(PARTIES) if party != negotiation.party and negotiation.own and lacking(party)]
    missing = silent or sorted(negotiation.awaiting_blocks)
    answers = "; ".join(f"helper {party + 1}: {negotiation.refusals.get(party, 'no answer')}" for party in missing)
    message = f"the helpers did not agree in time, waiting for {negotiation.waiting_for}"
    # An honest helper that has not begun waits for nobody, and one that has ended the query says something else.
    idle = {party for party, reason in negotiation.refusals.items() if reason == NOT_BEGUN}
    silent = [party for party in missing if party not in negotiation.heard or party in idle]
    left_out = ", ".join(f"{count} {reason.value}" for reason, count in negotiation.rejections().items() if count)
    return AgreementError(
        (f"{message} ({answers})" if answers else message)
        + _one_of_two(negotiation, missing, silent)
        + (f"; this helper leaves out: {left_out}" if left_out else ""),
        "Retry with the same query id; nothing was spent.",
        party=silent[0] if len(silent) == 1 and negotiation.raises < _MANY_RAISES else None,
        kind=ErrorKind.TIMEOUT,
    )


# Fewer can be lost messages, or a restart.
_MANY_RAISES = 3


def _one_of_two(negotiation: Negotiation, missing: Sequence[int], silent: Sequence[int]) -> str:
    """Return whom the other helpers' messages leave under suspicion: one alone could have led the other on."""
    one, other = (party + 1 for party in range(PARTIES) if party != negotiation.party)
    if negotiation.raises >= _MANY_RAISES:
        times = f"{negotiation.raises} times before all three had proposed"
        return f"; helper {one} or helper {other} raised the attempt number {times}"
    return f"; helper {one} or helper {other} holds it up" if missing and not silent else ""


class Superseded(Exception):
    """A peer has proposed a higher number: what is checked here would never be reserved."""


class ShareCheck:
    """The check between helpers. Run on proposals that no longer change."""

    def __init__(self, context: Context) -> None:
        self._parties = context.parties
        self._peers = context.peers
        self._alarms = context.alarms
        self._compute = context.compute
        self._retry = context.retry

    async def check(self, negotiation: Negotiation, accepted: Mask) -> bool:
        """Return whether every accepted report is confirmed. The check_results are updated either way.

        A helper that was superseded may not know what the peers know to be invalid. So where a proposal counts invalid
        reports, all that this helper proposes is examined: three honest helpers list the same invalid reports.
        """
        evidence = negotiation.batch.evidence
        if evidence is None:
            return True
        examined = accepted
        if any(proposal.rejection_counts.get(Rejection.INVALID) for proposal in negotiation.proposals.values()):
            examined = negotiation.proposals[self._parties.party].mask
        try:
            await self._confirm(negotiation, evidence, accepted, examined)
        except Superseded:
            return False
        return not (examined & evidence.check_results.invalid).any()

    async def _confirm(self, negotiation: Negotiation, evidence: Evidence, accepted: Mask, examined: Mask) -> None:
        check_results = evidence.check_results
        if not (examined & ~check_results.confirmed).any():
            return
        roots = {negotiation.proposals[party].check_root for party in range(3)}
        # The common case: nothing more is exchanged.
        if len(roots) == 1:
            check_results.confirmed |= evidence.summed
            return
        lists = await self._both(negotiation, ())
        needed = examined & ~check_results.confirmed
        differing = []
        for number, own in enumerate(evidence.blocks):
            rows = slice(number * BLOCK, (number + 1) * BLOCK)
            if all(hashes[number] == own for hashes in lists.values()):
                check_results.confirmed[rows] |= evidence.summed[rows]
            elif needed[rows].any():
                differing.append(number)
        for start in range(0, len(differing), MAX_SHOWN):
            numbers = differing[start : start + MAX_SHOWN]
            await self._compare(negotiation, evidence, accepted, needed, numbers, lists)

    async def _compare(
        self,
        negotiation: Negotiation,
        evidence: Evidence,
        accepted: Mask,
        needed: Mask,
        numbers: Sequence[int],
        lists: dict[int, list[bytes]],
    ) -> None:
        """Compare some blocks that differ, row by row."""
        own = await self._compute(lambda: evidence.show(numbers))
        if own is None:
            raise AgreementError(
                "this helper's recomputed check shares differ from the first ones",
                "Its memory or disk may be failing.",
                party=self._parties.party,
                kind=ErrorKind.INCONSISTENT,
            )
        blocks = {self._parties.party: own, **await self._both(negotiation, tuple(numbers))}
        for at, number in enumerate(numbers):
            rows = slice(number * BLOCK, (number + 1) * BLOCK)
            places = np.flatnonzero(needed[rows])
            copies = []
            for party in range(3):
                expected = lists[party][number] if party in lists else None
                block = self._parse_block(party, number, blocks[party][at], expected, evidence.residues)
                if not block.opened[places[accepted[rows][places]]].all():
                    raise self._blame(party, "proposes a report whose check shares it does not show")
                copies.append(block)
            # A report that only this helper proposes need not have opened elsewhere.
            places = places[np.all([block.opened[places] for block in copies], axis=0)]
            first, second, third = (block.rows(places) for block in copies)
            if not fit(first, second, third).all():
                one, other = (party + 1 for party in self._parties.others)
                message = f"helper {one} or helper {other} sent a wrong share in the check"
                raise AgreementError(message, _ASK_OPERATORS, kind=ErrorKind.BAD_PROOF)
            zero = (second == third).all(axis=1)
            evidence.check_results.confirmed[number * BLOCK + places[zero]] = True
            evidence.check_results.invalid[number * BLOCK + places[~zero]] = True

    def _parse_block(self, party: int, number: int, preimage: bytes, expected: bytes | None, residues: int) -> Block:
        """Parse a block, if it is the one in that helper's own list of hashes."""
        if expected is not None and block_hash(number, preimage) != expected:
            raise self._blame(party, "does not show the block that its list names")
        try:
            return Block.parse(preimage, residues)
        except ProtocolError as error:
            raise self._blame(party, f"shows a malformed block: {error}", ErrorKind.MALFORMED) from None

    async def _both(self, negotiation: Negotiation, numbers: tuple[int, ...]) -> dict[int, list[bytes]]:
        """Return what both peers show: the hashes of all blocks, or these blocks."""
        parties = self._parties.others
        negotiation.waiting_for = "check shares that differ"
        negotiation.heard = set()
        replies = await asyncio.gather(*(self._ask(negotiation, party, numbers) for party in parties))
        return dict(zip(parties, replies, strict=True))

    async def _ask(self, negotiation: Negotiation, party: int, numbers: tuple[int, ...]) -> list[bytes]:
        """Ask until there is an answer. A helper that has restarted proposes again, under a higher number."""
        root = negotiation.proposals[party].check_root
        question = Show(negotiation.query, root, numbers)
        negotiation.awaiting_blocks.add(party)
        delay = self._retry.first_delay
        while not negotiation.superseded():
            self._alarms.check()
            reply = await self._peers.call(party, question)
            if isinstance(reply, Shown) and reply.question == question:
                negotiation.awaiting_blocks.discard(party)
                return list(reply.content) if numbers else self._read_list(party, root, reply.content[0], negotiation)
            if isinstance(reply, Refuse):
                negotiation.heard.add(party)
                negotiation.refusals[party] = reply.reason
            await negotiation.pause(delay)
            delay = min(2 * delay, self._retry.max_agree_delay)
        raise Superseded

    def _read_list(self, party: int, root: bytes, joined: bytes, negotiation: Negotiation) -> list[bytes]:
        evidence = negotiation.batch.evidence
        count = len(evidence.blocks) if evidence else 0
        hashes = [joined[at : at + HASH_SIZE] for at in range(0, len(joined), HASH_SIZE)]
        if len(joined) != HASH_SIZE * count or check_root(hashes) != root:
            raise self._blame(party, "does not show the list that its proposal names")
        return hashes

    def _blame(self, party: int, what: str, kind: ErrorKind = ErrorKind.INCONSISTENT) -> AgreementError:
        """Return an error that blames `party`: two messages signed by it prove the contradiction."""
        return AgreementError(f"helper {party + 1} {what}", _ASK_OPERATORS, party=party, kind=kind)

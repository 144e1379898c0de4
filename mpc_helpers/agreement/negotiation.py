"""What one helper holds in memory while it agrees with its peers on an attempt. Nothing here survives a restart."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from mpc_helpers.admission.blocks import NO_ROOT
from mpc_helpers.admission.verdicts import Verdicts
from mpc_helpers.agreement.errors import AgreementError, DrawnTooOften, TooFewReports
from mpc_helpers.agreement.messages import Mask, Propose, Reserved, pack_mask, pack_rejections
from mpc_helpers.ledger.attempt import MAX_NUMBER_JUMP, QueryName, Reservation, attempt_id_of
from protocol.batch import DigestRows, Digests
from protocol.errors import ProtocolError, Rejection
from protocol.header import TIME_STEP
from protocol.left_out import Codes, bitmap_digest, code_of
from protocol.shares import PARTIES
from protocol.status import Shortfall

Hours = npt.NDArray[np.uint32]
_LAST_HOUR = np.iinfo(np.uint32).max


class Selected:
    """Some of a batch's digests, in its order, read from where all of them are."""

    def __init__(self, rows: DigestRows, chosen: Mask) -> None:
        self._rows = rows
        # Half the size of what flatnonzero gives; a batch has less than 2^32 reports.
        self._places = np.arange(len(chosen), dtype=np.uint32)[chosen]

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, span: slice, /) -> Digests:
        places = self._places[span]
        if not len(places):
            return self._rows[0:0]
        first = int(places[0])
        return self._rows[first : int(places[-1]) + 1][places - first]


class Evidence(Protocol):
    """What one helper computed of a batch of checked reports, and what the three found out about it together."""

    @property
    def summed(self) -> Mask:
        """Which reports opened here, and so have check shares."""

    @property
    def verdicts(self) -> Verdicts:
        """Written by the check between helpers alone."""

    @property
    def blocks(self) -> Sequence[bytes]:
        """A hash for each block of check shares."""

    @property
    def check_root(self) -> bytes:
        """What stands for all of them."""

    @property
    def residues(self) -> int:
        """How many check shares a report has."""

    def show(self, numbers: Sequence[int]) -> list[bytes] | None:
        """Some blocks; None if one of them does not come out as before."""


@dataclass(frozen=True, slots=True)
class AdmittedBatch:
    """A batch after Admit: digests in order, which of them this helper admitted (never a repeat), when each was made.

    `debug` is what each report's own header says. `rejections` counts, by reason, the reports this helper did not
    admit; what is already spent, or turns out to be invalid, is added later. Checked reports come with `evidence`.
    """

    root: bytes
    digests: DigestRows = field(repr=False)
    hours: Hours = field(repr=False)
    debug: Mask = field(repr=False)
    admitted: Mask = field(repr=False)
    rejections: Mapping[Rejection, int]
    evidence: Evidence | None = field(default=None, repr=False)
    # Why each report was not admitted, as `protocol.left_out` has it; None where nobody asks.
    codes: Codes | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not (len(self.digests) == len(self.hours) == len(self.debug) == len(self.admitted)):
            raise ProtocolError("a batch has one digest, one hour, one debug flag and one verdict for each report")

    @property
    def check_root(self) -> bytes:
        """What a proposal says about the numbers of all reports."""
        return self.evidence.check_root if self.evidence else NO_ROOT

    @property
    def invalid(self) -> Mask:
        """Which reports were found invalid so far."""
        return self.evidence.verdicts.invalid if self.evidence else np.zeros(len(self.admitted), dtype=np.bool_)


@dataclass(frozen=True, slots=True)
class AttemptTerms:
    """What an attempt is for. With fewer than `minimum` accepted reports the query fails before anything is spent.

    `debug` is the query's flag, which its digest covers; `parameters` is a digest of all that must be equal in the MPC.
    `most_draws` is in how many draws of noise a report may be, where a helper knows part of the noise before it votes.
    """

    query: QueryName
    debug: bool
    parameters: bytes
    minimum: int = 1
    most_draws: int | None = None


@dataclass(frozen=True, slots=True)
class Attempt:
    """What `agree` comes to: reserved at all three. `ended` is set when it can no longer be voted for here."""

    attempt_id: bytes
    query: QueryName
    number: int
    accepted: Mask = field(repr=False)
    rejections: tuple[dict[Rejection, int], dict[Rejection, int], dict[Rejection, int]]
    ended: asyncio.Event = field(repr=False, compare=False)
    # What stands for the three bitmaps, and why this helper leaves out what it does.
    proposed: tuple[bytes, bytes, bytes] = field(repr=False)
    codes: Codes = field(repr=False, compare=False)

    @property
    def counted(self) -> int:
        """How many reports are in it."""
        return int(np.count_nonzero(self.accepted))


@dataclass(slots=True)
class Negotiation:
    """The proposals for one query, and the attempt they led to. `deadline` is a time of the event loop."""

    party: int
    terms: AttemptTerms
    batch: AdmittedBatch
    deadline: float = math.inf
    # The highest number used here before, and the highest that a peer has proposed.
    last_used: int = 0
    highest_heard: int = 0
    own: Propose | None = None
    # How many admitted reports were spent already when this helper last looked, and how many of the others invalid.
    seen: int = 0
    invalid: int = 0
    # And how many the watermark had passed by then.
    expired: int = 0
    # The same for each report.
    codes: Codes | None = field(default=None, repr=False)
    # A number that was proposed and not reserved is not proposed again, or old and new proposals of it would mix.
    least_number: int = 1
    proposals: dict[int, Propose] = field(default_factory=dict)
    reserved: dict[int, Reserved] = field(default_factory=dict)
    attempt_id: bytes | None = None
    accepted: Mask | None = None
    # Set when all three proposals are in: what is checked is what is reserved, whatever a peer says later.
    frozen: bool = False
    # Set when all three have reserved. Until then another `agree` for the same query would be a second voice.
    agreed: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    failure: AgreementError | None = None
    waiting: str = "the other helpers"
    reasons: dict[int, str] = field(default_factory=dict)
    # The peers that were asked for check shares and have not shown them yet.
    showing: set[int] = field(default_factory=set)

    @property
    def query(self) -> QueryName:
        """The query it is about."""
        return self.terms.query

    @property
    def number(self) -> int:
        """The number being proposed, or the last one used."""
        return self.own.number if self.own else self.last_used

    def propose(self, number: int, free: Mask, salt: bytes) -> Propose:
        """This helper's proposal under a new number; what was heard under other numbers no longer counts."""
        rejections = pack_rejections(self.left_out())
        terms, root, bitmap = self.terms, self.batch.root, pack_mask(free)
        check_root = self.batch.check_root
        self.own = Propose(self.query, terms.parameters, root, number, salt, len(free), bitmap, rejections, check_root)
        kept = {party: known for party, known in self.proposals.items() if known.number == number}
        self.proposals = kept | {self.party: self.own}
        self.attempt_id, self.accepted, self.frozen, self.ended = None, None, False, asyncio.Event()
        return self.own

    def withdraw(self) -> None:
        """Hold nothing: not even a proposal."""
        self.own, self.attempt_id, self.accepted, self.frozen = None, None, None, False

    def hear_proposal(self, sender: int, proposal: Propose) -> None:
        """Adopt a higher number, ignore a jump, keep what belongs to the number at hand."""
        self.changed.set()
        self.reasons.pop(sender, None)
        if not self._same_question(sender, proposal) or proposal.number > self.number + MAX_NUMBER_JUMP:
            return
        self.highest_heard = max(self.highest_heard, proposal.number)
        known = self.proposals.get(sender)
        if not self.frozen and (known is None or proposal.number >= known.number):
            self.proposals[sender] = proposal

    def hear_reserved(self, sender: int, reserved: Reserved) -> None:
        """Keep the latest RESERVED of a peer."""
        self.changed.set()
        known = self.reserved.get(sender)
        if known is None or reserved.number >= known.number:
            self.reserved[sender] = reserved

    def complete(self) -> bool:
        """Whether all three proposals for the number at hand are in."""
        return len(self.proposals) == PARTIES and all(known.number == self.number for known in self.proposals.values())

    def lacking_proposal(self, party: int) -> bool:
        """Whether the peer's proposal for the number at hand is still missing."""
        return party not in self.proposals or self.proposals[party].number != self.number

    def lacking_reserved(self, party: int) -> bool:
        """Whether the peer's RESERVED for this attempt is still missing."""
        return party not in self.reserved or self.reserved[party].attempt_id != self.attempt_id

    def overtaken(self) -> bool:
        """Whether a peer is at a higher number: it will never reserve or vote for this one."""
        return self.highest_heard > self.number

    def contradicted_by(self, reserved: Reserved) -> bool:
        """Whether a peer reserved something else under this attempt's number: someone says two different things."""
        return self.attempt_id is not None and reserved.number == self.number and reserved.attempt_id != self.attempt_id

    def accepted_by_all(self) -> Mask:
        """A report counts only if all three admitted it and no helper has seen it."""
        first, second, third = (self.proposals[party].mask for party in range(PARTIES))
        accepted: Mask = first & second & third
        return accepted

    def reservation(self) -> Reservation:
        """What all three accept. Same on all three, or no attempt."""
        proposals = [self.proposals[party] for party in range(PARTIES)]
        accepted = self.accepted_by_all()
        # A second lock on the door: the check has been here before.
        if self.batch.evidence is not None and (accepted & ~self.batch.evidence.verdicts.confirmed).any():
            raise ProtocolError("a report was accepted whose numbers were never checked")
        everything, debug = self.batch.digests, self.batch.debug
        whole = bool(accepted.all())
        digests = everything if whole else Selected(everything, accepted)
        self.accepted = accepted
        return Reservation(
            attempt_id_of(self.query, self.number, [proposal.encode() for proposal in proposals], digests),
            self.query,
            self.number,
            self.terms.debug,
            digests,
            debug if whole else debug[accepted],
            oldest=int(self.batch.hours.min(where=accepted, initial=_LAST_HOUR)) * TIME_STEP,
            newest=int(self.batch.hours.max(where=accepted, initial=0)) * TIME_STEP,
            most_draws=self.terms.most_draws,
        )

    def attempt(self) -> Attempt:
        """The attempt, once RESERVED is in from both peers."""
        if self.attempt_id is None or self.accepted is None:
            raise ProtocolError("nothing is reserved")
        proposals = [self.proposals[party] for party in range(PARTIES)]
        first, second, third = (proposal.rejection_counts for proposal in proposals)
        one, two, three = (bitmap_digest(proposal.bitmap) for proposal in proposals)
        codes = np.zeros(len(self.accepted), dtype=np.uint8) if self.codes is None else self.codes
        return Attempt(
            self.attempt_id,
            self.query,
            self.number,
            self.accepted,
            (first, second, third),
            self.ended,
            (one, two, three),
            codes,
        )

    async def pause(self, seconds: float) -> None:
        """Until something was heard about this query, or `seconds` passed."""
        try:
            async with asyncio.timeout(seconds):
                await self.changed.wait()
        except TimeoutError:
            pass
        # Here and not before waiting: what was heard since the caller last looked must end the wait at once.
        self.changed.clear()

    def note(self, *, seen: Mask, invalid: Mask, expired: Mask) -> None:
        """What this helper will leave out besides what it did not admit."""
        self.seen, self.invalid, self.expired = (int(np.count_nonzero(mask)) for mask in (seen, invalid, expired))
        if self.batch.codes is not None:
            self.codes = self.batch.codes.copy()
            for mask, reason in ((seen, Rejection.SEEN), (invalid, Rejection.INVALID), (expired, Rejection.EXPIRED)):
                self.codes[mask] = code_of(reason)

    def left_out(self) -> dict[Rejection, int]:
        """What this helper has against the batch: what it did not admit, what it has seen, and what is invalid."""
        counts = dict(self.batch.rejections)
        for reason, count in self.left_out_besides().items():
            counts[reason] = counts.get(reason, 0) + count
        return counts

    def left_out_besides(self) -> dict[Rejection, int]:
        """Of that, what was admitted."""
        return {Rejection.SEEN: self.seen, Rejection.INVALID: self.invalid, Rejection.EXPIRED: self.expired}

    def _same_question(self, sender: int, proposal: Propose) -> bool:
        batch = self.batch
        if proposal.query.digest != self.query.digest:
            difference = "has another query under the same id"
        elif (proposal.batch_root, proposal.count) != (batch.root, len(batch.digests)):
            difference = "was given other reports"
        elif proposal.parameters != self.terms.parameters:
            difference = "would compute with other parameters"
        elif (proposal.check_root == NO_ROOT) != (batch.evidence is None):
            difference = "checks other numbers"
        else:
            return True
        message = f"helper {sender + 1} {difference}"
        self.failure = AgreementError(message, "Submit the same to all three.", party=sender)
        return False


def too_few(negotiation: Negotiation, accepted: int) -> TooFewReports:
    """The error for so few accepted reports: a helper that leaves everything out is seen to do so."""
    first, second, third = (negotiation.proposals[party].rejection_counts for party in range(PARTIES))
    needed = negotiation.terms.minimum
    return TooFewReports(
        Shortfall(len(negotiation.batch.digests), accepted, needed, (first, second, third)),
        f"only {accepted} reports are acceptable to all three helpers; {needed} are needed",
        "Wait for more reports, or ask for fewer.",
    )


def drawn_too_often(negotiation: Negotiation, reports: int, ended_by: Mapping[int, int]) -> DrawnTooOften:
    """No further draw for these reports: whoever gives attempts up to wait for one it likes gets no other."""
    names = ", ".join(f"helper {party + 1} ended {count}" for party, count in sorted(ended_by.items()))
    message = (
        f"{reports} reports were in {negotiation.terms.most_draws} attempts that came to nothing after their noise"
        " was drawn, and no further attempt at this kind of noise is made with them; nothing was spent"
    )
    return DrawnTooOften(
        f"{message} ({names} of this query's)" if names else message,
        "Ask again with joint noise, if all three helpers run it. With local noise, one of them can shift the answer.",
        party=next(iter(ended_by)) if len(ended_by) == 1 else None,
    )


def too_late(negotiation: Negotiation) -> AgreementError:
    """Why the deadline passed, naming the helper in the way if it is one."""
    lacking = negotiation.lacking_reserved if negotiation.attempt_id else negotiation.lacking_proposal
    silent = [party for party in range(PARTIES) if party != negotiation.party and negotiation.own and lacking(party)]
    missing = silent or sorted(negotiation.showing)
    answers = "; ".join(f"helper {party + 1}: {negotiation.reasons.get(party, 'no answer')}" for party in missing)
    message = f"the helpers did not agree in time, waiting for {negotiation.waiting}"
    return AgreementError(
        (f"{message} ({answers})" if answers else message) + _leaves_out("this helper", negotiation.left_out()),
        "Ask again with the same query id; nothing was spent.",
        party=missing[0] if len(missing) == 1 else None,
    )


def _leaves_out(name: str, counts: Mapping[Rejection, int]) -> str:
    reasons = ", ".join(f"{count} {reason.value}" for reason, count in counts.items() if count)
    return f"; {name} leaves out: {reasons}" if reasons else ""

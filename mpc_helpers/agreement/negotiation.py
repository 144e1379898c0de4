"""The in-memory state of one agreement: terms, admitted batch, proposals, the attempt they led to, and its errors.

Nothing here survives a restart. Each error names the helper that caused it, if it is one.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from mpc_helpers.admission.column import NO_ROOT, CheckResults
from mpc_helpers.agreement.messages import Mask, Propose, Reserved, pack_mask, pack_rejections
from mpc_helpers.ledger.attempt import MAX_NUMBER_JUMP, AttemptState, QueryName, Reservation, attempt_id_of
from mpc_helpers.ledger.engine import LedgerError
from mpc_helpers.ledger.ledger import QueryChanged
from mpc_helpers.ledger.moves import Fenced
from mpc_helpers.ledger.reports import Conflict
from protocol.amounts import Amounts
from protocol.batch import DigestRows, Digests
from protocol.errors import ErrorKind, HelperError, ProtocolError, Rejection, TrefoilError
from protocol.left_out import Codes, bitmap_digest, code_of
from protocol.query import VERSION_WITHOUT_REST, Query
from protocol.shares import PARTIES
from protocol.status import Shortfall


class AgreementError(HelperError):
    """The helpers did not agree on an attempt."""

    kind = ErrorKind.ABORTED


class AlreadyReleased(AgreementError):
    """The query was answered: serve the stored share (`Helper.stored_answer`), never attempt it again."""

    kind = ErrorKind.ALREADY_COUNTED


class TooFewReports(AgreementError):
    """Permanently rejected: the three helpers agree that too few reports are acceptable."""

    kind = ErrorKind.TOO_FEW

    def __init__(self, shortfall: Shortfall, message: str, hint: str = "", *, affordable: int | None = None) -> None:
        super().__init__(message, hint)
        self.shortfall = shortfall
        self.affordable = affordable


class DrawnTooOften(AgreementError):
    """Permanently rejected: some reports were in as many noise draws as the query allows."""

    kind = ErrorKind.REFUSED


class Disputed(AgreementError):
    """A helper equivocated: the reports stay locked, and its two signed votes prove it."""

    kind = ErrorKind.DISPUTED

    def __init__(self, party: int) -> None:
        super().__init__(
            f"helper {party + 1} voted both YES and NO on the same attempt",
            "Take its two signatures to its operator.",
            party=party,
        )


def public_error(error: BaseException) -> TrefoilError:
    """Return what sites and peers are told of `error`. A ledger's own names its file, or its database's address."""
    if isinstance(error, LedgerError) and not isinstance(error, Conflict | Fenced | QueryChanged):
        what = "refused a change" if error.kind is ErrorKind.REFUSED else "cannot be used now"
        message = f"this helper's ledger {what}; its log says why"
        return TrefoilError(message, "Retry later, or ask its operator.", kind=error.kind)
    return error if isinstance(error, TrefoilError) else TrefoilError(str(error))


Hours = npt.NDArray[np.uint32]


class Selected:
    """A lazy view of some of a batch's digests, in its order."""

    def __init__(self, rows: DigestRows, chosen: Mask) -> None:
        self._rows = rows
        # Half the size of what flatnonzero returns; a batch has less than 2^32 reports.
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
    """One helper's check shares of a batch of checked reports, in blocks, and the check results of all three."""

    check_results: CheckResults

    # Which reports opened here, and so have check shares.
    @property
    def summed(self) -> Mask: ...

    # A hash for each block, and one over all of these.
    @property
    def blocks(self) -> Sequence[bytes]: ...

    @property
    def check_root(self) -> bytes: ...

    # How many check shares a report has.
    @property
    def residues(self) -> int: ...

    def show(self, numbers: Sequence[int]) -> list[bytes] | None:
        """Recompute some blocks; return None if one of them differs from the first time."""


@dataclass(frozen=True, slots=True)
class AdmittedBatch:
    """A batch after Admit: digests in order, which of them this helper admitted (no replay), when each was made.

    `debug` is the flag in each report's own header. `rejections` counts, by reason, the reports this helper did not
    admit; reports already spent or found invalid are added later. Checked reports come with `evidence`.
    """

    root: bytes
    digests: DigestRows = field(repr=False)
    hours: Hours = field(repr=False)
    debug: Mask = field(repr=False)
    admitted: Mask = field(repr=False)
    rejections: Mapping[Rejection, int]
    evidence: Evidence | None = field(default=None, repr=False)
    # Why each report was not admitted, in the codes of `protocol.left_out`; None where not recorded.
    codes: Codes | None = field(default=None, repr=False)
    # What each report paid and what the query needs of it, for the ledger.
    amounts: Amounts | None = field(default=None, repr=False)
    # The site in the header of every report that was admitted. Without a default: with another, the ledger would look a
    # report up where it is not.
    site: str = field(kw_only=True)

    def __post_init__(self) -> None:
        if not (len(self.digests) == len(self.hours) == len(self.debug) == len(self.admitted)):
            raise ProtocolError("a batch has one digest, one hour, one debug flag and one verdict for each report")
        if self.amounts is not None and len(self.amounts) != len(self.digests):
            raise ProtocolError("a batch has one amount for each report", kind=ErrorKind.INCONSISTENT)

    @property
    def check_root(self) -> bytes:
        """Return the root that a proposal carries for the check shares."""
        return self.evidence.check_root if self.evidence else NO_ROOT

    @property
    def invalid(self) -> Mask:
        """Return which reports are known to be invalid so far."""
        return self.evidence.check_results.invalid if self.evidence else np.zeros(len(self.admitted), dtype=np.bool_)


@dataclass(frozen=True, slots=True)
class AttemptTerms:
    """The terms of an attempt. With fewer than `minimum` accepted reports the query fails before anything is spent.

    `debug` is the query's flag, which its digest covers; `parameters` is a digest of all that must be equal in the MPC.
    `most_draws` limits the noise draws a report may be in, where a helper knows part of the noise before it votes.
    `keeps_rest` takes of each report what the answer costs, and no more. `names_little` is False for a query of version
    2: its answer has no count for reports with too little left, and counts them as seen.
    """

    query: QueryName
    debug: bool
    parameters: bytes
    minimum: int = 1
    most_draws: int | None = None
    keeps_rest: bool = False
    names_little: bool = True
    # The query's Δ, at which a failure says what can be asked for.
    sensitivity: int = 1

    @classmethod
    def of(cls, query: Query, parameters: bytes, minimum: int, most_draws: int | None) -> AttemptTerms:
        names_little = query.version != VERSION_WITHOUT_REST
        name = QueryName.of(query)
        rest, reach = query.keeps_rest, query.sensitivity
        return cls(name, query.debug, parameters, minimum, most_draws, rest, names_little, reach)


@dataclass(frozen=True, slots=True)
class Attempt:
    """An attempt reserved at all three helpers. `ended` is set when it can no longer be voted for here."""

    attempt_id: bytes
    query: QueryName
    number: int
    accepted: Mask = field(repr=False)
    rejections: tuple[dict[Rejection, int], dict[Rejection, int], dict[Rejection, int]]
    ended: asyncio.Event = field(repr=False, compare=False)
    # The digests of the three bitmaps, and this helper's reasons for the reports it left out.
    proposed: tuple[bytes, bytes, bytes] = field(repr=False)
    codes: Codes = field(repr=False, compare=False)

    @property
    def counted(self) -> int:
        return int(np.count_nonzero(self.accepted))


@dataclass(slots=True)
class Negotiation:
    """The proposals for one query, and the attempt they led to. `deadline` is a time of the event loop."""

    party: int
    terms: AttemptTerms
    batch: AdmittedBatch
    deadline: float = math.inf
    # The highest attempt number used here, and the highest that a peer has proposed.
    last_used: int = 0
    highest_number_seen: int = 0
    own: Propose | None = None
    # Counts of admitted reports that were rejected at the last lookup: spent, invalid, or below the watermark.
    rejected_after_admission: dict[Rejection, int] = field(default_factory=dict)
    # The same per report.
    codes: Codes | None = field(default=None, repr=False)
    # A number that was proposed and not reserved is not reused, or its old and new proposals would mix.
    least_number: int = 1
    proposals: dict[int, Propose] = field(default_factory=dict)
    reserved: dict[int, Reserved] = field(default_factory=dict)
    # Set before the ledger is asked to reserve; `attempt_id` when it has: no RESERVED is sent before it is durable.
    reserving: bytes | None = None
    attempt_id: bytes | None = None
    accepted: Mask | None = None
    # Set when all three proposals are in: exactly what is checked is reserved, regardless of later messages.
    frozen: bool = False
    # Set when all three have reserved. Until then a second `agree` for the same query would equivocate.
    agreed: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    failure: AgreementError | None = None
    waiting_for: str = "the other helpers"
    refusals: dict[int, str] = field(default_factory=dict)
    # The peers that have not yet answered a request for check shares.
    awaiting_blocks: set[int] = field(default_factory=set)
    # The peers that have sent anything about this query since the last proposal or reservation of this helper.
    heard: set[int] = field(default_factory=set)
    # How often a peer raised the number before it had proposed the current one.
    raises: int = 0

    @property
    def query(self) -> QueryName:
        return self.terms.query

    @property
    def number(self) -> int:
        """Return the number being proposed, or the last one used."""
        return self.own.number if self.own else self.last_used

    def propose(self, number: int, free: Mask, salt: bytes) -> Propose:
        """Make this helper's proposal under a new number, and drop proposals under other numbers."""
        rejections = pack_rejections(self.rejections())
        terms, root, bitmap = self.terms, self.batch.root, pack_mask(free)
        check_root = self.batch.check_root
        self.own = Propose(self.query, terms.parameters, root, number, salt, len(free), bitmap, rejections, check_root)
        kept = {party: other for party, other in self.proposals.items() if other.number == number}
        self.proposals = kept | {self.party: self.own}
        self.attempt_id, self.accepted, self.frozen, self.ended = None, None, False, asyncio.Event()
        self.heard = set()
        return self.own

    def withdraw(self) -> None:
        self.own, self.attempt_id, self.accepted, self.frozen = None, None, None, False

    def receive_proposal(self, sender: int, proposal: Propose) -> None:
        """Store a peer's proposal; adopt a higher number, but ignore a jump beyond MAX_NUMBER_JUMP."""
        self.changed.set()
        self.refusals.pop(sender, None)
        if not self._matches(sender, proposal) or proposal.number > self.number + MAX_NUMBER_JUMP:
            return
        # An honest helper has proposed each number before it raises it; only a lost message hides that from us.
        if self.own and proposal.number > max(self.number, self.highest_number_seen) and self.lacks_proposal(sender):
            self.raises += 1
        self.highest_number_seen = max(self.highest_number_seen, proposal.number)
        previous = self.proposals.get(sender)
        if not self.frozen and (previous is None or proposal.number >= previous.number):
            self.proposals[sender] = proposal

    def receive_reserved(self, sender: int, reserved: Reserved) -> None:
        """Store a peer's RESERVED, unless a later one is stored."""
        self.changed.set()
        previous = self.reserved.get(sender)
        if previous is None or reserved.number >= previous.number:
            self.reserved[sender] = reserved

    def complete(self) -> bool:
        """Return whether all three proposals for the current number are in."""
        return len(self.proposals) == PARTIES and all(each.number == self.number for each in self.proposals.values())

    def lacks_proposal(self, party: int) -> bool:
        return party not in self.proposals or self.proposals[party].number != self.number

    def lacks_reserved(self, party: int) -> bool:
        return party not in self.reserved or self.reserved[party].attempt_id != self.attempt_id

    def superseded(self) -> bool:
        """Return whether a peer has proposed a higher number: it will never reserve or vote for this one."""
        return self.highest_number_seen > self.number

    def contradicts(self, reserved: Reserved) -> bool:
        """Return whether a peer reserved another attempt under this number: some helper equivocated."""
        return self.attempt_id is not None and reserved.number == self.number and reserved.attempt_id != self.attempt_id

    def accepted_by_all(self) -> Mask:
        first, second, third = (self.proposals[party].mask for party in range(PARTIES))
        accepted: Mask = first & second & third
        return accepted

    def reservation(self) -> Reservation:
        """Return the reservation of what all three accept: equal at all three, or the attempt ids differ."""
        proposals = [self.proposals[party] for party in range(PARTIES)]
        accepted = self.accepted_by_all()
        # Defence in depth: the check has confirmed them already.
        if self.batch.evidence is not None and (accepted & ~self.batch.evidence.check_results.confirmed).any():
            raise ProtocolError("a report was accepted whose numbers were never checked", kind=ErrorKind.BAD_PROOF)
        digests, debug, hours, amounts = self.batch.digests, self.batch.debug, self.batch.hours, self.batch.amounts
        every = bool(accepted.all())
        digests = digests if every else Selected(digests, accepted)
        self.accepted = accepted
        return Reservation(
            attempt_id_of(self.query, self.number, [proposal.encode() for proposal in proposals], digests),
            self.query,
            self.number,
            self.terms.debug,
            digests,
            debug if every else debug[accepted],
            hours if every else hours[accepted],
            self.terms.most_draws,
            amounts if every or amounts is None else amounts.chosen(accepted),
            whole=not self.terms.keeps_rest,
            site=self.batch.site,
        )

    def attempt(self) -> Attempt:
        """Return the attempt. Requires RESERVED from both peers."""
        if self.attempt_id is None or self.accepted is None:
            raise ProtocolError("nothing is reserved", kind=ErrorKind.INCONSISTENT)
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
        """Wait until a message about this query arrives, or for `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                await self.changed.wait()
        except TimeoutError:
            pass
        # Cleared after waiting, not before: a message since the caller's last look must end the wait at once.
        self.changed.clear()

    def set_rejections(self, rejected: Mapping[Rejection, Mask]) -> None:
        """Record the reports that passed admission and are rejected now. A report is in one mask at most."""
        self.codes = None if self.batch.codes is None else self.batch.codes.copy()
        counts: Counter[Rejection] = Counter()
        for reason, mask in rejected.items():
            if reason is Rejection.TOO_LITTLE_LEFT and not self.terms.names_little:
                reason = Rejection.SEEN
            counts[reason] += int(np.count_nonzero(mask))
            if self.codes is not None:
                self.codes[mask] = code_of(reason)
        self.rejected_after_admission = dict(counts)

    def rejections(self) -> dict[Rejection, int]:
        """Return all rejection counts: at admission and after it."""
        return dict(Counter(self.batch.rejections) + Counter(self.rejected_after_admission))

    def _matches(self, sender: int, proposal: Propose) -> bool:
        batch = self.batch
        if proposal.query.digest != self.query.digest:
            difference = "has another query under the same id"
        elif (proposal.batch_root, proposal.count) != (batch.root, len(batch.digests)):
            difference = "has other reports"
        elif proposal.parameters != self.terms.parameters:
            difference = "would compute with other parameters"
        elif (proposal.check_root == NO_ROOT) != (batch.evidence is None):
            difference = "checks other numbers"
        else:
            return True
        message = f"helper {sender + 1} {difference}"
        self.failure = AgreementError(
            message, "Submit the same query and reports to all three.", party=sender, kind=ErrorKind.INCONSISTENT
        )
        return False


_REMEMBERED_REFUSALS = 1000
NOT_BEGUN = "has not begun this query"


class Negotiations:
    """All negotiations of one helper, by query. In memory: after a restart, waiting queries begin again."""

    def __init__(self) -> None:
        self._by_query: dict[bytes, Negotiation] = {}
        # Sent to peers that still wait. Bounded, so that failed queries cannot exhaust our memory.
        self._refusals: dict[bytes, str] = {}

    def begin(self, negotiation: Negotiation) -> None:
        """Register a negotiation, one per query. A later one replaces one that has led to an attempt."""
        key = negotiation.query.key
        earlier = self._by_query.get(key)
        if earlier is not None and not earlier.agreed:
            raise AgreementError("this query is already being agreed on", kind=ErrorKind.BUSY)
        self._by_query[key] = negotiation
        self._refusals.pop(key, None)

    def find(self, query_key: bytes) -> Negotiation | None:
        return self._by_query.get(query_key)

    def fail(self, negotiation: Negotiation, reason: str) -> None:
        """Remove a failed negotiation, and keep the reason for peers that still wait."""
        key = negotiation.query.key
        # Only if it is still this one: the query may have been submitted again since.
        if self._by_query.get(key) is negotiation:
            del self._by_query[key]
        self._refuse(key, reason)

    def _refuse(self, key: bytes, reason: str) -> None:
        while len(self._refusals) >= _REMEMBERED_REFUSALS:
            self._refusals.pop(next(iter(self._refusals)))
        self._refusals[key] = reason

    def refusal(self, query_key: bytes) -> str:
        """Return why this helper does not propose for a query at present."""
        negotiation = self._by_query.get(query_key)
        waiting = f"waiting for {negotiation.waiting_for}" if negotiation else NOT_BEGUN
        return self._refusals.get(query_key, waiting)

    def attempt_moved(self, attempt_id: bytes, state: AttemptState) -> None:
        """Wake waiting queries after a transition: reports may be free now. End the attempt if it is final."""
        self.wake()
        for negotiation in list(self._by_query.values()):
            # A vote is not final: the negotiation still answers RESERVED to a peer that has not received it.
            if negotiation.attempt_id == attempt_id and state is not AttemptState.VOTED:
                negotiation.ended.set()
                if negotiation.agreed:
                    self._by_query.pop(negotiation.query.key, None)
                    self._refuse(negotiation.query.key, "its last attempt has ended")

    def heard(self, party: int, attempt_id: bytes) -> None:
        """Record that a peer has sent its state of an attempt."""
        for negotiation in self._by_query.values():
            if negotiation.attempt_id == attempt_id:
                negotiation.heard.add(party)

    def wake(self) -> None:
        """Let every waiting query look again."""
        for negotiation in self._by_query.values():
            negotiation.changed.set()

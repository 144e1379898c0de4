"""An attempt at a query: its id, its durable states, the votes on it, and the failpoints of the protocol.

The vocabulary of COMMIT.md, but for votes, which queriers check too (`protocol.vote`). Everything durable about an
attempt is in `ledger`; the message exchange is in `agreement`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import assert_never

import numpy as np
import numpy.typing as npt

from protocol.amounts import Amounts
from protocol.batch import DIGEST_SPAN, DigestRows
from protocol.errors import ErrorKind, ProtocolError, WireEnum
from protocol.header import TIME_STEP
from protocol.query import Query
from protocol.vote import Vote
from protocol.wire import HASH_SIZE, TaggedHash, Writer, tagged_hash

# COMMIT.md: a peer may pull this helper's attempt number up, but not to where the numbers run out.
MAX_NUMBER_JUMP = 2**16
_LAST_HOUR = 2**32 - 1


class AttemptState(Enum):
    """The durable state of an attempt at one helper."""

    RESERVED = "reserved"
    VOTED = "voted"
    RELEASED = "released"
    RENOUNCED = "renounced"
    ABORTED = "aborted"


class VoteStatus(WireEnum):
    """A helper's vote on an attempt as a STATE reports it. WORKING and UNKNOWN have no effect; a NO is final."""

    YES = 0, "yes"
    NO = 1, "no"
    WORKING = 2, "working"
    UNKNOWN = 3, "unknown"


class AttemptOutcome(Enum):
    """The final outcome of an attempt."""

    RELEASED = "released"
    ABORTED = "aborted"


class Failpoint(Enum):
    """The failpoints of COMMIT.md, where tests inject crashes. An installed helper does nothing at them."""

    PROPOSE_SENT_TO_ONE = "propose: sent to one peer only"
    RESERVE_BEFORE_COMMIT = "reserve: before commit"
    RESERVE_AFTER_COMMIT = "reserve: after commit"
    RESERVED_SENT_TO_ONE = "reserve: RESERVED sent to one only"
    COMPUTE = "compute: during the MPC"
    VOTE_BEFORE_COMMIT = "vote: before commit"
    VOTE_AFTER_COMMIT = "vote: after commit"
    YES_SENT_TO_ONE = "vote: YES sent to one only"
    RELEASE_BEFORE_COMMIT = "release: before commit"
    RELEASE_AFTER_COMMIT = "release: after commit"
    ANSWER_BEFORE_SEND = "answer: before send"
    ANSWER_AFTER_SEND = "answer: after send"
    GIVE_UP_BEFORE_COMMIT = "give up: before commit"
    GIVE_UP_AFTER_COMMIT = "give up: after commit"
    RENOUNCE_BEFORE_COMMIT = "renounce: before commit"
    RENOUNCE_AFTER_COMMIT = "renounce: after commit"
    ASK_SENT_TO_ONE = "renounce: asking peers, sent to one"
    FREE_BEFORE_COMMIT = "free: before commit"
    FREE_AFTER_COMMIT = "free: after commit"
    START_BEFORE_SWEEP = "start: before the sweep"
    SWEEP_BEFORE_COMMIT = "start: in the sweep, before commit"
    SWEEP_AFTER_COMMIT = "start: in the sweep, after commit"
    START_AFTER_SWEEP = "start: after the sweep"


@dataclass(frozen=True, slots=True)
class QueryName:
    """A query's identity in ledgers and messages: the hash of site, caller and query id, and the digest of the query.

    Of two queries with equal `key` and different digests (a changed batch under an old id) the second is refused.
    The key also decides conflicts: a query may take reports from a reserved attempt with a larger key.
    """

    key: bytes
    digest: bytes

    def __post_init__(self) -> None:
        if len(self.key) != HASH_SIZE or len(self.digest) != HASH_SIZE:
            raise ProtocolError(f"a query's key and digest have {HASH_SIZE} bytes")

    @classmethod
    def of(cls, query: Query) -> QueryName:
        scoped = Writer().text(query.site).text(query.caller).blob(query.query_id).done()
        return cls(tagged_hash("query key", scoped), query.digest)


@dataclass(frozen=True, slots=True)
class Reservation:
    """An attempt to reserve, once all three proposals are in. `digests` are the accepted reports, ascending.

    `debug` is the query's flag, `debug_reports` the flag in each report's own header: the ledger compares them. `hours`
    and `site` are those in the headers, as this helper read them under the digests: they decide where a report is
    recorded. `most_draws` limits the noise draws a report may be in, this one included; None means no limit. A `whole`
    attempt uses its reports up; another takes of each what `amounts` say. None: all that was paid is needed, whatever
    it was.
    """

    attempt_id: bytes
    query: QueryName
    number: int
    debug: bool
    digests: DigestRows = field(repr=False)
    debug_reports: npt.NDArray[np.bool_] = field(repr=False)
    hours: npt.NDArray[np.uint32] = field(repr=False)
    most_draws: int | None = None
    amounts: Amounts | None = field(default=None, repr=False)
    whole: bool = True
    # Without a default, as in `AdmittedBatch`.
    site: str = field(kw_only=True)

    def __post_init__(self) -> None:
        if len(self.digests) != len(self.digests if self.amounts is None else self.amounts):
            raise ProtocolError("a reservation has one amount for each report", kind=ErrorKind.INCONSISTENT)
        if self.amounts is None and not self.whole and len(self.digests):
            raise ProtocolError("a part of a report is an amount", kind=ErrorKind.INCONSISTENT)
        if not (len(self.debug_reports) == len(self.hours) == len(self.digests)):
            message = "a reservation has one debug flag and one hour for each report"
            raise ProtocolError(message, kind=ErrorKind.INCONSISTENT)

    @property
    def oldest(self) -> int:
        """Return the time of the oldest report; later than any if there is none."""
        return int(self.hours.min(initial=_LAST_HOUR)) * TIME_STEP

    @property
    def newest(self) -> int:
        """Return the time of the newest report; 0 if there is none."""
        return int(self.hours.max(initial=0)) * TIME_STEP


@dataclass(frozen=True, slots=True)
class ReceivedVote:
    """A vote with the signed message that proves it."""

    party: int
    vote: Vote
    message: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class AttemptRecord:
    """The ledger's record of an attempt.

    `voted_once` tells an abort before this helper's YES from one after it. The share is stored from the vote on, and
    erased when it can no longer be released.
    """

    attempt_id: bytes
    query: QueryName
    number: int
    state: AttemptState
    voted_once: bool
    sealed_share: bytes | None = field(repr=False)
    reason: str
    votes: tuple[ReceivedVote, ...]

    @property
    def equivocators(self) -> set[int]:
        """Return the helpers that provably equivocated."""
        return equivocators_among(self.votes)


def equivocators_among(votes: Sequence[ReceivedVote]) -> set[int]:
    """Return the parties with both a signed YES and a signed ABORTED vote, which contradict each other."""
    voted_yes = {vote.party for vote in votes if vote.vote is Vote.YES}
    return voted_yes & {vote.party for vote in votes if vote.vote is Vote.ABORTED}


def vote_status(state: AttemptState | None) -> VoteStatus:
    """Return what a helper reports in this state (COMMIT.md). Without a record UNKNOWN: never NO from ignorance."""
    match state:
        case None:
            return VoteStatus.UNKNOWN
        case AttemptState.RESERVED:
            return VoteStatus.WORKING
        case AttemptState.VOTED | AttemptState.RELEASED:
            return VoteStatus.YES
        case AttemptState.RENOUNCED | AttemptState.ABORTED:
            return VoteStatus.NO
        case _:
            assert_never(state)


def attempt_id_of(name: QueryName, number: int, proposals: Sequence[bytes], accepted: DigestRows) -> bytes:
    """Return the attempt id: equal at two helpers only if proposals and accepted reports are equal.

    `proposals` are the three helpers' encoded proposals in order (parameters, batch root, bitmap, counts, salt);
    `accepted` the accepted reports' digests, ascending.
    """
    state = TaggedHash("attempt id")
    for part in (name.key, name.digest, number.to_bytes(8, "big"), *proposals):
        state.part(part)
    spans = (accepted[start : start + DIGEST_SPAN] for start in range(0, len(accepted), DIGEST_SPAN))
    return state.pieces(HASH_SIZE * len(accepted), (np.ascontiguousarray(span).tobytes() for span in spans)).digest()

"""An attempt at a query: its name, its states, what a helper may say about it, and the points where one may crash.

The vocabulary of COMMIT.md, but for votes, which queriers check too (`protocol.vote`). Everything durable about an
attempt is in `ledger`; who says what to whom and when is in `agreement`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import assert_never

import numpy as np
import numpy.typing as npt

from protocol.batch import DIGEST_SPAN, DigestRows
from protocol.errors import ProtocolError
from protocol.numbered import Numbered
from protocol.query import Query
from protocol.vote import Vote
from protocol.wire import HASH_SIZE, TaggedHash, Writer, tagged_hash

# COMMIT.md: a peer may pull this helper's attempt number up, but not to where the numbers run out.
MAX_NUMBER_JUMP = 2**16


class AttemptState(Enum):
    """The durable state of an attempt at one helper."""

    RESERVED = "reserved"
    VOTED = "voted"
    RELEASED = "released"
    RENOUNCED = "renounced"
    ABORTED = "aborted"


class Word(Numbered):
    """What a helper answers about an attempt. WORKING and UNKNOWN have no effect; a NO is final."""

    YES = 0, "yes"
    NO = 1, "no"
    WORKING = 2, "working"
    UNKNOWN = 3, "unknown"


class AttemptOutcome(Enum):
    """How an attempt ended for good. One that was voted for is waited for until then."""

    RELEASED = "released"
    ABORTED = "aborted"


class Step(Enum):
    """The crash points of COMMIT.md. Production does nothing at them; tests stop a helper there."""

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
    """What ledgers and messages call a query: its id under site and caller, and the digest of all of it.

    Two queries with one `key` and different digests are a changed batch under an old id, and the second is refused.
    The key also decides conflicts: the smaller one may take reports from a larger one that is merely reserved.
    """

    key: bytes
    digest: bytes

    def __post_init__(self) -> None:
        if len(self.key) != HASH_SIZE or len(self.digest) != HASH_SIZE:
            raise ProtocolError(f"a query's key and digest have {HASH_SIZE} bytes")

    @classmethod
    def of(cls, query: Query) -> QueryName:
        """The name of `query`."""
        scoped = Writer().text(query.site).text(query.caller).blob(query.query_id).done()
        return cls(tagged_hash("query key", scoped), query.digest)


@dataclass(frozen=True, slots=True)
class Reservation:
    """An attempt on which all three proposals are in. `digests` are the accepted reports, ascending.

    `debug` is the query's flag, `debug_reports` the flag in each report's own header: the ledger compares them.
    `most_draws` is how many draws of noise a report may be in, this one included; None where it does not matter.
    """

    attempt_id: bytes
    query: QueryName
    number: int
    debug: bool
    digests: DigestRows = field(repr=False)
    debug_reports: npt.NDArray[np.bool_] = field(repr=False)
    oldest: int
    newest: int
    most_draws: int | None = None

    def __post_init__(self) -> None:
        if len(self.debug_reports) != len(self.digests):
            raise ProtocolError("a reservation has one debug flag for each report")


@dataclass(frozen=True, slots=True)
class HeardVote:
    """A vote with the signed message that proves it."""

    party: int
    vote: Vote
    message: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class AttemptRecord:
    """What the ledger holds of an attempt. `voted_once`, whether this helper may have said YES, tells an abort before
    the vote from one after it. The share is there from the vote on, unless it will never be released.
    """

    attempt_id: bytes
    query: QueryName
    number: int
    state: AttemptState
    voted_once: bool
    sealed_share: bytes | None = field(repr=False)
    reason: str
    votes: tuple[HeardVote, ...]

    @property
    def liars(self) -> set[int]:
        """Helpers that are known to have voted both ways."""
        return liars_among(self.votes)


def liars_among(votes: Sequence[HeardVote]) -> set[int]:
    """Parties with a signed YES and a signed first-hand NO: each proves the other a lie."""
    said_yes = {vote.party for vote in votes if vote.vote is Vote.YES}
    return said_yes & {vote.party for vote in votes if vote.vote is Vote.ABORTED}


def word_about(state: AttemptState | None) -> Word:
    """COMMIT.md, "What a helper answers about an attempt". No row is UNKNOWN: never NO from ignorance."""
    match state:
        case None:
            return Word.UNKNOWN
        case AttemptState.RESERVED:
            return Word.WORKING
        case AttemptState.VOTED | AttemptState.RELEASED:
            return Word.YES
        case AttemptState.RENOUNCED | AttemptState.ABORTED:
            return Word.NO
        case _:
            assert_never(state)


def attempt_id_of(name: QueryName, number: int, proposals: Sequence[bytes], accepted: DigestRows) -> bytes:
    """Equal at two helpers only if they hold the same three proposals and accepted the same reports.

    `proposals` are the three helpers' encoded proposals in order (parameters, batch root, bitmap, counts, salt);
    `accepted` the accepted reports' digests, ascending.
    """
    state = TaggedHash("attempt id")
    for part in (name.key, name.digest, number.to_bytes(8, "big"), *proposals):
        state.part(part)
    spans = (accepted[start : start + DIGEST_SPAN] for start in range(0, len(accepted), DIGEST_SPAN))
    return state.pieces(HASH_SIZE * len(accepted), (np.ascontiguousarray(span).tobytes() for span in spans)).digest()

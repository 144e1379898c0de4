"""The status of a query at one helper: its state, why it failed, and the JSON encoding of both (SPEC.md §7).

Helpers write this message and queriers parse it, both here and nowhere else. A helper may be malicious, so parsing
rejects everything that is not exactly such a message, and names the fault.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from protocol.errors import ErrorKind, Inconsistent, OutOfRange, ProtocolError, Rejection
from protocol.net.json_message import JsonObject
from protocol.shares import PARTIES
from protocol.units import MAX_MICROS

MAX_TEXT = 2000
MAX_COUNT = 2**32 - 1
MAX_SECONDS = 10**9


class QueryState(Enum):
    """The states of a query at one helper.

    A failed query may be resubmitted; the reports of a disputed one stay locked; a withdrawn one is never answered; the
    answer of an expired one was released, and is no longer kept.
    """

    AWAITING = "awaiting"
    QUEUED = "queued"
    ADMITTING = "admitting"
    AGREEING = "agreeing"
    COMPUTING = "computing"
    VOTING = "voting"
    RELEASED = "released"
    FAILED = "failed"
    DISPUTED = "disputed"
    WITHDRAWN = "withdrawn"
    EXPIRED = "expired"

    @property
    def ended(self) -> bool:
        """Return whether nothing more happens unless the query is resubmitted."""
        return self is QueryState.RELEASED or self.without_answer

    @property
    def without_answer(self) -> bool:
        """Return whether it ended with a reason instead of an answer."""
        return self in (QueryState.FAILED, QueryState.DISPUTED, QueryState.WITHDRAWN, QueryState.EXPIRED)


@dataclass(frozen=True, slots=True)
class Shortfall:
    """Too few reports: `accepted` of `submitted` are acceptable to all three helpers, and `needed` were asked for.

    `left_out` has the rejection counts of each helper.
    """

    submitted: int
    accepted: int
    needed: int
    left_out: tuple[Mapping[Rejection, int], Mapping[Rejection, int], Mapping[Rejection, int]]

    def to_json(self) -> dict[str, object]:
        """Return the JSON inside a failure. Reasons are encoded by their numbers."""
        return {
            "submitted": self.submitted,
            "accepted": self.accepted,
            "needed": self.needed,
            "left_out": [{str(reason.number): n for reason, n in counts.items() if n} for counts in self.left_out],
        }

    @classmethod
    def from_json(cls, stored: object) -> Shortfall:
        fields = JsonObject(stored, "shortfall")
        fields.expect({"submitted", "accepted", "needed", "left_out"})
        counts = [_counts(entry) for entry in fields.items("left_out")]
        if len(counts) != PARTIES:
            raise ProtocolError(
                "the shortfall does not say what each of the three helpers leaves out", kind=ErrorKind.TOO_FEW
            )
        submitted, accepted, needed = (fields.whole(name, MAX_COUNT) for name in ("submitted", "accepted", "needed"))
        return cls(submitted, accepted, needed, (counts[0], counts[1], counts[2]))


def _counts(stored: object) -> dict[Rejection, int]:
    fields = JsonObject(stored, "count of reports left out")
    numbers = {str(reason.number): reason for reason in Rejection}
    if not set(fields.fields()) <= set(numbers):
        raise ProtocolError("a report is left out for a reason that has no number", kind=ErrorKind.UNKNOWN_NAME)
    return {numbers[name]: fields.whole(name, MAX_COUNT) for name in fields.fields()}


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a query has no answer: in which state, and which helper (0, 1, 2) it is attributed to, if any.

    `affordable` is the largest ε, in micros, at which this helper would propose as many reports as were needed. It is
    the helper's own: ledgers may leave different amounts of a report.
    """

    stage: QueryState
    party: int | None
    reason: str
    hint: str = ""
    shortfall: Shortfall | None = None
    affordable: int | None = None

    def __post_init__(self) -> None:
        if self.affordable is not None and not (0 < self.affordable <= MAX_MICROS):
            raise OutOfRange(f"epsilon is 1 to {MAX_MICROS} micros")
        if self.party is not None and self.party not in range(PARTIES):
            raise OutOfRange(f"a failure names helper 0, 1 or 2, not {self.party}")

    def to_json(self) -> dict[str, object]:
        return {
            "stage": self.stage.value,
            "party": self.party,
            "reason": self.reason[:MAX_TEXT],
            "hint": self.hint[:MAX_TEXT],
            "shortfall": None if self.shortfall is None else self.shortfall.to_json(),
            "affordable": self.affordable,
        }

    @classmethod
    def from_json(cls, stored: object) -> Failure:
        """Parse what `to_json` returned. Failures of earlier releases, stored in ledgers too, lack `affordable`."""
        fields = JsonObject(stored, "failure")
        recent = {"affordable"} & set(fields.fields())
        fields.expect({"stage", "party", "reason", "hint", "shortfall"} | recent)
        affords = fields.value("affordable") if recent else None
        shortfall = fields.value("shortfall")
        return cls(
            _state(fields.value("stage"), "stage"),
            None if fields.value("party") is None else fields.whole("party", MAX_COUNT),
            fields.text("reason", MAX_TEXT),
            fields.text("hint", MAX_TEXT),
            None if shortfall is None else Shortfall.from_json(shortfall),
            None if affords is None else fields.whole("affordable", MAX_MICROS),
        )


@dataclass(frozen=True, slots=True)
class QueryStatus:
    """What any holder of a query may learn about it. `done` of `total` reports have passed the present state."""

    state: QueryState
    done: int = 0
    total: int = 0
    failure: Failure | None = None
    seconds: Mapping[QueryState, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (self.failure is not None) != self.state.without_answer:
            fault = "with a failure" if self.failure else "without a reason"
            raise Inconsistent(f"a query that is {self.state.value} comes {fault}")

    def to_json(self) -> dict[str, object]:
        return {
            "state": self.state.value,
            "done": self.done,
            "total": self.total,
            "failure": None if self.failure is None else self.failure.to_json(),
            "seconds": {state.value: round(spent, 1) for state, spent in self.seconds.items()},
        }

    @classmethod
    def from_json(cls, stored: object) -> QueryStatus:
        """Run by a querier on what a helper sent: return a status, or raise `ProtocolError`, naming the fault."""
        fields = JsonObject(stored, "status")
        fields.expect({"state", "done", "total", "failure", "seconds"})
        failure = fields.value("failure")
        return cls(
            _state(fields.value("state"), "state"),
            fields.whole("done", MAX_COUNT),
            fields.whole("total", MAX_COUNT),
            None if failure is None else Failure.from_json(failure),
            _seconds(fields.value("seconds")),
        )


def _seconds(stored: object) -> dict[QueryState, float]:
    seconds: dict[QueryState, float] = {}
    for name, spent in JsonObject(stored, "seconds").fields().items():
        state = _state(name, "field seconds")
        if isinstance(spent, bool) or not isinstance(spent, int | float) or not (0 <= spent <= MAX_SECONDS):
            raise OutOfRange(f"the seconds in {state.value} are not a span of time")
        seconds[state] = float(spent)
    return seconds


def _state(stored: object, name: str) -> QueryState:
    for state in QueryState:
        if state.value == stored:
            return state
    raise ProtocolError(f"the {name} is no state of a query", kind=ErrorKind.UNKNOWN_NAME)

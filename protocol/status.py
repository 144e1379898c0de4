"""Where a query stands at one helper: its states, why it failed, and the JSON that says so.

Helpers write this message and queriers read it, both here and nowhere else (SPEC.md §7). A helper may be bad, so
reading refuses whatever is not exactly such a message, and says what is wrong with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import assert_never

from protocol.errors import ProtocolError
from protocol.shares import PARTIES

MAX_TEXT = 2000
MAX_COUNT = 2**32 - 1
MAX_SECONDS = 10**9


class QueryState(Enum):
    """Where a query is. A failed one may be asked again; a disputed one stays locked."""

    AWAITING = "awaiting"
    QUEUED = "queued"
    ADMITTING = "admitting"
    AGREEING = "agreeing"
    COMPUTING = "computing"
    VOTING = "voting"
    RELEASED = "released"
    FAILED = "failed"
    DISPUTED = "disputed"

    @property
    def ended(self) -> bool:
        """Nothing more happens unless the query is asked again."""
        return self is QueryState.RELEASED or self.without_answer

    @property
    def without_answer(self) -> bool:
        """Ended, and with a reason instead of an answer."""
        match self:
            case QueryState.FAILED | QueryState.DISPUTED:
                return True
            case QueryState.AWAITING | QueryState.QUEUED | QueryState.ADMITTING | QueryState.AGREEING:
                return False
            case QueryState.COMPUTING | QueryState.VOTING | QueryState.RELEASED:
                return False
            case _:
                assert_never(self)


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a query has no answer: in which state, and by which helper (0, 1, 2) where it is one."""

    stage: QueryState
    helper: int | None
    reason: str
    hint: str = ""

    def __post_init__(self) -> None:
        if self.helper is not None and self.helper not in range(PARTIES):
            raise ProtocolError(f"a failure names helper 0, 1 or 2, not {self.helper}")

    def to_json(self) -> dict[str, object]:
        """As it stands in a status."""
        return {
            "stage": self.stage.value,
            "helper": self.helper,
            "reason": self.reason[:MAX_TEXT],
            "hint": self.hint[:MAX_TEXT],
        }


@dataclass(frozen=True, slots=True)
class QueryStatus:
    """What anyone who holds a query may know of it. `done` of `total` reports are through the present state."""

    state: QueryState
    done: int = 0
    total: int = 0
    failure: Failure | None = None
    seconds: Mapping[QueryState, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (self.failure is not None) != self.state.without_answer:
            found = "with a failure" if self.failure else "without a reason"
            raise ProtocolError(f"a query that is {self.state.value} comes {found}")

    def to_json(self) -> dict[str, object]:
        """Run by a helper."""
        return {
            "state": self.state.value,
            "done": self.done,
            "total": self.total,
            "failure": None if self.failure is None else self.failure.to_json(),
            "seconds": {state.value: round(spent, 6) for state, spent in self.seconds.items()},
        }

    @classmethod
    def from_json(cls, stored: object) -> QueryStatus:
        """Run by a querier, on whatever a helper sent: a status, or a `ProtocolError` that names the fault."""
        fields = _fields(stored, "status", {"state", "done", "total", "failure", "seconds"})
        failure = fields["failure"]
        return cls(
            _state(fields["state"], "state"),
            _count(fields["done"], "done"),
            _count(fields["total"], "total"),
            None if failure is None else _failure(failure),
            _seconds(fields["seconds"]),
        )


def _failure(stored: object) -> Failure:
    fields = _fields(stored, "failure", {"stage", "helper", "reason", "hint"})
    helper = fields["helper"]
    return Failure(
        _state(fields["stage"], "stage"),
        None if helper is None else _count(helper, "helper"),
        _text(fields["reason"], "reason"),
        _text(fields["hint"], "hint"),
    )


def _seconds(stored: object) -> dict[QueryState, float]:
    if not isinstance(stored, dict):
        raise ProtocolError("its seconds are not an object")
    seconds: dict[QueryState, float] = {}
    for name, spent in stored.items():
        state = _state(name, "seconds")
        # JSON has no NaN, but Python reads one; true is an integer to Python.
        if isinstance(spent, bool) or not isinstance(spent, int | float) or not (0 <= spent <= MAX_SECONDS):
            raise ProtocolError(f"its seconds in {state.value} are not a span of time")
        seconds[state] = float(spent)
    return seconds


def _fields(stored: object, what: str, names: set[str]) -> dict[str, object]:
    if not isinstance(stored, dict):
        raise ProtocolError(f"its {what} is not an object")
    for name in sorted(names - set(stored)):
        raise ProtocolError(f"its {what} lacks the field {name}")
    if set(stored) != names:
        raise ProtocolError(f"its {what} has a field that is none of {', '.join(sorted(names))}")
    return stored


def _state(stored: object, name: str) -> QueryState:
    for state in QueryState:
        if state.value == stored:
            return state
    raise ProtocolError(f"its {name} is no state of a query")


def _count(stored: object, name: str) -> int:
    if isinstance(stored, bool) or not isinstance(stored, int) or not (0 <= stored <= MAX_COUNT):
        raise ProtocolError(f"its field {name} is not a whole number from 0 to {MAX_COUNT}")
    return stored


def _text(stored: object, name: str) -> str:
    if not isinstance(stored, str) or len(stored) > MAX_TEXT:
        raise ProtocolError(f"its {name} is not a text of at most {MAX_TEXT} characters")
    return stored

"""A query's status: what a helper writes is what a querier reads, and nothing else is a status."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import ProtocolError, Rejection
from protocol.status import MAX_TEXT, Failure, QueryState, QueryStatus, Shortfall

WITHOUT_ANSWER = {QueryState.FAILED, QueryState.DISPUTED, QueryState.WITHDRAWN, QueryState.EXPIRED}
ENDED = {QueryState.RELEASED, *WITHOUT_ANSWER}
counts = st.integers(0, 2**32 - 1)
left_out = st.dictionaries(st.sampled_from(Rejection), st.integers(1, 2**32 - 1))
shortfalls = st.builds(Shortfall, counts, counts, counts, st.tuples(left_out, left_out, left_out))
texts = st.text(max_size=50)
failures = st.builds(
    Failure, st.sampled_from(QueryState), st.none() | st.integers(0, 2), texts, texts, st.none() | shortfalls
)
seconds = st.dictionaries(st.sampled_from(QueryState), st.integers(0, 10**9).map(lambda micros: micros / 1000))


@st.composite
def statuses(draw: st.DrawFn) -> QueryStatus:
    state = draw(st.sampled_from(QueryState))
    failure = draw(failures) if state.without_answer else None
    return QueryStatus(state, draw(counts), draw(counts), failure, draw(seconds))


@given(statuses())
def test_what_is_written_is_read(status: QueryStatus) -> None:
    assert QueryStatus.from_json(json.loads(json.dumps(status.to_json()))) == status


def test_states_that_have_ended() -> None:
    assert {state for state in QueryState if state.ended} == ENDED
    assert {state for state in QueryState if state.without_answer} == WITHOUT_ANSWER


def test_a_long_reason_is_cut_where_it_is_written() -> None:
    long = QueryStatus(QueryState.FAILED, failure=Failure(QueryState.AGREEING, None, "x" * 9999, "y" * 9999))
    read = QueryStatus.from_json(long.to_json()).failure
    assert read is not None
    assert (read.reason, read.hint) == ("x" * MAX_TEXT, "y" * MAX_TEXT)


FAILED = QueryStatus(QueryState.FAILED, failure=Failure(QueryState.AGREEING, 1, "why", "what to do")).to_json()


SHORTFALL = Shortfall(4, 0, 3, ({Rejection.SEEN: 4}, {}, {})).to_json()


def but(change: dict[str, object], of: dict[str, Any] = FAILED) -> dict[str, object]:
    return {**of, **change}


def failing(change: dict[str, object]) -> dict[str, object]:
    return but({"failure": {**FAILED["failure"], **change}})  # type: ignore[dict-item]


FAULTS: list[tuple[object, str]] = [
    (None, "status is not an object"),
    ([], "status is not an object"),
    ("released", "status is not an object"),
    ({}, "status lacks the field done"),
    ({name: value for name, value in FAILED.items() if name != "seconds"}, "status lacks the field seconds"),
    (but({"more": 1}), "status has a field that is none of"),
    (but({"state": 1}), "state is no state of a query"),
    (but({"state": "answered"}), "state is no state of a query"),
    (but({"state": ["failed"]}), "state is no state of a query"),
    (but({"done": "3"}), "done is not a whole number"),
    (but({"done": True}), "done is not a whole number"),
    (but({"done": 1.5}), "done is not a whole number"),
    (but({"total": -1}), "total is not a whole number"),
    (but({"total": 2**32}), "total is not a whole number"),
    (but({"failure": None}), "failed comes without a reason"),
    (but({"state": "voting"}), "voting comes with a failure"),
    (but({"failure": []}), "failure is not an object"),
    (but({"failure": {}}), "failure lacks the field hint"),
    (failing({"stage": "nowhere"}), "stage is no state of a query"),
    (failing({"party": 3}), "helper 0, 1 or 2"),
    (failing({"party": "1"}), "party is not a whole number"),
    (failing({"reason": 7}), "reason is not a text"),
    (failing({"hint": "x" * (MAX_TEXT + 1)}), "hint is not a text"),
    (failing({"shortfall": []}), "shortfall is not an object"),
    (failing({"shortfall": {**SHORTFALL, "left_out": [{}, {}]}}), "each of the three helpers"),
    (failing({"shortfall": {**SHORTFALL, "left_out": [{}, {}, {"99": 1}]}}), "has no number"),
    (failing({"shortfall": {**SHORTFALL, "left_out": [{}, {}, {"18": -1}]}}), "18 is not a whole number"),
    (failing({"shortfall": {**SHORTFALL, "needed": None}}), "needed is not a whole number"),
    (but({"seconds": []}), "seconds is not an object"),
    (but({"seconds": {"x": 1}}), "seconds is no state"),
    (but({"seconds": {"voting": "1"}}), "seconds in voting are not a span"),
    (but({"seconds": {"voting": -1}}), "seconds in voting are not a span"),
    (but({"seconds": {"voting": float("nan")}}), "seconds in voting are not a span"),
    (but({"seconds": {"voting": float("inf")}}), "seconds in voting are not a span"),
    (but({"seconds": {"voting": False}}), "seconds in voting are not a span"),
]


@pytest.mark.parametrize(("stored", "fault"), FAULTS)
def test_anything_else_is_refused_and_the_fault_is_named(stored: object, fault: str) -> None:
    with pytest.raises(ProtocolError) as refused:
        QueryStatus.from_json(stored)
    assert fault in str(refused.value)

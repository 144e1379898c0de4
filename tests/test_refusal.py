"""What a person reads when the helpers give no answer: one sentence with the number once, and details on demand."""

from __future__ import annotations

import pytest

import trefoil
from protocol.errors import Rejection
from protocol.querier.query_failed import QueryFailed
from protocol.querier.refusal import refusal, shortfall_sentence
from protocol.status import Failure, QueryState, QueryStatus, Shortfall

NAMES = ("north", "south", "west")
SEEN, BAD = Rejection.SEEN, Rejection.UNOPENABLE


def alike(submitted: int, accepted: int, needed: int, counts: dict[Rejection, int]) -> Shortfall:
    return Shortfall(submitted, accepted, needed, (counts, counts, counts))


SENTENCES = [
    (alike(401, 0, 361, {SEEN: 401}), "Refused: all 401 reports were counted before. Nothing was spent."),
    (alike(1, 0, 1, {SEEN: 1}), "Refused: all 1 report was counted before. Nothing was spent."),
    (
        alike(401, 0, 361, {SEEN: 400, BAD: 1}),
        "Refused: 400 of 401 reports were counted before, and 1 cannot be counted. Nothing was spent.",
    ),
    (
        alike(401, 21, 361, {SEEN: 380}),
        "Refused: 380 of 401 reports were counted before; 21 can be counted and 361 are needed. Nothing was spent.",
    ),
    (
        alike(9, 0, 1, {Rejection.EXPIRED: 9}),
        "Refused: all 9 reports are older than the helpers remember. Nothing was spent.",
    ),
    (
        alike(9, 0, 1, {BAD: 9}),
        "Refused: none of 9 reports can be counted (payload does not open under this header). Nothing was spent.",
    ),
    (
        alike(3, 0, 1, {Rejection.NOISE_TOO_SMALL: 3}),
        "Refused: all 3 reports paid for more noise than the query adds. Nothing was spent.",
    ),
    (
        Shortfall(9, 2, 5, ({}, {BAD: 7}, {})),
        "Refused: south alone leaves out 7 of 9 reports; 2 can be counted and 5 are needed. Nothing was spent.",
    ),
    (
        Shortfall(9, 1, 5, ({SEEN: 4}, {BAD: 4}, {})),
        "Refused: of 9 reports 1 can be counted and 5 are needed. Nothing was spent.",
    ),
    (alike(9, 9, 20, {}), "Refused: of 9 reports 9 can be counted and 20 are needed. Nothing was spent."),
]


@pytest.mark.parametrize(("shortfall", "sentence"), SENTENCES)
def test_too_few_reports_are_said_in_one_sentence(shortfall: Shortfall, sentence: str) -> None:
    assert shortfall_sentence(shortfall, NAMES) == sentence


def failed(reason: str, shortfall: Shortfall | None = None, party: int | None = None) -> QueryStatus:
    return QueryStatus(QueryState.FAILED, failure=Failure(QueryState.AGREEING, party, reason, "Wait.", shortfall))


def test_what_all_three_say_is_said_once_and_the_rest_on_demand() -> None:
    shortfall = alike(401, 0, 361, {SEEN: 401})
    error = refusal({party: failed("too few", shortfall) for party in range(3)}, NAMES)
    assert str(error) == "Refused: all 401 reports were counted before. Nothing was spent."
    assert error.details == tuple(f"{name} left out: 401 already spent" for name in NAMES)
    assert (error.stage, error.helpers, error.shortfall) == ("agreeing", (0, 1, 2), shortfall)


@pytest.mark.parametrize(
    ("reason", "option"),
    [(SEEN, "--list"), (Rejection.WRONG_HELPER_SET, "--helpers"), (Rejection.NOISE_TOO_SMALL, "--epsilon")],
)
def test_the_hint_fits_the_reason(reason: Rejection, option: str) -> None:
    """More reports do not help someone who asked the wrong helpers; only where nothing better is known is it said."""
    shortfall = alike(9, 0, 1, {reason: 9})
    assert option in refusal({party: failed("too few", shortfall) for party in range(3)}, NAMES).hint
    other = Shortfall(9, 1, 5, ({reason: 4}, {BAD: 4}, {}))
    assert refusal({party: failed("too few", other) for party in range(3)}, NAMES).hint == "Wait."


def test_helpers_that_differ_are_quoted_by_name() -> None:
    """One of them lies about what the others left out: no sentence is made of it."""
    statuses = {0: failed("too few", alike(4, 0, 1, {SEEN: 4})), 2: failed("too few", alike(4, 0, 1, {BAD: 4}))}
    error = refusal(statuses, NAMES)
    assert str(error) == "The query failed while the helpers agreed on the reports. north and west: too few"
    assert error.details[0] == "as north has it:"
    assert error.details[4] == "as west has it:"


def test_other_failures_name_the_helper_that_is_in_the_way() -> None:
    statuses = {0: failed("helper 3 does not answer", party=2), 1: failed("helper 3 does not answer", party=2)}
    error = refusal(statuses, NAMES)
    assert error.helpers == (2,)
    assert str(error).endswith("north and south: helper 3 does not answer")
    assert error.hint == "Wait."


def test_a_dispute_is_called_one() -> None:
    status = QueryStatus(QueryState.DISPUTED, failure=Failure(QueryState.VOTING, 1, "helper 2 voted both ways"))
    assert str(refusal({0: status}, NAMES)).startswith("The query disputed") is False
    assert "disputed" in str(refusal({0: status}, NAMES))


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (0, trefoil.Exit.TRY_AGAIN),  # out of reach
        (403, trefoil.Exit.MISTAKE),  # another key, or a site that is not registered
        (422, trefoil.Exit.MISTAKE),  # another set, or an option that this helper does not take
        (404, trefoil.Exit.REFUSED),
        (410, trefoil.Exit.REFUSED),
        (425, trefoil.Exit.TRY_AGAIN),
        (429, trefoil.Exit.TRY_AGAIN),
        (503, trefoil.Exit.TRY_AGAIN),
    ],
)
def test_the_exit_code_says_whether_something_can_be_mended(status: int, code: trefoil.Exit) -> None:
    assert trefoil._exit_of(QueryFailed("submitting", (0,), "no", http_status=status)) is code


def test_reports_that_were_counted_are_refused_for_ever() -> None:
    error = QueryFailed("agreeing", (0,), "no", http_status=403, shortfall=alike(1, 0, 1, {SEEN: 1}))
    assert trefoil._exit_of(error) is trefoil.Exit.REFUSED

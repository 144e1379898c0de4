"""What the querier reads: error bounds and verdict of an answer, or one sentence on why there is none."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from benchmarks.demos.live.measurement_page import verdict_line
from benchmarks.demos.live.web import CUTOFF
from device.request import SideQuery, SideQueryForm
from protocol.answer import Answer
from protocol.cli import app as cli
from protocol.errors import ErrorKind, ProtocolError, Rejection
from protocol.noise import NoiseMode
from protocol.querier.failure import QueryFailed, refusal
from protocol.querier.result import BIAS_BETA, Decision, QueryResult, bias_bound, judge
from protocol.status import Failure, QueryState, QueryStatus, Shortfall
from tests.support import protocol_samples as samples
from tests.support.raising import raises


def test_the_bound_is_theorem_15s() -> None:
    bound = bias_bound(120, kappa=10, sigma=50.0, largest_change=140, beta=0.05)
    assert bound.bound == pytest.approx((120 + 50 * math.log(20) / math.sqrt(2)) / 10 * 140)
    assert bound.beta == 0.05


def test_noise_far_below_zero_gives_no_negative_bound() -> None:
    assert bias_bound(-(10**6), kappa=1, sigma=1.0, largest_change=1, beta=0.1).bound == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"kappa": 0},
        {"largest_change": 0},
        {"beta": 0.0},
        {"beta": 1.0},
        {"beta": math.nan},
        {"sigma": -1.0},
        {"sigma": math.nan},
        {"sigma": math.inf},
    ],
)
def test_numbers_that_bound_nothing(wrong: dict[str, float]) -> None:
    terms = {"kappa": 1, "sigma": 1.0, "largest_change": 1, "beta": 0.1}
    with raises(ErrorKind.OUT_OF_RANGE, ProtocolError):
        bias_bound(0, **{**terms, **wrong})  # type: ignore[arg-type]  # wrong on purpose


def polya_difference(shape: float, q: float, reach: int) -> np.ndarray:
    """Exact probabilities of a difference of two NB(shape, q), at −reach … reach."""
    log_weights = np.cumsum([0.0] + [math.log(q * (shape + k - 1) / k) for k in range(1, 4 * reach)])
    weights = np.exp(log_weights + shape * math.log(1 - q))
    full = np.convolve(weights, weights[::-1])
    middle = len(weights) - 1
    return np.asarray(full[middle - reach : middle + reach + 1])


@pytest.mark.parametrize("scale", [0.15, 0.3, 0.5, 1.0, 3.0, 20.0])
@pytest.mark.parametrize("mode", ["one", "local", "pairwise"])
def test_the_tail_holds_for_every_noise_mode(scale: float, mode: str) -> None:
    """Noise takes the bound below the truth with probability at most β: from exact probabilities, no sampling.

    Three helpers' noise is a difference of two NB(3/2) in local mode and of two NB(3) in pairwise mode; DLap is NB(1).
    """
    shape = {"one": 1.0, "local": 1.5, "pairwise": 3.0}[mode]
    q, reach = math.exp(-1 / scale), int(60 * scale) + 40
    probabilities = polya_difference(shape, q, reach)
    assert probabilities.sum() == pytest.approx(1, abs=1e-9)
    sigma = math.sqrt(2 * shape * q) / (1 - q)
    values = np.arange(-reach, reach + 1)
    assert math.sqrt(float((probabilities * values**2).sum())) == pytest.approx(sigma, rel=1e-6)
    flagged = 10 * reach
    for beta in (0.4, 0.2, 0.1, 0.05, 0.02, 0.01, 0.001, 1e-6):
        bounds = [
            bias_bound(flagged + noise, kappa=1, sigma=sigma, largest_change=1, beta=beta) for noise in map(int, values)
        ]
        too_low = np.array([bound.bound < flagged for bound in bounds])
        assert probabilities[too_low].sum() <= beta * (1 + 1e-9)


def test_the_general_flag_is_up_whenever_an_epoch_was_dropped() -> None:
    side = SideQuery(3)
    assert side.flag([0, 1, 2], {0, 1, 2}, set()) == 0
    assert side.flag([0, 1, 2], {0, 2}, {2}) == 3


def test_the_last_touch_flag_is_up_exactly_when_the_report_could_be_wrong() -> None:
    """All ways for three epochs to have data and to pay: flag down means the last touch is the true one.

    An unpaid epoch's data is unknown, so the flag must be up if some data in it would have changed the last touch.
    """
    side = SideQuery(1, SideQueryForm.LAST_TOUCH)
    epochs = [0, 1, 2]
    for pays in itertools.product([False, True], repeat=3):
        paid = {epoch for epoch in epochs if pays[epoch]}
        for data in itertools.product([False, True], repeat=3):
            kept = {epoch for epoch in paid if data[epoch]}
            reported = max(kept, default=None)
            possible = {
                max((e for e in epochs if (data[e] if e in paid else hidden[e])), default=None)
                for hidden in itertools.product([False, True], repeat=3)
            }
            assert side.flag(epochs, paid, kept) == (0 if possible == {reported} else 1)


QUERY = samples.query_for([samples.report("verdict", [1] * 8)])


def result(total: int, sd: float, kappa: int = 0, flags: int | None = None, buckets: int = 4) -> QueryResult:
    """An answer of this total, in buckets of equal size; with a side query if κ is above 0."""
    histogram = [total // buckets + (place < total % buckets) for place in range(buckets)]
    query = replace(QUERY, kappa=kappa, buckets=buckets, sensitivity=2)
    counted = (np.zeros(100, dtype=np.uint8),) * 3
    answer = Answer(histogram, flags, 100, 100, ({}, {}, {}), NoiseMode.LOCAL, 1, 2, 1, bytes(32), counted)
    bias = None
    if flags is not None:
        bias = bias_bound(flags, kappa=kappa, sigma=sd, largest_change=2, beta=BIAS_BETA)
    return QueryResult(query, answer, sd, 1, Fraction(0), bias, {}, 0)


def test_an_answer_within_the_cutoff_is_accepted() -> None:
    """10,000 with a deviation of 10 in each of 4 buckets: noise 0.002; no flag, but its noise makes bias 0.0042."""
    judged = judge(result(10_000, 10.0, kappa=1, flags=0), 0.05)
    assert judged.decision is Decision.ACCEPT
    assert judged.noise == pytest.approx(0.002)
    assert judged.bias == pytest.approx(2 * 10 * math.log(20) / math.sqrt(2) / 10_000)
    assert judged.error == pytest.approx(math.hypot(judged.noise, judged.bias or 0))
    assert judged.sentence() == f"accept: the relative error is at most {judged.error:.3g}, and 0.05 is allowed."
    assert judged.advice == ""


def test_just_outside_is_rejected() -> None:
    answer = result(10_000, 10.0, kappa=1, flags=0)
    error = judge(answer, 1.0).error
    assert judge(answer, error * 1.0001).decision is Decision.ACCEPT
    assert judge(answer, error * 0.9999).decision is Decision.REJECT


@pytest.mark.parametrize(
    ("answer", "needed"),
    [
        (result(1000, 100.0), "it takes 4 times the reports"),
        (result(1000, 100.0, kappa=1, flags=0), "it takes 4 times the reports"),
        (result(10_000, 10.0, kappa=1, flags=5000), "the same weeks"),
        (result(90_000, 1000.0, kappa=1, flags=0), "its κ"),
        (result(0, 1.0), "not above zero"),
        (result(-50, 1.0, kappa=1, flags=0), "not above zero"),
    ],
)
def test_a_rejected_answer_says_what_would_be_needed(answer: QueryResult, needed: str) -> None:
    judged = judge(answer, 0.05)
    assert judged.decision is Decision.REJECT
    assert needed in judged.sentence() and "inf" not in judged.sentence()
    assert json.loads(json.dumps(judged.to_json(), allow_nan=False))["decision"] == "reject"


def test_what_it_takes_is_enough() -> None:
    """Noise alone is 0.2 against 0.05: an answer over four times the reports is accepted, over three times not."""
    assert judge(result(3000, 100.0), 0.05).decision is Decision.REJECT
    assert judge(result(4000, 100.0), 0.05).decision is not Decision.REJECT


def test_without_a_side_query_the_bias_is_unknown() -> None:
    judged = judge(result(10_000, 10.0), 0.05)
    assert judged.decision is Decision.UNKNOWN
    assert "at least 0.002" in judged.sentence() and "--kappa" in judged.sentence()
    assert judged.to_json()["bias_error"] is None


@pytest.mark.parametrize("cutoff", [0.0, -0.1, math.nan, math.inf])
def test_a_cutoff_that_nothing_is_within_is_refused(cutoff: float) -> None:
    with raises(ErrorKind.OUT_OF_RANGE):
        judge(result(10, 1.0), cutoff)


def test_the_advertisers_page_has_the_verdict_of_the_terminal() -> None:
    measured = result(10_000, 10.0, kappa=1, flags=20)
    line = verdict_line(measured)
    assert f"{judge(measured, CUTOFF).sentence()[1:]}</p>" in line
    assert "by at most 82 in total, with probability 95%" in line
    assert line.count("A") == 1 and "Accept: " in line
    assert verdict_line(result(1000, 100.0)).startswith("<p>Reject: ")


NAMES = ("north", "south", "west")
SEEN, BAD = Rejection.SEEN, Rejection.UNOPENABLE


def alike(submitted: int, accepted: int, needed: int, counts: dict[Rejection, int]) -> Shortfall:
    return Shortfall(submitted, accepted, needed, (counts, counts, counts))


SENTENCES = [
    (alike(401, 0, 361, {SEEN: 401}), "all 401 reports were counted before"),
    (alike(1, 0, 1, {SEEN: 1}), "the only report was counted before"),
    (
        alike(401, 0, 361, {SEEN: 400, BAD: 1}),
        "400 of 401 reports were counted before, and 1 cannot be counted",
    ),
    (
        alike(401, 21, 361, {SEEN: 380}),
        "380 of 401 reports were counted before; 21 can be counted and 361 are needed",
    ),
    (
        alike(9, 0, 1, {Rejection.EXPIRED: 9}),
        "all 9 reports are older than the helpers remember",
    ),
    (
        alike(9, 0, 1, {BAD: 9}),
        "none of 9 reports can be counted (payload does not open under this header)",
    ),
    (
        alike(3, 0, 1, {Rejection.NOISE_TOO_SMALL: 3}),
        "all 3 reports paid for more noise than the query adds",
    ),
    (
        Shortfall(9, 2, 5, ({}, {BAD: 7}, {})),
        "south alone leaves out 7 of 9 reports; 2 can be counted and 5 are needed",
    ),
    (
        Shortfall(9, 1, 5, ({SEEN: 4}, {BAD: 4}, {})),
        "of 9 reports 1 can be counted and 5 are needed",
    ),
    (alike(9, 9, 20, {}), "of 9 reports 9 can be counted and 20 are needed"),
]


@pytest.mark.parametrize(("shortfall", "sentence"), SENTENCES)
def test_too_few_reports_are_said_in_one_sentence(shortfall: Shortfall, sentence: str) -> None:
    error = refusal({party: failed("too few", shortfall) for party in range(3)}, NAMES)
    assert str(error) == f"Refused: {sentence}. Nothing was spent."


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
    [(SEEN, "query list"), (Rejection.WRONG_HELPER_SET, "--helpers"), (Rejection.NOISE_TOO_SMALL, "--epsilon")],
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
    assert str(error) == "The query failed while agreeing. north and west: too few"
    assert error.details[0] == "according to north:"
    assert error.details[4] == "according to west:"


def test_other_failures_name_the_helper_that_is_in_the_way() -> None:
    statuses = {0: failed("helper 3 does not answer", party=2), 1: failed("helper 3 does not answer", party=2)}
    error = refusal(statuses, NAMES)
    assert error.helpers == (2,)
    assert str(error).endswith("north and south: helper 3 does not answer")
    # The same command only repeats this once the query's deadline has passed.
    assert error.hint.startswith("Wait.") and "--new" in error.hint


def test_a_dispute_is_called_one() -> None:
    status = QueryStatus(QueryState.DISPUTED, failure=Failure(QueryState.VOTING, 1, "helper 2 voted both ways"))
    assert str(refusal({0: status}, NAMES)).startswith("The query disputed") is False
    assert "disputed" in str(refusal({0: status}, NAMES))


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (0, cli.Exit.TRY_AGAIN),  # out of reach
        (403, cli.Exit.MISTAKE),  # another key, or a site that is not registered
        (422, cli.Exit.MISTAKE),  # another set, or an option that this helper does not take
        (404, cli.Exit.REFUSED),
        (410, cli.Exit.REFUSED),
        (425, cli.Exit.TRY_AGAIN),
        (429, cli.Exit.TRY_AGAIN),
        (503, cli.Exit.TRY_AGAIN),
    ],
)
def test_the_exit_code_says_whether_something_can_be_mended(status: int, code: cli.Exit) -> None:
    assert cli._exit_of(QueryFailed("submitting", (0,), "no", http_status=status)) is code


def test_reports_that_were_counted_are_refused_for_ever() -> None:
    error = QueryFailed("agreeing", (0,), "no", http_status=403, shortfall=alike(1, 0, 1, {SEEN: 1}))
    assert cli._exit_of(error) is cli.Exit.REFUSED

"""The verdict on an answer: accept, reject, or unknown, and what would be needed, for each cause on its own."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from benchmarks.live.measurement_page import verdict_line
from benchmarks.live.places import CUTOFF
from protocol.answer import Answer
from protocol.errors import TrefoilError
from protocol.querier.bias import bias_bound
from protocol.querier.verdict import Decision, judge
from protocol.querier.worth import BIAS_BETA, QueryResult
from protocol.query import NoiseMode
from tests.support import protocol_samples as samples

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
        (result(10_000, 10.0, kappa=1, flags=5000), "Too many reports may be missing something"),
        (result(90_000, 1000.0, kappa=1, flags=0), "its κ"),
        (result(0, 1.0), "eaten the signal"),
        (result(-50, 1.0, kappa=1, flags=0), "eaten the signal"),
    ],
)
def test_a_rejected_answer_says_what_would_be_needed(answer: QueryResult, needed: str) -> None:
    judged = judge(answer, 0.05)
    assert judged.decision is Decision.REJECT
    assert needed in judged.sentence()


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
    with pytest.raises(TrefoilError, match="above 0"):
        judge(result(10, 1.0), cutoff)


def test_the_advertisers_page_has_the_verdict_of_the_terminal() -> None:
    measured = result(10_000, 10.0, kappa=1, flags=20)
    line = verdict_line(measured)
    assert f"{judge(measured, CUTOFF).sentence()[1:]}</p>" in line
    assert "by at most 82 in total, with probability 95%" in line
    assert line.count("A") == 1 and "Accept: " in line
    assert verdict_line(result(1000, 100.0)).startswith("<p>Reject: ")

"""Noise takes time that tells nothing: by buckets and scale alone, with room for the longest walks."""

from __future__ import annotations

import asyncio
import math
from fractions import Fraction

import pytest

from mpc_helpers.mpc import pace
from mpc_helpers.mpc.noise import MAX_BUCKETS_TIMES_SCALE
from mpc_helpers.mpc.pace import allowance, largest_squares, longest_walks, paced
from tests.support.commit_world import run

LIMIT = -41 * math.log(2)


def log_gamma_tail(shape: int, at: float) -> float:
    """ln P(Gamma(shape) > at) = ln Σ_{k < shape} e^−at·at^k/k!, which is exact."""
    terms = [k * math.log(at) - math.lgamma(k + 1) - at for k in range(shape)]
    largest = max(terms)
    return largest + math.log(math.fsum(math.exp(term - largest) for term in terms))


@pytest.mark.parametrize("buckets", [1, 2, 3, 16, 100, 1000, 2**16])
def test_walks_beyond_the_allowance_are_rarer_than_one_in_2_to_the_41(buckets: int) -> None:
    assert log_gamma_tail(buckets, longest_walks(buckets)) < LIMIT


@pytest.mark.parametrize("half", [1, 2, 8, 50, 500, 2**15])
def test_steps_near_zero_beyond_the_allowance_are_as_rare(half: int) -> None:
    """The sum of 2k squares of normal variables is twice a Gamma(k) variable."""
    assert log_gamma_tail(half, largest_squares(2 * half) / 2) < LIMIT


def test_few_buckets_and_a_large_scale_are_given_many_times_their_mean() -> None:
    """The mean was all that was allowed for once: with one bucket it is exceeded in every third query."""
    mean = 10**6 * pace.STEP_SECONDS
    assert allowance(1, Fraction(1, 10**6)) > 30 * mean
    assert allowance(1000, Fraction(1, 10**6)) > 1000 * mean


def test_the_largest_query_is_still_answered_within_its_time() -> None:
    for buckets in (1, 16, 2**16):
        assert allowance(buckets, Fraction(buckets, MAX_BUCKETS_TIMES_SCALE)) < 60


@pytest.mark.parametrize(("takes", "ends"), [(0.0, 2.0), (1.9, 2.0), (2.1, 4.0), (7.0, 8.0)])
def test_what_takes_longer_ends_at_the_next_fixed_moment(takes: float, ends: float) -> None:
    async def ended() -> float:
        start = asyncio.get_running_loop().time()
        async with paced(2.0):
            await asyncio.sleep(takes)
        return asyncio.get_running_loop().time() - start

    assert run(ended) == pytest.approx(ends)


def test_no_time_is_given_where_none_is_asked_for() -> None:
    async def ended() -> float:
        async with paced(0.0):
            pass
        return asyncio.get_running_loop().time()

    assert run(ended) == 0

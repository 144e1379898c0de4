"""Seeded workloads: how uneven they are made, and that nothing recorded with a seed has changed."""

from __future__ import annotations

import math

import pytest

from benchmarks.bulk_reports import Workload
from protocol.errors import TrefoilError
from tests.support import protocol_samples as samples


def test_a_skewed_workload_has_large_buckets_first_and_the_same_number_of_conversions() -> None:
    """Seeded, so it cannot fail by chance."""
    even, skewed = (Workload(samples.terms(), 2000, 5, skew) for skew in (0.0, 1.5))
    assert skewed.truth()[0] > sum(skewed.truth()[1:])
    assert max(even.truth()) < sum(even.truth()) / 4
    for workload in (even, skewed):
        assert sum(int((workload.histograms(span) > 0).sum()) for span in workload.chunks()) == 2000


def test_a_workload_without_skew_is_what_it_always_was() -> None:
    """Recorded results were drawn with these numbers."""
    assert Workload(samples.terms(), 300, 1).truth() == [83, 117, 128, 131, 108, 111, 111, 151]


@pytest.mark.parametrize("skew", [-1.0, 11.0, math.nan, math.inf])
def test_an_impossible_skew_is_refused(skew: float) -> None:
    with pytest.raises(TrefoilError, match="skew"):
        Workload(samples.terms(), 10, 1, skew)

"""Seeded workloads: how uneven they are made, and that nothing recorded with a seed has changed."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
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


def test_flagged_reports_hold_kappa_and_nothing_else() -> None:
    """A tenth of 2,000 reports, give or take six deviations; seeded, so it cannot fail by chance."""
    terms = replace(samples.terms(), kappa=7)
    workload = Workload(terms, 2000, 5, 0.0, 0.1)
    rows = np.concatenate([workload.histograms(span) for span in workload.chunks()])
    flags = rows[:, -1]
    assert set(flags.tolist()) == {0, 7}
    assert 120 < int((flags > 0).sum()) < 280
    assert not rows[flags > 0, :-1].any()
    assert rows[flags == 0, :-1].any(axis=1).all()
    assert workload.truth() == rows.sum(axis=0).tolist()


@pytest.mark.parametrize(("kappa", "flagged"), [(0, 0.1), (1, -0.1), (1, 1.1), (1, math.nan)])
def test_a_share_of_flagged_reports_needs_a_kappa(kappa: int, flagged: float) -> None:
    with pytest.raises(TrefoilError, match="flagged"):
        Workload(replace(samples.terms(), kappa=kappa), 10, 1, 0.0, flagged)

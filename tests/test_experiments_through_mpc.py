"""A very small point through real devices, sealed reports and three helper processes."""

from __future__ import annotations

import time

import numpy as np
import pytest

from benchmarks.experiments.microbenchmark import Microbenchmark, generate
from benchmarks.experiments.through_mpc import ModeResult, run_through_mpc
from protocol.query import NoiseMode


def test_helpers_answer_what_the_simulation_predicts() -> None:
    """Two queries of ten reports: every report is counted, and the answer is the simulated sum plus the mode's noise.

    The noise is the difference of two NB(3/2, q) variables, whose tail beyond 30·b is below 10^-11.
    """
    world = generate(Microbenchmark(participation=0.5, seed=4, scale=0.005, products=1, repeats=2))
    made: list[int] = []
    (result,) = run_through_mpc(world, 7, [NoiseMode.LOCAL], int(time.time()), made.append)
    assert sum(made) == result.reports == 20
    # Only the value 5 of 5 occurs, so units are whole conversions and b = 1/ε.
    scale = 1e6 / 46_051
    assert result.deviation == pytest.approx((2 * 1.5) ** 0.5 * scale, rel=0.01)
    assert np.all(np.abs(result.errors) < 30 * scale)
    assert np.all(result.predicted <= 10)


def test_the_comparison_counts_in_standard_errors() -> None:
    """Noise of exactly the promised size is no standard errors off; three times as much is many."""
    sums = np.full(50, 1000, dtype=np.int64)
    signs = np.where(np.arange(50) % 2, 1, -1)
    right = ModeResult(NoiseMode.LOCAL, sums, sums, sums + 20 * signs, 20.0, 1, 1.0)
    assert right.measured == pytest.approx(20)
    assert right.standard_errors_off == pytest.approx(0)
    assert right.rmsre == pytest.approx((0.02, 0.02))
    assert ModeResult(NoiseMode.LOCAL, sums, sums, sums + 60 * signs, 20.0, 1, 1.0).standard_errors_off > 20

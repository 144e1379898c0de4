"""The side query's flag, and what a querier concludes from the noisy count of flags (paper, App. F)."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from device.side_query import SideQuery, SideQueryForm
from protocol.errors import ProtocolError
from protocol.querier.bias import bias_bound


def test_the_bound_is_theorem_15s() -> None:
    bound = bias_bound(120, kappa=10, sigma=50.0, largest_change=140, beta=0.05)
    assert bound.bound == pytest.approx((120 + 50 * math.log(20) / math.sqrt(2)) / 10 * 140)
    assert bound.beta == 0.05
    assert bound.within(10**6)
    assert not bound.within(100)
    assert not bound.within(math.nan)


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
    with pytest.raises(ProtocolError):
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

"""How well two samples of times tell two states apart: the area under the ROC curve, and bits by the best threshold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

Samples = npt.NDArray[np.float64]

# Two-sided error probability of a 95 % interval.
_MISSES = 0.05
# The areas that count as no better than a coin. For a shift of normal times they are worth 0.011 bit a call.
NEAR = (0.43, 0.57)


@dataclass(frozen=True, slots=True)
class Area:
    """An area under the curve with its standard error. Above 0.5 the second sample is the larger one."""

    value: float
    error: float

    def interval(self) -> tuple[float, float]:
        """Return the 95 % interval."""
        spread = NormalDist().inv_cdf(1 - _MISSES / 2) * self.error
        return max(0.0, self.value - spread), min(1.0, self.value + spread)

    @property
    def is_a_coin(self) -> bool:
        """Return whether the interval contains 0.5: the times tell the two states apart no better than a fair coin."""
        low, high = self.interval()
        return low <= 0.5 <= high

    @property
    def is_near(self) -> bool:
        """Return whether the area lies in `NEAR`."""
        return NEAR[0] <= self.value <= NEAR[1]

    def to_json(self) -> dict[str, object]:
        low, high = self.interval()
        return {
            "area": self.value,
            "low": low,
            "high": high,
            "is_near": self.is_near,
            "is_a_coin": self.is_a_coin,
        }


def area_between(first: Samples, second: Samples) -> Area:
    """Return the area and its error, by the placements of each value among the others (DeLong et al., 1988).

    Rows are independent. Columns of one row were measured together: the area is the mean of the columns' areas, with
    the variance of rows.
    """
    first, second = (np.atleast_2d(sample.T).T for sample in (first, second))
    columns = range(first.shape[1])
    below = np.stack([_placements(second[:, column], first[:, column]) for column in columns], axis=1)
    above = np.stack([1 - _placements(first[:, column], second[:, column]) for column in columns], axis=1)
    variance = sum(float(placed.mean(axis=1).var(ddof=1)) / len(placed) for placed in (below, above))
    return Area(float(below.mean()), float(np.sqrt(variance)))


def _placements(values: Samples, among: Samples) -> Samples:
    """Return for each value the fraction of `among` that is smaller; ties count half."""
    ordered = np.sort(among)
    left, right = (np.searchsorted(ordered, values, side=side) for side in ("left", "right"))
    return np.asarray((left + right) / 2 / len(among), dtype=np.float64)


def bits_between(first: Samples, second: Samples) -> float:
    """Return the bits that one call carries, by the best threshold.

    The threshold is found on half of the rounds and valued on the other half, both ways, less the mean of what a coin
    would show (Miller and Madow): chosen and valued on the same calls, every coin would show something.
    """
    halves = [(first[place::2].ravel(), second[place::2].ravel()) for place in (0, 1)]
    worth = []
    for training, holdout in (halves, halves[::-1]):
        pooled = np.sort(np.concatenate(training))
        shares = [np.searchsorted(np.sort(side), pooled, side="right") / len(side) for side in training]
        threshold = pooled[int(np.argmax(np.abs(shares[0] - shares[1])))]
        calls = sum(map(len, holdout))
        worth.append(
            _information([float((side <= threshold).mean()) for side in holdout]) - 1 / (2 * calls * np.log(2))
        )
    return max(0.0, float(np.mean(worth)))


def _information(shares: Sequence[float]) -> float:
    """Return the mutual information of a fair bit and a binary signal with these probabilities under its values."""

    def entropy(share: float) -> float:
        return -sum(part * float(np.log2(part)) for part in (share, 1 - share) if part > 0)

    return entropy(sum(shares) / 2) - sum(map(entropy, shares)) / 2

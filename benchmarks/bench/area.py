"""The area under the ROC curve: how well a threshold tells two samples apart. 0.5 is a coin, 1 or 0 is certainty.

With the interval that sampling leaves it in, so that "0.51" can be told from 0.5 or cannot. Of twenty true coins one
looks like none in its own interval; an interval for a family of questions is wide enough that all of them hold at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

Samples = npt.NDArray[np.float64]
# How often an interval may miss what it is for: 95 %, two-sided.
_MISSES = 0.05


@dataclass(frozen=True, slots=True)
class Area:
    """An estimate with its standard error. Above 0.5 the second sample is the larger one."""

    value: float
    error: float

    def interval(self, family: int = 1) -> tuple[float, float]:
        """Where it lies, at 95 %; so wide that all of a `family` of questions lie in theirs at once (Bonferroni)."""
        spread = NormalDist().inv_cdf(1 - _MISSES / (2 * family)) * self.error
        return max(0.0, self.value - spread), min(1.0, self.value + spread)

    def is_a_coin(self, family: int = 1) -> bool:
        """Whether 0.5 lies in the interval."""
        low, high = self.interval(family)
        return low <= 0.5 <= high

    def to_json(self, family: int) -> dict[str, object]:
        """With the interval of this question alone, and with that of a family of so many."""
        (low, high), (family_low, family_high) = self.interval(), self.interval(family)
        return {
            "area": self.value,
            "low": low,
            "high": high,
            "is_a_coin": self.is_a_coin(),
            "family_low": family_low,
            "family_high": family_high,
            "is_a_coin_in_family": self.is_a_coin(family),
        }


def area_between(first: Samples, second: Samples) -> Area:
    """The area and its interval, by the placements of each value among the others (DeLong, DeLong and Clarke-Pearson).

    Rows are independent; the columns of a row, if there are any, were measured together. Then it is the mean of the
    columns' areas, with the variance of rows.
    """
    first, second = (np.atleast_2d(sample.T).T for sample in (first, second))
    below = np.stack([_placements(second[:, column], first[:, column]) for column in range(first.shape[1])], axis=1)
    above = np.stack([1 - _placements(first[:, column], second[:, column]) for column in range(first.shape[1])], axis=1)
    value = float(below.mean())
    variance = sum(float(placed.mean(axis=1).var(ddof=1)) / len(placed) for placed in (below, above))
    return Area(value, float(np.sqrt(variance)))


def _placements(values: Samples, among: Samples) -> Samples:
    """For each of `values` the share of `among` that is smaller; equals count half."""
    ordered = np.sort(among)
    left, right = (np.searchsorted(ordered, values, side=side) for side in ("left", "right"))
    return np.asarray((left + right) / 2 / len(among), dtype=np.float64)

"""The area under the ROC curve: how well a threshold tells two samples apart. 0.5 is a coin, 1 or 0 is certainty.

With the interval that sampling leaves it in, so that "0.51" can be told from 0.5 or cannot.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Samples = npt.NDArray[np.float64]
# Two-sided, 95 %.
_QUANTILE = 1.959964


@dataclass(frozen=True, slots=True)
class Area:
    """An estimate with its 95 % interval. Above 0.5 the second sample is the larger one."""

    value: float
    low: float
    high: float

    @property
    def is_a_coin(self) -> bool:
        """Whether 0.5 lies in the interval: of many true coins one in twenty does not look like one."""
        return self.low <= 0.5 <= self.high

    def to_json(self) -> dict[str, object]:
        return {"area": self.value, "low": self.low, "high": self.high, "is_a_coin": self.is_a_coin}


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
    spread = _QUANTILE * float(np.sqrt(variance))
    return Area(value, max(0.0, value - spread), min(1.0, value + spread))


def _placements(values: Samples, among: Samples) -> Samples:
    """For each of `values` the share of `among` that is smaller; equals count half."""
    ordered = np.sort(among)
    left, right = (np.searchsorted(ordered, values, side=side) for side in ("left", "right"))
    return np.asarray((left + right) / 2 / len(among), dtype=np.float64)

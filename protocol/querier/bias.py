"""Bias: what a querier can conclude from the noisy count of reports that may be missing something (paper, App. F).

Run by the querier on an answer that has a side query. Nothing here touches a person's data.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from protocol.errors import ProtocolError

# At this σ and above, all of the helpers' noise modes have a scale above one.
LEAST_SIGMA = 2.5


@dataclass(frozen=True, slots=True)
class BiasBound:
    """With probability at least 1 − β, dropped epochs have moved the expected answer by at most `bound` in L1."""

    bound: float
    beta: float

    def within(self, cutoff: float) -> bool:
        """Whether the answer is good enough to use. Written so that NaN is not."""
        return self.bound <= cutoff


def bias_bound(noisy_flags: int, *, kappa: int, sigma: float, largest_change: int, beta: float) -> BiasBound:
    """(M₀ + σ·ln(1/β)/√2) / κ · Δ^max, never below zero (Theorems 15 and 16).

    `noisy_flags` is the last bucket of the answer, which counts κ for each flagged report; `sigma` is the standard
    deviation of the noise in it, in the mode that the helpers used; `largest_change` is how far dropping any set of
    epochs can move one report: the value cap for one bucket, twice that for several (Theorem 18).

    The paper's tail is for Laplace noise. The discrete noise that helpers add stays inside it from a scale of about
    one on; less noise than that counts as `LEAST_SIGMA`, which is sound since tails only grow with the scale.
    """
    if not (kappa > 0 and largest_change > 0):
        raise ProtocolError("a bias bound needs a side query: κ and the largest change must be positive")
    if not (0 < beta < 1):
        raise ProtocolError(f"β must be between 0 and 1, not {beta}")
    if not (0 <= sigma < math.inf):
        raise ProtocolError(f"σ must be a standard deviation, not {sigma}")
    spread = max(sigma, LEAST_SIGMA) if sigma else 0.0
    flagged = (noisy_flags + spread * math.log(1 / beta) / math.sqrt(2)) / kappa
    return BiasBound(max(0.0, flagged) * largest_change, beta)

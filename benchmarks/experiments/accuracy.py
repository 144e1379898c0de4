"""From an accuracy target to a privacy budget and back."""

from __future__ import annotations

import math

from protocol.epsilon import entitlement
from protocol.errors import TrefoilError

# Every experiment asks for an error within 5 % with probability 99 %.
ALPHA = 0.05
BETA = 0.01


def query_epsilon(cap: float, expected: float, alpha: float = ALPHA, beta: float = BETA) -> int:
    """ε = Δ·ln(1/β)/(α·B·c̃) in micros, rounded down; `expected` is B·c̃, the rough size of the answer."""
    if not (alpha > 0 and 0 < beta < 1):
        raise TrefoilError(f"the error must be above 0 and the failure probability between 0 and 1: {alpha}, {beta}")
    if not (cap > 0 and expected > 0):
        raise TrefoilError(f"value cap and expected answer must be above 0, not {cap} and {expected}")
    return entitlement(cap * math.log(1 / beta) / (alpha * expected))

"""An answer in one sentence: which campaign sold most, if that can be known through the noise."""

from __future__ import annotations

from collections.abc import Sequence


def one_line(labels: Sequence[str], answer: Sequence[int], half_width: int) -> str:
    """Only what the intervals allow: two campaigns whose intervals meet are not told apart."""
    ranked = sorted(zip(answer, labels, strict=True), reverse=True)
    (most, name), (second, other) = ranked[:2]
    if most - half_width <= 0:
        return f"Noise: no campaign stands out from ± {half_width:,}. This answer says nothing about anyone."
    if most - half_width > second + half_width:
        return f"“{name}” sold most: {most:,} ± {half_width:,}."
    return f"“{name}” ({most:,}) and “{other}” ({second:,}) are too close to tell apart at ± {half_width:,}."

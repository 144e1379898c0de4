"""A device's own look at a checked report before it seals it: whether helpers will find every residue zero.

In plain integers, for one report, and written apart from what helpers do in bulk: the two are tested on each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from operator import mul

import numpy as np

from protocol.field import P, Vector, reduce
from protocol.numerators import GROUP, denominators
from protocol.validity import Deal, powers_of

_P = np.uint64(P)


def holds(dealt: Deal, points: Sequence[int], openings: Sequence[int]) -> bool:
    """Run by a device before it seals: whether every residue is zero, from the shares as helpers will have them."""
    shape = dealt.shape
    secret = reconstruct(dealt)
    sums = _fractions(secret[: shape.buckets], dealt.labels, points)
    if sums is None:
        return False
    shared = secret[shape.buckets :].tolist()
    at, mask_at = shape.length - shape.buckets, shape.explicit - shape.buckets
    opening = iter(openings)
    for point, (over, under) in zip(points, sums, strict=True):
        paid = part = 0
        for weight, degree in shape.planes:
            value, slope = _evaluate(shared[mask_at], shared[at : at + degree], point)
            opened = next(opening)
            if opened * value % P != 1:
                return False
            part = weight * opened * slope
            paid += part
            at, mask_at = at + degree, mask_at + 1
        # The side query's plane is the last, and belongs to an equation of its own.
        if shape.kappa:
            paid -= part
            if (shared[0] - part * shape.kappa * (point - 1)) % P:
                return False
        if (over - paid * under) % P:
            return False
    return True


def reconstruct(dealt: Deal) -> Vector:
    """The shared vector: x₁ + x₂ + x₃, where x₃ is the body without its mask, and behind the body the mask itself."""
    first, second, third = dealt.expanded
    explicit = dealt.shape.explicit
    secret = first + second
    secret[:explicit] += dealt.shared.body + (_P - third[:explicit])
    secret[explicit:] += third[explicit:]
    return reduce(secret)


def _evaluate(constant: int, coefficients: Sequence[int], point: int) -> tuple[int, int]:
    """P(r), and P′(r) not reduced."""
    value = slope = 0
    for coefficient in reversed(coefficients):
        slope = (slope * point + value) % P
        value = (value * point + coefficient) % P
    return (value * point + constant) % P, slope * point + value


def _fractions(numbers: Vector, labels: Sequence[int], points: Sequence[int]) -> list[tuple[int, int]] | None:
    """F(r) = Σ N(r)/D(r) at every point as one fraction; None if something lies outside the groups of these labels.

    As many groups as the spread, whatever is in them: a group that comes twice is evaluated twice and counted once.
    """
    chosen = [max(label - 1, 0) // GROUP for label in labels]
    over = [numbers[group * GROUP : (group + 1) * GROUP].tolist() for group in chosen]
    counted = [int(group not in chosen[:place]) for place, group in enumerate(chosen)]
    within = sum(once * (len(row) - row.count(0)) for once, row in zip(counted, over, strict=True))
    if np.count_nonzero(numbers) != within:
        return None
    table = _denominator_rows(numbers.size)
    sums = []
    for point in points:
        powers = powers_of(point, GROUP + 1)
        top, bottom = 0, 1
        for group, row, once in zip(chosen, over, counted, strict=True):
            value = sum(map(mul, row, powers)) * once
            divisor = sum(map(mul, table[group], powers)) % P
            top, bottom = (top * divisor + value * bottom) % P, bottom * divisor % P
        sums.append((top, bottom))
    return sums


@lru_cache(maxsize=16)
def _denominator_rows(buckets: int) -> list[list[int]]:
    rows: list[list[int]] = denominators(buckets).tolist()
    return rows

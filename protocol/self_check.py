"""A device's own look at a checked report before it seals it: whether helpers will find every residue zero.

In plain integers, for one report, and written apart from what helpers do in bulk: the two are tested on each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from operator import mul

import numpy as np

from protocol.denominations import Amount
from protocol.field import P, Vector
from protocol.numerators import GROUP
from protocol.validity import Deal, points_of, powers_of

_P = np.uint64(P)
_POINT_LABEL = b"trefoil/1 self-check of numerators"
# Up to this degree, reducing once at the end takes less than reducing at every step.
_SHORT = 16


def holds(dealt: Deal, points: Sequence[int], openings: Sequence[int]) -> bool:
    """Run by a device before it seals: whether every residue is zero, from the shares as helpers will have them.

    First, the shared numerators are those of the histogram that was to be shared. Then its few fractions, h/(r − a),
    stand for the numerators in the sum at every point. Openings and polynomials are taken from the shares throughout.
    """
    shape = dealt.shape
    secret = reconstruct(dealt)
    if not _shares(secret[: shape.buckets], dealt.amounts):
        return False
    shared = secret[shape.buckets :].tolist()
    at, mask_at = shape.length - shape.buckets, shape.explicit - shape.buckets
    opening = iter(openings)
    for point in points:
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
        over, under = _fractions(dealt.amounts, point)
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
    # Below 4p. Of so few numbers, a division each takes less than the passes of `field.reduce`.
    reduced: Vector = secret % _P
    return reduced


def _evaluate(constant: int, coefficients: Sequence[int], point: int) -> tuple[int, int]:
    """P(r), and P′(r) not reduced."""
    value = slope = 0
    if len(coefficients) > _SHORT:
        for coefficient in reversed(coefficients[_SHORT:]):
            slope = (slope * point + value) % P
            value = (value * point + coefficient) % P
        coefficients = coefficients[:_SHORT]
    for coefficient in reversed(coefficients):
        slope = slope * point + value
        value = value * point + coefficient
    return (value * point + constant) % P, slope * point + value


def _shares(numbers: Vector, amounts: Sequence[Amount]) -> bool:
    """Whether the shared numerators are those of these amounts: the same at a point x, and zero in all other groups.

    x is the same for all reports, so its powers are at hand. It is a hash: two numerators, of degree below 32, that
    differ by a fault are the same there with probability 2^-56. As many groups as the spread, whatever is in them: a
    group that comes twice is evaluated twice and counted once.
    """
    powers, parts = _table(numbers.size)
    seen: list[int] = []
    difference = within = 0
    for label, value in amounts:
        place = max(label - 1, 0)
        start = place - place % GROUP
        row = numbers[start : start + GROUP].tolist()
        once = int(start not in seen)
        seen.append(start)
        within += once * (len(row) - row.count(0))
        difference += once * sum(map(mul, row, powers)) - value * parts[place]
    return np.count_nonzero(numbers) == within and not difference % P


def _fractions(amounts: Sequence[Amount], point: int) -> tuple[int, int]:
    """F(r) = Σ h/(r − a) as one fraction."""
    over, under = 0, 1
    for label, value in amounts:
        over, under = (over * (point - label) + value * under) % P, under * (point - label) % P
    return over, under


@lru_cache(maxsize=16)
def _table(buckets: int) -> tuple[list[int], list[int]]:
    """1, x, x², … and D(x)/(x − a) for every label, made from the labels alone as no numerator is."""
    (point,) = points_of(_POINT_LABEL, 1)
    parts = []
    for start in range(1, buckets + 1, GROUP):
        gaps = [point - label for label in range(start, min(start + GROUP, buckets + 1))]
        whole = prod(gaps)
        parts += [whole // gap % P for gap in gaps]
    return powers_of(point, GROUP), parts

"""The proof inside a checked report: why three helpers believe its numbers without seeing them (SPEC.md §3.1).

The coins of one weight w (a plane, see `shape`) make a polynomial P = g·Π (1 − X/a) over the labels a of the buckets
that they go to, with a mask g. Σ w·P′/P over all planes is the same sum of fractions as F(X) = Σ h_j/(X − a_j). The
device shares the numerators of F and the coefficients of every P. The points r are a hash of everything that fixes the
shares (Fiat-Shamir). There the device opens e = 1/P(r), which is uniform because no helper knows g. Then
e·P(r) − 1 = 0 and F(r) − Σ w·e·P′(r) = 0 are linear in the shares.

`holds` is the device's own verification before it seals. It works in plain integers on one report, and is written
independently of what helpers run in bulk, so that each is tested against the other.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import compress
from math import prod
from operator import mul

import numpy as np

from protocol import numerators
from protocol.errors import OutOfRange
from protocol.field import P, Vector, expand_many, inverse_integers
from protocol.numerators import GROUP
from protocol.shape import PURSE, BucketValue, Plane, Shape, factor_powers, pay, polynomial
from protocol.shares import SharedVector

POINTS_LABEL = b"trefoil/1 validity points\0"
# Points start here, above every label, so that no denominator r − a is zero.
LEAST_POINT = 2**17
WORD_SHIFT = 3
_P = np.uint64(P)
_FOUR_WORDS = struct.Struct("<4Q")

Seeds = tuple[bytes, bytes, bytes]
# Returns three fresh seeds for the numbers passed in.
Draw = Callable[[bytes], Seeds]
Polynomials = Sequence[Sequence[int]]


def points_of(prefix: bytes, count: int) -> list[int]:
    """Return where a report is evaluated: a hash of its header without the openings. Other words are skipped."""
    points: list[int] = []
    counter = 0
    while len(points) < count:
        words = hash_words(prefix, counter)
        points += [word for word in words if LEAST_POINT <= word < P]
        counter += 1
    return points[:count]


def hash_words(prefix: bytes, counter: int) -> list[int]:
    """Return four words of 61 bits. Nearly every report needs only the first hash (`counter` 0)."""
    digest = hashlib.sha256(POINTS_LABEL + bytes([counter]) + prefix).digest()
    return [word >> WORD_SHIFT for word in _FOUR_WORDS.unpack(digest)]


@dataclass(frozen=True, slots=True)
class Deal:
    """What a device holds between Share and Seal. Use it for one header, then discard it.

    A second header would open the same polynomials at other points, and anyone could compute from both which buckets
    the report counts.
    """

    shape: Shape
    shared: SharedVector = field(repr=False)
    # What the three seeds expand to.
    expanded: Vector = field(repr=False)
    masks: list[int] = field(repr=False)
    # The polynomials without their masks, and for each plane the index of its own.
    polynomials: Polynomials = field(repr=False)
    chosen: Sequence[int] = field(repr=False)
    # The histogram as (label, value) pairs, padded to `shape.spread` of them.
    amounts: Sequence[BucketValue] = field(repr=False)


def deal(histogram: Sequence[int], shape: Shape, draw: Draw) -> Deal:
    """Run by a device, *Share* of a checked report: pay, then share numerators and polynomials.

    `histogram` ends with the side query's number where there is one.
    """
    amounts = _amounts(histogram, shape)
    numbers = numerators.encode(amounts, shape.buckets)
    polynomials, chosen = _prove(amounts, shape)
    if shape.kappa:
        flag, rest = divmod(histogram[-1], shape.kappa)
        if flag not in (0, 1) or rest:
            raise OutOfRange(f"a side query's number is 0 or κ = {shape.kappa}")
        numbers = np.append(numbers, np.uint64(histogram[-1]))
        chosen.append(len(polynomials))
        polynomials.append(polynomial([flag]))
    return deal_numbers(numbers, polynomials, shape, draw, chosen, amounts)


def _prove(amounts: Sequence[BucketValue], shape: Shape) -> tuple[list[list[int]], list[int]]:
    """Return polynomials, and for each plane the index of its own. Only `shape` decides how many there are."""
    given = pay(amounts, _coins(shape))
    if len(amounts) > 1:
        return [polynomial(labels) for labels in given], list(range(len(given)))
    # All that is spent goes to one bucket, so every plane has a power of the same factor.
    powers = factor_powers(amounts[0][0], max(map(len, given)))
    return powers, [len(labels) - labels.count(PURSE) for labels in given]


def deal_numbers(
    numbers: Vector,
    polynomials: Polynomials,
    shape: Shape,
    draw: Draw,
    chosen: Sequence[int] | None = None,
    amounts: Sequence[BucketValue] = (),
) -> Deal:
    """Share these numbers with these polynomials, whether or not they are consistent: helpers verify.

    `chosen` says which polynomial each plane has; without it, each has its own.
    """
    content, chosen = numbers.tobytes(), range(len(polynomials)) if chosen is None else chosen
    while True:
        seeds = draw(content)
        expanded = expand_many(seeds, shape.expanded)
        masks = [sum(parts) % P for parts in zip(*expanded[:, shape.explicit :].tolist(), strict=True)]
        # Once in 2^56 reports a mask is zero, and could not be opened.
        if all(masks):
            break
    planes = [polynomials[which][1 : plane.degree + 1] for which, plane in zip(chosen, shape.planes, strict=True)]
    coefficients = [
        mask * coefficient % P
        for mask, plane in zip(masks, planes * shape.points, strict=True)
        for coefficient in plane
    ]
    first, second, third = expanded[:, : shape.explicit]
    body = np.concatenate([numbers, np.array(coefficients, dtype=np.uint64)])
    body += (_P - first) + (_P - second)
    body += third
    # Of so few numbers, a division each takes less than the passes of `field.reduce`.
    body %= _P
    return Deal(shape, SharedVector(seeds, body), expanded, masks, polynomials, chosen, amounts)


def open_at(dealt: Deal, points: Sequence[int]) -> list[int]:
    """Return 1/P(r) for every point and plane. It exists in an honest report: no mask is zero, and no point a label."""
    values, mask = [], iter(dealt.masks)
    terms = max(map(len, dealt.polynomials))
    for point in points:
        powers = powers_of(point, terms)
        # Evaluate all, chosen or not: constant work, whatever the report holds.
        evaluated = [sum(map(mul, polynomial, powers)) for polynomial in dealt.polynomials]
        values += [next(mask) * evaluated[which] for which in dealt.chosen]
    try:
        return inverse_integers(values)
    except ZeroDivisionError:
        # Only a forged proof has a zero, which has no inverse. Open it as 0: helpers will reject the report.
        return [pow(value, P - 2, P) for value in values]


def histogram_in(shared: Vector, shape: Shape) -> Vector:
    """Return the histogram in a shared vector. The map is linear, so it also applies to shares and to sums of them."""
    if not shape.checked:
        return shared[: shape.length]
    return np.concatenate([numerators.decode(shared[: shape.buckets]), shared[shape.buckets : shape.length]])


def _amounts(histogram: Sequence[int], shape: Shape) -> list[BucketValue]:
    """Return the non-zero buckets as (label, value) pairs, padded to `shape.spread` of them with zeros."""
    numbers = histogram[: shape.buckets]
    amounts = list(zip(compress(range(1, shape.buckets + 1), numbers), compress(numbers, numbers), strict=True))
    amounts += [(0, 0)] * (shape.spread - len(amounts))
    if len(amounts) > shape.spread or any(value < 0 for _, value in amounts):
        raise OutOfRange(f"a histogram has at most {shape.spread} buckets that are not zero, none of them negative")
    return amounts


def _coins(shape: Shape) -> Sequence[Plane]:
    return shape.planes[:-1] if shape.kappa else shape.planes


def powers_of(point: int, count: int) -> list[int]:
    """Return 1, r, r², …, `count` of them."""
    powers = [1]
    while len(powers) < count:
        powers.append(powers[-1] * point % P)
    return powers


_POINT_LABEL = b"trefoil/1 self-check of numerators"
# Up to this degree, reducing once at the end takes less than reducing at every step.
_SHORT = 16


def holds(dealt: Deal, points: Sequence[int], openings: Sequence[int]) -> bool:
    """Run by a device before it seals: return whether every residue is zero, from the shares as helpers will have them.

    First check that the shared numerators encode the intended histogram. Then compute F(r) at every point from its few
    fractions h/(r − a) instead of the numerators. Openings and polynomials are taken from the shares throughout.
    """
    shape = dealt.shape
    secret = reconstruct(dealt)
    if not _encodes(secret[: shape.buckets], dealt.amounts):
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
    """Return the shared vector x₁ + x₂ + x₃; x₃ is the body without its mask, and beyond the body the mask itself."""
    first, second, third = dealt.expanded
    explicit = dealt.shape.explicit
    secret = first + second
    secret[:explicit] += dealt.shared.body + (_P - third[:explicit])
    secret[explicit:] += third[explicit:]
    # Below 4p. Of so few numbers, a division each takes less than the passes of `field.reduce`.
    reduced: Vector = secret % _P
    return reduced


def _evaluate(constant: int, coefficients: Sequence[int], point: int) -> tuple[int, int]:
    """Return P(r), and P′(r) not reduced."""
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


def _encodes(numbers: Vector, amounts: Sequence[BucketValue]) -> bool:
    """Return whether `numbers` are the numerators of `amounts`: equal at a point x, and zero in all other groups.

    x is one hash for all reports, so that its powers are cached. Two different numerators, of degree below 32, agree at
    x with probability 2^-56 (this guards against faults, not adversaries). The work is constant: one evaluation for
    each amount, and a group that occurs twice is evaluated twice and counted once.
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


def _fractions(amounts: Sequence[BucketValue], point: int) -> tuple[int, int]:
    """Return numerator and denominator of F(r) = Σ h/(r − a)."""
    over, under = 0, 1
    for label, value in amounts:
        over, under = (over * (point - label) + value * under) % P, under * (point - label) % P
    return over, under


@lru_cache(maxsize=16)
def _table(buckets: int) -> tuple[list[int], list[int]]:
    """Return 1, x, x², … and D(x)/(x − a) for every label. Computed from the labels, independently of `numerators`."""
    (point,) = points_of(_POINT_LABEL, 1)
    parts = []
    for start in range(1, buckets + 1, GROUP):
        gaps = [point - label for label in range(start, min(start + GROUP, buckets + 1))]
        whole = prod(gaps)
        parts += [whole // gap % P for gap in gaps]
    return powers_of(point, GROUP), parts

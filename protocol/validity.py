"""The proof inside a checked report: why three helpers believe its numbers without seeing them (SPEC.md §3.1).

Coins of weight w that go to buckets make a polynomial P with those labels as roots, and Σ w·P′/P over the planes is the
same sum of fractions as F(X) = Σ h_j/(X − a_j). The device shares numerators of F and the coefficients of every P under
a mask g of its own. A hash of everything that fixes the shares gives the points r. There the device opens e = 1/P(r),
which a mask nobody knows makes uniform. Then e·P(r) − 1 = 0 and F(r) − Σ w·e·P′(r) = 0 are linear in the shares.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from protocol import field as prime_field
from protocol import numerators
from protocol.denominations import Amount, Plane, pay, polynomial
from protocol.errors import ProtocolError
from protocol.field import P, Vector, add, expand_many, subtract
from protocol.matrices import multiply_matrices
from protocol.shape import Shape
from protocol.shares import SharedVector

POINTS_LABEL = b"trefoil/1 validity points\0"
# Below every point: no label is one, so no denominator is ever zero.
LEAST_POINT = 2**17
WORD_SHIFT = 3

Seeds = tuple[bytes, bytes, bytes]
Polynomials = Sequence[Sequence[int]]


def points_of(prefix: bytes, count: int) -> list[int]:
    """Where a report is evaluated, from all of its header but the openings. A word that is no element is skipped."""
    points: list[int] = []
    counter = 0
    while len(points) < count:
        words = hash_words(prefix, counter)
        points += [word for word in words if LEAST_POINT <= word < P]
        counter += 1
    return points[:count]


def hash_words(prefix: bytes, counter: int) -> list[int]:
    """Four words of 61 bits. Nearly every report needs the first hash only."""
    digest = hashlib.sha256(POINTS_LABEL + bytes([counter]) + prefix).digest()
    return [int.from_bytes(digest[at : at + 8], "little") >> WORD_SHIFT for at in range(0, len(digest), 8)]


@dataclass(frozen=True, slots=True)
class Deal:
    """What a device holds between Share and Seal. It serves one header and is forgotten.

    The same seeds under a second header would be opened at a second point, and show everybody where the report points.
    """

    shape: Shape
    shared: SharedVector = field(repr=False)
    masks: list[int] = field(repr=False)
    polynomials: Polynomials = field(repr=False)


def deal(histogram: Sequence[int], shape: Shape, draw: Callable[[], Seeds]) -> Deal:
    """Run by a device, *Share* of a checked report: pay, then share numerators and polynomials.

    `histogram` ends with the side query's number where there is one. `draw` gives three new seeds each time.
    """
    amounts = _amounts(histogram, shape)
    numbers = numerators.encode(amounts, shape.buckets)
    polynomials = [polynomial(labels) for labels in pay(amounts, _coins(shape))]
    if shape.kappa:
        flag, rest = divmod(histogram[-1], shape.kappa)
        if flag not in (0, 1) or rest:
            raise ProtocolError(f"a side query's number is 0 or κ = {shape.kappa}")
        numbers = np.append(numbers, np.uint64(histogram[-1]))
        polynomials.append(polynomial([flag]))
    return deal_numbers(numbers, polynomials, shape, draw)


def deal_numbers(numbers: Vector, polynomials: Polynomials, shape: Shape, draw: Callable[[], Seeds]) -> Deal:
    """Share these numbers with these polynomials, whether or not they fit together: helpers will find out."""
    while True:
        seeds = draw()
        first, second, third = expand_many(seeds, shape.expanded)
        masks = add(add(first, second), third)[shape.explicit :].tolist()
        # Once in 2^56 reports a mask is zero, and could not be opened.
        if all(masks):
            break
    coefficients, mask = [], iter(masks)
    for _ in range(shape.points):
        for plane in polynomials:
            factor = next(mask)
            coefficients += [factor * coefficient % P for coefficient in plane[1:]]
    secret = np.concatenate([numbers, np.array(coefficients, dtype=np.uint64)])
    cut = shape.explicit
    body = add(subtract(subtract(secret, first[:cut]), second[:cut]), third[:cut])
    return Deal(shape, SharedVector(seeds, body), masks, polynomials)


def open_at(dealt: Deal, points: Sequence[int]) -> list[int]:
    """1/P(r) for every point and plane. Masks are not zero and points no labels, so it exists in an honest report."""
    values, mask = [], iter(dealt.masks)
    for point in points:
        for plane in dealt.polynomials:
            values.append(next(mask) * _evaluate(plane, point) % P)
    return _inverses(values)


def holds(dealt: Deal, points: Sequence[int], openings: Sequence[int]) -> bool:
    """Run by a device before it seals: whether every residue is zero, from seeds and body as helpers will have them."""
    shape = dealt.shape
    secret = _reconstructed(dealt)
    sums = _fractions(secret[: shape.buckets], points)
    shared = secret[shape.buckets :].tolist()
    flag = shared[0]
    at, mask_at = shape.length - shape.buckets, shape.explicit - shape.buckets
    for point, left in zip(points, sums, strict=True):
        for weight, degree in shape.planes:
            value, slope = _evaluate_both(shared[mask_at], shared[at : at + degree], point)
            opened = openings[mask_at - (shape.explicit - shape.buckets)]
            if opened * value % P != 1:
                return False
            part = weight * opened * slope
            left -= part
            at, mask_at = at + degree, mask_at + 1
        # The side query's plane is the last, and belongs to an equation of its own.
        if shape.kappa:
            left += part
            if (flag - part * shape.kappa * (point - 1)) % P:
                return False
        if left % P:
            return False
    return True


def encode_openings(openings: Sequence[int]) -> bytes:
    """As the header carries them."""
    return prime_field.encode(np.array(openings, dtype=np.uint64))


def _amounts(histogram: Sequence[int], shape: Shape) -> list[Amount]:
    """As many amounts as the spread, whatever is in the histogram."""
    amounts = [(place + 1, value) for place, value in enumerate(histogram[: shape.buckets]) if value]
    if len(amounts) > shape.spread or any(value < 0 for _, value in amounts):
        raise ProtocolError(f"a histogram has at most {shape.spread} buckets that are not zero, none of them negative")
    return amounts + [(0, 0)] * (shape.spread - len(amounts))


def _coins(shape: Shape) -> Sequence[Plane]:
    return shape.planes[:-1] if shape.kappa else shape.planes


def _reconstructed(dealt: Deal) -> Vector:
    shape, body = dealt.shape, dealt.shared.body
    first, second, third = expand_many(dealt.shared.seeds, shape.expanded)
    third[: shape.explicit] = subtract(body, third[: shape.explicit])
    return add(add(first, second), third)


def _evaluate(coefficients: Sequence[int], point: int) -> int:
    value = 0
    for coefficient in reversed(coefficients):
        value = (value * point + coefficient) % P
    return value


def _evaluate_both(constant: int, coefficients: Sequence[int], point: int) -> tuple[int, int]:
    """P(r) and P′(r), not reduced the latter."""
    value = slope = 0
    for coefficient in reversed(coefficients):
        slope = (slope * point + value) % P
        value = (value * point + coefficient) % P
    return (value * point + constant) % P, slope * point + value


def _inverses(values: Sequence[int]) -> list[int]:
    """1/v of every value, with one inversion in all; 0 where one of them is 0, which no honest report has."""
    products = [1]
    for value in values:
        products.append(products[-1] * value % P)
    if not products[-1]:
        return [pow(value, -1, P) if value else 0 for value in values]
    inverses, inverse = [0] * len(values), pow(products[-1], -1, P)
    for place in range(len(values) - 1, -1, -1):
        inverses[place] = inverse * products[place] % P
        inverse = inverse * values[place] % P
    return inverses


def _fractions(numbers: Vector, points: Sequence[int]) -> list[int]:
    """F(r) = Σ N(r)/D(r) at every point."""
    rows = _above_denominators(numbers.size).copy()
    count = len(rows) // 2
    rows[:count, :-1] = numerators.in_groups(numbers)
    table = np.array([_powers(point, numerators.GROUP + 1) for point in points], dtype=np.uint64).T
    values = multiply_matrices(rows, table).T.tolist()
    return [_sum_fractions(column[:count], column[count:]) for column in values]


def _sum_fractions(over: Sequence[int], under: Sequence[int]) -> int:
    top, bottom = 0, 1
    for numerator, denominator in zip(over, under, strict=True):
        top = (top * denominator + numerator * bottom) % P
        bottom = bottom * denominator % P
    return top * pow(bottom, -1, P) % P


def _powers(point: int, count: int) -> list[int]:
    powers = [1]
    while len(powers) < count:
        powers.append(powers[-1] * point % P)
    return powers


@lru_cache(maxsize=16)
def _above_denominators(buckets: int) -> Vector:
    """Room for the numerators of all groups, and below it their denominators."""
    under = numerators.denominators(buckets)
    return np.concatenate([np.zeros_like(under), under])

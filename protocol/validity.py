"""The proof inside a checked report: why three helpers believe its numbers without seeing them (SPEC.md §3.1).

Coins of weight w that go to buckets make a polynomial P with those labels as roots, and Σ w·P′/P over the planes is the
same sum of fractions as F(X) = Σ h_j/(X − a_j). The device shares numerators of F and the coefficients of every P under
a mask g of its own. A hash of everything that fixes the shares gives the points r. There the device opens e = 1/P(r),
which a mask nobody knows makes uniform. Then e·P(r) − 1 = 0 and F(r) − Σ w·e·P′(r) = 0 are linear in the shares.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import compress
from operator import mul

import numpy as np

from protocol import numerators
from protocol.denominations import PURSE, Amount, Plane, factor_powers, pay, polynomial
from protocol.errors import ProtocolError
from protocol.field import P, Vector, expand_many, inverse_integers
from protocol.shape import Shape
from protocol.shares import SharedVector

POINTS_LABEL = b"trefoil/1 validity points\0"
# Below every point: no label is one, so no denominator is ever zero.
LEAST_POINT = 2**17
WORD_SHIFT = 3
_P = np.uint64(P)
_FOUR_WORDS = struct.Struct("<4Q")

Seeds = tuple[bytes, bytes, bytes]
# Gives three new seeds each time, for the numbers it is handed.
Draw = Callable[[bytes], Seeds]
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
    return [word >> WORD_SHIFT for word in _FOUR_WORDS.unpack(digest)]


@dataclass(frozen=True, slots=True)
class Deal:
    """What a device holds between Share and Seal. It serves one header and is forgotten.

    The same seeds under a second header would be opened at a second point, and show everybody where the report points.
    """

    shape: Shape
    shared: SharedVector = field(repr=False)
    # What the three seeds expand to.
    expanded: Vector = field(repr=False)
    masks: list[int] = field(repr=False)
    # Without their masks; and which of them each plane has.
    polynomials: Polynomials = field(repr=False)
    chosen: Sequence[int] = field(repr=False)
    # What is shared, as many amounts as the spread.
    amounts: Sequence[Amount] = field(repr=False)


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
            raise ProtocolError(f"a side query's number is 0 or κ = {shape.kappa}")
        numbers = np.append(numbers, np.uint64(histogram[-1]))
        chosen.append(len(polynomials))
        polynomials.append(polynomial([flag]))
    return deal_numbers(numbers, polynomials, shape, draw, chosen, amounts)


def _prove(amounts: Sequence[Amount], shape: Shape) -> tuple[list[list[int]], list[int]]:
    """Polynomials, as many of them for every content, and which of them each plane of coins has."""
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
    amounts: Sequence[Amount] = (),
) -> Deal:
    """Share these numbers with these polynomials, whether or not they fit together: helpers will find out.

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
    """1/P(r) for every point and plane. Masks are not zero and points no labels, so it exists in an honest report."""
    values, mask = [], iter(dealt.masks)
    terms = max(map(len, dealt.polynomials))
    for point in points:
        powers = powers_of(point, terms)
        # Of all of them, chosen or not: the same work for every content.
        evaluated = [sum(map(mul, polynomial, powers)) for polynomial in dealt.polynomials]
        values += [next(mask) * evaluated[which] for which in dealt.chosen]
    try:
        return inverse_integers(values)
    except ZeroDivisionError:
        # A proof that is none may have a zero, which has no inverse; then nothing helps it.
        return [pow(value, P - 2, P) for value in values]


def histogram_in(shared: Vector, shape: Shape) -> Vector:
    """The histogram in a shared vector, or in shares or sums of such vectors: its form is undone by a linear map."""
    if not shape.checked:
        return shared[: shape.length]
    return np.concatenate([numerators.decode(shared[: shape.buckets]), shared[shape.buckets : shape.length]])


def encode_openings(openings: Sequence[int]) -> bytes:
    """As the header carries them."""
    return struct.pack(f"<{len(openings)}Q", *openings)


def _amounts(histogram: Sequence[int], shape: Shape) -> list[Amount]:
    """As many amounts as the spread, whatever is in the histogram."""
    numbers = histogram[: shape.buckets]
    amounts = list(zip(compress(range(1, shape.buckets + 1), numbers), compress(numbers, numbers), strict=True))
    amounts += [(0, 0)] * (shape.spread - len(amounts))
    if len(amounts) > shape.spread or any(value < 0 for _, value in amounts):
        raise ProtocolError(f"a histogram has at most {shape.spread} buckets that are not zero, none of them negative")
    return amounts


def _coins(shape: Shape) -> Sequence[Plane]:
    return shape.planes[:-1] if shape.kappa else shape.planes


def powers_of(point: int, count: int) -> list[int]:
    """1, r, r², …"""
    powers = [1]
    while len(powers) < count:
        powers.append(powers[-1] * point % P)
    return powers

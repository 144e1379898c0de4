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
from protocol.denominations import Amount, Plane, pay, polynomial
from protocol.errors import ProtocolError
from protocol.field import P, Vector, expand_many, inverse_integers, reduce
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
    polynomials: Polynomials = field(repr=False)
    # The labels among which everything lies, as many as the spread.
    labels: list[int] = field(repr=False)


def deal(histogram: Sequence[int], shape: Shape, draw: Draw) -> Deal:
    """Run by a device, *Share* of a checked report: pay, then share numerators and polynomials.

    `histogram` ends with the side query's number where there is one.
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
    return deal_numbers(numbers, polynomials, shape, draw, [label for label, _ in amounts])


def deal_numbers(
    numbers: Vector, polynomials: Polynomials, shape: Shape, draw: Draw, labels: Sequence[int] = ()
) -> Deal:
    """Share these numbers with these polynomials, whether or not they fit together: helpers will find out."""
    content = numbers.tobytes()
    while True:
        seeds = draw(content)
        expanded = expand_many(seeds, shape.expanded)
        # Three elements below p add up within a word.
        masks = reduce(expanded[:, shape.explicit :].sum(axis=0, dtype=np.uint64)).tolist()
        # Once in 2^56 reports a mask is zero, and could not be opened.
        if all(masks):
            break
    coefficients, mask = [], iter(masks)
    for _ in range(shape.points):
        for plane in polynomials:
            factor = next(mask)
            coefficients += [factor * coefficient % P for coefficient in plane[1:]]
    first, second, third = expanded[:, : shape.explicit]
    body = np.concatenate([numbers, np.array(coefficients, dtype=np.uint64)])
    body += (_P - first) + (_P - second)
    body += third
    return Deal(shape, SharedVector(seeds, reduce(body)), expanded, masks, polynomials, list(labels))


def open_at(dealt: Deal, points: Sequence[int]) -> list[int]:
    """1/P(r) for every point and plane. Masks are not zero and points no labels, so it exists in an honest report."""
    values, mask = [], iter(dealt.masks)
    terms = max(len(plane) for plane in dealt.polynomials)
    for point in points:
        powers = powers_of(point, terms)
        values += [next(mask) * sum(map(mul, plane, powers)) % P for plane in dealt.polynomials]
    # A proof that is none may have a zero, which has no inverse; then nothing helps it.
    return inverse_integers(values) if all(values) else [pow(value, P - 2, P) for value in values]


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
    labels = compress(range(1, shape.buckets + 1), histogram)
    amounts = [(label, histogram[label - 1]) for label in labels]
    if len(amounts) > shape.spread or any(value < 0 for _, value in amounts):
        raise ProtocolError(f"a histogram has at most {shape.spread} buckets that are not zero, none of them negative")
    return amounts + [(0, 0)] * (shape.spread - len(amounts))


def _coins(shape: Shape) -> Sequence[Plane]:
    return shape.planes[:-1] if shape.kappa else shape.planes


def powers_of(point: int, count: int) -> list[int]:
    """1, r, r², …"""
    powers = [1]
    while len(powers) < count:
        powers.append(powers[-1] * point % P)
    return powers

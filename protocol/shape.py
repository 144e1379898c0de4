"""A report's shape: everything public that decides which numbers are shared, how many, and what is checked.

A cap is cut into coins (of value here, not random bits) that pay every histogram within it exactly. A histogram of
non-negative integers with sum at most `cap` is a way to distribute coins worth `cap` over buckets, the rest going to a
purse. Coins of one weight make a polynomial whose roots are the labels of the buckets they go to; a helper that checks
the polynomials has checked the histogram (SPEC.md §3.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from gmpy2 import invert

from protocol.errors import ErrorKind, OutOfRange, ProtocolError
from protocol.field import P
from protocol.units import MAX_SENSITIVITY

# A bucket's (label, value). Labels count from 1; label 0 is padding, and its value is 0.
BucketValue = tuple[int, int]
PURSE = 0

_KRONECKER_BYTES = 18
_DIRECT_DEGREE = 24


class Plane(NamedTuple):
    """All coins of one weight: `degree` of them, and so the degree of their polynomial."""

    weight: int
    degree: int


def denominations(cap: int, spread: int) -> tuple[Plane, ...]:
    """Return coins worth `cap` together that pay any `spread` amounts with sum at most `cap`; weights ascending.

    Weights are powers of a base, 4 for one amount and else 2, with spread·(base − 1) coins of each below the largest.
    Then `pay` never fails: if a coin of weight w fits nowhere, the amounts and the purse need at most
    (spread + 1)(w − 1) together, but the coins left are worth at least w + spread·(w − 1), which is more.
    """
    base = 4 if spread == 1 else 2
    each = spread * (base - 1)
    many, rest, weight = [], cap, 1
    while rest >= each * weight:
        many.append(each)
        rest -= each * weight
        weight *= base
    largest, rest = divmod(rest, weight)
    many.append(largest)
    # What is left is less than the next coin: its digits join the lower weights.
    for place in range(len(many) - 1):
        rest, digit = divmod(rest, base)
        many[place] += digit
    return tuple(Plane(base**place, count) for place, count in enumerate(many) if count)


def pay(amounts: Sequence[BucketValue], planes: Sequence[Plane]) -> list[list[int]]:
    """Return, for every plane, the label that each of its coins goes to, or `PURSE`.

    Run by a device. The steps do not depend on the amounts, so a null report takes as long as a full one. Heaviest
    coins first; those of one weight go to the first amounts that need at least as much.
    """
    labels = [label for label, _ in amounts]
    needs = [value for _, value in amounts]
    given: list[list[int]] = []
    for weight, degree in reversed(planes):
        left, plane = degree, []
        for place, label in enumerate(labels):
            taken = min(needs[place] // weight, left)
            needs[place] -= weight * taken
            left -= taken
            plane += [label] * taken
        given.append(plane + [PURSE] * left)
    if any(needs):
        raise OutOfRange("the coins do not pay this histogram", "It has more buckets or more value than agreed.")
    return given[::-1]


def polynomial(labels: Sequence[int]) -> list[int]:
    """Return Π (1 − X/a) over the labels, with factor 1 for the purse: one coefficient more than coins, the first 1."""
    if len(labels) > _DIRECT_DEGREE:
        half = len(labels) // 2
        return _product(polynomial(labels[:half]), polynomial(labels[half:]))
    product = [1] + [0] * len(labels)
    for degree, label in enumerate(labels, start=1):
        root = _inverse_label(label)
        for place in range(degree, 0, -1):
            product[place] = (product[place] - product[place - 1] * root) % P
    return product


def _product(left: Sequence[int], right: Sequence[int]) -> list[int]:
    """Multiply two polynomials by Kronecker substitution: as integers whose digits are the coefficients."""
    size = _KRONECKER_BYTES
    one, other = (
        int.from_bytes(b"".join(c.to_bytes(size, "little") for c in part), "little") for part in (left, right)
    )
    count = len(left) + len(right) - 1
    digits = (one * other).to_bytes(size * count, "little")
    return [int.from_bytes(digits[at:end], "little") % P for at, end in pairwise(range(0, size * (count + 1), size))]


def factor_powers(label: int, most: int) -> list[list[int]]:
    """Return (1 − X/a)^n for n = 0, 1, …, `most`: the polynomial of n coins in one bucket, the rest in the purse."""
    root, power = _inverse_label(label), [1] + [0] * most
    powers = [power]
    for _ in range(most):
        power = [1] + [(own - below * root) % P for own, below in zip(power[1:], power, strict=False)]
        powers.append(power)
    return powers


def _inverse_label(label: int) -> int:
    """Return 1/label, and 0 for the purse, whose factor is 1. Not cached: a hit would be faster, and reveal a label.

    In the same steps for the purse, of which a null report has more.
    """
    is_purse = label == PURSE
    return int(invert(label + is_purse, P)) * (1 - is_purse)


MAX_BUCKETS = 2**16
MAX_CAP = 2**40
MAX_SPREAD = 2**16 - 1
# Numbers in a body.
MAX_EXPLICIT = 2**17
# With more terms than this, forging a proof at two points would take fewer than 2^100 hashes: use three.
_TWO_POINTS = 2**11


@dataclass(frozen=True, slots=True)
class Shape:
    """`cap` bounds the histogram's sum, `spread` the non-zero buckets of an honest one; without a check both are 0.

    Both are constants of the query and never depend on a conversion: everyone can read them in the header.
    """

    buckets: int
    kappa: int = 0
    cap: int = 0
    spread: int = 0
    # One plane for each weight of coins; the side query's, if there is one, is the last.
    planes: tuple[Plane, ...] = field(init=False, repr=False, compare=False)
    points: int = field(init=False, repr=False, compare=False)
    # Numbers in the body.
    explicit: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_size(self.buckets, self.kappa)
        if self.cap or self.spread:
            _check_cap(self.buckets, self.cap, self.spread)
        coins = denominations(self.cap, self.spread) if self.cap else ()
        terms = self.buckets + sum(plane.degree for plane in coins)
        planes = coins + ((Plane(1, 1),) if self.kappa and self.cap else ())
        points = (2 if terms <= _TWO_POINTS else 3) if self.cap else 0
        explicit = self.length + points * sum(plane.degree for plane in planes)
        if explicit > MAX_EXPLICIT:
            raise ProtocolError(
                f"a report of this shape would hold {explicit} numbers; {MAX_EXPLICIT} is the most",
                "Ask for fewer buckets, a lower cap or a smaller spread.",
                kind=ErrorKind.TOO_LARGE,
            )
        for name, value in (("planes", planes), ("points", points), ("explicit", explicit)):
            object.__setattr__(self, name, value)

    @property
    def checked(self) -> bool:
        return self.cap > 0

    @property
    def length(self) -> int:
        """Return how many numbers the histogram has; a side query adds one, the last."""
        return self.buckets + (1 if self.kappa else 0)

    @property
    def openings(self) -> int:
        """Return how many openings the header has: one for each point and plane, as there are masks."""
        return self.points * len(self.planes)

    @property
    def expanded(self) -> int:
        """Return how many numbers each seed is expanded to. Masks come last, and take no bytes of the body."""
        return self.explicit + self.openings

    @property
    def residues(self) -> int:
        """Return how many numbers are zero in a valid report: at each point the sum, the side query, every opening."""
        return self.points * (1 + (1 if self.kappa else 0) + len(self.planes))


@lru_cache(maxsize=64)
def shape_of(buckets: int, kappa: int, cap: int, spread: int) -> Shape:
    """Return the shape, cached: counting its coins takes longer than the lookup."""
    return Shape(buckets, kappa, cap, spread)


def _check_size(buckets: int, kappa: int) -> None:
    if not (0 <= kappa <= MAX_SENSITIVITY):
        raise OutOfRange(f"κ must be 0 to 2^40, not {kappa}")
    if not (0 < buckets <= MAX_BUCKETS):
        raise OutOfRange(f"a histogram has 1 to {MAX_BUCKETS} buckets, not {buckets}")


def _check_cap(buckets: int, cap: int, spread: int) -> None:
    if not (0 < cap <= MAX_CAP):
        raise OutOfRange(f"a cap is 1 to 2^40, not {cap}")
    if not (0 < spread <= min(buckets, cap, MAX_SPREAD)):
        raise OutOfRange(f"a spread is 1 to the least of buckets, cap and {MAX_SPREAD}, not {spread}")

"""Coins: how a cap is cut so that every histogram within it can be paid exactly, and one polynomial for each weight.

A histogram of non-negative integers with sum at most `cap` is a way to give coins worth `cap` to buckets, with what is
left over kept in a purse. Coins of one weight make a polynomial whose roots are the labels of the buckets they go to;
a helper that checks the polynomials has checked the histogram (SPEC.md §3.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from gmpy2 import invert

from protocol.errors import ProtocolError
from protocol.field import P

# A bucket's amount: (label, value). Labels count from 1; label 0 is nobody's, and its value is 0.
Amount = tuple[int, int]
PURSE = 0

_KRONECKER_BYTES = 18
_DIRECT_DEGREE = 24


class Plane(NamedTuple):
    """All coins of one weight: `degree` of them, and so the degree of their polynomial."""

    weight: int
    degree: int


def denominations(cap: int, spread: int) -> tuple[Plane, ...]:
    """Coins worth `cap` together that pay any `spread` amounts with sum at most `cap`; weights ascending.

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


def pay(amounts: Sequence[Amount], planes: Sequence[Plane]) -> list[list[int]]:
    """For every plane the labels that its coins go to, the purse's among them.

    Run by a device. Each plane looks at every amount in the same few steps, whatever is in them; so a null report pays
    as a full one does. Coins of one weight go to the first amounts that need as much, heaviest coins first.
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
        raise ProtocolError("the coins do not pay this histogram", "It has more buckets or more value than agreed.")
    return given[::-1]


def polynomial(labels: Sequence[int]) -> list[int]:
    """Π (1 − X/a) over the labels, with 1 for the purse: as many coefficients as coins and one, the first of them 1."""
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
    """Two polynomials as two large integers: with room for every sum, the product's digits are its coefficients."""
    size = _KRONECKER_BYTES
    one, other = (
        int.from_bytes(b"".join(c.to_bytes(size, "little") for c in part), "little") for part in (left, right)
    )
    count = len(left) + len(right) - 1
    digits = (one * other).to_bytes(size * count, "little")
    return [int.from_bytes(digits[at:end], "little") % P for at, end in pairwise(range(0, size * (count + 1), size))]


def factor_powers(label: int, most: int) -> list[list[int]]:
    """(1 − X/a)^n for n = 0, 1, …, `most`: the polynomials of n coins in one bucket and the rest in the purse."""
    root, power = _inverse_label(label), [1] + [0] * most
    powers = [power]
    for _ in range(most):
        power = [1] + [(own - below * root) % P for own, below in zip(power[1:], power, strict=False)]
        powers.append(power)
    return powers


def _inverse_label(label: int) -> int:
    """1/label, and 0 for the purse, whose factor is 1. Not remembered: a label seen before would take less time."""
    return int(invert(label, P)) if label else 0

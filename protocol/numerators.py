"""Numerators: the form in which a checked histogram is shared, so that a helper can evaluate it at a point.

Bucket j has label a = j + 1, and what helpers check is F(X) = Σ h_j/(X − a). Summing fractions one by one takes several
61-bit products each. Instead, buckets stand in groups of 32, and a group is shared as the coefficients of

    N(X) = Σ h_j · D(X)/(X − a)      with D(X) = Π (X − a) over the group's labels

so that F(r) = Σ N(r)/D(r), and evaluating a report is one product of matrices. h ↦ N is linear and can be undone, so
sums of reports are sums of numerators, and h_j = N(a)/D′(a) is read off once, from the sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from protocol.field import P, Vector, add, from_integers, inverse, multiply, multiply_matrices, subtract
from protocol.shape import BucketValue

GROUP = 32
_NOTHING = [0] * GROUP


def groups(buckets: int) -> int:
    """Return the number of groups; the last may be smaller."""
    return -(-buckets // GROUP)


def in_groups(numbers: Vector) -> Vector:
    """Return the numbers as rows of 32, the last padded with zeros."""
    rows = np.zeros((groups(numbers.size), GROUP), dtype=np.uint64)
    rows.reshape(-1)[: numbers.size] = numbers
    return rows


def encode(amounts: Sequence[BucketValue], buckets: int) -> Vector:
    """Run by a device: return the numerators of the histogram with these amounts.

    Constant work: the group of every amount is written, even if two amounts share one.
    """
    basis = _basis(buckets)
    places = [max(label - 1, 0) for label, _ in amounts]
    sums: dict[int, list[int]] = {}
    for place, (_, value) in zip(places, amounts, strict=True):
        before = sums.get(place // GROUP, _NOTHING)
        sums[place // GROUP] = [
            own + value * coefficient for own, coefficient in zip(before, basis[place].tolist(), strict=True)
        ]
    rows = np.zeros((groups(buckets), GROUP), dtype=np.uint64)
    for place in places:
        rows[place // GROUP] = from_integers(sums[place // GROUP])
    return rows.reshape(-1)[:buckets]


def decode(numerators: Vector) -> Vector:
    """Return the histogram with these numerators: N(a)/D′(a) for every label, D′(a) being Π (a − b) over the others."""
    buckets = numerators.size
    labels = in_groups(np.arange(1, buckets + 1, dtype=np.uint64))
    table = np.ascontiguousarray(np.moveaxis(powers(labels, GROUP), 0, -1))
    values = multiply_matrices(table, in_groups(numerators)[..., None]).reshape(-1)[:buckets]
    return multiply(values, inverse(_slopes(buckets)))


def powers(points: Vector, count: int) -> Vector:
    """Return 1, r, r², … of every point r, `count` of them, along a new first axis."""
    table = np.ones((count, *points.shape), dtype=np.uint64)
    filled, leap = 1, points
    while filled < count:
        more = min(filled, count - filled)
        table[filled : filled + more] = multiply(table[:more], leap)
        filled += more
        leap = multiply(leap, leap)
    return table


@lru_cache(maxsize=16)
def denominators(buckets: int) -> Vector:
    """Return D of every group: rows of 33 coefficients, the constant first; those of a smaller group end in zeros."""
    labels = in_groups(np.arange(1, buckets + 1, dtype=np.uint64))
    product = np.zeros((len(labels), GROUP + 1), dtype=np.uint64)
    product[:, 0] = 1
    for column in labels.T:
        # A place without a bucket has label 0 here and no factor.
        longer = np.roll(product, 1, axis=1)
        longer = subtract(longer, multiply(product, column[:, None]))
        product = np.where(column[:, None] > 0, longer, product)
    product.setflags(write=False)
    return product


@lru_cache(maxsize=16)
def _basis(buckets: int) -> Vector:
    """Return D(X)/(X − a) for every label, as rows of 32 coefficients, by synthetic division."""
    whole = np.repeat(denominators(buckets), GROUP, axis=0)[:buckets]
    labels = np.arange(1, buckets + 1, dtype=np.uint64)
    quotient = np.zeros((buckets, GROUP), dtype=np.uint64)
    above = np.zeros(buckets, dtype=np.uint64)
    for power in range(GROUP, 0, -1):
        above = add(whole[:, power], multiply(above, labels))
        quotient[:, power - 1] = above
    quotient.setflags(write=False)
    return quotient


def _slopes(buckets: int) -> Vector:
    """Return D′(a) of every label: with v places before it and w after it in its group, (−1)^w · v! · w!."""
    last = buckets - 1
    factorials = [1]
    for number in range(1, GROUP):
        factorials.append(factorials[-1] * number % P)
    slopes = []
    for place in range(buckets):
        before = place % GROUP
        after = min(GROUP - 1 - before, last - place)
        slopes.append((-1) ** after * factorials[before] * factorials[after])
    return from_integers(slopes)

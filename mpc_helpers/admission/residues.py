"""Residues: what one helper computes of every checked report, alone, while it adds the reports up (SPEC.md §3.2).

A shared number x = x₁ + x₂ + x₃ has three *check shares*, one for each helper:

    n₁ = 2x₁ + x₂      n₂ = −(x₂ + 2x₃)      n₃ = x₁ − x₃

so that n₁ + n₂ = 2n₃ always, and x = 0 exactly if all three are equal. Residues are linear in what a report shares, and
all are zero in a good one: so three helpers that hash their check shares of them find the same hash.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from protocol import numerators
from protocol.field import (
    ELEMENT_SIZE,
    LIMBS,
    MAX_INNER,
    Limbs,
    P,
    Vector,
    add,
    inverse,
    join,
    multiply,
    multiply_constant,
    reduce,
    split,
    split_columns,
    split_rows,
    subtract,
    total,
)
from protocol.numerators import GROUP
from protocol.shape import Shape
from protocol.validity import LEAST_POINT, POINTS_LABEL, WORD_SHIFT, points_of

_P = np.uint64(P)
_ONE = np.uint64(1)
_FIRST_HASH = POINTS_LABEL + b"\0"
# How much is worked on at a time, so that it stays in the processor's cache.
_SPAN_WORDS = 2**17
_FEWEST_ROWS = 64


def check_words(party: int, first: Vector, second: Vector, bodies: Vector, shape: Shape) -> Vector:
    """Return check shares, not reduced and for helper 2 not negated, of everything that some reports share.

    `first` and `second` are what this helper's two seeds expand to, in the order of `SEEDS_OF`; the rows of `first` are
    overwritten. `bodies` are not used by helper 1, which has none.
    """
    body = slice(0, shape.explicit)
    match party:
        case 0:  # 2x₁ + x₂
            first <<= _ONE
            first += second
        case 1:  # x₂ + 2x₃, where x₃ = body − mask, and the mask alone where there is no body
            hidden = second[:, body]
            np.subtract(_P, hidden, out=hidden)
            hidden += bodies
            second <<= _ONE
            first += second
        case _:  # x₁ − x₃
            np.subtract(_P, first[:, shape.explicit :], out=first[:, shape.explicit :])
            hidden = first[:, body]
            hidden += _P
            hidden -= bodies
            first += second
    return first


def points_of_all(headers: Sequence[bytes], shape: Shape) -> Vector:
    """Return the points of many reports, a row each. The rare ones out of range are derived one by one."""
    end = len(headers[0]) - ELEMENT_SIZE * shape.openings
    hashed = b"".join([hashlib.sha256(_FIRST_HASH + header[:end]).digest() for header in headers])
    words = np.frombuffer(hashed, dtype="<u8").reshape(len(headers), -1) >> np.uint64(WORD_SHIFT)
    points: Vector = np.ascontiguousarray(words[:, : shape.points], dtype=np.uint64)
    unfit = ((points < np.uint64(LEAST_POINT)) | (points >= _P)).any(axis=1)
    for row in np.flatnonzero(unfit).tolist():
        points[row] = points_of(headers[row][:end], shape.points)
    return points


class ResidueCheck:
    """Computes check shares of the residues of some reports, from their headers and, span by span, their check words.

    The last axis of an array is over the reports wherever possible: numpy is fast along it, and all others are short.
    (c, n) is one number for each point and report.
    """

    def __init__(self, party: int, shape: Shape, headers: Sequence[bytes], openings: Vector) -> None:
        self._party = party
        self._shape = shape
        self._plan = _plan(shape)
        count, points, planes = len(headers), shape.points, len(shape.planes)
        self._openings = np.ascontiguousarray(openings.reshape(count, points, planes).transpose(1, 2, 0))
        self._points = np.ascontiguousarray(points_of_all(headers, shape).T)
        self._powers = numerators.powers(self._points, max(GROUP, self._plan.top) + 1)
        # N(r) and D(r) of every group.
        self._fractions = np.empty((2, numerators.groups(shape.buckets), points, count), dtype=np.uint64)
        # What follows the buckets, and a zero: where a plane has no more coefficients, others still have some.
        self._rest = np.zeros((count, shape.expanded - shape.buckets + 1), dtype=np.uint64)
        self._limbs: Limbs = np.zeros((0, LIMBS, numerators.groups(shape.buckets) * GROUP))

    def add(self, start: int, words: Vector) -> None:
        """Take the check words of the reports from `start` on. Fastest if they fit the processor's cache."""
        count, buckets = len(words), self._shape.buckets
        rows = slice(start, start + count)
        self._rest[rows, :-1] = words[:, buckets:]
        if len(self._limbs) < count:
            self._limbs = np.zeros((count, *self._limbs.shape[1:]))
        limbs = self._limbs[:count]
        split(words[:, :buckets], limbs[:, 0, :buckets], limbs[:, 1, :buckets], limbs[:, 2, :buckets])
        columns = split_columns(np.ascontiguousarray(self._powers[: GROUP + 1, :, rows].transpose(2, 0, 1)))
        over = np.matmul(limbs.reshape(count, -1, GROUP), columns[:, :GROUP])
        under = np.matmul(self._plan.denominators, columns)
        self._fractions[0, ..., rows] = _join(over)
        self._fractions[1, ..., rows] = _join(under)

    def normal_shares(self) -> Vector:
        """Return the check shares of every report, a row each: for each point its sum, side query and openings."""
        count, shape = self._points.shape[1], self._shape
        shares = np.empty((count, shape.residues), dtype=np.uint64)
        span = max(_FEWEST_ROWS, _SPAN_WORDS // self._plan.places.size)
        for start in range(0, count, span):
            rows = slice(start, start + span)
            residues = self._residues(rows)
            normal = reduce(_P - residues) if self._party == 1 else residues
            shares[rows] = normal.reshape(shape.residues, -1).T
        return shares

    def _residues(self, rows: slice) -> Vector:
        """Return (points, residues of a point, reports), for helper 2 not yet negated."""
        shape, openings = self._shape, self._openings[..., rows]
        values, slopes = self._evaluate_planes(rows)
        parts = multiply(multiply(slopes, openings), self._plan.weights)
        over, under = self._fractions[..., rows]
        residues = np.empty((shape.points, shape.residues // shape.points, parts.shape[-1]), dtype=np.uint64)
        if shape.kappa:
            residues[:, 1] = subtract(self._side_query(rows), parts[:, -1])
            parts = parts[:, :-1]
        residues[:, 0] = subtract(_sum(multiply(over, inverse(under)), 0), _sum(parts, 1))
        opened = multiply(values, openings)
        # A public 1 is a component x₂ = 1, which helper 3 does not have.
        residues[:, -len(shape.planes) :] = opened if self._party == 2 else subtract(opened, np.ones_like(opened))
        return residues

    def _evaluate_planes(self, rows: slice) -> tuple[Vector, Vector]:
        """Return P(r) and P′(r) of every plane at its point: (points, planes, reports) of each."""
        powers = self._powers[: self._plan.top + 1, :, rows]
        slopes = np.zeros_like(powers)
        slopes[1:] = multiply(powers[:-1], self._plan.exponents)
        columns = split_columns(np.ascontiguousarray(np.stack([powers, slopes]).transpose(2, 3, 1, 0)))
        planes = split_rows(self._rest[rows][:, self._plan.places])
        both = np.stack([_multiply(planes[:, point], columns[point]) for point in range(self._shape.points)])
        return both[:, :, 0], both[:, :, 1]

    def _side_query(self, rows: slice) -> Vector:
        """Return (h/κ)/(r − 1) at every point."""
        flags = multiply_constant(reduce(self._rest[rows, 0]), pow(self._shape.kappa, -1, P))
        return multiply(flags, inverse(self._points[:, rows] - _ONE))


def _multiply(rows: Limbs, columns: Limbs) -> Vector:
    """Multiply one pair of matrices per report, (reports, n, k) by (reports, k, m), into (n, m, reports)."""
    product = _join(np.matmul(rows[..., :MAX_INNER], columns[:, :MAX_INNER]))
    for start in range(MAX_INNER, rows.shape[-1], MAX_INNER):
        part = slice(start, start + MAX_INNER)
        product = add(product, _join(np.matmul(rows[..., part], columns[:, part])))
    return product


def _join(product: Limbs) -> Vector:
    """Combine products of limbs, one matrix per report, into field elements (n, m, reports)."""
    count, height, width = product.shape
    parts = product.reshape(count, LIMBS, height // LIMBS, LIMBS, width // LIMBS)
    return join(np.ascontiguousarray(parts.transpose(1, 3, 2, 4, 0)))


def _sum(elements: Vector, axis: int) -> Vector:
    return total(np.moveaxis(elements, axis, -1))


class _Plan(NamedTuple):
    """Constants of a shape. `places`: the offset of each plane's coefficients behind the buckets, its mask first."""

    top: int
    places: npt.NDArray[np.int64]
    exponents: Vector
    weights: Vector
    denominators: Limbs


@lru_cache(maxsize=8)
def _plan(shape: Shape) -> _Plan:
    top = max(plane.degree for plane in shape.planes)
    places = np.full((shape.points, len(shape.planes), top + 1), shape.expanded - shape.buckets, dtype=np.int64)
    at, mask_at = shape.length - shape.buckets, shape.explicit - shape.buckets
    for point in range(shape.points):
        for plane, (_, degree) in enumerate(shape.planes):
            places[point, plane, 0] = mask_at
            places[point, plane, 1 : degree + 1] = np.arange(at, at + degree)
            at, mask_at = at + degree, mask_at + 1
    return _Plan(
        top,
        places,
        np.arange(1, top + 1, dtype=np.uint64)[:, None, None],
        np.array([plane.weight for plane in shape.planes], dtype=np.uint64)[:, None],
        split_rows(numerators.denominators(shape.buckets)),
    )

"""Shapes: how many numbers, points and openings a report has, and which shapes there are not."""

from __future__ import annotations

import math

import pytest

from protocol.errors import ProtocolError
from protocol.shape import MAX_BUCKETS, MAX_CAP, Shape, shape_of


def test_an_unchecked_shape_holds_its_histogram_and_nothing_else() -> None:
    shape = Shape(16, kappa=3)
    assert (shape.length, shape.explicit, shape.expanded) == (17, 17, 17)
    assert (shape.points, shape.openings, shape.residues, shape.planes) == (0, 0, 0, ())
    assert not shape.checked


@pytest.mark.parametrize(
    ("shape", "planes", "coins"),
    [
        (Shape(128, 0, 1, 1), 1, 1),
        (Shape(128, 0, 100, 1), 3, 13),
        (Shape(128, 0, 100, 4), 5, 19),
        (Shape(128, 0, 100, 10), 4, 35),
        (Shape(128, 0, 2**20, 1), 10, 31),
        (Shape(128, 0, 2**20, 4), 18, 73),
        (Shape(128, 0, 2**20, 10), 17, 168),
        (Shape(128, 0, 2**40, 1), 20, 61),
        (Shape(128, 0, 2**40, 10), 37, 368),
    ],
)
def test_planes_and_coins_of_usual_shapes(shape: Shape, planes: int, coins: int) -> None:
    assert (len(shape.planes), sum(plane.degree for plane in shape.planes)) == (planes, coins)
    assert shape.points == 2
    assert shape.explicit == 128 + 2 * coins
    assert shape.openings == 2 * planes
    assert shape.residues == 2 * (1 + planes)


def test_a_side_query_has_a_number_a_plane_and_an_equation_more() -> None:
    without, shape = Shape(16, 0, 100, 1), Shape(16, 6, 100, 1)
    assert shape.planes == (*without.planes, (1, 1))
    assert shape.explicit == without.explicit + 1 + 2
    assert shape.residues == without.residues + 2 * 2


def test_forging_never_costs_less_than_two_to_the_hundred() -> None:
    assert Shape(2**11 - 1, 0, 1, 1).points == 2
    assert Shape(2**11, 0, 1, 1).points == 3
    for shape in (Shape(2**11 - 1, 0, 1, 1), Shape(1024, 0, 2**20, 10), Shape(MAX_BUCKETS, 0, 2**20, 100)):
        terms = shape.buckets + sum(plane.degree for plane in shape.planes)
        assert shape.points * (61 - math.log2(terms)) >= 100


@pytest.mark.parametrize(
    ("buckets", "kappa", "cap", "spread"),
    [
        (0, 0, 0, 0),
        (MAX_BUCKETS + 1, 0, 0, 0),
        (16, -1, 0, 0),
        (16, 2**40 + 1, 0, 0),
        (16, 0, 0, 1),
        (16, 0, 5, 0),
        (16, 0, MAX_CAP + 1, 1),
        (16, 0, 100, 17),
        (16, 0, 5, 6),
        (16, 0, -1, 1),
        (MAX_BUCKETS, 0, 2**40, 2000),
    ],
)
def test_impossible_shapes_are_refused(buckets: int, kappa: int, cap: int, spread: int) -> None:
    with pytest.raises(ProtocolError):
        shape_of(buckets, kappa, cap, spread)

"""Shapes, the coins that pay a cap and the numerators that share a histogram."""

from __future__ import annotations

import itertools
import math
import sys
from types import FrameType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import numerators
from protocol.errors import ErrorKind, ProtocolError
from protocol.field import P, Vector, add, from_integers, lift
from protocol.shape import (
    MAX_BUCKETS,
    MAX_CAP,
    PURSE,
    BucketValue,
    Shape,
    denominations,
    factor_powers,
    pay,
    polynomial,
    shape_of,
)
from tests.support.raising import raises


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


CAPS = [1, 2, 3, 5, 7, 8, 15, 16, 17, 63, 64, 100, 255, 256, 1000, 2**20 - 1, 2**20, 2**40]


def paid(amounts: list[BucketValue], cap: int, spread: int) -> dict[int, int]:
    planes = denominations(cap, spread)
    given = pay(amounts, planes)
    assert [len(labels) for labels in given] == [plane.degree for plane in planes]
    totals: dict[int, int] = {}
    for plane, labels in zip(planes, given, strict=True):
        for label in labels:
            totals[label] = totals.get(label, 0) + plane.weight
    return totals


@pytest.mark.parametrize(("cap", "spread"), [(cap, k) for cap in CAPS for k in (1, 2, 3, 5, 10) if k <= cap])
def test_coins_are_worth_the_cap_and_pay_whatever_is_within_it(cap: int, spread: int) -> None:
    assert sum(plane.weight * plane.degree for plane in denominations(cap, spread)) == cap
    if cap <= 17 and spread <= 3:
        cases = [list(case) for case in itertools.product(range(cap + 1), repeat=spread) if sum(case) <= cap]
    else:
        cuts = np.sort(np.random.default_rng(cap).integers(0, cap + 1, size=(40, spread)), axis=1)
        cases = np.diff(cuts, axis=1, prepend=0).tolist()
        cases += [[cap] + [0] * (spread - 1), [0] * spread, [cap // spread] * spread]
    for case in cases:
        totals = paid([(label, value) for label, value in enumerate(case, start=1)], cap, spread)
        assert [totals.get(label, 0) for label in range(1, spread + 1)] == case
        assert totals.get(PURSE, 0) == cap - sum(case)


def test_more_than_the_cap_is_not_paid() -> None:
    with raises(ErrorKind.OUT_OF_RANGE, ProtocolError):
        pay([(1, 101)], denominations(100, 1))
    with raises(ErrorKind.OUT_OF_RANGE, ProtocolError):
        pay([(1, 60), (2, 41)], denominations(100, 2))


def test_weights_ascend_and_none_is_empty() -> None:
    for cap, spread in itertools.product(CAPS, (1, 2, 7)):
        if spread <= cap:
            planes = denominations(cap, spread)
            assert all(plane.degree > 0 for plane in planes)
            assert [plane.weight for plane in planes] == sorted({plane.weight for plane in planes})


@given(st.lists(st.integers(0, 70_000), min_size=1, max_size=60))
def test_a_polynomial_is_the_product_of_its_factors(labels: list[int]) -> None:
    coefficients = polynomial(labels)
    assert len(coefficients) == len(labels) + 1 and coefficients[0] == 1
    for point in (2**17, 12_345_678_901, P - 1):
        expected = 1
        for label in labels:
            expected = expected * (1 - (point * pow(label, -1, P) if label else 0)) % P
        assert sum(c * pow(point, power, P) for power, c in enumerate(coefficients)) % P == expected


@pytest.mark.parametrize("label", [PURSE, 1, 2, 128, 65_536])
def test_the_powers_of_a_factor_are_polynomials_of_one_bucket(label: int) -> None:
    assert factor_powers(label, 5) == [polynomial([label] * coins + [PURSE] * (5 - coins)) for coins in range(6)]


def _steps(amounts: list[BucketValue]) -> int:
    """Lines of Python run in paying and multiplying out."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        if frame.f_code.co_name in ("pay", "polynomial"):
            count += event == "line"
            return trace
        return None

    sys.settrace(trace)
    try:
        for labels in pay(amounts, denominations(100, 4)):
            polynomial(labels)
    finally:
        sys.settrace(None)
    return count


def test_every_content_takes_the_same_steps() -> None:
    contents = [
        [(0, 0)] * 4,
        [(4, 1)] + [(0, 0)] * 3,
        [(4, 100)] + [(0, 0)] * 3,
        [(1, 1), (2, 2), (6, 30), (10, 4)],
        [(1, 25), (2, 25), (6, 25), (10, 25)],
    ]
    assert len({_steps(content) for content in contents}) == 1


SIZES = [1, 2, 31, 32, 33, 63, 64, 65, 128, 1000]


def histogram(amounts: list[BucketValue], buckets: int) -> list[int]:
    values = [0] * buckets
    for label, value in amounts:
        values[label - 1] += value
    return values


def some_amounts(buckets: int, seed: int) -> list[BucketValue]:
    draw = np.random.default_rng(seed)
    labels = draw.choice(buckets, size=min(buckets, 5), replace=False) + 1
    return [(int(label), int(draw.integers(0, 2**40))) for label in labels]


@pytest.mark.parametrize("buckets", SIZES)
def test_what_is_encoded_is_decoded(buckets: int) -> None:
    amounts = some_amounts(buckets, buckets)
    encoded = numerators.encode([*amounts, (0, 0)], buckets)
    assert encoded.size == buckets
    assert lift(numerators.decode(encoded)) == histogram(amounts, buckets)


@given(st.sampled_from([1, 33, 70]), st.data())
@settings(max_examples=20, deadline=None)
def test_every_vector_is_the_numerators_of_one_histogram(buckets: int, data: st.DataObject) -> None:
    """Whatever a device that lies shares, it is some histogram: the map has no kernel and misses nothing."""
    numbers = from_integers(data.draw(st.lists(st.integers(0, P - 1), min_size=buckets, max_size=buckets)))
    values = numerators.decode(numbers)
    back = numerators.encode([(place + 1, int(value)) for place, value in enumerate(values.tolist())], buckets)
    assert back.tolist() == numbers.tolist()


@pytest.mark.parametrize("buckets", SIZES)
def test_the_sum_of_numerators_is_the_sum_of_histograms(buckets: int) -> None:
    first, second = some_amounts(buckets, 1), some_amounts(buckets, 2)
    both = add(numerators.encode(first, buckets), numerators.encode(second, buckets))
    assert lift(numerators.decode(both)) == histogram(first + second, buckets)


def evaluate(coefficients: Vector, point: int) -> int:
    value = 0
    for coefficient in reversed(coefficients.tolist()):
        value = (value * point + int(coefficient)) % P
    return value


@pytest.mark.parametrize("buckets", SIZES)
def test_numerators_over_denominators_are_the_sum_of_fractions(buckets: int) -> None:
    amounts, point = some_amounts(buckets, 3), 2**40 + 12345
    rows = numerators.in_groups(numerators.encode(amounts, buckets))
    total = 0
    for over, under in zip(rows, numerators.denominators(buckets), strict=True):
        total += evaluate(over, point) * pow(evaluate(under, point), -1, P)
    assert total % P == sum(value * pow(point - label, -1, P) for label, value in amounts) % P


def test_powers_of_many_points() -> None:
    points = np.array([[2, 3], [P - 1, 2**60]], dtype=np.uint64)
    for count in (1, 2, 5, 33):
        table = numerators.powers(points, count)
        assert table.shape == (count, 2, 2)
        for row, point in zip(table.reshape(count, -1).T.tolist(), points.reshape(-1).tolist(), strict=True):
            assert row == [pow(point, power, P) for power in range(count)]

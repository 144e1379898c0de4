"""Numerators: evaluated they give the sum of fractions, added up they give the sum of histograms."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import numerators
from protocol.denominations import Amount
from protocol.field import P, Vector, add, from_integers, lift

SIZES = [1, 2, 31, 32, 33, 63, 64, 65, 128, 1000]


def histogram(amounts: list[Amount], buckets: int) -> list[int]:
    values = [0] * buckets
    for label, value in amounts:
        values[label - 1] += value
    return values


def some_amounts(buckets: int, seed: int) -> list[Amount]:
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

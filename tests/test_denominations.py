"""Coins add up to the cap, pay every histogram within it, and make polynomials whose roots are the buckets paid."""

from __future__ import annotations

import itertools
import sys
from types import FrameType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.denominations import PURSE, Amount, denominations, factor_powers, pay, polynomial
from protocol.errors import ProtocolError
from protocol.field import P

CAPS = [1, 2, 3, 5, 7, 8, 15, 16, 17, 63, 64, 100, 255, 256, 1000, 2**20 - 1, 2**20, 2**40]


def paid(amounts: list[Amount], cap: int, spread: int) -> dict[int, int]:
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
    with pytest.raises(ProtocolError, match="do not pay"):
        pay([(1, 101)], denominations(100, 1))
    with pytest.raises(ProtocolError, match="do not pay"):
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


def _steps(amounts: list[Amount]) -> int:
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

"""Micro-epsilons: rounded against the spender, compared without wrapping, and never fooled by a strange float."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import ErrorKind, ProtocolError
from protocol.units import (
    MAX_EPSILON,
    MAX_MICROS,
    MAX_SENSITIVITY,
    MOST_PARTS,
    affordable,
    charge,
    entitlement,
    need,
    noise_covers,
    show,
)
from tests.support.raising import raises

EPSILONS = st.integers(1, MAX_MICROS)
SENSITIVITIES = st.integers(1, MAX_SENSITIVITY)


@given(st.floats(min_value=1.0000001e-6, max_value=MAX_EPSILON))
def test_entitlement_rounds_down(epsilon: float) -> None:
    micros = entitlement(epsilon)
    assert micros <= Fraction(epsilon) * 10**6 < micros + 1


def test_entitlement_takes_the_float_for_what_it_is() -> None:
    """0.3 is a little less than three tenths, and 0.1 a little more than one."""
    assert entitlement(0.3) == 299_999
    assert entitlement(0.1) == 100_000
    assert entitlement(Fraction(3, 10)) == 300_000
    assert entitlement(1) == 1_000_000
    assert entitlement(MAX_EPSILON) == MAX_MICROS < 2**32


@pytest.mark.parametrize(
    "epsilon",
    [math.nan, math.inf, -math.inf, 0, 0.0, -0.0, -1, -1e-9, 5e-324, 2.2e-308, 9.99e-7, 4294.000001, 1e308, 2**70],
)
def test_entitlement_refuses(epsilon: float) -> None:
    with pytest.raises(ProtocolError):
        entitlement(epsilon)


@pytest.mark.parametrize("epsilon", [True, False])
def test_a_truth_value_is_no_epsilon(epsilon: bool) -> None:
    with pytest.raises(ProtocolError):
        entitlement(epsilon)


@given(EPSILONS, st.integers(0, 2 * MAX_SENSITIVITY), SENSITIVITIES)
def test_charge_rounds_up(epsilon: int, individual: int, query: int) -> None:
    exact = Fraction(epsilon * individual, query)
    paid = charge(epsilon, individual, query)
    assert exact <= paid < exact + 1


def test_charge_of_nothing_is_nothing_and_of_anything_something() -> None:
    assert charge(1, 0, MAX_SENSITIVITY) == 0
    assert charge(1, 1, MAX_SENSITIVITY) == 1
    assert charge(1_000_000, 100, 100) == 1_000_000
    assert charge(1_000_000, 110, 100) == 1_100_000


@given(EPSILONS, SENSITIVITIES, st.lists(st.integers(0, 1000), max_size=5))
def test_paying_in_parts_is_never_cheaper(epsilon: int, query: int, parts: list[int]) -> None:
    assert sum(charge(epsilon, part, query) for part in parts) >= charge(epsilon, sum(parts), query)


@pytest.mark.parametrize(
    ("epsilon", "individual", "query"),
    [
        (0, 1, 1),
        (-1, 1, 1),
        (MAX_MICROS + 1, 1, 1),
        (1, -1, 1),
        (1, 2 * MAX_SENSITIVITY + 1, 1),
        (1, 1, 0),
        (1, 1, -5),
        (1, 1, MAX_SENSITIVITY + 1),
    ],
)
def test_charge_refuses(epsilon: int, individual: int, query: int) -> None:
    with pytest.raises(ProtocolError):
        charge(epsilon, individual, query)


@given(EPSILONS, SENSITIVITIES, EPSILONS, SENSITIVITIES)
def test_noise_covers_is_the_exact_comparison(e_r: int, d_r: int, e_q: int, d_q: int) -> None:
    assert noise_covers(e_r, d_r, e_q, d_q) == (Fraction(e_q, d_q) <= Fraction(e_r, d_r))


@given(EPSILONS, SENSITIVITIES)
def test_noise_covers_at_equality_and_just_beside(epsilon: int, sensitivity: int) -> None:
    assert noise_covers(epsilon, sensitivity, epsilon, sensitivity)
    if epsilon < MAX_MICROS:
        assert not noise_covers(epsilon, sensitivity, epsilon + 1, sensitivity)
        assert noise_covers(epsilon + 1, sensitivity, epsilon, sensitivity)
    if sensitivity < MAX_SENSITIVITY:
        assert not noise_covers(epsilon, sensitivity + 1, epsilon, sensitivity)


def test_noise_covers_where_64_bit_products_wrap() -> None:
    """ε_q·Δ_r = 2^71 wraps to 0 in a word, and 0 ≤ anything: a cheater would get in."""
    e_q, d_r, e_r, d_q = 2**31, 2**40, 1, 1
    with np.errstate(over="ignore"):
        wrapped = np.array([e_q], dtype=np.uint64) * np.array([d_r], dtype=np.uint64)
    assert int(wrapped[0]) == 0 <= e_r * d_q
    assert not noise_covers(e_r, d_r, e_q, d_q)


@pytest.mark.parametrize("rule", [noise_covers, need])
@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("wrong", [0, -1, 2**63])
def test_terms_out_of_range_are_refused(rule: Callable[..., object], place: int, wrong: int) -> None:
    terms = [1, 1, 1, 1]
    terms[place] = wrong
    with raises(ErrorKind.OUT_OF_RANGE, ProtocolError):
        rule(*terms)


@given(EPSILONS, SENSITIVITIES, EPSILONS, SENSITIVITIES)
def test_need_rounds_up_and_has_a_least_part(e_r: int, d_r: int, e_q: int, d_q: int) -> None:
    cost = need(e_r, d_r, e_q, d_q)
    share, least = Fraction(e_q * d_r, d_q), Fraction(e_r, 64)
    assert cost >= share and cost >= least
    assert cost - 1 < max(share, least)
    # One answer: exactly those that `noise_covers` admits can be paid for.
    assert (cost <= e_r) == noise_covers(e_r, d_r, e_q, d_q)


@given(EPSILONS, SENSITIVITIES, st.lists(st.tuples(EPSILONS, SENSITIVITIES), max_size=80))
def test_answers_within_what_was_paid_add_up_to_at_most_its_rate(
    e_r: int, d_r: int, asked: list[tuple[int, int]]
) -> None:
    """What the Lemma of DESIGN.md needs: Σ ε_q/Δ_q ≤ ε_r/Δ_r over any answers that Σ need ≤ ε_r lets through."""
    left, rate, answers = e_r, Fraction(0), 0
    for e_q, d_q in asked:
        if (cost := need(e_r, d_r, e_q, d_q)) <= left:
            left, rate, answers = left - cost, rate + Fraction(e_q, d_q), answers + 1
    assert rate <= Fraction(e_r, d_r)
    assert answers <= MOST_PARTS


@given(EPSILONS, SENSITIVITIES, SENSITIVITIES, st.integers(0, MAX_MICROS))
def test_affordable_is_the_largest_that_is_left(e_r: int, d_r: int, d_q: int, left: int) -> None:
    most = affordable(e_r, d_r, left, d_q)
    if most:
        assert need(e_r, d_r, most, d_q) <= left
    if most < MAX_MICROS:
        assert need(e_r, d_r, most + 1, d_q) > left


def test_what_is_below_the_least_part_affords_nothing() -> None:
    """A hint that named it would be refused again."""
    assert affordable(1_000_000, 10, 15_624, 10) == 0
    assert affordable(1_000_000, 10, 15_625, 10) == 15_625


@given(st.integers(-(10**12), 10**12))
def test_show_is_exact(micros: int) -> None:
    assert Fraction(show(micros)) == Fraction(micros, 10**6)


def test_show_leaves_out_trailing_zeros() -> None:
    assert [show(value) for value in (1_000_000, 1_500_000, 1, -250_000, 0)] == ["1", "1.5", "0.000001", "-0.25", "0"]

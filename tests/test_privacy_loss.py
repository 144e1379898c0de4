"""Individual privacy loss: Theorem 4 by its cases, Theorem 18's factor, κ everywhere, and charges that round up."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from device.conversion import check_epsilon, floor_micros
from device.errors import RangeError
from device.privacy_loss import EpochLoss, LossTerms, epoch_loss, report_sensitivity
from protocol.epsilon import MAX_EPSILON

epsilons = st.floats(min_value=1e-6, max_value=MAX_EPSILON)


def terms(epsilon: float, query_sensitivity: int, kappa: int = 0) -> LossTerms:
    return LossTerms(epsilon, floor_micros(epsilon), query_sensitivity, kappa)


@pytest.mark.parametrize(("buckets", "epochs", "sensitivity"), [(1, 1, 70), (1, 4, 70), (2, 1, 70), (2, 4, 140)])
def test_theorem_18(buckets: int, epochs: int, sensitivity: int) -> None:
    assert report_sensitivity(70, buckets, epochs) == sensitivity


def test_case_1_no_relevant_events_no_loss() -> None:
    for output in (None, 0):
        loss = epoch_loss(terms(1, 200), relevant=False, sensitivity=140, output=output)
        assert loss == EpochLoss(0, 0, 0)


def test_without_a_side_query_there_is_no_kappa() -> None:
    assert LossTerms(1.0, 1_000_000, 200).kappa == 0


def test_case_2_the_site_pays_for_the_actual_report() -> None:
    loss = epoch_loss(terms(1, 16), relevant=True, sensitivity=8, output=4)
    assert loss == EpochLoss(site=250_000, everyone=500_000, quota=500_000)
    assert epoch_loss(terms(1, 16), relevant=True, sensitivity=8, output=0).site == 0


def test_case_3_everyone_pays_the_reports_sensitivity() -> None:
    assert epoch_loss(terms(1, 200), relevant=True, sensitivity=140, output=None) == EpochLoss(
        700_000, 700_000, 700_000
    )


def test_a_side_query_is_paid_with_data_or_without() -> None:
    with_data = epoch_loss(terms(1, 200, kappa=20), relevant=True, sensitivity=140, output=None)
    without = epoch_loss(terms(1, 200, kappa=20), relevant=False, sensitivity=140, output=None)
    assert with_data == EpochLoss(800_000, 800_000, 700_000)
    assert without == EpochLoss(100_000, 100_000, 0)


def test_a_side_query_may_cost_more_than_epsilon() -> None:
    assert epoch_loss(terms(1, 200, kappa=100), relevant=True, sensitivity=200, output=None).site == 1_500_000


@given(epsilons, st.integers(1, 2**33), st.integers(0, 2**34), st.integers(0, 2**20))
def test_a_charge_is_never_below_the_exact_one(epsilon: float, delta: int, sensitivity: int, kappa: int) -> None:
    """Exact for the ε that the header carries; at most one micro and a relative 2^-50 above it for the ε requested."""
    spent = terms(epsilon, delta, kappa).loss(sensitivity)
    assert spent >= Fraction(floor_micros(epsilon) * sensitivity, delta)
    assert spent <= math.ceil(Fraction(epsilon) * 10**6 * sensitivity / delta * (1 + Fraction(1, 2**50)))


@given(epsilons, st.integers(1, 2**32), st.data())
def test_without_a_side_query_no_charge_exceeds_epsilon(epsilon: float, max_value: int, data: st.DataObject) -> None:
    value = data.draw(st.integers(1, max_value))
    charged = terms(epsilon, 2 * max_value).loss(2 * value)
    assert charged <= math.ceil(epsilon * 10**6 * (1 + 2**-50))


def test_the_standards_arithmetic_in_its_own_order() -> None:
    """Another order of the same operations in doubles would charge otherwise."""
    assert terms(1, 6).loss(2) == 333_334
    epsilon = 0.7
    assert terms(epsilon, 20).loss(2) == math.ceil(2 / (20 / epsilon) * 1_000_000)


def test_a_float_may_not_lower_a_charge() -> None:
    """ε·Δ_x/Δ is 251722305 micros and two parts in 7485801982; doubles lose the rest, and charge one too little."""
    epsilon, sensitivity, delta = 3260.967032, 577_848_016, 7_485_801_982
    assert math.ceil(sensitivity / (delta / epsilon) * 1_000_000) == 251_722_305
    assert terms(epsilon, delta).loss(sensitivity) == 251_722_306


def test_a_float_may_raise_a_charge() -> None:
    """2/(2/0.29) is a little above 0.29 in doubles, and the ceiling takes it to the next micro."""
    raised = [k for k in range(1, 1000) if terms(k / 1000, 2).loss(2) > k * 1000]
    assert raised
    assert all(terms(k / 1000, 2).loss(2) == k * 1000 + 1 for k in raised)


@pytest.mark.parametrize("epsilon", [0, -1, math.nan, math.inf, -math.inf, 4294.0000001, 1e308])
def test_epsilon_out_of_range(epsilon: float) -> None:
    with pytest.raises(RangeError):
        check_epsilon(epsilon)


def test_the_header_rounds_epsilon_down() -> None:
    assert floor_micros(0.3) == 299_999
    assert floor_micros(0.5) == 500_000
    assert floor_micros(4294) == 4_294_000_000
    assert floor_micros(1e-9) == 0
    assert terms(1e-9, 2).loss(2) == 1

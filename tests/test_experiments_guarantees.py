"""What the README promises about sites, to the last micro-epsilon: each bound holds, and an attack reaches it."""

from __future__ import annotations

import math
from fractions import Fraction
from functools import partial

import pytest

from benchmarks.experiments import guarantees
from benchmarks.experiments.guarantees import Guarantee, measure_guarantees
from benchmarks.experiments.small_worlds import SmallWorld
from device.limits import OwnSite
from device.privacy_loss import EpochLoss, LossTerms, epoch_loss
from protocol.epsilon import MICROS
from tests.test_device_privacy import KeepsDroppedEpochs


def test_every_bound_holds_and_is_reached_exactly() -> None:
    """In ε, for a budget of 1 per site: 1; 2 with own ads that cost, or the flag; 2 per colluder; 3 for linking."""
    promised = [one for one in measure_guarantees() if one.source != "none (Big Bird)"]
    assert [one.reached / MICROS for one in promised] == [1, 2, 1, 2, 2, 4, Fraction(3, 2), 3, 3]
    assert [one.bound for one in promised] == [one.reached for one in promised]


def test_a_site_learns_of_a_week_it_never_paid_for_when_others_drain_a_limit() -> None:
    """A guarantee for each site alone would allow nothing; the chain's own ε of 1 is what bounds it."""
    found = [one for one in measure_guarantees() if one.source == "none (Big Bird)"]
    assert [one.bound for one in found] == [0, 0, 0]
    assert not any(one.holds for one in found)
    reached = [float(one.reached) / MICROS for one in found]
    assert reached == sorted(reached) and 0.99 < reached[-1] < 1


@pytest.mark.parametrize("crowd", guarantees.CROWDS)
def test_what_a_drained_limit_tells_is_the_largest_ratio_of_all_answers(crowd: int) -> None:
    """By brute force over the answers: a mixture of two discrete Laplace distributions under each database."""

    def noise(x: int) -> float:
        return (1 - math.exp(-1)) / (1 + math.exp(-1)) * math.exp(-abs(x))

    def likelihood(answer: int, drained: float) -> float:
        return drained * noise(answer) + (1 - drained) * noise(answer - crowd)

    with_ad = sum(noise(x) for x in range(60))
    ratios = [math.log(likelihood(o, with_ad) / likelihood(o, 1 - with_ad)) for o in range(-40, 60)]
    assert max(ratios) == pytest.approx(float(guarantees.drained_limit(crowd).reached) / MICROS, rel=1e-9)


def test_the_games_see_an_engine_that_uses_what_was_not_paid_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The net itself: every game that rests on dropping an epoch finds more than its bound."""
    monkeypatch.setattr(guarantees, "SmallWorld", partial(SmallWorld, make=KeepsDroppedEpochs))
    broken: list[Guarantee] = [
        guarantees.one_site(),
        guarantees.two_devices(),
        *map(guarantees.own_impressions, OwnSite),
    ]
    assert not any(one.holds for one in broken)


def test_the_games_see_an_engine_that_charges_half(monkeypatch: pytest.MonkeyPatch) -> None:
    def half(terms: LossTerms, *, relevant: bool, sensitivity: int, output: int | None) -> EpochLoss:
        loss = epoch_loss(terms, relevant=relevant, sensitivity=sensitivity, output=output)
        return EpochLoss(loss.site // 2, loss.everyone // 2, loss.quota // 2)

    monkeypatch.setattr("device.device.epoch_loss", half)
    assert not any(one.holds for one in measure_guarantees() if one.source != "none (Big Bird)")

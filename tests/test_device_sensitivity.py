"""Theorem 4 by brute force: no epoch ever pays less than its events can move the report.

Every set of impressions over two epochs, two buckets and one outside the histogram, at two times each, is tried
against every other; nothing is sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

import pytest

from device.attribution import AttributionFunction, Award, EqualCredit, FirstTouch, LastNSlots, LastNTouch, LastTouch
from device.checked_request import CheckedRequest
from device.conversion import AttributionRequest
from device.device import Device
from device.limits import DeviceLimits
from device.privacy_filter import FilterKind
from device.privacy_loss import EpochLoss, LossTerms, epoch_loss
from device.settlement import Found, Settled
from tests.support.small_worlds import (
    Event,
    Events,
    Options,
    PlainDevice,
    SmallWorld,
    fixed_coins,
    l1,
    noise_rate,
    paid_by,
    query,
    subsets,
    w3c,
)

# So much that everything is paid for: this is about what is charged.
LIMITS = DeviceLimits(site_budget=2**50, global_budget=2**50, impression_site_quota=2**50)
# Bucket 2 lies outside a histogram of two; the later impression of each epoch has the higher priority.
POSSIBLE = [Event(0, bucket, day, priority=day) for bucket in (0, 1, 2) for day in (2, 4)]
SETS = list(subsets(POSSIBLE))
VALUE = 3
FUNCTIONS: list[AttributionFunction] = [
    LastTouch(),
    FirstTouch(),
    EqualCredit(),
    LastNTouch(),
    LastNTouch((1.0, 2.0)),
    LastNSlots(),
]


class Outcome(NamedTuple):
    """A report, and what epochs 0 and 1 paid to the querier's filter and to the global one."""

    report: tuple[int, ...]
    site: tuple[int, int]
    everyone: tuple[int, int]


Outcomes = Mapping[tuple[Events, Events], Outcome]


def all_outcomes(
    options: Options, sets: list[Events] = SETS, make: Callable[..., PlainDevice] = Device, coin: float = 0.5
) -> Outcomes:
    """Every world's report and charges, by what is in its two epochs."""
    outcomes = {}
    for first in sets:
        for second in sets:
            later = tuple(event._replace(epoch=1) for event in second)
            world = SmallWorld(first + later, LIMITS, make)
            world.device._coins = fixed_coins(coin)
            report = world.ask(query(options))
            site = (paid_by(world.store, 0), paid_by(world.store, 1))
            everyone = (paid_by(world.store, 0, FilterKind.GLOBAL, ""), paid_by(world.store, 1, FilterKind.GLOBAL, ""))
            outcomes[first, second] = Outcome(report, site, everyone)
    return outcomes


def shortfall(options: Options, outcomes: Outcomes) -> int:
    """How far the worst charge is below γ·Δ_x, in units of micro-epsilons; zero or less is what Theorem 4 wants.

    Δ_x is the largest L1 change from removing the epoch's events, over everything that may be in the other epoch.
    """
    rate = noise_rate(options)
    sets = {first for first, _ in outcomes}
    worst = -(10**18)
    for events in sets:
        for epoch in (0, 1):
            pairs = [((events, other), ((), other)) if epoch == 0 else ((other, events), (other, ())) for other in sets]
            moved = max(l1(outcomes[having].report, outcomes[lacking].report) for having, lacking in pairs)
            for having, _ in pairs:
                charged = min(outcomes[having].site[epoch], outcomes[having].everyone[epoch])
                worst = max(worst, -(-(rate * moved - charged) // 1))
    return worst


def requests() -> list[Options]:
    """Each built-in function over one and two epochs, one and two buckets, and the standard's own call."""
    asked: list[Options] = [
        AttributionRequest(
            epochs=epochs, epsilon=0.3, buckets=buckets, value=VALUE, query_sensitivity=7, function=function
        )
        for function in FUNCTIONS
        for epochs in ((0,), (0, 1))
        for buckets in (1, 2)
    ]
    standard = [w3c(buckets, lookback_days=days, value=VALUE, max_value=4) for buckets in (1, 2) for days in (6, 13)]
    return asked + standard + [replace(one, credit=(2.0, 1.0)) for one in standard]


def named(options: Options) -> str:
    if isinstance(options, AttributionRequest):
        return f"{type(options.function).__name__}-{len(options.epochs)}-epochs-{options.buckets}-buckets"
    return f"standard-{options.lookback_days}-days-{options.histogram_size}-buckets-{len(options.credit)}"


# One time per epoch is enough for functions over time alone: two impressions of one epoch never swap places.
FEW = list(subsets([Event(0, bucket, day, priority=day) for bucket in (0, 1) for day in (2, 4)]))


@pytest.mark.parametrize("options", requests(), ids=named)
def test_no_epoch_pays_less_than_it_can_change(options: Options) -> None:
    """Theorem 4, all cases: the charge covers ε_r/Δ_r times the individual sensitivity, in every world."""
    outcomes = all_outcomes(options, FEW)
    assert shortfall(options, outcomes) <= 0


@pytest.mark.parametrize("coin", [0.0, 0.25, 0.75, 0.999])
def test_odd_units_are_charged_however_the_coins_fall(coin: float) -> None:
    """Sensitivity is for fixed coins, so every fixing of them must be covered."""
    options = replace(w3c(2, lookback_days=6, value=VALUE, max_value=4), credit=(2.0, 1.0))
    assert shortfall(options, all_outcomes(options, FEW, coin=coin)) <= 0


@pytest.mark.parametrize("days", [6, 13])
def test_credit_that_falls_outside_the_histogram_is_covered_too(days: int) -> None:
    """With a bucket that is lost: an impression that gets nothing itself can still take credit from another."""
    options = replace(w3c(2, lookback_days=days, value=VALUE, max_value=4), credit=(2.0, 1.0))
    few = list(subsets([event for event in POSSIBLE if event.day == 2]))
    assert shortfall(options, all_outcomes(options, few)) <= 0


def test_every_set_over_two_epochs_and_three_buckets_is_covered() -> None:
    """The full enumeration, 4,096 worlds, for the paper's and the standard's last touch."""
    options = w3c(2, value=VALUE, max_value=4)
    assert len(SETS) == 64
    assert shortfall(options, all_outcomes(options)) <= 0


def test_the_bound_is_tight() -> None:
    """Some world needs every bit of its charge: a check that nothing could fail would prove nothing."""
    multi = AttributionRequest(
        epochs=(0, 1), epsilon=0.7, buckets=2, value=VALUE, query_sensitivity=7, function=LastTouch()
    )
    single = replace(multi, epochs=(0,))
    assert shortfall(multi, all_outcomes(multi, FEW)) == 0
    assert shortfall(single, all_outcomes(single, FEW)) == 0


def test_an_epoch_without_impressions_pays_nothing() -> None:
    """Theorem 4, case 1, in every world."""
    for options in (w3c(2), w3c(2, lookback_days=6)):
        for (first, second), outcome in all_outcomes(options, FEW).items():
            for epoch, events in enumerate((first, second)):
                if not events:
                    assert outcome.site[epoch] == outcome.everyone[epoch] == 0


def test_theorem_18_forgotten_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that charges the value where twice the value can move."""

    def half(terms: LossTerms, *, relevant: bool, sensitivity: int, output: int | None) -> EpochLoss:
        return epoch_loss(terms, relevant=relevant, sensitivity=sensitivity // 2, output=output)

    monkeypatch.setattr("device.device.epoch_loss", half)
    options = w3c(2, value=VALUE, max_value=4)
    assert shortfall(options, all_outcomes(options, FEW)) > 0


class CaseByData(Device[tuple[int, ...]]):
    """Broken: takes case 2 whenever the data happens to lie in one epoch."""

    def _charge(self, conversion: CheckedRequest, found: Found, award: Award) -> Settled:
        if len(found.sites) == 1:
            found = replace(found, reach=found.reach._replace(window=tuple(found.sites)))
        return super()._charge(conversion, found, award)


def test_case_2_decided_by_the_data_is_caught() -> None:
    """Credit lost outside the histogram costs such an engine nothing, yet takes all credit from the other epoch."""
    options = w3c(2, value=VALUE, max_value=4)
    few = list(subsets([Event(0, 0), Event(0, 2)]))
    assert shortfall(options, all_outcomes(options, few)) <= 0
    assert shortfall(options, all_outcomes(options, few, CaseByData)) > 0


def test_a_charge_rounded_down_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three sevenths of 0.5 is no whole number of micro-epsilons, and the querier must not get the rest."""

    def floor(terms: LossTerms, individual_sensitivity: int) -> int:
        return terms.epsilon_micros * individual_sensitivity // terms.query_sensitivity

    monkeypatch.setattr(LossTerms, "loss", floor)
    options = AttributionRequest(epochs=(0,), epsilon=0.5, buckets=2, value=VALUE, query_sensitivity=7)
    assert shortfall(options, all_outcomes(options, FEW)) > 0

"""What sites can learn: every bound holds and is reached exactly, and what each limit takes from colluders."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.experiments import attack
from benchmarks.experiments.attack import Attack, Defence, Guarantee, measure, measure_guarantees
from benchmarks.experiments.malicious_helper import measure_malicious_helper
from benchmarks.experiments.small_worlds import SmallWorld
from device.budget import EpochLoss, LossTerms, epoch_loss
from device.limits import OwnSite
from protocol.cli.app import app
from protocol.units import MICROS
from tests.device.test_device_privacy import KeepsDroppedEpochs


def _attacks(defence: Defence) -> dict[int, Attack]:
    return {attack.sites: attack for attack in measure([defence], [1, 2, 8, 32])}


def test_without_shared_limits_every_site_adds_its_own_budget() -> None:
    attacks = _attacks(Defence.SITE_FILTERS)
    assert [attacks[sites].learned for sites in (1, 2, 8, 32)] == [1 * MICROS, 2 * MICROS, 8 * MICROS, 32 * MICROS]
    assert all(attack.honest_report == 1 for attack in attacks.values())


def test_the_global_filter_bounds_learning_but_can_be_drained() -> None:
    """The limit that protects the person is the one that colluders can exhaust for everyone else."""
    attacks = _attacks(Defence.GLOBAL_FILTER)
    assert attacks[32].learned == 8 * MICROS
    assert attacks[2].honest_report == 1
    assert attacks[8].honest_report == attacks[32].honest_report == 0


def test_publisher_quotas_bound_what_one_publisher_gives_away() -> None:
    attacks = _attacks(Defence.PUBLISHER_QUOTA)
    assert attacks[32].learned == 4 * MICROS
    assert attacks[32].honest_report == 0


def test_bounding_sites_per_action_keeps_the_honest_shop_measured() -> None:
    attacks = _attacks(Defence.ACTION_QUOTA)
    assert attacks[32].learned == 2 * MICROS
    assert all(attack.honest_report == 1 for attack in attacks.values())


def test_one_malicious_helper_learns_nothing_and_is_caught_or_only_shifts() -> None:
    """Its view says nothing; two honest helpers leave all the noise that privacy needs; a wrong share is refused.

    4000 draws: Kolmogorov's bound puts the gap of equal distributions above 0.062 with probability below 10^-6. The
    mean square of 4000 discrete Laplace draws has a relative standard error of 0.035: 0.25 away is seven of them.
    """
    view, local, pairwise, changed, private, shifted = measure_malicious_helper(4000)
    assert view.measured < 0.062
    assert abs(local.measured - 1) < 0.25
    assert abs(pairwise.measured - 1) < 0.25
    assert changed.measured == private.measured == 1.0
    # The price of `local`, as DESIGN.md, "Noise", says: privacy holds, the answer can be shifted.
    assert shifted.measured == 0.0


def test_the_command_writes_what_it_measured(tmp_path: Path) -> None:
    path = tmp_path / "attack.json"
    CliRunner().invoke(app, ["experiment", "attack", "--json", str(path)], catch_exceptions=False)
    written = json.loads(path.read_text())
    assert len(written["attacks"]) == 24
    assert len(written["guarantees"]) == 24
    assert 0.5 < written["attacks"][0]["best_guess"] < 0.75


def test_every_bound_holds_and_is_reached_exactly() -> None:
    """In ε, for a budget of 1 per site: 1; 2 with own ads that count, or the flag; 2 per colluder."""
    promised = [one for one in measure_guarantees() if one.source != "none (Big Bird)"]
    learnt, linked = promised[:11], promised[11:]
    assert [one.reached / MICROS for one in learnt] == [1, 2, 2, 1, 1, 1, 2, 2, 4, Fraction(3, 2), 3]
    # By others' ads, those on its own pages, those of its frames: the paper's request, COUNTED, HIDDEN; with the flag.
    assert [one.reached / MICROS for one in linked] == [3, 0, 0, 3, 3, 3, 3, 0, 0, 3]
    assert [one.bound for one in promised] == [one.reached for one in promised]


def test_a_site_learns_of_a_week_it_never_paid_for_when_others_drain_a_limit() -> None:
    """A guarantee for each site alone would allow nothing; the chain's own ε of 1 is what bounds it."""
    found = [one for one in measure_guarantees() if one.source == "none (Big Bird)"]
    assert [one.bound for one in found] == [0, 0, 0]
    assert not any(one.holds for one in found)
    reached = [float(one.reached) / MICROS for one in found]
    assert reached == sorted(reached) and 0.99 < reached[-1] < 1


@pytest.mark.parametrize("crowd", attack.CROWDS)
def test_what_a_drained_limit_tells_is_the_largest_ratio_of_all_answers(crowd: int) -> None:
    """By brute force over the answers: a mixture of two discrete Laplace distributions under each database."""

    def noise(x: int) -> float:
        return (1 - math.exp(-1)) / (1 + math.exp(-1)) * math.exp(-abs(x))

    def likelihood(answer: int, drained: float) -> float:
        return drained * noise(answer) + (1 - drained) * noise(answer - crowd)

    with_ad = sum(noise(x) for x in range(60))
    ratios = [math.log(likelihood(o, with_ad) / likelihood(o, 1 - with_ad)) for o in range(-40, 60)]
    assert max(ratios) == pytest.approx(float(attack.drained_limit(crowd).reached) / MICROS, rel=1e-9)


def test_the_games_see_an_engine_that_uses_what_was_not_paid_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The net itself: every game that rests on dropping an epoch finds more than its bound."""
    monkeypatch.setattr(attack, "SmallWorld", partial(SmallWorld, make=KeepsDroppedEpochs))
    broken: list[Guarantee] = [
        attack.one_site(),
        *(attack.two_devices(rule, attack.Ads.OF_OTHERS) for rule in (None, *OwnSite)),
        *map(attack.own_impressions, OwnSite),
    ]
    assert not any(one.holds for one in broken)


def test_the_games_see_an_engine_that_charges_half(monkeypatch: pytest.MonkeyPatch) -> None:
    def half(terms: LossTerms, *, relevant: bool, sensitivity: int, output: int | None) -> EpochLoss:
        loss = epoch_loss(terms, relevant=relevant, sensitivity=sensitivity, output=output)
        return EpochLoss(loss.site // 2, loss.everyone // 2)

    monkeypatch.setattr("device.device.epoch_loss", half)
    assert not any(one.holds for one in measure_guarantees() if one.bound)

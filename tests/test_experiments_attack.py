"""Colluding sites against a device's limits: what each level takes away from them."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from benchmarks.commands import app
from benchmarks.experiments.attack import Attack, Defence, measure
from benchmarks.experiments.bad_helper import measure_bad_helper
from protocol.epsilon import MICROS


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


def test_one_bad_helper_learns_nothing_and_is_caught_or_only_shifts() -> None:
    """Its view says nothing; two honest helpers leave all the noise that privacy needs; a wrong share is refused.

    4000 draws: Kolmogorov's bound puts the gap of equal distributions above 0.062 with probability below 10^-6. The
    mean square of 4000 discrete Laplace draws has a relative standard error of 0.035: 0.25 away is seven of them.
    """
    view, local, pairwise, changed, private, shifted = measure_bad_helper(4000)
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
    assert len(written["guarantees"]) == 12
    assert 0.5 < written["attacks"][0]["best_guess"] < 0.75

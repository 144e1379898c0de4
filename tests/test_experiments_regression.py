"""`trefoil experiment regression`: what a publisher's model is worth, and what labels cost, on small worlds."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import trefoil
from benchmarks.experiments.label_charges import LIMITS, PUBLISHER, START, WEEK, Habits, charges
from benchmarks.experiments.label_worlds import RATE, draw_label_world
from benchmarks.experiments.lost_labels import lost_labels
from benchmarks.experiments.regression import RegressionCell, run_settings, settings, together_or_apart
from device.device import Device
from device.labelling import LabelOptions
from device.limits import TREFOIL_SERVICE
from device.memory_store import MemoryStore
from device.report import PlainSeal
from protocol.errors import TrefoilError
from protocol.query import NoiseMode


def test_a_world_has_one_truth_for_every_batch_size() -> None:
    small, large = (draw_label_world(3, reports, 16, tested=2_000) for reports in (100, 300))
    assert np.array_equal(small.tested_rows, large.tested_rows)
    assert np.array_equal(small.tested_rates, large.tested_rates)
    assert small.tested_rates.mean() == pytest.approx(RATE, abs=1e-6)
    assert (small.rows.sum(axis=1) == small.cap).all()
    with pytest.raises(TrefoilError, match="no world of 9"):
        draw_label_world(0, 10, 9)


def test_noise_costs_accuracy_and_too_much_of_it_is_declined() -> None:
    """At ε = 0.01 a bucket's noise is some 300 conversions deep; at ε = 3 it hardly shows. Seeds are fixed."""
    cells = settings([20_000], [8], [0.01, 3.0], [NoiseMode.LOCAL])
    found = run_settings(cells, 2, lambda _: None)
    clear, drowned, loud = (found[cell] for cell in cells)
    assert not any(score.fitted for score in drowned)
    assert all(score.auc == 0.5 for score in drowned)
    assert all(score.fitted and score.gain > 0.9 for score in (*clear, *loud))
    assert all(score.auc <= score.best_auc + 0.01 for score in (*clear, *loud))


def test_one_model_sees_more_than_each_advertisers_own() -> None:
    found = together_or_apart(1, RegressionCell(20_000, 16, NoiseMode.LOCAL, 0.3))
    assert found.together.gain > found.apart.gain
    assert found.fitted_apart <= found.advertisers == 5


def test_only_epochs_with_conversions_pay_on_real_devices() -> None:
    """A twentieth of impressions convert: some thirty times less than where every week of the window pays."""
    few = Habits(devices=400)
    found = charges(0, 0.3, habits=few)
    assert found.ipa_like == pytest.approx(0.48)
    assert 0.4 < found.ara_like < 0.5
    assert 0.005 < found.trefoil < 0.03
    assert (found.lost_trefoil, found.lost_ara_like, found.lost_ipa_like) == (0, 0, 0)
    four = charges(0, 0.3, 4, few)
    assert 0 < four.lost_trefoil < four.lost_ara_like


def test_nobody_pays_where_nobody_converts() -> None:
    found = charges(0, 0.3, habits=Habits(devices=50, rate=0.0))
    assert found.trefoil == 0
    assert found.ara_like > 0


def test_a_device_that_is_not_run_would_have_paid_nothing() -> None:
    """The shortcut for people who never convert, on a real device: every label is 0 and free."""
    clock = [START]
    device = Device(MemoryStore(debug=True), PlainSeal(), clock=lambda: clock[0], limits=LIMITS)
    for week in range(1, 5):
        clock[0] = START + week * WEEK
        asked = LabelOptions(TREFOIL_SERVICE, (1,), 1, 1.0, WEEK, ("shop0.example",))
        assert device.measure_impression(PUBLISHER, asked) == (0,)
    assert not any(state.spent for state in device.budget())


def test_the_command_prints_and_writes_every_seed(tmp_path: Path) -> None:
    path = tmp_path / "regression.json"
    arguments = ["experiment", "regression", "--reports", "2000", "--columns", "8", "--epsilon", "1", "--seeds", "2"]
    arguments += ["--noise", "local", "--json", str(path)]
    result = CliRunner().invoke(trefoil.app, [*arguments, "--devices", "0"])
    assert result.exit_code == 0 and "labels lost to empty budgets" not in result.output
    assert json.loads(path.read_text())["charges"] == []
    arguments += ["--devices", "20"]
    result = CliRunner().invoke(trefoil.app, arguments)
    assert result.exit_code == 0, result.output
    for title in ("What a model is worth", "labels lost to empty budgets", "One model, or one for each advertiser"):
        assert title in result.output
    written = json.loads(path.read_text())
    assert [(cell["noise"], len(cell["seeds"])) for cell in written["scores"]] == [("none", 2), ("local", 2)]
    assert len(written["charges"]) == 6


def test_labels_lost_at_random_lower_the_rate_and_labels_lost_to_budgets_also_flatten_slopes() -> None:
    """Who converts often loses most: the effect of what a device always is (its own field) shrinks. Seeds are fixed."""
    found = lost_labels(0, 20_000, 16)
    assert 0.03 < found.lost < 0.3
    for shift in (found.by_budget, found.at_random):
        assert shift.rate == pytest.approx(1 - found.lost, abs=0.02)
        assert shift.auc == pytest.approx(found.auc, abs=0.02)
    assert found.at_random.own_slope == pytest.approx(1, abs=0.06)
    assert found.by_budget.own_slope < found.at_random.own_slope


def test_a_model_through_three_helpers(tmp_path: Path) -> None:
    """Small enough for every run of the tests: what is recorded has 20,000 reports."""
    path = tmp_path / "helpers.json"
    arguments = ["experiment", "regression", "--mpc", "--reports", "400", "--columns", "8", "--noise", "local"]
    result = CliRunner().invoke(trefoil.app, [*arguments, "--json", str(path)])
    assert result.exit_code == 0, result.output
    (found,) = json.loads(path.read_text())["fits"]
    world = draw_label_world(0, 400, 8)
    assert found["sums"] == (world.rows.T @ world.labels).tolist()
    assert found["counted"] == 400 and found["noise"] == "local"
    # The noise is a difference of two NB(3/2, e^(−1/3)); 8 columns stay within 60 but for a chance of 6·10⁻⁸. Labels
    # turned round would be some 360 off.
    assert all(abs(told - true) <= 60 for told, true in zip(found["answer"], found["sums"], strict=True))


def test_more_than_a_device_pays_is_refused_before_any_report_is_made() -> None:
    arguments = ["experiment", "regression", "--mpc", "--reports", "60", "--columns", "8", "--epsilon", "3"]
    result = CliRunner().invoke(trefoil.app, arguments)
    assert isinstance(result.exception, TrefoilError) and "pay at most ε = 1" in str(result.exception)

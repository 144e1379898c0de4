"""`trefoil bench device`: that its cases are what they say, and that its area under the curve is one. No times here."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks.bench.device_timing import (
    EPOCHS,
    NULL,
    SITE,
    Case,
    area_under_curve,
    device_for,
    impressions,
    options,
)
from benchmarks.bench.report_cost import Helpers
from device.storage import EpochOutcome
from device.tick import no_tick
from tests.support.small_worlds import quick_folder
from trefoil import app


@pytest.mark.parametrize("case", list(Case))
def test_a_case_is_what_it_says(case: Case) -> None:
    """Over twenty epochs; real reports pay with every epoch that has an impression, null reports with none."""
    with quick_folder() as folder, device_for(case, folder, Helpers.fresh().helper_set, no_tick) as device:
        before = {(state.kind, state.site, state.epoch): state.spent for state in device.budget()}
        device.measure_conversion(SITE, options(case))
        after = {(state.kind, state.site, state.epoch): state.spent for state in device.budget()}
        record = device.reports()[-1]
    outcomes = {entry.outcome for entry in record.epochs}
    expected = {
        Case.NOTHING_FOUND: {EpochOutcome.NOTHING_FOUND},
        Case.NO_BUDGET: {EpochOutcome.OUT_OF_BUDGET},
        Case.SWITCHED_OFF: {EpochOutcome.NOT_MEASURED},
        Case.TEN: {EpochOutcome.PAID, EpochOutcome.NOTHING_FOUND},
    }
    assert outcomes == expected.get(case, {EpochOutcome.PAID})
    assert (before == after) == (case in NULL)
    if case not in NULL:
        paying = {epoch for (_, site, epoch), spent in after.items() if site == SITE and spent}
        assert len(paying) == min(case.impressions, EPOCHS)


def test_impressions_are_spread_over_the_epochs_and_publishers() -> None:
    for count in (10, 30, 100):
        times, sites = zip(*impressions(count), strict=True)
        assert len(set(times)) == count and len(set(sites)) == 5


def test_the_area_under_the_curve() -> None:
    """Certainty, a coin, ties, and the same whichever of the two is slower."""
    low, high = np.array([1.0, 2.0, 3.0]), np.array([4.0, 5.0])
    assert area_under_curve(low, high) == area_under_curve(high, low) == 1.0
    assert area_under_curve(low, low) == 0.5
    assert area_under_curve(np.array([1.0, 1.0]), np.array([1.0, 2.0])) == 0.75


def test_the_command_writes_every_figure(tmp_path: Path) -> None:
    written = tmp_path / "device.json"
    result = CliRunner().invoke(
        app, ["bench", "device", "--samples", "10", "--lanes", "2", "--json", str(written)], catch_exceptions=False
    )
    assert result.exit_code == 0
    figures = json.loads(written.read_text())
    for part in (figures, figures["before_tick"], figures["after_tick"]):
        assert {"10", "30", "100", "null"} <= part["median_ms"].keys()
        assert part["median_ms"].keys() == part["p99_ms"].keys()
        assert part["ratio_100_to_10"] > 0 and part["ratio_real_to_null"] > 0
        assert 0.5 <= part["auc_100_vs_10"] <= 1 and 0.5 <= part["auc_real_vs_null"] <= 1
    assert figures["samples"] == 10
    # The tick is never early, whatever the machine is doing.
    assert all(median >= figures["tick_ms"] for median in figures["after_tick"]["median_ms"].values())

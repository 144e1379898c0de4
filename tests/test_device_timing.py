"""`trefoil bench device`: that its cases are what they say, and that its area under the curve is one. No times here."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks.bench.area import Area, area_between
from benchmarks.bench.device_page import front_line, section
from benchmarks.bench.device_timing import (
    LONG,
    NULL,
    SHORT,
    SITE,
    Case,
    device_for,
    impressions,
    options,
)
from benchmarks.bench.device_watching import LIMITS, Holding, Question, device_holding
from benchmarks.bench.report_cost import Helpers
from device.limits import DeviceLimits
from device.storage import EpochOutcome
from tests.support.small_worlds import quick_folder
from trefoil import app


@pytest.mark.parametrize("case", list(Case))
def test_a_case_is_what_it_says(case: Case) -> None:
    """Over twenty epochs; real reports pay with every epoch that has an impression, null reports with none."""
    with quick_folder() as folder, device_for(case, folder, Helpers.fresh().helper_set) as device:
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
        assert len(paying) == min(case.impressions, LONG.epochs)


def test_impressions_are_spread_over_the_epochs_and_publishers() -> None:
    for count, window in itertools.product((10, 30, 100), (LONG, SHORT)):
        times, sites = zip(*impressions(count, window), strict=True)
        assert len(set(times)) == count and len(set(sites)) == 5


def test_the_area_under_the_curve() -> None:
    """Certainty either way, a coin, and ties."""
    low, high = np.array([1.0, 2.0, 3.0]), np.array([4.0, 5.0])
    assert area_between(low, high).value == 1.0
    assert area_between(high, low).value == 0.0
    assert area_between(low, low).value == 0.5
    assert area_between(np.array([1.0, 1.0]), np.array([1.0, 2.0])).value == 0.75


@pytest.mark.parametrize(("shift", "expected"), [(0.0, 0.5), (0.2, 0.5562), (1.0, 0.7602)])
def test_the_interval_covers_the_area_as_often_as_it_says(shift: float, expected: float) -> None:
    """Normal samples, whose area is Φ(shift/√2); 400 of them, always the same, so that this passes always or never."""
    draw = np.random.default_rng(5)
    intervals = [area_between(draw.normal(size=60), draw.normal(shift, size=80)) for _ in range(400)]
    covered = sum(low <= expected <= high for low, high in (area.interval() for area in intervals))
    assert 366 <= covered <= 394
    assert abs(float(np.mean([area.value for area in intervals])) - expected) < 0.01


def test_calls_of_one_round_are_not_taken_for_independent() -> None:
    """Twelve times the same number are one observation."""
    draw = np.random.default_rng(6)
    first, second = draw.normal(size=50), draw.normal(size=50)
    alone = area_between(first, second)
    together = area_between(np.repeat(first[:, None], 12, axis=1), np.repeat(second[:, None], 12, axis=1))
    assert together.value == pytest.approx(alone.value)
    assert together.error == pytest.approx(alone.error)


def test_the_intervals_of_a_family_hold_all_at_once_as_often_as_they_say() -> None:
    """Twelve true coins, 400 times, always the same: alone they nearly all miss somewhere, as a family hardly ever."""
    draw = np.random.default_rng(7)
    families = [[area_between(draw.normal(size=60), draw.normal(size=60)) for _ in range(12)] for _ in range(400)]
    alone = sum(all(area.is_a_coin() for area in family) for family in families)
    together = sum(all(area.is_a_coin(12) for area in family) for family in families)
    # 0.95^12 = 0.54 of them, and at least 0.95.
    assert 180 <= alone <= 250
    assert 368 <= together <= 396


@pytest.mark.parametrize("holding", list(Holding))
def test_a_full_device_is_full(holding: Holding) -> None:
    with quick_folder() as folder, device_holding(holding, folder / "device.db") as device:
        seen = device.overview()
        full = LIMITS.max_impressions_per_epoch * 6
        assert len(seen.impressions) == (full if holding is not Holding.NOTHING else 1)
        paid = {entry.outcome for entry in seen.reports[-1].epochs}
        expected = {
            Holding.NOTHING: {EpochOutcome.NOTHING_FOUND},
            Holding.AS_MUCH_AS_IT_CAN: {EpochOutcome.PAID},
            Holding.SWITCHED_OFF: {EpochOutcome.NOT_MEASURED},
        }
        assert paid == expected[holding]
        assert len(seen.reports[-1].epochs) == 6


def test_the_command_writes_every_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With devices that hold little, so that it does not take long."""
    little = DeviceLimits(max_impressions_per_epoch=20, max_sites_per_epoch=2, max_conversions_per_epoch=20)
    monkeypatch.setattr("benchmarks.bench.device_watching.LIMITS", little)
    monkeypatch.setattr("benchmarks.bench.device_watching.IN_A_ROW", 2)
    monkeypatch.setattr("benchmarks.bench.device_watching.AT_ONCE", 4)
    written = tmp_path / "device.json"
    result = CliRunner().invoke(
        app, ["bench", "device", "--samples", "10", "--lanes", "1", "--json", str(written)], catch_exceptions=False
    )
    assert result.exit_code == 0
    figures = json.loads(written.read_text())
    for part in (figures, figures["before_tick"], figures["after_tick"]):
        assert {"10", "30", "100", "null"} <= part["median_ms"].keys()
        assert part["median_ms"].keys() == part["p99_ms"].keys()
        assert part["ratio_100_to_10"] > 0 and part["ratio_real_to_null"] > 0
        assert 0.5 <= part["auc_100_vs_10"] <= 1 and 0.5 <= part["auc_real_vs_null"] <= 1
    assert figures["samples"] == 10
    assert figures["watching"].keys() == {question.value for question in Question}
    for question in Question:
        told = figures["watching"][question.value]
        assert told["low"] <= told["area"] <= told["high"]
        assert told["family_low"] <= told["low"] and told["high"] <= told["family_high"]
        assert told["rounds"] == max(2, 10 // question.turns)
    assert figures["questions"] == 12
    # The tick is never early, whatever the machine is doing.
    assert min(figures["after_tick"]["median_ms"].values()) >= figures["tick_ms"]
    medians = [median for told in figures["watching"].values() for median in told["median_ms"]]
    assert min(medians) >= little.tick_seconds * 1000
    # The pages can be written from it.
    assert all(f"| {question.value} |" in section(figures) for question in Question)
    assert "ms to measure a conversion" in front_line(figures)


def test_the_page_names_what_is_no_coin() -> None:
    """A control that is none is the measurement's own, and not counted."""

    def told(area: float, error: float) -> dict[str, object]:
        return Area(area, error).to_json(3)

    areas = {"a": told(0.5, 0.01), "b": told(0.522, 0.01)}
    rest: dict[str, object] = {
        "command": "trefoil bench device",
        "samples": 10,
        "paper_ratio": 6.3,
        "ratio_100_to_10": 1.1,
        "tick_ms": 80.0,
    }
    rest["machine"] = {"load_average": [1.0, 2.0, 3.0]}
    medians = dict.fromkeys(["10", "30", "100", "null"], 1.0)
    figures = {**rest, "questions": 3, "median_ms": medians, "after_tick": {"areas": areas}}
    control = {"control, c": told(0.7, 0.01)}
    page = section({**figures, "watching": {"d": told(0.5, 0.1), **control}})
    assert "2 of the 3 questions" in page and "all of them by that of the family" in page
    page = section({**figures, "watching": {"d": told(0.6, 0.01), **control}})
    assert "1 of the 3 questions" in page and "2 by that of the family" in page and "\n- d\n" in page

"""`trefoil bench device`: that its cases are what they say, and that its area under the curve is one. No times here."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks.costs import device_timing
from benchmarks.costs.areas import area_between, bits_between
from benchmarks.costs.device_promises import Promises
from benchmarks.costs.device_timing import COSTS, LIMITS, QUESTIONS, Conditions, DeviceTiming, State, device_in
from device.limits import DeviceLimits
from device.stores.storage import EpochOutcome
from protocol.cli.app import app
from tests.support.small_worlds import quick_folder


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


def test_true_coins_have_an_answer_that_says_so_as_often_as_the_bench_claims() -> None:
    """Twelve of them, 400 times, always the same: they nearly all miss somewhere at first, and hardly ever twice.

    Asked again of four times as many calls, a shift that the first interval missed is not excused.
    """
    draw = np.random.default_rng(7)

    def is_a_coin(shift: float, size: int) -> bool:
        return area_between(draw.normal(size=size), draw.normal(shift, size=size)).is_a_coin

    first = again = 0
    for _ in range(400):
        missed = sum(not is_a_coin(0, 60) for _ in range(12))
        first += not missed
        again += all(is_a_coin(0, 4 * 60) for _ in range(missed))
    # 0.95^12 = 0.54 of them, and 0.9975^12 = 0.97.
    assert 180 <= first <= 250
    assert 376 <= again <= 398
    assert not any(is_a_coin(0.5, 4 * 60) for _ in range(100))


@pytest.mark.parametrize(("shift", "low", "high"), [(0.0, 0.0, 0.01), (1.0, 0.08, 0.14), (100.0, 0.98, 1.0)])
def test_the_bits_of_a_call(shift: float, low: float, high: float) -> None:
    """Of a coin; of normal times a deviation apart, 0.108 bit by the best threshold; of certainty. Always the same."""
    draw = np.random.default_rng(8)
    first, second = draw.normal(size=(1000, 4)), draw.normal(shift, size=(1000, 4))
    assert low <= bits_between(first, second) <= high


def test_a_coin_is_not_taken_for_a_channel() -> None:
    """240 calls each, 200 times, always the same: on average less than a thousandth of a bit more than none."""
    draw = np.random.default_rng(9)
    bits = [bits_between(draw.normal(size=(60, 4)), draw.normal(size=(60, 4))) for _ in range(200)]
    assert np.mean(bits) < 0.0025 and np.quantile(bits, 0.95) < 0.01


# Devices that hold little, so that a test does not take long.
LITTLE = DeviceLimits(max_impressions_per_epoch=60, max_sites_per_epoch=2, max_conversions_per_epoch=40)


@pytest.mark.parametrize("state", COSTS)
def test_a_device_is_in_the_state_it_says(state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    """All six weeks of a month are asked for. A device that is not full saves one impression more."""
    assert State.FULL.impressions == LIMITS.max_impressions_per_epoch * 6
    monkeypatch.setattr("benchmarks.costs.device_timing.LIMITS", LITTLE)
    with quick_folder() as folder, device_in(state, folder / "device.db") as device:
        seen = device.overview()
        assert len(seen.impressions) == state.impressions + (state not in (State.FULL, State.NO_BUDGET, State.FULL_OFF))
        expected = {
            State.EMPTY: EpochOutcome.NOTHING_FOUND,
            State.NO_BUDGET: EpochOutcome.OUT_OF_BUDGET,
            State.FULL_OFF: EpochOutcome.NOT_MEASURED,
        }
        assert {entry.outcome for entry in seen.reports[-1].epochs} == {expected.get(state, EpochOutcome.PAID)}
        assert len(seen.reports[-1].epochs) == 6


def test_a_question_that_is_no_coin_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """But a control is not, and a coin is not."""
    times = np.random.default_rng(10).normal(size=(60, 4))
    coin, channel = (times, times), (times, times + 1)
    *questions, control = QUESTIONS
    asked = dict.fromkeys(questions, coin) | {questions[3]: channel, control: channel}
    timing = DeviceTiming({}, np.zeros(1), Promises([], 0, 0, [], 0, 0, 1.0), asked, Conditions())
    assert timing.missed() == [questions[3]]


ONE_OF_EACH = (
    "a conversion: budget",
    "a conversion: another site",
    "a label of 256",
    "an impression: another",
    "an error: of",
    "control, an impression",
)


def test_busy_loops_run_while_questions_are_asked_and_no_longer() -> None:
    with device_timing.busy(2) as running:
        assert [process.poll() for process in running] == [None, None]
    assert [process.poll() for process in running] == [-signal.SIGKILL] * 2


def test_the_command_writes_every_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One question of each kind."""
    chosen = [question for question in QUESTIONS if question.text.startswith(ONE_OF_EACH)]
    monkeypatch.setattr("benchmarks.costs.device_timing.QUESTIONS", chosen)
    monkeypatch.setattr("benchmarks.costs.device_timing.LIMITS", LITTLE)
    monkeypatch.setattr("benchmarks.costs.device_timing.IN_A_ROW", 3)
    monkeypatch.setattr("benchmarks.costs.device_timing.MOST_FIRST_SAVES", 1)
    monkeypatch.setattr("benchmarks.costs.device_promises.HOSTILE_CALLERS", 2)
    monkeypatch.setattr("benchmarks.costs.device_timing.DeviceTiming.missed", lambda _: chosen[:1])
    written = tmp_path / "device.json"
    arguments = ["--samples", "4", "--lanes", "1", "--delay-ms", "200", "--json", str(written)]
    result = CliRunner().invoke(app, ["bench", "device", *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    figures = json.loads(written.read_text())
    assert {"10", "100", "full", "empty"} <= figures["median_ms"].keys() == figures["p99_ms"].keys()
    assert figures["ratio_100_to_10"] > 0
    assert figures["samples"] == 4
    assert figures["watching"].keys() == {question.text for question in chosen}
    assert len(chosen) == len(ONE_OF_EACH)
    for text, answer in figures["watching"].items():
        assert answer["low"] <= answer["area"] <= answer["high"]
        times = 4 if text == "a conversion: another site calls, or none" else 1
        assert answer["rounds"] == 2 * times and answer["calls"] == 4 * times
        assert 0 <= answer["bits"] <= 1 and answer["is_near"] is (0.43 <= answer["area"] <= 0.57)
    # An answer is never early, whatever the machine is doing.
    slow = ("a conv", "a label")
    conversions = [answer for text, answer in figures["watching"].items() if text.startswith(slow)]
    assert len(conversions) == 3 and all(min(answer["median_ms"]) >= 200 for answer in conversions)
    assert figures["processor_ms"].keys() == {state.value for state in COSTS}
    assert figures["constant_processor_ms"] > 0 and figures["delay_ms"] == 200
    promises = figures["promises"]
    assert promises["first_saves_kept"] == promises["first_saves"] == 1
    assert promises["page_slowest_ms"] > 0 and promises["flood_median_ms"] >= 200
    assert 0 <= promises["reports_in_flood_real"] <= promises["reports_in_flood"] == 10
    assert figures["questions"] == len(chosen) - 1
    [(text, answer)] = figures["watching_again"].items()
    assert text == chosen[0].text and answer["calls"] == 4 * figures["watching"][text]["calls"]

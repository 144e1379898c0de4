"""`trefoil bench browser`: its figures from made-up times, and what it says where no browser is. No times here."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.costs import browser_timing
from benchmarks.costs.browser_timing import AT_ONCE, DEVICES
from benchmarks.costs.device_timing import State
from protocol.cli import app as cli
from tests.support.browser import needs_chromium


class MadeUp:
    """A caller whose device takes longer without the delay if it is full."""

    def __init__(self, state: State) -> None:
        self._quick = 0.01 if state is State.EMPTY else 0.05
        self._calls: list[float] = []

    def greet(self) -> None:
        """Do nothing."""

    def start(self, epsilon: float) -> None:
        self._calls.append(self._quick if epsilon == AT_ONCE else 1.0)

    def seconds(self) -> float:
        (seconds,) = self._calls
        self._calls.clear()
        return seconds


@contextmanager
def made_up_callers() -> Iterator[list[MadeUp]]:
    yield [MadeUp(place.state) for place in DEVICES]


def test_each_device_is_called_with_the_delay_and_without(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(browser_timing, "all_callers", made_up_callers)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    assert cli.run(["bench", "browser", "--samples", "3", "--busy", "1", "--json", "-"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["samples"], result["busy_loops"]) == (3, 1)
    areas = {
        schedule: {text: answer["area"] for text, answer in result[schedule].items()}
        for schedule in ("with_delay", "without_delay")
    }
    assert len(areas["with_delay"]) == 5 and set(areas["with_delay"].values()) == {0.5}
    assert {text: 1.0 if "full" in text else 0.5 for text in areas["without_delay"]} == areas["without_delay"]


def test_without_chromium_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(browser_timing, "CHROMIUM", None)
    assert cli.run(["bench", "browser", "--samples", "2", "--json", "-"]) == 1
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["kind"] == "missing_dependency" and "apt install chromium" in error["hint"]


@needs_chromium
@pytest.mark.skipif("TREFOIL_LOAD" not in os.environ, reason="four browsers and seven devices, a minute: make load")
def test_in_real_browsers(tmp_path: Path) -> None:
    assert cli.run(["bench", "browser", "--samples", "2", "--json", str(tmp_path / "times.json")]) == 0
    result = json.loads((tmp_path / "times.json").read_text())
    for answer in result["with_delay"].values():
        assert min(answer["median_ms"]) >= result["delay_ms"]

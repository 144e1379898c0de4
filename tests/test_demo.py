"""The demo and its workload: the same people for the same seed, the same sums on a device and on its clear twin."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from benchmarks.demo import view
from benchmarks.demo.demo import DemoOptions, _make_batch, added_up, raise_epsilon
from benchmarks.workload import SHOP, asked_of_devices, people, plain_histograms, sealed_reports
from device.asked import Asked
from device.privacy_filter import FilterKind
from mpc_helpers.local.launcher import prepare
from protocol.console import out
from protocol.errors import TrefoilError
from protocol.report import SealedReport, seal_report
from tests.support.three_helpers import real_now, terms

ROOT = Path(__file__).resolve().parent.parent
NOW = 1_800_000_000
FIELDS = {
    "truth", "answer", "noise", "noise_sd", "noise_sd_by_mode", "delta",
    "reports_submitted", "reports_counted", "rejections", "bytes_per_report",
    "seconds", "helper_seconds", "replay_refused", "tamper_refused", "invalid_refused", "reports_without_budget",
    "verdict",
}  # fmt: skip


def test_the_demo_tells_the_whole_story(tmp_path: Path) -> None:
    """60 standard deviations of noise of scale 4: fails by chance less than once in 10^30."""
    path = tmp_path / "demo.json"
    options = ["--reports", "40", "--buckets", "5", "--epsilon", "0.5", "--noise", "pairwise", "--seed", "7"]
    options += ["--kappa", "1", "--function", "first", "--cutoff", "0.05"]
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "trefoil", "demo", *options, "--json", str(path)],
        capture_output=True, text=True, cwd=ROOT, timeout=120, check=False,
    )  # fmt: skip
    took = time.monotonic() - began
    assert done.returncode == 0, done.stdout + done.stderr
    stored = json.loads(path.read_text())
    assert set(stored) == FIELDS
    assert (stored["reports_submitted"], stored["reports_counted"]) == (42, 40)
    assert stored["replay_refused"] is True
    assert stored["tamper_refused"] is True
    assert stored["invalid_refused"] is True
    assert [counts["numbers outside the cap"] for counts in stored["rejections"]] == [1, 1, 1]
    assert stored["truth"] == truth(7, 40, stored, asked_of_devices(0.5, 5, 1, "first"))
    for noisy, true in zip(stored["answer"], stored["truth"], strict=True):
        assert abs(noisy - true) < 60 * stored["noise_sd"]
    # All three modes side by side: joint has 0.816 times the deviation of local, and is the only one with a δ.
    by_mode = stored["noise_sd_by_mode"]
    assert by_mode["pairwise"] == stored["noise_sd"] and (stored["noise"], stored["delta"]) == ("pairwise", 0)
    assert by_mode["joint"] / by_mode["local"] == pytest.approx(0.8165, abs=0.003)
    seconds = stored["seconds"]
    assert {"make reports", "total", "replay", "other"} <= set(seconds)
    assert sum(value for name, value in seconds.items() if name != "total") == pytest.approx(seconds["total"], abs=1e-9)
    assert all(value >= 0 for value in seconds.values())
    # Nothing is counted twice: no part of a process takes longer than the process.
    assert seconds["total"] <= took
    assert not {f"query: {state}" for state in stored["helper_seconds"]} & set(seconds)
    assert {"admitting", "agreeing", "computing"} <= set(stored["helper_seconds"])
    *_, end, following = done.stdout.splitlines()
    assert end.startswith("Three helpers counted 40 reports and read none; their answer is off by at most ")
    assert following.startswith("Next: trefoil live")
    for words in (
        "three helpers",
        "one trusted server",
        "Refused: 40 of 42 reports were counted before, and 1 cannot be counted",
        "does not open",
        "this site",
    ):
        assert words in done.stdout


def test_the_demo_says_when_no_week_can_pay(tmp_path: Path) -> None:
    """ε = 2 on a budget of 1: every report is null, which a table of zeros alone would not say."""
    trio = prepare(tmp_path / "trio", now=real_now())
    for epsilon, words in ((2.0, True), (0.5, False)):
        options = DemoOptions(reports=60, buckets=4, epsilon=epsilon)
        made = _make_batch(tmp_path / f"{epsilon}.batch", options, trio.helper_set, real_now())
        with out.capture() as captured:
            view.show_without_budget(made.without_budget, 60, epsilon, any(made.truth))
        assert (not any(made.truth)) == words == ("noise alone" in captured.get())
        assert f"{made.without_budget} of 60 reports are null" in captured.get()
        found = sum(bool(person.viewings) * len(person.conversions) for person in people(1, 60, 4, real_now()))
        assert 0 < made.without_budget <= found
        assert (made.without_budget == found) == words


def truth(seed: int, reports: int, stored: dict[str, object], asked: Asked) -> list[int]:
    """The plaintext sum, from the seed alone. What is attributed does not depend on the hour the demo ran at."""
    buckets = asked.options.histogram_size
    total = np.zeros(buckets, dtype=int)
    for person in people(seed, reports, buckets, NOW):
        total += np.sum(plain_histograms(person, asked), axis=0)
    assert stored["seconds"]
    return [int(value) for value in total]


def test_people_come_from_the_seed_alone() -> None:
    first, again, other = (list(people(seed, 50, 8, NOW)) for seed in (3, 3, 4))
    assert first == again
    assert first != other
    assert sum(len(person.conversions) for person in first) == 50
    assert all(viewing.time < min(person.conversions) for person in first for viewing in person.viewings)
    assert {viewing.campaign for person in first for viewing in person.viewings} <= set(range(8))


def test_a_twin_reports_what_the_device_reports_and_budgets_run_out(tmp_path: Path) -> None:
    trio = prepare(tmp_path / "trio", now=real_now())
    busy = next(
        person
        for person in people(1, 400, 4, real_now())
        if len(person.conversions) == 3 and person.viewings and person.viewings[-1].time > real_now() - 3 * 86400
    )
    device, reports = sealed_reports(busy, asked_of_devices(0.5, 4), trio.helper_set)
    plain = plain_histograms(busy, asked_of_devices(0.5, 4))
    assert len(reports) == len(plain) == 3
    assert all(isinstance(report, SealedReport) for report in reports)
    # ε = ½ each and a budget of 1 per epoch: two conversions are attributed, the third finds nothing left.
    assert [sum(histogram) for histogram in plain] == [1, 1, 0]
    spent = {state.spent for state in device.budget() if state.kind is FilterKind.SITE and state.site == SHOP}
    assert max(spent) == 1_000_000


def test_the_altered_report_claims_twice_the_epsilon(tmp_path: Path) -> None:
    report = seal_report(
        [1, 0], terms(2, epsilon_micros=250_000), prepare(tmp_path / "trio", now=real_now()).helper_set
    )
    assert raise_epsilon(report).terms().epsilon_micros == 500_000
    assert raise_epsilon(report).digest != report.digest


def test_the_budget_shown_is_of_someone_who_spent_and_has_dates(tmp_path: Path) -> None:
    trio = prepare(tmp_path / "trio", now=real_now())
    for seed in (1, 2):
        options = DemoOptions(reports=30, buckets=4, seed=seed)
        made = _make_batch(tmp_path / f"{seed}.batch", options, trio.helper_set, real_now())
        assert max(state.spent for state in made.device.budget()) > 0
    with out.capture() as captured:
        view.show_budget(made.device, made.conversions)
    assert re.search(r"20\d\d-\d\d-\d\d to 20\d\d-\d\d-\d\d", captured.get())


def test_seconds_add_up_also_when_rounded() -> None:
    seconds = added_up({"a": 1.004, "b": 2.004, "c": 0.333}, 4.0)
    assert seconds == {"a": 1.0, "b": 2.0, "c": 0.33, "other": 0.67, "total": 4.0}


@pytest.mark.parametrize(
    "wrong",
    [
        *({"reports": 0}, {"buckets": 0}, {"buckets": 2000}, {"epsilon": 0.0}, {"epsilon": float("nan")}),
        *({"seed": -1}, {"kappa": -1}, {"cutoff": 0.0}, {"function": "third"}),
    ],
)
def test_options_are_checked_before_anything_starts(wrong: dict[str, float]) -> None:
    with pytest.raises(TrefoilError):
        DemoOptions(**wrong)  # type: ignore[arg-type] # wrong on purpose

"""Simulated crowds: seeded workloads, dishonest devices, worker pools, and the demonstration with its clear twin."""

from __future__ import annotations

import json
import math
import multiprocessing.popen_spawn_posix
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.demos import demo
from benchmarks.demos.demo import DemoOptions, _make_batch, raise_epsilon
from benchmarks.workloads.people import SHOP, asked_of_devices, people, plain_histograms, sealed_reports
from benchmarks.workloads.reports import Lie, WorkerPool, Workload, lies_of, lying_report, lying_reports, make_batch
from device.actions import MeasurementOptions
from device.budget import FilterKind
from mpc_helpers.local.launcher import prepare
from protocol.batch import BatchReader
from protocol.cli.console import out
from protocol.errors import ErrorKind, TrefoilError
from protocol.report import SealedReport, seal_report
from protocol.shape import Shape
from tests.support import protocol_samples as samples
from tests.support.checked_reports import check, histogram_of, honest, terms_of
from tests.support.raising import raises
from tests.support.three_helpers import real_now, terms

SIDE = Shape(8, 6, 5, 1)


def test_every_lie_is_found_out_and_the_honest_reports_around_it_pass(tmp_path: Path) -> None:
    good = honest(histogram_of(SIDE, b1=5, side=6), SIDE)
    lies = [lying_report(lie, terms_of(SIDE), samples.HELPER_SET) for lie in Lie]
    assert lies_of(SIDE) == list(Lie)
    made = check(tmp_path, [*lies, good], SIDE)
    assert [one.rejections() for one in made.ingested] == [{}, {}, {}], "each helper alone would count them"
    assert made.zero() == [False] * len(Lie) + [True]


def test_a_shape_has_room_for_some_lies() -> None:
    assert Lie.WRONG_FLAG not in lies_of(Shape(8, 0, 5, 1))
    assert Lie.CANCELLING not in lies_of(Shape(1, 0, 5, 1))


def test_lying_devices_beside_a_workload(tmp_path: Path) -> None:
    workload = Workload(samples.terms(cap=5, spread=1), 10, 1, invalid=7)
    make_batch(tmp_path / "batch", workload, samples.HELPER_SET, processes=1, progress=lambda _: None)
    assert len(BatchReader(tmp_path / "batch")) == 17
    assert workload.truth() == Workload(workload.terms, 10, 1).truth()
    assert len(list(lying_reports(workload, samples.HELPER_SET))) == 7
    with raises(ErrorKind.OUT_OF_RANGE):
        Workload(samples.terms(), 10, 1, invalid=1)
    with raises(ErrorKind.INCONSISTENT):
        lying_report(Lie.HUGE, samples.TERMS, samples.HELPER_SET)


def test_a_skewed_workload_has_large_buckets_first_and_the_same_number_of_conversions() -> None:
    """Seeded, so it cannot fail by chance."""
    even, skewed = (Workload(samples.terms(), 2000, 5, skew) for skew in (0.0, 1.5))
    assert skewed.truth()[0] > sum(skewed.truth()[1:])
    assert max(even.truth()) < sum(even.truth()) / 4
    for workload in (even, skewed):
        assert sum(int((workload.histograms(span) > 0).sum()) for span in workload.chunks()) == 2000


def test_a_workload_without_skew_is_what_it_always_was() -> None:
    """Recorded results were drawn with these numbers."""
    assert Workload(samples.terms(), 300, 1).truth() == [83, 117, 128, 131, 108, 111, 111, 151]


@pytest.mark.parametrize("skew", [-1.0, 11.0, math.nan, math.inf])
def test_an_impossible_skew_is_refused(skew: float) -> None:
    with raises(ErrorKind.OUT_OF_RANGE):
        Workload(samples.terms(), 10, 1, skew)


def test_flagged_reports_hold_kappa_and_nothing_else() -> None:
    """A tenth of 2,000 reports, give or take six deviations; seeded, so it cannot fail by chance."""
    terms = replace(samples.terms(), kappa=7)
    workload = Workload(terms, 2000, 5, 0.0, 0.1)
    rows = np.concatenate([workload.histograms(span) for span in workload.chunks()])
    flags = rows[:, -1]
    assert set(flags.tolist()) == {0, 7}
    assert 120 < int((flags > 0).sum()) < 280
    assert not rows[flags > 0, :-1].any()
    assert rows[flags == 0, :-1].any(axis=1).all()
    assert workload.truth() == rows.sum(axis=0).tolist()


@pytest.mark.parametrize(("kappa", "flagged"), [(0, 0.1), (1, -0.1), (1, 1.1), (1, math.nan)])
def test_a_share_of_flagged_reports_needs_a_kappa(kappa: int, flagged: float) -> None:
    with raises(ErrorKind.OUT_OF_RANGE):
        Workload(replace(samples.terms(), kappa=kappa), 10, 1, 0.0, flagged)


def test_workers_are_born_with_interrupts_blocked_and_end_at_one_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a worker imports, Python would answer Ctrl-C with a traceback. It is born with its parent's mask."""
    born: list[set[int]] = []
    ordinary: Any = multiprocessing.popen_spawn_posix.util.spawnv_passfds  # type: ignore[attr-defined] # Python's own

    def noted(path: Any, arguments: Any, handles: Any) -> Any:
        if not any("resource_tracker" in str(each) for each in arguments):
            born.append(set(signal.pthread_sigmask(signal.SIG_BLOCK, ())))
        return ordinary(path, arguments, handles)

    monkeypatch.setattr(multiprocessing.popen_spawn_posix.util, "spawnv_passfds", noted)  # type: ignore[attr-defined]
    with WorkerPool(1) as pool:
        handler = pool.submit(signal.getsignal, signal.SIGINT)
        blocked = pool.submit(signal.pthread_sigmask, signal.SIG_BLOCK, ())
        assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
        assert handler.result(60) is signal.SIG_DFL and signal.SIGINT not in blocked.result(60)
    assert len(born) == 1 and signal.SIGINT in born[0]


ROOT = Path(__file__).resolve().parents[2]
NOW = 1_800_000_000
FIELDS = {
    "truth", "answer", "noise", "noise_sd", "noise_sd_by_mode", "delta",
    "reports_submitted", "reports_counted", "rejections", "bytes_per_report",
    "replay_refused", "tamper_refused", "invalid_refused", "reports_without_budget",
    "verdict",
}  # fmt: skip


def test_the_demo_tells_the_whole_story(tmp_path: Path) -> None:
    """60 standard deviations of noise of scale 4: fails by chance less than once in 10^30."""
    path = tmp_path / "demo.json"
    options = ["--reports", "40", "--buckets", "5", "--epsilon", "0.5", "--noise", "pairwise", "--seed", "7"]
    options += ["--kappa", "1", "--function", "first", "--cutoff", "0.05"]
    done = subprocess.run(
        [sys.executable, "-m", "trefoil", "demo", *options, "--json", str(path)],
        capture_output=True, text=True, cwd=ROOT, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    stored = json.loads(path.read_text())
    assert set(stored) == FIELDS
    assert (stored["reports_submitted"], stored["reports_counted"]) == (42, 40)
    assert stored["replay_refused"] is True
    assert stored["tamper_refused"] is True
    assert stored["invalid_refused"] is True
    assert [counts["numbers outside the cap"] for counts in stored["rejections"]] == [1, 1, 1]
    assert stored["truth"] == truth(7, 40, asked_of_devices(0.5, 5, 1, "first"))
    for noisy, true in zip(stored["answer"], stored["truth"], strict=True):
        assert abs(noisy - true) < 60 * stored["noise_sd"]
    # All three modes side by side: joint has 0.816 times the deviation of local, and is the only one with a δ.
    by_mode = stored["noise_sd_by_mode"]
    assert by_mode["pairwise"] == stored["noise_sd"] and (stored["noise"], stored["delta"]) == ("pairwise", 0)
    assert by_mode["joint"] / by_mode["local"] == pytest.approx(0.8165, abs=0.003)
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
            demo.show_without_budget(made.without_budget, 60, epsilon, any(made.truth))
        assert (not any(made.truth)) == words == ("noise alone" in captured.get())
        assert f"{made.without_budget} of 60 reports are null" in captured.get()
        found = sum(bool(person.viewings) * len(person.conversions) for person in people(1, 60, 4, real_now()))
        assert 0 < made.without_budget <= found
        assert (made.without_budget == found) == words


def truth(seed: int, reports: int, asked: MeasurementOptions) -> list[int]:
    """The plaintext sum, from the seed alone. What is attributed does not depend on the hour the demo ran at."""
    buckets = asked.options.histogram_size
    total = np.zeros(buckets, dtype=int)
    for person in people(seed, reports, buckets, NOW):
        total += np.sum(plain_histograms(person, asked), axis=0)
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
        demo.show_budget(made.device, made.conversions)
    assert re.search(r"20\d\d-\d\d-\d\d to 20\d\d-\d\d-\d\d", captured.get())


@pytest.mark.parametrize(
    "wrong", [{"buckets": 2000}, {"epsilon": float("nan")}, {"cutoff": 0.0}, {"function": "third"}]
)
def test_options_are_checked_before_anything_starts(wrong: dict[str, float]) -> None:
    """Beside those of tests/MISTAKES.md."""
    with pytest.raises(TrefoilError):
        DemoOptions(**wrong)  # type: ignore[arg-type] # wrong on purpose

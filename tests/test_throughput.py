"""The throughput benchmark itself: what it counts, on real helpers at a size that says nothing about speed."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.bench import plaintext, throughput
from benchmarks.bench.processes import usage
from benchmarks.bench.throughput import Snapshot, ThroughputPoint, exponents
from benchmarks.bulk_reports import Workload, make_batch
from protocol.batch import BatchReader
from protocol.errors import TrefoilError
from tests.support import protocol_samples as samples
from trefoil import app

RATIOS = {
    "ingest_over_bare_open",
    "fraction_of_bound",
    "cpu_over_trusted_server",
    "sum_over_plaintext",
    "speedup_over_naive_mpyc",
}
STAGES = {"transfer", "open", "expand", "sum", "ledger", "agreement", "noise", "release"}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer rounds: nothing is asserted about speed here."""
    monkeypatch.setattr(throughput, "INGEST_ROUNDS", 1)
    monkeypatch.setattr(throughput, "NAIVE_REPORTS", 10)
    monkeypatch.setattr(throughput, "NAIVE_RUNS", 1)
    monkeypatch.setattr(throughput, "EPSILON_MICROS", 50_000_000)


@pytest.mark.usefixtures("quick")
def test_the_command_end_to_end(tmp_path: Path) -> None:
    """With γ = 5 per unit, noise above 16 in one of eight buckets has a probability below 10^−15; sums are about 50."""
    target, plots = tmp_path / "throughput.json", tmp_path / "plots"
    command = ["bench", "throughput", "--reports", "40", "--reports", "80", "--buckets", "4", "--json", str(target)]
    done = CliRunner().invoke(app, [*command, "--plot", str(plots)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    stored = json.loads(target.read_text())
    assert {"date", "seed", "commit", "machine", "points", "exponents"} <= set(stored)
    assert [(point["reports"], point["buckets"]) for point in stored["points"]] == [(40, 4), (80, 4)]
    for point in stored["points"]:
        assert set(point["ratios"]) >= RATIOS
        assert all(math.isfinite(value) and value > 0 for value in point["ratios"].values())
        assert set(point["seconds"]) >= STAGES | {"total"}
        assert sum(value for stage, value in point["seconds"].items() if stage != "total") > 0
        assert set(point["cpu_seconds"]) >= {"total", "open", "expand", "sum"}
        assert all(50 < value < 2000 for value in point["peak_rss_mb"].values())
        for helper, processes in point["peak_rss_mb_by_process"].items():
            assert set(processes) >= {"daemon", "fork server", "opening reports"}
            assert sum(processes.values()) == pytest.approx(point["peak_rss_mb"][helper])
        # Helpers 2 and 3 get the body of 8 bytes per bucket, all three a payload of 112; headers are alike.
        assert point["bytes_per_report"]["uploaded"] > 2 * 8 * 4 + 3 * 112
        assert point["bytes_per_report"]["between helpers"] > 0
        assert point["largest_error"] <= 16
    assert "admit cpu over reports at 4 buckets" in stored["exponents"]
    assert sorted(path.name for path in plots.iterdir()) == [
        f"throughput-{name}.svg" for name in ("buckets", "ratios", "reports", "stages")
    ]


def test_a_grid_that_cannot_be_is_refused_before_anything_starts() -> None:
    for count in (0, -1, 10**8):
        with pytest.raises(TrefoilError, match="report counts are 1 to"):
            throughput.run_grid([count], [4], 1, lambda _: None)


def point(reports: int, buckets: int, cpu: float, size: float) -> ThroughputPoint:
    cpu_seconds, sizes = {"open": cpu, "expand": cpu / 2}, {"uploaded": size}
    return ThroughputPoint(
        reports, buckets, {}, cpu_seconds, sizes, {}, {}, {}, {}, {"bare open": 1e-5}, largest_error=0, noise_sd=1
    )


def test_exponents_are_those_of_the_cost() -> None:
    """Linear is 1; something quadratic cannot hide."""
    linear = [point(n, m, 3e-5 * n, 300 + 16 * m) for n in (1000, 8000) for m in (16, 128)]
    found = exponents(linear)
    assert found["admit cpu over reports at 16 buckets"] == pytest.approx(1)
    assert found["bytes over buckets at 1000 reports"] == pytest.approx(1)
    # A machine that was slower for the larger batches does not bend the line.
    slower = [
        replace(
            one,
            cpu_seconds={part: 2 * value for part, value in one.cpu_seconds.items()},
            yardstick={"bare open": 2e-5},
        )
        if one.reports == 8000
        else one
        for one in linear
    ]
    assert exponents(slower) == pytest.approx(found)
    squared = [replace(one, cpu_seconds={"open": 1e-9 * one.reports**2}) for one in linear]
    assert exponents(squared)["admit cpu over reports at 128 buckets"] == pytest.approx(2)


def test_stages_are_apart_and_add_up() -> None:
    used = Snapshot([], [{"check": 1.0, "open": 6.0}, {"open": 2.0, "expand": 0.5, "sum": 0.5}], [0.1, 0.3, 0.2], 0.0)

    seconds = {"submit": 1.0, "admitting": 5.0, "agreeing": 0.9, "computing": 0.2, "voting": 0.05, "collect": 0.01}
    stages = throughput._stages(seconds, used)
    assert tuple(stages) == throughput.STAGES
    assert stages["open"] == pytest.approx(4.0)
    assert stages["ledger"] == 0.3
    assert stages["agreement"] == pytest.approx(0.6)
    assert sum(stages.values()) == pytest.approx(sum(seconds.values()))


def test_processor_time_includes_children_that_have_ended() -> None:
    program = (
        "import subprocess, sys, time\n"
        "subprocess.run([sys.executable, '-c', 'import time\\nwhile time.process_time() < 0.4: pass'])\n"
        "print('done', flush=True); time.sleep(30)"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        used = usage(process.pid)
        assert used.cpu_seconds >= 0.4
        assert used.peak_rss_mb > 1
    finally:
        process.kill()
        process.communicate()


def test_costs_are_per_report_and_sustained_ones_the_mean_of_all_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock of our own: the first round takes 6 s, the others 2, over 4 reports each."""
    now = [0.0]
    monkeypatch.setattr("benchmarks.bench.plaintext.time.perf_counter", lambda: now[0])
    monkeypatch.setattr("benchmarks.bench.plaintext.time.process_time", lambda: now[0] / 2)

    def work() -> None:
        now[0] += 2.0 if now[0] else 6.0

    assert plaintext.sustain(work, 4, rounds=5) == plaintext.PlaintextCost(14 / 20, 7 / 20)
    now[0] = 0.0
    assert plaintext.measure(work, 4, rounds=3) == plaintext.PlaintextCost(2 / 4, 1 / 4)


def test_the_baselines_run() -> None:
    workload = Workload(throughput._terms(8), 50, 3)
    for cost in (plaintext.plain_sum(workload), plaintext.bare_open(workload), plaintext.trusted_server(workload)):
        assert cost.seconds > 0


def test_a_workload_is_repeated_by_its_seed_and_its_reports_are_not(tmp_path: Path) -> None:
    """The sums are a function of the seed; keys, nonces and so every byte that is sealed are not."""
    workload = Workload(samples.terms(), 450, 5)
    truth = workload.truth()
    assert truth == Workload(workload.terms, 450, 5).truth() != Workload(workload.terms, 450, 6).truth()
    assert sum(truth) == sum(int(workload.histograms(span).sum()) for span in workload.chunks())
    done: list[int] = []
    for name in ("first", "second"):
        make_batch(tmp_path / name, workload, samples.HELPER_SET, processes=1, progress=done.append)
    first, second = BatchReader(tmp_path / "first"), BatchReader(tmp_path / "second")
    assert len(first) == len(second) == 450
    assert sum(done) == 900
    assert not {report.digest for report in first} & {report.digest for report in second}
    with pytest.raises(TrefoilError, match="exists already"):
        make_batch(tmp_path / "first", workload, samples.HELPER_SET, progress=done.append)
    with pytest.raises(TrefoilError, match="at least one report"):
        Workload(workload.terms, 0, 1)

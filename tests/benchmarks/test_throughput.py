"""The throughput benchmark itself: what it counts, on real helpers at a size that says nothing about speed."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from benchmarks.results.columns import Record
from benchmarks.throughput import baselines, grid, measurement, view
from benchmarks.throughput.baselines import YARDSTICKS, PlaintextCost
from benchmarks.throughput.grid import Cell, Extra, Grid, cells_of
from benchmarks.throughput.point import (
    PROFILE,
    STAGES,
    Baselines,
    BatchRun,
    Counters,
    HelperCounters,
    profile,
    record_of,
    spread,
    timeline,
)
from benchmarks.workloads.reports import Workload, make_batch, purchase_terms
from mpc_helpers.local.launcher import launched_helpers
from mpc_helpers.service import monitoring as service_processes
from mpc_helpers.service.monitoring import Metrics, count_processes, usage
from protocol.batch import BatchReader
from protocol.cli.app import app
from protocol.errors import ErrorKind, TrefoilError
from protocol.hpke import CLASSICAL, Suite
from protocol.shares import PARTIES
from protocol.status import QueryState
from tests.support import protocol_samples as samples
from tests.support.raising import raises

RATIOS = {
    "cpu_over_trusted_server",
    "cpu_over_three_bare_opens",
    "cpu_over_plaintext",
    "ingest_over_bare_open",
    "cpu_over_batch_server",
    "cpu_over_three_batch_opens",
    "sum_over_plaintext",
    "slowdown_over_plaintext",
}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer rounds: nothing is asserted about speed here."""
    monkeypatch.setattr(measurement, "INGEST_ROUNDS", 1)
    monkeypatch.setattr(baselines, "NAIVE_REPORTS", 10)
    monkeypatch.setattr(baselines, "NAIVE_RUNS", 1)
    monkeypatch.setattr(grid, "purchase_terms", lambda site, buckets, now: purchase_terms(site, buckets, now, 50.0))
    monkeypatch.setattr(baselines, "SECONDS", 0.01)


def invoke(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["bench", "throughput", *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.mark.usefixtures("quick")
def test_the_command_end_to_end(tmp_path: Path) -> None:
    """With γ = 5 per unit, noise above 16 in one of eight buckets has a probability below 10^−15; sums are about 50."""
    target, plots, table = tmp_path / "throughput.json", tmp_path / "plots", tmp_path / "runs.csv"
    sizes = ("--reports", "80", "--buckets", "4", "--repeat", "2", "--without", "naive")
    page = invoke(*sizes, "--profile", "--json", str(target), "--csv", str(table), "--plot", str(plots))
    stored = json.loads(target.read_text())
    assert {"command", "date", "seed", "commit", "machine", "points"} <= set(stored)
    assert [(point["reports"], point["buckets"]) for point in stored["points"]] == [(80, 4)]
    for point in stored["points"]:
        assert set(point["ratios"]) >= RATIOS
        assert all(math.isfinite(value) and value > 0 for value in point["ratios"].values())
        for name, (low, high) in point["ranges"].items():
            assert low <= point["ratios"][name] <= high
        assert len(point["runs"]) == 2
        assert set(point["seconds"]) == {*STAGES, "total"}
        spent = [value for stage, value in point["seconds"].items() if stage != "total"]
        assert min(spent) >= 0
        assert sum(spent) == pytest.approx(point["seconds"]["total"])
        assert set(point["profile"]) == set(PROFILE)
        assert sum(point["profile"].values()) == pytest.approx(point["cpu_seconds"]["total"])
        assert all(50 < value < 2000 for value in point["peak_rss_mb"].values())
        for helper, processes in point["peak_rss_mb_by_process"].items():
            assert set(processes) >= {"daemon", "fork server", "opening reports"}
            assert sum(processes.values()) == pytest.approx(point["peak_rss_mb"][helper])
        # Helpers 2 and 3 get the body of 8 bytes per bucket, all three a payload of 112; headers are alike.
        assert point["bytes_per_report"]["uploaded"] > 2 * 8 * 4 + 3 * 112
        assert point["bytes_per_report"]["between helpers"] > 0
        assert point["disk_bytes"]["batch"] > point["reports"] * point["bytes_per_report"]["uploaded"] / 2
        assert len(point["disk_bytes"]) == 1 + 2 * PARTIES
        assert point["largest_error"] <= 16
    names = ("buckets", "ratios", "reports", "stages")
    wanted = [f"throughput-{name}.{suffix}" for name in names for suffix in ("pdf", "svg")]
    assert sorted(path.name for path in plots.iterdir()) == wanted
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert [(row["reports"], row["run"]) for row in rows] == [("80", "1"), ("80", "2")]
    assert "80 checked reports, 4 buckets:" in page
    assert "times the processor time of one trusted server" in " ".join(page.split())


@pytest.mark.usefixtures("quick")
def test_helpers_that_exist_are_measured_and_only_json_is_printed(tmp_path: Path) -> None:
    """In suite 2, unchecked reports beside checked ones."""
    suite, options = Suite.MLKEM768_X25519_HKDF_SHA256_AES_256_GCM, {"unchecked_histograms": True}
    with launched_helpers(tmp_path, sites={"shop.example": ["shop.example"]}, options=options, suite=suite) as running:
        named = ("--helpers", str(running.trio.helper_set_path))
        key = ("--site-key", str(running.trio.site_key_path("shop.example")))
        small = ("--reports", "20", "--buckets", "2", "--without", "naive", "--without", "ingest")
        page = invoke(*named, *key, *small, "--unchecked", "--json", "-")
        stored = json.loads(page)
        assert [(point["checked"], point["suite"]) for point in stored["points"]] == [(True, 2), (False, 2)]
        assert "speedup_over_naive_mpyc" not in stored["points"][0]["ratios"]
        done = CliRunner().invoke(app, ["bench", "throughput", *named, *key, *small, "--suite", "1"])
        assert isinstance(done.exception, TrefoilError) and done.exception.kind is ErrorKind.CONFLICTING_OPTIONS
    done = CliRunner().invoke(app, ["bench", "throughput", *named, *key, *small])
    assert isinstance(done.exception, TrefoilError) and done.exception.kind is ErrorKind.UNREACHABLE


@pytest.mark.parametrize(
    ("arguments", "kind", "datum"),
    [
        (["--reports", "0"], ErrorKind.OUT_OF_RANGE, "--reports"),
        (["--reports", "100000000"], ErrorKind.OUT_OF_RANGE, "--reports"),
        (["--buckets", "0"], ErrorKind.OUT_OF_RANGE, "--buckets"),
        (["--repeat", "1000"], ErrorKind.OUT_OF_RANGE, "--repeat"),
        (["--helpers", "helpers.json"], ErrorKind.MISSING_OPTION, "--site-key"),
        (["--json", "."], None, "--json"),
        (["--csv", "file/runs.csv"], None, "--csv"),
        (["--plot", "file"], None, "--plot"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(
    arguments: list[str], kind: ErrorKind | None, datum: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    monkeypatch.setattr(view, "measure_cell", lambda *_: pytest.fail("the work has begun"))
    done = CliRunner().invoke(app, ["bench", "throughput", *arguments])
    assert isinstance(done.exception, TrefoilError)
    assert datum in str(done.exception)
    # The console chooses the kind for files.
    assert kind in (None, done.exception.kind)


def test_what_has_no_room_on_the_disk_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    huge = Grid((Cell(10_000_000, 65_536, checked=False),))
    monkeypatch.setattr(Cell, "report_bytes", lambda _: 524_908)
    with raises(ErrorKind.NO_SPACE):
        huge.check_disk()


def test_an_estimate_counts_what_is_wanted() -> None:
    cells = cells_of([10, 5], [4], CLASSICAL, unchecked=True)
    assert [(cell.reports, cell.checked) for cell in cells] == [(5, True), (5, False), (10, True), (10, False)]
    everything, less = Grid(cells), Grid(cells, without=frozenset({Extra.NAIVE, Extra.INGEST}))
    assert everything.seconds() - less.seconds() == pytest.approx(4 * 38)
    assert "4 batches: about" in view.estimate(less)
    assert view.left_out(less) == "Left out: naive, ingest."


def opens(bare: float, trusted: float) -> dict[str, PlaintextCost]:
    """The same by the wall and by the processor; in batches at a quarter of it."""
    costs = (PlaintextCost(each, each) for each in (bare, trusted, bare / 4, trusted / 4))
    return dict(zip(YARDSTICKS, costs, strict=True))


def measured(seconds: float, cpu: Mapping[str, float] | None, size: float = 1000, bare: float = 1e-5) -> BatchRun:
    spent = dict.fromkeys(STAGES, seconds / len(STAGES))
    shown = dict.fromkeys(PROFILE, 0.1)
    sizes, memory = {"uploaded": size}, {"helper 1": 200.0}
    return BatchRun(opens(bare, 2e-5), {"total": seconds, **spent}, cpu, shown, sizes, {}, memory, {}, 0, 1.0)


def point(reports: int, buckets: int, *runs: BatchRun) -> Record:
    naive = PlaintextCost(5e-3, 6e-3)
    baselines = Baselines(PlaintextCost(3.25e-8, 3.25e-8), 2.0, 1.4, naive)
    return record_of(Cell(reports, buckets), baselines, runs)


def test_ratios_are_medians_with_ranges_and_the_middle_run_is_shown() -> None:
    found = point(1000, 128, *(measured(total, {"total": cpu}) for total, cpu in ((3, 0.1), (1, 0.08), (2, 0.09))))
    assert found["seconds"]["total"] == 2
    ratios = {name: (middle, *found["ranges"][name]) for name, middle in found["ratios"].items()}
    assert ratios["cpu_over_trusted_server"] == pytest.approx((4.5, 4.0, 5.0))
    assert ratios["cpu_over_batch_server"] == pytest.approx((18.0, 16.0, 20.0))
    assert ratios["cpu_over_three_bare_opens"] == pytest.approx((3.0, 8 / 3, 10 / 3))
    assert ratios["cpu_over_three_batch_opens"] == pytest.approx((12.0, 32 / 3, 40 / 3))
    assert ratios["speedup_over_naive_mpyc"][0] == pytest.approx(2.5)
    assert spread(found, "cpu_over_trusted_server") == "4.5 (4.0 to 5.0)"
    assert spread(found, "sum_over_plaintext") == "2.0"
    assert spread(found, "no_such_ratio") == ""


def test_helpers_that_do_not_say_what_they_used_are_left_out_with_a_word() -> None:
    found = point(1000, 128, measured(2, None))
    assert "cpu_over_trusted_server" not in found["ratios"]
    assert found["cpu_seconds"] is None
    assert "do not say what processor time" in next(view.sentences([found]))


def test_every_table_fits_eighty_columns_and_nothing_is_cut() -> None:
    """With sizes as large as they can be, and ranges."""
    cpu = [{"total": 345.6}, {"total": 1234.5}]
    points = [point(10_000_000, 65_536, *(measured(9999.9, each) for each in cpu)) for _ in range(2)]
    page = Console(width=80, record=True, file=io.StringIO())
    for table in view.tables(points):
        page.print(table)
    text = page.export_text()
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80
    # The plaintext rate in full, in every table that has it.
    assert text.count(" 30,769,231") == 2


def counters(ledger: float = 0.0, **admit: float) -> HelperCounters:
    processes = {"daemon": 2.0, "opening reports": 9.0, "fork server": 0.5}
    ledgers = {"trefoil_ledger_seconds_total": {"": ledger}, "trefoil_ledger_cpu_seconds_total": {"": 0.25}}
    return HelperCounters(
        {"trefoil_process_cpu_seconds": processes, "trefoil_admit_cpu_seconds_total": admit, **ledgers}
    )


def test_stages_are_those_of_the_slowest_helper_and_add_up() -> None:
    used = Counters((counters(0.1, check=1.0, open=6.0), counters(0.3, open=3.0, expand=1.0), counters(0.2, open=9.0)))
    quick = {QueryState.ADMITTING: 1.0}
    slow = {
        QueryState.ADMITTING: 4.0,
        QueryState.AGREEING: 0.9,
        QueryState.COMPUTING: 0.2,
        QueryState.VOTING: 0.05,
    }
    found = timeline(7.0, 1.0, 0.01, {0: quick, 1: slow, 2: quick}, used)
    assert list(found) == list(STAGES)
    assert found["open"] == pytest.approx(3.0)
    assert found["expand"] == pytest.approx(1.0)
    assert found["ledger"] == 0.3
    assert found["agreement"] == pytest.approx(0.6)
    assert sum(found.values()) == pytest.approx(7.0)
    # It began while others still received their columns: those seconds are not counted twice.
    early = timeline(5.5, 1.0, 0.01, {0: quick, 1: slow, 2: quick}, used)
    assert early["transfer"] == pytest.approx(0.34)
    assert sum(early.values()) == pytest.approx(5.5)
    # On a busy machine the querier may have begun to count later than the helper.
    late = timeline(3.0, 0.5, 0.01, {0: quick, 1: slow, 2: quick}, used)
    assert min(late.values()) >= 0 and sum(late.values()) == pytest.approx(3.0)


def test_the_profile_adds_up_to_all_that_was_used() -> None:
    used = Counters((counters(0.1, open=6.0, sum=1.0),) * 3)
    received = Counters((HelperCounters({"trefoil_process_cpu_seconds": {"daemon": 0.75}}),) * 3)
    found = profile(used, received)
    assert found is not None
    assert found["receive"] == pytest.approx(3 * 0.75)
    assert found["chunks"] == pytest.approx(3 * 2.0)
    assert found["agree"] == pytest.approx(3 * (2.0 - 0.75 - 0.25))
    assert sum(found.values()) == pytest.approx(used.cpu_seconds)
    silent = Counters((HelperCounters({}),) * 3)
    assert profile(silent, received) is None


def test_counters_are_read_from_a_metrics_page() -> None:
    metrics = Metrics()
    count_processes(metrics)
    metrics.counter("trefoil_admit_cpu_seconds_total", "by part", part=["open"])(1.5, part="open")
    metrics.counted("trefoil_peer_bytes_total", "bytes", lambda: {(): 12})
    metrics.value("trefoil_ledger_bytes", "bytes", lambda: 400)
    metrics.value("trefoil_ledger_log_bytes", "bytes", lambda: 90)
    metrics.value("trefoil_open_lanes", "lanes", lambda: 8)
    found = HelperCounters.parse(metrics.render())
    assert found.processes["daemon"] > 0
    assert 5 < found.peaks_mb["daemon"] < 5000
    assert found.admit == {"open": 1.5}
    assert [found.one(name) for name in ("peer_bytes_total", "ledger_bytes", "ledger_log_bytes")] == [12, 400, 90]
    assert HelperCounters.parse("# an older helper\n").cpu_seconds is None
    assert found.since(found).one("peer_bytes_total") == 0
    assert (found.one("open_lanes"), found.since(found).one("open_lanes")) == (8, 8)
    assert Counters((HelperCounters({}), found)).open_lanes == 1


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
        # /proc counts in ticks, cut off in each of four counters: user and system time, own and of ended children.
        assert used.cpu_seconds["daemon"] >= 0.4 - 4 / os.sysconf("SC_CLK_TCK")
        assert sum(used.peaks_mb.values()) > 1
    finally:
        process.kill()
        process.communicate()


def test_processes_below_children_are_found() -> None:
    family = subprocess.Popen(["sh", "-c", "sleep 30 & echo $!; wait"], stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert family.stdout is not None
        grandchild = int(family.stdout.readline())
        assert service_processes._tree(family.pid) == [family.pid, grandchild]
    finally:
        os.killpg(family.pid, signal.SIGKILL)
        family.communicate()


def test_costs_are_per_report_and_sustained_ones_the_mean_of_all_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock of our own: the first round takes 6 s, the others 2, over 4 reports each."""
    now = [0.0]
    monkeypatch.setattr("benchmarks.throughput.baselines.time.perf_counter", lambda: now[0])
    monkeypatch.setattr("benchmarks.throughput.baselines.time.process_time", lambda: now[0] / 2)

    def work() -> None:
        now[0] += 2.0 if now[0] else 6.0

    assert baselines.sustain(work, 4, 14) == PlaintextCost(14 / 20, 7 / 20)
    now[0] = 0.0
    assert baselines.measure(work, 4, rounds=3) == PlaintextCost(2 / 4, 1 / 4)
    assert PlaintextCost.mean([PlaintextCost(1, 2), PlaintextCost(3, 6)]) == PlaintextCost(2, 4)


@pytest.mark.usefixtures("quick")
def test_the_naive_program_runs() -> None:
    """Three MPyC processes; all of them together use more processor time than one does."""
    found = baselines.measure_naive(4)
    assert found.seconds > 0 < found.cpu_seconds


def test_a_baseline_program_that_fails_says_so() -> None:
    def run(program: str) -> dict[str, float]:
        return baselines._run([sys.executable, "-c", program], {}, 30.0, "the program")

    with raises(ErrorKind.UNAVAILABLE, TrefoilError) as caught:
        run("import no_such_module")
    assert "ModuleNotFoundError" in str(caught.value)
    with raises(ErrorKind.MALFORMED):
        run("pass")
    with raises(ErrorKind.TIMEOUT):
        baselines._run([sys.executable, "-c", "import time; time.sleep(9)"], {}, 0.01, "the program")
    answer = {"seconds": 2.0, "cpu_seconds": 3.0}
    assert run(f"print('noise'); print({json.dumps(json.dumps(answer))})") == answer


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
    with raises(ErrorKind.FILE_EXISTS):
        make_batch(tmp_path / "first", workload, samples.HELPER_SET, progress=done.append)
    with raises(ErrorKind.TOO_FEW):
        Workload(workload.terms, 0, 1)

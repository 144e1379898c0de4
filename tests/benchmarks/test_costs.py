"""`trefoil bench report` and `trefoil bench noise`: the fields they promise, and what they count."""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks.costs import ledger_cost, noise_cost, report_cost
from mpc_helpers.mpc.joint import circuit
from mpc_helpers.mpc.noise import MAX_SCALE
from mpc_helpers.mpc.noisy_sum import SumTerms
from protocol.batch import ColumnReader
from protocol.cli.app import app
from protocol.errors import ErrorKind, TrefoilError
from protocol.hpke import POST_QUANTUM
from protocol.joint_scale import JointScale
from protocol.noise import NoiseMode
from tests.support import protocol_samples as samples


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, float]]]:
    path = tmp_path_factory.mktemp("bench") / "report.json"
    arguments = ["bench", "report", "--buckets", "16", "--buckets", "40", "--rounds", "1", "--json", str(path)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report_cost, "_WHOLE_CHUNK", 20)
        shown = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert shown.exit_code == 0
    assert "Bytes per report" in shown.output
    content: dict[str, list[dict[str, float]]] = json.loads(path.read_text())
    return content


def test_every_entry_stands_on_its_own(results: dict[str, list[dict[str, float]]]) -> None:
    assert [entry["buckets"] for entry in results["reports"]] == [16, 40]
    for entry in results["reports"]:
        assert {"bytes_total", "seal_over_bare", "open_over_bare", "over_unchecked"} <= set(entry)
        assert entry["seal_over_bare"] > 0
        assert entry["open_over_bare"] > 0


def test_bytes_are_those_of_a_report(results: dict[str, list[dict[str, float]]]) -> None:
    for entry in results["reports"]:
        buckets = int(entry["buckets"])
        terms = samples.terms(buckets=buckets, unit="count", sensitivity=2 * report_cost.CAP)
        checked = replace(terms, cap=report_cost.CAP, spread=1)
        over: Any = entry["over_unchecked"]
        assert over["unchecked_bytes"] == len(samples.report("size", None, terms).encode())
        assert entry["bytes_total"] == len(samples.report("size", None, checked).encode())
        assert entry["bytes_body"] == 8 * checked.shape.explicit
        assert over["bytes"] == entry["bytes_total"] / over["unchecked_bytes"]
        assert len(over["ingest"]) == 3
        assert over["seal_full"] > 0
        # 16 bytes for each of 10 planes and 31 coins, and 10 for cap and spread: the design's figure.
        assert entry["bytes_total"] - over["unchecked_bytes"] == 10 + 16 * (10 + 31)


def test_reports_of_the_other_suite_have_longer_payloads() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report_cost, "_WHOLE_CHUNK", 4)
        patch.setattr(report_cost, "_SEALS_PER_ROUND", 1)
        cost = report_cost.measure_report(16, 1, POST_QUANTUM)
    assert (cost["suite"], cost["bytes_payloads"]) == (2, 3 * 1_200)


def test_figures_for_prio3_are_given_only_where_the_design_has_them(
    results: dict[str, list[dict[str, float]]],
) -> None:
    assert [entry["prio3_histogram_bytes"] for entry in results["reports"]] == [720, None]
    assert report_cost.PRIO3_HISTOGRAM_BYTES[128] == 2992


def test_the_best_round_counts() -> None:
    calls: list[int] = []
    best = report_cost.best_of([lambda: calls.append(0), lambda: calls.append(1)], 3)
    assert calls == [0, 1, 0, 1, 0, 1]
    assert all(0 <= one < float("inf") for one in best)


def test_a_refused_report_stops_the_measurement(tmp_path: Path) -> None:
    """Times of a chunk that was not opened would flatter us."""
    paths = samples.write_columns(tmp_path, [samples.report("one")])
    column = ColumnReader(paths[0])
    stricter = samples.query(batch_size=1, epsilon_micros=2_000_000)
    with pytest.raises(RuntimeError, match="was refused"):
        report_cost._whole_ingest(column, samples.rules(0, stricter))()


def terms(mode: NoiseMode, buckets: int, scale: int = 20) -> SumTerms:
    return noise_cost.terms_of(mode, buckets, scale)


def test_rounds_are_those_of_the_protocol() -> None:
    """Dealing is one message, commit and open are two; joint noise has a layer of gates each, and four more."""
    depth = circuit.build(JointScale.of(Fraction(1, 2), 2)).depth
    found = {mode: noise_cost.count_rounds(terms(mode, 8, 2)) for mode in NoiseMode}
    assert found == {NoiseMode.LOCAL: 1, NoiseMode.PAIRWISE: 2, NoiseMode.JOINT: depth + 4}


def test_bytes_grow_with_buckets_in_local_mode_and_hardly_in_pairwise() -> None:
    """A dealt vector travels in local mode; pairwise noise is drawn from keys that both have."""
    sizes = {
        (mode, buckets): noise_cost.count_bytes(terms(mode, buckets, 2)) for mode in NoiseMode for buckets in (8, 264)
    }
    dealt = 2 * 256 * 8
    assert sizes[NoiseMode.LOCAL, 264] - sizes[NoiseMode.LOCAL, 8] >= dealt
    assert sizes[NoiseMode.PAIRWISE, 264] - sizes[NoiseMode.PAIRWISE, 8] < dealt / 4
    layout = terms(NoiseMode.JOINT, 264, 2).layout
    received = sum(layout.message_sizes(0)[2].values()) + sum(layout.message_sizes(1)[2].values())
    # What party 2 sends, beside a frame's kind and step, the greeting, the key and the end.
    assert 0 < sizes[NoiseMode.JOINT, 264] - received < 300


def test_what_helpers_would_refuse_is_left_out() -> None:
    """What is too large depends on the buckets in `joint`, and on the scale alone in the other two."""
    wanted = noise_cost.possible([16, 2**16], [1, MAX_SCALE, 2 * MAX_SCALE])
    assert [(mode.value, found.buckets, int(1 / found.rate)) for mode, found in wanted] == [
        ("local", 16, 1),
        ("pairwise", 16, 1),
        ("joint", 16, 1),
        ("local", 65536, 1),
        ("pairwise", 65536, 1),
        ("joint", 65536, 1),
        ("local", 16, MAX_SCALE),
        ("pairwise", 16, MAX_SCALE),
        ("joint", 16, MAX_SCALE),
        ("local", 65536, MAX_SCALE),
        ("pairwise", 65536, MAX_SCALE),
        ("joint", 16, 2 * MAX_SCALE),
    ]


def test_the_command_and_its_json(tmp_path: Path) -> None:
    target = tmp_path / "noise.json"
    command = ["bench", "noise", "--buckets", "4", "--scale", "10", "--repeats", "1", "--json", str(target)]
    done = CliRunner().invoke(app, command, catch_exceptions=False)
    assert done.exit_code == 0
    local, pairwise, joint = json.loads(target.read_text())["noise"]
    for cost, mode in zip((local, pairwise, joint), NoiseMode, strict=True):
        assert (cost["mode"], cost["buckets"], cost["scale"]) == (mode.value, 4, 10)
        assert cost["session_cpu_seconds"] > 0 and cost["wall_seconds"] > 0 and cost["bytes"] > 0
    assert [cost["variance_over_laplace"] for cost in (local, pairwise)] == pytest.approx([1.5, 3])
    assert 1 <= joint["variance_over_laplace"] < 1.0075
    assert joint["half_width_95"] < local["half_width_95"] < pairwise["half_width_95"]
    assert local["delta"] == pairwise["delta"] == 0 < joint["delta"] < 2**-52


def test_a_ledger_is_measured_at_each_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "ledger.json"
    monkeypatch.setattr(ledger_cost, "BATCH", 400)
    command = ["bench", "ledger", "--rows", "8000", "--rows", "12000", "--parts", "--json", str(target)]
    done = CliRunner().invoke(app, command, catch_exceptions=False)
    assert done.exit_code == 0
    small, large = json.loads(target.read_text())["ledgers"]
    assert (small["rows"], large["rows"], small["engine"]) == (8_000, 12_000, "SQLite")
    assert min(small["lookup_cpu_us"], small["reserve_cpu_us"], small["further_cpu_us"]) > 0
    # A day has a page at least, which is much for so few reports.
    assert 40 < large["bytes_per_report"] < small["bytes_per_report"] < 1000
    # One day of thirty, or a little more: batches overlap.
    assert small["forgotten_rows"] == 0 < large["forgotten_rows"] < 12_000 / 8


def test_a_size_that_no_mode_takes_says_so() -> None:
    done = CliRunner().invoke(app, ["bench", "noise", "--buckets", "65536", "--scale", str(2 * MAX_SCALE)])
    assert isinstance(done.exception, TrefoilError) and done.exception.kind is ErrorKind.TOO_LARGE

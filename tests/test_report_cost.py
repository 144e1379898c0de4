"""`trefoil bench report`: the fields it promises, and the bytes it counts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks.bench import report_cost
from benchmarks.commands import app
from protocol.batch import ColumnReader
from protocol.hpke import POST_QUANTUM
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
    assert (cost.suite, cost.bytes_payloads) == (2, 3 * 1_200)


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


def test_expanders_are_compared_at_every_size(results: dict[str, list[dict[str, float]]]) -> None:
    assert [entry["buckets"] for entry in results["expanders"]] == [16, 40]
    for entry in results["expanders"]:
        assert min(entry["shake128_us"], entry["aes_ctr_cipher_us"], entry["aes_gcm_one_shot_us"]) > 0


def test_a_refused_report_stops_the_measurement(tmp_path: Path) -> None:
    """Times of a chunk that was not opened would flatter us."""
    paths = samples.write_columns(tmp_path, [samples.report("one")])
    column = ColumnReader(paths[0])
    stricter = samples.query(batch_size=1, epsilon_micros=2_000_000)
    with pytest.raises(RuntimeError, match="was refused"):
        report_cost._whole_ingest(column, samples.rules(0, stricter))()

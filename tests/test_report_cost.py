"""`trefoil bench report`: the fields it promises, and the bytes it counts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.bench import report_cost
from benchmarks.commands import app
from protocol.batch import ColumnReader
from tests.support import protocol_samples as samples


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, float]]]:
    path = tmp_path_factory.mktemp("bench") / "report.json"
    arguments = ["bench", "report", "--buckets", "16", "--buckets", "40", "--rounds", "1", "--json", str(path)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report_cost, "_MOST_REPORTS", 20)
        shown = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert shown.exit_code == 0
    assert "Bytes per report" in shown.output
    content: dict[str, list[dict[str, float]]] = json.loads(path.read_text())
    return content


def test_every_entry_stands_on_its_own(results: dict[str, list[dict[str, float]]]) -> None:
    assert [entry["buckets"] for entry in results["reports"]] == [16, 40]
    for entry in results["reports"]:
        assert {"bytes_total", "seal_over_bare", "open_over_bare"} <= set(entry)
        assert entry["seal_over_bare"] > 0
        assert entry["open_over_bare"] > 0


def test_bytes_are_those_of_a_report(results: dict[str, list[dict[str, float]]]) -> None:
    for entry in results["reports"]:
        buckets = int(entry["buckets"])
        terms = samples.terms(buckets=buckets, unit="count")
        assert entry["bytes_total"] == len(samples.report("size", None, terms).encode())
        assert entry["bytes_body"] == 8 * buckets


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

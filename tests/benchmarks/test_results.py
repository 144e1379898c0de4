"""Result files name their origin, and documents quote them: tables are rendered, and figures in prose are compared."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from benchmarks.results import origin, tables
from benchmarks.results.origin import RESULTS, ROOT, stored
from benchmarks.throughput.point import spread
from benchmarks.workloads.reports import MAX_VALUE, Workload
from protocol.errors import ErrorKind
from protocol.querier.result import CONFIDENCE
from protocol.shares import PARTIES
from protocol.units import MICROS
from tests.support import protocol_samples as samples
from tests.support.raising import raises

PAGE = (ROOT / "benchmarks" / "RESULTS.md").read_text()
WALK_OPTIONS = ("epsilon", "kappa", "skew", "flagged")
FRONT = (ROOT / "README.md").read_text()


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_every_stored_result_says_where_it_comes_from(path: Path) -> None:
    stored = json.loads(path.read_text())
    assert [field for field in origin.FIELDS if field not in stored] == []
    assert stored["command"].startswith(("trefoil ", "make "))
    assert {"processor", "cores", "python"} <= set(stored["machine"])
    assert stored["date"].startswith("20")
    assert not stored["commit"].endswith("dirty"), "recorded from files that no commit has"


def test_what_is_written_names_its_command_code_machine_and_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/trefoil", "bench", "report", "--json", "a file.json"])
    monkeypatch.setenv(origin.STARTED_BY, "a script")
    target = tmp_path / "result.json"
    origin.write_results(target, {"reports": [1]}, seed=7)
    stored = json.loads(target.read_text())
    assert set(stored) == {*origin.FIELDS, "reports", "started_by"}
    assert stored["started_by"] == "a script"
    assert stored["command"] == "trefoil bench report --json 'a file.json'"
    assert stored["seed"] == 7
    assert stored["machine"]["cores"] >= 1


def test_without_a_file_nothing_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    origin.write_results(None, {"reports": [1]})
    assert capsys.readouterr().out == ""


def test_every_result_can_be_made_again_by_what_it_names() -> None:
    """Each command once, into the file that names it; a script that prepared it is what is run."""
    commands = list(origin.commands())
    written = [command[-1] for command in commands if command[0] != "make"]
    assert len(set(map(tuple, commands))) == len(commands)
    assert len(set(written)) == len(written)
    for path in sorted(RESULTS.glob("*.json")):
        file = json.loads(path.read_text())
        exempt = file["command"].startswith("make ") or "retired" in file
        assert exempt or f"benchmarks/results/{path.name}" in written
    assert all(command.count("--json") == (command[0] != "make") for command in commands)
    scripts = [command[0] for command in commands if command[0] not in ("trefoil", "make")]
    assert all((RESULTS.parent.parent / script).exists() for script in scripts)


def test_every_table_stands_in_one_document_as_the_files_have_it() -> None:
    """`trefoil bench results --write` renews them."""
    assert list(tables.differing()) == []
    text = "".join(path.read_text() for path in tables.DOCUMENTS)
    assert all(text.count(f"<!-- results: {name} -->") == 1 for name in tables.TABLES)


def test_a_figure_that_is_changed_in_a_document_is_noticed_and_put_right() -> None:
    for path in tables.DOCUMENTS:
        text = path.read_text()
        digit = re.search(r"results: \w+ -->[^<]*?(\d)", text)
        assert digit is not None
        wrong = text[: digit.start(1)] + str((int(digit[1]) + 1) % 10) + text[digit.end(1) :]
        assert tables.renewed(wrong) == text
    with raises(ErrorKind.UNKNOWN_NAME):
        tables.renewed("<!-- results: nothing -->\n<!-- end -->")


def test_a_day_is_computed_from_the_largest_point(monkeypatch: pytest.MonkeyPatch) -> None:
    ledgers = {f"helper {number}'s ledger": size for number, size in enumerate((4.7e8, 4.8e8, 4.6e8), 1)}
    disk = {"batch": 1.4e10, **ledgers, **{f"helper {number}'s log": 1e7 for number in (1, 2, 3)}}
    point: dict[str, Any] = {
        "reports": 10**7,
        "buckets": 16,
        "checked": True,
        "cpu_seconds": {"total": 2_400.0},
        "bytes_per_report": {"uploaded": 1_500.0},
        "disk_bytes": disk,
    }
    monkeypatch.setattr(tables, "points", lambda: [{**point, "reports": 10**4, "disk_bytes": {}}, point])
    assert tables.ledger_bytes() == 47
    # 80 µs a report and helper, a third of 1.5 kB, and 47 bytes for thirty days.
    assert "| 1 billion | 22 hours | 0.93 | 500.0 GB | 1.4 TB |" in tables.day(tables.largest(16))


def test_a_sweep_says_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = {"mode": "joint", "buckets": 16, "scale": 2**20, "cpu_seconds": 1.2345, "bytes": 7000, "rounds": 11}
    local = {**cell, "mode": "local", "scale": 100, "cpu_seconds": 0.003}
    monkeypatch.setattr(tables, "stored", lambda _: {"noise": [cell, local]})
    text = tables.TABLES["noise_sweep"]()
    for line in ("| 100 | 3 · – · – |", "| 2^20 | – · – · 1,234 |", "| 100 |  | – |", "| 2^20 | 11 | 7,000 |"):
        assert line in text


def throughput_sentences() -> Iterator[str]:
    """What RESULTS.md and README.md say of throughput."""
    points, quoted = tables.points(), tables.largest(128)
    over = [point["ratios"]["cpu_over_three_bare_opens"] for point in points]
    yield f"{min(over):.1f} to {max(over):.1f} times three bare opens by the library"
    sums = [point["ratios"]["sum_over_plaintext"] for point in points]
    yield f"Summing shares takes {min(sums):.1f} to {max(sums):.1f} times"
    ledger = [1e6 * point["seconds"]["ledger"] / point["reports"] for point in points]
    # In a batch so small that it is agreed on between two looks at the clock, nothing was seen of the ledger.
    ledger = [seconds for seconds in ledger if seconds]
    yield f"The ledger takes {min(ledger):.0f} to {max(ledger):.0f} µs"
    cpu = quoted["cpu_seconds"]["total"]
    yield f"{cpu:.1f} processor seconds, or {1e3 * cpu / quoted['reports'] / PARTIES:.2f} ms per report and helper"
    sent = quoted["bytes_per_report"]
    yield f"Uploads are {sent['uploaded'] / 1e3:.1f} kB per report in all"
    yield f"each other {sent['between helpers']:.0f} bytes per report"
    yield f"A report took {tables.ledger_bytes():.0f} bytes in a ledger"
    small = [point for point in points if point["buckets"] == 16]
    for point in (small[0], max(small, key=lambda point: int(point["reports"]))):
        yield f"{max(point['peak_rss_mb'].values()):.0f} MB at {point['reports']:,}"
    most, network = tables.largest(16), stored("networks")["points"][0]
    yield f"was answered in {tables.duration(most['seconds']['total'])}"
    yield f"each ledger grew by {tables.size(max(tables.growth('ledger', most)))} with its log"
    opened = sum(network["profile"][part] for part in ("check", "open", "expand", "sum", "residues"))
    yield f"{tables.percent(opened / network['cpu_seconds']['total'])} of it to open and check reports"
    for point in (quoted, most, network):
        yield f"{spread(point, 'cpu_over_trusted_server')} times the processor time of one trusted server"
    if "cpu_over_batch_server" in quoted["ratios"]:
        yield f"{spread(quoted, 'cpu_over_batch_server')} times that of one that opens in the same batches"
    yield f"{quoted['reports_per_second']['trefoil']:,.0f} reports a second"
    yield f"{quoted['ratios']['speedup_over_naive_mpyc']:.0f} times a naive MPyC program"
    yield f"A report has {stored('report')['reports'][1]['bytes_total']:,} bytes"


def coins(run: Mapping[str, Any]) -> tuple[int, int]:
    """Return how many questions are no better than a coin when first asked, and when the others were asked again."""
    first = sum(answer["is_a_coin"] for text, answer in run["watching"].items() if "control" not in text)
    return first, first + sum(answer["is_a_coin"] for answer in run["watching_again"].values())


def other_sentences() -> Iterator[str]:
    """What they say of devices, a publisher's model, strangers and the collector."""
    device, load, strangers = stored("device-timing"), stored("collector-load"), stored("strangers-load")
    yield f"{device['ratio_100_to_10']:.2f} times as long"
    yield f"{device['median_ms']['100']:.1f} ms to measure a conversion"
    busy = stored("device-timing-busy")
    (first, both), (busy_first, busy_both) = coins(device), coins(busy)
    yield f"{first} of the {device['questions']} questions were no better than a coin when first asked"
    yield f"beside ten busy loops {busy_first}"
    yield f"once the others were asked again, {both} and {busy_both}"
    report = busy["watching"]["a conversion: another site calls, or none"]
    yield f"by an area of {report['area']:.3f}, {report['bits']:.4f} bit a call"
    charges = stored("regression-charges")["charges"]
    once = next(row for row in charges if (row["sampled"], row["epsilon"], row["models"]) == (True, 0.3, 1))
    paid = [fmean(seed[name] for seed in once["seeds"]) for name in ("trefoil", "ara_like", "ipa_like")]
    yield f"pays {paid[0]:.4f} on average on real devices, {paid[1]:.3f} if every"
    yield f"and {paid[2]:.3f} if everyone"
    yield f"{load['clients']} clients posted {load['reports']:,} reports and {load['refused']:,} of another site"
    yield f"killed {load['kills']} times"
    yield f"{load['posts']:,} posts"
    yield f"{strangers['answered']} were answered, the slowest in {strangers['longest_query_seconds']} s"
    before, during = (max(strangers[f"daemon_memory_{when}_mb"]) for when in ("before", "during"))
    yield f"from {before} to {during} MB"
    yield f"grew by {round(strangers['log_bytes_of_three'] / 1000)} kB"


def test_figures_in_prose_are_those_of_the_files() -> None:
    text = " ".join((PAGE + FRONT).replace("**", "").split())
    assert [said for said in (*throughput_sentences(), *other_sentences()) if said not in text] == []
    load, strangers = stored("collector-load"), stored("strangers-load")
    assert (load["lost"], load["stored_twice"], load["stored"]) == (0, 0, load["reports"])
    assert strangers["answered"] == strangers["queries"] == 20
    assert strangers["connections_made"] == 3 * strangers["strangers_at_each_helper"]


def test_what_the_walk_of_the_front_page_says_of_its_crowd_is_so() -> None:
    """The seeded crowd's sum in bucket 3, and how far off the noise of that query may be."""
    reports = next(line for line in FRONT.splitlines() if line.startswith("$ trefoil reports"))
    options = reports.split()
    epsilon, kappa, skew, flagged = (float(options[options.index(f"--{name}") + 1]) for name in WALK_OPTIONS)
    terms = replace(samples.terms(buckets=16), epsilon_micros=round(epsilon * MICROS), sensitivity=2 * MAX_VALUE)
    crowd = Workload(replace(terms, kappa=int(kappa)), 5000, 1, skew, flagged).truth()[3]
    asked = replace(samples.query(), epsilon_micros=round(epsilon * MICROS), sensitivity=10, kappa=int(kappa))
    half = asked.noise_scale.half_width(CONFIDENCE)
    assert f"the crowd has {crowd:,} and Alice 5: the answer is within {half} of {crowd + 5:,} with" in " ".join(
        FRONT.split()
    )

"""The tables of benchmarks/RESULTS.md are those of the files in benchmarks/results, rounded. A failure prints them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from statistics import fmean
from typing import Any

import pytest

from benchmarks import cost_tables, results_page
from benchmarks.bench.device_page import front_line, section
from benchmarks.bulk_reports import MAX_VALUE, Workload
from benchmarks.result_files import ROOT, stored
from protocol.epsilon import MICROS
from protocol.errors import TrefoilError
from protocol.noise_scale import NoiseScale
from protocol.querier.worth import CONFIDENCE
from tests.support import protocol_samples as samples

PAGE = (ROOT / "benchmarks" / "RESULTS.md").read_text()
WALK_OPTIONS = ("epsilon", "kappa", "skew", "flagged")
FRONT = (ROOT / "README.md").read_text()


ATTACKS = {
    "silent": "nothing after the handshake",
    "half_a_header": "half a header",
    "a_byte_of_much": "one byte of a large body",
    "all_but_the_last_byte": "all but the last byte of a megabyte",
    "endless_pieces": "pieces without end",
    "ten_gigabytes": "a length of ten gigabytes",
    "bomb": "16 MiB packed into 16 kB",
    "deep_path": "addresses of thousands of characters",
    "long_headers": "a quarter of a megabyte of headers",
}


def hostile_table() -> Iterator[str]:
    yield "| what each stranger sends | open files | memory, peak | disk | tries of the honest client |"
    yield "|---|---|---|---|---|"
    for name, found in stored("collector-hostile")["attacks"].items():
        yield (
            f"| {ATTACKS[name]} | {found['descriptors']} | {found['peak_mb']:.0f} MB "
            f"| {found['disk_mb']:.2f} MB | {found['honest_tries']} |"
        )


def model_files() -> list[Any]:
    names = ("regression-2k-modes", "regression-20k-modes", "regression-100k-modes")
    return [stored(name) for name in names]


MODEL_COLUMNS = [
    *(("local", epsilon) for epsilon in (0.1, 0.3, 1.0, 3.0)),
    *(("pairwise", epsilon) for epsilon in (0.3, 1.0)),
    *(("joint", epsilon) for epsilon in (0.1, 0.3, 1.0)),
]


def area(seeds: list[Any]) -> str:
    fitted = sum(seed["fitted"] for seed in seeds)
    shown = f"{fmean(seed['auc'] for seed in seeds):.3f}"
    return shown if fitted == len(seeds) else f"{shown} ({fitted}/{len(seeds)})"


def model_table() -> Iterator[str]:
    heads = [f"`{mode}` {epsilon:g}" for mode, epsilon in MODEL_COLUMNS]
    yield f"| reports | columns | best possible | no noise | {' | '.join(heads)} |"
    yield "|---" * (4 + len(heads)) + "|"
    for found in model_files():
        cells = {(cell["columns"], cell["noise"], cell["epsilon"]): cell for cell in found["scores"]}
        for columns in (8, 16, 64):
            clear = cells[columns, "none", 0.0]
            assert len(clear["seeds"]) >= 8
            best = f"{fmean(seed['best_auc'] for seed in clear['seeds']):.3f}"
            areas = [area(cells[columns, mode, epsilon]["seeds"]) for mode, epsilon in MODEL_COLUMNS]
            yield f"| {clear['reports']:,} | {columns} | {best} | {area(clear['seeds'])} | {' | '.join(areas)} |"


def lost_table() -> Iterator[str]:
    yield "| columns | lost | how | rate | slope, device's own field | slope, other fields | AUC | of all labels |"
    yield "|---|---|---|---|---|---|---|---|"
    for row in stored("regression-20k-modes")["lost"]:
        seeds = row["seeds"]
        lost, all_of_them = (fmean(seed[name] for seed in seeds) for name in ("lost", "auc"))
        for name, how in (("by_budget", "by budget"), ("at_random", "at random")):
            rate, own, other, auc = (
                fmean(seed[name][part] for seed in seeds) for part in ("rate", "own_slope", "other_slope", "auc")
            )
            numbers = f"{rate:.3f} | {own:.3f} | {other:.3f} | {auc:.3f} | {all_of_them:.3f}"
            yield f"| {row['columns']} | {lost:.0%} | {how} | {numbers} |".replace("%", " %")


def helpers_table() -> Iterator[str]:
    yield "| mode | counted | deviation promised | measured | AUC | best possible |"
    yield "|---|---|---|---|---|---|"
    for fit in stored("regression-helpers")["fits"]:
        deviations = f"{fit['noise_sd']:.1f} | {fit['noise_rms']:.1f}"
        yield f"| `{fit['noise']}` | {fit['counted']:,} | {deviations} | {fit['auc']:.3f} | {fit['best_auc']:.3f} |"


def expect(table: Iterator[str]) -> None:
    text = "\n".join(table)
    assert text in PAGE, f"RESULTS.md should have:\n{text}"


def test_the_parts_that_a_command_makes_are_those_of_the_files() -> None:
    """`trefoil bench results --write` renews them."""
    assert results_page.differing() == []


def test_every_part_stands_in_some_document() -> None:
    text = "".join(path.read_text() for path in results_page.DOCUMENTS)
    assert all(text.count(f"<!-- results: {name} -->") == 1 for name in results_page.PARTS)


def test_a_figure_that_is_changed_in_a_document_is_noticed_and_put_right() -> None:
    for path in results_page.DOCUMENTS:
        text = path.read_text()
        found = re.search(r"results: \w+ -->[^<]*?(\d)", text)
        assert found is not None
        wrong = text[: found.start(1)] + str((int(found[1]) + 1) % 10) + text[found.end(1) :]
        assert results_page.renewed(wrong) == text
    with pytest.raises(TrefoilError, match="no part of results"):
        results_page.renewed("<!-- results: nothing --><!-- end -->")


def largest_batch(**more: object) -> dict[str, Any]:
    """A point of ten million as `trefoil bench throughput` writes it, as far as the part reads it."""
    return {
        "reports": 10**7,
        "buckets": 16,
        "checked": True,
        "seconds": {"total": 3_000.0},
        "cpu_seconds": {"total": 2_400.0},
        "reports_per_second": {"trefoil": 3_333.3},
        "bytes_per_report": {"uploaded": 1_500.0, "between helpers": 3.0},
        "ratios": {"cpu_over_trusted_server": 4.2},
        "peak_rss_mb": {"helper 1": 300.0, "helper 2": 310.0},
        **more,
    }


def test_a_batch_of_ten_million_is_shown_and_says_what_a_ledger_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    ledgers = {"helper 1's ledger": 4.7e8, "helper 2's ledger": 4.8e8, "helper 3's ledger": 4.6e8}
    disk = {"batch": 1.4e10, **ledgers, **{f"helper {number}'s log": 1e7 for number in (1, 2, 3)}}
    smaller = {**largest_batch(disk_bytes={"batch": 1.0, "helper 1's ledger": 9e9}), "reports": 10**4}
    monkeypatch.setattr(results_page, "points", lambda: [smaller, largest_batch(disk_bytes=disk)])
    assert results_page.ledger_bytes() == 47
    text = "\n".join(results_page.ten_million_part())
    assert "answered in 50.0 minutes" in text and "held 310 MB" in text
    assert "has 14.0 GB on disk, and each ledger grew by 0.5 GB with its log: 48 bytes a report" in text
    # 80 µs a report and helper, a third of 1.5 kB, and 47 bytes for thirty days.
    assert "| 1 billion | 22 hours | 0.93 | 500.0 GB | 1.4 TB |" in text


def test_what_the_aim_leaves_beside_the_opens() -> None:
    point = {**largest_batch(), "yardstick": {"trusted server": 60e-6, "bare open": 50e-6}}
    (said,) = results_page._against_aim(point)
    # 3.4 · 60 = 204 µs for three opens of 50 and three helpers; 2,400 s are 240 µs a report.
    assert "seen is 4.2." in said and "a helper 18 µs a report beside its bare open, and it takes 30." in said


def test_a_sweep_says_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = {"mode": "joint", "buckets": 16, "scale": 2**20, "cpu_seconds": 1.2345, "bytes": 7000, "rounds": 11}
    local = {**cell, "mode": "local", "scale": 100, "cpu_seconds": 0.003}
    monkeypatch.setattr(cost_tables, "stored", lambda _: {"noise": [cell, local]})
    lines = list(cost_tables.noise_sweep_part())
    assert "| 100 | 3 · – · – |" in lines and "| 2^20 | – · – · 1,234 |" in lines
    assert "| 100 |  | – |" in lines and "| 2^20 | 11 | 7,000 |" in lines


def test_files_without_sizes_on_disk_do_not_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results_page, "points", lambda: [largest_batch()])
    assert results_page.ledger_bytes() == results_page.USUAL_LEDGER_BYTES
    assert "on disk" not in "\n".join(results_page.ten_million_part())
    monkeypatch.setattr(results_page, "points", list)
    assert "not recorded yet" in "\n".join(results_page.ten_million_part())


def test_helpers_among_strangers() -> None:
    load = stored("strangers-load")
    assert load["answered"] == load["queries"] == 20
    assert load["connections_made"] == 3 * load["strangers_at_each_helper"]
    before, during = max(load["daemon_memory_before_mb"]), max(load["daemon_memory_during_mb"])
    assert f"{load['answered']} were answered, the slowest in {load['longest_query_seconds']} s" in PAGE
    assert f"from {before} to {during} MB" in PAGE
    assert f"grew by {round(load['log_bytes_of_three'] / 1000)} kB" in PAGE


def test_what_is_said_of_a_device_is_what_its_file_says() -> None:
    """To renew both: python -m benchmarks.bench.device_page"""
    assert section(stored("device")) in PAGE
    assert front_line(stored("device")) in FRONT


def test_the_figures_of_the_collector_are_those_of_the_files() -> None:
    expect(hostile_table())
    load = stored("collector-load")
    assert (load["lost"], load["stored_twice"], load["stored"]) == (0, 0, load["reports"])
    said = f"{load['clients']} clients posted {load['reports']:,} reports and {load['refused']:,} of another site"
    assert said in PAGE and f"killed {load['kills']} times" in PAGE and f"{load['posts']:,} posts" in PAGE


def test_the_tables_of_a_publishers_model_are_those_of_the_files() -> None:
    expect(model_table())
    expect(lost_table())
    expect(helpers_table())


def test_what_the_text_says_of_a_publishers_model_is_in_the_files() -> None:
    charges = stored("regression-charges")["charges"]
    once = next(row for row in charges if (row["sampled"], row["epsilon"], row["models"]) == (True, 0.3, 1))
    paid = [fmean(seed[name] for seed in once["seeds"]) for name in ("trefoil", "ara_like", "ipa_like")]
    pooled = stored("regression-20k-modes")["together"]
    one = next(row for row in pooled if (row["columns"], row["epsilon"]) == (16, 0.3))
    together, apart = (fmean(seed[name]["auc"] for seed in one["seeds"]) for name in ("together", "apart"))
    fitted, of = (sum(seed[name] for seed in one["seeds"]) for name in ("fitted_apart", "advertisers"))
    said = [
        f"pays {paid[0]:.4f} on average on real devices, {paid[1]:.3f} if every",
        f"and {paid[2]:.3f} if everyone",
        f"{together:.3f} against {apart:.3f}, and {of - fitted} of the {of} models apart",
    ]
    text = " ".join(PAGE.split())
    assert [line for line in said if line not in text] == []


def test_what_the_walk_of_the_front_page_says_of_its_crowd_is_so() -> None:
    """The seeded crowd's sum in bucket 3, and how far off the noise of that query may be."""
    reports = next(line for line in FRONT.splitlines() if line.startswith("$ trefoil reports"))
    options = reports.split()
    epsilon, kappa, skew, flagged = (float(options[options.index(f"--{name}") + 1]) for name in WALK_OPTIONS)
    terms = replace(samples.terms(buckets=16), epsilon_micros=round(epsilon * MICROS), sensitivity=2 * MAX_VALUE)
    crowd = Workload(replace(terms, kappa=int(kappa)), 5000, 1, skew, flagged).truth()[3]
    asked = replace(samples.query(), epsilon_micros=round(epsilon * MICROS), sensitivity=10, kappa=int(kappa))
    half = NoiseScale.of(asked).half_width(CONFIDENCE)
    assert f"the crowd has {crowd:,} and Alice 5: the answer is within {half} of\n{crowd + 5:,} with" in FRONT

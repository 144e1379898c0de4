"""The tables of benchmarks/RESULTS.md are those of the files in benchmarks/results, rounded. A failure prints them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = (ROOT / "benchmarks" / "RESULTS.md").read_text()
FRONT = (ROOT / "README.md").read_text()


def stored(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def points() -> list[Any]:
    files = ("throughput", "throughput-50k", "throughput-1m")
    found = [point for name in files for point in stored(name)["points"]]
    return sorted(found, key=lambda point: (point["buckets"], point["reports"]))


def point(reports: int, buckets: int) -> Any:
    return next(found for found in points() if (found["reports"], found["buckets"]) == (reports, buckets))


def throughput_table() -> Iterator[str]:
    yield "| buckets | reports | reports a second | of the bound | CPU | open | naive | memory of a helper |"
    yield "|---|---|---|---|---|---|---|---|"
    for found in points():
        ratios, speed = found["ratios"], found["reports_per_second"]["trefoil"]
        yield (
            f"| {found['buckets']:,} | {found['reports']:,} | {speed:,.0f} | {ratios['fraction_of_bound']:.0%} "
            f"| {ratios['cpu_over_trusted_server']:.1f} | {ratios['ingest_over_bare_open']:.2f} "
            f"| {ratios['speedup_over_naive_mpyc']:.0f} | {max(found['peak_rss_mb'].values()):.0f} MB |"
        ).replace("%", " %")


def report_table() -> Iterator[str]:
    yield (
        "| buckets | bytes | over unchecked | sealing over unchecked | ingest over unchecked, by helper "
        "| ingest over the bare HPKE open | Prio3Histogram, two parties |"
    )
    yield "|---|---|---|---|---|---|---|"
    for found in stored("report")["reports"]:
        over = found["over_unchecked"]
        ingest = ", ".join(f"{ratio:.2f}" for ratio in over["ingest"])
        yield (
            f"| {found['buckets']:,} | {found['bytes_total']:,} | {over['bytes']:.2f} | {over['seal']:.2f} | {ingest} "
            f"| {found['open_over_bare']:.2f} | {found['prio3_histogram_bytes']:,} bytes |"
        )


def device_table() -> Iterator[str]:
    yield "| relevant impressions | median time of a conversion |"
    yield "|---|---|"
    medians = stored("device")["median_ms"]
    for case, name in (("10", "10"), ("30", "30"), ("100", "100"), ("null", "none: a null report")):
        yield f"| {name} | {medians[case]:.1f} ms |"


def noise_table() -> Iterator[str]:
    yield "| mode | buckets | processor time of a helper | bytes it sends | rounds | standard deviation |"
    yield "|---|---|---|---|---|---|"
    for found in stored("noise")["noise"]:
        if found["buckets"] in (128, 4096):
            yield (
                f"| `{found['mode']}` | {found['buckets']:,} | {1000 * found['cpu_seconds']:.0f} ms "
                f"| {found['bytes']:,} | {found['rounds']} | {found['standard_deviation']:.0f} |"
            )


def validity_table() -> Iterator[str]:
    yield "| lying devices | counted | left out as invalid, by helper | sums | seconds | bytes between helpers |"
    yield "|---|---|---|---|---|---|"
    for found in stored("validity")["validity"]:
        left_out = ", ".join(f"{count:,}" for count in found["counted_invalid"])
        sums = "exact" if found["sums_exact"] else "WRONG"
        yield (
            f"| {found['invalid']:,} | {found['counted']:,} | {left_out} | {sums} "
            f"| {found['seconds']:.0f} | {found['peer_bytes']:,} |"
        )


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


def expect(table: Iterator[str]) -> None:
    text = "\n".join(table)
    assert text in PAGE, f"RESULTS.md should have:\n{text}"


def test_the_throughput_table_is_that_of_the_files() -> None:
    expect(throughput_table())


def test_the_tables_of_reports_devices_and_noise_are_those_of_the_files() -> None:
    expect(report_table())
    expect(device_table())
    expect(noise_table())
    expect(validity_table())


def test_the_figures_of_the_collector_are_those_of_the_files() -> None:
    expect(hostile_table())
    load = stored("collector-load")
    assert (load["lost"], load["stored_twice"], load["stored"]) == (0, 0, load["reports"])
    said = f"{load['clients']} clients posted {load['reports']:,} reports and {load['refused']:,} of another site"
    assert said in PAGE and f"killed {load['kills']} times" in PAGE and f"{load['posts']:,} posts" in PAGE


def test_what_the_text_says_is_in_the_files() -> None:
    large, million = point(50_000, 128), point(1_000_000, 16)
    device = stored("device")
    ledger = [1e6 * found["seconds"]["ledger"] / found["reports"] for found in points()]
    sums = [found["ratios"]["sum_over_plaintext"] for found in points()]
    said = [
        f"{large['cpu_seconds']['total']:.1f} processor seconds",
        f"{min(ledger):.0f} to {max(ledger):.0f} µs a report",
        f"{min(sums):.1f} to {max(sums):.1f} times as long",
        f"{max(point(100_000, 16)['peak_rss_mb'].values()):.0f} MB at 100,000 reports",
        f"{max(million['peak_rss_mb'].values()):.0f} MB at a million",
        f"is {device['auc_100_vs_10']:.3f} for telling 100",
        f"{device['auc_real_vs_null']:.3f} for telling a real",
    ]
    assert [text for text in said if text not in PAGE] == []


def test_the_front_page_quotes_the_same_run() -> None:
    large, report = point(50_000, 128), stored("report")["reports"][1]
    said = [
        f"**{large['reports_per_second']['trefoil']:,.0f} reports a second**",
        f"{large['ratios']['fraction_of_bound']:.0%}".replace("%", " %"),
        f"{large['ratios']['speedup_over_naive_mpyc']:.0f} times a naive MPyC program",
        f"{report['bytes_total']:,} bytes",
        f"{stored('device')['auc_real_vs_null']:.1%}".replace("%", " %"),
    ]
    assert [text for text in said if text not in FRONT] == []

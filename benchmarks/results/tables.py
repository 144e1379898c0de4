"""Render the tables that documents quote from the result files: `trefoil bench results`.

A table stands between the comments `results: NAME` and `end`. After a new measurement `--write` renews them; the prose
around them is written by hand. `tests/benchmarks/test_results.py` compares both with the files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.results.origin import RESULTS, ROOT, stored
from benchmarks.throughput.point import PROFILE
from protocol.errors import ErrorKind, TrefoilError
from protocol.noise import NoiseMode
from protocol.shares import PARTIES
from protocol.units import DAY

DOCUMENTS = (ROOT / "benchmarks/RESULTS.md", ROOT / "benchmarks/experiments/README.md")
# Bytes of one report in one helper's ledger, for files that do not record it: partly filled B-tree pages included.
USUAL_LEDGER_BYTES = 48
_TABLE = re.compile(r"(<!-- results: (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)

# Any: every result file has its own schema.
Record = Mapping[str, Any]
Rows = Iterable[Sequence[object]]


def table(columns: Sequence[str], rows: Rows) -> str:
    """Return a Markdown table. Whole numbers get thousands separators."""
    lines = [columns, ["---"] * len(columns), *([_cell(value) for value in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines).replace("| --- ", "|---").replace("--- |", "---|")


def _cell(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def points() -> list[Record]:
    """Return the points of all throughput files, smallest first; of two for one cell, the newest."""
    cells: dict[tuple[bool, int, int], tuple[str, Record]] = {}
    for path in RESULTS.glob("throughput*.json"):
        file = stored(path.stem)
        for point in file["points"]:
            cell = (not point["checked"], point["buckets"], point["reports"])
            if cell not in cells or cells[cell][0] < file["date"]:
                cells[cell] = (file["date"], point)
    return [cells[cell][1] for cell in sorted(cells)]


def largest(buckets: int) -> Record:
    """Return the point that documents quote: the most checked reports at `buckets` buckets."""
    chosen = [point for point in points() if point["buckets"] == buckets and point["checked"]]
    return max(chosen, key=lambda point: int(point["reports"]))


def ledger_bytes() -> float:
    """Return the bytes of one report in a ledger without its log, by the largest point that records both."""
    recorded = [point for point in points() if growth("log", point)]
    if not recorded:
        return USUAL_LEDGER_BYTES
    point = max(recorded, key=lambda each: int(each["reports"]))
    both = zip(growth("ledger", point), growth("log", point), strict=True)
    return max(ledger - log for ledger, log in both) / int(point["reports"])


def growth(part: str, point: Record) -> list[float]:
    """Return the bytes by which each ledger (with its log) or each log grew; empty if the point does not record it."""
    return [size for name, size in point.get("disk_bytes", {}).items() if name.endswith(part)]


def _throughput() -> str:
    columns = ("reports are", "buckets", "reports", "CPU, × server", "× batch server", "CPU, × opens", "× batch opens")
    more = ("CPU, µs a report", "reports a second", "× naive", "memory")
    return table((*columns, *more), map(_throughput_row, points()))


def _throughput_row(point: Record) -> Sequence[object]:
    ratios = point["ratios"]
    return (
        kind(point),
        point["buckets"],
        point["reports"],
        spread(point, "cpu_over_trusted_server"),
        _spread_if_known(point, "cpu_over_batch_server"),
        spread(point, "cpu_over_three_bare_opens"),
        _spread_if_known(point, "cpu_over_three_batch_opens"),
        f"{1e6 * point['cpu_seconds']['total'] / point['reports']:.0f}",
        f"{point['reports_per_second']['trefoil']:,.0f}",
        f"{ratios['speedup_over_naive_mpyc']:.0f}" if "speedup_over_naive_mpyc" in ratios else "",
        f"{max(point['peak_rss_mb'].values()):.0f} MB",
    )


def _spread_if_known(point: Record, name: str) -> str:
    """Return the ratio's `spread`; empty for files from before helpers opened in batches."""
    return spread(point, name) if name in point["ratios"] else ""


def _profile() -> str:
    """Render the processor time of the largest cells at 128 buckets that have a profile."""
    profiled = [point for point in points() if point.get("profile") and point["buckets"] == 128]
    kinds = {kind(point): point for point in sorted(profiled, key=lambda point: int(point["reports"]))}
    heads = [head for name, point in kinds.items() for head in (f"{point['reports']:,} {name}", "of all")]
    return table(
        ("what", *heads),
        (
            (text, *(cell for point in kinds.values() for cell in _spent_on(name, point)))
            for name, text in PROFILE.items()
        ),
    )


def _spent_on(name: str, point: Record) -> tuple[str, str]:
    spent, total = point["profile"][name], sum(point["profile"].values())
    return f"{1e6 * spent / point['reports']:.1f}", percent(spent / total, 1)


def day(point: Record) -> str:
    """Render what a day of reports like those of `point` would take."""
    cpu = point["cpu_seconds"]["total"] / point["reports"] / PARTIES
    sent = point["bytes_per_report"]["uploaded"] / PARTIES
    columns = ("processor time of a helper, a day", "cores", "upload to a helper, a day", "ledger, 30 days")
    return table(
        ("reports a day", *columns),
        (
            (
                name,
                duration(count * cpu),
                f"{count * cpu / DAY:.2g}",
                size(count * sent),
                size(30 * count * ledger_bytes()),
            )
            for count, name in ((10**6, "1 million"), (10**9, "1 billion"))
        ),
    )


def _report() -> str:
    columns = (
        "buckets",
        "bytes",
        "over unchecked",
        "sealing over unchecked, null and full",
        "ingest over unchecked, by helper",
        "ingest over the bare HPKE open",
        "Prio3Histogram, two parties",
    )
    return table(columns, map(_report_row, stored("report")["reports"]))


def _report_row(cost: Record) -> Sequence[object]:
    over = cost["over_unchecked"]
    return (
        cost["buckets"],
        cost["bytes_total"],
        f"{over['bytes']:.2f}",
        f"{over['seal']:.2f}, {over['seal_full']:.2f}",
        ", ".join(f"{ratio:.2f}" for ratio in over["ingest"]),
        f"{cost['open_over_bare']:.2f}",
        f"{cost['prio3_histogram_bytes']:,} bytes",
    )


def _validity() -> str:
    columns = (
        "dishonest devices",
        "counted",
        "left out as invalid, by helper",
        "sums",
        "seconds",
        "bytes between helpers",
    )
    return table(
        ("dishonest devices", *columns),
        (
            (
                cost["invalid"],
                cost["counted"],
                ", ".join(f"{count:,}" for count in cost["counted_invalid"]),
                "exact" if cost["sums_exact"] else "WRONG",
                f"{cost['seconds']:.0f}",
                cost["peer_bytes"],
            )
            for cost in stored("validity")["validity"]
        ),
    )


def _noise() -> str:
    columns = ("in a fresh process", "in one that ran some", "bytes it sends", "rounds", "standard deviation")
    return table(
        ("mode", "buckets", *columns),
        (
            (
                f"`{cost['mode']}`",
                cost["buckets"],
                f"{1000 * cost['cpu_seconds']:.1f} ms",
                f"{1000 * cost['again_cpu_seconds']:.1f} ms",
                cost["bytes"],
                cost["rounds"],
                f"{cost['standard_deviation']:.0f}",
            )
            for cost in stored("noise")["noise"]
            if cost["buckets"] in (128, 4096)
        ),
    )


def _noise_sweep() -> str:
    """Render the processor time of all modes over buckets and scales, then the bytes that `joint` sends."""
    cells = {(cost["scale"], cost["buckets"], cost["mode"]): cost for cost in stored("noise-wide")["noise"]}
    scales, buckets = (sorted({cell[place] for cell in cells}) for place in (0, 1))
    headings = [f"{count:,} buckets" for count in buckets]

    def times(scale: int, count: int) -> str:
        costs = [cells.get((scale, count, mode.value)) for mode in NoiseMode]
        return " · ".join("–" if cost is None else f"{1000 * cost['cpu_seconds']:,.0f}" for cost in costs)

    def joint(scale: int) -> Sequence[object]:
        costs = [cells.get((scale, count, NoiseMode.JOINT.value)) for count in buckets]
        rounds = sorted({cost["rounds"] for cost in costs if cost is not None})
        return (", ".join(map(str, rounds)), *("–" if cost is None else cost["bytes"] for cost in costs))

    time = table(("scale b", *headings), ((power(b), *(times(b, count) for count in buckets)) for b in scales))
    sent = ("scale b", "rounds of `joint`", *(f"bytes at {heading}" for heading in headings))
    return time + "\n" + table(sent, ((power(b), *joint(b)) for b in scales))


def _device() -> str:
    cases = {"10": "10", "30": "30", "100": "100", "null": "none: a null report"}
    medians = stored("device")["median_ms"]
    return table(
        ("relevant impressions", "median time of a conversion"),
        ((name, f"{medians[case]:.2f} ms") for case, name in cases.items()),
    )


def _device_areas() -> str:
    figures = stored("device")
    return table(
        ("what a caller would like to know", "area", "alone", "family"),
        (
            (
                question,
                f"{area['area']:.3f}",
                f"{area['low']:.3f} to {area['high']:.3f}",
                f"{area['family_low']:.3f} to {area['family_high']:.3f}",
            )
            for question, area in (figures.get("after_tick", {}).get("areas", {}) | figures["watching"]).items()
        ),
    )


# The settings of the recorded models that the table shows, beside the one without noise.
MODEL_CELLS = [
    *(("local", epsilon) for epsilon in (0.1, 0.3, 1.0, 3.0)),
    *(("pairwise", epsilon) for epsilon in (0.3, 1.0)),
    *(("joint", epsilon) for epsilon in (0.1, 0.3, 1.0)),
]


def _model() -> str:
    heads = [f"`{mode}` {epsilon:g}" for mode, epsilon in MODEL_CELLS]
    rows = []
    for name in ("regression-2k-modes", "regression-20k-modes", "regression-100k-modes"):
        cells = {(cell["columns"], cell["noise"], cell["epsilon"]): cell for cell in stored(name)["scores"]}
        for columns in (8, 16, 64):
            clear = cells[columns, "none", 0.0]
            best = fmean(seed["best_auc"] for seed in clear["seeds"])
            areas = [_mean_area(cells[columns, *cell]["seeds"]) for cell in MODEL_CELLS]
            rows.append([clear["reports"], columns, f"{best:.3f}", _mean_area(clear["seeds"]), *areas])
    return table(("reports", "columns", "best possible", "no noise", *heads), rows)


def _mean_area(seeds: Sequence[Record]) -> str:
    fitted = sum(seed["fitted"] for seed in seeds)
    mean = f"{fmean(seed['auc'] for seed in seeds):.3f}"
    return mean if fitted == len(seeds) else f"{mean} ({fitted}/{len(seeds)})"


def _model_through_helpers() -> str:
    return table(
        ("mode", "counted", "deviation promised", "measured", "AUC", "best possible"),
        (
            (
                f"`{fit['noise']}`",
                fit["counted"],
                *(f"{fit[name]:.1f}" for name in ("noise_sd", "noise_rms")),
                *(f"{fit[name]:.3f}" for name in ("auc", "best_auc")),
            )
            for fit in stored("regression-helpers")["fits"]
        ),
    )


# Ways to go wrong that the hunt drew, by their names in hunt.json.
HUNTED = ("kill -9", "kill -9 at a step", "pause", "partition", "full disk", "clock step", "rotation", "the MPC fails")


def _hunt() -> str:
    virtual, real = stored("hunt")["virtual"], stored("hunt")["real"]
    mishaps = [
        (name, sum(part["mishaps"].get(name, 0) for part in virtual), real["mishaps"].get(name, 0)) for name in HUNTED
    ]
    return table(
        ("", "virtual time", "real processes"),
        (
            ("schedules, rounds", sum(part["schedules"] for part in virtual), real["rounds"]),
            *mishaps,
            ("violations", sum(part["violations"] for part in virtual), real["violations"]),
        ),
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


def _hostile() -> str:
    return table(
        ("what each stranger sends", "open files", "memory, peak", "disk", "tries of the honest client"),
        (
            (
                ATTACKS[name],
                seen["descriptors"],
                f"{seen['peak_mb']:.0f} MB",
                f"{seen['disk_mb']:.2f} MB",
                seen["honest_tries"],
            )
            for name, seen in stored("collector-hostile")["attacks"].items()
        ),
    )


def _claims() -> str:
    """Render the claims of the paper that no figure shows, with our numbers in both accountings."""
    ours = [stored(name)["experiments"] for name in ("experiments-artifact", "experiments-paper")]
    rows = []
    for workload, name in (("criteo", "Criteo"), ("patcg", "PATCG")):
        claim = f"queries ×1.16 to 2.88 more accurate than ARA: {name}, first quartile to maximum, 7 days"
        spans = [_better_than_ara(_of(each, workload)) for each in ours]
        rows.append([claim, *(f"×{low:.2f} to {high:.2f}" for low, high in spans)])
    grown = [_growth_of_median(_of(each, "criteo")) for each in ours]
    claim = "Criteo: median error 25 % larger with epochs of 60 days than of 1 day"
    rows.append([claim, *(f"{each:+.0%}".replace("%", " %") for each in grown)])
    left = [stored(name)["more_left_at_7_days"] for name in ("criteo-artifact", "criteo-paper")]
    claim = "Criteo: 95 % of device-advertiser pairs have more left than under both baselines"
    rows.append([claim, *(percent(each, 1) for each in left)])
    return table(("claim of the paper", "artifact's accounting", "paper's accounting"), rows)


def _of(experiments: list[Any], name: str) -> list[Record]:
    """Return the points of one experiment, without those of extra impressions."""
    experiment = next(each for each in experiments if each["experiment"] == name)
    return [point for point in experiment["points"] if point.get("extra_impressions") is None]


def _quartiles(records: list[Record], system: str, days: int) -> list[float]:
    point = next(each for each in records if (each["system"], each["epoch_days"]) == (system, days))
    quartiles: list[float] = point["rmsre_quartiles"]
    return quartiles


def _better_than_ara(records: list[Record]) -> tuple[float, float]:
    """Return the range of ARA-like's error over ours, over first quartile, median, third quartile and maximum."""
    both = zip(_quartiles(records, "ara-like", 7)[1:], _quartiles(records, "cookie-monster", 7)[1:], strict=True)
    ratios = [theirs / ours for theirs, ours in both]
    return min(ratios), max(ratios)


def _growth_of_median(records: list[Record]) -> float:
    """Return the growth of the median error from epochs of one day to epochs of sixty."""
    short, long = (_quartiles(records, "cookie-monster", days)[2] for days in (1, 60))
    return long / short - 1


def _ledger() -> str:
    def row(cost: Record) -> Sequence[object]:
        forgotten = f"{cost['forget_seconds']:.2f} s for {cost['forgotten_rows']:,}" if cost["forgotten_rows"] else ""
        cpu = cost["lookup_cpu_us"] + cost["reserve_cpu_us"]
        figures = (f"{cpu:.1f}", f"{cost['wall_us']:.0f}", f"{cost['open_seconds']:.3f} s", forgotten)
        return (cost["engine"], cost["rows"], *figures, f"{cost['bytes_per_report']:.0f}")

    costs = [cost for name in ("ledger", "ledger-postgres") for cost in stored(name)["ledgers"]]
    columns = (
        "engine",
        "reports",
        "processor µs",
        "wall clock µs",
        "opening, warm caches",
        "forgetting a day",
        "bytes a report",
    )
    return table(columns, map(row, costs))


TABLES: Mapping[str, Callable[[], str]] = {
    "throughput": _throughput,
    "profile": _profile,
    "day": lambda: day(largest(128)),
    "ten_million": lambda: day(largest(16)),
    "report": _report,
    "validity": _validity,
    "ledger": _ledger,
    "device": _device,
    "device_areas": _device_areas,
    "noise": _noise,
    "noise_sweep": _noise_sweep,
    "model": _model,
    "model_through_helpers": _model_through_helpers,
    "hunt": _hunt,
    "hostile": _hostile,
    "claims": _claims,
}


def renewed(text: str) -> str:
    """Return a document's text with every quoted table rendered again."""

    def render(match: re.Match[str]) -> str:
        if match[2] not in TABLES:
            raise TrefoilError(
                f"there is no table of results named {match[2]}",
                f"Known are {', '.join(TABLES)}.",
                kind=ErrorKind.UNKNOWN_NAME,
            )
        return match[1] + TABLES[match[2]]() + match[4]

    return _TABLE.sub(render, text)


def differing() -> Iterator[Path]:
    """Yield the documents whose tables differ from the result files."""
    return (path for path in DOCUMENTS if renewed(path.read_text()) != path.read_text())


def write_all() -> list[Path]:
    """Renew every document that differs, and return them."""
    changed = list(differing())
    for path in changed:
        path.write_text(renewed(path.read_text()))
    return changed


def kind(point: Record) -> str:
    """Return "checked" or "unchecked", with the cipher suite if it is not the first."""
    suite = "" if point.get("suite", 1) == 1 else f", suite {point['suite']}"
    return ("checked" if point["checked"] else "unchecked") + suite


def spread(point: Record, name: str) -> str:
    """Return a ratio's median, with its range over the runs if there is one."""
    low, high = point.get("ranges", {}).get(name, (0.0, 0.0))
    middle = f"{point['ratios'][name]:.1f}"
    return middle if f"{low:.1f}" == f"{high:.1f}" else f"{middle} ({low:.1f} to {high:.1f})"


def percent(value: float, digits: int = 0) -> str:
    return f"{value:.{digits}%}".replace("%", " %")


def size(count: float) -> str:
    return f"{count / 1e12:.1f} TB" if count >= 1e12 else f"{count / 1e9:.1f} GB"


def duration(seconds: float) -> str:
    return f"{seconds / 3600:.0f} hours" if seconds >= 7200 else f"{seconds / 60:.1f} minutes"


def power(scale: int) -> str:
    exponent = scale.bit_length() - 1
    return f"2^{exponent}" if scale == 2**exponent and exponent > 9 else f"{scale:,}"

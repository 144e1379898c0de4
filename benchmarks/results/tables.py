"""Render the tables that documents quote from the result files: `trefoil bench results`.

A table stands between the comments `results: NAME` and `end`. After a new measurement `--write` renews them; the prose
around them is written by hand. `tests/benchmarks/test_results.py` compares both with the files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.costs import noise_cost, validity
from benchmarks.results.columns import Columns, Record, in_markdown, markdown
from benchmarks.results.origin import RESULTS, ROOT, stored
from benchmarks.throughput.point import PROFILE, kind, spread
from protocol.errors import ErrorKind, TrefoilError
from protocol.noise import NoiseMode
from protocol.shares import PARTIES
from protocol.units import DAY

DOCUMENTS = (ROOT / "benchmarks/RESULTS.md", ROOT / "benchmarks/experiments/README.md")
_TABLE = re.compile(r"(<!-- results: (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def points() -> list[Record]:
    """Return the points of all throughput files, smallest first; of two for one cell, the newest."""
    cells: dict[tuple[bool, int, int], Record] = {}
    files = [stored(path.stem) for path in RESULTS.glob("throughput*.json")]
    for file in sorted(files, key=lambda file: str(file["date"])):
        cells |= {(not point["checked"], point["buckets"], point["reports"]): point for point in file["points"]}
    return [cells[cell] for cell in sorted(cells)]


def largest(buckets: int) -> Record:
    """Return the point that documents quote: the most checked reports at `buckets` buckets."""
    chosen = [point for point in points() if point["buckets"] == buckets and point["checked"]]
    return max(chosen, key=lambda point: int(point["reports"]))


def ledger_bytes() -> float:
    """Return the bytes of one report in a ledger without its log, by the largest point that records both."""
    point = max((point for point in points() if growth("log", point)), key=lambda each: int(each["reports"]))
    both = zip(growth("ledger", point), growth("log", point), strict=True)
    return max(ledger - log for ledger, log in both) / int(point["reports"])


def growth(part: str, point: Record) -> list[float]:
    """Return the bytes by which each ledger (with its log) or each log grew; empty if the point does not record it."""
    return [size for name, size in point.get("disk_bytes", {}).items() if name.endswith(part)]


_THROUGHPUT: Columns[Record] = {
    "reports are": lambda point: kind(point),
    "buckets": lambda point: point["buckets"],
    "reports": lambda point: point["reports"],
    "CPU, × server": lambda point: spread(point, "cpu_over_trusted_server"),
    "× batch server": lambda point: spread(point, "cpu_over_batch_server"),
    "CPU, × opens": lambda point: spread(point, "cpu_over_three_bare_opens"),
    "× batch opens": lambda point: spread(point, "cpu_over_three_batch_opens"),
    "CPU, µs a report": lambda point: f"{1e6 * point['cpu_seconds']['total'] / point['reports']:.0f}",
    "reports a second": lambda point: f"{point['reports_per_second']['trefoil']:,.0f}",
    "× naive": lambda point: spread(point, "speedup_over_naive_mpyc", digits=0).partition(" ")[0],
    "memory": lambda point: f"{max(point['peak_rss_mb'].values()):.0f} MB",
}


def _profile() -> str:
    """Render the processor time of the largest cells at 128 buckets that have a profile."""
    profiled = [point for point in points() if point.get("profile") and point["buckets"] == 128]
    kinds = {kind(point): point for point in sorted(profiled, key=lambda point: int(point["reports"]))}
    heads = [head for name, point in kinds.items() for head in (f"{point['reports']:,} {name}", "of all")]
    rows = [
        [text, *(cell for point in kinds.values() for cell in _spent_on(name, point))] for name, text in PROFILE.items()
    ]
    return markdown(["what", *heads], rows)


def _spent_on(name: str, point: Record) -> tuple[str, str]:
    spent, total = point["profile"][name], sum(point["profile"].values())
    return f"{1e6 * spent / point['reports']:.1f}", percent(spent / total, 1)


def day(point: Record) -> str:
    """Render what a day of reports like those of `point` would take."""
    cpu = point["cpu_seconds"]["total"] / point["reports"] / PARTIES
    sent = point["bytes_per_report"]["uploaded"] / PARTIES
    columns: Columns[int] = {
        "reports a day": lambda count: "1 million" if count == 10**6 else "1 billion",
        "processor time of a helper, a day": lambda count: duration(count * cpu),
        "cores": lambda count: f"{count * cpu / DAY:.2g}",
        "upload to a helper, a day": lambda count: size(count * sent),
        "ledger, 30 days": lambda count: size(30 * count * ledger_bytes()),
    }
    return in_markdown(columns, (10**6, 10**9))


_REPORT: Columns[Record] = {
    "buckets": lambda cost: cost["buckets"],
    "bytes": lambda cost: cost["bytes_total"],
    "over unchecked": lambda cost: f"{cost['over_unchecked']['bytes']:.2f}",
    "sealing over unchecked, null and full": lambda cost: (
        f"{cost['over_unchecked']['seal']:.2f}, {cost['over_unchecked']['seal_full']:.2f}"
    ),
    "ingest over unchecked, by helper": lambda cost: ", ".join(f"{r:.2f}" for r in cost["over_unchecked"]["ingest"]),
    "ingest over the bare HPKE open": lambda cost: f"{cost['open_over_bare']:.2f}",
    "Prio3Histogram, two parties": lambda cost: f"{cost['prio3_histogram_bytes']:,} bytes",
}


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

    time = markdown(["scale b", *headings], ((power(b), *(times(b, count) for count in buckets)) for b in scales))
    sent = ["scale b", "rounds of `joint`", *(f"bytes at {heading}" for heading in headings)]
    return time + "\n" + markdown(sent, ((power(b), *joint(b)) for b in scales))


def _device() -> str:
    cases = {"10": "10", "100": "100", "full": "12,000: a full device", "empty": "none: a null report"}
    figures = stored("device-timing")
    rows = (
        (name, *(f"{figures[of][case]:.2f} ms" for of in ("median_ms", "processor_ms"))) for case, name in cases.items()
    )
    return markdown(["relevant impressions", "median time of a conversion", "of it processor time"], rows)


def _device_runs() -> dict[str, Record]:
    return {"quiet": stored("device-timing"), "beside ten busy loops": stored("device-timing-busy")}


def area(answer: Record) -> str:
    return f"{answer['area']:.3f} ({answer['low']:.3f} to {answer['high']:.3f})"


def _device_areas() -> str:
    runs = _device_runs()
    rows = []
    for question in runs["quiet"]["watching"]:
        for name, key in ((question, "watching"), (f"{question}: asked again", "watching_again")):
            answers = [run[key].get(question) for run in runs.values()]
            if any(answers):
                bits = (f"{each['bits']:.4f}" if each else "" for each in answers)
                rows.append((name, *(area(each) if each else "" for each in answers), *bits))
    columns = [f"{column}, {run}" for column in ("area", "bits") for run in runs]
    return markdown(["what a caller would like to know", *columns], rows)


def _device_promises() -> str:
    runs = _device_runs()
    promises: Columns[Record] = {
        "20 saves of a page, median": lambda run: f"{run['page_median_ms']:.0f} ms",
        "20 saves of a page, slowest of 20": lambda run: f"{run['page_slowest_ms']:.0f} ms",
        "first saves of a process that were kept": lambda run: f"{run['first_saves_kept']} of {run['first_saves']}",
        "calls of 50 hostile callers": lambda run: run["hostile_calls"],
        "a shop's reports meanwhile that are real": lambda run: (
            f"{run['reports_in_flood_real']} of {run['reports_in_flood']}"
        ),
        "the slowest of them": lambda run: f"{run['flood_slowest_ms']:,.0f} ms",
    }
    rows = ((name, *(show(run["promises"]) for run in runs.values())) for name, show in promises.items())
    return markdown(["promise", *runs], rows)


def _browser() -> str:
    """Return areas in pages and at pipes, with the delay and without, by the number of busy loops beside them."""
    files = [stored(path.stem) for path in RESULTS.glob("browser-timing*.json")]
    files.sort(key=lambda file: int(file["busy_loops"]))
    rows = [
        (schedule.replace("_", " "), question, *(area(file[schedule][question]) for file in files))
        for schedule in ("with_delay", "without_delay")
        for question in files[0][schedule]
    ]
    loads = [f"{file['busy_loops']} busy loops, load {file['machine']['load_average'][0]}" for file in files]
    return markdown(("schedule", "question", *loads), rows)


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
    return markdown(["reports", "columns", "best possible", "no noise", *heads], rows)


def _mean_area(seeds: Sequence[Record]) -> str:
    fitted = sum(seed["fitted"] for seed in seeds)
    mean = f"{fmean(seed['auc'] for seed in seeds):.3f}"
    return mean if fitted == len(seeds) else f"{mean} ({fitted}/{len(seeds)})"


# Ways to go wrong that the hunt drew, by their names in hunt.json.
HUNTED = ("kill -9", "kill -9 at a step", "pause", "partition", "full disk", "clock step", "rotation", "the MPC fails")


def _hunt() -> str:
    virtual, real = stored("hunt")["virtual"], stored("hunt")["real"]
    rows = [
        ("schedules, rounds", sum(part["schedules"] for part in virtual), real["rounds"]),
        *((name, *(sum(part["mishaps"].get(name, 0) for part in of) for of in (virtual, [real]))) for name in HUNTED),
        ("violations", sum(part["violations"] for part in virtual), real["violations"]),
    ]
    return markdown(["", "virtual time", "real processes"], rows)


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
_HOSTILE: Columns[tuple[str, Record]] = {
    "what each stranger sends": lambda attack: ATTACKS[attack[0]],
    "open files": lambda attack: attack[1]["descriptors"],
    "memory, peak": lambda attack: f"{attack[1]['peak_mb']:.0f} MB",
    "disk": lambda attack: f"{attack[1]['disk_mb']:.2f} MB",
    "tries of the honest client": lambda attack: attack[1]["honest_tries"],
}


def _claims() -> str:
    """Render the claims of the paper that no figure shows, with our numbers in both accountings."""
    ours = [stored(name)["experiments"] for name in ("experiments-artifact", "experiments-paper")]
    rows = []
    for workload, name in (("criteo", "Criteo"), ("patcg", "PATCG")):
        claim = f"queries ×1.16 to 2.88 more accurate than ARA: {name}, first quartile to maximum, 7 days"
        spans = [_better_than_ara(each, workload) for each in ours]
        rows.append([claim, *(f"×{low:.2f} to {high:.2f}" for low, high in spans)])
    # The growth of our median error from epochs of one day to epochs of sixty.
    medians = [[_errors(each, "criteo", "cookie-monster", days)[2] for days in (1, 60)] for each in ours]
    claim = "Criteo: median error 25 % larger with epochs of 60 days than of 1 day"
    rows.append([claim, *(f"{long / short - 1:+.0%}".replace("%", " %") for short, long in medians)])
    left = [stored(name)["more_left_at_7_days"] for name in ("criteo-artifact", "criteo-paper")]
    claim = "Criteo: 95 % of device-advertiser pairs have more left than under both baselines"
    rows.append([claim, *(percent(each, 1) for each in left)])
    return markdown(["claim of the paper", "artifact's accounting", "paper's accounting"], rows)


def _errors(experiments: list[Any], workload: str, system: str, days: int) -> list[float]:
    """Return the quartiles of one system's errors, the minimum first."""
    experiment = next(each for each in experiments if each["experiment"] == workload)
    plain = [point for point in experiment["points"] if point.get("extra_impressions") is None]
    point = next(each for each in plain if (each["system"], each["epoch_days"]) == (system, days))
    quartiles: list[float] = point["rmsre_quartiles"]
    return quartiles


def _better_than_ara(experiments: list[Any], workload: str) -> tuple[float, float]:
    """Return the range of ARA-like's error over ours, over first quartile, median, third quartile and maximum."""
    theirs, ours = (_errors(experiments, workload, system, 7)[1:] for system in ("ara-like", "cookie-monster"))
    ratios = [one / other for one, other in zip(theirs, ours, strict=True)]
    return min(ratios), max(ratios)


_LEDGER: Columns[Record] = {
    "engine": lambda cost: cost["engine"],
    "sites": lambda cost: cost["sites"],
    "reports": lambda cost: cost["rows"],
    "processor µs": lambda cost: f"{cost['lookup_cpu_us'] + cost['reserve_cpu_us']:.1f}",
    "wall clock µs": lambda cost: f"{cost['wall_us']:.0f}",
    "processor µs, cold": lambda cost: f"{cost['cold_cpu_us']:.1f}",
    "wall clock µs, cold": lambda cost: f"{cost['cold_wall_us']:.0f}",
    "opening, cold": lambda cost: f"{cost['cold_open_seconds']:.3f} s",
    "forgetting a day": lambda cost: (
        f"{cost['forget_seconds']:.2f} s for {cost['forgotten_rows']:,}" if cost["forgotten_rows"] else ""
    ),
    "bytes a report": lambda cost: f"{cost['bytes_per_report']:.0f}",
}


def _of(name: str, key: str) -> list[Record]:
    records: list[Record] = stored(name)[key]
    return records


TABLES: Mapping[str, Callable[[], str]] = {
    "throughput": lambda: in_markdown(_THROUGHPUT, points()),
    "profile": _profile,
    "day": lambda: day(largest(128)),
    "ten_million": lambda: day(largest(16)),
    "report": lambda: in_markdown(_REPORT, _of("report", "reports")),
    "validity": lambda: in_markdown(validity.COLUMNS, _of("validity", "validity")),
    "ledger": lambda: in_markdown(
        _LEDGER, [cost for name in ("ledger", "ledger-one-site", "ledger-postgres") for cost in _of(name, "ledgers")]
    ),
    "device": _device,
    "device_areas": _device_areas,
    "device_promises": _device_promises,
    "browser": _browser,
    "noise": lambda: in_markdown(
        noise_cost.COLUMNS, (cost for cost in _of("noise", "noise") if cost["buckets"] in (128, 4096))
    ),
    "noise_sweep": _noise_sweep,
    "model": _model,
    "hunt": _hunt,
    "hostile": lambda: in_markdown(_HOSTILE, stored("collector-hostile")["attacks"].items()),
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


def percent(value: float, digits: int = 0) -> str:
    return f"{value:.{digits}%}".replace("%", " %")


def size(count: float) -> str:
    return f"{count / 1e12:.1f} TB" if count >= 1e12 else f"{count / 1e9:.1f} GB"


def duration(seconds: float) -> str:
    return f"{seconds / 3600:.0f} hours" if seconds >= 7200 else f"{seconds / 60:.1f} minutes"


def power(scale: int) -> str:
    exponent = scale.bit_length() - 1
    return f"2^{exponent}" if scale == 2**exponent and exponent > 9 else f"{scale:,}"

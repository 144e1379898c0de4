"""The parts of documents that quote result files, made from the files: `trefoil bench results`.

A part stands between the comments `results: NAME` and `end`. Whoever measures again runs the command with `--write`; a
test holds the documents to it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks import cost_tables
from benchmarks.result_files import RESULTS, ROOT, stored
from protocol.errors import TrefoilError
from protocol.shares import PARTIES

DOCUMENTS = tuple(ROOT / name for name in ("README.md", "benchmarks/RESULTS.md", "benchmarks/experiments/README.md"))
# Of a report in the ledger of one helper, where no file says it: with the pages of its tree that are not full.
USUAL_LEDGER_BYTES = 48
TEN_MILLION = 10**7
# Processor time of three helpers over one trusted server, whose limit is 3.
AIM = 3.4
DAY = 86_400
_PART = re.compile(r"(<!-- results: (\w+) -->)(.*?)(<!-- end -->)", re.DOTALL)

# Any: a point as its file has it.
Point = Mapping[str, Any]


def points() -> list[Point]:
    """Of every throughput file, the newest where two have the same cell; smallest first."""
    cells: dict[tuple[bool, int, int], tuple[str, Point]] = {}
    for path in RESULTS.glob("throughput*.json"):
        found = json.loads(path.read_text())
        for point in found["points"]:
            cell = (not point.get("checked", False), point["buckets"], point["reports"])
            if cell not in cells or cells[cell][0] < found["date"]:
                cells[cell] = (found["date"], point)
    return [cells[cell][1] for cell in sorted(cells)]


def largest(buckets: int) -> Point:
    """The point that documents quote: the most reports at so many buckets, checked ones if there are any."""
    chosen = [point for point in points() if point["buckets"] == buckets]
    checked = [point for point in chosen if point.get("checked", False)] or chosen
    return max(checked, key=lambda point: int(point["reports"]))


def ledger_bytes() -> float:
    """What a report takes in a ledger without its log, by the largest point that says how much both grew."""
    known = [point for point in points() if _growth_of("log", point)]
    if not known:
        return USUAL_LEDGER_BYTES
    point = max(known, key=lambda found: int(found["reports"]))
    both = zip(_growth_of("ledger", point), _growth_of("log", point), strict=True)
    return max(ledger - log for ledger, log in both) / int(point["reports"])


def _growth_of(part: str, point: Point) -> list[float]:
    """Bytes of each of the three ledgers with its log, or of each log; older files do not say."""
    return [size for name, size in point.get("disk_bytes", {}).items() if name.endswith(part)]


def throughput_part() -> Iterator[str]:
    """A line for every cell that was measured."""
    yield ""
    columns = ("reports are", "buckets", "reports", "CPU, × server", "CPU, × opens", "CPU, µs a report")
    yield f"| {' | '.join((*columns, 'reports a second', 'of the bound', '× naive', 'memory'))} |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for point in points():
        ratios = point["ratios"]
        speed = f"{point['reports_per_second']['trefoil']:,.0f}"
        naive = f"{ratios['speedup_over_naive_mpyc']:.0f}" if "speedup_over_naive_mpyc" in ratios else ""
        yield (
            f"| {_kind(point)} | {point['buckets']:,} | {point['reports']:,} "
            f"| {_range(point, 'cpu_over_trusted_server')} | {_range(point, 'cpu_over_three_bare_opens')} "
            f"| {1e6 * point['cpu_seconds']['total'] / point['reports']:.0f} | {speed} "
            f"| {_percent(ratios['fraction_of_bound'])} | {naive} | {max(point['peak_rss_mb'].values()):.0f} MB |"
        )
    files = sorted(path.name for path in RESULTS.glob("throughput*.json"))
    yield ""
    yield f"Data: {', '.join(f'[{name}](results/{name})' for name in files)}."
    yield ""


def costs_part() -> Iterator[str]:
    """What follows the table in words."""
    ledger = [1e6 * point["seconds"]["ledger"] / point["reports"] for point in points()]
    sums = [point["ratios"]["sum_over_plaintext"] for point in points()]
    rest = [point["ratios"]["cpu_over_three_bare_opens"] - 1 for point in points()]
    yield ""
    yield (
        f"The price is three opens instead of one, and {min(rest):.1f} to {max(rest):.1f} times as much again for "
        "everything else that happens to a report."
    )
    yield "Small batches cost more, because a query also has a cost that does not depend on its size."
    yield (
        f"Summing shares takes {min(sums):.1f} to {max(sums):.1f} times as long as numpy's sum of the plain "
        f"histograms. The ledger takes {min(ledger):.0f} to {max(ledger):.0f} µs a report."
    )


def profile_part() -> Iterator[str]:
    """Where the processor time of the largest cells at 128 buckets went, of each kind that has a profile."""
    from benchmarks.bench.throughput.stages import PROFILE

    known = [point for point in points() if point.get("profile") and point["buckets"] == 128]
    kinds = {_kind(point): point for point in sorted(known, key=lambda point: int(point["reports"]))}
    yield ""
    if not kinds:
        yield "Not recorded yet: `trefoil bench throughput --profile`."
        return
    yield "Processor time of three helpers, µs a report of 128 buckets:"
    yield ""
    heads = [f"{point['reports']:,} {kind} | of all" for kind, point in kinds.items()]
    yield f"| what | {' | '.join(heads)} |"
    yield "|---" * (1 + 2 * len(heads)) + "|"
    for name, text in PROFILE.items():
        yield f"| {text} | {' | '.join(_spent_on(name, point) for point in kinds.values())} |"
    if "unchecked" in kinds:
        yield ""
        yield from _against_aim(kinds["unchecked"])


def _against_aim(point: Point) -> Iterator[str]:
    """How far from the aim this is, and how much the opens leave."""
    server, bare = (point["yardstick"][name] for name in ("trusted server", "bare open"))
    spent = point["cpu_seconds"]["total"] / point["reports"]
    left, taken = ((each - PARTIES * bare) / PARTIES for each in (AIM * server, spent))
    yield (
        f"The aim is {AIM} times one trusted server, for {point['reports']:,} unchecked reports; seen is "
        f"{_range(point, 'cpu_over_trusted_server')}. By the yardsticks of that run the aim leaves a helper "
        f"{1e6 * left:.0f} µs a report beside its bare open, and it takes {1e6 * taken:.0f}."
    )


def _spent_on(name: str, point: Point) -> str:
    spent, total = point["profile"][name], sum(point["profile"].values())
    return f"{1e6 * spent / point['reports']:.1f} | {_percent(spent / total, 1)}"


def networks_part() -> Iterator[str]:
    """The same through three network namespaces."""
    found = stored("networks")
    point = found["points"][0]
    opened = sum(point["profile"][part] for part in ("check", "open", "expand", "sum", "residues"))
    yield ""
    yield (
        f"In three network namespaces (`{found['started_by'].split()[0]}`, [networks.json](results/networks.json)), "
        f"at a load average of {found['machine']['load_average'][0]:.1f}:"
    )
    yield (
        f"{point['reports']:,} {_kind(point)} reports of {point['buckets']} buckets took "
        f"{_range(point, 'cpu_over_trusted_server')} times the processor time of one trusted server, "
        f"{_percent(opened / point['cpu_seconds']['total'])} of it to open and check reports."
    )


def day_part() -> Iterator[str]:
    """What a day would take by the largest cell at 128 buckets."""
    point = largest(128)
    cpu = point["cpu_seconds"]["total"] / point["reports"] / PARTIES
    sent, between = point["bytes_per_report"]["uploaded"], point["bytes_per_report"]["between helpers"]
    yield ""
    yield (
        f"By the point of {point['reports']:,} {_kind(point)} reports at 128 buckets: "
        f"{point['cpu_seconds']['total']:.1f} processor seconds, or {1e3 * cpu:.2f} ms per report and helper."
    )
    yield (
        f"Uploads are {sent / 1e3:.1f} kB per report in all. The helpers send each other {between:.0f} bytes per "
        f"report. A report takes {ledger_bytes():.0f} bytes in a ledger."
    )
    yield ""
    yield from _day_table(cpu, sent, ledger_bytes())


def _day_table(cpu: float, sent: float, stored_bytes: float) -> Iterator[str]:
    """By processor seconds of a report and helper, and bytes sent and stored for it."""
    yield "| reports a day | processor time of a helper, a day | cores | upload to a helper, a day | ledger, 30 days |"
    yield "|---|---|---|---|---|"
    for reports, name in ((10**6, "1 million"), (10**9, "1 billion")):
        busy = reports * cpu
        yield (
            f"| {name} | {_duration(busy)} | {busy / DAY:.2g} | {_bytes(reports * sent / PARTIES)} "
            f"| {_bytes(30 * reports * stored_bytes)} |"
        )


def ten_million_part() -> Iterator[str]:
    """One batch of the most that helpers take, and what a day of such batches would take."""
    yield ""
    known = [point for point in points() if point["reports"] >= TEN_MILLION and point.get("cpu_seconds")]
    if not known:
        yield "A batch of ten million, the most that helpers take, is not recorded yet:"
        yield "`trefoil bench throughput --reports 10000000 --buckets 16 --without naive --without ingest`."
        return
    point = max(known, key=lambda found: int(found["reports"]))
    reports, cpu = point["reports"], point["cpu_seconds"]["total"] / point["reports"] / PARTIES
    grown = _growth_of("ledger", point)
    batch = point.get("disk_bytes", {}).get("batch")
    yield (
        f"A batch of {reports:,} {_kind(point)} reports at {point['buckets']} buckets, the most that helpers take, was "
        f"answered in {_duration(point['seconds']['total'])}:"
    )
    yield (
        f"{point['reports_per_second']['trefoil']:,.0f} reports a second, "
        f"{_range(point, 'cpu_over_trusted_server')} times the processor time of one trusted server."
    )
    yield f"A helper's processes together held {max(point['peak_rss_mb'].values()):.0f} MB at most."
    if batch is not None and grown:
        yield (
            f"The batch has {_bytes(batch)} on disk, and each ledger grew by {_bytes(max(grown))} with its log: "
            f"{max(grown) / reports:.0f} bytes a report."
        )
    yield "By these figures:"
    yield ""
    yield from _day_table(cpu, point["bytes_per_report"]["uploaded"], ledger_bytes())


def memory_part() -> Iterator[str]:
    """How memory grows at 16 buckets."""
    small = [point for point in points() if point["buckets"] == 16]
    least, most = (choose(small, key=lambda point: int(point["reports"])) for choose in (min, max))
    held = [max(point["peak_rss_mb"].values()) for point in (least, most)]
    yield ""
    yield (
        f"- **Memory grows little with the batch.** A helper's processes together held {held[0]:.0f} MB at "
        f"{least['reports']:,} reports and {held[1]:.0f} MB at {most['reports']:,}."
    )
    yield "  Digests stay on disk beside the column and are read in slices."


def front_part() -> Iterator[str]:
    """The first result of the front page."""
    point, report = largest(128), stored("report")["reports"][1]
    ratios = point["ratios"]
    naive = ratios.get("speedup_over_naive_mpyc") or next(
        found["ratios"]["speedup_over_naive_mpyc"]
        for found in points()
        if found["buckets"] == 128 and "speedup_over_naive_mpyc" in found["ratios"]
    )
    when = "reports checked" if point.get("checked", False) else "before reports were checked"
    yield ""
    yield ""
    yield f"On two cores, three helpers included, {when}. [RESULTS](benchmarks/RESULTS.md) has conditions and data."
    yield ""
    yield (
        f"- **{point['reports_per_second']['trefoil']:,.0f} reports a second** from sealed batch to answer, at 128 "
        f"buckets: {_range(point, 'cpu_over_trusted_server')} times the processor time"
    )
    yield (
        f"  of one trusted server, and {naive:.0f} times a naive MPyC program. A report has "
        f"{report['bytes_total']:,} bytes for all three helpers, with the proof that its sum is at most 2^20. "
    )


def claims_part() -> Iterator[str]:
    """The paper's claims that its figures do not name, with ours in both accountings."""
    yield ""
    yield "| claim of the paper | artifact's accounting | paper's accounting |"
    yield "|---|---|---|"
    ours = [stored(name)["experiments"] for name in ("experiments-artifact", "experiments-paper")]
    for workload, claim in (("criteo", "Criteo"), ("patcg", "PATCG")):
        spans = [_better_than_ara(_of(each, workload)) for each in ours]
        yield (
            f"| queries ×1.16 to 2.88 more accurate than ARA: {claim}, first quartile to maximum, 7 days "
            f"| ×{spans[0][0]:.2f} to {spans[0][1]:.2f} | ×{spans[1][0]:.2f} to {spans[1][1]:.2f} |"
        )
    grown = [_growth(_of(each, "criteo")) for each in ours]
    yield (
        "| Criteo: median error 25 % larger with epochs of 60 days than of 1 day "
        f"| {grown[0]:+.0%} | {grown[1]:+.0%} |".replace("%", " %").replace("25  %", "25 %")
    )
    left = [stored(name)["more_left_at_7_days"] for name in ("criteo-artifact", "criteo-paper")]
    yield (
        "| Criteo: 95 % of device-advertiser pairs have more left than under both baselines "
        f"| {_percent(left[0], 1)} | {_percent(left[1], 1)} |"
    )


HUNTED = ("kill -9", "kill -9 at a step", "pause", "partition", "full disk", "clock step", "rotation", "the MPC fails")


def hunt_part() -> Iterator[str]:
    """How often each thing went wrong in the hunt, and what came of it."""
    virtual, real = stored("hunt")["virtual"], stored("hunt")["real"]
    yield ""
    yield "| | virtual time | real processes |"
    yield "|---|---|---|"
    yield f"| schedules, rounds | {sum(part['schedules'] for part in virtual):,} | {real['rounds']:,} |"
    for mishap in HUNTED:
        happened = sum(part["mishaps"].get(mishap, 0) for part in virtual)
        yield f"| {mishap} | {happened:,} | {real['mishaps'].get(mishap, 0):,} |"
    yield f"| violations | {sum(part['violations'] for part in virtual)} | {real['violations']} |"
    yield ""


PARTS: Mapping[str, Callable[[], Iterator[str]]] = {
    "throughput": throughput_part,
    "costs": costs_part,
    "profile": profile_part,
    "networks": networks_part,
    "day": day_part,
    "ten_million": ten_million_part,
    "memory": memory_part,
    "front": front_part,
    "claims": claims_part,
    "hunt": hunt_part,
    "report": cost_tables.report_part,
    "validity": cost_tables.validity_part,
    "noise": cost_tables.noise_part,
    "noise_sweep": cost_tables.noise_sweep_part,
}


def renewed(text: str) -> str:
    """A document with every part as the files have it now."""

    def part(found: re.Match[str]) -> str:
        if found[2] not in PARTS:
            raise TrefoilError(f"no part of results is named {found[2]}", f"Known are {', '.join(PARTS)}.")
        lines = "\n".join(PARTS[found[2]]())
        # Within a line where the last one ends with a space, on lines of its own otherwise.
        return found[1] + (lines if lines.endswith(" ") else lines.rstrip("\n") + "\n") + found[4]

    return _PART.sub(part, text)


def differing() -> list[Path]:
    """The documents that quote something else than the files have."""
    return [path for path in DOCUMENTS if renewed(path.read_text()) != path.read_text()]


def write_all() -> list[Path]:
    """Renew every document that differs."""
    found = differing()
    for path in found:
        path.write_text(renewed(path.read_text()))
    return found


def _kind(point: Point) -> str:
    suite = "" if point.get("suite", 1) == 1 else f", suite {point['suite']}"
    return ("checked" if point.get("checked", False) else "unchecked") + suite


def _range(point: Point, name: str) -> str:
    low, high = point.get("ranges", {}).get(name, (0.0, 0.0))
    middle = f"{point['ratios'][name]:.1f}"
    return middle if f"{low:.1f}" == f"{high:.1f}" else f"{middle} ({low:.1f} to {high:.1f})"


def _percent(value: float, digits: int = 0) -> str:
    return f"{value:.{digits}%}".replace("%", " %")


def _bytes(count: float) -> str:
    return f"{count / 1e12:.1f} TB" if count >= 1e12 else f"{count / 1e9:.1f} GB"


def _duration(seconds: float) -> str:
    return f"{seconds / 3600:.0f} hours" if seconds >= 7200 else f"{seconds / 60:.1f} minutes"


def _of(experiments: list[Any], name: str) -> list[Point]:
    """The points of one experiment, without those of extra impressions."""
    found = next(each for each in experiments if each["experiment"] == name)
    return [point for point in found["points"] if point.get("extra_impressions") is None]


def _quartiles(found: list[Point], system: str, days: int) -> list[float]:
    point = next(each for each in found if (each["system"], each["epoch_days"]) == (system, days))
    quartiles: list[float] = point["rmsre_quartiles"]
    return quartiles


def _better_than_ara(found: list[Point]) -> tuple[float, float]:
    """ARA-like's error over ours: the least and the most of first quartile, median, third quartile and maximum."""
    both = zip(_quartiles(found, "ara-like", 7)[1:], _quartiles(found, "cookie-monster", 7)[1:], strict=True)
    ratios = [theirs / ours for theirs, ours in both]
    return min(ratios), max(ratios)


def _growth(found: list[Point]) -> float:
    """Of the median error, from epochs of one day to epochs of sixty."""
    short, long = (_quartiles(found, "cookie-monster", days)[2] for days in (1, 60))
    return long / short - 1

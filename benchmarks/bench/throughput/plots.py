"""The throughput results, drawn: scaling in reports and buckets, where the time goes, the price in processor time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.bench.throughput.stages import STAGES
from benchmarks.picture import COLOURS, MARKERS, legend_above, plotted
from protocol.drawing import save_figure
from protocol.places import picture_file

Points = Sequence[Mapping[str, Any]]

ENDINGS = (".svg", ".pdf")
# The stages in the order in which a query goes through them, and what happens in each.
LABELS = {
    "transfer": "transfer",
    "check": "check headers",
    "open": "open (HPKE)",
    "expand": "expand seeds",
    "sum": "sum shares",
    "residues": "check numbers",
    "ledger": "ledger",
    "agreement": "agree",
    "noise": "noise (MPC)",
    "vote": "vote",
    "release": "collect",
    "waiting": "querier waits",
}
SYSTEMS = ("plaintext", "trusted server", "bound of three bare opens", "trefoil", "SecretFlow SPU", "naive MPyC")


def draw_all(points: Points, cores: int, place: Path) -> list[Path]:
    """One picture per question: in every format in a folder, or in the one that a file's name says."""
    checked = [point for point in points if point.get("checked", True)] or points
    drawings = {
        "throughput-reports": plotted(lambda axes: _by_reports(axes, checked, cores)),
        "throughput-buckets": plotted(lambda axes: _by_buckets(axes, checked, cores)),
        "throughput-stages": plotted(lambda axes: _stages(axes, checked)),
        "throughput-ratios": plotted(lambda axes: _ratios(axes, points)),
    }
    paths = []
    for name, figure in drawings.items():
        for path in sorted({picture_file(place, name, only=False, ending=ending) for ending in ENDINGS}):
            save_figure(path, figure)
            paths.append(path)
    return paths


def _by_reports(axes: Any, points: Points, cores: int) -> None:
    width = _middle(sorted({point["buckets"] for point in points}))
    chosen = sorted((point for point in points if point["buckets"] == width), key=lambda point: point["reports"])
    _rates(axes, chosen, "reports")
    axes.set(xlabel=f"reports in the batch, at {width:,} buckets on {_cores(cores)}")


def _by_buckets(axes: Any, points: Points, cores: int) -> None:
    count = _count_with_most_sizes(points)
    chosen = sorted((point for point in points if point["reports"] == count), key=lambda point: point["buckets"])
    _rates(axes, chosen, "buckets")
    axes.set(xlabel=f"buckets, at {count:,} reports on {_cores(cores)}")


def _rates(axes: Any, chosen: Points, size: str) -> None:
    sizes = [point[size] for point in chosen]
    for system, colour, marker in zip(SYSTEMS, COLOURS, MARKERS, strict=True):
        if all(system in point["reports_per_second"] for point in chosen):
            rates = [point["reports_per_second"][system] for point in chosen]
            axes.plot(sizes, rates, color=colour, marker=marker, label=system)
    axes.set(xscale="log", yscale="log", ylabel="reports per second")
    _whole_ticks(axes.xaxis, sizes)
    legend_above(axes, 3)


def _stages(axes: Any, points: Points) -> None:
    """Bars that are as long as the query took: a stage is what the slowest helper spent in it."""
    from matplotlib import colormaps

    count = _count_with_most_sizes(points)
    chosen = sorted((point for point in points if point["reports"] == count), key=lambda point: point["buckets"])
    names = [f"{point['buckets']:,} buckets" for point in chosen]
    left = [0.0] * len(chosen)
    for number, stage in enumerate(STAGES):
        spent = [point["seconds"].get(stage, 0.0) for point in chosen]
        axes.barh(names, spent, left=left, label=LABELS[stage], color=colormaps["tab20"](number), height=0.6)
        left = [sum(pair) for pair in zip(left, spent, strict=True)]
    axes.set(xlabel=f"seconds of a query over {count:,} reports, at its slowest helper")
    legend_above(axes)


def _ratios(axes: Any, points: Points) -> None:
    """Processor time of three helpers over one trusted server, with ranges where a point was measured often."""
    known = [point for point in points if "cpu_over_trusted_server" in point["ratios"]]
    kinds = sorted({(point["buckets"], point.get("checked", True)) for point in known})
    for place, (width, checked) in enumerate(kinds):
        chosen = [point for point in known if (point["buckets"], point.get("checked", True)) == (width, checked)]
        chosen.sort(key=lambda point: point["reports"])
        middle = [point["ratios"]["cpu_over_trusted_server"] for point in chosen]
        reach = [_reach(point) for point in chosen]
        label = f"{width:,} buckets" + ("" if checked else ", unchecked")
        style = {"color": COLOURS[place % len(COLOURS)], "marker": MARKERS[place % len(MARKERS)], "capsize": 3}
        axes.errorbar(
            [point["reports"] for point in chosen], middle, yerr=list(zip(*reach, strict=True)), label=label, **style
        )
    axes.axhline(3, color="#999999", linestyle=":", label="three opens for one")
    axes.set(xscale="log", xlabel="reports in the batch", ylabel="processor time, × one trusted server")
    _whole_ticks(axes.xaxis, sorted({point["reports"] for point in points}))
    legend_above(axes, 3)


def _reach(point: Mapping[str, Any]) -> tuple[float, float]:
    """How far the least and the most of the runs lie from the median."""
    middle = point["ratios"]["cpu_over_trusted_server"]
    low, high = point.get("ranges", {}).get("cpu_over_trusted_server", (middle, middle))
    return middle - low, high - middle


def _whole_ticks(axis: Any, values: Sequence[int]) -> None:
    """Ticks at the sizes that were measured, written out: 16, 128, 1,024."""
    from matplotlib.ticker import FixedLocator, NullLocator

    axis.set_major_locator(FixedLocator(list(values)))
    axis.set_major_formatter("{x:,.0f}")
    axis.set_minor_locator(NullLocator())


def _cores(count: int) -> str:
    return "one core" if count == 1 else f"{count} cores"


def _count_with_most_sizes(points: Points) -> int:
    """The number of reports that was measured at the most numbers of buckets; the largest of several."""
    counts = [int(point["reports"]) for point in points]
    return max(counts, key=lambda count: (counts.count(count), count))


def _middle(values: Sequence[int]) -> int:
    return 128 if 128 in values else values[len(values) // 2]

"""Show throughput results: tables of 80 columns, sentences, plots and CSV; and the body of the command.

Ratios of processor time come first, since they vary least.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.results.columns import Columns, on_terminal
from benchmarks.results.origin import write_results
from benchmarks.throughput.baselines import CORES
from benchmarks.throughput.grid import Extra, Grid
from benchmarks.throughput.measurement import Target, measure_cell
from benchmarks.throughput.point import PROFILE, STAGES, Range, ThroughputPoint, Values
from protocol.cli import console
from protocol.cli.console import COLOURS, MARKERS, legend_above, new_plot, picture_file, plain_table, save_figure
from protocol.files import write_atomically
from protocol.shares import PARTIES

# By the names in the results, in the order of their cost.
SYSTEMS = {
    "plaintext": "adding in the clear",
    "trusted server": "one trusted server, library open",
    "trusted server, batch open": "one trusted server, batch open",
    "three batch opens": "three batch opens (the least)",
    "trefoil": "Trefoil, three helpers",
    "naive MPyC": "naive MPyC program",
}


def tables(points: Sequence[ThroughputPoint]) -> Iterator[Table]:
    title = "Three helpers, sealed batch to checked answer"
    yield on_terminal(title, _SUMMARY, points, words={"reports × buckets"})
    for point in points:
        yield systems(point)
    yield stage_table(points)
    yield from (profile_table(point) for point in points if point.middle.profile is not None)


def _kind(point: ThroughputPoint) -> str:
    suite = "" if point.cell.suite.value == 1 else f", suite {point.cell.suite.value}"
    return ("checked" if point.cell.checked else "unchecked") + suite


# A line for each point, or two where there are ranges. A server may open by the library or in batches.
_SUMMARY: Columns[ThroughputPoint] = {
    "reports × buckets": lambda point: f"{point.cell.reports:,} × {point.cell.buckets:,}\n{_kind(point)}",
    "× server,\nlibrary": lambda point: _show(point.ratios().get("cpu_over_trusted_server")),
    "× server,\nbatch": lambda point: _show(point.ratios().get("cpu_over_batch_server")),
    "× three\nbatch opens": lambda point: _show(point.ratios().get("cpu_over_three_batch_opens")),
    "reports\na second": lambda point: f"{point.reports_per_second()['trefoil']:,.0f}",
    "MB": lambda point: f"{max(point.middle.peak_rss_mb.values()):.0f}",
}


def systems(point: ThroughputPoint) -> Table:
    cpu, speed = point.cpu_per_report(), point.reports_per_second()
    ours = cpu.get("trefoil")
    columns: Columns[str] = {
        "system": lambda system: SYSTEMS[system],
        "CPU µs\na report": lambda system: _brief(1e6 * cpu[system]) if system in cpu else "?",
        "of ours": lambda system: _share(cpu[system] / ours) if ours and system in cpu else "?",
        "reports\na second": lambda system: f"{speed[system]:,.0f}",
    }
    title = f"{point.cell.reports:,} reports of {point.cell.buckets:,} buckets, {_kind(point)}"
    return on_terminal(title, columns, speed, words={"system"})


def stage_table(points: Sequence[ThroughputPoint]) -> Table:
    """Return a table of seconds by stage, with a column for each point."""
    output = plain_table("Seconds by stage, at the slowest helper", ["stage", *map(_heading, points)], words={"stage"})
    for stage in (*STAGES, "total"):
        output.add_row(stage, *(f"{point.middle.seconds[stage]:.2f}" for point in points))
    return output


def profile_table(point: ThroughputPoint) -> Table:
    """Return a table of the three helpers' processor time by activity, which adds up to the total."""
    spent: Values = point.middle.profile or {}
    total = sum(spent.values()) or 1.0
    rows = {**{text: spent[name] for name, text in PROFILE.items()}, "all": total}
    columns: Columns[str] = {
        "what": lambda text: text,
        "µs a report": lambda text: f"{1e6 * rows[text] / point.cell.reports:.1f}",
        "of all": lambda text: f"{rows[text] / total:.1%}",
    }
    title = f"Processor time of three helpers: {point.cell.reports:,} × {point.cell.buckets:,}, {_kind(point)}"
    return on_terminal(title, columns, rows, words={"what"})


def sentences(points: Sequence[ThroughputPoint]) -> Iterator[str]:
    """Yield a summary sentence for each point."""
    for point in points:
        ratios = point.ratios()
        slower = f"{ratios['slowdown_over_plaintext'].median:,.0f} times slower than adding numbers in the clear"
        server, batch_server = ratios.get("cpu_over_trusted_server"), ratios.get("cpu_over_batch_server")
        name = f"{point.cell.reports:,} {_kind(point)} reports, {point.cell.buckets:,} buckets"
        if server is None or batch_server is None:
            yield f"{name}: {slower}. The helpers do not say what processor time they used."
            continue
        each = 1e3 * point.cpu_per_report()["trefoil"] / PARTIES
        processor = f"{server.show()} times the processor time of one trusted server that opens by the library"
        batch = f"{batch_server.show()} times that of one that opens in batches"
        yield f"{name}: {slower}, {processor}, {batch}; {each:.2f} ms a report and helper."
    lanes = min(point.middle.open_lanes for point in points)
    yield f"The helpers open payloads {'eight' if lanes > 1 else 'one'} at a time."
    if len(points[0].runs) > 1:
        yield f"Medians of {len(points[0].runs)} runs; in brackets the least and the most."


def left_out(grid: Grid) -> str:
    """Return a line that names the skipped baselines, if any."""
    missing = [extra.value for extra in Extra if not grid.wants(extra)]
    return f"Left out: {', '.join(missing)}." if missing else ""


def estimate(grid: Grid) -> str:
    seconds, disk = grid.seconds(), grid.disk_bytes()
    time = f"{seconds:.0f} seconds" if seconds < 90 else f"{seconds / 60:.0f} minutes"
    runs = len(grid.cells) * grid.repeat
    return f"{runs} {'batch' if runs == 1 else 'batches'}: about {time}, and {disk / 1e6:,.0f} MB of disk at most."


def _heading(point: ThroughputPoint) -> str:
    kind = "" if point.cell.checked else "\nunchecked"
    return f"{point.cell.reports:,}\n× {point.cell.buckets:,}{kind}"


def _show(ratio: Range | None) -> str:
    """Format a range on two lines."""
    return "?" if ratio is None else ratio.show(2).replace(" (", "\n(")


def _share(of: float) -> str:
    """Format a share of ours, as a fraction if it is small."""
    return f"1/{1 / of:,.0f}" if of < 0.05 else _brief(of)


def _brief(value: float) -> str:
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.3g}"


Points = Sequence[Mapping[str, Any]]

ENDINGS = (".svg", ".pdf")


def draw_all(points: Points, cores: int, place: Path) -> list[Path]:
    """Draw one picture per question: in every format into a folder, or in the format of a file's name."""
    checked = [point for point in points if point.get("checked", True)] or points
    drawings = {
        "throughput-reports": new_plot(lambda axes: _by_reports(axes, checked, cores)),
        "throughput-buckets": new_plot(lambda axes: _by_buckets(axes, checked, cores)),
        "throughput-stages": new_plot(lambda axes: _stages(axes, checked)),
        "throughput-ratios": new_plot(lambda axes: _ratios(axes, points)),
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
    for system, colour, marker in zip(SYSTEMS, COLOURS, MARKERS, strict=False):
        if all(system in point["reports_per_second"] for point in chosen):
            rates = [point["reports_per_second"][system] for point in chosen]
            axes.plot(sizes, rates, color=colour, marker=marker, label=system)
    axes.set(xscale="log", yscale="log", ylabel="reports per second")
    _whole_ticks(axes.xaxis, sizes)
    legend_above(axes, 3)


def _stages(axes: Any, points: Points) -> None:
    """Plot the stages of a query as bars: seconds at the slowest helper."""
    from matplotlib import colormaps

    count = _count_with_most_sizes(points)
    chosen = sorted((point for point in points if point["reports"] == count), key=lambda point: point["buckets"])
    names = [f"{point['buckets']:,} buckets" for point in chosen]
    left = [0.0] * len(chosen)
    for number, (stage, label) in enumerate(STAGES.items()):
        spent = [point["seconds"].get(stage, 0.0) for point in chosen]
        axes.barh(names, spent, left=left, label=label, color=colormaps["tab20"](number), height=0.6)
        left = [sum(pair) for pair in zip(left, spent, strict=True)]
    axes.set(xlabel=f"seconds of a query over {count:,} reports, at its slowest helper")
    legend_above(axes)


def _ratios(axes: Any, points: Points) -> None:
    """Plot the processor time of three helpers over one trusted server, with ranges over runs."""
    with_ratio = [point for point in points if "cpu_over_trusted_server" in point["ratios"]]
    kinds = sorted({(point["buckets"], point.get("checked", True)) for point in with_ratio})
    for place, (width, checked) in enumerate(kinds):
        chosen = [point for point in with_ratio if (point["buckets"], point.get("checked", True)) == (width, checked)]
        chosen.sort(key=lambda point: point["reports"])
        middle = [point["ratios"]["cpu_over_trusted_server"] for point in chosen]
        reach = [_reach(point) for point in chosen]
        label = f"{width:,} buckets" + ("" if checked else ", unchecked")
        style = {"color": COLOURS[place % len(COLOURS)], "marker": MARKERS[place % len(MARKERS)], "capsize": 3}
        axes.errorbar(
            [point["reports"] for point in chosen], middle, yerr=list(zip(*reach, strict=True)), label=label, **style
        )
    axes.set(xscale="log", xlabel="reports in the batch", ylabel="processor time, × one trusted server")
    _whole_ticks(axes.xaxis, sorted({point["reports"] for point in points}))
    legend_above(axes, 3)


def _reach(point: Mapping[str, Any]) -> tuple[float, float]:
    """Return the distances of the minimum and the maximum of the runs from the median."""
    middle = point["ratios"]["cpu_over_trusted_server"]
    low, high = point.get("ranges", {}).get("cpu_over_trusted_server", (middle, middle))
    return middle - low, high - middle


def _whole_ticks(axis: Any, values: Sequence[int]) -> None:
    """Set ticks at the measured sizes, written out: 16, 128, 1,024."""
    from matplotlib.ticker import FixedLocator, NullLocator

    axis.set_major_locator(FixedLocator(list(values)))
    axis.set_major_formatter("{x:,.0f}")
    axis.set_minor_locator(NullLocator())


def _cores(count: int) -> str:
    return "one core" if count == 1 else f"{count} cores"


def _count_with_most_sizes(points: Points) -> int:
    """Return the number of reports that was measured with the most bucket counts; the largest if tied."""
    counts = [int(point["reports"]) for point in points]
    return max(counts, key=lambda count: (counts.count(count), count))


def _middle(values: Sequence[int]) -> int:
    return 128 if 128 in values else values[len(values) // 2]


def to_csv(points: Points) -> str:
    """Return a CSV of size, kind, run, seconds, processor seconds and every ratio, with a header."""
    rows = [
        {
            **{name: point[name] for name in ("reports", "buckets", "checked", "suite")},
            "run": number,
            **{name: value for name, value in run.items() if name != "ratios"},
            **run["ratios"],
        }
        for point in points
        for number, run in enumerate(point["runs"], 1)
    ]
    text = io.StringIO()
    table = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    return text.getvalue()


def measure_throughput(
    grid: Grid, given: Target | None, json: Path | None = None, csv: Path | None = None, plot: Path | None = None
) -> None:
    """Run the command: print an estimate, measure, show and write."""
    grid.check_disk()
    console.err.print(estimate(grid), highlight=False)
    points = []
    with console.progress("throughput", len(grid.cells)) as advance:
        for cell in grid.cells:
            points.append(measure_cell(cell, grid, given, lambda note: advance(0, note=note)))
            advance(note=cell.name)
    for table in tables(points):
        console.out.print(table)
    for text in (*sentences(points), left_out(grid)):
        if text:
            console.out.print(text, highlight=False)
    stored = [point.to_json() for point in points]
    if csv is not None:
        write_atomically(csv, to_csv(stored).encode())
    if plot is not None:
        drawn = draw_all(stored, CORES, plot)
        console.say(f"drawn: {', '.join(path.name for path in drawn)}")
    write_results(json, {"points": stored}, grid.seed)

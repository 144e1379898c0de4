"""Show throughput results: tables of 80 columns, sentences, plots and CSV; and the body of the command.

Ratios of processor time come first, since they vary least.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from benchmarks.results.columns import Columns, Record, on_terminal
from benchmarks.results.origin import write_results
from benchmarks.throughput.baselines import CORES
from benchmarks.throughput.grid import Extra, Grid
from benchmarks.throughput.measurement import Target, measure_cell
from benchmarks.throughput.point import PROFILE, STAGES, kind, spread
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


def tables(points: Sequence[Record]) -> Iterator[Table]:
    title = "Three helpers, sealed batch to checked answer"
    yield on_terminal(title, _SUMMARY, points, words={"reports × buckets"})
    yield from map(systems, points)
    yield stage_table(points)
    yield from (profile_table(point) for point in points if point["profile"] is not None)


# A line for each point, or two where there are ranges. A server may open by the library or in batches.
_SUMMARY: Columns[Record] = {
    "reports × buckets": lambda point: f"{point['reports']:,} × {point['buckets']:,}\n{kind(point)}",
    "× server,\nlibrary": lambda point: _on_two_lines(point, "cpu_over_trusted_server"),
    "× server,\nbatch": lambda point: _on_two_lines(point, "cpu_over_batch_server"),
    "× three\nbatch opens": lambda point: _on_two_lines(point, "cpu_over_three_batch_opens"),
    "reports\na second": lambda point: f"{point['reports_per_second']['trefoil']:,.0f}",
    "MB": lambda point: f"{max(point['peak_rss_mb'].values()):.0f}",
}


def _on_two_lines(point: Record, ratio: str) -> str:
    return spread(point, ratio, digits=2).replace(" (", "\n(") or "?"


def systems(point: Record) -> Table:
    cpu, speed = point["cpu_seconds_per_report"], point["reports_per_second"]
    ours = cpu.get("trefoil")
    columns: Columns[str] = {
        "system": lambda system: SYSTEMS[system],
        "CPU µs\na report": lambda system: _brief(1e6 * cpu[system]) if system in cpu else "?",
        "of ours": lambda system: _share(cpu[system] / ours) if ours and system in cpu else "?",
        "reports\na second": lambda system: f"{speed[system]:,.0f}",
    }
    title = f"{point['reports']:,} reports of {point['buckets']:,} buckets, {kind(point)}"
    return on_terminal(title, columns, speed, words={"system"})


def stage_table(points: Sequence[Record]) -> Table:
    """Return a table of seconds by stage, with a column for each point."""
    headings = [
        f"{point['reports']:,}\n× {point['buckets']:,}" + ("" if point["checked"] else "\nunchecked")
        for point in points
    ]
    output = plain_table("Seconds by stage, at the slowest helper", ["stage", *headings], words={"stage"})
    for stage in (*STAGES, "total"):
        output.add_row(stage, *(f"{point['seconds'][stage]:.2f}" for point in points))
    return output


def profile_table(point: Record) -> Table:
    """Return a table of the three helpers' processor time by activity, which adds up to the total."""
    total = sum(point["profile"].values()) or 1.0
    rows = {**{text: point["profile"][name] for name, text in PROFILE.items()}, "all": total}
    columns: Columns[str] = {
        "what": lambda text: text,
        "µs a report": lambda text: f"{1e6 * rows[text] / point['reports']:.1f}",
        "of all": lambda text: f"{rows[text] / total:.1%}",
    }
    title = f"Processor time of three helpers: {point['reports']:,} × {point['buckets']:,}, {kind(point)}"
    return on_terminal(title, columns, rows, words={"what"})


def sentences(points: Sequence[Record]) -> Iterator[str]:
    """Yield a summary sentence for each point."""
    for point in points:
        slower = f"{point['ratios']['slowdown_over_plaintext']:,.0f} times slower than adding numbers in the clear"
        server, batch_server = (spread(point, f"cpu_over_{name}") for name in ("trusted_server", "batch_server"))
        name = f"{point['reports']:,} {kind(point)} reports, {point['buckets']:,} buckets"
        if not server:
            yield f"{name}: {slower}. The helpers do not say what processor time they used."
            continue
        each = 1e3 * point["cpu_seconds_per_report"]["trefoil"] / PARTIES
        processor = f"{server} times the processor time of one trusted server that opens by the library"
        batch = f"{batch_server} times that of one that opens in batches"
        yield f"{name}: {slower}, {processor}, {batch}; {each:.2f} ms a report and helper."
    lanes = min(point["open_lanes"] for point in points)
    yield f"The helpers open payloads {'eight' if lanes > 1 else 'one'} at a time."
    runs = len(points[0]["runs"])
    if runs > 1:
        yield f"Medians of {runs} runs; in brackets the least and the most."


def left_out(grid: Grid) -> str:
    """Return a line that names the skipped baselines, if any."""
    missing = [extra.value for extra in Extra if not grid.wants(extra)]
    return f"Left out: {', '.join(missing)}." if missing else ""


def estimate(grid: Grid) -> str:
    seconds, disk = grid.seconds(), grid.disk_bytes()
    time = f"{seconds:.0f} seconds" if seconds < 90 else f"{seconds / 60:.0f} minutes"
    runs = len(grid.cells) * grid.repeat
    return f"{runs} {'batch' if runs == 1 else 'batches'}: about {time}, and {disk / 1e6:,.0f} MB of disk at most."


def _share(of: float) -> str:
    """Format a share of ours, as a fraction if it is small."""
    return f"1/{1 / of:,.0f}" if of < 0.05 else _brief(of)


def _brief(value: float) -> str:
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.3g}"


ENDINGS = (".svg", ".pdf")


def draw_all(points: Sequence[Record], cores: int, place: Path) -> list[Path]:
    """Draw one picture per question: in every format into a folder, or in the format of a file's name."""
    checked = [point for point in points if point["checked"]]
    widths, counts = ([point[size] for point in checked] for size in ("buckets", "reports"))
    width = 128 if 128 in widths else sorted(set(widths))[len(set(widths)) // 2]
    # What was measured with the most numbers of buckets; the largest if tied.
    count = max(counts, key=lambda count: (counts.count(count), count))
    on = "one core" if cores == 1 else f"{cores} cores"
    by_reports = sorted((point for point in checked if point["buckets"] == width), key=lambda point: point["reports"])
    by_buckets = sorted((point for point in checked if point["reports"] == count), key=lambda point: point["buckets"])
    batches, histograms = (
        f"reports in the batch, at {width:,} buckets on {on}",
        f"buckets, at {count:,} reports on {on}",
    )
    drawings = {
        "throughput-reports": new_plot(lambda axes: _rates(axes, by_reports, "reports", batches)),
        "throughput-buckets": new_plot(lambda axes: _rates(axes, by_buckets, "buckets", histograms)),
        "throughput-stages": new_plot(lambda axes: _stages(axes, by_buckets, count)),
        "throughput-ratios": new_plot(lambda axes: _ratios(axes, points)),
    }
    paths = []
    for name, figure in drawings.items():
        for path in sorted({picture_file(place, name, only=False, ending=ending) for ending in ENDINGS}):
            save_figure(path, figure)
            paths.append(path)
    return paths


def _rates(axes: Any, chosen: Sequence[Record], size: str, label: str) -> None:
    sizes = [point[size] for point in chosen]
    for system, colour, marker in zip(SYSTEMS, COLOURS, MARKERS, strict=False):
        if all(system in point["reports_per_second"] for point in chosen):
            rates = [point["reports_per_second"][system] for point in chosen]
            axes.plot(sizes, rates, color=colour, marker=marker, label=system)
    axes.set(xscale="log", yscale="log", xlabel=label, ylabel="reports per second")
    _whole_ticks(axes.xaxis, sizes)
    legend_above(axes, 3)


def _stages(axes: Any, chosen: Sequence[Record], count: int) -> None:
    """Plot the stages of a query as bars: seconds at the slowest helper."""
    from matplotlib import colormaps

    names = [f"{point['buckets']:,} buckets" for point in chosen]
    left = np.zeros(len(chosen))
    for number, (stage, label) in enumerate(STAGES.items()):
        spent = [point["seconds"][stage] for point in chosen]
        axes.barh(names, spent, left=left, label=label, color=colormaps["tab20"](number), height=0.6)
        left += spent
    axes.set(xlabel=f"seconds of a query over {count:,} reports, at its slowest helper")
    legend_above(axes)


def _ratios(axes: Any, points: Sequence[Record]) -> None:
    """Plot the processor time of three helpers over one trusted server, with ranges over runs."""
    ratio = "cpu_over_trusted_server"
    kinds: dict[tuple[int, bool], list[tuple[int, float, float, float]]] = {}
    for point in sorted(points, key=lambda point: (point["buckets"], point["checked"], point["reports"])):
        if ratio in point["ratios"]:
            middle, (low, high) = point["ratios"][ratio], point["ranges"][ratio]
            row = (point["reports"], middle, middle - low, high - middle)
            kinds.setdefault((point["buckets"], point["checked"]), []).append(row)
    for place, ((width, checked), rows) in enumerate(kinds.items()):
        sizes, middles, *reach = zip(*rows, strict=True)
        label = f"{width:,} buckets" + ("" if checked else ", unchecked")
        style = {"color": COLOURS[place % len(COLOURS)], "marker": MARKERS[place % len(MARKERS)], "capsize": 3}
        axes.errorbar(sizes, middles, yerr=reach, label=label, **style)
    axes.set(xscale="log", xlabel="reports in the batch", ylabel="processor time, × one trusted server")
    _whole_ticks(axes.xaxis, sorted({point["reports"] for point in points}))
    legend_above(axes, 3)


def _whole_ticks(axis: Any, values: Sequence[int]) -> None:
    """Set ticks at the measured sizes, written out: 16, 128, 1,024."""
    from matplotlib.ticker import FixedLocator, NullLocator

    axis.set_major_locator(FixedLocator(list(values)))
    axis.set_major_formatter("{x:,.0f}")
    axis.set_minor_locator(NullLocator())


def to_csv(points: Sequence[Record]) -> str:
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
    if csv is not None:
        write_atomically(csv, to_csv(points).encode())
    if plot is not None:
        drawn = draw_all(points, CORES, plot)
        console.say(f"drawn: {', '.join(path.name for path in drawn)}")
    write_results(json, {"points": points}, grid.seed)

"""Show throughput results: tables of 80 columns, sentences, plots and CSV; and the body of the command.

Ratios of processor time come first, since they vary least.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.results.origin import write_results
from benchmarks.throughput.baselines import CORES
from benchmarks.throughput.grid import Extra, Grid, cells_of
from benchmarks.throughput.measurement import GivenHelpers, ThroughputRun, measure_grid
from benchmarks.throughput.point import PROFILE, STAGES, Range, ThroughputPoint, Values
from protocol.cli import console
from protocol.cli.console import COLOURS, MARKERS, legend_above, new_plot, picture_file, save_figure
from protocol.cli.options import check_file
from protocol.errors import ErrorKind, TrefoilError
from protocol.files import write_atomically
from protocol.hpke import CLASSICAL, Suite
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
    """Yield all tables."""
    yield summary(points)
    for point in points:
        yield systems(point)
    yield stage_table(points)
    yield from (profile_table(point) for point in points if point.middle.profile is not None)


def _table(title: str, first: Sequence[str], numbers: Sequence[str]) -> Table:
    output = Table(title=title, title_justify="left", min_width=40)
    for column in first:
        output.add_column(column, no_wrap=True)
    for column in numbers:
        output.add_column(column, justify="right", overflow="fold")
    return output


def _kind(point: ThroughputPoint) -> str:
    suite = "" if point.cell.suite.value == 1 else f", suite {point.cell.suite.value}"
    return ("checked" if point.cell.checked else "unchecked") + suite


def summary(points: Sequence[ThroughputPoint]) -> Table:
    """Return a line for each point, or two where there are ranges. A server may open by the library or in batches."""
    columns = ("× server,\nlibrary", "× server,\nbatch", "× three\nbatch opens", "reports\na second", "MB")
    output = _table("Three helpers, sealed batch to checked answer", ["reports × buckets"], columns)
    for point in points:
        ratios, memory = point.ratios(), point.middle.peak_rss_mb
        output.add_row(
            f"{point.cell.reports:,} × {point.cell.buckets:,}\n{_kind(point)}",
            _show(ratios.get("cpu_over_trusted_server")),
            _show(ratios.get("cpu_over_batch_server")),
            _show(ratios.get("cpu_over_three_batch_opens")),
            f"{point.reports_per_second()['trefoil']:,.0f}",
            f"{max(memory.values()):.0f}" if any(memory.values()) else "?",
        )
    return output


def systems(point: ThroughputPoint) -> Table:
    """Return a table of every system at one size."""
    title = f"{point.cell.reports:,} reports of {point.cell.buckets:,} buckets, {_kind(point)}"
    output = _table(title, ["system"], ("CPU µs\na report", "of ours", "reports\na second"))
    cpu, speed = point.cpu_per_report(), point.reports_per_second()
    ours = cpu.get("trefoil")
    for system, name in SYSTEMS.items():
        if system in speed:
            spent = cpu.get(system)
            over = "?" if ours is None or spent is None else _share(spent / ours)
            output.add_row(name, "?" if spent is None else _brief(1e6 * spent), over, f"{speed[system]:,.0f}")
    return output


def stage_table(points: Sequence[ThroughputPoint]) -> Table:
    """Return a table of seconds by stage, with a column for each point."""
    output = _table("Seconds by stage, at the slowest helper", ["stage"], [_heading(point) for point in points])
    for stage in (*STAGES, "total"):
        spent = [point.middle.seconds[stage] for point in points]
        output.add_row(stage, *(f"{seconds:.2f}" for seconds in spent), end_section=stage == STAGES[-1])
    return output


def profile_table(point: ThroughputPoint) -> Table:
    """Return a table of the three helpers' processor time by activity, which adds up to the total."""
    title = f"Processor time of three helpers: {point.cell.reports:,} × {point.cell.buckets:,}, {_kind(point)}"
    output = _table(title, ["what"], ("µs a report", "of all"))
    spent: Values = point.middle.profile or {}
    total = sum(spent.values()) or 1.0
    for name, text in PROFILE.items():
        per_report = 1e6 * spent[name] / point.cell.reports
        output.add_row(text, f"{per_report:.1f}", f"{spent[name] / total:.1%}", end_section=name == "noise")
    output.add_row("all", f"{1e6 * total / point.cell.reports:.1f}", f"{1:.0%}")
    return output


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
    if not missing:
        return ""
    return f"Left out: {', '.join(missing)}."


def estimate(grid: Grid) -> str:
    """Return the estimated time and disk of a grid."""
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
    """Format three significant digits."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.3g}"


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
PLOTTED_SYSTEMS = (
    "plaintext",
    "trusted server",
    "trusted server, batch open",
    "three batch opens",
    "trefoil",
    "naive MPyC",
)


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
    for system, colour, marker in zip(PLOTTED_SYSTEMS, COLOURS, MARKERS, strict=False):
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
    for number, stage in enumerate(STAGES):
        spent = [point["seconds"].get(stage, 0.0) for point in chosen]
        axes.barh(names, spent, left=left, label=LABELS[stage], color=colormaps["tab20"](number), height=0.6)
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


def to_csv(points: Sequence[ThroughputPoint]) -> str:
    """Return a CSV of size, kind, run, seconds, processor seconds and every ratio, with a header."""
    rows = [row for point in points for row in _rows(point)]
    text = io.StringIO()
    table = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    return text.getvalue()


def _rows(point: ThroughputPoint) -> Iterator[dict[str, object]]:
    stored: Mapping[str, Any] = point.to_json()
    for number, run in enumerate(stored["runs"], 1):
        yield {
            **{name: stored[name] for name in ("reports", "buckets", "checked", "suite")},
            "run": number,
            **{name: value for name, value in run.items() if name != "ratios"},
            **run["ratios"],
        }


# The bar counts tenths of a second of the estimate.
_TICKS = 10


@dataclass(frozen=True, slots=True)
class Outputs:
    """The output files, checked before any work."""

    json: Path | None = None
    csv: Path | None = None
    plot: Path | None = None

    def __post_init__(self) -> None:
        if self.csv is not None:
            check_file("--csv", self.csv)


@dataclass(frozen=True, slots=True)
class ThroughputRequest:
    """The command's options."""

    reports: Sequence[int]
    buckets: Sequence[int]
    seed: int = 1
    repeat: int = 1
    suite: int | None = None
    unchecked: bool = False
    without: Sequence[Extra] = ()
    profile: bool = False
    helpers: Path | None = None
    site_key: Path | None = None
    site: str = "shop.example"

    def given(self) -> GivenHelpers | None:
        """Return the helpers named by --helpers and --site-key; None if neither is set."""
        if self.helpers is None and self.site_key is None:
            return None
        if self.helpers is None or self.site_key is None:
            raise TrefoilError(
                "running helpers need both --helpers and --site-key",
                "Give both, or neither.",
                kind=ErrorKind.MISSING_OPTION,
            )
        return GivenHelpers.load(self.helpers, self.site_key, self.site)

    def grid(self, given: GivenHelpers | None) -> Grid:
        """Return the grid to measure."""
        suites = {suite.value: suite for suite in Suite}
        if self.suite is not None and self.suite not in suites:
            raise TrefoilError(
                f"there is no cipher suite {self.suite}", f"Known are {sorted(suites)}.", kind=ErrorKind.UNKNOWN_NAME
            )
        suite = CLASSICAL if self.suite is None else suites[self.suite]
        if given is not None:
            if self.suite is not None and suite is not given.suite:
                raise TrefoilError(
                    f"devices seal to these helpers in suite {given.suite.value}",
                    "Omit --suite.",
                    kind=ErrorKind.CONFLICTING_OPTIONS,
                )
            suite = given.suite
        cells = cells_of(self.reports, self.buckets, suite, unchecked=self.unchecked)
        return Grid(cells, self.seed, self.repeat, frozenset(self.without), self.profile)


def measure_throughput(request: ThroughputRequest, outputs: Outputs) -> None:
    """Run the command: reject what cannot be, print an estimate, measure, show and write."""
    given = request.given()
    grid = request.grid(given)
    grid.check_disk()
    console.err.print(estimate(grid), highlight=False)
    with console.progress("throughput", round(_TICKS * grid.seconds())) as advance:
        measured = measure_grid(grid, given, _ticking(advance))
    _show_run(measured, grid)
    if outputs.csv is not None:
        write_atomically(outputs.csv, to_csv(measured.points).encode())
    if outputs.plot is not None:
        drawn = draw_all([point.to_json() for point in measured.points], CORES, outputs.plot)
        console.say(f"drawn: {', '.join(path.name for path in drawn)}")
    write_results(outputs.json, measured.to_json(), request.seed)


def _show_run(measured: ThroughputRun, grid: Grid) -> None:
    for table in tables(measured.points):
        console.out.print(table)
    for text in (*sentences(measured.points), left_out(grid)):
        if text:
            console.out.print(text, highlight=False)


def _ticking(advance: console.Advance) -> Callable[[float, str], None]:
    """Convert seconds of the estimate to whole steps of the bar, without losing the fractions."""
    left = 0.0

    def say(seconds: float, note: str) -> None:
        nonlocal left
        left += _TICKS * seconds
        whole = int(left)
        left -= whole
        advance(whole, note=note)

    return say

"""Tables and sentences for a person, on a page of 80 columns. Ratios by processor time come first: they are steady."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.table import Table

from benchmarks.bench.throughput.counters import Values
from benchmarks.bench.throughput.grid import Extra, Grid
from benchmarks.bench.throughput.point import Range, ThroughputPoint
from benchmarks.bench.throughput.stages import PROFILE, STAGES
from protocol.shares import PARTIES

# By the names in the results, in the order of their cost.
SYSTEMS = {
    "plaintext": "adding in the clear",
    "SecretFlow SPU": "SecretFlow SPU: share, sum, reveal",
    "trusted server": "one trusted server",
    "bound of three bare opens": "three bare opens (the least)",
    "trefoil": "Trefoil, three helpers",
    "naive MPyC": "naive MPyC program",
}


def tables(points: Sequence[ThroughputPoint]) -> Iterator[Table]:
    """The whole page, but for the sentences at its end."""
    yield summary(points)
    for point in points:
        yield systems(point)
    yield stage_table(points)
    yield from (profile_table(point) for point in points if point.middle.profile is not None)


def _table(title: str, first: Sequence[str], numbers: Sequence[str]) -> Table:
    shown = Table(title=title, title_justify="left", min_width=40)
    for column in first:
        shown.add_column(column, no_wrap=True)
    for column in numbers:
        shown.add_column(column, justify="right", overflow="fold")
    return shown


def _kind(point: ThroughputPoint) -> str:
    suite = "" if point.cell.suite.value == 1 else f", suite {point.cell.suite.value}"
    return ("checked" if point.cell.checked else "unchecked") + suite


def summary(points: Sequence[ThroughputPoint]) -> Table:
    """A line for each point, or three where there are ranges. The bound is that of three bare opens a report."""
    columns = ("CPU, × one\ntrusted server", "CPU, × three\nbare opens", "reports\na second", "of the\nbound", "MB")
    shown = _table("Three helpers, sealed batch to checked answer", ["reports × buckets"], columns)
    for point in points:
        ratios, memory = point.ratios(), point.middle.peak_rss_mb
        shown.add_row(
            f"{point.cell.reports:,} × {point.cell.buckets:,}\n{_kind(point)}",
            _show(ratios.get("cpu_over_trusted_server")),
            _show(ratios.get("cpu_over_three_bare_opens")),
            f"{point.reports_per_second()['trefoil']:,.0f}",
            f"{ratios['fraction_of_bound'].median:.0%}",
            f"{max(memory.values()):.0f}" if any(memory.values()) else "?",
        )
    return shown


def systems(point: ThroughputPoint) -> Table:
    """Every system at one size."""
    title = f"{point.cell.reports:,} reports of {point.cell.buckets:,} buckets, {_kind(point)}"
    shown = _table(title, ["system"], ("CPU µs\na report", "of ours", "reports\na second"))
    cpu, speed = point.cpu_per_report(), point.reports_per_second()
    ours = cpu.get("trefoil")
    for system, name in SYSTEMS.items():
        if system in speed:
            spent = cpu.get(system)
            over = "?" if ours is None or spent is None else _share(spent / ours)
            shown.add_row(name, "?" if spent is None else _brief(1e6 * spent), over, f"{speed[system]:,.0f}")
    return shown


def stage_table(points: Sequence[ThroughputPoint]) -> Table:
    """Seconds of one helper's day. A column for each point, since there are more stages than points."""
    shown = _table("Seconds by stage, at the slowest helper", ["stage"], [_heading(point) for point in points])
    for stage in (*STAGES, "total"):
        spent = [point.middle.seconds[stage] for point in points]
        shown.add_row(stage, *(f"{seconds:.2f}" for seconds in spent), end_section=stage == STAGES[-1])
    return shown


def profile_table(point: ThroughputPoint) -> Table:
    """Processor time of all three helpers by what they did, which adds up to all they used."""
    title = f"Processor time of three helpers: {point.cell.reports:,} × {point.cell.buckets:,}, {_kind(point)}"
    shown = _table(title, ["what"], ("µs a report", "of all"))
    spent: Values = point.middle.profile or {}
    total = sum(spent.values()) or 1.0
    for name, text in PROFILE.items():
        per_report = 1e6 * spent[name] / point.cell.reports
        shown.add_row(text, f"{per_report:.1f}", f"{spent[name] / total:.1%}", end_section=name == "noise")
    shown.add_row("all", f"{1e6 * total / point.cell.reports:.1f}", f"{1:.0%}")
    return shown


def sentences(points: Sequence[ThroughputPoint]) -> Iterator[str]:
    """What it comes to, in words: one for each point."""
    for point in points:
        ratios = point.ratios()
        slower = f"{ratios['slowdown_over_plaintext'].median:,.0f} times slower than adding numbers in the clear"
        server = ratios.get("cpu_over_trusted_server")
        name = f"{point.cell.reports:,} {_kind(point)} reports, {point.cell.buckets:,} buckets"
        if server is None:
            yield f"{name}: {slower}. The helpers do not say what processor time they used."
            continue
        each = 1e3 * point.cpu_per_report()["trefoil"] / PARTIES
        processor = f"{server.show()} times the processor time of one trusted server"
        yield f"{name}: {slower}, {processor}; {each:.2f} ms a report and helper."
    if len(points[0].runs) > 1:
        yield f"Medians of {len(points[0].runs)} runs; in brackets the least and the most."


def left_out(grid: Grid) -> str:
    """A line about what was not measured, if anything was not."""
    missing = [extra.value for extra in Extra if not grid.wants(extra)]
    if not missing:
        return ""
    hint = "" if grid.spu_python else " (SPU needs --spu-python: a Python that has it)"
    return f"Left out: {', '.join(missing)}{hint}."


def estimate(grid: Grid) -> str:
    """What is about to happen."""
    seconds, disk = grid.seconds(), grid.disk_bytes()
    time = f"{seconds:.0f} seconds" if seconds < 90 else f"{seconds / 60:.0f} minutes"
    runs = len(grid.cells) * grid.repeat
    return f"{runs} {'batch' if runs == 1 else 'batches'}: about {time}, and {disk / 1e6:,.0f} MB of disk at most."


def _heading(point: ThroughputPoint) -> str:
    kind = "" if point.cell.checked else "\nunchecked"
    return f"{point.cell.reports:,}\n× {point.cell.buckets:,}{kind}"


def _show(found: Range | None) -> str:
    """On two lines where there is a range."""
    return "?" if found is None else found.show(2).replace(" (", "\n(")


def _share(of: float) -> str:
    """How much of ours: a fraction where it is a small one."""
    return f"1/{1 / of:,.0f}" if of < 0.05 else _brief(of)


def _brief(value: float) -> str:
    """Three digits that say something, however small or large."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.3g}"

"""Draw every subfigure of the paper's evaluation from results, with the numbers recorded by the paper and its artifact.

Recorded numbers are only drawn beside ours; nothing is computed from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.experiments.bias import CUTOFFS, Bound, Margin, Study
from benchmarks.experiments.policies import System
from benchmarks.experiments.results import Point, Result
from benchmarks.experiments.world import Floats
from protocol.cli.console import legend_above as _legend
from protocol.cli.console import new_plot as _plot
from protocol.units import MICROS


@dataclass(frozen=True, slots=True)
class MicrobenchmarkReference:
    """One row of Figure 4 over ten seeds of the artifact: mean and range of the average, range of the maximum."""

    participation: float
    rate: float
    system: System
    average: float
    average_range: tuple[float, float]
    maximum_range: tuple[float, float]
    rmsre: float


@dataclass(frozen=True, slots=True)
class RunReference:
    """One system's recorded run: average budget, queries run, and RMSRE as far as it is known."""

    system: System
    average: float | None = None
    executed: int | None = None
    quartiles: tuple[float, float, float, float, float] | None = None
    kappa: float = 0.0


MICROBENCHMARK = (
    MicrobenchmarkReference(0.1, 0.1, System.IPA_LIKE, 0.5887, (0.5884, 0.5910), (0.9210, 0.9210), 0.015845),
    MicrobenchmarkReference(0.1, 0.1, System.ARA_LIKE, 0.030787, (0.030729, 0.030878), (0.276, 0.322), 0.015845),
    MicrobenchmarkReference(0.1, 0.1, System.COOKIE_MONSTER, 0.013225, (0.013174, 0.013292), (0.230, 0.276), 0.015845),
    MicrobenchmarkReference(1.0, 0.1, System.ARA_LIKE, 0.270187, (0.270018, 0.270339), (0.691, 0.783), 0.015833),
    MicrobenchmarkReference(1.0, 0.1, System.COOKIE_MONSTER, 0.116366, (0.115496, 0.116897), (0.645, 0.737), 0.015833),
    MicrobenchmarkReference(0.1, 0.01, System.COOKIE_MONSTER, 0.002850, (0.002805, 0.002885), (0.230, 0.276), 0.034973),
)

BIAS = (
    RunReference(System.IPA_LIKE, 0.967, 21, (0.0155, 0.0156, 0.0156, 0.0156, 0.0157)),
    RunReference(System.ARA_LIKE, 0.565, 400, (0.0155, 0.0157, 0.434, 0.971, 1.000)),
    RunReference(System.COOKIE_MONSTER, 0.358, 400, (0.0155, 0.0156, 0.117, 0.187, 0.214)),
    RunReference(System.COOKIE_MONSTER, 0.428, 400, (0.0155, 0.0159, 0.175, 0.229, 0.262), kappa=0.5),
)

PATCG = (
    RunReference(System.IPA_LIKE, 0.6908, 3),
    RunReference(System.ARA_LIKE, 0.2768, 80),
    RunReference(System.COOKIE_MONSTER, 0.001325, 80),
)


@dataclass(frozen=True, slots=True)
class CriteoReference:
    """Recorded RMSRE on the real log with 7-day epochs."""

    system: System
    median: float | None
    maximum: float


CRITEO = (
    CriteoReference(System.IPA_LIKE, None, 0.0307),
    CriteoReference(System.ARA_LIKE, 0.0289, 0.1440),
    CriteoReference(System.COOKIE_MONSTER, 0.0196, 0.0378),
)


# By name, without an ending. Any: matplotlib has no types.
Figures = dict[str, Any]

# Policies of one's own, in the order in which they were named.
OWN_STYLES = (("#2a9d8f", "D"), ("#b5651d", "v"), ("#555555", "P"))
MAIN_EPOCH = 7
KAPPA_COLOUR = "#c77dd6"
RECORDED = "recorded (artifact)"


def draw_figure_4(result: Result) -> Figures:
    """Draw 4a to 4d: average and maximum budget along both knobs. A single point gets a figure too."""
    rate, participation = _common(result.points)
    plots = {}
    for letter, knob, largest in (("a", 1, False), ("b", 1, True), ("c", 2, False), ("d", 2, True)):

        def body(axes: Any, knob: int = knob, largest: bool = largest) -> None:
            _knob(axes, result.points, knob, rate if knob == 1 else participation, largest)

        plots[f"figure-4{letter}"] = _plot(body)
    return plots


def draw_figure_5(result: Result) -> Figures:
    """Draw 5a: budget as queries come in; 5b: CDF of the error; 5c: error by length of the epoch."""
    main = _at_epoch(result.points)
    return {
        "figure-5a": _plot(lambda axes: _budget_by_query(axes, main)),
        "figure-5b": _plot(lambda axes: _error_cdf(axes, main)),
        "figure-5c": _plot(lambda axes: _error_by_epoch(axes, result.points)),
    }


def draw_figure_6(result: Result) -> Figures:
    """Draw 6a and 6d: CDF of budget over devices and advertisers; 6b: CDF of the error; 6c: error by epoch length."""
    plain = [point for point in result.points if point.extra_impressions is None]
    augmented = [point for point in result.points if point.extra_impressions is not None]
    main = _at_epoch(plain)
    return {
        "figure-6a": _plot(lambda axes: _budget_cdf(axes, main)),
        "figure-6b": _plot(lambda axes: _error_cdf(axes, main, CRITEO)),
        "figure-6c": _plot(lambda axes: _error_by_epoch(axes, plain)),
        "figure-6d": _plot(lambda axes: _budget_cdf(axes, [*main, *augmented])),
    }


def draw_figure_7(result: Result, studies: Sequence[Study]) -> Figures:
    """Draw 7a: average budget; 7b: CDF of the error, with one draw's estimates; 7c: error by cutoff, over all draws."""
    artifact = next(s for s in studies if s.margin is Margin.ARTIFACT and s.bound is Bound.BEST_OF_BOTH)
    theorem = next(s for s in studies if s.margin is Margin.THEOREM and s.bound is Bound.BEST_OF_BOTH)
    return {
        "figure-7a": _plot(lambda axes: _average_bars(axes, result.points)),
        "figure-7b": _plot(lambda axes: _bias_cdf(axes, result.points, artifact)),
        "figure-7c": _plot(lambda axes: _cutoffs(axes, [artifact, theorem])),
    }


def _styles(points: Sequence[Point]) -> dict[str, tuple[str, str, str]]:
    """Return colour, marker and name of every system that has a point; the paper's always look the same."""
    by_label: dict[str, tuple[str, str, str]] = {}
    for run in (point.run for point in points):
        if run.label not in by_label:
            own = sum(label not in {system.value for system in System} for label in by_label)
            by_label[run.label] = (*OWN_STYLES[own % len(OWN_STYLES)], run.label)
            if run.system is not None:
                facts = run.system.facts
                by_label[run.label] = facts.colour, facts.marker, facts.title
    return by_label


def _plain_ticks(axis: Any) -> None:
    """Write 0.02 and 0.05 instead of powers of ten, for ranges of about one decade."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())


def _common(points: Sequence[Point]) -> tuple[float | None, float | None]:
    """Return the rate that is fixed while participation varies, and the participation fixed while the rate varies."""
    rates = [point.rate for point in points]
    participations = [point.participation for point in points]
    return max(rates, key=rates.count), max(participations, key=participations.count)


def _knob(axes: Any, points: Sequence[Point], knob: int, fixed: float | None, largest: bool) -> None:
    """Plot the budget of each system along one knob."""
    for name, (colour, marker, label) in _styles(points).items():
        along = [p for p in points if p.run.label == name and (p.rate if knob == 1 else p.participation) == fixed]
        along.sort(key=lambda p: (p.participation or 0) if knob == 1 else (p.rate or 0))
        x = [p.participation if knob == 1 else p.rate for p in along]
        y = [p.run.maximum if largest else p.run.average for p in along]
        axes.plot(x, y, color=colour, marker=marker, label=label)
    _recorded_knob(axes, knob, largest)
    axes.set_xscale("log")
    if largest:
        axes.set_ylim(0, 1)
    else:
        axes.set_yscale("log")
    what = "user participation rate per query" if knob == 1 else "impressions per user and day"
    axes.set_xlabel(f"{what} (knob {knob})")
    axes.set_ylabel(f"{'max.' if largest else 'avg.'} budget across device-epochs (ε)")
    _legend(axes)


def _recorded_knob(axes: Any, knob: int, largest: bool) -> None:
    label: str | None = RECORDED
    for row in MICROBENCHMARK:
        if (row.rate if knob == 1 else row.participation) != 0.1:
            continue
        low, high = row.maximum_range if largest else row.average_range
        x = row.participation if knob == 1 else row.rate
        middle, reach = (low + high) / 2, (high - low) / 2
        axes.errorbar([x], [middle], yerr=[reach], fmt="x", color="black", markersize=8, capsize=4, label=label)
        label = None


def _at_epoch(points: Sequence[Point]) -> list[Point]:
    """Return the points at 7-day epochs, or at the only length there is."""
    main = [point for point in points if point.epoch_days == MAIN_EPOCH]
    return main or [point for point in points if point.epoch_days == points[0].epoch_days]


def _budget_by_query(axes: Any, points: Sequence[Point]) -> None:
    """Plot the average budget after each query, in the order in which batches fill up, over all final filters."""
    styles = _styles(points)
    for point in points:
        colour, marker, label = styles[point.run.label]
        spent = np.cumsum(point.run.paid[point.run.order]) / MICROS / max(1, point.run.filters)
        axes.plot(np.arange(1, len(spent) + 1), spent, color=colour, label=label, marker=marker, markersize=3)
    submitted = len(points[0].run.paid)
    for number, row in enumerate(PATCG):
        axes.plot([submitted], [row.average], "x", color="black", markersize=9, label=None if number else RECORDED)
    axes.set_yscale("log")
    axes.set_xlabel("queries submitted")
    axes.set_ylabel("avg. budget across device-epochs (ε)")
    _legend(axes)


def _error_cdf(axes: Any, points: Sequence[Point], recorded: Sequence[CriteoReference] = ()) -> None:
    """Plot the share of submitted queries with an error up to x; a line that stops early ran fewer."""
    styles = _styles(points)
    for point in points:
        colour, _, label = styles[point.run.label]
        _step(axes, point.run.errors, len(point.run.executed), colour, label)
    for number, row in enumerate(recorded):
        colour = row.system.facts.colour
        recorded_label = None if number else f"{RECORDED}: median, max"
        marks = [] if row.median is None else [(row.median, 0.5)]
        executed = 146 / 898 if row.system is System.IPA_LIKE else 1.0
        x, y = zip(*marks, (row.maximum, executed), strict=True)
        axes.plot(x, y, "x", color=colour, markeredgecolor="black", markersize=8, label=recorded_label)
    axes.set_xscale("log")
    _plain_ticks(axes.xaxis)
    axes.set_ylim(0, 1.03)
    axes.set_xlabel("RMSRE")
    axes.set_ylabel("share of submitted queries")
    _legend(axes, 2 if recorded else 3)


def _step(axes: Any, values: Floats, total: int, colour: str, label: str) -> None:
    ordered = np.sort(values)
    axes.step(ordered, np.arange(1, len(ordered) + 1) / total, where="post", color=colour, label=label)


def _error_by_epoch(axes: Any, points: Sequence[Point]) -> None:
    """Plot median, quartiles, minimum and maximum of the error at each length of an epoch."""
    lengths = sorted({point.epoch_days for point in points})
    for offset, (name, (colour, _, label)) in enumerate(_styles(points).items()):
        here = {point.epoch_days: point.run.errors for point in points if point.run.label == name}
        places = [index + (offset - 1) * 0.25 for index, days in enumerate(lengths) if days in here and len(here[days])]
        boxes = [here[days] for days in lengths if days in here and len(here[days])]
        if boxes:
            _boxes(axes, boxes, places, colour)
        axes.plot([], [], color=colour, label=label)
    axes.set_xticks(range(len(lengths)), [str(days) for days in lengths])
    axes.set_yscale("log")
    _plain_ticks(axes.yaxis)
    axes.set_xlabel("length of an epoch (days)")
    axes.set_ylabel("RMSRE of queries that ran")
    _legend(axes)


def _boxes(axes: Any, boxes: Sequence[Floats], places: Sequence[float], colour: str) -> None:
    line = {"color": colour}
    axes.boxplot(
        boxes,
        positions=places,
        widths=0.2,
        whis=(0, 100),
        boxprops=line,
        whiskerprops=line,
        capprops=line,
        medianprops={"color": colour, "linewidth": 2},
        manage_ticks=False,
    )


def _budget_cdf(axes: Any, points: Sequence[Point]) -> None:
    """Plot the CDF over device and advertiser of the average that its filters spent per epoch."""
    shades = {3: "-.", 6: "--", 9: ":"}
    styles = _styles(points)
    for point in points:
        colour, _, label = styles[point.run.label]
        extra = point.extra_impressions
        ordered = np.sort(point.run.owner_average) / MICROS
        # Thousands of points are enough for the eye.
        picked = np.linspace(0, len(ordered) - 1, min(len(ordered), 4000)).astype(np.int64)
        axes.plot(
            ordered[picked],
            (picked + 1) / len(ordered),
            color=colour,
            linestyle=shades.get(extra or 0, "-"),
            label=label if extra is None else f"{label}, +{extra} impressions",
        )
    axes.set_xlabel("avg. budget across epochs, per device and advertiser (ε)")
    axes.set_ylabel("share of (device, advertiser) pairs")
    axes.set_ylim(0, 1.03)
    _legend(axes, 3)


def _label(point: Point) -> tuple[str, str]:
    colour, _, label = _styles([point])[point.run.label]
    return (KAPPA_COLOUR, f"{label}, κ = {point.kappa:g}") if point.kappa else (colour, label)


def _average_bars(axes: Any, points: Sequence[Point]) -> None:
    """Plot the average budget of each system, with and without the side query."""
    for place, point in enumerate(points):
        colour, _ = _label(point)
        axes.bar([place], [point.run.average], color=colour, width=0.6)
        axes.annotate(f"{point.run.average:.3f}", (place, point.run.average + 0.04), ha="center", fontsize=8)
    for place, row in enumerate(BIAS):
        axes.plot([place], [row.average], "x", color="black", markersize=9, label=None if place else RECORDED)
    axes.set_xticks(range(len(points)), [_label(point)[1].replace(", ", "\n") for point in points], fontsize=8)
    axes.set_ylabel("avg. budget across device-epochs (ε)")
    axes.set_ylim(0, 1.1)
    _legend(axes)


def _bias_cdf(axes: Any, points: Sequence[Point], study: Study) -> None:
    """Plot the share of queries up to an error, true and as estimated from the side query in the first draw."""
    for point in points:
        colour, label = _label(point)
        ordered = np.sort(point.run.errors)
        share = np.arange(1, len(ordered) + 1) / len(point.run.executed)
        # IPA's short line lies on the others': drawn wide, and on top.
        wide = 5 if point.run.system is System.IPA_LIKE else 1.5
        axes.plot(share, ordered, color=colour, label=label, linewidth=wide, zorder=1 + wide)
    estimates = np.sort(study.estimates[0])
    axes.plot(
        np.arange(1, len(estimates) + 1) / len(estimates),
        estimates,
        color=KAPPA_COLOUR,
        linestyle=":",
        label="its estimate, one draw",
    )
    for row in BIAS:
        if row.quartiles and row.executed == 400:
            axes.plot([0.25, 0.5, 0.75], row.quartiles[1:4], "x", color="black", markersize=6)
    axes.plot([], [], "x", color="black", label=f"{RECORDED}: quartiles")
    axes.set_yscale("log")
    _plain_ticks(axes.yaxis)
    axes.set_xlabel("share of submitted queries")
    axes.set_ylabel("RMSRE")
    _legend(axes, 3)


def _cutoffs(axes: Any, studies: Sequence[Study]) -> None:
    """Plot for each cutoff how the worst true error among accepted queries varies over the draws of the noise."""
    for offset, study in enumerate(studies):
        colour = (KAPPA_COLOUR, "#555555")[offset]
        places = [index + (offset - 0.5) * 0.3 for index in range(len(CUTOFFS))]
        _boxes(axes, [study.worst(cutoff) for cutoff in CUTOFFS], places, colour)
        accepted = float(study.accepted(0.05).mean())
        axes.plot([], [], color=colour, label=f"{study.margin.value}'s margin ({accepted:.0%} accepted at 0.05)")
    axes.plot(range(len(CUTOFFS)), CUTOFFS, "_", color="black", markersize=22, label="the cutoff itself")
    axes.set_xticks(range(len(CUTOFFS)), [f"{cutoff:g}" for cutoff in CUTOFFS])
    axes.set_xlabel("cutoff on the estimated RMSRE")
    axes.set_ylabel("largest true RMSRE accepted, by draw")
    axes.set_ylim(0, 0.32)
    _legend(axes, 2)

"""Draw every subfigure of the paper's evaluation from results, with the numbers recorded by the paper and its artifact.

Recorded numbers are only drawn beside ours; nothing is computed from them.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks.experiments.bias import CUTOFFS, Bound, Margin, Study
from benchmarks.experiments.policies import System
from benchmarks.experiments.results import Point, Result, by_setting
from benchmarks.experiments.seeds import BAND, band_of
from benchmarks.experiments.simulation import MOST_QUANTILES
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


# On the real log with 7-day epochs: minimum and quartiles are not recorded, only the median and the maximum.
CRITEO = ((System.IPA_LIKE, None, 0.0307), (System.ARA_LIKE, 0.0289, 0.1440), (System.COOKIE_MONSTER, 0.0196, 0.0378))


# By name, without an ending. Any: matplotlib has no types.
Figures = dict[str, Any]

# Policies of one's own, in the order in which they were named. Their lines have gaps and their markers are hollow, so
# that a line which they lie on is still seen.
OWN_STYLES = (("#2a9d8f", "D", (0, (4, 3))), ("#b5651d", "v", (0, (1, 2))), ("#555555", "P", (0, (6, 2, 1, 2))))
MAIN_EPOCH = 7
SHADE = 0.25
WIDTHS = (5.0, 3.2, 1.5)
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
        "figure-5a": _plot(lambda axes: draw_budget_by_query(axes, main, PATCG)),
        "figure-5b": _plot(lambda axes: draw_error_cdf(axes, main)),
        "figure-5c": _plot(lambda axes: _error_by_epoch(axes, result.points)),
    }


def draw_figure_6(result: Result) -> Figures:
    """Draw 6a and 6d: CDF of budget over devices and advertisers; 6b: CDF of the error; 6c: error by epoch length."""
    plain = [point for point in result.points if point.extra_impressions is None]
    augmented = [point for point in result.points if point.extra_impressions is not None]
    main = _at_epoch(plain)
    return {
        "figure-6a": _plot(lambda axes: _budget_cdf(axes, main)),
        "figure-6b": _plot(lambda axes: draw_error_cdf(axes, main, CRITEO)),
        "figure-6c": _plot(lambda axes: _error_by_epoch(axes, plain)),
        "figure-6d": _plot(lambda axes: _budget_cdf(axes, [*main, *augmented])),
    }


def draw_figure_7(result: Result) -> Figures:
    """Draw 7a: average budget; 7b: CDF of the error, with one draw's estimates; 7c: error by cutoff, over all draws."""
    artifact = next(s for s in result.studies if s.margin is Margin.ARTIFACT and s.bound is Bound.BEST_OF_BOTH)
    theorem = next(s for s in result.studies if s.margin is Margin.THEOREM and s.bound is Bound.BEST_OF_BOTH)
    return {
        "figure-7a": _plot(lambda axes: _average_bars(axes, result.points)),
        "figure-7b": _plot(lambda axes: _bias_cdf(axes, result.points, artifact)),
        "figure-7c": _plot(lambda axes: _cutoffs(axes, [artifact, theorem])),
    }


# By the name of the experiment.
DRAW: Mapping[str, Callable[[Result], Figures]] = {
    "microbenchmark": draw_figure_4,
    "patcg": draw_figure_5,
    "criteo": draw_figure_6,
    "bias": draw_figure_7,
}


class Style(NamedTuple):
    """How a series looks in every figure."""

    colour: str
    marker: str
    label: str
    dashes: Any = "-"
    # Of a line without markers: earlier ones are wider, so that an equal one on top does not hide them.
    width: float = 2.5

    def line(self, **more: object) -> dict[str, Any]:
        """Return matplotlib's keywords for the series' line."""
        hollow = {} if self.dashes == "-" else {"markerfacecolor": "none", "markersize": 8, "zorder": 3}
        return {"color": self.colour, "marker": self.marker, "linestyle": self.dashes, **hollow, **more}

    def plain(self) -> dict[str, Any]:
        """Return matplotlib's keywords for a line without markers."""
        return {"color": self.colour, "linestyle": self.dashes, "linewidth": self.width}


def _series(point: Point) -> tuple[str, float]:
    """Return what the points of one line have in common: the system, and its κ."""
    return point.run.label, point.kappa


def _styles(points: Sequence[Point]) -> dict[tuple[str, float], Style]:
    """Return the style of every series; the paper's systems always look the same."""
    styles: dict[tuple[str, float], Style] = {}
    for point in points:
        series, system = _series(point), point.run.system
        if series in styles:
            continue
        side_query = f", κ = {point.kappa:g}" if point.kappa else ""
        if system is None:
            own = sum(label not in {system.value for system in System} for label, _ in styles)
            colour, marker, dashes = OWN_STYLES[own % len(OWN_STYLES)]
            styles[series] = Style(colour, marker, point.run.label + side_query, dashes)
        else:
            # Beside the same system without the side query, it has a colour of its own.
            colour = KAPPA_COLOUR if (point.run.label, 0.0) in styles else system.facts.colour
            width = WIDTHS[min(len(styles), len(WIDTHS) - 1)]
            styles[series] = Style(colour, system.facts.marker, system.facts.title + side_query, width=width)
    return styles


def _curve(axes: Any, x: npt.ArrayLike, curves: Sequence[Floats], style: Style, **look: Any) -> None:
    """Plot the median of the seeds' curves over x, and their band if there are several."""
    band = band_of(curves)
    places = np.asarray(x)[: len(band.middle)]
    (line,) = axes.plot(places, band.middle, label=style.label, **look)
    if len(curves) > 1:
        step = "post" if line.get_drawstyle() == "steps-post" else None
        axes.fill_between(places, band.low, band.high, step=step, color=style.colour, alpha=SHADE, linewidth=0)


def _seeds_label(axes: Any, points: Sequence[Point]) -> None:
    """Say in the legend what a band is, where there is one."""
    seeds = len({point.seed for point in points})
    if seeds > 1:
        axes.fill_between([], [], [], color="#777777", alpha=SHADE, label=f"{BAND} of {seeds} seeds, line: median")


def _plain_ticks(axis: Any) -> None:
    """Write 0.1 instead of a power of ten, and for ranges of up to two decades 0.02 and 0.05 too."""
    from matplotlib.ticker import LogLocator, NullFormatter

    low, high = axis.get_data_interval()
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high <= 100 * low else (1.0,)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())


def _common(points: Sequence[Point]) -> tuple[float | None, float | None]:
    """Return the rate that is fixed while participation varies, and the participation fixed while the rate varies."""
    rates = [point.rate for point in points]
    participations = [point.participation for point in points]
    return max(rates, key=rates.count), max(participations, key=participations.count)


def _knob(axes: Any, points: Sequence[Point], knob: int, fixed: float | None, largest: bool) -> None:
    """Plot the budget of each system along one knob."""
    for series, style in _styles(points).items():
        along: dict[float, list[float]] = {}
        for point in points:
            x, other = (point.participation, point.rate)[:: 1 if knob == 1 else -1]
            if _series(point) == series and other == fixed and x is not None:
                along.setdefault(x, []).append(point.run.maximum if largest else point.run.average)
        places = sorted(along)
        curves = [np.asarray(values) for values in zip(*(along[x] for x in places), strict=True)]
        _curve(axes, places, curves, style, **style.line())
    _recorded_knob(axes, knob, fixed, largest)
    _seeds_label(axes, points)
    axes.set_xscale("log")
    if largest:
        axes.set_ylim(0, 1)
    else:
        axes.set_yscale("log")
    what = "user participation rate per query" if knob == 1 else "impressions per user and day"
    axes.set_xlabel(f"{what} (knob {knob})")
    axes.set_ylabel(f"{'max.' if largest else 'avg.'} budget across device-epochs (ε)")
    _legend(axes)


def _recorded_knob(axes: Any, knob: int, fixed: float | None, largest: bool) -> None:
    """Mark what was recorded where the other knob has the same value."""
    label: str | None = RECORDED
    for row in MICROBENCHMARK:
        if (row.rate if knob == 1 else row.participation) != fixed:
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


def draw_budget_by_query(axes: Any, points: Sequence[Point], recorded: Sequence[RunReference] = ()) -> None:
    """Plot the average budget after each query, in the order in which batches fill up, over all final filters."""
    styles = _styles(points)
    for same in by_setting(points):
        style = styles[_series(same[0])]
        runs = [point.run for point in same]
        curves = [np.cumsum(run.paid[run.order]) / MICROS / max(1, run.filters) for run in runs]
        queries = min(map(len, curves))
        look = style.line(markersize=4, markevery=max(1, queries // 20))
        _curve(axes, np.arange(1, queries + 1), curves, style, **look)
    submitted = len(points[0].run.paid)
    for number, row in enumerate(recorded):
        axes.plot([submitted], [row.average], "x", color="black", markersize=9, label=None if number else RECORDED)
    _seeds_label(axes, points)
    axes.set_yscale("log")
    axes.set_xlabel("queries submitted")
    axes.set_ylabel("avg. budget across device-epochs (ε)")
    _legend(axes)


def draw_error_cdf(
    axes: Any, points: Sequence[Point], recorded: Sequence[tuple[System, float | None, float]] = ()
) -> None:
    """Plot the share of submitted queries with an error up to x; a line that stops early ran fewer."""
    styles = _styles(points)
    for same in by_setting(points):
        style, runs = styles[_series(same[0])], [point.run for point in same]
        everywhere = np.unique(np.concatenate([run.errors for run in runs]))
        grid = everywhere[np.linspace(0, len(everywhere) - 1, min(len(everywhere), MOST_QUANTILES)).astype(np.int64)]
        shares = [np.searchsorted(np.sort(run.errors), grid, side="right") / len(run.executed) for run in runs]
        _curve(axes, grid, shares, style, drawstyle="steps-post", **style.plain())
    for number, (system, median, maximum) in enumerate(recorded):
        recorded_label = None if number else f"{RECORDED}: median, max"
        marks = [] if median is None else [(median, 0.5)]
        executed = 146 / 898 if system is System.IPA_LIKE else 1.0
        x, y = zip(*marks, (maximum, executed), strict=True)
        axes.plot(x, y, "X", color=system.facts.colour, markeredgecolor="black", markersize=8, label=recorded_label)
    _seeds_label(axes, points)
    axes.set_xscale("log")
    _plain_ticks(axes.xaxis)
    axes.set_ylim(0, 1.03)
    axes.set_xlabel("RMSRE")
    axes.set_ylabel("share of submitted queries")
    _legend(axes, 2 if recorded else 3)


def _error_by_epoch(axes: Any, points: Sequence[Point]) -> None:
    """Plot median, quartiles, minimum and maximum of the error at each length of an epoch, over all seeds."""
    lengths = sorted({point.epoch_days for point in points})
    styles = _styles(points)
    step = 0.8 / max(3, len(styles))
    for offset, (series, style) in enumerate(styles.items()):
        here: dict[int, list[Floats]] = {}
        for point in points:
            if _series(point) == series and len(point.run.errors):
                here.setdefault(point.epoch_days, []).append(point.run.errors)
        middle = (len(styles) - 1) / 2
        places = [index + (offset - middle) * step for index, days in enumerate(lengths) if days in here]
        boxes = [np.concatenate(here[days]) for days in lengths if days in here]
        if boxes:
            _boxes(axes, boxes, places, style.colour, width=0.8 * step)
        axes.plot([], [], color=style.colour, label=style.label)
    axes.set_xticks(range(len(lengths)), [str(days) for days in lengths])
    axes.set_yscale("log")
    _plain_ticks(axes.yaxis)
    axes.set_xlabel("length of an epoch (days)")
    axes.set_ylabel("RMSRE of queries that ran")
    _legend(axes)


def _boxes(axes: Any, boxes: Sequence[Floats], places: Sequence[float], colour: str, width: float = 0.2) -> None:
    line = {"color": colour}
    axes.boxplot(
        boxes,
        positions=places,
        widths=width,
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
    for same in by_setting(points):
        style, extra = styles[_series(same[0])], same[0].extra_impressions
        pairs = min(MOST_QUANTILES, *(len(point.run.owner_average) for point in same))
        share = np.arange(1, pairs + 1) / pairs
        spent = [np.quantile(point.run.owner_average, share, method="inverted_cdf") / MICROS for point in same]
        band = band_of(spent)
        label = style.label if extra is None else f"{style.label}, +{extra} impressions"
        axes.plot(band.middle, share, color=style.colour, linestyle=shades.get(extra or 0, style.dashes), label=label)
        if len(same) > 1:
            axes.fill_betweenx(share, band.low, band.high, color=style.colour, alpha=SHADE, linewidth=0)
    _seeds_label(axes, points)
    axes.set_xlabel("avg. budget across epochs, per device and advertiser (ε)")
    axes.set_ylabel("share of (device, advertiser) pairs")
    axes.set_ylim(0, 1.03)
    _legend(axes, 3)


def _average_bars(axes: Any, points: Sequence[Point]) -> None:
    """Plot the average budget of each system, with and without the side query, and the range over the seeds."""
    settings, styles = by_setting(points), _styles(points)
    for place, same in enumerate(settings):
        band = band_of([np.asarray([point.run.average]) for point in same])
        height, reach = float(band.middle[0]), band.high - band.low
        axes.bar([place], [height], color=styles[_series(same[0])].colour, width=0.6)
        if len(same) > 1:
            axes.errorbar([place], [height], yerr=[height - band.low, band.high - height], fmt="none", ecolor="black")
        axes.annotate(f"{height:.3f}", (place, height + float(reach[0]) / 2 + 0.04), ha="center", fontsize=8)
    for place, row in enumerate(BIAS):
        axes.plot([place], [row.average], "x", color="black", markersize=9, label=None if place else RECORDED)
    labels = [styles[_series(same[0])].label for same in settings]
    names = ["\n".join(textwrap.fill(part, 14) for part in label.split(", ")) for label in labels]
    axes.set_xticks(range(len(settings)), names, fontsize=8 if len(settings) < 6 else 6)
    axes.set_ylabel("avg. budget across device-epochs (ε)")
    axes.set_ylim(0, 1.1)
    _legend(axes)


def _bias_cdf(axes: Any, points: Sequence[Point], study: Study) -> None:
    """Plot the share of queries up to an error, true and as estimated from the side query in the first draw."""
    styles = _styles(points)
    for same in by_setting(points):
        style = styles[_series(same[0])]
        errors = [np.sort(point.run.errors) for point in same]
        share = np.arange(1, len(errors[0]) + 1) / len(same[0].run.executed)
        _curve(axes, share, errors, style, **style.plain())
    _seeds_label(axes, points)
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

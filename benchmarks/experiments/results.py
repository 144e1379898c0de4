"""Results as they are printed and written: one point per setting and system."""

from __future__ import annotations

import resource
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from rich.table import Table

from benchmarks.experiments.bias import Bound, Study
from benchmarks.experiments.policies import Accounting, DevicePolicy
from benchmarks.experiments.simulation import Run
from benchmarks.experiments.world import Floats, check_scale
from protocol.cli.console import plain_table
from protocol.errors import ErrorKind, TrefoilError


@dataclass(frozen=True, slots=True)
class Options:
    """The options of every experiment."""

    accounting: Accounting = Accounting.PAPER
    kappa: float = 0.0
    epoch_days: int = 7
    seed: int = 0
    scale: float = 1.0
    # Policies of one's own, run beside the three systems.
    own: tuple[DevicePolicy, ...] = ()

    def __post_init__(self) -> None:
        check_scale(self.scale)
        for allowed, rule, hint in (
            (self.epoch_days >= 1, "an epoch lasts at least one day", "The paper's lasts 7 days."),
            (0 <= self.kappa <= 1000, "κ is 0 to 1000, in the value's own unit", "The paper's is a tenth of the cap."),
            (0 <= self.seed < 2**32, "the seed is 0 to 2^32 - 1", "Give a smaller one."),
        ):
            if not allowed:
                raise TrefoilError(rule, hint, kind=ErrorKind.OUT_OF_RANGE)

    def kappa_units(self, unit: int) -> int:
        """Return κ in a world's whole units."""
        units = round(self.kappa * unit)
        if abs(units - self.kappa * unit) > 1e-9:
            raise TrefoilError(
                f"κ = {self.kappa} is finer than this workload's unit, 1/{unit}", kind=ErrorKind.INVALID_VALUE
            )
        return units


@dataclass(frozen=True, slots=True)
class Point:
    """One system at one setting. `total_seconds` covers workload and all systems of the setting."""

    run: Run
    kappa: float
    epoch_days: int
    conversions: int
    total_seconds: float
    participation: float | None = None
    rate: float | None = None
    extra_impressions: int | None = None
    seed: int = 0

    @property
    def setting(self) -> tuple[object, ...]:
        """Return what it has in common with the points of other seeds."""
        return self.run.label, self.kappa, self.epoch_days, self.participation, self.rate, self.extra_impressions

    def as_json(self) -> dict[str, object]:
        run = self.run
        return {
            "participation": self.participation,
            "rate": self.rate,
            "system": run.label,
            "seed": self.seed,
            "kappa": self.kappa,
            "epoch_days": self.epoch_days,
            **({} if self.extra_impressions is None else {"extra_impressions": self.extra_impressions}),
            "avg": run.average,
            "max": run.maximum,
            "executed": int(run.executed.sum()),
            "submitted": len(run.executed),
            "rmsre_mean": mean(run.errors),
            "rmsre_quartiles": quartiles(run.errors),
            "zero_truth_queries": int((run.truth == 0).sum()),
            "seconds": run.seconds,
            "total_seconds": self.total_seconds,
            "conversions": self.conversions,
            "conversions_per_second": self.conversions / self.total_seconds,
        }


def by_setting(points: Sequence[Point]) -> list[list[Point]]:
    """Return the points by setting, each with those of all seeds."""
    settings: dict[tuple[object, ...], list[Point]] = {}
    for point in points:
        settings.setdefault(point.setting, []).append(point)
    return list(settings.values())


@dataclass(slots=True)
class Result:
    """A whole experiment. `profile` says where the time went, in seconds; `findings` is whatever else it shows."""

    experiment: str
    options: Options
    seeds: int = 1
    points: list[Point] = field(default_factory=list)
    profile: dict[str, float] = field(default_factory=dict)
    findings: dict[str, object] = field(default_factory=dict)
    # Of Figure 7: what each bound on the bias is worth.
    studies: list[Study] = field(default_factory=list)

    def spent(self, what: str, seconds: float) -> None:
        self.profile[what] = self.profile.get(what, 0.0) + seconds

    @property
    def conversions(self) -> int:
        """Return the conversions simulated, counting each setting and seed once, not once per system."""
        settings = {(p.seed, *p.setting[2:]): p.conversions for p in self.points}
        return sum(settings.values())

    def as_json(self) -> dict[str, object]:
        total = sum(self.profile.values())
        return {
            "experiment": self.experiment,
            "accounting": self.options.accounting.value,
            "seed": self.options.seed,
            "seeds": self.seeds,
            "scale": self.options.scale,
            "conversions": self.conversions,
            "seconds": total,
            "conversions_per_second": self.conversions / total if total else None,
            "peak_memory_bytes": peak_memory(),
            "profile": self.profile,
            **self.findings,
            "points": [point.as_json() for point in self.points],
        }

    def as_points(self) -> list[dict[str, object]]:
        """Return the points alone, each with the name of its experiment."""
        return [{"experiment": self.experiment, **point.as_json()} for point in self.points]

    def table(self) -> Table:
        """Return the points as a table, without columns that would be empty."""
        first, last = self.options.seed, self.options.seed + self.seeds - 1
        which = f"seed {first}" if first == last else f"medians of seeds {first} to {last}"
        title = f"{self.experiment} ({self.options.accounting.value} accounting, {which})"
        rows = [_row(points) for points in by_setting(self.points)]
        headings = [name for name in rows[0] if any(row[name] for row in rows)]
        table = plain_table(title, headings, words={"system"}, no_wrap=True)
        for row in rows:
            table.add_row(*(row[name] for name in headings))
        return table


def _row(points: Sequence[Point]) -> dict[str, str]:
    """Return one setting's cells: numbers are medians over the seeds."""
    point, runs = points[0], [point.run for point in points]
    spreads = [spread for run in runs if (spread := quartiles(run.errors)) is not None]
    averages = [run.average for run in runs]
    executed, submitted = [int(run.executed.sum()) for run in runs], [len(run.executed) for run in runs]

    def middle(values: Sequence[float], digits: int) -> str:
        return f"{float(np.median(values)):.{digits}f}" if values else ""

    return {
        "knob 1": "" if point.participation is None else f"{point.participation:g}",
        "knob 2": "" if point.rate is None else f"{point.rate:g}",
        "days": "" if point.participation else f"{point.epoch_days}",
        "system": point.run.label,
        "extra": "" if point.extra_impressions is None else f"+{point.extra_impressions}",
        "κ": f"{point.kappa:g}" if point.kappa else "",
        "avg ε": middle(averages, 6),
        "from": f"{min(averages):.6f}" if len(points) > 1 else "",
        "to": f"{max(averages):.6f}" if len(points) > 1 else "",
        "max ε": middle([run.maximum for run in runs], 4),
        "run": f"{middle(executed, 0)}/{middle(submitted, 0)}",
        "RMSRE": middle([float(run.errors.mean()) for run in runs if len(run.errors)], 5),
        "median": middle([spread[2] for spread in spreads], 4),
        "max": middle([spread[4] for spread in spreads], 4),
    }


def study_table(studies: Sequence[Study], cutoff: float = 0.05) -> Table:
    """Return a table of the bounds on the bias, over all draws of the noise."""
    title = f"bias bounds over {len(studies[0].estimates)} draws of the noise, cutoff {cutoff:g}"
    columns = ("bound", "margin", "covers count", "covers bias", "accepted", "draws within", "median worst")
    table = plain_table(title, columns, words={"bound", "margin"})
    for one in studies:
        worst = one.worst(cutoff)
        table.add_row(
            one.bound.value,
            one.margin.value,
            "" if one.bound is Bound.OWN_RECORD else f"{one.covers_flags:.1%}",
            f"{one.covers_bias:.1%}",
            f"{float(one.accepted(cutoff).mean()):.1%}",
            f"{float((worst <= cutoff).mean()):.1%}",
            f"{float(np.median(worst)):.3f}",
        )
    return table


def mean(values: Floats) -> float | None:
    """Return the mean, or None if no query ran."""
    return float(values.mean()) if len(values) else None


def quartiles(values: Floats) -> list[float] | None:
    """Return minimum, quartiles and maximum, or None if no query ran."""
    return [float(x) for x in np.quantile(values, [0, 0.25, 0.5, 0.75, 1])] if len(values) else None


def peak_memory() -> int:
    """Return the peak memory of this process, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024

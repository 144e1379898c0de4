"""What was measured at one size: the runs, the middle one in full, and every ratio with its range over the runs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from benchmarks.bench.plaintext import PlaintextCost
from benchmarks.bench.throughput.grid import Cell
from benchmarks.bench.throughput.peers import PeerCost
from benchmarks.bench.throughput.yardstick import CORES, Opens
from protocol.shares import PARTIES

Numbers = Mapping[str, float]


class Range(NamedTuple):
    """A median with the least and the most of several runs."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Range:
        return cls(statistics.median(values), min(values), max(values))

    def show(self, digits: int = 1) -> str:
        """The median, and the range if there is one."""
        if self.low == self.high:
            return f"{self.median:.{digits}f}"
        return f"{self.median:.{digits}f} ({self.low:.{digits}f} to {self.high:.{digits}f})"


@dataclass(frozen=True, slots=True)
class Baselines:
    """The same workload without helpers, and what a helper's ingest and its sum cost beside their least."""

    plain: PlaintextCost
    sum_over_plaintext: float
    ingest_over_bare_open: float | None = None
    naive: PeerCost | None = None
    spu: PeerCost | None = None


@dataclass(frozen=True, slots=True)
class BatchRun:
    """One batch from submission to answer, and the yardsticks around it. What is not known is None."""

    seconds: Numbers
    cpu_seconds: Numbers | None
    profile: Numbers | None
    opens: Opens
    bytes_per_report: Numbers
    disk_bytes: Numbers
    peak_rss_mb: Numbers
    peak_rss_mb_by_process: Mapping[str, Numbers]
    largest_error: int
    noise_sd: float

    @property
    def total(self) -> float:
        return self.seconds["total"]


@dataclass(frozen=True, slots=True)
class ThroughputPoint:
    """One cell of the grid, measured once or more."""

    cell: Cell
    baselines: Baselines
    runs: tuple[BatchRun, ...]

    @property
    def middle(self) -> BatchRun:
        """The run with the median time; the later one of two."""
        return sorted(self.runs, key=lambda run: run.total)[len(self.runs) // 2]

    def ratios(self) -> dict[str, Range]:
        """Those by processor time first: a neighbour's load changes them least. Only what is known."""
        found = {name: self._over_runs(ratio) for name, ratio in _BY_PROCESSOR.items()}
        found |= {name: self._over_runs(ratio) for name, ratio in _BY_WALL.items()}
        return {name: known for name, known in found.items() if known is not None}

    def _over_runs(self, ratio: Ratio) -> Range | None:
        values = [ratio(self.cell, self.baselines, run) for run in self.runs]
        known = [value for value in values if value is not None]
        return Range.of(known) if len(known) == len(values) else None

    def reports_per_second(self) -> dict[str, float]:
        """Of every system, in the middle run."""
        run, base = self.middle, self.baselines
        found = {
            "plaintext": 1 / base.plain.seconds,
            "trusted server": CORES / run.opens.trusted.seconds,
            "bound of three bare opens": CORES / (PARTIES * run.opens.bare.seconds),
            "trefoil": self.cell.reports / run.total,
        }
        if base.spu is not None:
            found["SecretFlow SPU"] = 1 / base.spu.cost.seconds
        if base.naive is not None:
            found["naive MPyC"] = 1 / base.naive.cost.seconds
        return found

    def cpu_per_report(self) -> dict[str, float]:
        """Processor seconds of every system, in the middle run; only what is known."""
        run, base = self.middle, self.baselines
        found = {
            "plaintext": base.plain.cpu_seconds,
            "trusted server": run.opens.trusted.cpu_seconds,
            "bound of three bare opens": PARTIES * run.opens.bare.cpu_seconds,
        }
        if run.cpu_seconds is not None:
            found["trefoil"] = run.cpu_seconds["total"] / self.cell.reports
        if base.spu is not None:
            found["SecretFlow SPU"] = base.spu.cost.cpu_seconds
        if base.naive is not None:
            found["naive MPyC"] = base.naive.cost.cpu_seconds
        return found

    def to_json(self) -> dict[str, object]:
        """As it goes into benchmarks/results: the middle run, the medians of the ratios, and all runs behind."""
        run, ratios = self.middle, self.ratios()
        return {
            "reports": self.cell.reports,
            "buckets": self.cell.buckets,
            "checked": self.cell.checked,
            "suite": self.cell.suite.value,
            "seconds": dict(run.seconds),
            "cpu_seconds": None if run.cpu_seconds is None else dict(run.cpu_seconds),
            "profile": None if run.profile is None else dict(run.profile),
            "bytes_per_report": dict(run.bytes_per_report),
            "disk_bytes": dict(run.disk_bytes),
            "peak_rss_mb": dict(run.peak_rss_mb),
            "peak_rss_mb_by_process": {name: dict(peaks) for name, peaks in run.peak_rss_mb_by_process.items()},
            "reports_per_second": self.reports_per_second(),
            "cpu_seconds_per_report": self.cpu_per_report(),
            "ratios": {name: found.median for name, found in ratios.items()},
            "ranges": {name: [found.low, found.high] for name, found in ratios.items()},
            "yardstick": {"bare open": run.opens.bare.cpu_seconds, "trusted server": run.opens.trusted.cpu_seconds},
            "largest_error": max(each.largest_error for each in self.runs),
            "noise_sd": run.noise_sd,
            "runs": [self._run_json(each) for each in self.runs],
        }

    def _run_json(self, run: BatchRun) -> dict[str, object]:
        known = {**_BY_PROCESSOR, **_BY_WALL}
        return {
            "seconds": run.total,
            "cpu_seconds": None if run.cpu_seconds is None else run.cpu_seconds["total"],
            "bare_open_cpu_seconds": run.opens.bare.cpu_seconds,
            "trusted_server_cpu_seconds": run.opens.trusted.cpu_seconds,
            "ratios": {name: ratio(self.cell, self.baselines, run) for name, ratio in known.items()},
        }


Ratio = Callable[[Cell, Baselines, BatchRun], float | None]


def _by_cpu(compare: Callable[[Baselines, BatchRun], float | None]) -> Ratio:
    """Processor seconds a report, of three helpers together, over what `compare` gives."""

    def ratio(cell: Cell, base: Baselines, run: BatchRun) -> float | None:
        other = compare(base, run)
        if run.cpu_seconds is None or other is None:
            return None
        return run.cpu_seconds["total"] / cell.reports / other

    return ratio


def _cpu_of(peer: PeerCost | None) -> float | None:
    return None if peer is None else peer.cost.cpu_seconds


def _times_faster(peer: PeerCost | None, cell: Cell, run: BatchRun) -> float | None:
    """How many times more reports a second we take than a peer does."""
    return None if peer is None else peer.cost.seconds / (run.total / cell.reports)


_BY_PROCESSOR: dict[str, Ratio] = {
    "cpu_over_trusted_server": _by_cpu(lambda _, run: run.opens.trusted.cpu_seconds),
    "cpu_over_three_bare_opens": _by_cpu(lambda _, run: PARTIES * run.opens.bare.cpu_seconds),
    "cpu_over_plaintext": _by_cpu(lambda base, _: base.plain.cpu_seconds),
    "cpu_over_naive_mpyc": _by_cpu(lambda base, _: _cpu_of(base.naive)),
    "cpu_over_spu": _by_cpu(lambda base, _: _cpu_of(base.spu)),
    "ingest_over_bare_open": lambda _, base, __: base.ingest_over_bare_open,
    "sum_over_plaintext": lambda _, base, __: base.sum_over_plaintext,
}
_BY_WALL: dict[str, Ratio] = {
    "fraction_of_bound": lambda cell, _, run: cell.reports * PARTIES * run.opens.bare.seconds / CORES / run.total,
    "slowdown_over_plaintext": lambda cell, base, run: run.total / cell.reports / base.plain.seconds,
    "speedup_over_naive_mpyc": lambda cell, base, run: _times_faster(base.naive, cell, run),
    "speedup_over_spu": lambda cell, base, run: _times_faster(base.spu, cell, run),
}

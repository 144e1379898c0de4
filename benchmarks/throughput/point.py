"""The results of one cell: its runs, every ratio with its range over the runs, and where the time of a query goes.

Helpers report what they have used on their own metrics page, all but their workers, which only the machine they run on
can measure. Stages add up to the seconds of the query, and the profile to the processor time of the helpers.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import NamedTuple

from benchmarks.throughput.baselines import CORES, Opens, PeerCost, PlaintextCost
from benchmarks.throughput.grid import Cell
from mpc_helpers.local.launcher import fetch
from mpc_helpers.service.monitoring import DAEMON, FORK_SERVER, usage
from protocol.helper_set import HelperEntry, HelperSet
from protocol.shares import PARTIES
from protocol.status import QueryState

_LINE = re.compile(r'^(trefoil_\w+)(?:{\w+="([^"]*)"})? (\S+)$', re.MULTILINE)
_FETCH_SECONDS = 10.0

Values = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class HelperCounters:
    """The counters of one helper: processor seconds by process, by part of admitting and in the ledger; memory; bytes
    to peers, of the ledger with its log, and of the log.

    `processes` is empty if the helper's system has no /proc, or if its release is older than this metric.
    """

    processes: Values
    peaks_mb: Values
    admit: Values
    ledger_seconds: float
    ledger_cpu_seconds: float
    peer_bytes: float
    ledger_bytes: float
    log_bytes: float
    open_lanes: int = 1

    @classmethod
    def parse(cls, page: str) -> HelperCounters:
        """Parse a metrics page; a metric that is absent counts as zero."""
        values_by_name: dict[str, dict[str, float]] = {}
        for name, label, value in _LINE.findall(page):
            values_by_name.setdefault(name, {})[label] = float(value)
        peaks = values_by_name.get("trefoil_process_peak_bytes", {})
        return cls(
            values_by_name.get("trefoil_process_cpu_seconds", {}),
            {process: size / 2**20 for process, size in peaks.items()},
            values_by_name.get("trefoil_admit_cpu_seconds_total", {}),
            values_by_name.get("trefoil_ledger_seconds_total", {}).get("", 0.0),
            values_by_name.get("trefoil_ledger_cpu_seconds_total", {}).get("", 0.0),
            values_by_name.get("trefoil_peer_bytes_total", {}).get("", 0.0),
            values_by_name.get("trefoil_ledger_bytes", {}).get("", 0.0),
            values_by_name.get("trefoil_ledger_log_bytes", {}).get("", 0.0),
            int(values_by_name.get("trefoil_open_lanes", {}).get("", 1)),
        )

    @classmethod
    def fetch(cls, helper: HelperEntry, process_id: int | None = None) -> HelperCounters:
        """Fetch the counters of a running helper. They are without its workers; those of a process here are added."""
        counters = cls.parse(fetch(helper, "/metrics", _FETCH_SECONDS).decode())
        if process_id is None or not counters.processes:
            return counters
        used = usage(process_id)
        return replace(
            counters,
            processes={**counters.processes, _MPC: used.cpu_seconds.get(_MPC, 0.0)},
            peaks_mb={**counters.peaks_mb, _MPC: used.peaks_mb.get(_MPC, 0.0)},
        )

    def since(self, before: HelperCounters) -> HelperCounters:
        """Return the difference of two readings; memory stays the peak."""
        return HelperCounters(
            _difference(self.processes, before.processes),
            self.peaks_mb,
            _difference(self.admit, before.admit),
            self.ledger_seconds - before.ledger_seconds,
            self.ledger_cpu_seconds - before.ledger_cpu_seconds,
            self.peer_bytes - before.peer_bytes,
            self.ledger_bytes - before.ledger_bytes,
            self.log_bytes - before.log_bytes,
            self.open_lanes,
        )

    @property
    def cpu_seconds(self) -> float | None:
        """Return the processor seconds of all its processes, if it reports them."""
        return sum(self.processes.values()) if self.processes else None


@dataclass(frozen=True, slots=True)
class Counters:
    """The counters of all three helpers."""

    helpers: tuple[HelperCounters, ...]

    @classmethod
    def read(cls, helper_set: HelperSet, process_ids: Sequence[int] = ()) -> Counters:
        """Ask all three helpers; `process_ids` are those of helpers that run on this machine."""
        each = zip_longest(helper_set.helpers, process_ids)
        return cls(tuple(HelperCounters.fetch(helper, process_id) for helper, process_id in each))

    def since(self, before: Counters) -> Counters:
        """Return the difference of two readings."""
        return Counters(tuple(now.since(then) for now, then in zip(self.helpers, before.helpers, strict=True)))

    @property
    def cpu_seconds(self) -> float | None:
        """Return the processor seconds of all three; None if one does not report them."""
        spent = [helper.cpu_seconds for helper in self.helpers]
        reported = [seconds for seconds in spent if seconds is not None]
        return sum(reported) if len(reported) == len(spent) else None

    @property
    def open_lanes(self) -> int:
        """Return how many payloads the helper with the fewest lanes opens at a time."""
        return min(helper.open_lanes for helper in self.helpers)

    @property
    def peer_bytes(self) -> float:
        return sum(helper.peer_bytes for helper in self.helpers)


def _difference(now: Values, before: Values) -> dict[str, float]:
    return {name: value - before.get(name, 0.0) for name, value in now.items()}


ADMIT_PARTS = ("check", "open", "expand", "sum", "residues")
# What a query goes through, in this order, as its querier sees it.
STAGES = ("transfer", *ADMIT_PARTS, "ledger", "agreement", "noise", "vote", "release", "waiting")
# What a helper's processes do, in the same order.
PROFILE = {
    "receive": "receive, hash and store columns",
    "check": "check headers",
    "open": "open payloads (HPKE), hash bodies",
    "expand": "expand seeds (AES)",
    "sum": "sum shares",
    "residues": "check shares of the numbers",
    "chunks": "hand chunks to processes and back",
    "ledger": "ledger",
    "agree": "agree, vote, answer (the daemon's rest)",
    "noise": "draw and add noise (MPC)",
}
_OPENING, _MPC = "opening reports", FORK_SERVER

HelperSeconds = Mapping[QueryState, float]


def timeline(
    total: float, transfer: float, collect: float, states: Mapping[int, HelperSeconds], used: Counters
) -> dict[str, float]:
    """Return the seconds of each stage at the helper that was busy longest, so that they add up.

    Admitting does its parts chunk by chunk on several processes, so its seconds are divided as its processor time is.
    The ledger is asked while agreeing, so its seconds are taken from those; the rest of agreeing is mostly waiting for
    the other two. A helper that had its column first began while others still received theirs: such seconds count as
    its admitting. What is left is the querier's waiting between two questions.
    """
    slowest = max(states, key=lambda party: sum(states[party].values()))
    seconds, counters = states[slowest], used.helpers[slowest]
    cpu = {part: counters.admit.get(part, 0.0) for part in ADMIT_PARTS}
    admitting, all_cpu = seconds.get(QueryState.ADMITTING, 0.0), sum(cpu.values()) or 1.0
    agreeing = seconds.get(QueryState.AGREEING, 0.0)
    ledger = min(counters.ledger_seconds, agreeing)
    stages = {
        "transfer": transfer,
        **{part: admitting * spent / all_cpu for part, spent in cpu.items()},
        "ledger": ledger,
        "agreement": agreeing - ledger,
        "noise": seconds.get(QueryState.COMPUTING, 0.0),
        "vote": seconds.get(QueryState.VOTING, 0.0),
        "release": collect,
    }
    left = total - sum(stages.values())
    stages["transfer"] += min(0.0, left)
    return {**stages, "waiting": max(0.0, left)}


def profile(used: Counters, received: Counters) -> dict[str, float] | None:
    """Return the processor seconds of all three helpers by activity; None if a helper does not report them.

    `received` is what they had used when the querier had sent everything. Parts of opening and the ledger are timed
    where they happen; what their processes used beside them is the rest of each row's process. Processes are counted
    in hundredths of a second, so that in a small batch a rest can come out a little below zero.
    """
    if used.cpu_seconds is None or received.cpu_seconds is None:
        return None
    rows = [_profile_of(whole, early) for whole, early in zip(used.helpers, received.helpers, strict=True)]
    return {name: sum(row[name] for row in rows) for name in PROFILE}


def _profile_of(used: HelperCounters, received: HelperCounters) -> dict[str, float]:
    parts = {part: used.admit.get(part, 0.0) for part in ADMIT_PARTS}
    receive = received.processes.get(DAEMON, 0.0)
    opening, mpc = used.processes.get(_OPENING, 0.0), used.processes.get(_MPC, 0.0)
    others = sum(used.processes.values()) - opening - mpc
    return {
        "receive": receive,
        **parts,
        "chunks": opening - sum(parts.values()),
        "ledger": used.ledger_cpu_seconds,
        "agree": others - receive - used.ledger_cpu_seconds,
        "noise": mpc,
    }


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
        """Format the median, and the range if there is one."""
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
    # Payloads that the helpers open at a time: 8 where all of them have the native module.
    open_lanes: int = 1

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
        """Return the ratios that can be computed, those of processor time first: other load changes them least."""
        values_by_name = {name: self._over_runs(ratio) for name, ratio in _BY_PROCESSOR.items()}
        values_by_name |= {name: self._over_runs(ratio) for name, ratio in _BY_WALL.items()}
        return {name: reported for name, reported in values_by_name.items() if reported is not None}

    def _over_runs(self, ratio: Ratio) -> Range | None:
        values = [ratio(self.cell, self.baselines, run) for run in self.runs]
        reported = [value for value in values if value is not None]
        return Range.of(reported) if len(reported) == len(values) else None

    def reports_per_second(self) -> dict[str, float]:
        """Return the throughput of every system, in the middle run."""
        run, base = self.middle, self.baselines
        values_by_name = {
            "plaintext": 1 / base.plain.seconds,
            "trusted server": CORES / run.opens.trusted.seconds,
            "trusted server, batch open": CORES / run.opens.batch_server.seconds,
            "three batch opens": CORES / (PARTIES * run.opens.batch.seconds),
            "trefoil": self.cell.reports / run.total,
        }
        if base.naive is not None:
            values_by_name["naive MPyC"] = 1 / base.naive.cost.seconds
        return values_by_name

    def cpu_per_report(self) -> dict[str, float]:
        """Return the processor seconds a report of every system that reports them, in the middle run."""
        run, base = self.middle, self.baselines
        values_by_name = {
            "plaintext": base.plain.cpu_seconds,
            "trusted server": run.opens.trusted.cpu_seconds,
            "trusted server, batch open": run.opens.batch_server.cpu_seconds,
            "three batch opens": PARTIES * run.opens.batch.cpu_seconds,
        }
        if run.cpu_seconds is not None:
            values_by_name["trefoil"] = run.cpu_seconds["total"] / self.cell.reports
        if base.naive is not None:
            values_by_name["naive MPyC"] = base.naive.cost.cpu_seconds
        return values_by_name

    def to_json(self) -> dict[str, object]:
        """Return the middle run, the medians of the ratios, and all runs."""
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
            "ratios": {name: values_by_name.median for name, values_by_name in ratios.items()},
            "ranges": {name: [values_by_name.low, values_by_name.high] for name, values_by_name in ratios.items()},
            "yardstick": _yardsticks(run.opens),
            "open_lanes": run.open_lanes,
            "largest_error": max(each.largest_error for each in self.runs),
            "noise_sd": run.noise_sd,
            "runs": [self._run_json(each) for each in self.runs],
        }

    def _run_json(self, run: BatchRun) -> dict[str, object]:
        reported = {**_BY_PROCESSOR, **_BY_WALL}
        return {
            "seconds": run.total,
            "cpu_seconds": None if run.cpu_seconds is None else run.cpu_seconds["total"],
            **{f"{name.replace(' ', '_')}_cpu_seconds": spent for name, spent in _yardsticks(run.opens).items()},
            "ratios": {name: ratio(self.cell, self.baselines, run) for name, ratio in reported.items()},
        }


def _yardsticks(opens: Opens) -> dict[str, float]:
    """Return the processor seconds of each yardstick, by the names in the results."""
    return {
        "bare open": opens.bare.cpu_seconds,
        "trusted server": opens.trusted.cpu_seconds,
        "batch open": opens.batch.cpu_seconds,
        "batch server": opens.batch_server.cpu_seconds,
    }


Ratio = Callable[[Cell, Baselines, BatchRun], float | None]


def _by_cpu(compare: Callable[[Baselines, BatchRun], float | None]) -> Ratio:
    """Return the processor seconds a report of three helpers together, over the result of `compare`."""

    def ratio(cell: Cell, base: Baselines, run: BatchRun) -> float | None:
        other = compare(base, run)
        if run.cpu_seconds is None or other is None:
            return None
        return run.cpu_seconds["total"] / cell.reports / other

    return ratio


def _cpu_of(peer: PeerCost | None) -> float | None:
    return None if peer is None else peer.cost.cpu_seconds


def _times_faster(peer: PeerCost | None, cell: Cell, run: BatchRun) -> float | None:
    """Return our throughput over a peer's."""
    return None if peer is None else peer.cost.seconds / (run.total / cell.reports)


_BY_PROCESSOR: dict[str, Ratio] = {
    "cpu_over_trusted_server": _by_cpu(lambda _, run: run.opens.trusted.cpu_seconds),
    "cpu_over_batch_server": _by_cpu(lambda _, run: run.opens.batch_server.cpu_seconds),
    "cpu_over_three_batch_opens": _by_cpu(lambda _, run: PARTIES * run.opens.batch.cpu_seconds),
    "cpu_over_three_bare_opens": _by_cpu(lambda _, run: PARTIES * run.opens.bare.cpu_seconds),
    "cpu_over_plaintext": _by_cpu(lambda base, _: base.plain.cpu_seconds),
    "cpu_over_naive_mpyc": _by_cpu(lambda base, _: _cpu_of(base.naive)),
    "ingest_over_bare_open": lambda _, base, __: base.ingest_over_bare_open,
    "sum_over_plaintext": lambda _, base, __: base.sum_over_plaintext,
}
_BY_WALL: dict[str, Ratio] = {
    "slowdown_over_plaintext": lambda cell, base, run: run.total / cell.reports / base.plain.seconds,
    "speedup_over_naive_mpyc": lambda cell, base, run: _times_faster(base.naive, cell, run),
}

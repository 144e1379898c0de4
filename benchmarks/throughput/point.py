"""The results of one cell: its runs, every ratio with its range over the runs, and where the time of a query goes.

Helpers report what they have used on their own metrics page, all but their workers, which only the machine they run on
can measure. Stages add up to the seconds of the query, and the profile to the processor time of the helpers.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
_CPU_SECONDS, _PEAK_BYTES, _LANES = "trefoil_process_cpu_seconds", "trefoil_process_peak_bytes", "trefoil_open_lanes"

Values = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class HelperCounters:
    """The metrics of one helper by name and label: processor seconds, memory, bytes.

    `processes` is empty if the helper's system has no /proc.
    """

    metrics: Mapping[str, Values]

    @classmethod
    def parse(cls, page: str) -> HelperCounters:
        """Parse a metrics page; a metric that is absent counts as zero."""
        metrics: dict[str, dict[str, float]] = {}
        for name, label, value in _LINE.findall(page):
            metrics.setdefault(name, {})[label] = float(value)
        return cls(metrics)

    @classmethod
    def fetch(cls, helper: HelperEntry, process_id: int | None = None) -> HelperCounters:
        """Fetch the counters of a running helper. They are without its workers; those of a process here are added."""
        counters = cls.parse(fetch(helper, "/metrics", _FETCH_SECONDS).decode())
        if process_id is None or not counters.processes:
            return counters
        used = usage(process_id)
        spent = {**counters.processes, _MPC: used.cpu_seconds.get(_MPC, 0.0)}
        peaks = {**counters.metrics.get(_PEAK_BYTES, {}), _MPC: 2**20 * used.peaks_mb.get(_MPC, 0.0)}
        return cls({**counters.metrics, _CPU_SECONDS: spent, _PEAK_BYTES: peaks})

    def since(self, before: HelperCounters) -> HelperCounters:
        """Return the difference of two readings; the peak of memory and the lanes stay."""
        return HelperCounters(
            {
                name: values if name in (_PEAK_BYTES, _LANES) else _difference(values, before.metrics.get(name, {}))
                for name, values in self.metrics.items()
            }
        )

    def one(self, metric: str, default: float = 0.0) -> float:
        """Return the value of a metric without labels."""
        return self.metrics.get(f"trefoil_{metric}", {}).get("", default)

    @property
    def processes(self) -> Values:
        return self.metrics.get(_CPU_SECONDS, {})

    @property
    def peaks_mb(self) -> Values:
        return {process: size / 2**20 for process, size in self.metrics.get(_PEAK_BYTES, {}).items()}

    @property
    def admit(self) -> Values:
        return self.metrics.get("trefoil_admit_cpu_seconds_total", {})

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
        return min(int(helper.one("open_lanes", 1)) for helper in self.helpers)

    @property
    def peer_bytes(self) -> float:
        return sum(helper.one("peer_bytes_total") for helper in self.helpers)


def _difference(now: Values, before: Values) -> dict[str, float]:
    return {name: value - before.get(name, 0.0) for name, value in now.items()}


ADMIT_PARTS = ("check", "open", "expand", "sum", "residues")
# What a query goes through, in this order, as its querier sees it, and what happens there.
STAGES = {
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
    ledger = min(counters.one("ledger_seconds_total"), agreeing)
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
    stages["transfer"] = max(0.0, transfer + min(0.0, left))
    # Where even all of the transfer was such seconds, the querier's clock and a helper's have read different moments.
    scale = min(1.0, total / sum(stages.values()))
    return {**{stage: spent * scale for stage, spent in stages.items()}, "waiting": max(0.0, left)}


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
        "ledger": used.one("ledger_cpu_seconds_total"),
        "agree": others - receive - used.one("ledger_cpu_seconds_total"),
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
        """Return the ratios that all runs have, those of processor time first: other load changes them least."""
        runs = [self.ratios_of(run) for run in self.runs]
        return {name: Range.of([ratios[name] for ratios in runs]) for name in runs[0]}

    def ratios_of(self, run: BatchRun) -> dict[str, float]:
        """Return the ratios of one run, of all three helpers together over each baseline; those that are known."""
        base, opens, reports = self.baselines, run.opens, self.cell.reports
        cpu = None if run.cpu_seconds is None else run.cpu_seconds["total"] / reports
        others = {
            "trusted_server": opens.trusted.cpu_seconds,
            "batch_server": opens.batch_server.cpu_seconds,
            "three_batch_opens": PARTIES * opens.batch.cpu_seconds,
            "three_bare_opens": PARTIES * opens.bare.cpu_seconds,
            "plaintext": base.plain.cpu_seconds,
            "naive_mpyc": None if base.naive is None else base.naive.cost.cpu_seconds,
        }
        ratios = {f"cpu_over_{name}": cpu and other and cpu / other for name, other in others.items()}
        ratios["ingest_over_bare_open"] = base.ingest_over_bare_open
        ratios["sum_over_plaintext"] = base.sum_over_plaintext
        ratios["slowdown_over_plaintext"] = run.total / reports / base.plain.seconds
        if base.naive is not None:
            ratios["speedup_over_naive_mpyc"] = base.naive.cost.seconds / (run.total / reports)
        return {name: ratio for name, ratio in ratios.items() if ratio is not None}

    def reports_per_second(self) -> dict[str, float]:
        """Return the throughput of every system, in the middle run."""
        return {system: 1 / seconds for system, (seconds, _) in self._per_report().items()}

    def cpu_per_report(self) -> dict[str, float]:
        """Return the processor seconds a report of every system that reports them, in the middle run."""
        return {system: cpu for system, (_, cpu) in self._per_report().items() if cpu is not None}

    def _per_report(self) -> dict[str, tuple[float, float | None]]:
        """Return the seconds a report of every system, on all cores, and its processor seconds."""
        run, base, opens = self.middle, self.baselines, self.middle.opens
        cpu = None if run.cpu_seconds is None else run.cpu_seconds["total"] / self.cell.reports
        seconds: dict[str, tuple[float, float | None]] = {
            "plaintext": (base.plain.seconds, base.plain.cpu_seconds),
            "trusted server": (opens.trusted.seconds / CORES, opens.trusted.cpu_seconds),
            "trusted server, batch open": (opens.batch_server.seconds / CORES, opens.batch_server.cpu_seconds),
            "three batch opens": (PARTIES * opens.batch.seconds / CORES, PARTIES * opens.batch.cpu_seconds),
            "trefoil": (run.total / self.cell.reports, cpu),
        }
        if base.naive is not None:
            seconds["naive MPyC"] = (base.naive.cost.seconds, base.naive.cost.cpu_seconds)
        return seconds

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
            "ratios": {name: ratio.median for name, ratio in ratios.items()},
            "ranges": {name: [ratio.low, ratio.high] for name, ratio in ratios.items()},
            "yardstick": _yardsticks(run.opens),
            "open_lanes": run.open_lanes,
            "largest_error": max(each.largest_error for each in self.runs),
            "noise_sd": run.noise_sd,
            "runs": [self._run_json(each) for each in self.runs],
        }

    def _run_json(self, run: BatchRun) -> dict[str, object]:
        return {
            "seconds": run.total,
            "cpu_seconds": None if run.cpu_seconds is None else run.cpu_seconds["total"],
            **{f"{name.replace(' ', '_')}_cpu_seconds": spent for name, spent in _yardsticks(run.opens).items()},
            "ratios": self.ratios_of(run),
        }


def _yardsticks(opens: Opens) -> dict[str, float]:
    """Return the processor seconds of each yardstick, by the names in the results."""
    return {
        "bare open": opens.bare.cpu_seconds,
        "trusted server": opens.trusted.cpu_seconds,
        "batch open": opens.batch.cpu_seconds,
        "batch server": opens.batch_server.cpu_seconds,
    }

"""The record of one cell: its runs, every ratio with its range over the runs, and where the time of a query goes.

Helpers report what they have used on their own metrics page, all but their workers, which only the machine they run on
can measure. Stages add up to the seconds of the query, and the profile to the processor time of the helpers.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest

from benchmarks.results.columns import Record
from benchmarks.throughput.baselines import CORES, PlaintextCost
from benchmarks.throughput.grid import Cell
from mpc_helpers.local.launcher import fetch
from mpc_helpers.service.monitoring import DAEMON, FORK_SERVER, usage
from protocol.helper_set import HelperEntry, HelperSet
from protocol.shares import PARTIES
from protocol.status import QueryState

_LINE = re.compile(r'^(trefoil_\w+)(?:{\w+="([^"]*)"})? (\S+)$', re.MULTILINE)
_FETCH_SECONDS = 10.0
_CPU_SECONDS, _PEAK_BYTES, _LANES = "trefoil_process_cpu_seconds", "trefoil_process_peak_bytes", "trefoil_open_lanes"

# By names of metrics, stages, systems or helpers.
Numbers = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class HelperCounters:
    """The metrics of one helper by name and label: processor seconds, memory, bytes.

    `processes` is empty if the helper's system has no /proc.
    """

    metrics: Mapping[str, Numbers]

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
        metrics = dict(self.metrics)
        for name in metrics.keys() - {_PEAK_BYTES, _LANES}:
            earlier = before.metrics.get(name, {})
            metrics[name] = {label: value - earlier.get(label, 0.0) for label, value in metrics[name].items()}
        return HelperCounters(metrics)

    def one(self, metric: str, default: float = 0.0) -> float:
        """Return the value of a metric without labels."""
        return self.metrics.get(f"trefoil_{metric}", {}).get("", default)

    @property
    def processes(self) -> Numbers:
        return self.metrics.get(_CPU_SECONDS, {})

    @property
    def peaks_mb(self) -> Numbers:
        return {process: size / 2**20 for process, size in self.metrics.get(_PEAK_BYTES, {}).items()}

    @property
    def admit(self) -> Numbers:
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


@dataclass(frozen=True, slots=True)
class Baselines:
    """The same workload without helpers, and what a helper's ingest and its sum cost beside their least."""

    plain: PlaintextCost
    sum_over_plaintext: float
    ingest_over_bare_open: float | None = None
    naive: PlaintextCost | None = None


@dataclass(frozen=True, slots=True)
class BatchRun:
    """One batch from submission to answer, by the names in the results, and the yardsticks around it.

    What is not known is None. `open_lanes` is how many payloads the helpers open at a time.
    """

    yardsticks: Mapping[str, PlaintextCost]
    seconds: Numbers
    cpu_seconds: Numbers | None
    profile: Numbers | None
    bytes_per_report: Numbers
    disk_bytes: Numbers
    peak_rss_mb: Numbers
    peak_rss_mb_by_process: Mapping[str, Numbers]
    largest_error: int
    noise_sd: float
    open_lanes: int = 1

    @property
    def total(self) -> float:
        return self.seconds["total"]

    @property
    def cpu_total(self) -> float | None:
        return None if self.cpu_seconds is None else self.cpu_seconds["total"]

    def opening_seconds(self) -> dict[str, float]:
        """Return the processor seconds a report of each yardstick."""
        return {name: cost.cpu_seconds for name, cost in self.yardsticks.items()}


def record_of(cell: Cell, base: Baselines, runs: Sequence[BatchRun]) -> Record:
    """Return the record of one cell, measured once or more: the run with the median time, and ratios of all runs."""
    middle = sorted(runs, key=lambda run: run.total)[len(runs) // 2]
    ratios = [_ratios(cell.reports, base, run) for run in runs]
    per_report = _per_report(cell.reports, base, middle)
    record = asdict(middle)
    del record["yardsticks"]
    return {
        "reports": cell.reports,
        "buckets": cell.buckets,
        "checked": cell.checked,
        "suite": cell.suite.value,
        **record,
        "reports_per_second": {system: 1 / seconds for system, (seconds, _) in per_report.items()},
        "cpu_seconds_per_report": {system: cpu for system, (_, cpu) in per_report.items() if cpu is not None},
        "ratios": {name: statistics.median(each[name] for each in ratios) for name in ratios[0]},
        "ranges": {name: [extreme(each[name] for each in ratios) for extreme in (min, max)] for name in ratios[0]},
        "yardstick": middle.opening_seconds(),
        "largest_error": max(run.largest_error for run in runs),
        "runs": [
            {
                "seconds": run.total,
                "cpu_seconds": run.cpu_total,
                **{f"{name.replace(' ', '_')}_cpu_seconds": spent for name, spent in run.opening_seconds().items()},
                "ratios": each,
            }
            for run, each in zip(runs, ratios, strict=True)
        ],
    }


def _ratios(reports: int, base: Baselines, run: BatchRun) -> dict[str, float]:
    """Return the ratios of one run that are known, of all three helpers together over each baseline.

    Those of processor time come first: other load changes them least.
    """
    opens = run.opening_seconds()
    others = {
        "trusted_server": opens["trusted server"],
        "batch_server": opens["batch server"],
        "three_batch_opens": PARTIES * opens["batch open"],
        "three_bare_opens": PARTIES * opens["bare open"],
        "plaintext": base.plain.cpu_seconds,
        "naive_mpyc": None if base.naive is None else base.naive.cpu_seconds,
    }
    cpu = run.cpu_total
    ratios = {f"cpu_over_{name}": cpu and other and cpu / reports / other for name, other in others.items()}
    ratios["ingest_over_bare_open"] = base.ingest_over_bare_open
    ratios["sum_over_plaintext"] = base.sum_over_plaintext
    ratios["slowdown_over_plaintext"] = run.total / reports / base.plain.seconds
    if base.naive is not None:
        ratios["speedup_over_naive_mpyc"] = base.naive.seconds / (run.total / reports)
    return {name: ratio for name, ratio in ratios.items() if ratio is not None}


def _per_report(reports: int, base: Baselines, run: BatchRun) -> dict[str, tuple[float, float | None]]:
    """Return the seconds a report of every system, on all cores, and its processor seconds."""
    opens = {name: (cost.seconds / CORES, cost.cpu_seconds) for name, cost in run.yardsticks.items()}
    batch_seconds, batch_cpu = opens["batch open"]
    systems: dict[str, tuple[float, float | None]] = {
        "plaintext": (base.plain.seconds, base.plain.cpu_seconds),
        "trusted server": opens["trusted server"],
        "trusted server, batch open": opens["batch server"],
        "three batch opens": (PARTIES * batch_seconds, PARTIES * batch_cpu),
        "trefoil": (run.total / reports, None if run.cpu_total is None else run.cpu_total / reports),
    }
    if base.naive is not None:
        systems["naive MPyC"] = (base.naive.seconds, base.naive.cpu_seconds)
    return systems


def kind(point: Record) -> str:
    """Return "checked" or "unchecked", with the cipher suite if it is not the first."""
    suite = "" if point.get("suite", 1) == 1 else f", suite {point['suite']}"
    return ("checked" if point["checked"] else "unchecked") + suite


def spread(point: Record, name: str, digits: int = 1) -> str:
    """Return a ratio's median, with its range over the runs if there is one; empty if the point does not have it."""
    if name not in point["ratios"]:
        return ""
    middle, low, high = (
        f"{value:.{digits}f}" for value in (point["ratios"][name], *point.get("ranges", {}).get(name, (0.0, 0.0)))
    )
    return middle if low == high else f"{middle} ({low} to {high})"

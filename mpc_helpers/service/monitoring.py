"""What a helper reports about itself: log lines, metrics for Prometheus, and the resource usage of its processes.

No secret is ever passed to the log, and no site, query or person is named in a metric.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import logging
import os
import platform
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TextIO

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mpc_helpers.admission.chunk import CPU_PARTS
from mpc_helpers.admission.ingest import AdmittedColumn
from mpc_helpers.ledger.ledger import ReportLedger
from mpc_helpers.service.health import Labels
from protocol.errors import Rejection, TrefoilError, printable
from protocol.header import VERSION
from protocol.lanes import LANES, find_lanes
from protocol.net.listening import RateLimitFilter

LONGEST = 4000
_LOG = logging.getLogger(__name__)
_LOG.addFilter(RateLimitFilter(burst=10))


LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]


def fields(**values: object) -> dict[str, dict[str, object]]:
    """Return the `extra` of a log call: named values, which JSON lines contain."""
    return {"fields": values}


def _component(record: logging.LogRecord) -> str:
    """Return the last part of a logger's name: loggers are named by their modules."""
    return record.name.rpartition(".")[2]


class TextLines(logging.Formatter):
    """Lines for people. Control characters in text from others never reach a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(record.created))
        line = f"{when} {record.levelname} {_component(record)} {printable(record.getMessage(), LONGEST)}"
        return line if record.exc_info is None else f"{line}\n{self.formatException(record.exc_info)}"


class JsonLines(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        details = getattr(record, "fields", {})
        line = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": _component(record),
            "message": record.getMessage()[:LONGEST],
            **(details if isinstance(details, Mapping) else {}),
        }
        if record.exc_info is not None:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def start_logging(level: LogLevel, form: LogFormat, stream: TextIO | None = None) -> None:
    """Run once by the daemon: write all lines to standard error."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


Reading = Callable[[], Mapping[Labels, float]]


class Metrics:
    """Counters, and gauges that are read at each scrape. Every series that can exist starts at 0.

    In a registry of its own: the library's default one adds collectors that we have not chosen.
    """

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._names: set[str] = set()

    def counter(self, name: str, meaning: str, **values: Iterable[str]) -> Callable[..., None]:
        """Add a counter, and return the function that increments it by an amount, given labels.

        `values` lists the values of each label: every combination starts at 0, so that a first increase is visible.
        """
        names = sorted(values)
        combinations = itertools.product(*(values[label] for label in names))
        counts: dict[Labels, float] = {tuple(zip(names, each, strict=True)): 0.0 for each in combinations}
        self.counted(name, meaning, lambda: counts)

        def add(amount: float = 1, /, **labels: str) -> None:
            key = tuple(sorted(labels.items()))
            counts[key] = counts.get(key, 0.0) + amount

        return add

    def counted(self, name: str, meaning: str, read: Reading) -> None:
        """Add a counter whose value is kept elsewhere."""
        self._add(_Reader(CounterMetricFamily, name, meaning, read))

    def gauge(self, name: str, meaning: str, read: Reading) -> None:
        """Add a gauge; `read` returns its current values by labels."""
        self._add(_Reader(GaugeMetricFamily, name, meaning, read))

    def value(self, name: str, meaning: str, read: Callable[[], float]) -> None:
        self.gauge(name, meaning, lambda: {(): read()})

    def _add(self, reader: _Reader) -> None:
        # Checked here: the registry goes by OpenMetrics, where trefoil_queries and trefoil_queries_total are one name.
        if reader.name in self._names:
            raise ValueError(f"there is a metric {reader.name} already")
        self._names.add(reader.name)
        self._registry.register(reader)

    def render(self) -> str:
        return generate_latest(self._registry).decode()


@dataclass(frozen=True, slots=True)
class _Reader(Collector):
    """One metric, read at each scrape."""

    family: type[CounterMetricFamily | GaugeMetricFamily]
    name: str
    meaning: str
    read: Reading

    def collect(self) -> Iterator[Metric]:
        try:
            values = sorted(self.read().items())
        except (OSError, TrefoilError) as error:
            # A metric of a disk that is gone must not hide the others.
            _LOG.warning("%s cannot be read: %s", self.name, error)
            values = []
        labels = [name for name, _ in values[0][0]] if values else []
        metric = self.family(self.name, self.meaning, labels=labels)
        for key, value in values:
            metric.add_metric([text for _, text in key], value)
        yield metric


CountRejections = Callable[[Mapping[Rejection, int]], None]


def count_rejections(metrics: Metrics) -> CountRejections:
    """Add the counter of rejected reports, and return the function that increments it."""
    reasons = [reason.value for reason in Rejection]
    count = metrics.counter("trefoil_reports_rejected_total", "Rejected reports, by reason.", reason=reasons)

    def rejected(counts: Mapping[Rejection, int]) -> None:
        for reason, amount in counts.items():
            count(amount, reason=reason.value)

    return rejected


def count_admissions(metrics: Metrics, rejected: CountRejections) -> Callable[[AdmittedColumn], None]:
    """Add the counter of admission's CPU time, and return the function that counts an admitted batch."""
    meaning = "CPU seconds of admission, by part."
    spent = metrics.counter("trefoil_admit_cpu_seconds_total", meaning, part=CPU_PARTS)

    def admitted(column: AdmittedColumn) -> None:
        rejected(column.rejections())
        for part, seconds in column.cpu_seconds.items():
            spent(seconds, part=part)

    return admitted


def show_process(metrics: Metrics, started: int) -> None:
    """Add the build, and the usual `process_*` metrics of the daemon alone, without its child processes."""
    build = (("python", platform.python_version()), ("release", _release()), ("wire", str(VERSION)))
    metrics.gauge("trefoil_build_info", "The build; always 1.", lambda: {build: 1.0})
    lanes = LANES if find_lanes() else 1
    metrics.value("trefoil_open_lanes", "Payloads that are opened at a time: 8 with trefoil_lanes.", lambda: lanes)
    metrics.value("process_start_time_seconds", "Start of this helper, in Unix time.", lambda: started)
    metrics.value("process_resident_memory_bytes", "Resident memory of the daemon.", _resident_bytes)
    metrics.value("process_open_fds", "Open file descriptors.", lambda: len(list(Path("/proc/self/fd").iterdir())))
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    metrics.value("process_max_fds", "Limit on file descriptors of the daemon.", lambda: descriptors)
    metrics.counted("process_cpu_seconds_total", "CPU seconds of the daemon.", lambda: {(): sum(os.times()[:2])})


def show_ledger(metrics: Metrics, ledger: ReportLedger, rows: Callable[[], int]) -> None:
    """Add the ledger's size and cost. Counting rows scans the tables, so `rows` returns the last count."""
    size = "Bytes of the report ledger and its write-ahead log."
    metrics.value("trefoil_ledger_bytes", size, lambda: ledger.sizes()[0])
    metrics.value("trefoil_ledger_log_bytes", "Bytes of its write-ahead log.", lambda: ledger.sizes()[1])
    metrics.value("trefoil_ledger_reports", "Reports in the ledger, counted hourly.", rows)
    metrics.value("trefoil_ledger_moves", "Moves in the ledger's chain.", lambda: ledger.chain.head.sequence)
    spent = "Seconds spent in the report ledger."
    metrics.counted("trefoil_ledger_seconds_total", spent, lambda: {(): ledger.seconds})
    spent = "CPU seconds spent in the report ledger."
    metrics.counted("trefoil_ledger_cpu_seconds_total", spent, lambda: {(): ledger.cpu_seconds})


def _release() -> str:
    try:
        return importlib.metadata.version("trefoil")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


_TICKS = os.sysconf("SC_CLK_TCK")
_FRESH_SECONDS = 0.1
DAEMON, FORK_SERVER = "daemon", "fork server"
_ROLES = {
    "mpc_helpers.mpc.fork_server_main": FORK_SERVER,
    "multiprocessing-fork": "opening reports",
    "resource_tracker": "resource tracker",
}


@dataclass(frozen=True, slots=True)
class Usage:
    """Usage of a process tree, by role. Children that exited count with their parent."""

    cpu_seconds: Mapping[str, float]
    peaks_mb: Mapping[str, float]

    def without(self, role: str) -> Usage:
        rest = (
            {name: value for name, value in each.items() if name != role} for each in (self.cpu_seconds, self.peaks_mb)
        )
        return Usage(*rest)


def usage(pid: int) -> Usage:
    """Return the usage of a process tree, with the peaks of one role added up. Empty where there is no /proc."""
    cpu, peaks = defaultdict[str, float](float), defaultdict[str, float](float)
    for member in _tree(pid):
        try:
            stat = Path(f"/proc/{member}/stat").read_text().rpartition(")")[2].split()
            status = Path(f"/proc/{member}/status").read_text()
            command = Path(f"/proc/{member}/cmdline").read_text()
        except OSError:
            continue  # it exited between listing and reading
        role = DAEMON if member == pid else _role(command)
        # After the name: utime, stime and the same of children that were waited for are fields 11 to 14.
        cpu[role] += sum(map(int, stat[11:15])) / _TICKS
        peaks[role] += next((int(line.split()[1]) / 1024 for line in status.splitlines() if "VmHWM" in line), 0.0)
    return Usage(dict(cpu), dict(peaks))


def count_processes(metrics: Metrics) -> None:
    """Add gauges of the CPU time and peak memory of this process and its descendants, by role, without workers.

    A worker holds the noise of one query, so none of its figures is exported: neither its own nor, once it has ended,
    in those of the fork server, its parent. That its work does not depend on the noise is a second line of defence.
    """
    last, read_at = Usage({}, {}), 0.0

    def current() -> Usage:
        """Return a cached reading: anyone may scrape, and walking /proc takes milliseconds."""
        nonlocal last, read_at
        if time.monotonic() - read_at > _FRESH_SECONDS:
            last, read_at = usage(os.getpid()).without(FORK_SERVER), time.monotonic()
        return last

    def cpu() -> Mapping[Labels, float]:
        return {(("process", role),): seconds for role, seconds in current().cpu_seconds.items()}

    def peaks() -> Mapping[Labels, float]:
        return {(("process", role),): peak * 2**20 for role, peak in current().peaks_mb.items()}

    metrics.gauge("trefoil_process_cpu_seconds", "CPU seconds since the start, by role of the process.", cpu)
    metrics.gauge("trefoil_process_peak_bytes", "Peak memory, by role of the process.", peaks)


def _role(command: str) -> str:
    return next((role for mark, role in _ROLES.items() if mark in command), "other")


def _tree(root: int) -> list[int]:
    children = defaultdict[int, list[int]](list)
    # By parent, of all processes: not every kernel lists the children of one.
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError):  # it exited between listing and reading
            children[int((entry / "stat").read_text().rpartition(")")[2].split()[1])].append(int(entry.name))
    members = [root]
    for member in members:
        members += children[member]
    return members

"""What an operator's dashboard shows of one helper: its build, process, disk and ledger, as gauges and counters."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
from collections.abc import Callable
from pathlib import Path

from mpc_helpers.ledger.ledger import ReportLedger
from mpc_helpers.service.metrics import Metrics
from mpc_helpers.service.storage import Storage
from protocol.header import VERSION

_STATM = Path("/proc/self/statm")
_DESCRIPTORS = Path("/proc/self/fd")


def show_process(metrics: Metrics, started: int) -> None:
    """Which build this is, and what the daemon takes; its workers come and go and are not counted."""
    build = (("python", platform.python_version()), ("release", _release()), ("wire", str(VERSION)))
    metrics.gauge("trefoil_build_info", "which build this is; always 1", lambda: {build: 1.0})
    metrics.value("process_start_time_seconds", "when this helper started, in seconds since 1970", lambda: started)
    metrics.value("process_resident_memory_bytes", "resident memory of the daemon", _resident_bytes)
    metrics.value("process_open_fds", "descriptors that the daemon has open", lambda: len(list(_DESCRIPTORS.iterdir())))
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    metrics.value("process_max_fds", "descriptors that the daemon may open", lambda: descriptors)
    spent = "processor seconds of the daemon"
    metrics.counted("process_cpu_seconds_total", spent, lambda: {(): sum(os.times()[:2])})


def show_ledger(metrics: Metrics, ledger: ReportLedger, path: Path, rows: Callable[[], int]) -> None:
    """How large the ledger is. Counting rows reads the whole table, so `rows` is what was last counted."""
    log = path.with_name(f"{path.name}-wal")
    metrics.value(
        "trefoil_ledger_bytes", "bytes of the report ledger, its log included", lambda: _size(path) + _size(log)
    )
    metrics.value("trefoil_ledger_log_bytes", "bytes of its log alone", lambda: _size(log))
    metrics.value("trefoil_ledger_reports", "reports in the ledger, counted at the start and every hour", rows)
    metrics.value("trefoil_ledger_moves", "moves in the ledger's chain", lambda: ledger.chain.head.sequence)
    spent = "seconds spent in the report ledger"
    metrics.counted("trefoil_ledger_seconds_total", spent, lambda: {(): ledger.seconds})
    spent = "processor seconds spent in the report ledger"
    metrics.counted("trefoil_ledger_cpu_seconds_total", spent, lambda: {(): ledger.cpu_seconds})


def show_disk(metrics: Metrics, storage: Storage) -> None:
    """What is left of the disk, and what columns take of it."""
    metrics.value("trefoil_disk_free_bytes", "bytes left on the disk of the data folder", lambda: storage.free_bytes)
    taken = "bytes that columns of queries take or were promised"
    metrics.value("trefoil_column_bytes", taken, storage.taken)


def _release() -> str:
    try:
        return importlib.metadata.version("trefoil")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _resident_bytes() -> int:
    return int(_STATM.read_text().split()[1]) * resource.getpagesize()


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0

"""What a helper's processes have used: processor time and the most memory each ever held. Read from /proc."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mpc_helpers.service.metrics import Labels, Metrics

_TICKS = os.sysconf("SC_CLK_TCK")
_FRESH_SECONDS = 0.1
DAEMON = "daemon"
_ROLES = {
    "mpc_helpers.mpc.fork_server_main": "fork server",
    "multiprocessing-fork": "opening reports",
    "resource_tracker": "resource tracker",
}


@dataclass(frozen=True, slots=True)
class Usage:
    """Of one process and everything it has started, by what each is for. Ended children count with their parent."""

    cpu_seconds: Mapping[str, float]
    peaks_mb: Mapping[str, float]

    @property
    def peak_rss_mb(self) -> float:
        """The peaks of all processes together, which is the most they can have held at one time."""
        return sum(self.peaks_mb.values())


def usage(pid: int) -> Usage:
    """Add up a process tree. Peaks are added too, for all processes that do the same. Empty where there is no /proc."""
    cpu, peaks = defaultdict[str, float](float), defaultdict[str, float](float)
    for member in _tree(pid):
        try:
            fields = Path(f"/proc/{member}/stat").read_text().rpartition(")")[2].split()
            status = Path(f"/proc/{member}/status").read_text()
            command = Path(f"/proc/{member}/cmdline").read_text()
        except OSError:
            continue  # it ended between listing and reading
        role = DAEMON if member == pid else _role(command)
        # After the name: utime, stime and the same of children that were waited for are fields 11 to 14.
        cpu[role] += sum(map(int, fields[11:15])) / _TICKS
        peaks[role] += next((int(line.split()[1]) / 1024 for line in status.splitlines() if "VmHWM" in line), 0.0)
    return Usage(dict(cpu), dict(peaks))


def count_processes(metrics: Metrics) -> None:
    """Show what this process and those it started have used."""
    last, read_at = Usage({}, {}), 0.0

    def current() -> Usage:
        """Not read more often than this: anybody may ask for the page, and going through /proc takes milliseconds."""
        nonlocal last, read_at
        if time.monotonic() - read_at > _FRESH_SECONDS:
            last, read_at = usage(os.getpid()), time.monotonic()
        return last

    def cpu() -> Mapping[Labels, float]:
        return {(("process", role),): seconds for role, seconds in current().cpu_seconds.items()}

    def peaks() -> Mapping[Labels, float]:
        return {(("process", role),): peak * 2**20 for role, peak in current().peaks_mb.items()}

    metrics.gauge("trefoil_process_cpu_seconds", "processor seconds since the start, by what processes are for", cpu)
    metrics.gauge("trefoil_process_peak_bytes", "the most memory processes ever held, by what they are for", peaks)


def _role(command: str) -> str:
    """What a process of a helper is for, by how it was started."""
    return next((role for mark, role in _ROLES.items() if mark in command), "other")


def _tree(root: int) -> list[int]:
    members = [root]
    # Not every kernel has a process say who its children are. Going through all processes takes far longer.
    children = _own_children if Path(f"/proc/self/task/{os.getpid()}/children").exists() else _children_by_parent()
    for member in members:
        members += children(member)
    return members


def _own_children(pid: int) -> list[int]:
    found: list[int] = []
    for thread in Path(f"/proc/{pid}/task").glob("[0-9]*"):
        with suppress(OSError):  # it ended between listing and reading
            found += map(int, (thread / "children").read_text().split())
    return found


def _children_by_parent() -> Callable[[int], list[int]]:
    found = defaultdict[int, list[int]](list)
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError):
            found[int((entry / "stat").read_text().rpartition(")")[2].split()[1])].append(int(entry.name))
    return lambda pid: found[pid]

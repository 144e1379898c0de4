"""What the three helpers' processes have used, read from /proc: processor time and the most memory each ever held."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")
_ROLES = {
    "mpc_helpers.mpc.fork_server_main": "fork server",
    "multiprocessing-fork": "opening reports",
    "resource_tracker": "resource tracker",
}


@dataclass(frozen=True, slots=True)
class Usage:
    """Of one process and everything it has started, ended children included."""

    cpu_seconds: float
    peaks_mb: Mapping[str, float]

    @property
    def peak_rss_mb(self) -> float:
        """The peaks of all processes together, which is the most they can have held at one time."""
        return sum(self.peaks_mb.values())


def usage(pid: int) -> Usage:
    """Add up a process tree. Peaks are added too, for all processes that do the same."""
    cpu, peaks = 0.0, defaultdict[str, float](float)
    for member in _tree(pid):
        try:
            fields = Path(f"/proc/{member}/stat").read_text().rpartition(")")[2].split()
            status = Path(f"/proc/{member}/status").read_text()
            command = Path(f"/proc/{member}/cmdline").read_text()
        except OSError:
            continue  # it ended between listing and reading
        # After the name: utime, stime and the same of children that were waited for are fields 11 to 14.
        cpu += sum(map(int, fields[11:15])) / _TICKS
        peak = next((int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith("VmHWM")), 0.0)
        peaks["daemon" if member == pid else _role(command)] += peak
    return Usage(cpu, dict(peaks))


def _role(command: str) -> str:
    """What a process of a helper is for, by how it was started."""
    return next((role for mark, role in _ROLES.items() if mark in command), "other")


def _tree(root: int) -> list[int]:
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    members = [root]
    for member in members:
        members += [pid for pid, parent in parents.items() if parent == member]
    return members

"""Where a figure comes from: the command, the commit, the machine, the seed and the date in every result file."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from protocol.console import write_json

# What every file in benchmarks/results has. A seed is null where nothing was drawn from one.
FIELDS = ("command", "commit", "machine", "seed", "date")
STARTED_BY = "TREFOIL_STARTED_BY"
_ROOT = Path(__file__).resolve().parents[1]


def write_results(path: Path | None, result: Mapping[str, object], seed: int | None = None) -> None:
    """Write what was measured, with where it comes from, as every bench and experiment does."""
    if path is not None:
        write_json(path, {**origin(seed), **result})


def origin(seed: int | None = None) -> dict[str, object]:
    """Where a result comes from that was made just now by this process."""
    return {
        "command": shlex.join(["trefoil", *sys.argv[1:]]),
        "commit": commit(),
        "machine": machine(),
        "seed": seed,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        # A script that prepared what the command measures names itself.
        **({"started_by": os.environ[STARTED_BY]} if STARTED_BY in os.environ else {}),
    }


def machine() -> dict[str, object]:
    """What the figures were seen on, and how busy it was with this and everything else."""
    names = [line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    memory = [int(line.split()[1]) for line in _lines("/proc/meminfo") if line.startswith("MemTotal")]
    return {
        "processor": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "memory_gb": round(memory[0] / 2**20, 1) if memory else None,
        "system": platform.system(),
        "python": platform.python_version(),
        "load_average": [round(load, 1) for load in os.getloadavg()],
    }


def commit() -> str:
    """The commit that this code is of, with a mark if files were changed since."""
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--exclude", "*", "--abbrev=10"],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return found.stdout.strip() or "unknown"


def _lines(path: str) -> list[str]:
    """Of a file that only some systems have."""
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []

"""Where figures come from: the moment, the commit and the machine, beside every run that is recorded."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path


def recorded() -> dict[str, object]:
    """What a file of results begins with."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": machine(),
    }


def machine() -> dict[str, object]:
    """What the figures were seen on."""
    names = [
        line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    return {
        "processor": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    }


def commit() -> str:
    """The project's commit, or "unknown" outside a checkout."""
    root = Path(__file__).resolve().parents[2]
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True, check=False
    )
    return found.stdout.strip() or "unknown"

"""The files in benchmarks/results: each says which command, commit, machine and seed made it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def stored(name: str) -> Any:  # Any: every file has its own form
    """One result file."""
    return json.loads((RESULTS / f"{name}.json").read_text())

"""Figures that a long run leaves: a JSON file among the artefacts, with the command, the commit and the machine."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.results.origin import origin

ARTEFACTS = Path(__file__).parents[2] / "artefacts"


def keep(name: str, command: str, figures: dict[str, object], seed: int | None = None) -> None:
    """Write artefacts/NAME.json. What is kept for good is copied to benchmarks/results and committed."""
    ARTEFACTS.mkdir(exist_ok=True)
    stored = {**origin(seed), "command": command, **figures}
    (ARTEFACTS / f"{name}.json").write_text(json.dumps(stored, indent=2, ensure_ascii=False) + "\n")

"""What is installed: every module and what it reads, and no measurements."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_results_are_not_in_the_wheel() -> None:
    """hatchling's own rules, read rather than run: patterns are anchored at the root."""
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert set(wheel["include"]) == {"/protocol", "/device", "/mpc_helpers", "/benchmarks", "/trefoil.py"}
    assert "/benchmarks/results" in wheel["exclude"]
    for excluded in wheel["exclude"]:
        path = ROOT / excluded.lstrip("/")
        assert path.exists()
        assert not list(path.rglob("*.py"))

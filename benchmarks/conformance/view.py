"""How scenarios went, as a person reads it and as a file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.conformance.runner import ScenarioResult
from protocol.console import out, write_json


def show_results(results: Sequence[ScenarioResult], json_file: Path | None) -> bool:
    """Show every failure with what it must give and what it gave, then the count; whether all passed."""
    for result in results:
        if not result.passed:
            out.print(f"FAILED {result.name}", style="red", markup=False, highlight=False)
        if result.error:
            out.print(f"  {result.error}", markup=False, highlight=False)
        for miss in result.mismatches:
            out.print(f"  event {miss.event} ({miss.kind} at {miss.seconds} s)", markup=False, highlight=False)
            out.print(f"    expected {json.dumps(miss.expected)}", markup=False, highlight=False)
            out.print(f"    actual   {json.dumps(miss.actual)}", markup=False, highlight=False)
    passed = sum(result.passed for result in results)
    failed = len(results) - passed
    document = {"passed": passed, "failed": failed, "scenarios": [asdict(result) for result in results]}
    write_json(json_file, document)
    out.print(f"{passed} passed, {failed} failed", markup=False, highlight=False)
    return failed == 0

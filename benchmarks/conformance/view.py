"""How scenarios went, as a person reads it and as a file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.conformance.runner import ScenarioResult
from protocol.console import say, write_json


def show_results(results: Sequence[ScenarioResult], json_file: Path | None) -> bool:
    """Show every failure with what it must give and what it gave, then the count; whether all passed."""
    for result in results:
        if not result.passed:
            say(f"FAILED {result.name}", style="red")
        if result.error:
            say(f"  {result.error}")
        for miss in result.mismatches:
            say(f"  event {miss.event} ({miss.kind} at {miss.seconds} s)")
            say(f"    expected {json.dumps(miss.expected)}")
            say(f"    actual   {json.dumps(miss.actual)}")
    passed = sum(result.passed for result in results)
    failed = len(results) - passed
    document = {"passed": passed, "failed": failed, "scenarios": [asdict(result) for result in results]}
    write_json(json_file, document)
    say(f"{passed} passed, {failed} failed")
    return failed == 0

"""Where a figure comes from: the command, commit, machine, seed and date in every file of benchmarks/results.

A file names the command that made it; `make results` runs them all again. If that command has changed since, a field
`rerun` has the one to use now; if it was removed, a field `retired` says so, and the figures stay with their date.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from protocol.cli.console import write_json
from protocol.errors import ErrorKind, TrefoilError

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
# What every file in benchmarks/results has. A seed is null where nothing was drawn from one.
FIELDS = ("command", "commit", "machine", "seed", "date")
STARTED_BY = "TREFOIL_STARTED_BY"


def stored(name: str) -> Any:  # Any: every file has its own schema
    """Return the content of one result file."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def write_results(path: Path | None, result: Mapping[str, object], seed: int | None = None) -> None:
    """Write a measurement with its origin, as every bench and experiment does."""
    if path is not None:
        write_json(path, {**origin(seed), **result})


def origin(seed: int | None = None) -> dict[str, object]:
    """Return the origin of a result that this process has just made."""
    return {
        "command": shlex.join(["trefoil", *sys.argv[1:]]),
        "commit": commit(),
        "machine": machine(),
        "seed": seed,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        # A script that sets up what the command measures names itself.
        **({"started_by": os.environ[STARTED_BY]} if STARTED_BY in os.environ else {}),
    }


def machine() -> dict[str, object]:
    """Return the hardware, the Python version and the load average, which includes other programs."""
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
    """Return the commit of this code, marked as dirty if files have changed since."""
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--exclude", "*", "--abbrev=10"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return described.stdout.strip() or "unknown"


def _lines(path: str) -> list[str]:
    """Return the lines of a file that exists on Linux only, or nothing."""
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def commands() -> Iterator[list[str]]:
    """Yield every command that a result file names, each once.

    Those of `make` take no path: `make load` leaves its figures among the artefacts, `make chaos` none.
    """
    seen = set()
    for path in sorted(RESULTS.glob("*.json")):
        file = json.loads(path.read_text())
        command = _with_json(shlex.split(file.get("rerun") or file.get("started_by") or file["command"]), path)
        if "retired" not in file and tuple(command) not in seen:
            seen.add(tuple(command))
            yield command


def _with_json(command: list[str], path: Path) -> list[str]:
    """Return the command with `path` as its only --json."""
    if command[0] == "make":
        return command
    if "--json" in command:
        place = command.index("--json")
        command = [*command[:place], *command[place + 2 :]]
    return [*command, "--json", str(path.relative_to(ROOT))]


def rerun() -> None:
    """Run all of them from the project's folder, and stop at the first that fails."""
    for command in commands():
        program = [sys.executable, "-m", "trefoil"] if command[0] == "trefoil" else [command[0]]
        environment = {name: value for name, value in os.environ.items() if name != STARTED_BY}
        done = subprocess.run([*program, *command[1:]], cwd=ROOT, env=environment, check=False)
        if done.returncode:
            raise TrefoilError(
                f"this command failed: {shlex.join(command)}",
                "The files that were made before it are complete.",
                kind=ErrorKind.ABORTED,
            )

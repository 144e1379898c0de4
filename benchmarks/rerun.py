"""Every result again: the command that each file in benchmarks/results names, run once more into the same file."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.origin import STARTED_BY
from benchmarks.result_files import RESULTS, ROOT
from protocol.errors import TrefoilError


def commands() -> Iterator[list[str]]:
    """What to run, each once: a command of Trefoil writes its own file, `make` writes those of its target."""
    seen = set()
    for path in sorted(RESULTS.glob("*.json")):
        found = json.loads(path.read_text())
        command = _with_json(shlex.split(found.get("started_by", found["command"])), path)
        if tuple(command) not in seen:
            seen.add(tuple(command))
            yield command


def _with_json(command: list[str], path: Path) -> list[str]:
    """The command with `path` as its only --json."""
    if command[0] == "make":
        return command
    if "--json" in command:
        place = command.index("--json")
        command = [*command[:place], *command[place + 2 :]]
    return [*command, "--json", str(path.relative_to(ROOT))]


def rerun() -> None:
    """Run all of them, from the project's folder; stops at the first that fails."""
    for command in commands():
        program = [sys.executable, "-m", "trefoil"] if command[0] == "trefoil" else [command[0]]
        environment = {name: value for name, value in os.environ.items() if name != STARTED_BY}
        done = subprocess.run([*program, *command[1:]], cwd=ROOT, env=environment, check=False)
        if done.returncode:
            raise TrefoilError(f"this failed: {shlex.join(command)}", "What was made before it is in its file.")

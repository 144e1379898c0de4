"""Processes of a test's own: whatever happens in the test, they are dead when it has ended."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
TREFOIL = (sys.executable, str(ROOT / "trefoil.py"))
# What a shell does to a job that a script starts with `&`: Ctrl-C is not meant for it.
IN_BACKGROUND = ("sh", "-c", 'trap "" INT; exec "$@"', "sh")


@contextlib.contextmanager
def started(command: Sequence[str], environment: Mapping[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
    """A running process with its output in one pipe. It is killed if the block leaves it alive."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, env=environment
    )
    try:
        yield process
    finally:
        process.kill()
        # Not `with process`: that could wait permanently for a process that still holds the pipe.
        process.wait(30)
        if process.stdout is not None:
            process.stdout.close()


def output_until(process: subprocess.Popen[str], start: str) -> list[str]:
    """The lines it has printed up to one that begins with `start`; all of them if none does."""
    lines = []
    for line in process.stdout or ():
        lines.append(line.rstrip("\n"))
        if line.startswith(start):
            break
    return lines


def holds(reversed_secret: bytes) -> bool:
    """Whether something in this process still refers to a secret: run in a pool's process after its work.

    The secret comes backwards, so that the question does not match itself.
    """
    gc.collect()
    kept = (one for each in gc.get_objects() for one in gc.get_referents(each) if isinstance(one, bytes))
    return any(reversed_secret in one[::-1] for one in kept)

"""Other programs on the same histograms, each in processes of its own: what the field offers for this sum.

The naive program is MPyC as shipped. SecretFlow SPU needs an older numpy than Trefoil does, so it is run by a Python of
its own (`--spu-python`); where there is none it is left out.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.bench.plaintext import PlaintextCost
from protocol.errors import TrefoilError
from protocol.shares import PARTIES

NAIVE_REPORTS = 150
NAIVE_RUNS = 3
NAIVE_SECONDS = 120.0
SPU_REPORTS = 5_000
SPU_SECONDS = 180.0
_ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True, slots=True)
class PeerCost:
    """Of a program that was run with fewer reports than we were; which favours it if it slows down as they grow."""

    cost: PlaintextCost
    reports: int


def measure_naive(buckets: int) -> PeerCost:
    """At a size it can bear. The median of a few runs."""
    fewer = max(10, NAIVE_REPORTS * 128 // max(buckets, 128))
    command = [sys.executable, "-m", "benchmarks.bench.naive_mpyc", f"-M{PARTIES}"]
    sizes = {"NAIVE_REPORTS": str(fewer), "NAIVE_BUCKETS": str(buckets)}
    runs = [_run(command, sizes, NAIVE_SECONDS, "the naive MPyC program") for _ in range(NAIVE_RUNS)]
    wall = statistics.median(run["seconds"] for run in runs) / fewer
    # All parties do the same, and one says what it used.
    cpu = statistics.median(PARTIES * run["cpu_seconds"] for run in runs) / fewer
    return PeerCost(PlaintextCost(wall, cpu), fewer)


def measure_spu(python: Path, reports: int, buckets: int) -> PeerCost:
    """Three ABY3 parties: share, sum and reveal. Nothing is sealed, checked or spent, and no noise is added."""
    fewer = min(reports, max(10, SPU_REPORTS * 128 // max(buckets, 128)))
    program = Path(__file__).parents[1] / "spu_sum.py"
    done = _run([str(python), str(program), str(fewer), str(buckets)], {}, SPU_SECONDS, "the SPU program")
    return PeerCost(PlaintextCost(done["seconds"] / fewer, done["cpu_seconds"] / fewer), fewer)


def _run(command: Sequence[str], sizes: Mapping[str, str], seconds: float, name: str) -> dict[str, float]:
    """The last line that a program prints, which is JSON. Whatever it started ends with it."""
    program = subprocess.Popen(
        command,
        env=os.environ | sizes,
        cwd=_ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        printed, complaint = program.communicate(timeout=seconds)
        if program.returncode:
            last = complaint.strip().splitlines()[-1:]
            raise TrefoilError(f"{name} failed: {' '.join(last)}", "Leave it out with --without.")
        found = json.loads(printed.strip().splitlines()[-1])
        return {key: float(found[key]) for key in ("seconds", "cpu_seconds")}
    except subprocess.TimeoutExpired:
        raise TrefoilError(f"{name} did not finish within {seconds:g} s", "Leave it out with --without.") from None
    except (ValueError, KeyError, IndexError):
        raise TrefoilError(f"{name} did not print its result", "Leave it out with --without.") from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGKILL)
        program.communicate()

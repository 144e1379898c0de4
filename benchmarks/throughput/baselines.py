"""Baselines of the throughput bench, on the same workload in the same run.

(a) The plain sum of the histograms. (b) A trusted server that opens one sealed histogram per report and adds it, as a
service in an enclave does. (c) The bare HPKE open alone, the least that any helper must do for a report. Both once
with the library's open, which earlier results have, and once with the helpers' own batch open. (d) The naive program:
MPyC as shipped, in processes of its own. The yardsticks (b) and (c) run right before and right after each query with
every core busy, since cores that share a cache do less together and differ from minute to minute. Each of them lasts
at least a twentieth of the query, so that one large run can be cited.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Self

import numpy as np

from benchmarks.workloads.reports import Histograms, WorkerPool, Workload
from protocol.errors import ErrorKind, TrefoilError
from protocol.field import SEED_SIZE
from protocol.hpke import PrivateKey, Suite
from protocol.shares import PARTIES

# Enough to be steady, few enough that sealing them does not dominate the benchmark.
SAMPLE = 2_000
_INFO = bytes(300)


@dataclass(frozen=True, slots=True)
class PlaintextCost:
    """Seconds per report, by the wall and by the processor."""

    seconds: float
    cpu_seconds: float

    @classmethod
    def mean(cls, costs: Sequence[PlaintextCost]) -> PlaintextCost:
        """Return the mean of the same work, measured several times or on several cores."""
        count = len(costs)
        return cls(sum(cost.seconds for cost in costs) / count, sum(cost.cpu_seconds for cost in costs) / count)


def measure(work: Callable[[], object], reports: int, *, rounds: int = 5) -> PlaintextCost:
    """Return the cost of `work` per report: the best of some rounds, since other load only adds to it."""
    best = PlaintextCost(float("inf"), float("inf"))
    for _ in range(rounds):
        wall, cpu = time.perf_counter(), time.process_time()
        work()
        spent = PlaintextCost((time.perf_counter() - wall) / reports, (time.process_time() - cpu) / reports)
        best = PlaintextCost(min(best.seconds, spent.seconds), min(best.cpu_seconds, spent.cpu_seconds))
    return best


def sustain(work: Callable[[], object], reports: int, seconds: float) -> PlaintextCost:
    """Return the mean cost of `work` per report over `seconds`, to compare with a long run.

    Two hardware threads of one core slow each other down, so all must be busy nearly all of the time.
    """
    wall, cpu, done = time.perf_counter(), time.process_time(), 0
    while not done or time.perf_counter() - wall < seconds:
        work()
        done += reports
    return PlaintextCost((time.perf_counter() - wall) / done, (time.process_time() - cpu) / done)


def plain_sum(workload: Workload) -> PlaintextCost:
    """Measure (a): numpy's sum of the histograms, all in memory."""
    matrix = sample_of(workload)
    return measure(lambda: matrix.sum(axis=0), len(matrix), rounds=9)


def sample_of(workload: Workload) -> Histograms:
    sample = min(workload.count, SAMPLE * 4)
    spans = [span for span in workload.chunks() if span.stop <= sample] or [range(workload.count)]
    return np.concatenate([workload.histograms(span) for span in spans])


def trusted_server(workload: Workload, suite: Suite, seconds: float) -> PlaintextCost:
    """Measure (b): one HPKE ciphertext of the histogram per report, opened and added by one party."""
    key, sealed = _sealed_rows(workload, suite)

    def work() -> None:
        total = np.zeros(workload.terms.length, dtype=np.int64)
        for ciphertext in sealed:
            total += np.frombuffer(key.open(ciphertext, _INFO), dtype=np.int64)

    return sustain(work, len(sealed), seconds)


def batch_server(workload: Workload, suite: Suite, seconds: float) -> PlaintextCost:
    """Measure (b) with the helpers' own batch open, which the operator of one server could install too."""
    key, sealed = _sealed_rows(workload, suite)

    def work() -> None:
        rows = b"".join(filter(None, key.open_many(sealed, [_INFO] * len(sealed))))
        np.frombuffer(rows, dtype=np.int64).reshape(len(sealed), -1).sum(axis=0)

    return sustain(work, len(sealed), seconds)


def bare_open(workload: Workload, suite: Suite, seconds: float) -> PlaintextCost:
    """Measure (c): opening a payload of two seeds, and nothing else."""
    key, sealed = _sealed_seeds(min(workload.count, SAMPLE), suite)
    return sustain(lambda: [key.open(ciphertext, _INFO) for ciphertext in sealed], len(sealed), seconds)


def batch_open(workload: Workload, suite: Suite, seconds: float) -> PlaintextCost:
    """Measure (c) with the helpers' own batch open: many payloads in one batch."""
    key, sealed = _sealed_seeds(min(workload.count, SAMPLE), suite)
    infos = [_INFO] * len(sealed)
    return sustain(lambda: key.open_many(sealed, infos), len(sealed), seconds)


# Sealed once in a process, however often they are opened.


@lru_cache(maxsize=2)
def _sealed_rows(workload: Workload, suite: Suite) -> tuple[PrivateKey, list[bytes]]:
    key = PrivateKey.generate(suite)
    rows = [row.tobytes() for row in sample_of(workload)[:SAMPLE]]
    return key, key.public.seal_many(rows, [_INFO] * len(rows))


@lru_cache(maxsize=2)
def _sealed_seeds(count: int, suite: Suite) -> tuple[PrivateKey, list[bytes]]:
    key = PrivateKey.generate(suite)
    return key, key.public.seal_many([bytes(2 * SEED_SIZE)] * count, [_INFO] * count)


CORES = os.cpu_count() or 1
# The least duration of one measurement, in seconds.
SECONDS = 1.5
# The share of a query's time that each lasts, before and after it together.
SHARE = 1 / 20


# By their names in the results.
YARDSTICKS: Mapping[str, Callable[[Workload, Suite, float], PlaintextCost]] = {
    "bare open": bare_open,
    "trusted server": trusted_server,
    "batch open": batch_open,
    "batch server": batch_server,
}


class Yardstick:
    """A process per core that opens and nothing else."""

    def __init__(self, workload: Workload, suite: Suite) -> None:
        self._work = (workload, suite)
        self._pool = WorkerPool(CORES)

    def measure(self, seconds: float = 0.0) -> dict[str, PlaintextCost]:
        """Measure on all cores at the same time, each yardstick for so many seconds or a little while."""
        costs = {}
        for name, work in YARDSTICKS.items():
            running = [self._pool.submit(work, *self._work, max(SECONDS, seconds)) for _ in range(CORES)]
            costs[name] = PlaintextCost.mean([each.result() for each in running])
        return costs

    def __enter__(self) -> Self:
        self.measure()  # starts the processes, and seals what they open
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()


NAIVE_REPORTS = 150
NAIVE_RUNS = 3
NAIVE_SECONDS = 120.0
_ROOT = Path(__file__).resolve().parents[2]
_SKIP = "Skip it with --without naive."


def measure_naive(buckets: int) -> PlaintextCost:
    """Return the median of a few runs with fewer reports than ours, which favours a program that slows as they grow."""
    fewer = max(10, NAIVE_REPORTS * 128 // max(buckets, 128))
    command = [sys.executable, "-m", "benchmarks.throughput.naive_mpyc", f"-M{PARTIES}"]
    sizes = {"NAIVE_REPORTS": str(fewer), "NAIVE_BUCKETS": str(buckets)}
    runs = [_run(command, sizes, NAIVE_SECONDS, "the naive MPyC program") for _ in range(NAIVE_RUNS)]
    wall = statistics.median(run["seconds"] for run in runs) / fewer
    # All parties do the same, and one says what it used.
    cpu = statistics.median(PARTIES * run["cpu_seconds"] for run in runs) / fewer
    return PlaintextCost(wall, cpu)


def _run(command: Sequence[str], sizes: Mapping[str, str], seconds: float, name: str) -> dict[str, float]:
    """Run a program and return the JSON of its last line. Its whole process group ends with it."""
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
            raise TrefoilError(f"{name} failed: {' '.join(last)}", _SKIP, kind=ErrorKind.UNAVAILABLE)
        result = json.loads(printed.strip().splitlines()[-1])
        return {key: float(result[key]) for key in ("seconds", "cpu_seconds")}
    except subprocess.TimeoutExpired:
        raise TrefoilError(f"{name} did not finish within {seconds:g} s", _SKIP, kind=ErrorKind.TIMEOUT) from None
    except (ValueError, KeyError, IndexError):
        raise TrefoilError(f"{name} did not print its result", _SKIP, kind=ErrorKind.MALFORMED) from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGKILL)
        program.communicate()

"""What aggregation costs without any of this: baselines on the same workload, in the same run.

(a) the plain sum of the histograms; (b) a trusted server that opens one sealed histogram per report and adds it, as a
service in an enclave does; (c) the bare HPKE open alone, the least that any helper must do for a report.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from benchmarks.bulk_reports import Histograms, Workload
from protocol.field import SEED_SIZE
from protocol.hpke import PrivateKey, Suite

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
        """Of the same work, measured several times or on several cores."""
        count = len(costs)
        return cls(sum(cost.seconds for cost in costs) / count, sum(cost.cpu_seconds for cost in costs) / count)


def measure(work: Callable[[], object], reports: int, *, rounds: int = 5) -> PlaintextCost:
    """The cost of `work`, per report: the best of some rounds, since a shared machine only ever adds to it."""
    best = PlaintextCost(float("inf"), float("inf"))
    for _ in range(rounds):
        wall, cpu = time.perf_counter(), time.process_time()
        work()
        spent = PlaintextCost((time.perf_counter() - wall) / reports, (time.process_time() - cpu) / reports)
        best = PlaintextCost(min(best.seconds, spent.seconds), min(best.cpu_seconds, spent.cpu_seconds))
    return best


def sustain(work: Callable[[], object], reports: int, seconds: float) -> PlaintextCost:
    """The cost of `work`, per report, on average over seconds: to compare with a long run that cannot pick its moments.

    Two cores that share one do much less when both are busy, so all must be busy nearly all of the time.
    """
    wall, cpu, done = time.perf_counter(), time.process_time(), 0
    while not done or time.perf_counter() - wall < seconds:
        work()
        done += reports
    return PlaintextCost((time.perf_counter() - wall) / done, (time.process_time() - cpu) / done)


def plain_sum(workload: Workload) -> PlaintextCost:
    """(a) numpy's sum of the histograms, all in memory."""
    matrix = sample_of(workload)

    def work() -> None:
        matrix.sum(axis=0)

    return measure(work, len(matrix), rounds=9)


def sample_of(workload: Workload) -> Histograms:
    """The first histograms of the workload, as many as are summed in a moment."""
    sample = min(workload.count, SAMPLE * 4)
    spans = [span for span in workload.chunks() if span.stop <= sample] or [range(workload.count)]
    return np.concatenate([workload.histograms(span) for span in spans])


def trusted_server(workload: Workload, suite: Suite, seconds: float) -> PlaintextCost:
    """(b) One HPKE ciphertext per report, holding the histogram itself; opened and added by one party."""
    key, sealed = _sealed_rows(workload, suite)

    def work() -> None:
        total = np.zeros(workload.terms.length, dtype=np.int64)
        for ciphertext in sealed:
            total += np.frombuffer(key.open(ciphertext, _INFO), dtype=np.int64)

    return sustain(work, len(sealed), seconds)


def bare_open(workload: Workload, suite: Suite, seconds: float) -> PlaintextCost:
    """(c) Opening a payload of two seeds, and nothing else."""
    key, sealed = _sealed_seeds(min(workload.count, SAMPLE), suite)

    def work() -> None:
        for ciphertext in sealed:
            key.open(ciphertext, _INFO)

    return sustain(work, len(sealed), seconds)


# Sealed once in a process, however often they are opened.


@lru_cache(maxsize=2)
def _sealed_rows(workload: Workload, suite: Suite) -> tuple[PrivateKey, list[bytes]]:
    key = PrivateKey.generate(suite)
    return key, [key.public.seal(row.tobytes(), _INFO) for row in _sample_rows(workload)]


@lru_cache(maxsize=2)
def _sealed_seeds(count: int, suite: Suite) -> tuple[PrivateKey, list[bytes]]:
    key = PrivateKey.generate(suite)
    return key, [key.public.seal(bytes(2 * SEED_SIZE), _INFO) for _ in range(count)]


def _sample_rows(workload: Workload) -> list[np.ndarray[tuple[int], np.dtype[np.int64]]]:
    rows: list[np.ndarray[tuple[int], np.dtype[np.int64]]] = []
    for span in workload.chunks():
        rows.extend(workload.histograms(span))
        if len(rows) >= SAMPLE:
            break
    return rows[:SAMPLE]

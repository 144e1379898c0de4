"""Bare opens and a trusted server with every core busy: what a helper's open competes with.

Run right before and right after each query. Cores that share a cache and a host do less together than one alone, and
differ from minute to minute.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from benchmarks.bench.plaintext import PlaintextCost, bare_open, trusted_server
from benchmarks.bulk_reports import Workload
from benchmarks.worker_pool import WorkerPool
from protocol.hpke import Suite

CORES = os.cpu_count() or 1
# How long each is run at a time.
SECONDS = 1.5


@dataclass(frozen=True, slots=True)
class Opens:
    """Per report and core."""

    bare: PlaintextCost
    trusted: PlaintextCost

    def mean(self, other: Opens) -> Opens:
        """Of a measurement before and one after."""
        return Opens(PlaintextCost.mean([self.bare, other.bare]), PlaintextCost.mean([self.trusted, other.trusted]))


class Yardstick:
    """A process per core that opens and nothing else."""

    def __init__(self, workload: Workload, suite: Suite) -> None:
        self._work = (workload, suite, SECONDS)
        self._pool = WorkerPool(CORES)

    def measure(self) -> Opens:
        """On all cores at the same time."""
        return Opens(self._on_all_cores(bare_open), self._on_all_cores(trusted_server))

    def _on_all_cores(self, work: Callable[[Workload, Suite, float], PlaintextCost]) -> PlaintextCost:
        running = [self._pool.submit(work, *self._work) for _ in range(CORES)]
        return PlaintextCost.mean([each.result() for each in running])

    def __enter__(self) -> Self:
        self.measure()  # starts the processes, and seals what they open
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

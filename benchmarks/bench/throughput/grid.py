"""What is to be measured, and what that takes: a cell for each size and kind of report, its time and its disk."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from pathlib import Path

from benchmarks.bench.report_cost import BENCH_TIME, Helpers
from benchmarks.bulk_reports import MAX_VALUE, Workload
from protocol.errors import TrefoilError
from protocol.header import ReportTerms, coarse_time
from protocol.hpke import CLASSICAL, Suite
from protocol.shape import MAX_BUCKETS
from protocol.shares import PARTIES

SITE = "shop.example"
EPSILON_MICROS = 1_000_000
# A larger batch would take hours to seal here, and helpers take no more in one query.
MAX_REPORTS = 10_000_000
MAX_REPEAT = 100
# Rough costs beside that of sealing one report, by which an estimate is made: see `Grid.seconds`.
_QUERY_PER_SEAL = 0.7
_START_SECONDS = 8.0
_YARDSTICK_SECONDS = 6.0
_INGEST_SECONDS = 8.0
_NAIVE_SECONDS = 30.0
_SPU_SECONDS = 25.0
_SEALS = 20
# Digests beside columns, and an entry of the ledger, at each helper.
_BESIDE_BYTES = 32 + 64


class Extra(Enum):
    """What can be left out of a run."""

    NAIVE = "naive"
    SPU = "spu"
    INGEST = "ingest"


@dataclass(frozen=True, slots=True)
class Cell:
    """One size and kind of report."""

    reports: int
    buckets: int
    checked: bool = True
    suite: Suite = CLASSICAL

    def __post_init__(self) -> None:
        if not (0 < self.reports <= MAX_REPORTS):
            raise TrefoilError(f"report counts are 1 to {MAX_REPORTS}", "Give them as --reports 20000.")
        if not (0 < self.buckets <= MAX_BUCKETS):
            raise TrefoilError(f"a histogram has 1 to {MAX_BUCKETS} buckets", "Give them as --buckets 128.")

    @property
    def name(self) -> str:
        """For progress."""
        kind = "" if self.checked else ", unchecked"
        return f"{self.reports:,} reports, {self.buckets:,} buckets{kind}"

    def terms(self, site: str, now: int) -> ReportTerms:
        """What the devices of this cell promise."""
        cap, spread = (MAX_VALUE, 1) if self.checked else (0, 0)
        return ReportTerms(
            site,
            site,
            coarse_time(now),
            EPSILON_MICROS,
            2 * MAX_VALUE,
            self.buckets,
            unit="purchases",
            cap=cap,
            spread=spread,
        )

    def workload(self, seed: int, now: int, site: str) -> Workload:
        """What the reports of one run hold."""
        return Workload(self.terms(site, now), self.reports, seed)

    def report_bytes(self) -> int:
        """Of one sealed report, for all three helpers."""
        return len(Helpers.fresh(self.suite).seal(self.terms(SITE, BENCH_TIME)).encode())


@dataclass(frozen=True, slots=True)
class Grid:
    """Everything that one call of the command measures."""

    cells: tuple[Cell, ...]
    seed: int = 1
    repeat: int = 1
    without: frozenset[Extra] = frozenset()
    spu_python: Path | None = None
    # Whether to look at the helpers once more, as soon as they have the batch.
    profile: bool = False

    def __post_init__(self) -> None:
        if not (1 <= self.repeat <= MAX_REPEAT):
            raise TrefoilError(f"a point is repeated 1 to {MAX_REPEAT} times, not {self.repeat}")
        if self.spu_python is not None and not self.spu_python.exists():
            raise TrefoilError(f"there is no Python at {self.spu_python}", "Give --spu-python the program's path.")

    def wants(self, extra: Extra) -> bool:
        """Whether it is to be measured; SPU only where somebody has it."""
        if extra is Extra.SPU and self.spu_python is None:
            return False
        return extra not in self.without

    def seconds(self) -> float:
        """About how long all of it takes on this machine, by the time it takes to seal a report now."""
        return sum(sum(self.parts(cell).values()) for cell in self.cells)

    def parts(self, cell: Cell) -> dict[str, float]:
        """The same for one cell, by what is done."""
        seal = _seal_seconds(cell) * cell.reports * self.repeat / (os.cpu_count() or 1)
        return {
            "start": _START_SECONDS,
            "seal": seal,
            "yardstick": 2 * self.repeat * _YARDSTICK_SECONDS,
            "ask": _QUERY_PER_SEAL * seal,
            "ingest": _INGEST_SECONDS if self.wants(Extra.INGEST) else 0.0,
            "naive": _NAIVE_SECONDS if self.wants(Extra.NAIVE) else 0.0,
            "spu": _SPU_SECONDS if self.wants(Extra.SPU) else 0.0,
        }

    def disk_bytes(self) -> int:
        """The most that lies on disk at one time: a batch, what the helpers store of it, and their ledgers."""
        return max(
            cell.reports * (2 * cell.report_bytes() + PARTIES * _BESIDE_BYTES * self.repeat) for cell in self.cells
        )

    def check_disk(self) -> None:
        """Refuse before the work what has no room."""
        needed, free = self.disk_bytes(), shutil.disk_usage(tempfile.gettempdir()).free
        if needed > free:
            raise TrefoilError(
                f"this takes about {needed / 1e9:.1f} GB in {tempfile.gettempdir()}, and {free / 1e9:.1f} GB are free",
                "Ask for fewer reports, or set TMPDIR to a larger disk.",
            )


def cells_of(reports: Sequence[int], buckets: Sequence[int], suite: Suite, *, unchecked: bool) -> tuple[Cell, ...]:
    """Every combination, the small ones first; unchecked reports beside checked ones where they are asked for."""
    kinds = (True, False) if unchecked else (True,)
    return tuple(
        Cell(count, width, checked, suite)
        for width in sorted(set(buckets))
        for count in sorted(set(reports))
        for checked in kinds
    )


@lru_cache(maxsize=64)
def _seal_seconds(cell: Cell) -> float:
    """Of one report of this kind on one core. Measured once, so that a bar ends where it was said to end."""
    helpers, terms = Helpers.fresh(cell.suite), cell.terms(SITE, BENCH_TIME)
    helpers.seal(terms)
    start = time.perf_counter()
    for _ in range(_SEALS):
        helpers.seal(terms)
    return (time.perf_counter() - start) / _SEALS

"""What is to be measured, and what that takes: a cell for each size and kind of report, its time and its disk."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache

from benchmarks.costs.report_cost import BENCH_TIME, Helpers
from benchmarks.workloads.reports import Workload, purchase_terms
from protocol.errors import ErrorKind, TrefoilError
from protocol.hpke import CLASSICAL, Suite
from protocol.report import seal_reports
from protocol.shape import MAX_BUCKETS
from protocol.shares import PARTIES

SITE = "shop.example"
# A larger batch would take hours to seal here, and helpers take no more in one query.
MAX_REPORTS = 10_000_000
MAX_REPEAT = 100
# Rough costs beside that of sealing one report, by which an estimate is made: see `Grid.seconds`.
_QUERY_PER_SEAL = 0.7
_START_SECONDS = 8.0
_YARDSTICK_SECONDS = 16.0
# Four of them, each half of a twentieth of the query before it and a twentieth after it.
_YARDSTICKS_PER_QUERY = 4 * 1.5 / 20
_INGEST_SECONDS = 8.0
_NAIVE_SECONDS = 30.0
_SEALS = 20
# Digests beside columns, and an entry of the ledger, at each helper.
_BESIDE_BYTES = 32 + 64


class Extra(StrEnum):
    """Baselines that a run can skip."""

    NAIVE = "naive"
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
            raise TrefoilError(
                f"--reports is 1 to {MAX_REPORTS}", "Give it as --reports 20000.", kind=ErrorKind.OUT_OF_RANGE
            )
        if not (0 < self.buckets <= MAX_BUCKETS):
            raise TrefoilError(
                f"--buckets is 1 to {MAX_BUCKETS}", "Give it as --buckets 128.", kind=ErrorKind.OUT_OF_RANGE
            )

    @property
    def name(self) -> str:
        kind = "" if self.checked else ", unchecked"
        return f"{self.reports:,} reports, {self.buckets:,} buckets{kind}"

    def workload(self, seed: int, now: int, site: str = SITE) -> Workload:
        terms = purchase_terms(site, self.buckets, now)
        return Workload(terms if self.checked else replace(terms, cap=0, spread=0), self.reports, seed)

    def report_bytes(self) -> int:
        """Return the bytes of one sealed report, for all three helpers."""
        return len(Helpers.fresh(self.suite).seal(self.workload(0, BENCH_TIME).terms).encode())

    @lru_cache(maxsize=64)  # noqa: B019 - cells are few
    def seal_seconds(self) -> float:
        """Estimate the seconds to seal a batch on all cores, by a few reports."""
        helpers, terms = Helpers.fresh(self.suite), self.workload(0, BENCH_TIME).terms
        helpers.seal(terms)
        start = time.perf_counter()
        seal_reports([[0] * terms.length] * _SEALS, terms, helpers.helper_set)
        return (time.perf_counter() - start) / _SEALS * self.reports / (os.cpu_count() or 1)

    def query_seconds(self) -> float:
        """Estimate the seconds of a query over such a batch."""
        return _QUERY_PER_SEAL * self.seal_seconds()


@dataclass(frozen=True, slots=True)
class Grid:
    """Everything that one call of the command measures."""

    cells: tuple[Cell, ...]
    seed: int = 1
    repeat: int = 1
    without: frozenset[Extra] = frozenset()
    # Whether to look at the helpers once more, as soon as they have the batch.
    profile: bool = False

    def __post_init__(self) -> None:
        if not (1 <= self.repeat <= MAX_REPEAT):
            raise TrefoilError(f"--repeat is 1 to {MAX_REPEAT}, not {self.repeat}", kind=ErrorKind.OUT_OF_RANGE)

    def wants(self, extra: Extra) -> bool:
        return extra not in self.without

    def seconds(self) -> float:
        """Estimate the time on this machine from the time to seal a report now."""
        fixed = _START_SECONDS + _INGEST_SECONDS * self.wants(Extra.INGEST) + _NAIVE_SECONDS * self.wants(Extra.NAIVE)
        runs = [
            cell.seal_seconds() + _YARDSTICK_SECONDS + (1 + _YARDSTICKS_PER_QUERY) * cell.query_seconds()
            for cell in self.cells
        ]
        return len(self.cells) * fixed + self.repeat * sum(runs)

    def disk_bytes(self) -> int:
        """Return the peak disk usage: a batch, the helpers' columns, and their ledgers."""
        return max(
            cell.reports * (2 * cell.report_bytes() + PARTIES * _BESIDE_BYTES * self.repeat) for cell in self.cells
        )

    def check_disk(self) -> None:
        """Raise before any work if the disk is too small."""
        needed, free = self.disk_bytes(), shutil.disk_usage(tempfile.gettempdir()).free
        if needed > free:
            raise TrefoilError(
                f"this takes about {needed / 1e9:.1f} GB in {tempfile.gettempdir()}, and {free / 1e9:.1f} GB are free",
                "Choose fewer reports, or set TMPDIR to a larger disk.",
                kind=ErrorKind.NO_SPACE,
            )


def cells_of(reports: Sequence[int], buckets: Sequence[int], suite: Suite, *, unchecked: bool) -> tuple[Cell, ...]:
    """Return every combination, the small ones first; unchecked reports beside checked ones if requested."""
    kinds = (True, False) if unchecked else (True,)
    return tuple(
        Cell(count, width, checked, suite)
        for width in sorted(set(buckets))
        for count in sorted(set(reports))
        for checked in kinds
    )

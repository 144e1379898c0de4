"""All of a run, in order: helpers, sealed batches, yardsticks before and after each query, and the baselines.

From the sealed batch to the checked answer. A shared machine is noisy, so what counts are ratios of one run, and those
by processor time first.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from benchmarks.bench.plaintext import plain_sum, sample_of
from benchmarks.bench.report_cost import BENCH_TIME, Helpers, best_of, measure_openings
from benchmarks.bench.throughput.counters import Counters
from benchmarks.bench.throughput.grid import Cell, Extra, Grid
from benchmarks.bench.throughput.peers import measure_naive, measure_spu
from benchmarks.bench.throughput.point import Baselines, BatchRun, ThroughputPoint
from benchmarks.bench.throughput.stages import ADMIT_PARTS, profile, timeline
from benchmarks.bench.throughput.target import GivenHelpers, Target, now, target_for
from benchmarks.bench.throughput.yardstick import Opens, Yardstick
from benchmarks.bulk_reports import Workload, make_batch
from protocol.batch import BatchReader
from protocol.errors import TrefoilError
from protocol.field import P, sum_rows
from protocol.querier.ask import Querier
from protocol.querier.saved_query import QueryOptions, make_query
from protocol.querier.worth import QueryResult
from protocol.status import QueryStatus

WARM_UP = 64
INGEST_ROUNDS = 20
SUM_ROUNDS = 25
QUERY_SECONDS = 3600

# A part of a cell is done by so much of its estimate, and what is going on.
Say = Callable[[float, str], None]


@dataclass(slots=True)
class ThroughputRun:
    """Everything that was measured."""

    points: list[ThroughputPoint] = field(default_factory=list)

    def to_json(self) -> dict[str, object]:
        """As it goes into benchmarks/results."""
        return {"points": [point.to_json() for point in self.points], "exponents": exponents(self.points)}


class Steps:
    """Says how far a cell is, in seconds of its estimate."""

    def __init__(self, parts: Mapping[str, float], name: str, say: Say) -> None:
        self._left = dict(parts)
        self._name = name
        self._say = say

    def doing(self, what: str) -> None:
        """Nothing is done yet, but this is going on."""
        self._say(0.0, f"{self._name}: {what}")

    def done(self, part: str, share: float = 1.0, what: str = "") -> None:
        """So much of a part."""
        self._say(self._left.get(part, 0.0) * share, f"{self._name}: {what or part}")


def measure_grid(grid: Grid, given: GivenHelpers | None, say: Say) -> ThroughputRun:
    """Every cell, in order."""
    run = ThroughputRun()
    for cell in grid.cells:
        run.points.append(measure_cell(cell, grid, given, Steps(grid.parts(cell), cell.name, say)))
    return run


def measure_cell(cell: Cell, grid: Grid, given: GivenHelpers | None, steps: Steps) -> ThroughputPoint:
    """One cell, in a directory of its own that is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="trefoil-bench-") as name:
        folder = Path(name)
        steps.doing("starting three helpers" if given is None else "asking the helpers for a first answer")
        with target_for(cell, given, folder / "helpers") as target:
            warm = replace(cell, reports=WARM_UP).workload(grid.seed + 1_000_000, now(), target.site)
            _ask(target, _batch(target, folder / "warm-up", warm, lambda _: None))
            steps.done("start")
            workload = cell.workload(grid.seed, now(), target.site)
            baselines = _baselines(cell, workload, grid, steps)
            with Yardstick(workload, cell.suite) as yardstick:
                runs = [
                    _measure_run(cell, grid, number, target, yardstick, folder, steps) for number in range(grid.repeat)
                ]
    return ThroughputPoint(cell, baselines, tuple(runs))


def _baselines(cell: Cell, workload: Workload, grid: Grid, steps: Steps) -> Baselines:
    """What does not need the helpers."""
    steps.doing("plain sum")
    plain, over_plain = plain_sum(workload), _sum_over_plaintext(workload)
    ingest = naive = spu = None
    if grid.wants(Extra.INGEST):
        steps.doing("ingest beside bare opens")
        ingest = _ingest_over_bare_open(cell, workload)
        steps.done("ingest")
    if grid.wants(Extra.NAIVE):
        steps.doing("naive MPyC program")
        naive = measure_naive(cell.buckets)
        steps.done("naive")
    if grid.wants(Extra.SPU) and grid.spu_python is not None:
        steps.doing("SecretFlow SPU")
        spu = measure_spu(grid.spu_python, cell.reports, cell.buckets)
        steps.done("spu")
    return Baselines(plain, over_plain, ingest, naive, spu)


def _measure_run(
    cell: Cell, grid: Grid, number: int, target: Target, yardstick: Yardstick, folder: Path, steps: Steps
) -> BatchRun:
    """One batch: sealed, then asked between two readings of the yardstick. Its file is gone afterwards."""
    workload, path = cell.workload(grid.seed + number, now(), target.site), folder / f"batch-{number}"

    def sealed(count: int) -> None:
        steps.done("seal", count / cell.reports / grid.repeat, "sealing")

    batch = _batch(target, path, workload, sealed)
    steps.doing("yardsticks")
    earlier = yardstick.measure()
    steps.done("yardstick", 0.5 / grid.repeat, "yardsticks")
    watched = Watched(target, grid.profile, lambda share: steps.done("ask", share / grid.repeat, "asking the helpers"))
    asked = watched.ask(batch)
    opens = earlier.mean(yardstick.measure())
    steps.done("yardstick", 0.5 / grid.repeat, "yardsticks")
    size = path.stat().st_size
    path.unlink()
    return _run(cell, workload, asked, opens, size)


@dataclass(frozen=True, slots=True)
class AnsweredBatch:
    """One query, and what the helpers used for it."""

    result: QueryResult
    seconds: float
    statuses: Mapping[int, QueryStatus]
    used: Counters
    received: Counters | None


class Watched:
    """A query that is followed: how far the helpers are, and what they had used when they had the batch."""

    def __init__(self, target: Target, profile: bool, advance: Callable[[float], None]) -> None:
        self._target = target
        self._profile = profile
        self._advance = advance
        self._shown = 0.0
        self._received: Counters | None = None
        self._statuses: dict[int, QueryStatus] = {}

    def ask(self, batch: BatchReader) -> AnsweredBatch:
        """Timed from the signed query to the checked answer."""
        before, start = self._target.counters(), time.perf_counter()
        result = _ask(self._target, batch, self._heard)
        seconds = time.perf_counter() - start
        received = self._received and self._received.since(before)
        used = self._target.counters().since(before)
        self._show(1.0)
        return AnsweredBatch(result, seconds, self._statuses, used, received)

    def _heard(self, statuses: Mapping[int, QueryStatus]) -> None:
        if self._profile and self._received is None:
            self._received = self._target.counters()
        self._statuses.update(statuses)
        if statuses:
            self._show(min(status.done / max(status.total, 1) for status in statuses.values()))

    def _show(self, share: float) -> None:
        if share > self._shown:
            self._advance(share - self._shown)
            self._shown = share


def _batch(target: Target, path: Path, workload: Workload, progress: Callable[[int], None]) -> BatchReader:
    make_batch(path, workload, target.helper_set, progress=progress)
    return BatchReader(path)


def _ask(
    target: Target, batch: BatchReader, heard: Callable[[Mapping[int, QueryStatus]], None] = lambda _: None
) -> QueryResult:
    saved = make_query(batch, QueryOptions(seconds=QUERY_SECONDS), target.helper_set, target.site_key, now())
    return asyncio.run(Querier(target.helper_set).ask(saved, batch, heard))


def _run(cell: Cell, workload: Workload, asked: AnsweredBatch, opens: Opens, batch_bytes: int) -> BatchRun:
    reports, result, used = cell.reports, asked.result, asked.used
    if result.answer.counted != reports:
        raise TrefoilError(f"the helpers counted {result.answer.counted} of {reports} reports", "This is a defect.")
    states = {party: status.seconds for party, status in asked.statuses.items()}
    stages = timeline(asked.seconds, result.seconds["submit"], result.seconds["collect"], states, used)
    names = [f"helper {party + 1}" for party in range(len(used.helpers))]
    truth = workload.truth()[: cell.buckets]
    return BatchRun(
        seconds={"total": asked.seconds, **stages},
        cpu_seconds=_cpu_seconds(names, used),
        profile=None if asked.received is None else profile(used, asked.received),
        opens=opens,
        bytes_per_report={
            "uploaded": result.uploaded_bytes / reports,
            "between helpers": used.peer_bytes / reports,
        },
        disk_bytes={
            "batch": batch_bytes,
            **{f"{name}'s ledger": helper.ledger_bytes for name, helper in zip(names, used.helpers, strict=True)},
            **{f"{name}'s log": helper.log_bytes for name, helper in zip(names, used.helpers, strict=True)},
        },
        peak_rss_mb={name: sum(helper.peaks_mb.values()) for name, helper in zip(names, used.helpers, strict=True)},
        peak_rss_mb_by_process={name: helper.peaks_mb for name, helper in zip(names, used.helpers, strict=True)},
        largest_error=max(abs(said - true) for said, true in zip(result.answer.histogram, truth, strict=True)),
        noise_sd=result.noise_sd,
    )


def _cpu_seconds(names: Sequence[str], used: Counters) -> dict[str, float] | None:
    """Of all three, of each, and of the parts of admitting; None where a helper does not say."""
    if used.cpu_seconds is None:
        return None
    return {
        "total": used.cpu_seconds,
        **{name: helper.cpu_seconds or 0.0 for name, helper in zip(names, used.helpers, strict=True)},
        **{part: sum(helper.admit.get(part, 0.0) for helper in used.helpers) for part in ADMIT_PARTS},
    }


def _ingest_over_bare_open(cell: Cell, workload: Workload) -> float:
    """A helper's ingest over the bare HPKE open of the same payloads, in processor time, at the slowest helper."""
    terms = replace(workload.terms, time=BENCH_TIME)
    openings = measure_openings(Helpers.fresh(cell.suite), terms, INGEST_ROUNDS)
    return max(whole / bare for bare, whole in openings)


def _sum_over_plaintext(workload: Workload) -> float:
    """The summing stage alone over the plain sum, taking turns: field elements as they come out of the expansion."""
    plain = sample_of(workload)
    words = np.arange(plain.size, dtype=np.uint64).reshape(plain.shape) * np.uint64(0x9E3779B97F4A7C15)
    shares = words % np.uint64(P)
    in_the_clear, shared = best_of([lambda: plain.sum(axis=0), lambda: sum_rows(shares)], SUM_ROUNDS)
    return shared / in_the_clear


def exponents(points: Sequence[ThroughputPoint]) -> dict[str, float]:
    """Slopes of log cost over log size: what grows linearly has 1. What a query costs whatever its size is left out."""
    checked = [point for point in points if point.cell.checked]
    found = {}
    for buckets in sorted({point.cell.buckets for point in checked}):
        column = [(point.cell.reports, _admit_opens(point)) for point in checked if point.cell.buckets == buckets]
        if len(column) > 1:
            found[f"admit cpu over reports at {buckets} buckets"] = _slope(column)
    for reports in sorted({point.cell.reports for point in checked}):
        row = [
            (point.cell.buckets, point.middle.bytes_per_report["uploaded"])
            for point in checked
            if point.cell.reports == reports
        ]
        if len(row) > 1:
            # Headers and payloads do not grow with buckets; what does is compared with the least that is left.
            fixed = min(size for _, size in row) - 2 * 8 * min(buckets for buckets, _ in row)
            found[f"bytes over buckets at {reports} reports"] = _slope([(m, size - fixed) for m, size in row])
    return found


def _admit_opens(point: ThroughputPoint) -> float:
    """Admitting, in bare opens: seconds of two points are of different minutes."""
    run = point.middle
    return sum((run.cpu_seconds or {}).get(part, 0.0) for part in ADMIT_PARTS) / run.opens.bare.cpu_seconds


def _slope(pairs: Sequence[tuple[float, float]]) -> float:
    known = [pair for pair in pairs if pair[1] > 0]
    if len(known) < 2:
        return float("nan")
    x, y = np.log(np.array(known, dtype=np.float64)).T
    return float(np.polyfit(x, y, 1)[0])

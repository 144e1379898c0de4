"""Run a throughput measurement in order: helpers, sealed batches, yardsticks around each query, and the baselines.

The helpers are three processes started here, or three that exist on any hosts. A query is timed from the sealed batch
to the verified answer. A shared machine is noisy, so ratios of one run count, those of processor time first.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from benchmarks.costs.report_cost import BENCH_TIME, Helpers, best_of, measure_openings
from benchmarks.throughput.baselines import SHARE, Opens, Yardstick, measure_naive, plain_sum, sample_of
from benchmarks.throughput.grid import SITE, Cell, Extra, Grid
from benchmarks.throughput.point import ADMIT_PARTS, Baselines, BatchRun, Counters, ThroughputPoint, profile, timeline
from benchmarks.workloads.reports import Workload, make_batch
from mpc_helpers.local.launcher import health, launched_helpers
from protocol.batch import BatchReader
from protocol.errors import ErrorKind, TrefoilError
from protocol.field import P, sum_rows
from protocol.helper_set import HelperSet
from protocol.hpke import Suite
from protocol.keys import IdentityKey, load_identity
from protocol.querier.ask import Querier
from protocol.querier.result import QueryResult
from protocol.querier.saved_query import QueryOptions, make_query
from protocol.status import QueryStatus


@dataclass(frozen=True, slots=True)
class Target:
    """Three helpers that run, and the site that may ask them."""

    helper_set: HelperSet
    site_key: IdentityKey = field(repr=False)
    site: str = SITE
    # Of helpers that this program started: no helper exports what its workers use.
    process_ids: tuple[int, ...] = ()

    def counters(self) -> Counters:
        """Return what each helper has used so far."""
        return Counters.read(self.helper_set, self.process_ids)


@dataclass(frozen=True, slots=True)
class GivenHelpers:
    """Helpers that exist. Each batch spends only reports that the benchmark made itself."""

    target: Target

    @classmethod
    def load(cls, helpers: Path, site_key: Path, site: str) -> GivenHelpers:
        """Load the helper set and the key; raise before any work if a helper does not respond."""
        helper_set = HelperSet.load(helpers)
        silent = [helper.name for helper in helper_set.helpers if not health(helper, 5.0)]
        if silent:
            raise TrefoilError(
                f"{' and '.join(silent)} did not respond",
                f"Are the helpers of {helpers} running?",
                kind=ErrorKind.UNREACHABLE,
            )
        return cls(Target(helper_set, load_identity(site_key), site))

    @property
    def suite(self) -> Suite:
        """Return the suite that devices would seal in now."""
        return self.target.helper_set.sealing_keys(now())[0].suite


@contextlib.contextmanager
def target_for(cell: Cell, given: GivenHelpers | None, folder: Path) -> Iterator[Target]:
    """Yield the given helpers, or start three for this cell and remove them afterwards."""
    if given is not None:
        yield given.target
        return
    options = {"unchecked_histograms": not cell.checked}
    with launched_helpers(folder, now=now(), sites={SITE: [SITE]}, options=options, suite=cell.suite) as helpers:
        process_ids = tuple(each.process.pid for each in helpers.helpers if each.process is not None)
        yield Target(helpers.helper_set, helpers.site_key(SITE), process_ids=process_ids)


def now() -> int:
    """Return the wall clock, in seconds since 1970."""
    return int(time.time())  # noqa: TID251 - an edge: the benchmark runs now


WARM_UP = 64
INGEST_ROUNDS = 20
SUM_ROUNDS = 25
QUERY_SECONDS = 3600

# Reports progress: seconds of the estimate that are done, and the current activity.
Say = Callable[[float, str], None]


@dataclass(slots=True)
class ThroughputRun:
    """Everything that was measured."""

    points: list[ThroughputPoint] = field(default_factory=list)

    def to_json(self) -> dict[str, object]:
        return {"points": [point.to_json() for point in self.points], "exponents": exponents(self.points)}


class Steps:
    """Says how far a cell is, in seconds of its estimate."""

    def __init__(self, parts: Mapping[str, float], name: str, say: Say) -> None:
        self._left = dict(parts)
        self._name = name
        self._say = say

    def doing(self, what: str) -> None:
        """Report the current activity, without progress."""
        self._say(0.0, f"{self._name}: {what}")

    def done(self, part: str, share: float = 1.0, what: str = "") -> None:
        """Report `share` of a part as done."""
        self._say(self._left.get(part, 0.0) * share, f"{self._name}: {what or part}")


def measure_grid(grid: Grid, given: GivenHelpers | None, say: Say) -> ThroughputRun:
    """Measure every cell, in order."""
    run = ThroughputRun()
    for cell in grid.cells:
        run.points.append(measure_cell(cell, grid, given, Steps(grid.parts(cell), cell.name, say)))
    return run


def measure_cell(cell: Cell, grid: Grid, given: GivenHelpers | None, steps: Steps) -> ThroughputPoint:
    """Measure one cell, in a directory of its own that is deleted afterwards."""
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
    """Measure the baselines that need no helpers."""
    steps.doing("plain sum")
    plain, over_plain = plain_sum(workload), _sum_over_plaintext(workload)
    ingest = naive = None
    if grid.wants(Extra.INGEST):
        steps.doing("ingest beside bare opens")
        ingest = _ingest_over_bare_open(cell, workload)
        steps.done("ingest")
    if grid.wants(Extra.NAIVE):
        steps.doing("naive MPyC program")
        naive = measure_naive(cell.buckets)
        steps.done("naive")
    return Baselines(plain, over_plain, ingest, naive)


def _measure_run(
    cell: Cell, grid: Grid, number: int, target: Target, yardstick: Yardstick, folder: Path, steps: Steps
) -> BatchRun:
    """Seal one batch and query it between two yardstick readings. Its file is removed afterwards."""
    workload, path = cell.workload(grid.seed + number, now(), target.site), folder / f"batch-{number}"

    def sealed(count: int) -> None:
        steps.done("seal", count / cell.reports / grid.repeat, "sealing")

    batch = _batch(target, path, workload, sealed)
    steps.doing("yardsticks")
    earlier = yardstick.measure(SHARE / 2 * grid.parts(cell)["ask"] / grid.repeat)
    steps.done("yardstick", 0.5 / grid.repeat, "yardsticks")
    watched = Watched(target, grid.profile, lambda share: steps.done("ask", share / grid.repeat, "asking the helpers"))
    answered = watched.ask(batch)
    # As long as a twentieth of the query, whatever the estimate was.
    opens = earlier.mean(yardstick.measure(SHARE * answered.seconds))
    steps.done("yardstick", 0.5 / grid.repeat, "yardsticks")
    size = path.stat().st_size
    path.unlink()
    return _run(cell, workload, answered, opens, size)


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
        """Ask the query, timed from signing to the verified answer."""
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


def _run(cell: Cell, workload: Workload, answered: AnsweredBatch, opens: Opens, batch_bytes: int) -> BatchRun:
    reports, result, used = cell.reports, answered.result, answered.used
    if result.answer.counted != reports:
        raise TrefoilError(
            f"the helpers counted {result.answer.counted} of {reports} reports",
            "This is a defect.",
            kind=ErrorKind.INCONSISTENT,
        )
    states = {party: status.seconds for party, status in answered.statuses.items()}
    stages = timeline(answered.seconds, result.seconds["submit"], result.seconds["collect"], states, used)
    names = [f"helper {party + 1}" for party in range(len(used.helpers))]
    truth = workload.truth()[: cell.buckets]
    return BatchRun(
        seconds={"total": answered.seconds, **stages},
        cpu_seconds=_cpu_seconds(names, used),
        profile=None if answered.received is None else profile(used, answered.received),
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
        open_lanes=used.open_lanes,
    )


def _cpu_seconds(names: Sequence[str], used: Counters) -> dict[str, float] | None:
    """Return processor seconds in total, by helper and by part of admission; None if a helper does not report them."""
    if used.cpu_seconds is None:
        return None
    return {
        "total": used.cpu_seconds,
        **{name: helper.cpu_seconds or 0.0 for name, helper in zip(names, used.helpers, strict=True)},
        **{part: sum(helper.admit.get(part, 0.0) for helper in used.helpers) for part in ADMIT_PARTS},
    }


def _ingest_over_bare_open(cell: Cell, workload: Workload) -> float:
    """Return the processor time of ingest over that of the bare HPKE opens of its payloads, at the slowest helper."""
    terms = replace(workload.terms, time=BENCH_TIME)
    openings = measure_openings(Helpers.fresh(cell.suite), terms, INGEST_ROUNDS)
    return max(whole / bare for bare, whole in openings)


def _sum_over_plaintext(workload: Workload) -> float:
    """Return the time of the summing stage, on field elements as expanded, over that of the plain sum, alternating."""
    plain = sample_of(workload)
    words = np.arange(plain.size, dtype=np.uint64).reshape(plain.shape) * np.uint64(0x9E3779B97F4A7C15)
    shares = words % np.uint64(P)
    in_the_clear, shared = best_of([lambda: plain.sum(axis=0), lambda: sum_rows(shares)], SUM_ROUNDS)
    return shared / in_the_clear


def exponents(points: Sequence[ThroughputPoint]) -> dict[str, float]:
    """Return slopes of log cost over log size: linear growth has 1. Fixed costs of a query are excluded."""
    checked = [point for point in points if point.cell.checked]
    slopes = {}
    for buckets in sorted({point.cell.buckets for point in checked}):
        column = [(point.cell.reports, _admit_opens(point)) for point in checked if point.cell.buckets == buckets]
        if len(column) > 1:
            slopes[f"admit cpu over reports at {buckets} buckets"] = _slope(column)
    for reports in sorted({point.cell.reports for point in checked}):
        row = [
            (point.cell.buckets, point.middle.bytes_per_report["uploaded"])
            for point in checked
            if point.cell.reports == reports
        ]
        if len(row) > 1:
            # Headers and payloads do not grow with buckets; what does is compared with the least that is left.
            fixed = min(size for _, size in row) - 2 * 8 * min(buckets for buckets, _ in row)
            slopes[f"bytes over buckets at {reports} reports"] = _slope([(m, size - fixed) for m, size in row])
    return slopes


def _admit_opens(point: ThroughputPoint) -> float:
    """Return the cost of admission in bare opens, since seconds of two points are not comparable."""
    run = point.middle
    return sum((run.cpu_seconds or {}).get(part, 0.0) for part in ADMIT_PARTS) / run.opens.bare.cpu_seconds


def _slope(pairs: Sequence[tuple[float, float]]) -> float:
    positive = [pair for pair in pairs if pair[1] > 0]
    if len(positive) < 2:
        return float("nan")
    x, y = np.log(np.array(positive, dtype=np.float64)).T
    return float(np.polyfit(x, y, 1)[0])

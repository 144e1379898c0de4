"""Run a throughput measurement in order: helpers, sealed batches, yardsticks around each query, and the baselines.

The helpers are three processes started here, or three that exist on any hosts. A query is timed from the sealed batch
to the verified answer. A shared machine is noisy, so ratios of one run count, those of processor time first.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from benchmarks.costs.report_cost import BENCH_TIME, Helpers, best_of, measure_openings
from benchmarks.results.columns import Record
from benchmarks.throughput.baselines import (
    SHARE,
    PlaintextCost,
    Yardstick,
    measure_naive,
    plain_sum,
    sample_of,
)
from benchmarks.throughput.grid import SITE, Cell, Extra, Grid
from benchmarks.throughput.point import (
    ADMIT_PARTS,
    Baselines,
    BatchRun,
    Counters,
    HelperCounters,
    profile,
    record_of,
    timeline,
)
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

    @classmethod
    def load(cls, helpers: Path, site_key: Path, site: str) -> Target:
        """Load helpers that exist; raise before any work if one does not respond. Only reports of ours are spent."""
        helper_set = HelperSet.load(helpers)
        silent = [helper.name for helper in helper_set.helpers if not health(helper, 5.0)]
        if silent:
            raise TrefoilError(
                f"{' and '.join(silent)} did not respond",
                f"Are the helpers of {helpers} running?",
                kind=ErrorKind.UNREACHABLE,
            )
        return cls(helper_set, load_identity(site_key), site)

    @property
    def suite(self) -> Suite:
        """Return the suite that devices would seal in now."""
        return self.helper_set.sealing_keys(now())[0].suite

    def counters(self) -> Counters:
        return Counters.read(self.helper_set, self.process_ids)


@contextlib.contextmanager
def target_for(cell: Cell, given: Target | None, folder: Path) -> Iterator[Target]:
    """Yield the given helpers, or start three for this cell and remove them afterwards."""
    if given is not None:
        yield given
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

# Reports what is being done.
Say = Callable[[str], None]


def measure_cell(cell: Cell, grid: Grid, given: Target | None, say: Say) -> Record:
    """Measure one cell, in a directory of its own that is deleted afterwards."""
    with tempfile.TemporaryDirectory(prefix="trefoil-bench-") as name:
        folder = Path(name)
        say("starting three helpers" if given is None else "asking the helpers for a first answer")
        with target_for(cell, given, folder / "helpers") as target:
            warm = replace(cell, reports=WARM_UP).workload(grid.seed + 1_000_000, now(), target.site)
            _ask(target, _batch(target, folder / "warm-up", warm))
            workload = cell.workload(grid.seed, now(), target.site)
            say("baselines")
            baselines = Baselines(
                plain_sum(workload),
                _sum_over_plaintext(workload),
                _ingest_over_bare_open(cell, workload) if grid.wants(Extra.INGEST) else None,
                measure_naive(cell.buckets) if grid.wants(Extra.NAIVE) else None,
            )
            with Yardstick(workload, cell.suite) as yardstick:
                runs = [
                    _measure_run(cell, grid, number, target, yardstick, folder, say) for number in range(grid.repeat)
                ]
    return record_of(cell, baselines, runs)


def _measure_run(
    cell: Cell, grid: Grid, number: int, target: Target, yardstick: Yardstick, folder: Path, say: Say
) -> BatchRun:
    """Seal one batch and query it between two yardstick readings. Its file is removed afterwards."""
    workload, path = cell.workload(grid.seed + number, now(), target.site), folder / f"batch-{number}"
    say("sealing")
    batch = _batch(target, path, workload)
    say("yardsticks")
    earlier = yardstick.measure(SHARE / 2 * cell.query_seconds())
    say("asking the helpers")
    answered = _ask_counted(target, batch, grid.profile)
    say("yardsticks")
    # As long as a twentieth of the query, whatever the estimate was.
    later = yardstick.measure(SHARE * answered.seconds)
    yardsticks = {name: PlaintextCost.mean([cost, later[name]]) for name, cost in earlier.items()}
    size = path.stat().st_size
    path.unlink()
    return _run(cell, workload, answered, yardsticks, size)


@dataclass(frozen=True, slots=True)
class AnsweredBatch:
    """One query, and what the helpers used for it; with a profile, also what they had used when they had the batch."""

    result: QueryResult
    seconds: float
    statuses: Mapping[int, QueryStatus]
    used: Counters
    received: Counters | None


def _ask_counted(target: Target, batch: BatchReader, profile: bool) -> AnsweredBatch:
    """Ask one query, timed from signing to the verified answer."""
    received: list[Counters] = []
    statuses: dict[int, QueryStatus] = {}

    def heard(latest: Mapping[int, QueryStatus]) -> None:
        if profile and not received:
            received.append(target.counters())
        statuses.update(latest)

    before, start = target.counters(), time.perf_counter()
    result = _ask(target, batch, heard)
    seconds = time.perf_counter() - start
    used = target.counters().since(before)
    return AnsweredBatch(result, seconds, statuses, used, received[0].since(before) if received else None)


def _batch(target: Target, path: Path, workload: Workload) -> BatchReader:
    make_batch(path, workload, target.helper_set, progress=lambda _: None)
    return BatchReader(path)


def _ask(
    target: Target, batch: BatchReader, heard: Callable[[Mapping[int, QueryStatus]], None] = lambda _: None
) -> QueryResult:
    saved = make_query(batch, QueryOptions(seconds=QUERY_SECONDS), target.helper_set, target.site_key, now())
    return asyncio.run(Querier(target.helper_set).ask(saved, batch, heard))


def _run(
    cell: Cell, workload: Workload, answered: AnsweredBatch, yardsticks: Mapping[str, PlaintextCost], batch_bytes: int
) -> BatchRun:
    reports, result, used = cell.reports, answered.result, answered.used
    if result.answer.counted != reports:
        raise TrefoilError(
            f"the helpers counted {result.answer.counted} of {reports} reports",
            "This is a defect.",
            kind=ErrorKind.INCONSISTENT,
        )
    states = {party: status.seconds for party, status in answered.statuses.items()}
    stages = timeline(answered.seconds, result.seconds["submit"], result.seconds["collect"], states, used)
    helpers = {f"helper {number}": helper for number, helper in enumerate(used.helpers, 1)}
    truth = workload.truth()[: cell.buckets]
    return BatchRun(
        yardsticks=yardsticks,
        seconds={"total": answered.seconds, **stages},
        cpu_seconds=_cpu_seconds(helpers, used),
        profile=None if answered.received is None else profile(used, answered.received),
        bytes_per_report={
            "uploaded": result.uploaded_bytes / reports,
            "between helpers": used.peer_bytes / reports,
        },
        disk_bytes={
            "batch": batch_bytes,
            **{f"{name}'s ledger": helper.one("ledger_bytes") for name, helper in helpers.items()},
            **{f"{name}'s log": helper.one("ledger_log_bytes") for name, helper in helpers.items()},
        },
        peak_rss_mb={name: sum(helper.peaks_mb.values()) for name, helper in helpers.items()},
        peak_rss_mb_by_process={name: helper.peaks_mb for name, helper in helpers.items()},
        largest_error=max(abs(said - true) for said, true in zip(result.answer.histogram, truth, strict=True)),
        noise_sd=result.noise_sd,
        open_lanes=used.open_lanes,
    )


def _cpu_seconds(helpers: Mapping[str, HelperCounters], used: Counters) -> dict[str, float] | None:
    """Return processor seconds in total, by helper and by part of admission; None if a helper does not report them."""
    if used.cpu_seconds is None:
        return None
    return {
        "total": used.cpu_seconds,
        **{name: helper.cpu_seconds or 0.0 for name, helper in helpers.items()},
        **{part: sum(helper.admit.get(part, 0.0) for helper in used.helpers) for part in ADMIT_PARTS},
    }


def _ingest_over_bare_open(cell: Cell, workload: Workload) -> float:
    """Return the processor time of ingest over that of the bare HPKE opens of its payloads, at the slowest helper."""
    terms = replace(workload.terms, time=BENCH_TIME)
    (openings,) = measure_openings(Helpers.fresh(cell.suite), [terms], INGEST_ROUNDS)
    return max(whole / bare for bare, whole in openings)


def _sum_over_plaintext(workload: Workload) -> float:
    """Return the time of the summing stage, on field elements as expanded, over that of the plain sum, alternating."""
    plain = sample_of(workload)
    words = np.arange(plain.size, dtype=np.uint64).reshape(plain.shape) * np.uint64(0x9E3779B97F4A7C15)
    shares = words % np.uint64(P)
    in_the_clear, shared = best_of([lambda: plain.sum(axis=0), lambda: sum_rows(shares)], SUM_ROUNDS)
    return shared / in_the_clear

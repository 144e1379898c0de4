"""What aggregating under MPC costs over aggregating in the clear, and where the time goes: `trefoil bench throughput`.

Three helper processes on localhost, from the sealed batch to the checked answer, beside baselines measured in the same
run on the same workload. A shared machine is noisy, so what counts are the ratios.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Self

import numpy as np
from rich.table import Table

from benchmarks.bench.plaintext import PlaintextCost, bare_open, plain_sum, sample_of, trusted_server
from benchmarks.bench.processes import Usage, usage
from benchmarks.bench.report_cost import BENCH_TIME, Helpers, best_of, measure_openings
from benchmarks.bulk_reports import MAX_VALUE, Workload, make_batch
from mpc_helpers.local.launcher import Launched, fetch, launched_helpers
from protocol.batch import BatchReader
from protocol.errors import TrefoilError
from protocol.field import P, sum_rows
from protocol.keys import load_identity
from protocol.querier.ask import Querier
from protocol.querier.saved_query import QueryOptions, make_query
from protocol.querier.worth import QueryResult
from protocol.report import ReportTerms, coarse_time
from protocol.shares import PARTIES

SITE = "shop.example"
EPSILON_MICROS = 1_000_000
WARM_UP = 64
INGEST_ROUNDS = 20
SUM_ROUNDS = 25
NAIVE_REPORTS = 150
NAIVE_RUNS = 3
NAIVE_SECONDS = 120.0
QUERY_SECONDS = 3600
# What a point says while it is measured.
STEPS = 4
# A batch that big would take hours to seal here; whoever wants it has a cluster.
MAX_REPORTS = 10_000_000

ADMIT_PARTS = ("check", "open", "expand", "sum")
# What a query goes through, in this order.
STAGES = ("transfer", *ADMIT_PARTS, "ledger", "agreement", "noise", "vote", "release")
_ADMIT_PART = re.compile(r'^trefoil_admit_cpu_seconds_total{part="(\w+)"} (\S+)$', re.MULTILINE)
_LEDGER = re.compile(r"^trefoil_ledger_seconds (\S+)$", re.MULTILINE)
_PEER_BYTES = re.compile(r"^trefoil_peer_bytes (\S+)$", re.MULTILINE)

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ThroughputPoint:
    """One number of reports at one number of buckets."""

    reports: int
    buckets: int
    seconds: Mapping[str, float]
    cpu_seconds: Mapping[str, float]
    bytes_per_report: Mapping[str, float]
    peak_rss_mb: Mapping[str, float]
    peak_rss_mb_by_process: Mapping[str, Mapping[str, float]]
    reports_per_second: Mapping[str, float]
    ratios: Mapping[str, float]
    # Processor seconds of (c) and (b) with all cores busy, right before and after: the unit that a shared machine has.
    yardstick: Mapping[str, float]
    largest_error: int
    noise_sd: float


@dataclass(frozen=True, slots=True)
class Baselines:
    """The same workload without helpers, per report."""

    plain: PlaintextCost
    naive_seconds: float
    sum_over_plaintext: float


@dataclass(frozen=True, slots=True)
class Opens:
    """Bare opens and a trusted server with every core busy, per core: what a helper's open competes with."""

    bare: PlaintextCost
    trusted: PlaintextCost

    def mean(self, other: Opens) -> Opens:
        """Of a measurement before and one after."""
        return Opens(_mean([self.bare, other.bare]), _mean([self.trusted, other.trusted]))


class Yardstick:
    """A process per core that opens and nothing else, run right before and right after the helpers.

    Cores that share a cache and a host do less together than one alone, and differ from minute to minute.
    """

    def __init__(self) -> None:
        self._cores = os.cpu_count() or 1
        self._pool = ProcessPoolExecutor(self._cores, mp_context=multiprocessing.get_context("spawn"))

    def measure(self, workload: Workload) -> Opens:
        """On all cores at the same time."""
        bare = list(self._pool.map(bare_open, [workload] * self._cores))
        return Opens(_mean(bare), _mean(list(self._pool.map(trusted_server, [workload] * self._cores))))

    def __enter__(self) -> Self:
        self.measure(Workload(_terms(1), 10, 0))  # starts the processes
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()


def _mean(costs: Sequence[PlaintextCost]) -> PlaintextCost:
    count = len(costs)
    return PlaintextCost(sum(cost.seconds for cost in costs) / count, sum(cost.cpu_seconds for cost in costs) / count)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What each helper has used since it started: its processes by /proc, its parts by its own metrics page."""

    usage: list[Usage]
    admit_cpu: list[dict[str, float]]
    ledger: list[float]
    peer_bytes: float

    @classmethod
    def take(cls, helpers: Launched) -> Snapshot:
        """Read all three helpers."""
        pids = [helper.process.pid for helper in helpers.helpers if helper.process is not None]
        pages = [fetch(helper, "/metrics", 10.0).decode() for helper in helpers.trio.helper_set.helpers]
        admit = [dict(_ADMIT_PART.findall(page)) for page in pages]
        return cls(
            [usage(pid) for pid in pids],
            [{part: float(value) for part, value in parts.items()} for parts in admit],
            [_read(_LEDGER, page) for page in pages],
            sum(_read(_PEER_BYTES, page) for page in pages),
        )

    def since(self, before: Snapshot) -> Snapshot:
        """The difference; memory stays the most that was ever held."""
        return Snapshot(
            [
                Usage(now.cpu_seconds - then.cpu_seconds, now.peaks_mb)
                for now, then in zip(self.usage, before.usage, strict=True)
            ],
            [
                {part: value - then.get(part, 0.0) for part, value in now.items()}
                for now, then in zip(self.admit_cpu, before.admit_cpu, strict=True)
            ],
            [now - then for now, then in zip(self.ledger, before.ledger, strict=True)],
            self.peer_bytes - before.peer_bytes,
        )


def _read(pattern: re.Pattern[str], page: str) -> float:
    found = pattern.search(page)
    if found is None:
        raise TrefoilError(f"a helper's metrics have no line like {pattern.pattern}", "This is a defect.")
    return float(found[1])


@dataclass(slots=True)
class ThroughputRun:
    """Everything that was measured, and what it was measured on."""

    seed: int
    points: list[ThroughputPoint] = field(default_factory=list)

    def to_json(self) -> dict[str, object]:
        """As it goes into benchmarks/results."""
        return {
            "points": [asdict(point) for point in self.points],
            "exponents": exponents(self.points),
        }


def run_grid(reports: Sequence[int], buckets: Sequence[int], seed: int, say: Say) -> ThroughputRun:
    """Measure every combination, the small ones first."""
    if not all(0 < count <= MAX_REPORTS for count in reports):
        raise TrefoilError(f"report counts are 1 to {MAX_REPORTS}", "Give them as --reports 20000.")
    run = ThroughputRun(seed)
    for width in sorted(set(buckets)):
        for count in sorted(set(reports)):
            run.points.append(measure_point(count, width, seed, say))
    return run


def measure_point(reports: int, buckets: int, seed: int, say: Say) -> ThroughputPoint:
    """One point, in a directory of its own that is gone afterwards."""
    workload = Workload(_terms(buckets), reports, seed)
    with tempfile.TemporaryDirectory(prefix="trefoil-bench-") as name:
        folder = Path(name)
        with launched_helpers(folder, now=_now(), sites={SITE: [SITE]}) as helpers:
            say(f"{reports:,} reports, {buckets} buckets: warming up three helpers")
            _ask(helpers, folder / "warm-up", Workload(workload.terms, WARM_UP, seed + 1))
            say(f"{reports:,} reports, {buckets} buckets: sealing")
            batch = _batch(helpers, folder / "batch", workload)
            say(f"{reports:,} reports, {buckets} buckets: baselines")
            baselines = measure_baselines(workload)
            say(f"{reports:,} reports, {buckets} buckets: asking the helpers")
            with Yardstick() as yardstick:
                earlier = yardstick.measure(workload)
                before = Snapshot.take(helpers)
                start = time.perf_counter()
                result = _query(helpers, batch)
                total = time.perf_counter() - start
                used = Snapshot.take(helpers).since(before)
                opens = earlier.mean(yardstick.measure(workload))
    return _point(workload, baselines, opens, result, total, used)


def measure_baselines(workload: Workload) -> Baselines:
    """(a) and (d), and what the sum alone costs beside (a)."""
    return Baselines(
        plain=plain_sum(workload),
        naive_seconds=naive_seconds_per_report(workload.terms.buckets),
        sum_over_plaintext=_sum_over_plaintext(workload),
    )


def naive_seconds_per_report(buckets: int) -> float:
    """(d), at a size it can bear: it slows down as reports grow, which favours it here. The median of a few runs."""
    fewer = max(10, NAIVE_REPORTS * 128 // max(buckets, 128))
    return statistics.median(_run_naive(fewer, buckets) for _ in range(NAIVE_RUNS)) / fewer


def _run_naive(reports: int, buckets: int) -> float:
    environment = os.environ | {"NAIVE_REPORTS": str(reports), "NAIVE_BUCKETS": str(buckets)}
    command = [sys.executable, "-m", "benchmarks.bench.naive_mpyc", "-M3"]
    root = Path(__file__).resolve().parents[2]
    try:
        done = subprocess.run(
            command, env=environment, cwd=root, capture_output=True, text=True, timeout=NAIVE_SECONDS, check=True
        )
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
        raise TrefoilError(f"the naive MPyC program did not finish: {error}") from None
    return float(json.loads(done.stdout.strip().splitlines()[-1])["seconds"])


def _ingest_over_bare_open(workload: Workload) -> float:
    """A helper's ingest over the bare HPKE open of the same payloads, in processor time, at the slowest helper."""
    openings = measure_openings(Helpers.fresh(), replace(workload.terms, time=BENCH_TIME), INGEST_ROUNDS)
    return max(whole / bare for bare, whole in openings)


def _sum_over_plaintext(workload: Workload) -> float:
    """The summing stage alone over (a), taking turns: field elements as they come out of the expansion."""
    plain = sample_of(workload)
    words = np.arange(plain.size, dtype=np.uint64).reshape(plain.shape) * np.uint64(0x9E3779B97F4A7C15)
    shares = words % np.uint64(P)
    in_the_clear, shared = best_of([lambda: plain.sum(axis=0), lambda: sum_rows(shares)], SUM_ROUNDS)
    return shared / in_the_clear


def _point(
    workload: Workload, baselines: Baselines, opens: Opens, result: QueryResult, total: float, used: Snapshot
) -> ThroughputPoint:
    reports, buckets = workload.count, workload.terms.buckets
    cpu = [each.cpu_seconds for each in used.usage]
    cores = os.cpu_count() or 1
    bound = reports * PARTIES * opens.bare.seconds / cores
    truth = workload.truth()[:buckets]
    if result.answer.counted != reports:
        raise TrefoilError(f"the helpers counted {result.answer.counted} of {reports} reports", "This is a defect.")
    return ThroughputPoint(
        reports=reports,
        buckets=buckets,
        seconds={"total": total, **_stages(result.seconds, used)},
        cpu_seconds={
            "total": sum(cpu),
            **{f"helper {party + 1}": value for party, value in enumerate(cpu)},
            **{part: sum(parts.get(part, 0.0) for parts in used.admit_cpu) for part in ADMIT_PARTS},
        },
        bytes_per_report={
            "uploaded": result.uploaded_bytes / reports,
            "between helpers": used.peer_bytes / reports,
        },
        peak_rss_mb={f"helper {party + 1}": each.peak_rss_mb for party, each in enumerate(used.usage)},
        peak_rss_mb_by_process={f"helper {party + 1}": each.peaks_mb for party, each in enumerate(used.usage)},
        reports_per_second={
            "trefoil": reports / total,
            "plaintext": 1 / baselines.plain.seconds,
            "trusted server": cores / opens.trusted.seconds,
            "bound of three bare opens": reports / bound,
            "naive MPyC": 1 / baselines.naive_seconds,
        },
        ratios={
            "ingest_over_bare_open": _ingest_over_bare_open(workload),
            "fraction_of_bound": bound / total,
            "cpu_over_trusted_server": sum(cpu) / (reports * opens.trusted.cpu_seconds),
            "sum_over_plaintext": baselines.sum_over_plaintext,
            "speedup_over_naive_mpyc": baselines.naive_seconds / (total / reports),
            "slowdown_over_plaintext": total / reports / baselines.plain.seconds,
        },
        yardstick={"bare open": opens.bare.cpu_seconds, "trusted server": opens.trusted.cpu_seconds},
        largest_error=max(abs(said - true) for said, true in zip(result.answer.histogram, truth, strict=True)),
        noise_sd=result.noise_sd,
    )


def _stages(seconds: Mapping[str, float], used: Snapshot) -> dict[str, float]:
    """Seconds of each stage, at the helper that was slowest in it.

    Admitting does its parts chunk by chunk on several processes, so its seconds are divided as its processor time is.
    The ledger is asked while agreeing, so its seconds are taken from those; what is left is mostly waiting.
    """
    ledger = max(used.ledger)
    admit_cpu = {part: sum(parts.get(part, 0.0) for parts in used.admit_cpu) for part in ADMIT_PARTS}
    admitting, all_cpu = seconds.get("admitting", 0.0), sum(admit_cpu.values()) or 1.0
    return {
        "transfer": seconds.get("submit", 0.0),
        **{part: admitting * cpu / all_cpu for part, cpu in admit_cpu.items()},
        "ledger": ledger,
        "agreement": max(0.0, seconds.get("agreeing", 0.0) - ledger),
        "noise": seconds.get("computing", 0.0),
        "vote": seconds.get("voting", 0.0),
        "release": seconds.get("collect", 0.0),
    }


def exponents(points: Sequence[ThroughputPoint]) -> dict[str, float]:
    """Slopes of log cost over log size: what grows linearly has 1. What a query costs whatever its size is left out."""
    found = {}
    for buckets in sorted({point.buckets for point in points}):
        column = [(point.reports, _admit_opens(point)) for point in points if point.buckets == buckets]
        if len(column) > 1:
            found[f"admit cpu over reports at {buckets} buckets"] = _slope(column)
    for reports in sorted({point.reports for point in points}):
        row = [(point.buckets, point.bytes_per_report["uploaded"]) for point in points if point.reports == reports]
        if len(row) > 1:
            # Headers and payloads do not grow with buckets; what does is compared with the least that is left.
            fixed = min(size for _, size in row) - 2 * 8 * min(buckets for buckets, _ in row)
            found[f"bytes over buckets at {reports} reports"] = _slope([(m, size - fixed) for m, size in row])
    return found


def _admit_opens(point: ThroughputPoint) -> float:
    """Admitting, in bare opens: seconds of two points are of different minutes."""
    return sum(point.cpu_seconds.get(part, 0.0) for part in ADMIT_PARTS) / point.yardstick["bare open"]


def _slope(pairs: Sequence[tuple[float, float]]) -> float:
    x, y = np.log(np.array(pairs, dtype=np.float64)).T
    return float(np.polyfit(x, y, 1)[0])


def _terms(buckets: int) -> ReportTerms:
    return ReportTerms(
        SITE,
        SITE,
        coarse_time(_now()),
        EPSILON_MICROS,
        sensitivity=2 * MAX_VALUE,
        buckets=buckets,
        unit="purchases",
        cap=MAX_VALUE,
        spread=1,
    )


def _ask(helpers: Launched, path: Path, workload: Workload) -> QueryResult:
    return _query(helpers, _batch(helpers, path, workload))


def _batch(helpers: Launched, path: Path, workload: Workload) -> BatchReader:
    make_batch(path, workload, helpers.trio.helper_set, progress=lambda _: None)
    return BatchReader(path)


def _query(helpers: Launched, batch: BatchReader) -> QueryResult:
    helper_set = helpers.trio.helper_set
    key = load_identity(helpers.trio.site_key_path(SITE))
    asked = make_query(batch, QueryOptions(seconds=QUERY_SECONDS), helper_set, key, _now())
    return asyncio.run(Querier(helper_set).ask(asked, batch))


def _now() -> int:
    return int(time.time())  # noqa: TID251 - an edge: the benchmark runs now


def table(points: Sequence[ThroughputPoint]) -> Table:
    """For people."""
    shown = Table(title="Three helpers on this machine, from sealed batch to checked answer")
    columns = ("reports", "buckets", "seconds", "reports/s", "plaintext/s", "of the bound", "CPU / trusted server")
    for column in (*columns, "ingest / bare open", "sum / plaintext", "× naive MPyC", "peak MB"):
        shown.add_column(column, justify="right")
    for point in points:
        ratios = point.ratios
        shown.add_row(
            f"{point.reports:,}",
            str(point.buckets),
            f"{point.seconds['total']:.2f}",
            f"{point.reports_per_second['trefoil']:,.0f}",
            f"{point.reports_per_second['plaintext']:,.0f}",
            f"{ratios['fraction_of_bound']:.0%}",
            f"{ratios['cpu_over_trusted_server']:.2f}",
            f"{ratios['ingest_over_bare_open']:.2f}",
            f"{ratios['sum_over_plaintext']:.2f}",
            f"{ratios['speedup_over_naive_mpyc']:.0f}",
            f"{max(point.peak_rss_mb.values()):.0f}",
        )
    return shown


def stage_table(points: Sequence[ThroughputPoint]) -> Table:
    """Seconds in each stage, at the helper that was slowest in it; then processor seconds of all three together."""
    stages = ("total", *STAGES)
    shown = Table(title="Seconds by stage, at the slowest helper, and processor seconds of all three helpers")
    for column in ("reports", "buckets", *stages, "processor"):
        shown.add_column(column, justify="right")
    for point in points:
        spent = (f"{point.seconds[stage]:.2f}" for stage in stages)
        shown.add_row(f"{point.reports:,}", str(point.buckets), *spent, f"{point.cpu_seconds['total']:.1f}")
    return shown

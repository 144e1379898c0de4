"""Sum: add the admitted reports' shares up, chunk by chunk, in flat memory and on any number of workers.

Run by a helper. A chunk is opened, expanded and summed in one go wherever the executor runs it, so seeds never leave
the worker; what comes back is an hour and two bytes per report and two vectors per chunk. The helpers may then agree on
fewer reports than this one admitted: those are opened once more and taken out of the sums, which costs only them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from dataclasses import dataclass, field, fields
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mpc_helpers.admission.column import Mask, repeated
from mpc_helpers.admission.headers import Hours, examine_headers, header_debug, header_hours
from mpc_helpers.admission.opening import OpenedReports, open_reports
from mpc_helpers.admission.rules import ADMITTED, CODE_OF, REASON_OF, AdmissionRules, Reasons
from protocol.batch import ColumnChunk, ColumnReader, DigestRows, Layout, read_chunk
from protocol.errors import ProtocolError, Rejection
from protocol.field import ELEMENT_SIZE, RowSum, Vector, add, expansions, subtract, sum_rows
from protocol.shares import BODY_SEED, SEEDS_OF, to_shamir

# Large enough that handing a chunk over costs nothing beside opening it, small enough to keep all workers busy.
CHUNK_BYTES = 2**22
_CHUNK_REPORTS = (64, 2048)


@dataclass(frozen=True, slots=True)
class ChunkJob:
    """A span of a helper's column: by path where the worker shares the disk, by value where it does not."""

    rules: AdmissionRules
    layout: Layout
    start: int
    # One for every report: whether it is the one before it once more.
    repeats: Mask = field(repr=False)
    source: Path | bytes = field(repr=False)

    def chunk(self) -> ColumnChunk:
        """The records of this span."""
        if isinstance(self.source, bytes):
            return ColumnChunk(self.layout, self.source)
        return read_chunk(self.source, self.layout, self.start, len(self.repeats))


@dataclass(frozen=True, slots=True)
class Spent:
    """Where the time of opening went, in processor seconds over all workers: what `bench throughput` shows."""

    check: float = 0.0
    open: float = 0.0
    expand: float = 0.0
    sum: float = 0.0

    def __add__(self, other: Spent) -> Spent:
        return Spent(self.check + other.check, self.open + other.open, self.expand + other.expand, self.sum + other.sum)


_PARTS = tuple(part.name for part in fields(Spent))


class _Stopwatch:
    """Processor seconds of this thread, by part."""

    def __init__(self) -> None:
        self._last = time.thread_time()
        self._seconds = dict.fromkeys(_PARTS, 0.0)

    def lap(self, part: str) -> None:
        """What has passed since the last lap was spent on `part`."""
        now = time.thread_time()
        self._seconds[part] += now - self._last
        self._last = now

    def spent(self) -> Spent:
        """All laps so far."""
        return Spent(**self._seconds)


@dataclass(frozen=True, slots=True)
class ChunkResult:
    """What a worker makes of a chunk."""

    start: int
    hours: Hours
    debug: Mask
    reasons: Reasons
    sums: tuple[Vector, Vector] = field(repr=False)
    spent: Spent = field(default_factory=Spent)


def ingest_chunk(job: ChunkJob) -> ChunkResult:
    """Admit, open, expand and sum one chunk. A pure function of its job: done twice it gives the same result."""
    watch = _Stopwatch()
    chunk = job.chunk()
    headers = chunk.header_matrix()
    reasons = examine_headers(job.rules, headers)
    reasons[job.repeats & (reasons == ADMITTED)] = CODE_OF[Rejection.DUPLICATE]
    elements = chunk.elements()
    watch.lap("check")
    opened = open_reports(job.rules, chunk, elements, reasons)
    watch.lap("open")
    sums = _sum_opened(job.rules, opened, elements, watch)
    return ChunkResult(job.start, header_hours(headers), header_debug(headers), reasons, sums, watch.spent())


def _sum_opened(
    rules: AdmissionRules, opened: OpenedReports, elements: Vector, watch: _Stopwatch
) -> tuple[Vector, Vector]:
    """The sums of the two components this helper knows, over the reports that opened."""
    length = rules.query.length
    sums = (_sum_seeds(opened.first_seeds, length, watch), _sum_seeds(opened.second_seeds, length, watch))
    if not elements.shape[1]:
        return sums
    body_sum = sum_rows(elements if len(opened.rows) == len(elements) else elements[opened.rows])
    watch.lap("sum")
    # x₃ = body − mask in every report, so the sums obey the same and no row is unmasked on its own.
    first, second = (
        subtract(body_sum, total) if index == BODY_SEED else total
        for index, total in zip(SEEDS_OF[rules.party], sums, strict=True)
    )
    return first, second


def _sum_seeds(seeds: Sequence[bytes], length: int, watch: _Stopwatch) -> Vector:
    total = RowSum(length)
    for rows in expansions(seeds, length):
        watch.lap("expand")
        total.add(rows)
        watch.lap("sum")
    return total.reduced()


@dataclass(slots=True)
class Ingested:
    """A whole column after Admit: every report's digest and fate, and the sums over those this helper admitted."""

    rules: AdmissionRules
    column: ColumnReader
    digests: DigestRows
    hours: Hours
    debug: Mask
    reasons: Reasons
    spent: Spent
    _sums: tuple[Vector, Vector] = field(repr=False)

    @property
    def admitted(self) -> Mask:
        """Which reports this helper would count."""
        mask: Mask = self.reasons == ADMITTED
        return mask

    def rejections(self) -> dict[Rejection, int]:
        """How many reports were dropped for each reason."""
        codes, counts = np.unique(self.reasons[~self.admitted], return_counts=True)
        return {REASON_OF[int(code)]: int(count) for code, count in zip(codes, counts, strict=True)}

    def total(self, accepted: Mask) -> dict[int, Vector]:
        """The component sums over exactly the accepted reports: those summed already, less the few to leave out."""
        admitted = self.admitted
        if (accepted & ~admitted).any():
            raise ProtocolError("a report was accepted that this helper never admitted")
        sums = self._sums
        leave_out = np.flatnonzero(admitted & ~accepted)
        chunk = chunk_length(self.column.layout)
        for start in range(0, len(leave_out), chunk):
            taken = self._sums_over(leave_out[start : start + chunk])
            sums = (subtract(sums[0], taken[0]), subtract(sums[1], taken[1]))
        first, second = SEEDS_OF[self.rules.party]
        return {first: sums[0], second: sums[1]}

    def shamir_share(self, accepted: Mask) -> Vector:
        """This helper's degree-1 Shamir share of the sum over the accepted reports: what enters the MPC."""
        return to_shamir(self.rules.party, self.total(accepted))

    def _sums_over(self, rows: npt.NDArray[np.int64]) -> tuple[Vector, Vector]:
        chunk = self.column.pick(rows)
        elements = chunk.elements()
        opened = open_reports(self.rules, chunk, elements, np.zeros(len(rows), dtype=np.uint8))
        return _sum_opened(self.rules, opened, elements, _Stopwatch())


def ingest(
    column: ColumnReader,
    digests: DigestRows,
    rules: AdmissionRules,
    executor: Executor,
    *,
    parallel: int,
    progress: Callable[[int], None] = lambda _: None,
    shared_disk: bool = True,
) -> Ingested:
    """Admit a column on an executor, with at most a few chunks per worker in memory at a time."""
    count, length = len(column), rules.query.length
    _check_layout(column, rules)
    hours = np.zeros(count, dtype=np.uint32)
    debug = np.zeros(count, dtype=np.bool_)
    reasons = np.zeros(count, dtype=np.uint8)
    sums = (np.zeros(length, dtype=np.uint64), np.zeros(length, dtype=np.uint64))
    spent = Spent()
    for result in _run(executor, _jobs(column, rules, repeated(digests), shared_disk), 2 * parallel):
        span = slice(result.start, result.start + len(result.reasons))
        hours[span], debug[span], reasons[span] = result.hours, result.debug, result.reasons
        sums = (add(sums[0], result.sums[0]), add(sums[1], result.sums[1]))
        spent += result.spent
        progress(len(result.reasons))
    return Ingested(rules, column, digests, hours, debug, reasons, spent, sums)


def chunk_length(layout: Layout) -> int:
    """How many records make a chunk."""
    fewest, most = _CHUNK_REPORTS
    return max(fewest, min(most, CHUNK_BYTES // layout.record))


def _check_layout(column: ColumnReader, rules: AdmissionRules) -> None:
    body = ELEMENT_SIZE * rules.query.shape.explicit if BODY_SEED in SEEDS_OF[rules.party] else 0
    if column.layout.body != body or len(column) != rules.query.batch_size:
        raise ProtocolError(
            f"the column has {len(column)} reports with bodies of {column.layout.body} bytes; "
            f"the query says {rules.query.batch_size} and {body}",
            "Cut the columns from the same batch that the query was made for.",
        )


def _jobs(column: ColumnReader, rules: AdmissionRules, repeats: Mask, shared_disk: bool) -> Iterator[ChunkJob]:
    chunk = chunk_length(column.layout)
    for start in range(0, len(column), chunk):
        span = repeats[start : start + chunk]
        source = column.path if shared_disk else column.chunk(start, len(span)).data
        yield ChunkJob(rules, column.layout, start, span, source)


def _run(executor: Executor, jobs: Iterator[ChunkJob], in_flight: int) -> Iterator[ChunkResult]:
    pending: set[Future[ChunkResult]] = set()
    for job in jobs:
        pending.add(executor.submit(ingest_chunk, job))
        if len(pending) >= in_flight:
            done, pending = wait(pending, return_when=FIRST_COMPLETED)
            yield from (future.result() for future in done)
    while pending:
        done, pending = wait(pending, return_when=FIRST_COMPLETED)
        yield from (future.result() for future in done)

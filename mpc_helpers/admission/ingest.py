"""Admit a column: check, open and sum its reports, chunk by chunk, in flat memory and on any number of workers.

Run by a helper. Each report is opened once: its shares are summed in the same pass in which it is admitted. If the
helpers then agree on fewer reports than this one admitted, those are opened again and subtracted from the sums, which
costs only them.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, wait
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mpc_helpers.admission.chunk import (
    CPU_PARTS,
    ChunkJob,
    ChunkResult,
    ReopenJob,
    ReopenResult,
    ingest_chunk,
    reopen,
)
from mpc_helpers.admission.column import (
    BLOCK,
    NO_ROOT,
    BlockCache,
    CheckResults,
    Mask,
    block_count,
    block_hash,
    check_root,
    digests_of,
    duplicates,
    preimages,
)
from mpc_helpers.admission.executors import ReportExecutor
from mpc_helpers.admission.headers import ADMITTED, REASON_OF, AdmissionRules, Hours, Reasons
from mpc_helpers.identity.membership import Membership
from protocol.amounts import Amounts, AmountsBuilder
from protocol.batch import ColumnLayout, ColumnReader, DigestRows
from protocol.errors import ErrorKind, ProtocolError, Rejection, TrefoilError
from protocol.field import ELEMENT_SIZE, Vector, add, subtract
from protocol.header import TIME_STEP
from protocol.query import Query
from protocol.shape import Shape
from protocol.shares import BODY_SEED, SEEDS_OF, to_shamir
from protocol.validity import histogram_in
from protocol.wire import HASH_SIZE

# Large enough that dispatching a chunk costs nothing beside opening it, small enough to keep all workers busy.
CHUNK_BYTES = 2**22
_CHUNK_REPORTS = (BLOCK, 2048)


@dataclass(slots=True)
class AdmittedColumn:
    """A whole column after Admit: every report's digest and outcome, and the sums over those this helper admitted."""

    rules: AdmissionRules
    column: ColumnReader
    digests: DigestRows
    hours: Hours
    debug: Mask
    reasons: Reasons
    # What each report paid and what the query needs of it; None where none was admitted.
    amounts: Amounts | None = field(repr=False)
    # Processor seconds over all workers, by part.
    cpu_seconds: dict[str, float]
    # One hash for each block of check shares; none where nothing is checked.
    blocks: list[bytes] = field(repr=False)
    _sums: tuple[Vector, Vector] = field(repr=False)
    _executor: ReportExecutor = field(repr=False)
    # Which reports are in the sums. The check between helpers changes neither this nor the reasons.
    summed: Mask = field(init=False, repr=False)
    check_results: CheckResults = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.summed = self.reasons == ADMITTED
        self.check_results = CheckResults.none(len(self.reasons))
        for array in (self.reasons, self.summed):
            array.setflags(write=False)

    @property
    def admitted(self) -> Mask:
        """Which reports this helper would count: those it summed, except those found invalid since."""
        return self.summed & ~self.check_results.invalid

    @property
    def check_root(self) -> bytes:
        """Hash of this helper's check shares of all reports that it opened."""
        return check_root(self.blocks) if self.rules.query.shape.checked else NO_ROOT

    def rejections(self) -> dict[Rejection, int]:
        codes, counts = np.unique(self.reasons[~self.summed], return_counts=True)
        return {REASON_OF[int(code)]: int(count) for code, count in zip(codes, counts, strict=True)}

    def total(self, accepted: Mask) -> dict[int, Vector]:
        """Return the component sums over exactly the accepted reports: what was summed, less the few to leave out."""
        if (accepted & ~self.summed).any():
            message = "a report was accepted that this helper never admitted"
            raise ProtocolError(message, kind=ErrorKind.INCONSISTENT)
        sums = self._sums
        leave_out = np.flatnonzero(self.summed & ~accepted)
        chunk = chunk_length(self.column.layout, self.rules.query.shape)
        for taken in self._reopen(leave_out[start : start + chunk] for start in range(0, len(leave_out), chunk)):
            sums = (subtract(sums[0], taken.sums[0]), subtract(sums[1], taken.sums[1]))
        first, second = SEEDS_OF[self.rules.party]
        return {first: sums[0], second: sums[1]}

    def shamir_share(self, accepted: Mask) -> Vector:
        """Return this helper's degree-1 Shamir share of the sum over the accepted reports: its input to the MPC.

        In checked reports a histogram is shared as numerators. Undoing that is linear too, so it is done once, here.
        """
        return histogram_in(to_shamir(self.rules.party, self.total(accepted)), self.rules.query.shape)

    @property
    def residues(self) -> int:
        return self.rules.query.shape.residues

    def show(self, numbers: Sequence[int]) -> list[bytes] | None:
        """Return some blocks of check shares, recomputed the first time; None unless all equal the first computation.

        A report recomputed at other points would be revealed at a second point, which discloses its content to anyone
        who sees both.
        """
        cache = BlockCache(self.column.path, self.residues)
        missing = [number for number in numbers if not cache.holds(number, self.blocks[number])]
        for number, preimage in zip(missing, self._compute_blocks(missing), strict=True):
            if block_hash(number, preimage) != self.blocks[number]:
                return None
            cache.keep(number, preimage)
        return [cache.read(number) for number in numbers]

    def _compute_blocks(self, numbers: Sequence[int]) -> list[bytes]:
        """Recompute blocks, in as many groups as the executor runs in parallel."""
        share = -(-len(numbers) // self._executor.parallel)
        groups = [numbers[at : at + share] for at in range(0, len(numbers), share or 1)]
        again = self._reopen(self._opened_rows(group) for group in groups)
        return [block for group, result in zip(groups, again, strict=True) for block in self._cut(group, result.shares)]

    def _opened_rows(self, numbers: Sequence[int]) -> npt.NDArray[np.int64]:
        rows = np.concatenate([np.arange(number * BLOCK, (number + 1) * BLOCK) for number in numbers])
        rows = rows[rows < len(self.summed)]
        opened: npt.NDArray[np.int64] = rows[self.summed[rows]]
        return opened

    def _cut(self, numbers: Sequence[int], shares: Vector | None) -> Iterator[bytes]:
        """Yield the check shares of each block; empty ones if a report does not open any more."""
        opened = [self.summed[number * BLOCK : (number + 1) * BLOCK] for number in numbers]
        ends = np.concatenate([[0], np.cumsum([np.count_nonzero(part) for part in opened])])
        if shares is None or len(shares) != ends[-1]:
            yield from (b"" for _ in numbers)
            return
        for at, part in enumerate(opened):
            yield preimages(part, shares[ends[at] : ends[at + 1]])[0]

    def _reopen(self, spans: Iterable[npt.NDArray[np.int64]]) -> Iterator[ReopenResult]:
        """Reopen some rows at a time and yield results in the order given, with a few jobs in flight."""
        layout = self.column.layout
        in_flight: deque[tuple[ReopenJob, Future[ReopenResult]]] = deque()
        for rows in spans:
            job = ReopenJob(self.rules, layout, self.column.pick(rows).data)
            in_flight.append((job, self._executor.backend.submit(reopen, job)))
            if len(in_flight) >= 2 * self._executor.parallel:
                yield _result(*in_flight.popleft())
        while in_flight:
            yield _result(*in_flight.popleft())


def ingest(
    column: ColumnReader,
    digests: DigestRows,
    rules: AdmissionRules,
    executor: ReportExecutor,
    progress: Callable[[int], None] = lambda _: None,
) -> AdmittedColumn:
    """Admit a column on an executor, with at most a few chunks per worker in memory at a time."""
    count, length = len(column), rules.query.length
    _check_layout(column, rules)
    hours = np.zeros(count, dtype=np.uint32)
    debug = np.zeros(count, dtype=np.bool_)
    reasons = np.zeros(count, dtype=np.uint8)
    amounts = AmountsBuilder(count)
    sums = (np.zeros(length, dtype=np.uint64), np.zeros(length, dtype=np.uint64))
    cpu_seconds = dict.fromkeys(CPU_PARTS, 0.0)
    blocks = [b""] * (block_count(count) if rules.query.shape.checked else 0)
    jobs = _jobs(column, rules, duplicates(digests), executor.shared_disk)
    for result in _run(executor.backend, jobs, 2 * executor.parallel):
        span = slice(result.start, result.start + len(result.reasons))
        hours[span], debug[span], reasons[span] = result.hours, result.debug, result.reasons
        amounts.add(result.start, result.amounts)
        sums = (add(sums[0], result.sums[0]), add(sums[1], result.sums[1]))
        hashes = [result.blocks[at : at + HASH_SIZE] for at in range(0, len(result.blocks), HASH_SIZE)]
        blocks[result.start // BLOCK : result.start // BLOCK + len(hashes)] = hashes
        for part, seconds in result.cpu_seconds.items():
            cpu_seconds[part] += seconds
        progress(len(result.reasons))
    return AdmittedColumn(
        rules, column, digests, hours, debug, reasons, amounts.done(), cpu_seconds, blocks, sums, executor
    )


def _result(job: ReopenJob, future: Future[ReopenResult]) -> ReopenResult:
    """Return the result of a job; run it here if the processes or machines that should have done it have died.

    Pools and clusters raise different exceptions then. One that is the job's own fault is raised here again.
    """
    try:
        return future.result()
    except Exception:
        return reopen(job)


def chunk_length(layout: ColumnLayout, shape: Shape) -> int:
    """Return the number of records in a chunk. Checked reports come in whole blocks and are sized by their numbers, not
    their records: helper 1, whose records are short, expands as many as the others.
    """
    fewest, most = _CHUNK_REPORTS
    size = max(layout.record, ELEMENT_SIZE * shape.expanded) if shape.checked else layout.record
    return max(fewest, min(most, CHUNK_BYTES // size) // BLOCK * BLOCK)


def _check_layout(column: ColumnReader, rules: AdmissionRules) -> None:
    body = ELEMENT_SIZE * rules.query.shape.explicit if BODY_SEED in SEEDS_OF[rules.party] else 0
    if column.layout.body != body or len(column) != rules.query.batch_size:
        raise ProtocolError(
            f"the column has {len(column)} reports with bodies of {column.layout.body} bytes; "
            f"the query says {rules.query.batch_size} and {body}",
            "Cut the columns from the same batch that the query was made for.",
            kind=ErrorKind.INCONSISTENT,
        )


def _jobs(column: ColumnReader, rules: AdmissionRules, repeats: Mask, shared_disk: bool) -> Iterator[ChunkJob]:
    chunk = chunk_length(column.layout, rules.query.shape)
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


# How far a report's hour may lie ahead of this helper's clock.
CLOCK_TOLERANCE = TIME_STEP
INGEST_TRIES = 3


class Admission:
    """One helper's admission. Reports are admitted for `lifetime` seconds; `running` batches at a time.

    `watermark` returns the time at or before which the ledger may have forgotten reports; `admitted` is a metrics
    callback, called with each column.
    """

    def __init__(
        self,
        membership: Membership,
        executor: ReportExecutor,
        *,
        lifetime: int,
        running: int,
        watermark: Callable[[], int],
        admitted: Callable[[AdmittedColumn], None] = lambda _: None,
    ) -> None:
        self._membership = membership
        self._executor = executor
        self._lifetime = lifetime
        self._watermark = watermark
        self._admitted = admitted
        # Only admission is limited. If a query that waits for its peers blocked others, three helpers that took queries
        # in different orders would deadlock.
        self._turns = asyncio.Semaphore(running)
        # A site whose queries queue up leaves one turn to others.
        self._turns_of_site = defaultdict[str, asyncio.Semaphore](lambda: asyncio.Semaphore(max(1, running - 1)))

    @asynccontextmanager
    async def turn(self, site: str) -> AsyncIterator[None]:
        """Wait for one of the turns, of which a site has all but one at a time."""
        async with self._turns_of_site[site], self._turns:
            yield

    async def admit(self, query: Query, column: Path, now: int, progress: Callable[[int], None]) -> AdmittedColumn:
        """Admit the reports of a column, by this helper's rules alone. Run with `turn` held."""
        oldest = max(await asyncio.to_thread(self._watermark), now - self._lifetime)
        rules = AdmissionRules.for_query(self._membership, query, oldest=oldest, newest=now + CLOCK_TOLERANCE)
        result = await asyncio.to_thread(self._ingest, column, rules, progress)
        self._admitted(result)
        return result

    def _ingest(self, column: Path, rules: AdmissionRules, progress: Callable[[int], None]) -> AdmittedColumn:
        """Run in a thread. Retry if a process of the pool was killed: ingesting is deterministic."""
        reader = ColumnReader(column)
        digests = digests_of(reader, rules.query.batch_root)
        for _ in range(INGEST_TRIES):
            with suppress(BrokenExecutor):
                return ingest(reader, digests, rules, self._executor, progress)
        hint = "Look at this helper's memory, or let it use fewer processes."
        raise TrefoilError("the processes that open reports keep dying", hint, kind=ErrorKind.UNAVAILABLE)

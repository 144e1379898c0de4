"""Sum: add the admitted reports' shares up, chunk by chunk, in flat memory and on any number of workers.

Run by a helper. The helpers may then agree on fewer reports than this one admitted: those are opened once more and
taken out of the sums, which costs only them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from mpc_helpers.admission.blocks import (
    BLOCK,
    HASH_SIZE,
    NO_ROOT,
    ShownBlocks,
    block_count,
    block_hash,
    check_root,
    preimages,
)
from mpc_helpers.admission.chunk import (
    ChunkJob,
    ChunkResult,
    OpenedAgain,
    PickedRows,
    Spent,
    ingest_chunk,
    open_again,
)
from mpc_helpers.admission.cluster import Workplace
from mpc_helpers.admission.column import Mask, repeated
from mpc_helpers.admission.headers import Hours
from mpc_helpers.admission.rules import ADMITTED, REASON_OF, AdmissionRules, Reasons
from mpc_helpers.admission.verdicts import Verdicts
from protocol.batch import ColumnLayout, ColumnReader, DigestRows
from protocol.errors import ProtocolError, Rejection
from protocol.field import ELEMENT_SIZE, Vector, add, subtract
from protocol.shape import Shape
from protocol.shares import BODY_SEED, SEEDS_OF, to_shamir
from protocol.validity import histogram_in

# Large enough that handing a chunk over costs nothing beside opening it, small enough to keep all workers busy.
CHUNK_BYTES = 2**22
_CHUNK_REPORTS = (BLOCK, 2048)


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
    # One hash for each block of check shares; none where nothing is checked.
    blocks: list[bytes] = field(repr=False)
    _sums: tuple[Vector, Vector] = field(repr=False)
    # Where reports are opened, also a second time.
    _place: Workplace = field(repr=False)
    # What is in the sums. Whatever is found out about a report later changes neither this nor the reasons.
    summed: Mask = field(init=False, repr=False)
    verdicts: Verdicts = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.summed = self.reasons == ADMITTED
        self.verdicts = Verdicts.none(len(self.reasons))
        for array in (self.reasons, self.summed):
            array.setflags(write=False)

    @property
    def admitted(self) -> Mask:
        """Which reports this helper would count: those it summed, without those found invalid since."""
        return self.summed & ~self.verdicts.invalid

    @property
    def check_root(self) -> bytes:
        """What this helper says about the numbers of all reports that it opened."""
        return check_root(self.blocks) if self.rules.query.shape.checked else NO_ROOT

    def rejections(self) -> dict[Rejection, int]:
        """How many reports were dropped for each reason."""
        codes, counts = np.unique(self.reasons[~self.summed], return_counts=True)
        return {REASON_OF[int(code)]: int(count) for code, count in zip(codes, counts, strict=True)}

    def total(self, accepted: Mask) -> dict[int, Vector]:
        """The component sums over exactly the accepted reports: those summed already, less the few to leave out."""
        if (accepted & ~self.summed).any():
            raise ProtocolError("a report was accepted that this helper never admitted")
        sums = self._sums
        leave_out = np.flatnonzero(self.summed & ~accepted)
        chunk = chunk_length(self.column.layout, self.rules.query.shape)
        for taken in self._open_again(leave_out[start : start + chunk] for start in range(0, len(leave_out), chunk)):
            sums = (subtract(sums[0], taken.sums[0]), subtract(sums[1], taken.sums[1]))
        first, second = SEEDS_OF[self.rules.party]
        return {first: sums[0], second: sums[1]}

    def shamir_share(self, accepted: Mask) -> Vector:
        """This helper's degree-1 Shamir share of the sum over the accepted reports: what enters the MPC.

        In checked reports a histogram is shared as numerators. Undoing that is linear too, so it is done once, here.
        """
        return histogram_in(to_shamir(self.rules.party, self.total(accepted)), self.rules.query.shape)

    @property
    def residues(self) -> int:
        """How many check shares a report has."""
        return self.rules.query.shape.residues

    def show(self, numbers: Sequence[int]) -> list[bytes] | None:
        """Some blocks of check shares, computed again the first time; None unless all come out as before.

        A report whose points came out otherwise the second time would be shown at a second point, which tells its
        content to whoever sees both.
        """
        shown = ShownBlocks(self.column.path, self.residues)
        missing = [number for number in numbers if not shown.holds(number, self.blocks[number])]
        for number, preimage in zip(missing, self._compute_blocks(missing), strict=True):
            if block_hash(number, preimage) != self.blocks[number]:
                return None
            shown.keep(number, preimage)
        return [shown.read(number) for number in numbers]

    def _compute_blocks(self, numbers: Sequence[int]) -> list[bytes]:
        """As many blocks at a time as keep every process of the workplace busy."""
        share = -(-len(numbers) // self._place.parallel)
        groups = [numbers[at : at + share] for at in range(0, len(numbers), share or 1)]
        again = self._open_again(self._opened_rows(group) for group in groups)
        return [block for group, found in zip(groups, again, strict=True) for block in self._cut(group, found.shares)]

    def _opened_rows(self, numbers: Sequence[int]) -> npt.NDArray[np.int64]:
        rows = np.concatenate([np.arange(number * BLOCK, (number + 1) * BLOCK) for number in numbers])
        rows = rows[rows < len(self.summed)]
        opened: npt.NDArray[np.int64] = rows[self.summed[rows]]
        return opened

    def _cut(self, numbers: Sequence[int], shares: Vector | None) -> Iterator[bytes]:
        """Check shares of some blocks, one after the other; nothing at all if a report does not open any more."""
        opened = [self.summed[number * BLOCK : (number + 1) * BLOCK] for number in numbers]
        ends = np.concatenate([[0], np.cumsum([np.count_nonzero(part) for part in opened])])
        if shares is None or len(shares) != ends[-1]:
            yield from (b"" for _ in numbers)
            return
        for at, part in enumerate(opened):
            yield preimages(part, shares[ends[at] : ends[at + 1]])[0]

    def _open_again(self, spans: Iterable[npt.NDArray[np.int64]]) -> Iterator[OpenedAgain]:
        """Some rows at a time, in the order given, with a few of them under way at the workplace."""
        layout = self.column.layout
        under_way: deque[tuple[PickedRows, Future[OpenedAgain]]] = deque()
        for rows in spans:
            job = PickedRows(self.rules, layout, self.column.pick(rows).data)
            under_way.append((job, self._place.executor.submit(open_again, job)))
            if len(under_way) >= 2 * self._place.parallel:
                yield _result(*under_way.popleft())
        while under_way:
            yield _result(*under_way.popleft())


def ingest(
    column: ColumnReader,
    digests: DigestRows,
    rules: AdmissionRules,
    place: Workplace,
    progress: Callable[[int], None] = lambda _: None,
) -> Ingested:
    """Admit a column at a workplace, with at most a few chunks per worker in memory at a time."""
    count, length = len(column), rules.query.length
    _check_layout(column, rules)
    hours = np.zeros(count, dtype=np.uint32)
    debug = np.zeros(count, dtype=np.bool_)
    reasons = np.zeros(count, dtype=np.uint8)
    sums = (np.zeros(length, dtype=np.uint64), np.zeros(length, dtype=np.uint64))
    spent = Spent()
    blocks = [b""] * (block_count(count) if rules.query.shape.checked else 0)
    jobs = _jobs(column, rules, repeated(digests), place.shared_disk)
    for result in _run(place.executor, jobs, 2 * place.parallel):
        span = slice(result.start, result.start + len(result.reasons))
        hours[span], debug[span], reasons[span] = result.hours, result.debug, result.reasons
        sums = (add(sums[0], result.sums[0]), add(sums[1], result.sums[1]))
        hashes = [result.blocks[at : at + HASH_SIZE] for at in range(0, len(result.blocks), HASH_SIZE)]
        blocks[result.start // BLOCK : result.start // BLOCK + len(hashes)] = hashes
        spent += result.spent
        progress(len(result.reasons))
    return Ingested(rules, column, digests, hours, debug, reasons, spent, blocks, sums, place)


def _result(job: PickedRows, future: Future[OpenedAgain]) -> OpenedAgain:
    """What was opened again; here, if the processes or machines that should have done it have died.

    Pools and clusters say so in different ways. What is wrong with the reports themselves shows here once more.
    """
    try:
        return future.result()
    except Exception:
        return open_again(job)


def chunk_length(layout: ColumnLayout, shape: Shape) -> int:
    """How many records make a chunk. Of checked reports it is whole blocks, and numbers count, not bytes of records:
    helper 1, whose records are short, expands as many as the others.
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

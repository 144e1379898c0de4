"""Chunks: a span of a column, opened, expanded, checked and added up in one go wherever the executor runs it.

Seeds never leave the worker; what comes back is an hour and two bytes per report, two vectors for each chunk, and where
reports are checked 32 bytes for every 64 of them.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path

import numpy as np

from mpc_helpers.admission.blocks import BLOCK, block_hash, preimages
from mpc_helpers.admission.column import Mask
from mpc_helpers.admission.headers import Hours, examine_headers, header_debug, header_hours, openings_of
from mpc_helpers.admission.opening import OpenedReports, open_reports
from mpc_helpers.admission.residues import ResidueCheck, check_words
from mpc_helpers.admission.rules import ADMITTED, CODE_OF, AdmissionRules, Reasons
from protocol.batch import ColumnChunk, ColumnLayout, read_chunk
from protocol.errors import Rejection
from protocol.field import RowSum, Vector, expansions, subtract, sum_rows
from protocol.shares import BODY_SEED, SEEDS_OF

# Words that are expanded at a time: a quarter of a megabyte where they are only added up, four times that where numpy
# has more to do with each block.
_SUM_WORDS = 2**15
_CHECK_WORDS = 2**17


@dataclass(frozen=True, slots=True)
class ChunkJob:
    """A span of a helper's column: by path where the worker shares the disk, by value where it does not."""

    rules: AdmissionRules
    layout: ColumnLayout
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
    residues: float = 0.0

    def __add__(self, other: Spent) -> Spent:
        return Spent(*(getattr(self, part) + getattr(other, part) for part in _PARTS))


_PARTS = tuple(part.name for part in fields(Spent))


class Stopwatch:
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
    # The hashes of the chunk's blocks of check shares, joined; empty where nothing is checked.
    blocks: bytes = field(repr=False)
    spent: Spent = field(default_factory=Spent)


@contextmanager
def _without_collecting() -> Iterator[None]:
    """Do not look for rings of objects meanwhile: a chunk makes many objects and no ring, and looking takes long."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@_without_collecting()
def ingest_chunk(job: ChunkJob) -> ChunkResult:
    """Admit, open, expand and sum one chunk. A pure function of its job: done twice it gives the same result."""
    watch = Stopwatch()
    chunk = job.chunk()
    headers = chunk.header_matrix()
    reasons = examine_headers(job.rules, headers)
    reasons[job.repeats & (reasons == ADMITTED)] = CODE_OF[Rejection.DUPLICATE]
    elements = chunk.elements()
    watch.lap("check")
    opened = open_reports(job.rules, chunk, elements, reasons)
    watch.lap("open")
    sums, shares = sum_opened(job.rules, opened, chunk.headers(), elements, watch)
    blocks = [] if shares is None else _hash_blocks(job.start, reasons == ADMITTED, shares)
    watch.lap("residues")
    return ChunkResult(
        job.start, header_hours(headers), header_debug(headers), reasons, sums, b"".join(blocks), watch.spent()
    )


@dataclass(frozen=True, slots=True)
class PickedRows:
    """Some records of a column that were admitted before, to be opened once more; by value, as they lie apart."""

    rules: AdmissionRules
    layout: ColumnLayout
    records: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class OpenedAgain:
    """The sums over some reports, and where they are checked a row of check shares for each."""

    sums: tuple[Vector, Vector] = field(repr=False)
    shares: Vector | None = field(repr=False)


def open_again(job: PickedRows) -> OpenedAgain:
    """Open and sum some reports once more, wherever the executor runs it. It gives what it gave before."""
    chunk = ColumnChunk(job.layout, job.records)
    elements = chunk.elements()
    opened = open_reports(job.rules, chunk, elements, np.zeros(len(chunk), dtype=np.uint8))
    return OpenedAgain(*sum_opened(job.rules, opened, chunk.headers(), elements, Stopwatch()))


def _hash_blocks(start: int, opened: Mask, shares: Vector) -> list[bytes]:
    return [block_hash(number, data) for number, data in enumerate(preimages(opened, shares), start // BLOCK)]


def sum_opened(
    rules: AdmissionRules, opened: OpenedReports, headers: Sequence[bytes], elements: Vector, watch: Stopwatch
) -> tuple[tuple[Vector, Vector], Vector | None]:
    """The sums of the two components this helper knows, over the reports that opened; and their residues, if any."""
    shape = rules.query.shape
    if len(opened.rows) != len(elements):
        headers, elements = [headers[row] for row in opened.rows], elements[opened.rows]
    check = None
    if shape.checked and opened.rows:
        check = ResidueCheck(rules.party, shape, headers, openings_of(shape, headers))
        watch.lap("residues")
    sums = _sum_seeds(rules, opened, elements, check, watch)
    shares = None if check is None else check.normal_shares()
    watch.lap("residues")
    if shape.checked and shares is None:
        shares = np.zeros((0, shape.residues), dtype=np.uint64)
    if not elements.shape[1]:
        return sums, shares
    body_sum = sum_rows(elements[:, : shape.length])
    watch.lap("sum")
    # x₃ = body − mask in every report, so the sums obey the same and no row is unmasked on its own.
    first, second = (
        subtract(body_sum, total) if index == BODY_SEED else total
        for index, total in zip(SEEDS_OF[rules.party], sums, strict=True)
    )
    return (first, second), shares


def _sum_seeds(
    rules: AdmissionRules, opened: OpenedReports, elements: Vector, check: ResidueCheck | None, watch: Stopwatch
) -> tuple[Vector, Vector]:
    """Expand both seeds of every report, add up what belongs to the histogram, and hand all of it to the check."""
    shape = rules.query.shape
    totals = (RowSum(shape.length), RowSum(shape.length))
    words = _CHECK_WORDS if shape.checked else _SUM_WORDS
    start = 0
    for first, second in zip(
        expansions(opened.first_seeds, shape.expanded, words),
        expansions(opened.second_seeds, shape.expanded, words),
        strict=True,
    ):
        watch.lap("expand")
        for total, rows in zip(totals, (first, second), strict=True):
            total.add(rows[:, : shape.length])
        watch.lap("sum")
        if check is not None:
            bodies = elements[start : start + len(first)]
            check.add(start, check_words(rules.party, first, second, bodies, shape))
            start += len(first)
            watch.lap("residues")
    return totals[0].reduced(), totals[1].reduced()

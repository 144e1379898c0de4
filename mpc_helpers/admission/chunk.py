"""Chunks: a span of a column, opened, checked, expanded and added up in one job wherever the executor runs it.

A job's cost is one HPKE open for each report, all of a chunk in one batch. Seeds never leave the worker. The result has
an hour and two bytes for each report, two vectors for each chunk and, where reports are checked, 32 bytes for every 64
of them.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import compress
from pathlib import Path

import numpy as np

from mpc_helpers.admission.column import BLOCK, Mask, block_hash, preimages
from mpc_helpers.admission.headers import (
    ADMITTED,
    CODE_OF,
    AdmissionRules,
    Hours,
    Reasons,
    examine_headers,
    header_amounts,
    header_debug,
    header_hours,
    openings_of,
)
from mpc_helpers.admission.residues import ResidueCheck, check_words
from protocol.amounts import Amount, Places
from protocol.batch import ColumnChunk, ColumnLayout, read_chunk
from protocol.errors import Rejection
from protocol.field import SEED_SIZE, P, RowSum, Vector, expansions, subtract, sum_rows
from protocol.header import BODY_HASH_SPAN, HELPER_SET_SPAN, KEY_ID_SPANS
from protocol.hpke import PrivateKey
from protocol.report import are_committed, body_digest, open_many_seeds
from protocol.shares import BODY_SEED, SEEDS_OF


@dataclass(frozen=True, slots=True)
class OpenedReports:
    """The reports of a chunk that opened: two seeds each, and the positions they had."""

    rows: list[int]
    first_seeds: list[bytes] = field(repr=False)
    second_seeds: list[bytes] = field(repr=False)


def open_reports(rules: AdmissionRules, chunk: ColumnChunk, elements: Vector, reasons: Reasons) -> OpenedReports:
    """Open every report that is still admitted; where one fails, write the rejection into `reasons`.

    The two seeds of each are checked against what its header commits to. `elements` are the chunk's bodies, without
    columns at the helper that does not use them. Three passes rather than one: each kind of work stays in the
    processor's cache, which saves a twentieth of the whole.
    """
    headers = chunk.headers()
    if chunk.layout.body:
        _check_bodies(chunk, headers, elements, reasons)
    rows, seeds = _open_payloads(rules, headers, chunk.payloads(), reasons)
    committed = are_committed(rules.party, [headers[row] for row in rows], seeds)
    if not all(committed):
        reasons[[row for row, right in zip(rows, committed, strict=True) if not right]] = CODE_OF[
            Rejection.WRONG_COMMITMENT
        ]
        rows, seeds = list(compress(rows, committed)), list(compress(seeds, committed))
    return OpenedReports(rows, [pair[:SEED_SIZE] for pair in seeds], [pair[SEED_SIZE:] for pair in seeds])


def _check_bodies(chunk: ColumnChunk, headers: list[bytes], elements: Vector, reasons: Reasons) -> None:
    """Reject reports with an element not below p, or with another body than the header names."""
    bad = elements.max(axis=1) >= np.uint64(P)
    hashed = [body_digest(body) == header[BODY_HASH_SPAN] for header, body in zip(headers, chunk.bodies(), strict=True)]
    bad |= ~np.array(hashed, dtype=np.bool_)
    reasons[bad & (reasons == ADMITTED)] = CODE_OF[Rejection.WRONG_BODY]


def _open_payloads(
    rules: AdmissionRules, headers: list[bytes], payloads: list[bytes], reasons: Reasons
) -> tuple[list[int], list[bytes]]:
    """Open the payload of every admitted report and return the rows, in order, and seeds of those that open."""
    own_id = KEY_ID_SPANS[rules.party]
    # Made for each chunk, which costs next to nothing: this process outlives the keys and must not retain them.
    keys = {key.helper_set + key.key_id: PrivateKey(key.suite, key.private) for key in rules.keys}
    rows_by_key: dict[bytes, list[int]] = {}
    for row in np.flatnonzero(reasons == ADMITTED).tolist():
        header = headers[row]
        rows_by_key.setdefault(header[HELPER_SET_SPAN] + header[own_id], []).append(row)
    sealed: list[tuple[int, bytes]] = []
    for name, rows in rows_by_key.items():
        opened = open_many_seeds(
            rules.party, [headers[row] for row in rows], [payloads[row] for row in rows], keys[name]
        )
        for row, seeds in zip(rows, opened, strict=True):
            # A payload is exactly two seeds.
            if seeds is None or len(seeds) != 2 * SEED_SIZE:
                reasons[row] = CODE_OF[Rejection.UNOPENABLE]
            else:
                sealed.append((row, seeds))
    sealed.sort()
    return [row for row, _ in sealed], [seeds for _, seeds in sealed]


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
    # For every report, whether it is a duplicate of the one before it.
    repeats: Mask = field(repr=False)
    source: Path | bytes = field(repr=False)

    def chunk(self) -> ColumnChunk:
        if isinstance(self.source, bytes):
            return ColumnChunk(self.layout, self.source)
        return read_chunk(self.source, self.layout, self.start, len(self.repeats))


# The parts of admission whose processor seconds are counted, as `bench throughput` reports them.
CPU_PARTS = ("check", "open", "expand", "sum", "residues")


class Stopwatch:
    """Measures processor seconds of this thread, by part."""

    def __init__(self) -> None:
        self._last = time.thread_time()
        self.seconds = dict.fromkeys(CPU_PARTS, 0.0)

    def lap(self, part: str) -> None:
        now = time.thread_time()
        self.seconds[part] += now - self._last
        self._last = now


@dataclass(frozen=True, slots=True)
class ChunkResult:
    """The result of a `ChunkJob`."""

    start: int
    hours: Hours
    debug: Mask
    reasons: Reasons
    # What the admitted reports paid and what the query needs of them, in groups, with their rows in the chunk.
    amounts: list[tuple[Amount, Places]] = field(repr=False)
    sums: tuple[Vector, Vector] = field(repr=False)
    # The hashes of the chunk's blocks of check shares, joined; empty where nothing is checked.
    blocks: bytes = field(repr=False)
    cpu_seconds: dict[str, float]


@contextmanager
def _without_collecting() -> Iterator[None]:
    """Disable the cyclic garbage collector: a chunk makes many objects and no cycles, and collecting is slow."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@_without_collecting()
def ingest_chunk(job: ChunkJob) -> ChunkResult:
    """Admit, open, expand and sum one chunk. A pure function of its job, so it can be retried."""
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
        job.start,
        header_hours(headers),
        header_debug(headers),
        reasons,
        header_amounts(job.rules.query, headers, reasons),
        sums,
        b"".join(blocks),
        watch.seconds,
    )


@dataclass(frozen=True, slots=True)
class ReopenJob:
    """Some records of a column that were admitted before, to be opened again; by value, as they are scattered."""

    rules: AdmissionRules
    layout: ColumnLayout
    records: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class ReopenResult:
    """The sums over some reports and, where they are checked, a row of check shares for each."""

    sums: tuple[Vector, Vector] = field(repr=False)
    shares: Vector | None = field(repr=False)


def reopen(job: ReopenJob) -> ReopenResult:
    """Open and sum some admitted reports again. Deterministic: the result is what it was the first time."""
    chunk = ColumnChunk(job.layout, job.records)
    elements = chunk.elements()
    opened = open_reports(job.rules, chunk, elements, np.zeros(len(chunk), dtype=np.uint8))
    return ReopenResult(*sum_opened(job.rules, opened, chunk.headers(), elements, Stopwatch()))


def _hash_blocks(start: int, opened: Mask, shares: Vector) -> list[bytes]:
    return [block_hash(number, data) for number, data in enumerate(preimages(opened, shares), start // BLOCK)]


def sum_opened(
    rules: AdmissionRules, opened: OpenedReports, headers: Sequence[bytes], elements: Vector, watch: Stopwatch
) -> tuple[tuple[Vector, Vector], Vector | None]:
    """Return the sums of the two components this helper knows, over the reports that opened, and their residues."""
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
    """Expand both seeds of every report, add up what belongs to the histogram, and pass all of it to the check."""
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

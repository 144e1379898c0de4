"""Many sealed reports from a seeded workload, made on all cores, so that large runs can be repeated.

The seed decides what is in the reports, never their nonces, seeds or keys: two runs give the same sums in reports that
have nothing else in common.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.liars import lies_of, lying_report
from benchmarks.seeded import Generator, generator
from benchmarks.worker_pool import WorkerPool
from protocol.batch import BatchWriter
from protocol.errors import TrefoilError
from protocol.header import ReportTerms
from protocol.helper_set import HelperSet
from protocol.report import SealedReport, seal_report

Histograms = npt.NDArray[np.int64]

MAX_VALUE = 5
MAX_SKEW = 10.0
CHUNK = 200


@dataclass(frozen=True, slots=True)
class Workload:
    """`count` conversions, each worth 1 to `MAX_VALUE` in one bucket, as last-touch reports have it.

    With `skew` = 0 all buckets are equally likely; otherwise bucket k has a weight of 1/(k + 1)^skew. Where the terms
    have a κ, a share of `flagged` of the reports says that a week could not pay, and is worth nothing else.
    """

    terms: ReportTerms
    count: int
    seed: int
    skew: float = 0.0
    flagged: float = 0.0
    # So many lying devices more, of every kind in turn. The truth does not count them.
    invalid: int = 0

    def __post_init__(self) -> None:
        if self.invalid < 0 or (self.invalid and not self.terms.shape.checked):
            raise TrefoilError("lying devices are for checked reports, and 0 or more", "Ask for --invalid 10.")
        if self.count < 1:
            raise TrefoilError("a batch holds at least one report", "Ask for --count 1 or more.")
        if not (0 <= self.skew <= MAX_SKEW):
            raise TrefoilError(f"a skew is 0 to {MAX_SKEW:g}, not {self.skew:g}", "Ask for --skew 1.")
        if not (0 <= self.flagged <= 1) or (self.flagged and not self.terms.kappa):
            raise TrefoilError("a share of flagged reports is 0 to 1, and needs a κ", "Give --kappa 1 or more.")

    def chunks(self) -> Iterator[range]:
        """The spans in which reports are made and plaintext is drawn; each has randomness of its own."""
        return (range(start, min(start + CHUNK, self.count)) for start in range(0, self.count, CHUNK))

    def histograms(self, span: range) -> Histograms:
        """What the conversions of one span are worth, in the clear."""
        draw = generator(self.seed, span.start)
        rows = np.zeros((len(span), self.terms.length), dtype=np.int64)
        rows[np.arange(len(span)), self._buckets(draw, len(span))] = draw.integers(1, MAX_VALUE + 1, size=len(span))
        if self.flagged:
            left_out = draw.random(len(span)) < self.flagged
            rows[left_out] = 0
            rows[left_out, -1] = self.terms.kappa
        return rows

    def _buckets(self, draw: Generator, count: int) -> npt.NDArray[np.int64]:
        if not self.skew:
            return draw.integers(self.terms.buckets, size=count)
        weights = np.arange(1, self.terms.buckets + 1) ** -self.skew
        return draw.choice(self.terms.buckets, size=count, p=weights / weights.sum())

    def truth(self) -> list[int]:
        """The sum of everything: what the answer would be without noise."""
        total = np.zeros(self.terms.length, dtype=np.int64)
        for span in self.chunks():
            total += self.histograms(span).sum(axis=0)
        return [int(value) for value in total]


def seal_span(workload: Workload, helpers: str, span: range) -> list[SealedReport]:
    """The reports of one span, sealed. Runs in a worker process, which gets the helper set as the text of its file."""
    helper_set = _helper_set(helpers)
    return [seal_report(row, workload.terms, helper_set) for row in workload.histograms(span).tolist()]


def lying_reports(workload: Workload, helper_set: HelperSet) -> Iterator[SealedReport]:
    """The reports of the devices that lie."""
    kinds = lies_of(workload.terms.shape)
    return (lying_report(kinds[at % len(kinds)], workload.terms, helper_set) for at in range(workload.invalid))


@lru_cache(maxsize=1)
def _helper_set(helpers: str) -> HelperSet:
    return HelperSet.from_json(json.loads(helpers))


def make_batch(
    path: Path, workload: Workload, helper_set: HelperSet, *, processes: int = 0, progress: Callable[[int], None]
) -> None:
    """Write a batch file of the workload's reports. A file that exists already is left alone."""
    if path.exists():
        raise TrefoilError(f"{path} exists already", "Choose another name, or remove it.")
    draft = path.with_name(f".{path.name}.part")
    draft.unlink(missing_ok=True)
    try:
        with BatchWriter(draft) as writer:
            for reports in _sealed(workload, helper_set, processes or os.cpu_count() or 1):
                for report in reports:
                    writer.add(report)
                progress(len(reports))
            for report in lying_reports(workload, helper_set):
                writer.add(report)
        draft.rename(path)
    finally:
        draft.unlink(missing_ok=True)


def _sealed(workload: Workload, helper_set: HelperSet, processes: int) -> Iterator[list[SealedReport]]:
    pending: set[Future[list[SealedReport]]] = set()
    helpers = json.dumps(helper_set.to_json())
    with WorkerPool(processes) as pool:
        try:
            for span in workload.chunks():
                pending.add(pool.submit(seal_span, workload, helpers, span))
                if len(pending) >= 4 * processes:
                    done, pending = wait(pending, return_when=FIRST_COMPLETED)
                    yield from (future.result() for future in done)
            while pending:
                done, pending = wait(pending, return_when=FIRST_COMPLETED)
                yield from (future.result() for future in done)
        finally:
            pool.shutdown(cancel_futures=True)

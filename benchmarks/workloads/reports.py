"""Make many sealed reports from a seeded workload, on all cores: `trefoil reports`.

The seed decides the content of the reports, never their nonces, seeds or keys: two runs have equal sums in reports that
have nothing else in common. Dishonest devices can be added: their numbers are ones that no honest device would send,
sealed as an honest device seals, with the proof of a null report, since no lie has a proof of its own.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt
import typer
from rich.table import Table

from benchmarks.workloads.seeded import Generator, generator
from protocol import numerators
from protocol.batch import BatchWriter
from protocol.cli import console
from protocol.cli.console import add_bars, bar
from protocol.cli.options import JsonFile, WholeKappa, check_file
from protocol.errors import ErrorKind, TrefoilError
from protocol.field import P, from_integers
from protocol.header import ReportTerms, coarse_time
from protocol.helper_set import HelperSet
from protocol.querier.view import MAX_ROWS
from protocol.report import SealedReport, seal_deal, seal_reports
from protocol.shape import Shape
from protocol.units import entitlement
from protocol.validity import Seeds, deal_numbers

Parameters = ParamSpec("Parameters")
T = TypeVar("T")


class WorkerPool(ProcessPoolExecutor):
    """A process pool whose workers end at once on Ctrl-C, without a traceback, also while they start."""

    def __init__(self, processes: int) -> None:
        super().__init__(processes, mp_context=get_context("spawn"), initializer=_end_when_interrupted)

    def submit(self, fn: Callable[Parameters, T], /, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Future[T]:
        """Submit a call. The first ones start the workers."""
        with _interrupts_held():
            return super().submit(fn, *args, **kwargs)


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Block SIGINT until the block ends. A child process started inside inherits the mask, so that it imports without
    interruption.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_when_interrupted() -> None:
    """Run by a worker when it has imported everything. A SIGINT that came meanwhile ends it here."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


_HALF = (P + 1) // 2
_HUGE = 2**59


class Lie(Enum):
    """A dishonest content of a report."""

    NEGATIVE = "a negative number"
    OVER_THE_CAP = "one more than the cap"
    HUGE = "a huge number"
    FRACTIONAL = "half of one"
    CANCELLING = "two huge numbers that cancel"
    WRONG_FLAG = "twice the side query's number"


def lies_of(shape: Shape) -> list[Lie]:
    """Return the lies that a report of this shape can hold."""
    return [
        lie
        for lie in Lie
        if (lie is not Lie.CANCELLING or shape.buckets > 1) and (lie is not Lie.WRONG_FLAG or shape.kappa)
    ]


def lying_report(lie: Lie, terms: ReportTerms, helper_set: HelperSet) -> SealedReport:
    """Return a well-formed report with this lie in it."""
    shape = terms.shape
    if not shape.checked:
        raise TrefoilError(
            "helpers detect dishonest numbers in checked reports only",
            "Make the reports with a cap.",
            kind=ErrorKind.INCONSISTENT,
        )
    buckets, side = _numbers(lie, shape)
    amounts = [(place + 1, value) for place, value in enumerate(buckets)]
    numbers = numerators.encode(amounts, shape.buckets)
    if shape.kappa:
        numbers = np.append(numbers, from_integers([side]))
    null_proof = [[1] + [0] * plane.degree for plane in shape.planes]
    return seal_deal(deal_numbers(numbers, null_proof, shape, _new_seeds), terms, helper_set)


def _numbers(lie: Lie, shape: Shape) -> tuple[list[int], int]:
    first = {
        Lie.NEGATIVE: [-1],
        Lie.OVER_THE_CAP: [shape.cap + 1],
        Lie.HUGE: [_HUGE],
        Lie.FRACTIONAL: [_HALF],
        Lie.CANCELLING: [_HUGE, -_HUGE],
        Lie.WRONG_FLAG: [0],
    }[lie]
    side = 2 * shape.kappa if lie is Lie.WRONG_FLAG else 0
    return first + [0] * (shape.buckets - len(first)), side


def _new_seeds(_: bytes) -> Seeds:
    return os.urandom(32), os.urandom(32), os.urandom(32)


Histograms = npt.NDArray[np.int64]

MAX_VALUE = 5
MAX_SKEW = 10.0
CHUNK = 200


def purchase_terms(
    site: str, buckets: int, now: int, epsilon: float = 1.0, kappa: int = 0, unit: str = "purchases"
) -> ReportTerms:
    """Return the terms of checked reports of purchases worth up to `MAX_VALUE`."""
    hour, paid, most = coarse_time(now), entitlement(epsilon), 2 * MAX_VALUE
    return ReportTerms(site, site, hour, paid, most, buckets, kappa, unit=unit, cap=MAX_VALUE, spread=1)


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
    # Dishonest devices besides, of every kind in turn. The truth does not count them.
    invalid: int = 0

    def __post_init__(self) -> None:
        if self.invalid < 0 or (self.invalid and not self.terms.shape.checked):
            raise TrefoilError(
                "--invalid is 0 or more, and needs checked reports", "Use --invalid 10.", kind=ErrorKind.OUT_OF_RANGE
            )
        if self.count < 1:
            raise TrefoilError("a batch holds at least one report", "Use --count 1 or more.", kind=ErrorKind.TOO_FEW)
        if not (0 <= self.skew <= MAX_SKEW):
            raise TrefoilError(
                f"--skew is 0 to {MAX_SKEW:g}, not {self.skew:g}", "Use --skew 1.", kind=ErrorKind.OUT_OF_RANGE
            )
        if not (0 <= self.flagged <= 1) or (self.flagged and not self.terms.kappa):
            raise TrefoilError(
                "--flagged is 0 to 1, and needs a κ", "Use --kappa 1 or more.", kind=ErrorKind.OUT_OF_RANGE
            )

    def chunks(self) -> Iterator[range]:
        """Yield the spans in which reports are made; each has its own seeded randomness."""
        return (range(start, min(start + CHUNK, self.count)) for start in range(0, self.count, CHUNK))

    def histograms(self, span: range) -> Histograms:
        """Return the histograms of one span, in the clear."""
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
        """Return the true sum: the answer without noise."""
        total = np.zeros(self.terms.length, dtype=np.int64)
        for span in self.chunks():
            total += self.histograms(span).sum(axis=0)
        return [int(value) for value in total]


def seal_span(workload: Workload, helpers: str, span: range) -> list[SealedReport]:
    """Seal the reports of one span. Run by a worker process; the helper set comes as the JSON of its file."""
    helper_set = _helper_set(helpers)
    return seal_reports(workload.histograms(span).tolist(), workload.terms, helper_set)


def lying_reports(workload: Workload, helper_set: HelperSet) -> Iterator[SealedReport]:
    """Yield the reports of the dishonest devices."""
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
        raise TrefoilError(f"{path} exists already", "Choose another name, or remove it.", kind=ErrorKind.FILE_EXISTS)
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


def reports(
    out: Annotated[Path, typer.Option("--out", help="The batch file to make.")],
    helpers: Annotated[Path, typer.Option("--helpers", help="The helper set, as `trefoil launch` makes it.")],
    count: Annotated[int, typer.Option(help="How many reports.")] = 10_000,
    buckets: Annotated[int, typer.Option(help="Histogram size.")] = 128,
    site: Annotated[str, typer.Option(help="For which site.")] = "shop.example",
    epsilon: Annotated[float, typer.Option(help="The ε that each device has paid for.")] = 1.0,
    skew: Annotated[float, typer.Option(help="How uneven the buckets are: 0 all alike, 1 a few large ones.")] = 0.0,
    kappa: WholeKappa = 0,
    flagged: Annotated[float, typer.Option(help="Share of reports without budget; needs --kappa.")] = 0.0,
    show_truth: Annotated[
        bool, typer.Option("--show-truth", help="Print what an answer without noise would be.")
    ] = False,
    invalid: Annotated[int, typer.Option(help="Add this many dishonest devices, of every kind in turn.")] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Decides what is in the reports, never their keys or nonces.")] = 1,
    unit: Annotated[str, typer.Option(help="Name of the unit of value; a browser's reports have count.")] = "purchases",
    json_file: JsonFile = None,
) -> None:
    """Make a batch of reports from a seeded workload, on all cores.

    Example: trefoil reports --helpers /tmp/trefoil/helpers.json --count 10000 --skew 1 --show-truth --out shop.batch
    """
    now = int(time.time())  # noqa: TID251 - an edge: the reports are made now
    terms = purchase_terms(site, buckets, now, epsilon, kappa, unit)
    check_file("--out", out)
    workload = Workload(terms, count, seed, skew, flagged, invalid)
    with console.progress("sealing", count) as advance:
        make_batch(out, workload, HelperSet.load(helpers), progress=advance)
    size = out.stat().st_size
    dishonest = f" and {invalid:,} of dishonest devices" if invalid else ""
    console.say(f"{count:,} reports{dishonest}, {size:,} bytes: {out}")
    truth = workload.truth()
    if show_truth:
        console.out.print(_table(truth[:buckets], terms.unit))
        if kappa:
            console.say(f"reports of devices that could not pay: {truth[buckets] // kappa:,}")
    made = {"reports": count, "invalid": invalid, "buckets": buckets, "bytes": size, "truth": truth}
    console.write_json(json_file, made)


def _table(truth: Sequence[int], unit: str) -> Table:
    table = Table(title="the truth, which only a simulation knows")
    table.add_column("bucket", justify="right")
    table.add_column(unit, justify="right")
    add_bars(table)
    for bucket, value in enumerate(truth[:MAX_ROWS]):
        table.add_row(str(bucket), str(value), bar(value, max(1, *truth)))
    return table

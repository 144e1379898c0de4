"""One point of Figure 4 for real: devices, sealed reports, three helper processes, and their noisy answers.

The simulation says what every query's sum must be before noise; the helpers say sum plus noise. What is left is the
noise itself, whose root mean square is compared with what its mode promises.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path

import numpy as np
from rich.table import Table

from benchmarks.experiments.on_devices import SITE, OwnerDevice, happenings_of
from benchmarks.experiments.policies import Accounting, CookieMonster
from benchmarks.experiments.simulation import Run, simulate
from benchmarks.experiments.world import Conversions, Epochs, Floats, Ints, World, match
from benchmarks.results.columns import Columns, on_terminal
from device.attribution import LastTouch
from device.report import HelperSetSeal
from device.request import CheckedRequest
from mpc_helpers.local.launcher import Launched, launched, prepare
from protocol.batch import BatchWriter
from protocol.errors import ErrorKind, TrefoilError
from protocol.helper_set import HelperSet
from protocol.noise import NoiseMode, law_of
from protocol.querier.query_folder import ask
from protocol.querier.result import QueryResult
from protocol.report import SealedReport
from protocol.units import DAY


@dataclass(frozen=True, slots=True)
class ModeResult:
    """One noise mode's answers against the sums that the simulation predicts, in units of value."""

    mode: NoiseMode
    predicted: Ints
    truth: Ints
    answers: Ints
    deviation: float
    reports: int
    seconds: float

    @property
    def errors(self) -> Floats:
        """Return the noise: answer minus the sum of the reports."""
        return (self.answers - self.predicted).astype(np.float64)

    @property
    def measured(self) -> float:
        """Return the root mean square of the noise over the queries."""
        return math.sqrt(float(np.mean(self.errors**2)))

    @property
    def sampling_error(self) -> float:
        """Relative standard error of the mean square over n queries: its excess kurtosis is 3/r (`protocol.noise`)."""
        return math.sqrt((2 + 3 / float(law_of(self.mode).shape)) / len(self.answers))

    @property
    def standard_errors_off(self) -> float:
        """Return the distance of the measured mean square from the promised variance, in standard errors."""
        return (self.measured**2 / self.deviation**2 - 1) / self.sampling_error

    @property
    def rmsre(self) -> tuple[float, float]:
        """Return the relative error over the queries: measured, and analytic with the mode's variance."""
        relative = (self.answers - self.truth) / self.truth
        analytic = ((self.truth - self.predicted) ** 2 + self.deviation**2) / self.truth**2
        return math.sqrt(float(np.mean(relative**2))), math.sqrt(float(np.mean(analytic)))

    def as_json(self) -> dict[str, object]:
        measured, analytic = self.rmsre
        return {
            "noise": self.mode.value,
            "queries": len(self.answers),
            "reports": self.reports,
            "noise_sd_promised": self.deviation,
            "noise_rms_measured": self.measured,
            "standard_errors_off": self.standard_errors_off,
            "rmsre_measured": measured,
            "rmsre_analytic": analytic,
            "answers": self.answers.tolist(),
            "sums": self.predicted.tolist(),
            "seconds": self.seconds,
        }


@dataclass(frozen=True, slots=True)
class SealedToday:
    """Seals as devices do, dated `now`: devices run on a simulated clock over months, and helpers admit no report that
    is months old.
    """

    helper_set: HelperSet
    now: int
    reveals: bool = field(default=False, init=False)

    def prepare(self, request: CheckedRequest, now: int, *, debug: bool) -> Callable[[Sequence[int]], SealedReport]:  # noqa: ARG002 - the protocol's shape
        return HelperSetSeal(self.helper_set).prepare(request, self.now, debug=debug)


def run_through_mpc(
    world: World, epoch_days: int, modes: Sequence[NoiseMode], now: int, advance: Callable[[int], None]
) -> list[ModeResult]:
    """Run every query of a world in each noise mode, each time with fresh devices: a report is counted once."""
    world, epochs = _in_whole_values(world), Epochs(epoch_days * DAY)
    run = simulate(world, epochs, [CookieMonster(Accounting.PAPER)]).runs[0]
    with tempfile.TemporaryDirectory(prefix="trefoil-experiment-") as name:
        trio = prepare(Path(name), now=now, sites={SITE: [SITE]})
        with launched(trio) as running:
            return [_one_mode(world, run, epochs, mode, running, now, advance) for mode in modes]


def _one_mode(
    world: World,
    run: Run,
    epochs: Epochs,
    mode: NoiseMode,
    running: Launched,
    now: int,
    advance: Callable[[int], None],
) -> ModeResult:
    started = time.perf_counter()
    folder = running.trio.folder / mode.value
    folder.mkdir()
    _write_batches(world, epochs, SealedToday(running.helper_set, now), folder, advance)
    results = [_ask(running, folder / str(query), mode) for query in range(world.submitted)]
    return ModeResult(
        mode=mode,
        predicted=run.answer,
        truth=run.truth,
        answers=np.asarray([result.answer.histogram[0] for result in results], dtype=np.int64),
        deviation=results[0].query.noise_scale.standard_deviation,
        reports=len(world.conversions.owner),
        seconds=time.perf_counter() - started,
    )


def _ask(running: Launched, path: Path, mode: NoiseMode) -> QueryResult:
    """Run one query on one batch. Raise an error unless every report is counted."""
    result = ask(path, running.helper_set, running.site_key(SITE), noise=mode)
    if result.answer.counted != result.answer.submitted:
        raise TrefoilError(
            f"helpers counted {result.answer.counted} of {result.answer.submitted} reports: {result.answer.rejections}",
            kind=ErrorKind.INCONSISTENT,
        )
    return result


def _write_batches(
    world: World, epochs: Epochs, seal: SealedToday, folder: Path, advance: Callable[[int], None]
) -> None:
    """Simulate every owner on a real device; each sealed report goes into its query's batch."""
    matches = match(world, epochs)
    with ExitStack() as stack:
        writers = [stack.enter_context(BatchWriter(folder / str(query))) for query in range(world.submitted)]
        for _, happenings in groupby(happenings_of(world), key=lambda happening: happening.owner):
            life = OwnerDevice(world, matches, seal, LastTouch())
            for happening in happenings:
                report = life.live(happening)
                if report is not None:
                    writers[int(world.conversions.query[happening.row])].add(report)
                    advance(1)


def _in_whole_values(world: World) -> World:
    """Return the world in its coarsest exact unit: the time to draw noise is proportional to its scale."""
    unit = math.gcd(world.cap, *np.unique(world.conversions.value).tolist())
    done = world.conversions
    smaller = Conversions(done.owner, done.time, done.value // unit, done.query)
    return replace(world, cap=world.cap // unit, conversions=smaller, unit=max(1, world.unit // unit))


COLUMNS: Columns[ModeResult] = {
    "noise": lambda result: result.mode.value,
    "queries": lambda result: len(result.answers),
    "promised sd": lambda result: f"{result.deviation:.2f}",
    "measured": lambda result: f"{result.measured:.2f}",
    "std. errors off": lambda result: f"{result.standard_errors_off:+.2f}",
    "RMSRE": lambda result: f"{result.rmsre[0]:.4f}",
    "analytic": lambda result: f"{result.rmsre[1]:.4f}",
    "seconds": lambda result: f"{result.seconds:.0f}",
}


def mpc_table(results: Sequence[ModeResult]) -> Table:
    return on_terminal("through devices and three helpers", COLUMNS, results, words={"noise"})

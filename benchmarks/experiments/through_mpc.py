"""One point of Figure 4 for real: devices, sealed reports, three helper processes, and their noisy answers.

The simulation says what every query's sum must be before noise; the helpers say sum plus noise. What is left is the
noise itself, whose root mean square is compared with what its mode promises.
"""

from __future__ import annotations

import asyncio
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from rich.table import Table

from benchmarks.experiments.policies import Accounting, CookieMonster
from benchmarks.experiments.simulation import Run, simulate
from benchmarks.experiments.world import Conversions, Epochs, Floats, Ints, World
from device.conversion import AttributionRequest
from device.device import Device
from device.epoch import EpochCalendar
from device.events import Impression, ImpressionOptions
from device.limits import DeviceLimits
from device.report import HelperSetSeal
from device.request import CheckedRequest
from device.stores.memory_store import MemoryStore
from mpc_helpers.local.launcher import Launched, launched, prepare
from protocol.batch import BatchReader, BatchWriter
from protocol.cli.console import plain_table
from protocol.errors import ErrorKind, TrefoilError
from protocol.helper_set import HelperSet
from protocol.keys import load_identity
from protocol.noise import NoiseMode, law_of
from protocol.querier.ask import Querier
from protocol.querier.result import QueryResult
from protocol.querier.saved_query import QueryOptions, make_query
from protocol.report import SealedReport
from protocol.units import DAY, MICROS

SHOP = "shop.example"
PUBLISHER = "news.example"
# Filters that all sites share are not part of the paper's accounting.
UNBOUNDED = 2**52
# How far back a device remembers: the whole experiment.
MEMORY_DAYS = 365


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
        """Return the comparison as it is written to JSON."""
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
        trio = prepare(Path(name), now=now, sites={SHOP: [SHOP]})
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
    _write_batches(world, epochs, SealedToday(running.trio.helper_set, now), folder, advance)
    answers = [_ask(running, folder / str(query), mode, now) for query in range(world.submitted)]
    return ModeResult(
        mode=mode,
        predicted=run.answer,
        truth=run.truth,
        answers=np.asarray([answer for answer, _ in answers], dtype=np.int64),
        deviation=answers[0][1],
        reports=len(world.conversions.owner),
        seconds=time.perf_counter() - started,
    )


def _ask(running: Launched, path: Path, mode: NoiseMode, now: int) -> tuple[int, float]:
    """Run one query on one batch. Return the noisy sum and the standard deviation of its noise."""
    # The helpers live by the real clock, which has gone on since `now`.
    result = ask_launched(running, path, SHOP, mode, max(now, _clock()))
    return result.answer.histogram[0], result.query.noise_scale.standard_deviation


def ask_launched(running: Launched, path: Path, site: str, mode: NoiseMode, now: int) -> QueryResult:
    """Run one query of `site` on one batch. Raise an error unless every report is counted."""
    helper_set, key = running.trio.helper_set, load_identity(running.trio.site_key_path(site))
    batch = BatchReader(path)
    query = make_query(batch, QueryOptions(noise=mode), helper_set, key, now)
    result = asyncio.run(Querier(helper_set).ask(query, batch))
    if result.answer.counted != len(batch):
        raise TrefoilError(
            f"helpers counted {result.answer.counted} of {len(batch)} reports: {result.answer.rejections}",
            kind=ErrorKind.INCONSISTENT,
        )
    return result


def _write_batches(
    world: World, epochs: Epochs, seal: SealedToday, folder: Path, advance: Callable[[int], None]
) -> None:
    """Simulate every owner on a real device; each sealed report goes into its query's batch."""
    with ExitStack() as stack:
        writers = [stack.enter_context(BatchWriter(folder / str(query))) for query in range(world.submitted)]
        for owner in range(world.owners):
            done = slice(world.conversion_starts[owner], world.conversion_starts[owner + 1])
            queries = world.conversions.query[done].tolist()
            for query, report in zip(queries, _live(world, owner, epochs, seal), strict=True):
                writers[query].add(report)
            advance(len(queries))


def _live(world: World, owner: int, epochs: Epochs, seal: SealedToday) -> list[SealedReport]:
    """Replay one person's impressions and conversions in time order, and return the reports."""
    seen = slice(world.impression_starts[owner], world.impression_starts[owner + 1])
    done = slice(world.conversion_starts[owner], world.conversion_starts[owner + 1])
    times = [(moment, -1) for moment in world.impressions.time[seen].tolist()]
    times += [(moment, place) for place, moment in enumerate(world.conversions.time[done].tolist())]
    clock = [0]
    device, calendar = _device(epochs, seal, clock)
    reports = []
    # At the same second an impression comes first: a window includes its last second.
    for moment, place in sorted(times):
        clock[0] = moment
        if place < 0:
            device.save_impression(PUBLISHER, ImpressionOptions(0))
        else:
            row = int(world.conversion_starts[owner]) + place
            reports.append(device.measure(SHOP, _request(world, row, calendar)))
    return reports


def _device(epochs: Epochs, seal: SealedToday, clock: list[int]) -> tuple[Device[SealedReport], EpochCalendar]:
    store = MemoryStore(debug=False)
    store.fix_epoch_start(epochs.anchor)
    limits = DeviceLimits(
        global_budget=UNBOUNDED,
        impression_site_quota=UNBOUNDED,
        side_query_quota=UNBOUNDED,
        epoch_days=epochs.seconds // DAY,
        max_lookback_days=MEMORY_DAYS,
    )
    device = Device(store, seal, clock=lambda: clock[0], limits=limits)
    return device, EpochCalendar(epochs.anchor, epochs.seconds)


def _request(world: World, row: int, calendar: EpochCalendar) -> AttributionRequest:
    moment = int(world.conversions.time[row])
    earliest = moment - world.window

    def relevant(impression: Impression) -> bool:
        return impression.time >= earliest

    return AttributionRequest(
        epochs=calendar.window(earliest, moment),
        epsilon=int(world.queries.epsilon[world.conversions.query[row]]) / MICROS,
        buckets=1,
        value=int(world.conversions.value[row]),
        query_sensitivity=world.cap,
        relevant=relevant,
    )


def _in_whole_values(world: World) -> World:
    """Return the world in its coarsest exact unit: the time to draw noise is proportional to its scale."""
    unit = math.gcd(world.cap, *np.unique(world.conversions.value).tolist())
    done = world.conversions
    smaller = Conversions(done.owner, done.time, done.value // unit, done.query)
    return replace(world, cap=world.cap // unit, conversions=smaller, unit=max(1, world.unit // unit))


def _clock() -> int:
    return int(time.time())  # noqa: TID251 - helpers are processes of their own, with the real clock


def mpc_table(results: Sequence[ModeResult]) -> Table:
    """Return a table of promised and measured noise."""
    columns = ("noise", "queries", "promised sd", "measured", "std. errors off", "RMSRE", "analytic", "seconds")
    table = plain_table("through devices and three helpers", columns, words={"noise"})
    for result in results:
        measured, analytic = result.rmsre
        table.add_row(
            result.mode.value,
            str(len(result.answers)),
            f"{result.deviation:.2f}",
            f"{result.measured:.2f}",
            f"{result.standard_errors_off:+.2f}",
            f"{measured:.4f}",
            f"{analytic:.4f}",
            f"{result.seconds:.0f}",
        )
    return table

"""What the work of a call costs: `measure_conversion` for many impressions, for few, and for null reports, in time.

Every call is the real one: a durable database, sealing to three helpers, a window of twenty epochs. All calls of all
cases are made in an order that is drawn: a busy moment falls on all of them alike, and which case came before says
nothing about which comes next. First without ticks, one
call after another; then as a caller sees it, in several processes at once, since such a call is nearly all waiting.
What a caller could find out in harder ways is asked in `device_watching`.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.table import Table

from benchmarks.bench.area import Area, Samples, area_between
from benchmarks.bench.device_watching import (
    WEEK,
    StillClock,
    Watched,
    family_of,
    tasks_of,
    watch_all,
    watching_table,
)
from benchmarks.bench.lanes import in_lanes
from benchmarks.bench.report_cost import BENCH_TIME, Helpers
from benchmarks.seeded import generator
from device.conversion import ConversionOptions
from device.device import Device
from device.impression import ImpressionOptions
from device.limits import TREFOIL_SERVICE, DeviceLimits
from device.report import HelperSetSeal
from device.sqlite_store import SqliteStore
from device.tick import AtOnce, Ticker, Ticks
from protocol.helper_set import HelperSet
from protocol.report import SealedReport
from protocol.seconds import DAY, HOUR

TimingsByCase = Mapping["Case", Samples]

BUCKETS = 128
PUBLISHERS = 5
SITE = "shop.example"
# So little that thousands of calls leave the budget standing.
EPSILON = 0.0001
WARM_UP = 20
ROUNDS_PER_TASK = 50
# The paper measured 9.1 ms at 10 impressions and 57.3 ms at 100, and left the side channel open.
PAPER_RATIO = 6.3


class Window(NamedTuple):
    """How far back the calls look: so many epochs, the last of which has run for three days."""

    epochs: int

    @property
    def days(self) -> int:
        return 7 * (self.epochs - 1)

    @property
    def limits(self) -> DeviceLimits:
        return DeviceLimits(max_lookback_days=max(self.days, DeviceLimits().max_lookback_days))


LONG = Window(20)
# Within the standard's month, whose tick is the one that people's devices have.
SHORT = Window(4)
NOW = BENCH_TIME + 3 * DAY


class Case(Enum):
    """What the caller would like to find out."""

    TEN = "10"
    THIRTY = "30"
    HUNDRED = "100"
    NOTHING_FOUND = "null: nothing found"
    NO_BUDGET = "null: no budget"
    SWITCHED_OFF = "null: switched off"

    @property
    def impressions(self) -> int:
        """How many the device has. Those of a null report are as many as of the real one it is compared with."""
        return int(self.value) if self in REAL else 30


REAL = (Case.TEN, Case.THIRTY, Case.HUNDRED)
NULL = (Case.NOTHING_FOUND, Case.NO_BUDGET, Case.SWITCHED_OFF)


@contextmanager
def device_for(
    case: Case, folder: Path, helper_set: HelperSet, window: Window = LONG, ticker: Ticker | None = None
) -> Iterator[Device[SealedReport]]:
    """A device in the state of `case`, on a database of its own."""
    path, clock, limits = folder / f"{case.name}.db", StillClock(BENCH_TIME), window.limits
    # Epoch 0 begins at BENCH_TIME, so that the window holds exactly its number of epochs.
    SqliteStore.create(path, epoch_length=WEEK, epoch_start=BENCH_TIME)
    with closing(SqliteStore.open(path, epoch_length=WEEK, clock=clock)) as store:
        quick = Device(store, HelperSetSeal(helper_set), clock=clock, limits=limits)
        for clock.now, site in sorted(impressions(case.impressions, window)):
            quick.save_impression(site, ImpressionOptions(clock.now % BUCKETS, match_value=1, lifetime_days=200))
        clock.now = NOW
        if case is Case.NO_BUDGET:
            quick.measure_conversion(SITE, options(Case.THIRTY, window, epsilon=1.0))
        if case is Case.SWITCHED_OFF:
            quick.disable()
        for _ in range(WARM_UP):
            quick.measure_conversion(SITE, options(case, window))
        yield Device(store, HelperSetSeal(helper_set), clock=clock, limits=limits, ticker=ticker or AtOnce())


def impressions(count: int, window: Window = LONG) -> Iterator[tuple[int, str]]:
    """When and where: evenly over the epochs, and over the same publishers whatever the count."""
    for number in range(count):
        epoch = number % window.epochs
        day = 2 * DAY if epoch == 0 else 4 * DAY
        yield BENCH_TIME - epoch * WEEK + day + number // window.epochs * HOUR, f"news{number % PUBLISHERS}.example"


def options(case: Case, window: Window = LONG, epsilon: float = EPSILON) -> ConversionOptions:
    """The call. Where nothing is to be found it asks for another match value; all else is the same."""
    wanted = 2 if case is Case.NOTHING_FOUND else 1
    return ConversionOptions(
        TREFOIL_SERVICE, BUCKETS, epsilon=epsilon, lookback_days=window.days, match_values=[wanted]
    )


def time_rounds(
    folder: Path, rounds: int, seed: int, *, ticking: bool, advance: Callable[[], None] | None = None
) -> TimingsByCase:
    """Seconds per call, `rounds` of each case, taking turns. The databases go into a new folder in `folder`."""
    helper_set, window = Helpers.fresh().helper_set, SHORT if ticking else LONG
    draw, cases = generator(seed), list(Case)
    timings = {case: np.empty(rounds) for case in cases}
    with tempfile.TemporaryDirectory(dir=folder) as own, ExitStack() as stack:
        devices = {}
        for case in cases:
            ticker = Ticks(window.limits.tick_seconds) if ticking else AtOnce()
            devices[case] = stack.enter_context(device_for(case, Path(own), helper_set, window, ticker))
        for number, place in enumerate(draw.permutation(rounds * len(cases))):
            round_number, case = place % rounds, cases[place // rounds]
            timings[case][round_number] = time_call(devices[case], options(case, window))
            if advance and number % len(cases) == 0:
                advance()
    return timings


def time_call(device: Device[SealedReport], asked: ConversionOptions) -> float:
    """One call, as its caller sees it."""
    start = time.perf_counter()
    device.measure_conversion(SITE, asked)
    return time.perf_counter() - start


class TickingTask(NamedTuple):
    """Some rounds with ticks, for one lane."""

    folder: Path
    rounds: int
    seed: int


def _ticking(task: TickingTask) -> TimingsByCase:
    return time_rounds(task.folder, task.rounds, task.seed, ticking=True)


def time_ticking(folder: Path, samples: int, lanes: int, seed: int, advance: Callable[[int], None]) -> TimingsByCase:
    """The same with ticks, in `lanes` processes at once, each with databases of its own."""
    rounds = [min(ROUNDS_PER_TASK, samples - done) for done in range(0, samples, ROUNDS_PER_TASK)]
    tasks = [TickingTask(folder, count, seed + number) for number, count in enumerate(rounds, start=1)]
    parts: list[TimingsByCase] = []
    for task, part in in_lanes(_ticking, tasks, lanes):
        parts.append(part)
        advance(task.rounds)
    return {case: np.concatenate([part[case] for part in parts]) for case in Case}


@dataclass(frozen=True, slots=True)
class DeviceTiming:
    """All runs. Times without ticks are what a call costs; with them, what a caller can see."""

    before: TimingsByCase
    after: TimingsByCase
    watched: Watched
    lanes: int

    def to_json(self) -> dict[str, object]:
        """Top-level times and ratios are without ticks; areas under the curve are with them."""
        before, after = summary(self.before), summary(self.after)
        family = family_of(len(areas(self.after)))
        return {
            "median_ms": before["median_ms"],
            "p99_ms": before["p99_ms"],
            "ratio_100_to_10": before["ratio_100_to_10"],
            "ratio_real_to_null": before["ratio_real_to_null"],
            "auc_100_vs_10": after["auc_100_vs_10"],
            "auc_real_vs_null": after["auc_real_vs_null"],
            "paper_ratio": PAPER_RATIO,
            "samples": len(self.after[Case.TEN]),
            "tick_ms": SHORT.limits.tick_seconds * 1000,
            "processes_after_tick": self.lanes,
            "before_tick": before,
            "after_tick": after,
            "questions": family,
            "watching": {question.value: told.to_json(family) for question, told in self.watched.items()},
        }


def areas(timings: TimingsByCase) -> dict[str, Area]:
    """The questions that the six cases answer."""
    asked = {"100 or 10 impressions": (Case.TEN, Case.HUNDRED)}
    asked |= {f"real or {case.value}": (case, Case.THIRTY) for case in NULL}
    return {question: area_between(timings[first], timings[second]) for question, (first, second) in asked.items()}


def summary(timings: TimingsByCase) -> dict[str, object]:
    """One run. `null` pools the three kinds of null reports; the area for them is that of the most telling kind."""
    null = np.concatenate([timings[case] for case in NULL])
    named = {case.value: timings[case] for case in Case} | {"null": null}
    median = {name: float(np.median(values) * 1000) for name, values in named.items()}
    told = areas(timings)
    # Whichever of the two is slower: 0.5 to 1.
    either_way = {question: max(area.value, 1 - area.value) for question, area in told.items()}
    return {
        "median_ms": median,
        "p99_ms": {name: float(np.percentile(values, 99) * 1000) for name, values in named.items()},
        "ratio_100_to_10": median["100"] / median["10"],
        "ratio_real_to_null": median["30"] / median["null"],
        "auc_100_vs_10": either_way["100 or 10 impressions"],
        "auc_real_vs_null": max(either_way[f"real or {case.value}"] for case in NULL),
        "auc_real_vs_null_by_kind": {case.value: either_way[f"real or {case.value}"] for case in NULL},
        "areas": {question: area.to_json(family_of(len(told))) for question, area in told.items()},
    }


def tables(result: DeviceTiming) -> list[Table]:
    """What calls cost, and what their time tells."""
    shown = Table(title="measure_conversion, milliseconds", caption=_ratio(result))
    for column in ("case", "median", "p99", "median, with ticks", "p99, with ticks"):
        shown.add_column(column, justify="left" if column == "case" else "right")
    for case in Case:
        figures = [
            f"{statistic * 1000:.3f}"
            for timings in (result.before, result.after)
            for statistic in (np.median(timings[case]), np.percentile(timings[case], 99))
        ]
        shown.add_row(case.value if case in NULL else f"{case.value} impressions", *figures)
    return [shown, watching_table(areas(result.after), areas(result.before), result.watched)]


def _ratio(result: DeviceTiming) -> str:
    medians = [np.median(result.before[case]) for case in (Case.HUNDRED, Case.TEN)]
    return f"100 to 10 impressions: {medians[0] / medians[1]:.2f} times the time (paper: {PAPER_RATIO})"


def measure(samples: int, lanes: int, seed: int, advance: Callable[[int], None]) -> DeviceTiming:
    """All runs, `samples` calls of each case in each of the first two, and as many ticks for each harder question."""
    with tempfile.TemporaryDirectory(prefix="trefoil-bench-") as folder:
        before = time_rounds(Path(folder), samples, seed, ticking=False, advance=lambda: advance(1))
        after = time_ticking(Path(folder), samples, lanes, seed, advance)
        watched = watch_all(Path(folder), samples, max(1, lanes // 4), seed, advance)
    return DeviceTiming(before, after, watched, lanes)


def steps(samples: int) -> int:
    """How often `measure` reports that it has got on."""
    return 2 * samples + tasks_of(samples)

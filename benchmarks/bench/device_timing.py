"""What the time of a call tells its caller: `measure_conversion` for many impressions, for few, and for null reports.

Every call is the real one: a durable database, sealing to three helpers, a window of twenty epochs. Cases take turns
in an order drawn afresh for every round, so that a busy moment falls on all of them alike. First without the tick, one
call after another; then as a caller sees it, with the tick, in several processes at once, since such a call is nearly
all waiting. How well a caller can tell two cases apart is the area under the ROC curve: 0.5 is a coin, 1 is certainty.
"""

from __future__ import annotations

import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from enum import Enum
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import numpy.typing as npt
from rich.table import Table

from benchmarks.bench.report_cost import BENCH_TIME, Helpers
from benchmarks.experiments.small_worlds import Clock
from benchmarks.seeded import generator
from device.coins import DeviceCoins
from device.conversion import ConversionOptions
from device.device import Device
from device.impression import ImpressionOptions
from device.limits import TREFOIL_SERVICE, DeviceLimits
from device.report import HelperSetSeal
from device.sqlite_store import SqliteStore
from device.tick import DEFAULT_PERIOD, Tick, no_tick
from protocol.helper_set import HelperSet
from protocol.report import SealedReport
from protocol.seconds import DAY, HOUR

Timings = npt.NDArray[np.float64]
TimingsByCase = Mapping["Case", Timings]

EPOCHS = 20
BUCKETS = 128
PUBLISHERS = 5
SITE = "shop.example"
LOOKBACK_DAYS = 7 * (EPOCHS - 1)
LIMITS = DeviceLimits(max_lookback_days=LOOKBACK_DAYS)
WEEK = LIMITS.epoch_length
NOW = BENCH_TIME + 3 * DAY
# So little that thousands of calls leave the budget standing.
EPSILON = 0.0001
WARM_UP = 20
ROUNDS_PER_TASK = 50
# The paper measured 9.1 ms at 10 impressions and 57.3 ms at 100, and left the side channel open.
PAPER_RATIO = 6.3


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
    case: Case, folder: Path, helper_set: HelperSet, tick: Callable[[], Callable[[], None]]
) -> Iterator[Device[SealedReport]]:
    """A device in the state of `case`, on a database of its own."""
    path, clock = folder / f"{case.name}.db", Clock(BENCH_TIME)
    SqliteStore.create(path, epoch_length=WEEK)
    coins = DeviceCoins(epoch_start=lambda: 0.0)
    with closing(SqliteStore.open(path, epoch_length=WEEK, clock=clock)) as store:
        quick = Device(store, HelperSetSeal(helper_set), clock=clock, limits=LIMITS, coins=coins)
        # Epoch 0 begins at BENCH_TIME, so that the window holds exactly EPOCHS epochs.
        quick.calendar()
        for clock.now, site in sorted(impressions(case.impressions)):
            quick.save_impression(site, ImpressionOptions(clock.now % BUCKETS, match_value=1, lifetime_days=200))
        clock.now = NOW
        if case is Case.NO_BUDGET:
            quick.measure_conversion(SITE, options(Case.THIRTY, epsilon=1.0))
        if case is Case.SWITCHED_OFF:
            quick.disable()
        for _ in range(WARM_UP):
            quick.measure_conversion(SITE, options(case))
        yield Device(store, HelperSetSeal(helper_set), clock=clock, limits=LIMITS, coins=coins, tick=tick)


def impressions(count: int) -> Iterator[tuple[int, str]]:
    """When and where: evenly over the epochs, and over the same publishers whatever the count."""
    for number in range(count):
        epoch = number % EPOCHS
        day = 2 * DAY if epoch == 0 else 4 * DAY
        yield BENCH_TIME - epoch * WEEK + day + number // EPOCHS * HOUR, f"news{number % PUBLISHERS}.example"


def options(case: Case, epsilon: float = EPSILON) -> ConversionOptions:
    """The call. Where nothing is to be found it asks for another match value; all else is the same."""
    wanted = 2 if case is Case.NOTHING_FOUND else 1
    return ConversionOptions(
        TREFOIL_SERVICE, BUCKETS, epsilon=epsilon, lookback_days=LOOKBACK_DAYS, match_values=[wanted]
    )


def time_rounds(
    folder: Path, rounds: int, seed: int, *, ticking: bool, advance: Callable[[], None] | None = None
) -> TimingsByCase:
    """Seconds per call, `rounds` of each case, taking turns. The databases go into a new folder in `folder`."""
    helper_set = Helpers.fresh().helper_set
    tick = Tick() if ticking else no_tick
    draw, cases = generator(seed), list(Case)
    timings = {case: np.empty(rounds) for case in cases}
    with tempfile.TemporaryDirectory(dir=folder) as own, ExitStack() as stack:
        devices = {case: stack.enter_context(device_for(case, Path(own), helper_set, tick)) for case in cases}
        for number in range(rounds):
            for place in draw.permutation(len(cases)):
                case = cases[place]
                timings[case][number] = time_call(devices[case], options(case))
            if advance:
                advance()
    return timings


def time_call(device: Device[SealedReport], asked: ConversionOptions) -> float:
    """One call, as its caller sees it."""
    start = time.perf_counter()
    device.measure_conversion(SITE, asked)
    return time.perf_counter() - start


def time_ticking(folder: Path, samples: int, lanes: int, seed: int, advance: Callable[[int], None]) -> TimingsByCase:
    """The same with the tick, in `lanes` processes at once, each with databases of its own."""
    tasks = [min(ROUNDS_PER_TASK, samples - done) for done in range(0, samples, ROUNDS_PER_TASK)]
    parts: list[TimingsByCase] = []
    with ProcessPoolExecutor(lanes, mp_context=get_context("spawn"), initializer=_end_when_interrupted) as pool:
        running = {
            pool.submit(time_rounds, folder, rounds, seed + number, ticking=True): rounds
            for number, rounds in enumerate(tasks, start=1)
        }
        try:
            for done in as_completed(running):
                parts.append(done.result())
                advance(running[done])
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    return {case: np.concatenate([part[case] for part in parts]) for case in Case}


def _end_when_interrupted() -> None:
    """Ctrl-C reaches every process of a run; only the first has something to say about it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def area_under_curve(first: Timings, second: Timings) -> float:
    """How well a threshold on the time tells the two apart, whichever is slower: 0.5 to 1 (Mann and Whitney)."""
    values = np.concatenate([first, second])
    order = np.argsort(values, kind="stable")
    ranks = np.empty(len(values))
    ranks[order] = np.arange(1, len(values) + 1)
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    mean_ranks = np.bincount(inverse, ranks) / counts
    statistic = mean_ranks[inverse][: len(first)].sum() - len(first) * (len(first) + 1) / 2
    area = float(statistic / (len(first) * len(second)))
    return max(area, 1 - area)


@dataclass(frozen=True, slots=True)
class DeviceTiming:
    """Both runs. Times without the tick are what a call costs; with it, what a caller can see."""

    before: TimingsByCase
    after: TimingsByCase
    lanes: int

    def to_json(self) -> dict[str, object]:
        """Top-level times and ratios are before the tick; areas under the curve are after it."""
        before, after = summary(self.before), summary(self.after)
        return {
            "median_ms": before["median_ms"],
            "p99_ms": before["p99_ms"],
            "ratio_100_to_10": before["ratio_100_to_10"],
            "ratio_real_to_null": before["ratio_real_to_null"],
            "auc_100_vs_10": after["auc_100_vs_10"],
            "auc_real_vs_null": after["auc_real_vs_null"],
            "paper_ratio": PAPER_RATIO,
            "samples": len(self.after[Case.TEN]),
            "tick_ms": DEFAULT_PERIOD * 1000,
            "processes_after_tick": self.lanes,
            "before_tick": before,
            "after_tick": after,
        }


def summary(timings: TimingsByCase) -> dict[str, object]:
    """One run. `null` pools the three kinds of null reports; the area for them is that of the most telling kind."""
    null = np.concatenate([timings[case] for case in NULL])
    named = {case.value: timings[case] for case in Case} | {"null": null}
    median = {name: float(np.median(values) * 1000) for name, values in named.items()}
    areas = {case.value: area_under_curve(timings[Case.THIRTY], timings[case]) for case in NULL}
    return {
        "median_ms": median,
        "p99_ms": {name: float(np.percentile(values, 99) * 1000) for name, values in named.items()},
        "ratio_100_to_10": median["100"] / median["10"],
        "ratio_real_to_null": median["30"] / median["null"],
        "auc_100_vs_10": area_under_curve(timings[Case.HUNDRED], timings[Case.TEN]),
        "auc_real_vs_null": max(areas.values()),
        "auc_real_vs_null_by_kind": areas,
    }


def table(result: DeviceTiming) -> Table:
    """Both runs side by side."""
    shown = Table(title="measure_conversion, milliseconds", caption=verdict(result))
    for column in ("case", "median", "p99", "median, after the tick", "p99, after the tick"):
        shown.add_column(column, justify="left" if column == "case" else "right")
    for case in Case:
        figures = [
            f"{statistic * 1000:.3f}"
            for timings in (result.before, result.after)
            for statistic in (np.median(timings[case]), np.percentile(timings[case], 99))
        ]
        shown.add_row(case.value if case in NULL else f"{case.value} impressions", *figures)
    return shown


def verdict(result: DeviceTiming) -> str:
    """What it comes to, in a line for each of the two questions."""
    lines: Sequence[tuple[str, str]] = (("100 or 10 impressions", "100_vs_10"), ("real or null", "real_vs_null"))
    before, after = summary(result.before), summary(result.after)
    told = [
        f"{what}: area {before[f'auc_{key}']:.3f} before the tick, {after[f'auc_{key}']:.3f} after"
        for what, key in lines
    ]
    ratio = f"100 to 10 impressions: {before['ratio_100_to_10']:.2f} times the time (paper: {PAPER_RATIO})"
    return "\n".join([ratio, *told])


def measure(samples: int, lanes: int, seed: int, advance: Callable[[int], None]) -> DeviceTiming:
    """Both runs, `samples` calls of each case in each."""
    with tempfile.TemporaryDirectory(prefix="trefoil-bench-") as folder:
        before = time_rounds(Path(folder), samples, seed, ticking=False, advance=lambda: advance(1))
        after = time_ticking(Path(folder), samples, lanes, seed, advance)
    return DeviceTiming(before, after, lanes)

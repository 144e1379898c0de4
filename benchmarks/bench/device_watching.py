"""What a caller who watches the time can tell, asked the hard way: the fullest device against an empty one.

A device that holds as much as its limits allow, or nothing; one conversion or one impression at a time; many at once
by one caller or by many; saving while another site measures, or leaving while it does; measurement on or off. For each
question two devices take turns in an order drawn afresh for every round, and the area under the curve says how well the
times tell them apart. A caller has one device before it and asks it again and again, so a round is some calls in a row
on one device. The first is not counted: it comes after the other device. Two questions are controls, asked in the same
way of two devices that are alike: what they find is the measurement's own.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from threading import Barrier
from typing import NamedTuple

import numpy as np
from rich.table import Table

from benchmarks.bench.area import Area, Samples, area_between
from benchmarks.bench.lanes import in_lanes
from benchmarks.bench.report_cost import BENCH_TIME, Helpers
from benchmarks.seeded import generator
from device.conversion import ConversionOptions
from device.device import Device
from device.impression import Impression, ImpressionOptions, SavedImpression
from device.limits import TREFOIL_SERVICE, DeviceLimits
from device.report import HelperSetSeal
from device.sqlite_store import SqliteStore
from device.tick import Ticks
from protocol.report import SealedReport
from protocol.seconds import DAY

BUCKETS = 128
# Calls that come at the same moment.
AT_ONCE = 12
LIMITS = DeviceLimits()
WEEK = LIMITS.epoch_length
# A month that touches six weeks, the most it can: half a day of the first, a day and a half of the last.
NOW = BENCH_TIME + 5 * WEEK + 3 * DAY // 2
EPSILON = 0.00002
# Calls in a row on one device where calls come one at a time.
IN_A_ROW = 5
TICKS_PER_TASK = 25


class StillClock:
    """A clock that stands where it is put."""

    def __init__(self, now: int) -> None:
        self.now = now

    def __call__(self) -> int:
        return self.now


class Holding(Enum):
    """What a device holds when it is asked."""

    NOTHING = "nothing"
    AS_MUCH_AS_IT_CAN = "as much as it can"
    SWITCHED_OFF = "as much as it can, switched off"


class Question(Enum):
    """What the caller would like to know, from how long its own calls take."""

    MEASURE = "a conversion: a full device, or an empty one"
    MEASURE_OFF = "a conversion: switched on, or off"
    SAVE = "an impression: a full device, or an empty one"
    SAVE_OFF = "an impression: switched on, or off"
    ONE_CALLER = "12 conversions at once by one caller: full, or empty"
    MANY_CALLERS = "12 conversions at once by 12 callers: full, or empty"
    SAVE_MEANWHILE = "an impression while another site measures: full, or empty"
    SAVE_BEFORE = "an impression that leaves while another site measures: full, or empty"
    CONTROL = "control, a conversion: two full devices"
    CONTROL_AT_ONCE = "control, 12 conversions at once by 12 callers: two full devices"

    @property
    def is_control(self) -> bool:
        """Whether there is nothing to tell."""
        return self in (Question.CONTROL, Question.CONTROL_AT_ONCE)

    @property
    def holdings(self) -> tuple[Holding, Holding]:
        """The two devices to tell apart."""
        off = self in (Question.MEASURE_OFF, Question.SAVE_OFF)
        other = Holding.AS_MUCH_AS_IT_CAN if self.is_control else Holding.NOTHING
        return (Holding.SWITCHED_OFF if off else other), Holding.AS_MUCH_AS_IT_CAN

    @property
    def turns(self) -> int:
        """How many ticks one round takes for each device, so that every question gets the same time."""
        at_once = {Question.ONE_CALLER: AT_ONCE, Question.MANY_CALLERS: AT_ONCE // 2}
        at_once[Question.CONTROL_AT_ONCE] = AT_ONCE // 2
        return at_once.get(self, IN_A_ROW)


@dataclass(frozen=True, slots=True)
class Told:
    """One question's answer: the times of all calls by round, for both devices, and how well they can be told apart."""

    first: Samples
    second: Samples

    @property
    def area(self) -> Area:
        return area_between(self.first, self.second)

    def to_json(self, family: int) -> dict[str, object]:
        medians = [float(np.median(times) * 1000) for times in (self.first, self.second)]
        return {"rounds": len(self.first), "calls": self.first.size, "median_ms": medians, **self.area.to_json(family)}


Watched = Mapping[Question, Told]


@contextmanager
def device_holding(holding: Holding, path: Path) -> Iterator[Device[SealedReport]]:
    """A device with ticks, in the state of `holding`."""
    clock = StillClock(NOW)
    SqliteStore.create(path, epoch_length=WEEK, epoch_start=BENCH_TIME)
    with closing(SqliteStore.open(path, epoch_length=WEEK, clock=clock)) as store:
        if holding is not Holding.NOTHING:
            fill(store)
        device = Device(
            store,
            HelperSetSeal(Helpers.fresh().helper_set),
            clock=clock,
            limits=LIMITS,
            ticker=Ticks(LIMITS.tick_seconds),
        )
        if holding is Holding.SWITCHED_OFF:
            device.disable()
        measure(device)
        save(device)
        yield device


def fill(store: SqliteStore) -> None:
    """As many impressions as six weeks may hold, from as many sites, all of them relevant."""
    buyers = frozenset([*(f"other{place}.example" for place in range(8)), "shop.example"])
    with store.transaction():
        for week in range(6):
            # All of it within the month: late in the first week, early in the others.
            begins = BENCH_TIME + week * WEEK + (WEEK - DAY // 2 if week == 0 else 0)
            for number in range(LIMITS.max_impressions_per_epoch):
                site, moment = f"news{week}-{number % LIMITS.max_sites_per_epoch}.example", begins + number * 20
                seen = Impression(moment, site, site, number % BUCKETS, 0, number * 7 % 11)
                store.save(SavedImpression(seen, moment + 30 * DAY, buyers, frozenset()))


def measure(device: Device[SealedReport], caller: str | None = None) -> None:
    asked = ConversionOptions(TREFOIL_SERVICE, BUCKETS, epsilon=EPSILON, credit=[1.0] * 10)
    device.measure_conversion("shop.example", asked, intermediary=caller)


def save(device: Device[SealedReport]) -> None:
    device.save_impression("news5-0.example", ImpressionOptions(3))


class Caller:
    """Makes the calls of one question, and times each."""

    def __init__(self, question: Question) -> None:
        self._question = question
        self._threads = ThreadPoolExecutor(AT_ONCE)

    def round(self, device: Device[SealedReport]) -> list[float]:
        """The seconds that each call took, where several came together in the order of their answers."""
        match self._question:
            case Question.MEASURE | Question.MEASURE_OFF | Question.CONTROL:
                return _in_a_row(lambda: _timed(lambda: measure(device)))
            case Question.SAVE | Question.SAVE_OFF:
                return _in_a_row(lambda: _timed(lambda: save(device)))
            case Question.ONE_CALLER:
                return self._together(lambda _: measure(device))
            case Question.MANY_CALLERS | Question.CONTROL_AT_ONCE:
                return self._together(lambda number: measure(device, f"ads{number}.example"))
            case Question.SAVE_MEANWHILE:
                return _in_a_row(lambda: self._beside_another(device, 0.0))
            case Question.SAVE_BEFORE:
                # Its work would be done when the impression leaves, if it could be.
                return _in_a_row(lambda: self._beside_another(device, LIMITS.tick_seconds - LIMITS.work_seconds / 2))

    def _beside_another(self, device: Device[SealedReport], later: float) -> float:
        """An impression, while another site measures, so much `later`. What its call takes is its own business."""

        def other_site() -> None:
            time.sleep(later)
            measure(device, "ads.example")

        other = self._threads.submit(other_site)
        taken = _timed(lambda: save(device))
        other.result()
        return taken

    def _together(self, call: Callable[[int], None]) -> list[float]:
        """When each call was answered, from when the first of them was made: that is what one caller of all can see."""
        ready = Barrier(AT_ONCE)

        def one(number: int) -> tuple[float, float]:
            ready.wait()
            begun = time.perf_counter()
            call(number)
            return begun, time.perf_counter()

        began, ended = zip(*self._threads.map(one, range(AT_ONCE)), strict=True)
        return sorted(end - min(began) for end in ended)

    def close(self) -> None:
        self._threads.shutdown()


def _in_a_row(call: Callable[[], float]) -> list[float]:
    """The times of some calls, without the first."""
    return [call() for _ in range(IN_A_ROW)][1:]


def _timed(call: Callable[[], object]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


class WatchTask(NamedTuple):
    """Some rounds of one question, for one lane."""

    folder: Path
    question: Question
    rounds: int
    seed: int


def watch(task: WatchTask) -> Told:
    """The rounds of one task, on two devices of its own."""
    draw = generator(task.seed)
    times: tuple[list[list[float]], list[list[float]]] = ([], [])
    with tempfile.TemporaryDirectory(dir=task.folder) as own, closing(Caller(task.question)) as caller:
        first, second = task.question.holdings
        with device_holding(first, Path(own) / "1.db") as one, device_holding(second, Path(own) / "2.db") as other:
            for _ in range(task.rounds):
                for place in draw.permutation(2):
                    times[place].append(caller.round((one, other)[place]))
    return Told(np.array(times[0]), np.array(times[1]))


def watch_all(folder: Path, samples: int, lanes: int, seed: int, advance: Callable[[int], None]) -> Watched:
    """Every question, in `lanes` processes at once; about `samples` ticks each."""
    rounds = [(question, count) for question in Question for count in _rounds(question, samples)]
    tasks = [WatchTask(folder, question, count, seed + number) for number, (question, count) in enumerate(rounds)]
    told: dict[Question, list[Told]] = {question: [] for question in Question}
    for task, part in in_lanes(watch, tasks, lanes):
        told[task.question].append(part)
        advance(1)
    return {
        question: Told(*(np.concatenate([getattr(part, side) for part in parts]) for side in ("first", "second")))
        for question, parts in told.items()
    }


def _rounds(question: Question, samples: int) -> list[int]:
    """How many rounds each task of a question has."""
    rounds, at_once = max(2, samples // question.turns), max(1, TICKS_PER_TASK // question.turns)
    return [min(at_once, rounds - done) for done in range(0, rounds, at_once)]


def tasks_of(samples: int) -> int:
    """How often `watch_all` reports that it has got on."""
    return sum(len(_rounds(question, samples)) for question in Question)


def watching_table(with_ticks: Mapping[str, Area], without: Mapping[str, Area], watched: Watched) -> Table:
    """Every question with its area and the intervals that sampling leaves it in."""
    family = family_of(len(with_ticks))
    caption = f"alone: one true coin in twenty looks like none; family: 95 % for all {family} questions (Bonferroni)"
    shown = Table(title="what the time tells its caller: area under the curve, 95 % interval", caption=caption)
    for column in ("question", "calls", "without ticks", "with ticks", "alone", "family", "a coin?"):
        shown.add_column(column, justify="left" if column == "question" else "right")
    for question, area in with_ticks.items():
        shown.add_row(question, "", f"{without[question].value:.3f}", *_figures(area, family))
    for asked, told in watched.items():
        shown.add_row(asked.value, str(told.first.size), "", *_figures(told.area, family))
    return shown


def family_of(others: int) -> int:
    """How many questions are asked in all, with so many `others`. Controls promise nothing, and are not of them."""
    return others + sum(not question.is_control for question in Question)


def _figures(area: Area, family: int) -> tuple[str, str, str, str]:
    alone, together = (f"[{low:.3f}, {high:.3f}]" for low, high in (area.interval(), area.interval(family)))
    coin = "yes" if area.is_a_coin() else "in the family" if area.is_a_coin(family) else "no"
    return f"{area.value:.3f}", alone, together, coin

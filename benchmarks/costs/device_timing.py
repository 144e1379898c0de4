"""Measure how long a call to a device takes, and what its caller can infer from the time: `trefoil bench device`.

Every call is the real one: a durable database, sealing to three helpers. First without a delay, which is what a call
costs; then with the delay, which is what a caller sees. Each question compares two devices that take turns in random
order. A round is a few calls in a row on one device, without the first, which comes after the other device. The area
under the ROC curve says how well a threshold on the time tells the two apart: 0.5 is a coin, 0 or 1 is certainty.
A control compares two devices in the same state and so shows the error of the measurement itself. Busy loops beside it
show the same on a starved machine. What a device promises about saves and under a flood is in `device_promises`.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from statistics import NormalDist
from typing import BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt
from rich.table import Table

from benchmarks.costs.device_promises import MOST_FIRST_SAVES, Promises, keep_promises
from benchmarks.costs.report_cost import BENCH_TIME, Helpers
from benchmarks.workloads.reports import WorkerPool
from benchmarks.workloads.seeded import Generator, generator
from device.browser.host import VERSION, Host, Pipe
from device.conversion import ConversionOptions
from device.device import Device
from device.errors import RangeError
from device.events import ConversionEventOptions, Impression, ImpressionOptions, SavedImpression
from device.labelling import LabelOptions
from device.limits import TREFOIL_SERVICE, DeviceLimits
from device.report import HelperSetSeal
from device.schedule import DRAIN_SECONDS, AtOnce, Delayed, Schedule
from device.site import load_tables
from device.stores.sqlite_store import SqliteStore
from protocol.errors import ErrorKind, TrefoilError
from protocol.report import SealedReport
from protocol.units import DAY, HOUR

Samples = npt.NDArray[np.float64]

BUCKETS = 128
# The largest shape that the standard's call has.
WIDE = 1024
PUBLISHERS = 5
SITE = "shop.example"
OTHER = "market.example"
PUBLISHER = "news5-0.example"
# Small enough that thousands of calls do not exhaust the budget.
EPSILON = 0.00002
WARM_UP = 20
# Calls of one round, of which the first is dropped; and rounds that one process does before it reports.
IN_A_ROW = 5
ROUNDS_PER_TASK = 10
# The length of a frame of native messaging, in the machine's own order.
_FRAME_LENGTH = struct.Struct("=I")
# Two-sided error probability of a 95 % interval.
_MISSES = 0.05
# The areas that count as no better than a coin. For a shift of normal times they are worth 0.011 bit a call.
NEAR = (0.43, 0.57)
# The paper measured 9.1 ms at 10 impressions and 57.3 ms at 100, and left the side channel open.
PAPER_RATIO = 6.3
LIMITS = DeviceLimits()
WEEK = LIMITS.epoch_length
# A month that touches six weeks, the most it can: half a day of the first, a day and a half of the last.
MONTH_END = BENCH_TIME + 5 * WEEK + 3 * DAY // 2


class State(Enum):
    """The state of a device when it is called."""

    TEN = "10"
    THIRTY = "30"
    HUNDRED = "100"
    NOTHING_FOUND = "null: nothing found"
    NO_BUDGET = "null: no budget"
    SWITCHED_OFF = "null: switched off"
    EMPTY = "empty"
    FULL = "full"
    FULL_OFF = "full, switched off"
    CONVERTED = "a conversion saved"
    NOT_CONVERTED = "no conversion saved"

    @property
    def impressions(self) -> int:
        """Return the device's impressions: thirty for null reports, as on the device that they are compared with."""
        return int(self.value) if self in REAL else 30


REAL = (State.TEN, State.THIRTY, State.HUNDRED)
NULL = (State.NOTHING_FOUND, State.NO_BUDGET, State.SWITCHED_OFF)


class Kind(Enum):
    """The call whose time is taken."""

    CONVERSION = "a conversion"
    WIDE_CONVERSION = "a conversion of the largest shape"
    IMPRESSION = "an impression"
    # The same call as a message to the native messaging host, until the last byte of its answer.
    PIPE = "a conversion at the pipe"
    LABEL_128 = "a label of 128 features"
    LABEL_256 = "a label of 256 features"
    LABEL_512 = "a label of 512 features"
    # The site is one that has called this device before, in the first state; a new one in the second.
    ERROR = "an error"

    @property
    def features(self) -> int | None:
        """Return how many features a label has; None for other calls."""
        return {Kind.LABEL_128: 128, Kind.LABEL_256: 256, Kind.LABEL_512: 512}.get(self)


class Question(NamedTuple):
    """Two states that a caller would like to tell apart by the time of its calls."""

    text: str
    first: State
    second: State
    kind: Kind = Kind.CONVERSION
    # Whether another site calls the second device meanwhile.
    has_company: bool = False

    @property
    def is_control(self) -> bool:
        return self.text.startswith("control")


QUESTIONS = (
    *(Question(f"real or {state.value}", state, State.THIRTY) for state in NULL),
    Question("a conversion: a full device, or an empty one", State.EMPTY, State.FULL),
    Question("a conversion: switched on, or off", State.FULL_OFF, State.FULL),
    Question("the largest shape: full, or null", State.EMPTY, State.FULL, Kind.WIDE_CONVERSION),
    *(
        Question(f"{kind.value}: converted, or not", State.NOT_CONVERTED, State.CONVERTED, kind)
        for kind in (Kind.LABEL_128, Kind.LABEL_256, Kind.LABEL_512)
    ),
    Question("at the pipe: a full device, or an empty one", State.EMPTY, State.FULL, Kind.PIPE),
    Question("at the pipe: switched on, or off", State.FULL_OFF, State.FULL, Kind.PIPE),
    Question("a conversion: another site calls, or none", State.FULL, State.FULL, has_company=True),
    Question("an impression: a full device, or an empty one", State.EMPTY, State.FULL, Kind.IMPRESSION),
    Question("an impression: switched on, or off", State.FULL_OFF, State.FULL, Kind.IMPRESSION),
    Question("an impression: another site calls, or none", State.FULL, State.FULL, Kind.IMPRESSION, has_company=True),
    Question("an error: of a site that this device knows, or not", State.TEN, State.TEN, Kind.ERROR),
    Question("control, a conversion: two full devices", State.FULL, State.FULL),
    Question("control, an impression: two full devices", State.FULL, State.FULL, Kind.IMPRESSION),
)
# Intervals of a family hold for all questions at once (Bonferroni). Controls promise nothing and are not counted.
FAMILY = sum(not question.is_control for question in QUESTIONS)


@dataclass(frozen=True, slots=True)
class Area:
    """An area under the curve with its standard error. Above 0.5 the second sample is the larger one."""

    value: float
    error: float

    def interval(self, family: int = 1) -> tuple[float, float]:
        """Return the 95 % interval, wide enough that those of `family` questions all hold at once (Bonferroni)."""
        spread = NormalDist().inv_cdf(1 - _MISSES / (2 * family)) * self.error
        return max(0.0, self.value - spread), min(1.0, self.value + spread)

    def is_a_coin(self, family: int = 1) -> bool:
        """Return whether the interval contains 0.5: the times tell the two states apart no better than a fair coin."""
        low, high = self.interval(family)
        return low <= 0.5 <= high

    @property
    def is_near(self) -> bool:
        """Return whether the area lies in `NEAR`."""
        return NEAR[0] <= self.value <= NEAR[1]

    def to_json(self, family: int) -> dict[str, object]:
        """Return the interval of this question alone and that of the family."""
        (low, high), (family_low, family_high) = self.interval(), self.interval(family)
        return {
            "area": self.value,
            "low": low,
            "high": high,
            "is_near": self.is_near,
            "is_a_coin": self.is_a_coin(),
            "family_low": family_low,
            "family_high": family_high,
            "is_a_coin_in_family": self.is_a_coin(family),
        }


def area_between(first: Samples, second: Samples) -> Area:
    """Return the area and its error, by the placements of each value among the others (DeLong et al., 1988).

    Rows are independent. Columns of one row were measured together: the area is the mean of the columns' areas, with
    the variance of rows.
    """
    first, second = (np.atleast_2d(sample.T).T for sample in (first, second))
    columns = range(first.shape[1])
    below = np.stack([_placements(second[:, column], first[:, column]) for column in columns], axis=1)
    above = np.stack([1 - _placements(first[:, column], second[:, column]) for column in columns], axis=1)
    variance = sum(float(placed.mean(axis=1).var(ddof=1)) / len(placed) for placed in (below, above))
    return Area(float(below.mean()), float(np.sqrt(variance)))


def _placements(values: Samples, among: Samples) -> Samples:
    """Return for each value the fraction of `among` that is smaller; ties count half."""
    ordered = np.sort(among)
    left, right = (np.searchsorted(ordered, values, side=side) for side in ("left", "right"))
    return np.asarray((left + right) / 2 / len(among), dtype=np.float64)


def bits_between(first: Samples, second: Samples) -> float:
    """Return the bits that one call carries, by the best threshold.

    The threshold is found on half of the rounds and valued on the other half, both ways, less the mean of what a coin
    would show (Miller and Madow): chosen and valued on the same calls, every coin would show something.
    """
    halves = [(first[place::2].ravel(), second[place::2].ravel()) for place in (0, 1)]
    worth = []
    for training, holdout in (halves, halves[::-1]):
        pooled = np.sort(np.concatenate(training))
        shares = [np.searchsorted(np.sort(side), pooled, side="right") / len(side) for side in training]
        threshold = pooled[int(np.argmax(np.abs(shares[0] - shares[1])))]
        calls = sum(map(len, holdout))
        worth.append(
            _information([float((side <= threshold).mean()) for side in holdout]) - 1 / (2 * calls * np.log(2))
        )
    return max(0.0, float(np.mean(worth)))


def _information(shares: Sequence[float]) -> float:
    """Return the mutual information of a fair bit and a binary signal with these probabilities under its values."""

    def entropy(share: float) -> float:
        return -sum(part * float(np.log2(part)) for part in (share, 1 - share) if part > 0)

    return entropy(sum(shares) / 2) - sum(map(entropy, shares)) / 2


class Window(NamedTuple):
    """The lookback of a call: a number of epochs, the last of which has run for three days."""

    epochs: int

    @property
    def days(self) -> int:
        return 7 * (self.epochs - 1)

    @property
    def limits(self) -> DeviceLimits:
        return DeviceLimits(max_lookback_days=max(self.days, LIMITS.max_lookback_days))


LONG = Window(20)
# Within the standard's month.
SHORT = Window(4)


@contextmanager
def device_in(
    state: State, path: Path, window: Window = SHORT, schedule: Schedule | None = None
) -> Iterator[Device[SealedReport]]:
    """Yield a device in `state`, warmed up, on a database of its own. Epoch 0 begins at BENCH_TIME."""
    load_tables()
    clock = [BENCH_TIME]
    SqliteStore.create(path, epoch_length=WEEK, epoch_start=BENCH_TIME)
    with closing(SqliteStore.open(path, epoch_length=WEEK, clock=lambda: clock[0])) as store:
        limits = LIMITS if state in _MONTHLY else window.limits
        seal = HelperSetSeal(Helpers.fresh().helper_set)
        quick = Device(store, seal, clock=lambda: clock[0], limits=limits)
        if state in (State.FULL, State.FULL_OFF):
            fill(store)
        elif state is State.CONVERTED:
            clock[0] = MONTH_END - 8 * DAY
            quick.save_conversion(SITE, ConversionEventOptions((PUBLISHER,)))
        elif state not in _MONTHLY:
            for clock[0], site in sorted(impressions(state.impressions, window)):
                quick.save_impression(site, ImpressionOptions(clock[0] % BUCKETS, match_value=1, lifetime_days=200))
        clock[0] = MONTH_END if state in _MONTHLY else BENCH_TIME + 3 * DAY
        if state is State.NO_BUDGET:
            quick.measure_conversion(SITE, options(State.THIRTY, window, epsilon=1.0))
        if state in (State.SWITCHED_OFF, State.FULL_OFF):
            quick.disable()
        for _ in range(WARM_UP):
            quick.measure_conversion(SITE, options(state, window))
        if state in _MONTHLY:
            save(quick)
        schedule = schedule or AtOnce()
        try:
            yield Device(store, seal, clock=lambda: clock[0], limits=limits, schedule=schedule)
        finally:
            schedule.close()


# States that are about how much a device may hold; the others are about the impressions of one window.
_MONTHLY = (State.EMPTY, State.FULL, State.FULL_OFF, State.CONVERTED, State.NOT_CONVERTED)


def impressions(count: int, window: Window) -> Iterator[tuple[int, str]]:
    """Yield times and sites: evenly over the epochs, and over the same publishers whatever the count."""
    for number in range(count):
        epoch = number % window.epochs
        day = 2 * DAY if epoch == 0 else 4 * DAY
        yield BENCH_TIME - epoch * WEEK + day + number // window.epochs * HOUR, f"news{number % PUBLISHERS}.example"


def fill(store: SqliteStore) -> None:
    """Save as many impressions as six weeks may hold, from as many sites, all of them relevant."""
    buyers = frozenset([*(f"other{place}.example" for place in range(8)), SITE])
    with store.transaction():
        for week in range(6):
            # All of it within the month: late in the first week, early in the others.
            begins = BENCH_TIME + week * WEEK + (WEEK - DAY // 2 if week == 0 else 0)
            for number in range(LIMITS.max_impressions_per_epoch):
                site, moment = f"news{week}-{number % LIMITS.max_sites_per_epoch}.example", begins + number * 20
                impression = Impression(moment, site, site, number % BUCKETS, 0, number * 7 % 11)
                store.save(SavedImpression(impression, moment + 30 * DAY, buyers, frozenset()))


def options(state: State, window: Window, epsilon: float = EPSILON, *, buckets: int = BUCKETS) -> ConversionOptions:
    """Return the arguments of the call. If nothing is to be found, only the match value differs."""
    if state in _MONTHLY:
        return ConversionOptions(TREFOIL_SERVICE, buckets, epsilon=epsilon, credit=[1.0] * 10, value=100, max_value=100)
    value = 2 if state is State.NOTHING_FOUND else 1
    return ConversionOptions(TREFOIL_SERVICE, BUCKETS, epsilon=epsilon, lookback_days=window.days, match_values=[value])


def save(device: Device[SealedReport]) -> None:
    device.save_impression(PUBLISHER, ImpressionOptions(3))


def label_options(features: int) -> LabelOptions:
    """Return a publisher's question about an impression, in whose window the one saved conversion lies."""
    return LabelOptions(TREFOIL_SERVICE, [1] * features, features, EPSILON, 10 * DAY, (SITE,))


def seconds_of(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


class Cost(NamedTuple):
    """Seconds of one call: by the wall clock, and of a processor."""

    wall: Samples
    processor: Samples


def time_without_delay(folder: Path, rounds: int, seed: int, advance: Callable[[int], None]) -> dict[State, Cost]:
    """Return the seconds of `rounds` conversions in each state, all calls in one random order."""
    states = (*REAL, *NULL)
    costs = {state: Cost(np.empty(rounds), np.empty(rounds)) for state in states}
    with ExitStack() as stack:
        devices = {state: stack.enter_context(device_in(state, folder / f"{state.name}.db", LONG)) for state in states}
        for number, place in enumerate(generator(seed).permutation(rounds * len(states))):
            state = states[place // rounds]
            call = partial(devices[state].measure_conversion, SITE, options(state, LONG))
            begun = time.thread_time()
            costs[state].wall[place % rounds] = seconds_of(call)
            costs[state].processor[place % rounds] = time.thread_time() - begun
            if number % len(states) == 0:
                advance(1)
    return costs


def time_fallback(rounds: int) -> Samples:
    """Return the processor seconds of sealing a null report: the constant part of a call, in its caller's thread."""
    request = options(State.TEN, SHORT).checked(SITE, SITE, LIMITS)
    seal = HelperSetSeal(Helpers.fresh().helper_set).prepare(request, BENCH_TIME, debug=False)
    times = np.empty(rounds)
    for number in range(rounds):
        begun = time.thread_time()
        seal([0] * BUCKETS)
        times[number] = time.thread_time() - begun
    return times


class Task(NamedTuple):
    """Some rounds of one question, for one process."""

    folder: Path
    question: int
    rounds: int
    seed: int
    delay_ms: int


def ask(task: Task) -> tuple[Samples, Samples]:
    """Return the seconds of every call with the delay, by round, on the two devices of one question."""
    question, draw = QUESTIONS[task.question], generator(task.seed)
    times: tuple[list[list[float]], list[list[float]]] = ([], [])
    with tempfile.TemporaryDirectory(dir=task.folder) as own, ExitStack() as stack:
        calls = []
        for place, state in enumerate((question.first, question.second)):
            schedule = Delayed(task.delay_ms / 1000, LIMITS.work_ms / 1000)
            device = stack.enter_context(device_in(state, Path(own) / f"{place}.db", schedule=schedule))
            if question.kind is Kind.PIPE:
                call = stack.enter_context(_at_the_pipe(device))
            else:
                call = _call(device, state, question.kind, draw, is_second=place == 1)
            if question.has_company:
                call = _in_company(call, device, task.delay_ms / 1000, draw, calls_too=place == 1)
            calls.append(call)
        for _ in range(task.rounds):
            for place in draw.permutation(2):
                times[place].append([calls[place]() for _ in range(IN_A_ROW)][1:])
    return np.array(times[0]), np.array(times[1])


def _call(
    device: Device[SealedReport], state: State, kind: Kind, draw: Generator, *, is_second: bool
) -> Callable[[], float]:
    """Return a function that makes one call and returns its seconds."""
    if kind is Kind.IMPRESSION:
        return partial(seconds_of, partial(save, device))
    if kind is Kind.ERROR:
        return _error(device, draw, is_known=not is_second)
    if kind.features is not None:
        label = label_options(kind.features)
        return partial(seconds_of, partial(device.measure_impression, PUBLISHER, label))
    wanted = options(state, SHORT, buckets=WIDE if kind is Kind.WIDE_CONVERSION else BUCKETS)
    return partial(seconds_of, partial(device.measure_conversion, SITE, wanted))


@contextmanager
def _at_the_pipe(device: Device[SealedReport]) -> Iterator[Callable[[], float]]:
    """Serve `device` as the native messaging host does, and yield a function that times one call at the pipe."""
    (source, asks), (answers, sink) = os.pipe(), os.pipe()
    with (
        os.fdopen(asks, "wb") as out,
        os.fdopen(source, "rb") as read,
        os.fdopen(answers, "rb") as back,
        os.fdopen(sink, "wb") as written,
    ):
        host = Host(Pipe(read, written), lambda _: nullcontext(device), SealedReport.encode)
        serving = threading.Thread(target=host.run, daemon=True)
        serving.start()
        wanted = {"aggregationService": TREFOIL_SERVICE, "histogramSize": BUCKETS, "epsilon": EPSILON}
        wanted |= {"credit": [1.0] * 10, "value": 100, "maxValue": 100}
        chain = [{"origin": f"https://{SITE}", "policy": ""}]
        measure = {"id": 2, "kind": "measure", "tab": 1, "acted": True, "chain": chain, "options": wanted}

        def call() -> None:
            if "report" not in (answer := _exchange(out, back, measure)):
                raise TrefoilError(f"the host refused a measurement: {answer}", kind=ErrorKind.FORBIDDEN)

        try:
            _exchange(out, back, {"id": 1, "kind": "hello", "profile": "bench", "version": VERSION})
            yield partial(seconds_of, call)
        finally:
            # First, whatever happened: to close the other end waits for the thread that reads there.
            out.close()
            serving.join(DRAIN_SECONDS)


def _exchange(out: BinaryIO, back: BinaryIO, message: Mapping[str, object]) -> dict[str, object]:
    """Send one frame, and return the next one."""
    data = json.dumps(message).encode()
    out.write(_FRAME_LENGTH.pack(len(data)) + data)
    out.flush()
    (size,) = _FRAME_LENGTH.unpack(back.read(_FRAME_LENGTH.size))
    answer: dict[str, object] = json.loads(back.read(size))
    return answer


def _error(device: Device[SealedReport], draw: Generator, *, is_known: bool) -> Callable[[], float]:
    """Return a function that times the error of a call by a site that this device has just met, or by a new one."""
    wrong = ConversionOptions(TREFOIL_SERVICE, 0)

    def call() -> float:
        met, new = (f"site{number:09}.example" for number in draw.integers(10**9, size=2))
        device.save_impression(met, ImpressionOptions(0))
        # Waits for the worker.
        device.calendar()
        # A copy, so that not even the text is the same object.
        host = "".join(list(met if is_known else new))

        def refused() -> None:
            with suppress(RangeError):
                device.measure_conversion(host, wrong)

        return seconds_of(refused)

    return call


def _in_company(
    call: Callable[[], float],
    device: Device[SealedReport],
    delay: float,
    draw: Generator,
    *,
    calls_too: bool,
) -> Callable[[], float]:
    """Return `call` beside another site's thread, which calls at any moment of it, or only sleeps as long."""
    wanted = options(State.FULL, SHORT)

    def other(moment: float) -> None:
        time.sleep(moment)
        if calls_too:
            device.measure_conversion(OTHER, wanted)
        else:
            time.sleep(delay)

    def both() -> float:
        # At once, or at any moment of the call.
        moment = draw.integers(2) * draw.random() * delay
        beside = threading.Thread(target=other, args=(moment,))
        beside.start()
        seconds = call()
        beside.join()
        return seconds

    return both


def ask_all(
    folder: Path, samples: int, conditions: Conditions, seed: int, advance: Callable[[int], None]
) -> dict[Question, tuple[Samples, Samples]]:
    """Ask every question with about `samples` calls each, in several processes: such a call is nearly all waiting."""
    sizes = _sizes(samples)
    tasks = [
        Task(folder, question, rounds, 0, conditions.delay_ms) for question in range(len(QUESTIONS)) for rounds in sizes
    ]
    tasks = [task._replace(seed=seed + number) for number, task in enumerate(tasks)]
    parts: dict[int, list[tuple[Samples, Samples]]] = {place: [] for place in range(len(QUESTIONS))}
    for task, part in _in_processes(tasks, conditions.lanes):
        parts[task.question].append(part)
        advance(1)
    joined = {place: [np.concatenate(side) for side in zip(*each, strict=True)] for place, each in parts.items()}
    return {QUESTIONS[place]: (first, second) for place, (first, second) in joined.items()}


def _sizes(samples: int) -> list[int]:
    """Return how many rounds each task of a question has."""
    # The first call of a round is dropped.
    rounds = max(2, samples // (IN_A_ROW - 1))
    return [min(ROUNDS_PER_TASK, rounds - done) for done in range(0, rounds, ROUNDS_PER_TASK)]


def _in_processes(tasks: Sequence[Task], lanes: int) -> Iterator[tuple[Task, tuple[Samples, Samples]]]:
    """Yield every task with its result, in order of completion. One lane is this process."""
    if lanes == 1:
        yield from ((task, ask(task)) for task in tasks)
        return
    with WorkerPool(lanes) as pool:
        running = {pool.submit(ask, task): task for task in tasks}
        try:
            for done in as_completed(running):
                yield running[done], done.result()
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


@dataclass(frozen=True, slots=True)
class DeviceTiming:
    """Seconds of calls without the delay, by state, of a null report, and of calls with the delay, by question."""

    costs: Mapping[State, Cost]
    fallback: Samples
    promises: Promises
    answers: Mapping[Question, tuple[Samples, Samples]]
    conditions: Conditions

    def areas(self) -> dict[Question, Area]:
        return {question: area_between(*times) for question, times in self.answers.items()}

    def to_json(self) -> dict[str, object]:
        """Return times without the delay and areas with it. `null` pools the three kinds of null reports."""
        null = np.concatenate([self.costs[state].wall for state in NULL])
        named = {state.value: cost.wall for state, cost in self.costs.items()} | {"null": null}
        median = {name: float(np.median(times) * 1000) for name, times in named.items()}
        areas = self.areas()
        telling = [max(area.value, 1 - area.value) for question, area in areas.items() if question.first in NULL]
        return {
            "median_ms": median,
            "p99_ms": {name: float(np.percentile(times, 99) * 1000) for name, times in named.items()},
            "ratio_100_to_10": median["100"] / median["10"],
            "ratio_real_to_null": median["30"] / median["null"],
            "auc_real_vs_null": max(telling),
            "paper_ratio": PAPER_RATIO,
            "processor_ms": {state.value: _median_ms(cost.processor) for state, cost in self.costs.items()},
            "constant_processor_ms": _median_ms(self.fallback),
            "samples": len(self.fallback),
            "delay_ms": self.conditions.delay_ms,
            "busy_loops": self.conditions.busy_loops,
            "promises": self.promises.to_json(),
            "questions": FAMILY,
            "watching": {question.text: self._answer(question, area) for question, area in areas.items()},
        }

    def _answer(self, question: Question, area: Area) -> dict[str, object]:
        first, second = self.answers[question]
        medians = [float(np.median(times) * 1000) for times in (first, second)]
        answer = {"rounds": len(first), "calls": first.size, "median_ms": medians, "bits": bits_between(first, second)}
        return answer | area.to_json(FAMILY)

    def tables(self) -> list[Table]:
        return [self._time_table(), self.promises.table(), self._area_table()]

    def _time_table(self) -> Table:
        medians = [np.median(self.costs[state].wall) for state in (State.HUNDRED, State.TEN)]
        caption = f"100 to 10 impressions: {medians[0] / medians[1]:.2f} times the time (paper: {PAPER_RATIO})"
        table = Table("case", title="measure_conversion without the delay, milliseconds", caption=caption)
        for column in ("median", "p99", "processor, median"):
            table.add_column(column, justify="right")
        for state, (wall, processor) in self.costs.items():
            name = state.value if state in NULL else f"{state.value} impressions"
            p99 = 1000 * float(np.percentile(wall, 99))
            table.add_row(name, f"{_median_ms(wall):.3f}", f"{p99:.3f}", f"{_median_ms(processor):.3f}")
        table.add_row("constant part: a null report", "", "", f"{_median_ms(self.fallback):.3f}")
        return table

    def _area_table(self) -> Table:
        caption = f"alone: one true coin in twenty misses; family: 95 % for all {FAMILY} questions (Bonferroni)"
        title = "what the time tells its caller: area under the curve, 95 % interval"
        table = Table("question", title=title, caption=caption)
        for column in ("calls", "area", "alone", "family", "a coin?", "bits"):
            table.add_column(column, justify="right")
        for question, area in self.areas().items():
            intervals = (f"[{low:.3f}, {high:.3f}]" for low, high in (area.interval(), area.interval(FAMILY)))
            coin = "yes" if area.is_a_coin() else "in the family" if area.is_a_coin(FAMILY) else "no"
            first, second = self.answers[question]
            bits = f"{bits_between(first, second):.4f}"
            table.add_row(question.text, str(first.size), f"{area.value:.3f}", *intervals, coin, bits)
        return table


def _median_ms(times: Samples) -> float:
    return float(np.median(times) * 1000)


class Conditions(NamedTuple):
    """How questions are asked: in so many processes, of devices with this delay, beside so many busy loops."""

    lanes: int = 42
    delay_ms: int = LIMITS.delay_ms
    busy_loops: int = 0


def measure(samples: int, conditions: Conditions, seed: int, advance: Callable[[int], None]) -> DeviceTiming:
    """Measure `samples` calls of each state without the delay, and about as many of each question with it."""
    with tempfile.TemporaryDirectory(prefix="trefoil-bench-") as name:
        costs = time_without_delay(Path(name), samples, seed, advance)
        fallback = time_fallback(samples)
        with _busy(conditions.busy_loops):
            promises = keep_promises(Path(name), min(samples, MOST_FIRST_SAVES), conditions.delay_ms)
            answers = ask_all(Path(name), samples, conditions, seed, advance)
    return DeviceTiming(costs, fallback, promises, answers, conditions)


@contextmanager
def _busy(loops: int) -> Iterator[None]:
    """Keep the processors busy with so many processes that do nothing else."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(loops)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def steps(samples: int) -> int:
    """Return how often `measure` calls `advance`."""
    return samples + len(QUESTIONS) * len(_sizes(samples))

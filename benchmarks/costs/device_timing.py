"""Measure how long a call to a device takes, and what its caller can infer from the time: `trefoil bench device`.

Every call is the real one: a durable database, sealing to three helpers. First without a delay, which is what a call
costs; then with the delay, which is what a caller sees. Each question compares two devices that take turns in random
order. A round is a few calls in a row on one device, without the first, which comes after the other device. The area
under the ROC curve says how well a threshold on the time tells the two apart: 0.5 is a coin, 0 or 1 is certainty.
A control compares two devices in the same state and so shows the error of the measurement itself. Of twenty true coins
one misses 0.5 with its 95 % interval. So a question that does is asked again, of four times as many calls: both answers
are kept, and twelve true coins all have one that contains 0.5 in 97 of 100 runs.

Busy loops beside it show the same on a starved machine. What a device promises about saves and under a flood is in
`device_promises`; what a page sees in a browser is in `browser_timing`.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.table import Table

from benchmarks.costs.areas import Samples, area_between, bits_between
from benchmarks.costs.device_promises import MOST_FIRST_SAVES, Promises, keep_promises
from benchmarks.costs.report_cost import BENCH_TIME, Helpers
from benchmarks.workloads.reports import WorkerPool
from benchmarks.workloads.seeded import Generator, generator
from device.conversion import ConversionOptions
from device.device import Device
from device.errors import RangeError
from device.events import ConversionEventOptions, Impression, ImpressionOptions, SavedImpression
from device.labelling import LabelOptions
from device.limits import TREFOIL_SERVICE, DeviceLimits
from device.report import HelperSetSeal
from device.schedule import SOON, SOON_SPREAD, SPREAD, AtOnce, Delayed, Schedule
from device.site import load_tables
from device.stores.sqlite_store import SqliteStore
from protocol.report import SealedReport
from protocol.units import DAY

BUCKETS = 128
# The largest shape that the standard's call has.
WIDE = 1024
SITE = "shop.example"
OTHER = "market.example"
PUBLISHER = "news5-0.example"
# Small enough that thousands of calls do not exhaust the budget.
EPSILON = 0.00002
WARM_UP = 20
# Calls of one round, of which the first is dropped; and rounds that one process does before it reports.
IN_A_ROW = 5
ROUNDS_PER_TASK = 15
# Processes that make calls without the delay, and the least delay of a device in milliseconds.
QUICK_LANES = 2
LEAST_DELAY = 200
# The paper measured 9.1 ms at 10 impressions and 57.3 ms at 100, and left the side channel open.
PAPER_RATIO = 6.3
LIMITS = DeviceLimits()
WEEK = LIMITS.epoch_length
# A month that touches six weeks, the most it can: half a day of the first, a day and a half of the last.
WEEKS = 6
MONTH_END = BENCH_TIME + (WEEKS - 1) * WEEK + 3 * DAY // 2


class State(Enum):
    """The state of a device when it is called: relevant impressions of the month, and what else matters."""

    TEN = "10"
    HUNDRED = "100"
    EMPTY = "empty"
    FULL = "full"
    NO_BUDGET = "full, no budget left"
    FULL_OFF = "full, switched off"
    CONVERTED = "a conversion saved"
    NOT_CONVERTED = "no conversion saved"

    @property
    def impressions(self) -> int:
        few = {State.TEN: 10, State.HUNDRED: 100, State.EMPTY: 0, State.CONVERTED: 0, State.NOT_CONVERTED: 0}
        return few.get(self, WEEKS * LIMITS.max_impressions_per_epoch)


# Whose calls are timed without the delay.
COSTS = (State.TEN, State.HUNDRED, State.FULL, State.EMPTY, State.NO_BUDGET, State.FULL_OFF)


Call = Callable[[], object]
# Returns a function that makes one call of a device. The generator chooses names; the flag says which device it is.
MakeCall = Callable[["Device[SealedReport]", Generator, bool], Call]


def conversion(buckets: int = BUCKETS) -> MakeCall:
    return lambda device, _, __: partial(device.measure_conversion, SITE, options(buckets=buckets))


def label(features: int) -> MakeCall:
    """Return a publisher's question about an impression, in whose window the one saved conversion lies."""
    wanted = LabelOptions(TREFOIL_SERVICE, [1] * features, features, EPSILON, 10 * DAY, (SITE,))
    return lambda device, _, __: partial(device.measure_impression, PUBLISHER, wanted)


def impression(device: Device[SealedReport], draw: Generator, _: bool) -> Call:
    # By many callers: one alone would be slowed down after a hundred calls.
    return partial(save, device, f"ads{draw.integers(100)}.example")


def error(device: Device[SealedReport], draw: Generator, is_second: bool) -> Call:
    """Return a refused call by a site that this device has just met, or, on the second device, by a new one."""
    met, new = (f"site{number:09}.example" for number in draw.integers(10**9, size=2))
    device.save_impression(met, ImpressionOptions(0))
    # Waits for the worker.
    device.calendar()
    # A copy, so that not even the text is the same object.
    host = "".join(list(new if is_second else met))

    def refused() -> None:
        with suppress(RangeError):
            device.measure_conversion(host, ConversionOptions(TREFOIL_SERVICE, 0))

    return refused


class Question(NamedTuple):
    """Two states that a caller would like to tell apart by the time of its calls."""

    text: str
    first: State
    second: State
    call: MakeCall = conversion()
    # Whether another site calls the second device meanwhile.
    has_company: bool = False
    # How many times as many calls as asked for: a hundredth of a bit is less than the error of 240.
    times: int = 1

    @property
    def is_control(self) -> bool:
        return self.text.startswith("control")


FULL = State.FULL
QUESTIONS = (
    Question("a conversion: a full device, or an empty one", State.EMPTY, FULL),
    Question("a conversion: budget left, or none", State.NO_BUDGET, FULL),
    Question("a conversion: switched on, or off", State.FULL_OFF, FULL),
    Question("the largest shape: full, or null", State.EMPTY, FULL, conversion(WIDE)),
    *(
        Question(f"a label of {size} features: converted, or not", State.NOT_CONVERTED, State.CONVERTED, label(size))
        for size in (128, 256, 512)
    ),
    Question("a conversion: another site calls, or none", FULL, FULL, has_company=True, times=4),
    Question("an impression: a full device, or an empty one", State.EMPTY, FULL, impression),
    Question("an impression: switched on, or off", State.FULL_OFF, FULL, impression),
    Question("an impression: another site calls, or none", FULL, FULL, impression, has_company=True),
    Question("an error: of a site that this device knows, or not", State.TEN, State.TEN, error),
    Question("control, a conversion: two full devices", FULL, FULL),
    Question("control, an impression: two full devices", FULL, FULL, impression),
)
# Of how many times as many calls a question is asked again that was no coin.
AGAIN = 4


@contextmanager
def device_in(state: State, path: Path, schedule: Schedule | None = None) -> Iterator[Device[SealedReport]]:
    """Yield a device in `state`, warmed up, on a database of its own. Epoch 0 begins at BENCH_TIME."""
    load_tables()
    clock = [MONTH_END - 8 * DAY]
    SqliteStore.create(path, epoch_length=WEEK, epoch_start=BENCH_TIME)
    with closing(SqliteStore.open(path, epoch_length=WEEK, clock=lambda: clock[0])) as store:
        seal = HelperSetSeal(Helpers.fresh().helper_set)
        quick = Device(store, seal, clock=lambda: clock[0], limits=LIMITS)
        fill(store, state.impressions)
        if state is State.CONVERTED:
            quick.save_conversion(SITE, ConversionEventOptions((PUBLISHER,)))
        clock[0] = MONTH_END
        if state is State.NO_BUDGET:
            quick.measure_conversion(SITE, options(epsilon=1.0))
        if state is State.FULL_OFF:
            quick.disable()
        for _ in range(WARM_UP):
            quick.measure_conversion(SITE, options())
        save(quick)
        schedule = schedule or AtOnce()
        try:
            yield Device(store, seal, clock=lambda: clock[0], limits=LIMITS, schedule=schedule)
        finally:
            schedule.close()


def fill(store: SqliteStore, count: int) -> None:
    """Save relevant impressions, evenly over six weeks; a full device has as many, and of as many sites, as it may."""
    buyers = frozenset([*(f"other{place}.example" for place in range(8)), SITE])
    sites = max(1, count * LIMITS.max_sites_per_epoch // (WEEKS * LIMITS.max_impressions_per_epoch))
    with store.transaction():
        for number in range(count):
            week, place = number % WEEKS, number // WEEKS
            # All of it within the month: late in the first week, early in the others.
            moment = BENCH_TIME + week * WEEK + (WEEK - DAY // 2 if week == 0 else 0) + place * 20
            site = f"news{week}-{place % sites}.example"
            impression = Impression(moment, site, site, place % BUCKETS, 0, place * 7 % 11)
            store.save(SavedImpression(impression, moment + 30 * DAY, buyers, frozenset()))


def options(epsilon: float = EPSILON, *, buckets: int = BUCKETS) -> ConversionOptions:
    return ConversionOptions(TREFOIL_SERVICE, buckets, epsilon=epsilon, credit=[1.0] * 10, value=100, max_value=100)


def save(device: Device[SealedReport], intermediary: str | None = None) -> None:
    device.save_impression(PUBLISHER, ImpressionOptions(3), intermediary=intermediary)


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
    costs = {state: Cost(np.empty(rounds), np.empty(rounds)) for state in COSTS}
    with ExitStack() as stack:
        devices = {state: stack.enter_context(device_in(state, folder / f"{state.name}.db")) for state in COSTS}
        for number, place in enumerate(generator(seed).permutation(rounds * len(COSTS))):
            state = COSTS[place // rounds]
            begun = time.thread_time()
            costs[state].wall[place % rounds] = seconds_of(partial(devices[state].measure_conversion, SITE, options()))
            costs[state].processor[place % rounds] = time.thread_time() - begun
            if number % len(COSTS) == 0:
                advance(1)
    return costs


def time_fallback(rounds: int) -> Samples:
    """Return the processor seconds of sealing a null report: the constant part of a call, in its caller's thread."""
    request = options().checked(SITE, SITE, LIMITS)
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


# Seconds of every call with the delay, by round, on the two devices of one question.
Answers = tuple[Samples, Samples]


def ask(task: Task) -> Answers:
    question, draw = QUESTIONS[task.question], generator(task.seed)
    times: tuple[list[list[float]], list[list[float]]] = ([], [])
    with tempfile.TemporaryDirectory(dir=task.folder) as own, ExitStack() as stack:
        devices: dict[int, Device[SealedReport]] = {}
        # Made in random order: which came first into memory and onto the disk must not tell the two apart.
        for place in draw.permutation(2):
            schedule = Delayed.within(DeviceLimits(delay_ms=task.delay_ms))
            state = (question.first, question.second)[place]
            devices[place] = stack.enter_context(device_in(state, Path(own) / f"{place}.db", schedule))
        for _ in range(task.rounds):
            for place in draw.permutation(2):
                one = partial(_seconds, question, devices[place], draw, task.delay_ms / 1000, is_second=place == 1)
                times[place].append([one() for _ in range(IN_A_ROW)][1:])
    return np.array(times[0]), np.array(times[1])


def _seconds(
    question: Question, device: Device[SealedReport], draw: Generator, delay: float, *, is_second: bool
) -> float:
    """Return the seconds of one call.

    In company another site's thread calls the second device, and sleeps beside the first: at the beginning of the call,
    or about when its answer leaves, so that what the other call does falls where it would show.
    """
    call = question.call(device, draw, is_second)
    if not question.has_company:
        return seconds_of(call)
    leaves, spread = (SOON, SOON_SPREAD) if question.call is impression else (delay, SPREAD)
    moment = draw.integers(2) * max(0.0, leaves + (1.5 * draw.random() - 0.5) * spread)

    def other() -> None:
        time.sleep(moment)
        if is_second:
            device.measure_conversion(OTHER, options())
        else:
            time.sleep(delay)

    beside = threading.Thread(target=other)
    beside.start()
    seconds = seconds_of(call)
    beside.join()
    return seconds


def ask_all(
    questions: Sequence[Question], samples: int, conditions: Conditions, seed: int, advance: Callable[[int], None]
) -> dict[Question, Answers]:
    """Ask questions with about `samples` calls each, in several processes: such a call is nearly all waiting.

    Saves and errors come after, in few processes: the others compute for each of their calls, which a save would feel.
    What another site measures beside them need not wait for long.
    """
    parts: dict[Question, list[Answers]] = {question: [] for question in questions}
    with _folder() as folder:
        tasks = [
            Task(folder, QUESTIONS.index(question), rounds, 0, conditions.delay_ms)
            for question in questions
            for rounds in _sizes(samples * question.times)
        ]
        tasks = [task._replace(seed=seed + number) for number, task in enumerate(tasks)]
        quick = [
            task._replace(delay_ms=LEAST_DELAY)
            for task in tasks
            if QUESTIONS[task.question].call in (impression, error)
        ]
        slow = [task for task in tasks if QUESTIONS[task.question].call not in (impression, error)]
        # The longest first: two calls, one after the other.
        slow.sort(key=lambda task: not QUESTIONS[task.question].has_company)
        in_turn = (_in_processes(slow, conditions.lanes), _in_processes(quick, min(conditions.lanes, QUICK_LANES)))
        for task, part in chain.from_iterable(in_turn):
            parts[QUESTIONS[task.question]].append(part)
            advance(1)
    joined = {question: [np.concatenate(side) for side in zip(*each, strict=True)] for question, each in parts.items()}
    return {question: (first, second) for question, (first, second) in joined.items()}


@contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="trefoil-bench-") as name:
        yield Path(name)


def _sizes(samples: int) -> list[int]:
    """Return how many rounds each task of a question has."""
    # The first call of a round is dropped.
    rounds = max(2, samples // (IN_A_ROW - 1))
    return [min(ROUNDS_PER_TASK, rounds - done) for done in range(0, rounds, ROUNDS_PER_TASK)]


def _in_processes(tasks: Sequence[Task], lanes: int) -> Iterator[tuple[Task, Answers]]:
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
    """Seconds of calls without the delay, by state, of a null report, and of calls with the delay, by question.

    `again` are the answers to questions that were asked a second time.
    """

    costs: Mapping[State, Cost]
    fallback: Samples
    promises: Promises
    answers: Mapping[Question, Answers]
    conditions: Conditions
    again: Mapping[Question, Answers] = field(default_factory=dict)

    def missed(self) -> list[Question]:
        """Return the questions that are no coins. Controls promise nothing and are not counted."""
        promised = ((question, times) for question, times in self.answers.items() if not question.is_control)
        return [question for question, times in promised if not area_between(*times).is_a_coin]

    def to_json(self) -> dict[str, object]:
        """Return times without the delay, promises, and areas with the delay."""
        named = {state.value: cost.wall for state, cost in self.costs.items()}
        median = {name: _median_ms(times) for name, times in named.items()}
        return {
            "median_ms": median,
            "p99_ms": {name: float(np.percentile(times, 99) * 1000) for name, times in named.items()},
            "ratio_100_to_10": median["100"] / median["10"],
            "paper_ratio": PAPER_RATIO,
            "processor_ms": {state.value: _median_ms(cost.processor) for state, cost in self.costs.items()},
            "constant_processor_ms": _median_ms(self.fallback),
            "samples": len(self.fallback),
            "delay_ms": self.conditions.delay_ms,
            "busy_loops": self.conditions.busy_loops,
            "promises": self.promises.to_json(),
            "questions": sum(not question.is_control for question in self.answers),
            "watching": {question.text: _to_json(*times) for question, times in self.answers.items()},
            "watching_again": {question.text: _to_json(*times) for question, times in self.again.items()},
        }

    def tables(self) -> list[Table]:
        return [self._time_table(), self.promises.table(), self._area_table()]

    def _time_table(self) -> Table:
        medians = [np.median(self.costs[state].wall) for state in (State.HUNDRED, State.TEN)]
        caption = f"100 to 10 impressions: {medians[0] / medians[1]:.2f} times the time (paper: {PAPER_RATIO})"
        table = Table("case", title="measure_conversion without the delay, milliseconds", caption=caption)
        for column in ("median", "p99", "processor, median"):
            table.add_column(column, justify="right")
        for state, (wall, processor) in self.costs.items():
            p99 = 1000 * float(np.percentile(wall, 99))
            table.add_row(state.value, f"{_median_ms(wall):.3f}", f"{p99:.3f}", f"{_median_ms(processor):.3f}")
        table.add_row("constant part: a null report", "", "", f"{_median_ms(self.fallback):.3f}")
        return table

    def _area_table(self) -> Table:
        caption = f"a question that is no coin is asked again, of {AGAIN} times as many calls"
        title = "what the time tells its caller: area under the curve, 95 % interval"
        table = Table("question", title=title, caption=caption)
        for column in ("calls", "area", "interval", "a coin?", "bits"):
            table.add_column(column, justify="right")
        for question, times in chain(self.answers.items(), self.again.items()):
            area = area_between(*times)
            low, high = area.interval()
            coin = "yes" if area.is_a_coin else "no"
            figures = (f"{area.value:.3f}", f"[{low:.3f}, {high:.3f}]", coin, f"{bits_between(*times):.4f}")
            table.add_row(question.text, str(times[0].size), *figures)
        return table


def _to_json(first: Samples, second: Samples) -> dict[str, object]:
    medians = [float(np.median(times) * 1000) for times in (first, second)]
    answer = {"rounds": len(first), "calls": first.size, "median_ms": medians, "bits": bits_between(first, second)}
    return answer | area_between(first, second).to_json()


def _median_ms(times: Samples) -> float:
    return float(np.median(times) * 1000)


class Conditions(NamedTuple):
    """How questions are asked: in so many processes, of devices with this delay, beside so many busy loops."""

    lanes: int = 20
    delay_ms: int = LIMITS.delay_ms
    busy_loops: int = 0


def measure(samples: int, conditions: Conditions, seed: int, advance: Callable[[int], None]) -> DeviceTiming:
    """Measure `samples` calls of each state without the delay, and about as many of each question with it."""
    with _folder() as folder:
        costs = time_without_delay(folder, samples, seed, advance)
        fallback = time_fallback(samples)
        with busy(conditions.busy_loops):
            promises = keep_promises(folder, min(samples, MOST_FIRST_SAVES), conditions.delay_ms)
            answers = ask_all(QUESTIONS, samples, conditions, seed, advance)
    return DeviceTiming(costs, fallback, promises, answers, conditions)


def ask_again(timing: DeviceTiming, samples: int, seed: int, advance: Callable[[int], None]) -> DeviceTiming:
    """Ask those questions again that were no coins, of `AGAIN` times as many calls."""
    with busy(timing.conditions.busy_loops):
        again = ask_all(timing.missed(), AGAIN * samples, timing.conditions, seed, advance)
    return replace(timing, again=again)


@contextmanager
def busy(loops: int) -> Iterator[Sequence[subprocess.Popen[bytes]]]:
    """Yield so many processes that keep the processors busy, and do nothing else."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(loops)]
    try:
        yield running
    finally:
        for process in running:
            process.kill()
            process.wait()


def steps(questions: Sequence[Question], samples: int) -> int:
    """Return how often `ask_all` calls `advance`."""
    return sum(len(_sizes(samples * question.times)) for question in questions)

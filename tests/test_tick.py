"""Ticks: when a call leaves follows from the limits and from who called before, never from what was done meanwhile.

On a clock of the tests' own, which moves when someone waits or works. Only that the real worker does what it says is
tried on the real one, and nothing is asserted about how long it takes.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from device.conversion import AttributionRequest, ConversionOptions
from device.device import Device
from device.errors import RangeError
from device.impression import Impression, ImpressionOptions, Selection
from device.limits import TREFOIL_SERVICE, DeviceLimits
from device.memory_store import MemoryStore
from device.privacy_filter import FilterKind
from device.report import PlainSeal
from device.storage import Store
from device.tick import GUARD, LEAVES_WITHIN, MARGIN, AtOnce, Ticks, random_delay
from tests.support.both_stores import Kind, fresh_store
from tests.support.small_worlds import NOW, PUBLISHER, QUERIER, PlainDevice
from tests.support.virtual_ticks import VirtualTime, at_once

T = TypeVar("T")
TICK = 0.05
WORK = 0.015
OPTIONS = ConversionOptions(TREFOIL_SERVICE, 2, epsilon=0.01)


class Slow:
    """A worker that is done only when it is told to be."""

    def __init__(self) -> None:
        self.pending: list[Callable[[], object]] = []

    def __call__(self, work: Callable[[], T], /) -> Future[T]:
        self.pending.append(work)
        return Future()


def ticks(time: VirtualTime, submit: Any = at_once) -> Ticks:
    return Ticks(TICK, clock=time, wait=time.wait, delay=lambda: 0.0, submit=submit)


def leave(ticker: Ticks, time: VirtualTime, queue: str = "shop", work: float = WORK, worked: float = 0.0) -> float:
    """How long a call takes, as its caller sees it."""
    begun = time.now

    def busy() -> None:
        time.now += worked

    with ticker.turn(queue, work, ticker.now()) as turn:
        turn.run(busy, None)
    return round(time.now - begun, 9)


@pytest.mark.parametrize("worked", [0.0, 0.001, 0.01, 0.037])
def test_a_call_leaves_at_its_tick_whatever_was_done(worked: float) -> None:
    time = VirtualTime()
    assert leave(ticks(time), time, worked=worked) == TICK


@pytest.mark.parametrize(("work", "expected"), [(0.001, 1), (0.038, 1), (0.039, 2), (0.088, 2), (0.5, 11)])
def test_a_turn_is_as_many_ticks_as_its_work_may_take(work: float, expected: int) -> None:
    """Decided by what it may take at most, before it begins."""
    assert pytest.approx(0.038) == TICK - GUARD - MARGIN
    for worked in (0.0, work):
        time = VirtualTime()
        assert leave(ticks(time), time, work=work, worked=worked) == pytest.approx(expected * TICK)


def test_calls_of_one_caller_follow_one_another() -> None:
    """Each has its own turn, begun where the one before ended."""
    time = VirtualTime()
    ticker = ticks(time)
    assert [leave(ticker, time, worked=worked) for worked in (0.0, 0.03, 0.001)] == [TICK] * 3


def overlapping(ticker: Ticks, time: VirtualTime, callers: int, worked: float) -> list[float]:
    """How long calls take that all come at the same moment, each from a caller of its own."""
    begun = time.now
    ends = []
    for caller in range(callers):
        # Each of them sees the clock where it was when all came.
        time.now = begun
        ends.append(leave(ticker, time, f"caller {caller}", worked=worked))
    return ends


@pytest.mark.parametrize("worked", [0.0, 0.005, 0.015])
def test_callers_that_fit_into_a_tick_do_not_see_one_another(worked: float) -> None:
    """Two have room; the third waits for a whole tick, and so on, whatever each of them finds to do."""
    time = VirtualTime()
    taken = overlapping(ticks(time), time, 5, worked)
    assert taken == pytest.approx([TICK, TICK, 2 * TICK, 2 * TICK, 3 * TICK])


Times = list[tuple[float, float]]


class Sleepless(Ticks):
    """Keeps what was reserved, so that it can be looked at: slots of the worker, and when calls leave."""

    def __init__(self, time: VirtualTime) -> None:
        super().__init__(TICK, clock=time, wait=lambda _: None, delay=lambda: 0.0, submit=at_once)
        self.slots: Times = []
        self.turns: Times = []

    def _reserve(self, turn: float, work: float) -> tuple[float, float]:
        begins, ends = super()._reserve(turn, work)
        self.slots.append((begins, begins + work))
        self.turns.append((turn, ends))
        return begins, ends


@given(
    st.lists(st.tuples(st.floats(0, 0.2), st.integers(0, 7), st.sampled_from([0.001, WORK, 0.04, 0.09])), max_size=30)
)
def test_nobody_works_while_another_report_is_sealed_and_leaves(calls: list[tuple[float, int, float]]) -> None:
    """Whoever comes when: how busy the worker is would show in when that one leaves."""
    time = VirtualTime()
    ticker = Sleepless(time)
    for after, caller, work in calls:
        time.now += after
        with ticker.turn(caller, work, time.now):
            pass
    for begins, done in ticker.slots:
        assert not [ends for _, ends in ticker.turns if begins < ends + GUARD - 1e-9 and ends - MARGIN + 1e-9 < done]
    # One slot after another, and every turn is a whole number of ticks with its own slot in it.
    assert all(done <= begins + 1e-9 for (_, done), (begins, _) in itertools.pairwise(ticker.slots))
    for (begins, done), (turn, ends) in zip(ticker.slots, ticker.turns, strict=True):
        assert turn + GUARD <= begins + 1e-9 and done + MARGIN <= ends + 1e-9
        assert (ends - turn) / TICK == pytest.approx(round((ends - turn) / TICK))


def test_nobody_waits_for_ever_for_a_slot() -> None:
    """Twenty callers at any distance from one another: the last waits for at most two ticks for each pair before it."""
    for apart in (0.0, 0.001, 0.013, 0.03, 0.049, 0.05, 0.07):
        time = VirtualTime()
        ticker = Sleepless(time)
        for caller in range(20):
            time.now += apart
            with ticker.turn(caller, WORK, time.now):
                pass
        assert all(ends - turn <= 21 * TICK for turn, ends in ticker.turns), apart


@pytest.mark.parametrize("worked", [0.0, 0.01, 0.037])
def test_a_call_leaves_a_little_after_its_turn(worked: float) -> None:
    """By coins alone, whatever was done."""
    time = VirtualTime()
    ticker = Ticks(TICK, clock=time, wait=time.wait, delay=lambda: 0.0007, submit=at_once)
    assert leave(ticker, time, worked=worked) == TICK + 0.0007


def test_the_delay_is_drawn_and_stays_within_the_guard() -> None:
    drawn = [random_delay() for _ in range(1000)]
    assert len(set(drawn)) > 900 and Ticks(TICK)._delay is random_delay
    assert min(drawn) >= 0 and max(drawn) <= LEAVES_WITHIN <= GUARD
    # Of two coins: the outer quarters hold an eighth each. 250 of 1,000 expected, ± 7 standard deviations of 13.7.
    assert 154 <= sum(abs(delay / LEAVES_WITHIN - 0.5) > 0.25 for delay in drawn) <= 346


def test_a_turn_begins_with_the_call_not_with_the_work() -> None:
    """Checking options takes its time, which depends on what the device did before."""
    for checked in (0.0, 0.0007, 0.0019):
        time = VirtualTime()
        ticker = ticks(time)
        came = time.now
        time.now += checked
        with ticker.turn("shop", WORK, came) as turn:
            turn.run(lambda: None, None)
        assert round(time.now - came, 9) == TICK


def test_work_that_is_late_is_left_behind_and_goes_on() -> None:
    time, slow = VirtualTime(), Slow()
    with ticks(time, slow).turn("shop", WORK, time.now) as turn:
        assert turn.run(lambda: "report", "null") == "null"
    assert [work() for work in slow.pending] == ["null"], "it begins after its time, and looks at nothing"


@pytest.mark.parametrize(
    ("worked", "expected"), [(0.0, "report"), (0.001, "report"), (0.03, "report"), (0.045, "null")]
)
def test_a_caller_goes_on_at_its_time_not_when_the_work_is_done(worked: float, expected: str) -> None:
    """What is ready by then is in its report; and it is not awake any earlier for less work."""
    time = VirtualTime()
    pending: list[tuple[float, Future[Any], object]] = []

    def worker(work: Callable[[], T], /) -> Future[T]:
        pending.append((time.now + worked, Future(), work()))
        return pending[-1][1]

    def wait(moment: float) -> None:
        for ready, done, result in pending:
            if ready <= moment and not done.done():
                done.set_result(result)
        time.wait(moment)

    came = time.now
    with Ticks(TICK, clock=time, wait=wait, delay=lambda: 0.0, submit=worker).turn("shop", WORK, came) as turn:
        assert turn.run(lambda: "report", "null") == expected
        assert time.now == pytest.approx(came + TICK - MARGIN)


def test_work_that_began_in_time_is_finished() -> None:
    """The caller has gone; what was begun is paid for all the same."""
    time, done = VirtualTime(), list[object]()

    def begins_and_takes_long(work: Callable[[], T], /) -> Future[T]:
        done.append(work())
        return Future()

    with ticks(time, begins_and_takes_long).turn("shop", WORK, time.now) as turn:
        assert turn.run(lambda: "charged", "null") == "null"
    assert done == ["charged"]


def test_the_default_limits_have_room_for_two_callers_in_a_tick_of_eighty_milliseconds() -> None:
    limits = DeviceLimits()
    assert limits.tick_seconds == 0.08
    assert 2 * limits.work_seconds + GUARD + MARGIN <= limits.tick_seconds


@pytest.mark.parametrize(
    "more",
    [
        {"max_impressions_per_epoch": 20_000},
        {"max_sites_per_epoch": 2_000},
        {"max_lookback_days": 300},
        {"epoch_days": 1},
    ],
)
def test_a_device_that_may_hold_more_has_a_longer_tick(more: dict[str, Any]) -> None:
    assert DeviceLimits(**more).tick_seconds > DeviceLimits().tick_seconds


def test_the_real_worker_does_one_thing_after_another() -> None:
    ticker = Ticks(0.02)
    running, most, reports = [0], [0], []
    mutex = threading.Lock()

    def work() -> int:
        with mutex:
            running[0] += 1
            most[0] = max(most[0], running[0])
        with mutex:
            running[0] -= 1
        return 1

    def call(caller: int) -> None:
        with ticker.turn(caller % 3, 0.001, ticker.now()) as turn:
            reports.append(turn.run(work, 0))

    threads = [threading.Thread(target=call, args=(number,)) for number in range(9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(reports) == 9
    assert most == [1]


# On a device


class Watched(MemoryStore):
    """A store in which work takes time on the tests' clock: more, the more there is."""

    def __init__(self, time: VirtualTime) -> None:
        super().__init__(debug=True)
        self.fix_epoch_start(NOW)
        self.time = time

    def census(self, since: int, until: int) -> Any:
        found = super().census(since, until)
        self.time.now += 0.001 + 0.004 * sum(site.held for site in found)
        return found

    def matched_sites(self, selection: Selection, calendar: Any) -> Any:
        self.time.now += 0.001 + 0.004 * len(self._impressions)
        return super().matched_sites(selection, calendar)


@pytest.fixture
def watched() -> Iterator[tuple[PlainDevice, VirtualTime]]:
    time = VirtualTime()
    yield Device(Watched(time), PlainSeal(), clock=lambda: NOW + 1, ticker=ticks(time)), time


def elapsed(time: VirtualTime, call: Callable[[], object]) -> float:
    begun = time.now
    call()
    return round(time.now - begun, 6)


def test_saves_and_measurements_leave_at_the_same_tick_with_data_or_without(
    watched: tuple[PlainDevice, VirtualTime],
) -> None:
    """Errors, which depend on the options alone, come at once."""
    device, time = watched

    def save() -> None:
        device.save_impression(PUBLISHER, ImpressionOptions(0))

    def convert() -> object:
        return device.measure_conversion(QUERIER, OPTIONS)

    taken = [elapsed(time, convert), *(elapsed(time, save) for _ in range(5)), elapsed(time, convert)]
    device.disable()
    taken += [elapsed(time, save), elapsed(time, convert)]
    assert taken == [TICK] * 9
    with pytest.raises(RangeError):
        device.measure_conversion(QUERIER, ConversionOptions(TREFOIL_SERVICE, 0))
    with pytest.raises(RangeError):
        device.save_impression(PUBLISHER, ImpressionOptions(-1))
    assert elapsed(time, lambda: None) == 0


def test_all_of_a_call_is_in_its_turn() -> None:
    """Also what comes before its work: a device whose own clock is slow to read."""
    time = VirtualTime()

    def slow_clock() -> int:
        time.now += 0.0009
        return NOW

    device: PlainDevice = Device(MemoryStore(debug=True), PlainSeal(), clock=slow_clock, ticker=ticks(time))
    assert elapsed(time, lambda: device.measure_conversion(QUERIER, OPTIONS)) == TICK
    assert elapsed(time, lambda: device.save_impression(PUBLISHER, ImpressionOptions(0))) == TICK


@pytest.fixture(params=list(Kind), ids=lambda kind: kind.value)
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    with fresh_store(request.param) as fresh:
        yield fresh


def test_a_report_that_is_late_is_null_and_paid_for(store: Store) -> None:
    time = VirtualTime()
    late = [False]

    def worker(work: Callable[[], T], /) -> Future[T]:
        result, done = work(), Future[T]()
        if not late[0]:
            done.set_result(result)
        return done

    device: PlainDevice = Device(store, PlainSeal(), clock=lambda: NOW, ticker=ticks(time, worker))
    device.save_impression(PUBLISHER, ImpressionOptions(1))
    assert device.measure_conversion(QUERIER, OPTIONS) == (0, 1)
    late[0] = True
    assert device.measure_conversion(QUERIER, OPTIONS) == (0, 0)
    paid = {state.kind: state.spent for state in device.budget()}
    # Advertisers' quotas are for the display side.
    assert paid == dict.fromkeys(set(FilterKind) - {FilterKind.ADVERTISER}, 20_000)
    assert len(device.reports()) == 2


def test_saves_and_measurements_of_one_caller_stand_in_one_queue(store: Store) -> None:
    queues: list[tuple[object, float]] = []

    class Noting(AtOnce):
        def turn(self, queue: Any, work: float, came: float) -> Any:
            queues.append((queue, work))
            return super().turn(queue, work, came)

    device: PlainDevice = Device(store, PlainSeal(), clock=lambda: NOW, ticker=Noting())
    device.save_impression("a.example", ImpressionOptions(0), intermediary="ads.example")
    device.measure_conversion("www.a.example", OPTIONS, intermediary="ads.example")
    device.measure_conversion("a.example", OPTIONS)
    device.measure("a.example", AttributionRequest([0], 0.1, 1, 1, 1))
    assert [queue for queue, _ in queues] == [("a.example", "ads.example")] * 2 + [("a.example", "a.example")] * 2
    assert {work for _, work in queues} == {DeviceLimits().work_seconds}


def test_nothing_of_what_was_found_is_freed_after_the_turn() -> None:
    """Freeing takes longer the more was found; the worker does it, and not the caller after its tick."""

    class Tracked(Impression):
        freed = 0

        def __del__(self) -> None:
            Tracked.freed += 1

    class Keeps(MemoryStore):
        def matching(self, selection: Selection, need: Any = None) -> Any:
            return [Tracked._make(impression) for impression in super().matching(selection)]

    seen: list[int] = []

    def worker(work: Callable[[], T], /) -> Future[T]:
        done = at_once(work)
        seen.append(Tracked.freed)
        return done

    time = VirtualTime()
    device: PlainDevice = Device(Keeps(debug=True), PlainSeal(), clock=lambda: NOW, ticker=ticks(time, worker))
    for _ in range(5):
        device.save_impression(PUBLISHER, ImpressionOptions(0))
    assert any(device.measure_conversion(QUERIER, OPTIONS))
    assert seen[-1] == 5

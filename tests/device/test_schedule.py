"""The schedule of calls: when they are worked on and answered. Latency is a function of the caller's own calls alone.

The order of jobs is tested on the backlog itself; answers on a virtual clock, which moves when a caller sleeps; the
real worker with events instead of times. No test asserts how long anything takes.
"""

from __future__ import annotations

import gc
import json
import logging
import re
import subprocess
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.experiments.small_worlds import NOW, PUBLISHER, QUERIER, START, WEEK, PlainDevice
from device import agent
from device.attribution import named_function
from device.budget import FilterKind
from device.conversion import AttributionRequest, ConversionOptions
from device.device import Device
from device.errors import DatabaseUnavailable, RangeError, StandardError
from device.events import ConversionEventOptions, Impression, ImpressionOptions, Selection
from device.labelling import LabelOptions
from device.limits import TREFOIL_SERVICE, DeviceLimits
from device.report import PlainSeal
from device.schedule import (
    BURST,
    INTERVAL,
    MAX_PENDING,
    SOON,
    SOON_SPREAD,
    SPREAD,
    YARDSTICKS,
    AtOnce,
    Backlog,
    Buckets,
    Caller,
    Delayed,
    Job,
    random_spread,
)
from device.site import parse_site
from device.stores.memory_store import MemoryStore
from device.stores.sqlite_store import SqliteStore
from device.stores.storage import CLEANUP_LIMIT, Store
from protocol.report import seal_report
from protocol.units import DAY, HOUR
from tests.support import protocol_samples as samples
from tests.support.both_stores import Kind, fresh_store
from tests.support.processes import TREFOIL, started
from tests.support.three_helpers import wait_until

OPTIONS = ConversionOptions(TREFOIL_SERVICE, 2, epsilon=0.01)
LABEL = LabelOptions(TREFOIL_SERVICE, (1, 1), 2, 0.01, 8 * DAY, (QUERIER,))
SHOP = Caller("shop.example", "shop.example")
NEWS = Caller("news.example", "news.example")
DELAY = 1.0
WORK = 0.1
# Long enough for any machine; nothing waits for it unless a test fails.
PATIENTLY = 60.0


def nothing() -> None:
    """Stands for work of which only the order matters."""


def job(caller: Caller, came: float = 0.0) -> Job:
    return Job(caller, came, nothing)


# The order of jobs


@given(st.lists(st.sampled_from([SHOP, NEWS, Caller("shop.example", "ads.example")]), max_size=40))
def test_jobs_are_taken_in_the_order_of_calls(callers: Sequence[Caller]) -> None:
    backlog = Backlog(patience=1.0)
    jobs = [job(caller) for caller in callers]
    assert all(backlog.put(each) for each in jobs)
    assert [backlog.take(0.5) for _ in jobs] == jobs
    assert backlog.take(0.5) is None


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2)), max_size=60), st.lists(st.booleans(), max_size=60))
def test_the_order_of_one_caller_is_kept_in_a_flood_too(calls: list[tuple[int, int]], flooded: list[bool]) -> None:
    """Whichever jobs are taken in order and whichever in turn: all of them are taken, and no caller's out of order."""
    backlog = Backlog(patience=1.0)
    jobs = [job(Caller(f"site{site}.example", f"caller{caller}.example")) for site, caller in calls]
    for each in jobs:
        backlog.put(each)
    taken: list[Job] = []
    for is_flooded in [*flooded, *[True] * len(jobs)]:
        if (each_taken := backlog.take(2.0 if is_flooded else 0.5)) is not None:
            taken.append(each_taken)
    assert Counter(map(id, taken)) == Counter(map(id, jobs))
    for caller in {each.caller for each in jobs}:
        assert [each for each in taken if each.caller == caller] == [each for each in jobs if each.caller == caller]


def test_in_a_flood_sites_take_turns_and_on_a_site_its_callers() -> None:
    backlog = Backlog(patience=1.0)
    flood = [Caller(f"bad{number % 50}.example", "ads.example") for number in range(1000)]
    for each in flood:
        backlog.put(job(each))
    shop, own = job(SHOP), job(Caller("bad0.example", "honest.example"))
    backlog.put(shop)
    backlog.put(own)
    taken = [backlog.take(1.0) for _ in range(102)]
    # One job of each of the fifty before the shop's; and the second caller of the first site in the second round.
    assert taken.index(shop) <= 50
    assert taken.index(own) <= 101


def test_a_site_that_missed_its_turn_has_the_next() -> None:
    """Fifty sites and the shop call in every round, the shop last, and there is time for forty jobs in a round."""
    backlog = Backlog(patience=1.0)
    served: list[bool] = []
    for number in range(20):
        jobs = [job(Caller(f"bad{each}.example", "ads.example"), number) for each in range(50)] + [job(SHOP, number)]
        for each in jobs:
            backlog.put(each)
        taken = [backlog.take(number + 1.0) for _ in range(40)]
        served.append(jobs[-1] in taken)
        # The others are too late for this round.
        while backlog._by_age:
            dropped = backlog._by_age.popleft()
            backlog._by_site.pop(dropped.caller.site, None)
    assert sum(served) >= 0.7 * len(served)


def test_of_a_thousand_sites_it_is_remembered_when_they_were_served_last() -> None:
    """What makes place for the latest turn is the earliest one: else a site could have every turn."""
    backlog = Backlog(patience=1.0)
    sites = [Caller(f"site{number}.example", "ads.example") for number in range(1001)]
    for site in sites:
        backlog.put(job(site))
        backlog.take(1.0)
    latest, earlier = job(sites[1000]), job(sites[1])
    backlog.put(latest)
    backlog.put(earlier)
    assert [backlog.take(1.0), backlog.take(1.0)] == [earlier, latest]


def test_a_site_whose_job_was_too_late_has_not_had_its_turn() -> None:
    backlog = Backlog(patience=1.0)
    backlog.put(job(NEWS))
    backlog.take(1.0)
    late = Job(SHOP, 0.0, nothing, begin_by=1.0)
    backlog.put(late)
    assert backlog.take(1.0) is late
    news, shop = job(NEWS), job(SHOP)
    backlog.put(news)
    backlog.put(shop)
    assert [backlog.take(1.0), backlog.take(1.0)] == [shop, news]


def test_a_caller_with_too_many_pending_jobs_loses_its_own_alone() -> None:
    backlog = Backlog(patience=1.0)
    assert all(backlog.put(job(NEWS)) for _ in range(MAX_PENDING))
    assert not backlog.put(job(NEWS))
    assert backlog.put(job(SHOP))
    backlog.take(0.0)
    assert backlog.put(job(NEWS))


# How often one caller may call


def test_a_caller_is_slowed_down_by_its_own_calls_alone() -> None:
    """A burst counts as made when it was, then one call in every interval, whatever others do meanwhile."""
    expected = [0.0] * BURST + [INTERVAL * number for number in range(1, 11)]
    for others in (0, 1, 60):
        buckets, arrivals = Buckets(), []
        for number in range(len(expected)):
            for other in range(others):
                buckets.take(Caller(f"site{other}.example", f"caller{number}.example"), 0.0)
            arrivals.append(buckets.take(SHOP, 0.0))
        assert arrivals == pytest.approx(expected)


@pytest.mark.parametrize("others", [0, 50])
def test_a_caller_that_pauses_has_its_burst_again_and_none_waits_for_long(others: int) -> None:
    """And no more, however long it paused, also while it is still remembered."""
    buckets = Buckets()
    for other in range(others):
        buckets.take(Caller(f"site{other}.example", ""), 0.0)
    for _ in range(10 * BURST):
        latest = buckets.take(SHOP, 0.0)
    assert latest == pytest.approx(BURST * INTERVAL)
    rested = 4 * BURST * INTERVAL
    assert [buckets.take(SHOP, rested) for _ in range(BURST)] == pytest.approx([rested] * BURST)
    assert buckets.take(SHOP, rested) == pytest.approx(rested + INTERVAL)


def test_only_callers_of_the_last_seconds_are_remembered() -> None:
    """A hundred thousand callers, a thousand a second: no more than those whose buckets are not full yet."""
    buckets, most = Buckets(), 0
    for number in range(100_000):
        buckets.take(Caller(f"site{number}.example", ""), number / 1000)
        most = max(most, len(buckets))
    assert most <= 2 * 1000 * INTERVAL + 2


def test_a_crowd_of_callers_is_forgotten_by_the_calls_of_new_ones() -> None:
    """A call that forgot as many as it adds would keep the crowd for as long as callers are new."""
    buckets = Buckets()
    for number in range(1000):
        buckets.take(Caller(f"crowd{number}.example", ""), 0.0)
    for number in range(1000):
        buckets.take(Caller(f"site{number}.example", ""), 1.0 + number)
    assert len(buckets) <= 3


# Answers


class VirtualTime:
    """A clock that moves when a caller sleeps. What the worker does meanwhile takes no time."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept = 0
        # Run when a caller goes to sleep: the worker's time.
        self.meanwhile: Callable[[], object] = nothing

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept += 1
        self.meanwhile()
        self.now += seconds


@contextmanager
def delayed(time: VirtualTime | None = None, spread: float = 0.0) -> Iterator[Delayed]:
    time = time or VirtualTime()
    schedule = Delayed(DELAY, WORK, clock=time, sleep=time.sleep, spread=lambda: spread)
    time.meanwhile = partial(schedule.drain, PATIENTLY)
    try:
        yield schedule
    finally:
        schedule.close(PATIENTLY)


@pytest.mark.parametrize("checked", [0.0, 0.0007, 0.4])
@pytest.mark.parametrize("spread", [0.0, 0.013])
def test_an_answer_leaves_a_delay_after_its_call(checked: float, spread: float) -> None:
    """Whatever validation and the fallback took, and whoever else has called."""
    for others in (0, 30):
        time = VirtualTime()
        with delayed(time, spread) as schedule:
            came = schedule.now()
            for number in range(others):
                schedule.save(Caller(f"site{number}.example", "ads.example"), nothing)
            time.now += checked
            assert schedule.measure(SHOP, came, lambda: "report", lambda: "null") == "report"
            assert time.now == pytest.approx(came + DELAY + spread)


def test_what_is_not_ready_leaves_as_the_fallback_at_the_same_time() -> None:
    """The work has begun, so it is finished: it will be paid for."""
    time, go, done = VirtualTime(), threading.Event(), threading.Event()
    begun = threading.Event()

    def work() -> str:
        begun.set()
        assert go.wait(PATIENTLY)
        done.set()
        return "report"

    with delayed(time) as schedule:
        time.meanwhile = partial(begun.wait, PATIENTLY)
        assert schedule.measure(SHOP, schedule.now(), work, lambda: "null") == "null"
        assert time.now == 100.0 + DELAY and not done.is_set()
        go.set()
        assert done.wait(PATIENTLY)


def test_work_that_cannot_begin_in_time_is_dropped_and_reads_nothing() -> None:
    time, ran = VirtualTime(), list[str]()
    busy = threading.Event()
    with delayed(time) as schedule:
        schedule.save(NEWS, partial(busy.wait, PATIENTLY))
        time.meanwhile = nothing
        assert schedule.measure(SHOP, schedule.now(), partial(ran.append, "read"), nothing) is None
        busy.set()
        assert schedule.drain(PATIENTLY)
    assert ran == []


@pytest.mark.parametrize("begins", [True, False])
@pytest.mark.parametrize("spread", [0.0, 0.2])
def test_work_begins_early_enough_to_be_ready_or_not_at_all(begins: bool, spread: float) -> None:
    """So that what is paid for is seldom late: `WORK` before the delay is over, or a hundredth after that."""
    time, busy, ran = VirtualTime(), threading.Event(), list[str]()
    with delayed(time, spread) as schedule:
        schedule.save(NEWS, partial(busy.wait, PATIENTLY))

        def meanwhile() -> None:
            time.now += DELAY - WORK + (-0.01 if begins else 0.01)
            busy.set()
            assert schedule.drain(PATIENTLY)

        time.meanwhile = meanwhile
        schedule.measure(SHOP, schedule.now(), partial(ran.append, "read"), nothing)
    assert bool(ran) is begins


@pytest.mark.parametrize(("waited", "order"), [(0.44, ["news", "news", "shop"]), (0.46, ["shop", "news", "news"])])
def test_sites_take_turns_once_a_call_has_waited_for_nearly_half_the_delay(waited: float, order: list[str]) -> None:
    time, busy, ran = VirtualTime(), threading.Event(), list[str]()
    with delayed(time) as schedule:
        schedule.save(NEWS, partial(busy.wait, PATIENTLY))
        for _ in range(2):
            schedule.save(NEWS, partial(ran.append, "news"))
        schedule.save(SHOP, partial(ran.append, "shop"))
        time.now += waited
        busy.set()
        assert schedule.drain(PATIENTLY)
    assert ran == order


def test_a_measurement_takes_a_multiple_of_the_same_processor_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its work took. Computed when no job waits, so that others' jobs begin at once; a save is not evened."""
    milliseconds = [0]

    def compute() -> None:
        milliseconds[0] += 1

    def work(taken: int) -> None:
        milliseconds[0] += taken

    monkeypatch.setattr("device.schedule._compute_for_nothing", compute)
    time = VirtualTime()
    schedule = Delayed(
        DELAY, WORK, 16, clock=time, sleep=time.sleep, spread=lambda: 0.0, processor_clock=lambda: milliseconds[0]
    )
    # The bound on what is owed is another test's.
    schedule.delay = 10**6
    with closing(schedule):
        for measurements in ((0,), (1,), (15,), (16,), (17,), (3, 5, 40), (9, 9)):
            milliseconds[0] = 0
            for taken in measurements:
                schedule._put(Job(SHOP, 0.0, partial(work, taken), begin_by=10**9))
            schedule._put(Job(SHOP, 0.0, partial(work, 5)))
            assert schedule.drain(PATIENTLY)
            wait_until(lambda: schedule._owed <= 0)
            assert milliseconds[0] == 5 + sum(-(-taken // 16) * 16 for taken in measurements)


@pytest.mark.parametrize(
    ("took", "limit", "expected"), [(0.0001, 50, 0.05), (0.01, 50, 10 / 1000 * YARDSTICKS), (0.01, 0, 0)]
)
def test_a_measurement_takes_longer_on_a_slower_machine(
    monkeypatch: pytest.MonkeyPatch, took: float, limit: int, expected: float
) -> None:
    """By a yardstick that no data decides, and the least of three: a neighbour stretches some of them."""
    readings = iter([3 * took, took, 2 * took])
    monkeypatch.setattr("device.schedule.yardstick", lambda: next(readings))
    with closing(Delayed.within(DeviceLimits(processor_ms=limit))) as schedule:
        assert schedule._processor == pytest.approx(expected)


def test_garbage_is_not_looked_for_in_what_was_in_memory_before() -> None:
    """It would take a measurement as long as a full device's work, now and then."""
    script = "import gc; import device.schedule as s; s.Delayed(1, 0.1).close(); print(len(gc.get_objects()))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENTLY, check=True)
    assert int(done.stdout) < 1000


def test_what_a_flood_owes_is_bounded() -> None:
    schedule = Delayed(DELAY, WORK, 0.3, processor_clock=lambda: 0.0)
    schedule.close(PATIENTLY)
    for _ in range(100):
        schedule._owe(0.001)
    assert schedule._owed == DELAY


def test_a_report_does_not_stay_in_memory_when_it_has_left() -> None:
    """The backlog may hold its job until the next one is taken."""

    class Report:
        pass

    with delayed() as schedule:
        report = schedule.measure(SHOP, schedule.now(), Report, Report)
        assert schedule.drain(PATIENTLY)
        held = weakref.ref(report)
        del report
        assert held() is None


def test_a_caller_is_not_woken_by_the_worker() -> None:
    """It sleeps once, for all of the delay, and then takes what is there."""
    time = VirtualTime()
    with delayed(time) as schedule:
        schedule.measure(SHOP, schedule.now(), nothing, nothing)
    assert time.slept == 1


def test_the_spread_is_drawn_for_each_answer() -> None:
    drawn = [random_spread() for _ in range(1000)]
    assert len(set(drawn)) > 900
    assert min(drawn) >= 0 and max(drawn) <= SPREAD
    # Of two coins: the outer quarters hold an eighth each. 250 of 1,000 expected, ± 7 standard deviations of 13.7.
    assert 154 <= sum(abs(spread / SPREAD - 0.5) > 0.25 for spread in drawn) <= 346


def test_an_error_after_the_charge_is_a_null_report(caplog: pytest.LogCaptureFixture) -> None:
    def fails() -> str:
        raise ValueError("secret")

    with delayed() as schedule, caplog.at_level(logging.ERROR):
        assert schedule.measure(SHOP, schedule.now(), fails, lambda: "null") == "null"
        assert schedule.measure(SHOP, schedule.now(), lambda: "next", lambda: "null") == "next"
    assert "ValueError" in caplog.text and "secret" not in caplog.text


@pytest.mark.parametrize("fault", [KeyboardInterrupt, SystemExit])
def test_what_would_end_a_program_reaches_neither_the_worker_nor_the_caller(fault: type[BaseException]) -> None:
    """A person interrupts a program in its main thread; on the worker, a querier's function has raised it."""

    def ends() -> str:
        raise fault("what the function saw")

    time = VirtualTime()
    with delayed(time) as schedule:
        schedule.save(NEWS, ends)
        assert schedule.measure(SHOP, schedule.now(), ends, lambda: "null") == "null"
        assert time.now == 100.0 + DELAY
        assert schedule.measure(SHOP, schedule.now(), lambda: "next", lambda: "null") == "next"


class NoInterrupt(BaseException):
    """One that says that it is an interrupt."""

    __class__ = KeyboardInterrupt  # type: ignore[assignment]  # the point of the test


@pytest.mark.parametrize("fault", [KeyboardInterrupt, NoInterrupt])
@pytest.mark.parametrize("code", ["function", "relevant"])
def test_an_interrupt_that_a_function_raises_is_like_any_other_fault_of_it(
    store: Store, fault: type[BaseException], code: str
) -> None:
    """Else its caller would read what it saw, and what it saw of one week would decide what another pays."""

    def raises(shown: object, *_: object) -> Any:
        if code == "function" or (isinstance(shown, Impression) and shown.histogram_index):
            raise fault(shown)
        return True

    functions: dict[str, Any] = {code: raises}
    request = AttributionRequest((0, 1), 0.5, 2, 1, 2, **functions)
    with store.transaction():
        for week in (0, 1):
            store.save(ImpressionOptions(1 - week).saved("a.example", "a.example", START + week * WEEK, DeviceLimits()))
    with timed(store, VirtualTime()) as (device, _):
        assert device.measure(QUERIER, request) == ((1, 0) if code == "relevant" else (0, 0))
        paid = {state.epoch: state.spent for state in device.budget() if state.kind is FilterKind.SITE}
        assert paid == ({1: 500_000} if code == "relevant" else {0: 500_000, 1: 500_000})
        assert [len(record.epochs) for record in device.reports()] == [2]


# Closing


def test_closing_applies_every_accepted_save() -> None:
    applied: list[int] = []
    with delayed() as schedule:
        for number in range(100):
            assert schedule.save(NEWS, partial(applied.append, number))
    assert applied == list(range(100))
    assert not schedule.save(NEWS, nothing)
    assert not schedule._thread.is_alive()


def test_closing_has_a_deadline_and_says_what_was_lost(caplog: pytest.LogCaptureFixture) -> None:
    stuck, applied = threading.Event(), list[int]()
    with delayed() as schedule:
        schedule.save(NEWS, partial(stuck.wait, PATIENTLY))
        schedule.save(NEWS, partial(applied.append, 1))
        with caplog.at_level(logging.WARNING):
            schedule.close(0.01)
        assert "2 pending calls" in caplog.text
        stuck.set()
    schedule._thread.join(PATIENTLY)
    assert applied == []


PROGRAM = """
import sys
from device.device import Device
from device.events import ImpressionOptions
from device.report import PlainSeal
from device.schedule import Delayed
from device.stores.sqlite_store import SqliteStore
from pathlib import Path

SqliteStore.create(Path(sys.argv[1]), epoch_length=7 * 86400, debug=True)
store = SqliteStore.open(Path(sys.argv[1]), epoch_length=7 * 86400, clock=lambda: 1_800_000_000)
device = Device(store, PlainSeal(), clock=lambda: 1_800_000_000, schedule=Delayed(1.0, 0.1))
for number in range(20):
    device.save_impression("news.example", ImpressionOptions(number))
"""


def test_a_program_that_ends_without_closing_loses_no_save(tmp_path: Path) -> None:
    path = tmp_path / "ann.db"
    subprocess.run([sys.executable, "-c", PROGRAM, str(path)], check=True, timeout=PATIENTLY)
    with agent.opened(path, schedule=AtOnce()) as device:
        assert [saved.impression.histogram_index for saved in device.overview().impressions] == list(range(20))


# On a device


@pytest.fixture(params=list(Kind), ids=lambda kind: kind.value)
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    with fresh_store(request.param) as fresh:
        yield fresh


@contextmanager
def timed(store: Store, time: VirtualTime | None = None) -> Iterator[tuple[PlainDevice, Delayed]]:
    with delayed(time) as schedule:
        yield Device(store, PlainSeal(), clock=lambda: NOW, schedule=schedule), schedule


def test_twenty_saves_of_a_page_leave_soon_and_are_all_kept(store: Store) -> None:
    """They return while the worker is stuck, so nothing that it does can delay them."""
    time, stuck = VirtualTime(), threading.Event()
    with timed(store, time) as (device, schedule):
        schedule.save(SHOP, partial(stuck.wait, PATIENTLY))
        time.meanwhile = nothing
        for number in range(20):
            device.save_impression(PUBLISHER, ImpressionOptions(number))
        assert time.now == pytest.approx(100.0 + 20 * SOON)
        stuck.set()
        assert [saved.impression.histogram_index for saved in device.overview().impressions] == list(range(20))


def test_saves_and_conversions_of_one_site_are_applied_in_order(store: Store) -> None:
    with timed(store) as (device, _), ThreadPoolExecutor(1) as other:
        for count in range(3):
            report = other.submit(device.measure_conversion, QUERIER, OPTIONS).result(PATIENTLY)
            assert report == ((0, 0) if count == 0 else (0, 1))
            device.save_impression(PUBLISHER, ImpressionOptions(1))
        assert len(device.reports()) == 3


def test_a_report_that_is_late_is_null_and_paid_for(store: Store) -> None:
    """A report that is late after its charge; the worker sealed it too late."""
    time, sealed, go = VirtualTime(), threading.Event(), threading.Event()

    class Slow(PlainSeal):
        __slots__ = ()

        def prepare(self, *args: Any, **others: Any) -> Any:
            def seal(numbers: Sequence[int]) -> tuple[int, ...]:
                if any(numbers):
                    sealed.set()
                    assert go.wait(PATIENTLY)
                return tuple(numbers)

            return seal

    with delayed(time) as schedule:
        device: PlainDevice = Device(store, Slow(), clock=lambda: NOW, schedule=schedule)
        device.save_impression(PUBLISHER, ImpressionOptions(1))
        time.meanwhile = partial(sealed.wait, PATIENTLY)
        assert device.measure_conversion(QUERIER, OPTIONS) == (0, 0)
        go.set()
        paid = {state.kind: state.spent for state in device.budget()}
        # Advertisers' quotas are for the display side, and no side query was asked for.
        assert paid == dict.fromkeys(set(FilterKind) - {FilterKind.ADVERTISER, FilterKind.SIDE_QUERY}, 10_000)
        assert len(device.reports()) == 1


def test_a_device_that_is_off_seals_as_much(store: Store) -> None:
    """In its caller's thread a null report, in the worker the report, whatever is found: on, off, empty or not."""
    seals: list[str] = []

    class Noting(PlainSeal):
        __slots__ = ()

        def prepare(self, *args: Any, **others: Any) -> Any:
            def seal(numbers: Sequence[int]) -> tuple[int, ...]:
                seals.append("worker" if threading.current_thread().name == "device worker" else "caller")
                return tuple(numbers)

            return seal

    with delayed() as schedule:
        device: PlainDevice = Device(store, Noting(), clock=lambda: NOW, schedule=schedule)
        device.measure_conversion(QUERIER, OPTIONS)
        device.save_impression(PUBLISHER, ImpressionOptions(1))
        assert any(device.measure_conversion(QUERIER, OPTIONS))
        device.disable()
        assert not any(device.measure_conversion(QUERIER, OPTIONS))
    assert seals == ["caller", "worker"] * 3


def test_a_device_that_is_off_runs_the_same_statements() -> None:
    """For saves and measurements of both sides: what is on top undoes them."""
    calls: dict[str, Callable[[PlainDevice], object]] = {
        "impression": lambda device: device.save_impression(PUBLISHER, ImpressionOptions(1)),
        "conversion": lambda device: device.save_conversion(QUERIER, ConversionEventOptions([PUBLISHER])),
        "measured": lambda device: device.measure_conversion(QUERIER, OPTIONS),
        "labelled": lambda device: device.measure_impression(PUBLISHER, LABEL),
    }
    undoing = ("SAVEPOINT", "ROLLBACK TO", "RELEASE", "SELECT user_version", "-- PRAGMA")
    with fresh_store(Kind.DISK) as store:
        assert isinstance(store, SqliteStore)
        device: PlainDevice = Device(store, PlainSeal(), clock=lambda: NOW)
        for call in calls.values():
            call(device)
        for name, call in calls.items():
            statements: dict[bool, list[str]] = {}
            for on in (True, False):
                (device.enable if on else device.disable)()
                statements[on] = []
                store._connection.set_trace_callback(statements[on].append)
                call(device)
                store._connection.set_trace_callback(None)
            # Without their numbers, which are those of other rows.
            plain = [
                Counter(re.sub(r"[xX]'[^']*'|\b[0-9]+\b", "", line) for line in each if not line.startswith(undoing))
                for each in (statements[True], statements[False])
            ]
            assert plain[0] == plain[1] and len(plain[0]) > 4, name


@pytest.mark.parametrize("on", [True, False])
def test_the_queriers_own_functions_see_nothing_while_a_device_is_off(store: Store, on: bool) -> None:
    shown: list[object] = []
    device: PlainDevice = Device(store, PlainSeal(), clock=lambda: NOW)
    device.save_impression(PUBLISHER, ImpressionOptions(1))
    epochs = device.calendar().window(NOW, NOW)
    if not on:
        device.disable()

    def relevant(impression: Impression) -> bool:
        shown.append(impression)
        return True

    device.measure(QUERIER, AttributionRequest(epochs, 0.1, 2, 1, 2, relevant=relevant))
    assert bool(shown) is on


@pytest.mark.parametrize("checked", [0.0, SOON / 2])
def test_a_save_and_an_error_leave_soon_after_they_came_by_coins_of_their_own(
    checked: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever their checks took. An error of a site whose name is none leaves so too."""
    time, coins = VirtualTime(), iter([0.25, 0.5, 1.0, 0.75])
    schedule = Delayed(DELAY, WORK, clock=time, sleep=time.sleep, spread=lambda: SPREAD * next(coins))
    monkeypatch.setattr("device.device.check_kind", lambda *_: setattr(time, "now", time.now + checked))
    left: list[float] = []
    with closing(schedule):
        device: PlainDevice = Device(MemoryStore(debug=True), PlainSeal(), clock=lambda: NOW, schedule=schedule)
        for call in (
            lambda: device.save_impression(PUBLISHER, ImpressionOptions(1)),
            lambda: device.save_impression(PUBLISHER, ImpressionOptions(-1)),
            lambda: device.measure_conversion(QUERIER, ConversionOptions(TREFOIL_SERVICE, 0)),
            lambda: device.save_conversion("..", ConversionEventOptions([PUBLISHER])),
        ):
            came = time.now
            with suppress(StandardError):
                call()
            left.append(time.now - came)
    assert left == pytest.approx([SOON + SOON_SPREAD * coin for coin in (0.25, 0.5, 1.0, 0.75)])


def test_a_caller_that_never_pauses_waits_for_its_own_bucket(store: Store) -> None:
    """Its saves are all applied, and answered an interval apart; its reports are a delay later than that."""
    time = VirtualTime()
    with timed(store, time) as (device, _):
        for number in range(BURST + 10):
            device.save_impression(PUBLISHER, ImpressionOptions(number))
        assert len(device.overview().impressions) == BURST + 10
        used = time.now - 100.0
        assert used == pytest.approx(10 * INTERVAL + SOON, abs=INTERVAL)
        came = time.now
        device.measure_conversion(PUBLISHER, OPTIONS)
        assert time.now - came == pytest.approx(DELAY + INTERVAL - SOON)
        came = time.now
        device.measure_conversion(QUERIER, OPTIONS)
        assert time.now - came == pytest.approx(DELAY)


def test_another_caller_of_the_same_site_does_not_wait_for_one_that_never_pauses(store: Store) -> None:
    time = VirtualTime()
    with timed(store, time) as (device, _):
        for number in range(BURST + 10):
            device.save_impression(PUBLISHER, ImpressionOptions(number))
        came = time.now
        device.measure_conversion(PUBLISHER, OPTIONS, intermediary="ads.example")
        assert time.now - came == pytest.approx(DELAY)


def test_a_program_that_answers_many_callers_is_told_when_and_does_not_sleep(store: Store) -> None:
    time, leaves = VirtualTime(), list[float]()
    with timed(store, time) as (device, _):
        for number in range(BURST + 2):
            device.save_impression(PUBLISHER, ImpressionOptions(number), leave=leaves.append)
        with pytest.raises(RangeError):
            device.save_impression(QUERIER, ImpressionOptions(-1), leave=leaves.append)
        assert time.slept == 0
    late = [0.0] * BURST + [INTERVAL, 2 * INTERVAL, 0.0]
    assert leaves == pytest.approx([100.0 + SOON + each for each in late])


def test_what_is_done_every_hour_is_not_done_at_once_or_made_up_for() -> None:
    time, ran = VirtualTime(), list[str]()
    with delayed(time) as schedule:
        schedule.every(HOUR, partial(ran.append, "ran"))
        for hours, often in ((0, 0), (10, 1), (0.5, 1), (0.5, 2)):
            time.now += hours * HOUR
            for _ in range(2):
                schedule.save(NEWS, nothing)
            assert schedule.drain(PATIENTLY)
            assert len(ran) == often


def test_what_expires_is_deleted_while_no_site_measures(tmp_path: Path) -> None:
    """By the worker, an hour after it was opened or later, and again an hour after that."""
    time, path, now = VirtualTime(), tmp_path / "ann.db", [NOW]
    agent.create(path, clock=lambda: NOW)
    schedule = Delayed(DELAY, WORK, clock=time, sleep=time.sleep, spread=lambda: 0.0)
    with agent.opened(path, clock=lambda: now[0], schedule=schedule) as device:
        for days in (1, 2, 3):
            device.save_impression(PUBLISHER, ImpressionOptions(1, lifetime_days=days))
        kept = [len(device.overview().impressions)]
        for _ in range(2):
            now[0] += DAY + 1
            # Any call wakes the worker up, which does what is due first.
            schedule.save(NEWS, nothing)
            kept.append(len(device.overview().impressions))
            time.now += HOUR
            schedule.save(NEWS, nothing)
            kept.append(len(device.overview().impressions))
    assert kept == [3, 3, 2, 2, 1]


def test_all_that_has_expired_is_deleted_in_parts() -> None:
    with fresh_store(Kind.DISK) as store:
        one = ImpressionOptions(1, lifetime_days=1).saved(PUBLISHER, PUBLISHER, NOW - 2 * DAY, DeviceLimits())
        with store.transaction():
            for _ in range(CLEANUP_LIMIT + 1):
                store.save(one)
        device: PlainDevice = Device(store, PlainSeal(), clock=lambda: NOW)
        device.delete_expired()
        assert not device.overview().impressions


def test_a_flood_by_fifty_callers_leaves_another_sites_report_real(store: Store) -> None:
    """A thousand old jobs that would take ten delays: the shop's begins after one of each site, and so in time."""
    time, stuck, sealed = VirtualTime(), threading.Event(), threading.Event()
    ran, before = list[int](), list[int]()

    class Noting(PlainSeal):
        __slots__ = ()

        def prepare(self, *args: Any, **others: Any) -> Any:
            def seal(numbers: Sequence[int]) -> tuple[int, ...]:
                if threading.current_thread().name == "device worker":
                    before.append(len(ran))
                    sealed.set()
                return tuple(numbers)

            return seal

    def hostile(number: int) -> None:
        ran.append(number)
        if not sealed.is_set():
            time.now += DELAY / 100

    def meanwhile() -> None:
        stuck.set()
        assert sealed.wait(PATIENTLY)
        # The caller sleeps on: its report is put where it looks before the next job begins.
        schedule.drain(PATIENTLY)

    with delayed(time) as schedule:
        device: PlainDevice = Device(store, Noting(), clock=lambda: NOW, schedule=schedule)
        device.save_impression(PUBLISHER, ImpressionOptions(1))
        schedule.drain(PATIENTLY)
        schedule.save(NEWS, partial(stuck.wait, PATIENTLY))
        for number in range(1000):
            schedule.save(Caller(f"bad{number % 50}.example", "bad.example"), partial(hostile, number))
        time.now += DELAY / 2
        time.meanwhile = meanwhile
        assert device.measure_conversion(QUERIER, OPTIONS) == (0, 1)
    assert before == [50] and len(ran) == 1000


def test_a_cleared_site_is_not_brought_back_by_a_pending_save(store: Store) -> None:
    time, stuck = VirtualTime(), threading.Event()
    with timed(store, time) as (device, schedule), ThreadPoolExecutor(1) as other:
        time.meanwhile = nothing
        schedule.save(SHOP, partial(stuck.wait, PATIENTLY))
        device.save_impression(PUBLISHER, ImpressionOptions(1))
        clearing = other.submit(device.clear_impressions_for_site, PUBLISHER)
        stuck.set()
        clearing.result(PATIENTLY)
        assert not device.overview().impressions


def test_what_was_called_before_a_device_is_switched_off_is_applied_before(store: Store) -> None:
    time, stuck = VirtualTime(), threading.Event()
    with timed(store, time) as (device, schedule), ThreadPoolExecutor(1) as other:
        time.meanwhile = nothing
        schedule.save(SHOP, partial(stuck.wait, PATIENTLY))
        device.save_impression(PUBLISHER, ImpressionOptions(1))
        switching = other.submit(device.disable)
        # It waits for the worker; if it did not, it would be done by now.
        wait([switching], timeout=0.2)
        stuck.set()
        switching.result(PATIENTLY)
        assert len(device.overview().impressions) == 1


def test_clearing_is_refused_while_pending_saves_cannot_be_applied(store: Store) -> None:
    class Flooded(AtOnce):
        def drain(self, timeout: float = 0.0) -> bool:
            return False

    device: PlainDevice = Device(store, PlainSeal(), clock=lambda: NOW, schedule=Flooded())
    with pytest.raises(DatabaseUnavailable):
        device.clear_impressions_for_site(PUBLISHER)
    with pytest.raises(DatabaseUnavailable):
        device.clear_browsing_history(forget_visits=True)
    device.disable()
    assert not device.overview().enabled


def test_a_function_that_calls_its_own_device_does_not_block_it(store: Store) -> None:
    """It runs in the worker, where nothing waits for the worker."""
    last = named_function("last", (1.0,))
    with timed(store) as (device, schedule):

        def reentrant(*args: Any) -> Any:
            device.save_impression(PUBLISHER, ImpressionOptions(0))
            assert not schedule.drain(PATIENTLY)
            return last(*args)

        device.save_impression(PUBLISHER, ImpressionOptions(1))
        epochs = device.calendar().window(NOW, NOW)
        request = AttributionRequest(epochs, 0.1, 2, 1, 2, function=reentrant)
        device.measure(QUERIER, request)
        assert len(device.overview().impressions) >= 2


def test_errors_depend_on_the_options_alone_and_leave_soon(store: Store) -> None:
    time = VirtualTime()
    with timed(store, time) as (device, _):
        with pytest.raises(RangeError):
            device.measure_conversion(QUERIER, ConversionOptions(TREFOIL_SERVICE, 0))
        with pytest.raises(RangeError):
            device.save_impression(PUBLISHER, ImpressionOptions(-1))
        assert time.now == pytest.approx(100.0 + 2 * SOON)
        assert not device.reports()


@pytest.mark.parametrize("state", ["on", "off"])
def test_the_person_learns_whether_a_save_was_kept(store: Store, state: str) -> None:
    kept: Future[bool] = Future()
    with timed(store) as (device, _):
        if state == "off":
            device.disable()
        device.save_impression(PUBLISHER, ImpressionOptions(1), kept=kept)
        assert kept.result(PATIENTLY) is (state == "on")


def test_a_save_on_a_closed_device_is_not_kept(store: Store) -> None:
    kept: Future[bool] = Future()
    with timed(store) as (device, _):
        pass
    device.save_impression(PUBLISHER, ImpressionOptions(1), kept=kept)
    assert kept.result(0) is False


def test_nothing_of_what_was_found_is_freed_by_the_caller() -> None:
    """Freeing takes longer the more was found; the worker does it, before its caller wakes up."""

    class Tracked(Impression):
        freed = 0

        def __del__(self) -> None:
            Tracked.freed += 1

    class Keeps(MemoryStore):
        def matching(self, selection: Selection, need: Any = None) -> Any:
            return [Tracked._make(impression) for impression in super().matching(selection)]

    time, seen = VirtualTime(), list[int]()
    with timed(Keeps(debug=True), time) as (device, schedule):
        for _ in range(5):
            device.save_impression(PUBLISHER, ImpressionOptions(0))

        def meanwhile() -> None:
            schedule.drain(PATIENTLY)
            seen.append(Tracked.freed)

        time.meanwhile = meanwhile
        assert any(device.measure_conversion(QUERIER, OPTIONS))
    assert seen == [5]


# The same work


def test_no_host_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A site would read from the time of its own call which hosts others have used."""
    looked_up: list[str] = []

    class Noting:
        def privatesuffix(self, name: str) -> str:
            looked_up.append(name)
            return name

    monkeypatch.setattr("device.site._suffixes", Noting)
    for _ in range(3):
        parse_site("shop.example")
    assert looked_up == ["shop.example"] * 3


def test_opening_a_device_reads_the_tables_of_names(tmp_path: Path) -> None:
    """In a fresh process, where the first call would have to."""
    program = """
import sys
from device import agent, site
agent.create(sys.argv[1])
with agent.opened(sys.argv[1]) as device:
    assert site._suffixes.cache_info().currsize == 1 and "idna" in sys.modules
"""
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "ann.db")], check=True, timeout=PATIENTLY)


def test_the_first_save_of_a_process_is_kept_beside_two_busy_loops(tmp_path: Path) -> None:
    """The command that a person types, in fresh processes on a machine that has no time for them."""
    path, told = tmp_path / "ann.db", tmp_path / "told.json"
    busy = [sys.executable, "-c", "while True: pass"]
    with started(busy), started(busy):
        for number in range(3):
            command = ["device", "impression", "news.example", "--db", path, "--bucket", number, "--json", told]
            subprocess.run([*TREFOIL, *map(str, command)], check=True, timeout=PATIENTLY, capture_output=True)
            assert json.loads(told.read_text())["kept"] is True
    with agent.opened(path, schedule=AtOnce()) as device:
        assert [saved.impression.histogram_index for saved in device.overview().impressions] == [0, 1, 2]


def test_the_persons_terminal_says_what_was_not_kept(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A page is told nothing: its call returns as it does when the event is stored."""

    def full(*_: object) -> None:
        raise OSError("no space left, and a name that must not be shown")

    monkeypatch.setattr(type(store), "save", full)
    with timed(store) as (device, schedule):
        device.save_impression(PUBLISHER, ImpressionOptions(1))
        assert schedule.drain()
    assert [record.getMessage() for record in caplog.records] == ["an event was not kept: OSError"]


def operations(call: Callable[[], object]) -> Counter[str]:
    """Return how many instructions of the interpreter `call` executes, by function."""
    counted: Counter[str] = Counter()

    def trace(frame: FrameType, event: str, _: object) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            counted[frame.f_code.co_qualname] += 1
        return trace

    previous = sys.gettrace()
    # The collector runs callbacks of others whenever its own count says so.
    gc.disable()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(previous)
        gc.enable()
    return counted


@pytest.mark.parametrize(
    ("buckets", "cap", "spread", "kappa"),
    [
        *((buckets, 1, 1, 0) for buckets in (1, 4, 128, 1024)),
        *((4, 100, spread, 0) for spread in (1, 2, 4)),
        (128, 100, 10, 0),
        (1024, 100, 10, 0),
        (8, 5, 1, 3),
        # Labels: every feature may be in the report, or none.
        *((features, features, features, 0) for features in (8, 128, 256)),
        # Not checked.
        (128, 0, 0, 0),
    ],
)
def test_sealing_takes_the_same_operations_for_every_content(buckets: int, cap: int, spread: int, kappa: int) -> None:
    terms = replace(samples.TERMS, buckets=buckets, cap=cap, spread=spread, kappa=kappa, sensitivity=1000)
    filled = spread or buckets
    contents = [
        {},
        {0: 1},
        {buckets - 1: 1},
        {0: cap or 100},
        dict.fromkeys(range(filled), max(1, cap // filled)),
        dict.fromkeys(range(buckets - filled, buckets), max(1, cap // filled)),
    ]
    histograms = [[content.get(place, 0) for place in range(terms.length)] for content in contents]
    if kappa:
        histograms.append([*[0] * buckets, kappa])
    # Tables of a shape are made once.
    seal_report(histograms[0], terms, samples.HELPER_SET)
    first, *others = (operations(partial(seal_report, each, terms, samples.HELPER_SET)) for each in histograms)
    assert sum(first.values()) > 1000
    for other in others:
        assert other == first

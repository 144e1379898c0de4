"""What must hold of a device whatever it is asked, by whom, in whatever order: on both stores, threads and processes.

The account is taken from the filters themselves before and after each call, never from what a person is shown, which
is capped.
"""

from __future__ import annotations

import math
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.experiments.small_worlds import (
    NOW,
    PUBLISHER,
    QUERIER,
    START,
    WEEK,
    Clock,
    Event,
    Options,
    PlainDevice,
    RewindableStore,
    SmallWorld,
    fixed_coins,
    query,
    w3c,
)
from device.attribution import AttributionFunction, EqualCredit, FirstTouch, LastNSlots, LastNTouch, LastTouch
from device.budget import FilterKind, FilterOwner, capacities
from device.conversion import AttributionRequest, Conversion
from device.device import Device
from device.events import ImpressionOptions
from device.limits import DeviceLimits
from device.report import HelperSetSeal, PlainSeal
from device.request import SideQuery, SideQueryForm
from device.stores.memory_store import MemoryStore
from device.stores.sqlite_store import SqliteStore
from device.stores.storage import ReportRecord, Store
from protocol.header import Header
from protocol.report import SealedReport
from protocol.units import MICROS
from tests.support.protocol_samples import HELPER_SET
from tests.support.protocol_samples import NOW as SAMPLES_NOW
from tests.support.small_worlds import quick_folder

# Tight, so that a few calls run into each of the three kinds of filter.
LIMITS = DeviceLimits(
    site_budget=MICROS * 9 // 10,
    global_budget=MICROS * 6 // 5,
    impression_site_quota=MICROS,
)
SITES = ("shop.example", "store.example", "market.example")
PUBLISHERS = (PUBLISHER, "blog.example")
EPOCHS = (0, 1, 2)
Spent = Counter[tuple[FilterOwner, int]]

events = st.builds(
    Event,
    epoch=st.sampled_from(EPOCHS),
    bucket=st.integers(0, 2),
    day=st.integers(1, 5),
    site=st.sampled_from(PUBLISHERS),
    priority=st.integers(0, 2),
    match_value=st.just(0),
    caller=st.sampled_from([None, "shop.example"]),
)
functions: st.SearchStrategy[AttributionFunction] = st.sampled_from(
    [LastTouch(), FirstTouch(), EqualCredit(), LastNTouch((2.0, 1.0)), LastNSlots()]
)
epsilons = st.one_of(st.floats(0.001, 1.5), st.sampled_from([0.1, 0.3, 0.6, 0.9]))


@st.composite
def standard_calls(draw: st.DrawFn) -> Options:
    value = draw(st.integers(1, 5))
    return w3c(
        draw(st.integers(1, 3)),
        lookback_days=draw(st.sampled_from([1, 6, 13, 20, 30])),
        epsilon=draw(epsilons),
        value=value,
        max_value=draw(st.integers(value, 9)),
        credit=draw(st.sampled_from([(1.0,), (1.0, 3.0)])),
    )


@st.composite
def paper_requests(draw: st.DrawFn) -> Options:
    value, function = draw(st.integers(1, 5)), draw(functions)
    forms = (
        [SideQueryForm.GENERAL, SideQueryForm.LAST_TOUCH]
        if isinstance(function, LastTouch)
        else [SideQueryForm.GENERAL]
    )
    side_query = draw(st.none() | st.builds(SideQuery, st.integers(1, 4), st.sampled_from(forms)))
    return AttributionRequest(
        epochs=draw(st.lists(st.sampled_from(EPOCHS), min_size=1, max_size=3, unique=True)),
        epsilon=draw(epsilons),
        buckets=draw(st.integers(1, 3)),
        value=value,
        query_sensitivity=draw(st.integers(2 * value, 12)),
        function=function,
        side_query=side_query,
    )


conversions = st.one_of(standard_calls(), paper_requests())
calls = st.tuples(st.sampled_from(SITES), conversions)


def spent_in(store: Store) -> Spent:
    """Every filter of every epoch, as it stands in the ledger."""
    with store.transaction():
        ledgers = dict(store.filters())
    return Counter({(owner, epoch): paid for owner, ledger in ledgers.items() for epoch, paid in ledger.entries()})


def checked(options: Options) -> Conversion:
    return options.checked(QUERIER, QUERIER, LIMITS)


def device_on(store: Store, clock: Callable[[], int], limits: DeviceLimits = LIMITS) -> PlainDevice:
    return Device(store, PlainSeal(), clock=clock, limits=limits, coins=fixed_coins())


@contextmanager
def stores(durable: bool) -> Iterator[Store]:
    """A fresh store of either kind, in which epoch 0 begins at START."""
    with quick_folder() as folder:
        if durable:
            SqliteStore.create(folder / "device.db", epoch_length=WEEK, debug=True)
            opened = SqliteStore.open(folder / "device.db", epoch_length=WEEK, clock=lambda: NOW)
            with closing(opened):
                with opened.transaction():
                    opened.fix_epoch_start(START)
                yield opened
        else:
            memory = MemoryStore(debug=True)
            memory.fix_epoch_start(START)
            yield memory


def show_all(device: PlainDevice, clock: Clock, seen: Iterable[Event]) -> None:
    for event in sorted(seen, key=lambda event: event.time):
        clock.now = event.time
        device.save_impression(event.site, ImpressionOptions(event.bucket, priority=event.priority))
    clock.now = START + 3 * WEEK - 3600


def largest_charge(conversion: Conversion, window: Sequence[int]) -> int:
    """⌈ε·(sensitivity + κ)/Δ⌉, or the standard's own formula in doubles where that is a micro-epsilon more."""
    terms, sensitivity = conversion.loss_terms, conversion.sensitivity(window)
    exact = math.ceil(Fraction(terms.epsilon) * MICROS * (sensitivity + terms.kappa) / terms.query_sensitivity)
    doubles = math.ceil((sensitivity + terms.kappa) / (terms.query_sensitivity / terms.epsilon) * MICROS)
    assert doubles <= exact + 1
    return max(exact, doubles)


def check_call(options: Options, report: Sequence[int], before: Spent, after: Spent, seen: Iterable[Event]) -> None:
    """One call: what it cost each epoch, what it gave, and that no filter is overdrawn or refilled."""
    conversion = checked(options)
    paid = {key: after[key] - before[key] for key in after | before if after[key] != before[key]}
    relevant = {event.epoch for event in seen}
    bound = largest_charge(conversion, EPOCHS if conversion.lookback else conversion.epochs)
    for (owner, epoch), amount in paid.items():
        assert 0 < amount <= bound
        assert conversion.side_query or epoch in relevant, "an epoch without impressions paid"
        assert after[owner, epoch] <= capacities(LIMITS)[owner.kind]
        if not conversion.side_query:
            # Without a side query no report costs an epoch more than the ε that was asked for.
            assert amount <= math.ceil(Fraction(conversion.loss_terms.epsilon) * MICROS) + 1
    histogram = report[: conversion.buckets]
    assert all(part >= 0 for part in report) and sum(histogram) <= conversion.value
    assert len(report) == conversion.buckets + bool(conversion.side_query)
    if not relevant:
        assert not any(histogram)


def check_sequence(durable: bool, seen: list[Event], asked: list[tuple[str, Options]]) -> None:
    clock = Clock()
    with stores(durable) as store:
        device = device_on(store, clock)
        show_all(device, clock, seen)
        before = spent_in(store)
        assert not before
        for site, options in asked:
            report = device.measure_conversion(site, options)
            after = spent_in(store)
            check_call(options, report, before, after, seen)
            before = after


@settings(max_examples=200, deadline=None)
@given(st.lists(events, max_size=6), st.lists(calls, min_size=1, max_size=12))
def test_no_sequence_overdraws_in_memory(seen: list[Event], asked: list[tuple[str, Options]]) -> None:
    check_sequence(False, seen, asked)


@settings(max_examples=40, deadline=None)
@given(st.lists(events, max_size=6), st.lists(calls, min_size=1, max_size=12))
def test_no_sequence_overdraws_on_disk(seen: list[Event], asked: list[tuple[str, Options]]) -> None:
    check_sequence(True, seen, asked)


def at_once(count: int, work: Callable[[], None]) -> None:
    """Run `work` in so many threads that start together."""
    gate = threading.Barrier(count)

    def run() -> None:
        gate.wait(timeout=30)
        work()

    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()


@pytest.mark.parametrize("durable", [False, True])
def test_threads_cannot_overdraw(durable: bool) -> None:
    """Eight threads race for a budget that holds twenty reports: as many real reports as charges, and no more."""
    clock, reports = Clock(), list[tuple[int, ...]]()
    with stores(durable) as store:
        device = device_on(store, clock)
        show_all(device, clock, [Event(2, 0)])
        asked = w3c(2, epsilon=0.05, lookback_days=6)
        # list.append is atomic; each report is value 1, of which half of ε is charged.
        at_once(8, lambda: reports.extend([device.measure_conversion(QUERIER, asked) for _ in range(10)]))
        spent = spent_in(store)
    real = sum(any(report) for report in reports)
    assert len(reports) == 80
    assert spent[FilterOwner(FilterKind.SITE, QUERIER), 2] == real * 25_000 <= LIMITS.site_budget
    # The impression site's quota pays the full ε and is the first to run out.
    quota = spent[FilterOwner(FilterKind.IMPRESSION_SITE, PUBLISHER), 2]
    assert quota == real * 50_000 == LIMITS.impression_site_quota


def race(path: Path, count: int) -> bytes:
    """One process's share: `count` conversions, a 1 for each real report."""
    with closing(SqliteStore.open(path, epoch_length=WEEK, clock=Clock(), wait=30.0)) as store:
        device = device_on(store, Clock(), DeviceLimits())
        asked = w3c(2, epsilon=0.05)
        return b"".join(b"1" if any(device.measure_conversion(QUERIER, asked)) else b"0" for _ in range(count))


def test_two_processes_cannot_overdraw() -> None:
    """Two processes on one database, whose budget pays for twenty of their sixty reports."""
    with quick_folder() as folder:
        path, clock = folder / "device.db", Clock()
        SqliteStore.create(path, epoch_length=WEEK, debug=True)
        with closing(SqliteStore.open(path, epoch_length=WEEK, clock=clock)) as store:
            with store.transaction():
                store.fix_epoch_start(START)
            show_all(device_on(store, clock), clock, [Event(0, 0), Event(1, 0)])
        children = [start_child(lambda: race(path, 30)) for _ in range(2)]
        said = b"".join(finish_child(*child) for child in children)
        with closing(SqliteStore.open(path, epoch_length=WEEK, clock=clock)) as store:
            spent = spent_in(store)
    assert len(said) == 60 and said.count(b"1") == 20
    assert spent[FilterOwner(FilterKind.SITE, QUERIER), 0] == spent[FilterOwner(FilterKind.SITE, QUERIER), 1] == MICROS


def start_child(work: Callable[[], bytes]) -> tuple[int, int]:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(write, work())
            os._exit(0)
        finally:
            os._exit(1)
    os.close(write)
    return child, read


def finish_child(child: int, read: int) -> bytes:
    with os.fdopen(read, "rb") as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    assert os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0
    return said


def exhausted(world: SmallWorld, owner: FilterOwner, epochs: Iterable[int]) -> None:
    """Make these epochs unable to pay this filter."""
    filters = world.store.filters_of([owner])
    for epoch in epochs:
        filters[owner].empty(epoch)
    world.store.keep(filters)


def world_of(seen: Iterable[Event]) -> SmallWorld:
    world = SmallWorld(seen, replace(LIMITS, site_budget=2**40, global_budget=2**40))
    world.clock.now = START + 3 * WEEK - 3600
    return world


REFUSING = [
    FilterOwner(FilterKind.SITE, QUERIER),
    FilterOwner(FilterKind.GLOBAL, ""),
    FilterOwner(FilterKind.IMPRESSION_SITE, PUBLISHER),
]


@settings(max_examples=150, deadline=None)
@given(st.lists(events, max_size=6), conversions, st.sets(st.sampled_from(EPOCHS)), st.sampled_from(REFUSING))
def test_a_dropped_epoch_gives_the_report_of_an_absent_one(
    seen: list[Event], options: Options, dropped: set[int], owner: FilterOwner
) -> None:
    """Whichever filter refuses. Only the flag may say that something could not pay; it is charged for."""
    seen = [replace_site(event) for event in seen]
    world, absent = world_of(seen), world_of(event for event in seen if event.epoch not in dropped)
    exhausted(world, owner, dropped)
    buckets = checked(options).buckets
    assert world.ask(query(options))[:buckets] == absent.ask(query(options))[:buckets]


def replace_site(event: Event) -> Event:
    """One publisher, so that its quota refuses every epoch that has impressions at all."""
    return event._replace(site=PUBLISHER)


def paid_now(world: SmallWorld, options: Options, epoch: int) -> dict[FilterOwner, int]:
    """What one epoch pays for one request, to every filter."""
    before = spent_in(world.store)
    world.ask(query(options))
    return {
        owner: amount - before[owner, at]
        for (owner, at), amount in spent_in(world.store).items()
        if at == epoch and amount != before[owner, at]
    }


several_epochs = paper_requests().filter(
    lambda options: isinstance(options, AttributionRequest) and len(options.epochs) > 1
)


@settings(max_examples=150, deadline=None)
@given(
    several_epochs,
    st.lists(events, max_size=8),
    st.lists(events, max_size=6),
    st.sets(st.sampled_from(EPOCHS)),
    st.data(),
)
def test_whether_an_epoch_is_dropped_depends_on_its_own_filters_alone(
    options: Options, seen: list[Event], others: list[Event], emptied: set[int], data: st.DataObject
) -> None:
    """Change every other epoch, its events and its filters: this one pays what it paid before, to each filter."""
    epoch = data.draw(st.sampled_from(sorted(checked(options).epochs)))
    spent = data.draw(st.integers(0, MICROS))
    own = [event for event in seen if event.epoch == epoch]
    limits = replace(LIMITS, impression_site_quota=MICROS // 2)
    worlds = []
    for changed, refusing in ((seen, set[int]()), (others, emptied)):
        world = SmallWorld([*own, *(event for event in changed if event.epoch != epoch)], limits)
        world.clock.now = START + 3 * WEEK - 3600
        exhausted(world, FilterOwner(FilterKind.SITE, QUERIER), refusing - {epoch})
        filters = world.store.filters_of([FilterOwner(FilterKind.GLOBAL, "")])
        filters[FilterOwner(FilterKind.GLOBAL, "")].consume(epoch, spent)
        world.store.keep(filters)
        worlds.append(world)
    assert paid_now(worlds[0], options, epoch) == paid_now(worlds[1], options, epoch)


def public_part(report: SealedReport) -> bytes:
    """A header without what is drawn afresh for every report: nonce, commitments, and the masked body's hash."""
    header = Header.decode(report.header)
    blank = (bytes(32), bytes(32), bytes(32))
    return replace(header, nonce=bytes(16), commitments=blank, body_hash=bytes(32)).prefix()


sealed_requests = conversions.filter(lambda options: checked(options).loss_terms.epsilon_micros > 0)


@settings(max_examples=60, deadline=None)
@given(st.lists(events, max_size=6), sealed_requests, st.sampled_from(["on", "off", "no budget", "closed"]))
def test_no_field_of_a_header_depends_on_the_person(seen: list[Event], options: Options, state: str) -> None:
    """The same bytes for a person with impressions, without, without budget, with measurement off."""
    shift = SAMPLES_NOW - SAMPLES_NOW % WEEK - START - 2 * WEEK
    ours, empty = sealing_device(seen, shift), sealing_device([], shift)
    if state == "off":
        ours.disable()
    if state == "no budget":
        ours.clear_browsing_history([QUERIER], forget_visits=False)
    if state == "closed":
        ours.clear_browsing_history(forget_visits=True)
    reports = [device.measure_conversion(QUERIER, options) for device in (ours, empty)]
    assert public_part(reports[0]) == public_part(reports[1])
    assert len(reports[0].encode()) == len(reports[1].encode())
    for report in reports:
        assert len(report.body) == 8 * report.terms().shape.explicit
        assert [len(payload) for payload in report.payloads] == [112] * 3
    # What is drawn afresh is drawn afresh.
    assert reports[0].header != reports[1].header and reports[0].digest != reports[1].digest


def sealing_device(seen: Iterable[Event], shift: int) -> Device[SealedReport]:
    """A device that seals for real, at a time when the helpers of the samples have keys."""
    store, clock = RewindableStore(()), Clock()
    store.fix_epoch_start(START + shift)
    device = Device(store, HelperSetSeal(HELPER_SET), clock=clock, limits=LIMITS, coins=fixed_coins())
    for event in sorted(seen, key=lambda event: event.time):
        clock.now = event.time + shift
        device.save_impression(event.site, ImpressionOptions(event.bucket, priority=event.priority))
    clock.now = START + shift + 3 * WEEK - 3600
    return device


@settings(max_examples=60, deadline=None)
@given(st.lists(events, max_size=6), conversions, st.sampled_from(["on", "off", "no budget", "closed"]))
def test_every_call_writes_one_record_of_one_size(seen: list[Event], options: Options, state: str) -> None:
    """Whatever matched, and in whatever state the device is: the growth of the file reveals nothing."""
    world = world_of(seen)
    if state == "off":
        world.device.disable()
    if state == "no budget":
        world.device.clear_browsing_history([QUERIER], forget_visits=False)
    if state == "closed":
        world.device.clear_browsing_history(forget_visits=True)
    world.ask(query(options))
    records = world.device.reports()
    assert len(records) == 1
    assert len(records[0].encode()) == len(ReportRecord(0, 1, 1, "a.example", "a.example").encode())
    assert ReportRecord.decode(records[0].encode()) == records[0]

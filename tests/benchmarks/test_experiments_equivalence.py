"""The simulation is the system: on random small worlds it and real devices agree on every report, charge and budget."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from unittest import mock

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.experiments.policies import Accounting, CookieMonster, PolicyOutcome
from benchmarks.experiments.world import ANCHOR, Conversions, Epochs, Impressions, Ints, QueryColumns, World, match
from device.budget import FilterKind
from device.conversion import AttributionRequest, Conversion
from device.device import Device
from device.epoch import EpochCalendar
from device.events import Impression, ImpressionOptions
from device.limits import DeviceLimits
from device.report import PlainSeal
from device.request import SideQuery, SideQueryForm
from device.stores.memory_store import MemoryStore
from protocol.units import DAY, MICROS

PEOPLE = 2
ADVERTISERS = 2
DAYS = 40
# Filters that all sites share are not part of the paper's accounting: too large here ever to refuse.
UNBOUNDED = 2**52


@dataclass(frozen=True, slots=True)
class Event:
    """An impression (`query` is None) or a conversion, of one person and one advertiser."""

    time: int
    person: int
    advertiser: int
    bucket: int
    value: int
    query: int | None


@dataclass(frozen=True, slots=True)
class SmallWorld:
    """Everything both sides need to know. Events are in the order in which they happen."""

    events: list[Event]
    epsilon: list[int]
    sensitivity: int
    window: int
    epoch_days: int
    buckets: int
    kappa: int
    capacity: int


@st.composite
def small_worlds(draw: st.DrawFn) -> SmallWorld:
    """Few people, many collisions: short times, small budgets, windows of one epoch and of several."""
    buckets = draw(st.integers(1, 3))
    largest = draw(st.integers(1, 20))
    queries = draw(st.integers(1, 4))
    # Seconds on a coarse grid as well, so that window edges and epoch edges are hit exactly.
    moment = st.one_of(st.integers(0, DAYS).map(lambda day: day * DAY), st.integers(0, DAYS * DAY))
    event = st.builds(
        Event,
        time=moment.map(lambda offset: ANCHOR + offset),
        person=st.integers(0, PEOPLE - 1),
        advertiser=st.integers(0, ADVERTISERS - 1),
        bucket=st.integers(0, buckets - 1),
        value=st.integers(1, largest),
        query=st.one_of(st.none(), st.integers(0, queries - 1)),
    )
    events = draw(st.lists(event, min_size=1, max_size=40))
    return SmallWorld(
        events=_in_order(events),
        epsilon=draw(st.lists(st.integers(1, 600_000), min_size=queries, max_size=queries)),
        sensitivity=draw(st.integers(2 * largest, 50)),
        window=draw(st.one_of(st.integers(0, 30).map(lambda day: day * DAY), st.integers(0, 30 * DAY))),
        epoch_days=draw(st.sampled_from([1, 2, 7, 30])),
        buckets=buckets,
        kappa=draw(st.sampled_from([0, 0, 1, 7])),
        capacity=draw(st.integers(1, 600_000)),
    )


def _in_order(events: list[Event]) -> list[Event]:
    """By time, impressions before conversions; one impression a second, so that the last touch is never in doubt."""
    seen = {(e.person, e.advertiser, e.time): e for e in events if e.query is None}
    done = [e for e in events if e.query is not None]
    return sorted([*seen.values(), *done], key=lambda e: (e.time, e.query is not None))


@dataclass(frozen=True, slots=True)
class Observed:
    """What one side saw, in a form both can give: per conversion in order, and per filter that has paid."""

    reports: list[tuple[int, ...]]
    paid: list[int]
    budgets: dict[tuple[int, int, int], int]


def simulated(small: SmallWorld, accounting: Accounting = Accounting.PAPER) -> Observed:
    """Run the columnar simulation."""
    conversions = [e for e in small.events if e.query is not None]
    names = sorted({(e.person, e.advertiser) for e in conversions})
    owner = {name: place for place, name in enumerate(names)}
    done = sorted(range(len(conversions)), key=lambda i: (owner[conversions[i].person, conversions[i].advertiser], i))
    seen = sorted(
        (e for e in small.events if e.query is None and (e.person, e.advertiser) in owner),
        key=lambda e: (owner[e.person, e.advertiser], e.time),
    )
    rows = [conversions[i] for i in done]
    world = World(
        owners=len(names),
        owner_advertiser=_column(advertiser for _, advertiser in names),
        impressions=Impressions(
            _column(owner[e.person, e.advertiser] for e in seen),
            _column(e.time for e in seen),
            _column(e.bucket for e in seen),
        ),
        conversions=Conversions(
            _column(owner[e.person, e.advertiser] for e in rows),
            _column(e.time for e in rows),
            _column(e.value for e in rows),
            _column(e.query or 0 for e in rows),
        ),
        queries=QueryColumns(_column(small.epsilon), np.zeros(len(small.epsilon), dtype=np.int64)),
        cap=small.sensitivity,
        window=small.window,
        buckets=small.buckets,
    )
    policy = CookieMonster(accounting, small.kappa, small.capacity)
    outcome = policy.run(world, match(world, Epochs(small.epoch_days * DAY)))
    return _observed(small, outcome, done, names)


def _observed(small: SmallWorld, outcome: PolicyOutcome, done: list[int], names: list[tuple[int, int]]) -> Observed:
    reports: list[tuple[int, ...]] = [()] * len(done)
    paid = [0] * len(done)
    for row, original in enumerate(done):
        histogram = [0] * small.buckets
        histogram[int(outcome.bucket[row])] = int(outcome.report[row])
        flag = [small.kappa * int(outcome.flagged[row])] if small.kappa else []
        reports[original] = (*histogram, *flag)
        paid[original] = int(outcome.paid[row])
    budgets = {
        (*names[place], outcome.first_epoch + epoch): int(amount)
        for (place, epoch), amount in np.ndenumerate(outcome.consumed)
        if amount
    }
    return Observed(reports, paid, budgets)


@mock.patch.object(Conversion, "brings_functions", new=False)
def on_devices(small: SmallWorld) -> Observed:
    """Run one real device per person, event by event.

    An epoch that could not pay for the worst is not shown to a querier's own relevance test, whatever it would have
    cost. The paper's accounting, which the simulation has, knows no such caution; and this test is only a window.
    """
    clock = [ANCHOR]
    devices = [_device(small, clock) for _ in range(PEOPLE)]
    calendar = EpochCalendar(ANCHOR, small.epoch_days * DAY)
    reports, paid = [], []
    for event in small.events:
        clock[0] = event.time
        device = devices[event.person]
        if event.query is None:
            site = [f"shop{event.advertiser}.example"]
            options = ImpressionOptions(event.bucket, conversion_sites=site, lifetime_days=10_000)
            device.save_impression("news.example", options)
            continue
        before = _spent(device)
        reports.append(device.measure(f"shop{event.advertiser}.example", _request(small, event, calendar)))
        paid.append(_spent(device) - before)
    return Observed(reports, paid, _budgets(devices))


def _device(small: SmallWorld, clock: list[int]) -> Device[tuple[int, ...]]:
    store = MemoryStore(debug=True)
    store.fix_epoch_start(ANCHOR)
    limits = DeviceLimits(
        site_budget=small.capacity,
        global_budget=UNBOUNDED,
        impression_site_quota=UNBOUNDED,
        side_query_quota=UNBOUNDED,
        epoch_days=small.epoch_days,
        # Nothing is pruned, so that every budget can be compared at the end.
        max_lookback_days=10_000,
    )
    return Device(store, PlainSeal(), clock=lambda: clock[0], limits=limits)


def _request(small: SmallWorld, event: Event, calendar: EpochCalendar) -> AttributionRequest:
    earliest = event.time - small.window

    def relevant(impression: Impression) -> bool:
        return earliest <= impression.time <= event.time

    return AttributionRequest(
        epochs=calendar.window(earliest, event.time),
        epsilon=small.epsilon[event.query or 0] / MICROS,
        buckets=small.buckets,
        value=event.value,
        query_sensitivity=small.sensitivity,
        relevant=relevant,
        side_query=SideQuery(small.kappa, SideQueryForm.LAST_TOUCH) if small.kappa else None,
    )


def _spent(device: Device[tuple[int, ...]]) -> int:
    return sum(state.spent for state in device.budget() if state.kind is FilterKind.SITE)


def _budgets(devices: list[Device[tuple[int, ...]]]) -> dict[tuple[int, int, int], int]:
    return {
        (person, int(state.site.removeprefix("shop").removesuffix(".example")), state.epoch): state.spent
        for person, device in enumerate(devices)
        for state in device.budget()
        if state.kind is FilterKind.SITE and state.spent
    }


def _column(values: Iterable[int]) -> Ints:
    return np.fromiter(values, dtype=np.int64)


@settings(max_examples=200, deadline=None)
@given(small_worlds())
def test_simulation_and_devices_agree_to_the_last_micro(small: SmallWorld) -> None:
    """Reports, charges and remaining budgets of the simulation are those of real devices, in integers."""
    if not any(event.query is not None for event in small.events):
        return
    assert simulated(small) == on_devices(small)


def test_worlds_reach_the_cases_that_matter() -> None:
    """The generator is not vacuous: epochs run dry, windows have one epoch and several, flags are raised."""
    impressions = [Event(ANCHOR + day * DAY, 0, 0, 0, 5, None) for day in (0, 8, 16)]
    conversions = [Event(ANCHOR + (17 + i) * DAY, 0, 0, 0, 5, 0) for i in range(4)]
    small = SmallWorld([*impressions, *conversions], [400_000], 10, 20 * DAY, 7, 1, 1, 500_000)
    seen = simulated(small)
    assert seen == on_devices(small)
    assert seen.reports[0] == (5, 0)
    assert seen.reports[-1] == (0, 1)
    assert len(set(seen.paid)) > 1


def test_a_dry_epoch_behind_a_paid_last_touch_raises_no_flag() -> None:
    """Theorem 16's form: the first conversion empties the old epoch; the second finds a newer one that still pays."""
    events = [
        Event(ANCHOR, 0, 0, 0, 5, None),
        Event(ANCHOR + DAY, 0, 0, 0, 5, 0),
        Event(ANCHOR + 14 * DAY, 0, 0, 0, 5, None),
        Event(ANCHOR + 15 * DAY, 0, 0, 0, 5, 0),
    ]
    small = SmallWorld(events, [400_000], 10, 20 * DAY, 7, 1, 1, 300_000)
    seen = simulated(small)
    assert seen == on_devices(small)
    assert seen.reports == [(5, 0), (5, 0)]
    # 240,000 each: the old epoch could not pay a second time, the new one could; κ alone is 40,000.
    assert seen.budgets[0, 0, 0] == 240_000 + 0
    assert seen.budgets[0, 0, 2] == 240_000


def test_the_artifacts_accounting_is_not_what_devices_do() -> None:
    """A difference would be noticed: over several epochs the artifact charges ε where a device charges ε·value/Δ."""
    seen = Event(ANCHOR + 16 * DAY, 0, 0, 0, 5, None)
    done = Event(ANCHOR + 17 * DAY, 0, 0, 0, 5, 0)
    small = SmallWorld([seen, done], [400_000], 10, 20 * DAY, 7, 1, 0, MICROS)
    assert on_devices(small).paid == [200_000]
    assert simulated(small, Accounting.ARTIFACT).paid == [400_000]

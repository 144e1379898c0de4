"""What it costs a device to be labelled, and which labels are lost to empty budgets: three ways to account.

One publisher measures its impressions a week after it showed them, at ε for full features. Trefoil's column is what
real devices have paid. ARA-like: every week of the window pays, all or nothing. IPA-like: one query a week charges
both weeks that it spans to everyone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.seeded import Generator
from benchmarks.seeded import generator as drawn_from
from device.coins import DeviceCoins
from device.conversion_event import ConversionEventOptions
from device.device import Device
from device.labelling import LabelOptions
from device.limits import TREFOIL_SERVICE, DeviceLimits
from device.memory_store import MemoryStore
from device.privacy_filter import FilterKind
from device.report import PlainSeal
from protocol.epsilon import MICROS
from protocol.seconds import DAY

PUBLISHER = "news.example"
WEEK = 7 * DAY
START = 400 * WEEK
BUDGET = 1 * MICROS
# Nothing may be pruned before it is added up.
LIMITS = DeviceLimits(max_lookback_days=90)


@dataclass(frozen=True, slots=True)
class Habits:
    """Who is measured how: devices, weeks, impressions a week, and how many of them the publisher asks about."""

    devices: int = 4_000
    weeks: int = 5
    per_week: float = 3.0
    rate: float = 0.05
    advertisers: int = 8
    sampled: bool = True


@dataclass(frozen=True, slots=True)
class MeasuredAd:
    """One impression, and when a conversion with its advertiser followed that it led to (0 if none did)."""

    time: int
    advertiser: int
    converted: int


@dataclass(slots=True)
class Totals:
    """Micros paid by all device-epochs, labels that should be 1, and those of them that were lost."""

    paid: int = 0
    positives: int = 0
    lost: int = 0

    def add(self, paid: int, positives: int, lost: int) -> None:
        self.paid, self.positives, self.lost = self.paid + paid, self.positives + positives, self.lost + lost


@dataclass(frozen=True, slots=True)
class LabelCharges:
    """ε for each device-epoch on average, and the share of labels lost, of each system."""

    trefoil: float
    ara_like: float
    ipa_like: float
    lost_trefoil: float
    lost_ara_like: float
    lost_ipa_like: float


@dataclass(frozen=True, slots=True)
class _Person:
    """One device's impressions, those of them that are measured, and where its weeks begin."""

    start: int
    shown: Sequence[MeasuredAd]
    measured: Sequence[MeasuredAd]
    conversions: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))

    def label(self, one: MeasuredAd) -> list[int]:
        """The weeks in which conversions followed, whichever impression led to them."""
        times = [time for time in self.conversions[one.advertiser] if one.time <= time < one.time + WEEK]
        return sorted({(time - self.start) // WEEK for time in times})


def charges(seed: int, epsilon: float, models: int = 1, habits: Habits | None = None) -> LabelCharges:
    """All three over the same people. `models` is how many reports are asked for about every impression measured."""
    habits = habits or Habits()
    generator, micros = drawn_from(seed, 77), round(epsilon * MICROS)
    trefoil, ara, ipa = Totals(), Totals(), Totals()
    by_week: dict[int, int] = defaultdict(int)
    for _ in range(habits.devices):
        person = _draw(generator, habits)
        trefoil.add(*_on_a_device(person, epsilon, models))
        ara.add(*_all_of_the_window(person, micros, models))
        for one in person.measured:
            by_week[(one.time - START) // WEEK] += bool(person.label(one))
    ipa.add(*_for_everyone(by_week, micros, models, habits))
    epochs = habits.devices * habits.weeks
    return LabelCharges(
        trefoil.paid / epochs / MICROS,
        ara.paid / epochs / MICROS,
        ipa.paid / habits.weeks / MICROS,
        *(each.lost / max(each.positives, 1) for each in (trefoil, ara, ipa)),
    )


def _draw(generator: Generator, habits: Habits) -> _Person:
    last = WEEK * (habits.weeks - 1)
    times = np.sort(generator.integers(0, last, generator.poisson(habits.per_week * (habits.weeks - 1))))
    shown = []
    for time in times:
        delay = min(generator.exponential(2.0), 6.99)
        hit = generator.random() < habits.rate
        moment = START + int(time)
        shown.append(
            MeasuredAd(moment, int(generator.integers(habits.advertisers)), moment + int(delay * DAY) if hit else 0)
        )
    measured = shown
    if habits.sampled:
        # One of each week, drawn by the publisher from its own records.
        shuffled = (shown[place] for place in generator.permutation(len(shown)))
        drawn = {(one.time - START) // WEEK: one for one in shuffled}
        measured = sorted(drawn.values(), key=lambda one: one.time)
    person = _Person(START - int(generator.integers(7)) * DAY, shown, measured)
    for one in shown:
        if one.converted:
            person.conversions[one.advertiser].append(one.converted)
    return person


def _on_a_device(person: _Person, epsilon: float, models: int) -> tuple[int, int, int]:
    """What a real device pays and says, its calls in the order of time."""
    if not any(person.conversions.values()):
        # Whoever never converts pays nothing and loses nothing: more than half of all devices need not be run.
        return 0, 0, 0
    store, clock = MemoryStore(debug=True), [START]
    store.fix_epoch_start(person.start)
    device = Device(store, PlainSeal(), clock=lambda: clock[0], limits=LIMITS, coins=DeviceCoins())
    calls: list[tuple[int, MeasuredAd | int]] = [(one.time + WEEK, one) for one in person.measured]
    calls += [(time, advertiser) for advertiser, times in person.conversions.items() for time in times]
    positives = lost = 0
    for time, call in sorted(calls, key=lambda each: each[0]):
        clock[0] = time
        if not isinstance(call, MeasuredAd):
            device.save_conversion(f"shop{call}.example", ConversionEventOptions((PUBLISHER,)))
            continue
        asked = LabelOptions(TREFOIL_SERVICE, (1,), 1, epsilon, WEEK, (f"shop{call.advertiser}.example",))
        for _ in range(models):
            told = device.measure_impression(PUBLISHER, asked)
            positives += bool(person.label(call))
            lost += bool(person.label(call)) and not told[0]
    paid = sum(state.spent for state in device.budget() if state.kind is FilterKind.SITE)
    return paid, positives, lost


def _all_of_the_window(person: _Person, micros: int, models: int) -> tuple[int, int, int]:
    paid: dict[int, int] = defaultdict(int)
    positives = lost = 0
    for one in person.measured:
        window = range((one.time - person.start) // WEEK, (one.time + WEEK - 1 - person.start) // WEEK + 1)
        for _ in range(models):
            positive = bool(person.label(one))
            able = all(paid[week] + micros <= BUDGET for week in window)
            for week in window if able else ():
                paid[week] += micros
            positives, lost = positives + positive, lost + (positive and not able)
    return sum(paid.values()), positives, lost


def _for_everyone(positives: dict[int, int], micros: int, models: int, habits: Habits) -> tuple[int, int, int]:
    """Paid is for one device: everyone pays the same."""
    paid: dict[int, int] = defaultdict(int)
    lost = 0
    for week in range(habits.weeks - 1):
        for _ in range(models):
            able = all(paid[each] + micros <= BUDGET for each in (week, week + 1))
            for each in (week, week + 1) if able else ():
                paid[each] += micros
            lost += 0 if able else positives[week]
    return sum(paid.values()), models * sum(positives.values()), lost

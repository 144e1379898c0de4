"""Simulated people: what each of them saw and bought, from a seed, and the real devices it happens on.

The seed decides impressions and conversions. Nonces, keys and noise never come from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from benchmarks.workloads.seeded import generator
from device.actions import MeasurementOptions
from device.conversion import ConversionOptions
from device.device import Device
from device.epoch import DeviceCoins
from device.events import ImpressionOptions
from device.limits import TREFOIL_SERVICE
from device.report import HelperSetSeal, PlainSeal, Seal
from device.stores.memory_store import MemoryStore
from protocol.errors import ErrorKind, TrefoilError
from protocol.helper_set import HelperSet
from protocol.report import SealedReport
from protocol.units import DAY

SHOP = "shop.example"
PUBLISHERS = ("news.example", "video.example", "games.example")
LOOKBACK_DAYS = 21
MAX_IMPRESSIONS = 6
# Most people buy once; the third conversion of one person tends to find the budget of an epoch used up.
CONVERSIONS_OF_A_PERSON = (0.7, 0.2, 0.1)

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Viewing:
    """An ad that a person saw: its campaign is the bucket a conversion may be credited to."""

    time: int
    publisher: str
    campaign: int


@dataclass(frozen=True, slots=True)
class Person:
    """One person: the ads they saw, in order, and the times of their purchases. `coin` places their epochs."""

    viewings: tuple[Viewing, ...]
    conversions: tuple[int, ...]
    coin: float


def people(seed: int, conversions: int, campaigns: int, now: int) -> Iterator[Person]:
    """Yield people with `conversions` conversions in total, all within the last hour. Deterministic."""
    if conversions < 1 or campaigns < 1:
        raise TrefoilError(
            "a workload has at least one report and one bucket", "Use 1 or more of each.", kind=ErrorKind.TOO_FEW
        )
    draw = generator(seed)
    # A few campaigns are seen by many, most by few.
    popularity = 1 / np.arange(1, campaigns + 1) ** 0.7
    popularity /= popularity.sum()
    left = conversions
    while left:
        count = min(left, 1 + int(draw.choice(len(CONVERSIONS_OF_A_PERSON), p=CONVERSIONS_OF_A_PERSON)))
        left -= count
        seen = int(draw.integers(MAX_IMPRESSIONS + 1))
        times = np.sort(now - 3600 - draw.integers(LOOKBACK_DAYS * DAY, size=seen))
        ads = draw.choice(campaigns, size=seen, p=popularity)
        sites = draw.integers(len(PUBLISHERS), size=seen)
        viewings = tuple(
            Viewing(int(time), PUBLISHERS[int(site)], int(campaign))
            for time, site, campaign in zip(times, sites, ads, strict=True)
        )
        yield Person(viewings, tuple(now - 60 * (count - index) for index in range(count)), float(draw.random()))


def life_on_device(
    person: Person, measurement: MeasurementOptions, store: MemoryStore, seal: Seal[R]
) -> tuple[Device[R], list[R]]:
    """Simulate a person on one device; return the device afterwards, and its reports."""
    now = 0
    coins = DeviceCoins(epoch_start=lambda: person.coin, credit=lambda: 0.0)
    device = Device(store, seal, clock=lambda: now, coins=coins)
    for viewing in person.viewings:
        now = viewing.time
        device.save_impression(viewing.publisher, ImpressionOptions(histogram_index=viewing.campaign))
    reports = []
    for time in person.conversions:
        now = time
        reports.append(device.measure_conversion(SHOP, measurement.on(device, now)))
    return device, reports


def asked_of_devices(epsilon: float, buckets: int, kappa: int = 0, function: str | None = None) -> MeasurementOptions:
    """Return the call of every conversion: the standard's, or with a function the paper's request."""
    options = ConversionOptions(
        TREFOIL_SERVICE, buckets, epsilon=epsilon, value=1, max_value=1, lookback_days=LOOKBACK_DAYS, kappa=kappa
    )
    return MeasurementOptions(options, function)


def sealed_reports(
    person: Person, measurement: MeasurementOptions, helper_set: HelperSet
) -> tuple[Device[SealedReport], list[SealedReport]]:
    """Return the device afterwards, and its sealed reports."""
    return life_on_device(person, measurement, MemoryStore(debug=False), HelperSetSeal(helper_set))


def plain_histograms(person: Person, measurement: MeasurementOptions) -> list[list[int]]:
    """Return the reports of the clear twin: the same events on a device that seals nothing."""
    _, reports = life_on_device(person, measurement, MemoryStore(debug=True), PlainSeal())
    return [list(histogram[: measurement.options.histogram_size]) for histogram in reports]

"""Simulated people: what each of them saw and bought, from a seed, and the real devices it happens on.

The seed decides impressions and conversions. Nonces, keys and noise never come from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from benchmarks.seeded import generator
from device.asked import Asked
from device.coins import DeviceCoins
from device.conversion import ConversionOptions
from device.device import Device
from device.impression import ImpressionOptions
from device.limits import TREFOIL_SERVICE, DeviceLimits
from device.memory_store import MemoryStore
from device.report import HelperSetSeal, PlainSeal, Seal
from protocol.errors import TrefoilError
from protocol.helper_set import HelperSet
from protocol.report import SealedReport
from protocol.seconds import DAY

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
    """What one person saw, in order, and when they bought something. `coin` places their epochs."""

    viewings: tuple[Viewing, ...]
    conversions: tuple[int, ...]
    coin: float


def people(seed: int, conversions: int, campaigns: int, now: int) -> Iterator[Person]:
    """People with `conversions` conversions between them, all within the last hour. The same for the same arguments."""
    if conversions < 1 or campaigns < 1:
        raise TrefoilError("a workload has at least one report and one bucket", "Ask for 1 or more of each.")
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
        shown = draw.choice(campaigns, size=seen, p=popularity)
        sites = draw.integers(len(PUBLISHERS), size=seen)
        viewings = tuple(
            Viewing(int(time), PUBLISHERS[int(site)], int(campaign))
            for time, site, campaign in zip(times, sites, shown, strict=True)
        )
        yield Person(viewings, tuple(now - 60 * (count - index) for index in range(count)), float(draw.random()))


@dataclass(slots=True)
class Life:
    """A person's device with the clock of the simulation."""

    person: Person
    asked: Asked
    limits: DeviceLimits
    now: int = 0

    def on(self, store: MemoryStore, seal: Seal[R]) -> tuple[Device[R], list[R]]:
        """Everything that happens to the person, on one device: the device afterwards, and its reports."""
        coins = DeviceCoins(epoch_start=lambda: self.person.coin, credit=lambda: 0.0)
        device = Device(store, seal, clock=lambda: self.now, limits=self.limits, coins=coins)
        for viewing in self.person.viewings:
            self.now = viewing.time
            device.save_impression(viewing.publisher, ImpressionOptions(histogram_index=viewing.campaign))
        reports = []
        for time in self.person.conversions:
            self.now = time
            reports.append(device.measure_conversion(SHOP, self.asked.on(device, time)))
        return device, reports


def asked_of_devices(epsilon: float, buckets: int, kappa: int = 0, function: str | None = None) -> Asked:
    """What the shop asks at every conversion: the standard's call, or with a function the paper's request."""
    options = ConversionOptions(
        TREFOIL_SERVICE, buckets, epsilon=epsilon, value=1, max_value=1, lookback_days=LOOKBACK_DAYS, kappa=kappa
    )
    return Asked(options, function)


def sealed_reports(
    person: Person, asked: Asked, helper_set: HelperSet, limits: DeviceLimits | None = None
) -> tuple[Device[SealedReport], list[SealedReport]]:
    """What a person's device hands out, and the device with what is left of its budget."""
    life = Life(person, asked, limits or DeviceLimits())
    return life.on(MemoryStore(debug=False), HelperSetSeal(helper_set))


def plain_histograms(person: Person, asked: Asked, limits: DeviceLimits | None = None) -> list[list[int]]:
    """The clear twin: the same life on a device that seals nothing, so that the truth is known without opening."""
    _, reports = Life(person, asked, limits or DeviceLimits()).on(MemoryStore(debug=True), PlainSeal())
    return [list(histogram[: asked.options.histogram_size]) for histogram in reports]

"""A crowd of simulated people, each with a device of their own, so that one person's click drowns among theirs.

Who sees and buys what is drawn from a printed seed. What the devices seal is not: shares and keys come from the system.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.live.places import BUCKETS, EPSILON, KAPPA, SHOP_SITE
from benchmarks.seeded import generator
from device.conversion import ConversionOptions
from device.device import Device
from device.impression import ImpressionOptions
from device.limits import TREFOIL_SERVICE
from device.memory_store import MemoryStore
from device.report import HelperSetSeal
from protocol.helper_set import HelperSet
from protocol.report import SealedReport
from protocol.seconds import DAY

MAX_PEOPLE = 5_000
# How often each campaign is clicked, and how many people of a hundred buy without having clicked anything.
POPULARITY = (0.45, 0.1, 0.3, 0.15)
UNMOVED = 0.2
PUBLISHERS = ("news.example", "news.example", "blog.example", "blog.example")
OPTIONS = ConversionOptions(TREFOIL_SERVICE, BUCKETS, epsilon=EPSILON, kappa=KAPPA)


@dataclass(frozen=True, slots=True)
class Purchase:
    """One simulated purchase: the sealed report, and the campaign a tracker would have credited."""

    report: SealedReport
    credit: int | None


def crowd(people: int, helper_set: HelperSet, *, now: int, seed: int) -> Iterator[Purchase]:
    """`people` purchases, each from a device of its own."""
    draw = generator(seed)
    for _ in range(people):
        clicks = 0 if draw.random() < UNMOVED else int(draw.integers(1, 4))
        campaigns = [int(campaign) for campaign in draw.choice(BUCKETS, size=clicks, p=POPULARITY)]
        days_ago = sorted((float(day) for day in draw.uniform(0.1, 20, size=clicks)), reverse=True)
        yield _purchase(campaigns, [now - int(day * DAY) for day in days_ago], helper_set, now)


def _purchase(campaigns: list[int], moments: list[int], helper_set: HelperSet, now: int) -> Purchase:
    """A person clicks ads at these moments and buys now. The last click gets the credit."""
    clock = [*moments, now]
    device = Device(MemoryStore(debug=False), HelperSetSeal(helper_set), clock=lambda: clock[0])
    for campaign in campaigns:
        device.save_impression(PUBLISHERS[campaign], ImpressionOptions(campaign, conversion_sites=[SHOP_SITE]))
        clock.pop(0)
    report = device.measure_conversion(SHOP_SITE, OPTIONS)
    return Purchase(report, campaigns[-1] if campaigns else None)

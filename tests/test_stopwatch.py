"""What a site with a stopwatch sees of a device, on a clock of the tests' own: the same, whatever the device holds.

Four ways to look: at a device that is full, with twelve calls at once, at a save that waits for somebody else's call,
and at a save that has to make room. A call takes a millisecond here, and some µs more for each impression it looks at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from device.conversion import ConversionOptions
from device.device import Device
from device.impression import Impression, ImpressionOptions, SavedImpression, Selection
from device.limits import TREFOIL_SERVICE, DeviceLimits
from device.memory_store import MemoryStore
from device.report import PlainSeal
from device.tick import Ticks, _Queue
from tests.support.small_worlds import NOW, PUBLISHER, QUERIER, WEEK, PlainDevice
from tests.support.virtual_ticks import VirtualTime, at_once

LIMITS = DeviceLimits()
WEEKS = 5
ASKED = ConversionOptions(TREFOIL_SERVICE, 2, epsilon=0.01)


class Laborious(MemoryStore):
    """Calls take time, and wait for one another."""

    def __init__(self, time: VirtualTime, seconds_each: float) -> None:
        super().__init__(debug=True)
        self.fix_epoch_start(NOW - WEEKS * WEEK)
        self.time = time
        self.seconds_each = seconds_each
        self.free_at = 0.0

    @contextmanager
    def transaction(self) -> Iterator[None]:
        self.time.now = max(self.time.now, self.free_at) + 0.001
        with super().transaction():
            yield
        self.free_at = self.time.now

    def matched_sites(self, selection: Selection, calendar: Any) -> Any:
        self._look()
        return super().matched_sites(selection, calendar)

    def census(self, since: int, until: int) -> Any:
        self._look()
        return super().census(since, until)

    def _look(self) -> None:
        self.time.now += self.seconds_each * len(self._impressions)


class Watched:
    """A device that holds so many impressions in each of five weeks, and a stopwatch."""

    def __init__(self, each_week: int = 0, limits: DeviceLimits = LIMITS, seconds_each: float = 4e-6) -> None:
        self.time = VirtualTime()
        self.store = Laborious(self.time, seconds_each)
        self.ticker = Ticks(
            limits.tick_seconds, clock=self.time, wait=self.time.wait, delay=lambda: 0.0, submit=at_once
        )
        self.device: PlainDevice = Device(self.store, PlainSeal(), clock=lambda: NOW, limits=limits, ticker=self.ticker)
        for week in range(WEEKS):
            seen = Impression(NOW - week * WEEK, PUBLISHER, PUBLISHER, 0, 0, 0)
            self.store._impressions += [SavedImpression(seen, NOW + WEEK, frozenset(), frozenset())] * each_week

    def convert(self, site: str = QUERIER) -> None:
        self.device.measure_conversion(site, ASKED)

    def save(self) -> None:
        self.device.save_impression(PUBLISHER, ImpressionOptions(0))

    def seconds(self, call: Callable[[], None]) -> float:
        begun = self.time.now
        call()
        return round(self.time.now - begun, 6)

    def seconds_at_once(self, sites: Sequence[str]) -> list[float]:
        """How long each of several calls takes that come at one moment. Whoever calls twice waits for itself."""
        begun, taken = self.time.now, []
        standing = [self.ticker._queues.setdefault((site, site), _Queue()) for site in sites]
        for site in sites:
            self.time.now = begun
            taken.append(self.seconds(partial(self.convert, site)))
        assert len(standing) == len(taken)
        return taken


@pytest.mark.parametrize("limits", [LIMITS, DeviceLimits(max_impressions_per_epoch=10_000)], ids=["default", "wide"])
def test_a_device_that_holds_all_that_its_limits_allow_answers_when_an_empty_one_does(limits: DeviceLimits) -> None:
    """Also where they allow 50,000 impressions, which once took longer than a tick. 1.2 µs is what each is given."""
    full, empty = Watched(limits.max_impressions_per_epoch, limits, 1.2e-6), Watched(0, limits, 1.2e-6)
    assert full.seconds(full.convert) == empty.seconds(empty.convert)


@pytest.mark.parametrize("sites", [[QUERIER] * 12, [f"shop{number}.example" for number in range(12)]])
def test_twelve_calls_at_once_leave_when_they_would_on_an_empty_device(sites: Sequence[str]) -> None:
    assert Watched(200).seconds_at_once(sites) == Watched().seconds_at_once(sites)


def test_a_save_that_waits_for_somebody_elses_call_leaves_when_one_that_does_not_wait_does() -> None:
    waits, does_not = Watched(), Watched()
    waits.store.free_at = waits.time.now + 0.03
    assert waits.seconds(waits.save) == does_not.seconds(does_not.save)


@pytest.mark.parametrize("held", [1, 200, LIMITS.max_impressions_per_epoch])
def test_a_save_leaves_when_one_on_an_empty_device_does(held: int) -> None:
    """Also where others have left no room, and something has to go."""
    having, lacking = Watched(held), Watched()
    assert having.seconds(having.save) == lacking.seconds(lacking.save)

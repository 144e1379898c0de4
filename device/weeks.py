"""A device's epochs: which of them a request may use, and which events a full epoch evicts.

Nothing behind the barrier is usable, nothing out of every request's reach is kept, and both stay so when the clock is
set back: what was deleted lies behind a barrier that only moves forward.

A full epoch evicts events of its own only: one epoch's events must not decide what is left of another's. And it evicts
from the site that has most: one site cannot use up the space of all, nor can many sites crowd out one seen lately.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from device.epoch import EpochCalendar, draw_start
from device.events import SavedImpression
from device.limits import DeviceLimits
from device.stores.storage import SiteCount, Store


class Reach(NamedTuple):
    """What a request reaches: the requested epochs, and those of them that may be used, earliest first."""

    calendar: EpochCalendar
    window: Sequence[int]
    usable: Sequence[int]
    measuring: bool


class Weeks:
    """The epochs of one device. Every method runs inside the store's transaction."""

    def __init__(self, store: Store, limits: DeviceLimits, start_coin: Callable[[], float]) -> None:
        self._store = store
        self._limits = limits
        self._start_coin = start_coin
        # The moment up to which this object has pruned the store.
        self._pruned: int | None = None

    def fixed_calendar(self) -> EpochCalendar | None:
        """Return the calendar, or None if its start is not fixed yet."""
        start = self._store.epoch_start
        return None if start is None else EpochCalendar(start, self._limits.epoch_length)

    def calendar(self, now: int) -> EpochCalendar:
        """Return the calendar; the first lookup fixes its start."""
        start = self._store.epoch_start
        if start is None:
            start = draw_start(now, self._limits.epoch_length, self._start_coin())
            self._store.fix_epoch_start(start)
        return EpochCalendar(start, self._limits.epoch_length)

    def usable(self, calendar: EpochCalendar, window: Sequence[int], now: int) -> Sequence[int]:
        """Return the epochs between the barrier and now. Those below have permanently lost their record of spending."""
        barrier, current = self._store.barrier, calendar.index(now)
        closed = window[0] - 1 if barrier is None else calendar.index(barrier)
        return [epoch for epoch in window if closed < epoch <= current]

    def last_payment(self, now: int) -> int:
        """Return a moment of the last epoch that paid anything; it lies after `now` if the clock was set back."""
        paid = [epoch for ledger in self._store.filters().values() for epoch, _ in ledger.entries()]
        return self.calendar(now).first_second(max(paid)) if paid else now

    def close_unreachable(self, calendar: EpochCalendar, now: int) -> None:
        """Delete what is out of reach, behind a barrier, so that a clock set back finds no fresh budget."""
        first = calendar.index(now - self._limits.max_lookback)
        last_closed = calendar.first_second(first) - 1
        self._store.raise_barrier(last_closed)
        if self._pruned != last_closed and self._store.prune(first, last_closed + 1):
            self._pruned = last_closed


def evict_for_impression(
    store: Store, saved: SavedImpression, calendar: EpochCalendar | None, limits: DeviceLimits
) -> None:
    """Evict from the epoch of `saved` what exceeds its limits, and delete what lies behind the barrier."""
    if calendar is None:
        # No conversion was ever measured, and an impression must not decide where epochs begin.
        return
    if store.barrier is not None:
        store.drop_impressions_before(_first_open_second(store.barrier, calendar))
    _evict(store, saved, calendar, limits)


def evict_for_conversion(store: Store, calendar: EpochCalendar | None, now: int, limits: DeviceLimits) -> None:
    """Evict within this epoch only, as for impressions. The two kinds of events have separate limits."""
    if calendar is None:
        return
    if store.barrier is not None:
        store.conversions.drop_before(_first_open_second(store.barrier, calendar))
    since = calendar.first_second(calendar.index(now))
    until = since + calendar.length
    if store.conversions.count_between(since, until) >= limits.max_conversions_per_epoch:
        store.conversions.evict_between(since, until)


def _first_open_second(barrier: int, calendar: EpochCalendar) -> int:
    return calendar.first_second(calendar.index(barrier) + 1)


def _evict(store: Store, saved: SavedImpression, calendar: EpochCalendar, limits: DeviceLimits) -> None:
    """Evict within the epoch of `saved`.

    A site at its limit loses its own oldest impressions; a full epoch, the oldest of the site that would have most; an
    epoch with too many sites, the least recently seen site.
    """
    since = calendar.first_second(calendar.index(saved.impression.time))
    until = since + calendar.length
    sites = {site.site: site for site in store.census(since, until)}
    own = sites.get(saved.impression.site, SiteCount(saved.impression.site, 0, 0, 0))
    total = sum(site.held for site in sites.values())
    if own.held >= limits.max_impressions_per_site:
        store.evict_oldest_between(since, until, own.held - limits.max_impressions_per_site + 1, own.site)
    elif not own.held and len(sites) >= limits.max_sites_per_epoch:
        stalest = min(sites.values(), key=lambda site: (site.last, site.site))
        store.evict_oldest_between(since, until, stalest.held, stalest.site)
    elif total >= limits.max_impressions_per_epoch:
        busiest = min(sites.values(), key=lambda site: (-site.held, site.first, site.site))
        loses = own if own.held >= busiest.held else busiest
        store.evict_oldest_between(since, until, total - limits.max_impressions_per_epoch + 1, loses.site)

"""Room: what an epoch of a full device loses when one more event is saved.

Only of its own epoch: one epoch's events must not decide what is left of another's. And only of whoever has had their
share: a site cannot use up everybody's room, nor can many sites leave one that was seen lately without any.
"""

from __future__ import annotations

from device.epoch import EpochCalendar
from device.impression import SavedImpression
from device.limits import DeviceLimits
from device.storage import SiteCount, Store


def make_room(store: Store, saved: SavedImpression, calendar: EpochCalendar | None, limits: DeviceLimits) -> None:
    """Evict what must go for `saved` to be kept. What lies behind the barrier is nobody's any more; it goes too."""
    if calendar is None:
        # No conversion was ever measured, and an impression must not decide where epochs begin.
        return
    if store.barrier is not None:
        store.drop_impressions_before(_first_open_second(store.barrier, calendar))
    _evict(store, saved, calendar, limits)


def make_room_for_conversion(store: Store, calendar: EpochCalendar | None, now: int, limits: DeviceLimits) -> None:
    """Evict within this epoch only, as for impressions. The two kinds of events never take each other's room."""
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
    """Within the epoch of `saved`.

    A site with its share loses its own oldest; a full epoch, the oldest of the site that would have most; an epoch with
    too many sites, the one that was seen least lately.
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

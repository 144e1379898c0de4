"""Room: what an epoch of a full device loses when one more impression is saved.

Only of its own epoch: one epoch's events must not decide what is left of another's. And only of whoever has had their
share: a site cannot use up everybody's room, nor can many sites leave one that was seen lately without any.
"""

from __future__ import annotations

from device.epoch import EpochCalendar
from device.impression import SavedImpression
from device.limits import DeviceLimits
from device.storage import SiteCount, Store


def make_room(store: Store, saved: SavedImpression, calendar: EpochCalendar, limits: DeviceLimits) -> None:
    """Evict what must go for `saved` to be kept.

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

"""Impressions: what a site saved about an ad it showed, and when a conversion may use it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from device.limits import DeviceLimits
from device.option import entries, whole
from device.site import parse_site
from protocol.seconds import DAY

U32 = range(2**32)
I32 = range(-(2**31), 2**31)
# Days that are clamped afterwards may be any number that a header can hold.
ANY_DAYS = 10**15


class Impression(NamedTuple):
    """One impression as attribution sees it. A tuple, because a conversion may look at hundreds."""

    time: int
    site: str
    caller: str
    histogram_index: int
    match_value: int
    priority: int


@dataclass(frozen=True, slots=True)
class SavedImpression:
    """One impression as the store keeps it: with its last usable second and who may select it (empty: anyone)."""

    impression: Impression
    expires: int
    conversion_sites: frozenset[str]
    conversion_callers: frozenset[str]


@dataclass(frozen=True, slots=True)
class ImpressionOptions:
    """What a site passes to `save_impression`. Checked against a device's limits by `validated`."""

    histogram_index: int
    match_value: int = 0
    conversion_sites: Sequence[str] = ()
    conversion_callers: Sequence[str] = ()
    lifetime_days: int = 30
    priority: int = 0

    def saved(self, site: str, caller: str, now: int, limits: DeviceLimits) -> SavedImpression:
        """The impression to store, or the standard's error, checked in the standard's order."""
        index = whole("histogram_index", self.histogram_index, 0, limits.max_histogram_size - 1)
        match_value = whole("match_value", self.match_value, 0, U32[-1])
        priority = whole("priority", self.priority, I32[0], I32[-1])
        # Longer than anything can look back is not an error: the standard clamps it silently.
        lifetime = min(whole("lifetime_days", self.lifetime_days, 1, ANY_DAYS), limits.max_lookback_days) * DAY
        sites = parse_sites("conversion_sites", self.conversion_sites, limits.max_conversion_sites)
        callers = parse_sites("conversion_callers", self.conversion_callers, limits.max_conversion_callers)
        event = Impression(now, site, caller, index, match_value, priority)
        return SavedImpression(event, now + lifetime, sites, callers)


def parse_sites(option: str, hosts: Sequence[str], limit: int) -> frozenset[str]:
    """The sites of a list option. Its length is checked before anything is parsed, and duplicates count."""
    return frozenset(parse_site(host) for host in entries(option, hosts, limit))


@dataclass(frozen=True, slots=True)
class Selection:
    """Which impressions a conversion may look at. In every list, empty means any.

    `since` is inclusive and `until` exclusive; `now` decides what has expired (still usable in its last second).
    """

    since: int
    until: int
    now: int
    conversion_site: str
    conversion_caller: str
    match_values: frozenset[int] = frozenset()
    impression_sites: frozenset[str] = frozenset()
    impression_callers: frozenset[str] = frozenset()
    # The querier's own events are public to it: showing them to its attribution function would leak for free.
    hidden_site: str = ""

    def accepts(self, saved: SavedImpression) -> bool:
        """Whether this conversion may see `saved`; the same rule as SqliteStore's WHERE clause."""
        seen = saved.impression
        return (
            self.since <= seen.time < self.until
            and self.now <= saved.expires
            and _allows(saved.conversion_sites, self.conversion_site)
            and _allows(saved.conversion_callers, self.conversion_caller)
            and (not self.match_values or seen.match_value in self.match_values)
            and _allows(self.impression_sites, seen.site)
            and _allows(self.impression_callers, seen.caller)
            and seen.site != self.hidden_site
        )


def _allows(sites: frozenset[str], site: str) -> bool:
    return not sites or site in sites

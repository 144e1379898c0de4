"""Impressions: what a site saved about an ad it showed, and when a conversion may use it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from device.epoch import DAY
from device.errors import RangeError
from device.limits import DeviceLimits
from device.site import parse_site

U32 = range(2**32)
I32 = range(-(2**31), 2**31)


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
        if not 0 <= self.histogram_index < limits.max_histogram_size:
            raise RangeError(f"histogram_index must be below {limits.max_histogram_size}, not {self.histogram_index}")
        if self.match_value not in U32 or self.priority not in I32:
            raise RangeError("match_value and priority must fit 32 bits")
        if self.lifetime_days <= 0:
            raise RangeError(f"lifetime_days must be at least 1, not {self.lifetime_days}")
        # Longer than anything can look back is not an error: the standard clamps it silently.
        lifetime = min(self.lifetime_days, limits.max_lookback_days) * DAY
        sites = parse_sites("conversion_sites", self.conversion_sites, limits.max_conversion_sites)
        callers = parse_sites("conversion_callers", self.conversion_callers, limits.max_conversion_callers)
        event = Impression(now, site, caller, self.histogram_index, self.match_value, self.priority)
        return SavedImpression(event, now + lifetime, sites, callers)


def parse_sites(option: str, hosts: Sequence[str], limit: int) -> frozenset[str]:
    """The sites of a list option. Its length is checked before anything is parsed, and duplicates count."""
    if len(hosts) > limit:
        raise RangeError(f"{option} has {len(hosts)} entries; this device allows {limit}")
    return frozenset(parse_site(host) for host in hosts)


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

"""Events: impressions that publishers' pages save and conversions that advertisers' pages save, and who may use them.

Conversion events are impressions with the roles exchanged. The list of publishers is stored with each event: a list
that a later call could replace would let one epoch's events decide what another epoch contributes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from device.errors import RangeError
from device.limits import DeviceLimits
from device.option import entries, whole
from device.site import parse_site
from protocol.errors import ErrorKind
from protocol.units import DAY

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
    """What a site passes to `save_impression`. Checked against a device's limits by `saved`.

    >>> trefoil.ImpressionOptions(histogram_index=2, lifetime_days=14).histogram_index
    2
    """

    histogram_index: int
    match_value: int = 0
    conversion_sites: Sequence[str] = ()
    conversion_callers: Sequence[str] = ()
    lifetime_days: int = 30
    priority: int = 0

    def saved(self, site: str, caller: str, now: int, limits: DeviceLimits) -> SavedImpression:
        """Return the impression to store, or raise the standard's error, checked in the standard's order."""
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
    """Return the sites of a list option. Its length is checked before anything is parsed, and duplicates count."""
    return frozenset(parse_site(host) for host in entries(option, hosts, limit))


@dataclass(frozen=True, slots=True)
class Selection:
    """Which impressions a conversion may read. In every list, empty means any.

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
    # The querier and its caller, where what they showed or saved themselves is hidden: they know of it, so a report
    # about it would reveal, for no charge, how much budget is left.
    hidden: frozenset[str] = frozenset()

    def accepts(self, saved: SavedImpression) -> bool:
        """Return whether this conversion may read `saved`, by the same rule as SqliteStore's WHERE clause."""
        impression = saved.impression
        return (
            self.since <= impression.time < self.until
            and self.now <= saved.expires
            and _allows(saved.conversion_sites, self.conversion_site)
            and _allows(saved.conversion_callers, self.conversion_caller)
            and (not self.match_values or impression.match_value in self.match_values)
            and _allows(self.impression_sites, impression.site)
            and _allows(self.impression_callers, impression.caller)
            and impression.site not in self.hidden
            and impression.caller not in self.hidden
        )


def _allows(sites: frozenset[str], site: str) -> bool:
    return not sites or site in sites


class ConversionEvent(NamedTuple):
    """One conversion as a publisher's request sees it. What `label` means (a sale, a sign-up) is the advertiser's."""

    time: int
    site: str
    caller: str
    label: int


@dataclass(frozen=True, slots=True)
class SavedConversion:
    """One conversion as the store keeps it: with its last usable second, and the publishers that may learn of it."""

    event: ConversionEvent
    expires: int
    publishers: frozenset[str]


@dataclass(frozen=True, slots=True)
class ConversionEventOptions:
    """What an advertiser's page passes to `save_conversion`. Only the named publishers may learn of the conversion."""

    publishers: Sequence[str]
    label: int = 0
    lifetime_days: int = 30

    def saved(self, site: str, caller: str, now: int, limits: DeviceLimits) -> SavedConversion:
        """Return the event to store, or raise a RangeError that says what to change."""
        label = whole("label", self.label, 0, U32[-1])
        lifetime = min(whole("lifetime_days", self.lifetime_days, 1, ANY_DAYS), limits.max_lookback_days) * DAY
        publishers = parse_sites("publishers", self.publishers, limits.max_publishers)
        if not publishers:
            raise RangeError(
                "publishers is empty",
                "Name a site that may learn of this conversion, or do not save it.",
                kind=ErrorKind.TOO_FEW,
            )
        if site in publishers:
            raise RangeError(
                f"publishers names {site} itself, which knows of its own conversions", kind=ErrorKind.INCONSISTENT
            )
        return SavedConversion(ConversionEvent(now, site, caller, label), now + lifetime, publishers)


@dataclass(frozen=True, slots=True)
class EventSelection:
    """Which conversions a publisher's request may read. No labels means any; advertisers are always named.

    `since` is inclusive and `until` exclusive; `now` decides what has expired (still usable in its last second).
    """

    since: int
    until: int
    now: int
    publisher: str
    advertisers: frozenset[str]
    labels: frozenset[int] = frozenset()

    def accepts(self, saved: SavedConversion) -> bool:
        """Return whether the publisher may learn of `saved`, by the same rule as the WHERE clause of `SqlConversions`.

        What happened on its own pages or through its own calls is public to it, and is hidden from its requests: a
        report about it would reveal, for no charge, how much budget is left.
        """
        event = saved.event
        return (
            self.since <= event.time < self.until
            and self.now <= saved.expires
            and event.site in self.advertisers
            and self.publisher in saved.publishers
            and self.publisher not in (event.site, event.caller)
            and (not self.labels or event.label in self.labels)
        )

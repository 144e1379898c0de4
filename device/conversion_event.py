"""Conversion events: what an advertiser's page saved about a conversion, and which publishers may learn that it was.

Impressions with the roles exchanged. The list of publishers is kept with each event: a list that a later call could
replace would let one epoch decide what another one gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from device.errors import RangeError
from device.impression import ANY_DAYS, U32, parse_sites
from device.limits import DeviceLimits
from device.option import whole
from protocol.seconds import DAY


class ConversionEvent(NamedTuple):
    """One conversion as a publisher's question sees it. What `label` means (a sale, a sign-up) is the advertiser's."""

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
    """What an advertiser's page passes to `save_conversion`. Nobody but the named publishers may ever learn of it."""

    publishers: Sequence[str]
    label: int = 0
    lifetime_days: int = 30

    def saved(self, site: str, caller: str, now: int, limits: DeviceLimits) -> SavedConversion:
        """The event to store, or a RangeError that says what to change."""
        label = whole("label", self.label, 0, U32[-1])
        lifetime = min(whole("lifetime_days", self.lifetime_days, 1, ANY_DAYS), limits.max_lookback_days) * DAY
        publishers = parse_sites("publishers", self.publishers, limits.max_publishers)
        if not publishers:
            raise RangeError(
                "publishers names nobody who may learn of this conversion", "Name one, or do not save the conversion."
            )
        if site in publishers:
            raise RangeError(f"publishers names {site} itself, which knows of its own conversions")
        return SavedConversion(ConversionEvent(now, site, caller, label), now + lifetime, publishers)


@dataclass(frozen=True, slots=True)
class EventSelection:
    """Which conversions a publisher's question may look at. No labels means any; advertisers are always named.

    `since` is inclusive and `until` exclusive; `now` decides what has expired (still usable in its last second).
    """

    since: int
    until: int
    now: int
    publisher: str
    advertisers: frozenset[str]
    labels: frozenset[int] = frozenset()

    def accepts(self, saved: SavedConversion) -> bool:
        """Whether the publisher may learn of `saved`; the same rule as the WHERE clause of `SqlConversions`.

        What happened on its own pages or through its own calls is public to it, and stays hidden from its question:
        to answer about it would tell, for nothing, what the filters still hold.
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

"""The limits a device runs under: the standard's implementation-defined values, which no site can change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from device import errors
from protocol.errors import ErrorKind, TrefoilError
from protocol.units import DAY, MICROS

# The aggregation service of devices that seal to a Trefoil helper set.
TREFOIL_SERVICE = "trefoil"
# More epochs than any device keeps; a bound so that a request cannot make one work for hours.
MAX_EPOCHS = 1000
_BUDGET = range(1, 2**53)
_LIST = range(2**16)
_RANGES = {
    "site_budget": _BUDGET,
    "global_budget": _BUDGET,
    "impression_site_quota": _BUDGET,
    "advertiser_quota": _BUDGET,
    "side_query_quota": _BUDGET,
    "sites_per_action": _LIST[1:],
    "activation_seconds": range(1, 366 * DAY),
    "epoch_days": range(1, 3661),
    "max_lookback_days": range(1, 36_601),
    "max_histogram_size": range(1, 2**20 + 1),
    "max_credit_size": _LIST[1:],
    "max_match_values": _LIST,
    "max_conversion_sites": _LIST,
    "max_conversion_callers": _LIST,
    "max_impression_sites": _LIST,
    "max_impression_callers": _LIST,
    "max_impressions_per_site": range(1, 2**31),
    "max_impressions_per_epoch": range(1, 2**31),
    "max_sites_per_epoch": range(1, 2**31),
    "max_conversions_per_epoch": range(1, 2**31),
    "max_publishers": _LIST[1:],
    "max_advertisers": _LIST[1:],
    "max_labels": _LIST,
    "max_log_records": range(1, 2**31),
    "delay_ms": range(200, 60_001),
    "work_ms": range(1, 200),
    "processor_ms": range(1000),
}
_OPTIONAL = {"sites_per_action"}


# The limits that a person or vendor may choose when a device is created. They are kept with its database.
CHOSEN = (
    "site_budget",
    "global_budget",
    "impression_site_quota",
    "advertiser_quota",
    "side_query_quota",
    "epoch_days",
    "own_site",
    "sites_per_action",
    "delay_ms",
    "processor_ms",
)


class OwnSite(Enum):
    """Whether the standard's call counts impressions that the querier itself showed or saved. It knows of them."""

    # As any other, by the standard: a site with ads of its own learns up to 2ε (Theorem 1, case 2).
    COUNTED = "counted"
    # Not at all: then it is ε, as in case 1, and they link no two devices (Theorem 9). To count them for free, and
    # charge only what others add, would keep ε but link two devices without a bound: so this was done under this name.
    HIDDEN = "hidden"
    CHARGED = HIDDEN


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """Budgets are micro-epsilons per epoch; the rest are counts and days, as the standard names them.

    >>> trefoil.DeviceLimits(site_budget=500_000).epoch_days
    7
    """

    site_budget: int = 1 * MICROS
    global_budget: int = 8 * MICROS
    impression_site_quota: int = 4 * MICROS
    # A ledger of its own, so that publishers' requests never change what the standard's calls return.
    advertiser_quota: int = 1 * MICROS
    # What all sites together may take where no relevant event was found, for side queries and after faults. Queriers
    # who use up this and both of one site's quotas still leave a quarter of the global budget.
    side_query_quota: int = 1 * MICROS
    # A limit that the standard leaves open, against many sites that collude to drain a device; None is off.
    sites_per_action: int | None = None
    # For how long a user's action in a tab lets a page call, in a browser with tabs. The drafts leave it open.
    activation_seconds: int = 3600
    own_site: OwnSite = OwnSite.COUNTED
    epoch_days: int = 7
    max_lookback_days: int = 30
    max_histogram_size: int = 1024
    max_credit_size: int = 10
    max_match_values: int = 30
    max_conversion_sites: int = 10
    max_conversion_callers: int = 10
    max_impression_sites: int = 30
    max_impression_callers: int = 10
    # Per epoch: impressions of one site, as the standard advises, impressions in all, and sites.
    max_impressions_per_site: int = 1_000
    max_impressions_per_epoch: int = 2_000
    max_sites_per_epoch: int = 200
    # The display side: conversion events per epoch, and how many sites or labels one call may name.
    max_conversions_per_epoch: int = 1_000
    max_publishers: int = 10
    max_advertisers: int = 10
    max_labels: int = 10
    max_log_records: int = 10_000
    # How long after its call a measurement is answered, and how long before its answer its work must begin. Enough for
    # a full device and the largest shape (`trefoil bench device` states both) after a turn of fifty other callers.
    delay_ms: int = 1000
    work_ms: int = 100
    # The processor time of a measurement, whatever it finds: what takes longer takes a multiple of it. Twice what the
    # work of a full device took on one machine. 0 is what the work takes, which then shows where processes compete.
    processor_ms: int = 50
    aggregation_services: frozenset[str] = frozenset({TREFOIL_SERVICE})

    def __post_init__(self) -> None:
        """Raise unless every limit is a whole number in its range: NaN would let everything through."""
        for name, allowed in _RANGES.items():
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            if type(value) is not int or value not in allowed:
                raise TrefoilError(
                    f"the limit {name} must be {allowed[0]} to {allowed[-1]}, not {value!r}",
                    kind=ErrorKind.OUT_OF_RANGE,
                )
        if type(self.own_site) is not OwnSite:
            raise TrefoilError(
                f"the limit own_site must be an OwnSite, not {self.own_site!r}", kind=ErrorKind.WRONG_TYPE
            )
        services = self.aggregation_services
        if not isinstance(services, frozenset) or not all(type(name) is str for name in services):
            raise TrefoilError(
                f"the limit aggregation_services must be a frozenset of names, not {services!r}",
                kind=ErrorKind.WRONG_TYPE,
            )

    @classmethod
    def from_settings(cls, settings: Mapping[str, object]) -> DeviceLimits:
        """Return the limits that a database keeps, or raise if one is unknown or out of range."""
        chosen: dict[str, Any] = dict(settings)
        if unknown := chosen.keys() - set(CHOSEN):
            raise TrefoilError(f"no device has a setting {min(unknown)[:99]!r}", kind=ErrorKind.FILE_DAMAGED)
        if "own_site" in chosen:
            rules = {rule.value: rule for rule in OwnSite}
            chosen["own_site"] = rules.get(chosen["own_site"], chosen["own_site"])
        return cls(**chosen)

    def settings(self) -> dict[str, int | str]:
        """Return the chosen limits as a database keeps them."""
        values = {name: getattr(self, name) for name in CHOSEN}
        values["own_site"] = self.own_site.value
        return {name: value for name, value in values.items() if value is not None}

    def check_service(self, name: str) -> str:
        """Return `name` if this device has that aggregation service, or raise the standard's error."""
        if name not in self.aggregation_services:
            names = ", ".join(sorted(self.aggregation_services))
            raise errors.ReferenceError(
                f"this device knows no aggregation service {name[:255]!r}",
                f"It knows {names}." if names else "It has no helper set yet: trefoil device service add",
            )
        return name

    @property
    def epoch_length(self) -> int:
        return self.epoch_days * DAY

    @property
    def max_lookback(self) -> int:
        """Return the lookback in seconds beyond which nothing is reachable."""
        return self.max_lookback_days * DAY

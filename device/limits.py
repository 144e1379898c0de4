"""The limits a device runs under: the standard's implementation-defined values, which no site can change."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from device import errors
from device.tick import GUARD, MARGIN
from protocol.epsilon import MICROS
from protocol.errors import TrefoilError
from protocol.seconds import DAY

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
}
_OPTIONAL = {"sites_per_action"}


class OwnSite(Enum):
    """What impressions on the querier's own site cost in the standard's call. They are public to the querier."""

    # As those of any other site, by the standard: a site with ads on its own pages learns up to 2ε (Theorem 1, case 2).
    COUNTED = "counted"
    # Only what the others add to them is charged and may be dropped, ‖A(F) − A(F ∩ P)‖: then it is ε, as in case 1.
    CHARGED = "charged"


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """Budgets are micro-epsilons per epoch; the rest are counts and days, as the standard names them."""

    site_budget: int = 1 * MICROS
    global_budget: int = 8 * MICROS
    impression_site_quota: int = 4 * MICROS
    # A ledger of its own, so that publishers' questions never change what the standard's calls give. Half as large:
    # queriers who use up both of one site's quotas still leave a quarter of the global budget.
    advertiser_quota: int = 2 * MICROS
    # One more that the standard leaves open, against many sites acting together to drain a device; None is off.
    sites_per_action: int | None = None
    # For how long a user's action in a tab lets a page call, where a browser knows its tabs. The drafts leave it open.
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
    # Of one epoch each: so many of one impression site, as the standard advises, so many in all, from so many sites.
    max_impressions_per_site: int = 1_000
    max_impressions_per_epoch: int = 2_000
    max_sites_per_epoch: int = 200
    # The display side: conversion events of one epoch, and how many sites or labels one call may name.
    max_conversions_per_epoch: int = 1_000
    max_publishers: int = 10
    max_advertisers: int = 10
    max_labels: int = 10
    max_log_records: int = 10_000
    aggregation_services: frozenset[str] = frozenset({TREFOIL_SERVICE})

    def __post_init__(self) -> None:
        """Every limit is a whole number in its range: one of NaN would let everything through."""
        for name, allowed in _RANGES.items():
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            if type(value) is not int or value not in allowed:
                raise TrefoilError(f"the limit {name} must be {allowed[0]} to {allowed[-1]}, not {value!r}")
        if type(self.own_site) is not OwnSite:
            raise TrefoilError(f"the limit own_site must be an OwnSite, not {self.own_site!r}")
        services = self.aggregation_services
        if not isinstance(services, frozenset) or not all(type(name) is str for name in services):
            raise TrefoilError(f"the limit aggregation_services must be a frozenset of names, not {services!r}")

    def known_service(self, name: str) -> str:
        """An aggregation service that this device knows, or the standard's error."""
        if name not in self.aggregation_services:
            known = ", ".join(sorted(self.aggregation_services))
            raise errors.ReferenceError(
                f"this device knows no aggregation service {name[:255]!r}",
                f"It knows {known}." if known else "It has no helper set yet: trefoil device service add",
            )
        return name

    @property
    def epoch_length(self) -> int:
        """Seconds in an epoch."""
        return self.epoch_days * DAY

    @property
    def work_seconds(self) -> float:
        """What the work of one call is given, with as much stored as these limits allow.

        Twice and more of what it takes on one core of two that are busy with other things: 0.65 µs of processor time an
        impression, 4 µs a site's quota, 1 ms for the rest.
        """
        epochs = self.max_lookback_days // self.epoch_days + 2
        impressions = self.max_impressions_per_epoch * 1.2e-6 + self.max_sites_per_epoch * 8e-6
        return 6e-3 + epochs * max(impressions, self.max_conversions_per_epoch * 4e-6)

    @property
    def tick_seconds(self) -> float:
        """How long a turn is at least: room for two callers that come at the same moment, in whole centiseconds."""
        return math.ceil((GUARD + 2 * self.work_seconds + MARGIN) * 100) / 100

    @property
    def max_lookback(self) -> int:
        """Seconds beyond which nothing is reachable."""
        return self.max_lookback_days * DAY

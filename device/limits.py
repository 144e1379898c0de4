"""The limits a device runs under: the standard's implementation-defined values, which no site can change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from enum import Enum
from typing import Any

from device import errors
from device.option import abbreviated
from protocol.errors import ErrorKind, TrefoilError
from protocol.units import DAY, MICROS

# The aggregation service of devices that seal to a Trefoil helper set.
TREFOIL_SERVICE = "trefoil"
# More epochs than any device keeps; a bound so that a request cannot make one work for hours.
MAX_EPOCHS = 1000
_BUDGET = range(1, 2**53)
_LIST = range(2**16)
_ROWS = range(1, 2**31)


def _limit(default: int | None, allowed: range, *, chosen: bool = False) -> Any:  # Any: as `dataclasses.field`
    """Return a field of `DeviceLimits`. What is `chosen` when a device is created is kept with its database."""
    return field(default=default, metadata={"allowed": allowed, "chosen": chosen})


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

    site_budget: int = _limit(1 * MICROS, _BUDGET, chosen=True)
    global_budget: int = _limit(8 * MICROS, _BUDGET, chosen=True)
    impression_site_quota: int = _limit(4 * MICROS, _BUDGET, chosen=True)
    # A ledger of its own, so that publishers' requests never change what the standard's calls return.
    advertiser_quota: int = _limit(1 * MICROS, _BUDGET, chosen=True)
    # What all sites together may take where no relevant event was found, for side queries and after faults. Queriers
    # who use up this and both of one site's quotas still leave a quarter of the global budget.
    side_query_quota: int = _limit(1 * MICROS, _BUDGET, chosen=True)
    # A limit that the standard leaves open, against many sites that collude to drain a device; None is off.
    sites_per_action: int | None = _limit(None, _LIST[1:], chosen=True)
    # For how long a user's action in a tab lets a page call, in a browser with tabs. The drafts leave it open.
    activation_seconds: int = _limit(3600, range(1, 366 * DAY))
    own_site: OwnSite = field(default=OwnSite.COUNTED, metadata={"chosen": True})
    epoch_days: int = _limit(7, range(1, 3661), chosen=True)
    max_lookback_days: int = _limit(30, range(1, 36_601))
    max_histogram_size: int = _limit(1024, range(1, 2**20 + 1))
    max_credit_size: int = _limit(10, _LIST[1:])
    max_match_values: int = _limit(30, _LIST)
    max_conversion_sites: int = _limit(10, _LIST)
    max_conversion_callers: int = _limit(10, _LIST)
    max_impression_sites: int = _limit(30, _LIST)
    max_impression_callers: int = _limit(10, _LIST)
    # Per epoch: impressions of one site, as the standard advises, impressions in all, and sites.
    max_impressions_per_site: int = _limit(1_000, _ROWS)
    max_impressions_per_epoch: int = _limit(2_000, _ROWS)
    max_sites_per_epoch: int = _limit(200, _ROWS)
    # The display side: conversion events per epoch, and how many sites or labels one call may name.
    max_conversions_per_epoch: int = _limit(1_000, _ROWS)
    max_publishers: int = _limit(10, _LIST[1:])
    max_advertisers: int = _limit(10, _LIST[1:])
    max_labels: int = _limit(10, _LIST)
    max_log_records: int = _limit(10_000, _ROWS)
    # How long after its call a measurement is answered, without the random part, and how long before that its work must
    # begin. Enough for a full device and the largest shape (`trefoil bench device` states both) after a turn of fifty
    # other callers.
    delay_ms: int = _limit(1000, range(200, 60_001), chosen=True)
    work_ms: int = _limit(100, range(1, 200))
    # The processor time of a measurement, whatever it finds: what takes longer takes a multiple of it. At least: on a
    # slow machine it is longer (`Delayed.within`). 0 is what the work takes, which then shows where processes compete.
    processor_ms: int = _limit(50, range(1000), chosen=True)
    aggregation_services: frozenset[str] = frozenset({TREFOIL_SERVICE})

    def __post_init__(self) -> None:
        """Raise unless every limit is a whole number in its range: NaN would let everything through."""
        for limit in fields(self):
            allowed, value = limit.metadata.get("allowed"), getattr(self, limit.name)
            if allowed is None or (value is None and limit.default is None):
                continue
            if type(value) is not int or value not in allowed:
                raise TrefoilError(
                    f"the limit {limit.name} must be {allowed[0]} to {allowed[-1]}, not {abbreviated(value)}",
                    kind=ErrorKind.OUT_OF_RANGE,
                )
        if type(self.own_site) is not OwnSite:
            raise TrefoilError(
                f"the limit own_site must be an OwnSite, not {abbreviated(self.own_site)}", kind=ErrorKind.WRONG_TYPE
            )
        services = self.aggregation_services
        if not isinstance(services, frozenset) or not all(type(name) is str for name in services):
            raise TrefoilError(
                f"the limit aggregation_services must be a frozenset of names, not {abbreviated(services)}",
                kind=ErrorKind.WRONG_TYPE,
            )

    @classmethod
    def from_settings(cls, settings: Mapping[str, object]) -> DeviceLimits:
        """Return the limits that a database keeps, or raise if one is unknown or out of range."""
        chosen: dict[str, Any] = dict(settings)
        if unknown := chosen.keys() - {limit.name for limit in _chosen()}:
            raise TrefoilError(f"no device has a setting {min(unknown)[:99]!r}", kind=ErrorKind.FILE_DAMAGED)
        if "own_site" in chosen:
            rules = {rule.value: rule for rule in OwnSite}
            chosen["own_site"] = rules.get(chosen["own_site"], chosen["own_site"])
        return cls(**chosen)

    def settings(self) -> dict[str, int | str]:
        """Return the chosen limits as a database keeps them."""
        values = {limit.name: getattr(self, limit.name) for limit in _chosen()}
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


def _chosen() -> list[Field[Any]]:
    """Return the limits that a person or vendor may choose when a device is created."""
    return [limit for limit in fields(DeviceLimits) if limit.metadata.get("chosen")]

"""The limits a device runs under: the standard's implementation-defined values, which no site can change."""

from __future__ import annotations

from dataclasses import dataclass

from device.epoch import DAY
from protocol.epsilon import MICROS
from protocol.errors import TrefoilError

# The aggregation service of devices that seal to a Trefoil helper set.
TREFOIL_SERVICE = "trefoil"


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """Budgets are micro-epsilons per epoch; the rest are counts and days, as the standard names them."""

    site_budget: int = 1 * MICROS
    global_budget: int = 8 * MICROS
    impression_site_quota: int = 4 * MICROS
    # One more that the standard leaves open, against many sites acting together to drain a device; None is off.
    sites_per_action: int | None = None
    epoch_days: int = 7
    max_lookback_days: int = 30
    max_histogram_size: int = 1024
    max_credit_size: int = 10
    max_match_values: int = 10
    max_conversion_sites: int = 10
    max_conversion_callers: int = 10
    max_impression_sites: int = 10
    max_impression_callers: int = 10
    max_impressions_per_epoch: int = 10_000
    aggregation_services: frozenset[str] = frozenset({TREFOIL_SERVICE})

    def __post_init__(self) -> None:
        for name in ("site_budget", "global_budget", "impression_site_quota", "epoch_days", "max_lookback_days"):
            if not (0 < getattr(self, name) < 2**53):
                raise TrefoilError(f"the limit {name} must be a positive number, not {getattr(self, name)}")
        for name in ("max_histogram_size", "max_credit_size", "max_impressions_per_epoch"):
            if not getattr(self, name) > 0:
                raise TrefoilError(f"the limit {name} must be at least 1, not {getattr(self, name)}")

    @property
    def epoch_length(self) -> int:
        """Seconds in an epoch."""
        return self.epoch_days * DAY

    @property
    def max_lookback(self) -> int:
        """Seconds beyond which nothing is reachable."""
        return self.max_lookback_days * DAY

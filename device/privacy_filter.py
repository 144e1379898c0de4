"""Privacy filters: the ledgers of what each epoch has paid, and the rule that none is ever overdrawn.

For every epoch on its own: check all filters that it must pay, then consume all of them, or none. An epoch that cannot
pay is dropped, silently, and the others still count (paper, Listing 1, step 3; the standard's safety limits).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from device.limits import Limits
from device.privacy_loss import EpochLoss

# Written into a filter that was emptied on purpose: no later change of limits can make it pay again.
EMPTIED = 2**62


class FilterKind(IntEnum):
    """Whose spending a filter bounds. Numbers are stored; add at the end."""

    SITE = 1
    GLOBAL = 2
    IMPRESSION_SITE = 3
    CONVERSION_SITE = 4

    def capacity(self, limits: Limits) -> int:
        """What a fresh filter of this kind holds, in micro-epsilons. An optional one that is off bounds nothing."""
        match self:
            case FilterKind.SITE:
                return limits.site_budget
            case FilterKind.GLOBAL:
                return limits.global_budget
            case FilterKind.IMPRESSION_SITE:
                return limits.impression_site_quota
            case FilterKind.CONVERSION_SITE:
                return EMPTIED if limits.conversion_site_quota is None else limits.conversion_site_quota


class FilterKey(NamedTuple):
    """One filter: its kind, the site it belongs to ("" for the global one), and its epoch."""

    kind: FilterKind
    site: str
    epoch: int


Charges = dict[FilterKey, int]


@dataclass(frozen=True, slots=True)
class FilterState:
    """A filter as its person may see it. Never leaves the device."""

    key: FilterKey
    spent: int
    capacity: int

    @property
    def remaining(self) -> int:
        """What is left, never below nothing."""
        return max(0, self.capacity - self.spent)


def epoch_charges(epoch: int, site: str, impression_sites: Collection[str], loss: EpochLoss, limits: Limits) -> Charges:
    """What `epoch` owes to each of its filters for a report to `site`. A filter is charged once, however many match."""
    charges = {
        FilterKey(FilterKind.SITE, site, epoch): loss.site,
        FilterKey(FilterKind.GLOBAL, "", epoch): loss.everyone,
    }
    if limits.conversion_site_quota is not None:
        charges[FilterKey(FilterKind.CONVERSION_SITE, site, epoch)] = loss.everyone
    for impression_site in impression_sites:
        charges[FilterKey(FilterKind.IMPRESSION_SITE, impression_site, epoch)] = loss.quota
    return charges


def affordable(charges: Charges, spent: Mapping[FilterKey, int], limits: Limits) -> bool:
    """Whether every filter can pay its part, in unbounded integers."""
    return all(spent.get(key, 0) + amount <= key.kind.capacity(limits) for key, amount in charges.items())


def states(spent: Iterable[tuple[FilterKey, int]], limits: Limits) -> list[FilterState]:
    """Filters with their capacity, an emptied one as spent to the last micro-epsilon."""
    shown = []
    for key, amount in spent:
        capacity = key.kind.capacity(limits)
        shown.append(FilterState(key, min(amount, capacity), capacity))
    return shown

"""Privacy filters: the ledgers of what each epoch has paid, and the rule that none is ever overdrawn.

For every epoch on its own: check all filters that it must pay, then consume all of them, or none. An epoch that cannot
pay is dropped, silently, and the others still count (paper, Listing 1, step 3; the standard's safety limits).
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

from device.limits import DeviceLimits
from device.privacy_loss import EpochLoss

# Written into a filter that was emptied on purpose: no later change of limits can make it pay again.
EMPTIED = 2**62


class FilterKind(IntEnum):
    """Whose spending a filter bounds. Numbers are stored; add at the end."""

    SITE = 1
    GLOBAL = 2
    IMPRESSION_SITE = 3
    # 4 was a quota that no device could set.
    ADVERTISER = 5


class FilterOwner(NamedTuple):
    """Whose filter it is: a site in one of its roles, or everyone together (site "")."""

    kind: FilterKind
    site: str


Charges = Mapping[FilterOwner, int]
Capacities = Mapping[FilterKind, int]


class PrivacyFilter:
    """One owner's filters: what every epoch has paid, in micro-epsilons. A ledger, so it is mutable."""

    __slots__ = ("paid",)

    def __init__(self, encoded: bytes = b"") -> None:
        numbers = array("q", encoded)
        self.paid: dict[int, int] = dict(zip(numbers[::2], numbers[1::2], strict=True))

    def encode(self) -> bytes:
        """Epoch and amount in turn, eight bytes each."""
        return array("q", chain.from_iterable(self.paid.items())).tobytes()

    def copy(self) -> PrivacyFilter:
        """The same account, to be changed on its own."""
        copied = PrivacyFilter()
        copied.paid = dict(self.paid)
        return copied

    def spent(self, epoch: int) -> int:
        """What `epoch` has paid so far; nothing, if it was never charged."""
        return self.paid.get(epoch, 0)

    def consume(self, epoch: int, amount: int) -> None:
        """Add to what `epoch` has paid. Whoever calls has checked that it can."""
        self.paid[epoch] = self.paid.get(epoch, 0) + amount

    def empty(self, epoch: int) -> None:
        """Make `epoch` unable to pay, for ever."""
        self.paid[epoch] = EMPTIED

    def forget_before(self, epoch: int) -> None:
        """Drop what no barrier lets anyone ask about any more."""
        self.paid = {known: amount for known, amount in self.paid.items() if known >= epoch}

    def entries(self) -> Iterator[tuple[int, int]]:
        """Epochs that have paid something, and how much, earliest first."""
        return ((epoch, amount) for epoch, amount in sorted(self.paid.items()) if amount)


@dataclass(frozen=True, slots=True)
class FilterState:
    """One filter of one epoch as its person may see it. Never leaves the device."""

    kind: FilterKind
    site: str
    epoch: int
    spent: int
    capacity: int

    @property
    def remaining(self) -> int:
        """What is left."""
        return self.capacity - self.spent


def capacities(limits: DeviceLimits) -> Capacities:
    """What a fresh filter of each kind holds."""
    return {
        FilterKind.SITE: limits.site_budget,
        FilterKind.GLOBAL: limits.global_budget,
        FilterKind.IMPRESSION_SITE: limits.impression_site_quota,
        FilterKind.ADVERTISER: limits.advertiser_quota,
    }


def charges_of(
    site: str, event_sites: Collection[str], loss: EpochLoss, quota: FilterKind = FilterKind.IMPRESSION_SITE
) -> Charges:
    """What an epoch owes to each of its filters for a report to `site`: each is charged once, however many match.

    `quota` is the kind of filter that the sites of matching events have.
    """
    charges = {FilterOwner(FilterKind.SITE, site): loss.site, FilterOwner(FilterKind.GLOBAL, ""): loss.everyone}
    for event_site in event_sites:
        charges[_quota_of(quota, event_site)] = loss.quota
    return charges


@lru_cache(maxsize=1024)
def _quota_of(kind: FilterKind, event_site: str) -> FilterOwner:
    """Kept, because a conversion asks for the same few once per epoch."""
    return FilterOwner(kind, event_site)


def check_and_consume(
    epoch: int, charges: Charges, filters: Mapping[FilterOwner, PrivacyFilter], capacity: Capacities
) -> bool:
    """Whether `epoch` could pay. If one of its filters cannot, none of them does; in unbounded integers."""
    for owner, amount in charges.items():
        if filters[owner].paid.get(epoch, 0) + amount > capacity[owner.kind]:
            return False
    for owner, amount in charges.items():
        filters[owner].consume(epoch, amount)
    return True


def states(filters: Mapping[FilterOwner, PrivacyFilter], limits: DeviceLimits) -> list[FilterState]:
    """Every filter that has paid, with its capacity; an emptied one as spent to the last micro-epsilon."""
    capacity = capacities(limits)
    return [
        FilterState(owner.kind, owner.site, epoch, min(spent, capacity[owner.kind]), capacity[owner.kind])
        for owner, ledger in sorted(filters.items())
        for epoch, spent in ledger.entries()
    ]

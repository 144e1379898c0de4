"""Privacy filters: the ledgers of what each epoch has paid, and the rule that none is ever overdrawn.

For every epoch on its own: check all filters that it must pay, then consume all of them, or none. An epoch that cannot
pay is dropped, silently, and the others still count (paper, Listing 1, step 3; the standard's safety limits).
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterator, Mapping
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


class Owner(NamedTuple):
    """Whose filter it is: a site in one of its roles, or everyone together (site "")."""

    kind: FilterKind
    site: str


Charges = Mapping[Owner, int]
Capacities = Mapping[FilterKind, int]


class PrivacyFilter:
    """One owner's filters: what every epoch has paid, in micro-epsilons. A ledger, so it is mutable."""

    __slots__ = ("first", "paid")

    def __init__(self, first: int = 0, paid: bytes = b"") -> None:
        self.first = first
        self.paid = array("q", paid)

    def spent(self, epoch: int) -> int:
        """What `epoch` has paid so far; nothing, if it was never charged."""
        place = epoch - self.first
        return self.paid[place] if 0 <= place < len(self.paid) else 0

    def consume(self, epoch: int, amount: int) -> None:
        """Add to what `epoch` has paid. Whoever calls has checked that it can."""
        place = epoch - self.first
        if not 0 <= place < len(self.paid):
            self._reach(epoch)
            place = epoch - self.first
        self.paid[place] += amount

    def empty(self, epoch: int) -> None:
        """Make `epoch` unable to pay, for ever."""
        self._reach(epoch)
        self.paid[epoch - self.first] = EMPTIED

    def forget_before(self, epoch: int) -> None:
        """Drop what no barrier lets anyone ask about any more."""
        dropped = max(0, min(epoch - self.first, len(self.paid)))
        del self.paid[:dropped]
        self.first += dropped

    def entries(self) -> Iterator[tuple[int, int]]:
        """Epochs that have paid something, and how much."""
        return ((self.first + place, amount) for place, amount in enumerate(self.paid) if amount)

    def _reach(self, epoch: int) -> None:
        if not self.paid:
            self.first = epoch
        if epoch < self.first:
            self.paid = array("q", bytes(8 * (self.first - epoch))) + self.paid
            self.first = epoch
        missing = epoch - self.first + 1 - len(self.paid)
        if missing > 0:
            self.paid.frombytes(bytes(8 * missing))


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


def capacities(limits: Limits) -> Capacities:
    """What a fresh filter of each kind holds. An optional one that is off is never charged."""
    return {
        FilterKind.SITE: limits.site_budget,
        FilterKind.GLOBAL: limits.global_budget,
        FilterKind.IMPRESSION_SITE: limits.impression_site_quota,
        FilterKind.CONVERSION_SITE: limits.conversion_site_quota or 0,
    }


def charges_of(site: str, impression_sites: Collection[str], loss: EpochLoss, limits: Limits) -> Charges:
    """What an epoch owes to each of its filters for a report to `site`: each is charged once, however many match."""
    charges = {Owner(FilterKind.SITE, site): loss.site, Owner(FilterKind.GLOBAL, ""): loss.everyone}
    if limits.conversion_site_quota is not None:
        charges[Owner(FilterKind.CONVERSION_SITE, site)] = loss.everyone
    for impression_site in impression_sites:
        charges[Owner(FilterKind.IMPRESSION_SITE, impression_site)] = loss.quota
    return charges


def check_and_consume(
    epoch: int, charges: Charges, filters: Mapping[Owner, PrivacyFilter], capacity: Capacities
) -> bool:
    """Whether `epoch` could pay. If one of its filters cannot, none of them does; in unbounded integers."""
    for owner, amount in charges.items():
        if filters[owner].spent(epoch) + amount > capacity[owner.kind]:
            return False
    for owner, amount in charges.items():
        filters[owner].consume(epoch, amount)
    return True


def states(filters: Mapping[Owner, PrivacyFilter], limits: Limits) -> list[FilterState]:
    """Every filter that has paid, with its capacity; an emptied one as spent to the last micro-epsilon."""
    capacity = capacities(limits)
    return [
        FilterState(owner.kind, owner.site, epoch, min(spent, capacity[owner.kind]), capacity[owner.kind])
        for owner, ledger in sorted(filters.items())
        for epoch, spent in ledger.entries()
    ]

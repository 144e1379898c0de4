"""The privacy budget: what one epoch of one device pays for one report, and the filters that it pays from.

A charge is ⌈ε·Δ_x/Δ⌉ micro-epsilons, where Δ_x bounds how far the epoch's events can move this report and the noise
has scale Δ/ε (paper §4.3 and App. F). It is the larger of the standard's formula in IEEE doubles and the exact integer
ceiling: a float may raise a charge, never lower it.

A filter is never overdrawn. For every epoch on its own: check all filters that it must pay, then consume all of them,
or none. An epoch that cannot pay is dropped silently, and the others still count (paper, Listing 1, step 3; the
standard's safety limits).
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from fractions import Fraction
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

from device.limits import DeviceLimits
from protocol.units import MICROS, charge

# Written into a filter that was emptied on purpose: no later change of limits can make it pay again.
EMPTIED = 2**62


def report_sensitivity(value: int, buckets: int, epochs: int) -> int:
    """Return Δ(ρ), how far any one epoch can move a report of sum at most `value` (Theorem 18).

    With one bucket or one epoch it is the value. With several of both, removing an epoch can take the value out of one
    bucket and put it into another: twice the value.
    """
    return value if buckets == 1 or epochs == 1 else 2 * value


@dataclass(frozen=True, slots=True)
class LossTerms:
    """What a request says about noise, as charges need it: ε as requested and in whole micros, Δ and κ."""

    epsilon: float
    epsilon_micros: int
    query_sensitivity: int
    kappa: int = 0

    def loss(self, individual_sensitivity: int) -> int:
        """Return ⌈ε·Δ_x/Δ⌉ in micros. The double arithmetic follows the standard's order of operations exactly."""
        noise_scale = self.query_sensitivity / self.epsilon
        as_double = math.ceil(individual_sensitivity / noise_scale * MICROS)
        if self.epsilon_micros == 0:
            # Below one millionth no report can be sealed; simulations charge all the same. The noise scale may be
            # infinite here, and a double 0: the exact ceiling is not.
            exact = Fraction(self.epsilon) * MICROS * individual_sensitivity / self.query_sensitivity
            return max(as_double, math.ceil(exact))
        return max(as_double, charge(self.epsilon_micros, individual_sensitivity, self.query_sensitivity))


@dataclass(frozen=True, slots=True)
class EpochLoss:
    """What one epoch owes: to the querier's own filter, and to those that queriers share, everyone's and the quotas."""

    site: int
    everyone: int


def epoch_loss(terms: LossTerms, *, relevant: bool, sensitivity: int, output: int | None) -> EpochLoss:
    """Return what an epoch owes, by the cases of Theorem 4.

    `sensitivity` is Δ(ρ); `output` is the report's sum when the window is one epoch.

    Case 1, no relevant impression: nothing. Case 2, a window of one epoch (decided by the window, never by the data):
    the querier's filter pays ‖A(F) − A(∅)‖₁, which is `output`. Case 3: it pays Δ(ρ). Filters that all queriers share
    pay Δ(ρ) in both. With a side query every epoch owes κ on top, with data or without: whether an epoch has data must
    not show in what it can still pay (Theorem 17 charges epochs with data only; that leaks without bound).

    Quotas pay what the filter of all sites pays, so that they bound it. Which of them pays depends on the data; that
    leaks no more than any quota: an answer differs between two databases only if one of them pays for it from the
    querier's filter and from that of all sites, and each of the two holds its capacity.

    So an epoch with data pays ε·(Δ(ρ) + κ)/Δ in case 3, which is ε·(Δ + κ)/Δ for a report of the largest value, and one
    without data ε·κ/Δ. Example: the standard's call with ε = 0.5, value = max_value = 5 and κ = 5 has Δ = 2·5 = 10, and
    a week with a relevant impression pays 0.5·(10 + 5)/10 = 0.75.
    """
    shared = sensitivity if relevant else 0
    own = (shared if output is None else output) if relevant else 0
    return EpochLoss(
        site=terms.loss(own + terms.kappa),
        everyone=terms.loss(shared + terms.kappa),
    )


class FilterKind(IntEnum):
    """Whose spending a filter bounds. Numbers are stored; add at the end."""

    SITE = 1
    GLOBAL = 2
    IMPRESSION_SITE = 3
    # 4 was a quota that no device could set.
    ADVERTISER = 5
    # What all sites together take of the budget of all sites in epochs without relevant events: for side queries, and
    # after faults. No event site's quota bounds that: eight sites without any ad could use up everyone's budget.
    SIDE_QUERY = 6


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
        """Return epoch and amount in turn, eight bytes each."""
        return array("q", chain.from_iterable(self.paid.items())).tobytes()

    def copy(self) -> PrivacyFilter:
        """Return an independent copy."""
        copied = PrivacyFilter()
        copied.paid = dict(self.paid)
        return copied

    def spent(self, epoch: int) -> int:
        """Return what `epoch` has paid so far."""
        return self.paid.get(epoch, 0)

    def consume(self, epoch: int, amount: int) -> None:
        """Add to what `epoch` has paid. The caller has checked that it can."""
        self.paid[epoch] = self.paid.get(epoch, 0) + amount

    def empty(self, epoch: int) -> None:
        """Make `epoch` unable to pay, permanently."""
        self.paid[epoch] = EMPTIED

    def forget_before(self, epoch: int) -> None:
        """Drop epochs before `epoch`, which the barrier closes to every request."""
        self.paid = {paid_epoch: amount for paid_epoch, amount in self.paid.items() if paid_epoch >= epoch}

    def entries(self) -> Iterator[tuple[int, int]]:
        """Return the epochs that have paid something, and how much, earliest first."""
        return ((epoch, amount) for epoch, amount in sorted(self.paid.items()) if amount)


@dataclass(frozen=True, slots=True)
class FilterState:
    """One filter of one epoch as the person may see it. Never leaves the device."""

    kind: FilterKind
    site: str
    epoch: int
    spent: int
    capacity: int

    @property
    def remaining(self) -> int:
        return self.capacity - self.spent


def capacities(limits: DeviceLimits) -> Capacities:
    """Return what a fresh filter of each kind holds."""
    return {
        FilterKind.SITE: limits.site_budget,
        FilterKind.GLOBAL: limits.global_budget,
        FilterKind.IMPRESSION_SITE: limits.impression_site_quota,
        FilterKind.ADVERTISER: limits.advertiser_quota,
        FilterKind.SIDE_QUERY: limits.side_query_quota,
    }


def charges_of(
    site: str, event_sites: Collection[str], loss: EpochLoss, quota: FilterKind = FilterKind.IMPRESSION_SITE
) -> Charges:
    """Return what an epoch owes to each of its filters for a report to `site`: each pays once, however many match.

    `quota` is the kind of filter that the sites of matching events have. Without such sites that of side queries pays.
    """
    charges = {FilterOwner(FilterKind.SITE, site): loss.site, FilterOwner(FilterKind.GLOBAL, ""): loss.everyone}
    for event_site in event_sites:
        charges[_quota_of(quota, event_site)] = loss.everyone
    if not event_sites:
        charges[FilterOwner(FilterKind.SIDE_QUERY, "")] = loss.everyone
    return charges


@lru_cache(maxsize=1024)
def _quota_of(kind: FilterKind, event_site: str) -> FilterOwner:
    # Cached: a conversion needs the same few once per epoch.
    return FilterOwner(kind, event_site)


def check_and_consume(
    epoch: int, charges: Charges, filters: Mapping[FilterOwner, PrivacyFilter], capacity: Capacities
) -> bool:
    """Charge all filters of `epoch`, or none of them if one cannot pay; return whether they were charged.

    In unbounded integers, so that no sum can wrap around.
    """
    for owner, amount in charges.items():
        if filters[owner].paid.get(epoch, 0) + amount > capacity[owner.kind]:
            return False
    for owner, amount in charges.items():
        filters[owner].consume(epoch, amount)
    return True


def states(filters: Mapping[FilterOwner, PrivacyFilter], limits: DeviceLimits) -> list[FilterState]:
    """Return every filter that has paid, with its capacity; an emptied one as spent to the last micro-epsilon."""
    capacity = capacities(limits)
    return [
        FilterState(owner.kind, owner.site, epoch, min(spent, capacity[owner.kind]), capacity[owner.kind])
        for owner, ledger in sorted(filters.items())
        for epoch, spent in ledger.entries()
    ]

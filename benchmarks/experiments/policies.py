"""Three ways to account for privacy: Cookie Monster, ARA-like and IPA-like, with many filters charged at once.

Cookie Monster is what `device/` does; the other two are the paper's baselines and exist only here. A system is its name
in `System` and its record in `System.facts`; experiments, plans and figures take all they need of it from there.

Charges on one filter are sequential: each is paid if what remains covers it, and refused otherwise. Filters are
independent, so the k-th charges of all contested filters are decided together, in rounds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import ClassVar, NamedTuple, Protocol, assert_never

import numpy as np

from benchmarks.experiments.world import Flags, Ints, Matches, QueryColumns, World, first_of_runs, stable_order
from protocol.units import MICROS


@dataclass(frozen=True, slots=True)
class Spending:
    """Which charges were paid (in the order given), and what each filter that was asked has paid in all."""

    paid: Flags
    filters: Ints
    totals: Ints


def spend(filters: Ints, amounts: Ints, capacity: int) -> Spending:
    """Charge `filters[i]` with `amounts[i]`, in rising i on each filter. Amounts are micros, zero or more."""
    if len(filters) == 0:
        return Spending(np.zeros(0, dtype=np.bool_), filters, amounts)
    order = stable_order(filters)
    sorted_filters, sorted_amounts = filters[order], amounts[order]
    starts = np.flatnonzero(first_of_runs(sorted_filters))
    demanded = np.add.reduceat(sorted_amounts, starts)
    paid_sorted = np.ones(len(filters), dtype=np.bool_)
    counts = np.diff(np.append(starts, len(filters)))
    # A filter whose charges all fit together refuses none of them, whatever their order.
    contested = np.flatnonzero(demanded > capacity)
    _rounds(sorted_amounts, starts[contested], counts[contested], capacity, paid_sorted)
    totals = np.add.reduceat(np.where(paid_sorted, sorted_amounts, 0), starts)
    paid = np.empty(len(filters), dtype=np.bool_)
    paid[order] = paid_sorted
    return Spending(paid, sorted_filters[starts], totals)


def _rounds(amounts: Ints, starts: Ints, counts: Ints, capacity: int, paid: Flags) -> None:
    """Decide the k-th charge of every contested filter, for k = 0, 1, ...; linear in the number of charges."""
    remaining = np.full(len(starts), capacity, dtype=np.int64)
    active = np.arange(len(starts))
    k = 0
    while len(active):
        charge = starts[active] + k
        covered = remaining[active] >= amounts[charge]
        paid[charge] = covered
        remaining[active] -= np.where(covered, amounts[charge], 0)
        k += 1
        active = active[counts[active] > k]


def spend_windows(first: Ints, last: Ints, amounts: Ints, starts: Ints, span: int, capacity: int) -> tuple[Flags, Ints]:
    """Charge all or nothing: conversion i pays `amounts[i]` in each epoch first[i] to last[i], or nowhere.

    Conversions are grouped by owner (`starts`), in arrival order. The k-th conversions of all owners are decided
    together. Returns which were paid, and what every owner has paid in each of `span` epochs.
    """
    counts = np.diff(starts)
    consumed = np.zeros((len(counts), span), dtype=np.int64)
    paid = np.zeros(len(first), dtype=np.bool_)
    active = np.flatnonzero(counts)
    k = 0
    while len(active):
        conversion = starts[active] + k
        paid[conversion] = _pay_windows(
            consumed, active, first[conversion], last[conversion], amounts[conversion], capacity
        )
        k += 1
        active = active[counts[active] > k]
    return paid, consumed


def _pay_windows(consumed: Ints, owner: Ints, first: Ints, last: Ints, amounts: Ints, capacity: int) -> Flags:
    """Charge one conversion of each owner: check every epoch of its window first, then charge all of them."""
    covered = np.ones(len(owner), dtype=np.bool_)
    width = int((last - first).max()) + 1
    for step in range(width):
        epoch = np.minimum(first + step, last)
        covered &= consumed[owner, epoch] + amounts <= capacity
    for step in range(width):
        here = np.flatnonzero(covered & (first + step <= last))
        consumed[owner[here], first[here] + step] += amounts[here]
    return covered


class Accounting(StrEnum):
    """The rule for a window of several epochs: the paper's report sensitivity, or the artifact's full ε."""

    PAPER = "paper"
    ARTIFACT = "artifact"


class System(Enum):
    """The three systems compared, by the names the results carry."""

    IPA_LIKE = "ipa-like"
    ARA_LIKE = "ara-like"
    COOKIE_MONSTER = "cookie-monster"

    @property
    def facts(self) -> SystemFacts:
        """The record of this system. A system without one does not pass the type check."""
        match self:
            case System.IPA_LIKE:
                return SystemFacts("IPA-like", "#4c72b0", "s", False, _ipa_like, IpaLike.planned)
            case System.ARA_LIKE:
                return SystemFacts("ARA-like", "#dd8452", "^", False, _ara_like, AraLike.planned)
            case System.COOKIE_MONSTER:
                return SystemFacts("Cookie Monster", "#8b1a8b", "o", True, CookieMonster, CookieMonster.planned)
            case _:
                assert_never(self)


class Crowd(NamedTuple):
    """What a plan assumes about people. `price` is ε; `mean`, `most` and `idle` are the charges to an on-device epoch
    for the mean report, the largest report and none; all in micros. `participation` is the share of people in a query,
    `exposure` the share of them with an impression in an epoch.
    """

    price: int
    mean: int
    most: int
    idle: int
    participation: float
    exposure: float


class PlannedPrices(NamedTuple):
    """The cost of a query to an epoch, in micros: for a typical report, for the largest, and averaged over people."""

    typical: int
    worst: int
    average: float


class SystemFacts(NamedTuple):
    """The record of a system: its title, colour and marker in figures; whether it has a side query, and so runs once
    for each κ; `policy` makes its policy from an accounting and a κ in units; `planned` returns its prices in a plan.
    """

    title: str
    colour: str
    marker: str
    has_side_query: bool
    policy: Callable[[Accounting, int], DevicePolicy | IpaLike]
    planned: Callable[[Crowd], PlannedPrices]


@dataclass(frozen=True, slots=True)
class PolicyOutcome:
    """The outcome of a device policy on a part of a world.

    `report`: value reported per conversion, `bucket` where it is counted; `flagged`: the side query's bit; `paid`:
    micros each conversion cost; `consumed`: micros by owner and epoch, from `first_epoch` on.
    """

    report: Ints
    bucket: Ints
    flagged: Flags
    paid: Ints
    consumed: Ints
    first_epoch: int


class DevicePolicy(Protocol):
    """Accounting on each device by itself: owners are independent, so a world may be cut into parts.

    One of the paper's systems, or None for a policy of one's own, which may have a `label` to be shown by.
    """

    system: ClassVar[System | None]

    def run(self, world: World, matches: Matches) -> PolicyOutcome:
        """Make and charge every report, each owner's in arrival order."""
        ...


def label_of(policy: DevicePolicy) -> str:
    """Return the name of a policy in tables, figures and results."""
    named: str | None = getattr(policy, "label", None)
    if named is not None:
        return named
    return type(policy).__name__ if policy.system is None else policy.system.value


def charges(accounting: Accounting, epsilon: Ints, sensitivity: Ints | int, cap: int) -> Ints:
    """Return ⌈ε·Δ_x/Δ⌉ in micros for whole columns, as `protocol.units.charge` does.

    A device also evaluates the standard's formula in doubles and takes the larger of the two; so does the paper's
    accounting here, in the same order of operations, so that not one micro differs.
    """
    exact: Ints = -((-epsilon * sensitivity) // cap)
    match accounting:
        case Accounting.PAPER:
            doubles = np.ceil(sensitivity / (cap / (epsilon / MICROS)) * MICROS)
            return np.maximum(exact, doubles.astype(np.int64))
        case Accounting.ARTIFACT:
            return exact
        case _:
            assert_never(accounting)


@dataclass(frozen=True, slots=True)
class CookieMonster:
    """Each epoch with a relevant impression pays for itself if it can; one that cannot loses its impressions.

    `kappa` (in units) switches the bias side query on: every requested epoch then pays for it, with or without data.
    """

    system: ClassVar[System | None] = System.COOKIE_MONSTER
    accounting: Accounting = Accounting.PAPER
    kappa: int = 0
    capacity: int = MICROS

    @staticmethod
    def planned(crowd: Crowd) -> PlannedPrices:
        """Return the charge: only devices in a query pay, by the content of the epoch."""
        shared = crowd.exposure * crowd.mean + (1 - crowd.exposure) * crowd.idle
        return PlannedPrices(crowd.mean, crowd.most, crowd.participation * shared)

    def run(self, world: World, matches: Matches) -> PolicyOutcome:
        conversion, epoch, run = self._charged(matches)
        relevant = run >= 0
        sensitivity = np.where(relevant, self._sensitivity(world, matches)[conversion], 0) + self.kappa
        epsilon = world.queries.epsilon[world.conversions.query[conversion]]
        amounts = charges(self.accounting, epsilon, sensitivity, world.cap)
        first, span = _span(matches)
        spending = spend(world.conversions.owner[conversion] * span + (epoch - first), amounts, self.capacity)
        consumed = np.zeros(world.owners * span, dtype=np.int64)
        consumed[spending.filters] = spending.totals
        report, bucket, flagged = _last_touch(world, matches, conversion, run, spending.paid)
        return PolicyOutcome(
            report=report,
            bucket=bucket,
            flagged=flagged if self.kappa else np.zeros(len(report), dtype=np.bool_),
            paid=_sum_by(conversion, np.where(spending.paid, amounts, 0), len(report)),
            consumed=consumed.reshape(world.owners, span),
            first_epoch=first,
        )

    def _charged(self, matches: Matches) -> tuple[Ints, Ints, Ints]:
        """Return the (conversion, epoch) pairs that are charged, with the epoch's run of impressions, -1 if none."""
        conversion, epoch, run = matches.relevant_epochs()
        if not self.kappa:
            return conversion, epoch, run
        everywhere, requested = matches.requested_epochs()
        widths = matches.last_epoch - matches.first_epoch + 1
        place = (np.cumsum(widths) - widths)[conversion] + (epoch - matches.first_epoch[conversion])
        runs = np.full(len(everywhere), -1, dtype=np.int64)
        runs[place] = run
        return everywhere, requested, runs

    def _sensitivity(self, world: World, matches: Matches) -> Ints:
        """Return how far one epoch's data can move the report, in units."""
        value = world.conversions.value
        match self.accounting:
            case Accounting.PAPER:
                # Thm 4 case 3 with Thm 18: the value for one bucket, twice the value for several.
                several = value if world.buckets == 1 else 2 * value
            case Accounting.ARTIFACT:
                several = np.full(len(value), world.cap, dtype=np.int64)
            case _:
                assert_never(self.accounting)
        # Thm 4 case 2: a window of one epoch pays for the report it makes, which is the value.
        return np.where(matches.single_epoch, value, several)


@dataclass(frozen=True, slots=True)
class AraLike:
    """Every epoch of the window pays ε, all or nothing; if one cannot, the report is zero. No side query."""

    system: ClassVar[System | None] = System.ARA_LIKE
    accounting: Accounting = Accounting.PAPER
    capacity: int = MICROS

    @staticmethod
    def planned(crowd: Crowd) -> PlannedPrices:
        """Return the charge: only devices in a query pay, all of ε."""
        return PlannedPrices(crowd.price, crowd.price, crowd.participation * crowd.price)

    def run(self, world: World, matches: Matches) -> PolicyOutcome:
        first, span = _span(matches)
        amounts = charges(self.accounting, world.queries.epsilon, world.cap, world.cap)[world.conversions.query]
        paid, consumed = spend_windows(
            matches.first_epoch - first,
            matches.last_epoch - first,
            amounts,
            world.conversion_starts,
            span,
            self.capacity,
        )
        counted = paid & matches.attributed
        bucket = np.zeros(len(counted), dtype=np.int64)
        bucket[counted] = world.impressions.bucket[matches.newest[counted]]
        return PolicyOutcome(
            report=np.where(counted, world.conversions.value, 0),
            bucket=bucket,
            flagged=np.zeros(len(paid), dtype=np.bool_),
            paid=np.where(paid, amounts * (matches.last_epoch - matches.first_epoch + 1), 0),
            consumed=consumed,
            first_epoch=first,
        )


@dataclass(frozen=True, slots=True)
class Central:
    """The outcome of the IPA-like policy: which queries ran, what each cost, and micros by advertiser and epoch."""

    executed: Flags
    paid: Ints
    consumed: Ints


@dataclass(frozen=True, slots=True)
class IpaLike:
    """No filter on the device. A full batch charges ε to one central filter in every epoch it spans, or is lost."""

    system: ClassVar[System] = System.IPA_LIKE
    accounting: Accounting = Accounting.PAPER
    capacity: int = MICROS

    @staticmethod
    def planned(crowd: Crowd) -> PlannedPrices:
        """Return the charge: one central filter, so every query charges everyone."""
        return PlannedPrices(crowd.price, crowd.price, crowd.price)

    def run(self, queries: QueryColumns, cap: int, order: Ints, first: Ints, last: Ints) -> Central:
        """Run the queries in the order their batches fill up; first and last are their epochs, the ends included."""
        price = charges(self.accounting, queries.epsilon, cap, cap)
        executed = np.zeros(len(order), dtype=np.bool_)
        paid = np.zeros(len(order), dtype=np.int64)
        earliest = int(first.min())
        consumed = np.zeros((int(queries.advertiser.max()) + 1, int(last.max()) - earliest + 1), dtype=np.int64)
        for query in order.tolist():
            epochs = slice(int(first[query]) - earliest, int(last[query]) - earliest + 1)
            filters = consumed[int(queries.advertiser[query]), epochs]
            if np.all(filters + price[query] <= self.capacity):
                executed[query] = True
                paid[query] = price[query] * len(filters)
                filters += price[query]
        return Central(executed, paid, consumed)


def _ara_like(accounting: Accounting, _: int) -> AraLike:
    return AraLike(accounting)


def _ipa_like(accounting: Accounting, _: int) -> IpaLike:
    return IpaLike(accounting)


def _span(matches: Matches) -> tuple[int, int]:
    """Return the first epoch ever requested, and the number of epochs from it to the last."""
    first = int(matches.first_epoch.min())
    return first, int(matches.last_epoch.max()) - first + 1


def _sum_by(group: Ints, amounts: Ints, groups: int) -> Ints:
    """Return integer sums of amounts by group. Requires groups in rising order."""
    running = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(amounts)))
    edges = np.searchsorted(group, np.arange(groups + 1))
    return np.diff(running[edges])


def _last_touch(world: World, matches: Matches, conversion: Ints, run: Ints, paid: Flags) -> tuple[Ints, Ints, Flags]:
    """Return each conversion's report from the epochs that paid, and whether an unpaid epoch may have changed it.

    Pairs are sorted by conversion, oldest epoch first, so a later pair overwrites an earlier one: what remains is
    the newest. Flag (Thm 16): some epoch could not pay, and no later paid epoch has a relevant impression.
    """
    count = len(world.conversions.value)
    place = np.arange(len(conversion), dtype=np.int64)
    newest_paid = np.full(count, -1, dtype=np.int64)
    newest_refused = np.full(count, -1, dtype=np.int64)
    usable = paid & (run >= 0)
    newest_paid[conversion[usable]] = place[usable]
    newest_refused[conversion[~paid]] = place[~paid]
    counted = np.flatnonzero(newest_paid >= 0)
    # The epoch's last impression, unless that came after the conversion.
    touch = np.minimum(matches.run_end[run[newest_paid[counted]]], matches.newest[counted])
    report = np.zeros(count, dtype=np.int64)
    bucket = np.zeros(count, dtype=np.int64)
    report[counted] = world.conversions.value[counted]
    bucket[counted] = world.impressions.bucket[touch]
    return report, bucket, newest_refused > newest_paid

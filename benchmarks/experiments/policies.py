"""Three ways to account for privacy, side by side: Cookie Monster, ARA-like and IPA-like.

Cookie Monster is what `device/` does; the other two are the paper's baselines and exist only here. A system is its name
in `System` and its record in `System.facts`; experiments, plans and figures take all they need of it from there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, NamedTuple, Protocol, assert_never

import numpy as np

from benchmarks.experiments.columns import Flags, Ints
from benchmarks.experiments.matching import Matches
from benchmarks.experiments.privacy_filters import spend, spend_windows
from benchmarks.experiments.world import Queries, World
from protocol.epsilon import MICROS


class Accounting(Enum):
    """Whose rule for a window of several epochs: the paper's report sensitivity, or the artifact's full ε."""

    PAPER = "paper"
    ARTIFACT = "artifact"


class System(Enum):
    """The three systems compared, by the names the results carry."""

    IPA_LIKE = "ipa-like"
    ARA_LIKE = "ara-like"
    COOKIE_MONSTER = "cookie-monster"

    @property
    def facts(self) -> SystemFacts:
        """Of this system. One without them does not pass the type check."""
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
    """What a plan expects of people: micros that ε is, and that an on-device epoch pays for the mean report, the
    largest and none; how much of the population is in a query, and how much of that has impressions in an epoch.
    """

    price: int
    mean: int
    most: int
    idle: int
    participation: float
    exposure: float


class PlannedPrices(NamedTuple):
    """What a query costs an epoch, in micros: with a typical report, with the largest, and averaged over everybody."""

    typical: int
    worst: int
    average: float


class SystemFacts(NamedTuple):
    """All there is to know of a system: how figures show it, told apart by colour and by shape; whether it has a side
    query, and so runs once for each κ; its policy for an accounting and a κ in units; and what a plan says of it.
    """

    title: str
    colour: str
    marker: str
    has_side_query: bool
    policy: Callable[[Accounting, int], DevicePolicy | IpaLike]
    planned: Callable[[Crowd], PlannedPrices]


@dataclass(frozen=True, slots=True)
class PolicyOutcome:
    """What a device policy did with a part of a world.

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
    """What a policy is called in tables, figures and results."""
    named: str | None = getattr(policy, "label", None)
    if named is not None:
        return named
    return type(policy).__name__ if policy.system is None else policy.system.value


def charges(accounting: Accounting, epsilon: Ints, sensitivity: Ints | int, cap: int) -> Ints:
    """⌈ε·Δ_x/Δ⌉ in micros for whole columns, rounding up: `protocol.epsilon.charge`.

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
        """Only who is in a query pays, and by what is in the epoch."""
        shared = crowd.exposure * crowd.mean + (1 - crowd.exposure) * crowd.idle
        return PlannedPrices(crowd.mean, crowd.most, crowd.participation * shared)

    def run(self, world: World, matches: Matches) -> PolicyOutcome:
        """See `DevicePolicy`."""
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
        """The (conversion, epoch) pairs that are charged, with the epoch's run of impressions, or -1 without any."""
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
        """How far one epoch's data can move the report, in units."""
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
        """Only who is in a query pays, and all of ε."""
        return PlannedPrices(crowd.price, crowd.price, crowd.participation * crowd.price)

    def run(self, world: World, matches: Matches) -> PolicyOutcome:
        """See `DevicePolicy`."""
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
    """What the IPA-like policy did: which queries ran, and what each (advertiser, epoch) paid for each query."""

    executed: Flags
    paid: Ints
    consumed: dict[tuple[int, int], int]


@dataclass(frozen=True, slots=True)
class IpaLike:
    """No filter on the device. A full batch charges ε to one central filter in every epoch it spans, or is lost."""

    system: ClassVar[System] = System.IPA_LIKE
    accounting: Accounting = Accounting.PAPER
    capacity: int = MICROS

    @staticmethod
    def planned(crowd: Crowd) -> PlannedPrices:
        """One central filter: everyone's budget goes with every query."""
        return PlannedPrices(crowd.price, crowd.price, crowd.price)

    def run(self, queries: Queries, cap: int, order: Ints, first: Ints, last: Ints) -> Central:
        """Run the queries in the order their batches fill up; first and last are their epochs, the ends included."""
        price = charges(self.accounting, queries.epsilon, cap, cap)
        executed = np.zeros(len(order), dtype=np.bool_)
        paid = np.zeros(len(order), dtype=np.int64)
        consumed: dict[tuple[int, int], int] = {}
        for query in order.tolist():
            advertiser, epsilon = int(queries.advertiser[query]), int(price[query])
            filters = [(advertiser, epoch) for epoch in range(int(first[query]), int(last[query]) + 1)]
            if all(consumed.get(key, 0) + epsilon <= self.capacity for key in filters):
                executed[query] = True
                paid[query] = epsilon * len(filters)
                consumed.update((key, consumed.get(key, 0) + epsilon) for key in filters)
        return Central(executed, paid, consumed)


def _ara_like(accounting: Accounting, _: int) -> AraLike:
    return AraLike(accounting)


def _ipa_like(accounting: Accounting, _: int) -> IpaLike:
    return IpaLike(accounting)


def _span(matches: Matches) -> tuple[int, int]:
    """The first epoch ever requested, and how many there are up to the last."""
    first = int(matches.first_epoch.min())
    return first, int(matches.last_epoch.max()) - first + 1


def _sum_by(group: Ints, amounts: Ints, groups: int) -> Ints:
    """Sums of amounts by group, in integers; groups are rising."""
    running = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(amounts)))
    edges = np.searchsorted(group, np.arange(groups + 1))
    return np.diff(running[edges])


def _last_touch(world: World, matches: Matches, conversion: Ints, run: Ints, paid: Flags) -> tuple[Ints, Ints, Flags]:
    """The report of each conversion from the epochs that paid, and whether an unpaid epoch may have changed it.

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

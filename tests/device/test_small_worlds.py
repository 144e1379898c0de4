"""Every small world of three weeks, on both stores, in every mode and on both sides, one call at a time.

Each week holds an event that is private to the querier, one that it knows, both or neither, and any of the weeks may
have nothing left in one of its filters. For every such world and every request of a menu:

- the report is that of the clear twin: the function over the events of the weeks that could pay, and nothing else;
- no filter is overdrawn, and a week pays all of its filters or none;
- what a week's private events can move is paid for by that week, in one of the two databases; in the database that has
  them where the querier's own are hidden and no flag is asked for (Theorem 1, case 1);
- they decide nothing about what another week pays.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from fractions import Fraction
from typing import NamedTuple

import pytest

from benchmarks.experiments.small_worlds import START, WEEK, Clock, PlainDevice, Spending, fixed_coins, l1
from device import conversion
from device.attribution import Award, EqualCredit, FirstTouch, LastNTouch, LastTouch, attribute
from device.budget import FilterKind, FilterOwner, capacities
from device.conversion import AttributionRequest, ConversionOptions
from device.device import Device
from device.events import ConversionEventOptions, Impression, ImpressionOptions
from device.labelling import LabelOptions
from device.limits import TREFOIL_SERVICE, DeviceLimits, OwnSite
from device.report import PlainSeal
from device.request import CheckedRequest, SideQuery, SideQueryForm
from protocol.units import DAY, HOUR
from tests.support.both_stores import Kind
from tests.support.display_worlds import InMemory, Shelf, on_disk
from tests.support.small_worlds import subsets

QUERIER, NEWS, SHOP = "querier.example", "news.example", "shop.example"
WEEKS = (0, 1, 2)
NOW = START + 3 * WEEK - HOUR
Options = ConversionOptions | AttributionRequest | LabelOptions


class Event(NamedTuple):
    """What happens in a week: an impression or a conversion, which the querier knows of or not."""

    week: int
    known: bool

    @property
    def time(self) -> int:
        # The known one is later in the middle week only: either order occurs.
        return START + self.week * WEEK + (2 + (self.known == (self.week == 1))) * DAY

    @property
    def bucket(self) -> int:
        return (self.week + self.known) % 2

    @property
    def where(self) -> tuple[str, str | None]:
        """Return the site, and the intermediary on it. Known: by the querier's page, or by its frame on another's."""
        if not self.known:
            return (NEWS if self.week else SHOP), None
        return (NEWS, QUERIER) if self.week == 1 else (QUERIER, None)


EVENTS = [Event(week, known) for week in WEEKS for known in (False, True)]
Events = tuple[Event, ...]


class Drained(NamedTuple):
    """The weeks that have nothing left in one kind of filter."""

    kind: FilterKind
    weeks: tuple[int, ...]

    def spending(self, limits: DeviceLimits) -> Spending:
        quota = self.kind in (FilterKind.IMPRESSION_SITE, FilterKind.ADVERTISER)
        sites = [NEWS, SHOP, QUERIER] if quota else [QUERIER if self.kind is FilterKind.SITE else ""]
        owners = [FilterOwner(self.kind, site) for site in sites]
        return tuple((owner, week, capacities(limits)[self.kind]) for owner in owners for week in self.weeks)


def drained(kinds: Sequence[FilterKind]) -> list[Drained]:
    """Return every set of weeks for each kind; the empty set once."""
    return [Drained(kind, weeks) for kind in kinds for weeks in subsets(WEEKS) if weeks or kind is kinds[0]]


class Outcome(NamedTuple):
    """A report, and what every filter has paid for it, by owner and week."""

    report: tuple[int, ...]
    paid: Mapping[tuple[FilterOwner, int], int]

    def by(self, kind: FilterKind, week: int) -> int:
        return sum(
            amount for (owner, paid_week), amount in self.paid.items() if (owner.kind, paid_week) == (kind, week)
        )


class World:
    """A device with these events, of one side or the other."""

    def __init__(self, events: Events, limits: DeviceLimits, shelf: Shelf, *, display: bool) -> None:
        self.store = shelf.store(list(FilterKind), None)
        clock = Clock()
        self.device: PlainDevice = Device(self.store, PlainSeal(), clock=clock, limits=limits, coins=fixed_coins())
        with self.store.transaction():
            self.store.fix_epoch_start(START)
        for event in sorted(events, key=lambda event: event.time):
            clock.now, (site, intermediary) = event.time, event.where
            if not display:
                options = ImpressionOptions(event.bucket)
                self.device.save_impression(site, options, intermediary=intermediary)
            elif site != QUERIER:
                named = ConversionEventOptions([QUERIER])
                self.device.save_conversion(site, named, intermediary=intermediary)
        clock.now = NOW

    def outcome(self, before: Spending, options: Options) -> Outcome:
        self.store.rewind(before)
        if isinstance(options, LabelOptions):
            report = self.device.measure_impression(QUERIER, options)
        else:
            report = self.device.measure_conversion(QUERIER, options)
        spent = {(owner, week): amount for owner, week, amount in before}
        after = {(owner, week): amount for owner, week, amount in self.store.spending()}
        return Outcome(report, {each: after[each] - spent.get(each, 0) for each in after})


def paper(*epochs: int, **changes: object) -> AttributionRequest:
    asked = AttributionRequest(epochs, 0.5, 2, 2, 4, function=EqualCredit())
    return replace(asked, **changes)  # type: ignore[arg-type]  # fields of the request


def standard(days: int = 20, **changes: object) -> ConversionOptions:
    asked = ConversionOptions(TREFOIL_SERVICE, 2, 0.5, value=2, max_value=3, credit=(1.0, 1.0, 1.0), lookback_days=days)
    return replace(asked, **changes)  # type: ignore[arg-type]  # fields of the options


def labels(days: int = 20, **changes: object) -> LabelOptions:
    asked = LabelOptions(TREFOIL_SERVICE, (2, 1), 4, 0.5, 20 * DAY, (NEWS, SHOP), window_days=days)
    return replace(asked, **changes)  # type: ignore[arg-type]  # fields of the options


# All weeks, two with a gap between them, one; every function; every form of the flag.
PAPER = [
    paper(0, 1, 2),
    paper(0, 1, 2, function=LastNTouch((2.0, 1.0, 1.0))),
    paper(0, 1, 2, function=FirstTouch()),
    paper(0, 2),
    paper(1),
    paper(0, 1, 2, side_query=SideQuery(2)),
    paper(0, 1, 2, function=LastTouch(), side_query=SideQuery(1, SideQueryForm.LAST_TOUCH)),
]
STANDARD = [standard(), standard(6), standard(13, credit=(1.0,)), standard(kappa=1)]
LABELS = [labels(), labels(7), labels(side_query=SideQuery(1)), labels(side_query=SideQuery(1, SideQueryForm.ANY))]
MODES: dict[str, tuple[OwnSite, Sequence[Options], Sequence[FilterKind]]] = {
    "paper": (OwnSite.COUNTED, PAPER, (FilterKind.SITE, FilterKind.GLOBAL, FilterKind.IMPRESSION_SITE)),
    "counted": (OwnSite.COUNTED, STANDARD, (FilterKind.SITE, FilterKind.IMPRESSION_SITE)),
    "hidden": (OwnSite.HIDDEN, STANDARD, (FilterKind.SITE, FilterKind.SIDE_QUERY)),
    "display": (OwnSite.COUNTED, LABELS, (FilterKind.SITE, FilterKind.ADVERTISER)),
}


def visible(events: Events, request: CheckedRequest, *, display: bool) -> dict[int, list[Event]]:
    """Return the events that may enter a report, by week: the clear twin of *Match*."""
    hides_own = display or (isinstance(request, conversion.Conversion) and request.hides_own)
    since, until = NOW - 20 * DAY, NOW
    if isinstance(request, conversion.Conversion):
        since = START if request.lookback is None else NOW - request.lookback
    else:
        until = since + request.length  # type: ignore[attr-defined]  # a Labelling
    weeks: dict[int, list[Event]] = {}
    for event in events:
        asked_for = not getattr(request, "epochs", ()) or event.week in request.epochs  # type: ignore[attr-defined]
        if asked_for and since <= event.time < until and not (event.known and (hides_own or (display and event.known))):
            weeks.setdefault(event.week, []).append(event)
    return weeks


def expected(request: CheckedRequest, weeks: Mapping[int, Sequence[Event]]) -> tuple[int, ...]:
    """Return the function over these weeks' events."""
    award = Award(request.value, request.buckets, [0.5] * request.coins)
    shown = {week: [Impression(one.time, "", "", one.bucket, 0, 0) for one in events] for week, events in weeks.items()}
    return attribute(request.function, shown, award)


class Checker:
    """Holds one mode's worlds, and checks them one by one and in pairs."""

    def __init__(self, mode: str, shelf: Shelf) -> None:
        rule, self.menu, kinds = MODES[mode]
        # On disk the querier's own filter alone: the filters are the same program on both stores.
        kinds = kinds if isinstance(shelf, InMemory) else kinds[:1]
        self.display = mode == "display"
        self.limits = DeviceLimits(own_site=rule)
        self.states = drained(kinds)
        self.worlds = {events: World(events, self.limits, shelf, display=self.display) for events in subsets(EVENTS)}

    def check(self, options: Options, state: Drained) -> None:
        request = options.checked(QUERIER, QUERIER, self.limits)
        before = state.spending(self.limits)
        outcomes = {events: world.outcome(before, options) for events, world in self.worlds.items()}
        for events, outcome in outcomes.items():
            self._check_alone(request, state, events, outcome)
            for week in WEEKS:
                fewer = tuple(event for event in events if event.week != week or event.known)
                if len(fewer) < len(events):
                    self._check_pair(request, week, outcome, outcomes[fewer])

    def _check_alone(self, request: CheckedRequest, state: Drained, events: Events, outcome: Outcome) -> None:
        seen = visible(events, request, display=self.display)
        # The quota of side queries is asked in weeks without events alone.
        binds = state.kind is not FilterKind.SIDE_QUERY
        paying = {week: seen[week] for week in seen if not (binds and week in state.weeks)}
        assert outcome.report[: request.buckets] == expected(request, paying), (request, state, events)
        for (owner, week), amount in outcome.paid.items():
            left = capacities(self.limits)[owner.kind] * (not (owner.kind is state.kind and week in state.weeks))
            assert 0 <= amount <= left
        for week in WEEKS:
            pays = bool(outcome.by(FilterKind.GLOBAL, week))
            assert pays == (week in paying or bool(request.kappa and self._flags(request, state, seen, week)))
            quotas = [
                outcome.paid.get((FilterOwner(request.quota, each.where[0]), week), 0) for each in paying.get(week, ())
            ]
            assert all(quotas) == pays or not pays

    def _flags(self, request: CheckedRequest, state: Drained, seen: Mapping[int, object], week: int) -> bool:
        """Return whether a week can pay for the flag alone."""
        asked = isinstance(request, conversion.Conversion) and (not request.epochs or week in request.epochs)
        quota = state.kind in (FilterKind.IMPRESSION_SITE, FilterKind.ADVERTISER)
        other_pays = (quota and week not in seen) or (state.kind is FilterKind.SIDE_QUERY and week in seen)
        refused = week in state.weeks and not other_pays
        return (asked or self.display) and not refused

    def _check_pair(self, request: CheckedRequest, week: int, having: Outcome, lacking: Outcome) -> None:
        rate = Fraction(request.loss_terms.epsilon_micros, request.loss_terms.query_sensitivity)
        moved = rate * l1(having.report, lacking.report)
        hides_own = self.display or (isinstance(request, conversion.Conversion) and request.hides_own)
        for kind in (FilterKind.SITE, FilterKind.GLOBAL):
            paid = [outcome.by(kind, week) for outcome in (having, lacking)]
            assert moved <= max(paid)
            if hides_own and not request.kappa:
                assert moved <= paid[0] and paid[1] == 0
        others = [{each: paid for each, paid in one.paid.items() if each[1] != week} for one in (having, lacking)]
        assert others[0] == others[1]


@pytest.fixture(params=list(Kind), ids=lambda kind: kind.value)
def shelf(request: pytest.FixtureRequest) -> Iterator[Shelf]:
    with nullcontext(InMemory()) if request.param is Kind.MEMORY else on_disk() as made:
        yield made


@pytest.mark.parametrize("mode", MODES)
def test_every_small_world(mode: str, shelf: Shelf) -> None:
    checker = Checker(mode, shelf)
    assert len(checker.worlds) == 64
    for options, state in itertools.product(checker.menu, checker.states):
        checker.check(options, state)

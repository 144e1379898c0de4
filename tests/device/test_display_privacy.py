"""The display side on small worlds: whatever a publisher asks, in whatever order, it learns at most its budget.

The engine is the real one; the game is exact (`display_worlds.worst`). Where a stronger adversary has a weaker bound,
the game shows both that the bound holds and that the stronger one does not: those are the bounds of device/README.md.

Then fifteen wrong rules that look right, each of which must be seen to leak more than its bound; and random worlds, on
both stores, against a model that was written from the rule and not from the engine.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import ceil
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.experiments.small_worlds import START, UNBOUNDED, WEEK, Clock, Spending, fixed_coins, l1, worst_loss
from device.attribution import Award
from device.budget import Charges, EpochLoss, FilterKind, FilterOwner, LossTerms, PrivacyFilter, epoch_loss
from device.conversion import AttributionRequest, ConversionOptions
from device.device import Device, Payment
from device.events import ConversionEvent, ConversionEventOptions, EventSelection, SavedConversion
from device.labelling import Labelling, LabelOptions
from device.limits import TREFOIL_SERVICE, DeviceLimits
from device.report import PlainSeal
from device.request import CheckedRequest, Match, SideQuery, SideQueryForm
from device.stores.storage import ConversionStore, Store
from protocol.units import DAY, MICROS
from tests.support.both_stores import Ann, Kind, fresh_store
from tests.support.display_worlds import (
    BUDGET,
    CAP,
    GRAIN,
    NOW,
    OTHER_PUBLISHER,
    PLENTY,
    PUBLISHER,
    A,
    Ask,
    B,
    DisplayWorld,
    Event,
    Events,
    InMemory,
    Kept,
    OnDisk,
    Shelf,
    converted,
    label,
    limits,
    moment,
    neighbours,
    on_disk,
    populate,
    public_to,
    shown,
    worst_of,
)
from tests.support.small_worlds import subsets

HALF = Fraction(1, 2)
# One of them does not allow the publisher, and one is on its own pages.
POSSIBLE = [
    converted(0, A),
    converted(0, B, day=5),
    converted(1, A, day=1),
    converted(1, B),
    converted(1, A, day=5, by=(OTHER_PUBLISHER,)),
    converted(0, PUBLISHER, day=1, by=(OTHER_PUBLISHER,)),
]
# Unequal costs on single epochs and on both: with equal ones "the first pays" goes unseen.
MENU = [
    label((2, 1)),
    label((1, 0), days=7),
    label((0, 2), (1, 0), 7, advertisers=(A,)),
    label((1, 1), (0, 4), 5, rate=HALF),
    label((5, 0), (1, 0), 7),
    label((2, 2), (1, 0), 7),
]
EVERYTHING = "TREFOIL_FUZZ_SECONDS" in os.environ


@contextmanager
def shelf_of(kind: Kind) -> Iterator[Shelf]:
    if kind is Kind.MEMORY:
        yield InMemory()
        return
    with on_disk() as disk:
        yield disk


@pytest.fixture(params=list(Kind), ids=lambda kind: kind.value)
def shelf(request: pytest.FixtureRequest) -> Iterator[Shelf]:
    """A game on both stores."""
    with shelf_of(request.param) as made:
        yield made


@pytest.fixture(params=list(Kind) if EVERYTHING else [Kind.MEMORY], ids=lambda kind: kind.value)
def long_shelf(request: pytest.FixtureRequest) -> Iterator[Shelf]:
    """A game that takes longer: on both stores in `make fuzz` only."""
    with shelf_of(request.param) as made:
        yield made


def chosen(pairs: Iterator[tuple[Events, Events]], shelf: Shelf | None = None) -> Iterator[tuple[Events, Events]]:
    """Yield a fifth of them, in SQLite a twentieth, and all of them in `make fuzz`."""
    return pairs if EVERYTHING else itertools.islice(pairs, 0, None, 19 if isinstance(shelf, OnDisk) else 5)


def test_every_epoch_is_charged_exactly_what_it_can_move(shelf: Shelf) -> None:
    """Over all contents of the epoch and of the other one: no report costs less than its largest change, or more."""
    worlds = {events: DisplayWorld(events, site_budget=PLENTY, shelf=shelf) for events in subsets(POSSIBLE)}

    def asked_of(events: Events, asked: Ask) -> tuple[tuple[int, ...], Spending]:
        return worlds[tuple(event for event in POSSIBLE if event in events)].step((), asked)

    for asked, epoch in itertools.product(MENU, (0, 1)):
        rest = [event for event in POSSIBLE if event.epoch != epoch]
        for own in subsets([event for event in POSSIBLE if event.epoch == epoch]):
            public = tuple(event for event in own if public_to(event, PUBLISHER))
            change, charges = 0, set()
            for other in subsets(rest):
                report, spending = asked_of(own + other, asked)
                change = max(change, l1(report, asked_of(public + other, asked)[0]))
                charges.add(sum(paid for owner, at, paid in spending if (owner.site, at) == (PUBLISHER, epoch)))
            # The charge is the same whatever the other epoch holds.
            assert charges == {asked.rate * change * GRAIN}, (asked, epoch, own)


def test_a_publisher_learns_at_most_its_budget_and_can_learn_all_of_it(shelf: Shelf) -> None:
    assert worst_of(MENU, chosen(neighbours(POSSIBLE, PUBLISHER), shelf), shelf=shelf) == BUDGET


def test_two_publishers_together_learn_the_global_budget(shelf: Shelf) -> None:
    menu = [label((2, 1)), label((2, 1), site=OTHER_PUBLISHER)]
    menu.append(label((0, 2), (1, 0), 7, advertisers=(A,), site=OTHER_PUBLISHER))
    watched = (FilterKind.SITE, FilterKind.GLOBAL)
    pairs = chosen(neighbours(POSSIBLE, PUBLISHER, OTHER_PUBLISHER), shelf)
    assert worst_of(menu, pairs, watched=watched, global_budget=8, shelf=shelf) == 8


def test_an_honest_publisher_that_drains_shared_filters_tells_another_nothing_more(long_shelf: Shelf) -> None:
    """Whether the global budget and the quotas are used up must not show more than the asker's own budget."""
    mine, theirs = [label((2, 1)), label((0, 2), (1, 0), 7)], label((3, 0), site=OTHER_PUBLISHER)
    watched = (FilterKind.SITE, FilterKind.GLOBAL, FilterKind.ADVERTISER)
    for events, fewer in chosen(neighbours(POSSIBLE[:4], PUBLISHER), long_shelf):
        spent = []
        for each in (events, fewer):
            world = DisplayWorld(each, watched=watched, global_budget=5, advertiser_quota=4, shelf=long_shelf)
            _, spending = world.step((), theirs)
            world.fresh = spending
            spent.append(world)
        assert worst_loss(spent[0], spent[1], mine) <= BUDGET


@pytest.mark.parametrize("form", [SideQueryForm.GENERAL, SideQueryForm.ANY])
def test_a_side_query_doubles_the_bound(form: SideQueryForm, long_shelf: Shelf) -> None:
    """κ for every epoch, with data or without. Once the budget is not enough, twice is."""
    side = SideQuery(1, form)
    menu = [label((1, 0), side_query=side), label((1, 1), (1, 0), 7, side_query=side), MENU[1]]
    pairs = chosen(neighbours(POSSIBLE, PUBLISHER), long_shelf)
    assert BUDGET < worst_of(menu, pairs, shelf=long_shelf) <= 2 * BUDGET


# Both roles of one site

REQUEST = AttributionRequest((1,), epsilon=1.0, buckets=2, value=2, query_sensitivity=8)
BOTH_ROLES = [converted(1, A), shown(1, A, day=4), converted(0, A), shown(1, PUBLISHER, day=5)]


def test_a_site_that_asks_in_both_roles_has_one_budget(shelf: Shelf) -> None:
    """As a publisher, and as an advertiser by the paper's request, which does not see the site's own impressions."""
    menu = [MENU[2], MENU[0], Ask(REQUEST)]
    assert worst_of(menu, neighbours(BOTH_ROLES, PUBLISHER), shelf=shelf) == BUDGET


def test_with_the_standards_calls_over_own_impressions_it_is_twice_the_budget(shelf: Shelf) -> None:
    """Those calls alone tell it nothing of others; but what its display side spent decides whether they still pay."""
    standard = Ask(ConversionOptions(TREFOIL_SERVICE, 2, epsilon=1.0, value=3, max_value=4, lookback_days=7))
    own = [converted(1, A), shown(1, PUBLISHER, day=5)]
    pairs = list(neighbours(own, PUBLISHER))
    assert worst_of([standard], pairs, shelf=shelf) == 0
    assert worst_of([MENU[2], MENU[5]], pairs, shelf=shelf) <= BUDGET
    assert BUDGET < worst_of([standard, MENU[2], MENU[5]], pairs, shelf=shelf) <= 2 * BUDGET


# Stronger adversaries, each with the bound that then holds


def test_an_intermediary_that_registers_conversions_and_asks_has_twice_the_budget(long_shelf: Shelf) -> None:
    """It asks on the publisher's page, and what it registered on the advertiser's is public to it, but not hidden."""
    adtech = "adtech.example"
    events = [converted(1, A, caller=adtech), converted(1, B, day=2)]
    menu = [
        label((3, 0), (1, 0), 7, advertisers=(B,), intermediary=adtech),
        label((3, 0), (1, 0), 7, advertisers=(A,), intermediary=adtech),
    ]
    pairs = list(neighbours(events, PUBLISHER, adtech))
    assert BUDGET < worst_of(menu, pairs, shelf=long_shelf) <= 2 * BUDGET
    # Over all of its publishers, twice the global budget.
    for site in (A, B):
        menu.append(label((3, 0), (1, 0), 7, advertisers=(site,), site=OTHER_PUBLISHER, intermediary=adtech))
    watched = (FilterKind.SITE, FilterKind.GLOBAL)
    assert 8 < worst_of(menu, pairs, watched=watched, global_budget=8, shelf=long_shelf) <= 16


def test_a_publishers_own_pixel_on_the_advertisers_page_is_hidden_from_it() -> None:
    """What it registered itself it knows already: an advertiser has to call by itself."""
    world = DisplayWorld([converted(1, A, caller=PUBLISHER, by=(PUBLISHER, OTHER_PUBLISHER))])
    assert world.step((), MENU[2]) == ((0, 0), ())
    assert DisplayWorld([converted(1, A)]).step((), MENU[2])[0] == (0, 2)


def colluders(quota: int) -> dict[str, object]:
    watched = (FilterKind.SITE, FilterKind.GLOBAL, FilterKind.ADVERTISER)
    return {"watched": watched, "global_budget": 8, "advertiser_quota": quota}


def asks(site: str, *advertisers: Sequence[str]) -> list[Ask]:
    sizes = (1, 2)
    return [label((size, 0), (1, 0), 7, advertisers=names, site=site) for names in advertisers for size in sizes]


def test_an_advertiser_that_colludes_with_two_publishers_has_twice_the_global_budget(long_shelf: Shelf) -> None:
    """What it did itself it knows, and still sees whether that pays: its quota is no bound on what is learnt."""
    menu = asks(PUBLISHER, (A,), (B,)) + asks(OTHER_PUBLISHER, (A,), (B,))
    pairs = list(neighbours([converted(1, A), converted(1, B)], A, PUBLISHER, OTHER_PUBLISHER))
    assert 8 < worst_of(menu, pairs, **colluders(PLENTY), shelf=long_shelf) <= 16


def test_a_publisher_that_is_the_others_advertiser_has_twice_the_global_budget(long_shelf: Shelf) -> None:
    events = [converted(1, PUBLISHER, by=(OTHER_PUBLISHER,)), converted(1, B)]
    menu = asks(PUBLISHER, (B,)) + asks(OTHER_PUBLISHER, (PUBLISHER,), (B,))
    pairs = list(neighbours(events, PUBLISHER, OTHER_PUBLISHER))
    assert 8 < worst_of(menu, pairs, **colluders(PLENTY), shelf=long_shelf) <= 16


def test_a_quota_limits_draining_not_what_is_learnt(long_shelf: Shelf) -> None:
    """Without a's events the others' labels differ too, once a's quota is empty: all filters pay or none."""
    menu = asks(PUBLISHER, (A, B), (A,)) + asks(OTHER_PUBLISHER, (A, B), (A,))
    both, others = (converted(1, A), converted(1, B)), (converted(1, B),)
    quota = 4
    assert quota < worst_of(menu, [(both, others)], **colluders(quota), shelf=long_shelf) <= 16


@pytest.mark.parametrize("kind", list(Kind))
def test_both_quotas_of_one_site_and_side_queries_leave_a_quarter_of_the_global_budget(kind: Kind) -> None:
    """At the default limits, however many queriers collude: they ask with κ and without, about one site and nothing."""
    with fresh_store(kind) as store:
        ann = Ann(store).see(0.1, site=A)
        for number in range(3):
            ann.at(0.1).device.save_conversion(
                A, ConversionEventOptions([f"q{n}.example" for n in range(number, 25, 3)])
            )
        asked = [AttributionRequest([0], epsilon, 1, 1, 1) for epsilon in (0.5, 0.03)]
        flagged = [
            replace(each, side_query=SideQuery(1), match_values=values) for each in asked for values in ((), [9])
        ]
        label = LabelOptions(TREFOIL_SERVICE, [1], 1, 0.25, shown_ago=7 * DAY, advertisers=[A])
        ann.at(1.2)
        for number in range(25):
            for options in [*flagged, *asked] * 3:
                ann.device.measure(f"q{number}.example", options)
            for labels in (label, replace(label, side_query=SideQuery(1))):
                ann.device.measure_impression(f"q{number}.example", labels)
        spent = ann.spent(FilterKind.GLOBAL)[0]
        assert DeviceLimits().global_budget // 2 < spent <= DeviceLimits().global_budget * 3 // 4
        assert ann.see(1.3, 1, "news.example").ask(1, 0, site="honest.example", match_values=[0]) == (0, 1)


def test_a_conversion_that_makes_its_own_site_ask_is_a_residual(long_shelf: Shelf) -> None:
    """The bound takes other sites' questions as given. A sale that makes the advertiser measure spends the global
    budget of other epochs too, where a publisher can see it: then removing one epoch shows in two."""
    own = converted(0, A)
    watched = (FilterKind.SITE, FilterKind.GLOBAL)
    menu = [label((3, 0), (0, 0), 7), label((3, 0), (1, 0), 7)]
    sale = Ask(AttributionRequest((1,), epsilon=1.0, buckets=1, value=6, query_sensitivity=8), site=A)
    stays: Events = (converted(1, B), shown(1, "news.example"))
    worlds = [
        DisplayWorld((*more, *stays), watched=watched, global_budget=6, shelf=long_shelf) for more in ((own,), ())
    ]
    # Only where the sale happened does its site ask.
    _, worlds[0].fresh = worlds[0].step((), sale)
    assert BUDGET < worst_loss(worlds[0], worlds[1], menu) <= 2 * BUDGET


__all__ = ["shelf"]

Plain = Device[tuple[int, ...]]
Pairs = Sequence[tuple[Events, Events]]

# Both epochs have conversions; without the private part of the first, or of the second.
FULL = tuple(POSSIBLE[:4])
POSSIBLE_BUT_OWN = tuple(POSSIBLE[:5])
PAIRS: Pairs = [(FULL, FULL[2:]), (FULL, FULL[:2])]
OWN = (converted(0, PUBLISHER, by=(OTHER_PUBLISHER,)), converted(0, A, day=5))
OWN_PAIRS: Pairs = [(OWN, OWN[:1])]


class FirstPays(Plain):
    """Only the first converting epoch that can pay does, and the others count for nothing."""

    def _charge(self, conversion: CheckedRequest, found: Match, award: Award) -> Payment:
        paid: dict[int, int] = {}
        for epoch, charges in self._owed(conversion, found, None).items():
            paid |= {epoch: 0} if paid else self._pay(conversion, {epoch: charges})
        return Payment(paid, None)


class ImpressionsEpochPays(Plain):
    """The epoch of the impression pays, whichever epoch the conversion is in."""

    def _charge(self, conversion: CheckedRequest, found: Match, award: Award) -> Payment:
        charges = next(iter(self._owed(conversion, found, None).values()), {})
        paid = self._pay(conversion, {found.reach.window[0]: charges}) if found.sites else {}
        return Payment(dict.fromkeys(found.sites, 0) if paid else {}, None)


class UsesUnpaid(Plain):
    """An epoch that cannot pay is used all the same."""

    def _attribute(self, conversion: CheckedRequest, found: Match, settled: Payment, award: Award) -> tuple[int, ...]:
        return super()._attribute(conversion, found, replace(settled, paid=dict.fromkeys(found.sites, 0)), award)


class UnpaidVoids(Plain):
    """One epoch that cannot pay voids the report, and no epoch pays."""

    def _charge(self, conversion: CheckedRequest, found: Match, award: Award) -> Payment:
        before = {owner: ledger.copy() for owner, ledger in self._store.filters().items()}
        settled = super()._charge(conversion, found, award)
        if found.sites.keys() <= settled.paid.keys():
            return settled
        now = self._store.filters()
        self._store.keep({owner: before.get(owner, PrivacyFilter()) for owner in now})
        return Payment({}, None if settled.output is None else (0,) * conversion.buckets)


class ListOfTheSite:
    """The advertiser's latest list holds for all of its conversions."""

    def matching(self: ConversionStore, selection: EventSelection) -> Sequence[ConversionEvent]:
        latest = {saved.event.site: saved.publishers for saved in self.all()}
        listed = (replace(saved, publishers=latest[saved.event.site]) for saved in self.all())
        return [saved.event for saved in listed if selection.accepts(saved)]


class ShowsOwn:
    """The publisher's own conversions count like any other."""

    def matching(self: ConversionStore, selection: EventSelection) -> Sequence[ConversionEvent]:
        # Asking as a name that no event has hides none of them; all of them list everybody.
        anyone = replace(selection, publisher="nobody.example", advertisers=selection.advertisers | {PUBLISHER})
        listed = (replace(saved, publishers=frozenset({"nobody.example"})) for saved in self.all())
        return [saved.event for saved in listed if anyone.accepts(saved)]


class KeepsThree:
    """A store of three conversions over all epochs."""

    def save(self: ConversionStore, saved: SavedConversion) -> None:
        super().save(saved)  # type: ignore[safe-super]  # of the store that this rule is put over
        self.drop_before(self.all()[-3:][0].event.time)


def over(rule: type[Any]) -> Kept:
    """The conversions of either store, with this wrong rule over the right ones."""
    return lambda right: type(rule.__name__, (rule, right), {})


class AdvertisersPay(Plain):
    """Each advertiser's own budget pays, not the publisher's."""

    def _owed(self, conversion: CheckedRequest, found: Match, output: int | None) -> dict[int, Charges]:
        own = FilterOwner(FilterKind.SITE, conversion.site)
        return {
            epoch: {own: 0} | {FilterOwner(FilterKind.SITE, site): charges[own] for site in found.sites[epoch]}
            for epoch, charges in super()._owed(conversion, found, output).items()
        }


class BudgetForEachRole(Plain):
    """A site has one budget as a publisher and another as an advertiser."""

    def _owed(self, conversion: CheckedRequest, found: Match, output: int | None) -> dict[int, Charges]:
        own = FilterOwner(FilterKind.SITE, conversion.site)
        role = FilterOwner(FilterKind.SITE, f"{conversion.side.name.lower()}.{conversion.site}")
        owed = super()._owed(conversion, found, output)
        return {epoch: {own: 0, role: charges[own]} for epoch, charges in owed.items()}


class RepeatsAreFree(Plain):
    """Who has asked about an impression before is answered again for nothing."""

    def _pay(self, conversion: CheckedRequest, owed: Mapping[int, Charges]) -> Mapping[int, int]:
        asked = FilterOwner(FilterKind.SITE, f"asked {conversion.function}")
        known = self._store.filters_of([asked])
        if known[asked].spent(0):
            return dict.fromkeys(owed, 0)
        known[asked].consume(0, 1)
        self._store.keep(known)
        return super()._pay(conversion, owed)


class SaysNotAllowed(Plain):
    """Says so when an advertiser does not allow the publisher."""

    def _attribute(self, conversion: CheckedRequest, found: Match, settled: Payment, award: Award) -> tuple[int, ...]:
        assert isinstance(conversion, Labelling)
        asked = conversion.selection(found.reach.calendar, found.reach.usable, self._clock())
        for saved in self._store.conversions.all():
            allowed = replace(saved, publishers=frozenset({conversion.site}))
            if asked.accepts(allowed) and not asked.accepts(saved):
                return (10**6,) * conversion.buckets
        return super()._attribute(conversion, found, settled, award)


class FlagIsFreeWithoutData(Plain):
    """κ is owed only where there is data."""

    def _charge(self, conversion: CheckedRequest, found: Match, award: Award) -> Payment:
        settled = super()._charge(conversion, found, award)
        return replace(settled, paid={**dict.fromkeys(found.reach.usable, 0), **settled.paid})

    def _owed(self, conversion: CheckedRequest, found: Match, output: int | None) -> dict[int, Charges]:
        owed = super()._owed(conversion, found, output)
        return {epoch: charges for epoch, charges in owed.items() if epoch in found.sites}


class TakesItsWord(Plain):
    """Lets options of any class say what they cost."""

    def measure_impression(self, site: str, options: LabelOptions, **_: Any) -> tuple[int, ...]:
        with self._call(site, None, None) as call:
            return self._report(call, options)


@dataclass(frozen=True, slots=True)
class CountsAsOne(LabelOptions):
    """Reports X once for each conversion, up to two, and is charged as if it were for one."""

    def checked(self, site: str, caller: str, limits: DeviceLimits) -> Labelling:
        right = LabelOptions.checked(self, site, caller, limits)
        features = self.features

        def counted(relevant: Mapping[int, Sequence[Any]], award: Award, /) -> Sequence[int]:
            count = min(2, sum(len(events) for events in relevant.values()))
            return [count * number for number in features]

        return replace(right, function=counted, value=2 * right.value)


def counts(**changes: Any) -> Ask:
    asked = label((1, 1), **changes).options
    assert isinstance(asked, LabelOptions)
    return Ask(CountsAsOne(**{name: getattr(asked, name) for name in LabelOptions.__slots__}))


def half(terms: LossTerms, **case: Any) -> EpochLoss:
    loss = epoch_loss(terms, **case)
    return EpochLoss(loss.site // 2, loss.everyone // 2)


def round_down(self: LossTerms, individual_sensitivity: int) -> int:
    """In whole grains, as a budget in larger steps would be."""
    grain = MICROS // 8
    return self.epsilon_micros * individual_sensitivity // self.query_sensitivity // grain * grain


SIDE = [
    label((1, 0), side_query=SideQuery(1, SideQueryForm.GENERAL)),
    label((1, 1), (1, 0), 7, side_query=SideQuery(1, SideQueryForm.GENERAL)),
    MENU[1],
]
LISTS = (converted(0, A), converted(1, B), converted(1, A, day=5, by=(OTHER_PUBLISHER,)))
ROLES = (converted(1, A), shown(1, A, day=4))
ONLY = (converted(1, A), converted(1, B))
TWICE = (converted(0, A), converted(0, A, day=5))
FORBIDDEN = (converted(1, A, day=5, by=(OTHER_PUBLISHER,)),)


@pytest.mark.parametrize(
    ("broken", "menu", "pairs", "least"),
    [
        pytest.param({"make": FirstPays}, MENU, PAIRS, 14, id="the first converting epoch pays"),
        pytest.param({"make": ImpressionsEpochPays}, MENU, PAIRS, 12, id="the impression's epoch pays"),
        pytest.param({"make": UsesUnpaid}, MENU, PAIRS, UNBOUNDED, id="an unpaid epoch is used"),
        pytest.param({"make": UnpaidVoids}, MENU, PAIRS, 12, id="an unpaid epoch voids the report"),
        pytest.param({"kept": over(ListOfTheSite)}, MENU, [(LISTS, LISTS[:1])], 12, id="one list for an advertiser"),
        pytest.param({"kept": over(ShowsOwn)}, MENU[:4], OWN_PAIRS, 12, id="own conversions count"),
        pytest.param(
            {"make": AdvertisersPay},
            [MENU[2], label((0, 2), (1, 0), 7, advertisers=(B,))],
            [(ONLY, ())],
            12,
            id="advertisers' budgets pay",
        ),
        pytest.param({"make": BudgetForEachRole}, [MENU[2], Ask(REQUEST)], [(ROLES, ())], 12, id="a budget per role"),
        pytest.param({"make": RepeatsAreFree}, MENU[:3], PAIRS, UNBOUNDED, id="repeats are free"),
        pytest.param(
            {"kept": over(KeepsThree)}, MENU, [(POSSIBLE_BUT_OWN, FULL[:2])], 12, id="a store capped across epochs"
        ),
        pytest.param({"make": SaysNotAllowed}, MENU, [(FORBIDDEN, ())], UNBOUNDED, id="'not allowed' is said"),
        pytest.param({"make": TakesItsWord}, [counts()], [(TWICE, ())], 12, id="counts charged as one"),
    ],
)
def test_a_wrong_rule_leaks_more_than_the_budget(
    broken: dict[str, Callable[..., Any]], menu: Sequence[Ask], pairs: Pairs, least: int, shelf: Shelf
) -> None:
    """Each exceeds the bound of the right rule, which holds on the same menu and pairs."""
    right = [asked for asked in menu if not isinstance(asked.options, CountsAsOne)]
    if right:
        assert worst_of(right, pairs, shelf=shelf) <= BUDGET
    assert worst_of(menu, pairs, shelf=shelf, **broken) >= least > BUDGET


def test_half_of_the_norm_leaks_twice_the_budget(monkeypatch: pytest.MonkeyPatch, shelf: Shelf) -> None:
    monkeypatch.setattr("device.device.epoch_loss", half)
    assert worst_of(MENU, PAIRS, shelf=shelf) == 2 * BUDGET


def test_charges_rounded_down_leak_without_bound(monkeypatch: pytest.MonkeyPatch, shelf: Shelf) -> None:
    menu = [label((1, 0), days=7, rate=HALF)]
    assert worst_of(menu, PAIRS, shelf=shelf) <= BUDGET
    monkeypatch.setattr(LossTerms, "loss", round_down)
    assert worst_of(menu, PAIRS, shelf=shelf) == UNBOUNDED


def test_a_flag_that_is_free_without_data_leaks_without_bound(shelf: Shelf) -> None:
    pairs = list(neighbours(POSSIBLE[:4], PUBLISHER))
    assert worst_of(SIDE, pairs, shelf=shelf) <= 2 * BUDGET
    assert worst_of(SIDE, pairs, make=FlagIsFreeWithoutData, shelf=shelf) == UNBOUNDED


def test_twice_the_norm_is_safe_and_not_tight(monkeypatch: pytest.MonkeyPatch, shelf: Shelf) -> None:
    """Theorem 18's factor for conversions is not needed here: it would halve what a budget is good for."""
    assert worst_of(MENU, PAIRS, shelf=shelf) == BUDGET

    def double(terms: LossTerms, **case: Any) -> EpochLoss:
        loss = epoch_loss(terms, **case)
        return EpochLoss(2 * loss.site, 2 * loss.everyone)

    monkeypatch.setattr("device.device.epoch_loss", double)
    assert worst_of(MENU, PAIRS, shelf=shelf) <= Fraction(BUDGET, 2)


Account = tuple[FilterKind, str, int]


@pytest.fixture(params=list(Kind), ids=lambda kind: kind.value)
def kind(request: pytest.FixtureRequest) -> Kind:
    chosen: Kind = request.param
    return chosen


@dataclass
class Model:
    """A device of the display side in one page. Amounts are in micros of ε."""

    events: list[Event]
    limits: DeviceLimits
    paid: dict[Account, int] = field(default_factory=dict)

    def answer(self, asked: Ask) -> tuple[int, ...]:
        options = asked.options
        assert isinstance(options, LabelOptions)
        shown = NOW - options.shown_ago
        end = shown + options.window_days * 86_400
        kappa = options.side_query.kappa if options.side_query else 0
        unpaid, label = 0, 0
        for epoch in range((shown - START) // WEEK, (end - 1 - START) // WEEK + 1):
            sites = {event.site for event in self.events if self._relevant(event, asked, epoch, shown, end)}
            moved = sum(options.features) if sites else 0
            if self._pay(asked.site, epoch, sites, options.epsilon, moved, kappa):
                label |= bool(sites)
            else:
                unpaid += 1
        report = tuple(label * number for number in options.features)
        if options.side_query is None:
            return report
        flagged = unpaid and (options.side_query.form is SideQueryForm.GENERAL or not label)
        return (*report, kappa if flagged else 0)

    def _relevant(self, event: Event, asked: Ask, epoch: int, shown: int, end: int) -> bool:
        assert isinstance(asked.options, LabelOptions)
        return (
            event.epoch == epoch
            and shown <= moment(event.epoch, event.day) < end
            and event.site in asked.options.advertisers
            and asked.site in event.publishers
            and asked.site not in (event.site, event.caller)
        )

    def _pay(self, site: str, epoch: int, sites: set[str], epsilon: float, moved: int, kappa: int) -> bool:
        def micros(units: int) -> int:
            return ceil(round(epsilon * 10**6) * units / CAP)

        owed: dict[Account, tuple[int, int]] = {
            (FilterKind.SITE, site, epoch): (micros(moved + kappa), self.limits.site_budget),
            (FilterKind.GLOBAL, "", epoch): (micros(moved + kappa), self.limits.global_budget),
        }
        if not sites:
            owed[FilterKind.SIDE_QUERY, "", epoch] = (micros(kappa), self.limits.side_query_quota)
        for advertiser in sites:
            owed[FilterKind.ADVERTISER, advertiser, epoch] = (micros(moved + kappa), self.limits.advertiser_quota)
        if any(self.paid.get(account, 0) + amount > most for account, (amount, most) in owed.items()):
            return False
        for account, (amount, _) in owed.items():
            if amount:
                self.paid[account] = self.paid.get(account, 0) + amount
        return True


publishers = st.sampled_from([(PUBLISHER,), (OTHER_PUBLISHER,), (PUBLISHER, OTHER_PUBLISHER)])
happened = st.builds(
    lambda epoch, day, site, caller, by: converted(epoch, site, day, caller, by),
    st.integers(0, 1),
    st.integers(0, 6),
    st.sampled_from([A, B]),
    st.sampled_from(["", PUBLISHER, "adtech.example"]),
    publishers,
)
side_queries = st.none() | st.builds(
    SideQuery, st.integers(1, 2), st.sampled_from([SideQueryForm.GENERAL, SideQueryForm.ANY])
)


@st.composite
def questions(draw: st.DrawFn) -> Ask:
    epoch, day = draw(st.integers(0, 1)), draw(st.integers(0, 6))
    features = draw(st.lists(st.integers(0, 3), min_size=2, max_size=2).filter(any))
    return label(
        features,
        (epoch, day),
        draw(st.integers(1, 14 - 7 * epoch - day)),
        advertisers=draw(st.sampled_from([(A,), (B,), (A, B)])),
        site=draw(st.sampled_from([PUBLISHER, OTHER_PUBLISHER])),
        side_query=draw(side_queries),
    )


def ledger(store: Store) -> Iterator[tuple[Account, int]]:
    with store.transaction():
        for owner, entries in store.filters().items():
            yield from (((owner.kind, owner.site, epoch), amount) for epoch, amount in entries.entries())


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    events=st.lists(happened, max_size=6, unique=True),
    asked=st.lists(questions(), min_size=1, max_size=8),
    grains=st.fixed_dictionaries({"global_budget": st.integers(3, 12), "advertiser_quota": st.integers(2, 12)}),
)
def test_the_engine_says_and_charges_what_the_rule_does(
    kind: Kind, events: list[Event], asked: list[Ask], grains: dict[str, Any]
) -> None:
    with fresh_store(kind) as store:
        clock = Clock()
        device: Device[tuple[int, ...]] = Device(
            store, PlainSeal(), clock=clock, limits=limits(**grains), coins=fixed_coins()
        )
        populate(device, store, clock, events)
        model = Model(events, limits(**grains))
        for question in asked:
            assert question.on(device) == model.answer(question)
            assert dict(ledger(store)) == model.paid


def test_the_model_counts_in_grains() -> None:
    """So that it cannot agree by both being zero: one conversion, features of 3, three grains."""
    model = Model([converted(0)], limits())
    assert model.answer(label((2, 1))) == (2, 1)
    assert model.paid == {
        (FilterKind.SITE, PUBLISHER, 0): 3 * GRAIN,
        (FilterKind.GLOBAL, "", 0): 3 * GRAIN,
        (FilterKind.ADVERTISER, A, 0): 3 * GRAIN,
    }

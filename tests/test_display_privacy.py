"""The display side on small worlds: whatever a publisher asks, in whatever order, it learns at most its budget.

The engine is the real one; the game is exact (`display_worlds.worst`). Where a stronger adversary has a weaker bound,
the game shows both that the bound holds and that the stronger one does not: those are the bounds of device/README.md.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction

import pytest

from device.conversion import AttributionRequest, ConversionOptions
from device.limits import TREFOIL_SERVICE, DeviceLimits
from device.privacy_filter import FilterKind
from device.side_query import SideQuery, SideQueryForm
from tests.support.both_stores import Kind
from tests.support.display_worlds import (
    BUDGET,
    GRAIN,
    OTHER_PUBLISHER,
    PLENTY,
    PUBLISHER,
    A,
    Ask,
    B,
    DisplayWorld,
    Events,
    InMemory,
    OnDisk,
    Shelf,
    converted,
    label,
    neighbours,
    on_disk,
    public_to,
    shown,
    worst_of,
)
from tests.support.small_worlds import Spending, l1, subsets, worst_loss

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
    """A game that takes longer: on disk in `make fuzz`."""
    with shelf_of(request.param) as made:
        yield made


def chosen(pairs: Iterator[tuple[Events, Events]], shelf: Shelf | None = None) -> Iterator[tuple[Events, Events]]:
    """A fifth of them, on disk a twentieth, and all of them in `make fuzz`."""
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


def test_both_quotas_of_one_site_leave_a_quarter_of_the_global_budget() -> None:
    """At the default limits, however many queriers collude."""
    defaults = DeviceLimits()
    assert defaults.impression_site_quota + defaults.advertiser_quota <= defaults.global_budget * 3 // 4


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

"""Impressions on the querier's own site: 2ε where they count as others do, ε where only what others add is charged.

By the exact game over every adaptive sequence of queries (see small_worlds). The two databases agree on what is public
to the querier: the impressions on its own pages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

import pytest

from device.conversion import ConversionOptions
from device.limits import TREFOIL_SERVICE, DeviceLimits, OwnSite
from device.privacy_filter import FilterKind
from device.storage import Store
from protocol.epsilon import MICROS
from protocol.errors import TrefoilError
from tests.support.both_stores import Ann, Kind, fresh_store
from tests.support.small_worlds import QUERIER, Event, SmallWorld, query, w3c, worst_loss

BUDGET = MICROS
OWN = [Event(0, 1, day=3, site=QUERIER), Event(1, 1, day=1, site=QUERIER)]
OTHERS = [Event(0, 0), Event(1, 0, day=5), Event(1, 2, day=0)]
MENU = [
    query(w3c(3, lookback_days=13, epsilon=0.5, value=2, max_value=2)),
    query(w3c(3, lookback_days=6, epsilon=0.5, value=2, max_value=2)),
    query(w3c(3, lookback_days=13, epsilon=1.0, value=1, max_value=2, credit=[1.0, 1.0])),
]


def worst(rule: OwnSite, private: Sequence[Event]) -> Fraction:
    """What the best querier learns about the private events of one epoch, whatever the other one holds."""
    limits = DeviceLimits(site_budget=BUDGET, global_budget=8 * BUDGET, impression_site_quota=8 * BUDGET, own_site=rule)
    losses = []
    for epoch in (0, 1):
        with_them = SmallWorld((*OWN, *private), limits)
        without = SmallWorld((*OWN, *(event for event in private if event.epoch != epoch)), limits)
        losses += [worst_loss(with_them, without, MENU), worst_loss(without, with_them, MENU)]
    return max(losses)


@pytest.mark.parametrize("private", [OTHERS[:1], OTHERS[1:2], OTHERS[:2], OTHERS])
def test_where_own_impressions_are_free_a_querier_learns_at_most_its_budget(private: Sequence[Event]) -> None:
    assert worst(OwnSite.CHARGED, private) <= BUDGET


def test_where_they_count_as_others_do_it_learns_up_to_twice_that() -> None:
    """Theorem 1, case 2: what the two databases have paid differs."""
    seen = max(worst(OwnSite.COUNTED, private) for private in (OTHERS[:1], OTHERS[1:2], OTHERS[:2], OTHERS))
    assert BUDGET < seen <= 2 * BUDGET


@pytest.fixture(params=list(Kind), ids=lambda kind: kind.value)
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    with fresh_store(request.param) as fresh:
        yield fresh


def test_own_impressions_cost_nothing_and_never_run_out(store: Store) -> None:
    ann = Ann(store, own_site=OwnSite.CHARGED).see(0.5, 1, QUERIER)
    for _ in range(3):
        assert ann.at(0.6).convert() == (0, 1)
        assert ann.convert(lookback_days=1) == (0, 1)
    assert ann.spent() == ann.spent(FilterKind.GLOBAL) == ann.spent(FilterKind.IMPRESSION_SITE) == {}


def test_one_week_pays_for_what_others_change_in_its_report(store: Store) -> None:
    """From (0, 1) to (1, 0) is a change of two, where the report alone is one."""
    ann = Ann(store, own_site=OwnSite.CHARGED).see(0.5, 1, QUERIER).see(0.55, 0)
    assert ann.at(0.6).convert(lookback_days=1, epsilon=0.4) == (1, 0)
    assert ann.spent() == {0: 400_000}
    # The same bucket, and nothing is changed by it.
    ann.see(0.61, 1)
    assert ann.at(0.62).convert(lookback_days=1, epsilon=0.4) == (0, 1)
    assert ann.spent() == {0: 400_000}


@pytest.mark.parametrize("lookback_days", [1, 30])
def test_a_week_that_cannot_pay_gives_what_is_free(store: Store, lookback_days: int) -> None:
    ann = Ann(store, own_site=OwnSite.CHARGED).see(0.5, 1, QUERIER).see(0.55, 0)
    assert ann.at(0.6).convert(lookback_days=lookback_days) == (1, 0)
    assert ann.convert(lookback_days=lookback_days) == (0, 1)
    assert ann.spent(FilterKind.IMPRESSION_SITE, "news.example") == {0: 1_000_000}


def test_after_a_fault_a_week_pays_for_the_worst_that_others_could_change(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The value taken out of one bucket and put into another: twice the value, also where the report would be one."""
    pending = [OSError(28, "No space left on device")]
    original = store.log

    def log(*given: Any) -> None:
        if pending:
            raise pending.pop()
        original(*given)

    monkeypatch.setattr(store, "log", log)
    ann = Ann(store, own_site=OwnSite.CHARGED).see(0.5, 1, QUERIER)
    assert ann.at(0.6).convert(lookback_days=1, epsilon=0.4) == (0, 0)
    assert ann.spent() == {0: 400_000}


def test_own_impressions_that_are_not_asked_for_are_not_counted(store: Store) -> None:
    ann = Ann(store, own_site=OwnSite.CHARGED).see(0.5, 1, QUERIER, match_value=3)
    assert ann.at(0.6).convert(impression_sites=["news.example"]) == (0, 0)
    assert ann.convert(match_values=[4]) == (0, 0)
    assert ann.convert(match_values=[3]) == (0, 1)
    # An older one of another kind, in the same week.
    ann.see(0.4, 0, QUERIER, match_value=4)
    assert ann.at(0.6).convert(match_values=[4]) == ann.convert(match_values=[4], lookback_days=2) == (1, 0)
    ann.device.clear_browsing_history(forget_visits=True)
    assert ann.convert(match_values=[3]) == (0, 0)


def test_the_limit_is_one_of_two() -> None:
    with pytest.raises(TrefoilError, match="own_site"):
        DeviceLimits(own_site="charged")  # type: ignore[arg-type]  # the point of the test
    assert ConversionOptions(TREFOIL_SERVICE, 1).checked(QUERIER, QUERIER, DeviceLimits()).own_site_is_free is False

"""What both stores must do alike: each rule of `Store`, and each rule of the engine that rests on one.

Every test here runs in memory and on disk. What only a file can do (locks, crashes, copies) is in test_storage.py and
test_rollback.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from device.attribution import Need, Order
from device.epoch import EpochCalendar
from device.impression import Impression, ImpressionOptions, SavedImpression, Selection
from device.privacy_filter import FilterKind, FilterOwner
from device.side_query import SideQuery, SideQueryForm
from device.storage import EpochEntry, EpochOutcome, ReportRecord, SiteCount, Store
from protocol.seconds import DAY
from tests.support.both_stores import Ann, Kind, fresh_store
from tests.support.small_worlds import START

SHOP = FilterOwner(FilterKind.SITE, "shop.example")
EVERYONE = FilterOwner(FilterKind.GLOBAL, "")


@pytest.fixture(params=list(Kind), ids=lambda kind: kind.value)
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    with fresh_store(request.param) as fresh:
        yield fresh


def seen(time: int, site: str = "news.example", **changes: Any) -> SavedImpression:
    """An impression that anyone may use for a month."""
    named: dict[str, Any] = {"caller": site, "histogram_index": 0, "match_value": 0, "priority": 0} | changes
    lists = {name: frozenset(named.pop(name, ())) for name in ("conversion_sites", "conversion_callers")}
    return SavedImpression(Impression(time, site, **named), time + 30 * DAY, **lists)


def times(store: Store) -> list[int]:
    return [saved.impression.time for saved in store.impressions()]


def pay(store: Store, owner: FilterOwner, **amounts: int) -> None:
    """Charge epochs, named e0, e1 and so on."""
    filters = store.filters_of([owner])
    for epoch, amount in amounts.items():
        filters[owner].consume(int(epoch[1:]), amount)
    store.keep(filters)


def paid(store: Store) -> dict[FilterOwner, list[tuple[int, int]]]:
    return {owner: list(ledger.entries()) for owner, ledger in store.filters().items()}


# The store itself


def test_impressions_come_by_time_and_in_the_order_of_saving_within_a_second(store: Store) -> None:
    """Also when the clock was set back between two of them."""
    with store.transaction():
        for time, bucket in ((50, 0), (30, 1), (50, 2), (40, 3), (50, 4)):
            store.save(seen(time, histogram_index=bucket))
        selection = Selection(since=0, until=100, now=0, conversion_site="a.example", conversion_caller="a.example")
        assert [one.histogram_index for one in store.matching(selection)] == [1, 3, 0, 2, 4]
        assert [saved.impression.histogram_index for saved in store.impressions()] == [1, 3, 0, 2, 4]


def test_a_failed_transaction_leaves_nothing(store: Store) -> None:
    with pytest.raises(KeyError), store.transaction():
        store.save(seen(10))
        pay(store, SHOP, e0=5)
        raise KeyError
    with store.transaction():
        assert (times(store), paid(store)) == ([], {})


def test_the_first_second_of_a_range_is_in_it_and_the_last_is_not(store: Store) -> None:
    with store.transaction():
        for time in (9, 10, 10, 19, 20):
            store.save(seen(time))
        assert store.census(10, 20) == [SiteCount("news.example", 3, 10, 19)]
        store.evict_oldest_between(10, 20, 2)
        assert times(store) == [9, 19, 20]
        store.drop_impressions_before(19)
        assert times(store) == [19, 20]


def test_dropping_looks_at_every_impression_not_at_the_first_saved(store: Store) -> None:
    """A clock set back saves an older impression after a newer one."""
    with store.transaction():
        store.save(seen(100))
        store.save(seen(10))
        store.drop_impressions_before(50)
        assert times(store) == [100]


def test_eviction_takes_the_oldest_of_one_second_in_the_order_of_saving(store: Store) -> None:
    with store.transaction():
        for bucket in range(4):
            store.save(seen(10, histogram_index=bucket))
        store.evict_oldest_between(0, 20, 3)
        assert [saved.impression.histogram_index for saved in store.impressions()] == [3]


def test_eviction_of_one_site_spares_older_impressions_of_others(store: Store) -> None:
    with store.transaction():
        for time, site in ((10, "a.example"), (11, "b.example"), (12, "a.example"), (13, "b.example")):
            store.save(seen(time, site))
        store.evict_oldest_between(0, 20, 1, "b.example")
        assert times(store) == [10, 12, 13]
        store.evict_oldest_between(0, 20, 5, "b.example")
        assert times(store) == [10, 12]


def test_clearing_a_caller_strikes_it_from_lists_and_deletes_whose_list_that_empties(store: Store) -> None:
    gone, other = "gone.example", "other.example"
    with store.transaction():
        store.save(seen(1, caller=gone))
        store.save(seen(2, site=gone, caller=other))
        store.save(seen(3, conversion_sites=[gone]))
        store.save(seen(4, conversion_callers=[gone]))
        store.save(seen(5, conversion_sites=[gone, other], conversion_callers=[other, gone]))
        store.save(seen(6, conversion_sites=["notgone.example"]))
        store.clear_caller(gone)
        assert times(store) == [2, 5, 6]
        stripped = store.impressions()[1]
        assert stripped.conversion_sites == stripped.conversion_callers == frozenset({other})


def test_forgetting_sites_takes_their_impressions_filters_and_the_whole_log(store: Store) -> None:
    with store.transaction():
        for site in ("a.example", "b.example"):
            store.save(seen(1, site=site, caller="c.example"))
            pay(store, FilterOwner(FilterKind.SITE, site), e0=1)
            pay(store, FilterOwner(FilterKind.IMPRESSION_SITE, site), e0=1)
            store.log(ReportRecord(1, 1, 1, site, site))
        pay(store, EVERYONE, e0=2)
        store.forget(["a.example"])
        assert [saved.impression.site for saved in store.impressions()] == ["b.example"]
        assert {owner.site for owner in store.filters()} == {"b.example", ""}
        assert list(store.reports()) == []


def test_forgetting_everything_leaves_nothing_but_barrier_and_start(store: Store) -> None:
    with store.transaction():
        store.save(seen(1))
        pay(store, SHOP, e0=1)
        pay(store, EVERYONE, e0=1)
        store.log(ReportRecord(1, 1, 1, "a.example", "a.example"))
        store.raise_barrier(5)
        store.forget([])
        assert (list(store.impressions()), paid(store), list(store.reports())) == ([], {}, [])
        assert (store.barrier, store.epoch_start) == (5, START)


def test_the_barrier_and_the_start_never_move_back(store: Store) -> None:
    with store.transaction():
        for moment, expected in ((100, 100), (50, 100), (101, 101)):
            store.raise_barrier(moment)
            assert store.barrier == expected
        store.fix_epoch_start(START + 8)
        assert store.epoch_start == START


def test_filters_of_strangers_are_new_and_kept_only_on_request(store: Store) -> None:
    with store.transaction():
        found = store.filters_of([SHOP, EVERYONE])
        assert {owner: ledger.spent(0) for owner, ledger in found.items()} == {SHOP: 0, EVERYONE: 0}
        found[SHOP].consume(-3, 7)
        store.keep(found)
    with store.transaction():
        assert paid(store)[SHOP] == [(-3, 7)]
        assert store.filters_of([SHOP])[SHOP].spent(-3) == 7


def test_pruning_keeps_the_first_epoch_and_the_first_second_it_names(store: Store) -> None:
    """One below on either side is gone, also from the log and the record of actions; what is named stays."""
    with store.transaction():
        pay(store, SHOP, e3=1, e4=2, e5=3)
        pay(store, EVERYONE, e3=1)
        for time in (99, 100, 101):
            store.save(seen(time))
            store.log(ReportRecord(time, 1, 1, "a.example", "a.example"))
            assert store.admit_to_action(f"at {time}", "a.example", 1, time)
        store.prune(4, 100)
        assert {owner: entries for owner, entries in paid(store).items() if entries} == {SHOP: [(4, 2), (5, 3)]}
        assert times(store) == [100, 101]
        assert [record.time for record in store.reports()] == [100, 101]
        assert store.admit_to_action("at 99", "b.example", 1, 102)
        assert not store.admit_to_action("at 100", "b.example", 1, 102)


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_exactly_so_many_sites_are_admitted_to_an_action(store: Store, limit: int) -> None:
    sites = [f"{letter}.example" for letter in "abcde"]
    with store.transaction():
        assert [store.admit_to_action("click", site, limit, 1) for site in sites] == [True] * limit + [False] * (
            5 - limit
        )
        # Who was admitted stays so, and the next action begins again.
        assert [store.admit_to_action("click", site, limit, 2) for site in sites[:limit]] == [True] * limit
        assert store.admit_to_action("next click", sites[4], limit, 2)


def test_the_log_keeps_every_record_whole_and_in_order(store: Store) -> None:
    records = [
        ReportRecord(time, time + 1, 2, "a.example", "b.example", (EpochEntry(-1, EpochOutcome.CLOSED, time),))
        for time in (30, 10, 20)
    ]
    with store.transaction():
        for record in records:
            store.log(record)
    with store.transaction():
        assert list(store.reports()) == records


def test_switching_is_remembered(store: Store) -> None:
    with store.transaction():
        assert store.enabled
        store.set_enabled(False)
    with store.transaction():
        assert not store.enabled


SITES = ("a.example", "b.example", "ab.example")
some_sites = st.sets(st.sampled_from(SITES), max_size=2)
saved_impressions = st.builds(
    SavedImpression,
    st.builds(
        Impression,
        time=st.integers(0, 6),
        site=st.sampled_from(SITES),
        caller=st.sampled_from(SITES),
        histogram_index=st.integers(0, 2),
        match_value=st.integers(0, 2),
        priority=st.integers(-1, 1),
    ),
    expires=st.integers(0, 8),
    conversion_sites=some_sites.map(frozenset),
    conversion_callers=some_sites.map(frozenset),
)
selections = st.builds(
    Selection,
    since=st.integers(0, 4),
    until=st.integers(3, 7),
    now=st.integers(0, 8),
    conversion_site=st.sampled_from(SITES),
    conversion_caller=st.sampled_from(SITES),
    match_values=st.frozensets(st.integers(0, 2), max_size=2),
    impression_sites=some_sites.map(frozenset),
    impression_callers=some_sites.map(frozenset),
    hidden_site=st.sampled_from(("", *SITES)),
)
owners = st.builds(FilterOwner, st.sampled_from(FilterKind), st.sampled_from(SITES))
changes = st.one_of(
    st.tuples(st.just("save"), saved_impressions),
    st.tuples(st.just("clear_caller"), st.sampled_from(SITES)),
    st.tuples(st.just("forget"), some_sites.map(sorted)),
    st.tuples(st.just("prune"), st.integers(0, 3), st.integers(0, 6)),
    st.tuples(st.just("evict_oldest_between"), st.integers(0, 3), st.integers(3, 7), st.integers(0, 3)),
    st.tuples(st.just("drop_impressions_before"), st.integers(0, 5)),
    st.tuples(st.just("pay"), owners, st.integers(0, 4), st.integers(0, 9)),
    st.tuples(st.just("admit_to_action"), st.sampled_from("xy"), st.sampled_from(SITES), st.just(2), st.integers(0, 6)),
    st.tuples(st.just("raise_barrier"), st.integers(0, 9)),
    st.tuples(st.just("set_enabled"), st.booleans()),
    st.tuples(
        st.just("log"),
        st.builds(ReportRecord, st.integers(0, 6), st.just(1), st.just(1), *[st.sampled_from(SITES)] * 2),
    ),
)


def apply(store: Store, change: tuple[object, ...]) -> object:
    name, *arguments = change
    if name == "pay":
        owner, epoch, amount = arguments
        assert isinstance(owner, FilterOwner)
        pay(store, owner, **{f"e{epoch}": amount})  # type: ignore[arg-type]  # an int, drawn above
        return None
    return getattr(store, str(name))(*arguments)


def snapshot(store: Store, selection: Selection) -> tuple[object, ...]:
    """Everything that can be asked of a store."""
    entries = {owner: listed for owner, listed in paid(store).items() if listed}
    state = (store.enabled, store.epoch_start, store.barrier, sorted(store.census(1, 4)))
    calendar = EpochCalendar(2, 2)
    sites = {epoch: set(found) for epoch, found in store.matched_sites(selection, calendar).items()}
    needed = [store.matching(selection, Need(order, most)) for order in Order for most in (None, 0, 1, 3)]
    return (*state, list(store.impressions()), sites, needed, entries, list(store.reports()))


@settings(max_examples=150, deadline=None)
@given(st.lists(saved_impressions, max_size=6), st.lists(changes, max_size=12), selections)
def test_both_stores_are_the_same_after_any_changes(
    first: list[SavedImpression], then: list[tuple[object, ...]], selection: Selection
) -> None:
    """Each is the other's oracle: one is a few lists in Python, the other SQL."""
    with fresh_store(Kind.MEMORY) as memory, fresh_store(Kind.DISK) as disk:
        for change in [*(("save", saved) for saved in first), *then]:
            answers, states = [], []
            for store in (memory, disk):
                with store.transaction():
                    answers.append(apply(store, change))
                    states.append(snapshot(store, selection))
            assert answers[0] == answers[1]
            assert states[0] == states[1]


# The engine's rules that rest on the store


def test_filters_of_an_epoch_that_can_still_be_reached_are_never_pruned(store: Store) -> None:
    """What paid stays paid, in the very first epoch that the longest lookback touches, and is shown to have."""
    ann = Ann(store).see(0.9)
    assert ann.at(0.95).convert() == (1, 0)
    # 30 days before 4.9 weeks lies in epoch 0; three conversions prune whatever is out of reach.
    for epoch in (2.5, 4.5, 4.9):
        ann.at(epoch).convert("late.example", epsilon=0.1)
        assert ann.spent() == {0: 1_000_000}
        assert ann.at(epoch).convert(epsilon=0.1) == (0, 0)
    # Now epoch 0 is out of reach, and goes.
    ann.at(5.5).convert("late.example", epsilon=0.1)
    assert ann.spent() == {}


def test_eviction_stays_within_the_epoch_of_the_new_impression(store: Store) -> None:
    """The last hour of the week before is as close as another epoch comes, and nothing happens to it."""
    ann = Ann(store, max_impressions_per_epoch=3)
    for bucket in (0, 1):
        ann.see(0.999, bucket)
    for bucket in (2, 3, 4, 5):
        ann.see(1.0001 + bucket / 1000, bucket)
    ann.see(2.0001, 6)
    credit: dict[str, Any] = {"credit": [1.0] * 7, "value": 7, "max_value": 7}
    report = ann.at(2.001).convert(buckets=8, epsilon=0.1, **credit)
    assert [bucket for bucket, part in enumerate(report) if part] == [0, 1, 3, 4, 5, 6]


def test_a_publishers_quota_is_the_sites_not_its_intermediarys(store: Store) -> None:
    """One ad network on two publishers: each publisher's quota pays for its own impressions."""
    ann = Ann(store, impression_site_quota=1_000_000).see(0.1, 0, "news.example", caller="ads.example")
    ann.see(0.2, 1, "blog.example", caller="ads.example")
    two: dict[str, Any] = {"value": 2, "max_value": 2, "credit": [1.0, 1.0], "epsilon": 0.5}
    assert ann.at(0.5).convert(**two) == (1, 1)
    assert ann.spent(FilterKind.IMPRESSION_SITE, "ads.example") == {}
    for publisher in ("news.example", "blog.example"):
        assert ann.spent(FilterKind.IMPRESSION_SITE, publisher) == {0: 500_000}


@pytest.mark.parametrize("form", [SideQueryForm.GENERAL, SideQueryForm.LAST_TOUCH])
def test_a_device_that_is_switched_off_sends_no_flag(store: Store, form: SideQueryForm) -> None:
    """κ would say that it is off: all numbers are zero, there are as many as ever, and nothing is paid."""
    ann = Ann(store).see(0.1)
    ann.device.disable()
    assert ann.at(0.5).ask(0, side_query=SideQuery(7, form)) == (0, 0, 0)
    assert ann.ask(0, 1, side_query=SideQuery(7, form)) == (0, 0, 0)
    assert ann.device.budget() == []


def test_a_dropped_week_between_two_touches_changes_no_last_touch(store: Store) -> None:
    """Theorem 16: only a week after the latest touch that paid can have held a later one."""
    ann = Ann(store).see(0.1, 0).see(2.1, 1).at(2.5)
    ann.ask(1, buckets=1, query_sensitivity=1, side_query=SideQuery(1))
    asked: dict[str, Any] = {"epsilon": 0.01, "query_sensitivity": 10}
    assert ann.ask(0, 1, 2, side_query=SideQuery(5, SideQueryForm.LAST_TOUCH), **asked) == (0, 1, 0)
    assert ann.ask(0, 1, 2, side_query=SideQuery(5, SideQueryForm.GENERAL), **asked) == (0, 1, 5)


def test_forgetting_deletes_the_log(store: Store) -> None:
    ann = Ann(store).see(0.1)
    ann.at(0.5).convert()
    assert len(ann.device.reports()) == 1
    ann.device.clear_browsing_history(["other.example"], forget_visits=True)
    assert len(ann.device.reports()) == 0


def test_as_many_sites_as_the_limit_says_measure_on_one_action(store: Store) -> None:
    ann = Ann(store, sites_per_action=2).see(0.1, action="reading")
    asked = [ann.at(0.5).convert(f"{name}.example", epsilon=0.1, action="buying")[0] for name in "abcd"]
    assert asked == [1, 1, 0, 0]


def test_a_lookback_ends_inside_its_epoch(store: Store) -> None:
    """One day before now, to the second, though the epoch began days earlier."""
    ann = Ann(store)
    ann.see(0.0, 0)
    ann.now = START + 3 * DAY
    ann.device.save_impression("news.example", ImpressionOptions(1))
    ann.now += DAY
    asked: dict[str, Any] = {"value": 2, "max_value": 2, "credit": [1.0, 1.0], "epsilon": 0.1}
    assert ann.convert(lookback_days=1, **asked) == (0, 2)
    assert ann.convert(lookback_days=4, **asked) == (1, 1)
    ann.now += 1
    assert ann.convert(lookback_days=1, **asked) == (0, 0)
    assert ann.convert(lookback_days=4, **asked) == (0, 2)


def test_an_epoch_outside_the_lookback_pays_nothing(store: Store) -> None:
    """An impression one second too old is not looked at, so it costs nothing either."""
    ann = Ann(store).see(0.0, 0)
    ann.now = START + DAY + 1
    assert ann.convert(lookback_days=1, epsilon=0.5) == (0, 0)
    assert ann.device.budget() == []

"""Stores: each rule of `Store`, and each rule of the engine that rests on one, in memory and in SQLite.

The second part is about the file: durable, atomic, private to its owner; `test_rollback` is about older copies of it.
"""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.experiments.small_worlds import PUBLISHER, QUERIER, START
from device import agent
from device.attribution import Need, Order
from device.budget import FilterKind, FilterOwner
from device.conversion import ConversionOptions
from device.device import Device
from device.epoch import DeviceCoins, EpochCalendar
from device.errors import DatabaseError, DatabaseUnavailable
from device.events import (
    ConversionEvent,
    ConversionEventOptions,
    Impression,
    ImpressionOptions,
    SavedConversion,
    SavedImpression,
    Selection,
)
from device.labelling import LabelOptions
from device.limits import TREFOIL_SERVICE, DeviceLimits
from device.report import PlainSeal
from device.request import SideQuery, SideQueryForm
from device.schedule import AtOnce
from device.stores.instance import token_path
from device.stores.schema import APPLICATION_ID, VERSION
from device.stores.sqlite_store import SqliteStore
from device.stores.storage import EpochEntry, EpochOutcome, ReportRecord, SiteCount, Store
from protocol.errors import ErrorKind
from protocol.units import DAY
from tests.support.both_stores import Ann, Kind, fresh_store
from tests.support.raising import raises

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
        store.raise_barrier(10)
        store.log(ReportRecord(10, 1, 1, "a.example", "a.example"))
        raise KeyError
    with store.transaction():
        assert (times(store), paid(store), store.barrier, list(store.reports())) == ([], {}, None, [])


def test_the_first_second_of_a_range_is_in_it_and_the_last_is_not(store: Store) -> None:
    with store.transaction():
        for time in (9, 10, 10, 19, 20):
            store.save(seen(time))
        assert store.census(10, 20) == [SiteCount("news.example", 3, 10, 19)]
        store.evict_oldest_between(10, 20, 2)
        assert times(store) == [9, 19, 20]
        store.drop_impressions_before(19)
        assert times(store) == [19, 20]


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
    hidden=some_sites.map(frozenset),
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


def test_clearing_a_conversion_site_and_the_impressions_that_name_it(store: Store) -> None:
    """History: they stay, in weeks that are closed. Stored data: the name goes, and an impression for it alone."""
    ann = Ann(store).see(0.1, conversion_sites=[QUERIER]).see(0.2, conversion_sites=[QUERIER, "store.example"]).at(0.5)
    for forget_visits in (False, True):
        ann.device.clear_browsing_history([QUERIER], forget_visits=forget_visits)
        assert len(ann.device.overview().impressions) == 2
        assert ann.convert(lookback_days=1) == (0, 0)
    ann.device.clear_impressions_for_site(QUERIER)
    (left,) = ann.device.overview().impressions
    assert left.conversion_sites == {"store.example"}


@pytest.mark.parametrize("longer", ["the{}", "{}s"])
def test_a_list_that_names_a_longer_host_does_not_name_the_shorter(store: Store, longer: str) -> None:
    """Its sites are compared whole, wherever they stand."""
    other = longer.format(QUERIER)
    ann = Ann(store).see(0.1, conversion_sites=[other, "a.example", "z.example"])
    ann.see(0.1, conversion_callers=[other, "a.example", "z.example"])
    ann.device.save_conversion(PUBLISHER, ConversionEventOptions([other, "a.example", "z.example"]))
    ann.at(1.0)
    assert ann.convert(epsilon=0.1) == (0, 0)
    label = LabelOptions(TREFOIL_SERVICE, (1, 1), 2, 0.1, WEEK, [PUBLISHER])
    assert ann.device.measure_impression(QUERIER, label) == (0, 0)
    assert ann.device.measure_impression(other, label) == (1, 1)
    assert ann.convert(other, epsilon=0.1) == (1, 0)


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


# The file of a SqliteStore

WEEK = 7 * DAY
NOW = 1_900_000_800
LIMITS = DeviceLimits()
HALF = DeviceCoins(lambda: 0.5, lambda: 0.5)
PlainDevice = Device[tuple[int, ...]]


def make(path: Path) -> Path:
    SqliteStore.create(path, epoch_length=WEEK, debug=True)
    return path


def device_on(store: Store, clock: Callable[[], int] = lambda: NOW, limits: DeviceLimits = LIMITS) -> PlainDevice:
    return Device(store, PlainSeal(), clock=clock, limits=limits, coins=HALF)


@contextmanager
def opened(path: Path, clock: Callable[[], int] = lambda: NOW, wait: float = 2.0) -> Iterator[PlainDevice]:
    with closing(SqliteStore.open(path, epoch_length=WEEK, clock=clock, wait=wait)) as store:
        yield device_on(store, clock)


def ask(device: PlainDevice, epsilon: float = 0.1, site: str = "shop.example") -> int:
    return device.measure_conversion(site, ConversionOptions(TREFOIL_SERVICE, 1, epsilon=epsilon))[0]


def spent(device: PlainDevice, kind: FilterKind = FilterKind.SITE) -> int:
    return sum(state.spent for state in device.budget() if state.kind is kind)


@pytest.fixture
def database(tmp_path: Path) -> Path:
    """A device with one impression."""
    path = make(tmp_path / "ann.db")
    with opened(path) as device:
        device.save_impression("news.example", ImpressionOptions(0))
    return path


def test_what_was_done_is_there_after_reopening(database: Path) -> None:
    with opened(database) as device:
        assert ask(device, 0.6) == 1
        device.disable()
    with opened(database) as device:
        assert spent(device) == 600_000
        device.enable()
        assert ask(device, 0.5) == 0
        assert ask(device, 0.4) == 1
        assert len(device.reports()) == 3


def test_files_are_for_their_owner_alone(database: Path) -> None:
    database.chmod(0o644)
    with opened(database) as device:
        ask(device)
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in database.parent.iterdir()}
    assert set(modes) == {"ann.db", "ann.db-wal", "ann.db-shm", "ann.db.instance"}
    assert modes["ann.db"] == modes["ann.db-wal"] == modes["ann.db.instance"] == 0o600


def test_a_file_is_for_its_owner_alone_before_it_is_opened(tmp_path: Path) -> None:
    assert stat.S_IMODE(make(tmp_path / "ann.db").stat().st_mode) == 0o600


def test_creating_never_replaces(database: Path) -> None:
    before = database.read_bytes()
    with raises(ErrorKind.FILE_EXISTS):
        make(database)
    assert database.read_bytes() == before
    assert [path.name for path in database.parent.iterdir() if "new" in path.name] == []


def test_creating_where_one_cannot(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with raises(ErrorKind.FILE_UNWRITABLE):
        make(tmp_path / "file" / "ann.db")


def damaged_files(path: Path) -> Iterator[tuple[str, bytes]]:
    good = path.read_bytes()
    yield "empty", b""
    yield "text", b"dear diary" * 100
    yield "truncated", good[: len(good) // 2]
    yield "stump", good[:50]
    middle = bytearray(good)
    middle[4096 : 4096 + 2000] = b"\xff" * 2000
    yield "scribbled", bytes(middle)
    for name, version in (("older", VERSION - 1), ("newer", VERSION + 1)):
        other = bytearray(good)
        other[60:64] = version.to_bytes(4, "big")
        yield name, bytes(other)
    foreign = bytearray(good)
    foreign[68:72] = (APPLICATION_ID + 1).to_bytes(4, "big")
    yield "foreign", bytes(foreign)


def test_damaged_and_foreign_files_and_other_versions_are_left_as_they_are(database: Path, tmp_path: Path) -> None:
    for name, data in damaged_files(database):
        path = tmp_path / f"{name}.db"
        path.write_bytes(data)
        with pytest.raises(DatabaseError) as refused, opened(path):
            pass
        assert refused.value.hint, name
        assert path.read_bytes() == data, name
        assert not token_path(path).exists(), name


def test_a_missing_file_says_how_to_make_one(tmp_path: Path) -> None:
    with raises(ErrorKind.FILE_MISSING, DatabaseError) as refused, opened(tmp_path / "nowhere.db"):
        pass
    assert "create" in refused.value.hint


def test_epochs_of_another_length_are_refused(database: Path) -> None:
    """Under other epochs every filter would have another number, and start from zero."""
    with raises(ErrorKind.INCONSISTENT, DatabaseError):
        SqliteStore.open(database, epoch_length=DAY, clock=lambda: NOW)


def test_a_restored_copy_of_a_copy_is_noticed_too(database: Path, tmp_path: Path) -> None:
    """Each place has a token of its own, so a newer state of the one is no state of the other."""
    copy = tmp_path / "copy.db"
    shutil.copy(database, copy)
    later = NOW + WEEK
    with opened(copy) as device:
        ask(device)
    with opened(copy, lambda: later) as device:
        device.save_impression("news.example", ImpressionOptions(0))
        assert ask(device, 1.0) == 1
    with opened(database, lambda: later) as device:
        for _ in range(20):
            device.save_impression("news.example", ImpressionOptions(0))
    with copy.open("r+b") as file:
        file.write(database.read_bytes())
        file.truncate()
    with opened(copy, lambda: later) as device:
        assert ask(device) == 0


def test_a_new_database_may_be_opened_before_its_maker_has_finished(tmp_path: Path) -> None:
    """Its token is written a moment after the database has its name; nothing was spent yet that could be lost."""
    path = make(tmp_path / "ann.db")
    token_path(path).unlink()
    with opened(path) as device:
        device.save_impression("news.example", ImpressionOptions(0))
        assert ask(device) == 1


def test_a_store_is_used_inside_a_transaction_only(database: Path) -> None:
    store = SqliteStore.open(database, epoch_length=WEEK, clock=lambda: NOW)
    with closing(store), pytest.raises(RuntimeError, match="transaction"):
        store.raise_barrier(NOW)


def test_a_token_that_cannot_be_written_stops_the_next_call(database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The charge before it is durable, and what it pays for leaves; but a restored copy would not be noticed."""

    def fails(*_: object) -> int:
        raise OSError(errno.ENOSPC, "full")

    with opened(database) as device:
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", fails)
            assert [ask(device), ask(device)] == [1, 0]
            with raises(ErrorKind.UNAVAILABLE):
                device.budget()
        assert (ask(device), spent(device)) == (1, 200_000)


def test_a_locked_database_gives_a_null_report_not_an_error(database: Path) -> None:
    with opened(database, wait=0.05) as device:
        with closing(sqlite3.connect(database, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            assert ask(device) == 0
            device.save_impression("news.example", ImpressionOptions(0))
            with pytest.raises(DatabaseUnavailable):
                device.budget()
            other.execute("ROLLBACK")
        assert ask(device) == 1
        assert len(device.reports()) == 1


def test_transactions_of_two_connections_follow_one_another(database: Path) -> None:
    """From their first line, not only from their first write: what a call reads must still be so when it writes."""
    first = SqliteStore.open(database, epoch_length=WEEK, clock=lambda: NOW)
    second = SqliteStore.open(database, epoch_length=WEEK, clock=lambda: NOW, wait=0.05)
    entered = False
    with closing(first), closing(second):
        with first.transaction(), pytest.raises(DatabaseUnavailable), second.transaction():
            entered = True
        assert not entered
        with second.transaction():
            entered = True
    assert entered


def test_log_records_have_one_size() -> None:
    short = ReportRecord(0, 1, 1, "a.example", "b.example")
    long = ReportRecord(2**40, 2**32, 2**40, "x" * 253, "y" * 253, (EpochEntry(-3, EpochOutcome.PAID, 7),) * 16)
    assert len(short.encode()) == len(long.encode())
    assert ReportRecord.decode(short.encode()) == short
    assert ReportRecord.decode(long.encode()) == long


def test_old_epochs_and_impressions_are_pruned(tmp_path: Path) -> None:
    now = NOW
    path = make(tmp_path / "ann.db")
    with opened(path, lambda: now) as device:
        for week in range(20):
            now = NOW + week * WEEK
            device.save_impression("news.example", ImpressionOptions(0))
            assert ask(device) == 1
        assert len({state.epoch for state in device.budget()}) <= 6
        assert len(device.reports()) <= 6
        with closing(sqlite3.connect(path)) as connection:
            assert connection.execute("SELECT count(*) FROM impression").fetchone()[0] <= 6


@pytest.mark.parametrize("state", ["on", "off"])
def test_expired_events_are_deleted_by_no_call_of_a_site(store: Store, state: str) -> None:
    """A call could delete but some, so that under a clock set back one week's events decided what another contributes.

    The standard says SHOULD: a device that is open deletes all of them, on or off.
    """
    ann = Ann(store).see(0.1, lifetime_days=3).see(0.1, lifetime_days=20)
    ann.at(0.1).device.save_conversion("shop.example", ConversionEventOptions(["news.example"], lifetime_days=3))
    ann.see(0.7).convert(epsilon=0.1)
    overview = ann.device.overview()
    assert (len(overview.impressions), len(overview.conversions)) == (3, 1)
    if state == "off":
        ann.device.disable()
    ann.device.delete_expired()
    overview = ann.device.overview()
    assert sorted(each.expires - each.impression.time for each in overview.impressions) == [20 * DAY, 30 * DAY]
    assert overview.conversions == []


def test_expired_events_are_deleted_when_a_device_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them, though one transaction deletes few."""
    monkeypatch.setattr("device.stores.sqlite_store.CLEANUP_LIMIT", 1)
    path, now = tmp_path / "ann.db", NOW
    agent.create(path, clock=lambda: now)
    with agent.opened(path, clock=lambda: now, schedule=AtOnce()) as device:
        for _ in range(3):
            device.save_impression("news.example", ImpressionOptions(0, lifetime_days=3))
        device.disable()
    now += 3 * DAY + 1
    with agent.opened(path, clock=lambda: now, schedule=AtOnce()) as device:
        assert not device.overview().impressions


def test_closing_waits_no_longer_than_a_transaction(tmp_path: Path) -> None:
    """A custom function that never returns keeps its transaction open, and its person's program must still end."""
    make(tmp_path / "ann.db")
    store = SqliteStore.open(tmp_path / "ann.db", epoch_length=WEEK, clock=lambda: NOW, wait=0.05)
    begun, over = threading.Event(), threading.Event()

    def never_return() -> None:
        with suppress(DatabaseError), store.transaction():
            begun.set()
            over.wait(60)

    stuck = threading.Thread(target=never_return)
    stuck.start()
    assert begun.wait(60)
    store.close()
    assert stuck.is_alive()
    over.set()
    stuck.join()
    store.close()


def test_a_device_that_is_off_prunes_too(store: Store) -> None:
    ann = Ann(store).see(0.1).at(0.5)
    ann.convert(epsilon=0.1)
    ann.device.disable()
    ann.at(20).convert(epsilon=0.1)
    overview = ann.device.overview()
    assert not overview.impressions and not overview.filters
    assert [record.time for record in overview.reports] == [ann.now]
    # Behind a barrier: a clock set back finds no fresh budget.
    ann.device.enable()
    assert ann.see(0.6).convert(epsilon=0.1) == (0, 0)


def test_what_is_discarded_leaves_no_trace(store: Store) -> None:
    with store.transaction():
        store.save(seen(5))
        with store.discarded():
            store.save(seen(7))
            store.raise_barrier(9)
            pay(store, SHOP, e0=3)
            store.set_enabled(False)
        assert (times(store), store.barrier, paid(store), store.enabled) == ([5], None, {}, True)
    with store.transaction():
        assert (times(store), store.barrier, paid(store), store.enabled) == ([5], None, {}, True)


def test_one_call_tidies_up_a_bounded_number_of_rows(tmp_path: Path) -> None:
    """However much is left to do: a call must not take longer because a device was not used for a while."""

    def rows(table: str) -> int:
        return int(database_store._connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0])  # noqa: S608 - named here

    path = make(tmp_path / "ann.db")
    with (
        closing(SqliteStore.open(path, epoch_length=WEEK, clock=lambda: NOW)) as database_store,
        database_store.transaction(),
    ):
        for number in range(450):
            site = f"a{number}.example"
            seen = Impression(number, site, site, 0, 0, 0)
            database_store.save(SavedImpression(seen, NOW, frozenset(), frozenset()))
            event = ConversionEvent(number, site, site, 0)
            database_store.conversions.save(SavedConversion(event, NOW, frozenset({"news.example"})))
            database_store.log(ReportRecord(number, 1, 1, site, site))
            database_store.admit_to_action(site, site, 1, number)
            owner = FilterOwner(FilterKind.SITE, site)
            filters = database_store.filters_of([owner])
            filters[owner].consume(0, 1)
            database_store.keep(filters)
        tables = ("impression", "conversion", "log", "action", "filter")
        pruned = [(database_store.prune(1, 1000), [rows(table) for table in tables]) for _ in range(3)]
        assert pruned == [(False, [250] * 5), (False, [50] * 5), (True, [0] * 5)]


def test_every_commit_waits_for_the_disk(database: Path) -> None:
    """FULL is 2: a charge that a power cut takes back is budget that comes back."""
    with closing(SqliteStore.open(database, epoch_length=WEEK, clock=lambda: NOW)) as store:
        assert store._connection.execute("PRAGMA synchronous").fetchone() == (2,)
        assert store._connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)


@pytest.mark.parametrize("clear", ["forget all", "forget", "clear", "prune"])
def test_what_was_deleted_is_not_left_in_the_file(tmp_path: Path, clear: str) -> None:
    """Whoever finds the disk later finds no trace of a site that was forgotten."""
    path, now = make(tmp_path / "ann.db"), NOW
    with opened(path, lambda: now) as device:
        # Enough that whole pages become free.
        for bucket in range(200):
            device.save_impression("a-secret-diary.example", ImpressionOptions(bucket))
        if clear.startswith("forget"):
            with device._store.transaction():
                device._store.admit_to_action("a click", "a-secret-diary.example", 1, now)
    assert b"a-secret-diary" in path.read_bytes()
    with opened(path, lambda: now) as device:
        match clear:
            case "forget all":
                device.clear_browsing_history(forget_visits=True)
            case "forget":
                device.clear_browsing_history(["a-secret-diary.example"], forget_visits=True)
            case "clear":
                device.clear_impressions_for_site("a-secret-diary.example")
            case _:
                now += 10 * WEEK
                ask(device)
        if clear != "prune":
            # Also while the device is open, in the write-ahead log.
            held = b"".join(file.read_bytes() for file in tmp_path.iterdir())
            assert b"a-secret-diary" not in held
    left = b"".join(file.read_bytes() for file in tmp_path.iterdir())
    assert b"a-secret-diary" not in left


def test_what_was_deleted_leaves_the_log_when_its_last_reader_does(tmp_path: Path) -> None:
    """A backup program may hold the write-ahead log while the person clears."""
    path = make(tmp_path / "ann.db")
    with opened(path, wait=0.01) as device:
        device.save_impression("a-secret-diary.example", ImpressionOptions(0))
        with closing(sqlite3.connect(path, isolation_level=None)) as reader:
            reader.execute("BEGIN")
            reader.execute("SELECT * FROM impression").fetchall()
            device.clear_impressions_for_site("a-secret-diary.example")
            traced: list[str] = []
            device._store._connection.set_trace_callback(traced.append)  # type: ignore[attr-defined]  # on disk
            device.save_impression("news.example", ImpressionOptions(0))
        device.save_impression("news.example", ImpressionOptions(1))
        assert b"a-secret-diary" not in b"".join(file.read_bytes() for file in tmp_path.iterdir())
    # A site's call does not wait for the reader, and the next statement waits for a writer as before.
    waits = [statement for statement in traced if "busy_timeout" in statement]
    assert waits == ["PRAGMA busy_timeout = 0", "PRAGMA busy_timeout = 10"] * 2


@pytest.mark.parametrize("kind", list(FilterKind))
def test_what_a_site_has_paid_is_forgotten_in_all_its_roles(store: Store, kind: FilterKind) -> None:
    with store.transaction():
        for site in ("news.example", "shop.example"):
            pay(store, FilterOwner(kind, site), e1=1)
        store.forget(["news.example"])
        assert [owner for owner, entries in paid(store).items() if entries] == [FilterOwner(kind, "shop.example")]


@pytest.mark.parametrize("sites", [["news.example", "blog.example"], []])
def test_who_acted_is_forgotten_with_the_rest(store: Store, sites: list[str]) -> None:
    with store.transaction():
        assert store.admit_to_action("click", "news.example", 1, 1)
        assert not store.admit_to_action("click", "shop.example", 1, 1)
        store.forget(["blog.example"])
        assert not store.admit_to_action("click", "shop.example", 1, 1)
        store.forget(sites)
        assert store.admit_to_action("click", "shop.example", 1, 1)

"""What a device stores decides nothing that was not paid for: registers, epochs, clocks, lost files, logs and eviction.

One epoch's events must not show in what another contributes, nor one caller's saves in what is left for others. On both
stores, where both can be asked.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.experiments.small_worlds import QUERIER, START, WEEK, Clock, PlainDevice
from device import agent
from device.budget import FilterKind, FilterOwner, PrivacyFilter
from device.conversion import ConversionOptions
from device.device import Device
from device.epoch import DeviceCoins, EpochCalendar, draw_start
from device.events import ConversionEventOptions, ImpressionOptions
from device.limits import TREFOIL_SERVICE, DeviceLimits
from device.report import PlainSeal
from device.request import SideQuery, SideQueryForm
from device.stores.instance import token_path
from device.stores.memory_store import MemoryStore
from device.stores.sqlite_store import SqliteStore
from device.stores.storage import LOGGED_EPOCHS, ReportRecord, Store
from protocol.units import DAY, HOUR
from tests.support.both_stores import Ann, Kind, fresh_store
from tests.support.small_worlds import quick_folder


@pytest.fixture(params=list(Kind), ids=lambda kind: kind.value)
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    with fresh_store(request.param) as fresh:
        yield fresh


def buckets(report: tuple[int, ...]) -> list[int]:
    return [bucket for bucket, part in enumerate(report) if part]


# Actions


def test_what_is_saved_on_an_action_does_not_decide_who_measures_on_it(store: Store) -> None:
    """Else an impression of week 1 would decide, unpaid, what is reported of week 0."""
    ann = Ann(store, sites_per_action=1).see(0.1, action="reading")
    ann.see(1.1, site="blog.example", action="click")
    assert ann.at(1.2).convert("shop.example", action="click", epsilon=0.1) == (1, 0)
    assert ann.convert("other.example", action="click", epsilon=0.1) == (0, 0)


def test_what_is_measured_on_an_action_does_not_decide_who_saves_on_it(store: Store) -> None:
    ann = Ann(store, sites_per_action=1).at(1.0)
    ann.convert("shop.example", action="click", epsilon=0.1)
    ann.see(1.1, site="blog.example", action="click").see(1.2, 1, site="news.example", action="click")
    assert ann.at(1.3).convert(action="another click", epsilon=0.1) == (1, 0)


# Where epochs begin


def test_a_persons_epochs_begin_when_the_database_is_made(tmp_path: Path) -> None:
    """Up to a week back, on the hour: whatever is saved or asked later finds them there."""
    starts = set()
    for number in range(4):
        path = tmp_path / f"{number}.db"
        agent.create(path, clock=lambda: START + 100)
        with closing(SqliteStore.open(path, epoch_length=WEEK, clock=lambda: START)) as opened, opened.transaction():
            assert opened.epoch_start is not None
            assert START + 100 - WEEK - HOUR < opened.epoch_start <= START + 100
            assert opened.epoch_start % HOUR == 0
            starts.add(opened.epoch_start)
    # There are 168 hours to choose from: all four are the same with probability 2.1e-7.
    assert len(starts) > 1


def test_a_full_store_does_not_fix_where_epochs_begin() -> None:
    """A stranger's impression would number the weeks."""
    for count in (1, 2, 50):
        store, clock = MemoryStore(debug=True), Clock(START)
        device: PlainDevice = Device(
            store,
            PlainSeal(),
            clock=clock,
            limits=DeviceLimits(max_impressions_per_epoch=1),
            coins=DeviceCoins(lambda: 0.5),
        )
        for _ in range(count):
            clock.now += HOUR
            device.save_impression("news.example", ImpressionOptions(0))
            assert store.epoch_start is None


# Clocks


def test_saving_under_a_clock_that_jumped_deletes_nothing_that_can_still_be_used(store: Store) -> None:
    """An impression of one week would decide what is left of all the others."""
    ann = Ann(store).see(0.1).see(60.0, 1)
    assert ann.at(0.5).convert(epsilon=0.1) == (1, 0)


def test_what_lies_behind_the_barrier_is_deleted_by_the_next_impression(store: Store) -> None:
    ann = Ann(store).see(0.1).see(1.1)
    ann.at(0.5).device.clear_browsing_history(["other.example"], forget_visits=True)
    ann.see(2.1)
    assert [saved.impression.time for saved in ann.device.overview().impressions] == [
        START + int(1.1 * WEEK),
        START + int(2.1 * WEEK),
    ]


# A lost database


def spend(path: Path, clock: Clock) -> tuple[int, ...]:
    """Show an ad and ask for all of this week's budget."""
    with closing(SqliteStore.open(path, epoch_length=WEEK, clock=clock)) as store:
        device: PlainDevice = Device(store, PlainSeal(), clock=clock)
        device.save_impression("news.example", ImpressionOptions(0))
        return device.measure_conversion(QUERIER, ConversionOptions(TREFOIL_SERVICE, 1))


@pytest.mark.parametrize("back", [0, DAY, 100 * WEEK])
def test_a_database_made_beside_the_token_of_a_lost_one_pays_nothing_for_its_past(back: int) -> None:
    """Also when the clock is set back: the token knows the latest moment that anything was reported at."""
    clock = Clock(START + 5 * WEEK)
    with quick_folder() as folder:
        path = folder / "ann.db"
        SqliteStore.create(path, epoch_length=WEEK, debug=True, epoch_start=START)
        assert spend(path, clock) == (1,)
        path.unlink()
        clock.now -= back
        SqliteStore.create(path, epoch_length=WEEK, debug=True, epoch_start=START)
        assert spend(path, clock) == (0,)
        clock.now = START + 6 * WEEK
        assert spend(path, clock) == (1,)


def test_a_token_that_cannot_be_read_closes_what_was_before_it_was_written() -> None:
    with quick_folder() as folder:
        path = folder / "ann.db"
        SqliteStore.create(path, epoch_length=WEEK, debug=True, epoch_start=START)
        spend(path, Clock(START))
        path.unlink()
        token_path(path).write_bytes(b"scribbled over")
        written = int(token_path(path).stat().st_mtime)
        SqliteStore.create(path, epoch_length=WEEK, debug=True, epoch_start=START)
        assert spend(path, Clock(written)) == (0,)
        assert spend(path, Clock(written + WEEK)) == (1,)


def test_a_database_made_where_nothing_was_ever_reported_is_like_any_other() -> None:
    with quick_folder() as folder:
        path = folder / "ann.db"
        SqliteStore.create(path, epoch_length=WEEK, debug=True)
        path.unlink()
        SqliteStore.create(path, epoch_length=WEEK, debug=True)
        assert spend(path, Clock(START)) == (1,)


# Switched off


def test_a_device_that_is_off_stores_nothing_and_forgets_what_is_out_of_reach(store: Store) -> None:
    ann = Ann(store).see(0.1).at(0.5)
    ann.ask(0)
    ann.device.disable()
    ann.see(0.6).convert()
    assert len(ann.device.overview().impressions) == len(ann.spent()) == 1
    ann.at(20).convert()
    assert not ann.device.overview().impressions and not ann.spent()


def test_a_device_that_is_off_fixes_and_closes_nothing_on_disk(tmp_path: Path) -> None:
    """Before its first conversion: the statements that it runs and discards leave nothing behind."""
    path = tmp_path / "ann.db"
    SqliteStore.create(path, epoch_length=WEEK, debug=True)
    with closing(SqliteStore.open(path, epoch_length=WEEK, clock=lambda: START)) as opened:
        ann = Ann(opened)
        ann.device.disable()
        ann.convert()
        with opened.transaction():
            assert (opened.epoch_start, opened.barrier) == (None, None)


# Side queries and closed epochs


@pytest.mark.parametrize("form", [SideQueryForm.GENERAL, SideQueryForm.LAST_TOUCH])
def test_a_closed_epoch_says_nothing_in_a_side_query(store: Store, form: SideQueryForm) -> None:
    """It pays nothing, so whether the past was cleared could be asked again and again."""
    ann = Ann(store).see(0.1)
    terms: dict[str, Any] = {"side_query": SideQuery(1, form), "epsilon": 0.1}
    ann.at(0.5).device.clear_browsing_history(forget_visits=True)
    for _ in range(3):
        assert ann.at(1.5).ask(0, **terms) == (0, 0, 0)
        assert ann.ask(-50, 0, **terms) == (0, 0, 0)
    assert ann.ask(0, 1, **terms) == (0, 0, 0)
    assert set(ann.spent()) == {1}


@pytest.mark.parametrize("coming", [1, 7])
def test_an_epoch_yet_to_come_says_nothing_either(store: Store, coming: int) -> None:
    ann = Ann(store).at(0.5)
    assert ann.ask(0, coming, side_query=SideQuery(1), epsilon=0.1) == (0, 0, 0)
    # Nor does it pay: what it will hold cannot be used up before it begins.
    assert set(ann.spent()) == {0}


# The log


@pytest.mark.parametrize("enabled", [True, False])
def test_the_log_is_bounded_whether_measurement_is_on_or_off(store: Store, enabled: bool) -> None:
    ann = Ann(store, max_log_records=5).at(0.5)
    if not enabled:
        ann.device.disable()
    for number in range(12):
        ann.now += 1
        ann.convert(f"shop{number}.example", epsilon=0.1)
    assert [record.site for record in ann.device.reports()] == [f"shop{number}.example" for number in range(7, 12)]


# Eviction


def test_one_sites_saves_do_not_evict_anybody_elses(store: Store) -> None:
    ann = Ann(store, max_impressions_per_site=3, max_impressions_per_epoch=100)
    ann.see(0.1, 7, "quiet.example")
    for number in range(20):
        ann.see(0.2 + number / 1000, number % 6, "loud.example")
    credit: dict[str, Any] = {"credit": [1.0] * 10, "value": 10, "max_value": 10, "epsilon": 0.1}
    assert buckets(ann.at(0.5).convert(buckets=8, **credit)) == [0, 1, 5, 7]
    assert len(ann.device.overview().impressions) == 4


@pytest.mark.parametrize("order", [(WEEK - 1, WEEK), (WEEK, WEEK - 1)])
def test_a_second_of_the_next_week_counts_for_that_week_alone(store: Store, order: tuple[int, int]) -> None:
    """Also where the clock was set back: a week with one event is full, and the first second of the next is not its."""
    limits = {"max_impressions_per_epoch": 1, "max_sites_per_epoch": 1, "max_conversions_per_epoch": 1}
    ann = Ann(store, **limits)
    for seconds in order:
        ann.now = START + seconds
        ann.device.save_impression("news.example", ImpressionOptions(0))
        ann.device.save_conversion("shop.example", ConversionEventOptions(["news.example"]))
    seen = ann.device.overview()
    assert [one.impression.time - START for one in seen.impressions] == [WEEK - 1, WEEK]
    assert [one.event.time - START for one in seen.conversions] == [WEEK - 1, WEEK]


def test_a_full_epoch_evicts_the_oldest_of_the_site_that_has_most(store: Store) -> None:
    ann = Ann(store, max_impressions_per_site=100, max_impressions_per_epoch=6)
    ann.see(0.10, 0, "first.example").see(0.11, 1, "second.example")
    for number in range(4):
        ann.see(0.2 + number / 1000, 2 + number, "loud.example")
    ann.see(0.3, 6, "third.example").see(0.31, 7, "fourth.example")
    held = [saved.impression.histogram_index for saved in ann.device.overview().impressions]
    assert held == [0, 1, 4, 5, 6, 7]


def test_of_sites_that_have_as_many_the_one_that_came_first_loses(store: Store) -> None:
    """By what they did, not by their names."""
    ann = Ann(store, max_impressions_per_epoch=4)
    for number, site in enumerate(["z", "a", "z", "a", "m"]):
        ann.see(0.1 + number / 1000, number, f"{site}.example")
    assert [saved.impression.site[0] for saved in ann.device.overview().impressions] == ["a", "z", "a", "m"]


def test_an_epoch_of_too_many_sites_loses_the_one_seen_least_lately(store: Store) -> None:
    ann = Ann(store, max_sites_per_epoch=3)
    for number, site in enumerate(["a", "a", "b", "c", "a", "d"]):
        ann.see(0.1 + number / 1000, number, f"{site}.example")
    assert [saved.impression.site[0] for saved in ann.device.overview().impressions] == ["a", "a", "c", "a", "d"]
    ann.see(1.1, 0, "e.example")
    assert len(ann.device.overview().impressions) == 6


def test_the_site_seen_least_lately_loses_all_that_it_has_in_the_epoch(store: Store) -> None:
    """Else an epoch would hold more sites than it may."""
    ann = Ann(store, max_sites_per_epoch=3)
    for number, site in enumerate(["a", "a", "b", "c", "d"]):
        ann.see(0.1 + number / 1000, number, f"{site}.example")
    assert [saved.impression.site[0] for saved in ann.device.overview().impressions] == ["b", "c", "d"]


def test_a_site_with_many_impressions_loses_all_of_them_too(store: Store) -> None:
    """A clean-up that is done little by little would leave the epoch above its limit of sites."""
    ann = Ann(store, max_sites_per_epoch=2)
    with store.transaction():
        for number in range(300):
            store.save(ImpressionOptions(0).saved("a.example", "a.example", START + number, ann.limits))
    for number, site in enumerate(["b", "c"]):
        ann.see(0.1 + number / 1000, number, f"{site}.example")
    assert [saved.impression.site[0] for saved in ann.device.overview().impressions] == ["b", "c"]


@pytest.mark.parametrize("limit", ["max_impressions_per_site", "max_impressions_per_epoch"])
def test_under_a_lower_limit_the_next_impression_evicts_all_that_exceeds_it(store: Store, limit: str) -> None:
    """A later version of a device may keep less."""
    before = Ann(store)
    for number in range(5):
        before.see(0.1 + number / 1000, number)
    after = Ann(store, **{limit: 2}).see(0.2, 5)
    assert [saved.impression.histogram_index for saved in after.device.overview().impressions] == [4, 5]


def test_much_that_is_out_of_reach_goes_little_by_little(store: Store) -> None:
    """No call takes long because much was left to do; and what is not gone yet is closed."""
    ann = Ann(store, max_sites_per_epoch=700)
    with store.transaction():
        for number in range(600):
            owner = FilterOwner(FilterKind.SITE, f"shop{number}.example")
            ledger = PrivacyFilter()
            ledger.consume(0, 7)
            store.keep({owner: ledger})
            store.save(ImpressionOptions(0).saved(f"news{number}.example", "ads.example", START + number, ann.limits))
            store.log(ReportRecord(START, 1, 1, "a.example", "a.example"))
    for call in range(5):
        assert ann.at(20 + call / 10).convert(epsilon=0.1) == (0, 0)
        assert ann.ask(0, epsilon=0.1) == (0, 0)
    seen = ann.device.overview()
    assert (list(seen.filters), list(seen.impressions), len(seen.reports)) == ([], [], 10)


def test_many_small_sites_share_what_there_is(store: Store) -> None:
    """However many there are, no other site is left with less than its share."""
    ann = Ann(store, max_impressions_per_site=100, max_impressions_per_epoch=12)
    for number in range(6):
        ann.see(0.1 + number / 1000, 0, "news.example")
    for number in range(40):
        ann.see(0.2 + number / 1000, 0, f"crowd{number % 5}.example")
    sites = [saved.impression.site for saved in ann.device.overview().impressions]
    assert len(sites) == 12
    assert sites.count("news.example") == 2


def test_the_standards_thousand_impressions_of_one_site_are_kept() -> None:
    with fresh_store(Kind.MEMORY) as store:
        ann = Ann(store)
        for number in range(1010):
            ann.now = START + number
            ann.device.save_impression("news.example", ImpressionOptions(0))
        assert len(ann.device.overview().impressions) == 1000


# The calendar

moments = st.integers(min_value=-(10**11), max_value=10**11)


@given(moments, moments)
def test_every_moment_is_in_exactly_one_epoch(start: int, moment: int) -> None:
    calendar = EpochCalendar(start, WEEK)
    epoch = calendar.index(moment)
    assert calendar.first_second(epoch) <= moment < calendar.first_second(epoch + 1)


def test_indices_go_below_zero_without_a_gap() -> None:
    calendar = EpochCalendar(1000, WEEK)
    assert [calendar.index(moment) for moment in (1000 - WEEK, 999, 1000, 999 + WEEK, 1000 + WEEK)] == [-1, -1, 0, 0, 1]


@given(moments, st.floats(min_value=0, max_value=1, exclude_max=True))
def test_the_start_is_on_the_hour_and_within_an_epoch_before_now(now: int, coin: float) -> None:
    start = draw_start(now, WEEK, coin)
    assert start % HOUR == 0
    assert now - WEEK - HOUR < start <= now


def test_the_start_rounds_down_also_before_1970() -> None:
    assert draw_start(3, WEEK, 0.5) == -302_400
    assert draw_start(2, WEEK, 0.0) == 0
    assert draw_start(-1, WEEK, 0.0) == -HOUR


def test_a_window_has_the_epochs_of_both_ends() -> None:
    calendar = EpochCalendar(0, WEEK)
    assert list(calendar.window(WEEK - 1, 2 * WEEK)) == [0, 1, 2]
    assert list(calendar.window(0, WEEK - 1)) == [0]


def test_new_year_is_a_day_like_any_other() -> None:
    """Peers that counted ISO weeks or local dates had epochs that ran backwards here."""
    calendar = EpochCalendar(draw_start(1_767_000_000, WEEK, 0.3), WEEK)
    indices = [calendar.index(1_767_000_000 + hour * HOUR) for hour in range(24 * 30)]
    assert indices == sorted(indices)
    assert indices[-1] - indices[0] in (4, 5)


def test_naming_future_weeks_hides_no_spending_from_the_log(store: Store) -> None:
    ann = Ann(store).see(0.5).at(0.6)
    assert ann.ask(*range(40)) == (1, 0)
    (record,) = ann.device.reports()
    assert [(entry.epoch, entry.paid) for entry in record.epochs if entry.paid] == [(0, 1_000_000)]
    assert [entry.epoch for entry in record.epochs] == [0, *range(41 - LOGGED_EPOCHS, 40)]


@pytest.mark.parametrize("epochs", [(0,), (0, 1)])
def test_the_last_second_of_a_week_belongs_to_it(store: Store, epochs: tuple[int, ...]) -> None:
    ann = Ann(store)
    ann.now = START + WEEK - 1
    ann.device.save_impression("news.example", ImpressionOptions(1))
    assert ann.at(1.5).ask(*epochs) == (0, 1)


def test_an_impression_is_there_in_its_last_second(store: Store) -> None:
    """Also when that is when expired ones are deleted."""
    ann = Ann(store).see(0, lifetime_days=1)
    for now, held in ((START + DAY, 1), (START + DAY + 1, 0)):
        ann.now = now
        assert ann.convert(epsilon=0.1) == (held, 0)
        ann.device.delete_expired()
        assert len(ann.device.overview().impressions) == held


def test_of_impressions_of_one_second_the_one_saved_first_counts(store: Store) -> None:
    ann = Ann(store).see(0.1, 1).see(0.1, 0).at(0.2)
    assert ann.convert(epsilon=0.1) == (0, 1)


def test_only_publishers_whose_ads_passed_the_test_of_relevance_pay(store: Store) -> None:
    ann = Ann(store).see(0.1, 1).see(0.1, 0, "blog.example").at(0.5)
    assert ann.ask(0, relevant=lambda impression: impression.histogram_index == 1) == (0, 1)
    paid = [ann.spent(FilterKind.IMPRESSION_SITE, site) for site in ("news.example", "blog.example")]
    assert paid == [{0: 500_000}, {}]


def test_an_action_that_straddles_a_weeks_edge_decides_nothing_in_the_next(store: Store) -> None:
    """Who acted before the edge must not decide who may act after it."""
    ann = Ann(store, sites_per_action=1)
    ann.see(0.999, site="first.example", action="x").see(1.001, site="second.example", action="x")
    assert [one.impression.site for one in ann.device.overview().impressions] == ["first.example", "second.example"]
    assert ann.at(0.999).convert("a.example", action="y", lookback_days=1) == (1, 0)
    assert ann.at(1.002).convert("b.example", action="y", lookback_days=1) == (1, 0)
    assert ann.convert("c.example", action="y", lookback_days=1) == (0, 0)

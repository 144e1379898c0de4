"""The display side on both stores: what a publisher learns, what it costs, and what no party can see.

Its privacy bounds are in test_display_privacy.py; here are the rules one by one, the options, and the state that is
kept for it.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.experiments.small_worlds import START, WEEK
from device import errors
from device.budget import FilterKind
from device.conversion import AttributionRequest
from device.device import Device
from device.errors import DatabaseError, RangeError, StandardError
from device.events import ConversionEvent, ConversionEventOptions, EventSelection, SavedConversion
from device.labelling import LabelOptions
from device.limits import TREFOIL_SERVICE
from device.report import HelperSetSeal, PlainSeal
from device.request import CheckedRequest, SideQuery, SideQueryForm
from device.stores import schema
from device.stores.sqlite_store import SqliteStore
from device.stores.storage import EpochEntry, EpochOutcome, ReportRecord, Side, Store
from protocol.errors import ErrorKind
from protocol.report import SealedReport
from protocol.units import DAY
from tests.support.both_stores import Ann, Kind, fresh_store
from tests.support.protocol_samples import HELPER_SET
from tests.support.protocol_samples import NOW as IN_2030
from tests.support.raising import raises

PUBLISHER, SHOP, STORE = "pub.example", "shop.example", "store.example"


@pytest.fixture(params=list(Kind), ids=lambda kind: kind.value)
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    with fresh_store(request.param) as fresh:
        yield fresh


class Bob(Ann):
    """Ann, with the calls of the display side."""

    def buy(self, epoch: float, site: str = SHOP, publishers: tuple[str, ...] = (PUBLISHER,), **options: Any) -> Bob:
        """A conversion, at this time."""
        caller = options.pop("caller", None)
        self.at(epoch).device.save_conversion(site, ConversionEventOptions(publishers, **options), intermediary=caller)
        return self

    def label(self, ago: float = 1, site: str = PUBLISHER, **options: Any) -> tuple[int, ...]:
        """A publisher's question about an impression so many weeks ago."""
        caller = options.pop("caller", None)
        return self.device.measure_impression(site, ask(int(ago * WEEK), **options), intermediary=caller)


def ask(ago: int = WEEK, **options: Any) -> LabelOptions:
    given: dict[str, Any] = {"features": (2, 0, 1), "cap": 6, "epsilon": 0.6, "advertisers": (SHOP,)} | options
    return LabelOptions(TREFOIL_SERVICE, shown_ago=ago, **given)


# What a publisher is told, and what it costs


def test_the_features_are_reported_if_a_conversion_followed_and_its_epoch_pays_their_share(store: Store) -> None:
    bob = Bob(store).buy(0.5)
    assert bob.at(1.2).label() == (2, 0, 1)
    # ‖X‖₁ / cap = 3 / 6 of ε = 0.6, from the publisher, everyone, and the advertiser's conversions; no other.
    assert bob.spent(site=PUBLISHER) == bob.spent(FilterKind.GLOBAL) == {0: 300_000}
    assert bob.spent(FilterKind.ADVERTISER, SHOP) == {0: 300_000}
    assert {state.kind for state in bob.device.budget()} == {FilterKind.SITE, FilterKind.GLOBAL, FilterKind.ADVERTISER}
    # Impressions, and the quota of impressions, have nothing to do with it.
    assert bob.spent(FilterKind.IMPRESSION_SITE, SHOP) == {}


def test_without_a_conversion_the_report_is_zeros_and_free(store: Store) -> None:
    bob = Bob(store)
    assert bob.at(1.2).label() == (0, 0, 0)
    assert bob.device.budget() == []


def test_every_epoch_with_a_conversion_pays_in_full(store: Store) -> None:
    bob = Bob(store).buy(0.9).buy(0.95, STORE).buy(1.1)
    assert bob.at(1.8).label(1, advertisers=(SHOP, STORE)) == (2, 0, 1)
    assert bob.spent(site=PUBLISHER) == {0: 300_000, 1: 300_000}
    assert bob.spent(FilterKind.ADVERTISER, STORE) == {0: 300_000}


def test_an_epoch_that_cannot_pay_is_as_if_absent_and_others_still_count(store: Store) -> None:
    bob = Bob(store).buy(0.9)
    bob.at(1.2)
    for _ in range(3):
        assert bob.label() == (2, 0, 1)
    assert bob.label() == (0, 0, 0)
    assert bob.spent(site=PUBLISHER) == {0: 900_000}
    assert bob.buy(1.3).at(2.0).label(1.2) == (2, 0, 1)


def test_a_window_is_exact_to_the_second(store: Store) -> None:
    """From the second of the impression to the last one before the window's end."""
    bob, ago = Bob(store), 8 * DAY
    shown = START + WEEK
    for offset, told in ((-1, False), (0, True), (DAY - 1, True), (DAY, False)):
        bob.now = shown + offset
        bob.device.save_conversion(SHOP, ConversionEventOptions((PUBLISHER,), label=abs(offset)))
        bob.now = shown + ago
        assert any(bob.device.measure_impression(PUBLISHER, ask(ago, window_days=1, labels=(abs(offset),)))) is told


@pytest.mark.parametrize(
    ("saved", "asked"),
    [
        ({"publishers": ("other.example",)}, {}),
        ({"site": STORE}, {}),
        ({"label": 4}, {"labels": (3, 5)}),
        ({"caller": PUBLISHER}, {}),
        ({"lifetime_days": 2}, {}),
    ],
    ids=["another publisher", "another advertiser", "another label", "its own call", "expired"],
)
def test_what_is_not_for_this_question_is_as_if_absent(store: Store, saved: dict[str, Any], asked: Any) -> None:
    bob = Bob(store).buy(0.5, **saved)
    assert bob.at(1.2).label(**asked) == (0, 0, 0)
    assert bob.device.budget() == []
    assert bob.buy(0.5, label=3).at(1.2).label(**asked) == (2, 0, 1)


def test_a_window_that_ends_with_a_week_asks_nothing_of_the_next(store: Store) -> None:
    """Not even κ, which a week owes that is asked."""
    bob = Bob(store).at(1.2)
    bob.now = START + WEEK + DAY
    assert bob.label((WEEK + DAY) / WEEK, side_query=SideQuery(1)) == (0, 0, 0, 0)
    assert set(bob.spent(site=PUBLISHER)) == {0}


def test_a_fault_in_a_window_of_one_week_costs_what_the_label_would_have(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not what the query's largest could."""

    log, faults = store.log, [MemoryError]

    def fails_once(record: ReportRecord, most: int) -> None:
        if faults:
            raise faults.pop()
        log(record, most)

    bob = Bob(store).buy(0.5).at(1)
    monkeypatch.setattr(store, "log", fails_once)
    assert bob.label() == (0, 0, 0)
    assert bob.spent(site=PUBLISHER) == {0: 300_000}


def test_a_list_holds_for_its_own_event_only(store: Store) -> None:
    bob = Bob(store).buy(0.2).buy(0.6, publishers=("other.example",))
    assert bob.at(1.1).label() == (2, 0, 1)


def test_one_budget_for_both_roles_of_a_site(store: Store) -> None:
    """What it spent as an advertiser it cannot spend again as a publisher."""
    bob = Bob(store).buy(0.5)
    bob.see(0.6)
    bob.at(0.9).convert(PUBLISHER)
    assert bob.spent(site=PUBLISHER) == {0: 1_000_000}
    assert bob.at(1.2).label() == (0, 0, 0)


def test_the_standards_calls_never_see_conversion_events(store: Store) -> None:
    """With hundreds of them or without, impressions give what they gave."""
    with fresh_store(Kind.MEMORY) as empty:
        plain, full = Ann(empty), Bob(store)
        for number in range(200):
            full.buy(0.5 + number / 1000, publishers=(SHOP if number % 2 else PUBLISHER,), site=STORE)
        for ann in (plain, full):
            ann.see(0.2, 1).see(1.2, 0)
        for epsilon in (0.3, 0.7, 1.0):
            assert plain.at(1.5).convert(epsilon=epsilon) == full.at(1.5).convert(epsilon=epsilon)
        assert plain.device.budget() == full.device.budget()


@pytest.mark.parametrize(
    ("events", "drained", "general", "any_"),
    [((), False, 0, 0), ((0.5,), False, 0, 0), ((0.5,), True, 1, 1), ((0.5, 1.5), True, 1, 0)],
    ids=["nothing", "paid", "dropped", "dropped, another paid"],
)
def test_a_flag_says_that_a_label_may_be_missing(
    store: Store, events: tuple[float, ...], drained: bool, general: int, any_: int
) -> None:
    """ANY is not raised where an epoch that paid has made the label 1 already. κ is owed by every epoch."""
    for number, (form, flag) in enumerate(((SideQueryForm.GENERAL, general), (SideQueryForm.ANY, any_))):
        bob, site = Bob(store, site_budget=1_200_000), f"pub{number}.example"
        for epoch in events:
            bob.buy(epoch, publishers=(site,))
        if drained:
            bob.at(1.2).label(site=site, epsilon=1.0, cap=3)
        report = bob.at(2.2).label(2.2, site, window_days=14, side_query=SideQuery(1, form))
        assert report[-1] == flag
        # κ of a cap of 6 at ε = 0.6 also in an epoch where nothing ever happened.
        assert bob.spent(site=site)[1] == (400_000 if len(events) == 2 else 100_000)


# Always a report


class SealsIn2030:
    """To the samples' helpers, whose keys hold only then."""

    reveals = False

    def prepare(self, measurement: CheckedRequest, now: int, *, debug: bool) -> Callable[[Sequence[int]], SealedReport]:
        return HelperSetSeal(HELPER_SET).prepare(measurement, IN_2030, debug=debug)


def test_every_report_looks_alike_whatever_happened() -> None:
    """Bytes, header and log: not allowed, nothing there, out of budget, off, expired or cleared."""
    sizes, logged, terms = set(), set(), set()
    for case in ("converted", "nothing", "not allowed", "no budget", "off", "cleared"):
        with fresh_store(Kind.MEMORY) as store:
            bob = Bob(store)
            sealed: Device[SealedReport] = Device(store, SealsIn2030(), clock=lambda: START + int(1.2 * WEEK))
            if case != "nothing":
                bob.buy(0.5, publishers=("other.example",) if case == "not allowed" else (PUBLISHER,))
            bob.at(1.2)
            if case == "no budget":
                bob.label(epsilon=1.0, cap=3)
            if case == "off":
                bob.device.disable()
            if case == "cleared":
                bob.device.clear_browsing_history(forget_visits=True)
            report = sealed.measure_impression(PUBLISHER, ask(unit="features v3"))
            sizes.add(len(report.encode()))
            logged.add(len(store.reports()[-1].encode()))
            terms.add(report.terms())
    assert len(sizes) == len(logged) == len(terms) == 1
    (one,) = terms
    assert (one.site, one.sensitivity, one.buckets, one.unit) == (PUBLISHER, 6, 3, "features v3")


BAD = {
    "fraction": {"features": (1, 0.5)},
    "truth": {"features": (1, True)},
    "negative": {"features": (2, -1)},
    "nothing": {"features": (0, 0)},
    "no features": {"features": ()},
    "above the cap": {"features": (4, 3)},
    "too many": {"features": (0,) * 1024 + (1,)},
    "text": {"features": "210"},
    "no cap": {"cap": 0},
    "huge cap": {"cap": 2**40 + 1},
    "no epsilon": {"epsilon": 0.0},
    "no advertiser": {"advertisers": ()},
    "itself": {"advertisers": (SHOP, PUBLISHER)},
    "too many advertisers": {"advertisers": [f"{letter}.example" for letter in "abcdefghijk"]},
    "too many labels": {"labels": range(11)},
    "negative label": {"labels": (-1,)},
    "no window": {"window_days": 0},
    "part of a day": {"window_days": 1.5},
    "long window": {"window_days": 31},
    "open window": {"ago": 7 * DAY - 1},
    "too long ago": {"ago": 30 * DAY + 1},
    "part of a second": {"ago": 8 * DAY + 0.5},
    "last touch": {"side_query": SideQuery(1, SideQueryForm.LAST_TOUCH)},
    "no side query": {"side_query": 1},
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD.keys())
def test_bad_options_are_refused_alike_on_every_device_and_cost_nothing(store: Store, bad: dict[str, Any]) -> None:
    with fresh_store(Kind.MEMORY) as empty:
        told = []
        for bob in (Bob(empty), Bob(store).buy(0.5)):
            with pytest.raises(RangeError) as refused:
                bob.at(1.2).device.measure_impression(PUBLISHER, ask(**bad))
            told.append((str(refused.value), refused.value.hint))
            assert bob.device.budget() == []
            assert list(bob.device.reports()) == []
        assert told[0] == told[1]


def test_other_services_and_other_requests_are_refused(store: Store) -> None:
    bob = Bob(store)
    with raises(ErrorKind.UNKNOWN_NAME, errors.ReferenceError):
        bob.device.measure_impression(PUBLISHER, replace(ask(), aggregation_service="elsewhere"))
    with raises(ErrorKind.CONFLICTING_OPTIONS, RangeError):
        bob.ask(0, side_query=SideQuery(1, SideQueryForm.ANY))
    with raises(ErrorKind.MALFORMED, StandardError):
        bob.label(advertisers=("not a site",))


@pytest.mark.parametrize(
    "bad",
    [
        {"publishers": ()},
        {"publishers": (SHOP,)},
        {"publishers": [f"{letter}.example" for letter in "abcdefghijk"]},
        {"publishers": PUBLISHER},
        {"label": -1},
        {"label": 2**32},
        {"lifetime_days": 0},
    ],
    ids=["nobody", "itself", "too many", "no list", "negative", "large", "no time"],
)
def test_bad_conversions_are_refused_on_or_off(store: Store, bad: dict[str, Any]) -> None:
    bob = Bob(store)
    options = ConversionEventOptions(**{"publishers": (PUBLISHER,), **bad})
    for switch in (bob.device.enable, bob.device.disable):
        switch()
        with pytest.raises(RangeError):
            bob.device.save_conversion(SHOP, options)
    assert bob.device.overview().conversions == []


# What is kept


def test_a_full_epoch_loses_its_busiest_sites_oldest_and_no_other_epoch_anything(store: Store) -> None:
    bob = Bob(store, max_conversions_per_epoch=3).buy(0.999, label=1)
    bob.buy(1.1, STORE, label=2)
    for number in range(4):
        bob.buy(1.2 + number / 10, label=3 + number)
    kept = [saved.event.label for saved in bob.device.overview().conversions]
    assert kept == [1, 2, 5, 6]


def test_conversions_and_impressions_do_not_take_each_others_room(store: Store) -> None:
    bob = Bob(store, max_conversions_per_epoch=2, max_impressions_per_epoch=2, max_impressions_per_site=2)
    for number in range(4):
        bob.buy(0.1 + number / 10)
        bob.see(0.15 + number / 10)
    seen = bob.device.overview()
    assert (len(seen.conversions), len(seen.impressions)) == (2, 2)


def test_a_site_clears_what_it_saved_and_leaves_the_lists_of_others(store: Store) -> None:
    other = "other.example"
    bob = (
        Bob(store).buy(0.1, label=1).buy(0.2, STORE, label=2, caller=SHOP).buy(0.3, STORE, (PUBLISHER, other), label=3)
    )
    bob.buy(0.4, STORE, (other,), label=4)
    bob.device.clear_impressions_for_site(SHOP)
    assert [saved.event.label for saved in bob.device.overview().conversions] == [3, 4]
    bob.device.clear_impressions_for_site(other)
    (left,) = bob.device.overview().conversions
    assert (left.event.label, left.publishers) == (3, frozenset({PUBLISHER}))


def test_forgotten_visits_take_conversions_and_close_every_epoch_so_far(store: Store) -> None:
    """Also to a flag, which would tell again and again that the history was cleared."""
    bob = Bob(store).buy(0.5).buy(0.6, STORE)
    bob.at(1.2).device.clear_browsing_history([SHOP], forget_visits=True)
    assert [saved.event.site for saved in bob.device.overview().conversions] == [STORE]
    flagged = bob.label(advertisers=(SHOP, STORE), side_query=SideQuery(5, SideQueryForm.ANY))
    assert flagged == (0, 0, 0, 0)
    assert bob.device.budget() == []
    bob.device.clear_browsing_history(forget_visits=True)
    assert bob.device.overview().conversions == []


def test_clearing_in_a_later_epoch_is_bounded_by_the_earlier_ones_filter(store: Store) -> None:
    """Outside the model: an event that a later call removed shows, but never for more than its own epoch could pay."""
    bob = Bob(store).buy(0.5)
    told = 0
    for _ in range(5):
        told += sum(bob.at(1.2).label())
    bob.device.clear_impressions_for_site(SHOP)
    assert bob.label() == (0, 0, 0)
    # 3 of a cap of 6 at ε = 0.6 each time: what was told cost what the epoch had.
    assert told / 6 * 0.6 <= 1.0
    assert bob.spent(site=PUBLISHER) == {0: 900_000}


def test_emptied_budgets_answer_zeros(store: Store) -> None:
    bob = Bob(store).buy(0.5)
    bob.at(1.2).device.clear_browsing_history([PUBLISHER], forget_visits=False)
    assert bob.label() == (0, 0, 0)


def test_switched_off_nothing_is_saved_and_nothing_told(store: Store) -> None:
    bob = Bob(store).buy(0.5)
    bob.device.disable()
    bob.buy(0.6, label=9)
    assert bob.at(1.2).label(side_query=SideQuery(5, SideQueryForm.ANY)) == (0, 0, 0, 0)
    assert [saved.event.label for saved in bob.device.overview().conversions] == [0]
    bob.device.enable()
    assert bob.label() == (2, 0, 1)


def test_a_conversion_saved_while_the_clock_was_behind_the_barrier_is_never_told(store: Store) -> None:
    bob = Bob(store).at(6.5)
    assert bob.label() == (0, 0, 0)
    bob.buy(1.5)
    assert bob.at(2.6).label() == (0, 0, 0)
    assert bob.device.budget() == []
    # The next save deletes it.
    assert [saved.event.time for saved in bob.buy(2.7).device.overview().conversions] == [bob.now]


def test_the_log_says_which_side_asked(store: Store) -> None:
    bob = Bob(store).buy(0.5)
    bob.at(1.2).label()
    bob.convert()
    assert [record.side for record in bob.device.reports()] == [Side.PUBLISHER, Side.ADVERTISER]
    assert bob.device.reports()[0].epochs == (
        EpochEntry(0, EpochOutcome.PAID, 300_000),
        EpochEntry(1, EpochOutcome.NOTHING_FOUND, 0),
    )


def test_out_of_reach_conversions_are_pruned(store: Store) -> None:
    bob = Bob(store).buy(0.5).buy(5.5)
    bob.at(6.5).label()
    assert [saved.event.time for saved in bob.device.overview().conversions] == [START + int(5.5 * WEEK)]


SITES = ("a.example", "b.example", "ab.example")
events = st.builds(
    SavedConversion,
    st.builds(
        ConversionEvent,
        time=st.integers(0, 6),
        site=st.sampled_from(SITES),
        caller=st.sampled_from(SITES),
        label=st.integers(0, 2),
    ),
    expires=st.integers(0, 8),
    publishers=st.frozensets(st.sampled_from(SITES), min_size=1, max_size=2),
)
selections = st.builds(
    EventSelection,
    since=st.integers(0, 4),
    until=st.integers(3, 7),
    now=st.integers(0, 8),
    publisher=st.sampled_from(SITES),
    advertisers=st.frozensets(st.sampled_from(SITES), min_size=1, max_size=2),
    labels=st.frozensets(st.integers(0, 2), max_size=2),
)
changes = st.one_of(
    st.tuples(st.just("save"), events),
    st.tuples(st.just("clear_caller"), st.sampled_from(SITES)),
    st.tuples(st.just("forget"), st.frozensets(st.sampled_from(SITES), max_size=2)),
    st.tuples(st.just("evict_between"), st.integers(0, 3), st.integers(3, 7)),
    st.tuples(st.just("drop_before"), st.integers(0, 5), st.integers(1, 3)),
)


@settings(max_examples=80, deadline=None)
@given(st.lists(events, max_size=8), st.lists(changes, max_size=6), selections)
def test_both_stores_keep_the_same_conversions(first: list[SavedConversion], then: list[Any], chosen: Any) -> None:
    """Each is the other's oracle: one is a tuple in Python, the other SQL."""
    with fresh_store(Kind.MEMORY) as memory, fresh_store(Kind.DISK) as disk:
        for name, *arguments in [*(("save", saved) for saved in first), *then]:
            seen = []
            for store in (memory, disk):
                with store.transaction():
                    answer = getattr(store.conversions, name)(*arguments)
                    kept = store.conversions
                    seen.append((answer, kept.all(), kept.matching(chosen), kept.count_between(1, 4)))
            assert seen[0] == seen[1]


def test_what_a_transaction_that_fails_saved_is_gone(store: Store) -> None:
    saved = SavedConversion(ConversionEvent(START, SHOP, SHOP, 0), START + DAY, frozenset({PUBLISHER}))
    with pytest.raises(KeyError), store.transaction():
        store.conversions.save(saved)
        raise KeyError
    with store.transaction():
        assert list(store.conversions.all()) == []


def test_a_file_that_a_newer_program_changed_meanwhile_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "device.db"
    SqliteStore.create(path, epoch_length=WEEK)
    with closing(SqliteStore.open(path, epoch_length=WEEK, clock=lambda: START)) as store:
        with closing(sqlite3.connect(path)) as newer:
            newer.execute(f"PRAGMA user_version = {schema.VERSION + 1}")
        with raises(ErrorKind.UNKNOWN_VERSION, DatabaseError), store.transaction():
            pass


def test_limits_know_the_advertisers_quota() -> None:
    with fresh_store(Kind.MEMORY) as store:
        bob = Bob(store, advertiser_quota=300_000).buy(0.5)
        assert [bob.at(1.2).label(), bob.label()] == [(2, 0, 1), (0, 0, 0)]


def test_a_request_with_names_cannot_be_used_for_labels() -> None:
    """The page of the display side takes its own options alone."""
    with fresh_store(Kind.MEMORY) as store:
        device: Device[tuple[int, ...]] = Device(store, PlainSeal(), clock=lambda: START)
        request = AttributionRequest((0,), epsilon=1.0, buckets=1, value=1, query_sensitivity=1)
        assert device.measure(SHOP, request) == (0,)

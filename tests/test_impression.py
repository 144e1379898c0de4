"""Impressions: what may be saved, and which a conversion may look at; the same in memory and in SQL."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from device.errors import DOMException, RangeError
from device.impression import Impression, ImpressionOptions, SavedImpression, Selection
from device.limits import DeviceLimits
from device.memory_store import MemoryStore
from device.sqlite_store import SqliteStore
from protocol.seconds import DAY

LIMITS = DeviceLimits(max_histogram_size=5, max_conversion_sites=3, max_conversion_callers=3)
SITES = ["a.example", "b.example", "aa.example"]


def save(**options: Any) -> SavedImpression:
    return ImpressionOptions(**{"histogram_index": 0, **options}).saved("a.example", "b.example", 1000, LIMITS)


def test_defaults() -> None:
    saved = save(histogram_index=4)
    assert saved.impression == Impression(1000, "a.example", "b.example", 4, 0, 0)
    assert saved.expires == 1000 + 30 * DAY
    assert saved.conversion_sites == saved.conversion_callers == frozenset()


@pytest.mark.parametrize(
    "options",
    [
        {"histogram_index": 5},
        {"histogram_index": -1},
        {"histogram_index": 2**64},
        {"lifetime_days": 0},
        {"lifetime_days": -1},
        {"match_value": -1},
        {"match_value": 2**32},
        {"priority": 2**31},
        {"priority": -(2**31) - 1},
        {"conversion_sites": ["a.example"] * 4},
        {"conversion_callers": ["a.example"] * 4},
        {"conversion_sites": [":"] * 4},
        {"histogram_index": 5, "conversion_sites": [":"]},
        {"lifetime_days": 0, "conversion_callers": [":"]},
    ],
)
def test_range_errors(options: dict[str, Any]) -> None:
    with pytest.raises(RangeError):
        save(**options)


@pytest.mark.parametrize("option", ["conversion_sites", "conversion_callers"])
def test_malformed_sites_are_syntax_errors(option: str) -> None:
    with pytest.raises(DOMException, match="not a domain name"):
        save(**{option: ["a.example", ":"]})


def test_extremes_are_allowed() -> None:
    saved = save(match_value=2**32 - 1, priority=-(2**31), lifetime_days=10**15)
    assert saved.expires == 1000 + LIMITS.max_lookback
    assert saved.impression.priority == -(2**31)


def test_sites_of_lists_are_registrable_domains() -> None:
    assert save(conversion_sites=["www.a.example", "a.example"]).conversion_sites == {"a.example"}


def select(**changes: Any) -> Selection:
    base = {"since": 0, "until": 10_000, "now": 2000, "conversion_site": "c.example", "conversion_caller": "c.example"}
    return Selection(**{**base, **changes})


def test_expiry_and_window_edges() -> None:
    saved = save(lifetime_days=1)
    last = 1000 + DAY
    assert select(now=last).accepts(saved)
    assert not select(now=last + 1).accepts(saved)
    assert select(since=1000, until=1001).accepts(saved)
    assert not select(since=1001).accepts(saved)
    assert not select(until=1000).accepts(saved)


def test_the_queriers_own_events_can_be_hidden() -> None:
    assert not select(hidden_site="a.example").accepts(save())
    assert select(hidden_site="b.example").accepts(save())


sites = st.sampled_from(SITES)
some = st.frozensets(sites, max_size=2)
saved_impressions = st.builds(
    SavedImpression,
    st.builds(Impression, st.integers(0, 20), sites, sites, st.integers(0, 4), st.integers(0, 2), st.integers(-1, 1)),
    st.integers(0, 40),
    some,
    some,
)
selections = st.builds(
    Selection,
    since=st.integers(0, 10),
    until=st.integers(5, 25),
    now=st.integers(0, 40),
    conversion_site=sites,
    conversion_caller=sites,
    match_values=st.frozensets(st.integers(0, 2), max_size=2),
    impression_sites=some,
    impression_callers=some,
    hidden_site=st.sampled_from(["", *SITES]),
)


class Undo(Exception):
    """Ends a transaction so that nothing of it stays."""


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SqliteStore]:
    path = tmp_path_factory.mktemp("device") / "device.db"
    SqliteStore.create(path, epoch_length=7 * DAY)
    store = SqliteStore.open(path, epoch_length=7 * DAY, clock=lambda: 0)
    yield store
    store.close()


@given(
    impressions=st.lists(saved_impressions, max_size=12),
    asked=st.lists(selections, min_size=1, max_size=6),
    cleared=sites,
)
def test_memory_and_database_find_the_same(
    impressions: list[SavedImpression], asked: list[Selection], cleared: str, database: SqliteStore
) -> None:
    memory = MemoryStore(debug=True)

    def compare() -> None:
        assert [memory.matching(one) for one in asked] == [database.matching(one) for one in asked]
        assert sorted(memory.census(5, 15)) == sorted(database.census(5, 15))

    with suppress(Undo), database.transaction():
        for saved in impressions:
            memory.save(saved)
            database.save(saved)
        compare()
        for store in (memory, database):
            store.clear_caller(cleared)
        compare()
        for store in (memory, database):
            store.evict_oldest_between(5, 15, 2)
        compare()
        for store in (memory, database):
            store.forget({cleared})
        compare()
        raise Undo

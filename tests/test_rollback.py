"""Rollback: nothing that happens to a device or its database makes budget reappear.

Restoring, copying, setting the clock back or forward, evicting, clearing, forgetting, pruning, in any order. The check
does not trust the database: an account outside it adds up what was ever paid, by epoch in real time.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from device.device import Device
from device.impression import ImpressionOptions
from device.instance import token_path
from device.limits import DeviceLimits
from device.privacy_filter import EMPTIED, FilterKind, FilterOwner, PrivacyFilter, capacities
from device.report import PlainSeal
from device.sqlite_store import SqliteStore
from protocol.seconds import DAY
from tests.support.small_worlds import NOW, QUERIER, WEEK, Clock, PlainDevice, fixed_coins, quick_folder, w3c

LIMITS = DeviceLimits(max_impressions_per_epoch=3)
ALL_OF_IT = w3c(2, lookback_days=30)
NULL = (0, 0)


class Person:
    """A device on disk that can be shut down, copied and brought back, with an account of what it ever paid."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.clock = Clock(NOW)
        self.ever_paid: Counter[tuple[FilterOwner, int]] = Counter()
        SqliteStore.create(path, epoch_length=LIMITS.epoch_length, debug=True)
        self.start()

    def start(self) -> None:
        self.store = SqliteStore.open(self.path, epoch_length=LIMITS.epoch_length, clock=self.clock)
        self.device: PlainDevice = Device(self.store, PlainSeal(), clock=self.clock, limits=LIMITS, coins=fixed_coins())

    def show(self) -> None:
        """An impression, now."""
        self.device.save_impression("news.example", ImpressionOptions(0))

    def convert(self, site: str = QUERIER) -> tuple[int, ...]:
        """A conversion, now, that asks for a site's whole budget; what it costs goes on the account."""
        before = self.paid()
        report = self.device.measure_conversion(site, ALL_OF_IT)
        self.ever_paid += self.paid() - before
        return report

    def paid(self) -> Counter[tuple[FilterOwner, int]]:
        """What the filters say, by owner and the second that an epoch begins in. Emptied ones paid nothing."""
        with self.store.transaction():
            start = self.store.epoch_start or 0
            ledgers = dict(self.store.filters())
        entries = ((owner, *entry) for owner, ledger in ledgers.items() for entry in ledger.entries())
        return Counter({(owner, start + e * WEEK): amount for owner, e, amount in entries if amount < EMPTIED})

    def overspent(self) -> list[tuple[FilterOwner, int]]:
        """Filters that have paid more than they hold, over the whole life of the device."""
        capacity = capacities(LIMITS)
        return [key for key, amount in self.ever_paid.items() if amount > capacity[key[0].kind]]

    def backup(self, to: Path) -> None:
        """What a backup program sees: the database alone, at rest."""
        self.store.close()
        shutil.copyfile(self.path, to)
        self.start()

    def restore(self, saved: Path) -> None:
        self.store.close()
        shutil.copyfile(saved, self.path)
        self.start()


@contextmanager
def someone() -> Iterator[Person]:
    with quick_folder() as folder:
        person = Person(folder / "device.db")
        try:
            yield person
        finally:
            person.store.close()


@pytest.fixture
def person() -> Iterator[Person]:
    with someone() as person:
        yield person


@pytest.fixture
def tmp_path(person: Person) -> Path:
    """Beside the database, on the same file system."""
    return person.path.parent


def test_a_spent_epoch_stays_spent(person: Person) -> None:
    """What all the others build on."""
    person.show()
    assert person.convert() == (1, 0)
    assert person.convert() == NULL
    assert not person.overspent()


def test_a_restored_database_pays_nothing_for_the_past(person: Person, tmp_path: Path) -> None:
    person.show()
    person.backup(tmp_path / "backup.db")
    assert person.convert() == (1, 0)
    person.restore(tmp_path / "backup.db")
    assert person.convert() == NULL
    # The device is not broken by it: from the next epoch on it measures again.
    person.clock.now += WEEK
    person.show()
    assert person.convert() == (1, 0)
    assert not person.overspent()


def test_a_restored_database_stays_closed_when_opened_again(person: Person, tmp_path: Path) -> None:
    person.show()
    person.backup(tmp_path / "backup.db")
    person.restore(tmp_path / "backup.db")
    person.store.close()
    person.start()
    assert person.convert() == NULL


def test_a_backup_taken_while_the_device_runs_is_known_too(person: Person, tmp_path: Path) -> None:
    """With its write-ahead log, as a program that copies files sees it."""
    person.show()
    log = person.path.with_name(person.path.name + "-wal")
    shutil.copyfile(person.path, tmp_path / "backup.db")
    shutil.copyfile(log, tmp_path / "backup.db-wal")
    assert person.convert() == (1, 0)
    person.store.close()
    shutil.copyfile(tmp_path / "backup.db", person.path)
    shutil.copyfile(tmp_path / "backup.db-wal", log)
    person.start()
    assert person.convert() == NULL
    assert not person.overspent()


def test_a_database_moved_away_and_back_pays_nothing_for_the_past(person: Person, tmp_path: Path) -> None:
    """By renaming: the bytes are the device's own, an older state of them."""
    person.show()
    person.backup(tmp_path / "older.db")
    assert person.convert() == (1, 0)
    person.store.close()
    (tmp_path / "older.db").rename(person.path)
    person.start()
    assert person.convert() == NULL


@pytest.mark.parametrize("with_token", [False, True])
def test_a_copied_database_pays_nothing_for_the_past(person: Person, tmp_path: Path, with_token: bool) -> None:
    """The copy is another device; the first one goes on as before."""
    person.show()
    copy = tmp_path / "copy.db"
    person.backup(copy)
    if with_token:
        shutil.copyfile(token_path(person.path), token_path(copy))
    other = SqliteStore.open(copy, epoch_length=LIMITS.epoch_length, clock=person.clock)
    twin: PlainDevice = Device(other, PlainSeal(), clock=person.clock, limits=LIMITS)
    assert twin.measure_conversion(QUERIER, ALL_OF_IT) == NULL
    assert person.convert() == (1, 0)
    other.close()


def test_a_database_without_its_token_pays_nothing_for_the_past(person: Person) -> None:
    person.show()
    person.store.close()
    token_path(person.path).unlink()
    person.start()
    assert person.convert() == NULL


def test_an_ordinary_restart_costs_nothing(person: Person) -> None:
    """Closing and opening is no rollback."""
    person.show()
    for _ in range(3):
        person.store.close()
        person.start()
    assert person.convert() == (1, 0)


def test_a_clock_set_back_finds_no_fresh_budget(person: Person) -> None:
    """Neither within reach, where the filters remember, nor beyond it, where the barrier does."""
    person.show()
    assert person.convert() == (1, 0)
    person.clock.now += 10 * WEEK
    person.show()
    assert person.convert() == (1, 0)
    for back in (10 * WEEK, 12 * WEEK, 0):
        person.clock.now = NOW + 10 * WEEK - back
        person.show()
        assert person.convert() == NULL
    assert not person.overspent()


def test_a_clock_set_far_ahead_closes_what_it_forgot(person: Person) -> None:
    person.show()
    assert person.convert() == (1, 0)
    person.clock.now += 500 * WEEK
    person.convert()
    person.clock.now = NOW
    person.show()
    assert person.convert() == NULL
    assert not person.overspent()


def test_forgetting_under_a_clock_set_back_gives_nothing_back(person: Person) -> None:
    """The clearing happens before what was spent, by the clock; the record of spending must not go unbarred."""
    person.show()
    assert person.convert() == (1, 0)
    person.clock.now = NOW - 4 * WEEK
    person.device.clear_browsing_history(forget_visits=True)
    person.clock.now = NOW
    person.show()
    assert person.convert() == NULL
    assert not person.overspent()


def test_restoring_under_a_clock_set_back_gives_nothing_back(person: Person, tmp_path: Path) -> None:
    """What the device has seen of time is kept beside the database too."""
    person.show()
    person.backup(tmp_path / "backup.db")
    assert person.convert() == (1, 0)
    person.clock.now = NOW - 4 * WEEK
    person.restore(tmp_path / "backup.db")
    person.clock.now = NOW
    person.show()
    assert person.convert() == NULL
    assert not person.overspent()


@pytest.mark.parametrize(
    "clear",
    [
        lambda device: device.clear_impressions_for_site("news.example"),
        lambda device: device.clear_impressions_for_site(QUERIER),
        lambda device: device.clear_browsing_history([QUERIER], forget_visits=False),
        lambda device: device.clear_browsing_history([QUERIER], forget_visits=True),
        lambda device: device.clear_browsing_history(["other.example"], forget_visits=True),
        lambda device: device.clear_browsing_history(forget_visits=True),
        lambda device: device.clear_browsing_history(forget_visits=False),
        lambda device: (device.disable(), device.enable()),
    ],
)
def test_clearing_gives_nothing_back(person: Person, clear: Callable[[PlainDevice], object]) -> None:
    person.show()
    assert person.convert() == (1, 0)
    clear(person.device)
    person.show()
    assert person.convert() == NULL
    assert not person.overspent()


def test_eviction_gives_nothing_back(person: Person) -> None:
    """A full epoch loses its oldest impressions, never its spending, and no other epoch loses anything."""
    person.clock.now -= WEEK
    person.show()
    person.clock.now += WEEK
    person.show()
    assert person.convert() == (1, 0)
    spent = person.paid()
    for _ in range(10):
        person.clock.now += 1
        person.show()
    assert person.convert() == NULL
    assert person.paid() == spent


def test_pruning_gives_nothing_back(person: Person) -> None:
    """Epochs out of reach are deleted behind the barrier, and their deletion is final."""
    person.show()
    assert person.convert() == (1, 0)
    for _ in range(12):
        person.clock.now += WEEK
        person.convert("store.example")
    assert FilterOwner(FilterKind.SITE, QUERIER) not in {owner for owner, _ in person.paid()}
    person.clock.now = NOW
    person.show()
    assert person.convert() == NULL
    assert not person.overspent()


def test_a_filter_that_forgot_is_not_asked_again() -> None:
    """The ledger itself: what is dropped is gone, so only the barrier stands before it."""
    ledger = PrivacyFilter()
    ledger.consume(5, 7)
    ledger.forget_before(6)
    assert ledger.spent(5) == 0 and not list(ledger.entries())


HAPPENINGS = st.one_of(
    st.just("show"),
    st.just("convert"),
    st.just("convert elsewhere"),
    st.integers(-60 * DAY, 60 * DAY),
    st.sampled_from(["backup", "restore", "forget", "forget one", "empty", "clear", "restart", "off and on"]),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(HAPPENINGS, min_size=5, max_size=25))
def test_no_sequence_of_happenings_overspends(happenings: list[str | int]) -> None:
    """Any order of all of the above. The account is kept by real time, outside the database."""
    with someone() as person:
        backup = person.path.with_name("backup.db")
        for happening in ["show", "convert", *happenings, "show", "convert"]:
            happen(person, backup, happening)
            assert not person.overspent()


def happen(person: Person, backup: Path, happening: str | int) -> None:
    match happening:
        case int():
            person.clock.now += happening
        case "show":
            person.show()
        case "convert":
            person.convert()
        case "convert elsewhere":
            person.convert("store.example")
        case "backup":
            person.backup(backup)
        case "restore" if backup.exists():
            person.restore(backup)
        case "forget":
            person.device.clear_browsing_history(forget_visits=True)
        case "forget one":
            person.device.clear_browsing_history([QUERIER], forget_visits=True)
        case "empty":
            person.device.clear_browsing_history([QUERIER], forget_visits=False)
        case "clear":
            person.device.clear_impressions_for_site("news.example")
        case "restart":
            person.store.close()
            person.start()
        case "off and on":
            person.device.disable()
            person.convert()
            person.device.enable()

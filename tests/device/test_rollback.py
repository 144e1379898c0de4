"""Rollback: nothing that happens to a device or its database makes budget reappear.

Restoring, copying, setting the clock back or forward, evicting, clearing, forgetting, pruning, in any order. The check
does not trust the database: an account outside it adds up what was ever paid, by epoch in real time.

kill -9 at any moment: never a report without its charge, never a charge applied twice, nothing half written.

A child process measures conversions on a durable database and says which reports it returned. It is ended before
every single SQL statement of a call, around the commit, around sealing, and hundreds of times at random; then the
parent opens the database and compares filters, log and reports.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.experiments.small_worlds import NOW, QUERIER, START, WEEK, Clock, PlainDevice, fixed_coins, w3c
from device.budget import EMPTIED, FilterKind, FilterOwner, capacities
from device.device import Device
from device.events import ImpressionOptions
from device.limits import DeviceLimits
from device.report import PlainSeal
from device.request import CheckedRequest
from device.stores.instance import InstanceToken, token_path
from device.stores.sqlite_store import SqliteStore
from device.stores.storage import ReportRecord
from protocol.units import DAY
from tests.support.small_worlds import quick_folder

LIMITS = DeviceLimits(max_impressions_per_epoch=3)
ALL_OF_IT = w3c(2, lookback_days=30)
NULL = (0, 0)


class Person:
    """A durable device that can be shut down, copied and restored, with an account of all it has paid."""

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


def test_both_files_copied_at_rest_pay_nothing_for_the_past(person: Person, tmp_path: Path) -> None:
    """The copy has the token and its latest counter, but it is another file: else each of the two had the budget."""
    person.show()
    person.store.close()
    copy = tmp_path / "copy.db"
    shutil.copyfile(person.path, copy)
    shutil.copyfile(token_path(person.path), token_path(copy))
    person.start()
    with closing(SqliteStore.open(copy, epoch_length=LIMITS.epoch_length, clock=person.clock)) as other:
        twin: PlainDevice = Device(other, PlainSeal(), clock=person.clock, limits=LIMITS)
        assert twin.measure_conversion(QUERIER, ALL_OF_IT) == NULL
    assert person.convert() == (1, 0)


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


@pytest.mark.parametrize("restarts", [0, 2])
def test_restoring_under_a_clock_set_back_gives_nothing_back(person: Person, tmp_path: Path, restarts: int) -> None:
    """What the device has seen of time is kept beside the database too, also when it is opened again and again."""
    person.show()
    person.backup(tmp_path / "backup.db")
    assert person.convert() == (1, 0)
    for _ in range(restarts):
        person.store.close()
        person.start()
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


CRASH_LIMITS = DeviceLimits()
# A charge of ten thousand micro-epsilons to each of two epochs, of a million: a hundred reports exhaust them.
ASKED = w3c(2, epsilon=0.01)
CHARGE = 10_000
BUDGET = CRASH_LIMITS.site_budget


@pytest.fixture
def database() -> Iterator[Path]:
    """A device with an impression in each of two epochs."""
    with quick_folder() as folder:
        path = folder / "device.db"
        SqliteStore.create(path, epoch_length=CRASH_LIMITS.epoch_length, debug=True)
        clock = Clock()
        with closing(SqliteStore.open(path, epoch_length=CRASH_LIMITS.epoch_length, clock=clock)) as store:
            with store.transaction():
                store.fix_epoch_start(START)
            for clock.now in (NOW - WEEK, NOW):
                device_on(store, clock).save_impression("news.example", ImpressionOptions(0))
        yield path


def opened(path: Path) -> SqliteStore:
    return SqliteStore.open(path, epoch_length=CRASH_LIMITS.epoch_length, clock=Clock())


def device_on(store: SqliteStore, clock: Clock | None = None, seal: PlainSeal | None = None) -> PlainDevice:
    return Device(store, seal or PlainSeal(), clock=clock or Clock(), limits=CRASH_LIMITS, coins=fixed_coins())


@dataclass(frozen=True, slots=True)
class DyingSeal(PlainSeal):
    """Ends the process before it seals, or after."""

    after: bool = False
    reveals: bool = field(default=True, init=False)

    def prepare(
        self, conversion: CheckedRequest, now: int, *, debug: bool
    ) -> Callable[[Sequence[int]], tuple[int, ...]]:
        def seal(numbers: Sequence[int]) -> tuple[int, ...]:
            if not self.after:
                die()
            report = tuple(numbers)
            die()
            return report

        return seal


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def in_child(work: Callable[[Callable[[bytes], object]], None]) -> tuple[bytes, bool]:
    """Run `work` in a process of its own: what it said before its end, and whether it came to its own end."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(read)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            work(lambda said: os.write(write, said))
            os._exit(0)
        finally:
            os._exit(1)
    os.close(write)
    with os.fdopen(read, "rb") as said:
        words = said.read()
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return words, not os.WIFSIGNALED(status)


@dataclass(frozen=True)
class Account:
    """What a database says after a crash."""

    spent: tuple[int, int]
    spent_by_all: tuple[int, int]
    log: Sequence[ReportRecord]
    barrier: int | None

    @classmethod
    def of(cls, path: Path) -> Account:
        with closing(opened(path)) as store, store.transaction():
            owners = [FilterOwner(FilterKind.SITE, QUERIER), FilterOwner(FilterKind.GLOBAL, "")]
            ledgers = store.filters_of(owners)
            own, everyone = ((ledgers[owner].spent(0), ledgers[owner].spent(1)) for owner in owners)
            return cls(own, everyone, store.reports(), store.barrier)

    def check(self) -> None:
        """Filters and log agree to the last micro-epsilon, and the database knows that it is still the same one."""
        logged: Counter[int] = Counter()
        for record in self.log:
            for entry in record.epochs:
                logged[entry.epoch] += entry.paid
        assert (logged[0], logged[1]) == self.spent == self.spent_by_all
        assert self.spent[0] <= BUDGET and self.spent[0] % CHARGE == 0
        # A crash is no rollback: the barrier is where pruning put it, or nowhere yet, and never at now.
        assert self.barrier is None or self.barrier < START


def check_step(before: Account, after: Account, said: bytes) -> None:
    """Between two crashes: as many reports as were returned, or one more that was under way."""
    after.check()
    real = said.count(b"1")
    assert len(after.log) - len(before.log) - len(said) in (0, 1)
    for spent_before, spent_after in zip(before.spent, after.spent, strict=True):
        assert (spent_after - spent_before) // CHARGE - real in (0, 1)


def say(report: Sequence[int]) -> bytes:
    return b"1" if any(report) else b"0"


def test_before_every_statement_of_a_call(database: Path) -> None:
    """All of them, one crash each, until a call survives. No report leaves; nothing is charged before the commit."""
    for planned in itertools.count(1):
        before = Account.of(database)

        def measure(tell: Callable[[bytes], object], planned: int = planned) -> None:
            store = opened(database)
            device = device_on(store)
            statements = itertools.count(1)
            store._connection.set_trace_callback(lambda _: die() if next(statements) == planned else None)
            tell(say(device.measure_conversion(QUERIER, ASKED)))

        said, survived = in_child(measure)
        after = Account.of(database)
        check_step(before, after, said)
        if survived:
            assert said == b"1"
            # BEGIN, state, impressions, filters, log, counter, COMMIT: there were that many moments at least.
            assert planned > 7
            return
        assert said == b"" and after == before


@pytest.mark.parametrize("moment", ["before the token", "after the token", "before sealing", "after sealing"])
def test_after_the_commit(database: Path, moment: str) -> None:
    """The charge is durable, the report is lost: that costs the person budget, and no one learns anything."""
    before = Account.of(database)

    def measure(tell: Callable[[bytes], object]) -> None:
        store = opened(database)
        seal = DyingSeal(after=moment == "after sealing") if "sealing" in moment else PlainSeal()
        device = device_on(store, seal=seal)
        follow = InstanceToken.follow

        def dying(instance: InstanceToken, token: bytes, counter: int) -> None:
            if moment == "before the token":
                die()
            follow(instance, token, counter)
            if moment == "after the token":
                die()

        InstanceToken.follow = dying  # type: ignore[method-assign,assignment]  # in the child alone, which dies
        tell(say(device.measure_conversion(QUERIER, ASKED)))

    said, survived = in_child(measure)
    after = Account.of(database)
    assert not survived and said == b""
    check_step(before, after, said)
    assert after.spent == (CHARGE, CHARGE) and len(after.log) == 1


def test_at_hundreds_of_random_moments(database: Path) -> None:
    """A timer ends the child, at a random microsecond, wherever it then is; SIGALRM by default is as final as -9.

    The budget runs out on the way, so both kinds of report are tried. No assertion here depends on the moments.
    """
    generator = np.random.default_rng(20_240_901)
    account = Account.of(database)
    returned = b""
    for delay in generator.uniform(0.0002, 0.012, size=100):

        def measure(tell: Callable[[bytes], object], delay: float = delay) -> None:
            with closing(opened(database)) as store:
                device = device_on(store)
                signal.setitimer(signal.ITIMER_REAL, delay)
                while True:
                    tell(say(device.measure_conversion(QUERIER, ASKED)))

        said, survived = in_child(measure)
        assert not survived
        previous, account = account, Account.of(database)
        check_step(previous, account, said)
        returned += said
    # Never more real reports than the budget pays for, however often the device died.
    assert returned.count(b"1") * CHARGE <= account.spent[0] <= BUDGET
    with closing(opened(database)) as store:
        assert any(device_on(store).measure_conversion(QUERIER, ASKED)) == (account.spent[0] < BUDGET)


@pytest.mark.parametrize("forget", [False, True])
def test_clearing_is_whole_or_not_at_all(database: Path, forget: bool) -> None:
    """Killed before every statement: spending and barrier change together, or not at all.

    After the commit only the log is truncated, so a kill there finds the history cleared.
    """
    with closing(opened(database)) as store:
        assert any(device_on(store).measure_conversion(QUERIER, ASKED))
    untouched = Account.of(database)
    for planned in itertools.count(1):

        def clear(tell: Callable[[bytes], object], planned: int = planned) -> None:
            store = opened(database)
            statements = itertools.count(1)
            store._connection.set_trace_callback(lambda _: die() if next(statements) == planned else None)
            device_on(store).clear_browsing_history([QUERIER], forget_visits=forget)

        _, survived = in_child(clear)
        after = Account.of(database)
        cleared = after.spent == (0, 0) and after.barrier == NOW if forget else after.spent[0] > BUDGET
        if survived:
            assert cleared and planned > 3
            return
        assert after == untouched or cleared


def test_creating_is_whole_or_not_at_all() -> None:
    """Killed before every statement of making a database: there is none, or a good one."""
    with quick_folder() as folder:
        for planned in itertools.count(1):
            path = folder / f"{planned}.db"

            def create(tell: Callable[[bytes], object], path: Path = path, planned: int = planned) -> None:
                statements = itertools.count(1)
                connect = sqlite3.connect

                def traced(*arguments: object, **options: object) -> sqlite3.Connection:
                    connection = connect(*arguments, **options)  # type: ignore[call-overload]  # passed through
                    connection.set_trace_callback(lambda _: die() if next(statements) == planned else None)
                    return connection  # type: ignore[no-any-return]  # as above

                sqlite3.connect = traced  # type: ignore[assignment]  # in the child alone, which dies
                SqliteStore.create(path, epoch_length=CRASH_LIMITS.epoch_length, debug=True)

            _, survived = in_child(create)
            if survived:
                assert Account.of(path).log == []
                assert planned > 5
                return
            assert not path.exists()

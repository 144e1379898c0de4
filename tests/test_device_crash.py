"""kill -9 at any moment: never a report without its charge, never a charge applied twice, nothing half written.

A child process measures conversions on a durable database and says which reports it handed out. It is ended before
every single SQL statement of a call, around the commit, around sealing, and hundreds of times at random; then the
parent opens the database and compares filters, log and reports.
"""

from __future__ import annotations

import itertools
import os
import signal
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from device.checked_request import CheckedRequest
from device.device import Device
from device.impression import ImpressionOptions
from device.instance import InstanceToken
from device.limits import DeviceLimits
from device.privacy_filter import FilterKind, FilterOwner
from device.report import PlainSeal
from device.sqlite_store import SqliteStore
from device.storage import ReportRecord
from tests.support.small_worlds import NOW, QUERIER, START, WEEK, Clock, PlainDevice, fixed_coins, quick_folder, w3c

LIMITS = DeviceLimits()
# A charge of ten thousand micro-epsilons to each of two epochs, of a million: a hundred reports exhaust them.
ASKED = w3c(2, epsilon=0.01)
CHARGE = 10_000
BUDGET = LIMITS.site_budget


@pytest.fixture
def database() -> Iterator[Path]:
    """A device with an impression in each of two epochs."""
    with quick_folder() as folder:
        path = folder / "device.db"
        SqliteStore.create(path, epoch_length=LIMITS.epoch_length, debug=True)
        clock = Clock()
        with closing(SqliteStore.open(path, epoch_length=LIMITS.epoch_length, clock=clock)) as store:
            with store.transaction():
                store.fix_epoch_start(START)
            for clock.now in (NOW - WEEK, NOW):
                device_on(store, clock).save_impression("news.example", ImpressionOptions(0))
        yield path


def opened(path: Path) -> SqliteStore:
    return SqliteStore.open(path, epoch_length=LIMITS.epoch_length, clock=Clock())


def device_on(store: SqliteStore, clock: Clock | None = None, seal: PlainSeal | None = None) -> PlainDevice:
    return Device(store, seal or PlainSeal(), clock=clock or Clock(), limits=LIMITS, coins=fixed_coins())


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
    log: Sequence[ReportRecord]
    barrier: int | None

    @classmethod
    def of(cls, path: Path) -> Account:
        with closing(opened(path)) as store, store.transaction():
            ledger = store.filters_of([FilterOwner(FilterKind.SITE, QUERIER)])[FilterOwner(FilterKind.SITE, QUERIER)]
            return cls((ledger.spent(0), ledger.spent(1)), store.reports(), store.barrier)

    def check(self) -> None:
        """Filters and log agree to the last micro-epsilon, and the database knows that it is still the same one."""
        logged: Counter[int] = Counter()
        for record in self.log:
            for entry in record.epochs:
                logged[entry.epoch] += entry.paid
        assert (logged[0], logged[1]) == self.spent
        assert self.spent[0] <= BUDGET and self.spent[0] % CHARGE == 0
        # A crash is no rollback: the barrier is where pruning put it, or nowhere yet, and never at now.
        assert self.barrier is None or self.barrier < START


def check_step(before: Account, after: Account, said: bytes) -> None:
    """Between two crashes: as many reports as were handed out, or the one more that was on its way."""
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
    """The charge is on disk, the report is gone: that costs the person something, and nobody learns anything."""
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
    handed_out = b""
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
        handed_out += said
    # Never more real reports than the budget pays for, however often the device died.
    assert handed_out.count(b"1") * CHARGE <= account.spent[0] <= BUDGET
    with closing(opened(database)) as store:
        assert any(device_on(store).measure_conversion(QUERIER, ASKED)) == (account.spent[0] < BUDGET)


@pytest.mark.parametrize("forget", [False, True])
def test_clearing_is_whole_or_not_at_all(database: Path, forget: bool) -> None:
    """History cleared before every statement: spending and barrier change together."""
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
        if survived:
            assert after.spent == (0, 0) and after.barrier == NOW if forget else after.spent[0] > BUDGET
            return
        assert after == untouched


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
                SqliteStore.create(path, epoch_length=LIMITS.epoch_length, debug=True)

            _, survived = in_child(create)
            if survived:
                assert Account.of(path).log == []
                assert planned > 5
                return
            assert not path.exists()

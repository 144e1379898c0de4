"""Stores: durable, atomic, private to their owner, and never fooled by an older copy of themselves."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from device.coins import DeviceCoins
from device.conversion import ConversionOptions
from device.conversion_event import ConversionEvent, SavedConversion
from device.device import Device
from device.errors import DatabaseError, DatabaseUnavailable
from device.impression import Impression, ImpressionOptions, SavedImpression
from device.instance import token_path
from device.limits import TREFOIL_SERVICE, DeviceLimits
from device.privacy_filter import FilterKind, FilterOwner
from device.report import PlainSeal
from device.schema import APPLICATION_ID, VERSION
from device.sqlite_store import SqliteStore
from device.storage import EpochEntry, EpochOutcome, ReportRecord, Store
from protocol.errors import TrefoilError
from protocol.seconds import DAY

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


def test_creating_never_replaces(database: Path) -> None:
    before = database.read_bytes()
    with pytest.raises(TrefoilError, match="exists already"):
        make(database)
    assert database.read_bytes() == before
    assert [path.name for path in database.parent.iterdir() if "new" in path.name] == []


def test_creating_where_one_cannot(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TrefoilError, match="cannot create"):
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
    newer = bytearray(good)
    newer[60:64] = (VERSION + 1).to_bytes(4, "big")
    yield "newer", bytes(newer)
    foreign = bytearray(good)
    foreign[68:72] = (APPLICATION_ID + 1).to_bytes(4, "big")
    yield "foreign", bytes(foreign)


def test_damaged_newer_and_foreign_files_are_left_as_they_are(database: Path, tmp_path: Path) -> None:
    for name, data in damaged_files(database):
        path = tmp_path / f"{name}.db"
        path.write_bytes(data)
        with pytest.raises(DatabaseError) as refused, opened(path):
            pass
        assert refused.value.hint, name
        assert path.read_bytes() == data, name
        assert not token_path(path).exists(), name


def test_a_missing_file_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(DatabaseError, match="no device database") as refused, opened(tmp_path / "nowhere.db"):
        pass
    assert "create" in refused.value.hint


def test_epochs_of_another_length_are_refused(database: Path) -> None:
    """Under other epochs every filter would have another number, and start from zero."""
    with pytest.raises(DatabaseError, match="epochs of"):
        SqliteStore.open(database, epoch_length=DAY, clock=lambda: NOW)


def test_a_copied_database_is_closed_up_to_now(database: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.db"
    shutil.copy(database, copy)
    with opened(copy) as device:
        assert ask(device) == 0
    # Also when its token is copied with it: the file is another.
    shutil.copy(token_path(database), token_path(copy))
    again = tmp_path / "again.db"
    shutil.copy(database, again)
    shutil.copy(token_path(database), token_path(again))
    with opened(again) as device:
        assert ask(device) == 0
    with opened(database) as device:
        assert ask(device) == 1


def test_a_restored_database_is_closed_up_to_now(database: Path, tmp_path: Path) -> None:
    backup = database.read_bytes()
    with opened(database) as device:
        assert ask(device, 1.0) == 1
    # In place, so that even the inode is the same.
    with database.open("r+b") as file:
        file.write(backup)
        file.truncate()
    with opened(database) as device:
        assert spent(device) == 0
        assert ask(device) == 0
    next_week = NOW + WEEK
    with opened(database, lambda: next_week) as device:
        device.save_impression("news.example", ImpressionOptions(0))
        assert ask(device) == 1


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


def test_a_database_without_its_token_is_closed_up_to_now(database: Path) -> None:
    token_path(database).unlink()
    with opened(database) as device:
        assert ask(device) == 0


def test_a_new_database_may_be_opened_before_its_maker_has_finished(tmp_path: Path) -> None:
    """Its token is written a moment after the database has its name; nothing was spent yet that could be lost."""
    path = make(tmp_path / "ann.db")
    token_path(path).unlink()
    with opened(path) as device:
        device.save_impression("news.example", ImpressionOptions(0))
        assert ask(device) == 1


def test_a_process_killed_between_commit_and_token_is_no_copy(database: Path) -> None:
    """The counter in the file may be behind the database, never ahead of it."""
    token = token_path(database).read_bytes()
    with opened(database) as device:
        assert ask(device) == 1
    token_path(database).write_bytes(token)
    with opened(database) as device:
        assert ask(device) == 1


def test_a_failed_transaction_leaves_nothing(database: Path) -> None:
    with closing(SqliteStore.open(database, epoch_length=WEEK, clock=lambda: NOW)) as store:
        with pytest.raises(KeyError), store.transaction():
            store.raise_barrier(NOW)
            store.log(ReportRecord(NOW, 1, 1, "a.example", "a.example"))
            raise KeyError
        with store.transaction():
            assert store.barrier is None
            assert store.reports() == []


def test_a_store_is_used_inside_a_transaction_only(database: Path) -> None:
    store = SqliteStore.open(database, epoch_length=WEEK, clock=lambda: NOW)
    with closing(store), pytest.raises(RuntimeError, match="transaction"):
        store.raise_barrier(NOW)


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


def test_every_call_writes_one_record_whatever_happened(database: Path) -> None:
    with opened(database) as device:
        ask(device, 1.0)
        ask(device, 1.0)
        ask(device, site="other.example")
        device.disable()
        ask(device)
        with closing(sqlite3.connect(database)) as connection:
            rows = connection.execute("SELECT length(record) FROM log").fetchall()
    assert len(rows) == 4
    assert len(set(rows)) == 1


def test_threads_cannot_overdraw(database: Path) -> None:
    """Twelve threads ask for a tenth each, three times over: ten succeed."""
    with opened(database) as device:
        reports: list[int] = []

        def run() -> None:
            for _ in range(3):
                reports.append(ask(device))

        threads = [threading.Thread(target=run) for _ in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert len(reports) == 36
        assert sum(reports) == 10
        assert spent(device) == 1_000_000


def _ask_in_process(path: Path, count: int, results: multiprocessing.Queue[int]) -> None:
    with opened(path, wait=30) as device:
        results.put(sum(ask(device) for _ in range(count)))


def test_processes_cannot_overdraw(database: Path) -> None:
    """Four processes ask for a tenth each, five times over: ten succeed."""
    context = multiprocessing.get_context("spawn")
    results: multiprocessing.Queue[int] = context.Queue()
    processes = [context.Process(target=_ask_in_process, args=(database, 5, results)) for _ in range(4)]
    for process in processes:
        process.start()
    assert sum(results.get(timeout=60) for _ in processes) == 10
    for process in processes:
        process.join(30)
    with opened(database) as device:
        assert spent(device) == spent(device, FilterKind.GLOBAL) == 1_000_000


KILLED = """
import sys
from pathlib import Path
from tests.test_storage import ask, opened
with opened(Path(sys.argv[1])) as device:
    while True:
        sys.stdout.write(str(ask(device, 0.000002)))
        sys.stdout.flush()
"""


@pytest.mark.parametrize("delay", [0.0, 0.02, 0.05, 0.11])
def test_kill_9_loses_no_charge_and_charges_nothing_twice(database: Path, delay: float) -> None:
    """Every report that left was charged; at most the one being finished was charged and did not leave."""
    tests = Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": f"{tests}{os.pathsep}{tests.parent}"}
    command = [sys.executable, "-c", KILLED, str(database)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        first = process.stdout.read(1)
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        left = first + process.stdout.read()
    assert set(left) == {ord("1")}
    with opened(database) as device:
        charged = spent(device) // 2
        assert charged - len(left) in (0, 1)
        assert len(device.reports()) == charged
        assert spent(device, FilterKind.GLOBAL) == spent(device, FilterKind.IMPRESSION_SITE) == 2 * charged
        # And the device is still its own: no barrier, the budget goes on where it was.
        assert ask(device, 0.000002) == 1


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


def test_one_call_tidies_up_a_bounded_number_of_rows(tmp_path: Path) -> None:
    """However much is left to do: a call must not take longer because a device was not used for a while."""

    def rows(table: str) -> int:
        return int(store._connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0])  # noqa: S608 - named here

    path = make(tmp_path / "ann.db")
    with closing(SqliteStore.open(path, epoch_length=WEEK, clock=lambda: NOW)) as store, store.transaction():
        for number in range(450):
            site = f"a{number}.example"
            seen = Impression(number, site, site, 0, 0, 0)
            store.save(SavedImpression(seen, NOW, frozenset(), frozenset()))
            event = ConversionEvent(number, site, site, 0)
            store.conversions.save(SavedConversion(event, NOW, frozenset({"news.example"})))
            store.log(ReportRecord(number, 1, 1, site, site))
            store.admit_to_action(site, site, 1, number)
            owner = FilterOwner(FilterKind.SITE, site)
            filters = store.filters_of([owner])
            filters[owner].consume(0, 1)
            store.keep(filters)
        store.evict_oldest_between(0, 1000, 300)
        assert rows("impression") == 250
        tables = ("impression", "conversion", "log", "action", "filter")
        assert [(store.prune(1, 1000), [rows(table) for table in tables]) for _ in range(3)] == [
            (False, [50, 250, 250, 250, 250]),
            (False, [0, 50, 50, 50, 50]),
            (True, [0, 0, 0, 0, 0]),
        ]


def test_every_commit_waits_for_the_disk(database: Path) -> None:
    """FULL is 2: a charge that a power cut takes back is budget that comes back."""
    with closing(SqliteStore.open(database, epoch_length=WEEK, clock=lambda: NOW)) as store:
        assert store._connection.execute("PRAGMA synchronous").fetchone() == (2,)
        assert store._connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)


@pytest.mark.parametrize("clear", ["forget", "clear", "prune"])
def test_what_was_deleted_is_not_left_in_the_file(tmp_path: Path, clear: str) -> None:
    """Whoever finds the disk later finds no trace of a site that was forgotten."""
    path, now = make(tmp_path / "ann.db"), NOW
    with opened(path, lambda: now) as device:
        for bucket in range(20):
            device.save_impression("a-secret-diary.example", ImpressionOptions(bucket))
    assert b"a-secret-diary" in path.read_bytes()
    with opened(path, lambda: now) as device:
        match clear:
            case "forget":
                device.clear_browsing_history(["a-secret-diary.example"], forget_visits=True)
            case "clear":
                device.clear_impressions_for_site("a-secret-diary.example")
            case _:
                now += 10 * WEEK
                ask(device)
    left = b"".join(file.read_bytes() for file in tmp_path.iterdir())
    assert b"a-secret-diary" not in left

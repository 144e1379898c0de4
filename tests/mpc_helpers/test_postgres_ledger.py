"""The ledger on PostgreSQL: one writer for certain, and no connection, process or server that breaks loses a move.

What both engines do alike is in test_report_ledger, test_draws and test_commit_crashes, which run on both.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from mpc_helpers.commands import app
from mpc_helpers.identity.config import ConfigError, PostgresLocation, load_config
from mpc_helpers.identity.membership import load_membership
from mpc_helpers.ledger import database
from mpc_helpers.ledger.attempt import AttemptState, Failpoint, Reservation
from mpc_helpers.ledger.engine import LedgerClosed, LedgerError, LedgerHead
from mpc_helpers.ledger.ledger import QueryRecord, ReportLedger, engine_at
from mpc_helpers.ledger.rebuild import owner_of
from mpc_helpers.ledger.reports import Standing
from mpc_helpers.ledger.share_keys import ShareKeys
from mpc_helpers.local.launcher import Trio, prepare
from mpc_helpers.service import health
from mpc_helpers.service.daemon import PROCESS_FILE
from protocol.batch import sorted_order
from protocol.errors import ErrorKind
from protocol.status import QueryState
from tests.mpc_helpers.test_monitoring import roll_back, until_both_peers_notice
from tests.mpc_helpers.test_report_ledger import release, standing, state
from tests.processes.test_chaos import Cell, outcome
from tests.support.chaos_helper import Fault
from tests.support.chaos_trio import chaos_trio, stop_all
from tests.support.hunt import hunt
from tests.support.ledger_places import configure, put_in_postgres
from tests.support.ledger_samples import NO, OWNER, TIME, YES, hours, name, reservation, reserve
from tests.support.private_postgres import NoSmallDisk, PrivatePostgres, server, why_not
from tests.support.raising import raises
from tests.support.three_helpers import real_now, terms, three_helpers

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())


@pytest.fixture
def location() -> PostgresLocation:
    place = server().location()
    ReportLedger.create(place, OWNER)
    return place


@pytest.fixture
def ledger(location: PostgresLocation) -> Iterator[ReportLedger]:
    opened = ReportLedger(location, OWNER)
    yield opened
    opened.close()


def admin(location: PostgresLocation, statement: str) -> list[Any]:
    """Run a statement in a session of its own, on nobody's behalf."""
    import psycopg

    with psycopg.connect(location.conninfo(), autocommit=True, options=f"-c search_path={location.schema}") as raw:
        cursor = raw.execute(statement.encode())
        return cursor.fetchall() if cursor.description else []


def contents(location: PostgresLocation) -> dict[str, list[Any]]:
    """All rows of all tables, but for the epoch."""
    tables = [
        table
        for (table,) in admin(location, f"SELECT tablename FROM pg_tables WHERE schemaname = '{location.schema}'")  # noqa: S608
    ]
    rows = {table: sorted(admin(location, f"SELECT t::text FROM {table} t")) for table in sorted(tables)}  # noqa: S608
    rows["ledger"] = admin(location, "SELECT watermark FROM ledger")
    return rows


def raise_epoch(location: PostgresLocation) -> None:
    """Another process opened the ledger, and this one's session lives: as after a pause that nobody noticed."""
    admin(location, "UPDATE ledger SET epoch = epoch + 1")


def end_sessions(location: PostgresLocation) -> None:
    engine_at(location).end_other_sessions(OWNER)


# Every transaction that a ledger makes, on one attempt each that is reserved, voted and renounced.
CALLS: dict[str, Callable[[ReportLedger, bytes, bytes, bytes], object]] = {
    "reserve": lambda ledger, *_: reserve(ledger, 9, 1, 90),
    "vote": lambda ledger, reserved, *_: ledger.moves.vote(reserved, b"share"),
    "abort": lambda ledger, reserved, *_: ledger.moves.abort(reserved, ""),
    "release": lambda ledger, _, voted, __: ledger.moves.release(voted, YES),
    "renounce": lambda ledger, _, voted, __: ledger.moves.renounce(voted, NO, ""),
    "free": lambda ledger, _, __, renounced: ledger.moves.free(renounced, NO, ""),
    "keep votes": lambda ledger, _, voted, __: ledger.moves.keep_votes(voted, NO),
    "forget an answer": lambda ledger, *_: ledger.moves.forget_answer(name(4).key),
    "sweep": lambda ledger, *_: ledger.moves.sweep(),
    "record": lambda ledger, *_: ledger.queries.record(QueryRecord(name(8), QueryState.QUEUED, 1)),
    "watermark": lambda ledger, *_: ledger.reports.advance_watermark(TIME),
    "heads": lambda ledger, *_: ledger.peer_heads.save(),
    "forget a peer": lambda ledger, *_: ledger.peer_heads.forget(1),
}


def populate(ledger: ReportLedger) -> tuple[bytes, bytes, bytes]:
    """Make attempts for `CALLS`, and one that is released."""
    ledger.peer_heads.remember(1, LedgerHead(b"p" * 16, 7, b"h" * 32))
    reserved, voted, renounced = (reserve(ledger, rank, 1, 10 * rank) for rank in (1, 2, 3))
    for attempt in (voted, renounced):
        ledger.moves.vote(attempt, b"share")
    ledger.moves.renounce(renounced, NO[:1], "")
    release(ledger, reserve(ledger, 4, 1, 40))
    return reserved, voted, renounced


# The fence.


@pytest.mark.parametrize("fence", [raise_epoch, end_sessions], ids=lambda fence: fence.__name__)
def test_a_process_that_was_fenced_changes_nothing_by_any_call(
    location: PostgresLocation, fence: Callable[[PostgresLocation], None]
) -> None:
    ledger = ReportLedger(location, OWNER)
    attempts = populate(ledger)
    ledger.close()
    before = contents(location)
    for call in CALLS.values():
        stale = ReportLedger(location, OWNER)
        fence(location)
        # Where its session was ended, it learns of that first, and of the fence when it connects again.
        with pytest.raises(LedgerClosed if fence is raise_epoch else LedgerError):
            call(stale, *attempts)
        # Nor later: it has ended as in a crash.
        with pytest.raises(LedgerClosed):
            reserve(stale, 9, 1, 90)
        stale.close()
        assert contents(location) == before


def test_only_the_process_that_holds_a_ledger_writes_to_it(location: PostgresLocation, ledger: ReportLedger) -> None:
    """By hand as little as by a bug that forgot to begin: triggers look for the epoch of the session."""
    import psycopg

    reserve(ledger, 1, 1, 5)
    for statement in (
        "UPDATE attempts SET state = 'aborted'",
        "DELETE FROM reports_20000",
        "UPDATE ledger SET watermark = watermark + 1",
        "UPDATE ledger SET epoch = epoch + 2",
        "UPDATE ledger SET epoch = epoch + 1, watermark = watermark + 1",
        "INSERT INTO days VALUES (30000, 99999999999)",
        "INSERT INTO queries VALUES (sha256('q'), sha256('d'), 'done', 'null', 0)",
        "INSERT INTO peer_heads VALUES (1, decode(repeat('00', 16), 'hex'), 0, sha256('h'))",
        "INSERT INTO votes VALUES (1, 1, 'yes', '')",
        "INSERT INTO moves VALUES (2, 1, 'aborted', sha256('h'))",
        "TRUNCATE reports_20000",
        "TRUNCATE votes",
    ):
        with pytest.raises(psycopg.IntegrityError, match=r"holds a ledger|never emptied"):
            admin(location, statement)


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE ledger SET kind = kind + 1",
        "UPDATE ledger SET version = version + 1",
        "INSERT INTO reports_20000 VALUES ('too short', 1, 0, 0, NULL, 0)",
    ],
)
def test_not_even_the_process_that_holds_a_ledger_changes_its_format(ledger: ReportLedger, statement: str) -> None:
    reserve(ledger, 1, 1, 5)
    with raises(ErrorKind.REFUSED, LedgerError), ledger._database.transaction() as connection:
        connection.execute(statement)


def test_a_take_over_ends_the_sessions_of_its_own_ledger_only(location: PostgresLocation, ledger: ReportLedger) -> None:
    place = server().location()
    ReportLedger.create(place, OWNER)
    with closing(ReportLedger(place, OWNER)) as other:
        assert engine_at(location).end_other_sessions(OWNER) == 1
        reserve(other, 1, 1, 5)


# Processes that die or pause, really.

_COMMITS = [point for point in Failpoint if point.value.endswith("commit")]
# All of them are in `make chaos`.
_ALL = os.environ.get("TREFOIL_CHAOS") == "all"
# Between them a key of a share is written or erased, and a commit says why.
_KEYS = [Failpoint.VOTE_BEFORE_COMMIT, Failpoint.RENOUNCE_AFTER_COMMIT]
_KILLED = _COMMITS if _ALL else [Failpoint.RESERVE_BEFORE_COMMIT, Failpoint.VOTE_AFTER_COMMIT, *_KEYS]
_STOPPED = _COMMITS if _ALL else [Failpoint.RESERVE_BEFORE_COMMIT, Failpoint.RELEASE_BEFORE_COMMIT]
_BROKEN = list(CALLS) if _ALL else ["reserve", "release", "watermark"]
_STATES = {"reserved", "voted", "released", "renounced", "aborted"}


def client(location: PostgresLocation, how: str, failpoint: Failpoint, keys: Path) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-m",
        "tests.support.postgres_client",
        location.url,
        location.schema,
        how,
        failpoint.name,
        str(keys),
    ]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def acknowledged(lines: list[str]) -> dict[int, str]:
    """The last state of each attempt that the process was told is durable."""
    moves = [line.split() for line in lines if line.split()[0] in _STATES]
    return {int(rank): last for last, rank in moves}


@pytest.mark.parametrize("failpoint", _KILLED, ids=lambda point: point.name)
def test_a_client_killed_at_a_failpoint_loses_nothing_that_was_acknowledged(
    location: PostgresLocation, failpoint: Failpoint, tmp_path: Path
) -> None:
    """And after the restart there is a key for each share that is promised, and for no other."""
    process = client(location, "SIGKILL", failpoint, tmp_path)
    lines = process.communicate(timeout=60)[0].split("\n")[:-1]
    assert process.returncode == -signal.SIGKILL
    left = {path.name for path in tmp_path.iterdir()}
    with closing(_reopened(location, tmp_path)) as again:
        check_acknowledged(again, lines)
        assert all(record.state is not AttemptState.RESERVED for record in again.attempts.pending())
        records = [again.attempts.find(bytes([rank, 1]) * 16) for rank in range(1, 6)]
        shares = {record.attempt_id.hex(): record.sealed_share for record in records if record is not None}
        promised = {
            record.attempt_id.hex()
            for record in records
            if record is not None and record.state in (AttemptState.VOTED, AttemptState.RELEASED)
        }
        assert shares == {attempt: b"share" if attempt in promised else None for attempt in shares}
        assert {path.name for path in tmp_path.iterdir()} == promised
        assert (left != promised) == (failpoint in _KEYS)


def check_acknowledged(again: ReportLedger, lines: list[str]) -> None:
    """Check that the ledger is whole, and every attempt in the state that was printed last or a later one."""
    again.verify()
    for rank, last in acknowledged(lines).items():
        now = state(again, bytes([rank, 1]) * 16)
        assert now is not None
        order = [each.value for each in AttemptState]
        # One move later, if the kill came after its commit and before the word of it.
        assert now.value == last or order.index(now.value) > order.index(last)


def _reopened(location: PostgresLocation, keys: Path | None = None) -> ReportLedger:
    """Open after a crash: the server notices a dead client's socket within the time that opening waits."""
    again = ReportLedger(location, OWNER, share_keys=keys)
    again.moves.sweep()
    return again


@pytest.mark.parametrize("failpoint", _STOPPED, ids=lambda point: point.name)
def test_a_client_paused_in_a_transaction_wakes_after_the_failover_and_changes_nothing(
    location: PostgresLocation, failpoint: Failpoint, tmp_path: Path
) -> None:
    process = client(location, "SIGSTOP", failpoint, tmp_path)
    try:
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        # It holds the lock and a transaction; nobody gets in by waiting.
        with raises(ErrorKind.BUSY, LedgerError):
            ReportLedger(location, OWNER)
        assert engine_at(location).end_other_sessions(OWNER) == 1
        with closing(_reopened(location)) as again:
            before = contents(location)
            os.kill(process.pid, signal.SIGCONT)
            lines = process.communicate(timeout=60)[0].split("\n")
            assert lines[-3].startswith("refused"), lines
            assert lines[-2] == f"again: {ErrorKind.FENCED.value}", lines
            assert contents(location) == before
            reserve(again, 7, 1, 70)
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        process.wait(timeout=60)


# Those that a client reaches, each with the state that the commit after it makes durable, and of which attempt.
_IN_COMMIT = {
    Failpoint.RESERVE_BEFORE_COMMIT: (4, AttemptState.RESERVED),
    Failpoint.SWEEP_BEFORE_COMMIT: (4, AttemptState.ABORTED),
    Failpoint.VOTE_BEFORE_COMMIT: (1, AttemptState.VOTED),
    Failpoint.RELEASE_BEFORE_COMMIT: (1, AttemptState.RELEASED),
    Failpoint.GIVE_UP_BEFORE_COMMIT: (2, AttemptState.ABORTED),
    Failpoint.RENOUNCE_BEFORE_COMMIT: (3, AttemptState.RENOUNCED),
    Failpoint.FREE_BEFORE_COMMIT: (3, AttemptState.ABORTED),
}
_REPLIES = [
    (failpoint, reply)
    for failpoint in _IN_COMMIT
    for reply in ("REPLY_KEPT", "REPLY_LOST")
    if _ALL
    or (failpoint, reply)
    in [(Failpoint.VOTE_BEFORE_COMMIT, "REPLY_LOST"), (Failpoint.RELEASE_BEFORE_COMMIT, "REPLY_KEPT")]
]


@pytest.mark.parametrize(("failpoint", "reply"), _REPLIES, ids=lambda each: str(getattr(each, "name", each)))
def test_a_client_paused_between_a_commit_and_its_reply_learns_that_it_is_fenced(
    location: PostgresLocation, failpoint: Failpoint, reply: str, tmp_path: Path
) -> None:
    """Its move is durable, and whoever takes over goes on from it; it itself acknowledges no more than that move."""
    rank, moved = _IN_COMMIT[failpoint]
    process = client(location, reply, failpoint, tmp_path)
    try:
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        attempt = bytes([rank, 1]) * 16
        ((stored,),) = admin(location, f"SELECT state FROM attempts WHERE attempt_id = '\\x{attempt.hex()}'")  # noqa: S608
        assert stored == moved.value
        assert engine_at(location).end_other_sessions(OWNER) == 1
        with closing(_reopened(location)) as again:
            after = AttemptState.ABORTED if moved is AttemptState.RESERVED else moved
            assert state(again, attempt) is after
            before = contents(location)
            os.kill(process.pid, signal.SIGCONT)
            lines = process.communicate(timeout=60)[0].split("\n")[:-1]
            assert lines[-2].startswith("refused"), lines
            assert lines[-1] == f"again: {ErrorKind.FENCED.value}", lines
            assert contents(location) == before
            check_acknowledged(again, lines)
            reserve(again, 7, 1, 70)
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        process.wait(timeout=60)


# `trefoil helper`, which looks after its ledger ten times a second.
_HELPER = (
    "import sys; from mpc_helpers.service import health; from protocol.cli.app import run;"
    "health.LOOK_SECONDS = 0.1; sys.exit(run(['helper', '--config', sys.argv[1]]))"
)


@pytest.mark.parametrize("fence", [raise_epoch, end_sessions], ids=lambda fence: fence.__name__)
def test_a_helper_whose_ledger_was_taken_over_ends_and_is_not_restarted(
    tmp_path: Path, fence: Callable[[PostgresLocation], None]
) -> None:
    trio = prepare(tmp_path, now=real_now(), options={"processes": 0})
    place = server().location()
    config = put_in_postgres(trio, 0, place)
    command = [sys.executable, "-c", _HELPER, str(trio.config_path(0))]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        limit = threading.Timer(60, process.kill)
        limit.start()
        assert any("listens on" in line for line in iter(process.stderr.readline, ""))
        # It resumes its queries first. A connection that is lost while it starts ends it as any error does.
        while not (config.data / PROCESS_FILE).exists() and process.poll() is None:
            time.sleep(0.01)
        if fence is raise_epoch:
            raise_epoch(place)
        else:
            owner = owner_of(load_membership(config, real_now()))
            assert engine_at(place).end_other_sessions(owner) == 1
        before = contents(place)
        log = process.stderr.read()
        assert process.wait(60) == 3, log
        limit.cancel()
        assert "was taken over by another process" in log and "Traceback" not in log, log
        assert contents(place) == before
    unit = (ROOT / "mpc_helpers" / "operations" / "trefoil-helper.service").read_text()
    assert "\nRestartPreventExitStatus=3\n" in unit


@pytest.mark.skipif(not _ALL, reason="minutes of real processes: make chaos")
def test_helpers_killed_at_every_failpoint_release_every_report_once(tmp_path: Path) -> None:
    """kill -9 of one helper after the other, with all three ledgers in PostgreSQL, at every failpoint there is."""
    cells = [Cell(failpoint, Fault.KILL_DAEMON, number % 3) for number, failpoint in enumerate(Failpoint)]

    def put_all_in_postgres(trio: Trio) -> None:
        for party in range(3):
            put_in_postgres(trio, party, server().location())

    with chaos_trio(tmp_path, put_all_in_postgres) as trio:
        outcomes = {cell: outcome(trio, cell) for cell in cells}
        assert {cell: text for cell, text in outcomes.items() if text != "survived"} == {}
        stop_all(trio)
        assert trio.audit() == []


# Connections that break.


class Lost(Enum):
    """When a connection breaks: within a transaction, or at its commit, before the server has heard of it or after."""

    IN_TRANSACTION = "in the transaction"
    BEFORE_COMMIT = "before the commit"
    AFTER_COMMIT = "after the commit"
    AFTER_REPLY = "after the reply to the commit"


class BreakingConnection:
    """A connection that breaks in the next transaction, once."""

    def __init__(self, raw: Any, lost: Lost) -> None:
        self._raw = raw
        self._lost = lost

    def execute(self, statement: Any, *values: Any) -> Any:
        import psycopg

        writes = isinstance(statement, bytes) and statement.startswith((b"INSERT", b"UPDATE", b"DELETE"))
        last = writes if self._lost is Lost.IN_TRANSACTION else statement == "COMMIT"
        if not last or self._lost is not Lost.BEFORE_COMMIT:
            cursor = self._raw.execute(statement, *values)
        if not last:
            return cursor
        if self._lost is Lost.AFTER_REPLY:
            # Which nobody knows before the next statement.
            with socket.socket(fileno=os.dup(self._raw.fileno())) as connected:
                connected.shutdown(socket.SHUT_RDWR)
            return cursor
        self._raw.close()
        raise psycopg.OperationalError("the connection is lost")

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._raw, attribute)


def break_connection(ledger: ReportLedger, location: PostgresLocation) -> None:
    """The server ends the session, and has ended it when this returns."""
    pid = ledger._database.connection.raw.info.backend_pid  # type: ignore[attr-defined]
    admin(location, f"SELECT pg_terminate_backend({pid}, 30000)")


@pytest.mark.parametrize("call", _BROKEN)
@pytest.mark.parametrize("lost", Lost)
def test_a_connection_lost_in_a_transaction_leaves_all_of_it_or_nothing(
    location: PostgresLocation, ledger: ReportLedger, call: str, lost: Lost
) -> None:
    """Where the reply to the commit is lost, its outcome is asked for. After the reply nothing can fail any more."""
    attempts = populate(ledger)
    # Opened again: an answer that this process has in memory would not have to come from the database.
    ledger.close()
    ledger = ReportLedger(location, OWNER)
    ledger.peer_heads.remember(2, LedgerHead(b"q" * 16, 7, b"h" * 32))
    before = contents(location)
    connection: Any = ledger._database.connection
    connection.raw = broken = BreakingConnection(connection.raw, lost)
    if lost in (Lost.AFTER_COMMIT, Lost.AFTER_REPLY):
        CALLS[call](ledger, *attempts)
        head = ledger.chain.head
        if lost is Lost.AFTER_REPLY:
            with pytest.raises(LedgerError):
                ledger.check_held()
        assert head == ledger.chain._read_head()
    else:
        with pytest.raises(LedgerError):
            CALLS[call](ledger, *attempts)
        assert contents(location) == before
        CALLS[call](ledger, *attempts)
    assert broken.closed
    assert contents(location) != before
    ledger.verify()
    assert ledger.chain.head == ledger.chain._read_head()
    ledger.close()


def test_nothing_of_a_transaction_is_done_in_another_session(location: PostgresLocation, ledger: ReportLedger) -> None:
    """Although its caller ignores that a statement failed."""
    before = contents(location)
    with pytest.raises(LedgerError), ledger._database.transaction() as connection:
        break_connection(ledger, location)
        with suppress(Exception):
            connection.execute("SELECT 1")
        connection.execute("UPDATE ledger SET watermark = watermark + 1")
    assert contents(location) == before
    ledger.check_held()


def test_what_could_not_be_rolled_back_is_not_committed_with_the_next_move(
    ledger: ReportLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    import psycopg

    raw = ledger._database.connection.raw  # type: ignore[attr-defined]
    execute, before = raw.execute, ledger.reports.watermark

    def fail(statement: Any, *values: Any) -> Any:
        if statement == "ROLLBACK":
            raise psycopg.errors.QueryCanceled
        return execute(statement, *values)

    monkeypatch.setattr(raw, "execute", fail)
    with pytest.raises(LedgerError), ledger._database.transaction() as connection:
        connection.execute("UPDATE ledger SET watermark = watermark + 1")
        raise LedgerError("the caller failed")
    reserve(ledger, 1, 1, 5)
    assert ledger.reports.watermark == before


def test_a_session_that_was_left_within_a_statement_is_replaced(ledger: ReportLedger) -> None:
    connection: Any = ledger._database.connection
    connection.raw.pgconn.send_query(b"SELECT 1")
    assert standing(ledger, 5) is Standing.FREE


class FailingStatement:
    """A connection on which the next statement that begins so fails: it is cancelled, or the connection is lost."""

    def __init__(self, raw: Any, beginning: bytes, lost: bool) -> None:
        self._raw, self._beginning, self._lost = raw, beginning, lost
        self.failed = False

    def execute(self, statement: Any, *values: Any) -> Any:
        if self.failed or not (isinstance(statement, bytes) and statement.startswith(self._beginning)):
            return self._raw.execute(statement, *values)
        self.failed = True
        if self._lost:
            self._raw.close()
            return self._raw.execute(statement, *values)
        self._raw.execute("SET LOCAL statement_timeout = '10ms'")
        return self._raw.execute("SELECT pg_sleep(30)")

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._raw, attribute)


@pytest.mark.parametrize("lost", [True, False], ids=["lost", "cancelled"])
@pytest.mark.parametrize("beginning", ["SAVEPOINT", "INSERT INTO reports_", "ROLLBACK TO", "RELEASE"])
def test_an_insertion_that_fails_within_its_savepoint_leaves_nothing(
    location: PostgresLocation, ledger: ReportLedger, beginning: str, lost: bool
) -> None:
    """A plain insertion meets a report that is recorded, which is updated instead, and one that is new."""
    ledger.moves.abort(reserve(ledger, 1, 1, 5), "")
    before = contents(location)
    connection: Any = ledger._database.connection
    connection.raw = failing = FailingStatement(connection.raw, beginning.encode(), lost)
    with raises(ErrorKind.UNAVAILABLE, LedgerError):
        reserve(ledger, 2, 1, 4, 5, 6)
    assert failing.failed and contents(location) == before
    reserve(ledger, 2, 1, 4, 5, 6)
    assert [standing(ledger, report) for report in (4, 5, 6)] == [Standing.BUSY] * 3
    ledger.verify()


def test_a_ledger_that_is_written_to_while_it_is_checked_is_not_taken_for_damaged(
    location: PostgresLocation, ledger: ReportLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `trefoil doctor` checks it, beside the helper that holds it: a move is made between any two statements."""
    from mpc_helpers.ledger.postgres_engine import PostgresConnection

    held, execute = ledger._database.connection, PostgresConnection.execute
    ranks = iter(range(1, 200))

    def execute_and_move(self: PostgresConnection, statement: str, values: Any = (), /) -> Any:
        cursor = execute(self, statement, values)
        if self is not held:
            rank = next(ranks)
            reserve(ledger, rank, 1, rank)
        return cursor

    monkeypatch.setattr(PostgresConnection, "execute", execute_and_move)
    engine_at(location).check_readable(OWNER)
    assert next(ranks) > 3


def test_a_process_that_reconnects_learns_that_another_holds_the_ledger(
    location: PostgresLocation, ledger: ReportLedger
) -> None:
    """Its session was ended and the next process has the lock: it is fenced, and not merely told to wait."""
    end_sessions(location)
    with closing(ReportLedger(location, OWNER)):
        with pytest.raises(LedgerError):
            ledger.check_held()
        # The first cause stays, also after it was closed.
        for _ in range(2):
            with raises(ErrorKind.FENCED, LedgerClosed):
                ledger.check_held()
            ledger.close()


def test_a_process_that_was_fenced_while_it_waited_for_the_lock_reads_nothing(
    location: PostgresLocation, ledger: ReportLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection: Any = ledger._database.connection
    lock = connection._lock

    def wait_for_the_lock() -> None:
        raise_epoch(location)
        lock()

    monkeypatch.setattr(connection, "_lock", wait_for_the_lock)
    break_connection(ledger, location)
    with pytest.raises(LedgerError):
        standing(ledger, 5)
    with raises(ErrorKind.FENCED, LedgerClosed):
        standing(ledger, 5)


def test_a_lock_that_the_server_still_holds_for_a_dead_session_is_waited_for(
    location: PostgresLocation, ledger: ReportLedger
) -> None:
    """The epoch is still ours, so we go on when the lock is released, and not in a session without it."""
    import psycopg

    from mpc_helpers.ledger.postgres_engine import LOCK

    break_connection(ledger, location)
    with psycopg.connect(location.conninfo(), autocommit=True, options=f"-c search_path={location.schema}") as dead:
        dead.execute(f"SELECT pg_advisory_lock({LOCK})".encode())
        with pytest.raises(LedgerError):
            ledger.check_held()
        for _ in range(2):
            with raises(ErrorKind.BUSY, LedgerError):
                ledger.check_held()
    reserve(ledger, 1, 1, 5)


def test_no_session_waits_without_a_limit(
    location: PostgresLocation, ledger: ReportLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither for a host that is gone, nor, to measure a table, for whoever has it locked."""
    import psycopg

    from mpc_helpers.ledger import postgres_engine
    from mpc_helpers.ledger.postgres_engine import PostgresEngine

    place = PostgresEngine(location)
    with place._session() as raw:
        parameters = raw.info.get_parameters()
    assert {key: parameters.get(key) for key in postgres_engine._DEADLINES} == {
        key: str(value) for key, value in postgres_engine._DEADLINES.items()
    }
    place.measure()
    monkeypatch.setattr(postgres_engine, "MEASURE_SECONDS", 1)
    # Ended by the server after a while, so that the test fails and does not hang without the limit.
    options = f"-c search_path={location.schema} -c idle_in_transaction_session_timeout=10s"
    holding = psycopg.connect(location.conninfo(), options=options)
    try:
        holding.execute("LOCK TABLE votes IN ACCESS EXCLUSIVE MODE")
        with pytest.raises(LedgerError):
            place.measure()
        holding.execute("SELECT 1 FROM ledger FOR UPDATE")
        ledger._database.connection.raw.execute("SET lock_timeout = '100ms'")  # type: ignore[attr-defined]
        with raises(ErrorKind.BUSY, LedgerError):
            ledger.check_held()
    finally:
        holding.close()


def test_a_commit_that_stays_in_doubt_ends_as_a_crash(
    location: PostgresLocation, ledger: ReportLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    import psycopg

    from mpc_helpers.ledger import postgres_engine

    connection: Any = ledger._database.connection
    connection.raw = BreakingConnection(connection.raw, Lost.AFTER_COMMIT)

    def unreachable() -> Any:
        raise psycopg.OperationalError("no route to host")

    monkeypatch.setattr(connection, "_connect", unreachable)
    monkeypatch.setattr(postgres_engine, "DOUBT_SECONDS", 0.0)
    with pytest.raises(LedgerClosed):
        reserve(ledger, 1, 1, 5)
    with pytest.raises(LedgerClosed):
        standing(ledger, 5)
    with closing(ReportLedger(location, OWNER)) as again:
        assert again.moves.sweep() == [bytes([1, 1]) * 16]


class CrashInCommit:
    """A connection whose server crashes when it hears of the commit, and others use it before we ask."""

    def __init__(self, raw: Any, private: PrivatePostgres, others: Callable[[], None]) -> None:
        self._raw, self._private, self._others = raw, private, others

    def execute(self, statement: Any, *values: Any) -> Any:
        import psycopg

        if statement != "COMMIT":
            return self._raw.execute(statement, *values)
        self._private.stop_immediately()
        self._private.start()
        self._others()
        raise psycopg.OperationalError("the connection is lost")

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._raw, attribute)


@pytest.mark.parametrize("to", ["nobody", "another session", "the process that takes over"])
def test_an_id_that_was_assigned_again_after_a_crash_is_not_taken_for_our_transaction(to: str) -> None:
    """A crash loses the ids of transactions of which nothing was written to the log. The next one gets such an id."""
    import psycopg

    with closing_cluster(PrivatePostgres()) as private:
        place = private.location()
        ReportLedger.create(place, OWNER)
        # Otherwise the log might be written in the background, and the id with it.
        admin(place, "ALTER SYSTEM SET wal_writer_delay = '10s'")
        admin(place, "SELECT pg_reload_conf()")
        with closing(ReportLedger(place, OWNER)) as ledger:
            connection: Any = ledger._database.connection

            def assign() -> None:
                if to == "the process that takes over":
                    ReportLedger(place, OWNER).close()
                if to == "another session":
                    with psycopg.connect(place.conninfo(), autocommit=True) as other:
                        while int(other.execute("SELECT pg_current_xact_id()::text").fetchone()[0]) < int(  # type: ignore[index]
                            connection._transaction_id
                        ):
                            pass
                if to != "nobody":
                    status = f"SELECT pg_xact_status('{connection._transaction_id}')"
                    assert admin(place, status) == [("committed",)]

            connection.raw = CrashInCommit(connection.raw, private, assign)
            # With another session nobody can know, and it ends as in a crash; with nobody it goes on.
            with pytest.raises(LedgerError if to == "nobody" else LedgerClosed) as ended:
                reserve(ledger, 1, 1, 5)
            assert (ended.value.kind is ErrorKind.FENCED) == (to == "the process that takes over")
            assert ledger.chain.head.sequence == 0, "it was believed to be committed"
            if to == "nobody":
                reserve(ledger, 2, 1, 5)
        with closing(ReportLedger(place, OWNER)) as again:
            assert state(again, bytes([1, 1]) * 16) is None
            assert (standing(again, 5) is Standing.BUSY) == (to == "nobody")


def test_a_standby_that_lags_is_not_believed_before_it_is_promoted(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has not heard of the transaction, which is committed where the ledger is."""
    from mpc_helpers.ledger.postgres_engine import PostgresConnection

    with closing_cluster(PrivatePostgres()) as primary:
        place = primary.location()
        ReportLedger.create(place, OWNER)
        with closing_cluster(PrivatePostgres(primary)) as standby, closing(ReportLedger(place, OWNER)) as ledger:
            follow(primary, standby)
            admin(standby.location(), "SELECT pg_wal_replay_pause()")
            connection: Any = ledger._database.connection
            connection.raw = BreakingConnection(connection.raw, Lost.AFTER_COMMIT)
            connect = connection._connect
            asked: list[Any] = []

            def connect_to_standby_first() -> Any:
                asked.append(PostgresConnection(standby.location(place.schema)).raw if not asked else connect())
                return asked[-1]

            monkeypatch.setattr(connection, "_connect", connect_to_standby_first)
            reserve(ledger, 1, 1, 5)
            assert len(asked) >= 2
            assert standing(ledger, 5) is Standing.BUSY


def test_a_transaction_in_which_a_statement_failed_is_not_reported_as_committed(ledger: ReportLedger) -> None:
    """PostgreSQL replies to its commit without an error."""
    transaction = ledger._database.transaction()
    with raises(ErrorKind.UNAVAILABLE, LedgerError), transaction as connection, suppress(Exception):
        connection.execute("DELETE FROM votes, nothing")
    reserve(ledger, 1, 1, 5)


def test_a_commit_that_waits_for_a_dead_standby_is_in_doubt_no_longer_than_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server replies all the while, that the transaction is in progress."""
    from mpc_helpers.ledger import postgres_engine

    private = PrivatePostgres()
    try:
        place = private.location()
        ReportLedger.create(place, OWNER)
        ledger = ReportLedger(place, OWNER)
        connection: Any = ledger._database.connection
        monkeypatch.setattr(postgres_engine, "DOUBT_SECONDS", 0.5)
        admin(place, "ALTER SYSTEM SET synchronous_standby_names = 'nobody'")
        admin(place, "SELECT pg_reload_conf()")
        ended: list[Exception] = []

        def spend() -> None:
            try:
                for rank in range(1, 200):
                    reserve(ledger, rank, 1, rank)
                    time.sleep(0.05)
            except Exception as error:
                # Compared below: a thread would only print it.
                ended.append(error)

        # A daemon: if the deadline is not kept, the test fails and this thread stays.
        thread = threading.Thread(target=spend, daemon=True)
        thread.start()
        waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
        limit = time.monotonic() + 10
        while admin(place, waiting) != [(1,)]:
            assert time.monotonic() < limit
            time.sleep(0.05)
        with socket.socket(fileno=os.dup(connection.raw.fileno())) as connected:
            connected.shutdown(socket.SHUT_RDWR)
        thread.join(10)
        assert [type(error) for error in ended] == [LedgerClosed]
        with pytest.raises(LedgerClosed):
            standing(ledger, 5)
    finally:
        private.remove()


def test_a_commit_that_a_crashed_server_shows_counts_when_its_standby_has_it() -> None:
    """Otherwise a move would be acted on that a synchronous standby, once promoted, has never seen."""
    with closing_cluster(PrivatePostgres()) as private:
        place = private.location()
        ReportLedger.create(place, OWNER)
        waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'"

        def wait_for_standby() -> None:
            limit = time.monotonic() + 30
            while admin(place, waiting) != [(1,)]:
                assert time.monotonic() < limit and thread.is_alive()
                time.sleep(0.05)

        with closing(ReportLedger(place, OWNER)) as ledger:
            admin(place, "ALTER SYSTEM SET synchronous_standby_names = 'nobody'")
            admin(place, "SELECT pg_reload_conf()")
            while admin(place, "SHOW synchronous_standby_names") != [("nobody",)]:
                time.sleep(0.05)
            thread = threading.Thread(target=reserve, args=(ledger, 1, 1, 5), daemon=True)
            thread.start()
            wait_for_standby()
            private.stop_immediately()
            private.start()
            # The server knows it as committed. It is not yet told.
            wait_for_standby()
            assert admin(place, "SELECT state FROM attempts WHERE attempt = 1") == [("reserved",)]
            assert ledger.chain.head.sequence == 0
            admin(place, "ALTER SYSTEM RESET synchronous_standby_names")
            admin(place, "SELECT pg_reload_conf()")
            thread.join(30)
            assert ledger.chain.head.sequence == 1
            ledger.verify()


# The server itself.


_BATCHES, _LARGE = 40, 3000


def large(number: int) -> Reservation:
    """One of `_BATCHES` attempts at as many queries, with `_LARGE` reports that no other has."""
    rows = np.random.default_rng(number).integers(0, 256, (_LARGE, 32), dtype=np.uint8)
    flags = np.zeros(_LARGE, dtype=np.bool_)
    wanted = reservation(number + 1, 1)
    return replace(wanted, digests=rows[sorted_order(rows)], debug_reports=flags, hours=hours(_LARGE))


def check_whole(ledger: ReportLedger, told: list[int]) -> None:
    """Check that every batch that was acknowledged is there, and none in part."""
    ledger.verify()
    there = {number for number in range(_BATCHES) if state(ledger, large(number).attempt_id) is not None}
    assert set(told) <= there, "acknowledged, and lost"
    assert ledger.reports.count() == _LARGE * len(there), "a batch is there in part"


@pytest.mark.parametrize("batches", range(1, 21) if _ALL else [3])
def test_a_server_that_stops_at_once_while_reserving_keeps_every_acknowledged_batch_whole(batches: int) -> None:
    """Immediate shutdown is a power cut to PostgreSQL: it recovers from its log."""
    private = PrivatePostgres()
    try:
        place = private.location()
        ReportLedger.create(place, OWNER)
        told: list[int] = []
        some = threading.Event()

        def spend() -> None:
            with closing(ReportLedger(place, OWNER)) as ledger, suppress(LedgerError):
                for number in range(_BATCHES):
                    ledger.moves.reserve(large(number))
                    told.append(number)
                    if len(told) == batches:
                        some.set()

        thread = threading.Thread(target=spend)
        thread.start()
        assert some.wait(60)
        private.stop_immediately()
        private.start()
        thread.join(60)
        with closing(ReportLedger(place, OWNER)) as again:
            check_whole(again, told)
    finally:
        private.remove()


@pytest.mark.parametrize("disk", ["data", "wal"])
def test_a_disk_of_the_server_that_fills_while_reserving_loses_nothing(disk: str) -> None:
    """Without space for tables a statement fails; without space for its log PostgreSQL ends within a commit."""
    try:
        private = PrivatePostgres(disks={"data": 48, "wal": 16})
    except NoSmallDisk as reason:
        pytest.skip(str(reason))
    with closing_cluster(private):
        place = private.location()
        ReportLedger.create(place, OWNER)
        told: list[int] = []
        errors: list[LedgerError] = []
        with closing(ReportLedger(place, OWNER)) as ledger:

            def spend() -> None:
                try:
                    for number in range(_BATCHES):
                        ledger.moves.reserve(large(number))
                        told.append(number)
                except LedgerError as error:
                    errors.append(error)

            ledger.moves.reserve(large(_BATCHES - 1))
            told.append(_BATCHES - 1)
            private.fill(disk, 2_000_000)
            thread = threading.Thread(target=spend, daemon=True)
            thread.start()
            if disk == "wal":
                # It cannot recover either, so that an operator has to start it again.
                limit = time.monotonic() + 20
                while (private.folder / "data" / "postmaster.pid").exists():
                    assert time.monotonic() < limit, "the server goes on with a full disk"
                    time.sleep(0.05)
                assert thread.is_alive(), "it asks for the outcome"
            else:
                thread.join(60)
                # What is there can be read while the disk is full.
                check_whole(ledger, told)
            private.make_space(disk)
            if disk == "wal":
                private.start()
            thread.join(60)
            assert [error.kind for error in errors] == [ErrorKind.NO_SPACE] and errors[0].hint
            check_whole(ledger, told)
            # The same ledger goes on with what failed.
            assert 1 < len(told) < _BATCHES - 1
            ledger.moves.reserve(large(len(told) - 1))
            check_whole(ledger, [*told, len(told) - 1])
        with closing(ReportLedger(place, OWNER)) as again:
            check_whole(again, [*told, len(told) - 1])
            assert len(again.moves.sweep()) == len(told) + 1


# The configuration, and whole helpers.


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("postgresql://me:secret@db.example/trefoil", "password"),
        ("postgresql://db.example/trefoil?password=secret", "password"),
        ("postgresql://db.example/trefoil?sslmode=require", "sslmode=require"),
        ("postgresql:///trefoil?sslmode=disable&service=x", "sslmode=disable"),
        ("postgresql://db.example/trefoil?sslkey=/key&sslpassword=secret", "password"),
        ("postgresql:///trefoil?schema=Robert'); DROP", "schema"),
        ("postgresql://[::1/trefoil", "malformed"),
    ],
)
def test_a_location_that_is_not_safe_is_refused_and_no_password_is_shown(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        PostgresLocation.parse(url)
    assert "secret" not in str(refused.value) + refused.value.hint


@pytest.mark.parametrize("hosts", ["host=/nowhere&hostaddr=127.0.0.1", "host=/nowhere,localhost", "host=/nowhere"])
def test_what_begins_as_a_socket_never_ends_as_plain_tcp(monkeypatch: pytest.MonkeyPatch, hosts: str) -> None:
    if hosts == "host=/nowhere":
        monkeypatch.setenv("PGHOSTADDR", "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(30)
        location = PostgresLocation.parse(
            f"postgresql://me@/x?{hosts}&port={listener.getsockname()[1]}&sslmode=disable"
        )
        caller = threading.Thread(target=lambda: why_it_cannot_be_reached(location))
        caller.start()
        with closing(listener.accept()[0]) as connection:
            # SSLRequest: a length of 8 bytes and the code 80877103.
            assert connection.recv(100) == (8).to_bytes(4, "big") + (80877103).to_bytes(4, "big")
        caller.join(30)


def why_it_cannot_be_reached(location: PostgresLocation) -> str:
    with pytest.raises(LedgerError) as refused:
        engine_at(location).exists()
    return str(refused.value)


def test_another_host_is_reached_over_verified_tls_only() -> None:
    assert "sslmode=verify-full" in PostgresLocation.parse("postgresql://me@db.example/trefoil").conninfo()
    assert PostgresLocation.parse("postgresql:///?service=x").conninfo().startswith("postgresql:///?service=x")
    assert str(PostgresLocation.parse("postgresql://me@db.example/x?passfile=/etc/p")) == (
        "postgresql://me@db.example/x?schema=trefoil"
    )


async def test_two_helpers_on_postgres_and_one_on_sqlite_answer(tmp_path: Path) -> None:
    async with three_helpers(tmp_path, start=False) as three:
        for party in (0, 1):
            put_in_postgres(three.trio, party, server().location())
        for party in range(3):
            await three.start(party)
        batch = three.batch(three.seal([[1, 0]] * 40, terms(2)))
        assert (await three.ask(three.query(batch), batch)).answer.counted == 40
        mixed = three.batch([*three.seal([[0, 1]] * 36, terms(2)), *list(batch)[:4]])
        result = await three.ask(three.query(mixed), mixed)
        assert (result.answer.counted, [sum(counts.values()) for counts in result.answer.rejections]) == (36, [4, 4, 4])
        # Failover: the first helper's host is taken for dead.
        line = ["ledger", "take-over", "--config", str(three.trio.config_path(0)), "--json", str(tmp_path / "ended")]
        done = CliRunner().invoke(app, line)
        assert done.exit_code == 0, done.output
        config = load_config(three.trio.config_path(0))
        with closing(ReportLedger(config.ledger, owner_of(load_membership(config, real_now())))) as ledger:
            assert len(ledger.reports.export().digests) == 76


# Databases that are older than what peers have seen.


async def test_a_database_restored_from_a_dump_is_noticed_by_both_peers(tmp_path: Path) -> None:
    dumps: list[bytes] = []
    async with three_helpers(tmp_path, start=False) as three:
        place = server().location()
        put_in_postgres(three.trio, 1, place)
        for party in range(3):
            await three.start(party)
        asking = await roll_back(
            three,
            lambda: dumps.append(server().dump(place.schema)),
            lambda: server().restore(place.schema, dumps[0]),
        )
        await until_both_peers_notice(three)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)


@pytest.mark.parametrize("lags", [True, False])
async def test_a_standby_takes_over_unless_it_lagged_which_both_peers_notice(tmp_path: Path, lags: bool) -> None:
    """It follows its primary. If it lags it is stopped, and misses one query, before the primary is gone."""
    with closing_cluster(PrivatePostgres()) as primary, closing_cluster(PrivatePostgres(primary)) as standby:
        async with three_helpers(tmp_path, start=False) as three:
            place = primary.location()
            put_in_postgres(three.trio, 1, place)
            for party in range(3):
                await three.start(party)

            def lag() -> None:
                follow(primary, standby)
                if lags:
                    standby.stop_immediately()

            def take_over() -> None:
                if not lags:
                    follow(primary, standby)
                primary.stop_immediately()
                if lags:
                    standby.start()
                standby.promote()
                configure(three.trio, 1, standby.location(place.schema))

            asking = await roll_back(three, lag, take_over)
            if not lags:
                assert (await asyncio.wait_for(asking, 60)).answer.counted == 5
                return
            await until_both_peers_notice(three)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)


@contextmanager
def closing_cluster(cluster: PrivatePostgres) -> Iterator[PrivatePostgres]:
    try:
        yield cluster
    finally:
        cluster.remove()


def follow(primary: PrivatePostgres, standby: PrivatePostgres) -> None:
    """Wait until the standby has replayed all that the primary has written."""
    ((written,),) = admin(primary.location(), "SELECT pg_current_wal_flush_lsn()::text")
    deadline = time.monotonic() + 60
    while admin(standby.location(), f"SELECT pg_last_wal_replay_lsn() >= '{written}'") != [(True,)]:
        assert time.monotonic() < deadline, "the standby does not follow"
        time.sleep(0.05)


def test_the_hunt_finds_nothing_on_postgres(tmp_path: Path) -> None:
    """`python -m tests.support.hunt --postgres` plays as many as one likes."""
    counts = hunt(tmp_path, range(1, 4), postgres=True)
    assert (counts.schedules, counts.wrong) == (3, {})


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ("version = version - 1", ErrorKind.UNKNOWN_VERSION),
        ("version = version + 1", ErrorKind.UNKNOWN_VERSION),
        ("kind = kind + 1", ErrorKind.WRONG_FILE),
    ],
)
def test_a_ledger_of_another_version_is_refused_and_left_as_it_is(
    location: PostgresLocation, change: str, kind: ErrorKind
) -> None:
    """The way on is the one after a loss, which was tried: an empty schema, rebuilt from both peers."""
    # As a replica, which runs no triggers: a version never changes otherwise.
    admin(location, f"SET session_replication_role = replica; UPDATE ledger SET {change}")  # noqa: S608  (constants)
    before = contents(location)
    with raises(kind, LedgerError):
        ReportLedger(location, OWNER)
    assert contents(location) == before


@pytest.mark.parametrize(
    "statement",
    [
        "ALTER TABLE attempts DISABLE TRIGGER ALL",
        "ALTER TABLE undated DISABLE TRIGGER undated_on_delete",
        "ALTER TABLE {day} DISABLE TRIGGER {day}_on_update",
        "ALTER TABLE moves ENABLE REPLICA TRIGGER never_emptied",
        "DROP TRIGGER a_fence ON votes",
        "DROP TRIGGER a_fence_takeover ON ledger",
    ],
)
def test_a_ledger_whose_rules_are_off_is_not_opened(location: PostgresLocation, statement: str) -> None:
    with closing(ReportLedger(location, OWNER)) as ledger:
        reserve(ledger, 1, 1, 5)
        (day,) = admin(location, "SELECT max(day) FROM days")[0]
    admin(location, statement.format(day=f"reports_{day}"))
    with raises(ErrorKind.FILE_DAMAGED, LedgerError):
        ReportLedger(location, OWNER)


def test_a_report_that_points_to_no_attempt_is_found(location: PostgresLocation, ledger: ReportLedger) -> None:
    reserve(ledger, 1, 1, 5)
    ledger.verify()
    (day,) = admin(location, "SELECT max(day) FROM days")[0]
    admin(location, f"SET session_replication_role = replica; UPDATE reports_{day:d} SET attempt = 99")  # noqa: S608
    with raises(ErrorKind.FILE_DAMAGED, LedgerError):
        ledger.verify()


def test_a_role_whose_sessions_run_no_triggers_is_refused_also_when_the_connection_is_replaced() -> None:
    with closing_cluster(PrivatePostgres()) as private:
        place = private.location()
        ReportLedger.create(place, OWNER)
        with closing(ReportLedger(place, OWNER)) as ledger:
            attempt = reserve(ledger, 1, 1, 5)
            ledger.moves.vote(attempt, b"share")
            admin(place, "ALTER ROLE trefoil SET session_replication_role = replica")
            break_connection(ledger, place)
            for _ in range(3):
                with pytest.raises(LedgerError):
                    ledger.moves.release(attempt, [])
            admin(place, "ALTER ROLE trefoil RESET ALL")
            with raises(ErrorKind.REFUSED, LedgerError):
                ledger.moves.release(attempt, [])
            ledger.moves.release(attempt, YES)
        admin(place, "ALTER ROLE trefoil SET session_replication_role = replica")
        with pytest.raises(LedgerError, match="run no triggers"):
            ReportLedger(place, OWNER)


@pytest.mark.parametrize("setting", ["fsync", "full_page_writes"])
def test_a_server_that_loses_commits_in_a_power_cut_is_refused(setting: str) -> None:
    with closing_cluster(PrivatePostgres()) as private:
        place = private.location()
        ReportLedger.create(place, OWNER)
        private.stop_immediately()
        private.start(f"-c listen_addresses= -c {setting}=off")
        with pytest.raises(LedgerError, match=setting):
            ReportLedger(place, OWNER)


@pytest.mark.parametrize("commit", ["off", "local"])
def test_settings_of_a_role_change_no_session(location: PostgresLocation, commit: str) -> None:
    weak = {"statement_timeout": "1ms", "synchronous_commit": commit, "default_transaction_isolation": "serializable"}
    role = "ALTER ROLE trefoil IN DATABASE postgres"
    for setting, value in weak.items():
        admin(location, f"{role} SET {setting} = '{value}'")
    try:
        with closing(ReportLedger(location, OWNER)) as ledger, ledger._database.reading() as connection:
            now = [connection.execute(f"SHOW {setting}").fetchone()[0] for setting in weak]
    finally:
        admin(location, f"{role} RESET ALL")
    assert now == ["0", "on", "read committed"]


def test_a_session_that_does_not_keep_its_settings_is_refused(
    location: PostgresLocation, ledger: ReportLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one of a pooler may do. It would find the ledger of another schema."""
    import psycopg

    connect = psycopg.connect
    monkeypatch.setattr(psycopg, "connect", lambda url, options, **others: connect(url, **others))
    break_connection(ledger, location)
    for _ in range(2):
        with raises(ErrorKind.UNAVAILABLE, LedgerError):
            reserve(ledger, 1, 1, 5)
    ledger.close()
    with pytest.raises(LedgerError, match="pooler"):
        ReportLedger(location, OWNER)


def test_a_role_that_must_not_read_the_schema_does_not_find_it_missing(location: PostgresLocation) -> None:
    admin(location, "CREATE ROLE stranger LOGIN")
    try:
        url = location.url.replace("trefoil@", "stranger@")
        with raises(ErrorKind.FORBIDDEN, LedgerError):
            ReportLedger(PostgresLocation(url, location.schema), OWNER)
        with raises(ErrorKind.FORBIDDEN, LedgerError):
            ReportLedger.create(PostgresLocation(url, "nowhere"), OWNER)
    finally:
        admin(location, "DROP ROLE stranger")


# TLS to the database, with a password from a file.


def self_signed(folder: Path, name: str) -> tuple[Path, Path]:
    """Make a certificate for `localhost`, which is its own root, and its key."""
    certificate, key = folder / f"{name}.crt", folder / f"{name}.key"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    command = ["openssl", "req", "-x509", *curve, *subject, "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return certificate, key


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_another_host_is_believed_by_its_certificate_and_asked_with_a_password_from_a_file(tmp_path: Path) -> None:
    certificate, key = self_signed(tmp_path, "server")
    stranger, _ = self_signed(tmp_path, "stranger")
    with closing_cluster(PrivatePostgres()) as private:
        port = private.serve_tls(certificate.read_bytes(), key.read_bytes(), "correct horse")
        passwords = {}
        for name, password in (("right", "correct horse"), ("wrong", "battery staple")):
            passwords[name] = tmp_path / name
            passwords[name].write_text(f"*:*:*:north:{password}\n")
            passwords[name].chmod(0o600)

        def place(root: Path, host: str = "localhost", file: str = "right") -> PostgresLocation:
            options = f"schema=north&sslrootcert={root}&passfile={passwords[file]}"
            return PostgresLocation.parse(f"postgresql://north@{host}:{port}/postgres?{options}")

        ReportLedger.create(place(certificate), OWNER)
        with closing(ReportLedger(place(certificate), OWNER)) as ledger:
            assert ledger._database.connection.raw.pgconn.ssl_in_use  # type: ignore[attr-defined]
            reserve(ledger, 1, 1, 5)
        refused = [
            (place(stranger), "certificate verify failed"),
            (place(certificate, "127.0.0.1"), "does not match host name"),
            (place(certificate, file="wrong"), "password authentication failed"),
        ]
        for location, reason in refused:
            with pytest.raises(LedgerError, match=reason) as error:
                ReportLedger(location, OWNER)
            assert not {"correct horse", "battery staple"} & set(re.findall(r"\w+ \w+", str(error.value)))


# Shares, which PostgreSQL would keep for longer than they are needed.


def on_disk(private: PrivatePostgres, mark: bytes) -> bool:
    """Whether these bytes are in a table, in the log, or in free space of one of them."""
    admin(private.location(), "CHECKPOINT")
    return any(mark in path.read_bytes() for path in private.folder.rglob("*") if path.is_file())


def test_a_share_that_was_renounced_or_forgotten_cannot_be_read_from_anything_that_the_server_keeps(
    tmp_path: Path,
) -> None:
    keys, mark = tmp_path / "share-keys", b"a sealed share that nobody may ever release"
    with closing_cluster(PrivatePostgres()) as private:
        place = private.location()
        ReportLedger.create(place, OWNER)
        with closing(ReportLedger(place, OWNER, share_keys=keys)) as ledger:
            attempts = [reserve(ledger, rank, 1, 10 * rank) for rank in (1, 2, 3)]
            for attempt in attempts:
                ledger.moves.vote(attempt, mark)
            ledger.moves.renounce(attempts[0], NO[:1], "")
            for attempt in attempts[1:]:
                ledger.moves.release(attempt, YES)
            ledger.moves.forget_answer(name(2).key)
            kept = ledger.attempts.released(name(3).key)
            assert kept is not None and kept.sealed_share == mark
            assert [path.name for path in keys.iterdir()] == [attempts[2].hex()]
            assert keys.joinpath(attempts[2].hex()).stat().st_mode & 0o077 == 0
        assert not on_disk(private, mark)
        # Without keys it is there, so that this test could fail.
        with closing(ReportLedger(place, OWNER)) as ledger:
            ledger.moves.vote(plain := reserve(ledger, 4, 1, 40), mark)
            ledger.moves.renounce(plain, NO[:1], "")
        assert on_disk(private, mark)


def test_a_host_that_takes_over_without_the_keys_of_shares_ends_attempts_without_them(
    location: PostgresLocation, tmp_path: Path
) -> None:
    with closing(ReportLedger(location, OWNER, share_keys=tmp_path / "first")) as ledger:
        ledger.moves.vote(voted := reserve(ledger, 1, 1, 5), b"share")
    with closing(ReportLedger(location, OWNER, share_keys=tmp_path / "second")) as ledger:
        assert ledger.moves.sweep() == []
        ledger.moves.release(voted, YES)
        released = ledger.attempts.released(name(1).key)
        assert released is not None and released.sealed_share is None
        assert standing(ledger, 5) is Standing.SEEN
    # Back on the first host, it is there.
    with closing(ReportLedger(location, OWNER, share_keys=tmp_path / "first")) as ledger:
        ledger.moves.sweep()
        released = ledger.attempts.released(name(1).key)
        assert released is not None and released.sealed_share == b"share"


def test_a_key_that_a_crash_left_is_erased_on_start_and_a_repeated_vote_keeps_its_key(
    location: PostgresLocation, tmp_path: Path
) -> None:
    keys = tmp_path / "share-keys"

    def fail(at: Failpoint) -> None:
        if at is Failpoint.VOTE_BEFORE_COMMIT:
            raise LedgerError("crashed")

    with closing(ReportLedger(location, OWNER, share_keys=keys)) as ledger:
        orphan, repeated = reserve(ledger, 1, 1, 5), reserve(ledger, 2, 1, 6)
        ledger.moves.vote(repeated, b"share")
        # Its outcome was in doubt, and it is tried again with the share as it would be computed again.
        with pytest.raises(LedgerError):
            ledger.moves.vote(repeated, b"share")
        ledger._database.failpoint = fail
        with pytest.raises(LedgerError):
            ledger.moves.vote(orphan, b"share")
        assert len(list(keys.iterdir())) == 2
    with closing(ReportLedger(location, OWNER, share_keys=keys)) as ledger:
        ledger.moves.sweep()
        assert [path.name for path in keys.iterdir()] == [repeated.hex()]
        record = ledger.attempts.find(repeated)
        assert record is not None and record.sealed_share == b"share"


@pytest.mark.parametrize("end", ["abort", "preempt"])
def test_a_key_goes_with_an_attempt_whose_vote_failed(location: PostgresLocation, tmp_path: Path, end: str) -> None:
    """Its share may be in the server's log, although it was rolled back."""
    keys = tmp_path / "share-keys"

    def fail(at: Failpoint) -> None:
        if at is Failpoint.VOTE_BEFORE_COMMIT:
            raise LedgerError("no vote")

    with closing(ReportLedger(location, OWNER, share_keys=keys, failpoint=fail)) as ledger:
        attempt = reserve(ledger, 2, 1, 5)
        with pytest.raises(LedgerError):
            ledger.moves.vote(attempt, b"share")
        assert len(list(keys.iterdir())) == 1
        if end == "abort":
            ledger.moves.abort(attempt, "")
        else:
            reserve(ledger, 1, 1, 5)
        assert state(ledger, attempt) is AttemptState.ABORTED
        assert list(keys.iterdir()) == []


def test_a_key_stays_with_an_attempt_that_was_not_renounced(location: PostgresLocation, tmp_path: Path) -> None:
    """Its vote stands: both peers may release, and the answer needs this helper's share."""

    def fail(at: Failpoint) -> None:
        if at is Failpoint.RENOUNCE_BEFORE_COMMIT:
            raise LedgerError("not renounced")

    with closing(ReportLedger(location, OWNER, share_keys=tmp_path, failpoint=fail)) as ledger:
        attempt = reserve(ledger, 1, 1, 5)
        ledger.moves.vote(attempt, b"share")
        with pytest.raises(LedgerError):
            ledger.moves.renounce(attempt, NO[:1], "")
        record = ledger.attempts.find(attempt)
        assert record is not None and record.sealed_share == b"share"


def test_a_key_opens_the_share_of_its_attempt_only_and_is_overwritten(tmp_path: Path) -> None:
    keys, (first, second) = ShareKeys(tmp_path / "keys"), (b"1" * 32, b"2" * 32)
    stored = keys.seal(first, b"share")
    file = tmp_path / "keys" / first.hex()
    file.with_name(second.hex()).write_bytes(file.read_bytes())
    with raises(ErrorKind.FILE_DAMAGED, LedgerError):
        keys.open(second, stored)
    # Its bytes on the disk, which a removal alone would leave there.
    os.link(file, tmp_path / "disk")
    keys.erase(first)
    assert keys.open(first, stored) is None
    assert (tmp_path / "disk").read_bytes() == bytes(32)
    with raises(ErrorKind.NO_SPACE, LedgerError):
        ShareKeys(tmp_path / "disk").seal(first, b"share")


def test_an_answer_that_is_not_released_keeps_its_key_when_old_ones_are_forgotten(
    location: PostgresLocation, tmp_path: Path
) -> None:
    with closing(ReportLedger(location, OWNER, share_keys=tmp_path)) as ledger:
        attempt = reserve(ledger, 1, 1, 5)
        ledger.moves.vote(attempt, b"share")
        ledger.moves.forget_answer(reservation(1, 1).query.key)
        record = ledger.attempts.find(attempt)
        assert record is not None and record.sealed_share == b"share"


def test_a_ledger_is_closed_although_its_server_hangs(
    location: PostgresLocation, ledger: ReportLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "CLOSE_SECONDS", 0.2)
    session = ledger._database.connection.raw.info.backend_pid  # type: ignore[attr-defined]
    ends: list[Exception] = []

    def wait() -> None:
        try:
            reserve(ledger, 1, 1, 5)
        except LedgerError as error:
            ends.append(error)

    threads = [threading.Thread(target=wait, daemon=True), threading.Thread(target=ledger.close, daemon=True)]
    os.kill(session, signal.SIGSTOP)
    try:
        for thread in threads:
            thread.start()
            time.sleep(0.1)
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
    finally:
        os.kill(session, signal.SIGCONT)
    assert len(ends) == 1
    with pytest.raises(LedgerClosed):
        standing(ledger, 5)


class PausedInCommit:
    """A connection whose backend is stopped before it reads the commit."""

    def __init__(self, raw: Any) -> None:
        self._raw = raw
        self.stopped = threading.Event()

    def execute(self, statement: Any, *values: Any) -> Any:
        if statement == "COMMIT":
            os.kill(self._raw.info.backend_pid, signal.SIGSTOP)
            self.stopped.set()
        return self._raw.execute(statement, *values)

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._raw, attribute)


@pytest.mark.parametrize("closed", [True, False], ids=["closed", "goes on"])
async def test_a_backend_paused_within_a_commit_is_noticed_and_keeps_nobody_from_closing(
    location: PostgresLocation, ledger: ReportLedger, monkeypatch: pytest.MonkeyPatch, closed: bool
) -> None:
    from mpc_helpers.ledger import postgres_engine

    monkeypatch.setattr(database, "CLOSE_SECONDS", 0.2)
    monkeypatch.setattr(database, "BUSY_SECONDS", 0.1)
    monkeypatch.setattr(health, "SILENT_SECONDS", 0.2)
    monkeypatch.setattr(postgres_engine, "LOCK_SECONDS", 0.1)
    connection: Any = ledger._database.connection
    backend = connection.raw.info.backend_pid
    connection.raw = paused = PausedInCommit(connection.raw)
    watch = health.LedgerWatch(ledger.check_held)
    reserving = asyncio.create_task(asyncio.to_thread(reserve, ledger, 1, 1, 5))
    looking = None
    try:
        assert await asyncio.to_thread(paused.stopped.wait, 30)
        looking = asyncio.create_task(watch.look())
        async with asyncio.timeout(30):
            while not watch.error:
                await asyncio.sleep(0.01)
        assert not reserving.done()
        # Nobody goes on beside it: it holds the lock, and its commit may still be done.
        with raises(ErrorKind.BUSY, LedgerError):
            ReportLedger(location, OWNER)
        if closed:
            await asyncio.wait_for(asyncio.to_thread(ledger.close), 30)
            with pytest.raises(LedgerClosed):
                await asyncio.wait_for(reserving, 30)
            with pytest.raises(LedgerClosed):
                await asyncio.wait_for(looking, 30)
    finally:
        os.kill(backend, signal.SIGCONT)
    if not closed:
        await asyncio.wait_for(asyncio.gather(reserving, looking), 30)
        assert not watch.error
        ledger.close()
    monkeypatch.undo()
    with closing(ReportLedger(location, OWNER)) as again:
        again.verify()
        assert again.reports.count() == (state(again, bytes([1, 1]) * 16) is not None)
        assert closed or again.reports.count()

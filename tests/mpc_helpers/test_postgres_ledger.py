"""The ledger on PostgreSQL: one writer for certain, and no connection, process or server that breaks loses a move.

What both engines do alike is in test_report_ledger, test_draws and test_commit_crashes, which run on both.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from mpc_helpers.commands import app
from mpc_helpers.identity.config import ConfigError, PostgresLocation, load_config
from mpc_helpers.identity.membership import load_membership
from mpc_helpers.ledger.attempt import AttemptState, Failpoint
from mpc_helpers.ledger.engine import LedgerClosed, LedgerError, LedgerHead
from mpc_helpers.ledger.ledger import QueryRecord, ReportLedger, engine_at
from mpc_helpers.ledger.rebuild import owner_of
from mpc_helpers.local.launcher import prepare
from protocol.batch import sorted_order
from protocol.errors import ErrorKind
from protocol.status import QueryState
from tests.mpc_helpers.test_monitoring import roll_back, until_both_peers_notice
from tests.mpc_helpers.test_report_ledger import (
    NO,
    OWNER,
    TIME,
    YES,
    hours,
    name,
    release,
    reservation,
    reserve,
    standing,
    state,
)
from tests.support.ledger_places import configure, put_in_postgres
from tests.support.private_postgres import PrivatePostgres, server, why_not
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


# The fence.


@pytest.mark.parametrize("fence", [raise_epoch, end_sessions], ids=lambda fence: fence.__name__)
def test_a_process_that_was_fenced_changes_nothing_by_any_call(
    location: PostgresLocation, fence: Callable[[PostgresLocation], None]
) -> None:
    calls: dict[str, Callable[[ReportLedger, bytes, bytes, bytes], object]] = {
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
    ledger = ReportLedger(location, OWNER)
    ledger.peer_heads.remember(1, LedgerHead(b"p" * 16, 7, b"h" * 32))
    attempts = [reserve(ledger, rank, 1, 10 * rank) for rank in (1, 2, 3)]
    for voted in attempts[1:]:
        ledger.moves.vote(voted, b"share")
    ledger.moves.renounce(attempts[2], NO[:1], "")
    release(ledger, reserve(ledger, 4, 1, 40))
    ledger.close()
    before = contents(location)
    for call in calls.values():
        stale = ReportLedger(location, OWNER)
        fence(location)
        # Where its session was ended, it learns of that first, and of the fence when it connects again.
        with pytest.raises(LedgerClosed if fence is raise_epoch else LedgerError):
            call(stale, attempts[0], attempts[1], attempts[2])
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
        "INSERT INTO days VALUES (30000, 99999999999)",
        "TRUNCATE reports_20000",
        "TRUNCATE votes",
    ):
        with pytest.raises(psycopg.IntegrityError, match=r"holds a ledger|never emptied"):
            admin(location, statement)


# Processes that die or pause, really.

_BEFORE = [point for point in Failpoint if point.value.endswith("before commit") and "start" not in point.value]
_COMMITS = [point for point in Failpoint if point.value.endswith("commit") and "start" not in point.value]
# All of them are in `make chaos`.
_ALL = os.environ.get("TREFOIL_CHAOS") == "all"
_KILLED = _COMMITS if _ALL else [Failpoint.RESERVE_BEFORE_COMMIT, Failpoint.VOTE_AFTER_COMMIT]
_STOPPED = _BEFORE if _ALL else [Failpoint.RESERVE_BEFORE_COMMIT, Failpoint.RELEASE_BEFORE_COMMIT]
_STATES = {"reserved", "voted", "released", "renounced", "aborted"}


def client(location: PostgresLocation, how: str, failpoint: Failpoint) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-m",
        "tests.support.postgres_client",
        location.url,
        location.schema,
        how,
        failpoint.name,
    ]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def acknowledged(lines: list[str]) -> dict[int, str]:
    """The last state of each attempt that the process was told is durable."""
    moves = [line.split() for line in lines if line.split()[0] in _STATES]
    return {int(rank): last for last, rank in moves}


@pytest.mark.parametrize("failpoint", _KILLED, ids=lambda point: point.name)
def test_a_client_killed_at_a_failpoint_loses_nothing_that_was_acknowledged(
    location: PostgresLocation, failpoint: Failpoint
) -> None:
    process = client(location, "SIGKILL", failpoint)
    lines = process.communicate(timeout=60)[0].split("\n")[:-1]
    assert process.returncode == -signal.SIGKILL
    with closing(_reopened(location)) as again:
        again.verify()
        for rank, last in acknowledged(lines).items():
            now = state(again, bytes([rank, 1]) * 16)
            assert now is not None
            order = [each.value for each in AttemptState]
            # One move later, if the kill came after its commit and before the word of it.
            assert now.value == last or order.index(now.value) > order.index(last)
        assert all(record.state is not AttemptState.RESERVED for record in again.attempts.pending())


def _reopened(location: PostgresLocation) -> ReportLedger:
    """Open after a crash: the server notices a dead client's socket within the time that opening waits."""
    again = ReportLedger(location, OWNER)
    again.moves.sweep()
    return again


@pytest.mark.parametrize("failpoint", _STOPPED, ids=lambda point: point.name)
def test_a_client_paused_in_a_transaction_wakes_after_the_failover_and_changes_nothing(
    location: PostgresLocation, failpoint: Failpoint
) -> None:
    process = client(location, "SIGSTOP", failpoint)
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
            assert lines[-2].startswith("refused"), lines
            assert contents(location) == before
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


# Connections that break.


def break_connection(ledger: ReportLedger, location: PostgresLocation) -> None:
    """The server ends the session, and has ended it when this returns."""
    pid = ledger._database.connection.raw.info.backend_pid  # type: ignore[attr-defined]
    admin(location, f"SELECT pg_terminate_backend({pid}, 30000)")


@pytest.mark.parametrize("failpoint", _BEFORE, ids=lambda point: point.name)
def test_a_connection_lost_in_a_transaction_rolls_it_back_and_the_next_one_works(
    location: PostgresLocation, ledger: ReportLedger, failpoint: Failpoint
) -> None:
    moves = ledger.moves
    reserved, voted, renounced = (reserve(ledger, rank, 1, 10 * rank) for rank in (1, 2, 3))
    for attempt in (voted, renounced):
        moves.vote(attempt, b"share")
    moves.renounce(renounced, NO[:1], "")
    made: dict[Failpoint, Callable[[], object]] = {
        Failpoint.RESERVE_BEFORE_COMMIT: lambda: reserve(ledger, 5, 1, 50),
        Failpoint.VOTE_BEFORE_COMMIT: lambda: moves.vote(reserved, b"share"),
        Failpoint.RELEASE_BEFORE_COMMIT: lambda: moves.release(voted, YES),
        Failpoint.GIVE_UP_BEFORE_COMMIT: lambda: moves.abort(reserved, ""),
        Failpoint.RENOUNCE_BEFORE_COMMIT: lambda: moves.renounce(voted, NO, ""),
        Failpoint.FREE_BEFORE_COMMIT: lambda: moves.free(renounced, NO, ""),
    }
    before = contents(location)

    def lose(at: Failpoint) -> None:
        if at is failpoint:
            break_connection(ledger, location)

    ledger._database.failpoint = lose
    with pytest.raises(LedgerError):
        made[failpoint]()
    assert contents(location) == before
    ledger._database.failpoint = lambda _: None
    made[failpoint]()
    assert contents(location) != before


def test_a_process_that_reconnects_learns_that_another_holds_the_ledger(
    location: PostgresLocation, ledger: ReportLedger
) -> None:
    """Its session was ended and the next process has the lock: it is fenced, and not merely told to wait."""
    end_sessions(location)
    with closing(ReportLedger(location, OWNER)):
        with pytest.raises(LedgerError):
            ledger.check_held()
        with raises(ErrorKind.FENCED, LedgerClosed):
            ledger.check_held()


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


class LostReply:
    """A connection on which the reply to the next COMMIT is lost, after or before the server heard of it."""

    def __init__(self, raw: Any, *, committed: bool) -> None:
        self._raw = raw
        self._committed = committed

    def execute(self, statement: Any, *values: Any) -> Any:
        import psycopg

        if statement != "COMMIT":
            return self._raw.execute(statement, *values)
        if self._committed:
            self._raw.execute(statement)
        self._raw.close()
        raise psycopg.OperationalError("the connection is lost")

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._raw, attribute)


@pytest.mark.parametrize("committed", [True, False])
def test_the_outcome_of_a_commit_whose_reply_was_lost_is_asked_for(
    location: PostgresLocation, ledger: ReportLedger, committed: bool
) -> None:
    connection: Any = ledger._database.connection
    connection.raw = LostReply(connection.raw, committed=committed)
    if committed:
        reserve(ledger, 1, 1, 5)
    else:
        with pytest.raises(LedgerError):
            reserve(ledger, 1, 1, 5)
        reserve(ledger, 1, 1, 5)
    assert state(ledger, bytes([1, 1]) * 16) is AttemptState.RESERVED
    assert ledger.chain.head.sequence == 1
    release(ledger, bytes([1, 1]) * 16)


def test_a_commit_that_stays_in_doubt_ends_as_a_crash(
    location: PostgresLocation, ledger: ReportLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    import psycopg

    from mpc_helpers.ledger import postgres_engine

    connection: Any = ledger._database.connection
    connection.raw = LostReply(connection.raw, committed=True)

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


# The server itself.


def test_a_server_that_stops_at_once_while_reserving_keeps_every_acknowledged_batch_whole() -> None:
    """Immediate shutdown is a power cut to PostgreSQL: it recovers from its log."""
    private = PrivatePostgres()
    try:
        place = private.location()
        ReportLedger.create(place, OWNER)
        rows = np.random.default_rng(5).integers(0, 256, (40, 3000, 32), dtype=np.uint8)
        told: list[int] = []
        some = threading.Event()

        def spend() -> None:
            with closing(ReportLedger(place, OWNER)) as ledger, suppress(LedgerError):
                for number, batch in enumerate(rows):
                    flags = np.zeros(len(batch), dtype=np.bool_)
                    wanted = replace(
                        reservation(number + 1, 1),
                        digests=batch[sorted_order(batch)],
                        debug_reports=flags,
                        hours=hours(len(batch)),
                    )
                    ledger.moves.reserve(wanted)
                    told.append(number)
                    if len(told) == 3:
                        some.set()

        thread = threading.Thread(target=spend)
        thread.start()
        assert some.wait(60)
        private.stop_immediately()
        private.start()
        thread.join(60)
        with closing(ReportLedger(place, OWNER)) as again:
            again.verify()
            there = {number for number in range(40) if state(again, bytes([number + 1, 1]) * 16) is not None}
            assert set(told) <= there, "acknowledged, and lost"
            assert again.reports.count() == 3000 * len(there), "a batch is there in part"
    finally:
        private.remove()


# The configuration, and whole helpers.


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("postgresql://me:secret@db.example/trefoil", "password"),
        ("postgresql://db.example/trefoil?password=secret", "password"),
        ("postgresql://db.example/trefoil?sslmode=require", "sslmode=require"),
        ("postgresql:///trefoil?sslmode=disable&service=x", "sslmode=disable"),
        ("postgresql:///trefoil?schema=Robert'); DROP", "schema"),
    ],
)
def test_a_location_that_is_not_safe_is_refused_and_no_password_is_shown(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        PostgresLocation.parse(url)
    assert "secret" not in str(refused.value) + refused.value.hint


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

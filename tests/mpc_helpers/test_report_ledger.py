"""The report ledger: legal moves only, every report spent once, and no file opened that should not be."""

from __future__ import annotations

import json
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from mpc_helpers.commands import app
from mpc_helpers.identity.config import HelperConfig, LedgerLocation, PostgresLocation, load_config
from mpc_helpers.identity.membership import Membership, load_membership
from mpc_helpers.ledger import database, engine
from mpc_helpers.ledger import reports as reports_module
from mpc_helpers.ledger.attempt import AttemptState, Failpoint, QueryName, ReceivedVote, Reservation
from mpc_helpers.ledger.engine import LedgerError, LedgerHead, LedgerOwner
from mpc_helpers.ledger.ledger import QueryChanged, QueryRecord, ReportLedger, engine_at
from mpc_helpers.ledger.moves import Fenced
from mpc_helpers.ledger.rebuild import LEDGER_CREATED, Export, accept_peer, create, export, rebuild, rebuild_ledger
from mpc_helpers.ledger.reports import Conflict, Entries, Standing
from mpc_helpers.ledger.schema import APPLICATION_ID, SCHEMA_VERSION, day_table, last_hour, site_prefix
from mpc_helpers.ledger.sqlite_engine import LOG_BYTES, PAGE_BYTES, SqliteEngine
from protocol.batch import sorted_order
from protocol.errors import ErrorKind, ProtocolError, TrefoilError
from protocol.querier.failure import QueryFailed
from protocol.querier.saved_query import QueryOptions
from protocol.status import Failure, QueryState
from protocol.units import DAY, HOUR
from protocol.vote import Vote
from tests.support.ledger_places import in_postgres, new_location, on_each_engine
from tests.support.ledger_samples import NO, OWNER, TIME, YES, digests, hours, name, reservation, reserve
from tests.support.raising import raises
from tests.support.three_helpers import SITE, ThreeHelpers, real_now, terms, three_helpers

TODAY = TIME // DAY


@pytest.fixture
def location(request: pytest.FixtureRequest, tmp_path: Path) -> LedgerLocation:
    """An empty ledger, on each engine in turn; see `pytest_generate_tests`."""
    place = new_location(request.param, tmp_path)
    ReportLedger.create(place, OWNER)
    return place


@pytest.fixture
def path(location: LedgerLocation) -> Path:
    """The file of a ledger, for what only a file has."""
    assert isinstance(location, Path)
    return location


@pytest.fixture
def ledger(location: LedgerLocation) -> Iterator[ReportLedger]:
    ledger = ReportLedger(location, OWNER)
    yield ledger
    ledger.close()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    on_each_engine(metafunc)


def standing(ledger: ReportLedger, report: int, rank: int = 9) -> Standing:
    return Standing(int(ledger.reports.lookup(digests(report), hours(1), name(rank).key, site="")[0]))


def nothing(watermark: int) -> Entries:
    return Entries(watermark, digests(), np.empty(0, dtype=np.uint32), np.empty(0, dtype=np.uint8))


def state(ledger: ReportLedger, attempt_id: bytes) -> AttemptState | None:
    record = ledger.attempts.find(attempt_id)
    return record.state if record else None


def release(ledger: ReportLedger, attempt_id: bytes) -> None:
    ledger.moves.vote(attempt_id, b"sealed")
    ledger.moves.release(attempt_id, YES)


def test_a_report_is_locked_exactly_while_its_attempt_is_not_aborted(ledger: ReportLedger) -> None:
    attempt = reserve(ledger, 1, 1, 5)
    assert standing(ledger, 5) is Standing.BUSY
    ledger.moves.abort(attempt, "deadline")
    assert standing(ledger, 5) is Standing.FREE
    attempt = reserve(ledger, 1, 2, 5)
    ledger.moves.vote(attempt, b"sealed")
    assert standing(ledger, 5) is Standing.BUSY
    ledger.moves.renounce(attempt, NO[:1], "a NO")
    assert standing(ledger, 5) is Standing.BUSY
    ledger.moves.free(attempt, NO, "both said NO")
    assert standing(ledger, 5) is Standing.FREE
    release(ledger, reserve(ledger, 2, 1, 5))
    assert standing(ledger, 5) is Standing.SEEN


def test_a_large_batch_leaves_no_large_log(path: Path, ledger: ReportLedger) -> None:
    """By itself SQLite keeps a log as long as it ever was: as long as the reports of the largest batch."""
    rows = np.random.default_rng(1).integers(0, 256, (120_000, 32), dtype=np.uint8)
    flags = np.zeros(len(rows), dtype=np.bool_)
    batch = replace(reservation(1, 1), digests=rows[sorted_order(rows)], debug_reports=flags, hours=hours(len(rows)))
    ledger.moves.reserve(batch)
    log = path.with_name(f"{path.name}-wal")
    assert log.stat().st_size > LOG_BYTES
    release(ledger, batch.attempt_id)
    assert log.stat().st_size <= LOG_BYTES


def test_every_other_move_changes_no_row(ledger: ReportLedger) -> None:
    attempt = reserve(ledger, 1, 1, 5)
    moves = {
        "vote": lambda: ledger.moves.vote(attempt, b"another share"),
        "release": lambda: ledger.moves.release(attempt, YES),
        "renounce": lambda: ledger.moves.renounce(attempt, NO, ""),
        "free": lambda: ledger.moves.free(attempt, NO, ""),
        "abort": lambda: ledger.moves.abort(attempt, ""),
    }
    legal = {
        AttemptState.RESERVED: {"vote", "abort"},
        AttemptState.VOTED: {"release", "renounce"},
        AttemptState.RELEASED: set[str](),
    }
    for now, allowed in legal.items():
        assert state(ledger, attempt) is now
        for move in moves.keys() - allowed:
            head = ledger.chain.head
            with pytest.raises(Fenced):
                moves[move]()
            assert (state(ledger, attempt), ledger.chain.head) == (now, head)
        if now is AttemptState.RESERVED:
            ledger.moves.vote(attempt, b"sealed")
        elif now is AttemptState.VOTED:
            ledger.moves.release(attempt, YES)


@pytest.mark.parametrize("votes", [[], YES[:1], [YES[0], NO[1]], [YES[0], ReceivedVote(0, Vote.YES, b"my own")]])
def test_releasing_needs_yes_from_both_peers(ledger: ReportLedger, votes: list[ReceivedVote]) -> None:
    attempt = reserve(ledger, 1, 1, 5)
    ledger.moves.vote(attempt, b"sealed")
    with pytest.raises(LedgerError, match="YES from both"):
        ledger.moves.release(attempt, votes)
    assert state(ledger, attempt) is AttemptState.VOTED


def test_freeing_needs_no_from_both_peers(ledger: ReportLedger) -> None:
    attempt = reserve(ledger, 1, 1, 5)
    ledger.moves.vote(attempt, b"sealed")
    with pytest.raises(LedgerError, match="needs a NO"):
        ledger.moves.renounce(attempt, YES, "")
    ledger.moves.renounce(attempt, NO[:1], "")
    with pytest.raises(LedgerError, match="NO from both"):
        ledger.moves.free(attempt, NO[:1], "")
    assert state(ledger, attempt) is AttemptState.RENOUNCED


ILLEGAL = {
    "UPDATE attempts SET state = 'reserved' WHERE number = 1": "no such move",
    "UPDATE attempts SET state = 'aborted', sealed_share = NULL WHERE number = 1": "no such move",
    "UPDATE attempts SET state = 'renounced', sealed_share = NULL, number = 7 WHERE number = 1": "only the state",
    "UPDATE attempts SET state = 'renounced' WHERE number = 1": "is erased",
    "UPDATE attempts SET state = 'renounced', sealed_share = x'00' WHERE number = 1": "is erased",
    "UPDATE attempts SET state = 'renounced', sealed_share = NULL, voted = 0 WHERE number = 1": "once",
    "DELETE FROM attempts": "never deleted",
    "DELETE FROM reports_20000": "by whole days",
    "UPDATE reports_20000 SET attempt = 1": "held by a live attempt",
    "UPDATE reports_20000 SET attempt = 1, draws = draws + 1": "draws that a report was in",
    "INSERT INTO undated VALUES (zeroblob(32), 1, 0, 0, NULL, 0)": "comes from peers",
    "DELETE FROM days": "above the watermark",
    "UPDATE days SET newest = 0": "never changed",
    "INSERT INTO days VALUES (-5, 0)": "not above the watermark",
    "DELETE FROM votes": "never deleted",
    "UPDATE votes SET vote = 'yes'": "never changed",
    "DELETE FROM moves": "never deleted",
    "UPDATE moves SET state = 'aborted'": "never changed",
    "INSERT INTO moves VALUES (99, 1, 'voted', zeroblob(32))": "without gaps",
    "UPDATE ledger SET watermark = -1": "never goes back",
    "UPDATE ledger SET party = 2": "owner never changes",
    "DELETE FROM ledger": "permanent",
    "INSERT INTO attempts SELECT 50, randomblob(32), query_key, query_digest, 1, 0, 0, 'reserved', 0, NULL, '', 1,"
    " NULL, 1 FROM attempts WHERE number = 1": "above the last",
    "INSERT INTO attempts SELECT 50, randomblob(32), query_key, query_digest, 2, 0, 0, 'reserved', 0, NULL, '', 1,"
    " NULL, 1 FROM attempts WHERE number = 1": "UNIQUE",
    "INSERT INTO attempts SELECT 50, randomblob(32), query_key, query_digest, 2, 0, 0, 'voted', 1, x'00', '', 1,"
    " NULL, 1 FROM attempts WHERE number = 1": "begins as reserved",
    "INSERT INTO attempts SELECT 50, randomblob(32), query_key, query_digest, 2, NULL, 0, 'reserved', 0, NULL, '', 1,"
    " NULL, 1 FROM attempts WHERE number = 1": "a debug query or a real one",
    "UPDATE attempts SET state = 'renounced', sealed_share = NULL, debug = 1 WHERE number = 1": "only the state",
    "UPDATE reports_20000 SET debug = 1": "a debug report in a real attempt",
    "INSERT INTO reports_20000 VALUES (zeroblob(34), 1, 1, 0, NULL, 0)": "a debug report in a real attempt",
    "INSERT INTO reports_20000 VALUES (zeroblob(34), 1, NULL, 0, NULL, 0)": "a debug report in a real attempt",
    "INSERT INTO reports_20000 VALUES (zeroblob(34), 0, 0, 0, 1, 0)": "a debug report in a real attempt",
    "INSERT INTO reports_20000 VALUES (zeroblob(34), 99, 0, 0, NULL, 0)": "new here was in no draw",
    "INSERT INTO reports_20000 VALUES (zeroblob(34), 99, NULL, 0, NULL, 0)": "new here was in no draw",
    "INSERT INTO reports_20000 VALUES (zeroblob(34), 1, 0, 1, NULL, 0)": "new here was in no draw",
    "INSERT INTO attempts SELECT 50, randomblob(32), zeroblob(32), query_digest, 2, 0, 0, 'reserved', 0, NULL, '', 0,"
    " NULL, 1 FROM attempts WHERE number = 1": "begins as reserved",
    "UPDATE attempts SET state = 'renounced', sealed_share = NULL, drawn = 0 WHERE number = 1": "made counts",
    "UPDATE attempts SET state = 'renounced', sealed_share = NULL, most_draws = 9 WHERE number = 1": "only the state",
}


@pytest.mark.parametrize("statement", ILLEGAL)
def test_the_database_itself_refuses(location: LedgerLocation, ledger: ReportLedger, statement: str) -> None:
    """Whatever a bug or a hand writes, the database's own triggers stop it."""
    attempt = reserve(ledger, 1, 1, 5)
    ledger.moves.vote(attempt, b"sealed")
    ledger.moves.keep_votes(attempt, NO[:1])
    dialect = in_postgres(statement) if isinstance(location, PostgresLocation) else statement
    with pytest.raises(LedgerError, match=f"(?i){ILLEGAL[statement]}"), ledger._database.transaction() as connection:
        connection.execute(dialect)


def test_a_query_has_one_live_attempt_and_rising_numbers(ledger: ReportLedger) -> None:
    first = reserve(ledger, 1, 3, 5)
    with pytest.raises(LedgerError, match=r"(?i)unique"):
        reserve(ledger, 1, 4, 6)
    ledger.moves.abort(first, "")
    with pytest.raises(LedgerError, match="above the last"):
        ledger.moves.reserve(replace(reservation(1, 3, 5), attempt_id=b"new" + bytes(29)))
    assert ledger.attempts.last_number(name(1).key) == 3
    assert standing(ledger, 6) is Standing.FREE


def test_a_smaller_query_takes_from_a_larger_reserved_one(ledger: ReportLedger) -> None:
    larger = reserve(ledger, 2, 1, 5, 6, 7)
    assert standing(ledger, 6, rank=1) is Standing.FREE
    assert standing(ledger, 6, rank=3) is Standing.BUSY
    assert ledger.moves.reserve(reservation(1, 1, 4, 5, 6)) == [larger]
    assert state(ledger, larger) is AttemptState.ABORTED
    assert standing(ledger, 7) is Standing.FREE
    assert [standing(ledger, report) for report in (4, 5, 6)] == [Standing.BUSY] * 3


def test_nobody_takes_from_voted_on_or_from_a_smaller_query(ledger: ReportLedger) -> None:
    smaller = reserve(ledger, 1, 1, 5)
    with pytest.raises(Conflict):
        reserve(ledger, 2, 1, 4, 5)
    # The conflict left the attempt aborted, so NO is not from ignorance, and it holds nothing.
    assert state(ledger, bytes([2, 1]) * 16) is AttemptState.ABORTED
    assert standing(ledger, 4) is Standing.FREE
    ledger.moves.abort(smaller, "")
    larger = reserve(ledger, 3, 1, 5)
    ledger.moves.vote(larger, b"sealed")
    with pytest.raises(Conflict):
        reserve(ledger, 1, 2, 5)
    assert state(ledger, larger) is AttemptState.VOTED


@pytest.mark.parametrize("debug", [False, True])
def test_a_report_is_reserved_only_by_a_query_of_its_own_kind(
    location: LedgerLocation, ledger: ReportLedger, debug: bool
) -> None:
    """The last guard before a sum: a real report in a debug query would be answered without noise."""
    good = [debug] * 700
    for mixed in (*([*good[:at], not debug, *good[at:]] for at in (0, 600, 700)), [not debug] * 701):
        with pytest.raises(LedgerError, match="a debug report in a real attempt, or the reverse"):
            ledger.moves.reserve(reservation(1, 1, *range(701), debug=debug, made=mixed))
    assert not ledger.reports.lookup(digests(*range(701)), hours(701), name(9).key, site="").any()
    assert ledger.chain.head.sequence == 0
    ledger.moves.abort(reserve(ledger, 1, 1, 5), "")
    # A report that was reserved once keeps its kind: under the same digest it has the same header.
    with pytest.raises(LedgerError, match="a debug report in a real attempt, or the reverse"):
        ledger.moves.reserve(reservation(2, 1, 5, debug=True))
    assert standing(ledger, 5) is Standing.FREE


@pytest.mark.parametrize("works", [True, False])
def test_a_check_during_a_large_batch_succeeds_while_statements_end(
    location: LedgerLocation, ledger: ReportLedger, monkeypatch: pytest.MonkeyPatch, works: bool
) -> None:
    """A batch of ten million reports keeps the ledger to itself for minutes, which is no reason to wake an operator."""
    monkeypatch.setattr(database, "BUSY_SECONDS", 0.02)
    begun, over, checked = threading.Event(), threading.Event(), threading.Event()

    def reserve_many() -> None:
        with ledger._database.transaction() as connection:
            begun.set()
            while not over.wait(0.01):
                if works:
                    connection.execute("SELECT watermark FROM ledger").fetchone()

    def check() -> None:
        ledger.check_held()
        checked.set()

    batch, checking = threading.Thread(target=reserve_many), threading.Thread(target=check)
    batch.start()
    assert begun.wait(30)
    checking.start()
    during = checked.wait(30 if works else 0.5)
    over.set()
    batch.join(30)
    checking.join(30)
    assert (during, checked.is_set()) == (works, True)


def test_a_move_that_was_rolled_back_is_not_in_the_head(location: LedgerLocation) -> None:
    def fail(at: Failpoint) -> None:
        raise OSError(at.value)

    with closing(ReportLedger(location, OWNER, failpoint=fail)) as ledger:
        with pytest.raises(OSError, match="before commit"):
            reserve(ledger, 1, 1, 5)
        # Another transaction, of no move.
        ledger.peer_heads.save()
        assert ledger.chain.head.sequence == 0


def test_a_transaction_that_ended_early_is_not_reported_as_committed(path: Path, ledger: ReportLedger) -> None:
    """SQLite itself ends one on some errors of a disk."""
    with pytest.raises(LedgerError), ledger._database.transaction() as connection:
        connection.execute("ROLLBACK")


def test_a_log_of_a_ledger_that_is_refused_is_not_written_back(path: Path, ledger: ReportLedger) -> None:
    reserve(ledger, 1, 1, 5)
    crashed = [path.with_name(f"copy.db{suffix}") for suffix in ("", "-wal")]
    for copy, suffix in zip(crashed, ("", "-wal"), strict=True):
        copy.write_bytes(path.with_name(path.name + suffix).read_bytes())
    before = [copy.read_bytes() for copy in crashed]
    with raises(ErrorKind.WRONG_KEY, LedgerError):
        ReportLedger(crashed[0], LedgerOwner(0, b"x" * 32))
    assert [copy.read_bytes() for copy in crashed] == before


def test_a_draft_that_was_left_or_that_fails_is_in_nobodys_way(engine_name: str, tmp_path: Path) -> None:
    place = new_location(engine_name, tmp_path)
    engine = engine_at(place)
    left = place.with_name(f"{place.name}.new") if isinstance(place, Path) else place.with_schema(f"{place.schema}_new")
    engine_at(left).create(OWNER, bytes(16))
    with pytest.raises(LedgerError, match="disk"), engine.draft() as draft:
        draft.create(OWNER, bytes(16))
        raise LedgerError("the disk is full")
    assert not engine.exists() and not draft.exists()
    with engine.draft() as draft:
        draft.create(OWNER, bytes(16))
    assert engine.exists() and not draft.exists()


def test_neither_our_own_no_nor_two_of_one_peer_moves_a_voted_attempt(ledger: ReportLedger) -> None:
    attempt = reserve(ledger, 1, 1, 5)
    ledger.moves.vote(attempt, b"sealed")
    ledger.moves.keep_votes(attempt, [ReceivedVote(0, Vote.ABORTED, b"own")])
    with raises(ErrorKind.REFUSED, LedgerError):
        ledger.moves.renounce(attempt, [], "")
    ledger.moves.renounce(attempt, [ReceivedVote(1, Vote.ABORTED, b"one")], "")
    with raises(ErrorKind.REFUSED, LedgerError):
        ledger.moves.free(attempt, [ReceivedVote(1, Vote.RENOUNCED, b"two")], "")
    assert (state(ledger, attempt), standing(ledger, 5)) == (AttemptState.RENOUNCED, Standing.BUSY)


def test_the_sweep_aborts_what_was_reserved_and_keeps_what_was_voted(
    location: LedgerLocation, ledger: ReportLedger
) -> None:
    reserved, voted = reserve(ledger, 1, 1, 1), reserve(ledger, 2, 1, 2)
    ledger.moves.vote(voted, b"sealed")
    ledger.close()
    again = ReportLedger(location, OWNER)
    assert again.moves.sweep() == [reserved]
    record = again.attempts.find(voted)
    assert record is not None
    assert (record.state, record.sealed_share) == (AttemptState.VOTED, b"sealed")
    assert "sealed" not in repr(record)
    again.close()


@pytest.mark.parametrize("share", ["x'00'", "NULL"])
def test_what_is_released_is_the_share_that_was_voted_for(
    location: LedgerLocation, ledger: ReportLedger, share: str
) -> None:
    attempt = reserve(ledger, 1, 1, 5)
    ledger.moves.vote(attempt, b"sealed")
    ledger.moves.keep_votes(attempt, YES)
    statement = f"UPDATE attempts SET state = 'released', sealed_share = {share} WHERE number = 1"  # noqa: S608
    dialect = in_postgres(statement) if isinstance(location, PostgresLocation) else statement
    with pytest.raises(LedgerError, match="once"), ledger._database.transaction() as connection:
        connection.execute(dialect)


SECRET = b"a sealed share that was never released" * 400


def on_disk(path: Path) -> bytes:
    return b"".join(file.read_bytes() for file in sorted(path.parent.glob(path.name + "*")))


def test_a_share_that_will_not_be_released_is_erased_with_the_move(path: Path, ledger: ReportLedger) -> None:
    """A bad helper that says NO after every vote must not fill the others' disks with answers under fresh noise."""
    attempt, kept = reserve(ledger, 1, 1, 5), reserve(ledger, 2, 1, 6)
    ledger.moves.vote(attempt, SECRET)
    ledger.moves.vote(kept, b"kept" * 300)
    assert SECRET[:60] in on_disk(path)
    ledger.moves.renounce(attempt, NO[:1], "")
    record = ledger.attempts.find(attempt)
    assert record is not None and (record.voted_once, record.sealed_share) == (True, None)
    assert SECRET[:60] not in on_disk(path)
    ledger.moves.free(attempt, NO[1:], "")
    record = ledger.attempts.find(attempt)
    assert record is not None and (record.state, record.voted_once) == (AttemptState.ABORTED, True)
    # The other attempt's is untouched, and still there after a restart.
    ledger.close()
    assert SECRET[:60] not in on_disk(path)
    again = ReportLedger(path, OWNER)
    found = again.attempts.find(kept)
    assert found is not None and found.sealed_share == b"kept" * 300
    again.close()


@pytest.mark.parametrize("step", [Failpoint.RENOUNCE_BEFORE_COMMIT, Failpoint.RENOUNCE_AFTER_COMMIT])
def test_erasing_is_part_of_the_transaction(location: LedgerLocation, ledger: ReportLedger, step: Failpoint) -> None:
    """Killed before the commit the share is still there, for the attempt is still voted; after it, neither is."""
    attempt = reserve(ledger, 1, 1, 5)
    ledger.moves.vote(attempt, SECRET)

    def crash(at: Failpoint) -> None:
        if at is step:
            raise KeyboardInterrupt

    ledger._database.failpoint = crash
    with pytest.raises(KeyboardInterrupt):
        ledger.moves.renounce(attempt, NO[:1], "")
    ledger.close()
    again = ReportLedger(location, OWNER)
    record = again.attempts.find(attempt)
    assert record is not None
    before = step is Failpoint.RENOUNCE_BEFORE_COMMIT
    assert record.state is (AttemptState.VOTED if before else AttemptState.RENOUNCED)
    assert record.sealed_share == (SECRET if before else None)
    again.close()


def test_lookup_of_many_in_any_mixture(ledger: ReportLedger) -> None:
    """Compared with a dictionary, over more than one statement's worth of reports."""
    rng = np.random.default_rng(7)
    rows = rng.integers(0, 256, (5000, 32), dtype=np.uint8)
    rows = rows[sorted_order(rows)]
    kinds = rng.integers(0, 3, 5000)
    when = rng.integers(TIME // HOUR - 90, TIME // HOUR, 5000).astype(np.uint32)
    for rank, kind in ((1, Standing.BUSY), (2, Standing.SEEN)):
        attempt = bytes([rank]) * 32
        chosen = rows[kinds == kind]
        ledger.moves.reserve(
            Reservation(
                attempt, name(rank), 1, False, chosen, np.zeros(len(chosen), np.bool_), when[kinds == kind], site=""
            )
        )
        ledger.moves.vote(attempt, b"sealed")
    ledger.moves.release(b"\2" * 32, YES)
    assert np.array_equal(ledger.reports.lookup(rows, when, name(9).key, site=""), kinds)
    assert ledger.reports.lookup(rows[:0], when[:0], name(9).key, site="").size == 0
    twice = np.repeat(rows, 2, axis=0)
    assert np.array_equal(ledger.reports.lookup(twice, np.repeat(when, 2), name(9).key, site=""), np.repeat(kinds, 2))


def test_the_watermark_rises_forgets_whole_days_and_refuses(location: LedgerLocation, ledger: ReportLedger) -> None:
    """A day goes with its last hour, not before: a report of that hour could still be admitted."""
    yesterday = TIME - DAY
    release(ledger, reserve(ledger, 1, 1, 5, time=yesterday))
    release(ledger, reserve(ledger, 2, 1, 6))
    # One batch of both days: each report is forgotten with its own.
    both = replace(reservation(3, 1, 7, 8), hours=np.array([yesterday // HOUR, TIME // HOUR], dtype=np.uint32))
    ledger.moves.reserve(both)
    end = last_hour(TODAY - 1)
    assert ledger.reports.advance_watermark(end - 1) == []
    assert ledger.reports.count() == 4
    assert ledger.reports.advance_watermark(end) == [TODAY - 1]
    assert ledger.reports.advance_watermark(end - DAY) == []
    assert (ledger.reports.watermark, ledger.reports.count()) == (end, 2)
    found = ledger.reports.lookup(digests(7, 8), both.hours, name(9).key, site="")
    assert found.tolist() == [Standing.FREE, Standing.BUSY]
    assert standing(ledger, 6) is Standing.SEEN
    for number, time in enumerate((yesterday, end), 1):
        with raises(ErrorKind.EXPIRED, Conflict):
            reserve(ledger, 4, number, 5, time=time)
    ledger.close()
    again = ReportLedger(location, OWNER)
    assert again.reports.watermark == end
    again.close()


def test_a_report_is_looked_for_on_the_day_of_its_header(ledger: ReportLedger) -> None:
    """The digest covers the header, so no report has two days. A wrong hour would find nothing, on purpose here."""
    release(ledger, reserve(ledger, 1, 1, 5))
    for hour, expected in ((0, Standing.SEEN), (18, Standing.SEEN), (19, Standing.FREE), (-6, Standing.FREE)):
        assert ledger.reports.lookup(digests(5), hours(1, TIME + hour * HOUR), name(9).key, site="") == [expected]


def test_a_report_is_looked_for_among_those_of_its_site(ledger: ReportLedger) -> None:
    """As with the day: no report has two sites. Peers learn its digest alone."""
    wanted = replace(reservation(1, 1, 5, 6), site="shop.example")
    ledger.moves.reserve(wanted)
    release(ledger, wanted.attempt_id)
    again = replace(reservation(2, 1, 5), site="shop.example")
    for site, expected in (("shop.example", Standing.SEEN), ("other.example", Standing.FREE)):
        assert ledger.reports.lookup(digests(5), hours(1), name(9).key, site=site) == [expected]
    with pytest.raises(Conflict):
        ledger.moves.reserve(again)
    assert np.array_equal(ledger.reports.export().digests, digests(5, 6))


async def test_helpers_record_reports_under_the_site_of_their_headers(tmp_path: Path) -> None:
    async with three_helpers(tmp_path) as three:
        batch = three.batch(three.seal([[1, 0]] * 5, terms(2)))
        await three.ask(three.query(batch), batch)
        path = load_config(three.trio.config_path(0)).ledger_file
    with closing(sqlite3.connect(path)) as db:
        ((day,),) = db.execute("SELECT day FROM days").fetchall()
        stored = db.execute(f"SELECT digest FROM {day_table(day)} ORDER BY digest").fetchall()  # noqa: S608
    assert [digest for (digest,) in stored] == [site_prefix(SITE) + row for row in sorted(map(bytes, batch.digests()))]


def test_opening_reads_nothing_that_grows(path: Path, ledger: ReportLedger) -> None:
    """Damage in a table of reports is found by `verify`, and not by opening: that has not read it."""
    rows = np.random.default_rng(3).integers(0, 256, (20_000, 32), dtype=np.uint8)
    none = np.zeros(len(rows), dtype=np.bool_)
    many = replace(reservation(1, 1), digests=rows[sorted_order(rows)], debug_reports=none, hours=hours(len(rows)))
    ledger.moves.reserve(many)
    root = ledger._database.connection.execute(
        "SELECT rootpage FROM sqlite_master WHERE name = ?", (day_table(TODAY),)
    ).fetchone()[0]
    ledger.verify()
    ledger.close()
    data = bytearray(path.read_bytes())
    data[(root - 1) * PAGE_BYTES : root * PAGE_BYTES] = b"\xff" * PAGE_BYTES
    path.write_bytes(data)
    again = ReportLedger(path, OWNER)
    with raises(ErrorKind.FILE_DAMAGED, LedgerError):
        again.verify()
    with raises(ErrorKind.FILE_DAMAGED, LedgerError):
        standing(again, 5)
    again.close()


def test_only_the_last_moves_are_verified_on_opening(
    path: Path, ledger: ReportLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(1, 6):
        ledger.moves.abort(reserve(ledger, 1, number, 5), "")
    ledger.close()
    with closing(sqlite3.connect(path)) as db:
        for (trigger,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall():
            db.execute(f"DROP TRIGGER {trigger}")
        db.execute("UPDATE moves SET state = 'voted' WHERE sequence = 2")
        db.commit()
    with raises(ErrorKind.FILE_DAMAGED, LedgerError):
        ReportLedger(path, OWNER)
    monkeypatch.setattr(engine.check_chain, "__kwdefaults__", {"recent": 8})
    again = ReportLedger(path, OWNER)
    with raises(ErrorKind.FILE_DAMAGED, LedgerError):
        again.verify()
    again.close()


def test_a_lost_ledger_is_rebuilt_with_everything_of_both_peers_spent(engine_name: str, tmp_path: Path) -> None:
    lost = new_location(engine_name, tmp_path / "lost")
    entries = []
    for helper, reports in ((1, (5, 6)), (2, (6, 7))):
        owner = LedgerOwner(helper, b"k" * 32)
        place = new_location(engine_name, tmp_path / str(helper))
        ReportLedger.create(place, owner)
        peer = ReportLedger(place, owner)
        reserve(peer, 1, 1, *reports)
        peer.moves.abort(reserve(peer, 2, 1, 8), "")
        peer.reports.advance_watermark(TIME - 20 * DAY + helper)
        entries.append(peer.reports.export())
        peer.close()
    with raises(ErrorKind.TOO_FEW, LedgerError):
        rebuild_ledger(lost, OWNER, entries[:1], TIME)
    rebuild_ledger(lost, OWNER, entries, TIME)
    rebuilt = ReportLedger(lost, OWNER)
    assert [standing(rebuilt, report) for report in (5, 6, 7)] == [Standing.SEEN] * 3
    assert standing(rebuilt, 8) is Standing.FREE
    assert rebuilt.reports.watermark == TIME - 20 * DAY + 2
    with pytest.raises(Conflict):
        reserve(rebuilt, 1, 1, 5)
    # A peer's entries say nothing about days: they are spent whatever their header's hour is.
    for number, time in ((2, TIME - 9 * DAY), (3, TIME + 9 * DAY)):
        with pytest.raises(Conflict):
            reserve(rebuilt, 1, number, 6, time=time)
    # They are forgotten together, when the watermark has passed what was the present.
    release(rebuilt, reserve(rebuilt, 2, 1, 8, time=TIME + DAY))
    assert rebuilt.reports.advance_watermark(TIME) == [-1]
    # What follows is checked against an empty table of the same rules.
    release(rebuilt, reserve(rebuilt, 3, 1, 4, time=TIME + DAY))
    assert (rebuilt.reports.count(), standing(rebuilt, 5)) == (2, Standing.FREE)
    assert rebuilt.reports.lookup(digests(8), hours(1, TIME + DAY), name(9).key, site="") == [Standing.SEEN]
    rebuilt.close()


def test_an_existing_ledger_is_never_replaced(path: Path) -> None:
    before = path.read_bytes()
    with raises(ErrorKind.FILE_EXISTS, LedgerError):
        ReportLedger.create(path, OWNER)
    with raises(ErrorKind.FILE_EXISTS, LedgerError):
        rebuild_ledger(path, OWNER, [nothing(0), nothing(0)], TIME)
    assert path.read_bytes() == before
    assert path.stat().st_mode & 0o777 == 0o600
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def _flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0xFF
    path.write_bytes(data)


def _newer(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[60:64] = (SCHEMA_VERSION + 1).to_bytes(4, "big")
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "owner", "message"),
    [
        (lambda path: _flip(path, 3), OWNER, "not a report ledger"),
        (lambda path: path.write_bytes(b""), OWNER, "not a report ledger"),
        (lambda path: path.write_bytes(path.read_bytes()[:5000]), OWNER, "damaged|cannot use"),
        (_newer, OWNER, f"version {SCHEMA_VERSION + 1}"),
        (lambda path: path.unlink(), OWNER, "no ledger at"),
        (lambda path: None, LedgerOwner(1, b"k" * 32), "ledger of helper 1"),
        (lambda path: None, LedgerOwner(0, b"x" * 32), "another identity key"),
    ],
)
def test_a_doubtful_ledger_is_refused_untouched(path: Path, damage: object, owner: LedgerOwner, message: str) -> None:
    assert callable(damage)
    damage(path)
    before = path.read_bytes() if path.exists() else None
    with pytest.raises(LedgerError, match=message) as refused:
        ReportLedger(path, owner)
    assert refused.value.hint
    assert (path.read_bytes() if path.exists() else None) == before


@pytest.mark.parametrize(
    "edit",
    [
        "UPDATE attempts SET state = 'aborted', sealed_share = NULL WHERE number = 1",
        "UPDATE moves SET state = 'aborted' WHERE sequence = 2",
        "DELETE FROM moves WHERE sequence = 2",
    ],
)
def test_an_edited_ledger_breaks_its_chain(path: Path, ledger: ReportLedger, edit: str) -> None:
    ledger.moves.vote(reserve(ledger, 1, 1, 5), b"sealed")
    ledger.close()
    with closing(sqlite3.connect(path)) as db:
        for (trigger,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall():
            db.execute(f"DROP TRIGGER {trigger}")
        db.execute(edit)
        db.commit()
    with raises(ErrorKind.FILE_DAMAGED, LedgerError):
        ReportLedger(path, OWNER)


def test_a_second_process_is_kept_out(location: LedgerLocation, ledger: ReportLedger) -> None:
    reserve(ledger, 1, 1, 5)
    with raises(ErrorKind.BUSY, LedgerError) as refused:
        ReportLedger(location, OWNER)
    assert "Another process" in refused.value.hint


def test_a_full_disk_leaves_nothing_half_written(path: Path, ledger: ReportLedger) -> None:
    pages = ledger._database.connection.execute("PRAGMA page_count").fetchone()[0]
    ledger._database.connection.execute(f"PRAGMA max_page_count = {pages}")
    with raises(ErrorKind.NO_SPACE, LedgerError):
        reserve(ledger, 1, 1, *range(2000))
    assert ledger.attempts.live(name(1).key) is None
    assert standing(ledger, 5) is Standing.FREE
    ledger._database.connection.execute("PRAGMA max_page_count = 1000000")
    reserve(ledger, 1, 1, *range(2000))


def test_the_chain_counts_every_move_and_knows_its_past(location: LedgerLocation, ledger: ReportLedger) -> None:
    start = ledger.chain.head
    attempt = reserve(ledger, 1, 1, 5)
    reserved = ledger.chain.head
    ledger.moves.vote(attempt, b"sealed")
    assert [start.sequence, reserved.sequence, ledger.chain.head.sequence] == [0, 1, 2]
    assert len({start.digest, reserved.digest, ledger.chain.head.digest}) == 3
    assert (ledger.chain.head_at(0), ledger.chain.head_at(1), ledger.chain.head_at(3)) == (
        start.digest,
        reserved.digest,
        None,
    )
    head = ledger.chain.head
    ledger.close()
    again = ReportLedger(location, OWNER)
    assert again.chain.head == head
    again.close()


def test_what_a_move_rested_on_is_remembered_with_it(location: LedgerLocation, ledger: ReportLedger) -> None:
    head = LedgerHead(b"p" * 16, 7, b"h" * 32)
    ledger.peer_heads.remember(1, head)
    reserve(ledger, 1, 1, 5)
    ledger.peer_heads.remember(2, head)
    ledger.close()
    again = ReportLedger(location, OWNER)
    assert (again.peer_heads.of(1), again.peer_heads.of(2)) == (head, None)
    again.peer_heads.forget(1)
    assert again.peer_heads.of(1) is None
    again.close()


def test_always_synchronous_full(path: Path, ledger: ReportLedger) -> None:
    assert ledger._database.connection.execute("PRAGMA synchronous").fetchone() == (2,)


def test_a_copied_ledger_is_the_same_ledger(path: Path, ledger: ReportLedger) -> None:
    """Which is why peers compare heads: the file alone cannot tell a copy from the original."""
    ledger.close()
    shutil.copy(path, path.with_name("copy.db"))
    copy = ReportLedger(path.with_name("copy.db"), OWNER)
    assert copy.chain.ledger_id == ledger.chain.ledger_id
    copy.close()


def test_query_states_survive_and_a_changed_query_is_refused(location: LedgerLocation, ledger: ReportLedger) -> None:
    ledger.queries.record(QueryRecord(name(1), QueryState.QUEUED, 10))
    failed = QueryRecord(
        name(1), QueryState.FAILED, 11, Failure(QueryState.AGREEING, 2, "helper 3 does not answer", "Wait.")
    )
    ledger.queries.record(failed)
    with pytest.raises(QueryChanged):
        ledger.queries.record(QueryRecord(QueryName(name(1).key, b"e" * 32), QueryState.QUEUED, 12))
    ledger.queries.record(QueryRecord(name(2), QueryState.RELEASED, 5))
    ledger.close()
    again = ReportLedger(location, OWNER)
    assert again.queries.find(name(1).key) == failed
    assert again.queries.find(name(3).key) is None
    assert [entry.state for entry in again.queries.all()] == [QueryState.RELEASED, QueryState.FAILED]
    again.close()


def withdrawn(rank: int) -> QueryRecord:
    return QueryRecord(name(rank), QueryState.WITHDRAWN, 20, Failure(QueryState.QUEUED, None, "withdrawn"))


def test_a_withdrawn_query_stays_withdrawn_and_gets_no_attempt(location: LedgerLocation, ledger: ReportLedger) -> None:
    """Enforced by the file itself, so that no bug above it can revive the query."""
    ledger.queries.record(QueryRecord(name(1), QueryState.FAILED, 10, Failure(QueryState.AGREEING, None, "x")))
    ledger.queries.record(withdrawn(1))
    ledger.queries.record(withdrawn(2))
    ledger.close()
    again = ReportLedger(location, OWNER)
    for rank in (1, 2):
        with pytest.raises(LedgerError, match="stays so"):
            again.queries.record(QueryRecord(name(rank), QueryState.QUEUED, 30))
        with pytest.raises(LedgerError, match="the query was withdrawn"):
            reserve(again, rank, 1, 5)
        found = again.queries.find(name(rank).key)
        assert found is not None
        assert found.state is QueryState.WITHDRAWN
    assert standing(again, 5) is Standing.FREE
    again.close()


def test_a_query_with_a_live_attempt_is_not_withdrawn(ledger: ReportLedger) -> None:
    def refused() -> None:
        with pytest.raises(LedgerError, match="cannot be withdrawn"):
            ledger.queries.record(withdrawn(1))

    attempt = reserve(ledger, 1, 1, 5)
    ledger.queries.record(QueryRecord(name(1), QueryState.VOTING, 10))
    refused()
    ledger.moves.vote(attempt, b"sealed")
    refused()
    ledger.moves.release(attempt, YES)
    refused()
    freed = reserve(ledger, 2, 1, 6)
    ledger.moves.abort(freed, "deadline")
    ledger.queries.record(withdrawn(2))


def test_a_released_share_can_be_erased_and_nothing_else_of_it_changes(ledger: ReportLedger) -> None:
    attempt = reserve(ledger, 1, 1, 5)
    release(ledger, attempt)
    voted = reserve(ledger, 2, 1, 6)
    ledger.moves.vote(voted, b"sealed")
    for rank in (1, 2):
        ledger.moves.forget_answer(name(rank).key)
    erased, kept = ledger.attempts.find(attempt), ledger.attempts.find(voted)
    assert erased is not None and kept is not None
    assert (erased.state, erased.sealed_share, len(erased.votes)) == (AttemptState.RELEASED, None, 2)
    assert kept.sealed_share == b"sealed"
    assert standing(ledger, 5) is Standing.SEEN


def test_reports_are_counted_in_slices(ledger: ReportLedger, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever needs the ledger waits for one slice, not for the table. No digest falls between two of them."""
    attempt = reserve(ledger, 1, 1, *range(1, 600), 2**256 - 1)
    monkeypatch.setattr(reports_module, "_SLICE", 4)
    assert [*ledger.reports._slices("reports_20000")] == [4] * 150 + [0]
    assert ledger.reports.count() == 600
    # A day that is forgotten meanwhile has no further slice.
    slices = ledger.reports._slices("reports_20000")
    assert next(slices) == 4
    release(ledger, attempt)
    assert ledger.reports.advance_watermark(TIME + 2 * DAY) == [20000]
    assert [*slices] == []


# A ledger of the last format, as the code of that time wrote it: `iterdump` of every kind of row.


FORMAT_4 = Path(__file__).parents[1] / "data" / "ledgers" / "format-4.sql"
HEAD_4 = bytes.fromhex("0ff0a1faf47a0cb7f2996d4d2335d6d96875919e2e8162c55f3b9629f1212ebd")
UPGRADE = """
import os, signal, sys
from pathlib import Path
from mpc_helpers.ledger import sqlite_engine
from mpc_helpers.ledger.engine import LedgerOwner
made, last = [], int(sys.argv[2])
make = sqlite_engine._trigger
def trigger(*rule):
    made.append(rule)
    if len(made) == last:
        os.kill(os.getpid(), signal.SIGKILL)
    return make(*rule)
sqlite_engine._trigger = trigger
commit = sqlite_engine.SqliteConnection.commit
def killed(self):
    if made and last == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    commit(self)
    if made and last < 0:
        os.kill(os.getpid(), signal.SIGKILL)
sqlite_engine.SqliteConnection.commit = killed
sqlite_engine.SqliteEngine(Path(sys.argv[1])).upgrade(LedgerOwner(0, b"k" * 32))
"""


@pytest.fixture
def old(tmp_path: Path) -> Path:
    path = tmp_path / "old.db"
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        db.executescript(FORMAT_4.read_text())
        db.execute("PRAGMA user_version = 4")
    return path


ATTEMPT = (
    "attempt, attempt_id, query_key, query_digest, number, debug, newest, state, voted, sealed_share, reason, drawn,"
    " most_draws"
)


def holders(path: Path) -> list[Any]:
    """Every row of every table but the reports', and every report's, in the columns of the old format."""
    with closing(sqlite3.connect(path)) as db:
        tables = ("ledger", "votes", "moves", "peer_heads", "queries")
        rows = [db.execute(f"SELECT * FROM {table}").fetchall() for table in tables]  # noqa: S608
        rows.append(db.execute(f"SELECT {ATTEMPT} FROM attempts").fetchall())  # noqa: S608
        names = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        reports = "undated" if "undated" in names else "reports"
        return [*rows, db.execute(f"SELECT digest, attempt, debug, draws FROM {reports}").fetchall()]  # noqa: S608


def test_an_old_ledger_is_refused_with_what_to_do_and_nothing_is_lost_in_the_upgrade(old: Path) -> None:
    before = holders(old)
    with raises(ErrorKind.UNKNOWN_VERSION, LedgerError) as refused:
        ReportLedger(old, OWNER)
    assert "trefoil ledger upgrade" in refused.value.hint
    with raises(ErrorKind.WRONG_KEY, LedgerError):
        SqliteEngine(old).upgrade(LedgerOwner(0, b"x" * 32))
    SqliteEngine(old).upgrade(OWNER)
    assert holders(old) == before
    with raises(ErrorKind.UNKNOWN_VERSION, LedgerError):
        SqliteEngine(old).upgrade(OWNER)
    ledger = ReportLedger(old, OWNER)
    ledger.verify()
    assert ledger.chain.head.digest == HEAD_4
    assert len(ledger.moves.sweep()) == 1
    spent = {10: Standing.SEEN, 11: Standing.SEEN, 90: Standing.SEEN, 92: Standing.SEEN}
    others = {20: Standing.FREE, 21: Standing.FREE, 30: Standing.BUSY, 40: Standing.BUSY, 50: Standing.FREE}
    for report, expected in (spent | others).items():
        for time in (TIME - DAY, TIME):
            assert ledger.reports.lookup(digests(report), hours(1, time), name(9).key, site="") == [expected], report
    for number, report in enumerate((10, 30, 40, 90)):
        with pytest.raises(Conflict):
            reserve(ledger, 9, number + 1, report)
    ledger.close()


def test_reports_that_peers_listed_are_not_forgotten_after_the_upgrade(old: Path) -> None:
    """How late they are is not known."""
    SqliteEngine(old).upgrade(OWNER)
    with closing(ReportLedger(old, OWNER)) as ledger:
        assert ledger.reports.advance_watermark(TIME + 1000 * DAY) == []
        assert standing(ledger, 90) is Standing.SEEN


@pytest.mark.parametrize("damage", ["page", "move"])
def test_a_damaged_old_ledger_is_refused_by_the_upgrade(old: Path, damage: str) -> None:
    with closing(sqlite3.connect(old)) as db:
        if damage == "move":
            for trigger in ("moves_stand", "moves_stay"):
                db.execute(f"DROP TRIGGER {trigger}")
            db.execute("UPDATE moves SET head = zeroblob(32) WHERE sequence = 1")
            db.commit()
        (root,) = db.execute("SELECT rootpage FROM sqlite_master WHERE name = 'queries'").fetchone()
        (size,) = db.execute("PRAGMA page_size").fetchone()
    data = bytearray(old.read_bytes())
    if damage == "page":
        data[(root - 1) * size : root * size] = b"\xff" * size
        old.write_bytes(data)
    with raises(ErrorKind.FILE_DAMAGED, LedgerError):
        SqliteEngine(old).upgrade(OWNER)
    assert old.read_bytes() == data


def test_reports_of_an_old_ledger_go_on_with_their_draws_on_their_day(old: Path) -> None:
    """Report 20 was in two draws before the upgrade: a third is its last."""
    SqliteEngine(old).upgrade(OWNER)
    ledger = ReportLedger(old, OWNER)
    ledger.moves.sweep()
    third = replace(reservation(7, 1, 20, 22), most_draws=3)
    ledger.moves.reserve(third)
    assert standing(ledger, 20) is Standing.BUSY
    ledger.moves.begin(third.attempt_id)
    ledger.moves.abort(third.attempt_id, "")
    assert ledger.reports.lookup(digests(20, 22), hours(2), name(9).key, 3, site="").tolist() == [
        Standing.DRAWN,
        Standing.FREE,
    ]
    with raises(ErrorKind.REFUSED, Conflict):
        ledger.moves.reserve(replace(reservation(7, 2, 20), most_draws=3))
    release(ledger, reserve(ledger, 8, 1, 20))
    assert [standing(ledger, report) for report in (20, 21)] == [Standing.SEEN, Standing.FREE]
    ledger.close()
    with closing(sqlite3.connect(old)) as db:
        for fresh in (10, 21):
            with pytest.raises(sqlite3.IntegrityError, match="recorded already"):
                db.execute(
                    "INSERT INTO reports_20000 VALUES (?, 8, 0, 0, NULL, 0)",
                    (site_prefix("") + bytes(digests(fresh)[0]),),
                )
        with pytest.raises(sqlite3.IntegrityError, match="never changed here"):
            db.execute("UPDATE undated SET attempt = 8")


@pytest.mark.parametrize("made", [1, 25, 0])
def test_an_upgrade_that_is_killed_is_run_again(old: Path, made: int) -> None:
    """Killed when the first trigger or a later one is made, or before the commit, it is the old ledger still."""
    before = holders(old)
    killed = subprocess.run([sys.executable, "-c", UPGRADE, old, str(made)], timeout=60, check=False)
    assert killed.returncode == -signal.SIGKILL
    with raises(ErrorKind.UNKNOWN_VERSION, LedgerError):
        ReportLedger(old, OWNER)
    assert holders(old) == before
    SqliteEngine(old).upgrade(OWNER)
    ledger = ReportLedger(old, OWNER)
    ledger.verify()
    ledger.close()
    assert holders(old) == before


def test_an_upgrade_that_is_killed_after_its_commit_is_run_again(old: Path) -> None:
    """It is the new ledger, in a log that nobody has written back: the file's header has the old version still."""
    before = holders(old)
    killed = subprocess.run([sys.executable, "-c", UPGRADE, old, "-1"], timeout=60, check=False)
    assert killed.returncode == -signal.SIGKILL
    with raises(ErrorKind.UNKNOWN_VERSION, LedgerError) as refused:
        ReportLedger(old, OWNER)
    assert "trefoil ledger upgrade" in refused.value.hint
    SqliteEngine(old).upgrade(OWNER)
    with closing(ReportLedger(old, OWNER)) as ledger:
        ledger.verify()
    assert holders(old) == before


async def test_an_operator_upgrades_and_checks_a_ledger(tmp_path: Path) -> None:
    async with three_helpers(tmp_path, start=False) as three:
        lose(three, 0)
        config, membership = opened(three, 0)
        key = membership.identity.public.hex().upper()
        with closing(sqlite3.connect(config.ledger_file)) as db:
            db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            db.executescript(FORMAT_4.read_text().replace((b"k" * 32).hex().upper(), key))
            db.execute("PRAGMA user_version = 4")
        for command, moves in (("upgrade", None), ("check", 13)):
            line = ["ledger", command, "--config", str(three.trio.config_path(0)), "--json", str(tmp_path / command)]
            done = CliRunner().invoke(app, line)
            assert done.exit_code == 0, done.output
            assert json.loads((tmp_path / command).read_text()).get("moves") == moves


# A lost ledger, rebuilt from both peers: nothing that was counted is counted again.


def opened(three: ThreeHelpers, party: int) -> tuple[HelperConfig, Membership]:
    config = load_config(three.trio.config_path(party))
    return config, load_membership(config, real_now())


def lose(three: ThreeHelpers, party: int) -> None:
    path = opened(three, party)[0].ledger_file
    for file in path.parent.glob(path.name + "*"):
        file.unlink()


async def test_after_a_loss_the_union_of_both_peers_counts_as_spent(tmp_path: Path) -> None:
    async with three_helpers(tmp_path) as three:
        batch = three.batch(three.seal([[1, 0]] * 4, terms(2)))
        await three.ask(three.query(batch), batch)
        for party in range(3):
            await three.stop(party)
        lose(three, 1)
        files = [tmp_path / "from-1", tmp_path / "from-3"]
        for party, file in zip((0, 2), files, strict=True):
            export(*opened(three, party), 1, file)
        with raises(ErrorKind.TOO_FEW):
            rebuild(*opened(three, 1), [files[0], files[0]], real_now())
        rebuild(*opened(three, 1), files, real_now())
        with closing(sqlite3.connect(opened(three, 1)[0].ledger_file)) as db:
            # No peer's clock may be so far ahead that a report of its entries is forgotten before it expires.
            assert db.execute("SELECT newest > ? FROM days", (real_now() + HOUR,)).fetchall() == [(1,)]
        with raises(ErrorKind.FILE_EXISTS):
            rebuild(*opened(three, 1), files, real_now())
        for party in (0, 2):
            accept_peer(*opened(three, party), 1)
        for party in range(3):
            await three.start(party)
        fresh = three.seal([[0, 1]] * 36, terms(2))
        mixed = three.batch([*fresh, *batch])
        result = await three.ask(three.query(mixed), mixed)
        assert result.answer.counted == 36
        assert [sum(counts.values()) for counts in result.answer.rejections] == [4, 4, 4]
        with pytest.raises(QueryFailed, match="all 4 reports were counted before"):
            await three.ask(three.query(batch), batch)


def test_a_rebuilt_ledger_whose_log_was_not_written_back_is_never_published(tmp_path: Path) -> None:
    """As on a full disk, where closing says nothing: without its log it would be an empty one."""
    path = tmp_path / "ledger.db"
    with raises(ErrorKind.NO_SPACE, LedgerError), SqliteEngine(path).draft() as draft:
        draft.create(OWNER, b"i" * 16)
        # A second connection keeps the first from writing the log back when it is closed.
        reader, writer = sqlite3.connect(draft.path), sqlite3.connect(draft.path)
        reader.execute("SELECT * FROM days").fetchall()
        with writer:
            writer.execute("INSERT INTO days VALUES (1, 1)")
        writer.close()
    reader.close()
    assert list(tmp_path.iterdir()) == []


def test_a_peer_may_have_voted_for_all_that_is_undecided_here(ledger: ReportLedger) -> None:
    """Its YES is stored with the next move only, and this helper may still release on it."""
    attempt = reserve(ledger, 1, 1, 5)
    assert not ledger.attempts.voted_since(1, 0)
    ledger.moves.vote(attempt, b"sealed")
    assert ledger.attempts.voted_since(1, 0) and ledger.attempts.voted_since(2, 0)
    # Entries that were exported since count it as taken.
    assert not ledger.attempts.voted_since(1, ledger.chain.head.sequence)
    ledger.moves.renounce(attempt, NO[:1], "")
    assert ledger.attempts.voted_since(2, 0)
    ledger.moves.free(attempt, NO, "")
    assert not ledger.attempts.voted_since(1, 0) and not ledger.attempts.voted_since(2, 0)
    release(ledger, reserve(ledger, 1, 2, 5))
    assert ledger.attempts.voted_since(1, 0) and not ledger.attempts.voted_since(0, 0)


async def test_a_vote_that_was_received_and_not_stored_keeps_a_rebuilt_ledger_from_being_accepted(
    tmp_path: Path,
) -> None:
    async with three_helpers(tmp_path, start=False) as three:
        config, membership = opened(three, 0)
        export(config, membership, 1, tmp_path / "older")
        with closing(ReportLedger(config.ledger, LedgerOwner(0, membership.identity.public))) as ledger:
            ledger.moves.vote(reserve(ledger, 1, 1, 5), b"sealed")
        with raises(ErrorKind.ROLLED_BACK, LedgerError):
            accept_peer(config, membership, 1)
        export(config, membership, 1, tmp_path / "newer")
        accept_peer(config, membership, 1)


async def test_no_empty_ledger_is_created_where_a_rebuilt_one_was_lost(tmp_path: Path) -> None:
    """Also if the first loss took the data folder along, and with it the marker that a ledger had been created."""
    async with three_helpers(tmp_path, start=False) as three:
        lose(three, 1)
        (opened(three, 1)[0].data / LEDGER_CREATED).unlink()
        files = [tmp_path / "from-1", tmp_path / "from-3"]
        for party, file in zip((0, 2), files, strict=True):
            export(*opened(three, party), 1, file)
        rebuild(*opened(three, 1), files, real_now())
        lose(three, 1)
        with raises(ErrorKind.ROLLED_BACK, LedgerError):
            create(*opened(three, 1))


async def test_a_rebuilt_ledger_that_nobody_accepted_is_refused_by_its_peers(tmp_path: Path) -> None:
    async with three_helpers(tmp_path) as three:
        batch = three.batch(three.seal([[1, 0]] * 4, terms(2)))
        await three.ask(three.query(batch), batch)
        for party in range(3):
            await three.stop(party)
        lose(three, 1)
        for party in (0, 2):
            export(*opened(three, party), 1, tmp_path / f"from-{party}")
        rebuild(*opened(three, 1), [tmp_path / "from-0", tmp_path / "from-2"], real_now())
        for party in range(3):
            await three.start(party)
        fresh = three.batch(three.seal([[1, 0]] * 4, terms(2)))
        refused = await three.fails(fresh, QueryOptions(seconds=2))
        assert "helper 2 has another ledger" in str(refused)
        assert refused.helpers == (1,)


async def test_entries_are_believed_only_with_the_right_signature_for_the_right_helper(tmp_path: Path) -> None:
    async with three_helpers(tmp_path, start=False) as three:
        path = tmp_path / "entries"
        export(*opened(three, 0), 1, path)
        _, second = opened(three, 1)
        _, third = opened(three, 2)
        assert Export.open(path.read_bytes(), second).party == 0
        with raises(ErrorKind.WRONG_FILE, ProtocolError):
            Export.open(path.read_bytes(), third)
        # Of another helper set, in which both have the same keys.
        *_, other = helpers = second.helper_set.helpers
        others = replace(second.helper_set, helpers=(*helpers[:2], replace(other, name="helper-4")))
        with raises(ErrorKind.BAD_SIGNATURE, ProtocolError):
            Export.open(path.read_bytes(), replace(second, helper_set=others))
        changed = bytearray(path.read_bytes())
        changed[-1] ^= 1
        with raises(ErrorKind.BAD_SIGNATURE, ProtocolError) as unsigned:
            Export.open(bytes(changed), second)
        assert "helper-1" in str(unsigned.value)
        with raises(ErrorKind.UNKNOWN_NAME):
            export(*opened(three, 0), 0, path)


async def test_a_peer_cannot_have_all_reports_refused_by_a_large_watermark(tmp_path: Path) -> None:
    """Signed and in order, but for a watermark that no honest helper has: refused by name, and no ledger is made."""
    async with three_helpers(tmp_path, start=False) as three:
        lose(three, 1)
        config, membership = opened(three, 1)
        files = [tmp_path / "from-1", tmp_path / "from-3"]
        for party, file in zip((0, 2), files, strict=True):
            export(*opened(three, party), 1, file)
        _, bad = opened(three, 2)
        for claimed in (real_now(), 2**62):
            files[1].write_bytes(Export(2, 1, nothing(claimed), LedgerHead(b"i" * 16, 0, bytes(32))).seal(bad))
            with raises(ErrorKind.OUT_OF_RANGE, TrefoilError) as refused:
                rebuild(config, membership, files, real_now())
            assert "helper-3" in str(refused.value)
            assert not config.ledger_file.exists()


async def test_a_ledger_is_not_created_where_one_has_been(tmp_path: Path) -> None:
    """An empty ledger in place of the lost one would count reports again."""
    async with three_helpers(tmp_path, start=False) as three:
        lose(three, 1)
        config, membership = opened(three, 1)
        with raises(ErrorKind.ROLLED_BACK, TrefoilError) as refused:
            create(config, membership)
        assert "trefoil ledger rebuild" in refused.value.hint
        assert not config.ledger_file.exists()

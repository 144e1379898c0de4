"""What is left of a report in the ledger: every part counted once, whatever happens to the attempts that took it."""

from __future__ import annotations

import os
import random
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpc_helpers.identity.config import LedgerLocation
from mpc_helpers.ledger.attempt import AttemptState, Failpoint, Reservation
from mpc_helpers.ledger.engine import LedgerError
from mpc_helpers.ledger.ledger import ReportLedger
from mpc_helpers.ledger.rebuild import rebuild_ledger
from mpc_helpers.ledger.reports import EVERYTHING, Conflict, Entries, Standing
from mpc_helpers.ledger.schema import site_prefix
from mpc_helpers.ledger.sqlite_engine import SqliteEngine
from protocol.amounts import Amount, Amounts
from protocol.batch import sorted_order
from protocol.errors import ErrorKind, ProtocolError
from protocol.units import DAY
from tests.mpc_helpers.test_report_ledger import ledger, location, old, path, release, state
from tests.support.ledger_places import in_postgres, new_location, on_each_engine
from tests.support.ledger_samples import NO, OWNER, TIME, YES, digests, hours, name, reservation
from tests.support.raising import raises

# Fixtures.
__all__ = ["ledger", "location", "old", "path"]
PAID = 1_000_000
KEY = bytes(32)
FULL_MATRIX = bool(os.environ.get("TREFOIL_FULL_MATRIX"))
# The query with the largest key: it takes from nobody.
LAST = b"\xff" * 32


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    on_each_engine(metafunc)


def takes(need: int, count: int, paid: int = PAID) -> Amounts:
    return Amounts(count, (Amount(paid, 1, need),))


def part(rank: int, number: int, need: int, *reports: int, paid: int = PAID, whole: bool = False) -> Reservation:
    return replace(reservation(rank, number, *reports), amounts=takes(need, len(reports), paid), whole=whole)


def take(ledger: ReportLedger, rank: int, number: int, need: int, *reports: int, paid: int = PAID) -> bytes:
    wanted = part(rank, number, need, *reports, paid=paid)
    ledger.moves.reserve(wanted)
    return wanted.attempt_id


def left(ledger: ReportLedger, *reports: int, paid: int = PAID) -> list[int]:
    """What is left for the smallest key; 0 of what is held by a voted attempt."""
    found = ledger.reports.left(digests(*reports), hours(len(reports)), takes(1, len(reports), paid), KEY, site="")
    return [int(rest) for rest in found]


def standing(ledger: ReportLedger, report: int, need: int, *, key: bytes = LAST, paid: int = PAID) -> Standing:
    found = ledger.reports.lookup(digests(report), hours(1), key, None, takes(need, 1, paid), site="")
    return Standing(int(found[0]))


def test_parts_add_up_to_what_was_paid_and_not_a_micro_more(ledger: ReportLedger) -> None:
    for rank, (need, rest) in enumerate([(200_000, 800_000), (500_000, 300_000), (200_000, 100_000)], 1):
        release(ledger, take(ledger, rank, 1, need, 5, 6))
        assert left(ledger, 5, 6) == [rest, rest]
    assert standing(ledger, 5, 100_001) is Standing.LITTLE
    with raises(ErrorKind.REFUSED, Conflict):
        take(ledger, 7, 1, 100_001, 5)
    assert standing(ledger, 5, 100_000) is Standing.FREE
    release(ledger, take(ledger, 8, 1, 100_000, 5, 6))
    assert left(ledger, 5, 6) == [0, 0]
    assert standing(ledger, 5, 15_625) is Standing.SEEN
    with raises(ErrorKind.REFUSED, Conflict):
        take(ledger, 9, 1, 1, 5)


def test_only_a_released_part_is_taken_and_a_lock_outlasts_everything_else(ledger: ReportLedger) -> None:
    release(ledger, take(ledger, 1, 1, 300_000, 5))
    attempt = take(ledger, 2, 1, 600_000, 5)
    assert standing(ledger, 5, 1) is Standing.BUSY
    # However that attempt ends, 700,001 will not be left.
    assert standing(ledger, 5, 700_001) is Standing.LITTLE
    ledger.moves.vote(attempt, b"sealed")
    ledger.moves.renounce(attempt, NO[:1], "")
    assert (standing(ledger, 5, 1), left(ledger, 5)) == (Standing.BUSY, [0])
    with raises(ErrorKind.BUSY, Conflict):
        take(ledger, 3, 1, 1, 5)
    ledger.moves.free(attempt, NO, "")
    assert left(ledger, 5) == [700_000]
    release(ledger, take(ledger, 4, 1, 700_000, 5))
    assert left(ledger, 5) == [0]


@pytest.mark.parametrize("first", [0, 300_000])
def test_a_query_that_does_not_keep_the_rest_leaves_nothing(ledger: ReportLedger, first: int) -> None:
    if first:
        release(ledger, take(ledger, 1, 1, first, 5))
    whole = part(2, 1, 100_000, 5, whole=True)
    ledger.moves.reserve(whole)
    ledger.moves.abort(whole.attempt_id, "")
    assert left(ledger, 5) == [PAID - first]
    ledger.moves.reserve(replace(part(2, 2, 100_000, 5, whole=True), attempt_id=b"w" * 32))
    release(ledger, b"w" * 32)
    assert (left(ledger, 5), standing(ledger, 5, 20_000)) == ([0], Standing.SEEN)


def test_a_query_whose_amounts_are_not_known_needs_all_of_every_report(ledger: ReportLedger) -> None:
    ledger.moves.abort(take(ledger, 1, 1, 300_000, 5), "")
    with pytest.raises(Conflict):
        ledger.moves.reserve(reservation(2, 1, 5))
    ledger.moves.reserve(reservation(2, 2, 6))
    with raises(ErrorKind.INCONSISTENT, ProtocolError):
        replace(reservation(3, 1, 7), whole=False)
    with raises(ErrorKind.INCONSISTENT, ProtocolError):
        replace(reservation(3, 1, 7), amounts=takes(1, 2))


def test_each_report_has_an_amount_of_its_own(ledger: ReportLedger) -> None:
    """Three kinds in one batch, over two kinds of days: no statement mixes them."""
    kinds = (Amount(PAID, 1, 100_000), Amount(2 * PAID, 1, 200_001), Amount(40, 1, 1))
    which = np.arange(900, dtype=np.uint32) % 3
    rows = digests(*range(900))
    when = hours(900) + np.arange(900, dtype=np.uint32) % 2 * 24
    batch = replace(reservation(1, 1, *range(900)), hours=when, amounts=Amounts(900, kinds, which), whole=False)
    ledger.moves.reserve(batch)
    release(ledger, batch.attempt_id)
    found = ledger.reports.left(rows, when, Amounts(900, kinds, which), KEY, site="")
    assert found.tolist() == [kinds[kind].paid - kinds[kind].need for kind in which]


def test_nothing_is_taken_from_others_by_a_reservation_that_finds_too_little(ledger: ReportLedger) -> None:
    """Taken and given back it would count as a draw: its process has forgotten by then that no MPC had begun."""
    release(ledger, take(ledger, 1, 1, 900_000, 6))
    larger = take(ledger, 9, 1, 100_000, 5)
    with pytest.raises(Conflict, match="too little left"):
        take(ledger, 2, 1, 200_000, 5, 6)
    assert state(ledger, larger) is AttemptState.RESERVED
    ledger.moves.abort(larger, "")
    assert ledger.attempts.draws(name(9).key) == 0
    assert take(ledger, 2, 2, 100_000, 5, 6)


def test_draws_are_counted_over_all_answers_and_a_release_neither_counts_nor_resets(ledger: ReportLedger) -> None:
    def drawn(rank: int, number: int) -> bytes:
        wanted = replace(part(rank, number, 100_000, 5), most_draws=3)
        ledger.moves.reserve(wanted)
        ledger.moves.begin(wanted.attempt_id)
        return wanted.attempt_id

    def now() -> Standing:
        return Standing(int(ledger.reports.lookup(digests(5), hours(1), LAST, 3, takes(100_000, 1), site="")[0]))

    release(ledger, drawn(1, 1))
    ledger.moves.abort(drawn(2, 1), "")
    release(ledger, drawn(3, 1))
    ledger.moves.abort(drawn(4, 1), "")
    assert now() is Standing.FREE
    release(ledger, drawn(5, 1))
    assert now() is Standing.FREE
    ledger.moves.abort(drawn(6, 1), "")
    assert (now(), left(ledger, 5)) == (Standing.DRAWN, [700_000])
    with raises(ErrorKind.REFUSED, Conflict):
        drawn(7, 1)


def test_moves_after_a_batch_of_parts_change_one_row(path: Path, ledger: ReportLedger) -> None:
    """Voting, releasing, renouncing and freeing, over 3,000 reports: no table of reports is written."""
    reports = range(3_000)

    def rows() -> list[object]:
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as db:
            return db.execute("SELECT * FROM reports_20000 ORDER BY digest").fetchall()

    def unchanged(*moves: Callable[[], None]) -> None:
        nonlocal ledger
        ledger.close()
        before = rows()
        ledger = ReportLedger(path, OWNER)
        for move in moves:
            move()
        ledger.close()
        assert rows() == before and len(before) == len(reports)
        ledger = ReportLedger(path, OWNER)

    first = take(ledger, 1, 1, 200_000, *reports)
    unchanged(lambda: ledger.moves.vote(first, b"sealed"), lambda: ledger.moves.release(first, YES))
    second = take(ledger, 2, 1, 300_000, *reports)
    unchanged(
        lambda: ledger.moves.vote(second, b"sealed"),
        lambda: ledger.moves.renounce(second, NO[:1], ""),
        lambda: ledger.moves.free(second, NO, ""),
    )
    assert left(ledger, 0, 2_999) == [800_000, 800_000]
    ledger.close()


# The database refuses, whatever the code above does. Report 5 has 700,000 left after a part that was released, 6 all of
# it after one that was aborted, 7 nothing; 8 has what peers left of it, and 9 too, which was not copied to its day.
# Attempts 4 and 5 are reserved; 5 is whole.


def _in_table(report: int) -> str:
    return f"x'{(site_prefix('') + digests(report).tobytes()).hex()}'"


def _of(report: int) -> str:
    return f"WHERE digest = {_in_table(report)}"


SET = "UPDATE reports_20000 SET"
GO = f"{SET} attempt = 4, debug = 0,"
ADD = "INSERT INTO reports_20000 VALUES"
BAD_PARTS = {
    f"{GO} before = 700001, after = 0 {_of(5)}": "what its last attempt left",
    f"{GO} before = 699999, after = 0 {_of(5)}": "what its last attempt left",
    f"{GO} before = 1000000, after = 0 {_of(5)}": "what its last attempt left",
    f"{GO} before = NULL, after = 0 {_of(5)}": "what its last attempt left",
    f"{GO} before = 700000, after = 700000 {_of(5)}": "CHECK",
    f"{GO} before = 700000, after = -1 {_of(5)}": "CHECK",
    f"{GO} before = 700000, after = 1, draws = 1 {_of(5)}": "draws that a report was in",
    f"{GO} before = 1000001, after = 0 {_of(6)}": "what its last attempt left",
    f"{GO} before = 0, after = -1 {_of(7)}": "CHECK",
    f"{GO} before = 1, after = 0 {_of(7)}": "what its last attempt left",
    f"{GO} before = 500001, after = 0 {_of(8)}": "what its last attempt left",
    f"{SET} attempt = 5, before = 700000, after = 1 {_of(5)}": "leaves nothing",
    f"{SET} after = 600000 {_of(5)}": "being reserved",
    f"{SET} after = 600000 {_of(8)}": "being reserved",
    f"{SET} attempt = 3, before = 700000, after = 0 {_of(5)}": "being reserved",
    f"{SET} attempt = 99, before = 700000, after = 0 {_of(5)}": "a debug report in a real attempt",
    f"{SET} attempt = 99, before = 500000, after = 0 {_of(8)}": "being reserved",
    f"{GO} digest = zeroblob(34), before = 700000, after = 0 {_of(5)}": "held by a live attempt|in a real attempt",
    "INSERT INTO reports_20000 VALUES (zeroblob(34), 4, 0, 0, NULL, 0)": "new here",
    "INSERT INTO reports_20000 VALUES (zeroblob(34), 4, 0, 1, 10, 5)": "new here",
    "INSERT INTO reports_20000 VALUES (zeroblob(34), 4, 0, 0, 10, 10)": "CHECK",
    "INSERT INTO reports_20000 VALUES (zeroblob(34), 5, 0, 0, NULL, 5)": "new here",
    "INSERT INTO reports_20000 VALUES (zeroblob(34), 5, 0, 0, 10, 0)": "new here",
    f"{ADD} ({_in_table(9)}, 4, 0, 0, 10, 5)": "recorded already",
    f"{ADD} ({_in_table(9)}, 0, NULL, 0, NULL, 400001)": "recorded already",
    f"{ADD} ({_in_table(9)}, 0, NULL, 1, NULL, 400000)": "recorded already",
    # One of two rows is legal, whichever is looked at first.
    f"{GO} before = 700000, after = 0 {_of(5)} OR digest = {_in_table(6)}": "what its last attempt left",
    f"{GO} before = 1000000, after = 0 {_of(5)} OR digest = {_in_table(6)}": "what its last attempt left",
    "INSERT INTO reports_20000 VALUES (zeroblob(34), 4, 0, 0, 9, 5), (randomblob(34), 4, 0, 1, 9, 5)": "new here",
    "INSERT INTO reports_20000 VALUES (zeroblob(34), 4, 0, 1, 9, 5), (randomblob(34), 4, 0, 0, 9, 5)": "new here",
    "UPDATE undated SET after = 900000": "never changed here",
    "INSERT INTO undated VALUES (zeroblob(32), 4, 0, 0, 10, 5)": "comes from peers",
    "UPDATE attempts SET state = 'aborted', whole = 1 WHERE attempt = 4": "only the state",
    "UPDATE attempts SET state = 'aborted', whole = 2 WHERE attempt = 4": "only the state",
}


def test_the_database_itself_keeps_the_reports_of_a_renounced_attempt(
    location: LedgerLocation, ledger: ReportLedger
) -> None:
    held = take(ledger, 1, 1, 300_000, 5)
    ledger.moves.vote(held, b"sealed")
    ledger.moves.renounce(held, NO[:1], "")
    take(ledger, 2, 1, 300_000, 6)
    taken = f"{SET} attempt = 2, before = 700000, after = 0 {_of(5)}"
    refused = pytest.raises(LedgerError, match="held by a live attempt")
    with refused, ledger._database.transaction() as connection:
        connection.execute(taken if isinstance(location, Path) else in_postgres(taken))


@pytest.mark.parametrize("statement", BAD_PARTS)
def test_the_database_itself_refuses(engine_name: str, tmp_path: Path, statement: str) -> None:
    place = new_location(engine_name, tmp_path)
    rebuild_ledger(place, OWNER, [entries({8: 500_000, 9: 400_000}), entries({})], TIME)
    ledger = ReportLedger(place, OWNER)
    release(ledger, take(ledger, 1, 1, 300_000, 5))
    ledger.moves.abort(take(ledger, 2, 1, 300_000, 6), "")
    whole = part(3, 1, 300_000, 7, whole=True)
    ledger.moves.reserve(whole)
    release(ledger, whole.attempt_id)
    take(ledger, 5, 1, 1, 20)
    ledger.moves.reserve(part(6, 1, 1, 21, whole=True))
    dialect = statement if engine_name == "sqlite" else in_postgres(statement)
    refused = pytest.raises(LedgerError, match=f"(?i){BAD_PARTS[statement]}")
    with closing(ledger), refused, ledger._database.transaction() as connection:
        columns = f"{_in_table(8)}, attempt, debug, draws, before, after"
        copied = f"INSERT INTO reports_20000 SELECT {columns} FROM undated WHERE after = 500000"  # noqa: S608
        connection.execute(copied if engine_name == "sqlite" else in_postgres(copied))
        states = dict(connection.execute("SELECT attempt, state FROM attempts WHERE attempt > 3").fetchall())
        assert states == {4: "reserved", 5: "reserved"}
        connection.execute(dialect)


# LEFT equals a reference that only adds up.


@dataclass
class Reference:
    """What was paid, what released attempts took, and which attempt holds each report."""

    paid: dict[int, int]
    taken: dict[int, int] = field(default_factory=dict)
    held: dict[int, bytes] = field(default_factory=dict)
    live: dict[bytes, Reservation] = field(default_factory=dict)
    reports: dict[bytes, dict[int, int]] = field(default_factory=dict)
    states: dict[bytes, AttemptState] = field(default_factory=dict)
    answered: set[int] = field(default_factory=set)

    def left(self, report: int) -> int:
        return self.paid[report] - self.taken.get(report, 0)

    def end(self, attempt: bytes, *, released: bool) -> None:
        for report, need in self.reports[attempt].items():
            del self.held[report]
            if released:
                whole = self.live[attempt].whole
                self.taken[report] = self.paid[report] if whole else self.taken.get(report, 0) + need
        if released:
            self.answered.add(self.live[attempt].query.key[0])
        del self.live[attempt], self.states[attempt]


class Interrupted(Exception):
    """The process died here."""


class Play:
    """Random moves on a ledger and on the reference. A crash is a move that was interrupted before or after commit."""

    def __init__(self, place: LedgerLocation, seed: int) -> None:
        self.place, self.random = place, random.Random(seed)
        self.reference = Reference({report: self.random.choice([63, 1_000, PAID]) for report in range(6)})
        self.crash_at: Failpoint | None = None
        self.numbers: dict[int, int] = {}
        ReportLedger.create(place, OWNER)
        self.ledger = self._open()

    def _open(self) -> ReportLedger:
        return ReportLedger(self.place, OWNER, failpoint=self._failpoint)

    def _failpoint(self, point: Failpoint) -> None:
        if point is self.crash_at:
            raise Interrupted

    def step(self) -> None:
        reference, pick = self.reference, self.random
        if reference.live and pick.random() < 0.6:
            attempt = pick.choice(sorted(reference.live))
            self._move(attempt, reference.states[attempt])
        elif pick.random() < 0.1:
            self._restart()
        else:
            self._reserve()
        self._compare()

    def _restart(self) -> None:
        self.ledger.close()
        self.ledger = self._open()
        self.crash_at = None
        for attempt in self.ledger.moves.sweep():
            self.reference.end(attempt, released=False)

    def _guarded(self, move: Callable[[], object], before: Failpoint, after: Failpoint) -> bool:
        """Run a move that may be interrupted. Return whether it was committed."""
        self.crash_at = self.random.choice([None, None, None, before, after])
        point = self.crash_at
        try:
            move()
        except Interrupted:
            return point is after
        finally:
            self.crash_at = None
        return True

    def _reserve(self) -> None:
        reference, pick = self.reference, self.random
        used = {each.query.key[0] for each in reference.live.values()} | reference.answered
        rank = pick.choice([rank for rank in range(1, 60) if rank not in used])
        reports, paid = sorted(pick.sample(range(6), pick.randint(1, 3))), reference.paid
        needs = {report: max(-(-paid[report] // 64), pick.randint(1, paid[report]) // 3) for report in reports}
        # The order of digests is that of the reports here.
        amounts = Amounts(
            len(reports),
            tuple(Amount(paid[report], 1, needs[report]) for report in reports),
            np.arange(len(reports), dtype=np.uint32),
        )
        self.numbers[rank] = number = self.numbers.get(rank, 0) + 1
        wanted = replace(reservation(rank, number, *reports), amounts=amounts, whole=pick.random() < 0.25)
        holders = {reference.held[report] for report in reports if report in reference.held}
        gives_way = all(
            reference.states[holder] is AttemptState.RESERVED and reference.live[holder].query.key > wanted.query.key
            for holder in holders
        )
        enough = all(reference.left(report) >= needs[report] for report in reports)
        try:
            points = Failpoint.RESERVE_BEFORE_COMMIT, Failpoint.RESERVE_AFTER_COMMIT
            made = self._guarded(lambda: self.ledger.moves.reserve(wanted), *points)
        except Conflict:
            assert not (gives_way and enough)
            return
        if made:
            assert gives_way and enough
            for holder in holders:
                reference.end(holder, released=False)
            reference.live[wanted.attempt_id], reference.states[wanted.attempt_id] = wanted, AttemptState.RESERVED
            reference.reports[wanted.attempt_id] = needs
            reference.held |= dict.fromkeys(reports, wanted.attempt_id)
        if self.random.random() < 0.3:
            self._restart()

    def _move(self, attempt: bytes, now: AttemptState) -> None:
        moves, reference = self.ledger.moves, self.reference
        match now, self.random.random() < 0.6:
            case AttemptState.RESERVED, True:
                points = Failpoint.VOTE_BEFORE_COMMIT, Failpoint.VOTE_AFTER_COMMIT
                if self._guarded(lambda: moves.vote(attempt, b"sealed"), *points):
                    reference.states[attempt] = AttemptState.VOTED
            case AttemptState.RESERVED, False:
                points = Failpoint.GIVE_UP_BEFORE_COMMIT, Failpoint.GIVE_UP_AFTER_COMMIT
                if self._guarded(lambda: moves.abort(attempt, ""), *points):
                    reference.end(attempt, released=False)
            case AttemptState.VOTED, True:
                points = Failpoint.RELEASE_BEFORE_COMMIT, Failpoint.RELEASE_AFTER_COMMIT
                if self._guarded(lambda: moves.release(attempt, YES), *points):
                    reference.end(attempt, released=True)
            case AttemptState.VOTED, False:
                points = Failpoint.RENOUNCE_BEFORE_COMMIT, Failpoint.RENOUNCE_AFTER_COMMIT
                if self._guarded(lambda: moves.renounce(attempt, NO[:1], ""), *points):
                    reference.states[attempt] = AttemptState.RENOUNCED
            case _:
                points = Failpoint.FREE_BEFORE_COMMIT, Failpoint.FREE_AFTER_COMMIT
                if self._guarded(lambda: moves.free(attempt, NO, ""), *points):
                    reference.end(attempt, released=False)

    def _compare(self) -> None:
        reference = self.reference
        exported = {bytes(row): int(rest) for row, rest in zip(*_columns(self.ledger.reports.export()), strict=True)}
        for report, paid in reference.paid.items():
            holder = reference.held.get(report)
            (found,) = left(self.ledger, report, paid=paid)
            gives_way = holder is None or reference.states[holder] is AttemptState.RESERVED
            assert found == (reference.left(report) if gives_way else 0)
            rest = reference.left(report)
            if holder is not None:
                rest = 0 if reference.live[holder].whole else rest - reference.reports[holder][report]
            told = min(exported.get(digests(report).tobytes(), EVERYTHING), paid)
            assert told == rest, "S1b: what a rebuilt ledger would be told"


def _columns(found: Entries) -> Sequence[object]:
    return found.digests, found.left


@settings(max_examples=9)
@given(st.integers(0, 2**32))
def test_what_is_left_is_what_a_reference_adds_up(
    engine_name: str, tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    """Over random reservations, takings, moves and crashes before and after each commit.

    A play takes seven times as long on PostgreSQL: 9 there and 27 on SQLite, and 270 with TREFOIL_FULL_MATRIX=1
    (`make chaos`).
    """
    plays = 30 if FULL_MATRIX else 3 if engine_name == "sqlite" else 1
    for number in range(plays):
        play = Play(new_location(engine_name, tmp_path_factory.mktemp("play")), seed + number)
        for _ in range(40):
            play.step()
        play.ledger.verify()
        play.ledger.close()


# Rebuilding.


def entries(rests: dict[int, int], draws: int = 0) -> Entries:
    rows = np.array([list(digests(report).tobytes()) for report in rests], dtype=np.uint8).reshape(-1, 32)
    order = sorted_order(rows)
    told = np.array(list(rests.values()), dtype=np.uint32)[order]
    return Entries(0, rows[order], told, np.full(len(rows), draws, dtype=np.uint8))


def rebuilt(place: LedgerLocation, *told: Entries) -> ReportLedger:
    rebuild_ledger(place, OWNER, told, TIME + DAY)
    return ReportLedger(place, OWNER)


def test_a_rebuilt_ledger_leaves_the_less_of_both_peers_and_counts_what_is_undecided(
    engine_name: str, tmp_path: Path
) -> None:
    told = []
    for helper in (1, 2):
        place = new_location(engine_name, tmp_path / str(helper))
        ReportLedger.create(place, OWNER)
        peer = ReportLedger(place, OWNER)
        release(peer, take(peer, 1, 1, 100_000 * helper, 5))
        undecided = take(peer, 2, 1, 300_000, 5, 6)
        if helper == 2:
            peer.moves.vote(undecided, b"sealed")
        drawn = take(peer, 3, 1, 300_000, 7)
        drawn_whole = part(5, 1, 1, 9, whole=True)
        peer.moves.reserve(drawn_whole)
        for attempt in (drawn, drawn_whole.attempt_id):
            if helper == 1:
                peer.moves.begin(attempt)
            peer.moves.abort(attempt, "")
        used_up = part(4, 1, 1, 8, whole=True)
        peer.moves.reserve(used_up)
        release(peer, used_up.attempt_id)
        told.append(peer.reports.export())
        peer.close()
    ledger = rebuilt(new_location(engine_name, tmp_path / "new"), *told)
    assert left(ledger, 5, 6, 7, 8, 9) == [500_000, 700_000, PAID, 0, PAID]
    assert [standing(ledger, report, 500_001) for report in (5, 8)] == [Standing.LITTLE, Standing.SEEN]
    # Their draws went along, also where nothing was ever taken.
    found = ledger.reports.lookup(digests(7, 9), hours(2), LAST, 1, takes(1, 2), site="")
    assert found.tolist() == [Standing.DRAWN, Standing.DRAWN]
    release(ledger, take(ledger, 1, 1, 400_000, 5, 6, 7))
    assert left(ledger, 5, 6, 7) == [100_000, 300_000, 600_000]
    # What is recorded on its day counts from then on, in the next export too.
    again = ledger.reports.export()
    assert len(np.unique(again.digests, axis=0)) == len(again.digests) == 5
    told_again = ((5, 100_000), (6, 300_000), (7, 600_000), (8, 0), (9, EVERYTHING))
    rests = dict(zip([row.tobytes() for row in again.digests], again.left.tolist(), strict=True))
    assert rests == {digests(n).tobytes(): rest for n, rest in told_again}
    ledger.close()


@pytest.mark.parametrize("lie", [PAID + 1, 50 * PAID, EVERYTHING, None])
def test_two_ledgers_lost_in_turn_and_a_peer_that_claims_more_than_was_paid(
    engine_name: str, tmp_path: Path, lie: int | None
) -> None:
    """The honest peer has no row of the report, so nobody contradicts the lie but the report's own header."""
    inflated, honest = entries({} if lie is None else {5: lie}), entries({})
    first = rebuilt(new_location(engine_name, tmp_path / "first"), inflated, honest)
    assert left(first, 5) == [PAID]
    release(first, take(first, 2, 1, 900_000, 5))
    second = rebuilt(new_location(engine_name, tmp_path / "second"), inflated, first.reports.export())
    assert left(second, 5) == [100_000]
    with raises(ErrorKind.REFUSED, Conflict):
        take(second, 3, 1, 100_001, 5)
    release(second, take(second, 4, 1, 100_000, 5))
    assert (left(first, 5), left(second, 5)) == ([100_000], [0])
    first.close()
    second.close()


def test_an_old_ledger_has_all_or_nothing_left_of_its_reports(old: Path) -> None:
    SqliteEngine(old).upgrade(OWNER)
    ledger = ReportLedger(old, OWNER)
    ledger.moves.sweep()
    assert left(ledger, 10, 11, 90, 92, 30, 40) == [0] * 6
    assert left(ledger, 20, 21, 50) == [PAID] * 3
    for number, report in enumerate((10, 30, 90), 1):
        with pytest.raises(Conflict):
            take(ledger, 9, number, 1, report)
    release(ledger, take(ledger, 9, 4, 300_000, 20, 21, 99))
    assert left(ledger, 20, 21, 99) == [700_000] * 3
    ledger.close()
    with closing(sqlite3.connect(old)) as db:
        assert db.execute("SELECT attempt FROM attempts WHERE whole = 0 ORDER BY attempt").fetchone() == (0,)


def test_amounts_are_not_changed_under_a_held_report(ledger: ReportLedger) -> None:
    """A batch in which one report is held and another free points neither."""
    held = take(ledger, 1, 1, 100_000, 5)
    ledger.moves.vote(held, b"sealed")
    with raises(ErrorKind.BUSY, Conflict):
        take(ledger, 2, 1, 100_000, 5, 6)
    assert left(ledger, 6) == [PAID]
    with pytest.raises(LedgerError, match="above the last"):
        take(ledger, 2, 1, 1, 6)

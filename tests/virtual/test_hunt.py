"""The hunt: random kill -9, pauses, partitions, full disks, clock failpoints, renewals and failing sessions together.

Here are some schedules in virtual time, and the proof that the hunt has teeth: each planted bug is caught. `make chaos`
plays 100,000 (TREFOIL_HUNT_SCHEDULES), and 200 rounds with real processes (TREFOIL_HUNT_ROUNDS). What a long run found
is in `benchmarks/results/hunt*.json`. A schedule that breaks something is printed with its seed, with every mishap left
out that is not needed; `python -m tests.support.hunt --seed N --schedules 1` plays it again.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mpc_helpers.agreement.negotiation import Negotiation
from mpc_helpers.agreement.voting import Voting
from mpc_helpers.ledger import reports, sqlite_engine
from mpc_helpers.ledger.attempt import AttemptRecord, AttemptState, Failpoint, ReceivedVote
from mpc_helpers.ledger.moves import Moves
from mpc_helpers.ledger.reports import Reports
from mpc_helpers.service import housekeeping
from protocol.vote import Vote
from tests.support import hunt_world
from tests.support.commit_world import point_regardless
from tests.support.hunt import hunt, play, quick, shrunk
from tests.support.hunt_rounds import hunt_rounds
from tests.support.hunt_schedule import HuntFault, Lie, Schedule, malicious_schedule_of, parts_schedule_of, schedule_of
from tests.support.hunt_world import LEDGERS, HuntNode, HuntWorld

SCHEDULES = int(os.environ.get("TREFOIL_HUNT_SCHEDULES", "40"))
ROUNDS = int(os.environ.get("TREFOIL_HUNT_ROUNDS", "0"))
FIRST_SEED = 1


# With how many released queries a schedule has at least, and what must have happened.
HUNTS: dict[str, tuple[Callable[[int], Schedule], float, set[str]]] = {
    "nothing but luck": (schedule_of, 0.5, {fault.value for fault in HuntFault}),
    "a malicious helper": (malicious_schedule_of, 0.25, {lie.value for lie in Lie}),
    "parts of reports, and a malicious helper every other time": (parts_schedule_of, 1.0, set()),
}


@pytest.mark.parametrize("name", HUNTS)
def test_nothing_is_lost_or_counted_twice(tmp_path: Path, show: Callable[[str], None], name: str) -> None:
    """A malicious helper equivocates, replays, raises numbers or falls silent. Parts are of three queries that overlap,
    most of which keep the rest.
    """
    scheduled, released, expected = HUNTS[name]
    counts = hunt(tmp_path, range(FIRST_SEED, FIRST_SEED + SCHEDULES), scheduled=scheduled)
    show(f"{counts.schedules} schedules\n  {dict(counts.mishaps)}\n  {dict(counts.ends)}")
    for seed, found in counts.wrong.items():
        with quick():
            smallest = shrunk(tmp_path / "shrunk", scheduled(seed))
        pytest.fail(f"{found}\n{smallest}")
    assert set(counts.mishaps) >= expected
    assert counts.ends["released"] > counts.schedules * released


@pytest.mark.parametrize("plant", ["a part that is not folded in", "an aborted part that is taken", "no lock"])
@pytest.mark.usefixtures("unguarded")
def test_the_hunt_notices_a_part_that_is_counted_wrongly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plant: str
) -> None:
    """Planted in the one text of SQL that says what is left."""
    wrong = {
        "a part that is not folded in": ("ELSE reports.after END", "ELSE coalesce(reports.before, :paid) END"),
        "an aborted part that is taken": ("coalesce(reports.before, :paid)", "reports.after"),
        "no lock": ("state IN ('aborted', 'released')", "true"),
    }
    for text in ("LEFT", "MOST"):
        monkeypatch.setattr(reports, text, getattr(reports, text).replace(*wrong[plant]))
    with quick():
        assert any(play(tmp_path / "world", parts_schedule_of(seed))[1] for seed in range(1, 40))


def test_the_hunt_notices_honest_helpers_that_sum_different_sets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: a reservation of any attempt under the number counts. Only a malicious helper can make use of it."""

    def lacks(self: Negotiation, party: int) -> bool:
        return party not in self.reserved or self.reserved[party].number != self.number

    monkeypatch.setattr(Negotiation, "lacks_reserved", lacks)
    monkeypatch.setattr(Negotiation, "contradicts", lambda *_: False)
    found: list[str] = []
    with quick():
        for seed in range(1, 200):
            found += play(tmp_path / "world", malicious_schedule_of(seed))[1]
            if any("summed different sets" in text for text in found):
                return
    pytest.fail(f"not noticed: {found}")


def test_a_schedule_is_a_function_of_its_seed(tmp_path: Path) -> None:
    with quick():
        first, again = (play(tmp_path / "world", schedule_of(7))[0] for _ in range(2))
    assert (first.out, first.ended, first.reached) == (again.out, again.ended, again.reached)
    assert schedule_of(7) != schedule_of(8)
    assert replace(malicious_schedule_of(7), malicious=None) == schedule_of(7)


@pytest.mark.skipif(not ROUNDS, reason="`make chaos` plays rounds with real processes; test_chaos has a sample")
def test_real_processes_count_every_report_once(tmp_path: Path) -> None:
    assert hunt_rounds(tmp_path, range(FIRST_SEED, FIRST_SEED + ROUNDS), tmp_path / "rounds.json").wrong == {}


# Planted bugs. Each is one change of the code under test, made where SQLite's own guards do not stop it.


@pytest.fixture
def unguarded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """SQLite stops most of these by itself; without its triggers and indexes the hunt has to."""
    monkeypatch.setattr(sqlite_engine, "reports_rules", lambda _: [])
    for party in range(3):
        template = hunt_world.template(party)
        kept = template.execute(
            "SELECT type, name, sql FROM sqlite_master WHERE type IN ('trigger', 'index')"
        ).fetchall()
        for kind, name, sql in kept:
            if sql is not None:
                template.execute(f"DROP {kind} {name}")
    yield
    hunt_world.template.cache_clear()


def caught(tmp_path: Path, seeds: range) -> list[str]:
    """What the first schedule that breaks something breaks."""
    with quick():
        for seed in seeds:
            _, found = play(tmp_path / "world", schedule_of(seed))
            if found:
                return found
    return []


def database_of(node: HuntNode) -> sqlite3.Connection:
    return LEDGERS._databases[node.path]


_correct_kill = HuntNode.kill
_correct_renew = HuntWorld._renew
_correct_move = Voting._next_move
_correct_outcome = Voting.outcome


def a_vote_that_is_not_on_disk(patch: pytest.MonkeyPatch) -> None:
    """A crash takes it back, though peers have heard it."""

    def kill(self: HuntNode) -> None:
        _correct_kill(self)
        undo = "UPDATE attempts SET state = 'reserved', voted = 0, sealed_share = NULL WHERE state = 'voted'"
        database_of(self).execute(undo)

    patch.setattr(HuntNode, "kill", kill)


def a_release_on_two_of_three(patch: pytest.MonkeyPatch) -> None:
    def next_move(self: Voting, record: AttemptRecord, votes: list[ReceivedVote]) -> Any:
        yes = [vote for vote in votes if vote.vote is Vote.YES]
        if record.state is AttemptState.VOTED and yes:
            return AttemptState.RELEASED, lambda: self._ledger.moves.release(record.attempt_id, yes)
        return _correct_move(self, record, votes)

    patch.setattr(Voting, "_next_move", next_move)


def a_renewal_that_forgets_votes(patch: pytest.MonkeyPatch) -> None:
    async def renew(self: HuntWorld, first: HuntNode) -> None:
        first.kill()
        database_of(first).execute("UPDATE attempts SET state = 'aborted', voted = 0 WHERE state = 'voted'")
        await _correct_renew(self, first)

    patch.setattr(HuntWorld, "_renew", renew)


def a_report_freed_some_time_after_its_yes(patch: pytest.MonkeyPatch) -> None:
    async def outcome(self: Voting, attempt_id: bytes) -> Any:
        try:
            async with asyncio.timeout(1.0):
                return await _correct_outcome(self, attempt_id)
        except TimeoutError:
            with self._ledger.moves._database.transaction() as connection:
                free = "UPDATE attempts SET state = 'aborted', voted = 0 WHERE attempt_id = ? AND state = 'voted'"
                connection.execute(free, (attempt_id,))
            return await _correct_outcome(self, attempt_id)

    patch.setattr(Voting, "outcome", outcome)


def a_clock_that_is_always_believed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(housekeeping, "check_clock", lambda *_: None)


def a_draw_that_is_not_counted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Moves, "begin", lambda *_: None)


def a_move_without_its_fence(patch: pytest.MonkeyPatch) -> None:
    """A worker that should be dead votes late."""

    def vote(self: Moves, attempt_id: bytes, sealed_share: bytes) -> None:
        with self._database.transaction(Failpoint.VOTE_BEFORE_COMMIT, Failpoint.VOTE_AFTER_COMMIT) as connection:
            late = "UPDATE attempts SET state = 'voted', voted = 1, sealed_share = ? WHERE attempt_id = ?"
            connection.execute(late, (sealed_share, attempt_id))

    patch.setattr(Moves, "vote", vote)


def a_restart_that_drops_what_was_voted(patch: pytest.MonkeyPatch) -> None:
    def sweep(self: Moves) -> list[bytes]:
        with self._database.transaction() as connection:
            connection.execute("UPDATE attempts SET state = 'aborted' WHERE state IN ('reserved', 'voted')")
        return []

    patch.setattr(Moves, "sweep", sweep)


def reports_that_two_attempts_hold(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Reports, "point", point_regardless)


# With the first seed from 1 on that caught each, so that this takes seconds; the search goes on from there.
PLANTED: dict[Callable[[pytest.MonkeyPatch], None], int] = {
    a_vote_that_is_not_on_disk: 10,
    a_release_on_two_of_three: 1,
    a_renewal_that_forgets_votes: 97,
    a_report_freed_some_time_after_its_yes: 4,
    a_clock_that_is_always_believed: 62,
    a_draw_that_is_not_counted: 59,
    a_move_without_its_fence: 9,
    a_restart_that_drops_what_was_voted: 10,
    reports_that_two_attempts_hold: 2,
}


@pytest.mark.usefixtures("unguarded")
@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None]
) -> None:
    seeds = range(PLANTED[plant], PLANTED[plant] + 150)
    assert caught(tmp_path, seeds[:1]) == [], "without the bug, and without SQLite's guards, nothing breaks"
    plant(monkeypatch)
    assert caught(tmp_path, seeds)

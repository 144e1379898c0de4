"""Spend: votes that wait for the others, and a ledger that fails between the vote and the release."""

from __future__ import annotations

import asyncio
import sqlite3
from typing import Any

import pytest

from mpc_helpers.ledger.attempt import AttemptOutcome, AttemptState
from mpc_helpers.ledger.file import LedgerError
from mpc_helpers.ledger.reports import Standing
from tests.support.three_agreements import OTHER, QUERY, ThreeAgreements, play


def test_a_vote_without_the_others_stays_locked_and_is_asked_about_for_ever(three: ThreeAgreements) -> None:
    async def scenario() -> None:
        attempts = await three.agree()
        three.down = {2}
        outcomes = await asyncio.gather(*(three.commit_within(10.0, party, attempts[party]) for party in (0, 1)))
        assert outcomes == [None, None]
        await asyncio.sleep(120)
        assert three.ledgers[0].reports.lookup(QUERY.batch().digests, OTHER.name.key).tolist() == [Standing.BUSY] * 6
        three.down = set()
        assert await three.commit_within(20.0, 2, attempts[2]) is AttemptOutcome.RELEASED
        await asyncio.sleep(10)
        states = {record.state for ledger in three.ledgers if (record := ledger.attempts.live(QUERY.name.key))}
        assert states == {AttemptState.RELEASED}

    play(three, scenario)


def test_an_outcome_is_known_in_the_moment_of_the_release(three: ThreeAgreements) -> None:
    """Whoever waits for a vote cast before, as after a restart, is woken by the release and asks nobody for it."""
    released: list[float] = []

    async def scenario() -> None:
        now = asyncio.get_running_loop().time
        attempts = await three.agree()
        assert await three.commit_within(3.0, 0, attempts[0]) is None
        waiting = asyncio.create_task(three.agreements[0].outcome(QUERY.name.key))
        await asyncio.sleep(100)
        assert not waiting.done()
        three.ledgers[0]._database.step = lambda step: released.append(now())
        await asyncio.gather(*(three.commit_within(20.0, party, attempts[party]) for party in (1, 2)))
        assert await waiting is AttemptOutcome.RELEASED
        # Before the first thing that happens at any later time.
        assert now() == released[-1]

    play(three, scenario)
    assert len(released) == 2


class FlakyDatabase:
    """A ledger's connection to a disk that fails whenever a test says so."""

    def __init__(self, ledger: Any) -> None:
        self.trouble = ""
        self._db = ledger._database.connection
        ledger._database.connection = self

    def execute(self, statement: str, *values: Any) -> Any:
        if self.trouble and not (self.trouble == "readonly" and statement.startswith("SELECT")):
            raise sqlite3.OperationalError(self.trouble)
        return self._db.execute(statement, *values)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._db, name)


def test_what_is_given_up_on_a_full_disk_is_free_when_there_is_room_again(three: ThreeAgreements) -> None:
    """The query has ended and nobody asks it again: without a restart the peers' reports would stay locked."""
    disk = FlakyDatabase(three.ledgers[0])

    async def scenario() -> None:
        attempts = await three.agree()
        outcomes = await asyncio.gather(*(three.commit_within(1.0, party, attempts[party]) for party in (1, 2)))
        assert outcomes == [None, None]
        disk.trouble = "disk is full"
        with pytest.raises(LedgerError, match="disk is full"):
            await three.agreements[0].give_up(attempts[0], "the MPC failed")
        await asyncio.sleep(100)
        assert [ledger.attempts.live(QUERY.name.key) is None for ledger in three.ledgers[1:]] == [False, False]
        disk.trouble = ""
        await asyncio.sleep(100)
        assert all(ledger.attempts.live(QUERY.name.key) is None for ledger in three.ledgers)
        assert not any(ledger.reports.lookup(QUERY.batch().digests, OTHER.name.key).any() for ledger in three.ledgers)

    play(three, scenario)


@pytest.mark.parametrize("trouble", ["disk I/O error", "readonly"])
def test_a_ledger_that_fails_after_the_vote_releases_when_it_works_again(
    three: ThreeAgreements, trouble: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FlakyDatabase(three.ledgers[0])
    vote, votes = three.ledgers[0].moves.vote, 0

    def vote_and_fail(attempt_id: bytes, sealed_share: bytes) -> None:
        nonlocal votes
        votes += 1
        vote(attempt_id, sealed_share)
        disk.trouble = trouble

    async def scenario() -> None:
        attempts = await three.agree()
        monkeypatch.setattr(three.ledgers[0].moves, "vote", vote_and_fail)
        running = asyncio.gather(*(three.commit_within(1000, party, attempts[party]) for party in range(3)))
        deadline = asyncio.get_running_loop().time() + 1000
        await asyncio.sleep(300)
        disk.trouble = "database is locked"
        await asyncio.sleep(300)
        disk.trouble = ""
        record = three.ledgers[0].attempts.live(QUERY.name.key)
        assert record is not None
        assert record.state is AttemptState.VOTED
        assert not running.done()
        assert await running == [AttemptOutcome.RELEASED] * 3
        assert votes == 1
        assert asyncio.get_running_loop().time() < deadline - 300

    play(three, scenario)
    logged = [record.getMessage() for record in caplog.records if record.name == "mpc_helpers.agreement.asking"]
    assert [trouble in logged[0], "database is locked" in logged[1], len(logged)] == [True, True, 2]


def test_a_helper_asks_on_after_its_ledger_failed(three: ThreeAgreements) -> None:
    """What the others push does not arrive, so that only asking can tell it that they have voted."""

    async def scenario() -> None:
        attempts = await three.agree()
        assert await three.commit_within(5, 0, attempts[0]) is None
        disk = FlakyDatabase(three.ledgers[0])
        disk.trouble = "database or disk is full"
        await asyncio.sleep(100)
        disk.trouble = ""
        three.deaf = {0}
        voting = [three.commit_within(100, party, attempts[party]) for party in (1, 2)]
        assert await asyncio.gather(*voting) == [AttemptOutcome.RELEASED] * 2
        await asyncio.sleep(10)
        record = three.ledgers[0].attempts.live(QUERY.name.key)
        assert record is not None
        assert record.state is AttemptState.RELEASED

    play(three, scenario)


@pytest.mark.parametrize("move", ["vote", "release"])
def test_a_move_that_is_on_disk_but_reported_as_failed_is_taken_up(
    three: ThreeAgreements, move: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = three.ledgers[0]
    really = getattr(ledger.moves, move)

    def moved_but_failed(*arguments: Any) -> None:
        really(*arguments)
        raise LedgerError("cannot use the ledger: disk I/O error")

    async def scenario() -> None:
        attempts = await three.agree()
        monkeypatch.setattr(ledger.moves, move, moved_but_failed)
        three.deaf = {0}
        voting = [three.commit_within(1000, party, attempts[party]) for party in range(3)]
        first, *others = await asyncio.gather(*voting, return_exceptions=True)
        assert others == [AttemptOutcome.RELEASED] * 2
        assert isinstance(first, LedgerError) if move == "vote" else first is AttemptOutcome.RELEASED
        await asyncio.sleep(10)
        record = ledger.attempts.live(QUERY.name.key)
        assert record is not None
        assert record.state is AttemptState.RELEASED

    play(three, scenario)

"""Agree and Spend as `Helper.answer` uses them: three helpers in one process, in virtual time.

Votes wait for the others, and a ledger may fail between the vote and the release.
"""

from __future__ import annotations

import asyncio
import itertools
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpc_helpers.agreement.messages import CHALLENGE_SIZE, Ask, Envelope, Head, Hello, StateMessage, pack_rejections
from mpc_helpers.agreement.negotiation import AgreementError, AlreadyReleased, AttemptTerms, TooFewReports
from mpc_helpers.agreement.voting import state_message, verify_votes
from mpc_helpers.ledger.attempt import AttemptOutcome, AttemptState, Failpoint, QueryName, Reservation, VoteStatus
from mpc_helpers.ledger.engine import LedgerError, LedgerHead
from mpc_helpers.ledger.ledger import ReportLedger
from mpc_helpers.ledger.reports import Standing, Standings
from mpc_helpers.ledger.sqlite_engine import SqliteEngine
from protocol.errors import ErrorKind, ProtocolError, Rejection
from protocol.vote import SignedVote, Vote
from tests.mpc_helpers.test_server import send, small_batch, talking_to
from tests.support.commit_world import (
    IDENTITIES,
    RETRY,
    AskedQuery,
    rejected,
    report_digest,
)
from tests.support.raising import raises
from tests.support.three_agreements import OTHER, QUERY, ThreeAgreements, play, virtually
from tests.support.three_helpers import ThreeHelpers, three_helpers


def standings_for_other(ledger: ReportLedger) -> Standings:
    """What the reports of the query are to another query, in this ledger."""
    batch = QUERY.batch()
    return ledger.reports.lookup(batch.digests, batch.hours, OTHER.name.key, None, batch.amounts, site="")


def live_state(ledger: ReportLedger) -> AttemptState | None:
    record = ledger.attempts.live(QUERY.name.key)
    return record.state if record else None


@virtually
async def test_a_report_counts_only_if_all_three_admitted_it(three: ThreeAgreements) -> None:
    batch = QUERY.batch()
    batches = {0: rejected(batch, [0], Rejection.EXPIRED), 2: rejected(batch, [3, 4], Rejection.WRONG_BODY)}
    attempts = await three.agree(batches=batches)
    assert len({attempt.attempt_id for attempt in attempts}) == 1
    for attempt in attempts:
        assert attempt.accepted.tolist() == [False, True, True, False, False, True]
        assert attempt.counted == 3
        assert attempt.rejections == ({Rejection.EXPIRED: 1}, {}, {Rejection.WRONG_BODY: 2})
    assert await three.commit(attempts) == [AttemptOutcome.RELEASED] * 3


@virtually
async def test_reports_that_the_watermark_passes_after_they_were_admitted_are_left_out(three: ThreeAgreements) -> None:
    """At one helper alone, between Admit and Agree. Only they go; before, the whole query failed at its deadline."""
    batch = QUERY.batch()
    old = replace(batch, hours=np.array([9, 9, 7, 9, 8, 9], dtype=np.uint32))
    three.ledgers[1].reports.advance_watermark(8 * 3600)
    attempts = await three.agree(batches=dict.fromkeys(range(3), old))
    assert attempts[0].accepted.tolist() == [True, True, False, True, False, True]
    assert attempts[0].rejections == ({}, {Rejection.EXPIRED: 2}, {})
    assert await three.commit(attempts) == [AttemptOutcome.RELEASED] * 3


@virtually
async def test_what_one_query_released_is_seen_by_the_next(three: ThreeAgreements) -> None:
    await three.commit(await three.agree())
    attempts = await three.agree(OTHER)
    assert {attempt.counted for attempt in attempts} == {4}
    assert attempts[0].rejections == ({Rejection.SEEN: 2},) * 3
    counted = {bytes(row) for row in OTHER.batch().digests[attempts[0].accepted]}
    assert counted == {report_digest(report) for report in range(6, 10)}


@virtually
async def test_a_retry_gets_the_same_bytes_and_never_a_new_attempt(three: ThreeAgreements) -> None:
    attempts = await three.agree()
    await three.commit(attempts)
    first = [ledger.attempts.released(QUERY.name.key) for ledger in three.ledgers]
    again = await three.agree()
    assert all(isinstance(error, AlreadyReleased) for error in again)
    assert [ledger.attempts.released(QUERY.name.key) for ledger in three.ledgers] == first
    release = first[1]
    assert release is not None
    assert release.sealed_share == b"share 1"
    votes = state_message(three.agreements[1].parties, release.attempt_id, release).votes
    assert {vote.party for vote in votes} == {0, 1, 2}
    assert "share 1" not in repr(release)


@virtually
async def test_a_given_up_attempt_frees_its_reports_everywhere_and_the_next_has_a_higher_number(
    three: ThreeAgreements,
) -> None:
    attempts = await three.agree()
    assert await three.agreements[1].abort(attempts[1], "the MPC failed")
    await asyncio.sleep(1)
    assert all(attempt.ended.is_set() for attempt in attempts)
    for ledger in three.ledgers:
        assert not standings_for_other(ledger).any()
    again = await three.agree()
    assert {attempt.number for attempt in again} == {2}
    assert again[0].attempt_id != attempts[0].attempt_id
    assert not await three.agreements[1].abort(attempts[1], "too late")


@virtually
async def test_a_silent_helper_fails_the_query_by_name_and_nothing_is_spent(three: ThreeAgreements) -> None:
    three.down = {2}
    errors = await three.agree(seconds=5, helpers=(0, 1))
    for error in errors:
        assert isinstance(error, AgreementError)
        assert error.party == 2
        assert "helper 3: no answer" in str(error)
    assert all(not standings_for_other(ledger).any() for ledger in three.ledgers)


@virtually
async def test_a_helper_that_was_not_asked_yet_says_so(three: ThreeAgreements) -> None:
    (error, _) = await three.agree(seconds=3, helpers=(0, 1))
    assert "helper 3: has not begun this query" in str(error)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"names": {1: QueryName(QUERY.name.key, b"x" * 32)}}, "another query under the same id"),
        ({"batches": {1: AskedQuery.of(1, range(7)).batch()}}, "other reports"),
        ({"parameters": {1: b"x" * 32}}, "other parameters"),
    ],
)
@virtually
async def test_a_different_question_is_refused_before_anything_is_spent(
    three: ThreeAgreements, changes: dict[str, Any], message: str
) -> None:
    errors = await three.agree(**changes, seconds=5)
    assert isinstance(errors[0], AgreementError)
    assert message in str(errors[0])
    assert errors[0].party == 1
    assert [ledger.chain.head.sequence for ledger in three.ledgers] == [0, 0, 0]


@virtually
async def test_too_few_reports_fail_before_anything_is_spent(three: ThreeAgreements) -> None:
    errors = await three.agree(batches={1: rejected(QUERY.batch(), [1, 2], Rejection.SEEN)}, minimum=5, seconds=5)
    assert all(isinstance(error, TooFewReports) for error in errors)
    assert [ledger.chain.head.sequence for ledger in three.ledgers] == [0, 0, 0]


@virtually
async def test_busy_reports_are_waited_for_holding_nothing(three: ThreeAgreements) -> None:
    """The larger query waits for the smaller; when that gives up, it goes on with all of its reports."""
    held = await three.agree(QUERY)
    waiting = asyncio.get_running_loop().create_task(three.agree(OTHER, seconds=30))
    await asyncio.sleep(3)
    assert not waiting.done()
    assert all(ledger.attempts.live(OTHER.name.key) is None for ledger in three.ledgers)
    await three.agreements[0].abort(held[0], "deadline")
    attempts = await waiting
    assert {attempt.counted for attempt in attempts} == {6}


@virtually
async def test_busy_until_the_deadline_is_a_failure_with_its_reason(three: ThreeAgreements) -> None:
    await three.agree(QUERY)
    errors = await three.agree(OTHER, seconds=3)
    assert all("2 reports that another query holds" in str(error) for error in errors)


@virtually
async def test_a_smaller_query_takes_reports_that_are_merely_reserved(three: ThreeAgreements) -> None:
    larger = await three.agree(OTHER)
    smaller = await three.agree(QUERY)
    assert {attempt.counted for attempt in smaller} == {6}
    assert all(attempt.ended.is_set() for attempt in larger)
    assert await three.commit(larger) == [AttemptOutcome.ABORTED] * 3
    assert await three.commit(smaller) == [AttemptOutcome.RELEASED] * 3


@virtually
async def test_one_copy_in_flight_per_peer_and_subject(three: ThreeAgreements) -> None:
    await three.agreements[0].peers.call(1, Ask(b"x" * 32))
    three.calls.clear()
    three.delay = 1.0

    async def ignore(peer: int, body: object) -> None:
        return None

    for _ in range(5):
        three.agreements[0].peers.post(1, "subject", Ask(b"x" * 32), ignore)
    three.agreements[0].peers.post(1, "other subject", Ask(b"x" * 32), ignore)
    await asyncio.sleep(3)
    assert three.calls == [(0, 1), (0, 1)]


@virtually
async def test_strangers_and_wrong_senders_get_no_reply(three: ThreeAgreements) -> None:
    head = three.ledgers[2].chain.head
    agreement = three.agreements[0]
    ask = Envelope(2, b"b" * 16, head, Ask(b"x" * 32))
    assert await agreement.receive(2, ask.seal(agreement.parties.realm, IDENTITIES[1])) is None
    assert await agreement.receive(1, ask.seal(agreement.parties.realm, IDENTITIES[2])) is None
    assert await agreement.receive(2, b"nonsense") is None
    # Rightly signed, but of a run of helper 3 that does not exist: its ledger cannot be checked.
    assert await agreement.receive(2, ask.seal(agreement.parties.realm, IDENTITIES[2])) is None


async def claim_another_ledger(three: ThreeAgreements, liar: int, target: int) -> None:
    """The liar's running daemon signs with the head of a ledger it did not have before."""
    peers: Any = three.agreements[liar].peers
    other = LedgerHead(b"another ledger..", 0, bytes(32))
    await three.agreements[target].receive(
        liar,
        Envelope(liar, peers._boot, other, Ask(bytes(32))).seal(three.agreements[liar].parties.realm, IDENTITIES[liar]),
    )


async def ended_by_alarm(three: ThreeAgreements, running: asyncio.Task[list[Any]]) -> None:
    """Helper 3 changes its ledger in sight of helper 1, whose query then ends at once and not at its deadline."""
    now = asyncio.get_running_loop().time
    assert not running.done()
    began = now()
    await claim_another_ledger(three, 2, 0)
    (error,) = await running
    assert now() - began < RETRY.first_delay
    assert isinstance(error, AgreementError)
    assert (str(error), error.party) == ("refused: helper 3 changed its ledger while it ran", 2)
    assert "rebuild the ledger" in error.hint
    assert three.ledgers[0].attempts.live(QUERY.name.key) is None
    assert not standings_for_other(three.ledgers[0]).any()


@virtually
async def test_an_alarm_ends_a_query_that_waits_for_proposals(three: ThreeAgreements) -> None:
    running = asyncio.get_running_loop().create_task(three.agree(helpers=(0,), seconds=1000))
    await asyncio.sleep(20)
    await ended_by_alarm(three, running)
    assert three.ledgers[0].attempts.last_number(QUERY.name.key) == 0


@virtually
async def test_an_alarm_at_the_barrier_ends_the_query_and_aborts_what_was_reserved(three: ThreeAgreements) -> None:
    create = asyncio.get_running_loop().create_task
    running = create(three.agree(helpers=(0,), seconds=1000))
    others = create(three.agree(helpers=(1, 2), seconds=1000))
    while (record := three.ledgers[0].attempts.live(QUERY.name.key)) is None:
        await asyncio.sleep(three.delay / 10)
    three.down = {2}  # before its RESERVED arrives
    await asyncio.sleep(20)
    assert three.ledgers[0].attempts.live(QUERY.name.key) == record
    await ended_by_alarm(three, running)
    aborted = three.ledgers[0].attempts.find(record.attempt_id)
    assert aborted is not None
    assert (aborted.state, aborted.voted_once) == (AttemptState.ABORTED, False)
    others.cancel()
    await asyncio.gather(others, return_exceptions=True)


@virtually
async def test_an_alarm_frees_nothing_that_was_voted_for(three: ThreeAgreements) -> None:
    attempts = await three.agree()
    three.down = {2}
    running = asyncio.gather(*(three.commit_within(10.0, party, attempts[party]) for party in (0, 1)))
    await asyncio.sleep(5)
    await claim_another_ledger(three, 2, 0)
    assert await running == [None, None]
    (error,) = await three.agree(helpers=(0,), seconds=5)
    assert "refused: helper 3" in str(error)
    assert live_state(three.ledgers[0]) is AttemptState.VOTED


@virtually
async def test_one_query_is_agreed_on_once_at_a_time(three: ThreeAgreements) -> None:
    running = asyncio.get_running_loop().create_task(three.agree(helpers=(0,), seconds=3))
    await asyncio.sleep(1)
    (error,) = await three.agree(helpers=(0,))
    assert "already being agreed" in str(error)
    await running


async def test_with_the_ledger_in_its_own_thread_and_real_time(tmp_path: Path) -> None:
    three = ThreeAgreements(tmp_path, threads=True)
    three.delay = 0.0
    three.start()
    attempts = await three.agree(seconds=60)
    assert await three.commit(attempts) == [AttemptOutcome.RELEASED] * 3
    await three.stop()
    assert len(set(itertools.chain(*three.calls))) == 3
    for ledger in three.ledgers:
        ledger.close()


@virtually
async def test_a_block_that_fails_gives_its_reports_back_at_all_three(three: ThreeAgreements) -> None:
    """Whatever ends it, an error or a stop; and nothing of it is hidden from the caller."""

    async def spend(party: int, error: BaseException | None, ended: list[int]) -> None:
        agreement = three.agreements[party]
        terms = AttemptTerms(QUERY.name, False, bytes(32))
        agreed = await agreement.agree(terms, QUERY.batch(), asyncio.get_running_loop().time() + 20)
        async with agreement.spend(agreed) as attempt:
            assert standings_for_other(three.ledgers[party]).all()
            if error is not None:
                raise error
            await attempt.ended.wait()
            ended.append(party)

    for error in (ProtocolError("planted"), asyncio.CancelledError()):
        ended: list[int] = []
        work = (spend(party, error if party == 0 else None, ended) for party in range(3))
        found = await asyncio.gather(*work, return_exceptions=True)
        assert (type(found[0]), sorted(ended)) == (type(error), [1, 2])
        for ledger in three.ledgers:
            assert ledger.attempts.live(QUERY.name.key) is None
            assert not standings_for_other(ledger).any()


@virtually
async def test_a_proposal_that_changes_after_the_agreement_changes_nothing(three: ThreeAgreements) -> None:
    """Helper 3 gives another reason for what it left out, once helper 1 has reserved: helper 1 seals the first one."""
    batches = {2: rejected(QUERY.batch(), [0], Rejection.EXPIRED)}

    def lose_contact(step: Failpoint) -> None:
        if step is Failpoint.RESERVE_AFTER_COMMIT:
            three.down.add(2)

    three.ledgers[0]._database.failpoint = lose_contact
    running = asyncio.create_task(three.agree(batches=batches))
    while not three.down:
        await asyncio.sleep(0.001)
    agreement: Any = three.agreements[0]
    proposal = agreement._negotiations.find(QUERY.name.key).proposals[2]
    changed = replace(proposal, rejections=pack_rejections({Rejection.WRONG_BODY: 1}))
    await agreement._handle(2, changed)
    three.down.clear()
    assert [attempt.rejections[2] for attempt in await running] == [{Rejection.EXPIRED: 1}] * 3


# The event loop waits for no disk: while the ledger is busy with many reports, a helper answers everybody else.


@contextmanager
def ledger_calls_in_the_loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What reads or writes a ledger from the thread that runs the loop, which is this one."""
    found: list[str] = []
    errors = SqliteEngine.errors

    def noted(self: SqliteEngine) -> object:
        if threading.current_thread() is threading.main_thread():
            found.append(self.path.name)
        return errors(self)

    with monkeypatch.context() as patched:
        # Every read and every transaction begins with it.
        patched.setattr(SqliteEngine, "errors", noted)
        yield found


async def answered(three: ThreeHelpers) -> None:
    batch = small_batch(three)
    assert (await three.ask(three.query(batch), batch)).answer.counted == 5
    async with talking_to(three) as session:
        for page in ("/healthz", "/metrics", "/v1/config"):
            assert (await send(session, "GET", page))[0] == 200


async def test_nothing_that_peers_or_queriers_ask_reads_the_ledger_in_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Peers greet each other at their first message, and once more after a restart."""
    async with three_helpers(tmp_path) as three:
        with ledger_calls_in_the_loop(monkeypatch) as found:
            await answered(three)
            assert found == []
        await three.stop(0)
        await three.start(0)
        with ledger_calls_in_the_loop(monkeypatch) as found:
            await answered(three)
            assert found == []
            three.queries[0]._book.all()
            assert found  # what the test looks for can be seen


@virtually
async def test_two_histories_of_one_ledger_in_one_run_are_an_alarm(three: ThreeAgreements) -> None:
    """The same sequence number with another digest, in a message that is otherwise as any other."""
    attempts = await three.agree()
    peers: Any = three.agreements[1].peers
    head = three.ledgers[1].chain.head
    question = Ask(attempts[0].attempt_id)
    assert await three.agreements[0].receive(1, three.agreements[1].parties.seal(peers._boot, head, question))
    other = replace(head, digest=bytes(32))
    forked = three.agreements[1].parties.seal(peers._boot, other, question)
    assert await three.agreements[0].receive(1, forked) is None
    assert 1 in three.agreements[0].alarms and "two histories" in three.agreements[0].alarms.texts[1]
    assert 1 not in three.agreements[2].alarms


@virtually
async def test_a_head_with_another_challenge_verifies_nothing(three: ThreeAgreements) -> None:
    """A HEAD recorded before the ledger went back, and replayed: only a fresh one counts."""
    peers: Any = three.agreements[1].peers
    honest = peers.answer_hello

    async def recorded(hello: Hello) -> Head:
        head: Head = await honest(hello)
        return replace(head, challenge=bytes(CHALLENGE_SIZE))

    peers.answer_hello = recorded
    assert await three.agreements[0].peers.call(1, Ask(bytes(32))) is None
    assert 1 not in three.agreements[0].alarms
    peers.answer_hello = honest
    assert await three.agreements[0].peers.call(1, Ask(bytes(32))) is not None


@virtually
async def test_a_ledger_that_is_behind_what_it_claims_to_extend_is_an_alarm(three: ThreeAgreements) -> None:
    """HELLO names the digest that HEAD must have, so that repeating it proves nothing alone."""
    peers: Any = three.agreements[1].peers
    further = replace(three.ledgers[1].chain.head, sequence=5, digest=b"f" * 32)
    three.ledgers[0].peer_heads.remember(1, further)

    async def repeated(hello: Hello) -> Head:
        return Head(hello.challenge, further.digest)

    peers.answer_hello = repeated
    assert await three.agreements[0].peers.call(1, Ask(bytes(32))) is None
    assert "went back behind move 5" in three.agreements[0].alarms.texts[1]


@virtually
async def test_a_vote_without_the_others_stays_locked_and_is_asked_about_for_ever(three: ThreeAgreements) -> None:
    attempts = await three.agree()
    three.down = {2}
    outcomes = await asyncio.gather(*(three.commit_within(10.0, party, attempts[party]) for party in (0, 1)))
    assert outcomes == [None, None]
    await asyncio.sleep(120)
    assert standings_for_other(three.ledgers[0]).tolist() == [Standing.BUSY] * 6
    three.down = set()
    assert await three.commit_within(20.0, 2, attempts[2]) is AttemptOutcome.RELEASED
    await asyncio.sleep(10)
    states = {record.state for ledger in three.ledgers if (record := ledger.attempts.live(QUERY.name.key))}
    assert states == {AttemptState.RELEASED}


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
        three.ledgers[0]._database.failpoint = lambda step: released.append(now())
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
        if self.trouble and not (self.trouble == "readonly" and statement.startswith(("SELECT", "WITH"))):
            raise sqlite3.OperationalError(self.trouble)
        return self._db.execute(statement, *values)

    def begin(self) -> None:
        self.execute("BEGIN IMMEDIATE")

    def commit(self) -> None:
        self.execute("COMMIT")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._db, name)


@virtually
async def test_what_is_given_up_on_a_full_disk_is_free_when_there_is_room_again(three: ThreeAgreements) -> None:
    """The query has ended and nobody asks it again: without a restart the peers' reports would stay locked."""
    disk = FlakyDatabase(three.ledgers[0])
    attempts = await three.agree()
    outcomes = await asyncio.gather(*(three.commit_within(1.0, party, attempts[party]) for party in (1, 2)))
    assert outcomes == [None, None]
    disk.trouble = "disk is full"
    with pytest.raises(LedgerError, match="disk is full"):
        await three.agreements[0].abort(attempts[0], "the MPC failed")
    await asyncio.sleep(100)
    assert [ledger.attempts.live(QUERY.name.key) is None for ledger in three.ledgers[1:]] == [False, False]
    disk.trouble = ""
    await asyncio.sleep(100)
    assert all(ledger.attempts.live(QUERY.name.key) is None for ledger in three.ledgers)
    assert not any(standings_for_other(ledger).any() for ledger in three.ledgers)


@pytest.mark.parametrize("reported", ["reserved", "failed"])
@virtually
async def test_what_is_reserved_in_a_ledger_that_cannot_be_read_is_free_when_it_can(
    three: ThreeAgreements, reported: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the deadline, or when the reply to the reservation is lost: the query ends, and nobody reads again for it."""
    disk = FlakyDatabase(three.ledgers[0])
    moves = three.ledgers[0].moves
    reserve = moves.reserve

    def reserve_and_fail(reservation: Reservation) -> list[bytes]:
        taken = reserve(reservation)
        disk.trouble = "disk I/O error"
        three.down = {1, 2}
        if reported == "failed":
            raise LedgerError("cannot use the ledger: disk I/O error")
        return taken

    monkeypatch.setattr(moves, "reserve", reserve_and_fail)
    first, *_ = await three.agree()
    assert isinstance(first, LedgerError)
    await asyncio.sleep(100)
    disk.trouble = ""
    assert live_state(three.ledgers[0]) is AttemptState.RESERVED
    three.down = set()
    await asyncio.sleep(100)
    assert all(ledger.attempts.live(QUERY.name.key) is None for ledger in three.ledgers)
    assert not any(standings_for_other(ledger).any() for ledger in three.ledgers)


@virtually
async def test_a_refusal_does_not_say_where_the_ledger_is(three: ThreeAgreements) -> None:
    disk = FlakyDatabase(three.ledgers[0])
    disk.trouble = "disk I/O error"
    (failed,) = await three.agree(helpers=(0,))
    disk.trouble = ""
    waiting = await three.agree(helpers=(1, 2), seconds=5.0)
    assert isinstance(failed, LedgerError) and "0.db" in str(failed)
    assert [("ledger" in str(error), "0.db" in str(error)) for error in waiting] == [(True, False)] * 2


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
        assert live_state(three.ledgers[0]) is AttemptState.VOTED
        assert not running.done()
        assert await running == [AttemptOutcome.RELEASED] * 3
        assert votes == 1
        assert asyncio.get_running_loop().time() < deadline - 300

    play(three, scenario)
    logged = [record.getMessage() for record in caplog.records if record.name == "mpc_helpers.agreement.voting"]
    assert [trouble in logged[0], "database is locked" in logged[1], len(logged)] == [True, True, 2]


@virtually
async def test_a_helper_asks_on_after_its_ledger_failed(three: ThreeAgreements) -> None:
    """What the others push does not arrive, so that only asking can tell it that they have voted."""
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
    assert live_state(three.ledgers[0]) is AttemptState.RELEASED


@pytest.mark.parametrize("move", ["vote", "release"])
@virtually
async def test_a_move_that_is_on_disk_but_reported_as_failed_is_taken_up(
    three: ThreeAgreements, move: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = three.ledgers[0]
    really = getattr(ledger.moves, move)

    def moved_but_failed(*arguments: Any) -> None:
        really(*arguments)
        raise LedgerError("cannot use the ledger: disk I/O error")

    attempts = await three.agree()
    monkeypatch.setattr(ledger.moves, move, moved_but_failed)
    three.deaf = {0}
    voting = [three.commit_within(1000, party, attempts[party]) for party in range(3)]
    first, *others = await asyncio.gather(*voting, return_exceptions=True)
    assert others == [AttemptOutcome.RELEASED] * 2
    assert isinstance(first, LedgerError) if move == "vote" else first is AttemptOutcome.RELEASED
    await asyncio.sleep(10)
    assert live_state(ledger) is AttemptState.RELEASED


@virtually
async def test_a_renounced_no_counts_only_with_the_first_hand_no_behind_it(three: ThreeAgreements) -> None:
    """Alone it would free nothing and lock the reports for good: nobody could show who had aborted."""
    attempts = await three.agree()
    attempt_id = attempts[0].attempt_id
    three.down = {2}
    assert await three.commit_within(3.0, 0, attempts[0]) is None
    sender, receiver = three.agreements[1].parties, three.agreements[0].parties
    alone = StateMessage(attempt_id, VoteStatus.NO, (sender.sign_vote(attempt_id, Vote.RENOUNCED),))
    with raises(ErrorKind.BAD_PROOF):
        verify_votes(receiver, 1, alone)
    await three.agreements[0].voting.handle_state(1, alone)
    assert [record.state for record in three.ledgers[0].attempts.pending()] == [AttemptState.VOTED]
    # With the vote that caused it, it counts.
    cause = three.agreements[2].parties.sign_vote(attempt_id, Vote.ABORTED)
    assert len(verify_votes(receiver, 1, replace(alone, votes=(*alone.votes, cause)))) == 2
    # Signed by another than its party it is no cause, and an echo of the receiver's own NO says nothing new.
    forged = SignedVote.sign(2, attempt_id, Vote.ABORTED, sender.identity)
    with raises(ErrorKind.BAD_SIGNATURE):
        verify_votes(receiver, 1, replace(alone, votes=(*alone.votes, forged)))
    echo = receiver.sign_vote(attempt_id, Vote.ABORTED)
    assert verify_votes(receiver, 1, replace(alone, votes=(*alone.votes, echo))) == []

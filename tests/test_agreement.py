"""Agree and Spend as the helper's page uses them: three helpers in one process, in virtual time."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpc_helpers.agreement.errors import AgreementError, AlreadyReleased, TooFewReports
from mpc_helpers.agreement.messages import Ask, Envelope, pack_rejections
from mpc_helpers.agreement.negotiation import AttemptTerms
from mpc_helpers.ledger.attempt import AttemptOutcome, AttemptState, QueryName, Step
from mpc_helpers.ledger.file import LedgerHead
from protocol.errors import ProtocolError, Rejection
from tests.support.commit_world import (
    IDENTITIES,
    PACE,
    AskedQuery,
    rejected,
    report_digest,
)
from tests.support.three_agreements import OTHER, QUERY, ThreeAgreements, play


def test_a_report_counts_only_if_all_three_admitted_it(three: ThreeAgreements) -> None:
    batch = QUERY.batch()
    batches = {0: rejected(batch, [0], Rejection.EXPIRED), 2: rejected(batch, [3, 4], Rejection.WRONG_BODY)}

    async def scenario() -> None:
        attempts = await three.agree(batches=batches)
        assert len({attempt.attempt_id for attempt in attempts}) == 1
        for attempt in attempts:
            assert attempt.accepted.tolist() == [False, True, True, False, False, True]
            assert attempt.counted == 3
            assert attempt.rejections == ({Rejection.EXPIRED: 1}, {}, {Rejection.WRONG_BODY: 2})
        assert await three.commit(attempts) == [AttemptOutcome.RELEASED] * 3

    play(three, scenario)


def test_reports_that_the_watermark_passes_after_they_were_admitted_are_left_out(three: ThreeAgreements) -> None:
    """At one helper alone, between Admit and Agree. Only they go; before, the whole query failed at its deadline."""
    batch = QUERY.batch()
    old = replace(batch, hours=np.array([9, 9, 7, 9, 8, 9], dtype=np.uint32))

    async def scenario() -> None:
        three.ledgers[1].reports.advance_watermark(8 * 3600)
        attempts = await three.agree(batches=dict.fromkeys(range(3), old))
        assert attempts[0].accepted.tolist() == [True, True, False, True, False, True]
        assert attempts[0].rejections == ({}, {Rejection.EXPIRED: 2}, {})
        assert await three.commit(attempts) == [AttemptOutcome.RELEASED] * 3

    play(three, scenario)


def test_what_one_query_released_is_seen_by_the_next(three: ThreeAgreements) -> None:
    async def scenario() -> None:
        await three.commit(await three.agree())
        attempts = await three.agree(OTHER)
        assert {attempt.counted for attempt in attempts} == {4}
        assert attempts[0].rejections == ({Rejection.SEEN: 2},) * 3
        counted = {bytes(row) for row in OTHER.batch().digests[attempts[0].accepted]}
        assert counted == {report_digest(report) for report in range(6, 10)}

    play(three, scenario)


def test_a_retry_gets_the_same_bytes_and_never_a_new_attempt(three: ThreeAgreements) -> None:
    async def scenario() -> None:
        attempts = await three.agree()
        await three.commit(attempts)
        first = [await agreement.answer(QUERY.name.key) for agreement in three.agreements]
        again = await three.agree()
        assert all(isinstance(error, AlreadyReleased) for error in again)
        assert [await agreement.answer(QUERY.name.key) for agreement in three.agreements] == first
        release = first[1]
        assert release is not None
        assert release.sealed_share == b"share 1"
        assert {vote.party for vote in release.votes} == {0, 1, 2}
        assert "share 1" not in repr(release)

    play(three, scenario)


def test_a_given_up_attempt_frees_its_reports_everywhere_and_the_next_has_a_higher_number(
    three: ThreeAgreements,
) -> None:
    async def scenario() -> None:
        attempts = await three.agree()
        assert await three.agreements[1].give_up(attempts[1], "the MPC failed")
        await asyncio.sleep(1)
        assert all(attempt.ended.is_set() for attempt in attempts)
        for ledger in three.ledgers:
            assert not np.any(ledger.reports.lookup(QUERY.batch().digests, OTHER.name.key))
        again = await three.agree()
        assert {attempt.number for attempt in again} == {2}
        assert again[0].attempt_id != attempts[0].attempt_id
        assert not await three.agreements[1].give_up(attempts[1], "too late")

    play(three, scenario)


def test_a_silent_helper_fails_the_query_by_name_and_nothing_is_spent(three: ThreeAgreements) -> None:
    async def scenario() -> None:
        three.down = {2}
        errors = await three.agree(seconds=5, helpers=(0, 1))
        for error in errors:
            assert isinstance(error, AgreementError)
            assert error.party == 2
            assert "helper 3: no answer" in str(error)
        assert all(not np.any(ledger.reports.lookup(QUERY.batch().digests, OTHER.name.key)) for ledger in three.ledgers)

    play(three, scenario)


def test_a_helper_that_was_not_asked_yet_says_so(three: ThreeAgreements) -> None:
    async def scenario() -> None:
        (error, _) = await three.agree(seconds=3, helpers=(0, 1))
        assert "helper 3: has not begun this query" in str(error)

    play(three, scenario)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"names": {1: QueryName(QUERY.name.key, b"x" * 32)}}, "another query under the same id"),
        ({"batches": {1: AskedQuery.of(1, range(7)).batch()}}, "other reports"),
        ({"parameters": {1: b"x" * 32}}, "other parameters"),
    ],
)
def test_a_different_question_is_refused_before_anything_is_spent(
    three: ThreeAgreements, changes: dict[str, Any], message: str
) -> None:
    async def scenario() -> None:
        errors = await three.agree(**changes, seconds=5)
        assert isinstance(errors[0], AgreementError)
        assert message in str(errors[0])
        assert errors[0].party == 1
        assert [ledger.chain.head.sequence for ledger in three.ledgers] == [0, 0, 0]

    play(three, scenario)


def test_too_few_reports_fail_before_anything_is_spent(three: ThreeAgreements) -> None:
    async def scenario() -> None:
        errors = await three.agree(batches={1: rejected(QUERY.batch(), [1, 2], Rejection.SEEN)}, minimum=5, seconds=5)
        assert all(isinstance(error, TooFewReports) for error in errors)
        assert [ledger.chain.head.sequence for ledger in three.ledgers] == [0, 0, 0]

    play(three, scenario)


def test_busy_reports_are_waited_for_holding_nothing(three: ThreeAgreements) -> None:
    """The larger query waits for the smaller; when that gives up, it goes on with all of its reports."""

    async def scenario() -> None:
        held = await three.agree(QUERY)
        waiting = asyncio.get_running_loop().create_task(three.agree(OTHER, seconds=30))
        await asyncio.sleep(3)
        assert not waiting.done()
        assert all(ledger.attempts.live(OTHER.name.key) is None for ledger in three.ledgers)
        await three.agreements[0].give_up(held[0], "deadline")
        attempts = await waiting
        assert {attempt.counted for attempt in attempts} == {6}

    play(three, scenario)


def test_busy_until_the_deadline_is_a_failure_with_its_reason(three: ThreeAgreements) -> None:
    async def scenario() -> None:
        await three.agree(QUERY)
        errors = await three.agree(OTHER, seconds=3)
        assert all("2 reports that another query holds" in str(error) for error in errors)

    play(three, scenario)


def test_a_smaller_query_takes_reports_that_are_merely_reserved(three: ThreeAgreements) -> None:
    async def scenario() -> None:
        larger = await three.agree(OTHER)
        smaller = await three.agree(QUERY)
        assert {attempt.counted for attempt in smaller} == {6}
        assert all(attempt.ended.is_set() for attempt in larger)
        assert await three.commit(larger) == [AttemptOutcome.ABORTED] * 3
        assert await three.commit(smaller) == [AttemptOutcome.RELEASED] * 3

    play(three, scenario)


def test_one_copy_in_flight_per_peer_and_subject(three: ThreeAgreements) -> None:
    async def scenario() -> None:
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

    play(three, scenario)


def test_strangers_and_wrong_senders_get_no_reply(three: ThreeAgreements) -> None:
    async def scenario() -> None:
        head = three.ledgers[2].chain.head
        agreement = three.agreements[0]
        ask = Envelope(2, b"b" * 16, head, Ask(b"x" * 32))
        assert await agreement.receive(2, ask.seal(agreement.parties.realm, IDENTITIES[1])) is None
        assert await agreement.receive(1, ask.seal(agreement.parties.realm, IDENTITIES[2])) is None
        assert await agreement.receive(2, b"nonsense") is None
        # Rightly signed, but of a run of helper 3 that does not exist: its ledger cannot be checked.
        assert await agreement.receive(2, ask.seal(agreement.parties.realm, IDENTITIES[2])) is None

    play(three, scenario)


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
    assert now() - began < PACE.first
    assert isinstance(error, AgreementError)
    assert (str(error), error.party) == ("refused: helper 3 changed its ledger while it ran", 2)
    assert "rebuild the ledger" in error.hint
    assert three.ledgers[0].attempts.live(QUERY.name.key) is None
    assert not np.any(three.ledgers[0].reports.lookup(QUERY.batch().digests, OTHER.name.key))


def test_an_alarm_ends_a_query_that_waits_for_proposals(three: ThreeAgreements) -> None:
    async def scenario() -> None:
        running = asyncio.get_running_loop().create_task(three.agree(helpers=(0,), seconds=1000))
        await asyncio.sleep(20)
        await ended_by_alarm(three, running)
        assert three.ledgers[0].attempts.last_number(QUERY.name.key) == 0

    play(three, scenario)


def test_an_alarm_at_the_barrier_ends_the_query_and_aborts_what_was_reserved(three: ThreeAgreements) -> None:
    async def scenario() -> None:
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

    play(three, scenario)


def test_an_alarm_frees_nothing_that_was_voted_for(three: ThreeAgreements) -> None:
    async def scenario() -> None:
        attempts = await three.agree()
        three.down = {2}
        running = asyncio.gather(*(three.commit_within(10.0, party, attempts[party]) for party in (0, 1)))
        await asyncio.sleep(5)
        await claim_another_ledger(three, 2, 0)
        assert await running == [None, None]
        (error,) = await three.agree(helpers=(0,), seconds=5)
        assert "refused: helper 3" in str(error)
        record = three.ledgers[0].attempts.live(QUERY.name.key)
        assert record is not None
        assert record.state is AttemptState.VOTED

    play(three, scenario)


def test_one_query_is_agreed_on_once_at_a_time(three: ThreeAgreements) -> None:
    async def scenario() -> None:
        running = asyncio.get_running_loop().create_task(three.agree(helpers=(0,), seconds=3))
        await asyncio.sleep(1)
        (error,) = await three.agree(helpers=(0,))
        assert "already being agreed" in str(error)
        await running

    play(three, scenario)


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


def test_a_block_that_fails_gives_its_reports_back_at_all_three(three: ThreeAgreements) -> None:
    """Whatever ends it, an error or a stop; and nothing of it is hidden from the caller."""

    async def spend(party: int, error: BaseException | None, ended: list[int]) -> None:
        agreement = three.agreements[party]
        terms = AttemptTerms(QUERY.name, False, bytes(32))
        agreed = await agreement.agree(terms, QUERY.batch(), asyncio.get_running_loop().time() + 20)
        async with agreement.spend(agreed) as attempt:
            assert three.ledgers[party].reports.lookup(QUERY.batch().digests, OTHER.name.key).all()
            if error is not None:
                raise error
            await attempt.ended.wait()
            ended.append(party)

    async def scenario() -> None:
        for error in (ProtocolError("planted"), asyncio.CancelledError()):
            ended: list[int] = []
            work = (spend(party, error if party == 0 else None, ended) for party in range(3))
            found = await asyncio.gather(*work, return_exceptions=True)
            assert (type(found[0]), sorted(ended)) == (type(error), [1, 2])
            for ledger in three.ledgers:
                assert ledger.attempts.live(QUERY.name.key) is None
                assert not np.any(ledger.reports.lookup(QUERY.batch().digests, OTHER.name.key))

    play(three, scenario)


def test_a_proposal_that_changes_after_the_agreement_changes_nothing(three: ThreeAgreements) -> None:
    """Helper 3 gives another reason for what it left out, once helper 1 has reserved: helper 1 seals the first one."""
    batches = {2: rejected(QUERY.batch(), [0], Rejection.EXPIRED)}

    def lose_contact(step: Step) -> None:
        if step is Step.RESERVE_AFTER_COMMIT:
            three.down.add(2)

    async def scenario() -> None:
        three.ledgers[0]._database.step = lose_contact
        running = asyncio.create_task(three.agree(batches=batches))
        while not three.down:
            await asyncio.sleep(0.001)
        reception: Any = three.agreements[0]._reception
        proposal = reception._negotiations.find(QUERY.name.key).proposals[2]
        changed = replace(proposal, rejections=pack_rejections({Rejection.WRONG_BODY: 1}))
        await reception.hear(2, changed)
        three.down.clear()
        assert [attempt.rejections[2] for attempt in await running] == [{Rejection.EXPIRED: 1}] * 3

    play(three, scenario)

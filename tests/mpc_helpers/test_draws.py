"""How often the noise of a report may be drawn: a helper that knows part of it before it votes cannot wait for a draw
it likes.

In `pairwise` helper 3 knows two of the three pairs' vectors when the MPC is done, and may say NO. Each such attempt
counts for each of its reports at every honest helper, on disk, whatever query it belonged to; after the third there is
no other with this kind of noise. What three draws are worth to it is computed exactly at the end.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpc_helpers import helper as helper_module
from mpc_helpers.agreement.negotiation import AdmittedBatch, AgreementError, Attempt, AttemptTerms, Negotiation
from mpc_helpers.identity.config import LedgerLocation
from mpc_helpers.ledger.attempt import AttemptOutcome, AttemptState, Failpoint, Reservation
from mpc_helpers.ledger.engine import LedgerError, LedgerOwner
from mpc_helpers.ledger.ledger import ReportLedger
from mpc_helpers.ledger.moves import Fenced
from mpc_helpers.ledger.reports import Conflict, Reports, Standing
from mpc_helpers.mpc.noisy_sum import PAIRWISE_DRAWS
from protocol.errors import ErrorKind, Rejection
from protocol.noise import NoiseMode
from protocol.querier.failure import QueryFailed
from protocol.querier.saved_query import QueryOptions
from protocol.shares import PARTIES
from tests.support.bad_helper import BAD, HONEST, agreement_of, five_reports
from tests.support.ledger_places import new_location, on_each_engine
from tests.support.ledger_samples import NO, digests, hours, name
from tests.support.raising import raises
from tests.support.three_agreements import QUERY, ThreeAgreements, play
from tests.support.three_helpers import ThreeHelpers, three_helpers

PAIRWISE = QueryOptions(noise=NoiseMode.PAIRWISE, tolerated_bad_permille=1000, seconds=20)
OWNER = LedgerOwner(0, b"k" * 32)


@pytest.fixture
def location(request: pytest.FixtureRequest, tmp_path: Path) -> LedgerLocation:
    place = new_location(request.param, tmp_path)
    ReportLedger.create(place, OWNER)
    return place


@pytest.fixture
def ledger(location: LedgerLocation) -> Iterator[ReportLedger]:
    opened = ReportLedger(location, OWNER)
    yield opened
    opened.close()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    on_each_engine(metafunc)


# The ledger counts.


def reserved(ledger: ReportLedger, rank: int, number: int, *reports: int, most: int | None = PAIRWISE_DRAWS) -> bytes:
    flags = np.zeros(len(reports), dtype=np.bool_)
    wanted = Reservation(
        bytes([rank, number]) * 16,
        name(rank),
        number,
        False,
        digests(*reports),
        flags,
        hours(len(reports)),
        most,
        site="",
    )
    ledger.moves.reserve(wanted)
    return wanted.attempt_id


def worn(ledger: ReportLedger, *reports: int, most: int | None = PAIRWISE_DRAWS) -> list[bool]:
    return [
        standing == Standing.DRAWN
        for standing in ledger.reports.lookup(digests(*reports), hours(len(reports)), name(9).key, most, site="")
    ]


def test_only_an_attempt_given_up_before_its_mpc_does_not_count(location: LedgerLocation, ledger: ReportLedger) -> None:
    """Before the MPC, in it, after the vote, and by a crash, which might have been anywhere."""
    for number in range(1, 6):
        ledger.moves.abort(reserved(ledger, 1, number, 5), "deadline")
    assert ledger.attempts.draws(name(1).key) == 0
    for number in (6, 7):
        attempt = reserved(ledger, 1, number, 5)
        ledger.moves.begin(attempt)
        ledger.moves.abort(attempt, "a NO", NO[:1])
    assert ledger.attempts.aborts_by_party(name(1).key) == {NO[0].party: 2}
    assert worn(ledger, 5) == [False]
    attempt = reserved(ledger, 2, 1, 5, 6)
    ledger.moves.begin(attempt)
    ledger.moves.vote(attempt, b"sealed")
    ledger.moves.renounce(attempt, NO[:1], "")
    assert worn(ledger, 5, 6) == [False, False], "held, not free"
    ledger.moves.free(attempt, NO, "")
    assert (ledger.attempts.draws(name(1).key), ledger.attempts.draws(name(2).key)) == (2, 1)
    assert worn(ledger, 5, 6) == [True, False]
    attempt = reserved(ledger, 3, 1, 6)
    ledger.close()
    again = ReportLedger(location, OWNER)
    assert again.moves.sweep() == [attempt]
    assert again.attempts.draws(name(3).key) == 1
    assert worn(again, 5) == [True]
    again.close()


def test_the_database_itself_refuses_one_draw_too_many(ledger: ReportLedger, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(1, PAIRWISE_DRAWS + 1):
        attempt = reserved(ledger, 1, number, 5)
        ledger.moves.begin(attempt)
        ledger.moves.abort(attempt, "")
    # The ledger looks in the transaction that reserves, so that what was drawn since this helper proposed counts too.
    with raises(ErrorKind.REFUSED, Conflict):
        reserved(ledger, 2, 1, 4, 5)
    with monkeypatch.context() as patch, pytest.raises(LedgerError, match="as many draws"):
        patch.setattr(Reports, "any_drawn_too_often", lambda *_: False)
        reserved(ledger, 2, 2, 4, 5)
    assert ledger.reports.lookup(digests(4, 5), hours(2), name(9).key, PAIRWISE_DRAWS, site="").tolist() == [
        Standing.FREE,
        Standing.DRAWN,
    ]
    # It is not spent: noise of which nobody knows anything beforehand may still be added to it.
    assert worn(ledger, 5, most=None) == [False]
    reserved(ledger, 2, 3, 4, 5, most=None)


def test_reports_taken_by_a_smaller_query_count_if_the_mpc_had_begun(ledger: ReportLedger) -> None:
    reserved(ledger, 9, 1, 5)
    reserved(ledger, 8, 1, 5)
    assert ledger.attempts.draws(name(9).key) == 0
    ledger.moves.begin(bytes([8, 1]) * 16)
    reserved(ledger, 7, 1, 5)
    assert ledger.attempts.draws(name(8).key) == 1


def test_an_abort_that_could_not_be_written_counts_no_draw_when_it_is_repeated(ledger: ReportLedger) -> None:
    """Nor does its MPC begin in between: what was reported as failed may be durable."""
    # First, because a sweep that fails ends at the first attempt.
    swept = reserved(ledger, 6, 1, 8)
    aborted, preempted, drawn = reserved(ledger, 9, 1, 5), reserved(ledger, 8, 1, 6), reserved(ledger, 7, 1, 7)
    ledger.moves.begin(drawn)

    def fail(at: Failpoint) -> None:
        if at.name.endswith("BEFORE_COMMIT"):
            raise LedgerError("the disk is full")

    ledger._database.failpoint = fail
    with pytest.raises(LedgerError, match="full"):
        ledger.moves.abort(aborted, "")
    with pytest.raises(LedgerError, match="full"):
        reserved(ledger, 1, 1, 6)
    with pytest.raises(LedgerError, match="full"):
        ledger.moves.abort(drawn, "")
    with pytest.raises(LedgerError, match="full"):
        ledger.moves.sweep()
    ledger._database.failpoint = lambda _: None
    for attempt in (aborted, preempted, swept):
        with pytest.raises(Fenced):
            ledger.moves.begin(attempt)
    ledger.moves.abort(aborted, "")
    reserved(ledger, 1, 2, 6)
    ledger.moves.abort(drawn, "")
    assert swept in ledger.moves.sweep()
    assert [ledger.attempts.draws(name(rank).key) for rank in (9, 8, 7, 6)] == [0, 0, 1, 0]
    assert not ledger.moves._before_mpc.keys() & {aborted, preempted, drawn, swept}


def test_an_attempt_that_met_a_conflict_does_not_count(ledger: ReportLedger) -> None:
    reserved(ledger, 1, 1, 5)
    with pytest.raises(Conflict):
        reserved(ledger, 2, 1, 5)
    assert ledger.attempts.draws(name(2).key) == 0


def test_no_mpc_begins_after_an_abort_that_did_not_count(ledger: ReportLedger) -> None:
    """Both are in the ledger's hands: whichever comes first, a draw that is seen is a draw that counts."""
    attempt = reserved(ledger, 1, 1, 5)
    ledger.moves.abort(attempt, "")
    with pytest.raises(Fenced):
        ledger.moves.begin(attempt)
    attempt = reserved(ledger, 1, 2, 5)
    ledger.moves.begin(attempt)
    with pytest.raises(Fenced):
        ledger.moves.begin(attempt)


def test_a_peer_that_goes_on_at_the_barrier_gains_no_draw(tmp_path: Path) -> None:
    """The abort reaches the ledger after RESERVED is in from both, and before the MPC: then there is no MPC."""
    three = ThreeAgreements(tmp_path)

    async def scenario() -> None:
        begin = three.ledgers[0].moves.begin
        raced: list[bytes] = []

        def abort_first(attempt_id: bytes) -> None:
            if not raced:
                raced.append(attempt_id)
                three.ledgers[0].moves.abort(attempt_id, "helper 3 began another attempt")
            begin(attempt_id)

        three.ledgers[0].moves.begin = abort_first  # type: ignore[method-assign]
        raced_here, *_ = await three.agree(seconds=2.0)
        # The other two do not begin again in this test, so it waits for them until its deadline.
        assert isinstance(raced_here, AgreementError)
        record = three.ledgers[0].attempts.find(raced[0])
        assert record is not None
        assert record.state is AttemptState.ABORTED
        assert three.ledgers[0].attempts.draws(QUERY.name.key) == 0

    play(three, scenario)


# The attack, over real HTTPS.


class Choosy:
    """Helper 3: computes, looks at its two pairs' vectors, and gives the attempt up unless it likes them."""

    def __init__(self, three: ThreeHelpers) -> None:
        self.seen: list[int] = []
        agreement: Any = agreement_of(three, BAD)

        async def look(attempt: Attempt, _: bytes) -> AttemptOutcome:
            # The noise is drawn by now, and two of its three parts are helper 3's to see. It likes none of them.
            assert len(three.mpc.records[attempt.attempt_id].parts) == PARTIES
            self.seen.append(attempt.number)
            await agreement.abort(attempt, "does not like the draw")
            return AttemptOutcome.ABORTED

        agreement.commit = look


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pauses between attempts are not what limits the draws."""
    monkeypatch.setattr(helper_module, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(helper_module, "LONGEST_RETRY", 0.05)


async def refused(three: ThreeHelpers, batch: Any, match: str) -> QueryFailed:
    with pytest.raises(QueryFailed, match=match) as failed:
        await three.ask(three.query(batch, PAIRWISE), batch)
    return failed.value


@pytest.mark.usefixtures("at_once")
async def test_a_helper_that_waits_for_a_draw_it_likes_sees_three(tmp_path: Path) -> None:
    """Not one more for a query that its friend the site asks next, nor after a restart; and honest noise is left."""
    async with three_helpers(tmp_path) as three:
        choosy, batch = Choosy(three), five_reports(three)
        error = await refused(three, batch, r"3 attempts .* \(helper 3 aborted 3 of this query's\)")
        # Its signed NOs are evidence that it aborted, and no evidence that nobody made it.
        assert BAD in error.helpers
        assert len(choosy.seen) == PAIRWISE_DRAWS
        await refused(three, batch, "in 3 attempts")
        for party in HONEST:
            await three.stop(party)
            await three.start(party)
        await refused(three, batch, "in 3 attempts")
        assert len(choosy.seen) == PAIRWISE_DRAWS
        # Nothing was spent: with noise that nobody sees beforehand the same reports are counted, if helper 3 votes.
        del agreement_of(three, BAD).commit
        wishes = QueryOptions(noise=NoiseMode.JOINT, tolerated_bad_permille=1000, seconds=20)
        result = await three.ask(three.query(batch, wishes), batch)
        assert result.answer.counted == 5


@pytest.mark.usefixtures("at_once")
async def test_leaving_out_another_report_each_time_brings_no_further_draw(tmp_path: Path) -> None:
    async with three_helpers(tmp_path) as three:
        choosy, batch = Choosy(three), five_reports(three)
        agreement: Any = agreement_of(three, BAD)
        honest, left_out = agreement.agree, iter(range(5))

        async def less(terms: AttemptTerms, admitted: AdmittedBatch, deadline: float) -> Negotiation:
            mask = admitted.admitted.copy()
            mask[next(left_out)] = False
            chosen = replace(admitted, admitted=mask, rejections={Rejection.UNOPENABLE: 1})
            negotiation: Negotiation = await honest(terms, chosen, deadline)
            return negotiation

        agreement.agree = less
        await refused(three, batch, "reports were in 3 attempts")
        assert len(choosy.seen) == PAIRWISE_DRAWS


@pytest.mark.usefixtures("at_once")
async def test_two_accidents_do_no_harm(tmp_path: Path) -> None:
    """The third draw is released, and the answer says that it was the third attempt."""
    async with three_helpers(tmp_path) as three:
        agreement: Any = agreement_of(three, BAD)
        commit, failures = agreement.commit, iter((True, True, False))

        async def fail_twice(attempt: Attempt, share: bytes) -> AttemptOutcome:
            if next(failures):
                await agreement.abort(attempt, "the power went")
                return AttemptOutcome.ABORTED
            outcome: AttemptOutcome = await commit(attempt, share)
            return outcome

        agreement.commit = fail_twice
        batch = five_reports(three)
        result = await three.ask(three.query(batch, PAIRWISE), batch)
        assert result.answer.attempts >= 3


# What three draws are worth.


def laplace(b: float, reach: int) -> np.ndarray[Any, Any]:
    """DLap(b) on −reach … reach."""
    weights = np.exp(-np.abs(np.arange(-reach, reach + 1)) / b)
    return np.asarray(weights / weights.sum())


@functools.cache
def sums_of_parts(b: float) -> tuple[Any, Any, Any]:
    """The distributions of one part, of the sum of two, and of all three, by Fourier transforms: exact to 1e-15."""
    one = laplace(b, int(60 * b))
    size = 3 * len(one) - 2
    transformed = np.fft.rfft(one, size)
    return one, np.fft.irfft(transformed**2, size)[: 2 * len(one) - 1], np.fft.irfft(transformed**3, size)


def outside(b: float, draws: int) -> float:
    """The chance that one number of a chosen answer lies outside its printed 95 % interval.

    Whoever chooses sees the sum K of two of three parts. Here it takes the draw with the largest |K|, which is best:
    the third part is symmetric and unimodal, so the chance to be outside rises with |K|. In truth it must take or leave
    each draw before it sees the next, so this is an upper bound.
    """
    one, two, three = sums_of_parts(b)
    reach = len(one) // 2
    centre = len(three) // 2
    within = np.cumsum(np.concatenate(([three[centre]], 2 * three[centre + 1 :])))
    half_width = int(np.searchsorted(within, 0.95))
    at_least = np.concatenate(([0.0], np.cumsum(one)))
    middle = len(two) // 2

    size = np.concatenate(([two[middle]], 2 * two[middle + 1 :]))
    up_to = np.cumsum(size) ** draws
    largest = np.diff(np.concatenate(([0.0], up_to)))
    known = np.arange(len(largest))
    low, high = -half_width - known, half_width - known
    inside = at_least[np.clip(high + reach + 1, 0, len(one))] - at_least[np.clip(low + reach, 0, len(one))]
    return float(np.dot(largest, 1 - inside))


def shift(b: float, draws: int) -> float:
    """How far the largest of so many sums of two parts lies above 0 on average, in standard deviations of all three."""
    one, two, _ = sums_of_parts(b)
    largest = np.diff(np.concatenate(([0.0], np.cumsum(two) ** draws)))
    variance = float(np.dot(one, (np.arange(len(one)) - len(one) // 2) ** 2))
    return float(np.dot(largest, np.arange(len(two)) - len(two) // 2)) / math.sqrt(3 * variance)


@pytest.mark.parametrize("b", [2.0, 100.0, 400.0])
def test_what_three_draws_are_worth(b: float) -> None:
    """COMMIT.md and SPEC section 9: a 95 % interval is missed with at most 11.83 %, a shift is at most 0.67.

    110 draws would make it 83 % and 2.4.
    """
    assert outside(b, 1) <= 0.05
    assert 0.09 < outside(b, PAIRWISE_DRAWS) <= 0.1183
    assert outside(b, 110) > 0.75
    assert 0.66 < shift(b, PAIRWISE_DRAWS) <= 0.67 and shift(b, 110) > 2.4

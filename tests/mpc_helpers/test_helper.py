"""`Helper.answer`, with three helpers in one process: what is counted, how often, and what the noise hides."""

from __future__ import annotations

import asyncio
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpc_helpers.admission import ingest as admit_module
from mpc_helpers.admission.ingest import AdmittedColumn, ingest
from mpc_helpers.ledger.attempt import Failpoint
from mpc_helpers.ledger.engine import LedgerError
from mpc_helpers.mpc.session import MpcError, Stage
from protocol.errors import Rejection
from protocol.header import EPSILON_SPAN
from protocol.noise import NoiseMode
from protocol.querier.failure import QueryFailed
from protocol.querier.saved_query import QueryOptions
from protocol.query import SignedQuery
from protocol.report import SealedReport
from protocol.status import QueryState
from tests.support.three_helpers import ThreeHelpers, real_now, terms, three_helpers


def one_hot(bucket: int, buckets: int) -> list[int]:
    return [int(index == bucket) for index in range(buckets)]


async def check_exact(
    three: ThreeHelpers, histograms: list[list[int]], wishes: QueryOptions, kappa: int = 0
) -> list[int]:
    """Ask, and compare answer − noise with the plaintext sum, number by number. Returns the noise."""
    buckets = len(histograms[0]) - (1 if kappa else 0)
    batch = three.batch(three.seal(histograms, terms(buckets, kappa=kappa)))
    result = await three.ask(three.query(batch, wishes), batch)
    noise = three.noise_of(result)
    side = result.answer.side_count
    numbers = result.answer.histogram + ([] if side is None else [side])
    assert [got - drawn for got, drawn in zip(numbers, noise, strict=True)] == np.sum(histograms, axis=0).tolist()
    assert result.answer.counted == len(histograms)
    return noise


@pytest.mark.parametrize("mode", list(NoiseMode))
async def test_answer_minus_noise_is_the_plaintext_sum(tmp_path: Path, mode: NoiseMode) -> None:
    """Random batches, bucket counts from 1 to 1024, side query or not, negative results among them."""
    rng = np.random.default_rng(4)
    seen_negative = False
    async with three_helpers(tmp_path) as three:
        for buckets, kappa in ((1, 0), (2, 3), (16, 0), (127, 1), (1024, 0)):
            length = buckets + (1 if kappa else 0)
            histograms = rng.integers(0, 2, size=(int(rng.integers(1, 12)), length)).tolist()
            wishes = QueryOptions(epsilon_micros=200_000, noise=mode, seconds=60)
            noise = await check_exact(three, histograms, wishes, kappa)
            truth = np.sum(histograms, axis=0)
            seen_negative |= any(drawn + value < 0 for drawn, value in zip(noise, truth, strict=True))
    assert seen_negative


async def test_a_second_query_on_the_same_batch_is_refused_and_the_first_keeps_its_bytes(tmp_path: Path) -> None:
    async with three_helpers(tmp_path) as three:
        batch = three.batch(three.seal([one_hot(0, 4)] * 5, terms(4)))
        asked = three.query(batch)
        first = await three.ask(asked, batch)
        with pytest.raises(QueryFailed, match="all 5 reports were counted before") as refused:
            await three.ask(three.query(batch), batch)
        assert refused.value.stage == "agreeing"
        again = await three.ask(asked, batch)
        assert again.answer == first.answer
        assert again.uploaded_bytes == 0


async def test_too_many_bad_reports_fail_before_anything_is_spent(tmp_path: Path) -> None:
    async with three_helpers(tmp_path) as three:
        good = three.seal([one_hot(0, 4)] * 6, terms(4))
        others = three.seal([one_hot(0, 4)] * 4, terms(4))
        bad = [SealedReport(each.header, each.body, (bytes(112), *each.payloads[1:])) for each in others]
        batch = three.batch([*good, *bad])
        with pytest.raises(QueryFailed, match="alone leaves out 4 of 10 reports; 6 can be counted and 9 are needed"):
            await three.ask(three.query(batch, QueryOptions(tolerated_bad_permille=100, seconds=30)), batch)
        result = await three.ask(three.query(batch, QueryOptions(tolerated_bad_permille=400, seconds=30)), batch)
        assert result.answer.counted == 6
        assert [dict(counts) for counts in result.answer.rejections] == [{Rejection.UNOPENABLE: 4}, {}, {}]


async def test_a_report_with_altered_epsilon_is_dropped_alone(tmp_path: Path) -> None:
    async with three_helpers(tmp_path) as three:
        reports = three.seal([one_hot(0, 4)] * 5, terms(4, epsilon_micros=500_000))
        cheap = reports[0]
        # Claim to have paid twice as much.
        raised = cheap.header[: EPSILON_SPAN.start] + (1_000_000).to_bytes(4, "big") + cheap.header[EPSILON_SPAN.stop :]
        batch = three.batch([SealedReport(raised, cheap.body, cheap.payloads), *reports[1:]])
        result = await three.ask(
            three.query(batch, QueryOptions(500_000, tolerated_bad_permille=300, seconds=30)), batch
        )
        assert [dict(counts) for counts in result.answer.rejections] == [{Rejection.UNOPENABLE: 1}] * 3
        assert result.answer.histogram[0] - three.noise_of(result)[0] == 4


async def test_no_query_is_less_noisy_than_what_was_paid(tmp_path: Path) -> None:
    async with three_helpers(tmp_path) as three:
        batch = three.batch(three.seal([one_hot(0, 4)] * 3, terms(4, epsilon_micros=500_000)))
        with pytest.raises(QueryFailed, match="all 3 reports paid for more noise"):
            await three.ask(three.query(batch, QueryOptions(epsilon_micros=500_001, seconds=30)), batch)


async def test_debug_reports_are_answered_exactly_and_only_in_debug_queries(tmp_path: Path) -> None:
    async with three_helpers(tmp_path) as three:
        batch = three.batch(three.seal([one_hot(3, 4)] * 7, terms(4, debug=True)))
        result = await three.ask(three.query(batch, QueryOptions(debug=True)), batch)
        assert result.answer.histogram == [0, 0, 0, 7]
        assert (result.noise_sd, result.half_width) == (0.0, 0)
        mixed = three.batch([*three.seal([one_hot(3, 4)] * 9, terms(4)), batch[0]])
        answer = (await three.ask(three.query(mixed), mixed)).answer
        assert [dict(counts) for counts in answer.rejections] == [{Rejection.WRONG_MODE: 1}] * 3


@pytest.mark.parametrize("debug", [False, True])
async def test_a_report_of_the_other_kind_that_slips_through_admission_is_stopped_by_the_ledgers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, debug: bool
) -> None:
    """All three helpers' admission is broken: it takes every report that opens, whatever its header says."""
    monkeypatch.setattr(
        "mpc_helpers.admission.chunk.examine_headers", lambda _, headers: np.zeros(len(headers), dtype=np.uint8)
    )
    async with three_helpers(tmp_path) as three:
        other = three.seal([one_hot(3, 4)], terms(4, debug=not debug))
        batch = three.batch([*three.seal([one_hot(2, 4)] * 3, terms(4, debug=debug)), *other])
        asked = three.query(batch, QueryOptions(debug=debug, seconds=30))
        query = replace(asked.query, debug=debug)
        asked = replace(asked, signed=SignedQuery.sign(query, three.site_key()))
        with pytest.raises(QueryFailed, match="ledger refused a change"):
            await three.ask(asked, batch)
        assert "a debug report in a real attempt, or the reverse" in caplog.text
        assert three.mpc.records == {}


async def test_an_attempt_that_fails_in_the_mpc_is_followed_by_another_with_fresh_noise(tmp_path: Path) -> None:
    failed: list[bytes] = []

    def fail_once(step: Failpoint) -> None:
        if step is Failpoint.COMPUTE and not failed:
            failed.append(b"")
            raise MpcError(Stage.COMPUTE, "planted")

    async with three_helpers(tmp_path, steps={1: fail_once}) as three:
        batch = three.batch(three.seal([one_hot(1, 8)] * 5, terms(8)))
        result = await three.ask(three.query(batch), batch)
        assert failed
        assert result.answer.histogram[1] - three.noise_of(result)[1] == 5
        drawn = [record.total() for record in three.mpc.records.values()]
        assert len(drawn) == 2
        assert drawn[0] != drawn[1]


@pytest.mark.parametrize("away", [0, 1, 2])
async def test_a_helper_that_is_down_is_named(tmp_path: Path, away: int) -> None:
    async with three_helpers(tmp_path) as three:
        batch = three.batch(three.seal([one_hot(1, 4)] * 5, terms(4)))
        await three.stop(away)
        with pytest.raises(QueryFailed, match=f"helper-{away + 1} cannot be reached") as refused:
            await three.ask(three.query(batch), batch, patience=0.1)
        assert refused.value.helpers == (away,)


async def test_a_helper_that_goes_away_midway_is_named_and_the_query_resumes_when_it_is_back(tmp_path: Path) -> None:
    gone = asyncio.Event()
    async with three_helpers(tmp_path) as three:
        batch = three.batch(three.seal([one_hot(1, 4)] * 5, terms(4)))
        asked = three.query(batch, QueryOptions(seconds=60))
        three.mpc.before_add = lambda party, _attempt: gone.set() if party == 2 else None
        asking = asyncio.create_task(three.ask(asked, batch, patience=0.3))
        await gone.wait()
        await three.stop(2)
        outcome = (await asyncio.gather(asking, return_exceptions=True))[0]
        if isinstance(outcome, BaseException):
            assert isinstance(outcome, QueryFailed)
            assert "helper-3" in str(outcome)
        await three.start(2)
        result = await three.ask(asked, batch)
        assert result.answer.histogram[1] - three.noise_of(result)[1] == 5


async def test_a_vote_whose_end_was_not_heard_is_settled_after_a_restart(tmp_path: Path) -> None:
    """Helper 1 has voted, and its disk fails whenever it would release. The others release; it asks once it is back."""
    broken = True

    def fail(step: Failpoint) -> None:
        if step is Failpoint.RELEASE_BEFORE_COMMIT and broken:
            raise LedgerError("planted")

    async with three_helpers(tmp_path, steps={0: fail}) as three, asyncio.timeout(60):
        batch = three.batch(three.seal([one_hot(1, 4)] * 5, terms(4)))
        asked = three.query(batch, QueryOptions(seconds=60))
        asking = asyncio.create_task(three.ask(asked, batch))
        digest = asked.query.digest
        while not all(three.queries[party].find(digest) for party in range(3)):
            await asyncio.sleep(0.01)
        while any(three.queries[party].status(digest).state is not QueryState.RELEASED for party in (1, 2)):
            await asyncio.sleep(0.01)
        assert three.queries[0].status(digest).state is not QueryState.RELEASED
        await three.stop(0)
        await asyncio.gather(asking, return_exceptions=True)
        broken = False
        await three.start(0)
        while three.queries[0].status(digest).state is not QueryState.RELEASED:
            await asyncio.sleep(0.01)
        result = await three.ask(asked, batch)
        assert result.answer.histogram[1] - three.noise_of(result)[1] == 5


async def test_a_process_that_dies_while_opening_reports_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deaths = 0
    honest = ingest

    def dying(*arguments: Any, **options: Any) -> AdmittedColumn:
        nonlocal deaths
        deaths += 1
        if deaths <= 2:
            raise BrokenProcessPool("killed")
        return honest(*arguments, **options)

    monkeypatch.setattr(admit_module, "ingest", dying)
    async with three_helpers(tmp_path) as three:
        batch = three.batch(three.seal([one_hot(1, 4)] * 5, terms(4)))
        result = await three.ask(three.query(batch), batch)
        assert deaths > 3
        assert result.answer.histogram[1] - three.noise_of(result)[1] == 5


async def test_an_attempt_that_always_fails_ends_at_the_deadline_with_the_reason(tmp_path: Path) -> None:
    """All clocks pass the deadline at the second attempt, however long the machine took to get there."""
    failures = 0

    def fail(step: Failpoint) -> None:
        nonlocal failures
        if step is Failpoint.COMPUTE:
            failures += 1
            raise MpcError(Stage.COMPUTE, "planted", party=2)

    def clock() -> int:
        return real_now() + (120 if failures > 1 else 0)

    async with three_helpers(tmp_path, steps={0: fail}, clock=clock) as three:
        batch = three.batch(three.seal([one_hot(1, 4)] * 5, terms(4)))
        with pytest.raises(QueryFailed, match="planted") as failed:
            await three.ask(three.query(batch, QueryOptions(seconds=120)), batch)
        assert 2 in failed.value.helpers
        three.steps.clear()
        await three.stop(0)
        await three.start(0)
        assert (await three.ask(three.query(batch), batch)).answer.counted == 5

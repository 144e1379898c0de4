"""A report is counted at most once, ever: whatever batches it is put in, whoever restarts, whatever disk is lost.

Every report has a bucket of its own, and answers are compared after taking out the recorded noise, so a 2 in the total
over all answers ever given proves a replay, and a 0 a report that was lost. The moves behind it are in
`test_commit_crashes`, the same with real processes in `test_chaos`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from mpc_helpers.ledger.attempt import Failpoint
from mpc_helpers.ledger.engine import LedgerError
from mpc_helpers.ledger.rebuild import LEDGER_CREATED, accept_peer, create, export
from protocol.batch import BatchReader
from protocol.errors import ErrorKind, Rejection
from protocol.querier.failure import QueryFailed
from protocol.querier.result import QueryResult
from protocol.querier.saved_query import QueryOptions, SavedQuery
from protocol.report import SealedReport
from tests.mpc_helpers.test_parts import stop_and_lose
from tests.mpc_helpers.test_report_ledger import opened
from tests.support.raising import raises
from tests.support.three_helpers import ThreeHelpers, real_now, terms, three_helpers

BUCKETS = 24
ANY = QueryOptions(tolerated_bad_permille=1000, seconds=30)


@dataclass
class Story:
    """Twenty-four reports, and everything that was ever answered about them."""

    three: ThreeHelpers
    reports: list[SealedReport] = field(init=False)
    total: np.ndarray[tuple[int], np.dtype[np.int64]] = field(init=False)

    def __post_init__(self) -> None:
        one_each = np.eye(BUCKETS, dtype=int).tolist()
        self.reports = self.three.seal(one_each, terms(BUCKETS))
        self.total = np.zeros(BUCKETS, dtype=np.int64)

    async def ask(self, which: Sequence[int]) -> QueryResult:
        """A query over these reports; what it counts goes into the total."""
        batch = self.three.batch([self.reports[index] for index in which])
        result = await self.three.ask(self.three.query(batch, ANY), batch)
        self.total += np.array(result.answer.histogram) - np.array(self.three.noise_of(result))
        return result

    def counted(self) -> list[int]:
        """The buckets in which one report was counted; fails on any that was counted more than once."""
        assert set(self.total.tolist()) <= {0, 1}
        return np.flatnonzero(self.total).tolist()


def seen(result: QueryResult) -> list[int]:
    return [counts.get(Rejection.SEEN, 0) for counts in result.answer.rejections]


async def restart(three: ThreeHelpers, *parties: int) -> None:
    for party in parties:
        await three.stop(party)
    for party in parties:
        await three.start(party)


async def test_twice_in_a_batch(tmp_path: Path) -> None:
    async with three_helpers(tmp_path) as three:
        story = Story(three)
        result = await story.ask([0, 1, 1, 2, 2, 2])
        assert story.counted() == [0, 1, 2]
        assert [counts[Rejection.DUPLICATE] for counts in result.answer.rejections] == [3, 3, 3]


async def test_in_two_queries(tmp_path: Path) -> None:
    async with three_helpers(tmp_path) as three:
        story = Story(three)
        await story.ask(range(8))
        result = await story.ask(range(4, 12))
        assert seen(result) == [4, 4, 4]
        assert story.counted() == list(range(12))
        with pytest.raises(QueryFailed, match="all 12 reports were counted before"):
            await story.ask(range(12))


@pytest.mark.parametrize("overlap", [8, 3])
async def test_in_queries_at_the_same_time(tmp_path: Path, overlap: int) -> None:
    """Each of three queries shares reports with the next: whoever comes second goes without, and none is lost."""
    async with three_helpers(tmp_path) as three:
        story = Story(three)
        spans = [range(start, start + 8) for start in (0, 8 - overlap, 2 * (8 - overlap))]
        asking = [story.ask(span) for span in spans]
        results = await asyncio.gather(*asking, return_exceptions=True)
        refused = [result for result in results if isinstance(result, BaseException)]
        assert all(isinstance(error, QueryFailed) and "Nothing was spent." in str(error) for error in refused)
        assert story.counted() == sorted({report for span in spans for report in span})


async def test_a_random_life(tmp_path: Path) -> None:
    """Eight queries over random reports, two at a time, with helpers restarted in between (seed 17)."""
    rng = np.random.default_rng(17)
    offered: set[int] = set()
    async with three_helpers(tmp_path) as three:
        story = Story(three)
        for _ in range(4):
            picks = [rng.integers(0, BUCKETS, size=6).tolist() for _ in range(2)]
            offered |= {report for pick in picks for report in pick}
            results = await asyncio.gather(*(story.ask(pick) for pick in picks), return_exceptions=True)
            assert all(isinstance(result, QueryResult | QueryFailed) for result in results)
            await restart(three, int(rng.integers(3)))
        assert story.counted() == sorted(offered)


async def test_what_was_voted_for_is_answered_even_after_its_deadline(tmp_path: Path) -> None:
    """A vote is on disk but reported as failed, and the deadline passes: spent is spent, the answer must come."""
    failed, ahead = [False], [0]

    def fail_once(step: Failpoint) -> None:
        if step is Failpoint.VOTE_AFTER_COMMIT and not failed[0]:
            failed[0] = True
            raise LedgerError("cannot use the ledger: disk I/O error")

    async with three_helpers(tmp_path, steps={0: fail_once}, clock=lambda: real_now() + ahead[0]) as three:
        story = Story(three)
        batch = three.batch(story.reports[:5])
        asked = three.query(batch, ANY)
        with pytest.raises(QueryFailed, match=r"helper-1: .*ledger cannot be used"):
            await three.ask(asked, batch)
        ahead[0] = 40
        async with asyncio.timeout(20):
            while not isinstance(result := await try_again(three, asked, batch), QueryResult):
                await asyncio.sleep(0.1)
        assert result.answer.counted == 5
        assert (await three.ask(asked, batch)).answer == result.answer


async def try_again(three: ThreeHelpers, asked: SavedQuery, batch: BatchReader) -> QueryResult | QueryFailed:
    try:
        return await three.ask(asked, batch)
    except QueryFailed as error:
        return error


# One helper has lost its ledger.


async def test_a_helper_without_its_ledger_does_not_start(tmp_path: Path) -> None:
    """Nor does it make itself a new one: an empty ledger would count everything again."""
    async with three_helpers(tmp_path) as three:
        await Story(three).ask(range(4))
        await stop_and_lose(three, 1)
        with raises(ErrorKind.FILE_MISSING, LedgerError):
            await three.start(1)
        config, _ = opened(three, 1)
        assert not config.ledger_file.exists()


async def test_an_empty_ledger_in_its_place_is_refused_even_if_it_is_accepted(tmp_path: Path) -> None:
    """An operator makes a new ledger instead of rebuilding, and both peers accept it: they learn what it lacks."""
    async with three_helpers(tmp_path) as three:
        story = Story(three)
        await story.ask(range(8))
        await stop_and_lose(three, 1)
        with raises(ErrorKind.ROLLED_BACK, LedgerError):
            create(*opened(three, 1))
        # An operator who is determined removes the mark too.
        (opened(three, 1)[0].data / LEDGER_CREATED).unlink()
        create(*opened(three, 1))
        batch = three.batch([story.reports[index] for index in range(4, 12)])
        for refused in ("helper 2 has another ledger", "helper 2 was rebuilt from older entries"):
            await restart(three, 0, 1, 2)
            failed = await three.fails(batch, QueryOptions(tolerated_bad_permille=1000, seconds=3))
            assert refused in str(failed)
            for party in range(3):
                await three.stop(party)
            for party in (0, 2):
                export(*opened(three, party), 1, tmp_path / "never used")
                accept_peer(*opened(three, party), 1)
        assert story.counted() == list(range(8))

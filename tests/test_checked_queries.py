"""Checked reports through three real helpers: lying devices are refused by all three and cost only themselves."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpc_helpers.admission.blocks import shown_beside
from mpc_helpers.identity.config import load_config
from mpc_helpers.local.launcher import prepare
from protocol.errors import Rejection
from protocol.header import Header, ReportTerms
from protocol.helper_set import HelperSet
from protocol.hpke import POST_QUANTUM
from protocol.querier.left_out_list import left_out_reports
from protocol.querier.query_failed import QueryFailed
from protocol.querier.saved_query import QueryOptions
from protocol.report import SealedReport, seal_deal
from protocol.validity import deal_numbers
from tests.support.checked_reports import draw, numbers_of, planes_of
from tests.support.three_helpers import SITE, MemoryMpc, ThreeHelpers, real_now, terms, three_helpers

BUCKETS = 4
LENIENT = QueryOptions(tolerated_bad_permille=1000, seconds=30)


def checked_terms(cap: int = 2, spread: int = 1) -> ReportTerms:
    made = terms(BUCKETS, sensitivity=4)
    return ReportTerms(
        made.site,
        made.caller,
        made.time,
        made.epsilon_micros,
        made.sensitivity,
        made.buckets,
        cap=cap,
        spread=spread,
    )


def lie(numbers: list[int], proven: list[int], of: ReportTerms, helper_set: HelperSet) -> SealedReport:
    dealt = deal_numbers(numbers_of(numbers, of.shape), planes_of(proven, of.shape), of.shape, draw)
    return seal_deal(dealt, of, helper_set)


async def test_lying_devices_are_left_out_of_the_answer_by_all_three(tmp_path: Path) -> None:
    async with three_helpers(tmp_path) as three:
        of = checked_terms()
        honest = three.seal([[0, 1, 0, 0]] * 70, of)
        lies = [
            lie(numbers, proven, of, three.helper_set)
            for numbers, proven in (([2**50, 0, 0, 0], [1, 0, 0, 0]), ([0, -1, 0, 0], [0, 0, 0, 0]))
        ]
        batch = three.batch([*honest, *lies])
        result = await three.ask(three.query(batch), batch)
        answer = result.answer
        assert answer.counted == 70
        assert [dict(counts) for counts in answer.rejections] == [{Rejection.INVALID: 2}] * 3
        record = three.mpc.records[answer.attempt_id]
        noise = record.total()
        assert [number - drawn for number, drawn in zip(answer.histogram, noise, strict=True)] == [0, 70, 0, 0]
        folder = load_config(three.trio.config_path(0)).data / "queries"
        assert not list(folder.glob(f"*/{shown_beside(Path('column')).name}")), "what was shown goes with the column"


async def test_reports_left_out_as_invalid_stay_free_and_good_ones_are_counted_once(tmp_path: Path) -> None:
    async with three_helpers(tmp_path) as three:
        of = checked_terms()
        honest = three.seal([[1, 0, 0, 0]] * 5, of)
        bad = lie([100, 0, 0, 0], [1, 0, 0, 0], of, three.helper_set)
        first = three.batch([*honest, bad])
        assert (await three.ask(three.query(first, LENIENT), first)).answer.counted == 5
        more = three.seal([[0, 0, 1, 0]] * 3, of)
        second = three.batch([*honest, bad, *more])
        result = await three.ask(three.query(second, LENIENT), second)
        answer = result.answer
        assert answer.counted == 3
        assert [dict(counts) for counts in answer.rejections] == [{Rejection.SEEN: 5, Rejection.INVALID: 1}] * 3
        # And which they are.
        named = {one.digest: one for one in left_out_reports(result, second)}
        assert {one.record for one in named.values()} == set(range(6))
        assert {report.digest: named[report.digest].reasons for report in (*honest, bad)} == {
            **{report.digest: (Rejection.SEEN,) * 3 for report in honest},
            bad.digest: (Rejection.INVALID,) * 3,
        }


async def test_reports_that_nobody_can_check_are_taken_only_where_the_operators_say_so(tmp_path: Path) -> None:
    async with three_helpers(tmp_path, options={"unchecked_histograms": False}) as three:
        batch = three.batch(three.seal([[0, 1, 0, 0]] * 3, terms(BUCKETS)))
        with pytest.raises(QueryFailed, match="have no cap"):
            await three.ask(three.query(batch), batch)
        checked = three.batch(three.seal([[0, 1, 0, 0]] * 3, checked_terms()))
        assert (await three.ask(three.query(checked), checked)).answer.counted == 3
        debug = three.batch(three.seal([[0, 1, 0, 0]] * 3, terms(BUCKETS, debug=True)))
        assert (await three.ask(three.query(debug, QueryOptions(debug=True, seconds=30)), debug)).answer.counted == 3


async def test_reports_of_the_second_suite_are_answered(tmp_path: Path) -> None:
    trio = prepare(
        tmp_path / "trio", now=real_now(), sites={SITE: [SITE]}, options={"processes": 0}, suite=POST_QUANTUM
    )
    three = ThreeHelpers(trio, MemoryMpc(), tmp_path)
    try:
        for party in range(3):
            await three.start(party)
        reports = three.seal([[0, 1, 0, 0]] * 3, checked_terms())
        assert {Header.decode(report.header).suite for report in reports} == {POST_QUANTUM}
        batch = three.batch(reports)
        result = await three.ask(three.query(batch), batch)
        assert result.answer.counted == 3 and result.query.suite is POST_QUANTUM
    finally:
        for party in range(3):
            await three.stop(party)

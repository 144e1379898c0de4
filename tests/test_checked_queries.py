"""Checked reports through three real helpers: lying devices are refused by all three and cost only themselves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.liars import Lie, lying_report
from mpc_helpers.admission.blocks import shown_beside
from mpc_helpers.identity.config import load_config
from mpc_helpers.local.launcher import prepare
from protocol.denominations import denominations
from protocol.errors import Rejection
from protocol.helper_set import HelperSet
from protocol.hpke import POST_QUANTUM
from protocol.querier.left_out_list import left_out_reports
from protocol.querier.query_failed import QueryFailed
from protocol.querier.saved_query import QueryOptions
from protocol.report import MAX_SITE_LENGTH, Header, ReportTerms, SealedReport, coarse_time, seal_deal
from protocol.shape import Shape
from protocol.validity import deal_numbers
from tests.support import protocol_samples as samples
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


LONGEST = Shape(2048, 1, 2**40, 3)
LABEL = "a" * 60


def longest_terms(site: str, caller: str, **changes: Any) -> ReportTerms:
    """The most openings that a header can have, and the longest unit."""
    when = coarse_time(real_now())
    made = ReportTerms(site, caller, when, 1_000_000, 2**40, LONGEST.buckets, LONGEST.kappa, "u" * 32)
    return replace(made, cap=LONGEST.cap, spread=LONGEST.spread, **changes)


def test_the_longest_header_goes_through_batch_column_and_admission(tmp_path: Path) -> None:
    most = max(len(denominations(2**40, spread)) for spread in range(1, 200))
    assert (LONGEST.points, len(LONGEST.planes)) == (3, most + 1)
    site = ".".join([LABEL] * 4) + ".example"
    assert len(site) <= MAX_SITE_LENGTH
    longest = site.rjust(MAX_SITE_LENGTH, "b")
    of = replace(longest_terms(longest, longest), time=samples.TERMS.time)
    reports = [samples.report(f"long {number}", [5, *[0] * 2046, 2**40 - 9, number], of) for number in range(2)]
    assert {len(report.header) for report in reports} == {239 + 3 * 2 + 32 + 2 * 253 + 10 + 8 * 3 * 40} == {1_753}
    query = samples.query_for(
        reports,
        **{name: getattr(of, name) for name in ("site", "caller", "buckets", "kappa", "unit", "sensitivity")},
        cap=of.cap,
        spread=of.spread,
    )
    ingested = samples.ingest_columns(samples.write_columns(tmp_path, reports), query)
    assert [one.rejections() for one in ingested] == [{}] * 3
    assert len({one.check_root for one in ingested}) == 1
    assert samples.opened_sum(ingested) == [10, *[0] * 2046, 2**41 - 18, 1]


async def test_a_header_of_the_longest_shape_is_taken_and_answered_by_helpers(tmp_path: Path) -> None:
    """With a site as long as its key's file name allows, and a lying device beside two honest ones."""
    site, caller = "b" * 8 + f".{LABEL}" * 3 + ".example", "c" * 50 + f".{LABEL}" * 3 + ".example"
    of = longest_terms(site, caller, debug=True)
    async with three_helpers(tmp_path, sites={site: [caller]}) as three:
        honest = three.seal([[5, *[0] * 2046, 7, number] for number in range(2)], of)
        batch = three.batch([*honest, lying_report(Lie.WRONG_FLAG, of, three.helper_set)])
        wishes = QueryOptions(tolerated_bad_permille=1000, seconds=30, debug=True)
        result = await three.ask(three.query(batch, wishes, site=site), batch)
        assert result.answer.histogram == [10, *[0] * 2046, 14]
        assert [dict(counts) for counts in result.answer.rejections] == [{Rejection.INVALID: 1}] * 3


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

"""Measurements over time: every closed period is asked about once, whatever interrupts it, and shown with its noise."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from protocol.batch import BatchReader
from protocol.cli import app as cli
from protocol.collector.batches import Every
from protocol.collector.limits import CollectorLimits
from protocol.collector.store import Receipt, ReportStore, StoreReader
from protocol.errors import ErrorKind, TrefoilError
from protocol.header import Header
from protocol.helper_set import HelperSet
from protocol.querier.ask import Querier
from protocol.querier.failure import QueryFailed
from protocol.querier.query_folder import QueryFolder
from protocol.querier.saved_query import QueryOptions, make_query
from protocol.querier.series import (
    Period,
    PeriodAnswer,
    Series,
    ask_over_time,
    closed_periods,
    queried_kinds,
    shelves_of_kind,
)
from protocol.report import SealedReport
from protocol.units import DAY, HOUR
from tests.support import protocol_samples as samples
from tests.support.raising import raises
from tests.support.three_helpers import SITE, real_now, seal_all, terms, three_helpers

LIMITS = CollectorLimits(sites=frozenset({SITE, samples.TERMS.site}), lifetime_days=365)
OPTIONS = QueryOptions(seconds=30)
NOWHERE = ("--reports", "none", "--helpers", "none", "--site-key", "none")


def file_all(folder: Path, reports: list[SealedReport]) -> None:
    with ReportStore(folder, LIMITS) as store:
        outcomes = store.add([(Header.decode(report.header), report) for report in reports])
        assert all(isinstance(outcome, Receipt) and outcome.new for outcome in outcomes)


def periods_of(folder: Path, every: Every, now: int) -> list[Period]:
    with StoreReader(folder) as store:
        return closed_periods(folder, shelves_of_kind(store, ""), every, now)


def test_a_period_is_closed_an_hour_after_its_end(tmp_path: Path) -> None:
    monday = Every.WEEK.start_of(samples.NOW)
    hours = (monday - 1, monday, monday + DAY - HOUR, monday + DAY)
    file_all(tmp_path, [samples.report(f"{at}", promised=samples.terms(time=at - at % HOUR)) for at in hours])
    for now, days in ((monday + DAY + HOUR - 1, 1), (monday + DAY + HOUR, 2), (monday + 2 * DAY + HOUR, 3)):
        assert len(periods_of(tmp_path, Every.DAY, now)) == days
    assert [sum(shelf.reports for shelf in found.shelves) for found in periods_of(tmp_path, Every.DAY, monday * 2)] == [
        1,
        2,
        1,
    ]
    weeks = periods_of(tmp_path, Every.WEEK, monday + 7 * DAY + HOUR)
    assert [found.start for found in weeks] == [monday - 7 * DAY, monday]
    # ISO 8601: a week begins on a Monday. 16 November 2026 was one.
    assert Every.WEEK.start_of(1_794_873_600) == 1_794_787_200


def test_a_kind_is_chosen_where_there_are_several(tmp_path: Path) -> None:
    file_all(tmp_path, [samples.report("a"), samples.report("b", promised=samples.terms(unit="euros"))])
    with StoreReader(tmp_path) as store:
        kinds = sorted({shelf.kind for shelf in store.shelves()})
        with raises(ErrorKind.MISSING_OPTION, TrefoilError) as caught:
            shelves_of_kind(store, "")
        assert all(kind in caught.value.hint for kind in kinds)
        assert {shelf.kind for shelf in shelves_of_kind(store, kinds[0])} == {kinds[0]}
        with raises(ErrorKind.UNKNOWN_NAME):
            shelves_of_kind(store, "00")


def test_a_series_goes_on_with_the_kind_that_it_has_queried_before(tmp_path: Path) -> None:
    """One post with another ε would otherwise end an unattended series."""
    file_all(tmp_path, [samples.report("a")])
    (period,) = periods_of(tmp_path, Every.DAY, samples.NOW + 9 * DAY)
    period.batch.parent.mkdir()
    period.batch.touch()
    before = queried_kinds(tmp_path, Every.DAY)
    assert before == {period.shelves[0].kind} and queried_kinds(tmp_path, Every.WEEK) == set()
    file_all(tmp_path, [samples.report("b", promised=samples.terms(epsilon_micros=1))])
    with StoreReader(tmp_path) as store:
        assert {shelf.kind for shelf in shelves_of_kind(store, "", before)} == before
        other = {shelf.kind for shelf in store.shelves()} - before
        assert {shelf.kind for shelf in shelves_of_kind(store, min(other), before)} == other
        # Not with another, only because nothing else is left.
        with raises(ErrorKind.UNKNOWN_NAME):
            shelves_of_kind(store, "", {"00000000"})
        with raises(ErrorKind.MISSING_OPTION):
            shelves_of_kind(store, "", before | other)


async def test_a_series_goes_on_where_it_stopped_and_asks_each_day_once(tmp_path: Path) -> None:
    """Three days at three real helpers: two are asked, the third when it is over. What comes late is said."""
    first_day = real_now() - real_now() % DAY + DAY
    folder = tmp_path / "collected"

    def clock() -> int:
        """Four days on: helpers have no key for the past."""
        return first_day + 4 * DAY

    async with three_helpers(tmp_path / "helpers", clock=clock) as three:

        def of_day(day: int, count: int) -> list[SealedReport]:
            return seal_all([[1, 0]] * count, replace(terms(2), time=first_day + day * DAY), three.helper_set)

        file_all(folder, [*of_day(0, 3), *of_day(1, 4)])

        async def ask(until: int) -> list[PeriodAnswer]:
            with StoreReader(folder) as store:
                series = Series(store, Querier(three.helper_set, clock=clock), three.site_key(), OPTIONS)
                periods = closed_periods(folder, shelves_of_kind(store, ""), Every.DAY, until)
                return [await series.ask(period, clock()) for period in periods]

        first = await ask(first_day + 2 * DAY + HOUR)
        assert [answer.counted for answer in first] == [3, 4]
        file_all(folder, [*of_day(0, 2), *of_day(2, 5)])
        second = await ask(first_day + 3 * DAY + HOUR)
        assert [answer.counted for answer in second] == [3, 4, 5]
        assert [answer.histogram for answer in second[:2]] == [answer.histogram for answer in first]
        assert [answer.late for answer in second] == [2, 0, 0]
        batches = sorted((folder / "asked").glob("*.batch"))
        assert [len(QueryFolder(batch).all()) for batch in batches] == [1, 1, 1]
        # An answer that was lost before it was kept is fetched again: the same query, the same numbers.
        batches[0].with_suffix(".answer.json").unlink()
        assert await ask(first_day + 3 * DAY + HOUR) == second


Ask = Callable[..., Awaitable[PeriodAnswer]]


def run(folder: Path, monkeypatch: pytest.MonkeyPatch, ask: Ask, **more: Any) -> dict[str, object]:
    """The command on a collector's folder, with helpers that are played."""
    monkeypatch.setattr(Series, "ask", ask)
    monkeypatch.setattr(HelperSet, "load", lambda _path: samples.HELPER_SET)
    monkeypatch.setattr("protocol.querier.series.load_identity", lambda _path: samples.QUERIER)
    options: dict[str, Any] = {"every": Every.DAY, "kind": "", "plot": None, **more}
    key, of = folder / "site.key", options.pop("of", OPTIONS)
    return ask_over_time(folder, folder / "helpers.json", key, of, lambda: samples.NOW + 9 * DAY, **options)


def three_days(folder: Path) -> None:
    times = [samples.NOW - samples.NOW % DAY + day * DAY for day in range(3)]
    file_all(folder, [samples.report(f"{at}", promised=samples.terms(time=at)) for at in times])


@pytest.mark.parametrize("failure", [QueryFailed("asking", (1,), "Birch is out of reach"), KeyboardInterrupt()])
def test_what_was_answered_before_an_interruption_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], failure: BaseException
) -> None:
    three_days(tmp_path)
    asked = []

    async def ask(_self: Series, period: Period, _now: int) -> PeriodAnswer:
        asked.append(period.name)
        if len(asked) == 2:
            raise failure
        return PeriodAnswer(period.name, 1, 0, (120, -3), 36, 1)

    with pytest.raises(type(failure)):
        run(tmp_path, monkeypatch, ask)
    shown = capsys.readouterr().out
    assert "1 of 3 days" in shown and "120" in shown and "36" in shown and len(asked) == 2


def test_a_refusal_for_good_is_a_row_and_the_series_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    three_days(tmp_path)

    async def ask(_self: Series, period: Period, _now: int) -> PeriodAnswer:
        if period.name.endswith("18"):
            return PeriodAnswer(period.name, 1, 0, refused="Refused: all 1 reports were counted before.")
        return PeriodAnswer(period.name, 1, 0, (5, 6), 3, 1)

    told = run(tmp_path, monkeypatch, ask, plot=tmp_path / "series.svg")
    assert "Refused: all 1 reports were counted before." in capsys.readouterr().out
    assert (told["every"], len(json.loads(json.dumps(told))["periods"])) == ("day", 3)
    assert (tmp_path / "series.svg").stat().st_size > 1000


async def test_a_period_that_is_refused_for_good_does_not_end_the_series(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    three_days(tmp_path)
    failures = [
        QueryFailed("submitting", (), "no", http_status=422),
        QueryFailed("asking", (), "out", kind=ErrorKind.UNREACHABLE),
        QueryFailed("submitting", (), "no", http_status=403, kind=ErrorKind.FORBIDDEN),
    ]

    async def fail(*_: object, **__: object) -> None:
        raise failures.pop(0)

    monkeypatch.setattr("protocol.querier.series.ask_batch", fail)
    with StoreReader(tmp_path) as store:
        series = Series(store, Querier(samples.HELPER_SET), samples.QUERIER, OPTIONS)
        first, second, _ = closed_periods(tmp_path, shelves_of_kind(store, ""), Every.DAY, samples.NOW + 9 * DAY)
        assert (await series.ask(first, samples.NOW)).refused == "no"
        with raises(ErrorKind.UNREACHABLE, QueryFailed):
            await series.ask(second, samples.NOW)
        with raises(ErrorKind.FORBIDDEN, QueryFailed):
            await series.ask(second, samples.NOW)
    assert len(BatchReader(second.batch)) == 1 and not second.answer.exists()


def test_a_series_goes_on_with_the_rest_of_reports_as_it_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an upgrade nobody is there to choose: one that was saved earlier uses up. A new one must choose."""
    three_days(tmp_path)
    chosen: list[bool | None] = []

    async def refuse(_querier: object, _batch: object, options: QueryOptions, *_: object) -> None:
        chosen.append(options.keeps_rest)
        raise QueryFailed("submitting", (), "no", http_status=422)

    monkeypatch.setattr("protocol.querier.series.ask_batch", refuse)

    def play(keeps_rest: bool | None) -> list[bool | None]:
        chosen.clear()
        options = replace(OPTIONS, epsilon_micros=500_000, keeps_rest=keeps_rest)
        run(tmp_path, monkeypatch, Series.ask, of=options)
        return chosen.copy()

    with raises(ErrorKind.MISSING_OPTION):
        play(None)
    assert play(True) == [True] * 3
    (first, *_) = periods_of(tmp_path, Every.DAY, samples.NOW + 9 * DAY)
    earlier = make_query(BatchReader(first.batch), OPTIONS, samples.HELPER_SET, samples.QUERIER, samples.NOW)
    QueryFolder(first.batch).keep(earlier)
    assert play(None) == [False] * 3
    assert play(True) == [False, True, True], "a period is queried once, as it began"


def test_a_damaged_answer_is_said(tmp_path: Path) -> None:
    three_days(tmp_path)
    (period, *_) = periods_of(tmp_path, Every.DAY, samples.NOW + 9 * DAY)
    period.answer.parent.mkdir()
    period.answer.write_text('{"answer": "many"}')
    with StoreReader(tmp_path) as store, raises(ErrorKind.FILE_DAMAGED):
        asyncio.run(Series(store, Querier(samples.HELPER_SET), samples.QUERIER, OPTIONS).ask(period, samples.NOW))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["series", *NOWHERE, "--every", "month"], "'month' is not one of"),
        (["series", *NOWHERE, "--left-out", "left.csv"], "No such option: --left-out"),
        (["series", "--reports", "none", "--helpers", "none"], "Missing option '--site-key'"),
        ([*NOWHERE, "--left-out", "."], "--left-out: . is a folder"),
    ],
)
def test_mistakes_are_said_before_anything_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], more: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.run(["query", *more]) != 0
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []

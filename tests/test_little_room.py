"""A terminal of 60 columns: tables fold, bars shrink, and nothing that they say is cut off."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from rich.table import Table

import trefoil
from benchmarks.demo import view as demo_view
from benchmarks.experiments.tables import plain_table
from device import actions, released
from device.epoch import EpochCalendar
from device.privacy_filter import FilterKind, FilterState
from device.storage import EpochEntry, EpochOutcome, ReportRecord
from mpc_helpers.local import view as launch_view
from mpc_helpers.local.status import HelperHealth, table_of
from protocol import console
from protocol.answer import Answer, RejectionCounts
from protocol.errors import Rejection
from protocol.noise_mode import NoiseMode
from protocol.querier import listing, record_view, series_view, view
from protocol.querier.every import Every
from protocol.querier.own_record import AskedBatch, Knowledge, MeasuredBias, OwnRecord
from protocol.querier.report_span import ReportSpan
from protocol.querier.series import PeriodAnswer
from protocol.querier.worth import QueryResult, worth
from protocol.seconds import DAY
from protocol.status import QueryState, QueryStatus
from tests.support.protocol_samples import HELPER_SET, NOW, query, report

WIDTHS = (60, 80)
LONG_SITE = "the-shop-with-the-long-name.example"
# What a table is drawn with, and bars, which may differ from one width to another.
DRAWN = set(" \n─━│┃┏┓┗┛┡┩╇┳┴┼├┤└┘┌┐┬╷╵╴╶█▉▊▋▌▍▎▏")


def rendered(table: Table, width: int) -> str:
    screen = io.StringIO()
    Console(file=screen, width=width, color_system=None).print(table)
    return screen.getvalue()


def said(text: str) -> Counter[str]:
    """Every letter and digit, however the lines are broken."""
    return Counter(each for each in text if each not in DRAWN)


def whole(table: Table, width: int) -> bool:
    """Whether the table says at this width what it says where there is all the room in the world."""
    shown = rendered(table, width)
    assert max(map(len, shown.splitlines())) <= width
    return said(shown) == said(rendered(table, 1000))


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> list[Table]:
    """Every table that a command prints, as it is handed to rich."""
    found: list[Table] = []
    ordinary = Console.print

    def noted(self: Console, *objects: Any, **how: Any) -> None:  # Any: whatever rich prints, and how
        if isinstance(self, console.Printed):
            found.extend(each for each in objects if isinstance(each, Table))
        ordinary(self, *objects, **how)

    monkeypatch.setattr(Console, "print", noted)
    return found


def check(tables: Sequence[Table], count: int) -> None:
    assert len(tables) == count
    for table in tables:
        for width in WIDTHS:
            assert whole(table, width), rendered(table, width)


def result_of(histogram: list[int]) -> QueryResult:
    asked = query(site=LONG_SITE, buckets=len(histogram), unit="purchases", noise=NoiseMode.LOCAL)
    counted = (np.zeros(1, dtype=np.uint8),) * 3
    left_out: tuple[RejectionCounts, RejectionCounts, RejectionCounts] = ({Rejection.SEEN: 1}, {}, {})
    answer = Answer(histogram, None, 123_456, 123_457, left_out, asked.noise, 1_000_000, 2, 1, bytes(32), counted)
    return worth(asked, answer, {}, 10)


def test_the_check_notices_what_is_cut() -> None:
    table = Table("a", "b")
    table.add_row("word " * 20, "https://a-very-long-name.example:8443")
    assert whole(console.folded(table), 30)
    for column in table.columns:
        column.overflow = "ellipsis"
    assert not whole(table, 30)


@pytest.mark.parametrize("width", [30, 60, 120])
def test_columns_that_may_not_be_broken_are_broken_rather_than_cut(
    width: int, tables: list[Table], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of experiments and benchmarks. Rich cuts them off without a sign."""
    monkeypatch.setattr(console.out, "_width", width)
    table = plain_table("a title", ("system", "avg ε", "max ε", "run", "RMSRE"), ("system",), no_wrap=True)
    for _ in range(3):
        table.add_row("cookie-monster, with a side query", "0.123456", "1.2345", "1000/1000", "0.12345")
    console.out.print(table)
    (printed,) = tables
    assert whole(printed, width)
    assert all(column.no_wrap for column in printed.columns) == (width == 120)


def test_an_answer(tables: list[Table]) -> None:
    view.show(result_of([1_000_000, 999_000, -12, *[7] * 20]), ["north", "south", "west"])
    check(tables, 1)


@pytest.mark.parametrize("width", [44, 60, 80, 120])
def test_bars_shrink_together(width: int, tables: list[Table]) -> None:
    """The longest is as long as there is room, and one that is half as long is half as long at every width."""
    view.show(result_of([1000, 500, 0, -4]), ["north", "south", "west"])
    lengths = [line.count("█") for line in rendered(tables[0], width).splitlines() if "█" in line]
    assert len(lengths) == 2 and 8 <= lengths[0] <= console.BAR_WIDTH
    assert lengths[1] == lengths[0] // 2
    assert lengths[0] == console.BAR_WIDTH or width < 80


def test_bars_grow_with_the_value_and_none_is_drawn_below_zero() -> None:
    table = Table(box=None, show_header=False)
    console.add_bars(table)
    for value in (-5, *range(101)):
        table.add_row(console.bar(value, 100))
    below, nothing, *bars, longest = (line.strip() for line in rendered(table, 80).splitlines())
    assert (below, nothing, longest) == ("", "", "█" * console.BAR_WIDTH)
    # A bar of as many characters ends in a fuller one: ▏ is after █.
    assert bars == sorted(bars, key=lambda each: (len(each), -ord(each[-1])))


def test_the_demonstration(tables: list[Table]) -> None:
    demo_view.show_histograms([1000] * 4, [1003] * 4, result_of([1_004, 1_000, 998, 1_002]), 2311)
    demo_view.show_seconds({"making people and reports": 1.5, "other": 0.2, "total": 1.7}, {"admitting": 0.3})
    calendar = EpochCalendar(NOW, 7 * DAY)
    states = [FilterState(kind, LONG_SITE, epoch, 1, 10**6) for kind in demo_view._KINDS for epoch in (-4, 0)]
    device = SimpleNamespace(calendar=lambda: calendar, budget=lambda: states)
    demo_view.show_budget(device, 3)  # type: ignore[arg-type]
    check(tables, 3)


def test_the_truth_of_a_simulation(tables: list[Table]) -> None:
    from benchmarks.reports_command import _table

    console.out.print(_table([1_000_000, 999_000, 0], "purchases"))
    check(tables, 1)


def test_a_device(tables: list[Table]) -> None:
    states = [FilterState(kind, LONG_SITE, epoch, 333_333, 8 * 10**6) for kind in FilterKind for epoch in (-4, 0)]
    console.out.print(actions._table(states, EpochCalendar(NOW, 7 * DAY)))
    entries = tuple(EpochEntry(epoch, EpochOutcome.PAID, 250_000) for epoch in range(3))
    console.out.print(released._table([ReportRecord(NOW, 500_000, 2, LONG_SITE, LONG_SITE, entries)]))
    check(tables, 2)


def test_a_list_of_queries(tables: list[Table]) -> None:
    statuses = {party: QueryStatus(QueryState.COMPUTING, 0, 0) for party in range(3)}
    saved: Any = SimpleNamespace(query=query(), made=NOW)
    listing._show([listing.ListedQuery(saved, statuses)], ["north", "south", "west"], Path("folder/of/the/shop.batch"))
    check(tables, 1)


def test_bias(tables: list[Table]) -> None:
    span = ReportSpan(LONG_SITE, NOW - 40 * DAY, NOW, 1_500_000, 2, 1)
    asked = AskedBatch(Path("a-batch-with-a-long-name.batch"), (span,), (("ab" * 16, MeasuredBias(1234.5, 0.05)),))
    record_view._show(OwnRecord(LONG_SITE, [asked], Knowledge(1)))
    check(tables, 2)


def test_answers_over_time(tables: list[Table], monkeypatch: pytest.MonkeyPatch) -> None:
    days = [PeriodAnswer(f"2026-11-{day:02}", 1_234, 12, (1_000, 900, -3, 12), 120, 1_222) for day in range(10, 14)]
    monkeypatch.setattr(console.out, "_width", 60)
    with console.out.capture() as captured:
        series_view._show(days, 4, Every.DAY)
    check(tables, 1)
    drawn = [line for line in captured.get().splitlines() if "●" in line]
    assert len(drawn) == 16 and 50 < max(map(len, drawn)) <= 60


def test_helpers(tables: list[Table], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    reasons = [{"text": "the disk has less room than what one query needs"}]
    page = {"ready": False, "status": "degraded", "queries": {"released": 12, "failed": 3}, "reasons": reasons}
    console.out.print(table_of([HelperHealth(helper, page) for helper in HELPER_SET.helpers]))
    monkeypatch.setattr(launch_view, "health", lambda _: page)
    running: Any = SimpleNamespace(trio=SimpleNamespace(helper_set=HELPER_SET))
    console.out.print(launch_view._table(running))
    path = tmp_path / "helpers.json"
    path.write_text(json.dumps(HELPER_SET.to_json()))
    assert trefoil.run(["helper-set", "verify", str(path)]) == 0
    check(tables, 3)


def test_batches(tables: list[Table], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from protocol.batch import BatchWriter

    monkeypatch.chdir(tmp_path)
    with BatchWriter("a-batch-with-a-long-name.batch") as batch:
        batch.add(report("one"))
    assert trefoil.run(["batch", "ls", "a-batch-with-a-long-name.batch"]) == 0
    check(tables, 1)


def test_a_plan(tables: list[Table]) -> None:
    assert trefoil.run(["plan", "--reports", "2000", "--value-cap", "5"]) == 0
    check(tables, 2)

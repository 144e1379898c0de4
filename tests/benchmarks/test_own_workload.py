"""`trefoil.simulate` on tables of one's own; many seeds and their bands; figures with series of one's own."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas
import pytest

import trefoil
from benchmarks.experiments import experiments, figures, seeds
from benchmarks.experiments.files import read_tables
from benchmarks.experiments.own_workload import UNIT, QueryPlan, example_tables, resampled, simulate
from benchmarks.experiments.policies import AraLike, CookieMonster, PolicyOutcome, System
from benchmarks.experiments.results import Options, Point
from benchmarks.experiments.simulation import simulate as run_policies
from benchmarks.experiments.world import Epochs, Matches, World
from device.attribution import Award
from device.events import Impression
from protocol.cli.console import new_plot
from protocol.errors import ErrorKind, TrefoilError
from protocol.units import DAY, HOUR
from tests.support.raising import raises

MONDAY = 1_704_067_200
# Three people, one advertiser. Ann sees an ad in week 0 and buys in week 1; Bob sees none; Cleo's ad comes too late.
IMPRESSIONS: dict[str, list[Any]] = {
    "person": ["ann", "cleo", "dora"],
    "time": [MONDAY + HOUR, MONDAY + 9 * DAY, MONDAY],
}
CONVERSIONS: dict[str, list[Any]] = {
    "person": ["ann", "bob", "cleo"],
    "time": [MONDAY + 8 * DAY, MONDAY + 8 * DAY + 1, MONDAY + 8 * DAY + 2],
    "value": [2, 4, 4],
}


def rows(result: trefoil.SimulationResult) -> dict[str, dict[str, Any]]:
    return {row["system"]: row for row in result.to_pandas().to_dict("records") if row["seed"] == 0}


def test_a_small_workload_by_hand() -> None:
    """Two weeks are asked for by three devices; what each system charges can be written down."""
    result = simulate(IMPRESSIONS, CONVERSIONS, batch=3, epsilon=0.5, window_days=8)
    found = rows(result)
    assert [row["executed"] for row in found.values()] == [1, 1, 1]
    assert list(found) == [system.value for system in System]
    # ε in both weeks of one central budget; in both weeks of every device that converts; ε·2/4 in Ann's first week.
    assert found["ipa-like"]["average_epsilon"] == 0.5
    assert found["ara-like"]["average_epsilon"] == 0.5
    assert found["cookie-monster"]["average_epsilon"] == pytest.approx(0.25 / 6, abs=1e-6)
    (asked,) = result.queries().query("system == 'cookie-monster'").to_dict("records")
    assert (asked["truth"], asked["answer"], asked["executed"]) == (2.0, 2.0, True)


def as_csv(table: Mapping[str, Any], path: Path) -> Path:
    pandas.DataFrame(table).to_csv(path.with_suffix(".csv"), index=False)
    return path.with_suffix(".csv")


def as_parquet(table: Mapping[str, Any], path: Path) -> Path:
    frame = pandas.DataFrame(table)
    frame["time"] = pandas.to_datetime(frame["time"], unit="s")
    frame.to_parquet(path.with_suffix(".parquet"))
    return path.with_suffix(".parquet")


def as_dated_csv(table: Mapping[str, Any], path: Path) -> Path:
    dated = [datetime.datetime.fromtimestamp(each, datetime.UTC).isoformat() for each in table["time"]]
    return as_csv({**table, "time": dated}, path)


def as_frame(table: Mapping[str, Any], _: Path) -> pandas.DataFrame:
    return pandas.DataFrame(table)


@pytest.mark.parametrize("form", [as_csv, as_dated_csv, as_parquet, as_frame])
def test_every_form_of_a_table_is_the_same_workload(form: Callable[..., Any], tmp_path: Path) -> None:
    expected = simulate(IMPRESSIONS, CONVERSIONS, batch=3, epsilon=0.5).to_pandas().drop(columns="seconds")
    tables = form(IMPRESSIONS, tmp_path / "impressions"), form(CONVERSIONS, tmp_path / "conversions")
    assert simulate(*tables, batch=3, epsilon=0.5).to_pandas().drop(columns="seconds").equals(expected)


def test_columns_may_have_other_names() -> None:
    named = {"person": "device", "time": "when"}
    impressions = {"device": IMPRESSIONS["person"], "when": IMPRESSIONS["time"]}
    conversions = {"device": CONVERSIONS["person"], "when": CONVERSIONS["time"], "value": CONVERSIONS["value"]}
    result = simulate(impressions, conversions, batch=3, epsilon=0.5, columns=named)
    assert rows(result)["cookie-monster"]["average_epsilon"] > 0


def test_advertisers_have_budgets_and_queries_of_their_own() -> None:
    impressions = {**IMPRESSIONS, "advertiser": ["shoes", "shoes", "books"]}
    conversions = {
        "person": ["ann", "ann", "bob", "bob"],
        "time": [MONDAY + 8 * DAY] * 4,
        "advertiser": ["shoes", "books", "shoes", "books"],
    }
    (row,) = simulate(impressions, conversions, batch=2, epsilon=0.5, systems=["cookie-monster"]).points
    # Ann's ad was for shoes: only that query finds it.
    assert sorted(row.run.truth.tolist()) == [0, 1000] and len(row.run.executed) == 2


def test_larger_values_are_cut_to_the_cap() -> None:
    tables = read_tables(IMPRESSIONS, CONVERSIONS, {}, {}, 3.0, UNIT)
    assert tables.value.tolist() == [2000, 3000, 3000]


def halved(relevant: Mapping[int, Sequence[Impression]], award: Award) -> Sequence[int]:
    """Give half of the value."""
    return [award.value // 2]


class WholeBudget:
    """A policy of one's own: as ARA-like, but with a budget of 1 micro, so that nothing is paid."""

    system: ClassVar[System | None] = None
    label: ClassVar[str] = "a budget of nothing"

    def run(self, world: World, matches: Matches) -> PolicyOutcome:
        return AraLike(capacity=1).run(world, matches)


def test_own_functions_and_policies_run_beside_the_three() -> None:
    """In the order of the list; last touch on real devices is the simulation, to the last micro."""
    impressions, conversions = example_tables(600)
    systems: list[Any] = ["cookie-monster", halved, WholeBudget, "last", "ipa-like", WholeBudget()]
    found = simulate(impressions, conversions, batch=100, epsilon=0.4, systems=systems).points
    assert [point.run.system for point in found] == [System.COOKIE_MONSTER, None, None, None, System.IPA_LIKE, None]
    ours, half, nothing, last, _, again = (point.run for point in found)
    assert last.answer.tolist() == ours.answer.tolist() and last.consumed == ours.consumed > 0
    assert 0 < half.answer.sum() <= ours.answer.sum() / 2
    assert nothing.answer.sum() == again.answer.sum() == nothing.consumed == 0


def summary(result: trefoil.SimulationResult) -> list[tuple[int, str, int]]:
    return [(point.seed, point.run.label, point.run.consumed) for point in result.points]


def test_seeds_in_parallel_are_seeds_one_after_the_other() -> None:
    """With a function that only this process has, as a notebook's."""
    tables = example_tables(600)
    local = eval("lambda relevant, award: [award.value]")  # noqa: S307 - importable from nowhere
    choices: dict[str, Any] = {"batch": 100, "epsilon": 0.4, "systems": ["cookie-monster", local], "seeds": 4}
    alone = summary(simulate(*tables, **choices, processes=1))
    assert summary(simulate(*tables, **choices, processes=3)) == alone
    assert len({consumed for _, label, consumed in alone if label == "cookie-monster"}) > 1
    assert alone[:2] == summary(simulate(*tables, **choices | {"seeds": 1}))


def test_a_drawn_person_has_all_of_their_own_rows() -> None:
    tables = read_tables(*example_tables(300), {}, {}, None, UNIT)
    drawn = resampled(tables, 7)
    assert drawn.person.max() < 300
    ours = {
        person: sorted(tables.seen_time[tables.seen_person == person].tolist())
        for person in np.unique(tables.person).tolist()
    }
    by_time = {int(time): person for person, time in zip(tables.person.tolist(), tables.time.tolist(), strict=True)}
    assert len(by_time) == len(tables.time), "times tell the people of this table apart"
    for person, time in zip(drawn.person.tolist(), drawn.time.tolist(), strict=True):
        assert sorted(drawn.seen_time[drawn.seen_person == person].tolist()) == ours[by_time[time]]
    assert len(drawn.person) != len(tables.person) or drawn.time.tolist() != tables.time.tolist()


def test_a_function_of_the_seed_makes_the_tables() -> None:
    made = []

    def tables(seed: int) -> tuple[object, object]:
        made.append(seed)
        return example_tables(600, seed)

    result = simulate(tables, batch=100, epsilon=0.4, seeds=3, processes=1)
    assert made == [0, 1, 2] and len({point.run.consumed for point in result.points[1::3]}) == 3


PAIR = (IMPRESSIONS, CONVERSIONS)
NO_TIME = {"person": ["ann"]}


@pytest.mark.parametrize(
    ("tables", "choices", "kind"),
    [
        (PAIR, {"batch": 0}, ErrorKind.OUT_OF_RANGE),
        (PAIR, {"batch": 4}, ErrorKind.TOO_FEW),
        (PAIR, {"batch": 3, "epsilon": 0}, ErrorKind.OUT_OF_RANGE),
        (PAIR, {"batch": 3, "value_cap": -1}, ErrorKind.OUT_OF_RANGE),
        (PAIR, {"batch": 3, "window_days": -1}, ErrorKind.OUT_OF_RANGE),
        (PAIR, {"batch": 3, "epoch_days": 0}, ErrorKind.OUT_OF_RANGE),
        (PAIR, {"batch": 3, "seeds": 0}, ErrorKind.OUT_OF_RANGE),
        (PAIR, {"batch": 3, "kappa": -1}, ErrorKind.OUT_OF_RANGE),
        (PAIR, {"batch": 3, "accounting": "own"}, ErrorKind.UNKNOWN_NAME),
        (PAIR, {"batch": 3, "systems": []}, ErrorKind.TOO_FEW),
        (PAIR, {"batch": 3, "systems": ["ipa"]}, ErrorKind.UNKNOWN_NAME),
        (PAIR, {"batch": 3, "systems": [7]}, ErrorKind.WRONG_TYPE),
        (PAIR, {"batch": 3, "columns": {"when": "time"}}, ErrorKind.UNKNOWN_NAME),
        (PAIR, {"batch": 3, "columns": {"value": "price"}}, ErrorKind.MISSING_FIELD),
        ((IMPRESSIONS,), {"batch": 3}, ErrorKind.TOO_FEW),
        ((IMPRESSIONS, NO_TIME), {"batch": 1}, ErrorKind.MISSING_FIELD),
        ((IMPRESSIONS, [1, 2]), {"batch": 1}, ErrorKind.WRONG_TYPE),
        ((IMPRESSIONS, "nowhere.csv"), {"batch": 1}, ErrorKind.FILE_MISSING),
        ((IMPRESSIONS, "nowhere.parquet"), {"batch": 1}, ErrorKind.FILE_MISSING),
        ((IMPRESSIONS, {**CONVERSIONS, "value": [1, 2]}), {"batch": 1}, ErrorKind.MALFORMED),
        ((IMPRESSIONS, {**CONVERSIONS, "value": [1, -2, 3]}), {"batch": 1}, ErrorKind.OUT_OF_RANGE),
        ((IMPRESSIONS, {**CONVERSIONS, "value": [1, None, 3]}), {"batch": 1}, ErrorKind.MISSING_FIELD),
        ((IMPRESSIONS, {**CONVERSIONS, "value": ["a", "b", "c"]}), {"batch": 1}, ErrorKind.WRONG_TYPE),
        ((IMPRESSIONS, {**CONVERSIONS, "person": ["ann", None, "cleo"]}), {"batch": 1}, ErrorKind.MISSING_FIELD),
        ((IMPRESSIONS, {**CONVERSIONS, "time": ["noon", "one", "two"]}), {"batch": 1}, ErrorKind.WRONG_TYPE),
        ((IMPRESSIONS, {**CONVERSIONS, "advertiser": ["a", "b", "c"]}), {"batch": 1}, ErrorKind.MISSING_FIELD),
        ((lambda seed: seed,), {"batch": 1}, ErrorKind.WRONG_TYPE),
        ((lambda seed: PAIR, CONVERSIONS), {"batch": 1}, ErrorKind.CONFLICTING_OPTIONS),
    ],
)
def test_mistakes_get_a_sentence_and_a_hint(tables: tuple[Any, ...], choices: dict[str, Any], kind: ErrorKind) -> None:
    with raises(kind, TrefoilError) as caught:
        simulate(*tables, **choices)
    assert str(caught.value) and caught.value.hint


def test_a_worker_that_ends_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    with raises(ErrorKind.ABORTED, TrefoilError):
        seeds.run_seeds(lambda seed: os._exit(9), range(3), 2)


def test_memory_limits_how_many_seeds_run_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    assert [seeds.workers_for(20, size) for size in (1_000, 1_000_000, 24_113_018)] == [20, 10, 1]


def test_a_band_is_quantiles_of_the_seeds_and_as_long_as_the_shortest() -> None:
    band = seeds.band_of([np.full(3 + (seed == 0), float(seed)) for seed in range(101)])
    assert [one.tolist() for one in band] == [[5.0] * 3, [50.0] * 3, [95.0] * 3]


# Figures.


class SameAsOurs:
    """Equal to Cookie Monster, so that its lines lie on others."""

    system: ClassVar[System | None] = None
    label: ClassVar[str] = f"a policy of one's own {'with a long name ' * 6}that equals Cookie Monster"

    def run(self, world: World, matches: Matches) -> PolicyOutcome:
        return CookieMonster().run(world, matches)


@pytest.fixture(scope="module")
def points() -> list[Point]:
    options = Options(scale=0.01, own=(SameAsOurs(),))
    settings = [(0.1, 0.1), (0.5, 0.1), (0.1, 1.0)]

    def run(options: Options, _: object) -> Any:
        return experiments.microbenchmark(options, settings)

    return experiments.over_seeds(run, options, 3, 1000).points


def test_seeds_of_an_experiment_are_points_of_one_result(points: list[Point]) -> None:
    assert {point.seed for point in points} == {0, 1, 2} and len(points) == 3 * 3 * 4
    options = Options(seed=1, scale=0.01)
    alone = experiments.microbenchmark(options, [(0.1, 0.1)]).points
    same = [point for point in points if (point.seed, point.participation, point.rate) == (1, 0.1, 0.1)]
    assert [point.run.consumed for point in same][:3] == [point.run.consumed for point in alone]


def drawn(points: Sequence[Point], body: Callable[..., None], *more: object) -> Any:
    if body is not figures._knob:
        points = [point for point in points if (point.participation, point.rate) == (0.1, 0.1)]
    figure = new_plot(lambda axes: body(axes, points, *more))
    figure.draw_without_rendering()
    return figure.axes[0]


BODIES: list[tuple[Callable[..., None], tuple[object, ...]]] = [
    (figures._knob, (1, 0.1, False)),
    (figures.draw_budget_by_query, ()),
    (figures.draw_error_cdf, ()),
    (figures._budget_cdf, ()),
]


@pytest.mark.parametrize(("body", "more"), BODIES)
def test_bands_are_drawn_and_named(points: list[Point], body: Callable[..., None], more: tuple[object, ...]) -> None:
    """And the legend is no wider than the plot, which keeps most of an ordinary figure's height."""
    axes = drawn(points, body, *more)
    legend, plot = axes.get_legend().get_window_extent(), axes.get_window_extent()
    assert plot.x0 <= legend.x0 and legend.x1 <= plot.x1 and plot.height / axes.figure.dpi > 2.4
    labels = [text.get_text().replace("\n", " ") for text in axes.get_legend().get_texts()]
    assert "5% to 95% of 3 seeds, line: median" in labels
    # One band for each series, and one that stands for all of them in the legend.
    assert len(axes.collections) >= 5
    first = [point for point in points if point.seed == 0]
    assert not [text for text in drawn(first, body, *more).get_legend().get_texts() if "seeds" in text.get_text()]


@pytest.mark.parametrize(("body", "more"), BODIES)
def test_equal_lines_are_both_seen(points: list[Point], body: Callable[..., None], more: tuple[object, ...]) -> None:
    """The upper one has gaps, or is narrower."""
    axes = drawn([point for point in points if point.seed == 0], body, *more)
    lines = {line.get_label(): line for line in axes.get_lines()}
    ours, own = lines["Cookie Monster"], lines[SameAsOurs.label]
    assert (
        ours.get_xdata().tolist() == own.get_xdata().tolist() and ours.get_ydata().tolist() == own.get_ydata().tolist()
    )
    assert ours.get_linestyle() == "-" and own.get_linestyle() != "-"
    widths = [lines[system.facts.title].get_linewidth() for system in System]
    if body is figures.draw_error_cdf:
        assert widths == sorted(widths, reverse=True) and len(set(widths)) == 3


def test_a_side_query_is_named_and_only_what_was_recorded_at_the_same_setting_is_marked() -> None:
    points = experiments.microbenchmark(Options(scale=0.01, kappa=0.5), [(0.1, 0.05), (0.1, 0.1)]).points
    for rate, recorded in ((0.05, False), (0.1, True)):
        labels = drawn(points, figures._knob, 1, rate, False).get_legend_handles_labels()[1]
        assert {"IPA-like", "ARA-like", "Cookie Monster, κ = 0.5"} <= set(labels)
        assert (figures.RECORDED in labels) is recorded


def test_one_call_draws_budget_and_error(tmp_path: Path) -> None:
    result = simulate(*example_tables(600), batch=100, epsilon=0.4, seeds=3, processes=1)
    figure = result.plot(tmp_path / "own.png")
    assert (tmp_path / "own.png").read_bytes().startswith(b"\x89PNG") and len(figure.axes) == 2
    assert result._repr_png_().startswith(b"\x89PNG")
    with raises(ErrorKind.INVALID_VALUE, TrefoilError):
        result.plot(tmp_path / "own.gif")


def test_without_pandas_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    result = simulate(*PAIR, batch=3, epsilon=0.5)
    monkeypatch.setitem(sys.modules, "pandas", None)
    with raises(ErrorKind.MISSING_DEPENDENCY, TrefoilError) as caught:
        result.to_pandas()
    assert "trefoil[experiments]" in caught.value.hint


def test_systems_keep_their_place_in_one_list() -> None:
    """IPA-like too, which has no filter on a device."""
    world = QueryPlan(100, 0.4, None, 30).world_of(read_tables(*example_tables(600), {}, {}, None, UNIT))
    policies = [CookieMonster(), System.IPA_LIKE.facts.policy(Options().accounting, 0), AraLike()]
    labels = [run.label for run in run_policies(world, Epochs(), policies).runs]
    assert labels == ["cookie-monster", "ipa-like", "ara-like"]
    assert replace(world, scale=1.0).submitted == 3

"""`trefoil.simulate`: the paper's systems, and functions and policies of one's own, on a workload of one's own.

A workload is two tables. Impressions have the columns `person` and `time`, conversions also `value` (1 without it) and
`product` (batches are formed for each). Both may have `advertiser`; budgets are kept for each pair of person and
advertiser. A table is a CSV or Parquet file, a DataFrame, or a mapping from names to columns; `files` reads them.
"""

from __future__ import annotations

import io
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.experiments import files
from benchmarks.experiments.figures import draw_budget_by_query, draw_error_cdf
from benchmarks.experiments.files import Table, read_tables
from benchmarks.experiments.on_devices import OnDevices, on_devices, policy_named
from benchmarks.experiments.policies import Accounting, DevicePolicy, IpaLike, System
from benchmarks.experiments.results import Options, Point, mean, quartiles
from benchmarks.experiments.seeds import check_seeds, run_seeds, workers_for
from benchmarks.experiments.simulation import simulate as run_policies
from benchmarks.experiments.world import (
    Epochs,
    EventTables,
    Ints,
    World,
    expand,
    fill_groups,
    query_epsilon,
    stable_order,
    starts_of,
    world_of_batches,
)
from benchmarks.workloads.seeded import generator
from device.attribution import OURS, AttributionFunction
from protocol.cli.console import new_figure, save_figure
from protocol.errors import ErrorKind, TrefoilError
from protocol.units import DAY, MICROS, entitlement

# One of the value's unit is 1,000 in the simulation, so that values and κ may have three decimals.
UNIT = 1000
SYSTEMS = tuple(system.value for system in System)

Tables = tuple[Table, Table]
Participant = str | System | AttributionFunction | DevicePolicy | IpaLike | type


def resampled(tables: EventTables, seed: int) -> EventTables:
    """Return as many people, drawn again with replacement: each draw of a person is a person of its own."""
    drawn = generator(seed).integers(0, tables.people, tables.people)
    seen, seen_person = _rows_of(tables.seen_person, drawn, tables.people)
    done, person = _rows_of(tables.person, drawn, tables.people)
    return EventTables(
        seen_person,
        tables.seen_time[seen],
        tables.seen_advertiser[seen],
        person,
        tables.time[done],
        tables.advertiser[done],
        tables.product[done],
        tables.value[done],
    )


def _rows_of(person: Ints, drawn: Ints, people: int) -> tuple[Ints, Ints]:
    """Return the rows of the people drawn, one after the other, and the number of the draw that each belongs to."""
    order = stable_order(person)
    starts = starts_of(person[order], people)
    draw, step = expand(np.diff(starts)[drawn])
    return order[starts[drawn[draw]] + step], draw


@dataclass(frozen=True, slots=True)
class QueryPlan:
    """How queries are made of the tables: reports in each, its ε or None for the paper's rule, cap and window."""

    batch: int
    epsilon: float | None
    cap: float | None
    window_days: int

    def __post_init__(self) -> None:
        for allowed, rule, hint in (
            (self.batch >= 1, "a batch holds at least one report", "Give batch=1000 or so."),
            (
                self.epsilon is None or 0 < self.epsilon < math.inf,
                "epsilon is above 0",
                "Omit it for the paper's: an error of 5 % in 99 % of cases.",
            ),
            (
                self.cap is None or 0 < self.cap < math.inf,
                "value_cap is above 0",
                "Give the largest value that counts.",
            ),
            (0 <= self.window_days <= 3660, "window_days is 0 to 3660", "The paper looks 30 days back."),
        ):
            if not allowed:
                raise TrefoilError(rule, hint, kind=ErrorKind.OUT_OF_RANGE)

    def world_of(self, tables: EventTables) -> World:
        """Form full batches for each advertiser and product, in time order, and keep what is in one."""
        group = tables.advertiser * (int(tables.product.max()) + 1) + tables.product
        rows, query = fill_groups(group, tables.person, tables.time, self.batch, self.batch)
        cap = max(1, round(self.cap * UNIT) if self.cap is not None else int(tables.value.max()))
        epsilon = self._epsilons(tables.value[rows], query, cap)
        return world_of_batches(tables, rows, query, epsilon, cap=cap, window=self.window_days * DAY, unit=UNIT)

    def _epsilons(self, value: Ints, query: Ints, cap: int) -> Ints:
        """Return each query's ε in micros: as given, or for an error within 5 % of its values' sum in 99 %."""
        count = int(query.max()) + 1
        if self.epsilon is not None:
            return np.full(count, entitlement(self.epsilon), dtype=np.int64)
        sums = np.bincount(query, weights=value, minlength=count)
        return np.asarray([query_epsilon(cap, max(1.0, float(total))) for total in sums], dtype=np.int64)


@dataclass(frozen=True, slots=True, repr=False)
class SimulationResult:
    """What every system spent and answered, for every seed; a notebook shows it as a figure.

    >>> result = trefoil.simulate(*trefoil.example_tables(), batch=400, systems=["cookie-monster"])
    >>> result
    <SimulationResult of cookie-monster: 5 queries, 1 seed>
    >>> result.to_pandas()["executed"].tolist()
    [5]
    """

    points: tuple[Point, ...]

    def __repr__(self) -> str:
        labels = list(dict.fromkeys(point.run.label for point in self.points))
        seeds = len({point.seed for point in self.points})
        queries = len(self.points[0].run.executed)
        return (
            f"<SimulationResult of {', '.join(labels)}: {queries} quer{'y' if queries == 1 else 'ies'}, "
            f"{seeds} seed{'s' * (seeds > 1)}>"
        )

    def to_pandas(self) -> Any:  # Any: pandas has no types here
        """Return a DataFrame with one row for each seed and system: budgets in ε, errors relative to the truth."""
        return files.data_frame([_summary(point) for point in self.points])

    def queries(self) -> Any:  # Any: pandas has no types here
        """Return a DataFrame with one row for each seed, system and query, in the order in which batches fill up."""
        return files.data_frame([row for point in self.points for row in _query_rows(point)])

    def plot(self, path: Path | str | None = None) -> Any:  # Any: matplotlib has no types
        """Draw budget and error of every system, with bands over the seeds; return the figure, and save it if named."""
        figure = new_figure(10.8, 4.2)
        budget, error = figure.subplots(1, 2)
        for axes in (budget, error):
            axes.grid(visible=True, which="major", alpha=0.3)
        draw_budget_by_query(budget, self.points)
        draw_error_cdf(error, self.points)
        if path is not None:
            save_figure(Path(path), figure)
        return figure

    def _repr_png_(self) -> bytes:
        image = io.BytesIO()
        self.plot().savefig(image, format="png", dpi=100)
        return image.getvalue()


def _summary(point: Point) -> dict[str, object]:
    run, spread = point.run, quartiles(point.run.errors)
    return {
        "seed": point.seed,
        "system": run.label,
        "kappa": point.kappa,
        "epoch_days": point.epoch_days,
        "conversions": point.conversions,
        "queries": len(run.executed),
        "executed": int(run.executed.sum()),
        "average_epsilon": run.average,
        "largest_epsilon": run.maximum,
        "rmsre_mean": mean(run.errors),
        "rmsre_median": spread and spread[2],
        "rmsre_largest": spread and spread[4],
        "seconds": run.seconds,
    }


def _query_rows(point: Point) -> list[dict[str, object]]:
    run = point.run
    return [
        {
            "seed": point.seed,
            "system": run.label,
            "kappa": point.kappa,
            "query": number,
            "executed": bool(run.executed[query]),
            "truth": int(run.truth[query]) / UNIT,
            "answer": int(run.answer[query]) / UNIT,
            "paid_epsilon": int(run.paid[query]) / MICROS,
            "rmsre": float(run.rmsre[query]) if run.executed[query] else None,
        }
        for number, query in enumerate(run.order.tolist())
    ]


def simulate(
    impressions: Table | Callable[[int], Tables],
    conversions: Table | None = None,
    *,
    batch: int,
    systems: Sequence[Participant] = SYSTEMS,
    epsilon: float | None = None,
    value_cap: float | None = None,
    window_days: int = 30,
    epoch_days: int = 7,
    kappa: float = 0.0,
    accounting: Accounting | str = Accounting.PAPER,
    columns: Mapping[str, str] | None = None,
    seeds: int = 1,
    processes: int | None = None,
) -> SimulationResult:
    """Run systems of the paper, and functions and policies of your own, on your own impressions and conversions.

    A table is a CSV or Parquet file, a DataFrame, or a mapping from names to columns: `person` and `time` (seconds
    since 1970, or timestamps), and if you have them `advertiser`, and for conversions `value` and `product`. `columns`
    maps these names to those of your tables. Instead of two tables, give a function from a seed to two tables.

    `systems` lists "ipa-like", "ara-like" and "cookie-monster"; names of built-in attribution functions ("last",
    "first", "equal"); and your own functions, policies or policy classes. Functions run on real devices. A query is
    `batch` reports of one product; without `epsilon` it has the paper's, for an error of 5 % in 99 % of cases. Its
    answer is the value that impressions in the window are given in all. `kappa` is the weight of the side query.

    With several `seeds`, the first is the tables as they are; each other one draws people again, with replacement. They
    run on all cores, or on so many `processes`.

    >>> impressions, conversions = trefoil.example_tables()
    >>> result = trefoil.simulate(impressions, conversions, batch=400, seeds=3, processes=1)
    >>> spent = result.to_pandas().groupby("system")["average_epsilon"].median()
    >>> bool(spent["cookie-monster"] < spent["ara-like"] < spent["ipa-like"])
    True
    >>> result.plot("own.png") is not None
    True
    """
    check_seeds(seeds)
    if accounting not in list(Accounting):
        hint = 'Give "paper" or "artifact".'
        raise TrefoilError(f"there is no accounting {accounting!r}", hint, kind=ErrorKind.UNKNOWN_NAME)
    options = Options(Accounting(accounting), kappa, epoch_days)
    plan = QueryPlan(batch, epsilon, value_cap, window_days)
    policies = [_policy(each, options) for each in systems]
    if not policies:
        raise TrefoilError("there is no system to run", f"Give some of {', '.join(SYSTEMS)}.", kind=ErrorKind.TOO_FEW)
    source = _source(impressions, conversions, columns or {}, value_cap)
    # Checked here once, so that a mistake in the tables is reported before any worker starts.
    first = plan.world_of(source(0))

    def one(seed: int) -> list[Point]:
        started = time.perf_counter()
        world = plan.world_of(source(seed)) if seed else first
        runs = run_policies(world, Epochs(epoch_days * DAY), policies).runs
        seconds = time.perf_counter() - started
        return [
            Point(run.thinned(), run.kappa / UNIT, epoch_days, len(world.conversions.owner), seconds, seed=seed)
            for run in runs
        ]

    count = processes if processes is not None else workers_for(seeds, len(first.conversions.owner))
    return SimulationResult(tuple(point for points in run_seeds(one, range(seeds), max(1, count)) for point in points))


def _source(
    impressions: Table | Callable[[int], Tables],
    conversions: Table | None,
    columns: Mapping[str, str],
    cap: float | None,
) -> Callable[[int], EventTables]:
    """Return a function from a seed to the tables."""
    if callable(impressions):
        if conversions is not None:
            raise TrefoilError(
                "a function of the seed makes both tables",
                "Omit conversions, or give a table of impressions.",
                kind=ErrorKind.CONFLICTING_OPTIONS,
            )
        make: Callable[[int], object] = impressions

        def made(seed: int) -> EventTables:
            pair = make(seed)
            if not (isinstance(pair, tuple | list) and len(pair) == 2):
                raise TrefoilError(
                    f"the function made a {type(pair).__name__} of seed {seed}",
                    "It must return two tables: impressions and conversions.",
                    kind=ErrorKind.WRONG_TYPE,
                )
            return read_tables(pair[0], pair[1], columns, columns, cap, UNIT)

        return made
    if conversions is None:
        raise TrefoilError(
            "there is no table of conversions", "Give two tables: impressions and conversions.", kind=ErrorKind.TOO_FEW
        )
    tables = read_tables(impressions, conversions, columns, columns, cap, UNIT)
    return lambda seed: resampled(tables, seed) if seed else tables


def _policy(participant: object, options: Options) -> DevicePolicy | IpaLike:
    """Return the policy that an entry of `systems` stands for."""
    names = f"{', '.join(SYSTEMS)}; {', '.join(OURS)}; or your own as module:Class"
    match participant:
        case System():
            return participant.facts.policy(options.accounting, options.kappa_units(UNIT))
        case str() if participant in SYSTEMS:
            return _policy(System(participant), options)
        case str() if participant in OURS:
            return on_devices(participant)
        case str() if ":" in participant:
            return policy_named(participant)
        case str():
            raise TrefoilError(
                f"there is no system {participant!r}", f"There are {names}.", kind=ErrorKind.UNKNOWN_NAME
            )
        case type():
            return _policy(participant(), options)
        case IpaLike():
            return participant
    if callable(getattr(participant, "run", None)) and hasattr(participant, "system"):
        policy: DevicePolicy = participant  # type: ignore[assignment]  # it has what the protocol asks for
        return policy
    if callable(participant):
        return OnDevices(getattr(participant, "__name__", "own function"), participant)
    raise TrefoilError(
        f"{type(participant).__name__} is no system: it is neither a name, a function nor a policy with `run`",
        f"There are {names}.",
        kind=ErrorKind.WRONG_TYPE,
    )


def example_tables(people: int = 4000, seed: int = 0) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a small workload to try `simulate` on: two tables as mappings from names to columns.

    >>> impressions, conversions = trefoil.example_tables()
    >>> sorted(impressions), sorted(conversions)
    (['person', 'time'], ['person', 'product', 'time', 'value'])
    """
    rng = generator(seed)
    start = 1_704_153_600
    views, sold = 3 * people, people // 2
    impressions = {"person": rng.integers(0, people, views), "time": start + rng.integers(0, 90 * DAY, views)}
    conversions = {
        "person": rng.permutation(people)[:sold],
        "time": start + 30 * DAY + rng.integers(0, 60 * DAY, sold),
        "value": rng.integers(1, 6, sold),
        "product": np.zeros(sold, dtype=np.int64),
    }
    return impressions, conversions

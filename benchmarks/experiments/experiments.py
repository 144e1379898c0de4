"""The experiments of the paper's Section 6 as functions from options to a result. No printing, no files."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import StrEnum
from functools import partial
from typing import TypeVar, assert_never

import numpy as np

from benchmarks.experiments import criteo as criteo_log
from benchmarks.experiments import patcg as patcg_set
from benchmarks.experiments.bias import Draws, pooled, studies_of
from benchmarks.experiments.microbenchmark import Microbenchmark, generate
from benchmarks.experiments.policies import AraLike, CookieMonster, IpaLike, System
from benchmarks.experiments.results import Options, Point, Result
from benchmarks.experiments.seeds import check_seeds, run_seeds, workers_for
from benchmarks.experiments.simulation import Simulation, simulate
from benchmarks.experiments.world import Epochs, EventTables, World
from protocol.errors import ErrorKind, TrefoilError
from protocol.units import DAY

PARTICIPATIONS = (0.001, 0.01, 0.1, 0.5, 1.0)
RATES = (0.001, 0.01, 0.1, 1.0)
DEFAULT_KNOB = 0.1
EPOCH_LENGTHS = (1, 7, 14, 21, 30, 60)
EXTRA_IMPRESSIONS = (3, 6, 9)
# "10 % of Δ": the paper's side query.
BIAS_SHARE = 0.1
# PATCG has 30 days of conversions, and Figure 5c looks at epochs of up to 60.
LONGEST_PATCG_EPOCH = 60

T = TypeVar("T")
Advance = Callable[[int], None]


class BiasWorkload(StrEnum):
    """The workloads of the bias study: the paper's heavy load, and its two data sets."""

    MICROBENCHMARK = "microbenchmark"
    PATCG = "patcg"
    CRITEO = "criteo"


# As published, of one setting; for progress bars, and for how many seeds run at once.
MICROBENCHMARK_CONVERSIONS = 40_000
BIAS_CONVERSIONS = {
    BiasWorkload.MICROBENCHMARK: 800_000,
    BiasWorkload.PATCG: 24_113_018,
    BiasWorkload.CRITEO: 400_000,
}


def no_progress(_: int) -> None:
    """Ignore progress."""


def timed(make: Callable[[], T]) -> tuple[T, float]:
    """Return what `make` returns, and the seconds that it took."""
    started = time.perf_counter()
    return make(), time.perf_counter() - started


def record(
    result: Result,
    world: World,
    workload_seconds: float,
    advance: Advance,
    *,
    epoch_days: int | None = None,
    kappas: Sequence[float] | None = None,
    systems: Sequence[System] = tuple(System),
    knobs: tuple[float, float] | None = None,
    extra_impressions: int | None = None,
) -> Simulation:
    """Run all systems over one world, once for each κ if they have a side query, and add points and times to a result.

    Without `epoch_days` and `kappas` they are those of the options.
    """
    options, days = result.options, epoch_days or result.options.epoch_days
    units = [replace(options, kappa=kappa).kappa_units(world.unit) for kappa in kappas or [options.kappa]]
    policies = [
        system.facts.policy(options.accounting, kappa)
        for system in systems
        for kappa in (units if system.facts.has_side_query else [0])
    ]
    simulation, seconds = timed(lambda: simulate(world, Epochs(days * DAY), [*policies, *options.own], advance=advance))
    result.spent("workload", workload_seconds)
    result.spent("matching", simulation.matching_seconds)
    for run in simulation.runs:
        result.spent(run.label, run.seconds)
    result.spent("measuring", seconds - simulation.matching_seconds - sum(run.seconds for run in simulation.runs))
    participation, rate = knobs or (None, None)
    result.points += [
        Point(
            run=run,
            kappa=run.kappa / world.unit,
            epoch_days=days,
            conversions=len(world.conversions.owner),
            total_seconds=workload_seconds + seconds,
            participation=participation,
            rate=rate,
            extra_impressions=extra_impressions,
            seed=options.seed,
        )
        for run in simulation.runs
    ]
    return simulation


def over_seeds(
    experiment: Callable[[Options, Advance], Result],
    options: Options,
    seeds: int,
    conversions: int,
    advance: Advance = no_progress,
) -> Result:
    """Run an experiment of so many conversions for seeds from that of the options on, as one result.

    Times add up over the seeds, which run at the same time where there are cores and memory for them.
    """
    check_seeds(seeds)
    if seeds == 1:
        return experiment(options, advance)

    def one(seed: int) -> Result:
        result = experiment(replace(options, seed=seed), no_progress)
        thin = [replace(point, run=point.run.thinned()) for point in result.points]
        # Policies of one's own need not be able to travel between processes.
        return replace(result, options=replace(options, own=()), points=thin)

    numbers = range(options.seed, options.seed + seeds)
    results = run_seeds(one, numbers, workers_for(seeds, conversions), lambda done: advance(done * conversions))
    merged = Result(results[0].experiment, options, seeds, [point for result in results for point in result.points])
    for result in results:
        for what, seconds in result.profile.items():
            merged.spent(what, seconds)
    merged.findings = {"findings_by_seed": [result.findings for result in results]}
    merged.studies = [pooled(same) for same in zip(*(result.studies for result in results), strict=True)]
    return merged


def figure_4_settings() -> list[tuple[float, float]]:
    """Return every (participation, rate) of Figure 4: one knob moves, the other stays at 0.1."""
    along = [(participation, DEFAULT_KNOB) for participation in PARTICIPATIONS]
    return along + [(DEFAULT_KNOB, rate) for rate in RATES if rate != DEFAULT_KNOB]


def microbenchmark(options: Options, settings: Sequence[tuple[float, float]], advance: Advance = no_progress) -> Result:
    """Run Figure 4: all three systems at each (participation, rate)."""
    specs = [Microbenchmark(knob1, knob2, options.seed, options.scale) for knob1, knob2 in settings]
    for spec in specs:
        _check_epoch(options.epoch_days, spec.days)
    _warm_up(options)
    result = Result("microbenchmark", options)
    for spec in specs:
        record(result, *timed(partial(generate, spec)), advance, knobs=(spec.participation, spec.rate))
    return result


def bias(
    options: Options,
    draws: int = 500,
    advance: Advance = no_progress,
    workload: BiasWorkload = BiasWorkload.MICROBENCHMARK,
) -> Result:
    """Run Figure 7: the microbenchmark under heavy load, or one of the data sets, without the side query and with it.

    κ defaults to a tenth of the value cap, as in the paper.
    """
    world, seconds = timed(lambda: _bias_world(options, workload))
    knobs = (DEFAULT_KNOB, DEFAULT_KNOB) if workload is BiasWorkload.MICROBENCHMARK else None
    chosen = options if options.kappa else replace(options, kappa=BIAS_SHARE * world.cap / world.unit)
    result = Result("bias", chosen)
    result.findings["workload"] = workload.value
    run = record(result, world, seconds, advance, kappas=[0.0, chosen.kappa], knobs=knobs).of(System.COOKIE_MONSTER)[-1]
    result.studies, seconds = timed(lambda: studies_of(world, run, Draws.of(world, run, draws, options.seed)))
    result.spent("bias study", seconds)
    result.findings["bias_studies"] = [one.as_json() for one in result.studies]
    return result


def _bias_world(options: Options, workload: BiasWorkload) -> World:
    match workload:
        case BiasWorkload.MICROBENCHMARK:
            spec = Microbenchmark(seed=options.seed, scale=options.scale, days=60, repeats=40)
            _check_epoch(options.epoch_days, spec.days)
            return generate(spec)
        case BiasWorkload.PATCG:
            _check_epoch(options.epoch_days, LONGEST_PATCG_EPOCH)
            return patcg_set.world_of(patcg_set.synthesize(options.seed, options.scale), options.scale)
        case BiasWorkload.CRITEO:
            _check_epoch(options.epoch_days, criteo_log.DAYS)
            return criteo_log.world_of(criteo_log.synthesize(options.seed, options.scale), options.scale)
        case _:
            assert_never(workload)


def patcg(
    options: Options,
    epoch_lengths: Sequence[int],
    events: EventTables | None = None,
    advance: Advance = no_progress,
) -> Result:
    """Run Figure 5: one large advertiser, at each length of an epoch. Without events, a synthetic set is drawn."""
    for days in epoch_lengths:
        _check_epoch(days, LONGEST_PATCG_EPOCH)
    result = Result("patcg", options)
    drawn, drawing = timed(lambda: patcg_set.synthesize(options.seed, options.scale) if events is None else events)
    world, batching = timed(lambda: patcg_set.world_of(drawn, options.scale))
    for place, days in enumerate(epoch_lengths):
        record(result, world, 0.0 if place else drawing + batching, advance, epoch_days=days)
    return result


def criteo(
    options: Options,
    epoch_lengths: Sequence[int],
    extras: Sequence[int] = (),
    log: EventTables | None = None,
    advance: Advance = no_progress,
) -> Result:
    """Run Figure 6: many advertisers, at each length of an epoch; then with extra impressions (Criteo++)."""
    for days in epoch_lengths:
        _check_epoch(days, criteo_log.DAYS)
    result = Result("criteo", options)
    drawn, drawing = timed(lambda: criteo_log.synthesize(options.seed, options.scale) if log is None else log)
    world, batching = timed(lambda: criteo_log.world_of(drawn, options.scale))
    result.findings["advertisers"] = len(set(world.queries.advertiser.tolist()))
    for place, days in enumerate(epoch_lengths):
        simulation = record(result, world, 0.0 if place else drawing + batching, advance, epoch_days=days)
        result.findings[f"within_ipa_maximum_at_{days}_days"] = _within_ipa_maximum(simulation)
        result.findings[f"more_left_at_{days}_days"] = more_left(simulation)
    for extra in extras:
        more, drawing = timed(partial(criteo_log.augment, drawn, extra, options.seed + extra))
        augmented, batching = timed(partial(criteo_log.world_of, more, options.scale))
        # More impressions change nothing for the other two.
        record(result, augmented, drawing + batching, advance, systems=[System.COOKIE_MONSTER], extra_impressions=extra)
    return result


def _within_ipa_maximum(simulation: Simulation) -> int:
    """Return how many of Cookie Monster's queries have an error at most the maximum of IPA's few."""
    largest = simulation.of(System.IPA_LIKE)[0].errors.max(initial=0.0)
    return int((simulation.of(System.COOKIE_MONSTER)[0].errors <= largest).sum())


def more_left(simulation: Simulation) -> float:
    """Return the share of (device, advertiser) pairs for which Cookie Monster spent less than both baselines."""
    ours = simulation.of(System.COOKIE_MONSTER)[0].owner_average
    others = [simulation.of(system)[0].owner_average for system in (System.IPA_LIKE, System.ARA_LIKE)]
    return float((ours < np.minimum(*others)).mean())


def _check_epoch(epoch_days: int, data_days: int) -> None:
    if epoch_days > data_days:
        raise TrefoilError(
            f"an epoch of {epoch_days} days is longer than the data, {data_days} days",
            "Give a smaller --epoch-days.",
            kind=ErrorKind.OUT_OF_RANGE,
        )


def _warm_up(options: Options) -> None:
    """Run once very small, so that the first point's time is not that of loading code."""
    world = generate(Microbenchmark(scale=0.005))
    simulate(world, Epochs(), [IpaLike(), AraLike(options.accounting), CookieMonster(options.accounting)])

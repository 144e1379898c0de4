"""The experiments of the paper's Section 6 as functions from options to a result. No printing, no files."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import assert_never

import numpy as np

from benchmarks.experiments import criteo as criteo_log
from benchmarks.experiments import patcg as patcg_set
from benchmarks.experiments.bias import Draws, Study, pooled, studies_of
from benchmarks.experiments.microbenchmark import Microbenchmark, generate
from benchmarks.experiments.policies import AraLike, CookieMonster, DevicePolicy, IpaLike, System
from benchmarks.experiments.results import Options, Point, Result
from benchmarks.experiments.seeds import check_seeds, run_seeds, workers_for
from benchmarks.experiments.simulation import Simulation, simulate
from benchmarks.experiments.world import Epochs, World
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


@dataclass(frozen=True, slots=True)
class Setting:
    """One world under one grid of epochs, and what to call it in the results."""

    world: World
    options: Options
    kappas: Sequence[float]
    workload_seconds: float
    participation: float | None = None
    rate: float | None = None
    extra_impressions: int | None = None
    systems: Sequence[System] = tuple(System)


@dataclass(slots=True)
class Recorder:
    """Runs settings and gathers their points into a result."""

    result: Result
    advance: Advance = no_progress

    def run(self, setting: Setting) -> Simulation:
        """Run all systems over one setting, and record the time of each part."""
        options, world = setting.options, setting.world
        started = time.perf_counter()
        epochs = Epochs(options.epoch_days * DAY)
        simulation = simulate(world, epochs, _policies(setting), advance=self.advance)
        seconds = time.perf_counter() - started
        self._profile(simulation, setting.workload_seconds, seconds)
        self.result.points += [
            Point(
                run=run,
                kappa=run.kappa / world.unit,
                epoch_days=options.epoch_days,
                conversions=len(world.conversions.owner),
                total_seconds=setting.workload_seconds + seconds,
                participation=setting.participation,
                rate=setting.rate,
                extra_impressions=setting.extra_impressions,
                seed=options.seed,
            )
            for run in simulation.runs
        ]
        return simulation

    def _profile(self, simulation: Simulation, workload: float, seconds: float) -> None:
        spent = self.result.spent
        spent("workload", workload)
        spent("matching", simulation.matching_seconds)
        for run in simulation.runs:
            spent(run.label, run.seconds)
        spent("measuring", seconds - simulation.matching_seconds - sum(run.seconds for run in simulation.runs))


def over_seeds(
    experiment: Callable[[Options, Advance], tuple[Result, list[Study]]],
    options: Options,
    seeds: int,
    conversions: int,
    advance: Advance = no_progress,
) -> tuple[Result, list[Study]]:
    """Run an experiment of so many conversions for seeds from that of the options on, as one result.

    Times add up over the seeds, which run at the same time where there are cores and memory for them.
    """
    check_seeds(seeds)
    if seeds == 1:
        return experiment(options, advance)

    def one(seed: int) -> tuple[Result, list[Study]]:
        result, studies = experiment(replace(options, seed=seed), no_progress)
        # Policies of one's own need not be able to travel between processes.
        bare = replace(result, options=replace(options, own=()))
        bare.points = [replace(point, run=point.run.thinned()) for point in result.points]
        return bare, studies

    numbers = range(options.seed, options.seed + seeds)
    runs = run_seeds(one, numbers, workers_for(seeds, conversions), lambda done: advance(done * conversions))
    merged = Result(runs[0][0].experiment, options, seeds, [point for result, _ in runs for point in result.points])
    for result, _ in runs:
        for what, seconds in result.profile.items():
            merged.spent(what, seconds)
    merged.findings = {"findings_by_seed": [result.findings for result, _ in runs]}
    return merged, [pooled(same) for same in zip(*(studies for _, studies in runs), strict=True)]


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
    recorder = Recorder(Result("microbenchmark", options), advance)
    for spec in specs:
        started = time.perf_counter()
        world = generate(spec)
        seconds = time.perf_counter() - started
        recorder.run(Setting(world, options, [options.kappa], seconds, spec.participation, spec.rate))
    return recorder.result


def bias(
    options: Options,
    draws: int = 500,
    advance: Advance = no_progress,
    workload: BiasWorkload = BiasWorkload.MICROBENCHMARK,
) -> tuple[Result, list[Study]]:
    """Run Figure 7: the microbenchmark under heavy load, or one of the data sets, without the side query and with it.

    κ defaults to a tenth of the value cap, as in the paper.
    """
    started = time.perf_counter()
    setting = _bias_setting(options, workload)
    world = setting.world
    chosen = options if options.kappa else replace(options, kappa=BIAS_SHARE * world.cap / world.unit)
    recorder = Recorder(Result("bias", chosen), advance)
    recorder.result.findings["workload"] = workload.value
    seconds = time.perf_counter() - started
    simulation = recorder.run(replace(setting, options=chosen, kappas=[0.0, chosen.kappa], workload_seconds=seconds))
    started = time.perf_counter()
    run = simulation.of(System.COOKIE_MONSTER)[-1]
    studies = studies_of(world, run, Draws.of(world, run, draws, options.seed))
    recorder.result.spent("bias study", time.perf_counter() - started)
    recorder.result.findings["bias_studies"] = [one.as_json() for one in studies]
    return recorder.result, studies


def _bias_setting(options: Options, workload: BiasWorkload) -> Setting:
    match workload:
        case BiasWorkload.MICROBENCHMARK:
            spec = Microbenchmark(seed=options.seed, scale=options.scale, days=60, repeats=40)
            _check_epoch(options.epoch_days, spec.days)
            return Setting(generate(spec), options, [], 0.0, spec.participation, spec.rate)
        case BiasWorkload.PATCG:
            _check_epoch(options.epoch_days, LONGEST_PATCG_EPOCH)
            events = patcg_set.synthesize(options.seed, options.scale)
            return Setting(patcg_set.world_of(events, options.scale), options, [], 0.0)
        case BiasWorkload.CRITEO:
            _check_epoch(options.epoch_days, criteo_log.DAYS)
            log = criteo_log.synthesize(options.seed, options.scale)
            return Setting(criteo_log.world_of(log, options.scale), options, [], 0.0)
        case _:
            assert_never(workload)


def patcg(
    options: Options,
    epoch_lengths: Sequence[int],
    events: patcg_set.Events | None = None,
    advance: Advance = no_progress,
) -> Result:
    """Run Figure 5: one large advertiser, at each length of an epoch. Without events, a synthetic set is drawn."""
    for days in epoch_lengths:
        _check_epoch(days, LONGEST_PATCG_EPOCH)
    recorder = Recorder(Result("patcg", options), advance)
    started = time.perf_counter()
    drawn = events if events is not None else patcg_set.synthesize(options.seed, options.scale)
    world = patcg_set.world_of(drawn, options.scale)
    seconds = time.perf_counter() - started
    for days in epoch_lengths:
        recorder.run(Setting(world, replace(options, epoch_days=days), [options.kappa], seconds))
        seconds = 0.0
    return recorder.result


def criteo(
    options: Options,
    epoch_lengths: Sequence[int],
    extras: Sequence[int] = (),
    log: criteo_log.Log | None = None,
    advance: Advance = no_progress,
) -> Result:
    """Run Figure 6: many advertisers, at each length of an epoch; then with extra impressions (Criteo++)."""
    for days in epoch_lengths:
        _check_epoch(days, criteo_log.DAYS)
    recorder = Recorder(Result("criteo", options), advance)
    started = time.perf_counter()
    drawn = log if log is not None else criteo_log.synthesize(options.seed, options.scale)
    world = criteo_log.world_of(drawn, options.scale)
    seconds = time.perf_counter() - started
    recorder.result.findings["advertisers"] = len(set(world.queries.advertiser.tolist()))
    for days in epoch_lengths:
        simulation = recorder.run(Setting(world, replace(options, epoch_days=days), [options.kappa], seconds))
        recorder.result.findings[f"within_ipa_maximum_at_{days}_days"] = _within_ipa_maximum(simulation)
        recorder.result.findings[f"more_left_at_{days}_days"] = more_left(simulation)
        seconds = 0.0
    for extra in extras:
        started = time.perf_counter()
        more = criteo_log.world_of(criteo_log.augment(drawn, extra, options.seed + extra), options.scale)
        seconds = time.perf_counter() - started
        recorder.run(
            Setting(
                more,
                options,
                [options.kappa],
                seconds,
                extra_impressions=extra,
                # More impressions change nothing for the other two.
                systems=[System.COOKIE_MONSTER],
            )
        )
    return recorder.result


def _policies(setting: Setting) -> list[DevicePolicy | IpaLike]:
    """Return a setting's policies: each system once for each κ if it has a side query, and then one's own."""
    accounting, unit = setting.options.accounting, setting.world.unit
    kappas = [replace(setting.options, kappa=kappa).kappa_units(unit) for kappa in setting.kappas]
    made = [
        system.facts.policy(accounting, kappa)
        for system in setting.systems
        for kappa in (kappas if system.facts.has_side_query else [0])
    ]
    return [*made, *setting.options.own]


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

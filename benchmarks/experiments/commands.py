"""`trefoil experiment` and `trefoil plan`: the commands, and the options that all figures share."""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from benchmarks.experiments import experiments, figures
from benchmarks.experiments.attack import attack_tables, measure, measure_guarantees
from benchmarks.experiments.experiments import (
    BIAS_CONVERSIONS,
    DEFAULT_KNOB,
    EXTRA_IMPRESSIONS,
    MICROBENCHMARK_CONVERSIONS,
    Advance,
    BiasWorkload,
    over_seeds,
)
from benchmarks.experiments.files import read_criteo, read_patcg
from benchmarks.experiments.malicious_helper import malicious_helper_table, measure_malicious_helper
from benchmarks.experiments.microbenchmark import Microbenchmark, generate
from benchmarks.experiments.on_devices import on_devices, policy_named
from benchmarks.experiments.plan import Plan, costs, plan_json, plan_tables, warning
from benchmarks.experiments.policies import Accounting
from benchmarks.experiments.regression import regression_settings, run_settings, scores_json, scores_table
from benchmarks.experiments.results import Options, Result, study_table
from benchmarks.experiments.seeds import MOST_SEEDS
from benchmarks.experiments.through_mpc import mpc_table, run_through_mpc
from benchmarks.results.origin import write_results
from protocol.cli.console import out, picture_file, progress, save_figure, write_json
from protocol.cli.options import KAPPA_HELP, JsonFile, NoiseChoice, PlotPlace, WholeKappa
from protocol.errors import ErrorKind, TrefoilError
from protocol.noise import NoiseMode


@dataclass(frozen=True, slots=True)
class Common:
    """The options that every figure has: accounting, policies, size and epochs of the workload, and output files."""

    accounting: Annotated[Accounting, typer.Option(help="The paper's accounting, or its public artifact's.")] = (
        Accounting.PAPER
    )
    kappa: Annotated[float, typer.Option(help=KAPPA_HELP)] = 0.0
    policy: Annotated[
        list[str] | None, typer.Option(metavar="MODULE:CLASS", help="A policy of your own beside the three.")
    ] = None
    function: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Also run real devices with this attribution function: last, first, equal, last-n, slots, or your own "
            "as module:function.",
        ),
    ] = None
    epoch_days: Annotated[int | None, typer.Option(help="Length of an epoch in days.", show_default="7, or all")] = None
    seed: Annotated[int, typer.Option(min=0, help="Seed of the workload.")] = 0
    seeds: Annotated[
        int, typer.Option(min=1, max=MOST_SEEDS, help="How many seeds, from --seed on; figures then show their band.")
    ] = 1
    scale: Annotated[float, typer.Option(help="Size of the workload, above 0 and at most 1.")] = 1.0
    json: JsonFile = None
    plot: PlotPlace = None

    def options(self) -> Options:
        days = 7 if self.epoch_days is None else self.epoch_days
        own = (*map(policy_named, self.policy or ()), *map(on_devices, self.function or ()))
        return Options(self.accounting, self.kappa, days, self.seed, self.scale, own)

    def lengths(self) -> tuple[int, ...]:
        """Return the epoch lengths that a figure compares: all of them, or the one of --epoch-days."""
        return experiments.EPOCH_LENGTHS if self.epoch_days is None else (self.epoch_days,)

    def run(self, name: str, experiment: Callable[[Options, Advance], Result], published: int) -> Result:
        """Run an experiment of `published` conversions at full size for every seed, beside a progress bar."""
        options, size = self.options(), round(published * self.scale)
        with progress(name, self.seeds * size) as advance:
            return over_seeds(experiment, options, self.seeds, size, advance)

    def finish(self, *results: Result) -> None:
        """Show tables; write plots, and the JSON last: an interrupted run leaves nothing that looks whole."""
        drawings: dict[str, Any] = {}
        for result in results if self.plot is not None else ():
            drawings |= figures.DRAW[result.experiment](result)
        for result in results:
            out.print(result.table(), highlight=False)
        for name, drawn in drawings.items():
            if self.plot is not None:
                save_figure(picture_file(self.plot, name, only=len(drawings) == 1), drawn)
        whole = [result.as_json() for result in results]
        if len(whole) == 1:
            write_results(self.json, whole[0], self.seed)
        elif self.json is not None:
            points = [point for result in results for point in result.as_points()]
            write_results(self.json, {"experiment": "all", "experiments": whole, "points": points}, self.seed)


app = typer.Typer(help="The paper's experiments: every figure with one command.", no_args_is_help=True)


def with_common_options(body: Callable[..., None]) -> Callable[..., None]:
    """Return a command with the options of `body` and those of `Common`, which `body` gets as one record."""
    types = get_type_hints(Common, include_extras=True)
    shared = [
        inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=each.default, annotation=types[each.name])
        for each in fields(Common)
    ]
    _, *own = inspect.signature(body, eval_str=True).parameters.values()

    @functools.wraps(body)
    def command(**given: Any) -> None:
        common = {name: given.pop(name) for name in types if name in given}
        body(Common(**common), **given)

    command.__signature__ = inspect.Signature([*own, *shared])  # type: ignore[attr-defined]  # typer reads it
    command.__annotations__ = {each.name: each.annotation for each in (*own, *shared)}
    return command


@app.command(epilog="Example: trefoil experiment microbenchmark --participation 0.5 --rate 0.1 --json point.json")
@with_common_options
def microbenchmark(
    common: Common,
    *,
    participation: Annotated[
        float | None, typer.Option(help="Knob 1: share of users in each batch.", show_default="the figure's five")
    ] = None,
    rate: Annotated[
        float | None, typer.Option(help="Knob 2: impressions per user and day.", show_default="the figure's four")
    ] = None,
    mpc: Annotated[bool, typer.Option("--mpc", help="Also run the point through devices and three helpers.")] = False,
) -> None:
    """Figure 4: budget spent by the three systems as users and impressions vary. One point if a knob is given."""
    one = mpc or participation is not None or rate is not None
    knobs = (
        DEFAULT_KNOB if participation is None else participation,
        DEFAULT_KNOB if rate is None else rate,
    )
    settings = [knobs] if one else experiments.figure_4_settings()
    if mpc:
        _check_mpc(common.options(), settings)
    result = common.run(
        "microbenchmark",
        lambda options, advance: experiments.microbenchmark(options, settings, advance),
        len(settings) * MICROBENCHMARK_CONVERSIONS,
    )
    if mpc:
        result.findings["mpc"] = _through_mpc(common.options(), *knobs)
    common.finish(result)


@app.command(epilog="Example: trefoil experiment bias --accounting artifact --json bias.json --plot plots")
@with_common_options
def bias(
    common: Common,
    *,
    draws: Annotated[int, typer.Option(min=1, help="How often the noise is drawn.")] = 500,
    workload: Annotated[
        BiasWorkload, typer.Option(help="The paper's heavy load, or one of its data sets, synthetic.")
    ] = BiasWorkload.MICROBENCHMARK,
) -> None:
    """Figure 7: what the bias side query costs, and what its bound is worth. A κ of 0 stands for a tenth of the cap."""
    if common.plot is not None and workload is not BiasWorkload.MICROBENCHMARK:
        raise TrefoilError(
            "Figure 7 is the microbenchmark's", "Omit --plot or --workload.", kind=ErrorKind.CONFLICTING_OPTIONS
        )
    result = common.run(
        "bias",
        lambda options, advance: experiments.bias(options, draws, advance, workload),
        BIAS_CONVERSIONS[workload],
    )
    out.print(study_table(result.studies), highlight=False)
    common.finish(result)


@app.command(epilog="Example: trefoil experiment patcg --scale 0.1 --epoch-days 7 --plot plots")
@with_common_options
def patcg(
    common: Common,
    *,
    impressions: Annotated[Path | None, typer.Option(help="Real exposures: a parquet file, or a folder.")] = None,
    conversions: Annotated[Path | None, typer.Option(help="Real conversions: a parquet file, or a folder.")] = None,
) -> None:
    """Figure 5: one large advertiser, 24 million conversions; synthetic unless the real files are given."""
    if (impressions is None) != (conversions is None):
        raise TrefoilError(
            "the real files come in pairs",
            "Give both --impressions and --conversions, or neither.",
            kind=ErrorKind.MISSING_OPTION,
        )
    events = read_patcg(impressions, conversions) if impressions and conversions else None
    _check_drawn(common.seeds, events)
    lengths = common.lengths()
    result = common.run(
        "patcg",
        lambda options, advance: experiments.patcg(options, lengths, events, advance),
        len(lengths) * BIAS_CONVERSIONS[BiasWorkload.PATCG],
    )
    common.finish(result)


@app.command(epilog="Example: trefoil experiment criteo --data CriteoSearchData --json criteo.json")
@with_common_options
def criteo(
    common: Common,
    *,
    data: Annotated[Path | None, typer.Option(help="The real log, tab-separated.")] = None,
) -> None:
    """Figure 6: many advertisers of all sizes; synthetic unless the real log is given."""
    log = read_criteo(data) if data else None
    _check_drawn(common.seeds, log)
    lengths = common.lengths()
    result = common.run(
        "criteo",
        lambda options, advance: experiments.criteo(options, lengths, EXTRA_IMPRESSIONS, log, advance),
        (len(lengths) + len(EXTRA_IMPRESSIONS)) * BIAS_CONVERSIONS[BiasWorkload.CRITEO],
    )
    common.finish(result)


@app.command(name="all", epilog="Example: trefoil experiment all --scale 0.1 --json all.json --plot plots")
@with_common_options
def everything(common: Common) -> None:
    """Every figure, one after the other. The JSON has one entry per experiment, and all points together."""
    options, lengths, settings = common.options(), common.lengths(), experiments.figure_4_settings()
    # Memory is that of the largest.
    size = round(BIAS_CONVERSIONS[BiasWorkload.PATCG] * common.scale)
    all_of_them: list[Callable[[Options, Advance], Result]] = [
        lambda chosen, _: experiments.microbenchmark(chosen, settings),
        lambda chosen, _: experiments.patcg(chosen, lengths),
        lambda chosen, _: experiments.criteo(chosen, lengths, EXTRA_IMPRESSIONS),
        lambda chosen, _: experiments.bias(chosen),
    ]
    results = []
    with progress("experiments", len(all_of_them)) as advance:
        for experiment in all_of_them:
            results.append(over_seeds(experiment, options, common.seeds, size))
            advance(note=f"{results[-1].experiment} done")
    common.finish(*results)


@app.command(epilog="Example: trefoil experiment attack --json attack.json")
def attack(json: JsonFile = None) -> None:
    """Measure what sites, alone or colluding, or a malicious helper with the querier, can learn or destroy."""
    guarantees, attacks, findings = measure_guarantees(), measure(), measure_malicious_helper()
    for table in (*attack_tables(guarantees, attacks), malicious_helper_table(findings)):
        out.print(table, highlight=False)
    measured = {"attacks": [one.as_json() for one in attacks], "bad_helper": [asdict(one) for one in findings]}
    promised = [one.as_json() for one in guarantees]
    write_results(json, {"experiment": "attack", "guarantees": promised, **measured}, seed=0)


@app.command(epilog="Example: trefoil experiment regression --reports 2000 --columns 8 --epsilon 1 --seeds 2")
def regression(
    *,
    reports: Annotated[
        list[int] | None, typer.Option(help="Batch sizes; repeatable.", show_default="2000, 20000, 100000")
    ] = None,
    columns: Annotated[
        list[int] | None, typer.Option(help="Columns of the features; repeatable.", show_default="8, 16, 64")
    ] = None,
    epsilon: Annotated[
        list[float] | None, typer.Option(help="ε of the reports; repeatable.", show_default="0.1, 0.3, 1, 3")
    ] = None,
    noise: Annotated[
        list[NoiseMode] | None, typer.Option(help="Noise modes; repeatable.", show_default="local, joint")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="How many worlds.")] = 8,
    json: JsonFile = None,
) -> None:
    """Measure how good a publisher's model is if it is fitted to conversions that it cannot see (Appendix A)."""
    modes = noise or [NoiseMode.LOCAL, NoiseMode.JOINT]
    sizes, widths = reports or [2_000, 20_000, 100_000], columns or [8, 16, 64]
    cells = regression_settings(sizes, widths, epsilon or [0.1, 0.3, 1.0, 3.0], modes)
    with progress("worlds", seeds * len(cells)) as advance:
        scores = run_settings(cells, seeds, advance)
    out.print(scores_table(scores), highlight=False)
    write_results(json, scores_json(scores), seed=0)


def _check_drawn(seeds: int, data: object) -> None:
    """Reject several seeds for real data, which no seed changes."""
    if seeds > 1 and data is not None:
        raise TrefoilError(
            "real data have no seed",
            "Omit --seeds; trefoil.simulate in Python draws people from a table again.",
            kind=ErrorKind.CONFLICTING_OPTIONS,
        )


def _check_mpc(options: Options, settings: list[tuple[float, float]]) -> None:
    """Reject before any work what real devices do not support."""
    Microbenchmark(*settings[0], options.seed, options.scale)
    if options.accounting is not Accounting.PAPER or options.kappa:
        raise TrefoilError(
            "--mpc runs real devices: the paper's accounting, no side query",
            "Omit --accounting and --kappa.",
            kind=ErrorKind.CONFLICTING_OPTIONS,
        )


def _through_mpc(options: Options, participation: float, rate: float) -> list[dict[str, object]]:
    """Run one point's queries through devices, sealed reports and three helpers, in every noise mode."""
    spec = Microbenchmark(participation, rate, options.seed, options.scale)
    now = int(time.time())  # noqa: TID251 - an edge: helpers read the wall clock
    with progress("sealed reports", len(NoiseMode) * spec.conversions) as advance:
        results = run_through_mpc(generate(spec), options.epoch_days, list(NoiseMode), now, advance)
    out.print(mpc_table(results), highlight=False)
    return [one.as_json() for one in results]


def plan(
    reports: Annotated[int, typer.Option(help="Reports in one query.")],
    value_cap: Annotated[int, typer.Option(help="Largest value of one conversion, in your unit.")],
    error: Annotated[float, typer.Option(help="Acceptable relative error, such as 0.05.")] = 0.05,
    confidence: Annotated[float, typer.Option(help="How often the answer is to be within it, such as 0.99.")] = 0.99,
    noise: NoiseChoice = NoiseMode.LOCAL,
    expected_mean: Annotated[float | None, typer.Option(help="Mean value per report.", show_default="the cap")] = None,
    window_days: Annotated[int, typer.Option(help="How far back a conversion looks.")] = 30,
    epoch_days: Annotated[int, typer.Option(help="Length of an epoch.")] = 7,
    budget: Annotated[float, typer.Option(help="Budget of one epoch of one device, ε_G.")] = 1.0,
    buckets: Annotated[int, typer.Option(help="Buckets of the histogram.")] = 1,
    kappa: WholeKappa = 0,
    participation: Annotated[float, typer.Option(help="Share of people in one query (knob 1).")] = 0.1,
    impressions_per_day: Annotated[float, typer.Option(help="Impressions a person sees a day (knob 2).")] = 0.1,
    json: JsonFile = None,
) -> None:
    """Compute the ε that a query needs, its cost to a device under each policy, and the queries a month.

    Example: trefoil plan --reports 2000 --value-cap 5 --error 0.05 --confidence 0.99
    """
    mean = float(value_cap) if expected_mean is None else expected_mean
    wanted = Plan(
        reports=reports,
        value_cap=value_cap,
        expected_mean=mean,
        error=error,
        confidence=confidence,
        noise=noise,
        window_days=window_days,
        epoch_days=epoch_days,
        capacity=budget,
        buckets=buckets,
        kappa=kappa,
        participation=participation,
        impressions_per_day=impressions_per_day,
    )
    prices = costs(wanted)
    for table in plan_tables(wanted, prices):
        out.print(table, highlight=False)
    if (text := warning(wanted, prices)) is not None:
        out.print(text, highlight=False)
    write_json(json, plan_json(wanted, prices))

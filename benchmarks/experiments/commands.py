"""`trefoil experiment` and `trefoil plan`: the commands, and the options that all figures share."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.experiments import experiments, figures
from benchmarks.experiments.attack import attack_table, guarantee_table, measure, measure_guarantees
from benchmarks.experiments.bias import Study
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
from benchmarks.experiments.on_devices import own_policies
from benchmarks.experiments.plan import Plan, costs, plan_json, plan_tables, warning
from benchmarks.experiments.policies import Accounting
from benchmarks.experiments.regression import regression_settings, run_study, study_through_helpers
from benchmarks.experiments.results import Options, Result, study_table
from benchmarks.experiments.seeds import MOST_SEEDS
from benchmarks.experiments.through_mpc import mpc_table, run_through_mpc
from benchmarks.results.origin import write_results
from protocol.cli.console import out, picture_file, progress, save_figure, write_json
from protocol.cli.options import KAPPA_HELP, JsonFile, NoiseChoice, PlotPlace, WholeKappa
from protocol.errors import ErrorKind, TrefoilError
from protocol.noise import NoiseMode

AccountingOption = Annotated[Accounting, typer.Option(help="The paper's accounting, or its public artifact's.")]
Kappa = Annotated[float, typer.Option(help=KAPPA_HELP)]
EpochDays = Annotated[int | None, typer.Option(help="Length of an epoch in days.", show_default="7, or all")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of the workload.")]
Seeds = Annotated[
    int, typer.Option(min=1, max=MOST_SEEDS, help="How many seeds, from --seed on; figures then show their band.")
]
Scale = Annotated[float, typer.Option(help="Size of the workload, above 0 and at most 1.")]
Policy = Annotated[
    list[str] | None, typer.Option("--policy", metavar="MODULE:CLASS", help="A policy of your own beside the three.")
]
Function = Annotated[
    list[str] | None,
    typer.Option(
        "--function",
        metavar="NAME",
        help="Also run real devices with this attribution function: last, first, equal, last-n, slots, or your own "
        "as module:function.",
    ),
]


@dataclass(frozen=True, slots=True)
class Common:
    """The options that every figure has: size of the workload, length of its epochs, and the output files."""

    epoch_days: int | None
    seed: int
    scale: float
    json: Path | None
    plot: Path | None

    def options(
        self,
        accounting: Accounting,
        kappa: float,
        policies_named: Sequence[str] | None = None,
        functions: Sequence[str] | None = None,
    ) -> Options:
        """Return the options of the experiment itself."""
        days = 7 if self.epoch_days is None else self.epoch_days
        chosen = Options(accounting, kappa, days, self.seed, self.scale)
        return replace(chosen, own=own_policies(policies_named or (), functions or ()))

    def lengths(self) -> tuple[int, ...]:
        """Return the epoch lengths that a figure compares: all of them, or the one of --epoch-days."""
        return experiments.EPOCH_LENGTHS if self.epoch_days is None else (self.epoch_days,)

    def run(
        self,
        name: str,
        experiment: Callable[[Options, Advance], tuple[Result, list[Study]]],
        options: Options,
        published: int,
        seeds: int,
    ) -> tuple[Result, list[Study]]:
        """Run an experiment of `published` conversions at full size for every seed, beside a progress bar."""
        size = round(published * self.scale)
        with progress(name, seeds * size) as advance:
            return over_seeds(experiment, options, seeds, size, advance)

    def draw(self, figure: Callable[..., Any], *results: object) -> dict[str, Any]:
        """Draw the figure's plots in memory, by name; none without --plot. Any: matplotlib has no types."""
        drawn: dict[str, Any] = {} if self.plot is None else figure(*results)
        return drawn

    def finish(self, results: Sequence[Result], drawings: Mapping[str, Any]) -> None:
        """Show tables; write plots, and the JSON last: an interrupted run leaves nothing that looks whole."""
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


@app.command(epilog="Example: trefoil experiment microbenchmark --participation 0.5 --rate 0.1 --json point.json")
def microbenchmark(
    *,
    participation: Annotated[
        float | None, typer.Option(help="Knob 1: share of users in each batch.", show_default="the figure's five")
    ] = None,
    rate: Annotated[
        float | None, typer.Option(help="Knob 2: impressions per user and day.", show_default="the figure's four")
    ] = None,
    accounting: AccountingOption = Accounting.PAPER,
    kappa: Kappa = 0.0,
    policy: Policy = None,
    function: Function = None,
    epoch_days: EpochDays = None,
    seed: Seed = 0,
    seeds: Seeds = 1,
    scale: Scale = 1.0,
    json: JsonFile = None,
    plot: PlotPlace = None,
    mpc: Annotated[bool, typer.Option("--mpc", help="Also run the point through devices and three helpers.")] = False,
) -> None:
    """Figure 4: budget spent by the three systems as users and impressions vary. One point if a knob is given."""
    common = Common(epoch_days, seed, scale, json, plot)
    options = common.options(accounting, kappa, policy, function)
    one = mpc or participation is not None or rate is not None
    knobs = (_or(participation, DEFAULT_KNOB), _or(rate, DEFAULT_KNOB))
    settings = [knobs] if one else experiments.figure_4_settings()
    if mpc:
        _check_mpc(options, settings)
    result, _ = common.run(
        "microbenchmark",
        lambda options, advance: (experiments.microbenchmark(options, settings, advance), []),
        options,
        len(settings) * MICROBENCHMARK_CONVERSIONS,
        seeds,
    )
    if mpc:
        result.findings["mpc"] = _through_mpc(options, *knobs)
    common.finish([result], common.draw(figures.draw_figure_4, result))


@app.command(epilog="Example: trefoil experiment bias --accounting artifact --json bias.json --plot plots")
def bias(
    *,
    draws: Annotated[int, typer.Option(min=1, help="How often the noise is drawn.")] = 500,
    workload: Annotated[
        BiasWorkload, typer.Option(help="The paper's heavy load, or one of its data sets, synthetic.")
    ] = BiasWorkload.MICROBENCHMARK,
    accounting: AccountingOption = Accounting.PAPER,
    kappa: Annotated[
        float, typer.Option(help=KAPPA_HELP.removesuffix("; 0 is off.") + ".", show_default="a tenth of the cap")
    ] = 0.0,
    policy: Policy = None,
    function: Function = None,
    epoch_days: EpochDays = None,
    seed: Seed = 0,
    seeds: Seeds = 1,
    scale: Scale = 1.0,
    json: JsonFile = None,
    plot: PlotPlace = None,
) -> None:
    """Figure 7: what the bias side query costs, and what its bound is worth, over many draws of the noise."""
    if plot is not None and workload is not BiasWorkload.MICROBENCHMARK:
        raise TrefoilError(
            "Figure 7 is the microbenchmark's", "Omit --plot or --workload.", kind=ErrorKind.CONFLICTING_OPTIONS
        )
    common = Common(epoch_days, seed, scale, json, plot)
    options = common.options(accounting, kappa, policy, function)
    result, studies = common.run(
        "bias",
        lambda options, advance: experiments.bias(options, draws, advance, workload),
        options,
        BIAS_CONVERSIONS[workload],
        seeds,
    )
    drawings = common.draw(figures.draw_figure_7, result, studies)
    out.print(study_table(studies), highlight=False)
    common.finish([result], drawings)


@app.command(epilog="Example: trefoil experiment patcg --scale 0.1 --epoch-days 7 --plot plots")
def patcg(
    *,
    impressions: Annotated[Path | None, typer.Option(help="Real exposures: a parquet file, or a folder.")] = None,
    conversions: Annotated[Path | None, typer.Option(help="Real conversions: a parquet file, or a folder.")] = None,
    accounting: AccountingOption = Accounting.PAPER,
    kappa: Kappa = 0.0,
    policy: Policy = None,
    function: Function = None,
    epoch_days: EpochDays = None,
    seed: Seed = 0,
    seeds: Seeds = 1,
    scale: Scale = 1.0,
    json: JsonFile = None,
    plot: PlotPlace = None,
) -> None:
    """Figure 5: one large advertiser, 24 million conversions; synthetic unless the real files are given."""
    if (impressions is None) != (conversions is None):
        raise TrefoilError(
            "the real files come in pairs",
            "Give both --impressions and --conversions, or neither.",
            kind=ErrorKind.MISSING_OPTION,
        )
    common = Common(epoch_days, seed, scale, json, plot)
    options = common.options(accounting, kappa, policy, function)
    lengths = common.lengths()
    events = read_patcg(impressions, conversions) if impressions and conversions else None
    _check_drawn(seeds, events)
    result, _ = common.run(
        "patcg",
        lambda options, advance: (experiments.patcg(options, lengths, events, advance), []),
        options,
        len(lengths) * BIAS_CONVERSIONS[BiasWorkload.PATCG],
        seeds,
    )
    common.finish([result], common.draw(figures.draw_figure_5, result))


@app.command(epilog="Example: trefoil experiment criteo --data CriteoSearchData --json criteo.json")
def criteo(
    *,
    data: Annotated[Path | None, typer.Option(help="The real log, tab-separated.")] = None,
    accounting: AccountingOption = Accounting.PAPER,
    kappa: Kappa = 0.0,
    policy: Policy = None,
    function: Function = None,
    epoch_days: EpochDays = None,
    seed: Seed = 0,
    seeds: Seeds = 1,
    scale: Scale = 1.0,
    json: JsonFile = None,
    plot: PlotPlace = None,
) -> None:
    """Figure 6: many advertisers of all sizes; synthetic unless the real log is given."""
    common = Common(epoch_days, seed, scale, json, plot)
    options = common.options(accounting, kappa, policy, function)
    lengths = common.lengths()
    log = read_criteo(data) if data else None
    _check_drawn(seeds, log)
    result, _ = common.run(
        "criteo",
        lambda options, advance: (experiments.criteo(options, lengths, EXTRA_IMPRESSIONS, log, advance), []),
        options,
        (len(lengths) + len(EXTRA_IMPRESSIONS)) * BIAS_CONVERSIONS[BiasWorkload.CRITEO],
        seeds,
    )
    common.finish([result], common.draw(figures.draw_figure_6, result))


@app.command(name="all", epilog="Example: trefoil experiment all --scale 0.1 --json all.json --plot plots")
def everything(
    *,
    accounting: AccountingOption = Accounting.PAPER,
    epoch_days: EpochDays = None,
    seed: Seed = 0,
    seeds: Seeds = 1,
    scale: Scale = 1.0,
    json: JsonFile = None,
    plot: PlotPlace = None,
) -> None:
    """Every figure, one after the other. The JSON has one entry per experiment, and all points together."""
    common = Common(epoch_days, seed, scale, json, plot)
    options = common.options(accounting, 0.0)
    lengths = common.lengths()
    settings = experiments.figure_4_settings()
    # Memory is that of the largest.
    size = round(BIAS_CONVERSIONS[BiasWorkload.PATCG] * scale)
    with progress("experiments", 4) as advance:
        figure_4, _ = over_seeds(lambda o, _: (experiments.microbenchmark(o, settings), []), options, seeds, size)
        advance(note="microbenchmark done")
        figure_7, studies = over_seeds(lambda o, _: experiments.bias(o), options, seeds, size)
        advance(note="bias done")
        figure_6, _ = over_seeds(
            lambda o, _: (experiments.criteo(o, lengths, EXTRA_IMPRESSIONS), []), options, seeds, size
        )
        advance(note="criteo done")
        figure_5, _ = over_seeds(lambda o, _: (experiments.patcg(o, lengths), []), options, seeds, size)
        advance(note="patcg done")
    drawings = common.draw(figures.draw_figure_4, figure_4) | common.draw(figures.draw_figure_5, figure_5)
    drawings |= common.draw(figures.draw_figure_6, figure_6) | common.draw(figures.draw_figure_7, figure_7, studies)
    common.finish([figure_4, figure_5, figure_6, figure_7], drawings)


@app.command(epilog="Example: trefoil experiment attack --json attack.json")
def attack(json: JsonFile = None) -> None:
    """Measure what sites, alone or colluding, or a malicious helper with the querier, can learn or destroy."""
    guarantees, attacks, findings = measure_guarantees(), measure(), measure_malicious_helper()
    out.print(guarantee_table(guarantees), highlight=False)
    out.print(attack_table(attacks), highlight=False)
    out.print(malicious_helper_table(findings), highlight=False)
    measured = {"attacks": [one.as_json() for one in attacks], "bad_helper": [one.as_json() for one in findings]}
    promised = [one.as_json() for one in guarantees]
    write_results(json, {"experiment": "attack", "guarantees": promised, **measured}, seed=0)


@app.command(epilog="Example: trefoil experiment regression --reports 2000 --columns 8 --epsilon 1 --seeds 2")
def regression(
    *,
    reports: Annotated[
        list[int] | None,
        typer.Option(help="Batch sizes; repeatable.", show_default="2000, 20000, 100000; with --mpc 20000"),
    ] = None,
    columns: Annotated[
        list[int] | None,
        typer.Option(help="Columns of the features; repeatable.", show_default="8, 16, 64; with --mpc 16"),
    ] = None,
    epsilon: Annotated[
        list[float] | None,
        typer.Option(help="ε of the reports; repeatable.", show_default="0.1, 0.3, 1, 3; with --mpc 1"),
    ] = None,
    noise: Annotated[
        list[NoiseMode] | None, typer.Option(help="Noise modes; repeatable.", show_default="local, joint")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="How many worlds.")] = 8,
    mpc: Annotated[
        bool, typer.Option("--mpc", help="Instead: every cell with noise through devices and three helpers, once.")
    ] = False,
    json: JsonFile = None,
) -> None:
    """Measure how good a publisher's model is if it is fitted to conversions that it cannot see (Appendix A)."""
    modes = noise or [NoiseMode.LOCAL, NoiseMode.JOINT]
    epsilons = epsilon or ([1.0] if mpc else [0.1, 0.3, 1.0, 3.0])
    sizes = reports or ([20_000] if mpc else [2_000, 20_000, 100_000])
    cells = regression_settings(sizes, columns or ([16] if mpc else [8, 16, 64]), epsilons, modes)
    study = study_through_helpers(cells) if mpc else run_study(cells, seeds)
    out.print(study.table(), highlight=False)
    write_results(json, study.to_json(), seed=0)


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


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


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

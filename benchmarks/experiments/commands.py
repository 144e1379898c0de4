"""`trefoil experiment ...` and `trefoil plan`. Bodies import what they need, so that `trefoil --help` stays quick."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchmarks.experiments.common_options import (
    Accounting,
    AccountingChoice,
    Common,
    EpochDays,
    Function,
    Kappa,
    Policy,
    Scale,
    Seed,
    WorkloadChoice,
)
from benchmarks.origin import write_results
from protocol.choices import JsonFile, NoiseChoice, PlotPlace
from protocol.console import out, progress, write_json
from protocol.errors import TrefoilError
from protocol.noise_mode import NoiseMode

if TYPE_CHECKING:
    from benchmarks.experiments.results import Options

app = typer.Typer(help="The paper's experiments: every figure with one command.", no_args_is_help=True)


@app.command(epilog="Example: trefoil experiment microbenchmark --participation 0.5 --rate 0.1 --json point.json")
def microbenchmark(
    *,
    participation: Annotated[float | None, typer.Option(help="Knob 1: share of users in each batch.")] = None,
    rate: Annotated[float | None, typer.Option(help="Knob 2: impressions per user and day.")] = None,
    accounting: Accounting = AccountingChoice.PAPER,
    kappa: Kappa = 0.0,
    policy: Policy = None,
    function: Function = None,
    epoch_days: EpochDays = None,
    seed: Seed = 0,
    scale: Scale = 1.0,
    json: JsonFile = None,
    plot: PlotPlace = None,
    mpc: Annotated[bool, typer.Option("--mpc", help="Also run the point through devices and three helpers.")] = False,
) -> None:
    """Figure 4: budget spent by the three systems as users and impressions vary. One point if a knob is given."""
    from benchmarks.experiments.experiments import DEFAULT_KNOB, figure_4_settings
    from benchmarks.experiments.experiments import microbenchmark as run

    common = Common(epoch_days, seed, scale, json, plot)
    options = common.options(accounting, kappa, policy, function)
    one = mpc or participation is not None or rate is not None
    knobs = (_or(participation, DEFAULT_KNOB), _or(rate, DEFAULT_KNOB))
    settings = [knobs] if one else figure_4_settings()
    if mpc:
        _check_mpc(options, settings)
    with progress("microbenchmark", len(settings) * round(40_000 * common.scale)) as advance:
        result = run(options, settings, advance)
    if mpc:
        result.findings["mpc"] = _through_mpc(options, *knobs)
    common.finish([result], common.draw("draw_figure_4", result))


@app.command(epilog="Example: trefoil experiment bias --accounting artifact --json bias.json --plot plots")
def bias(
    *,
    draws: Annotated[int, typer.Option(min=1, help="How often the noise is drawn.")] = 500,
    workload: Annotated[
        WorkloadChoice, typer.Option(help="The paper's heavy load, or one of its data sets, synthetic.")
    ] = WorkloadChoice.MICROBENCHMARK,
    accounting: Accounting = AccountingChoice.PAPER,
    kappa: Annotated[
        float, typer.Option(help="Weight of the side query, in the value's unit.", show_default="a tenth of the cap")
    ] = 0.0,
    policy: Policy = None,
    function: Function = None,
    epoch_days: EpochDays = None,
    seed: Seed = 0,
    scale: Scale = 1.0,
    json: JsonFile = None,
    plot: PlotPlace = None,
) -> None:
    """Figure 7: what the bias side query costs, and what its bound is worth, over many draws of the noise."""
    from benchmarks.experiments.experiments import BIAS_CONVERSIONS, BiasWorkload
    from benchmarks.experiments.experiments import bias as run
    from benchmarks.experiments.results import study_table

    if plot is not None and workload is not WorkloadChoice.MICROBENCHMARK:
        raise TrefoilError("Figure 7 is the microbenchmark's", "Leave --plot or --workload out.")
    common = Common(epoch_days, seed, scale, json, plot)
    options = common.options(accounting, kappa, policy, function)
    chosen = BiasWorkload(workload.value)
    with progress("bias", round(BIAS_CONVERSIONS[chosen] * common.scale)) as advance:
        result, studies = run(options, draws, advance, chosen)
    drawings = common.draw("draw_figure_7", result, studies)
    out.print(study_table(studies), highlight=False)
    common.finish([result], drawings)


@app.command(epilog="Example: trefoil experiment patcg --scale 0.1 --epoch-days 7 --plot plots")
def patcg(
    *,
    impressions: Annotated[Path | None, typer.Option(help="Real exposures: a parquet file, or a folder.")] = None,
    conversions: Annotated[Path | None, typer.Option(help="Real conversions: a parquet file, or a folder.")] = None,
    accounting: Accounting = AccountingChoice.PAPER,
    kappa: Kappa = 0.0,
    policy: Policy = None,
    function: Function = None,
    epoch_days: EpochDays = None,
    seed: Seed = 0,
    scale: Scale = 1.0,
    json: JsonFile = None,
    plot: PlotPlace = None,
) -> None:
    """Figure 5: one large advertiser, 24 million conversions; synthetic unless the real files are given."""
    from benchmarks.experiments.experiments import patcg as run
    from benchmarks.experiments.files import read_patcg

    if (impressions is None) != (conversions is None):
        raise TrefoilError("the real files come in pairs", "Give both --impressions and --conversions, or neither.")
    common = Common(epoch_days, seed, scale, json, plot)
    options = common.options(accounting, kappa, policy, function)
    lengths = common.lengths()
    events = read_patcg(impressions, conversions) if impressions and conversions else None
    with progress("patcg", len(lengths) * round(24_113_018 * common.scale)) as advance:
        result = run(options, lengths, events, advance)
    common.finish([result], common.draw("draw_figure_5", result))


@app.command(epilog="Example: trefoil experiment criteo --data CriteoSearchData --json criteo.json")
def criteo(
    *,
    data: Annotated[Path | None, typer.Option(help="The real log, tab-separated.")] = None,
    accounting: Accounting = AccountingChoice.PAPER,
    kappa: Kappa = 0.0,
    policy: Policy = None,
    function: Function = None,
    epoch_days: EpochDays = None,
    seed: Seed = 0,
    scale: Scale = 1.0,
    json: JsonFile = None,
    plot: PlotPlace = None,
) -> None:
    """Figure 6: many advertisers of all sizes; synthetic unless the real log is given."""
    from benchmarks.experiments.experiments import EXTRA_IMPRESSIONS
    from benchmarks.experiments.experiments import criteo as run
    from benchmarks.experiments.files import read_criteo

    common = Common(epoch_days, seed, scale, json, plot)
    options = common.options(accounting, kappa, policy, function)
    lengths = common.lengths()
    log = read_criteo(data) if data else None
    with progress("criteo", (len(lengths) + len(EXTRA_IMPRESSIONS)) * round(400_000 * common.scale)) as advance:
        result = run(options, lengths, EXTRA_IMPRESSIONS, log, advance)
    common.finish([result], common.draw("draw_figure_6", result))


@app.command(name="all", epilog="Example: trefoil experiment all --scale 0.1 --json all.json --plot plots")
def everything(
    *,
    accounting: Accounting = AccountingChoice.PAPER,
    epoch_days: EpochDays = None,
    seed: Seed = 0,
    scale: Scale = 1.0,
    json: JsonFile = None,
    plot: PlotPlace = None,
) -> None:
    """Every figure, one after the other. The JSON has one entry per experiment, and all points together."""
    from benchmarks.experiments import experiments

    common = Common(epoch_days, seed, scale, json, plot)
    options = common.options(accounting, 0.0)
    lengths = common.lengths()
    with progress("experiments", 4) as advance:
        figure_4 = experiments.microbenchmark(options, experiments.figure_4_settings())
        advance(note="microbenchmark done")
        figure_7, studies = experiments.bias(options)
        advance(note="bias done")
        figure_6 = experiments.criteo(options, lengths, experiments.EXTRA_IMPRESSIONS)
        advance(note="criteo done")
        figure_5 = experiments.patcg(options, lengths)
        advance(note="patcg done")
    drawings = common.draw("draw_figure_4", figure_4) | common.draw("draw_figure_5", figure_5)
    drawings |= common.draw("draw_figure_6", figure_6) | common.draw("draw_figure_7", figure_7, studies)
    common.finish([figure_4, figure_5, figure_6, figure_7], drawings)


@app.command(epilog="Example: trefoil experiment attack --json attack.json")
def attack(json: JsonFile = None) -> None:
    """What sites, alone or together, or one bad helper with the querier, can learn or destroy."""
    from benchmarks.experiments.attack import attack_table, measure
    from benchmarks.experiments.bad_helper import bad_helper_table, measure_bad_helper
    from benchmarks.experiments.guarantees import guarantee_table, measure_guarantees

    guarantees, attacks, findings = measure_guarantees(), measure(), measure_bad_helper()
    out.print(guarantee_table(guarantees), highlight=False)
    out.print(attack_table(attacks), highlight=False)
    out.print(bad_helper_table(findings), highlight=False)
    measured = {"attacks": [one.as_json() for one in attacks], "bad_helper": [one.as_json() for one in findings]}
    promised = [one.as_json() for one in guarantees]
    write_results(json, {"experiment": "attack", "guarantees": promised, **measured}, seed=0)


@app.command(epilog="Example: trefoil experiment regression --reports 2000 --columns 8 --epsilon 1 --seeds 2")
def regression(
    *,
    reports: Annotated[list[int] | None, typer.Option(help="Batch sizes; repeatable.")] = None,
    columns: Annotated[list[int] | None, typer.Option(help="Columns of the features: 8, 16 or 64.")] = None,
    epsilon: Annotated[list[float] | None, typer.Option(help="ε of the reports; repeatable.")] = None,
    noise: Annotated[list[NoiseMode] | None, typer.Option(help="Noise modes; repeatable.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="How many worlds.")] = 8,
    devices: Annotated[int, typer.Option(min=0, help="How many devices are charged; 0 leaves charges out.")] = 4_000,
    mpc: Annotated[
        bool, typer.Option("--mpc", help="Instead: every cell with noise through devices and three helpers, once.")
    ] = False,
    json: JsonFile = None,
) -> None:
    """Appendix A: a publisher's model from conversions it cannot see; what it is worth, and what it costs."""
    from benchmarks.experiments.regression import settings
    from benchmarks.experiments.regression_study import run_study, study_through_helpers

    modes = noise or [NoiseMode.LOCAL, NoiseMode.JOINT]
    epsilons = epsilon or ([1.0] if mpc else [0.1, 0.3, 1.0, 3.0])
    sizes = reports or ([20_000] if mpc else [2_000, 20_000, 100_000])
    cells = settings(sizes, columns or ([16] if mpc else [8, 16, 64]), epsilons, modes)
    study = study_through_helpers(cells) if mpc else run_study(cells, modes[0], seeds, devices)
    for table in study.tables():
        out.print(table, highlight=False)
    write_results(json, study.to_json(), seed=0)


def _check_mpc(options: Options, settings: list[tuple[float, float]]) -> None:
    """Refuse before any work what real devices would not do."""
    from benchmarks.experiments.microbenchmark import Microbenchmark
    from benchmarks.experiments.policies import Accounting

    Microbenchmark(*settings[0], options.seed, options.scale)
    if options.accounting is not Accounting.PAPER or options.kappa:
        raise TrefoilError("--mpc runs real devices: the paper's accounting, no side query", "Leave both options out.")


def _through_mpc(options: Options, participation: float, rate: float) -> list[dict[str, object]]:
    """One point's queries through devices, sealed reports and three helpers, in every noise mode."""
    import time

    from benchmarks.experiments.microbenchmark import Microbenchmark, generate
    from benchmarks.experiments.through_mpc import mpc_table, run_through_mpc

    spec = Microbenchmark(participation, rate, options.seed, options.scale)
    now = int(time.time())  # noqa: TID251 - the edge: helpers live by the real clock
    with progress("sealed reports", len(NoiseMode) * spec.conversions) as advance:
        results = run_through_mpc(generate(spec), options.epoch_days, list(NoiseMode), now, advance)
    out.print(mpc_table(results), highlight=False)
    return [one.as_json() for one in results]


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def plan(
    reports: Annotated[int, typer.Option(help="Reports in one query.")],
    value_cap: Annotated[int, typer.Option(help="Largest value of one conversion, in your unit.")],
    error: Annotated[float, typer.Option(help="Relative error you can live with, such as 0.05.")] = 0.05,
    confidence: Annotated[float, typer.Option(help="How often the answer is to be within it, such as 0.99.")] = 0.99,
    noise: NoiseChoice = NoiseMode.LOCAL,
    expected_mean: Annotated[float | None, typer.Option(help="Mean value per report.", show_default="the cap")] = None,
    window_days: Annotated[int, typer.Option(help="How far back a conversion looks.")] = 30,
    epoch_days: Annotated[int, typer.Option(help="Length of an epoch.")] = 7,
    budget: Annotated[float, typer.Option(help="Budget of one epoch of one device, ε_G.")] = 1.0,
    buckets: Annotated[int, typer.Option(help="Buckets of the histogram.")] = 1,
    kappa: Annotated[int, typer.Option(help="Weight of the bias side query, in your unit; 0 is off.")] = 0,
    participation: Annotated[float, typer.Option(help="Share of people in one query (knob 1).")] = 0.1,
    impressions_per_day: Annotated[float, typer.Option(help="Impressions a person sees a day (knob 2).")] = 0.1,
    json: JsonFile = None,
) -> None:
    """Which ε a query needs, what it costs a device under each policy, and how many a month the budget allows."""
    from benchmarks.experiments.plan import Plan, costs, plan_json, plan_tables, warning

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
    if (told := warning(wanted, prices)) is not None:
        out.print(told, highlight=False)
    write_json(json, plan_json(wanted, prices))

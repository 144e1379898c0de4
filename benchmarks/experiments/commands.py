"""`trefoil experiment ...` and `trefoil plan`. Bodies import what they need, so that `trefoil --help` stays quick."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from protocol.console import out, progress, write_json
from protocol.errors import TrefoilError

if TYPE_CHECKING:
    from rich.table import Table

    from benchmarks.experiments.results import Options, Result

app = typer.Typer(help="The paper's experiments: every figure with one command.", no_args_is_help=True)


class AccountingChoice(StrEnum):
    """Whose accounting: see benchmarks/README.md."""

    PAPER = "paper"
    ARTIFACT = "artifact"


Accounting = Annotated[AccountingChoice, typer.Option(help="The paper's accounting, or its public artifact's.")]
Kappa = Annotated[float, typer.Option(help="Weight of the bias side query, in the value's unit; 0 is off.")]
EpochDays = Annotated[int | None, typer.Option(help="Length of an epoch in days.", show_default="7, or all")]
Seed = Annotated[int, typer.Option(help="Seed of the workload.")]
Scale = Annotated[float, typer.Option(help="Size of the workload, above 0 and at most 1.")]
Json = Annotated[Path | None, typer.Option("--json", help="Write the results to this file ('-': standard output).")]
Plots = Annotated[Path | None, typer.Option(help="Draw the figure's plots into this folder.")]


@app.command(epilog="Example: trefoil experiment microbenchmark --participation 0.5 --rate 0.1 --json point.json")
def microbenchmark(
    participation: Annotated[float | None, typer.Option(help="Knob 1: share of users in each batch.")] = None,
    rate: Annotated[float | None, typer.Option(help="Knob 2: impressions per user and day.")] = None,
    accounting: Accounting = AccountingChoice.PAPER,
    kappa: Kappa = 0.0,
    epoch_days: EpochDays = None,
    seed: Seed = 0,
    scale: Scale = 1.0,
    json: Json = None,
    plots: Plots = None,
    mpc: Annotated[bool, typer.Option("--mpc", help="Also run the point through devices and three helpers.")] = False,
) -> None:
    """Figure 4: budget spent by the three systems as users and impressions vary. One point if a knob is given."""
    from benchmarks.experiments.experiments import DEFAULT_KNOB, figure_4_settings
    from benchmarks.experiments.experiments import microbenchmark as run

    options = _options(accounting, kappa, epoch_days, seed, scale, json)
    one = mpc or participation is not None or rate is not None
    knobs = (_or(participation, DEFAULT_KNOB), _or(rate, DEFAULT_KNOB))
    settings = [knobs] if one else figure_4_settings()
    if mpc:
        _check_mpc(options, settings)
    with progress("microbenchmark", len(settings) * round(40_000 * scale)) as advance:
        result = run(options, settings, advance)
    if mpc:
        result.findings["mpc"] = _through_mpc(options, *knobs, json)
    _finish([result], _draw("draw_figure_4", result, plots), json)


@app.command(epilog="Example: trefoil experiment bias --accounting artifact --json bias.json --plots plots")
def bias(
    draws: Annotated[int, typer.Option(help="How often the noise is drawn.")] = 500,
    accounting: Accounting = AccountingChoice.PAPER,
    kappa: Kappa = 0.5,
    epoch_days: EpochDays = None,
    seed: Seed = 0,
    scale: Scale = 1.0,
    json: Json = None,
    plots: Plots = None,
) -> None:
    """Figure 7: what the bias side query costs, and what its bound is worth, over many draws of the noise."""
    from benchmarks.experiments.experiments import bias as run
    from benchmarks.experiments.results import study_table

    options = _options(accounting, kappa, epoch_days, seed, scale, json)
    with progress("bias", round(800_000 * scale)) as advance:
        result, studies = run(options, draws, advance)
    drawings = _draw("draw_figure_7", result, plots, studies)
    _show(study_table(studies), json)
    _finish([result], drawings, json)


@app.command(epilog="Example: trefoil experiment patcg --scale 0.1 --epoch-days 7 --plots plots")
def patcg(
    impressions: Annotated[Path | None, typer.Option(help="Real exposures: a parquet file, or a folder.")] = None,
    conversions: Annotated[Path | None, typer.Option(help="Real conversions: a parquet file, or a folder.")] = None,
    accounting: Accounting = AccountingChoice.PAPER,
    kappa: Kappa = 0.0,
    epoch_days: EpochDays = None,
    seed: Seed = 0,
    scale: Scale = 1.0,
    json: Json = None,
    plots: Plots = None,
) -> None:
    """Figure 5: one large advertiser, 24 million conversions; synthetic unless the real files are given."""
    from benchmarks.experiments.experiments import EPOCH_LENGTHS
    from benchmarks.experiments.experiments import patcg as run
    from benchmarks.experiments.files import read_patcg

    if (impressions is None) != (conversions is None):
        raise TrefoilError("the real files come in pairs", "Give both --impressions and --conversions, or neither.")
    options = _options(accounting, kappa, epoch_days, seed, scale, json)
    lengths = EPOCH_LENGTHS if epoch_days is None else (epoch_days,)
    events = read_patcg(impressions, conversions) if impressions and conversions else None
    with progress("patcg", len(lengths) * round(24_113_018 * scale)) as advance:
        result = run(options, lengths, events, advance)
    _finish([result], _draw("draw_figure_5", result, plots), json)


@app.command(epilog="Example: trefoil experiment criteo --data CriteoSearchData --json criteo.json")
def criteo(
    data: Annotated[Path | None, typer.Option(help="The real log, tab-separated.")] = None,
    accounting: Accounting = AccountingChoice.PAPER,
    kappa: Kappa = 0.0,
    epoch_days: EpochDays = None,
    seed: Seed = 0,
    scale: Scale = 1.0,
    json: Json = None,
    plots: Plots = None,
) -> None:
    """Figure 6: many advertisers of all sizes; synthetic unless the real log is given."""
    from benchmarks.experiments.experiments import EPOCH_LENGTHS, EXTRA_IMPRESSIONS
    from benchmarks.experiments.experiments import criteo as run
    from benchmarks.experiments.files import read_criteo

    options = _options(accounting, kappa, epoch_days, seed, scale, json)
    lengths = EPOCH_LENGTHS if epoch_days is None else (epoch_days,)
    log = read_criteo(data) if data else None
    with progress("criteo", (len(lengths) + len(EXTRA_IMPRESSIONS)) * round(400_000 * scale)) as advance:
        result = run(options, lengths, EXTRA_IMPRESSIONS, log, advance)
    _finish([result], _draw("draw_figure_6", result, plots), json)


@app.command(name="all", epilog="Example: trefoil experiment all --scale 0.1 --json all.json --plots plots")
def everything(
    accounting: Accounting = AccountingChoice.PAPER,
    epoch_days: EpochDays = None,
    seed: Seed = 0,
    scale: Scale = 1.0,
    json: Json = None,
    plots: Plots = None,
) -> None:
    """Every figure, one after the other. The JSON has one entry per experiment, and all points together."""
    from benchmarks.experiments import experiments

    options = _options(accounting, 0.0, epoch_days, seed, scale, json)
    lengths = experiments.EPOCH_LENGTHS if epoch_days is None else (epoch_days,)
    drawings: dict[str, bytes] = {}
    with progress("experiments", 4) as advance:
        figure_4 = experiments.microbenchmark(options, experiments.figure_4_settings())
        advance(note="microbenchmark done")
        figure_7, studies = experiments.bias(options)
        advance(note="bias done")
        figure_6 = experiments.criteo(options, lengths, experiments.EXTRA_IMPRESSIONS)
        advance(note="criteo done")
        figure_5 = experiments.patcg(options, lengths)
        advance(note="patcg done")
    drawings |= _draw("draw_figure_4", figure_4, plots) | _draw("draw_figure_5", figure_5, plots)
    drawings |= _draw("draw_figure_6", figure_6, plots) | _draw("draw_figure_7", figure_7, plots, studies)
    _finish([figure_4, figure_5, figure_6, figure_7], drawings, json)


@app.command(epilog="Example: trefoil experiment attack --json attack.json")
def attack(json: Json = None) -> None:
    """What colluding sites, or one bad helper with the querier, can learn or destroy."""
    from benchmarks.experiments.attack import attack_table, measure
    from benchmarks.experiments.bad_helper import bad_helper_table, measure_bad_helper

    attacks, findings = measure(), measure_bad_helper()
    _show(attack_table(attacks), json)
    _show(bad_helper_table(findings), json)
    measured = {"attacks": [one.as_json() for one in attacks], "bad_helper": [one.as_json() for one in findings]}
    write_json(json, {"experiment": "attack", **measured})


def _check_mpc(options: Options, settings: list[tuple[float, float]]) -> None:
    """Refuse before any work what real devices would not do."""
    from benchmarks.experiments.microbenchmark import Microbenchmark
    from benchmarks.experiments.policies import Accounting

    Microbenchmark(*settings[0], options.seed, options.scale)
    if options.accounting is not Accounting.PAPER or options.kappa:
        raise TrefoilError("--mpc runs real devices: the paper's accounting, no side query", "Leave both options out.")


def _through_mpc(options: Options, participation: float, rate: float, json: Path | None) -> list[dict[str, object]]:
    """One point's queries through devices, sealed reports and three helpers, in both noise modes."""
    import time

    from benchmarks.experiments.microbenchmark import Microbenchmark, generate
    from benchmarks.experiments.through_mpc import mpc_table, run_through_mpc
    from protocol.query import NoiseMode

    spec = Microbenchmark(participation, rate, options.seed, options.scale)
    now = int(time.time())  # noqa: TID251 - the edge: helpers live by the real clock
    with progress("sealed reports", len(NoiseMode) * spec.conversions) as advance:
        results = run_through_mpc(generate(spec), options.epoch_days, list(NoiseMode), now, advance)
    _show(mpc_table(results), json)
    return [one.as_json() for one in results]


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _options(
    accounting: AccountingChoice, kappa: float, epoch_days: int | None, seed: int, scale: float, json: Path | None
) -> Options:
    from benchmarks.experiments import policies
    from benchmarks.experiments.results import Options

    if json is not None and json.is_dir():
        raise TrefoilError(f"{json} is a folder", "Give --json the name of a file.")
    days = 7 if epoch_days is None else epoch_days
    return Options(policies.Accounting(accounting.value), kappa, days, seed, scale)


def _draw(figure: str, result: Result, folder: Path | None, *more: object) -> dict[str, bytes]:
    """The figure's plots by file name, drawn in memory; nothing if no folder was asked for."""
    if folder is None:
        return {}
    if folder.exists() and not folder.is_dir():
        raise TrefoilError(f"{folder} is not a folder", "Give --plots the name of a folder.")
    from benchmarks.experiments import figures

    drawn: dict[str, bytes] = getattr(figures, figure)(result, *more)
    return {str(folder / name): data for name, data in drawn.items()}


def _show(table: Table, json: Path | None) -> None:
    """Print a table, unless standard output is wanted for the JSON alone."""
    if str(json) != "-":
        out.print(table)


def _finish(results: list[Result], drawings: dict[str, bytes], json: Path | None) -> None:
    """Show tables; write plots, and the JSON last: an interrupted run leaves no file that looks like a whole one."""
    from protocol.console import write_atomically

    for result in results:
        _show(result.table(), json)
    for name, data in drawings.items():
        write_atomically(Path(name), data)
    whole = [result.as_json() for result in results]
    if len(whole) == 1:
        write_json(json, whole[0])
    elif json is not None:
        points = [point for result in results for point in result.as_points()]
        write_json(json, {"experiment": "all", "experiments": whole, "points": points})


def plan(
    reports: Annotated[int, typer.Option(help="Reports in one query.")],
    value_cap: Annotated[int, typer.Option(help="Largest value of one conversion, in your unit.")],
    error: Annotated[float, typer.Option(help="Relative error you can live with, such as 0.05.")] = 0.05,
    confidence: Annotated[float, typer.Option(help="How often the answer is to be within it, such as 0.99.")] = 0.99,
    expected_mean: Annotated[float | None, typer.Option(help="Mean value per report.", show_default="the cap")] = None,
    window_days: Annotated[int, typer.Option(help="How far back a conversion looks.")] = 30,
    epoch_days: Annotated[int, typer.Option(help="Length of an epoch.")] = 7,
    budget: Annotated[float, typer.Option(help="Budget of one epoch of one device, ε_G.")] = 1.0,
    buckets: Annotated[int, typer.Option(help="Buckets of the histogram.")] = 1,
    kappa: Annotated[int, typer.Option(help="Weight of the bias side query, in your unit; 0 is off.")] = 0,
    participation: Annotated[float, typer.Option(help="Share of people in one query (knob 1).")] = 0.1,
    impressions_per_day: Annotated[float, typer.Option(help="Impressions a person sees a day (knob 2).")] = 0.1,
    json: Json = None,
) -> None:
    """Which ε a query needs, what it costs a device under each policy, and how many a month the budget allows."""
    from benchmarks.experiments.plan import Plan, costs, plan_json, plan_tables

    mean = float(value_cap) if expected_mean is None else expected_mean
    wanted = Plan(
        reports=reports,
        value_cap=value_cap,
        expected_mean=mean,
        error=error,
        confidence=confidence,
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
        _show(table, json)
    write_json(json, plan_json(wanted, prices))

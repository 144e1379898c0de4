"""The commands of this package. Bodies import what they need, so that `trefoil --help` stays quick."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.bench.commands import JsonFile, bench
from benchmarks.demo.command import demo
from benchmarks.experiments.commands import app as experiment
from benchmarks.experiments.commands import plan
from benchmarks.live.command import live
from benchmarks.reports_command import reports

app = typer.Typer(help="benchmarks")
conformance = typer.Typer(help="Check the device against a standard's scenarios.", no_args_is_help=True)
app.add_typer(bench, name="bench")
app.add_typer(conformance, name="conformance")
app.add_typer(experiment, name="experiment")
app.command(epilog="Example: trefoil plan --reports 2000 --value-cap 5 --error 0.05 --confidence 0.99")(plan)
app.command()(demo)
app.command()(reports)
app.command()(live)


@conformance.callback()
def conformance_group() -> None:
    """Check the device against a standard's scenarios."""


@conformance.command("w3c")
def conformance_w3c(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Scenario files, with their CONFIG.json.")],
    json_file: JsonFile = None,
) -> None:
    """Run every W3C Attribution scenario in DIR and show what differs; exit code 1 if anything does.

    Example: trefoil conformance w3c tests/scenarios
    """
    from benchmarks.conformance.conformance import report_results, run_folder

    if not report_results(run_folder(folder), json_file):
        raise typer.Exit(1)

"""The commands of this package. Bodies import what they need, so that `trefoil --help` stays quick."""

from __future__ import annotations

import typer

from benchmarks.bench.commands import bench
from benchmarks.conformance.command import conformance
from benchmarks.demo.command import demo
from benchmarks.experiments.commands import app as experiment
from benchmarks.experiments.commands import plan
from benchmarks.live.command import live
from benchmarks.reports_command import reports

app = typer.Typer(help="benchmarks")
app.add_typer(bench, name="bench")
app.add_typer(conformance, name="conformance")
app.add_typer(experiment, name="experiment")
app.command(epilog="Example: trefoil plan --reports 2000 --value-cap 5 --error 0.05 --confidence 0.99")(plan)
app.command()(demo)
app.command()(reports)
app.command()(live)

"""The commands of this package. Bodies import what they need, so that `trefoil --help` stays quick."""

from __future__ import annotations

import typer

app = typer.Typer(help="protocol")

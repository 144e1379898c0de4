"""`trefoil conformance`. Bodies import what they need, so that `trefoil --help` stays quick."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from protocol.choices import JsonFile

conformance = typer.Typer(help="Check the device against a standard's scenarios.", no_args_is_help=True)


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
    from benchmarks.conformance.runner import run_folder
    from benchmarks.conformance.view import show_results

    if not show_results(run_folder(folder), json_file):
        raise typer.Exit(1)

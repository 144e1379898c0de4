"""Trefoil's front door: one command, a subcommand per role. Each role's code is imported only when it is asked for."""

from __future__ import annotations

import sys

import typer

from benchmarks.commands import app as benchmarks_app
from device.commands import app as device_app
from mpc_helpers.commands import app as helpers_app
from protocol.commands import app as protocol_app
from protocol.console import err
from protocol.errors import TrefoilError

app = typer.Typer(
    name="trefoil",
    help="Measure advertising without watching people.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
for role in (protocol_app, device_app, helpers_app, benchmarks_app):
    app.add_typer(role)


def main() -> None:
    """Run a command; a mistake of the person's gets one clear line and what to do next, never a traceback."""
    try:
        app()
    except TrefoilError as error:
        err.print(f"error: {error}", style="bold red", markup=False, highlight=False)
        if error.hint:
            err.print(f"hint:  {error.hint}", markup=False, highlight=False)
        sys.exit(1)
    except KeyboardInterrupt:
        err.print("interrupted; nothing half-done was kept", markup=False)
        sys.exit(130)


if __name__ == "__main__":
    main()

"""Trefoil's front door: one command with a subcommand per role, and the library (`import trefoil`).

Each role's code is imported only when it is asked for. What `import trefoil` offers is in `benchmarks/library.py`.
"""

from __future__ import annotations

import sys
from importlib import metadata
from typing import TYPE_CHECKING

import typer

from benchmarks.commands import app as benchmarks_app
from device.commands import app as device_app
from mpc_helpers.commands import app as helpers_app
from protocol.commands import app as protocol_app
from protocol.console import err, out
from protocol.errors import TrefoilError
from protocol.stopping import interrupt_when_terminated

if TYPE_CHECKING:
    from benchmarks.library import *  # noqa: F403 - the public names, for type checkers

__version__ = metadata.version("trefoil")

WELCOME = """\
Trefoil measures advertising without watching people. A person's device decides what a purchase owes to which
advertisement and pays for the answer out of that person's privacy budget; three helpers add the sealed reports up
without seeing any of them, and the advertiser gets one noisy histogram.

Try first:
  trefoil demo                        people, devices, three helpers and one answer, in half a minute
  trefoil live                        the same in your browser, with your own clicks
  trefoil bench throughput            what it costs, beside adding up in the clear
  trefoil experiment microbenchmark   a figure of the paper, from its recipe

Every command explains itself and shows an example: trefoil COMMAND --help
All commands: trefoil --help
"""

app = typer.Typer(name="trefoil", help="Measure advertising without watching people.", pretty_exceptions_enable=False)
for role in (benchmarks_app, device_app, helpers_app, protocol_app):
    app.add_typer(role)


def __getattr__(name: str) -> object:
    """A public name of the library, imported when one is first used: `trefoil --help` needs none of them."""
    from benchmarks import library

    if name not in library.__all__:
        raise AttributeError(f"module 'trefoil' has no attribute {name!r}")
    return getattr(library, name)


@app.callback(invoke_without_command=True)
def welcome(context: typer.Context) -> None:
    """Measure advertising without watching people."""
    if context.invoked_subcommand is None:
        out.print(WELCOME, markup=False, highlight=False)


def main() -> None:
    """Run a command; a mistake of the person's gets one clear line and what to do next, never a traceback."""
    interrupt_when_terminated()
    try:
        app()
    except TrefoilError as error:
        _complain(str(error), error.hint)
    except OSError as error:
        # What our code expects of files it turns into a TrefoilError; the rest is a path or a permission.
        what = f"{error.filename}: " if error.filename else ""
        _complain(f"{what}{error.strerror or error}", "Check that the path exists and that you may use it.")
    except KeyboardInterrupt:
        _complain("interrupted", "Nothing half-done was kept; run the command again to start over.", 130)


def _complain(what: str, hint: str, code: int = 1) -> None:
    err.print(f"error: {what}", style="bold red", markup=False, highlight=False, soft_wrap=True)
    if hint:
        err.print(f"hint:  {hint}", markup=False, highlight=False, soft_wrap=True)
    sys.exit(code)


if __name__ == "__main__":
    main()

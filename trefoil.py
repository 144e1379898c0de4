"""Trefoil's front door: one command with a subcommand per role, and the library (`import trefoil`).

Each role's code is imported only when it is asked for. What `import trefoil` offers is in `benchmarks/library.py`.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Sequence
from enum import IntEnum
from importlib import metadata
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

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

# What people do with Trefoil, in the order of the story; `--help` shows the commands so.
STORY = {
    "Try it": ("demo", "live"),
    "As a person's device": ("device",),
    "As a querier": ("reports", "collect", "batch", "query", "bias", "regression"),
    "As an operator": ("launch", "keygen", "helper-set", "helper", "ledger", "alarm"),
    "As a researcher": ("bench", "experiment", "plan", "conformance"),
}


class Story(TyperGroup):
    """The commands of all roles, by panel and in order; one that is not in `STORY` comes last."""

    def __init__(self, **settings: Any) -> None:  # Any: whatever typer gives a group
        super().__init__(**settings)
        panels = {name: panel for panel, names in STORY.items() for name in names}
        places = list(panels)
        named = sorted(self.commands, key=lambda name: places.index(name) if name in panels else len(places))
        self.commands = {name: self.commands[name] for name in named}
        for name, command in self.commands.items():
            vars(command)["rich_help_panel"] = panels.get(name)


app = typer.Typer(
    name="trefoil",
    cls=Story,
    help="Measure advertising without watching people.",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for role in (benchmarks_app, device_app, helpers_app, protocol_app):
    app.add_typer(role)


def __getattr__(name: str) -> object:
    """A public name of the library, imported when one is first used: `trefoil --help` needs none of them."""
    from benchmarks import library

    if name not in library.__all__:
        raise AttributeError(f"module 'trefoil' has no attribute {name!r}")
    return getattr(library, name)


@app.callback(invoke_without_command=True)
def welcome(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print results and errors only.")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show what is logged, and where errors arise.")
    ] = False,
) -> None:
    """Measure advertising without watching people."""
    err.quiet = quiet
    if verbose:
        logging.basicConfig(level=logging.DEBUG, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    if version:
        out.print(f"trefoil {__version__}", markup=False, highlight=False)
    elif context.invoked_subcommand is None:
        out.print(WELCOME, markup=False, highlight=False)


class Exit(IntEnum):
    """How a command ends, for scripts: whether trying again can help."""

    MISTAKE = 1
    USAGE = 2
    REFUSED = 3
    TRY_AGAIN = 75
    INTERRUPTED = 130


def main() -> None:
    """Run a command; a mistake of the person's gets one clear line and what to do next, never a traceback."""
    interrupt_when_terminated()
    try:
        app()
    except TrefoilError as error:
        logging.getLogger("trefoil").debug("where it arose", exc_info=True)
        _complain(str(error), error.hint, _exit_of(error))
    except OSError as error:
        # What our code expects of files it turns into a TrefoilError; the rest is a path or a permission.
        what = f"{error.filename}: " if error.filename else ""
        _complain(f"{what}{error.strerror or error}", "Check that the path exists and that you may use it.")
    except KeyboardInterrupt:
        hint = "What was written before is whole; run the command again to go on or start over."
        _complain("interrupted", hint, Exit.INTERRUPTED)


def _exit_of(error: TrefoilError) -> Exit:
    """Refused for ever, worth another try, or a mistake to be mended first."""
    match error.again:
        case None:
            return Exit.MISTAKE
        case True:
            return Exit.TRY_AGAIN
        case False:
            return Exit.REFUSED


def _complain(what: str, hint: str, code: Exit = Exit.MISTAKE) -> NoReturn:
    err.quiet = False
    if _wants_json(sys.argv):
        failure = {"error": {"code": code.name.lower(), "message": what, "hint": hint}}
        sys.stdout.write(json.dumps(failure, indent=2) + "\n")
    err.print(f"error: {what}", style="bold red", markup=False, highlight=False, soft_wrap=True)
    if hint:
        err.print(f"hint:  {hint}", markup=False, highlight=False, soft_wrap=True)
    sys.exit(code)


def _wants_json(arguments: Sequence[str]) -> bool:
    """Whether standard output is to hold JSON and nothing else, also when a command fails."""
    return "--json=-" in arguments or ("--json", "-") in pairwise(arguments)


if __name__ == "__main__":
    main()

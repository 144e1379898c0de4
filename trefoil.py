"""Trefoil's front door: one command with a subcommand per role, and the library (`import trefoil`).

Each role's code is imported only when it is asked for. What `import trefoil` offers is in `benchmarks/library.py`.
"""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Sequence
from enum import IntEnum
from functools import cache
from importlib import metadata
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.main
from typer.core import TyperGroup

from benchmarks.commands import app as benchmarks_app
from device.commands import app as device_app
from mpc_helpers.commands import app as helpers_app
from protocol.choices import with_option
from protocol.commands import app as protocol_app
from protocol.console import err, out, write_json
from protocol.errors import TrefoilError
from protocol.places import STANDARD_OUTPUT
from protocol.stopping import Interrupted, interrupt_when_terminated, keeping
from protocol.text import printable

if TYPE_CHECKING:
    from benchmarks.library import *  # noqa: F403 - the public names, for type checkers

__version__ = metadata.version("trefoil")
_LOG = logging.getLogger("trefoil")
# What typer says about wrong usage. Its versions use the click that is installed, or carry their own.
USAGE_ERROR: type[Exception] = typer.BadParameter.mro()[2]
# What typer's validation says, for people.
PLAIN_WORDS = {
    "Value error, ": "",
    "Input should be a valid integer, unable to parse string as an integer": "not a whole number",
    "Input should be a valid number, unable to parse string as a number": "not a number",
    "Input should be greater than or equal to": "it must be at least",
    "Input should be less than or equal to": "it must be at most",
}
# What a plain installation lacks, and what brings it.
EXTRAS = {"matplotlib": "experiments", "pyarrow": "experiments", "dask": "cluster", "distributed": "cluster"}
GLOBAL_OPTIONS = ("-q", "--quiet", "-v", "--verbose", "--version")

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

EXIT_CODES = (
    "Exit codes: 0 done, 1 a mistake to mend first, 2 a wrong command line, 3 refused for ever, 70 a defect, "
    "75 try again later, 130 interrupted."
)

# What people do with Trefoil, in the order of the story; `--help` shows the commands so.
STORY = {
    "Try it": ("demo", "live"),
    "As a person's device": ("device",),
    "As a querier": ("reports", "collect", "batch", "query", "bias", "regression"),
    "As an operator": ("launch", "keygen", "helper-set", "helper", "site", "ledger", "alarm"),
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

    def invoke(self, ctx: Any) -> Any:  # Any: the context that this typer has; whatever a command returns
        """Run a command; one that keeps something when it is interrupted says so itself."""
        with keeping("Files that were complete are whole, and nothing else was kept. Run the command again."):
            return super().invoke(ctx)


app = typer.Typer(
    name="trefoil",
    cls=Story,
    help="Measure advertising without watching people.",
    epilog=EXIT_CODES,
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
    out.quiet, err.quiet = False, quiet
    # A process may go on after its command, as a notebook does.
    context.call_on_close(lambda: setattr(err, "quiet", False))
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
    DEFECT = 70
    TRY_AGAIN = 75
    INTERRUPTED = 130


def main() -> None:
    """Run the command of this process."""
    interrupt_when_terminated()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal that lacks ε, or a file name that is no UTF-8, must not stop a command.
            stream.reconfigure(errors="backslashreplace")
    sys.exit(run(sys.argv[1:]))


@cache
def tree() -> Any:  # Any: the class differs by version of typer
    """All commands, put together once."""
    return typer.main.get_command(app)


def run(arguments: Sequence[str]) -> int:
    """Run a command and return its exit code. A mistake gets one clear line and what to do next, never a traceback."""
    wants_json = _wants_json(arguments)
    try:
        code = tree().main(args=list(arguments), prog_name="trefoil", standalone_mode=False)
    except TrefoilError as error:
        _LOG.debug("where it arose", exc_info=True)
        return _complain(with_option(str(error)), error.hint or _see(arguments), _exit_of(error), wants_json)
    except USAGE_ERROR as error:
        return _complain_of_usage(error, wants_json)
    except BrokenPipeError:
        # Whoever read the output has had enough of it.
        out.on_broken_pipe()
        return Exit.MISTAKE
    except OSError as error:
        # What our code expects of files it turns into a TrefoilError; the rest is a path or a permission.
        _LOG.debug("where it arose", exc_info=True)
        what = f"{error.filename}: " if error.filename else ""
        hint = "Check that the path exists and that you may use it."
        return _complain(f"{what}{error.strerror or error}", hint, Exit.MISTAKE, wants_json)
    except ModuleNotFoundError as error:
        extra = EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:
            return _defect(error, wants_json)
        hint = f"Install it with: pip install 'trefoil[{extra}]'"
        return _complain(f"this needs {error.name}, which is not installed", hint, Exit.MISTAKE, wants_json)
    except Exception as error:
        return _defect(error, wants_json)
    return code if isinstance(code, int) else 0


def _defect(error: Exception, wants_json: bool) -> Exit:
    # A helper's log keeps the traceback; a person sees it with -v.
    _LOG.log(logging.ERROR if logging.getLogger().handlers else logging.DEBUG, "a defect", exc_info=True)
    hint = "Nobody's mistake but ours. Run it again as trefoil -v ... and report what that shows."
    return _complain(f"defect in Trefoil: {type(error).__name__}: {error}", hint, Exit.DEFECT, wants_json)


def _see(arguments: Sequence[str]) -> str:
    """Where to look when a mistake has no hint of its own."""
    path, command = ["trefoil"], tree()
    for word in arguments:
        if word in getattr(command, "commands", {}):
            path, command = [*path, word], command.commands[word]
    return f"See: {' '.join(path)} --help"


def _exit_of(error: TrefoilError) -> Exit:
    """Interrupted, refused for ever, worth another try, or a mistake to be mended first."""
    if isinstance(error, Interrupted):
        return Exit.INTERRUPTED
    match error.again:
        case None:
            return Exit.MISTAKE
        case True:
            return Exit.TRY_AGAIN
        case False:
            return Exit.REFUSED


def _complain_of_usage(error: Any, wants_json: bool) -> int:  # Any: the class has no type in every version of typer
    message = error.format_message()
    for theirs, ours in PLAIN_WORDS.items():
        message = message.replace(theirs, ours)
    if not message:
        # A group without a command has shown its help.
        return Exit.USAGE
    path = error.ctx.command_path if getattr(error, "ctx", None) else "trefoil"
    hint = f"See: {path} --help"
    if getattr(error, "option_name", "") in GLOBAL_OPTIONS:
        hint = f"It comes right after trefoil: trefoil {error.option_name} {path.removeprefix('trefoil').strip()} ..."
    return _complain(message, hint, Exit.USAGE, wants_json)


def _complain(what: str, hint: str, code: Exit, wants_json: bool) -> Exit:
    err.quiet = False
    what, hint = _lines(what), _lines(hint)
    if wants_json:
        failure = {"error": {"code": code.name.lower(), "exit": int(code), "message": what, "hint": hint}}
        write_json(STANDARD_OUTPUT, failure)
    err.print(f"error: {what}", style="bold red", markup=False, highlight=False, soft_wrap=True)
    if hint:
        err.print(f"hint:  {hint}", markup=False, highlight=False, soft_wrap=True)
    return code


def _lines(text: str) -> str:
    """What may have come from a file or a peer, fit for a terminal."""
    return "\n".join(map(printable, text.splitlines()))


def _wants_json(arguments: Sequence[str]) -> bool:
    """Whether standard output is to hold JSON and nothing else, also when a command fails."""
    return "--json=-" in arguments or ("--json", "-") in pairwise(arguments)


if __name__ == "__main__":
    main()

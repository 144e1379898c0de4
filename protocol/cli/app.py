"""The command line: one command with a subcommand per role, each imported when its name is typed.

`protocol` imports no role, so the table below names modules as text. `trefoil --help` reads the table alone.
"""

from __future__ import annotations

import importlib
import logging
import re
from collections import UserDict
from collections.abc import Container, Sequence
from enum import IntEnum
from functools import cache
from importlib import metadata
from itertools import pairwise
from typing import Annotated, Any, NamedTuple

import typer
import typer.main
from rich.padding import Padding
from rich.table import Table
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

from protocol.cli.console import STANDARD_OUTPUT, err, fits, out, write_json
from protocol.cli.stopping import Interrupted, keeping
from protocol.errors import ErrorKind, TrefoilError, printable
from protocol.files import FREE_SPACE, FULL

_LOG = logging.getLogger(__name__)
# What typer raises for wrong usage. Its versions use the click that is installed, or carry their own.
USAGE_ERROR: type[Exception] = typer.BadParameter.mro()[2]
# Typer's validation messages, in plain words.
PLAIN_WORDS = {
    "Value error, ": "",
    "Input should be a valid integer, unable to parse string as an integer": "not a whole number",
    "Input should be a valid number, unable to parse string as a number": "not a number",
    "Input should be greater than or equal to": "it must be at least",
    "Input should be less than or equal to": "it must be at most",
}
# Packages that a plain installation lacks, and the extra that brings each.
EXTRAS = {
    "matplotlib": "experiments",
    "pandas": "experiments",
    "pyarrow": "experiments",
    "dask": "cluster",
    "distributed": "cluster",
}
# What to do instead of giving an option twice.
REPEATED_HINTS = {"query --reports": "Join the batches first: trefoil batch merge a.batch b.batch --out both.batch"}
HELP_OPTIONS = ["-h", "--help"]
GLOBAL_OPTIONS = ("-q", "--quiet", "-v", "--verbose", "--version")

WELCOME = (
    "Trefoil measures advertising without watching people. A person's device decides what a purchase owes to which "
    "advertisement and pays for the answer out of that person's privacy budget; three helpers add the sealed reports "
    "up without seeing any of them, and the advertiser gets one noisy histogram."
)
TRY_FIRST = {
    "trefoil demo": "people, devices, three helpers and one answer, in half a minute",
    "trefoil live": "the same in your browser, with your own clicks",
    "trefoil bench throughput": "what it costs, beside adding up in the clear",
    "trefoil experiment microbenchmark": "a figure of the paper, from its recipe",
}
# Until a command runs: its modules are imported first.
NOTHING_BEGUN = "Nothing was begun. Run the command again."
MORE_HELP = "Every command explains itself and shows an example: trefoil COMMAND --help\nAll commands: trefoil --help"

EXIT_CODES = (
    "Exit codes: 0 done, 1 a mistake to mend first, 2 a wrong command line, 3 permanently refused, 70 a bug in "
    "Trefoil, 75 retry later, 130 interrupted."
)


# What stands for a value in help, by the type that typer would show.
VALUE_WORDS = {"bool": "", "int": "N", "float": "NUMBER", "str": "TEXT", "Path": "FILE", "path": "FILE", "file": "FILE"}


def value_word(option: Any, ctx: Any) -> str:  # Any: typer's classes, which differ by version
    """Return what stands for an option's value in help: nothing for a flag, one word or the choices for others."""
    if option.metavar is not None:
        return str(option.metavar)
    as_typer_has_it = re.sub(r"^<(?:list\[)?(.*?)\]?(?: range)?>$", r"\1", option.display_type(ctx))
    return VALUE_WORDS.get(as_typer_has_it, as_typer_has_it)


def no_word(_: Any, ctx: Any) -> None:
    """Show no type for an argument: its description says what it is."""


def argument_name(argument: Any) -> str:  # Any: typer's class, which differs by version
    return str(argument.metavar or argument.name).upper()


def argument_usage(argument: Any) -> str:  # Any: typer's class, which differs by version
    """Return an argument's place in the line of usage, without typer's braces."""
    name = argument_name(argument)
    return (name if argument.required else f"[{name}]") + ("..." if argument.nargs != 1 else "")


if hasattr(TyperOption, "display_type"):
    # Newer versions show <bool>, <list[Path]> and {name}; ours are one word each.
    for kind, method, better in (
        (TyperOption, "display_type_rich", value_word),
        (TyperArgument, "display_type_rich", no_word),
        (TyperArgument, "display_name_raw", property(argument_name)),
        (TyperArgument, "_usage_display_name", argument_usage),
    ):
        setattr(kind, method, better)


class Entry(NamedTuple):
    """One row of the command table: where the command is defined, and what `trefoil --help` says about it."""

    target: str
    help: str

    def load(self, name: str) -> Any:  # Any: typer's command class differs by version
        """Import the command. The target is a function, a group, or a group that has `name` among its commands."""
        module, _, attribute = self.target.partition(":")
        target = getattr(importlib.import_module(module), attribute)
        if isinstance(target, typer.Typer):
            group = typer.main.get_group(target)
            command = group.commands.get(name, group)
        else:
            alone = typer.Typer(add_completion=False)
            alone.command(name)(target)
            command = typer.main.get_command(alone)
        command.name = name
        return command


# By panel of `trefoil --help`, in the order in which a newcomer meets them.
COMMANDS = {
    "Try it": {
        "demo": Entry(
            "benchmarks.demos.demo:demo",
            "Show all of Trefoil once: people, devices, sealed reports, three helpers, one noisy answer.",
        ),
        "live": Entry(
            "benchmarks.demos.live.live:live",
            "Click an ad, buy the shoes, and watch the report, the three helpers and your budget, in your own browser.",
        ),
    },
    "As a person's device": {
        "device": Entry("device.commands:app", "Act as one person's device."),
        "browser": Entry("device.browser.commands:browser", "Put your device into your own Chromium, Chrome or Edge."),
    },
    "As a querier": {
        "reports": Entry(
            "benchmarks.workloads.reports:reports", "Make a batch of reports from a seeded workload, on all cores."
        ),
        "collect": Entry(
            "protocol.collector.commands:app",
            "Take sealed reports over HTTPS until interrupted. POST one report to /reports.",
        ),
        "batch": Entry("protocol.collector.commands:app", "Batches of sealed reports: list, merge, split, check."),
        "query": Entry(
            "protocol.querier.command:query",
            "Query three helpers for the noisy histogram of a batch; list, fetch and withdraw queries.",
        ),
        "bias": Entry(
            "protocol.querier.own_record:bias",
            "Show which answers spent budgets cannot have biased, from your own batches alone. It costs no budget.",
        ),
        "regression": Entry(
            "protocol.querier.regression.view:regression",
            "Learn from conversions that stay private: plan, fit and use a logistic regression.",
        ),
    },
    "As an operator": {
        "launch": Entry(
            "mpc_helpers.commands:app",
            "Create three helpers on this machine, run them, and show their state until Ctrl-C.",
        ),
        "keygen": Entry("mpc_helpers.commands:app", "Create keys."),
        "helper-set": Entry("protocol.cli.commands:helper_set", "Put a helper set together, sign it, check it."),
        "helper": Entry(
            "mpc_helpers.commands:app",
            "Run one helper until it is stopped. SIGHUP makes it reload its sites.",
        ),
        "doctor": Entry(
            "mpc_helpers.commands:app",
            "Check the ports, clocks, keys, helper set, ledgers and disks of three helpers, and say what to do.",
        ),
        "site": Entry("mpc_helpers.commands:app", "Manage the sites that a helper answers."),
        "ledger": Entry("mpc_helpers.commands:app", "Manage a helper's report ledger."),
        "alarm": Entry("mpc_helpers.commands:app", "Manage a helper's alarm: failed proofs of joint noise."),
    },
    "As a researcher": {
        "bench": Entry("benchmarks.costs.commands:bench", "Measure what things cost on this machine."),
        "experiment": Entry(
            "benchmarks.experiments.commands:app", "The paper's experiments: every figure with one command."
        ),
        "plan": Entry(
            "benchmarks.experiments.commands:plan",
            "Compute the ε that a query needs, its cost to a device under each policy, and the queries a month.",
        ),
        "conformance": Entry("device.web.conformance:conformance", "Check the device against a standard's scenarios."),
    },
}


class LazyCommands(UserDict[str, Any]):  # Any: typer's command class differs by version
    """The commands by name. Each is its row of the table until it is read, which imports its module."""

    def __getitem__(self, name: str) -> Any:
        command = super().__getitem__(name)
        if isinstance(command, Entry):
            command = self.data[name] = command.load(name)
        return command


class RoleGroup(TyperGroup):
    """The root command. Its own help lists the table; everything else loads the command that was typed."""

    def __init__(self, **settings: Any) -> None:  # Any: whatever typer passes to a group
        super().__init__(**settings)
        self.commands = LazyCommands({name: entry for panel in COMMANDS.values() for name, entry in panel.items()})
        self._listing = False

    def list_commands(self, _ctx: Any) -> list[str]:
        return list(self.commands)

    def get_command(self, _ctx: Any, cmd_name: str) -> Any:
        return _listed(cmd_name) if self._listing else self.commands.get(cmd_name)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self._listing = True
        try:
            super().format_help(ctx, formatter)
        finally:
            self._listing = False

    def invoke(self, ctx: Any) -> Any:
        """Run a command; one that keeps partial work when it is interrupted says so itself."""
        with keeping("Files that were complete are whole, and nothing else was kept. Run the command again."):
            return super().invoke(ctx)


def _listed(name: str) -> TyperCommand:
    """Return a stand-in that has what a row of `--help` shows, and imports nothing."""
    panel, entry = next((panel, entries[name]) for panel, entries in COMMANDS.items() if name in entries)
    return TyperCommand(name, help=entry.help, rich_help_panel=panel)


app = typer.Typer(
    name="trefoil",
    cls=RoleGroup,
    help="Measure advertising without watching people.",
    epilog=EXIT_CODES,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": HELP_OPTIONS},
)


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
        out.print(f"trefoil {metadata.version('trefoil')}", markup=False, highlight=False)
    elif context.invoked_subcommand is None:
        _welcome()


def _welcome() -> None:
    """Print the first words: two columns where the terminal is wide enough, and else one below the other."""
    out.print(f"{WELCOME}\n\nTry first:", markup=False, highlight=False)
    first = Table.grid(padding=(0, 2))
    for command, shows in TRY_FIRST.items():
        first.add_row(f"  {command}", shows)
    if fits(first):
        out.print(first, highlight=False)
    else:
        for command, shows in TRY_FIRST.items():
            out.print(f"  {command}", markup=False, highlight=False)
            out.print(Padding(shows, (0, 0, 0, 6)), markup=False, highlight=False)
    out.print(f"\n{MORE_HELP}\n", markup=False, highlight=False)


class Exit(IntEnum):
    """The exit codes of every command: they tell a script whether a retry can help."""

    MISTAKE = 1
    USAGE = 2
    REFUSED = 3
    DEFECT = 70
    TRY_AGAIN = 75
    INTERRUPTED = 130


@cache
def tree() -> Any:  # Any: the class differs by version of typer
    return typer.main.get_command(app)


def run(arguments: Sequence[str]) -> int:
    """Run a command and return its exit code. A mistake gets one clear line and what to do next, never a traceback."""
    arguments = _with_json_places(arguments)
    wants_json = _wants_json(arguments)
    try:
        with keeping(NOTHING_BEGUN):
            _refuse_repetition(arguments)
        code = tree().main(args=list(arguments), prog_name="trefoil", standalone_mode=False)
        if code == Exit.INTERRUPTED:
            # Typer's own word for an interrupt before the command began: it shows help, or parses.
            raise Interrupted("interrupted", NOTHING_BEGUN)
    except Interrupted as error:
        # Without `_typed`, which imports the command: numpy refuses a second import after one that was interrupted.
        return _complain(str(error), error.hint, Exit.INTERRUPTED, wants_json, error.kind)
    except TrefoilError as error:
        _LOG.debug("where it arose", exc_info=True)
        path, command, _ = _typed(arguments)
        hint = error.hint or f"See: {' '.join(path)} --help"
        return _complain(with_option(str(error), _options_of(command)), hint, _exit_of(error), wants_json, error.kind)
    except USAGE_ERROR as error:
        return _complain_of_usage(error, wants_json)
    except BrokenPipeError:
        # The reader of a pipe has closed it, as `head` does.
        out.on_broken_pipe()
        return Exit.MISTAKE
    except OSError as error:
        # What our code expects of files it turns into a TrefoilError; the rest is a path or a permission.
        _LOG.debug("where it arose", exc_info=True)
        what = f"{error.filename}: " if error.filename else ""
        full = error.errno in FULL
        hint = FREE_SPACE if full else "Check that the path exists and that you may use it."
        kind = ErrorKind.NO_SPACE if full else None
        return _complain(f"{what}{error.strerror or error}", hint, Exit.MISTAKE, wants_json, kind)
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
    hint = "This is a bug in Trefoil, not your mistake. Run it again as trefoil -v ... and report the traceback."
    return _complain(f"defect in Trefoil: {type(error).__name__}: {error}", hint, Exit.DEFECT, wants_json)


def _typed(arguments: Sequence[str]) -> tuple[list[str], Any, list[str]]:  # Any: typer's class differs by version
    """Return the words that name the command that was typed, the command itself, and the arguments after them."""
    path, command, rest = ["trefoil"], tree(), list(arguments)
    while rest and hasattr(command, "commands"):
        if rest[0] in command.commands:
            path, command = [*path, rest[0]], command.commands[rest.pop(0)]
        elif rest[0] in GLOBAL_OPTIONS and len(path) == 1:
            rest.pop(0)
        elif "run" in command.commands and rest[0].startswith("-"):
            # `trefoil query --reports …` is short for `trefoil query run`.
            command = command.commands["run"]
        else:
            break
    return path, command, rest


def _options_of(command: Any) -> dict[str, Any]:  # Any: typer's classes differ by version
    return {name: each for each in command.params for name in (*each.opts, *each.secondary_opts) if name[:1] == "-"}


def _refuse_repetition(arguments: Sequence[str]) -> None:
    """Raise an error if an option that takes one value was given twice: the parser would take the last and say nothing.

    A query cannot be taken back, so `--reports a --reports b` must not ask about b alone.
    """
    path, command, rest = _typed(arguments)
    if hasattr(command, "commands"):
        return
    # What the parser itself finds, in order; it leaves other mistakes to the command's own parsing.
    parser = command.make_parser(typer.Context(command, resilient_parsing=True, help_option_names=HELP_OPTIONS))
    _, _, given = parser.parse_args(args=rest)
    for option in given:
        if given.count(option) > 1 and not (option.multiple or option.count or option.is_flag):
            name = option.opts[0]
            raise TrefoilError(
                f"{name} was given twice, and takes one value",
                REPEATED_HINTS.get(f"{path[1]} {name}", "Give it once."),
                kind=ErrorKind.CONFLICTING_OPTIONS,
            )


def _with_json_places(arguments: Sequence[str]) -> list[str]:
    """Insert the place that `--json` alone means, standard output: where nothing follows it, or another option does."""
    words = list(arguments)
    for place in range(len(words) - 1, -1, -1):
        following = words[place + 1 : place + 2]
        if words[place] == "--json" and (not following or (following[0].startswith("-") and following[0] != "-")):
            words.insert(place + 1, "-")
    return words


def _exit_of(error: TrefoilError) -> Exit:
    """Return the exit code: permanently refused, retry later, or a mistake to correct first."""
    match error.retryable:
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


def _complain(what: str, hint: str, code: Exit, wants_json: bool, kind: ErrorKind | None = None) -> Exit:
    err.quiet = False
    what, hint = _lines(what), _lines(hint)
    if wants_json:
        failure = {"code": code.name.lower(), "exit": int(code), "message": what, "hint": hint}
        if kind is not None:
            failure["kind"] = kind.name.lower()
        write_json(STANDARD_OUTPUT, {"error": failure})
    err.print(f"error: {what}", style="bold red", markup=False, highlight=False, soft_wrap=True)
    if hint:
        err.print(f"hint:  {hint}", markup=False, highlight=False, soft_wrap=True)
    return code


def _lines(text: str) -> str:
    """Return text that may come from a file or a peer, made safe for a terminal, line by line."""
    return "\n".join(map(printable, text.splitlines()))


def _wants_json(arguments: Sequence[str]) -> bool:
    """Return whether standard output must be JSON alone, even if the command fails."""
    return "--json=-" in arguments or ("--json", "-") in pairwise(arguments)


# How the library's errors go on after a parameter's name.
OF_A_PARAMETER = ("must be", "has more than", "names ")
# The library's parameters that another option sets than one of the same name.
OPTION_NAMES = {
    "histogram_index": "--bucket",
    "histogram_size": "--buckets",
    "match_values": "--match-value",
    "conversion_sites": "--conversion-site",
    "conversion_callers": "--conversion-caller",
    "impression_sites": "--impression-site",
    "impression_callers": "--impression-caller",
    "query_sensitivity": "--max-value",
    "κ": "--kappa",
    "labels": "--conversion-label",
    "publishers": "--publisher",
    "advertisers": "--advertiser",
    "shown_ago": "--ago",
}


def with_option(message: str, options: Container[str]) -> str:
    """Rewrite an error about the parameter `x` to name the option `--x`, if the command has it."""
    name, _, rest = message.partition(" ")
    option = OPTION_NAMES.get(name, f"--{name.replace('_', '-')}")
    return f"{option} {rest}" if option in options and rest.startswith(OF_A_PARAMETER) else message

"""The command line: help, exit codes, JSON also on failure, every command of the tree, narrow terminals, progress."""

from __future__ import annotations

import ast
import builtins
import io
import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from rich.table import Table
from typer.testing import CliRunner

import trefoil
from benchmarks.demos import demo
from device import commands as device_commands
from device.budget import FilterKind, FilterState
from device.epoch import EpochCalendar
from device.stores.storage import EpochEntry, EpochOutcome, ReportRecord
from mpc_helpers.local import view as local_view
from mpc_helpers.local.launcher import Trio, prepare
from mpc_helpers.local.view import HelperHealth, table_of
from protocol.answer import Answer, RejectionCounts
from protocol.cli import app as cli
from protocol.cli import console
from protocol.cli.console import plain_table
from protocol.cli.options import plot_place
from protocol.collector.batches import Every
from protocol.errors import Rejection, TrefoilError
from protocol.noise import NoiseMode
from protocol.querier import own_record, series, view
from protocol.querier.own_record import Assumptions, OwnRecord, QueriedBatch
from protocol.querier.result import BiasBound, QueryResult, assess
from protocol.querier.saved_query import ReportSpan
from protocol.querier.series import PeriodAnswer
from protocol.status import QueryState, QueryStatus
from protocol.units import DAY
from tests.support.mistakes import commands, options
from tests.support.protocol_samples import HELPER_SET, NOW, query, report
from tests.support.three_helpers import real_now

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str, **settings: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "trefoil", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False, **settings)


def test_help_tells_the_story_in_order() -> None:
    shown = CliRunner().invoke(cli.app, ["-h"]).stdout
    places = [shown.index(panel) for panel in cli.COMMANDS]
    assert places == sorted(places)


@pytest.mark.parametrize("name", sorted(cli.tree().commands))
def test_help_says_of_each_command_what_the_command_says(name: str) -> None:
    """The table is read instead of the commands' modules, so it must not drift from them."""
    (entry,) = (entries[name] for entries in cli.COMMANDS.values() if name in entries)
    assert entry.help == " ".join(cli.tree().commands[name].help.split("\n\n")[0].split())


def test_the_version() -> None:
    assert CliRunner().invoke(cli.app, ["--version"]).stdout == f"trefoil {trefoil.__version__}\n"


def test_a_failure_is_json_where_json_was_asked_for() -> None:
    done = run("batch", "check", "nowhere.batch", "--json", "-")
    assert done.returncode == cli.Exit.MISTAKE
    failure = json.loads(done.stdout)["error"]
    assert failure["code"] == "mistake" and "nowhere.batch" in failure["message"]
    assert "error:" in done.stderr and "Traceback" not in done.stderr


def test_without_json_standard_output_stays_empty_and_verbose_shows_where() -> None:
    done = run("batch", "check", "nowhere.batch")
    assert done.stdout == "" and "Traceback" not in done.stderr
    assert "Traceback" in run("-v", "batch", "check", "nowhere.batch").stderr


def test_a_noise_mode_is_a_choice() -> None:
    done = run("demo", "--noise", "loud")
    assert done.returncode == cli.Exit.USAGE
    assert all(f"'{mode.value}'" in done.stderr for mode in NoiseMode) and "Traceback" not in done.stderr


def test_what_a_plain_installation_lacks_is_named_with_what_brings_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """As `pip install .` leaves it, without an extra."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "pyarrow"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "log").touch()
    assert cli.run(["experiment", "criteo", "--data", str(tmp_path / "log")]) == cli.Exit.MISTAKE
    said = capsys.readouterr().err
    assert "this needs pyarrow" in said and "pip install 'trefoil[experiments]'" in said


def test_a_defect_is_said_to_be_one_and_verbose_shows_where(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("protocol.collector.commands.summary", lambda _: 1 / 0)
    with caplog.at_level(10):
        assert cli.run(["batch", "ls", "shop.batch", "--json", "-"]) == cli.Exit.DEFECT
    shown = capsys.readouterr()
    assert json.loads(shown.out)["error"]["code"] == "defect"
    assert "defect in Trefoil: ZeroDivisionError" in shown.err
    assert "ZeroDivisionError" in caplog.text


def test_an_interrupted_command_says_what_was_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("protocol.collector.commands.check", interrupted)
    assert cli.run(["batch", "check", "shop.batch"]) == cli.Exit.INTERRUPTED
    assert "nothing else was kept" in capsys.readouterr().err
    monkeypatch.setattr("protocol.querier.command.ask_and_show", interrupted)
    asked = ["query", "--reports", "a", "--helpers", "b", "--site-key", "c"]
    assert cli.run(asked) == cli.Exit.INTERRUPTED
    assert "saved beside the batch" in capsys.readouterr().err


def test_an_interrupt_while_modules_are_imported_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C in the first half second: before the command line is imported, and while a command is."""
    real = builtins.__import__

    def interrupted(module: str, *rest: Any) -> Any:  # Any: as Python has it
        if module == "protocol.cli.stopping":
            raise KeyboardInterrupt
        return real(module, *rest)

    def load(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(builtins, "__import__", interrupted)
        with pytest.raises(SystemExit) as ended:
            trefoil.main()
    assert ended.value.code == cli.Exit.INTERRUPTED and "error: interrupted\nhint: " in capsys.readouterr().err
    with monkeypatch.context() as patched:
        patched.setattr(cli, "_refuse_repetition", load)
        patched.setattr(
            cli, "_typed", lambda _: 1 / 0
        )  # as numpy does at its second import, if the first was interrupted
        assert cli.run(["batch", "ls", "--json", "-"]) == cli.Exit.INTERRUPTED
    assert only_json(capsys.readouterr().out)["error"]["kind"] == "interrupted"
    with monkeypatch.context() as patched:
        patched.setattr(cli.RoleGroup, "format_help", load)
        assert cli.run(["--help"]) == cli.Exit.INTERRUPTED
    assert "error: interrupted\nhint: " in capsys.readouterr().err


def test_a_quiet_command_quietens_nothing_after_it(capsys: pytest.CaptureFixture[str]) -> None:
    """A notebook runs several in one process."""
    arguments = "-q plan --reports 2000 --value-cap 5 --error 0.05 --confidence 0.99"
    assert cli.run(arguments.split()) == 0
    console.err.print("still here")
    assert "still here" in capsys.readouterr().err


COMMANDS = commands()
# A daemon has a log and no result.
WITHOUT_RESULT = {"helper"}
WITH_JSON = sorted(set(COMMANDS) - WITHOUT_RESULT)
# What takes helpers, a browser or minutes: run with --json by the test files named.
RUN_ELSEWHERE = {
    "reports": ("demo",),
    "live": ("live",),
    "dashboard": ("device dashboard",),
    "browser_install": ("browser install", "browser status", "browser uninstall"),
    "collector": ("collect",),
    "helper_commands": ("query run", "ledger create", "ledger rebuild"),
    "query": ("query list", "query withdraw", "query fetch"),
    "series": ("query series",),
    "regression": ("regression fit", "regression predict"),
    "stopping": ("launch",),
    "config": ("helper reload",),
    "monitoring": ("helper status",),
    "doctor": ("doctor",),
    "results": ("bench results",),
    "report_ledger": ("ledger upgrade", "ledger check"),
    "postgres_ledger": ("ledger take-over",),
    "checked_queries": ("bench validity",),
    "costs": ("bench noise", "bench ledger"),
    "throughput": ("bench throughput",),
    "device_timing": ("bench device",),
    "browser_timing": ("bench browser",),
    "experiments_commands": (
        "experiment bias",
        "experiment patcg",
        "experiment criteo",
        "experiment all",
        "experiment regression",
    ),
    "experiments_attack": ("experiment attack",),
}
SUCCESSES = [
    "device create --db other.db",
    "device impression news.example --db ann.db --bucket 1",
    "device conversion shop.example --db ann.db --publisher news.example",
    "device convert shop.example --db ann.db --helpers trio/helpers.json --buckets 4 --batch shop.batch",
    "device budget --db ann.db",
    "device reports --db ann.db",
    "device service add north --db ann.db --helpers trio/helpers.json",
    "device service list --db ann.db",
    "device service renew north --db ann.db --helpers trio/helpers.json",
    "device service remove north --db ann.db",
    "device clear --db ann.db --site shop.example",
    "device off --db ann.db",
    "device on --db ann.db",
    "regression features --rows rows.csv --category advertiser --number hour --features features.json",
    "regression plan --features features.json --reports 20000 --rate 0.05",
    "device label news.example --db ann.db --helpers trio/helpers.json --features features.json --field hour=2"
    " --field advertiser=a.example --ago 700000 --advertiser a.example --batch news.batch --records news.records",
    "reports --helpers trio/helpers.json --count 3 --buckets 4 --unit count --out crowd.batch --show-truth",
    "batch ls crowd.batch",
    "query audit crowd.batch",
    "batch check crowd.batch",
    "batch merge crowd.batch --out merged.batch",
    "batch split crowd.batch --out days",
    "bias crowd.batch --per-device 1",
    "keygen site shop.key",
    "keygen tls --name shop.example --dir tls",
    f"site add cafe.example --key {'ab' * 32} --config trio/helper-1/config.json",
    "site list --config trio/helper-1/config.json",
    "site remove cafe.example --config trio/helper-1/config.json",
    "keygen helper --name north --address https://north.example:8443 --dir north",
    "keygen hpke --dir north",
    "keygen helper --name south --address https://south.example:8443 --dir south",
    "keygen helper --name west --address https://west.example:8443 --dir west",
    "helper-set new set.json --entry north/entry.json --entry south/entry.json --entry west/entry.json",
    "helper-set sign set.json --key north/identity.key",
    "helper-set join joined.json --copy set.json --copy set.json",
    "helper-set verify trio/helpers.json",
    "ledger export --config trio/helper-1/config.json --lost-by 2 --out for-2",
    "ledger accept-peer --config trio/helper-1/config.json --helper 2",
    "ledger accept-clock --config trio/helper-1/config.json",
    "alarm show --config trio/helper-1/config.json",
    "alarm clear --config trio/helper-1/config.json",
    "bench report --rounds 1 --buckets 2",
    "experiment microbenchmark --scale 0.01 --participation 0.5",
    "plan --reports 2000 --value-cap 5",
    f"conformance w3c {ROOT / 'tests' / 'data' / 'scenarios'}",
]


def only_json(text: str) -> Any:
    """The one document that `text` is; fails if anything is before or after it."""
    document = json.loads(text)
    assert text == json.dumps(document, indent=2) + "\n"
    return document


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def named(line: str) -> str:
    """The command that a command line runs."""
    words = line.split()
    return next(name for count in (1, 2, 3) if (name := " ".join(words[:count])) in COMMANDS)


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_results_and_pictures_are_asked_for_in_one_way(name: str) -> None:
    known = options(COMMANDS[name])
    assert ("--json" in known) == (name in WITH_JSON), f"{name} shows results that no program can read"
    assert name not in WITH_JSON or "nothing else is printed there" in known["--json"].help
    drawing = [option for option in known if "plot" in option or option == "--draw"]
    assert drawing in ([], ["--plot"])
    if drawing:
        assert ".png, .svg or .pdf" in known["--plot"].help


@pytest.mark.parametrize("name", WITH_JSON)
def test_a_wrong_option_is_json_too(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([*name.split(), "--json", "-", "--nonsense"]) == cli.Exit.USAGE
    shown = capsys.readouterr()
    error = only_json(shown.out)["error"]
    assert (error["code"], error["exit"]) == ("usage", 2)
    assert "--nonsense" in error["message"] and f"trefoil {name} --help" in error["hint"]
    assert shown.err.startswith("error: ") and "Traceback" not in shown.err


@pytest.mark.parametrize("name", WITH_JSON)
def test_an_impossible_place_is_noticed_before_anything_else(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of two mistakes in one line, the place of the results is named: no work comes before it."""
    (folder / "file").touch()
    code = cli.run([*name.split(), "--json", "file/result.json"])
    said = capsys.readouterr().err
    if "Missing" in said:
        # What is missing comes first only where it comes first in the command.
        assert code == cli.Exit.USAGE
    else:
        assert code == cli.Exit.MISTAKE and "--json: file is not a folder" in said
    assert [each.name for each in folder.iterdir()] == ["file"]


@pytest.mark.parametrize("name", ["", *sorted(COMMANDS)])
def test_help_has_an_example_and_no_types_of_python_and_every_option_fits(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 80)
    assert cli.run([*name.split(), "-h"]) == 0
    page = capsys.readouterr().out
    shown = " ".join(page.split())
    assert not name or f"Example: trefoil {name.split()[0]}" in shown
    assert "--help -h" in shown
    assert not re.findall(r"<\w+|\{\w+\}|list\[", page)
    assert max(map(len, page.splitlines())) <= 80 and not re.findall(r"--[\w-]+…", page)


def test_the_weight_of_the_side_query_has_one_type_and_one_sentence() -> None:
    named = {name: options(command)["--kappa"] for name, command in COMMANDS.items() if "--kappa" in options(command)}
    assert len(named) >= 8
    for name, option in named.items():
        assert option.help.startswith("Weight of the bias side query (κ), in the value's unit"), name
        assert cli.value_word(option, None) == "NUMBER", name


@pytest.mark.parametrize("place", [["--json"], ["--json", "-"], ["--json=-"]])
def test_json_alone_means_standard_output(place: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["plan", *place, "--reports", "9", "--value-cap", "1"], ["plan", "--reports", "9", *place]):
        code = cli.run(words)
        shown = only_json(capsys.readouterr().out)
        assert ("epsilon" in shown) if code == 0 else shown["error"]["code"] == "usage"


def test_json_does_not_replace_a_file_of_another_kind(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "shop.batch").write_bytes(b"trefoil")
    (folder / "old.json").write_text("{}")
    (folder / "site.key").write_text("{}")
    (folder / "site.key").chmod(0o600)
    assert cli.run(["plan", "--reports", "9", "--value-cap", "1", "--json", "site.key"]) == cli.Exit.MISTAKE
    assert "a private file" in capsys.readouterr().err and (folder / "site.key").read_text() == "{}"
    assert cli.run(["plan", "--reports", "9", "--value-cap", "1", "--json", "shop.batch"]) == cli.Exit.MISTAKE
    assert "would be replaced" in capsys.readouterr().err and (folder / "shop.batch").read_bytes() == b"trefoil"
    assert cli.run(["plan", "--reports", "9", "--value-cap", "1", "--json", "old.json"]) == 0
    assert "epsilon" in (folder / "old.json").read_text()


@pytest.mark.parametrize(
    ("line", "twice"),
    [
        ("query --reports a --reports b --helpers c --site-key d", "--reports"),
        ("query run --reports=a --helpers c --reports b --site-key d", "--reports"),
        ("-q plan --reports 1 --reports=2 --value-cap 3", "--reports"),
        ("bench report --buckets 1 --buckets 2 --rounds 0", ""),
        ("experiment microbenchmark --mpc --mpc --seeds 0", ""),
        ("device impression news.example --db --db --db --bucket x", "--db"),
    ],
)
def test_an_option_that_takes_one_value_is_given_once(
    line: str, twice: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The parser would take the last one without a word, and a query cannot be taken back."""
    code, said = cli.run(line.split()), capsys.readouterr().err
    assert (f"{twice} was given twice" in said) == bool(twice)
    assert code == (cli.Exit.MISTAKE if twice else cli.Exit.USAGE)
    assert ("trefoil batch merge" in said) == line.startswith("query")


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_the_welcome_fits(width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(console.out, "_width", width)
    assert cli.run([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    for command, shows in cli.TRY_FIRST.items():
        place = next(number for number, line in enumerate(lines) if line.strip().startswith(command))
        assert " ".join(" ".join(lines[place : place + 4]).split()).startswith(f"{command} {shows}")


def test_every_command_is_run_somewhere_with_json() -> None:
    elsewhere = {name for names in RUN_ELSEWHERE.values() for name in names}
    assert {named(line) for line in SUCCESSES} | elsewhere == set(WITH_JSON)
    assert not {named(line) for line in SUCCESSES} & elsewhere
    for file in RUN_ELSEWHERE:
        assert list((ROOT / "tests").glob(f"*/test_{file}.py")), file


@pytest.fixture(scope="module")
def trio(tmp_path_factory: pytest.TempPathFactory) -> Trio:
    return prepare(tmp_path_factory.mktemp("every") / "trio", now=real_now(), sites={"shop.example": ["shop.example"]})


def test_a_success_is_json_and_nothing_else(
    trio: Trio, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One story, as the commands need each other's files."""
    shutil.copytree(trio.folder, tmp_path / "trio")
    monkeypatch.chdir(tmp_path)
    Path("rows.csv").write_text("advertiser,hour\n" + "a.example,1\nb.example,2\n" * 20)
    config = json.loads(Path("trio/helper-1/config.json").read_text())
    proofs = Path("trio/helper-1") / config["data"] / "failed-proofs"
    proofs.parent.mkdir(exist_ok=True)
    for line in SUCCESSES:
        if line.startswith("alarm show"):
            from mpc_helpers.identity.config import load_config
            from mpc_helpers.mpc.failed_proofs import FailedProofs

            FailedProofs(load_config(Path("trio/helper-1/config.json")).failed_proofs).prepare()
        code = cli.run(["-q", *line.split(), "--json", "-"])
        shown = capsys.readouterr()
        assert (code, shown.err) == (0, ""), line
        only_json(shown.out)


def test_nobody_writes_to_standard_output_but_the_console() -> None:
    """What goes through the console is silent beside JSON; this is why no command need be asked one by one."""
    allowed = {"protocol/cli/console.py", "trefoil.py", "benchmarks/throughput/naive_mpyc.py"}
    for package in ("protocol", "device", "mpc_helpers", "benchmarks"):
        for path in (ROOT / package).rglob("*.py"):
            if str(path.relative_to(ROOT)) in allowed:
                continue
            for node in ast.walk(ast.parse(path.read_text())):
                assert not (isinstance(node, ast.Attribute) and node.attr == "stdout" and _is_sys(node.value)), path
                assert not (isinstance(node, ast.Call) and _called(node) in ("print", "Console", "echo")), path


def _is_sys(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "sys"


def _called(node: ast.Call) -> str:
    return node.func.id if isinstance(node.func, ast.Name) else ""


def test_whoever_closes_the_output_early_ends_the_printing_and_not_the_work(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    line = f"{sys.executable} -m trefoil plan --reports 9 --value-cap 1 --json {path} | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("0\n", "")
    assert json.loads(path.read_text())


def test_json_into_a_closed_pipe_is_no_traceback() -> None:
    line = f"{sys.executable} -m trefoil plan --reports 9 --value-cap 1 --json - | true"
    done = subprocess.run(["bash", "-c", line], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == ""


def test_a_terminal_without_greek_letters() -> None:
    environment = {"PATH": "/usr/bin:/bin", "PYTHONIOENCODING": "ascii"}
    done = run("plan", "--reports", "2000", "--value-cap", "5", env=environment)
    assert done.returncode == 0 and "\\u03b5" in done.stdout and done.stderr == ""


def test_a_device_such_as_null_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    import os
    import threading

    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    heard: list[str] = []
    reader = threading.Thread(target=lambda: heard.append(pipe.read_text()), daemon=True)
    reader.start()
    console.write_json(pipe, {"answer": 1})
    reader.join(10)
    assert json.loads(heard[0]) == {"answer": 1}
    assert pipe.is_fifo()


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("picture.gif", "no picture's name"),
        ("file/picture.png", "file is not a folder"),
        ("file", "file is not a folder"),
        ("folder.png", "is a folder"),
    ],
)
def test_a_place_where_nothing_can_be_drawn(place: str, words: str, folder: Path) -> None:
    (folder / "file").touch()
    (folder / "folder.png").mkdir()
    with pytest.raises(TrefoilError, match=words):
        plot_place(Path(place))


def test_one_rule_says_where_pictures_go(folder: Path) -> None:
    assert console.picture_file(Path("a/b.svg"), "answer") == Path("a/b.svg")
    assert console.picture_file(Path("a/b.svg"), "figure-4a", only=False) == Path("a/b-figure-4a.svg")
    assert console.picture_file(Path("a"), "figure-4a", only=False) == Path("a/figure-4a.png")
    assert plot_place(Path("new/folder")) == Path("new/folder")
    assert list(folder.iterdir()) == []


def test_without_matplotlib_nothing_is_begun(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr("protocol.cli.options.find_spec", lambda _: None)
    with pytest.raises(TrefoilError, match="--plot needs matplotlib") as caught:
        plot_place(Path("figure.png"))
    assert "pip install" in caught.value.hint


WIDTHS = (60, 80)
LONG_SITE = "the-shop-with-the-long-name.example"
# What a table is drawn with, and bars, which may differ from one width to another.
DRAWN = set(" \n─━│┃┏┓┗┛┡┩╇┳┴┼├┤└┘┌┐┬╷╵╴╶█▉▊▋▌▍▎▏")


def rendered(table: Table, width: int) -> str:
    screen = io.StringIO()
    Console(file=screen, width=width, color_system=None).print(table)
    return screen.getvalue()


def said(text: str) -> Counter[str]:
    """Every letter and digit, however the lines are broken."""
    return Counter(each for each in text if each not in DRAWN)


def whole(table: Table, width: int) -> bool:
    """Whether the table says at this width what it says where there is all the room in the world."""
    shown = rendered(table, width)
    assert max(map(len, shown.splitlines())) <= width
    return said(shown) == said(rendered(table, 1000))


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> list[Table]:
    """Every table that a command prints, as it is handed to rich."""
    found: list[Table] = []
    ordinary = Console.print

    def noted(self: Console, *objects: Any, **how: Any) -> None:  # Any: whatever rich prints, and how
        if isinstance(self, console.PipeConsole):
            found.extend(each for each in objects if isinstance(each, Table))
        ordinary(self, *objects, **how)

    monkeypatch.setattr(Console, "print", noted)
    return found


def check(tables: Sequence[Table], count: int) -> None:
    assert len(tables) == count
    for table in tables:
        for width in WIDTHS:
            assert whole(table, width), rendered(table, width)


def result_of(histogram: list[int]) -> QueryResult:
    asked = query(site=LONG_SITE, buckets=len(histogram), unit="purchases", noise=NoiseMode.LOCAL)
    counted = (np.zeros(1, dtype=np.uint8),) * 3
    left_out: tuple[RejectionCounts, RejectionCounts, RejectionCounts] = ({Rejection.SEEN: 1}, {}, {})
    answer = Answer(histogram, None, 123_456, 123_457, left_out, asked.noise, 1_000_000, 2, 1, bytes(32), counted)
    return assess(asked, answer, {}, 10)


def test_the_check_notices_what_is_cut() -> None:
    table = Table("a", "b")
    table.add_row("word " * 20, "https://a-very-long-name.example:8443")
    assert whole(console.fold(table), 30)
    for column in table.columns:
        column.overflow = "ellipsis"
    assert not whole(table, 30)


@pytest.mark.parametrize("width", [30, 60, 120])
def test_columns_that_may_not_be_broken_are_broken_rather_than_cut(
    width: int, tables: list[Table], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of experiments and benchmarks. Rich cuts them off without a sign."""
    monkeypatch.setattr(console.out, "_width", width)
    table = plain_table("a title", ("system", "avg ε", "max ε", "run", "RMSRE"), ("system",), no_wrap=True)
    for _ in range(3):
        table.add_row("cookie-monster, with a side query", "0.123456", "1.2345", "1000/1000", "0.12345")
    console.out.print(table)
    (printed,) = tables
    assert whole(printed, width)
    assert all(column.no_wrap for column in printed.columns) == (width == 120)


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_a_table_of_many_columns_keeps_its_words_whole(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `trefoil bench noise` has them: side by side where words fit, and else one below the other, every row."""
    monkeypatch.setattr(console.out, "_width", width)
    headings = ("mode", "b", "buckets", "CPU, ms", "bytes sent", "rounds", "var / Laplace", "95 % within", "δ")
    table = Table(*headings, title="Noise by mode, buckets and scale b")
    rows = [("local", "10", "16", "0.1", "480", "1", "1.500", "±36", "0")]
    rows.append(("pairwise", "10", "16", "0.4", "15,326", "11", "1.001", "±30", "6e-39"))
    for row in rows:
        table.add_row(*row)
    console.out.print(table)
    words = re.split(r"[\s│┃]+", capsys.readouterr().out)
    assert [cell for row in rows for cell in row if cell not in words] == []
    assert [word for heading in headings for word in heading.split() if word not in words] == []


def test_an_answer(tables: list[Table]) -> None:
    view.show(result_of([1_000_000, 999_000, -12, *[7] * 20]), ["north", "south", "west"])
    check(tables, 1)


@pytest.mark.parametrize("width", [44, 60, 80, 120])
def test_bars_shrink_together(width: int, tables: list[Table]) -> None:
    """The longest is as long as there is room, and one that is half as long is half as long at every width."""
    view.show(result_of([1000, 500, 0, -4]), ["north", "south", "west"])
    lengths = [line.count("█") for line in rendered(tables[0], width).splitlines() if "█" in line]
    assert len(lengths) == 2 and 8 <= lengths[0] <= console.BAR_WIDTH
    assert lengths[1] == lengths[0] // 2
    assert lengths[0] == console.BAR_WIDTH or width < 80


def test_bars_grow_with_the_value_and_none_is_drawn_below_zero() -> None:
    table = Table(box=None, show_header=False)
    console.add_bars(table)
    for value in (-5, *range(101)):
        table.add_row(console.bar(value, 100))
    below, nothing, *bars, longest = (line.strip() for line in rendered(table, 80).splitlines())
    assert (below, nothing, longest) == ("", "", "█" * console.BAR_WIDTH)
    # A bar of as many characters ends in a fuller one: ▏ is after █.
    assert bars == sorted(bars, key=lambda each: (len(each), -ord(each[-1])))


def test_the_demonstration(tables: list[Table]) -> None:
    demo.show_histograms([1000] * 4, [1003] * 4, result_of([1_004, 1_000, 998, 1_002]), 2311)
    calendar = EpochCalendar(NOW, 7 * DAY)
    states = [FilterState(kind, LONG_SITE, epoch, 1, 10**6) for kind in demo._KINDS for epoch in (-4, 0)]
    device = SimpleNamespace(calendar=lambda: calendar, budget=lambda: states)
    demo.show_budget(device, 3)  # type: ignore[arg-type]
    check(tables, 2)


def test_the_truth_of_a_simulation(tables: list[Table]) -> None:
    from benchmarks.workloads.reports import _table

    console.out.print(_table([1_000_000, 999_000, 0], "purchases"))
    check(tables, 1)


def test_a_device(tables: list[Table]) -> None:
    states = [FilterState(kind, LONG_SITE, epoch, 333_333, 8 * 10**6) for kind in FilterKind for epoch in (-4, 0)]
    console.out.print(device_commands._budget_table(states, EpochCalendar(NOW, 7 * DAY)))
    entries = tuple(EpochEntry(epoch, EpochOutcome.PAID, 250_000) for epoch in range(3))
    console.out.print(device_commands._reports_table([ReportRecord(NOW, 500_000, 2, LONG_SITE, LONG_SITE, entries)]))
    check(tables, 2)


def test_a_list_of_queries(tables: list[Table]) -> None:
    statuses = {party: QueryStatus(QueryState.COMPUTING, 0, 0) for party in range(3)}
    spans = [ReportSpan(LONG_SITE, NOW, NOW, 1_500_000, 2, 1)]
    saved: Any = SimpleNamespace(query=query(keeps_rest=True), made=NOW, spans=spans)
    entries = [view.ListedQuery(saved, statuses)]
    view._show_list(entries, ["north", "south", "west"], Path("folder/of/the/shop.batch"))
    check(tables, 1)


def test_bias(tables: list[Table]) -> None:
    span = ReportSpan(LONG_SITE, NOW - 40 * DAY, NOW, 1_500_000, 2, 1)
    asked = QueriedBatch(Path("a-batch-with-a-long-name.batch"), (span,), (("ab" * 16, BiasBound(1234.5, 0.05)),))
    own_record._show(OwnRecord(LONG_SITE, [asked], Assumptions(1)))
    check(tables, 2)


def test_answers_over_time(tables: list[Table], monkeypatch: pytest.MonkeyPatch) -> None:
    days = [PeriodAnswer(f"2026-11-{day:02}", 1_234, 12, (1_000, 900, -3, 12), 120, 1_222) for day in range(10, 14)]
    monkeypatch.setattr(console.out, "_width", 60)
    with console.out.capture() as captured:
        series._show(days, 4, Every.DAY)
    check(tables, 1)
    assert "more buckets; --json has them all" in captured.get()


def test_helpers(tables: list[Table], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    reasons = [{"text": "the disk has less room than what one query needs"}]
    page = {"ready": False, "status": "degraded", "queries": {"released": 12, "failed": 3}, "reasons": reasons}
    console.out.print(table_of([HelperHealth(helper, page) for helper in HELPER_SET.helpers]))
    monkeypatch.setattr(local_view, "health", lambda _: page)
    running: Any = SimpleNamespace(trio=SimpleNamespace(helper_set=HELPER_SET))
    console.out.print(local_view._table(running))
    path = tmp_path / "helpers.json"
    path.write_text(json.dumps(HELPER_SET.to_json()))
    assert cli.run(["helper-set", "verify", str(path)]) == 0
    check(tables, 3)


def test_batches(tables: list[Table], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from protocol.batch import BatchWriter

    monkeypatch.chdir(tmp_path)
    with BatchWriter("a-batch-with-a-long-name.batch") as batch:
        batch.add(report("one"))
    assert cli.run(["batch", "ls", "a-batch-with-a-long-name.batch"]) == 0
    check(tables, 1)


def test_a_plan(tables: list[Table]) -> None:
    assert cli.run(["plan", "--reports", "2000", "--value-cap", "5"]) == 0
    check(tables, 2)


def test_what_cannot_be_json_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text("old")
    with pytest.raises(TypeError):
        console.write_json(path, {"answer": object()})
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_progress_in_a_log_is_a_line_every_tenth(capsys: pytest.CaptureFixture[str]) -> None:
    with console.progress("opening", 0) as advance:
        advance(0)
    assert "opening: 0 of 0" in capsys.readouterr().err
    with console.progress("opening", 1000) as advance:
        for _ in range(1000):
            advance(note="reports")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 11
    assert lines[-1] == "opening: 1000 of 1000 reports"


def test_progress_on_a_terminal_is_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(console, "err", Console(force_terminal=True, file=screen, width=80))
    with console.progress("opening", 2) as advance:
        advance(note="half")
        advance()
    assert "opening" in screen.getvalue()
    assert "2/2" in screen.getvalue()

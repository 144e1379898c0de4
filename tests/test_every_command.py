"""What holds for every command of the tree: `--json -` is JSON and nothing else, `--plot` and `-h` are the same."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import trefoil
from mpc_helpers.local.launcher import Trio, prepare
from protocol import console, places
from protocol.errors import TrefoilError
from tests.support.command_tree import commands, options
from tests.support.three_helpers import real_now

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = commands()
# A daemon has a log and no result.
WITHOUT_RESULT = {"helper"}
WITH_JSON = sorted(set(COMMANDS) - WITHOUT_RESULT)
# What takes helpers, a browser or minutes: run with --json by the test files named.
RUN_ELSEWHERE = {
    "demo": "demo",
    "live": "live",
    "device dashboard": "dashboard",
    "collect": "collector",
    "query": "helper_commands",
    "regression fit": "regression_commands",
    "regression predict": "regression_commands",
    "launch": "stopping",
    "helper reload": "reloading",
    "helper status": "health",
    "bench results": "results_page",
    "ledger create": "helper_commands",
    "ledger rebuild": "helper_commands",
    "bench validity": "checked_queries",
    "bench noise": "noise_cost",
    "bench throughput": "throughput",
    "bench device": "device_timing",
    "experiment bias": "experiments_commands",
    "experiment patcg": "experiments_commands",
    "experiment criteo": "experiments_commands",
    "experiment all": "experiments_commands",
    "experiment attack": "experiments_attack",
    "experiment regression": "experiments_regression",
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
    "reports --helpers trio/helpers.json --count 3 --buckets 4 --out crowd.batch --show-truth",
    "batch ls crowd.batch",
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
    f"conformance w3c {ROOT / 'tests' / 'scenarios'}",
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


@pytest.mark.parametrize("name", WITH_JSON)
def test_every_command_takes_json_in_the_same_words(name: str) -> None:
    found = options(COMMANDS[name])
    assert "--json" in found, f"{name} shows results that no program can read"
    assert "nothing else is printed there" in found["--json"].help


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_pictures_are_asked_for_in_one_way(name: str) -> None:
    drawing = [option for option in options(COMMANDS[name]) if "plot" in option or option == "--draw"]
    assert drawing in ([], ["--plot"])
    if drawing:
        assert ".png, .svg or .pdf" in options(COMMANDS[name])["--plot"].help


@pytest.mark.parametrize("name", WITH_JSON)
def test_a_wrong_option_is_json_too(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert trefoil.run([*name.split(), "--json", "-", "--nonsense"]) == trefoil.Exit.USAGE
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
    code = trefoil.run([*name.split(), "--json", "file/result.json"])
    said = capsys.readouterr().err
    if "Missing" in said:
        # What is missing comes first only where it comes first in the command.
        assert code == trefoil.Exit.USAGE
    else:
        assert code == trefoil.Exit.MISTAKE and "--json: file is not a folder" in said
    assert [each.name for each in folder.iterdir()] == ["file"]


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_short_and_long_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert trefoil.run([*name.split(), "-h"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"Example: trefoil {name.split()[0]}" in shown
    assert "--help -h" in shown


def test_every_command_is_run_somewhere_with_json() -> None:
    assert {named(line) for line in SUCCESSES} | set(RUN_ELSEWHERE) == set(WITH_JSON)
    assert not {named(line) for line in SUCCESSES} & set(RUN_ELSEWHERE)
    for name, file in RUN_ELSEWHERE.items():
        assert (ROOT / "tests" / f"test_{file}.py").exists(), name


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
        code = trefoil.run(["-q", *line.split(), "--json", "-"])
        shown = capsys.readouterr()
        assert (code, shown.err) == (0, ""), line
        only_json(shown.out)


def test_nobody_writes_to_standard_output_but_the_console() -> None:
    """What goes through the console is silent beside JSON; this is why no command need be asked one by one."""
    allowed = {"protocol/console.py", "trefoil.py"} | {
        f"benchmarks/bench/{each}.py" for each in ("naive_mpyc", "spu_sum")
    }
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


def run_real(*arguments: str, **settings: Any) -> subprocess.CompletedProcess[str]:
    command: Sequence[str] = [sys.executable, "-m", "trefoil", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False, **settings)


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
    done = run_real("plan", "--reports", "2000", "--value-cap", "5", env=environment)
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
        places.plot_place(Path(place))


def test_one_rule_says_where_pictures_go(folder: Path) -> None:
    assert places.picture_file(Path("a/b.svg"), "answer") == Path("a/b.svg")
    assert places.picture_file(Path("a/b.svg"), "figure-4a", only=False) == Path("a/b-figure-4a.svg")
    assert places.picture_file(Path("a"), "figure-4a", only=False) == Path("a/figure-4a.png")
    assert places.plot_place(Path("new/folder")) == Path("new/folder")
    assert list(folder.iterdir()) == []


def test_without_matplotlib_nothing_is_begun(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(places, "find_spec", lambda _: None)
    with pytest.raises(TrefoilError, match="--plot needs matplotlib") as caught:
        places.plot_place(Path("figure.png"))
    assert "pip install" in caught.value.hint

"""The front door: help that tells the story, exit codes for scripts, and JSON that is JSON also on failure."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main
from typer.testing import CliRunner

import trefoil
from protocol import console
from protocol.errors import TrefoilError
from protocol.querier.query_failed import QueryFailed
from protocol.query import NoiseMode
from protocol.status import Shortfall

ROOT = Path(__file__).resolve().parent.parent


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "trefoil", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_help_tells_the_story_in_order() -> None:
    shown = CliRunner().invoke(trefoil.app, ["-h"]).stdout
    places = [shown.index(panel) for panel in trefoil.STORY]
    assert places == sorted(places)


def test_every_command_has_a_place_in_the_story() -> None:
    group = typer.main.get_command(trefoil.app)
    assert isinstance(group, trefoil.Story)
    assert {name for names in trefoil.STORY.values() for name in names} >= set(group.commands)


def test_the_version() -> None:
    assert CliRunner().invoke(trefoil.app, ["--version"]).stdout == f"trefoil {trefoil.__version__}\n"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (TrefoilError("no such file"), trefoil.Exit.MISTAKE),
        (QueryFailed("submit", (0,), "out of reach"), trefoil.Exit.TRY_AGAIN),
        (QueryFailed("submit", (0,), "busy", http_status=429), trefoil.Exit.TRY_AGAIN),
        (QueryFailed("submit", (0,), "broken", http_status=503), trefoil.Exit.TRY_AGAIN),
        (QueryFailed("submit", (0,), "not this site", http_status=403), trefoil.Exit.MISTAKE),
        (QueryFailed("submit", (0,), "withdrawn", http_status=410), trefoil.Exit.REFUSED),
        (
            QueryFailed("agreeing", (), "counted before", shortfall=Shortfall(1, 0, 1, ({}, {}, {}))),
            trefoil.Exit.REFUSED,
        ),
    ],
    ids=["mistake", "silent", "busy", "broken", "wrong key", "refused", "replayed"],
)
def test_exit_codes_tell_again_from_never(error: TrefoilError, code: trefoil.Exit) -> None:
    assert trefoil._exit_of(error) is code


def test_a_failure_is_json_where_json_was_asked_for() -> None:
    done = run("batch", "check", "nowhere.batch", "--json", "-")
    assert done.returncode == trefoil.Exit.MISTAKE
    failure = json.loads(done.stdout)["error"]
    assert failure["code"] == "mistake" and "nowhere.batch" in failure["message"]
    assert "error:" in done.stderr and "Traceback" not in done.stderr


def test_without_json_standard_output_stays_empty_and_verbose_shows_where() -> None:
    done = run("batch", "check", "nowhere.batch")
    assert done.stdout == "" and "Traceback" not in done.stderr
    assert "Traceback" in run("-v", "batch", "check", "nowhere.batch").stderr


def test_a_noise_mode_is_a_choice() -> None:
    done = run("demo", "--noise", "loud")
    assert done.returncode == trefoil.Exit.USAGE
    assert all(f"'{mode.value}'" in done.stderr for mode in NoiseMode) and "Traceback" not in done.stderr


def test_what_a_plain_installation_lacks_is_named_with_what_brings_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """As `pip install .` leaves it, without an extra."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "pyarrow"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "log").touch()
    assert trefoil.run(["experiment", "criteo", "--data", str(tmp_path / "log")]) == trefoil.Exit.MISTAKE
    said = capsys.readouterr().err
    assert "this needs pyarrow" in said and "pip install 'trefoil[experiments]'" in said


def test_a_defect_is_said_to_be_one_and_verbose_shows_where(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("protocol.collector.batches.summary", lambda _: 1 / 0)
    with caplog.at_level(10):
        assert trefoil.run(["batch", "ls", "shop.batch", "--json", "-"]) == trefoil.Exit.DEFECT
    shown = capsys.readouterr()
    assert json.loads(shown.out)["error"]["code"] == "defect"
    assert "defect in Trefoil: ZeroDivisionError" in shown.err
    assert "ZeroDivisionError" in caplog.text


def test_an_interrupted_command_says_what_was_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("protocol.collector.batches.check", interrupted)
    assert trefoil.run(["batch", "check", "shop.batch"]) == trefoil.Exit.INTERRUPTED
    assert "nothing else was kept" in capsys.readouterr().err
    monkeypatch.setattr("protocol.querier.view.ask_and_show", interrupted)
    asked = ["query", "--reports", "a", "--helpers", "b", "--site-key", "c"]
    assert trefoil.run(asked) == trefoil.Exit.INTERRUPTED
    assert "The query is saved beside the batch" in capsys.readouterr().err


def test_a_wrong_option_is_a_mistake_of_usage() -> None:
    done = run("query", "--nonsense")
    assert done.returncode == trefoil.Exit.USAGE and "Traceback" not in done.stderr


def test_a_quiet_command_quietens_nothing_after_it(capsys: pytest.CaptureFixture[str]) -> None:
    """A notebook runs several in one process."""
    arguments = "-q plan --reports 2000 --value-cap 5 --error 0.05 --confidence 0.99"
    assert trefoil.run(arguments.split()) == 0
    console.err.print("still here")
    assert "still here" in capsys.readouterr().err

"""Where a figure comes from: in every result file, and in every one that is made."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import origin, rerun
from benchmarks.result_files import RESULTS


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_every_stored_result_says_where_it_comes_from(path: Path) -> None:
    stored = json.loads(path.read_text())
    assert [field for field in origin.FIELDS if field not in stored] == []
    assert stored["command"].startswith(("trefoil ", "make "))
    assert {"processor", "cores", "python"} <= set(stored["machine"])
    assert stored["date"].startswith("20")
    assert not stored["commit"].endswith("dirty"), "recorded from files that no commit has"


def test_what_is_written_names_its_command_code_machine_and_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/trefoil", "bench", "report", "--json", "a file.json"])
    monkeypatch.setenv(origin.STARTED_BY, "a script")
    target = tmp_path / "result.json"
    origin.write_results(target, {"reports": [1]}, seed=7)
    stored = json.loads(target.read_text())
    assert set(stored) == {*origin.FIELDS, "reports", "started_by"}
    assert stored["started_by"] == "a script"
    assert stored["command"] == "trefoil bench report --json 'a file.json'"
    assert stored["seed"] == 7
    assert stored["machine"]["cores"] >= 1


def test_without_a_file_nothing_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    origin.write_results(None, {"reports": [1]})
    assert capsys.readouterr().out == ""


def test_every_result_can_be_made_again_by_what_it_names() -> None:
    """Each command once, into the file that names it; a script that prepared it is what is run."""
    found = list(rerun.commands())
    written = [command[-1] for command in found if command[0] != "make"]
    assert len(set(map(tuple, found))) == len(found)
    assert len(set(written)) == len(written)
    for path in sorted(RESULTS.glob("*.json")):
        made_by_make = json.loads(path.read_text())["command"].startswith("make ")
        assert made_by_make or f"benchmarks/results/{path.name}" in written
    assert all(command.count("--json") == (command[0] != "make") for command in found)
    scripts = [command[0] for command in found if command[0] not in ("trefoil", "make")]
    assert all((RESULTS.parent.parent / script).exists() for script in scripts)

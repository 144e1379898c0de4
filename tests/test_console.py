"""What commands show: results as JSON, progress that a log can hold."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from protocol import console


def test_json_is_written_whole(tmp_path: Path) -> None:
    path = tmp_path / "new" / "result.json"
    console.write_json(path, {"answer": [1, -2]})
    assert json.loads(path.read_text()) == {"answer": [1, -2]}
    assert path.stat().st_mode & 0o777 == 0o644


def test_no_file_asked_for_none_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    console.write_json(None, {"answer": 1})
    assert capsys.readouterr().out == ""


def test_a_dash_means_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    console.write_json(Path("-"), {"answer": 1})
    assert json.loads(capsys.readouterr().out) == {"answer": 1}


def test_what_cannot_be_json_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text("old")
    with pytest.raises(TypeError):
        console.write_json(path, {"answer": object()})
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_progress_in_a_log_is_a_line_every_tenth(capsys: pytest.CaptureFixture[str]) -> None:
    with console.progress("opening", 1000) as advance:
        for _ in range(1000):
            advance(note="reports")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 11
    assert lines[-1] == "opening: 1000 of 1000 reports"


def test_progress_of_nothing_does_not_divide_by_zero(capsys: pytest.CaptureFixture[str]) -> None:
    with console.progress("opening", 0) as advance:
        advance(0)
    assert "opening: 0 of 0" in capsys.readouterr().err


def test_progress_on_a_terminal_is_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(console, "err", Console(force_terminal=True, file=screen, width=80))
    with console.progress("opening", 2) as advance:
        advance(note="half")
        advance()
    assert "opening" in screen.getvalue()
    assert "2/2" in screen.getvalue()

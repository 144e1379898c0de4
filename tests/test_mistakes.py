"""Mistakes of every kind over all commands: a clear message, a hint, an exit code, and nothing left on disk."""

from __future__ import annotations

import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import trefoil
from protocol import console
from protocol.choices import with_option
from tests.support.mistakes import MISTAKES, Outcome, all_outcomes, page

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "tests" / "MISTAKES.md"


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[Outcome]:
    return all_outcomes(tmp_path_factory.mktemp("mistakes"))


def test_there_are_many_of_every_kind() -> None:
    lines = [line for lines in MISTAKES.values() for line in lines]
    assert len(lines) == len(set(lines)) >= 200
    assert all(len(each) >= 4 for each in MISTAKES.values())


def test_no_mistake_is_a_success_a_defect_or_a_traceback(outcomes: list[Outcome]) -> None:
    known = {trefoil.Exit.MISTAKE, trefoil.Exit.USAGE, trefoil.Exit.REFUSED, trefoil.Exit.TRY_AGAIN}
    assert [found for found in outcomes if found.code not in known or "Traceback" in found.errors] == []


def test_every_mistake_has_a_message_and_a_hint(outcomes: list[Outcome]) -> None:
    groups = {"device", "ledger"}
    assert [found for found in outcomes if not (found.message and found.hint) and found.line not in groups] == []


def test_no_message_names_what_nobody_typed(outcomes: list[Outcome]) -> None:
    """A parameter of the library has an underscore between small letters; options have dashes."""
    wrong = [found for found in outcomes if re.search(r"\b[a-z]+_[a-z_]+\b must be", found.message)]
    assert wrong == []
    assert with_option("histogram_index must be 0 to 1023, not -1") == "--bucket must be 0 to 1023, not -1"
    assert with_option("value for money") == "value for money"


def test_nothing_is_left_but_a_query_to_be_asked_again(outcomes: list[Outcome]) -> None:
    for found in outcomes:
        kept = all(path.startswith("shop.batch.queries") for path in found.left)
        assert not found.left or (kept and found.code == trefoil.Exit.TRY_AGAIN), found


def test_the_page_says_what_happens(outcomes: list[Outcome]) -> None:
    """Of wrong usage, whose words are typer's and differ by version, only code and place on the page are compared."""
    for ours, written in zip(page(outcomes).splitlines(), PAGE.read_text().splitlines(), strict=True):
        if " | 2 | " not in ours:
            assert written == ours, "write it again with: python -m tests.support.mistakes"
        else:
            assert written.split(" | ")[:2] == ours.split(" | ")[:2]


def _no_room() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


@pytest.mark.parametrize(
    "line",
    [
        "keygen helper --dir new --name north --address https://north.example:8443",
        "device impression news.example --db new.db --bucket 1",
        "plan --reports 10 --value-cap 5 --json new.json",
    ],
)
def test_a_full_disk_leaves_nothing(line: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "trefoil", *line.split()],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        preexec_fn=_no_room,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == trefoil.Exit.MISTAKE, done.stderr
    assert "error: " in done.stderr and "hint: " in done.stderr and "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("width", [20, 40])
def test_a_narrow_terminal(width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(console.out, "_width", width)
    monkeypatch.setattr(console.err, "_width", width)
    assert trefoil.run(["plan", "--reports", "2000", "--value-cap", "5"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= width
    assert trefoil.run(["batch", "ls", "nowhere.batch"]) == trefoil.Exit.MISTAKE
    # One line, however narrow: the terminal breaks it, and whoever copies it gets it whole.
    assert "error: cannot read nowhere.batch: No such file or directory\n" in capsys.readouterr().err

"""Tests that cannot fail prove nothing: a bug is planted in a copy of the project, and its test must fall.

`make test` sees to it that the list does not rot; TREFOIL_BUGS=all (`make fuzz`) plants every one of them, in about ten
minutes. TREFOIL_BUGS=WORDS plants those whose names have these words.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.support.planted_bugs import BUGS, Edit, PlantedBug

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("protocol", "device", "mpc_helpers", "benchmarks", "tests", "trefoil.py", "pyproject.toml", "README.md")
WANTED = os.environ.get("TREFOIL_BUGS", "")
# As pytest ends when a test has failed, and not when it found none or could not begin.
FAILED = 1


def test_every_bug_can_still_be_planted() -> None:
    found = Counter({edit: (ROOT / edit.file).read_text().count(edit.old) for bug in BUGS for edit in bug.edits})
    assert [edit for edit, times in found.items() if times != 1] == [], "mend tests/support/planted_bugs.py"
    assert len({bug.name for bug in BUGS}) == len(BUGS)


def test_every_bug_names_a_test_that_exists() -> None:
    for bug in BUGS:
        file, name = bug.test.split("::")
        assert f"def {name}(" in (ROOT / "tests" / file).read_text(), bug.name


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project's files, to plant bugs in. Its tests pass there."""
    folder = tmp_path_factory.mktemp("planted") / "trefoil"
    folder.mkdir()
    leave_out = shutil.ignore_patterns("__pycache__", "*.png", "*.svg")
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=leave_out)
        else:
            shutil.copy(source, folder / name)
    return folder


def outcome(folder: Path, tests: list[str]) -> subprocess.CompletedProcess[str]:
    """Run tests of the copy, on the copy."""
    command = [sys.executable, "-B", "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--timeout", "300"]
    return subprocess.run(
        command + [f"tests/{test}" for test in tests], cwd=folder, capture_output=True, text=True, check=False
    )


@pytest.mark.skipif(WANTED != "all", reason="planting bugs takes ten minutes: make fuzz")
def test_the_tests_pass_without_a_bug(copied: Path) -> None:
    done = outcome(copied, sorted({bug.test for bug in BUGS}))
    assert done.returncode == 0, done.stdout[-3000:]
    where = subprocess.run(
        [sys.executable, "-c", "import protocol; print(protocol.__file__)"],
        cwd=copied,
        capture_output=True,
        text=True,
        check=True,
    )
    assert Path(where.stdout.strip()).is_relative_to(copied)


@pytest.mark.skipif(not WANTED, reason="planting bugs takes ten minutes: make fuzz")
@pytest.mark.parametrize(
    "bug", [pytest.param(bug, id=bug.name) for bug in BUGS if WANTED == "all" or WANTED in bug.name]
)
def test_a_planted_bug_is_found(copied: Path, bug: PlantedBug) -> None:
    files = {edit.file: (copied / edit.file).read_text() for edit in bug.edits}
    try:
        for edit in bug.edits:
            plant(copied, edit)
        done = outcome(copied, [bug.test])
    finally:
        for file, text in files.items():
            (copied / file).write_text(text)
    assert done.returncode == FAILED, done.stdout[-3000:]
    assert "SyntaxError" not in done.stdout and "NameError" not in done.stdout, done.stdout[-3000:]


def plant(folder: Path, edit: Edit) -> None:
    path = folder / edit.file
    text = path.read_text()
    assert text.count(edit.old) == 1
    path.write_text(text.replace(edit.old, edit.new))

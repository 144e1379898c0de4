"""The guide's noise mode, added to a copy of the tree by its diff: it works everywhere, and half of it nowhere."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
GUIDE = (ROOT / "benchmarks" / "GUIDE.md").read_text()
FOLDERS = ("protocol", "device", "mpc_helpers", "benchmarks")


def fenced(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)


def parts() -> dict[str, str]:
    """The guide's one diff, by the file that each part changes."""
    (diff,) = fenced("diff")
    cut = re.split(r"^(?=--- a/)", diff, flags=re.MULTILINE)[1:]
    return {part.splitlines()[0].removeprefix("--- a/"): part for part in cut}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what the project is made of, without results and tests."""
    copy = tmp_path_factory.mktemp("tree")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("results", "__pycache__"))
    shutil.copy(ROOT / "trefoil.py", copy)
    return copy


def changed(tree: Path, *left_out: str) -> Path:
    """The tree with the guide's mode in it, but for the files that are left out."""
    found = parts()
    assert set(left_out) < set(found)
    for path, part in found.items():
        shutil.copy(ROOT / path, tree / path)
        if path not in left_out:
            applied = subprocess.run(["git", "apply", "--recount", "-"], cwd=tree, input=part, text=True, check=False)
            assert applied.returncode == 0, f"the guide's diff does not fit {path} any more"
    return tree


def run(tree: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(tree), "TERM": "dumb", "COLUMNS": "120"}
    return subprocess.run(
        [sys.executable, *command], cwd=tree, env=environment, capture_output=True, text=True, timeout=240, check=False
    )


def test_a_whole_mode_is_three_records_and_works_everywhere(tree: Path) -> None:
    """Through plan, a query of real devices and helpers with the table of modes, and the bench."""
    changed(tree)
    (commands,) = fenced("sh")
    assert [line.split()[1] for line in commands.splitlines()] == ["plan", "demo", "bench"]
    for line in commands.splitlines():
        done = run(tree, "-m", *line.split())
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
        assert "doubled" in done.stdout


@pytest.mark.parametrize(
    ("left_out", "module"),
    [("protocol/noise_law.py", "protocol.noise_scale"), ("mpc_helpers/mpc/sum_program.py", "mpc_helpers.mpc.terms")],
)
def test_a_mode_with_a_record_missing_is_refused(tree: Path, left_out: str, module: str) -> None:
    changed(tree, left_out)
    script = f"import {module} as used; from protocol.noise_mode import NoiseMode as M; used.shape(M('doubled'))"
    done = run(tree, "-c", script)
    assert done.returncode != 0 and "AssertionError" in done.stderr


def test_the_type_check_names_the_record_that_is_missing(tree: Path) -> None:
    """Only these two files: the whole check takes a minute."""
    files = ("protocol/noise_mode.py", "protocol/noise_law.py")
    options = ("--strict", "--follow-imports=skip", "--ignore-missing-imports", "--cache-dir", str(tree / "cache"))
    quiet = ("--disable-error-code=no-any-return", "--disable-error-code=misc", "--disable-error-code=type-arg")
    changed(tree)
    assert "assert_never" not in run(tree, "-m", "mypy", *options, *quiet, *files).stdout
    changed(tree, files[1])
    assert 'to "assert_never"' in run(tree, "-m", "mypy", *options, *quiet, *files).stdout

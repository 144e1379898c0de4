"""The guide's noise mode, added to a copy of the tree by its diff: it works everywhere, and half of it nowhere."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from enum import Enum
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GUIDE = (ROOT / "benchmarks" / "GUIDE.md").read_text()
FOLDERS = ("protocol", "device", "mpc_helpers", "benchmarks")


class Record(Enum):
    """The three records of a mode, in the order of the guide's diff, by the file that each is in."""

    NAME = 0, "protocol/noise.py"
    LAW = 1, "protocol/noise.py"
    PROGRAM = 2, "mpc_helpers/mpc/noisy_sum.py"


def fenced(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)


def parts() -> dict[Record, str]:
    """Return the guide's one diff, by the record that each part adds."""
    (diff,) = fenced("diff")
    cut = re.split(r"^(?=--- a/)", diff, flags=re.MULTILINE)[1:]
    records = dict(zip(Record, cut, strict=True))
    assert all(part.startswith(f"--- a/{record.value[1]}\n") for record, part in records.items())
    return records


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what the project is made of, without results and tests."""
    copy = tmp_path_factory.mktemp("tree")
    for folder in FOLDERS:
        shutil.copytree(
            ROOT / folder,
            copy / folder,
            ignore=shutil.ignore_patterns("*.json", "figures", "screenshots", "__pycache__"),
        )
    shutil.copy(ROOT / "trefoil.py", copy)
    return copy


def changed(tree: Path, *missing: Record) -> Path:
    """Put the guide's mode into the tree, but for the missing records."""
    for record in Record:
        shutil.copy(ROOT / record.value[1], tree / record.value[1])
    for record, part in parts().items():
        if record not in missing:
            applied = subprocess.run(["git", "apply", "--recount", "-"], cwd=tree, input=part, text=True, check=False)
            assert applied.returncode == 0, f"the guide's {record} does not apply any more"
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
    ("missing", "use"),
    [
        (Record.LAW, "from protocol.noise import NoiseMode, law_of; law_of(NoiseMode('doubled'))"),
        (Record.PROGRAM, "import mpc_helpers.mpc.noisy_sum"),
    ],
)
def test_a_mode_with_a_record_missing_is_refused(tree: Path, missing: Record, use: str) -> None:
    changed(tree)
    assert run(tree, "-c", use).returncode == 0
    changed(tree, missing)
    done = run(tree, "-c", use)
    assert done.returncode != 0 and "AssertionError" in done.stderr


@pytest.mark.parametrize("missing", [Record.LAW, Record.PROGRAM])
def test_the_type_check_names_the_record_that_is_missing(tree: Path, missing: Record) -> None:
    """Only one file: the whole check takes a minute. Of the program only the case is left out, not the kind."""
    path = tree / missing.value[1]
    options = ("--strict", "--follow-imports=skip", "--ignore-missing-imports", "--cache-dir", str(tree / "cache"))
    quiet = ("--disable-error-code=no-any-return", "--disable-error-code=misc", "--disable-error-code=type-arg")
    changed(tree)
    assert "assert_never" not in run(tree, "-m", "mypy", *options, *quiet, str(path)).stdout
    case = re.compile(r" +case \w+\.DOUBLED:\n +return (_DOUBLED|Neg.*)\n")
    assert len(case.findall(path.read_text())) == 1
    path.write_text(case.sub("", path.read_text()))
    assert 'to "assert_never"' in run(tree, "-m", "mypy", *options, *quiet, str(path)).stdout

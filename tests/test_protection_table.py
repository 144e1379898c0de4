"""Every promise names what is behind it, and what it names exists: in the README's table and in those of SPEC.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

import trefoil

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
SPEC = (ROOT / "protocol" / "SPEC.md").read_text()
# The theorems of the paper; Theorem 18 is its last.
THEOREMS = {str(number) for number in range(1, 19)}
_LINK = re.compile(r"\]\(([^)]+)\)")
_COMMAND = re.compile(r"`trefoil ([a-z0-9 ]+)`")
_THEOREM = re.compile(r"Theorem (\d+)")
_NAMED = re.compile(r"\bT ((?:[a-z_]+(?:, )?)+)")


def rows(text: str, heading: str) -> list[list[str]]:
    """The table that begins with `heading`, without its first two lines."""
    lines = text[text.index(heading) :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


PROTECTION = rows(README, "| against | it holds that | shown by |")
BAD_HELPER = rows(SPEC, "| attack | what happens | shown by |")
SITES = rows(SPEC, "| who asks, and how | bound | because |")


def is_command(words: str) -> bool:
    """Whether `trefoil` has this command."""
    return CliRunner().invoke(trefoil.app, [*words.split(), "--help"]).exit_code == 0


def evidence(cell: str) -> list[str]:
    """What a cell names: links, commands and theorems. Each must exist."""
    links, commands, theorems = _LINK.findall(cell), _COMMAND.findall(cell), _THEOREM.findall(cell)
    assert all(link.startswith("https://") or (ROOT / link).is_file() for link in links), cell
    assert all(map(is_command, commands)), cell
    assert set(theorems) <= THEOREMS, cell
    return [*links, *commands, *theorems]


@pytest.mark.parametrize("row", PROTECTION, ids=lambda row: row[0])
def test_every_row_of_the_readme_names_what_is_behind_it(row: list[str]) -> None:
    assert len(row) == 3
    assert evidence(row[2])


@pytest.mark.parametrize("row", BAD_HELPER, ids=lambda row: row[0])
def test_every_attack_in_the_specification_names_its_test(row: list[str]) -> None:
    names = [name for found in _NAMED.findall(row[-1]) for name in found.strip(", ").split(", ")]
    assert names
    for name in names:
        assert (ROOT / "tests" / f"test_{name}.py").is_file(), name


def test_every_bound_on_sites_names_its_theorem_or_follows_from_the_row_above() -> None:
    assert len(SITES) == 7
    assert [bool(evidence(row[2]) or _NAMED.search(row[2])) for row in SITES] == [
        *[True] * 5,
        False,
        True,
    ]


@pytest.mark.parametrize(
    "cell", ["[gone](tests/test_gone.py)", "`trefoil experiment nothing`", "`trefoil nothing`", "Theorem 19"]
)
def test_what_does_not_exist_is_found(cell: str) -> None:
    with pytest.raises(AssertionError):
        evidence(cell)

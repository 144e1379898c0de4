"""The walk from an impression to an answer, in device/README.md and mpc_helpers/README.md: each step is in the code."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("device/README.md", "mpc_helpers/README.md")
MOST_STEPS = 120
_ROW = re.compile(r"^\| (\d+) \| `([\w/]+\.py)` \| `([\w.]+)` \| (.+) \|$", re.MULTILINE)


class WalkStep(NamedTuple):
    number: int
    file: str
    function: str


def walk() -> list[WalkStep]:
    rows = [row for page in PAGES for row in _ROW.findall((ROOT / page).read_text())]
    return [WalkStep(int(number), file, function) for number, file, function, _ in rows]


@cache
def functions(file: str) -> set[str]:
    """The names of a module's functions, methods behind the name of their class."""
    found = set()
    for node in ast.parse((ROOT / file).read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            methods = (each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef))
            found |= {f"{node.name}.{method.name}" for method in methods}
    return found


def test_every_step_is_a_function_of_the_file_it_names() -> None:
    assert [step for step in walk() if step.function not in functions(step.file)] == []


def test_steps_are_numbered_across_both_pages_and_are_few_enough() -> None:
    assert [step.number for step in walk()] == list(range(1, len(walk()) + 1))
    assert len({(step.file, step.function) for step in walk()}) == len(walk()) <= MOST_STEPS

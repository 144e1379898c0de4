"""What is installed: every module and what it reads, and no measurements."""

from __future__ import annotations

import ast
import inspect
import tomllib
from pathlib import Path
from typing import Any

import trefoil

ROOT = Path(__file__).resolve().parent.parent


def wheel_rules() -> Any:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]


def test_results_are_not_in_the_wheel() -> None:
    """hatchling's own rules, read rather than run: patterns are anchored at the root."""
    wheel = wheel_rules()
    assert set(wheel["include"]) == {"/protocol", "/device", "/mpc_helpers", "/benchmarks", "/trefoil.py"}
    assert "/benchmarks/results" in wheel["exclude"]
    for excluded in wheel["exclude"]:
        path = ROOT / excluded.lstrip("/")
        assert path.exists()
        assert not list(path.rglob("*.py"))


def test_type_checkers_find_what_the_front_door_offers() -> None:
    """PEP 561: a package named `trefoil-stubs` types the module `trefoil`, and it offers all that the module does."""
    (source,) = (
        name for name, place in wheel_rules()["force-include"].items() if place == "trefoil-stubs/__init__.pyi"
    )
    stub = ast.parse((ROOT / source).read_text())
    stars = [node.module for node in stub.body if isinstance(node, ast.ImportFrom) and node.names[0].name == "*"]
    assert stars == ["benchmarks.library"]
    declared = {
        node.target.id for node in stub.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    assert declared == {"__version__"}
    for node in stub.body:
        if isinstance(node, ast.FunctionDef):
            assert list(inspect.signature(getattr(trefoil, node.name)).parameters) == [
                each.arg for each in node.args.args
            ]
    assert {"main", "run"} == {node.name for node in stub.body if isinstance(node, ast.FunctionDef)}


def test_every_package_says_that_it_is_typed() -> None:
    packages = [ROOT / name.strip("/") for name in wheel_rules()["include"] if not name.endswith(".py")]
    assert all((package / "py.typed").exists() for package in packages)

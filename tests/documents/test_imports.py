"""Enforce who may import whom over the source itself, and the list of modules in every package."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OURS = ("protocol", "device", "mpc_helpers", "benchmarks", "tests", "trefoil")
MAY_IMPORT = {
    "protocol": {"protocol"},
    "device": {"device", "protocol"},
    "mpc_helpers": {"mpc_helpers", "protocol"},
    "benchmarks": {"benchmarks", "device", "mpc_helpers", "protocol"},
}
# The one module of the helpers that wraps MPyC. The naive program that benchmarks compare us with is MPyC as shipped.
MPYC_IMPORTERS = {"mpc_helpers/mpc/runtime.py", "benchmarks/throughput/naive_mpyc.py"}
HPKE = "cryptography.hazmat.primitives.hpke"
HPKE_IMPORTERS = {"protocol/hpke.py"}
# The packages of mpc_helpers by layer: one imports itself and packages of lower layers, never one of its own layer.
LAYERS = {
    "identity": 0,
    "admission": 1,
    "ledger": 1,
    "mpc": 1,
    "agreement": 2,
    "helper": 3,
    "service": 4,
    "local": 5,
    "commands": 6,
}
# Modules that import by a name computed at run time: the two tables of names, each checked by a test of its own.
COMPUTED = {"trefoil.py", "protocol/cli/app.py"}


@dataclass(frozen=True)
class Import:
    """One imported module, wherever in the file it is imported."""

    module: str
    line: int
    at_top: bool


def imports(source: str, package: str) -> list[Import]:
    """Every module that `source` imports, by statement or by `importlib`."""
    tree = ast.parse(source)
    top = set(tree.body)
    return [Import(name, line, node in top) for node in ast.walk(tree) for name, line in _named(node, package)]


def _named(node: ast.AST, package: str) -> Iterator[tuple[str, int]]:
    match node:
        case ast.Import(names=names):
            yield from ((alias.name, node.lineno) for alias in names)
        case ast.ImportFrom(module=module, names=names, level=level):
            # One dot is this package, each further dot one package up.
            above = package.split(".")[: len(package.split(".")) + 1 - level] if level else []
            base = ".".join(filter(None, [*above, module or ""]))
            yield base, node.lineno
            # `from cryptography.hazmat.primitives import hpke` names a module too.
            yield from ((f"{base}.{alias.name}", node.lineno) for alias in names)
        case ast.Call(func=ast.Name(id="__import__") | ast.Attribute(attr="import_module"), args=[first, *_]):
            yield (str(first.value) if isinstance(first, ast.Constant) else "<computed>"), node.lineno


def within(module: str, parent: str) -> bool:
    return module == parent or module.startswith(parent + ".")


def wrong_package(path: str, imported: Import) -> str | None:
    package = path.split("/")[0]
    root = imported.module.split(".")[0]
    if package in MAY_IMPORT and root in OURS and root not in MAY_IMPORT[package]:
        return f"{package} may not import {root}"
    return None


def wrong_mpyc(path: str, imported: Import) -> str | None:
    if within(imported.module, "mpyc") and path not in MPYC_IMPORTERS and not path.startswith("tests/"):
        return "only the runtime imports mpyc"
    return None


def wrong_hpke(path: str, imported: Import) -> str | None:
    if within(imported.module, HPKE) and path not in HPKE_IMPORTERS:
        return "only protocol/hpke.py imports HPKE"
    return None


def wrong_library(path: str, imported: Import) -> str | None:
    ours = imported.module.split(".")[0] in OURS
    return "the library imports ours when it is used" if path == "trefoil.py" and imported.at_top and ours else None


def wrong_computed(path: str, imported: Import) -> str | None:
    """A name put together at run time would slip through all of the above."""
    return "a computed import cannot be checked" if imported.module == "<computed>" and path not in COMPUTED else None


def subpackage_of(module: str) -> str | None:
    """Return the package of mpc_helpers that a module is in; `helper` and `commands` stand for themselves."""
    parts = module.split(".")
    return parts[1] if parts[0] == "mpc_helpers" and len(parts) > 1 else None


def wrong_layer(path: str, imported: Import) -> str | None:
    here, there = subpackage_of(module_of(path)), subpackage_of(imported.module)
    if here is None or there is None or here == there:
        return None
    if here not in LAYERS or there not in LAYERS:
        return f"{here if here not in LAYERS else there} has no layer: give it one in LAYERS"
    return None if LAYERS[there] < LAYERS[here] else f"{here} may not import {there}: it is not in a lower layer"


def wrong_contents(path: str, _: Import) -> str | None:
    return "a package's __init__ lists its modules and imports nothing" if path.endswith("/__init__.py") else None


RULES: tuple[Callable[[str, Import], str | None], ...] = (
    wrong_package,
    wrong_mpyc,
    wrong_hpke,
    wrong_library,
    wrong_computed,
    wrong_layer,
    wrong_contents,
)


def module_of(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def package_of(path: str) -> str:
    return path.rpartition("/")[0].replace("/", ".")


def broken_in(path: str, imported: list[Import]) -> list[str]:
    verdicts = [(one, rule(path, one)) for one in imported for rule in RULES]
    return [f"{path}:{one.line}: {why} ({one.module})" for one, why in verdicts if why is not None]


def violations(path: str, source: str) -> list[str]:
    return broken_in(path, imports(source, package_of(path)))


@cache
def sources() -> dict[str, list[Import]]:
    """Everything that every file of ours imports."""
    paths = [path for folder in (*MAY_IMPORT, "tests") for path in sorted((ROOT / folder).rglob("*.py"))]
    named = {path.relative_to(ROOT).as_posix(): path.read_text() for path in (*paths, ROOT / "trefoil.py")}
    return {name: imports(source, package_of(name)) for name, source in named.items()}


def test_imports_follow_the_rules() -> None:
    broken = [
        line
        for path, imported in sources().items()
        if not path.startswith("tests/")
        for line in broken_in(path, imported)
    ]
    assert broken == []


def test_only_one_module_of_the_helpers_imports_mpyc() -> None:
    importers = {path for path, imported in sources().items() if any(within(one.module, "mpyc") for one in imported)}
    assert {path for path in importers if path.startswith("mpc_helpers/")} == {"mpc_helpers/mpc/runtime.py"}


def test_tests_do_not_import_hpke_either() -> None:
    broken = [path for path, imported in sources().items() if any(wrong_hpke(path, one) for one in imported)]
    assert broken == []


def cycle_in(imported: dict[str, list[Import]]) -> list[str]:
    """A ring of modules that import each other, at the top or in a function; empty if there is none."""
    known = {module_of(path) for path in imported}
    graph = {
        module_of(path): {one.module for one in imported if one.module in known} - {module_of(path)}
        for path, imported in imported.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_modules_import_each_other() -> None:
    assert cycle_in(sources()) == []


def ring(last: str) -> list[str]:
    """The cycle in three modules of which the last imports `last`."""
    planted = {"a": "from device import b", "b": "import device.c", "c": last}
    return cycle_in({f"device/{name}.py": imports(source, "device") for name, source in planted.items()})


def test_a_planted_cycle_is_found() -> None:
    assert set(ring("from device.a import x")) == {"device.a", "device.b", "device.c"}
    assert ring("def f():\n    from . import b") != []
    assert ring("import device.d") == []


def class_names(sources: dict[str, str]) -> dict[str, list[str]]:
    """Where each class is defined, nested ones included."""
    imported: dict[str, list[str]] = {}
    for path, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef):
                imported.setdefault(node.name, []).append(path)
    return imported


def test_no_class_name_means_two_things() -> None:
    paths = [path for folder in MAY_IMPORT for path in (ROOT / folder).rglob("*.py")]
    imported = class_names({path.relative_to(ROOT).as_posix(): path.read_text() for path in paths})
    assert {name: where for name, where in imported.items() if len(where) > 1} == {}


def test_a_planted_second_class_is_found() -> None:
    planted = {"a.py": "class State: pass", "b.py": "def f():\n    class State: pass"}
    assert class_names(planted) == {"State": ["a.py", "b.py"]}


# Every package's `__init__` is a contents page: a line for each module, in reading order.
ENTRY = re.compile(r"^- `(\w+)`: \S", re.MULTILINE)
PACKAGES = sorted(
    path.parent.relative_to(ROOT)
    for folder in (*MAY_IMPORT, "tests/support")
    for path in (ROOT / folder).rglob("__init__.py")
)


def listed_in(page: str) -> list[str]:
    return ENTRY.findall(ast.get_docstring(ast.parse(page), clean=False) or "")


@pytest.mark.parametrize("package", PACKAGES, ids=str)
def test_a_contents_page_lists_every_module_and_no_other(package: Path) -> None:
    folder = ROOT / package
    modules = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    packages = {path.parent.name for path in folder.glob("*/__init__.py")}
    listed = listed_in((folder / "__init__.py").read_text())
    assert sorted(listed) == sorted(modules | packages), f"mend the docstring of {package}/__init__.py"


def test_contents_pages_are_read_as_meant() -> None:
    lines = ["A package.", "", "- `chair`: to sit on", "- `table`: to eat at", "", "Text: that follows.", ""]
    assert listed_in('"""' + "\n".join(lines) + '"""') == ["chair", "table"]


PLANTED = [
    ("mpc_helpers/identity/keygen.py", "from mpc_helpers.ledger.ledger import ReportLedger"),
    ("mpc_helpers/admission/ingest.py", "from mpc_helpers.ledger import attempt"),
    ("mpc_helpers/mpc/worker.py", "def f():\n    import mpc_helpers.agreement.peers"),
    ("mpc_helpers/agreement/agreement.py", "from mpc_helpers import helper"),
    ("mpc_helpers/helper.py", "from mpc_helpers.service.daemon import run"),
    ("mpc_helpers/service/server.py", "import mpc_helpers.local.launcher"),
    ("mpc_helpers/service/server.py", "from ..local import launcher"),
    ("mpc_helpers/attic/box.py", "from mpc_helpers.identity import tls"),
    ("mpc_helpers/identity/__init__.py", "from mpc_helpers.identity.config import load_config"),
    ("device/__init__.py", "import ast"),
    ("protocol/wire.py", "from device.epoch import Epoch"),
    ("protocol/wire.py", "def f():\n    import mpc_helpers.helper"),
    ("protocol/wire.py", "import trefoil"),
    ("device/device.py", "from mpc_helpers import noise"),
    ("device/dashboard/page.py", "import benchmarks"),
    ("device/device.py", "import importlib\nimportlib.import_module('mpc_helpers.mpc.noise')"),
    ("mpc_helpers/helper.py", "if True:\n    from device import report"),
    ("mpc_helpers/mpc/noise.py", "import mpyc.runtime"),
    ("mpc_helpers/mpc/noise.py", "from mpyc import thresha"),
    ("benchmarks/demos/live/agent.py", "from mpyc.runtime import mpc"),
    ("device/report.py", "from cryptography.hazmat.primitives import hpke"),
    ("protocol/report.py", "from cryptography.hazmat.primitives.hpke import Suite"),
    ("trefoil.py", "from protocol.report import SealedReport"),
    ("trefoil.py", "import device.device"),
    ("protocol/wire.py", "name = 'device'\n__import__(name)"),
    ("benchmarks/commands.py", "import tests.support.protocol_samples"),
]


@pytest.mark.parametrize(("path", "source"), PLANTED)
def test_a_planted_violation_is_caught(path: str, source: str) -> None:
    assert len(violations(path, source)) >= 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("device/device.py", "from protocol.report import seal_report\nfrom device import epoch"),
        ("mpc_helpers/mpc/runtime.py", "import mpyc.runtime"),
        ("benchmarks/commands.py", "import device, mpc_helpers, protocol"),
        ("trefoil.py", "def main():\n    import device.device"),
        ("device/dashboard/page.py", "from . import table\nfrom .. import epoch"),
    ],
)
def test_what_is_allowed_is_not_caught(path: str, source: str) -> None:
    assert violations(path, source) == []

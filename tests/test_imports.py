"""Who may import whom, enforced over the source itself, and the contents page of every package."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OURS = ("protocol", "device", "mpc_helpers", "benchmarks", "tests", "trefoil")
MAY_IMPORT = {
    "protocol": {"protocol"},
    "device": {"device", "protocol"},
    "mpc_helpers": {"mpc_helpers", "protocol"},
    "benchmarks": {"benchmarks", "device", "mpc_helpers", "protocol"},
}
# The one module of the helpers that wraps MPyC. The naive program that benchmarks compare us with is MPyC as shipped.
MPYC_IMPORTERS = {"mpc_helpers/mpc/runtime.py", "benchmarks/bench/naive_mpyc.py"}
HPKE = "cryptography.hazmat.primitives.hpke"
HPKE_IMPORTERS = {"protocol/hpke.py"}
# The rooms of mpc_helpers by floor: a room imports itself and rooms of lower floors, never one of its own floor.
FLOORS = {
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
FRONT_DOOR_IMPORTS = {f"{package}.commands" for package in MAY_IMPORT} | {
    "protocol.choices",
    "protocol.console",
    "protocol.errors",
    "protocol.places",
    "protocol.stopping",
    "protocol.text",
}


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


def wrong_package(path: str, found: Import) -> str | None:
    package = path.split("/")[0]
    root = found.module.split(".")[0]
    if package in MAY_IMPORT and root in OURS and root not in MAY_IMPORT[package]:
        return f"{package} may not import {root}"
    return None


def wrong_mpyc(path: str, found: Import) -> str | None:
    if within(found.module, "mpyc") and path not in MPYC_IMPORTERS and not path.startswith("tests/"):
        return "only the runtime imports mpyc"
    return None


def wrong_hpke(path: str, found: Import) -> str | None:
    if within(found.module, HPKE) and path not in HPKE_IMPORTERS:
        return "only protocol/hpke.py imports HPKE"
    return None


def wrong_front_door(path: str, found: Import) -> str | None:
    if path != "trefoil.py" or not found.at_top or found.module.split(".")[0] not in OURS:
        return None
    known = any(within(found.module, allowed) for allowed in FRONT_DOOR_IMPORTS)
    return None if known else "the front door imports commands only"


def wrong_computed(path: str, found: Import) -> str | None:
    """A name put together at run time would slip through all of the above."""
    return "a computed import cannot be checked" if found.module == "<computed>" else None


def room_of(module: str) -> str | None:
    """The room of a module of mpc_helpers; `helper` and `commands` are rooms of one module."""
    parts = module.split(".")
    return parts[1] if parts[0] == "mpc_helpers" and len(parts) > 1 else None


def wrong_room(path: str, found: Import) -> str | None:
    here, there = room_of(module_of(path)), room_of(found.module)
    if here is None or there is None or here == there:
        return None
    if here not in FLOORS or there not in FLOORS:
        return f"{here if here not in FLOORS else there} has no floor: give it one in FLOORS"
    return None if FLOORS[there] < FLOORS[here] else f"{here} may not import {there}: it is not on a lower floor"


def wrong_page(path: str, _: Import) -> str | None:
    return "a package's __init__ is a contents page and imports nothing" if path.endswith("/__init__.py") else None


RULES: tuple[Callable[[str, Import], str | None], ...] = (
    wrong_package,
    wrong_mpyc,
    wrong_hpke,
    wrong_front_door,
    wrong_computed,
    wrong_room,
    wrong_page,
)


def module_of(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def package_of(path: str) -> str:
    return path.rpartition("/")[0].replace("/", ".")


def broken_in(path: str, found: list[Import]) -> list[str]:
    verdicts = [(one, rule(path, one)) for one in found for rule in RULES]
    return [f"{path}:{one.line}: {why} ({one.module})" for one, why in verdicts if why is not None]


def violations(path: str, source: str) -> list[str]:
    return broken_in(path, imports(source, package_of(path)))


@cache
def sources() -> dict[str, list[Import]]:
    """Everything that every file of ours imports."""
    paths = [path for folder in (*MAY_IMPORT, "tests") for path in sorted((ROOT / folder).rglob("*.py"))]
    named = {path.relative_to(ROOT).as_posix(): path.read_text() for path in (*paths, ROOT / "trefoil.py")}
    return {name: imports(source, package_of(name)) for name, source in named.items()}


def test_nobody_imports_whom_they_may_not() -> None:
    broken = [
        line for path, found in sources().items() if not path.startswith("tests/") for line in broken_in(path, found)
    ]
    assert broken == []


def test_only_one_module_of_the_helpers_imports_mpyc() -> None:
    importers = {path for path, found in sources().items() if any(within(one.module, "mpyc") for one in found)}
    assert {path for path in importers if path.startswith("mpc_helpers/")} == {"mpc_helpers/mpc/runtime.py"}


def test_tests_do_not_import_hpke_either() -> None:
    broken = [path for path, found in sources().items() if any(wrong_hpke(path, one) for one in found)]
    assert broken == []


def cycle_in(imported: dict[str, list[Import]]) -> list[str]:
    """A ring of modules that import each other, at the top or in a function; empty if there is none."""
    known = {module_of(path) for path in imported}
    graph = {
        module_of(path): {one.module for one in found if one.module in known} - {module_of(path)}
        for path, found in imported.items()
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
    found: dict[str, list[str]] = {}
    for path, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(path)
    return found


def test_no_class_name_means_two_things() -> None:
    paths = [path for folder in MAY_IMPORT for path in (ROOT / folder).rglob("*.py")]
    found = class_names({path.relative_to(ROOT).as_posix(): path.read_text() for path in paths})
    assert {name: where for name, where in found.items() if len(where) > 1} == {}


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
    rooms = {path.parent.name for path in folder.glob("*/__init__.py")}
    listed = listed_in((folder / "__init__.py").read_text())
    assert sorted(listed) == sorted(modules | rooms), f"mend the docstring of {package}/__init__.py"


def test_contents_pages_are_read_as_meant() -> None:
    lines = ["A room.", "", "- `chair`: to sit on", "- `table`: to eat at", "", "Text: that follows.", ""]
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
    ("benchmarks/live/agent.py", "from mpyc.runtime import mpc"),
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
        ("trefoil.py", "from device.commands import app\ndef main():\n    import device.device"),
        ("device/dashboard/page.py", "from . import table\nfrom .. import epoch"),
    ],
)
def test_what_is_allowed_is_not_caught(path: str, source: str) -> None:
    assert violations(path, source) == []

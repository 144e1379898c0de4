"""`import trefoil`, the tutorial, and the wheel: the public names, their types, and what is installed."""

from __future__ import annotations

import ast
import asyncio
import doctest
import inspect
import json
import os
import pydoc
import subprocess
import sys
import tomllib
import traceback
from pathlib import Path
from typing import Any

import pytest

import trefoil
from protocol.batch import BatchReader, BatchWriter
from protocol.errors import ErrorKind, TrefoilError
from protocol.helper_set import write_set
from protocol.keys import save_identity
from protocol.querier.query_folder import run
from protocol.querier.saved_query import QueryOptions, make_query
from tests.support import protocol_samples as samples
from tests.support.raising import raises

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "benchmarks" / "tutorial.ipynb"


def test_every_public_name_is_there() -> None:
    assert set(trefoil.__all__) == set(dir(trefoil)) - {"main"} == {*trefoil._DEFINED_IN, "__version__"}
    for name in trefoil.__all__:
        assert getattr(trefoil, name) is not None
    assert trefoil.__version__.count(".") == 2
    with pytest.raises(AttributeError, match="no attribute 'Ledger'"):
        _ = trefoil.Ledger


def test_garbage_is_collected_as_usual_from_the_first_collection_on() -> None:
    """A command begins without; a device that had to wait for a long collection would answer late."""
    code = """
import gc, sys, trefoil
usual, callbacks = gc.get_threshold(), len(gc.callbacks)
sys.argv = ["trefoil", "--version"]
try:
    trefoil.main()
except SystemExit:
    assert gc.get_threshold() != usual and gc.get_freeze_count()
gc.collect()
assert (gc.get_threshold(), len(gc.callbacks)) == (usual, callbacks)
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120)


def test_help_and_a_star_import_show_the_library() -> None:
    """As `help(trefoil)` and `from trefoil import *` do it."""
    page = pydoc.plain(pydoc.render_doc(trefoil))
    taken: dict[str, object] = {}
    exec("from trefoil import *", taken)  # noqa: S102 - ours
    assert [name for name in trefoil.__all__ if name not in taken or (name not in page and name != "__version__")] == []


@pytest.mark.parametrize("name", sorted(set(trefoil.__all__) - {"TREFOIL_SERVICE", "__version__"}))
def test_every_public_name_has_an_example_that_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those marked SKIP need helpers or files; README and the tutorial run the same calls."""
    monkeypatch.chdir(tmp_path)
    public = getattr(trefoil, name)
    test = doctest.DocTestParser().get_doctest(inspect.getdoc(public) or "", {"trefoil": trefoil}, name, None, None)
    assert test.examples
    assert doctest.DocTestRunner(verbose=False).run(test).failed == 0


@pytest.mark.parametrize("package", ["device", "benchmarks"])
def test_a_file_that_hides_a_package_of_ours_is_named(package: str, tmp_path: Path) -> None:
    (tmp_path / f"{package}.py").write_text("")
    code = "import sys, trefoil; sys.argv = ['trefoil', '--version']; trefoil."
    for call in ("main()", *(["Device"] if package == "device" else [])):
        done = subprocess.run(
            [sys.executable, "-c", code + call],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 1 and f"{package}.py hides Trefoil's own package" in done.stderr


def test_asking_with_the_wrong_type_is_explained(tmp_path: Path) -> None:
    right: dict[str, Any] = {"batch": "b", "helper_set": samples.HELPER_SET, "site_key": samples.QUERIER}
    for wrong in ({"batch": 7}, {"helper_set": "helpers.json"}, {"site_key": tmp_path}, {"epsilon": "1"}, {"noise": 3}):
        with raises(ErrorKind.WRONG_TYPE, TrefoilError) as caught:
            trefoil.ask(**(right | wrong))
        assert next(iter(wrong)) in str(caught.value) and caught.value.hint.startswith("It must be ")


def test_a_script_that_catches_nothing_shows_the_hint_and_no_error_of_ours(tmp_path: Path) -> None:
    code = f"import trefoil; trefoil.ask({str(tmp_path / 'b')!r}, 'helpers.json', 'site.key')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1].startswith("hint:  It must be ")

    async def refused() -> None:
        raise TrefoilError("refused", "Ask again.")

    with raises(ErrorKind.INVALID_VALUE, TrefoilError) as caught:
        run(refused())
    caught.value.hint += " Later."
    told = "".join(traceback.format_exception(caught.value))
    assert told.endswith("refused\nhint:  Ask again. Later.\n") and "During handling" not in told


def test_importing_the_front_door_imports_no_role() -> None:
    """`trefoil --help` is quick because nothing heavy is loaded for it."""
    code = "import sys, trefoil; print([name for name in ('numpy', 'mpyc', 'device.device') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_path_may_be_text(tmp_path: Path) -> None:
    """As a script has it: a database, a batch, a helper set and a key, each named by a string."""
    folder = str(tmp_path)
    trefoil.create_device(f"{folder}/alice.db")
    with trefoil.opened_device(f"{folder}/alice.db") as device:
        device.save_impression("news.example", trefoil.ImpressionOptions(histogram_index=1))
    with trefoil.BatchWriter(f"{folder}/people.batch") as batch:
        batch.add(samples.report("one"))
    assert len(trefoil.BatchReader(f"{folder}/people.batch")) == 1
    write_set(tmp_path / "helpers.json", samples.HELPER_SET)
    assert trefoil.HelperSet.load(f"{folder}/helpers.json") == samples.HELPER_SET
    save_identity(tmp_path / "site.key", samples.QUERIER)
    assert trefoil.load_site_key(f"{folder}/site.key").public == samples.QUERIER.public


async def test_blocking_calls_work_inside_an_event_loop() -> None:
    async def one() -> int:
        await asyncio.sleep(0)
        return 1

    assert run(one()) == 1


def test_blocking_calls_work_without_one() -> None:
    async def one() -> int:
        return 1

    assert run(one()) == 1


@pytest.mark.parametrize("reports_debug", [False, True])
@pytest.mark.parametrize("asked_debug", [False, True])
def test_debug_is_asked_for_on_both_ends(tmp_path: Path, reports_debug: bool, asked_debug: bool) -> None:
    with BatchWriter(tmp_path / "batch") as writer:
        writer.add(samples.report("one", promised=samples.terms(debug=reports_debug)))
    options = QueryOptions(debug=asked_debug)

    def make() -> bool:
        batch = BatchReader(tmp_path / "batch")
        return make_query(batch, options, samples.HELPER_SET, samples.QUERIER, samples.NOW).query.debug

    if reports_debug == asked_debug:
        assert make() is asked_debug
    else:
        with pytest.raises(TrefoilError, match="without noise" if asked_debug else "debug reports"):
            make()


def test_a_simulated_device_is_no_debug_device_unless_it_is_asked_for() -> None:
    assert not trefoil.MemoryStore().debug
    with pytest.raises(TrefoilError, match="only a debug device"):
        trefoil.Device(trefoil.MemoryStore(), trefoil.PlainSeal(), clock=trefoil.system_clock)


def cells() -> list[str]:
    stored = json.loads(NOTEBOOK.read_text())
    return ["".join(cell["source"]) for cell in stored["cells"] if cell["cell_type"] == "code"]


async def test_the_tutorial_runs() -> None:
    """Every code cell in order, in an event loop as a notebook has one, and what its text says of the results."""
    names: dict[str, Any] = {}
    for source in cells():
        exec(compile(source, str(NOTEBOOK), "exec"), names)  # noqa: S102 - the notebook is ours
    assert names["reports"] == [(0, 0, 3, 0)] * 4 + [(0, 0, 0, 0)] * 2
    assert names["spent"] == [1.0]
    assert names["deviations"]["joint"] < names["deviations"]["local"] < names["deviations"]["pairwise"]
    answer = names["answer"]
    assert answer.answer.counted == 300
    # Four buckets off by 25 intervals of 95 % each: the noise falls off by e for every scale, and one is 3 scales.
    assert all(abs(a - t) < 25 * answer.half_width for a, t in zip(answer.histogram, names["truth"], strict=True))
    assert repr(answer).startswith("<QueryResult of shop.example: [") and "300 of 300" in repr(answer)
    assert "<table>" in answer._repr_html_() and "shop.example" in answer._repr_html_()
    assert (names["flagged"], names["unflagged"]) == ((0, 0, 0, 0, 3), (0, 0, 3, 0, 0))
    assert "counted before" in names["refused"]
    spent = names["own"].to_pandas().groupby("system")["average_epsilon"].median().to_dict()
    assert list(spent) == ["ara-like", "cookie-monster", "devices, two_or_nothing (1× value)", "ipa-like"]
    assert (
        spent["devices, two_or_nothing (1× value)"] == spent["cookie-monster"] < spent["ara-like"] < spent["ipa-like"]
    )
    errors = names["own"].to_pandas().groupby("system")["rmsre_median"].median()
    assert errors["devices, two_or_nothing (1× value)"] > 2 * errors["cookie-monster"]
    assert names["own"]._repr_png_().startswith(b"\x89PNG") and (names["folder"] / "own.png").exists()


def test_the_tutorial_is_kept_without_results() -> None:
    stored = json.loads(NOTEBOOK.read_text())
    assert all(not cell.get("outputs") and cell.get("execution_count") is None for cell in stored["cells"])


def wheel_rules() -> Any:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]


def test_results_are_not_in_the_wheel() -> None:
    """hatchling's own rules, read rather than run: patterns are anchored at the root."""
    wheel = wheel_rules()
    assert set(wheel["include"]) == {"/protocol", "/device", "/mpc_helpers", "/benchmarks", "/trefoil.py"}
    excluded = [path for pattern in wheel["exclude"] for path in ROOT.glob(pattern.lstrip("/"))]
    assert {"benchmarks/results/throughput.json", "benchmarks/results/figures"} <= {
        path.relative_to(ROOT).as_posix() for path in excluded
    }
    for path in excluded:
        assert path.suffix != ".py" and not list(path.rglob("*.py"))


def test_type_checkers_see_the_names_that_the_library_imports_lazily() -> None:
    tree = ast.parse((ROOT / "trefoil.py").read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    imported = {
        alias.asname or alias.name: f"{node.module}:{alias.name}"
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert imported == trefoil._DEFINED_IN


def test_every_package_says_that_it_is_typed() -> None:
    packages = [ROOT / name.strip("/") for name in wheel_rules()["include"] if not name.endswith(".py")]
    assert all((package / "py.typed").exists() for package in packages)

"""`import trefoil`: the public names, the tutorial, and no answer without noise by accident."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import trefoil
from benchmarks import library
from protocol.batch import BatchReader, BatchWriter
from protocol.errors import TrefoilError
from protocol.keys import save_identity
from protocol.querier.blocking import run
from protocol.querier.saved_query import QueryOptions, make_query
from protocol.set_files import write_set
from tests.support import protocol_samples as samples

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOK = ROOT / "benchmarks" / "tutorial.ipynb"


def test_every_public_name_is_there() -> None:
    for name in library.__all__:
        assert getattr(trefoil, name) is getattr(library, name)
    assert trefoil.__version__.count(".") == 2
    with pytest.raises(AttributeError, match="no attribute 'Ledger'"):
        _ = trefoil.Ledger


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
    assert "<table>" in answer._repr_html_() and "shop.example" in answer._repr_html_()
    assert len(names["flagged"]) == 5
    assert "counted before" in names["refused"]


def test_the_tutorial_is_kept_without_results() -> None:
    stored = json.loads(NOTEBOOK.read_text())
    assert all(not cell.get("outputs") and cell.get("execution_count") is None for cell in stored["cells"])

"""The walk from an impression to an answer, in device/README.md and mpc_helpers/README.md, against a recorded trace.

One impression, one conversion and one query run here with real processes, and every process records which function it
called first and when (`tests/support/tracing`). The walk must name functions that were called, in that order.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest

from mpc_helpers.local.launcher import launched_helpers

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("device/README.md", "mpc_helpers/README.md")
SECONDS = 120
_TABLE = re.compile(r"^\*\*(.+)\*\*$|^\| `([\w/]+\.py)` \| `([\w.]+)` \| ", re.MULTILINE)
# Which act of the story a heading of the walk belongs to; later headings belong to the query.
ACTS = {"A publisher saves an impression": 1, "A shop measures a conversion": 2}
QUERY = 3
# A conversion that is late returns a null report, as it may under a profiler: then it is measured again.
DEVICE = """
import sys
from concurrent.futures import Future
from device.agent import create, opened
from device.conversion import ConversionOptions
from device.events import ImpressionOptions
from device.limits import TREFOIL_SERVICE
from protocol.batch import BatchWriter
from protocol.helper_set import HelperSet

database, gate, helpers, batch = sys.argv[1:]

def act(number):
    with open(gate, "r+b") as file:
        file.write(bytes([number]))

create(database)
with opened(database, HelperSet.load(helpers)) as device:
    for number in (0, 0, 1):
        act(number)
        kept = Future()
        device.save_impression("news.example", ImpressionOptions(histogram_index=3), kept=kept)
        kept.result(60)
    shoes = ConversionOptions(TREFOIL_SERVICE, histogram_size=16, value=5, max_value=5, epsilon=0.1)
    for number in (0, 0, 2):
        act(number)
        report = device.measure_conversion("shop.example", shoes)
with BatchWriter(batch) as writer:
    writer.add(report)
act(0)
"""


class Call(NamedTuple):
    act: int
    file: str
    function: str


@dataclass(frozen=True)
class Trace:
    """When each function was first called in each act."""

    first: dict[Call, int]

    def disorder(self, strand: list[Call]) -> list[str]:
        """Return what is wrong with a strand: functions that were not called, or before one that stands above them."""
        problems, latest = [], 0
        for call in strand:
            if call not in self.first:
                problems.append(f"{call.function} ({call.file}) was not called in act {call.act}")
            elif self.first[call] < latest:
                problems.append(f"{call.function} ({call.file}) comes {latest - self.first[call]:,} ns earlier")
            else:
                latest = self.first[call]
        return problems


def walk() -> list[list[Call]]:
    """Return the strands of the walk: the main one, and one for each heading that begins with "Meanwhile"."""
    main: list[Call] = []
    strands, strand, act = [main], main, QUERY
    for page in PAGES:
        for heading, file, function in _TABLE.findall((ROOT / page).read_text()):
            if not heading:
                strand.append(Call(act, file, function))
                continue
            act, strand = ACTS.get(heading, QUERY), main
            if heading.startswith("Meanwhile"):
                strands.append(strand := [])
    return strands


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trace]:
    folder = tmp_path_factory.mktemp("trace")
    gate, lines = folder / "gate", folder / "trace"
    gate.write_bytes(b"\0")
    lines.touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TREFOIL_TRACE", str(folder))
        patch.setenv("TREFOIL_TRACE_ROOT", str(ROOT))
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support" / "tracing")]))
        with launched_helpers(folder / "trio", sites={"shop.example": ["shop.example"]}):
            _play(folder, gate)
    yield Trace(_read(lines.read_text()))


def _play(folder: Path, gate: Path) -> None:
    batch = str(folder / "shop.batch")
    helpers = str(folder / "trio" / "helpers.json")
    device = [sys.executable, "-c", DEVICE, str(folder / "alice.db"), str(gate), helpers, batch]
    subprocess.run(device, check=True, timeout=SECONDS, cwd=ROOT)
    with gate.open("r+b") as file:  # never truncated: the other processes have it mapped
        file.write(bytes([QUERY]))
    key = str(folder / "trio" / "sites" / "shop.example.key")
    query = ["query", "run", "--reports", batch, "--helpers", helpers, "--site-key", key]
    subprocess.run([sys.executable, "-m", "trefoil", "-q", *query], check=True, timeout=SECONDS, cwd=ROOT)


def _read(text: str) -> dict[Call, int]:
    first: dict[Call, int] = {}
    for line in text.splitlines():
        at, act, file, function = line.split(" ", 3)
        call = Call(int(act), file, function)
        first[call] = min(int(at), first.get(call, int(at)))
    return first


def test_the_walk_names_functions_in_the_order_of_their_first_calls(trace: Trace) -> None:
    assert sum(map(len, walk())) > 80
    assert not (problems := [line for strand in walk() for line in trace.disorder(strand)]), "\n".join(problems)


def test_two_rows_that_change_places_are_noticed(trace: Trace) -> None:
    first, second, *_ = walk()[0]
    assert trace.disorder([second, first])
    assert trace.disorder([first, Call(QUERY, "device/device.py", "none")])

"""`trefoil bench noise`: what it says each mode costs and buys."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.bench import noise_cost
from mpc_helpers.mpc.joint import circuit
from mpc_helpers.mpc.terms import SumTerms
from protocol.joint_scale import JointScale
from protocol.query import NoiseMode
from trefoil import app


def terms(mode: NoiseMode, buckets: int, scale: int = 20) -> SumTerms:
    return noise_cost.terms_of(mode, buckets, scale)


def test_rounds_are_those_of_the_protocol() -> None:
    """Dealing is one message, commit and open are two; joint noise has a layer of gates each, and four more."""
    depth = circuit.build(JointScale.of(Fraction(1, 2), 2)).depth
    found = {mode: noise_cost.count_rounds(terms(mode, 8, 2)) for mode in NoiseMode}
    assert found == {NoiseMode.LOCAL: 1, NoiseMode.PAIRWISE: 2, NoiseMode.JOINT: depth + 4}


def test_bytes_grow_with_buckets_in_local_mode_and_hardly_in_pairwise() -> None:
    """A dealt vector travels in local mode; pairwise noise is drawn from keys that both have."""
    sizes = {
        (mode, buckets): noise_cost.count_bytes(terms(mode, buckets, 2)) for mode in NoiseMode for buckets in (8, 264)
    }
    dealt = 2 * 256 * 8
    assert sizes[NoiseMode.LOCAL, 264] - sizes[NoiseMode.LOCAL, 8] >= dealt
    assert sizes[NoiseMode.PAIRWISE, 264] - sizes[NoiseMode.PAIRWISE, 8] < dealt / 4
    layout = terms(NoiseMode.JOINT, 264, 2).layout
    received = sum(layout.steps(0)[2].values()) + sum(layout.steps(1)[2].values())
    # What party 2 sends, beside a frame's kind and step, the greeting, the key and the end.
    assert 0 < sizes[NoiseMode.JOINT, 264] - received < 300


def test_what_helpers_would_refuse_is_left_out() -> None:
    wanted = noise_cost.possible([16, 2**16], [1, 2**40])
    assert [(mode.value, found.buckets, int(1 / found.rate)) for mode, found in wanted] == [
        ("local", 16, 1),
        ("pairwise", 16, 1),
        ("joint", 16, 1),
        ("local", 65536, 1),
        ("pairwise", 65536, 1),
        ("joint", 65536, 1),
        ("joint", 16, 2**40),
    ]


def test_the_command_and_its_json(tmp_path: Path) -> None:
    target = tmp_path / "noise.json"
    command = ["bench", "noise", "--buckets", "4", "--scale", "10", "--repeats", "1", "--json", str(target)]
    done = CliRunner().invoke(app, command, catch_exceptions=False)
    assert done.exit_code == 0
    local, pairwise, joint = json.loads(target.read_text())["noise"]
    for cost, mode in zip((local, pairwise, joint), NoiseMode, strict=True):
        assert (cost["mode"], cost["buckets"], cost["scale"]) == (mode.value, 4, 10)
        assert cost["session_cpu_seconds"] > 0 and cost["wall_seconds"] > 0 and cost["bytes"] > 0
    assert [cost["variance_over_laplace"] for cost in (local, pairwise)] == pytest.approx([1.5, 3])
    assert 1 <= joint["variance_over_laplace"] < 1.0075
    assert joint["half_width_95"] < local["half_width_95"] < pairwise["half_width_95"]
    assert local["delta"] == pairwise["delta"] == 0 < joint["delta"] < 2**-52


def test_a_size_that_no_mode_takes_says_so() -> None:
    done = CliRunner().invoke(app, ["bench", "noise", "--buckets", "65536", "--scale", str(2**40)])
    assert done.exit_code != 0 and "no noise mode takes" in str(done.exception)

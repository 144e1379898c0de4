"""`trefoil bench noise`: what it says each mode costs and buys."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.bench import noise_cost
from protocol.query import NoiseMode
from trefoil import app


def test_local_noise_is_cheaper_in_rounds_and_better_than_pairwise() -> None:
    """Three halves instead of two make 1.5 times the variance of one Laplace; three pairs make 3 times."""
    local, pairwise = (noise_cost.measure(mode, 8, Fraction(1, 20)) for mode in (NoiseMode.LOCAL, NoiseMode.PAIRWISE))
    assert local.variance_over_laplace == pytest.approx(1.5)
    assert pairwise.variance_over_laplace == pytest.approx(3)
    assert local.half_width_95 < pairwise.half_width_95
    # Greeting and key come first in both; dealing is one message to each peer, commit and open are two.
    assert local.rounds < pairwise.rounds
    assert local.messages <= 6 * local.rounds


def test_bytes_grow_with_buckets_in_local_mode_and_hardly_in_pairwise() -> None:
    """A dealt vector travels in local mode; pairwise noise is drawn from keys that both have."""
    sizes = {
        (mode, buckets): noise_cost.measure(mode, buckets, Fraction(1, 2)).bytes
        for mode in NoiseMode
        for buckets in (8, 264)
    }
    dealt = 6 * 256 * 8
    assert sizes[NoiseMode.LOCAL, 264] - sizes[NoiseMode.LOCAL, 8] >= dealt
    assert sizes[NoiseMode.PAIRWISE, 264] - sizes[NoiseMode.PAIRWISE, 8] < dealt / 4


def test_the_command_and_its_json(tmp_path: Path) -> None:
    target = tmp_path / "noise.json"
    command = ["bench", "noise", "--buckets", "4", "--scale", "10", "--json", str(target)]
    done = CliRunner().invoke(app, command, catch_exceptions=False)
    assert done.exit_code == 0
    stored = json.loads(target.read_text())["noise"]
    assert [(cost["mode"], cost["buckets"], cost["scale"]) for cost in stored] == [
        ("local", 4, 10),
        ("pairwise", 4, 10),
    ]
    assert all(cost["draw_seconds"] > 0 and cost["bytes"] > 0 for cost in stored)

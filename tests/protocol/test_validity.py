"""What a device proves: points nobody chooses, openings that say nothing, and a check of its own before it seals."""

from __future__ import annotations

import hashlib
import os
import sys
from dataclasses import replace
from types import FrameType
from typing import Any

import numpy as np
import pytest

from protocol.errors import ProtocolError
from protocol.field import P, Vector, expand_many
from protocol.shape import Shape
from protocol.shares import SharedVector
from protocol.validity import Seeds, deal, holds, open_at, points_of

SHAPES = [
    Shape(1, 0, 1, 1),
    Shape(5, 0, 1, 1),
    Shape(16, 0, 100, 4),
    Shape(9, 0, 7, 7),
    Shape(128, 0, 2**20, 1),
    Shape(16, 3, 100, 1),
    Shape(20, 2**40, 12, 12),
    Shape(2100, 0, 5, 2),
    Shape(2100, 2, 5, 1),
]


def draw(_: bytes = b"") -> Seeds:
    return os.urandom(32), os.urandom(32), os.urandom(32)


def full(shape: Shape) -> list[int]:
    """Every coin is spent."""
    return [shape.cap] + [0] * (shape.buckets - 1) + ([shape.kappa] if shape.kappa else [])


def test_points_are_the_first_words_that_are_elements_and_no_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    words = [[0, 1, 2**17 - 1, P], [P, 2**17, 5, P], [2**16, 0, P - 1, 7]]
    monkeypatch.setattr("protocol.validity.hash_words", lambda _, counter: words[counter])
    assert points_of(b"", 2) == [2**17, P - 1]
    assert points_of(b"", 1) == [2**17]


def test_points_come_from_a_hash_of_the_prefix() -> None:
    digest = hashlib.sha256(b"trefoil/1 validity points\0\0prefix").digest()
    expected = [int.from_bytes(digest[at : at + 8], "little") >> 3 for at in (0, 8, 16)]
    assert points_of(b"prefix", 3) == expected
    assert set(points_of(b"Prefix", 3)).isdisjoint(expected)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_an_honest_proof_holds_and_every_number_in_it_matters(shape: Shape) -> None:
    dealt = deal(full(shape), shape, draw)
    points = points_of(b"any", shape.points)
    openings = open_at(dealt, points)
    assert all(openings) and holds(dealt, points, openings)
    for place in range(0, shape.openings, max(1, shape.openings // 5)):
        other = list(openings)
        other[place] = (other[place] + 1) % P
        assert not holds(dealt, points, other)
    for place in {0, shape.buckets - 1, shape.length - 1, shape.length, shape.explicit - 1}:
        body = dealt.shared.body.copy()
        body[place] = (int(body[place]) + 1) % P
        changed = replace(dealt, shared=SharedVector(dealt.shared.seeds, body))
        assert not holds(changed, points, openings)
    assert not holds(dealt, [point + 1 for point in points], openings)


def test_a_null_report_and_a_part_of_the_cap_hold_too() -> None:
    shape = Shape(40, 7, 100, 3)
    for histogram in ([0] * 41, [0] * 33 + [5, 0, 6, 0, 0, 0, 80, 0], [0] * 40 + [7]):
        dealt = deal(histogram, shape, draw)
        points = points_of(os.urandom(8), 2)
        assert holds(dealt, points, open_at(dealt, points))


@pytest.mark.parametrize("shape", [Shape(128, 0, 2**20, 1), Shape(70, 3, 100, 4)], ids=str)
def test_a_report_of_another_histogram_does_not_hold(shape: Shape) -> None:
    """Its proof is right, but it is not what was to be shared."""
    dealt = deal(full(shape), shape, draw)
    points = points_of(b"any", shape.points)
    openings = open_at(dealt, points)
    (label, value), *others = dealt.amounts
    assert holds(dealt, points, openings)
    for amount in ((label, value - 1), (label + 1, value), (label + 32, value), (0, 0)):
        assert not holds(replace(dealt, amounts=[amount, *others]), points, openings)


def test_numbers_outside_the_groups_do_not_hold() -> None:
    """Two buckets of another group whose numerators cancel where the device looks, if it looked there alone."""
    shape = Shape(128, 0, 2**20, 1)
    for histogram in (full(shape), [0] * 128):
        dealt = deal(histogram, shape, draw)
        points = points_of(b"any", shape.points)
        for place in (32, 63, 64, 127):
            body = dealt.shared.body.copy()
            body[place] = (int(body[place]) + 1) % P
            changed = replace(dealt, shared=SharedVector(dealt.shared.seeds, body))
            assert not holds(changed, points, open_at(dealt, points))


def _steps(histogram: list[int], shape: Shape) -> int:
    """Lines of Python that a device runs to deal, open and check, in whatever module of ours."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        if "/protocol/" not in frame.f_code.co_filename:
            return None
        count += event == "line"
        return trace

    sys.settrace(trace)
    try:
        dealt = deal(histogram, shape, draw)
        points = [2**40 + 1, 2**41 + 7]
        assert holds(dealt, points, open_at(dealt, points))
    finally:
        sys.settrace(None)
    return count


@pytest.mark.parametrize("shape", [Shape(70, 0, 2**20, 1), Shape(70, 6, 100, 1), Shape(70, 6, 100, 4)], ids=str)
def test_every_content_takes_the_same_steps(shape: Shape) -> None:
    contents = [[0] * shape.length, full(shape), [0] * 40 + [1] + [0] * (shape.length - 41)]
    if shape.spread > 1:
        contents.append([1, 2, 30, 4] + [0] * (shape.length - 4))
        contents.append([0, 1] * 2 + [0] * (shape.length - 4))
    _steps(contents[0], shape)  # tables are made once
    assert len({_steps(content, shape) for content in contents}) == 1


@pytest.mark.parametrize(
    "histogram",
    [[101, 0, 0, 0, 0], [-1, 0, 0, 0, 0], [1, 1, 1, 0, 0], [0, 0, 0, 0, 3], [0, 0, 0, 0, 12], [0, 0, 0, 0, -6]],
)
def test_what_the_coins_cannot_pay_is_not_dealt(histogram: list[int]) -> None:
    with pytest.raises(ProtocolError):
        deal(histogram, Shape(4, 6, 100, 2), draw)


def test_seeds_whose_mask_would_be_zero_are_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape(4, 0, 1, 1)
    calls = 0

    def with_a_zero(seeds: Seeds, count: int) -> Vector:
        nonlocal calls
        calls += 1
        rows = expand_many(seeds, count)
        if calls == 1:
            rows[:, -1] = 0
        return rows

    monkeypatch.setattr("protocol.validity.expand_many", with_a_zero)
    dealt = deal([1, 0, 0, 0], shape, draw)
    assert calls == 2 and all(dealt.masks)


def test_every_point_and_plane_has_a_mask_of_its_own() -> None:
    """One mask for two points would let everyone read the bucket off the header."""
    shape = Shape(8, 0, 1, 1)
    for bucket in range(8):
        dealt = deal([int(bucket == place) for place in range(8)], shape, draw)
        points = points_of(os.urandom(8), 2)
        first, second = open_at(dealt, points)
        labels = [a for a in range(1, 9) if first * (a - points[0]) % P == second * (a - points[1]) % P]
        assert labels == [] and len(set(dealt.masks)) == shape.openings


def test_seeds_used_for_two_headers_would_show_the_bucket() -> None:
    """Why a `Deal` serves one header: two points of one polynomial of degree 1 are the polynomial."""
    dealt = deal([0, 0, 0, 0, 0, 1, 0, 0], Shape(8, 0, 1, 1), draw)
    (r1, _), (r2, _) = one, other = points_of(b"one", 2), points_of(b"other", 2)
    u1, u2 = (pow(open_at(dealt, points)[0], -1, P) for points in (one, other))
    slope = (u1 - u2) * pow(r1 - r2, -1, P) % P
    assert -(u1 - slope * r1) * pow(slope, -1, P) % P == 6


@pytest.mark.parametrize("histogram", [[0, 0, 0, 0], [3, 0, 0, 0], [0, 0, 0, 1]])
def test_openings_have_the_same_law_for_every_content(histogram: list[int]) -> None:
    """χ² of the top bits: 16 bins, 15 degrees of freedom; false failure below 10^-6 for each content."""
    shape = Shape(4, 0, 3, 1)
    openings = []
    for number in range(1500):
        dealt = deal(histogram, shape, draw)
        openings += open_at(dealt, points_of(number.to_bytes(8, "big"), 2))
    values = np.array(openings, dtype=np.uint64)
    assert (values > 0).all()
    counts = np.bincount((values >> np.uint64(57)).astype(np.int64), minlength=16)
    expected = counts.sum() / 16
    assert ((counts - expected) ** 2 / expected).sum() < 58

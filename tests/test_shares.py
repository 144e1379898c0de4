"""Shares: any two helpers reconstruct, one alone sees noise, sums commute, and MPyC reads the same line."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol import field
from protocol.errors import ProtocolError
from protocol.field import P
from protocol.shares import LACKING, PARTIES, SEEDS_OF, component, open_shamir, reconstruct, share, to_shamir
from tests.support import protocol_samples as samples

VALUES = st.lists(st.integers(-(P // 2), P // 2), min_size=1, max_size=12)
LABELS = st.text(max_size=8)
# P(chi-square with 15 degrees of freedom > 70) is below 5e-9; the tests below look at 37 of them.
UNIFORM_LIMIT = 70.0


def shamir_shares(values: list[int], label: str) -> list[field.Vector]:
    shared = share(values, entropy=samples.entropy(label))
    return [to_shamir(party, shared.components(party)) for party in range(PARTIES)]


def test_every_component_is_lacking_at_exactly_one_helper() -> None:
    for party in range(PARTIES):
        assert {*SEEDS_OF[party], LACKING[party]} == {0, 1, 2}
    assert sorted(LACKING) == [0, 1, 2]


@given(VALUES, LABELS, st.sampled_from([(0, 1), (0, 2), (1, 2)]))
def test_any_two_helpers_reconstruct(values: list[int], label: str, pair: tuple[int, int]) -> None:
    shared = share(values, entropy=samples.entropy(label))
    known = {**shared.components(pair[0]), **shared.components(pair[1])}
    assert reconstruct([known[index] for index in range(PARTIES)]) == values


@pytest.mark.parametrize("secret", [0, 1, P // 2, -1])
def test_one_helpers_view_is_uniform_whatever_the_secret(secret: int) -> None:
    """Chi-square over 2,048 fresh sharings of the same secret: each component a helper knows over 16 ranges, and the
    two together over 4 by 4, for two components that are alike would each look uniform alone.

    False-failure probability: 36 statistics, each above its limit with probability below 5e-9, together below 1e-6.
    """
    shared = [share([secret], entropy=samples.entropy(f"view {index}")) for index in range(2048)]
    for party in range(PARTIES):
        views = [one.components(party) for one in shared]
        first, second = ([int(view[index][0]) for view in views] for index in SEEDS_OF[party])
        together = [4 * (one * 4 // P) + two * 4 // P for one, two in zip(first, second, strict=True)]
        assert unevenness([one * 16 // P for one in first]) < UNIFORM_LIMIT
        assert unevenness([two * 16 // P for two in second]) < UNIFORM_LIMIT
        assert unevenness(together) < UNIFORM_LIMIT


def unevenness(cells: list[int]) -> float:
    """The chi-square statistic of counts in 16 cells that should be equal: 15 degrees of freedom."""
    expected = len(cells) / 16
    counts = np.bincount(cells, minlength=16)
    return float(((counts - expected) ** 2 / expected).sum())


def test_the_body_alone_is_uniform() -> None:
    """Same limit: the body is seen by everyone, the querier included. One statistic, below 5e-9."""
    bodies = [int(share([7], entropy=samples.entropy(f"body {index}")).body[0]) for index in range(2048)]
    assert unevenness([body * 16 // P for body in bodies]) < UNIFORM_LIMIT


@given(st.lists(st.tuples(st.integers(-1000, 1000), st.integers(-1000, 1000)), min_size=1, max_size=5))
def test_sum_of_shares_is_share_of_sum(histograms: list[tuple[int, int]]) -> None:
    shared = [share(values, entropy=samples.entropy(f"sum {index}")) for index, values in enumerate(histograms)]
    expected = [sum(column) for column in zip(*histograms, strict=True)]
    shares = []
    for party in range(PARTIES):
        views = [one.components(party) for one in shared]
        sums = {index: field.sum_rows(np.stack([view[index] for view in views])) for index in SEEDS_OF[party]}
        shares.append(to_shamir(party, sums))
        added_late = field.sum_rows(np.stack([to_shamir(party, view) for view in views]))
        assert shares[party].tolist() == added_late.tolist()
    assert open_shamir(shares) == expected


@pytest.fixture(scope="module")
def mpyc_recombine() -> Callable[[list[tuple[int, list[int]]]], list[int]]:
    """MPyC's own interpolation at zero. Importing it reads the command line, so that is blanked."""
    with patch.object(sys, "argv", [""]):
        from mpyc import finfields, thresha

    gf: Any = finfields.GF(P)

    def recombine(points: list[tuple[int, list[int]]]) -> list[int]:
        return [int(value) for value in thresha.recombine(gf, points)]

    return recombine


@given(values=VALUES, label=LABELS)
def test_shamir_conversion_agrees_with_mpyc(
    mpyc_recombine: Callable[[list[tuple[int, list[int]]]], list[int]], values: list[int], label: str
) -> None:
    points = [(party + 1, vector.tolist()) for party, vector in enumerate(shamir_shares(values, label))]
    expected = [value % P for value in values]
    for chosen in (points, points[:2], points[1:], [points[0], points[2]]):
        assert [value % P for value in mpyc_recombine(chosen)] == expected


@given(VALUES, LABELS)
def test_conversion_is_the_formula_of_the_design(values: list[int], label: str) -> None:
    """Σ_{k≠i} x_k·(1 − (i+1)/(k+1)), where x_k is the component that party k lacks."""
    shared = share(values, entropy=samples.entropy(label))
    for party in range(PARTIES):
        view = shared.components(party)
        expected = [0] * len(values)
        for other in range(PARTIES):
            if other != party:
                weight = 1 - (party + 1) * pow(other + 1, -1, P)
                lacked = view[LACKING[other]].tolist()
                expected = [(total + x * weight) % P for total, x in zip(expected, lacked, strict=True)]
        assert to_shamir(party, view).tolist() == expected


@given(VALUES, LABELS, st.integers(0, 2), st.integers(1, P - 1), st.data())
def test_any_single_changed_share_is_caught(
    values: list[int], label: str, party: int, change: int, data: st.DataObject
) -> None:
    shares = shamir_shares(values, label)
    assert open_shamir(shares) == values
    bucket = data.draw(st.integers(0, len(values) - 1))
    shares[party][bucket] = (int(shares[party][bucket]) + change) % P
    with pytest.raises(ProtocolError, match="do not fit together"):
        open_shamir(shares)


def test_opening_needs_three_shares_of_one_length() -> None:
    shares = shamir_shares([1, 2], "lengths")
    for wrong in (shares[:2], [*shares, shares[0]], [shares[0], shares[1], shares[2][:1]], []):
        with pytest.raises(ProtocolError, match="three shares of the same length"):
            open_shamir(wrong)


def test_the_third_component_needs_the_body() -> None:
    with pytest.raises(ProtocolError, match="needs the body"):
        component(2, bytes(32), 4, None)


def test_seeds_do_not_show_in_the_representation() -> None:
    shared = share([1], entropy=lambda size: b"\xab" * size)
    assert "ab" not in repr(shared).replace("array", "").replace("SharedVector", "")

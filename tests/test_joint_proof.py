"""The algebra of the proof against polynomials of Python integers, and what it takes for a claim to hold."""

from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np
import pytest

from mpc_helpers.mpc.joint import proof
from mpc_helpers.mpc.joint.circuit import Words
from mpc_helpers.mpc.joint.layout import FIELD_ROWS, Layout
from mpc_helpers.mpc.joint.proof import Half
from protocol.field import P, Vector, dot
from tests.support.joint_trio import layout_of

HADAMARD = [[(-1) ** (k & j).bit_count() for j in range(4)] for k in range(4)]


def unit(code: int) -> list[int]:
    vector = [0, 0, 0, 0]
    vector[code & 3] = -1 if code & 4 else 1
    return vector


def test_a_lifted_gate_is_one_if_it_is_right_and_minus_one_if_it_is_wrong() -> None:
    for a, b, c, d, s_left, s_right in itertools.product((0, 1), repeat=6):
        u, w = unit(a + 2 * c + 4 * s_left), unit(b + 2 * d + 4 * s_right)
        v = [sum(x * y for x, y in zip(row, w, strict=True)) for row in HADAMARD]
        right = (s_left ^ s_right ^ a & b ^ c & d) == 0
        assert sum(x * y for x, y in zip(u, v, strict=True)) == (1 if right else -1)


class Example:
    """Random halves: nothing in the algebra needs the gates to be right."""

    def __init__(self, layout: Layout, seed: int) -> None:
        self.layout = layout
        self._pick = np.random.default_rng(seed)
        self.left = Half.of(layout, self.words(), self.words(), self.words(), self.elements(layout.numbers))
        self.right = Half.of(layout, self.words(), self.words(), self.words(), self.elements(layout.numbers))
        self.left_mask, self.right_mask = self.elements(layout.folded), self.elements(layout.folded)
        self.point = int(self.elements(1)[0])

    def words(self) -> Words:
        shape = (self.layout.circuit.gates, self.layout.words)
        return self._pick.integers(0, 2**64, size=shape, dtype=np.uint64)

    def elements(self, count: int) -> Vector:
        return self._pick.integers(0, P, size=count, dtype=np.uint64)

    def rows(self, half: Half, *, hadamard: bool) -> list[list[int]]:
        """Every row as a vector of the folded length, lane by lane."""
        found = []
        for row, codes in enumerate(half.codes(slice(None)).tolist()):
            vectors = [unit(code) for code in codes]
            if hadamard:
                vectors = [[sum(h * x for h, x in zip(line, w, strict=True)) for line in HADAMARD] for w in vectors]
            numbers = half.numbers[row].tolist() if row < FIELD_ROWS else [0] * self.layout.field_columns
            found.append([x for vector in vectors for x in vector] + numbers)
        return found


TINY = layout_of(Fraction(16), 1, 3)


@pytest.fixture(scope="module")
def example() -> Example:
    return Example(TINY, 5)


def test_the_layout_of_words_in_rows() -> None:
    layout = layout_of(Fraction(16), 1, 70)
    words = np.arange(1, layout.gate_words + 1, dtype=np.uint64)
    half = Half.of(layout, words, words, words, np.arange(1, layout.numbers + 1, dtype=np.uint64))
    for n in range(layout.rows * layout.columns):
        assert int(half.first[n // layout.columns, n % layout.columns]) == (n + 1 if n < layout.gate_words else 0)
    for n in range(FIELD_ROWS * layout.field_columns):
        expected = n + 1 if n < layout.numbers else 0
        assert int(half.numbers[n // layout.field_columns, n % layout.field_columns]) == expected


def test_codes_are_lane_by_lane(example: Example) -> None:
    codes = example.left.codes(slice(1, 3))
    for row, lane in ((0, 0), (0, 63), (1, 7), (1, example.layout.lanes - 1)):
        planes = (example.left.first, example.left.second, example.left.sign)
        bits = [int(plane[1 + row, lane // 64]) >> (lane % 64) & 1 for plane in planes]
        assert int(codes[row, lane]) == bits[0] + 2 * bits[1] + 4 * bits[2]


def test_coefficients_are_those_of_the_product_of_both_polynomials(example: Example) -> None:
    rows = example.layout.rows
    u = [*example.rows(example.left, hadamard=False), example.left_mask.tolist()]
    v = [example.right_mask.tolist(), *example.rows(example.right, hadamard=True)]
    expected = dict.fromkeys(range(1 - rows, rows + 2), 0)
    for (i, left), (j, right) in itertools.product(enumerate(u), enumerate(v)):
        # u_r stands at X^r and μ at X^M; ν at X and v_r at X^−r.
        expected[i + 1 - j] += sum(x * y for x, y in zip(left, right, strict=True))
    found = proof.coefficients(example.left, example.right, example.left_mask, example.right_mask)
    assert found.tolist() == [expected[e] % P for e in range(1 - rows, rows + 2) if e]


def test_folding_is_evaluating_both_polynomials(example: Example) -> None:
    rows, t = example.layout.rows, example.point
    u, v = example.rows(example.left, hadamard=False), example.rows(example.right, hadamard=True)
    left = [
        (sum(row[n] * pow(t, r, P) for r, row in enumerate(u)) + int(example.left_mask[n]) * pow(t, rows, P)) % P
        for n in range(example.layout.folded)
    ]
    right = [
        (sum(row[n] * pow(t, -r, P) for r, row in enumerate(v)) + int(example.right_mask[n]) * t) % P
        for n in range(example.layout.folded)
    ]
    assert proof.fold_left(example.left, example.left_mask, t).tolist() == left
    assert proof.fold_right(example.right, example.right_mask, t).tolist() == right


@pytest.mark.parametrize(
    ("rate", "buckets"),
    [(Fraction(16), 3), (Fraction(1, 100), 129), (Fraction(1, 100), 6000), (Fraction(1, 100), 28_000)],
)
def test_values_at_the_point_agree_with_the_coefficients(rate: Fraction, buckets: int) -> None:
    """In every size for which the work is cut differently, and with 64 and 256 rows."""
    example = Example(layout_of(rate, 1, buckets), buckets)
    sent = proof.coefficients(example.left, example.right, example.left_mask, example.right_mask)
    folded = proof.fold_left(example.left, example.left_mask, example.point)
    own = proof.fold_right(example.right, example.right_mask, example.point)
    planes = zip(
        (example.left.first, example.left.second, example.left.sign),
        (example.right.first, example.right.second, example.right.sign),
        strict=True,
    )
    (a, b), (c, d), (s_left, s_right) = planes
    wrong = int(np.bitwise_count(a & b ^ c & d ^ s_left ^ s_right).sum())
    numbers = sum(int(dot(x, y)) for x, y in zip(example.left.numbers, example.right.numbers, strict=True))
    constant = example.layout.lifted_gates - 2 * wrong + numbers
    at_point = proof.evaluate(sent, example.layout.rows, example.point)
    assert int(dot(folded, own)) == (at_point + constant) % P


def test_rows_by_size() -> None:
    assert layout_of(Fraction(1, 100), 100, 128).rows == 64
    # 2^17 words are 425 words of 308 gates.
    assert layout_of(Fraction(1, 100), 100, 64 * 425).rows == 64
    assert layout_of(Fraction(1, 100), 100, 64 * 426).rows == 256

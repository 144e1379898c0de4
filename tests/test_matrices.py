"""Exact products of matrices over the field, held against Python's integers, at the sizes where doubles would round."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.field import P, Vector
from protocol.matrices import MAX_INNER, multiply_matrices


def by_integers(left: Vector, right: Vector) -> list[list[int]]:
    columns = list(zip(*right.tolist(), strict=True))
    return [[sum(a * b for a, b in zip(row, column, strict=True)) % P for column in columns] for row in left.tolist()]


@given(st.integers(1, 5), st.integers(1, 40), st.integers(1, 5), st.integers(0, 2**32))
def test_matrix_products_agree_with_integers(rows: int, inner: int, columns: int, seed: int) -> None:
    draw = np.random.default_rng(seed)
    left = draw.integers(0, P, size=(rows, inner), dtype=np.uint64)
    right = draw.integers(0, P, size=(inner, columns), dtype=np.uint64)
    assert multiply_matrices(left, right).tolist() == by_integers(left, right)


@pytest.mark.parametrize("element", [P - 1, 2**42 - 1, 2**61 - 2**42 - 1, 2**21 - 1])
@pytest.mark.parametrize("inner", [1, MAX_INNER - 1, MAX_INNER, MAX_INNER + 1, 3 * MAX_INNER])
@pytest.mark.parametrize("left_word", [None, 2**64 - 1])
def test_the_largest_limbs_add_up_exactly(element: int, inner: int, left_word: int | None) -> None:
    """Limbs of all ones, as many of them as may meet; one unit lost anywhere would show."""
    left = np.full((2, inner), element if left_word is None else left_word, dtype=np.uint64)
    right = np.full((inner, 3), element, dtype=np.uint64)
    right[0, 0] -= np.uint64(1)
    assert multiply_matrices(left, right).tolist() == by_integers(left, right)


def test_stacks_are_multiplied_one_by_one() -> None:
    draw = np.random.default_rng(11)
    left = draw.integers(0, P, size=(4, 2, 33), dtype=np.uint64)
    right = draw.integers(0, P, size=(4, 33, 2), dtype=np.uint64)
    product = multiply_matrices(left, right)
    assert [matrix.tolist() for matrix in product] == [by_integers(a, b) for a, b in zip(left, right, strict=True)]
    shared = multiply_matrices(left, right[0])
    assert shared[3].tolist() == by_integers(left[3], right[0])

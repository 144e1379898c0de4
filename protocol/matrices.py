"""Products of matrices over the field, exactly, by the floating-point unit.

An element is cut into three limbs of 21 bits. Products of limbs have 42 bits, or 43 where the left factor is a whole
word, so 2^8 of them, three times over, add up below 2^53: a double holds every such sum exactly, in whatever order a
library adds. What numpy's matrix product does in a few instructions then takes the place of thousands of 61-bit
products, which are twenty times as slow.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from protocol.field import Vector, add, reduce

LIMBS = 3
LIMB_BITS = 21
# Three products of two limbs meet in the middle: 2^8·(2·2^42 + 2^43) < 2^53.
MAX_INNER = 2**8

Limbs = npt.NDArray[np.float64]

_LIMB = np.uint64(LIMB_BITS)
_TWO_LIMBS = np.uint64(2 * LIMB_BITS)
_LIMB_MASK = np.uint64(2**LIMB_BITS - 1)
_REST = np.uint64(61 - LIMB_BITS)
_LOW = np.uint64(2 ** (61 - LIMB_BITS) - 1)


def multiply_matrices(left: Vector, right: Vector) -> Vector:
    """(…, n, k) by (…, k, m), stacks of matrices: on the left any words, on the right reduced elements."""
    rows, columns = split_rows(left), split_columns(right)
    total = multiply_limbs(rows[..., :MAX_INNER], columns[..., :MAX_INNER, :])
    for start in range(MAX_INNER, left.shape[-1], MAX_INNER):
        part = slice(start, start + MAX_INNER)
        total = add(total, multiply_limbs(rows[..., part], columns[..., part, :]))
    return total


def split_rows(matrix: Vector) -> Limbs:
    """(…, n, k) words as (…, 3n, k) limbs: the lowest of all rows, then the middle ones, then the highest."""
    *stack, rows, inner = matrix.shape
    limbs = np.empty((*stack, LIMBS, rows, inner))
    split(matrix, limbs[..., 0, :, :], limbs[..., 1, :, :], limbs[..., 2, :, :])
    return limbs.reshape(*stack, LIMBS * rows, inner)


def split_columns(matrix: Vector) -> Limbs:
    """(…, k, m) elements as (…, k, 3m) limbs, in the same order."""
    *stack, inner, columns = matrix.shape
    limbs = np.empty((*stack, inner, LIMBS, columns))
    split(matrix, limbs[..., 0, :], limbs[..., 1, :], limbs[..., 2, :])
    return limbs.reshape(*stack, inner, LIMBS * columns)


def multiply_limbs(rows: Limbs, columns: Limbs) -> Vector:
    """The product of what `split_rows` and `split_columns` gave, with at most `MAX_INNER` terms in every sum."""
    product = np.matmul(rows, columns)
    *stack, height, width = product.shape
    parts = product.reshape(*stack, LIMBS, height // LIMBS, LIMBS, width // LIMBS)
    return join(np.moveaxis(parts, (-4, -2), (0, 1)))


def join(parts: Limbs) -> Vector:
    """What the products of limbs i of the left and j of the right, in `parts[i, j]`, come to together."""
    places = (
        parts[0, 0],
        parts[0, 1] + parts[1, 0],
        parts[0, 2] + parts[1, 1] + parts[2, 0],
        parts[1, 2] + parts[2, 1],
        parts[2, 2],
    )
    total = places[-1].astype(np.uint64)
    for place in reversed(places[:-1]):
        total = _shift_limb(total)
        total += place.astype(np.uint64)
    return reduce(total)


def split(matrix: Vector, low: Limbs, middle: Limbs, high: Limbs) -> None:
    """Words as three limbs, the highest of which has 22 bits if a word has all 64."""
    limb = matrix & _LIMB_MASK
    # As signed numbers, which they are too: those are converted faster.
    signed = limb.view(np.int64)
    low[...] = signed
    np.right_shift(matrix, _LIMB, out=limb)
    limb &= _LIMB_MASK
    middle[...] = signed
    np.right_shift(matrix, _TWO_LIMBS, out=limb)
    high[...] = signed


def _shift_limb(values: Vector) -> Vector:
    """2^21 times numbers below 2^62, to below 2^62: with 2^61 ≡ 1, the bits that leave at the top come in below."""
    shifted = values >> _REST
    kept = values & _LOW
    kept <<= _LIMB
    shifted += kept
    return shifted

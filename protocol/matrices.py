"""Products of matrices over the field, exactly, by the floating-point unit.

An element is cut into three limbs of 21 bits. Products of limbs have 42 bits, so 2^9 of them, three times over, add up
below 2^53: a double holds every such sum exactly, in whatever order a library adds. What numpy's matrix product does
in a few instructions then takes the place of thousands of 61-bit products, which are twenty times as slow.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from protocol.errors import ProtocolError
from protocol.field import Vector, reduce

LIMBS = 3
LIMB_BITS = 21
# Three products of two limbs meet in the middle: 3·2^9·(2^21 − 1)² < 2^53.
MAX_INNER = 2**9

Limbs = npt.NDArray[np.float64]

_LIMB = np.uint64(LIMB_BITS)
_TWO_LIMBS = np.uint64(2 * LIMB_BITS)
_LIMB_MASK = np.uint64(2**LIMB_BITS - 1)
_REST = np.uint64(61 - LIMB_BITS)
_LOW = np.uint64(2 ** (61 - LIMB_BITS) - 1)


def multiply_matrices(left: Vector, right: Vector) -> Vector:
    """(…, n, k) by (…, k, m), stacks of matrices of reduced elements, with k at most `MAX_INNER`."""
    return multiply_limbs(split_rows(left), split_columns(right))


def split_rows(matrix: Vector) -> Limbs:
    """(…, n, k) elements as (…, 3n, k) limbs: the lowest of all rows, then the middle ones, then the highest."""
    *stack, rows, inner = matrix.shape
    limbs = np.empty((*stack, LIMBS, rows, inner))
    _split(matrix, limbs[..., 0, :, :], limbs[..., 1, :, :], limbs[..., 2, :, :])
    return limbs.reshape(*stack, LIMBS * rows, inner)


def split_columns(matrix: Vector) -> Limbs:
    """(…, k, m) elements as (…, k, 3m) limbs, in the same order."""
    *stack, inner, columns = matrix.shape
    limbs = np.empty((*stack, inner, LIMBS, columns))
    _split(matrix, limbs[..., 0, :], limbs[..., 1, :], limbs[..., 2, :])
    return limbs.reshape(*stack, inner, LIMBS * columns)


def multiply_limbs(left: Limbs, right: Limbs) -> Vector:
    """The product of what `split_rows` and `split_columns` gave: for a factor that is used more than once."""
    if left.shape[-1] > MAX_INNER:
        raise ProtocolError(f"at most {MAX_INNER} products add up exactly, not {left.shape[-1]}")
    product = np.matmul(left, right)
    *stack, rows, columns = product.shape
    parts = product.reshape(*stack, LIMBS, rows // LIMBS, LIMBS, columns // LIMBS)

    def of(row: int, column: int) -> Limbs:
        part: Limbs = parts[..., row, :, column, :]
        return part

    places = (
        of(0, 0),
        of(0, 1) + of(1, 0),
        of(0, 2) + of(1, 1) + of(2, 0),
        of(1, 2) + of(2, 1),
        of(2, 2),
    )
    total = places[-1].astype(np.uint64)
    for place in reversed(places[:-1]):
        total = _shift_limb(total)
        total += place.astype(np.uint64)
    return reduce(total)


def _split(matrix: Vector, low: Limbs, middle: Limbs, high: Limbs) -> None:
    low[...] = matrix & _LIMB_MASK
    middle[...] = (matrix >> _LIMB) & _LIMB_MASK
    high[...] = matrix >> _TWO_LIMBS


def _shift_limb(values: Vector) -> Vector:
    """2^21 times numbers below 2^62, to below 2^62: with 2^61 ≡ 1, the bits that leave at the top come in below."""
    shifted = values >> _REST
    kept = values & _LOW
    kept <<= _LIMB
    shifted += kept
    return shifted

"""A one-round proof that everything a party sent was correct, to two verifiers who each know half of its inputs.

Of prover i, the left verifier i + 2 holds all components i + 1; the right verifier i + 1 holds all components i + 2 and
what the prover sent. The claim is ⟨u, v⟩ = T: the left verifier knows u, the right one v, and T is the sum of a part
known to each (JOINT.md §3).

A gate's relation s_L ⊕ s_R ⊕ ab ⊕ cd = 0 becomes a product of signs: with u = (−1)^s_L·unit(a + 2c) and
v = H·(−1)^s_R·unit(b + 2d), H the 4 × 4 Hadamard matrix, ⟨u, v⟩ is 1 for a correct gate and −1 for a wrong one. So N
gates are one inner product that is N, and no weights are needed. Rows are folded with powers of a point X:

    U(X) = Σ u_r·X^r + μ·X^M        V(X) = Σ v_r·X^−r + ν·X

The coefficient of X^0 in ⟨U, V⟩ is ⟨u, v⟩. The prover sends all others; the verifiers compare at a secret point.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from mpc_helpers.mpc.joint.circuit import Words
from mpc_helpers.mpc.joint.layout import FIELD_ROWS, LIFTED, Layout
from protocol.field import P, Vector, add, dot, multiply, reduce, subtract, sum_rows, total

Codes = npt.NDArray[np.uint8]
_Number = TypeVar("_Number", np.int64, np.uint64)

_CODES = 2 * LIFTED
_P = np.uint64(P)
# Work is cut into blocks of about this many words, which stay in the processor's cache.
_BLOCK = 2**15
# Gates up to which a fold is done at once, and the rows that share a look-up beyond.
_FEW_GATES = 2**17
_GROUP = 4
# Reduced elements that add up within a word, beside the sum so far.
_ADDENDS = 6


@dataclass(frozen=True, slots=True)
class Half:
    """What one verifier knows of a claim: a code per gate, as three bit planes of rows × columns, and field numbers.

    The code first + 2·second + 4·sign is the signed unit vector (−1)^sign·unit(first + 2·second).
    """

    first: Words
    second: Words
    sign: Words
    numbers: Vector

    @classmethod
    def of(cls, layout: Layout, first: Words, second: Words, sign: Words, numbers: Vector) -> Half:
        """Cut gate-major words into rows and bucket-major numbers into eight rows, both padded with zeros."""
        first, second, sign = (_rows(plane, layout.rows, layout.columns) for plane in (first, second, sign))
        return cls(first, second, sign, _rows(numbers, FIELD_ROWS, layout.field_columns))

    def codes(self, rows: slice) -> Codes:
        """Return the codes of these rows, one byte per gate."""
        result = _bits(self.sign[rows])
        for plane in (self.second, self.first):
            result <<= 1
            result |= _bits(plane[rows])
        return result


def _rows(values: npt.NDArray[np.uint64], rows: int, columns: int) -> npt.NDArray[np.uint64]:
    flat = values.reshape(-1)
    if flat.size < rows * columns:
        flat = np.concatenate([flat, np.zeros(rows * columns - flat.size, dtype=np.uint64)])
    return flat.reshape(rows, columns)


def _bits(words: Words) -> Codes:
    """Unpack bit i of word w into byte 64w + i, on a machine of any byte order."""
    raw = np.ascontiguousarray(words.astype("<u8", copy=False)).view(np.uint8)
    return np.unpackbits(raw, axis=1, bitorder="little")


def coefficients(left: Half, right: Half, left_mask: Vector, right_mask: Vector) -> Vector:
    """Return ⟨U, V⟩ from X^(1 − M) to X^(M + 1), without X^0. Run by the prover, who knows both halves."""
    rows = left.first.shape[0]
    zero = rows - 1  # where the coefficient of X^0 stands
    result = np.zeros(2 * rows + 1, dtype=np.uint64)
    result[: 2 * zero + 1] = np.mod(_diagonals(_agreements(left, right)), P)
    near = slice(zero + 1 - FIELD_ROWS, zero + FIELD_ROWS)
    result[near] += reduce(_diagonals(_field_products(left.numbers, right.numbers)))
    # Row r of u meets ν at exponent r + 1; row r of v meets μ at M − r.
    result[zero + 1 : -1] += _masked(left, right_mask)
    result[zero + 1 : -1] += _masked(right, left_mask, hadamard=True)[::-1]
    result[-1] = dot(left_mask, right_mask)
    return np.delete(reduce(result), zero)


def _agreements(left: Half, right: Half) -> npt.NDArray[np.int64]:
    """Return Σ over gates of ⟨u_r, v_s⟩ for all rows r and s: XOR and popcount on 64 gates a word, no field numbers."""
    rows, columns = left.first.shape
    wrong = np.empty((rows, rows), dtype=np.int64)
    step = max(1, _BLOCK // (rows * columns))
    for start in range(0, rows, step):
        some = slice(start, start + step)
        result = left.first[some, None] & right.first[None]
        result ^= left.second[some, None] & right.second[None]
        result ^= left.sign[some, None]
        result ^= right.sign[None]
        wrong[some] = np.bitwise_count(result).sum(axis=2, dtype=np.int64)
    wrong *= -2
    wrong += 64 * columns
    return wrong


def _diagonals(matrix: npt.NDArray[_Number]) -> npt.NDArray[_Number]:
    """Return the sums over r − s = 1 − M, …, M − 1: shift row r by r places, then add up the columns."""
    rows = matrix.shape[0]
    skewed = np.zeros((rows, 2 * rows), dtype=matrix.dtype)
    skewed[:, :rows] = matrix[:, ::-1]
    cut = skewed.reshape(-1)[: rows * (2 * rows - 1)].reshape(rows, 2 * rows - 1)
    sums: npt.NDArray[_Number] = np.add.reduce(cut, axis=0)
    return sums


def _field_products(left: Vector, right: Vector) -> Vector:
    """Return ⟨row r, row s⟩ for the eight rows of both. Sums of eight reduced elements fit a word."""
    if left.size * FIELD_ROWS <= _BLOCK:
        return dot(left[:, None], right[None])
    return np.stack([dot(row[None], right) for row in left])


def _masked(half: Half, mask: Vector, *, hadamard: bool = False) -> Vector:
    """Return ⟨row, mask⟩ for every row: over its gates and, in the first eight, its numbers."""
    rows, columns = half.first.shape
    lanes = 64 * columns
    of_gates, of_numbers = mask[: LIFTED * lanes].reshape(lanes, LIFTED), mask[LIFTED * lanes :]
    if hadamard:
        of_gates = transformed(of_gates)
    table = np.concatenate([of_gates, _negated(of_gates)], axis=1).reshape(-1)
    places = np.arange(0, _CODES * lanes, _CODES, dtype=np.intp)
    result = np.empty(rows, dtype=np.uint64)
    step = max(1, _BLOCK // lanes)
    for start in range(0, rows, step):
        some = slice(start, start + step)
        result[some] = total(np.take(table, places + half.codes(some)))
    result[:FIELD_ROWS] = add(result[:FIELD_ROWS], dot(half.numbers, of_numbers))
    return result


def _negated(vector: Vector) -> Vector:
    return reduce(_P - vector)


def transformed(vectors: Vector) -> Vector:
    """Return H·w for every row w, with H[k][k'] = (−1)^popcount(k ∧ k')."""
    w0, w1, w2, w3 = vectors.T
    sums, differences = (add(w0, w1), add(w2, w3)), (subtract(w0, w1), subtract(w2, w3))
    return np.stack(
        [add(*sums), add(*differences), subtract(*sums), subtract(*differences)],
        axis=1,
    )


def fold_left(half: Half, mask: Vector, point: int) -> Vector:
    """Return U(t). Run by the left verifier."""
    rows = half.first.shape[0]
    powers = _powers(point, rows)
    gates = _folded_gates(half, powers).reshape(-1)
    return _with_mask(gates, _folded_numbers(half, powers), mask, pow(point, rows, P))


def fold_right(half: Half, mask: Vector, point: int) -> Vector:
    """Return V(t). Run by the right verifier."""
    powers = _powers(pow(point, -1, P), half.first.shape[0])
    gates = transformed(_folded_gates(half, powers)).reshape(-1)
    return _with_mask(gates, _folded_numbers(half, powers), mask, point)


def evaluate(values: Vector, rows: int, point: int) -> int:
    """Return Σ values·t^exponent over the exponents −(M − 1) to M + 1 without 0."""
    inverse = pow(point, -1, P)
    below, above = _powers(inverse, rows)[:0:-1], _powers(point, rows + 2)[1:]
    return int(dot(values, np.concatenate([below, above])))


def _powers(base: int, count: int) -> Vector:
    result = [1]
    while len(result) < count:
        result.append(result[-1] * base % P)
    return np.array(result, dtype=np.uint64)


def _with_mask(gates: Vector, numbers: Vector, mask: Vector, factor: int) -> Vector:
    return add(np.concatenate([gates, numbers]), multiply(mask, np.array([factor], dtype=np.uint64)))


def _folded_numbers(half: Half, powers: Vector) -> Vector:
    # Eight reduced numbers add up within a word.
    return reduce(np.add.reduce(multiply(half.numbers, powers[:FIELD_ROWS, None]), axis=0))


def _folded_gates(half: Half, powers: Vector) -> Vector:
    """Return Σ_r powers[r]·(signed unit vector of row r), lanes × 4. Several rows share one table look-up."""
    rows, columns = half.first.shape
    lanes = 64 * columns
    if rows * lanes <= _FEW_GATES:
        # Two rows a look-up, all in one call: with few gates, the overhead of numpy calls dominates.
        index = _joined(half.codes(slice(None)).reshape(-1, 2, lanes))
        tables = _tables(powers.reshape(-1, 2))
        index += np.arange(0, tables.shape[0] * tables.shape[1], tables.shape[1])[:, None]
        result = np.take(tables.reshape(-1, LIFTED), index, axis=0)
        return sum_rows(result.reshape(index.shape[0], -1)).reshape(lanes, LIFTED)
    folded = np.zeros((lanes, LIFTED), dtype=np.uint64)
    for start in range(0, rows, _GROUP):
        some = slice(start, start + _GROUP)
        (index,) = _joined(half.codes(some)[None])
        folded += np.take(_tables(powers[None, some])[0], index, axis=0)
        if start // _GROUP % _ADDENDS == _ADDENDS - 1:
            folded = reduce(folded)
    return reduce(folded)


def _joined(codes: Codes) -> npt.NDArray[np.intp]:
    """Return the codes of all rows of a group as one index, the first row's in the lowest place."""
    index = codes[:, -1].astype(np.intp)
    for row in reversed(range(codes.shape[1] - 1)):
        index *= _CODES
        index += codes[:, row]
    return index


def _tables(powers: Vector) -> Vector:
    """Return for each group of rows the folded vector of every combination of codes."""
    groups, rows = powers.shape
    tables = np.zeros((groups, 1, LIFTED), dtype=np.uint64)
    places = np.arange(LIFTED)
    for row in range(rows):
        own = np.zeros((groups, _CODES, LIFTED), dtype=np.uint64)
        own[:, places, places] = powers[:, row, None]
        own[:, LIFTED + places, places] = _P - powers[:, row, None]
        tables = add(own[:, :, None], tables[:, None]).reshape(groups, -1, LIFTED)
    return tables

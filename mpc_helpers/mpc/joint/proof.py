"""A one-round proof that everything a party sent was right, to two verifiers who each know half of what it used.

Prover i; its left verifier i + 2 holds all components i + 1, its right verifier i + 1 all components i + 2 and what it
received. The claim is ⟨u, v⟩ = T with u known left, v known right and T the sum of a part of each (JOINT.md §3).

A gate's relation s_L ⊕ s_R ⊕ ab ⊕ cd = 0 becomes a product of signs: with u = (−1)^s_L·unit(a + 2c) and
v = H·(−1)^s_R·unit(b + 2d), H the 4 × 4 Hadamard matrix, ⟨u, v⟩ is 1 for a right gate and −1 for a wrong one. So N
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
        """Gate-major words as rows, and bucket-major numbers as eight rows, both filled up with zeros."""
        first, second, sign = (_rows(plane, layout.rows, layout.columns) for plane in (first, second, sign))
        return cls(first, second, sign, _rows(numbers, FIELD_ROWS, layout.field_columns))

    def codes(self, rows: slice) -> Codes:
        """One byte per gate of these rows."""
        found = _bits(self.sign[rows])
        for plane in (self.second, self.first):
            found <<= 1
            found |= _bits(plane[rows])
        return found


def _rows(values: npt.NDArray[np.uint64], rows: int, columns: int) -> npt.NDArray[np.uint64]:
    flat = values.reshape(-1)
    if flat.size < rows * columns:
        flat = np.concatenate([flat, np.zeros(rows * columns - flat.size, dtype=np.uint64)])
    return flat.reshape(rows, columns)


def _bits(words: Words) -> Codes:
    """Bit i of word w as byte 64w + i, whatever the byte order of this machine."""
    raw = np.ascontiguousarray(words.astype("<u8", copy=False)).view(np.uint8)
    return np.unpackbits(raw, axis=1, bitorder="little")


def coefficients(left: Half, right: Half, left_mask: Vector, right_mask: Vector) -> Vector:
    """Run by the prover, who knows both halves: ⟨U, V⟩ from X^(1 − M) to X^(M + 1), without its coefficient of X^0."""
    rows = left.first.shape[0]
    zero = rows - 1  # where the coefficient of X^0 stands
    found = np.zeros(2 * rows + 1, dtype=np.uint64)
    found[: 2 * zero + 1] = np.mod(_diagonals(_agreements(left, right)), P)
    near = slice(zero + 1 - FIELD_ROWS, zero + FIELD_ROWS)
    found[near] += reduce(_diagonals(_field_products(left.numbers, right.numbers)))
    # Row r of u meets ν at exponent r + 1; row r of v meets μ at M − r.
    found[zero + 1 : -1] += _masked(left, right_mask)
    found[zero + 1 : -1] += _masked(right, left_mask, hadamard=True)[::-1]
    found[-1] = dot(left_mask, right_mask)
    return np.delete(reduce(found), zero)


def _agreements(left: Half, right: Half) -> npt.NDArray[np.int64]:
    """For rows r of u and s of v: Σ over gates of ⟨u_r, v_s⟩, 64 gates an instruction; nothing is lifted."""
    rows, columns = left.first.shape
    wrong = np.empty((rows, rows), dtype=np.int64)
    step = max(1, _BLOCK // (rows * columns))
    for start in range(0, rows, step):
        some = slice(start, start + step)
        found = left.first[some, None] & right.first[None]
        found ^= left.second[some, None] & right.second[None]
        found ^= left.sign[some, None]
        found ^= right.sign[None]
        wrong[some] = np.bitwise_count(found).sum(axis=2, dtype=np.int64)
    wrong *= -2
    wrong += 64 * columns
    return wrong


def _diagonals(matrix: npt.NDArray[_Number]) -> npt.NDArray[_Number]:
    """Sums over r − s = 1 − M, …, M − 1: each row is put one place further, then columns are added up."""
    rows = matrix.shape[0]
    skewed = np.zeros((rows, 2 * rows), dtype=matrix.dtype)
    skewed[:, :rows] = matrix[:, ::-1]
    cut = skewed.reshape(-1)[: rows * (2 * rows - 1)].reshape(rows, 2 * rows - 1)
    sums: npt.NDArray[_Number] = np.add.reduce(cut, axis=0)
    return sums


def _field_products(left: Vector, right: Vector) -> Vector:
    """⟨row r, row s⟩ for the eight rows of both: their diagonals add up within a word."""
    if left.size * FIELD_ROWS <= _BLOCK:
        return dot(left[:, None], right[None])
    return np.stack([dot(row[None], right) for row in left])


def _masked(half: Half, mask: Vector, *, hadamard: bool = False) -> Vector:
    """⟨row, mask⟩ for every row: of gates and, in the first eight, of numbers."""
    rows, columns = half.first.shape
    lanes = 64 * columns
    of_gates, of_numbers = mask[: LIFTED * lanes].reshape(lanes, LIFTED), mask[LIFTED * lanes :]
    if hadamard:
        of_gates = transformed(of_gates)
    table = np.concatenate([of_gates, _negated(of_gates)], axis=1).reshape(-1)
    places = np.arange(0, _CODES * lanes, _CODES, dtype=np.intp)
    found = np.empty(rows, dtype=np.uint64)
    step = max(1, _BLOCK // lanes)
    for start in range(0, rows, step):
        some = slice(start, start + step)
        found[some] = total(np.take(table, places + half.codes(some)))
    found[:FIELD_ROWS] = add(found[:FIELD_ROWS], dot(half.numbers, of_numbers))
    return found


def _negated(vector: Vector) -> Vector:
    return reduce(_P - vector)


def transformed(vectors: Vector) -> Vector:
    """H·w for every row w: H[k][k'] = (−1)^popcount(k ∧ k')."""
    w0, w1, w2, w3 = vectors.T
    sums, differences = (add(w0, w1), add(w2, w3)), (subtract(w0, w1), subtract(w2, w3))
    return np.stack(
        [add(*sums), add(*differences), subtract(*sums), subtract(*differences)],
        axis=1,
    )


def fold_left(half: Half, mask: Vector, point: int) -> Vector:
    """Run by the left verifier: U(t)."""
    rows = half.first.shape[0]
    powers = _powers(point, rows)
    gates = _folded_gates(half, powers).reshape(-1)
    return _with_mask(gates, _folded_numbers(half, powers), mask, pow(point, rows, P))


def fold_right(half: Half, mask: Vector, point: int) -> Vector:
    """Run by the right verifier: V(t)."""
    powers = _powers(pow(point, -1, P), half.first.shape[0])
    gates = transformed(_folded_gates(half, powers)).reshape(-1)
    return _with_mask(gates, _folded_numbers(half, powers), mask, point)


def evaluate(values: Vector, rows: int, point: int) -> int:
    """Σ values·t^exponent over the coefficients that are sent."""
    inverse = pow(point, -1, P)
    below, above = _powers(inverse, rows)[:0:-1], _powers(point, rows + 2)[1:]
    return int(dot(values, np.concatenate([below, above])))


def _powers(base: int, count: int) -> Vector:
    found = [1]
    while len(found) < count:
        found.append(found[-1] * base % P)
    return np.array(found, dtype=np.uint64)


def _with_mask(gates: Vector, numbers: Vector, mask: Vector, factor: int) -> Vector:
    return add(np.concatenate([gates, numbers]), multiply(mask, np.array([factor], dtype=np.uint64)))


def _folded_numbers(half: Half, powers: Vector) -> Vector:
    # Eight reduced numbers add up within a word.
    return reduce(np.add.reduce(multiply(half.numbers, powers[:FIELD_ROWS, None]), axis=0))


def _folded_gates(half: Half, powers: Vector) -> Vector:
    """Σ_r powers[r]·(signed unit vector of row r), lanes × 4. Several rows share one look-up of four numbers."""
    rows, columns = half.first.shape
    lanes = 64 * columns
    if rows * lanes <= _FEW_GATES:
        # Two rows a look-up and all at once: with few gates, calls of numpy are what takes time.
        index = _joined(half.codes(slice(None)).reshape(-1, 2, lanes))
        tables = _tables(powers.reshape(-1, 2))
        index += np.arange(0, tables.shape[0] * tables.shape[1], tables.shape[1])[:, None]
        found = np.take(tables.reshape(-1, LIFTED), index, axis=0)
        return sum_rows(found.reshape(index.shape[0], -1)).reshape(lanes, LIFTED)
    folded = np.zeros((lanes, LIFTED), dtype=np.uint64)
    for start in range(0, rows, _GROUP):
        some = slice(start, start + _GROUP)
        (index,) = _joined(half.codes(some)[None])
        folded += np.take(_tables(powers[None, some])[0], index, axis=0)
        if start // _GROUP % _ADDENDS == _ADDENDS - 1:
            folded = reduce(folded)
    return reduce(folded)


def _joined(codes: Codes) -> npt.NDArray[np.intp]:
    """Codes of all rows of a group as one number, that of the first row lowest."""
    index = codes[:, -1].astype(np.intp)
    for row in reversed(range(codes.shape[1] - 1)):
        index *= _CODES
        index += codes[:, row]
    return index


def _tables(powers: Vector) -> Vector:
    """For each group of rows: folded vectors for all codes of its rows."""
    groups, rows = powers.shape
    tables = np.zeros((groups, 1, LIFTED), dtype=np.uint64)
    places = np.arange(LIFTED)
    for row in range(rows):
        own = np.zeros((groups, _CODES, LIFTED), dtype=np.uint64)
        own[:, places, places] = powers[:, row, None]
        own[:, LIFTED + places, places] = _P - powers[:, row, None]
        tables = add(own[:, :, None], tables[:, None]).reshape(groups, -1, LIFTED)
    return tables

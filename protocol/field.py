"""Vectors over the prime field of p = 2^61 − 1, in numpy `uint64`.

The prime leaves three bits of headroom in a word, so seven reduced rows add up before one reduction; a Mersenne
prime reduces with a shift and an addition. Sums of a million reports therefore cost about what the plaintext sum does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from protocol.errors import ProtocolError

P = 2**61 - 1
SEED_SIZE = 32
ELEMENT_SIZE = 8
# Seven reduced rows stay below 2^64 - 1; an eighth could pass it.
ROWS_PER_REDUCTION = 7

Vector = npt.NDArray[np.uint64]

_P = np.uint64(P)
_SHIFT = np.uint64(61)
_DROPPED_BITS = np.uint64(64 - 61)
_EXPAND_PREFIX = hashlib.sha256(b"trefoil/1 expand")


def from_integers(values: Sequence[int]) -> Vector:
    """Signed integers as field elements; the reverse of `lift` within ±(p−1)/2."""
    return np.array([value % P for value in values], dtype=np.uint64)


def lift(vector: Vector) -> list[int]:
    """Field elements as the signed integers nearest zero, so that a negative noisy count prints as negative."""
    half = P // 2
    return [int(value) - P if value > half else int(value) for value in vector.tolist()]


def reduce(vector: Vector) -> Vector:
    """The canonical representative below p of any `uint64`. 2^61 ≡ 1, so the top bits are simply added."""
    folded = (vector & _P) + (vector >> _SHIFT)
    # folded ≤ p + 7, so one conditional subtraction is enough; where it is not needed it wraps to a huge number.
    return np.minimum(folded, folded - _P)


def add(left: Vector, right: Vector) -> Vector:
    """Sum of two reduced vectors."""
    return reduce(left + right)


def subtract(left: Vector, right: Vector) -> Vector:
    """Difference of two reduced vectors."""
    return reduce(left + (_P - right))


def sum_rows(rows: Vector) -> Vector:
    """The column sums of a matrix of reduced rows, with one reduction for every seven rows."""
    # Blocks that stay in the processor's cache: the plaintext sum reads each word once, and so should this.
    block = ROWS_PER_REDUCTION * max(ROWS_PER_REDUCTION, 2**13 // max(rows.shape[1], 1))
    total = np.zeros(rows.shape[1], dtype=np.uint64)
    for start in range(0, rows.shape[0], block):
        total = add(total, _sum_block(rows[start : start + block]))
    return total


def _sum_block(rows: Vector) -> Vector:
    width = rows.shape[1]
    while rows.shape[0] > ROWS_PER_REDUCTION:
        groups = rows.shape[0] // ROWS_PER_REDUCTION
        taken = groups * ROWS_PER_REDUCTION
        summed = reduce(np.add.reduce(rows[:taken].reshape(ROWS_PER_REDUCTION, groups * width), axis=0))
        rows = np.concatenate([summed.reshape(groups, width), rows[taken:]])
    total: Vector = np.add.reduce(rows, axis=0)
    return reduce(total)


def expand(seed: bytes, count: int) -> Vector:
    """`count` field elements from a 32-byte seed, exactly uniform if the seed is."""
    row: Vector = expand_many([seed], count)[0]
    return row


def expand_many(seeds: Sequence[bytes], count: int) -> Vector:
    """One row of `count` field elements per seed.

    An AES-128-CTR keystream is cut into little-endian words, each word keeps its top 61 bits, and a word that
    gives p itself (once in 2^61) is skipped. GCM is used for its keystream only: its one-shot interface is what makes
    AES the fastest expander here at every size (`trefoil bench report`).
    """
    zeros = bytes(ELEMENT_SIZE * count)
    # Each row ends in the 16-byte tag, which slicing the matrix drops without a copy.
    words = np.frombuffer(b"".join([_keystream(seed, zeros) for seed in seeds]), dtype="<u8")
    rows: Vector = words.reshape(len(seeds), count + 2)[:, :count] >> _DROPPED_BITS
    if rows.size and int(rows.max()) == P:
        for index in np.flatnonzero((rows == _P).any(axis=1)).tolist():
            rows[index] = _expand_with_rejection(seeds[index], count)
    return rows


def _keystream(seed: bytes, zeros: bytes) -> bytes:
    """Keystream and tag. Key and nonce are derived under a label that is not the seed commitment's."""
    if len(seed) != SEED_SIZE:
        raise ProtocolError(f"a seed has {SEED_SIZE} bytes, not {len(seed)}")
    state = _EXPAND_PREFIX.copy()
    state.update(seed)
    derived = state.digest()
    return AESGCM(derived[:16]).encrypt(derived[16:28], zeros, None)


def _expand_with_rejection(seed: bytes, count: int) -> Vector:
    """The rare path: draw more words until enough survive. Its first words are those of the common path."""
    drawn = count
    while True:
        drawn += 8
        words = np.frombuffer(_keystream(seed, bytes(ELEMENT_SIZE * drawn)), dtype="<u8")[:drawn] >> _DROPPED_BITS
        kept: Vector = words[words != _P]
        if kept.size >= count:
            return kept[:count]


def encode(vector: Vector) -> bytes:
    """Eight little-endian bytes per element: the layout numpy maps without copying."""
    return vector.astype("<u8", copy=False).tobytes()


def decode(data: bytes, count: int) -> Vector:
    """The reverse of `encode`; every element must be below p, or one vector would have several encodings."""
    if len(data) != ELEMENT_SIZE * count:
        raise ProtocolError(f"{count} field elements take {ELEMENT_SIZE * count} bytes, not {len(data)}")
    vector = np.frombuffer(data, dtype="<u8").astype(np.uint64, copy=False)
    if vector.size and int(vector.max()) >= P:
        raise ProtocolError("an element is not below p")
    return vector


def multiply_constant(vector: Vector, constant: int) -> Vector:
    """A reduced vector times a public constant. Python integers: used on m numbers, once per query."""
    return np.array([value * constant % P for value in vector.tolist()], dtype=np.uint64)

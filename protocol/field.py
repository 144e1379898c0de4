"""Vectors over the prime field of p = 2^61 − 1, in numpy `uint64`.

A Mersenne prime reduces with a shift and an addition, and it leaves three bits of headroom in a word. Sums of a million
reports take two plain sums and one reduction, so they cost about what the plaintext sum does.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from protocol.errors import ProtocolError

P = 2**61 - 1
SEED_SIZE = 32
ELEMENT_SIZE = 8

Vector = npt.NDArray[np.uint64]

_P = np.uint64(P)
_SHIFT = np.uint64(61)
_DROPPED_BITS = np.uint64(64 - 61)
_HALF = np.uint64(32)
_TOP = np.uint64(61 - 32)
_TOP_MASK = np.uint64(2 ** (61 - 32) - 1)
_BLOCK_WORDS = 2**15


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
    """The column sums of a matrix of up to 2^32 reduced rows, with a single reduction at the end.

    Σx mod 2^64 and Σ⌊x/2^32⌋ are two plain sums that determine Σx: what the upper halves leave over is below
    2^32 times the number of rows, so the wrapped sum still shows it exactly.
    """
    high = np.zeros(rows.shape[1], dtype=np.uint64)
    wrapped = np.zeros(rows.shape[1], dtype=np.uint64)
    # Blocks that stay in the processor's cache: the plaintext sum reads each word once from memory, and so does this.
    block = max(1, _BLOCK_WORDS // max(rows.shape[1], 1))
    for start in range(0, rows.shape[0], block):
        part = rows[start : start + block]
        high += np.add.reduce(part >> _HALF, axis=0)
        wrapped += np.add.reduce(part, axis=0)
    low = wrapped - (high << _HALF)
    # 2^32·high ≡ ⌊high/2^29⌋ + 2^32·(high mod 2^29), because 2^61 ≡ 1.
    return reduce(reduce(low) + (high >> _TOP) + ((high & _TOP_MASK) << _HALF))


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
    """Keystream and tag. A seed is used for one expansion only: 16 bytes are its key and 12 its nonce."""
    if len(seed) != SEED_SIZE:
        raise ProtocolError(f"a seed has {SEED_SIZE} bytes, not {len(seed)}")
    return AESGCM(seed[:16]).encrypt(seed[16:28], zeros, None)


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

"""Vectors over the prime field of p = 2^61 − 1, in numpy `uint64`.

A Mersenne prime reduces with a shift and an addition, and it leaves three bits of headroom in a word. Sums of a million
reports take two plain sums and one reduction, so they cost about what the plaintext sum does.

Products of matrices are exact in the floating-point unit: an element is cut into three limbs of 21 bits. Products of
limbs have 42 bits, or 43 where the left factor is a whole word, so 2^8 of them, three times over, add up below 2^53: a
double holds every such sum exactly, in whatever order a library adds. What numpy's matrix product does in a few
instructions then takes the place of thousands of 61-bit products, which are twenty times as slow.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from gmpy2 import invert, mpz

from protocol.errors import ErrorKind, InvalidValue, OutOfRange, ProtocolError
from protocol.lanes import find_lanes

P = 2**61 - 1
SEED_SIZE = 32
ELEMENT_SIZE = 8

Vector = npt.NDArray[np.uint64]

_P = np.uint64(P)
_MODULUS = mpz(P)
_SHIFT = np.uint64(61)
_DROPPED_BITS = np.uint64(64 - 61)
_HALF = np.uint64(32)
_TOP = np.uint64(61 - 32)
_TOP_MASK = np.uint64(2 ** (61 - 32) - 1)
_LOW_MASK = np.uint64(2**32 - 1)
_TAG_WORDS = 2
_EXACT_ROWS = 8
_BLOCK_WORDS = 2**15
# Fewer seeds, as a device has, are expanded by the library.
_SMALLEST_BATCH = 16
# Halves of a factor: with 31 bits each, every partial product and their sum fit into one word.
_HALF_BITS = np.uint64(31)
_HALF_MASK = np.uint64(2**31 - 1)
_OTHER_BITS = np.uint64(61 - 31)
_OTHER_MASK = np.uint64(2 ** (61 - 31) - 1)
_ONE = np.uint64(1)
# Products go through seven arrays of this many words, which a processor's second cache holds.
_PRODUCT_WORDS = 2**13
# Up to here halves are taken before anything is broadcast, and nothing is cut.
_FEW_PRODUCTS = 2**14
_FEW = 256


def from_integers(values: Sequence[int]) -> Vector:
    """Return signed integers as field elements: the inverse of `lift` within ±(p−1)/2."""
    return np.array([value % P for value in values], dtype=np.uint64)


def lift(vector: Vector) -> list[int]:
    """Return field elements as the signed integers nearest zero, so that a negative noisy count prints as negative."""
    half = P // 2
    return [int(value) - P if value > half else int(value) for value in vector.tolist()]


def reduce(vector: Vector) -> Vector:
    """Return the canonical representative below p of each `uint64`. 2^61 ≡ 1, so the top bits are simply added."""
    folded = (vector & _P) + (vector >> _SHIFT)
    # folded ≤ p + 7, so one conditional subtraction is enough; where it is not needed it wraps to a huge number.
    return np.minimum(folded, folded - _P)


def add(left: Vector, right: Vector) -> Vector:
    """Return the sum of two reduced vectors."""
    return reduce(left + right)


def subtract(left: Vector, right: Vector) -> Vector:
    """Return the difference of two reduced vectors."""
    return reduce(left + (_P - right))


def sum_rows(rows: Vector) -> Vector:
    """Return the column sums of a matrix of reduced rows."""
    total = RowSum(rows.shape[1])
    # Blocks that stay in the processor's cache: the plaintext sum reads each word once from memory, and so does this.
    block = _rows_per_block(rows.shape[1])
    for start in range(0, rows.shape[0], block):
        total.add(rows[start : start + block])
    return total.reduced()


class RowSum:
    """A running sum of up to 2^32 reduced rows, with a single reduction at the end.

    Eight elements below p add up to one word s without overflow. Σs is determined by two plain sums, of s mod 2^64 and
    of the upper halves ⌊s/2^32⌋: the lower halves add up to less than 2^32 times the number of words, hence below 2^64,
    so the wrapped sum less the upper halves is exactly their sum.
    """

    def __init__(self, count: int) -> None:
        self._high = np.zeros(count, dtype=np.uint64)
        self._wrapped = np.zeros(count, dtype=np.uint64)

    def add(self, rows: Vector) -> None:
        """Add reduced rows. Fastest if they fit into the processor's cache."""
        partial = _add_by_eights(rows)
        self._wrapped += np.add.reduce(partial, axis=0)
        partial >>= _HALF
        self._high += np.add.reduce(partial, axis=0)

    def reduced(self) -> Vector:
        """Return the sum so far. 2^32·high ≡ ⌊high/2^29⌋ + 2^32·(high mod 2^29), because 2^61 ≡ 1."""
        low = self._wrapped - (self._high << _HALF)
        return reduce(reduce(low) + (self._high >> _TOP) + ((self._high & _TOP_MASK) << _HALF))


def _rows_per_block(count: int, words: int = _BLOCK_WORDS) -> int:
    return _EXACT_ROWS * max(1, words // (_EXACT_ROWS * max(count, 1)))


def _add_by_eights(rows: Vector) -> Vector:
    """Return the sum of every eight rows, and of the rest: exact, because 8·(p − 1) < 2^64."""
    groups, rest = divmod(len(rows), _EXACT_ROWS)
    whole = len(rows) - rest
    sums = np.empty((groups + (1 if rest else 0), rows.shape[1]), dtype=np.uint64)
    np.add.reduce(rows[:whole].reshape(groups, _EXACT_ROWS, rows.shape[1]), axis=1, out=sums[:groups])
    if rest:
        np.add.reduce(rows[whole:], axis=0, out=sums[groups])
    return sums


def expand(seed: bytes, count: int) -> Vector:
    """Return `count` field elements from a 32-byte seed: uniform if the keystream is, without modular bias."""
    row: Vector = expand_many([seed], count)[0]
    return row


def expand_many(seeds: Sequence[bytes], count: int) -> Vector:
    """Return one row of `count` field elements per seed.

    An AES-128-CTR keystream is cut into little-endian words, each word keeps its top 61 bits, and a word that
    is p itself (once in 2^61) is skipped. GCM is used for its keystream only: its one-shot interface is what makes
    AES the fastest expander here from 128 buckets on (`expanders` in benchmarks/results/report.json).
    """
    return _Expander(len(seeds), count).expand(seeds)


def expansions(seeds: Sequence[bytes], count: int, words: int = _BLOCK_WORDS) -> Iterator[Vector]:
    """Yield the rows of `expand_many` in blocks. Each block overwrites the last, so that it stays in the cache."""
    block = _rows_per_block(count, words)
    expander = _Expander(min(block, len(seeds)), count)
    for start in range(0, len(seeds), block):
        yield expander.expand(seeds[start : start + block])


class _Expander:
    """A reusable buffer of rows. Those that `expand` returns are valid until its next call."""

    def __init__(self, rows: int, count: int) -> None:
        self._count = count
        self._zeros = bytes(ELEMENT_SIZE * count)
        # GCM writes its tag after the keystream, so each row has two more words, which slicing leaves out.
        self._words = np.empty((rows, count + _TAG_WORDS), dtype="<u8")
        size = ELEMENT_SIZE * (count + _TAG_WORDS)
        flat = self._words.reshape(-1).view(np.uint8).data
        self._rows = [flat[start : start + size] for start in range(0, rows * size, size)]

    def expand(self, seeds: Sequence[bytes]) -> Vector:
        """Return one row per seed, of at most as many seeds as the buffer has rows."""
        if not self._expand_in_lanes(seeds):
            for seed, row in zip(seeds, self._rows, strict=False):
                _keystream(seed, self._zeros, row)
        used = self._words[: len(seeds)]
        # Tags included: over contiguous memory this is several times faster than leaving them out.
        used >>= _DROPPED_BITS
        elements: Vector = used[:, : self._count]
        if used.size and int(used.max()) == P:
            for index in np.flatnonzero((elements == _P).any(axis=1)).tolist():
                elements[index] = _expand_with_rejection(seeds[index], self._count)
        return elements

    def _expand_in_lanes(self, seeds: Sequence[bytes]) -> bool:
        """Write all keystreams by the native module. Return False if there is none, or a random row of it is wrong.

        Compared with the library in every call: nothing downstream authenticates a keystream.
        """
        lanes = find_lanes() if len(seeds) >= _SMALLEST_BATCH else None
        if lanes is None or any(len(seed) != SEED_SIZE for seed in seeds):
            return False
        lanes.keystreams(seeds, len(self._zeros), self._words)
        chosen = int.from_bytes(os.urandom(4)) % len(seeds)
        expected = bytearray(len(self._rows[chosen]))
        _keystream(seeds[chosen], self._zeros, expected)
        size = len(self._zeros)
        return bytes(self._rows[chosen][:size]) == bytes(expected[:size])


def _keystream(seed: bytes, zeros: bytes, out: memoryview | bytearray) -> None:
    """Write keystream and tag to `out`. A seed, 16 bytes of key and 12 of nonce, serves one expansion only."""
    if len(seed) != SEED_SIZE:
        raise InvalidValue(f"a seed has {SEED_SIZE} bytes, not {len(seed)}")
    AESGCM(seed[:16]).encrypt_into(seed[16:28], zeros, None, out)


def _expand_with_rejection(seed: bytes, count: int) -> Vector:
    """Draw more words until enough are below p: the rare path. Its first words are those of the common path."""
    drawn = count
    while True:
        drawn += 8
        stream = bytearray(ELEMENT_SIZE * (drawn + _TAG_WORDS))
        _keystream(seed, bytes(ELEMENT_SIZE * drawn), stream)
        words = np.frombuffer(stream, dtype="<u8")[:drawn] >> _DROPPED_BITS
        kept: Vector = words[words != _P]
        if kept.size >= count:
            return kept[:count]


def encode(vector: Vector) -> bytes:
    """Return eight little-endian bytes per element, the layout that numpy maps without copying."""
    return vector.astype("<u8", copy=False).tobytes()


def decode(data: bytes, count: int) -> Vector:
    """Parse what `encode` returned. Reject an element that is not below p: one vector would have several encodings."""
    if len(data) != ELEMENT_SIZE * count:
        raise ProtocolError(
            f"{count} field elements take {ELEMENT_SIZE * count} bytes, not {len(data)}", kind=ErrorKind.MALFORMED
        )
    vector = np.frombuffer(data, dtype="<u8").astype(np.uint64, copy=False)
    if vector.size and int(vector.max()) >= P:
        raise OutOfRange("an element is not below p")
    return vector


def multiply(left: Vector, right: Vector) -> Vector:
    """Return the products of reduced elements, of any shapes that broadcast."""
    product = np.empty(np.broadcast(left, right).shape, dtype=np.uint64)
    # A product of two single numbers is left to the blocks below: without an axis, numpy computes with no arrays.
    if product.ndim and product.size <= _FEW_PRODUCTS:
        _multiply_block(left, right, product)
        return product
    left, right = np.broadcast_arrays(left, right)
    first, second, out = left.reshape(-1), right.reshape(-1), product.reshape(-1)
    for start in range(0, out.size, _PRODUCT_WORDS):
        block = slice(start, start + _PRODUCT_WORDS)
        _multiply_block(first[block], second[block], out[block])
    return product


def _multiply_block(left: Vector, right: Vector, out: Vector) -> None:
    """Write ab = 2^62·a₁b₁ + 2^31·(a₁b₀ + a₀b₁) + a₀b₀ for a = 2^31·a₁ + a₀, where 2^62 ≡ 2 and 2^61 ≡ 1."""
    left_high, left_low = left >> _HALF_BITS, left & _HALF_MASK
    right_high, right_low = right >> _HALF_BITS, right & _HALF_MASK
    middle = left_high * right_low
    other = left_low * right_high
    middle += other  # below 2^62
    np.multiply(left_high, right_high, out=out)
    out <<= _ONE  # below 2^61
    np.multiply(left_low, right_low, out=other)
    out += other  # below 2^61 + 2^62
    # 2^31·middle = 2^61·⌊middle/2^30⌋ + 2^31·(middle mod 2^30)
    np.right_shift(middle, _OTHER_BITS, out=other)
    out += other
    middle &= _OTHER_MASK
    middle <<= _HALF_BITS
    out += middle  # below 2^63
    np.right_shift(out, _SHIFT, out=other)
    out &= _P
    out += other
    np.subtract(out, _P, out=other)
    np.minimum(out, other, out=out)


def total(vectors: Vector) -> Vector:
    """Return the sums of reduced elements along the last axis, at most 2^32 of them."""
    # The axis is kept to the end: numpy warns when a single number wraps, and `reduce` is made to wrap.
    low: Vector = np.add.reduce(vectors & _LOW_MASK, axis=-1, keepdims=True)
    high: Vector = np.add.reduce(vectors >> _HALF, axis=-1, keepdims=True)
    # 2^32·high ≡ ⌊high/2^29⌋ + 2^32·(high mod 2^29), as in `RowSum`.
    sums: Vector = reduce(reduce(low) + (high >> _TOP) + ((high & _TOP_MASK) << _HALF))[..., 0]
    return sums


def dot(left: Vector, right: Vector) -> Vector:
    """Return the inner products of reduced vectors along the last axis, of any shapes that broadcast."""
    return total(multiply(left, right))


def inverse(vector: Vector) -> Vector:
    """Return 1/v of every element v, none of which may be zero (Montgomery's trick: three products for each).

    Elements are multiplied in pairs, the products in pairs, and so on to a few; on the way back each pair's inverse,
    times either of the two, is the inverse of the other.
    """
    levels = [vector.reshape(-1)]
    while levels[-1].size > _FEW:
        if levels[-1].size % 2:
            levels[-1] = np.append(levels[-1], _ONE)
        half = levels[-1].size // 2
        levels.append(multiply(levels[-1][:half], levels[-1][half:]))
    if not levels[-1].all():
        raise InvalidValue("zero has no inverse")
    # Few enough for Python integers: numpy's overhead per call would cost as much as thousands of elements.
    inverted = np.array(inverse_integers(levels[-1].tolist()), dtype=np.uint64)
    for level in reversed(levels[:-1]):
        half = level.size // 2
        inverted = np.concatenate([multiply(inverted[:half], level[half:]), multiply(inverted[:half], level[:half])])
    result: Vector = inverted[: vector.size].reshape(vector.shape)
    return result


def inverse_integers(values: Sequence[int]) -> list[int]:
    """Return 1/v of every value v, none of which may be zero. GMP inverts a word as fast as Python multiplies twice."""
    return [int(invert(value, _MODULUS)) for value in values]


def multiply_constant(vector: Vector, constant: int) -> Vector:
    return multiply(vector, np.array(constant % P, dtype=np.uint64))


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
    """Return the product of (…, n, k) and (…, k, m) matrices: any words on the left, reduced on the right."""
    rows, columns = split_rows(left), split_columns(right)
    total = multiply_limbs(rows[..., :MAX_INNER], columns[..., :MAX_INNER, :])
    for start in range(MAX_INNER, left.shape[-1], MAX_INNER):
        part = slice(start, start + MAX_INNER)
        total = add(total, multiply_limbs(rows[..., part], columns[..., part, :]))
    return total


def split_rows(matrix: Vector) -> Limbs:
    """Return (…, n, k) words as (…, 3n, k) limbs: the lowest of all rows, then the middle ones, then the highest."""
    *stack, rows, inner = matrix.shape
    limbs = np.empty((*stack, LIMBS, rows, inner))
    split(matrix, limbs[..., 0, :, :], limbs[..., 1, :, :], limbs[..., 2, :, :])
    return limbs.reshape(*stack, LIMBS * rows, inner)


def split_columns(matrix: Vector) -> Limbs:
    """Return (…, k, m) elements as (…, k, 3m) limbs, in the same order."""
    *stack, inner, columns = matrix.shape
    limbs = np.empty((*stack, inner, LIMBS, columns))
    split(matrix, limbs[..., 0, :], limbs[..., 1, :], limbs[..., 2, :])
    return limbs.reshape(*stack, inner, LIMBS * columns)


def multiply_limbs(rows: Limbs, columns: Limbs) -> Vector:
    """Return the product of what `split_rows` and `split_columns` returned, of at most `MAX_INNER` terms per sum."""
    product = np.matmul(rows, columns)
    *stack, height, width = product.shape
    parts = product.reshape(*stack, LIMBS, height // LIMBS, LIMBS, width // LIMBS)
    return join(np.moveaxis(parts, (-4, -2), (0, 1)))


def join(parts: Limbs) -> Vector:
    """Return the reduced sum of all `parts[i, j]`, the products of limb i on the left and limb j on the right."""
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
    """Write words as three limbs. The highest has 22 bits if a word has all 64."""
    limb = matrix & _LIMB_MASK
    # As signed numbers: limbs are far below 2^63, and int64 converts to double faster than uint64.
    signed = limb.view(np.int64)
    low[...] = signed
    np.right_shift(matrix, _LIMB, out=limb)
    limb &= _LIMB_MASK
    middle[...] = signed
    np.right_shift(matrix, _TWO_LIMBS, out=limb)
    high[...] = signed


def _shift_limb(values: Vector) -> Vector:
    """Return 2^21 times numbers below 2^62, below 2^62 too: as 2^61 ≡ 1, bits that leave at the top re-enter below."""
    shifted = values >> _REST
    kept = values & _LOW
    kept <<= _LIMB
    shifted += kept
    return shifted

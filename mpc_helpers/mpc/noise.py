"""Exact discrete noise from fair coins, by work that does not depend on what is drawn.

γ = ε/Δ is a rational and q = e^−γ. Both samplers are exact for every γ, as long as their coins are fair: a float
Laplace rounded to integers passes every statistical test and is still not private. Floats appear in `_acceptance`
alone, where they decide only what their error bound decides; the rest is decided in integers.

A geometric variable N with P(N ≥ n) = q^n has independent binary digits: digit j is 1 with probability
1/(1 + e^(2^j·γ)). L digits are drawn and the rest, N ≥ 2^L, by one more coin, of probability e^(−2^L·γ) < 2^−64.

    pairwise   X = N, or −1 − N with probability q/(1 + q)                              DLap(1/γ)
    local      X = ±(N − 2m), m the smaller part of N split by the arcsine law          Pólya(½) difference

The numbers of coins and of operations follow from γ and the number of buckets, but for events of probability below
2^−40 together for a whole vector: two equal words of 64 coins, a digit beyond L, a bucket with every proposal rejected.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from fractions import Fraction
from typing import Protocol

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from protocol.errors import ErrorKind, ProtocolError, TrefoilError

# What a key means in `pairwise` is part of the protocol (SPEC §8): another sampler has another number.
SAMPLER = 2
# All of the noise stays far inside the field's ±2^60, and everything below within 53 bits.
MAX_SCALE = 2**40
_TAIL_NATS = 45
_WORD = 64
_LARGEST_WORD = 2**_WORD - 1
# Proposals for the split of one bucket. One is accepted with probability 0.374 or more: 4,096 buckets, each with all
# of them rejected in one case, have probability 2^−42.
PROPOSALS = 80
# Buckets whose proposals are in memory at a time.
_CHUNK = 512
# Comparisons of each chunk that integers decide, whether floats have left any undecided or not.
_EXACT = 4
_BUFFER = 4096

Words = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float64]


class Coins(Protocol):
    """A source of fair, independent coins."""

    def flips(self, count: int) -> bytes:
        """`count` coins in ⌈count/8⌉ bytes, lowest bit of the first byte first; bits beyond `count` mean nothing."""
        ...


class BufferedCoins:
    """Coins out of a stream of uniform bytes, fetched in blocks. A request takes whole bytes."""

    def __init__(self, stream: Callable[[int], bytes]) -> None:
        self._stream = stream
        self._buffer = b""
        self._at = 0

    def flips(self, count: int) -> bytes:
        size = (count + 7) // 8
        end = self._at + size
        if end <= len(self._buffer):
            taken = self._buffer[self._at : end]
            self._at = end
            return taken
        if size >= _BUFFER:
            return self._stream(size)
        self._buffer, self._at = self._stream(_BUFFER), size
        return self._buffer[:size]


def system_coins() -> BufferedCoins:
    """The operating system's randomness."""
    return BufferedCoins(os.urandom)


def keyed_coins(key: bytes) -> BufferedCoins:
    """Coins determined by a 32-byte key: AES-256 in counter mode. A key is used for one vector."""
    encryptor = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
    return BufferedCoins(lambda size: encryptor.update(bytes(size)))


def _words(coins: Coins, rows: int, columns: int) -> Words:
    """Return uniform words of 64 coins, row by row."""
    return np.frombuffer(coins.flips(_WORD * rows * columns), dtype="<u8").reshape(rows, columns)


# Biased coins and geometric variables.


def exp_bounds(rate: Fraction, bits: int) -> tuple[int, int]:
    """Return integers around e^−γ·2^bits.

    A Taylor sum of e^y for y = γ/2^k < 1, each term the floored term before it times y/n: a term is below its true
    value by less than 2, and all terms after the first that is 0 are below 4 together. Then k squarings.
    """
    if rate > bits:
        return 0, 1
    halvings = (rate.numerator // rate.denominator).bit_length()
    divisor, one = rate.denominator << halvings, 1 << bits
    total, term, n = one, one, 0
    while term:
        n += 1
        term = term * rate.numerator // (divisor * n)
        total += term
    low, high = (one * one) // (total + 2 * n + 4), -(-(one * one) // total)
    for _ in range(halvings):
        low, high = low * low >> bits, -(-high * high >> bits)
    return low, high


@functools.lru_cache(maxsize=64)
def thresholds(rate: Fraction, bits: int) -> tuple[int, ...]:
    """Return ⌊2^bits·p⌋ for the probabilities p of the digits from the lowest, then of the tail, then of the sign."""
    digits = digit_count(rate)
    working = bits + digits + _WORD
    while True:
        low, high = (_thresholds(end, working, digits, bits) for end in exp_bounds(rate, working))
        if low == high:
            return low
        working *= 2


def _thresholds(q: int, working: int, digits: int, bits: int) -> tuple[int, ...]:
    """Return the same for one bound on q, with every rounding towards zero: `thresholds` compares the two."""
    one, coins, power = 1 << working, [], q
    for _ in range(digits):
        coins.append((power << bits) // (one + power))
        power = power * power >> working
    return (*coins, power >> (working - bits), (q << bits) // (one + q))


def digit_count(rate: Fraction) -> int:
    """Return L, the least number with 2^L·γ ≥ 45."""
    return (-(-_TAIL_NATS * rate.denominator // rate.numerator) - 1).bit_length()


def _flip(rate: Fraction, place: int, words: Words, coins: Coins) -> npt.NDArray[np.bool_]:
    """Flip the coin at `place` of `thresholds` once for each word: true where the word, as a fraction, is below p."""
    threshold = np.uint64(thresholds(rate, _WORD)[place])
    flipped = words < threshold
    for tie in np.flatnonzero(words == threshold):
        flipped[tie] = _continue(rate, place, coins)
    return flipped


def _continue(rate: Fraction, place: int, coins: Coins) -> bool:
    """Decide a coin whose first 64 bits are those of its probability: by the next 64, and so on."""
    bits = 2 * _WORD
    while True:
        word, bound = int(_words(coins, 1, 1)[0, 0]), thresholds(rate, bits)[place] & _LARGEST_WORD
        if word < bound:
            return True
        if word > bound:
            return False
        bits += _WORD


def geometric(rate: Fraction, count: int, coins: Coins) -> Words:
    """Draw independent N with P(N ≥ n) = e^(−γn)."""
    digits = digit_count(rate)
    words = _words(coins, digits + 1, count)
    drawn = np.zeros(count, dtype=np.uint64)
    for place in range(digits):
        drawn |= _flip(rate, place, words[place], coins).astype(np.uint64) << np.uint64(place)
    for beyond in np.flatnonzero(_flip(rate, digits, words[digits], coins)):
        high = 1
        while _flip(rate, digits, _words(coins, 1, 1)[0], coins)[0]:
            high += 1
        drawn[beyond] += np.uint64(high << digits)
    return drawn


# The split of N by the arcsine law: m of N with probability u_m·u_(N−m), u_n = C(2n, n)/4^n (Feller, vol. 1, III.4).
# By symmetry m is the smaller part, m ≤ N/2, with half of its weight if it is N/2. It is drawn by rejection: s uniform
# below ⌊√⌊N/2⌋⌋ + 1 and m uniform from s² to s² + 2s, so that 1/(2s + 1) follows u_m ~ 1/√(πm). Brouncker's fraction
#
#     b(n) = 4/(π·u_n²) = S + 1²/(2S + 3²/(2S + 5²/(2S + …)))        S = 4n + 1
#
# lies between any two consecutive convergents, and b(n) = b(n + 1)·((2n + 1)/(2n + 2))². A proposal is accepted with
#
#     a = 2^64/step·√(8/11·(2N + 1)/(b(m)·b(N − m)))        halved if 2m = N > 0
#
# where step = ⌊(2^64 − 1)/(2s + 1)⌋ of 2^64 words lead to each m. a ≤ 1 for every N and m: `test_noise` has the proof.


def brouncker(n: int, depth: int, bits: int) -> tuple[int, int]:
    """Return integers around b(n)·2^bits: two convergents at n + depth, for an even depth, carried back to n."""
    s, over, under = 4 * (n + depth) + 1, 1, 1
    for i in range(n, n + depth):
        over, under = over * (2 * i + 1) ** 2, under * (2 * i + 2) ** 2
    ends = []
    for length in (depth, depth + 1):
        numerator, denominator = 0, 1
        for k in range(length, 0, -1):
            numerator, denominator = (2 * k - 1) ** 2 * denominator, 2 * s * denominator + numerator
        ends.append(((s * denominator + numerator) * over << bits, denominator * under))
    return ends[0][0] // ends[0][1], -(-ends[1][0] // ends[1][1])


_SMALL = 64
_TABLE: Floats = np.array([brouncker(n, 24, 60)[0] / 2**60 for n in range(_SMALL)])


def _brouncker_floats(n: Words) -> Floats:
    """Return b(n) with a relative error below 2^−49: three steps of the fraction from 64 on, a table below."""
    s = 4.0 * n.astype(np.float64) + 1.0
    w = 2.0 * s
    return np.where(n < _SMALL, _TABLE[np.minimum(n, _SMALL - 1)], s + 1.0 / (w + 9.0 / (w + 25.0 / w)))


# The error of a, below 2^−47, and of a word as a float, 2^−53.
_MARGIN = 2.0**-46


def _acceptance(m: Words, rest: Words, step: Words) -> Floats:
    """Return the probability a for each proposal, up to an error below 2^−47."""
    total = (m + rest).astype(np.float64)
    squared = (2.0 * total + 1.0) / (1.375 * _brouncker_floats(m) * _brouncker_floats(rest))
    halved = np.where((m == rest) & (m > 0), 0.5, 1.0)
    return halved * np.sqrt(squared) * (2.0**_WORD / step.astype(np.float64))


def _accepts(word: int, m: int, rest: int, step: int, coins: Coins) -> bool:
    """Decide exactly whether a uniform real with these first 64 bits is below a."""
    bits, depth = _WORD, 16
    factor = 11 * step**2 * (4 if m == rest > 0 else 1)
    while True:
        (low, high), (low_rest, high_rest) = brouncker(m, depth, 2 * bits), brouncker(rest, depth, 2 * bits)
        square = 8 * (2 * (m + rest) + 1) << 2 * _WORD + 6 * bits
        if (word + 1) ** 2 * high * high_rest * factor <= square:
            return True
        if word**2 * low * low_rest * factor >= square:
            return False
        word = word << _WORD | int(_words(coins, 1, 1)[0, 0])
        bits, depth = bits + _WORD, 2 * depth


def _propose(totals: Words, words: Words, more: Words) -> tuple[Words, Words, npt.NDArray[np.bool_]]:
    """Return m and its step for each proposal, and whether it is one: words beyond the last whole step are none."""
    half = totals // np.uint64(2)
    bound = np.sqrt(half.astype(np.float64)).astype(np.uint64) + np.uint64(1)
    s = words // (np.uint64(_LARGEST_WORD) // bound)
    valid = s < bound
    s = np.minimum(s, bound)
    width = np.uint64(2) * s + np.uint64(1)
    step = np.uint64(_LARGEST_WORD) // width
    offset = more // step
    m = s * s + np.minimum(offset, width)
    valid &= (offset < width) & (m <= half)
    return np.minimum(m, half), step, valid


def smaller_parts(totals: Words, coins: Coins) -> Words:
    """Split each N by the arcsine law, and return its smaller parts."""
    parts = np.zeros_like(totals)
    waiting = np.arange(totals.size)
    while waiting.size:
        own = totals[waiting]
        words, more, uniform = _words(coins, 3 * PROPOSALS, own.size).reshape(3, PROPOSALS, own.size)
        m, step, valid = _propose(own, words, more)
        accepted = valid & _decide(uniform, m, own - m, step, coins)
        first = accepted.argmax(axis=0)
        parts[waiting] = m[first, np.arange(own.size)]
        waiting = waiting[~accepted.any(axis=0)]
    return parts


def _decide(uniform: Words, m: Words, rest: Words, step: Words, coins: Coins) -> npt.NDArray[np.bool_]:
    """Return for each proposal whether its uniform real is below a. At least `_EXACT` are decided in integers."""
    difference = _acceptance(m, rest, step) - uniform.astype(np.float64) * 2.0**-_WORD
    below = difference > 0
    close = np.flatnonzero(np.abs(difference) <= _MARGIN)
    for _ in range(_EXACT - close.size):
        # On numbers that are always the same: integers of another size take another time.
        _accepts(1, 1 << 30, 1 << 31, 1 << 48, coins)
    for at in close:
        word, own, other, words = (int(values.flat[at]) for values in (uniform, m, rest, step))
        below.flat[at] = _accepts(word, own, other, words, coins)
    return below


# Whole vectors.


def check_cost(buckets: int, rate: Fraction) -> None:
    """Raise `TrefoilError` for what cannot be drawn. Run before anything is reserved."""
    if not (rate > 0 and buckets > 0):
        raise ProtocolError("noise needs at least one bucket and a rate above zero", kind=ErrorKind.OUT_OF_RANGE)
    if MAX_SCALE * rate < 1:
        raise TrefoilError(
            f"noise of scale {float(1 / rate):.3g} is too large to draw: the scale is at most {MAX_SCALE}",
            "Use a coarser unit (euros instead of cents, say): the scale shrinks with it and the answer loses nothing.",
            kind=ErrorKind.TOO_LARGE,
        )


def draw_local(rate: Fraction, buckets: int, coins: Coins) -> list[int]:
    """One helper's own noise in `local`: a Pólya(½) difference per bucket. Can be drawn before a session starts.

    A − B for independent A, B ~ NB(½, q), two of which add up to exactly DLap(1/γ): N = A + B is geometric, and given
    N the smaller of A and B is m. Whether A is the smaller is a fair coin.
    """
    check_cost(buckets, rate)
    drawn: list[int] = []
    for start in range(0, buckets, _CHUNK):
        count = min(_CHUNK, buckets - start)
        totals = geometric(rate, count, coins)
        sizes = (totals - np.uint64(2) * smaller_parts(totals, coins)).astype(np.int64)
        signs = _words(coins, 1, count)[0] & np.uint64(1)
        drawn += np.where(signs == 1, sizes, -sizes).tolist()
    return drawn


def draw_laplace(rate: Fraction, buckets: int, coins: Coins) -> list[int]:
    """One pair's noise in `pairwise`: a full DLap per bucket, the same for both of the pair."""
    check_cost(buckets, rate)
    sizes = geometric(rate, buckets, coins).astype(np.int64)
    flipped = _flip(rate, digit_count(rate) + 1, _words(coins, 1, buckets)[0], coins)
    drawn: list[int] = np.where(flipped, -1 - sizes, sizes).tolist()
    return drawn

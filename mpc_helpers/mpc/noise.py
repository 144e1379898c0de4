"""Exact discrete noise from fair coins. There is no floating-point number in this module.

γ = ε/Δ is a rational and q = e^−γ. Every sampler below is exact for every γ, as long as its coins are fair: a float
Laplace rounded to integers passes every statistical test and is still not private.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from fractions import Fraction
from typing import Protocol

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from protocol.errors import ProtocolError, TrefoilError

# Buckets × scale b: a walk takes about 2b coins, so this many cost some seconds, and under a minute by allowance.
MAX_BUCKETS_TIMES_SCALE = 2**28
# Steps of a walk that are in memory at a time: whole words of 64.
_WALK_CHUNK = 2**21
_SHORT_WALK = 2**11
_BUFFER = 4096


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
        """See `Coins`."""
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
    """The same coins for whoever has the same 32-byte key: AES-256 in counter mode. A key is used for one vector."""
    encryptor = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
    return BufferedCoins(lambda size: encryptor.update(bytes(size)))


def uniform_below(bound: int, coins: Coins) -> int:
    """An integer from 0 to bound − 1, by rejection. A bound of 1 takes no coins."""
    width = (bound - 1).bit_length()
    mask = (1 << width) - 1
    while True:
        value = int.from_bytes(coins.flips(width), "little") & mask
        if value < bound:
            return value


def _bernoulli_exp(numerator: int, denominator: int, coins: Coins) -> bool:
    """True with probability e^−x for x = numerator/denominator in [0, 1] (Canonne, Kamath, Steinke 2020, Alg. 1).

    The first k at which a coin of bias x/k fails is odd with probability Σ (−x)^k/k!.
    """
    k = 1
    while uniform_below(denominator * k, coins) < numerator:
        k += 1
    return k % 2 == 1


def geometric(rate: Fraction, coins: Coins) -> int:
    """N with P(N ≥ n) = e^(−γn) (the same, Alg. 2, without the sign).

    For γ = s/t: U + tV has P(≥ x) = e^(−x/t) when U is uniform below t and kept with probability e^(−U/t), and V
    counts successes of probability e^−1; dividing by s leaves P(N ≥ n) = P(U + tV ≥ sn) = e^(−sn/t).
    """
    s, t = rate.numerator, rate.denominator
    while True:
        u = uniform_below(t, coins)
        if _bernoulli_exp(u, t, coins):
            break
    v = 0
    while _bernoulli_exp(1, 1, coins):
        v += 1
    return (u + t * v) // s


def discrete_laplace(rate: Fraction, coins: Coins) -> int:
    """X with P(x) ∝ q^|x|: a geometric with a random sign, minus zero drawn again so that zero counts once."""
    while True:
        magnitude = geometric(rate, coins)
        negative = coins.flips(1)[0] & 1
        if magnitude or not negative:
            return -magnitude if negative else magnitude


def polya_difference(rate: Fraction, coins: Coins) -> int:
    """A − B for independent A, B ~ NB(½, q): two of them add up to exactly DLap(1/γ).

    N = A + B is geometric. Given N, A is distributed as half the last visit to zero of a walk of 2N fair steps
    (Feller's arcsine law: C(2n, n)·C(2N − 2n, N − n)/4^N), so A − B = 2n − N.
    """
    total = geometric(rate, coins)
    return last_zero(2 * total, coins) - total


def last_zero(steps: int, coins: Coins) -> int:
    """The last time at which a walk of `steps` fair ±1 steps from zero is at zero. Cost: steps/8 bytes of coins."""
    if steps <= _SHORT_WALK:
        return _last_zero_by_bytes(coins.flips(steps), steps)
    last, height = 0, 0
    for start in range(0, steps, _WALK_CHUNK):
        length = min(_WALK_CHUNK, steps - start)
        found, height = _last_zero_by_words(coins.flips(length), length, height)
        last = start + found if found else last
    return last


def _byte_table() -> list[tuple[int, tuple[int, ...]]]:
    """For eight steps packed in a byte: how far they rise, and for each start −8..8 the last of 1..8 at zero (or 0)."""
    table = []
    for byte in range(256):
        heights = [2 * (byte & (2 << t) - 1).bit_count() - t - 1 for t in range(8)]
        last = [max((t + 1 for t in range(8) if heights[t] == -start), default=0) for start in range(-8, 9)]
        table.append((heights[-1], tuple(last)))
    return table


_BYTE_TABLE = _byte_table()


def _last_zero_by_bytes(flips: bytes, length: int) -> int:
    """Short walks, where numpy's fixed cost would dominate."""
    last = height = 0
    whole, rest = divmod(length, 8)
    for index in range(whole):
        rise, zeros = _BYTE_TABLE[flips[index]]
        if -8 <= height <= 8 and zeros[height + 8]:
            last = 8 * index + zeros[height + 8]
        height += rise
    for t in range(rest):
        height += 1 if flips[whole] >> t & 1 else -1
        if height == 0:
            last = 8 * whole + t + 1
    return last


def _last_zero_by_words(flips: bytes, length: int, height: int) -> tuple[int, int]:
    """One stretch of a long walk from `height`: the last of its times 1..length at zero (or 0), and where it ends.

    Counted by words of 64 steps. Only a word that starts within 64 of zero can reach it, and those are few. The end is
    right for whole words; only the last stretch has others, and nothing follows it.
    """
    words = np.frombuffer(flips + bytes(-len(flips) % 8), dtype="<u8")
    rises = 2 * np.bitwise_count(words).astype(np.int64) - 64
    starts = height + np.concatenate(([0], np.cumsum(rises)))
    near = np.flatnonzero(np.abs(starts[:-1]) <= 64)
    times, heights = _heights(words, starts, near)
    hits = times[(heights == 0) & (times <= length)]
    return (int(hits.max()) if hits.size else 0), int(starts[-1])


def _heights(
    words: npt.NDArray[np.uint64], starts: npt.NDArray[np.int64], chosen: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Times and heights after every step of the chosen words."""
    bits = np.unpackbits(words[chosen].view(np.uint8), bitorder="little").reshape(-1, 64)
    heights = starts[chosen, None] + np.cumsum(2 * bits.astype(np.int64) - 1, axis=1)
    times = chosen[:, None] * 64 + np.arange(1, 65)
    return times, heights


def check_cost(buckets: int, rate: Fraction) -> None:
    """Refuse what would take minutes to draw. Run before anything is spent."""
    if not (rate > 0 and buckets > 0):
        raise ProtocolError("noise needs at least one bucket and a rate above zero")
    if buckets > MAX_BUCKETS_TIMES_SCALE * rate:
        raise TrefoilError(
            f"{buckets} buckets with noise of scale {float(1 / rate):.3g} are too much to draw: "
            f"buckets times scale is at most {MAX_BUCKETS_TIMES_SCALE}",
            "Use a coarser unit (euros instead of cents, say): the scale shrinks with it and the answer loses nothing.",
        )


def draw_local(rate: Fraction, buckets: int, coins: Coins) -> list[int]:
    """One helper's own noise in `local`: a Pólya(½) difference per bucket. Can be drawn before a session starts."""
    check_cost(buckets, rate)
    return [polya_difference(rate, coins) for _ in range(buckets)]


def draw_laplace(rate: Fraction, buckets: int, coins: Coins) -> list[int]:
    """One pair's noise in `pairwise`: a full DLap per bucket, the same for both of the pair."""
    check_cost(buckets, rate)
    return [discrete_laplace(rate, coins) for _ in range(buckets)]

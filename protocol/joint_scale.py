"""The exact distribution of noise mode `joint`: integers and fractions only. Nothing is sampled here.

    X = G if s = 0, else −1 − G        G = Σ 2^j·d_j for j < L

s and every d_j are independent coins of probability c/2^k. With c/2^k = 1/(1 + e^(2^j·γ)) for d_j, and s like d_0, this
is exactly DLap(1/γ), cut off at 2^L. Every coin is rounded towards ½, so that the probabilities never fall by more than
e^γ per step: wherever both of two neighbouring answers are possible, the noise is pure ε. The cut-off alone makes δ,
which is computed exactly (JOINT.md has the two lemmas).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from protocol.errors import ErrorKind, InvalidValue, OutOfRange, TrefoilError
from protocol.wire import Writer

# δ is stated for a privacy loss Λ of at least this: more than a device spends on one site in an epoch.
LEAST_LOSS = 15
# A privacy loss above this protects nothing, and would need coins of more bits.
LARGEST_LOSS = 64
# γ·(2^L − T) ≥ 37 for every change T that is covered: δ is about e^−37/2, and below 2^−52 with every coin rounded.
TAIL_NATS = 37
LARGEST_DELTA = Fraction(1, 2**52)
# A digit's log-odds may lose 2^(j+1−12) of γ, never more than γ: utility only, at most 1.0075 times the variance.
LOSS_BITS = 12
# 2^52 is far inside the field's ±2^60.
MAX_DIGITS = 52
# A larger rate is replaced by 16, which is more noise than requested: one bucket in 4.4 million is off by one.
LARGEST_RATE = Fraction(16)
_TERM_BITS = 200
_LAST_TERM_BITS = 130


@dataclass(frozen=True, slots=True)
class Coin:
    """A random bit that is true with probability `numerator`/2^`bits`. The numerator is odd, so `bits` is minimal."""

    bits: int
    numerator: int

    def __post_init__(self) -> None:
        if not (self.bits > 0 and 0 < self.numerator < 1 << self.bits and self.numerator % 2 == 1):
            raise InvalidValue(f"a coin is an odd number over a power of two, not {self.numerator}/2^{self.bits}")

    @property
    def probability(self) -> Fraction:
        return Fraction(self.numerator, 1 << self.bits)

    @property
    def odds(self) -> Fraction:
        """Return the odds that the coin is false, (1 − p)/p."""
        return Fraction((1 << self.bits) - self.numerator, self.numerator)


def exp_below(rate: Fraction) -> Fraction:
    """Return a rational E with 1 + γ ≤ E ≤ e^γ: a truncated Taylor series, whose terms are all positive.

    Each term from the second on is the floored term before it times γ/n, floored to a multiple of 2^−200. The sum
    stops after a term below 2^−130 with n > γ. Two implementations must do exactly this, or their coins may differ.
    """
    unit = 1 << _TERM_BITS
    total, scaled, n = 0, unit * rate, 1
    while n <= rate or scaled * (1 << _LAST_TERM_BITS) >= unit:
        n += 1
        scaled = Fraction(math.floor(scaled * rate / n))
        total += int(scaled)
    return 1 + rate + Fraction(total, unit)


def coin_below(odds: Fraction, slack: Fraction) -> Coin:
    """Return the coin of fewest bits whose odds are at most `odds` and at least `odds`/(1 + slack)."""
    # In integers: the fractions are of thousands of bits, and reducing each of them would take most of the time.
    n, d = odds.numerator, odds.denominator
    least = n * slack.denominator
    most = d * (slack.denominator + slack.numerator)
    bits = 0
    while True:
        bits += 1
        whole = 1 << bits
        numerator = -(-(whole * d) // (n + d))
        if numerator < whole and least * numerator <= most * (whole - numerator):
            return Coin(bits, numerator)


@dataclass(frozen=True, slots=True)
class JointScale:
    """The coins of one bucket's noise. `change` is the largest change T of the sum for which `delta` is stated.

    Made by `of`. The constructor certifies every scale, so that none violates what the module's docstring states.
    """

    rate: Fraction
    change: int
    digits: tuple[Coin, ...]
    sign: Coin

    def __post_init__(self) -> None:
        self._certify()

    @staticmethod
    def of(rate: Fraction, change: int) -> JointScale:
        """Return the scale for a query of rate γ = ε/Δ in which one report moves the sum by at most `change` = Δ + κ.

        A person may move the sum by more than one report of this query could: by a report that asked for a larger Δ,
        or by several. So δ is stated for every loss up to Λ = max(γ·change, 15), and helpers refuse reports beyond it.
        """
        return _scale_of(rate, change)

    @property
    def coins(self) -> tuple[Coin, ...]:
        """Return all of a bucket's coins in the order of the circuit: digits, then sign."""
        return (*self.digits, self.sign)

    def covers(self, change: int) -> bool:
        """Return whether `delta` is stated for a person who moves the sum by `change`."""
        return change <= self.change

    def delta(self, change: int | None = None) -> Fraction:
        """Return δ(T) = (1 − p_s)·P(G ≥ 2^L − T), for T = `change` or the largest change that is covered.

        If ‖h − h'‖₁ ≤ T, then Pr[h + X ∈ S] ≤ e^(γT)·Pr[h' + X ∈ S] + δ(T). This holds for a vector of any number of
        buckets: the tail is convex in T, so the worst case is a change in one bucket.
        """
        span = self.change if change is None else change
        return (1 - self.sign.probability) * self.at_least((1 << len(self.digits)) - span)

    @property
    def mean(self) -> Fraction:
        """Return the mean of X. It is below a thousandth of the scale, and no answer is corrected for it."""
        size, flipped = self._magnitude_mean(), self.sign.probability
        return (1 - flipped) * size - flipped * (1 + size)

    @property
    def variance(self) -> Fraction:
        size, flipped = self._magnitude_mean(), self.sign.probability
        spread = sum(
            (coin.probability * (1 - coin.probability) * 4**place for place, coin in enumerate(self.digits)),
            Fraction(0),
        )
        second = spread + (1 - flipped) * size**2 + flipped * (1 + size) ** 2
        return second - self.mean**2

    def at_least(self, bound: int) -> Fraction:
        """Return P(G ≥ bound), digit by digit from the top: the first in which G and the bound differ decides."""
        if bound <= 0:
            return Fraction(1)
        if bound >= 1 << len(self.digits):
            return Fraction(0)
        above, equal = Fraction(0), Fraction(1)
        for place in reversed(range(len(self.digits))):
            chance = self.digits[place].probability
            if bound >> place & 1:
                equal *= chance
            else:
                above += equal * chance
                equal *= 1 - chance
        return above + equal

    def probability(self, x: int) -> Fraction:
        """Return P(X = x)."""
        magnitude = x if x >= 0 else -1 - x
        if magnitude >= 1 << len(self.digits):
            return Fraction(0)
        product = self.sign.probability if x < 0 else 1 - self.sign.probability
        for place, coin in enumerate(self.digits):
            product *= coin.probability if magnitude >> place & 1 else 1 - coin.probability
        return product

    def within(self, t: int) -> Fraction:
        """Return P(|X| ≤ t)."""
        flipped = self.sign.probability
        return (1 - flipped) * (1 - self.at_least(t + 1)) + flipped * (1 - self.at_least(t))

    def half_width(self, confidence: Fraction) -> int:
        """Return the least t with P(|X| ≤ t) ≥ `confidence`, exactly: a bisection over rationals."""
        return least_width(1 << len(self.digits), lambda t: self.within(t) >= confidence)

    def encode(self) -> bytes:
        """Return what the three helpers compare, so that versions which round a coin differently never reach a key."""
        writer = Writer().text(f"{self.rate.numerator}/{self.rate.denominator}").uint(self.change, 8)
        writer.uint(len(self.digits), 1)
        for coin in self.coins:
            size = (coin.numerator.bit_length() + 7) // 8
            writer.uint(coin.bits, 2).blob(coin.numerator.to_bytes(size, "big"), 2)
        return writer.done()

    def _magnitude_mean(self) -> Fraction:
        return sum((coin.probability * 2**place for place, coin in enumerate(self.digits)), Fraction(0))

    def _certify(self) -> None:
        """Raise unless 0 ≤ ln P(g) − ln P(g + 1) ≤ γ for every g, the same from 0 to −1, and δ < 2^−52. Exact.

        With j the lowest zero of g, P(g)/P(g + 1) is the odds of digit j divided by those of all digits below it.
        """
        step, below = exp_below(_served(self.rate)), Fraction(1)
        for coin in self.digits:
            if not (below <= coin.odds <= step * below):
                raise OutOfRange("a digit of the noise is rounded so that its probabilities fall too fast")
            below *= coin.odds
        if not (1 <= self.sign.odds <= step):
            raise OutOfRange("the sign of the noise is rounded so that its probabilities fall too fast")
        if self.delta() >= LARGEST_DELTA:
            raise OutOfRange("the noise is cut off too early: its δ is not below 2^−52")


def least_width(most: int, covers: Callable[[int], bool]) -> int:
    """Return the least t up to `most` that covers, by bisection: `most` does, and all above one that does do too."""
    low, high = -1, most
    while high - low > 1:
        middle = (low + high) // 2
        if covers(middle):
            high = middle
        else:
            low = middle
    return high


def _served(rate: Fraction) -> Fraction:
    """Return γ', the rate at which the noise is drawn."""
    return min(rate, LARGEST_RATE)


@lru_cache(maxsize=64)
def _scale_of(rate: Fraction, change: int) -> JointScale:
    if rate <= 0 or change <= 0:
        raise OutOfRange("joint noise needs a rate and a sensitivity above zero")
    loss = max(rate * change, Fraction(LEAST_LOSS))
    if loss > LARGEST_LOSS:
        raise TrefoilError(
            f"joint noise is for a privacy loss of at most {LARGEST_LOSS}, side query included, not {float(loss):.6f}",
            "Ask for a smaller epsilon, or with --noise local.",
            kind=ErrorKind.TOO_LARGE,
        )
    served = _served(rate)
    count = (math.ceil((TAIL_NATS + loss) / served) - 1).bit_length()
    if count > MAX_DIGITS:
        raise TrefoilError(
            f"joint noise of scale {float(1 / rate):.3g} takes {count} binary digits; {MAX_DIGITS} is the most",
            "Use a coarser unit (euros instead of cents, say): the scale shrinks with it and the answer loses nothing.",
            kind=ErrorKind.TOO_LARGE,
        )
    step, below, digits = exp_below(served), Fraction(1), []
    for place in range(count):
        coin = coin_below(step * below, served * min(Fraction(1), Fraction(2) ** (place + 1 - LOSS_BITS)))
        digits.append(coin)
        below *= coin.odds
    sign = coin_below(step, served * Fraction(2) ** (1 - LOSS_BITS))
    return JointScale(rate, math.floor(loss / rate), tuple(digits), sign)

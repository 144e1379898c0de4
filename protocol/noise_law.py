"""The law of each noise mode: everything about an answer that follows from how its noise was made. Nothing is sampled.

With γ = ε/Δ = 1/b and q = e^−γ, the discrete Laplace DLap(b) has P(x) ∝ q^|x|. It is the difference of two
geometric variables. The noise of `local` and `pairwise` is a difference of two negative binomials NB(r, q):

    DLap: r = 1      local, three Pólya(½) differences: r = 3/2      pairwise, three DLap: r = 3

so its variance is 2rq/(1 − q)², and its characteristic function ((1 − q)²/(1 − 2q cos θ + q²))^r. The noise of `joint`
is DLap itself but for coins that are rounded and an end that is cut off; all about it is exact (`joint_scale`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from fractions import Fraction
from typing import assert_never

import numpy as np

from protocol.epsilon import MAX_MICROS, MICROS
from protocol.joint_scale import LARGEST_LOSS, JointScale
from protocol.noise_mode import NoiseMode

# Numerical slack taken off every coverage: far above the rounding of a sum of 10^5 doubles of size at most 10^5.
_ROUNDING = 1e-9


class NoiseLaw(ABC):
    """One mode's law. `rate` is γ; `change` is what one report can change the sum by, Δ + κ."""

    @property
    @abstractmethod
    def shape(self) -> Fraction:
        """r, the shape of the two negative binomials whose difference the noise is, or is close to."""

    @abstractmethod
    def variance(self, rate: Fraction, change: int) -> float:
        """Of the noise in one number."""

    @abstractmethod
    def delta(self, rate: Fraction, change: int) -> Fraction:
        """The answer is (ε, δ)-private; 0 where ε is pure."""

    @abstractmethod
    def half_width(self, rate: Fraction, change: int, confidence: float) -> int:
        """The least t for which the noise is shown to lie in [−t, t] with at least this probability."""

    @abstractmethod
    def coverage(self, rate: Fraction, change: int, width: int) -> float:
        """A number that the probability of noise in [−width, width] is not below."""

    @abstractmethod
    def covers(self, rate: Fraction, change: int, moved: int) -> bool:
        """Whether the law holds for a report that may change the sum by `moved`, where `change` was planned for."""

    @abstractmethod
    def largest_epsilon(self, sensitivity: int, kappa: int) -> int:
        """The largest ε, in micros, that can be asked for in this mode."""


@dataclass(frozen=True, slots=True)
class NegativeBinomials(NoiseLaw):
    """A difference of two NB(r, q): pure ε, at any scale."""

    r: Fraction

    @property
    def shape(self) -> Fraction:
        """See `NoiseLaw`."""
        return self.r

    def variance(self, rate: Fraction, change: int) -> float:  # noqa: ARG002 - the same for every change
        """r times that of DLap."""
        return float(self.r) * laplace_variance(rate)

    def delta(self, rate: Fraction, change: int) -> Fraction:  # noqa: ARG002 - pure
        """None."""
        return Fraction(0)

    def half_width(self, rate: Fraction, change: int, confidence: float) -> int:  # noqa: ARG002 - the same for every change
        """Up to slack that is taken in the safe direction: the interval never covers less than it says."""
        coverage = _Coverage(float(self.r), float(rate))
        low, high = -1, coverage.span
        while high - low > 1:
            middle = (low + high) // 2
            if coverage.at_least(middle) >= confidence:
                high = middle
            else:
                low = middle
        return high

    def coverage(self, rate: Fraction, change: int, width: int) -> float:  # noqa: ARG002 - the same for every change
        """See `NoiseLaw`."""
        noise = _Coverage(float(self.r), float(rate))
        return noise.at_least(min(width, noise.span))

    def covers(self, rate: Fraction, change: int, moved: int) -> bool:  # noqa: ARG002 - the tails have no end
        """Any change, at its own ε."""
        return True

    def largest_epsilon(self, sensitivity: int, kappa: int) -> int:  # noqa: ARG002 - whatever a query can say
        """See `NoiseLaw`."""
        return MAX_MICROS


@dataclass(frozen=True, slots=True)
class CutLaplace(NoiseLaw):
    """DLap with rounded coins and an end: everything is exact, δ is not zero, and there is a largest change."""

    @property
    def shape(self) -> Fraction:
        """See `NoiseLaw`."""
        return Fraction(1)

    def variance(self, rate: Fraction, change: int) -> float:
        """At most 1.0075 times that of DLap."""
        return float(JointScale.of(rate, change).variance)

    def delta(self, rate: Fraction, change: int) -> Fraction:
        """See `NoiseLaw`."""
        return JointScale.of(rate, change).delta()

    def half_width(self, rate: Fraction, change: int, confidence: float) -> int:
        """Exact."""
        return JointScale.of(rate, change).half_width(Fraction(confidence))

    def coverage(self, rate: Fraction, change: int, width: int) -> float:
        """The nearest double may lie above; the one before it cannot."""
        return math.nextafter(float(JointScale.of(rate, change).within(width)), 0)

    def covers(self, rate: Fraction, change: int, moved: int) -> bool:
        """δ is stated for changes up to some size: a larger one is not covered, whatever its ε is."""
        return JointScale.of(rate, change).covers(moved)

    def largest_epsilon(self, sensitivity: int, kappa: int) -> int:
        """See `NoiseLaw`."""
        return LARGEST_LOSS * MICROS * sensitivity // (sensitivity + kappa)


_LOCAL = NegativeBinomials(Fraction(3, 2))
_PAIRWISE = NegativeBinomials(Fraction(3))
_JOINT = CutLaplace()


def law_of(mode: NoiseMode) -> NoiseLaw:
    """The law of a mode. A mode without one does not pass the type check, nor this function."""
    match mode:
        case NoiseMode.LOCAL:
            return _LOCAL
        case NoiseMode.PAIRWISE:
            return _PAIRWISE
        case NoiseMode.JOINT:
            return _JOINT
        case _:
            assert_never(mode)


def laplace_variance(rate: Fraction) -> float:
    """The variance 2q/(1 − q)² of DLap(1/γ); for large scales 2b²."""
    one_minus_q = -math.expm1(-float(rate))
    return 2 * math.exp(-float(rate)) / one_minus_q**2


class _Coverage:
    """Lower bounds on P(|X| ≤ t), by summing the characteristic function over the M-th roots of unity.

    That sum gives the probability wrapped around M exactly. Three errors are bounded and taken off:
    - wrapping: at s = γ/2 the moment generating function is (1 + u/(1 + u + u²))^r ≤ (4/3)^r with u = √q, so
      P(|X| ≥ span) ≤ 2·(4/3)^3·e^(−γ·span/2), below 10^−12 for span ≥ 60/γ;
    - terms beyond θ = K(1 − q)/√q that are left out: at most (π/2K)^(2r)/(2r), as 1 − 2q cos θ + q² ≥ 4qθ²/π²
      and the Dirichlet kernel is at most π/θ there;
    - rounding.
    """

    _CUTOFF = 2000.0

    def __init__(self, r: float, rate: float) -> None:
        self.span = math.ceil(60 / rate) + 1
        modulus = 3 * self.span | 1  # odd, so that every root but 1 has its conjugate beside it
        one_minus_q = -math.expm1(-rate)
        q = max(math.exp(-rate), 1e-300)
        last = min((modulus - 1) // 2, math.ceil(self._CUTOFF * one_minus_q / math.sqrt(q) * modulus / (2 * math.pi)))
        self._half_angles = np.arange(1, last + 1) * (math.pi / modulus)
        self._sines = np.sin(self._half_angles)
        self._weights = (one_minus_q**2 / (one_minus_q**2 + 4 * q * self._sines**2)) ** r
        self._modulus = modulus
        truncation = 0.0 if last == (modulus - 1) // 2 else (math.pi / (2 * self._CUTOFF)) ** (2 * r) / (2 * r)
        self._slack = _ROUNDING + 1e-12 + truncation

    def at_least(self, t: int) -> float:
        """A number that P(|X| ≤ t) is not below, for 0 ≤ t ≤ span."""
        kernel = np.sin((2 * t + 1) * self._half_angles) / self._sines
        return float((2 * t + 1 + 2 * np.dot(self._weights, kernel)) / self._modulus) - self._slack

"""How much noise an answer carries: pure formulas for querier and helpers alike. Nothing is sampled here.

With γ = ε/Δ = 1/b and q = e^−γ, the discrete Laplace DLap(b) has P(x) ∝ q^|x|. It is the difference of two
geometric variables. The noise of `local` and `pairwise` is a difference of two negative binomials NB(r, q):

    DLap: r = 1      local, three Pólya(½) differences: r = 3/2      pairwise, three DLap: r = 3

so its variance is 2rq/(1 − q)², and its characteristic function ((1 − q)²/(1 − 2q cos θ + q²))^r. The noise of `joint`
is DLap itself but for coins that are rounded and an end that is cut off; all about it is exact (`joint_scale`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import assert_never

import numpy as np

from protocol.errors import ProtocolError
from protocol.joint_scale import JointScale
from protocol.query import NoiseMode, Query

# Numerical slack taken off every coverage: far above the rounding of a sum of 10^5 doubles of size at most 10^5.
_ROUNDING = 1e-9
MAX_CONFIDENCE = 1 - 1e-6


def shape(mode: NoiseMode) -> Fraction:
    """r, the shape of the two negative binomials whose difference the noise of all three helpers is, or is close to."""
    match mode:
        case NoiseMode.LOCAL:
            return Fraction(3, 2)
        case NoiseMode.PAIRWISE:
            return Fraction(3)
        case NoiseMode.JOINT:
            return Fraction(1)
        case _:
            assert_never(mode)


def laplace_variance(rate: Fraction) -> float:
    """The variance 2q/(1 − q)² of DLap(1/γ); for large scales 2b²."""
    one_minus_q = -math.expm1(-_checked(rate))
    return 2 * math.exp(-_checked(rate)) / one_minus_q**2


@dataclass(frozen=True, slots=True)
class NoiseScale:
    """The noise in each number of an answer. `change` is what one report can change the sum by: Δ + κ."""

    mode: NoiseMode
    rate: Fraction
    change: int

    def __post_init__(self) -> None:
        _checked(self.rate)

    @classmethod
    def of(cls, query: Query) -> NoiseScale:
        """That of a query which is not for debugging."""
        return cls(query.noise, query.gamma, query.sensitivity + query.kappa)

    @property
    def joint(self) -> JointScale:
        """The exact scale of `joint`; `TrefoilError` where there is none."""
        return JointScale.of(self.rate, self.change)

    @property
    def variance(self) -> float:
        """1.5 times that of DLap in `local`, 3 times in `pairwise`, and at most 1.0075 times in `joint`."""
        if self.mode is NoiseMode.JOINT:
            return float(self.joint.variance)
        return float(shape(self.mode)) * laplace_variance(self.rate)

    @property
    def standard_deviation(self) -> float:
        """What is reported with every answer."""
        return math.sqrt(self.variance)

    @property
    def delta(self) -> Fraction:
        """The answer is (ε, δ)-private. Zero, and ε pure, in every mode but `joint`."""
        return self.joint.delta() if self.mode is NoiseMode.JOINT else Fraction(0)

    def half_width(self, confidence: float) -> int:
        """The least t for which the noise is shown to lie in [−t, t] with at least this probability.

        Exact in `joint`. Else up to slack that is always taken in the safe direction, so the interval never covers
        less than it says.
        """
        if not (0 < confidence <= MAX_CONFIDENCE):
            raise ProtocolError(f"a confidence is above 0 and at most {MAX_CONFIDENCE}, not {confidence}")
        if self.mode is NoiseMode.JOINT:
            return self.joint.half_width(Fraction(confidence))
        coverage = _Coverage(float(shape(self.mode)), float(self.rate))
        low, high = -1, coverage.span
        while high - low > 1:
            middle = (low + high) // 2
            if coverage.at_least(middle) >= confidence:
                high = middle
            else:
                low = middle
        return high

    def coverage(self, width: int) -> float:
        """How surely the noise lies in [−width, width]: a number that the probability is not below."""
        if width < 0:
            raise ProtocolError(f"a width is 0 or more, not {width}")
        if self.mode is NoiseMode.JOINT:
            # The nearest double may lie above; the one before it cannot.
            return math.nextafter(float(self.joint.within(width)), 0)
        noise = _Coverage(float(shape(self.mode)), float(self.rate))
        return noise.at_least(min(width, noise.span))


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


def _checked(rate: Fraction) -> float:
    if not (0 < rate <= 10**6):
        raise ProtocolError(f"a noise rate ε/Δ is above 0 and at most 10^6, not {rate}")
    return float(rate)

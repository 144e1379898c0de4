"""Noise modes, the law of each, and how much noise an answer carries (DESIGN.md, "Noise"). Nothing is sampled here.

A mode has three parts: its name in `NoiseMode`, the distribution of its noise (its law) in `law_of`, and the program
that helpers run in `mpc_helpers.mpc.noisy_sum`. The type check fails if a mode lacks one of them. No other module of a
querier or a helper branches on the mode, and there is no mode without noise. `NoiseScale` is a law at a query's scale.

With γ = ε/Δ = 1/b and q = e^−γ, the discrete Laplace DLap(b) has P(x) ∝ q^|x|. It is the difference of two
geometric variables. The noise of `local` and `pairwise` is a difference of two negative binomials NB(r, q):

    DLap: r = 1      local, three Pólya(½) differences: r = 3/2      pairwise, three DLap: r = 3

so its variance is 2rq/(1 − q)², and its characteristic function ((1 − q)²/(1 − 2q cos θ + q²))^r. The noise of `joint`
is DLap except that its coins are rounded and its tails cut off; it is computed exactly (`joint_scale`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from typing import NamedTuple, assert_never

import numpy as np

from protocol.errors import OutOfRange
from protocol.joint_scale import LARGEST_LOSS, JointScale, least_width
from protocol.units import MAX_MICROS, MICROS


class ModeFacts(NamedTuple):
    """The properties of a mode that do not follow from its law."""

    # The number on the wire, which is never reused for another mode.
    code: int
    # Whether a helper runs the mode without being configured to.
    by_default: bool
    description: str


class NoiseMode(Enum):
    """How the helpers draw the noise of an answer. Values are the words of `--noise`.

    >>> [mode.value for mode in trefoil.NoiseMode]
    ['local', 'pairwise', 'joint']
    """

    LOCAL = "local"
    PAIRWISE = "pairwise"
    JOINT = "joint"

    @property
    def facts(self) -> ModeFacts:
        """Return the facts of this mode. `assert_never` makes the type check fail for a mode without them."""
        match self:
            case NoiseMode.LOCAL:
                return ModeFacts(1, True, "every helper adds a part of its own")
            case NoiseMode.PAIRWISE:
                return ModeFacts(2, True, "every two helpers add a part that both know")
            case NoiseMode.JOINT:
                # Off by default: devices paid for pure ε, and this mode is (ε, δ)-private.
                return ModeFacts(3, False, "the three draw one noise together, which nobody knows")
            case _:
                assert_never(self)


MAX_CONFIDENCE = 1 - 1e-6
# Numerical slack taken off every coverage: far above the rounding of a sum of 10^5 doubles of size at most 10^5.
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class NegativeBinomials:
    """A difference of two NB(r, q) of `shape` r: pure ε, at any scale."""

    shape: Fraction

    def variance(self, rate: Fraction, change: int) -> float:  # noqa: ARG002 - the same for every change
        return float(self.shape) * laplace_variance(rate)

    def delta(self, rate: Fraction, change: int) -> Fraction:  # noqa: ARG002 - pure
        return Fraction(0)

    def half_width(self, rate: Fraction, change: int, confidence: float) -> int:  # noqa: ARG002 - the same for every change
        """Return a t that numerical slack may make too large, never too small: the stated coverage always holds."""
        coverage = _Coverage(float(self.shape), float(rate))
        return least_width(coverage.span, lambda t: coverage.at_least(t) >= confidence)

    def coverage(self, rate: Fraction, change: int, width: int) -> float:  # noqa: ARG002 - the same for every change
        noise = _Coverage(float(self.shape), float(rate))
        return noise.at_least(min(width, noise.span))

    def covers(self, rate: Fraction, change: int, moved: int) -> bool:  # noqa: ARG002 - the tails have no end
        """Return True: the tails are unbounded, so a report of any size is covered at the ε it paid."""
        return True

    def largest_epsilon(self, sensitivity: int, kappa: int) -> int:  # noqa: ARG002 - whatever a query can say
        """Return the largest ε, in micros, that a query may request in this mode."""
        return MAX_MICROS


@dataclass(frozen=True, slots=True)
class CutLaplace:
    """DLap with rounded coins and bounded support: everything is exact, δ is not zero, and changes are limited."""

    # Close to: the coins are rounded.
    shape: Fraction = Fraction(1)

    def variance(self, rate: Fraction, change: int) -> float:
        """Return the exact variance, at most 1.0075 times that of DLap."""
        return float(JointScale.of(rate, change).variance)

    def delta(self, rate: Fraction, change: int) -> Fraction:
        return JointScale.of(rate, change).delta()

    def half_width(self, rate: Fraction, change: int, confidence: float) -> int:
        return JointScale.of(rate, change).half_width(Fraction(confidence))

    def coverage(self, rate: Fraction, change: int, width: int) -> float:
        """Return the probability rounded down: the nearest double could exceed it, the one before that cannot."""
        return math.nextafter(float(JointScale.of(rate, change).within(width)), 0)

    def covers(self, rate: Fraction, change: int, moved: int) -> bool:
        """Return whether δ is stated for a change of this size. A larger one is not covered, whatever its ε."""
        return JointScale.of(rate, change).covers(moved)

    def largest_epsilon(self, sensitivity: int, kappa: int) -> int:
        return LARGEST_LOSS * MICROS * sensitivity // (sensitivity + kappa)


# The distribution of a mode's noise. `rate` is γ; `change` is how far one report can move the sum, Δ + κ.
NoiseLaw = NegativeBinomials | CutLaplace

_LOCAL = NegativeBinomials(Fraction(3, 2))
_PAIRWISE = NegativeBinomials(Fraction(3))
_JOINT = CutLaplace()


def law_of(mode: NoiseMode) -> NoiseLaw:
    """Return the law of a mode. `assert_never` makes the type check fail for a mode without one."""
    match mode:
        case NoiseMode.LOCAL:
            return _LOCAL
        case NoiseMode.PAIRWISE:
            return _PAIRWISE
        case NoiseMode.JOINT:
            return _JOINT
        case _:
            assert_never(mode)


@dataclass(frozen=True, slots=True)
class NoiseScale:
    """The noise in each number of an answer. `change` is how far one report can move the sum, Δ + κ."""

    mode: NoiseMode
    rate: Fraction
    change: int

    def __post_init__(self) -> None:
        if not (0 < self.rate <= 10**6):
            raise OutOfRange(f"a noise rate ε/Δ is above 0 and at most 10^6, not {self.rate}")

    @property
    def law(self) -> NoiseLaw:
        return law_of(self.mode)

    @property
    def variance(self) -> float:
        """Return the variance: that of DLap times 1.5 in `local`, 3 in `pairwise`, and at most 1.0075 in `joint`."""
        return self.law.variance(self.rate, self.change)

    @property
    def standard_deviation(self) -> float:
        """Return the square root of the variance, which is reported with every answer."""
        return math.sqrt(self.variance)

    @property
    def delta(self) -> Fraction:
        """Return the δ for which the answer is (ε, δ)-private: 0 in every mode but `joint`."""
        return self.law.delta(self.rate, self.change)

    def half_width(self, confidence: float) -> int:
        """Return the least t for which the noise provably lies in [−t, t] with at least this probability."""
        if not (0 < confidence <= MAX_CONFIDENCE):
            raise OutOfRange(f"a confidence is above 0 and at most {MAX_CONFIDENCE}, not {confidence}")
        return self.law.half_width(self.rate, self.change, confidence)

    def coverage(self, width: int) -> float:
        """Return a lower bound on the probability that the noise lies in [−width, width]."""
        if width < 0:
            raise OutOfRange(f"a width is 0 or more, not {width}")
        return self.law.coverage(self.rate, self.change, width)

    def covers(self, moved: int) -> bool:
        """Return whether the law holds for a report that may change the sum by `moved`, whatever its ε."""
        return self.law.covers(self.rate, self.change, moved)


def laplace_variance(rate: Fraction) -> float:
    """Return the variance 2q/(1 − q)² of DLap(1/γ), which tends to 2b² for large scales b."""
    one_minus_q = -math.expm1(-float(rate))
    return 2 * math.exp(-float(rate)) / one_minus_q**2


class _Coverage:
    """Lower bounds on P(|X| ≤ t), by summing the characteristic function over the M-th roots of unity.

    That sum is the probability wrapped around M exactly. Three errors are bounded and taken off:
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
        """Return a lower bound on P(|X| ≤ t), for 0 ≤ t ≤ span."""
        kernel = np.sin((2 * t + 1) * self._half_angles) / self._sines
        return float((2 * t + 1 + 2 * np.dot(self._weights, kernel)) / self._modulus) - self._slack

"""How much noise an answer carries, for querier and helpers alike: the law of its mode at the scale of its query."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from protocol import noise_law
from protocol.errors import ProtocolError
from protocol.noise_law import NoiseLaw, law_of
from protocol.query import NoiseMode, Query

MAX_CONFIDENCE = 1 - 1e-6


def shape(mode: NoiseMode) -> Fraction:
    """r, the shape of the two negative binomials whose difference the noise of all three helpers is, or is close to."""
    return law_of(mode).shape


def laplace_variance(rate: Fraction) -> float:
    """The variance of one discrete Laplace draw at this rate."""
    _check(rate)
    return noise_law.laplace_variance(rate)


@dataclass(frozen=True, slots=True)
class NoiseScale:
    """The noise in each number of an answer. `change` is what one report can change the sum by: Δ + κ."""

    mode: NoiseMode
    rate: Fraction
    change: int

    def __post_init__(self) -> None:
        _check(self.rate)

    @classmethod
    def of(cls, query: Query) -> NoiseScale:
        """That of a query which is not for debugging."""
        return cls(query.noise, query.gamma, query.sensitivity + query.kappa)

    @property
    def law(self) -> NoiseLaw:
        """Of the mode."""
        return law_of(self.mode)

    @property
    def variance(self) -> float:
        """1.5 times that of DLap in `local`, 3 times in `pairwise`, and at most 1.0075 times in `joint`."""
        return self.law.variance(self.rate, self.change)

    @property
    def standard_deviation(self) -> float:
        """What is reported with every answer."""
        return math.sqrt(self.variance)

    @property
    def delta(self) -> Fraction:
        """The answer is (ε, δ)-private. Zero, and ε pure, in every mode but `joint`."""
        return self.law.delta(self.rate, self.change)

    def half_width(self, confidence: float) -> int:
        """The least t for which the noise is shown to lie in [−t, t] with at least this probability."""
        if not (0 < confidence <= MAX_CONFIDENCE):
            raise ProtocolError(f"a confidence is above 0 and at most {MAX_CONFIDENCE}, not {confidence}")
        return self.law.half_width(self.rate, self.change, confidence)

    def coverage(self, width: int) -> float:
        """How surely the noise lies in [−width, width]: a number that the probability is not below."""
        if width < 0:
            raise ProtocolError(f"a width is 0 or more, not {width}")
        return self.law.coverage(self.rate, self.change, width)

    def covers(self, moved: int) -> bool:
        """Whether the noise is enough for a report that may change the sum by `moved`, beyond what its ε says."""
        return self.law.covers(self.rate, self.change, moved)


def _check(rate: Fraction) -> None:
    if not (0 < rate <= 10**6):
        raise ProtocolError(f"a noise rate ε/Δ is above 0 and at most 10^6, not {rate}")

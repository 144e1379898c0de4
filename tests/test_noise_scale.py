"""The formulas for variance and confidence, against probabilities computed in another way."""

from __future__ import annotations

import functools
import math
from fractions import Fraction

import numpy as np
import numpy.typing as npt
import pytest

from protocol import noise_scale
from protocol.errors import ProtocolError, TrefoilError
from protocol.joint_scale import JointScale
from protocol.noise_scale import NoiseScale
from protocol.query import NoiseMode
from tests.support import protocol_samples as samples

RATES = [Fraction(1, 40), Fraction(1, 7), Fraction(1, 2), Fraction(1), Fraction(5), Fraction(4294)]
# Sums of what helpers or pairs drew; the noise of `joint` has formulas of its own.
DRAWN_APART = [NoiseMode.LOCAL, NoiseMode.PAIRWISE]


def of(mode: NoiseMode, rate: Fraction) -> NoiseScale:
    return NoiseScale(mode, rate, 1)


@functools.cache
def probabilities(mode: NoiseMode, rate: Fraction) -> npt.NDArray[np.float64]:
    """P(−n), ..., P(n) of the noise, by convolving two negative binomials term by term."""
    r, count = float(noise_scale.shape(mode)), math.ceil(50 / rate) + 20
    logs = [math.lgamma(r + k) - math.lgamma(r) - math.lgamma(k + 1) - float(rate) * k for k in range(count)]
    one_sided = np.exp(np.array(logs) + r * math.log(-math.expm1(-rate)))
    return np.convolve(one_sided, one_sided[::-1])


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("mode", DRAWN_APART)
def test_variance(mode: NoiseMode, rate: Fraction) -> None:
    found = probabilities(mode, rate)
    x = np.arange(found.size) - found.size // 2
    expected = float(np.dot(found, x.astype(float) ** 2))
    assert of(mode, rate).variance == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert of(mode, rate).standard_deviation ** 2 == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("rate", RATES)
def test_local_is_one_and_a_half_laplace_and_pairwise_three(rate: Fraction) -> None:
    laplace = noise_scale.laplace_variance(rate)
    assert of(NoiseMode.LOCAL, rate).variance == 1.5 * laplace
    assert of(NoiseMode.PAIRWISE, rate).variance == 3 * laplace


def test_laplace_variance_at_known_points() -> None:
    """q = 1/2 gives 2·(1/2)/(1/4) = 4; a large scale b gives 2b² − 1/6 + ..."""
    half = Fraction(math.log(2))
    assert noise_scale.laplace_variance(half) == pytest.approx(4, rel=1e-12)
    assert noise_scale.laplace_variance(Fraction(1, 10**6)) == pytest.approx(2e12, rel=1e-9)


@pytest.mark.parametrize("confidence", [0.1, 0.5, 0.9, 0.95, 0.999, 0.999999])
@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("mode", DRAWN_APART)
def test_half_width_covers_and_is_the_least_that_does(mode: NoiseMode, rate: Fraction, confidence: float) -> None:
    width = of(mode, rate).half_width(confidence)
    found = probabilities(mode, rate)
    middle = found.size // 2
    assert found[middle - width : middle + width + 1].sum() >= confidence
    if width:
        assert found[middle - width + 1 : middle + width].sum() < confidence + 1e-8


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("mode", DRAWN_APART)
def test_coverage_is_the_probability_and_never_above_it(mode: NoiseMode, rate: Fraction) -> None:
    found = probabilities(mode, rate)
    middle = found.size // 2
    for width in (0, 1, 5, middle // 4):
        exact = float(found[middle - width : middle + width + 1].sum())
        assert exact - 1e-6 < of(mode, rate).coverage(width) <= exact
    assert of(mode, rate).coverage(10**30) > 1 - 1e-6
    with pytest.raises(ProtocolError):
        of(mode, rate).coverage(-1)


def test_half_width_for_large_scales_tends_to_a_multiple_of_the_scale() -> None:
    """Far beyond what could be summed term by term: the width in units of b settles."""
    widths = [of(NoiseMode.LOCAL, Fraction(1, 10**k)).half_width(0.95) / 10**k for k in (5, 9, 12)]
    assert widths == pytest.approx([widths[0]] * 3, rel=1e-4)


@pytest.mark.parametrize("confidence", [0.0, 1.0, -1.0, float("nan")])
def test_impossible_confidences_are_refused(confidence: float) -> None:
    with pytest.raises(ProtocolError):
        of(NoiseMode.LOCAL, Fraction(1)).half_width(confidence)


@pytest.mark.parametrize("rate", [Fraction(0), Fraction(-1), Fraction(10**7)])
def test_impossible_rates_are_refused(rate: Fraction) -> None:
    with pytest.raises(ProtocolError):
        of(NoiseMode.LOCAL, rate)


@pytest.mark.parametrize("rate", RATES[:-1])
def test_joint_is_one_laplace_and_everything_about_it_is_exact(rate: Fraction) -> None:
    scale, exact = NoiseScale(NoiseMode.JOINT, rate, 3), JointScale.of(rate, 3)
    assert scale.variance == float(exact.variance)
    assert 1 <= scale.variance / noise_scale.laplace_variance(rate) < 1.0075
    # What three helpers add up to in the other modes has 1.22 and 1.73 times the standard deviation.
    assert of(NoiseMode.LOCAL, rate).standard_deviation / scale.standard_deviation == pytest.approx(1.5**0.5, rel=0.004)
    assert scale.delta == exact.delta() > 0
    assert [of(mode, rate).delta for mode in DRAWN_APART] == [0, 0]
    for width in (0, 2, 40):
        assert (
            Fraction(scale.coverage(width))
            <= exact.within(width)
            < Fraction(scale.coverage(width)) + Fraction(1, 10**15)
        )
    assert scale.half_width(0.95) == exact.half_width(Fraction(0.95))


def test_what_one_report_can_change_counts_its_side_query() -> None:
    query = samples.query(kappa=7, noise=NoiseMode.JOINT)
    assert NoiseScale.of(query) == NoiseScale(NoiseMode.JOINT, query.gamma, query.sensitivity + 7)


def test_joint_noise_for_an_epsilon_beyond_64_is_refused() -> None:
    with pytest.raises(TrefoilError, match="at most 64"):
        _ = of(NoiseMode.JOINT, Fraction(4294)).variance

"""Variance, confidence and δ of every noise mode, against probabilities computed in another way. Nothing is sampled."""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import replace
from decimal import Context, Decimal
from fractions import Fraction

import numpy as np
import numpy.typing as npt
import pytest

from protocol import noise
from protocol.errors import ErrorKind, ProtocolError, TrefoilError
from protocol.joint_scale import LARGEST_RATE, MAX_DIGITS, Coin, JointScale, coin_below, exp_below
from protocol.noise import NoiseMode, NoiseScale, laplace_variance
from tests.support import protocol_samples as samples
from tests.support.raising import raises

RATES = [Fraction(1, 40), Fraction(1, 7), Fraction(1, 2), Fraction(1), Fraction(5), Fraction(4294)]
# Sums of what helpers or pairs drew; the noise of `joint` has formulas of its own.
DRAWN_APART = [NoiseMode.LOCAL, NoiseMode.PAIRWISE]


def of(mode: NoiseMode, rate: Fraction) -> NoiseScale:
    return NoiseScale(mode, rate, 1)


@functools.cache
def probabilities(mode: NoiseMode, rate: Fraction) -> npt.NDArray[np.float64]:
    """P(−n), ..., P(n) of the noise, by convolving two negative binomials term by term."""
    r, count = float(noise.law_of(mode).shape), math.ceil(50 / rate) + 20
    logs = [math.lgamma(r + k) - math.lgamma(r) - math.lgamma(k + 1) - float(rate) * k for k in range(count)]
    one_sided = np.exp(np.array(logs) + r * math.log(-math.expm1(-rate)))
    return np.convolve(one_sided, one_sided[::-1])


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("mode", DRAWN_APART)
def test_variance(mode: NoiseMode, rate: Fraction) -> None:
    law = probabilities(mode, rate)
    x = np.arange(law.size) - law.size // 2
    expected = float(np.dot(law, x.astype(float) ** 2))
    assert of(mode, rate).variance == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert of(mode, rate).standard_deviation ** 2 == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_laplace_variance_at_known_points() -> None:
    """At q = 1/2 it is 2·(1/2)/(1/4) = 4; at a large scale b it is 2b² − 1/6 + ..."""
    half = Fraction(math.log(2))
    assert noise.laplace_variance(half) == pytest.approx(4, rel=1e-12)
    assert noise.laplace_variance(Fraction(1, 10**6)) == pytest.approx(2e12, rel=1e-9)


@pytest.mark.parametrize("confidence", [0.1, 0.5, 0.9, 0.95, 0.999, 0.999999])
@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("mode", DRAWN_APART)
def test_half_width_covers_and_is_the_least_that_does(mode: NoiseMode, rate: Fraction, confidence: float) -> None:
    width = of(mode, rate).half_width(confidence)
    law = probabilities(mode, rate)
    middle = law.size // 2
    assert law[middle - width : middle + width + 1].sum() >= confidence
    if width:
        assert law[middle - width + 1 : middle + width].sum() < confidence + 1e-8


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("mode", DRAWN_APART)
def test_coverage_is_the_probability_and_never_above_it(mode: NoiseMode, rate: Fraction) -> None:
    law = probabilities(mode, rate)
    middle = law.size // 2
    for width in (0, 1, 5, middle // 4):
        exact = float(law[middle - width : middle + width + 1].sum())
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
    assert 1 <= scale.variance / noise.laplace_variance(rate) < 1.0075
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
    assert query.noise_scale == NoiseScale(NoiseMode.JOINT, query.gamma, query.sensitivity + 7)


def test_joint_noise_for_an_epsilon_beyond_64_is_refused() -> None:
    with raises(ErrorKind.TOO_LARGE, TrefoilError):
        _ = of(NoiseMode.JOINT, Fraction(4294)).variance


JOINT_RATES = [
    Fraction(64),
    Fraction(16),
    Fraction(3),
    Fraction(1),
    Fraction(7, 10),
    Fraction(1, 10),
    Fraction(1, 100),
    Fraction(999_983, 10**6 * 12_345),
    Fraction(1, 65536),
    Fraction(1, 10**6),
    Fraction(1, 2**40),
]
DIGITS = Context(prec=90)


def exponential(rate: Fraction) -> Fraction:
    """A number not above e^γ and less than 10^−80 below it, relatively."""
    quotient = DIGITS.divide(Decimal(rate.numerator), Decimal(rate.denominator))
    return Fraction(DIGITS.exp(quotient)) * (1 - Fraction(1, 10**85))


def random_terms(count: int) -> Iterator[tuple[Fraction, int]]:
    """Rates of all sizes as queries have them, ε/Δ in millionths, with ε + side query below the limit."""
    pick = np.random.default_rng(61)
    while count:
        sensitivity = int(2 ** pick.uniform(0, 40))
        kappa = int(pick.integers(2)) * int(sensitivity * pick.uniform(0, 3))
        epsilon = int(10 ** pick.uniform(0, math.log10(64e6)))
        rate = Fraction(epsilon, 10**6 * sensitivity)
        if rate * (sensitivity + kappa) <= 64 and 105 / min(rate, LARGEST_RATE) < 2**MAX_DIGITS:
            count -= 1
            yield rate, sensitivity + kappa


def steps_of(scale: JointScale) -> Iterator[tuple[int, int]]:
    """P(g) : P(g + 1) for g = 0, 1, 3, 7, ... and P(0) : P(−1): all ratios of neighbours that there are."""
    yield scale.sign.odds.numerator, scale.sign.odds.denominator
    ones, zeros = 1, 1
    for coin in scale.digits:
        rest = (1 << coin.bits) - coin.numerator
        yield ones * rest, zeros * coin.numerator
        ones, zeros = ones * coin.numerator, zeros * rest


def test_a_thousand_random_scales_fall_by_at_most_e_to_the_gamma_per_step() -> None:
    largest_delta, largest_variance = Fraction(0), 0.0
    for rate, change in random_terms(1000):
        scale = JointScale.of(rate, change)
        limit = exponential(rate)
        n, d = limit.numerator, limit.denominator
        assert all(q <= p and d * p <= n * q for p, q in steps_of(scale)), (rate, change)
        assert scale.change >= change and 15 - rate < scale.rate * scale.change <= 64
        largest_delta = max(largest_delta, scale.delta())
        largest_variance = max(largest_variance, float(scale.variance) / laplace_variance(min(rate, LARGEST_RATE)))
    # The worst case here: δ = 2^−54.3, variance 1.0037 times that of DLap.
    assert largest_delta < Fraction(1, 2**53) and 1 < largest_variance < 1.0075


@pytest.mark.parametrize("rate", JOINT_RATES)
def test_variance_mean_and_delta_where_the_review_looked(rate: Fraction) -> None:
    for change in (change for change in (1, 10, 2**20, int(64 / rate)) if change * rate <= 64):
        scale = JointScale.of(rate, change)
        assert scale.delta() < Fraction(1, 2**52)
        assert 1 <= float(scale.variance) / laplace_variance(min(rate, LARGEST_RATE)) < 1.0075
        assert 0 <= scale.mean < Fraction(1, 1000)


def test_the_points_at_which_the_first_rule_failed() -> None:
    """δ was 2^−51.99 at the first (a legal query refused) and the variance 1.00747 at the second."""
    assert JointScale.of(Fraction(60_087_319, 10**7), 10).delta() < Fraction(1, 2**52)
    scale = JointScale.of(Fraction(31_555_945, 2 * 10**6), 2)
    assert 1.007 < float(scale.variance) / laplace_variance(scale.rate) < 1.0075


@pytest.mark.parametrize("loss", [1, 5, 10, 15])
def test_delta_holds_for_what_a_person_moves_and_not_only_for_the_query_s_sensitivity(loss: int) -> None:
    """A querier may name a small Δ at the same γ; with L made from Δ, a loss of 10 had δ = 2^−38.5."""
    scale = JointScale.of(Fraction(35_192, 10**6), 1)
    assert scale.delta(math.floor(loss / scale.rate)) <= scale.delta() < Fraction(1, 2**52)
    assert scale.covers(math.floor(15 / scale.rate)) and not scale.covers(math.floor(15 / scale.rate) + 1)


SMALL = [
    (Fraction(40), 1),
    (Fraction(16), 4),
    (Fraction(9), 7),
    (Fraction(3), 1),
    (Fraction(3), 21),
    (Fraction(1), 20),
    (Fraction(3, 10), 60),
]


def whole_numbers(scale: JointScale) -> list[int]:
    """P(x) for all x from −2^L to 2^L − 1, as multiples of one power of two."""
    unit = 1 << sum(coin.bits for coin in scale.coins)
    top = 1 << len(scale.digits)
    weights = [scale.probability(x) * unit for x in range(-top, top)]
    assert all(value.denominator == 1 for value in weights) and sum(weights) == unit
    return [int(value) for value in weights]


def hockey_stick(left: list[int], right: list[int], factor: Fraction) -> Fraction:
    """Σ max(0, P(y) − e^ε·Q(y))."""
    n, d = factor.numerator, factor.denominator
    return Fraction(sum(max(0, d * p - n * q) for p, q in zip(left, right, strict=True)), d)


def shifted(values: list[int], shift: int) -> list[int]:
    """The distribution of X + shift, over the support of X."""
    count = len(values)
    return [values[x - shift] if 0 <= x - shift < count else 0 for x in range(count)]


def rounded(factor: Fraction) -> Fraction:
    """Not above, and short enough to multiply often."""
    return Fraction(math.floor(factor * 2**128), 2**128)


@pytest.mark.parametrize(("rate", "change"), SMALL)
def test_exact_divergence_of_one_bucket_under_every_shift(rate: Fraction, change: int) -> None:
    scale = JointScale.of(rate, change)
    values, limit = whole_numbers(scale), exponential(rate)
    for shift in range(1, scale.change + 1):
        stated = scale.delta(shift) * sum(values)
        for signed in (shift, -shift):
            assert hockey_stick(values, shifted(values, signed), rounded(limit**shift)) <= stated
    # The bound is reached: nothing smaller could be stated.
    assert hockey_stick(values, shifted(values, -scale.change), exponential(rate) ** scale.change) > stated * 99 / 100


@pytest.mark.parametrize(("rate", "change"), [(Fraction(16), 4), (Fraction(9), 7), (Fraction(3), 1)])
def test_exact_divergence_of_two_buckets_under_every_split(rate: Fraction, change: int) -> None:
    """δ has no factor for the number of buckets: a change is worst when all of it is in one."""
    scale = JointScale.of(rate, change)
    values, limit = whole_numbers(scale), exponential(rate)
    for total in range(2, scale.change + 1):
        factor = rounded(limit**total)
        for first in range(1, total):
            for sign in (1, -1):
                one, other = shifted(values, first), shifted(values, sign * (total - first))
                both = [a * b for a in values for b in values]
                moved = [a * b for a in one for b in other]
                assert hockey_stick(both, moved, factor) <= scale.delta(total) * sum(both)


@pytest.mark.parametrize(("rate", "change"), SMALL)
def test_the_tail_is_superadditive(rate: Fraction, change: int) -> None:
    scale = JointScale.of(rate, change)
    for total in range(2, scale.change + 1):
        assert all(scale.delta(part) + scale.delta(total - part) <= scale.delta(total) for part in range(1, total))


@pytest.mark.parametrize(("rate", "change"), SMALL)
def test_moments_and_quantiles_are_those_of_the_whole_support(rate: Fraction, change: int) -> None:
    scale = JointScale.of(rate, change)
    values, top = whole_numbers(scale), 1 << len(scale.digits)
    unit = sum(values)
    mean = Fraction(sum(p * (x - top) for x, p in enumerate(values)), unit)
    assert scale.mean == mean
    assert scale.variance == Fraction(sum(p * (x - top) ** 2 for x, p in enumerate(values)), unit) - mean**2
    assert [scale.at_least(n) for n in (-1, 0, top, top + 1)] == [1, 1, 0, 0]
    assert not scale.probability(top) and not scale.probability(-top - 1)
    for confidence in (Fraction(1, 10**9), Fraction(1, 2), Fraction(19, 20), Fraction(0.95), 1 - Fraction(1, 10**6)):
        t = scale.half_width(confidence)
        inside = [sum(values[max(0, top - k) : top + k + 1]) for k in (t - 1, t)] if t else [0, values[top]]
        assert inside[0] < confidence * unit <= inside[1]


# What must not be made: a scale that is planted is refused by the certificate.


def test_a_coin_rounded_away_from_one_half_is_refused() -> None:
    scale = JointScale.of(Fraction(1, 100), 100)
    for place, coin in enumerate(scale.digits):
        wrong = Coin(coin.bits, coin.numerator - 2) if coin.numerator > 2 else Coin(coin.bits + 1, 1)
        with raises(ErrorKind.OUT_OF_RANGE, ProtocolError):
            replace(scale, digits=(*scale.digits[:place], wrong, *scale.digits[place + 1 :]))
    with raises(ErrorKind.OUT_OF_RANGE, ProtocolError):
        replace(scale, sign=Coin(scale.sign.bits, scale.sign.numerator - 2))


def test_noise_of_a_smaller_scale_is_refused() -> None:
    scale = JointScale.of(Fraction(1, 100), 100)
    smaller = JointScale.of(Fraction(1, 95), 95)
    with raises(ErrorKind.OUT_OF_RANGE, ProtocolError):
        replace(scale, digits=smaller.digits)
    with raises(ErrorKind.OUT_OF_RANGE, ProtocolError):
        replace(scale, sign=smaller.sign)


def test_a_dropped_digit_is_refused() -> None:
    scale = JointScale.of(Fraction(1, 100), 100)
    with raises(ErrorKind.OUT_OF_RANGE, ProtocolError):
        replace(scale, digits=scale.digits[:-1])
    for place in range(len(scale.digits) - 1):
        with raises(ErrorKind.OUT_OF_RANGE, ProtocolError):
            replace(scale, digits=(*scale.digits[:place], *scale.digits[place + 1 :]))


def test_a_fair_sign_is_private_but_no_longer_the_noise_that_is_stated() -> None:
    """The certificate is about privacy, and a fair sign is private. The audit of the stack sees its mean of −½."""
    scale = JointScale.of(Fraction(1, 4), 4)
    fair = replace(scale, sign=Coin(1, 1))
    assert fair.mean == Fraction(-1, 2) and fair.variance > scale.variance


def test_refusals_name_what_to_do_instead() -> None:
    assert JointScale.of(Fraction(64), 1).change == 1
    with raises(ErrorKind.TOO_LARGE, TrefoilError) as caught:
        JointScale.of(Fraction(64_000_001, 10**6), 1)
    assert "64.000001" in str(caught.value)
    assert "--noise local" in caught.value.hint
    # (37 + 15)/γ is at most 2^52 exactly when γ is at least 52/2^52.
    assert len(JointScale.of(Fraction(52, 2**52), 1).digits) == 52
    with raises(ErrorKind.TOO_LARGE, TrefoilError) as caught:
        JointScale.of(Fraction(52, 2**52) - Fraction(1, 2**90), 1)
    assert "53 binary digits" in str(caught.value)
    assert "coarser unit" in caught.value.hint
    for rate, change in ((Fraction(0), 1), (Fraction(-1), 1), (Fraction(1), 0)):
        with pytest.raises(ProtocolError):
            JointScale.of(rate, change)


@pytest.mark.parametrize(("numerator", "bits"), [(0, 3), (2, 3), (8, 3), (9, 3), (1, 0), (-1, 2)])
def test_a_coin_is_an_odd_number_over_a_power_of_two(numerator: int, bits: int) -> None:
    with pytest.raises(ProtocolError):
        Coin(bits, numerator)


def test_the_coin_of_fewest_bits() -> None:
    """Against a search that has nothing in common with the module's."""
    for odds in (Fraction(1), Fraction(3, 2), Fraction(7, 3), Fraction(100, 7), Fraction(2001, 2)):
        for slack in (Fraction(1, 2), Fraction(1, 30), Fraction(1, 1000)):
            coin = coin_below(odds, slack)
            assert odds / (1 + slack) <= coin.odds <= odds
            shorter = ((k, c) for k in range(1, coin.bits) for c in range(1, 1 << k, 2))
            fitting = [Fraction((1 << k) - c, c) for k, c in shorter if k < 12]
            assert not any(odds / (1 + slack) <= short <= odds for short in fitting)


@pytest.mark.parametrize("rate", [*JOINT_RATES[1:], Fraction(51, 2**50)])
def test_the_bound_on_the_exponential(rate: Fraction) -> None:
    below = exp_below(rate)
    assert 1 + rate <= below <= exponential(rate) / (1 - Fraction(1, 10**84))
    assert exponential(rate) - below < Fraction(1, 2**120)


def test_the_encoding_is_that_of_the_specification() -> None:
    scale = JointScale.of(Fraction(16), 4)
    assert [(coin.bits, coin.numerator) for coin in scale.coins] == [(30, 121), (51, 29), (96, 13), (30, 121)]
    coins = bytes.fromhex("001e0001 79  00330001 1d  00600001 0d  001e0001 79")
    assert scale.encode() == b"\0\x0416/1" + (4).to_bytes(8, "big") + b"\x03" + coins


def test_delta_of_many_parts_does_not_grow_with_their_number() -> None:
    """δ(t) is convex and zero at zero, so δ_q(t) ≤ (t/T_q)·δ_q(T_q) ≤ 2·(γ_q·t/Λ_q)·2^−52, exactly; Λ_q is at least 15.

    Summed over the answers that a report is in, whatever their number: Σ δ_q ≤ (2/15)·2^−52·(the loss), which is below
    2^−52 up to a loss of 7.5.
    """
    rng = random.Random(7)
    rates = [Fraction(rng.randint(1, 4000), rng.choice((100, 1000, 10_000))) for _ in range(20)]
    for rate, change in itertools.product(rates, (1, 7, 40)):
        if rate * change > 60:
            continue
        scale = JointScale.of(rate, change)
        for t in {1, change, max(1, scale.change // 3), scale.change}:
            assert scale.delta(t) <= Fraction(t, scale.change) * scale.delta()
            assert scale.delta(t) <= 2 * rate * t / max(rate * change, Fraction(15)) * Fraction(1, 2**52)
    # One report of ε/Δ = 6 in one answer, and in 4 and 24 parts.
    whole, loss = Fraction(6), 6
    for parts in (1, 4, 24):
        scale = JointScale.of(whole / parts, 1)
        assert parts * scale.delta(1) <= Fraction(2, 15) * loss * Fraction(1, 2**52)


def test_delta_of_two_releases_is_at_most_the_sum_of_theirs() -> None:
    """The exact hockey-stick divergence: Σ max(0, P(v) − e^(Σγ)·P'(v)), with a rational below e^(Σγ)."""
    scales = [JointScale.of(Fraction(rate), 1) for rate in (10, 8)]
    power = math.prod(exp_below(scale.rate) for scale in scales)
    tables = []
    for scale in scales:
        reach = 1 << len(scale.digits)
        tables.append([(scale.probability(x), scale.probability(x - 1)) for x in range(-reach - 1, reach + 2)])
    together = sum(
        (max(Fraction(0), a * c - power * b * d) for (a, b), (c, d) in itertools.product(*tables)), Fraction(0)
    )
    assert 0 < together <= sum(scale.delta(1) for scale in scales)

"""Looking at samples: fit, variance and ε, on the real noise and on planted bugs that must be caught.

False failures. `misfits` bounds each bin's count by P(this far off) ≤ 2·exp(−n·KL), true of every binomial, with a
budget of 10^−8 over all bins; a chi-square by its tail bound k + 2√(kx) + 2x (Laurent and Massart), again 10^−8 where
the limit law holds (30 or more expected in every bin); and the variance at 6 standard errors (2·10^−9 for a normal
variable). `epsilon_at_least` is wrong with probability at most 10^−8. With ten audits of fresh randomness the whole
file fails by chance with probability below 10^−6. Planted bugs are drawn from fixed keys: caught always, or never.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Awaitable, Callable, Sequence
from fractions import Fraction

import numpy as np
import numpy.typing as npt
import pytest

from mpc_helpers.mpc import noise
from mpc_helpers.mpc.noisy_sum import ExactNoise, local_sum, pairwise_sum
from mpc_helpers.mpc.runtime import run_three_in_one_process
from mpc_helpers.mpc.session import MpcSession
from mpc_helpers.mpc.terms import SumKind, SumTerms
from protocol.field import from_integers
from protocol.shares import open_shamir, share, to_shamir

SENSITIVITY = 4
RATE = Fraction(1, SENSITIVITY)  # ε = 1
SAMPLES = 30_000
RISK = 1e-8

Samples = npt.NDArray[np.int64]


def binomial_divergence(observed: float, expected: float) -> float:
    """KL(observed ‖ expected) of two coins."""
    parts = ((observed, expected), (1 - observed, 1 - expected))
    return sum(o * math.log(o / e) for o, e in parts if o > 0)


@functools.cache
def negative_binomial(r: float, rate: Fraction) -> npt.NDArray[np.float64]:
    logs = [math.lgamma(r + k) - math.lgamma(r) - math.lgamma(k + 1) - float(rate) * k for k in range(400)]
    return np.exp(np.array(logs) + r * math.log(-math.expm1(-rate)))


def probability(r: float, rate: Fraction, x: int) -> float:
    """P(X = x) for X = NB(r, q) − NB(r, q)."""
    terms = negative_binomial(r, rate)
    return float(np.dot(terms[abs(x) :], terms[: terms.size - abs(x)]))


def misfits(samples: Samples, r: float, rate: Fraction) -> list[str]:
    """What about these samples contradicts a difference of two NB(r, q)."""
    bins = [x for x in range(-16, 17) if samples.size * probability(r, rate, x) >= 30]
    expected = np.array([probability(r, rate, x) for x in bins])
    observed = np.array([float(np.mean(samples == x)) for x in bins])
    found = [
        f"P({x}) is {o:.4f}, not {e:.4f}"
        for x, o, e in zip(bins, observed.tolist(), expected.tolist(), strict=True)
        if samples.size * binomial_divergence(o, e) > math.log(2 * len(bins) / RISK)
    ]
    chi_square = samples.size * float(np.sum((with_rest(observed) - with_rest(expected)) ** 2 / with_rest(expected)))
    log_risk = -math.log(RISK)
    if chi_square > len(bins) + 2 * math.sqrt(len(bins) * log_risk) + 2 * log_risk:
        found.append(f"chi-square is {chi_square:.0f} with {len(bins)} degrees of freedom")
    score = variance_score(samples, r, rate)
    if abs(score) > 6:
        found.append(f"the variance is {score:.1f} standard errors off")
    return found


def with_rest(weights: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return np.append(weights, 1 - weights.sum())


def variance_score(samples: Samples, r: float, rate: Fraction) -> float:
    """How many standard errors the second moment is off, from the exact second and fourth cumulants."""
    q = math.exp(-rate)
    variance = 2 * r * q / (1 - q) ** 2
    fourth = 2 * r * q * (1 + 4 * q + q * q) / (1 - q) ** 4 + 3 * variance**2
    second = float(np.mean(samples.astype(np.float64) ** 2))
    return (second - variance) / math.sqrt((fourth - variance**2) / samples.size)


def of_helpers(count: int, rate: Fraction = RATE, key: bytes | None = None) -> Samples:
    """Sums of `count` helpers' local noise."""
    coins = noise.keyed_coins(key) if key else noise.system_coins()
    return total([noise.draw_local(rate, SAMPLES, coins) for _ in range(count)])


def of_pairs(count: int, rate: Fraction = RATE, key: bytes | None = None) -> Samples:
    """Sums of `count` pairs' noise."""
    coins = noise.keyed_coins(key) if key else noise.system_coins()
    return total([noise.draw_laplace(rate, SAMPLES, coins) for _ in range(count)])


def total(parts: list[list[int]]) -> Samples:
    summed: Samples = np.array(parts, dtype=np.int64).sum(axis=0)
    return summed


@pytest.mark.parametrize(("count", "r"), [(1, 0.5), (2, 1.0), (3, 1.5)])
def test_local_noise_fits(count: int, r: float) -> None:
    """One helper's part, two (exactly DLap), and three: variance 1.5 times that of DLap."""
    assert misfits(of_helpers(count), r, RATE) == []


@pytest.mark.parametrize(("count", "r"), [(1, 1.0), (3, 3.0)])
def test_pairwise_noise_fits(count: int, r: float) -> None:
    """One pair (exactly DLap) and all three: variance 3 times that of DLap."""
    assert misfits(of_pairs(count), r, RATE) == []


def test_an_awkward_rate_fits_too() -> None:
    """ε = 1.234567 and Δ = 3: a numerator above one and a large denominator, floors and all."""
    rate = Fraction(1_234_567, 3_000_000)
    assert misfits(of_helpers(2, rate), 1.0, rate) == []


KEY = b"planted bugs are drawn from this"

PLANTED: dict[str, Callable[[], Samples]] = {
    "scale times 0.95": lambda: of_helpers(3, RATE / Fraction(95, 100), KEY),
    "half the scale": lambda: of_helpers(3, 2 * RATE, KEY),
    "sensitivity ignored": lambda: of_helpers(3, RATE * SENSITIVITY, KEY),
    "one-sided": lambda: np.abs(of_helpers(3, RATE, KEY)),
    "a Gaussian of the same variance": lambda: gaussian(3 / 2, SAMPLES),
    "two helpers instead of three": lambda: of_helpers(2, RATE, KEY),
    "minus one folded to zero": lambda: folded(of_helpers(3, RATE, KEY)),
}


def folded(samples: Samples) -> Samples:
    return np.where(samples == -1, 0, samples)


def gaussian(r: float, count: int) -> Samples:
    q = math.exp(-RATE)
    spread = math.sqrt(2 * r * q) / (1 - q)
    return np.rint(np.random.default_rng(7).normal(0, spread, count)).astype(np.int64)


@pytest.mark.parametrize("bug", PLANTED)
def test_planted_bugs_do_not_fit(bug: str) -> None:
    assert misfits(PLANTED[bug](), 1.5, RATE)


def epsilon_at_least(near: Samples, far: Samples) -> float:
    """A lower bound on ε from what the adversary sees with two neighbouring inputs: `far` is the one with Δ more.

    Events {x ≥ t} and {x ≤ t}, either way around, each with a confidence bound on both its frequencies.
    """
    thresholds = range(-4 * SENSITIVITY, 5 * SENSITIVITY + 1)
    each = RISK / (4 * 2 * len(thresholds))
    best = 0.0
    for t in thresholds:
        for above in (True, False):
            events = [samples >= t if above else samples <= t for samples in (near, far)]
            for one, other in (events, events[::-1]):
                low, high = bound(one, each, upper=False), bound(other, each, upper=True)
                best = max(best, math.log(low / high) if low > 0 else 0.0)
    return best


def bound(event: npt.NDArray[np.bool_], risk: float, *, upper: bool) -> float:
    """The largest (or smallest) probability that the observed frequency does not contradict, by bisection."""
    observed = float(np.mean(event))
    inside, outside = observed, 1.0 if upper else 0.0
    for _ in range(50):
        middle = (inside + outside) / 2
        contradicted = middle in (0.0, 1.0) or event.size * binomial_divergence(observed, middle) > -math.log(risk)
        inside, outside = (inside, middle) if contradicted else (middle, outside)
    return outside if upper else inside


BUCKETS = 4096
RUNS = 3


def shamir_shares(values: Sequence[int]) -> list[list[int]]:
    split = share(values)
    return [[int(v) for v in to_shamir(party, split.components(party)).tolist()] for party in range(3)]


def opened(outcomes: Sequence[list[int] | BaseException]) -> Samples:
    shares = [from_integers(outcome) for outcome in outcomes if isinstance(outcome, list)]
    return np.array(open_shamir(shares), dtype=np.int64)


async def local_view(value: int, rate: Fraction) -> Samples:
    """What the querier and helper 3 see together of a sum of `value` in every bucket: the answer less its own part."""
    drawn = [ExactNoise().local(rate, BUCKETS) for _ in range(3)]
    programs = [local_sum(piece, own) for piece, own in zip(shamir_shares([value] * BUCKETS), drawn, strict=True)]
    outcomes = await run_three_in_one_process(sessions(SumKind.LOCAL, rate), programs)
    return opened(outcomes) - np.array(drawn[2], dtype=np.int64)


class Remembering(ExactNoise):
    """What helper 3 knows of pairwise noise: the vectors of its two pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.known = np.zeros(BUCKETS, dtype=np.int64)

    def pairwise(self, rate: Fraction, buckets: int, key: bytes) -> list[int]:
        vector = super().pairwise(rate, buckets, key)
        self.known += np.array(vector, dtype=np.int64)
        return vector


async def pairwise_view(value: int, rate: Fraction) -> Samples:
    """The same for `pairwise`: the answer less the noise of the two pairs that helper 3 is in."""
    third = Remembering()
    sources = (ExactNoise(), ExactNoise(), third)
    pieces = shamir_shares([value] * BUCKETS)
    programs = [pairwise_sum(piece, rate, source) for piece, source in zip(pieces, sources, strict=True)]
    outcomes = await run_three_in_one_process(sessions(SumKind.PAIRWISE, rate), programs)
    return opened(outcomes) - third.known


def sessions(kind: SumKind, rate: Fraction) -> list[MpcSession]:
    return [SumTerms(kind, rate, SENSITIVITY, BUCKETS).session(party, bytes(32), 60.0) for party in range(3)]


View = Callable[[int, Fraction], Awaitable[Samples]]


async def audited(view: View, rate: Fraction) -> float:
    """The ε that an adversary can prove, from a sum of 0 and a sum of Δ in every bucket."""
    near = np.concatenate([await view(0, rate) for _ in range(RUNS)])
    far = np.concatenate([await view(SENSITIVITY, rate) for _ in range(RUNS)])
    return epsilon_at_least(near, far)


@pytest.mark.parametrize("view", [local_view, pairwise_view])
async def test_a_bad_helper_and_the_querier_learn_no_more_than_epsilon(view: View) -> None:
    """Through the whole program. The noise left is exactly DLap, so the bound is tight: an audit that finds much less
    than ε = 1 would be blind, one that finds more has found a leak.
    """
    assert 0.7 < await audited(view, RATE) <= 1


@pytest.mark.parametrize("view", [local_view, pairwise_view])
async def test_half_the_scale_is_seen_through_the_whole_program(view: View) -> None:
    """Twice the ε: the audit proves well above 1 (it would have to miss by a third)."""
    assert await audited(view, 2 * RATE) > 1.2


LEAKS: dict[str, Callable[[], Samples]] = {
    "sensitivity ignored": lambda: of_helpers(2, RATE * SENSITIVITY, KEY),
    "half the scale": lambda: of_helpers(2, 2 * RATE, KEY),
    "one-sided": lambda: np.abs(of_helpers(2, RATE, KEY)),
    "only one honest part": lambda: of_helpers(1, RATE, KEY),
    "a Gaussian of the same variance": lambda: gaussian(1, 400_000),
}


@pytest.mark.parametrize("bug", LEAKS)
def test_leaks_are_proven(bug: str) -> None:
    """Noise that one bad helper does not know: with each of these bugs the adversary proves more than ε = 1."""
    near = LEAKS[bug]()
    assert epsilon_at_least(near, np.random.default_rng(3).permutation(near) + SENSITIVITY) > 1

"""Audits of samples: fit, variance and ε, of all modes and of whole helpers, and of planted bugs that must be caught.

False failures. `misfits` bounds each bin's count by P(this far off) ≤ 2·exp(−n·KL), true of every binomial, with a
budget of 10^−8 over all bins; a chi-square by its tail bound k + 2√(kx) + 2x (Laurent and Massart), again 10^−8 where
the limit law holds (30 or more expected in every bin); and the variance at 6 standard errors (2·10^−9 for a normal
variable). `epsilon_at_least` is wrong with probability at most 10^−8. There are ten audits of fresh randomness in the
first part, one chi-square in the second, eight audits, seven fits and two chi-squares in the third: the file fails by
chance with probability below 2·10^−6. Planted bugs of the first two parts are drawn from fixed keys: caught always, or
never.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import fields
from fractions import Fraction
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from mpc_helpers.mpc import noise
from mpc_helpers.mpc.joint import circuit
from mpc_helpers.mpc.joint import noise as joint_noise
from mpc_helpers.mpc.joint.layout import Layout
from mpc_helpers.mpc.noisy_sum import ExactNoise, SumKind, SumTerms, joint_sum, local_sum, pairwise_sum
from mpc_helpers.mpc.runtime import run_three_in_one_process
from mpc_helpers.mpc.session import MpcSession
from protocol.errors import ProtocolError
from protocol.field import Vector, from_integers, lift, subtract
from protocol.joint_scale import Coin, JointScale
from protocol.noise import NoiseMode
from protocol.querier.saved_query import QueryOptions
from protocol.shares import open_shamir, share, to_shamir
from tests.support import three_helpers
from tests.support.joint_trio import Run, evaluate
from tests.support.three_helpers import ThreeHelpers, terms
from tests.support.three_helpers import three_helpers as started

# Local and pairwise noise.


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
    contradictions = [
        f"P({x}) is {o:.4f}, not {e:.4f}"
        for x, o, e in zip(bins, observed.tolist(), expected.tolist(), strict=True)
        if samples.size * binomial_divergence(o, e) > math.log(2 * len(bins) / RISK)
    ]
    chi_square = samples.size * float(np.sum((with_rest(observed) - with_rest(expected)) ** 2 / with_rest(expected)))
    log_risk = -math.log(RISK)
    if chi_square > len(bins) + 2 * math.sqrt(len(bins) * log_risk) + 2 * log_risk:
        contradictions.append(f"chi-square is {chi_square:.0f} with {len(bins)} degrees of freedom")
    score = variance_score(samples, r, rate)
    if abs(score) > 6:
        contradictions.append(f"the variance is {score:.1f} standard errors off")
    return contradictions


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


KEY = b"every planted bug is drawn of it"

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
        self.own = np.zeros(BUCKETS, dtype=np.int64)

    def pairwise(self, rate: Fraction, buckets: int, key: bytes) -> list[int]:
        vector = super().pairwise(rate, buckets, key)
        self.own += np.array(vector, dtype=np.int64)
        return vector


async def pairwise_view(value: int, rate: Fraction) -> Samples:
    """The same for `pairwise`: the answer less the noise of the two pairs that helper 3 is in."""
    third = Remembering()
    sources = (ExactNoise(), ExactNoise(), third)
    pieces = shamir_shares([value] * BUCKETS)
    programs = [pairwise_sum(piece, rate, source) for piece, source in zip(pieces, sources, strict=True)]
    outcomes = await run_three_in_one_process(sessions(SumKind.PAIRWISE, rate), programs)
    return opened(outcomes) - third.own


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


# Joint noise against its exact probabilities.


SCALE = JointScale.of(Fraction(1, 5), 5)
DRAWS = 262_144 if os.environ.get("TREFOIL_FUZZ_SECONDS") else 32_768
SEEDED = 262_144


def misfit(samples: Sequence[int], scale: JointScale) -> float:
    """How far chi-square is above what it stays below with probability 1 − 10^−8; negative where it fits."""
    values = np.array(samples, dtype=np.int64)
    top = 1 << len(scale.digits)
    chances = {x: float(scale.probability(x)) for x in range(-top, top)}
    bins = [x for x, chance in chances.items() if values.size * chance >= 30]
    expected = np.array([chances[x] for x in bins] + [1 - sum(chances[x] for x in bins)]) * values.size
    counts = [int(np.count_nonzero(values == x)) for x in bins]
    observed = np.array([*counts, values.size - sum(counts)])
    statistic = float(np.sum((observed - expected) ** 2 / expected))
    x = -math.log(RISK)
    return statistic - (len(bins) + 2 * math.sqrt(len(bins) * x) + 2 * x)


def in_the_clear(scale: JointScale, draws: int) -> list[int]:
    """The circuit of a scale on seeded bits: what three parties would open."""
    layout = Layout(circuit.build(scale), draws)
    shape = (layout.circuit.inputs, layout.words)
    bits: npt.NDArray[np.uint64] = np.random.default_rng(5).integers(0, 2**64, size=shape, dtype=np.uint64)
    return lift(joint_noise.own_value(joint_noise.unpacked(layout, evaluate(layout.circuit, bits))))


def test_chi_square_through_three_parties() -> None:
    """b = 5: more than 60 bins."""
    run = Run(Layout(circuit.build(SCALE), DRAWS), seconds=300.0)
    assert misfit(run.opened(0, 1), SCALE) < 0


def test_the_clear_circuit_fits_too() -> None:
    assert misfit(in_the_clear(SCALE, SEEDED), SCALE) < 0


def planted(digits: tuple[Coin, ...], sign: Coin) -> JointScale:
    """A scale that no certificate has seen."""
    scale = object.__new__(JointScale)
    for item, value in zip(fields(JointScale), (SCALE.rate, SCALE.change, digits, sign), strict=True):
        object.__setattr__(scale, item.name, value)
    return scale


SMALLER = JointScale.of(SCALE.rate / Fraction(95, 100), 5)
BUGS = {
    "scale times 0.95": (SMALLER.digits, SMALLER.sign),
    "a fair sign": (SCALE.digits, Coin(1, 1)),
    "a digit dropped": ((*SCALE.digits[:2], *SCALE.digits[3:]), SCALE.sign),
    "the highest digit in use dropped": (SCALE.digits[:4], SCALE.sign),
    "a coin rounded the wrong way": (
        (Coin(SCALE.digits[0].bits, SCALE.digits[0].numerator - 2**12 * 2), *SCALE.digits[1:]),
        SCALE.sign,
    ),
    "two digits exchanged": ((SCALE.digits[1], SCALE.digits[0], *SCALE.digits[2:]), SCALE.sign),
}


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_seen_in_the_samples(bug: str) -> None:
    assert misfit(in_the_clear(planted(*BUGS[bug]), SEEDED), SCALE) > 0


@pytest.mark.parametrize("bug", [bug for bug in BUGS if bug != "a fair sign"])
def test_and_the_certificate_refuses_each_that_is_not_private(bug: str) -> None:
    with pytest.raises(ProtocolError):
        JointScale(SCALE.rate, SCALE.change, *BUGS[bug])


# From outside: sealed reports in, the querier's answer out. Two neighbouring worlds differ in one report; every bucket
# has its own noise, so one query has as many samples as buckets.


ANSWER_BUCKETS = 2**14
EPSILON_MICROS = int(1_000_000 * RATE * SENSITIVITY)


async def answer(three: ThreeHelpers, value: int, mode: NoiseMode) -> tuple[Samples, Samples]:
    """What the querier gets on one report with `value` in every bucket, and what helper 3 knows of its noise."""
    paid = terms(ANSWER_BUCKETS, epsilon_micros=EPSILON_MICROS, sensitivity=SENSITIVITY)
    batch = three.batch(three.seal([[value] * ANSWER_BUCKETS], paid))
    result = await three.ask(three.query(batch, QueryOptions(noise=mode, seconds=120)), batch)
    own = three.mpc.records[result.answer.attempt_id].parts[2]
    return np.array(result.answer.histogram, dtype=np.int64), np.array(own, dtype=np.int64)


async def worlds(folder: Path, mode: NoiseMode) -> tuple[tuple[Samples, Samples], tuple[Samples, Samples]]:
    """The same question about a null report and about one that spends all of Δ."""
    async with started(folder) as three:
        return await answer(three, 0, mode), await answer(three, SENSITIVITY, mode)


async def test_local_noise_keeps_epsilon_from_the_querier_and_a_malicious_helper(tmp_path: Path) -> None:
    """The answer less helper 3's own part is exactly DLap: an audit that finds much less than ε = 1 would be blind."""
    (near, near_own), (far, far_own) = await worlds(tmp_path, NoiseMode.LOCAL)
    assert misfits(near, 1.5, RATE) == []
    assert misfits(far - SENSITIVITY, 1.5, RATE) == []
    assert 0.7 < epsilon_at_least(near - near_own, far - far_own) <= 1


async def test_pairwise_noise_keeps_epsilon_from_the_querier(tmp_path: Path) -> None:
    (near, _), (far, _) = await worlds(tmp_path, NoiseMode.PAIRWISE)
    assert misfits(near, 3.0, RATE) == []
    assert misfits(far - SENSITIVITY, 3.0, RATE) == []
    assert epsilon_at_least(near, far) <= 1


async def test_joint_noise_keeps_epsilon_from_the_querier_and_a_malicious_helper(tmp_path: Path) -> None:
    """A helper knows nothing of the noise, so the querier's own audit is as good as both together; and it is tight."""
    (near, _), (far, _) = await worlds(tmp_path, NoiseMode.JOINT)
    # DLap itself but for coins that are rounded: far below what so many samples can tell.
    assert misfits(near, 1.0, RATE) == []
    assert misfits(far - SENSITIVITY, 1.0, RATE) == []
    assert 0.7 < epsilon_at_least(near, far) <= 1


async def test_joint_noise_of_half_the_scale_is_seen_from_outside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted where all three helpers would have it: in the scale that they agree on."""
    right = JointScale.of
    monkeypatch.setattr(JointScale, "of", staticmethod(lambda rate, change: right(2 * rate, change)))
    (near, _), (far, _) = await worlds(tmp_path, NoiseMode.JOINT)
    assert epsilon_at_least(near, far) > 1.2
    assert misfits(near, 1.0, RATE)


class HalfTheScale(ExactNoise):
    """A planted bug."""

    def local(self, rate: Fraction, buckets: int) -> list[int]:
        return super().local(2 * rate, buckets)


async def test_half_the_scale_is_seen_from_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(three_helpers, "ExactNoise", HalfTheScale)
    (near, near_own), (far, far_own) = await worlds(tmp_path, NoiseMode.LOCAL)
    assert epsilon_at_least(near - near_own, far - far_own) > 1.2
    assert misfits(near, 1.5, RATE)


async def test_two_parts_through_three_helpers_show_no_more_than_their_sum(tmp_path: Path) -> None:
    """The attacker is the querier with helper 3, and adds up the evidence of both answers: more than each has."""
    async with started(tmp_path, options={"spend_in_parts": True}) as three:
        near, far = await parts_answered(three, 0), await parts_answered(three, SENSITIVITY)
    proven = epsilon_at_least(near.sum(axis=0), far.sum(axis=0))
    assert 0.7 < proven <= 1
    assert max(epsilon_at_least(one, other) for one, other in zip(near, far, strict=True)) < 0.6


async def parts_answered(three: ThreeHelpers, value: int) -> Samples:
    """The evidence in 0.4 and 0.6 of a report with `value` in every bucket: how much nearer to Δ each number is than
    to 0, in the unit of the scale, rounded, as `epsilon_at_least` takes it.
    """
    paid = terms(ANSWER_BUCKETS, epsilon_micros=EPSILON_MICROS, sensitivity=SENSITIVITY)
    batch = three.batch(three.seal([[value] * ANSWER_BUCKETS], paid))
    found = []
    for tenths in (4, 6):
        wishes = QueryOptions(tenths * EPSILON_MICROS // 10, NoiseMode.LOCAL, seconds=120, keeps_rest=True)
        result = await three.ask(three.query(batch, wishes), batch)
        own = np.array(three.mpc.records[result.answer.attempt_id].parts[2], dtype=np.int64)
        seen = np.array(result.answer.histogram, dtype=np.int64) - own
        found.append(tenths * (abs(seen) - abs(seen - SENSITIVITY)) // 5)
    return np.array(found)


SLOPES = 1024


async def slope_differences(mode: NoiseMode) -> Vector:
    """How much the slopes of the line through the querier's shares differ in two answers over one set of reports."""
    pieces = shamir_shares([1] * SLOPES)
    sums = SumTerms(SumKind(mode.value), RATE, SENSITIVITY, SLOPES)
    slopes = []
    for _ in range(2):
        programs = {
            NoiseMode.LOCAL: lambda piece: local_sum(piece, ExactNoise().local(RATE, SLOPES)),
            NoiseMode.PAIRWISE: lambda piece: pairwise_sum(piece, RATE, ExactNoise()),
            NoiseMode.JOINT: lambda piece: joint_sum(piece, sums.layout, ExactNoise()),
        }
        sessions = [sums.session(party, bytes(32), 60.0) for party in range(3)]
        outcomes = await run_three_in_one_process(sessions, [programs[mode](piece) for piece in pieces])
        first, second, third = (from_integers(outcome) for outcome in outcomes if isinstance(outcome, list))
        slopes.append(subtract(second, first))
        assert (subtract(third, second) == slopes[-1]).all()
    return subtract(*slopes)


@pytest.mark.parametrize("mode", NoiseMode)
async def test_slopes_of_two_answers_over_one_set_are_uniform_unless_pairwise(mode: NoiseMode) -> None:
    """The line (SPEC §9): in 16 bins, a chi-square of 15 degrees of freedom, above the bound with probability 10^−8."""
    counts = np.bincount(((await slope_differences(mode)) >> np.uint64(57)).astype(np.int64), minlength=16)
    chi_square = float(np.sum((counts - SLOPES / 16) ** 2)) / (SLOPES / 16)
    uniform = chi_square <= 15 + 2 * math.sqrt(-15 * math.log(RISK)) - 2 * math.log(RISK)
    assert uniform == (mode is not NoiseMode.PAIRWISE), counts


def pairwise_views(q: float, reach: int) -> dict[int, dict[int, float]]:
    """Return, by the sum of three pairs' noise, the chance of each slope of the line through the querier's shares."""
    part = {x: (1 - q) / (1 + q) * q ** abs(x) for x in range(-reach, reach + 1)}
    views: dict[int, dict[int, float]] = {}
    for (one, a), (two, b), (three, c) in itertools.product(part.items(), repeat=3):
        slopes = views.setdefault(one + two + three, {})
        slope = 6 * one + 3 * two + 2 * three
        slopes[slope] = slopes.get(slope, 0.0) + a * b * c
    return views


def test_two_pairwise_answers_over_one_set_stay_within_the_sum_of_their_rates() -> None:
    """The line (SPEC §9). Noise in `pairwise` is not re-randomised, and two answers over the same reports have the same
    masks, so the difference of slopes shows the querier one more combination of the noise: more than the two answers
    alone, and less than γ₁ + γ₂, which a malicious helper shows her anyway. Computed, not sampled; outcomes rarer than
    10^-7 are left out, and the reach of 12 bounds what is cut off by 10^-3 of a ratio.
    """
    q1, q2 = 0.35, 0.5
    bound = -math.log(q1) - math.log(q2)
    first, second = pairwise_views(q1, 12), pairwise_views(q2, 12)

    def differences(one: int, two: int) -> dict[int, float]:
        chances: dict[int, float] = {}
        for (a, p), (b, r) in itertools.product(first[one].items(), second[two].items()):
            if p > 1e-10:
                chances[a - b] = chances.get(a - b, 0.0) + p * r
        return chances

    alone, line = 0.0, 0.0
    for one, two in ((0, 0), (2, 2), (-2, 1)):
        here, moved = differences(one, two), differences(one - 1, two - 1)
        alone = max(alone, abs(math.log(sum(here.values()) / sum(moved.values()))))
        common = [slope for slope, chance in here.items() if chance > 1e-7 and moved.get(slope, 0.0) > 1e-7]
        line = max(line, *(abs(math.log(here[slope] / moved[slope])) for slope in common))
    assert alone < line <= bound + 1e-3

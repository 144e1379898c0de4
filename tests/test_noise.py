"""The samplers are exact: every coin tape of small cases, and identities of probabilities in exact arithmetic.

Nothing here is statistical, so nothing here can fail by chance; `test_noise_audit` looks at samples.
"""

from __future__ import annotations

import ast
import contextlib
import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from decimal import Decimal, localcontext
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from mpc_helpers.mpc import noise
from protocol.errors import ProtocolError, TrefoilError


class TapeEnds(Exception):
    """The sampler wants another choice than the tape has; these are the probabilities of its values 0, 1, ..."""

    def __init__(self, weights: Sequence[float]) -> None:
        self.weights = weights


class Tape:
    """Choices that are written down beforehand: of coins, or of larger steps that another test shows to be right."""

    def __init__(self, choices: tuple[int, ...] = ()) -> None:
        self.choices = choices
        self.used = 0

    def choose(self, weights: Sequence[float]) -> int:
        if self.used == len(self.choices):
            raise TapeEnds(weights)
        self.used += 1
        return self.choices[self.used - 1]

    def flips(self, count: int) -> bytes:
        packed = sum(self.choose((0.5, 0.5)) << i for i in range(count))
        return packed.to_bytes((count + 7) // 8, "little")


Sampler = Callable[[noise.Coins], int]


def distribution(sampler: Sampler, left: float) -> tuple[dict[int, float], float]:
    """Probabilities of the sampler, the likeliest tapes first, until no more than `left` is undecided.

    Coins have probabilities that are powers of two, for which floats are exact.
    """
    found: dict[int, float] = {}
    undecided = 1.0
    order = itertools.count()
    tapes: list[tuple[float, int, tuple[int, ...]]] = [(-1.0, next(order), ())]
    while tapes and undecided > left:
        probability, _, choices = heapq.heappop(tapes)
        tape = Tape(choices)
        try:
            value = sampler(tape)
        except TapeEnds as end:
            for choice, weight in enumerate(end.weights):
                heapq.heappush(tapes, (probability * weight, next(order), (*choices, choice)))
            continue
        assert tape.used == len(choices)
        found[value] = found.get(value, 0.0) - probability
        undecided += probability
    return found, undecided


def assert_consistent(sampler: Sampler, left: float, probability: Callable[[int], float]) -> None:
    """Every true probability lies between what was found and what could still be added to it."""
    found, undecided = distribution(sampler, left)
    assert undecided <= left
    for value in range(min(found), max(found) + 1):
        low = found.get(value, 0.0)
        assert low - 1e-12 <= probability(value) <= low + undecided + 1e-12, value


def uniform_choice(bound: int, coins: noise.Coins) -> int:
    """A uniform number as one choice: `test_uniform_below_is_uniform` shows that coins make it so."""
    assert isinstance(coins, Tape)
    return coins.choose([1 / bound] * bound)


def bernoulli_choice(numerator: int, denominator: int, coins: noise.Coins) -> bool:
    """An exponential's Bernoulli as one choice: `test_bernoulli_of_an_exponential` shows that it is."""
    assert isinstance(coins, Tape) and 0 <= numerator <= denominator
    success = math.exp(-numerator / denominator)
    return bool(coins.choose((1 - success, success)))


@pytest.fixture
def large_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Branch on uniform numbers and on Bernoulli draws rather than on their coins: far fewer tapes."""
    monkeypatch.setattr(noise, "uniform_below", uniform_choice)
    monkeypatch.setattr(noise, "_bernoulli_exp", bernoulli_choice)


@pytest.mark.parametrize("bound", [1, 2, 3, 5, 6, 7, 8, 9])
def test_uniform_below_is_uniform(bound: int) -> None:
    """All tapes in which the number is found within four tries: equally many for every number."""
    width = (bound - 1).bit_length()
    found: Counter[int] = Counter()
    for coins in itertools.product((0, 1), repeat=4 * width):
        with contextlib.suppress(TapeEnds):
            found[noise.uniform_below(bound, Tape(coins))] += 1
    assert set(found) == set(range(bound))
    assert len(set(found.values())) == 1
    rejected = 2**width - bound
    assert sum(found.values()) == 2 ** (4 * width) - rejected**4


@pytest.mark.parametrize(("numerator", "denominator"), [(0, 1), (1, 1), (1, 2), (2, 3), (3, 4), (1, 7)])
def test_bernoulli_of_an_exponential(numerator: int, denominator: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The k-th coin has bias exactly x/k; what that makes of e^−x is summed over all tapes but 10^−5."""

    def biased(bound: int, coins: noise.Coins) -> int:
        # Below `numerator` or not is all that is asked of the number, so two choices stand for all of them.
        assert isinstance(coins, Tape)
        return 0 if numerator and coins.choose((1 - numerator / bound, numerator / bound)) else bound

    monkeypatch.setattr(noise, "uniform_below", biased)
    expected = math.exp(-numerator / denominator)
    assert_consistent(
        lambda coins: noise._bernoulli_exp(numerator, denominator, coins),
        1e-5,
        lambda value: expected if value else 1 - expected,
    )


RATES = [Fraction(1), Fraction(2), Fraction(1, 2), Fraction(2, 3), Fraction(3, 4), Fraction(1, 5), Fraction(7, 3)]


@pytest.mark.usefixtures("large_steps")
@pytest.mark.parametrize("rate", RATES)
def test_geometric(rate: Fraction) -> None:
    q = math.exp(-rate)
    assert_consistent(lambda coins: noise.geometric(rate, coins), 1e-2, lambda n: (1 - q) * q**n)


@pytest.fixture
def geometric_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Branch on whole geometric draws, which `test_geometric` shows to be right."""

    def geometric_choice(rate: Fraction, coins: noise.Coins) -> int:
        assert isinstance(coins, Tape)
        return coins.choose([-math.expm1(-rate) * math.exp(-rate * n) for n in range(64)])

    monkeypatch.setattr(noise, "geometric", geometric_choice)


@pytest.mark.usefixtures("geometric_steps")
@pytest.mark.parametrize("rate", RATES)
def test_discrete_laplace(rate: Fraction) -> None:
    q = math.exp(-rate)
    expected: Callable[[int], float] = lambda x: (1 - q) / (1 + q) * q ** abs(x)  # noqa: E731 - typed once
    assert_consistent(lambda coins: noise.discrete_laplace(rate, coins), 1e-4, expected)


@pytest.mark.usefixtures("geometric_steps")
@pytest.mark.parametrize("rate", [Fraction(1), Fraction(2), Fraction(3, 2), Fraction(7, 3)])
def test_polya_difference(rate: Fraction) -> None:
    q = math.exp(-rate)
    assert_consistent(lambda coins: noise.polya_difference(rate, coins), 1e-2, lambda x: polya(x, q, 60))


def arcsine(total: int, n: int) -> Fraction:
    """The probability that a walk of 2·total steps is last at zero at time 2n (Feller, vol. 1, III.4)."""
    return Fraction(math.comb(2 * n, n) * math.comb(2 * (total - n), total - n), 4**total)


def polya(x: int, q: float, terms: int) -> float:
    """P(A − B = x) by the sum over N = A + B that the sampler draws first."""
    totals = range(abs(x), terms, 2)
    return sum((1 - q) * q**total * float(arcsine(total, (x + total) // 2)) for total in totals)


@pytest.mark.parametrize("short", [0, noise._SHORT_WALK])
@pytest.mark.parametrize("total", range(7))
def test_last_zero_over_every_tape(total: int, short: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All 4^N walks of 2N steps, by bytes and by words: exactly the arcsine law."""
    monkeypatch.setattr(noise, "_SHORT_WALK", short)
    found, undecided = distribution(lambda coins: noise.last_zero(2 * total, coins), 0.0)
    assert undecided == 0
    assert found == {2 * n: arcsine(total, n) for n in range(total + 1)}


@pytest.mark.parametrize("length", [*range(2, 40, 2), 126, 128, 130, 1000, 4096, 9998])
def test_long_walks_agree_with_walking_step_by_step(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Words, chunks of several sizes, and bits beyond the end that mean nothing, against a walk of single steps."""
    generator = np.random.default_rng(length)
    for chunk in (64, 192, noise._WALK_CHUNK):
        coins = generator.integers(0, 2, length).tolist()
        heights = list(itertools.accumulate(2 * coin - 1 for coin in coins))
        expected = max((t + 1 for t, height in enumerate(heights) if height == 0), default=0)
        monkeypatch.setattr(noise, "_WALK_CHUNK", chunk)
        for short in (0, 2**20):
            monkeypatch.setattr(noise, "_SHORT_WALK", short)
            assert noise.last_zero(length, DirtyTape(coins)) == expected


@pytest.mark.parametrize("down", [1, 8, 9, 63, 64, 65, 127, 128, 129, 200])
def test_straight_walks_come_back_to_zero_once(down: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Down and up again, the farthest a walk can go: back at zero after 2·down steps, then up for good."""
    for coins in ([0] * down + [1] * (2 * down), [1] * down + [0] * (2 * down)):
        for short in (0, 2**20):
            monkeypatch.setattr(noise, "_SHORT_WALK", short)
            monkeypatch.setattr(noise, "_WALK_CHUNK", 64)
            assert noise.last_zero(len(coins), DirtyTape(coins)) == 2 * down


class DirtyTape(Tape):
    """Fills the meaningless bits after the last coin with ones: they must not count."""

    def __init__(self, coins: list[int]) -> None:
        super().__init__(tuple(coins))

    def flips(self, count: int) -> bytes:
        clean = bytearray(super().flips(count))
        if count % 8:
            clean[-1] |= 0xFF << (count % 8) & 0xFF
        return bytes(clean)


Series = dict[int, list[Fraction]]
ORDER = 24


def polya_series() -> Series:
    """P(X = x)/(1 − q) of one helper as a power series in q: {x: coefficients}."""
    series: Series = {x: [Fraction(0)] * (ORDER + 1) for x in range(-ORDER, ORDER + 1)}
    for total in range(ORDER + 1):
        for n in range(total + 1):
            series[2 * n - total][total] += arcsine(total, n)
    return series


def multiply(left: Series, right: Series) -> Series:
    """Convolution in x, product in q, up to the order kept."""
    product: Series = {x: [Fraction(0)] * (ORDER + 1) for x in range(-ORDER, ORDER + 1)}
    for x, a in left.items():
        for y, b in right.items():
            if abs(x + y) <= ORDER:
                for i in range(abs(x), ORDER + 1):
                    for j in range(abs(y), ORDER + 1 - i):
                        product[x + y][i + j] += a[i] * b[j]
    return product


def test_two_helpers_make_discrete_laplace_exactly() -> None:
    """(1 − q)²·S(x) = (1 − q)/(1 + q)·q^|x| for the two-fold sum S, as power series: coefficient by coefficient.

    Every q at once, with no truncation: a coefficient of order k involves only N ≤ k.
    """
    series = polya_series()
    small = {x: coefficients for x, coefficients in series.items() if abs(x) <= 12}
    pair = multiply(series, series)
    for x in small:
        # (1 − q)(1 + q)·S(x) = q^|x|
        product = [pair[x][k] - (pair[x][k - 2] if k >= 2 else 0) for k in range(ORDER + 1)]
        assert product == [Fraction(k == abs(x)) for k in range(ORDER + 1)], x


def laplace_weights(q: Decimal, span: int) -> dict[int, Decimal]:
    """Two honest helpers' noise, from the arcsine weights the sampler uses; N up to `span`."""
    one = {
        x: sum(
            ((1 - q) * q**n * Decimal(w.numerator) / Decimal(w.denominator))
            for n in range(abs(x), span, 2)
            for w in (arcsine(n, (x + n) // 2),)
        )
        + Decimal(0)
        for x in range(-span, span + 1)
    }
    return {
        x: sum((one[y] * one[x - y] for y in range(-span, span + 1) if abs(x - y) <= span), Decimal(0))
        for x in range(-span // 2, span // 2 + 1)
    }


def hockey_stick(weights: dict[int, Decimal], shift: int, epsilon: Decimal) -> Decimal:
    """δ(ε) = Σ max(0, P(x) − e^ε·P(x − shift)) over the x for which both are in the support kept."""
    factor = epsilon.exp()
    pairs = ((weights[x], weights[x - shift]) for x in weights if x - shift in weights)
    return sum((max(Decimal(0), p - factor * r) for p, r in pairs), Decimal(0))


@pytest.mark.parametrize(("sensitivity", "epsilon"), [(1, Decimal(1)), (2, Decimal(1)), (3, Decimal(2))])
def test_hockey_stick_divergence(sensitivity: int, epsilon: Decimal) -> None:
    """δ(ε) is nothing but truncation (below 10^−15), in both directions; at 0.95·ε it is not: the scale is not wasted,
    and a scale too small by 5 % shows. One helper's part alone, half of the noise, is not ε-private.
    """
    with localcontext() as context:
        context.prec = 40
        q = (-epsilon / sensitivity).exp()
        weights = laplace_weights(q, 90)
        for shift in (sensitivity, -sensitivity):
            assert hockey_stick(weights, shift, epsilon) < Decimal("1e-15")
            assert hockey_stick(weights, shift, epsilon * Decimal("0.95")) > Decimal("1e-3")
        alone = {x: Decimal(polya(x, float(q), 90)) for x in range(-40, 41)}
        assert hockey_stick(alone, sensitivity, epsilon) > Decimal("1e-3")


def test_the_same_key_gives_the_same_noise_and_another_key_another() -> None:
    rate = Fraction(1, 50)
    one = noise.draw_laplace(rate, 64, noise.keyed_coins(b"\1" * 32))
    assert one == noise.draw_laplace(rate, 64, noise.keyed_coins(b"\1" * 32))
    assert one != noise.draw_laplace(rate, 64, noise.keyed_coins(b"\2" * 32))


def test_pairwise_noise_of_a_key_never_changes() -> None:
    """Two helpers may run different releases: what a key means is part of the protocol."""
    assert noise.draw_laplace(Fraction(1, 7), 8, noise.keyed_coins(bytes(range(32)))) == PINNED


PINNED = [-2, 0, -9, 26, 12, 2, 12, -4]


def test_buffered_coins_hand_out_every_byte_once() -> None:
    served = bytearray()

    def stream(size: int) -> bytes:
        piece = bytes((len(served) + i) % 251 for i in range(size))
        served.extend(piece)
        return piece

    coins = noise.BufferedCoins(stream)
    taken = [coins.flips(count) for count in (1, 8, 9, 100, 0, 8 * 4000, 8 * 5000, 16)]
    assert [len(piece) for piece in taken] == [1, 1, 2, 13, 0, 4000, 5000, 2]
    assert b"".join(taken[:5]) == bytes(range(17))
    assert len({id(piece) for piece in taken}) == len(taken)


def test_the_limit_is_refused_with_advice() -> None:
    noise.check_cost(256, Fraction(1, 2**20))
    with pytest.raises(TrefoilError, match="too much to draw") as caught:
        noise.draw_local(Fraction(1, 2**20), 257, noise.system_coins())
    assert "coarser unit" in caught.value.hint
    with pytest.raises(TrefoilError):
        noise.draw_laplace(Fraction(1, 2**28), 2, noise.system_coins())
    for buckets, rate in ((0, Fraction(1)), (1, Fraction(0)), (1, Fraction(-1))):
        with pytest.raises(ProtocolError):
            noise.check_cost(buckets, rate)


def test_there_is_no_float_in_the_sampler() -> None:
    """By reading it: no float literal, no true division, no math, no call of float outside the text of an error."""
    tree = ast.parse(Path(noise.__file__).read_text())
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        if function.name == "check_cost":
            continue
        for node in ast.walk(function):
            assert not (isinstance(node, ast.Constant) and isinstance(node.value, float)), function.name
            assert not isinstance(node, ast.Div), function.name
            assert not (isinstance(node, ast.Name) and node.id in ("float", "math")), function.name

"""The samplers are exact, in exact arithmetic, and do the same work whatever they draw.

Only the last tests are statistical, and say with which probability they fail; `test_noise_audit` looks at samples.
"""

from __future__ import annotations

import ast
import itertools
import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from decimal import Decimal, localcontext
from fractions import Fraction
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from mpc_helpers.mpc import noise
from protocol.errors import ErrorKind, ProtocolError, TrefoilError
from tests.support.raising import raises


def correlated(figures: Sequence[float], noise: Sequence[float], risk: float = 1e-7) -> bool:
    """Whether the ranks of the two are correlated beyond chance, over 200 or more draws.

    If the figure does not depend on the noise, every order of the noise is equally likely, whatever the figures are:
    their drift, their outliers, their ties. Then r·√(n − 1) has variance 1 and is close to normal, so that one call is
    true by chance with probability `risk`. A figure that never moves is not correlated.
    """
    if len(figures) != len(noise) or len(noise) < 200:
        raise ValueError("correlations are of 200 or more pairs")
    one, other = ranks(figures), ranks(noise)
    if np.ptp(one) == 0 or np.ptp(other) == 0:
        return False
    deviations = abs(float(np.corrcoef(one, other)[0, 1])) * math.sqrt(len(noise) - 1)
    return deviations > NormalDist().inv_cdf(1 - risk / 2)


def ranks(values: Sequence[float]) -> npt.NDArray[np.float64]:
    """Return the rank of each value, and the mean of their ranks for equal ones."""
    _, inverse, counts = np.unique(np.asarray(values, dtype=np.float64), return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    middle = ends - (counts - 1) / 2
    return np.asarray(middle[inverse], dtype=np.float64)


RATES = [Fraction(1), Fraction(2), Fraction(1, 2), Fraction(7, 3), Fraction(1, 5), Fraction(1, 2**28), Fraction(50)]
PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494459230781640628620899862803482534211707")
DIGITS = 90
WORD = 2**64


class Script:
    """Words of 64 coins that are written down beforehand."""

    def __init__(self, *words: int) -> None:
        self.words = list(words)

    def flips(self, count: int) -> bytes:
        assert count % 64 == 0
        return b"".join(self.words.pop(0).to_bytes(8, "little") for _ in range(count // 64))


def decimal(value: Fraction) -> Decimal:
    return Decimal(value.numerator) / Decimal(value.denominator)


def words(*values: int) -> noise.Words:
    return np.array(values, dtype=np.uint64)


@pytest.mark.parametrize("rate", [*RATES, Fraction(1_234_567, 3_000_000), Fraction(300), Fraction(10**12)])
@pytest.mark.parametrize("bits", [64, 200])
def test_exp_bounds_are_around_the_exponential_and_close(rate: Fraction, bits: int) -> None:
    low, high = noise.exp_bounds(rate, bits)
    with localcontext(prec=DIGITS):
        assert low <= (-decimal(rate)).exp() * 2**bits <= high
    assert high - low < 2**12


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("bits", [64, 128, 192])
def test_thresholds_are_the_probabilities_to_the_last_bit(rate: Fraction, bits: int) -> None:
    """1/(1 + e^(2^j·γ)) for each digit and, at 2^0, for the sign; e^(−2^L·γ) for the tail, which is below 2^−64."""
    *digits, tail, sign = noise.thresholds(rate, bits)
    with localcontext(prec=DIGITS):
        q = [(-decimal(rate) * 2**j).exp() for j in range(len(digits) + 1)]
        assert [*digits, sign] == [int(2**bits * each / (1 + each)) for each in (*q[:-1], q[0])]
        assert tail == int(2**bits * q[-1])
    assert tail < 2 ** (bits - 64)


@pytest.mark.parametrize("rate", RATES)
def test_digits_and_tail_make_a_geometric_variable(rate: Fraction) -> None:
    """P(N = n) = (1 − q)·q^n, as a product over the digits of n and the times that the tail comes up."""
    count = noise.digit_count(rate)
    with localcontext(prec=DIGITS):
        q = [(-decimal(rate) * 2**j).exp() for j in range(count + 1)]
        for n in {0, 1, 2, 3, 5, 8, 100, 2**count - 1, 2**count, 2**count + 1, 5 << count}:
            product = (1 - q[-1]) * q[-1] ** (n >> count)
            for j in range(count):
                product *= (q[j] if n >> j & 1 else 1) / (1 + q[j])
            assert abs(product / ((1 - q[0]) * (-decimal(rate) * n).exp()) - 1) < Decimal("1e-60")


def test_geometric_puts_the_digits_and_the_tail_together() -> None:
    """Each digit from a word below its threshold or not; the tail, three times, from words that tie with it."""
    rate = Fraction(1, 3)
    *digits, tail, _ = noise.thresholds(rate, 64)
    assert tail == 0
    below_tail = noise.thresholds(rate, 128)[len(digits)] - 1
    assert 0 <= below_tail < WORD
    for n in (0, 1, 5, 2 ** len(digits) - 1):
        script = [bound - 1 if n >> j & 1 else bound + 1 for j, bound in enumerate(digits)]
        assert noise.geometric(rate, 1, Script(*script, 1)).tolist() == [n]
        beyond = Script(*script, 0, below_tail, 0, below_tail, 0, below_tail, 1)
        assert noise.geometric(rate, 1, beyond).tolist() == [n + (3 << len(digits))]
        assert not beyond.words


@pytest.mark.parametrize(("more", "flipped"), [([-1], True), ([1], False), ([0, -1], True), ([0, 1], False)])
def test_a_word_equal_to_its_threshold_is_decided_by_the_next(more: list[int], flipped: bool) -> None:
    rate = Fraction(1, 3)
    following = [noise.thresholds(rate, bits)[2] % WORD for bits in (128, 192)]
    script = Script(*(bound + change for bound, change in zip(following, more, strict=False)))
    tie = words(noise.thresholds(rate, 64)[2])
    assert noise._flip(rate, 2, tie, script).tolist() == [flipped]
    assert not script.words


def test_pairwise_noise_is_the_geometric_variable_or_below_minus_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """P(X = x) = q^|x|·(1 − q)/(1 + q): N with 1/(1 + q), and −1 − N with q/(1 + q)."""
    monkeypatch.setattr(noise, "geometric", lambda *_: words(0, 7, 0, 7))
    sign = noise.thresholds(Fraction(1, 3), 64)[-1]
    coins = Script(sign + 1, sign + 1, sign - 1, sign - 1)
    assert noise.draw_laplace(Fraction(1, 3), 4, coins) == [0, 7, -1, -8]


# The split by the arcsine law.


def weight(n: int) -> Fraction:
    """u_n."""
    return Fraction(math.comb(2 * n, n), 4**n)


def brouncker(n: int) -> Decimal:
    """4/(π·u_n²), with `DIGITS` digits."""
    return 4 / (PI * decimal(weight(n)) ** 2)


@pytest.mark.parametrize("depth", [2, 16, 32])
def test_brouncker_bounds_are_around_the_fraction(depth: int) -> None:
    with localcontext(prec=DIGITS):
        for n in (*range(70), 100, 1000, 5000):
            low, high = noise.brouncker(n, depth, 128)
            assert low <= brouncker(n) * 2**128 <= high
            assert depth < 16 or high - low <= max(2, high >> 90)
            assert abs(Decimal(noise._brouncker_floats(words(n))[0]) / brouncker(n) - 1) < Decimal(2) ** -49


def acceptance(m: int, rest: int, step: int) -> Decimal:
    """a, as the module defines it."""
    square = Decimal(8) / 11 * (2 * (m + rest) + 1) / (brouncker(m) * brouncker(rest))
    return WORD / Decimal(step) * square.sqrt() / (2 if m == rest > 0 else 1)


SPLITS = [*itertools.product(range(9), range(9)), (1, 99), (16, 17), (50, 50), (63, 64), (64, 64), (400, 3000)]


@pytest.mark.parametrize(("m", "rest"), SPLITS)
def test_a_proposal_is_accepted_exactly_by_its_probability(m: int, rest: int) -> None:
    """a·step is proportional to u_m·u_rest, by one number for all splits of N: every word around a is decided so.

    Floats are off by less than 2^−47, and at a itself further words decide.
    """
    if m > rest:
        return
    step = (WORD - 1) // (2 * math.isqrt(m) + 1)
    with localcontext(prec=DIGITS):
        exact = acceptance(m, rest, step)
        first = Decimal(8 * (2 * (m + rest) + 1)).sqrt() / Decimal(11).sqrt() * PI / 4 * WORD
        share = decimal(weight(m) * weight(rest)) / (2 if m == rest > 0 else 1)
        assert abs(exact * step / (first * share) - 1) < Decimal("1e-80")
        approximate = noise._acceptance(words(m), words(rest), words(step))[0]
        assert abs(Decimal(float(approximate)) - exact) < Decimal(2) ** -47
        word, following = divmod(int(exact * WORD * WORD), WORD)
    assert noise._accepts(word - 1, m, rest, step, Script())
    assert not noise._accepts(word + 1, m, rest, step, Script())
    assert noise._accepts(word, m, rest, step, Script(following - 1))
    assert not noise._accepts(word, m, rest, step, Script(following + 1))


@pytest.mark.parametrize("total", [0, 1, 2, 3, 7, 8, 9, 33, 200])
def test_every_m_is_proposed_by_as_many_words_as_its_step_says(total: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All pairs of words of eight bits: with the acceptance above, m has a probability proportional to u_m·u_(N−m)."""
    monkeypatch.setattr(noise, "_LARGEST_WORD", 255)
    first, second = (each.ravel() for each in np.meshgrid(*[np.arange(256, dtype=np.uint64)] * 2))
    m, step, valid = noise._propose(np.full(first.size, total, dtype=np.uint64), first, second)
    counts = Counter(m[valid].tolist())
    choices = math.isqrt(total // 2) + 1
    steps = dict(zip(m[valid].tolist(), step[valid].tolist(), strict=True))
    assert counts == {n: 255 // choices * steps[n] for n in range(total // 2 + 1)}
    assert all(steps[n] == 255 // (2 * math.isqrt(n) + 1) for n in steps)


def test_no_acceptance_is_above_one() -> None:
    """For N < 64 one by one. Else b(n) ≥ 4n + 1, so that a²·11/8 ≤ (2s + 1)²/(4m + 1)·(2N + 1)/(4(N − m) + 1) up to
    2^−29, where the first factor is at most 1 + 4√m/(4m + 1): at most 9/5, and 1 + 1/√m.

    m = 0: below 1. 1 ≤ m ≤ N/8: the second factor is at most (2N + 1)/(3.5N + 1). m ≥ N/8: it is at most 1.
    """
    with localcontext(prec=30):
        for total in range(64):
            for m in range(total // 2 + 1):
                assert acceptance(m, total - m, (WORD - 1) // (2 * math.isqrt(m) + 1)) <= 1
    slack = Fraction(11, 8) * (1 - Fraction(1, 2**28))
    assert Fraction(9, 5) * Fraction(2 * 64 + 1, 224 + 1) < slack
    assert (slack - 1) ** 2 * (64 // 8) > 1


def test_all_proposals_of_a_vector_fail_with_probability_below_2_to_the_minus_41() -> None:
    """Over N < 600, beyond which it is 0.59 or more; the least is at N = 2."""
    b = [float(brouncker(n)) for n in range(600)]

    def accepted(total: int) -> float:
        half = total // 2
        weights = (
            math.sqrt(8 / 11 * (2 * total + 1) / (b[m] * b[total - m])) * (0.5 if 2 * m == total > 0 else 1)
            for m in range(half + 1)
        )
        return sum(weights) / (math.isqrt(half) + 1)

    least = min(range(600), key=accepted)
    assert least == 2
    assert 4096 * (1 - accepted(least)) ** noise.PROPOSALS < 2.0**-41


def test_a_bucket_without_an_accepted_proposal_is_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    decide, calls = noise._decide, list[tuple[int, ...]]()

    def none_at_first(*arguments: Any) -> Any:
        calls.append(arguments[0].shape)
        if len(calls) > 1:
            return np.ones_like(decide(*arguments))
        return np.ones_like(decide(*arguments)) & (np.arange(3) != 1)

    monkeypatch.setattr(noise, "_decide", none_at_first)
    parts = noise.smaller_parts(words(10, 10, 10), noise.system_coins())
    assert (calls, parts.max() <= 5) == ([(noise.PROPOSALS, 3), (noise.PROPOSALS, 1)], True)


def test_close_comparisons_are_decided_in_integers_and_four_of_each_chunk_anyway(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decided = []

    def accepts(word: int, *_: object) -> bool:
        decided.append(word)
        return True

    monkeypatch.setattr(noise, "_accepts", accepts)
    m, step = np.ones((2, 8), dtype=np.uint64), np.full((2, 8), (WORD - 1) // 3, dtype=np.uint64)
    a = int(float(noise._acceptance(m, m, step)[0, 0]) * 2**53) << 11
    far = np.full((2, 8), WORD - 1, dtype=np.uint64)
    assert not noise._decide(far, m, m, step, Script()).any() and len(decided) == 4
    near = far.copy()
    near[1, 5] = a + 2**17
    decided.clear()
    assert np.flatnonzero(noise._decide(near, m, m, step, Script())).tolist() == [13]
    assert decided == [1, 1, 1, a + 2**17]


# The distribution, as identities of power series.


def arcsine(total: int, n: int) -> Fraction:
    """The probability of the part n of `total` (Feller, vol. 1, III.4)."""
    return weight(n) * weight(total - n)


def polya(x: int, q: float, terms: int) -> float:
    """P(A − B = x) by the sum over N = A + B that the sampler draws first."""
    totals = range(abs(x), terms, 2)
    return sum((1 - q) * q**total * float(arcsine(total, (x + total) // 2)) for total in totals)


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


PINNED = [2, 2, 0, -2, -9, -5, 3, 1]


def test_buffered_coins_return_every_byte_once() -> None:
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
    noise.check_cost(4096, Fraction(1, noise.MAX_SCALE))
    for draw in (noise.draw_local, noise.draw_laplace):
        with raises(ErrorKind.TOO_LARGE, TrefoilError) as caught:
            draw(Fraction(1, noise.MAX_SCALE + 1), 1, noise.system_coins())
        assert "coarser unit" in caught.value.hint
    for buckets, rate in ((0, Fraction(1)), (1, Fraction(0)), (1, Fraction(-1))):
        with raises(ErrorKind.OUT_OF_RANGE, ProtocolError):
            noise.check_cost(buckets, rate)


FLOATS = {"_brouncker_floats", "_acceptance", "_decide", "_propose"}


def test_no_float_decides_but_where_its_error_is_bounded() -> None:
    """By reading the module: no float, true division or math elsewhere, but for the text of an error."""
    tree = ast.parse(Path(noise.__file__).read_text())
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        if function.name in {"check_cost", *FLOATS}:
            continue
        for node in ast.walk(function):
            assert not (isinstance(node, ast.Constant) and isinstance(node.value, float)), function.name
            assert not isinstance(node, ast.Div), function.name
            assert not (isinstance(node, ast.Name) and node.id in ("float", "math")), function.name
            assert not (isinstance(node, ast.Attribute) and node.attr == "float64"), function.name


@pytest.mark.parametrize("half", [0, 1, 2, 3, 4, 8, 9, 2**40 - 1, 2**40, 2**50 - 1, 2**52 - 2**27 + 1, 2**51])
def test_the_square_root_that_bounds_the_proposals_is_exact(half: int) -> None:
    """A float's square root is the nearest float: below 2^52 its integer part is that of the root."""
    _, step, valid = noise._propose(words(2 * half), words(0), words(0))
    assert valid.all() and step[0] == WORD - 1
    last = (math.isqrt(half) + 1) * ((WORD - 1) // (math.isqrt(half) + 1)) - 1
    m, _, valid = noise._propose(words(2 * half), words(last), words(0))
    assert (m.tolist(), valid.tolist()) == ([math.isqrt(half) ** 2], [True])


# The work that drawing takes does not depend on what is drawn.

Draw = Callable[[Fraction, int, noise.Coins], list[int]]


class CountedCoins:
    """The system's coins, counted."""

    def __init__(self) -> None:
        self.taken: list[int] = []

    def flips(self, count: int) -> bytes:
        self.taken.append(count)
        return os.urandom(count // 8)


def work(draw: Draw, rate: Fraction, buckets: int) -> tuple[tuple[int, ...], list[int]]:
    """Draw, and return the coins of each request, the number of calls and returns of all functions, and the noise."""
    coins, events = CountedCoins(), 0

    def count(*_: object) -> None:
        nonlocal events
        events += 1

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        drawn = draw(rate, buckets, coins)
    finally:
        sys.setprofile(before)
    return (*coins.taken, events), drawn


@pytest.mark.parametrize("draw", [noise.draw_local, noise.draw_laplace])
@pytest.mark.parametrize(("scale", "buckets"), [(1, 1), (100, 3), (2**28, 1), (2**28, 5), (100, 600)])
def test_coins_and_operations_are_the_same_for_every_draw(draw: Draw, scale: int, buckets: int) -> None:
    """200 draws, all of other noise, take one and the same number of coins, request by request, and of calls.

    A false failure takes one of the events of `noise`: 200 times 2^−40. The first draw fills a cache.
    """
    draw(Fraction(1, scale), buckets, noise.system_coins())
    works = {work(draw, Fraction(1, scale), buckets)[0] for _ in range(200 if buckets < 100 else 20)}
    assert len(works) == 1


@pytest.mark.parametrize("draw", [noise.draw_local, noise.draw_laplace])
def test_a_planted_leak_is_seen_in_the_work(draw: Draw) -> None:
    """A sampler that walks, as the one before this did, or that takes 10 ms more for noise above b."""

    def walks(rate: Fraction, buckets: int, coins: noise.Coins) -> list[int]:
        drawn = draw(rate, buckets, coins)
        for value in drawn:
            coins.flips(8 * (1 + abs(value) * 32 // 2**28))
        return drawn

    works = [work(walks, Fraction(1, 2**28), 1) for _ in range(200)]
    assert len({seen for seen, _ in works}) > 1
    assert correlated([sum(seen) for seen, _ in works], [abs(drawn[0]) for _, drawn in works])

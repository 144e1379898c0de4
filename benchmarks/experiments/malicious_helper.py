"""What one malicious helper, colluding with the querier, can learn or destroy: measured with the protocol's own parts.

It has two of the three components of every report, its own noise, and (in `pairwise`) the noise of two of the three
pairs. With the querier it also sees the opened answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from rich.table import Table

from benchmarks.results.columns import Columns, on_terminal
from benchmarks.workloads.seeded import generator
from mpc_helpers.mpc.noise import draw_laplace, draw_local, system_coins
from protocol.errors import ProtocolError
from protocol.field import P, Vector, add, from_integers
from protocol.noise import NoiseMode, laplace_variance
from protocol.shares import PARTIES, SEEDS_OF, open_shamir, share, to_shamir

# Noise of scale 20: large enough to be close to its continuous limit, small enough to draw often.
RATE = Fraction(1, 20)
BAD = 0


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing a malicious helper tries, and what came of it."""

    attempt: str
    measured: float
    if_nothing_is_gained: float
    says: str


def measure_malicious_helper(draws: int = 4000, seed: int = 0) -> list[Finding]:
    """Run all attempts, `draws` times each."""
    distance = view_distance(draws)
    local, pairwise = noise_left(NoiseMode.LOCAL, draws), noise_left(NoiseMode.PAIRWISE, draws)
    changed, private = (detected(forge, draws // 10, seed) for forge in (_changed_share, _private_noise))
    return [
        Finding("tell 0 from 1 by its view", distance, 0.0, "largest gap of distributions"),
        Finding("take out its own noise (local)", local, 1.0, "variance left / needed"),
        Finding("take out its pairs' noise (pairwise)", pairwise, 1.0, "variance left / needed"),
        Finding("send a changed answer share", changed, 1.0, "attempts detected"),
        Finding("choose its noise (pairwise)", private, 1.0, "attempts detected"),
        Finding("choose its noise (local)", shift_detected(), 1.0, "attempts detected: it can shift"),
    ]


def view_distance(draws: int) -> float:
    """Return the Kolmogorov-Smirnov distance between one helper's views of zeros and of ones."""
    zeros, ones = (np.sort(to_shamir(BAD, share([value] * draws).components(BAD))) for value in (0, 1))
    grid = np.linspace(0, P, 200, dtype=np.float64)
    gap = np.searchsorted(zeros, grid) / draws - np.searchsorted(ones, grid) / draws
    return float(np.abs(gap).max())


def noise_left(mode: NoiseMode, draws: int) -> float:
    """Return the variance of the noise unknown to the malicious helper, relative to the discrete Laplace of ε."""
    coins = system_coins()
    if mode is NoiseMode.LOCAL:
        left = np.add(draw_local(RATE, draws, coins), draw_local(RATE, draws, coins))
    else:
        left = np.asarray(draw_laplace(RATE, draws, coins))
    return float(np.mean(left.astype(np.float64) ** 2)) / laplace_variance(RATE)


Cheat = Callable[[dict[int, Vector], np.random.Generator], Vector]  # noqa: TID251 - the type alone; seeded.generator draws


def detected(forge: Cheat, trials: int, seed: int) -> float:
    """Return how often the querier rejects an answer in which the malicious helper's share comes from `forge`."""
    rng = generator(seed)
    caught = 0
    for _ in range(trials):
        split = share([int(value) for value in rng.integers(0, 1000, size=4)])
        shares = [to_shamir(party, split.components(party)) for party in range(PARTIES)]
        shares[BAD] = forge(split.components(BAD), rng)
        caught += _refused(shares)
    return caught / trials


def _changed_share(components: dict[int, Vector], rng: np.random.Generator) -> Vector:  # noqa: TID251 - the type alone
    """Return the correct share with one bucket changed."""
    change = [0, 0, 0, 0]
    change[int(rng.integers(4))] = int(rng.integers(1, 2**40))
    return add(to_shamir(BAD, components), from_integers(change))


def _private_noise(components: dict[int, Vector], rng: np.random.Generator) -> Vector:  # noqa: TID251 - the type alone
    """Return noise in one component that its other holder does not add: the effect of changing a pair's noise."""
    index = SEEDS_OF[BAD][int(rng.integers(2))]
    noise = from_integers([int(rng.integers(1, 2**40))] * 4)
    return to_shamir(BAD, {**components, index: add(components[index], noise)})


def shift_detected() -> float:
    """Return how often a shift is detected in `local`: a helper chooses its noise, and the shares stay consistent."""
    split, shifted = share([100, 200]), share([7, 7])
    shares = [
        add(to_shamir(party, split.components(party)), to_shamir(party, shifted.components(party)))
        for party in range(PARTIES)
    ]
    return 0.0 if not _refused(shares) and open_shamir(shares) == [107, 207] else 1.0


def _refused(shares: Sequence[Vector]) -> bool:
    try:
        open_shamir(shares)
    except ProtocolError:
        return True
    return False


COLUMNS: Columns[Finding] = {
    "it tries to": lambda finding: finding.attempt,
    "measured": lambda finding: f"{finding.measured:.3f}",
    "harmless": lambda finding: f"{finding.if_nothing_is_gained:g}",
    "what is measured": lambda finding: finding.says,
}


def malicious_helper_table(findings: Sequence[Finding]) -> Table:
    words = {"it tries to", "what is measured"}
    return on_terminal("one malicious helper with the querier", COLUMNS, findings, words)

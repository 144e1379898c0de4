"""Samples of joint noise against its exact probabilities, and planted bugs that must be caught.

False failures: a chi-square is bounded by its tail k + 2√(kx) + 2x with x = ln 10^8 (Laurent and Massart), with 30 or
more expected in every bin: 10^−8. Everything else is drawn from a fixed seed: planted bugs are caught always, or never.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import fields
from fractions import Fraction

import numpy as np
import numpy.typing as npt
import pytest

from mpc_helpers.mpc.joint import circuit, conversion
from mpc_helpers.mpc.joint.layout import Layout
from protocol.errors import ProtocolError
from protocol.field import lift
from protocol.joint_scale import Coin, JointScale
from tests.support.joint_trio import Run

SCALE = JointScale.of(Fraction(1, 5), 5)
DRAWS = 262_144 if os.environ.get("TREFOIL_FUZZ_SECONDS") else 32_768
SEEDED = 262_144
RISK = 1e-8


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
    return lift(conversion.own_value(conversion.unpacked(layout, circuit.evaluate(layout.circuit, bits))))


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

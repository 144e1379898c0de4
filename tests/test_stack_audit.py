"""ε, audited from outside: sealed reports in, the querier's answer out, three whole helpers in between.

Two neighbouring worlds differ in what one report says; every bucket has noise of its own, so one query gives as many
samples as it has buckets. The bounds are those of `test_noise_audit` (10^−8 for each audit of ε, about 2·10^−8 for each
fit); with five audits and seven fits of fresh randomness this file fails by chance with probability below 10^−6.
"""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from mpc_helpers.mpc.noisy_sum import ExactNoise
from protocol.joint_scale import JointScale
from protocol.querier.saved_query import QueryOptions
from protocol.query import NoiseMode
from tests.support import three_helpers
from tests.support.three_helpers import ThreeHelpers, terms
from tests.support.three_helpers import three_helpers as started
from tests.test_noise_audit import RATE, SENSITIVITY, Samples, epsilon_at_least, misfits

BUCKETS = 2**14
EPSILON_MICROS = int(1_000_000 * RATE * SENSITIVITY)


async def answer(three: ThreeHelpers, value: int, mode: NoiseMode) -> tuple[Samples, Samples]:
    """What the querier gets on one report with `value` in every bucket, and what helper 3 knows of its noise."""
    paid = terms(BUCKETS, epsilon_micros=EPSILON_MICROS, sensitivity=SENSITIVITY)
    batch = three.batch(three.seal([[value] * BUCKETS], paid))
    result = await three.ask(three.query(batch, QueryOptions(noise=mode, seconds=120)), batch)
    own = three.mpc.records[result.answer.attempt_id].parts[2]
    return np.array(result.answer.histogram, dtype=np.int64), np.array(own, dtype=np.int64)


async def worlds(folder: Path, mode: NoiseMode) -> tuple[tuple[Samples, Samples], tuple[Samples, Samples]]:
    """The same question about a null report and about one that spends all of Δ."""
    async with started(folder) as three:
        return await answer(three, 0, mode), await answer(three, SENSITIVITY, mode)


async def test_local_noise_keeps_epsilon_from_the_querier_and_a_bad_helper(tmp_path: Path) -> None:
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


async def test_joint_noise_keeps_epsilon_from_the_querier_and_a_bad_helper(tmp_path: Path) -> None:
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

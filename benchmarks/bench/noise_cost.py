"""What each noise mode costs and buys: `trefoil bench noise`.

Sampling is timed alone, since it is what grows with buckets and scale; the session of three parties is then run over
memory, where every byte and message can be counted and no network blurs the picture.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from fractions import Fraction

from rich.table import Table

from mpc_helpers.mpc import noise
from mpc_helpers.mpc.noisy_sum import ExactNoise, SumKind, local_sum, pairwise_sum, sum_parameters
from mpc_helpers.mpc.runtime import Program, run_three_in_one_process
from mpc_helpers.mpc.session import MpcSession
from protocol.noise_scale import half_width, laplace_variance, standard_deviation
from protocol.query import NoiseMode
from protocol.shares import PARTIES

SESSION_SECONDS = 120.0
Advance = Callable[[], None]


@dataclass(frozen=True, slots=True)
class NoiseCost:
    """One mode at one number of buckets. Bytes and messages are all that travels between the three parties."""

    mode: str
    buckets: int
    scale: float
    draw_seconds: float
    session_seconds: float
    bytes: int
    messages: int
    rounds: int
    standard_deviation: float
    variance_over_laplace: float
    half_width_95: int


def measure_all(buckets: list[int], rate: Fraction, progress: Advance) -> list[NoiseCost]:
    """Every mode at every number of buckets."""
    results = []
    for mode in NoiseMode:
        for count in buckets:
            results.append(measure(mode, count, rate))
            progress()
    return results


def measure(mode: NoiseMode, buckets: int, rate: Fraction) -> NoiseCost:
    """Draw once and run one session of three parties."""
    noise.check_cost(buckets, rate)
    draw_seconds = _time_drawing(mode, buckets, rate)
    sent: Counter[tuple[int, int]] = Counter()
    size = 0

    def count(sender: int, receiver: int, frame: bytes) -> bytes:
        nonlocal size
        sent[sender, receiver] += 1
        size += len(frame)
        return frame

    digest, parameters = os.urandom(32), sum_parameters(SumKind.of(mode), rate)
    sessions = [MpcSession(party, digest, parameters, buckets, SESSION_SECONDS) for party in range(PARTIES)]
    programs = [_program(mode, buckets, rate) for _ in range(PARTIES)]
    start = time.perf_counter()
    for outcome in asyncio.run(run_three_in_one_process(sessions, programs, count)):
        if isinstance(outcome, BaseException):
            raise outcome
    deviation = standard_deviation(mode, rate)
    return NoiseCost(
        mode=mode.value,
        buckets=buckets,
        scale=float(1 / rate),
        draw_seconds=draw_seconds,
        session_seconds=time.perf_counter() - start,
        bytes=size,
        messages=sum(sent.values()),
        # A party waits for its peers between any two messages it sends to one of them.
        rounds=max(sent.values()),
        standard_deviation=deviation,
        variance_over_laplace=deviation**2 / laplace_variance(rate),
        half_width_95=half_width(mode, rate, 0.95),
    )


def _time_drawing(mode: NoiseMode, buckets: int, rate: Fraction) -> float:
    source = ExactNoise()
    start = time.perf_counter()
    if mode is NoiseMode.LOCAL:
        source.local(rate, buckets)
    else:
        # A helper is in two pairs and draws the vectors of both.
        source.pairwise(rate, buckets, os.urandom(32))
        source.pairwise(rate, buckets, os.urandom(32))
    return time.perf_counter() - start


def _program(mode: NoiseMode, buckets: int, rate: Fraction) -> Program[list[int]]:
    share, source = [0] * buckets, ExactNoise()
    return (
        local_sum(share, source.local(rate, buckets)) if mode is NoiseMode.LOCAL else pairwise_sum(share, rate, source)
    )


def table(results: list[NoiseCost]) -> Table:
    """For people."""
    shown = Table(title=f"Noise of scale b = {results[0].scale:g}, three parties in one process")
    for column in (
        "mode",
        "buckets",
        "draw, ms",
        "session, ms",
        "bytes",
        "rounds",
        "sd",
        "var / Laplace",
        "95 % within",
    ):
        shown.add_column(column, justify="right")
    for cost in results:
        shown.add_row(
            cost.mode,
            str(cost.buckets),
            f"{1e3 * cost.draw_seconds:.2f}",
            f"{1e3 * cost.session_seconds:.1f}",
            f"{cost.bytes:,}",
            str(cost.rounds),
            f"{cost.standard_deviation:.2f}",
            f"{cost.variance_over_laplace:.2f}",
            f"±{cost.half_width_95}",
        )
    return shown


def to_json(results: list[NoiseCost]) -> dict[str, object]:
    """For programs."""
    return {"noise": [asdict(cost) for cost in results]}

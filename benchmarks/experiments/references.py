"""Recorded numbers of the paper and its artifact, to be drawn beside ours; never used to compute."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.experiments.policies import System


@dataclass(frozen=True, slots=True)
class MicrobenchmarkReference:
    """One row of Figure 4 over ten seeds of the artifact: mean and range of the average, range of the maximum."""

    participation: float
    rate: float
    system: System
    average: float
    average_range: tuple[float, float]
    maximum_range: tuple[float, float]
    rmsre: float


@dataclass(frozen=True, slots=True)
class RunReference:
    """One system's recorded run: average budget, queries run, and RMSRE as far as it is known."""

    system: System
    average: float | None = None
    executed: int | None = None
    quartiles: tuple[float, float, float, float, float] | None = None
    kappa: float = 0.0


MICROBENCHMARK = (
    MicrobenchmarkReference(0.1, 0.1, System.IPA_LIKE, 0.5887, (0.5884, 0.5910), (0.9210, 0.9210), 0.015845),
    MicrobenchmarkReference(0.1, 0.1, System.ARA_LIKE, 0.030787, (0.030729, 0.030878), (0.276, 0.322), 0.015845),
    MicrobenchmarkReference(0.1, 0.1, System.COOKIE_MONSTER, 0.013225, (0.013174, 0.013292), (0.230, 0.276), 0.015845),
    MicrobenchmarkReference(1.0, 0.1, System.ARA_LIKE, 0.270187, (0.270018, 0.270339), (0.691, 0.783), 0.015833),
    MicrobenchmarkReference(1.0, 0.1, System.COOKIE_MONSTER, 0.116366, (0.115496, 0.116897), (0.645, 0.737), 0.015833),
    MicrobenchmarkReference(0.1, 0.01, System.COOKIE_MONSTER, 0.002850, (0.002805, 0.002885), (0.230, 0.276), 0.034973),
)

BIAS = (
    RunReference(System.IPA_LIKE, 0.967, 21, (0.0155, 0.0156, 0.0156, 0.0156, 0.0157)),
    RunReference(System.ARA_LIKE, 0.565, 400, (0.0155, 0.0157, 0.434, 0.971, 1.000)),
    RunReference(System.COOKIE_MONSTER, 0.358, 400, (0.0155, 0.0156, 0.117, 0.187, 0.214)),
    RunReference(System.COOKIE_MONSTER, 0.428, 400, (0.0155, 0.0159, 0.175, 0.229, 0.262), kappa=0.5),
)

PATCG = (
    RunReference(System.IPA_LIKE, 0.6908, 3),
    RunReference(System.ARA_LIKE, 0.2768, 80),
    RunReference(System.COOKIE_MONSTER, 0.001325, 80),
)


@dataclass(frozen=True, slots=True)
class CriteoReference:
    """Recorded RMSRE on the real log with 7-day epochs."""

    system: System
    median: float | None
    maximum: float


CRITEO = (
    CriteoReference(System.IPA_LIKE, None, 0.0307),
    CriteoReference(System.ARA_LIKE, 0.0289, 0.1440),
    CriteoReference(System.COOKIE_MONSTER, 0.0196, 0.0378),
)

"""The microbenchmark (Fig. 4) and the bias run (Fig. 7): one advertiser, two knobs."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from benchmarks.experiments.world import Ints, QueryColumns, World, assemble, check_scale, query_epsilon, renumber
from benchmarks.workloads.seeded import generator
from protocol.errors import ErrorKind, TrefoilError
from protocol.units import DAY

# 2024-01-02 and 2024-02-01, 00:00 UTC: impressions have a month's start, so that every window has data to look at.
IMPRESSIONS_FROM = 1_704_153_600
CONVERSIONS_FROM = 1_706_745_600
# One published value is 1000 units, so that κ may be given to three decimals.
UNIT = 1000


@dataclass(frozen=True, slots=True)
class Microbenchmark:
    """The paper's parameters: both knobs, and the sizes they act on. `repeats` is how often each product is queried."""

    participation: float = 0.1
    rate: float = 0.1
    seed: int = 0
    scale: float = 1.0
    days: int = 120
    repeats: int = 2
    products: int = 10
    published_batch: int = 2000
    cap: int = 5
    window_days: int = 30

    def __post_init__(self) -> None:
        if not (0 < self.participation <= 1):
            raise TrefoilError(
                f"participation must be above 0 and at most 1, not {self.participation}", kind=ErrorKind.OUT_OF_RANGE
            )
        if not (0 <= self.rate <= 1000):
            raise TrefoilError(
                f"impressions per day must be between 0 and 1000, not {self.rate}", kind=ErrorKind.OUT_OF_RANGE
            )
        check_scale(self.scale)
        if self.batch < 1 or self.repeats < 1 or self.products < 1 or self.days <= 31:
            raise TrefoilError(
                "there would be no users: a batch needs at least one report",
                "Use a larger --scale, or leave it out.",
                kind=ErrorKind.TOO_FEW,
            )

    @property
    def batch(self) -> int:
        """Return the reports per query, B."""
        return round(self.published_batch * self.scale)

    @property
    def users(self) -> int:
        """Return the number of users (knob 1), of whom one batch is the given share."""
        return math.ceil(self.batch / self.participation)

    @property
    def impressions_each(self) -> int:
        """Return the impressions of one user (knob 2) over the whole time, rounded up."""
        return math.ceil(self.rate * self.days)

    @property
    def conversions(self) -> int:
        return self.batch * self.repeats * self.products


def generate(spec: Microbenchmark) -> World:
    """Draw the world of a specification; it is a function of the seed."""
    rng = generator(spec.seed)
    queries = spec.products * spec.repeats
    batch_of = np.repeat(np.arange(queries, dtype=np.int64), spec.batch)
    span = (spec.days - 31) * DAY
    times = rng.integers(0, span, size=(spec.products, spec.repeats * spec.batch), dtype=np.int64)
    times.sort(axis=1)
    people = np.concatenate([rng.choice(spec.users, spec.batch, replace=False) for _ in range(queries)])
    values = np.clip(rng.lognormal(5, 0.1, size=len(people)), 1, spec.cap)
    owners, owner = renumber(people.astype(np.int64))
    epsilon = query_epsilon(spec.cap, spec.published_batch * spec.cap)
    return assemble(
        impressions=_impressions(spec, len(owners)),
        conversions=(owner, times.ravel() + CONVERSIONS_FROM, np.rint(values * UNIT).astype(np.int64), batch_of),
        owner_advertiser=np.zeros(len(owners), dtype=np.int64),
        queries=QueryColumns(np.full(queries, epsilon, dtype=np.int64), np.zeros(queries, dtype=np.int64)),
        cap=spec.cap * UNIT,
        window=spec.window_days * DAY,
        unit=UNIT,
        scale=spec.scale,
    )


def _impressions(spec: Microbenchmark, owners: int) -> tuple[Ints, Ints]:
    """Draw the impressions of the people who convert. Those of others affect no filter and no report."""
    # A stream of its own: the conversions of a seed do not change with the number of impressions.
    rng = generator(spec.seed + 2**32)
    times = rng.integers(0, (spec.days - 1) * DAY, size=(owners, spec.impressions_each), dtype=np.int64)
    # Sorted row by row here, so that the stable sort by owner and time later has nothing left to do.
    times.sort(axis=1)
    owner = np.repeat(np.arange(owners, dtype=np.int64), spec.impressions_each)
    return owner, times.ravel() + IMPRESSIONS_FROM

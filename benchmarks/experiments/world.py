"""A world to measure: people's impressions and conversions as columns, and the queries the conversions belong to.

An *owner* is one (person, advertiser) pair. Privacy filters belong to an owner, and an advertiser's impressions are
relevant to all of that advertiser's conversions, so owners never influence each other.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from benchmarks.experiments.columns import Flags, Ints, stable_order, starts_of
from protocol import epsilon
from protocol.errors import TrefoilError
from protocol.seconds import DAY

# Monday 2024-01-01 00:00 UTC: 7-day epochs are ISO weeks, and other lengths start on the same day as the artifact's.
ANCHOR = 1_704_067_200
# Sums and products of charges stay exact in 64 bits below this.
EXACT = 2**62


def check_scale(scale: float) -> None:
    """How much of the published size a workload has."""
    if not (0 < scale <= 1):
        raise TrefoilError(f"scale must be above 0 and at most 1, not {scale}")


@dataclass(frozen=True, slots=True)
class Epochs:
    """A grid of epochs: integer seconds, UTC, the start inside and the end outside."""

    seconds: int = 7 * DAY
    anchor: int = ANCHOR

    def __post_init__(self) -> None:
        if self.seconds <= 0:
            raise TrefoilError("an epoch must last at least one second", "Give --epoch-days as 1 or more.")

    def of(self, times: Ints) -> Ints:
        """The epoch each time falls into."""
        result: Ints = (times - self.anchor) // self.seconds
        return result


@dataclass(frozen=True, slots=True)
class Impressions:
    """Sorted by owner, then time; `bucket` is the histogram bucket an impression is counted in."""

    owner: Ints
    time: Ints
    bucket: Ints


@dataclass(frozen=True, slots=True)
class Conversions:
    """Sorted by owner, then by arrival. `query` is the batch the report goes into; values are whole units."""

    owner: Ints
    time: Ints
    value: Ints
    query: Ints


@dataclass(frozen=True, slots=True)
class Queries:
    """One row per batch: the ε asked for, in micros, and whose query it is."""

    epsilon: Ints
    advertiser: Ints


@dataclass(frozen=True)
class World:
    """Everything a policy is run on. `cap` is Δ in units; `unit` units make 1 of the published value."""

    owners: int
    owner_advertiser: Ints
    impressions: Impressions
    conversions: Conversions
    queries: Queries
    cap: int
    window: int
    unit: int = 1
    buckets: int = 1
    # Batches are this fraction of the published size; errors are given for the published size.
    scale: float = 1.0

    def __post_init__(self) -> None:
        if self.owners <= 0 or len(self.conversions.owner) == 0:
            raise TrefoilError(
                "there is nothing to measure: no user has a conversion", "Use more users or a larger --scale."
            )
        if self.window < 0 or self.cap <= 0 or self.buckets <= 0:
            raise TrefoilError("window, value cap and buckets must be positive")
        self._check_queries()
        self._check_order()

    def _check_queries(self) -> None:
        for micros in (int(self.queries.epsilon.min()), int(self.queries.epsilon.max())):
            epsilon.validate_terms(micros, self.cap)
        if int(self.conversions.value.min()) < 0 or int(self.conversions.value.max()) > self.cap:
            raise TrefoilError(f"conversion values must lie between 0 and the cap, {self.cap} units")
        if int(self.queries.epsilon.max()) * 4 * self.cap >= EXACT:
            raise TrefoilError("ε times the value cap is too large to count exactly in 64 bits", "Use a coarser unit.")

    def _check_order(self) -> None:
        for name, table in (("impressions", self.impressions), ("conversions", self.conversions)):
            later = table.time[1:] >= table.time[:-1]
            same = table.owner[1:] == table.owner[:-1]
            if np.any(table.owner[1:] < table.owner[:-1]) or np.any(same & ~later):
                raise TrefoilError(f"{name} must be sorted by owner and time")
        if np.any(np.diff(self.conversion_starts) == 0):
            raise TrefoilError("every owner must have a conversion; others hold no filter anyone asked for")

    @cached_property
    def conversion_starts(self) -> Ints:
        """Where each owner's conversions begin."""
        return starts_of(self.conversions.owner, self.owners)

    @cached_property
    def impression_starts(self) -> Ints:
        """Where each owner's impressions begin."""
        return starts_of(self.impressions.owner, self.owners)

    @property
    def submitted(self) -> int:
        """How many queries are asked."""
        return len(self.queries.epsilon)

    def blocks(self, conversions: int) -> list[tuple[int, int]]:
        """Ranges of owners with about so many conversions each: memory stays flat however large the world is."""
        cuts = np.searchsorted(self.conversion_starts, np.arange(0, len(self.conversions.owner), conversions))
        edges = np.unique(np.append(cuts, self.owners)).tolist()
        edges = edges if edges[0] == 0 else [0, *edges]
        return list(pairwise(edges))

    def part(self, first: int, last: int) -> World:
        """The owners first to last - 1 as a world of their own; columns are views, not copies."""
        seen = slice(self.impression_starts[first], self.impression_starts[last])
        done = slice(self.conversion_starts[first], self.conversion_starts[last])
        impressions, conversions = self.impressions, self.conversions
        return replace(
            self,
            owners=last - first,
            owner_advertiser=self.owner_advertiser[first:last],
            impressions=Impressions(impressions.owner[seen] - first, impressions.time[seen], impressions.bucket[seen]),
            conversions=Conversions(
                conversions.owner[done] - first,
                conversions.time[done],
                conversions.value[done],
                conversions.query[done],
            ),
        )


def assemble(
    *,
    impressions: tuple[Ints, Ints],
    conversions: tuple[Ints, Ints, Ints, Ints],
    owner_advertiser: Ints,
    queries: Queries,
    cap: int,
    window: int,
    unit: int = 1,
    scale: float = 1.0,
) -> World:
    """Put unsorted columns into a world. Owners are 0 to n - 1; conversions at the same second keep their order."""
    owner, time, value, query = conversions
    order = _by_owner_and_time(owner, time)
    seen_owner, seen_time = impressions
    seen = _by_owner_and_time(seen_owner, seen_time)
    return World(
        owners=len(owner_advertiser),
        owner_advertiser=owner_advertiser,
        impressions=Impressions(seen_owner[seen], seen_time[seen], np.zeros(len(seen), dtype=np.int64)),
        conversions=Conversions(owner[order], time[order], value[order], query[order]),
        queries=queries,
        cap=cap,
        window=window,
        unit=unit,
        scale=scale,
    )


def _by_owner_and_time(owner: Ints, time: Ints) -> Ints:
    """The stable order by owner, then time: one sort of a combined key, half the cost of sorting twice."""
    if len(owner) == 0:
        return owner
    base = int(time.min())
    stride = int(time.max()) - base + 1
    if int(owner.max()) * stride >= EXACT:
        raise TrefoilError("times and owners are too far apart to sort exactly in 64 bits")
    return stable_order(owner * stride + (time - base))


def renumber(keys: Ints) -> tuple[Ints, Ints]:
    """The distinct keys in rising order, and each row's place among them."""
    distinct, places = np.unique(keys, return_inverse=True)
    return distinct, places.astype(np.int64)


def keep_known(keys: Ints, distinct: Ints) -> tuple[Flags, Ints]:
    """Which keys are among `distinct` (rising), and their places there (meaningless where not)."""
    places = np.searchsorted(distinct, keys)
    places[places == len(distinct)] = 0
    return distinct[places] == keys, places.astype(np.int64)

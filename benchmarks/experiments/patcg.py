"""The PATCG workload (Fig. 5): one large advertiser, ten products, few conversions attributed.

The public set cannot be shipped; `synthesize` draws one with its published marginals at full size, and
`benchmarks.experiments.files` reads the real parquet files.
"""

from __future__ import annotations

import math

import numpy as np

from benchmarks.experiments.world import (
    EventTables,
    Ints,
    World,
    check_scale,
    fill_groups,
    first_of_runs,
    query_epsilon,
    stable_order,
    world_of_batches,
)
from benchmarks.workloads.seeded import generator
from protocol.errors import ErrorKind, TrefoilError
from protocol.units import DAY

CONVERSIONS = 24_113_018
PER_CONVERTER = 1.5
IMPRESSIONS = 913_984
PER_EXPOSED = 3.2
PRODUCTS = 10
DAYS = 30
CAP = 15
BATCH = 303_009
LEAST_BATCH = 280_000
WINDOW_DAYS = 7
# What a batch is expected to add up to, from which ε = 15·ln(100)/(0.05·2000) follows.
EXPECTED = 2000
# Amounts: quartiles 3.74, 7.35 and 14.45 and mean 12.1 are those of this lognormal.
AMOUNT_MEDIAN = 7.35
AMOUNT_SIGMA = math.log(14.45 / 7.35) / 0.674490
# Values are counted in cents.
UNIT = 100
# Thursday 2024-01-11 00:00 UTC. On which weekday 30 days begin decides how many batches IPA can serve from whole weeks;
# on a Thursday it is the published 3 of 80.
START = 1_704_931_200


def synthesize(seed: int, scale: float = 1.0) -> EventTables:
    """Draw a set with the published marginals. Everyone who converts does so once; the rest is spread evenly on top."""
    check_scale(scale)
    rng = generator(seed)
    conversions, impressions = round(CONVERSIONS * scale), round(IMPRESSIONS * scale)
    people, exposed = round(conversions / PER_CONVERTER), round(impressions / PER_EXPOSED)
    if exposed < 1:
        raise TrefoilError(
            "no one sees an advertisement at this scale", "Use a larger --scale.", kind=ErrorKind.TOO_FEW
        )
    who = rng.choice(people, exposed, replace=False)
    person = _once_each_and_more(rng.integers(0, people, conversions - people), people)
    seen_person = np.sort(who)[_once_each_and_more(rng.integers(0, exposed, impressions - exposed), exposed)]
    amount = rng.lognormal(math.log(AMOUNT_MEDIAN), AMOUNT_SIGMA, conversions)
    return EventTables(
        seen_person=seen_person,
        seen_advertiser=np.broadcast_to(np.int64(0), impressions),
        seen_time=_sorted_times(seen_person, rng.integers(0, DAYS * DAY, impressions)),
        person=person,
        time=_sorted_times(person, rng.integers(0, DAYS * DAY, conversions)),
        advertiser=np.broadcast_to(np.int64(0), conversions),
        product=_products(rng.integers(0, PRODUCTS, people), person),
        value=np.rint(np.minimum(amount, CAP) * UNIT).astype(np.int64),
    )


def world_of(events: EventTables, scale: float = 1.0) -> World:
    """Form each product's batches and put what is in them into a world; conversions in no batch ask for no report."""
    size, least = max(1, round(BATCH * scale)), max(1, round(LEAST_BATCH * scale))
    rows, query = fill_groups(events.product, events.person, events.time, size, least)
    # A synthetic set is sorted by person and time, so that sorting its rows again by these takes little time.
    order = stable_order(rows)
    epsilon = np.full(int(query.max()) + 1, query_epsilon(CAP, EXPECTED), dtype=np.int64)
    return world_of_batches(
        events, rows[order], query[order], epsilon, cap=CAP * UNIT, window=WINDOW_DAYS * DAY, unit=UNIT, scale=scale
    )


def _products(first: Ints, person: Ints) -> Ints:
    """Draw uniform products; a person's next conversion is for the next product.

    Drawn independently, so many people would buy the same product twice within a batch that the last batch of most
    products falls below 280,000; the published set fills all 80.
    """
    starts = np.flatnonzero(first_of_runs(person))
    which = np.arange(len(person), dtype=np.int64) - np.repeat(starts, np.diff(np.append(starts, len(person))))
    return (first[person] + which) % PRODUCTS


def _once_each_and_more(more: Ints, people: int) -> Ints:
    """Return everyone once, and again for each time they occur in `more`; sorted."""
    return np.repeat(np.arange(people, dtype=np.int64), 1 + np.bincount(more, minlength=people))


def _sorted_times(person: Ints, offset: Ints) -> Ints:
    """Return random times sorted within each person, by one sort of a combined key; `person` is sorted already."""
    key = person * (DAYS * DAY) + offset
    key.sort()
    return key - person * (DAYS * DAY) + START

"""The PATCG workload (Fig. 5): one large advertiser, ten products, few conversions attributed.

The public set cannot be shipped; `synthesize` draws one with its published marginals at full size, and
`benchmarks.experiments.files` reads the real parquet files.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from benchmarks.experiments.world import (
    LEFT_OUT,
    Conversions,
    Floats,
    Impressions,
    Ints,
    QueryColumns,
    World,
    check_scale,
    fill_groups,
    first_of_runs,
    query_epsilon,
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


@dataclass(frozen=True, slots=True)
class Events:
    """A PATCG set as columns: impressions of people who convert, and conversions sorted by person and time."""

    seen_person: Ints
    seen_time: Ints
    person: Ints
    time: Ints
    product: Ints
    value: Ints


def synthesize(seed: int, scale: float = 1.0) -> Events:
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
    return Events(
        seen_person=seen_person,
        seen_time=_sorted_times(seen_person, rng.integers(0, DAYS * DAY, impressions)),
        person=person,
        time=_sorted_times(person, rng.integers(0, DAYS * DAY, conversions)),
        product=_products(rng.integers(0, PRODUCTS, people), person),
        value=cents(amount),
    )


def world_of(events: Events, scale: float = 1.0) -> World:
    """Form each product's batches and put what is in them into a world; conversions in no batch ask for no report."""
    size, least = max(1, round(BATCH * scale)), max(1, round(LEAST_BATCH * scale))
    rows, batches = fill_groups(events.product, events.person, events.time, size, least)
    query = np.full(len(events.person), LEFT_OUT, dtype=np.int64)
    query[rows] = batches
    queries = int(batches.max()) + 1
    # The rows are sorted by person and time, and so are those that are kept.
    kept = np.flatnonzero(query != LEFT_OUT)
    owners = np.zeros(int(max(events.person.max(), events.seen_person.max(initial=0))) + 1, dtype=np.int64)
    owners[events.person[kept]] = 1
    place = np.cumsum(owners) - 1
    seen = np.flatnonzero(owners[events.seen_person])
    count = int(owners.sum())
    epsilon = query_epsilon(CAP, EXPECTED)
    return World(
        owners=count,
        owner_advertiser=np.zeros(count, dtype=np.int64),
        impressions=Impressions(
            place[events.seen_person[seen]], events.seen_time[seen], np.zeros(len(seen), dtype=np.int64)
        ),
        conversions=Conversions(place[events.person[kept]], events.time[kept], events.value[kept], query[kept]),
        queries=QueryColumns(np.full(queries, epsilon, dtype=np.int64), np.zeros(queries, dtype=np.int64)),
        cap=CAP * UNIT,
        window=WINDOW_DAYS * DAY,
        unit=UNIT,
        scale=scale,
    )


def cents(amount: Floats) -> Ints:
    """Return amounts in whole cents, capped."""
    whole: Ints = np.rint(np.minimum(amount, CAP) * UNIT).astype(np.int64)
    return whole


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

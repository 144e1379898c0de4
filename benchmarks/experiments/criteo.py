"""The Criteo workload (Fig. 6): many advertisers of very different sizes, each with its own filters on each device.

The log itself cannot be shipped; `synthesize` draws one with its published marginals at full size, and
`benchmarks.experiments.files` reads the real file. Every row of the log is an impression (a click); some led to a sale.
Its products are categories.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from benchmarks.experiments.world import (
    EventTables,
    Floats,
    Ints,
    World,
    check_scale,
    fill_groups,
    query_epsilon,
    world_of_batches,
)
from benchmarks.workloads.seeded import generator
from protocol.units import DAY

IMPRESSIONS = 12_000_000
CONVERSIONS = 1_300_000
LARGEST_CONVERSIONS = 478_000
LARGEST_IMPRESSIONS = 2_600_000
ADVERTISERS = 292
USERS = 10_000_000
DAYS = 90
CAP = 5
BATCH = 450
LEAST_BATCH = 300
WINDOW_DAYS = 30
# The mean value that queriers assume when they choose ε.
ASSUMED_MEAN = 2
UNIT = 1000
UNKNOWN = -1
# Monday 2024-01-01 00:00 UTC plus the window: no window reaches back before the epochs' anchor.
START = 1_706_659_200
# Exponents with which the largest advertiser's share falls to the others' by rank, so that the totals come out.
CONVERSION_DECAY = 1.45
IMPRESSION_DECAY = 0.97
# Shares of purchases of one to five pieces; one product in eight is bought only singly. Quartiles 1, 1, 2 as published.
PIECES = (0.66, 0.19, 0.06, 0.03, 0.06)
SINGLY = 8
# How often a click is by the person who clicked on the same advertiser just before.
AGAIN = 0.07
NO_CATEGORY = 0.45


def synthesize(seed: int, scale: float = 1.0) -> EventTables:
    """Draw a log with the published marginals. A sale is one of its buyer's own clicks, some time later."""
    check_scale(scale)
    rng = generator(seed)
    sales = _sizes(CONVERSIONS, LARGEST_CONVERSIONS, CONVERSION_DECAY, scale)
    clicks = np.maximum(_sizes(IMPRESSIONS, LARGEST_IMPRESSIONS, IMPRESSION_DECAY, scale), sales + 1)
    seen_advertiser = np.repeat(np.arange(ADVERTISERS, dtype=np.int64), clicks)
    seen_user = _users(rng.random(len(seen_advertiser)), rng.permutation, max(1, round(USERS * scale)))
    seen_time = START + rng.integers(0, DAYS * DAY, len(seen_advertiser))
    # Which of an advertiser's rows are sales is arbitrary, since rows are drawn alike: the first ones.
    first = np.cumsum(clicks) - clicks
    sold = np.concatenate([np.arange(f, f + n) for f, n in zip(first.tolist(), sales.tolist(), strict=True)])
    advertiser = seen_advertiser[sold]
    category = _categories(rng.random((2, len(sold))), advertiser, sales)
    return EventTables(
        seen_person=seen_user,
        seen_advertiser=seen_advertiser,
        seen_time=seen_time,
        person=seen_user[sold],
        advertiser=advertiser,
        product=category,
        time=seen_time[sold] + rng.exponential(2 * DAY, len(sold)).astype(np.int64),
        value=UNIT * _pieces(rng.random(len(sold)), advertiser + category),
    )


def augment(log: EventTables, extra: int, seed: int) -> EventTables:
    """Add `extra` impressions per conversion, uniform in the 30 days before it (Criteo++)."""
    rng = generator(seed)
    back = rng.integers(0, WINDOW_DAYS * DAY + 1, extra * len(log.time))
    return replace(
        log,
        seen_person=np.concatenate((log.seen_person, np.tile(log.person, extra))),
        seen_advertiser=np.concatenate((log.seen_advertiser, np.tile(log.advertiser, extra))),
        seen_time=np.concatenate((log.seen_time, np.tile(log.time, extra) - back)),
    )


def world_of(log: EventTables, scale: float = 1.0) -> World:
    """Drop the largest advertiser, form batches per (advertiser, category), and keep what is in one."""
    largest = int(np.argmax(np.bincount(log.advertiser)))
    wanted = np.flatnonzero((log.advertiser != largest) & (log.product != UNKNOWN))
    size, least = max(2, round(BATCH * scale)), max(1, round(LEAST_BATCH * scale))
    group = log.advertiser[wanted] * (int(log.product.max()) + 1) + log.product[wanted]
    chosen, query = fill_groups(group, log.person[wanted], log.time[wanted], size, least)
    # ε follows the batch's size, as at the published scale.
    published = np.maximum(1, np.rint(np.bincount(query) / scale)).astype(np.int64)
    epsilon = np.asarray([query_epsilon(CAP, ASSUMED_MEAN * int(n)) for n in published], dtype=np.int64)
    window = WINDOW_DAYS * DAY
    return world_of_batches(log, wanted[chosen], query, epsilon, cap=CAP * UNIT, window=window, unit=UNIT, scale=scale)


def _sizes(total: int, largest: int, decay: float, scale: float) -> Ints:
    """Return advertisers' sizes by rank: the largest as published, the others by a power law to the total."""
    rank = np.arange(2, ADVERTISERS + 1, dtype=np.float64)
    share = rank**-decay
    rest = (total - largest) * share / share.sum()
    return np.rint(np.concatenate(([largest], rest)) * scale).astype(np.int64)


def _users(coins: Floats, permutation: Callable[[int], Ints], users: int) -> Ints:
    """Draw who clicks: new people until everyone has clicked once, and at times the previous person again."""
    again = coins < AGAIN
    again[0] = False
    people = permutation(max(users, int((~again).sum()))) % users
    clicked: Ints = people[np.cumsum(~again) - 1]
    return clicked


def _categories(coins: Floats, advertiser: Ints, sales: Ints) -> Ints:
    """Draw a product category per sale: larger advertisers have more, the first are most popular, many are unknown."""
    choices = np.maximum(1.0, sales / 2000)[advertiser] ** 0.7
    # Squaring favours the first categories.
    category = (coins[0] ** 2 * choices).astype(np.int64)
    return np.where(coins[1] < NO_CATEGORY, UNKNOWN, category)


def _pieces(coins: Floats, product: Ints) -> Ints:
    """Draw how many pieces were bought, 1 to 5."""
    pieces = 1 + np.searchsorted(np.cumsum(PIECES)[:-1], coins, side="right").astype(np.int64)
    return np.where(product % SINGLY == 0, 1, pieces)

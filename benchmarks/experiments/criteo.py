"""The Criteo workload (Fig. 6): many advertisers of very different sizes, each with its own filters on each device.

The log itself cannot be shipped; `synthesize` draws one with its published marginals at full size, and
`benchmarks.experiments.files` reads the real file. Every row of the log is an impression (a click); some led to a sale.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.experiments.world import (
    LEFT_OUT,
    Floats,
    Ints,
    QueryColumns,
    World,
    assemble,
    check_scale,
    fill_batches,
    first_of_runs,
    keep_known,
    query_epsilon,
    renumber,
    stable_order,
)
from benchmarks.workloads.seeded import generator
from protocol.errors import ErrorKind, TrefoilError
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


@dataclass(frozen=True, slots=True)
class Log:
    """A Criteo log as columns. Impressions are all rows; conversions are the sales among them."""

    seen_user: Ints
    seen_advertiser: Ints
    seen_time: Ints
    user: Ints
    advertiser: Ints
    category: Ints
    time: Ints
    value: Ints


def synthesize(seed: int, scale: float = 1.0) -> Log:
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
    return Log(
        seen_user=seen_user,
        seen_advertiser=seen_advertiser,
        seen_time=seen_time,
        user=seen_user[sold],
        advertiser=advertiser,
        category=category,
        time=seen_time[sold] + rng.exponential(2 * DAY, len(sold)).astype(np.int64),
        value=_pieces(rng.random(len(sold)), advertiser + category),
    )


def augment(log: Log, extra: int, seed: int) -> Log:
    """Add `extra` impressions per conversion, uniform in the 30 days before it (Criteo++)."""
    if extra < 0:
        raise TrefoilError(f"the number of extra impressions cannot be negative: {extra}", kind=ErrorKind.OUT_OF_RANGE)
    rng = generator(seed)
    back = rng.integers(0, WINDOW_DAYS * DAY + 1, extra * len(log.time))
    return replace(
        log,
        seen_user=np.concatenate((log.seen_user, np.tile(log.user, extra))),
        seen_advertiser=np.concatenate((log.seen_advertiser, np.tile(log.advertiser, extra))),
        seen_time=np.concatenate((log.seen_time, np.tile(log.time, extra) - back)),
    )


def world_of(log: Log, scale: float = 1.0) -> World:
    """Drop the largest advertiser, form batches per (advertiser, category), and keep what is in one."""
    largest = int(np.argmax(np.bincount(log.advertiser)))
    wanted = np.flatnonzero((log.advertiser != largest) & (log.category != UNKNOWN))
    size, least = max(2, round(BATCH * scale)), max(1, round(LEAST_BATCH * scale))
    rows, query, advertiser, reports = _batches(log, wanted, size, least)
    users = int(max(log.user.max(), log.seen_user.max())) + 1
    owners, owner = renumber(log.advertiser[rows] * users + log.user[rows])
    # A table lookup leaves few enough impressions to search for.
    converts = np.zeros(users, dtype=np.bool_)
    converts[log.user[rows]] = True
    seen = np.flatnonzero(converts[log.seen_user])
    kept, place = keep_known(log.seen_advertiser[seen] * users + log.seen_user[seen], owners)
    # ε follows the batch's size, as at the published scale.
    published = np.maximum(1, np.rint(reports / scale)).astype(np.int64)
    epsilon = [query_epsilon(CAP, ASSUMED_MEAN * int(n)) for n in published]
    return assemble(
        impressions=(place[kept], log.seen_time[seen[kept]]),
        conversions=(owner, log.time[rows], log.value[rows] * UNIT, query),
        owner_advertiser=owners // users,
        queries=QueryColumns(np.asarray(epsilon, dtype=np.int64), advertiser),
        cap=CAP * UNIT,
        window=WINDOW_DAYS * DAY,
        unit=UNIT,
        scale=scale,
    )


def _batches(log: Log, wanted: Ints, size: int, least: int) -> tuple[Ints, Ints, Ints, Ints]:
    """Return the rows that are in a batch, their queries, and each query's advertiser and number of reports."""
    group = log.advertiser[wanted] * (int(log.category.max()) + 1) + log.category[wanted]
    order = stable_order(group)
    starts = np.append(np.flatnonzero(first_of_runs(group[order])), len(order))
    rows: list[Ints] = []
    queries: list[Ints] = []
    owners: list[int] = []
    reports: list[int] = []
    for low, high in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        if high - low < least:
            continue
        here = wanted[order[low:high]]
        batch = fill_batches(log.user[here], log.time[here], size, least)
        rows.append(here[batch != LEFT_OUT])
        queries.append(batch[batch != LEFT_OUT] + len(reports))
        counts = np.bincount(batch[batch != LEFT_OUT])
        reports += counts.tolist()
        owners += [int(log.advertiser[here[0]])] * len(counts)
    if not reports:
        raise TrefoilError(
            f"no product of any advertiser has {least} conversions",
            "Use more data, or --scale.",
            kind=ErrorKind.TOO_FEW,
        )
    return (
        np.concatenate(rows),
        np.concatenate(queries),
        np.asarray(owners, dtype=np.int64),
        np.asarray(reports, dtype=np.int64),
    )


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

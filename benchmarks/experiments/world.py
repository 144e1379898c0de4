"""A world to measure: impressions, conversions and queries as columns, their batches, and the epochs of each window.

An *owner* is one (person, advertiser) pair. Privacy filters belong to an owner, and an advertiser's impressions are
relevant to all of that advertiser's conversions, so owners are independent. Budgets are integers: micros, never floats.

Batches fill in time order, with at most one conversion per person in each. Impressions are grouped into *runs*, one per
owner and epoch with any. The window [t − W, t], both ends included, is a contiguous range of an owner's impressions;
every run that it touches is a relevant epoch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from protocol import units
from protocol.errors import ErrorKind, TrefoilError
from protocol.units import DAY, entitlement

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]


def starts_of(groups: Ints, count: int) -> Ints:
    """Return where each of `count` groups begins in a column sorted by group, with the end appended (CSR offsets)."""
    return np.searchsorted(groups, np.arange(count + 1, dtype=np.int64)).astype(np.int64)


def stable_order(keys: Ints) -> Ints:
    """Return the stable order that sorts `keys`: `argsort(kind="stable")`, several times faster.

    Key and row number are packed into one integer and sorted by value, where that fits 63 bits.
    """
    count = len(keys)
    if count == 0:
        return np.zeros(0, dtype=np.int64)
    bits = count.bit_length()
    base = int(keys.min())
    if (int(keys.max()) - base) >> (62 - bits):
        return np.argsort(keys, kind="stable")
    packed = ((keys - base) << bits) | np.arange(count, dtype=np.int64)
    packed.sort()
    packed &= (1 << bits) - 1
    return packed


def expand(counts: Ints) -> tuple[Ints, Ints]:
    """Return for each of `counts[i]` repetitions of i: i itself, and which repetition it is."""
    which = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
    before = np.cumsum(counts) - counts
    return which, np.arange(len(which), dtype=np.int64) - before[which]


def first_of_runs(*columns: Ints) -> Flags:
    """Return where a row differs from the row above it in any column."""
    changes = [column[1:] != column[:-1] for column in columns]
    return np.append(np.True_, np.logical_or.reduce(changes))[: len(columns[0])]


LEFT_OUT = -1


def fill_batches(person: Ints, time: Ints, size: int, least: int) -> Ints:
    """Number the batch of each conversion, or LEFT_OUT: a person's second in a batch, and a last batch below `least`.

    A row belongs to the batch that starts at s (in time order) if its person was last seen before s; that makes each
    batch one cumulative sum instead of a walk with a set of people seen.
    """
    order = stable_order(time)
    before = _last_seen(person[order])
    batch = np.full(len(order), LEFT_OUT, dtype=np.int64)
    start = number = 0
    while start < len(order):
        taken = _next_batch(before, start, size)
        if len(taken) < min(size, least):
            break
        batch[order[taken]] = number
        number += 1
        # Short of the full size only at the end of the data.
        start = int(taken[-1]) + 1 if len(taken) == size else len(order)
    return batch


def fill_groups(group: Ints, person: Ints, time: Ints, size: int, least: int) -> tuple[Ints, Ints]:
    """Return the rows that are in a batch of their group, group by group, and the batch of each; all are numbered."""
    order = stable_order(group)
    edges = np.append(np.flatnonzero(first_of_runs(group[order])), len(order))
    batches = np.full(len(order), LEFT_OUT, dtype=np.int64)
    count = 0
    for low, high in pairwise(edges.tolist()):
        here = order[low:high]
        batch = fill_batches(person[here], time[here], size, least)
        batches[low:high] = np.where(batch == LEFT_OUT, LEFT_OUT, batch + count)
        count += int(batch.max(initial=LEFT_OUT)) + 1
    if count == 0:
        raise TrefoilError(
            f"no product has {min(size, least)} conversions of different people, so no batch is full",
            "Use more conversions, or smaller batches.",
            kind=ErrorKind.TOO_FEW,
        )
    kept = batches != LEFT_OUT
    return order[kept], batches[kept]


def _last_seen(person: Ints) -> Ints:
    """Return for each row in time order the latest earlier row of the same person, or -1."""
    by_person = stable_order(person)
    same = person[by_person[1:]] == person[by_person[:-1]]
    before = np.full(len(person), -1, dtype=np.int64)
    before[by_person[1:][same]] = by_person[:-1][same]
    return before


def _next_batch(before: Ints, start: int, size: int) -> Ints:
    """Return the first `size` rows from `start` on whose person is new to the batch, or as many as there are."""
    reach = size + size // 4 + 16
    while True:
        new = before[start : start + reach] < start
        taken = np.flatnonzero(new)[:size] + start
        if len(taken) == size or start + reach >= len(before):
            return taken
        reach *= 2


# Monday 2024-01-01 00:00 UTC: 7-day epochs are ISO weeks, and other lengths start on the same day as the artifact's.
ANCHOR = 1_704_067_200
# Sums and products of charges stay exact in 64 bits below this.
EXACT = 2**62


def check_scale(scale: float) -> None:
    """Reject a scale that is not above 0 and at most 1."""
    if not (0 < scale <= 1):
        raise TrefoilError(f"scale must be above 0 and at most 1, not {scale}", kind=ErrorKind.OUT_OF_RANGE)


@dataclass(frozen=True, slots=True)
class Epochs:
    """A grid of epochs: integer seconds, UTC, the start inside and the end outside."""

    seconds: int = 7 * DAY
    anchor: int = ANCHOR

    def of(self, times: Ints) -> Ints:
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
class EventTables:
    """Rows of impressions and conversions as columns, in any order; people, advertisers and products are numbered."""

    seen_person: Ints
    seen_time: Ints
    seen_advertiser: Ints
    person: Ints
    time: Ints
    advertiser: Ints
    product: Ints
    value: Ints

    @property
    def people(self) -> int:
        """Return one more than the largest number of a person."""
        return int(max(self.person.max(), self.seen_person.max(initial=0))) + 1


@dataclass(frozen=True, slots=True)
class QueryColumns:
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
    queries: QueryColumns
    cap: int
    window: int
    unit: int = 1
    buckets: int = 1
    # Batches are this fraction of the published size; errors are given for the published size.
    scale: float = 1.0

    def __post_init__(self) -> None:
        if self.owners <= 0 or len(self.conversions.owner) == 0:
            raise TrefoilError(
                "there is nothing to measure: no user has a conversion",
                "Use more users or a larger --scale.",
                kind=ErrorKind.TOO_FEW,
            )
        if self.window < 0 or self.cap <= 0 or self.buckets <= 0:
            raise TrefoilError("window, value cap and buckets must be positive", kind=ErrorKind.OUT_OF_RANGE)
        self._check_queries()
        self._check_order()

    def _check_queries(self) -> None:
        for micros in (int(self.queries.epsilon.min()), int(self.queries.epsilon.max())):
            units.validate_terms(micros, self.cap)
        if int(self.conversions.value.min()) < 0 or int(self.conversions.value.max()) > self.cap:
            raise TrefoilError(
                f"conversion values must lie between 0 and the cap, {self.cap} units", kind=ErrorKind.OUT_OF_RANGE
            )
        if int(self.queries.epsilon.max()) * 4 * self.cap >= EXACT:
            raise TrefoilError(
                "ε times the value cap is too large to count exactly in 64 bits",
                "Use a coarser unit.",
                kind=ErrorKind.TOO_LARGE,
            )

    def _check_order(self) -> None:
        for name, table in (("impressions", self.impressions), ("conversions", self.conversions)):
            later = table.time[1:] >= table.time[:-1]
            same = table.owner[1:] == table.owner[:-1]
            if np.any(table.owner[1:] < table.owner[:-1]) or np.any(same & ~later):
                raise TrefoilError(f"{name} must be sorted by owner and time", kind=ErrorKind.INCONSISTENT)
        if np.any(np.diff(self.conversion_starts) == 0):
            raise TrefoilError(
                "every owner must have a conversion; others hold no filter anyone asked for",
                kind=ErrorKind.INCONSISTENT,
            )

    @cached_property
    def conversion_starts(self) -> Ints:
        return starts_of(self.conversions.owner, self.owners)

    @cached_property
    def impression_starts(self) -> Ints:
        return starts_of(self.impressions.owner, self.owners)

    @property
    def submitted(self) -> int:
        return len(self.queries.epsilon)

    def blocks(self, conversions: int) -> list[tuple[int, int]]:
        """Return ranges of owners with about `conversions` conversions each, so that memory stays flat."""
        cuts = np.searchsorted(self.conversion_starts, np.arange(0, len(self.conversions.owner), conversions))
        edges = np.unique(np.append(cuts, self.owners)).tolist()
        edges = edges if edges[0] == 0 else [0, *edges]
        return list(pairwise(edges))

    def part(self, first: int, last: int) -> World:
        """Return the owners first to last - 1 as a world of their own; columns are views, not copies."""
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
    queries: QueryColumns,
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


def world_of_batches(
    tables: EventTables, rows: Ints, query: Ints, epsilon: Ints, *, cap: int, window: int, unit: int, scale: float = 1.0
) -> World:
    """Return the world of the conversions `rows`, each in its `query`, and of the impressions of the same owners."""
    people = tables.people
    owners, owner = renumber(tables.advertiser[rows] * people + tables.person[rows])
    # A table lookup leaves few enough impressions to search for.
    converts = np.zeros(people, dtype=np.bool_)
    converts[tables.person[rows]] = True
    seen = np.flatnonzero(converts[tables.seen_person])
    relevant, place = keep_known(tables.seen_advertiser[seen] * people + tables.seen_person[seen], owners)
    advertiser = np.zeros(len(epsilon), dtype=np.int64)
    advertiser[query] = tables.advertiser[rows]
    return assemble(
        impressions=(place[relevant], tables.seen_time[seen[relevant]]),
        conversions=(owner, tables.time[rows], tables.value[rows], query),
        owner_advertiser=owners // people,
        queries=QueryColumns(epsilon, advertiser),
        cap=cap,
        window=window,
        unit=unit,
        scale=scale,
    )


def _by_owner_and_time(owner: Ints, time: Ints) -> Ints:
    """Return the stable order by owner, then time: one sort of a combined key, half the cost of sorting twice."""
    if len(owner) == 0:
        return owner
    base = int(time.min())
    stride = int(time.max()) - base + 1
    if int(owner.max()) * stride >= EXACT:
        raise TrefoilError("times and owners are too far apart to sort exactly in 64 bits", kind=ErrorKind.TOO_LARGE)
    return stable_order(owner * stride + (time - base))


def renumber(keys: Ints) -> tuple[Ints, Ints]:
    """Return the distinct keys in rising order, and each row's place among them."""
    distinct, places = np.unique(keys, return_inverse=True)
    return distinct, places.astype(np.int64)


def keep_known(keys: Ints, distinct: Ints) -> tuple[Flags, Ints]:
    """Return which keys are among `distinct` (rising), and their places there (meaningless where not)."""
    places = np.searchsorted(distinct, keys)
    places[places == len(distinct)] = 0
    return distinct[places] == keys, places.astype(np.int64)


@dataclass(frozen=True, slots=True)
class Matches:
    """Per conversion: its window's first and last epoch, and the runs of impressions inside the window."""

    epochs: Epochs
    first_epoch: Ints
    last_epoch: Ints
    first_run: Ints
    runs: Ints
    newest: Ints
    run_epoch: Ints
    run_end: Ints

    @property
    def attributed(self) -> Flags:
        """Return the conversions with at least one relevant impression, budgets aside."""
        nonempty: Flags = self.runs > 0
        return nonempty

    @property
    def single_epoch(self) -> Flags:
        """Return which windows have one epoch (Thm 4, case 2): decided by the window, never by the data."""
        same: Flags = self.first_epoch == self.last_epoch
        return same

    def relevant_epochs(self) -> tuple[Ints, Ints, Ints]:
        """Return every (conversion, relevant epoch), oldest epoch first: conversion, epoch and run."""
        conversion, step = expand(self.runs)
        run = self.first_run[conversion] + step
        return conversion, self.run_epoch[run], run

    def requested_epochs(self) -> tuple[Ints, Ints]:
        """Return every (conversion, epoch of its window), oldest epoch first."""
        conversion, step = expand(self.last_epoch - self.first_epoch + 1)
        return conversion, self.first_epoch[conversion] + step


def match(world: World, epochs: Epochs) -> Matches:
    """Find each conversion's window, epochs and relevant impressions, by binary search in sorted columns."""
    times = world.conversions.time
    low, high = _stretches(world)
    nonempty = high > low
    run_of, run_epoch, run_end = _runs(world, epochs)
    first_run = np.zeros(len(times), dtype=np.int64)
    runs = np.zeros(len(times), dtype=np.int64)
    first_run[nonempty] = run_of[low[nonempty]]
    runs[nonempty] = run_of[high[nonempty] - 1] - first_run[nonempty] + 1
    return Matches(
        epochs=epochs,
        first_epoch=epochs.of(times - world.window),
        last_epoch=epochs.of(times),
        first_run=first_run,
        runs=runs,
        newest=high - 1,
        run_epoch=run_epoch,
        run_end=run_end,
    )


def _stretches(world: World) -> tuple[Ints, Ints]:
    """Return for each conversion the impressions [low, high) of its owner that lie in its window."""
    seen, done = world.impressions, world.conversions
    low = np.zeros(len(done.time), dtype=np.int64)
    high = np.zeros(len(done.time), dtype=np.int64)
    if len(seen.time) == 0:
        return low, high
    # Most people see no advertisement at all in the large worlds; only the others are searched for.
    exposed = np.flatnonzero(np.diff(world.impression_starts)[done.owner])
    base = min(int(seen.time.min()), int(done.time.min()) - world.window)
    stride = max(int(seen.time.max()), int(done.time.max())) - base + 1
    keys = seen.owner * stride + (seen.time - base)
    end = done.owner[exposed] * stride + (done.time[exposed] - base)
    low[exposed] = np.searchsorted(keys, end - world.window, side="left")
    high[exposed] = np.searchsorted(keys, end, side="right")
    return low, high


def _runs(world: World, epochs: Epochs) -> tuple[Ints, Ints, Ints]:
    """Return the run of each impression, each run's epoch, and each run's last impression."""
    epoch = epochs.of(world.impressions.time)
    first = first_of_runs(world.impressions.owner, epoch)
    starts = np.flatnonzero(first)
    run_of = np.cumsum(first).astype(np.int64) - 1
    ends = np.append(starts[1:], len(epoch)) - 1
    return run_of, epoch[starts], ends.astype(np.int64)


# Every experiment asks for an error within 5 % with probability 99 %.
ALPHA = 0.05
BETA = 0.01


def query_epsilon(cap: float, expected: float) -> int:
    """Return ε = Δ·ln(1/β)/(α·B·c̃) in micros, rounded down; `expected` is B·c̃, the rough size of the answer."""
    return entitlement(cap * math.log(1 / BETA) / (ALPHA * expected))

"""Which conversion goes into which query: batches in time order, at most one conversion per person in each."""

from __future__ import annotations

import numpy as np

from benchmarks.experiments.columns import Ints, stable_order

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


def _last_seen(person: Ints) -> Ints:
    """For each row in time order, the latest earlier row of the same person, or -1."""
    by_person = stable_order(person)
    same = person[by_person[1:]] == person[by_person[:-1]]
    before = np.full(len(person), -1, dtype=np.int64)
    before[by_person[1:][same]] = by_person[:-1][same]
    return before


def _next_batch(before: Ints, start: int, size: int) -> Ints:
    """The first `size` rows from `start` on whose person is new to the batch, or as many as there are."""
    reach = size + size // 4 + 16
    while True:
        new = before[start : start + reach] < start
        taken = np.flatnonzero(new)[:size] + start
        if len(taken) == size or start + reach >= len(before):
            return taken
        reach *= 2

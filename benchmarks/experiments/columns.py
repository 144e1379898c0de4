"""The column types the simulation is written in. Budgets are integers throughout: micros, never floats."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]


def starts_of(groups: Ints, count: int) -> Ints:
    """Where each of `count` groups begins in a column sorted by group, with the end appended (CSR offsets)."""
    return np.searchsorted(groups, np.arange(count + 1, dtype=np.int64)).astype(np.int64)


def stable_order(keys: Ints) -> Ints:
    """The order that sorts `keys`, equal keys as they stand: `argsort(kind="stable")`, several times faster.

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
    """For each of `counts[i]` repetitions of i: i itself, and which repetition it is."""
    which = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
    before = np.cumsum(counts) - counts
    return which, np.arange(len(which), dtype=np.int64) - before[which]


def first_of_runs(*columns: Ints) -> Flags:
    """Where a row differs from the row above it in any column."""
    first = np.ones(len(columns[0]), dtype=np.bool_)
    if len(first):
        first[1:] = False
        for column in columns:
            first[1:] |= column[1:] != column[:-1]
    return first

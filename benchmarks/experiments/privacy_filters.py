"""Many privacy filters charged at once, exactly as if one charge came after the other.

Charges on one filter are sequential: each is paid if what remains covers it, and refused otherwise. Filters do not see
each other, so the k-th charges of all contested filters are decided together, in rounds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from benchmarks.experiments.columns import Flags, Ints, first_of_runs, stable_order


@dataclass(frozen=True, slots=True)
class Spending:
    """Which charges were paid (in the order given), and what each filter that was asked has paid in all."""

    paid: Flags
    filters: Ints
    totals: Ints


def spend(filters: Ints, amounts: Ints, capacity: int) -> Spending:
    """Charge `filters[i]` with `amounts[i]`, in rising i on each filter. Amounts are micros, zero or more."""
    if len(filters) == 0:
        return Spending(np.zeros(0, dtype=np.bool_), filters, amounts)
    order = stable_order(filters)
    sorted_filters, sorted_amounts = filters[order], amounts[order]
    starts = np.flatnonzero(first_of_runs(sorted_filters))
    asked = np.add.reduceat(sorted_amounts, starts)
    paid_sorted = np.ones(len(filters), dtype=np.bool_)
    counts = np.diff(np.append(starts, len(filters)))
    # A filter whose charges all fit together refuses none of them, whatever their order.
    contested = np.flatnonzero(asked > capacity)
    _rounds(sorted_amounts, starts[contested], counts[contested], capacity, paid_sorted)
    totals = np.add.reduceat(np.where(paid_sorted, sorted_amounts, 0), starts)
    paid = np.empty(len(filters), dtype=np.bool_)
    paid[order] = paid_sorted
    return Spending(paid, sorted_filters[starts], totals)


def _rounds(amounts: Ints, starts: Ints, counts: Ints, capacity: int, paid: Flags) -> None:
    """Decide the k-th charge of every contested filter, for k = 0, 1, ...; linear in the number of charges."""
    remaining = np.full(len(starts), capacity, dtype=np.int64)
    active = np.arange(len(starts))
    k = 0
    while len(active):
        charge = starts[active] + k
        covered = remaining[active] >= amounts[charge]
        paid[charge] = covered
        remaining[active] -= np.where(covered, amounts[charge], 0)
        k += 1
        active = active[counts[active] > k]


def spend_windows(first: Ints, last: Ints, amounts: Ints, starts: Ints, span: int, capacity: int) -> tuple[Flags, Ints]:
    """All-or-nothing charges: conversion i pays `amounts[i]` in each epoch first[i] to last[i], or nowhere.

    Conversions are grouped by owner (`starts`), in arrival order. The k-th conversions of all owners are decided
    together. Returns which were paid, and what every owner has paid in each of `span` epochs.
    """
    counts = np.diff(starts)
    consumed = np.zeros((len(counts), span), dtype=np.int64)
    paid = np.zeros(len(first), dtype=np.bool_)
    active = np.flatnonzero(counts)
    k = 0
    while len(active):
        conversion = starts[active] + k
        paid[conversion] = _pay_windows(
            consumed, active, first[conversion], last[conversion], amounts[conversion], capacity
        )
        k += 1
        active = active[counts[active] > k]
    return paid, consumed


def _pay_windows(consumed: Ints, owner: Ints, first: Ints, last: Ints, amounts: Ints, capacity: int) -> Flags:
    """One conversion of each owner: check every epoch of its window, then charge every one of them."""
    covered = np.ones(len(owner), dtype=np.bool_)
    width = int((last - first).max()) + 1
    for step in range(width):
        epoch = np.minimum(first + step, last)
        covered &= consumed[owner, epoch] + amounts <= capacity
    for step in range(width):
        here = np.flatnonzero(covered & (first + step <= last))
        consumed[owner[here], first[here] + step] += amounts[here]
    return covered

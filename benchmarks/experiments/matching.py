"""Which epochs a conversion asks for, and in which of them it finds relevant impressions.

Impressions are grouped into *runs*, one per owner and epoch with any. The window [t − W, t], both ends included, cuts
a contiguous stretch out of an owner's impressions; every run that stretch touches is a relevant epoch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from benchmarks.experiments.columns import Flags, Ints, expand, first_of_runs
from benchmarks.experiments.world import Epochs, World


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
        """Conversions with at least one relevant impression, budgets aside."""
        found: Flags = self.runs > 0
        return found

    @property
    def single_epoch(self) -> Flags:
        """Windows of one epoch (Thm 4, case 2): decided by the window, never by the data."""
        same: Flags = self.first_epoch == self.last_epoch
        return same

    def relevant_epochs(self) -> tuple[Ints, Ints, Ints]:
        """Every (conversion, relevant epoch), oldest epoch first: conversion, epoch and run."""
        conversion, step = expand(self.runs)
        run = self.first_run[conversion] + step
        return conversion, self.run_epoch[run], run

    def requested_epochs(self) -> tuple[Ints, Ints]:
        """Every (conversion, epoch of its window), oldest epoch first."""
        conversion, step = expand(self.last_epoch - self.first_epoch + 1)
        return conversion, self.first_epoch[conversion] + step


def match(world: World, epochs: Epochs) -> Matches:
    """Find each conversion's window, epochs and relevant impressions, by binary search in sorted columns."""
    times = world.conversions.time
    low, high = _stretches(world)
    found = high > low
    run_of, run_epoch, run_end = _runs(world, epochs)
    first_run = np.zeros(len(times), dtype=np.int64)
    runs = np.zeros(len(times), dtype=np.int64)
    first_run[found] = run_of[low[found]]
    runs[found] = run_of[high[found] - 1] - first_run[found] + 1
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
    """For each conversion, the impressions [low, high) of its owner that lie in its window."""
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
    """The run of each impression, each run's epoch, and each run's last impression."""
    epoch = epochs.of(world.impressions.time)
    first = first_of_runs(world.impressions.owner, epoch)
    starts = np.flatnonzero(first)
    run_of = np.cumsum(first).astype(np.int64) - 1
    ends = np.append(starts[1:], len(epoch)) - 1
    return run_of, epoch[starts], ends.astype(np.int64)

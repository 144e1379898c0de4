"""Run one experiment for many seeds at once, and the bands that their results span in figures.

Workers are forked, not spawned: an experiment may use functions and policies that a notebook defines, which no new
interpreter could import. A worker returns numbers only.
"""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import Any, NamedTuple, TypeVar

import numpy as np

from benchmarks.experiments.world import Floats
from protocol.errors import ErrorKind, TrefoilError

T = TypeVar("T")
# Conversions that are simulated at the same time, over all workers: about 2 GB.
MOST_AT_ONCE = 10_000_000
MOST_SEEDS = 1_000
LOW, HIGH = 0.05, 0.95
BAND = f"{LOW:.0%} to {HIGH:.0%}"

# In a worker: what it runs for each seed.
_task: Callable[[int], Any] | None = None


class Band(NamedTuple):
    """The median of several seeds' curves, and their quantiles at `LOW` and `HIGH`, point by point."""

    low: Floats
    middle: Floats
    high: Floats


def band_of(curves: Sequence[Floats]) -> Band:
    """Return the band of curves, one for each seed, each cut to the length of the shortest."""
    length = min(map(len, curves))
    return Band(*np.quantile(np.stack([curve[:length] for curve in curves]), [LOW, 0.5, HIGH], axis=0))


def check_seeds(seeds: int) -> None:
    """Reject a number of seeds that is not 1 to `MOST_SEEDS`."""
    if not 1 <= seeds <= MOST_SEEDS:
        raise TrefoilError(
            f"the number of seeds is 1 to {MOST_SEEDS}, not {seeds}", "20 make a band.", kind=ErrorKind.OUT_OF_RANGE
        )


def workers_for(seeds: int, conversions: int) -> int:
    """Return how many seeds to run at once: one a core, as long as memory is likely to suffice."""
    return max(1, min(seeds, os.cpu_count() or 1, MOST_AT_ONCE // max(1, conversions)))


def run_seeds(
    task: Callable[[int], T],
    seeds: Sequence[int],
    processes: int,
    advance: Callable[[int], None] = lambda _: None,
) -> list[T]:
    """Return `task(seed)` of each seed, in their order. `advance` gets 1 for each that is done."""
    results: dict[int, T] = {}
    if processes == 1 or len(seeds) == 1 or not sys.platform.startswith("linux"):
        # Elsewhere system libraries do not survive a fork.
        for seed in seeds:
            results[seed] = task(seed)
            advance(1)
        return list(results.values())
    with ProcessPoolExecutor(
        min(processes, len(seeds)), mp_context=get_context("fork"), initializer=_begin, initargs=(task,)
    ) as pool:
        try:
            with warnings.catch_warnings():
                # Python 3.12 warns of forks beside threads; ours only run numpy and devices.
                warnings.simplefilter("ignore", DeprecationWarning)
                futures = {pool.submit(_run, seed): seed for seed in seeds}
            for future in as_completed(futures):
                results[futures[future]] = future.result()
                advance(1)
        except BrokenProcessPool:
            raise TrefoilError(
                "a worker ended before its seed was done", "Use fewer processes at once.", kind=ErrorKind.ABORTED
            ) from None
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [results[seed] for seed in seeds]


def _begin(task: Callable[[int], Any]) -> None:
    global _task
    _task = task
    # Ctrl-C ends a worker without a traceback; the parent reports it.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _run(seed: int) -> Any:
    if _task is None:
        raise RuntimeError("the worker was not initialised")
    return _task(seed)

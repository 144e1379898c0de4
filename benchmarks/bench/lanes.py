"""Lanes: the same work in several processes at once, where nearly all of it is waiting."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import as_completed
from typing import TypeVar

from benchmarks.worker_pool import WorkerPool

A = TypeVar("A")
B = TypeVar("B")


def in_lanes(work: Callable[[A], B], tasks: Sequence[A], lanes: int) -> Iterator[tuple[A, B]]:
    """Every task with what came of it, as they are done. One lane is this process."""
    if lanes == 1:
        yield from ((task, work(task)) for task in tasks)
        return
    with WorkerPool(lanes) as pool:
        running = {pool.submit(work, task): task for task in tasks}
        try:
            for done in as_completed(running):
                yield running[done], done.result()
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise

"""Lanes: the same work in several processes at once, where nearly all of it is waiting."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import TypeVar

A = TypeVar("A")
B = TypeVar("B")


def in_lanes(work: Callable[[A], B], tasks: Sequence[A], lanes: int) -> Iterator[tuple[A, B]]:
    """Every task with what came of it, as they are done. One lane is this process."""
    if lanes == 1:
        yield from ((task, work(task)) for task in tasks)
        return
    with ProcessPoolExecutor(lanes, mp_context=get_context("spawn"), initializer=end_when_interrupted) as pool:
        running = {pool.submit(work, task): task for task in tasks}
        try:
            for done in as_completed(running):
                yield running[done], done.result()
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def end_when_interrupted() -> None:
    """Ctrl-C reaches every process of a run; only the first has something to say about it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)

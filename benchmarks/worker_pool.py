"""A pool of worker processes of which none has anything to say about Ctrl-C: the command that started them does."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class WorkerPool(ProcessPoolExecutor):
    """Ctrl-C reaches every process of a run. Workers end at once, without a traceback, also while they start."""

    def __init__(self, processes: int) -> None:
        super().__init__(processes, mp_context=get_context("spawn"), initializer=_end_when_interrupted)

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run it in a worker. The first calls start the workers."""
        with _interrupts_held():
            return super().submit(fn, *args, **kwargs)


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """SIGINT waits until the block ends. A process that is started inside is born with it blocked, and so imports in
    peace; an interruption of the block itself comes right after it.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_when_interrupted() -> None:
    """Run by a worker when it has imported everything. A SIGINT that came meanwhile ends it here."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

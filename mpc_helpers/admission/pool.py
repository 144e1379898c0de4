"""The processes in which a helper opens reports. They end with their daemon, and are replaced when one is killed."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

T = TypeVar("T")

# From <malloc.h>.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def keep_freed_memory() -> None:
    """Let this process keep what it frees: the next chunk needs as much again.

    Otherwise glibc gives megabytes back after every chunk, and getting them again, page by page, costs more than
    summing: at 1,024 buckets about a fifth of an open. Elsewhere than on glibc nothing is done.
    """
    with contextlib.suppress(OSError, AttributeError):
        change = ctypes.CDLL(None).mallopt
        change(_M_MMAP_THRESHOLD, 2**26)
        change(_M_TRIM_THRESHOLD, 2**28)


def _begin() -> None:
    """Run first in every process of the pool."""
    keep_freed_memory()
    _end_with_parent()


def _end_with_parent() -> None:
    """A daemon that is killed leaves nothing behind."""
    # Ctrl-C goes to the whole group; the daemon decides when its pool ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()

    def wait() -> None:
        if parent is not None:
            parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


class Pool(Executor):
    """A process pool that survives the death of a process: the work at hand fails, the next finds a new pool.

    With `processes` = 0 everything runs in one thread, which is what small helpers and tests want.
    """

    def __init__(self, processes: int) -> None:
        self.processes = processes
        self._lock = threading.Lock()
        self._pool: Executor | None = None

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """See `Executor.submit`."""
        with self._lock:
            if self._pool is None:
                self._pool = self._start()
            try:
                return self._pool.submit(fn, *args, **kwargs)
            except BrokenProcessPool:
                self._pool.shutdown(wait=False)
                self._pool = self._start()
                return self._pool.submit(fn, *args, **kwargs)

    def warm_up(self) -> None:
        """Start the processes before the first query needs them; does not wait."""
        for _ in range(self.processes):
            self.submit(os.getpid)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """See `Executor.shutdown`."""
        with self._lock:
            if self._pool is not None:
                self._pool.shutdown(wait=wait, cancel_futures=cancel_futures)
                self._pool = None

    def _start(self) -> Executor:
        if not self.processes:
            return ThreadPoolExecutor(1, thread_name_prefix="admit")
        # Not fork: the daemon has threads, and a forked child could inherit a lock that nobody will ever release.
        context = multiprocessing.get_context("spawn")
        return ProcessPoolExecutor(self.processes, mp_context=context, initializer=_begin)

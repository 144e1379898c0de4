"""Workers of a benchmark: Ctrl-C is the command's business, from the moment at which they are born."""

from __future__ import annotations

import multiprocessing.popen_spawn_posix
import signal
from typing import Any

import pytest

from benchmarks.worker_pool import WorkerPool


def test_workers_are_born_with_interrupts_blocked_and_end_at_one_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a worker imports, Python would answer Ctrl-C with a traceback. It is born with its parent's mask."""
    born: list[set[int]] = []
    ordinary: Any = multiprocessing.popen_spawn_posix.util.spawnv_passfds  # type: ignore[attr-defined] # Python's own

    def noted(path: Any, arguments: Any, handles: Any) -> Any:
        if not any("resource_tracker" in str(each) for each in arguments):
            born.append(set(signal.pthread_sigmask(signal.SIG_BLOCK, ())))
        return ordinary(path, arguments, handles)

    monkeypatch.setattr(multiprocessing.popen_spawn_posix.util, "spawnv_passfds", noted)  # type: ignore[attr-defined]
    with WorkerPool(1) as pool:
        handler = pool.submit(signal.getsignal, signal.SIGINT)
        blocked = pool.submit(signal.pthread_sigmask, signal.SIG_BLOCK, ())
        assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
        assert handler.result(60) is signal.SIG_DFL and signal.SIGINT not in blocked.result(60)
    assert len(born) == 1 and signal.SIGINT in born[0]

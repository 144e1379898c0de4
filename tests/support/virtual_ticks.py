"""Ticks on a clock of the tests' own: turns, slots and leaving as on a device, but no machine is too busy for them.

A real tick gives a null report when a machine is too slow, which is right on a device and says nothing in a test of
something else.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from device.limits import DeviceLimits
from device.tick import Ticks

T = TypeVar("T")


class VirtualTime:
    """Moves when someone waits, or works."""

    def __init__(self) -> None:
        self.now = 100.013
        self._mutex = threading.Lock()

    def __call__(self) -> float:
        return self.now

    def wait(self, moment: float) -> None:
        with self._mutex:
            self.now = max(self.now, moment)


def at_once(work: Callable[[], T], /) -> Future[T]:
    """A worker that is done before anyone waits for it, however long that takes."""
    done: Future[T] = Future()
    done.set_result(work())
    return done


class OwnSlot:
    """The same for several threads: one works at a time, and none is late because another had to wait."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()

    def __call__(self, work: Callable[[], T], /) -> Future[T]:
        with self._mutex:
            return at_once(work)


def virtual_ticks() -> Ticks:
    """For a device of the default limits. Callers that come together may find the clock moved, and begin too late.

    So each thread has a clock of its own.
    """
    times = threading.local()

    def own() -> VirtualTime:
        if not hasattr(times, "own"):
            times.own = VirtualTime()
        found: VirtualTime = times.own
        return found

    tick = DeviceLimits().tick_seconds
    return Ticks(tick, clock=lambda: own().now, wait=lambda moment: own().wait(moment), submit=OwnSlot())

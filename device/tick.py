"""The tick: a report leaves at a fixed time after it was asked for, so that how long it took says nothing.

Ticks are counted from the call, not from a clock that everyone shares: a caller who can choose when to ask could
otherwise ask just before a tick and see whether the work fitted.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

DEFAULT_PERIOD = 0.050


@dataclass(frozen=True, slots=True)
class Tick:
    """Holds every answer until a whole number of periods after its call. Clock and sleep are for tests."""

    period: float = DEFAULT_PERIOD
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def __call__(self) -> Callable[[], None]:
        """Start of a call; what it returns is run when the answer is ready, and comes back at the next tick."""
        asked = self.clock()

        def release() -> None:
            elapsed = self.clock() - asked
            due = asked + max(1, math.ceil(elapsed / self.period)) * self.period
            self.sleep(max(0.0, due - self.clock()))

        return release


def no_tick() -> Callable[[], None]:
    """For simulation, where nobody is watching the time."""
    return _at_once


def _at_once() -> None:
    return None

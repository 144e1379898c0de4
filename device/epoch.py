"""Epochs: the weeks of one device, in which it keeps its privacy filters.

An epoch is an index relative to a start that each device draws for itself, once, so that budgets do not come back
everywhere at the same moment. Everything is integer seconds since 1970, UTC: no calendar, no local time, no New Year.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import UTC, datetime

from protocol.seconds import HOUR


@dataclass(frozen=True, slots=True)
class EpochCalendar:
    """Which epoch a moment is in. Made by the device once its start is fixed; indices may be negative."""

    start: int
    length: int

    def index(self, moment: int) -> int:
        """The epoch of `moment`, rounding towards the past also before the start."""
        return (moment - self.start) // self.length

    def first_second(self, epoch: int) -> int:
        """Where `epoch` begins; it ends one second before the next begins."""
        return self.start + epoch * self.length

    def bounds(self, epoch: int) -> tuple[datetime, datetime]:
        """The first and the last second of `epoch`, for people."""
        first, after = self.first_second(epoch), self.first_second(epoch + 1)
        return datetime.fromtimestamp(first, UTC), datetime.fromtimestamp(after - 1, UTC)

    def dates(self, epoch: int) -> str:
        """The days on which `epoch` begins and ends, UTC. It begins on an hour, so neighbours can share a day."""
        first, last = self.bounds(epoch)
        return f"{first:%Y-%m-%d} to {last:%Y-%m-%d}"

    def window(self, earliest: int, latest: int) -> range:
        """Every epoch from the one of `earliest` to the one of `latest`."""
        return range(self.index(earliest), self.index(latest) + 1)


def draw_start(now: int, length: int, coin: float) -> int:
    """The start that a first lookup at `now` fixes: up to one epoch back, rounded down to the hour."""
    return math.floor((now - coin * length) / HOUR) * HOUR

"""Epochs: the weeks of one device, each with its own privacy filters; and the device's coins.

An epoch is an index relative to a start that each device draws for itself, once, so that budgets do not come back
everywhere at the same moment. Everything is integer seconds since 1970, UTC: no calendar, no local time, no New Year.
Coins are passed in, so that scenarios can fix them; by default they come from the operating system.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from protocol.units import HOUR


@dataclass(frozen=True, slots=True)
class EpochCalendar:
    """Maps moments to epochs. Made by the device once its start is fixed; indices may be negative."""

    start: int
    length: int

    def index(self, moment: int) -> int:
        """Return the epoch of `moment`, rounding towards the past also before the start."""
        return (moment - self.start) // self.length

    def first_second(self, epoch: int) -> int:
        """Return where `epoch` begins; it ends one second before the next begins."""
        return self.start + epoch * self.length

    def bounds(self, epoch: int) -> tuple[datetime, datetime]:
        """Return the first and the last second of `epoch`, for people."""
        first, after = self.first_second(epoch), self.first_second(epoch + 1)
        return datetime.fromtimestamp(first, UTC), datetime.fromtimestamp(after - 1, UTC)

    def dates(self, epoch: int) -> str:
        """Return the days on which `epoch` begins and ends, UTC. It begins on any hour: neighbours can share a day."""
        first, last = self.bounds(epoch)
        return f"{first:%Y-%m-%d} to {last:%Y-%m-%d}"

    def window(self, earliest: int, latest: int) -> range:
        """Return every epoch from the one of `earliest` to the one of `latest`."""
        return range(self.index(earliest), self.index(latest) + 1)


def draw_start(now: int, length: int, coin: float) -> int:
    """Return the start that a first lookup at `now` fixes: up to one epoch back, rounded down to the hour."""
    return math.floor((now - coin * length) / HOUR) * HOUR


def fair_coin() -> float:
    """Return a number uniform in [0, 1), on the grid of 53-bit doubles."""
    return secrets.randbits(53) / 2**53


@dataclass(frozen=True, slots=True)
class DeviceCoins:
    """The sources of the start of epochs and of the rounding of credit. Both return numbers in [0, 1)."""

    epoch_start: Callable[[], float] = fair_coin
    credit: Callable[[], float] = fair_coin

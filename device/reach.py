"""Reach: which epochs a request asks for, and which of them may be used at all.

Nothing behind the barrier is usable, nothing out of everybody's reach is kept, and both stay so when the clock is set
back: what was deleted lies behind a barrier that only moves forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from device.epoch import EpochCalendar, draw_start
from device.limits import DeviceLimits
from device.storage import Store


class Reach(NamedTuple):
    """What a request reaches: the epochs asked for, and those of them that may be used at all, earliest first."""

    calendar: EpochCalendar
    window: Sequence[int]
    usable: Sequence[int]
    measuring: bool


class Weeks:
    """A device's epochs. All of it runs inside the store's transaction."""

    def __init__(self, store: Store, limits: DeviceLimits, start_coin: Callable[[], float]) -> None:
        self._store = store
        self._limits = limits
        self._start_coin = start_coin
        # Up to which moment the store was pruned, as far as this object knows.
        self._pruned: int | None = None

    def known(self) -> EpochCalendar | None:
        """The epochs, if it was ever decided where they start."""
        start = self._store.epoch_start
        return None if start is None else EpochCalendar(start, self._limits.epoch_length)

    def calendar(self, now: int) -> EpochCalendar:
        """The epochs; the first lookup fixes where they start."""
        start = self._store.epoch_start
        if start is None:
            start = draw_start(now, self._limits.epoch_length, self._start_coin())
            self._store.fix_epoch_start(start)
        return EpochCalendar(start, self._limits.epoch_length)

    def usable(self, calendar: EpochCalendar, window: Sequence[int], now: int) -> Sequence[int]:
        """The epochs between the barrier and now. What lies below has lost its record of spending for ever."""
        barrier, current = self._store.barrier, calendar.index(now)
        closed = window[0] - 1 if barrier is None else calendar.index(barrier)
        return [epoch for epoch in window if closed < epoch <= current]

    def last_payment(self, now: int) -> int:
        """A moment of the last epoch that paid anything, which lies after `now` if the clock was set back."""
        paid = [epoch for ledger in self._store.filters().values() for epoch, _ in ledger.entries()]
        return self.calendar(now).first_second(max(paid)) if paid else now

    def close_unreachable(self, calendar: EpochCalendar, now: int) -> None:
        """Delete what is out of reach, behind a barrier: a clock set back must find no fresh budget."""
        first = calendar.index(now - self._limits.max_lookback)
        last_closed = calendar.first_second(first) - 1
        self._store.raise_barrier(last_closed)
        if self._pruned != last_closed and self._store.prune(first, last_closed + 1):
            self._pruned = last_closed

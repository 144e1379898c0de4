"""Ticks: when a call leaves is decided before anything is looked at, so that how long it took says nothing.

Calls of one caller on one site stand in one queue, saves and measurements alike, and each has a turn of a whole number
of ticks, counted from the moment of the call: a caller who can choose when to ask could otherwise ask just before the
tick of a clock that everyone shares, and see whether the work fitted. The tick is long enough for the most that a
device of these limits can hold. In its turn a call has a slot of the one worker to itself, and no slot reaches into the
time in which another call's report is sealed and leaves: how long the worker is busy would show there. Only when more
callers come within one tick than there are slots does one of them wait for another, for a whole tick. What is not ready
at the end of its turn is left without: the caller gets what it would get for nothing, and the worker goes on to pay.

A processor that has worked is some millionths of a second quicker or slower than one that has slept, whatever we do. So
a call leaves up to a thousandth of a second after its turn, by coins of its own: what is left shows in averages of very
many calls alone.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar
from weakref import WeakValueDictionary

from device.coins import fair_coin

T = TypeVar("T")

# Between the beginning of a turn and its work: the turn before leaves in this time, and must not be disturbed.
GUARD = 0.002
# How much later than its turn's end a call leaves at most; within the guard.
LEAVES_WITHIN = 0.001
# Between the work and the end of a turn: there the report is shared and sealed, which takes as long for any numbers.
MARGIN = 0.010
# The last part of a wait is spent awake: a processor that has been idle takes longer to come back than a busy one.
_AWAKE = 0.001


class Turn(Protocol):
    """One call's time. Made by `Ticker.turn`."""

    def run(self, work: Callable[[], T], late: T) -> T:
        """What `work` gives, or `late` if it is not ready in time; then `work` goes on, and what it gives is lost."""
        ...


class Submit(Protocol):
    """Has work done by someone else, later or at once."""

    def __call__(self, work: Callable[[], T], /) -> Future[T]: ...


class Ticker(Protocol):
    """Gives turns to calls."""

    def now(self) -> float:
        """The moment of a call. Taken before all else, so that no part of the call is outside its turn."""
        ...

    def turn(self, queue: Hashable, work: float, came: float) -> AbstractContextManager[Turn]:
        """A turn in `queue` for `work` seconds at most, of a call that came at `came`. Leaving it waits for its end."""
        ...


def wait_until(moment: float) -> None:
    """Come back at `moment` of the monotonic clock, to some microseconds."""
    asleep = moment - time.monotonic() - _AWAKE
    if asleep > 0:
        time.sleep(asleep)
    while time.monotonic() < moment:
        # Lets others run in between: several may be waiting for the same moment.
        time.sleep(0)


def random_delay() -> float:
    """The sum of two coins: no sharp edge, at which even a small shift would show."""
    return LEAVES_WITHIN * (fair_coin() + fair_coin()) / 2


class _Queue:
    """Calls that follow one another, and when the last of them leaves. Forgotten when nobody stands in it."""

    __slots__ = ("__weakref__", "ends", "lock")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.ends = -math.inf


class Ticks:
    """Turns of whole `tick`s, with one worker. Clock, waiting, delay and worker are for tests."""

    def __init__(
        self,
        tick: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], None] = wait_until,
        delay: Callable[[], float] = random_delay,
        submit: Submit | None = None,
    ) -> None:
        self.tick = tick
        self._clock = clock
        self._wait = wait
        self._delay = delay
        self._submit: Submit = submit or ThreadPoolExecutor(1, thread_name_prefix="device").submit
        self._queues: WeakValueDictionary[Hashable, _Queue] = WeakValueDictionary()
        self._mutex = threading.Lock()
        self._worker_is_free = -math.inf
        # When calls leave that have not left yet, earliest first.
        self._leaving: list[float] = []

    def now(self) -> float:
        return self._clock()

    @contextmanager
    def turn(self, queue: Hashable, work: float, came: float) -> Iterator[Turn]:
        with self._mutex:
            mine = self._queues.setdefault(queue, _Queue())
        with mine.lock:
            # From where the turn before was to end, not from when it did: else what delays one would add up.
            begins, mine.ends = self._reserve(max(came, mine.ends), work)
            leaves = mine.ends + self._delay()
            self._wait(begins)
            yield _Turn(self, mine.ends - MARGIN)
            self._wait(leaves)

    def _reserve(self, turn: float, work: float) -> tuple[float, float]:
        """When the work of a turn begins and the turn ends: from what is reserved, never from what is done."""
        with self._mutex:
            begins = max(turn + GUARD, self._worker_is_free)
            for leaves in self._leaving:
                # The slot ends before that call is sealed, or begins when it has gone.
                if begins < leaves + GUARD and leaves - MARGIN < begins + work:
                    begins = leaves + GUARD
            self._worker_is_free = begins + work
            ends = turn + math.ceil((begins + work + MARGIN - turn) / self.tick) * self.tick
            # Later than every slot so far, so that no slot reaches into this one's leaving either.
            self._leaving = sorted([*(leaves for leaves in self._leaving if leaves > turn), ends])
        return begins, ends


@dataclass(frozen=True, slots=True)
class _Turn:
    """A turn with a slot of the worker, whose work must be done by `due`."""

    ticks: Ticks
    due: float

    def run(self, work: Callable[[], T], late: T) -> T:
        ticks = self.ticks

        def begin() -> T:
            # Not begun in time, it is not begun at all: then nothing was looked at.
            return late if ticks._clock() >= self.due else work()

        done: Future[T] = ticks._submit(begin)
        # Not until it is done: the caller must not be awake earlier for less work.
        ticks._wait(self.due)
        return done.result() if done.done() else late


class AtOnce:
    """For simulation, where nobody is watching the time."""

    def now(self) -> float:
        return 0.0

    @contextmanager
    def turn(self, queue: Hashable, work: float, came: float) -> Iterator[Turn]:  # noqa: ARG002 - the protocol's shape
        yield self

    def run(self, work: Callable[[], T], late: T) -> T:  # noqa: ARG002 - the protocol's shape
        return work()

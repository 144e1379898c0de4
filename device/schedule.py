"""When a call is worked on and when it is answered, so that a caller's latency is a function of its own calls alone.

A caller's own thread does what depends on its arguments alone: it validates them and seals a null report of the
requested shape. Everything that reads the person's data is a job of one worker thread. A save or an error returns
`SOON` after its call. A measurement returns a fixed delay after its call, with what is ready by then: the worker's
report, or the null report. The caller sleeps until then and is never woken by the worker. A job that has begun is
finished and paid for, also when its report is too late; one that cannot begin in time is dropped before it reads
anything.

A caller that has made `BURST` calls in a row makes the next ones one `INTERVAL` apart: what is earlier is answered as
if it had come then. So a thread that never pauses takes a bounded part of the interpreter, and delays itself.

The worker takes jobs in the order of calls, so that a conversion sees every earlier save. When the oldest has waited
for nearly half the delay there is a flood: then the site that was served least recently is next, and on it one caller
after another, so that a flood delays the flooder.

Threads of one process share an interpreter, and processes a processor: a sleeper may wake up late while others work. So
each answer leaves later still, by coins of its own: a report up to `SPREAD`, a save or an error up to `SOON_SPREAD`.
And where processes compete, one that has computed for longer wakes up later. So every measurement takes a multiple of
the same processor time: what its work leaves of that, the worker computes for nothing when no job waits. What is in
memory before the first device is not looked through again for garbage: some measurements would take twice as long.
"""

from __future__ import annotations

import atexit
import gc
import hashlib
import logging
import math
import sqlite3
import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Generic, NamedTuple, TypeAlias, TypeVar
from weakref import WeakSet

from device.epoch import fair_coin
from device.limits import DeviceLimits

T = TypeVar("T")
_LOG = logging.getLogger(__name__)

# The longest random part of a report's delay. What a caller learns from a shift of its answers falls with the square of
# this, and a fifth more than a delay of a second is no burden.
SPREAD = 0.200
# What a save or an error takes, and the longest random part on top: long enough for its caller's work beside another's,
# and short for a page that saves many impressions.
SOON = 0.002
SOON_SPREAD = 0.006
# How long a thread that wakes up waits for another that computes, instead of Python's 5 ms.
SWITCH_INTERVAL = 0.0005
# How many calls one caller may make in a row, and how far apart the next ones are.
BURST = 100
INTERVAL = 0.1
# How many jobs of one caller may be pending: as many impressions as a week holds of one site. Further ones are dropped.
MAX_PENDING = 1000
# How many sites a backlog remembers to have served.
_REMEMBERED_SITES = 1000
# A measurement takes so many times what a fixed piece of work takes on this machine: twice the work of a full device,
# which took 32 times as long where both were measured.
YARDSTICKS = 70
# Most of a measurement's work is of this kind: rows that SQLite finds, sorts and returns.
_YARDSTICK = """
WITH RECURSIVE numbers (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < 1000)
SELECT n % 7, n, 'news' || n || '.example' FROM numbers ORDER BY 1, 2 DESC
"""
# What is hashed for nothing: enough that the interpreter's lock is released, and less than a millisecond.
_BLANK = bytes(2**18)
# How long closing, and whatever a person asks of their device, waits for pending jobs.
DRAIN_SECONDS = 10.0


class Caller(NamedTuple):
    """Who shares the worker fairly: a top-level site, and on it the intermediary or the site itself."""

    site: str
    caller: str


class AtOnce:
    """The schedule of simulations: every call runs in its caller's thread, and its duration is not hidden."""

    def now(self) -> float:
        return 0.0

    def save(self, caller: Caller, work: Callable[[], object]) -> bool:  # noqa: ARG002 - as `Delayed`
        work()
        return True

    def measure(self, caller: Caller, came: float, work: Callable[[], T], fallback: Callable[[], T]) -> T:  # noqa: ARG002
        return work()

    def arrival(self, caller: Caller, came: float) -> float:  # noqa: ARG002 - as `Delayed`
        return came

    def leaves_soon(self, came: float) -> float:
        return came

    def wait_until(self, moment: float) -> None:
        """Do nothing: durations are not hidden."""

    def every(self, seconds: float, work: Callable[[], object]) -> None:
        """Do nothing: a simulation has no time of its own."""

    def drain(self, timeout: float = DRAIN_SECONDS) -> bool:  # noqa: ARG002 - as `Delayed`
        return True

    def close(self, timeout: float = DRAIN_SECONDS) -> None:
        """Do nothing: nothing is pending."""


@dataclass(eq=False, slots=True)
class Job:
    """A call that waits for the worker. It is dropped unless it begins before `begin_by`."""

    caller: Caller
    came: float
    run: Callable[[], object]
    begin_by: float = math.inf
    taken: bool = field(default=False, init=False)


class Backlog:
    """The jobs that wait, oldest first; or, once the oldest has waited for `patience`, least recently served first."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._by_age: deque[Job] = deque()
        # Dictionaries keep the order of insertion: a caller that had a turn is inserted again, at the end.
        self._by_site: dict[str, dict[str, deque[Job]]] = {}
        # How many jobs had been taken when a site was served last. Kept for a site without jobs too: in an overload the
        # same one would else come last every time, and never be served.
        self._served: OrderedDict[str, int] = OrderedDict()
        self._taken = 0
        self.pending: set[Job] = set()

    def put(self, job: Job) -> bool:
        """Append a job, or return False if its caller has too many."""
        site, caller = job.caller
        jobs = self._by_site.setdefault(site, {}).setdefault(caller, deque())
        if len(jobs) >= MAX_PENDING:
            return False
        jobs.append(job)
        self._by_age.append(job)
        self.pending.add(job)
        return True

    def take(self, now: float) -> Job | None:
        """Remove and return the next job, which is always its caller's oldest. It stays pending until it is done."""
        while self._by_age and self._by_age[0].taken:
            self._by_age.popleft()
        if not self._by_age:
            return None
        oldest = self._by_age[0]
        flooded = now - oldest.came >= self._patience
        # Popped, and inserted again at the end, behind those that wait for their turn.
        site = min(self._by_site, key=self._last_served) if flooded else oldest.caller.site
        callers = self._by_site.pop(site)
        name = next(iter(callers)) if flooded else oldest.caller.caller
        jobs = callers.pop(name)
        job = jobs.popleft()
        job.taken = True
        if now < job.begin_by:
            self._note_served(site)
        if jobs:
            callers[name] = jobs
        if callers:
            self._by_site[site] = callers
        return job

    def _last_served(self, site: str) -> int:
        return self._served.get(site, -1)

    def _note_served(self, site: str) -> None:
        self._served[site] = self._taken
        self._served.move_to_end(site)
        self._taken += 1
        if len(self._served) > _REMEMBERED_SITES:
            self._served.popitem(last=False)


class Buckets:
    """Every caller's token bucket: `BURST` calls at once, and then one in every `INTERVAL`."""

    def __init__(self) -> None:
        # When a caller's bucket is full again. From then on it is as if the caller had never called.
        # A plain dictionary would look for its first entry behind all that were deleted: longer after more callers.
        self._full_at: OrderedDict[Caller, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._full_at)

    def take(self, caller: Caller, now: float) -> float:
        """Take a token, and return when the call counts as made: now, or up to `BURST` intervals later."""
        self._forget_two(now)
        full_at = max(self._full_at.get(caller, now), now) + INTERVAL
        self._full_at[caller] = min(full_at, now + 2 * BURST * INTERVAL)
        return max(now, self._full_at[caller] - BURST * INTERVAL)

    def _forget_two(self, now: float) -> None:
        """Look at two callers in turn, and forget those with a full bucket: more than the one that a call adds.

        So only callers of the last seconds are remembered, and the work is the same for every call.
        """
        for caller in list(islice(self._full_at, 2)):
            self._full_at.move_to_end(caller)
            if self._full_at[caller] <= now:
                del self._full_at[caller]


class _Answer(Generic[T]):
    """Where the worker puts a report for a caller that sleeps. Without a repr: it would show a debug report."""

    __slots__ = ("value",)

    def __init__(self, value: T) -> None:
        self.value = value

    def settle(self, work: Callable[[], T]) -> None:
        self.value = work()


_open: WeakSet[Delayed] = WeakSet()


class Delayed:
    """The schedule of a real device: one worker, and answers `delay` seconds after their calls.

    A measurement begins at least `work` seconds before its answer is due. It takes a multiple of `processor` seconds of
    processor time, or, if that is 0, what it needs. Close it: its thread ends then. From here on the whole interpreter
    switches between threads more often, and keeps what the first device found in memory. Tests inject clocks, sleep and
    spread.
    """

    def __init__(
        self,
        delay: float,
        work: float,
        processor: float = 0.0,
        *,
        clock: Callable[[], float] = time.monotonic,
        processor_clock: Callable[[], float] = time.thread_time,
        sleep: Callable[[float], None] = time.sleep,
        spread: Callable[[], float] | None = None,
    ) -> None:
        self.delay = delay
        self.work = work
        self._processor = processor
        self._clock = clock
        self._processor_clock = processor_clock
        self._sleep = sleep
        self._spread = spread or random_spread
        self._backlog = Backlog((delay - work) / 2)
        self._buckets = Buckets()
        self._changed = threading.Condition()
        self._closing = False
        self._draining = 0
        # Processor seconds that earlier measurements took less than they should. The worker's own.
        self._owed = 0.0
        # What is done again and again, and when next.
        self._periodic: Callable[[], object] = _nothing
        self._period = self._due = math.inf
        sys.setswitchinterval(min(SWITCH_INTERVAL, sys.getswitchinterval()))
        if not gc.get_freeze_count():
            gc.collect()
            gc.freeze()
        # A daemon, so that a program may end without closing; `_close_all` then drains.
        self._thread = threading.Thread(target=self._run, name="device worker", daemon=True)
        self._thread.start()
        _open.add(self)

    @classmethod
    def within(cls, limits: DeviceLimits) -> Delayed:
        """Return the schedule of a device with these limits, whose measurements take longer on a slower machine."""
        processor = limits.processor_ms / 1000
        if processor:
            processor = max(processor, YARDSTICKS * min(yardstick() for _ in range(3)))
        return cls(limits.delay_ms / 1000, limits.work_ms / 1000, processor)

    def now(self) -> float:
        """Return the arrival time of a call. Read first, so that no part of the call lies outside its delay."""
        return self._clock()

    def save(self, caller: Caller, work: Callable[[], object]) -> bool:
        """Accept `work` after all earlier work of `caller`. Return False if it will never run."""
        return self._put(Job(caller, self._clock(), work))

    def measure(self, caller: Caller, came: float, work: Callable[[], T], fallback: Callable[[], T]) -> T:
        """Return the result of `work`, or that of `fallback` if it is not ready in time for a call made at `came`."""
        answer = _Answer(fallback())
        leaves = came + self.delay + self._spread()
        self._put(Job(caller, self._clock(), partial(answer.settle, work), came + self.delay - self.work))
        self.wait_until(leaves)
        return answer.value

    def arrival(self, caller: Caller, came: float) -> float:
        """Return when a call counts as made: at `came`, or later if `caller` has called too often."""
        with self._changed:
            return self._buckets.take(caller, came)

    def leaves_soon(self, came: float) -> float:
        """Return when a save or an error leaves."""
        return came + soon(self._spread())

    def wait_until(self, moment: float) -> None:
        """Sleep until an answer may leave."""
        # The worker may call, by a querier's function; it must not sleep.
        while (left := moment - self._clock()) > 0 and threading.current_thread() is not self._thread:
            self._sleep(left)

    def every(self, seconds: float, work: Callable[[], object]) -> None:
        """Run `work` on the worker, again and again, at least `seconds` apart."""
        with self._changed:
            self._periodic, self._period, self._due = work, seconds, self._clock() + seconds
            self._changed.notify_all()

    def _put(self, job: Job) -> bool:
        with self._changed:
            accepted = not self._closing and self._backlog.put(job)
            # Notified in any case: the same work for every call.
            self._changed.notify_all()
        return accepted

    def drain(self, timeout: float = DRAIN_SECONDS) -> bool:
        """Wait until all jobs accepted so far are done, and return whether they are."""
        if threading.current_thread() is self._thread:
            # A custom function that asks about the device it runs on: its own job would never be done.
            return False
        with self._changed:
            earlier = set(self._backlog.pending)
            self._draining += 1
            try:
                return self._changed.wait_for(lambda: earlier.isdisjoint(self._backlog.pending), timeout)
            finally:
                self._draining -= 1

    def close(self, timeout: float = DRAIN_SECONDS) -> None:
        """Accept no more, and drain."""
        deadline = time.monotonic() + timeout
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(max(0.0, deadline - time.monotonic()))
        with self._changed:
            lost = len(self._backlog.pending)
            # The worker stops after its current job, which still ends in one transaction or none.
            self._backlog = Backlog(0)
        if lost:
            _LOG.warning("%d pending calls of sites were dropped when this device was closed", lost)
        _open.discard(self)

    def _run(self) -> None:
        while (job := self._next()) is not None:
            if self._clock() < job.begin_by:
                began = self._processor_clock()
                _run_job(job)
                # A measurement: nothing else must begin in time, and a save's duration is not evened out.
                if job.begin_by < math.inf:
                    self._owe(self._processor_clock() - began)
            with self._changed:
                self._backlog.pending.discard(job)
                if self._draining:
                    self._changed.notify_all()

    def _owe(self, taken: float) -> None:
        """Owe the rest of a multiple of `processor`; after a flood no more than a delay's worth of it."""
        if self._processor:
            self._owed = min(self._owed + -taken % self._processor, self.delay)

    def _next(self) -> Job | None:
        """Wait for a job, and meanwhile compute what is owed. Return None when closed and nothing is pending."""
        while True:
            with self._changed:
                while (job := self._take()) is None and not self._closing and self._owed <= 0:
                    self._changed.wait(min(self._due - self._clock(), threading.TIMEOUT_MAX))
                if job is not None or self._closing:
                    return job
            began = self._processor_clock()
            _compute_for_nothing()
            self._owed -= self._processor_clock() - began

    def _take(self) -> Job | None:
        now = self._clock()
        if now < self._due:
            return self._backlog.take(now)
        self._due = now + self._period
        return Job(Caller("", ""), now, self._periodic)


# Decides when calls are worked on and answered.
Schedule: TypeAlias = AtOnce | Delayed


def _run_job(job: Job) -> None:
    """Run a job. Nothing that it raises ends the worker or reaches its caller, for whom the null report is ready."""
    try:
        job.run()
    except BaseException as fault:
        _LOG.error("a call could not be carried out: %s", type(fault).__name__)
    # The backlog may hold the job for longer, and a report must not stay in memory with it.
    job.run = _nothing


def _nothing() -> None:
    """Do nothing, in place of a job that is done."""


def _compute_for_nothing() -> None:
    """Use the processor without the interpreter's lock, so that no other thread waits for it."""
    hashlib.sha256(_BLANK)


def yardstick() -> float:
    """Return the processor seconds that a fixed piece of work takes here, whatever the device holds."""
    with closing(sqlite3.connect(":memory:")) as database:
        began = time.thread_time()
        database.execute(_YARDSTICK).fetchall()
        return time.thread_time() - began


def random_spread() -> float:
    """Return `SPREAD` times the mean of two coins: no sharp edge, at which even a small shift would show."""
    return SPREAD * (fair_coin() + fair_coin()) / 2


def soon(spread: float) -> float:
    """Return how long a save or an error takes, with the random part scaled down from that of a report."""
    return SOON + spread * SOON_SPREAD / SPREAD


@atexit.register
def _close_all() -> None:
    """Drain what a program left open when it ends."""
    for schedule in list(_open):
        schedule.close()

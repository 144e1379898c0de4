"""When a call is worked on and when it is answered, so that a caller's latency is a function of its own calls alone.

A caller's own thread does what depends on its arguments alone: it validates them and seals a null report of the
requested shape. Everything that reads the person's data is a job of one worker thread. A save returns at once. A
measurement returns a fixed delay after its call, with what is ready by then: the worker's report, or the null report.
The caller sleeps until then and is never woken by the worker. A job that has begun is finished and paid for, also when
its report is too late; one that cannot begin in time is dropped before it reads anything.

The worker takes jobs in the order of calls, so that a conversion sees every earlier save. When the oldest has waited
for half the delay there is a flood: then the site that was served least recently is next, and on it one caller after
another, so that a flood delays the flooder.

Threads of one process share an interpreter, and processes a processor: a sleeper may wake up some milliseconds late
while others work. So each answer leaves up to `SPREAD` later still, by coins of its own, and what returns at once, a
save or an error, up to `PAUSE` later.
"""

from __future__ import annotations

import atexit
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, Protocol, TypeVar
from weakref import WeakSet

from device.epoch import fair_coin

T = TypeVar("T")
_LOG = logging.getLogger(__name__)

# The longest random part of an answer's delay.
SPREAD = 0.020
# The longest random part of a save or an error: enough for what another call does to the processor's caches, and short
# for a page that saves many impressions.
PAUSE = 0.0005
# How many jobs of one caller may be pending: as many impressions as a week holds of one site. Further ones are dropped.
MAX_PENDING = 1000
# How many sites a backlog remembers to have served.
_REMEMBERED_SITES = 1000
# How long closing, and whatever a person asks of their device, waits for pending jobs.
DRAIN_SECONDS = 10.0


class Caller(NamedTuple):
    """Who shares the worker fairly: a top-level site, and on it the intermediary or the site itself."""

    site: str
    caller: str


class Schedule(Protocol):
    """Decides when calls are worked on and answered."""

    def now(self) -> float:
        """Return the arrival time of a call. Read first, so that no part of the call lies outside its delay."""
        ...

    def save(self, caller: Caller, work: Callable[[], object]) -> bool:
        """Accept `work` after all earlier work of `caller`. Return False if it will never run."""
        ...

    def measure(self, caller: Caller, came: float, work: Callable[[], T], fallback: Callable[[], T]) -> T:
        """Return the result of `work`, or that of `fallback` if it is not ready in time for a call made at `came`."""
        ...

    def pause(self) -> None:
        """Wait for the random part of what returns at once."""
        ...

    def drain(self, timeout: float = DRAIN_SECONDS) -> bool:
        """Wait until all jobs accepted so far are done, and return whether they are."""
        ...

    def close(self, timeout: float = DRAIN_SECONDS) -> None:
        """Drain, then accept no more."""
        ...


class AtOnce:
    """The schedule of simulations: every call runs in its caller's thread, and its duration is not hidden."""

    def now(self) -> float:
        return 0.0

    def save(self, caller: Caller, work: Callable[[], object]) -> bool:  # noqa: ARG002 - the protocol's shape
        work()
        return True

    def measure(self, caller: Caller, came: float, work: Callable[[], T], fallback: Callable[[], T]) -> T:  # noqa: ARG002
        return work()

    def pause(self) -> None:
        """Do nothing: durations are not hidden."""

    def drain(self, timeout: float = DRAIN_SECONDS) -> bool:  # noqa: ARG002 - the protocol's shape
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
        self._served: dict[str, int] = {}
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
        self._served.pop(site, None)
        self._served[site] = self._taken
        self._taken += 1
        if len(self._served) > _REMEMBERED_SITES:
            del self._served[next(iter(self._served))]


class _Answer(Generic[T]):
    """Where the worker puts a report for a caller that sleeps. Without a repr: it would show a debug report."""

    __slots__ = ("fault", "value")

    def __init__(self, value: T) -> None:
        self.value = value
        self.fault: BaseException | None = None


_open: WeakSet[Delayed] = WeakSet()


class Delayed:
    """The schedule of a real device: one worker, and answers `delay` seconds after their calls.

    A measurement begins at least `work` seconds before its answer is due. Close it: its thread ends then.
    Tests inject clock, sleep and spread.
    """

    def __init__(
        self,
        delay: float,
        work: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        spread: Callable[[], float] | None = None,
    ) -> None:
        self.delay = delay
        self.work = work
        self._clock = clock
        self._sleep = sleep
        self._spread = spread or random_spread
        self._backlog = Backlog((delay - work) / 2)
        self._changed = threading.Condition()
        self._closing = False
        self._draining = 0
        # A daemon, so that a program may end without closing; `_close_all` then drains.
        self._thread = threading.Thread(target=self._run, name="device worker", daemon=True)
        self._thread.start()
        _open.add(self)

    def now(self) -> float:
        return self._clock()

    def save(self, caller: Caller, work: Callable[[], object]) -> bool:
        return self._put(Job(caller, self._clock(), work))

    def measure(self, caller: Caller, came: float, work: Callable[[], T], fallback: Callable[[], T]) -> T:
        answer = _Answer(fallback())
        leaves = came + self.delay + self._spread()
        self._put(Job(caller, came, lambda: _settle(answer, work), came + self.delay - self.work))
        while (left := leaves - self._clock()) > 0:
            self._sleep(left)
        # Read once: the worker may still be writing.
        if (fault := answer.fault) is not None:
            raise fault
        return answer.value

    def pause(self) -> None:
        # The worker may call, by a querier's function; it must not sleep.
        if (seconds := self._spread() * PAUSE / SPREAD) > 0 and threading.current_thread() is not self._thread:
            self._sleep(seconds)

    def _put(self, job: Job) -> bool:
        with self._changed:
            accepted = not self._closing and self._backlog.put(job)
            # Notified in any case: the same work for every call.
            self._changed.notify_all()
        return accepted

    def drain(self, timeout: float = DRAIN_SECONDS) -> bool:
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
                _run_job(job)
            with self._changed:
                self._backlog.pending.discard(job)
                if self._draining:
                    self._changed.notify_all()

    def _next(self) -> Job | None:
        """Wait for a job. Return None when the schedule is closed and nothing is pending."""
        with self._changed:
            while (job := self._backlog.take(self._clock())) is None and not self._closing:
                self._changed.wait()
            return job


def _settle(answer: _Answer[T], work: Callable[[], T]) -> None:
    """Run by the worker: put the report where its caller will look. What ends a program is raised there, then."""
    try:
        answer.value = work()
    except Exception as error:
        _LOG.error("a report could not be sealed; a null report leaves instead: %s", type(error).__name__)
    except BaseException as fault:
        answer.fault = fault


def _run_job(job: Job) -> None:
    """Run a job; nothing that it raises ends the worker."""
    try:
        job.run()
    except BaseException as fault:
        _LOG.error("a call could not be applied: %s", type(fault).__name__)
    # The backlog may hold the job for longer, and a report must not stay in memory with it.
    job.run = _nothing


def _nothing() -> None:
    """Do nothing, in place of a job that is done."""


def random_spread() -> float:
    """Return the sum of two coins: a distribution without a sharp edge, at which even a small shift would show."""
    return SPREAD * (fair_coin() + fair_coin()) / 2


@atexit.register
def _close_all() -> None:
    """Drain what a program left open when it ends."""
    for schedule in list(_open):
        schedule.close()

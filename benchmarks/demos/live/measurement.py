"""The advertiser's side: a collector of reports, a simulated crowd, and queries to the three helpers.

Reports go through the code of `trefoil collect`. A query lets a crowd buy first, and takes all reports collected since
the last query as its batch. One job runs at a time, in the background. Each person of the crowd has a device of their
own, so that one person's click is hidden among theirs. Their events are drawn from a printed seed; shares and keys come
from the system.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from benchmarks.demos.live.web import BUCKETS, EPSILON, KAPPA, SHOP_SITE
from benchmarks.workloads.seeded import generator
from device.conversion import ConversionOptions
from device.device import Device
from device.events import ImpressionOptions
from device.limits import TREFOIL_SERVICE
from device.report import HelperSetSeal
from device.stores.memory_store import MemoryStore
from protocol.batch import BatchReader
from protocol.collector.batches import write_batch
from protocol.collector.limits import CollectorLimits, PostRefusal, ReportRefused
from protocol.collector.server import CollectorIntake
from protocol.collector.store import Receipt, ReportStore, StoreReader
from protocol.errors import ErrorKind, ProtocolError, TrefoilError
from protocol.helper_set import HelperSet
from protocol.keys import IdentityKey
from protocol.querier.ask import Querier
from protocol.querier.query_folder import ask_batch
from protocol.querier.result import QueryResult
from protocol.querier.saved_query import QueryOptions
from protocol.report import SealedReport
from protocol.status import QueryStatus
from protocol.units import DAY

# How many people buy before a query, by the positions of the slider; 0 asks about your own reports alone.
SIZES = (0, 50, 200, 500, 1_000, 2_000, 5_000)
# At this size the verdict names the best campaign in more than 99.9 % of draws (tests/benchmarks/test_live.py).
CROWD = 2_000
# How often each campaign is clicked, and how many people of a hundred buy without having clicked anything.
POPULARITY = (0.45, 0.1, 0.3, 0.15)
UNMOVED = 0.2
PUBLISHERS = ("news.example", "news.example", "blog.example", "blog.example")
OPTIONS = ConversionOptions(TREFOIL_SERVICE, BUCKETS, epsilon=EPSILON, kappa=KAPPA)


@dataclass(frozen=True, slots=True)
class Purchase:
    """One simulated purchase: the sealed report, and the campaign a tracker would have credited."""

    report: SealedReport
    credit: int | None


def crowd(people: int, helper_set: HelperSet, *, now: int, seed: int) -> Iterator[Purchase]:
    """Yield `people` purchases, each from a device of its own."""
    draw = generator(seed)
    for _ in range(people):
        clicks = 0 if draw.random() < UNMOVED else int(draw.integers(1, 4))
        campaigns = [int(campaign) for campaign in draw.choice(BUCKETS, size=clicks, p=POPULARITY)]
        days_ago = sorted((float(day) for day in draw.uniform(0.1, 20, size=clicks)), reverse=True)
        yield _purchase(campaigns, [now - int(day * DAY) for day in days_ago], helper_set, now)


def _purchase(campaigns: list[int], moments: list[int], helper_set: HelperSet, now: int) -> Purchase:
    """Simulate a person who clicks ads at these moments and buys now. The last click gets the credit."""
    clock = [*moments, now]
    device = Device(MemoryStore(debug=False), HelperSetSeal(helper_set), clock=lambda: clock[0])
    for campaign in campaigns:
        device.save_impression(PUBLISHERS[campaign], ImpressionOptions(campaign, conversion_sites=[SHOP_SITE]))
        clock.pop(0)
    report = device.measure_conversion(SHOP_SITE, OPTIONS)
    return Purchase(report, campaigns[-1] if campaigns else None)


# Time to ask again, under the same id, after a helper was away.
ASK_SECONDS = 600
# Of a crowd's reports, this many are posted at a time: a collector lets twice as many wait.
AT_ONCE = 200
Outcome = QueryResult | TrefoilError


@dataclass(slots=True)
class Batch:
    """Reports that are asked about together, by digest. `credited` is what a tracker knows of the same purchases."""

    number: int
    path: Path
    # The size of its crowd.
    people: int = 0
    credited: dict[bytes, int | None] = field(default_factory=dict)
    yours: list[bytes] = field(default_factory=list)
    outcome: Outcome | None = None
    replayed: Outcome | None = None


class Measurement:
    """Everything the advertiser has. The helpers decide what she learns."""

    def __init__(
        self, folder: Path, helper_set: HelperSet, key: IdentityKey, clock: Callable[[], int], seed: int
    ) -> None:
        self._folder = folder
        self._helper_set = helper_set
        self._key = key
        self._clock = clock
        self._seed = seed
        self._collected = folder / "collected"
        self._limits = CollectorLimits(
            sites=frozenset({SHOP_SITE}),
            helper_sets=frozenset({helper_set.digest}),
            per_second=5_000,
            burst=20_000,
            per_address=5_000,  # the whole crowd posts from this machine
        )
        self._intake: CollectorIntake | None = None
        self._writing = asyncio.Lock()
        # The job that runs in the background, named by its description.
        self._job: asyncio.Task[None] | None = None
        self.statuses: Mapping[int, QueryStatus] = {}
        # The crowd of the current question, if it has one, and how many of it have bought.
        self.crowd_size: int | None = None
        self.bought = 0
        self.batches = [Batch(1, folder / "batch-1")]

    @property
    def collecting(self) -> Batch:
        """The batch that new reports go to."""
        return self.batches[-1]

    @property
    def busy(self) -> str:
        """Return a description of the running job, or an empty string."""
        return "" if self._job is None or self._job.done() else self._job.get_name()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the collector for the duration of the block."""
        with ReportStore(self._collected, self._limits) as store:
            self._intake = CollectorIntake(store, self._limits, self._clock)
            writing = asyncio.create_task(self._intake.run())
            try:
                yield
            finally:
                await self.stop()
                writing.cancel()
                await asyncio.gather(writing, return_exceptions=True)
                self._intake = None

    async def collect(self, posted: bytes, credit: Callable[[], int | None]) -> bytes:
        """Store the posted report of one of your purchases; return its digest, or raise `ReportRefused`."""
        _check_kind(posted)
        async with self._writing:
            filed = await self._take(posted)
            if filed.new:
                self.collecting.credited[filed.digest] = credit()
                self.collecting.yours.append(filed.digest)
            return filed.digest

    def report(self, digest: bytes) -> SealedReport | None:
        """Return a collected report, still sealed; None if it is not kept."""
        with StoreReader(self._collected) as store:
            return store.report(digest)

    async def _take(self, posted: bytes) -> Receipt:
        if self._intake is None:
            raise TrefoilError(
                "the collector is not running", "Start the demonstration again.", kind=ErrorKind.UNAVAILABLE
            )
        return await self._intake.take(posted)

    def ask(self, people: int) -> None:
        """Start letting `people` simulated people buy, and then asking the helpers about all that was collected."""
        if not (people or self.collecting.credited):
            raise TrefoilError(
                "there is no report of yours that was not counted yet", "Buy shoes first.", kind=ErrorKind.UNKNOWN_NAME
            )
        text = f"Asking among {people:,} people" if people else "Asking about you alone"
        self._start(text, self._ask(people), people)

    def retry(self, number: int) -> None:
        """Start asking again about a batch whose query has failed."""
        batch = self._batch(number)
        self._start(f"Asking again about batch {number}", self._put(batch))

    def ask_again(self, number: int) -> None:
        """Start a new query on reports that were counted before."""
        batch = self._batch(number)
        self._start(f"Asking about the reports of batch {number} once more", self._replay(batch))

    async def stop(self) -> None:
        if self._job is not None:
            self._job.cancel()
            await asyncio.gather(self._job, return_exceptions=True)

    def _start(self, text: str, work: Coroutine[None, None, None], people: int | None = None) -> None:
        if self.busy:
            work.close()
            raise TrefoilError("one thing at a time", "Wait until the last one has ended.", kind=ErrorKind.BUSY)
        self.statuses, self.crowd_size, self.bought = {}, people, 0
        self._job = asyncio.get_running_loop().create_task(work, name=text)

    def _batch(self, number: int) -> Batch:
        match = next((batch for batch in self.batches if batch.number == number and batch.outcome is not None), None)
        if match is None:
            raise TrefoilError(
                f"nothing was asked about batch {number}", "Ask the helpers first.", kind=ErrorKind.UNKNOWN_NAME
            )
        return match

    async def _ask(self, people: int) -> None:
        batch = self.collecting
        async with self._writing:
            batch.people = people
            try:
                await self._add_crowd(batch, people)
            except TrefoilError as error:
                batch.outcome = error
            number = batch.number + 1
            self.batches.append(Batch(number, self._folder / f"batch-{number}"))
        if batch.outcome is None:
            await self._put(batch)

    async def _add_crowd(self, batch: Batch, people: int) -> None:
        self._seed += 1
        purchases = crowd(people, self._helper_set, now=self._clock(), seed=self._seed)
        while some := await asyncio.to_thread(_next, purchases):
            filed = await asyncio.gather(*(self._take(each.report.encode()) for each in some))
            for each, stored in zip(some, filed, strict=True):
                batch.credited[stored.digest] = each.credit
            self.bought += len(some)

    async def _put(self, batch: Batch) -> None:
        batch.outcome = await self._outcome(batch, again=False)

    async def _replay(self, batch: Batch) -> None:
        batch.replayed = await self._outcome(batch, again=True)

    async def _outcome(self, batch: Batch, *, again: bool) -> Outcome:
        try:
            reports = await asyncio.to_thread(self._batch_file, batch)
            wishes = QueryOptions(seconds=ASK_SECONDS)
            querier = Querier(self._helper_set)
            return await ask_batch(querier, reports, wishes, self._key, self._clock(), new=again, on_status=self._note)
        except TrefoilError as error:
            return error

    def _batch_file(self, batch: Batch) -> BatchReader:
        """Return the batch as a file, exported from the collector on its first query."""
        if not batch.path.exists():
            with StoreReader(self._collected) as store:
                shelves = [shelf.number for shelf in store.shelves()]
                write_batch(batch.path, (one for one in store.reports(shelves) if one.digest in batch.credited))
        return BatchReader(batch.path)

    def _note(self, statuses: Mapping[int, QueryStatus]) -> None:
        self.statuses = dict(statuses)


def _check_kind(posted: bytes) -> None:
    """Refuse a report of another kind: a batch has one. The collector itself refuses what is no report."""
    try:
        terms = SealedReport.decode(posted).terms()
    except ProtocolError:
        return
    if (terms.caller, terms.buckets, terms.kappa) != (terms.site, BUCKETS, KAPPA):
        raise ReportRefused(PostRefusal.MALFORMED, "this report is of another kind than the shop asked for")


def _next(bought: Iterator[Purchase]) -> list[Purchase]:
    return list(islice(bought, AT_ONCE))

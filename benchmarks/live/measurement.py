"""The advertiser's side: a collector that files reports, a crowd to hide in, and questions to the three helpers.

Reports go through the code of `trefoil collect`; a question takes what has been collected since the last one as its
batch. One job runs at a time, in the background; pages show how far it is.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from benchmarks.live.crowd import Purchase, crowd
from benchmarks.live.places import BUCKETS, KAPPA, SHOP_SITE
from protocol.batch import BatchReader
from protocol.collector.batches import write_batch
from protocol.collector.intake import CollectorIntake
from protocol.collector.limits import CollectorLimits, NotTaken, Refused
from protocol.collector.store import Filed, ReportStore, StoreReader
from protocol.errors import ProtocolError, TrefoilError
from protocol.helper_set import HelperSet
from protocol.keys import IdentityKey
from protocol.querier.ask import Querier
from protocol.querier.query_folder import ask_batch
from protocol.querier.saved_query import QueryOptions
from protocol.querier.worth import QueryResult
from protocol.report import SealedReport
from protocol.status import QueryStatus

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
    credited: dict[bytes, int | None] = field(default_factory=dict)
    yours: list[bytes] = field(default_factory=list)
    outcome: Outcome | None = None
    replayed: Outcome | None = None


@dataclass(frozen=True, slots=True)
class BackgroundWork:
    """What is going on in the background."""

    text: str
    task: asyncio.Task[None]


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
            sites=frozenset({SHOP_SITE}), helper_sets=frozenset({helper_set.digest}), per_second=5_000, burst=20_000
        )
        self._intake: CollectorIntake | None = None
        self._writing = asyncio.Lock()
        self._job: BackgroundWork | None = None
        self.statuses: Mapping[int, QueryStatus] = {}
        self.batches = [Batch(1, folder / "batch-1")]

    @property
    def collecting(self) -> Batch:
        """The batch that new reports go to."""
        return self.batches[-1]

    @property
    def busy(self) -> str:
        """What is going on, or nothing."""
        return "" if self._job is None or self._job.task.done() else self._job.text

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """The collector takes reports inside."""
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
        """One of your purchases: its report as it was posted. Gives its digest; `NotTaken` if it is refused."""
        _check_kind(posted)
        async with self._writing:
            filed = await self._take(posted)
            if filed.new:
                self.collecting.credited[filed.digest] = credit()
                self.collecting.yours.append(filed.digest)
            return filed.digest

    def report(self, digest: bytes) -> SealedReport | None:
        """A collected report, sealed as it is."""
        with StoreReader(self._collected) as store:
            return store.report(digest)

    async def _take(self, posted: bytes) -> Filed:
        if self._intake is None:
            raise TrefoilError("the collector is not running", "Start the demonstration again.")
        return await self._intake.take(posted)

    def add_crowd(self, people: int) -> None:
        """Start letting `people` simulated people buy shoes too."""
        self._start(f"Letting {people:,} people buy shoes", self._add_crowd(people))

    def ask(self, number: int) -> None:
        """Start asking the helpers about a batch; if it is the one that collects, it is closed first."""
        batch = self._batch(number)
        self._start(f"Asking the helpers about batch {number}", self._ask(batch))

    def ask_again(self, number: int) -> None:
        """Start a new query on reports that were counted before."""
        batch = self._batch(number)
        self._start(f"Asking again about batch {number}", self._replay(batch))

    async def stop(self) -> None:
        """Give up what is going on."""
        if self._job is not None:
            self._job.task.cancel()
            await asyncio.gather(self._job.task, return_exceptions=True)

    def _start(self, text: str, work: Coroutine[None, None, None]) -> None:
        if self.busy:
            work.close()
            raise TrefoilError("one thing at a time", "Wait until the last one has ended.")
        self.statuses = {}
        self._job = BackgroundWork(text, asyncio.get_running_loop().create_task(work))

    def _batch(self, number: int) -> Batch:
        found = next((batch for batch in self.batches if batch.number == number and batch.credited), None)
        if found is None:
            raise TrefoilError(f"there is no batch {number} with reports in it", "Buy something first.")
        return found

    async def _add_crowd(self, people: int) -> None:
        async with self._writing:
            self._seed += 1
            bought = crowd(people, self._helper_set, now=self._clock(), seed=self._seed)
            while some := await asyncio.to_thread(_next, bought):
                filed = await asyncio.gather(*(self._take(each.report.encode()) for each in some))
                for each, stored in zip(some, filed, strict=True):
                    self.collecting.credited[stored.digest] = each.credit

    async def _ask(self, batch: Batch) -> None:
        async with self._writing:
            if batch is self.collecting:
                number = batch.number + 1
                self.batches.append(Batch(number, self._folder / f"batch-{number}"))
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
        """The batch as a file, taken from the collector when it is first asked about."""
        if not batch.path.exists():
            with StoreReader(self._collected) as store:
                shelves = [shelf.number for shelf in store.shelves()]
                write_batch(batch.path, (one for one in store.reports(shelves) if one.digest in batch.credited))
        return BatchReader(batch.path)

    def _note(self, statuses: Mapping[int, QueryStatus]) -> None:
        self.statuses = dict(statuses)


def _check_kind(posted: bytes) -> None:
    """A batch is of one kind. What is no report at all the collector says itself."""
    try:
        terms = SealedReport.decode(posted).terms()
    except ProtocolError:
        return
    if (terms.caller, terms.buckets, terms.kappa) != (terms.site, BUCKETS, KAPPA):
        raise NotTaken(Refused.MALFORMED, "this report is of another kind than the shop asked for")


def _next(bought: Iterator[Purchase]) -> list[Purchase]:
    return list(islice(bought, AT_ONCE))

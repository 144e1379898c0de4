"""The advertiser's side: reports in batches, a crowd to hide in, and questions to the three helpers.

One job runs at a time, in the background; pages show how far it is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.live.crowd import crowd
from protocol.batch import BatchReader, BatchWriter
from protocol.errors import TrefoilError
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
Outcome = QueryResult | TrefoilError


@dataclass(slots=True)
class Batch:
    """Reports that are asked about together. `credited` is what a tracker knows of the same purchases."""

    number: int
    path: Path
    credited: list[int | None] = field(default_factory=list)
    yours: int = 0
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

    async def collect(self, report: SealedReport, credit: int | None) -> None:
        """One of your purchases: the shop keeps the report."""
        async with self._writing:
            batch = self.collecting
            await asyncio.to_thread(_append, batch.path, report)
            batch.credited.append(credit)
            batch.yours += 1

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
            batch, now = self.collecting, self._clock()
            batch.credited += await asyncio.to_thread(
                _write_crowd, batch.path, people, self._helper_set, now, self._seed
            )

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
            reports = await asyncio.to_thread(BatchReader, batch.path)
            wishes = QueryOptions(seconds=ASK_SECONDS)
            querier = Querier(self._helper_set)
            return await ask_batch(querier, reports, wishes, self._key, self._clock(), new=again, on_status=self._note)
        except TrefoilError as error:
            return error

    def _note(self, statuses: Mapping[int, QueryStatus]) -> None:
        self.statuses = dict(statuses)


def _append(path: Path, report: SealedReport) -> None:
    with BatchWriter(path) as writer:
        writer.add(report)


def _write_crowd(path: Path, people: int, helper_set: HelperSet, now: int, seed: int) -> list[int | None]:
    credited = []
    with BatchWriter(path) as writer:
        for purchase in crowd(people, helper_set, now=now, seed=seed):
            writer.add(purchase.report)
            credited.append(purchase.credit)
    return credited

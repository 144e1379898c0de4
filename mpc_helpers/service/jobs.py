"""A query at one helper: what is on disk for it, where its task stands, and what others may know of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from mpc_helpers.ledger.attempt import QueryName
from mpc_helpers.ledger.queries import QueryBook, QueryRecord
from protocol.query import Query
from protocol.status import Failure, QueryState, QueryStatus


class QueryJob:
    """One query at this helper: what is on disk for it, and where its task stands."""

    def __init__(self, query: Query, folder: Path, book: QueryBook, clock: Callable[[], int]) -> None:
        self.query = query
        self.name = QueryName.of(query)
        self.folder = folder
        self.record = QueryRecord(self.name, QueryState.QUEUED, clock())
        self.done = 0
        self.seconds: dict[QueryState, float] = {}
        # Uploads of its column that are under way, and who may put one of them in its place.
        self.drafts = 0
        self.placing = asyncio.Lock()
        self.task: asyncio.Task[None] | None = None
        self._book = book
        self._clock = clock
        self._entered = 0.0
        self._arrived = asyncio.get_running_loop().time()
        self._taken: dict[QueryState, float] = {}

    @property
    def column(self) -> Path:
        """Where the uploaded column is, once it is whole and has the root that was signed."""
        return self.folder / "column"

    @property
    def short_name(self) -> str:
        """For the log: enough to find it again, and too little to fetch its answer with."""
        return self.name.digest.hex()[:16]

    @property
    def idle(self) -> bool:
        """Whether no task works on it."""
        return self.task is None or self.task.done()

    @property
    def awaiting(self) -> bool:
        """Whether it is known and its column is not. Not a state of the book: the disk says so."""
        return self.record.state is QueryState.QUEUED and self.idle and not self.column.exists()

    @property
    def failed(self) -> bool:
        """Whether it has failed and nothing is done about it."""
        return self.idle and self.record.state is QueryState.FAILED

    @property
    def needs_room(self) -> bool:
        """Whether its column is on this disk, or may still come."""
        return self.column.exists() or not (self.ended or self.abandoned)

    @property
    def abandoned(self) -> bool:
        """Whether its column did not come in time."""
        return self.awaiting and self._clock() >= self.query.deadline

    @property
    def ended(self) -> bool:
        """Nothing will happen any more unless it is asked again."""
        return self.record.state.ended

    async def enter(self, state: QueryState, failure: Failure | None = None) -> None:
        """Move to a state, durably, and note how long the last one took."""
        now = asyncio.get_running_loop().time()
        if self._entered:
            self.seconds[self.record.state] = self.seconds.get(self.record.state, 0.0) + now - self._entered
        self._entered = now
        self.done = 0
        record = QueryRecord(self.name, state, self._clock(), failure)
        await asyncio.to_thread(self._book.record, record)
        self.record = record

    @property
    def age(self) -> float:
        """Seconds since it came, or since this helper started."""
        return asyncio.get_running_loop().time() - self._arrived

    def take_seconds(self) -> dict[QueryState, float]:
        """What each stage took since this was last asked: a query that is tried again is not counted twice."""
        new = {state: seconds - self._taken.get(state, 0.0) for state, seconds in self.seconds.items()}
        self._taken = dict(self.seconds)
        return new

    def advance(self, amount: int) -> None:
        """More reports are done in this stage. Called from any thread."""
        self.done += amount

    def status(self) -> QueryStatus:
        """For whoever asks."""
        record = self.record
        total = self.query.batch_size if record.state is QueryState.ADMITTING else 0
        state = QueryState.AWAITING if self.awaiting else record.state
        return QueryStatus(state, self.done, total, record.failure, dict(self.seconds))

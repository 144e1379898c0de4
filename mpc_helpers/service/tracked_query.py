"""One query at this helper: its folder, its durable state, its task, and the status that others may read.

A query enters the ledger's book when its column is there and work on it begins. What is in the book is permanent, so
a query that was never uploaded, or withdrawn before, is in its folder alone: it had no attempt, and can be forgotten
once its deadline has passed.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from mpc_helpers.admission.column import remove_column
from mpc_helpers.ledger.attempt import QueryName
from mpc_helpers.ledger.ledger import QueryRecord, QueryRecords
from protocol.errors import ProtocolError
from protocol.files import write_atomically
from protocol.query import Query, SignedQuery
from protocol.status import Failure, QueryState, QueryStatus

_LOG = logging.getLogger(__name__)
# Marks a query that was withdrawn before work on it began.
WITHDRAWN_FILE = "withdrawn"
WITHDRAWN_EARLY = Failure(QueryState.QUEUED, None, "its querier withdrew it")
_BEFORE_WORK = (QueryState.QUEUED, QueryState.FAILED, QueryState.WITHDRAWN)
_COLUMN_REMOVED = (QueryState.RELEASED, QueryState.WITHDRAWN, QueryState.EXPIRED)


@dataclass(slots=True, eq=False)
class TrackedQuery:
    """A query with everything this helper holds for it. The signed query in `folder` is durable, and so is `record`
    once it is `booked` or withdrawn.
    """

    query: Query
    folder: Path
    record: QueryRecord
    book: QueryRecords = field(repr=False)
    clock: Callable[[], int] = field(repr=False)
    # Reports done in the current stage, and seconds spent in each stage.
    done: int = 0
    seconds: dict[QueryState, float] = field(default_factory=dict)
    # Uploads of the column in progress, and the lock under which one of them becomes the column.
    drafts: int = 0
    placing: asyncio.Lock = field(default_factory=asyncio.Lock)
    task: asyncio.Task[None] | None = None
    # Whether it is in the ledger's book of queries. If not, it had no attempt.
    booked: bool = False
    _entered: float = 0.0
    _arrived: float = field(default_factory=lambda: asyncio.get_running_loop().time())
    _reported: dict[QueryState, float] = field(default_factory=dict)

    @classmethod
    def new(cls, query: Query, queries: Path, book: QueryRecords, clock: Callable[[], int]) -> Self:
        """Return a queued query that nothing has been stored for yet."""
        record = QueryRecord(QueryName.of(query), QueryState.QUEUED, clock())
        return cls(query, queries / query.digest.hex(), record, book, clock)

    @classmethod
    def load(cls, record: QueryRecord, queries: Path, book: QueryRecords, clock: Callable[[], int]) -> Self | None:
        """Return a query as an earlier process left it; None, with a log line, if its folder is unusable."""
        folder = queries / record.name.digest.hex()
        try:
            query = SignedQuery.decode((folder / "query").read_bytes()).query
        except FileNotFoundError:
            # Forgotten on purpose if it had ended; lost if it had not.
            if not record.state.ended:
                _LOG.warning("query %s has lost its folder", record.name.digest.hex()[:16])
            return None
        except (OSError, ProtocolError) as error:
            _LOG.warning("query %s cannot be loaded: %s", record.name.digest.hex()[:16], error)
            return None
        return cls(query, folder, record, book, clock, booked=True)

    @classmethod
    def restore(cls, folder: Path, book: QueryRecords, clock: Callable[[], int]) -> Self | None:
        """Return a query that is in its folder alone; None, and no folder, if it was not written in full."""
        try:
            query = SignedQuery.decode((folder / "query").read_bytes()).query
        except (OSError, ProtocolError):
            shutil.rmtree(folder, ignore_errors=True)
            return None
        tracked = cls.new(query, folder.parent, book, clock)
        if (folder / WITHDRAWN_FILE).exists():
            tracked.record = QueryRecord(tracked.name, QueryState.WITHDRAWN, clock(), WITHDRAWN_EARLY)
        return tracked

    async def save(self, signed: SignedQuery) -> None:
        write_atomically(self.folder / "query", signed.encode(), 0o600)
        await self.enter(QueryState.QUEUED)

    def remove(self) -> None:
        """Delete the folder. The ledger keeps the query's id and outcome."""
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def name(self) -> QueryName:
        return self.record.name

    @property
    def column(self) -> Path:
        """The uploaded column: it exists once it is complete and has the signed root."""
        return self.folder / "column"

    @property
    def idle(self) -> bool:
        return self.task is None or self.task.done()

    @property
    def awaiting(self) -> bool:
        """Whether its column is missing. Not a stored state: the file system decides."""
        return self.record.state is QueryState.QUEUED and self.idle and not self.column.exists()

    @property
    def state(self) -> QueryState:
        """The state that others are told."""
        return QueryState.AWAITING if self.awaiting else self.record.state

    @property
    def failed(self) -> bool:
        return self.idle and self.record.state is QueryState.FAILED

    @property
    def needs_space(self) -> bool:
        """Whether its column is stored here, or may still be uploaded."""
        if self.record.state in _COLUMN_REMOVED:
            return False
        return self.column.exists() or not (self.ended or self.abandoned)

    @property
    def abandoned(self) -> bool:
        """Whether its column was not uploaded before the deadline."""
        return self.awaiting and self.clock() >= self.query.deadline

    @property
    def ended(self) -> bool:
        return self.record.state.ended

    @property
    def age(self) -> float:
        return asyncio.get_running_loop().time() - self._arrived

    @property
    def never_ran(self) -> bool:
        """Whether it has ended, or its deadline passed, before work on it began."""
        return not self.booked and self.idle and not self.drafts and (self.ended or self.abandoned)

    async def enter(self, state: QueryState, failure: Failure | None = None) -> None:
        """Enter a new state, persist it from the first attempt on, and add up the time spent in the last one."""
        now = asyncio.get_running_loop().time()
        if self._entered:
            self.seconds[self.record.state] = self.seconds.get(self.record.state, 0.0) + now - self._entered
        self._entered = now
        self.done = 0
        record = QueryRecord(self.name, state, self.clock(), failure)
        if self.booked or state not in _BEFORE_WORK:
            # Before the write: if this task is cancelled now, the thread may still write.
            self.booked = True
            await asyncio.to_thread(self.book.record, record)
        elif state is QueryState.WITHDRAWN:
            await asyncio.to_thread(write_atomically, self.folder / WITHDRAWN_FILE, b"", 0o600)
        self.record = record

    def advance(self, amount: int) -> None:
        """Count reports done in this stage. Called from any thread."""
        self.done += amount

    def unreported_seconds(self) -> dict[QueryState, float]:
        """Return the seconds per stage since the last call, so that a retried query is not counted twice."""
        new = {state: seconds - self._reported.get(state, 0.0) for state, seconds in self.seconds.items()}
        self._reported = dict(self.seconds)
        return new

    def remove_column_if_useless(self) -> None:
        """Delete the column of a query that was answered or withdrawn."""
        if self.record.state in _COLUMN_REMOVED:
            remove_column(self.column)

    def status(self) -> QueryStatus:
        record = self.record
        total = self.query.batch_size if record.state is QueryState.ADMITTING else 0
        return QueryStatus(self.state, self.done, total, record.failure, dict(self.seconds))

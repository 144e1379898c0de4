"""Every query this helper knows, by digest: kept on disk before it is known, and read back after a restart."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

from mpc_helpers.ledger.attempt import QueryName
from mpc_helpers.ledger.queries import QueryBook, QueryChanged, QueryRecord
from mpc_helpers.service.health import Concern, Reason
from mpc_helpers.service.jobs import QueryJob
from mpc_helpers.service.metrics import Labels
from mpc_helpers.service.refusal import Refusal, Trouble
from protocol.errors import ProtocolError
from protocol.files import write_atomically
from protocol.query import Query, SignedQuery
from protocol.status import QueryState

_LOG = logging.getLogger("trefoil.registry")


class QueryRegistry:
    """What is on disk decides: the signed query in its folder, and its state in the book of queries."""

    def __init__(self, book: QueryBook, folder: Path, clock: Callable[[], int]) -> None:
        self._book = book
        self._folder = folder
        self._clock = clock
        self._jobs: dict[bytes, QueryJob] = {}

    def find(self, digest: bytes) -> QueryJob | None:
        """The query of this digest, if it is known."""
        return self._jobs.get(digest)

    def known(self, digest: bytes) -> QueryJob:
        """The query of this digest, or a refusal."""
        job = self._jobs.get(digest)
        if job is None:
            raise Refusal(Trouble.UNKNOWN, "this helper does not know the query", "Submit it first.")
        return job

    def all(self) -> list[QueryJob]:
        """Every query, ended or not."""
        return list(self._jobs.values())

    def running(self) -> list[Query]:
        """Those that have not ended and may still be answered."""
        return [job.query for job in self._jobs.values() if not job.ended and not job.abandoned]

    def counts(self) -> dict[str, int]:
        """How many queries are in which state."""
        return dict(Counter(job.status().state.value for job in self._jobs.values()))

    def gauge(self) -> Mapping[Labels, float]:
        """The same for the metrics page, where states without a query are shown too."""
        counts = self.counts()
        return {(("state", state.value),): float(counts.get(state.value, 0)) for state in QueryState}

    def reasons(self) -> list[Reason]:
        """For the health page."""
        disputed = self.counts().get(QueryState.DISPUTED.value, 0)
        text = (
            f"a helper voted both ways on {disputed} queries: the log has its signatures, and the reports stay locked"
        )
        return [Reason(Concern.DISPUTE, text)] if disputed else []

    async def keep(self, signed: SignedQuery) -> QueryJob:
        """A query that was not known: on disk before anybody hears of it. One id is for one query, for ever."""
        query = signed.query
        job = QueryJob(query, self._folder / query.digest.hex(), self._book, self._clock)
        # Looked up first, so that a changed query leaves no file behind; the book itself decides, below.
        known = await asyncio.to_thread(self._book.find, job.name.key)
        if known is not None and known.name.digest != job.name.digest:
            raise _changed()
        write_atomically(job.folder / "query", signed.encode(), 0o600)
        try:
            await job.enter(QueryState.QUEUED)
        except QueryChanged:
            raise _changed() from None
        self._jobs[query.digest] = job
        return job

    async def refuse_forgotten(self, query: Query) -> None:
        """A query that ended so long ago that only the book knows it: say how, rather than that its deadline passed."""
        name = QueryName.of(query)
        known = await asyncio.to_thread(self._book.find, name.key)
        if known is not None and known.name.digest == name.digest and known.state.ended:
            raise Refusal(
                Trouble.ENDED,
                f"this query ended as {known.state.value}, and this helper has forgotten it since",
                "Ask a new query with --new. What it counted stays counted.",
            )

    def forget(self, job: QueryJob) -> None:
        """Remove what is on disk for a query that ended long ago. The book keeps its id and how it ended."""
        shutil.rmtree(job.folder, ignore_errors=True)
        self._jobs.pop(job.name.digest, None)

    async def restore(self) -> list[QueryJob]:
        """Run once at start: every query that can be read back."""
        records = await asyncio.to_thread(self._book.all)
        return [job for record in records if (job := self._read_back(record)) is not None]

    def _read_back(self, record: QueryRecord) -> QueryJob | None:
        folder = self._folder / record.name.digest.hex()
        try:
            query = SignedQuery.decode((folder / "query").read_bytes()).query
        except FileNotFoundError:
            # Forgotten on purpose, if it had ended; lost, if it had not.
            if not record.state.ended:
                _LOG.warning("query %s has lost its folder", record.name.digest.hex()[:16])
            return None
        except (OSError, ProtocolError) as error:
            _LOG.warning("query %s cannot be read back: %s", record.name.digest.hex()[:16], error)
            return None
        job = QueryJob(query, folder, self._book, self._clock)
        job.record = record
        self._jobs[record.name.digest] = job
        return job


def _changed() -> Refusal:
    return Refusal(
        Trouble.CHANGED,
        "this query id was used before, for another batch or other parameters",
        "Choose a new query id, or submit exactly what was submitted first.",
    )

"""Intake: who may ask what, the column streamed to disk, and one task for every query until it has ended.

A query is authenticated by its signature, against the keys this helper's operator registered for sites. What is on
disk decides everything, so that a restart goes on where it was: the signed query, its column, the book of queries.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Protocol

from mpc_helpers.admission.column import ColumnDraft, remove_column
from mpc_helpers.agreement.errors import Disputed
from mpc_helpers.identity.config import Limits, Site
from mpc_helpers.identity.membership import Membership
from mpc_helpers.ledger.queries import QueryBook, QueryChanged, QueryRecord
from mpc_helpers.mpc import noise
from mpc_helpers.service.jobs import Job
from mpc_helpers.service.metrics import Labels, Metrics
from protocol.batch import Layout, column_layout
from protocol.errors import Blamed, ProtocolError, TrefoilError
from protocol.field import ELEMENT_SIZE
from protocol.files import write_atomically
from protocol.query import Query, SignedQuery
from protocol.report import header_size, payload_size
from protocol.status import QueryState, QueryStatus

_WRITE_BYTES = 2**18
_LOG = logging.getLogger("trefoil.intake")


class Trouble(Enum):
    """Why a request is refused, whatever the query."""

    STRANGER = "stranger"
    UNKNOWN = "unknown"
    CHANGED = "changed"
    NOT_YET = "not yet"
    TOO_LARGE = "too large"
    UNWILLING = "unwilling"
    BUSY = "busy"
    ENDED = "ended"
    DISK = "disk"


class Refusal(TrefoilError):
    """A request this helper does not serve."""

    def __init__(self, trouble: Trouble, message: str, hint: str = "") -> None:
        super().__init__(message, hint)
        self.trouble = trouble


class Answerer(Protocol):
    """What intake needs of a helper: to answer a query, and to hand out what was released."""

    async def answer(self, query: Query, column: Path, job: Job) -> None: ...

    async def stored_answer(self, query: Query) -> tuple[bytes, tuple[bytes, ...]] | None: ...

    async def has_live_attempt(self, query: Query) -> bool: ...


class Intake:
    """Every query of one helper, by digest."""

    def __init__(
        self,
        membership: Membership,
        sites: Mapping[str, Site],
        limits: Limits,
        book: QueryBook,
        folder: Path,
        helper: Answerer,
        clock: Callable[[], int],
        metrics: Metrics,
        *,
        answer_sent: Callable[[], None] = lambda: None,
    ) -> None:
        self._membership = membership
        self._sites = sites
        self._limits = limits
        self._book = book
        self._folder = folder / "queries"
        self._helper = helper
        self._clock = clock
        self._jobs: dict[bytes, Job] = {}
        self._keeping = asyncio.Lock()
        self._answer_sent = answer_sent
        self._ended = metrics.counter("trefoil_queries_total", "queries that ended, by how")
        self._spent = metrics.counter("trefoil_stage_seconds_total", "seconds spent in each stage of queries")
        metrics.gauge("trefoil_queries", "queries known to this helper, by state", self._count_states)

    # What queriers ask for.

    async def submit(self, digest: bytes, body: bytes) -> QueryStatus:
        """A signed query. New: kept, and its column awaited. Known: joined, or tried again if it had failed."""
        signed = SignedQuery.decode(body)
        query = signed.query
        self._authenticate(signed)
        if query.digest != digest:
            raise ProtocolError("the query is not the one that the address names")
        async with self._keeping:
            job = self._jobs.get(digest)
            if job is None:
                self._check_willing(query)
                job = await self._keep(signed)
            elif job.record.state is QueryState.FAILED and await self._worth_trying(query):
                await job.enter(QueryState.QUEUED)
                self._start(job)
        return job.status()

    async def take_column(self, digest: bytes, size: int, pieces: AsyncIterator[bytes]) -> QueryStatus:
        """The column of a query that awaits one: on disk whole and with the signed root, or not at all."""
        job = self._job(digest)
        expected = self._column_layout(job.query).file_size(job.query.batch_size)
        if size != expected:
            raise Refusal(
                Trouble.TOO_LARGE,
                f"the column has {size} bytes; this query's takes {expected}",
                "Cut the column from the batch that the query was made for, for this helper.",
            )
        try:
            async with asyncio.timeout(max(0, job.query.deadline - self._clock())), job.uploading:
                await self._upload(job, pieces)
        except TimeoutError:
            raise Refusal(Trouble.ENDED, "the column did not arrive before the query's deadline") from None
        return job.status()

    async def _upload(self, job: Job, pieces: AsyncIterator[bytes]) -> None:
        if job.awaiting:
            await self._store(job, pieces)
            self._start(job)
            return
        async for _ in pieces:  # someone else was quicker with the same column; let this one finish in peace
            pass

    def status(self, digest: bytes) -> QueryStatus:
        """Where a query stands."""
        return self._job(digest).status()

    async def answer(self, digest: bytes) -> tuple[bytes, tuple[bytes, ...]]:
        """The stored sealed share and the signed YES: the same bytes however often it is asked."""
        job = self._job(digest)
        stored = await self._helper.stored_answer(job.query)
        if stored is not None:
            return stored
        if job.ended:
            raise Refusal(Trouble.ENDED, f"the query has ended without an answer: {job.record.reason}")
        raise Refusal(Trouble.NOT_YET, f"there is no answer yet; the query is {job.record.state.value}")

    def answer_sent(self, digest: bytes) -> None:
        """The last byte of a share has left."""
        _LOG.info("query %s: share handed out", digest.hex()[:16])
        self._answer_sent()

    def summary(self) -> dict[str, object]:
        """For the health page: how many queries are in which state."""
        return {"queries": dict(Counter(job.status().state.value for job in self._jobs.values()))}

    # Starting and stopping.

    async def resume(self) -> None:
        """Run once at start, after the ledger has been swept: every query that had not ended goes on."""
        for record in await asyncio.to_thread(self._book.all):
            job = self._restore(record)
            if job is not None and await self._goes_on(job):
                self._start(job)

    async def tidy(self) -> None:
        """Run now and then: end what was never uploaded, and remove columns that nothing can need any more."""
        for job in list(self._jobs.values()):
            if self._abandoned(job):
                await job.enter(
                    QueryState.FAILED,
                    stage=QueryState.AWAITING.value,
                    reason="its column did not come before its deadline",
                )
            over = job.record.state is QueryState.FAILED and self._clock() >= job.query.deadline
            if over and job.column.exists() and not await self._helper.has_live_attempt(job.query):
                remove_column(job.column)

    def _abandoned(self, job: Job) -> bool:
        return job.awaiting and self._clock() >= job.query.deadline

    async def close(self) -> None:
        """Stop every task. What was reserved is given up as it ends, or at the next start."""
        tasks = [job.task for job in self._jobs.values() if job.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _goes_on(self, job: Job) -> bool:
        """What had not ended, and what failed here after its vote: the others may have released it since."""
        if job.record.state is QueryState.FAILED:
            return await self._helper.has_live_attempt(job.query)
        return not job.ended

    def _restore(self, record: QueryRecord) -> Job | None:
        folder = self._folder / record.name.digest.hex()
        try:
            query = SignedQuery.decode((folder / "query").read_bytes()).query
        except (OSError, ProtocolError) as error:
            _LOG.warning("query %s cannot be read back: %s", record.name.digest.hex()[:16], error)
            return None
        job = Job(query, folder, self._book, self._clock)
        job.record = record
        self._jobs[record.name.digest] = job
        return job

    # Deciding.

    def _authenticate(self, signed: SignedQuery) -> None:
        query = signed.query
        site = self._sites.get(query.site)
        if site is None:
            raise Refusal(
                Trouble.STRANGER,
                f"this helper answers no queries of {query.site}",
                "Ask its operator to register the site's key.",
            )
        try:
            signed.verify(site.key)
        except ProtocolError as error:
            raise Refusal(Trouble.STRANGER, str(error), error.hint) from None
        if query.caller not in site.callers:
            raise Refusal(
                Trouble.STRANGER,
                f"{query.caller} may not ask for {query.site}",
                "Ask the helper's operator to register the caller for the site.",
            )

    async def _worth_trying(self, query: Query) -> bool:
        """Before the deadline, and for ever if this helper had voted: what is spent must be answered."""
        return self._clock() < query.deadline or await self._helper.has_live_attempt(query)

    def _check_willing(self, query: Query) -> None:
        """What this helper will not do, said before anything is uploaded or spent."""
        limits, now = self._limits, self._clock()
        if query.helper_set not in {known.digest for known in self._membership.known_sets}:
            raise Refusal(Trouble.UNWILLING, "the query names another helper set", "Use the current helpers.json.")
        if not (limits.minimum_reports <= query.batch_size <= limits.maximum_reports):
            accepted = f"{limits.minimum_reports} to {limits.maximum_reports}"
            raise Refusal(Trouble.UNWILLING, f"a batch of {query.batch_size}; this helper takes {accepted} reports")
        if not (now < query.deadline <= now + limits.seconds):
            raise Refusal(
                Trouble.UNWILLING,
                f"the deadline is {query.deadline - now} s away; this helper accepts 1 to {limits.seconds}",
                "Ask with another deadline; if it looks right, compare the clocks.",
            )
        if query.shape.checked:
            raise Refusal(Trouble.UNWILLING, "this helper cannot check reports yet")
        try:
            noise.check_cost(query.length, query.gamma)
        except TrefoilError as error:
            raise Refusal(Trouble.UNWILLING, str(error), error.hint) from None
        running = [job for job in self._jobs.values() if not job.ended and not self._abandoned(job)]
        if len(running) >= limits.waiting:
            raise Refusal(Trouble.BUSY, f"this helper has {len(running)} queries waiting", "Try again later.")
        if sum(job.query.site == query.site for job in running) >= limits.queries_per_site:
            raise Refusal(Trouble.BUSY, f"{query.site} has too many queries waiting", "Wait for one of them to end.")

    async def _keep(self, signed: SignedQuery) -> Job:
        query = signed.query
        job = Job(query, self._folder / query.digest.hex(), self._book, self._clock)
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

    def _job(self, digest: bytes) -> Job:
        job = self._jobs.get(digest)
        if job is None:
            raise Refusal(Trouble.UNKNOWN, "this helper does not know the query", "Submit it first.")
        return job

    # The column.

    def _column_layout(self, query: Query) -> Layout:
        header, body = header_size(query.unit, query.site, query.caller, query.shape), query.shape.explicit
        return column_layout(self._membership.party, header, ELEMENT_SIZE * body, payload_size(query.suite))

    async def _store(self, job: Job, pieces: AsyncIterator[bytes]) -> None:
        query = job.query
        try:
            with ColumnDraft(job.column, self._column_layout(query), query.batch_size) as draft:
                async for piece in _gathered(pieces):
                    await asyncio.to_thread(draft.add, piece)
                if await asyncio.to_thread(draft.keep, query.batch_root, query.columns[self._membership.party]):
                    return
        except OSError as error:
            raise Refusal(Trouble.DISK, f"this helper cannot store the column: {error.strerror}") from None
        raise Refusal(
            Trouble.CHANGED,
            "the column is not the one that the query was signed for",
            "Upload the column cut from that batch.",
        )

    # The task of a query.

    def _start(self, job: Job) -> None:
        if (job.task is None or job.task.done()) and job.column.exists():
            job.task = asyncio.create_task(self._run(job), name=f"query {job.name.digest.hex()[:16]}")

    async def _run(self, job: Job) -> None:
        """Answer one query. However it ends, the book says so and the daemon lives on."""
        try:
            await self._helper.answer(job.query, job.column, job)
            await job.enter(QueryState.RELEASED)
        except TrefoilError as error:
            await self._fail(job, error)
        except Exception as error:
            _LOG.exception("query %s: a defect", job.name.digest.hex()[:16])
            await self._fail(job, TrefoilError(f"internal error: {type(error).__name__}"))
        self._finish(job)

    async def _fail(self, job: Job, error: TrefoilError) -> None:
        stage = job.record.state.value
        party = error.party if isinstance(error, Blamed) else None
        state = QueryState.DISPUTED if isinstance(error, Disputed) else QueryState.FAILED
        job.hint = error.hint
        _LOG.warning("query %s: %s while %s: %s", job.name.digest.hex()[:16], state.value, stage, error)
        with contextlib.suppress(TrefoilError):
            # A ledger that cannot be written is the reason often enough; the query is failed all the same.
            await job.enter(state, stage=stage, party=party, reason=str(error))
            return
        job.record = QueryRecord(job.name, state, self._clock(), stage, party, str(error))

    def _finish(self, job: Job) -> None:
        if job.record.state is QueryState.RELEASED:
            remove_column(job.column)
        if job.ended:
            self._ended(state=job.record.state.value)
        for stage, seconds in job.seconds.items():
            self._spent(seconds, stage=stage.value)

    def _count_states(self) -> Mapping[Labels, float]:
        counts = Counter(job.status().state.value for job in self._jobs.values())
        return {(("state", state),): float(count) for state, count in counts.items()}


def _changed() -> Refusal:
    return Refusal(
        Trouble.CHANGED,
        "this query id was used before, for another batch or other parameters",
        "Choose a new query id, or submit exactly what was submitted first.",
    )


async def _gathered(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Pieces as they come, put together into ones that are worth handing to a thread."""
    held: list[bytes] = []
    size = 0
    async for piece in pieces:
        held.append(piece)
        size += len(piece)
        if size >= _WRITE_BYTES:
            yield b"".join(held)
            held, size = [], 0
    yield b"".join(held)

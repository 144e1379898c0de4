"""Intake: what queriers ask of this helper, and one task for every query until it has ended.

Who may ask what is `policy`'s to decide; which queries there are is `registry`'s to know. What is on disk decides
everything, so that a restart goes on where it was: the signed query, its column, the book of queries.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Protocol

from mpc_helpers.admission.column import remove_column
from mpc_helpers.agreement.errors import Disputed, TooFewReports
from mpc_helpers.ledger.queries import QueryRecord
from mpc_helpers.service.jobs import QueryJob
from mpc_helpers.service.metrics import Metrics
from mpc_helpers.service.policy import Policy
from mpc_helpers.service.refusal import Refusal, Trouble
from mpc_helpers.service.registry import QueryRegistry
from mpc_helpers.service.upload import check_size, store_column
from protocol.errors import Blamed, ProtocolError, TrefoilError
from protocol.query import Query, SignedQuery
from protocol.status import Failure, QueryState, QueryStatus
from protocol.withdrawal import Withdrawal

_LOG = logging.getLogger("trefoil.intake")


class Answerer(Protocol):
    """What intake needs of a helper: to answer a query, and to hand out what was released."""

    async def answer(self, query: Query, column: Path, job: QueryJob) -> None: ...

    async def stored_answer(self, query: Query) -> tuple[bytes, tuple[bytes, ...]] | None: ...

    async def has_live_attempt(self, query: Query) -> bool: ...

    async def forget_answer(self, query: Query) -> None: ...


class Intake:
    """Run by the daemon of helper `party` for all its queries."""

    def __init__(
        self,
        party: int,
        policy: Policy,
        registry: QueryRegistry,
        helper: Answerer,
        clock: Callable[[], int],
        metrics: Metrics,
        *,
        answer_lifetime: int = 90 * 86400,
        answer_sent: Callable[[], None] = lambda: None,
    ) -> None:
        self._party = party
        self._policy = policy
        self.registry = registry
        self._helper = helper
        self._clock = clock
        # One new query at a time: two that arrive together must not both find room for one.
        self._keeping = asyncio.Lock()
        self._answer_lifetime = answer_lifetime
        self._answer_sent = answer_sent
        self._ended = metrics.counter("trefoil_queries_total", "queries that ended, by how")
        self._spent = metrics.counter("trefoil_stage_seconds_total", "seconds spent in each stage of queries")
        metrics.gauge(
            "trefoil_queries",
            "queries known to this helper, by state",
            lambda: {(("state", state),): float(count) for state, count in registry.counts().items()},
        )

    # What queriers ask for.

    async def submit(self, digest: bytes, body: bytes) -> QueryStatus:
        """A signed query. New: kept, and its column awaited. Known: joined, or tried again if it had failed."""
        signed = SignedQuery.decode(body)
        query = signed.query
        self._policy.authenticate(signed)
        if query.digest != digest:
            raise ProtocolError("the query is not the one that the address names")
        async with self._keeping:
            job = self.registry.find(digest)
            if job is None:
                await self.registry.refuse_forgotten(query)
                self._policy.check_willing(query, self.registry.running())
                job = await self.registry.keep(signed)
            elif job.record.state is QueryState.FAILED and await self._worth_trying(query):
                await job.enter(QueryState.QUEUED)
                self._start(job)
        return job.status()

    async def withdraw(self, digest: bytes, body: bytes) -> QueryStatus:
        """The querier takes a query back. What this helper has not voted for by then, it never votes for."""
        withdrawal = Withdrawal.decode(body)
        self._policy.authenticate_withdrawal(withdrawal)
        if withdrawal.signed.query.digest != digest:
            raise ProtocolError("the query is not the one that the address names")
        async with self._keeping:
            # One that never came is kept too, or a bad helper could hand it in later.
            job = self.registry.find(digest) or await self.registry.keep(withdrawal.signed)
            if job.record.state is not QueryState.WITHDRAWN:
                await self._end_withdrawn(job)
        return job.status()

    async def _end_withdrawn(self, job: QueryJob) -> None:
        """Stop the work, which frees what is merely reserved; then the ledger decides, in one transaction."""
        if job.task is not None and not await self._has_voted(job):
            job.task.cancel()
            await asyncio.gather(job.task, return_exceptions=True)
        if await self._helper.has_live_attempt(job.query):
            self._start(job)
            raise Refusal(
                Trouble.VOTED,
                "this helper has voted for the query",
                "Its answer has come or may come: ask with the same command to fetch it.",
            )
        await job.enter(QueryState.WITHDRAWN, Failure(job.record.state, None, "its querier withdrew it"))
        remove_column(job.column)
        self._finish(job)

    async def _has_voted(self, job: QueryJob) -> bool:
        """Stopping would do nothing good: what is voted for is waited for."""
        return job.record.state is QueryState.VOTING and await self._helper.has_live_attempt(job.query)

    async def take_column(self, digest: bytes, size: int, pieces: AsyncIterator[bytes]) -> QueryStatus:
        """The column of a query that awaits one: on disk whole and with the signed root, or not at all."""
        job = self.registry.known(digest)
        check_size(job.query, self._party, size)
        try:
            async with asyncio.timeout(max(0, job.query.deadline - self._clock())), job.uploading:
                await self._upload(job, pieces)
        except TimeoutError:
            raise Refusal(Trouble.ENDED, "the column did not arrive before the query's deadline") from None
        return job.status()

    async def _upload(self, job: QueryJob, pieces: AsyncIterator[bytes]) -> None:
        if job.awaiting:
            await store_column(job.query, self._party, job.column, pieces)
            self._start(job)
            return
        async for _ in pieces:  # someone else was quicker with the same column; let this one finish in peace
            pass

    def status(self, digest: bytes) -> QueryStatus:
        """Where a query stands."""
        return self.registry.known(digest).status()

    async def answer(self, digest: bytes) -> tuple[bytes, tuple[bytes, ...]]:
        """The stored sealed share and the signed YES: the same bytes however often it is asked."""
        job = self.registry.known(digest)
        stored = await self._helper.stored_answer(job.query)
        if stored is not None:
            return stored
        if job.ended:
            failure = job.record.failure
            reason = "" if failure is None else f": {failure.reason}"
            raise Refusal(Trouble.ENDED, f"the query has ended without an answer{reason}")
        raise Refusal(Trouble.NOT_YET, f"there is no answer yet; the query is {job.record.state.value}")

    def answer_sent(self, digest: bytes) -> None:
        """The last byte of a share has left."""
        _LOG.info("query %s: share handed out", digest.hex()[:16])
        self._answer_sent()

    def summary(self) -> dict[str, object]:
        """For the health page: how many queries are in which state."""
        return {"queries": self.registry.counts()}

    # Starting and stopping.

    async def resume(self) -> None:
        """Run once at start, after the ledger has been swept: every query that had not ended goes on."""
        for job in await self.registry.restore():
            if await self._goes_on(job):
                self._start(job)

    async def tidy(self) -> None:
        """Run now and then: end what was never uploaded, and remove columns that nothing can need any more."""
        for job in self.registry.all():
            if job.abandoned:
                late = Failure(QueryState.AWAITING, None, "its column did not come before its deadline")
                await job.enter(QueryState.FAILED, late)
            over = job.record.state is QueryState.FAILED and self._clock() >= job.query.deadline
            if over and job.column.exists() and not await self._helper.has_live_attempt(job.query):
                remove_column(job.column)

    async def forget(self, now: int) -> None:
        """Run after the clock was checked, for it cannot be undone: answers and queries older than they are kept."""
        for job in self.registry.all():
            if not job.ended or job.record.updated + self._answer_lifetime > now:
                continue
            if job.record.state is QueryState.RELEASED:
                days = self._answer_lifetime // 86400
                await self._helper.forget_answer(job.query)
                gone = Failure(QueryState.RELEASED, None, f"this helper kept it for {days} days")
                await job.enter(QueryState.EXPIRED, gone)
            elif job.record.state is QueryState.EXPIRED or not await self._helper.has_live_attempt(job.query):
                self.registry.forget(job)

    async def close(self) -> None:
        """Stop every task. What was reserved is given up as it ends, or at the next start."""
        tasks = [job.task for job in self.registry.all() if job.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _worth_trying(self, query: Query) -> bool:
        """Before the deadline, and for ever if this helper had voted: what is spent must be answered."""
        return self._clock() < query.deadline or await self._helper.has_live_attempt(query)

    async def _goes_on(self, job: QueryJob) -> bool:
        """What had not ended, and what failed here after its vote: the others may have released it since."""
        if job.record.state is QueryState.FAILED:
            return await self._helper.has_live_attempt(job.query)
        return not job.ended

    # The task of a query.

    def _start(self, job: QueryJob) -> None:
        if job.record.state is QueryState.WITHDRAWN:  # while its column was on its way
            remove_column(job.column)
            return
        if (job.task is None or job.task.done()) and job.column.exists():
            job.task = asyncio.create_task(self._run(job), name=f"query {job.name.digest.hex()[:16]}")

    async def _run(self, job: QueryJob) -> None:
        """Answer one query. However it ends, the book says so and the daemon lives on."""
        try:
            await self._helper.answer(job.query, job.column, job)
            await job.enter(QueryState.RELEASED)
        except TrefoilError as error:
            await self._fail(job, error)
        except Exception:
            _LOG.exception("query %s: a defect", job.name.digest.hex()[:16])
            await self._fail(job, TrefoilError("this helper has a defect; its log says which"))
        self._finish(job)

    async def _fail(self, job: QueryJob, error: TrefoilError) -> None:
        party = error.party if isinstance(error, Blamed) else None
        shortfall = error.shortfall if isinstance(error, TooFewReports) else None
        failure = Failure(job.record.state, party, str(error), error.hint, shortfall)
        state = QueryState.DISPUTED if isinstance(error, Disputed) else QueryState.FAILED
        _LOG.warning("query %s: %s while %s: %s", job.name.digest.hex()[:16], state.value, failure.stage.value, error)
        with contextlib.suppress(TrefoilError):
            # A ledger that cannot be written is the reason often enough; the query is failed all the same.
            await job.enter(state, failure)
            return
        job.record = QueryRecord(job.name, state, self._clock(), failure)

    def _finish(self, job: QueryJob) -> None:
        if job.record.state is QueryState.RELEASED:
            remove_column(job.column)
        if job.ended:
            self._ended(state=job.record.state.value)
        for stage, seconds in job.seconds.items():
            self._spent(seconds, stage=stage.value)

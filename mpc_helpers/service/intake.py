"""Intake: what queriers ask of this helper.

Who may ask what is `policy`'s to decide; which queries there are is `registry`'s to know; `uploads` take columns,
`runs` answer queries, and `storage` says what there is room for.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from mpc_helpers.helper import Helper
from mpc_helpers.service.jobs import QueryJob
from mpc_helpers.service.logs import fields
from mpc_helpers.service.policy import Policy
from mpc_helpers.service.refusal import Refusal, Trouble
from mpc_helpers.service.registry import QueryRegistry
from mpc_helpers.service.runs import QueryRuns
from mpc_helpers.service.storage import Storage
from mpc_helpers.service.uploads import Uploads
from protocol.errors import ProtocolError
from protocol.query import Query, SignedQuery
from protocol.status import Failure, QueryState, QueryStatus
from protocol.withdrawal import Withdrawal

_LOG = logging.getLogger("trefoil.queries")


@dataclass(frozen=True, slots=True)
class QueryDesk:
    """Everything that has to do with queries at one helper."""

    registry: QueryRegistry
    storage: Storage
    uploads: Uploads
    runs: QueryRuns


class Intake:
    """Run by the daemon for all queries of one helper."""

    def __init__(
        self,
        policy: Policy,
        desk: QueryDesk,
        helper: Helper,
        clock: Callable[[], int],
        *,
        answer_sent: Callable[[], None] = lambda: None,
    ) -> None:
        self._policy = policy
        self.registry = desk.registry
        self._storage = desk.storage
        self._uploads = desk.uploads
        self._runs = desk.runs
        self._helper = helper
        self._clock = clock
        # One new query at a time: two that arrive together must not both find room for one.
        self._keeping = asyncio.Lock()
        self._answer_sent = answer_sent

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
                job = await self._take(signed)
            elif job.record.state is QueryState.FAILED and await self._worth_trying(query):
                await self._try_again(job)
        return job.status()

    async def _take(self, signed: SignedQuery) -> QueryJob:
        query = signed.query
        await self.registry.refuse_forgotten(query)
        self._policy.check_willing(query, self.registry.running())
        await self._storage.reserve(query)
        job = await self.registry.keep(signed)
        _log_arrival(job)
        return job

    async def _try_again(self, job: QueryJob) -> None:
        if not job.column.exists():
            await self._storage.reserve(job.query)
        await job.enter(QueryState.QUEUED)
        self._runs.start(job)

    async def _worth_trying(self, query: Query) -> bool:
        """Before the deadline, and for ever if this helper had voted: what is spent must be answered."""
        return self._clock() < query.deadline or await self._helper.has_live_attempt(query)

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
            await self._runs.stop(job)
        if await self._helper.has_live_attempt(job.query):
            self._runs.start(job)
            raise Refusal(
                Trouble.VOTED,
                "this helper has voted for the query",
                "Its answer has come or may come: ask with the same command to fetch it.",
            )
        await job.enter(QueryState.WITHDRAWN, Failure(job.record.state, None, "its querier withdrew it"))
        self._runs.finish(job)

    async def _has_voted(self, job: QueryJob) -> bool:
        """Stopping would do nothing good: what is voted for is waited for."""
        return job.record.state is QueryState.VOTING and await self._helper.has_live_attempt(job.query)

    async def take_column(self, digest: bytes, permit: bytes, size: int, pieces: AsyncIterator[bytes]) -> QueryStatus:
        """The column of a query that awaits one, from whoever has its querier's permit for this helper."""
        job = self.registry.known(digest)
        self._policy.check_permit(job.query, permit)
        await self._uploads.take(job, size, pieces)
        return job.status()

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


def _log_arrival(job: QueryJob) -> None:
    query = job.query
    said = fields(
        event="query arrived",
        query=job.short_name,
        site=query.site,
        reports=query.batch_size,
        buckets=query.buckets,
        noise=query.noise.value,
        debug=query.debug,
    )
    form = "query %s of %s arrived: %d reports, %d buckets, noise %s"
    _LOG.info(form, job.short_name, query.site, query.batch_size, query.buckets, query.noise.value, extra=said)

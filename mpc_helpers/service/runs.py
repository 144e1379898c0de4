"""Runs: one task for every query that has its column, until it has ended. However it ends, the daemon lives on."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from mpc_helpers.admission.column import remove_column, remove_drafts
from mpc_helpers.agreement.errors import Disputed, TooFewReports
from mpc_helpers.ledger.queries import QueryRecord
from mpc_helpers.service.jobs import QueryJob
from mpc_helpers.service.logs import fields
from mpc_helpers.service.metrics import Metrics
from mpc_helpers.service.registry import QueryRegistry
from protocol.errors import Blamed, TrefoilError
from protocol.query import Query
from protocol.status import Failure, QueryState

_LOG = logging.getLogger("trefoil.queries")


class Answerer(Protocol):
    """What a run needs of a helper."""

    async def answer(self, query: Query, column: Path, job: QueryJob) -> None: ...

    async def has_live_attempt(self, query: Query) -> bool: ...


class QueryRuns:
    """Run by the daemon. What is on disk decides what is run, so that a restart goes on where it was."""

    def __init__(self, registry: QueryRegistry, helper: Answerer, clock: Callable[[], int], metrics: Metrics) -> None:
        self._registry = registry
        self._helper = helper
        self._clock = clock
        self._ended = metrics.counter(
            "trefoil_queries_total",
            "queries that ended, by how",
            state=[state.value for state in QueryState if state.ended],
        )
        self._spent = metrics.counter(
            "trefoil_stage_seconds_total",
            "seconds spent in each stage of queries",
            stage=[state.value for state in QueryState if not state.ended],
        )

    async def resume(self) -> None:
        """Run once at start, after the ledger has been swept: every query that had not ended goes on."""
        for job in await self._registry.restore():
            remove_drafts(job.column)
            if await self._goes_on(job):
                self.start(job)

    def start(self, job: QueryJob) -> None:
        """Run a query, if its column is there and it does not run already."""
        if job.record.state is QueryState.WITHDRAWN:  # while its column was on its way
            remove_column(job.column)
            return
        if job.idle and job.column.exists():
            job.task = asyncio.create_task(self._run(job), name=f"query {job.short_name}")

    async def stop(self, job: QueryJob) -> None:
        """Stop the run of a query. What it had reserved is given up as it ends."""
        if job.task is not None:
            job.task.cancel()
            await asyncio.gather(job.task, return_exceptions=True)

    async def close(self) -> None:
        """Stop every run. What was reserved is given up as it ends, or at the next start."""
        tasks = [job.task for job in self._registry.all() if job.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def finish(self, job: QueryJob) -> None:
        """What is done once a query has ended: its column removed if nothing can need it, its figures counted."""
        if job.record.state in (QueryState.RELEASED, QueryState.WITHDRAWN):
            remove_column(job.column)
        if job.ended:
            self._ended(state=job.record.state.value)
            _log_end(job)
        for stage, seconds in job.take_seconds().items():
            self._spent(seconds, stage=stage.value)

    async def _goes_on(self, job: QueryJob) -> bool:
        """What had not ended, and what failed here after its vote: the others may have released it since."""
        if job.record.state is QueryState.FAILED:
            return await self._helper.has_live_attempt(job.query)
        return not job.ended

    async def _run(self, job: QueryJob) -> None:
        """Answer one query. However it ends, the book says so and the daemon lives on."""
        try:
            await self._helper.answer(job.query, job.column, job)
            await job.enter(QueryState.RELEASED)
        except TrefoilError as error:
            await self._fail(job, error)
        except Exception:
            _LOG.exception("query %s: a defect", job.short_name)
            await self._fail(job, TrefoilError("this helper has a defect; its log says which"))
        self.finish(job)

    async def _fail(self, job: QueryJob, error: TrefoilError) -> None:
        party = error.party if isinstance(error, Blamed) else None
        shortfall = error.shortfall if isinstance(error, TooFewReports) else None
        failure = Failure(job.record.state, party, str(error), error.hint, shortfall)
        state = QueryState.DISPUTED if isinstance(error, Disputed) else QueryState.FAILED
        with contextlib.suppress(TrefoilError):
            # A ledger that cannot be written is the reason often enough; the query is failed all the same.
            await job.enter(state, failure)
            return
        job.record = QueryRecord(job.name, state, self._clock(), failure)


def _log_end(job: QueryJob) -> None:
    """One line: which query, of whom, how large, how long since it came to this process, and what became of it."""
    failure, state, seconds = job.record.failure, job.record.state.value, job.age
    why = "" if failure is None else f" while {failure.stage.value}: {failure.reason}"
    said = fields(
        event="query ended",
        query=job.short_name,
        site=job.query.site,
        reports=job.query.batch_size,
        seconds=round(seconds, 3),
        outcome=state,
        reason=why.strip(),
    )
    level = logging.INFO if failure is None else logging.WARNING
    form = "query %s of %s over %d reports ended after %.1f s: %s%s"
    _LOG.log(level, form, job.short_name, job.query.site, job.query.batch_size, seconds, state, why, extra=said)

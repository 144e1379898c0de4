"""What queries keep on this helper's disk: how much a site may have there, and when it goes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from mpc_helpers.admission.column import remove_column, stored_size
from mpc_helpers.identity.config import Limits
from mpc_helpers.service.health import Concern, Reason
from mpc_helpers.service.jobs import QueryJob
from mpc_helpers.service.refusal import Refusal, Trouble
from mpc_helpers.service.registry import QueryRegistry
from protocol.batch import ColumnLayout, column_layout
from protocol.field import ELEMENT_SIZE
from protocol.header import header_size
from protocol.query import Query
from protocol.report import payload_size
from protocol.seconds import DAY
from protocol.status import Failure, QueryState

MEGABYTE = 2**20


class AnswerKeeper(Protocol):
    """What storage asks of a helper before it removes anything."""

    async def has_live_attempt(self, query: Query) -> bool: ...

    async def forget_answer(self, query: Query) -> None: ...


class Storage:
    """Run by helper `party` for all its queries. `free` is how many bytes the disk of `folder` still takes."""

    def __init__(
        self,
        party: int,
        registry: QueryRegistry,
        helper: AnswerKeeper,
        limits: Limits,
        folder: Path,
        clock: Callable[[], int],
        *,
        answer_lifetime: int = 90 * DAY,
        free: Callable[[Path], int] = lambda folder: shutil.disk_usage(folder).free,
    ) -> None:
        self._party = party
        self._registry = registry
        self._helper = helper
        self._site_bytes = limits.site_megabytes * MEGABYTE
        self._spare_bytes = limits.spare_megabytes * MEGABYTE
        self._folder = folder
        self._clock = clock
        self._answer_lifetime = answer_lifetime
        self._free = free

    @property
    def free_bytes(self) -> int:
        """What the disk still takes."""
        return self._free(self._folder)

    @property
    def nearly_full(self) -> bool:
        """Whether only what is kept for the ledger is left."""
        return self.free_bytes < self._spare_bytes

    def reasons(self) -> list[Reason]:
        """For the health page."""
        free, kept = _megabytes(self.free_bytes), _megabytes(self._spare_bytes)
        text = f"the disk has {free} left, and {kept} are kept for the ledger: new queries are refused"
        return [Reason(Concern.DISK, text, stops=True)] if self.nearly_full else []

    def taken(self, site: str | None = None) -> int:
        """Bytes of columns and drafts, of a site or of all; a column that may still come counts as one that has."""
        jobs = (job for job in self._registry.all() if site is None or job.query.site == site)
        return sum(self._size(job.query) * max(int(job.needs_room), job.drafts) for job in jobs)

    def has_room(self, job: QueryJob) -> bool:
        """Whether one more draft of a query fits."""
        return self.taken(job.query.site) + self._size(job.query) <= self._site_bytes

    async def reserve(self, query: Query) -> None:
        """Refuse a query whose column would not fit. Columns of the site's failed queries go first: a retry brings them
        again, and until it does nobody needs them.
        """
        size = self._size(query)
        if size > self._site_bytes:
            raise Refusal(
                Trouble.UNWILLING,
                f"the column takes {_megabytes(size)}; this helper stores {_megabytes(self._site_bytes)} of a site",
                "Ask over smaller batches, or ask its operator to raise site_megabytes.",
            )
        for job in self._registry.all():
            if self.taken(query.site) + size <= self._site_bytes:
                break
            if job.query.site == query.site:
                await self._remove_if_failed(job)
        if self.taken(query.site) + size > self._site_bytes:
            raise Refusal(
                Trouble.BUSY,
                f"the queries of {query.site} take {_megabytes(self.taken(query.site))} here, and this one another"
                f" {_megabytes(size)}; a site has {_megabytes(self._site_bytes)}",
                "Wait for one of them to end, or ask its operator to raise site_megabytes.",
            )
        if self.free_bytes < self._spare_bytes + size:
            raise Refusal(
                Trouble.DISK,
                f"the column takes {_megabytes(size)}, and this helper's disk has {_megabytes(self.free_bytes)} left",
                "Ask its operator to make room, then ask again.",
            )

    async def tidy(self) -> None:
        """Run now and then: end what was never uploaded, and remove columns that nothing can need any more."""
        for job in self._registry.all():
            if job.abandoned:
                late = Failure(QueryState.AWAITING, None, "its column did not come before its deadline")
                await job.enter(QueryState.FAILED, late)
            if self._clock() >= job.query.deadline:
                await self._remove_if_failed(job)

    async def forget(self, now: int) -> None:
        """Run after the clock was checked, for it cannot be undone: answers and queries older than they are kept."""
        for job in self._registry.all():
            if not job.ended or job.record.updated + self._answer_lifetime > now:
                continue
            if job.record.state is QueryState.RELEASED:
                days = self._answer_lifetime // DAY
                await self._helper.forget_answer(job.query)
                gone = Failure(QueryState.RELEASED, None, f"this helper kept it for {days} days")
                await job.enter(QueryState.EXPIRED, gone)
            elif job.record.state is QueryState.EXPIRED or not await self._helper.has_live_attempt(job.query):
                self._registry.forget(job)

    async def _remove_if_failed(self, job: QueryJob) -> None:
        if not (job.failed and job.column.exists()):
            return
        # Asked of the ledger: a query that failed here after its vote is taken up again, with its column.
        if not await self._helper.has_live_attempt(job.query) and job.failed:
            remove_column(job.column)

    def _size(self, query: Query) -> int:
        return stored_size(layout_of(query, self._party), query.batch_size)


def layout_of(query: Query, party: int) -> ColumnLayout:
    """What the column of a query looks like at one helper."""
    header, body = header_size(query.unit, query.site, query.caller, query.shape), query.shape.explicit
    return column_layout(party, header, ELEMENT_SIZE * body, payload_size(query.suite))


def _megabytes(size: int) -> str:
    return f"{-(-size // MEGABYTE)} MB"

"""Space for columns on this helper's disk: what a site may use, when columns are removed, and uploads in progress.

Every upload writes a draft of its own; the first that is complete and has the signed root becomes the column. No upload
waits for another: a querier whose connection hangs starts again, and where one query has too many uploads the oldest is
evicted. All uploads together take at most half of the connections, and those of one site at most half of these; each
must keep a least rate.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import shutil
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

from mpc_helpers.admission.column import ColumnDraft, remove_column, stored_size
from mpc_helpers.helper import Helper
from mpc_helpers.identity.config import HelperConfig, Limits
from mpc_helpers.service.health import Concern, Reason
from mpc_helpers.service.policy import Refusal, RefusalReason
from mpc_helpers.service.tracked_query import TrackedQuery
from protocol.batch import ColumnLayout, column_layout
from protocol.field import ELEMENT_SIZE
from protocol.header import header_size
from protocol.net.listening import ConnectionLimits
from protocol.query import Query
from protocol.report import payload_size
from protocol.status import Failure, QueryState
from protocol.units import DAY, HOUR

MEGABYTE = 2**20
DRAFTS_PER_QUERY = 4
# An upload that falls so far behind the least rate, in bytes per second, is closed.
IDLE_SECONDS = 60.0
LEAST_RATE = 2**14
# A query that never ran is forgotten so long after its deadline. A clock that is further off is doubted (housekeeping).
FORGET_AFTER = HOUR
_WRITE_BYTES = 2**18


class Storage:
    """Disk space of helper `party` for the columns of its `queries`, a live mapping by digest."""

    def __init__(
        self,
        party: int,
        queries: dict[bytes, TrackedQuery],
        helper: Helper,
        config: HelperConfig,
        clock: Callable[[], int],
        *,
        free: Callable[[Path], int] = lambda folder: shutil.disk_usage(folder).free,
    ) -> None:
        self.party = party
        self._queries = queries
        self._helper = helper
        self._site_bytes = config.limits.site_megabytes * MEGABYTE
        self._spare_bytes = config.limits.spare_megabytes * MEGABYTE
        self._folder = config.data
        self._answer_lifetime = config.answer_lifetime
        self._clock = clock
        self._free = free

    @property
    def free_bytes(self) -> int:
        """Bytes that are free on the disk of the data folder."""
        return self._free(self._folder)

    @property
    def nearly_full(self) -> bool:
        """Whether only the space reserved for the ledger is left."""
        return self.free_bytes < self._spare_bytes

    def reasons(self) -> list[Reason]:
        """Return the health reason of a disk that is nearly full."""
        free, kept = _megabytes(self.free_bytes), _megabytes(self._spare_bytes)
        text = f"the disk has {free} left, and {kept} are reserved for the ledger: new queries are refused"
        return [Reason(Concern.DISK, text, stops=True)] if self.nearly_full else []

    def used_bytes(self, site: str | None = None) -> int:
        """Return the bytes of columns and drafts, of one site or of all; expected columns count as stored."""
        tracked = (each for each in self._queries.values() if site is None or each.query.site == site)
        return sum(self._size(each.query) * max(int(each.needs_space), each.drafts) for each in tracked)

    def has_space(self, tracked: TrackedQuery) -> bool:
        """Return whether one more draft of a query fits."""
        return self.used_bytes(tracked.query.site) + self._size(tracked.query) <= self._site_bytes

    async def reserve(self, query: Query) -> None:
        """Refuse a query whose column would not fit. First evict columns of the site's failed queries: a retry uploads
        them again, and nothing needs them until then.
        """
        size = self._size(query)
        if size > self._site_bytes:
            raise Refusal(
                RefusalReason.UNWILLING,
                f"the column takes {_megabytes(size)}; this helper stores {_megabytes(self._site_bytes)} of a site",
                "Use smaller batches, or ask its operator to raise site_megabytes.",
            )
        for tracked in list(self._queries.values()):
            if self.used_bytes(query.site) + size <= self._site_bytes:
                break
            if tracked.query.site == query.site:
                await self._remove_if_failed(tracked)
        if self.used_bytes(query.site) + size > self._site_bytes:
            raise Refusal(
                RefusalReason.BUSY,
                f"the queries of {query.site} take {_megabytes(self.used_bytes(query.site))} here, and this one another"
                f" {_megabytes(size)}; a site has {_megabytes(self._site_bytes)}",
                "Wait for one of them to end, or ask its operator to raise site_megabytes.",
            )
        if self.free_bytes < self._spare_bytes + size:
            raise Refusal(
                RefusalReason.DISK,
                f"the column takes {_megabytes(size)}, and this helper's disk has {_megabytes(self.free_bytes)} left",
                "Ask its operator to free disk space, then retry.",
            )

    def check_spare(self) -> None:
        """Refuse to write more of a column once only the ledger's space is left: other uploads may use the rest."""
        if self.nearly_full:
            message = f"this helper's disk has {_megabytes(self.free_bytes)} left, which are reserved for its ledger"
            raise Refusal(RefusalReason.DISK, message, "Ask its operator to free disk space, then retry.")

    async def tidy(self) -> None:
        """Fail queries that never got a column, and remove columns that nothing can need any more."""
        for tracked in list(self._queries.values()):
            if tracked.abandoned:
                late = Failure(QueryState.AWAITING, None, "its column was not uploaded before its deadline")
                await tracked.enter(QueryState.FAILED, late)
            if self._clock() >= tracked.query.deadline:
                await self._remove_if_failed(tracked)

    async def forget(self, now: int) -> None:
        """Erase answers, then queries, past their lifetime. Irreversible: the caller has checked the clock.

        A query that never ran is refused by its deadline once that has passed, so its withdrawal is needed no more.
        """
        for tracked in list(self._queries.values()):
            if tracked.never_ran and now >= tracked.query.deadline + FORGET_AFTER:
                tracked.remove()
                del self._queries[tracked.name.digest]
            if not tracked.booked or not tracked.ended or tracked.record.updated + self._answer_lifetime > now:
                continue
            if tracked.record.state is QueryState.RELEASED:
                days = self._answer_lifetime // DAY
                await self._helper.forget_answer(tracked.query)
                expired = Failure(QueryState.RELEASED, None, f"this helper kept it for {days} days")
                await tracked.enter(QueryState.EXPIRED, expired)
            elif tracked.record.state is QueryState.EXPIRED or not await self._helper.has_live_attempt(tracked.query):
                tracked.remove()
                self._queries.pop(tracked.name.digest, None)

    async def _remove_if_failed(self, tracked: TrackedQuery) -> None:
        if not (tracked.failed and tracked.column.exists()):
            return
        # The ledger decides: a query that failed here after its vote is resumed, with its column.
        if not await self._helper.has_live_attempt(tracked.query) and tracked.failed:
            remove_column(tracked.column)

    def layout(self, query: Query) -> ColumnLayout:
        """Return the layout of a query's column at this helper."""
        header, body = header_size(query.unit, query.site, query.caller, query.shape), query.shape.explicit
        return column_layout(self.party, header, ELEMENT_SIZE * body, payload_size(query.suite))

    def _size(self, query: Query) -> int:
        return stored_size(self.layout(query), query.batch_size)


def _megabytes(size: int) -> str:
    return f"{-(-size // MEGABYTE)} MB"


@dataclass(slots=True, eq=False)
class _Upload:
    """One upload in progress. `deadline` is the query's, on the loop's clock."""

    deadline: float
    limit: asyncio.Timeout
    stopped: bool = False
    # When it is closed unless more arrives: a token bucket, which each byte fills by 1/LEAST_RATE seconds.
    due: float = math.inf
    extended: float = -math.inf

    def extend(self, seconds: float) -> None:
        """Move the timeout on by `seconds`, to at most IDLE_SECONDS from now.

        The timer is set at most 100 times per period: pieces arrive thousands of times a second.
        """
        now = asyncio.get_running_loop().time()
        self.due = min(self.due + seconds, now + IDLE_SECONDS)
        if not self.stopped and now >= self.extended + IDLE_SECONDS / 100:
            self.extended = now
            self.limit.reschedule(min(self.deadline, self.due))

    def received(self, size: int) -> None:
        self.extend(size / LEAST_RATE)

    def stop(self) -> None:
        """Cancel the upload: another one became the column, or evicted it."""
        self.stopped = True
        if not self.limit.expired():
            self.limit.reschedule(asyncio.get_running_loop().time())


class Uploads:
    """Uploads in progress. `completed` is called with a query whose column has just become complete."""

    def __init__(
        self, storage: Storage, limits: Limits, clock: Callable[[], int], completed: Callable[[TrackedQuery], None]
    ) -> None:
        # Half of all connections are left to others, and half of these to sites other than the busiest.
        connections = ConnectionLimits.of_this_process()
        self._total, self._per_site = connections.exempt, min(limits.uploads_per_site, connections.share)
        self._storage = storage
        self._clock = clock
        self._completed = completed
        self._in_progress: dict[TrackedQuery, list[_Upload]] = {}
        # Unique in this process; a start removes the drafts of earlier ones.
        self._draft_names = map(str, itertools.count(1))

    def __len__(self) -> int:
        return sum(map(len, self._in_progress.values()))

    async def store(self, tracked: TrackedQuery, size: int, pieces: AsyncIterator[bytes]) -> None:
        """Store the column of a query that awaits one: complete and with the signed root, or not at all."""
        expected = self._storage.layout(tracked.query).file_size(tracked.query.batch_size)
        if size != expected:
            raise Refusal(
                RefusalReason.TOO_LARGE,
                f"the column has {size} bytes; this query's takes {expected}",
                "Cut the column from the batch that the query was made for, for this helper.",
            )
        if not tracked.awaiting:
            return
        left = max(0, tracked.query.deadline - self._clock())
        upload = _Upload(asyncio.get_running_loop().time() + left, asyncio.timeout(left))
        try:
            async with upload.limit:
                self._begin(tracked, upload)
                await self._write(tracked, upload, pieces)
        except TimeoutError:
            if tracked.awaiting:
                raise _timed_out(upload) from None
        finally:
            self._end(tracked, upload)

    def _begin(self, tracked: TrackedQuery, upload: _Upload) -> None:
        others, site = self._in_progress.setdefault(tracked, []), tracked.query.site
        # `reserve` left space for one draft; further drafts may evict.
        while others and (len(others) >= DRAFTS_PER_QUERY or self._full(site) or not self._storage.has_space(tracked)):
            others.pop(0).stop()
            tracked.drafts -= 1
        if self._full(site):
            message = f"{site} has {self._per_site} uploads at a time, and all sites {self._total}"
            hint = "Retry later, or ask this helper's operator to raise uploads_per_site."
            raise Refusal(RefusalReason.BUSY, message, hint)
        others.append(upload)
        tracked.drafts += 1
        upload.extend(0)

    def _full(self, site: str) -> bool:
        of_site = sum(len(uploads) for each, uploads in self._in_progress.items() if each.query.site == site)
        return of_site >= self._per_site or len(self) >= self._total

    def _end(self, tracked: TrackedQuery, upload: _Upload) -> None:
        in_progress = self._in_progress.get(tracked, [])
        if upload in in_progress:
            in_progress.remove(upload)
            tracked.drafts -= 1
        if not in_progress:
            self._in_progress.pop(tracked, None)

    async def _write(self, tracked: TrackedQuery, upload: _Upload, pieces: AsyncIterator[bytes]) -> None:
        query, layout = tracked.query, self._storage.layout(tracked.query)
        try:
            with ColumnDraft(tracked.column, layout, query.batch_size, next(self._draft_names)) as draft:
                async for piece in _gathered(pieces, upload.received):
                    self._storage.check_spare()
                    began = time.monotonic()
                    await asyncio.to_thread(draft.add, piece)
                    # A slow disk is not the querier's fault.
                    upload.extend(time.monotonic() - began)
                if not await asyncio.to_thread(draft.finish, query.batch_root, query.columns[self._storage.party]):
                    raise Refusal(
                        RefusalReason.CHANGED,
                        "the column is not the one that the query was signed for",
                        "Upload the column cut from that batch.",
                    )
                await self._keep(tracked, upload, draft)
        except OSError as error:
            raise Refusal(RefusalReason.DISK, f"this helper cannot store the column: {error.strerror}") from None

    async def _keep(self, tracked: TrackedQuery, upload: _Upload, draft: ColumnDraft) -> None:
        # Held for two renames only. Of two correct uploads that race, the second sees the column of the first.
        async with tracked.placing:
            if not tracked.awaiting:
                return
            await asyncio.to_thread(draft.keep)
            for other in self._in_progress[tracked]:
                if other is not upload:
                    other.stop()
            self._completed(tracked)


def _timed_out(upload: _Upload) -> Refusal:
    if upload.stopped:
        return Refusal(RefusalReason.BUSY, "a newer upload of this column has evicted this one")
    if asyncio.get_running_loop().time() >= upload.deadline:
        return Refusal(RefusalReason.ENDED, "the column did not arrive before the query's deadline")
    message = f"the column arrived at less than {LEAST_RATE} bytes a second for {IDLE_SECONDS:g} s"
    return Refusal(RefusalReason.ENDED, message, "Upload it again.")


async def _gathered(pieces: AsyncIterator[bytes], received: Callable[[int], None]) -> AsyncIterator[bytes]:
    """Join small pieces into ones that are worth a thread switch."""
    held: list[bytes] = []
    size = 0
    async for piece in pieces:
        received(len(piece))
        held.append(piece)
        size += len(piece)
        if size >= _WRITE_BYTES:
            yield b"".join(held)
            held, size = [], 0
    yield b"".join(held)

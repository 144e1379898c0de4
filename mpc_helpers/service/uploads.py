"""Uploads: columns on their way to disk. Each has a draft of its own; the first that is whole and right is the column.

Nobody waits for somebody else's upload. A querier whose connection hangs begins again, and the newest has its place:
where there are too many for one query, the oldest goes.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from mpc_helpers.admission.column import ColumnDraft
from mpc_helpers.service.jobs import QueryJob
from mpc_helpers.service.refusal import Refusal, Trouble
from mpc_helpers.service.storage import Storage, layout_of
from protocol.query import Query

DRAFTS_PER_QUERY = 4
# An upload of which nothing arrives for so long has been left alone.
IDLE_SECONDS = 60.0
_WRITE_BYTES = 2**18


@dataclass(slots=True, eq=False)
class _Upload:
    """One under way. `end` is its last moment, in the loop's time: the query's deadline."""

    end: float
    limit: asyncio.Timeout
    over: bool = False
    extended: float = -math.inf

    def heard(self) -> None:
        """Something arrived. That happens thousands of times a second, and moving the limit each time would cost."""
        now = asyncio.get_running_loop().time()
        if not self.over and now >= self.extended + IDLE_SECONDS / 100:
            self.extended = now
            self.limit.reschedule(min(self.end, now + IDLE_SECONDS))

    def stop(self) -> None:
        """It is not needed any more: another is the column, or a newer one takes its place."""
        self.over = True
        if not self.limit.expired():
            self.limit.reschedule(asyncio.get_running_loop().time())


class Uploads:
    """Run by helper `party`. `arrived` is called with a query whose column has just become whole."""

    def __init__(
        self, party: int, storage: Storage, clock: Callable[[], int], arrived: Callable[[QueryJob], None]
    ) -> None:
        self._party = party
        self._storage = storage
        self._clock = clock
        self._arrived = arrived
        self._under_way: dict[QueryJob, list[_Upload]] = {}
        # Never used twice while this process runs, and nothing is left of an earlier one.
        self._marks = map(str, itertools.count(1))

    def __len__(self) -> int:
        return sum(map(len, self._under_way.values()))

    async def take(self, job: QueryJob, size: int, pieces: AsyncIterator[bytes]) -> None:
        """Store the column of a query that awaits one: whole and as it was signed, or not at all."""
        check_size(job.query, self._party, size)
        if not job.awaiting:
            return
        left = max(0, job.query.deadline - self._clock())
        upload = _Upload(asyncio.get_running_loop().time() + left, asyncio.timeout(left))
        try:
            async with upload.limit:
                self._begin(job, upload)
                await self._store(job, upload, pieces)
        except TimeoutError:
            if job.awaiting:
                raise _too_late(upload) from None
        finally:
            self._end(job, upload)

    def _begin(self, job: QueryJob, upload: _Upload) -> None:
        others = self._under_way.setdefault(job, [])
        # Its own room is there since the query was taken; what further drafts need may not be.
        while others and (len(others) >= DRAFTS_PER_QUERY or not self._storage.has_room(job)):
            others.pop(0).stop()
            job.drafts -= 1
        others.append(upload)
        job.drafts += 1
        upload.heard()

    def _end(self, job: QueryJob, upload: _Upload) -> None:
        under_way = self._under_way.get(job, [])
        if upload in under_way:
            under_way.remove(upload)
            job.drafts -= 1
        if not under_way:
            self._under_way.pop(job, None)

    async def _store(self, job: QueryJob, upload: _Upload, pieces: AsyncIterator[bytes]) -> None:
        query = job.query
        try:
            with ColumnDraft(job.column, layout_of(query, self._party), query.batch_size, next(self._marks)) as draft:
                async for piece in _gathered(pieces, upload.heard):
                    await asyncio.to_thread(draft.add, piece)
                if not await asyncio.to_thread(draft.finish, query.batch_root, query.columns[self._party]):
                    raise Refusal(
                        Trouble.CHANGED,
                        "the column is not the one that the query was signed for",
                        "Upload the column cut from that batch.",
                    )
                await self._keep(job, upload, draft)
        except OSError as error:
            raise Refusal(Trouble.DISK, f"this helper cannot store the column: {error.strerror}") from None

    async def _keep(self, job: QueryJob, upload: _Upload, draft: ColumnDraft) -> None:
        # Held for two renames and never while anybody is waited for: of two that are right, the second finds the first.
        async with job.placing:
            if not job.awaiting:
                return
            await asyncio.to_thread(draft.keep)
            for other in self._under_way[job]:
                if other is not upload:
                    other.stop()
            self._arrived(job)


def check_size(query: Query, party: int, size: int) -> None:
    """Refuse a column of another size before it is read."""
    expected = layout_of(query, party).file_size(query.batch_size)
    if size != expected:
        raise Refusal(
            Trouble.TOO_LARGE,
            f"the column has {size} bytes; this query's takes {expected}",
            "Cut the column from the batch that the query was made for, for this helper.",
        )


def _too_late(upload: _Upload) -> Refusal:
    if upload.over:
        return Refusal(Trouble.BUSY, "a newer upload of this column has taken the place of this one")
    if asyncio.get_running_loop().time() >= upload.end:
        return Refusal(Trouble.ENDED, "the column did not arrive before the query's deadline")
    return Refusal(Trouble.ENDED, f"nothing of the column arrived for {IDLE_SECONDS:g} s", "Upload it again.")


async def _gathered(pieces: AsyncIterator[bytes], heard: Callable[[], None]) -> AsyncIterator[bytes]:
    """Pieces as they come, put together into ones that are worth handing to a thread."""
    held: list[bytes] = []
    size = 0
    async for piece in pieces:
        heard()
        held.append(piece)
        size += len(piece)
        if size >= _WRITE_BYTES:
            yield b"".join(held)
            held, size = [], 0
    yield b"".join(held)

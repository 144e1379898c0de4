"""Intake: one report after the other, many in one transaction, and an answer only once a report is on disk."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from protocol.collector.limits import CollectorLimits, NotTaken, PostingRate, Refused
from protocol.collector.store import Filed, ReportStore
from protocol.errors import ProtocolError, TrefoilError
from protocol.header import Header
from protocol.report import SealedReport

# Reports that wait for the disk: more are refused, so that memory is bounded whatever is posted.
MAX_WAITING = 512
_MOST_AT_ONCE = 256

Waiting = tuple[Header, SealedReport, "asyncio.Future[Filed]"]


class CollectorIntake:
    """Run by a collector. `take` is called by every request; one task writes."""

    def __init__(
        self,
        store: ReportStore,
        limits: CollectorLimits,
        clock: Callable[[], int],
        ticks: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._limits = limits
        self._clock = clock
        self._rate = PostingRate(limits, ticks)
        self._waiting: asyncio.Queue[Waiting] = asyncio.Queue(MAX_WAITING)

    async def take(self, body: bytes) -> Filed:
        """One posted report. It is on disk when this returns; `NotTaken` otherwise."""
        try:
            report = SealedReport.decode(body)
            header = Header.decode(report.header)
        except ProtocolError as error:
            raise NotTaken(Refused.MALFORMED, f"this is not a sealed report: {error}") from None
        self._limits.check(header, self._clock())
        self._rate.take(header.terms.site)
        filed: asyncio.Future[Filed] = asyncio.get_running_loop().create_future()
        try:
            self._waiting.put_nowait((header, report, filed))
        except asyncio.QueueFull:
            raise NotTaken(Refused.BUSY, "too many reports wait for the disk", "Post it again in a second.") from None
        return await filed

    async def run(self) -> None:
        """Write what waits, as much as there is in one transaction, until cancelled."""
        while True:
            waiting = [await self._waiting.get()]
            while len(waiting) < _MOST_AT_ONCE and not self._waiting.empty():
                waiting.append(self._waiting.get_nowait())
            await self._write(waiting)

    async def _write(self, waiting: list[Waiting]) -> None:
        reports = [(header, report) for header, report, _ in waiting]
        try:
            outcomes = await asyncio.to_thread(self._store.add, reports)
        except TrefoilError as error:
            outcomes = [NotTaken(Refused.DISK, str(error), error.hint)] * len(waiting)
        for (_, _, filed), outcome in zip(waiting, outcomes, strict=True):
            if filed.done():  # the client went away meanwhile
                continue
            if isinstance(outcome, NotTaken):
                filed.set_exception(outcome)
            else:
                filed.set_result(outcome)

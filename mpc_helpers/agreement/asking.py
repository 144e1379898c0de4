"""Asking both peers for ever about an attempt that was voted for here, and waiting for its next change."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from mpc_helpers.agreement.hooks import Pace
from mpc_helpers.ledger.file import LedgerClosed, LedgerError

logger = logging.getLogger(__name__)


class Asking:
    """One task for each attempt. `ask_once` asks both peers, and says whether nothing is left to ask."""

    def __init__(self, ask_once: Callable[[bytes], Awaitable[bool]], pace: Pace) -> None:
        self._ask_once = ask_once
        self._pace = pace
        self._tasks: dict[bytes, asyncio.Task[None]] = {}
        self._troubles: set[str] = set()

    def keep(self, attempt_id: bytes) -> None:
        """Ask until the attempt has ended. Never free on a timeout."""
        if attempt_id not in self._tasks:
            task = asyncio.get_running_loop().create_task(self._until_ended(attempt_id))
            self._tasks[attempt_id] = task
            task.add_done_callback(lambda done: self._stopped(attempt_id, done))

    async def close(self) -> None:
        """Stop asking; what is on disk is asked for again after the next start."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @contextmanager
    def taking_over(self) -> Iterator[None]:
        """A ledger that fails (disk full, locked) has moved nothing and freed nothing; the next ASK tries again.

        Logged once for each text until a move succeeds.
        """
        try:
            yield
        except LedgerClosed:
            raise
        except LedgerError as error:
            if str(error) not in self._troubles:
                self._troubles.add(str(error))
                logger.error("waiting for the ledger: %s", error)

    def ledger_works(self) -> None:
        """A move has succeeded: the next trouble is a new one."""
        self._troubles.clear()

    async def _until_ended(self, attempt_id: bytes) -> None:
        wait = self._pace.first
        while True:
            with self.taking_over():
                if await self._ask_once(attempt_id):
                    return
            await asyncio.sleep(wait)
            wait = min(2 * wait, self._pace.longest_ask)

    def _stopped(self, attempt_id: bytes, task: asyncio.Task[None]) -> None:
        self._tasks.pop(attempt_id, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("asking about an attempt failed: %r", error)


class Changes:
    """Lets tasks wait for the next change of an attempt."""

    def __init__(self) -> None:
        self._events: dict[bytes, asyncio.Event] = {}

    def next(self, attempt_id: bytes) -> asyncio.Event:
        """Set at the next change. Take it before reading the ledger, or a change in between is missed."""
        return self._events.setdefault(attempt_id, asyncio.Event())

    def awaited(self, attempt_id: bytes) -> bool:
        """Whether somebody waits for a change."""
        return attempt_id in self._events

    def tell(self, attempt_id: bytes) -> None:
        """Wake whoever waits. Whoever waits again gets another event."""
        if (event := self._events.pop(attempt_id, None)) is not None:
            event.set()

"""Housekeeping: every hour, tidy the disk, forget reports too old to be admitted, destroy keys nothing is sealed to."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol

from mpc_helpers.identity.config import HelperConfig
from mpc_helpers.identity.membership import Membership, destroy_expired_keys
from mpc_helpers.ledger.ledger import ReportLedger
from mpc_helpers.service.clocks import CLOCK_HINT, NO_LAST_ROUND, ClockDoubted, LastRound, PeerClocks, check_clock
from mpc_helpers.service.health import Concern, Reason
from protocol.errors import TrefoilError

ROUND_SECONDS = 3600.0
HEAR_SECONDS = 30.0
RETRY_SECONDS = 1.0
_LOG = logging.getLogger("trefoil.housekeeping")


class Tidied(Protocol):
    """Whoever keeps queries on disk."""

    async def tidy(self) -> None: ...

    async def forget(self, now: int) -> None: ...


@dataclass(slots=True)
class Housekeeping:
    """One helper's. `ask_time` lets a peer say what its clock says; whoever cannot be reached says nothing."""

    config: HelperConfig
    membership: Membership
    ledger: ReportLedger
    queries: Tidied
    peers: PeerClocks
    ask_time: Callable[[int], Awaitable[object]]
    clock: Callable[[], int]
    # Why the clock is not followed, and what went wrong in the last round: nothing, most of the time.
    doubt: str = field(default="", init=False)
    fault: str = field(default="", init=False)
    # Reports in the ledger, as they were last counted.
    rows: int = field(default=0, init=False)

    async def run(self) -> None:
        """Rounds without end. Whatever goes wrong in one, the next is tried."""
        while True:
            self.fault = ""
            try:
                await self.round()
            except ClockDoubted as error:
                _LOG.error("%s (%s)", error, error.hint)
            except TrefoilError as error:
                self.fault = str(error)
                _LOG.error("housekeeping failed: %s", error)
            except Exception:
                self.fault = "a defect, or a disk that fails: the log says more"
                _LOG.exception("housekeeping failed")
            await asyncio.sleep(ROUND_SECONDS)

    async def round(self) -> None:
        """What can be undone first; then the clock is checked; what cannot be undone last, and keys last of all."""
        await self.queries.tidy()
        self.rows = await asyncio.to_thread(self.ledger.reports.count)
        try:
            now = await self._follow_clock()
        except ClockDoubted as error:
            self.doubt = str(error)
            raise
        self.doubt = ""
        # Behind the check of the clock: an answer that is erased too early was paid for in vain.
        await self.queries.forget(now)

    async def _follow_clock(self) -> int:
        """What the clock says, once it is believed and what cannot be undone has followed it."""
        last = await asyncio.to_thread(self._last_round)
        # Without a last round only the peers know whether the clock is right. So they are waited for.
        patience = ROUND_SECONDS if last is None else HEAR_SECONDS
        heard = await asyncio.gather(*(self._hear(party, patience) for party in self.membership.peers))
        now = self.clock()
        if last is None and not all(heard):
            raise ClockDoubted(f"{NO_LAST_ROUND}, and not both peers have said what time it is", CLOCK_HINT)
        check_clock(now, last, self.peers)
        await asyncio.to_thread(self._forget, now)
        return now

    def _last_round(self) -> int | None:
        last = LastRound(self.config.data).read()
        if last is None and (watermark := self.ledger.reports.watermark):
            # The folder was lost but not the ledger, which knows how far the last round went.
            return watermark + self.config.report_lifetime
        return last

    def _forget(self, now: int) -> None:
        self.ledger.reports.advance_watermark(now - self.config.report_lifetime)
        destroy_expired_keys(self.config, self.membership, now)
        LastRound(self.config.data).write(now)

    async def _hear(self, party: int, seconds: float) -> bool:
        """Tried for a while: helpers that start together know each other's certificates only after some seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while True:
                    with contextlib.suppress(TrefoilError):
                        await self.ask_time(party)
                        return True
                    await asyncio.sleep(RETRY_SECONDS)
        return False

    def reasons(self) -> list[Reason]:
        """What an operator should look at."""
        clock = [*self.peers.warnings(), *filter(None, [self.doubt])]
        failed = [f"the last round of housekeeping failed: {self.fault}"] if self.fault else []
        return [
            *(Reason(Concern.CLOCK, text) for text in clock),
            *(Reason(Concern.HOUSEKEEPING, text) for text in failed),
        ]

"""Hourly housekeeping: tidy the disk, forget reports too old to be admitted, destroy keys that have expired.

Forgetting reports and destroying keys is irreversible and follows the wall clock, which may be wrong for a moment. So
each round may go only some hours past the last one; after a longer pause, or if the clocks of both peers disagree with
ours, an operator decides. Before the first round there is nothing to compare with, so both peers must agree with us.
"""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mpc_helpers.agreement.negotiation import public_error
from mpc_helpers.identity.config import HelperConfig
from mpc_helpers.identity.membership import Membership, destroy_expired_keys
from mpc_helpers.ledger.ledger import ReportLedger
from mpc_helpers.service.health import Concern, Labels, Reason
from mpc_helpers.service.storage import Storage
from protocol.errors import ErrorKind, TrefoilError
from protocol.files import write_atomically
from protocol.units import HOUR

MAX_ADVANCE = 6 * HOUR
# A reply may take seconds, and is dated in whole seconds.
SHOWN_DIFFERENCE = 60
DOUBTED_DIFFERENCE = HOUR
NO_LAST_ROUND = "there is no earlier round to compare the clock with"
_LOG = logging.getLogger(__name__)
CLOCK_HINT = "Compare the clock with another. If it is right, run: trefoil ledger accept-clock"


class ClockDoubted(TrefoilError):
    """The clock is not trusted for anything irreversible until an operator has checked it."""

    kind = ErrorKind.CLOCK


class LastRound:
    """The time of the last irreversible round: one durable number."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "last-round"

    def read(self) -> int | None:
        """Return the time; None before the first round."""
        try:
            return int(self._path.read_text())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise ClockDoubted(
                f"cannot read the time of the last round from {self._path}: {error}",
                CLOCK_HINT,
                kind=ErrorKind.FILE_DAMAGED,
            ) from None

    def write(self, now: int) -> None:
        """Store the time. It never decreases: setting a clock back undoes nothing."""
        write_atomically(self._path, f"{max(now, self.read() or 0)}\n".encode(), 0o600)

    def accept(self, now: int) -> None:
        """Store the time because an operator vouches for the clock."""
        write_atomically(self._path, f"{now}\n".encode(), 0o600)


def seconds_ahead(date: str, now: int) -> int | None:
    """Return how far the clock behind a Date header is ahead of ours; None if the header cannot be read."""
    try:
        return int(email.utils.parsedate_to_datetime(date).timestamp()) - now
    except (ValueError, TypeError, OverflowError):
        return None


class PeerClocks:
    """The clocks of the two peers at their last reply, as seconds ahead of ours."""

    def __init__(self, membership: Membership, clock: Callable[[], int]) -> None:
        self._membership = membership
        self._clock = clock
        self._ahead: dict[int, int] = {}

    def heard(self, party: int, date: str) -> None:
        """Record the Date header of a peer's reply. The connection is pinned, so only the peer can have written it."""
        ahead = seconds_ahead(date, self._clock())
        if ahead is None:
            return  # a peer without a usable clock can still be talked to
        if abs(ahead) > SHOWN_DIFFERENCE >= abs(self._ahead.get(party, 0)):
            _LOG.warning("%s", self._describe(party, ahead))
        self._ahead[party] = ahead

    def gauge(self) -> Mapping[Labels, float]:
        return {(("peer", self._membership.name(party)),): float(ahead) for party, ahead in self._ahead.items()}

    def warnings(self) -> list[str]:
        """Return a sentence for each peer whose clock differs noticeably."""
        return [self._describe(party, ahead) for party, ahead in self._ahead.items() if abs(ahead) > SHOWN_DIFFERENCE]

    def both_differ(self) -> bool:
        """Return whether both differ from ours by over an hour. One is honest, so its clock or ours is wrong."""
        return self._both(lambda ahead: abs(ahead) > DOUBTED_DIFFERENCE)

    def both_agree(self) -> bool:
        """Return whether both are within an hour of ours."""
        return self._both(lambda ahead: abs(ahead) <= DOUBTED_DIFFERENCE)

    def _both(self, fits: Callable[[int], bool]) -> bool:
        return len(self._ahead) == len(self._membership.peers) and all(map(fits, self._ahead.values()))

    def _describe(self, party: int, ahead: int) -> str:
        side = "ahead of" if ahead > 0 else "behind"
        return f"the clock of {self._membership.name(party)} is {abs(ahead)} s {side} this helper's"


def check_clock(now: int, last: int | None, peers: PeerClocks) -> None:
    """Raise `ClockDoubted` unless an irreversible round may advance to `now`."""
    if peers.both_differ():
        raise ClockDoubted("the clocks of both peers differ from this one by more than an hour", CLOCK_HINT)
    if last is None and not peers.both_agree():
        raise ClockDoubted(f"{NO_LAST_ROUND}, and not both peers agree with it", CLOCK_HINT)
    if last is not None and now > last + MAX_ADVANCE:
        ahead = (now - last) // HOUR
        raise ClockDoubted(
            f"the clock is {ahead} hours past the last round; nothing is forgotten or destroyed", CLOCK_HINT
        )


ROUND_SECONDS = 3600.0
HEAR_SECONDS = 30.0
RETRY_SECONDS = 1.0


@dataclass(slots=True)
class Housekeeping:
    """The rounds of one helper. `ask_time` requests any reply from a peer, whose Date header is then recorded."""

    config: HelperConfig
    membership: Membership
    ledger: ReportLedger
    storage: Storage
    peers: PeerClocks
    ask_time: Callable[[int], Awaitable[object]]
    clock: Callable[[], int]
    # Why the clock is doubted, and why the last round failed; normally empty.
    doubt: str = field(default="", init=False)
    fault: str = field(default="", init=False)
    # Reports in the ledger, at the last count.
    rows: int = field(default=0, init=False)

    async def run(self) -> None:
        """Run a round every hour. A failure of one does not prevent the next."""
        while True:
            # Cleared after a round, not before: a gap while it runs would begin the time of the alert rule again.
            try:
                await self.round()
                self.fault = ""
            except ClockDoubted as error:
                self.fault = ""
                _LOG.error("%s (%s)", error, error.hint)
            except TrefoilError as error:
                # Anyone may read the health page.
                self.fault = str(public_error(error))
                _LOG.error("housekeeping failed: %s", error)
            except Exception:
                self.fault = "a defect or a failing disk: see the log"
                _LOG.exception("housekeeping failed")
            await asyncio.sleep(ROUND_SECONDS)

    async def round(self) -> None:
        """Do what is reversible first, then check the clock, then do what is not."""
        await self.storage.tidy()
        self.rows = await asyncio.to_thread(self.ledger.measure)
        try:
            now = await self._follow_clock()
        except ClockDoubted as error:
            self.doubt = str(error)
            raise
        self.doubt = ""
        # After the check of the clock: an answer erased too early was paid for in vain.
        await self.storage.forget(now)

    async def _follow_clock(self) -> int:
        """Check the clock, advance the irreversible state to it, and return it."""
        last = await asyncio.to_thread(self._last_round)
        # Without a last round only the peers can confirm the clock, so wait for them.
        timeout = ROUND_SECONDS if last is None else HEAR_SECONDS
        heard = await asyncio.gather(*(self._hear(party, timeout) for party in self.membership.peers))
        now = self.clock()
        if last is None and not all(heard):
            raise ClockDoubted(f"{NO_LAST_ROUND}, and not both peers have replied", CLOCK_HINT)
        check_clock(now, last, self.peers)
        await asyncio.to_thread(self._forget, now)
        return now

    def _last_round(self) -> int | None:
        last = LastRound(self.config.data).read()
        if last is None and (watermark := self.ledger.reports.watermark):
            # The folder was lost, but the ledger's watermark shows how far the last round went.
            return watermark + self.config.report_lifetime
        return last

    def _forget(self, now: int) -> None:
        self.ledger.reports.advance_watermark(now - self.config.report_lifetime)
        destroy_expired_keys(self.config, self.membership, now)
        LastRound(self.config.data).write(now)

    async def _hear(self, party: int, seconds: float) -> bool:
        """Return whether a peer replied. Retry until the timeout: at start its certificate may take some seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while True:
                    with contextlib.suppress(TrefoilError):
                        await self.ask_time(party)
                        return True
                    await asyncio.sleep(RETRY_SECONDS)
        return False

    def reasons(self) -> list[Reason]:
        clock = [*self.peers.warnings(), *filter(None, [self.doubt])]
        failed = [f"the last round of housekeeping failed: {self.fault}"] if self.fault else []
        return [
            *(Reason(Concern.CLOCK, text) for text in clock),
            *(Reason(Concern.HOUSEKEEPING, text) for text in failed),
        ]

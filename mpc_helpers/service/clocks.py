"""How far this machine's clock may be believed: beside the clocks of both peers, and beside the last time it was used.

Two things that follow the clock cannot be undone: reports are forgotten and private keys destroyed. A clock that is
wrong for a moment must do neither. So they follow it only some hours past the last round; after a longer pause, or
where both peers' clocks say something else, an operator decides. Before the first round nothing says what time it was,
so both peers must say the same.
"""

from __future__ import annotations

import email.utils
import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from mpc_helpers.identity.membership import Membership
from mpc_helpers.service.metrics import Labels
from protocol.errors import TrefoilError
from protocol.files import write_atomically
from protocol.seconds import HOUR

LONGEST_STEP = 6 * HOUR
# An answer may be seconds on its way, and carries whole seconds.
SHOWN_DIFFERENCE = 60
DOUBTED_DIFFERENCE = HOUR
NO_LAST_ROUND = "nothing was ever forgotten or destroyed by this clock"
_LOG = logging.getLogger("trefoil.clocks")
CLOCK_HINT = "Compare the clock with another. If it is right, say so with: trefoil ledger accept-clock"


class ClockDoubted(TrefoilError):
    """Nothing irreversible is done by this clock until an operator has looked."""


class LastRound:
    """When housekeeping last did something that cannot be undone: one durable number."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "last-round"

    def read(self) -> int | None:
        """None before the first round."""
        try:
            return int(self._path.read_text())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise ClockDoubted(
                f"the time of the last round cannot be read from {self._path}: {error}", CLOCK_HINT
            ) from None

    def write(self, now: int) -> None:
        """Never goes back: a clock that was set back has not undone what was done."""
        write_atomically(self._path, f"{max(now, self._known())}\n".encode(), 0o600)

    def accept(self, now: int) -> None:
        """An operator's word that the clock is right."""
        write_atomically(self._path, f"{now}\n".encode(), 0o600)

    def _known(self) -> int:
        return self.read() or 0


class PeerClocks:
    """What the two peers' clocks said when they last answered, as seconds ahead of ours."""

    def __init__(self, membership: Membership, clock: Callable[[], int]) -> None:
        self._membership = membership
        self._clock = clock
        self._ahead: dict[int, int] = {}

    def heard(self, party: int, date: str) -> None:
        """A peer's answer was dated like this. Taken from a pinned connection, so nobody else can have written it."""
        try:
            ahead = int(email.utils.parsedate_to_datetime(date).timestamp()) - self._clock()
        except (ValueError, TypeError, OverflowError):
            return  # a peer without a clock is not a reason to stop talking
        if abs(ahead) > SHOWN_DIFFERENCE >= abs(self._ahead.get(party, 0)):
            _LOG.warning("%s", self._words(party, ahead))
        self._ahead[party] = ahead

    def gauge(self) -> Mapping[Labels, float]:
        """For the metrics page."""
        return {(("peer", self._membership.name(party)),): float(ahead) for party, ahead in self._ahead.items()}

    def warnings(self) -> list[str]:
        """A sentence for each peer whose clock differs enough to be worth one."""
        return [self._words(party, ahead) for party, ahead in self._ahead.items() if abs(ahead) > SHOWN_DIFFERENCE]

    def both_differ(self) -> bool:
        """Whether both say something else by more than an hour. One of them is honest, so ours or its is wrong."""
        return len(self._ahead) == len(self._membership.peers) and all(
            abs(ahead) > DOUBTED_DIFFERENCE for ahead in self._ahead.values()
        )

    def both_agree(self) -> bool:
        """Whether both say the same as ours, but for an hour."""
        return len(self._ahead) == len(self._membership.peers) and all(
            abs(ahead) <= DOUBTED_DIFFERENCE for ahead in self._ahead.values()
        )

    def _words(self, party: int, ahead: int) -> str:
        side = "ahead of" if ahead > 0 else "behind"
        return f"the clock of {self._membership.name(party)} is {abs(ahead)} s {side} this helper's"


def check_clock(now: int, last: int | None, peers: PeerClocks) -> None:
    """Whether what cannot be undone may follow the clock to `now`."""
    if peers.both_differ():
        raise ClockDoubted("the clocks of both peers differ from this one by more than an hour", CLOCK_HINT)
    if last is None and not peers.both_agree():
        raise ClockDoubted(f"{NO_LAST_ROUND}, and not both peers have the same time", CLOCK_HINT)
    if last is not None and now > last + LONGEST_STEP:
        ahead = (now - last) // HOUR
        raise ClockDoubted(
            f"the clock is {ahead} hours past the last round; nothing is forgotten or destroyed", CLOCK_HINT
        )

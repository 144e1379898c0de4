"""Watching the peers: every few seconds each is asked whether it is there. Without both no query is answered."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from mpc_helpers.identity.membership import Membership
from mpc_helpers.service.health import Concern, Reason
from mpc_helpers.service.metrics import Labels
from protocol.errors import TrefoilError

LOOK_SECONDS = 10.0
# Sooner while one is missing: helpers that start together know each other only after some seconds.
MISSING_SECONDS = 1.0
_LOG = logging.getLogger("trefoil.peers")


@dataclass(slots=True)
class PeerWatch:
    """One helper's. `ask` lets a peer answer something, or is an error that says why it did not."""

    membership: Membership
    ask: Callable[[int], Awaitable[object]]
    # Why a peer did not answer when it was last asked; empty if it did. A peer that is not here was not asked yet.
    silent: dict[int, str] = field(default_factory=dict, init=False)

    async def run(self) -> None:
        """Looks without end."""
        while True:
            await self.look()
            all_there = all(self.silent.get(party) == "" for party in self.membership.peers)
            await asyncio.sleep(LOOK_SECONDS if all_there else min(LOOK_SECONDS, MISSING_SECONDS))

    async def look(self) -> None:
        """Ask both, at the same time."""
        await asyncio.gather(*map(self._look, self.membership.peers))

    async def _look(self, party: int) -> None:
        try:
            await self.ask(party)
            why = ""
        except TrefoilError as error:
            why = str(error)
        before, name = self.silent.get(party), self.membership.name(party)
        self.silent[party] = why
        if why and not before:
            _LOG.warning("%s does not answer: %s", name, why)
        elif before and not why:
            _LOG.info("%s answers again", name)

    def reasons(self) -> list[Reason]:
        """Each peer that is not there."""
        unheard = "has not been heard from yet"
        said = {
            party: self.silent.get(party, f"{self.membership.name(party)} {unheard}") for party in self.membership.peers
        }
        return [Reason(Concern.PEER, why, stops=True) for why in said.values() if why]

    def gauge(self) -> Mapping[Labels, float]:
        """1 for each peer that answers."""
        return {
            (("peer", self.membership.name(party)),): float(self.silent.get(party) == "")
            for party in self.membership.peers
        }

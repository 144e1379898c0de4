"""Health: what stops queries, what will unless an operator acts, and the checks that detect it.

A helper that serves is alive, whatever is wrong: restarting it because a peer is down helps no one. It is ready when
nothing known stops a new query from being answered.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from mpc_helpers.identity import tls
from mpc_helpers.identity.membership import Membership
from mpc_helpers.ledger.engine import LedgerClosed
from protocol.errors import TrefoilError
from protocol.helper_set import HelperSet
from protocol.units import DAY

_LOG = logging.getLogger(__name__)
Labels = tuple[tuple[str, str], ...]


class Concern(Enum):
    """The subject of a reason. Each has a gauge and an alert rule (DEPLOY.md)."""

    PEER = "peer"
    PORT = "port"
    LEDGER = "ledger"
    DATABASE = "database"
    DISK = "disk"
    CLOCK = "clock"
    KEY = "key"
    CERTIFICATE = "certificate"
    PROOFS = "proofs"
    DISPUTE = "dispute"
    HOUSEKEEPING = "housekeeping"
    CONFIGURATION = "configuration"


@dataclass(frozen=True, slots=True)
class Reason:
    """One thing that needs attention. If `stops`, no new query is answered until it is fixed."""

    concern: Concern
    text: str
    stops: bool = False

    def to_json(self) -> dict[str, object]:
        return {"concern": self.concern.value, "text": self.text, "stops": self.stops}


Source = Callable[[], Iterable[Reason]]


@dataclass(slots=True)
class Health:
    """The reasons of all parts of one helper, collected on demand."""

    sources: list[Source] = field(default_factory=list)

    def reasons(self) -> list[Reason]:
        """Return all reasons, those that stop queries first."""
        return sorted((reason for source in self.sources for reason in source()), key=lambda reason: not reason.stops)

    @property
    def ready(self) -> bool:
        """Whether no known reason stops a new query."""
        return not any(reason.stops for reason in self.reasons())

    def page(self, more: Mapping[str, object]) -> dict[str, object]:
        """Return the body of `/healthz`, with `more` fields."""
        reasons = self.reasons()
        ready = not any(reason.stops for reason in reasons)
        status = "ok" if not reasons else "warning" if ready else "not ready"
        return {"status": status, "ready": ready, "reasons": [reason.to_json() for reason in reasons], **more}

    def gauge(self) -> Mapping[Labels, float]:
        concerns = [reason.concern for reason in self.reasons()]
        return {(("concern", concern.value),): float(concerns.count(concern)) for concern in Concern}


LOOK_SECONDS = 10.0
# Polling interval while a peer is missing: helpers that start together need some seconds to fetch certificates.
MISSING_SECONDS = 1.0
# A peer that has not been met since the start is no warning before so many polls: the three start one after another,
# and one that does not have our certificate yet ends the handshake.
STARTING_POLLS = 30


@dataclass(slots=True)
class PeerWatch:
    """Polls both peers. `ask` returns if a peer responds, and raises an error that says why otherwise."""

    membership: Membership
    ask: Callable[[int], Awaitable[object]]
    # By party: the error of the last poll, empty if the peer responded, absent before the first poll.
    silent: dict[int, str] = field(default_factory=dict, init=False)
    # By party: polls without a response since the last one with; and the peers that have responded since the start.
    _missed: dict[int, int] = field(default_factory=dict, init=False)
    _met: set[int] = field(default_factory=set, init=False)

    async def run(self) -> None:
        while True:
            await self.look()
            all_there = all(self.silent.get(party) == "" for party in self.membership.peers)
            await asyncio.sleep(LOOK_SECONDS if all_there else min(LOOK_SECONDS, MISSING_SECONDS))

    async def look(self) -> None:
        await asyncio.gather(*map(self._look, self.membership.peers))

    async def _look(self, party: int) -> None:
        try:
            await self.ask(party)
            why = ""
        except TrefoilError as error:
            why = str(error)
        missed, name = self._missed.get(party, 0), self.membership.name(party)
        self.silent[party] = why
        self._missed[party] = missed + 1 if why else 0
        if not why:
            self._met.add(party)
            if missed:
                _LOG.info("%s responds", name)
        elif missed == (0 if party in self._met else STARTING_POLLS):
            _LOG.warning("%s does not respond: %s", name, why)
        elif missed == 0:
            _LOG.info("waiting for %s: %s", name, why)

    def reasons(self) -> list[Reason]:
        unheard = "has not responded yet"
        errors = [self.silent.get(party, f"{self.membership.name(party)} {unheard}") for party in self.membership.peers]
        return [Reason(Concern.PEER, error, stops=True) for error in errors if error]

    def gauge(self) -> Mapping[Labels, float]:
        return {
            (("peer", self.membership.name(party)),): float(self.silent.get(party) == "")
            for party in self.membership.peers
        }


# Longer than any one statement takes. A batch of millions is many: `Database.check_held` sees that they end.
SILENT_SECONDS = 60.0


@dataclass(slots=True)
class LedgerWatch:
    """Checks that the ledger's database responds and that no other process took the ledger over.

    `check` blocks, and raises an error otherwise. Anyone may read a health page, so the error, which names the
    database, is in the log only.
    """

    check: Callable[[], None]
    # Why the last check failed; empty if it succeeded, or before the first: opening the ledger was one.
    error: str = field(default="", init=False)

    async def run(self) -> LedgerClosed:
        """Check until the ledger is closed for good, and return why. Only a restart could open it again."""
        while True:
            try:
                await self.look()
            except LedgerClosed as error:
                return error
            await asyncio.sleep(min(LOOK_SECONDS, MISSING_SECONDS) if self.error else LOOK_SECONDS)

    async def look(self) -> None:
        """Check once. One check at a time, however long the database takes."""
        checking = asyncio.create_task(asyncio.to_thread(self.check))
        try:
            await asyncio.wait([checking], timeout=SILENT_SECONDS)
            if not checking.done():
                self._note(f"it has not replied for {SILENT_SECONDS:.0f} s")
            await checking
            self._note("")
        except TrefoilError as error:
            self._note(str(error))
            if isinstance(error, LedgerClosed):
                raise
        finally:
            checking.cancel()

    def _note(self, error: str) -> None:
        if error and not self.error:
            _LOG.error("the ledger's database cannot be used: %s", error)
        elif self.error and not error:
            _LOG.info("the ledger's database responds")
        self.error = error

    def reasons(self) -> list[Reason]:
        text = "the ledger's database cannot be used: see this helper's log"
        return [Reason(Concern.DATABASE, text, stops=True)] if self.error else []


# A new set needs three operators, and devices fetch it on their own schedule.
KEY_NOTICE = 14 * DAY
CERTIFICATE_NOTICE = 30 * DAY


@dataclass(frozen=True, slots=True)
class Expiry:
    """Expiry of the keys and certificates of all three helpers: a set that lacks one helper's key is useless."""

    helper_set: HelperSet
    # Returns the certificates (DER) that are known, by party.
    certificates: Callable[[], Mapping[int, bytes]]
    clock: Callable[[], int]

    def keys(self) -> Mapping[Labels, float]:
        return {
            (("helper", helper.name), ("key", entry.key.key_id.hex())): float(entry.not_after)
            for helper in self.helper_set.helpers
            for entry in helper.hpke_keys
        }

    def certificate_ends(self) -> Mapping[Labels, float]:
        return {
            (("helper", self.helper_set.helpers[party].name),): float(tls.ends(der))
            for party, der in self.certificates().items()
        }

    def reasons(self) -> list[Reason]:
        helpers = self.helper_set.helpers
        last_keys = {helper.name: max(entry.not_after for entry in helper.hpke_keys) for helper in helpers}
        ends = {helpers[party].name: tls.ends(der) for party, der in self.certificates().items()}
        return [
            # Reports sealed in time are still answered; helpers without a valid certificate cannot connect.
            *self._soon(Concern.KEY, "the last HPKE key", last_keys, KEY_NOTICE, stops=False),
            *self._soon(Concern.CERTIFICATE, "the certificate", ends, CERTIFICATE_NOTICE, stops=True),
        ]

    def _soon(self, concern: Concern, what: str, ends: Mapping[str, int], notice: int, *, stops: bool) -> list[Reason]:
        now = self.clock()
        reasons = []
        for name, end in ends.items():
            if now >= end:
                reasons.append(Reason(concern, f"{what} of {name} ended on {_date(end)}: sign a new set", stops))
            elif now >= end - notice:
                reasons.append(Reason(concern, f"{what} of {name} ends on {_date(end)}: prepare a new set"))
        return reasons


def _date(moment: int) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(moment))

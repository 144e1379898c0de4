"""The two peers as one helper sees them: signed exchanges that may fail, and a memory of how far each ledger had come.

Before anything a peer says is believed, it shows that the chain of its ledger goes through the place where it was last
seen. A ledger that went back, or another one in its place, raises an alarm, and the peer is refused from then on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Hashable

from mpc_helpers.agreement.errors import AgreementError
from mpc_helpers.agreement.hooks import Offload
from mpc_helpers.agreement.messages import BOOT_SIZE, CHALLENGE_SIZE, Body, Envelope, Head, Hello
from mpc_helpers.agreement.parties import Parties
from mpc_helpers.ledger.file import LedgerHead
from mpc_helpers.ledger.ledger import ReportLedger
from protocol.errors import ProtocolError, TrefoilError

logger = logging.getLogger(__name__)
_REBUILD_HINT = "Its operator must rebuild the ledger or retire its keys: trefoil ledger rebuild"

Send = Callable[[int, bytes], Awaitable[bytes | None]]
Handle = Callable[[int, Body], Awaitable[None]]


class Alarms:
    """The parties whose ledgers are not to be believed, and why. An alarm lasts until the daemon ends."""

    def __init__(self, raised: Callable[[], None]) -> None:
        self.texts: dict[int, str] = {}
        self._raised = raised

    def __contains__(self, party: int) -> bool:
        return party in self.texts

    def error(self) -> AgreementError | None:
        """The first alarm, as an error for the query that it stands in the way of."""
        for party, text in self.texts.items():
            return AgreementError(f"refused: {text}", _REBUILD_HINT, party=party)
        return None

    def heed(self) -> None:
        """Nothing new is begun with a ledger that went back. Called where nothing has been voted for yet."""
        if (error := self.error()) is not None:
            raise error

    def sound(self, party: int, text: str) -> None:
        """Refuse this party from now on, and wake whoever waits for it."""
        if party not in self.texts:
            logger.error("ALARM: helper %d %s", party + 1, text)
        self.texts[party] = f"helper {party + 1} {text}"
        self._raised()


class Peers:
    """`send` carries bytes to a peer over TLS and brings its reply; None or OSError is a loss."""

    def __init__(
        self,
        ledger: ReportLedger,
        parties: Parties,
        send: Send,
        alarms: Alarms,
        *,
        offload: Offload,
        entropy: Callable[[int], bytes],
        patience: float,
    ) -> None:
        self._ledger = ledger
        self._parties = parties
        self._send = send
        self._alarms = alarms
        # The ledger may be busy with a million reports for seconds: it is never waited for in the event loop.
        self._offload = offload
        self._entropy = entropy
        self._patience = patience
        # Drawn at each start: a peer that sees another one asks first how far this ledger has come.
        self._boot = entropy(BOOT_SIZE)
        # The run of each peer's daemon whose ledger has been checked.
        self._met: dict[int, bytes] = {}
        self._greeting = {party: asyncio.Lock() for party in parties.others}
        self._in_flight: dict[tuple[int, Hashable], asyncio.Task[None]] = {}

    def seal(self, body: Body) -> bytes:
        """`body` as this helper's signed message."""
        return self._parties.seal(self._boot, self._ledger.chain.head, body)

    async def accept(self, sender: int, data: bytes) -> Body | None:
        """What a message that came in says; None if it is not to be believed. A HELLO is always answered."""
        envelope = self._open(sender, data)
        if envelope is None or sender in self._alarms:
            return None
        if isinstance(envelope.body, Hello):
            # Before the sender is met: if both waited for the other's HELLO to be answered first, none ever would be.
            await self._notice_own_ledger(sender, envelope.body)
            return envelope.body
        return envelope.body if await self._is_met(sender, envelope) else None

    async def call(self, party: int, body: Body) -> Body | None:
        """Send `body` and wait for the reply; None if either was lost or the peer is not to be believed."""
        if party in self._alarms or (party not in self._met and not await self._greet(party)):
            return None
        envelope = await self._exchange(party, body)
        if envelope is None or not await self._is_met(party, envelope):
            return None
        return envelope.body

    def post(self, party: int, subject: Hashable, body: Body, handle: Handle) -> None:
        """Send in the background; the reply goes to `handle`. One copy in flight per peer and subject (COMMIT.md)."""
        key = (party, subject)
        # Without this a slow peer gets ever more copies of what it is too slow for, and nobody gets further.
        if key in self._in_flight:
            return

        async def deliver() -> None:
            reply = await self.call(party, body)
            if reply is not None:
                await handle(party, reply)

        task = asyncio.get_running_loop().create_task(deliver())
        self._in_flight[key] = task
        task.add_done_callback(lambda done: self._landed(key, done))

    async def answer_hello(self, hello: Hello) -> Head:
        """This ledger's chain at the place the peer remembers."""
        remembered = hello.remembered
        at = await self._offload(lambda: self._ledger.chain.head_at(remembered.sequence)) if remembered else None
        return Head(hello.challenge, at or b"")

    async def close(self) -> None:
        """Drop whatever is in flight."""
        tasks = list(self._in_flight.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _landed(self, key: tuple[int, Hashable], task: asyncio.Task[None]) -> None:
        self._in_flight.pop(key, None)
        # Taken from the task: an error that nobody takes is reported by asyncio, in the middle of something else.
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("handling a reply of helper %d failed: %r", key[0] + 1, error)

    def _open(self, sender: int, data: bytes) -> Envelope | None:
        try:
            return self._parties.open(sender, data)
        except ProtocolError as error:
            logger.warning("a message of helper %d is refused: %s", sender + 1, error)
            return None

    async def _exchange(self, party: int, body: Body) -> Envelope | None:
        try:
            async with asyncio.timeout(self._patience):
                reply = await self._send(party, self.seal(body))
        except (OSError, TimeoutError, TrefoilError) as error:
            logger.debug("helper %d does not answer: %s", party + 1, error)
            return None
        return None if reply is None else self._open(party, reply)

    async def _is_met(self, party: int, envelope: Envelope) -> bool:
        """Whether the message is of the run of the peer's daemon whose ledger we have checked, or now check."""
        if self._met.get(party) != envelope.boot and not await self._greet(party, envelope.boot):
            return False
        # Once more: while we greeted, the peer may have restarted, and its answer been of a later run than the message.
        if self._met.get(party) != envelope.boot:
            return False
        self._note(party, envelope.head)
        return party not in self._alarms

    async def _greet(self, party: int, boot: bytes | None = None) -> bool:
        # One greeting at a time: two at once could remember two heads of one ledger in the wrong order.
        async with self._greeting[party]:
            met = self._met.get(party)
            # Whoever held the lock before us may have greeted this very run, or found it out.
            if party in self._alarms or (met is not None and met == (boot or met)):
                return party not in self._alarms
            remembered = self._ledger.peer_heads.of(party)
            hello = Hello(self._entropy(CHALLENGE_SIZE), remembered)
            envelope = await self._exchange(party, hello)
            # The challenge is fresh: an answer that was recorded before the ledger went back does not fit it.
            if envelope is None or not isinstance(envelope.body, Head) or envelope.body.challenge != hello.challenge:
                return False
            if remembered is not None and not self._continues(party, remembered, envelope, envelope.body):
                return False
            self._met[party] = envelope.boot
            self._ledger.peer_heads.remember(party, envelope.head)
            # At once, not with our next move: who has never moved must also notice a ledger that was replaced.
            await self._offload(self._ledger.peer_heads.save)
            return True

    def _continues(self, party: int, remembered: LedgerHead, envelope: Envelope, head: Head) -> bool:
        if envelope.head.ledger_id != remembered.ledger_id:
            self._alarms.sound(party, "has another ledger than it had before")
        elif head.at_sequence != remembered.digest or envelope.head.sequence < remembered.sequence:
            self._alarms.sound(party, f"has a ledger that went back behind move {remembered.sequence}")
        return party not in self._alarms

    def _note(self, party: int, head: LedgerHead) -> None:
        known = self._ledger.peer_heads.of(party)
        if known is None or head.ledger_id != known.ledger_id:
            self._alarms.sound(party, "changed its ledger while it ran")
        elif head.sequence == known.sequence and head.digest != known.digest:
            self._alarms.sound(party, f"has two histories of its ledger's move {head.sequence}")
        elif head.sequence > known.sequence:
            # A lower one is no alarm: messages of one run overtake each other.
            self._ledger.peer_heads.remember(party, head)

    async def _notice_own_ledger(self, sender: int, hello: Hello) -> None:
        """A peer may know better how far this ledger had come: then this helper starts nothing new."""
        remembered = hello.remembered
        if remembered is None:
            return
        chain = self._ledger.chain
        known = await self._offload(lambda: chain.head_at(remembered.sequence))
        if remembered.ledger_id != chain.ledger_id or known != remembered.digest:
            self._alarms.sound(self._parties.party, f"has a ledger that helper {sender + 1} knows to have been further")

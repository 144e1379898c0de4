"""The two peers as one helper sees them: signed exchanges that may fail, and a memory of how far each ledger had come.

Before anything a peer says is believed, it shows that the chain of its ledger goes through the place where it was last
seen. A ledger that went back, or another one in its place, raises an alarm, and the peer is refused from then on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Hashable, Sequence

from mpc_helpers.agreement.messages import BOOT_SIZE, CHALLENGE_SIZE, Body, Envelope, Head, Hello
from mpc_helpers.ledger.ledger import LedgerHead, ReportLedger
from protocol.errors import ProtocolError, TrefoilError
from protocol.keys import IdentityKey

logger = logging.getLogger(__name__)

Send = Callable[[int, bytes], Awaitable[bytes | None]]
Handle = Callable[[int, Body], Awaitable[None]]


class Peers:
    """Run by helper `helper`. `send` carries bytes to a peer over TLS and brings its reply; None or OSError is a loss.

    `keys` are the identity keys of all three helpers, in order. `alarmed` is told whenever there is an alarm.
    """

    def __init__(
        self,
        ledger: ReportLedger,
        identity: IdentityKey,
        keys: Sequence[bytes],
        realm: bytes,
        send: Send,
        *,
        alarmed: Callable[[], None],
        entropy: Callable[[int], bytes],
        patience: float,
    ) -> None:
        self.helper = ledger.owner.helper
        self.others = tuple(helper for helper in range(len(keys)) if helper != self.helper)
        self.alarms: dict[int, str] = {}
        self.identity = identity
        self.realm = realm
        self.keys = tuple(keys)
        self._ledger = ledger
        self._send = send
        self._alarmed = alarmed
        self._entropy = entropy
        self._patience = patience
        self._boot = entropy(BOOT_SIZE)
        self._met: dict[int, bytes] = {}
        self._greeting = {peer: asyncio.Lock() for peer in self.others}
        self._in_flight: dict[tuple[int, Hashable], asyncio.Task[None]] = {}

    def seal(self, body: Body) -> bytes:
        """`body` as this helper's signed message."""
        return Envelope(self.helper, self._boot, self._ledger.head, body).seal(self.realm, self.identity)

    async def accept(self, peer: int, data: bytes) -> Body | None:
        """What a message that came in says; None if it is not to be believed. A HELLO is always answered."""
        envelope = self._open(peer, data)
        if envelope is None or peer in self.alarms:
            return None
        if isinstance(envelope.body, Hello):
            self._notice_own_ledger(peer, envelope.body)
            return envelope.body
        return envelope.body if await self._is_met(peer, envelope) else None

    async def call(self, peer: int, body: Body) -> Body | None:
        """Send `body` and wait for the reply; None if either was lost or the peer is not to be believed."""
        if peer in self.alarms or (peer not in self._met and not await self._greet(peer)):
            return None
        envelope = await self._exchange(peer, body)
        if envelope is None or not await self._is_met(peer, envelope):
            return None
        return envelope.body

    def post(self, peer: int, subject: Hashable, body: Body, handle: Handle) -> None:
        """Send in the background; the reply goes to `handle`. One copy in flight per peer and subject (COMMIT.md)."""
        key = (peer, subject)
        if key in self._in_flight:
            return

        async def deliver() -> None:
            reply = await self.call(peer, body)
            if reply is not None:
                await handle(peer, reply)

        task = asyncio.get_running_loop().create_task(deliver())
        self._in_flight[key] = task
        task.add_done_callback(lambda done: self._landed(key, done))

    def answer_hello(self, hello: Hello) -> Head:
        """This ledger's chain at the place the peer remembers."""
        at = self._ledger.head_at(hello.remembered.sequence) if hello.remembered else None
        return Head(hello.challenge, at or b"")

    def trust_new_ledger(self, peer: int) -> None:
        """Run by an operator who has made sure that the peer's ledger was rebuilt, not restored."""
        self._ledger.forget_peer(peer)
        self._met.pop(peer, None)
        self.alarms.pop(peer, None)

    async def close(self) -> None:
        """Drop whatever is in flight."""
        tasks = list(self._in_flight.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _landed(self, key: tuple[int, Hashable], task: asyncio.Task[None]) -> None:
        self._in_flight.pop(key, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("handling a reply of helper %d failed: %r", key[0] + 1, error)

    def _open(self, peer: int, data: bytes) -> Envelope | None:
        try:
            return Envelope.open(data, self.realm, peer, self.keys[peer])
        except ProtocolError as error:
            logger.warning("a message of helper %d is refused: %s", peer + 1, error)
            return None

    async def _exchange(self, peer: int, body: Body) -> Envelope | None:
        try:
            async with asyncio.timeout(self._patience):
                reply = await self._send(peer, self.seal(body))
        except (OSError, TimeoutError, TrefoilError) as error:
            logger.debug("helper %d does not answer: %s", peer + 1, error)
            return None
        return None if reply is None else self._open(peer, reply)

    async def _is_met(self, peer: int, envelope: Envelope) -> bool:
        """Whether the message is of the run of the peer's daemon whose ledger we have checked, or now check."""
        if self._met.get(peer) != envelope.boot and not await self._greet(peer, envelope.boot):
            return False
        if self._met.get(peer) != envelope.boot:
            return False
        self._note(peer, envelope.head)
        return peer not in self.alarms

    async def _greet(self, peer: int, boot: bytes | None = None) -> bool:
        async with self._greeting[peer]:
            met = self._met.get(peer)
            if peer in self.alarms or (met is not None and met == (boot or met)):
                return peer not in self.alarms
            remembered = self._ledger.peer_head(peer)
            hello = Hello(self._entropy(CHALLENGE_SIZE), remembered)
            envelope = await self._exchange(peer, hello)
            if envelope is None or not isinstance(envelope.body, Head) or envelope.body.challenge != hello.challenge:
                return False
            if remembered is not None and not self._continues(peer, remembered, envelope, envelope.body):
                return False
            self._met[peer] = envelope.boot
            self._ledger.remember_peer(peer, envelope.head)
            self._ledger.save_peer_heads()
            return True

    def _continues(self, peer: int, remembered: LedgerHead, envelope: Envelope, head: Head) -> bool:
        if envelope.head.ledger_id != remembered.ledger_id:
            self._alarm(peer, "has another ledger than it had before")
        elif head.at_sequence != remembered.digest or envelope.head.sequence < remembered.sequence:
            self._alarm(peer, f"has a ledger that went back behind move {remembered.sequence}")
        return peer not in self.alarms

    def _note(self, peer: int, head: LedgerHead) -> None:
        known = self._ledger.peer_head(peer)
        if known is None or head.ledger_id != known.ledger_id:
            self._alarm(peer, "changed its ledger while it ran")
        elif head.sequence == known.sequence and head.digest != known.digest:
            self._alarm(peer, f"has two histories of its ledger's move {head.sequence}")
        elif head.sequence > known.sequence:
            self._ledger.remember_peer(peer, head)

    def _notice_own_ledger(self, peer: int, hello: Hello) -> None:
        """A peer may know better how far this ledger had come: then this helper starts nothing new."""
        remembered = hello.remembered
        if remembered is None:
            return
        at = self._ledger.head_at(remembered.sequence)
        if remembered.ledger_id != self._ledger.ledger_id or at != remembered.digest:
            self._alarm(self.helper, f"has a ledger that helper {peer + 1} knows to have been further")

    def _alarm(self, helper: int, text: str) -> None:
        if helper not in self.alarms:
            logger.error("ALARM: helper %d %s", helper + 1, text)
        self.alarms[helper] = f"helper {helper + 1} {text}"
        self._alarmed()

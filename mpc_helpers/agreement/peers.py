"""The two peers as one helper sees them: signed request and reply, and protection against ledgers that roll back.

Before a message is trusted, its sender proves by HELLO and HEAD that its ledger's hash chain extends the head last
seen. A ledger that rolled back or was replaced raises an alarm, and the peer is refused from then on. `Context` bundles
what the two phases share.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Hashable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from mpc_helpers.agreement.messages import BOOT_SIZE, CHALLENGE_SIZE, Body, Envelope, Head, Hello
from mpc_helpers.agreement.negotiation import AgreementError, Negotiations
from mpc_helpers.identity.membership import Membership
from mpc_helpers.ledger.attempt import Failpoint
from mpc_helpers.ledger.engine import LedgerHead
from mpc_helpers.ledger.ledger import ReportLedger
from protocol.errors import ErrorKind, ProtocolError, Rejection, TrefoilError
from protocol.helper_set import message_realm
from protocol.keys import IdentityKey
from protocol.net.listening import RateLimitFilter, cancel_all
from protocol.shares import PARTIES
from protocol.vote import SignedVote, Vote

T = TypeVar("T")


class Offload(Protocol):
    """Runs blocking calls away from the event loop, one at a time and in order."""

    def __call__(self, call: Callable[[], T]) -> Awaitable[T]: ...


class SerialExecutor:
    """The `Offload` of an installed helper: one for its ledger, one for recomputing check shares.

    One thread each: ledger writes keep their order, and neither a slow disk nor a demanding peer blocks the event loop
    or the threads that admit reports.
    """

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, name)

    def __call__(self, call: Callable[[], T]) -> Awaitable[T]:
        return asyncio.get_running_loop().run_in_executor(self._thread, call)

    def close(self) -> None:
        self._thread.shutdown(wait=False)


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Exponential backoff between retransmissions, and the timeout for a reply; all in seconds."""

    first_delay: float = 0.05
    max_agree_delay: float = 1.0
    max_poll_delay: float = 30.0
    reply_timeout: float = 10.0


@dataclass(frozen=True, slots=True)
class Hooks:
    """What tests replace. An installed helper sets only `left_out`.

    `failpoint` is called at each failpoint of COMMIT.md. `left_out`: metrics callback, called with the counts of
    reports rejected after admission.
    """

    entropy: Callable[[int], bytes] = os.urandom
    failpoint: Callable[[Failpoint], None] = lambda _: None
    offload: Offload | None = None
    left_out: Callable[[Mapping[Rejection, int]], None] = lambda _: None


@dataclass(frozen=True, slots=True)
class Parties:
    """The three parties as one of them sees them. `keys` are all identity keys; every signature binds `realm`."""

    party: int
    identity: IdentityKey = field(repr=False)
    keys: tuple[bytes, ...]
    realm: bytes

    def __post_init__(self) -> None:
        if len(self.keys) != PARTIES or self.party not in range(PARTIES):
            raise ProtocolError("there are three helpers, and this is one of them", kind=ErrorKind.INCONSISTENT)

    @classmethod
    def of(cls, membership: Membership) -> Parties:
        keys = tuple(helper.identity_key for helper in membership.helper_set.helpers)
        return cls(membership.party, membership.identity, keys, message_realm(membership.helper_set.digest))

    @property
    def others(self) -> tuple[int, ...]:
        return tuple(party for party in range(PARTIES) if party != self.party)

    def seal(self, boot: bytes, head: LedgerHead, body: Body) -> bytes:
        return Envelope(self.party, boot, head, body).seal(self.realm, self.identity)

    def open(self, sender: int, data: bytes) -> Envelope:
        return Envelope.open(data, self.realm, sender, self.keys[sender])

    def sign_vote(self, attempt_id: bytes, vote: Vote) -> SignedVote:
        """Sign this helper's vote. Requires that the state it reports is durable."""
        return SignedVote.sign(self.party, attempt_id, vote, self.identity)

    def verify_vote(self, vote: SignedVote) -> None:
        """Raise if the vote was not signed by its party."""
        vote.verify(self.keys[vote.party])


logger = logging.getLogger(__name__)
# A malicious peer can have messages rejected without end. Alarms are errors, and always pass.
logger.addFilter(RateLimitFilter(burst=10, unlimited=logging.ERROR))
_ANOTHER = "has another ledger than it had before"
_REBUILD_HINT = "Its operator must rebuild the ledger or retire its keys: trefoil ledger rebuild"

Send = Callable[[int, bytes], Awaitable[bytes | None]]
Handle = Callable[[int, Body], Awaitable[None]]


class Alarms:
    """The parties whose ledgers cannot be trusted, and why. An alarm lasts until the daemon ends."""

    def __init__(self, raised: Callable[[], None]) -> None:
        self.texts: dict[int, str] = {}
        self._raised = raised

    def __contains__(self, party: int) -> bool:
        return party in self.texts

    def error(self) -> AgreementError | None:
        for party, text in self.texts.items():
            return AgreementError(f"refused: {text}", _REBUILD_HINT, party=party, kind=ErrorKind.ROLLED_BACK)
        return None

    def check(self) -> None:
        """Raise if any ledger rolled back. Called only before the vote: a voted attempt must still be ended."""
        if (error := self.error()) is not None:
            raise error

    def trigger(self, party: int, text: str) -> None:
        """Refuse this party from now on, and wake the queries that wait for it."""
        if party not in self.texts:
            logger.error("ALARM: helper %d %s", party + 1, text)
        self.texts[party] = f"helper {party + 1} {text}"
        self._raised()


class Peers:
    """Signed exchanges with both peers. `send` returns the reply; None or OSError means that it was lost."""

    def __init__(
        self,
        ledger: ReportLedger,
        parties: Parties,
        send: Send,
        alarms: Alarms,
        *,
        offload: Offload,
        entropy: Callable[[int], bytes],
        reply_timeout: float,
        rebuilt_from: Mapping[int, int],
    ) -> None:
        self._ledger = ledger
        self._parties = parties
        self._send = send
        self._alarms = alarms
        # The ledger may be busy for seconds with a million reports: never block the event loop on it.
        self._offload = offload
        self._entropy = entropy
        self._reply_timeout = reply_timeout
        self._rebuilt_from = rebuilt_from
        # Drawn at each start: a peer that sees a new boot id verifies our ledger first.
        self._boot = entropy(BOOT_SIZE)
        # The boot id of each peer whose ledger has been verified.
        self._verified: dict[int, bytes] = {}
        self._handshakes = {party: asyncio.Lock() for party in parties.others}
        self._in_flight: dict[tuple[int, Hashable], asyncio.Task[None]] = {}

    def seal(self, body: Body) -> bytes:
        return self._parties.seal(self._boot, self._ledger.chain.head, body)

    async def accept(self, sender: int, data: bytes) -> Body | None:
        """Authenticate an incoming message. Return None if it cannot be trusted."""
        envelope = self._open(sender, data)
        if envelope is None or sender in self._alarms:
            return None
        if isinstance(envelope.body, Hello):
            # Before the sender is verified: if each waited for the other's HEAD first, both would deadlock.
            await self._check_own_ledger(sender, envelope.body)
            self._check_rebuilt(sender, envelope.head.ledger_id, envelope.body)
            # Without a reply it never learns how far this ledger is, so that it is refused also after a restart, and
            # after this operator has accepted it without a rebuild.
            return None if sender in self._alarms else envelope.body
        return envelope.body if await self._is_verified(sender, envelope) else None

    async def call(self, party: int, body: Body) -> Body | None:
        """Send `body` and return the reply; None if either was lost or the peer cannot be trusted."""
        if party in self._alarms or (party not in self._verified and not await self._handshake(party)):
            return None
        envelope = await self._exchange(party, body)
        if envelope is None or not await self._is_verified(party, envelope):
            return None
        return envelope.body

    def post(self, party: int, subject: Hashable, body: Body, handle: Handle) -> None:
        """Send in the background and pass the reply to `handle`. Single-flight per peer and subject (COMMIT.md)."""
        key = (party, subject)
        # Otherwise a slow peer would be flooded with copies of what it is too slow for.
        if key in self._in_flight:
            return

        async def deliver() -> None:
            reply = await self.call(party, body)
            if reply is not None:
                await handle(party, reply)

        task = asyncio.get_running_loop().create_task(deliver())
        self._in_flight[key] = task
        task.add_done_callback(lambda done: self._delivered(key, done))

    async def answer_hello(self, hello: Hello) -> Head:
        """Return this ledger's chain at the head that the peer remembers."""
        remembered = hello.remembered
        at = await self._offload(lambda: self._ledger.chain.head_at(remembered.sequence)) if remembered else None
        return Head(hello.challenge, at or b"")

    async def close(self) -> None:
        await cancel_all(self._in_flight.values())

    def _delivered(self, key: tuple[int, Hashable], task: asyncio.Task[None]) -> None:
        self._in_flight.pop(key, None)
        # Retrieve the exception: otherwise asyncio reports it later, out of context.
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("handling a reply of helper %d failed: %r", key[0] + 1, error)

    def _open(self, sender: int, data: bytes) -> Envelope | None:
        try:
            return self._parties.open(sender, data)
        except ProtocolError as error:
            logger.warning("a message of helper %d is rejected: %s", sender + 1, error)
            return None

    async def _exchange(self, party: int, body: Body) -> Envelope | None:
        try:
            async with asyncio.timeout(self._reply_timeout):
                reply = await self._send(party, self.seal(body))
        except (OSError, TimeoutError, TrefoilError) as error:
            logger.debug("helper %d has not responded: %s", party + 1, error)
            return None
        return None if reply is None else self._open(party, reply)

    async def _is_verified(self, party: int, envelope: Envelope) -> bool:
        """Return whether the message is from a boot whose ledger is verified, verifying it now if need be."""
        if self._verified.get(party) != envelope.boot and not await self._handshake(party, envelope.boot):
            return False
        # Again: the peer may have restarted during the handshake, which then verified a later boot than the message's.
        if self._verified.get(party) != envelope.boot:
            return False
        self._observe_head(party, envelope.head)
        return party not in self._alarms

    async def _handshake(self, party: int, boot: bytes | None = None) -> bool:
        # Serialise handshakes: two at once could store two heads of one ledger in the wrong order.
        async with self._handshakes[party]:
            verified = self._verified.get(party)
            # The previous holder of the lock may have verified this boot, or raised an alarm.
            if party in self._alarms or (verified is not None and verified == (boot or verified)):
                return party not in self._alarms
            remembered = self._ledger.peer_heads.of(party)
            hello = Hello(self._entropy(CHALLENGE_SIZE), remembered)
            envelope = await self._exchange(party, hello)
            # The challenge is fresh: a HEAD recorded before the ledger rolled back cannot be replayed.
            if envelope is None or not isinstance(envelope.body, Head) or envelope.body.challenge != hello.challenge:
                return False
            if remembered is not None and not self._extends(party, remembered, envelope, envelope.body):
                return False
            self._verified[party] = envelope.boot
            self._ledger.peer_heads.remember(party, envelope.head)
            # Persist the peer's head now, not with our next write: a helper that never writes must still detect a
            # replaced ledger.
            await self._offload(self._ledger.peer_heads.save)
            return True

    def _extends(self, party: int, remembered: LedgerHead, envelope: Envelope, head: Head) -> bool:
        if envelope.head.ledger_id != remembered.ledger_id:
            self._alarms.trigger(party, _ANOTHER)
        elif head.at_sequence != remembered.digest or envelope.head.sequence < remembered.sequence:
            self._alarms.trigger(party, f"has a ledger that went back behind move {remembered.sequence}")
        return party not in self._alarms

    def _observe_head(self, party: int, head: LedgerHead) -> None:
        last = self._ledger.peer_heads.of(party)
        if last is None or head.ledger_id != last.ledger_id:
            self._alarms.trigger(party, "changed its ledger while it ran")
        elif head.sequence == last.sequence and head.digest != last.digest:
            self._alarms.trigger(party, f"has two histories of its ledger's move {head.sequence}")
        elif head.sequence > last.sequence:
            # A lower one is no alarm: messages are reordered.
            self._ledger.peer_heads.remember(party, head)

    async def _check_own_ledger(self, sender: int, hello: Hello) -> None:
        """Raise an alarm about our own ledger if a peer has seen it further: it was rolled back."""
        remembered = hello.remembered
        if remembered is None:
            return
        chain = self._ledger.chain
        digest = await self._offload(lambda: chain.head_at(remembered.sequence))
        if remembered.ledger_id != chain.ledger_id or digest != remembered.digest:
            self._alarms.trigger(
                self._parties.party, f"has a ledger that helper {sender + 1} knows to have been further"
            )

    def _check_rebuilt(self, sender: int, ledger_id: bytes, hello: Hello) -> None:
        """Raise an alarm if a peer says HELLO with a ledger that was not accepted, or not rebuilt from all entries."""
        remembered = self._ledger.peer_heads.of(sender)
        if remembered is not None and remembered.ledger_id != ledger_id:
            self._alarms.trigger(sender, _ANOTHER)
        sequence = 0 if hello.remembered is None else hello.remembered.sequence
        if sequence < self._rebuilt_from.get(sender, 0):
            self._alarms.trigger(sender, "was rebuilt from older entries than were last exported for it")


@dataclass(frozen=True, slots=True)
class Context:
    """What both phases share. Made once, by `Agreement`."""

    ledger: ReportLedger
    parties: Parties
    peers: Peers
    alarms: Alarms
    negotiations: Negotiations
    # `offload` for the ledger, `compute` for recomputing check shares.
    offload: Offload
    compute: Offload
    retry: RetryPolicy
    hooks: Hooks

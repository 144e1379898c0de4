"""Messages from one helper's daemon to the other two: mutual TLS, with each certificate pinned to its party.

The helper set contains pins, not certificates; a peer's certificate is fetched once by its pin and stored beside the
ledger, so that helpers may start in any order and operators copy no files when a set is renewed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Self

import aiohttp

from mpc_helpers.agreement.messages import longest_message
from mpc_helpers.identity import tls
from mpc_helpers.identity.config import Limits
from mpc_helpers.identity.membership import Membership
from protocol.errors import ErrorKind, HelperError, ProtocolError, TrefoilError, printable
from protocol.files import write_atomically
from protocol.net.listening import cancel_all

_LOG = logging.getLogger(__name__)
PEER_PATH = "/v1/peer/"
HEALTH_PATH = "/healthz"
FETCH_SECONDS = 5.0
RETRY_SECONDS = 0.25
CLOSE_SECONDS = 0.02


class PeerError(HelperError):
    """A peer did not respond, or refused a message."""

    kind = ErrorKind.UNREACHABLE


class TooLong(ProtocolError):
    """A body exceeds its limit; the rest of it was not read."""

    kind = ErrorKind.TOO_LARGE


class Certificates:
    """The two peers' certificates, each accepted only under its pin, and TLS contexts made of them."""

    def __init__(self, membership: Membership, identity: tls.TlsIdentity, folder: Path) -> None:
        self._membership = membership
        self._identity = identity
        self._folder = folder
        # All certificates (DER) held so far, by party, including this helper's own.
        self.by_party: dict[int, bytes] = {membership.party: identity.der}
        self._arrived = {party: asyncio.Event() for party in membership.peers}
        self.server_context = tls.server_context(identity)
        # Queriers have no certificate; peers present theirs, and `whose` identifies them.
        self.server_context.verify_mode = ssl.CERT_OPTIONAL

    def whose(self, certificate: bytes | None) -> int | None:
        """Return the peer that this certificate is pinned to, if any."""
        for party in self._membership.peers:
            if tls.same_pin(certificate, self._membership.helper_set.helpers[party].tls_pin):
                return party
        return None

    async def of(self, party: int) -> bytes:
        """Wait for a helper's certificate. The caller enforces the timeout."""
        if party in self._arrived:
            await self._arrived[party].wait()
        return self.by_party[party]

    async def client_context(self, party: int) -> ssl.SSLContext:
        """Return a context that connects to that peer and no other."""
        return tls.client_context(self._identity, (await self.of(party),))

    async def keep_fetching(self, party: int) -> None:
        """Run in the background: retry until the peer has presented its certificate once."""
        helper = self._membership.helper_set.helpers[party]
        path = self._folder / f"peer-{party + 1}.der"
        with contextlib.suppress(OSError):
            stored = path.read_bytes()
            if tls.same_pin(stored, helper.tls_pin):
                self._learn(party, stored)
                return
        host, port = helper.endpoint
        logged = ""
        while party not in self.by_party:
            try:
                self._learn(party, await tls.fetch_certificate(host, port, helper.tls_pin, FETCH_SECONDS))
                write_atomically(path, self.by_party[party])
            except TrefoilError as error:
                if str(error) != logged:
                    logged = str(error)
                    _LOG.info("waiting for %s: %s", helper.name, logged)
                await asyncio.sleep(RETRY_SECONDS)

    def _learn(self, party: int, certificate: bytes) -> None:
        self.by_party[party] = certificate
        self.server_context.load_verify_locations(cadata=certificate)
        self._arrived[party].set()


class Transport:
    """Sends messages to the two other helpers. Does not retry: the caller decides.

    A call takes at most `limits.peer_seconds`. `dated` is called with the Date header of each reply.
    """

    def __init__(
        self,
        membership: Membership,
        certificates: Certificates,
        limits: Limits,
        dated: Callable[[int, str], None] = lambda _party, _date: None,
    ) -> None:
        self._membership = membership
        self._certificates = certificates
        self._seconds = limits.peer_seconds
        self._longest_reply = longest_message(limits.maximum_reports)
        self._dated = dated
        # Bytes of messages and replies since the start, for the metrics.
        self.carried = 0
        self._sessions: dict[int, aiohttp.ClientSession] = {}
        self._fetching: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        for party in self._membership.peers:
            self._fetching.append(asyncio.create_task(self._certificates.keep_fetching(party)))
        return self

    async def __aexit__(self, *_: object) -> None:
        await cancel_all(self._fetching)
        for session in self._sessions.values():
            await session.close()
        # Connections that were being opened close in the next iterations of the loop.
        await asyncio.sleep(CLOSE_SECONDS)

    async def send(self, party: int, route: str, message: bytes) -> bytes:
        """Send one message and return the peer's reply. Raise `PeerError`, with the peer's party, on any failure."""
        return await self._exchange(party, "POST", PEER_PATH + route, message)

    async def ask_health(self, party: int) -> bytes:
        """Return a peer's health page, and record its Date header. Raise `PeerError` if there is no reply."""
        return await self._exchange(party, "GET", HEALTH_PATH, b"")

    async def _exchange(self, party: int, method: str, path: str, message: bytes) -> bytes:
        name = self._membership.name(party)
        try:
            async with asyncio.timeout(self._seconds):
                session = await self._session(party)
                address = self._membership.helper_set.helpers[party].address.rstrip("/")
                # Do not follow redirects: the target is not the pinned peer.
                where = address + path
                async with session.request(method, where, data=message, allow_redirects=False) as response:
                    self._dated(party, response.headers.get("Date", ""))
                    answer = await read_bounded(response.content, self._longest_reply)
                    self.carried += len(message) + len(answer)
                    if response.status != 200:
                        raise PeerError(
                            f"{name} refused a message: {printable(answer.decode(errors='replace'), 200)}",
                            party=party,
                            kind=ErrorKind.REFUSED,
                        )
                    return answer
        except TimeoutError:
            raise PeerError(
                f"{name} has not responded for {self._seconds:g} s", party=party, kind=ErrorKind.TIMEOUT
            ) from None
        except TooLong as error:
            raise PeerError(f"{name} sent {error}", party=party, kind=ErrorKind.TOO_LARGE) from None
        except (aiohttp.ClientError, OSError, ProtocolError) as error:
            raise PeerError(f"{name} cannot be reached: {error}", party=party) from None

    async def _session(self, party: int) -> aiohttp.ClientSession:
        if party not in self._sessions:
            connector = aiohttp.TCPConnector(ssl=await self._certificates.client_context(party), limit=16)
            if party in self._sessions:  # lost a race with another call
                await connector.close()
            else:
                self._sessions[party] = aiohttp.ClientSession(connector=connector)
        return self._sessions[party]


async def read_bounded(content: aiohttp.StreamReader, limit: int) -> bytes:
    """Return a whole body. Raise `TooLong` as soon as it exceeds `limit`."""
    parts: list[bytes] = []
    size = 0
    async for piece in content.iter_any():
        size += len(piece)
        if size > limit:
            raise TooLong(f"a body over the limit of {limit} bytes")
        parts.append(piece)
    return b"".join(parts)

"""The way from one helper's daemon to the other two: HTTPS with certificates on both sides, each pinned to its party.

The helper set holds pins, not certificates; a peer's certificate is fetched once by its pin and kept beside the
ledger, so that helpers may start in any order and an operator copies no files when a set is renewed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Self

import aiohttp

from mpc_helpers.identity import tls
from mpc_helpers.identity.membership import Membership
from protocol.errors import Blamed, ProtocolError, TrefoilError
from protocol.files import write_atomically
from protocol.text import printable

_LOG = logging.getLogger("trefoil.transport")
PEER_PATH = "/v1/peer/"
HEALTH_PATH = "/healthz"
FETCH_SECONDS = 5.0
RETRY_SECONDS = 0.25
CLOSE_SECONDS = 0.02


class PeerError(Blamed):
    """A peer could not be reached, or refused a message."""


class TooLong(ProtocolError):
    """A body is longer than anything that can be meant, and was not read to its end."""


class Certificates:
    """The two peers' certificates, each believed only under its pin, and the TLS contexts made of them."""

    def __init__(self, membership: Membership, identity: tls.TlsIdentity, folder: Path) -> None:
        self._membership = membership
        self._identity = identity
        self._folder = folder
        self._known: dict[int, bytes] = {membership.party: identity.der}
        self._arrived = {party: asyncio.Event() for party in membership.peers}
        self.server_context = tls.server_context(identity)
        # Queriers have no certificate; peers must show theirs, and `whose` tells which of them it is.
        self.server_context.verify_mode = ssl.CERT_OPTIONAL

    @property
    def known(self) -> Mapping[int, bytes]:
        """The certificates (DER) that were seen, this helper's own among them."""
        return self._known

    def whose(self, certificate: bytes | None) -> int | None:
        """Which peer shows this certificate, if any."""
        for party in self._membership.peers:
            if tls.same_pin(certificate, self._membership.helper_set.helpers[party].tls_pin):
                return party
        return None

    async def of(self, party: int) -> bytes:
        """A helper's certificate, as soon as it has been seen. The caller holds the deadline."""
        if party in self._arrived:
            await self._arrived[party].wait()
        return self._known[party]

    async def client_context(self, party: int) -> ssl.SSLContext:
        """For connecting to that peer and no other."""
        return tls.client_context(self._identity, (await self.of(party),))

    async def keep_fetching(self, party: int) -> None:
        """Run in the background from the start until the peer has answered once."""
        helper = self._membership.helper_set.helpers[party]
        path = self._folder / f"peer-{party + 1}.der"
        with contextlib.suppress(OSError):
            stored = path.read_bytes()
            if tls.same_pin(stored, helper.tls_pin):
                self._learn(party, stored)
                return
        host, port = helper.endpoint
        said = ""
        while party not in self._known:
            try:
                self._learn(party, await tls.fetch_certificate(host, port, helper.tls_pin, FETCH_SECONDS))
                write_atomically(path, self._known[party])
            except TrefoilError as error:
                if str(error) != said:
                    said = str(error)
                    _LOG.info("waiting for %s: %s", helper.name, said)
                await asyncio.sleep(RETRY_SECONDS)

    def _learn(self, party: int, certificate: bytes) -> None:
        self._known[party] = certificate
        self.server_context.load_verify_locations(cadata=certificate)
        self._arrived[party].set()


class Transport:
    """Sends messages to the two other helpers. One try per call: who sends decides whether to try again.

    A call takes at most `seconds`, and an answer has at most `longest_message` bytes. `dated` is told the date that a
    peer's answer carries.
    """

    def __init__(
        self,
        membership: Membership,
        certificates: Certificates,
        seconds: float,
        longest_message: int,
        dated: Callable[[int, str], None] = lambda _party, _date: None,
    ) -> None:
        self._membership = membership
        self._certificates = certificates
        self._seconds = seconds
        self._longest_message = longest_message
        self._dated = dated
        # Bytes of messages and their answers since the start, for whoever watches this helper.
        self.carried = 0
        self._sessions: dict[int, aiohttp.ClientSession] = {}
        self._fetching: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        for party in self._membership.peers:
            self._fetching.append(asyncio.create_task(self._certificates.keep_fetching(party)))
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._fetching:
            task.cancel()
        await asyncio.gather(*self._fetching, return_exceptions=True)
        for session in self._sessions.values():
            await session.close()
        # Connections that were being made when they were given up close in the loop's next rounds.
        await asyncio.sleep(CLOSE_SECONDS)

    async def send(self, party: int, route: str, message: bytes) -> bytes:
        """Deliver one message and return the peer's answer; whatever goes wrong is a `PeerError` naming the peer."""
        return await self._exchange(party, "POST", PEER_PATH + route, message)

    async def ask_time(self, party: int) -> None:
        """Have a peer answer something, for the date of its answer; or a `PeerError`."""
        await self._exchange(party, "GET", HEALTH_PATH, b"")

    async def _exchange(self, party: int, method: str, path: str, message: bytes) -> bytes:
        name = self._membership.name(party)
        try:
            async with asyncio.timeout(self._seconds):
                session = await self._session(party)
                address = self._membership.helper_set.helpers[party].address.rstrip("/")
                # A redirect is an answer like any other that is not 200: whatever it names is not the pinned peer.
                where = address + path
                async with session.request(method, where, data=message, allow_redirects=False) as response:
                    self._dated(party, response.headers.get("Date", ""))
                    answer = await read_bounded(response.content, self._longest_message)
                    self.carried += len(message) + len(answer)
                    if response.status != 200:
                        raise PeerError(
                            f"{name} refused a message: {printable(answer.decode(errors='replace'), 200)}", party=party
                        )
                    return answer
        except TimeoutError:
            raise PeerError(f"{name} did not answer within {self._seconds:g} s", party=party) from None
        except TooLong as error:
            raise PeerError(f"{name} sent {error}", party=party) from None
        except (aiohttp.ClientError, OSError, ProtocolError) as error:
            raise PeerError(f"{name} cannot be reached: {error}", party=party) from None

    async def _session(self, party: int) -> aiohttp.ClientSession:
        if party not in self._sessions:
            connector = aiohttp.TCPConnector(ssl=await self._certificates.client_context(party), limit=16)
            if party in self._sessions:  # another call was quicker while this one waited
                await connector.close()
            else:
                self._sessions[party] = aiohttp.ClientSession(connector=connector)
        return self._sessions[party]


async def read_bounded(content: aiohttp.StreamReader, limit: int) -> bytes:
    """A whole body, refused as soon as it is longer than `limit`."""
    parts: list[bytes] = []
    size = 0
    async for piece in content.iter_any():
        size += len(piece)
        if size > limit:
            raise TooLong(f"a body over the limit of {limit} bytes")
        parts.append(piece)
    return b"".join(parts)

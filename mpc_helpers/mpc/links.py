"""TCP and TLS links between the three workers of one session.

Party i connects to every party above it and listens for every party below it, as MPyC does; unlike MPyC, whoever is
at the other end must hold the private key of exactly that party's certificate.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Awaitable, Iterable, Sequence
from typing import TypeVar

from mpc_helpers.identity import tls
from mpc_helpers.mpc.channel import Channel, close_all, lost
from mpc_helpers.mpc.session import MpcError, MpcSession, Peer, Progress, Stage, name_of
from protocol.errors import TrefoilError

T = TypeVar("T")

RETRY_SECONDS = 0.05
# A worker listens before anyone is told its port, so a port that refuses this often belongs to a worker that died.
MAX_REFUSALS = 40
# Strangers can open connections but not complete them. This many may try at a time; one more cuts off the oldest.
MAX_HANDSHAKES = 16


def listen(host: str, ports: Sequence[int] = (0,)) -> socket.socket:
    """Bind the first free port (0: any) and start queueing connections, so that peers may come before we are ready."""
    for port in ports:
        listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        try:
            listener.bind((host, port))
            listener.listen()
        except OSError:
            listener.close()
            continue
        listener.setblocking(False)
        return listener
    tried = f"port {ports[0]}" if len(ports) == 1 else f"any of {len(ports)} ports"
    raise TrefoilError(f"cannot listen on {host}, {tried}", "Check the bind address and the range of MPC ports.")


async def together(work: Iterable[Awaitable[T]]) -> list[T]:
    """Wait for all; when one fails, stop the others and raise that one's error."""
    tasks = [asyncio.ensure_future(item) for item in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Links:
    """Run by a worker: sets up this party's two channels. `close` whatever came of it."""

    def __init__(
        self, session: MpcSession, peers: Sequence[Peer], identity: tls.TlsIdentity, listener: socket.socket
    ) -> None:
        self._session = session
        self._peers = peers
        self._identity = identity
        self._listener = listener
        self._channels: dict[int, Channel] = {}
        self._arrivals: dict[int, asyncio.Future[None]] = {}

    async def open(self, progress: Progress) -> list[Channel]:
        """Connect upwards, listen downwards, until both peers are there. The caller holds the deadline."""
        progress.enter(Stage.CONNECT, self._session.peers)
        loop = asyncio.get_running_loop()
        self._arrivals = {peer: loop.create_future() for peer in self._session.peers if peer < self._session.party}
        accepting = asyncio.create_task(self._accept(progress))
        try:
            connecting = [self._connect(peer, progress) for peer in self._session.peers if peer > self._session.party]
            await together([*connecting, *self._arrivals.values()])
        finally:
            accepting.cancel()
            await asyncio.gather(accepting, return_exceptions=True)
            self._listener.close()
        return [self._channels[peer] for peer in self._session.peers]

    async def close(self) -> None:
        """Close every channel that was opened."""
        self._listener.close()
        await close_all(list(self._channels.values()))

    async def _connect(self, party: int, progress: Progress) -> None:
        """Dial a party above us until it answers; a wrong certificate is an error at once."""
        peer = self._peers[party]
        context = tls.client_context(self._identity, (peer.certificate,))
        refused = 0
        while True:
            try:
                reader, writer = await asyncio.open_connection(
                    peer.host, peer.port, ssl=context, ssl_shutdown_timeout=1.0
                )
            except ssl.SSLCertVerificationError:
                raise _wrong_certificate(party, peer) from None
            except OSError as error:
                refused += isinstance(error, ConnectionError)
                if refused > MAX_REFUSALS:
                    raise lost(Stage.CONNECT, party, error) from None
                await asyncio.sleep(RETRY_SECONDS)
                continue
            self._channels[party] = Channel(party, reader, writer)
            if not tls.same_pin(_shown(writer), tls.pin_of(peer.certificate)):
                raise _wrong_certificate(party, peer)
            progress.waiting.discard(party)
            return

    async def _accept(self, progress: Progress) -> None:
        """Take connections; each proves itself on its own time, so that a slow stranger delays nobody."""
        loop = asyncio.get_running_loop()
        trusted = tuple(self._peers[party].certificate for party in self._session.peers)
        context = tls.server_context(self._identity, trusted)
        handshakes: dict[asyncio.Task[None], None] = {}  # oldest first
        try:
            while True:
                connection, _ = await loop.sock_accept(self._listener)
                if len(handshakes) >= MAX_HANDSHAKES:
                    next(iter(handshakes)).cancel()
                task = asyncio.create_task(self._welcome(connection, context, progress))
                handshakes[task] = None
                task.add_done_callback(handshakes.pop)
                await asyncio.sleep(0)  # let it begin: a task cancelled before that would never close its connection
        finally:
            rest = list(handshakes)
            for task in rest:
                task.cancel()
            await asyncio.gather(*rest, return_exceptions=True)

    async def _welcome(self, connection: socket.socket, context: ssl.SSLContext, progress: Progress) -> None:
        """One incoming connection: keep it if its certificate is that of a party we wait for, drop it otherwise."""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        try:
            transport, _ = await loop.connect_accepted_socket(
                lambda: protocol, connection, ssl=context, ssl_shutdown_timeout=1.0
            )
        except OSError as error:
            progress.remark(f"refused a connection: {_reason(error)}")
            return
        writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        party = self._whose(_shown(writer))
        if party is None or party in self._channels:
            progress.remark("refused a connection: not a certificate we are waiting for")
            writer.close()
            return
        self._channels[party] = Channel(party, reader, writer)
        progress.waiting.discard(party)
        self._arrivals[party].set_result(None)

    def _whose(self, certificate: bytes | None) -> int | None:
        for party in self._arrivals:
            if tls.same_pin(certificate, tls.pin_of(self._peers[party].certificate)):
                return party
        return None


def _shown(writer: asyncio.StreamWriter) -> bytes | None:
    with contextlib.suppress(ValueError):
        shown: bytes | None = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        return shown
    return None


def _wrong_certificate(party: int, peer: Peer) -> MpcError:
    message = f"{peer.host}:{peer.port} shows a certificate other than that of {name_of(party)}"
    hint = "Someone is in between, or the helper has a new certificate: ask its operator for the new helper set."
    return MpcError(Stage.CONNECT, message, party=party, hint=hint)


def _reason(error: OSError) -> str:
    reason = getattr(error, "reason", None)
    return str(reason).replace("_", " ").lower() if reason else type(error).__name__

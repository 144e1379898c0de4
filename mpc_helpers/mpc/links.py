"""TCP and TLS links between the three workers of one session.

Party i connects to every party above it and listens for every party below it, as MPyC does. Unlike in MPyC, the other
end must hold the private key of exactly that party's certificate.
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
from protocol.errors import ErrorKind, TrefoilError
from protocol.net.listening import cancel_all

T = TypeVar("T")

RETRY_SECONDS = 0.05
# A port that does not even complete a TCP handshake within this time is behind a firewall: the kernel of the peer does
# so by itself, however busy its worker is.
REACH_SECONDS = 4.0
# A worker listens before its port is announced, so a port that refuses this often belongs to a worker that died.
MAX_REFUSALS = 40
BLOCKED_HINT = (
    "Its operator opens the ports that mpc_ports in its config.json lists to the other two helpers, in every firewall "
    "between. Nothing was spent: ask again with --new."
)
# Strangers can open connections but not complete a handshake. Beyond this many at a time the oldest is evicted.
MAX_HANDSHAKES = 16


def listen(host: str, port: int = 0) -> socket.socket:
    """Bind a port (0: any free one) and listen, so that peers may connect before we accept."""
    with contextlib.ExitStack() as stack:
        try:
            # A name may have addresses of both families, or of IPv6 alone; a worker listens on one, of IPv4 if it can.
            choice = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            family, _, _, _, address = min(choice, key=lambda entry: entry[0] != socket.AF_INET)
            listener = stack.enter_context(socket.socket(family))
            # Connections of the last session linger on a fixed port for a minute (TIME-WAIT), and would block it.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen()
        except (OSError, UnicodeError) as error:
            hint = "Check host, mpc_host and mpc_ports in the helper's config.json."
            message = f"cannot listen on {host}, port {port}: {error}"
            raise TrefoilError(message, hint, kind=ErrorKind.UNAVAILABLE) from None
        stack.pop_all()
    listener.setblocking(False)
    return listener


async def connect(host: str, port: int, seconds: float) -> socket.socket:
    """Return a TCP connection, or raise an `OSError`: a `TimeoutError` after `seconds`."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(seconds):
        families = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        for last, (family, kind, _, _, address) in enumerate(families, 1 - len(families)):
            connection = socket.socket(family, kind)
            connection.setblocking(False)
            try:
                await loop.sock_connect(connection, address)
                return connection
            except BaseException as error:
                connection.close()
                if last == 0 or not isinstance(error, OSError):
                    raise
    raise OSError(f"{host} has no address")


async def together(work: Iterable[Awaitable[T]]) -> list[T]:
    """Wait for all; if one fails, cancel the others and raise its error."""
    tasks = [asyncio.ensure_future(item) for item in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        await cancel_all(tasks)


class Links:
    """This party's two channels, set up by a worker. Call `close` whether or not `open` succeeded."""

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
        """Connect to higher parties, accept lower ones, and return both channels. The caller sets the deadline."""
        progress.enter(Stage.CONNECT, self._session.peers)
        loop = asyncio.get_running_loop()
        self._arrivals = {peer: loop.create_future() for peer in self._session.peers if peer < self._session.party}
        accepting = asyncio.create_task(self._accept(progress))
        try:
            connecting = [self._connect(peer, progress) for peer in self._session.peers if peer > self._session.party]
            await together([*connecting, *self._arrivals.values()])
        finally:
            await cancel_all([accepting])
            self._listener.close()
        return [self._channels[peer] for peer in self._session.peers]

    async def close(self) -> None:
        self._listener.close()
        await close_all(list(self._channels.values()))

    async def _connect(self, party: int, progress: Progress) -> None:
        """Connect to a higher party, with retries; a wrong certificate is an error at once."""
        peer = self._peers[party]
        context = tls.client_context(self._identity, (peer.certificate,))
        loop = asyncio.get_running_loop()
        refused, unreachable_at = 0, loop.time() + REACH_SECONDS
        while True:
            connection: socket.socket | None = None
            try:
                connection = await connect(peer.host, peer.port, REACH_SECONDS)
                reader, writer = await asyncio.open_connection(
                    sock=connection, ssl=context, server_hostname="", ssl_shutdown_timeout=1.0
                )
            except ssl.SSLCertVerificationError:
                raise _wrong_certificate(party, peer) from None
            except OSError as error:
                if connection is None and not isinstance(error, ConnectionError) and loop.time() >= unreachable_at:
                    raise _unreachable(party, peer, error) from None
                refused += isinstance(error, ConnectionError)
                if refused > MAX_REFUSALS:
                    raise lost(Stage.CONNECT, party, error) from None
                await asyncio.sleep(RETRY_SECONDS)
                continue
            self._channels[party] = Channel(party, reader, writer)
            if not tls.same_pin(_certificate_of(writer), tls.pin_of(peer.certificate)):
                raise _wrong_certificate(party, peer)
            progress.waiting.discard(party)
            return

    async def _accept(self, progress: Progress) -> None:
        """Accept connections. Each handshake is a task of its own, so that a slowloris client delays nobody."""
        loop = asyncio.get_running_loop()
        trusted = tuple(self._peers[party].certificate for party in self._session.peers)
        context = tls.server_context(self._identity, trusted)
        handshakes: dict[asyncio.Task[None], None] = {}  # oldest first
        try:
            while True:
                connection, _ = await loop.sock_accept(self._listener)
                if len(handshakes) >= MAX_HANDSHAKES:
                    next(iter(handshakes)).cancel()
                task = asyncio.create_task(self._handshake(connection, context, progress))
                handshakes[task] = None
                task.add_done_callback(handshakes.pop)
                await asyncio.sleep(0)  # let it start: a task cancelled before that would never close its connection
        finally:
            await cancel_all(handshakes)

    async def _handshake(self, connection: socket.socket, context: ssl.SSLContext, progress: Progress) -> None:
        """Keep an incoming connection if its certificate is that of a party we wait for, drop it otherwise."""
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
        party = self._party_of(_certificate_of(writer))
        if party is None or party in self._channels:
            progress.remark("refused a connection: not a certificate we are waiting for")
            writer.close()
            return
        self._channels[party] = Channel(party, reader, writer)
        progress.waiting.discard(party)
        self._arrivals[party].set_result(None)

    def _party_of(self, certificate: bytes | None) -> int | None:
        for party in self._arrivals:
            if tls.same_pin(certificate, tls.pin_of(self._peers[party].certificate)):
                return party
        return None


def _certificate_of(writer: asyncio.StreamWriter) -> bytes | None:
    with contextlib.suppress(ValueError):
        certificate: bytes | None = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        return certificate
    return None


def _wrong_certificate(party: int, peer: Peer) -> MpcError:
    message = f"{peer.host}:{peer.port} presents another certificate than that of {name_of(party)}"
    hint = "Someone is in between, or the helper has a new certificate: ask its operator for the new helper set."
    return MpcError(Stage.CONNECT, message, party=party, hint=hint, kind=ErrorKind.WRONG_KEY)


def _unreachable(party: int, peer: Peer, error: OSError) -> MpcError:
    message = f"cannot reach the MPC port of {name_of(party)}, {peer.host}:{peer.port}, within {REACH_SECONDS:g} s"
    return MpcError(Stage.PORT, f"{message}: {error}" if str(error) else message, hint=BLOCKED_HINT)


def _reason(error: OSError) -> str:
    reason = getattr(error, "reason", None)
    return str(reason).replace("_", " ").lower() if reason else type(error).__name__

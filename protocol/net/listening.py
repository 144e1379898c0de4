"""A TLS listener that floods and slowloris clients cannot exhaust: rate-limited logs, connection limits with eviction.

A connection without a request costs a client nothing, and this process a descriptor and 280 kB. So every connection is
counted from `accept`, before its TLS handshake. asyncio's own server shows a connection only after the handshake, and
when descriptors run out it logs without end. At the limit, the client connection that has been idle for longest is
evicted. At most half of the clients are exempt while a request of theirs is served, so one can always be evicted: every
connection is accepted, and whether it is a peer's is decided after the handshake. Peers, authenticated by their
certificates, are exempt from limit and eviction by clients; each has a limit of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
import ssl
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

LOG_INTERVAL_SECONDS = 60.0
# Two peers keep 16 connections each, and may open as many again after a fault.
PER_PEER = 32
PEER_RESERVE = 2 * PER_PEER
# An idle connection takes 280 kB (Python 3.11: 400 of them, resident memory before and after), nearly all of it the
# buffer that asyncio allocates for every TLS connection at its start.
MAX_CLIENTS = 256
HANDSHAKE_SECONDS = 10.0
BACKLOG = 256
# Backoff after a failed `accept`.
PAUSE_SECONDS = 0.1
CLOSING_TURNS = 4


def _kind_of(record: logging.LogRecord) -> str:
    """Return what records of one kind have in common: the template, or the place if the text was formatted before."""
    return str(record.msg) if record.args else f"{record.pathname}:{record.lineno}"


@dataclass(slots=True)
class _Window:
    """A minute of records of one kind: when it began, how many passed and how many did not."""

    began: float = -LOG_INTERVAL_SECONDS
    passed: int = 0
    suppressed: int = 0


class RateLimitFilter(logging.Filter):
    """Pass `burst` log records a minute of each kind: anyone could otherwise fill the log from outside.

    Records of level `unlimited` and above always pass.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        *,
        burst: int = 1,
        kind_of: Callable[[logging.LogRecord], str] = _kind_of,
        unlimited: int = logging.CRITICAL + 1,
    ) -> None:
        super().__init__()
        self._clock = clock
        self._burst = burst
        self._kind_of = kind_of
        self._unlimited = unlimited
        self._windows: dict[str, _Window] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the record passes. The first of a minute states how many like it were suppressed before."""
        if record.levelno >= self._unlimited:
            return True
        now = self._clock()
        window = self._windows.setdefault(self._kind_of(record), _Window())
        if now >= window.began + LOG_INTERVAL_SECONDS:
            if window.suppressed:
                record.msg = f"{record.msg} ({window.suppressed} more like this since the last such line)"
            window.began, window.passed, window.suppressed = now, 0, 0
        passes = window.passed < self._burst
        window.passed += passes
        window.suppressed += not passes
        return passes


# What libraries log about connections: asyncio about a failed transport, with a traceback, aiohttp about a request.
_LIBRARIES = ("asyncio", "aiohttp.server", "aiohttp.web", "aiohttp.internal", "aiohttp.client")
_LIBRARY_LINES = RateLimitFilter()


def limit_library_logs() -> None:
    """Rate-limit what a client makes libraries log. Idempotent."""
    for name in _LIBRARIES:
        logging.getLogger(name).addFilter(_LIBRARY_LINES)


_LOG = logging.getLogger(__name__)
_LOG.addFilter(RateLimitFilter())


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """How many clients, that is connections not authenticated as a peer's, may be open at a time."""

    clients: int

    @property
    def exempt(self) -> int:
        return self.clients // 2

    @property
    def share(self) -> int:
        """Return how many exempt clients one owner may have, so that no site takes all of them."""
        return -(-self.exempt // 2)

    @classmethod
    def of_this_process(cls) -> ConnectionLimits:
        """Return at most half of this process's descriptor limit: workers, ledger and peers need theirs."""
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return cls(max(8, min(MAX_CLIENTS, descriptors // 2 - PEER_RESERVE)))


class Connection:
    """One connection from its acceptance to its end. `abort` closes it at once, in any state."""

    def __init__(self, abort: Callable[[], None]) -> None:
        self.abort = abort
        self.requests = 0


class Connections:
    """All open connections. Idle clients are kept in the order in which they became idle."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self._limits = limits
        self._idle: dict[Connection, None] = {}
        # Exempt clients with the owner that each serves, and peers with their party, oldest first.
        self._busy: dict[Connection, str] = {}
        self._peers: dict[Connection, int] = {}
        self._by_transport: dict[object, Connection] = {}
        self.evicted = 0

    def __len__(self) -> int:
        return self.clients + len(self._peers)

    @property
    def clients(self) -> int:
        """Return how many connections are not, or not yet, authenticated as a peer's."""
        return len(self._idle) + len(self._busy)

    def admit(self, connection: Connection) -> None:
        """Add a new connection. At the limit, evict an idle one, of which there is always one: see `serving`."""
        if self.clients >= self._limits.clients:
            self.evict_oldest()
        self._idle[connection] = None

    def evict_oldest(self) -> bool:
        """Abort the client that has been idle for longest. Return False if none is idle."""
        oldest = next(iter(self._idle), None)
        if oldest is None:
            return False
        del self._idle[oldest]
        self.evicted += 1
        oldest.abort()
        return True

    def abort_all(self) -> None:
        """Abort every connection, peers included: the process is shutting down."""
        for connection in (*self._idle, *self._busy, *self._peers):
            connection.abort()

    def established(self, connection: Connection, transport: object, *, peer: int | None = None) -> None:
        """Record the end of the handshake, and exempt an authenticated peer from eviction by clients."""
        self._by_transport[transport] = connection
        if peer is None or connection not in self._idle:
            return
        del self._idle[connection]
        earlier = [each for each, party in self._peers.items() if party == peer]
        self._peers[connection] = peer
        if len(earlier) >= PER_PEER:
            # Most likely left over from before the peer's last restart.
            del self._peers[earlier[0]]
            self.evicted += 1
            earlier[0].abort()

    def ended(self, connection: Connection, transport: object) -> None:
        """Forget a closed connection. Idempotent."""
        self._idle.pop(connection, None)
        self._busy.pop(connection, None)
        self._peers.pop(connection, None)
        self._by_transport.pop(transport, None)

    @contextlib.contextmanager
    def serving(self, transport: object, owner: str = "") -> Iterator[None]:
        """Exempt the connection from eviction while a request of `owner` is served on it.

        A request beyond the limits of all, or of its owner, is served too, but its connection can be evicted.
        """
        connection = self._by_transport.get(transport)
        if connection is None or not self._exempt(connection, owner):
            yield
            return
        connection.requests += 1
        try:
            yield
        finally:
            connection.requests -= 1
            if connection in self._busy and not connection.requests:
                del self._busy[connection]
                self._idle[connection] = None

    def _exempt(self, connection: Connection, owner: str) -> bool:
        if connection in self._busy:
            return True
        full = len(self._busy) >= self._limits.exempt or list(self._busy.values()).count(owner) >= self._limits.share
        if full or connection not in self._idle:
            return False
        del self._idle[connection]
        self._busy[connection] = owner
        return True


class Listener:
    """Accept TLS connections for `make_protocol` within the limits of `connections`.

    `identify_peer` returns the party that a client certificate belongs to, or None.
    """

    def __init__(
        self,
        make_protocol: Callable[[], asyncio.Protocol],
        context: ssl.SSLContext,
        connections: Connections,
        identify_peer: Callable[[bytes | None], int | None],
    ) -> None:
        self.make_protocol = make_protocol
        self.context = context
        self.connections = connections
        self.identify_peer = identify_peer
        self._sockets: list[socket.socket] = []
        self._pauses: dict[socket.socket, asyncio.TimerHandle] = {}
        self._handshakes: set[asyncio.Task[None]] = set()

    async def open(self, host: str, port: int) -> int:
        """Listen on every address of `host`. Return the port, which the system chooses if `port` is 0.

        Raises OSError if an address cannot be bound.
        """
        limit_library_logs()
        loop = asyncio.get_running_loop()
        addresses = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, _, _, _, address in dict.fromkeys(addresses):
            listening = socket.socket(family, socket.SOCK_STREAM)
            self._sockets.append(listening)
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listening.bind(address)
            listening.listen(BACKLOG)
            listening.setblocking(False)
        for listening in self._sockets:
            loop.add_reader(listening, self._accept, listening)
        return int(self._sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Stop accepting, and cancel all handshakes in progress."""
        loop = asyncio.get_running_loop()
        for pause in self._pauses.values():
            pause.cancel()
        for listening in self._sockets:
            loop.remove_reader(listening)
            listening.close()
        await cancel_all(self._handshakes)

    async def abort_remaining(self) -> None:
        """Abort the connections that are still open once every request has had its grace period."""
        self.connections.abort_all()
        # An aborted transport closes its socket in a later iteration of the loop.
        for _ in range(CLOSING_TURNS):
            await asyncio.sleep(0)

    def _accept(self, listening: socket.socket) -> None:
        """Accept one connection per iteration of the loop, so that evicted ones can close and requests run in between.

        A reader callback, not a task that awaits `sock_accept`: that loses an accepted connection if it is cancelled
        at the wrong moment.
        """
        try:
            accepted, _ = listening.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return  # the client has gone
        except OSError as error:
            # Most likely out of descriptors: evict one connection, then back off.
            _LOG.warning("cannot accept connections: %s", error)
            self.connections.evict_oldest()
            self._pause(listening)
            return
        accepted.setblocking(False)
        self._admit(accepted)

    def _pause(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(listening)
        self._pauses[listening] = loop.call_later(PAUSE_SECONDS, loop.add_reader, listening, self._accept, listening)

    def _admit(self, accepted: socket.socket) -> None:
        handshake = _Handshake(self, accepted)
        self.connections.admit(handshake)
        task = handshake.start()
        self._handshakes.add(task)
        task.add_done_callback(self._handshakes.discard)


class _Handshake(Connection):
    """A connection on its way through the TLS handshake to its protocol.

    It drops its references to task and transport as soon as they have ended: a reference cycle would keep their
    buffers, a quarter of a megabyte each, until the next garbage collection.
    """

    def __init__(self, listener: Listener, accepted: socket.socket) -> None:
        super().__init__(self._abort)
        self._listener = listener
        self._accepted = accepted
        self._transport: asyncio.Transport | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> asyncio.Task[None]:
        self._task = asyncio.create_task(self._run())
        # Not in a `finally` of the task: a task that is cancelled before its first step never reaches it.
        self._task.add_done_callback(self._done)
        return self._task

    async def _run(self) -> None:
        inner = self._listener.make_protocol()
        observed = _ObservedProtocol(inner, self._established, self._ended)
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: observed,
                self._accepted,
                ssl=self._listener.context,
                ssl_handshake_timeout=HANDSHAKE_SECONDS,
            )
        except OSError as error:
            # No warning: strangers cause it, and so do peers that start together, before each knows all certificates.
            _LOG.info("a connection failed in its handshake: %s", error)

    def _done(self, _: asyncio.Task[None]) -> None:
        self._task = None
        if self._transport is None:
            # Evicted, or timed out: nobody else closes the socket.
            self._accepted.close()
            self._ended()

    def _established(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        certificate = transport.get_extra_info("ssl_object").getpeercert(binary_form=True)
        peer = self._listener.identify_peer(certificate)
        self._listener.connections.established(self, transport, peer=peer)

    def _ended(self) -> None:
        transport, self._transport = self._transport, None
        self._listener.connections.ended(self, transport)

    def _abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()
        elif self._task is not None:
            self._task.cancel()


class _ObservedProtocol(asyncio.Protocol):
    """Forward every callback to `inner`, and report when the connection is made and lost."""

    def __init__(
        self, inner: asyncio.Protocol, made: Callable[[asyncio.Transport], None], lost: Callable[[], None]
    ) -> None:
        self._inner = inner
        self._made = made
        self._lost = lost

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if isinstance(transport, asyncio.Transport):
            self._made(transport)
        self._inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received()

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost()
        self._inner.connection_lost(exc)


async def cancel_all(futures: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel them, and wait until all have ended."""
    ending = list(futures)
    for future in ending:
        future.cancel()
    await asyncio.gather(*ending, return_exceptions=True)

"""Listening: every connection is counted from its acceptance, before anything is known of who it is.

asyncio's own server shows a connection only after its TLS handshake, and when descriptors run out it logs without end.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable

from protocol.listening.connections import Connection, Connections
from protocol.listening.seldom import Seldom

HANDSHAKE_SECONDS = 10.0
BACKLOG = 256
PAUSE_SECONDS = 0.1
CLOSING_TURNS = 4
_LOG = logging.getLogger("trefoil.listener")
_LOG.addFilter(Seldom())


class _Watched(asyncio.Protocol):
    """Passes everything on, and tells when the handshake is over and when the connection ends."""

    def __init__(
        self, inner: asyncio.Protocol, begun: Callable[[asyncio.Transport], None], ended: Callable[[], None]
    ) -> None:
        self._inner = inner
        self._begun = begun
        self._ended = ended

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if isinstance(transport, asyncio.Transport):
            self._begun(transport)
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
        self._ended()
        self._inner.connection_lost(exc)


class _Arrival:
    """A connection on its way through the handshake to its protocol.

    It lets go of task and transport as soon as they have ended: a ring of them would keep their buffers, a quarter of
    a megabyte each, until the garbage is collected.
    """

    def __init__(self, listener: Listener, accepted: socket.socket) -> None:
        self._listener = listener
        self._accepted = accepted
        self._transport: asyncio.Transport | None = None
        self._task: asyncio.Task[None] | None = None
        self.connection = Connection(self._cut)

    def start(self) -> asyncio.Task[None]:
        self._task = asyncio.create_task(self._shake_hands())
        # Not in a `finally` of the task: one that is cut off before it has begun to run never comes there.
        self._task.add_done_callback(self._shaken)
        return self._task

    async def _shake_hands(self) -> None:
        inner = self._listener.make_protocol()
        watched = _Watched(inner, self._begun, self._ended)
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: watched,
                self._accepted,
                ssl=self._listener.context,
                ssl_handshake_timeout=HANDSHAKE_SECONDS,
            )
        except OSError as error:
            _LOG.warning("a connection came to nothing: %s", error)

    def _shaken(self, _: asyncio.Task[None]) -> None:
        self._task = None
        if self._transport is None:
            # Cut off, or no handshake in time: nobody else closes it.
            self._accepted.close()
            self._ended()

    def _begun(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        certificate = transport.get_extra_info("ssl_object").getpeercert(binary_form=True)
        peer = self._listener.whose(certificate) is not None
        self._listener.connections.established(self.connection, transport, peer=peer)

    def _ended(self) -> None:
        transport, self._transport = self._transport, None
        self._listener.connections.ended(self.connection, transport)

    def _cut(self) -> None:
        if self._transport is not None:
            self._transport.abort()
        elif self._task is not None:
            self._task.cancel()


class Listener:
    """Accepts TLS connections for `make_protocol` as far as `connections` has room for them."""

    def __init__(
        self,
        make_protocol: Callable[[], asyncio.Protocol],
        context: ssl.SSLContext,
        connections: Connections,
        whose: Callable[[bytes | None], int | None],
    ) -> None:
        self.make_protocol = make_protocol
        self.context = context
        self.connections = connections
        self.whose = whose
        self._sockets: list[socket.socket] = []
        self._pauses: dict[socket.socket, asyncio.TimerHandle] = {}
        self._arriving: set[asyncio.Task[None]] = set()

    async def open(self, host: str, port: int) -> int:
        """Listen on every address of `host`; gives the port, chosen by the system if 0. Raises OSError if it cannot."""
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, _, _, _, address in dict.fromkeys(found):
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
        """Accept nobody any more, and give up on whoever is still shaking hands."""
        loop = asyncio.get_running_loop()
        for pause in self._pauses.values():
            pause.cancel()
        for listening in self._sockets:
            loop.remove_reader(listening)
            listening.close()
        tasks = list(self._arriving)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def cut_the_rest(self) -> None:
        """End what is still connected, once every request had its time: who does not close is not waited for."""
        self.connections.cut_all()
        # An aborted transport closes its socket in a turn of the loop that comes later.
        for _ in range(CLOSING_TURNS):
            await asyncio.sleep(0)

    def _accept(self, listening: socket.socket) -> None:
        """Called when someone is in the queue, once in a turn of the loop: whoever is cut off for this one must get a
        turn to close, and requests theirs.

        Not a task that awaits `sock_accept`: cancelled at the wrong moment it loses a connection it has accepted.
        """
        try:
            accepted, _ = listening.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return  # whoever it was has gone
        except OSError as error:
            # Out of descriptors, most likely: one that is idle goes, and the rest waits for a moment.
            _LOG.warning("no connection can be accepted: %s", error)
            self.connections.make_room()
            loop = asyncio.get_running_loop()
            loop.remove_reader(listening)
            self._pauses[listening] = loop.call_later(
                PAUSE_SECONDS, loop.add_reader, listening, self._accept, listening
            )
            return
        accepted.setblocking(False)
        self._take(accepted)

    def _take(self, accepted: socket.socket) -> None:
        arrival = _Arrival(self, accepted)
        if not self.connections.take(arrival.connection):
            _LOG.warning("a connection was refused: all others are at work")
            accepted.close()
            return
        task = arrival.start()
        self._arriving.add(task)
        task.add_done_callback(self._arriving.discard)

"""The connections of one helper: few enough that it keeps descriptors for its own work, with some kept for its peers.

A connection without a request costs a stranger nothing and this process a descriptor and some memory. When there are
too many, the stranger goes that has been without a request for longest. A peer, known by its certificate, never goes.
"""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Callable, Iterator
from dataclasses import dataclass

# Two peers keep 16 connections each, and may make as many again after a fault.
PEER_RESERVE = 64
# An idle connection takes 280 kB (Python 3.11: 400 of them, resident memory before and after), nearly all of it the
# buffer that asyncio gives to every TLS connection at its start.
MOST_STRANGERS = 256


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """How many strangers may be connected at a time."""

    strangers: int

    @classmethod
    def of_this_process(cls) -> ConnectionLimits:
        """At most half of the descriptors that this process may have: workers, ledger and peers need theirs."""
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return cls(max(8, min(MOST_STRANGERS, descriptors // 2 - PEER_RESERVE)))


class Connection:
    """One connection from its acceptance to its end. `cut` ends it at once, in whatever state it is."""

    def __init__(self, cut: Callable[[], None]) -> None:
        self.cut = cut
        self.requests = 0


class Connections:
    """Who is connected. Strangers without a request stand in the order in which they came to be without one."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self._limits = limits
        self._idle: dict[Connection, None] = {}
        self._busy: set[Connection] = set()
        self._peers: set[Connection] = set()
        self._by_transport: dict[object, Connection] = {}
        self.cut_off = 0

    def __len__(self) -> int:
        return self.strangers + len(self._peers)

    @property
    def strangers(self) -> int:
        """Connections of anyone who is not known to be a peer, or not yet."""
        return len(self._idle) + len(self._busy)

    def take(self, connection: Connection) -> bool:
        """A new connection, for which an idle one may have to go. False if there is no room: everyone is busy."""
        if self.strangers >= self._limits.strangers and not self.make_room():
            return False
        self._idle[connection] = None
        return True

    def make_room(self) -> bool:
        """Cut off the stranger that has been without a request for longest."""
        oldest = next(iter(self._idle), None)
        if oldest is None:
            return False
        del self._idle[oldest]
        self.cut_off += 1
        oldest.cut()
        return True

    def cut_all(self) -> None:
        """The helper stops: nobody stays."""
        for connection in (*self._idle, *self._busy, *self._peers):
            connection.cut()

    def established(self, connection: Connection, transport: object, *, peer: bool) -> None:
        """The handshake is over, and a certificate may have shown a peer."""
        self._by_transport[transport] = connection
        if peer and connection in self._idle:
            del self._idle[connection]
            self._peers.add(connection)

    def ended(self, connection: Connection, transport: object) -> None:
        """It is closed, by whomever."""
        self._idle.pop(connection, None)
        self._busy.discard(connection)
        self._peers.discard(connection)
        self._by_transport.pop(transport, None)

    @contextlib.contextmanager
    def at_work(self, transport: object) -> Iterator[None]:
        """While a request is served, its connection is not idle."""
        connection = self._by_transport.get(transport)
        if connection is None or connection in self._peers:
            yield
            return
        connection.requests += 1
        self._idle.pop(connection, None)
        self._busy.add(connection)
        try:
            yield
        finally:
            connection.requests -= 1
            if connection in self._busy and not connection.requests:
                self._busy.discard(connection)
                self._idle[connection] = None

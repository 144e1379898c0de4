"""A channel to one peer: frames over a byte stream, and the first words two parties exchange on it.

The order is: connect, check the certificate, compare session and parameters (`greet`), and only then talk. Frames
are bounded in size before anything is read into memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from collections import deque
from collections.abc import Callable
from typing import Protocol

from mpc_helpers.mpc.session import (
    DIGEST_SIZE,
    MAX_NUMBERS,
    PROTOCOL_NAME,
    MpcError,
    MpcSession,
    Progress,
    Stage,
    name_of,
)
from protocol.errors import ProtocolError
from protocol.field import ELEMENT_SIZE
from protocol.shares import PARTIES
from protocol.wire import Reader, Writer

MAX_FRAME = MAX_NUMBERS * ELEMENT_SIZE + 64
CLOSE_SECONDS = 1.0
_LENGTH = 4

Intercept = Callable[[int, int, bytes], bytes | None]


class Sink(Protocol):
    """The writing half of a byte stream; `asyncio.StreamWriter` is one."""

    def write(self, data: bytes) -> None: ...
    def close(self) -> None: ...
    async def wait_closed(self) -> None: ...


class Channel:
    """Frames to and from one peer whose identity has been established."""

    def __init__(self, peer: int, reader: asyncio.StreamReader, sink: Sink) -> None:
        self.peer = peer
        self._reader = reader
        self._sink = sink

    def send(self, body: bytes) -> None:
        """Queue one frame. Small and few, so there is no back-pressure to wait for."""
        self._sink.write(len(body).to_bytes(_LENGTH, "big") + body)

    async def receive(self, limit: int = MAX_FRAME) -> bytes:
        """The next frame. Raises `ConnectionError` when the peer is gone, `ProtocolError` when it sends nonsense."""
        try:
            size = int.from_bytes(await self._reader.readexactly(_LENGTH), "big")
            if size > limit:
                raise ProtocolError(f"a frame of {size} bytes is over the limit of {limit}")
            return await self._reader.readexactly(size)
        except asyncio.IncompleteReadError:
            raise ConnectionResetError("closed the connection") from None

    async def close(self) -> None:
        """Send what is queued and close; a peer that does not read cannot hold us up."""
        self._sink.close()
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._sink.wait_closed()


async def close_all(channels: list[Channel]) -> None:
    """End of a session, good or bad."""
    await asyncio.gather(*(channel.close() for channel in channels))


async def greet(session: MpcSession, channel: Channel, progress: Progress) -> None:
    """Compare protocol, parties, session and parameters with one peer. No key is sent to a peer that differs.

    Ours goes out before theirs is read, so that both sides can name what differs.
    """
    channel.send(_hello(session, channel.peer))
    theirs = Reader(await receive_at(Stage.HELLO, channel, 256))
    try:
        name, sender, receiver = theirs.text(limit=64), theirs.uint(1), theirs.uint(1)
        attempt_id, parameter_digest = theirs.fixed(DIGEST_SIZE), theirs.fixed(DIGEST_SIZE)
        theirs.finish()
    except ProtocolError as error:
        raise _refuse(channel.peer, f"greets with something else: {error}") from None
    if name != PROTOCOL_NAME:
        raise _refuse(channel.peer, f"speaks {name!r}, not {PROTOCOL_NAME!r}", "Run the same release on all helpers.")
    if (sender, receiver) != (channel.peer, session.party):
        raise _refuse(channel.peer, f"poses as party {sender} talking to party {receiver}")
    if not hmac.compare_digest(attempt_id, session.attempt_id):
        raise _refuse(channel.peer, "is in another session (query, attempt or accepted reports differ)")
    if not hmac.compare_digest(parameter_digest, session.parameter_digest):
        hint = "Compare releases and configurations: field, buckets, noise mode and scale must be equal."
        raise _refuse(channel.peer, "computes with other parameters", hint)
    progress.waiting.discard(channel.peer)


def _hello(session: MpcSession, peer: int) -> bytes:
    writer = Writer().text(PROTOCOL_NAME).uint(session.party, 1).uint(peer, 1)
    return writer.fixed(session.attempt_id, DIGEST_SIZE).fixed(session.parameter_digest, DIGEST_SIZE).done()


def _refuse(peer: int, what: str, hint: str = "") -> MpcError:
    return MpcError(Stage.HELLO, f"{name_of(peer)} {what}", party=peer, hint=hint)


async def receive_at(stage: Stage, channel: Channel, limit: int) -> bytes:
    """One frame, with whatever goes wrong blamed on the peer and the stage."""
    try:
        return await channel.receive(limit)
    except (OSError, ProtocolError) as error:
        raise lost(stage, channel.peer, error) from None


def lost(stage: Stage, peer: int, error: Exception) -> MpcError:
    """A connection that ended too early, or carried what it should not."""
    return MpcError(stage, f"lost {name_of(peer)} while {stage.value}: {error}", party=peer)


class _MemorySink:
    """Writes into the peer's reader, at once or after `latency` seconds: three parties in one process."""

    def __init__(
        self,
        route: tuple[int, int],
        target: asyncio.StreamReader,
        intercept: Intercept | None,
        latency: float,
    ) -> None:
        self._route = route
        self._target = target
        self._intercept = intercept
        self._latency = latency
        self._under_way: deque[bytes] = deque()
        self._closed = False

    def write(self, data: bytes) -> None:
        if self._intercept is not None:
            changed = self._intercept(*self._route, data[_LENGTH:])
            data = b"" if changed is None else len(changed).to_bytes(_LENGTH, "big") + changed
        if not data or self._closed:
            return
        if not self._latency:
            self._target.feed_data(data)
            return
        self._under_way.append(data)
        asyncio.get_running_loop().call_later(self._latency, self._arrive)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            while self._under_way:
                self._arrive()
            self._target.feed_eof()

    async def wait_closed(self) -> None:
        return None

    def _arrive(self) -> None:
        """What was sent first arrives first, however timers are ordered."""
        if self._under_way:
            self._target.feed_data(self._under_way.popleft())


def memory_mesh(intercept: Intercept | None = None, *, latency: float = 0.0) -> list[list[Channel]]:
    """The channels of three parties in one process. `intercept` sees, changes or swallows (None) every frame."""
    readers = {(i, j): asyncio.StreamReader() for i in range(PARTIES) for j in range(PARTIES) if i != j}
    mesh: list[list[Channel]] = [[] for _ in range(PARTIES)]
    for (i, j), reader in readers.items():  # reader (i, j): what party i hears from party j
        mesh[i].append(Channel(j, reader, _MemorySink((i, j), readers[j, i], intercept, latency)))
    return mesh

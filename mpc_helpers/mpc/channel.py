"""A channel to one peer: frames over a byte stream, the handshake on them, and the messages that they carry.

The order is: connect, check the certificate, compare session and parameters (`greet`), and only then talk. Frames
are bounded in size before anything is read into memory. Inside a session they carry two kinds of message:

- MPyC's own, field vectors and short byte strings. `dumps` and `loads` replace `pickle` in MPyC, under the same two
  names. Unpickling a peer's bytes would let a malicious helper run code on the others; here the worst a peer can send
  is a `ProtocolError`.
- Messages of announced size (`OrderedInbox`), one for each step of joint noise.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

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
from protocol import field
from protocol.errors import ErrorKind, ProtocolError
from protocol.field import ELEMENT_SIZE
from protocol.shares import PARTIES
from protocol.wire import Reader, Writer

MAX_FRAME = MAX_NUMBERS * ELEMENT_SIZE + 64
CLOSE_SECONDS = 1.0
_LENGTH = 4

# MPyC's messages: the longest byte string, and the first byte of each kind.
MAX_BYTES = 1024
_VECTOR = 1
_BYTES = 2

# An announced message begins with its step.
STEP_SIZE = 1

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
        """Queue one frame. Frames are small and few, so there is no back-pressure to wait for."""
        self._sink.write(len(body).to_bytes(_LENGTH, "big") + body)

    async def receive(self, limit: int = MAX_FRAME) -> bytes:
        """Return the next frame. Raise `ConnectionError` if the peer is gone, `ProtocolError` if it sends too much."""
        try:
            size = int.from_bytes(await self._reader.readexactly(_LENGTH), "big")
            if size > limit:
                raise ProtocolError(f"a frame of {size} bytes is over the limit of {limit}", kind=ErrorKind.TOO_LARGE)
            return await self._reader.readexactly(size)
        except asyncio.IncompleteReadError:
            raise ConnectionResetError("closed the connection") from None

    async def close(self) -> None:
        """Flush and close, with a timeout: a peer that does not read cannot block us."""
        self._sink.close()
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._sink.wait_closed()


async def close_all(channels: list[Channel]) -> None:
    await asyncio.gather(*(channel.close() for channel in channels))


async def greet(session: MpcSession, channel: Channel, progress: Progress) -> None:
    """Compare protocol, parties, session and parameters with one peer. No key is sent to a peer that differs.

    Our greeting is sent before theirs is read, so that both sides can name what differs.
    """
    channel.send(_hello(session, channel.peer))
    theirs = Reader(await receive_at(Stage.HELLO, channel, 256))
    try:
        name, sender, receiver = theirs.text(limit=64), theirs.uint(1), theirs.uint(1)
        attempt_id, parameter_digest = theirs.fixed(DIGEST_SIZE), theirs.fixed(DIGEST_SIZE)
        theirs.finish()
    except ProtocolError as error:
        raise _refuse(channel.peer, f"sent a malformed greeting: {error}") from None
    if name != PROTOCOL_NAME:
        raise _refuse(channel.peer, f"speaks {name!r}, not {PROTOCOL_NAME!r}", "Run the same release on all helpers.")
    if (sender, receiver) != (channel.peer, session.party):
        raise _refuse(channel.peer, f"claims to be party {sender} talking to party {receiver}")
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
    """Return one frame; a failure is raised as an `MpcError` that names the peer and the stage."""
    try:
        return await channel.receive(limit)
    except (OSError, ProtocolError) as error:
        raise lost(stage, channel.peer, error) from None


def lost(stage: Stage, peer: int, error: Exception) -> MpcError:
    """Return the error for a connection that ended too early, or carried what it should not.

    Only the second blames the peer. An honest helper leaves too, if the third has sent it something false.
    """
    message = f"lost {name_of(peer)} while {stage.text}: {error}"
    if isinstance(error, ProtocolError):
        return MpcError(stage, message, party=peer, kind=error.kind)
    return MpcError(stage, f"{message}; it is at fault, or the helper that made it leave")


def dumps(value: Any) -> bytes:
    """Encode a one-dimensional array of Python integers below p, or a byte string.

    Integers must be Python's own: numpy's wrap, and floats round, both silently.
    """
    if isinstance(value, bytes):
        if len(value) > MAX_BYTES:
            message = f"parties exchange at most {MAX_BYTES} bytes at a time, not {len(value)}"
            raise ProtocolError(message, kind=ErrorKind.TOO_LARGE)
        return Writer().uint(_BYTES, 1).blob(value).done()
    if not (isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype == object):
        message = f"parties exchange field vectors and bytes, not {type(value).__name__}"
        raise ProtocolError(message, kind=ErrorKind.WRONG_TYPE)
    numbers = value.tolist()
    if not all(type(number) is int and 0 <= number < field.P for number in numbers):
        raise ProtocolError("a field vector holds Python integers from 0 to p - 1", kind=ErrorKind.OUT_OF_RANGE)
    return Writer().uint(_VECTOR, 1).blob(field.encode(np.array(numbers, dtype=np.uint64))).done()


def loads(data: bytes) -> Any:
    """Decode what `dumps` encodes: an object array of Python integers (as MPyC wants them), or bytes."""
    reader = Reader(bytes(data))
    kind = reader.uint(1)
    match kind:
        case 1:
            packed = reader.blob()
            reader.finish()
            return _objects(field.decode(packed, len(packed) // field.ELEMENT_SIZE))
        case 2:
            value = reader.blob(limit=MAX_BYTES)
            reader.finish()
            return value
        case _:
            raise ProtocolError(f"unknown kind of message between parties: {kind}", kind=ErrorKind.UNKNOWN_NAME)


def check_payload(data: bytes, buckets: int) -> None:
    """Raise `ProtocolError` unless this session's program can have sent `data`. Run while the sender is known."""
    value = loads(data)
    if isinstance(value, np.ndarray) and value.size != buckets:
        message = f"a vector of {value.size} elements in a session of {buckets} buckets"
        raise ProtocolError(message, kind=ErrorKind.INCONSISTENT)


def _objects(vector: field.Vector) -> Any:
    values = np.empty(vector.size, dtype=object)
    values[:] = vector.tolist()
    return values


class OrderedInbox:
    """The messages of announced size from one peer, on their way from its channel to the program.

    They come in order of their steps, each once, each of exactly the announced size. Anything else is refused when its
    first bytes are read, so a peer cannot make us buffer, or wait for, what the program would not use.
    """

    def __init__(self, sizes: Mapping[int, int]) -> None:
        self._pending = deque(sorted(sizes.items()))
        self._untaken = set(sizes)
        self._arrived: dict[int, bytes] = {}
        self._awaited: dict[int, asyncio.Future[bytes]] = {}

    @property
    def next_size(self) -> int:
        """The size of the next message, its step included; 0 if all have arrived."""
        return STEP_SIZE + self._pending[0][1] if self._pending else 0

    @property
    def awaited(self) -> bool:
        return bool(self._awaited)

    @property
    def complete(self) -> bool:
        """Whether everything that was announced has arrived."""
        return not self._pending

    @property
    def all_taken(self) -> bool:
        """Whether the program has taken everything that was announced."""
        return not self._untaken

    def deliver(self, message: bytes) -> None:
        if not self._pending:
            raise ProtocolError("a step after the last one", kind=ErrorKind.TRAILING_BYTES)
        step, size = self._pending[0]
        if message[:STEP_SIZE] != bytes([step]) or len(message) != STEP_SIZE + size:
            raise ProtocolError(f"not step {step} of {size} bytes, which is next", kind=ErrorKind.INCONSISTENT)
        self._pending.popleft()
        body = message[STEP_SIZE:]
        waiting = self._awaited.pop(step, None)
        if waiting is None:
            self._arrived[step] = body
        elif not waiting.done():  # cancelled, when the session fails for another reason
            waiting.set_result(body)

    async def take(self, step: int) -> bytes:
        """Return the body of a step, once. The session's deadline bounds the wait."""
        if step not in self._untaken:
            raise ProtocolError(f"step {step} was not announced, or was taken before", kind=ErrorKind.DUPLICATE)
        self._untaken.remove(step)
        if step in self._arrived:
            return self._arrived.pop(step)
        self._awaited[step] = asyncio.get_running_loop().create_future()
        return await self._awaited[step]


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
        self._in_flight: deque[bytes] = deque()
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
        self._in_flight.append(data)
        asyncio.get_running_loop().call_later(self._latency, self._arrive)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            while self._in_flight:
                self._arrive()
            self._target.feed_eof()

    async def wait_closed(self) -> None:
        return None

    def _arrive(self) -> None:
        """Deliver the oldest frame: first in, first out, in whatever order timers fire."""
        if self._in_flight:
            self._target.feed_data(self._in_flight.popleft())


def memory_mesh(intercept: Intercept | None = None, *, latency: float = 0.0) -> list[list[Channel]]:
    """Return the channels of three parties in one process. `intercept` sees, changes or drops (None) every frame."""
    readers = {(i, j): asyncio.StreamReader() for i in range(PARTIES) for j in range(PARTIES) if i != j}
    mesh: list[list[Channel]] = [[] for _ in range(PARTIES)]
    for (i, j), reader in readers.items():  # reader (i, j): what party i receives from party j
        mesh[i].append(Channel(j, reader, _MemorySink((i, j), readers[j, i], intercept, latency)))
    return mesh

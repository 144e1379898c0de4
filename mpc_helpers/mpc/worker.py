"""The daemon's side of a worker: one process per attempt and helper, which runs the MPC and is then killed.

    worker = Worker(setup, fork_server)     setup: party, kind of noise, number of buckets
    port = await worker.start()             the worker listens, reports its port, then draws its noise
    ...                                     the daemons exchange their workers' ports (`service.workers`)
    share = await worker.run(WorkerRun(...))

Every secret goes through the worker's standard input, none through arguments or environment. A worker whose daemon dies
reads the end of its input and exits. MPyC is imported in the worker only.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Self

from mpc_helpers.identity.tls import TlsIdentity
from mpc_helpers.mpc.fork_server import Child, ForkServer
from mpc_helpers.mpc.session import DIGEST_SIZE, MAX_NUMBERS, MpcError, Peer, Stage
from mpc_helpers.mpc.terms import SumTerms
from protocol import field as prime_field
from protocol.errors import ErrorKind, ProtocolError
from protocol.shares import PARTIES
from protocol.wire import Reader, Writer

START_SECONDS = 30.0
# Time beyond the session's deadline for the worker to report that the deadline passed.
GRACE_SECONDS = 5.0
MAX_MESSAGE = 2**24
_STDERR_KEPT = 4096


class WorkerMessage(Enum):
    """The kinds of message from a worker."""

    LISTENING = 1
    SHARE = 2
    FAILED = 3


@dataclass(frozen=True, slots=True)
class WorkerSetup:
    """The first message to a worker. It listens on `port`; 0 means any free one.

    `failed_proofs` is the file that counts this helper's failed checks of joint noise.
    """

    party: int
    identity: TlsIdentity
    terms: SumTerms
    failed_proofs: Path
    host: str = "127.0.0.1"
    port: int = 0

    def __post_init__(self) -> None:
        if not (0 < self.terms.buckets <= MAX_NUMBERS):
            message = f"a session has 1 to {MAX_NUMBERS} numbers, not {self.terms.buckets}"
            raise ProtocolError(message, kind=ErrorKind.OUT_OF_RANGE)
        self.terms.check_cost()

    def encode(self) -> bytes:
        writer = Writer().uint(self.party, 1).text(str(self.identity.certificate)).text(str(self.identity.key))
        self.terms.write(writer)
        return writer.text(str(self.failed_proofs)).text(self.host).uint(self.port, 2).done()

    @classmethod
    def decode(cls, data: bytes) -> WorkerSetup:
        reader = Reader(data)
        party, identity = reader.uint(1), TlsIdentity(Path(reader.text()), Path(reader.text()))
        terms, failed_proofs, host = SumTerms.read(reader), Path(reader.text()), reader.text()
        port = reader.uint(2)
        reader.finish()
        return cls(party, identity, terms, failed_proofs, host, port)


@dataclass(frozen=True, slots=True)
class WorkerRun:
    """The second message, when all three have reserved: the session, the addresses of the peers, and our share.

    `peers` lists all three parties by number, ourselves included. `seconds` bounds the session.
    """

    attempt_id: bytes
    seconds: float
    peers: tuple[Peer, Peer, Peer]
    share: Sequence[int] = field(repr=False)

    def encode(self) -> bytes:
        writer = Writer().fixed(self.attempt_id, DIGEST_SIZE).uint(max(1, int(self.seconds * 1000)), 4)
        for peer in self.peers:
            writer.text(peer.host).uint(peer.port, 2).blob(peer.certificate)
        return writer.blob(prime_field.encode(prime_field.from_integers(self.share))).done()

    @classmethod
    def decode(cls, data: bytes) -> WorkerRun:
        reader = Reader(data)
        digest, seconds = reader.fixed(DIGEST_SIZE), reader.uint(4) / 1000
        first, second, third = (Peer(reader.text(), reader.uint(2), reader.blob()) for _ in range(PARTIES))
        share = decode_share(reader.blob())
        reader.finish()
        return cls(digest, seconds, (first, second, third), share)


def decode_share(data: bytes) -> list[int]:
    return list(map(int, prime_field.decode(data, len(data) // prime_field.ELEMENT_SIZE).tolist()))


async def read_message(reader: asyncio.StreamReader) -> bytes:
    size = int.from_bytes(await reader.readexactly(4), "big")
    if size > MAX_MESSAGE:
        message = f"a message of {size} bytes is over the limit of {MAX_MESSAGE}"
        raise ProtocolError(message, kind=ErrorKind.TOO_LARGE)
    return await reader.readexactly(size)


class Worker:
    """A worker process, run by a daemon as `async with`: leaving the block kills the process in any state."""

    def __init__(self, setup: WorkerSetup, fork_server: ForkServer) -> None:
        self._setup = setup
        self._fork_server = fork_server
        self._child: Child | None = None
        self._stdin: asyncio.StreamWriter | None = None
        self._stdout: asyncio.StreamReader | None = None
        self._stderr = bytearray()
        self._stderr_task: asyncio.Task[None] | None = None
        self._writers: list[asyncio.StreamWriter] = []
        # Processor time of the session, drawing included; set when it is over.
        self.cpu_seconds = 0.0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self, seconds: float = START_SECONDS) -> int:
        """Start the process and return the port on which it listens."""
        self._child = await self._fork_server.fork()
        self._stdin = (await self._streams(self._child.stdin))[1]
        self._stdout = (await self._streams(self._child.stdout))[0]
        self._stderr_task = asyncio.create_task(self._drain_stderr((await self._streams(self._child.stderr))[0]))
        return Reader(await self._request(self._setup.encode(), WorkerMessage.LISTENING, seconds)).uint(2)

    async def run(self, run: WorkerRun) -> list[int]:
        """Run the session and return this helper's share of sum + noise. Call once, after `start`."""
        reader = Reader(await self._request(run.encode(), WorkerMessage.SHARE, run.seconds + GRACE_SECONDS))
        self.cpu_seconds, share = reader.uint(8) / 1e6, decode_share(reader.blob())
        reader.finish()
        # Kill it before the share is used: a process that holds keys and noise has no reason to live on.
        await self.stop()
        if len(share) != self._setup.terms.buckets:
            raise MpcError(Stage.COMPUTE, "the worker returned a share of the wrong length")
        return share

    async def stop(self) -> None:
        """Kill and reap the process. Idempotent."""
        # Taken before the first await: concurrent calls must not both kill the same process id.
        child, self._child = self._child, None
        if child is None:
            return
        # Closed first: if the fork server is dead, a worker whose input has ended still exits by itself.
        if self._stdin is not None:
            self._stdin.close()
        await self._fork_server.end(child)
        # Only now is the error stream complete. A grandchild could hold it open, hence the timeout.
        if self._stderr_task is not None:
            await asyncio.wait({self._stderr_task}, timeout=GRACE_SECONDS)
            self._stderr_task.cancel()
        # Aborted, not closed: nobody is left to read what may still be queued.
        for writer in self._writers:
            writer.transport.abort()
        child.close()

    async def _streams(self, stream: socket.socket) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(sock=stream)
        self._writers.append(writer)
        return reader, writer

    async def _request(self, message: bytes, wanted: WorkerMessage, seconds: float) -> bytes:
        """Send one message and return the response; kill the worker if none comes within `seconds`."""
        stage = Stage.START if wanted is WorkerMessage.LISTENING else Stage.COMPUTE
        if self._child is None or self._stdin is None or self._stdout is None:
            raise MpcError(stage, "the worker is not running")
        self._stdin.write(Writer().blob(message).done())
        try:
            async with asyncio.timeout(seconds):
                response = await read_message(self._stdout)
        except TimeoutError:
            await self.stop()
            text = f"the worker did not answer within {seconds:g} s and was killed"
            raise MpcError(stage, text, kind=ErrorKind.TIMEOUT) from None
        except (asyncio.IncompleteReadError, OSError):
            # Stopped before its error output is read, which is complete only when the process has ended.
            await self.stop()
            raise MpcError(stage, f"the worker died{self._last_error_line()}") from None
        return self._unwrap(response, wanted)

    def _unwrap(self, response: bytes, wanted: WorkerMessage) -> bytes:
        if response[:1] == bytes([WorkerMessage.FAILED.value]):
            raise MpcError.decode(response[1:])
        if response[:1] != bytes([wanted.value]):
            raise ProtocolError("the worker sent another response than the one requested")
        return response[1:]

    def _last_error_line(self) -> str:
        lines = self._stderr.decode(errors="replace").strip().splitlines()
        return f": {lines[-1]}" if lines else ""

    async def _drain_stderr(self, stream: asyncio.StreamReader) -> None:
        # Drained all the time, though only the end is kept: a worker whose error stream is full would block.
        while piece := await stream.read(_STDERR_KEPT):
            self._stderr = (self._stderr + piece)[-_STDERR_KEPT:]

"""A worker, seen from the daemon: one process per query and helper, in which the MPC runs and dies.

    worker = Worker(setup, fork_server)     setup: who we are, what noise, how many buckets
    port = await worker.start()             the worker listens, reports its port, and draws its noise meanwhile
    ...                                     the daemons tell each other their ports (RESERVED)
    share = await worker.run(WorkerRun(...))

Everything secret goes through the worker's standard input, nothing through arguments or environment. A worker whose
daemon dies sees its input end, and ends too. MPyC is imported in the worker only.
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
from mpc_helpers.mpc.session import DIGEST_SIZE, MAX_NUMBERS, MpcError, MpcSession, Peer, Stage
from mpc_helpers.mpc.terms import SumTerms
from protocol import field as prime_field
from protocol.errors import ProtocolError
from protocol.shares import PARTIES
from protocol.wire import Reader, Writer

START_SECONDS = 30.0
# What a worker gets beyond its session's deadline to say that the deadline passed.
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
    """What a worker is told first. `ports` is tried in order; 0 means any free one.

    `failed_proofs` is the file in which this helper's failed checks of joint noise are counted.
    """

    party: int
    identity: TlsIdentity
    terms: SumTerms
    failed_proofs: Path
    host: str = "127.0.0.1"
    ports: tuple[int, ...] = (0,)

    def __post_init__(self) -> None:
        if not (0 <= self.party < PARTIES):
            raise ProtocolError(f"a party is 0, 1 or 2, not {self.party}")
        if not self.ports or not all(0 <= port < 65536 for port in self.ports):
            raise ProtocolError("a worker needs at least one port to try")
        if not (0 < self.terms.buckets <= MAX_NUMBERS):
            raise ProtocolError(f"a session has 1 to {MAX_NUMBERS} numbers, not {self.terms.buckets}")
        self.terms.check_cost()

    def encode(self) -> bytes:
        """The message."""
        writer = Writer().uint(self.party, 1).text(str(self.identity.certificate)).text(str(self.identity.key))
        self.terms.write(writer)
        writer.text(str(self.failed_proofs)).text(self.host).uint(len(self.ports), 2)
        for port in self.ports:
            writer.uint(port, 2)
        return writer.done()

    @classmethod
    def decode(cls, data: bytes) -> WorkerSetup:
        """The reverse of `encode`."""
        reader = Reader(data)
        party, identity = reader.uint(1), TlsIdentity(Path(reader.text()), Path(reader.text()))
        terms, failed_proofs, host = SumTerms.read(reader), Path(reader.text()), reader.text()
        ports = tuple(reader.uint(2) for _ in range(reader.uint(2)))
        reader.finish()
        return cls(party, identity, terms, failed_proofs, host, ports)


@dataclass(frozen=True, slots=True)
class WorkerRun:
    """What a worker is told when all three have reserved: the session, the way to the peers, and our share.

    `peers` lists all three parties by number, ourselves included. `seconds` bounds the session.
    """

    attempt_id: bytes
    seconds: float
    peers: tuple[Peer, Peer, Peer]
    share: Sequence[int] = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.attempt_id) != DIGEST_SIZE:
            raise ProtocolError(f"an attempt id has {DIGEST_SIZE} bytes")
        if not (0 < self.seconds <= 86400):
            raise ProtocolError(f"a session lasts at most a day, not {self.seconds} seconds")

    def session(self, setup: WorkerSetup) -> MpcSession:
        """The session this run of that worker is."""
        return setup.terms.session(setup.party, self.attempt_id, self.seconds)

    def encode(self) -> bytes:
        """The message."""
        writer = Writer().fixed(self.attempt_id, DIGEST_SIZE).uint(max(1, int(self.seconds * 1000)), 4)
        for peer in self.peers:
            writer.text(peer.host).uint(peer.port, 2).blob(peer.certificate)
        return writer.blob(prime_field.encode(prime_field.from_integers(self.share))).done()

    @classmethod
    def decode(cls, data: bytes) -> WorkerRun:
        """The reverse of `encode`."""
        reader = Reader(data)
        digest, seconds = reader.fixed(DIGEST_SIZE), reader.uint(4) / 1000
        first, second, third = (Peer(reader.text(), reader.uint(2), reader.blob()) for _ in range(PARTIES))
        share = decode_share(reader.blob())
        reader.finish()
        return cls(digest, seconds, (first, second, third), share)


def decode_share(data: bytes) -> list[int]:
    """A vector of field elements as Python integers."""
    return list(map(int, prime_field.decode(data, len(data) // prime_field.ELEMENT_SIZE).tolist()))


async def read_message(reader: asyncio.StreamReader) -> bytes:
    """One length-prefixed message between daemon and worker."""
    size = int.from_bytes(await reader.readexactly(4), "big")
    if size > MAX_MESSAGE:
        raise ProtocolError(f"a message of {size} bytes is over the limit of {MAX_MESSAGE}")
    return await reader.readexactly(size)


def frame_message(body: bytes) -> bytes:
    """The reverse of `read_message`."""
    return Writer().blob(body).done()


class Worker:
    """Run by a daemon. Use as `async with`: leaving it kills the process, whatever state it is in."""

    def __init__(self, setup: WorkerSetup, fork_server: ForkServer) -> None:
        self._setup = setup
        self._fork_server = fork_server
        self._child: Child | None = None
        self._orders: asyncio.StreamWriter | None = None
        self._reports: asyncio.StreamReader | None = None
        self._complaints = bytearray()
        self._listener: asyncio.Task[None] | None = None
        self._writers: list[asyncio.StreamWriter] = []
        # What the session took of a processor, drawing included; known once it is over.
        self.cpu_seconds = 0.0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self, seconds: float = START_SECONDS) -> int:
        """Start the process; returns the port on which it listens."""
        self._child = await self._fork_server.fork()
        self._orders = (await self._streams(self._child.orders))[1]
        self._reports = (await self._streams(self._child.reports))[0]
        self._listener = asyncio.create_task(self._keep_complaints((await self._streams(self._child.complaints))[0]))
        return Reader(await self._ask(self._setup.encode(), WorkerMessage.LISTENING, seconds)).uint(2)

    async def run(self, run: WorkerRun) -> list[int]:
        """Let the session take place; returns this helper's share of sum + noise. Call once, after `start`."""
        reader = Reader(await self._ask(run.encode(), WorkerMessage.SHARE, run.seconds + GRACE_SECONDS))
        self.cpu_seconds, share = reader.uint(8) / 1e6, decode_share(reader.blob())
        reader.finish()
        # Before anything is done with the share: a process that holds keys and noise has no reason to live on.
        await self.stop()
        if len(share) != self._setup.terms.buckets:
            raise MpcError(Stage.COMPUTE, "the worker returned a share of the wrong length")
        return share

    async def stop(self) -> None:
        """Kill and reap the process. Harmless when there is none."""
        # Taken before the first await: two that stop it at the same time must not both end the same process id.
        child, self._child = self._child, None
        if child is None:
            return
        # Closed first: should the fork server be dead, a worker whose input has ended still ends by itself.
        if self._orders is not None:
            self._orders.close()
        await self._fork_server.end(child)
        # Only now is the error stream complete. A grandchild could hold it open, so the wait has an end.
        if self._listener is not None:
            await asyncio.wait({self._listener}, timeout=GRACE_SECONDS)
            self._listener.cancel()
        # Aborted, not closed: nobody is left to read what may still be queued.
        for writer in self._writers:
            writer.transport.abort()
        child.hang_up()

    async def _streams(self, line: socket.socket) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(sock=line)
        self._writers.append(writer)
        return reader, writer

    async def _ask(self, message: bytes, wanted: WorkerMessage, seconds: float) -> bytes:
        """Send one message and take one report, before the deadline."""
        stage = Stage.START if wanted is WorkerMessage.LISTENING else Stage.COMPUTE
        if self._child is None or self._orders is None or self._reports is None:
            raise MpcError(stage, "the worker is not running")
        self._orders.write(frame_message(message))
        try:
            async with asyncio.timeout(seconds):
                report = await read_message(self._reports)
        except TimeoutError:
            await self.stop()
            raise MpcError(stage, f"the worker did not answer within {seconds:g} s and was killed") from None
        except (asyncio.IncompleteReadError, OSError):
            # Stopped before its last words are read: they are complete only when the process has ended.
            await self.stop()
            raise MpcError(stage, f"the worker died{self._last_words()}") from None
        return self._unwrap(report, wanted)

    def _unwrap(self, report: bytes, wanted: WorkerMessage) -> bytes:
        if report[:1] == bytes([WorkerMessage.FAILED.value]):
            raise MpcError.decode(report[1:])
        if report[:1] != bytes([wanted.value]):
            raise ProtocolError("the worker reports something else than what it was asked")
        return report[1:]

    def _last_words(self) -> str:
        lines = self._complaints.decode(errors="replace").strip().splitlines()
        return f": {lines[-1]}" if lines else ""

    async def _keep_complaints(self, stream: asyncio.StreamReader) -> None:
        # Read all the time, though only the end is kept: a worker whose error stream is full would stand still.
        while piece := await stream.read(_STDERR_KEPT):
            self._complaints = (self._complaints + piece)[-_STDERR_KEPT:]

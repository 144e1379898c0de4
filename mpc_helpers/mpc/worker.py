"""The daemon's side of its workers: one process per attempt and helper, which runs the MPC and is then killed.

    worker = Worker(setup, fork_server)     setup: party, kind of noise, number of buckets
    port = await worker.start()             the worker listens, reports its port, then draws its noise
    ...                                     the daemons exchange their workers' ports (`service.workers`)
    share = await worker.run(WorkerRun(...))

Every secret goes through the worker's standard input, none through arguments or environment. A worker whose daemon dies
reads the end of its input and exits. MPyC is imported in the worker only.

The fork server is one process that has everything imported and forks a worker on request. Starting Python and importing
MPyC takes half a second of processor time, as long as opening thousands of reports; a fork takes milliseconds. The fork
server itself computes nothing but a warm-up with zeros, holds no helper's key and receives nothing but two requests. So
workers inherit no secret and no randomness: what they draw comes from the operating system after the fork
(`tests/processes/test_fork_server.py`).

Not the forkserver of `multiprocessing` with this module preloaded (tried with Python 3.11). Its children import the
daemon's `__main__` again: a start took 184 and 246 ms beside 6.4 and 8.0 ms here, medians of 20 in two runs. A stopped
worker lived on after the daemon was killed. Its children share the daemon's session, so that Ctrl-C reaches them, and
are killed by a number that may be another process's by then.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Self

from mpc_helpers.identity.tls import TlsIdentity
from mpc_helpers.mpc.noisy_sum import SumTerms
from mpc_helpers.mpc.session import DIGEST_SIZE, MAX_NUMBERS, MpcError, Peer, Stage
from protocol import field as prime_field
from protocol.errors import ErrorKind, ProtocolError
from protocol.shares import PARTIES
from protocol.wire import Reader, Writer

# The first fork waits until the fork server has imported everything, on a machine that may be busy.
ANSWER_SECONDS = 30.0
_ROOT = Path(__file__).resolve().parents[2]
_ENVIRONMENT = {
    # No thread may be running when it forks, and numpy's algebra would start some.
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    # A worker lives for one query, so every page it touches is new. Large pages, allocated early and kept, mean fewer
    # page faults: a seventh of joint noise's processor time. Other allocators than glibc's ignore this.
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=67108864:glibc.malloc.top_pad=4194304",
}


# A daemon's request to its fork server: the process id of the worker to kill, or 0 to fork one. So is the answer.
PROCESS_ID = struct.Struct(">I")
FORK = 0


@dataclass(frozen=True, slots=True)
class Child:
    """A forked worker and the daemon's ends of its standard input, output and error stream."""

    process_id: int
    stdin: socket.socket
    stdout: socket.socket
    stderr: socket.socket

    def close(self) -> None:
        """Close all three: a worker whose input ends exits by itself."""
        for stream in (self.stdin, self.stdout, self.stderr):
            stream.close()


class ForkServer:
    """Run by a daemon, as `async with`. The process starts at once and is replaced if it dies."""

    def __init__(self) -> None:
        # One thread, so that requests and answers cannot cross.
        self._thread = ThreadPoolExecutor(1, "fork server")
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None

    async def __aenter__(self) -> Self:
        self._thread.submit(self._connected)
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._stop)
        self._thread.shutdown(wait=False)

    async def fork(self) -> Child:
        """Fork a worker. If the caller is cancelled meanwhile, the worker is killed as soon as it exists."""
        forking = asyncio.get_running_loop().run_in_executor(self._thread, self._fork)
        try:
            return await asyncio.shield(forking)
        except asyncio.CancelledError:
            forking.add_done_callback(self._disown)
            raise

    async def end(self, child: Child) -> None:
        """Kill and reap a worker in any state, even if the caller is cancelled. The caller closes its streams."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._end, child)

    # The methods below run in the thread.

    def _fork(self) -> Child:
        with contextlib.ExitStack() as theirs, contextlib.ExitStack() as ours:
            pairs = [socket.socketpair() for _ in range(3)]
            for own, other in pairs:
                ours.enter_context(own)
                theirs.enter_context(other)
            descriptors = [other.fileno() for _, other in pairs]

            def send(server: socket.socket) -> int:
                return socket.send_fds(server, [PROCESS_ID.pack(FORK)], descriptors)

            try:
                process_id = self._request(send)
            except MpcError:
                # Once more, with a new fork server.
                process_id = self._request(send)
            stdin, stdout, stderr = (own for own, _ in pairs)
            ours.pop_all()
            return Child(process_id, stdin, stdout, stderr)

    def _end(self, child: Child) -> None:
        if self._connection is None:
            return  # nothing is left that could kill it; it exits when its input ends
        with contextlib.suppress(MpcError):
            self._request(lambda server: server.sendall(PROCESS_ID.pack(child.process_id)))

    def _disown(self, forking: asyncio.Future[Child]) -> None:
        if not forking.cancelled() and forking.exception() is None:
            forking.result().close()
            self._thread.submit(self._end, forking.result())

    def _request(self, send: Callable[[socket.socket], object]) -> int:
        try:
            server = self._connected()
            send(server)
            answer = server.recv(PROCESS_ID.size, socket.MSG_WAITALL)
        except OSError as error:
            self._stop()
            raise MpcError(Stage.START, f"no worker can be started: {error}") from None
        if len(answer) != PROCESS_ID.size:
            self._stop()
            raise MpcError(Stage.START, "no worker can be started: the process that forks them has died")
        process_id: int = PROCESS_ID.unpack(answer)[0]
        return process_id

    def _connected(self) -> socket.socket:
        if self._connection is not None:
            return self._connection
        ours, theirs = socket.socketpair()
        with theirs:
            environment = {name: value for name, value in os.environ.items() if not name.startswith("MPYC_")}
            self._process = subprocess.Popen(
                (sys.executable, "-m", "mpc_helpers.mpc.fork_server_main"),
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                env=environment | _ENVIRONMENT,
                cwd=_ROOT,
                start_new_session=True,
            )
        ours.settimeout(ANSWER_SECONDS)
        self._connection = ours
        return ours

    def _stop(self) -> None:
        connection, self._connection = self._connection, None
        process, self._process = self._process, None
        if connection is not None:
            connection.close()
        if process is not None:
            # SIGKILL, not SIGTERM: it has nothing to lose, and may be hanging.
            process.kill()
            process.wait()


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

"""The daemon's side of its fork server: one process that has everything imported and forks a worker on request.

Starting Python and importing MPyC takes half a second of processor time, as long as opening thousands of reports; a
fork takes milliseconds. The fork server itself computes nothing but a warm-up with zeros, holds no helper's key and
receives nothing but these two requests. So workers inherit no secret and no randomness: what they draw comes from the
operating system after the fork (`tests/processes/test_fork_server.py`).

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
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from mpc_helpers.mpc.session import MpcError, Stage

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

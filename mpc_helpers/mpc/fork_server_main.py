"""The fork server, seen from inside: a process without threads or secrets that forks workers for its daemon.

Started by `mpc_helpers.mpc.fork_server.ForkServer`, which describes the exchange. Standard input is a socket to the
daemon; when it ends, every worker is killed and the fork server ends too.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import sys
from collections.abc import Sequence

# With it comes MPyC, which takes longest.
from mpc_helpers.mpc import worker_main
from mpc_helpers.mpc.fork_server import MESSAGE_SIZE, Request
from mpc_helpers.mpc.rehearsal import rehearse

_STREAMS = 3


def main() -> None:
    """The entry point of the process."""
    line = socket.socket(fileno=0)
    workers: set[int] = set()
    rehearse()
    # What is there now stays: collecting it in every worker would only copy pages that are shared.
    gc.freeze()
    try:
        while (asked := _next(line)) is not None:
            _reap_dead(workers)
            request, process_id, descriptors = asked
            if request is Request.FORK:
                process_id = _fork(line, descriptors)
                workers.add(process_id)
            elif process_id in workers:
                _end(process_id)
                workers.discard(process_id)
            line.sendall(process_id.to_bytes(4, "big"))
    finally:
        for worker in workers:
            _end(worker)


def _next(line: socket.socket) -> tuple[Request, int, list[int]] | None:
    """The daemon's next request with the streams of a worker to be; None when the daemon is gone."""
    message, descriptors, _, _ = socket.recv_fds(line, MESSAGE_SIZE, _STREAMS)
    if not message:
        return None
    return *Request.decode(message), descriptors


def _fork(line: socket.socket, descriptors: Sequence[int]) -> int:
    process_id = os.fork()
    if process_id == 0:
        # Nothing of the fork server may run after this, neither its loop nor its farewell.
        status = 1
        try:
            os.setsid()
            line.detach()
            for place, descriptor in enumerate(descriptors):
                os.dup2(descriptor, place)
                os.close(descriptor)
            status = worker_main.main()
        finally:
            sys.stderr.flush()
            os._exit(status)
    for descriptor in descriptors:
        os.close(descriptor)
    return process_id


def _end(worker: int) -> None:
    """Kill and reap. Safe against reused process ids: until it is reaped, this one is ours."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(worker, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(worker, 0)


def _reap_dead(workers: set[int]) -> None:
    """Workers that ended by themselves, so that they neither linger nor are mistaken for living ones."""
    for worker in list(workers):
        if os.waitpid(worker, os.WNOHANG) != (0, 0):
            workers.discard(worker)


if __name__ == "__main__":
    main()

"""The fork server process, its warm-up, and the worker process that it forks for one party's part of one attempt.

Started by `worker.ForkServer`, which describes the requests. Standard input is a socket to the daemon; when it
ends, every worker is killed and the fork server exits. It has no threads and no secrets.

A forked worker takes its messages from standard input and writes its responses to standard output, as `worker.Worker`
describes, and exits when either is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Coroutine, Sequence
from fractions import Fraction
from typing import Any, BinaryIO

from mpc_helpers.mpc.channel import Intercept
from mpc_helpers.mpc.failed_proofs import FailedProofs
from mpc_helpers.mpc.links import listen
from mpc_helpers.mpc.noisy_sum import ExactNoise, PartyInput, SumKind, SumTerms, padded
from mpc_helpers.mpc.runtime import run_party, run_three_in_one_process
from mpc_helpers.mpc.session import DIGEST_SIZE, MpcError, Stage
from mpc_helpers.mpc.worker import FORK, MAX_MESSAGE, PROCESS_ID, WorkerMessage, WorkerRun, WorkerSetup, read_message
from protocol.errors import TrefoilError
from protocol.field import encode, from_integers
from protocol.net.listening import cancel_all
from protocol.shares import PARTIES
from protocol.wire import Writer

_STREAMS = 3
_WARM_UP_TERMS = SumTerms(SumKind.JOINT, Fraction(1, 100), change=100, buckets=64)
# Python specialises a function when it is called the eighth time: three sessions of three parties.
_WARM_UP_SESSIONS = 3
_WARM_UP_SECONDS = 30.0


def main() -> None:
    daemon = socket.socket(fileno=0)
    workers: set[int] = set()
    warm_up()
    # Exempt everything loaded so far from collection: scanning it would copy shared pages in every worker.
    gc.freeze()
    try:
        while (received := _next_request(daemon)) is not None:
            _reap_dead(workers)
            process_id, descriptors = received
            if process_id == FORK:
                process_id = _fork(daemon, descriptors)
                workers.add(process_id)
            elif process_id in workers:
                _kill(process_id)
                workers.discard(process_id)
            daemon.sendall(PROCESS_ID.pack(process_id))
    finally:
        for worker in workers:
            _kill(worker)


def _next_request(daemon: socket.socket) -> tuple[int, list[int]] | None:
    """Return the daemon's next request with the streams for a new worker; None when the daemon is gone."""
    message, descriptors, _, _ = socket.recv_fds(daemon, PROCESS_ID.size, _STREAMS)
    return (PROCESS_ID.unpack(message)[0], descriptors) if message else None


def _fork(daemon: socket.socket, descriptors: Sequence[int]) -> int:
    process_id = os.fork()
    if process_id == 0:
        # Nothing of the fork server may run in the child, neither its loop nor its `finally`.
        status = 1
        try:
            os.setsid()
            daemon.detach()
            for number, descriptor in enumerate(descriptors):
                os.dup2(descriptor, number)
                os.close(descriptor)
            status = run_worker()
        finally:
            sys.stderr.flush()
            os._exit(status)
    for descriptor in descriptors:
        os.close(descriptor)
    return process_id


def _kill(worker: int) -> None:
    """Kill and reap a worker. Safe against reused process ids: until it is reaped, the id is ours."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(worker, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(worker, 0)


def _reap_dead(workers: set[int]) -> None:
    """Reap workers that exited by themselves, so that none lingers or is mistaken for a live one."""
    for worker in list(workers):
        if os.waitpid(worker, os.WNOHANG) != (0, 0):
            workers.discard(worker)


def warm_up() -> None:
    """Run sessions of zeros before the first fork, so that no worker pays for what takes longer the first time.

    A worker runs one session and exits: it would pay again for AES, for numpy's functions and for Python's adaptive
    bytecode. Nothing secret is involved and nothing is kept: three parties over memory add shares of zero, keys come
    from the operating system, and the result is discarded.
    """
    for _ in range(_WARM_UP_SESSIONS):
        asyncio.run(session_of_zeros(_WARM_UP_TERMS, _WARM_UP_SECONDS))
    # Memory returned now reaches a worker as fresh pages. Memory kept would have to be copied there.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


async def session_of_zeros(
    terms: SumTerms, seconds: float, intercept: Intercept | None = None, *, latency: float = 0.0
) -> None:
    """Run one session of three parties in this process, over memory. Raise the first party's failure."""
    source, program = ExactNoise(), terms.kind.program
    sessions = [terms.session(party, bytes(DIGEST_SIZE), seconds) for party in range(PARTIES)]
    programs = [
        program.build(PartyInput(terms, [0] * terms.buckets, source, _predraw(terms, source), padded=False))
        for _ in range(PARTIES)
    ]
    for outcome in await run_three_in_one_process(sessions, programs, intercept, latency=latency):
        if isinstance(outcome, BaseException):
            raise outcome


def _predraw(terms: SumTerms, source: ExactNoise) -> list[int]:
    predraw = terms.kind.program.predraw
    return [] if predraw is None else predraw(terms, source)


def run_worker() -> int:
    """Run a forked worker to its end and return its exit status."""
    # Responses have the real standard output to themselves; whatever a library prints goes to the error stream.
    responses = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    try:
        asyncio.run(_work(responses))
    except asyncio.IncompleteReadError:
        sys.stderr.write("the daemon is gone\n")
        return 1
    except MpcError as error:
        _respond(responses, WorkerMessage.FAILED, error.encode())
    except TrefoilError as error:
        _respond(responses, WorkerMessage.FAILED, MpcError(Stage.START, str(error), hint=error.hint).encode())
    except Exception:
        traceback.print_exc()
        failure = MpcError(Stage.COMPUTE, "the worker failed; its log says why")
        _respond(responses, WorkerMessage.FAILED, failure.encode())
    return 0


async def _work(responses: BinaryIO) -> None:
    """Listen, report the port, draw noise, wait for the session, run it, report the share."""
    messages = await _standard_input()
    setup = WorkerSetup.decode(await read_message(messages))
    listener = listen(setup.host, setup.port)
    _respond(responses, WorkerMessage.LISTENING, Writer().uint(listener.getsockname()[1], 2).done())
    predrawn = await _predraw_padded(setup.terms)
    run = WorkerRun.decode(await read_message(messages))
    session = setup.terms.session(setup.party, run.attempt_id, run.seconds)
    source = ExactNoise(FailedProofs(setup.failed_proofs).judge)
    program = setup.terms.kind.program.build(PartyInput(setup.terms, run.share, source, predrawn))
    share = await _unless_orphaned(messages, run_party(session, run.peers, setup.identity, listener, program))
    cpu_micros = int(1e6 * time.process_time())
    _respond(responses, WorkerMessage.SHARE, Writer().uint(cpu_micros, 8).blob(encode(from_integers(share))).done())


async def _predraw_padded(terms: SumTerms) -> list[int]:
    """Draw what depends on no other party while the daemons still talk, in a time that reveals nothing about it."""
    if terms.kind.program.predraw is None:
        return []
    async with padded(terms.allowance):
        return _predraw(terms, ExactNoise())


async def _unless_orphaned(messages: asyncio.StreamReader, work: Coroutine[Any, Any, list[int]]) -> list[int]:
    """Return the result of `work`, unless the daemon goes away first: then nobody is left to vote for it."""
    session = asyncio.ensure_future(work)
    orphaned = asyncio.ensure_future(messages.readexactly(1))
    await asyncio.wait({session, orphaned}, return_when=asyncio.FIRST_COMPLETED)
    if orphaned.done():
        await cancel_all([session])
        await orphaned
        raise MpcError(Stage.COMPUTE, "the daemon sent a message during the session")
    await cancel_all([orphaned])
    return await session


async def _standard_input() -> asyncio.StreamReader:
    reader = asyncio.StreamReader(limit=MAX_MESSAGE)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    return reader


def _respond(responses: BinaryIO, kind: WorkerMessage, body: bytes) -> None:
    """Write one response, whole: an unbuffered pipe may take it in pieces."""
    rest = memoryview(Writer().blob(bytes([kind.value]) + body).done())
    while rest:
        rest = rest[responses.write(rest) :]


if __name__ == "__main__":
    main()

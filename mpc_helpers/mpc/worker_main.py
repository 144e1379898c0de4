"""A worker, seen from inside: the process in which one party's part of one query is computed.

Forked by `mpc_helpers.mpc.fork_server_main` for a `mpc_helpers.mpc.worker.Worker`, which describes the exchange. Reads
its orders from standard input, writes its reports to standard output, and ends when either does.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time
import traceback
from collections.abc import Coroutine
from typing import Any, BinaryIO

from mpc_helpers.mpc.failed_proofs import FailedProofs
from mpc_helpers.mpc.links import listen
from mpc_helpers.mpc.noisy_sum import ExactNoise
from mpc_helpers.mpc.pace import paced
from mpc_helpers.mpc.runtime import Program, run_party
from mpc_helpers.mpc.session import MpcError, Stage
from mpc_helpers.mpc.worker import MAX_MESSAGE, WorkerMessage, WorkerRun, WorkerSetup, frame_message, read_message
from protocol.errors import TrefoilError
from protocol.field import encode, from_integers
from protocol.wire import Writer


def main() -> int:
    """All that the process does; gives its exit status."""
    # Reports have the real standard output to themselves; whatever a library prints goes to the error stream.
    reports = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    try:
        asyncio.run(_work(reports))
    except asyncio.IncompleteReadError:
        sys.stderr.write("the daemon is gone\n")
        return 1
    except MpcError as error:
        _report(reports, WorkerMessage.FAILED, error.encode())
    except TrefoilError as error:
        _report(reports, WorkerMessage.FAILED, MpcError(Stage.START, str(error), hint=error.hint).encode())
    except Exception:
        traceback.print_exc()
        _report(reports, WorkerMessage.FAILED, MpcError(Stage.COMPUTE, "the worker failed; its log says why").encode())
    return 0


async def _work(reports: BinaryIO) -> None:
    """Listen, report the port, draw noise, wait for the session, run it, report the share."""
    orders = await _standard_input()
    setup = WorkerSetup.decode(await read_message(orders))
    listener = listen(setup.host, setup.ports)
    _report(reports, WorkerMessage.LISTENING, Writer().uint(listener.getsockname()[1], 2).done())
    drawn = await _draw_ahead(setup)
    run = WorkerRun.decode(await read_message(orders))
    share = await _until_orphaned(orders, _session(setup, run, listener, drawn))
    spent = int(1e6 * time.process_time())
    _report(reports, WorkerMessage.SHARE, Writer().uint(spent, 8).blob(encode(from_integers(share))).done())


async def _session(setup: WorkerSetup, run: WorkerRun, listener: socket.socket, drawn: list[int]) -> list[int]:
    return await run_party(run.session(setup), run.peers, setup.identity, listener, _program(setup, run, drawn))


async def _draw_ahead(setup: WorkerSetup) -> list[int]:
    """What needs nothing from anybody is drawn while the daemons still talk, at a pace that shows nothing."""
    terms = setup.terms
    if not terms.draws_ahead:
        return []
    async with paced(terms.allowance):
        return terms.kind.program.draw_ahead(terms, ExactNoise())


def _program(setup: WorkerSetup, run: WorkerRun, drawn: list[int]) -> Program[list[int]]:
    source = ExactNoise(FailedProofs(setup.failed_proofs).judge)
    return setup.terms.kind.program.program(setup.terms, run.share, drawn, source, paced=True)


async def _until_orphaned(orders: asyncio.StreamReader, work: Coroutine[Any, Any, list[int]]) -> list[int]:
    """The result of `work`, unless the daemon goes away first: then nobody is left to vote for it."""
    session = asyncio.ensure_future(work)
    orphaned = asyncio.ensure_future(orders.readexactly(1))
    await asyncio.wait({session, orphaned}, return_when=asyncio.FIRST_COMPLETED)
    if orphaned.done():
        session.cancel()
        await asyncio.gather(session, return_exceptions=True)
        await orphaned
        raise MpcError(Stage.COMPUTE, "the daemon spoke out of turn")
    orphaned.cancel()
    await asyncio.gather(orphaned, return_exceptions=True)
    return await session


async def _standard_input() -> asyncio.StreamReader:
    reader = asyncio.StreamReader(limit=MAX_MESSAGE)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    return reader


def _report(reports: BinaryIO, kind: WorkerMessage, body: bytes) -> None:
    """Write one report, whole: an unbuffered pipe may take it in pieces."""
    rest = memoryview(frame_message(bytes([kind.value]) + body))
    while rest:
        rest = rest[reports.write(rest) :]

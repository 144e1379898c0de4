"""A collector's HTTPS interface: one address to which devices and pages post one sealed report at a time."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import assert_never

from aiohttp import web

from protocol.collector.bodies import PostBodies
from protocol.collector.intake import CollectorIntake
from protocol.collector.limits import CollectorLimits, NotTaken, Refused
from protocol.collector.store import ReportStore
from protocol.errors import TrefoilError
from protocol.listening.connections import ConnectionLimits, Connections
from protocol.listening.listener import Listener
from protocol.listening.seldom import Seldom

_LOG = logging.getLogger("trefoil.collector")
PATH = "/reports"
HEADER_SECONDS = 30.0
HOUSEKEEPING_SECONDS = 3600.0
_HTTP_LOG = logging.getLogger("trefoil.collector.http")
_HTTP_LOG.addFilter(Seldom())
# Any page may post: a report names its own site, and nobody but the helpers can read it.
_OPEN = {"Access-Control-Allow-Origin": "*", "Access-Control-Allow-Methods": "POST", "Access-Control-Max-Age": "86400"}


def http_status(reason: Refused) -> int:
    """400 and 403 are final, 408, 429, 503 and 507 may be tried again."""
    match reason:
        case Refused.MALFORMED | Refused.TOO_OLD | Refused.TOO_NEW:
            return 400
        case Refused.OTHER_SITE | Refused.OTHER_HELPERS:
            return 403
        case Refused.TOO_FAST:
            return 429
        case Refused.SLOW:
            return 408
        case Refused.BUSY | Refused.DISK:
            return 503
        case Refused.SITE_FULL | Refused.FULL:
            return 507
        case _:
            assert_never(reason)


def refusal_of(error: NotTaken) -> web.Response:
    """What a client gets for a report that is not stored."""
    answer = {"error": error.reason.value, "message": str(error), "hint": error.hint}
    return web.json_response(answer, status=http_status(error.reason), headers=_OPEN)


class CollectorServer:
    """The two routes: posting a report, and asking whether the collector is well."""

    def __init__(self, intake: CollectorIntake, connections: Connections) -> None:
        self._intake = intake
        self._connections = connections
        self._bodies = PostBodies()

    def application(self) -> web.Application:
        """For aiohttp."""
        application = web.Application()
        application.router.add_post(PATH, self._post)
        application.router.add_options(PATH, self._preflight)
        application.router.add_get("/healthz", self._health)
        return application

    async def _post(self, request: web.Request) -> web.Response:
        try:
            # While its body arrives a connection counts as idle: who is slow goes first when there are too many.
            async with self._bodies.body(request) as body:
                with self._connections.at_work(request.transport):
                    filed = await self._intake.take(body)
        except NotTaken as error:
            return refusal_of(error)
        return web.json_response({"digest": filed.digest.hex()}, status=201 if filed.new else 200, headers=_OPEN)

    async def _preflight(self, _request: web.Request) -> web.Response:
        return web.Response(status=204, headers=_OPEN | {"Access-Control-Allow-Headers": "Content-Type"})

    async def _health(self, _request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})


@contextlib.asynccontextmanager
async def collecting(
    folder: Path,
    limits: CollectorLimits,
    host: str,
    port: int,
    tls: tuple[Path, Path],
    clock: Callable[[], int],
) -> AsyncIterator[int]:
    """Serve until the block ends; gives the port, which is the system's choice where 0 was asked for."""
    context = _context(*tls)
    # Before the folder is made: nothing is left of a collector that could not start.
    _check_port(host, port)
    async with contextlib.AsyncExitStack() as stack:
        store = stack.enter_context(ReportStore(folder, limits))
        intake = CollectorIntake(store, limits, clock)
        for task in (asyncio.create_task(intake.run()), asyncio.create_task(_keep_house(store, clock))):
            stack.push_async_callback(_ended, task)
        yield await stack.enter_async_context(_listening(intake, context, host, port))


def _check_port(host: str, port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise _not_free(host, port, error) from None


def _not_free(host: str, port: int, error: OSError) -> TrefoilError:
    what = "is taken by another program" if error.errno == errno.EADDRINUSE else f"cannot be used: {error.strerror}"
    return TrefoilError(f"port {port} of {host} {what}", "Choose another with --port.")


@contextlib.asynccontextmanager
async def _listening(intake: CollectorIntake, context: ssl.SSLContext, host: str, port: int) -> AsyncIterator[int]:
    connections = Connections(ConnectionLimits.of_this_process())
    runner = web.AppRunner(
        CollectorServer(intake, connections).application(),
        access_log=None,
        logger=_HTTP_LOG,
        keepalive_timeout=HEADER_SECONDS,
        shutdown_timeout=2,
        # A report does not become smaller; what unpacks to a thousand times its size is nobody's report.
        auto_decompress=False,
    )
    await runner.setup()
    if runner.server is None:
        raise TypeError("a runner that is set up has a server")
    listener = Listener(runner.server, context, connections, lambda _: None)
    try:
        try:
            bound = await listener.open(host, port)
        except OSError as error:
            raise _not_free(host, port, error) from None
        yield bound
    finally:
        await listener.close()
        await runner.cleanup()
        await listener.cut_the_rest()


def _context(certificate: Path, key: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise TrefoilError(
            f"cannot use {certificate} with {key}: {error}", "Make both with: trefoil keygen tls"
        ) from None
    return context


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def _keep_house(store: ReportStore, clock: Callable[[], int]) -> None:
    while True:
        try:
            await asyncio.to_thread(store.forget, clock())
        except TrefoilError as error:
            _LOG.error("housekeeping failed: %s", error)
        await asyncio.sleep(HOUSEKEEPING_SECONDS)

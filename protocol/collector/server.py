"""The collector's HTTPS interface: devices and web pages post one sealed report at a time.

Run by a site, or by someone who measures for it. In the order that a report passes through: `PostBodies` reads it
into bounded memory and evicts the oldest upload when that is full, so that neither a flood nor slowloris clients keep
others out; `CollectorIntake` checks the report and commits many in one transaction, and only then is the response sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import ssl
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

from protocol.batch import MAX_BODY, MAX_HEADER
from protocol.collector.limits import CollectorLimits, PostingRate, PostRefusal, ReportRefused
from protocol.collector.store import FILE_NAME, Receipt, ReportStore
from protocol.errors import ErrorKind, ProtocolError, TrefoilError
from protocol.files import remove_on_failure
from protocol.header import Header
from protocol.net.listening import ConnectionLimits, Connections, Listener, RateLimitFilter, cancel_all
from protocol.report import SealedReport

MAX_POST = MAX_HEADER + MAX_BODY + 2**13
# From the first byte to the last, against slowloris clients.
BODY_SECONDS = 30.0
# For all bodies together that are being received or written. Storing one briefly takes a few times its size.
MAX_BUFFERED = 2**26


@dataclass(eq=False, slots=True)
class _PostBody:
    """A body being received: the bytes so far, and the timeout that evicts it."""

    size: int
    timeout: asyncio.Timeout


class PostBodies:
    """Receives request bodies; `most` bounds the bytes of all bodies together."""

    def __init__(self, most: int = MAX_BUFFERED) -> None:
        self._most = most
        self._buffered = 0
        # Oldest first.
        self._uploads: dict[_PostBody, None] = {}

    @contextlib.asynccontextmanager
    async def body(self, request: web.Request) -> AsyncIterator[bytes]:
        """Yield the whole body, which counts as buffered until the block ends.

        Raise `ReportRefused` if it is too large, too slow, evicted or truncated.
        """
        if (request.content_length or 0) > MAX_POST:
            raise _too_large()
        upload = _PostBody(0, asyncio.timeout(BODY_SECONDS))
        self._uploads[upload] = None
        try:
            async with upload.timeout:
                pieces = [piece async for piece in self._pieces(request, upload)]
            del self._uploads[upload]
            yield b"".join(pieces)
        except (TimeoutError, ConnectionError):
            message = "the report took too long to arrive"
            raise ReportRefused(PostRefusal.SLOW, message, "Post it again in one piece.") from None
        finally:
            self._uploads.pop(upload, None)
            self._buffered -= upload.size

    async def _pieces(self, request: web.Request, upload: _PostBody) -> AsyncIterator[bytes]:
        async for piece in request.content.iter_any():
            upload.size += len(piece)
            self._buffered += len(piece)
            if upload.size > MAX_POST:
                raise _too_large()
            self._evict()
            yield piece

    def _evict(self) -> None:
        """Time out the oldest uploads until the rest fits."""
        excess = self._buffered - self._most
        for oldest in self._uploads:
            if excess <= 0:
                return
            excess -= oldest.size
            # An upload that is timing out already cannot be rescheduled.
            if not oldest.timeout.expired():
                oldest.timeout.reschedule(0)


def _too_large() -> ReportRefused:
    return ReportRefused(PostRefusal.MALFORMED, f"a report has at most {MAX_POST} bytes")


# The queue of reports to be written. More are refused, so that memory is bounded under a flood.
MAX_WAITING = 512
_MOST_AT_ONCE = 256

Waiting = tuple[Header, SealedReport, "asyncio.Future[Receipt]"]


class CollectorIntake:
    """Checks and stores reports: every request calls `take`, and one task (`run`) commits."""

    def __init__(self, store: ReportStore, limits: CollectorLimits, clock: Callable[[], int]) -> None:
        self._store = store
        self._limits = limits
        self._clock = clock
        self._rate = PostingRate(limits, time.monotonic)
        self._waiting: asyncio.Queue[Waiting] = asyncio.Queue(MAX_WAITING)

    async def take(self, body: bytes, address: str = "") -> Receipt:
        """Store one report that `address` has posted: durably when this returns, else raise `ReportRefused`."""
        self._rate.take_from_address(address)
        try:
            report = SealedReport.decode(body)
            header = Header.decode(report.header)
        except ProtocolError as error:
            raise ReportRefused(PostRefusal.MALFORMED, f"this is not a sealed report: {error}") from None
        self._limits.check(header, self._clock())
        self._rate.take(header.terms.site)
        receipt: asyncio.Future[Receipt] = asyncio.get_running_loop().create_future()
        try:
            self._waiting.put_nowait((header, report, receipt))
        except asyncio.QueueFull:
            message = "too many reports are waiting to be written"
            raise ReportRefused(PostRefusal.BUSY, message, "Retry in a second.") from None
        return await receipt

    async def run(self) -> None:
        """Group commit: write all waiting reports in one transaction, until cancelled."""
        while True:
            waiting = [await self._waiting.get()]
            while len(waiting) < _MOST_AT_ONCE and not self._waiting.empty():
                waiting.append(self._waiting.get_nowait())
            await self._write(waiting)

    async def _write(self, waiting: list[Waiting]) -> None:
        reports = [(header, report) for header, report, _ in waiting]
        try:
            outcomes = await asyncio.to_thread(self._store.add, reports)
        except TrefoilError as error:
            outcomes = [ReportRefused(PostRefusal.DISK, str(error), error.hint)] * len(waiting)
        for (_, _, receipt), outcome in zip(waiting, outcomes, strict=True):
            if receipt.done():  # the client has disconnected
                continue
            if isinstance(outcome, ReportRefused):
                receipt.set_exception(outcome)
            else:
                receipt.set_result(outcome)


_LOG = logging.getLogger(__name__)
PATH = "/reports"
HEADER_SECONDS = 30.0
HOUSEKEEPING_SECONDS = 3600.0
_HTTP_LOG = logging.getLogger(f"{__name__}.http")
_HTTP_LOG.addFilter(RateLimitFilter())
# Any web page may post: a report names its own site, and only the helpers can open it.
_OPEN = {"Access-Control-Allow-Origin": "*", "Access-Control-Allow-Methods": "POST", "Access-Control-Max-Age": "86400"}


def refusal_of(error: ReportRefused) -> web.Response:
    code, status = error.reason.value
    answer = {"error": code, "message": str(error), "hint": error.hint}
    return web.json_response(answer, status=status, headers=_OPEN)


class CollectorServer:
    """The routes: POST of a report with its CORS preflight, and a health check."""

    def __init__(self, intake: CollectorIntake, connections: Connections) -> None:
        self._intake = intake
        self._connections = connections
        self._bodies = PostBodies()

    def application(self) -> web.Application:
        application = web.Application()
        application.router.add_post(PATH, self._post)
        application.router.add_options(PATH, self._preflight)
        application.router.add_get("/healthz", self._health)
        return application

    async def _post(self, request: web.Request) -> web.Response:
        try:
            # A connection stays evictable while its body arrives: a slowloris client must not be exempt.
            async with self._bodies.body(request) as body:
                with self._connections.serving(request.transport):
                    receipt = await self._intake.take(body, request.remote or "")
        except ReportRefused as error:
            return refusal_of(error)
        return web.json_response({"digest": receipt.digest.hex()}, status=201 if receipt.new else 200, headers=_OPEN)

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
    """Serve until the block ends. Yield the port, which the system chooses if `port` is 0."""
    context = _context(*tls)
    # A collector that cannot start leaves nothing behind.
    with remove_on_failure(folder / FILE_NAME):
        async with contextlib.AsyncExitStack() as starting:
            store = starting.enter_context(ReportStore(folder, limits))
            intake = CollectorIntake(store, limits, clock)
            tasks = [asyncio.create_task(intake.run()), asyncio.create_task(_expire_reports(store, clock))]
            starting.push_async_callback(cancel_all, tasks)
            bound = await starting.enter_async_context(_listening(intake, context, host, port))
            serving = starting.pop_all()
    async with serving:
        yield bound


@contextlib.asynccontextmanager
async def _listening(intake: CollectorIntake, context: ssl.SSLContext, host: str, port: int) -> AsyncIterator[int]:
    connections = Connections(ConnectionLimits.of_this_process())
    runner = web.AppRunner(
        CollectorServer(intake, connections).application(),
        access_log=None,
        logger=_HTTP_LOG,
        keepalive_timeout=HEADER_SECONDS,
        shutdown_timeout=2,
        # Sealed reports do not compress: anything compressed is a decompression bomb.
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
            taken = error.errno == errno.EADDRINUSE
            what = "is taken by another program" if taken else f"cannot be used: {error.strerror}"
            hint = "Choose another with --port." if taken else "Choose another with --port, or --host."
            raise TrefoilError(f"port {port} of {host or 'no host'} {what}", hint, kind=ErrorKind.BUSY) from None
        yield bound
    finally:
        await listener.close()
        await runner.cleanup()
        await listener.abort_remaining()


def _context(certificate: Path, key: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise TrefoilError(
            f"cannot use {certificate} with {key}: {error.strerror or error}",
            "Make both with: trefoil keygen tls",
            kind=ErrorKind.WRONG_FILE,
        ) from None
    return context


async def _expire_reports(store: ReportStore, clock: Callable[[], int]) -> None:
    while True:
        try:
            await asyncio.to_thread(store.forget, clock())
        except TrefoilError as error:
            _LOG.error("deleting expired reports failed: %s", error)
        await asyncio.sleep(HOUSEKEEPING_SECONDS)

"""A helper's HTTPS interface: for queriers, for the two peers, and for whoever keeps it running.

    GET  /v1/config                    who this helper is, and what it accepts
    PUT  /v1/queries/{digest}          a signed query (the signature is the authentication)
    PUT  /v1/queries/{digest}/column   this helper's column of the batch, streamed to disk
    PUT  /v1/queries/{digest}/withdrawal   the querier takes the query back
    GET  /v1/queries/{digest}          where the query stands
    GET  /v1/queries/{digest}/answer   the sealed share and the three signed YES
    POST /v1/peer/{route}              between helpers; the certificate says which
    GET  /healthz, /readyz, /metrics   for operators

A query is named by its digest, which covers a random id and a fresh key: to know it is to hold the query.
"""

from __future__ import annotations

import asyncio
import email.utils
import errno
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from aiohttp import web

from mpc_helpers.service.intake import Intake
from mpc_helpers.service.metrics import CONTENT_TYPE, Metrics
from mpc_helpers.service.refusal import Refusal, Trouble
from mpc_helpers.service.transport import HEALTH_PATH, PEER_PATH, TooLong, read_bounded
from protocol.errors import ProtocolError, TrefoilError
from protocol.listening.connections import Connections
from protocol.permit import PERMIT_HEADER
from protocol.status import QueryStatus
from protocol.wire import HASH_SIZE
from protocol.withdrawal import MAX_SIGNED_QUERY, MAX_WITHDRAWAL

BODY_SECONDS = 60
CONFIG_PATH = "/v1/config"
QUERY_PATH = "/v1/queries/{digest}"
READY_PATH = "/readyz"
METRICS_PATH = "/metrics"
ROUTES = (CONFIG_PATH, QUERY_PATH, QUERY_PATH + "/column", QUERY_PATH + "/withdrawal", QUERY_PATH + "/answer")
_LOG = logging.getLogger("trefoil.server")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class PeerRoute(Protocol):
    """Takes a peer's message and gives the answer to it."""

    async def receive(self, sender: int, message: bytes, /) -> bytes | None: ...


@dataclass(frozen=True, slots=True)
class PeerDoor:
    """How peers are known and heard: whose a certificate is, who takes their messages, and how long one may be."""

    whose: Callable[[bytes | None], int | None]
    routes: Mapping[str, PeerRoute]
    longest_message: int


@dataclass(frozen=True, slots=True)
class OpenPages:
    """What anyone may read: who this helper is, what it counts, and what its operator should look at."""

    configuration: Mapping[str, object]
    metrics: Metrics
    health: Callable[[], Mapping[str, object]]


class Server:
    """The routes. Everything they decide is decided in `Intake`; everything peers say goes to a `PeerRoute`."""

    def __init__(
        self,
        intake: Intake,
        peers: PeerDoor,
        pages: OpenPages,
        clock: Callable[[], int],
        connections: Connections,
    ) -> None:
        self._intake = intake
        self._peers = peers
        self._pages = pages
        self._clock = clock
        self._connections = connections
        self._requests = pages.metrics.counter(
            "trefoil_requests_total", "requests by route and HTTP status", route=ROUTES, status=["200"]
        )

    def application(self) -> web.Application:
        """The routes as an aiohttp application. Bodies are bounded by each handler, not by one number for all."""
        app = web.Application(middlewares=[self._guard])
        app.on_response_prepare.append(self._date)
        app.add_routes(
            [
                web.get(CONFIG_PATH, self._config),
                web.put(QUERY_PATH, self._put_query),
                web.put(QUERY_PATH + "/column", self._put_column),
                web.put(QUERY_PATH + "/withdrawal", self._put_withdrawal),
                web.get(QUERY_PATH, self._get_status),
                web.get(QUERY_PATH + "/answer", self._get_answer),
                web.post(PEER_PATH + "{route}", self._peer),
                web.get(HEALTH_PATH, self._health),
                web.get(READY_PATH, self._ready),
                web.get(METRICS_PATH, self._show_metrics),
            ]
        )
        return app

    async def _date(self, _: web.Request, response: web.StreamResponse) -> None:
        """By this helper's own clock, so that peers can compare theirs with it."""
        response.headers["Date"] = email.utils.formatdate(self._clock(), usegmt=True)

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Every error becomes one JSON answer that says what to do; a bug becomes a 500 and a line in the log."""
        route = request.match_info.route.resource
        name = route.canonical if route is not None else "unknown"
        try:
            response = await handler(request)
        except web.HTTPException as error:
            response = _error(error.status, error.reason)
        except Refusal as error:
            response = _error(_STATUS[error.trouble], str(error), error.hint)
        except ProtocolError as error:
            response = _error(400, str(error), error.hint)
        except TrefoilError as error:
            response = _error(503, str(error), error.hint)
        except OSError as error:
            _LOG.error("cannot serve %s: %s", name, error)
            response = _error(507 if error.errno in _DISK_ERRORS else 500, f"cannot serve this: {error.strerror}")
        self._requests(route=name, status=str(response.status))
        return response

    def _at_work(self, request: web.Request) -> AbstractContextManager[None]:
        """From here on its connection is not cut off to make room. Not before: a stranger whose body comes a byte at a
        time holds nobody's place, and whoever uploads a column is refused at once without a permit.
        """
        return self._connections.at_work(request.transport)

    async def _config(self, _: web.Request) -> web.Response:
        return web.json_response(self._pages.configuration)

    async def _put_query(self, request: web.Request) -> web.Response:
        body = await _read_bounded(request, MAX_SIGNED_QUERY)
        with self._at_work(request):
            return _status(await self._intake.submit(_digest(request), body))

    async def _put_column(self, request: web.Request) -> web.Response:
        size = request.content_length
        if size is None:
            raise Refusal(Trouble.TOO_LARGE, "a column is sent with its length", "Send a Content-Length header.")
        pieces: AsyncIterator[bytes] = request.content.iter_any()
        with self._at_work(request):
            return _status(await self._intake.take_column(_digest(request), _permit(request), size, pieces))

    async def _put_withdrawal(self, request: web.Request) -> web.Response:
        body = await _read_bounded(request, MAX_WITHDRAWAL)
        with self._at_work(request):
            return _status(await self._intake.withdraw(_digest(request), body))

    async def _get_status(self, request: web.Request) -> web.Response:
        return _status(self._intake.status(_digest(request)))

    async def _get_answer(self, request: web.Request) -> web.Response:
        share, votes = await self._intake.answer(_digest(request))
        response = web.json_response({"share": share.hex(), "votes": [vote.hex() for vote in votes]})
        with self._at_work(request):
            await response.prepare(request)
            await response.write_eof()
        self._intake.answer_sent(_digest(request))
        return response

    async def _peer(self, request: web.Request) -> web.Response:
        """The certificate decides who speaks; what it says is signed again by the agreement's own messages."""
        shown = request.get_extra_info("ssl_object")
        party = self._peers.whose(shown.getpeercert(binary_form=True) if shown is not None else None)
        if party is None:
            raise Refusal(Trouble.STRANGER, "only the two other helpers may speak here")
        route = self._peers.routes.get(request.match_info["route"])
        if route is None:
            raise web.HTTPNotFound
        answer = await route.receive(party, await _read_bounded(request, self._peers.longest_message))
        return web.Response(body=answer or b"")

    async def _health(self, _: web.Request) -> web.Response:
        """Alive, whatever it lacks: a helper is not helped by being restarted because a peer is down."""
        return web.json_response(self._pages.health())

    async def _ready(self, _: web.Request) -> web.Response:
        """Whether a new query could be answered, for whoever steers queriers or rolls out an upgrade."""
        page = self._pages.health()
        return web.json_response(page, status=200 if page["ready"] else 503)

    async def _show_metrics(self, _: web.Request) -> web.Response:
        return web.Response(text=self._pages.metrics.render(), headers={"Content-Type": CONTENT_TYPE})


_STATUS = {
    Trouble.STRANGER: 403,
    Trouble.UNKNOWN: 404,
    Trouble.CHANGED: 409,
    Trouble.NOT_YET: 425,
    Trouble.TOO_LARGE: 413,
    Trouble.UNWILLING: 422,
    Trouble.BUSY: 429,
    Trouble.ENDED: 410,
    Trouble.VOTED: 409,
    Trouble.DISK: 507,
}
_DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO}


def _error(status: int, message: str, hint: str = "") -> web.Response:
    return web.json_response({"error": message, "hint": hint}, status=status)


def _status(status: QueryStatus) -> web.Response:
    return web.json_response(status.to_json())


def _digest(request: web.Request) -> bytes:
    try:
        digest = bytes.fromhex(request.match_info["digest"])
    except ValueError:
        digest = b""
    if len(digest) != HASH_SIZE:
        raise ProtocolError("a query is named by its digest, in 64 hexadecimal digits")
    return digest


def _permit(request: web.Request) -> bytes:
    """What the request shows as its permit. What is not hexadecimal is no permit, as nothing is."""
    try:
        return bytes.fromhex(request.headers.get(PERMIT_HEADER, ""))
    except ValueError:
        return b""


async def _read_bounded(request: web.Request, limit: int) -> bytes:
    if request.content_length is not None and request.content_length > limit:
        raise Refusal(Trouble.TOO_LARGE, f"a body of {request.content_length} bytes is over the limit of {limit}")
    try:
        async with asyncio.timeout(BODY_SECONDS):
            return await read_bounded(request.content, limit)
    except TooLong as error:
        raise Refusal(Trouble.TOO_LARGE, str(error)) from None
    except TimeoutError:
        raise ProtocolError(f"the body did not arrive within {BODY_SECONDS} s") from None

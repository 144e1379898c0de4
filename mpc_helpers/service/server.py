"""A helper's HTTPS interface: for queriers, for the two peers, and for operators.

    GET  /v1/config                    who this helper is, and what it accepts
    PUT  /v1/queries/{digest}          a signed query (the signature is the authentication)
    PUT  /v1/queries/{digest}/column   this helper's column of the batch, streamed to disk
    PUT  /v1/queries/{digest}/withdrawal   the querier withdraws the query
    GET  /v1/queries/{digest}          the status of the query
    GET  /v1/queries/{digest}/answer   the sealed share and the three signed votes
    POST /v1/peer/{route}              between helpers, authenticated by certificate
    GET  /healthz, /readyz, /metrics   for operators

A query is named by its digest, which covers a random id and a fresh key: only those who hold the query can name it.
"""

from __future__ import annotations

import asyncio
import email.utils
import errno
import hmac
import ipaddress
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

from aiohttp import web
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from mpc_helpers.agreement.messages import longest_message
from mpc_helpers.agreement.negotiation import public_error
from mpc_helpers.identity.config import ConfigError, HelperConfig
from mpc_helpers.identity.membership import Membership
from mpc_helpers.mpc import noise
from mpc_helpers.service.monitoring import Metrics
from mpc_helpers.service.policy import Refusal, RefusalReason
from mpc_helpers.service.queries import Queries
from mpc_helpers.service.storage import LEAST_RATE
from mpc_helpers.service.transport import HEALTH_PATH, PEER_PATH, Certificates, TooLong, read_bounded
from protocol.errors import ErrorKind, ProtocolError, TrefoilError
from protocol.files import read_private_file
from protocol.header import VERSION
from protocol.lanes import describe_opens
from protocol.net.listening import ConnectionLimits, Connections, Listener, RateLimitFilter
from protocol.query import MAX_SIGNED_QUERY, MAX_WITHDRAWAL, PERMIT_HEADER
from protocol.status import QueryStatus
from protocol.wire import HASH_SIZE

BODY_SECONDS = 60
CONFIG_PATH = "/v1/config"
QUERY_PATH = "/v1/queries/{digest}"
READY_PATH = "/readyz"
METRICS_PATH = "/metrics"
SHORTEST_TOKEN = 16
ROUTES = (CONFIG_PATH, QUERY_PATH, QUERY_PATH + "/column", QUERY_PATH + "/withdrawal", QUERY_PATH + "/answer")
SHUTDOWN_SECONDS = 2.0
# From a connection's start, or its last response, to the end of a request's headers. Longer than the 15 s for which a
# peer keeps an idle connection, so that none is closed while it is being reused.
HEADER_SECONDS = 30.0
_LOG = logging.getLogger(__name__)
_LOG.addFilter(RateLimitFilter())
# The HTTP library's complaints about malformed requests, rate-limited.
_HTTP_LOG = logging.getLogger(f"{__name__}.http")
_HTTP_LOG.addFilter(RateLimitFilter())

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class PeerRoute(Protocol):
    """Takes a peer's message and returns the reply."""

    async def receive(self, sender: int, message: bytes, /) -> bytes | None: ...


@dataclass(frozen=True, slots=True)
class MetricsAccess:
    """Who may read the metrics: a client with the token; if none is configured, a client on this machine.

    They name no site, but counts and sizes tell one site when another asks, and about how many reports.
    """

    token: bytes = field(default=b"", repr=False)

    @classmethod
    def of(cls, config: HelperConfig) -> MetricsAccess:
        if config.metrics_token is None:
            return cls()
        hint = "Make one with: openssl rand -hex 32"
        if not config.metrics_token.exists():
            raise ConfigError(f"there is no token in {config.metrics_token}", hint, kind=ErrorKind.FILE_MISSING)
        token = read_private_file(config.metrics_token).strip()
        if len(token) < SHORTEST_TOKEN:
            message = f"the token in {config.metrics_token} has fewer than {SHORTEST_TOKEN} characters"
            raise ConfigError(message, hint, kind=ErrorKind.TOO_FEW)
        return cls(token)

    def admits(self, request: web.Request) -> bool:
        if not self.token:
            return _is_loopback(request.remote)
        presented = request.headers.get("Authorization", "").encode(errors="replace")
        return hmac.compare_digest(presented, b"Bearer " + self.token)

    def check(self, request: web.Request) -> None:
        if self.admits(request):
            return
        if self.token:
            hint = "Send the header Authorization: Bearer with the token that the helper's operator chose."
            raise Refusal(RefusalReason.STRANGER, "the metrics are for those who have their token", hint)
        hint = "Read them there, or have its operator set metrics_token."
        raise Refusal(RefusalReason.STRANGER, "the metrics are for this helper's own machine", hint)


def _is_loopback(address: str | None) -> bool:
    try:
        peer = ipaddress.ip_address(address or "")
    except ValueError:
        return False
    mapped = peer.ipv4_mapped if isinstance(peer, ipaddress.IPv6Address) else None
    return (mapped or peer).is_loopback


def public_configuration(config: HelperConfig, membership: Membership) -> dict[str, object]:
    """Return the body of `/v1/config`. Devices do not take their helper set from here."""
    return {
        "name": config.name,
        "party": membership.party + 1,
        "version": VERSION,
        "helper_set": {"number": membership.helper_set.number, "digest": membership.helper_set.digest.hex()},
        "noise": [mode.value for mode in config.noise_modes],
        "spend_in_parts": config.spend_in_parts,
        "limits": {
            "minimum_reports": config.limits.minimum_reports,
            "maximum_reports": config.limits.maximum_reports,
            "seconds": config.limits.seconds,
            "scale": noise.MAX_SCALE,
        },
        "report_lifetime_days": config.report_lifetime_days,
        "answer_days": config.answer_days,
    }


class Server:
    """The routes. `Queries` decides everything about queries; peers' messages go to `peer_routes`.

    `health` returns the health page, which anyone may read but for the numbers of queries.
    """

    def __init__(
        self,
        config: HelperConfig,
        membership: Membership,
        certificates: Certificates,
        queries: Queries,
        metrics: Metrics,
        *,
        peer_routes: Mapping[str, PeerRoute],
        health: Callable[[], Mapping[str, object]],
        clock: Callable[[], int],
    ) -> None:
        self._configuration = public_configuration(config, membership)
        self._certificates = certificates
        self._queries = queries
        self._metrics = metrics
        self._metrics_access = MetricsAccess.of(config)
        self._peer_routes = peer_routes
        self._longest_message = longest_message(config.limits.maximum_reports)
        self._health = health
        self._clock = clock
        self._connections = connections = Connections(ConnectionLimits.of_this_process())
        self._requests = metrics.counter(
            "trefoil_requests_total", "Requests by route and HTTP status.", route=ROUTES, status=["200"]
        )
        metrics.value("trefoil_connections", "Open connections.", lambda: len(connections))
        cut = "Idle connections that were evicted."
        metrics.counted("trefoil_connections_cut_total", cut, lambda: {(): connections.evicted})

    @asynccontextmanager
    async def listening(self, host: str, port: int) -> AsyncIterator[None]:
        runner = web.AppRunner(
            self.application(),
            access_log=None,
            logger=_HTTP_LOG,
            shutdown_timeout=SHUTDOWN_SECONDS,
            keepalive_timeout=HEADER_SECONDS,
        )
        await runner.setup()
        if runner.server is None:
            raise TypeError("a runner that is set up has a server")
        context, whose = self._certificates.server_context, self._certificates.whose
        listener = Listener(runner.server, context, self._connections, whose)
        try:
            try:
                await listener.open(host, port)
            except (OSError, UnicodeError) as error:  # the second of a host that no name can be
                message, hint = f"port {port} of {host!r} cannot be used: {error}", "Correct it in config.json."
                if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
                    message, hint = f"port {port} of {host} is taken by another program", "Stop it, or choose another."
                raise ConfigError(message, hint, kind=ErrorKind.UNAVAILABLE) from None
            yield
        finally:
            await listener.close()
            await runner.cleanup()
            await listener.abort_remaining()

    def application(self) -> web.Application:
        """Return the aiohttp application. Each handler bounds its own request body."""
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
                web.get(HEALTH_PATH, self._show_health),
                web.get(READY_PATH, self._ready),
                web.get(METRICS_PATH, self._show_metrics),
            ]
        )
        return app

    async def _date(self, _: web.Request, response: web.StreamResponse) -> None:
        """Date every response by this helper's clock, so that peers can compare theirs with it."""
        response.headers["Date"] = email.utils.formatdate(self._clock(), usegmt=True)

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Turn every error into a JSON response with a hint, and count the request."""
        route = request.match_info.route.resource
        name = route.canonical if route is not None else "unknown"
        try:
            response = await handler(request)
        except web.HTTPException as error:
            response = _error(error.status, error.reason)
        except Refusal as error:
            response = _error(error.http_status, str(error), error.hint)
        except ProtocolError as error:
            response = _error(400, str(error), error.hint)
        except TrefoilError as error:
            public = public_error(error)
            if public is not error:
                _LOG.error("the ledger failed while serving %s: %s", name, error)
            response = _error(503, str(public), public.hint)
        except ConnectionError:
            # The client has gone. Not logged: one that resets its connections would fill the log.
            response = _error(400, "the connection was lost")
        except OSError as error:
            _LOG.error("cannot serve %s: %s", name, error)
            response = _error(507 if error.errno in _DISK_ERRORS else 500, f"cannot serve this: {error.strerror}")
        self._requests(route=name, status=str(response.status))
        return response

    def _at_work(self, request: web.Request) -> AbstractContextManager[None]:
        """Exempt this connection from eviction from now on. Not earlier: a slowloris client must stay evictable."""
        tracked = self._queries.find(_digest(request))
        return self._connections.serving(request.transport, "" if tracked is None else tracked.query.site)

    async def _config(self, _: web.Request) -> web.Response:
        return web.json_response(self._configuration)

    async def _put_query(self, request: web.Request) -> web.Response:
        body = await _read_bounded(request, MAX_SIGNED_QUERY)
        with self._at_work(request):
            return _status(await self._queries.submit(_digest(request), body))

    async def _put_column(self, request: web.Request) -> web.Response:
        size = request.content_length
        if size is None:
            raise Refusal(RefusalReason.TOO_LARGE, "a column is sent with its length", "Send a Content-Length header.")
        pieces: AsyncIterator[bytes] = request.content.iter_any()
        with self._at_work(request):
            return _status(await self._queries.take_column(_digest(request), _permit(request), size, pieces))

    async def _put_withdrawal(self, request: web.Request) -> web.Response:
        body = await _read_bounded(request, MAX_WITHDRAWAL)
        with self._at_work(request):
            return _status(await self._queries.withdraw(_digest(request), body))

    async def _get_status(self, request: web.Request) -> web.Response:
        return _status(self._queries.status(_digest(request)))

    async def _get_answer(self, request: web.Request) -> web.Response:
        share, votes = await self._queries.answer(_digest(request))
        response = web.json_response({"share": share.hex(), "votes": [vote.hex() for vote in votes]})
        with self._at_work(request):
            try:
                # A client that does not read holds no place for longer.
                async with asyncio.timeout(BODY_SECONDS + 2 * len(share) / LEAST_RATE):
                    await response.prepare(request)
                    await response.write_eof()
            except TimeoutError:
                if request.transport is not None:
                    request.transport.abort()
                return response
        self._queries.answer_sent(_digest(request))
        return response

    async def _peer(self, request: web.Request) -> web.Response:
        """Authenticate the peer by its certificate. The agreement's messages carry signatures of their own."""
        connection = request.get_extra_info("ssl_object")
        party = self._certificates.whose(connection.getpeercert(binary_form=True) if connection else None)
        if party is None:
            raise Refusal(RefusalReason.STRANGER, "this path is for the two other helpers")
        route = self._peer_routes.get(request.match_info["route"])
        if route is None:
            raise web.HTTPNotFound
        answer = await route.receive(party, await _read_bounded(request, self._longest_message))
        return web.Response(body=answer or b"")

    def _health_page(self, request: web.Request) -> dict[str, object]:
        """Return the health, with the numbers of queries for those who may read the metrics, as these have them too."""
        counts = self._queries.counts() if self._metrics_access.admits(request) else {}
        return {**self._health(), "queries": counts, "opens": describe_opens()}

    async def _show_health(self, request: web.Request) -> web.Response:
        """Liveness: 200 whatever is wrong, as a restart does not help against a peer that is down."""
        return web.json_response(self._health_page(request))

    async def _ready(self, request: web.Request) -> web.Response:
        page = self._health_page(request)
        return web.json_response(page, status=200 if page["ready"] else 503)

    async def _show_metrics(self, request: web.Request) -> web.Response:
        self._metrics_access.check(request)
        return web.Response(text=self._metrics.render(), headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})


_DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO}


def _error(status: int, message: str, hint: str = "") -> web.Response:
    return web.json_response({"error": message, "hint": hint}, status=status)


def _status(status: QueryStatus) -> web.Response:
    return web.json_response(status.to_json())


def _digest(request: web.Request) -> bytes:
    text = request.match_info["digest"]
    try:
        digest = bytes.fromhex(text)
    except ValueError:
        digest = b""
    # Both lengths: Python's reader of hexadecimal skips spaces, so one query would have many addresses.
    if (len(text), len(digest)) != (2 * HASH_SIZE, HASH_SIZE):
        raise ProtocolError("a query is named by its digest, in 64 hexadecimal digits")
    return digest


def _permit(request: web.Request) -> bytes:
    """Return the request's permit. One that is not hexadecimal counts as none."""
    try:
        return bytes.fromhex(request.headers.get(PERMIT_HEADER, ""))
    except ValueError:
        return b""


async def _read_bounded(request: web.Request, limit: int) -> bytes:
    if request.content_length is not None and request.content_length > limit:
        raise Refusal(RefusalReason.TOO_LARGE, f"a body of {request.content_length} bytes is over the limit of {limit}")
    try:
        async with asyncio.timeout(BODY_SECONDS):
            return await read_bounded(request.content, limit)
    except TooLong as error:
        raise Refusal(RefusalReason.TOO_LARGE, str(error)) from None
    except TimeoutError:
        raise ProtocolError(f"the body did not arrive within {BODY_SECONDS} s", kind=ErrorKind.TIMEOUT) from None

"""Connection limits: the longest idle client is evicted first, peers are exempt, and the log is rate-limited."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import resource
import socket
import ssl
import sys
from asyncio.sslproto import SSLProtocol
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from aiohttp import web

from mpc_helpers.identity import tls
from mpc_helpers.local.launcher import launched, prepare
from protocol.keys import load_identity
from protocol.net import listening
from protocol.net.listening import (
    LOG_INTERVAL_SECONDS,
    MAX_CLIENTS,
    PEER_RESERVE,
    PER_PEER,
    Connection,
    ConnectionLimits,
    Connections,
    Listener,
    RateLimitFilter,
)
from protocol.querier.ask import Querier
from protocol.querier.saved_query import QueryOptions, make_query
from tests.support.three_helpers import SITE, real_now, seal_all, terms, write_batch

HOST = "127.0.0.1"


class Line:
    """A connection that records whether it was aborted."""

    def __init__(self, connections: Connections) -> None:
        self.aborted = False
        self.connection = Connection(self._abort)
        connections.admit(self.connection)
        self.connections = connections

    def _abort(self) -> None:
        self.aborted = True

    def established(self, *, peer: int | None = None) -> Line:
        self.connections.established(self.connection, self, peer=peer)
        return self


def test_the_longest_idle_is_evicted_first_and_busy_ones_never() -> None:
    connections = Connections(ConnectionLimits(3))
    first, second, third = (Line(connections).established() for _ in range(3))
    with connections.serving(first):
        Line(connections)
        assert (first.aborted, second.aborted, third.aborted) == (False, True, False)
    # The first has become idle last of all.
    Line(connections)
    assert (first.aborted, third.aborted, connections.clients) == (False, True, 3)


def test_half_of_the_clients_can_always_be_evicted() -> None:
    """All eight serve requests, of as many owners: four of them are exempt, and every new connection is accepted."""
    connections = Connections(ConnectionLimits(8))
    with contextlib.ExitStack() as stack:
        lines = [Line(connections).established() for _ in range(8)]
        for number, line in enumerate(lines):
            stack.enter_context(connections.serving(line, f"site {number}"))
        newer = [Line(connections).established() for _ in range(20)]
        assert [line.aborted for line in lines] == [False] * 4 + [True] * 4
        assert [line.aborted for line in newer] == [True] * 16 + [False] * 4
    assert connections.clients == 8


def test_one_owner_has_half_of_the_exempt_places() -> None:
    connections = Connections(ConnectionLimits(16))
    with contextlib.ExitStack() as stack:
        lines = [Line(connections).established() for _ in range(16)]
        for line in lines[:12]:
            stack.enter_context(connections.serving(line, "busy.example"))
        stack.enter_context(connections.serving(lines[12], "other.example"))
        for _ in range(16):
            Line(connections)
        kept = [number for number, line in enumerate(lines) if not line.aborted]
        assert kept == [0, 1, 2, 3, 12]


def test_a_peer_that_opens_too_many_loses_its_own_oldest() -> None:
    """Left over from a peer that restarted, or a malicious one: neither the other peer nor descriptors suffer."""
    connections = Connections(ConnectionLimits(8))
    other = Line(connections).established(peer=2)
    lines = [Line(connections).established(peer=1) for _ in range(3 * PER_PEER)]
    assert [line.aborted for line in lines] == [True] * (2 * PER_PEER) + [False] * PER_PEER
    assert (other.aborted, len(connections)) == (False, 1 + PER_PEER)


def test_peers_are_neither_evicted_nor_counted_as_clients() -> None:
    connections = Connections(ConnectionLimits(2))
    peers = [Line(connections).established(peer=1) for _ in range(10)]
    clients = [Line(connections) for _ in range(5)]
    assert not any(peer.aborted for peer in peers)
    assert [client.aborted for client in clients] == [True, True, True, False, False]
    with connections.serving(peers[0]):
        assert (len(connections), connections.clients, connections.evicted) == (12, 2, 3)


def test_an_ended_connection_leaves_nothing_behind() -> None:
    connections = Connections(ConnectionLimits(2))
    idle, busy, peer = Line(connections), Line(connections).established(), Line(connections).established(peer=1)
    with connections.serving(busy):
        for line in (idle, busy, peer):
            connections.ended(line.connection, line)
    assert len(connections) == 0
    assert not connections.evict_oldest()


def test_clients_get_at_most_half_of_the_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    for soft in (256, 1024, 4096, 2**20):
        monkeypatch.setattr(resource, "getrlimit", lambda _, soft=soft: (soft, soft))
        clients = ConnectionLimits.of_this_process().clients
        assert 8 <= clients <= MAX_CLIENTS
        assert clients + PEER_RESERVE <= soft // 2


def test_repeated_lines_are_written_once_a_minute() -> None:
    now = 0.0
    written: list[str] = []
    log, handler = logging.getLogger("test of seldom"), logging.Handler()
    handler.emit = lambda record: written.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    log.propagate = False
    log.addFilter(RateLimitFilter(lambda: now))
    for number in range(1000):
        log.warning("failed: %d", number)
    log.warning("another kind")
    now = LOG_INTERVAL_SECONDS
    log.warning("failed: %d", 1000)
    log.warning("failed: %d", 1001)
    assert written == ["failed: 0", "another kind", "failed: 1000 (999 more like this since the last such line)"]


def test_a_formatted_text_is_known_by_its_place_and_errors_may_pass() -> None:
    """asyncio formats what it logs about a transport, with its address: each line is another text."""
    limited = RateLimitFilter(lambda: 0.0, burst=3, unlimited=logging.ERROR)

    def passes(level: int, message: str) -> bool:
        return limited.filter(logging.LogRecord("asyncio", level, "base_events.py", 1, message, None, None))

    assert [passes(logging.WARNING, f"transport {number}") for number in range(100)] == [True] * 3 + [False] * 97
    assert all(passes(logging.ERROR, f"transport {number}") for number in range(100))
    assert len(limited._windows) == 1


class Server:
    """A listener that admits four clients, with its own certificate and one peer's."""

    def __init__(self, folder: Path) -> None:
        self.own, self.peer = (
            tls.make_identity(self._folder(folder, name), name, real_now()) for name in ("own", "peer")
        )
        self.connections = Connections(ConnectionLimits(4))
        self.released = asyncio.Event()
        self.port = 0

    @staticmethod
    def _folder(folder: Path, name: str) -> Path:
        (folder / name).mkdir()
        return folder / name

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[Server]:
        context = tls.server_context(self.own, (self.peer.der,))
        context.verify_mode = ssl.CERT_OPTIONAL
        runner = web.ServerRunner(web.Server(self._answer))
        await runner.setup()
        assert runner.server is not None
        identify = lambda certificate: 1 if tls.same_pin(certificate, self.peer.pin) else None  # noqa: E731
        listener = Listener(runner.server, context, self.connections, identify)
        await listener.open(HOST, 0)
        self.port = listener._sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            await listener.close()
            await runner.cleanup()
            await listener.abort_remaining()
            assert len(self.connections) == 0

    async def _answer(self, request: web.BaseRequest) -> web.Response:
        with self.connections.serving(request.transport):
            if request.path == "/wait":
                await self.released.wait()
            return web.Response(text="hello")

    async def connect(self, *, peer: bool = False) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        context = tls.client_context(self.peer if peer else None, (self.own.der,))
        return await asyncio.open_connection(HOST, self.port, ssl=context)


async def ask(line: tuple[asyncio.StreamReader, asyncio.StreamWriter], path: str = "/") -> bytes:
    """Return the reply on a connection, empty if it was aborted."""
    reader, writer = line
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nHost: helper\r\n\r\n".encode())
        await writer.drain()
        return await reader.read(2**16)
    except OSError:
        return b""


async def wait_for_clients(server: Server, count: int) -> None:
    async with asyncio.timeout(20):
        while server.connections.clients != count:
            await asyncio.sleep(0.01)


@pytest.fixture
def server(tmp_path: Path) -> Server:
    return Server(tmp_path)


async def test_an_open_listener_limits_what_libraries_log(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    loggers = [logging.getLogger(name) for name in ("asyncio", "aiohttp.server", "aiohttp.web")]
    for logger in loggers:
        monkeypatch.setattr(logger, "filters", [])
    async with server.open():
        assert [[type(each) for each in logger.filters] for logger in loggers] == [[RateLimitFilter]] * 3


async def test_the_newest_clients_are_served_and_the_oldest_evicted(server: Server) -> None:
    async with server.open():
        lines = [await server.connect() for _ in range(10)]
        answers = [await ask(line) for line in lines]
        assert [answer.endswith(b"hello") for answer in answers] == [False] * 6 + [True] * 4
        for _, writer in lines:
            writer.transport.abort()


async def test_silent_connections_are_evicted_before_any_handshake(server: Server) -> None:
    """The cheapest flood: connect and send nothing."""
    async with server.open():
        silent = [socket.create_connection((HOST, server.port)) for _ in range(30)]
        await wait_for_clients(server, 4)
        line = await server.connect()
        assert (await ask(line)).endswith(b"hello")
        assert server.connections.evicted >= 26
        for each in silent:
            each.close()
        line[1].transport.abort()


async def test_what_aborted_off_is_freed_at_once(server: Server) -> None:
    """Each has a buffer of 256 kB: thousands of them must not wait for a garbage collection."""
    async with server.open():
        gc.collect()
        gc.disable()
        try:
            silent = []
            for _ in range(20):
                silent.append(socket.create_connection((HOST, server.port)))
                await asyncio.sleep(0.02)
            await wait_for_clients(server, 4)
            await asyncio.sleep(0.1)
            kept = sum(isinstance(live, SSLProtocol) for live in gc.get_objects())
        finally:
            gc.enable()
        assert kept <= 6
        for each in silent:
            each.close()


async def test_a_peer_connects_through_a_flood_and_stays(server: Server) -> None:
    async with server.open():
        silent = [socket.create_connection((HOST, server.port)) for _ in range(10)]
        peer = await server.connect(peer=True)
        silent += [socket.create_connection((HOST, server.port)) for _ in range(30)]
        await asyncio.sleep(0.1)
        assert (await ask(peer)).endswith(b"hello")
        for each in silent:
            each.close()
        peer[1].transport.abort()


async def test_a_connection_serving_a_request_is_never_evicted(server: Server) -> None:
    async with server.open():
        busy = await server.connect()
        asking = asyncio.create_task(ask(busy, "/wait"))
        await asyncio.sleep(0.1)
        silent = [socket.create_connection((HOST, server.port)) for _ in range(30)]
        await wait_for_clients(server, 4)
        server.released.set()
        assert (await asking).endswith(b"hello")
        for each in silent:
            each.close()
        busy[1].transport.abort()


async def test_a_handshake_has_a_deadline(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    assert listening.HANDSHAKE_SECONDS == 10
    monkeypatch.setattr(listening, "HANDSHAKE_SECONDS", 0.2)
    async with server.open():
        silent = socket.create_connection((HOST, server.port))
        await wait_for_clients(server, 1)
        await wait_for_clients(server, 0)
        silent.settimeout(5)
        assert silent.recv(1) == b""
        silent.close()


@contextlib.contextmanager
def flood(endpoints: list[tuple[str, int]], each: int) -> Iterator[list[socket.socket]]:
    """Open connections that send nothing, or begin a handshake with nonsense."""
    with contextlib.ExitStack() as stack:
        made = []
        for number in range(each * len(endpoints)):
            with contextlib.suppress(OSError):
                made.append(stack.enter_context(socket.create_connection(endpoints[number % len(endpoints)], 5)))
                if number % 3 == 0:
                    made[-1].sendall(b"\x16\x03\x01 nonsense")
        yield made


def send_bad_http(endpoint: tuple[str, int]) -> None:
    """Send HTTP that no library can parse."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    with socket.create_connection(endpoint, 5) as plain, context.wrap_socket(plain) as line:
        line.sendall(b"GET / HTTP/1.1\r\nContent-Length: many\r\n\r\n")
        assert b" 400 " in line.recv(1000)


def test_real_helpers_answer_during_a_flood(tmp_path: Path) -> None:
    """Each helper may have 200 descriptors; 400 silent clients connect to each."""
    trio = prepare(tmp_path / "trio", now=real_now(), sites={SITE: [SITE]}, options={"processes": 0})
    few = ("sh", "-c", 'ulimit -n 200; exec "$0" "$@"', sys.executable, "-m", "trefoil")
    with launched(trio, (*few, "helper", "--stop-with-stdin", "--config")):
        helper_set = trio.helper_set
        with flood([helper.endpoint for helper in helper_set.helpers], 400) as clients:
            assert len(clients) == 1200
            batch = write_batch(tmp_path / "batch", seal_all([[0, 1, 0, 2]] * 5, terms(4, debug=True), helper_set))
            key = load_identity(trio.site_key_path(SITE))
            saved = make_query(batch, QueryOptions(seconds=60, debug=True), helper_set, key, real_now())
            result = asyncio.run(Querier(helper_set, patience=30).ask(saved, batch))
        assert result.answer.histogram == [0, 5, 0, 10]
        for _ in range(30):
            send_bad_http(helper_set.helpers[0].endpoint)
    for party in range(3):
        lines = trio.log_path(party).read_text().splitlines()
        assert len(lines) < 60, lines[:100]

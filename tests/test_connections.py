"""Strangers' connections: few enough, the longest idle goes first, peers stay; lines in the log are few."""

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
from protocol.listening import listener as listening
from protocol.listening.connections import MOST_STRANGERS, PEER_RESERVE, Connection, ConnectionLimits, Connections
from protocol.listening.listener import Listener
from protocol.listening.seldom import SECONDS, Seldom
from protocol.querier.ask import Querier
from protocol.querier.saved_query import QueryOptions, make_query
from tests.support.three_helpers import SITE, real_now, seal_all, terms, write_batch

HOST = "127.0.0.1"


class Line:
    """A connection that remembers whether it was cut."""

    def __init__(self, connections: Connections) -> None:
        self.was_cut = False
        self.connection = Connection(self._cut)
        self.taken = connections.take(self.connection)
        self.connections = connections

    def _cut(self) -> None:
        self.was_cut = True

    def established(self, *, peer: bool = False) -> Line:
        self.connections.established(self.connection, self, peer=peer)
        return self


def test_the_longest_idle_goes_first_and_the_busy_stay() -> None:
    connections = Connections(ConnectionLimits(3))
    first, second, third = (Line(connections).established() for _ in range(3))
    with connections.at_work(first):
        assert Line(connections).taken
        assert (first.was_cut, second.was_cut, third.was_cut) == (False, True, False)
    # The first has become idle last of all.
    Line(connections)
    assert (first.was_cut, third.was_cut, connections.strangers) == (False, True, 3)


def test_a_request_makes_its_connection_young_again() -> None:
    connections = Connections(ConnectionLimits(2))
    first, second = (Line(connections).established() for _ in range(2))
    with connections.at_work(first), connections.at_work(first):
        pass
    Line(connections)
    assert (first.was_cut, second.was_cut) == (False, True)


def test_when_all_are_busy_nobody_else_is_taken() -> None:
    connections = Connections(ConnectionLimits(1))
    busy = Line(connections).established()
    with connections.at_work(busy):
        assert not Line(connections).taken
        assert not connections.make_room()
    assert Line(connections).taken
    assert busy.was_cut


def test_peers_neither_go_nor_take_a_stranger_s_place() -> None:
    connections = Connections(ConnectionLimits(2))
    peers = [Line(connections).established(peer=True) for _ in range(10)]
    strangers = [Line(connections) for _ in range(5)]
    assert not any(peer.was_cut for peer in peers)
    assert [stranger.was_cut for stranger in strangers] == [True, True, True, False, False]
    with connections.at_work(peers[0]):
        assert (len(connections), connections.strangers, connections.cut_off) == (12, 2, 3)


def test_an_ended_connection_leaves_nothing_behind() -> None:
    connections = Connections(ConnectionLimits(2))
    idle, busy, peer = Line(connections), Line(connections).established(), Line(connections).established(peer=True)
    with connections.at_work(busy):
        for line in (idle, busy, peer):
            connections.ended(line.connection, line)
    assert len(connections) == 0
    assert not connections.make_room()


def test_strangers_get_at_most_half_of_the_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    for soft in (256, 1024, 4096, 2**20):
        monkeypatch.setattr(resource, "getrlimit", lambda _, soft=soft: (soft, soft))
        strangers = ConnectionLimits.of_this_process().strangers
        assert 8 <= strangers <= MOST_STRANGERS
        assert strangers + PEER_RESERVE <= soft // 2


def test_repeated_lines_are_written_once_a_minute() -> None:
    now = 0.0
    written: list[str] = []
    log, handler = logging.getLogger("test of seldom"), logging.Handler()
    handler.emit = lambda record: written.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    log.propagate = False
    log.addFilter(Seldom(lambda: now))
    for number in range(1000):
        log.warning("failed: %d", number)
    log.warning("another kind")
    now = SECONDS
    log.warning("failed: %d", 1000)
    log.warning("failed: %d", 1001)
    assert written == ["failed: 0", "another kind", "failed: 1000 (999 more like this since the last such line)"]


class Door:
    """A listener with room for four strangers, and two known certificates beside it."""

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
    async def open(self) -> AsyncIterator[Door]:
        context = tls.server_context(self.own, (self.peer.der,))
        context.verify_mode = ssl.CERT_OPTIONAL
        runner = web.ServerRunner(web.Server(self._answer))
        await runner.setup()
        assert runner.server is not None
        whose = lambda shown: 1 if tls.same_pin(shown, self.peer.pin) else None  # noqa: E731
        listener = Listener(runner.server, context, self.connections, whose)
        await listener.open(HOST, 0)
        self.port = listener._sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            await listener.close()
            await runner.cleanup()
            await listener.cut_the_rest()
            assert len(self.connections) == 0

    async def _answer(self, request: web.BaseRequest) -> web.Response:
        with self.connections.at_work(request.transport):
            if request.path == "/wait":
                await self.released.wait()
            return web.Response(text="hello")

    async def connect(self, *, peer: bool = False) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        context = tls.client_context(self.peer if peer else None, (self.own.der,))
        return await asyncio.open_connection(HOST, self.port, ssl=context)


async def ask(line: tuple[asyncio.StreamReader, asyncio.StreamWriter], path: str = "/") -> bytes:
    """What comes back on a connection: an answer, or nothing if it was cut."""
    reader, writer = line
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nHost: helper\r\n\r\n".encode())
        await writer.drain()
        return await reader.read(2**16)
    except OSError:
        return b""


async def settle(door: Door, count: int) -> None:
    async with asyncio.timeout(20):
        while door.connections.strangers != count:
            await asyncio.sleep(0.01)


@pytest.fixture
def door(tmp_path: Path) -> Door:
    return Door(tmp_path)


async def test_the_newest_strangers_are_served_the_oldest_are_gone(door: Door) -> None:
    async with door.open():
        lines = [await door.connect() for _ in range(10)]
        answers = [await ask(line) for line in lines]
        assert [answer.endswith(b"hello") for answer in answers] == [False] * 6 + [True] * 4
        for _, writer in lines:
            writer.transport.abort()


async def test_silent_connections_give_way_before_any_handshake(door: Door) -> None:
    """The cheapest way to use descriptors up: connect and say nothing."""
    async with door.open():
        silent = [socket.create_connection((HOST, door.port)) for _ in range(30)]
        await settle(door, 4)
        line = await door.connect()
        assert (await ask(line)).endswith(b"hello")
        assert door.connections.cut_off >= 26
        for each in silent:
            each.close()
        line[1].transport.abort()


async def test_what_was_cut_off_is_freed_at_once(door: Door) -> None:
    """Each has a buffer of 256 kB: thousands of them must not wait for the garbage collector, which comes seldom."""
    async with door.open():
        gc.collect()
        gc.disable()
        try:
            silent = []
            for _ in range(20):
                silent.append(socket.create_connection((HOST, door.port)))
                await asyncio.sleep(0.02)
            await settle(door, 4)
            await asyncio.sleep(0.1)
            kept = sum(isinstance(found, SSLProtocol) for found in gc.get_objects())
        finally:
            gc.enable()
        assert kept <= 6
        for each in silent:
            each.close()


async def test_a_peer_gets_through_a_crowd_and_stays(door: Door) -> None:
    async with door.open():
        silent = [socket.create_connection((HOST, door.port)) for _ in range(10)]
        peer = await door.connect(peer=True)
        silent += [socket.create_connection((HOST, door.port)) for _ in range(30)]
        await asyncio.sleep(0.1)
        assert (await ask(peer)).endswith(b"hello")
        for each in silent:
            each.close()
        peer[1].transport.abort()


async def test_a_request_at_work_is_never_cut(door: Door) -> None:
    async with door.open():
        busy = await door.connect()
        asking = asyncio.create_task(ask(busy, "/wait"))
        await asyncio.sleep(0.1)
        silent = [socket.create_connection((HOST, door.port)) for _ in range(30)]
        await settle(door, 4)
        door.released.set()
        assert (await asking).endswith(b"hello")
        for each in silent:
            each.close()
        busy[1].transport.abort()


async def test_a_handshake_has_a_deadline(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    assert listening.HANDSHAKE_SECONDS == 10
    monkeypatch.setattr(listening, "HANDSHAKE_SECONDS", 0.2)
    async with door.open():
        silent = socket.create_connection((HOST, door.port))
        await settle(door, 1)
        await settle(door, 0)
        silent.settimeout(5)
        assert silent.recv(1) == b""
        silent.close()


@contextlib.contextmanager
def crowd(endpoints: list[tuple[str, int]], each: int) -> Iterator[list[socket.socket]]:
    """Connections that say nothing, or begin a handshake with nonsense."""
    with contextlib.ExitStack() as stack:
        made = []
        for number in range(each * len(endpoints)):
            with contextlib.suppress(OSError):
                made.append(stack.enter_context(socket.create_connection(endpoints[number % len(endpoints)], 5)))
                if number % 3 == 0:
                    made[-1].sendall(b"\x16\x03\x01 nonsense")
        yield made


def speak_badly(endpoint: tuple[str, int]) -> None:
    """HTTP that no library can read."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    with socket.create_connection(endpoint, 5) as plain, context.wrap_socket(plain) as line:
        line.sendall(b"GET / HTTP/1.1\r\nContent-Length: many\r\n\r\n")
        assert b" 400 " in line.recv(1000)


def test_real_helpers_answer_while_strangers_use_every_descriptor(tmp_path: Path) -> None:
    """Each helper may have 200 descriptors; 400 silent strangers come to each."""
    trio = prepare(tmp_path / "trio", now=real_now(), sites={SITE: [SITE]}, options={"processes": 0})
    few = ("sh", "-c", 'ulimit -n 200; exec "$0" "$@"', sys.executable, "-m", "trefoil")
    with launched(trio, (*few, "helper", "--stop-with-stdin", "--config")):
        helper_set = trio.helper_set
        with crowd([helper.endpoint for helper in helper_set.helpers], 400) as strangers:
            assert len(strangers) == 1200
            batch = write_batch(tmp_path / "batch", seal_all([[0, 1, 0, 2]] * 5, terms(4, debug=True), helper_set))
            key = load_identity(trio.site_key_path(SITE))
            asked = make_query(batch, QueryOptions(seconds=60, debug=True), helper_set, key, real_now())
            result = asyncio.run(Querier(helper_set, patience=30).ask(asked, batch))
        assert result.answer.histogram == [0, 5, 0, 10]
        for _ in range(30):
            speak_badly(helper_set.helpers[0].endpoint)
    for party in range(3):
        lines = trio.log_path(party).read_text().splitlines()
        assert len(lines) < 60, lines[:100]

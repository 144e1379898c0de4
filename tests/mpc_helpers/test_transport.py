"""Pinned certificates and messages between helpers: who is let in, and what happens when a peer fails."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from mpc_helpers.identity import tls
from mpc_helpers.identity.config import Limits, load_config
from mpc_helpers.identity.membership import load_membership
from mpc_helpers.identity.tls import TlsIdentity
from mpc_helpers.service.transport import Certificates, PeerError, Transport
from mpc_helpers.service.workers import MAX_REMEMBERED, Rendezvous
from protocol.errors import ErrorKind, ProtocolError, TrefoilError
from protocol.helper_set import PIN_SIZE
from tests.support.raising import raises
from tests.support.three_helpers import ThreeHelpers, real_now, terms, three_helpers

NOW = 1_763_000_000


def identity(directory: Path, name: str) -> TlsIdentity:
    (directory / name).mkdir()
    return tls.make_identity(directory / name, name, NOW)


@contextlib.asynccontextmanager
async def server(context: ssl.SSLContext) -> AsyncIterator[int]:
    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello")
        writer.close()

    running = await asyncio.start_server(greet, "127.0.0.1", 0, ssl=context)
    try:
        yield running.sockets[0].getsockname()[1]
    finally:
        running.close()
        await running.wait_closed()


async def heard(port: int, context: ssl.SSLContext) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    try:
        return await asyncio.wait_for(reader.read(), 5)
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def heard_or_refused(port: int, context: ssl.SSLContext) -> bytes:
    """In TLS 1.3 a client learns that its certificate was refused only when it reads: as an alert, or as an end."""
    try:
        return await heard(port, context)
    except (ssl.SSLError, ConnectionError):
        return b""


def test_the_key_is_private_and_never_overwritten(tmp_path: Path) -> None:
    made = identity(tmp_path, "one")
    assert made.key.stat().st_mode & 0o777 == 0o600
    assert made.pin == tls.pin_of(made.der) and len(made.pin) == PIN_SIZE
    before = made.key.read_bytes()
    with raises(ErrorKind.FILE_EXISTS):
        tls.make_identity(tmp_path / "one", "one", NOW)
    assert made.key.read_bytes() == before


def test_a_key_others_can_read_is_refused(tmp_path: Path) -> None:
    made = identity(tmp_path, "one")
    made.key.chmod(0o644)
    with raises(ErrorKind.FILE_PERMISSIONS):
        tls.server_context(made)


def test_damaged_files_are_errors_for_a_person(tmp_path: Path) -> None:
    made = identity(tmp_path, "one")
    other = identity(tmp_path, "two")
    with raises(ErrorKind.WRONG_KEY):
        tls.server_context(TlsIdentity(made.certificate, other.key))
    made.certificate.write_text("nothing")
    with raises(ErrorKind.WRONG_FILE):
        _ = made.pin
    with raises(ErrorKind.INVALID_VALUE, ProtocolError):
        TlsIdentity(Path("tls.crt"), Path("tls.key"))
    with raises(ErrorKind.MALFORMED, ProtocolError):
        tls.client_context(None, (b"\x30\x00",))


def test_pins_compare_certificates(tmp_path: Path) -> None:
    one, two = identity(tmp_path, "one"), identity(tmp_path, "two")
    assert tls.same_pin(one.der, one.pin)
    assert not tls.same_pin(two.der, one.pin)
    assert not tls.same_pin(None, one.pin)


async def test_mutual_tls_wants_a_trusted_certificate_from_both(tmp_path: Path) -> None:
    host, friend, stranger = (identity(tmp_path, name) for name in ("host", "friend", "stranger"))
    async with server(tls.server_context(host, (friend.der,))) as port:
        assert await heard(port, tls.client_context(friend, (host.der,))) == b"hello"
        for who in (stranger, None):
            assert await heard_or_refused(port, tls.client_context(who, (host.der,))) == b""
        with pytest.raises(ssl.SSLCertVerificationError):
            await heard(port, tls.client_context(friend, (stranger.der,)))


async def test_old_versions_of_tls_are_refused(tmp_path: Path) -> None:
    host = identity(tmp_path, "host")
    context = tls.client_context(None, (host.der,))
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    async with server(tls.server_context(host)) as port:
        assert await heard_or_refused(port, context) == b""


async def test_a_certificate_is_fetched_by_its_pin(tmp_path: Path) -> None:
    host, other = identity(tmp_path, "host"), identity(tmp_path, "other")
    async with server(tls.server_context(host)) as port:
        assert await tls.fetch_certificate("127.0.0.1", port, host.pin, 5.0) == host.der
        with raises(ErrorKind.WRONG_KEY):
            await tls.fetch_certificate("127.0.0.1", port, other.pin, 5.0)
    with raises(ErrorKind.UNREACHABLE):
        await tls.fetch_certificate("127.0.0.1", port, host.pin, 5.0)


async def test_fetching_has_a_deadline(tmp_path: Path) -> None:
    kept: list[asyncio.StreamWriter] = []
    silent = await asyncio.start_server(lambda _reader, writer: kept.append(writer), "127.0.0.1", 0)
    port = silent.sockets[0].getsockname()[1]
    with raises(ErrorKind.TIMEOUT):
        await tls.fetch_certificate("127.0.0.1", port, bytes(32), 0.2)
    for writer in kept:
        writer.close()
        await writer.wait_closed()
    silent.close()
    await silent.wait_closed()


def certificates_of(three: ThreeHelpers, party: int, folder: Path) -> Certificates:
    config = load_config(three.trio.config_path(party))
    folder.mkdir(exist_ok=True)
    return Certificates(load_membership(config, real_now()), config.tls, folder)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
async def test_helpers_find_each_other_in_any_order_of_starting(tmp_path: Path, order: tuple[int, ...]) -> None:
    async with three_helpers(tmp_path, start=False) as three:
        for party in order:
            await three.start(party)
            await asyncio.sleep(0.3)
        batch = three.batch(three.seal([[1, 0]] * 3, terms(2)))
        assert (await three.ask(three.query(batch), batch)).answer.counted == 3
        for party in range(3):
            data = load_config(three.trio.config_path(party)).data
            assert len(list(data.glob("peer-*.der"))) == 2


async def test_a_certificate_is_kept_and_believed_only_under_its_pin(tmp_path: Path) -> None:
    async with three_helpers(tmp_path) as three:
        first = certificates_of(three, 0, tmp_path / "kept")
        await first.keep_fetching(1)
        stored = (tmp_path / "kept" / "peer-2.der").read_bytes()
        assert first.whose(stored) == 1
        assert first.whose(None) is None
        assert first.whose(stored[:-1]) is None
        # What was kept is enough when the peer is down; what was tampered with is fetched again.
        await three.stop(1)
        again = certificates_of(three, 0, tmp_path / "kept")
        await again.keep_fetching(1)
        assert await again.of(1) == stored
        shutil.copy(tmp_path / "kept" / "peer-2.der", tmp_path / "kept" / "peer-3.der")
        await again.keep_fetching(2)
        assert await again.of(2) != stored


async def test_whatever_goes_wrong_names_the_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with three_helpers(tmp_path) as three:
        batch = three.batch(three.seal([[1, 0]] * 3, terms(2)))
        await three.ask(three.query(batch), batch)  # by now they know each other's certificates
        certificates = certificates_of(three, 0, tmp_path / "kept")
        membership = load_membership(load_config(three.trio.config_path(0)), real_now())
        async with Transport(membership, certificates, Limits(peer_seconds=2)) as transport:
            with raises(ErrorKind.REFUSED, PeerError) as refused:
                await transport.send(1, "nowhere", b"")
            assert refused.value.party == 1
            monkeypatch.setattr(transport, "_longest_reply", 16)
            with raises(ErrorKind.TOO_LARGE, PeerError) as refused:
                await transport.send(1, "nowhere", b"")
            assert refused.value.party == 1
            await three.stop(1)
            with raises(ErrorKind.UNREACHABLE, PeerError) as refused:
                await transport.send(1, "real", b"")
            assert refused.value.party == 1


async def test_a_redirect_is_never_followed(tmp_path: Path) -> None:
    """A peer, or an attacker in its place, must not send this helper's messages elsewhere, let alone in the clear."""
    led_astray: list[str] = []

    async def elsewhere(request: web.Request) -> web.Response:
        led_astray.append(request.method)
        return web.Response(body=b"answer")

    async with three_helpers(tmp_path, start=False) as three, TestServer(catching(elsewhere)) as trap:

        async def redirect(_: web.Request) -> web.Response:
            raise web.HTTPTemporaryRedirect(f"http://127.0.0.1:{trap.port}/")

        config = load_config(three.trio.config_path(1))
        server_of_peer = TestServer(catching(redirect), host=config.host, port=config.port)
        await server_of_peer.start_server(ssl=tls.server_context(config.tls))
        membership = load_membership(load_config(three.trio.config_path(0)), real_now())
        transport = Transport(membership, certificates_of(three, 0, tmp_path / "kept"), Limits(peer_seconds=5))
        try:
            async with transport:
                with raises(ErrorKind.REFUSED, PeerError):
                    await transport.send(1, "agreement", b"message")
        finally:
            await server_of_peer.close()
    assert led_astray == []


def catching(handler: Callable[[web.Request], Awaitable[web.Response]]) -> web.Application:
    """Every request ends here."""
    app = web.Application()
    app.router.add_route("*", "/{rest:.*}", handler)
    return app


async def test_a_peer_that_was_never_there_is_a_timeout(tmp_path: Path) -> None:
    async with three_helpers(tmp_path, start=False) as three:
        certificates = certificates_of(three, 0, tmp_path / "kept")
        membership = load_membership(load_config(three.trio.config_path(0)), real_now())
        async with Transport(membership, certificates, Limits(peer_seconds=1)) as transport:
            with raises(ErrorKind.TIMEOUT, PeerError) as refused:
                await transport.send(2, "real", b"")
            assert refused.value.party == 2


async def test_workers_meet_through_losses_and_in_any_order() -> None:
    """Three daemons; every first message is lost."""
    lost: set[tuple[int, int]] = set()
    meetings: dict[int, Rendezvous] = {}

    def sender(party: int) -> Rendezvous:
        async def send(peer: int, message: bytes) -> bytes:
            if (party, peer) not in lost:
                lost.add((party, peer))
                raise TrefoilError("lost")
            await meetings[peer].receive(party, message)
            return b""

        return Rendezvous([peer for peer in range(3) if peer != party], send)

    meetings.update({party: sender(party) for party in range(3)})
    exchanged = await asyncio.gather(*(meetings[party].meet(bytes(32), 1000 + party) for party in range(3)))
    assert [dict(ports) for ports in exchanged] == [{1: 1001, 2: 1002}, {0: 1000, 2: 1002}, {0: 1000, 1: 1001}]


async def test_what_a_peer_announces_is_bounded_and_checked() -> None:
    async def send(peer: int, message: bytes) -> bytes:
        return b""

    meetings = Rendezvous([1, 2], send)
    for number in range(MAX_REMEMBERED + 1):
        await meetings.receive(1, number.to_bytes(32, "big") + b"\x10\x00")
    assert meetings.missing((0).to_bytes(32, "big")) == [1, 2]
    assert meetings.missing((1).to_bytes(32, "big")) == [2]
    for nonsense in (b"", bytes(33), bytes(35)):
        with pytest.raises(ProtocolError):
            await meetings.receive(1, nonsense)

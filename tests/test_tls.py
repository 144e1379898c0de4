"""Certificates and pins: who is let in, and who is not."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from mpc_helpers.identity import tls
from mpc_helpers.identity.tls import TlsIdentity
from protocol.errors import ProtocolError, TrefoilError
from protocol.helper_set import PIN_SIZE

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
    with pytest.raises(TrefoilError, match="exists already"):
        tls.make_identity(tmp_path / "one", "one", NOW)
    assert made.key.read_bytes() == before


def test_a_key_others_can_read_is_refused(tmp_path: Path) -> None:
    made = identity(tmp_path, "one")
    made.key.chmod(0o644)
    with pytest.raises(TrefoilError, match="can be read by others"):
        tls.server_context(made)


def test_damaged_files_are_errors_for_a_person(tmp_path: Path) -> None:
    made = identity(tmp_path, "one")
    other = identity(tmp_path, "two")
    with pytest.raises(TrefoilError, match="cannot use"):
        tls.server_context(TlsIdentity(made.certificate, other.key))
    made.certificate.write_text("nothing")
    with pytest.raises(TrefoilError, match="holds no certificate"):
        _ = made.pin
    with pytest.raises(ProtocolError, match="absolute"):
        TlsIdentity(Path("tls.crt"), Path("tls.key"))
    with pytest.raises(ProtocolError, match="cannot be read"):
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
        with pytest.raises(TrefoilError, match="other than the pinned one"):
            await tls.fetch_certificate("127.0.0.1", port, other.pin, 5.0)
    with pytest.raises(TrefoilError, match="cannot connect"):
        await tls.fetch_certificate("127.0.0.1", port, host.pin, 5.0)


async def test_fetching_has_a_deadline(tmp_path: Path) -> None:
    kept: list[asyncio.StreamWriter] = []
    silent = await asyncio.start_server(lambda _reader, writer: kept.append(writer), "127.0.0.1", 0)
    port = silent.sockets[0].getsockname()[1]
    with pytest.raises(TrefoilError, match="did not answer within"):
        await tls.fetch_certificate("127.0.0.1", port, bytes(32), 0.2)
    for writer in kept:
        writer.close()
        await writer.wait_closed()
    silent.close()
    await silent.wait_closed()

"""The way between daemons: peers found by their pins, in any order of starting, and nobody else."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from mpc_helpers.identity import tls
from mpc_helpers.identity.config import load_config
from mpc_helpers.identity.membership import load_membership
from mpc_helpers.service.rendezvous import MAX_REMEMBERED, Rendezvous
from mpc_helpers.service.transport import Certificates, PeerError, Transport
from protocol.errors import ProtocolError, TrefoilError
from tests.support.three_helpers import ThreeHelpers, real_now, terms, three_helpers


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


async def test_whatever_goes_wrong_names_the_peer(tmp_path: Path) -> None:
    async with three_helpers(tmp_path) as three:
        batch = three.batch(three.seal([[1, 0]] * 3, terms(2)))
        await three.ask(three.query(batch), batch)  # by now they know each other's certificates
        certificates = certificates_of(three, 0, tmp_path / "kept")
        membership = load_membership(load_config(three.trio.config_path(0)), real_now())
        async with Transport(membership, certificates, 2.0, 4096) as transport:
            with pytest.raises(PeerError, match="helper-2 refused a message") as refused:
                await transport.send(1, "nowhere", b"")
            assert refused.value.party == 1
            async with Transport(membership, certificates, 2.0, 16) as short:
                with pytest.raises(PeerError, match="helper-2 sent a body over the limit of 16 bytes"):
                    await short.send(1, "nowhere", b"")
            await three.stop(1)
            with pytest.raises(PeerError, match="helper-2 cannot be reached"):
                await transport.send(1, "real", b"")


async def test_a_redirect_is_never_followed(tmp_path: Path) -> None:
    """A peer, or whoever took its place, must not send this helper's messages elsewhere, let alone in the clear."""
    led_astray: list[str] = []

    async def elsewhere(request: web.Request) -> web.Response:
        led_astray.append(request.method)
        return web.Response(body=b"answer")

    async with three_helpers(tmp_path, start=False) as three, TestServer(catching(elsewhere)) as trap:

        async def redirect(_: web.Request) -> web.Response:
            raise web.HTTPTemporaryRedirect(f"http://127.0.0.1:{trap.port}/")

        config = load_config(three.trio.config_path(1))
        door = TestServer(catching(redirect), host=config.host, port=config.port)
        await door.start_server(ssl=tls.server_context(config.tls))
        membership = load_membership(load_config(three.trio.config_path(0)), real_now())
        transport = Transport(membership, certificates_of(three, 0, tmp_path / "kept"), 5.0, 4096)
        try:
            async with transport:
                with pytest.raises(PeerError, match="refused a message"):
                    await transport.send(1, "agreement", b"message")
        finally:
            await door.close()
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
        async with Transport(membership, certificates, 0.3, 4096) as transport:
            with pytest.raises(PeerError, match=r"helper-3 did not answer within 0\.3 s"):
                await transport.send(2, "real", b"")


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
    found = await asyncio.gather(*(meetings[party].meet(bytes(32), 1000 + party) for party in range(3)))
    assert [dict(ports) for ports in found] == [{1: 1001, 2: 1002}, {0: 1000, 2: 1002}, {0: 1000, 1: 1001}]


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

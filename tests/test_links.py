"""Links over real TCP and TLS, three parties in one process: certificates are tied to parties."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence

import pytest

from mpc_helpers.identity.tls import TlsIdentity, client_context, make_identity
from mpc_helpers.mpc.channel import Channel, _hello
from mpc_helpers.mpc.links import MAX_HANDSHAKES, listen
from mpc_helpers.mpc.runtime import Engine, run_party
from mpc_helpers.mpc.session import MpcError, MpcSession, Peer, Stage
from protocol.errors import TrefoilError


@pytest.fixture(scope="module")
def identities(tmp_path_factory: pytest.TempPathFactory) -> list[TlsIdentity]:
    """Those of the three helpers, and a stranger's."""
    return [make_identity(tmp_path_factory.mktemp(f"id{n}"), f"n{n}", 1_763_000_000) for n in range(4)]


def listeners() -> list[socket.socket]:
    return [listen("127.0.0.1") for _ in range(3)]


def addresses(identities: Sequence[TlsIdentity], sockets: Sequence[socket.socket]) -> list[Peer]:
    return [Peer("127.0.0.1", sockets[i].getsockname()[1], identities[i].der) for i in range(3)]


def session(party: int, seconds: float = 1.0) -> MpcSession:
    return MpcSession(party, bytes(32), b"", 3, seconds)


async def say_hello(engine: Engine) -> list[bytes]:
    return await engine.exchange(bytes([engine.party]))


async def run_with(
    identities: Sequence[TlsIdentity], shown: Sequence[TlsIdentity], seconds: float = 1.0
) -> list[list[bytes] | BaseException]:
    """All three parties, each showing the certificate `shown` while the helper set says `identities`."""
    sockets = listeners()
    peers = addresses(identities, sockets)
    runs = (run_party(session(i, seconds), peers, shown[i], sockets[i], say_hello) for i in range(3))
    return await asyncio.gather(*runs, return_exceptions=True)


async def test_three_parties_meet(identities: list[TlsIdentity]) -> None:
    assert await run_with(identities, identities, 10.0) == [[b"\0", b"\1", b"\2"]] * 3


@pytest.mark.parametrize("liar", [0, 1, 2])
async def test_a_strangers_certificate_is_refused(identities: list[TlsIdentity], liar: int) -> None:
    shown = identities[:3]
    shown[liar] = identities[3]
    outcomes = await run_with(identities, shown)
    for party in range(3):
        error = outcomes[party]
        assert isinstance(error, MpcError), error
        assert party == liar or error.party == liar or error.stage is Stage.HELLO
    assert any(isinstance(error, MpcError) and error.party == liar for error in outcomes)


@pytest.mark.parametrize(("liar", "victim"), [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)])
async def test_no_party_can_pose_as_another(identities: list[TlsIdentity], liar: int, victim: int) -> None:
    """Helper `liar` plays the part of `victim` with its own, perfectly trusted certificate. Nobody computes."""
    shown = identities[:3]
    shown[victim] = identities[liar]
    outcomes = await run_with(identities, shown)
    assert all(isinstance(outcome, MpcError) for outcome in outcomes), outcomes
    honest = next(party for party in range(3) if party not in (liar, victim))
    error = outcomes[honest]
    assert isinstance(error, MpcError)
    assert error.stage in (Stage.CONNECT, Stage.HELLO)


async def test_a_certified_party_that_claims_another_number_is_named(identities: list[TlsIdentity]) -> None:
    """Helper 1 connects to helper 3 with its own certificate, but greets as helper 2."""
    sockets = listeners()
    peers = addresses(identities, sockets)
    victim = asyncio.create_task(run_party(session(2, 5.0), peers, identities[2], sockets[2], say_hello))
    honest = asyncio.create_task(run_party(session(1, 5.0), peers, identities[1], sockets[1], say_hello))
    context = client_context(identities[0], (identities[2].der,))
    _, writer = await asyncio.open_connection("127.0.0.1", peers[2].port, ssl=context)
    writer.write(forged_hello(sender=1, receiver=2))
    with pytest.raises(MpcError) as caught:
        await victim
    assert (caught.value.stage, caught.value.party) == (Stage.HELLO, 0)
    assert "helper 1 poses as party 1" in str(caught.value)
    honest.cancel()
    await asyncio.gather(honest, return_exceptions=True)
    writer.close()
    await asyncio.gather(writer.wait_closed(), return_exceptions=True)
    sockets[0].close()


async def test_a_trusted_certificate_of_the_wrong_party_is_not_taken_for_the_awaited_one(
    identities: list[TlsIdentity],
) -> None:
    """Helper 3 dials helper 2, which awaits helper 1, and greets as helper 1: trusted, but not him."""
    sockets = listeners()
    peers = addresses(identities, sockets)
    victim = asyncio.create_task(run_party(session(1, 1.5), peers, identities[1], sockets[1], say_hello))
    context = client_context(identities[2], (identities[1].der,))
    _, writer = await asyncio.open_connection("127.0.0.1", peers[1].port, ssl=context)
    writer.write(forged_hello(sender=0, receiver=1))
    with pytest.raises(MpcError, match="helper 1 and helper 3 did not answer") as caught:
        await victim
    assert "not a certificate we are waiting for" in str(caught.value)
    writer.close()
    await asyncio.gather(writer.wait_closed(), return_exceptions=True)
    sockets[0].close()
    sockets[2].close()


def forged_hello(sender: int, receiver: int) -> bytes:
    """The greeting of one party to another, as that party would send it."""
    body = _hello(session(sender), receiver)
    return len(body).to_bytes(4, "big") + body


async def test_strangers_at_the_door_do_not_stop_the_session(identities: list[TlsIdentity]) -> None:
    """Plain TCP connections, silent or noisy, more than are let in at a time: the three parties still meet."""
    sockets = listeners()
    peers = addresses(identities, sockets)
    strangers = [await asyncio.open_connection("127.0.0.1", peers[2].port) for _ in range(MAX_HANDSHAKES + 5)]
    strangers[0][1].write(b"GET / HTTP/1.1\r\n\r\n")
    runs = [run_party(session(i, 10.0), peers, identities[i], sockets[i], say_hello) for i in range(3)]
    assert await asyncio.gather(*runs) == [[b"\0", b"\1", b"\2"]] * 3
    for _, writer in strangers:
        writer.close()
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)


async def test_a_late_party_is_waited_for(identities: list[TlsIdentity]) -> None:
    sockets = listeners()
    peers = addresses(identities, sockets)
    first = [
        asyncio.create_task(run_party(session(i, 10.0), peers, identities[i], sockets[i], say_hello)) for i in (0, 1)
    ]
    await asyncio.sleep(0.3)
    last = await run_party(session(2, 10.0), peers, identities[2], sockets[2], say_hello)
    assert [*await asyncio.gather(*first), last] == [[b"\0", b"\1", b"\2"]] * 3


async def test_the_deadline_says_whom_it_waited_for_and_what_was_refused(identities: list[TlsIdentity]) -> None:
    sockets = listeners()
    peers = addresses(identities, sockets)
    sockets[0].close()
    run = asyncio.create_task(run_party(session(2, 0.8), peers, identities[2], sockets[2], say_hello))
    _, stranger = await asyncio.open_connection("127.0.0.1", peers[2].port)
    stranger.write(b"not TLS at all, by any measure\r\n")
    with pytest.raises(MpcError) as caught:
        await run
    assert "helper 1 and helper 2 did not answer within 0.8 s while connecting (refused a connection" in str(
        caught.value
    )
    stranger.close()
    await asyncio.gather(stranger.wait_closed(), return_exceptions=True)
    sockets[1].close()


def test_a_port_is_found_in_a_range() -> None:
    first = listen("127.0.0.1")
    taken = first.getsockname()[1]
    second = listen("127.0.0.1", (taken, 0))
    assert second.getsockname()[1] not in (0, taken)
    with pytest.raises(TrefoilError, match="cannot listen"):
        listen("127.0.0.1", (taken,))
    first.close()
    second.close()


async def test_an_oversized_frame_is_refused_before_it_is_read() -> None:
    reader = asyncio.StreamReader()
    reader.feed_data(b"\xff\xff\xff\xff")
    with pytest.raises(TrefoilError, match="over the limit"):
        await Channel(0, reader, _Nowhere()).receive()


class _Nowhere:
    def write(self, data: bytes) -> None:
        raise AssertionError("nothing is written")

    def close(self) -> None:
        raise AssertionError("nothing is closed")

    async def wait_closed(self) -> None:
        raise AssertionError("nothing is closed")

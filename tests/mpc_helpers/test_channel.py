"""The channel between MPC parties: codec, ordered messages of announced size, and TLS links tied to certificates."""

from __future__ import annotations

import asyncio
import os
import pickle
import socket
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpc_helpers.identity.tls import TlsIdentity, client_context, make_identity
from mpc_helpers.mpc import channel
from mpc_helpers.mpc.channel import Channel, OrderedInbox, _hello
from mpc_helpers.mpc.links import MAX_HANDSHAKES, listen
from mpc_helpers.mpc.runtime import Engine, run_party
from mpc_helpers.mpc.session import MpcError, MpcSession, Peer, Stage
from protocol.errors import ErrorKind, ProtocolError
from protocol.field import P
from tests.support.raising import raises

elements = st.integers(0, P - 1)


def objects(values: list[int]) -> np.ndarray[tuple[int], np.dtype[np.object_]]:
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array


@given(st.lists(elements, max_size=40))
def test_vectors_come_back_as_python_integers(values: list[int]) -> None:
    back = channel.loads(channel.dumps(objects(values)))
    assert back.dtype == object and back.tolist() == values
    assert all(type(value) is int for value in back)


@given(st.binary(max_size=channel.MAX_BYTES))
def test_bytes_come_back(value: bytes) -> None:
    assert channel.loads(channel.dumps(value)) == value


@pytest.mark.parametrize(
    ("kind", "values"),
    {
        ErrorKind.TOO_LARGE: [bytes(channel.MAX_BYTES + 1)],
        ErrorKind.WRONG_TYPE: [
            *(5, "text", None, [1, 2], {"a": 1}, 1.5, bytearray(b"mutable")),
            np.array([1, 2], dtype=np.int64),
            np.array([[1, 2]], dtype=object),
        ],
        ErrorKind.OUT_OF_RANGE: [
            *(objects([P]), objects([-1]), objects([True])),
            objects([1.0]),  # type: ignore[list-item] # a float must be refused, not rounded
            objects([np.int64(3)]),  # type: ignore[list-item] # numpy's integers wrap
        ],
    }.items(),
)
def test_nothing_else_is_sent(kind: ErrorKind, values: list[object]) -> None:
    for value in values:
        with raises(kind, ProtocolError):
            channel.dumps(value)


class Bomb:
    """Unpickling this would create a directory: what a malicious helper does to stock MPyC."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_is_refused_and_not_run(tmp_path_factory: pytest.TempPathFactory, protocol: int) -> None:
    target = tmp_path_factory.getbasetemp() / f"bomb-{protocol}"
    payload = pickle.dumps(Bomb(str(target)), protocol)
    with pytest.raises(ProtocolError):
        channel.loads(payload)
    assert not target.exists()


def test_the_bomb_is_live(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Control of the test above."""
    target = tmp_path_factory.getbasetemp() / "bomb-live"
    pickle.loads(pickle.dumps(Bomb(str(target))))  # noqa: S301 - our own bytes, to show what they do
    assert target.is_dir()


@given(st.binary(max_size=200))
def test_any_bytes_are_decoded_to_their_only_encoding_or_refused(data: bytes) -> None:
    try:
        value = channel.loads(data)
    except ProtocolError:
        return
    assert channel.dumps(value) == data


@given(st.lists(elements, min_size=1, max_size=10), st.data())
def test_a_damaged_vector_is_another_vector_or_an_error(values: list[int], data: st.DataObject) -> None:
    encoded = bytearray(channel.dumps(objects(values)))
    at = data.draw(st.integers(0, len(encoded) - 1))
    encoded[at] ^= data.draw(st.integers(1, 255))
    try:
        value = channel.loads(bytes(encoded))
    except ProtocolError:
        return
    assert channel.dumps(value) == bytes(encoded)


def test_p_itself_is_not_an_element() -> None:
    """MPyC takes what it unpickles without a check; an unreduced element would be one value with two encodings."""
    encoded = bytearray(channel.dumps(objects([P - 1])))
    assert channel.loads(bytes(encoded)).tolist() == [P - 1]
    encoded[-8:] = P.to_bytes(8, "little")
    with pytest.raises(ProtocolError):
        channel.loads(bytes(encoded))


def test_only_vectors_of_the_session_are_accepted() -> None:
    channel.check_payload(channel.dumps(objects([1, 2, 3])), 3)
    channel.check_payload(channel.dumps(b"nonce"), 3)
    with raises(ErrorKind.INCONSISTENT, ProtocolError):
        channel.check_payload(channel.dumps(objects([1, 2, 3])), 4)


def inbox() -> OrderedInbox:
    return OrderedInbox({0: 2, 3: 4})


def state(box: OrderedInbox) -> tuple[int, bool, bool, bool]:
    return box.next_size, box.awaited, box.complete, box.all_taken


@pytest.mark.parametrize("message", [b"", b"\0", b"\0a", b"\0abc", b"\3abcd", b"\1ab", b"\xffab"])
def test_anything_but_the_next_step_in_its_size_is_refused(message: bytes) -> None:
    with raises(ErrorKind.INCONSISTENT, ProtocolError):
        inbox().deliver(message)


async def test_steps_arrive_in_order_and_are_taken_once() -> None:
    box = inbox()
    assert state(box) == (3, False, False, False)
    box.deliver(b"\0ab")
    with raises(ErrorKind.INCONSISTENT, ProtocolError):
        box.deliver(b"\0ab")
    waiting = asyncio.create_task(box.take(3))
    await asyncio.sleep(0)
    assert state(box) == (5, True, False, False)
    box.deliver(b"\3wxyz")
    assert await waiting == b"wxyz" and state(box) == (0, False, True, False)
    assert await box.take(0) == b"ab" and state(box) == (0, False, True, True)
    for step in (0, 3, 7):
        with raises(ErrorKind.DUPLICATE, ProtocolError):
            await box.take(step)
    with raises(ErrorKind.TRAILING_BYTES, ProtocolError):
        box.deliver(b"\4")


async def test_a_message_for_a_program_that_was_stopped_does_no_harm() -> None:
    box = inbox()
    waiting = asyncio.create_task(box.take(0))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    box.deliver(b"\0ab")
    assert not box.awaited


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
    identities: Sequence[TlsIdentity], presented: Sequence[TlsIdentity], seconds: float = 1.0
) -> list[list[bytes] | BaseException]:
    """All three parties, each presenting a certificate of `presented` while the helper set says `identities`."""
    sockets = listeners()
    peers = addresses(identities, sockets)
    runs = (run_party(session(i, seconds), peers, presented[i], sockets[i], say_hello) for i in range(3))
    return await asyncio.gather(*runs, return_exceptions=True)


async def test_three_parties_meet(identities: list[TlsIdentity]) -> None:
    assert await run_with(identities, identities, 10.0) == [[b"\0", b"\1", b"\2"]] * 3


@pytest.mark.parametrize("malicious", [0, 1, 2])
async def test_a_strangers_certificate_is_refused(identities: list[TlsIdentity], malicious: int) -> None:
    presented = identities[:3]
    presented[malicious] = identities[3]
    outcomes = await run_with(identities, presented)
    for party in range(3):
        error = outcomes[party]
        assert isinstance(error, MpcError), error
        # Never the other honest one alone. Both are named if that one has ended first, which is a race.
        assert party == malicious or error.party in (malicious, None) or error.stage is Stage.HELLO
    assert any(isinstance(error, MpcError) and error.party == malicious for error in outcomes)


@pytest.mark.parametrize(("malicious", "victim"), [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)])
async def test_no_party_can_pose_as_another(identities: list[TlsIdentity], malicious: int, victim: int) -> None:
    """Helper `malicious` plays the part of `victim` with its own, perfectly trusted certificate. Nobody computes."""
    presented = identities[:3]
    presented[victim] = identities[malicious]
    outcomes = await run_with(identities, presented)
    assert all(isinstance(outcome, MpcError) for outcome in outcomes), outcomes
    honest = next(party for party in range(3) if party not in (malicious, victim))
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
    assert "party 1" in str(caught.value)
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
    with raises(ErrorKind.TIMEOUT, MpcError) as caught:
        await victim
    assert "helper 1 and helper 3" in str(caught.value) and "not a certificate" in str(caught.value)
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
    with raises(ErrorKind.TIMEOUT, MpcError) as caught:
        await run
    assert caught.value.stage is Stage.CONNECT and "helper 1 and helper 2" in str(caught.value)
    assert "0.8 s" in str(caught.value) and "refused a connection" in str(caught.value)
    stranger.close()
    await asyncio.gather(stranger.wait_closed(), return_exceptions=True)
    sockets[1].close()


def test_a_taken_port_is_an_error() -> None:
    with listen("127.0.0.1") as first, raises(ErrorKind.UNAVAILABLE):
        listen("127.0.0.1", first.getsockname()[1])


async def test_an_oversized_frame_is_refused_before_it_is_read() -> None:
    reader = asyncio.StreamReader()
    reader.feed_data(b"\xff\xff\xff\xff")
    with raises(ErrorKind.TOO_LARGE):
        await Channel(0, reader, _Nowhere()).receive()


class _Nowhere:
    def write(self, data: bytes) -> None:
        raise AssertionError("nothing is written")

    def close(self) -> None:
        raise AssertionError("nothing is closed")

    async def wait_closed(self) -> None:
        raise AssertionError("nothing is closed")

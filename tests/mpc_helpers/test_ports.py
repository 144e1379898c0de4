"""The ports of the MPC: free again at once, held while idle, and known to be blocked before a query has to find out."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mpc_helpers.identity.config import ConfigError, load_config
from mpc_helpers.identity.keygen import MPC_PORTS, make_helper, mpc_ports
from mpc_helpers.identity.membership import load_membership
from mpc_helpers.identity.tls import make_identity
from mpc_helpers.local.launcher import prepare
from mpc_helpers.mpc import links
from mpc_helpers.mpc.links import Links, listen
from mpc_helpers.mpc.session import MpcError, MpcSession, Peer, Progress, Stage
from mpc_helpers.service import workers as workers_module
from mpc_helpers.service.daemon import serving
from mpc_helpers.service.health import Concern
from mpc_helpers.service.workers import (
    MAX_PROBED,
    MpcPorts,
    PortProbes,
    Rendezvous,
    WorkerSession,
    announced_ports,
    probe,
    ranges,
)
from protocol.cli.app import Exit, _exit_of
from protocol.errors import ErrorKind
from protocol.querier.failure import QueryFailed
from protocol.querier.saved_query import QueryOptions
from protocol.wire import Writer
from tests.mpc_helpers.test_monitoring import until_page
from tests.mpc_helpers.test_server import small_batch
from tests.support.raising import raises
from tests.support.three_helpers import ThreeHelpers, real_now, three_helpers

HOST = "127.0.0.1"
NOW = 1_800_000_000


def free_port() -> int:
    with socket.socket() as held:
        held.bind((HOST, 0))
        return int(held.getsockname()[1])


@contextlib.contextmanager
def black_hole() -> Iterator[int]:
    """A port whose SYNs are dropped, as behind a firewall: its queue of connections is full."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind((HOST, 0))
        listener.listen(0)
        for _ in range(4):
            filling = stack.enter_context(socket.socket())
            filling.setblocking(False)
            filling.connect_ex(listener.getsockname())
        yield listener.getsockname()[1]


def test_a_fixed_port_serves_one_session_after_another() -> None:
    """The end that closes first keeps its side of the connection for a minute; the port is needed before."""
    port = free_port()
    for _ in range(3):
        with listen(HOST, port) as listener, socket.create_connection((HOST, port)) as client:
            listener.setblocking(True)
            listener.accept()[0].close()
            assert client.recv(1) == b""


def test_a_host_name_of_either_family_is_listened_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker's host is that of its helper, which may have an address of IPv6 alone."""
    addresses = {"both.example": ("::1", HOST), "six.example": ("::1",)}
    resolve = socket.getaddrinfo

    def look_up(host: str, *rest: Any, **options: Any) -> list[Any]:
        return [entry for each in addresses[host] for entry in resolve(each, *rest, **options)]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    for host, family in (("both.example", socket.AF_INET), ("six.example", socket.AF_INET6)):
        with listen(host) as listener:
            assert listener.family == family and listener.getsockname()[0] in addresses[host]


@pytest.mark.parametrize("host", ["nowhere.invalid", "a" * 300, "192.0.2.1"])
async def test_a_host_that_cannot_be_listened_on_is_not_another_programs_fault(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers_module, "PORT_RETRY_SECONDS", 0.01)
    with raises(ErrorKind.UNAVAILABLE):
        listen(host, 1234)
    async with MpcPorts(host, (1234, 1235)) as ports:
        await asyncio.sleep(0.05)
        (reason,) = ports.reasons()
        assert "1234-1235" in reason.text and host in reason.text and "program" not in reason.text


@pytest.mark.parametrize(("host", "port"), [("nowhere.invalid", 4321), ("a" * 300, 4321), (HOST, 1)])
async def test_a_helper_that_cannot_listen_names_what_to_correct(tmp_path: Path, host: str, port: int) -> None:
    config = load_config(prepare(tmp_path / "trio", now=real_now()).config_path(0))
    with contextlib.ExitStack() as stack:
        if host == HOST:
            port = stack.enter_context(listen(HOST)).getsockname()[1]
        with raises(ErrorKind.UNAVAILABLE, ConfigError) as caught:
            async with serving(replace(config, host=host, port=port, processes=0)):
                pass
    assert host in str(caught.value) and str(port) in str(caught.value)
    assert ("another program" in str(caught.value)) == (host == HOST) == ("config.json" not in caught.value.hint)


def test_a_new_helper_has_ports_that_a_firewall_can_open(tmp_path: Path) -> None:
    make_helper(tmp_path / "north", "north", "https://north.example:8443", NOW)
    stored = json.loads((tmp_path / "north" / "config.json").read_text())
    assert stored["mpc_ports"] == list(range(8444, 8444 + MPC_PORTS))
    for port in (1, 65_530, 65_535):
        assert port not in mpc_ports(port) and all(0 < each < 65_536 for each in mpc_ports(port))


async def test_an_idle_port_answers_and_is_lent_to_one_worker_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers_module, "LEND_SECONDS", 0.05)
    port = free_port()
    async with MpcPorts(HOST, (port,)) as ports:
        await asyncio.sleep(0)
        assert await probe(HOST, port) == ""
        async with ports.lent() as lent:
            assert lent == port
            listen(HOST, port).close()
            with raises(ErrorKind.UNAVAILABLE, MpcError) as error:
                async with ports.lent():
                    pass
            assert "mpc_ports" in error.value.hint
        await asyncio.sleep(0)
        assert await probe(HOST, port) == ""
    assert await probe(HOST, port)
    async with MpcPorts(HOST, (0,)) as chosen, chosen.lent() as first, chosen.lent() as second:
        assert (first, second, chosen.fixed) == (0, 0, ())


async def test_a_port_that_another_program_has_is_a_reason_until_it_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers_module, "PORT_RETRY_SECONDS", 0.01)
    port = free_port()
    with listen(HOST, port):
        async with MpcPorts(HOST, (port,)) as ports:
            await asyncio.sleep(0)
            assert [(reason.concern, reason.stops) for reason in ports.reasons()] == [(Concern.PORT, False)]
            assert f"port {port}" in ports.reasons()[0].text and "in use" in ports.reasons()[0].text
    async with MpcPorts(HOST, (port,)) as ports:
        await asyncio.sleep(0)
        assert ports.reasons() == []


def test_what_a_peer_announces_is_checked_and_bounded() -> None:
    assert announced_ports(json.dumps({"mpc_ports": [0, 1, 65_535, 65_536, -1, True, "2", None]}).encode()) == [
        1,
        65_535,
    ]
    assert len(announced_ports(json.dumps({"mpc_ports": list(range(1, 9_999))}).encode())) == MAX_PROBED
    for nonsense in (b"", b"[]", b"{}", b'{"mpc_ports": 5}', b"\xff"):
        assert announced_ports(nonsense) == []
    assert ranges([7, 1, 2, 3]) == "1-3,7"


async def test_only_ports_that_workers_connect_to_are_probed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers_module.probe, "__defaults__", (0.2,))
    trio = prepare(tmp_path / "trio", now=NOW)
    first, third = (PortProbes(load_membership(load_config(trio.config_path(party)), NOW)) for party in (0, 2))
    with black_hole() as dropped, listen(HOST) as listener:
        page = json.dumps({"mpc_ports": [dropped, free_port(), listener.getsockname()[1]]}).encode()
        await first.look(1, page)
        await third.look(1, page)
        assert dropped in first.blocked[1] and len(first.blocked[1]) == 2
        assert [(reason.concern, reason.stops) for reason in first.reasons()] == [(Concern.PORT, True)]
        assert third.reasons() == []
        assert await first.error({1: listener.getsockname()[1], 2: dropped}) is None
        error = await first.error({1: dropped})
        assert error is not None and error.stage is Stage.PORT
        assert f"{HOST}:{dropped}" in str(error) and "mpc_ports" in str(error) and "--new" in error.hint
    await first.look(1, b'{"mpc_ports": []}')
    assert first.reasons() == []


async def test_a_port_that_was_closed_for_a_moment_fails_no_query(tmp_path: Path) -> None:
    """A daemon lets go of a port when it lends it to a worker, and a probe may come just then."""
    trio = prepare(tmp_path / "trio", now=NOW)
    probes = PortProbes(load_membership(load_config(trio.config_path(0)), NOW))
    port = free_port()
    await probes.look(1, json.dumps({"mpc_ports": [port]}).encode())
    assert probes.blocked == {1: [port]} and await probes.error({1: port}) is not None
    with listen(HOST, port):
        assert await probes.error({1: port}) is None
    assert probes.reasons() == []


async def test_a_worker_behind_a_firewall_is_named_and_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "REACH_SECONDS", 0.2)
    identity = make_identity(tmp_path, "north", NOW)
    session = MpcSession(party=1, attempt_id=bytes(32), parameters=b"", buckets=1, seconds=600.0)
    with black_hole() as port:
        peers = [Peer(HOST, port, identity.der)] * 3
        linked = Links(session, peers, identity, listen(HOST))
        with raises(ErrorKind.UNREACHABLE, MpcError) as error:
            await linked.open(Progress())
        await linked.close()
    assert error.value.stage is Stage.PORT
    assert f"{HOST}:{port}" in str(error.value) and "mpc_ports" in error.value.hint


async def test_a_session_does_not_begin_with_a_port_that_cannot_be_reached() -> None:
    known = MpcError(Stage.PORT, "blocked")

    class Probes:
        async def error(self, ports: Mapping[int, int]) -> MpcError | None:
            return known if ports[2] == 4002 else None

    async def nothing(*_: object) -> bytes:
        return b""

    probes: Any = Probes()
    meetings = Rendezvous([1, 2], nothing, probes=probes)
    for peer in (1, 2):
        await meetings.receive(peer, Writer().fixed(bytes(32), 32).uint(4000 + peer, 2).done())
    membership: Any = type("Membership", (), {"party": 0})
    session: Any = WorkerSession(None, None, membership, None, meetings)  # type: ignore[arg-type]
    with pytest.raises(MpcError) as error:
        await session._find_peers(bytes(32), 4000, 5.0)
    assert error.value is known


async def start_behind(three: ThreeHelpers, port: int) -> None:
    """Start all, helper 3 with its MPC port at an address at which nobody looks for it; both others notice."""
    path = three.trio.config_path(2)
    path.write_text(json.dumps({**json.loads(path.read_text()), "mpc_host": "127.0.0.3", "mpc_ports": [port]}))
    await asyncio.gather(*(three.start(party) for party in range(3)))
    for party in (0, 1):
        status, _ = await until_page(three, lambda reply: f"{HOST}:{port}" in str(reply[1]["reasons"]), party)
        assert status == 503


async def test_a_query_ends_where_a_port_is_blocked_and_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Helper 3 binds its ports to an address at which nobody looks for it: health shows it, and the query fails."""
    monkeypatch.setattr(workers_module.probe, "__defaults__", (0.2,))
    async with three_helpers(tmp_path, start=False) as three:
        with black_hole() as port:
            await start_behind(three, port)

            def block(party: int, _: object) -> None:
                if party == 0:
                    raise MpcError(Stage.PORT, f"cannot reach {HOST}:{port}", hint="Open mpc_ports, then --new.")

            three.mpc.before_add = block
            batch = small_batch(three)
            with pytest.raises(QueryFailed) as failed:
                await three.ask(three.query(batch, QueryOptions(seconds=600)), batch)
    assert f"{HOST}:{port}" in str(failed.value)
    assert "--new" in failed.value.hint and _exit_of(failed.value) is Exit.TRY_AGAIN

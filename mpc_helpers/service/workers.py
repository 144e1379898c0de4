"""The MPC of an installed helper: one worker process per attempt, its port, and the rendezvous of the three workers.

Every daemon sends the port of its worker to both others. A port needs no protection: workers authenticate each other by
certificate, session and parameters. Ports are sent only after all three have reserved, so that a query that waits for
its peers needs no worker yet.

A worker lives for seconds, so a firewall that blocks its port would first be noticed by a query. The daemon therefore
listens on every port that no worker has, and closes what connects: a peer that reaches nobody there reaches no worker
either. Workers connect from lower to higher parties only (`mpc.links`), so a helper probes the helpers above it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from mpc_helpers.agreement.negotiation import Attempt
from mpc_helpers.helper import Sessions
from mpc_helpers.identity.config import HelperConfig
from mpc_helpers.identity.membership import Membership
from mpc_helpers.mpc.links import BLOCKED_HINT, connect, listen
from mpc_helpers.mpc.noisy_sum import SumTerms
from mpc_helpers.mpc.session import MpcError, Peer, Stage
from mpc_helpers.mpc.worker import ForkServer, Worker, WorkerRun, WorkerSetup
from mpc_helpers.service.health import Concern, Reason
from mpc_helpers.service.transport import Certificates
from protocol.errors import ErrorKind, ProtocolError, TrefoilError
from protocol.field import Vector, from_integers
from protocol.net.listening import cancel_all
from protocol.shares import PARTIES
from protocol.wire import HASH_SIZE, Reader, Writer

# Ports that another program has are tried again after this time.
PORT_RETRY_SECONDS = 5.0
# How long a worker waits for a port: attempts that each hold the port that another waits for must not wait long.
LEND_SECONDS = 5.0
PROBE_SECONDS = 3.0
# A peer chooses what it announces, and must not have us connect without bound.
MAX_PROBED = 64


class MpcPorts:
    """The ports of this helper's workers, as `async with`. Port 0 lets the system choose, and is not held."""

    def __init__(self, host: str, ports: Sequence[int]) -> None:
        self._host = host
        self.fixed = () if 0 in ports else tuple(dict.fromkeys(ports))
        # First in, first out: a port rests for longest after a session.
        self._free: asyncio.Queue[int] = asyncio.Queue()
        self._holding: dict[int, asyncio.Task[None]] = {}
        # Why a port could not be held when that was last tried.
        self._refused: dict[int, str] = {}

    async def __aenter__(self) -> Self:
        for port in self.fixed:
            self._hold(port)
        return self

    async def __aexit__(self, *_: object) -> None:
        for port in list(self._holding):
            await self._let_go(port)

    @property
    def ahead(self) -> float:
        """How many workers may be started before their queries need them: the other half is for those that do."""
        return len(self.fixed) // 2 if self.fixed else float("inf")

    @contextlib.asynccontextmanager
    async def lent(self) -> AsyncIterator[int]:
        if not self.fixed:
            yield 0
            return
        try:
            port = await asyncio.wait_for(self._free.get(), LEND_SECONDS)
        except TimeoutError:
            message = f"all {len(self.fixed)} MPC ports of this helper are in use"
            raise MpcError(Stage.START, message, hint="List more ports under mpc_ports in its config.json.") from None
        await self._let_go(port)
        try:
            yield port
        finally:
            self._hold(port)

    def reasons(self) -> list[Reason]:
        text = f"mpc_ports {ranges(list(self._refused))} cannot be used: {next(iter(self._refused.values()), '')}"
        return [Reason(Concern.PORT, text)] if self._refused else []

    def _hold(self, port: int) -> None:
        self._holding[port] = asyncio.create_task(self._answer_probes(port))
        self._free.put_nowait(port)

    async def _let_go(self, port: int) -> None:
        await cancel_all([self._holding.pop(port)])

    async def _answer_probes(self, port: int) -> None:
        """Listen, and close every connection; retry while another program has the port."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                with listen(self._host, port) as listener:
                    self._refused.pop(port, None)
                    while True:
                        connection, _ = await loop.sock_accept(listener)
                        connection.close()
            except (OSError, TrefoilError) as error:
                self._refused[port] = str(error)
            await asyncio.sleep(PORT_RETRY_SECONDS)


@dataclass(slots=True)
class PortProbes:
    """Probes of the MPC ports of the peers that this helper's workers connect to."""

    membership: Membership
    # By party: the ports that could not be reached when they were last probed.
    blocked: dict[int, list[int]] = field(default_factory=dict, init=False)

    async def look(self, party: int, page: bytes) -> None:
        if party < self.membership.party:
            return
        host, _ = self.membership.helper_set.helpers[party].endpoint
        self.blocked[party] = await blocked_ports(host, announced_ports(page))

    def reasons(self) -> list[Reason]:
        """Return a reason for each peer with a blocked port: a query that needs the port fails."""
        return [
            Reason(Concern.PORT, self._describe(party, ports), stops=True)
            for party, ports in self.blocked.items()
            if ports
        ]

    async def error(self, chosen: Mapping[int, int]) -> MpcError | None:
        """Return the error of a session with workers at these ports, by party, if one of them cannot be reached.

        Probes again what could not be reached before: a daemon lets go of a port for a moment when it lends it to a
        worker, and a peer that was starting had not opened it yet. Now the worker listens.
        """
        doubted = [(party, port) for party, port in chosen.items() if port in self.blocked.get(party, ())]
        hosts = self.membership.helper_set.helpers
        errors = await asyncio.gather(*(probe(hosts[party].endpoint[0], port) for party, port in doubted))
        blocked = [place for place, error in zip(doubted, errors, strict=True) if error]
        for party, port in set(doubted) - set(blocked):
            self.blocked[party] = [other for other in self.blocked[party] if other != port]
        texts = [self._describe(party, [port]) for party, port in blocked]
        return MpcError(Stage.PORT, "; ".join(texts), hint=BLOCKED_HINT) if texts else None

    def _describe(self, party: int, ports: Sequence[int]) -> str:
        helper, own = self.membership.helper_set.helpers[party], self.membership.name(self.membership.party)
        where = f"{helper.endpoint[0]}:{ranges(ports)}"
        return f"{own} cannot reach {helper.name} at {where}: open its mpc_ports to {own}"


def ranges(ports: Sequence[int]) -> str:
    """Return ports for people: 1-3,7."""
    runs: list[list[int]] = []
    for port in sorted(ports):
        if runs and port == runs[-1][-1] + 1:
            runs[-1].append(port)
        else:
            runs.append([port])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def announced_ports(page: bytes) -> list[int]:
    """Return the fixed MPC ports on a health page, which a peer may have filled with anything."""
    try:
        stored = json.loads(page)
    except ValueError:
        return []
    ports = stored.get("mpc_ports") if isinstance(stored, dict) else None
    listed = ports[:MAX_PROBED] if isinstance(ports, list) else []
    return [port for port in listed if type(port) is int and 0 < port < 65536]


async def blocked_ports(host: str, ports: Sequence[int]) -> list[int]:
    """Return the ports that cannot be reached."""
    errors = await asyncio.gather(*(probe(host, port) for port in ports))
    return [port for port, error in zip(ports, errors, strict=True) if error]


async def probe(host: str, port: int, seconds: float = PROBE_SECONDS) -> str:
    """Connect once and close. Return why this fails, or nothing."""
    try:
        (await connect(host, port, seconds)).close()
    except OSError as error:
        return str(error) or "no response"
    return ""


RETRY_SECONDS = 0.1
# Per peer, so that a peer that announces more attempts evicts only its own.
MAX_REMEMBERED = 1024

Send = Callable[[int, bytes], Awaitable[bytes]]


class Rendezvous:
    """Run by a daemon for all its queries. `send` delivers to a peer, or raises an error and may be retried."""

    def __init__(
        self, peers: Sequence[int], send: Send, ports: MpcPorts | None = None, probes: PortProbes | None = None
    ) -> None:
        self.ports = ports or MpcPorts("127.0.0.1", (0,))
        self._probes = probes
        self._send = send
        self._ports: dict[int, OrderedDict[bytes, int]] = {peer: OrderedDict() for peer in peers}
        self._changed = asyncio.Condition()

    async def receive(self, peer: int, message: bytes) -> bytes | None:
        """Record the port of a peer's worker for an attempt. There is no reply."""
        reader = Reader(message)
        attempt_id, port = reader.fixed(HASH_SIZE), reader.uint(2)
        reader.finish()
        ports = self._ports[peer]
        async with self._changed:
            ports[attempt_id] = port
            while len(ports) > MAX_REMEMBERED:
                ports.popitem(last=False)
            self._changed.notify_all()
        return None

    async def meet(self, attempt_id: bytes, port: int) -> Mapping[int, int]:
        """Send both peers our worker's port, with retries, and return theirs. The caller enforces the timeout."""
        message = Writer().fixed(attempt_id, HASH_SIZE).uint(port, 2).done()
        sending = [asyncio.create_task(self._send_until_delivered(peer, message)) for peer in self._ports]
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: not self.missing(attempt_id))
            await asyncio.gather(*sending)
        finally:
            await cancel_all(sending)
        chosen = {peer: ports.pop(attempt_id) for peer, ports in self._ports.items()}
        # A firewall that refuses looks like a worker that died: only the probes of the daemon tell them apart.
        if self._probes is not None and (blocked := await self._probes.error(chosen)):
            raise blocked
        return chosen

    def missing(self, attempt_id: bytes) -> list[int]:
        return [peer for peer, ports in self._ports.items() if attempt_id not in ports]

    async def _send_until_delivered(self, peer: int, message: bytes) -> None:
        while True:
            with contextlib.suppress(TrefoilError):
                await self._send(peer, message)
                return
            await asyncio.sleep(RETRY_SECONDS)


class WorkerSession:
    """One worker for one attempt. Started early, it draws its noise while its helper admits reports."""

    def __init__(
        self,
        setup: WorkerSetup,
        fork_server: ForkServer,
        membership: Membership,
        certificates: Certificates,
        meetings: Rendezvous,
    ) -> None:
        self._setup = setup
        self._fork_server = fork_server
        self._membership = membership
        self._certificates = certificates
        self._meetings = meetings
        # Kills the worker, and then returns its port.
        self._stack = contextlib.AsyncExitStack()
        self._started: asyncio.Task[tuple[Worker, int]] | None = None

    def start(self) -> asyncio.Task[tuple[Worker, int]]:
        """Start the process once, and return the task that resolves to it and to its port."""
        if self._started is None:
            self._started = asyncio.create_task(self._start())
        return self._started

    async def _start(self) -> tuple[Worker, int]:
        port = await self._stack.enter_async_context(self._meetings.ports.lent())
        worker = Worker(replace(self._setup, port=port), self._fork_server)
        await self._stack.enter_async_context(worker)
        return worker, await worker.start()

    async def close(self) -> None:
        """Kill the process, in whatever state it is."""
        if self._started is not None:
            await cancel_all([self._started])
        await self._stack.aclose()

    async def add(self, attempt: Attempt, share: Vector, seconds: float) -> Vector:
        """Run the worker's session with both peers' workers, bound to this attempt, and return this helper's share."""
        worker, own = await self.start()
        peers = await self._find_peers(attempt.attempt_id, own, seconds)
        run = WorkerRun(
            attempt_id=attempt.attempt_id,
            seconds=seconds,
            peers=(peers[0], peers[1], peers[2]),
            share=[int(value) for value in share.tolist()],
        )
        return from_integers(await worker.run(run))

    async def _find_peers(self, attempt_id: bytes, own: int, seconds: float) -> list[Peer]:
        try:
            async with asyncio.timeout(seconds):
                ports = {self._membership.party: own, **await self._meetings.meet(attempt_id, own)}
                return [await self._peer(party, ports[party]) for party in range(PARTIES)]
        except TimeoutError:
            missing = self._meetings.missing(attempt_id)
            names = " and ".join(map(self._membership.name, missing)) or "a helper"
            message = f"{names} did not send its worker's port within {seconds:g} s"
            raise MpcError(Stage.CONNECT, message, party=missing[0] if len(missing) == 1 else None) from None

    async def _peer(self, party: int, port: int) -> Peer:
        host, _ = self._membership.helper_set.helpers[party].endpoint
        certificate = await self._certificates.of(party)
        try:
            return Peer(host, port, certificate)
        except ProtocolError as error:
            # Over its own TLS connection, so that it can be nobody else's port.
            message = f"{self._membership.name(party)} sent a false port of its worker: {error}"
            raise MpcError(Stage.CONNECT, message, party=party, kind=ErrorKind.INVALID_VALUE) from None


@contextlib.asynccontextmanager
async def worker_sessions(
    config: HelperConfig, membership: Membership, certificates: Certificates, meetings: Rendezvous
) -> AsyncIterator[Sessions]:
    """Yield the function that starts a worker for one attempt at a query of some terms, and kills it afterwards.

    A few queries at a time get their worker early; the others when all three helpers have reserved, so that queries
    that wait for a peer cost no memory.
    """
    most_ahead, ahead = min(config.limits.running, meetings.ports.ahead), 0
    async with ForkServer() as fork_server:

        @contextlib.asynccontextmanager
        async def session(terms: SumTerms) -> AsyncIterator[WorkerSession]:
            nonlocal ahead
            setup = WorkerSetup(
                party=membership.party,
                identity=config.tls,
                terms=terms,
                failed_proofs=config.failed_proofs,
                host=config.mpc_host or config.host,
            )
            worker = WorkerSession(setup, fork_server, membership, certificates, meetings)
            early = ahead < most_ahead
            if early:
                ahead += 1
                worker.start()
            try:
                yield worker
            finally:
                ahead -= int(early)
                await worker.close()

        yield session

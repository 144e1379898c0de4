"""The MPC of an installed helper: one worker process per attempt, and the rendezvous of the three workers.

Every daemon sends the port of its worker to both others. A port needs no protection: workers authenticate each other by
certificate, session and parameters. Ports are sent only after all three have reserved, so that a query that waits for
its peers needs no worker yet.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Self

from mpc_helpers.agreement.negotiation import Attempt
from mpc_helpers.identity.config import HelperConfig
from mpc_helpers.identity.membership import Membership
from mpc_helpers.mpc.fork_server import ForkServer
from mpc_helpers.mpc.session import MpcError, Peer, Stage
from mpc_helpers.mpc.terms import SumTerms
from mpc_helpers.mpc.worker import Worker, WorkerRun, WorkerSetup
from mpc_helpers.service.ports import MpcPorts
from mpc_helpers.service.transport import Certificates
from protocol.errors import ErrorKind, ProtocolError, TrefoilError
from protocol.field import Vector, from_integers
from protocol.net.listening import cancel_all
from protocol.shares import PARTIES
from protocol.wire import HASH_SIZE, Reader, Writer

RETRY_SECONDS = 0.1
# Per peer, so that a peer that announces more attempts evicts only its own.
MAX_REMEMBERED = 1024

Send = Callable[[int, bytes], Awaitable[bytes]]


class Rendezvous:
    """Run by a daemon for all its queries. `send` delivers to a peer, or raises an error and may be retried."""

    def __init__(self, peers: Sequence[int], send: Send, ports: MpcPorts | None = None) -> None:
        self.ports = ports or MpcPorts("127.0.0.1", (0,))
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
        return {peer: ports.pop(attempt_id) for peer, ports in self._ports.items()}

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
                # A firewall that refuses looks like a worker that died: only the probes of the daemon tell them apart.
                if blocked := await self._meetings.ports.blocked(ports):
                    raise blocked
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


class WorkerSessions:
    """Starts the workers of one helper: each serves one attempt and is then killed.

    A few queries at a time get their worker early; the others when all three helpers have reserved, so that queries
    that wait for a peer cost no memory.
    """

    def __init__(
        self, config: HelperConfig, membership: Membership, certificates: Certificates, meetings: Rendezvous
    ) -> None:
        self._config = config
        self._membership = membership
        self._certificates = certificates
        self._meetings = meetings
        self._fork_server = ForkServer()
        self._ahead = 0

    async def __aenter__(self) -> Self:
        await self._fork_server.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._fork_server.__aexit__()

    @asynccontextmanager
    async def __call__(self, terms: SumTerms) -> AsyncIterator[WorkerSession]:
        """Start a worker for one attempt at a query of these terms, and kill it afterwards."""
        setup = WorkerSetup(
            party=self._membership.party,
            identity=self._config.tls,
            terms=terms,
            failed_proofs=self._config.failed_proofs,
            host=self._config.mpc_host or self._config.host,
        )
        session = WorkerSession(setup, self._fork_server, self._membership, self._certificates, self._meetings)
        ahead = self._ahead < min(self._config.limits.running, self._meetings.ports.ahead)
        if ahead:
            self._ahead += 1
            session.start()
        try:
            yield session
        finally:
            self._ahead -= int(ahead)
            await session.close()

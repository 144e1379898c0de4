"""The MPC as an installed helper runs it: a worker process of its own for every attempt, forked when it is needed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Self

from mpc_helpers.agreement.negotiation import Attempt
from mpc_helpers.identity.config import HelperConfig
from mpc_helpers.identity.membership import Membership
from mpc_helpers.mpc.fork_server import ForkServer
from mpc_helpers.mpc.session import MpcError, Peer, Stage
from mpc_helpers.mpc.terms import SumTerms
from mpc_helpers.mpc.worker import Worker, WorkerRun, WorkerSetup
from mpc_helpers.service.rendezvous import Rendezvous
from mpc_helpers.service.transport import Certificates
from protocol.field import Vector, from_integers
from protocol.shares import PARTIES


class WorkerSession:
    """One worker for one attempt. Started ahead, it draws its noise while its helper admits reports."""

    def __init__(
        self, worker: Worker, membership: Membership, certificates: Certificates, meetings: Rendezvous
    ) -> None:
        self._worker = worker
        self._membership = membership
        self._certificates = certificates
        self._meetings = meetings
        self._port: asyncio.Task[int] | None = None

    def start(self) -> asyncio.Task[int]:
        """Start the process, unless that was done; gives the port it listens on."""
        if self._port is None:
            self._port = asyncio.create_task(self._worker.start())
        return self._port

    async def close(self) -> None:
        """The process is killed by its `Worker`; here only the waiting for it ends."""
        if self._port is not None:
            self._port.cancel()
            await asyncio.gather(self._port, return_exceptions=True)

    async def add(self, attempt: Attempt, share: Vector, seconds: float) -> Vector:
        """Let the worker compute with the two others, in a session that is bound to this attempt."""
        peers = await self._find_peers(attempt.attempt_id, seconds)
        run = WorkerRun(
            attempt_id=attempt.attempt_id,
            seconds=seconds,
            peers=(peers[0], peers[1], peers[2]),
            share=[int(value) for value in share.tolist()],
        )
        return from_integers(await self._worker.run(run))

    async def _find_peers(self, attempt_id: bytes, seconds: float) -> list[Peer]:
        own = await self.start()
        try:
            async with asyncio.timeout(seconds):
                ports = {self._membership.party: own, **await self._meetings.meet(attempt_id, own)}
                return [await self._peer(party, ports[party]) for party in range(PARTIES)]
        except TimeoutError:
            missing = self._meetings.missing(attempt_id)
            names = " and ".join(map(self._membership.name, missing)) or "a helper"
            message = f"{names} did not say where its worker is within {seconds:g} s"
            raise MpcError(Stage.CONNECT, message, party=missing[0] if len(missing) == 1 else None) from None

    async def _peer(self, party: int, port: int) -> Peer:
        host, _ = self._membership.helper_set.helpers[party].endpoint
        return Peer(host, port, await self._certificates.of(party))


class WorkerSessions:
    """Starts workers for one helper. What it gives is used for one attempt and then killed.

    A few queries at a time get their worker ahead of need; the others when all three helpers have reserved, so that
    many queries that wait for a peer cost no memory.
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
        """A worker for one attempt at a query of these terms."""
        setup = WorkerSetup(
            party=self._membership.party,
            identity=self._config.tls,
            terms=terms,
            failed_proofs=self._config.failed_proofs,
            host=self._config.mpc_host or self._config.host,
            ports=self._config.mpc_ports,
        )
        async with Worker(setup, self._fork_server) as worker:
            session = WorkerSession(worker, self._membership, self._certificates, self._meetings)
            ahead = self._ahead < self._config.limits.running
            if ahead:
                self._ahead += 1
                session.start()
            try:
                yield session
            finally:
                self._ahead -= int(ahead)
                await session.close()

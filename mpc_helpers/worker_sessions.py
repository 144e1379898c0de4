"""The MPC as an installed helper runs it: a worker process for every attempt, found by its peers through RESERVED."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from mpc_helpers.config import HelperConfig, Membership
from mpc_helpers.noisy_sum import SumKind
from mpc_helpers.session import MpcError, Peer, Stage
from mpc_helpers.talk import Attempt
from mpc_helpers.transport import Certificates, endpoint
from mpc_helpers.worker import Worker, WorkerRun, WorkerSetup
from protocol.errors import ProtocolError
from protocol.field import Vector, from_integers
from protocol.query import Query
from protocol.wire import Reader, Writer

CERTIFICATE_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class WorkerSession:
    """A worker that is starting, listens, or has drawn its noise already, while its helper admits reports."""

    worker: Worker
    port: asyncio.Future[int]
    membership: Membership
    certificates: Certificates

    async def endpoint(self) -> bytes:
        """What peers are told: the port. The host is the one in the helper set."""
        return Writer().uint(await asyncio.shield(self.port), 2).done()

    async def add(self, attempt: Attempt, parameters: bytes, share: Vector, seconds: float) -> Vector:
        """Let the worker compute with the two others, in a session that is bound to this attempt."""
        peers = [await self._peer(party, attempt) for party in range(len(self.membership.helper_set.helpers))]
        run = WorkerRun(
            session_digest=attempt.attempt_id,
            parameters=parameters,
            seconds=seconds,
            peers=(peers[0], peers[1], peers[2]),
            share=[int(value) for value in share.tolist()],
        )
        return from_integers(await self.worker.run(run))

    async def _peer(self, party: int, attempt: Attempt) -> Peer:
        host, _ = endpoint(self.membership.helper_set.helpers[party].address)
        try:
            async with asyncio.timeout(CERTIFICATE_SECONDS):
                certificate = await self.certificates.of(party)
        except TimeoutError:
            message = f"the certificate of {self.membership.name(party)} is not known"
            raise MpcError(Stage.CONNECT, message, peer=party) from None
        port = await self.port if party == self.membership.party else _port(party, attempt)
        return Peer(host, port, certificate)


def _port(party: int, attempt: Attempt) -> int:
    try:
        reader = Reader(attempt.endpoints[party])
        port = reader.uint(2)
        reader.finish()
    except (KeyError, ProtocolError):
        raise MpcError(Stage.CONNECT, f"helper {party + 1} did not say where its worker is", peer=party) from None
    return port


class WorkerSessions:
    """Starts workers for one helper. What it returns is used for one attempt and then killed."""

    def __init__(self, config: HelperConfig, membership: Membership, certificates: Certificates) -> None:
        self._config = config
        self._membership = membership
        self._certificates = certificates

    @asynccontextmanager
    async def __call__(self, query: Query, kind: SumKind) -> AsyncIterator[WorkerSession]:
        """A worker for one attempt at `query`."""
        setup = WorkerSetup(
            party=self._membership.party,
            identity=self._config.tls,
            kind=kind,
            rate=query.gamma,
            buckets=query.length,
            host=self._config.mpc_host or self._config.host,
            ports=self._config.mpc_ports,
        )
        async with Worker(setup) as worker:
            port = asyncio.ensure_future(worker.start())
            try:
                yield WorkerSession(worker, port, self._membership, self._certificates)
            finally:
                port.cancel()
                await asyncio.gather(port, return_exceptions=True)

"""The ports of the MPC: held while idle, lent to one worker at a time, and probed by the peers that connect to them.

A worker lives for seconds, so a firewall that blocks its port would first be noticed by a query. The daemon therefore
listens on every port that no worker has, and closes what connects: a peer that reaches nobody there reaches no worker
either. Workers connect from lower to higher parties only (`mpc.links`), so a helper probes the helpers above it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from mpc_helpers.identity.membership import Membership
from mpc_helpers.mpc.links import BLOCKED_HINT, connect, listen
from mpc_helpers.mpc.session import MpcError, Stage
from mpc_helpers.service.health import Concern, Reason
from protocol.errors import TrefoilError
from protocol.net.listening import cancel_all

# Ports that another program has are tried again after this time.
RETRY_SECONDS = 5.0
# How long a worker waits for a port: attempts that each hold the port that another waits for must not wait long.
LEND_SECONDS = 5.0
PROBE_SECONDS = 3.0
# A peer chooses what it announces, and must not have us connect without bound.
MAX_PROBED = 64


Blocked = Callable[[Mapping[int, int]], Awaitable[MpcError | None]]


async def none_blocked(_chosen: Mapping[int, int]) -> None:
    """Return no error: nobody probes ports that the system chooses."""


class MpcPorts:
    """The ports of this helper's workers, as `async with`. Port 0 lets the system choose, and is not held.

    `blocked` returns the error of a session whose workers are known to be out of reach, by their ports.
    """

    def __init__(self, host: str, ports: Sequence[int], blocked: Blocked = none_blocked) -> None:
        self._host = host
        self.blocked = blocked
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
            await asyncio.sleep(RETRY_SECONDS)


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

"""Three helpers that agree and spend in one process and virtual time, without reports or MPC."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Concatenate, ParamSpec

from mpc_helpers.agreement.agreement import Agreement
from mpc_helpers.agreement.negotiation import AdmittedBatch, Attempt, AttemptTerms
from mpc_helpers.agreement.peers import Hooks
from mpc_helpers.ledger.attempt import AttemptOutcome
from mpc_helpers.ledger.engine import LedgerOwner
from mpc_helpers.ledger.ledger import ReportLedger
from tests.support.commit_world import (
    KEYS,
    RETRY,
    AskedQuery,
    inline,
    parties,
    run,
)

QUERY = AskedQuery.of(1, range(6))
OTHER = AskedQuery.of(2, range(4, 10))
PARAMETERS = b"p" * 32


class ThreeAgreements:
    """Three helpers over a network that works, except where a test says otherwise."""

    def __init__(self, folder: Path, *, threads: bool = False) -> None:
        self.down: set[int] = set()
        self.deaf: set[int] = set()
        self.delay = 0.01
        # Helpers whose messages take ten times as long.
        self.slow: set[int] = set()
        self.calls: list[tuple[int, int]] = []
        # What becomes of a message or reply on its way, given who sent it and to whom.
        self.carried: Callable[[int, int, bytes], bytes] = lambda _source, _target, data: data
        self.ledgers: list[ReportLedger] = []
        for party in range(3):
            ReportLedger.create(folder / f"{party}.db", LedgerOwner(party, KEYS[party]))
            self.ledgers.append(ReportLedger(folder / f"{party}.db", LedgerOwner(party, KEYS[party])))
        self._threads = threads
        self.agreements: list[Agreement] = []

    def start(self) -> None:
        hooks = Hooks(offload=None if self._threads else inline)
        self.agreements = [
            Agreement(self.ledgers[party], parties(party), self._sender(party), retry=RETRY, hooks=hooks)
            for party in range(3)
        ]

    def _sender(self, source: int) -> Callable[[int, bytes], Awaitable[bytes | None]]:
        async def send(target: int, data: bytes) -> bytes | None:
            self.calls.append((source, target))
            await asyncio.sleep(self.delay * (10 if source in self.slow else 1))
            if {source, target} & self.down or target in self.deaf:
                raise OSError("connection refused")
            reply = await self.agreements[target].receive(source, self.carried(source, target, data))
            return self.carried(target, source, reply) if reply else reply

        return send

    async def agree(
        self,
        query: AskedQuery = QUERY,
        batches: dict[int, AdmittedBatch] | None = None,
        seconds: float = 20.0,
        helpers: tuple[int, ...] = (0, 1, 2),
        **changes: Any,
    ) -> list[Any]:
        """Every helper agrees at once; results or errors in order."""
        deadline = asyncio.get_running_loop().time() + seconds
        work = []
        for party in helpers:
            batch = (batches or {}).get(party, query.batch())
            name = changes.get("names", {}).get(party, query.name)
            parameters = changes.get("parameters", {}).get(party, PARAMETERS)
            terms = AttemptTerms(name, False, parameters, changes.get("minimum", 1))
            work.append(self._reserved(party, terms, batch, deadline))
        return await asyncio.gather(*work, return_exceptions=True)

    async def _reserved(self, party: int, terms: AttemptTerms, batch: AdmittedBatch, deadline: float) -> Attempt:
        agreement = self.agreements[party]
        return await agreement.preparation.reserve(await agreement.agree(terms, batch, deadline))

    async def commit(self, attempts: list[Attempt]) -> list[AttemptOutcome]:
        async with asyncio.timeout(20.0):
            return await asyncio.gather(
                *(self.agreements[party].commit(attempt, b"share %d" % party) for party, attempt in enumerate(attempts))
            )

    async def commit_within(self, seconds: float, party: int, attempt: Attempt) -> AttemptOutcome | None:
        """Votes, and waits so long for the outcome; None if it is not known by then."""
        try:
            async with asyncio.timeout(seconds):
                return await self.agreements[party].commit(attempt, b"share")
        except TimeoutError:
            return None

    async def stop(self) -> None:
        for agreement in self.agreements:
            await agreement.close()


P = ParamSpec("P")


def play(three: ThreeAgreements, scenario: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        three.start()
        try:
            await scenario()
        finally:
            await three.stop()

    run(main)


def virtually(test: Callable[Concatenate[ThreeAgreements, P], Awaitable[None]]) -> Callable[..., None]:
    """Run a test of `three` in virtual time."""

    @functools.wraps(test)
    def played(three: ThreeAgreements, *arguments: P.args, **named: P.kwargs) -> None:
        play(three, lambda: test(three, *arguments, **named))

    return played

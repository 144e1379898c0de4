"""A helper: one of three that add reports up without seeing any of them. `Helper.answer` is the whole of its part.

Everything it needs comes in from outside: ledger and agreement, the way to the MPC, the executor, the clock. `step` is
called at the crash points of COMMIT.md; an installed helper has no way to make it do anything.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import BrokenExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np

from mpc_helpers.admission.cluster import Workplace
from mpc_helpers.admission.column import digests_of
from mpc_helpers.admission.ingest import Ingested, ingest
from mpc_helpers.admission.rules import AdmissionRules
from mpc_helpers.agreement.agreement import Agreement
from mpc_helpers.agreement.negotiation import AdmittedBatch, Attempt, AttemptTerms
from mpc_helpers.identity.config import Limits
from mpc_helpers.identity.membership import Membership
from mpc_helpers.ledger.attempt import AgreementError, QueryName, State, Step
from mpc_helpers.ledger.ledger import ReportLedger, Standing
from mpc_helpers.mpc import noise
from mpc_helpers.mpc.noisy_sum import SumKind, attempt_parameters
from mpc_helpers.mpc.session import MpcError
from protocol.answer import AnswerShare
from protocol.batch import ColumnReader
from protocol.errors import Rejection, TrefoilError
from protocol.field import Vector
from protocol.query import Query
from protocol.report import TIME_STEP
from protocol.status import QueryState

_LOG = logging.getLogger("trefoil.helper")
T = TypeVar("T")

# How far a report's hour may lie ahead of this helper's clock.
CLOCK_TOLERANCE = TIME_STEP
RETRY_SECONDS = 0.1
LONGEST_RETRY = 10.0
SETTLE_SECONDS = 0.5
INGEST_TRIES = 3


class Disputed(TrefoilError):
    """A helper voted both ways: the reports stay locked, and its own signatures prove who lied."""

    disputed = True

    def __init__(self, helper: int, name: str) -> None:
        super().__init__(
            f"{name} voted both YES and NO on the same attempt", "Take its two signatures to its operator."
        )
        self.helper = helper


class AttemptFailed(TrefoilError):
    """An attempt came to nothing before any vote: its reports are free again, and another may follow."""

    def __init__(self, message: str, helper: int | None = None) -> None:
        super().__init__(message)
        self.helper = helper


class Watch(Protocol):
    """Who wants to know where a query is; `enter` makes the state durable."""

    async def enter(self, state: QueryState, /) -> None: ...

    def advance(self, amount: int, /) -> None: ...


class NoisySum(Protocol):
    """One MPC session to be, for one attempt: its noise is drawn already, or being drawn."""

    async def add(self, attempt: Attempt, share: Vector, seconds: float) -> Vector:
        """This helper's share of sum + noise, computed with both peers."""
        ...


Sessions = Callable[[Query, SumKind], AbstractAsyncContextManager[NoisySum]]


class Helper:
    """One of the three, as party `membership.party`."""

    def __init__(
        self,
        membership: Membership,
        limits: Limits,
        report_lifetime: int,
        ledger: ReportLedger,
        agreement: Agreement,
        sessions: Sessions,
        place: Workplace,
        clock: Callable[[], int],
        *,
        step: Callable[[Step], None] = lambda _: None,
        admitted: Callable[[Ingested], None] = lambda _: None,
    ) -> None:
        self._membership = membership
        self._limits = limits
        self._lifetime = report_lifetime
        self._ledger = ledger
        self._agreement = agreement
        self._sessions = sessions
        self._place = place
        self._clock = clock
        self._step = step
        self._admitted = admitted
        # Only admitting is rationed. A query that waits for its peers must not keep another from waiting for its own,
        # or three helpers that took queries in different orders would wait for each other for ever.
        self._admitting = asyncio.Semaphore(limits.running)

    async def answer(self, query: Query, column: Path, watch: Watch) -> QueryState:
        """*Admit · Agree · Spend · Sum · Noise · Open.* Ends with this helper's share released, or an error.

        The query was authenticated and its column has the root that it signed. Repeated until an attempt is released:
        one that fails before its vote leaves nothing behind.
        """
        kind = _kind(query)
        parameters = attempt_parameters(kind, query.gamma)
        ingested: Ingested | None = None
        failures: list[AttemptFailed] = []
        while not await self._released(query):
            self._check_time(query, failures)
            # The noise of one attempt, drawn while Admit runs and used for no other.
            async with self._sessions(query, kind) as session:
                # Admit: what each report is worth to this helper alone.
                ingested = ingested or await self._admit(query, column, watch)
                # Agree: the reports that all three admitted and none has seen, under one accepted root.
                await watch.enter(QueryState.AGREEING)
                attempt = await self._agree(query, ingested, parameters, failures)
                # Spend: reserved at all three by now; free again unless the block ends in a vote.
                async with self._spending(query, attempt, failures):
                    await watch.enter(QueryState.COMPUTING)
                    # Sum: m numbers out of n reports, without any other helper.
                    share = await asyncio.to_thread(ingested.shamir_share, attempt.accepted)
                    # Noise: the only part that is computed together.
                    noisy = await self._add_noise(query, attempt, session, share)
                    # Open: to the querier only, and only with YES from both peers.
                    await watch.enter(QueryState.VOTING)
                    sealed = self._seal(query, attempt, noisy)
                    await self._agreement.commit(attempt, sealed, self._deadline(query))
        return QueryState.RELEASED

    async def stored_answer(self, query: Query) -> tuple[bytes, tuple[bytes, ...]] | None:
        """The sealed share and the signed YES of all three, once released; the same bytes for ever."""
        release = await self._agreement.answer(QueryName.of(query).key)
        if release is None:
            return None
        self._step(Step.ANSWER_BEFORE_SEND)
        return release.sealed_share, tuple(vote.encode() for vote in release.votes)

    async def has_live_attempt(self, query: Query) -> bool:
        """Whether some attempt at the query is not aborted: then it has, or may still get, its answer."""
        record = await asyncio.to_thread(self._ledger.live, QueryName.of(query).key)
        return record is not None

    async def _released(self, query: Query) -> bool:
        """Whether the query has its answer. An attempt that was voted for is waited for, for ever (COMMIT.md)."""
        key = QueryName.of(query).key
        while (record := await asyncio.to_thread(self._ledger.live, key)) is not None:
            if record.state in (State.RELEASED, State.RESERVED):
                return record.state is State.RELEASED
            if record.liars:
                liar = min(record.liars)
                raise Disputed(liar, self._membership.name(liar))
            await asyncio.sleep(SETTLE_SECONDS)
        return False

    def _check_time(self, query: Query, failures: list[AttemptFailed]) -> None:
        """No attempt begins after the deadline."""
        if self._clock() >= query.deadline:
            told, helper = _before(failures)
            message = f"the query's deadline has passed; nothing was spent{told}"
            raise AgreementError(message, "Ask again: trefoil query --new", helper=helper)

    async def _admit(self, query: Query, column: Path, watch: Watch) -> Ingested:
        async with self._admitting:
            return await self._admit_now(query, column, watch)

    async def _admit_now(self, query: Query, column: Path, watch: Watch) -> Ingested:
        await watch.enter(QueryState.ADMITTING)
        now = self._clock()
        watermark = await asyncio.to_thread(lambda: self._ledger.watermark)
        rules = AdmissionRules.for_query(
            self._membership.party,
            query,
            self._membership.known_sets,
            self._membership.hpke,
            oldest=max(watermark, now - self._lifetime),
            newest=now + CLOCK_TOLERANCE,
        )
        ingested = await asyncio.to_thread(self._ingest, column, rules, watch.advance)
        self._admitted(ingested)
        return ingested

    def _ingest(self, column: Path, rules: AdmissionRules, progress: Callable[[int], None]) -> Ingested:
        """Run in a thread. A process that is killed takes its chunk along; opening again gives the same."""
        place, reader = self._place, ColumnReader(column)
        digests = digests_of(reader, rules.query.batch_root)
        for _ in range(INGEST_TRIES):
            with suppress(BrokenExecutor):
                return ingest(
                    reader,
                    digests,
                    rules,
                    place.executor,
                    parallel=place.parallel,
                    progress=progress,
                    shared_disk=place.shared_disk,
                )
        raise TrefoilError(
            "the processes that open reports keep dying", "Look at this helper's memory, or let it use fewer processes."
        )

    async def _agree(
        self, query: Query, ingested: Ingested, parameters: bytes, failures: list[AttemptFailed]
    ) -> Attempt:
        """Agree, with too few or too many bad reports refused before anything is spent."""
        batch = self._batch(query, ingested)
        tolerated = query.batch_size * query.tolerated_bad_permille // 1000
        minimum = max(self._limits.minimum_reports, query.minimum_reports, query.batch_size - tolerated)
        terms = AttemptTerms(QueryName.of(query), query.debug, parameters, minimum)
        try:
            return await self._agreement.agree(terms, batch, self._deadline(query))
        except AgreementError as error:
            for alarmed, alarm in self._agreement.peers.alarms.items():
                hint = "Its operator must rebuild the ledger or retire its keys: trefoil ledger rebuild"
                raise AgreementError(f"refused: {alarm}", hint, helper=alarmed) from None
            left_out = await asyncio.to_thread(self._left_out, query, batch)
            told, helper = _before(failures)
            blamed = helper if error.helper is None else error.helper
            raise AgreementError(f"{error}{left_out}{told}", error.hint, helper=blamed) from None

    def _batch(self, query: Query, ingested: Ingested) -> AdmittedBatch:
        """What this helper has to say about the batch, to be agreed on."""
        return AdmittedBatch(
            query.batch_root,
            ingested.digests,
            ingested.hours,
            ingested.debug,
            ingested.admitted,
            ingested.rejections(),
        )

    def _left_out(self, query: Query, batch: AdmittedBatch) -> str:
        """What this helper has against the batch, for whoever reads why the query failed."""
        standings = self._ledger.lookup(batch.digests, QueryName.of(query).key)
        counts = Counter(batch.rejections)
        counts[Rejection.SEEN] += int(np.count_nonzero(batch.admitted & (standings == Standing.SEEN)))
        told = ", ".join(f"{count} {reason.value}" for reason, count in counts.items() if count)
        return f"; this helper leaves out: {told}" if told else ""

    @asynccontextmanager
    async def _spending(self, query: Query, attempt: Attempt, failures: list[AttemptFailed]) -> AsyncIterator[None]:
        """Give the attempt up if the block fails. Another one follows as long as there is time."""
        try:
            yield
        except (MpcError, AttemptFailed) as error:
            await self._agreement.give_up(attempt, str(error))
            failed = AttemptFailed(str(error), error.helper if isinstance(error, AttemptFailed) else error.peer)
            if self._clock() >= query.deadline:
                raise failed from None
            failures.append(failed)
            _LOG.warning("attempt %d failed, trying again: %s", attempt.number, error)
            # Ever longer: a helper that spoils every attempt must not wear the other two's ledgers out.
            wait = min(RETRY_SECONDS * 2 ** len(failures), LONGEST_RETRY, query.deadline - self._clock())
            await asyncio.sleep(max(0, wait))
        except BaseException as error:
            # Without effect once it has been voted for.
            await asyncio.shield(self._agreement.give_up(attempt, f"stopped: {error}"))
            raise

    async def _add_noise(self, query: Query, attempt: Attempt, session: NoisySum, share: Vector) -> Vector:
        drawing = float(noise.allowance(query.length, query.gamma))
        seconds = max(1.0, min(self._limits.mpc_seconds + 2 * drawing, query.deadline - self._clock()))
        computing = asyncio.ensure_future(session.add(attempt, share, seconds))
        await asyncio.sleep(0)
        self._step(Step.COMPUTE)
        return await _unless_ended(attempt, computing)

    def _seal(self, query: Query, attempt: Attempt, noisy: Vector) -> bytes:
        share = AnswerShare(
            query_digest=query.digest,
            attempt=attempt.number,
            accepted_root=attempt.attempt_id,
            submitted=query.batch_size,
            counted=attempt.counted,
            rejections=attempt.rejections,
            noise=query.noise,
            epsilon_micros=query.epsilon_micros,
            sensitivity=query.sensitivity,
            vector=noisy,
        )
        return share.seal(self._membership.party, query, self._membership.identity)

    def _deadline(self, query: Query) -> float:
        """The query's deadline as a time of the event loop."""
        return asyncio.get_running_loop().time() + max(0, query.deadline - self._clock())


def _before(failures: list[AttemptFailed]) -> tuple[str, int | None]:
    """What went wrong in the last attempt, which often says more than that time ran out since."""
    return (f"; before that: {failures[-1]}", failures[-1].helper) if failures else ("", None)


def _kind(query: Query) -> SumKind:
    """Only a debug query is answered without noise, and it admits none but debug reports (`Rejection.WRONG_MODE`)."""
    return SumKind.DEBUG if query.debug else SumKind.of(query.noise)


async def _unless_ended(attempt: Attempt, work: Awaitable[T]) -> T:
    """The result of `work`, unless the attempt ends first because another helper gave it up."""
    working, ended = asyncio.ensure_future(work), asyncio.ensure_future(attempt.ended.wait())
    try:
        await asyncio.wait({working, ended}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise AttemptFailed("another helper gave the attempt up")
        return working.result()
    finally:
        for task in (working, ended):
            task.cancel()
        await asyncio.gather(working, ended, return_exceptions=True)

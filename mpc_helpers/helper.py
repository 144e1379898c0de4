"""A helper: one of three that add reports up without seeing any of them. `Helper.answer` is the whole of its part.

Everything it needs comes in from outside: admission, agreement, the way to the MPC, the clock. `step` is called at the
crash points of COMMIT.md; an installed helper has no way to make it do anything.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol, TypeVar

from mpc_helpers.admission.admit import Admission
from mpc_helpers.admission.ingest import Ingested
from mpc_helpers.agreement.agreement import Agreement
from mpc_helpers.agreement.errors import AgreementError, Disputed, TooFewReports
from mpc_helpers.agreement.negotiation import AdmittedBatch, Attempt, AttemptTerms, Negotiation
from mpc_helpers.identity.config import Limits
from mpc_helpers.identity.membership import Membership
from mpc_helpers.ledger.attempt import AttemptOutcome, QueryName, Step
from mpc_helpers.mpc.session import MpcError, Stage
from mpc_helpers.mpc.terms import SumTerms
from protocol.answer import AnswerShare
from protocol.errors import Blamed
from protocol.field import Vector
from protocol.left_out import encode_left_out
from protocol.query import Query
from protocol.status import QueryState

_LOG = logging.getLogger("trefoil.helper")
T = TypeVar("T")

RETRY_SECONDS = 0.1
LONGEST_RETRY = 300.0


class AttemptFailed(Blamed):
    """An attempt came to nothing, and its reports are free again: another may follow."""


class QueryProgress(Protocol):
    """Who wants to know where a query is; `enter` makes the state durable."""

    async def enter(self, state: QueryState, /) -> None: ...

    def advance(self, amount: int, /) -> None: ...


class NoisySum(Protocol):
    """One MPC session to be, for one attempt: its noise is drawn already, or being drawn."""

    async def add(self, attempt: Attempt, share: Vector, seconds: float) -> Vector:
        """This helper's share of sum + noise, computed with both peers."""
        ...


Sessions = Callable[[SumTerms], AbstractAsyncContextManager[NoisySum]]


class Helper:
    """One of the three, as party `membership.party`."""

    def __init__(
        self,
        membership: Membership,
        limits: Limits,
        admission: Admission,
        agreement: Agreement,
        sessions: Sessions,
        clock: Callable[[], int],
        *,
        step: Callable[[Step], None] = lambda _: None,
    ) -> None:
        self._membership = membership
        self._limits = limits
        self._admission = admission
        self._agreement = agreement
        self._sessions = sessions
        self._clock = clock
        self._step = step

    async def answer(self, query: Query, column: Path, progress: QueryProgress) -> None:
        """*Admit · Agree · Spend · Sum · Noise · Open.* Ends with this helper's share released, or with an error.

        The query was authenticated and its column has the root that it signed. An attempt that fails before it is
        voted for leaves nothing behind, and another follows while there is time.
        """
        admitted: Ingested | None = None
        failed: list[Blamed] = []
        end = self._end(query)
        # What was voted for before a restart is waited for, however long: a peer may have released it already.
        outcome = await self._agreement.outcome(QueryName.of(query).key)
        while outcome is not AttemptOutcome.RELEASED:
            self._check_time(query, end, failed)
            try:
                # The noise of one attempt, drawn while Admit runs and used for no other.
                async with self._sessions(SumTerms.of(query)) as session:
                    # Admit: what each report is worth to this helper alone; once, however many attempts there are.
                    admitted = admitted or await self._admit(query, column, progress)
                    # Agree: which reports count, those that all three admitted and none has seen.
                    agreed = await self._agree(query, admitted, end, progress)
                    # Spend: reserved on disk by all three, before the first byte of the MPC.
                    async with self._agreement.spend(agreed) as attempt:
                        # Sum: m numbers out of n reports, without any other helper.
                        share = await self._sum(admitted, attempt, progress)
                        # Noise: the only part that is computed together.
                        noisy = await self._add_noise(query, attempt, session, share)
                        # Open: to the querier only, and only with YES from both peers.
                        outcome = await self._open(query, attempt, noisy, progress)
            except (MpcError, AttemptFailed) as failure:
                _raise_if_alarming(failure)
                await self._wait_to_retry(query, failed, failure)
            except AgreementError as error:
                raise _after(failed, error) from None

    async def stored_answer(self, query: Query) -> tuple[bytes, tuple[bytes, ...]] | None:
        """The sealed share and the signed YES of all three, once released; the same bytes until it is forgotten."""
        release = await self._agreement.answer(QueryName.of(query).key)
        if release is None:
            return None
        self._step(Step.ANSWER_BEFORE_SEND)
        return release.sealed_share, tuple(vote.encode() for vote in release.votes)

    async def forget_answer(self, query: Query) -> None:
        """The share is kept no longer; the reports stay spent."""
        await self._agreement.forget_answer(QueryName.of(query).key)

    async def has_live_attempt(self, query: Query) -> bool:
        """Whether some attempt at the query is not aborted: then it has, or may still get, its answer."""
        return await self._agreement.has_live_attempt(QueryName.of(query).key)

    # The steps of the page.

    async def _admit(self, query: Query, column: Path, progress: QueryProgress) -> Ingested:
        async with self._admission.turn:
            await progress.enter(QueryState.ADMITTING)
            return await self._admission.admit(query, column, self._clock(), progress.advance)

    async def _agree(self, query: Query, admitted: Ingested, end: float, progress: QueryProgress) -> Negotiation:
        """With too few or too many bad reports refused before anything is spent."""
        await progress.enter(QueryState.AGREEING)
        tolerated = query.batch_size * query.tolerated_bad_permille // 1000
        minimum = max(self._limits.minimum_reports, query.minimum_reports, query.batch_size - tolerated)
        noise = SumTerms.of(query)
        terms = AttemptTerms(QueryName.of(query), query.debug, noise.digest, minimum, noise.most_draws)
        deadline = min(end, self._steady() + query.deadline - self._clock())
        return await self._agreement.agree(terms, _batch(query, admitted), deadline)

    async def _sum(self, admitted: Ingested, attempt: Attempt, progress: QueryProgress) -> Vector:
        await progress.enter(QueryState.COMPUTING)
        return await asyncio.to_thread(admitted.shamir_share, attempt.accepted)

    async def _add_noise(self, query: Query, attempt: Attempt, session: NoisySum, share: Vector) -> Vector:
        drawing = SumTerms.of(query).allowance
        seconds = max(1.0, min(self._limits.mpc_seconds + 2 * drawing, query.deadline - self._clock()))
        return await self._unless_ended(attempt, session.add(attempt, share, seconds))

    async def _unless_ended(self, attempt: Attempt, work: Awaitable[T]) -> T:
        """The result of `work`, unless the attempt ends first because another helper gave it up."""
        working, ended = asyncio.ensure_future(work), asyncio.ensure_future(attempt.ended.wait())
        try:
            # Lets the work begin, so that a helper stopped at the step below is in the midst of it.
            await asyncio.sleep(0)
            self._step(Step.COMPUTE)
            await asyncio.wait({working, ended}, return_when=asyncio.FIRST_COMPLETED)
            # The work first: if both are done the share is there, and the vote will find out whether it is too late.
            if not working.done():
                raise await self._given_up(attempt, "gave the attempt up")
            return working.result()
        finally:
            for task in (working, ended):
                task.cancel()
            await asyncio.gather(working, ended, return_exceptions=True)

    async def _open(self, query: Query, attempt: Attempt, noisy: Vector, progress: QueryProgress) -> AttemptOutcome:
        await progress.enter(QueryState.VOTING)
        outcome = await self._agreement.commit(attempt, self._seal(query, attempt, noisy))
        if outcome is AttemptOutcome.ABORTED:
            raise await self._given_up(attempt, "gave the attempt up instead of voting for it")
        return outcome

    async def _given_up(self, attempt: Attempt, what: str) -> AttemptFailed:
        party = await self._agreement.given_up_by(attempt)
        return AttemptFailed(f"{'another helper' if party is None else f'helper {party + 1}'} {what}", party=party)

    def _seal(self, query: Query, attempt: Attempt, noisy: Vector) -> bytes:
        share = AnswerShare(
            query_digest=query.digest,
            attempt_number=attempt.number,
            attempt_id=attempt.attempt_id,
            submitted=query.batch_size,
            counted=attempt.counted,
            rejections=attempt.rejections,
            noise=query.noise,
            epsilon_micros=query.epsilon_micros,
            sensitivity=query.sensitivity,
            proposed=attempt.proposed,
            left_out=encode_left_out(attempt.codes),
            vector=noisy,
        )
        return share.seal(self._membership.party, query, self._membership.identity)

    # Between attempts.

    def _steady(self) -> float:
        return asyncio.get_running_loop().time()

    def _end(self, query: Query) -> float:
        """When a query ends by the steady clock, however the other is set back before the start or after it."""
        return self._steady() + min(query.deadline - self._clock(), self._limits.seconds)

    def _check_time(self, query: Query, end: float, failed: list[Blamed]) -> None:
        """No attempt begins after the deadline."""
        if self._clock() >= query.deadline or self._steady() >= end:
            message = "the query's deadline has passed; nothing was spent"
            raise _after(failed, AgreementError(message, "Ask again: trefoil query --new"))

    async def _wait_to_retry(self, query: Query, failed: list[Blamed], failure: Blamed) -> None:
        left = query.deadline - self._clock()
        if left <= 0:
            raise failure
        failed.append(failure)
        _LOG.warning("an attempt failed, trying again: %s", failure)
        # Ever longer, also over restarts: a helper that spoils every attempt must not wear the others' ledgers out.
        draws = await self._agreement.draws(QueryName.of(query).key)
        await asyncio.sleep(min(RETRY_SECONDS * 2 ** min(draws, 20), LONGEST_RETRY, left))


def _raise_if_alarming(failure: Blamed) -> None:
    """A proof that does not hold is no accident: another try would only be another chance for whoever cheats."""
    if isinstance(failure, MpcError) and failure.stage is Stage.PROOF:
        _LOG.error("ALARM: %s", failure)
        raise failure


def _after(failed: list[Blamed], error: AgreementError) -> AgreementError:
    """With what went wrong in the attempt before, which often says more than that time ran out since."""
    if not failed or isinstance(error, Disputed | TooFewReports):
        return error
    blamed = failed[-1].party if error.party is None else error.party
    return AgreementError(f"{error}; before that: {failed[-1]}", error.hint, party=blamed)


def _batch(query: Query, admitted: Ingested) -> AdmittedBatch:
    """What this helper has to say about the batch, to be agreed on."""
    return AdmittedBatch(
        query.batch_root,
        admitted.digests,
        admitted.hours,
        admitted.debug,
        admitted.summed,
        admitted.rejections(),
        admitted if query.shape.checked else None,
        admitted.reasons,
    )

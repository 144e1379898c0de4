"""A helper: one of three that add reports up without seeing any of them. `Helper.answer` reads as the protocol.

Admission, agreement, MPC sessions and the clock are constructor arguments. `failpoint` is called at the failpoints of
COMMIT.md; an installed helper passes none.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol, TypeVar

from mpc_helpers.admission.ingest import Admission, AdmittedColumn
from mpc_helpers.agreement.agreement import Agreement
from mpc_helpers.agreement.negotiation import (
    AdmittedBatch,
    AgreementError,
    Attempt,
    AttemptTerms,
    Disputed,
    Negotiation,
    TooFewReports,
)
from mpc_helpers.agreement.voting import state_message
from mpc_helpers.identity.config import Limits
from mpc_helpers.identity.membership import Membership
from mpc_helpers.ledger.attempt import AttemptOutcome, Failpoint, QueryName
from mpc_helpers.ledger.ledger import ReportLedger
from mpc_helpers.mpc.noisy_sum import SumTerms
from mpc_helpers.mpc.session import MpcError, Stage
from protocol.answer import AnswerShare
from protocol.errors import ErrorKind, HelperError
from protocol.field import Vector
from protocol.left_out import encode_left_out
from protocol.net.listening import cancel_all
from protocol.query import Query
from protocol.shares import PARTIES
from protocol.status import QueryState

_LOG = logging.getLogger(__name__)
T = TypeVar("T")

RETRY_SECONDS = 0.1
LONGEST_RETRY = 300.0


class AttemptFailed(HelperError):
    """An attempt was aborted and its reports are free again: it may be retried."""

    kind = ErrorKind.ABORTED


class QueryProgress(Protocol):
    """Receives a query's progress; `enter` persists the state."""

    async def enter(self, state: QueryState, /) -> None: ...

    def advance(self, amount: int, /) -> None: ...


class NoisySum(Protocol):
    """The MPC session of one attempt, with noise of its own."""

    async def add(self, attempt: Attempt, share: Vector, seconds: float) -> Vector:
        """Return this helper's share of sum + noise, computed with both peers."""
        ...


Sessions = Callable[[SumTerms], AbstractAsyncContextManager[NoisySum]]


class Helper:
    """The helper with party number `membership.party`."""

    def __init__(
        self,
        membership: Membership,
        limits: Limits,
        admission: Admission,
        agreement: Agreement,
        sessions: Sessions,
        clock: Callable[[], int],
        *,
        failpoint: Callable[[Failpoint], None] = lambda _: None,
    ) -> None:
        self._membership = membership
        self._limits = limits
        self._admission = admission
        self._agreement = agreement
        self._sessions = sessions
        self._clock = clock
        self.failpoint = failpoint

    async def answer(self, query: Query, column: Path, progress: QueryProgress) -> None:
        """*Admit · Agree · Spend · Sum · Noise · Open.* Return once this helper's share is released, else raise.

        Requires that the query is authenticated and that the column has the root that it signs. An attempt that fails
        in its MPC, or is aborted, frees its reports and is retried until the deadline; the ledger counts its draw.
        """
        admitted: AdmittedColumn | None = None
        failed: list[HelperError] = []
        deadline = self._monotonic_deadline(query)
        # An attempt voted for before a restart must end first, without a timeout: a peer may have released it.
        outcome = await self._agreement.outcome(QueryName.of(query).key)
        while outcome is not AttemptOutcome.RELEASED:
            self._check_deadline(query, deadline, failed)
            try:
                # Each attempt has a worker of its own. One that starts early draws noise of `local` while Admit runs.
                async with self._sessions(SumTerms.of(query)) as session:
                    # Admit: open, check and sum the reports. Once, for all attempts.
                    admitted = admitted or await self._admit(query, column, progress)
                    # Agree: with both peers, on the reports that all three admitted and have enough left of.
                    agreed = await self._agree(query, admitted, deadline, progress)
                    # Spend: reserve them durably at all three, before the first byte of the MPC.
                    async with self._agreement.spend(agreed) as attempt:
                        # Sum: this helper's share of the histogram, without communication.
                        share = await self._sum(admitted, attempt, progress)
                        # Noise: add it to the shares. The only MPC.
                        noisy = await self._add_noise(query, attempt, session, share)
                        # Open: vote, and release to the querier alone once both peers voted YES.
                        outcome = await self._open(query, attempt, noisy, progress)
            except (MpcError, AttemptFailed) as failure:
                _raise_if_final(failure)
                await self._back_off(query, failed, failure)
            except AgreementError as error:
                raise _with_earlier_failure(failed, error) from None

    async def stored_answer(self, query: Query) -> tuple[bytes, tuple[bytes, ...]] | None:
        """Return the sealed share and the signed YES votes of all three, or None if not released. Idempotent."""
        record = await self._in_ledger(lambda ledger: ledger.attempts.released(QueryName.of(query).key))
        if record is None or record.sealed_share is None:
            return None
        self.failpoint(Failpoint.ANSWER_BEFORE_SEND)
        state = state_message(self._agreement.parties, record.attempt_id, record)
        return record.sealed_share, tuple(vote.encode() for vote in state.votes)

    async def forget_answer(self, query: Query) -> None:
        """Erase the released share; the reports stay spent."""
        await self._in_ledger(lambda ledger: ledger.moves.forget_answer(QueryName.of(query).key))

    async def has_live_attempt(self, query: Query) -> bool:
        """Return whether some attempt at the query is not aborted: it has, or may still get, its answer."""
        return await self._in_ledger(lambda ledger: ledger.attempts.live(QueryName.of(query).key)) is not None

    async def _in_ledger(self, call: Callable[[ReportLedger], T]) -> T:
        return await self._agreement.offload(lambda: call(self._agreement.ledger))

    # The phases, in order.

    async def _admit(self, query: Query, column: Path, progress: QueryProgress) -> AdmittedColumn:
        async with self._admission.turn(query.site):
            await progress.enter(QueryState.ADMITTING)
            return await self._admission.admit(query, column, self._clock(), progress.advance)

    async def _agree(
        self, query: Query, admitted: AdmittedColumn, latest: float, progress: QueryProgress
    ) -> Negotiation:
        """Agree on the reports to count. Too few, or too many rejected ones, fail before anything is spent."""
        await progress.enter(QueryState.AGREEING)
        tolerated = query.batch_size * query.tolerated_bad_permille // 1000
        minimum = max(self._limits.minimum_reports, query.minimum_reports, query.batch_size - tolerated)
        noise = SumTerms.of(query)
        terms = AttemptTerms.of(query, noise.digest, minimum, noise.most_draws)
        deadline = min(latest, self._monotonic() + query.deadline - self._clock())
        return await self._agreement.agree(terms, _batch(query, admitted), deadline)

    async def _sum(self, admitted: AdmittedColumn, attempt: Attempt, progress: QueryProgress) -> Vector:
        await progress.enter(QueryState.COMPUTING)
        return await asyncio.to_thread(admitted.shamir_share, attempt.accepted)

    async def _add_noise(self, query: Query, attempt: Attempt, session: NoisySum, share: Vector) -> Vector:
        drawing = SumTerms.of(query).allowance
        seconds = max(1.0, min(self._limits.mpc_seconds + 2 * drawing, query.deadline - self._clock()))
        return await self._unless_aborted(attempt, session.add(attempt, share, seconds))

    async def _unless_aborted(self, attempt: Attempt, work: Awaitable[T]) -> T:
        """Return the result of `work`, or raise if a peer aborts the attempt first."""
        working, ended = asyncio.ensure_future(work), asyncio.ensure_future(attempt.ended.wait())
        try:
            # Yield, so that the work has begun when the failpoint fires.
            await asyncio.sleep(0)
            self.failpoint(Failpoint.COMPUTE)
            await asyncio.wait({working, ended}, return_when=asyncio.FIRST_COMPLETED)
            # If both are done, take the result: the vote is fenced if the attempt was aborted.
            if not working.done():
                raise await self._abort_error(attempt, "aborted the attempt")
            return working.result()
        finally:
            await cancel_all([working, ended])

    async def _open(self, query: Query, attempt: Attempt, noisy: Vector, progress: QueryProgress) -> AttemptOutcome:
        await progress.enter(QueryState.VOTING)
        outcome = await self._agreement.commit(attempt, self._seal(query, attempt, noisy))
        if outcome is AttemptOutcome.ABORTED:
            raise await self._abort_error(attempt, "aborted the attempt instead of voting for it")
        return outcome

    async def _abort_error(self, attempt: Attempt, what: str) -> AttemptFailed:
        # Its signed NO proves that it aborted, not that it had no cause: the third may have sent it something false.
        party = await self._agreement.aborted_by(attempt)
        if party is None:
            return AttemptFailed(f"another helper {what}")
        third = PARTIES - party - self._membership.party
        return AttemptFailed(f"helper {party + 1} {what}: it is at fault, or helper {third + 1}")

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

    def _monotonic(self) -> float:
        return asyncio.get_running_loop().time()

    def _monotonic_deadline(self, query: Query) -> float:
        """Return the deadline on the monotonic clock, immune to wall-clock steps."""
        return self._monotonic() + min(query.deadline - self._clock(), self._limits.seconds)

    def _check_deadline(self, query: Query, deadline: float, failed: list[HelperError]) -> None:
        """Raise if the deadline has passed on either clock: no attempt begins after it."""
        if self._clock() >= query.deadline or self._monotonic() >= deadline:
            message = "the query's deadline has passed; nothing was spent"
            error = AgreementError(message, "Ask again: trefoil query --new", kind=ErrorKind.EXPIRED)
            raise _with_earlier_failure(failed, error)

    async def _back_off(self, query: Query, failed: list[HelperError], failure: HelperError) -> None:
        left = query.deadline - self._clock()
        if left <= 0:
            raise failure
        failed.append(failure)
        _LOG.warning("an attempt failed, retrying: %s", failure)
        # Exponential backoff that survives restarts (the exponent is the durable draw count), so that a malicious
        # helper cannot force unbounded ledger writes.
        draws = await self._in_ledger(lambda ledger: ledger.attempts.draws(QueryName.of(query).key))
        await asyncio.sleep(min(RETRY_SECONDS * 2 ** min(draws, 20), LONGEST_RETRY, left))


def _raise_if_final(failure: HelperError) -> None:
    """Re-raise what no retry mends: a blocked port, and a failed proof, of which each retry could pass a false one."""
    if isinstance(failure, MpcError) and failure.stage is Stage.PROOF:
        _LOG.error("ALARM: %s", failure)
        raise failure
    if isinstance(failure, MpcError) and failure.stage is Stage.PORT:
        raise failure


def _with_earlier_failure(failed: list[HelperError], error: AgreementError) -> AgreementError:
    """Return `error` with the last attempt's failure added, which often explains a missed deadline."""
    if not failed or isinstance(error, Disputed | TooFewReports):
        return error
    blamed = failed[-1].party if error.party is None else error.party
    return AgreementError(f"{error}; before that: {failed[-1]}", error.hint, party=blamed, kind=error.kind)


def _batch(query: Query, admitted: AdmittedColumn) -> AdmittedBatch:
    return AdmittedBatch(
        query.batch_root,
        admitted.digests,
        admitted.hours,
        admitted.debug,
        admitted.summed,
        admitted.rejections(),
        admitted if query.shape.checked else None,
        admitted.reasons,
        admitted.amounts,
        site=query.site,
    )

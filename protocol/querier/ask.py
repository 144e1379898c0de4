"""One query from the querier's side: submit it, poll the helpers, fetch and verify the answer.

Run by a site, or by someone who measures for it. All three helpers must respond. Every failure is a `QueryFailed` that
names the stage and the helpers. An answer is accepted only if each share is signed by its helper for this query, comes
with the votes of all three on its attempt, and the three shares are consistent.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from protocol.answer import Answer, AnswerShare, combine
from protocol.batch import BatchReader
from protocol.errors import ErrorKind, ProtocolError
from protocol.helper_set import HelperSet
from protocol.keys import IdentityKey
from protocol.net.json_message import JsonObject
from protocol.querier.connections import HelperConnections
from protocol.querier.failure import QueryFailed, refusal
from protocol.querier.result import QueryResult, assess
from protocol.querier.saved_query import SavedQuery
from protocol.query import Query, Withdrawal
from protocol.shares import PARTIES
from protocol.status import QueryState, QueryStatus
from protocol.vote import SignedVote, check_release

T = TypeVar("T")

REQUEST_SECONDS = 30.0
# Time limit for an unreachable helper while the query runs: long enough for a restart.
PATIENCE_SECONDS = 30.0
# The same before it has the query, if another helper has responded: long enough to load a new helper set.
SUBMIT_RETRY_SECONDS = 5.0
# How long after the query's deadline to wait for the helpers' final status.
GRACE_SECONDS = 15
# How long to wait for the other helpers' status once one has failed.
GATHER_SECONDS = 2.0
FIRST_POLL, LAST_POLL = 0.05, 0.5

OnStatus = Callable[[Mapping[int, QueryStatus]], None]


@dataclass(slots=True)
class _Progress:
    """The latest status of each helper, and since when one has been unreachable or has failed."""

    started: float
    statuses: dict[int, QueryStatus] = field(default_factory=dict)
    unreachable_since: dict[int, float] = field(default_factory=dict)
    failed_since: float = 0.0

    @property
    def states(self) -> dict[int, QueryState]:
        return {party: status.state for party, status in self.statuses.items()}

    @property
    def all_ended(self) -> bool:
        return len(self.statuses) == PARTIES and all(state.ended for state in self.states.values())


class Querier:
    """The client of three helpers. `patience` is the time limit for an unreachable helper, in seconds."""

    def __init__(
        self,
        helper_set: HelperSet,
        *,
        clock: Callable[[], float] = time.time,  # noqa: TID251 - an edge: the querier's own clock, replaced in tests
        patience: float = PATIENCE_SECONDS,
        request_seconds: float = REQUEST_SECONDS,
    ) -> None:
        self.helper_set = helper_set
        self._clock = clock
        self._patience = patience
        self._request_seconds = request_seconds

    async def ask(self, saved: SavedQuery, batch: BatchReader, on_status: OnStatus = lambda _: None) -> QueryResult:
        """Run a whole query: *Submit · Follow · Collect*. Idempotent: the helpers answer a query id once."""
        seconds: dict[str, float] = {}
        async with HelperConnections(self.helper_set, self._request_seconds) as helpers:
            # Submit
            with _timed(seconds, "submit"):
                uploaded = await self._submit(helpers, saved, batch)
            return await self._await_answer(helpers, saved, on_status, seconds, uploaded)

    async def fetch(self, saved: SavedQuery, on_status: OnStatus = lambda _: None) -> QueryResult:
        """Return the answer to a query that was submitted before: *Follow · Collect*. Its batch is not needed."""
        async with HelperConnections(self.helper_set, self._request_seconds) as helpers:
            return await self._await_answer(helpers, saved, on_status, {}, 0)

    async def withdraw(self, saved: SavedQuery, site_key: IdentityKey) -> None:
        """Withdraw a query. Two helpers suffice: one of them is honest, and a release needs the votes of all three.

        Raise `QueryFailed` if it is too late, or if two helpers are unreachable.
        """
        body, path = Withdrawal.sign(saved.signed, site_key).encode(), f"{_path(saved.query)}/withdrawal"

        async def withdraw(party: int) -> QueryState:
            return self._read_status(party, await helpers.put(party, path, body)).state

        async with HelperConnections(self.helper_set, self._request_seconds) as helpers:
            outcomes = await _gather(withdraw)
        if list(outcomes.values()).count(QueryState.WITHDRAWN) < PARTIES - 1:
            failures = _failures(outcomes)
            raise _combined("withdrawing", failures, f"the query is not withdrawn: {_reasons(failures)}")

    async def statuses(self, saved: SavedQuery) -> dict[int, QueryStatus | QueryFailed]:
        """Return each helper's status of a query, or the error of the request."""

        async def status(party: int) -> QueryStatus:
            return self._read_status(party, await helpers.get(party, _path(saved.query)))

        async with HelperConnections(self.helper_set, self._request_seconds) as helpers:
            return await _gather(status)

    async def _await_answer(
        self,
        helpers: HelperConnections,
        saved: SavedQuery,
        on_status: OnStatus,
        seconds: dict[str, float],
        uploaded: int,
    ) -> QueryResult:
        # Follow
        with _timed(seconds, "wait"):
            statuses = await self._follow(helpers, saved.query, on_status)
        # Collect
        with _timed(seconds, "collect"):
            answer = await self._collect(helpers, saved)
        for state in sorted({state for status in statuses.values() for state in status.seconds}, key=lambda s: s.value):
            seconds[state.value] = max(status.seconds.get(state, 0.0) for status in statuses.values())
        return assess(saved.query, answer, seconds, uploaded)

    async def _submit(self, helpers: HelperConnections, saved: SavedQuery, batch: BatchReader) -> int:
        """Submit the query to all three, upload the column to each that lacks it, and return the bytes uploaded."""
        body, path = saved.signed.encode(), _path(saved.query)

        async def submit(party: int) -> QueryStatus:
            return self._read_status(party, await helpers.put(party, path, body))

        statuses = await self._submit_to_all(submit)
        order = await asyncio.to_thread(batch.order)
        missing = {party for party, status in statuses.items() if status.state is QueryState.AWAITING}

        async def upload(party: int) -> int:
            size, pieces = batch.column_size(party), _pieces(batch.column(party, order))
            remaining = saved.query.deadline - self._clock()
            try:
                sent = await helpers.upload(party, f"{path}/column", pieces, size, saved.permits[party], remaining)
                self._read_status(party, sent)
            except QueryFailed as error:
                # The column may have arrived although the response was lost.
                if not error.unreachable or (await submit(party)).state is QueryState.AWAITING:
                    raise
            return size

        outcomes = await _gather(lambda party: _retry_unreachable(self._patience, upload, party), missing)
        return sum(_all("uploading", outcomes).values())

    async def _submit_to_all(self, submit: Callable[[int], Awaitable[QueryStatus]]) -> dict[int, QueryStatus]:
        """Submit the query to all three. Retry the unreachable ones briefly if every other helper accepted it."""
        outcomes = await _gather(submit)
        failures = _failures(outcomes)
        unreachable = {party for party, failure in failures.items() if failure.unreachable}
        if unreachable and len(unreachable) == len(failures) < PARTIES:
            seconds = min(SUBMIT_RETRY_SECONDS, self._patience)
            outcomes |= await _gather(lambda party: _retry_unreachable(seconds, submit, party), unreachable)
        return _all("submitting", outcomes, first_contact=True)

    async def _follow(self, helpers: HelperConnections, query: Query, on_status: OnStatus) -> Mapping[int, QueryStatus]:
        """Poll all three until each has ended, or the deadline has passed.

        The deadline does not matter once all three have released: the budget is spent, so the answer is fetched.
        """
        progress = _Progress(self._clock())
        pause = FIRST_POLL
        while True:
            before = progress.states
            await asyncio.gather(*(self._poll(helpers, query, party, progress) for party in range(PARTIES)))
            on_status(progress.statuses)
            self._raise_failures(query, progress)
            if progress.all_ended:
                return progress.statuses
            # Admission may take long and the stages after it are short, so poll faster after each transition.
            pause = min(LAST_POLL, pause * 1.3) if progress.states == before else FIRST_POLL
            await asyncio.sleep(pause)

    async def _poll(self, helpers: HelperConnections, query: Query, party: int, progress: _Progress) -> None:
        try:
            status = self._read_status(party, await helpers.get(party, _path(query)))
        except QueryFailed as error:
            if error.http_status:
                raise
            progress.unreachable_since.setdefault(party, self._clock())
            return
        progress.statuses[party] = status
        progress.unreachable_since.pop(party, None)
        if status.failure is not None:
            progress.failed_since = progress.failed_since or self._clock()

    def _raise_failures(self, query: Query, progress: _Progress) -> None:
        now = self._clock()
        failed = {party: status for party, status in progress.statuses.items() if status.failure is not None}
        # Wait for the others first: their status may say more about the cause.
        if failed and (progress.all_ended or now - progress.failed_since > GATHER_SECONDS):
            raise refusal(failed, [helper.name for helper in self.helper_set.helpers])
        since = progress.unreachable_since
        gone = tuple(sorted(party for party, start in since.items() if now - start > self._patience))
        if gone:
            message = f"{self._names(gone)} has not responded for {self._patience:g} s"
            hint = "Run the same command again: the query resumes."
            raise QueryFailed("waiting", gone, message, hint, kind=ErrorKind.UNREACHABLE)
        slow = tuple(party for party, state in sorted(progress.states.items()) if not state.ended)
        # A querier that resumes long after the deadline waits as long as one that polled until then.
        if slow and now > max(query.deadline, progress.started) + GRACE_SECONDS:
            stage = ", ".join(sorted({progress.states[party].value for party in slow}))
            message = f"the deadline has passed and {self._names(slow)} has not finished ({stage})"
            hint = "The same command fetches an answer that comes late; --new submits a new query instead."
            raise QueryFailed(stage, slow, message, hint, kind=ErrorKind.TIMEOUT)

    async def _collect(self, helpers: HelperConnections, saved: SavedQuery) -> Answer:
        path = f"{_path(saved.query)}/answer"

        async def collect(party: int) -> object:
            return await helpers.get(party, path)

        answers = _all("collecting", await _gather(lambda party: _retry_unreachable(self._patience, collect, party)))
        return combine(saved.query, [self._open(party, answers[party], saved) for party in range(PARTIES)])

    def _open(self, party: int, stored: object, saved: SavedQuery) -> AnswerShare:
        """Open one helper's share; verify its signature for this query, and three YES votes on its attempt."""
        name = self._names((party,))
        try:
            answer = JsonObject(stored, "answer")
            sealed = answer.hexadecimal("share")
            share = AnswerShare.open(party, sealed, saved.query, saved.answer_key, self.helper_set)
        except ProtocolError as error:
            message = f"the answer share of {name} cannot be used: {error}"
            hint = f"Do not use this answer. If {name} runs another release of Trefoil, query it with that one."
            raise QueryFailed("opening", (party,), message, hint, kind=ErrorKind.NOT_OPENED) from None
        try:
            # COMMIT.md. The attempt id covers the query, and so its set and debug flag.
            votes = [SignedVote.decode(vote) for vote in answer.hexadecimals("votes")]
            check_release(votes, share.attempt_id, [helper.identity_key for helper in self.helper_set.helpers])
        except ProtocolError as error:
            message = f"{name} does not prove that all three helpers voted for this answer: {error}"
            raise QueryFailed("opening", (party,), message, "Do not use this answer.", kind=error.kind) from None
        return share

    def _read_status(self, party: int, stored: object) -> QueryStatus:
        try:
            return QueryStatus.from_json(stored)
        except ProtocolError as error:
            message = f"the response of {self._names((party,))} is not a status: {error}"
            raise QueryFailed("asking", (party,), message, http_status=200, kind=ErrorKind.MALFORMED) from None

    def _names(self, parties: tuple[int, ...]) -> str:
        return " and ".join(self.helper_set.helpers[party].name for party in parties)


async def _retry_unreachable(seconds: float, call: Callable[[int], Awaitable[T]], party: int) -> T:
    """Retry a request for up to `seconds` (monotonic clock) while the helper is unreachable.

    A helper refuses connections for a moment when it restarts or loads a new helper set.
    """
    monotonic = asyncio.get_running_loop().time
    end: float | None = None
    while True:
        try:
            return await call(party)
        except QueryFailed as error:
            # Counted from the first failure: the interrupted request may have been a long upload.
            end = monotonic() + seconds if end is None else end
            if not error.unreachable or monotonic() + LAST_POLL > end:
                raise
        await asyncio.sleep(LAST_POLL)


async def _gather(
    call: Callable[[int], Awaitable[T]], parties: Iterable[int] = range(PARTIES)
) -> dict[int, T | QueryFailed]:
    """Send the same request to several helpers at once and wait for every outcome."""
    order = tuple(parties)
    results = await asyncio.gather(*map(call, order), return_exceptions=True)
    outcomes: dict[int, T | QueryFailed] = {}
    for party, result in zip(order, results, strict=True):
        if isinstance(result, BaseException) and not isinstance(result, QueryFailed):
            raise result
        outcomes[party] = result
    return outcomes


def _failures(outcomes: Mapping[int, T | QueryFailed]) -> dict[int, QueryFailed]:
    return {party: each for party, each in outcomes.items() if isinstance(each, QueryFailed)}


def _all(stage: str, outcomes: Mapping[int, T | QueryFailed], *, first_contact: bool = False) -> dict[int, T]:
    """Return the three results, or raise one error that combines all failures.

    `first_contact`: helpers learn of the query by this request, so that three refusals mean that none of them has it.
    """
    failures = _failures(outcomes)
    if failures:
        taken = not first_contact or len(failures) < PARTIES or not all(error.refused for error in failures.values())
        raise _combined(stage, failures, f"{stage}: {_reasons(failures)}", taken=taken)
    return {party: each for party, each in outcomes.items() if not isinstance(each, QueryFailed)}


def _combined(stage: str, failures: Mapping[int, QueryFailed], message: str, *, taken: bool = True) -> QueryFailed:
    """Return one error for several helpers, with the first hint, and the status and kind of the worst failure."""
    hint = next((error.hint for error in failures.values() if error.hint), "")
    worst = max(failures.values(), key=lambda error: error.http_status, default=None)
    status, kind = (worst.http_status, worst.kind) if worst else (0, ErrorKind.REFUSED)
    return QueryFailed(stage, tuple(failures), message, hint, http_status=status, taken=taken, kind=kind)


def _reasons(failures: Mapping[int, QueryFailed]) -> str:
    """Return each helper's reason under its name, or the common reason once if all three agree."""
    reasons = {error.reason for error in failures.values()}
    if len(failures) == PARTIES and len(reasons) == 1 and "" not in reasons:
        return f"all three helpers answer: {reasons.pop()}"
    return "; ".join(dict.fromkeys(str(error) for error in failures.values()))


def _path(query: Query) -> str:
    """Return the URL path of a query: its digest, which only a holder of the query can know."""
    return f"/v1/queries/{query.digest.hex()}"


async def _pieces(column: Iterator[bytes]) -> AsyncIterator[bytes]:
    """Yield a column in pieces, each produced in a thread when it is due."""
    while piece := await asyncio.to_thread(next, column, b""):
        yield piece


@contextlib.contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    start = time.perf_counter()
    try:
        yield
    finally:
        seconds[name] = time.perf_counter() - start

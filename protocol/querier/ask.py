"""Asking: a batch is cut into three columns, the signed query submitted and followed, and only what fits is believed.

The querier needs all three helpers. Whatever goes wrong is a `QueryFailed` that names the stage and the helpers.
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
from protocol.errors import ProtocolError
from protocol.helper_set import HelperSet
from protocol.keys import IdentityKey
from protocol.querier.connections import HelperConnections
from protocol.querier.query_failed import QueryFailed
from protocol.querier.refusal import refusal
from protocol.querier.saved_query import SavedQuery
from protocol.querier.worth import QueryResult, worth
from protocol.query import Query
from protocol.shares import PARTIES
from protocol.status import QueryState, QueryStatus
from protocol.vote import SignedVote, check_release
from protocol.withdrawal import Withdrawal

T = TypeVar("T")

REQUEST_SECONDS = 30.0
# How long a helper may be out of reach while the query runs: long enough for a restart.
PATIENCE_SECONDS = 30.0
# And before it has the query, if another helper has answered: long enough for taking up a new helper set.
DOOR_SECONDS = 5.0
# After the query's own deadline helpers have this long to say how it ended.
GRACE_SECONDS = 15
# When one has failed, the others have this long to say what they know.
GATHER_SECONDS = 2.0
FIRST_POLL, LAST_POLL = 0.05, 0.5

OnStatus = Callable[[Mapping[int, QueryStatus]], None]


@dataclass(slots=True)
class _Seen:
    """What the three have said so far, and since when one has been silent or has failed."""

    since: float
    statuses: dict[int, QueryStatus] = field(default_factory=dict)
    out_since: dict[int, float] = field(default_factory=dict)
    failed_since: float = 0.0

    @property
    def states(self) -> dict[int, QueryState]:
        return {party: status.state for party, status in self.statuses.items()}

    @property
    def all_ended(self) -> bool:
        return len(self.statuses) == PARTIES and all(state.ended for state in self.states.values())


class Querier:
    """Run by a site (or whoever measures for it) with a batch of reports and a signed query on them."""

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
        """The whole of a query: *Submit · Follow · Collect*. Safe to repeat: the helpers answer a query id once."""
        seconds: dict[str, float] = {}
        async with HelperConnections(self.helper_set, self._request_seconds) as helpers:
            # Submit
            with _timed(seconds, "submit"):
                uploaded = await self._submit(helpers, saved, batch)
            return await self._await_answer(helpers, saved, on_status, seconds, uploaded)

    async def fetch(self, saved: SavedQuery, on_status: OnStatus = lambda _: None) -> QueryResult:
        """*Follow · Collect*: the answer to a query that the helpers have, without its batch."""
        async with HelperConnections(self.helper_set, self._request_seconds) as helpers:
            return await self._await_answer(helpers, saved, on_status, {}, 0)

    async def withdraw(self, saved: SavedQuery, site_key: IdentityKey) -> None:
        """Take a query back. Done when two helpers will never vote for it: one of the two is honest, and all must vote.

        `QueryFailed` if it is too late for that, or if helpers cannot be reached.
        """
        body, path = Withdrawal.sign(saved.signed, site_key).encode(), f"{_path(saved.query)}/withdrawal"

        async def withdraw(party: int) -> QueryState | QueryFailed:
            try:
                return self._read_status(party, await helpers.put(party, path, body)).state
            except QueryFailed as error:
                return error

        async with HelperConnections(self.helper_set, self._request_seconds) as helpers:
            found = await asyncio.gather(*(withdraw(party) for party in range(PARTIES)))
        if found.count(QueryState.WITHDRAWN) < PARTIES - 1:
            failures = {party: each for party, each in enumerate(found) if isinstance(each, QueryFailed)}
            reasons = _reasons(failures)
            hint = next((error.hint for error in failures.values() if error.hint), "")
            worst = max((error.http_status for error in failures.values()), default=0)
            message = f"the query is not withdrawn: {reasons}"
            raise QueryFailed("withdrawing", tuple(failures), message, hint, http_status=worst)

    async def statuses(self, saved: SavedQuery) -> dict[int, QueryStatus | QueryFailed]:
        """Where each helper is with a query, or why it does not say."""

        async def look(helpers: HelperConnections, party: int) -> QueryStatus | QueryFailed:
            try:
                return self._read_status(party, await helpers.get(party, _path(saved.query)))
            except QueryFailed as error:
                return error

        async with HelperConnections(self.helper_set, self._request_seconds) as helpers:
            found = await asyncio.gather(*(look(helpers, party) for party in range(PARTIES)))
        return dict(enumerate(found))

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
        return worth(saved.query, answer, seconds, uploaded)

    async def _submit(self, helpers: HelperConnections, saved: SavedQuery, batch: BatchReader) -> int:
        """The signed query to all three, then its column to whoever has none yet. Returns the bytes uploaded."""
        body, path = saved.signed.encode(), _path(saved.query)

        async def submit(party: int) -> QueryStatus:
            return self._read_status(party, await helpers.put(party, path, body))

        statuses = await self._introduce(submit)
        order = await asyncio.to_thread(batch.order)
        missing = {party for party, status in statuses.items() if status.state is QueryState.AWAITING}

        async def upload(party: int) -> int:
            size, pieces = batch.column_size(party), _pieces(batch.column(party, order))
            left = saved.query.deadline - self._clock()
            permit = saved.permits[party] if saved.permits else b""
            try:
                self._read_status(party, await helpers.upload(party, f"{path}/column", pieces, size, permit, left))
            except QueryFailed as error:
                # It may have arrived all the same.
                if not error.out_of_reach or (await submit(party)).state is QueryState.AWAITING:
                    raise
            return size

        async def upload_if_missing(party: int) -> int:
            return await _patiently(self._patience, upload, party) if party in missing else 0

        return sum((await _each("uploading", upload_if_missing)).values())

    async def _introduce(self, submit: Callable[[int], Awaitable[QueryStatus]]) -> dict[int, QueryStatus]:
        """The query to all three. If whoever can be reached takes it, the others may be about to be back."""
        found = await _gathered(submit)
        failures = {party: each for party, each in found.items() if isinstance(each, QueryFailed)}
        closed = {party for party, failure in failures.items() if failure.out_of_reach}
        if closed and len(closed) == len(failures) < PARTIES:
            seconds = min(DOOR_SECONDS, self._patience)
            found |= await _gathered(lambda party: _patiently(seconds, submit, party), closed)
        return _all("submitting", found, introduces=True)

    async def _follow(self, helpers: HelperConnections, query: Query, on_status: OnStatus) -> Mapping[int, QueryStatus]:
        """Ask all three where they are until each has ended, or the deadline has passed.

        An answer is fetched whenever all three have released it, however late: what was paid for is had.
        """
        seen = _Seen(self._clock())
        pause = FIRST_POLL
        while True:
            before = seen.states
            await asyncio.gather(*(self._poll(helpers, query, party, seen) for party in range(PARTIES)))
            on_status(seen.statuses)
            self._raise_failures(query, seen)
            if seen.all_ended:
                return seen.statuses
            # Opening reports may take long; what follows is over in moments.
            pause = min(LAST_POLL, pause * 1.3) if seen.states == before else FIRST_POLL
            await asyncio.sleep(pause)

    async def _poll(self, helpers: HelperConnections, query: Query, party: int, seen: _Seen) -> None:
        try:
            status = self._read_status(party, await helpers.get(party, _path(query)))
        except QueryFailed as error:
            if error.http_status:
                raise
            seen.out_since.setdefault(party, self._clock())
            return
        seen.statuses[party] = status
        seen.out_since.pop(party, None)
        if status.failure is not None:
            seen.failed_since = seen.failed_since or self._clock()

    def _raise_failures(self, query: Query, seen: _Seen) -> None:
        now = self._clock()
        failed = {party: status for party, status in seen.statuses.items() if status.failure is not None}
        # The others may be about to say more about what went wrong.
        if failed and (seen.all_ended or now - seen.failed_since > GATHER_SECONDS):
            raise refusal(failed, [helper.name for helper in self.helper_set.helpers])
        gone = tuple(sorted(party for party, since in seen.out_since.items() if now - since > self._patience))
        if gone:
            message = f"{self._names(gone)} cannot be reached since {self._patience:g} s"
            raise QueryFailed("waiting", gone, message, "Ask again with the same command: the query resumes.")
        slow = tuple(party for party, state in sorted(seen.states.items()) if not state.ended)
        # Whoever asks long after the deadline gives the helpers as much time as one who waited for it.
        if slow and now > max(query.deadline, seen.since) + GRACE_SECONDS:
            where = ", ".join(sorted({seen.states[party].value for party in slow}))
            message = f"the deadline has passed and {self._names(slow)} has not ended ({where})"
            raise QueryFailed(where, slow, message, "Ask again later with the same command: nothing is lost by it.")

    async def _collect(self, helpers: HelperConnections, saved: SavedQuery) -> Answer:
        """Fetch, open and check the three shares."""
        path = f"{_path(saved.query)}/answer"

        async def collect(party: int) -> object:
            return await helpers.get(party, path)

        answers = await _each("collecting", lambda party: _patiently(self._patience, collect, party))
        return combine(saved.query, [self._opened(party, answers[party], saved) for party in range(PARTIES)])

    def _opened(self, party: int, stored: object, saved: SavedQuery) -> AnswerShare:
        """One helper's share, if it signed it for this query and shows the YES of all three on its attempt."""
        name = self._names((party,))
        try:
            sealed, votes = _read_answer(stored)
            share = AnswerShare.open(party, sealed, saved.query, saved.answer_key, self.helper_set)
        except ProtocolError as error:
            message = f"the answer share of {name} cannot be used: {error}"
            hint = f"Do not use this answer. If {name} runs another release of Trefoil, ask with that one."
            raise QueryFailed("opening", (party,), message, hint) from None
        try:
            self._check_votes(votes, share)
        except ProtocolError as error:
            message = f"{name} does not show that all three helpers voted for this answer: {error}"
            raise QueryFailed("opening", (party,), message, "Do not use this answer.") from None
        return share

    def _check_votes(self, votes: object, share: AnswerShare) -> None:
        """COMMIT.md: released only with three YES. The attempt id covers the query, and so its set and debug flag."""
        keys = [helper.identity_key for helper in self.helper_set.helpers]
        check_release(_read_votes(votes), share.attempt_id, keys)

    def _read_status(self, party: int, stored: object) -> QueryStatus:
        try:
            return QueryStatus.from_json(stored)
        except ProtocolError as error:
            message = f"{self._names((party,))} answers with what is no status: {error}"
            raise QueryFailed("asking", (party,), message, http_status=200) from None

    def _names(self, parties: tuple[int, ...]) -> str:
        return " and ".join(self.helper_set.helpers[party].name for party in parties)


async def _patiently(seconds: float, call: Callable[[int], Awaitable[T]], party: int) -> T:
    """A request that is made again for some seconds while the helper is out of reach.

    Its door is closed for a moment when it restarts or takes up a new helper set. By the steady clock, as any wait.
    """
    steady = asyncio.get_running_loop().time
    end: float | None = None
    while True:
        try:
            return await call(party)
        except QueryFailed as error:
            # From its first failure on: what was cut off may have been a long upload.
            end = steady() + seconds if end is None else end
            if not error.out_of_reach or steady() + LAST_POLL > end:
                raise
        await asyncio.sleep(LAST_POLL)


async def _each(stage: str, call: Callable[[int], Awaitable[T]]) -> dict[int, T]:
    """The same request to all three at once; every failure is gathered before any is raised."""
    return _all(stage, await _gathered(call))


async def _gathered(
    call: Callable[[int], Awaitable[T]], parties: Iterable[int] = range(PARTIES)
) -> dict[int, T | QueryFailed]:
    asked = tuple(parties)
    results = await asyncio.gather(*map(call, asked), return_exceptions=True)
    found: dict[int, T | QueryFailed] = {}
    for party, result in zip(asked, results, strict=True):
        if isinstance(result, BaseException) and not isinstance(result, QueryFailed):
            raise result
        found[party] = result
    return found


def _all(stage: str, found: Mapping[int, T | QueryFailed], *, introduces: bool = False) -> dict[int, T]:
    """What all three answered, or one error with all that went wrong.

    `introduces`: it was the request by which helpers learn of the query, so that three refusals mean that none has it.
    """
    failures = {party: each for party, each in found.items() if isinstance(each, QueryFailed)}
    if failures:
        hint = next((error.hint for error in failures.values() if error.hint), "")
        reasons = _reasons(failures)
        worst = max(error.http_status for error in failures.values())
        taken = not introduces or len(failures) < PARTIES or not all(error.refused for error in failures.values())
        raise QueryFailed(stage, tuple(failures), f"{stage}: {reasons}", hint, http_status=worst, taken=taken)
    return {party: each for party, each in found.items() if not isinstance(each, QueryFailed)}


def _reasons(failures: Mapping[int, QueryFailed]) -> str:
    """Why helpers failed, each under its name; what all three answer alike is said once."""
    said = {error.said for error in failures.values()}
    if len(failures) == PARTIES and len(said) == 1 and "" not in said:
        return f"all three helpers answer: {said.pop()}"
    return "; ".join(dict.fromkeys(str(error) for error in failures.values()))


def _read_answer(stored: object) -> tuple[bytes, object]:
    """The sealed share, and what should be votes."""
    if not isinstance(stored, dict) or not isinstance(share := stored.get("share"), str):
        raise ProtocolError("there is no share in it")
    try:
        return bytes.fromhex(share), stored.get("votes")
    except ValueError:
        raise ProtocolError("it is not hexadecimal") from None


def _read_votes(stored: object) -> list[SignedVote]:
    if not isinstance(stored, list):
        raise ProtocolError("there is no list of votes")
    try:
        return [SignedVote.decode(bytes.fromhex(vote)) for vote in stored]
    except (TypeError, ValueError):
        raise ProtocolError("a vote is not hexadecimal") from None


def _path(query: Query) -> str:
    """Queries are named by their digest: who does not hold the query cannot guess it, and so cannot follow it."""
    return f"/v1/queries/{query.digest.hex()}"


async def _pieces(column: Iterator[bytes]) -> AsyncIterator[bytes]:
    """A column as it is sent, cut while it is sent, in a thread."""
    while piece := await asyncio.to_thread(next, column, b""):
        yield piece


@contextlib.contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    start = time.perf_counter()
    try:
        yield
    finally:
        seconds[name] = time.perf_counter() - start

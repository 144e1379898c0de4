"""The querier: cuts a batch into three columns, submits her signed query, follows it, and believes only what fits.

She talks to each helper over HTTPS with the certificate that the helper set pins, and needs all three. Whatever goes
wrong is an error that names the stage and the helpers.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import aiohttp

from protocol.answer import Answer, AnswerShare, combine
from protocol.batch import BatchReader
from protocol.errors import ProtocolError, TrefoilError
from protocol.helper_set import HelperSet
from protocol.noise_scale import half_width, standard_deviation
from protocol.querier.bias import BiasBound, bias_bound
from protocol.querier.saved_query import AskedQuery
from protocol.query import Query
from protocol.shares import PARTIES
from protocol.vote import SignedVote, check_release, realm

T = TypeVar("T")

REQUEST_SECONDS = 30.0
# How long a helper may be out of reach while the query runs: long enough for a restart.
PATIENCE_SECONDS = 30.0
# After the query's own deadline helpers have this long to say how it ended.
GRACE_SECONDS = 15
# When one has failed, the others have this long to say what they know.
GATHER_SECONDS = 2.0
FIRST_POLL, LAST_POLL = 0.05, 0.5
MAX_ANSWER = 2**24
CONFIDENCE = 0.95
BIAS_BETA = 0.05
_BAD_ENDS = ("failed", "disputed")
_ENDS = ("released", *_BAD_ENDS)

Clock = Callable[[], float]
Report = Callable[[Mapping[int, "HelperStatus"]], None]


class QueryFailed(TrefoilError):
    """The query has no answer. Names the stage, and the helpers it failed at (0, 1, 2)."""

    def __init__(self, stage: str, helpers: tuple[int, ...], message: str, hint: str = "", *, status: int = 0) -> None:
        super().__init__(message, hint)
        self.stage = stage
        self.helpers = helpers
        self.status = status


@dataclass(frozen=True, slots=True)
class HelperStatus:
    """Where one helper is with a query."""

    state: str
    done: int = 0
    total: int = 0
    failure: Mapping[str, Any] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def from_json(cls, stored: object) -> HelperStatus:
        """What a helper says about itself, taken with care: it may say anything."""
        if not isinstance(stored, dict) or not isinstance(stored.get("state"), str):
            raise ProtocolError("a helper's status is malformed")
        done, total = stored.get("done", 0), stored.get("total", 0)
        failure, seconds = stored.get("failure") or {}, stored.get("seconds") or {}
        if not (isinstance(done, int) and isinstance(total, int) and isinstance(failure, dict)):
            raise ProtocolError("a helper's status is malformed")
        if not (isinstance(seconds, dict) and all(isinstance(value, int | float) for value in seconds.values())):
            raise ProtocolError("a helper's status is malformed")
        return cls(stored["state"], done, total, failure, seconds)

    @property
    def ended(self) -> bool:
        """Nothing more will happen."""
        return self.state in _ENDS


@dataclass(slots=True)
class _Seen:
    """What the three have said so far, and since when one has been silent or has failed."""

    statuses: dict[int, HelperStatus] = field(default_factory=dict)
    out_since: dict[int, float] = field(default_factory=dict)
    failed_since: float = 0.0

    @property
    def states(self) -> dict[int, str]:
        return {party: status.state for party, status in self.statuses.items()}

    @property
    def all_ended(self) -> bool:
        return len(self.statuses) == PARTIES and all(status.ended for status in self.statuses.values())


@dataclass(frozen=True, slots=True)
class Result:
    """An answer with what it is worth: noise, interval, bias, and what it cost."""

    query: Query
    answer: Answer
    noise_sd: float
    half_width: int
    bias: BiasBound | None
    seconds: Mapping[str, float]
    uploaded_bytes: int

    def to_json(self) -> dict[str, object]:
        """Everything a person or a program may want of it."""
        answer = self.answer
        return {
            "query_id": self.query.query_id.hex(),
            "site": self.query.site,
            "unit": self.query.unit,
            "debug": self.query.debug,
            "answer": answer.histogram,
            "noise": answer.noise.value,
            "noise_sd": self.noise_sd,
            "confidence": CONFIDENCE,
            "half_width": self.half_width,
            "epsilon_micros": answer.epsilon_micros,
            "sensitivity": answer.sensitivity,
            "reports_submitted": answer.submitted,
            "reports_counted": answer.counted,
            "rejections": [{reason.value: count for reason, count in each.items()} for each in answer.rejections],
            "side_count": answer.side_count,
            "bias_bound": None if self.bias is None else self.bias.bound,
            "uploaded_bytes": self.uploaded_bytes,
            "seconds": dict(self.seconds),
        }


def worth(query: Query, answer: Answer, seconds: Mapping[str, float], uploaded_bytes: int) -> Result:
    """Attach to an answer how far off it may be."""
    if query.debug:
        deviation, half = 0.0, 0
    else:
        deviation = standard_deviation(query.noise, query.gamma)
        half = half_width(query.noise, query.gamma, CONFIDENCE)
    bias = None
    if answer.side_count is not None:
        # A report moves by at most Δ = 2·value when epochs are dropped (Theorem 18); less for one bucket.
        bias = bias_bound(
            answer.side_count, kappa=query.kappa, sigma=deviation, largest_change=query.sensitivity, beta=BIAS_BETA
        )
    return Result(query, answer, deviation, half, bias, seconds, uploaded_bytes)


class Querier:
    """Run by a site (or whoever measures for it) with a batch of reports and a signed query on them."""

    def __init__(
        self,
        helper_set: HelperSet,
        *,
        clock: Clock = time.time,  # noqa: TID251 - an edge: the querier's own clock, replaced in tests
        patience: float = PATIENCE_SECONDS,
        request_seconds: float = REQUEST_SECONDS,
    ) -> None:
        self._helper_set = helper_set
        self._clock = clock
        self._patience = patience
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=request_seconds, sock_read=request_seconds)

    async def ask(self, asked: AskedQuery, batch: BatchReader, report: Report = lambda _: None) -> Result:
        """The whole of a query: *Submit · Follow · Collect*. Safe to repeat: the helpers answer a query id once."""
        seconds: dict[str, float] = {}
        async with self._session() as session:
            # Submit
            with _timed(seconds, "submit"):
                uploaded = await self._submit(session, asked, batch)
            # Follow
            with _timed(seconds, "wait"):
                statuses = await self._follow(session, asked.query, report)
            # Collect
            with _timed(seconds, "collect"):
                answer = await self._collect(session, asked)
        for name in sorted({name for status in statuses.values() for name in status.seconds}):
            seconds[name] = max(status.seconds.get(name, 0.0) for status in statuses.values())
        return worth(asked.query, answer, seconds, uploaded)

    @contextlib.asynccontextmanager
    async def _session(self) -> AsyncIterator[aiohttp.ClientSession]:
        async with aiohttp.ClientSession(timeout=self._timeout) as session:
            yield session

    async def _submit(self, session: aiohttp.ClientSession, asked: AskedQuery, batch: BatchReader) -> int:
        """The signed query to all three, then its column to whoever has none yet. Returns the bytes uploaded."""
        body = asked.signed.encode()
        url = _url(asked.query)
        statuses = await self._each("submitting", lambda party: self._put(session, party, url, body))
        order = await asyncio.to_thread(batch.order)
        missing = {party for party, status in statuses.items() if status.state == "awaiting"}

        async def upload(party: int) -> int:
            if party not in missing:
                return 0
            size = batch.column_size(party)
            await self._put(session, party, f"{url}/column", _pieces(batch.column(party, order)), size)
            return size

        return sum((await self._each("uploading", upload)).values())

    async def _follow(self, session: aiohttp.ClientSession, query: Query, report: Report) -> Mapping[int, HelperStatus]:
        """Ask all three where they are until each has ended, or the deadline has passed."""
        seen = _Seen()
        pause = FIRST_POLL
        while True:
            before = seen.states
            await asyncio.gather(*(self._poll(session, query, party, seen) for party in range(PARTIES)))
            report(seen.statuses)
            self._raise_failures(query, seen)
            if seen.all_ended:
                return seen.statuses
            # Opening reports may take long; what follows is over in moments.
            pause = min(LAST_POLL, pause * 1.3) if seen.states == before else FIRST_POLL
            await asyncio.sleep(pause)

    async def _poll(self, session: aiohttp.ClientSession, query: Query, party: int, seen: _Seen) -> None:
        try:
            status = HelperStatus.from_json(await self._get_json(session, party, _url(query)))
        except QueryFailed as error:
            if error.status:
                raise
            seen.out_since.setdefault(party, self._clock())
            return
        seen.statuses[party] = status
        seen.out_since.pop(party, None)
        if status.state in _BAD_ENDS:
            seen.failed_since = seen.failed_since or self._clock()

    def _raise_failures(self, query: Query, seen: _Seen) -> None:
        now = self._clock()
        failed = {party: status for party, status in seen.statuses.items() if status.state in _BAD_ENDS}
        # The others may be about to say more about what went wrong.
        if failed and (seen.all_ended or now - seen.failed_since > GATHER_SECONDS):
            raise _failure(failed, self._names)
        gone = tuple(sorted(party for party, since in seen.out_since.items() if now - since > self._patience))
        if gone:
            message = f"{self._names(gone)} cannot be reached since {self._patience:g} s"
            raise QueryFailed("waiting", gone, message, "Ask again with the same command: the query resumes.")
        if now > query.deadline + GRACE_SECONDS:
            late = {party: seen.statuses.get(party) for party in range(PARTIES)}
            slow = tuple(party for party, status in late.items() if status is None or not status.ended)
            where = ", ".join(sorted({status.state if (status := late[party]) else "silent" for party in slow}))
            raise QueryFailed(where, slow, f"the deadline has passed and {self._names(slow)} has not ended ({where})")

    async def _collect(self, session: aiohttp.ClientSession, asked: AskedQuery) -> Answer:
        """Fetch, open and check the three shares."""
        url = f"{_url(asked.query)}/answer"
        answers = await self._each("collecting", lambda party: self._get_json(session, party, url))
        return combine(asked.query, [self._opened(party, answers[party], asked) for party in range(PARTIES)])

    def _opened(self, party: int, said: Any, asked: AskedQuery) -> AnswerShare:
        """One helper's share, if it signed it for this query and shows the YES of all three on its attempt."""
        name = self._names((party,))
        try:
            sealed = bytes.fromhex(said["share"])
            share = AnswerShare.open(party, sealed, asked.query, asked.answer_key, self._helper_set)
        except (ProtocolError, KeyError, TypeError, ValueError) as error:
            message = f"the answer share of {name} cannot be used: {error}"
            raise QueryFailed("opening", (party,), message, "Do not use this answer.") from None
        try:
            self._check_votes(said.get("votes"), share, asked.query)
        except ProtocolError as error:
            message = f"{name} does not show that all three helpers voted for this answer: {error}"
            raise QueryFailed("opening", (party,), message, _VOTES_HINT) from None
        return share

    def _check_votes(self, votes: object, share: AnswerShare, query: Query) -> None:
        """COMMIT.md: released only with three YES. The attempt id covers the query, and so its set and debug flag.

        Helpers vote in the realm of their set of the day, which may have been renewed since the query was made: votes
        are taken in the realm of the set that the query names, and of the one that the querier holds by now.
        """
        sets = (query.helper_set, self._helper_set.digest)
        keys = [helper.identity_key for helper in self._helper_set.helpers]
        realms = {realm(digest) for digest in sets}
        check_release(_read_votes(votes), share.accepted_root, keys, realms)

    async def _each(self, stage: str, call: Callable[[int], Awaitable[T]]) -> dict[int, T]:
        """The same request to all three at once; every failure is gathered before any is raised."""
        results = await asyncio.gather(*(call(party) for party in range(PARTIES)), return_exceptions=True)
        failures = {party: error for party, error in enumerate(results) if isinstance(error, BaseException)}
        for error in failures.values():
            if not isinstance(error, TrefoilError):
                raise error
        if failures:
            hints = [error.hint for error in failures.values() if isinstance(error, TrefoilError) and error.hint]
            reasons = "; ".join(dict.fromkeys(str(error) for error in failures.values()))
            status = max(error.status for error in failures.values() if isinstance(error, QueryFailed))
            raise QueryFailed(stage, tuple(failures), f"{stage}: {reasons}", hints[0] if hints else "", status=status)
        return {party: result for party, result in enumerate(results) if not isinstance(result, BaseException)}

    async def _put(
        self, session: aiohttp.ClientSession, party: int, path: str, body: bytes | AsyncIterator[bytes], size: int = 0
    ) -> HelperStatus:
        headers = {"Content-Length": str(size)} if size else {}

        async def call() -> object:
            url = self._address(party) + path
            async with session.put(url, data=body, headers=headers, ssl=self._pin(party)) as response:
                return await _json_of(response, self._names((party,)), party)

        return HelperStatus.from_json(await self._reached(party, call()))

    async def _get_json(self, session: aiohttp.ClientSession, party: int, path: str) -> Any:
        async def call() -> object:
            async with session.get(self._address(party) + path, ssl=self._pin(party)) as response:
                return await _json_of(response, self._names((party,)), party)

        return await self._reached(party, call())

    async def _reached(self, party: int, call: Coroutine[Any, Any, T]) -> T:
        name = self._names((party,))
        try:
            return await call
        except aiohttp.ServerFingerprintMismatch:
            hint = "Someone is in between, or the helper has a new certificate: fetch the new helper set."
            message = f"{name} shows a certificate other than the pinned one"
            raise QueryFailed("connecting", (party,), message, hint) from None
        except TimeoutError:
            raise QueryFailed("connecting", (party,), f"{name} does not answer", _START_HINT) from None
        except (aiohttp.ClientError, OSError) as error:
            raise QueryFailed("connecting", (party,), f"{name} cannot be reached: {error}", _START_HINT) from None

    def _address(self, party: int) -> str:
        return self._helper_set.helpers[party].address.rstrip("/")

    def _pin(self, party: int) -> aiohttp.Fingerprint:
        return aiohttp.Fingerprint(self._helper_set.helpers[party].tls_pin)

    def _names(self, parties: tuple[int, ...]) -> str:
        return " and ".join(self._helper_set.helpers[party].name for party in parties)


_VOTES_HINT = "Do not use this answer. If the helpers have a newer helper set, take that one and ask again to resume."
_START_HINT = "Check that the helper runs and that helpers.json has its address; then ask again to resume."


async def _json_of(response: aiohttp.ClientResponse, name: str, party: int) -> Any:
    """A helper's JSON, bounded; an error it reports becomes ours, under its name."""
    raw = bytearray()
    async for piece in response.content.iter_any():
        raw += piece
        if len(raw) > MAX_ANSWER:
            raise QueryFailed("asking", (party,), f"{name} answers with more than {MAX_ANSWER} bytes", status=200)
    try:
        stored = json.loads(bytes(raw))
    except ValueError:
        stored = {}
    if response.status >= 300:
        said = stored if isinstance(stored, dict) else {}
        message = f"{name} answers: {said.get('error', f'HTTP status {response.status}')}"
        raise QueryFailed("asking", (party,), message, str(said.get("hint", "")), status=response.status)
    return stored


def _failure(failed: Mapping[int, HelperStatus], names: Callable[[tuple[int, ...]], str]) -> QueryFailed:
    """One error for what several helpers report, each in its own words."""
    first = next(iter(failed.values())).failure
    stage = str(first.get("stage", "unknown stage"))
    said: dict[str, list[int]] = {}
    for party, status in sorted(failed.items()):
        said.setdefault(f"{status.state}: {status.failure.get('reason', '?')}", []).append(party)
    reasons = [f"{names(tuple(parties))} {text}" for text, parties in said.items()]
    blamed = {helper for status in failed.values() if isinstance(helper := status.failure.get("helper"), int)}
    helpers = tuple(sorted(helper for helper in blamed if 0 <= helper < PARTIES)) or tuple(failed)
    hint = str(first.get("hint", ""))
    return QueryFailed(stage, helpers, f"the query failed at stage {stage}: " + "; ".join(reasons), hint)


def _read_votes(stored: object) -> list[SignedVote]:
    if not isinstance(stored, list):
        raise ProtocolError("there is no list of votes")
    try:
        return [SignedVote.decode(bytes.fromhex(vote)) for vote in stored]
    except (TypeError, ValueError):
        raise ProtocolError("a vote is not hexadecimal") from None


def _url(query: Query) -> str:
    """Queries are named by their digest: who does not hold the query cannot guess it, and so cannot follow it."""
    return f"/v1/queries/{query.digest.hex()}"


async def _pieces(column: Iterator[bytes]) -> AsyncIterator[bytes]:
    """A column as it is sent, cut while it is sent, in a thread."""
    while piece := await asyncio.to_thread(next, column, b""):
        yield piece


@contextlib.contextmanager
def _timed(seconds: dict[str, float], name: str) -> Any:
    start = time.perf_counter()
    try:
        yield
    finally:
        seconds[name] = time.perf_counter() - start

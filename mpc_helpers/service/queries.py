"""Every query of one helper: submitted, given its column, run, withdrawn, and asked about.

State on disk decides: the signed query in its folder, the column beside it, and the state in the ledger's book of
queries. So a restart resumes every query. `Policy` says which queries are accepted, `Storage` whether a column fits.
Queries that never ran are few, however many a site submits or withdraws: see `ENDED_PER_PLACE`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping

from mpc_helpers.admission.column import remove_drafts
from mpc_helpers.agreement.negotiation import Disputed, TooFewReports, public_error
from mpc_helpers.helper import Helper
from mpc_helpers.identity.config import HelperConfig
from mpc_helpers.identity.membership import Membership
from mpc_helpers.ledger.attempt import Failpoint, QueryName
from mpc_helpers.ledger.ledger import QueryRecord, QueryRecords
from mpc_helpers.service.health import Concern, Labels, Reason
from mpc_helpers.service.monitoring import Metrics, fields
from mpc_helpers.service.policy import Policy, Refusal, RefusalReason
from mpc_helpers.service.storage import Storage, Uploads
from mpc_helpers.service.tracked_query import TrackedQuery
from protocol.errors import ErrorKind, HelperError, ProtocolError, TrefoilError
from protocol.net.listening import RateLimitFilter, cancel_all
from protocol.query import Query, SignedQuery, Withdrawal
from protocol.status import Failure, QueryState, QueryStatus

_LOG = logging.getLogger(__name__)
# A site that submits and withdraws in a loop must not fill the log.
LINES_PER_SITE = 60
# Queries of a site that ended before work on them began, for each that it may have waiting: so many withdrawn ones are
# kept, and so many others.
ENDED_PER_PLACE = 4
# How long closing waits for runs to release what they reserved, and for those cancelled even in that.
CLOSE_SECONDS = (10.0, 1.0)


def _kind_of(record: logging.LogRecord) -> str:
    details = getattr(record, "fields", {})
    return f"{record.msg} {details.get('site')}"


_LOG.addFilter(RateLimitFilter(burst=LINES_PER_SITE, kind_of=_kind_of, unlimited=logging.ERROR))


class Queries:
    """Run by the daemon. One task for every query that has its column; however it ends, the daemon goes on."""

    def __init__(
        self,
        config: HelperConfig,
        membership: Membership,
        book: QueryRecords,
        helper: Helper,
        clock: Callable[[], int],
        metrics: Metrics,
    ) -> None:
        self.policy = Policy(membership, config, clock)
        self.policy.failed_proofs.prepare()
        self.helper = helper
        self._book = book
        self._folder = config.data / "queries"
        self._clock = clock
        self._most_ended = ENDED_PER_PLACE * config.limits.queries_per_site
        self._tracked: dict[bytes, TrackedQuery] = {}
        self.storage = Storage(membership.party, self._tracked, helper, config, clock)
        self.uploads = Uploads(self.storage, config.limits, clock, self._start)
        # Serialises submissions: two that race must not both pass a limit that leaves space for one.
        self._submitting = asyncio.Lock()
        self._count(metrics)

    def _count(self, metrics: Metrics) -> None:
        ended = [state.value for state in QueryState if state.ended]
        stages = [state.value for state in QueryState if not state.ended]
        self._ended = metrics.counter("trefoil_queries_total", "Queries that ended, by final state.", state=ended)
        self._spent = metrics.counter("trefoil_stage_seconds_total", "Seconds spent in each query stage.", stage=stages)
        metrics.gauge("trefoil_queries", "Queries held by this helper, by state.", self._gauge)
        metrics.value("trefoil_uploads", "Column uploads in progress.", lambda: len(self.uploads))
        metrics.value("trefoil_disk_free_bytes", "Free bytes on the data disk.", lambda: self.storage.free_bytes)
        proofs = "Failed proofs of joint noise that no operator has cleared."
        metrics.value("trefoil_failed_proofs", proofs, lambda: len(self.policy.failed_proofs.failures()))

    # What queriers call.

    async def submit(self, digest: bytes, body: bytes) -> QueryStatus:
        """Take a signed query. Idempotent; a query that had failed is retried."""
        signed = SignedQuery.decode(body)
        query = signed.query
        self.policy.authenticate(signed)
        _check_digest(query, digest)
        async with self._submitting:
            tracked = self.find(digest)
            if tracked is None:
                tracked = await self._accept(signed)
            elif tracked.record.state is QueryState.FAILED and await self._may_retry(query):
                await self._retry(tracked)
        return tracked.status()

    async def take_column(self, digest: bytes, permit: bytes, size: int, pieces: AsyncIterator[bytes]) -> QueryStatus:
        """Take the column of a query, from a client that has the querier's permit for this helper. Idempotent."""
        tracked = self._get(digest)
        self.policy.check_permit(tracked.query, permit)
        await self.uploads.store(tracked, size, pieces)
        return tracked.status()

    async def withdraw(self, digest: bytes, body: bytes) -> QueryStatus:
        """Withdraw a query for its querier. A helper that has not voted for it by now never will."""
        withdrawal = Withdrawal.decode(body)
        self.policy.authenticate_withdrawal(withdrawal)
        _check_digest(withdrawal.signed.query, digest)
        async with self._submitting:
            self._limit_withdrawals(withdrawal.signed.query)
            # Record the withdrawal even of an unknown query; otherwise a malicious helper could submit it afterwards.
            tracked = self.find(digest) or await self.track(withdrawal.signed)
            if tracked.record.state is not QueryState.WITHDRAWN:
                await self._end_withdrawn(tracked)
        return tracked.status()

    def status(self, digest: bytes) -> QueryStatus:
        return self._get(digest).status()

    async def answer(self, digest: bytes) -> tuple[bytes, tuple[bytes, ...]]:
        """Return the sealed share and the three signed votes: the same bytes every time."""
        tracked = self._get(digest)
        stored = await self.helper.stored_answer(tracked.query)
        if stored is not None:
            return stored
        if tracked.ended:
            failure = tracked.record.failure
            reason = "" if failure is None else f": {failure.reason}"
            raise Refusal(RefusalReason.ENDED, f"the query has ended without an answer{reason}")
        raise Refusal(RefusalReason.NOT_YET, f"there is no answer yet; the query is {tracked.record.state.value}")

    def answer_sent(self, digest: bytes) -> None:
        """Log that the last byte of a share was sent."""
        tracked = self._get(digest)
        _LOG.info("query %s: share sent", tracked.query.short_name, extra=fields(site=tracked.query.site))
        self.helper.failpoint(Failpoint.ANSWER_AFTER_SEND)

    # What the daemon and its operator's pages call.

    def find(self, digest: bytes) -> TrackedQuery | None:
        return self._tracked.get(digest)

    def counts(self) -> dict[str, int]:
        return dict(Counter(tracked.state.value for tracked in self._tracked.values()))

    def reasons(self) -> list[Reason]:
        reasons = self.storage.reasons()
        if failed := len(self.policy.failed_proofs.failures()):
            text = f"{failed} proofs of joint noise have failed: see trefoil alarm show"
            reasons.append(Reason(Concern.PROOFS, text))
        if disputed := self.counts().get(QueryState.DISPUTED.value, 0):
            where = "its signatures are in this ledger's table votes"
            text = f"a helper equivocated on {disputed} queries, whose reports stay locked: {where}"
            reasons.append(Reason(Concern.DISPUTE, text))
        return reasons

    def _gauge(self) -> Mapping[Labels, float]:
        counts = self.counts()
        return {(("state", state.value),): float(counts.get(state.value, 0)) for state in QueryState}

    async def resume(self) -> None:
        """Run once at start, after the ledger has recovered: load every query, and run those that had not ended."""
        records = await asyncio.to_thread(self._book.all)
        booked = {record.name.digest.hex() for record in records}
        folders = sorted(each for each in self._folder.glob("*") if each.name not in booked)
        loaded = [TrackedQuery.load(record, self._folder, self._book, self._clock) for record in records]
        loaded += [TrackedQuery.restore(folder, self._book, self._clock) for folder in folders]
        for tracked in filter(None, loaded):
            self._tracked[tracked.name.digest] = tracked
            remove_drafts(tracked.column)
            if await self._should_resume(tracked):
                self._start(tracked)

    async def _should_resume(self, tracked: TrackedQuery) -> bool:
        """Whether it had not ended, or failed here after its vote: the peers may have released it since."""
        if tracked.record.state is QueryState.FAILED:
            return await self.helper.has_live_attempt(tracked.query)
        return not tracked.ended

    async def close(self) -> None:
        """Cancel every run. Reservations are released on the way out, or at the next start."""
        running = {tracked.task for tracked in self._tracked.values() if tracked.task is not None}
        # Twice: a run that was cancelled once may wait for the ledger, whose database may hang.
        for seconds in CLOSE_SECONDS:
            for task in running:
                task.cancel()
            if running:
                _, running = await asyncio.wait(running, timeout=seconds)

    # Submission.

    def _get(self, digest: bytes) -> TrackedQuery:
        tracked = self.find(digest)
        if tracked is None:
            raise Refusal(RefusalReason.UNKNOWN, "this helper does not know the query", "Submit it first.")
        return tracked

    async def _accept(self, signed: SignedQuery) -> TrackedQuery:
        query = signed.query
        await self._refuse_forgotten(query)
        running = [each.query for each in self._tracked.values() if not each.ended and not each.abandoned]
        self.policy.check_acceptable(query, running)
        await asyncio.to_thread(self.policy.check_cost, query)
        self._evict_failed(query.site)
        await self.storage.reserve(query)
        tracked = await self.track(signed)
        _log_arrival(tracked)
        return tracked

    async def track(self, signed: SignedQuery) -> TrackedQuery:
        """Persist a new query before anyone is told of it. A query id is bound to one query for as long as that one is
        remembered: permanently, once work on it has begun.
        """
        tracked = TrackedQuery.new(signed.query, self._folder, self._book, self._clock)
        name, earlier = tracked.name, await asyncio.to_thread(self._book.find, tracked.name.key)
        in_book = earlier is not None and earlier.name.digest != name.digest
        if in_book or any(each.name.key == name.key for each in self._tracked.values()):
            raise Refusal(
                RefusalReason.CHANGED,
                "this query id was used before, for another batch or other parameters",
                "Choose a new query id, or submit exactly what was submitted first.",
            )
        tracked.booked = earlier is not None
        await tracked.save(signed)
        self._tracked[signed.query.digest] = tracked
        return tracked

    def _evict_failed(self, site: str) -> None:
        """Forget the oldest queries of a site that failed before work on them began, beyond so many.

        Nothing is lost but the reason: they had no attempt, and a withdrawn one is not among them.
        """
        failed = [each for each in self._never_ran(site) if each.record.state is not QueryState.WITHDRAWN]
        for tracked in failed[: max(0, 1 + len(failed) - self._most_ended)]:
            tracked.remove()
            del self._tracked[tracked.name.digest]

    def _limit_withdrawals(self, query: Query) -> None:
        """Refuse a withdrawal that would have to be kept, beyond so many of a site. Those it has stay in force."""
        tracked = self.find(query.digest)
        if tracked is not None and (tracked.booked or tracked.record.state is QueryState.WITHDRAWN):
            return
        withdrawn = sum(each.record.state is QueryState.WITHDRAWN for each in self._never_ran(query.site))
        if withdrawn >= self._most_ended:
            raise Refusal(
                RefusalReason.BUSY,
                f"{query.site} has withdrawn {withdrawn} queries that never ran, which this helper has to remember",
                "Retry later: they are forgotten some time after their deadlines.",
            )

    def _never_ran(self, site: str) -> list[TrackedQuery]:
        return [each for each in self._tracked.values() if each.query.site == site and each.never_ran]

    async def _refuse_forgotten(self, query: Query) -> None:
        """Refuse a query whose folder is long gone with its outcome, rather than because its deadline has passed."""
        name = QueryName.of(query)
        earlier = await asyncio.to_thread(self._book.find, name.key)
        if earlier is not None and earlier.name.digest == name.digest and earlier.state.ended:
            raise Refusal(
                RefusalReason.ENDED,
                f"this query ended as {earlier.state.value}, and this helper has forgotten it since",
                "Make a new query with --new. Reports that were counted stay counted.",
            )

    async def _may_retry(self, query: Query) -> bool:
        """Before the deadline; without limit if this helper had voted, as spent reports must be answered."""
        return self._clock() < query.deadline or await self.helper.has_live_attempt(query)

    async def _retry(self, tracked: TrackedQuery) -> None:
        if not tracked.column.exists():
            await self.storage.reserve(tracked.query)
        await tracked.enter(QueryState.QUEUED)
        self._start(tracked)

    # Withdrawal.

    async def _end_withdrawn(self, tracked: TrackedQuery) -> None:
        """Stop the work, which releases mere reservations; then the ledger decides, in one transaction."""
        if tracked.task is not None and not await self._has_voted(tracked):
            await cancel_all([tracked.task])
        if await self.helper.has_live_attempt(tracked.query):
            self._start(tracked)
            raise Refusal(
                RefusalReason.VOTED,
                "this helper has voted for the query",
                "Its answer has been or may be released. To fetch it, run the query again.",
            )
        await tracked.enter(QueryState.WITHDRAWN, Failure(tracked.record.state, None, "its querier withdrew it"))
        self._finish(tracked)

    async def _has_voted(self, tracked: TrackedQuery) -> bool:
        # Stopping would gain nothing: the outcome of a vote must be awaited.
        return tracked.record.state is QueryState.VOTING and await self.helper.has_live_attempt(tracked.query)

    # Running.

    def _start(self, tracked: TrackedQuery) -> None:
        """Run a query that has its column, unless it runs already or was withdrawn during the upload."""
        if tracked.record.state is QueryState.WITHDRAWN:
            tracked.remove_column_if_useless()
        elif tracked.idle and tracked.column.exists():
            tracked.task = asyncio.create_task(self._run(tracked), name=f"query {tracked.query.short_name}")

    async def _run(self, tracked: TrackedQuery) -> None:
        try:
            await self.helper.answer(tracked.query, tracked.column, tracked)
            await tracked.enter(QueryState.RELEASED)
        except TrefoilError as error:
            await self._fail(tracked, error)
        except Exception:
            _LOG.exception("query %s: a defect", tracked.query.short_name)
            await self._fail(tracked, TrefoilError("this helper has a defect; its log says which"))
        self._finish(tracked)

    async def _fail(self, tracked: TrackedQuery, error: TrefoilError) -> None:
        party = error.party if isinstance(error, HelperError) else None
        shortfall, affordable = (
            (error.shortfall, error.affordable) if isinstance(error, TooFewReports) else (None, None)
        )
        public = public_error(error)
        if public is not error:
            query = tracked.query
            _LOG.warning("query %s: the ledger failed: %s", query.short_name, error, extra=fields(site=query.site))
        failure = Failure(tracked.record.state, party, str(public), public.hint, shortfall, affordable)
        state = QueryState.DISPUTED if isinstance(error, Disputed) else QueryState.FAILED
        with contextlib.suppress(TrefoilError):
            # An unwritable ledger is often the cause; then the failure is kept in memory only.
            await tracked.enter(state, failure)
            return
        tracked.record = QueryRecord(tracked.name, state, self._clock(), failure)

    def _finish(self, tracked: TrackedQuery) -> None:
        """Remove the column if nothing can need it, and count what the query took."""
        tracked.remove_column_if_useless()
        if tracked.ended:
            self._ended(state=tracked.record.state.value)
            _log_end(tracked)
        for stage, seconds in tracked.unreported_seconds().items():
            self._spent(seconds, stage=stage.value)


def _check_digest(query: Query, digest: bytes) -> None:
    if query.digest != digest:
        raise ProtocolError("the query is not the one that the address names", kind=ErrorKind.INCONSISTENT)


def _log_arrival(tracked: TrackedQuery) -> None:
    query = tracked.query
    details = {
        "event": "query arrived",
        "query": query.short_name,
        "id": query.query_id.hex()[:8],
        "site": query.site,
        "reports": query.batch_size,
        "buckets": query.buckets,
        "noise": query.noise.value,
        "debug": query.debug,
    }
    form = "query %(query)s (id %(id)s) of %(site)s arrived: %(reports)d reports, %(buckets)d buckets, noise %(noise)s"
    _LOG.info(form, details, extra=fields(**details))


def _log_end(tracked: TrackedQuery) -> None:
    """Log the query, its site and size, the seconds since it arrived at this process, and its outcome."""
    query, failure = tracked.query, tracked.record.failure
    details = {
        "event": "query ended",
        "query": query.short_name,
        "site": query.site,
        "reports": query.batch_size,
        "seconds": round(tracked.age, 3),
        "outcome": tracked.record.state.value,
        "reason": "" if failure is None else f"while {failure.stage.value}: {failure.reason}",
    }
    level = logging.INFO if failure is None else logging.WARNING
    form = "query %(query)s of %(site)s over %(reports)d reports ended after %(seconds).1f s: %(outcome)s"
    _LOG.log(level, f"{form} %(reason)s" if failure else form, details, extra=fields(**details))

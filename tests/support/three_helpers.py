"""Three helpers for tests: in one process over real HTTPS with an MPC in memory that records its noise, or as three
real processes through the launcher.

Recording noise, failing at a step and turning the clock exist here and only here: they are constructor arguments that
no configuration of an installed helper reaches.
"""

from __future__ import annotations

import asyncio
import atexit
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cache, partial
from pathlib import Path

import pytest

from mpc_helpers.agreement.negotiation import Attempt
from mpc_helpers.agreement.peers import RetryPolicy
from mpc_helpers.helper import Sessions
from mpc_helpers.identity.config import HelperConfig, load_config
from mpc_helpers.identity.membership import Membership
from mpc_helpers.ledger.attempt import Failpoint
from mpc_helpers.local.launcher import Trio, prepare
from mpc_helpers.mpc.channel import Channel, Intercept, memory_mesh
from mpc_helpers.mpc.failed_proofs import FailedProofs
from mpc_helpers.mpc.joint.layout import Layout
from mpc_helpers.mpc.joint.noise import JointNoise, Judge, alone
from mpc_helpers.mpc.noisy_sum import ExactNoise, SumKind, SumTerms, debug_sum, joint_sum, local_sum, pairwise_sum
from mpc_helpers.mpc.runtime import Engine, run_over_channels
from mpc_helpers.service.daemon import Parts, Running, serving
from mpc_helpers.service.queries import Queries
from mpc_helpers.service.storage import Storage
from mpc_helpers.service.transport import Certificates
from mpc_helpers.service.workers import Rendezvous
from protocol.batch import BatchReader, BatchWriter
from protocol.collector.limits import ReportKind
from protocol.field import Vector, from_integers, lift
from protocol.header import ReportTerms, coarse_time
from protocol.helper_set import HelperSet
from protocol.keys import IdentityKey, load_identity
from protocol.querier.ask import Querier
from protocol.querier.failure import QueryFailed
from protocol.querier.result import QueryResult
from protocol.querier.saved_query import QueryOptions, SavedQuery, make_query
from protocol.report import SealedReport, seal_report
from protocol.shares import PARTIES
from tests.support.joint_trio import Make

SITE = "shop.example"
FAST = RetryPolicy(first_delay=0.01, max_agree_delay=0.05, max_poll_delay=0.1, reply_timeout=2.0)


def real_now() -> int:
    """Seconds since 1970."""
    return int(time.time())


def terms(
    buckets: int,
    *,
    epsilon_micros: int = 1_000_000,
    sensitivity: int = 2,
    kappa: int = 0,
    site: str = SITE,
    caller: str = SITE,
    debug: bool = False,
    unit: str = "count",
    at: int | None = None,
) -> ReportTerms:
    """The terms of a report made now."""
    when = coarse_time(real_now() if at is None else at)
    return ReportTerms(site, caller, when, epsilon_micros, sensitivity, buckets, kappa, unit, debug)


def write_batch(path: Path, reports: Sequence[SealedReport]) -> BatchReader:
    """A batch file of these reports."""
    with BatchWriter(path) as writer:
        for report in reports:
            writer.add(report)
    return BatchReader(path)


def seal_all(histograms: Sequence[Sequence[int]], of: ReportTerms, helper_set: HelperSet) -> list[SealedReport]:
    """One report for each histogram."""
    return [seal_report(histogram, of, helper_set) for histogram in histograms]


@dataclass(slots=True)
class NoiseRecord:
    """What was added in one attempt: in local mode a vector per helper, in the others one per helper that lacks it."""

    parts: dict[int, list[int]] = field(default_factory=dict)

    def total(self) -> list[int]:
        """The noise in the answer."""
        return lift(from_integers([sum(column) for column in zip(*self.parts.values(), strict=True)]))


class _RecordingNoise(ExactNoise):
    """Exact noise that tells."""

    def __init__(self, keep: Callable[[bytes, list[int]], None], judge: Judge = alone, make: Make = JointNoise) -> None:
        super().__init__(judge)
        self._keep = keep
        self._make = make

    def pairwise(self, rate: Fraction, buckets: int, key: bytes) -> list[int]:
        drawn = super().pairwise(rate, buckets, key)
        self._keep(key, drawn)
        return drawn

    async def joint(self, engine: Engine, layout: Layout) -> dict[int, Vector]:
        components = await self._make(engine, layout, self._judge).draw()
        for lacking, component in components.items():
            self._keep(bytes([lacking]), component.tolist())
        return components


class MemoryMpc:
    """The MPC of three helpers in this process. `records` has the noise of every attempt, by its id."""

    def __init__(self, intercept: Intercept | None = None) -> None:
        self.records: dict[bytes, NoiseRecord] = {}
        # Who draws joint noise in another way than it should.
        self.joint_parties: dict[int, Make] = {}
        self.before_add: Callable[[int, Attempt], None] = lambda _party, _attempt: None
        self._meshes: dict[bytes, list[list[Channel]]] = {}
        self._pairs: dict[bytes, dict[bytes, list[int]]] = {}
        self._intercept = intercept

    @asynccontextmanager
    async def sessions(
        self, config: HelperConfig, membership: Membership, certificates: Certificates, meetings: Rendezvous
    ) -> AsyncIterator[Sessions]:
        """For `Parts.sessions`."""

        @asynccontextmanager
        async def session(terms: SumTerms) -> AsyncIterator[_MemorySession]:
            yield _MemorySession(self, membership.party, terms, FailedProofs(config.failed_proofs))

        yield session

    def channels(self, attempt_id: bytes, party: int) -> list[Channel]:
        """This party's channels in the session of an attempt."""
        if attempt_id not in self._meshes:
            self._meshes[attempt_id] = memory_mesh(self._intercept)
        return self._meshes[attempt_id][party]

    def record_pair(self, attempt_id: bytes, key: bytes, drawn: list[int]) -> None:
        """Both helpers of a pair draw the same vector from the same key; it is added once."""
        vectors = self._pairs.setdefault(attempt_id, {})
        vectors[key] = drawn
        self.records.setdefault(attempt_id, NoiseRecord()).parts = dict(enumerate(vectors.values()))


@dataclass(slots=True)
class _MemorySession:
    mpc: MemoryMpc
    party: int
    terms: SumTerms
    failed_proofs: FailedProofs

    async def add(self, attempt: Attempt, share: Vector, seconds: float) -> Vector:
        self.mpc.before_add(self.party, attempt)
        terms, mine = self.terms, [int(value) for value in share.tolist()]
        session = terms.session(self.party, attempt.attempt_id, seconds)
        match terms.kind:
            case SumKind.LOCAL:
                drawn = ExactNoise().local(terms.rate, terms.buckets)
                self.mpc.records.setdefault(attempt.attempt_id, NoiseRecord()).parts[self.party] = drawn
                program = local_sum(mine, drawn)
            case SumKind.PAIRWISE:
                keep = _RecordingNoise(lambda key, made: self.mpc.record_pair(attempt.attempt_id, key, made))
                program = pairwise_sum(mine, terms.rate, keep)
            case SumKind.JOINT:
                judge, make = self.failed_proofs.judge, self.mpc.joint_parties.get(self.party, JointNoise)
                record = partial(self.mpc.record_pair, attempt.attempt_id)
                program = joint_sum(mine, terms.layout, _RecordingNoise(record, judge, make))
            case SumKind.DEBUG:
                program = debug_sum(mine)
        channels = self.mpc.channels(attempt.attempt_id, self.party)
        return from_integers(await run_over_channels(session, channels, program))


@dataclass(slots=True)
class ThreeHelpers:
    """Three helpers in this process, each of which can be stopped and started again."""

    trio: Trio
    mpc: MemoryMpc
    folder: Path
    steps: dict[int, Callable[[Failpoint], None]] = field(default_factory=dict)
    clock: Callable[[], int] = real_now
    # A helper that is not here goes by the clock above.
    clocks: dict[int, Callable[[], int]] = field(default_factory=dict)
    daemons: dict[int, Running] = field(default_factory=dict)
    _running: dict[int, AsyncExitStack] = field(default_factory=dict)
    _batches: int = 0

    @property
    def queries(self) -> dict[int, Queries]:
        return {party: daemon.queries for party, daemon in self.daemons.items()}

    def storage(self, party: int) -> Storage:
        return self.daemons[party].queries.storage

    @property
    def helper_set(self) -> HelperSet:
        return self.trio.helper_set

    def site_key(self, site: str = SITE) -> IdentityKey:
        return load_identity(self.trio.site_key_path(site))

    async def start(self, party: int) -> None:
        """Start one helper; its ledger, queries and certificates are those it had."""
        step = self.steps.get(party, lambda _: None)
        parts = Parts(clock=self.clocks.get(party, self.clock), failpoint=step, sessions=self.mpc.sessions, retry=FAST)
        stack = AsyncExitStack()
        config = load_config(self.trio.config_path(party))
        self.daemons[party] = await stack.enter_async_context(serving(config, parts))
        self._running[party] = stack

    async def stop(self, party: int) -> None:
        """Stop one helper, as SIGTERM would."""
        stack = self._running.pop(party, None)
        if stack is not None:
            await stack.aclose()

    def batch(self, reports: Sequence[SealedReport]) -> BatchReader:
        """A new batch file."""
        self._batches += 1
        return write_batch(self.folder / f"batch-{self._batches}", reports)

    def seal(self, histograms: Sequence[Sequence[int]], of: ReportTerms) -> list[SealedReport]:
        return seal_all(histograms, of, self.helper_set)

    def query(self, batch: BatchReader, wishes: QueryOptions | None = None, *, site: str = SITE) -> SavedQuery:
        """A new query on a batch, for the kind of its first report: the batch may hold anything else."""
        wishes, first = wishes or QueryOptions(seconds=30), batch.first_header()
        if first is not None and not wishes.kind:
            wishes = replace(wishes, kind=ReportKind.of(first).name)
        return make_query(batch, wishes, self.helper_set, self.site_key(site), self.clock())

    async def ask(self, asked: SavedQuery, batch: BatchReader, *, patience: float = 5.0) -> QueryResult:
        """Ask as a querier does."""
        return await Querier(self.helper_set, patience=patience, clock=self.clock).ask(asked, batch)

    async def fails(self, batch: BatchReader, wishes: QueryOptions) -> QueryFailed:
        """Ask a query that can only end at its deadline. A busy machine may not even have begun by then: once more."""
        for seconds in (wishes.seconds, 10 * wishes.seconds):
            with pytest.raises(QueryFailed) as failed:
                await self.ask(self.query(batch, replace(wishes, seconds=seconds)), batch)
            if failed.value.stage == "agreeing":
                break
        return failed.value

    def noise_of(self, result: QueryResult) -> list[int]:
        """The noise that is in an answer."""
        return self.mpc.records[result.answer.attempt_id].total()


@cache
def _template() -> Path:
    """Keys and empty ledgers, made once: what takes time and what no test looks at."""
    folder = Path(tempfile.mkdtemp(prefix="trefoil-template-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    prepare(folder / "trio", now=real_now())
    return folder / "trio"


@asynccontextmanager
async def three_helpers(
    folder: Path,
    *,
    sites: Mapping[str, Sequence[str]] | None = None,
    steps: Mapping[int, Callable[[Failpoint], None]] | None = None,
    clock: Callable[[], int] = real_now,
    intercept: Intercept | None = None,
    options: Mapping[str, object] | None = None,
    start: bool = True,
) -> AsyncIterator[ThreeHelpers]:
    """Three helpers in one process, over real HTTPS and real ledgers."""
    shutil.copytree(_template(), folder / "trio")
    trio = prepare(
        folder / "trio",
        now=clock(),
        sites=sites or {SITE: [SITE]},
        options={"processes": 0, "unchecked_histograms": True, **(options or {})},
    )
    three = ThreeHelpers(trio, MemoryMpc(intercept), folder, dict(steps or {}), clock)
    try:
        if start:
            await asyncio.gather(*(three.start(party) for party in range(PARTIES)))
        yield three
    finally:
        await asyncio.gather(*(three.stop(party) for party in range(PARTIES)))


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that happens within seconds, also on a busy machine."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.02)


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait likewise, where no event loop runs."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)

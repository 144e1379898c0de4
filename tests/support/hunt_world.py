"""The world of `commit_world` when everything goes wrong together: kill -9, pauses, partitions, full disks, clock
steps, renewals of the helper set and failing sessions, at moments drawn from a seed.

A schedule is a function of its seed, and so is the run. Time is virtual. Three things are not an installed helper's,
and make a run several times faster. Votes are signed by a hash, as nobody forges any. Messages are not encoded. Ledgers
are SQLite databases in memory, from which a crash takes what was not committed; ledger files are killed in
`test_commit_crashes` and `test_chaos`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import email.utils
import gc
import hashlib
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast
from unittest import mock

import numpy as np

from mpc_helpers.agreement.errors import AgreementError, AlreadyReleased, DrawnTooOften, TooFewReports
from mpc_helpers.agreement.hooks import Pace
from mpc_helpers.agreement.messages import Body, Envelope
from mpc_helpers.agreement.negotiation import Attempt, AttemptTerms
from mpc_helpers.agreement.parties import Parties
from mpc_helpers.ledger.attempt import AttemptOutcome, Step
from mpc_helpers.ledger.file import LedgerClosed, LedgerError, LedgerHead, LedgerOwner
from mpc_helpers.ledger.ledger import ReportLedger
from mpc_helpers.ledger.reports import Standing
from mpc_helpers.mpc.sum_program import PAIRWISE_DRAWS
from mpc_helpers.service import clocks
from protocol.errors import ProtocolError
from protocol.keys import IdentityKey
from protocol.seconds import DAY, HOUR
from tests.support import commit_world
from tests.support.commit_world import (
    IDENTITIES,
    KEYS,
    AskedQuery,
    CommitWorld,
    FaultPlan,
    Node,
    Point,
    VirtualLoop,
    report_digest,
    run,
    violations,
)

T = TypeVar("T")
# The wall clock at the beginning: whole hours, as reports are dated.
BEGINNING = 500_000 * HOUR
LIFETIME = 10 * DAY
KEY_ENDS = BEGINNING + 5 * DAY
# An hour of housekeeping in a few virtual seconds.
ROUND_SECONDS = 1.5
CALM_AT = 9.0
DEADLINE = 18.0
PACE = Pace(first=0.3, longest_agree=3.0, longest_ask=4.0, patience=2.0)
STEPS = (*Step,)
# Where the interesting mistakes are: between the first reservation and the last vote.
MIDWAY = (
    Step.RESERVE_AFTER_COMMIT,
    Step.COMPUTE,
    Step.VOTE_BEFORE_COMMIT,
    Step.VOTE_AFTER_COMMIT,
    Step.YES_SENT_TO_ONE,
    Step.RELEASE_BEFORE_COMMIT,
    Step.RELEASE_AFTER_COMMIT,
    Step.GIVE_UP_AFTER_COMMIT,
    Step.RENOUNCE_AFTER_COMMIT,
    Step.START_AFTER_SWEEP,
)


class HuntFault(Enum):
    """What happens to the helpers."""

    KILL = "kill -9"
    KILL_AT_STEP = "kill -9 at a step"
    PAUSE = "pause"
    PARTITION = "partition"
    FULL_DISK = "full disk"
    CLOCK_STEP = "clock step"
    ROTATION = "rotation"
    MPC_FAILS = "the MPC fails"


@dataclass(frozen=True, slots=True)
class Mishap:
    """One fault: at whom, when, and for how long.

    If `watched` is a party, it happens `at` seconds after that one reaches `step` for the time `number`. `number` is
    also how many attempts fail; `hours` is how far a clock goes wrong.
    """

    fault: HuntFault
    party: int
    at: float = 0.0
    seconds: float = 0.0
    other: int = 0
    step: Step = Step.COMPUTE
    number: int = 1
    watched: int | None = None
    hours: int = 0


@dataclass(frozen=True, slots=True)
class Schedule:
    """Everything that happens in one run; `draws` is the limit of a query with pairwise noise."""

    seed: int
    queries: tuple[AskedQuery, ...]
    mishaps: tuple[Mishap, ...]
    loss: float
    draws: int | None

    def __str__(self) -> str:
        lines = [f"schedule of seed {self.seed}: loss {self.loss}, draws {self.draws}"]
        lines += [f"  query {query.name.key[0]} over {query.reports}" for query in self.queries]
        return "\n".join([*lines, *(f"  {mishap}" for mishap in self.mishaps)])


def _mishap(rng: np.random.Generator) -> Mishap:
    party = int(rng.integers(3))
    fault = (*HuntFault,)[int(rng.integers(len(HuntFault)))]
    watched = int(rng.integers(3)) if rng.random() < 0.6 else None
    steps = MIDWAY if watched is not None or rng.random() < 0.5 else STEPS
    return Mishap(
        fault,
        party,
        # Most of what a query does undisturbed it does in the first second; most of a vote in a few hundredths.
        at=float(min(6.0, rng.exponential(0.8 if watched is None else 0.02))),
        seconds=float(rng.choice([0.3, 1.0, 2.5, 6.0])),
        other=(party + int(rng.integers(1, 3))) % 3,
        step=steps[int(rng.integers(len(steps)))],
        number=int(rng.choice([1, 1, 1, 2, 2, 3, 4])),
        watched=watched,
        hours=int(rng.choice([-480, -2, 2, 5, 7, 480])),
    )


BATCHES: tuple[tuple[tuple[int, ...], ...], ...] = (((0, 1),), ((0, 1, 2),), ((0, 1), (1, 2)), ((0, 1), (0, 1)))


def schedule_of(seed: int) -> Schedule:
    """One to five mishaps among the eight kinds, on one or two queries."""
    rng = np.random.default_rng(seed)
    batches = BATCHES[int(rng.choice([0, 0, 0, 1, 2, 3]))]
    queries = tuple(AskedQuery.of(rank + 1, reports, DEADLINE) for rank, reports in enumerate(batches))
    mishaps = tuple(_mishap(rng) for _ in range(int(rng.integers(1, 6))))
    loss = float(rng.choice([0.0, 0.0, 0.0, 0.1, 0.25]))
    return Schedule(seed, queries, mishaps, loss, PAIRWISE_DRAWS if rng.random() < 0.5 else None)


@cache
def _template(party: int) -> sqlite3.Connection:
    """An empty ledger, made once: making it takes longer than a run."""
    with tempfile.TemporaryDirectory() as folder:
        ReportLedger.create(Path(folder) / "ledger", LedgerOwner(party, KEYS[party]))
        with closing(sqlite3.connect(Path(folder) / "ledger")) as made:
            made.execute("PRAGMA journal_mode = DELETE")
            copy = sqlite3.connect(":memory:", isolation_level=None)
            made.backup(copy)
    return copy


class MemoryLedgers:
    """Stands for the disk: databases by path, which outlive the processes that have them open."""

    def __init__(self) -> None:
        self._databases: dict[Path, sqlite3.Connection] = {}

    def create(self, path: Path, party: int) -> None:
        database = sqlite3.connect(":memory:", isolation_level=None)
        _template(party).backup(database)
        self._databases[path] = database

    def open(self, path: Path, _: LedgerOwner) -> Handle:
        return Handle(self._databases[path])

    def clear(self) -> None:
        for database in self._databases.values():
            database.close()
        self._databases.clear()


class Handle:
    """A process's connection to such a database. Closing it is a crash: what was not committed is gone."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database: sqlite3.Connection | None = database

    def _open(self) -> sqlite3.Connection:
        if self._database is None:
            raise sqlite3.ProgrammingError("the process that had it open is dead")
        return self._database

    @property
    def in_transaction(self) -> bool:
        return self._open().in_transaction

    def execute(self, *statement: Any) -> sqlite3.Cursor:
        return self._open().execute(*statement)

    def executemany(self, *statement: Any) -> sqlite3.Cursor:
        return self._open().executemany(*statement)

    def close(self) -> None:
        if self._database is not None and self._database.in_transaction:
            self._database.execute("ROLLBACK")
        self._database = None


LEDGERS = MemoryLedgers()


class QuietLoop(VirtualLoop):
    """Nothing comes in from outside, so nobody looks."""

    def look(self) -> list[object]:
        return []


class HuntWorld(CommitWorld):
    """Three helpers and a schedule."""

    def __init__(self, folder: Path, schedule: Schedule) -> None:
        self.schedule = schedule
        self.happened: Counter[HuntFault] = Counter()
        # Which pairs hear nothing of each other, and until when.
        self.cut: dict[frozenset[int], float] = {}
        self._awaited: dict[Point, list[asyncio.Event]] = {}
        crashes = frozenset(
            (mishap.party, mishap.step, mishap.number)
            for mishap in schedule.mishaps
            if mishap.fault is HuntFault.KILL_AT_STEP
        )
        fails = [mishap for mishap in schedule.mishaps if mishap.fault is HuntFault.MPC_FAILS]
        plan = FaultPlan(
            seed=schedule.seed,
            crashes=crashes,
            loss=schedule.loss,
            calm_at=CALM_AT,
            mpc_fails=lambda party, number: any(m.party == party and number <= m.number for m in fails),
            horizon=120.0,
        )
        super().__init__(folder, schedule.queries, plan)

    def make_node(self, party: int) -> Node:
        path = self.folder / f"helper{party}.db"
        LEDGERS.create(path, party)
        return HuntNode(self, party, path)

    async def play(self) -> None:
        for mishap in self.schedule.mishaps:
            self.spawn(self._befall(mishap))
        for node in self.nodes:
            self.spawn(node.start())
        now = asyncio.get_running_loop().time
        while now() < self.plan.horizon and not self.done():
            await asyncio.sleep(1.0)
        await self.stop()

    def done(self) -> bool:
        # The ledgers are asked only when everything else is over: that is what takes time.
        owed = len(self.nodes) * len(self.queries)
        return asyncio.get_running_loop().time() > CALM_AT and len(self.ended) >= owed and super().done()

    async def _befall(self, mishap: Mishap) -> None:
        node = cast(HuntNode, self.nodes[mishap.party])
        if mishap.fault in (HuntFault.KILL_AT_STEP, HuntFault.MPC_FAILS):
            return  # in the plan already
        end = mishap.seconds + await self._moment_of(mishap)
        match mishap.fault:
            case HuntFault.KILL:
                if node.alive:
                    self.happened[mishap.fault] += 1
                    node.kill()
                    node.revive_after(mishap.seconds)
            case HuntFault.PAUSE:
                self.happened[mishap.fault] += 1
                node.paused_until = max(node.paused_until, end)
            case HuntFault.FULL_DISK:
                self.happened[mishap.fault] += 1
                node.full_until = max(node.full_until, end)
            case HuntFault.CLOCK_STEP:
                self.happened[mishap.fault] += 1
                node.ahead += mishap.hours * HOUR
                await asyncio.sleep(mishap.seconds)
                node.ahead -= mishap.hours * HOUR
            case HuntFault.ROTATION:
                self.happened[mishap.fault] += 1
                await self._renew(node)
            case HuntFault.PARTITION:
                self.happened[mishap.fault] += 1
                self.cut[frozenset((mishap.party, mishap.other))] = end

    async def _moment_of(self, mishap: Mishap) -> float:
        if mishap.watched is not None:
            event = asyncio.Event()
            self._awaited.setdefault((mishap.watched, mishap.step, mishap.number), []).append(event)
            await event.wait()
        await asyncio.sleep(mishap.at)
        return asyncio.get_running_loop().time()

    def reached_step(self, point: Point) -> None:
        for event in self._awaited.pop(point, ()):
            event.set()

    def is_cut(self, one: int, other: int) -> bool:
        return asyncio.get_running_loop().time() < self.cut.get(frozenset((one, other)), 0.0)

    async def _renew(self, first: Node) -> None:
        """As an operator does it, one helper after the other, whatever else happens to them meanwhile."""
        self.renewals += 1
        renewals = self.renewals
        for node in sorted(self.nodes, key=lambda node: node is not first):
            node.kill()
            node.renewals = max(node.renewals, renewals)
            cast(HuntNode, node).revive_after(0.5)
            await asyncio.sleep(1.0)

    async def carry(self, source: int, target: int, data: bytes) -> bytes | None:
        if self.is_cut(source, target):
            raise OSError("no route")
        return await super().carry(source, target, data)

    async def _deliver(self, source: int, target: int, data: bytes, reply: asyncio.Future[bytes | None]) -> None:
        if not self.is_cut(source, target):
            await cast(HuntNode, self.nodes[target]).awake()
            try:
                await super()._deliver(source, target, data, reply)
            except LedgerClosed:
                raise
            except LedgerError:
                # The server says 500, which is a reply that is none.
                if not reply.done():
                    reply.set_result(None)


class HuntNode(Node):
    """A helper to which such things happen, and which keeps house."""

    world: HuntWorld

    def __init__(self, world: HuntWorld, party: int, path: Path) -> None:
        super().__init__(world, party, path)
        self.paused_until = 0.0
        self.full_until = 0.0
        self.ahead = 0
        self.keys = True
        self.full_hits = 0
        # The attempts whose MPC it began, whatever became of them.
        self.drawn: list[bytes] = []
        self.last_round = BEGINNING
        membership: Any = SimpleNamespace(peers=[p for p in range(3) if p != party], name=str)
        self.peer_clocks = clocks.PeerClocks(membership, self.wall)
        self.keeps_house = any(mishap.fault is HuntFault.CLOCK_STEP for mishap in world.schedule.mishaps)

    def wall(self) -> int:
        """This helper's clock."""
        return BEGINNING + int(asyncio.get_running_loop().time()) + self.ahead

    async def awake(self) -> None:
        """Waits while this helper is stopped."""
        while (left := self.paused_until - asyncio.get_running_loop().time()) > 0:
            await asyncio.sleep(left)

    async def offload(self, call: Callable[[], T]) -> T:
        await self.awake()
        return call()

    def step(self, step: Step) -> None:
        full = self.full_until and asyncio.get_running_loop().time() < self.full_until
        if full and "before commit" in step.value:
            self.full_hits += 1
            raise LedgerError("cannot use the ledger: database or disk is full")
        before = len(self.world.crashed)
        try:
            super().step(step)
        finally:
            self.world.happened[HuntFault.KILL_AT_STEP] += len(self.world.crashed) - before
            self.world.reached_step((self.party, step, self.world.reached[(self.party, step)]))

    def revive_after(self, seconds: float) -> None:
        generation = self.generation

        async def revive() -> None:
            await asyncio.sleep(seconds)
            # Not if it was killed again since: whoever did that starts it.
            if self.generation == generation:
                await self.start()

        self.world.spawn(revive())

    async def _restart(self) -> None:
        self.revive_after(self.world.plan.restart_after)

    async def start(self) -> None:
        try:
            await super().start()
        except LedgerClosed:
            raise
        except LedgerError:
            # It does not start on a full disk, and its supervisor tries again.
            self.kill()
            self.revive_after(1.0)
            return
        if self.keeps_house:
            self.work.append(self.world.spawn(self._keep_house()))

    async def _keep_house(self) -> None:
        """`mpc_helpers.service.housekeeping`, without the files it tidies."""
        while True:
            await self.awake()
            for peer in self.world.nodes:
                other = cast(HuntNode, peer)
                if other is not self and other.alive and not self.world.is_cut(self.party, other.party):
                    self.peer_clocks.heard(other.party, email.utils.formatdate(other.wall(), usegmt=True))
            now = self.wall()
            try:
                clocks.check_clock(now, self.last_round, self.peer_clocks)
            except clocks.ClockDoubted:
                pass
            else:
                self.ledger.reports.advance_watermark(now - LIFETIME)
                self.keys = self.keys and now < KEY_ENDS
                self.last_round = max(self.last_round, now)
            await asyncio.sleep(ROUND_SECONDS)

    async def answer(self, query: AskedQuery) -> None:
        """As `Helper.answer`, with a querier who asks again where the ledger failed."""
        deadline = BEGINNING + int(query.deadline)
        key = (self.party, query.name.key)
        now = asyncio.get_running_loop().time
        # `limits.seconds` of a helper that accepts this deadline, and none later.
        end = now() + min(deadline - self.wall(), DEADLINE)
        while True:
            try:
                # What was voted for before a restart is waited for, however long.
                await self.agreement.outcome(query.name.key)
                released = await self.agreement.answer(query.name.key)
                if released is not None:
                    break
                if self.wall() >= deadline or now() >= end:
                    self.world.ended[key] = "given up"
                    return
                await self.attempt(query, min(end, now() + deadline - self.wall()))
            except AlreadyReleased:
                continue
            except (TooFewReports, DrawnTooOften):
                self.world.ended[key] = "given up"
                return
            except LedgerClosed:
                raise
            except (AgreementError, LedgerError):
                await asyncio.sleep(1.0)
        self.step(Step.ANSWER_BEFORE_SEND)
        self.world.out.append((self.party, query.name.key, released.attempt_id, released.sealed_share))
        self.step(Step.ANSWER_AFTER_SEND)
        self.world.ended[key] = "released"

    async def attempt(self, query: AskedQuery, deadline: float = DEADLINE) -> None:
        """*Agree · Spend · Sum · Noise · Open*, with the real block that gives reports back."""
        batch = dataclasses.replace(
            query.batch(), hours=np.full(len(query.reports), BEGINNING // HOUR, dtype=np.uint32)
        )
        terms = AttemptTerms(query.name, False, bytes(32), 1, self.world.schedule.draws)
        agreed = await self.agreement.agree(terms, batch, deadline)
        async with self.agreement.spend(agreed) as attempt:
            self._note(attempt, batch)
            self.drawn += [attempt.attempt_id]
            await self._compute(attempt)
            share = b"share %d of %s" % (self.party, attempt.attempt_id.hex().encode())
            outcome = await self.agreement.commit(attempt, share)
        if outcome is AttemptOutcome.ABORTED:
            raise AgreementError("a peer gave it up")

    async def _compute(self, attempt: Attempt) -> None:
        self.step(Step.COMPUTE)
        await asyncio.sleep(0.1)
        await self.awake()
        peers = [peer for peer in range(3) if peer != self.party]
        fails = self.world.plan.mpc_fails(self.party, attempt.number)
        if fails or any(self.world.is_cut(self.party, peer) for peer in peers):
            self.world.happened[HuntFault.MPC_FAILS] += fails
            raise AgreementError("the MPC failed")


# The checker.


def wrongs(world: HuntWorld) -> list[str]:
    """What must never be: S1, S3, L1, L2 of COMMIT.md; a report lost or counted twice; too many draws; a key gone."""
    found = violations(world)
    ledgers = [ReportLedger(node.path, LedgerOwner(node.party, KEYS[node.party])) for node in world.nodes]
    try:
        for report in sorted({report for query in world.queries for report in query.reports}):
            found += _wrongs_of(world, ledgers, report)
    finally:
        for ledger in ledgers:
            ledger.close()
    found += [f"helper {node.party} destroyed its keys" for node in world.nodes if not cast(HuntNode, node).keys]
    return found


def _wrongs_of(world: HuntWorld, ledgers: list[ReportLedger], report: int) -> Iterator[str]:
    """One report is counted in one released answer, or it is free at all three; and few draws were of it."""
    digest = report_digest(report)
    row = np.frombuffer(digest, dtype=np.uint8).reshape(1, -1)
    standings = [Standing(int(ledger.reports.lookup(row, bytes(32))[0])) for ledger in ledgers]
    released = {attempt for _, _, attempt, _ in world.out}
    for ledger in ledgers:
        released |= {found.attempt_id for found in ledger.attempts._select("state = 'released' AND attempt > 0")}
    holding = {attempt for attempt, (reports, *_) in world.accepted.items() if digest in reports}
    counted = released & holding
    if len(counted) > 1:
        yield f"report {report} is in {len(counted)} answers"
    if any(standing is not (Standing.SEEN if counted else Standing.FREE) for standing in standings):
        yield f"report {report} is in {len(counted)} answers and stands as {[each.name for each in standings]}"
    if not all(ledger.reports.watermark < BEGINNING for ledger in ledgers):
        yield "the watermark has passed reports that were not old"
    # Each helper counts for itself: two must have begun before the third knows anything of the noise.
    drawn = max(len(holding.intersection(cast(HuntNode, node).drawn)) for node in world.nodes)
    if world.schedule.draws is not None and drawn > world.schedule.draws:
        yield f"report {report} was in {drawn} draws"


# Running.


def _hash(public: bytes, label: str, message: bytes) -> bytes:
    return hashlib.blake2b(label.encode() + b"\0" + message, key=public).digest()


# What is under way, by the bytes that stand for it.
_UNDER_WAY: dict[bytes, tuple[bytes, Envelope]] = {}


def _seal(self: Parties, boot: bytes, head: LedgerHead, body: Body) -> bytes:
    token = len(_UNDER_WAY).to_bytes(8, "big")
    _UNDER_WAY[token] = (self.realm, Envelope(self.party, boot, head, body))
    return token


def _open(self: Parties, sender: int, data: bytes) -> Envelope:
    realm, envelope = _UNDER_WAY[data]
    if realm != self.realm or envelope.sender != sender:
        raise ProtocolError("not signed for this set of helpers")
    return envelope


@contextmanager
def quick() -> Iterator[None]:
    """Votes signed by hashes, messages not encoded, ledgers in memory; and messages repeated less often."""
    public = {id(identity): identity.public for identity in IDENTITIES}

    def sign(self: IdentityKey, label: str, message: bytes) -> bytes:
        return _hash(public[id(self)], label, message)

    def verify(key: bytes, label: str, message: bytes, signature: bytes) -> bool:
        return signature == _hash(key, label, message)

    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(IdentityKey, "sign", sign))
        patches.enter_context(mock.patch("protocol.vote.verify_signature", verify))
        patches.enter_context(mock.patch.object(Parties, "seal", _seal))
        patches.enter_context(mock.patch.object(Parties, "open", _open))
        patches.enter_context(mock.patch.object(commit_world, "PACE", PACE))
        patches.enter_context(mock.patch("mpc_helpers.ledger.database.open_connection", LEDGERS.open))
        # What a ledger costs is not measured here, and on some machines a look at the processor's clock is dear.
        watch = SimpleNamespace(perf_counter=lambda: 0.0, thread_time=lambda: 0.0)
        patches.enter_context(mock.patch("mpc_helpers.ledger.database.time", watch))
        yield


@dataclass(slots=True)
class HuntCounts:
    """What a hunt has seen."""

    schedules: int = 0
    mishaps: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    wrong: dict[int, list[str]] = field(default_factory=dict)

    def add(self, world: HuntWorld, found: list[str]) -> None:
        self.schedules += 1
        self.mishaps.update({fault.value: count for fault, count in world.happened.items()})
        self.mishaps["refused by a full disk"] += sum(cast(HuntNode, node).full_hits for node in world.nodes)
        for query in world.queries:
            ends = {world.ended.get((party, query.name.key), "never ended") for party in range(3)}
            self.ends[" and ".join(sorted(ends))] += 1
        if found:
            self.wrong[world.schedule.seed] = found


def play(folder: Path, schedule: Schedule) -> tuple[HuntWorld, list[str]]:
    """One schedule. Nothing is written to the folder, which only names ledgers. Within `quick`."""
    try:
        world = HuntWorld(folder, schedule)
        run(world.play, QuietLoop)
        return world, wrongs(world)
    finally:
        LEDGERS.clear()
        _UNDER_WAY.clear()


def shrunk(folder: Path, schedule: Schedule) -> Schedule:
    """The same schedule with every mishap left out that is not needed to break something."""
    smallest = schedule
    for mishap in schedule.mishaps:
        fewer = dataclasses.replace(smallest, mishaps=tuple(m for m in smallest.mishaps if m is not mishap))
        if play(folder, fewer)[1]:
            smallest = fewer
    calm = dataclasses.replace(smallest, loss=0.0)
    return calm if calm.loss != smallest.loss and play(folder, calm)[1] else smallest


def hunt(folder: Path, seeds: range, after_each: Callable[[HuntCounts], None] = lambda _: None) -> HuntCounts:
    """Play a schedule for each seed."""
    counts = HuntCounts()
    # The garbage of each run is small and goes with it; looking for cycles all the time costs a tenth.
    gc.freeze()
    gc.set_threshold(50_000)
    with quick():
        for seed in seeds:
            world, found = play(folder / str(seed), schedule_of(seed))
            counts.add(world, found)
            after_each(counts)
    return counts

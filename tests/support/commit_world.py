"""Three helpers in one process, on real ledger files, over a network that loses, delays, repeats and reorders.

Time is virtual: the event loop jumps to the next thing that happens, so that an hour of asking costs milliseconds. A
crash abandons everything in memory at a named failpoint and opens the ledger again from disk. `Runs` plays worlds for
the tests of COMMIT.md.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import itertools
import shutil
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import numpy as np

from mpc_helpers.agreement import messages
from mpc_helpers.agreement.agreement import Agreement
from mpc_helpers.agreement.messages import Ask, Envelope, Propose
from mpc_helpers.agreement.negotiation import (
    AdmittedBatch,
    AgreementError,
    AlreadyReleased,
    Attempt,
    AttemptTerms,
    TooFewReports,
)
from mpc_helpers.agreement.peers import Hooks, Parties, RetryPolicy
from mpc_helpers.ledger.attempt import AttemptState, Failpoint, QueryName, Reservation, VoteStatus
from mpc_helpers.ledger.engine import LedgerClosed, LedgerOwner
from mpc_helpers.ledger.ledger import ReportLedger
from mpc_helpers.ledger.reports import Reports
from mpc_helpers.ledger.schema import HOURS_PER_DAY, REPORTS, day_table, last_hour
from protocol.amounts import Amount, Amounts
from protocol.batch import Digests, batch_root, sorted_order
from protocol.errors import Rejection
from protocol.helper_set import message_realm
from protocol.keys import IdentityKey
from protocol.vote import SignedVote, Vote

T = TypeVar("T")
Point = tuple[int, Failpoint, int]

RETRY = RetryPolicy(first_delay=0.05, max_agree_delay=0.8, max_poll_delay=2.0, reply_timeout=1.5)
SET_DIGEST = hashlib.sha256(b"the helper set of these tests").digest()
IDENTITIES = tuple(IdentityKey.from_raw(hashlib.sha256(b"identity %d" % party).digest()) for party in range(3))
KEYS = tuple(identity.public for identity in IDENTITIES)
REALM = message_realm(SET_DIGEST)
# How long an operator takes from one helper to the next when a helper set is renewed.
ROTATION_SECONDS = 3.0


def set_digest(renewals: int) -> bytes:
    """The digest of the helper set after so many renewals."""
    return hashlib.sha256(b"renewal %d" % renewals).digest() if renewals else SET_DIGEST


def parties(party: int, renewals: int = 0) -> Parties:
    """The three, as one of them sees them after so many renewals of the helper set."""
    return Parties(party, IDENTITIES[party], KEYS, message_realm(set_digest(renewals)))


class Crash(BaseException):
    """The process is gone; nothing of ours may catch it and go on."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps over every wait."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        selector: Any = self._selector  # type: ignore[attr-defined]  # an attribute of the standard loop, not in its stubs
        self._really_select = selector.select
        selector.select = self._select

    def _select(self, timeout: float | None) -> Any:
        if timeout is None:
            raise RuntimeError("nothing will ever happen again: a deadlock")
        self._now += timeout
        return self.look()

    def look(self) -> Any:
        """What has come in from outside."""
        return self._really_select(0)

    def time(self) -> float:
        return self._now


def run(main: Callable[[], Awaitable[T]], loop: Callable[[], asyncio.AbstractEventLoop] = VirtualLoop) -> T:
    """Run on a virtual loop of its own."""

    async def entry() -> T:
        return await main()

    with asyncio.Runner(loop_factory=loop) as runner:
        return runner.run(entry())


@contextmanager
def hashed_signatures() -> Iterator[None]:
    """Votes and messages are signed by keyed hashes: nobody here forges any, and Ed25519 is half the cost of a run."""
    public = {id(identity): identity.public for identity in IDENTITIES}

    def hashed(key: bytes, label: str, message: bytes) -> bytes:
        return hashlib.blake2b(label.encode() + b"\0" + message, key=key).digest()

    def sign(self: IdentityKey, label: str, message: bytes) -> bytes:
        return hashed(public[id(self)], label, message)

    def verify(key: bytes, label: str, message: bytes, signature: bytes) -> bool:
        return signature == hashed(key, label, message)

    with (
        mock.patch.object(IdentityKey, "sign", sign),
        mock.patch("protocol.vote.verify_signature", verify),
        mock.patch("mpc_helpers.agreement.messages.verify_signature", verify),
    ):
        yield


async def inline(call: Callable[[], T]) -> T:
    """The ledger's calls on the loop itself, so that every run of a seed is the same run."""
    return call()


# What every report paid, in micros.
PAID = 1_000


@dataclass(frozen=True)
class AskedQuery:
    """A query over reports named by small integers, that takes `need` of the `PAID` of each."""

    name: QueryName
    reports: tuple[int, ...]
    deadline: float = 60.0
    need: int = PAID

    @classmethod
    def of(cls, rank: int, reports: Iterable[int], deadline: float = 60.0, need: int = PAID) -> AskedQuery:
        name = QueryName(bytes([rank]) * 32, hashlib.sha256(b"query %d" % rank).digest())
        return cls(name, tuple(reports), deadline, need)

    @property
    def keeps_rest(self) -> bool:
        return self.need < PAID

    def digests(self) -> Digests:
        rows = np.array([list(report_digest(report)) for report in self.reports], dtype=np.uint8)
        return rows[sorted_order(rows)]

    def batch(self) -> AdmittedBatch:
        digests = self.digests()
        count = len(digests)
        return AdmittedBatch(
            batch_root(digests),
            digests,
            np.ones(count, dtype=np.uint32),
            np.zeros(count, dtype=np.bool_),
            np.ones(count, dtype=np.bool_),
            {},
            amounts=Amounts(count, (Amount(PAID, 1, self.need),)),
            site="",
        )


def report_digest(report: int) -> bytes:
    return hashlib.sha256(b"report %d" % report).digest()


@dataclass
class FaultPlan:
    """What goes wrong in one run."""

    seed: int = 0
    crashes: frozenset[Point] = frozenset()
    rotations: frozenset[Point] = frozenset()
    loss: float = 0.0
    calm_at: float = 30.0
    mpc_fails: Callable[[int, int], bool] = lambda _party, _number: False
    restart_after: float = 1.0
    horizon: float = 200.0


@dataclass
class CommitWorld:
    """Three nodes, the network, and everything an outsider could ever collect."""

    folder: Path
    queries: tuple[AskedQuery, ...]
    plan: FaultPlan
    honest: tuple[int, ...] = (0, 1, 2)
    # The hour in every report's header.
    hour: int = 1
    tamper: Callable[[int, int, Envelope], Envelope | None] | None = None
    block: Callable[[int, int, Envelope], bool] | None = None
    prepare: Callable[[Path], None] = lambda _path: None
    nodes: list[Node] = field(default_factory=list)
    reached: Counter[tuple[int, Failpoint]] = field(default_factory=Counter)
    crashed: list[Point] = field(default_factory=list)
    out: list[tuple[int, bytes, bytes, bytes]] = field(default_factory=list)
    accepted: dict[bytes, set[frozenset[bytes]]] = field(default_factory=lambda: defaultdict(set))
    summed: dict[tuple[bytes, int], dict[int, frozenset[bytes]]] = field(default_factory=lambda: defaultdict(dict))
    ended: dict[tuple[int, bytes], str] = field(default_factory=dict)
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    renewals: int = 0

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.plan.seed)
        self.nodes += [self.make_node(party) for party in range(3)]

    def make_node(self, party: int) -> Node:
        """A helper with an empty ledger."""
        path = self.folder / f"helper{party}.db"
        ReportLedger.create(path, LedgerOwner(party, KEYS[party]))
        self.prepare(path)
        return Node(self, party, path)

    async def play(self) -> None:
        """Start everyone, let it all happen, and come back when nothing is left to do or the horizon is reached."""
        for node in self.nodes:
            self.spawn(node.start())
        now = asyncio.get_running_loop().time
        while now() < self.plan.horizon and not self.done():
            await asyncio.sleep(0.5)
        await self.stop()

    async def stop(self) -> None:
        for node in self.nodes:
            node.kill()
        for _ in range(3):
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def rotate(self, first: Node) -> None:
        """A new helper set: the helpers are restarted with it one after the other, `first` before the others."""
        self.renewals += 1
        renewals = self.renewals
        for node in sorted(self.nodes, key=lambda node: node is not first):
            node.kill()
            node.renewals = renewals
            await asyncio.sleep(ROTATION_SECONDS)
            await node.start()

    def done(self) -> bool:
        owed = [(party, query.name.key) for party in self.honest for query in self.queries]
        alive = all(self.nodes[party].alive for party in self.honest)
        settled = alive and all(not self.nodes[party].ledger.attempts.pending() for party in self.honest)
        return settled and all(key in self.ended for key in owed)

    def spawn(self, work: Any) -> asyncio.Task[Any]:
        async def guarded() -> None:
            try:
                await work
            except (Crash, LedgerClosed):
                return  # what a dead helper left behind

        task = asyncio.get_running_loop().create_task(guarded())
        self.tasks.add(task)
        task.add_done_callback(self._finished)
        # A task cancelled before it began never awaits its work.
        task.add_done_callback(lambda _: work.close())
        return task

    def _finished(self, task: asyncio.Task[Any]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.ended[(9, repr(error).encode())] = f"failed: {error!r}"

    def chance(self, probability: float) -> bool:
        calm = not probability or asyncio.get_running_loop().time() >= self.plan.calm_at
        return not calm and bool(self.rng.random() < probability)

    async def carry(self, source: int, target: int, data: bytes) -> bytes | None:
        """The network. What was handed to it travels on even if the sender dies."""
        sent: bytes | None = self._tampered(source, target, data)
        if sent is None:
            return None
        reply: asyncio.Future[bytes | None] = asyncio.get_running_loop().create_future()
        copies = 2 if self.chance(self.plan.loss) else 1
        for _ in range(copies):
            self.spawn(self._deliver(source, target, sent, reply))
        return await reply

    async def _deliver(self, source: int, target: int, data: bytes, reply: asyncio.Future[bytes | None]) -> None:
        answer = None
        await asyncio.sleep(float(self.rng.uniform(0.001, 0.03 if not self.chance(self.plan.loss) else 3.0)))
        node = self.nodes[target]
        if node.alive and not self.chance(self.plan.loss):
            generation = node.generation
            answer = await node.agreement.receive(source, data)
            if node.generation != generation or not node.alive:
                answer = None
        if answer is not None:
            answer = self._tampered(target, source, answer)
            await asyncio.sleep(float(self.rng.uniform(0.001, 0.03)))
        if not reply.done() and not (answer is not None and self.chance(self.plan.loss)):
            reply.set_result(answer)

    def _tampered(self, source: int, target: int, data: bytes) -> bytes | None:
        if self.block is None and (self.tamper is None or source in self.honest):
            return data
        of_day = message_realm(set_digest(self.nodes[source].renewals))
        if self.block and self.block(source, target, Envelope.open(data, of_day, source, KEYS[source])):
            return None
        if self.tamper is None or source in self.honest:
            return data
        changed = self.tamper(source, target, Envelope.open(data, of_day, source, KEYS[source]))
        return changed.seal(of_day, IDENTITIES[source]) if changed else None


class Node:
    """One helper: its ledger, its agreement, and a small version of the page `Helper.answer`."""

    def __init__(self, world: CommitWorld, party: int, path: Path) -> None:
        self.world = world
        self.party = party
        self.path = path
        self.alive = False
        self.generation = 0
        self.renewals = 0
        self.work: list[asyncio.Task[Any]] = []
        self.ledger: ReportLedger
        self.agreement: Agreement

    def failpoint(self, failpoint: Failpoint) -> None:
        if not self.alive and failpoint not in STARTING:
            raise Crash
        world = self.world
        world.reached[(self.party, failpoint)] += 1
        point = (self.party, failpoint, world.reached[(self.party, failpoint)])
        if point in world.plan.crashes:
            world.crashed.append(point)
            self.kill()
            world.spawn(self._restart())
            raise Crash
        if point in world.plan.rotations:
            world.crashed.append(point)
            self.kill()
            world.spawn(world.rotate(self))
            raise Crash

    def kill(self) -> None:
        """kill -9: nothing is flushed, nothing is said."""
        self.alive = False
        self.generation += 1
        if hasattr(self, "ledger"):
            self.ledger.close()
        agreement: Any = getattr(self, "agreement", None)
        doomed = list(self.work)
        if agreement is not None:
            doomed += [*agreement.voting.poller._tasks.values(), *agreement.peers._in_flight.values()]
        for task in doomed:
            if task is not asyncio.current_task():
                task.cancel()
        self.work = []

    async def _restart(self) -> None:
        await asyncio.sleep(self.world.plan.restart_after)
        await self.start()

    async def start(self) -> None:
        generation = self.generation

        async def send(peer: int, data: bytes) -> bytes | None:
            if self.generation != generation:
                raise Crash
            return await self.world.carry(self.party, peer, data)

        self.ledger = ReportLedger(self.path, LedgerOwner(self.party, KEYS[self.party]), failpoint=self.failpoint)
        hooks = Hooks(failpoint=self.failpoint, offload=self.offload, entropy=self.world.rng.bytes)
        self.agreement = Agreement(self.ledger, parties(self.party, self.renewals), send, retry=RETRY, hooks=hooks)
        await self.agreement.recover()
        self.alive = True
        for query in self.world.queries:
            if (self.party, query.name.key) not in self.world.ended:
                self.work.append(self.world.spawn(self.answer(query)))

    async def offload(self, call: Callable[[], T]) -> T:
        return await inline(call)

    async def answer(self, query: AskedQuery) -> None:
        """Admit · Agree · Spend · Sum · Noise · Open, with a label for a share."""
        now = asyncio.get_running_loop().time
        while True:
            released = await self.offload(partial(self.ledger.attempts.released, query.name.key))
            if released is not None and released.sealed_share is not None:
                break
            if now() >= query.deadline:
                self.world.ended[(self.party, query.name.key)] = "given up"
                return
            try:
                await self.attempt(query)
            except AlreadyReleased:
                continue
            except TooFewReports:
                self.world.ended[(self.party, query.name.key)] = "given up"
                return
            except AgreementError:
                await asyncio.sleep(0.3)
        self.failpoint(Failpoint.ANSWER_BEFORE_SEND)
        self.world.out.append((self.party, query.name.key, released.attempt_id, released.sealed_share))
        self.failpoint(Failpoint.ANSWER_AFTER_SEND)
        self.world.ended[(self.party, query.name.key)] = "released"

    def terms(self, query: AskedQuery) -> AttemptTerms:
        return AttemptTerms(query.name, False, bytes(32), keeps_rest=query.keeps_rest)

    async def attempt(self, query: AskedQuery) -> None:
        now = asyncio.get_running_loop().time
        deadline = max(min(now() + 25, query.deadline), now() + 0.1)
        batch = query.batch()
        agreed = await self.agreement.agree(self.terms(query), batch, deadline)
        attempt = await self.agreement.preparation.reserve(agreed)
        self._note(attempt, batch)
        self.failpoint(Failpoint.COMPUTE)
        await asyncio.sleep(0.1)
        if self.world.plan.mpc_fails(self.party, attempt.number):
            await asyncio.sleep(0.2)
            await self.agreement.abort(attempt, "the MPC failed")
            return
        share = b"share %d of %s" % (self.party, attempt.attempt_id.hex().encode())
        # A query that is asked again while its vote is out: the next attempt must wait for the end of this one.
        with suppress(TimeoutError):
            async with asyncio.timeout(10):
                await self.agreement.commit(attempt, share)

    def _note(self, attempt: Attempt, batch: AdmittedBatch) -> None:
        accepted = frozenset(bytes(row) for row in batch.digests[:][attempt.accepted])
        self.world.accepted[attempt.attempt_id].add(accepted)
        self.world.summed[(attempt.query.key, attempt.number)][self.party] = accepted


STARTING = (
    Failpoint.START_BEFORE_SWEEP,
    Failpoint.SWEEP_BEFORE_COMMIT,
    Failpoint.SWEEP_AFTER_COMMIT,
    Failpoint.START_AFTER_SWEEP,
)


def violations(world: CommitWorld) -> list[str]:
    """S1, S3, L1 and L2 of COMMIT.md, read off the ledgers on disk and what was let out."""
    ledgers = {party: _reopen(world, party) for party in world.honest}
    try:
        found = [text for key, text in world.ended.items() if key[0] == 9]
        found += _safety(world, ledgers)
        if world.honest == (0, 1, 2):
            found += _liveness(world, ledgers)
        return found
    finally:
        for ledger in ledgers.values():
            ledger.close()


def _safety(world: CommitWorld, ledgers: dict[int, ReportLedger]) -> list[str]:
    found = []
    let_out: dict[bytes, set[bytes]] = defaultdict(set)
    bytes_of: dict[tuple[int, bytes], set[bytes]] = defaultdict(set)
    for party, key, attempt_id, share in world.out:
        if party in world.honest:
            let_out[key].add(attempt_id)
            bytes_of[(party, key)].add(share)
    for ledger in ledgers.values():
        for query in world.queries:
            released = ledger.attempts._select("query_key = ? AND state = 'released'", query.name.key)
            let_out[query.name.key].update(record.attempt_id for record in released)
    found += [f"S3: two attempts of one query are out: {key[:2].hex()}" for key, ids in let_out.items() if len(ids) > 1]
    found += [f"S3: helper {who[0]} sent different bytes" for who, shares in bytes_of.items() if len(shares) > 1]
    found += ["one attempt id, two sets" for sets in world.accepted.values() if len(sets) > 1]
    answers = [(key, attempt_id) for key, ids in let_out.items() for attempt_id in ids]
    if any(taken > PAID for taken in _taken(world, answers).values()):
        found.append("S1: released answers that share a report cost more than was paid")
    for _, attempt_id in answers:
        for party, ledger in ledgers.items():
            record = ledger.attempts.find(attempt_id)
            if record is not None and record.state in (AttemptState.RESERVED, AttemptState.ABORTED):
                found.append(f"half spent: released somewhere, {record.state.value} at helper {party}")
    return found


def _liveness(world: CommitWorld, ledgers: dict[int, ReportLedger]) -> list[str]:
    found = []
    for party, ledger in ledgers.items():
        found += [f"L1: stuck as {record.state.value} at helper {party}" for record in ledger.attempts.pending()]
    for query in world.queries:
        records = [ledger.attempts.live(query.name.key) for ledger in ledgers.values()]
        states = {record.state if record else None for record in records}
        if len(states) != 1 or len({record.attempt_id if record else b"" for record in records}) != 1:
            found.append(f"L1: {query.name.key[:1].hex()} ended differently: {states}")
        if any(world.ended.get((party, query.name.key)) is None for party in ledgers):
            found.append(f"L1: {query.name.key[:1].hex()} never ended at some helper")
    for party, ledger in ledgers.items():
        records = [ledger.attempts.live(query.name.key) for query in world.queries]
        taken = _taken(world, [(record.query.key, record.attempt_id) for record in records if record])
        for query in world.queries:
            batch = dataclasses.replace(query.batch(), hours=np.full(len(query.reports), world.hour, dtype=np.uint32))
            assert batch.amounts is not None
            left = ledger.reports.left(batch.digests, batch.hours, batch.amounts, bytes(32), site="")
            if left.tolist() != [PAID - taken[bytes(row)] for row in batch.digests[:]]:
                found.append(f"L1: helper {party} does not leave what was paid less what answers cost")
    return found


def _taken(world: CommitWorld, answers: Iterable[tuple[bytes, bytes]]) -> Counter[bytes]:
    """What the answers cost each report, by their query's keys and attempt ids."""
    needs = {query.name.key: query.need for query in world.queries}
    taken: Counter[bytes] = Counter()
    for key, attempt_id in answers:
        taken.update(dict.fromkeys(_union(world.accepted[attempt_id]), needs[key]))
    return taken


def _union(sets: Iterable[frozenset[bytes]]) -> frozenset[bytes]:
    return frozenset(itertools.chain.from_iterable(sets))


def point_regardless(reports: Reports, connection: Any, attempt: int, reservation: Reservation) -> int:
    """Stands for `Reports.point` in a ledger that takes reports from whoever holds them, without guards."""
    table = day_table(day := int(reservation.hours[0]) // HOURS_PER_DAY)
    connection.execute(REPORTS.format(table=table).replace("CREATE TABLE", "CREATE TABLE IF NOT EXISTS"))
    connection.execute("INSERT INTO days VALUES (?, ?) ON CONFLICT DO NOTHING", (day, last_hour(day)))
    for row in reservation.digests[:]:
        connection.execute(f"INSERT OR REPLACE INTO {table} VALUES (?, ?, 0, 0, NULL, 0)", (bytes(row), attempt))  # noqa: S608
    return len(reservation.digests)


def _reopen(world: CommitWorld, party: int) -> ReportLedger:
    return ReportLedger(world.nodes[party].path, LedgerOwner(party, KEYS[party]))


def rejected(batch: AdmittedBatch, positions: Iterable[int], reason: Rejection) -> AdmittedBatch:
    """The batch with some reports not admitted."""
    admitted = batch.admitted.copy()
    places = list(positions)
    admitted[places] = False
    return AdmittedBatch(batch.root, batch.digests, batch.hours, batch.debug, admitted, {reason: len(places)}, site="")


ONE = (AskedQuery.of(1, range(6)),)
# For runs that are meant to end badly: nothing is gained by watching them ask for ever.
SHORT = (AskedQuery.of(1, range(6), deadline=20.0),)
SAME = (AskedQuery.of(1, range(6)), AskedQuery.of(2, range(6)))
# The first two use report 3 up; the third finds too little of it, and takes a part of the others.
PARTS = (
    AskedQuery.of(1, range(4), need=400),
    AskedQuery.of(2, range(3, 6), need=600),
    AskedQuery.of(3, range(6), need=100),
)
OVERLAPPING = (AskedQuery.of(1, range(6)), AskedQuery.of(2, range(3, 9)))


class Runs:
    """Plays worlds, each in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._numbers = itertools.count()

    def play(self, queries: tuple[AskedQuery, ...], plan: FaultPlan, **settings: Any) -> CommitWorld:
        """Play a world to its end."""
        world = self.world(queries, plan, **settings)
        run(world.play)
        return world

    def broken(self, queries: tuple[AskedQuery, ...], plan: FaultPlan) -> tuple[CommitWorld, list[str]]:
        """Play a world and give what it violates. Its files go: a matrix of a thousand would fill the memory disk."""
        world = self.play(queries, plan)
        found = violations(world)
        shutil.rmtree(world.folder)
        return world, found

    def world(self, queries: tuple[AskedQuery, ...], plan: FaultPlan, **settings: Any) -> CommitWorld:
        folder = self._folder / str(next(self._numbers))
        folder.mkdir()
        return CommitWorld(folder, queries, plan, **settings)


def fails_at(party: int) -> Callable[[int, int], bool]:
    """The MPC of one helper fails in the first two attempts, after the others have voted."""
    return lambda failing, number: failing == party and number <= 2


def vote_of(party: int, attempt_id: bytes, status: VoteStatus) -> messages.StateMessage:
    vote = Vote.YES if status is VoteStatus.YES else Vote.ABORTED
    return messages.StateMessage(attempt_id, status, (SignedVote.sign(party, attempt_id, vote, IDENTITIES[party]),))


def says(statuses: dict[int, VoteStatus]) -> Callable[[int, int, Envelope], Envelope]:
    """A helper whose every STATE says `statuses[target]`, whatever its ledger holds."""

    def tamper(source: int, target: int, envelope: Envelope) -> Envelope:
        if isinstance(envelope.body, messages.StateMessage):
            return dataclasses.replace(envelope, body=vote_of(source, envelope.body.attempt_id, statuses[target]))
        return envelope

    return tamper


def equivocate(source: int, target: int, envelope: Envelope) -> Envelope:
    """Different bitmaps to different peers: unnoticed, the difference of the two sums is one person's report."""
    body = envelope.body
    if isinstance(body, Propose) and target == 0 and asyncio.get_running_loop().time() < 3:
        mask = body.mask
        mask[2] = False
        counts = (*body.rejections[:-1], body.rejections[-1] + 1)
        changed = dataclasses.replace(body, bitmap=messages.pack_mask(mask), rejections=counts)
        return dataclasses.replace(envelope, body=changed)
    return envelope


def no_votes_to(party: int | None, until: float) -> Callable[[int, int, Envelope], bool]:
    """Votes and questions about them get lost for a while, to one helper or to all."""

    def block(source: int, target: int, envelope: Envelope) -> bool:
        early = asyncio.get_running_loop().time() < until
        return early and isinstance(envelope.body, messages.StateMessage | Ask) and party in (None, target, source)

    return block


async def empty_at(world: CommitWorld, party: int, time: float, *, trusted: bool) -> None:
    """Helper's disk is destroyed at `time` and comes back empty; with `trusted`, its peers are told that is fine."""
    for node in world.nodes:
        world.spawn(node.start())
    await asyncio.sleep(time)
    node = world.nodes[party]
    node.kill()
    for path in list(node.path.parent.glob(node.path.name + "*")):
        path.unlink()
    ReportLedger.create(node.path, LedgerOwner(party, KEYS[party]))
    world.prepare(node.path)
    if trusted:
        for other in world.nodes:
            if other is not node:
                _trust_new_ledger(other.agreement, party)
    await node.start()
    await asyncio.sleep(60)
    await world.stop()


def _trust_new_ledger(agreement: Any, party: int) -> None:
    """As an operator does who accepts a peer's new ledger, but while the daemon runs."""
    agreement.ledger.peer_heads.forget(party)
    agreement.peers._verified.pop(party, None)
    agreement.alarms.texts.pop(party, None)


def honest_sums(world: CommitWorld) -> list[dict[int, frozenset[bytes]]]:
    both = (known for known in world.summed.values() if 0 in known and 1 in known)
    return [{0: known[0], 1: known[1]} for known in both]


def helpers_that_answered(world: CommitWorld, query: AskedQuery) -> set[int]:
    return {party for party, key, _, _ in world.out if key == query.name.key}

"""The world of `commit_world` when everything goes wrong together, at moments that a schedule says.

There are kill -9, pauses, partitions, full disks, clock failpoints, renewals of the helper set and failing sessions.
Time is virtual. Ledgers are SQLite databases in memory, from which a crash takes what was not committed.
"""

from __future__ import annotations

import asyncio
import dataclasses
import email.utils
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import numpy as np

from mpc_helpers.agreement.messages import (
    SALT_SIZE,
    Ask,
    Body,
    Head,
    Hello,
    Propose,
    Reserved,
    StateMessage,
    pack_mask,
)
from mpc_helpers.agreement.negotiation import (
    AgreementError,
    AlreadyReleased,
    Attempt,
    DrawnTooOften,
    TooFewReports,
)
from mpc_helpers.agreement.peers import Parties, RetryPolicy
from mpc_helpers.ledger.attempt import AttemptOutcome, Failpoint, VoteStatus
from mpc_helpers.ledger.engine import LedgerClosed, LedgerError, LedgerOwner
from mpc_helpers.ledger.ledger import ReportLedger
from mpc_helpers.service import housekeeping
from protocol.errors import ProtocolError
from protocol.units import DAY, HOUR
from protocol.vote import Vote
from tests.support.commit_world import KEYS, AskedQuery, CommitWorld, FaultPlan, Node, Point, VirtualLoop, parties
from tests.support.hunt_schedule import DEADLINE, HuntFault, Lie, MaliciousHelper, Mishap, Schedule


@cache
def template(party: int) -> sqlite3.Connection:
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
        template(party).backup(database)
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

    def execute(self, *statement: Any) -> sqlite3.Cursor:
        return self._open().execute(*statement)

    def begin(self) -> None:
        self._open().execute("BEGIN IMMEDIATE")

    def commit(self) -> None:
        self._open().execute("COMMIT")

    def roll_back(self) -> None:
        if self._database is not None:
            self._database.rollback()

    def close(self) -> None:
        if self._database is not None and self._database.in_transaction:
            self._database.execute("ROLLBACK")
        self._database = None


T = TypeVar("T")
# The wall clock at the beginning: whole hours, as reports are dated.
BEGINNING = 500_000 * HOUR
LIFETIME = 10 * DAY
KEY_ENDS = BEGINNING + 5 * DAY
# An hour of housekeeping in a few virtual seconds.
ROUND_SECONDS = 1.5
CALM_AT = 9.0
RETRY = RetryPolicy(first_delay=0.3, max_agree_delay=3.0, max_poll_delay=4.0, reply_timeout=2.0)
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
            (mishap.party, mishap.failpoint, mishap.number)
            for mishap in schedule.mishaps
            if mishap.fault is HuntFault.KILL_AT_FAILPOINT
        )
        fails = [mishap for mishap in schedule.mishaps if mishap.fault is HuntFault.MPC_FAILS]
        plan = FaultPlan(
            seed=schedule.seed,
            crashes=crashes,
            loss=schedule.loss,
            calm_at=CALM_AT,
            mpc_fails=lambda party, number: any(m.party == party and number <= m.number for m in fails),
            # Votes that contradict each other lock reports for good, and nothing more happens.
            horizon=120.0 if schedule.malicious is None else 30.0,
        )
        liar = schedule.malicious
        self.lies: Counter[Lie] = Counter()
        self._liar = None if liar is None else Liar(liar, self.lies)
        honest = tuple(party for party in range(3) if liar is None or party != liar.party)
        super().__init__(folder, schedule.queries, plan, honest=honest)
        self.hour = BEGINNING // HOUR

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
        owed = len(self.honest) * len(self.queries)
        return asyncio.get_running_loop().time() > CALM_AT and len(self.ended) >= owed and super().done()

    async def _befall(self, mishap: Mishap) -> None:
        node = cast(HuntNode, self.nodes[mishap.party])
        if mishap.fault in (HuntFault.KILL_AT_FAILPOINT, HuntFault.MPC_FAILS):
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
            self._awaited.setdefault((mishap.watched, mishap.failpoint, mishap.number), []).append(event)
            await event.wait()
        await asyncio.sleep(mishap.at)
        return asyncio.get_running_loop().time()

    def reached_failpoint(self, point: Point) -> None:
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

    def _tampered(self, source: int, target: int, data: bytes) -> bytes | None:
        if self._liar is None or source in self.honest:
            return data
        return self._liar.changed(parties(source, self.nodes[source].renewals), data)

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


class Liar:
    """A malicious helper's mouth: it changes what its code would send, each time and to each peer anew."""

    def __init__(self, helper: MaliciousHelper, told: Counter[Lie]) -> None:
        self._helper = helper
        self._rng = np.random.default_rng(helper.seed)
        self._told = told
        self._old: list[Body] = []

    def changed(self, own: Parties, data: bytes) -> bytes | None:
        """Return the message that it sends instead, signed by itself, or None."""
        try:
            envelope = own.open(own.party, data)
        except ProtocolError:
            return data  # sealed before the last renewal
        if isinstance(envelope.body, Hello | Head) or self._rng.random() >= self._helper.often:
            return data
        lie = self._helper.lies[int(self._rng.integers(len(self._helper.lies)))]
        body = self._lie(own, lie, envelope.body)
        self._old.append(envelope.body)
        if body is not envelope.body:
            self._told[lie] += 1
        return None if body is None else own.seal(envelope.boot, envelope.head, body)

    def _lie(self, own: Parties, lie: Lie, body: Body) -> Body | None:
        match lie, body:
            case Lie.DROP, _:
                return None
            case Lie.REPLAY, _ if self._old:
                return self._old[int(self._rng.integers(len(self._old)))]
            case Lie.VOTE_YES, StateMessage() | Ask():
                vote = own.sign_vote(body.attempt_id, Vote.YES)
                return StateMessage(body.attempt_id, VoteStatus.YES, (vote,))
            case Lie.VOTE_NO, StateMessage() | Ask():
                vote = own.sign_vote(body.attempt_id, Vote.ABORTED)
                return StateMessage(body.attempt_id, VoteStatus.NO, (vote,))
            case Lie.RENOUNCE, StateMessage() | Ask():
                vote = own.sign_vote(body.attempt_id, Vote.RENOUNCED)
                return StateMessage(body.attempt_id, VoteStatus.NO, (vote,))
            case Lie.OTHER_STATE, StateMessage():
                return StateMessage(body.attempt_id, VoteStatus.UNKNOWN, ())
            case Lie.LEAVE_OUT, Propose() if body.mask.any():
                mask = body.mask.copy()
                mask[int(self._rng.choice(np.flatnonzero(mask)))] = False
                counts = (*body.rejections[:-1], body.rejections[-1] + 1)
                return dataclasses.replace(body, bitmap=pack_mask(mask), rejections=counts)
            case Lie.OTHER_SALT, Propose():
                return dataclasses.replace(body, salt=self._rng.bytes(SALT_SIZE))
            case Lie.RAISE, Propose():
                return dataclasses.replace(body, number=body.number + int(self._rng.integers(1, 3)))
            case Lie.OTHER_ATTEMPT, Reserved():
                return dataclasses.replace(body, attempt_id=self._rng.bytes(32))
            case _:
                return body


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
        self.peer_clocks = housekeeping.PeerClocks(membership, self.wall)
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

    def failpoint(self, failpoint: Failpoint) -> None:
        full = self.full_until and asyncio.get_running_loop().time() < self.full_until
        if full and "before commit" in failpoint.value:
            self.full_hits += 1
            raise LedgerError("cannot use the ledger: database or disk is full")
        before = len(self.world.crashed)
        try:
            super().failpoint(failpoint)
        finally:
            self.world.happened[HuntFault.KILL_AT_FAILPOINT] += len(self.world.crashed) - before
            self.world.reached_failpoint((self.party, failpoint, self.world.reached[(self.party, failpoint)]))

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
                housekeeping.check_clock(now, self.last_round, self.peer_clocks)
            except housekeeping.ClockDoubted:
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
                released = await self.offload(partial(self.ledger.attempts.released, query.name.key))
                if released is not None and released.sealed_share is not None:
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
        self.failpoint(Failpoint.ANSWER_BEFORE_SEND)
        self.world.out.append((self.party, query.name.key, released.attempt_id, released.sealed_share))
        self.failpoint(Failpoint.ANSWER_AFTER_SEND)
        self.world.ended[key] = "released"

    async def attempt(self, query: AskedQuery, deadline: float = DEADLINE) -> None:
        """*Agree · Spend · Sum · Noise · Open*, with the real block that gives reports back."""
        batch = dataclasses.replace(
            query.batch(), hours=np.full(len(query.reports), BEGINNING // HOUR, dtype=np.uint32)
        )
        terms = dataclasses.replace(self.terms(query), most_draws=self.world.schedule.draws)
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
        self.failpoint(Failpoint.COMPUTE)
        await asyncio.sleep(0.1)
        await self.awake()
        peers = [peer for peer in range(3) if peer != self.party]
        fails = self.world.plan.mpc_fails(self.party, attempt.number)
        if fails or any(self.world.is_cut(self.party, peer) for peer in peers):
            self.world.happened[HuntFault.MPC_FAILS] += fails
            raise AgreementError("the MPC failed")

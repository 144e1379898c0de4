"""COMMIT.md under planned crashes, a bad network, a bad helper, and the variants that look reasonable and are wrong.

The planned matrix has every (helper, step, first time or second time or both), each in the first scenario that reaches
it; planned crashes find bugs that random ones miss. With TREFOIL_FULL_MATRIX=1 (`make chaos`) every scenario has all of
them. A run that fails prints its scenario, seed and crash points.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import itertools
import os
import shutil
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from commit_world import (
    IDENTITIES,
    KEYS,
    REALM,
    AskedQuery,
    Plan,
    Point,
    World,
    run,
    violations,
)

from mpc_helpers import messages, talk
from mpc_helpers.agreement import Agreement
from mpc_helpers.attempt import AttemptRecord, HeardVote, State, Step, Vote, Word
from mpc_helpers.messages import Ask, Envelope, Propose, Reserved, SignedVote
from mpc_helpers.nonce_ledger import Fenced, NonceLedger, Owner, Standing
from mpc_helpers.spending import Spending

FULL_MATRIX = bool(os.environ.get("TREFOIL_FULL_MATRIX"))
ONE = (AskedQuery.of(1, range(6)),)
# For runs that are meant to end badly: nothing is gained by watching them ask for ever.
SHORT = (AskedQuery.of(1, range(6), deadline=20.0),)
SAME = (AskedQuery.of(1, range(6)), AskedQuery.of(2, range(6)))
OVERLAPPING = (AskedQuery.of(1, range(6)), AskedQuery.of(2, range(3, 9)))


def fails_at(helper: int) -> Callable[[int, int], bool]:
    """The MPC of one helper fails in the first two attempts, after the others have voted."""
    return lambda failing, number: failing == helper and number <= 2


def dies_computing(helper: int) -> frozenset[Point]:
    return frozenset({(helper, Step.COMPUTE, 1), (helper, Step.COMPUTE, 2)})


SCENARIOS: dict[str, tuple[tuple[AskedQuery, ...], Plan]] = {
    "plain": (ONE, Plan(seed=1)),
    "MPC fails at helper 1": (ONE, Plan(seed=2, mpc_fails=fails_at(0))),
    "MPC fails at helper 2": (ONE, Plan(seed=3, mpc_fails=fails_at(1))),
    "MPC fails at helper 3": (ONE, Plan(seed=9, mpc_fails=fails_at(2))),
    "helper 1 dies twice computing": (ONE, Plan(seed=4, crashes=dies_computing(0))),
    "helper 2 dies twice computing": (ONE, Plan(seed=5, crashes=dies_computing(1))),
    "helper 3 dies twice computing": (ONE, Plan(seed=6, crashes=dies_computing(2))),
    "two queries, same reports": (SAME, Plan(seed=7)),
    "two queries, overlapping, bad network": (OVERLAPPING, Plan(seed=8, loss=0.15)),
}


class Runs:
    """Plays worlds, each in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._numbers = itertools.count()

    def play(self, queries: tuple[AskedQuery, ...], plan: Plan, **settings: Any) -> World:
        """Play a world to its end."""
        world = self.world(queries, plan, **settings)
        run(world.play)
        return world

    def world(self, queries: tuple[AskedQuery, ...], plan: Plan, **settings: Any) -> World:
        folder = self._folder / str(next(self._numbers))
        folder.mkdir()
        return World(folder, queries, plan, **settings)


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    # In memory where there is such a place: these crashes kill processes, not power, so fsync would only cost time.
    shared = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(dir=shared)) if os.access(shared, os.W_OK) else tmp_path
    yield Runs(folder)
    shutil.rmtree(folder)


def planned(plan: Plan, reached: Counter[tuple[int, Step]]) -> Iterator[frozenset[Point]]:
    """A crash at each step reached: the first time, the second time, and both."""
    for (helper, step), count in sorted(reached.items(), key=lambda item: (item[0][0], item[0][1].value)):
        first, second = (helper, step, 1), (helper, step, 2)
        for crash in ({first}, {second} if count > 1 else set(), {first, second}):
            if crash and not crash <= plan.crashes:
                yield frozenset(crash)


def test_planned_crashes(runs: Runs, show: Callable[[str], None]) -> None:
    """S1, S3, L1 and L2 after a crash at every step, at every helper, the first and the second time it is reached."""
    table: dict[str, int] = {}
    hit: Counter[Point] = Counter()
    done: set[tuple[int, frozenset[Point]]] = set()
    for name, (queries, plan) in SCENARIOS.items():
        dry = runs.play(queries, plan)
        assert violations(dry) == [], name
        crashes = [crash for crash in planned(plan, dry.reached) if FULL_MATRIX or (len(queries), crash) not in done]
        if len(queries) > 1 and not FULL_MATRIX:
            crashes = [crash for crash in crashes if all(time == 1 for _, _, time in crash) or not crash <= set(hit)]
        for crash in crashes:
            world = runs.play(queries, dataclasses.replace(plan, crashes=plan.crashes | crash))
            hit.update(world.crashed)
            assert violations(world) == [], (name, plan.seed, sorted((h + 1, s.value, n) for h, s, n in crash))
        done |= {(len(queries), crash) for crash in crashes}
        table[name] = 1 + len(crashes)
    show(_matrix(table, hit))
    missed = {(h, s, n) for h in range(3) for s in Step for n in (1, 2)} - set(hit)
    assert not missed, f"crash points never exercised: {sorted((h + 1, s.value, n) for h, s, n in missed)}"


def _matrix(table: dict[str, int], hit: Counter[Point]) -> str:
    lines = ["planned runs by scenario:"]
    lines += [f"  {count:4d}  {name}" for name, count in table.items()]
    lines.append(f"  {sum(table.values()):4d}  in all; crashes by step (helper 1, 2, 3; first + second time):")
    for step in Step:
        counts = "  ".join(f"{hit[(helper, step, 1)]:3d}+{hit[(helper, step, 2)]:2d}" for helper in range(3))
        lines.append(f"        {counts}  {step.value}")
    return "\n".join(lines)


def test_random_crashes(runs: Runs) -> None:
    """Random crash points and a bad network, from seeds that are printed on failure."""
    import numpy as np

    for seed in range(100, 112):
        rng = np.random.default_rng(seed)
        steps = list(Step)
        crashes = frozenset(
            (int(rng.integers(3)), steps[int(rng.integers(len(steps)))], int(rng.integers(1, 4))) for _ in range(6)
        )
        queries = (ONE, SAME, OVERLAPPING)[seed % 3]
        plan = Plan(seed=seed, crashes=crashes, loss=0.25, mpc_fails=fails_at(int(rng.integers(3))))
        assert violations(runs.play(queries, plan)) == [], f"seed {seed}"


# The extra list at the end of COMMIT.md.


def test_a_dead_workers_late_vote_changes_no_row(runs: Runs) -> None:
    world = runs.play(ONE, Plan(crashes=frozenset({(1, Step.COMPUTE, 1)})))
    ledger = NonceLedger(world.nodes[1].path, Owner(1, KEYS[1]))
    before = ledger.head
    (aborted,) = [attempt for attempt in world.accepted if _state(ledger, attempt) is State.ABORTED]
    with pytest.raises(Fenced):
        ledger.vote(aborted, b"a share computed by a worker that should be dead")
    assert ledger.head == before
    assert _state(ledger, aborted) is State.ABORTED
    ledger.close()


def test_ask_about_an_unknown_attempt_is_never_answered_no(runs: Runs) -> None:
    world = runs.world(ONE, Plan())

    async def ask() -> messages.State:
        for node in world.nodes:
            world.spawn(node.start())
        await asyncio.sleep(5)
        reply = await world.nodes[0].agreement.peers.call(1, Ask(b"?" * 32))
        await world.stop()
        assert isinstance(reply, messages.State)
        return reply

    assert run(ask) == messages.State(b"?" * 32, Word.UNKNOWN, ())


def test_an_emptied_ledger_is_noticed_and_never_says_no(runs: Runs) -> None:
    """Helper 2's disk is destroyed after the release: peers refuse it, and even trusted it cannot undo anything."""
    for trusted in (False, True):
        world = runs.world(SAME, Plan(seed=11), block=_no_votes_to(2, until=6.0))
        run(functools.partial(_empty_at, world, 1, 5.0, trusted=trusted))
        found = [text for text in violations(world) if "helper 1" not in text and "differently" not in text]
        assert [text for text in found if not text.startswith("L1")] == []
        assert _out(world, SAME[0]) == {0, 2} | _out(world, SAME[0])
        assert len({attempt for _, _, attempt, _ in world.out}) == 1
        if not trusted:
            assert "another ledger" in world.nodes[0].agreement.peers.alarms[1]


def test_an_older_copy_of_a_ledger_is_refused(runs: Runs) -> None:
    world = runs.world(ONE, Plan(seed=12))
    node = world.nodes[1]
    copy = node.path.with_suffix(".old")

    async def restore() -> None:
        shutil.copy(node.path, copy)
        for each in world.nodes:
            world.spawn(each.start())
        await asyncio.sleep(5)
        node.kill()
        for suffix in ("-wal", "-shm"):
            node.path.with_name(node.path.name + suffix).unlink(missing_ok=True)
        shutil.copy(copy, node.path)
        world.ended.pop((1, ONE[0].name.key))
        await node.start()
        await asyncio.sleep(5)
        await world.stop()

    run(restore)
    assert "went back" in world.nodes[0].agreement.peers.alarms[1]
    assert "went back" in world.nodes[2].agreement.peers.alarms[1]
    assert "further" in node.agreement.peers.alarms[1]
    assert len({attempt for _, _, attempt, _ in world.out}) == 1


def test_two_queries_reserving_crosswise(runs: Runs) -> None:
    """Each of two queries is first at another helper; the smaller id wins everywhere and nothing stays locked."""
    for seed in range(20, 23):
        held = _first_reservations(runs, seed)
        assert held == []


def _first_reservations(runs: Runs, seed: int) -> list[str]:
    def block(source: int, target: int, envelope: Envelope) -> bool:
        # Until 2 s nobody hears a RESERVED, so both queries get as far as reserving wherever they can.
        return asyncio.get_running_loop().time() < 2.0 and isinstance(envelope.body, Reserved)

    world = runs.play(OVERLAPPING, Plan(seed=seed, loss=0.2), block=block)
    return violations(world)


def test_number_2_to_the_63_minus_1_is_ignored(runs: Runs) -> None:
    """A bad helper that proposes the largest number cannot make the numbers run out."""

    def huge(source: int, target: int, envelope: Envelope) -> Envelope:
        if isinstance(envelope.body, Propose) and asyncio.get_running_loop().time() < 3.0:
            return dataclasses.replace(envelope, body=dataclasses.replace(envelope.body, number=2**63 - 1))
        return envelope

    world = runs.play(ONE, Plan(seed=13), honest=(0, 1), tamper=huge)
    assert violations(world) == []
    ledger = NonceLedger(world.nodes[0].path, Owner(0, KEYS[0]))
    assert 0 < ledger.last_number(ONE[0].name.key) < 100
    ledger.close()
    assert _out(world, ONE[0]) >= {0, 1}


# One bad helper.


def vote_of(helper: int, attempt_id: bytes, word: Word) -> messages.State:
    vote = Vote.YES if word is Word.YES else Vote.ABORTED
    return messages.State(attempt_id, word, (SignedVote.sign(helper, attempt_id, vote, REALM, IDENTITIES[helper]),))


def says(words: dict[int, Word]) -> Callable[[int, int, Envelope], Envelope]:
    """A helper whose every STATE says `words[target]`, whatever its ledger holds."""

    def tamper(source: int, target: int, envelope: Envelope) -> Envelope:
        if isinstance(envelope.body, messages.State):
            return dataclasses.replace(envelope, body=vote_of(source, envelope.body.attempt_id, words[target]))
        return envelope

    return tamper


def test_yes_to_one_and_no_to_the_other_is_a_dispute_with_proof(runs: Runs) -> None:
    """What remains of COMMIT.md: one honest helper released, the other renounced, the liar proven by its signatures."""
    world = runs.play(SHORT, Plan(seed=14, horizon=40.0), honest=(0, 1), tamper=says({0: Word.YES, 1: Word.NO}))
    assert violations(world) == []
    states, liars = set(), set()
    for helper in (0, 1):
        ledger = NonceLedger(world.nodes[helper].path, Owner(helper, KEYS[helper]))
        record = ledger.live(SHORT[0].name.key)
        assert record is not None
        states.add(record.state)
        liars |= record.liars
        proof = [SignedVote.decode(vote.message) for vote in record.votes if vote.helper == 2]
        for vote in proof:
            vote.verify(REALM, KEYS[2])
        ledger.close()
    assert states == {State.RELEASED, State.RENOUNCED}
    assert liars == {2}


def test_a_peer_that_says_yes_and_then_no(runs: Runs) -> None:
    """The NO is final: nothing is freed unless both honest helpers are free of the attempt, and nothing leaks twice."""

    def tamper(source: int, target: int, envelope: Envelope) -> Envelope:
        if not isinstance(envelope.body, messages.State):
            return envelope
        said[(target, envelope.body.attempt_id)] += 1
        word = Word.YES if said[(target, envelope.body.attempt_id)] == 1 else Word.NO
        return dataclasses.replace(envelope, body=vote_of(source, envelope.body.attempt_id, word))

    for seed in range(30, 34):
        said: Counter[tuple[int, bytes]] = Counter()
        world = runs.play(ONE, Plan(seed=seed, loss=0.2, horizon=80.0), honest=(0, 1), tamper=tamper)
        assert violations(world) == [], f"seed {seed}"


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


def other_salt(source: int, target: int, envelope: Envelope) -> Envelope:
    body = envelope.body
    if isinstance(body, Propose) and target == 0 and asyncio.get_running_loop().time() < 3:
        return dataclasses.replace(envelope, body=dataclasses.replace(body, salt=bytes(32)))
    return envelope


def parrot(source: int, target: int, envelope: Envelope) -> Envelope:
    """Equivocates, and claims to each peer to have reserved exactly what that peer reserved."""
    envelope = equivocate(source, target, envelope)
    if isinstance(envelope.body, Reserved) and target in heard_roots:
        return dataclasses.replace(envelope, body=dataclasses.replace(envelope.body, attempt_id=heard_roots[target]))
    return envelope


heard_roots: dict[int, bytes] = {}


def overhear(source: int, target: int, envelope: Envelope) -> bool:
    if target == 2 and isinstance(envelope.body, Reserved):
        heard_roots[source] = envelope.body.attempt_id
    return False


@pytest.mark.parametrize("tamper", [equivocate, other_salt, parrot])
def test_a_bad_helper_never_makes_the_honest_ones_sum_different_sets(
    runs: Runs, tamper: Callable[[int, int, Envelope], Envelope]
) -> None:
    for seed in range(40, 42):
        heard_roots.clear()
        world = runs.play(ONE, Plan(seed=seed), honest=(0, 1), tamper=tamper, block=overhear)
        assert violations(world) == []
        assert all(len(set(sets.values())) == 1 for sets in _honest_sums(world)), f"seed {seed}"
        # The bad helper behaves after three seconds: then the query is answered, so nothing was lost to it.
        assert _out(world, ONE[0]) >= {0, 1}


def _honest_sums(world: World) -> list[dict[int, frozenset[bytes]]]:
    both = (known for known in world.summed.values() if 0 in known and 1 in known)
    return [{0: known[0], 1: known[1]} for known in both]


# Variants that look reasonable and are wrong: each is caught.


def without_guards(path: Path) -> None:
    """The variants below are also stopped by SQLite; take its guards away to see that the runs catch them too."""
    with closing(sqlite3.connect(path)) as db:
        for kind in ("trigger", "index"):
            names = db.execute("SELECT name FROM sqlite_master WHERE type = ? AND sql IS NOT NULL", (kind,)).fetchall()
            for (name,) in names:
                db.execute(f"DROP {kind} {name}")
        db.commit()


_correct_move = Spending._move


async def release_on_own_vote(self: Spending, record: AttemptRecord, votes: list[HeardVote]) -> bool:
    return await _release_if(self, record, votes, needed=0)


async def release_on_two_of_three(self: Spending, record: AttemptRecord, votes: list[HeardVote]) -> bool:
    return await _release_if(self, record, votes, needed=1)


async def _release_if(self: Spending, record: AttemptRecord, votes: list[HeardVote], needed: int) -> bool:
    yes = [vote for vote in votes if vote.vote is Vote.YES]
    if record.state is State.VOTED and len(yes) == len(votes) and len(yes) >= needed:
        self._ledger.release(record.attempt_id, yes)
        self._settle(record.attempt_id, State.RELEASED)
        return True
    return await _correct_move(self, record, votes)


async def free_on_one_no(self: Spending, record: AttemptRecord, votes: list[HeardVote]) -> bool:
    if record.state is State.RENOUNCED:
        self._ledger.free(record.attempt_id, votes, "one NO is enough")
        self._settle(record.attempt_id, State.ABORTED)
        return True
    return await _correct_move(self, record, votes)


@pytest.mark.parametrize("mutant", [release_on_own_vote, release_on_two_of_three])
def test_releasing_without_both_yes_is_caught(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, mutant: Callable[..., Any]
) -> None:
    plan = Plan(seed=3, horizon=40.0, mpc_fails=fails_at(1))
    assert violations(runs.play(SHORT, plan, prepare=without_guards)) == []
    monkeypatch.setattr(Spending, "_move", mutant)
    assert any("half spent" in text for text in violations(runs.play(SHORT, plan, prepare=without_guards)))


@pytest.mark.parametrize("mutant", [release_on_own_vote, release_on_two_of_three])
def test_sqlite_alone_stops_a_release_without_both_yes(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, mutant: Callable[..., Any]
) -> None:
    """The run above with its guards: a release is refused until both YES are there, and only then comes."""
    monkeypatch.setattr(Spending, "_move", mutant)
    world = runs.play(SHORT, Plan(seed=3, horizon=40.0, mpc_fails=fails_at(1)))
    assert "releasing needs YES from both peers" in caplog.text
    assert violations(world) == []
    for node in world.nodes:
        ledger = NonceLedger(node.path, Owner(node.helper, KEYS[node.helper]))
        record = ledger.live(SHORT[0].name.key)
        ledger.close()
        assert record is not None
        assert (record.state, record.said(Vote.YES)) == (State.RELEASED, {0, 1, 2} - {node.helper})


def test_freeing_on_one_no_is_caught(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {
        "honest": (0, 1),
        "tamper": says({0: Word.YES, 1: Word.NO}),
        "prepare": without_guards,
    }
    assert violations(runs.play(SHORT, Plan(seed=14, horizon=40.0), **settings)) == []
    monkeypatch.setattr(Spending, "_move", free_on_one_no)
    assert any("half spent" in text for text in violations(runs.play(SHORT, Plan(seed=14, horizon=40.0), **settings)))


def _no_votes_to(helper: int | None, until: float) -> Callable[[int, int, Envelope], bool]:
    """Votes and questions about them get lost for a while, to one helper or to all."""

    def block(source: int, target: int, envelope: Envelope) -> bool:
        early = asyncio.get_running_loop().time() < until
        return early and isinstance(envelope.body, messages.State | Ask) and helper in (None, target, source)

    return block


def test_retrying_while_an_attempt_is_voted_is_caught(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """All YES of the first attempt are late; a retry with fresh noise would let out both."""
    plan, block = Plan(seed=15), _no_votes_to(None, until=14.0)
    assert violations(runs.play(ONE, plan, block=block, prepare=without_guards)) == []
    monkeypatch.setattr(Agreement, "_wait_for_older", _do_not_wait)
    monkeypatch.setattr(NonceLedger, "_standing", lambda *_: Standing.FREE)
    monkeypatch.setattr(NonceLedger, "_point", _point_regardless)
    assert any("S3" in text for text in violations(runs.play(ONE, plan, block=block, prepare=without_guards)))


async def _do_not_wait(self: Agreement, talk_: talk.Talk) -> None:
    return None


def _point_regardless(self: NonceLedger, attempt: int, digests: list[bytes]) -> int:
    rows = [(digest, attempt) for digest in digests]
    return self._db.executemany("INSERT OR REPLACE INTO reports VALUES (?, ?)", rows).rowcount


async def _empty_at(world: World, helper: int, time: float, *, trusted: bool) -> None:
    """Helper's disk is destroyed at `time` and comes back empty; with `trusted`, its peers are told that is fine."""
    for node in world.nodes:
        world.spawn(node.start())
    await asyncio.sleep(time)
    node = world.nodes[helper]
    node.kill()
    for path in list(node.path.parent.glob(node.path.name + "*")):
        path.unlink()
    NonceLedger.create(node.path, Owner(helper, KEYS[helper]))
    world.prepare(node.path)
    if trusted:
        for other in world.nodes:
            if other is not node:
                other.agreement.peers.trust_new_ledger(helper)
    await node.start()
    await asyncio.sleep(60)
    await world.stop()


def test_saying_no_from_ignorance_is_caught(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Helper 1 has released, helper 3 has not heard of it, helper 2 forgets: helper 3 must end up releasing too."""

    def ended() -> State:
        world = runs.world(ONE, Plan(seed=16), block=_cut_off(2, from_=0.2, until=8.0))
        run(lambda: _empty_at(world, 1, 5.0, trusted=True))
        ledger = NonceLedger(world.nodes[2].path, Owner(2, KEYS[2]))
        record = ledger.live(ONE[0].name.key)
        ledger.close()
        assert record is not None
        return record.state

    assert ended() is State.RELEASED
    monkeypatch.setattr(Spending, "state", _no_from_ignorance)
    assert ended() is State.RENOUNCED


def _cut_off(helper: int, from_: float, until: float) -> Callable[[int, int, Envelope], bool]:
    """What others say about votes does not reach `helper` for a while; and later helper 1 is slow to answer it."""

    def block(source: int, target: int, envelope: Envelope) -> bool:
        now = asyncio.get_running_loop().time()
        late = until + 4.0 if 0 in (source, target) else until
        return isinstance(envelope.body, messages.State) and target == helper and from_ <= now < late

    return block


_correct_state = Spending.state


async def _no_from_ignorance(self: Spending, attempt_id: bytes) -> messages.State:
    if self._ledger.record(attempt_id) is None:
        return vote_of(self._peers.helper, attempt_id, Word.NO)
    return await _correct_state(self, attempt_id)


def test_letting_the_share_out_before_released_is_on_disk_is_caught(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash before the commit forgets the release; the bad helper then says NO to both, and a second one follows."""

    def play(*, early: bool) -> list[str]:
        world: World = runs.world(
            ONE,
            Plan(
                seed=17,
                crashes=frozenset({(0, Step.RELEASE_BEFORE_COMMIT, 1)}),
                mpc_fails=lambda helper, number: helper == 2 and number == 1,
            ),
            honest=(0, 1),
            tamper=lambda source, target, envelope: _two_faced(world, target, envelope),
        )
        if early:
            monkeypatch.setattr(NonceLedger, "release", _released_in_memory(world))
        run(world.play)
        return violations(world)

    assert play(early=False) == []
    assert any("S3" in text for text in play(early=True))


def _two_faced(world: World, target: int, envelope: Envelope) -> Envelope | None:
    body = envelope.body
    if not isinstance(body, messages.State):
        return envelope
    first = next(iter(world.accepted), b"")
    if body.attempt_id != first:
        return envelope
    if world.crashed:
        return dataclasses.replace(envelope, body=vote_of(2, first, Word.NO))
    return dataclasses.replace(envelope, body=vote_of(2, first, Word.YES)) if target == 0 else None


_correct_release = NonceLedger.release


def _released_in_memory(world: World) -> Callable[..., None]:
    def release(self: NonceLedger, attempt_id: bytes, votes: list[HeardVote]) -> None:
        record = self.record(attempt_id)
        if self.owner.helper == 0 and record is not None and record.sealed_share is not None:
            world.out.append((0, record.query.key, attempt_id, record.sealed_share))
        _correct_release(self, attempt_id, votes)

    return release


def test_a_restart_that_drops_a_voted_share_is_caught(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan(seed=18, horizon=40.0, crashes=frozenset({(1, Step.YES_SENT_TO_ONE, 1)}))
    block = _no_votes_to(2, until=4.0)
    assert violations(runs.play(SHORT, plan, block=_only_to_first, prepare=without_guards)) == []
    assert violations(runs.play(SHORT, plan, block=block, prepare=without_guards)) == []
    monkeypatch.setattr(NonceLedger, "sweep", _sweep_everything)
    assert violations(runs.play(SHORT, plan, block=_only_to_first, prepare=without_guards)) != []


def _only_to_first(source: int, target: int, envelope: Envelope) -> bool:
    """Until 4 s, votes reach helper 1 only."""
    return asyncio.get_running_loop().time() < 4.0 and isinstance(envelope.body, messages.State) and target != 0


def _sweep_everything(self: NonceLedger) -> list[bytes]:
    swept = [record for record in self.unsettled() if record.state in (State.RESERVED, State.VOTED)]
    for record in swept:
        self._db.execute("UPDATE attempts SET sealed_share = NULL WHERE attempt_id = ?", (record.attempt_id,))
        with self._transaction(None, None):
            self._move(record.attempt_id, record.state, State.ABORTED, reason="restarted")
    return [record.attempt_id for record in swept]


def test_an_accepted_root_without_the_bitmaps_is_caught(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(talk, "accepted_root", lambda name, number, proposals, accepted: _root_of(name.digest, number))
    world = runs.play(ONE, Plan(seed=40), honest=(0, 1), tamper=equivocate)
    assert any(len(set(sets.values())) == 2 for sets in _honest_sums(world))
    assert "one attempt id, two sets" in violations(world)


def _root_of(digest: bytes, number: int) -> bytes:
    return bytes(a ^ b for a, b in zip(digest, number.to_bytes(32, "big"), strict=True))


def _state(ledger: NonceLedger, attempt_id: bytes) -> State | None:
    record = ledger.record(attempt_id)
    return record.state if record else None


def _out(world: World, query: AskedQuery) -> set[int]:
    return {helper for helper, key, _, _ in world.out if key == query.name.key}

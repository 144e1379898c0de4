"""COMMIT.md under planned and random crashes, a bad network, and ledgers that are lost or go back.

The planned matrix has every (helper, failpoint, first time or second time or both), each in the first scenario that
reaches it; planned crashes find bugs that random ones miss. With TREFOIL_FULL_MATRIX=1 (`make chaos`) every scenario
has all of them. A run that fails prints its scenario, seed and failpoints. A helper that lies, and the proof that such
runs notice a protocol that is wrong, are in `test_commit_mutants`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import os
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from mpc_helpers.agreement import messages
from mpc_helpers.agreement.messages import Ask, Envelope, Reserved
from mpc_helpers.ledger.attempt import AttemptState, Failpoint, VoteStatus
from mpc_helpers.ledger.engine import LedgerOwner
from mpc_helpers.ledger.ledger import ReportLedger
from mpc_helpers.ledger.moves import Fenced
from tests.support.commit_world import (
    KEYS,
    ONE,
    OVERLAPPING,
    PARTS,
    SAME,
    AskedQuery,
    FaultPlan,
    Point,
    Runs,
    empty_at,
    fails_at,
    hashed_signatures,
    helpers_that_answered,
    no_votes_to,
    run,
    violations,
)
from tests.support.ledger_places import ledgers_in_postgres
from tests.support.private_postgres import why_not

FULL_MATRIX = bool(os.environ.get("TREFOIL_FULL_MATRIX"))


def dies_computing(party: int) -> frozenset[Point]:
    return frozenset({(party, Failpoint.COMPUTE, 1), (party, Failpoint.COMPUTE, 2)})


SCENARIOS: dict[str, tuple[tuple[AskedQuery, ...], FaultPlan]] = {
    "plain": (ONE, FaultPlan(seed=1)),
    "MPC fails at helper 1": (ONE, FaultPlan(seed=2, mpc_fails=fails_at(0))),
    "MPC fails at helper 2": (ONE, FaultPlan(seed=3, mpc_fails=fails_at(1))),
    "MPC fails at helper 3": (ONE, FaultPlan(seed=9, mpc_fails=fails_at(2))),
    "helper 1 dies twice computing": (ONE, FaultPlan(seed=4, crashes=dies_computing(0))),
    "helper 2 dies twice computing": (ONE, FaultPlan(seed=5, crashes=dies_computing(1))),
    "helper 3 dies twice computing": (ONE, FaultPlan(seed=6, crashes=dies_computing(2))),
    "two queries, same reports": (SAME, FaultPlan(seed=7)),
    "two queries, overlapping, bad network": (OVERLAPPING, FaultPlan(seed=8, loss=0.15)),
    "three queries in parts": (PARTS, FaultPlan(seed=10)),
}


def planned(plan: FaultPlan, reached: Counter[tuple[int, Failpoint]]) -> Iterator[frozenset[Point]]:
    """A crash at each failpoint reached: the first time, the second time, and both."""
    for (party, failpoint), count in sorted(reached.items(), key=lambda item: (item[0][0], item[0][1].value)):
        first, second = (party, failpoint, 1), (party, failpoint, 2)
        for crash in ({first}, {second} if count > 1 else set(), {first, second}):
            if crash and not crash <= plan.crashes:
                yield frozenset(crash)


@hashed_signatures()
def test_planned_crashes(runs: Runs, show: Callable[[str], None]) -> None:
    """S1, S3, L1 and L2 after a crash at every failpoint of every helper, the first and the second time."""
    table: dict[str, int] = {}
    hit: Counter[Point] = Counter()
    done: set[tuple[int, frozenset[Point]]] = set()
    for name, (queries, plan) in SCENARIOS.items():
        dry, found = runs.broken(queries, plan)
        assert found == [], name
        crashes = [crash for crash in planned(plan, dry.reached) if FULL_MATRIX or (len(queries), crash) not in done]
        if len(queries) > 1 and not FULL_MATRIX:
            crashes = [crash for crash in crashes if all(time == 1 for _, _, time in crash) or not crash <= set(hit)]
        for number, crash in enumerate(crashes):
            _show_progress(name, number, len(crashes))
            world, found = runs.broken(queries, dataclasses.replace(plan, crashes=plan.crashes | crash))
            hit.update(world.crashed)
            assert found == [], (name, plan.seed, sorted((h + 1, s.value, n) for h, s, n in crash))
        done |= {(len(queries), crash) for crash in crashes}
        table[name] = 1 + len(crashes)
    show(_matrix(table, hit))
    missed = {(h, s, n) for h in range(3) for s in Failpoint for n in (1, 2)} - set(hit)
    assert not missed, f"failpoints never exercised: {sorted((h + 1, s.value, n) for h, s, n in missed)}"


@pytest.mark.skipif(bool(why_not()), reason=why_not())
@hashed_signatures()
def test_planned_crashes_on_postgres(runs: Runs, show: Callable[[str], None]) -> None:
    """The same protocol over ledgers in PostgreSQL: a crash at every failpoint.

    By default at one helper each, in turn, and in the first scenario that reaches it.
    """
    hit: Counter[Point] = Counter()
    done: set[Failpoint] = set()
    with ledgers_in_postgres():
        for name, (queries, plan) in SCENARIOS.items():
            if not FULL_MATRIX and done == set(Failpoint):
                break
            dry, found = runs.broken(queries, plan)
            assert found == [], name
            cells = sorted(dry.reached, key=lambda at: (at[1].value, at[0]))
            if not FULL_MATRIX:
                cells = _one_helper_each(cells, done)
            for number, (party, failpoint) in enumerate(cells):
                done.add(failpoint)
                _show_progress(name, number, len(cells))
                crash = frozenset({(party, failpoint, 1)})
                world, found = runs.broken(queries, dataclasses.replace(plan, crashes=plan.crashes | crash))
                hit.update(world.crashed)
                assert found == [], (name, party + 1, failpoint.value)
    show(f"crashes on PostgreSQL: {sum(hit.values())}, at {len(done)} of {len(Failpoint)} failpoints")
    assert {failpoint for _, failpoint, _ in hit} == done == set(Failpoint)


def _one_helper_each(cells: list[tuple[int, Failpoint]], done: set[Failpoint]) -> list[tuple[int, Failpoint]]:
    """Return one cell of each failpoint that is not done yet, at the helpers in turn where they reach it."""
    parties: dict[Failpoint, list[int]] = {}
    for party, failpoint in cells:
        if failpoint not in done:
            parties.setdefault(failpoint, []).append(party)
    return [(reach[number % len(reach)], failpoint) for number, (failpoint, reach) in enumerate(parties.items())]


def _show_progress(name: str, number: int, cells: int) -> None:
    """For whoever watches `make chaos`, which runs without capture."""
    if FULL_MATRIX and number % 20 == 0:
        sys.stderr.write(f"  {name}: {number} of {cells} cells\n")


def _matrix(table: dict[str, int], hit: Counter[Point]) -> str:
    lines = ["planned runs by scenario:"]
    lines += [f"  {count:4d}  {name}" for name, count in table.items()]
    lines.append(f"  {sum(table.values()):4d}  in all; crashes by failpoint (helper 1, 2, 3; first + second time):")
    for failpoint in Failpoint:
        counts = "  ".join(f"{hit[(party, failpoint, 1)]:3d}+{hit[(party, failpoint, 2)]:2d}" for party in range(3))
        lines.append(f"        {counts}  {failpoint.value}")
    return "\n".join(lines)


def test_random_crashes(runs: Runs) -> None:
    """Random failpoints and a bad network, from seeds that are printed on failure."""
    for seed in range(100, 112):
        rng = np.random.default_rng(seed)
        failpoints = list(Failpoint)
        crashes = frozenset(
            (int(rng.integers(3)), failpoints[int(rng.integers(len(failpoints)))], int(rng.integers(1, 4)))
            for _ in range(6)
        )
        queries = (ONE, SAME, OVERLAPPING)[seed % 3]
        plan = FaultPlan(seed=seed, crashes=crashes, loss=0.25, mpc_fails=fails_at(int(rng.integers(3))))
        assert violations(runs.play(queries, plan)) == [], f"seed {seed}"


# The extra list at the end of COMMIT.md.


def test_a_dead_workers_late_vote_changes_no_row(runs: Runs) -> None:
    world = runs.play(ONE, FaultPlan(crashes=frozenset({(1, Failpoint.COMPUTE, 1)})))
    ledger = ReportLedger(world.nodes[1].path, LedgerOwner(1, KEYS[1]))
    before = ledger.chain.head
    (aborted,) = [attempt for attempt in world.accepted if _state(ledger, attempt) is AttemptState.ABORTED]
    with pytest.raises(Fenced):
        ledger.moves.vote(aborted, b"a share computed by a worker that should be dead")
    assert ledger.chain.head == before
    assert _state(ledger, aborted) is AttemptState.ABORTED
    ledger.close()


def _state(ledger: ReportLedger, attempt_id: bytes) -> AttemptState | None:
    record = ledger.attempts.find(attempt_id)
    return record.state if record else None


def test_ask_about_an_unknown_attempt_is_never_answered_no(runs: Runs) -> None:
    world = runs.world(ONE, FaultPlan())

    async def ask() -> messages.StateMessage:
        for node in world.nodes:
            world.spawn(node.start())
        await asyncio.sleep(5)
        reply = await world.nodes[0].agreement.peers.call(1, Ask(b"?" * 32))
        await world.stop()
        assert isinstance(reply, messages.StateMessage)
        return reply

    assert run(ask) == messages.StateMessage(b"?" * 32, VoteStatus.UNKNOWN, ())


def test_an_emptied_ledger_is_noticed_and_never_says_no(runs: Runs) -> None:
    """Helper 2's disk is destroyed after the release: peers refuse it, and even trusted it cannot undo anything."""
    for trusted in (False, True):
        world = runs.world(SAME, FaultPlan(seed=11), block=no_votes_to(2, until=6.0))
        run(functools.partial(empty_at, world, 1, 5.0, trusted=trusted))
        found = [text for text in violations(world) if "helper 1" not in text and "differently" not in text]
        assert [text for text in found if not text.startswith("L1")] == []
        assert helpers_that_answered(world, SAME[0]) == {0, 2} | helpers_that_answered(world, SAME[0])
        assert len({attempt for _, _, attempt, _ in world.out}) == 1
        if not trusted:
            assert "another ledger" in world.nodes[0].agreement.alarms.texts[1]


def test_an_older_copy_of_a_ledger_is_refused(runs: Runs) -> None:
    world = runs.world(ONE, FaultPlan(seed=12))
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
    assert "went back" in world.nodes[0].agreement.alarms.texts[1]
    assert "went back" in world.nodes[2].agreement.alarms.texts[1]
    assert "further" in node.agreement.alarms.texts[1]
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

    world = runs.play(OVERLAPPING, FaultPlan(seed=seed, loss=0.2), block=block)
    return violations(world)


# COMMIT.md while the helper set is renewed: at every failpoint of every helper, all three restart with a new set.

_ALL_DIE = frozenset((each, Failpoint.COMPUTE, 1) for each in range(3))
ROTATION_SCENARIOS: dict[str, tuple[tuple[AskedQuery, ...], FaultPlan]] = {
    **{name: SCENARIOS[name] for name in list(SCENARIOS)[:4]},
    "every helper dies computing": (ONE, FaultPlan(seed=4, crashes=_ALL_DIE)),
    "two queries, same reports": SCENARIOS["two queries, same reports"],
}


@hashed_signatures()
def test_a_rotation_at_every_step(runs: Runs, show: Callable[[str], None]) -> None:
    """S1, S3, L1 and L2 hold, and every query that had time is answered."""
    hit: Counter[Failpoint] = Counter()
    done = set()
    for name, (queries, plan) in ROTATION_SCENARIOS.items():
        dry = runs.play(queries, plan)
        assert violations(dry) == [], name
        for party, failpoint in sorted(dry.reached, key=lambda point: (point[0], point[1].value)):
            if (party, failpoint) in done and not FULL_MATRIX:
                continue
            done.add((party, failpoint))
            world = runs.play(queries, dataclasses.replace(plan, rotations=frozenset({(party, failpoint, 1)})))
            hit.update(failpoint for _, failpoint, _ in world.crashed)
            where = (name, plan.seed, party + 1, failpoint.value)
            assert violations(world) == [], where
            assert any(len(helpers_that_answered(world, query)) == 3 for query in queries), where
    show(
        "rotations by failpoint:\n" + "\n".join(f"  {hit[failpoint]:3d}  {failpoint.value}" for failpoint in Failpoint)
    )
    assert set(hit) == set(Failpoint)


def test_two_rotations_while_one_helper_alone_has_voted(runs: Runs) -> None:
    """Its vote is on disk, nobody has heard it, and two sets go by before anyone does."""
    for party in range(3):
        points = frozenset({(party, Failpoint.VOTE_AFTER_COMMIT, 1), (party, Failpoint.START_AFTER_SWEEP, 2)})
        world = runs.play(ONE, FaultPlan(seed=11, rotations=points), block=no_votes_to(None, 5.0))
        assert len(world.crashed) == 2, party
        assert violations(world) == [], party
        assert len(helpers_that_answered(world, ONE[0])) == 3, party

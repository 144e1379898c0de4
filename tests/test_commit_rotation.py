"""COMMIT.md while the helper set is renewed: at every step of every helper, all three are restarted with a new set.

They restart one after the other, so that for some seconds two sets are in use and helpers refuse each other's messages.
What was voted before is released or freed afterwards all the same.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable

from mpc_helpers.ledger.attempt import Step
from tests.support.commit_runs import ONE, SAME, Runs, fails_at, helpers_that_answered, no_votes_to
from tests.support.commit_world import AskedQuery, FaultPlan, violations

SCENARIOS: dict[str, tuple[tuple[AskedQuery, ...], FaultPlan]] = {
    "plain": (ONE, FaultPlan(seed=1)),
    "MPC fails at helper 1": (ONE, FaultPlan(seed=2, mpc_fails=fails_at(0))),
    "MPC fails at helper 2": (ONE, FaultPlan(seed=3, mpc_fails=fails_at(1))),
    "MPC fails at helper 3": (ONE, FaultPlan(seed=9, mpc_fails=fails_at(2))),
    "every helper dies computing": (
        ONE,
        FaultPlan(seed=4, crashes=frozenset((each, Step.COMPUTE, 1) for each in range(3))),
    ),
    "two queries, same reports": (SAME, FaultPlan(seed=7)),
}


def test_a_rotation_at_every_step(runs: Runs, show: Callable[[str], None]) -> None:
    """S1, S3, L1 and L2 hold, and every query that had time is answered."""
    hit: Counter[Step] = Counter()
    done = set()
    for name, (queries, plan) in SCENARIOS.items():
        dry = runs.play(queries, plan)
        assert violations(dry) == [], name
        for party, step in sorted(dry.reached, key=lambda point: (point[0], point[1].value)):
            if (party, step, len(queries)) in done:
                continue
            done.add((party, step, len(queries)))
            world = runs.play(queries, dataclasses.replace(plan, rotations=frozenset({(party, step, 1)})))
            hit.update(step for _, step, _ in world.crashed)
            where = (name, plan.seed, party + 1, step.value)
            assert violations(world) == [], where
            assert any(len(helpers_that_answered(world, query)) == 3 for query in queries), where
    show("rotations by step:\n" + "\n".join(f"  {hit[step]:3d}  {step.value}" for step in Step))
    assert set(hit) == set(Step)


def test_two_rotations_while_one_helper_alone_has_voted(runs: Runs) -> None:
    """Its vote is on disk, nobody has heard it, and two sets go by before anyone does."""
    for party in range(3):
        points = frozenset({(party, Step.VOTE_AFTER_COMMIT, 1), (party, Step.START_AFTER_SWEEP, 2)})
        world = runs.play(ONE, FaultPlan(seed=11, rotations=points), block=no_votes_to(None, 5.0))
        assert len(world.crashed) == 2, party
        assert violations(world) == [], party
        assert len(helpers_that_answered(world, ONE[0])) == 3, party

"""COMMIT.md with one bad helper: it signs and says what it likes, and the two honest ones stay of one mind.

The same over real HTTPS, with whole queries, is in `test_bad_helper`.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from collections.abc import Callable

import pytest

from mpc_helpers.agreement import messages
from mpc_helpers.agreement.messages import Envelope, Propose, Reserved
from mpc_helpers.ledger.attempt import AttemptState, Word
from mpc_helpers.ledger.file import LedgerOwner
from mpc_helpers.ledger.ledger import ReportLedger
from protocol.vote import SignedVote
from tests.support.commit_runs import ONE, SHORT, Runs, equivocate, helpers_that_answered, honest_sums, says, vote_of
from tests.support.commit_world import KEYS, FaultPlan, violations


def test_number_2_to_the_63_minus_1_is_ignored(runs: Runs) -> None:
    """A bad helper that proposes the largest number cannot make the numbers run out."""

    def huge(source: int, target: int, envelope: Envelope) -> Envelope:
        if isinstance(envelope.body, Propose) and asyncio.get_running_loop().time() < 3.0:
            return dataclasses.replace(envelope, body=dataclasses.replace(envelope.body, number=2**63 - 1))
        return envelope

    world = runs.play(ONE, FaultPlan(seed=13), honest=(0, 1), tamper=huge)
    assert violations(world) == []
    ledger = ReportLedger(world.nodes[0].path, LedgerOwner(0, KEYS[0]))
    assert 0 < ledger.attempts.last_number(ONE[0].name.key) < 100
    ledger.close()
    assert helpers_that_answered(world, ONE[0]) >= {0, 1}


def test_yes_to_one_and_no_to_the_other_is_a_dispute_with_proof(runs: Runs) -> None:
    """What remains of COMMIT.md: one honest helper released, the other renounced, the liar proven by its signatures."""
    world = runs.play(SHORT, FaultPlan(seed=14, horizon=40.0), honest=(0, 1), tamper=says({0: Word.YES, 1: Word.NO}))
    assert violations(world) == []
    states, liars = set(), set()
    for party in (0, 1):
        ledger = ReportLedger(world.nodes[party].path, LedgerOwner(party, KEYS[party]))
        record = ledger.attempts.live(SHORT[0].name.key)
        assert record is not None
        states.add(record.state)
        liars |= record.liars
        proof = [SignedVote.decode(vote.message) for vote in record.votes if vote.party == 2]
        for vote in proof:
            vote.verify(KEYS[2])
        ledger.close()
    assert states == {AttemptState.RELEASED, AttemptState.RENOUNCED}
    assert liars == {2}


def test_no_to_one_before_it_voted_and_yes_to_the_other_keeps_nobody_waiting(runs: Runs) -> None:
    """The one that gives up passes the NO on: the other must not wait for a NO that the liar never sends it.

    Of 45 seeds from 14 on, these left one honest helper with its reports locked and the other with nothing.
    """
    for seed in (15, 17, 20, 23, 30, 31, 37, 49, 53, 58):
        plan = FaultPlan(seed=seed, loss=0.3, horizon=40.0)
        world = runs.play(SHORT, plan, honest=(0, 1), tamper=says({0: Word.YES, 1: Word.NO}))
        assert violations(world) == [], f"seed {seed}"
        held = []
        for party in (0, 1):
            ledger = ReportLedger(world.nodes[party].path, LedgerOwner(party, KEYS[party]))
            held.append(ledger.attempts.live(SHORT[0].name.key) is not None)
            ledger.close()
        assert held[0] == held[1], f"seed {seed}"


def test_a_peer_that_says_yes_and_then_no(runs: Runs) -> None:
    """The NO is final: nothing is freed unless both honest helpers are free of the attempt, and nothing leaks twice."""

    def tamper(source: int, target: int, envelope: Envelope) -> Envelope:
        if not isinstance(envelope.body, messages.StateMessage):
            return envelope
        said[(target, envelope.body.attempt_id)] += 1
        word = Word.YES if said[(target, envelope.body.attempt_id)] == 1 else Word.NO
        return dataclasses.replace(envelope, body=vote_of(source, envelope.body.attempt_id, word))

    for seed in range(30, 34):
        said: Counter[tuple[int, bytes]] = Counter()
        world = runs.play(ONE, FaultPlan(seed=seed, loss=0.2, horizon=80.0), honest=(0, 1), tamper=tamper)
        assert violations(world) == [], f"seed {seed}"


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
        world = runs.play(ONE, FaultPlan(seed=seed), honest=(0, 1), tamper=tamper, block=overhear)
        assert violations(world) == []
        assert all(len(set(sets.values())) == 1 for sets in honest_sums(world)), f"seed {seed}"
        # The bad helper behaves after three seconds: then the query is answered, so nothing was lost to it.
        assert helpers_that_answered(world, ONE[0]) >= {0, 1}

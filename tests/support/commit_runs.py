"""Worlds of `commit_world` to play, and what is said and lost in them, for the tests of COMMIT.md."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mpc_helpers.agreement import messages
from mpc_helpers.agreement.messages import Ask, Envelope, Propose
from mpc_helpers.ledger.attempt import Word
from mpc_helpers.ledger.file import LedgerOwner
from mpc_helpers.ledger.ledger import ReportLedger
from protocol.vote import SignedVote, Vote
from tests.support.commit_world import IDENTITIES, KEYS, AskedQuery, CommitWorld, FaultPlan, run, violations

ONE = (AskedQuery.of(1, range(6)),)
# For runs that are meant to end badly: nothing is gained by watching them ask for ever.
SHORT = (AskedQuery.of(1, range(6), deadline=20.0),)
SAME = (AskedQuery.of(1, range(6)), AskedQuery.of(2, range(6)))
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


def vote_of(party: int, attempt_id: bytes, word: Word) -> messages.StateMessage:
    vote = Vote.YES if word is Word.YES else Vote.ABORTED
    return messages.StateMessage(attempt_id, word, (SignedVote.sign(party, attempt_id, vote, IDENTITIES[party]),))


def says(words: dict[int, Word]) -> Callable[[int, int, Envelope], Envelope]:
    """A helper whose every STATE says `words[target]`, whatever its ledger holds."""

    def tamper(source: int, target: int, envelope: Envelope) -> Envelope:
        if isinstance(envelope.body, messages.StateMessage):
            return dataclasses.replace(envelope, body=vote_of(source, envelope.body.attempt_id, words[target]))
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
    agreement._ledger.peer_heads.forget(party)
    agreement.peers._met.pop(party, None)
    agreement.alarms.texts.pop(party, None)


def honest_sums(world: CommitWorld) -> list[dict[int, frozenset[bytes]]]:
    both = (known for known in world.summed.values() if 0 in known and 1 in known)
    return [{0: known[0], 1: known[1]} for known in both]


def helpers_that_answered(world: CommitWorld, query: AskedQuery) -> set[int]:
    return {party for party, key, _, _ in world.out if key == query.name.key}

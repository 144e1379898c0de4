"""Runs of the hunt: schedules played in the world, what must never be, and what came of them all.

A run is a function of its schedule. Three things are not an installed helper's, and make it several times faster. Votes
are signed by a hash, as nobody forges any. Messages are not encoded. Ledgers are in memory; ledger files are killed in
`test_commit_crashes` and `test_chaos`.
"""

from __future__ import annotations

import dataclasses
import gc
import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import cast
from unittest import mock

import numpy as np

from mpc_helpers.agreement.messages import Body, Envelope
from mpc_helpers.agreement.parties import Parties
from mpc_helpers.ledger.file import LedgerHead, LedgerOwner
from mpc_helpers.ledger.ledger import ReportLedger
from mpc_helpers.ledger.reports import Standing
from protocol.errors import ProtocolError
from protocol.keys import IdentityKey
from tests.support import commit_world
from tests.support.commit_world import IDENTITIES, KEYS, report_digest, run, violations
from tests.support.hunt_schedule import Schedule, schedule_of
from tests.support.hunt_world import BEGINNING, LEDGERS, PACE, HuntNode, HuntWorld, QuietLoop


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

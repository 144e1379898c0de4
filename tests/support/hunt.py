"""Runs of the hunt: schedules played in the world, what must never be, and what came of them all.

A run is a function of its schedule. Three things are not an installed helper's, and make it several times faster. Votes
are signed by a hash, as nobody forges any. Messages are not encoded. Ledgers are in memory; ledger files are killed in
`test_commit_crashes` and `test_chaos`.

The long hunt in virtual time: `python -m tests.support.hunt --seed 1 --schedules 100000 --out hunt-virtual.json`.
Counts are written every few seconds, so that whatever ends the run keeps what was run. Processes with seeds of their
own may run beside each other; `--merge benchmarks/results/hunt.json REAL.json VIRTUAL.json ...` puts their files, and
that of `hunt_rounds`, together.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import numpy as np

from benchmarks.results.origin import machine
from mpc_helpers.agreement.messages import Body, Envelope
from mpc_helpers.agreement.peers import Parties
from mpc_helpers.ledger.engine import LedgerHead, LedgerOwner
from mpc_helpers.ledger.ledger import ReportLedger
from mpc_helpers.ledger.sqlite_engine import SqliteEngine
from protocol.amounts import Amount, Amounts
from protocol.errors import ProtocolError
from protocol.files import write_atomically
from protocol.header import TIME_STEP
from tests.support import commit_world
from tests.support.commit_world import KEYS, PAID, hashed_signatures, report_digest, run, violations
from tests.support.hunt_schedule import Schedule, in_parts, malicious_schedule_of, schedule_of
from tests.support.hunt_world import BEGINNING, LEDGERS, RETRY, HuntNode, HuntWorld, QuietLoop
from tests.support.ledger_places import hunted_in_postgres
from tests.support.processes import ROOT


def wrongs(world: HuntWorld) -> list[str]:
    """What must never be: S1, S3, L1, L2 of COMMIT.md; a report lost or counted twice; too many draws; a key gone.

    With a malicious helper, this is about the two others. Then a report may stay locked, as COMMIT.md says, and two
    honest helpers must never sum different sets in one attempt.
    """
    found = violations(world)
    honest = [world.nodes[party] for party in world.honest]
    ledgers = [ReportLedger(node.path, LedgerOwner(node.party, KEYS[node.party])) for node in honest]
    for (_, number), sets in world.summed.items():
        if len({accepted for party, accepted in sets.items() if party in world.honest}) > 1:
            found.append(f"two honest helpers summed different sets in attempt {number}")
    try:
        for report in sorted({report for query in world.queries for report in query.reports}):
            found += _wrongs_of(world, ledgers, report)
    finally:
        for ledger in ledgers:
            ledger.close()
    found += [f"helper {node.party} destroyed its keys" for node in honest if not cast(HuntNode, node).keys]
    return found


def _open_in_memory(engine: SqliteEngine, owner: LedgerOwner) -> Any:
    return LEDGERS.open(engine.path, owner)


# The hour in the header of every report (`HuntWorld`).
HOURS = np.array([BEGINNING // TIME_STEP], dtype=np.uint32)


def _wrongs_of(world: HuntWorld, ledgers: list[ReportLedger], report: int) -> Iterator[str]:
    """The answers that a report is in cost at most what was paid, and every ledger says so; few draws were of it."""
    digest = report_digest(report)
    released = {attempt: key for party, key, attempt, _ in world.out if party in world.honest}
    for ledger in ledgers:
        for record in ledger.attempts._select("state = 'released' AND attempt > 0"):
            released[record.attempt_id] = record.query.key
    holding = {attempt for attempt, (reports, *_) in world.accepted.items() if digest in reports}
    needs = {query.name.key: query.need for query in world.queries}
    rest = PAID - sum(needs[released[attempt]] for attempt in holding & released.keys())
    if rest < 0:
        yield f"S1: the answers that report {report} is in cost {PAID - rest} of {PAID}"
    # With all that is undecided counted as taken: what a ledger rebuilt from this one would leave (S1b).
    told = [_told(ledger, digest) for ledger in ledgers]
    row = np.frombuffer(digest, dtype=np.uint8).reshape(1, -1)
    amounts = Amounts(1, (Amount(PAID, 1, 1),))
    left = [int(ledger.reports.left(row, HOURS, amounts, bytes(32), site="")[0]) for ledger in ledgers]
    if any(each > rest for each in told):
        yield f"S1b: honest ledgers leave {told} of report {report}, and {rest} is left"
    if world.schedule.malicious is None and left != [rest] * len(ledgers):
        yield f"ledgers leave {left} of report {report}, and {rest} is left"
    if not all(ledger.reports.watermark < BEGINNING for ledger in ledgers):
        yield "the watermark has passed reports that were not old"
    # Each helper counts for itself: two must have begun before the third knows anything of the noise.
    failed = holding - released.keys()
    drawn = max(len(failed.intersection(cast(HuntNode, world.nodes[party]).drawn)) for party in world.honest)
    if world.schedule.draws is not None and drawn > world.schedule.draws:
        yield f"report {report} was in {drawn} draws that came to nothing"


def _told(ledger: ReportLedger, digest: bytes) -> int:
    """What a ledger would tell a peer that lost its own."""
    found = ledger.reports.export()
    rests = [int(rest) for row, rest in zip(found.digests, found.left, strict=True) if bytes(row) == digest]
    return min([PAID, *rests])


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
def quick(*, postgres: bool = False) -> Iterator[None]:
    """Votes signed by hashes, messages not encoded, ledgers in memory; and messages repeated less often.

    Or ledgers in a PostgreSQL server of our own, which takes ten times as long.
    """
    with ExitStack() as patches:
        patches.enter_context(hashed_signatures())
        patches.enter_context(mock.patch.object(Parties, "seal", _seal))
        patches.enter_context(mock.patch.object(Parties, "open", _open))
        patches.enter_context(mock.patch.object(commit_world, "RETRY", RETRY))
        patches.enter_context(mock.patch.object(SqliteEngine, "open", _open_in_memory))
        if postgres:
            patches.enter_context(hunted_in_postgres())
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
        self.mishaps.update({lie.value: count for lie, count in world.lies.items()})
        for query in world.queries:
            ends = {world.ended.get((party, query.name.key), "never ended") for party in world.honest}
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


def hunt(
    folder: Path,
    seeds: range,
    after_each: Callable[[HuntCounts], None] = lambda _: None,
    scheduled: Callable[[int], Schedule] = schedule_of,
    *,
    postgres: bool = False,
) -> HuntCounts:
    """Play a schedule for each seed."""
    counts = HuntCounts()
    # The garbage of each run is small and goes with it; looking for cycles all the time costs a tenth.
    gc.freeze()
    gc.set_threshold(50_000)
    with quick(postgres=postgres):
        for seed in seeds:
            world, found = play(folder / str(seed), scheduled(seed))
            counts.add(world, found)
            after_each(counts)
    return counts


WRITE_SECONDS = 10.0


class Record:
    """The file of results, while the hunt runs."""

    def __init__(self, path: Path | None, first_seed: int, of_commit: str) -> None:
        self._path = path
        self._began = time.time()
        self._written = 0.0
        self._header = {
            "command": " ".join(["python -m tests.support.hunt", *sys.argv[1:]]),
            "commit": of_commit,
            "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
            "first_seed": first_seed,
        }

    def note(self, counts: HuntCounts, *, last: bool = False) -> None:
        if not last and time.monotonic() - self._written < WRITE_SECONDS:
            return
        self._written = time.monotonic()
        found = {
            **self._header,
            "schedules": counts.schedules,
            "mishaps": dict(sorted(counts.mishaps.items())),
            "queries_ended": dict(sorted(counts.ends.items())),
            "violations": len(counts.wrong),
            "wrong": {str(seed): texts for seed, texts in counts.wrong.items()},
            "processor_seconds": round(time.process_time(), 1),
            "seconds": round(time.time() - self._began, 1),
        }
        text = json.dumps(found, indent=1) + "\n"
        if self._path is not None:
            write_atomically(self._path, text.encode())
        if last or self._path is None:
            sys.stdout.write(text)


def commit() -> str:
    """What this tree is a checkout of."""
    asked = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return asked.stdout.strip()


def merged(real: Path, virtual: Sequence[Path]) -> dict[str, object]:
    """All parts of one hunt, with what every result file has: `make chaos` plays such a hunt."""
    parts = [json.loads(path.read_bytes()) for path in virtual]
    first = min(parts, key=lambda part: int(part["first_seed"]))
    origin = {"command": "make chaos", "machine": machine(), "seed": first["first_seed"]}
    described = {name: first[name] for name in ("commit", "date")}
    return {**origin, **described, "virtual": parts, "real": json.loads(real.read_bytes())}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--schedules", type=int, default=100)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--malicious", action="store_true", help="with a malicious helper, drawn from the seed")
    parser.add_argument("--parts", action="store_true", help="with queries that keep the rest of their reports")
    parser.add_argument("--postgres", action="store_true", help="ledgers in PostgreSQL instead of memory")
    parser.add_argument("--commit", default="", help="where the tree is a copy without its history")
    parser.add_argument("--merge", type=Path, nargs="+", help="the file to write, that of the rounds, and the others")
    options = parser.parse_args()
    if options.merge:
        out, real, *virtual = options.merge
        write_atomically(out, (json.dumps(merged(real, virtual), indent=1) + "\n").encode())
        return 0
    logging.disable(logging.CRITICAL)
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if os.access(shared, os.W_OK) else None) as folder:
        record = Record(options.out, options.seed, options.commit or commit())
        drawn = malicious_schedule_of if options.malicious else schedule_of

        def scheduled(seed: int) -> Schedule:
            return in_parts(drawn(seed)) if options.parts else drawn(seed)

        seeds = range(options.seed, options.seed + options.schedules)
        counts = hunt(Path(folder), seeds, record.note, scheduled, postgres=options.postgres)
        record.note(counts, last=True)
        with quick(postgres=options.postgres):
            for seed in counts.wrong:
                sys.stdout.write(f"{shrunk(Path(folder) / 'shrunk', scheduled(seed))}\n")
    return 1 if counts.wrong else 0


if __name__ == "__main__":
    sys.exit(main())

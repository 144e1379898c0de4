"""Faults, with real processes: daemons and workers killed and stopped at every step of COMMIT.md, disks that fill up,
ledgers that are damaged, clocks that are wrong, helpers that come late.

After each, the query is answered, exactly and once; after all of them, the audit of `chaos_trio` finds no report lost,
none counted twice, one attempt per query, and the same bytes from helpers that were started again. `make test` runs a
sample; `make chaos` (TREFOIL_CHAOS=all) runs every step at every helper for daemon and worker, and prints the matrix.
The same steps in one process, on a network that loses messages, are in `test_commit_crashes`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import sqlite3
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from benchmarks.workloads.reports import Lie, lying_report
from mpc_helpers.identity.config import load_config
from mpc_helpers.ledger.attempt import Failpoint
from mpc_helpers.ledger.sqlite_engine import PAGE_BYTES
from mpc_helpers.local.launcher import fetch, health
from protocol.answer import AnswerShare
from protocol.errors import ErrorKind, TrefoilError
from protocol.helper_set import HelperEntry
from protocol.keys import load_identity
from protocol.querier.ask import Querier
from protocol.querier.failure import QueryFailed
from protocol.shares import PARTIES
from tests.support.chaos_helper import ArmedFault, CheckFailpoint, Fault
from tests.support.chaos_trio import (
    EXACT_EPSILON,
    GIVE_UP_SECONDS,
    REPORTS,
    ChaosQuery,
    ChaosTrio,
    chaos_trio,
    start_all,
    stop_all,
)
from tests.support.raising import raises
from tests.support.renewal import renew
from tests.support.three_helpers import seal_all, terms

ALL = os.environ.get("TREFOIL_CHAOS") == "all"
TRUTH = [1] * REPORTS

# Steps that are reached only when something else has gone wrong first: here, or at the next helper.
_GIVING_UP = (Failpoint.GIVE_UP_BEFORE_COMMIT, Failpoint.GIVE_UP_AFTER_COMMIT)
_RENOUNCING = (
    Failpoint.RENOUNCE_BEFORE_COMMIT,
    Failpoint.RENOUNCE_AFTER_COMMIT,
    Failpoint.ASK_SENT_TO_ONE,
    Failpoint.FREE_BEFORE_COMMIT,
    Failpoint.FREE_AFTER_COMMIT,
)
_STARTING = (
    Failpoint.START_BEFORE_SWEEP,
    Failpoint.SWEEP_BEFORE_COMMIT,
    Failpoint.SWEEP_AFTER_COMMIT,
    Failpoint.START_AFTER_SWEEP,
)


@dataclass(frozen=True)
class Cell:
    """One field of the matrix: what happens to which helper, and when."""

    step: Failpoint
    action: Fault
    party: int

    def plans(self) -> dict[int, list[ArmedFault]]:
        """What every helper must be told for this step to be reached."""
        plans: dict[int, list[ArmedFault]] = {party: [] for party in range(PARTIES)}
        if self.step in _GIVING_UP:
            plans[self.party].append(ArmedFault.of(Failpoint.COMPUTE, Fault.KILL_WORKER))
        if self.step in _RENOUNCING:
            plans[(self.party + 1) % PARTIES].append(ArmedFault.of(Failpoint.VOTE_BEFORE_COMMIT, Fault.KILL_DAEMON))
        if self.step in _STARTING:
            plans[self.party].append(ArmedFault.of(Failpoint.COMPUTE, Fault.KILL_DAEMON))
        plans[self.party].append(ArmedFault.of(self.step, self.action))
        return plans


_STOPS = (Failpoint.COMPUTE, Failpoint.VOTE_AFTER_COMMIT, Failpoint.YES_SENT_TO_ONE, Failpoint.RELEASE_BEFORE_COMMIT)
_KILLS = (Fault.KILL_DAEMON, Fault.KILL_WORKER)
MATRIX = [
    *(Cell(step, action, party) for step in Failpoint for action in _KILLS for party in range(PARTIES)),
    *(Cell(step, Fault.STOP_DAEMON, party) for step in _STOPS for party in range(PARTIES)),
    *(Cell(Failpoint.COMPUTE, Fault.STOP_WORKER, party) for party in range(PARTIES)),
]
# Before the vote, between vote and release, after the release, a worker, a vote that is taken back, a stop.
SAMPLE = [
    Cell(Failpoint.SWEEP_AFTER_COMMIT, Fault.KILL_DAEMON, 1),
    Cell(Failpoint.YES_SENT_TO_ONE, Fault.KILL_DAEMON, 2),
    Cell(Failpoint.RELEASE_AFTER_COMMIT, Fault.KILL_DAEMON, 0),
    Cell(Failpoint.COMPUTE, Fault.KILL_WORKER, 2),
    Cell(Failpoint.RENOUNCE_AFTER_COMMIT, Fault.KILL_DAEMON, 0),
    Cell(Failpoint.VOTE_AFTER_COMMIT, Fault.STOP_DAEMON, 1),
]


@pytest.fixture(scope="module")
def trio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChaosTrio]:
    with chaos_trio(tmp_path_factory.mktemp("chaos")) as running:
        yield running
        # Whatever was run of this file, and in whichever order.
        stop_all(running)
        assert running.audit() == []


def outcome(trio: ChaosTrio, cell: Cell) -> str:
    """Play one cell: "survived", "no worker" at that step, or what went wrong."""
    for party, plan in cell.plans().items():
        trio.arm(party, *plan)
    asked = trio.new_query()
    try:
        answer = asyncio.run(trio.answer(asked))
    except TrefoilError as error:
        return f"not answered: {error}"
    fired = trio.fired(cell.party)
    for party in range(PARTIES):
        trio.arm(party)
    if answer != TRUTH:
        return f"the answer is {answer}"
    if not fired or fired[-1][:2] != (cell.step, cell.action):
        return f"never got there, only to {fired}"
    return "survived" if fired[-1][2] else "no worker"


def show(outcomes: dict[Cell, str], seconds: float, trio: ChaosTrio) -> None:
    """The matrix, as `make chaos` prints it."""
    marks = {"survived": "+", "no worker": "."}
    print("\n+ survived   . no worker is alive at that step   X failed      columns: helpers 1, 2, 3")  # noqa: T201
    for action in Fault:
        rows = [step for step in Failpoint if any((cell.step, cell.action) == (step, action) for cell in outcomes)]
        for step in rows:
            found = [outcomes.get(Cell(step, action, party)) for party in range(PARTIES)]
            line = "  ".join(" " if each is None else marks.get(each, "X") for each in found)
            print(f"  {line}   {action.value:15} {step.value}")  # noqa: T201
    counts = Counter(marks.get(each, "X") for each in outcomes.values())
    print(  # noqa: T201
        f"{len(outcomes)} cells: {counts['+']} survived, {counts['.']} without a worker to hit, {counts['X']} failed; "
        f"{sum(trio.ended.values())} processes died; {seconds:.0f} s"
    )


def test_killed_or_stopped_at_every_step(trio: ChaosTrio) -> None:
    """Every cell of the matrix, or a sample of it: answered exactly, and the step was really reached."""
    start = time.monotonic()
    outcomes: dict[Cell, str] = {}
    for cell in MATRIX if ALL else SAMPLE:
        outcomes[cell] = outcome(trio, cell)
        if ALL:
            place = f"helper {cell.party + 1}, {cell.action.value}, {cell.step.value}"
            print(f"{time.monotonic() - start:6.0f} s  {place}: {outcomes[cell]}", flush=True)  # noqa: T201
    show(outcomes, time.monotonic() - start, trio)
    bad = {cell: text for cell, text in outcomes.items() if text not in ("survived", "no worker")}
    assert not bad
    reached = {(cell.step, cell.action) for cell, text in outcomes.items() if text == "survived"}
    assert {step for step, action in reached if action is Fault.KILL_DAEMON} >= (set(Failpoint) if ALL else set())


_ON_THE_WAY = [step for step in Failpoint if step not in (*_GIVING_UP, *_RENOUNCING, *_STARTING)]


@pytest.mark.parametrize("step", _ON_THE_WAY if ALL else [Failpoint.RELEASE_BEFORE_COMMIT], ids=lambda step: step.name)
def test_all_three_die_at_the_same_step(trio: ChaosTrio, step: Failpoint) -> None:
    """A power cut for everyone. Where one is hit first the others may never get there, and live."""
    for party in range(PARTIES):
        trio.arm(party, ArmedFault.of(step, Fault.KILL_DAEMON))
    assert asyncio.run(trio.answer(trio.new_query())) == TRUTH
    died = [party for party in range(PARTIES) if trio.fired(party)]
    for party in range(PARTIES):
        trio.arm(party)
    assert died


_CHECK_DEATHS = [{CheckFailpoint.SHOW: 0, CheckFailpoint.SHOWN: 2}]
_ALL_CHECK_DEATHS = [{step: party} for step in CheckFailpoint for party in range(PARTIES)]


@pytest.mark.parametrize(
    "deaths",
    [*_ALL_CHECK_DEATHS, *_CHECK_DEATHS] if ALL else _CHECK_DEATHS,
    ids=lambda deaths: ", ".join(f"{step.name} at {party + 1}" for step, party in deaths.items()),
)
def test_killed_in_the_middle_of_the_check(trio: ChaosTrio, deaths: dict[CheckFailpoint, int]) -> None:
    """kill -9 before asking for the blocks that differ, and after computing them: the liar is left out all the same."""
    of = replace(terms(REPORTS, epsilon_micros=EXACT_EPSILON, sensitivity=1), cap=1, spread=1)
    one_each = [[int(bucket == own) for bucket in range(REPORTS)] for own in range(REPORTS)]
    honest = seal_all(one_each, of, trio.helper_set)
    trio.reports += honest
    asked = trio.new_query([*honest, lying_report(Lie.HUGE, of, trio.helper_set)])
    for step, party in deaths.items():
        trio.arm(party, ArmedFault.of(step, Fault.KILL_DAEMON))
    assert asyncio.run(trio.answer(asked)) == TRUTH
    fired = {step: [found[0] for found in trio.fired(party)] for step, party in deaths.items()}
    for party in range(PARTIES):
        trio.arm(party)
    assert fired == {step: [step] for step in deaths}


def make_room(trio: ChaosTrio, party: int) -> None:
    resource.prlimit(trio.pid(party), resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


_FULL_AT = [
    (Failpoint.RESERVE_BEFORE_COMMIT, 0),
    (Failpoint.VOTE_BEFORE_COMMIT, 1),
    (Failpoint.RELEASE_BEFORE_COMMIT, 2),
]


@pytest.mark.parametrize(("step", "party"), _FULL_AT if ALL else _FULL_AT[1:], ids=lambda value: str(value))
def test_the_ledgers_disk_is_full(trio: ChaosTrio, step: Failpoint, party: int) -> None:
    """Nothing is half written, the daemon goes on answering, and with room again the same query ends, no restart."""
    trio.arm(party, ArmedFault.of(step, Fault.FILL_DISK))
    died = sum(trio.ended.values())
    assert asyncio.run(_with_a_full_disk(trio, party)) == TRUTH
    assert sum(trio.ended.values()) == died


async def _with_a_full_disk(trio: ChaosTrio, party: int) -> list[int]:
    answering = asyncio.create_task(trio.answer(trio.new_query()))
    while not trio.fired(party):
        await asyncio.sleep(0.05)
    await asyncio.sleep(2)
    assert not answering.done()
    assert await asyncio.to_thread(health, trio.helper_set.helpers[party])
    make_room(trio, party)
    return await answering


def test_a_damaged_ledger_is_refused_and_left_as_it_is(trio: ChaosTrio) -> None:
    """The helper does not start on it, and says why; the others stay up; with its bytes back it all goes on."""
    party = 1
    asked = trio.new_query()
    assert asyncio.run(trio.answer(asked)) == TRUTH
    trio.helper(party).stop()
    ledger = load_config(trio.running.trio.config_path(party)).ledger_file
    with contextlib.closing(sqlite3.connect(ledger)) as book:
        (page,) = book.execute("SELECT rootpage FROM sqlite_master WHERE name = 'attempts'").fetchone()
    good = ledger.read_bytes()
    damaged = bytearray(good)
    # A page that opening reads. Damage elsewhere is found when it is read, and by `trefoil ledger check`.
    damaged[(page - 1) * PAGE_BYTES : page * PAGE_BYTES] = bytes(PAGE_BYTES)
    ledger.write_bytes(damaged)
    with raises(ErrorKind.ABORTED, TrefoilError) as caught:
        trio.running.restart(party)
    assert "helper-2" in str(caught.value) and "damaged" in str(caught.value)
    assert ledger.read_bytes() == bytes(damaged)
    assert all(health(trio.helper_set.helpers[other]) for other in (0, 2))
    trio.helper(party).stop()
    ledger.write_bytes(good)
    trio.running.restart(party)
    assert asyncio.run(trio.answer(asked)) == TRUTH


def test_a_helper_that_starts_late(trio: ChaosTrio) -> None:
    """Two helpers have the query for a while before the third is there at all."""
    late = 2
    trio.helper(late).stop()
    asked = trio.new_query()
    with raises(ErrorKind.UNREACHABLE, QueryFailed) as failed:
        asyncio.run(Querier(trio.helper_set, patience=0.1).ask(asked.query, asked.batch))
    assert failed.value.helpers == (2,)
    trio.running.restart(late)
    assert asyncio.run(trio.answer(asked)) == TRUTH


@pytest.mark.parametrize("skew", [-7200, 7200])
def test_a_clock_that_is_hours_off_spends_nothing(trio: ChaosTrio, skew: int) -> None:
    """The query is refused, and answered once the clock is right."""
    trio.arm(0, skew=skew)
    asked = trio.new_query()
    with raises(ErrorKind.REFUSED, QueryFailed) as refused:
        asyncio.run(Querier(trio.helper_set, patience=5).ask(asked.query, asked.batch))
    assert (refused.value.helpers, refused.value.http_status) == ((0,), 422)
    trio.arm(0)
    assert asyncio.run(trio.answer(asked)) == TRUTH


def test_clocks_that_differ_by_minutes_do_no_harm(trio: ChaosTrio) -> None:
    for party, skew in enumerate((-240, 0, 240)):
        trio.arm(party, skew=skew)
    asked = trio.new_query()
    try:
        assert asyncio.run(trio.answer(asked)) == TRUTH
    finally:
        for party in range(PARTIES):
            trio.arm(party)


def test_afterwards_everything_was_counted_exactly_once(trio: ChaosTrio) -> None:
    """The ledgers and all shares are audited, all helpers restarted, and every report is offered again."""
    ask_something(trio)
    stop_all(trio)
    assert trio.audit() == []
    start_all(trio)
    asyncio.run(_fetch_all(trio))
    # A batch is of one shape: the few that were checked stay out.
    old = [report for report in trio.reports if not report.terms().shape.checked]
    fresh = trio.new_query()
    mixed = trio.new_query([*old, *fresh.batch])
    trio.asked.remove(fresh)
    assert asyncio.run(trio.answer(mixed)) == TRUTH
    stop_all(trio)
    assert trio.audit() == []


def ask_something(trio: ChaosTrio) -> None:
    """For a run of this test alone."""
    if not trio.asked:
        assert asyncio.run(trio.answer(trio.new_query())) == TRUTH


async def _fetch_all(trio: ChaosTrio) -> None:
    for asked in trio.asked:
        await trio.fetch(asked)
        assert {party: len(shares) for party, shares in asked.shares.items()} == dict.fromkeys(range(PARTIES), 1)


def test_the_audit_finds_what_it_looks_for(trio: ChaosTrio) -> None:
    """A helper that handed out a second share, a query that nobody answered, a report that nobody counted."""
    ask_something(trio)
    stop_all(trio)
    known = trio.asked[0]
    (share,) = known.shares[1]
    known.shares[1].add(resealed(known, share, trio))
    unanswered = trio.new_query()
    found = trio.audit()
    known.shares[1] = {share}
    trio.asked.remove(unanswered)
    del trio.reports[-REPORTS:]
    assert "S3: helper 2 handed out 2 different shares" in found
    assert "S3: 2 attempts of one query were released" in found
    assert any("half spent" in text for text in found)
    assert any("lost" in text for text in found)
    assert trio.audit() == []


def resealed(asked: ChaosQuery, share: str, trio: ChaosTrio) -> str:
    """A helper's share as it would be in another attempt."""
    query, key = asked.query.query, asked.query.answer_key
    opened = AnswerShare.open(1, bytes.fromhex(share), query, key, trio.helper_set)
    identity = load_identity(trio.running.trio.helper_folder(1) / "identity.key")
    return replace(opened, attempt_id=bytes(32)).seal(1, query, identity).hex()


@pytest.mark.parametrize("party", range(PARTIES) if ALL else [2])
def test_a_helper_set_renewed_while_one_helper_has_only_voted(trio: ChaosTrio, party: int) -> None:
    """Two have released under the old set, the third had no room on its disk; all restart with a new one."""
    if all(helper.process is None for helper in trio.running.helpers):
        start_all(trio)  # the audits above leave them stopped
    asked = trio.new_query()
    trio.arm(party, ArmedFault.of(Failpoint.RELEASE_BEFORE_COMMIT, Fault.FILL_DISK))
    asyncio.run(_until_released_without(party, trio, asked))
    stop_all(trio)
    before = trio.helper_set.digest
    renew(trio.running.trio)
    assert trio.helper_set.digest != before
    start_all(trio)
    assert asyncio.run(trio.answer(asked)) == TRUTH


async def _until_released_without(stuck: int, trio: ChaosTrio, asked: ChaosQuery) -> None:
    """Ask, and go away when the two others have released and this helper's failpoint was met, in whichever order."""
    asking = asyncio.create_task(Querier(trio.helper_set).ask(asked.query, asked.batch))
    page = f"/v1/queries/{asked.query.query.digest.hex()}"
    async with asyncio.timeout(GIVE_UP_SECONDS):
        for other in (party for party in range(PARTIES) if party != stuck):
            while b'"released"' not in await asyncio.to_thread(_page, trio.helper_set.helpers[other], page):
                await asyncio.sleep(0.05)
        while not trio.fired(stuck):
            await asyncio.sleep(0.05)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)


def _page(helper: HelperEntry, page: str) -> bytes:
    try:
        return fetch(helper, page)
    except OSError:
        return b""

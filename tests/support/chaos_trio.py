"""Three real helper processes with failpoints, someone who starts what has died, and an audit of all that ever left.

Reports are real ones that paid for ε = 4294 at Δ = 1, so that noise other than zero has probability e^−4294 and an
answer can be compared with the truth; each has a bucket of its own, so that a 2 anywhere proves a replay. Two releases
of one report would show all the same: sealed shares of two attempts never have the same bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import sys
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from mpc_helpers.identity.config import load_config
from mpc_helpers.identity.membership import load_membership
from mpc_helpers.ledger.attempt import AttemptState, QueryName
from mpc_helpers.ledger.ledger import ReportLedger
from mpc_helpers.ledger.rebuild import owner_of
from mpc_helpers.ledger.schema import day_table
from mpc_helpers.local.launcher import HelperProcess, Launched, Trio, launched, prepare
from protocol.answer import AnswerShare
from protocol.batch import BatchReader
from protocol.errors import TrefoilError
from protocol.helper_set import HelperSet
from protocol.keys import load_identity
from protocol.noise import NoiseMode
from protocol.querier.ask import Querier
from protocol.querier.failure import QueryFailed
from protocol.querier.saved_query import QueryOptions, SavedQuery, make_query
from protocol.report import SealedReport
from protocol.shares import PARTIES
from protocol.wire import HASH_SIZE
from tests.support.chaos_helper import FIRED, ArmedFault, Chaos, Fault, Moment, moment
from tests.support.three_helpers import SITE, real_now, seal_all, terms, write_batch

COMMAND = (sys.executable, "-m", "tests.support.chaos_helper")
REPORTS = 4
EXACT_EPSILON = 4_294_000_000
# `make chaos` runs everything twice, the second time with joint noise. That takes ε up to 64 and draws it as for 16: a
# number is off with probability 2.3·10^−7, so a run of 500 numbers fails by chance with probability 10^−4.
MODE = NoiseMode(os.environ.get("TREFOIL_NOISE", "local"))
ASKED = {NoiseMode.LOCAL: None, NoiseMode.PAIRWISE: None, NoiseMode.JOINT: 64_000_000}
STOPPED_SECONDS = 3.0
GIVE_UP_SECONDS = 60.0


@dataclass
class ChaosQuery:
    """A query, its batch, and every share of it that was ever handed to us."""

    query: SavedQuery
    batch: BatchReader
    shares: dict[int, set[str]] = field(default_factory=lambda: defaultdict(set))


@dataclass
class ChaosTrio:
    """Run by the tests."""

    running: Launched
    folder: Path
    asked: list[ChaosQuery] = field(default_factory=list)
    reports: list[SealedReport] = field(default_factory=list)
    ended: Counter[int] = field(default_factory=Counter)
    # A number of its own: a query that is taken off the list must not share its file with the next.
    batches: Iterator[int] = field(default_factory=itertools.count)

    @property
    def helper_set(self) -> HelperSet:
        return self.running.trio.helper_set

    def helper(self, party: int) -> HelperProcess:
        return self.running.helpers[party]

    def pid(self, party: int) -> int:
        process = self.helper(party).process
        assert process is not None
        return process.pid

    def arm(self, party: int, *failpoints: ArmedFault, skew: int = 0) -> None:
        """What will happen to a helper. Clears what it was told before."""
        folder = self.running.trio.helper_folder(party)
        (folder / FIRED).unlink(missing_ok=True)
        Chaos(failpoints, skew).save(folder)

    def fired(self, party: int) -> list[tuple[Moment, Fault, int]]:
        """What has happened, and to how many processes."""
        path = self.running.trio.helper_folder(party) / FIRED
        lines = path.read_text().split("\n") if path.exists() else []
        words = [line.split() for line in lines if line]
        return [(moment(step), Fault[action], int(count)) for step, action, count in words]

    def new_query(self, reports: list[SealedReport] | None = None, *, seconds: int = 600) -> ChaosQuery:
        """A query over fresh reports, one in each bucket, or over those given."""
        if reports is None:
            of = terms(REPORTS, epsilon_micros=EXACT_EPSILON, sensitivity=1)
            one_each = [[int(bucket == own) for bucket in range(REPORTS)] for own in range(REPORTS)]
            reports = seal_all(one_each, of, self.helper_set)
            self.reports += reports
        batch = write_batch(self.folder / f"batch-{next(self.batches)}", reports)
        key = load_identity(self.running.trio.site_key_path(SITE))
        wishes = QueryOptions(ASKED[MODE], MODE, tolerated_bad_permille=1000, seconds=seconds)
        asked = ChaosQuery(make_query(batch, wishes, self.helper_set, key, real_now()), batch)
        self.asked.append(asked)
        return asked

    async def answer(self, asked: ChaosQuery, *, seconds: float = GIVE_UP_SECONDS) -> list[int]:
        """Ask until there is an answer, as a patient querier would, while an operator revives what has died."""
        async with self._operator():
            querier = Querier(self.helper_set, patience=20, request_seconds=3)
            end = asyncio.get_running_loop().time() + seconds
            while True:
                try:
                    result = await querier.ask(asked.query, asked.batch)
                    break
                except QueryFailed:
                    if asyncio.get_running_loop().time() > end:
                        raise
                    await asyncio.sleep(0.2)
            await self.fetch(asked)
        return result.answer.histogram

    async def fetch(self, asked: ChaosQuery) -> None:
        """The sealed shares as they are handed out now, kept for the audit."""
        url = f"/v1/queries/{asked.query.query.digest.hex()}/answer"
        timeout = aiohttp.ClientTimeout(sock_connect=3, sock_read=3)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            for party, helper in enumerate(self.helper_set.helpers):
                for _ in range(200):
                    with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
                        pin = aiohttp.Fingerprint(helper.tls_pin)
                        async with session.get(helper.address + url, ssl=pin) as response:
                            if response.status == 200:
                                asked.shares[party].add((await response.json())["share"])
                                break
                    await asyncio.sleep(0.1)

    @contextlib.asynccontextmanager
    async def _operator(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self._look_after())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _look_after(self) -> None:
        """Start what has died, and continue daemons stopped for a while. A stopped worker is its daemon's business."""
        stopped_since: dict[int, float] = {}
        now = asyncio.get_running_loop().time
        while True:
            for helper in self.running.helpers:
                if helper.process is not None and (code := helper.process.poll()) is not None:
                    self.ended[code] += 1
                    helper.kill()  # closes what is left of it
                    helper.start()
            for pid in self._stopped():
                if now() - stopped_since.setdefault(pid, now()) > STOPPED_SECONDS:
                    stopped_since.pop(pid)
                    os.kill(pid, signal.SIGCONT)
            await asyncio.sleep(0.1)

    def _stopped(self) -> list[int]:
        daemons = [helper.process.pid for helper in self.running.helpers if helper.process is not None]
        return [pid for pid in daemons if _state_of(pid) == "T"]

    # The audit.

    def audit(self) -> list[str]:
        """Run with all three stopped: what S1, S3 and L1 of COMMIT.md say about the ledgers and about what left."""
        ledgers = self._ledgers()
        try:
            violations = [text for asked in self.asked for text in _audit_query(asked, ledgers, self.helper_set)]
            return violations + _audit_reports(ledgers, {report.digest for report in self.reports})
        finally:
            for ledger in ledgers:
                ledger.close()

    def _ledgers(self) -> list[ReportLedger]:
        configs = [load_config(self.running.trio.config_path(party)) for party in range(PARTIES)]
        return [ReportLedger(config.ledger, owner_of(load_membership(config, real_now()))) for config in configs]


def _audit_query(asked: ChaosQuery, ledgers: list[ReportLedger], helper_set: HelperSet) -> list[str]:
    """One query: one attempt released, the same at all three, and the same bytes whenever they were asked for."""
    name = QueryName.of(asked.query.query)
    live = [ledger.attempts.live(name.key) for ledger in ledgers]
    violations = []
    if [record and record.state for record in live] != [AttemptState.RELEASED] * PARTIES:
        return [f"L1: half spent: {[record and record.state for record in live]}"]
    attempts = {record.attempt_id for record in live if record}
    for party, shares in asked.shares.items():
        if len(shares) != 1:
            violations.append(f"S3: helper {party + 1} handed out {len(shares)} different shares")
        attempts |= {_attempt_of(asked, party, share, helper_set) for share in shares}
    if len(attempts) != 1:
        violations.append(f"S3: {len(attempts)} attempts of one query were released")
    return violations


def _attempt_of(asked: ChaosQuery, party: int, share: str, helper_set: HelperSet) -> bytes:
    """Which attempt a handed-out share belongs to."""
    sealed = bytes.fromhex(share)
    return AnswerShare.open(party, sealed, asked.query.query, asked.query.answer_key, helper_set).attempt_id


def _audit_reports(ledgers: list[ReportLedger], submitted: set[bytes]) -> list[str]:
    """Every report of every query: in exactly one released attempt, and the same one at all three helpers."""
    violations = []
    holders = []
    for ledger in ledgers:
        held: dict[bytes, bytes] = {}
        with ledger._database.reading() as connection:
            for (day,) in connection.execute("SELECT day FROM days").fetchall():
                released = connection.execute(
                    f"SELECT digest, attempt_id FROM {day_table(day)} reports"  # noqa: S608  (an integer)
                    " JOIN attempts ON attempts.attempt = reports.attempt WHERE state = 'released'"
                ).fetchall()
                # After the prefix of the site.
                held |= {digest[-HASH_SIZE:]: attempt_id for digest, attempt_id in released}
        holders.append(held)
        if ledger.attempts.pending():
            violations.append(
                f"L1: helper {ledger.owner.party + 1} has {len(ledger.attempts.pending())} unsettled attempts"
            )
    if any(set(held) != submitted for held in holders):
        violations.append(f"L1: {[len(submitted ^ set(held)) for held in holders]} reports are lost or foreign")
    if not (holders[0] == holders[1] == holders[2]):
        violations.append("S1: the helpers released reports in different attempts")
    return violations


def _state_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "gone"


@contextlib.contextmanager
def chaos_trio(folder: Path, set_up: Callable[[Trio], object] = lambda _: None) -> Iterator[ChaosTrio]:
    """Three helpers of their own directory, with limits that let a cell end in seconds; `set_up` runs before them."""
    options = {"processes": 0, "unchecked_histograms": True, "limits": {"mpc_seconds": 8, "peer_seconds": 2}}
    trio = prepare(folder / "trio", now=real_now(), sites={SITE: [SITE]}, options=options)
    set_up(trio)
    with launched(trio, COMMAND) as running:
        yield ChaosTrio(running, folder)


def stop_all(trio: ChaosTrio) -> None:
    for party in range(PARTIES):
        trio.helper(party).stop()


def start_all(trio: ChaosTrio) -> None:
    for party in range(PARTIES):
        trio.helper(party).start()
    with contextlib.suppress(TrefoilError):
        trio.running.wait_ready()

"""Load with real processes: many queries of many sites at three helpers, and hostile posts at a collector.

`make test` runs a few queries; `make load` (TREFOIL_LOAD=all) 200 over 20 sites. Reports paid for ε = 4294 at Δ = 1, so
that noise other than zero has probability e^−4294 and every answer can be compared with the truth; each report of a
batch has a bucket of its own. How fast it is, is printed and not asserted.

Whatever strangers post, memory and disk are bounded and an honest client gets in. `make test` gives the collector few
descriptors, so that few connections are many; `make load` sends a thousand of each.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import random
import resource
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from mpc_helpers.identity.tls import make_identity
from mpc_helpers.local.launcher import Launched, health, launched_helpers
from protocol.batch import BatchReader
from protocol.collector.limits import CollectorLimits, ReportRefused
from protocol.collector.server import MAX_BUFFERED
from protocol.collector.store import ReportStore
from protocol.errors import ErrorKind
from protocol.header import Header
from protocol.keys import load_identity
from protocol.noise import NoiseMode
from protocol.querier.ask import Querier
from protocol.querier.failure import QueryFailed
from protocol.querier.result import QueryResult
from protocol.querier.saved_query import QueryOptions, make_query
from protocol.units import DAY, HOUR
from tests.protocol.test_collector import SITE, at
from tests.protocol.test_listening import flood
from tests.support import protocol_samples as samples
from tests.support.figures import keep
from tests.support.posts import ATTACKS, Collector, connected, copies, posted_honestly
from tests.support.raising import raises
from tests.support.three_helpers import real_now, seal_all, terms, write_batch

ALL = os.environ.get("TREFOIL_LOAD") == "all"
QUERIES, SITES, AT_ONCE = (200, 20, 8) if ALL else (8, 4, 4)
# Memory is compared from here on, when allocators and caches have had their fill; in MB, per daemon.
WARM_UP, FLAT = AT_ONCE * 3 if ALL else AT_ONCE, 20
REPORTS = 8
EXACT_EPSILON = 4_294_000_000


def site(index: int) -> str:
    return f"shop-{index % SITES}.example"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launched]:
    sites = {site(index): [site(index)] for index in range(SITES)}
    options = {"processes": 0, "unchecked_histograms": True, "limits": {"running": 2}}
    with launched_helpers(tmp_path_factory.mktemp("load"), now=real_now(), sites=sites, options=options) as trio:
        yield trio


def resident_mb(pid: int) -> float:
    """What a process holds in memory now; its workers come and go and are not counted."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    return 0.0


def memory(running: Launched) -> list[float]:
    gc.collect()
    return [resident_mb(helper.process.pid) for helper in running.helpers if helper.process is not None]


@dataclass
class Load:
    """A querier for every site."""

    running: Launched
    folder: Path
    batches: dict[int, BatchReader] = field(default_factory=dict)

    def batch(self, index: int) -> BatchReader:
        of = terms(REPORTS, epsilon_micros=EXACT_EPSILON, sensitivity=1, site=site(index), caller=site(index))
        one_each = np.eye(REPORTS, dtype=int).tolist()
        reports = seal_all(one_each, of, self.running.trio.helper_set)
        self.batches[index] = write_batch(self.folder / f"batch-{index}", reports)
        return self.batches[index]

    async def ask(self, index: int, batch: BatchReader) -> QueryResult:
        """One query over this batch."""
        helper_set = self.running.trio.helper_set
        key = load_identity(self.running.trio.site_key_path(site(index)))
        mode = list(NoiseMode)[index % 2]
        asked = make_query(batch, QueryOptions(noise=mode, seconds=600), helper_set, key, real_now())
        return await Querier(helper_set).ask(asked, batch)

    async def run(self, first: int, last: int) -> list[float]:
        """Queries `first` to `last`, a few at a time; every answer exact. Gives the seconds each took."""
        places = asyncio.Semaphore(AT_ONCE)

        async def one(index: int) -> float:
            async with places:
                batch = await asyncio.to_thread(self.batch, index)
                start = time.monotonic()
                result = await self.ask(index, batch)
                assert result.answer.histogram == [1] * REPORTS
                assert [dict(counts) for counts in result.answer.rejections] == [{}, {}, {}]
                return time.monotonic() - start

        return list(await asyncio.gather(*(one(index) for index in range(first, last))))


@pytest.fixture(scope="module")
def load(running: Launched, tmp_path_factory: pytest.TempPathFactory) -> Load:
    return Load(running, tmp_path_factory.mktemp("batches"))


def test_many_queries_of_many_sites(running: Launched, load: Load) -> None:
    start = time.monotonic()
    taken = asyncio.run(load.run(0, WARM_UP))
    before = memory(running)
    taken += asyncio.run(load.run(WARM_UP, QUERIES))
    seconds = time.monotonic() - start
    after = memory(running)
    for helper in running.trio.helper_set.helpers:
        page = health(helper)
        assert page is not None
        assert page["queries"] == {"released": QUERIES}
    show(taken, seconds, before, after)
    assert all(end - begin < FLAT for begin, end in zip(before, after, strict=True))


def show(taken: list[float], seconds: float, before: list[float], after: list[float]) -> None:
    """What `make load` prints."""
    grown = ", ".join(f"{begin:.0f} → {end:.0f} MB" for begin, end in zip(before, after, strict=True))
    print(  # noqa: T201
        f"\n{QUERIES} queries over {SITES} sites, {AT_ONCE} at a time: {seconds:.0f} s, "
        f"{QUERIES / seconds:.2f} per second; each took {np.median(taken):.1f} s (median), "
        f"{max(taken):.1f} s (longest); "
        f"resident memory of the three daemons: {grown}"
    )


def test_all_reports_of_a_site_offered_again_are_spent(running: Launched, load: Load) -> None:
    """Run last: nothing that was counted under load is counted again."""
    mine = range(0, QUERIES, SITES) if load.batches else [0]
    if not load.batches:  # a run of this test alone
        asyncio.run(load.run(0, 1))
    again = write_batch(load.folder / "again", [report for index in mine for report in load.batches[index]])
    with raises(ErrorKind.ALREADY_COUNTED, QueryFailed):
        asyncio.run(load.ask(0, again))


STRANGERS, BESIDE = 1000, 20


def log_bytes(running: Launched) -> int:
    return sum(running.trio.log_path(party).stat().st_size for party in range(len(running.helpers)))


@pytest.mark.skipif(not ALL, reason="make load")
def test_a_thousand_strangers_at_each_helper_while_queries_run(running: Launched, load: Load) -> None:
    """All queries are answered; memory and log stay bounded. Strangers are silent, or begin with nonsense."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4 * STRANGERS)), hard))
    before, logged = memory(running), log_bytes(running)
    endpoints = [helper.endpoint for helper in running.trio.helper_set.helpers]
    with flood(endpoints, STRANGERS) as strangers:
        start = time.monotonic()
        taken = asyncio.run(load.run(QUERIES, QUERIES + BESIDE))
        seconds = time.monotonic() - start
        during = memory(running)
    written = log_bytes(running) - logged
    figures: dict[str, object] = {
        "strangers_at_each_helper": STRANGERS,
        "connections_made": len(strangers),
        "queries": BESIDE,
        "answered": len(taken),
        "seconds": round(seconds, 1),
        "longest_query_seconds": round(max(taken), 1),
        "daemon_memory_before_mb": [round(each) for each in before],
        "daemon_memory_during_mb": [round(each) for each in during],
        "log_bytes_of_three": written,
    }
    print(f"\n{figures}")  # noqa: T201
    keep("strangers-load", "make load", figures)
    assert len(taken) == BESIDE
    # 256 strangers at 280 kB each, and as much again for what has just been cut off.
    assert all(end - begin < 256 for begin, end in zip(before, during, strict=True))
    assert written < 2**20


FULL = os.environ.get("TREFOIL_LOAD") == "all"
# The lowest limit under which Python starts with room to spare; 36 strangers fit.
DESCRIPTORS, HOSTILE = (4096, 1_000) if FULL else (200, 60)
START_SECONDS = 60
# A connection takes 280 kB when it is idle, and as much again for what TLS and HTTP have read ahead of the body. Bodies
# are held as pieces and joined once; the rest is what allocators keep.
MOST_MB = (256 if FULL else 36) * 0.56 + 3 * MAX_BUFFERED / 2**20


@contextlib.asynccontextmanager
async def collecting(folder: Path) -> AsyncIterator[Collector]:
    make_identity(folder, "localhost", int(time.time()))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "trefoil", "collect", str(folder / "collected"), "--site", SITE]
    command += ["--port", str(port), "--certificate", str(folder / "tls.crt"), "--key", str(folder / "tls.key")]
    # All clients are at one address.
    command += ["--per-address", "100000"]

    def few_descriptors() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))

    with subprocess.Popen(command, stdout=subprocess.DEVNULL, preexec_fn=few_descriptors) as process:
        try:
            yield Collector(port, process.pid, folder / "collected")
        finally:
            process.terminate()


def fresh() -> bytes:
    """A report that the collector has not seen."""
    now = int(time.time())
    return at(next(copies(samples.report("one"), 1)), now - now % HOUR).encode()


@pytest.mark.timeout(1200 if FULL else 180)
async def test_whatever_strangers_send_an_honest_client_gets_in(tmp_path: Path, show: Callable[[str], None]) -> None:
    figures: dict[str, object] = {}
    async with collecting(tmp_path) as collector:
        await posted_honestly(collector, fresh(), START_SECONDS)
        before = collector.memory_mb()
        for attack in ATTACKS:
            collector.forget_peak()
            async with connected(collector, HOSTILE, attack):
                tries = await posted_honestly(collector, fresh())
                found = {
                    "honest_tries": tries,
                    "descriptors": collector.descriptors(),
                    "peak_mb": round(collector.peak_mb(), 1),
                    "disk_mb": round(collector.disk_mb(), 2),
                }
            figures[attack.__name__] = found
            assert found["descriptors"] < DESCRIPTORS, figures
            assert found["peak_mb"] < before + MOST_MB and found["disk_mb"] < 5, figures
    if FULL:
        keep(
            "collector-hostile",
            "make load",
            {"strangers": HOSTILE, "start_mb": round(before, 1), "attacks": figures},
        )


@pytest.mark.parametrize("buckets", [4, 1024], ids=["small", "large"])
def test_kinds_and_hours_without_end_stay_in_the_room_of_their_site(tmp_path: Path, buckets: int) -> None:
    """Shelves are made by whoever posts. All that they take counts: the file is never larger than the room."""
    room = 2**22
    limits = CollectorLimits(sites=frozenset({SITE}), site_bytes=room)
    chance = random.Random(1)
    base = samples.report("wide", [0] * buckets, samples.terms(buckets=buckets))
    refused = 0
    with ReportStore(tmp_path, limits) as store:
        while refused < 10:
            many = [at(one, samples.NOW - chance.randrange(29 * DAY // HOUR) * HOUR) for one in copies(base, 50)]
            outcomes = store.add([(Header.decode(one.header), one) for one in many])
            refused += sum(isinstance(outcome, ReportRefused) for outcome in outcomes)
        store._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        assert room / 2 < (tmp_path / "reports.sqlite").stat().st_size <= room

"""Hostile posts at a real collector: whatever strangers send, memory and disk are bounded and an honest client gets in.

`make test` gives the process few descriptors, so that few connections are many; `make load` sends a thousand of each.
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from mpc_helpers.identity.tls import make_identity
from protocol.collector.bodies import MAX_HELD
from protocol.collector.limits import CollectorLimits, NotTaken
from protocol.collector.store import ReportStore
from protocol.header import Header
from protocol.seconds import DAY, HOUR
from tests.support import protocol_samples as samples
from tests.support.figures import keep
from tests.support.hostile_posts import ATTACKS, Collector, connected, posted_honestly
from tests.support.many_posts import copies
from tests.test_collector import SITE, at

FULL = os.environ.get("TREFOIL_LOAD") == "all"
# The lowest limit under which Python starts with room to spare; 36 strangers fit.
DESCRIPTORS, STRANGERS = (4096, 1_000) if FULL else (200, 60)
START_SECONDS = 60
# A connection takes 280 kB when it is idle, and as much again for what TLS and HTTP have read ahead of the body. Bodies
# are held as pieces and joined once; the rest is what allocators keep.
MOST_MB = (256 if FULL else 36) * 0.56 + 3 * MAX_HELD / 2**20


@contextlib.asynccontextmanager
async def collecting(folder: Path) -> AsyncIterator[Collector]:
    make_identity(folder, "localhost", int(time.time()))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "trefoil", "collect", str(folder / "collected"), "--site", SITE]
    command += ["--port", str(port), "--certificate", str(folder / "tls.crt"), "--key", str(folder / "tls.key")]

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
            async with connected(collector, STRANGERS, attack):
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
            "collector-hostile", "make load", {"strangers": STRANGERS, "start_mb": round(before, 1), "attacks": figures}
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
            refused += sum(isinstance(outcome, NotTaken) for outcome in outcomes)
        store._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        assert room / 2 < (tmp_path / "reports.sqlite").stat().st_size <= room

"""Metrics in the text format that Prometheus reads: typed right, there from 0, and never a site, query or person."""

from __future__ import annotations

import asyncio
import math
import shutil
import subprocess
from pathlib import Path

import pytest

from mpc_helpers.service.metrics import Metrics
from protocol.errors import Rejection, TrefoilError
from protocol.querier.query_failed import QueryFailed
from tests.support.exposition import Family, read_exposition
from tests.support.three_helpers import SITE, three_helpers
from tests.test_server import send, small_batch, talking_to

WANTED = {
    "process_cpu_seconds_total",
    "process_max_fds",
    "process_open_fds",
    "process_resident_memory_bytes",
    "process_start_time_seconds",
    "trefoil_admit_cpu_seconds_total",
    "trefoil_build_info",
    "trefoil_certificate_expiry_seconds",
    "trefoil_column_bytes",
    "trefoil_concerns",
    "trefoil_connections",
    "trefoil_connections_cut_total",
    "trefoil_disk_free_bytes",
    "trefoil_failed_proofs",
    "trefoil_key_expiry_seconds",
    "trefoil_ledger_alarms",
    "trefoil_ledger_cpu_seconds_total",
    "trefoil_ledger_bytes",
    "trefoil_ledger_log_bytes",
    "trefoil_ledger_moves",
    "trefoil_ledger_reports",
    "trefoil_ledger_seconds_total",
    "trefoil_peer_bytes_total",
    "trefoil_peer_clock_seconds",
    "trefoil_peer_up",
    "trefoil_process_cpu_seconds",
    "trefoil_process_peak_bytes",
    "trefoil_queries",
    "trefoil_queries_total",
    "trefoil_ready",
    "trefoil_reports_rejected_total",
    "trefoil_requests_total",
    "trefoil_stage_seconds_total",
    "trefoil_uploads",
}


def test_counters_grow_and_gauges_are_read_when_asked() -> None:
    metrics = Metrics()
    count = metrics.counter("things_total", "things seen")
    by_kind = metrics.counter("kinds_total", "kinds seen", kind=["even", "odd"])
    value = 1.0
    metrics.gauge("level", "how much\nthere is", lambda: {(("where", 'a"b\\c'),): value})
    count()
    by_kind(2, kind="odd")
    by_kind(kind="new")
    value = 7.5
    assert metrics.render().splitlines() == [
        "# HELP things_total things seen",
        "# TYPE things_total counter",
        "things_total 1",
        "# HELP kinds_total kinds seen",
        "# TYPE kinds_total counter",
        'kinds_total{kind="even"} 0',
        'kinds_total{kind="new"} 1',
        'kinds_total{kind="odd"} 2',
        "# HELP level how much\\nthere is",
        "# TYPE level gauge",
        'level{where="a\\"b\\\\c"} 7.5',
    ]


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0, "0"), (1e15, "1000000000000000"), (0.1, "0.1"), (math.inf, "+Inf"), (-math.inf, "-Inf"), (math.nan, "NaN")],
)
def test_numbers_keep_all_their_digits(value: float, shown: str) -> None:
    metrics = Metrics()
    metrics.value("level", "how much", lambda: value)
    assert metrics.render().splitlines()[-1] == f"level {shown}"
    read_exposition(metrics.render())


def test_a_name_says_what_it_is_and_stands_once() -> None:
    metrics = Metrics()
    metrics.value("level", "how much", lambda: 1.0)
    for wrong in (
        lambda: metrics.counter("things", "not called a total"),
        lambda: metrics.value("level_total", "called a total", lambda: 1.0),
        lambda: metrics.value("level", "there already", lambda: 1.0),
    ):
        with pytest.raises(ValueError, match=r"level|things"):
            wrong()


@pytest.mark.parametrize("error", [OSError("the disk is gone"), TrefoilError("unreadable")])
def test_one_that_cannot_be_read_does_not_hide_the_others(error: Exception) -> None:
    def broken() -> float:
        raise error

    metrics = Metrics()
    metrics.value("broken", "of a disk that is gone", broken)
    metrics.value("level", "how much", lambda: 1.0)
    page = read_exposition(metrics.render())
    assert (page["broken"].samples, page["level"].samples) == ({}, {(): 1.0})


async def test_everything_an_operator_needs_is_there_from_the_start(tmp_path: Path) -> None:
    async with three_helpers(tmp_path) as three, talking_to(three) as session:

        async def page() -> dict[str, Family]:
            status, text = await send(session, "GET", "/metrics")
            assert status == 200
            assert SITE not in text
            _check_with_promtool(text)
            return read_exposition(text)

        fresh = await page()
        assert set(fresh) == WANTED
        rejected = fresh["trefoil_reports_rejected_total"].samples
        assert {dict(labels)["reason"]: count for labels, count in rejected.items()} == dict.fromkeys(
            (reason.value for reason in Rejection), 0
        )
        ended = fresh["trefoil_queries_total"]
        for state in ("released", "failed", "disputed", "withdrawn"):
            assert ended.value(state=state) == 0
        assert set(fresh["trefoil_peer_up"].samples) == {(("peer", "helper-2"),), (("peer", "helper-3"),)}
        assert len(fresh["trefoil_key_expiry_seconds"].samples) == 3
        batch = small_batch(three)
        await three.ask(three.query(batch), batch)
        later = await page()
        assert later["trefoil_queries_total"].value(state="released") == 1
        assert later["trefoil_queries"].value(state="released") == 1
        assert later["trefoil_ledger_moves"].value() > fresh["trefoil_ledger_moves"].value()
        assert later["trefoil_peer_bytes_total"].value() > 0
        with pytest.raises(QueryFailed):
            await three.ask(three.query(batch), batch)
        assert (await page())["trefoil_reports_rejected_total"].value(reason="already spent") == 5
        # What a stage took is counted once, however often its query is looked at or tried again.
        assert all(not any(job.take_seconds().values()) for job in three.daemons[0].desk.registry.all())
        await three.stop(0)
        await three.start(0)
        async with asyncio.timeout(20):
            while (await page())["trefoil_ledger_reports"].value() != 5:
                await asyncio.sleep(0.1)


def _check_with_promtool(text: str) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        return
    done = subprocess.run([promtool, "check", "metrics"], input=text, text=True, capture_output=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@pytest.mark.parametrize(
    "page",
    [
        "level 1\n",
        "# HELP level how much\nlevel 1\n",
        "# TYPE level gauge\nlevel 1\n",
        "# HELP level how much\n# TYPE level counter\nlevel 1\n",
        "# HELP level_total how much\n# TYPE level_total gauge\nlevel_total 1\n",
        "# HELP level how much\n# TYPE level gauge\nlevel one\n",
        "# HELP level how much\n# TYPE level gauge\nlevel 1\nlevel 2\n",
        '# HELP level how much\n# TYPE level gauge\nlevel{a="b"c"} 1\n',
        "# HELP level how much\n# TYPE level gauge\nlevel 1",
    ],
)
def test_the_reader_is_strict(page: str) -> None:
    with pytest.raises(AssertionError):
        read_exposition(page)

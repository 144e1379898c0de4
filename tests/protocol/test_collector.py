"""The collector: every acknowledged report is on disk exactly once, and what is refused is refused in words."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import io
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import aiohttp
import pytest
from aiohttp.streams import StreamReader
from aiohttp.test_utils import make_mocked_request
from typer.testing import CliRunner

from mpc_helpers.identity.tls import make_identity
from protocol.batch import BatchReader, BatchWriter
from protocol.cli import app as cli
from protocol.collector import batches, commands
from protocol.collector.limits import (
    BURST_SECONDS,
    MAX_ADDRESSES,
    MAX_KINDS,
    CollectorLimits,
    PostingRate,
    PostRefusal,
    ReportKind,
    ReportRefused,
)
from protocol.collector.server import MAX_POST, MAX_WAITING, CollectorIntake, PostBodies, collecting
from protocol.collector.store import Receipt, ReportStore, StoreReader, stored_size
from protocol.errors import ErrorKind, TrefoilError
from protocol.files import write_atomically
from protocol.header import TIME_SPAN, Header
from protocol.querier.saved_query import QueryOptions, make_query
from protocol.report import SealedReport
from protocol.units import DAY, HOUR
from tests.support import protocol_samples as samples
from tests.support.figures import keep
from tests.support.posts import Posted, copies, no_checks, post_all
from tests.support.raising import raises

SITE = samples.TERMS.site
# All clients of these tests are at one address.
LIMITS = CollectorLimits(sites=frozenset({SITE}), per_address=100_000)
REPORT = samples.report("one")
STRANGER = samples.report("x", promised=samples.terms(site="x.example", caller="x.example"))
FULL = os.environ.get("TREFOIL_LOAD") == "all"


def headed(report: SealedReport) -> tuple[Header, SealedReport]:
    return Header.decode(report.header), report


def at(report: SealedReport, hour: int) -> SealedReport:
    """The report with another hour in its header. Only helpers would notice."""
    header = report.header[: TIME_SPAN.start] + hour.to_bytes(8, "big") + report.header[TIME_SPAN.stop :]
    return SealedReport(header, report.body, report.payloads)


def stored(folder: Path) -> Counter[bytes]:
    with StoreReader(folder) as store:
        shelves = store.shelves()
        found = Counter(report.digest for report in store.reports([shelf.number for shelf in shelves]))
    assert sum(shelf.reports for shelf in shelves) == found.total()
    return found


# The store.


def test_a_report_is_stored_once_however_often_it_comes(tmp_path: Path) -> None:
    with ReportStore(tmp_path, LIMITS) as store:
        first, again = store.add([headed(REPORT), headed(REPORT)])
        assert (first, again) == (Receipt(REPORT.digest, new=True), Receipt(REPORT.digest, new=False))
    with ReportStore(tmp_path, LIMITS) as store:
        assert store.add([headed(REPORT)]) == [Receipt(REPORT.digest, new=False)]
    assert stored(tmp_path) == {REPORT.digest: 1}


def test_shelves_are_by_kind_and_hour(tmp_path: Path) -> None:
    later = at(samples.report("later"), samples.NOW + HOUR)
    other = samples.report("other", promised=samples.terms(unit="euros"))
    with ReportStore(tmp_path, LIMITS) as store:
        store.add([headed(one) for one in (REPORT, later, other, samples.report("two"))])
    with StoreReader(tmp_path) as reader:
        found = {(shelf.kind, shelf.hour): shelf.reports for shelf in reader.shelves()}
    kinds = [ReportKind.of(Header.decode(one.header)).name for one in (REPORT, other)]
    hour = samples.TERMS.time
    assert found == {(kinds[0], hour): 2, (kinds[0], samples.NOW + HOUR): 1, (kinds[1], hour): 1}


ROOM = 2 * stored_size(len(REPORT.encode()))


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        # A sixteenth is kept for the next kind.
        (replace(LIMITS, site_bytes=ROOM * 16 // 15 + 2), PostRefusal.SITE_FULL),
        (replace(LIMITS, total_bytes=ROOM), PostRefusal.FULL),
    ],
)
def test_room_is_bounded_also_after_a_restart(tmp_path: Path, limits: CollectorLimits, reason: PostRefusal) -> None:
    many = [headed(report) for report in copies(REPORT, 3)]
    with ReportStore(tmp_path, limits) as store:
        outcomes = store.add(many[:2])
        assert all(isinstance(outcome, Receipt) for outcome in outcomes)
    with ReportStore(tmp_path, limits) as store:
        (full,) = store.add(many[2:])
        assert isinstance(full, ReportRefused) and full.reason is reason
        # One that is known needs no room.
        assert store.add(many[:1]) == [Receipt(many[0][1].digest, new=False)]


def test_what_helpers_would_refuse_for_its_age_is_forgotten(tmp_path: Path) -> None:
    old = at(samples.report("old"), samples.NOW - 40 * DAY)
    with ReportStore(tmp_path, LIMITS) as store:
        store.add([headed(old), headed(REPORT)])
        assert store.forget(samples.NOW) == 1
    assert stored(tmp_path) == {REPORT.digest: 1}


def test_a_foreign_file_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "reports.sqlite").write_bytes(b"my diary" * 100)
    with raises(ErrorKind.FILE_DAMAGED):
        ReportStore(tmp_path, LIMITS)
    assert (tmp_path / "reports.sqlite").read_bytes() == b"my diary" * 100
    with raises(ErrorKind.FILE_MISSING):
        StoreReader(tmp_path / "nowhere")


# What is taken.


@pytest.mark.parametrize(
    ("report", "limits", "reason"),
    [
        (STRANGER, LIMITS, PostRefusal.OTHER_SITE),
        (REPORT, replace(LIMITS, helper_sets=frozenset({bytes(32)})), PostRefusal.OTHER_HELPERS),
        (at(REPORT, samples.NOW - 30 * DAY), LIMITS, PostRefusal.TOO_OLD),
        (at(REPORT, samples.NOW + 2 * HOUR), LIMITS, PostRefusal.TOO_NEW),
    ],
    ids=["site", "helpers", "old", "new"],
)
def test_what_no_query_could_count_is_refused(
    report: SealedReport, limits: CollectorLimits, reason: PostRefusal
) -> None:
    with pytest.raises(ReportRefused) as caught:
        limits.check(Header.decode(report.header), samples.NOW)
    assert caught.value.reason is reason


def test_posting_is_rationed_for_each_site() -> None:
    now = 0.0
    rate = PostingRate(replace(LIMITS, sites=frozenset({"a.example", "b.example"}), per_second=2, burst=3), lambda: now)
    for now, allowed in ((0.0, 3), (0.5, 1), (1000.0, 3)):  # noqa: B007 - the clock reads it
        for _ in range(allowed):
            rate.take("a.example")
        with pytest.raises(ReportRefused) as caught:
            rate.take("a.example")
        assert caught.value.reason is PostRefusal.TOO_FAST
    rate.take("b.example")


def test_an_address_has_a_rate_of_its_own() -> None:
    now = 0.0
    rate = PostingRate(replace(LIMITS, per_address=1), lambda: now)
    for address in ("192.0.2.1", "192.0.2.2", "2001:db8::1", "not an address"):
        for _ in range(BURST_SECONDS):
            rate.take_from_address(address)
        with pytest.raises(ReportRefused):
            rate.take_from_address(address)
    # Whoever has an IPv6 address has its /64, and an IPv4 address may be written as one.
    for same in ("2001:db8::ffff", "::ffff:192.0.2.1"):
        with pytest.raises(ReportRefused):
            rate.take_from_address(same)
    rate.take_from_address("2001:db8:0:1::1")
    now = 1.0
    rate.take_from_address("192.0.2.1")


def test_addresses_are_forgotten_before_they_fill_the_memory() -> None:
    rate = PostingRate(LIMITS, lambda: 0.0)
    for number in range(MAX_ADDRESSES + 10):
        rate.take_from_address(f"client {number}")
    assert len(rate._addresses) == MAX_ADDRESSES


def test_junk_of_other_kinds_leaves_each_kind_its_share(tmp_path: Path) -> None:
    size = stored_size(len(REPORT.encode()))
    limits = replace(LIMITS, site_bytes=MAX_KINDS * 4 * size)
    junk = [samples.report(f"j{kind}", promised=samples.terms(epsilon_micros=1 + kind)) for kind in range(20)]
    with ReportStore(tmp_path, limits) as store:
        assert all(isinstance(each, Receipt) for each in store.add([headed(REPORT)]))
        outcomes = store.add([headed(each) for one in junk for each in copies(one, 100)])
        assert sum(isinstance(each, ReportRefused) for each in outcomes) > 1000
    # Also after a restart: the honest kind has a sixteenth, which is four reports.
    with ReportStore(tmp_path, limits) as store:
        honest = store.add([headed(each) for each in copies(REPORT, 4)])
        assert sum(isinstance(each, Receipt) for each in honest) >= 3
        assert isinstance(store.add([headed(junk[-1])])[0], ReportRefused)


async def test_an_honest_device_gets_in_beside_a_flood(tmp_path: Path, show: Callable[[str], None]) -> None:
    """A stranger posts well-formed reports from one address, as fast as they are refused.

    At any speed: it gets ten, and one a second, of the fifty, and one a second, that the site has.
    """
    limits = CollectorLimits(sites=frozenset({SITE}), per_second=1, burst=50, per_address=1)
    junk = list(copies(samples.report("junk"), 500))
    statuses: Counter[int] = Counter()
    async with served(tmp_path, limits) as address:
        stranger = aiohttp.TCPConnector(local_addr=("127.0.0.2", 0), limit=50)
        async with aiohttp.ClientSession(connector=stranger) as flooding, aiohttp.ClientSession() as device:

            async def flood(report: SealedReport) -> None:
                async with flooding.post(address, data=report.encode(), ssl=no_checks()) as response:
                    statuses[response.status] += 1

            tasks = [asyncio.create_task(flood(report)) for report in junk]
            for report in copies(REPORT, 5):
                while sum(statuses.values()) < 300:
                    await asyncio.sleep(0.01)
                async with device.post(address, data=report.encode(), ssl=no_checks()) as response:
                    assert response.status == 201
            await asyncio.gather(*tasks)
    show(f"a flood of {len(junk)}: {dict(statuses)}")
    assert statuses[429] > statuses[201]


def test_limits_are_checked() -> None:
    with raises(ErrorKind.MISSING_OPTION):
        CollectorLimits(sites=frozenset())
    with raises(ErrorKind.OUT_OF_RANGE):
        replace(LIMITS, per_second=0)


async def test_memory_is_bounded_while_the_disk_is_slow(tmp_path: Path) -> None:
    """Without a writer at work, reports wait; one more than may wait is refused at once."""
    with ReportStore(tmp_path, LIMITS) as store:
        intake = CollectorIntake(store, LIMITS, lambda: samples.NOW)
        waiting = [asyncio.create_task(intake.take(report.encode())) for report in copies(REPORT, MAX_WAITING)]
        await asyncio.sleep(0)
        with pytest.raises(ReportRefused) as caught:
            await intake.take(REPORT.encode())
        assert caught.value.reason is PostRefusal.BUSY
        writer = asyncio.create_task(intake.run())
        assert all(filed.new for filed in await asyncio.gather(*waiting))
        writer.cancel()


async def test_the_body_that_arrives_for_longest_makes_room() -> None:
    """A few clients that hold back their last byte do not keep the next one out."""
    bodies = PostBodies(most=100)
    outcomes: list[int | PostRefusal] = []

    async def post(stream: StreamReader) -> None:
        try:
            async with bodies.body(make_mocked_request("POST", "/reports", payload=stream)) as body:
                outcomes.append(len(body))
        except ReportRefused as error:
            outcomes.append(error.reason)

    streams = [StreamReader(Mock(), 2**16, loop=asyncio.get_running_loop()) for _ in range(3)]
    tasks = [asyncio.create_task(post(stream)) for stream in streams]
    for stream, size in zip(streams, (60, 30, 45), strict=True):
        stream.feed_data(bytes(size))
        await asyncio.sleep(0.01 if size < 45 else 0)
    # While the first is on its way out: it goes once.
    for stream in streams[1:]:
        stream.feed_data(bytes(2))
        await asyncio.sleep(0)
    for stream in streams[1:]:
        stream.feed_eof()
    await asyncio.gather(*tasks)
    assert outcomes == [PostRefusal.SLOW, 32, 47]


async def test_a_disk_that_fails_refuses_and_keeps_nothing_half(tmp_path: Path) -> None:
    with ReportStore(tmp_path, LIMITS) as store:
        intake = CollectorIntake(store, LIMITS, lambda: samples.NOW)
        writer = asyncio.create_task(intake.run())
        store._db.execute("PRAGMA max_page_count = 10")
        big = samples.report("big", [0] * 1024, samples.terms(buckets=1024))
        outcomes = await asyncio.gather(
            *(intake.take(report.encode()) for report in copies(big, 20)), return_exceptions=True
        )
        assert all(isinstance(outcome, ReportRefused) and outcome.reason is PostRefusal.DISK for outcome in outcomes)
        store._db.execute("PRAGMA max_page_count = 1000000")
        assert (await intake.take(REPORT.encode())).new
        writer.cancel()
    assert stored(tmp_path) == {REPORT.digest: 1}


# Over HTTPS.


@contextlib.asynccontextmanager
async def served(tmp_path: Path, limits: CollectorLimits = LIMITS) -> AsyncIterator[str]:
    tls = make_identity(tmp_path, "localhost", samples.NOW)
    pair = (tls.certificate, tls.key)
    async with collecting(tmp_path / "collected", limits, "127.0.0.1", 0, pair, lambda: samples.NOW) as port:
        yield f"https://127.0.0.1:{port}/reports"


async def test_a_device_posts_and_posts_again(tmp_path: Path) -> None:
    async with served(tmp_path) as address, aiohttp.ClientSession() as session:
        for status in (201, 200):
            async with session.post(address, data=REPORT.encode(), ssl=no_checks()) as response:
                assert response.status == status
                assert await response.json() == {"digest": REPORT.digest.hex()}
                assert response.headers["Access-Control-Allow-Origin"] == "*"
        async with session.options(address, ssl=no_checks()) as response:
            assert response.status == 204
    assert stored(tmp_path / "collected") == {REPORT.digest: 1}


@pytest.mark.parametrize(
    ("body", "status", "error"),
    [
        (b"", 400, "malformed"),
        (b"not a report", 400, "malformed"),
        (REPORT.encode() + b"x", 400, "malformed"),
        (REPORT.encode()[:-1], 400, "malformed"),
        (bytes(MAX_POST + 1), 400, "malformed"),
        (STRANGER.encode(), 403, "other-site"),
    ],
    ids=["empty", "noise", "longer", "shorter", "huge", "other site"],
)
async def test_hostile_posts_get_an_error(tmp_path: Path, body: bytes, status: int, error: str) -> None:
    async with (
        served(tmp_path) as address,
        aiohttp.ClientSession() as session,
        session.post(address, data=io.BytesIO(body), ssl=no_checks()) as response,
    ):
        assert response.status == status
        assert (await response.json())["error"] == error
    assert stored(tmp_path / "collected") == {}


async def test_a_taken_port_is_said(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        tls = make_identity(tmp_path, "localhost", samples.NOW)
        with raises(ErrorKind.BUSY):
            port, pair = taken.getsockname()[1], (tls.certificate, tls.key)
            async with collecting(tmp_path / "c", LIMITS, "127.0.0.1", port, pair, lambda: samples.NOW):
                pass
        assert not (tmp_path / "c").exists()
        # What was collected before stays.
        ReportStore(tmp_path / "kept", LIMITS).__exit__()
        with raises(ErrorKind.BUSY):
            async with collecting(tmp_path / "kept", LIMITS, "127.0.0.1", port, pair, lambda: samples.NOW):
                pass
        assert (tmp_path / "kept" / "reports.sqlite").exists()
    with raises(ErrorKind.WRONG_FILE):
        missing = (tmp_path / "no.crt", tmp_path / "no.key")
        async with collecting(tmp_path / "c", LIMITS, "127.0.0.1", 0, missing, lambda: samples.NOW):
            pass


async def test_an_ipv6_address_is_listened_on(tmp_path: Path) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    tls = make_identity(tmp_path, "localhost", samples.NOW)
    pair = (tls.certificate, tls.key)
    async with collecting(tmp_path / "c", LIMITS, "::1", 0, pair, lambda: samples.NOW) as port:
        socket.create_connection(("::1", port)).close()


# A real process, killed again and again.


def _start(folder: Path, tls: Path, port: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "trefoil", "collect", str(folder), "--site", SITE, "--port", str(port)]
    command += ["--certificate", str(tls / "tls.crt"), "--key", str(tls / "tls.key"), "--per-second", "100000"]
    command += ["--per-address", "100000"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL)


@pytest.mark.timeout(1200 if FULL else 120)
async def test_kill_9_loses_nothing_that_was_acknowledged(tmp_path: Path, show: Callable[[str], None]) -> None:
    """Each report is there exactly once, or its client saw an error. `make load` posts 100,000 by 50 clients."""
    count, clients, kills = (100_000, 50, 20) if FULL else (1_000, 50, 3)
    now = int(time.time())
    fresh, wrong = (at(report, now - now % HOUR) for report in (REPORT, STRANGER))
    reports = [*copies(fresh, count), *copies(wrong, count // 50)]
    make_identity(tmp_path, "localhost", now)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder, seed, began = tmp_path / "collected", random.randrange(2**32), time.monotonic()
    chance = random.Random(seed)
    process, posted = _start(folder, tmp_path, port), Posted()
    address, seconds = f"https://127.0.0.1:{port}/reports", 1100 if FULL else 110
    try:
        posting = asyncio.create_task(post_all(address, reports, clients, seconds, posted))
        # In the midst of posting, however fast this machine is.
        for least in sorted(chance.sample(range(1, count), kills)):
            while len(posted.acknowledged) < least and not posting.done():
                await asyncio.sleep(0.001)
            process.send_signal(signal.SIGKILL)
            process.wait()
            process = _start(folder, tmp_path, port)
        await posting
    finally:
        process.terminate()
        process.wait(timeout=30)
    found = stored(folder)
    assert set(found.values()) == {1}
    assert set(found) == posted.acknowledged
    assert len(found) == count
    assert set(posted.refused.values()) == {"other-site"} and len(posted.refused) == count // 50
    lost, twice = len(posted.acknowledged - set(found)), found.total() - len(found)
    figures = {"reports": count, "clients": clients, "kills": kills, "posts": posted.tries, "stored": len(found)}
    figures |= {"lost": lost, "stored_twice": twice, "refused": len(posted.refused)}
    if FULL:
        keep("collector-load", "make load", {**figures, "seconds": round(time.monotonic() - began, 1)}, seed)
    show(f"collector: {count:,} reports, {clients} clients, {kills} kill -9, {posted.tries:,} posts, seed {seed}")


# Batches.


@pytest.fixture
def week(tmp_path: Path) -> Iterator[Path]:
    """Twelve reports over three days, the third of them twice."""
    midnight = samples.NOW - samples.NOW % DAY
    many = [samples.report(f"r{place}", promised=samples.terms(time=midnight - place % 3 * DAY)) for place in range(12)]
    path = tmp_path / "week.batch"
    with BatchWriter(path) as writer:
        for report in (*many, many[2]):
            writer.add(report)
    yield path


def test_a_batch_is_split_by_day_and_merged_again(week: Path, tmp_path: Path) -> None:
    days = batches.split(week, tmp_path / "days")
    assert [len(BatchReader(path)) for path in days] == [4, 4, 4]
    assert [path.stem for path in days] == sorted(path.stem for path in days)
    assert batches.merge([*days, week], tmp_path / "again.batch") == 12
    assert batches.check(tmp_path / "again.batch").reports == 12
    with raises(ErrorKind.FILE_EXISTS):
        batches.split(week, tmp_path / "days")
    with raises(ErrorKind.DUPLICATE):
        batches.check(week)


def test_a_batch_of_two_kinds_is_noticed_and_split(tmp_path: Path) -> None:
    path = tmp_path / "two.batch"
    with BatchWriter(path) as writer:
        writer.add(REPORT)
        writer.add(samples.report("dear", promised=samples.terms(unit="clubs")))
    with raises(ErrorKind.INCONSISTENT, TrefoilError):
        batches.check(path)
    assert [len(BatchReader(made)) for made in batches.split(path, tmp_path / "kinds", by_kind=True)] == [1, 1]


def test_the_smallest_epsilon_counts_them_all(tmp_path: Path) -> None:
    """A query counts reports that paid for its ε or more, as helpers do; `make_query` and the header's rule agree."""
    path = tmp_path / "mixed.batch"
    least = samples.TERMS.epsilon_micros
    amounts = [least, least + 1, least + 1, least + 7]
    with BatchWriter(path) as writer:
        for number, micros in enumerate(amounts):
            writer.add(samples.report(str(number), promised=samples.terms(epsilon_micros=micros)))
    summary = batches.check(path)
    assert [query.reports for query in summary.counted_by] == [4, 3, 1]
    kinds = [ReportKind.of(Header.decode(report.header)) for report in BatchReader(path)]
    for query in summary.counted_by:
        options = QueryOptions(kind=query.kind)
        asked = make_query(BatchReader(path), options, samples.HELPER_SET, samples.QUERIER, samples.NOW).query
        assert sum(kind.is_counted_by(asked) for kind in kinds) == query.reports
    done = CliRunner().invoke(cli.app, ["batch", "check", str(path)])
    assert done.exit_code == 0 and f"query --kind {summary.counted_by[1].kind} counts 3 of them" in done.output


def test_a_day_that_is_not_over_is_said_to_be_why_nothing_is_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "collected"
    with ReportStore(folder, LIMITS) as store:
        with raises(ErrorKind.TOO_FEW, TrefoilError):
            commands._export_days(folder, tmp_path / "days")
        store.add([(Header.decode(REPORT.header), REPORT)])
    made = Header.decode(REPORT.header).terms.time
    monkeypatch.setattr(commands, "_now", lambda: made + 60)
    with raises(ErrorKind.TOO_FEW, TrefoilError) as caught:
        commands._export_days(folder, tmp_path / "days")
    assert batches.date_of(made) in str(caught.value) and batches.date_of(made + DAY) in caught.value.hint
    assert not (tmp_path / "days").exists()
    monkeypatch.setattr(commands, "_now", lambda: made + 2 * DAY)
    assert len(commands._export_days(folder, tmp_path / "days")) == 1


def test_a_merge_that_fails_leaves_nothing(week: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.batch"
    with BatchWriter(other) as writer:
        writer.add(samples.report("wide", [0] * 32, samples.terms(buckets=32)))
    before = sorted(tmp_path.iterdir())
    with raises(ErrorKind.INCONSISTENT):
        batches.merge([week, other], tmp_path / "all.batch")
    assert sorted(tmp_path.iterdir()) == before


def test_a_full_disk_leaves_no_part_of_a_split(
    week: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    left = iter([True, False])

    def sync(_: int) -> None:
        if not next(left, False):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", sync)
    assert cli.run(["batch", "split", str(week), "--out", str(tmp_path / "days"), "--json", "-"]) == cli.Exit.MISTAKE
    told = json.loads(capsys.readouterr().out)["error"]
    assert told["kind"] == "no_space" and str(tmp_path / "days") in told["message"]
    assert not (tmp_path / "days").exists()


def test_a_name_may_be_as_long_as_the_file_system_allows(week: Path, tmp_path: Path) -> None:
    longest = tmp_path / ("n" * 255)
    assert batches.merge([week], longest) == 12
    longest.unlink()
    write_atomically(longest, b"{}")
    assert longest.read_bytes() == b"{}"


def test_the_commands(week: Path, tmp_path: Path) -> None:
    run = CliRunner()

    def json_of(*arguments: str) -> Any:  # Any: whatever JSON the command prints
        done = run.invoke(cli.app, [*arguments, "--json", "-"], catch_exceptions=False)
        assert done.exit_code == 0
        return json.loads(done.stdout)

    (listed,) = json_of("batch", "ls", str(week))
    assert (listed["reports"], listed["repeated"], listed["sites"]) == (13, 1, [SITE])
    made = json_of("batch", "split", str(week), "--out", str(tmp_path / "days"))
    assert len(made) == 3
    assert json_of("batch", "merge", *made, "--out", str(tmp_path / "m.batch")) == {
        "batch": str(tmp_path / "m.batch"),
        "reports": 12,
    }
    with ReportStore(tmp_path / "collected", LIMITS) as store:
        store.add([headed(report) for report in BatchReader(tmp_path / "m.batch")])
    assert "12 reports" in run.invoke(cli.app, ["batch", "check", str(tmp_path / "m.batch")]).stdout
    shelves = json_of("batch", "ls", str(tmp_path / "collected"))
    assert [row["reports"] for row in shelves] == [4, 4, 4]


def test_only_days_that_are_over_are_taken_from_a_collector(tmp_path: Path) -> None:
    midnight = samples.NOW - samples.NOW % DAY
    reports = [at(REPORT, midnight - day * DAY) for day in range(2)]
    with ReportStore(tmp_path, LIMITS) as store:
        store.add([headed(report) for report in reports])
    with StoreReader(tmp_path) as reader:
        over = batches.closed_shelves(reader.shelves(), batches.Every.DAY, midnight + HOUR)
        assert [start for _, start in over] == [midnight - DAY]
        (shelves,) = over.values()
        assert batches.export(reader, shelves, tmp_path / "day.batch") == 1
        assert len(batches.closed_shelves(reader.shelves(), batches.Every.DAY, midnight + DAY + HOUR)) == 2

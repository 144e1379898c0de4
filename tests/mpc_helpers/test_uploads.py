"""Uploads of columns: only under the querier's permit for this helper, each with a draft of its own, within bounds."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import aiohttp
import pytest

from mpc_helpers.admission.column import ColumnDraft
from mpc_helpers.identity.config import load_config
from mpc_helpers.local.launcher import Trio, launched, prepare
from mpc_helpers.service import storage
from mpc_helpers.service import storage as storing
from protocol.batch import BatchReader
from protocol.errors import ErrorKind, ProtocolError
from protocol.net.listening import ConnectionLimits
from protocol.querier.ask import Querier
from protocol.querier.failure import QueryFailed
from protocol.querier.saved_query import QueryOptions, SavedQuery, make_query
from protocol.query import PERMIT_HEADER, check_permit, make_permits
from protocol.shares import PARTIES
from tests.mpc_helpers.test_server import Reply, column, send, small_batch, talking_to, upload, url
from tests.support import protocol_samples as samples
from tests.support.raising import raises
from tests.support.three_helpers import SITE, ThreeHelpers, real_now, seal_all, terms, three_helpers, until, write_batch


class Pipe:
    """A body that goes on for as long as a test likes."""

    def __init__(self, first: bytes) -> None:
        self.rest: asyncio.Queue[bytes] = asyncio.Queue()
        self.rest.put_nowait(first)

    async def pieces(self) -> AsyncIterator[bytes]:
        while piece := await self.rest.get():
            yield piece

    def end_with(self, last: bytes) -> None:
        for piece in (last, b""):
            self.rest.put_nowait(piece)


def folder_of(trio: Trio, asked: SavedQuery) -> Path:
    return load_config(trio.config_path(0)).data / "queries" / asked.query.digest.hex()


def drafts(trio: Trio, asked: SavedQuery) -> list[str]:
    return sorted(path.name for path in folder_of(trio, asked).glob("column.*.part") if "digests" not in path.name)


@contextlib.asynccontextmanager
async def first_helper(
    folder: Path, *, limits: dict[str, int] | None = None, clock: Callable[[], int] = real_now
) -> AsyncIterator[tuple[ThreeHelpers, aiohttp.ClientSession]]:
    """One helper without its peers: no query is answered, and an uploaded column stays."""
    options = {"limits": limits or {}}
    async with three_helpers(folder, options=options, clock=clock, start=False) as three:
        await three.start(0)
        async with talking_to(three) as session:
            yield three, session


async def submitted(three: ThreeHelpers, session: aiohttp.ClientSession) -> tuple[SavedQuery, BatchReader]:
    batch = small_batch(three)
    asked = three.query(batch, QueryOptions(seconds=60))
    assert (await send(session, "PUT", url(asked.signed), asked.signed.encode()))[0] == 200
    return asked, batch


def beginning(
    session: aiohttp.ClientSession, asked: SavedQuery, batch: BatchReader, first: bytes
) -> tuple[Pipe, asyncio.Task[Reply]]:
    """An upload that has begun with some bytes."""
    pipe, size = Pipe(first), {"Content-Length": str(len(column(batch, 0)))}
    return pipe, asyncio.create_task(upload(session, asked, pipe.pieces(), 0, **size))


async def test_nobody_uploads_without_the_permit_for_this_helper(tmp_path: Path) -> None:
    """A malicious helper has the signed query and its own permit. It is refused before it has sent the column."""
    async with first_helper(tmp_path) as (three, session):
        asked, batch = await submitted(three, session)
        other = three.query(batch)
        for permit in ("", "nonsense", asked.permits[1].hex(), asked.permits[2].hex(), other.permits[0].hex()):
            pipe = Pipe(b"trefoil")
            headers = {PERMIT_HEADER: permit, "Content-Length": str(len(column(batch, 0)))}
            status, answer = await send(session, "PUT", url(asked.signed, "/column"), pipe.pieces(), headers)
            assert (status, answer["hint"] != "") == (403, True)
        assert drafts(three.trio, asked) == []
        assert (await upload(session, asked, column(batch, 0)))[0] == 200


async def test_an_upload_that_trickles_blocks_nobody(tmp_path: Path) -> None:
    async with first_helper(tmp_path) as (three, session):
        asked, batch = await submitted(three, session)
        right = column(batch, 0)
        _, slow = beginning(session, asked, batch, right[:7])
        await until(lambda: len(drafts(three.trio, asked)) == 1)
        async with asyncio.timeout(10):
            status, answer = await upload(session, asked, right)
            assert (status, answer["state"] != "awaiting") == (200, True)
            # The slower upload is stopped at once, and learns that the column is stored.
            assert (await slow)[0] == 200
        assert drafts(three.trio, asked) == []
        assert (folder_of(three.trio, asked) / "column").read_bytes() == right


async def test_garbage_that_comes_first_is_dropped_and_the_right_one_kept(tmp_path: Path) -> None:
    async with first_helper(tmp_path) as (three, session):
        asked, batch = await submitted(three, session)
        right = column(batch, 0)
        garbage = right[:-1] + bytes([right[-1] ^ 1])
        pipe, wrong = beginning(session, asked, batch, garbage[:-1])
        await until(lambda: len(drafts(three.trio, asked)) == 1)
        begun, good = beginning(session, asked, batch, right[:-1])
        await until(lambda: len(drafts(three.trio, asked)) == 2)
        pipe.end_with(garbage[-1:])
        assert (await wrong)[0] == 409
        begun.end_with(right[-1:])
        assert (await good)[0] == 200
        assert (folder_of(three.trio, asked) / "column").read_bytes() == right


async def test_of_two_right_ones_one_is_kept_and_both_are_thanked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kept once: a second that came after the answer would put a column on the disk that nobody removes."""
    kept: list[ColumnDraft] = []
    keep = ColumnDraft.keep

    def slowly(draft: ColumnDraft) -> None:
        kept.append(draft)
        time.sleep(0.3)
        keep(draft)

    monkeypatch.setattr(ColumnDraft, "keep", slowly)
    async with first_helper(tmp_path) as (three, session):
        asked, batch = await submitted(three, session)
        right = column(batch, 0)
        both = [beginning(session, asked, batch, right[:-1]) for _ in range(2)]
        await until(lambda: len(drafts(three.trio, asked)) == 2)
        for pipe, _ in both:
            pipe.end_with(right[-1:])
        assert [(await each)[0] for _, each in both] == [200, 200]
        assert len(kept) == 1
        names = sorted(path.name for path in folder_of(three.trio, asked).iterdir())
        assert names == ["column", "column.digests", "query"]


async def test_of_too_many_the_oldest_goes(tmp_path: Path) -> None:
    async with first_helper(tmp_path) as (three, session):
        asked, batch = await submitted(three, session)
        right, under_way = column(batch, 0), []
        for count in range(storage.DRAFTS_PER_QUERY):
            under_way.append(beginning(session, asked, batch, right[:7]))
            await until(lambda count=count: len(drafts(three.trio, asked)) == count + 1)  # type: ignore[misc]
        under_way.append(beginning(session, asked, batch, right[:-1]))
        status, answer = await under_way[0][1]
        assert (status, "newer upload" in answer["error"]) == (429, True)
        await until(lambda: len(drafts(three.trio, asked)) == storage.DRAFTS_PER_QUERY)
        assert len(three.daemons[0].queries.uploads) == storage.DRAFTS_PER_QUERY
        under_way[-1][0].end_with(right[-1:])
        assert (await under_way[-1][1])[0] == 200
        assert [(await task)[0] for _, task in under_way[1:-1]] == [200] * (storage.DRAFTS_PER_QUERY - 1)


async def test_a_site_has_so_many_bytes_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promised at submission, so that no column is refused after its upload; drafts count too."""
    monkeypatch.setattr(storing, "MEGABYTE", 1)
    async with first_helper(tmp_path, limits={"site_megabytes": 10_000, "spare_megabytes": 1}) as (three, session):
        asked, batch = await submitted(three, session)
        keeper = three.storage(0)
        size = keeper.used_bytes()
        assert size == len(column(batch, 0)) + 32 * len(batch)
        room = 10_000 // size
        for _ in range(room - 1):
            await submitted(three, session)
        more = three.query(batch)
        status, answer = await send(session, "PUT", url(more.signed), more.signed.encode())
        assert (status, "raise site_megabytes" in answer["hint"]) == (429, True)
        # A second draft would be over the limit: the first goes for it.
        _, first = beginning(session, asked, batch, b"trefoil")
        await until(lambda: len(drafts(three.trio, asked)) == 1)
        assert (await upload(session, asked, column(batch, 0)))[0] == 200
        assert (await first)[0] == 429
        assert keeper.used_bytes() == room * size
        large = three.query(small_batch(three, 1 + 10_000 * len(batch) // size))
        status, answer = await send(session, "PUT", url(large.signed), large.signed.encode())
        assert (status, "smaller batches" in answer["hint"]) == (422, True)


async def test_the_column_of_a_failed_query_goes_when_its_site_needs_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storing, "MEGABYTE", 1)
    options = {"limits": {"site_megabytes": 3_000, "spare_megabytes": 1}}
    async with three_helpers(tmp_path, options=options) as three:
        batch = small_batch(three)
        await three.ask(three.query(batch), batch)
        failed = three.query(batch)
        with raises(ErrorKind.ALREADY_COUNTED, QueryFailed):
            await three.ask(failed, batch)
        kept = folder_of(three.trio, failed) / "column"
        assert kept.exists()
        again = small_batch(three)
        assert (await three.ask(three.query(again), again)).answer.counted == 5
        assert not kept.exists()
        # Asked once more, it takes its column once more.
        with raises(ErrorKind.ALREADY_COUNTED, QueryFailed):
            await three.ask(failed, batch)


async def test_a_query_is_refused_before_the_disk_is_full(tmp_path: Path) -> None:
    async with first_helper(tmp_path) as (three, session):
        keeper = three.storage(0)
        spare = 256 * storing.MEGABYTE
        keeper._free = lambda _folder: spare
        assert not keeper.nearly_full
        asked = three.query(small_batch(three))
        status, answer = await send(session, "PUT", url(asked.signed), asked.signed.encode())
        assert (status, "256 MB left" in answer["error"]) == (507, True)
        keeper._free = lambda _folder: spare - 1
        assert keeper.nearly_full


async def test_no_column_takes_the_space_of_the_ledger(tmp_path: Path) -> None:
    """Others may have filled the disk between a query's submission and its upload."""
    async with first_helper(tmp_path) as (three, session):
        asked, batch = await submitted(three, session)
        keeper = three.storage(0)
        free, keeper._free = keeper._free, lambda _folder: 256 * storing.MEGABYTE - 1
        assert (await upload(session, asked, column(batch, 0)))[0] == 507
        assert drafts(three.trio, asked) == []
        keeper._free = free
        assert (await upload(session, asked, column(batch, 0)))[0] == 200


def test_a_helper_that_dies_in_the_middle_of_uploads_starts_with_none(tmp_path: Path) -> None:
    """Real processes: killed with two drafts on its disk. The query awaits its column again, and is answered."""
    trio = prepare(tmp_path / "trio", now=real_now(), options={"processes": 0, "unchecked_histograms": True})
    batch = write_batch(tmp_path / "batch", seal_all([[1, 0]] * 4, terms(2), trio.helper_set))

    async def begin(asked: SavedQuery, kill: Callable[[], None]) -> None:
        helper = trio.helper_set.helpers[0]
        connector = aiohttp.TCPConnector(ssl=aiohttp.Fingerprint(helper.tls_pin))
        async with aiohttp.ClientSession(helper.address, connector=connector) as session:
            await send(session, "PUT", url(asked.signed), asked.signed.encode())
            tasks = [beginning(session, asked, batch, column(batch, 0)[:-1])[1] for _ in range(2)]
            await until(lambda: len(drafts(trio, asked)) == 2)
            kill()
            assert all(
                isinstance(end, aiohttp.ClientError) for end in await asyncio.gather(*tasks, return_exceptions=True)
            )

    with launched(trio) as running:
        key = running.site_key(SITE)
        asked = make_query(batch, QueryOptions(seconds=60), trio.helper_set, key, real_now())
        asyncio.run(begin(asked, running.helpers[0].kill))
        assert len(drafts(trio, asked)) == 2
        running.restart(0)
        assert drafts(trio, asked) == []
        assert asyncio.run(Querier(trio.helper_set).ask(asked, batch)).answer.counted == 4


def test_a_permit_is_for_one_query_one_helper_and_one_key() -> None:
    query, other = samples.query(), samples.query(query_id=bytes(16))
    permits = make_permits(query, samples.QUERIER)
    assert len(set(permits)) == PARTIES
    for party, permit in enumerate(permits):
        check_permit(query, party, permit, samples.QUERIER.public)
        for wrong in ((query, (party + 1) % PARTIES), (other, party)):
            with raises(ErrorKind.BAD_SIGNATURE, ProtocolError):
                check_permit(*wrong, permit, samples.QUERIER.public)
        with raises(ErrorKind.BAD_SIGNATURE, ProtocolError):
            check_permit(query, party, permit, samples.IDENTITIES[0].public)


def test_permits_are_saved_with_the_query_and_shown_to_nobody(tmp_path: Path) -> None:
    helper_set, key = samples.HELPER_SET, samples.QUERIER
    batch = write_batch(tmp_path / "batch", [samples.report("one", [1] * 8)])
    made = make_query(batch, QueryOptions(), helper_set, key, samples.NOW)
    made.save(tmp_path / "query")
    assert SavedQuery.load(tmp_path / "query") == made
    assert made.permits[0].hex() not in repr(made) and repr(made.permits[0]) not in repr(made)


def test_bytes_move_the_limit_of_an_upload_at_the_least_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never to more than a minute ahead, not for each piece, and never past the query's deadline."""
    moved: list[float] = []
    limited = storage._Upload(1000.0, cast(asyncio.Timeout, SimpleNamespace(reschedule=moved.append)))
    second = storage.LEAST_RATE
    for now, size in ((0.0, 0), (0.1, second), (50.0, 20 * second), (70.0, 1), (71.0, 2**30), (990.0, 2**30)):
        loop = SimpleNamespace(time=lambda now=now: now)
        monkeypatch.setattr(storage, "asyncio", SimpleNamespace(get_running_loop=lambda loop=loop: loop))
        limited.received(size)
    assert moved == [60.0, 80.1, 80.1 + 1 / second, 131.0, 1000.0]


async def test_an_upload_below_the_least_rate_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One byte now and then used to keep a place until the query's deadline."""
    monkeypatch.setattr(storage, "IDLE_SECONDS", 0.5)
    async with first_helper(tmp_path) as (three, session):
        asked, batch = await submitted(three, session)
        pipe, task = beginning(session, asked, batch, b"trefoil")
        async with asyncio.timeout(20):
            while not task.done():
                pipe.rest.put_nowait(b"x")
                await asyncio.sleep(0.05)
        status, answer = await task
        assert (status, "bytes a second" in answer["error"]) == (410, True)
        assert drafts(three.trio, asked) == []


async def test_a_site_has_so_many_uploads_and_no_more(tmp_path: Path) -> None:
    """A retry of a query that has one takes its place; another query waits for one of them to end."""
    async with first_helper(tmp_path, limits={"uploads_per_site": 2}) as (three, session):
        queries = [await submitted(three, session) for _ in range(3)]
        (first, batch), second, third = queries
        _, hung = beginning(session, first, batch, b"trefoil")
        await until(lambda: len(drafts(three.trio, first)) == 1)
        _, other = beginning(session, *second, b"trefoil")
        await until(lambda: len(drafts(three.trio, second[0])) == 1)
        status, answer = await upload(session, third[0], column(third[1], 0))
        assert (status, "uploads_per_site" in answer["hint"]) == (429, True)
        assert (await upload(session, first, column(batch, 0)))[0] == 200
        assert (await hung)[0] == 429
        assert (await upload(session, third[0], column(third[1], 0)))[0] == 200
        assert not other.done()
        other.cancel()
        # Inside the block: a helper that stops while its client is gone must not be left to the loop's own end.
        await asyncio.wait({other}, timeout=10)


OTHER = "other.example"
QUERIES, UPLOADS = 64, 4


@contextlib.asynccontextmanager
async def slowloris(three: ThreeHelpers) -> AsyncIterator[list[asyncio.Task[Reply]]]:
    """Upload to helper 1, for all queries that the site may have waiting, four columns that never end."""
    pin = aiohttp.Fingerprint(three.helper_set.helpers[0].tls_pin)
    many = aiohttp.TCPConnector(ssl=pin, limit=0)
    async with aiohttp.ClientSession(three.helper_set.helpers[0].address, connector=many) as session:
        batch = small_batch(three)
        tasks = []
        for _ in range(QUERIES):
            asked = three.query(batch, QueryOptions(seconds=600))
            assert (await send(session, "PUT", url(asked.signed), asked.signed.encode()))[0] == 200
            tasks += [beginning(session, asked, batch, b"t")[1] for _ in range(UPLOADS)]
            await asyncio.sleep(0.05)
        try:
            yield tasks
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def test_slowloris_uploads_of_one_site_shut_nobody_out(tmp_path: Path, show: Callable[[str], None]) -> None:
    """As many as one site can make: another site's query, a health page and a restarted peer are served."""
    sites, clock, took = {SITE: [SITE], OTHER: [OTHER]}, time.monotonic, []
    async with three_helpers(tmp_path, sites=sites) as three, asyncio.timeout(120), slowloris(three) as tasks:
        took.append(clock())
        async with talking_to(three) as session:
            assert (await send(session, "GET", "/healthz"))[0] == 200
        took.append(clock())
        await three.stop(1)
        await three.start(1)
        took.append(clock())
        await until(lambda: three.daemons[1].health.ready and three.daemons[0].health.ready)
        took.append(clock())
        batch = three.batch(three.seal([[1, 0]] * 4, terms(2, site=OTHER, caller=OTHER)))
        assert (await three.ask(three.query(batch, site=OTHER), batch)).answer.counted == 4
        took.append(clock())
        # It has a quarter of all connections; its other uploads were told to retry later.
        assert len(three.daemons[0].queries.uploads) <= ConnectionLimits.of_this_process().share
        assert {task.result()[0] for task in tasks if task.done()} <= {410, 429}
    health, _, ready, query = (later - earlier for earlier, later in itertools.pairwise(took))
    show(f"beside {len(tasks)} uploads: health {health:.2f} s, restarted peer {ready:.2f} s, query {query:.2f} s")

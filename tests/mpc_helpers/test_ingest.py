"""A column as it arrives, and as it is admitted: chunk by chunk, on any executor, with the same result."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mpc_helpers.admission import ingest as aggregation
from mpc_helpers.admission.chunk import ChunkJob, ingest_chunk
from mpc_helpers.admission.column import (
    ColumnDraft,
    StoredDigests,
    digests_of,
    digests_path,
    duplicates,
    remove_column,
)
from mpc_helpers.admission.executors import ReportExecutor
from mpc_helpers.admission.ingest import Admission, chunk_length, ingest
from mpc_helpers.agreement.messages import Propose, pack_mask, pack_rejections
from mpc_helpers.agreement.negotiation import AdmittedBatch, AttemptTerms, Negotiation, Selected
from mpc_helpers.ledger.attempt import QueryName
from mpc_helpers.ledger.engine import LedgerOwner
from mpc_helpers.ledger.ledger import ReportLedger
from protocol.batch import BatchReader, ColumnReader, batch_root
from protocol.errors import ErrorKind, ProtocolError, Rejection, TrefoilError
from protocol.query import Query
from protocol.report import SealedReport
from protocol.shape import Shape
from protocol.shares import PARTIES, open_shamir
from tests.support import protocol_samples as samples
from tests.support.processes import holds
from tests.support.raising import raises

# A column and its digests on disk.


REPORTS = [samples.report(f"column {index}", [index] * 8) for index in range(11)]


@pytest.fixture(scope="module")
def column(tmp_path_factory: pytest.TempPathFactory) -> ColumnReader:
    return ColumnReader(samples.write_columns(tmp_path_factory.mktemp("cut"), REPORTS)[1])


def signed_hash(data: bytes, column: ColumnReader, root: bytes) -> bytes:
    """Return the hash of SPEC §4, from a column's bytes."""
    payloads = b"".join(column.chunk(0, len(column)).payloads())
    return hashlib.sha256(b"trefoil/1 column\0" + data[:32] + payloads + root).digest()


def upload(column: ColumnReader, to: Path, pieces: list[bytes], root: bytes | None = None) -> bool:
    with ColumnDraft(to, column.layout, len(column)) as draft:
        for piece in pieces:
            draft.add(piece)
        signed = batch_root(column.digests()) if root is None else root
        right = draft.finish(signed, signed_hash(column.path.read_bytes(), column, signed))
        if right:
            draft.keep()
        return right


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(cuts=st.lists(st.integers(0, 2**14), max_size=12))
def test_pieces_of_any_size_make_the_same_column(column: ColumnReader, tmp_path: Path, cuts: list[int]) -> None:
    data = column.path.read_bytes()
    places = [0, *sorted(cut % len(data) for cut in cuts), len(data)]
    stored = tmp_path / "column"
    assert upload(column, stored, [data[a:b] for a, b in itertools.pairwise(places)])
    assert stored.read_bytes() == data
    assert digests_path(stored).read_bytes() == column.digests().tobytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["column", "column.digests"]
    remove_column(stored)
    assert list(tmp_path.iterdir()) == []


def test_a_column_that_arrives_byte_by_byte(column: ColumnReader, tmp_path: Path) -> None:
    data = column.path.read_bytes()
    assert upload(column, tmp_path / "column", [data[at : at + 1] for at in range(len(data))])


def test_nothing_is_left_of_a_column_of_another_batch(column: ColumnReader, tmp_path: Path) -> None:
    data = column.path.read_bytes()
    assert not upload(column, tmp_path / "column", [data], bytes(32))
    for place in (32 + 150, len(data) - 1):  # in the first header, and in the last payload
        flipped = bytearray(data)
        flipped[place] ^= 1
        assert not upload(column, tmp_path / "column", [bytes(flipped)])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("damage", "kind"),
    [
        (lambda data: data[:-1], ErrorKind.TRUNCATED),
        (lambda data: data[:20], ErrorKind.TRUNCATED),
        (lambda data: b"", ErrorKind.TRUNCATED),
        (lambda data: data + b"x", ErrorKind.TOO_LARGE),
        (lambda data: b"x" + data[1:], ErrorKind.WRONG_FILE),
        (lambda data: data[:19] + bytes([data[19] + 1]) + data[20:], ErrorKind.INCONSISTENT),
    ],
)
def test_what_is_no_column_of_the_query_is_refused_with_a_reason(
    column: ColumnReader, tmp_path: Path, damage: object, kind: ErrorKind
) -> None:
    assert callable(damage)
    with raises(kind, ProtocolError):
        upload(column, tmp_path / "column", [damage(column.path.read_bytes())])
    assert list(tmp_path.iterdir()) == []


def kept(column: ColumnReader, folder: Path) -> ColumnReader:
    assert upload(column, folder / "column", [column.path.read_bytes()])
    return ColumnReader(folder / "column")


@pytest.mark.parametrize("trouble", ["lost", "cut short", "changed"])
def test_digests_that_do_not_have_the_signed_root_are_made_again(
    column: ColumnReader, tmp_path: Path, trouble: str
) -> None:
    """A digest that is off by a bit would let its report be spent twice."""
    stored = kept(column, tmp_path)
    path = digests_path(stored.path)
    good = path.read_bytes()
    if trouble == "lost":
        path.unlink()
    else:
        path.write_bytes(good[:-32] if trouble == "cut short" else bytes([good[0] ^ 1]) + good[1:])
    digests = digests_of(stored, batch_root(column.digests()))
    assert digests[:].tobytes() == good == path.read_bytes()


def test_a_disk_that_is_full_when_digests_are_made_again_is_an_error_to_act_on(
    column: ColumnReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = kept(column, tmp_path)
    digests_path(stored.path).unlink()

    def full(_: ColumnReader) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ColumnReader, "digest_spans", full)
    with raises(ErrorKind.FILE_UNWRITABLE, TrefoilError):
        digests_of(stored, bytes(32))
    assert [path.name for path in tmp_path.iterdir()] == ["column"]


def test_a_column_that_changed_on_disk_is_not_admitted(column: ColumnReader, tmp_path: Path) -> None:
    stored = kept(column, tmp_path)
    with raises(ErrorKind.WRONG_FILE, ProtocolError):
        digests_of(stored, bytes(32))
    assert not list(tmp_path.glob("*.part"))


def test_slices_of_stored_digests_are_those_of_the_array(column: ColumnReader, tmp_path: Path) -> None:
    kept(column, tmp_path)
    stored, array = StoredDigests(tmp_path / "column.digests"), column.digests()
    assert len(stored) == len(array)
    for span in (slice(None), slice(0, 0), slice(3, 7), slice(10, 99), slice(5, 2), slice(-3, None)):
        assert np.array_equal(stored[span], array[span])
        chosen = np.arange(len(array)) % 3 == 1
        assert np.array_equal(Selected(stored, chosen)[span], array[chosen][span])
        assert np.array_equal(Selected(stored, np.zeros(len(array), dtype=np.bool_))[span], array[:0])


@pytest.mark.parametrize("chosen", ["all", "most"])
def test_nowhere_from_lookup_to_reservation_are_all_digests_in_memory(tmp_path: Path, chosen: str) -> None:
    """Traced: what Python and numpy allocate. One copy of the digests would show, and so would a list of them.

    Slices of them take memory for a fixed number of reports, which is a fraction of these.
    """
    count = 400_000
    path = tmp_path / "column.digests"
    rows = np.zeros((count, 4), dtype=">u8")
    rows[:, 0] = np.arange(count)
    path.write_bytes(rows.tobytes())
    stored = StoredDigests(path)
    accepted = np.ones(count, dtype=np.bool_)
    accepted[7::50] = chosen == "all"
    owner = LedgerOwner(0, bytes(32))
    ReportLedger.create(tmp_path / "ledger", owner)
    ledger = ReportLedger(tmp_path / "ledger", owner)
    hours, debug = np.ones(count, dtype=np.uint32), np.zeros(count, dtype=np.bool_)
    batch = AdmittedBatch(bytes(32), stored, hours, debug, accepted, {}, site="")
    negotiation = Negotiation(0, AttemptTerms(QueryName(b"k" * 32, bytes(32)), False, bytes(32)), batch)
    rejections = pack_rejections({Rejection.EXPIRED: int(np.count_nonzero(~accepted))})
    proposal = Propose(negotiation.query, bytes(32), bytes(32), 1, bytes(32), count, pack_mask(accepted), rejections)
    negotiation.own, negotiation.proposals = proposal, dict.fromkeys(range(3), proposal)
    tracemalloc.start()
    try:
        assert not ledger.reports.lookup(stored, hours, b"z" * 32, site="").any()
        reservation = negotiation.reservation()
        ledger.moves.reserve(reservation)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert np.count_nonzero(ledger.reports.lookup(stored, hours, b"z" * 32, site="")) == np.count_nonzero(accepted)
    ledger.close()
    assert peak < 32 * count, f"{peak / count:.0f} bytes per report"


def rows(*values: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.array([[0] * 24 + list(value.to_bytes(8, "big")) for value in values], dtype=np.uint8)


def test_repeats_are_all_but_the_first() -> None:
    assert duplicates(rows(1, 2, 2, 2, 3, 3)).tolist() == [False, False, True, True, False, True]
    assert duplicates(rows(5)).tolist() == [False]
    assert duplicates(rows()[:0].reshape(0, 32)).tolist() == []


@pytest.mark.parametrize(("values", "at"), [((2, 1), 2), ((1, 2, 3, 2), 4), ((256, 255), 2), ((2**63, 1), 2)])
def test_a_column_out_of_order_is_refused_at_its_place(values: tuple[int, ...], at: int) -> None:
    with raises(ErrorKind.INCONSISTENT, ProtocolError) as caught:
        duplicates(rows(*values))
    assert f"report {at} " in str(caught.value)


# Admitting it.


HISTOGRAMS = [[index, 1, -index, 2**40, 0, 7 * index, index % 3, 1] for index in range(40)]


@pytest.fixture(scope="module")
def reports() -> list[SealedReport]:
    return [samples.report(f"sum {index}", values) for index, values in enumerate(HISTOGRAMS)]


@pytest.fixture(scope="module")
def columns(reports: list[SealedReport], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return samples.write_columns(tmp_path_factory.mktemp("columns"), reports)


@pytest.fixture(scope="module")
def query(reports: list[SealedReport]) -> Query:
    return samples.query_for(reports)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Seven reports to a chunk, so that forty make six."""
    monkeypatch.setattr(aggregation, "chunk_length", lambda *_: 7)
    yield


def plain_sum(histograms: list[list[int]]) -> list[int]:
    """The clear twin."""
    return [sum(column) for column in zip(*histograms, strict=True)]


def test_the_helpers_hold_the_plaintext_sum(columns: list[Path], query: Query) -> None:
    ingested = samples.ingest_columns(columns, query)
    assert [one.rejections() for one in ingested] == [{}, {}, {}]
    assert samples.opened_sum(ingested) == plain_sum(HISTOGRAMS)


@pytest.mark.usefixtures("small_chunks")
def test_cutting_into_chunks_changes_nothing(columns: list[Path], query: Query) -> None:
    assert samples.opened_sum(samples.ingest_columns(columns, query)) == plain_sum(HISTOGRAMS)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("shared_disk", [True, False])
def test_threads_finishing_in_any_order_change_nothing(columns: list[Path], query: Query, shared_disk: bool) -> None:
    done: list[int] = []
    with ThreadPoolExecutor(3) as pool:
        ingested = [
            ingest(
                ColumnReader(path),
                ColumnReader(path).digests(),
                samples.rules(party, query),
                ReportExecutor(pool, 3, shared_disk=shared_disk),
                done.append,
            )
            for party, path in enumerate(columns)
        ]
    assert samples.opened_sum(ingested) == plain_sum(HISTOGRAMS)
    assert sum(done) == PARTIES * len(HISTOGRAMS)


def test_worker_processes_give_the_same(columns: list[Path], query: Query) -> None:
    """What travels to a worker and back is plain data."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        rules = samples.rules(1, query)
        column = ColumnReader(columns[1])
        there = ingest(column, column.digests(), rules, ReportExecutor(pool))
    here = samples.ingest_columns(columns, query)[1]
    assert (there.reasons == here.reasons).all()
    assert all((there.total(there.admitted)[index] == here.total(here.admitted)[index]).all() for index in (1, 2))


def test_a_process_that_opened_reports_keeps_no_key(columns: list[Path], query: Query) -> None:
    """A destroyed key must not live on in the pool's processes, which live as long as the daemon."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        rules, column = samples.rules(1, query), ColumnReader(columns[1])
        assert not ingest(column, column.digests(), rules, ReportExecutor(pool)).rejections()
        assert [pool.submit(holds, key.private[::-1]).result(60) for key in rules.keys] == [False] * len(rules.keys)


def test_a_key_is_looked_up_by_its_set_too(columns: list[Path], query: Query) -> None:
    """Two sets may name one id; only the key of the report's own set opens it."""
    column, rules = ColumnReader(columns[1]), samples.rules(1, query)
    other = [replace(key, helper_set=bytes(32), private=samples.hpke_key("other").raw) for key in rules.keys]
    for keys in ((*rules.keys, *other), (*other, *rules.keys)):
        result = ingest(column, column.digests(), replace(rules, keys=keys), samples.INLINE)
        assert result.rejections() == {}


def test_a_job_done_twice_gives_the_same(columns: list[Path], query: Query) -> None:
    column = ColumnReader(columns[2])
    job = ChunkJob(samples.rules(2, query), column.layout, 3, np.zeros(9, dtype=np.bool_), columns[2])
    first, second = ingest_chunk(job), ingest_chunk(job)
    assert first.hours.tobytes() == second.hours.tobytes()
    assert all((one == two).all() for one, two in zip(first.sums, second.sums, strict=True))


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("left_out", [[], [0], [39], [0, 6, 7, 13, 39], list(range(39)), list(range(40))])
def test_leaving_reports_out_after_agreement(
    columns: list[Path], query: Query, reports: list[SealedReport], left_out: list[int]
) -> None:
    """The others' refusals are taken out of the sums, exactly."""
    ingested = samples.ingest_columns(columns, query)
    accepted = np.ones(len(reports), dtype=np.bool_)
    accepted[left_out] = False
    order = np.argsort([report.digest for report in reports])
    expected = plain_sum([HISTOGRAMS[index] for index in order[accepted]] or [[0] * 8])
    shares = [one.shamir_share(accepted) for one in ingested]
    assert open_shamir(shares) == expected


def test_a_report_never_admitted_cannot_be_accepted(columns: list[Path], query: Query) -> None:
    stricter = replace(query, epsilon_micros=2_000_000)
    ingested = samples.ingest_columns(columns, stricter)[0]
    assert ingested.rejections() == {Rejection.NOISE_TOO_SMALL: 40}
    assert ingested.total(ingested.admitted)[0].tolist() == [0] * 8
    with raises(ErrorKind.INCONSISTENT, ProtocolError):
        ingested.total(np.ones(40, dtype=np.bool_))


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("copies", [2, 3, 9])
def test_repeats_count_once_even_across_chunks(tmp_path: Path, copies: int) -> None:
    """Every report has its own bucket, so that a 2 proves a replay. Nine copies straddle chunks of seven."""
    once = [samples.report(f"own {index}", [int(index == bucket) for bucket in range(8)]) for index in range(8)]
    many = [*once, *[once[3]] * (copies - 1), once[7]]
    ingested = samples.ingest_columns(samples.write_columns(tmp_path, many), samples.query_for(many))
    assert [one.rejections() for one in ingested] == [{Rejection.DUPLICATE: copies}] * PARTIES
    assert samples.opened_sum(ingested) == [1] * 8


def test_bad_reports_of_every_kind_at_once_cost_only_themselves(tmp_path: Path) -> None:
    good = [samples.report(f"good {index}", [1] * 8) for index in range(6)]
    first, second, third = good[0].payloads
    bad = [
        replace(samples.report("b1"), body=bytes(64)),
        replace(samples.report("b2"), payloads=(first, second, third)),
        samples.report("b3", None, samples.terms(debug=True)),
        replace(samples.report("b4"), header=b"\xff" * 273),
        replace(samples.report("b5"), header=bytes(273)),
    ]
    reports = [*good, *bad]
    ingested = samples.ingest_columns(samples.write_columns(tmp_path, reports), samples.query_for(reports))
    assert samples.opened_sum(ingested) == [6] * 8
    common = {Rejection.UNOPENABLE: 1, Rejection.WRONG_MODE: 1, Rejection.UNKNOWN_VERSION: 2}
    assert ingested[0].rejections() == common
    assert ingested[1].rejections() == ingested[2].rejections() == {**common, Rejection.WRONG_BODY: 1}


def test_a_side_query_is_summed_with_the_rest(tmp_path: Path) -> None:
    terms = samples.terms(kappa=10)
    reports = [samples.report(f"side {index}", [*[index] * 8, 10], terms) for index in range(3)]
    ingested = samples.ingest_columns(samples.write_columns(tmp_path, reports), samples.query_for(reports, kappa=10))
    assert samples.opened_sum(ingested) == [3] * 8 + [30]


def test_a_column_of_another_batch_is_refused(columns: list[Path], query: Query) -> None:
    for party, path in ((0, columns[1]), (1, columns[0])):
        column = ColumnReader(path)
        with raises(ErrorKind.INCONSISTENT, ProtocolError):
            ingest(column, column.digests(), samples.rules(party, query), samples.INLINE)
    with raises(ErrorKind.INCONSISTENT, ProtocolError) as caught:
        samples.ingest_columns(columns, replace(query, batch_size=41))
    assert "41" in str(caught.value)


@pytest.mark.usefixtures("small_chunks")
def test_order_is_checked_between_chunks_too(tmp_path: Path, reports: list[SealedReport], query: Query) -> None:
    batch = BatchReader(samples.write_batch(tmp_path / "batch", reports))
    order = batch.order()
    path = tmp_path / "column"
    with path.open("wb") as file:
        file.writelines(batch.column(0, np.concatenate([order[7:14], order[:7], order[14:]])))
    with raises(ErrorKind.INCONSISTENT, ProtocolError) as caught:
        samples.ingest_columns([path], query)
    assert "report 8 " in str(caught.value)


def test_chunks_are_bounded_in_bytes_and_number(columns: list[Path]) -> None:
    layout = ColumnReader(columns[1]).layout
    plain = Shape(8)
    assert chunk_length(layout, plain) == 2048
    assert chunk_length(replace(layout, body=8 * 1024), plain) * replace(layout, body=8 * 1024).record <= 2**22
    assert chunk_length(replace(layout, body=8 * 2**16), plain) == 64
    checked = Shape(1024, 0, 2**20, 1)
    assert chunk_length(replace(layout, body=0), checked) * 8 * checked.expanded <= 2**22
    assert chunk_length(replace(layout, body=0), checked) % 64 == 0


async def test_a_site_whose_queries_queue_up_leaves_a_turn_to_others() -> None:
    admission = Admission(cast(Any, None), cast(Any, None), lifetime=1, running=3, watermark=lambda: 0)
    at_work: list[str] = []

    async def one(site: str) -> None:
        async with admission.turn(site):
            at_work.append(site)
            await asyncio.Event().wait()

    tasks = [asyncio.create_task(one(site)) for site in ["busy.example"] * 9 + ["other.example"] * 2]
    for _ in range(5):
        await asyncio.sleep(0)
    assert at_work == ["busy.example"] * 2 + ["other.example"]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def test_secrets_do_not_show(columns: list[Path], query: Query) -> None:
    ingested = samples.ingest_columns(columns, query)[0]
    assert "_sums" not in repr(ingested)
    job = ChunkJob(ingested.rules, ingested.column.layout, 0, np.zeros(1, dtype=np.bool_), b"secret payload")
    assert "secret payload" not in repr(job)

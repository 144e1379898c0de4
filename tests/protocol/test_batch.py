"""Batch files: damage named by record, truncated records removed, columns that hold what each helper needs only.

A malicious device in a batch chooses neither ε nor shape of the query, and its record costs only itself.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from protocol.batch import (
    BatchReader,
    BatchWriter,
    ColumnChunk,
    ColumnReader,
    batch_root,
    column_layout,
    sorted_order,
)
from protocol.cli import app as cli
from protocol.collector import batches
from protocol.collector.limits import ReportKind
from protocol.errors import ErrorKind, ProtocolError, TrefoilError
from protocol.header import Header
from protocol.querier.ask import Querier
from protocol.querier.query_folder import QueryFolder, ask_batch
from protocol.querier.saved_query import QueryOptions, SavedQuery, kind_to_query, make_query, spans_of
from protocol.report import SealedReport
from protocol.shares import PARTIES
from protocol.units import DAY, HOUR
from tests.support import protocol_samples as samples
from tests.support.raising import raises
from tests.support.three_helpers import real_now, terms, three_helpers

REPORTS = [samples.report(f"batch {index}", [index] * 8) for index in range(7)]
PREAMBLE = 32


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return samples.write_batch(tmp_path / "reports", REPORTS)


def test_reports_come_back_as_they_went_in(path: Path) -> None:
    batch = BatchReader(path)
    assert len(batch) == 7
    assert list(batch) == REPORTS
    assert [digest.tobytes() for digest in batch.digests()] == [report.digest for report in REPORTS]
    batch.check()


def test_a_second_writer_appends(path: Path) -> None:
    more = samples.report("more")
    samples.write_batch(path, [more])
    assert list(BatchReader(path)) == [*REPORTS, more]


def test_an_empty_batch_is_none(tmp_path: Path) -> None:
    samples.write_batch(tmp_path / "empty", [])
    with raises(ErrorKind.TRUNCATED, ProtocolError):
        BatchReader(tmp_path / "empty")


@pytest.mark.parametrize("number", [1, 4, 7])
@pytest.mark.parametrize("at", [0, 300, -1])
def test_a_damaged_record_is_named_by_its_number(path: Path, number: int, at: int) -> None:
    size = BatchReader(path).layout.record
    data = bytearray(path.read_bytes())
    data[PREAMBLE + (number - 1) * size + at % size] ^= 1
    path.write_bytes(bytes(data))
    batch = BatchReader(path)
    with raises(ErrorKind.FILE_DAMAGED, ProtocolError):
        batch.check()
    good = [index for index in range(7) if index != number - 1]
    assert [batch[index] for index in good] == [REPORTS[index] for index in good]


def test_a_file_cut_short_is_named_by_the_record_it_was_cut_in(path: Path) -> None:
    data, size = path.read_bytes(), BatchReader(path).layout.record
    for rest in (1, size // 2, size - 1):
        path.write_bytes(data[: PREAMBLE + 3 * size + rest])
        with raises(ErrorKind.TRUNCATED, ProtocolError):
            BatchReader(path)


def test_a_writer_after_a_crash_removes_the_stump(path: Path) -> None:
    data, size = path.read_bytes(), BatchReader(path).layout.record
    for rest in (1, size // 2, size - 1):
        path.write_bytes(data[: PREAMBLE + 3 * size + rest])
        samples.write_batch(path, [REPORTS[6]])
        assert list(BatchReader(path)) == [*REPORTS[:3], REPORTS[6]]


@pytest.mark.parametrize("left", range(PREAMBLE))
def test_a_writer_after_a_crash_in_the_preamble_begins_anew(path: Path, left: int) -> None:
    path.write_bytes(path.read_bytes()[:left])
    samples.write_batch(path, REPORTS[:2])
    assert list(BatchReader(path)) == REPORTS[:2]


@pytest.mark.parametrize("content", [b"x", b"my notes", b"trefoil batch 1", b"no batch, and long enough for one"])
def test_a_file_that_is_something_else_is_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "notes"
    path.write_bytes(content)
    kind = ErrorKind.TRUNCATED if len(content) < PREAMBLE else ErrorKind.WRONG_FILE
    with raises(kind, ProtocolError):
        BatchWriter(path)
    assert path.read_bytes() == content
    with raises(kind, ProtocolError):
        BatchReader(path)


def test_a_report_of_another_shape_is_refused_and_nothing_written(path: Path) -> None:
    before = path.read_bytes()
    wrong: list[tuple[SealedReport, type[TrefoilError]]] = [
        (samples.report("wide", None, samples.terms(buckets=9)), TrefoilError),
        (samples.report("unit", None, samples.terms(unit="eurocents")), TrefoilError),
        (replace(REPORTS[0], payloads=(b"", b"", b"")), ProtocolError),
        (replace(REPORTS[0], body=REPORTS[0].body[:-1]), ProtocolError),
        (replace(REPORTS[0], header=b""), ProtocolError),
        (replace(REPORTS[0], header=bytes(2049)), ProtocolError),
    ]
    with BatchWriter(path) as writer:
        for report, error in wrong:
            with pytest.raises(error):
                writer.add(report)
    assert path.read_bytes() == before


def test_a_wrong_first_report_leaves_an_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "new"
    with BatchWriter(path) as writer, pytest.raises(ProtocolError):
        writer.add(replace(REPORTS[0], payloads=(b"", b"", b"")))
    assert path.read_bytes() == b""


def test_two_writers_do_not_share_a_file(path: Path) -> None:
    with path.open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with raises(ErrorKind.BUSY, TrefoilError):
            BatchWriter(path)
    samples.write_batch(path, [samples.report("after")])
    assert len(BatchReader(path)) == 8


def test_files_that_cannot_be_opened_say_so(tmp_path: Path) -> None:
    with raises(ErrorKind.FILE_UNREADABLE, TrefoilError):
        BatchReader(tmp_path / "absent")
    with raises(ErrorKind.FILE_UNWRITABLE, TrefoilError):
        BatchWriter(tmp_path / "absent" / "batch")


def test_columns_hold_each_helpers_parts_in_order(tmp_path: Path) -> None:
    paths = samples.write_columns(tmp_path, REPORTS)
    ordered = sorted(REPORTS, key=lambda report: report.digest)
    for party, path in enumerate(paths):
        column = ColumnReader(path)
        chunk = column.chunk(0, len(column))
        assert chunk.headers() == [report.header for report in ordered]
        assert chunk.payloads() == [report.payloads[party] for report in ordered]
        bodies = [b"" if party == 0 else report.body for report in ordered]
        assert [bytes(body) for body in chunk.bodies()] == bodies
        assert [row.tobytes() for row in chunk.elements()] == bodies
        assert [row.tobytes() for row in chunk.header_matrix()] == [report.header for report in ordered]


def test_a_column_holds_nothing_of_the_other_payloads(tmp_path: Path) -> None:
    paths = samples.write_columns(tmp_path, REPORTS)
    batch = BatchReader(tmp_path / "batch").layout
    for party, path in enumerate(paths):
        data = path.read_bytes()
        layout = column_layout(party, batch.header, batch.body, 112)
        assert len(data) == layout.file_size(7) == PREAMBLE + 7 * layout.record
        for report in REPORTS:
            assert [payload in data for payload in report.payloads] == [party == index for index in range(PARTIES)]


def test_any_records_of_a_column_can_be_had(tmp_path: Path) -> None:
    column = ColumnReader(samples.write_columns(tmp_path, REPORTS)[1])
    whole = column.chunk(0, 7)
    assert column.chunk(2, 3).headers() == whole.headers()[2:5]
    assert column.pick(np.array([5, 0])).payloads() == [whole.payloads()[5], whole.payloads()[0]]


def test_batches_and_columns_are_not_mistaken_for_each_other(tmp_path: Path) -> None:
    column = samples.write_columns(tmp_path, REPORTS)[0]
    with raises(ErrorKind.WRONG_FILE, ProtocolError):
        BatchReader(column)
    with raises(ErrorKind.WRONG_FILE, ProtocolError):
        ColumnReader(tmp_path / "batch")


def test_a_chunk_holds_whole_records(path: Path) -> None:
    batch = BatchReader(path).layout
    layout = column_layout(1, batch.header, batch.body, 112)
    with raises(ErrorKind.TRUNCATED, ProtocolError):
        ColumnChunk(layout, bytes(layout.record + 1))


def test_impossible_sizes_are_refused(path: Path) -> None:
    data = path.read_bytes()
    for sizes in (
        (0, 64, 3, 112),
        (2049, 64, 3, 112),
        (273, 63, 3, 112),
        (273, 8 * (2**17 + 1), 3, 112),
        (273, 64, 3, 113),
    ):
        path.write_bytes(data[:16] + struct.pack(">4I", *sizes) + data[32:])
        with raises(ErrorKind.OUT_OF_RANGE, ProtocolError):
            BatchReader(path)


def test_order_is_by_digest_byte_by_byte() -> None:
    rows = [bytes([first, *[0] * 30, last]) for first in (255, 0, 128) for last in (255, 0, 128)]
    digests = np.frombuffer(b"".join(rows), dtype=np.uint8).reshape(-1, 32)
    assert [rows[index] for index in sorted_order(digests)] == sorted(rows)


def test_the_root_is_the_same_however_a_batch_was_collected(tmp_path: Path) -> None:
    roots = set()
    for name, reports in (("forward", REPORTS), ("backward", REPORTS[::-1])):
        batch = BatchReader(samples.write_batch(tmp_path / name, reports))
        roots.add(batch.root())
    assert len(roots) == 1


def test_the_root_covers_every_digest_their_order_and_number() -> None:
    digests = np.arange(96, dtype=np.uint8).reshape(3, 32)
    changed = digests.copy()
    changed[2, 31] ^= 1
    roots = {batch_root(one) for one in (digests, changed, digests[::-1], digests[:2], digests[:0])}
    assert len(roots) == 5


def test_the_hashes_of_the_columns_are_those_of_the_specification(path: Path) -> None:
    batch = BatchReader(path)
    columns = [b"".join(batch.column(party, batch.order())) for party in range(PARTIES)]
    in_order = [REPORTS[place].payloads for place in batch.order()]
    expected = [
        hashlib.sha256(
            b"trefoil/1 column\0" + data[:32] + b"".join(each[party] for each in in_order) + batch.root()
        ).digest()
        for party, data in enumerate(columns)
    ]
    assert list(batch.column_hashes()) == expected


HONEST = [samples.report(f"honest {each}") for each in range(5)]
CHEAP = samples.report("cheap", promised=samples.terms(epsilon_micros=1))
LATE = samples.forged_report("late", [0] * 8, samples.terms(time=400_000_000 * HOUR))
KIND = ReportKind.of(Header.decode(HONEST[0].header)).name


def malformed(report: SealedReport) -> SealedReport:
    """The same record with a header of an unknown version."""
    return replace(report, header=b"\xff" + report.header[1:])


def off_the_hour(report: SealedReport) -> SealedReport:
    """The same record with a header that differs in its time alone, which no header may have."""
    header = bytearray(report.header)
    header[header.index((samples.TERMS.time).to_bytes(8, "big")) + 7] += 1
    return replace(report, header=bytes(header))


def batch_of(folder: Path, *reports: SealedReport) -> BatchReader:
    return BatchReader(samples.write_batch(folder / "shop.batch", reports))


def asked(batch: BatchReader, **options: object) -> SavedQuery:
    chosen = QueryOptions(**options)  # type: ignore[arg-type]
    return make_query(batch, chosen, samples.HELPER_SET, samples.QUERIER, samples.NOW)


def test_a_batch_of_two_kinds_is_refused_before_anything_is_signed(tmp_path: Path) -> None:
    batch = batch_of(tmp_path, CHEAP, *HONEST)
    with raises(ErrorKind.INCONSISTENT):
        asked(batch)
    query = asked(batch, kind=KIND).query
    assert (query.epsilon_micros, query.batch_size) == (samples.TERMS.epsilon_micros, 6)
    with raises(ErrorKind.UNKNOWN_NAME):
        asked(batch, kind="00000000")


def test_a_record_that_does_not_decode_costs_only_itself(tmp_path: Path) -> None:
    for place, bad in enumerate((malformed(CHEAP), off_the_hour(CHEAP), off_the_hour(HONEST[0]))):
        (folder := tmp_path / str(place)).mkdir()
        batch = batch_of(folder, bad, *HONEST)
        saved = asked(batch)
        assert saved.query.epsilon_micros == samples.TERMS.epsilon_micros
        (span,) = saved.spans
        assert (span.first, span.last) == (samples.TERMS.time, samples.TERMS.time)
        assert batches.summary(batch.path).reports == 5 and batches.summary(batch.path).malformed == 1
        with raises(ErrorKind.MALFORMED):
            batches.check(batch.path)
        assert [len(BatchReader(path)) for path in batches.split(batch.path, folder / "days")] == [5]
        assert batches.merge([batch.path], folder / "clean.batch") == 5
        assert batches.check(folder / "clean.batch").reports == 5


def test_a_batch_without_any_report_is_refused(tmp_path: Path) -> None:
    with raises(ErrorKind.TOO_FEW):
        asked(batch_of(tmp_path, malformed(CHEAP)))


def test_reports_to_an_earlier_helper_set_are_of_the_same_kind(tmp_path: Path) -> None:
    header = Header.decode(HONEST[0].header)
    earlier = replace(HONEST[0], header=replace(header, helper_set=bytes(32)).encode())
    assert kind_to_query(batch_of(tmp_path, earlier, *HONEST)).terms.epsilon_micros == samples.TERMS.epsilon_micros


def test_a_year_above_9999_is_listed_and_split(tmp_path: Path) -> None:
    batch = batch_of(tmp_path, LATE, *HONEST)
    listed = CliRunner().invoke(cli.app, ["batch", "ls", str(batch.path), "--json", "-"], catch_exceptions=False)
    assert json.loads(listed.stdout)[0]["reports"] == 6
    days = batches.split(batch.path, tmp_path / "days")
    assert [len(BatchReader(path)) for path in days] == [5, 1]
    # No helper counts it, so that it must not stretch the querier's own record.
    assert asked(batch).spans[0].last <= samples.NOW + 366 * DAY


def test_spans_are_linear_in_the_kinds(tmp_path: Path) -> None:
    """Each malicious record is a kind of its own: all are read in one pass."""
    header = Header.decode(HONEST[0].header)
    many = [
        replace(HONEST[0], header=replace(header, terms=replace(header.terms, epsilon_micros=1 + each)).encode())
        for each in range(300)
    ]
    batch = batch_of(tmp_path, *many)
    assert len(spans_of(batch)) == 300
    with raises(ErrorKind.INCONSISTENT):
        asked(batch)


async def test_the_honest_reports_are_counted_beside_those_of_malicious_devices(tmp_path: Path) -> None:
    async with three_helpers(tmp_path) as three:
        honest = three.seal([[1, 0]] * 20, terms(2))
        (cheap,) = three.seal([[1, 0]], replace(terms(2), epsilon_micros=1))
        batch = three.batch([malformed(honest[0]), cheap, *honest])
        kind = ReportKind.of(Header.decode(honest[0].header)).name
        querier, key, now = Querier(three.helper_set, patience=5), three.site_key(), real_now()
        with raises(ErrorKind.INCONSISTENT):
            await ask_batch(querier, batch, QueryOptions(seconds=30), key, now)
        assert not QueryFolder(batch.path).path.exists()
        options = QueryOptions(seconds=30, kind=kind)
        result = await ask_batch(querier, batch, options, key, now)
        assert (result.answer.submitted, result.answer.counted) == (22, 20)
        # Run again it resumes, with the same kind or none; not with another.
        assert (await ask_batch(querier, batch, options, key, now)).answer == result.answer
        assert (await ask_batch(querier, batch, replace(options, kind=""), key, now)).answer == result.answer
        with raises(ErrorKind.INCONSISTENT):
            other = ReportKind.of(Header.decode(cheap.header)).name
            await ask_batch(querier, batch, replace(options, kind=other), key, now)

"""Batches on disk: damage named by record, stumps removed, columns that hold what each helper needs and no more."""

from __future__ import annotations

import fcntl
import hashlib
import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from protocol.batch import (
    BatchReader,
    BatchWriter,
    ColumnChunk,
    ColumnReader,
    batch_root,
    column_layout,
    sorted_order,
)
from protocol.errors import ProtocolError, TrefoilError
from protocol.report import SealedReport
from protocol.shares import PARTIES
from tests.support import protocol_samples as samples

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
    with pytest.raises(ProtocolError, match="ends inside its preamble"):
        BatchReader(tmp_path / "empty")


@pytest.mark.parametrize("number", [1, 4, 7])
@pytest.mark.parametrize("at", [0, 300, -1])
def test_a_damaged_record_is_named_by_its_number(path: Path, number: int, at: int) -> None:
    size = BatchReader(path).layout.record
    data = bytearray(path.read_bytes())
    data[PREAMBLE + (number - 1) * size + at % size] ^= 1
    path.write_bytes(bytes(data))
    batch = BatchReader(path)
    with pytest.raises(ProtocolError, match=f"record {number} of .* is damaged"):
        batch.check()
    good = [index for index in range(7) if index != number - 1]
    assert [batch[index] for index in good] == [REPORTS[index] for index in good]


def test_a_file_cut_short_is_named_by_the_record_it_was_cut_in(path: Path) -> None:
    data, size = path.read_bytes(), BatchReader(path).layout.record
    for rest in (1, size // 2, size - 1):
        path.write_bytes(data[: PREAMBLE + 3 * size + rest])
        with pytest.raises(ProtocolError, match=f"record 4 of .* is cut short: {rest} of {size} bytes"):
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
    with pytest.raises(ProtocolError, match="not a file of reports"):
        BatchWriter(path)
    assert path.read_bytes() == content
    with pytest.raises(ProtocolError, match="not a file of reports"):
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
        with pytest.raises(TrefoilError, match="being written by another process"):
            BatchWriter(path)
    samples.write_batch(path, [samples.report("after")])
    assert len(BatchReader(path)) == 8


def test_files_that_cannot_be_opened_say_so(tmp_path: Path) -> None:
    with pytest.raises(TrefoilError, match="cannot read"):
        BatchReader(tmp_path / "absent")
    with pytest.raises(TrefoilError, match="cannot write"):
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
    with pytest.raises(ProtocolError, match="not a file of reports"):
        BatchReader(column)
    with pytest.raises(ProtocolError, match="not a file of reports"):
        ColumnReader(tmp_path / "batch")


def test_a_chunk_holds_whole_records(path: Path) -> None:
    batch = BatchReader(path).layout
    layout = column_layout(1, batch.header, batch.body, 112)
    with pytest.raises(ProtocolError, match="whole records"):
        ColumnChunk(layout, bytes(layout.record + 1))


def test_impossible_sizes_are_refused(path: Path) -> None:
    data = path.read_bytes()
    for header, body in ((0, 64), (2049, 64), (273, 63), (273, 8 * (2**17 + 1))):
        path.write_bytes(data[:16] + header.to_bytes(4, "big") + body.to_bytes(4, "big") + data[24:])
        with pytest.raises(ProtocolError, match="impossible sizes"):
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


def test_a_column_can_be_written_to_any_stream(path: Path) -> None:
    batch = BatchReader(path)
    stream = io.BytesIO()
    stream.writelines(batch.column(2, batch.order()))
    assert stream.getvalue().count(REPORTS[0].payloads[2]) == 1
    assert len(REPORTS[0].payloads[2]) == 112


def test_a_payload_of_no_suite_is_refused(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:28] + (113).to_bytes(4, "big") + data[32:])
    with pytest.raises(ProtocolError, match="payloads of 113 bytes"):
        BatchReader(path)


def test_the_hashes_of_the_columns_are_of_their_bytes(path: Path) -> None:
    batch = BatchReader(path)
    columns = [b"".join(batch.column(party, batch.order())) for party in range(PARTIES)]
    expected = [hashlib.sha256(b"trefoil/1 column\0" + data).digest() for data in columns]
    assert list(batch.column_hashes()) == expected

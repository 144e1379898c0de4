"""Batches of reports: a file a querier appends to, and the three columns she cuts from it, one for each helper.

All reports of a batch have the same shape, so every record has the same size: record n is located by multiplication,
columns are cut by slicing a memory map, and no file is loaded or parsed whole (SPEC.md §4).
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import IO, Protocol, Self

import numpy as np
import numpy.typing as npt

from protocol.errors import ErrorKind, Inconsistent, OutOfRange, ProtocolError, TrefoilError
from protocol.field import ELEMENT_SIZE, Vector
from protocol.files import unwritable
from protocol.header import Header, decode_header_or_none
from protocol.hpke import Suite
from protocol.report import SealedReport, header_digest, payload_size
from protocol.shape import MAX_EXPLICIT
from protocol.shares import BODY_SEED, PARTIES, SEEDS_OF
from protocol.wire import HASH_SIZE

Digests = npt.NDArray[np.uint8]
# How many rows are taken from `DigestRows` at a time: half a megabyte.
DIGEST_SPAN = 2**14
Order = npt.NDArray[np.int64]

_BATCH_MAGIC = b"trefoil batch 2\n"
_COLUMN_MAGIC = b"trefoil column2\n"
_PREAMBLE = struct.Struct(">16sIIII")
PREAMBLE_SIZE = _PREAMBLE.size
_CHECKSUM_SIZE = 4
# The longest header has 1,801 bytes: 239 fixed, 544 of texts, 10 of cap and spread, three points with 42 planes.
MAX_HEADER = 2048
_SPAN_BYTES = 2**21
_PIECE_BYTES = 2**19
MAX_BODY = ELEMENT_SIZE * MAX_EXPLICIT
_PAYLOAD_SIZES = frozenset(payload_size(suite) for suite in Suite)


class DigestRows(Protocol):
    """The digests of a batch as rows of 32 bytes: an array, or a file that returns one for every slice."""

    def __len__(self) -> int: ...

    def __getitem__(self, span: slice, /) -> Digests: ...


@dataclass(frozen=True, slots=True)
class ColumnLayout:
    """The sizes every record of a file shares."""

    magic: bytes
    header: int
    body: int
    # How many payloads a record has, and the size of each.
    payloads: int
    payload: int

    def __post_init__(self) -> None:
        if not (0 < self.header <= MAX_HEADER and 0 <= self.body <= MAX_BODY and self.body % ELEMENT_SIZE == 0):
            raise OutOfRange("the file's preamble has impossible sizes")
        if self.payload not in _PAYLOAD_SIZES:
            raise OutOfRange(f"no cipher suite has payloads of {self.payload} bytes")

    @property
    def checksum(self) -> int:
        """Return the size of a record's checksum. Batches, kept for weeks, have one; columns are hashed."""
        return _CHECKSUM_SIZE if self.magic == _BATCH_MAGIC else 0

    @property
    def record(self) -> int:
        return self.header + self.body + self.payloads * self.payload + self.checksum

    def file_size(self, count: int) -> int:
        """Return the size of a file with `count` records, so that an upload can be bounded before it begins."""
        return PREAMBLE_SIZE + count * self.record

    def encode(self) -> bytes:
        return _PREAMBLE.pack(self.magic, self.header, self.body, self.payloads, self.payload)

    @classmethod
    def decode(cls, data: bytes, magic: bytes, payloads: int) -> ColumnLayout:
        if len(data) < PREAMBLE_SIZE:
            raise ProtocolError("the file ends inside its preamble", kind=ErrorKind.TRUNCATED)
        prefix, header, body, count, payload = _PREAMBLE.unpack(data[:PREAMBLE_SIZE])
        if prefix != magic or count != payloads:
            raise ProtocolError("the file does not begin as this kind of file does", kind=ErrorKind.WRONG_FILE)
        return cls(magic, header, body, count, payload)

    def expect(self, data: bytes) -> None:
        """Reject a file that begins with another preamble."""
        if ColumnLayout.decode(data, self.magic, self.payloads) != self:
            raise Inconsistent(
                "the file's reports have another shape than the query's", "Cut it from the batch of this query."
            )


class BatchWriter:
    """Append reports to a batch file. Crash-safe: a truncated record is removed at the next opening.

    >>> with trefoil.BatchWriter("shop.batch") as batch:  # doctest: +SKIP
    ...     batch.add(device.measure_conversion("shop.example", purchase))
    """

    def __init__(self, path: Path | str) -> None:
        self._path = path = Path(path)
        try:
            self._file: IO[bytes] = path.open("ab+")
        except OSError as error:
            raise unwritable(path, error) from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._layout = self._existing_layout()
        except (BlockingIOError, ProtocolError) as error:
            self._file.close()
            if isinstance(error, BlockingIOError):
                message, hint = f"{path} is being written by another process", "Wait for it to end."
                raise TrefoilError(message, hint, kind=ErrorKind.BUSY) from None
            message = f"{path} is not a file of reports: {error}"
            raise ProtocolError(message, "Name a new file.", kind=error.kind) from None

    def add(self, report: SealedReport) -> None:
        """Append one report. Reject one of another shape than the first, and write nothing."""
        layout = ColumnLayout(_BATCH_MAGIC, len(report.header), len(report.body), PARTIES, len(report.payloads[0]))
        if any(len(payload) != layout.payload for payload in report.payloads):
            raise ProtocolError(
                "a report's payloads have one size; another would move all that follow it", kind=ErrorKind.MALFORMED
            )
        preamble = b""
        if self._layout is None:
            preamble, self._layout = layout.encode(), layout
        elif layout != self._layout:
            raise TrefoilError(
                f"this report has another shape than those in {self._path}",
                "Keep one file per site, caller, unit, number of buckets, cap, spread and cipher suite.",
                kind=ErrorKind.INCONSISTENT,
            )
        record = report.header + report.body + b"".join(report.payloads)
        with self._naming_the_file():
            self._file.write(preamble + record + zlib.crc32(record).to_bytes(_CHECKSUM_SIZE, "big"))

    def _existing_layout(self) -> ColumnLayout | None:
        size = self._file.seek(0, os.SEEK_END)
        self._file.seek(0)
        preamble = self._file.read(PREAMBLE_SIZE)
        # Remove a truncated preamble of our own; any other short file is not ours, and stays.
        if size < PREAMBLE_SIZE and preamble[: len(_BATCH_MAGIC)] == _BATCH_MAGIC[:size]:
            self._file.truncate(0)
            return None
        layout = ColumnLayout.decode(preamble, _BATCH_MAGIC, PARTIES)
        self._file.truncate(size - (size - PREAMBLE_SIZE) % layout.record)
        self._file.seek(0, os.SEEK_END)
        return layout

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._naming_the_file(), self._file:
            self._file.flush()
            os.fsync(self._file.fileno())

    @contextmanager
    def _naming_the_file(self) -> Iterator[None]:
        """Add the path to an error of the system, such as that of a full disk, which does not have it."""
        try:
            yield
        except OSError as error:
            error.filename = str(self._path)
            raise


class _RecordFile:
    """Fixed-size records behind a preamble, mapped into memory."""

    def __init__(self, path: Path | str, magic: bytes, payloads: int) -> None:
        self.path = path = Path(path)
        try:
            with path.open("rb") as file:
                self.layout = ColumnLayout.decode(file.read(PREAMBLE_SIZE), magic, payloads)
                size = file.seek(0, os.SEEK_END) - PREAMBLE_SIZE
        except OSError as error:
            hint = "A folder of trefoil collect is queried with: trefoil query series" if path.is_dir() else ""
            raise TrefoilError(f"cannot read {path}: {error.strerror}", hint, kind=ErrorKind.FILE_UNREADABLE) from None
        except ProtocolError as error:
            raise ProtocolError(f"{path} is not a file of reports: {error}", kind=error.kind) from None
        self.count, rest = divmod(size, self.layout.record)
        if rest:
            raise ProtocolError(
                f"record {self.count + 1} of {path} is cut short: {rest} of {self.layout.record} bytes",
                "The writer was interrupted; appending another report to the file removes the truncated record.",
                kind=ErrorKind.TRUNCATED,
            )
        shape = (self.count, self.layout.record)
        self.records: npt.NDArray[np.uint8] = (
            np.memmap(path, dtype=np.uint8, mode="r", offset=PREAMBLE_SIZE, shape=shape)
            if self.count
            else np.zeros(shape, dtype=np.uint8)
        )

    def __len__(self) -> int:
        return self.count

    def digests(self) -> Digests:
        return np.concatenate([np.empty((0, HASH_SIZE), dtype=np.uint8), *self.digest_spans()])

    def digest_spans(self) -> Iterator[Digests]:
        for data in self._spans():
            starts = range(0, len(data), self.layout.record)
            hashed = b"".join([header_digest(data[at : at + self.layout.header]) for at in starts])
            yield np.frombuffer(hashed, dtype=np.uint8).reshape(-1, HASH_SIZE)

    def _spans(self) -> Iterator[bytes]:
        """Yield the records, some at a time. Read, not mapped, so that used pages do not stay resident."""
        with self.path.open("rb") as file:
            file.seek(PREAMBLE_SIZE)
            whole = max(1, _SPAN_BYTES // self.layout.record) * self.layout.record
            while data := file.read(whole):
                yield data


def is_batch(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_BATCH_MAGIC)) == _BATCH_MAGIC


class BatchReader(_RecordFile):
    """A batch file, read by its querier.

    >>> len(trefoil.BatchReader("shop.batch"))  # doctest: +SKIP
    5000
    """

    def __init__(self, path: Path | str) -> None:
        super().__init__(path, _BATCH_MAGIC, PARTIES)

    def __iter__(self) -> Iterator[SealedReport]:
        return (self[index] for index in range(self.count))

    def __getitem__(self, index: int) -> SealedReport:
        """Return one report. The error about a damaged one names its number, counted from 1."""
        record = self.records[index].tobytes()
        content, checksum = record[:-_CHECKSUM_SIZE], record[-_CHECKSUM_SIZE:]
        if zlib.crc32(content).to_bytes(_CHECKSUM_SIZE, "big") != checksum:
            raise ProtocolError(
                f"record {index + 1} of {self.path} is damaged",
                "Restore the file from a copy.",
                kind=ErrorKind.FILE_DAMAGED,
            )
        body_at = self.layout.header
        payload_at = body_at + self.layout.body
        size = self.layout.payload
        cut = [content[payload_at + party * size :][:size] for party in range(PARTIES)]
        return SealedReport(content[:body_at], content[body_at:payload_at], (cut[0], cut[1], cut[2]))

    def first_header(self) -> Header | None:
        """Return the first header that decodes, or None."""
        headers = (decode_header_or_none(row[: self.layout.header].tobytes()) for row in self.records)
        return next((header for header in headers if header is not None), None)

    def check(self) -> None:
        """Verify every checksum. Raise at the first damaged record."""
        for index in range(self.count):
            self[index]

    def order(self) -> Order:
        """Return the order in which columns carry the reports: by digest, so that a batch has one root."""
        return self._ranked[0]

    def root(self) -> bytes:
        """Return the batch root, over the reports in that order."""
        return self._ranked[1]

    @cached_property
    def _ranked(self) -> tuple[Order, bytes]:
        digests = self.digests()
        order = sorted_order(digests)
        return order, batch_root(digests[order])

    def column(self, party: int, order: Order) -> Iterator[bytes]:
        """Yield what helper `party` needs of every report, in `order`, in pieces, without decoding any."""
        layout = self._column_layout(party)
        yield layout.encode()
        payload_at = self.layout.header + self.layout.body + party * layout.payload
        kept = self.layout.header + layout.body
        for rows in self._in_order(order):
            yield np.hstack([rows[:, :kept], rows[:, payload_at : payload_at + layout.payload]]).tobytes()

    def _in_order(self, order: Order) -> Iterator[npt.NDArray[np.uint8]]:
        span = max(1, _PIECE_BYTES // self.layout.record)
        for start in range(0, len(order), span):
            yield self.records[order[start : start + span]]

    def column_hashes(self) -> tuple[bytes, bytes, bytes]:
        """Return the hashes of the three columns. The query signs them, so that nobody can substitute a column."""
        first, second, third = (self._column_hash(party) for party in range(PARTIES))
        return first, second, third

    def _column_hash(self, party: int) -> bytes:
        layout = self._column_layout(party)
        hashed, start = new_column_hash(layout), self.layout.header + self.layout.body + party * layout.payload
        for rows in self._in_order(self.order()):
            hashed.update(rows[:, start : start + layout.payload].tobytes())
        hashed.update(self.root())
        return hashed.digest()

    def column_size(self, party: int) -> int:
        return self._column_layout(party).file_size(self.count)

    def _column_layout(self, party: int) -> ColumnLayout:
        return column_layout(party, self.layout.header, self.layout.body, self.layout.payload)


class ColumnReader(_RecordFile):
    """One helper's column of a batch, as it was uploaded."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, _COLUMN_MAGIC, 1)

    def chunk(self, start: int, count: int) -> ColumnChunk:
        return read_chunk(self.path, self.layout, start, count)

    def pick(self, rows: npt.NDArray[np.int64]) -> ColumnChunk:
        return ColumnChunk(self.layout, self.records[rows].tobytes())


@dataclass(frozen=True, slots=True)
class ColumnChunk:
    """Some records of a column in memory, taken apart without copying the bodies."""

    layout: ColumnLayout
    data: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.data) % self.layout.record:
            raise ProtocolError("a chunk holds whole records", kind=ErrorKind.TRUNCATED)

    def __len__(self) -> int:
        return len(self.data) // self.layout.record

    def headers(self) -> list[bytes]:
        size = self.layout.header
        return [self.data[at : at + size] for at in range(0, len(self.data), self.layout.record)]

    def payloads(self) -> list[bytes]:
        end = self.layout.record
        return [self.data[at + end - self.layout.payload : at + end] for at in range(0, len(self.data), end)]

    def bodies(self) -> list[memoryview]:
        """Return every body; all are empty at the helper that does not use them."""
        view, start, size = memoryview(self.data), self.layout.header, self.layout.body
        return [view[at + start : at + start + size] for at in range(0, len(self.data), self.layout.record)]

    def header_matrix(self) -> npt.NDArray[np.uint8]:
        return self._records()[:, : self.layout.header]

    def elements(self) -> Vector:
        """Return the bodies as rows of field elements, not yet checked to be below p."""
        bodies = self._records()[:, self.layout.header : self.layout.header + self.layout.body]
        return np.ascontiguousarray(bodies).view("<u8").reshape(len(self), self.layout.body // ELEMENT_SIZE)

    def _records(self) -> npt.NDArray[np.uint8]:
        return np.frombuffer(self.data, dtype=np.uint8).reshape(len(self), self.layout.record)


def read_chunk(path: Path, layout: ColumnLayout, start: int, count: int) -> ColumnChunk:
    """Return a contiguous range of a column. Read, not mapped, so that used pages do not stay resident."""
    with path.open("rb", buffering=0) as file:
        file.seek(PREAMBLE_SIZE + start * layout.record)
        return ColumnChunk(layout, file.read(count * layout.record))


def column_layout(party: int, header: int, body: int, payload: int) -> ColumnLayout:
    """Return the layout of a helper's column. Helper 1 never uses the body, so its column omits the bodies."""
    return ColumnLayout(_COLUMN_MAGIC, header, body if BODY_SEED in SEEDS_OF[party] else 0, 1, payload)


def sorted_order(digests: Digests) -> Order:
    """Return positions in ascending order of digest, byte by byte."""
    words = digests.view(">u8")
    order: Order = np.lexsort([words[:, column] for column in reversed(range(words.shape[1]))])
    return order


def new_column_hash(layout: ColumnLayout) -> hashlib._Hash:
    """Return the state of what a query signs for each column: a hash over its preamble, its payloads, the batch root.

    Together these determine every byte: a root commits to the headers, and a header to its body, which admission
    verifies. Bodies, nine tenths of a column of 1,024 buckets, are therefore not hashed a second time.
    """
    return hashlib.sha256(b"trefoil/1 column\0" + layout.encode())


def new_batch_root(count: int) -> hashlib._Hash:
    """Return the state of what a query signs: the hash over a batch's report digests in the order of the columns."""
    return hashlib.sha256(b"trefoil/1 batch root\0" + count.to_bytes(8, "big"))


def batch_root(digests: DigestRows) -> bytes:
    root = new_batch_root(len(digests))
    for start in range(0, len(digests), DIGEST_SPAN):
        root.update(np.ascontiguousarray(digests[start : start + DIGEST_SPAN]).tobytes())
    return root.digest()

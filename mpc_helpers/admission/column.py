"""A query's column on a helper's disk, with what is stored beside it: the digests of its reports, and check shares.

Each header is hashed as it arrives. Ledger and agreement read some digests at a time, so a batch of any size takes
little memory; they are trusted only under the batch root that the querier signed. Check shares come in blocks, which
helpers compare by hash and show each other only where hashes differ (SPEC.md §3.2).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from protocol.batch import (
    DIGEST_SPAN,
    PREAMBLE_SIZE,
    ColumnLayout,
    ColumnReader,
    DigestRows,
    Digests,
    batch_root,
    new_batch_root,
    new_column_hash,
)
from protocol.errors import ErrorKind, ProtocolError, TrefoilError
from protocol.field import ELEMENT_SIZE, P, Vector, add
from protocol.report import header_digest
from protocol.wire import HASH_SIZE, tagged_hash

BLOCK = 64
BITMAP_SIZE = BLOCK // 8
# The root of a batch in which nothing is checked.
NO_ROOT = bytes(HASH_SIZE)

Mask = npt.NDArray[np.bool_]

_LABEL = hashlib.sha256(b"trefoil/1 validity block\0")


def block_count(reports: int) -> int:
    return -(-reports // BLOCK)


def preimages(opened: Mask, shares: Vector) -> list[bytes]:
    """Return, for each block of 64 rows, which of them this helper opened and their check shares in row order.

    `shares` has a row for each report that opened. The last block may have fewer rows; its bitmap has 64 bits still.
    """
    data = np.ascontiguousarray(shares, dtype="<u8")
    ends = np.concatenate([[0], np.cumsum(opened)])
    made = []
    for start in range(0, len(opened), BLOCK):
        bits = opened[start : start + BLOCK]
        bitmap = np.packbits(bits).tobytes().ljust(BITMAP_SIZE, b"\0")
        made.append(bitmap + data[ends[start] : ends[start + len(bits)]].tobytes())
    return made


def block_hash(number: int, preimage: bytes) -> bytes:
    state = _LABEL.copy()
    state.update(number.to_bytes(4, "big") + preimage)
    return state.digest()


def check_root(hashes: Sequence[bytes]) -> bytes:
    """Return the hash of all blocks, which a proposal carries."""
    return tagged_hash("validity root", b"".join(hashes))


@dataclass(frozen=True, slots=True)
class Block:
    """A block as a helper showed it: 64 bits, and a row of check shares for each bit that is set."""

    opened: Mask = field(repr=False)
    shares: Vector = field(repr=False)

    @classmethod
    def parse(cls, preimage: bytes, residues: int) -> Block:
        """Decode a block. There is exactly one encoding of it."""
        if len(preimage) < BITMAP_SIZE:
            raise ProtocolError("a block begins with 64 bits", kind=ErrorKind.TRUNCATED)
        opened = np.unpackbits(np.frombuffer(preimage[:BITMAP_SIZE], dtype=np.uint8)).astype(np.bool_)
        count = int(np.count_nonzero(opened))
        if len(preimage) != BITMAP_SIZE + ELEMENT_SIZE * residues * count:
            message = f"a block of {count} reports has another size than {len(preimage)} bytes"
            raise ProtocolError(message, kind=ErrorKind.INCONSISTENT)
        shares = np.frombuffer(preimage[BITMAP_SIZE:], dtype="<u8").astype(np.uint64).reshape(count, residues)
        if (shares >= np.uint64(P)).any():
            raise ProtocolError("a check share is not below p", kind=ErrorKind.OUT_OF_RANGE)
        return cls(opened, shares)

    def rows(self, places: npt.NDArray[np.int64]) -> Vector:
        """Return the check shares of the reports at these places of the block, all of which it must hold."""
        shares: Vector = self.shares[np.cumsum(self.opened)[places] - 1]
        return shares


def fit(first: Vector, second: Vector, third: Vector) -> Mask:
    """Return which rows of three helpers' check shares can belong to one shared vector: n₁ + n₂ = 2n₃ everywhere."""
    fits: Mask = (add(first, second) == add(third, third)).all(axis=1)
    return fits


def largest_block(residues: int) -> int:
    """Return the bytes of a block in which every report opened."""
    return BITMAP_SIZE + BLOCK * ELEMENT_SIZE * residues


class BlockCache:
    """A cache of the blocks that were shown, in a sparse file beside the column: each is recomputed once.

    A block reveals nothing about a report that is counted: its residues are zero. What is read back is trusted only
    under its hash.
    """

    def __init__(self, column: Path, residues: int) -> None:
        self._path = block_cache_path(column)
        self._size = largest_block(residues)
        self._residues = residues

    def holds(self, number: int, hashed: bytes) -> bool:
        return block_hash(number, self.read(number)) == hashed

    def read(self, number: int) -> bytes:
        """Return the bytes at the block's offset, unverified: they may be stale or missing."""
        try:
            with self._path.open("rb") as file:
                file.seek(number * self._size)
                data = file.read(self._size)
        except FileNotFoundError:
            return b""
        bits = np.unpackbits(np.frombuffer(data[:BITMAP_SIZE], dtype=np.uint8))
        return data[: BITMAP_SIZE + ELEMENT_SIZE * self._residues * int(np.count_nonzero(bits))]

    def keep(self, number: int, preimage: bytes) -> None:
        self._path.touch(mode=0o600)
        with self._path.open("r+b") as file:
            file.seek(number * self._size)
            file.write(preimage)


def block_cache_path(column: Path) -> Path:
    return column.with_name(f"{column.name}.shown")


class StoredDigests:
    """Digests in a file, as rows of 32 bytes. A slice is an array in memory."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._count = path.stat().st_size // HASH_SIZE

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, span: slice, /) -> Digests:
        start, stop, _ = span.indices(self._count)
        with self._path.open("rb", buffering=0) as file:
            file.seek(HASH_SIZE * start)
            data = file.read(HASH_SIZE * max(0, stop - start))
        return np.frombuffer(data, dtype=np.uint8).reshape(-1, HASH_SIZE)


class ColumnDraft:
    """A column as it arrives, in pieces of any size; run in threads. Its files are removed unless it is kept.

    `mark` distinguishes concurrent drafts of one column.
    """

    def __init__(self, column: Path, layout: ColumnLayout, count: int, mark: str = "0") -> None:
        self._column = column
        self._layout = layout
        self._size = layout.file_size(count)
        self._drafts = (_draft(column, mark), _draft(digests_path(column), mark))
        self._records, self._digests = (path.open("wb") for path in self._drafts)
        self._root = new_batch_root(count)
        self._hash = new_column_hash(layout)
        self._received = 0
        # The received part of a record that is not complete yet; at first, of the preamble.
        self._partial = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file, path in zip((self._records, self._digests), self._drafts, strict=True):
            with contextlib.suppress(OSError):  # a full disk fails again on what is still buffered
                file.close()
            path.unlink(missing_ok=True)

    def add(self, piece: bytes) -> None:
        if self._received + len(piece) > self._size:
            hint = "Upload the column of this query."
            raise ProtocolError(f"the column has more than {self._size} bytes", hint, kind=ErrorKind.TOO_LARGE)
        self._records.write(piece)
        data = self._partial + piece
        if self._received < PREAMBLE_SIZE <= self._received + len(piece):
            self._layout.expect(data)
            data = data[PREAMBLE_SIZE:]
        self._received += len(piece)
        self._partial = self._hash_records(data) if self._received >= PREAMBLE_SIZE else data

    def finish(self, root: bytes, column_hash: bytes) -> bool:
        """Return whether the column is complete and the one that was signed. If so it is durable, and may be kept."""
        if self._received != self._size:
            message = f"the column ended after {self._received} of {self._size} bytes"
            raise ProtocolError(message, "Upload it again.", kind=ErrorKind.TRUNCATED)
        self._hash.update(root)
        if self._root.digest() != root or self._hash.digest() != column_hash:
            return False
        for file in (self._digests, self._records):
            file.flush()
            os.fsync(file.fileno())
        return True

    def keep(self) -> None:
        """Rename the draft to the column, once it is finished: first the digests, then the records."""
        column, digests = self._drafts
        digests.rename(digests_path(self._column))
        column.rename(self._column)

    def _hash_records(self, data: bytes) -> bytes:
        """Hash headers and payloads of the whole records in `data`, and return the rest."""
        size, header = self._layout.record, self._layout.header
        whole = len(data) - len(data) % size
        records = np.frombuffer(data, dtype=np.uint8, count=whole).reshape(-1, size)
        self._hash.update(records[:, size - self._layout.payload :].tobytes())
        hashed = b"".join([header_digest(data[at : at + header]) for at in range(0, whole, size)])
        self._root.update(hashed)
        self._digests.write(hashed)
        return data[whole:]


def digests_of(column: ColumnReader, root: bytes) -> DigestRows:
    """Return the digests beside a column; recompute them from it if they are lost or not those of this root."""
    path = digests_path(column.path)
    if path.exists():
        stored = StoredDigests(path)
        if len(stored) == len(column) and batch_root(stored) == root:
            return stored
    draft = _draft(path)
    try:
        with draft.open("wb") as file:
            file.writelines(digests.tobytes() for digests in column.digest_spans())
    except OSError as error:
        draft.unlink(missing_ok=True)
        message = f"this helper cannot store a column's digests: {error.strerror}"
        raise TrefoilError(message, "Free some disk space.", kind=ErrorKind.FILE_UNWRITABLE) from None
    if batch_root(StoredDigests(draft)) != root:
        draft.unlink()
        message = "the stored column is not of the batch that the query was signed for"
        raise ProtocolError(message, "Ask again.", kind=ErrorKind.WRONG_FILE)
    draft.rename(path)
    return StoredDigests(path)


def duplicates(digests: DigestRows) -> Mask:
    """Return which digests equal the one before them. Raise `ProtocolError` if the column is out of order."""
    same = np.zeros(len(digests), dtype=np.bool_)
    for start in range(1, len(digests), DIGEST_SPAN):
        words = np.ascontiguousarray(digests[start - 1 : start + DIGEST_SPAN]).view(">u8")
        later, earlier = words[1:], words[:-1]
        different = later != earlier
        same[start : start + len(later)] = ~different.any(axis=1)
        rows, first_difference = np.arange(len(later)), np.argmax(different, axis=1)
        smaller = later[rows, first_difference] < earlier[rows, first_difference]
        if smaller.any():
            at = start + int(np.argmax(smaller)) + 1
            message = f"report {at} of the column is out of order"
            raise ProtocolError(message, "Sort the batch by report digest.", kind=ErrorKind.INCONSISTENT)
    return same


def remove_column(column: Path) -> None:
    """Remove a column and everything beside it. Run when its query needs it no more."""
    for path in (column, digests_path(column), block_cache_path(column)):
        path.unlink(missing_ok=True)


def digests_path(column: Path) -> Path:
    return column.with_name(f"{column.name}.digests")


def stored_size(layout: ColumnLayout, count: int) -> int:
    """Return the size in bytes of a column and its digests."""
    return layout.file_size(count) + HASH_SIZE * count


def remove_drafts(column: Path) -> None:
    """Remove all drafts of a column. Run at start, when no upload is running."""
    for path in column.parent.glob(f"{column.name}*.part"):
        path.unlink(missing_ok=True)


def _draft(path: Path, mark: str = "again") -> Path:
    return path.with_name(f"{path.name}.{mark}.part")


@dataclass(slots=True)
class CheckResults:
    """What the three helpers established together about the numbers of each report: two masks over a batch.

    Bits are only ever set, over all attempts at a query. In memory only: after a crash the check is run again. Only the
    check between helpers writes them, and setting a bit does not change the sums.
    """

    confirmed: Mask = field(repr=False)
    invalid: Mask = field(repr=False)

    @classmethod
    def none(cls, reports: int) -> CheckResults:
        return cls(np.zeros(reports, dtype=np.bool_), np.zeros(reports, dtype=np.bool_))

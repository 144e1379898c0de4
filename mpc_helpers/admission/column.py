"""A query's column on a helper's disk and, beside it, the digests of its reports: each header is hashed as it arrives.

Whoever needs digests later (the ledger, the agreement) reads some at a time, so a batch of any size takes little
memory. What is read back is believed only under the batch root that the querier signed.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from mpc_helpers.admission.blocks import shown_beside
from protocol.batch import (
    DIGEST_SPAN,
    PREAMBLE_SIZE,
    BatchRoot,
    ColumnHash,
    ColumnLayout,
    ColumnReader,
    DigestRows,
    Digests,
    batch_root,
)
from protocol.errors import ProtocolError, TrefoilError
from protocol.report import header_digest
from protocol.wire import HASH_SIZE

Mask = npt.NDArray[np.bool_]


class StoredDigests:
    """Rows of 32 bytes in a file. A slice of it is an array in memory."""

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
    """A column as it arrives, in pieces of any size; run in threads. Nothing is left of one that is not kept.

    `mark` tells the drafts of one column apart.
    """

    def __init__(self, column: Path, layout: ColumnLayout, count: int, mark: str = "0") -> None:
        self._column = column
        self._layout = layout
        self._size = layout.file_size(count)
        self._drafts = (_draft(column, mark), _draft(digests_beside(column), mark))
        self._records, self._digests = (path.open("wb") for path in self._drafts)
        self._root = BatchRoot(count)
        self._hash = ColumnHash()
        self._received = 0
        # What has come of a record that is not whole yet; at first, of the preamble.
        self._held = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file, path in zip((self._records, self._digests), self._drafts, strict=True):
            with contextlib.suppress(OSError):  # a full disk refuses once more what is still to be written
                file.close()
            path.unlink(missing_ok=True)

    def add(self, piece: bytes) -> None:
        """The next bytes of the column."""
        if self._received + len(piece) > self._size:
            raise ProtocolError(f"the column has more than {self._size} bytes", "Upload the column of this query.")
        self._records.write(piece)
        self._hash.add(piece)
        data = self._held + piece
        if self._received < PREAMBLE_SIZE <= self._received + len(piece):
            self._layout.expect(data)
            data = data[PREAMBLE_SIZE:]
        self._received += len(piece)
        self._held = self._hash_records(data) if self._received >= PREAMBLE_SIZE else data

    def finish(self, root: bytes, column_hash: bytes) -> bool:
        """Whether it is whole and the one that was signed. If so it is durable, and may be kept."""
        if self._received != self._size:
            raise ProtocolError(f"the column ended after {self._received} of {self._size} bytes", "Upload it again.")
        if self._root.digest() != root or self._hash.digest() != column_hash:
            return False
        for file in (self._digests, self._records):
            file.flush()
            os.fsync(file.fileno())
        return True

    def keep(self) -> None:
        """Make it the column, once it is finished; the digests are in place before."""
        column, digests = self._drafts
        digests.rename(digests_beside(self._column))
        column.rename(self._column)

    def _hash_records(self, data: bytes) -> bytes:
        """Take whole records out of `data`; gives what is left."""
        size, header = self._layout.record, self._layout.header
        whole = len(data) - len(data) % size
        hashed = b"".join([header_digest(data[at : at + header]) for at in range(0, whole, size)])
        self._root.add(hashed)
        self._digests.write(hashed)
        return data[whole:]


def digests_of(column: ColumnReader, root: bytes) -> DigestRows:
    """The digests beside a column. Made again from the column if they are not those of this root, or lost."""
    path = digests_beside(column.path)
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
        raise TrefoilError(f"this helper cannot store a column's digests: {error.strerror}", "Make room.") from None
    if batch_root(StoredDigests(draft)) != root:
        draft.unlink()
        raise ProtocolError("the stored column is not of the batch that the query was signed for", "Ask again.")
    draft.rename(path)
    return StoredDigests(path)


def repeated(digests: DigestRows) -> Mask:
    """Which digests equal the one before them. A column that is out of order is no batch at all."""
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
            raise ProtocolError(f"report {at} of the column is out of order", "Sort the batch by report digest.")
    return same


def remove_column(column: Path) -> None:
    """When its query needs it no more."""
    for path in (column, digests_beside(column), shown_beside(column)):
        path.unlink(missing_ok=True)


def digests_beside(column: Path) -> Path:
    """Where a column's digests are."""
    return column.with_name(f"{column.name}.digests")


def stored_size(layout: ColumnLayout, count: int) -> int:
    """Bytes on disk of a column and its digests."""
    return layout.file_size(count) + HASH_SIZE * count


def remove_drafts(column: Path) -> None:
    """Run at start: whoever was uploading has gone."""
    for path in column.parent.glob(f"{column.name}*.part"):
        path.unlink(missing_ok=True)


def _draft(path: Path, mark: str = "again") -> Path:
    return path.with_name(f"{path.name}.{mark}.part")

"""Blocks of check shares: what helpers compare by hash, and show each other only where hashes differ (SPEC.md §3.2)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from protocol.errors import ProtocolError
from protocol.field import ELEMENT_SIZE, P, Vector, add
from protocol.wire import tagged_hash

BLOCK = 64
BITMAP_SIZE = BLOCK // 8
HASH_SIZE = 32
# The root of a batch in which nothing is checked.
NO_ROOT = bytes(HASH_SIZE)

Mask = npt.NDArray[np.bool_]

_LABEL = hashlib.sha256(b"trefoil/1 validity block\0")


def block_count(reports: int) -> int:
    """How many blocks a batch has."""
    return -(-reports // BLOCK)


def preimages(opened: Mask, shares: Vector) -> list[bytes]:
    """For each block of 64 rows: which of them this helper opened, then their check shares in row order.

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
    """What stands for a block in the list."""
    state = _LABEL.copy()
    state.update(number.to_bytes(4, "big") + preimage)
    return state.digest()


def check_root(hashes: Sequence[bytes]) -> bytes:
    """What stands for all blocks in a proposal."""
    return tagged_hash("validity root", b"".join(hashes))


@dataclass(frozen=True, slots=True)
class Block:
    """A block as a helper showed it: 64 bits, and a row of check shares for each bit that is set."""

    opened: Mask = field(repr=False)
    shares: Vector = field(repr=False)

    @classmethod
    def parse(cls, preimage: bytes, residues: int) -> Block:
        """The block in `preimage`, or `ProtocolError`: there is one encoding only."""
        if len(preimage) < BITMAP_SIZE:
            raise ProtocolError("a block begins with 64 bits")
        opened = np.unpackbits(np.frombuffer(preimage[:BITMAP_SIZE], dtype=np.uint8)).astype(np.bool_)
        count = int(np.count_nonzero(opened))
        if len(preimage) != BITMAP_SIZE + ELEMENT_SIZE * residues * count:
            raise ProtocolError(f"a block of {count} reports has another size than {len(preimage)} bytes")
        shares = np.frombuffer(preimage[BITMAP_SIZE:], dtype="<u8").astype(np.uint64).reshape(count, residues)
        if (shares >= np.uint64(P)).any():
            raise ProtocolError("a check share is not below p")
        return cls(opened, shares)

    def rows(self, places: npt.NDArray[np.int64]) -> Vector:
        """The check shares of the reports at these places of the block, all of which it must hold."""
        found: Vector = self.shares[np.cumsum(self.opened)[places] - 1]
        return found


def fit(first: Vector, second: Vector, third: Vector) -> Mask:
    """Which rows of the three helpers' check shares can belong to one shared vector: n₁ + n₂ = 2n₃ in every number."""
    fits: Mask = (add(first, second) == add(third, third)).all(axis=1)
    return fits


def largest_block(residues: int) -> int:
    """Bytes of a block in which every report opened."""
    return BITMAP_SIZE + BLOCK * ELEMENT_SIZE * residues


class ShownBlocks:
    """The blocks that were computed again, in a sparse file beside the column: what is asked for twice is done once.

    They hold check shares of zeros, and of reports that are not counted. What is read back is believed only under its
    hash.
    """

    def __init__(self, column: Path, residues: int) -> None:
        self._path = shown_beside(column)
        self._size = largest_block(residues)
        self._residues = residues

    def holds(self, number: int, hashed: bytes) -> bool:
        """Whether the block with this hash is there."""
        return block_hash(number, self.read(number)) == hashed

    def read(self, number: int) -> bytes:
        """What stands where the block would be."""
        try:
            with self._path.open("rb") as file:
                file.seek(number * self._size)
                data = file.read(self._size)
        except FileNotFoundError:
            return b""
        bits = np.unpackbits(np.frombuffer(data[:BITMAP_SIZE], dtype=np.uint8))
        return data[: BITMAP_SIZE + ELEMENT_SIZE * self._residues * int(np.count_nonzero(bits))]

    def keep(self, number: int, preimage: bytes) -> None:
        """Write a block to its place."""
        self._path.touch(mode=0o600)
        with self._path.open("r+b") as file:
            file.seek(number * self._size)
            file.write(preimage)


def shown_beside(column: Path) -> Path:
    """Where a column's shown blocks are."""
    return column.with_name(f"{column.name}.shown")

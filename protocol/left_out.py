"""Which reports a helper left out and why: a list that is sealed with the answer (SPEC.md §5).

It depends on public headers, on what was spent before and on whether a report opens and proves its numbers, never on
the numbers. Reports stand in the batch's order by digest. A code is 0 for a report that this helper would count, and
else the reason's number plus one.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from protocol.errors import ErrorKind, Inconsistent, OutOfRange, ProtocolError, Rejection
from protocol.wire import tagged_hash

Codes = npt.NDArray[np.uint8]

WOULD_COUNT = 0
# A longer list is truncated after a whole run: an answer must not outgrow what its querier accepts.
MAX_LIST = 2**19
# Two numbers below 2^32 in five bytes each, and a reason.
LONGEST_RUN = 11
_MORE = 0x80
_BY_CODE = {reason.number + 1: reason for reason in Rejection}


def code_of(reason: Rejection) -> int:
    return reason.number + 1


def reason_of(code: int) -> Rejection:
    return _BY_CODE[code]


def bitmap_digest(bitmap: bytes) -> bytes:
    """Return the digest of one helper's bitmap of a proposal: a bit for each report that it would count."""
    return tagged_hash("left out", bitmap)


def digest_of(codes: Codes) -> bytes:
    """Return the digest of the bitmap that belongs to these codes."""
    return bitmap_digest(np.packbits(codes == WOULD_COUNT).tobytes())


def counts_of(codes: Codes) -> dict[Rejection, int]:
    distinct, counts = np.unique(codes[codes != WOULD_COUNT], return_counts=True)
    return {reason_of(int(code)): int(count) for code, count in zip(distinct, counts, strict=True)}


def encode_left_out(codes: Codes) -> bytes:
    """Run by a helper: encode the list as runs of one reason, as many as fit."""
    pieces: list[bytes] = []
    size = end = 0
    for first, length, code in _runs(codes):
        piece = _varint(first - end) + _varint(length) + bytes([code - 1])
        size += len(piece)
        if size > MAX_LIST:
            break
        pieces.append(piece)
        end = first + length
    return b"".join(pieces)


def decode_left_out(data: bytes, count: int) -> Codes:
    """Run by the querier: return the codes of `count` reports. Reject all but the canonical encoding."""
    if len(data) > MAX_LIST:
        raise ProtocolError("a list of reports left out is too long", kind=ErrorKind.TOO_LARGE)
    codes = np.zeros(count, dtype=np.uint8)
    reader, end, before = _Varints(data), 0, WOULD_COUNT
    while not reader.ended:
        gap, length, code = reader.number(), reader.number(), reader.byte() + 1
        if code not in _BY_CODE or not length or (gap == 0 and code == before):
            raise ProtocolError(
                "a run of reports left out is empty, without a known reason, or cut in two", kind=ErrorKind.MALFORMED
            )
        if gap + length > count - end:
            raise Inconsistent("more reports are left out than there are")
        codes[end + gap : end + gap + length] = code
        end, before = end + gap + length, code
    return codes


def _runs(codes: Codes) -> Iterator[tuple[int, int, int]]:
    """Yield first place, length and code of every maximal run of one reason."""
    starts = np.concatenate([[0], np.flatnonzero(codes[1:] != codes[:-1]) + 1]) if codes.size else np.zeros(0, int)
    lengths = np.diff(starts, append=codes.size)
    for at in np.flatnonzero(codes[starts] != WOULD_COUNT):
        yield int(starts[at]), int(lengths[at]), int(codes[starts[at]])


def _varint(number: int) -> bytes:
    """Encode seven bits a byte, the lowest first (LEB128); the top bit says that more follow."""
    pieces = bytearray()
    while number >= _MORE:
        pieces.append(number % _MORE | _MORE)
        number //= _MORE
    pieces.append(number)
    return bytes(pieces)


class _Varints:
    """Parse numbers below 2^32 in their shortest form."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def ended(self) -> bool:
        return self._at == len(self._data)

    def byte(self) -> int:
        if self.ended:
            raise ProtocolError("a list of reports left out ends inside a run", kind=ErrorKind.TRUNCATED)
        self._at += 1
        return self._data[self._at - 1]

    def number(self) -> int:
        value = shift = 0
        while (piece := self.byte()) & _MORE:
            value |= (piece % _MORE) << shift
            shift += 7
            if shift > 28:
                raise OutOfRange("a number in a list of reports left out is too long")
        value |= piece << shift
        if value >= 2**32 or (piece == 0 and shift):
            raise OutOfRange("a number in a list of reports left out is not in its shortest form")
        return value

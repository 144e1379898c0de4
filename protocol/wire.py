"""The canonical encoding: big-endian integers and length-prefixed bytes in a fixed order (SPEC.md §1).

Every message has exactly one encoding, so that the bytes a device seals are the bytes a helper authenticates, and a
digest of the bytes is a digest of the meaning.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Self, TypeVar

from protocol.errors import ErrorKind, InvalidValue, OutOfRange, ProtocolError, WireEnum

# SHA-256.
HASH_SIZE = 32
MAX_BYTES = 2**32 - 1

T = TypeVar("T")
N = TypeVar("N", bound=WireEnum)


class Writer:
    """Build one message. Methods chain; `done` returns the bytes."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def uint(self, value: int, size: int) -> Self:
        """Append an unsigned integer in exactly `size` bytes."""
        if not (0 <= value < 1 << (8 * size)):
            raise OutOfRange(f"{value} does not fit {size} bytes")
        self._parts.append(value.to_bytes(size, "big"))
        return self

    def fixed(self, value: bytes, size: int) -> Self:
        """Append bytes whose length both sides know."""
        if len(value) != size:
            raise InvalidValue(f"expected {size} bytes, got {len(value)}")
        self._parts.append(value)
        return self

    def blob(self, value: bytes, prefix: int = 4) -> Self:
        """Append bytes behind their length in `prefix` bytes."""
        self.uint(len(value), prefix)
        self._parts.append(value)
        return self

    def text(self, value: str) -> Self:
        """Append UTF-8 behind a two-byte length."""
        try:
            return self.blob(value.encode(), 2)
        except UnicodeEncodeError:
            raise InvalidValue("text holds a lone surrogate, which UTF-8 cannot encode") from None

    def done(self) -> bytes:
        return b"".join(self._parts)


class Reader:
    """Parse one message in the order it was built. Every fault raises `ProtocolError`."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def uint(self, size: int) -> int:
        return int.from_bytes(self.fixed(size), "big")

    def fixed(self, size: int) -> bytes:
        end = self._at + size
        if end > len(self._data):
            raise ProtocolError(
                f"message ends after {len(self._data)} bytes, inside a field that ends at {end}",
                kind=ErrorKind.TRUNCATED,
            )
        piece = self._data[self._at : end]
        self._at = end
        return piece

    def blob(self, prefix: int = 4, *, limit: int = MAX_BYTES) -> bytes:
        """Return bytes behind a length of `prefix` bytes. Reject a length above `limit` before copying anything."""
        size = self.uint(prefix)
        if size > limit:
            raise ProtocolError(f"a field of {size} bytes is over the limit of {limit}", kind=ErrorKind.TOO_LARGE)
        return self.fixed(size)

    def text(self, *, limit: int = 65535) -> str:
        """Return strict UTF-8 behind a two-byte length."""
        try:
            return self.blob(2, limit=limit).decode()
        except UnicodeDecodeError:
            raise ProtocolError("text is not UTF-8") from None

    def choice(self, choices: Sequence[T]) -> T:
        """Return one of a closed list by its index, one byte."""
        code = self.uint(1)
        if code >= len(choices):
            raise OutOfRange(f"{code} is none of {len(choices)} choices")
        return choices[code]

    def member(self, kind: type[N]) -> N:
        """Return the member of a `WireEnum` by its number, one byte."""
        number = self.uint(1)
        for member in kind:
            if member.number == number:
                return member
        raise OutOfRange(f"{number} is the number of no {kind.__name__}")

    def finish(self) -> None:
        """Reject trailing bytes, or one message would have many encodings. Call last."""
        if self._at != len(self._data):
            raise ProtocolError(
                f"{len(self._data) - self._at} bytes left over after the message", kind=ErrorKind.TRAILING_BYTES
            )


class TaggedHash:
    """SHA-256 with domain separation: a label, then length-prefixed parts, so that no two uses can collide."""

    def __init__(self, label: str) -> None:
        self._state = hashlib.sha256(Writer().text(f"trefoil/1 {label}").done())

    def part(self, part: bytes) -> Self:
        return self.pieces(len(part), (part,))

    def pieces(self, size: int, pieces: Iterable[bytes]) -> Self:
        """Append one part of `size` bytes that need not be in memory at once."""
        self._state.update(size.to_bytes(8, "big"))
        for piece in pieces:
            self._state.update(piece)
        return self

    def digest(self) -> bytes:
        return self._state.digest()


def tagged_hash(label: str, *parts: bytes) -> bytes:
    state = TaggedHash(label)
    for part in parts:
        state.part(part)
    return state.digest()

"""The one encoding: big-endian integers and length-prefixed bytes, in a fixed order, with nothing left over.

Every message has exactly one encoding, so that the bytes a device seals are the bytes a helper authenticates, and a
digest of the bytes is a digest of the meaning.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Self, TypeVar

from protocol.errors import ProtocolError
from protocol.numbered import Numbered

# What every hash has.
HASH_SIZE = 32
MAX_BYTES = 2**32 - 1

T = TypeVar("T")
N = TypeVar("N", bound=Numbered)


class Writer:
    """Builds one message. Methods chain; `done` gives the bytes."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def uint(self, value: int, size: int) -> Self:
        """An unsigned integer in exactly `size` bytes."""
        if not (0 <= value < 1 << (8 * size)):
            raise ProtocolError(f"{value} does not fit {size} bytes")
        self._parts.append(value.to_bytes(size, "big"))
        return self

    def fixed(self, value: bytes, size: int) -> Self:
        """Bytes whose length both sides know."""
        if len(value) != size:
            raise ProtocolError(f"expected {size} bytes, got {len(value)}")
        self._parts.append(value)
        return self

    def blob(self, value: bytes, prefix: int = 4) -> Self:
        """Bytes behind a length of `prefix` bytes."""
        self.uint(len(value), prefix)
        self._parts.append(value)
        return self

    def text(self, value: str) -> Self:
        """UTF-8 behind a two-byte length."""
        try:
            return self.blob(value.encode(), 2)
        except UnicodeEncodeError:
            raise ProtocolError("text holds half a character, which UTF-8 cannot express") from None

    def done(self) -> bytes:
        """The message."""
        return b"".join(self._parts)


class Reader:
    """Takes one message apart in the order it was built. Whatever is wrong with it is a `ProtocolError`."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def uint(self, size: int) -> int:
        """An unsigned integer of `size` bytes."""
        return int.from_bytes(self.fixed(size), "big")

    def fixed(self, size: int) -> bytes:
        """The next `size` bytes."""
        end = self._at + size
        if end > len(self._data):
            raise ProtocolError(f"message ends after {len(self._data)} bytes, inside a field that ends at {end}")
        piece = self._data[self._at : end]
        self._at = end
        return piece

    def blob(self, prefix: int = 4, *, limit: int = MAX_BYTES) -> bytes:
        """Bytes behind a length of `prefix` bytes; a length above `limit` is refused before anything is copied."""
        size = self.uint(prefix)
        if size > limit:
            raise ProtocolError(f"a field of {size} bytes is over the limit of {limit}")
        return self.fixed(size)

    def text(self, *, limit: int = 65535) -> str:
        """UTF-8 behind a two-byte length. Strict: bytes that are not UTF-8 are refused."""
        try:
            return self.blob(2, limit=limit).decode()
        except UnicodeDecodeError:
            raise ProtocolError("text is not UTF-8") from None

    def choice(self, choices: Sequence[T]) -> T:
        """One of a closed list, by its place there, in one byte."""
        code = self.uint(1)
        if code >= len(choices):
            raise ProtocolError(f"{code} is none of {len(choices)} choices")
        return choices[code]

    def numbered(self, kind: type[N]) -> N:
        """A member of a closed vocabulary, by its number, in one byte."""
        number = self.uint(1)
        for member in kind:
            if member.number == number:
                return member
        raise ProtocolError(f"{number} is the number of no {kind.__name__}")

    def finish(self) -> None:
        """Call last: bytes left over are an error, or one message would have many encodings."""
        if self._at != len(self._data):
            raise ProtocolError(f"{len(self._data) - self._at} bytes left over after the message")


class TaggedHash:
    """SHA-256 under a label of its own, over length-prefixed parts, so that no two uses of the hash can collide."""

    def __init__(self, label: str) -> None:
        self._state = hashlib.sha256(Writer().text(f"trefoil/1 {label}").done())

    def part(self, part: bytes) -> Self:
        """Bytes at hand."""
        return self.pieces(len(part), (part,))

    def pieces(self, size: int, pieces: Iterable[bytes]) -> Self:
        """A part of `size` bytes that need not be in memory at one time."""
        self._state.update(size.to_bytes(8, "big"))
        for piece in pieces:
            self._state.update(piece)
        return self

    def digest(self) -> bytes:
        """The hash of all parts so far."""
        return self._state.digest()


def tagged_hash(label: str, *parts: bytes) -> bytes:
    """The `TaggedHash` of parts that are all at hand."""
    state = TaggedHash(label)
    for part in parts:
        state.part(part)
    return state.digest()

"""Structured fields (RFC 9651), as far as the standard's headers need them: dictionaries of items and inner lists.

A parser that refuses everything the grammar does not have. Parameters are read, so that bad ones are noticed, and
dropped: no header of ours gives them a meaning.
"""

from __future__ import annotations

import base64
import binascii
import re
from typing import NamedTuple, TypeVar
from urllib.parse import unquote_to_bytes

from protocol.errors import ProtocolError

MAX_LENGTH = 65_536
_KEY = re.compile(r"[a-z*][a-z0-9_\-.*]*")
_NUMBER = re.compile(r"(-?)([0-9]+)(?:\.([0-9]+))?(\.?)")
_DATE = re.compile(r"@(-?[0-9]{1,15})(?![0-9.])")
_DISPLAY = re.compile(r'%"((?:[\x20\x21\x23\x24\x26-\x7e]|%[0-9a-f]{2})*)"')
_STRING = re.compile(r'"((?:[\x20\x21\x23-\x5b\x5d-\x7e]|\\["\\])*)"')
_TOKEN = re.compile(r"[A-Za-z*][!#$%&'*+\-.^_`|~0-9A-Za-z:/]*")
_BYTES = re.compile(r":([A-Za-z0-9+/=]*):")
_BOOLEAN = re.compile(r"\?([01])")


class Token(NamedTuple):
    """A bare word, which is not a string."""

    word: str


class Date(NamedTuple):
    """A moment in seconds since 1970, which is not a number."""

    moment: int


class DisplayString(NamedTuple):
    """Text for people, which is not a string."""

    text: str


BareItem = int | float | str | bool | bytes | Token | Date | DisplayString
Member = BareItem | tuple[BareItem, ...]
T = TypeVar("T")


def parse_dictionary(text: str) -> dict[str, Member]:
    """The members of a dictionary field (§4.2.2); an inner list is a tuple. The last of equal keys counts."""
    if len(text) > MAX_LENGTH:
        raise ProtocolError("the header is too long")
    return _Parser(text).dictionary()


class _Parser:
    """One pass over the text, in the order of the grammar of §4.2."""

    def __init__(self, text: str) -> None:
        self._text = text.strip(" ")
        self._at = 0

    def dictionary(self) -> dict[str, Member]:
        members: dict[str, Member] = {}
        while self._at < len(self._text):
            key = self._key()
            # A key alone is true.
            value: Member = self._member() if self._skip("=") else True
            self._parameters()
            members.pop(key, None)
            members[key] = value
            self._spaces(" \t")
            if self._at == len(self._text):
                break
            self._expect(",")
            self._spaces(" \t")
            if self._at == len(self._text):
                raise self._error("a member after the comma")
        return members

    def _member(self) -> Member:
        return self._inner_list() if self._skip("(") else self._bare_item()

    def _inner_list(self) -> tuple[BareItem, ...]:
        items: list[BareItem] = []
        while True:
            self._spaces(" ")
            if self._skip(")"):
                return tuple(items)
            items.append(self._bare_item())
            self._parameters()
            if self._peek() not in (" ", ")"):
                raise self._error("a space or a closing bracket")

    def _parameters(self) -> None:
        while self._skip(";"):
            self._spaces(" ")
            self._key()
            if self._skip("="):
                self._bare_item()

    def _bare_item(self) -> BareItem:
        first = self._peek()
        if first and first in "-0123456789":
            return self._number()
        if first == "@":
            return Date(int(self._take(_DATE, "a date")[1]))
        if first == "%":
            return self._display_string()
        if first == '"':
            return re.sub(r"\\(.)", r"\1", self._take(_STRING, "a string")[1])
        if first == ":":
            return self._bytes()
        if first == "?":
            return self._take(_BOOLEAN, "a boolean")[1] == "1"
        return Token(self._take(_TOKEN, "an item")[0])

    def _display_string(self) -> DisplayString:
        encoded = self._take(_DISPLAY, "a display string")[1]
        try:
            return DisplayString(unquote_to_bytes(encoded).decode("utf-8"))
        except UnicodeDecodeError:
            raise self._error("text in UTF-8") from None

    def _number(self) -> int | float:
        sign, whole, fraction, dot = self._take(_NUMBER, "a number").groups()
        if dot:
            raise self._error("digits after the point")
        if fraction is None:
            if len(whole) > 15:
                raise self._error("at most 15 digits")
            return int(sign + whole)
        if len(whole) > 12 or len(fraction) > 3:
            raise self._error("at most 12 digits before the point and 3 after it")
        return float(f"{sign}{whole}.{fraction}")

    def _bytes(self) -> bytes:
        encoded = self._take(_BYTES, "a byte sequence")[1]
        try:
            return base64.b64decode(encoded + "=" * (-len(encoded) % 4), validate=True)
        except binascii.Error:
            raise self._error("base64") from None

    def _key(self) -> str:
        return str(self._take(_KEY, "a key")[0])

    def _take(self, pattern: re.Pattern[str], what: str) -> re.Match[str]:
        found = pattern.match(self._text, self._at)
        if found is None:
            raise self._error(what)
        self._at = found.end()
        return found

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _skip(self, character: str) -> bool:
        if self._peek() == character:
            self._at += 1
            return True
        return False

    def _expect(self, character: str) -> None:
        if not self._skip(character):
            raise self._error(repr(character))

    def _spaces(self, characters: str) -> None:
        while self._peek() and self._peek() in characters:
            self._at += 1

    def _error(self, expected: str) -> ProtocolError:
        return ProtocolError(f"not a structured dictionary: expected {expected} at position {self._at}")

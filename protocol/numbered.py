"""Closed vocabularies whose members have a number on the wire.

The number is written beside each member, so that the order in which they stand in the source says nothing.
"""

from __future__ import annotations

from enum import Enum
from typing import Self


class Numbered(Enum):
    """Members are declared as `NAME = number, "text"`: `number` travels, `value` is what a person reads."""

    number: int

    def __new__(cls, number: int, text: str) -> Self:
        """A member; a number or a text that another member has is a mistake in the source."""
        if any(number == other.number or text == other.value for other in cls):
            raise TypeError(f"{cls.__name__} has {number} or {text!r} twice")
        member = object.__new__(cls)
        member._value_ = text
        member.number = number
        return member

    @classmethod
    def of_text(cls, text: str) -> Self:
        """The member that a person reads as `text`."""
        return next(member for member in cls if member.value == text)

    @classmethod
    def ascending(cls) -> tuple[Self, ...]:
        """All members by number: the order of any list that has one entry for each."""
        return tuple(sorted(cls, key=lambda member: member.number))

"""Errors and rejections, in closed vocabularies that programs match on (SPEC.md §3).

- `TrefoilError`: the base of every error that a person can act on. Its `ErrorKind` is stable, its sentence may improve.
- `Rejection`: the reasons for which a helper drops one report. They are counted, and the counts are in the answer.
- `WireEnum`: the base of every enum that travels. The number stands beside each member, so source order means nothing.
- `printable`: text from a peer or a client, made safe for a terminal.
"""

from __future__ import annotations

from enum import Enum
from typing import Self


class ErrorKind(Enum):
    """What went wrong, for programs and tests. Sentences may improve; a kind is stable and `--json` reports it."""

    # What a person or a peer passed in.
    INVALID_VALUE = "invalid value"
    OUT_OF_RANGE = "out of range"
    WRONG_TYPE = "wrong type"
    MALFORMED = "malformed"
    TRUNCATED = "truncated"
    TRAILING_BYTES = "trailing bytes"
    TOO_LARGE = "too large"
    TOO_FEW = "too few"
    MISSING_FIELD = "missing field"
    UNKNOWN_FIELD = "unknown field"
    UNKNOWN_NAME = "unknown name"
    UNKNOWN_VERSION = "unknown version"
    DUPLICATE = "duplicate"
    INCONSISTENT = "inconsistent"
    MISSING_OPTION = "missing option"
    CONFLICTING_OPTIONS = "conflicting options"
    MISSING_DEPENDENCY = "missing dependency"
    # Files and disks.
    FILE_MISSING = "file missing"
    FILE_EXISTS = "file exists"
    FILE_UNREADABLE = "file unreadable"
    FILE_UNWRITABLE = "file unwritable"
    FILE_PERMISSIONS = "file permissions"
    FILE_DAMAGED = "file damaged"
    WRONG_FILE = "wrong file"
    NO_SPACE = "no space"
    # Keys, signatures and proofs.
    BAD_SIGNATURE = "bad signature"
    BAD_PROOF = "bad proof"
    WRONG_KEY = "wrong key"
    WRONG_HELPER_SET = "wrong helper set"
    NOT_OPENED = "not opened"
    EXPIRED = "expired"
    NOT_YET_VALID = "not yet valid"
    # Queries, helpers and devices at work.
    NOT_REGISTERED = "not registered"
    FORBIDDEN = "forbidden"
    ALREADY_COUNTED = "already counted"
    WITHDRAWN = "withdrawn"
    REFUSED = "refused"
    ABORTED = "aborted"
    DISPUTED = "disputed"
    FENCED = "fenced"
    ROLLED_BACK = "rolled back"
    BUSY = "busy"
    UNAVAILABLE = "unavailable"
    UNREACHABLE = "unreachable"
    TIMEOUT = "timeout"
    CLOCK = "clock"
    DISABLED = "disabled"
    INTERRUPTED = "interrupted"


class TrefoilError(Exception):
    """An error that a person can act on: the message says what is wrong, the hint what to do about it.

    `retryable`: True if the same call may succeed later, False if it never will, None if something must change first.

    >>> try:
    ...     trefoil.BatchReader("nowhere.batch")
    ... except trefoil.TrefoilError as error:
    ...     print(error.kind.name)
    FILE_UNREADABLE
    """

    retryable: bool | None = None
    kind = ErrorKind.INVALID_VALUE

    def __init__(self, message: str, hint: str = "", *, kind: ErrorKind | None = None) -> None:
        super().__init__(message)
        self.hint = hint
        if kind is not None:
            self.kind = kind

    @property
    def hint(self) -> str:
        return self._hint

    @hint.setter
    def hint(self, text: str) -> None:
        self._hint = text
        # A script or a notebook that does not catch this error shows it too (PEP 678).
        self.__notes__ = [f"hint:  {text}"] if text else []


class HelperError(TrefoilError):
    """An error attributed to one helper: `party` is 0, 1 or 2, or None if it cannot be attributed to one alone."""

    def __init__(
        self, message: str, hint: str = "", *, party: int | None = None, kind: ErrorKind | None = None
    ) -> None:
        super().__init__(message, hint, kind=kind)
        self.party = party


class ProtocolError(TrefoilError):
    """Input from outside that violates the specification."""

    kind = ErrorKind.MALFORMED


class InvalidValue(ProtocolError):
    """A value that is none of those that the specification allows."""

    kind = ErrorKind.INVALID_VALUE


class OutOfRange(ProtocolError):
    """A number outside the range that the specification allows."""

    kind = ErrorKind.OUT_OF_RANGE


class Inconsistent(ProtocolError):
    """Two values that the specification does not allow together."""

    kind = ErrorKind.INCONSISTENT


class WireEnum(Enum):
    """A closed enum with members `NAME = number, "text"`: `number` is its encoding, `value` is for people."""

    number: int

    def __new__(cls, number: int, text: str) -> Self:
        if any(number == other.number or text == other.value for other in cls):
            raise TypeError(f"{cls.__name__} has {number} or {text!r} twice")
        member = object.__new__(cls)
        member._value_ = text
        member.number = number
        return member

    @classmethod
    def of_text(cls, text: str) -> Self:
        return next(member for member in cls if member.value == text)

    @classmethod
    def by_number(cls) -> tuple[Self, ...]:
        """Return all members in ascending order of number: the order of every list with one entry per member."""
        return tuple(sorted(cls, key=lambda member: member.number))


class Rejection(WireEnum):
    """Why a helper dropped a report. The answer carries the counts of each helper, so that none can censor silently."""

    MALFORMED = 0, "malformed"
    UNKNOWN_VERSION = 1, "unknown version"
    UNKNOWN_SUITE = 2, "unknown cipher suite"
    UNKNOWN_SCHEMA = 3, "unknown schema"
    WRONG_HELPER_SET = 4, "made for another helper set"
    UNKNOWN_KEY = 5, "sealed to an unknown key"
    EXPIRED_KEY = 6, "sealed to a key outside its validity"
    EXPIRED = 7, "older than the helpers remember"
    FROM_THE_FUTURE = 8, "dated in the future"
    WRONG_SITE = 9, "made for another site"
    WRONG_CALLER = 10, "made for another caller"
    WRONG_SHAPE = 11, "other suite, buckets, unit, cap or side query"
    WRONG_MODE = 12, "debug report in a real query, or the reverse"
    NOISE_TOO_SMALL = 13, "paid for more noise than the query adds"
    UNOPENABLE = 14, "payload does not open under this header"
    WRONG_COMMITMENT = 15, "seeds differ from the commitments"
    WRONG_BODY = 16, "body differs from its hash or leaves the field"
    DUPLICATE = 17, "twice in the batch"
    SEEN = 18, "already spent"
    INVALID = 19, "numbers outside the cap"
    TOO_LITTLE_LEFT = 20, "too little left"


class Rejected(ProtocolError):
    """One report is dropped for one reason; the rest of the batch is not affected."""

    kind = ErrorKind.REFUSED

    def __init__(self, rejection: Rejection, detail: str = "") -> None:
        super().__init__(f"{rejection.value}: {detail}" if detail else rejection.value)
        self.rejection = rejection


MAX_PRINTABLE = 2000
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def printable(text: str, limit: int = MAX_PRINTABLE) -> str:
    """Return `text` cut at `limit` characters, with every unprintable one replaced.

    A terminal executes escape sequences, so text from a peer or a client passes through here before it is displayed.
    """
    safe = "".join(character if character.isprintable() else _REPLACEMENT for character in text[:limit])
    return safe if len(text) <= limit else safe + "…"

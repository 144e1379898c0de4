"""What can go wrong, in closed vocabularies: one base error for people, one enum of reasons for dropping a report."""

from __future__ import annotations

from enum import Enum


class TrefoilError(Exception):
    """Something a person can act on. The message says what is wrong, the hint what to do about it."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class ProtocolError(TrefoilError):
    """Bytes or values from outside that are not what the specification says."""


class Rejection(Enum):
    """Why a helper dropped a report. Counted per helper and shown in the answer, so that none can censor silently."""

    MALFORMED = "malformed"
    UNKNOWN_VERSION = "unknown version"
    UNKNOWN_SUITE = "unknown cipher suite"
    UNKNOWN_SCHEMA = "unknown schema"
    WRONG_HELPER_SET = "made for another helper set"
    UNKNOWN_KEY = "sealed to an unknown key"
    EXPIRED_KEY = "sealed to a key outside its validity"
    EXPIRED = "older than the helpers remember"
    FROM_THE_FUTURE = "dated in the future"
    WRONG_SITE = "made for another site"
    WRONG_CALLER = "made for another caller"
    WRONG_SHAPE = "other buckets, unit or side query"
    WRONG_MODE = "debug report in a real query, or the reverse"
    NOISE_TOO_SMALL = "paid for more noise than the query adds"
    UNOPENABLE = "payload does not open under this header"
    WRONG_COMMITMENT = "seeds differ from the commitments"
    WRONG_BODY = "body differs from its hash or leaves the field"
    DUPLICATE = "twice in the batch"
    SEEN = "already spent"


class Rejected(ProtocolError):
    """One report is refused for one reason; the batch goes on without it."""

    def __init__(self, rejection: Rejection, detail: str = "") -> None:
        super().__init__(f"{rejection.value}: {detail}" if detail else rejection.value)
        self.rejection = rejection

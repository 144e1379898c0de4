"""What can go wrong, in closed vocabularies: one base error for people, one enum of reasons for dropping a report."""

from __future__ import annotations

from protocol.numbered import Numbered


class TrefoilError(Exception):
    """Something a person can act on. The message says what is wrong, the hint what to do about it.

    `again` says whether trying the same again can help: True, False, or None where something must be mended first.
    """

    again: bool | None = None

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class Blamed(TrefoilError):
    """Something that one helper is the reason of: `party` is 0, 1 or 2, or None where it is not one alone."""

    def __init__(self, message: str, hint: str = "", *, party: int | None = None) -> None:
        super().__init__(message, hint)
        self.party = party


class ProtocolError(TrefoilError):
    """Bytes or values from outside that are not what the specification says."""


class Rejection(Numbered):
    """Why a helper dropped a report. Counted per helper and shown in the answer, so that none can censor silently."""

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


class Rejected(ProtocolError):
    """One report is refused for one reason; the batch goes on without it."""

    def __init__(self, rejection: Rejection, detail: str = "") -> None:
        super().__init__(f"{rejection.value}: {detail}" if detail else rejection.value)
        self.rejection = rejection

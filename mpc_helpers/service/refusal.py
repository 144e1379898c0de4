"""Why a request is not served, whatever the query. Each trouble has one HTTP status (`server`)."""

from __future__ import annotations

from enum import Enum

from protocol.errors import TrefoilError


class Trouble(Enum):
    """Why a request is refused, whatever the query."""

    STRANGER = "stranger"
    UNKNOWN = "unknown"
    CHANGED = "changed"
    NOT_YET = "not yet"
    TOO_LARGE = "too large"
    UNWILLING = "unwilling"
    BUSY = "busy"
    ENDED = "ended"
    VOTED = "voted for"
    DISK = "disk"


class Refusal(TrefoilError):
    """A request this helper does not serve."""

    def __init__(self, trouble: Trouble, message: str, hint: str = "") -> None:
        super().__init__(message, hint)
        self.trouble = trouble

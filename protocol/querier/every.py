"""How long a period of a series is. Light enough for a command line."""

from __future__ import annotations

from enum import Enum

from protocol.seconds import DAY

# 1 January 1970 was a Thursday; weeks begin on Mondays, as in ISO 8601.
_FIRST_MONDAY = 4 * DAY


class Every(Enum):
    """A day or a week, UTC."""

    DAY = "day"
    WEEK = "week"

    def start_of(self, time: int) -> int:
        """The first second of the period that `time` is in."""
        first = _FIRST_MONDAY if self is Every.WEEK else 0
        return time - (time - first) % self.length

    @property
    def length(self) -> int:
        """In seconds."""
        return 7 * DAY if self is Every.WEEK else DAY

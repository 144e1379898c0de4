"""Log lines that a stranger could cause by the thousand: one a minute of each kind, with how many were left out."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

SECONDS = 60.0


class Seldom(logging.Filter):
    """A filter for a logger. Lines are of one kind if they are written with the same format, whatever is filled in."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        # By format: when the last line was written, and how many were left out since.
        self._written: dict[str, tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the line is written; if so, it says how many like it were not."""
        now, kind = self._clock(), str(record.msg)
        last, left_out = self._written.get(kind, (-SECONDS, 0))
        if now < last + SECONDS:
            self._written[kind] = (last, left_out + 1)
            return False
        self._written[kind] = (now, 0)
        if left_out:
            record.msg = f"{kind} ({left_out} more like this since the last such line)"
        return True

"""What a helper writes to its log: one line an event, for people or for machines. No secret is ever handed to it."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Mapping
from enum import Enum
from typing import TextIO

from protocol.text import printable

LONGEST = 4000


class LogFormat(Enum):
    """How lines look."""

    TEXT = "text"
    JSON = "json"


class LogLevel(Enum):
    """From which level on lines are written."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def fields(**values: object) -> dict[str, dict[str, object]]:
    """For `extra`: what a line says, by name, for whoever reads it with a program."""
    return {"fields": values}


class TextLines(logging.Formatter):
    """A line a person reads. Words of others may be in it: no control character of theirs reaches a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        """The line; of a defect also where it is."""
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(record.created))
        line = f"{when} {record.levelname} {record.name} {printable(record.getMessage(), LONGEST)}"
        return line if record.exc_info is None else f"{line}\n{self.formatException(record.exc_info)}"


class JsonLines(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """The object; of a defect also where it is."""
        known = getattr(record, "fields", {})
        line = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage()[:LONGEST],
            **(known if isinstance(known, Mapping) else {}),
        }
        if record.exc_info is not None:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def start_logging(level: LogLevel, how: LogFormat, stream: TextIO | None = None) -> None:
    """Run once by the daemon: all lines to standard error."""
    handler = logging.StreamHandler(stream or sys.stderr)
    match how:
        case LogFormat.TEXT:
            handler.setFormatter(TextLines())
        case LogFormat.JSON:
            handler.setFormatter(JsonLines())
    logging.basicConfig(level=level.value.upper(), handlers=[handler], force=True)

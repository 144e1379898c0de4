"""The exceptions of the standard's interface, under the standard's names, so that a scenario can expect them."""

from __future__ import annotations

from protocol.errors import ErrorKind, TrefoilError


class StandardError(TrefoilError):
    """An error that W3C Attribution Level 1 reports to the caller. It never depends on the person's data."""

    # As the page's own error is called.
    name: str

    @property
    def standard_name(self) -> str | dict[str, str]:
        """Return this error as scenario files write it."""
        return self.name


class RangeError(StandardError):
    """An option is outside the range that the standard or the device's limits allow."""

    name = "RangeError"
    kind = ErrorKind.OUT_OF_RANGE


class ReferenceError(StandardError):  # noqa: A001 - the standard's name; always used through this module
    """The aggregation service is not one that this device knows."""

    name = "ReferenceError"
    kind = ErrorKind.UNKNOWN_NAME


class DOMException(StandardError):
    """An error that the Web platform tells apart by a name."""

    def __init__(self, name: str, message: str, hint: str = "", *, kind: ErrorKind | None = None) -> None:
        super().__init__(message, hint, kind=kind)
        self.name = name

    @property
    def standard_name(self) -> str | dict[str, str]:
        return {"error": "DOMException", "name": self.name}


class DatabaseError(TrefoilError):
    """A device database that is damaged, foreign or too new. The file is left unchanged."""

    kind = ErrorKind.FILE_DAMAGED


class DatabaseUnavailable(TrefoilError):
    """The disk or another process does not let the device database be used now: retry later."""

    kind = ErrorKind.UNAVAILABLE

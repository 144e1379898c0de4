"""The exceptions of the standard's interface, under the standard's names, so that a scenario can expect them."""

from __future__ import annotations

from protocol.errors import TrefoilError


class StandardError(TrefoilError):
    """An error that W3C Attribution Level 1 tells the caller about. It never depends on the person's data."""

    @property
    def standard_name(self) -> str | dict[str, str]:
        """How scenario files write this error."""
        return type(self).__name__


class RangeError(StandardError):
    """An option is outside the range that the standard or the device's limits allow."""


class ReferenceError(StandardError):  # noqa: A001 - the standard's name; always used through this module
    """The aggregation service is not one that this device knows."""


class DOMException(StandardError):
    """An error that the Web platform tells apart by a name."""

    def __init__(self, name: str, message: str, hint: str = "") -> None:
        super().__init__(message, hint)
        self.name = name

    @property
    def standard_name(self) -> str | dict[str, str]:
        """How scenario files write this error."""
        return {"error": "DOMException", "name": self.name}


class DatabaseError(TrefoilError):
    """A device database that is damaged, foreign or too new. It is left as it was found."""


class DatabaseUnavailable(TrefoilError):
    """The disk or another process does not let the device database be used now."""


class DatabaseBusy(DatabaseUnavailable):
    """The same, noticed before anything was looked at: the call has found nothing that it could owe for."""

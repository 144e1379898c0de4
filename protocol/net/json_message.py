"""Strict parsing of JSON from a sender that may be malicious or mistaken.

Python's errors about a missing key or a wrong type are for programmers; here every error names the field.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence

from protocol.errors import ErrorKind, OutOfRange, ProtocolError


def decode_json(data: bytes) -> object:
    """Return the value in `data`. Reject NaN and repeated fields, which Python would accept."""
    try:
        value: object = json.loads(data.decode(), parse_constant=_no_constant, object_pairs_hook=_no_repeats)
    except ProtocolError:
        raise
    except RecursionError:
        raise ProtocolError("the JSON is nested too deeply", kind=ErrorKind.TOO_LARGE) from None
    except ValueError:
        raise ProtocolError("this is not JSON", kind=ErrorKind.MALFORMED) from None
    return value


def _no_constant(_: str) -> object:
    raise OutOfRange("the JSON has NaN or an infinity")


def _no_repeats(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ProtocolError("the JSON has a field twice", kind=ErrorKind.DUPLICATE)
    return fields


class JsonObject:
    """The fields of a JSON object, which errors call `what`."""

    def __init__(self, value: object, what: str) -> None:
        if not isinstance(value, dict):
            raise ProtocolError(f"the {what} is not an object", kind=ErrorKind.WRONG_TYPE)
        self._fields: dict[str, object] = value
        self._what = what

    def expect(self, names: Collection[str]) -> None:
        """Reject an object whose fields are not exactly `names`."""
        for name in sorted(set(names) - set(self._fields)):
            raise ProtocolError(f"the {self._what} lacks the field {name}", kind=ErrorKind.MISSING_FIELD)
        if len(self._fields) != len(names):
            raise ProtocolError(
                f"the {self._what} has a field that is none of {', '.join(sorted(names))}", kind=ErrorKind.UNKNOWN_FIELD
            )

    def value(self, name: str) -> object:
        if name not in self._fields:
            raise ProtocolError(f"the {self._what} lacks the field {name}", kind=ErrorKind.MISSING_FIELD)
        return self._fields[name]

    def text(self, name: str, limit: int = 2**16) -> str:
        """Return a text of at most `limit` characters."""
        value = self.value(name)
        if not isinstance(value, str) or len(value) > limit:
            raise self._fault(name, f"a text of at most {limit} characters")
        return value

    def whole(self, name: str, most: int = 2**63 - 1) -> int:
        """Return an integer from 0 to `most`. Reject true, an integer to Python, and floats, which pass comparisons."""
        value = self.value(name)
        if isinstance(value, bool) or not isinstance(value, int) or not (0 <= value <= most):
            raise self._fault(name, f"a whole number from 0 to {most}")
        return value

    def hexadecimal(self, name: str) -> bytes:
        value = self.value(name)
        try:
            return bytes.fromhex(value if isinstance(value, str) else "-")
        except ValueError:
            raise self._fault(name, "hexadecimal") from None

    def hexadecimals(self, name: str) -> tuple[bytes, ...]:
        return tuple(JsonObject({name: entry}, self._what).hexadecimal(name) for entry in self.items(name))

    def items(self, name: str) -> list[object]:
        value = self.value(name)
        if not isinstance(value, list):
            raise self._fault(name, "a list")
        return value

    def fields(self) -> dict[str, object]:
        """Return all fields, where the names are data too."""
        return dict(self._fields)

    def _fault(self, name: str, wanted: str) -> ProtocolError:
        return ProtocolError(f"the {self._what} is malformed: {name} is not {wanted}", kind=ErrorKind.WRONG_TYPE)

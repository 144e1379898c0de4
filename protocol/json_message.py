"""JSON from someone who may be bad or mistaken: a value and its fields, or an error in plain words.

What Python says about a missing key or a wrong type is for programmers; here every fault names the field instead.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence

from protocol.errors import ProtocolError


def decode_json(data: bytes) -> object:
    """The value in `data`. Python would also take NaN, and the last of two fields with one name."""
    try:
        value: object = json.loads(data.decode(), parse_constant=_no_constant, object_pairs_hook=_no_repeats)
    except ProtocolError:
        raise
    except RecursionError:
        raise ProtocolError("the JSON is nested too deeply") from None
    except ValueError:
        raise ProtocolError("this is not JSON") from None
    return value


def _no_constant(_: str) -> object:
    raise ProtocolError("the JSON has a number that JSON does not know")


def _no_repeats(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ProtocolError("the JSON has a field twice")
    return fields


class JsonObject:
    """The fields of a JSON object. `what` is what errors call it."""

    def __init__(self, value: object, what: str) -> None:
        if not isinstance(value, dict):
            raise ProtocolError(f"the {what} is not an object")
        self._fields: dict[str, object] = value
        self._what = what

    def expect(self, names: Collection[str]) -> None:
        """Refuse a field that is missing, or one more."""
        for name in sorted(set(names) - set(self._fields)):
            raise ProtocolError(f"the {self._what} lacks the field {name}")
        if len(self._fields) != len(names):
            raise ProtocolError(f"the {self._what} has a field that is none of {', '.join(sorted(names))}")

    def value(self, name: str) -> object:
        """Whatever stands there."""
        if name not in self._fields:
            raise ProtocolError(f"the {self._what} lacks the field {name}")
        return self._fields[name]

    def text(self, name: str, limit: int = 2**16) -> str:
        """A text of at most `limit` characters."""
        value = self.value(name)
        if not isinstance(value, str) or len(value) > limit:
            raise self._fault(name, f"a text of at most {limit} characters")
        return value

    def whole(self, name: str, most: int = 2**63 - 1) -> int:
        """A whole number from 0 to `most`. JSON's true is an integer to Python, and a float would pass comparisons."""
        value = self.value(name)
        if isinstance(value, bool) or not isinstance(value, int) or not (0 <= value <= most):
            raise self._fault(name, f"a whole number from 0 to {most}")
        return value

    def hexadecimal(self, name: str) -> bytes:
        """Bytes in hexadecimal."""
        value = self.value(name)
        try:
            return bytes.fromhex(value) if isinstance(value, str) else self._no_hexadecimal(name)
        except ValueError:
            return self._no_hexadecimal(name)

    def hexadecimals(self, name: str) -> tuple[bytes, ...]:
        """A list of such."""
        return tuple(JsonObject({name: entry}, self._what).hexadecimal(name) for entry in self.items(name))

    def items(self, name: str) -> list[object]:
        """A list."""
        value = self.value(name)
        if not isinstance(value, list):
            raise self._fault(name, "a list")
        return value

    def fields(self) -> dict[str, object]:
        """All of it, where the names are data too."""
        return dict(self._fields)

    def _no_hexadecimal(self, name: str) -> bytes:
        raise self._fault(name, "hexadecimal")

    def _fault(self, name: str, wanted: str) -> ProtocolError:
        return ProtocolError(f"the {self._what} is malformed: {name} is not {wanted}")

"""JSON from someone who may be bad: one value with nothing left over, or a `ProtocolError`."""

from __future__ import annotations

import json
from collections.abc import Sequence

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

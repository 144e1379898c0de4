"""What parties say to each other inside the MPC: field vectors and short byte strings, nothing else.

Stands where MPyC has `pickle`, with the same two function names. Unpickling a peer's bytes lets a bad helper run code
on the others; here the worst a peer can send is a `ProtocolError`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from protocol import field
from protocol.errors import ProtocolError
from protocol.wire import Reader, Writer

MAX_BYTES = 1024
_VECTOR = 1
_BYTES = 2


def dumps(value: Any) -> bytes:
    """Encode a one-dimensional array of Python integers below p, or a byte string.

    Integers must be Python's own: numpy's wrap, and floats round, both silently.
    """
    if isinstance(value, bytes):
        if len(value) > MAX_BYTES:
            raise ProtocolError(f"parties exchange at most {MAX_BYTES} bytes at a time, not {len(value)}")
        return Writer().uint(_BYTES, 1).blob(value).done()
    if not (isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype == object):
        raise ProtocolError(f"parties exchange field vectors and bytes, not {type(value).__name__}")
    numbers = value.tolist()
    if not all(type(number) is int and 0 <= number < field.P for number in numbers):
        raise ProtocolError("a field vector holds Python integers from 0 to p - 1")
    return Writer().uint(_VECTOR, 1).blob(field.encode(np.array(numbers, dtype=np.uint64))).done()


def loads(data: bytes) -> Any:
    """Decode what `dumps` makes: an object array of Python integers (as MPyC wants them), or bytes."""
    reader = Reader(bytes(data))
    kind = reader.uint(1)
    match kind:
        case 1:
            packed = reader.blob()
            reader.finish()
            return _objects(field.decode(packed, len(packed) // field.ELEMENT_SIZE))
        case 2:
            value = reader.blob(limit=MAX_BYTES)
            reader.finish()
            return value
        case _:
            raise ProtocolError(f"unknown kind of message between parties: {kind}")


def check(data: bytes, buckets: int) -> None:
    """Run on arrival, while it is known who sent it: only what this session's program can have sent is let in."""
    value = loads(data)
    if isinstance(value, np.ndarray) and value.size != buckets:
        raise ProtocolError(f"a vector of {value.size} elements in a session of {buckets} buckets")


def _objects(vector: field.Vector) -> Any:
    values = np.empty(vector.size, dtype=object)
    values[:] = vector.tolist()
    return values

"""Options: numbers, lists and strings as a site passes them, converted to Python's own types before any data is read.

A number that lies about its order, or a list that is longer the second time, is converted before it is compared with
anything.
"""

from __future__ import annotations

import math
import operator
from contextlib import suppress
from itertools import islice

from device.errors import RangeError
from protocol.errors import ErrorKind


def whole(option: str, value: object, least: int, most: int) -> int:
    """Return a whole number from `least` to `most`. True counts as 1 in Python, and is no number here."""
    number = None
    # Tried: an array has `__index__`, and refuses.
    with suppress(TypeError):
        number = operator.index(value)  # type: ignore[arg-type]  # any object
    if number is None or type(value) is bool:
        raise RangeError(f"{option} must be a whole number, not {abbreviated(value)}", kind=ErrorKind.WRONG_TYPE)
    if not least <= number <= most:
        raise RangeError(f"{option} must be {least} to {most}, not {abbreviated(number)}")
    return number


def real(option: str, value: object) -> float:
    """Return a finite number as a double."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RangeError(f"{option} must be a number, not {abbreviated(value)}", kind=ErrorKind.WRONG_TYPE)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise RangeError(f"{option} must be a finite number, not {abbreviated(value)}")
    return number


def entries(option: str, values: object, most: int) -> tuple[object, ...]:
    """Return the entries of a list, at most `most`; duplicates count. Iterates once, and no further than needed."""
    listed = None
    with suppress(TypeError):
        listed = tuple(islice(values, most + 1))  # type: ignore[call-overload]  # any object
    if listed is None or isinstance(values, str | bytes):
        raise RangeError(f"{option} must be a list, not {abbreviated(values)}", kind=ErrorKind.WRONG_TYPE)
    if len(listed) > most:
        raise RangeError(f"{option} has more than {most} entries; this device allows {most}", kind=ErrorKind.TOO_LARGE)
    return listed


def wholes(option: str, values: object, most_entries: int, allowed: range) -> tuple[int, ...]:
    """Return a list of whole numbers, each within `allowed`."""
    return tuple(whole(option, value, allowed[0], allowed[-1]) for value in entries(option, values, most_entries))


def word(option: str, value: object) -> str:
    """Return a string, never one of a subclass that could read differently each time."""
    if type(value) is not str:
        raise RangeError(f"{option} must be text, not {abbreviated(value)}", kind=ErrorKind.WRONG_TYPE)
    return value


def check_kind(value: object, *kinds: type) -> None:
    """Raise unless options are of exactly one of these classes: a subclass could override the checks."""
    # By identity: a class may claim to equal ours.
    if not any(type(value) is kind for kind in kinds):
        wanted = " or ".join(kind.__name__ for kind in kinds)
        raise RangeError(f"options must be {wanted}, not {abbreviated(value)}", kind=ErrorKind.WRONG_TYPE)


def abbreviated(value: object) -> str:
    """Return enough of a value to recognise it; its class alone if it is not one of Python's own."""
    if type(value) is int and value.bit_length() > 128:
        # Python refuses to write very long numbers out.
        return f"a number of {value.bit_length()} bits"
    return repr(value)[:60] if type(value) in (int, float, str, bool, type(None)) else f"a {type(value).__name__}"

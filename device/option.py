"""Options: numbers, lists and words as a site passes them, made exact before anything is looked at.

What comes out has Python's own types. A number that lies about its order, or a list that is longer the second time, has
been turned into what it is before it is compared with anything.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from itertools import islice
from typing import SupportsIndex

from device.errors import RangeError


def whole(option: str, value: object, least: int, most: int) -> int:
    """A whole number from `least` to `most`. True counts as 1 in Python, and is no number here."""
    if type(value) is int:
        number = value
    elif isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise RangeError(f"{option} must be a whole number, not {_shown(value)}")
    else:
        number = operator.index(value)
    if not least <= number <= most:
        raise RangeError(f"{option} must be {least} to {most}, not {_shown(number)}")
    return number


def real(option: str, value: object) -> float:
    """A finite number, as the double that it stands for."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RangeError(f"{option} must be a number, not {_shown(value)}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise RangeError(f"{option} must be a finite number, not {_shown(value)}")
    return number


def entries(option: str, values: object, most: int) -> tuple[object, ...]:
    """The entries of a list, at most `most`; duplicates count. Looked at once, and no further than needed."""
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise RangeError(f"{option} must be a list, not {_shown(values)}")
    found = tuple(islice(values, most + 1))
    if len(found) > most:
        raise RangeError(f"{option} has more than {most} entries; this device allows {most}")
    return found


def wholes(option: str, values: object, most_entries: int, allowed: range) -> tuple[int, ...]:
    """A list of whole numbers, each within `allowed`."""
    return tuple(whole(option, value, allowed[0], allowed[-1]) for value in entries(option, values, most_entries))


def word(option: str, value: object) -> str:
    """A string, and not one of another class that reads differently each time."""
    if type(value) is not str:
        raise RangeError(f"{option} must be text, not {_shown(value)}")
    return value


def check_kind(value: object, *kinds: type) -> None:
    """Options are of one of our own classes. One derived from them could be checked by its own rules, or by none."""
    # By identity: a class may say that it equals ours.
    if not any(type(value) is kind for kind in kinds):
        wanted = " or ".join(kind.__name__ for kind in kinds)
        raise RangeError(f"options must be {wanted}, not {_shown(value)}")


def _shown(value: object) -> str:
    """Enough of a value to recognise it; its class alone if it is not one of Python's own."""
    if type(value) is int and value.bit_length() > 128:
        # Python refuses to write very long numbers out.
        return f"a number of {value.bit_length()} bits"
    return repr(value)[:60] if type(value) in (int, float, str, bool, type(None)) else f"a {type(value).__name__}"

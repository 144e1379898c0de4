"""Named functions: attribution functions as a person names them on a command line, their own among them.

`last`, `first`, `equal`, `last-n` and `slots` are ours; `module:function` is imported from the current folder, or from
what is installed. The engine runs and clips all of them alike, so that the sensitivity follows from value, buckets and
weeks (Theorem 18), not from the function.
"""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from device.attribution import BUILT_IN, AttributionFunction
from protocol.errors import TrefoilError

OURS = {each.name: each for each in BUILT_IN}


def named_function(name: str, credit: Sequence[float] = (1.0,)) -> AttributionFunction:
    """The attribution function of this name; `credit` is for `last-n` alone."""
    if name in OURS:
        return OURS[name].make(credit)
    found = imported(name, "attribution function", f"Known are {', '.join(OURS)}; your own is module:function.")
    if not callable(found):
        raise TrefoilError(f"{name} is not a function", "Name one that takes (relevant, award).")
    function: AttributionFunction = found
    return function


def imported(name: str, what: str, hint: str) -> Any:  # Any: it is the person's own, and checked by whoever asked
    """What `module:name` stands for, with the current folder on the path as Python itself would have it."""
    if ":" not in name:
        raise TrefoilError(f"there is no {what} {name!r}", hint)
    try:
        with _this_folder_importable():
            return pkgutil.resolve_name(name)
    except (ImportError, AttributeError, SyntaxError, ValueError) as error:
        raise TrefoilError(f"cannot import {name}: {error}", hint) from None


@contextmanager
def _this_folder_importable() -> Iterator[None]:
    folder = str(Path.cwd())
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)

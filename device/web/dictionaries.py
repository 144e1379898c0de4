"""The standard's dictionaries as pages pass them: camel case, JavaScript's types, unknown members ignored.

A wrong type is the TypeError that a browser's bindings would throw; the device checks ranges. Stricter than Web IDL,
which converts "3" and true to numbers: behind our own bindings (`device/browser`) only converted values come here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from device.conversion import ConversionOptions
from device.errors import StandardError
from device.events import ImpressionOptions

Options = TypeVar("Options", ImpressionOptions, ConversionOptions)


class WrongType(StandardError):
    """A member is missing or of the wrong type."""

    @property
    def standard_name(self) -> str:
        return "TypeError"


_INTEGERS = (
    *("histogram_index", "match_value", "lifetime_days", "priority", "histogram_size", "value", "max_value"),
    *("lookback_days", "kappa"),
)
_LISTS = {
    "conversion_sites": str,
    "conversion_callers": str,
    "impression_sites": str,
    "impression_callers": str,
    "match_values": int,
    "credit": float,
}


def read_options(kind: type[Options], passed: object) -> Options:
    """Return the options in a page's dictionary, or raise `WrongType`."""
    if not isinstance(passed, dict):
        raise WrongType("options must be a dictionary")
    members: dict[str, Any] = {}
    for member in dataclasses.fields(kind):
        name = _camel(member.name)
        if passed.get(name) is not None:
            members[member.name] = _member(member.name, name, passed)
        elif member.default is dataclasses.MISSING:
            raise WrongType(f"the required member {name} is missing")
    return kind(**members)


def member_names(kind: type[Options]) -> set[str]:
    return {_camel(member.name) for member in dataclasses.fields(kind)}


def _member(field: str, name: str, passed: Mapping[str, object]) -> object:
    value = passed[name]
    if field in _LISTS:
        if not isinstance(value, list):
            raise WrongType(f"{name} must be a sequence")
        return tuple(_scalar(_LISTS[field], name, each) for each in value)
    if field in _INTEGERS:
        return _scalar(int, name, value)
    return _scalar(float if field == "epsilon" else str, name, value)


def _scalar(wanted: type, name: str, value: object) -> object:
    """Check a scalar. JavaScript has one kind of number: 1 is a valid double, 1.0 a valid integer; true is neither."""
    if wanted is str:
        if not isinstance(value, str):
            raise WrongType(f"{name} must be a string")
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise WrongType(f"{name} must be a number")
    if wanted is float:
        return float(value)
    if value != value or value in (float("inf"), float("-inf")):
        raise WrongType(f"{name} must be a finite number")
    return int(value)


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)

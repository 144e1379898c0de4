"""The standard's dictionaries as pages pass them: camel case, JavaScript's types, unknown members ignored.

A wrong type is the TypeError that a browser's bindings would throw; the device checks ranges. Stricter than Web IDL,
which converts "3" and true to numbers: behind our own bindings (`device/browser`) only converted values come here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from device.conversion import ConversionOptions
from device.errors import StandardError
from device.events import ImpressionOptions

Options = TypeVar("Options", ImpressionOptions, ConversionOptions)


class WrongType(StandardError):
    """A member is missing or of the wrong type."""

    name = "TypeError"


_TYPES: dict[type, dict[str, Any]] = {kind: get_type_hints(kind) for kind in (ImpressionOptions, ConversionOptions)}


def read_options(kind: type[Options], passed: object) -> Options:
    """Return the options in a page's dictionary, or raise `WrongType`."""
    if not isinstance(passed, dict):
        raise WrongType("options must be a dictionary")
    members: dict[str, Any] = {}
    types = _TYPES[kind]
    for member in dataclasses.fields(kind):
        name = _camel(member.name)
        if passed.get(name) is not None:
            members[member.name] = _member(types[member.name], name, passed[name])
        elif member.default is dataclasses.MISSING:
            raise WrongType(f"the required member {name} is missing")
    return kind(**members)


def member_names(kind: type[Options]) -> set[str]:
    return {_camel(member.name) for member in dataclasses.fields(kind)}


def _member(wanted: Any, name: str, value: object) -> object:  # Any: an annotation is no type
    if get_origin(wanted) is Sequence:
        if not isinstance(value, list):
            raise WrongType(f"{name} must be a sequence")
        return tuple(_scalar(get_args(wanted)[0], name, each) for each in value)
    return _scalar(wanted, name, value)


def _scalar(wanted: object, name: str, value: object) -> object:
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

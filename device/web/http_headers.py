"""Parse the response headers that save an impression or measure a conversion without script.

A header with a value of the wrong type, a missing key or a number outside its range is refused as a whole; what the
values mean is validated later, by the call that the header stands for. Unknown keys are ignored, for later versions
of the standard.

The syntax is that of structured fields (RFC 9651), parsed by `http-sf`, which its author maintains. On 4.3 million
generated dictionaries it agreed with the parser that it replaced except on dates outside the years 1 to 9999, which it
refuses, as the RFC permits (§3.3.7). Parameters are checked and dropped: none of these headers defines any.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import Any, TypeAlias, cast
from urllib.parse import urljoin, urlsplit, urlunsplit

import http_sf
from http_sf import DisplayString, Token

from device.conversion import ConversionOptions
from device.events import I32, U32, ImpressionOptions
from protocol.errors import ErrorKind, ProtocolError
from protocol.units import MAX_SENSITIVITY

MAX_LENGTH = 65_536

BareItem: TypeAlias = int | float | str | bool | bytes | Decimal | Token | datetime | DisplayString
Member: TypeAlias = BareItem | tuple[BareItem, ...]
Reader = Callable[[Member], Any]
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]*:")


def parse_dictionary(text: str) -> dict[str, Member]:
    """Return the members of a dictionary field (RFC 9651 §4.2.2) without parameters, inner lists as tuples."""
    if len(text) > MAX_LENGTH:
        raise ProtocolError("the header is too long", kind=ErrorKind.TOO_LARGE)
    try:
        parsed = http_sf.parse(text.encode("ascii"), tltype="dictionary")
    except (http_sf.StructuredFieldError, UnicodeEncodeError) as error:
        raise ProtocolError(f"not a structured dictionary: {error}") from None
    return {key: _without_parameters(member) for key, member in cast(dict[str, Any], parsed).items()}


def _without_parameters(member: tuple[Any, Any]) -> Member:
    value, _parameters = member
    return tuple(item for item, _ in value) if isinstance(value, list) else cast(BareItem, value)


@dataclass(frozen=True, slots=True)
class MeasureConversionHeader:
    """What to measure, and the URL to which the report is sent."""

    options: ConversionOptions
    report_url: str


def parse_save_impression(header: str) -> ImpressionOptions:
    """Return the options in a Save-Impression header; raise ProtocolError if it is invalid."""
    return ImpressionOptions(**_read(parse_dictionary(header), _SAVE_IMPRESSION, required={"histogram-index"}))


def parse_measure_conversion(header: str, base_url: str) -> MeasureConversionHeader:
    """Return the options in a Measure-Conversion header of a response from `base_url`, or raise ProtocolError."""
    members = parse_dictionary(header)
    values = _read(members, _MEASURE_CONVERSION, required={"aggregation-service", "histogram-size", "report-url"})
    report_url = _resolve(values.pop("report_url"), base_url)
    return MeasureConversionHeader(ConversionOptions(**values), report_url)


def clears_impressions(header: str) -> bool:
    """Return whether a Clear-Site-Data header includes the impressions that the response's site stored.

    If so, call `Device.clear_impressions_for_site` with the response's host. Unknown types are ignored.
    """
    types = {part.strip(" \t") for part in header.split(",")}
    return not types.isdisjoint({'"impressions"', '"*"'})


def _read(members: dict[str, Member], readers: dict[str, Reader], required: set[str]) -> dict[str, Any]:
    missing = required - set(members)
    if missing:
        raise ProtocolError(f"the header lacks {', '.join(sorted(missing))}", kind=ErrorKind.MISSING_FIELD)
    values = {}
    for key, read in readers.items():
        if key in members:
            try:
                values[key.replace("-", "_")] = read(members[key])
            except (TypeError, ValueError) as error:
                kind = ErrorKind.WRONG_TYPE if isinstance(error, TypeError) else ErrorKind.OUT_OF_RANGE
                raise ProtocolError(f"{key} {error}", kind=kind) from None
    return values


def _integer(least: int, most: int | None = None) -> Reader:
    def read(member: Member) -> int:
        # Exactly int: a boolean is another type in a header, though not in Python.
        if type(member) is not int:
            raise TypeError("must be a whole number")
        if member < least or (most is not None and member > most):
            raise ValueError(f"must be at least {least}" if most is None else f"must be between {least} and {most}")
        return member

    return read


def _number(member: Member) -> float:
    if type(member) is Decimal:
        return float(member)
    if type(member) is not int:
        raise TypeError("must be a number")
    return member


def _string(member: Member) -> str:
    if type(member) is not str:
        raise TypeError("must be a string")
    return member


def _list_of(read: Reader) -> Reader:
    def read_all(member: Member) -> tuple[BareItem, ...]:
        if type(member) is not tuple:
            raise TypeError("must be a list in parentheses")
        return tuple(read(item) for item in member)

    return read_all


def _resolve(url: str, base_url: str) -> str:
    """Return an absolute https URL with a path, the only kind to which reports are sent."""
    try:
        # A URL with a scheme is absolute: `urljoin` would resolve a bare https:// to the base.
        parts = urlsplit(url if _SCHEME.match(url) else urljoin(base_url, url))
        port = parts.port
    except ValueError as error:
        raise ProtocolError(f"report-url is not a URL: {error}", kind=ErrorKind.INVALID_VALUE) from None
    if parts.scheme != "https" or not parts.hostname:
        raise ProtocolError("report-url must be an https URL", kind=ErrorKind.INVALID_VALUE)
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    netloc = host if port in (None, 443) else f"{host}:{port}"
    return urlunsplit(("https", netloc, parts.path or "/", parts.query, parts.fragment))


_SAVE_IMPRESSION: dict[str, Reader] = {
    "histogram-index": _integer(0, U32[-1]),
    "match-value": _integer(0, U32[-1]),
    "conversion-sites": _list_of(_string),
    "conversion-callers": _list_of(_string),
    "lifetime-days": _integer(1),
    "priority": _integer(I32[0], I32[-1]),
}
_MEASURE_CONVERSION: dict[str, Reader] = {
    "aggregation-service": _string,
    "histogram-size": _integer(1, U32[-1]),
    "report-url": _string,
    "epsilon": _number,
    "value": _integer(1, U32[-1]),
    "max-value": _integer(1, U32[-1]),
    "lookback-days": _integer(1),
    "match-values": _list_of(_integer(0, U32[-1])),
    "credit": _list_of(_number),
    "impression-sites": _list_of(_string),
    "impression-callers": _list_of(_string),
    # Our extension: the weight of the bias side query. Parsers of the standard alone ignore the key.
    "kappa": _integer(0, MAX_SENSITIVITY),
}

"""The headers that let a response save an impression or measure a conversion without script.

A header with a wrong type, a missing key or a number outside its range is refused whole; what the key means is checked
later, by the call it stands for. Unknown keys are for later versions of the standard, and ignored.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urljoin, urlsplit, urlunsplit

from device.conversion import ConversionOptions
from device.impression import I32, U32, ImpressionOptions
from device.structured_fields import BareItem, Member, parse_dictionary
from protocol.epsilon import MAX_SENSITIVITY
from protocol.errors import ProtocolError

Reader = Callable[[Member], Any]
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]*:")


@dataclass(frozen=True, slots=True)
class MeasureConversionHeader:
    """What to measure, and the address that the report is sent to."""

    options: ConversionOptions
    report_url: str


def parse_save_impression(header: str) -> ImpressionOptions:
    """The options in a Save-Impression header, or ProtocolError."""
    return ImpressionOptions(**_read(parse_dictionary(header), _SAVE_IMPRESSION, required={"histogram-index"}))


def parse_measure_conversion(header: str, base_url: str) -> MeasureConversionHeader:
    """The options in a Measure-Conversion header of the response from `base_url`, or ProtocolError."""
    members = parse_dictionary(header)
    values = _read(members, _MEASURE_CONVERSION, required={"aggregation-service", "histogram-size", "report-url"})
    report_url = _resolve(values.pop("report_url"), base_url)
    return MeasureConversionHeader(ConversionOptions(**values), report_url)


def clears_impressions(header: str) -> bool:
    """Whether a Clear-Site-Data header of a response asks to remove what its site stored: by name, or with all else.

    Then run `Device.clear_impressions_for_site` for the response's host. Types that are unknown are ignored.
    """
    types = {part.strip(" \t") for part in header.split(",")}
    return not types.isdisjoint({'"impressions"', '"*"'})


def _read(members: dict[str, Member], readers: dict[str, Reader], required: set[str]) -> dict[str, Any]:
    missing = required - set(members)
    if missing:
        raise ProtocolError(f"the header lacks {', '.join(sorted(missing))}")
    values = {}
    for key, read in readers.items():
        if key in members:
            try:
                values[key.replace("-", "_")] = read(members[key])
            except ValueError as error:
                raise ProtocolError(f"{key} {error}") from None
    return values


def _integer(least: int, most: int | None = None) -> Reader:
    def read(member: Member) -> int:
        # Exactly int: a boolean is another type in a header, though not in Python.
        if type(member) is not int or member < least or (most is not None and member > most):
            raise ValueError(f"must be a whole number from {least} to {most or 'any'}")
        return member

    return read


def _number(member: Member) -> float:
    if type(member) is not int and type(member) is not float:
        raise ValueError("must be a number")
    return member


def _string(member: Member) -> str:
    if type(member) is not str:
        raise ValueError("must be a string")
    return member


def _list_of(read: Reader) -> Reader:
    def read_all(member: Member) -> tuple[BareItem, ...]:
        if type(member) is not tuple:
            raise ValueError("must be a list in brackets")
        return tuple(read(item) for item in member)

    return read_all


def _resolve(address: str, base_url: str) -> str:
    """An absolute https address, with a path. Reports go nowhere else."""
    try:
        # An address with a scheme stands for itself: joining would read an empty https:// as the base.
        parts = urlsplit(address if _SCHEME.match(address) else urljoin(base_url, address))
        port = parts.port
    except ValueError as error:
        raise ProtocolError(f"report-url is not an address: {error}") from None
    if parts.scheme != "https" or not parts.hostname:
        raise ProtocolError("report-url must be an https address")
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
    # Ours: the weight of the bias side query. Parsers that know the standard alone ignore it.
    "kappa": _integer(0, MAX_SENSITIVITY),
}

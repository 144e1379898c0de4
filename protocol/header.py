"""The header of a report: what the device promises in public, and what binds everything else to it (SPEC.md §3).

No field of it depends on the person's data.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import Enum, IntFlag
from typing import assert_never

from protocol import field as prime_field
from protocol.errors import ErrorKind, Inconsistent, InvalidValue, OutOfRange, ProtocolError, Rejected, Rejection
from protocol.field import ELEMENT_SIZE
from protocol.hpke import CLASSICAL, KEY_ID_SIZE, Suite
from protocol.shape import Shape, shape_of
from protocol.shares import PARTIES
from protocol.units import HOUR, validate_terms
from protocol.wire import HASH_SIZE, Reader, Writer

VERSION = 1
NONCE_SIZE = 16
# Coarse, so that the time in a header says nothing that the site does not know already.
TIME_STEP = HOUR
MAX_SITE_LENGTH = 253
MAX_UNIT_LENGTH = 32

# The fixed part of a header, field by field as `struct` writes them. Where a field stands follows from this alone.
_FIELDS = {
    "version": "H",
    "suite": "H",
    "schema": "H",
    "flags": "B",
    "helper set": "32s",
    "key ids": "8s8s8s",
    "nonce": "16s",
    "time": "Q",
    "ε": "I",
    "Δ": "Q",
    "κ": "Q",
    "buckets": "I",
    "commitments": "32s32s32s",
    "body hash": "32s",
}
FIXED = struct.Struct(">" + "".join(_FIELDS.values()))
_CAP_SIZE = 8
_SPREAD_SIZE = 2


def _span(name: str) -> slice:
    before = "".join(list(_FIELDS.values())[: list(_FIELDS).index(name)])
    return slice(struct.calcsize(">" + before), struct.calcsize(">" + before + _FIELDS[name]))


def _spans_of_three(name: str) -> tuple[slice, slice, slice]:
    whole = _span(name)
    size = (whole.stop - whole.start) // PARTIES
    first, second, third = (
        slice(whole.start + size * each, whole.start + size * (each + 1)) for each in range(PARTIES)
    )
    return first, second, third


# What helpers read without decoding the rest.
FLAGS_SPAN = _span("flags")
HELPER_SET_SPAN = _span("helper set")
KEY_ID_SPANS = _spans_of_three("key ids")
NONCE_SPAN = _span("nonce")
TIME_SPAN = _span("time")
EPSILON_SPAN = _span("ε")
SENSITIVITY_SPAN = _span("Δ")
COMMITMENT_SPANS = _spans_of_three("commitments")
BODY_HASH_SPAN = _span("body hash")


class Schema(Enum):
    """What the shared vector means: any numbers at all, or numbers that helpers can check."""

    HISTOGRAM = 1
    CHECKED_HISTOGRAM = 2


class Flags(IntFlag):
    """Bits of the flags field. Any other bit is rejected."""

    DEBUG = 1


@dataclass(frozen=True, slots=True)
class ReportTerms:
    """What a device promises about a report: for whom it is and what was assumed when it was paid for.

    `epsilon_micros` is the ε requested, rounded down, never what was charged; Δ is `sensitivity`. A histogram has
    `buckets` numbers, and one more at the end for the side query when κ is not zero. With a `cap` the report is
    checked: helpers count it only if its numbers are not negative and their sum is within the cap. Cap and `spread`
    are the query's constants, the same for every conversion in it.
    """

    site: str
    caller: str
    time: int
    epsilon_micros: int
    sensitivity: int
    buckets: int
    kappa: int = 0
    unit: str = "count"
    debug: bool = False
    cap: int = 0
    spread: int = 0

    def __post_init__(self) -> None:
        validate_terms(self.epsilon_micros, self.sensitivity)
        check_site(self.site)
        check_site(self.caller)
        check_unit(self.unit)
        if not (0 <= self.time < 2**63) or self.time % TIME_STEP:
            raise OutOfRange(f"a report's time is a whole number of hours since 1970, not {self.time}")
        check_cap(self.shape, self.sensitivity)

    @property
    def shape(self) -> Shape:
        """Return which numbers are shared, and which of them helpers check."""
        return shape_of(self.buckets, self.kappa, self.cap, self.spread)

    @property
    def length(self) -> int:
        return self.shape.length


def schema_of(shape: Shape) -> Schema:
    return Schema.CHECKED_HISTOGRAM if shape.checked else Schema.HISTOGRAM


def check_cap(shape: Shape, sensitivity: int) -> None:
    """Reject a cap with which one report could move the answer by more than the noise is scaled to."""
    if shape.cap > sensitivity:
        raise Inconsistent(f"a cap of {shape.cap} is above the sensitivity {sensitivity} that the noise is scaled to")


def check_site(site: str) -> None:
    """Reject a site that is no domain name in lower-case ASCII. Devices decide what is registrable."""
    if not (0 < len(site) <= MAX_SITE_LENGTH) or not site.isascii() or not site.isprintable() or " " in site:
        raise InvalidValue(f"a site is a domain name of at most {MAX_SITE_LENGTH} ASCII characters, not {site!r}")
    if site != site.lower():
        raise InvalidValue(f"a site is written in lower case, not {site!r}")


def check_unit(unit: str) -> None:
    if not (0 < len(unit) <= MAX_UNIT_LENGTH) or not unit.isascii() or not unit.isprintable():
        raise InvalidValue(f"a unit is 1 to {MAX_UNIT_LENGTH} printable ASCII characters, not {unit!r}")


def coarse_time(now: int) -> int:
    """Return the start of the hour that `now` is in, as a header carries it."""
    return now - now % TIME_STEP


@dataclass(frozen=True, slots=True)
class Header:
    """Everything public about a report, authenticated by every payload."""

    terms: ReportTerms
    helper_set: bytes
    key_ids: tuple[bytes, bytes, bytes]
    nonce: bytes
    commitments: tuple[bytes, bytes, bytes]
    body_hash: bytes
    suite: Suite = CLASSICAL
    # 1/P(r) for each point and plane of a checked report. The points follow from all the rest.
    openings: bytes = b""

    def __post_init__(self) -> None:
        sized = [(self.helper_set, HASH_SIZE), (self.nonce, NONCE_SIZE), (self.body_hash, HASH_SIZE)]
        sized += [(key_id, KEY_ID_SIZE) for key_id in self.key_ids]
        sized += [(commitment, HASH_SIZE) for commitment in self.commitments]
        if any(len(value) != size for value, size in sized):
            raise InvalidValue("a header field has the wrong length")
        if self.openings:
            prime_field.decode(self.openings, len(self.openings) // ELEMENT_SIZE)

    def encode(self) -> bytes:
        """Return the bytes a device seals and a helper authenticates."""
        if len(self.openings) != ELEMENT_SIZE * self.terms.shape.openings:
            raise Inconsistent(f"a header of this shape has {self.terms.shape.openings} openings")
        return self.prefix() + self.openings

    def prefix(self) -> bytes:
        """Return all but the openings: 239 fixed bytes, then unit, site and caller; in a checked report the cap."""
        terms = self.terms
        fixed = FIXED.pack(
            VERSION,
            self.suite.value,
            schema_of(terms.shape).value,
            Flags.DEBUG if terms.debug else 0,
            self.helper_set,
            *self.key_ids,
            self.nonce,
            terms.time,
            terms.epsilon_micros,
            terms.sensitivity,
            terms.kappa,
            terms.buckets,
            *self.commitments,
            self.body_hash,
        )
        cap = Writer()
        if terms.shape.checked:
            cap.uint(terms.cap, _CAP_SIZE).uint(terms.spread, _SPREAD_SIZE)
        return fixed + self.texts() + cap.done()

    def texts(self) -> bytes:
        """Return unit, site and caller, encoded: what follows the fixed part."""
        return Writer().text(self.terms.unit).text(self.terms.site).text(self.terms.caller).done()

    @classmethod
    def decode(cls, data: bytes) -> Header:
        """Parse a header, or raise `Rejected` with the reason that helpers count it under."""
        check_version(data)
        try:
            return cls._decode_fields(data)
        except Rejected:
            raise
        except ProtocolError as error:
            raise Rejected(Rejection.MALFORMED, str(error)) from None

    @classmethod
    def _decode_fields(cls, data: bytes) -> Header:
        _, suite, schema, flags, helper_set, *rest = FIXED.unpack_from(data)
        key1, key2, key3, nonce, time, epsilon, sensitivity, kappa, buckets, c1, c2, c3, body = rest
        # As integers: Python complements a Flag within its declared bits only, which would let unknown bits pass.
        if flags & ~Flags.DEBUG.value:
            raise Rejected(Rejection.MALFORMED, f"unknown flags {flags:#04x}")
        reader = Reader(data[FIXED.size :])
        unit, site, caller = (reader.text(limit=limit) for limit in (MAX_UNIT_LENGTH, MAX_SITE_LENGTH, MAX_SITE_LENGTH))
        cap, spread = _read_cap(reader, Schema(schema))
        debug = bool(flags & Flags.DEBUG)
        terms = ReportTerms(site, caller, time, epsilon, sensitivity, buckets, kappa, unit, debug, cap, spread)
        openings = reader.fixed(ELEMENT_SIZE * terms.shape.openings)
        reader.finish()
        return cls(terms, helper_set, (key1, key2, key3), nonce, (c1, c2, c3), body, Suite(suite), openings)


def decode_header_or_none(data: bytes) -> Header | None:
    """Return a header, or None if it does not decode: a malicious device's record costs only itself."""
    try:
        return Header.decode(data)
    except ProtocolError:
        return None


def _read_cap(reader: Reader, schema: Schema) -> tuple[int, int]:
    match schema:
        case Schema.HISTOGRAM:
            return 0, 0
        case Schema.CHECKED_HISTOGRAM:
            cap, spread = reader.uint(_CAP_SIZE), reader.uint(_SPREAD_SIZE)
            if not cap:
                raise ProtocolError("a checked report has a cap", kind=ErrorKind.MISSING_FIELD)
            return cap, spread
        case _:
            assert_never(schema)


def header_size(unit: str, site: str, caller: str, shape: Shape) -> int:
    checked = _CAP_SIZE + _SPREAD_SIZE + ELEMENT_SIZE * shape.openings if shape.checked else 0
    return FIXED.size + len(Writer().text(unit).text(site).text(caller).done()) + checked


def check_version(header: bytes) -> None:
    """Reject an unknown version, suite or schema, before parsing any field that it might have moved."""
    if len(header) < 6:
        raise Rejected(Rejection.MALFORMED, f"a header of {len(header)} bytes")
    version, suite, schema = struct.unpack_from(">HHH", header)
    if version != VERSION:
        raise Rejected(Rejection.UNKNOWN_VERSION, f"version {version}; this is version {VERSION}")
    if suite not in {each.value for each in Suite}:
        raise Rejected(Rejection.UNKNOWN_SUITE, f"suite {suite}")
    if schema not in {each.value for each in Schema}:
        raise Rejected(Rejection.UNKNOWN_SCHEMA, f"schema {schema}")
    if len(header) < FIXED.size:
        raise Rejected(Rejection.MALFORMED, f"a header of {len(header)} bytes")

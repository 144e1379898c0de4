"""The headers of a chunk, checked all at once: which reports may count, before anything is opened.

Reports of one query have headers of one layout, so headers are checked as columns of a byte matrix, and only unusual
ones are decoded one by one. A report that fails is dropped and counted under one `Rejection`, encoded in one byte; the
query goes on without it.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from mpc_helpers.admission.column import Mask
from mpc_helpers.identity.membership import Membership
from protocol.amounts import Amount, Places
from protocol.errors import ProtocolError, Rejected, Rejection
from protocol.field import ELEMENT_SIZE, P, Vector
from protocol.header import (
    COMMITMENT_SPANS,
    EPSILON_SPAN,
    FIXED,
    FLAGS_SPAN,
    HELPER_SET_SPAN,
    KEY_ID_SPANS,
    NONCE_SIZE,
    SENSITIVITY_SPAN,
    TIME_SPAN,
    TIME_STEP,
    Flags,
    Header,
    ReportTerms,
)
from protocol.hpke import KEY_ID_SIZE, Suite
from protocol.left_out import code_of
from protocol.query import Query
from protocol.shape import Shape
from protocol.units import noise_covers
from protocol.wire import HASH_SIZE

Reasons = npt.NDArray[np.uint8]

ADMITTED = 0
# The outcome of a report as one byte: 0, or one more than the number of its rejection.
CODE_OF: Mapping[Rejection, int] = {reason: code_of(reason) for reason in Rejection}
REASON_OF: Mapping[int, Rejection] = {code: reason for reason, code in CODE_OF.items()}


@dataclass(frozen=True, slots=True)
class OpeningKey:
    """One of this helper's private HPKE keys, with the span in which devices may have sealed to it."""

    helper_set: bytes
    key_id: bytes
    not_before: int
    not_after: int
    suite: Suite
    private: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class AdmissionRules:
    """What a report must satisfy to count in this query at this helper. Plain data: it is sent to other processes."""

    party: int
    query: Query
    keys: tuple[OpeningKey, ...]
    oldest: int
    newest: int

    @classmethod
    def for_query(cls, membership: Membership, query: Query, *, oldest: int, newest: int) -> AdmissionRules:
        """Return the rules of a query. A report may name any key of ours, in any set we know, that we still hold."""
        keys = [
            OpeningKey(one.digest, config.key.key_id, config.not_before, config.not_after, private.suite, private.raw)
            for one in membership.known_sets
            for config in one.helpers[membership.party].hpke_keys
            if (private := membership.hpke.get(config.key)) is not None and private.suite is query.suite
        ]
        return cls(membership.party, query, tuple(keys), oldest, newest)


Bytes = npt.NDArray[np.uint8]
Hours = npt.NDArray[np.uint32]

# Spans of the fixed part that are equal in all valid reports of one query: before the helper set, and between Δ and the
# commitments (κ and buckets). What follows the fixed part, up to the openings, is equal too.
_CONSTANT = (slice(0, HELPER_SET_SPAN.start), slice(SENSITIVITY_SPAN.stop, COMMITMENT_SPANS[0].start))
_P = np.uint64(P)
# ε and Δ, side by side.
_PAID = struct.Struct(">IQ")


@lru_cache(maxsize=16)
def _usual_header(query: Query) -> bytes:
    """Return a header up to its openings as this query expects it, with zeros wherever good reports may differ."""
    terms = ReportTerms(
        query.site,
        query.caller,
        0,
        query.epsilon_micros,
        query.sensitivity,
        query.buckets,
        query.kappa,
        query.unit,
        query.debug,
        query.cap,
        query.spread,
    )
    no_id, no_hash = bytes(KEY_ID_SIZE), bytes(HASH_SIZE)
    ids, hashes = (no_id, no_id, no_id), (no_hash, no_hash, no_hash)
    return Header(terms, no_hash, ids, bytes(NONCE_SIZE), hashes, no_hash, query.suite).prefix()


def examine_headers(rules: AdmissionRules, headers: Bytes) -> Reasons:
    """Return the outcome of every header (rows of one byte matrix), before anything is opened."""
    headers = np.ascontiguousarray(headers)
    reasons = np.zeros(len(headers), dtype=np.uint8)
    for index in np.flatnonzero(~_usual_rows(rules, headers)):
        reasons[index] = CODE_OF[_rejection_of(rules, headers[index].tobytes())]
    for check in (_check_keys, _check_times, _check_noise):
        rows = np.flatnonzero(reasons == ADMITTED)
        if rows.size == len(headers):
            reasons = check(rules, headers)
        elif rows.size:
            reasons[rows] = check(rules, headers[rows])
    return reasons


def _usual_rows(rules: AdmissionRules, headers: Bytes) -> npt.NDArray[np.bool_]:
    usual = np.frombuffer(_usual_header(rules.query), dtype=np.uint8)
    if usual.size + ELEMENT_SIZE * rules.query.shape.openings != headers.shape[1]:
        return np.zeros(len(headers), dtype=np.bool_)
    columns = [_equal(headers[:, part], usual[part]) for part in _CONSTANT]
    columns.append(_equal(headers[:, FIXED.size : usual.size], usual[FIXED.size :]))
    matching: npt.NDArray[np.bool_] = np.logical_and.reduce(columns)
    return matching & (read_openings(rules.query.shape, headers) < _P).all(axis=1)


def read_openings(shape: Shape, headers: Bytes) -> Vector:
    """Return the openings at the end of every header, not yet checked to be below p; no columns if unchecked."""
    start = headers.shape[1] - ELEMENT_SIZE * shape.openings
    return np.ascontiguousarray(headers[:, start:]).view("<u8").astype(np.uint64, copy=False)


def openings_of(shape: Shape, headers: Sequence[bytes]) -> Vector:
    """Return what `read_openings` does, for headers that are not in a matrix."""
    start = len(headers[0]) - ELEMENT_SIZE * shape.openings
    joined = b"".join([header[start:] for header in headers])
    return np.frombuffer(joined, dtype="<u8").astype(np.uint64, copy=False).reshape(len(headers), shape.openings)


def _equal(rows: Bytes, value: Bytes) -> npt.NDArray[np.bool_]:
    """Return which rows are `value`. A whole batch of good reports takes one comparison of bytes."""
    if rows.tobytes() == value.tobytes() * len(rows):
        return np.ones(len(rows), dtype=np.bool_)
    same: npt.NDArray[np.bool_] = (rows == value).all(axis=1)
    return same


def _rejection_of(rules: AdmissionRules, header: bytes) -> Rejection:
    """Return why a header is rejected that differs from `_usual_header` in a span where no valid one does."""
    try:
        terms = Header.decode(header).terms
    except Rejected as error:
        return error.rejection
    query = rules.query
    if terms.site != query.site:
        return Rejection.WRONG_SITE
    if terms.caller != query.caller:
        return Rejection.WRONG_CALLER
    if terms.debug != query.debug:
        return Rejection.WRONG_MODE
    return Rejection.WRONG_SHAPE


def _check_keys(rules: AdmissionRules, headers: Bytes) -> Reasons:
    """Check helper set, key id and the key's validity at the report's time."""
    times = _times(headers)
    named = np.hstack([headers[:, HELPER_SET_SPAN], headers[:, KEY_ID_SPANS[rules.party]]])
    reasons = np.zeros(len(headers), dtype=np.uint8)
    known_sets = {key.helper_set for key in rules.keys}
    for rows, value in _groups(named):
        key = next((key for key in rules.keys if key.helper_set + key.key_id == value), None)
        if key is None:
            wrong = Rejection.UNKNOWN_KEY if value[:HASH_SIZE] in known_sets else Rejection.WRONG_HELPER_SET
            reasons[rows] = CODE_OF[wrong]
        else:
            outside = (times[rows] < key.not_before) | (times[rows] >= key.not_after)
            reasons[rows[outside]] = CODE_OF[Rejection.EXPIRED_KEY]
    return reasons


def _check_times(rules: AdmissionRules, headers: Bytes) -> Reasons:
    times = _times(headers)
    reasons = np.zeros(len(headers), dtype=np.uint8)
    reasons[times <= max(rules.oldest, 0)] = CODE_OF[Rejection.EXPIRED]
    reasons[times > max(rules.newest, 0)] = CODE_OF[Rejection.FROM_THE_FUTURE]
    reasons[times % np.uint64(TIME_STEP) != 0] = CODE_OF[Rejection.MALFORMED]
    return reasons


def _check_noise(rules: AdmissionRules, headers: Bytes) -> Reasons:
    """Check what was paid, in unbounded integers, once for every distinct (ε, Δ) in the batch."""
    query = rules.query
    reasons = np.zeros(len(headers), dtype=np.uint8)
    for rows, value in _groups(headers[:, EPSILON_SPAN.start : SENSITIVITY_SPAN.stop]):
        epsilon, sensitivity = _PAID.unpack(value)
        try:
            if not _is_covered(query, epsilon, sensitivity):
                reasons[rows] = CODE_OF[Rejection.NOISE_TOO_SMALL]
        except ProtocolError:
            reasons[rows] = CODE_OF[Rejection.MALFORMED]
    return reasons


def _is_covered(query: Query, epsilon: int, sensitivity: int) -> bool:
    """Return whether the query's noise is what a report of this (ε, Δ) was made for, or more.

    Joint noise has an end, and its δ is stated for changes up to some size. A report that may change the sum by more
    is not covered by it, whatever its ε is.
    """
    if not noise_covers(epsilon, sensitivity, query.epsilon_micros, query.sensitivity):
        return False
    return query.debug or query.noise_scale.covers(sensitivity + query.kappa)


def header_hours(headers: Bytes) -> Hours:
    """Return the hour each header names, counted from 1970; only those of admitted reports mean anything."""
    return (_times(headers) // np.uint64(TIME_STEP)).astype(np.uint32)


def header_amounts(query: Query, headers: Bytes, reasons: Reasons) -> list[tuple[Amount, Places]]:
    """Return what each admitted report paid and what the query needs of it, as groups with their rows."""
    rows = np.flatnonzero(reasons == ADMITTED)
    if not rows.size:
        return []
    groups: list[tuple[Amount, Places]] = []
    for places, value in _groups(headers[rows, EPSILON_SPAN.start : SENSITIVITY_SPAN.stop]):
        epsilon, sensitivity = _PAID.unpack(value)
        amount = Amount.of(epsilon, sensitivity, query.epsilon_micros, query.sensitivity)
        groups.append((amount, rows[places]))
    return groups


def header_debug(headers: Bytes) -> Mask:
    flags = headers[:, FLAGS_SPAN.start]
    mask: Mask = (flags & Flags.DEBUG) != 0
    return mask


def _groups(rows: Bytes) -> list[tuple[npt.NDArray[np.int64], bytes]]:
    """Return each distinct row with its positions. Good reports of one query have one value or a few."""
    if _equal(rows, rows[0]).all():
        return [(np.arange(len(rows)), rows[0].tobytes())]
    keys = np.ascontiguousarray(rows).view([("", np.void, rows.shape[1])]).ravel()
    values, positions = np.unique(keys, return_inverse=True)
    return [(np.flatnonzero(positions == index), value.tobytes()) for index, value in enumerate(values)]


def _times(headers: Bytes) -> npt.NDArray[np.uint64]:
    times: npt.NDArray[np.uint64] = np.ascontiguousarray(headers[:, TIME_SPAN]).view(">u8").ravel()
    return times.astype(np.uint64)

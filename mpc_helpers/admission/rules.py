"""Admit: which reports of a batch one helper will count, and why it drops each of the others.

Run by a helper before it has spoken to the others. A bad report is dropped and counted under one `Rejection`; the
query goes on. Reports of one query have headers of one layout, so headers are checked as columns of a byte matrix, and
only what is out of the ordinary is decoded one by one. The cost that remains is one HPKE open per report.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from protocol.batch import DIGEST_SPAN, ColumnChunk, DigestRows
from protocol.epsilon import noise_covers
from protocol.errors import ProtocolError, Rejected, Rejection
from protocol.field import P, Vector
from protocol.helper_set import HelperSet
from protocol.hpke import KEY_ID_SIZE, PrivateKey, Suite
from protocol.query import Query
from protocol.report import (
    BODY_HASH_AT,
    COMMITMENTS_AT,
    FIXED,
    HASH_SIZE,
    NONCE_SIZE,
    TIME_STEP,
    Header,
    ReportTerms,
    body_digest,
    check_seeds,
    open_seeds,
)

Bytes = npt.NDArray[np.uint8]
Mask = npt.NDArray[np.bool_]
Reasons = npt.NDArray[np.uint8]
Hours = npt.NDArray[np.uint32]

ADMITTED = 0
# A report's fate as one byte: 0, or the position of its rejection in the closed list, counted from 1.
CODE_OF: Mapping[Rejection, int] = {reason: code for code, reason in enumerate(Rejection, start=1)}
REASON_OF: Mapping[int, Rejection] = {code: reason for reason, code in CODE_OF.items()}

# Where the fields stand that may differ between good reports of one query; everything else must match the query's.
_KEYS_AT = 7
_TIME_AT = 79
_EPSILON_AT = 87
_KAPPA_AT = 99
_KEY_IDS_AT = _KEYS_AT + HASH_SIZE


@dataclass(frozen=True, slots=True)
class OpeningKey:
    """One of this helper's private HPKE keys, with the span in which devices may have sealed to it."""

    helper_set: bytes
    key_id: bytes
    not_before: int
    not_after: int
    private: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class AdmissionRules:
    """What a report must satisfy to count in this query at this helper. Plain data: it travels to worker processes."""

    party: int
    query: Query
    keys: tuple[OpeningKey, ...]
    oldest: int
    newest: int

    @classmethod
    def for_query(
        cls,
        party: int,
        query: Query,
        helper_sets: Sequence[HelperSet],
        private_keys: Mapping[bytes, PrivateKey],
        *,
        oldest: int,
        newest: int,
    ) -> AdmissionRules:
        """The keys a report may name are those this helper has in any of the sets it knows and still holds."""
        keys = [
            OpeningKey(known.digest, config.key.key_id, config.not_before, config.not_after, private.raw)
            for known in helper_sets
            for config in known.helpers[party].hpke_keys
            if (private := private_keys.get(config.key.key_id)) is not None
        ]
        return cls(party, query, tuple(keys), oldest, newest)


@lru_cache(maxsize=16)
def _usual_header(query: Query) -> bytes:
    """A header as this query expects it, with zeros wherever good reports may differ."""
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
    )
    no_id, no_hash = bytes(KEY_ID_SIZE), bytes(HASH_SIZE)
    header = Header(terms, no_hash, (no_id, no_id, no_id), bytes(NONCE_SIZE), (no_hash, no_hash, no_hash), no_hash)
    return header.encode()


def examine_headers(rules: AdmissionRules, headers: Bytes) -> Reasons:
    """The fate of every header (rows of one byte matrix), before anything is opened."""
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
    if usual.size != headers.shape[1]:
        return np.zeros(len(headers), dtype=np.bool_)
    constant = (slice(0, _KEYS_AT), slice(_KAPPA_AT, COMMITMENTS_AT), slice(FIXED.size, None))
    columns = [_equal(headers[:, part], usual[part]) for part in constant]
    matching: npt.NDArray[np.bool_] = np.logical_and.reduce(columns)
    return matching


def _equal(rows: Bytes, value: Bytes) -> npt.NDArray[np.bool_]:
    """Which rows are `value`. Whole batches of good reports are told in one comparison of bytes."""
    if rows.tobytes() == value.tobytes() * len(rows):
        return np.ones(len(rows), dtype=np.bool_)
    same: npt.NDArray[np.bool_] = (rows == value).all(axis=1)
    return same


def _rejection_of(rules: AdmissionRules, header: bytes) -> Rejection:
    """Why a header that differs from the usual one where none may differ is refused. There is always a reason."""
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
    """Helper set, key id and the key's validity at the report's time."""
    times = _uint(headers, _TIME_AT, 8)
    own_id = _own_key_id(rules.party)
    named = np.hstack([headers[:, _KEYS_AT:_KEY_IDS_AT], headers[:, own_id]])
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
    times = _uint(headers, _TIME_AT, 8)
    reasons = np.zeros(len(headers), dtype=np.uint8)
    reasons[times <= max(rules.oldest, 0)] = CODE_OF[Rejection.EXPIRED]
    reasons[times > max(rules.newest, 0)] = CODE_OF[Rejection.FROM_THE_FUTURE]
    reasons[times % np.uint64(TIME_STEP) != 0] = CODE_OF[Rejection.MALFORMED]
    return reasons


def _check_noise(rules: AdmissionRules, headers: Bytes) -> Reasons:
    """What was paid, compared in unbounded integers, once for every distinct (ε, Δ) in the batch."""
    query = rules.query
    reasons = np.zeros(len(headers), dtype=np.uint8)
    for rows, value in _groups(headers[:, _EPSILON_AT:_KAPPA_AT]):
        epsilon, sensitivity = int.from_bytes(value[:4], "big"), int.from_bytes(value[4:], "big")
        try:
            if not noise_covers(epsilon, sensitivity, query.epsilon_micros, query.sensitivity):
                reasons[rows] = CODE_OF[Rejection.NOISE_TOO_SMALL]
        except ProtocolError:
            reasons[rows] = CODE_OF[Rejection.MALFORMED]
    return reasons


def header_hours(headers: Bytes) -> Hours:
    """The hour each report says it was made in, counted from 1970; only those of admitted reports mean anything."""
    return (_uint(headers, _TIME_AT, 8) // np.uint64(TIME_STEP)).astype(np.uint32)


def _own_key_id(party: int) -> slice:
    start = _KEY_IDS_AT + KEY_ID_SIZE * party
    return slice(start, start + KEY_ID_SIZE)


def _groups(rows: Bytes) -> list[tuple[npt.NDArray[np.int64], bytes]]:
    """Positions of each distinct row. Good reports of one query have one value or a few."""
    if _equal(rows, rows[0]).all():
        return [(np.arange(len(rows)), rows[0].tobytes())]
    keys = np.ascontiguousarray(rows).view([("", np.void, rows.shape[1])]).ravel()
    values, positions = np.unique(keys, return_inverse=True)
    return [(np.flatnonzero(positions == index), value.tobytes()) for index, value in enumerate(values)]


def _uint(headers: Bytes, at: int, size: int) -> npt.NDArray[np.uint64]:
    values: npt.NDArray[np.uint64] = np.ascontiguousarray(headers[:, at : at + size]).view(f">u{size}").ravel()
    return values.astype(np.uint64)


def repeated(digests: DigestRows) -> Mask:
    """Which digests equal the one before them. A column that is out of order is no batch at all."""
    same = np.zeros(len(digests), dtype=np.bool_)
    for start in range(1, len(digests), DIGEST_SPAN):
        words = np.ascontiguousarray(digests[start - 1 : start + DIGEST_SPAN]).view(">u8")
        later, earlier = words[1:], words[:-1]
        different = later != earlier
        same[start : start + len(later)] = ~different.any(axis=1)
        rows, first_difference = np.arange(len(later)), np.argmax(different, axis=1)
        smaller = later[rows, first_difference] < earlier[rows, first_difference]
        if smaller.any():
            at = start + int(np.argmax(smaller)) + 1
            raise ProtocolError(f"report {at} of the column is out of order", "Sort the batch by report digest.")
    return same


@dataclass(frozen=True, slots=True)
class OpenedReports:
    """The reports of a chunk that opened: two seeds each, and the positions they had."""

    rows: list[int]
    first_seeds: list[bytes] = field(repr=False)
    second_seeds: list[bytes] = field(repr=False)


def open_reports(rules: AdmissionRules, chunk: ColumnChunk, elements: Vector, reasons: Reasons) -> OpenedReports:
    """Open every report that is still admitted, writing why into `reasons` where one fails.

    `elements` are the chunk's bodies, without columns at the helper that does not use them. Three passes rather than
    one: each kind of work stays in the processor's cache, which is worth a twentieth of the whole.
    """
    headers = chunk.headers()
    if chunk.layout.body:
        _check_bodies(chunk, headers, elements, reasons)
    sealed = _open_payloads(rules, headers, chunk.payloads(), reasons)
    opened = OpenedReports([], [], [])
    for row, seeds in sealed:
        try:
            first, second = check_seeds(rules.party, headers[row], seeds)
        except Rejected as error:
            reasons[row] = CODE_OF[error.rejection]
        else:
            opened.rows.append(row)
            opened.first_seeds.append(first)
            opened.second_seeds.append(second)
    return opened


def _check_bodies(chunk: ColumnChunk, headers: list[bytes], elements: Vector, reasons: Reasons) -> None:
    """Every element below p, and every body the one its header names."""
    bad = elements.max(axis=1) >= np.uint64(P)
    hashed = [
        body_digest(body) == header[BODY_HASH_AT : BODY_HASH_AT + HASH_SIZE]
        for header, body in zip(headers, chunk.bodies(), strict=True)
    ]
    bad |= ~np.array(hashed, dtype=np.bool_)
    reasons[bad & (reasons == ADMITTED)] = CODE_OF[Rejection.WRONG_BODY]


def _open_payloads(
    rules: AdmissionRules, headers: list[bytes], payloads: list[bytes], reasons: Reasons
) -> list[tuple[int, bytes]]:
    """The one HPKE open that every admitted report costs."""
    own_id = _own_key_id(rules.party)
    keys = {key.key_id: _private_key(key.private) for key in rules.keys}
    sealed = []
    for row in np.flatnonzero(reasons == ADMITTED).tolist():
        header = headers[row]
        try:
            sealed.append((row, open_seeds(rules.party, header, payloads[row], keys[header[own_id]])))
        except Rejected as error:
            reasons[row] = CODE_OF[error.rejection]
    return sealed


@lru_cache(maxsize=64)
def _private_key(raw: bytes) -> PrivateKey:
    return PrivateKey.from_raw(Suite.X25519_HKDF_SHA256_AES_128_GCM, raw)

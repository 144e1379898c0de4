"""Opening reports: the two seeds that a device sealed to this helper, checked against what the header commits to.

What admission costs is here: one HPKE open for each report.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from mpc_helpers.admission.rules import ADMITTED, CODE_OF, AdmissionRules, Reasons
from protocol.batch import ColumnChunk
from protocol.errors import Rejected, Rejection
from protocol.field import P, Vector
from protocol.header import BODY_HASH_SPAN, HELPER_SET_SPAN, KEY_ID_SPANS
from protocol.hpke import PrivateKey
from protocol.report import body_digest, check_seeds, open_seeds


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
    hashed = [body_digest(body) == header[BODY_HASH_SPAN] for header, body in zip(headers, chunk.bodies(), strict=True)]
    bad |= ~np.array(hashed, dtype=np.bool_)
    reasons[bad & (reasons == ADMITTED)] = CODE_OF[Rejection.WRONG_BODY]


def _open_payloads(
    rules: AdmissionRules, headers: list[bytes], payloads: list[bytes], reasons: Reasons
) -> list[tuple[int, bytes]]:
    """The one HPKE open that every admitted report costs."""
    own_id = KEY_ID_SPANS[rules.party]
    # Made for each chunk, which costs next to nothing: this process outlives the keys, and must keep none of them.
    keys = {key.helper_set + key.key_id: PrivateKey.from_raw(key.suite, key.private) for key in rules.keys}
    sealed = []
    for row in np.flatnonzero(reasons == ADMITTED).tolist():
        header = headers[row]
        key = keys[header[HELPER_SET_SPAN] + header[own_id]]
        try:
            sealed.append((row, open_seeds(rules.party, header, payloads[row], key)))
        except Rejected as error:
            reasons[row] = CODE_OF[error.rejection]
    return sealed

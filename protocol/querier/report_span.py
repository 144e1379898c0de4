"""What a batch says, in public headers, about the budgets that its reports were paid from: when, at which ε, Δ and κ.

Kept with every query, so that a querier's record outlives her batches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from protocol.batch import BatchReader
from protocol.epsilon import MICROS, charge, validate_terms
from protocol.header import EPSILON_SPAN, FIXED, KAPPA_SPAN, SENSITIVITY_SPAN, TIME_SPAN, TIME_STEP, Header
from protocol.json_message import JsonObject

_MICRO_DIGITS = 6
_ROWS = 2**15


@dataclass(frozen=True, slots=True)
class ReportSpan:
    """Reports of one site that could cost a device the same, and the hours of the first and the last of them."""

    site: str
    first: int
    last: int
    epsilon_micros: int
    sensitivity: int
    kappa: int

    def __post_init__(self) -> None:
        validate_terms(self.epsilon_micros, self.sensitivity)

    @property
    def end(self) -> int:
        """The last second at which one of them can have been made: a header says only the hour."""
        return self.last + TIME_STEP - 1

    def most(self, digits: int) -> int:
        """The most that one of them can take from one epoch's budget, in micros, as devices compute it.

        A device charges for Δ + κ at most, since Δ covers every report's sensitivity (Theorem 18). It takes the larger
        of the exact ceiling and the standard's arithmetic in doubles; both grow with ε. The header has ε rounded down
        to micros m, so ε < m + 1; it is m itself if ε has at most `digits` digits after the point and m fits them.
        """
        step = 10 ** max(0, _MICRO_DIGITS - digits)
        exactly = self.epsilon_micros % step == 0 and (self.epsilon_micros + 1) % step
        micros = self.epsilon_micros if exactly else self.epsilon_micros + 1
        moved = self.sensitivity + self.kappa
        scale = self.sensitivity / (micros / MICROS)
        return max(charge(self.epsilon_micros, moved, self.sensitivity), math.ceil(moved / scale * MICROS))

    def to_json(self) -> dict[str, object]:
        """As a saved query has it."""
        return {
            "site": self.site,
            "first": self.first,
            "last": self.last,
            "epsilon_micros": self.epsilon_micros,
            "sensitivity": self.sensitivity,
            "kappa": self.kappa,
        }

    @classmethod
    def from_json(cls, value: object) -> ReportSpan:
        """The span in a saved query, or a ProtocolError."""
        stored = JsonObject(value, "record of its reports")
        stored.expect(["site", "first", "last", "epsilon_micros", "sensitivity", "kappa"])
        whole = [stored.whole(name) for name in ("first", "last", "epsilon_micros", "sensitivity", "kappa")]
        return cls(stored.text("site"), *whole)


def spans_of(batch: BatchReader) -> tuple[ReportSpan, ...]:
    """The reports of a batch, by site and by what they could cost. Headers alone are read, some at a time."""
    if not len(batch):
        return ()
    texts = len(Header.decode(batch.records[0, : batch.layout.header].tobytes()).texts())
    alike = (EPSILON_SPAN, SENSITIVITY_SPAN, KAPPA_SPAN, slice(FIXED.size, FIXED.size + texts))
    found: dict[bytes, ReportSpan] = {}
    for start in range(0, len(batch), _ROWS):
        headers = np.array(batch.records[start : start + _ROWS, : batch.layout.header])
        rows = np.hstack([headers[:, cut] for cut in alike])
        hours = np.ascontiguousarray(headers[:, TIME_SPAN]).view(">u8").ravel()
        while len(rows):
            # Nearly always all of them.
            same = (rows == rows[0]).all(axis=1)
            key, terms = rows[0].tobytes(), Header.decode(headers[0].tobytes()).terms
            first, last = int(hours[same].min()), int(hours[same].max())
            if key in found:
                first, last = min(first, found[key].first), max(last, found[key].last)
            cost = (terms.epsilon_micros, terms.sensitivity, terms.kappa)
            found[key] = ReportSpan(terms.site, first, last, *cost)
            headers, rows, hours = headers[~same], rows[~same], hours[~same]
    return tuple(found.values())

"""What an answer is worth: how much noise is in it, how far off a bucket may be, and how much may be missing."""

from __future__ import annotations

import html
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from protocol.answer import Answer
from protocol.errors import TrefoilError
from protocol.noise_scale import NoiseScale
from protocol.querier.bias import BiasBound, bias_bound
from protocol.query import Query

CONFIDENCE = 0.95
BIAS_BETA = 0.05


@dataclass(frozen=True, slots=True)
class QueryResult:
    """An answer with what it is worth: noise, interval, δ, bias, and what it cost."""

    query: Query
    answer: Answer
    noise_sd: float
    half_width: int
    delta: Fraction
    bias: BiasBound | None
    seconds: Mapping[str, float]
    uploaded_bytes: int

    @property
    def histogram(self) -> list[int]:
        """The noisy number of each bucket."""
        return self.answer.histogram

    def to_pandas(self) -> Any:  # Any: pandas is not a dependency of ours
        """A table with a row for each bucket, for whoever has pandas."""
        try:
            import pandas
        except ImportError:
            raise TrefoilError("a table needs pandas", "Install it with: pip install pandas") from None
        answer, half = self.answer.histogram, self.half_width
        columns = {"answer": answer, "low": [x - half for x in answer], "high": [x + half for x in answer]}
        return pandas.DataFrame(columns, index=pandas.RangeIndex(len(answer), name="bucket"))

    def _repr_html_(self) -> str:
        """What a notebook shows: a table, with the interval that holds for each bucket."""
        rows = "".join(f"<tr><td>{at}</td><td>{value:,}</td></tr>" for at, value in enumerate(self.answer.histogram))
        return (
            f"<table><caption>{html.escape(self.query.site)}: {self.answer.counted:,} of {self.answer.submitted:,} "
            f"reports counted, ± {self.half_width:,} with probability {CONFIDENCE:.0%}</caption>"
            f"<tr><th>bucket</th><th>{html.escape(self.query.unit)}</th></tr>{rows}</table>"
        )

    def to_json(self) -> dict[str, object]:
        """Everything a person or a program may want of it."""
        answer = self.answer
        return {
            "query_id": self.query.query_id.hex(),
            "site": self.query.site,
            "batch_root": self.query.batch_root.hex(),
            "unit": self.query.unit,
            "debug": self.query.debug,
            "answer": answer.histogram,
            "noise": answer.noise.value,
            "noise_sd": self.noise_sd,
            "noise_variance": self.noise_sd**2,
            "delta": float(self.delta),
            "delta_exact": f"{self.delta.numerator}/{self.delta.denominator}",
            "attempts": answer.attempts,
            "confidence": CONFIDENCE,
            "half_width": self.half_width,
            "epsilon_micros": answer.epsilon_micros,
            "sensitivity": answer.sensitivity,
            "reports_submitted": answer.submitted,
            "reports_counted": answer.counted,
            "rejections": [{reason.value: count for reason, count in each.items()} for each in answer.rejections],
            "side_count": answer.side_count,
            "bias_bound": None if self.bias is None else self.bias.bound,
            "uploaded_bytes": self.uploaded_bytes,
            "seconds": dict(self.seconds),
        }


def worth(query: Query, answer: Answer, seconds: Mapping[str, float], uploaded_bytes: int) -> QueryResult:
    """Attach to an answer how far off it may be."""
    deviation, half, delta = 0.0, 0, Fraction(0)
    if not query.debug:
        scale = NoiseScale.of(query)
        deviation, half, delta = scale.standard_deviation, scale.half_width(CONFIDENCE), scale.delta
    bias = None
    if answer.side_count is not None:
        # A report moves by at most Δ = 2·value when epochs are dropped (Theorem 18); less for one bucket.
        bias = bias_bound(
            answer.side_count, kappa=query.kappa, sigma=deviation, largest_change=query.sensitivity, beta=BIAS_BETA
        )
    return QueryResult(query, answer, deviation, half, delta, bias, seconds, uploaded_bytes)

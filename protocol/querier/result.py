"""The result of a query: the answer with its noise, confidence interval and bias bound, the verdict, and a plot.

Run by the querier on public values alone. The error of an answer has two parts: noise, whose distribution is known,
and bias from epochs that could not pay, which a side query bounds (paper §3.4, Appendix F). The verdict judges the
total over all buckets: its relative error is √(bias² + noise²)/total, as in the paper's Figure 7.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from pathlib import Path
from typing import Any

from protocol.answer import Answer
from protocol.cli.console import legend_above, new_figure, not_installed, save_figure
from protocol.errors import ErrorKind, OutOfRange, TrefoilError
from protocol.query import Query

# At this σ and above, all of the helpers' noise modes have a scale above one.
LEAST_SIGMA = 2.5


@dataclass(frozen=True, slots=True)
class BiasBound:
    """With probability at least 1 − β, dropped epochs have moved the expected answer by at most `bound` in L1."""

    bound: float
    beta: float


def bias_bound(noisy_flags: int, *, kappa: int, sigma: float, largest_change: int, beta: float) -> BiasBound:
    """Return (M₀ + σ·ln(1/β)/√2) / κ · Δ^max, or zero if that is negative (Theorems 15 and 16).

    `noisy_flags` is the last bucket of the answer, which counts κ for each flagged report; `sigma` is the standard
    deviation of the noise in it, in the mode that the helpers used; `largest_change` is how far dropping any set of
    epochs can move one report: the value cap for one bucket, twice that for several (Theorem 18).

    The paper's tail is for Laplace noise. The discrete noise that helpers add stays inside it from a scale of about
    one on; less noise than that counts as `LEAST_SIGMA`, which is sound since tails only grow with the scale.
    """
    if not (kappa > 0 and largest_change > 0):
        message = "a bias bound needs a side query: κ and the largest change must be positive"
        raise OutOfRange(message)
    if not (0 < beta < 1):
        raise OutOfRange(f"β must be between 0 and 1, not {beta}")
    if not (0 <= sigma < math.inf):
        raise OutOfRange(f"σ must be a standard deviation, not {sigma}")
    spread = max(sigma, LEAST_SIGMA) if sigma else 0.0
    flagged = (noisy_flags + spread * math.log(1 / beta) / math.sqrt(2)) / kappa
    return BiasBound(max(0.0, flagged) * largest_change, beta)


CONFIDENCE = 0.95
BIAS_BETA = 0.05


@dataclass(frozen=True, slots=True, repr=False)
class QueryResult:
    """An answer with its noise, confidence interval, δ, bias bound and cost.

    >>> result = trefoil.ask("shop.batch", helpers.helper_set, site_key)  # doctest: +SKIP
    >>> result  # doctest: +SKIP
    <QueryResult of shop.example: [612, 88, 69, 75] ± 24 with probability 95%, 300 of 300 reports counted>
    >>> result.to_pandas()  # doctest: +SKIP
    """

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
        return self.answer.histogram

    def to_pandas(self) -> Any:  # Any: pandas is not a dependency of ours
        """Return a DataFrame with one row per bucket; needs pandas."""
        try:
            import pandas
        except ImportError:
            raise not_installed("a table needs pandas") from None
        answer, half = self.answer.histogram, self.half_width
        columns = {"answer": answer, "low": [x - half for x in answer], "high": [x + half for x in answer]}
        return pandas.DataFrame(columns, index=pandas.RangeIndex(len(answer), name="bucket"))

    def __repr__(self) -> str:
        return (
            f"<QueryResult of {self.query.site}: {self.histogram} ± {self.half_width} with probability "
            f"{CONFIDENCE:.0%}, {self.answer.counted:,} of {self.answer.submitted:,} reports counted>"
        )

    def _repr_html_(self) -> str:
        rows = "".join(f"<tr><td>{at}</td><td>{value:,}</td></tr>" for at, value in enumerate(self.answer.histogram))
        return (
            f"<table><caption>{html.escape(self.query.site)}: {self.answer.counted:,} of {self.answer.submitted:,} "
            f"reports counted, ± {self.half_width:,} with probability {CONFIDENCE:.0%}</caption>"
            f"<tr><th>bucket</th><th>{html.escape(self.query.unit)}</th></tr>{rows}</table>"
        )

    def to_json(self) -> dict[str, object]:
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


def assess(query: Query, answer: Answer, seconds: Mapping[str, float], uploaded_bytes: int) -> QueryResult:
    deviation, half, delta = 0.0, 0, Fraction(0)
    if not query.debug:
        scale = query.noise_scale
        deviation, half, delta = scale.standard_deviation, scale.half_width(CONFIDENCE), scale.delta
    bias = None
    if answer.side_count is not None:
        # Dropping epochs changes a report by at most Δ = 2·value (Theorem 18); less for one bucket.
        bias = bias_bound(
            answer.side_count, kappa=query.kappa, sigma=deviation, largest_change=query.sensitivity, beta=BIAS_BETA
        )
    return QueryResult(query, answer, deviation, half, delta, bias, seconds, uploaded_bytes)


class Decision(Enum):
    """Whether a querier should use an answer."""

    ACCEPT = "accept"
    REJECT = "reject"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Verdict:
    """One answer judged by one cutoff. Errors are relative to the total; `bias` is None if it was not measured."""

    decision: Decision
    cutoff: float
    total: int
    noise: float
    bias: float | None
    advice: str

    @property
    def error(self) -> float:
        return math.hypot(self.noise, self.bias or 0.0)

    def sentence(self) -> str:
        """Return the verdict as one sentence, followed by the advice."""
        if math.isinf(self.error):
            return f"{self.decision.value}: {self.advice[:1].lower()}{self.advice[1:]}"
        bound = "at least" if self.bias is None else "at most"
        limits = f"the relative error is {bound} {self.error:.3g}, and {self.cutoff:g} is allowed."
        return f"{self.decision.value}: {limits} {self.advice}".rstrip()

    def to_json(self) -> dict[str, object]:
        # JSON has no infinity. An error relative to a total of zero or less is null.
        finite = math.isfinite(self.error)
        return {
            "decision": self.decision.value,
            "cutoff": self.cutoff,
            "total": self.total,
            "noise_error": self.noise if finite else None,
            "bias_error": self.bias,
            "relative_error": self.error if finite else None,
            "advice": self.advice,
        }


def check_cutoff(cutoff: float) -> None:
    """Raise an error unless the cutoff is positive and finite. Called before the query is submitted."""
    if not (0 < cutoff < math.inf):
        raise TrefoilError(
            f"a cutoff is above 0, not {cutoff}",
            "Give the largest error you can use, such as 0.05.",
            kind=ErrorKind.OUT_OF_RANGE,
        )


def judge(result: QueryResult, cutoff: float) -> Verdict:
    """Accept an answer whose relative error is within `cutoff`; otherwise advise on the part that is too large."""
    check_cutoff(cutoff)
    total = sum(result.answer.histogram)
    if total <= 0:
        advice = "The total is not above zero: noise exceeds the signal. Query more reports, or with a larger ε."
        return Verdict(Decision.REJECT, cutoff, total, math.inf, None, advice)
    noise = result.noise_sd * math.sqrt(len(result.answer.histogram)) / total
    bias = None if result.bias is None else result.bias.bound / total
    if math.hypot(noise, bias or 0.0) > cutoff:
        return Verdict(Decision.REJECT, cutoff, total, noise, bias, _needed(result, total, noise, cutoff))
    if bias is None:
        advice = "The bias from exhausted budgets was not measured: request reports with --kappa."
        return Verdict(Decision.UNKNOWN, cutoff, total, noise, bias, advice)
    return Verdict(Decision.ACCEPT, cutoff, total, noise, bias, "")


def _needed(result: QueryResult, total: int, noise: float, cutoff: float) -> str:
    """Return advice on the first cause that alone is too large: noise, the side query's noise, or dropped epochs."""
    if noise > cutoff:
        return f"Noise alone is {noise:.3g}: it takes {_times(noise / cutoff)} the reports, or as much more ε."
    allowed = math.sqrt(cutoff**2 - noise**2)
    least = _flag_noise(result) / total
    if least > allowed:
        return f"The side query is too noisy: it takes {_times(least / allowed)} its κ, or as many more reports."
    return "Too many reports may lack impressions: query the same weeks less, or wait for new ones."


def _flag_noise(result: QueryResult) -> float:
    """Return the bias bound for zero flagged reports."""
    terms = result.query
    sigma, change = result.noise_sd, terms.sensitivity
    return bias_bound(0, kappa=terms.kappa, sigma=sigma, largest_change=change, beta=BIAS_BETA).bound


def _times(factor: float) -> str:
    return f"{math.ceil(factor * 10) / 10:g} times"


def plot_result(path: Path | str, result: QueryResult) -> None:
    """Draw one bar per bucket with the confidence interval of its noise, and of noise and bias if that is known.

    >>> trefoil.plot_result("answer.png", result)  # doctest: +SKIP
    """
    answer = result.answer
    figure = new_figure(8, 4.4)
    axes = figure.add_subplot()
    buckets = range(len(answer.histogram))
    noise = f"noise, {CONFIDENCE:.0%}"
    axes.bar(buckets, answer.histogram, color="#4c72b0", label="answer")
    axes.errorbar(
        buckets, answer.histogram, result.half_width, fmt="none", ecolor="black", capsize=2, zorder=3, label=noise
    )
    if result.bias is not None:
        # The bound is for all buckets together, so that one bucket may have all of it.
        reach = result.half_width + result.bias.bound
        bound = f"{result.bias.bound:,.0f} in all, {1 - result.bias.beta:.0%}"
        label = f"noise, and the most that bias can be ({bound})"
        axes.errorbar(buckets, answer.histogram, reach, fmt="none", ecolor="#dd8452", capsize=5, zorder=2, label=label)
    axes.set_xlabel("bucket")
    axes.set_ylabel(result.query.unit)
    of = "" if answer.counted == answer.submitted else f" of {answer.submitted:,}"
    bars = "intervals of the noise" if result.bias is None else "intervals of the noise, and of noise and bias"
    what = "no noise (debug)" if result.query.debug else bars
    figure.suptitle(f"{result.query.site}: {answer.counted:,}{of} reports counted; {what}", fontsize=10)
    legend_above(axes, 3)
    save_figure(Path(path), figure)

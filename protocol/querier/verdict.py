"""The verdict: whether an answer is good enough for its querier, in words, and what would be needed if it is not.

What is judged is the total over all buckets. Its error has two parts: noise, whose size is known, and bias, which a
side query bounds (paper §3.4, Appendix F). The relative error is √(bias² + noise²)/total, as in the paper's Figure 7.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from protocol.errors import TrefoilError
from protocol.querier.bias import bias_bound
from protocol.querier.worth import BIAS_BETA, QueryResult


class Decision(Enum):
    """What a querier should do with an answer."""

    ACCEPT = "accept"
    REJECT = "reject"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Verdict:
    """One answer against one cutoff. Errors are shares of the total; `bias` is None where nothing measured it."""

    decision: Decision
    cutoff: float
    total: int
    noise: float
    bias: float | None
    advice: str

    @property
    def error(self) -> float:
        """The relative error, as far as it is known."""
        return math.hypot(self.noise, self.bias or 0.0)

    def sentence(self) -> str:
        """What a person reads."""
        known = "at least " if self.bias is None else "at most "
        judged = (
            f"{self.decision.value}: the relative error is {known}{self.error:.3g}, and {self.cutoff:g} is allowed."
        )
        return f"{judged} {self.advice}".rstrip()

    def to_json(self) -> dict[str, object]:
        """For programs."""
        return {
            "decision": self.decision.value,
            "cutoff": self.cutoff,
            "total": self.total,
            "noise_error": self.noise,
            "bias_error": self.bias,
            "relative_error": self.error,
            "advice": self.advice,
        }


def check_cutoff(cutoff: float) -> None:
    """Refuse what no error could be within. Asked before the reports are spent."""
    if not (0 < cutoff < math.inf):
        raise TrefoilError(f"a cutoff is above 0, not {cutoff}", "Give the largest error you can use, such as 0.05.")


def judge(result: QueryResult, cutoff: float) -> Verdict:
    """Accept an answer whose relative error is within `cutoff`; otherwise say which part of it is too large."""
    check_cutoff(cutoff)
    total = sum(result.answer.histogram)
    if total <= 0:
        advice = "The total is not above zero: the noise has eaten the signal. Ask over more reports, or with more ε."
        return Verdict(Decision.REJECT, cutoff, total, math.inf, None, advice)
    noise = result.noise_sd * math.sqrt(len(result.answer.histogram)) / total
    bias = None if result.bias is None else result.bias.bound / total
    if math.hypot(noise, bias or 0.0) > cutoff:
        return Verdict(Decision.REJECT, cutoff, total, noise, bias, _needed(result, total, noise, cutoff))
    if bias is None:
        advice = "What budgets left out was not measured: have reports made with --kappa."
        return Verdict(Decision.UNKNOWN, cutoff, total, noise, bias, advice)
    return Verdict(Decision.ACCEPT, cutoff, total, noise, bias, "")


def _needed(result: QueryResult, total: int, noise: float, cutoff: float) -> str:
    """The first of the three causes that alone is too large: noise, the flag's own noise, and reports left out."""
    if noise > cutoff:
        return f"Noise alone is {noise:.3g}: it takes {_times(noise / cutoff)} the reports, or as much more ε."
    room = math.sqrt(cutoff**2 - noise**2)
    least = _flag_noise(result) / total
    if least > room:
        return f"The side query is too noisy to tell: it takes {_times(least / room)} its κ, or as many more reports."
    return "Too many reports may be missing something: ask less of the same weeks, or wait for new ones."


def _flag_noise(result: QueryResult) -> float:
    """What the bound would be if no report had been flagged."""
    terms = result.query
    sigma, change = result.noise_sd, terms.sensitivity
    return bias_bound(0, kappa=terms.kappa, sigma=sigma, largest_change=change, beta=BIAS_BETA).bound


def _times(factor: float) -> str:
    return f"{math.ceil(factor * 10) / 10:g} times"

"""Units: privacy loss as exact integers, and time as whole seconds since 1970, UTC (SPEC.md §2).

ε is counted in millionths ("micros"). Charges round up and entitlements round down, so rounding never favours the
spender. A float never decides: a request's ε enters once, as the exact rational the float stands for.
"""

from __future__ import annotations

import math
from fractions import Fraction

from protocol.errors import OutOfRange, ProtocolError

HOUR = 3_600
DAY = 24 * HOUR

MICROS = 1_000_000
# The largest ε whose micros still fit 32 bits, as the W3C standard has it.
MAX_EPSILON = 4294
MAX_MICROS = MAX_EPSILON * MICROS
# Of sensitivities, values and κ, in units the querier names. `query.MAX_SUM` bounds their sum over a batch below p/2.
MAX_SENSITIVITY = 2**40
# A query takes at least this fraction of a report. It bounds how many answers, and so how much work, one report can
# cause. Privacy does not need it. All three helpers must agree on it, so it is a constant of the wire version.
MOST_PARTS = 64


def entitlement(epsilon: float | Fraction) -> int:
    """Return ⌊ε·10⁶⌋, what a report may claim to have paid for. Reject NaN, infinities, and what rounds to zero."""
    # Written so that NaN, for which every comparison is false, fails; True counts as 1 in Python, and is no ε.
    if isinstance(epsilon, bool) or not (0 < epsilon <= MAX_EPSILON):
        raise _epsilon_range(epsilon)
    micros = math.floor(Fraction(epsilon) * MICROS)
    if micros == 0:
        # The float 0.000001 lies just below one millionth, so it must not be what is advised.
        raise OutOfRange(f"epsilon {epsilon} rounds down to zero millionths", "Ask for 0.000002 or more.")
    return micros


def nearest_micros(epsilon: float) -> int:
    """Return a budget as a person writes it, rounded to micros: 0.3 as a float lies just below 300,000."""
    if isinstance(epsilon, bool) or not (0 < epsilon <= MAX_EPSILON):
        raise _epsilon_range(epsilon)
    return max(1, round(Fraction(epsilon) * MICROS))


def _epsilon_range(epsilon: float | Fraction) -> ProtocolError:
    return OutOfRange(f"epsilon must be above 0 and at most {MAX_EPSILON}, not {epsilon}")


def charge(epsilon_micros: int, individual_sensitivity: int, query_sensitivity: int) -> int:
    """Return ⌈ε·Δ_x/Δ⌉ in micros: the charge of an epoch whose data can change the report by Δ_x, at noise scale Δ/ε.

    May exceed ε where a side query makes the individual sensitivity larger than Δ (DESIGN.md, "The side query").
    """
    validate_terms(epsilon_micros, query_sensitivity)
    if not (0 <= individual_sensitivity <= 2 * MAX_SENSITIVITY):
        raise OutOfRange(f"a sensitivity is between 0 and 2^41, not {individual_sensitivity}")
    return -(-epsilon_micros * individual_sensitivity // query_sensitivity)


def noise_covers(report_epsilon: int, report_sensitivity: int, query_epsilon: int, query_sensitivity: int) -> bool:
    """Return whether ε_q/Δ_q ≤ ε_r/Δ_r: the query is at least as noisy as the report paid for.

    Cross-multiplied in Python's unbounded integers; in 64 bits the products wrap, and a malicious querier passes.
    """
    validate_terms(report_epsilon, report_sensitivity)
    validate_terms(query_epsilon, query_sensitivity)
    return query_epsilon * report_sensitivity <= report_epsilon * query_sensitivity


def need(report_epsilon: int, report_sensitivity: int, query_epsilon: int, query_sensitivity: int) -> int:
    """Return max(⌈ε_q·Δ_r/Δ_q⌉, ⌈ε_r/64⌉): the cost of one answer to a report, in micros of its own ε (SPEC.md §3).

    The released answers that a report is in may cost it at most ε_r together. Then Σ ε_q/Δ_q ≤ ε_r/Δ_r, which is all
    that the proofs of SPEC.md §10 use. Each term is rounded up, so rounding never favours the spender; for one answer
    ⌈ε_q·Δ_r/Δ_q⌉ ≤ ε_r is exactly `noise_covers`, because ε_r is an integer.
    """
    validate_terms(report_epsilon, report_sensitivity)
    validate_terms(query_epsilon, query_sensitivity)
    return max(-(-query_epsilon * report_sensitivity // query_sensitivity), least_need(report_epsilon))


def least_need(report_epsilon: int) -> int:
    """Return ⌈ε_r/64⌉, the least that any answer costs a report: a report with less left is used up."""
    return -(-report_epsilon // MOST_PARTS)


def affordable(report_epsilon: int, report_sensitivity: int, left: int, query_sensitivity: int) -> int:
    """Return the largest ε_q, in micros, of a query at Δ_q that costs the report at most `left`; 0 if there is none."""
    validate_terms(report_epsilon, report_sensitivity)
    validate_terms(MAX_MICROS, query_sensitivity)
    if left < least_need(report_epsilon):
        return 0
    return min(left * query_sensitivity // report_sensitivity, MAX_MICROS)


def validate_terms(epsilon_micros: int, sensitivity: int) -> None:
    """Reject an (ε, Δ) pair that no header or query may carry."""
    if not (0 < epsilon_micros <= MAX_MICROS):
        raise OutOfRange(f"epsilon must be 1 to {MAX_MICROS} micros, not {epsilon_micros}")
    if not (0 < sensitivity <= MAX_SENSITIVITY):
        raise OutOfRange(f"a query's sensitivity must be 1 to 2^40, not {sensitivity}")


def show(micros: int) -> str:
    """Return micros as ε in exact decimals, without trailing zeros."""
    whole, fraction = divmod(abs(micros), MICROS)
    digits = f"{fraction:06d}".rstrip("0")
    return ("-" if micros < 0 else "") + (f"{whole}.{digits}" if digits else str(whole))

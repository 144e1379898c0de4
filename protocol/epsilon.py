"""Privacy loss as exact integers, in millionths of ε ("micros"): charges round up, entitlements round down.

A float never decides: a request's ε enters once, as the exact rational the float stands for.
"""

from __future__ import annotations

import math
from fractions import Fraction

from protocol.errors import ProtocolError

MICROS = 1_000_000
# The largest ε whose micros still fit 32 bits, as the W3C standard has it.
MAX_EPSILON = 4294
MAX_MICROS = MAX_EPSILON * MICROS
# Sensitivities, values and κ are in units the querier names; far below p/2, so that sums of 2^20 reports cannot wrap.
MAX_SENSITIVITY = 2**40


def entitlement(epsilon: float | Fraction) -> int:
    """⌊ε·10⁶⌋: what a report may claim to have paid for. Refuses NaN, infinities, zero, and what rounds to zero."""
    # Written so that NaN, for which every comparison is false, fails; True counts as 1 in Python, and is no ε.
    if isinstance(epsilon, bool) or not (0 < epsilon <= MAX_EPSILON):
        raise ProtocolError(f"epsilon must be above 0 and at most {MAX_EPSILON}, not {epsilon}")
    micros = math.floor(Fraction(epsilon) * MICROS)
    if micros == 0:
        # The float 0.000001 lies just below one millionth, so it must not be what is advised.
        raise ProtocolError(f"epsilon {epsilon} rounds down to zero millionths", "Ask for 0.000002 or more.")
    return micros


def nearest_micros(epsilon: float) -> int:
    """A budget as a person writes it: devices have whole micros, and 0.3 as a float lies just below 300,000."""
    if isinstance(epsilon, bool) or not (0 < epsilon <= MAX_EPSILON):
        raise ProtocolError(f"epsilon must be above 0 and at most {MAX_EPSILON}, not {epsilon}")
    return max(1, round(Fraction(epsilon) * MICROS))


def charge(epsilon_micros: int, individual_sensitivity: int, query_sensitivity: int) -> int:
    """⌈ε·Δ_x/Δ⌉ in micros: what an epoch pays when its data can change the report by Δ_x, under noise of scale Δ/ε.

    May exceed ε where a side query makes the individual sensitivity larger than Δ (DESIGN.md, "The side query").
    """
    validate_terms(epsilon_micros, query_sensitivity)
    if not (0 <= individual_sensitivity <= 2 * MAX_SENSITIVITY):
        raise ProtocolError(f"a sensitivity is between 0 and 2^41, not {individual_sensitivity}")
    return -(-epsilon_micros * individual_sensitivity // query_sensitivity)


def noise_covers(report_epsilon: int, report_sensitivity: int, query_epsilon: int, query_sensitivity: int) -> bool:
    """Whether ε_q/Δ_q ≤ ε_r/Δ_r: the query is at least as noisy as the report paid for.

    Cross-multiplied in Python's unbounded integers; in 64 bits the products wrap and a cheater gets in.
    """
    validate_terms(report_epsilon, report_sensitivity)
    validate_terms(query_epsilon, query_sensitivity)
    return query_epsilon * report_sensitivity <= report_epsilon * query_sensitivity


def validate_terms(epsilon_micros: int, sensitivity: int) -> None:
    """An (ε, Δ) pair as it travels in headers and queries."""
    if not (0 < epsilon_micros <= MAX_MICROS):
        raise ProtocolError(f"epsilon must be 1 to {MAX_MICROS} micros, not {epsilon_micros}")
    if not (0 < sensitivity <= MAX_SENSITIVITY):
        raise ProtocolError(f"a query's sensitivity must be 1 to 2^40, not {sensitivity}")


def show(micros: int) -> str:
    """Micros as people read ε: exact decimals without trailing zeros."""
    whole, fraction = divmod(abs(micros), MICROS)
    digits = f"{fraction:06d}".rstrip("0")
    return ("-" if micros < 0 else "") + (f"{whole}.{digits}" if digits else str(whole))

"""Individual privacy loss: what one epoch of one device pays for one report (paper §4.3 and App. F).

A charge is ⌈ε·Δ_x/Δ⌉ micro-epsilons, where Δ_x bounds how far the epoch's events can move this report and the noise
has scale Δ/ε. It is the larger of the standard's formula in IEEE doubles and the exact integer ceiling: a float may
raise a charge, never lower it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from protocol.epsilon import MICROS, charge


def report_sensitivity(value: int, buckets: int, epochs: int) -> int:
    """Δ(ρ), how far any one epoch can move a report of sum at most `value` (Theorem 18).

    With one bucket or one epoch it is the value. With several of both, removing an epoch can take the value out of one
    bucket and put it into another: twice the value.
    """
    return value if buckets == 1 or epochs == 1 else 2 * value


@dataclass(frozen=True, slots=True)
class LossTerms:
    """What a request says about noise, as charges need it: ε as requested and in whole micros, Δ and κ."""

    epsilon: float
    epsilon_micros: int
    query_sensitivity: int
    kappa: int = 0

    def loss(self, individual_sensitivity: int) -> int:
        """⌈ε·(Δ_x)/Δ⌉ in micros. The double arithmetic follows the standard's order of operations exactly."""
        noise_scale = self.query_sensitivity / self.epsilon
        as_double = math.ceil(individual_sensitivity / noise_scale * MICROS)
        if self.epsilon_micros == 0:
            # Below one millionth no report can be sealed; simulations still charge what the standard does.
            return as_double
        return max(as_double, charge(self.epsilon_micros, individual_sensitivity, self.query_sensitivity))


@dataclass(frozen=True, slots=True)
class EpochLoss:
    """What one epoch owes: to the querier's own filter, to those that all sites share, and to impression quotas."""

    site: int
    everyone: int
    quota: int


def epoch_loss(terms: LossTerms, *, relevant: bool, sensitivity: int, output: int | None) -> EpochLoss:
    """Theorem 4 by its cases. `sensitivity` is Δ(ρ); `output` is the report's sum when the window is one epoch.

    Case 1, no relevant impression: nothing. Case 2, a window of one epoch (decided by the window, never by the data):
    the querier's filter pays ‖A(F) − A(∅)‖₁, which is `output`. Case 3: it pays Δ(ρ). Filters that all queriers share
    pay Δ(ρ) in both. With a side query every epoch owes κ on top, with data or without: whether an epoch has data must
    not show in what it can still pay (Theorem 17 charges epochs with data only; that leaks without bound).
    """
    shared = sensitivity if relevant else 0
    own = (shared if output is None else output) if relevant else 0
    return EpochLoss(
        site=terms.loss(own + terms.kappa),
        everyone=terms.loss(shared + terms.kappa),
        quota=terms.loss(shared),
    )

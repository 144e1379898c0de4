"""What-if for designers: from an accuracy target to a privacy budget, and how long that budget lasts."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from functools import cache

from rich.table import Table

from benchmarks.experiments.policies import Crowd, System
from benchmarks.results.columns import Columns, on_terminal
from protocol.cli.console import plain_table
from protocol.errors import ErrorKind, TrefoilError
from protocol.noise import MAX_CONFIDENCE, NoiseMode, NoiseScale, law_of
from protocol.units import MAX_EPSILON, MICROS, charge, show

MONTH_DAYS = 30


@dataclass(frozen=True, slots=True)
class Plan:
    """A query someone would like to ask. Values and `expected_mean` are in the querier's unit."""

    reports: int
    value_cap: int
    expected_mean: float
    error: float
    confidence: float
    noise: NoiseMode = NoiseMode.LOCAL
    window_days: int = 30
    epoch_days: int = 7
    capacity: float = 1.0
    buckets: int = 1
    kappa: int = 0
    # The paper's two knobs: how much of the population is in one query, and how many impressions a person sees a day.
    participation: float = 0.1
    impressions_per_day: float = 0.1

    def __post_init__(self) -> None:
        for allowed, rule in (
            (self.reports >= 1 <= self.value_cap and self.buckets >= 1, "reports, value cap and buckets are 1 or more"),
            (0 < self.expected_mean <= self.value_cap, f"the expected mean is above 0 and at most {self.value_cap}"),
            (
                0 < self.error < math.inf and 0 < self.confidence <= MAX_CONFIDENCE,
                f"the error is above 0, and the confidence above 0 and at most {MAX_CONFIDENCE}",
            ),
            (self.window_days >= 0 <= self.kappa, "window and κ are 0 or more"),
            (self.epoch_days >= 1, "an epoch lasts at least a day"),
            (0 < self.participation <= 1, "participation is above 0 and at most 1"),
            (self.impressions_per_day >= 0, "impressions per day are 0 or more"),
            (0 < self.capacity <= MAX_EPSILON, f"the budget of an epoch is above 0 and at most {MAX_EPSILON}"),
        ):
            if not allowed:
                raise TrefoilError(rule, kind=ErrorKind.OUT_OF_RANGE)
        # Computed now, so that an infeasible plan is rejected before it is shown.
        self.epsilon_under(self.noise)

    @property
    def sensitivity(self) -> int:
        """Return Δ: the value cap for one bucket or one-epoch windows, twice that otherwise (Theorem 18)."""
        return self.value_cap if self.buckets == 1 or self.most_epochs == 1 else 2 * self.value_cap

    @property
    def most_epochs(self) -> int:
        """Return the largest number of epochs that a window touches."""
        return math.ceil(self.window_days / self.epoch_days) + 1 if self.window_days else 1

    @property
    def allowed(self) -> int:
        """Return the allowed error in whole units. Decimals count as they were written, not as doubles."""
        return math.floor(Fraction(str(self.error)) * self.reports * Fraction(str(self.expected_mean)))

    @property
    def epsilon(self) -> int:
        """The least ε in micros at which the answer meets the target under the chosen noise."""
        return self.epsilon_under(self.noise)

    @property
    def epsilon_of_one_draw(self) -> int:
        """The paper's ε = Δ·ln(1/β)/(α·B·c̃): for a single Laplace draw, which helpers of ours need not make."""
        noise = self.error * self.reports * self.expected_mean / math.log(1 / (1 - self.confidence))
        return math.ceil(self.sensitivity / noise * MICROS)

    def epsilon_under(self, noise: NoiseMode) -> int:
        """Return the least ε in micros that meets the target under `noise`."""
        return _least_epsilon(noise, self.sensitivity, self.kappa, self.allowed, self.confidence)

    def within(self, noise: NoiseMode) -> float:
        """Return the probability that an answer at the planned ε is within the error, under `noise`."""
        return scale_of(noise, self.epsilon, self.sensitivity, self.kappa).coverage(self.allowed)

    def rmsre(self, noise: NoiseMode) -> float:
        """Return the relative root-mean-square error of the answer at the planned ε, under `noise`."""
        scale = scale_of(noise, self.epsilon, self.sensitivity, self.kappa)
        return scale.standard_deviation / (self.reports * self.expected_mean)


def scale_of(noise: NoiseMode, epsilon: int, sensitivity: int, kappa: int) -> NoiseScale:
    """Return the noise of a query at this ε, in micros."""
    return NoiseScale(noise, Fraction(epsilon, MICROS * sensitivity), sensitivity + kappa)


@cache
def _least_epsilon(noise: NoiseMode, sensitivity: int, kappa: int, allowed: int, confidence: float) -> int:
    """Return the least ε by bisection: coverage grows with ε."""
    low, high = 0, law_of(noise).largest_epsilon(sensitivity, kappa)
    if scale_of(noise, high, sensitivity, kappa).coverage(allowed) < confidence:
        raise TrefoilError(
            "no ε is large enough for this target",
            "Ask for more reports, or allow a larger error.",
            kind=ErrorKind.INCONSISTENT,
        )
    while high - low > 1:
        middle = (low + high) // 2
        if scale_of(noise, middle, sensitivity, kappa).coverage(allowed) >= confidence:
            high = middle
        else:
            low = middle
    return high


@dataclass(frozen=True, slots=True)
class PlanCost:
    """The cost of one such query to an epoch under one policy, in micros, and the queries a month."""

    system: System
    typical: int
    worst: int
    every_batch: int
    average: int

    def as_json(self) -> dict[str, object]:
        """Return the cost as it is written to JSON, in ε."""
        return {
            "system": self.system.value,
            "typical_epoch_cost": self.typical / MICROS,
            "worst_epoch_cost": self.worst / MICROS,
            "queries_per_month": self.every_batch,
            "queries_per_month_average_person": self.average,
        }


def costs(plan: Plan) -> list[PlanCost]:
    """Return each policy's price to an epoch, and the queries a month that fit its budget.

    `every_batch` is for a person who is in every batch with an impression in every epoch and the largest value: no
    answer is biased up to there. `average` is where the budget of an average person's epoch runs out.
    """
    price, factor = plan.epsilon, plan.sensitivity // plan.value_cap
    crowd = Crowd(
        price,
        mean=charge(price, max(1, round(factor * plan.expected_mean)) + plan.kappa, plan.sensitivity),
        most=charge(price, factor * plan.value_cap + plan.kappa, plan.sensitivity),
        idle=charge(price, plan.kappa, plan.sensitivity),
        participation=plan.participation,
        # The probability that an epoch holds a relevant impression, for Poisson impressions.
        exposure=1 - math.exp(-plan.impressions_per_day * plan.epoch_days),
    )
    entries = []
    for system in System:
        typical, worst, average = system.facts.planned(crowd)
        every_batch, average_person = _per_month(plan, worst, worst), _per_month(plan, typical, average)
        entries.append(PlanCost(system, typical, worst, every_batch, average_person))
    return entries


def _per_month(plan: Plan, once: int, price: float) -> int:
    """Return the queries per 30 days at which an epoch's budget lasts as long as windows reach it.

    That is its own length and the window after it: until then some query's window still reaches it. None at all if the
    epoch cannot pay even `once`, whatever it pays on average.
    """
    if once > plan.capacity * MICROS:
        return 0
    if price <= 0:
        raise TrefoilError(
            "no device would pay: there are no impressions",
            "Give --impressions-per-day above 0.",
            kind=ErrorKind.OUT_OF_RANGE,
        )
    affordable = math.floor(plan.capacity * MICROS / price)
    return affordable * MONTH_DAYS // (plan.window_days + plan.epoch_days)


def warning(plan: Plan, prices: list[PlanCost]) -> str | None:
    """Return a warning if devices could not pay for such a query even once, else None."""
    on_device = next(cost for cost in prices if cost.system is System.COOKIE_MONSTER)
    if on_device.worst <= plan.capacity * MICROS:
        return None
    costs = f"a full report costs a week with an impression ε = {show(on_device.worst)}"
    return (
        f"{costs}, and no week ever has more than {plan.capacity:g}: such reports will be null. "
        "Ask for more reports, allow a larger error, or use a noise mode that needs less."
    )


PRICES: Columns[PlanCost] = {
    "policy": lambda cost: cost.system.value,
    "ε per epoch": lambda cost: show(cost.typical),
    "at most": lambda cost: show(cost.worst),
    "queries/month": lambda cost: str(cost.every_batch),
    "average person": lambda cost: str(cost.average),
}


def plan_tables(plan: Plan, prices: list[PlanCost]) -> list[Table]:
    target = f"error within {plan.error:g}, probability {plan.confidence:g}, {plan.noise.value}"
    priced = on_terminal(f"ε = {show(plan.epsilon)}: {target}", PRICES, prices, words={"policy"})
    columns = ("noise mode", "ε it needs", f"within {plan.error:g} at ε = {show(plan.epsilon)}", "RMSRE")
    compared = plain_table("the same target under each noise", columns, words={"noise mode"})
    for mode, (needed, within, error) in under_every_noise(plan).items():
        numbers = (needed and show(int(needed)), within and f"{within:.4f}", error and f"{error:.4f}")
        compared.add_row(mode.value, *(text or "none" for text in numbers))
    compared.add_row("the paper's formula, one draw", show(plan.epsilon_of_one_draw), "", "")
    return [priced, compared]


def under_every_noise(plan: Plan) -> dict[NoiseMode, list[float | None]]:
    """Return the ε that each mode needs, and the coverage and RMSRE that it has at the planned ε.

    None where the mode cannot be used: no ε suffices, or `joint` refuses it.
    """
    compared: dict[NoiseMode, list[float | None]] = {mode: [None] * 3 for mode in NoiseMode}
    for mode, figures in compared.items():
        for place, compute in enumerate((plan.epsilon_under, plan.within, plan.rmsre)):
            with suppress(TrefoilError):
                figures[place] = compute(mode)
    return compared


def plan_json(plan: Plan, prices: list[PlanCost]) -> dict[str, object]:
    compared = {mode.value: figures for mode, figures in under_every_noise(plan).items()}
    return {
        "epsilon": plan.epsilon / MICROS,
        "epsilon_micros": plan.epsilon,
        "noise": plan.noise.value,
        "epsilon_of_one_draw": plan.epsilon_of_one_draw / MICROS,
        "epsilon_by_noise": {name: needed and needed / MICROS for name, (needed, _, _) in compared.items()},
        "within_error": {name: within for name, (_, within, _) in compared.items()},
        "sensitivity": plan.sensitivity,
        "noise_scale": plan.sensitivity * MICROS / plan.epsilon,
        "epochs_per_window": plan.most_epochs,
        "rmsre": {name: error for name, (_, _, error) in compared.items()},
        "policies": [cost.as_json() for cost in prices],
        "warning": warning(plan, prices),
    }

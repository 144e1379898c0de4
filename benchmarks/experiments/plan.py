"""What-if for designers: from an accuracy target to a privacy budget, and how long that budget lasts."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rich.table import Table

from benchmarks.experiments.policies import System
from benchmarks.experiments.tables import plain_table
from protocol.epsilon import MAX_EPSILON, MAX_MICROS, MICROS, charge, show
from protocol.errors import TrefoilError

MONTH_DAYS = 30
# Variance of each noise mode in units of one discrete Laplace of scale Δ/ε (DESIGN.md, "Noise").
NOISE_VARIANCE = {"one draw (the paper)": 1.0, "local": 1.5, "pairwise": 3.0}


@dataclass(frozen=True, slots=True)
class Plan:
    """A query someone would like to ask. Values and `expected_mean` are in the querier's unit."""

    reports: int
    value_cap: int
    expected_mean: float
    error: float
    confidence: float
    window_days: int = 30
    epoch_days: int = 7
    capacity: float = 1.0
    buckets: int = 1
    kappa: int = 0
    # The paper's two knobs: how much of the population is in one query, and how many impressions a person sees a day.
    participation: float = 0.1
    impressions_per_day: float = 0.1

    def __post_init__(self) -> None:
        if self.reports < 1 or self.value_cap < 1 or self.buckets < 1:
            raise TrefoilError("reports, value cap and buckets must be at least 1")
        if not (0 < self.expected_mean <= self.value_cap):
            raise TrefoilError(
                f"the expected mean must be above 0 and at most the value cap, {self.value_cap}",
                "It is the mean over all reports, those that find no impression counted as 0.",
            )
        if not (self.error > 0 and 0 < self.confidence < 1):
            raise TrefoilError("the error must be above 0, and the confidence between 0 and 1")
        if self.window_days < 0 or self.epoch_days < 1 or self.kappa < 0:
            raise TrefoilError("window and κ cannot be negative, and an epoch lasts at least a day")
        if not (0 < self.participation <= 1 and self.impressions_per_day >= 0):
            raise TrefoilError("participation is above 0 and at most 1, and impressions per day cannot be negative")
        if not (0 < self.capacity <= MAX_EPSILON):
            raise TrefoilError(f"the budget of an epoch must be above 0 and at most {MAX_EPSILON}, not {self.capacity}")
        if self.epsilon > MAX_MICROS:
            raise TrefoilError("no ε is large enough for this target", "Ask for more reports, or allow a larger error.")

    @property
    def sensitivity(self) -> int:
        """Δ: the value cap for one bucket or one-epoch windows, twice that otherwise (Theorem 18)."""
        return self.value_cap if self.buckets == 1 or self.most_epochs == 1 else 2 * self.value_cap

    @property
    def most_epochs(self) -> int:
        """How many epochs a window touches at most."""
        return math.ceil(self.window_days / self.epoch_days) + 1 if self.window_days else 1

    @property
    def exposure(self) -> float:
        """How likely an epoch holds a relevant impression, if they come at random."""
        return 1 - math.exp(-self.impressions_per_day * self.epoch_days)

    @property
    def epsilon(self) -> int:
        """ε = Δ·ln(1/β)/(α·B·c̃) in micros, rounded up: a hair more noise would miss the target."""
        noise = self.error * self.reports * self.expected_mean / math.log(1 / (1 - self.confidence))
        return math.ceil(self.sensitivity / noise * MICROS)


@dataclass(frozen=True, slots=True)
class Cost:
    """What one such query costs an epoch under one policy, in micros, and how many a month a budget allows."""

    system: System
    typical: int
    worst: int
    every_batch: int
    average: int

    def as_json(self) -> dict[str, object]:
        """The cost as it is written out, in ε."""
        return {
            "system": self.system.value,
            "typical_epoch_cost": self.typical / MICROS,
            "worst_epoch_cost": self.worst / MICROS,
            "queries_per_month": self.every_batch,
            "queries_per_month_average_person": self.average,
        }


def costs(plan: Plan) -> list[Cost]:
    """Each policy's price to an epoch, and the queries a month that fit its budget.

    `every_batch` is for a person who is in every batch with an impression in every epoch and the largest value: no
    answer is biased up to there. `average` is where the budget of an average person's epoch runs out.
    """
    price, factor = plan.epsilon, plan.sensitivity // plan.value_cap
    mean = charge(price, max(1, round(factor * plan.expected_mean)) + plan.kappa, plan.sensitivity)
    most = charge(price, factor * plan.value_cap + plan.kappa, plan.sensitivity)
    idle = charge(price, plan.kappa, plan.sensitivity)
    paid = plan.participation * (plan.exposure * mean + (1 - plan.exposure) * idle)
    return [
        # One central filter: everyone's budget goes with every query.
        Cost(System.IPA_LIKE, price, price, _per_month(plan, price), _per_month(plan, price)),
        Cost(System.ARA_LIKE, price, price, _per_month(plan, price), _per_month(plan, plan.participation * price)),
        Cost(System.COOKIE_MONSTER, mean, most, _per_month(plan, most), _per_month(plan, paid)),
    ]


def _per_month(plan: Plan, price: float) -> int:
    """Queries per 30 days at which an epoch's budget lasts for as long as the epoch is asked for.

    That is its own length and the window after it: until then some query's window still reaches it.
    """
    if price <= 0:
        raise TrefoilError("nobody would ever pay: there are no impressions", "Give --impressions-per-day above 0.")
    affordable = math.floor(plan.capacity * MICROS / price)
    return affordable * MONTH_DAYS // (plan.window_days + plan.epoch_days)


def answers_within(plan: Plan, variance: float) -> float:
    """The relative root-mean-square error of the answer, from noise of `variance` times 2·(Δ/ε)²."""
    scale = plan.sensitivity * MICROS / plan.epsilon
    return math.sqrt(2 * variance) * scale / (plan.reports * plan.expected_mean)


def plan_tables(plan: Plan, prices: list[Cost]) -> list[Table]:
    """The answer as a person reads it."""
    title = f"ε = {show(plan.epsilon)} for an error within {plan.error:g} with probability {plan.confidence:g}"
    columns = ("policy", "ε per epoch", "at most", "queries/month", "average person")
    first = plain_table(title, columns, words={"policy"})
    for cost in prices:
        numbers = (show(cost.typical), show(cost.worst), str(cost.every_batch), str(cost.average))
        first.add_row(cost.system.value, *numbers)
    second = plain_table("relative error of the answer", ("noise mode", "RMSRE"), words={"noise mode"})
    for mode, variance in NOISE_VARIANCE.items():
        second.add_row(mode, f"{answers_within(plan, variance):.4f}")
    return [first, second]


def plan_json(plan: Plan, prices: list[Cost]) -> dict[str, object]:
    """The answer as `--json` writes it."""
    return {
        "epsilon": plan.epsilon / MICROS,
        "epsilon_micros": plan.epsilon,
        "sensitivity": plan.sensitivity,
        "noise_scale": plan.sensitivity * MICROS / plan.epsilon,
        "epochs_per_window": plan.most_epochs,
        "rmsre": {mode: answers_within(plan, variance) for mode, variance in NOISE_VARIANCE.items()},
        "policies": [cost.as_json() for cost in prices],
    }

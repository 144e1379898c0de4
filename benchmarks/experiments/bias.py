"""What a querier learns from the side query (Fig. 7): a noisy bound on the error, and which answers to discard.

Conclusions depend on the noise drawn, so everything here is computed over many draws, never one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import assert_never

import numpy as np

from benchmarks.experiments.policies import Accounting, charges
from benchmarks.experiments.simulation import NEVER, Run, noise_scale
from benchmarks.experiments.world import Flags, Floats, World
from benchmarks.workloads.seeded import generator
from protocol.units import MICROS

BETA = 0.05
CUTOFFS = (0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3)


class Margin(Enum):
    """The margin of the bound above the noisy count: Theorem 15 takes σ = √2·b, the artifact puts b in σ's place."""

    THEOREM = "theorem"
    ARTIFACT = "artifact"


class Bound(Enum):
    """The evidence that a bound on the bias uses.

    The side query alone; or (as the artifact does) also that no sum exceeds B·Δ, to which no margin is added; or
    nothing but her own record of what she has asked: an answer is unbiased for certain if no epoch can be out of budget
    yet, and of unknown bias otherwise (Appendix F, "Detecting bias with global sensitivity"; costs no budget).
    """

    SIDE_QUERY = "side query"
    BEST_OF_BOTH = "side query, batch cap"
    OWN_RECORD = "her own record, no budget"


@dataclass(frozen=True, slots=True)
class Draws:
    """Noisy answers of one run, one row per draw: the side query's count (in κ), and the main answer."""

    flags: Floats
    answers: Floats
    scale: Floats

    @classmethod
    def of(cls, world: World, run: Run, count: int, seed: int) -> Draws:
        """Draw the noise of every query `count` times. Seeded: this is a study of noise, not noise that protects."""
        rng = generator(seed)
        scale = noise_scale(world)
        shape = (count, world.submitted)
        return cls(
            flags=run.kappa * run.flagged + rng.laplace(0.0, scale, shape),
            answers=run.answer + rng.laplace(0.0, scale, shape),
            scale=scale,
        )


@dataclass(frozen=True, slots=True)
class Study:
    """One way to bound the bias, over all draws. Shares are of queries; lists have one number per draw."""

    margin: Margin
    bound: Bound
    covers_flags: float
    covers_bias: float
    estimates: Floats
    errors: Floats

    def accepted(self, cutoff: float) -> Floats:
        """Return the share of queries whose estimated error is within the cutoff, in each draw."""
        share: Floats = (self.estimates <= cutoff).mean(axis=1)
        return share

    def worst(self, cutoff: float) -> Floats:
        """Return the largest true error among accepted queries, in each draw; zero where none was accepted."""
        worst: Floats = np.where(self.estimates <= cutoff, self.errors, 0.0).max(axis=1)
        return worst

    def as_json(self) -> dict[str, object]:
        return {
            "margin": self.margin.value,
            "bound": self.bound.value,
            "beta": BETA,
            "draws": len(self.estimates),
            "covers_flags": self.covers_flags,
            "covers_bias": self.covers_bias,
            "cutoffs": [self._at(cutoff) for cutoff in CUTOFFS],
        }

    def _at(self, cutoff: float) -> dict[str, object]:
        worst = self.worst(cutoff)
        return {
            "cutoff": cutoff,
            "accepted_mean": float(self.accepted(cutoff).mean()),
            "draws_with_worst_within_cutoff": float((worst <= cutoff).mean()),
            "worst_quartiles": [float(x) for x in np.quantile(worst, [0, 0.25, 0.5, 0.75, 1])],
        }


def pooled(studies: Sequence[Study]) -> Study:
    """Return one bound's studies of several seeds as one: every draw of every seed, with the true errors of its own.

    Seeds may fill different numbers of batches; the queries that all of them have are taken.
    """
    queries = min(len(study.errors) for study in studies)
    errors = [np.broadcast_to(study.errors[:queries], (len(study.estimates), queries)) for study in studies]
    return replace(
        studies[0],
        covers_flags=float(np.mean([study.covers_flags for study in studies])),
        covers_bias=float(np.mean([study.covers_bias for study in studies])),
        estimates=np.concatenate([study.estimates[:, :queries] for study in studies]),
        errors=np.concatenate(errors),
    )


def studies_of(world: World, run: Run, draws: Draws) -> list[Study]:
    """Study every bound with every margin; the querier's own record has none."""
    measured = [study(world, run, draws, margin, bound) for bound in list(Bound)[:2] for margin in Margin]
    return [*measured, study(world, run, draws, Margin.THEOREM, Bound.OWN_RECORD)]


def study(world: World, run: Run, draws: Draws, margin: Margin, bound: Bound) -> Study:
    """Bound the bias of every answer in every draw, and estimate its RMSRE as the querier would, from noisy numbers."""
    side = (draws.flags + _margin(margin, draws.scale)) / run.kappa * world.cap
    match bound:
        case Bound.SIDE_QUERY:
            # A negative bound is no tighter than zero.
            used = np.maximum(side, 0.0)
        case Bound.BEST_OF_BOTH:
            batch = np.bincount(world.conversions.query, minlength=world.submitted)
            used = np.minimum(side, batch * world.cap - draws.answers)
        case Bound.OWN_RECORD:
            used = np.broadcast_to(np.where(certainly_unbiased(world, run), 0.0, np.inf), side.shape)
        case _:
            assert_never(bound)
    estimates = np.sqrt(used**2 + 2 * draws.scale**2) / np.abs(draws.answers)
    return Study(
        margin=margin,
        bound=bound,
        covers_flags=float((side >= run.flagged * world.cap).mean()),
        covers_bias=float((used >= run.truth - run.answer).mean()),
        estimates=estimates,
        errors=run.rmsre,
    )


def certainly_unbiased(world: World, run: Run, capacity: int = MICROS) -> Flags:
    """Return the queries whose epochs cannot have run out on any device: all requests so far fit the budget.

    A device is in a batch at most once, so that each query takes at most ⌈ε·(Δ + κ)/Δ⌉ from each epoch it spans. What
    counts are the reports: a query takes part from its first one on, though its batch is full only later.
    """
    queries, conversions = world.queries, world.conversions
    prices = charges(Accounting.PAPER, queries.epsilon, world.cap + run.kappa, world.cap)
    begun, full = np.full(world.submitted, NEVER), np.full(world.submitted, -NEVER)
    np.minimum.at(begun, conversions.query, conversions.time)
    np.maximum.at(full, conversions.query, conversions.time)
    certain = np.zeros(world.submitted, dtype=np.bool_)
    for query in range(world.submitted):
        concurrent = (begun <= full[query]) & (queries.advertiser == queries.advertiser[query])
        epochs = range(int(run.first_epoch[query]), int(run.last_epoch[query]) + 1)
        spans = (concurrent & (run.first_epoch <= epoch) & (epoch <= run.last_epoch) for epoch in epochs)
        certain[query] = all(int(prices[span].sum()) <= capacity for span in spans)
    return certain


def _margin(margin: Margin, scale: Floats) -> Floats:
    """Return σ·ln(1/β)/√2, with σ the noise's standard deviation √2·b, or b itself."""
    match margin:
        case Margin.THEOREM:
            sigma = math.sqrt(2) * scale
        case Margin.ARTIFACT:
            sigma = scale
        case _:
            assert_never(margin)
    return sigma * math.log(1 / BETA) / math.sqrt(2)

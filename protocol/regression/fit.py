"""From public features and one noisy answer to a model, or to the reason why there is none.

Minimises Σ ln(1 + e^(θ·z)) − θ·t + ½·θᵀΛθ, the intercept not shrunk: strictly convex, so the fit exists and is unique
whatever the noise did to the answer. Nothing in it depends on a single report.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from protocol.errors import TrefoilError
from protocol.regression.design import Design, Matrix, Noise
from protocol.regression.evidence import DRAWS, NORMAL_95, FitEvidence
from protocol.regression.evidence import covariance as evidence_covariance
from protocol.regression.model import FitVerdict, Model

# The count must be this many of its deviations from 0, and an effect this improbable by chance, to be spoken of.
RATE_DEVIATIONS = 4.0
SIGNIFICANT = 0.01
_SIGNIFICANT_DRAWS = math.floor(SIGNIFICANT * (DRAWS + 1))
_SEED = 0
_STEPS = 60
_CONVERGED = 1e-9


@dataclass(frozen=True, slots=True)
class Sums:
    """An answer in standardised terms: what noise alone can have put there is projected away."""

    count: float
    count_deviation: float
    standard: Matrix

    @classmethod
    def of(cls, design: Design, answer: Matrix, noise: Noise) -> Sums:
        """`answer` is Σ y·x over the design's rows, plus noise."""
        if answer.shape != (design.width + 1,):
            raise TrefoilError(
                f"the answer has {len(answer)} numbers and the features {design.width + 1} columns",
                "Fit an answer with the features of its own batch.",
            )
        projected = design.projection @ answer
        return cls(float(projected[0]) / design.constant, design.count_deviation(noise), design.to_standard @ projected)


def fit(design: Design, answer: Matrix, noise: Noise, unit: str = "") -> Model:
    """The model that the answer supports. Declines in words: see `FitVerdict`."""
    sums = Sums.of(design, answer, noise)
    verdict = FitVerdict.FITTED
    if min(sums.count, design.total - sums.count) <= max(RATE_DEVIATIONS * sums.count_deviation, 1):
        verdict = FitVerdict.RATE_UNKNOWN
    count = min(max(sums.count, 1.0), design.total - 1.0)
    evidence = FitEvidence(design, noise, count / design.total)
    # Seeded: two people who fit the same answer get the same model. Nothing secret is drawn.
    generator = np.random.default_rng(_SEED)
    spread = evidence.spread(sums.standard)
    # A fit is declined unless at most one in a hundred label-free answers looks as good.
    threshold = float(evidence.gains_by_chance(generator)[-_SIGNIFICANT_DRAWS])
    if verdict is FitVerdict.FITTED and spread.gain <= threshold:
        verdict = FitVerdict.NO_EFFECT
    if verdict is not FitVerdict.FITTED:
        return _constant(design, sums, verdict, unit, count)
    target = np.concatenate([[count], sums.standard])
    theta, curvature = _minimise(design, target, evidence.shrinkage(spread.smallest))
    factor = evidence.interval_factor(sums.standard, threshold, generator)
    covariance = _covariance(design, noise, curvature, spread.widest)
    return _model(design, sums, FitVerdict.FITTED, unit, theta, covariance, factor)


def _minimise(design: Design, target: Matrix, shrinkage: Matrix) -> tuple[Matrix, Matrix]:
    """Damped Newton from the constant rate. Gives the minimum and the curvature there, the intercept's first."""
    columns = np.hstack([np.ones((len(design.standard), 1)), design.standard])
    penalty = np.zeros((columns.shape[1], columns.shape[1]))
    penalty[1:, 1:] = shrinkage
    theta = np.zeros(columns.shape[1])
    theta[0] = math.log(target[0] / (design.total - target[0]))

    def value(at: Matrix) -> float:
        return float(design.weights @ np.logaddexp(0, columns @ at) - at @ target + 0.5 * at @ penalty @ at)

    now = value(theta)
    for _ in range(_STEPS):
        probability = 0.5 * (1 + np.tanh(columns @ theta / 2))
        gradient = columns.T @ (design.weights * probability) - target + penalty @ theta
        varying = design.weights * probability * (1 - probability)
        curvature: Matrix = columns.T @ (varying[:, None] * columns)
        step = np.linalg.solve(curvature + penalty + _ridge(curvature), gradient)
        decrement = float(gradient @ step)
        if decrement < _CONVERGED:
            return theta, curvature
        size = 1.0
        while size > 1e-6 and value(theta - size * step) > now - 0.25 * size * decrement:
            size /= 2
        theta = theta - size * step
        now = value(theta)
    raise TrefoilError("the fit did not converge", "Use fewer features, or larger batches.")


def _covariance(design: Design, noise: Noise, curvature: Matrix, place: int) -> Matrix:
    """Of intercept and slopes together: away from equal rates, what is unsure of one is unsure of the others."""
    middle = design.inflation * curvature + design.noise_covariance(noise) + _ridge(curvature)
    prior = np.eye(len(curvature))
    prior[0, 0] = 0.0
    return evidence_covariance(curvature, middle, prior, place)


def _ridge(curvature: Matrix) -> Matrix:
    """Far too little to move a fit; it keeps directions that no row has solvable."""
    ridge: Matrix = (1e-9 * float(np.trace(curvature)) / len(curvature) + 1e-12) * np.eye(len(curvature))
    return ridge


def _constant(design: Design, sums: Sums, verdict: FitVerdict, unit: str, count: float) -> Model:
    theta = np.zeros(design.width + 1)
    theta[0] = math.log(count / (design.total - count))
    return _model(design, sums, verdict, unit, theta, np.zeros((design.width + 1, design.width + 1)), NORMAL_95)


def _model(
    design: Design, sums: Sums, verdict: FitVerdict, unit: str, theta: Matrix, covariance: Matrix, factor: float
) -> Model:
    return Model(
        verdict=verdict,
        unit=unit,
        intercept=float(theta[0]),
        coefficients=theta[1:],
        mean=design.mean,
        scale=design.scale,
        covariance=covariance,
        interval_factor=factor,
        conversions=sums.count,
        conversions_deviation=sums.count_deviation,
        rows=int(design.total),
    )

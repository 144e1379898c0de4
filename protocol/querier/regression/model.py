"""Logistic regression from public features and one noisy answer, and the scores of its predictions.

At the maximum likelihood Σ σ(θ·x)·x = Σ y·x: only the right side is private, and it is queried once. In order:

- scores: ranking and log-loss
- `Design`: the public half: the features, standardised, and which part of an answer can only be noise
- `FitEvidence`: the standardised sums t are modelled as N(0, ω²·H² + M + N): coefficients of variance ω², labels that
  vary by M, and helpers' noise N. H is the curvature at equal rates; ω² is chosen on a grid, by the answer itself
- `Model`: predictions and intervals
- `fit`: minimises Σ ln(1 + e^(θ·z)) − θ·t + ½·θᵀΛθ, the intercept not shrunk: strictly convex, so that the fit exists
  and is unique for any noise. It declines, with a verdict, if the answer does not support a model
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from protocol.errors import ErrorKind, TrefoilError
from protocol.files import write_atomically

Matrix = npt.NDArray[np.float64]
Rows = npt.NDArray[np.int64]
Groups = npt.NDArray[np.int64]
Labels = npt.NDArray[np.bool_]
_SMALLEST = 1e-9


def read_document(path: Path, what: str, hint: str) -> Any:
    """Return the JSON in a file that a person names."""
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise TrefoilError(f"cannot read {path}: {error.strerror}", hint, kind=ErrorKind.FILE_UNREADABLE) from None
    except (ValueError, RecursionError) as error:
        raise TrefoilError(f"{path} is not {what}: {error}", hint, kind=ErrorKind.MALFORMED) from None


def area_under_curve(score: Matrix, label: Labels) -> float:
    """Return the probability that a random positive scores above a random negative; ties count half."""
    positives = int(label.sum())
    if not (0 < positives < len(label)):
        raise ValueError("the area under the curve needs positives and negatives")
    order = np.argsort(score, kind="stable")
    ordered = score[order]
    edges = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1], [True]]))
    ranks = np.empty(len(score))
    ranks[order] = np.repeat((edges[:-1] + edges[1:] - 1) / 2, np.diff(edges))
    above = float(ranks[label].sum()) - positives * (positives - 1) / 2
    return above / (positives * (len(label) - positives))


def log_loss(probability: Matrix, label: Labels) -> float:
    """Return the mean of −ln of the probability that was predicted for the actual outcome."""
    clipped = np.clip(probability, _SMALLEST, 1 - _SMALLEST)
    return float(-np.mean(np.where(label, np.log(clipped), np.log1p(-clipped))))


# Relative to the largest eigenvalue of the Gram matrix of unit columns: a smaller one is a linear relation of columns.
_RANK_CUT = 1e-9


@dataclass(frozen=True, slots=True)
class Noise:
    """One bucket's noise: its variance, and the shape r of the two negative binomials whose difference it is."""

    variance: float
    shape: float = 1.0

    def __post_init__(self) -> None:
        if not (0 <= self.variance < float("inf") and 0 < self.shape <= 3):
            message = "a noise has a variance of at least 0 and a shape of at most 3"
            raise TrefoilError(message, kind=ErrorKind.OUT_OF_RANGE)

    def draw(self, generator: np.random.Generator, size: tuple[int, ...]) -> Matrix:
        """Draw the continuous form of the helpers' noise: a difference of two gammas, with its long tails."""
        scale = np.sqrt(self.variance / (2 * self.shape))
        drawn: Matrix = scale * (generator.gamma(self.shape, size=size) - generator.gamma(self.shape, size=size))
        return drawn


class Design:
    """n rows of k columns, column 0 constant; equal rows are kept once, with a weight.

    `groups` numbers the rows by device where one conversion may label several of them. Their labels then vary
    together, by up to `inflation` times as much as independent ones (Kish's design effect).
    """

    def __init__(self, rows: Rows, groups: Groups | None = None) -> None:
        _check(rows)
        unique, inverse = np.unique(rows, axis=0, return_inverse=True)
        self.rows: Matrix = unique.astype(np.float64)
        self.weights: Matrix = np.bincount(inverse.ravel(), minlength=len(unique)).astype(np.float64)
        self.total = float(len(rows))
        self.constant = float(unique[0, 0])
        columns = self.rows[:, 1:]
        self.mean: Matrix = self.weights @ columns / self.total
        spread = np.sqrt(np.maximum(self.weights @ (columns - self.mean) ** 2 / self.total, 0))
        self.used = spread > _RANK_CUT * np.maximum(1.0, np.abs(columns).max(axis=0))
        self.scale: Matrix = np.where(self.used, spread, 1.0)
        self.standard: Matrix = self.standardised(self.rows)
        self.projection: Matrix = _row_space(self.rows, self.weights)
        # From sums of y·x to sums of y·z. Centring takes mean times the count out of every sum.
        self.to_standard: Matrix = (
            np.hstack([(-self.mean / self.constant / self.scale)[:, None], np.diag(1 / self.scale)])
            * self.used[:, None]
        )
        self.gram: Matrix = self.standard.T @ (self.weights[:, None] * self.standard)
        self.inflation = 1.0 if groups is None else _inflation(groups, len(rows))

    @property
    def width(self) -> int:
        """Return the number of coefficients without the intercept."""
        return int(self.standard.shape[1])

    def standardised(self, rows: Matrix) -> Matrix:
        """Return all columns but 0 with mean 0 and deviation 1 over this design; a constant column becomes 0."""
        centred: Matrix = (rows[:, 1:] - self.mean) / self.scale * self.used
        return centred

    def noise_covariance(self, noise: Noise) -> Matrix:
        """Return the covariance of the helpers' noise in count and standardised sums, which contain the count."""
        count = np.zeros((1, self.width + 1))
        count[0, 0] = 1 / self.constant
        turned = np.vstack([count, self.to_standard]) @ self.projection
        covariance: Matrix = noise.variance * turned @ turned.T
        return covariance

    def count_deviation(self, noise: Noise) -> float:
        """Return the standard deviation of the noise in the number of conversions, after the projection."""
        return float(np.sqrt(noise.variance * self.projection[0, 0])) / self.constant


def _check(rows: Rows) -> None:
    if rows.ndim != 2 or rows.shape[0] < 2 or rows.shape[1] < 2:
        message = "a regression takes at least two rows of an intercept and one more column"
        raise TrefoilError(message, kind=ErrorKind.TOO_FEW)
    if rows.dtype.kind not in "iu" or rows.min() < 0:
        raise TrefoilError("features are integers of at least 0", kind=ErrorKind.OUT_OF_RANGE)
    if rows[0, 0] == 0 or (rows[:, 0] != rows[0, 0]).any():
        message = "column 0 is the intercept: the same number, not 0, in every row"
        raise TrefoilError(message, kind=ErrorKind.INVALID_VALUE)


def _inflation(groups: Groups, rows: int) -> float:
    if len(groups) != rows:
        message = f"{len(groups)} groups for {rows} rows"
        raise TrefoilError(message, "Give every row one group.", kind=ErrorKind.INCONSISTENT)
    sizes = np.unique(groups, return_counts=True)[1].astype(np.float64)
    return float((sizes**2).sum() / sizes.sum())


def _row_space(rows: Matrix, weights: Matrix) -> Matrix:
    """Return the orthogonal projection on the values that sums of y·x can have.

    Such sums satisfy every linear relation of the columns (one-hot columns add up to the intercept); a deviation from
    one is noise. Columns are scaled to length one first, or a column of large numbers would hide a rare level.
    """
    lengths = np.sqrt(weights @ rows**2)
    lengths = np.where(lengths > 0, lengths, 1.0)
    unit = rows / lengths
    values, vectors = np.linalg.eigh(unit.T @ (weights[:, None] * unit))
    basis, _ = np.linalg.qr(lengths[:, None] * vectors[:, values > _RANK_CUT * values[-1]])
    projection: Matrix = basis @ basis.T
    return projection


LARGEST_SPREAD = 1.0
_GRID = np.exp(np.linspace(np.log(1e-4), np.log(LARGEST_SPREAD), 30))
DRAWS = 299
# Simulated answers that calibrate the intervals: enough that their 95 % quantile varies little.
CALIBRATION_DRAWS = 999
_ROWS = 200
_JITTER = 1e-6
NORMAL_95 = 1.959964


@dataclass(frozen=True, slots=True)
class Spread:
    """Which ω² an answer supports: the smallest and the widest within one unit of log-likelihood of the best.

    The smallest is fitted with: shrinking too much costs little, too little costs a lot. Uncertainty is stated for the
    widest, so that shrinking does not make the fit look surer than it is.
    """

    gain: float
    smallest: int
    widest: int


class FitEvidence:
    """ln P(t | ω²) − ln P(t | 0) over the grid, for many t at once."""

    def __init__(self, design: Design, noise: Noise, rate: float) -> None:
        curvature = rate * (1 - rate)
        jitter = _JITTER * design.total * curvature * np.eye(design.width)
        self.curvature: Matrix = curvature * design.gram + jitter
        self.label_noise: Matrix = design.inflation * self.curvature
        self.helper_noise: Matrix = design.noise_covariance(noise)[1:, 1:]
        self._design = design
        self._noise = noise
        middle = self.label_noise + self.helper_noise
        square = self.curvature @ self.curvature
        self._factors = [np.linalg.cholesky(spread * square + middle) for spread in (0.0, *_GRID)]
        self._determinants = np.array([np.log(np.diag(factor)).sum() for factor in self._factors])

    def of(self, sums: Matrix) -> Matrix:
        """Return one row for each ω² of the grid, one column for each column of `sums`."""
        squares = np.array([(np.linalg.solve(factor, sums) ** 2).sum(axis=0) for factor in self._factors])
        logs = -0.5 * squares - self._determinants[:, None]
        gained: Matrix = logs[1:] - logs[0]
        return gained

    def spread(self, sums: Matrix) -> Spread:
        """Return which ω² one answer supports."""
        return _spread(self.of(sums[:, None])[:, 0])

    def gains_by_chance(self, generator: np.random.Generator) -> Matrix:
        """Return the gains of labels without any effect, under the helpers' own long-tailed noise, ascending."""
        gains: Matrix = np.sort(self.of(self._without_effect(generator, DRAWS)).max(axis=0))
        return gains

    def interval_factor(self, sums: Matrix, threshold: float, generator: np.random.Generator) -> float:
        """Return how many stated deviations a 95 % interval takes, at least the normal's 1.96.

        A parametric bootstrap: simulate answers with coefficients of a variance that the answer supports and the
        helpers' noise, fit them by the same rules, and keep those for which the fit is not declined.
        """
        gained = self.of(sums[:, None])[:, 0]
        weights = np.exp(gained - gained.max())
        variances = generator.choice(_GRID, size=CALIBRATION_DRAWS, p=weights / weights.sum())
        truths = generator.normal(size=(self._design.width, CALIBRATION_DRAWS)) * np.sqrt(variances)
        worlds = self.curvature @ truths + self._without_effect(generator, CALIBRATION_DRAWS)
        spreads = [_spread(column) for column in self.of(worlds).T]
        shares = self._design.weights / self._design.total
        rows = self._design.standard[generator.choice(len(shares), size=_ROWS, p=shares)]
        ratios = [np.zeros(1)]
        for kind in sorted({(spread.smallest, spread.widest) for spread in spreads}):
            alike = [
                place
                for place, spread in enumerate(spreads)
                if (spread.smallest, spread.widest) == kind and spread.gain >= threshold
            ]
            estimate = np.linalg.solve(self.curvature + self.shrinkage(kind[0]), worlds[:, alike])
            deviation = row_deviations(rows, self.covariance(kind[1]))
            ratios.append((np.abs(rows @ (estimate - truths[:, alike])) / deviation[:, None]).ravel())
        return max(NORMAL_95, float(np.quantile(np.concatenate(ratios), 0.95)))

    def shrinkage(self, place: int) -> Matrix:
        """Return Λ = (I + N^½·H⁻¹·N^½)/ω², by which the best linear estimate shrinks: to 0 where noise dominates."""
        values, vectors = np.linalg.eigh(self.helper_noise)
        root = (vectors * np.sqrt(np.maximum(values, 0))) @ vectors.T
        shrunk: Matrix = (np.eye(len(root)) + root @ np.linalg.solve(self.curvature, root)) / _GRID[place]
        return shrunk

    def covariance(self, place: int) -> Matrix:
        """Return the covariance of the slopes, where no feature has an effect."""
        return covariance(self.curvature, self.label_noise + self.helper_noise, np.eye(len(self.curvature)), place)

    def _without_effect(self, generator: np.random.Generator, count: int) -> Matrix:
        design = self._design
        helpers = self._noise.draw(generator, (len(design.projection), count))
        labels = np.linalg.cholesky(self.label_noise) @ generator.normal(size=(design.width, count))
        drawn: Matrix = design.to_standard @ design.projection @ helpers + labels
        return drawn


def covariance(curvature: Matrix, middle: Matrix, prior: Matrix, place: int) -> Matrix:
    """Return the covariance of coefficients, (prior/ω² + H·(M + N)⁻¹·H)⁻¹; `middle` is M + N."""
    inverse = prior / _GRID[place] + curvature @ np.linalg.solve(middle, curvature)
    result: Matrix = np.linalg.inv(inverse)
    return result


def row_deviations(rows: Matrix, covariance: Matrix) -> Matrix:
    """Return the standard deviation of each row's linear predictor."""
    deviations: Matrix = np.sqrt(np.maximum(np.einsum("ij,jk,ik->i", rows, covariance, rows), 1e-300))
    return deviations


def _spread(gained: Matrix) -> Spread:
    gain = float(gained.max())
    supported = np.flatnonzero(gained >= gain - 1.0)
    return Spread(gain, int(supported[0]), int(supported[-1]))


FORMAT = 1
_LARGEST = 35.0


class FitVerdict(Enum):
    """The outcome of a fit."""

    FITTED = "fitted"
    RATE_UNKNOWN = "the rate itself is lost in the noise"
    NO_EFFECT = "no effect of any feature is significant"


@dataclass(frozen=True, slots=True)
class Model:
    """A logistic regression in standardised features. Without a significant effect, it predicts the common rate."""

    verdict: FitVerdict
    unit: str
    intercept: float
    coefficients: Matrix
    mean: Matrix
    scale: Matrix
    covariance: Matrix
    interval_factor: float
    conversions: float
    conversions_deviation: float
    rows: int

    def predict(self, rows: Matrix) -> Matrix:
        """Return the probability of a conversion for each row of features."""
        return _logistic(self._predictor(rows))

    def interval(self, rows: Matrix) -> tuple[Matrix, Matrix]:
        """Return a 95 % interval for each row, the helpers' noise included (`interval_factor`)."""
        predictor = self._predictor(rows)
        standard = np.hstack([np.ones((len(rows), 1)), self._standardised(rows)])
        reach = self.interval_factor * row_deviations(standard, self.covariance)
        return _logistic(predictor - reach), _logistic(predictor + reach)

    def save(self, path: Path) -> None:
        write_atomically(path, (json.dumps(self.to_json(), indent=2) + "\n").encode())

    @classmethod
    def load(cls, path: Path) -> Model:
        hint = "Make a model with trefoil regression fit."
        stored = read_document(path, "a model", hint)
        try:
            if stored["trefoil_model"] != FORMAT:
                raise ValueError
            values: dict[str, Any] = {name: np.array(stored[name], dtype=np.float64) for name in _ARRAYS}
            values |= {name: float(stored[name]) for name in _NUMBERS}
            return cls(verdict=FitVerdict[stored["verdict"]], unit=stored["unit"], rows=stored["rows"], **values)
        except (ValueError, KeyError, TypeError):
            message = f"{path} is not a model of format {FORMAT}"
            raise TrefoilError(message, hint, kind=ErrorKind.MALFORMED) from None

    def to_json(self) -> dict[str, object]:
        return {
            "trefoil_model": FORMAT,
            "verdict": self.verdict.name,
            "meaning": self.verdict.value,
            "unit": self.unit,
            "rows": self.rows,
            **{name: float(getattr(self, name)) for name in _NUMBERS},
            **{name: getattr(self, name).tolist() for name in _ARRAYS},
        }

    def _predictor(self, rows: Matrix) -> Matrix:
        if rows.ndim != 2 or rows.shape[1] != len(self.mean) + 1:
            raise TrefoilError(
                f"a row of this model has {len(self.mean) + 1} features, not {rows.shape[-1]}",
                "Encode rows with the features file that the model was fitted with.",
                kind=ErrorKind.INCONSISTENT,
            )
        predictor: Matrix = self.intercept + self._standardised(rows) @ self.coefficients
        return predictor

    def _standardised(self, rows: Matrix) -> Matrix:
        standardised: Matrix = (rows[:, 1:] - self.mean) / self.scale
        return standardised


_ARRAYS = ("coefficients", "mean", "scale", "covariance")
_NUMBERS = ("intercept", "interval_factor", "conversions", "conversions_deviation")


def _logistic(predictor: Matrix) -> Matrix:
    probability: Matrix = 1 / (1 + np.exp(-np.clip(predictor, -_LARGEST, _LARGEST)))
    return probability


# The count must be this many of its deviations from 0, and an effect this improbable by chance, to be reported.
RATE_DEVIATIONS = 4.0
SIGNIFICANT = 0.01
_SIGNIFICANT_DRAWS = math.floor(SIGNIFICANT * (DRAWS + 1))
_SEED = 0
_STEPS = 60
_CONVERGED = 1e-9


@dataclass(frozen=True, slots=True)
class Sums:
    """An answer in standardised terms, with the part that can only be noise projected away."""

    count: float
    count_deviation: float
    standard: Matrix

    @classmethod
    def of(cls, design: Design, answer: Matrix, noise: Noise) -> Sums:
        """Return the sums in an `answer`, which is Σ y·x over the design's rows, plus noise."""
        if answer.shape != (design.width + 1,):
            raise TrefoilError(
                f"the answer has {len(answer)} numbers and the features {design.width + 1} columns",
                "Fit an answer with the features of its own batch.",
                kind=ErrorKind.INCONSISTENT,
            )
        projected = design.projection @ answer
        return cls(float(projected[0]) / design.constant, design.count_deviation(noise), design.to_standard @ projected)


def fit(design: Design, answer: Matrix, noise: Noise, unit: str = "") -> Model:
    """Return the model that the answer supports, with its verdict."""
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
    theta, covariance = np.zeros(design.width + 1), np.zeros((design.width + 1, design.width + 1))
    theta[0], factor = math.log(count / (design.total - count)), NORMAL_95
    if verdict is FitVerdict.FITTED:
        target = np.concatenate([[count], sums.standard])
        theta, curvature = _minimise(design, target, theta, evidence.shrinkage(spread.smallest))
        factor = evidence.interval_factor(sums.standard, threshold, generator)
        covariance = _covariance(design, noise, curvature, spread.widest)
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


def _minimise(design: Design, target: Matrix, theta: Matrix, shrinkage: Matrix) -> tuple[Matrix, Matrix]:
    """Run damped Newton from `theta`; return the minimum and the curvature there, the intercept first."""
    columns = np.hstack([np.ones((len(design.standard), 1)), design.standard])
    penalty = np.zeros((columns.shape[1], columns.shape[1]))
    penalty[1:, 1:] = shrinkage

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
    hint = "Use fewer features, or larger batches."
    raise TrefoilError("the fit did not converge", hint, kind=ErrorKind.UNAVAILABLE)


def _covariance(design: Design, noise: Noise, curvature: Matrix, place: int) -> Matrix:
    """Return the covariance of intercept and slopes, whose errors are correlated where rates are not equal."""
    middle = design.inflation * curvature + design.noise_covariance(noise) + _ridge(curvature)
    prior = np.eye(len(curvature))
    prior[0, 0] = 0.0
    return covariance(curvature, middle, prior, place)


def _ridge(curvature: Matrix) -> Matrix:
    """Return a ridge that keeps the system solvable in directions that no row has, and is too small to move a fit."""
    ridge: Matrix = (1e-9 * float(np.trace(curvature)) / len(curvature) + 1e-12) * np.eye(len(curvature))
    return ridge

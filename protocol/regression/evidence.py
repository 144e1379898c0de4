"""Evidence: how much of an answer the labels explain, and how much chance alone would.

The standardised sums t are modelled as N(0, ω²·H² + M + N): coefficients of variance ω², labels that vary by M, and
helpers' noise N. H is the curvature at equal rates. ω² is looked for on a grid, in the answer itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from protocol.regression.design import Design, Matrix, Noise

LARGEST_SPREAD = 1.0
_GRID = np.exp(np.linspace(np.log(1e-4), np.log(LARGEST_SPREAD), 30))
DRAWS = 299
# Worlds that the intervals are calibrated in: enough that their 95 % point moves by little.
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
        """One row for each ω² of the grid, one column for each column of `sums`."""
        squares = np.array([(np.linalg.solve(factor, sums) ** 2).sum(axis=0) for factor in self._factors])
        logs = -0.5 * squares - self._determinants[:, None]
        gained: Matrix = logs[1:] - logs[0]
        return gained

    def spread(self, sums: Matrix) -> Spread:
        """What one answer supports."""
        return _spread(self.of(sums[:, None])[:, 0])

    def gains_by_chance(self, generator: np.random.Generator) -> Matrix:
        """The gains of labels without any effect, under the helpers' own long-tailed noise, ascending."""
        gains: Matrix = np.sort(self.of(self._without_effect(generator, DRAWS)).max(axis=0))
        return gains

    def interval_factor(self, sums: Matrix, threshold: float, generator: np.random.Generator) -> float:
        """How many stated deviations a 95 % interval takes, at least the normal's 1.96.

        A parametric bootstrap: worlds with coefficients of a variance that the answer supports, with the helpers' own
        noise, are fitted by the same rules, and only those count in which the fit would not have been declined.
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
        """Λ = (I + N^½·H⁻¹·N^½)/ω²: what the best linear estimate shrinks by. Directions that noise drowns go to 0."""
        values, vectors = np.linalg.eigh(self.helper_noise)
        root = (vectors * np.sqrt(np.maximum(values, 0))) @ vectors.T
        shrunk: Matrix = (np.eye(len(root)) + root @ np.linalg.solve(self.curvature, root)) / _GRID[place]
        return shrunk

    def covariance(self, place: int) -> Matrix:
        """Of the slopes, where no feature has an effect."""
        return covariance(self.curvature, self.label_noise + self.helper_noise, np.eye(len(self.curvature)), place)

    def _without_effect(self, generator: np.random.Generator, count: int) -> Matrix:
        design = self._design
        helpers = self._noise.draw(generator, (len(design.projection), count))
        labels = np.linalg.cholesky(self.label_noise) @ generator.normal(size=(design.width, count))
        drawn: Matrix = design.to_standard @ design.projection @ helpers + labels
        return drawn


def covariance(curvature: Matrix, middle: Matrix, prior: Matrix, place: int) -> Matrix:
    """Of coefficients: (prior/ω² + H·(M + N)⁻¹·H)⁻¹, `middle` being M + N."""
    inverse = prior / _GRID[place] + curvature @ np.linalg.solve(middle, curvature)
    found: Matrix = np.linalg.inv(inverse)
    return found


def row_deviations(rows: Matrix, covariance: Matrix) -> Matrix:
    """The standard deviation of each row's linear predictor."""
    deviations: Matrix = np.sqrt(np.maximum(np.einsum("ij,jk,ik->i", rows, covariance, rows), 1e-300))
    return deviations


def _spread(gained: Matrix) -> Spread:
    gain = float(gained.max())
    supported = np.flatnonzero(gained >= gain - 1.0)
    return Spread(gain, int(supported[0]), int(supported[-1]))

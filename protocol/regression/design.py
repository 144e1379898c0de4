"""The public half of a regression: the features that were reported, standardised, and what an answer can tell of them.

Σ σ(θ·x)·x = Σ y·x: only the right side is private, and it is asked for once. Everything here depends on the features
and on the size of the helpers' noise alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from protocol.errors import TrefoilError

Matrix = npt.NDArray[np.float64]
Rows = npt.NDArray[np.int64]
Groups = npt.NDArray[np.int64]
# Of the largest eigenvalue of the Gram matrix with columns of length one: below is a relation between columns.
_RANK_CUT = 1e-9


@dataclass(frozen=True, slots=True)
class Noise:
    """One bucket's noise: its variance, and the shape r of the two negative binomials whose difference it is."""

    variance: float
    shape: float = 1.0

    def __post_init__(self) -> None:
        if not (0 <= self.variance < float("inf") and 0 < self.shape <= 3):
            raise TrefoilError("a noise has a variance of at least 0 and a shape of at most 3")

    def draw(self, generator: np.random.Generator, size: tuple[int, ...]) -> Matrix:
        """The continuous form of the helpers' noise: a difference of two gammas, with its long tails."""
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
        """The number of coefficients, the intercept not counted."""
        return int(self.standard.shape[1])

    def standardised(self, rows: Matrix) -> Matrix:
        """Columns 1 and on with mean 0 and deviation 1 over this design; a column that never varies becomes 0."""
        centred: Matrix = (rows[:, 1:] - self.mean) / self.scale * self.used
        return centred

    def noise_covariance(self, noise: Noise) -> Matrix:
        """Of the helpers' noise in the count and in the standardised sums, projected. The count's is in all of them."""
        count = np.zeros((1, self.width + 1))
        count[0, 0] = 1 / self.constant
        turned = np.vstack([count, self.to_standard]) @ self.projection
        covariance: Matrix = noise.variance * turned @ turned.T
        return covariance

    def count_deviation(self, noise: Noise) -> float:
        """The noise in the number of conversions, after the projection."""
        return float(np.sqrt(noise.variance * self.projection[0, 0])) / self.constant


def _check(rows: Rows) -> None:
    if rows.ndim != 2 or rows.shape[0] < 2 or rows.shape[1] < 2:
        raise TrefoilError("a regression takes at least two rows of an intercept and one more column")
    if rows.dtype.kind not in "iu" or rows.min() < 0:
        raise TrefoilError("features are whole numbers of at least 0")
    if rows[0, 0] == 0 or (rows[:, 0] != rows[0, 0]).any():
        raise TrefoilError("column 0 is the intercept: the same number, not 0, in every row")


def _inflation(groups: Groups, rows: int) -> float:
    if len(groups) != rows:
        raise TrefoilError(f"{len(groups)} groups for {rows} rows", "Give every row one group.")
    sizes = np.unique(groups, return_counts=True)[1].astype(np.float64)
    return float((sizes**2).sum() / sizes.sum())


def _row_space(rows: Matrix, weights: Matrix) -> Matrix:
    """The orthogonal projection on what sums of y·x can be.

    They satisfy every linear relation that the columns do (one-hot columns add up to the intercept): what breaks one is
    noise. Relations are looked for with columns of length one, or a column of large numbers would hide a rare level.
    """
    lengths = np.sqrt(weights @ rows**2)
    lengths = np.where(lengths > 0, lengths, 1.0)
    unit = rows / lengths
    values, vectors = np.linalg.eigh(unit.T @ (weights[:, None] * unit))
    basis, _ = np.linalg.qr(lengths[:, None] * vectors[:, values > _RANK_CUT * values[-1]])
    projection: Matrix = basis @ basis.T
    return projection

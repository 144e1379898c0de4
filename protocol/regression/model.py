"""The fitted model: what it predicts, how sure it is, and how it is kept."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np

from protocol.errors import TrefoilError
from protocol.files import write_atomically
from protocol.regression.design import Matrix
from protocol.regression.evidence import row_deviations

FORMAT = 1
_LARGEST = 35.0


class FitVerdict(Enum):
    """What came of a fit."""

    FITTED = "fitted"
    RATE_UNKNOWN = "the rate itself is lost in the noise"
    NO_EFFECT = "no effect of any feature can be seen"


@dataclass(frozen=True, slots=True)
class Model:
    """A logistic regression in standardised features. Where no effect was seen, it predicts the rate for every row."""

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
        """The probability that a conversion follows, for each row of features."""
        return _logistic(self._predictor(rows))

    def interval(self, rows: Matrix) -> tuple[Matrix, Matrix]:
        """For each row a low and a high probability: 95 %, the helpers' noise included (`interval_factor`)."""
        predictor = self._predictor(rows)
        standard = np.hstack([np.ones((len(rows), 1)), self._standardised(rows)])
        reach = self.interval_factor * row_deviations(standard, self.covariance)
        return _logistic(predictor - reach), _logistic(predictor + reach)

    def save(self, path: Path) -> None:
        """As JSON, for `trefoil regression predict`."""
        write_atomically(path, (json.dumps(self.to_json(), indent=2) + "\n").encode())

    @classmethod
    def load(cls, path: Path) -> Model:
        """The reverse of `save`."""
        hint = "Make a model with trefoil regression fit."
        try:
            stored: Any = json.loads(path.read_bytes())
            if stored["trefoil_model"] != FORMAT:
                raise ValueError
            values: dict[str, Any] = {name: np.array(stored[name], dtype=np.float64) for name in _ARRAYS}
            values |= {name: float(stored[name]) for name in _NUMBERS}
            return cls(verdict=FitVerdict[stored["verdict"]], unit=stored["unit"], rows=stored["rows"], **values)
        except OSError as error:
            raise TrefoilError(f"cannot read the model {path}: {error.strerror}", hint) from None
        except (ValueError, KeyError, TypeError):
            raise TrefoilError(f"{path} is not a model of format {FORMAT}", hint) from None

    def to_json(self) -> dict[str, object]:
        """Everything that is needed to predict, and what a person wants to know of the fit."""
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

"""An answer as `trefoil query --json` wrote it, as far as a regression needs it, and checked against its batch."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from protocol.errors import TrefoilError
from protocol.noise_scale import shape
from protocol.query import NoiseMode
from protocol.regression.design import Matrix, Noise

# Below this share of counted reports, which ones were left out may matter.
LEAST_COUNTED = 0.99
_HINT = "Give the file that trefoil query --json wrote for this batch."


@dataclass(frozen=True, slots=True)
class LabelSums:
    """Σ y·x over the reports that were counted, with the noise in each number."""

    unit: str
    batch_root: bytes
    sums: Matrix
    noise: Noise
    submitted: int
    counted: int

    @classmethod
    def load(cls, path: Path) -> LabelSums:
        """Checked in full; a file that is something else is refused."""
        try:
            stored: Any = json.loads(path.read_bytes())
            variance, mode = float(stored["noise_variance"]), NoiseMode(stored["noise"])
            loaded = cls(
                unit=stored["unit"],
                batch_root=bytes.fromhex(stored["batch_root"]),
                sums=np.array(stored["answer"], dtype=np.float64),
                noise=Noise(variance, float(shape(mode))),
                submitted=int(stored["reports_submitted"]),
                counted=int(stored["reports_counted"]),
            )
        except OSError as error:
            raise TrefoilError(f"cannot read the answer {path}: {error.strerror}", _HINT) from None
        except (ValueError, KeyError, TypeError):
            raise TrefoilError(f"{path} is not an answer", _HINT) from None
        if loaded.sums.ndim != 1 or not 0 < loaded.counted <= loaded.submitted:
            raise TrefoilError(f"{path} is not an answer", _HINT)
        return loaded

    def check(self, unit: str, batch_root: bytes) -> None:
        """Refuse the answer of another batch or of other features."""
        if self.batch_root != batch_root:
            raise TrefoilError("this answer is of another batch", "Give the batch that it was asked about, unchanged.")
        if self.unit != unit:
            raise TrefoilError(
                f"this answer is in {self.unit!r}, and the features file is {unit!r}",
                "Use the features file that the reports were made with.",
            )
        if self.counted < LEAST_COUNTED * self.submitted:
            raise TrefoilError(
                f"only {self.counted} of {self.submitted} reports were counted, which is below {LEAST_COUNTED:.0%}",
                "Which ones were left out is not known, so their features cannot be taken out. Ask about a new batch.",
            )

    def for_all(self) -> LabelSums:
        """The same as if every report submitted had been counted.

        Right where what was left out does not depend on the labels, such as reports sealed to an old key. A label that
        a device could not pay for is a counted zero: neither this nor the rule above ever sees those.
        """
        grown = self.submitted / self.counted
        noise = Noise(self.noise.variance * grown**2, self.noise.shape)
        return LabelSums(self.unit, self.batch_root, self.sums * grown, noise, self.submitted, self.submitted)

    @property
    def deviation(self) -> float:
        """The noise in one number."""
        return math.sqrt(self.noise.variance)

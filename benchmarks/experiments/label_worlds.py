"""Synthetic publishers: impressions with a few fields, and the truth about which of them led to a conversion.

Column 0 is the intercept; every field is one-hot, the advertiser first. One truth for each seed and number of columns,
so that batches of every size, noise and ε are about the same world.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from benchmarks.experiments.columns import Floats
from benchmarks.seeded import Generator
from benchmarks.seeded import generator as drawn_from
from protocol.errors import TrefoilError
from protocol.regression.design import Rows
from protocol.regression.scores import Labels

# Levels of each field, by the number of columns that they make with the intercept.
FIELDS = {8: (4, 3), 16: (5, 4, 3, 3), 64: (16, 20, 10, 8, 6, 3)}
RATE = 0.05
# The deviation of the log-odds over impressions.
SPREAD = 1.2
TESTED = 50_000
_STEPS = 60


@dataclass(frozen=True, slots=True)
class LabelWorld:
    """Impressions to learn from, with their labels, and others to be tested on, with their true rates too."""

    fields: tuple[int, ...]
    rows: Rows
    labels: Labels
    tested_rows: Rows
    tested_labels: Labels
    tested_rates: Floats

    @property
    def cap(self) -> int:
        """The sum of every row: one for each field, and the intercept."""
        return len(self.fields) + 1


def draw_label_world(seed: int, reports: int, columns: int, *, tested: int = TESTED) -> LabelWorld:
    """Shares of levels are Dirichlet(3), their effects normal; a conversion follows one impression in twenty."""
    if columns not in FIELDS:
        raise TrefoilError(f"there is no world of {columns} columns", f"Known are {', '.join(map(str, FIELDS))}.")
    truth, generator = drawn_from(seed, columns), drawn_from(seed, columns, reports)
    fields = FIELDS[columns]
    shares = [truth.dirichlet(np.full(levels, 3.0)) for levels in fields]
    effects = [truth.normal(0, SPREAD / np.sqrt(len(fields)), levels) for levels in fields]

    def impressions(source: Generator, count: int) -> tuple[Rows, Floats]:
        parts, odds = [np.ones((count, 1), np.int64)], np.zeros(count)
        for share, effect in zip(shares, effects, strict=True):
            level = source.choice(len(share), count, p=share)
            parts.append(np.eye(len(share), dtype=np.int64)[level])
            odds += effect[level]
        return np.hstack(parts), odds

    tested_rows, tested_odds = impressions(truth, tested)
    base = _intercept(tested_odds)
    tested_rates = _logistic(tested_odds + base)
    tested_labels = truth.random(tested) < tested_rates
    rows, odds = impressions(generator, reports)
    labels = generator.random(reports) < _logistic(odds + base)
    return LabelWorld(fields, rows, labels, tested_rows, tested_labels, tested_rates)


def _intercept(odds: Floats) -> float:
    """What makes the mean rate RATE, by bisection."""
    low, high = -15.0, 10.0
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if _logistic(odds + middle).mean() > RATE else (middle, high)
    return low


def _logistic(odds: Floats) -> Floats:
    rates: Floats = 1 / (1 + np.exp(-odds))
    return rates

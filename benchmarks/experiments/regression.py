"""How good a publisher's model is, against batch size, number of features, ε and noise mode: one table (Appendix A).

Each cell is compared with the same fit without noise, and with the true rates, which no model can beat. Publishers are
synthetic: column 0 is the intercept and every field is one-hot, the advertiser first. There is one truth for each seed
and number of columns, so that batches of every size, noise and ε are about the same world.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean

import numpy as np
from rich.table import Table

from benchmarks.experiments.world import Floats
from benchmarks.results.columns import Columns, on_terminal
from benchmarks.workloads.seeded import Generator
from benchmarks.workloads.seeded import generator as drawn_from
from protocol.errors import ErrorKind, TrefoilError
from protocol.noise import NoiseMode
from protocol.querier.regression.model import Design, FitVerdict, Labels, Noise, Rows, area_under_curve, fit, log_loss
from protocol.querier.regression.view import noise_of

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
        """Return the sum of every row: one for each field, and the intercept."""
        return len(self.fields) + 1


def draw_label_world(seed: int, reports: int, columns: int, *, tested: int = TESTED) -> LabelWorld:
    """Draw levels from Dirichlet(3) shares with normal effects; a conversion follows one impression in twenty."""
    if columns not in FIELDS:
        raise TrefoilError(
            f"there is no world of {columns} columns",
            f"Known are {', '.join(map(str, FIELDS))}.",
            kind=ErrorKind.UNKNOWN_NAME,
        )
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
    """Return the intercept that makes the mean rate RATE, by bisection."""
    low, high = -15.0, 10.0
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if _logistic(odds + middle).mean() > RATE else (middle, high)
    return low


def _logistic(odds: Floats) -> Floats:
    rates: Floats = 1 / (1 + np.exp(-odds))
    return rates


@dataclass(frozen=True, slots=True)
class RegressionCell:
    """One cell: so many reports of so many columns, at an ε in a noise mode, or without noise."""

    reports: int
    columns: int
    mode: NoiseMode | None = None
    epsilon: float = 0.0

    def noise(self, cap: int) -> Noise:
        """Return the noise that helpers add to every number."""
        return Noise(0.0) if self.mode is None else noise_of(self.epsilon, cap, self.mode)


@dataclass(frozen=True, slots=True)
class Score:
    """The quality of one model. `gain` is the share of the possible improvement in log-loss over a constant rate."""

    auc: float
    log_loss: float
    gain: float
    best_auc: float
    best_log_loss: float
    fitted: bool


def regression_settings(
    reports: Sequence[int], columns: Sequence[int], epsilons: Sequence[float], modes: Sequence[NoiseMode]
) -> list[RegressionCell]:
    """Return every cell of the table, the one without noise first."""
    noisy = [(mode, epsilon) for mode in modes for epsilon in epsilons]
    cells = [(None, 0.0), *noisy]
    return [
        RegressionCell(size, wide, mode, epsilon) for size in reports for wide in columns for mode, epsilon in cells
    ]


def run_settings(
    cells: Sequence[RegressionCell], seeds: int, advance: Callable[[int], None]
) -> dict[RegressionCell, list[Score]]:
    """Score every cell over every seed. Cells of one size share their world and its design."""
    scores: dict[RegressionCell, list[Score]] = {cell: [] for cell in cells}
    for reports, columns in dict.fromkeys((cell.reports, cell.columns) for cell in cells):
        for seed in range(seeds):
            world = draw_label_world(seed, reports, columns)
            design = Design(world.rows)
            # One seed for all cells, so that they differ by the size of their noise and not by chance alone.
            generator = drawn_from(seed, reports, columns, 1)
            for cell in cells:
                if (cell.reports, cell.columns) == (reports, columns):
                    scores[cell].append(score(world, design, cell.noise(world.cap), generator))
                    advance(1)
    return scores


def score(world: LabelWorld, design: Design, noise: Noise, generator: Generator) -> Score:
    """Fit a model to the noisy sums of a world, and return its quality. A fit that was declined ranks nothing."""
    sums = world.rows.T @ world.labels.astype(np.float64) + noise.draw(generator, (world.rows.shape[1],))
    model = fit(design, sums, noise)
    rates, labels = model.predict(world.tested_rows.astype(np.float64)), world.tested_labels
    best, lost = log_loss(world.tested_rates, labels), log_loss(rates, labels)
    constant = log_loss(np.full(len(labels), labels.mean()), labels)
    return Score(
        auc=area_under_curve(rates, labels),
        log_loss=lost,
        gain=(constant - lost) / (constant - best),
        best_auc=area_under_curve(world.tested_rates, labels),
        best_log_loss=best,
        fitted=model.verdict is FitVerdict.FITTED,
    )


Scores = Mapping[RegressionCell, Sequence[Score]]
# Means over the worlds. A fit that is declined ranks nothing: its area is 0.5.
COLUMNS: Columns[tuple[RegressionCell, Sequence[Score]]] = {
    "reports": lambda row: row[0].reports,
    "columns": lambda row: row[0].columns,
    "noise": lambda row: _mode(row[0]),
    "ε": lambda row: f"{row[0].epsilon:g}" if row[0].mode else "",
    "AUC": lambda row: f"{fmean(score.auc for score in row[1]):.3f}",
    "lowest": lambda row: f"{min(score.auc for score in row[1]):.3f}",
    "highest": lambda row: f"{max(score.auc for score in row[1]):.3f}",
    "best": lambda row: f"{fmean(score.best_auc for score in row[1]):.3f}",
    "log-loss": lambda row: f"{fmean(score.log_loss for score in row[1]):.4f}",
    "gain": lambda row: f"{fmean(score.gain for score in row[1]):+.2f}",
    "fitted": lambda row: f"{sum(score.fitted for score in row[1])}/{len(row[1])}",
}


def scores_table(scores: Scores) -> Table:
    return on_terminal("What a model is worth", COLUMNS, scores.items(), words={"noise"})


def scores_json(scores: Scores) -> dict[str, object]:
    rows = [
        {"reports": cell.reports, "columns": cell.columns, "noise": _mode(cell), "epsilon": cell.epsilon}
        | {"seeds": [asdict(score) for score in of_cell]}
        for cell, of_cell in scores.items()
    ]
    return {"experiment": "regression", "scores": rows}


def _mode(cell: RegressionCell) -> str:
    return "none" if cell.mode is None else cell.mode.value

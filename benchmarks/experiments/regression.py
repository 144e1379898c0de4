"""How good a publisher's model is, against batch size, number of features, ε and noise mode.

Beside the same fit without noise, and beside the true rates, which nobody can beat.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.experiments.columns import Floats
from benchmarks.experiments.label_worlds import LabelWorld, draw_label_world
from benchmarks.seeded import Generator
from benchmarks.seeded import generator as drawn_from
from protocol.query import NoiseMode
from protocol.regression.design import Design, Noise, Rows
from protocol.regression.fit import fit
from protocol.regression.model import FitVerdict
from protocol.regression.scores import Labels, area_under_curve, log_loss
from protocol.regression.view import noise_of

NO_NOISE = Noise(0.0)


@dataclass(frozen=True, slots=True)
class RegressionCell:
    """One cell: so many reports of so many columns, at an ε in a noise mode, or without noise."""

    reports: int
    columns: int
    mode: NoiseMode | None = None
    epsilon: float = 0.0

    def noise(self, cap: int) -> Noise:
        """What the helpers add to every number."""
        return NO_NOISE if self.mode is None else noise_of(self.epsilon, cap, self.mode)


@dataclass(frozen=True, slots=True)
class Score:
    """What one seed gave. `gain` is the share of the possible improvement in log-loss over a constant rate."""

    auc: float
    log_loss: float
    gain: float
    best_auc: float
    best_log_loss: float
    fitted: bool


def settings(
    reports: Sequence[int], columns: Sequence[int], epsilons: Sequence[float], modes: Sequence[NoiseMode]
) -> list[RegressionCell]:
    """Every cell of the table, the one without noise first."""
    noisy = [(mode, epsilon) for mode in modes for epsilon in epsilons]
    cells = [(None, 0.0), *noisy]
    return [
        RegressionCell(size, wide, mode, epsilon) for size in reports for wide in columns for mode, epsilon in cells
    ]


def run_settings(
    cells: Sequence[RegressionCell], seeds: int, advance: Callable[[int], None]
) -> dict[RegressionCell, list[Score]]:
    """Every cell over every seed. Cells of one size share their world and its design."""
    found: dict[RegressionCell, list[Score]] = {cell: [] for cell in cells}
    for reports, columns in dict.fromkeys((cell.reports, cell.columns) for cell in cells):
        for seed in range(seeds):
            world = draw_label_world(seed, reports, columns)
            design = Design(world.rows)
            # Of one seed, so that cells differ by their noise's size and not by their luck alone.
            generator = drawn_from(seed, reports, columns, 1)
            for cell in cells:
                if (cell.reports, cell.columns) == (reports, columns):
                    found[cell].append(score(world, *predicted(world, design, cell, generator)))
                    advance(1)
    return found


def predicted(
    world: LabelWorld, design: Design, cell: RegressionCell, generator: Generator
) -> tuple[Floats, FitVerdict]:
    """What the model says of the impressions that it is tested on, and what came of the fit."""
    noise = cell.noise(world.cap)
    sums = world.rows.T @ world.labels.astype(np.float64) + noise.draw(generator, (world.rows.shape[1],))
    model = fit(design, sums, noise)
    return model.predict(world.tested_rows.astype(np.float64)), model.verdict


def score(world: LabelWorld, rates: Floats, verdict: FitVerdict) -> Score:
    """Against the truth. A fit that was declined ranks nothing."""
    labels, best = world.tested_labels, log_loss(world.tested_rates, world.tested_labels)
    constant = log_loss(np.full(len(labels), labels.mean()), labels)
    lost = log_loss(rates, labels)
    return Score(
        auc=area_under_curve(rates, labels),
        log_loss=lost,
        gain=(constant - lost) / (constant - best),
        best_auc=area_under_curve(world.tested_rates, labels),
        best_log_loss=best,
        fitted=verdict is FitVerdict.FITTED,
    )


@dataclass(frozen=True, slots=True)
class TogetherOrApart:
    """One model over all advertisers beside one for each: area under the curve, gain, and how many were fitted."""

    together: Score
    apart: Score
    fitted_apart: int
    advertisers: int


def together_or_apart(seed: int, cell: RegressionCell) -> TogetherOrApart:
    """Each advertiser's own model has only its own impressions, the same noise, and one field less."""
    world = draw_label_world(seed, cell.reports, cell.columns)
    generator = drawn_from(seed, cell.reports, cell.columns, 2)
    together = score(world, *predicted(world, Design(world.rows), cell, generator))
    rates, fitted = np.full(len(world.tested_rows), world.labels.mean()), 0
    for part, tested in _by_advertiser(world):
        if len(part.rows) > 1:
            rates[tested], verdict = predicted(part, Design(part.rows), cell, generator)
            fitted += verdict is FitVerdict.FITTED
    verdict = FitVerdict.FITTED if fitted else FitVerdict.NO_EFFECT
    return TogetherOrApart(together, score(world, rates, verdict), fitted, world.fields[0])


def _by_advertiser(world: LabelWorld) -> Iterator[tuple[LabelWorld, Labels]]:
    """What each advertiser alone would see, and which of the tested impressions are its own."""
    first = world.fields[0]
    for column in range(1, first + 1):
        mine, tested = world.rows[:, column] == 1, world.tested_rows[:, column] == 1

        def without(rows: Rows, chosen: Labels) -> Rows:
            return np.hstack([rows[chosen, :1], rows[chosen, first + 1 :]])

        part = LabelWorld(
            world.fields[1:],
            without(world.rows, mine),
            world.labels[mine],
            without(world.tested_rows, tested),
            world.tested_labels[tested],
            world.tested_rates[tested],
        )
        yield part, tested

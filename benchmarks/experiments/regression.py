"""How good a publisher's model is, against batch size, number of features, ε and noise mode: one table (Appendix A).

Each cell is compared with the same fit without noise, and with the true rates, which no model can beat. Publishers are
synthetic: column 0 is the intercept and every field is one-hot, the advertiser first. There is one truth for each seed
and number of columns, so that batches of every size, noise and ε are about the same world. With `--mpc` every
impression has a device of its own, and three helper processes answer; the true sums are known there too.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

import numpy as np
from rich.table import Table

from benchmarks.experiments.through_mpc import ask_launched
from benchmarks.experiments.world import Floats
from benchmarks.workloads.seeded import Generator
from benchmarks.workloads.seeded import generator as drawn_from
from device.device import Device
from device.events import ConversionEventOptions
from device.labelling import LabelOptions
from device.limits import TREFOIL_SERVICE, DeviceLimits
from device.report import HelperSetSeal
from device.stores.memory_store import MemoryStore
from mpc_helpers.local.launcher import Launched, launched, prepare
from protocol.batch import BatchWriter
from protocol.cli.console import plain_table, progress
from protocol.errors import ErrorKind, TrefoilError
from protocol.helper_set import HelperSet
from protocol.noise import NoiseMode
from protocol.querier.regression.model import Design, FitVerdict, Labels, Noise, Rows, area_under_curve, fit, log_loss
from protocol.querier.regression.view import noise_of
from protocol.report import SealedReport
from protocol.units import DAY, MICROS

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


NO_NOISE = Noise(0.0)


@dataclass(frozen=True, slots=True)
class RegressionCell:
    """One cell: so many reports of so many columns, at an ε in a noise mode, or without noise."""

    reports: int
    columns: int
    mode: NoiseMode | None = None
    epsilon: float = 0.0

    def noise(self, cap: int) -> Noise:
        """Return the noise that helpers add to every number."""
        return NO_NOISE if self.mode is None else noise_of(self.epsilon, cap, self.mode)


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
                    scores[cell].append(score(world, *predicted(world, design, cell, generator)))
                    advance(1)
    return scores


def predicted(
    world: LabelWorld, design: Design, cell: RegressionCell, generator: Generator
) -> tuple[Floats, FitVerdict]:
    """Return the model's rates for the tested impressions, and the verdict of the fit."""
    noise = cell.noise(world.cap)
    sums = world.rows.T @ world.labels.astype(np.float64) + noise.draw(generator, (world.rows.shape[1],))
    model = fit(design, sums, noise)
    return model.predict(world.tested_rows.astype(np.float64)), model.verdict


def score(world: LabelWorld, rates: Floats, verdict: FitVerdict) -> Score:
    """Return the quality of `rates` against the truth. A fit that was declined ranks nothing."""
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


PUBLISHER = "news.example"
SHOWN_AGO = 8 * DAY
# A device's default budget of one week: above it, every report is null.
LARGEST_EPSILON = DeviceLimits().site_budget / MICROS


@dataclass(frozen=True, slots=True)
class HelpersFit:
    """One cell through three helpers. `noise_rms` is of answer minus the true sums; `noise_sd` is the mode's."""

    cell: RegressionCell
    counted: int
    sums: list[int]
    answer: list[int]
    noise_sd: float
    score: Score
    seconds: float

    @property
    def noise_rms(self) -> float:
        """Return the root mean square over the columns."""
        return float(np.sqrt(np.mean((np.array(self.answer) - np.array(self.sums)) ** 2)))

    def to_json(self) -> dict[str, object]:
        return {
            **cell_json(self.cell),
            "noise_rms": self.noise_rms,
            "counted": self.counted,
            "sums": self.sums,
            "answer": self.answer,
            "noise_sd": self.noise_sd,
            "auc": self.score.auc,
            "best_auc": self.score.best_auc,
            "fitted": self.score.fitted,
            "seconds": self.seconds,
        }


def run_labels_through_mpc(
    cells: Sequence[RegressionCell], seed: int, now: int, advance: Callable[[int], None]
) -> list[HelpersFit]:
    """Run every cell that has a noise mode, each with fresh devices: a report is counted once."""
    with tempfile.TemporaryDirectory(prefix="trefoil-regression-") as name:
        trio = prepare(Path(name), now=now, sites={PUBLISHER: [PUBLISHER]})
        with launched(trio) as running:
            return [
                _one_cell(cell, cell.mode, seed, running, Path(name) / f"batch-{number}", advance)
                for number, cell in enumerate(cells)
                if cell.mode is not None
            ]


def _one_cell(
    cell: RegressionCell, mode: NoiseMode, seed: int, running: Launched, path: Path, advance: Callable[[int], None]
) -> HelpersFit:
    started = time.perf_counter()
    world = draw_label_world(seed, cell.reports, cell.columns)
    now = _clock()
    with BatchWriter(path) as writer:
        for row, label in zip(world.rows.tolist(), world.labels.tolist(), strict=True):
            writer.add(_labelled(world, row, cell.epsilon, running.trio.helper_set, now, converted=label))
            advance(1)
    result = ask_launched(running, path, PUBLISHER, mode, _clock())
    noise = cell.noise(world.cap)
    model = fit(Design(world.rows), np.array(result.answer.histogram, dtype=np.float64), noise)
    return HelpersFit(
        cell=cell,
        counted=result.answer.counted,
        sums=(world.rows.T @ world.labels).tolist(),
        answer=list(result.answer.histogram),
        noise_sd=result.noise_sd,
        score=score(world, model.predict(world.tested_rows.astype(np.float64)), model.verdict),
        seconds=time.perf_counter() - started,
    )


def _labelled(
    world: LabelWorld, row: list[int], epsilon: float, helper_set: HelperSet, now: int, *, converted: bool
) -> SealedReport:
    """Return the report of one person, to whom the publisher showed an ad of the row's advertiser eight days ago."""
    advertiser = f"shop{row[1 : world.fields[0] + 1].index(1)}.example"
    clock = [now - SHOWN_AGO]
    device = Device(MemoryStore(), HelperSetSeal(helper_set), clock=lambda: clock[0])
    if converted:
        clock[0] += 2 * DAY
        device.save_conversion(advertiser, ConversionEventOptions((PUBLISHER,)))
    clock[0] = now
    label = LabelOptions(TREFOIL_SERVICE, tuple(row), world.cap, epsilon, SHOWN_AGO, (advertiser,))
    return device.measure_impression(PUBLISHER, label)


def _clock() -> int:
    return int(time.time())  # noqa: TID251 - helpers are processes of their own, with the real clock


@dataclass(frozen=True, slots=True)
class RegressionStudy:
    """The scores of every seed and, if three helpers answered, their answers."""

    scores: Mapping[RegressionCell, Sequence[Score]]
    fits: Sequence[HelpersFit] = ()

    def table(self) -> Table:
        """Return means and ranges over seeds. A fit that is declined ranks nothing: its area is 0.5."""
        columns = ("reports", "columns", "noise", "ε", "AUC", "lowest", "highest", "best", "log-loss", "gain", "fitted")
        table = plain_table("What a model is worth", columns, ("noise",))
        for cell, scores in self.scores.items():
            areas = [each.auc for each in scores]
            table.add_row(
                f"{cell.reports:,}",
                str(cell.columns),
                _mode(cell),
                "" if cell.mode is None else f"{cell.epsilon:g}",
                *(f"{each:.3f}" for each in (fmean(areas), min(areas), max(areas))),
                f"{fmean(each.best_auc for each in scores):.3f}",
                f"{fmean(each.log_loss for each in scores):.4f}",
                f"{fmean(each.gain for each in scores):+.2f}",
                f"{sum(each.fitted for each in scores)}/{len(scores)}",
            )
        return table

    def to_json(self) -> dict[str, object]:
        if self.fits:
            return {"experiment": "regression through helpers", "fits": [fit.to_json() for fit in self.fits]}
        scores = [
            cell_json(cell) | {"seeds": [asdict(each) for each in of_cell]} for cell, of_cell in self.scores.items()
        ]
        return {"experiment": "regression", "scores": scores}


def cell_json(cell: RegressionCell) -> dict[str, object]:
    return {"reports": cell.reports, "columns": cell.columns, "noise": _mode(cell), "epsilon": cell.epsilon}


def _mode(cell: RegressionCell) -> str:
    return "none" if cell.mode is None else cell.mode.value


def run_study(cells: Sequence[RegressionCell], seeds: int) -> RegressionStudy:
    """Fit every cell in every world, with simulated noise."""
    with progress("worlds", seeds * len(cells)) as advance:
        return RegressionStudy(run_settings(cells, seeds, advance))


def study_through_helpers(cells: Sequence[RegressionCell]) -> RegressionStudy:
    """Fit every cell that has noise in the first world, from the answers of three helpers started for it."""
    noisy = [cell for cell in cells if cell.mode is not None]
    largest = max((cell.epsilon for cell in noisy), default=0.0)
    if largest > LARGEST_EPSILON:
        raise TrefoilError(
            f"real devices pay at most ε = {LARGEST_EPSILON:g} of one week, not {largest:g}",
            "Name smaller ones with --epsilon, or omit --mpc.",
            kind=ErrorKind.OUT_OF_RANGE,
        )
    with progress("sealed reports", sum(cell.reports for cell in noisy)) as advance:
        fits = run_labels_through_mpc(noisy, 0, _clock(), advance)
    return RegressionStudy({fit.cell: [fit.score] for fit in fits}, fits)

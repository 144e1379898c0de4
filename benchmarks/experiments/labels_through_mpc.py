"""A publisher's model for real: every impression a device of its own, sealed reports, three helper processes, one fit.

The labels are drawn, so the sums before noise are known: what is left of the answer is the helpers' noise.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.experiments.label_worlds import LabelWorld, draw_label_world
from benchmarks.experiments.regression import RegressionCell, score
from benchmarks.experiments.through_mpc import ask_launched
from device.conversion_event import ConversionEventOptions
from device.device import Device
from device.labelling import LabelOptions
from device.limits import TREFOIL_SERVICE, DeviceLimits
from device.memory_store import MemoryStore
from device.report import HelperSetSeal
from mpc_helpers.local.launcher import Launched, launched, prepare
from protocol.batch import BatchWriter
from protocol.epsilon import MICROS
from protocol.errors import TrefoilError
from protocol.helper_set import HelperSet
from protocol.query import NoiseMode
from protocol.regression.design import Design
from protocol.regression.fit import fit
from protocol.report import SealedReport
from protocol.seconds import DAY

PUBLISHER = "news.example"
SHOWN_AGO = 8 * DAY
# What a device pays at most by default: above, every report is zeros.
LARGEST_EPSILON = DeviceLimits().site_budget / MICROS


@dataclass(frozen=True, slots=True)
class HelpersFit:
    """One cell through three helpers. `noise_rms` is of answer minus the true sums; `noise_sd` the mode's."""

    cell: RegressionCell
    counted: int
    sums: list[int]
    answer: list[int]
    noise_sd: float
    auc: float
    best_auc: float
    fitted: bool
    seconds: float

    @property
    def noise_rms(self) -> float:
        """Root mean square over the columns."""
        return float(np.sqrt(np.mean((np.array(self.answer) - np.array(self.sums)) ** 2)))


def check_cells(cells: Sequence[RegressionCell]) -> None:
    """Refuse before any work what real devices would not pay for."""
    largest = max((cell.epsilon for cell in cells), default=0.0)
    if largest > LARGEST_EPSILON:
        raise TrefoilError(
            f"real devices pay at most ε = {LARGEST_EPSILON:g} of one week, not {largest:g}",
            "Name smaller ones with --epsilon, or leave --mpc out.",
        )


def run_labels_through_mpc(
    cells: Sequence[RegressionCell], seed: int, now: int, advance: Callable[[int], None]
) -> list[HelpersFit]:
    """Every cell that has a noise mode, with fresh devices each: a report is answered once."""
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
    scored = score(world, model.predict(world.tested_rows.astype(np.float64)), model.verdict)
    return HelpersFit(
        cell=cell,
        counted=result.answer.counted,
        sums=(world.rows.T @ world.labels).tolist(),
        answer=list(result.answer.histogram),
        noise_sd=result.noise_sd,
        auc=scored.auc,
        best_auc=scored.best_auc,
        fitted=scored.fitted,
        seconds=time.perf_counter() - started,
    )


def _labelled(
    world: LabelWorld, row: list[int], epsilon: float, helper_set: HelperSet, now: int, *, converted: bool
) -> SealedReport:
    """One person, whom the publisher showed an ad of the row's advertiser eight days ago."""
    advertiser = f"shop{row[1 : world.fields[0] + 1].index(1)}.example"
    clock = [now - SHOWN_AGO]
    device = Device(MemoryStore(), HelperSetSeal(helper_set), clock=lambda: clock[0])
    if converted:
        clock[0] += 2 * DAY
        device.save_conversion(advertiser, ConversionEventOptions((PUBLISHER,)))
    clock[0] = now
    asked = LabelOptions(TREFOIL_SERVICE, tuple(row), world.cap, epsilon, SHOWN_AGO, (advertiser,))
    return device.measure_impression(PUBLISHER, asked)


def _clock() -> int:
    return int(time.time())  # noqa: TID251 - helpers are processes of their own, with the real clock

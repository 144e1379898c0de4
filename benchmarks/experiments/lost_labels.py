"""What labels that nobody paid for do to a publisher's model: a report of an empty budget says 0 where 1 was true.

Two ways to lose the same number of labels. By budget: a device that can pay for one label in its epoch loses the
later ones, so that people who convert often lose most. At random: devices that are switched off or were cleared,
whatever they see. All fits are without noise, so that what remains is what the loss itself does.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from benchmarks.experiments.columns import Floats
from benchmarks.experiments.label_worlds import LabelWorld, draw_label_world
from benchmarks.experiments.regression import NO_NOISE
from benchmarks.seeded import Generator
from benchmarks.seeded import generator as drawn_from
from protocol.regression.design import Design
from protocol.regression.fit import fit
from protocol.regression.model import Model
from protocol.regression.scores import Labels, area_under_curve

# Impressions of one device that are asked about in one epoch, which can pay for one label.
PER_DEVICE = 4


@dataclass(frozen=True, slots=True)
class Shift:
    """A model of what was left beside the model of all labels. Slopes of 1 and a rate of 1 - lost: only the rate fell.

    `own_slope` is of the field that all impressions of one device share, `other_slope` of the rest.
    """

    rate: float
    own_slope: float
    other_slope: float
    auc: float


@dataclass(frozen=True, slots=True)
class LostLabels:
    """One world: the share of labels lost, and what each way of losing them does."""

    lost: float
    auc: float
    by_budget: Shift
    at_random: Shift


def lost_labels(seed: int, reports: int, columns: int) -> LostLabels:
    """The same world three times: all labels, those that budgets leave, and as many left at random."""
    world = draw_label_world(seed, reports, columns)
    design, generator = Design(world.rows), drawn_from(seed, reports, columns, 3)
    kept = _paid_for(world, generator)
    lost = int(world.labels.sum() - kept.sum())
    everything = _fitted(design, world, world.labels)
    auc = area_under_curve(_predicted(everything, world), world.tested_labels)

    def shift(labels: Labels) -> Shift:
        model = _fitted(design, world, labels)
        mine, others = _slopes(model, everything, world)
        rate = float(_predicted(model, world).mean() / _predicted(everything, world).mean())
        return Shift(rate, mine, others, area_under_curve(_predicted(model, world), world.tested_labels))

    random = _without(world.labels, lost, generator)
    return LostLabels(lost / max(int(world.labels.sum()), 1), auc, shift(kept), shift(random))


def _paid_for(world: LabelWorld, generator: Generator) -> Labels:
    """Impressions with the same level of the last field are dealt out to devices. Each pays for its first label."""
    mixed = generator.permutation(len(world.rows))
    level = np.argmax(world.rows[:, -world.fields[-1] :], axis=1)
    order = mixed[np.argsort(level[mixed], kind="stable")]
    kept = world.labels.copy()
    for first in range(0, len(order), PER_DEVICE):
        device = order[first : first + PER_DEVICE]
        converted = device[world.labels[device]]
        kept[converted[1:]] = False
    return kept


def _without(labels: Labels, lost: int, generator: Generator) -> Labels:
    kept = labels.copy()
    kept[generator.permutation(np.flatnonzero(labels))[:lost]] = False
    return kept


def _fitted(design: Design, world: LabelWorld, labels: Labels) -> Model:
    sums: Floats = world.rows.T.astype(np.float64) @ labels.astype(np.float64)
    return fit(design, sums, NO_NOISE)


def _predicted(model: Model, world: LabelWorld) -> Floats:
    return model.predict(world.tested_rows.astype(np.float64))


def _slopes(model: Model, everything: Model, world: LabelWorld) -> tuple[float, float]:
    """How large the effects are beside those of all labels: of the last field, and of the others."""
    levels = world.fields[-1]
    rows = (world.tested_rows[:, 1:] - model.mean) / model.scale
    own = slice(rows.shape[1] - levels, rows.shape[1])

    def ratio(columns: slice) -> float:
        found, full = (rows[:, columns] @ each.coefficients[columns] for each in (model, everything))
        return float(np.cov(found, full)[0, 1] / np.var(full, ddof=1))

    return ratio(own), ratio(slice(0, rows.shape[1] - levels))

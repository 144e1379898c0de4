"""Everything that `trefoil experiment regression` finds out: what a model is worth, what it costs, what it loses."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from rich.table import Table

from benchmarks.experiments import regression_tables as tables
from benchmarks.experiments.label_charges import Habits, LabelCharges, charges
from benchmarks.experiments.labels_through_mpc import HelpersFit, check_cells, run_labels_through_mpc
from benchmarks.experiments.lost_labels import LostLabels, lost_labels
from benchmarks.experiments.regression import RegressionCell, Score, TogetherOrApart, run_settings, together_or_apart
from protocol.console import progress
from protocol.query import NoiseMode

# How impressions are measured (one a week or all), at which ε, for how many models.
Way = tuple[bool, float, int]
WAYS: list[Way] = [
    (True, 0.1, 1),
    (True, 0.3, 1),
    (True, 0.3, 4),
    (True, 1.0, 1),
    (False, 0.3, 1),
    (False, 1.0, 1),
]


@dataclass(frozen=True, slots=True)
class RegressionStudy:
    """Every seed's numbers."""

    scores: Mapping[RegressionCell, Sequence[Score]]
    charged: Mapping[Way, Sequence[LabelCharges]]
    together: Mapping[RegressionCell, Sequence[TogetherOrApart]]
    # By number of columns, at the largest batch.
    lost: Mapping[int, Sequence[LostLabels]]
    devices: int

    def tables(self) -> list[Table]:
        """For a terminal."""
        charged = [tables.charges_table(self.charged)] if self.charged else []
        others = [tables.together_table(self.together), tables.lost_table(self.lost)]
        return [tables.scores_table(self.scores), *charged, *others]

    def to_json(self) -> dict[str, object]:
        """For files."""
        return {
            "experiment": "regression",
            "scores": [tables.cell_json(cell) | _seeds(found) for cell, found in self.scores.items()],
            "devices": self.devices,
            "charges": [
                {"sampled": sampled, "epsilon": epsilon, "models": models} | _seeds(found)
                for (sampled, epsilon, models), found in self.charged.items()
            ],
            "together": [tables.cell_json(cell) | _seeds(found) for cell, found in self.together.items()],
            "lost": [{"columns": columns} | _seeds(found) for columns, found in self.lost.items()],
        }


@dataclass(frozen=True, slots=True)
class HelpersStudy:
    """The same model from real reports, answered by three helpers."""

    fits: Sequence[HelpersFit]

    def tables(self) -> list[Table]:
        """For a terminal."""
        return [tables.helpers_table(self.fits)]

    def to_json(self) -> dict[str, object]:
        """For files."""
        found = [
            tables.cell_json(one.cell)
            | {"noise_rms": one.noise_rms}
            | {name: value for name, value in asdict(one).items() if name != "cell"}
            for one in self.fits
        ]
        return {"experiment": "regression through helpers", "fits": found}


def run_study(cells: Sequence[RegressionCell], pooled: NoiseMode, seeds: int, devices: int) -> RegressionStudy:
    """All cells; one model beside each advertiser's own in the mode `pooled`."""
    ways = WAYS if devices else []
    together_cells = [cell for cell in cells if cell.mode is pooled]
    largest = max(cell.reports for cell in cells)
    widths = sorted({cell.columns for cell in cells})
    with progress("worlds", seeds * (len(cells) + len(ways) + len(together_cells) + len(widths))) as advance:
        scores = run_settings(cells, seeds, advance)
        charged = {}
        for sampled, epsilon, models in ways:
            habits = Habits(devices=devices, sampled=sampled)
            charged[sampled, epsilon, models] = [charges(seed, epsilon, models, habits) for seed in range(seeds)]
            advance(seeds)
        together = {}
        for cell in together_cells:
            together[cell] = [together_or_apart(seed, cell) for seed in range(seeds)]
            advance(seeds)
        lost = {}
        for columns in widths:
            lost[columns] = [lost_labels(seed, largest, columns) for seed in range(seeds)]
            advance(seeds)
    return RegressionStudy(scores, charged, together, lost, devices)


def study_through_helpers(cells: Sequence[RegressionCell]) -> HelpersStudy:
    """Every cell with noise, in the first world, through three helpers that are started for it."""
    noisy = [cell for cell in cells if cell.mode is not None]
    check_cells(noisy)
    now = int(time.time())  # noqa: TID251 - the edge: helpers live by the real clock
    with progress("sealed reports", sum(cell.reports for cell in noisy)) as advance:
        return HelpersStudy(run_labels_through_mpc(noisy, 0, now, advance))


def _seeds(found: Sequence[Score | LabelCharges | TogetherOrApart | LostLabels]) -> dict[str, object]:
    return {"seeds": [asdict(each) for each in found]}

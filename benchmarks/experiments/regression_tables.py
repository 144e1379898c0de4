"""What `trefoil experiment regression` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from rich.table import Table

from benchmarks.experiments.label_charges import LabelCharges
from benchmarks.experiments.labels_through_mpc import HelpersFit
from benchmarks.experiments.lost_labels import LostLabels
from benchmarks.experiments.regression import RegressionCell, Score, TogetherOrApart
from benchmarks.experiments.tables import plain_table


def scores_table(found: Mapping[RegressionCell, Sequence[Score]]) -> Table:
    """Mean and range over seeds. A fit that is declined ranks nothing: its area is 0.5."""
    columns = ("reports", "columns", "noise", "ε", "AUC", "lowest", "highest", "best", "log-loss", "gain", "fitted")
    table = plain_table("What a model is worth", columns, ("noise",))
    for cell, scores in found.items():
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


def charges_table(found: Mapping[tuple[bool, float, int], Sequence[LabelCharges]]) -> Table:
    """Means over seeds, for each way of measuring, ε and number of models."""
    columns = ("measured", "ε", "models", "Trefoil", "ARA-like", "IPA-like", "lost", "lost ARA", "lost IPA")
    table = plain_table("ε that a device-epoch pays, and labels lost to empty budgets", columns, ("measured",))
    for (sampled, epsilon, models), each in found.items():
        paid = [fmean(getattr(one, name) for one in each) for name in ("trefoil", "ara_like", "ipa_like")]
        lost = [fmean(getattr(one, f"lost_{name}") for one in each) for name in ("trefoil", "ara_like", "ipa_like")]
        words = "one a week" if sampled else "all"
        table.add_row(
            words, f"{epsilon:g}", str(models), *(f"{one:.4f}" for one in paid), *(f"{one:.0%}" for one in lost)
        )
    return table


def together_table(found: Mapping[RegressionCell, Sequence[TogetherOrApart]]) -> Table:
    """One model over advertisers beside each advertiser's own."""
    columns = ("reports", "columns", "ε", "AUC together", "AUC apart", "gain together", "gain apart", "fitted apart")
    table = plain_table("One model, or one for each advertiser", columns, ())
    for cell, each in found.items():
        table.add_row(
            f"{cell.reports:,}",
            str(cell.columns),
            f"{cell.epsilon:g}",
            f"{fmean(one.together.auc for one in each):.3f}",
            f"{fmean(one.apart.auc for one in each):.3f}",
            f"{fmean(one.together.gain for one in each):+.2f}",
            f"{fmean(one.apart.gain for one in each):+.2f}",
            f"{sum(one.fitted_apart for one in each)}/{sum(one.advertisers for one in each)}",
        )
    return table


def lost_table(found: Mapping[int, Sequence[LostLabels]]) -> Table:
    """Means over seeds. A slope of 1 is that of a model of all labels."""
    columns = (
        "columns",
        "lost",
        "how",
        "rate",
        "slope, device's own field",
        "slope, other fields",
        "AUC",
        "AUC of all",
    )
    table = plain_table("What lost labels do to a model, without noise", columns, ("how",))
    for wide, each in found.items():
        for how, shifts in (
            ("by budget", [one.by_budget for one in each]),
            ("random", [one.at_random for one in each]),
        ):
            table.add_row(
                str(wide),
                f"{fmean(one.lost for one in each):.0%}",
                how,
                f"{fmean(one.rate for one in shifts):.3f}",
                f"{fmean(one.own_slope for one in shifts):.3f}",
                f"{fmean(one.other_slope for one in shifts):.3f}",
                f"{fmean(one.auc for one in shifts):.4f}",
                f"{fmean(one.auc for one in each):.4f}",
            )
    return table


def helpers_table(found: Sequence[HelpersFit]) -> Table:
    """Promise and measurement side by side, one row for each batch."""
    columns = ("reports", "counted", "columns", "noise", "ε", "promised sd", "measured", "AUC", "best", "seconds")
    table = plain_table("Through devices and three helpers", columns, ("noise",))
    for one in found:
        cell = one.cell
        table.add_row(
            f"{cell.reports:,}",
            f"{one.counted:,}",
            str(cell.columns),
            _mode(cell),
            f"{cell.epsilon:g}",
            f"{one.noise_sd:.2f}",
            f"{one.noise_rms:.2f}",
            f"{one.auc:.3f}",
            f"{one.best_auc:.3f}",
            f"{one.seconds:.0f}",
        )
    return table


def cell_json(cell: RegressionCell) -> dict[str, object]:
    """What a cell is."""
    return {"reports": cell.reports, "columns": cell.columns, "noise": _mode(cell), "epsilon": cell.epsilon}


def _mode(cell: RegressionCell) -> str:
    return "none" if cell.mode is None else cell.mode.value

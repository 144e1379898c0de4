"""What `trefoil experiment regression` prints and writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import fmean

from rich.table import Table

from benchmarks.experiments.label_charges import LabelCharges
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
            "none" if cell.mode is None else cell.mode.value,
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


def to_json(
    scores: Mapping[RegressionCell, Sequence[Score]],
    charged: Mapping[tuple[bool, float, int], Sequence[LabelCharges]],
    together: Mapping[RegressionCell, Sequence[TogetherOrApart]],
) -> dict[str, object]:
    """Every seed's numbers."""
    return {
        "scores": [_setting(cell) | {"seeds": [asdict(each) for each in found]} for cell, found in scores.items()],
        "charges": [
            {"sampled": sampled, "epsilon": epsilon, "models": models, "seeds": [asdict(each) for each in found]}
            for (sampled, epsilon, models), found in charged.items()
        ],
        "together": [_setting(cell) | {"seeds": [asdict(each) for each in found]} for cell, found in together.items()],
    }


def _setting(cell: RegressionCell) -> dict[str, object]:
    noise = "none" if cell.mode is None else cell.mode.value
    return {"reports": cell.reports, "columns": cell.columns, "noise": noise, "epsilon": cell.epsilon}

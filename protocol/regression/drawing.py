"""How good predictions are, as an image: the ROC curve, and calibration."""

from __future__ import annotations

from pathlib import Path

from protocol.drawing import new_figure, save_figure
from protocol.regression.scores import Labels, Numbers, area_under_curve, calibration, roc_curve


def draw_scores(path: Path, probability: Numbers, label: Labels) -> None:
    """On the left who is ranked first, on the right whether a predicted rate is the rate that was seen."""
    figure = new_figure(9, 4)
    left, right = figure.subplots(1, 2)
    false, true = roc_curve(probability, label)
    left.plot(false, true, color="#4c72b0")
    left.plot([0, 1], [0, 1], color="#999999", linestyle=":")
    left.set_xlabel("impressions without a conversion, share above the threshold")
    left.set_ylabel("with a conversion")
    left.set_title(f"ROC, area {area_under_curve(probability, label):.3f}")
    predicted, seen, counts = calibration(probability, label)
    # Two standard deviations of a share of so many.
    reach = 2 * (seen * (1 - seen) / counts) ** 0.5
    right.errorbar(predicted, seen, yerr=reach, fmt="o", color="#4c72b0", capsize=2)
    largest = float(max(predicted.max(), seen.max()))
    right.plot([0, largest], [0, largest], color="#999999", linestyle=":")
    right.set_xlabel("predicted rate")
    right.set_ylabel("rate seen")
    right.set_title("calibration, in tenths")
    save_figure(path, figure)

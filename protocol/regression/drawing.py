"""How good predictions are, as an image: the ROC curve, and calibration."""

from __future__ import annotations

from pathlib import Path

from protocol.errors import TrefoilError
from protocol.regression.scores import Labels, Numbers, area_under_curve, calibration, roc_curve


def draw_scores(path: Path, probability: Numbers, label: Labels) -> None:
    """On the left who is ranked first, on the right whether a predicted rate is the rate that was seen."""
    try:
        import matplotlib
    except ImportError:
        raise TrefoilError("drawing needs matplotlib", "Install it with: pip install 'trefoil[experiments]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 4))
    try:
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
        figure.tight_layout()
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise TrefoilError(f"cannot draw {path}: {error}", "Use a name that ends in .png, .svg or .pdf.") from None
    finally:
        pyplot.close(figure)

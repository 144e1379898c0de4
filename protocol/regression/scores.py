"""How good predictions are: ranking, log-loss, the ROC curve and calibration."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float64]
Labels = npt.NDArray[np.bool_]
_SMALLEST = 1e-9


def area_under_curve(score: Numbers, label: Labels) -> float:
    """The chance that a random positive scores above a random negative; ties count half."""
    positives = int(label.sum())
    if not (0 < positives < len(label)):
        raise ValueError("the area under the curve needs positives and negatives")
    order = np.argsort(score, kind="stable")
    ordered = score[order]
    edges = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1], [True]]))
    ranks = np.empty(len(score))
    ranks[order] = np.repeat((edges[:-1] + edges[1:] - 1) / 2, np.diff(edges))
    above = float(ranks[label].sum()) - positives * (positives - 1) / 2
    return above / (positives * (len(label) - positives))


def log_loss(probability: Numbers, label: Labels) -> float:
    """The mean of −ln of what was predicted for what happened."""
    clipped = np.clip(probability, _SMALLEST, 1 - _SMALLEST)
    return float(-np.mean(np.where(label, np.log(clipped), np.log1p(-clipped))))


def roc_curve(score: Numbers, label: Labels) -> tuple[Numbers, Numbers]:
    """False and true positive rates as the threshold falls, one point for each distinct score, from 0, 0 to 1, 1."""
    order = np.argsort(-score, kind="stable")
    last = np.append(np.diff(score[order]) != 0, True)
    true = np.cumsum(label[order])[last] / max(1, int(label.sum()))
    false = np.cumsum(~label[order])[last] / max(1, int((~label).sum()))
    return np.concatenate([[0.0], false]), np.concatenate([[0.0], true])


def calibration(probability: Numbers, label: Labels, bins: int = 10) -> tuple[Numbers, Numbers, Numbers]:
    """For bins of about equally many predictions: the mean prediction, the rate that was seen, and the count."""
    groups = np.array_split(np.argsort(probability, kind="stable"), bins)
    filled = [group for group in groups if len(group)]
    return (
        np.array([probability[group].mean() for group in filled]),
        np.array([label[group].mean() for group in filled]),
        np.array([float(len(group)) for group in filled]),
    )

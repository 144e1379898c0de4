"""One style for every plot of the benchmarks and experiments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from protocol.drawing import new_figure

COLOURS = ("#4c72b0", "#dd8452", "#8b1a8b", "#2a9d8f", "#b5651d", "#555555")
MARKERS = ("s", "^", "o", "D", "v", "P")


def plotted(body: Callable[[Any], None]) -> Any:  # Any: matplotlib has no types
    """One plot, drawn without a display."""
    figure = new_figure(5.4, 3.9)
    axes = figure.add_subplot()
    axes.grid(visible=True, which="major", alpha=0.3)
    body(axes)
    return figure


def legend_above(axes: Any, columns: int = 4) -> None:
    """Above the plot, where it hides nothing."""
    axes.legend(fontsize=7, ncols=columns, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)

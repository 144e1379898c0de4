"""The answer as an image, for whoever has matplotlib."""

from __future__ import annotations

from pathlib import Path

from protocol.drawing import new_figure, save_figure
from protocol.querier.worth import CONFIDENCE, QueryResult


def plot_result(path: Path | str, result: QueryResult) -> None:
    """A bar for every bucket, with the interval that its noise allows, and one for noise and bias if that is known."""
    answer = result.answer
    figure = new_figure(8, 4)
    axes = figure.add_subplot()
    buckets = range(len(answer.histogram))
    axes.bar(buckets, answer.histogram, yerr=result.half_width, capsize=2, color="#4c72b0", label="noise")
    if result.bias is not None:
        # The bound is on all buckets together, so any one of them may be off by all of it.
        reach = result.half_width + result.bias.bound
        axes.errorbar(buckets, answer.histogram, yerr=reach, fmt="none", ecolor="#dd8452", capsize=5, zorder=0)
    axes.set_xlabel("bucket")
    axes.set_ylabel(result.query.unit)
    axes.set_title(f"{result.query.site}, {answer.counted} reports, {CONFIDENCE:.0%} intervals of the noise")
    save_figure(Path(path), figure)

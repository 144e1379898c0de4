"""The throughput results, drawn: scaling in reports and in buckets, where the time goes, the price over plaintext."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from protocol.drawing import new_figure, save_figure
from protocol.places import picture_file

Points = Sequence[Mapping[str, Any]]

# The stages in the order in which a query goes through them, and what happens in each.
STAGES = {
    "transfer": "transfer, headers hashed",
    "check": "check headers",
    "open": "open (HPKE)",
    "expand": "expand seeds",
    "sum": "sum shares",
    "ledger": "ledger",
    "agreement": "agree, wait for the slowest",
    "noise": "noise (MPC)",
    "vote": "vote and release",
    "release": "collect and check",
}
SYSTEMS = ("plaintext", "trusted server", "bound of three bare opens", "trefoil", "naive MPyC")


def draw_all(result: Mapping[str, Any], place: Path) -> list[Path]:
    """One picture per question; returns their paths."""
    points: Points = result["points"]
    drawings = {
        "throughput-reports": _by_reports,
        "throughput-buckets": _by_buckets,
        "throughput-stages": _stages,
        "throughput-ratios": _ratios,
    }
    paths = []
    for name, draw in drawings.items():
        figure = new_figure(8, 4.2)
        draw(figure.add_subplot(), points)
        paths.append(picture_file(place, name, only=False, ending=".svg"))
        save_figure(paths[-1], figure)
    return paths


def _by_reports(axes: Any, points: Points) -> None:
    width = _middle(sorted({point["buckets"] for point in points}))
    chosen = sorted((point for point in points if point["buckets"] == width), key=lambda point: point["reports"])
    _rates(axes, chosen, "reports")
    axes.set(xlabel="reports in the batch", title=f"Throughput at {width} buckets, two cores")


def _by_buckets(axes: Any, points: Points) -> None:
    count = max(point["reports"] for point in points)
    chosen = sorted((point for point in points if point["reports"] == count), key=lambda point: point["buckets"])
    _rates(axes, chosen, "buckets")
    axes.set(xlabel="buckets", title=f"Throughput at {count:,} reports, two cores")


def _rates(axes: Any, chosen: Points, size: str) -> None:
    for system in SYSTEMS:
        sizes = [point[size] for point in chosen]
        axes.plot(sizes, [point["reports_per_second"][system] for point in chosen], "o-", label=system)
    axes.set(xscale="log", yscale="log", ylabel="reports per second")
    axes.grid(alpha=0.3, which="major")
    _legend(axes)


def _stages(axes: Any, points: Points) -> None:
    import matplotlib as mpl

    count = max(point["reports"] for point in points)
    chosen = sorted((point for point in points if point["reports"] == count), key=lambda point: point["buckets"])
    names = [f"{point['buckets']} buckets" for point in chosen]
    left = [0.0] * len(chosen)
    colors = {state: mpl.colormaps["tab10"](index) for index, state in enumerate(STAGES)}
    for state, label in STAGES.items():
        spent = [point["seconds"].get(state, 0.0) for point in chosen]
        axes.barh(names, spent, left=left, label=label, color=colors[state])
        left = [sum(pair) for pair in zip(left, spent, strict=True)]
    axes.set(xlabel="seconds, slowest helper of each stage", title=f"Where the time goes: {count:,} reports")
    _legend(axes)


def _ratios(axes: Any, points: Points) -> None:
    for width in sorted({point["buckets"] for point in points}):
        chosen = sorted((point for point in points if point["buckets"] == width), key=lambda point: point["reports"])
        price = [point["ratios"]["slowdown_over_plaintext"] for point in chosen]
        axes.plot([point["reports"] for point in chosen], price, "o-", label=f"{width} buckets")
    axes.set(
        xscale="log", yscale="log", xlabel="reports in the batch", ylabel="seconds per report, over the plain numpy sum"
    )
    axes.set_title("The price over plaintext")
    axes.grid(alpha=0.3, which="major")
    _legend(axes)


def _legend(axes: Any) -> None:
    """Beside the picture, where it hides nothing."""
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _middle(values: Sequence[int]) -> int:
    return 128 if 128 in values else values[len(values) // 2]

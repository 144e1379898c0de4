"""A histogram with error bars beside the exact one, as a picture for the eye and a table for everyone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from device.dashboard.layout import table
from device.dashboard.markup import Markup, tag

WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 720, 300, 48, 16, 44
TICKS = 5


@dataclass(frozen=True, slots=True)
class Axis:
    """The vertical axis: from `low` to `high`, with round steps."""

    low: int
    high: int
    step: int

    @classmethod
    def around(cls, values: Sequence[float]) -> Axis:
        """An axis that has room for all values and for zero."""
        low, high = min(0.0, *values), max(1.0, *values)
        rough = (high - low) / TICKS
        magnitude = 10 ** max(0, math.floor(math.log10(rough)))
        step = next(int(magnitude * factor) for factor in (1, 2, 5, 10) if magnitude * factor >= rough)
        return cls(math.floor(low / step) * step, math.ceil(high / step) * step, step)

    def y(self, value: float) -> float:
        """Where a value is in the picture."""
        return TOP + (self.high - value) / (self.high - self.low) * (HEIGHT - TOP - BOTTOM)


def histogram_chart(
    labels: Sequence[str], exact: Sequence[int], answer: Sequence[int], half_width: int, confidence: float
) -> Markup:
    """Exact bars in grey, noisy ones in the accent colour with their interval; and the same as a table."""
    axis = Axis.around([*exact, *(value + half_width for value in answer), *(value - half_width for value in answer)])
    group = (WIDTH - LEFT) / len(labels)
    shapes = [_gridline(axis, value) for value in range(axis.low, axis.high + 1, axis.step)]
    for place, label in enumerate(labels):
        left = LEFT + place * group
        shapes += [
            _bar(axis, left + group * 0.16, group * 0.3, exact[place], "exact"),
            _bar(axis, left + group * 0.54, group * 0.3, answer[place], "noisy"),
            _interval(axis, left + group * 0.69, answer[place], half_width),
            tag("text", label, x=f"{left + group / 2:.1f}", y=HEIGHT - 16, text_anchor="middle"),
        ]
    summary = f"Bars for {len(labels)} campaigns; the numbers are in the table below."
    picture = tag("svg", shapes, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=summary, class_="chart")
    return tag("figure", picture, _legend(confidence), _table(labels, exact, answer, half_width, confidence))


def _gridline(axis: Axis, value: int) -> Markup:
    y = f"{axis.y(value):.1f}"
    kind = "zero" if value == 0 else "grid"
    line = tag("line", x1=LEFT, x2=WIDTH, y1=y, y2=y, class_=kind)
    return tag("g", line, tag("text", value, x=LEFT - 8, y=y, text_anchor="end", dominant_baseline="middle"))


def _bar(axis: Axis, x: float, width: float, value: float, kind: str) -> Markup:
    top, bottom = sorted((axis.y(value), axis.y(0)))
    return tag("rect", x=f"{x:.1f}", y=f"{top:.1f}", width=f"{width:.1f}", height=f"{bottom - top:.1f}", class_=kind)


def _interval(axis: Axis, x: float, value: float, half_width: int) -> Markup:
    top, bottom = axis.y(value + half_width), axis.y(value - half_width)
    path = f"M{x:.1f} {top:.1f}V{bottom:.1f}M{x - 7:.1f} {top:.1f}h14M{x - 7:.1f} {bottom:.1f}h14"
    return tag("path", d=path, class_="interval")


def _legend(confidence: float) -> Markup:
    entries = (
        ("exact", "what a tracker counts, person by person"),
        ("noisy", f"what the helpers answer, with its {confidence:.0%} interval"),
    )
    keys = [
        tag("span", tag("span", class_=f"key {kind}", aria_hidden="true"), text, class_="entry")
        for kind, text in entries
    ]
    return tag("figcaption", keys)


def _table(
    labels: Sequence[str], exact: Sequence[int], answer: Sequence[int], half_width: int, confidence: float
) -> Markup:
    columns = ["Campaign", "Tracker", "Answer of the helpers", f"{confidence:.0%} interval"]
    rows = [
        [
            label,
            f"{exact[place]:,}",
            f"{answer[place]:,}",
            f"{answer[place] - half_width:,} to {answer[place] + half_width:,}",
        ]
        for place, label in enumerate(labels)
    ]
    return table("Purchases by campaign", columns, rows)

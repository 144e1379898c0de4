"""A histogram with error bars beside the exact one, as a picture for the eye and a table for everyone.

Drawn for a width of 440: on a screen of 390 pixels its text is still 12 pixels high.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from device.dashboard.layout import table
from device.dashboard.markup import Markup, tag

WIDTH, LEFT, RIGHT, TOP = 440, 14, 14, 8
ROW, BAR, LABEL, FOOT = 68, 16, 20, 26
TICKS = 4


@dataclass(frozen=True, slots=True)
class Axis:
    """The horizontal axis: from `low` to `high`, with round steps."""

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

    def x(self, value: float) -> float:
        """Where a value is in the picture."""
        return LEFT + (value - self.low) / (self.high - self.low) * (WIDTH - LEFT - RIGHT)


def histogram_chart(
    labels: Sequence[str], exact: Sequence[int], answer: Sequence[int], half_width: int, confidence: float
) -> Markup:
    """Exact bars in grey, noisy ones in the accent colour with their interval; and the same as a table."""
    legend = _legend(
        "what a tracker counts, person by person", f"what the helpers answer, with its {confidence:.0%} interval"
    )
    picture = _picture(labels, exact, answer, half_width)
    return tag("figure", picture, legend, _table(labels, exact, answer, half_width, confidence))


def expected_chart(labels: Sequence[str], expected: Sequence[int], half_width: int, confidence: float) -> Markup:
    """What an answer would look like before it is asked for: the expected numbers, and how far noise may move them."""
    legend = _legend("", f"expected number, and where {confidence:.0%} of the answers lie")
    return tag("figure", _picture(labels, None, expected, half_width), legend)


def _picture(labels: Sequence[str], exact: Sequence[int] | None, answer: Sequence[int], half_width: int) -> Markup:
    ends = [end for value in answer for end in (value - half_width, value + half_width)]
    axis = Axis.around([*(exact or ()), *ends])
    bottom = TOP + ROW * len(labels)
    shapes = [_gridline(axis, value, bottom) for value in range(axis.low, axis.high + 1, axis.step)]
    for place, label in enumerate(labels):
        top = TOP + place * ROW
        shapes.append(tag("text", label, x=LEFT, y=top + LABEL - 5, class_="name"))
        if exact is not None:
            shapes.append(_bar(axis, top + LABEL, exact[place], "exact"))
        middle = top + LABEL + (BAR + 2 if exact is not None else BAR / 2)
        shapes += [
            _bar(axis, middle, answer[place], "noisy"),
            _interval(axis, middle + BAR / 2, answer[place], half_width),
        ]
    summary = f"Bars for {len(labels)} campaigns; the numbers are in words beside it."
    height = bottom + FOOT
    return tag("svg", shapes, viewBox=f"0 0 {WIDTH} {height}", role="img", aria_label=summary, class_="chart")


def _gridline(axis: Axis, value: int, bottom: int) -> Markup:
    x = f"{axis.x(value):.1f}"
    line = tag("line", x1=x, x2=x, y1=TOP, y2=bottom, class_="zero" if value == 0 else "grid")
    return tag("g", line, tag("text", f"{value:,}", x=x, y=bottom + 18, text_anchor="middle"))


def _bar(axis: Axis, y: float, value: float, kind: str) -> Markup:
    left, right = sorted((axis.x(value), axis.x(0)))
    return tag("rect", x=f"{left:.1f}", y=f"{y:.1f}", width=f"{right - left:.1f}", height=BAR, class_=kind)


def _interval(axis: Axis, y: float, value: float, half_width: int) -> Markup:
    left, right = axis.x(value - half_width), axis.x(value + half_width)
    path = f"M{left:.1f} {y:.1f}H{right:.1f}M{left:.1f} {y - 6:.1f}v12M{right:.1f} {y - 6:.1f}v12"
    return tag("path", d=path, class_="interval")


def _legend(exact: str, noisy: str) -> Markup:
    keys = [
        tag("span", tag("span", class_=f"key {kind}", aria_hidden="true"), text, class_="entry")
        for kind, text in (("exact", exact), ("noisy", noisy))
        if text
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
    return table("Purchases by campaign", columns, rows, numbers=columns[1:])

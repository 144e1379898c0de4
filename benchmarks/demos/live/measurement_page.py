"""The advertiser's website: the reports she has, the query she may ask, and its answer.

An answer is shown as one sentence, as a chart with error bars beside the exact numbers of a tracker, and as a table.
The chart is drawn for a width of 440, so that on a screen of 390 pixels its text is still 12 pixels high.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from aiohttp import web

from benchmarks.demos.live.measurement import MAX_PEOPLE, Batch, Measurement
from benchmarks.demos.live.web import (
    CAMPAIGNS,
    CUTOFF,
    Frame,
    Map,
    Place,
    Tracker,
    exact_histogram,
    see_other,
)
from device.dashboard.formatting import LocalTime, plural
from device.dashboard.markup import Markup, Node, notice, section, table, tag
from protocol.errors import TrefoilError
from protocol.querier.failure import QueryFailed
from protocol.querier.result import CONFIDENCE, QueryResult, judge


def one_line(labels: Sequence[str], answer: Sequence[int], half_width: int) -> str:
    """Return which campaign sold most, as far as the noise allows: overlapping intervals are not ranked."""
    ranked = sorted(zip(answer, labels, strict=True), reverse=True)
    (most, name), (second, other) = ranked[:2]
    if most - half_width <= 0:
        return f"Noise: no campaign stands out from ± {half_width:,}. This answer says nothing about anyone."
    if most - half_width > second + half_width:
        return f"“{name}” sold most: {most:,} ± {half_width:,}."
    return f"“{name}” ({most:,}) and “{other}” ({second:,}) are too close to tell apart at ± {half_width:,}."


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
        """Return an axis that spans all values and zero."""
        low, high = min(0.0, *values), max(1.0, *values)
        rough = (high - low) / TICKS
        magnitude = 10 ** max(0, math.floor(math.log10(rough)))
        step = next(int(magnitude * factor) for factor in (1, 2, 5, 10) if magnitude * factor >= rough)
        return cls(math.floor(low / step) * step, math.ceil(high / step) * step, step)

    def x(self, value: float) -> float:
        return LEFT + (value - self.low) / (self.high - self.low) * (WIDTH - LEFT - RIGHT)


def histogram_chart(
    labels: Sequence[str], exact: Sequence[int], answer: Sequence[int], half_width: int, confidence: float
) -> Markup:
    """Draw exact bars in grey and noisy ones in the accent colour with their intervals, and the same as a table."""
    legend = _legend(
        "what a tracker counts, person by person", f"what the helpers answer, with its {confidence:.0%} interval"
    )
    picture = _picture(labels, exact, answer, half_width)
    return tag("figure", picture, legend, _table(labels, exact, answer, half_width, confidence))


def _picture(labels: Sequence[str], exact: Sequence[int], answer: Sequence[int], half_width: int) -> Markup:
    ends = [end for value in answer for end in (value - half_width, value + half_width)]
    axis = Axis.around([*exact, *ends])
    bottom = TOP + ROW * len(labels)
    shapes = [_gridline(axis, value, bottom) for value in range(axis.low, axis.high + 1, axis.step)]
    for place, label in enumerate(labels):
        top = TOP + place * ROW
        shapes.append(tag("text", label, x=LEFT, y=top + LABEL - 5, class_="name"))
        middle = top + LABEL + BAR + 2
        shapes += [
            _bar(axis, top + LABEL, exact[place], "exact"),
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


CROWD = 400
SHOWN_SIGHTINGS = 30


class MeasurementPage:
    """Serve the page. Its forms start jobs of `measurement`, and it shows their outcomes."""

    def __init__(self, where: Map, measurement: Measurement, tracker: Tracker, local_time: LocalTime) -> None:
        self._frame = Frame(Place.MEASUREMENT, where)
        self._measurement = measurement
        self._tracker = tracker
        self._local_time = local_time

    def app(self) -> web.Application:
        """Return the application of the advertiser's website."""
        app = self._frame.app()
        app.router.add_get("/", self._show)
        app.router.add_post("/crowd", self._crowd)
        app.router.add_post("/ask", self._ask)
        app.router.add_post("/again", self._again)
        return app

    async def _crowd(self, request: web.Request) -> web.Response:
        people = await _number(request, "people", MAX_PEOPLE)
        return self._started(lambda: self._measurement.add_crowd(people))

    async def _ask(self, request: web.Request) -> web.Response:
        batch = await _number(request, "batch", len(self._measurement.batches))
        return self._started(lambda: self._measurement.ask(batch))

    async def _again(self, request: web.Request) -> web.Response:
        batch = await _number(request, "batch", len(self._measurement.batches))
        return self._started(lambda: self._measurement.ask_again(batch))

    @staticmethod
    def _started(start: Callable[[], None]) -> web.Response:
        try:
            start()
        except TrefoilError as error:
            raise web.HTTPConflict(text=f"{error}. {error.hint}\n") from None
        raise see_other()

    async def _show(self, _: web.Request) -> web.Response:
        measurement = self._measurement
        answered = [batch for batch in reversed(measurement.batches) if batch.outcome is not None]
        nothing = section("answer", "The answer", tag("p", _NONE, class_="empty"))
        beside = self._answered(answered[0]) if answered else nothing
        main = [
            tag("h1", "Which ads sold shoes?"),
            self._running() if measurement.busy else None,
            tag("div", self._collected(), beside, class_="asking"),
            [self._answered(batch) for batch in answered[1:]],
            section("about", "What happens here", tag("p", _INTRODUCTION), tag("p", _DROWNING)),
            self._tracked(),
        ]
        title, busy = "Which ads sold shoes?", bool(measurement.busy)
        return self._frame.show(title, main, refresh=busy)

    def _running(self) -> Markup:
        statuses = sorted(self._measurement.statuses.items())
        states = [f"helper {party + 1}: {status.state.value}" for party, status in statuses]
        return notice(f"{self._measurement.busy}… {'; '.join(states)}")

    def _collected(self) -> Markup:
        batch, busy = self._measurement.collecting, bool(self._measurement.busy)
        count = len(batch.credited)
        paragraph = f"Batch {batch.number} holds {plural(count, 'sealed report')}, {len(batch.yours)} of them yours."
        people = [
            tag("label", "People", for_="people"),
            tag("input", type="number", id="people", name="people", value=CROWD, min=1, max=MAX_PEOPLE, required=True),
        ]
        crowd = tag("div", people), tag("button", "Let a crowd buy shoes too", disabled=busy)
        return section(
            "collected",
            "Reports collected",
            tag("p", paragraph),
            _form("/crowd", tag("div", crowd, class_="fields")),
            _form("/ask", _batch_field(batch), _button("Ask the helpers", disabled=busy or not count)),
        )

    def _answered(self, batch: Batch) -> Markup:
        name = f"Batch {batch.number}, {plural(len(batch.credited), 'report')}"
        content: Node = None
        if isinstance(batch.outcome, QueryResult):
            content = [self._answer(batch, batch.outcome), self._replay(batch)]
        elif batch.outcome is not None:
            again = _form("/ask", _batch_field(batch), _button("Ask again", disabled=bool(self._measurement.busy)))
            content = [_refused(batch.outcome), again]
        return section(f"batch-{batch.number}", name, content)

    def _answer(self, batch: Batch, result: QueryResult) -> Node:
        answer, yours = result.answer, len(batch.yours)
        one = ("your purchase" if yours == 1 else "your purchases") if yours else "any one person"
        paragraph = (
            f"{plural(answer.counted, 'report')} counted. Each number carries noise with a standard deviation of "
            f"{result.noise_sd:.1f}; without {one} no number would differ by more than {yours or 1}."
        )
        exact = exact_histogram(list(batch.credited.values()))
        chart = histogram_chart(CAMPAIGNS, exact, answer.histogram, result.half_width, CONFIDENCE)
        sentence = tag("p", one_line(CAMPAIGNS, answer.histogram, result.half_width), class_="verdict")
        return [sentence, chart, tag("p", paragraph), verdict_line(result)]

    def _replay(self, batch: Batch) -> Node:
        if isinstance(batch.replayed, TrefoilError):
            return [tag("p", "Asked again about the same reports:"), _refused(batch.replayed)]
        paragraph = "Every answer has fresh noise, and the mean of many would have none. So a report counts once:"
        button = _button("Ask again with the same reports", disabled=bool(self._measurement.busy))
        return [tag("p", paragraph), _form("/again", _batch_field(batch), button)]

    def _tracked(self) -> Markup:
        latest = list(reversed(self._tracker.sightings))[:SHOWN_SIGHTINGS]
        rows = [[self._local_time.moment(seen.time), f"You {seen.text}"] for seen in latest]
        listing = table("What a tracker would have written down about you", ["When", "What"], rows)
        nothing = tag("p", "Nothing yet: you have not clicked or bought anything.", class_="empty")
        return section("tracked", "And with a tracker", tag("p", _TRACKER), listing if rows else nothing)


_NONE = "Nothing has been asked yet. The answer will stand here, beside its button."
_INTRODUCTION = (
    "You are the advertiser now. You hold reports that you cannot read. Three helpers can add them up together, "
    "without any of them reading one either, and they add noise before you see the sum."
)
_DROWNING = (
    "Ask with your own purchase alone and the answer is noise: that is the protection. "
    "Let a crowd in, and the campaigns stand out while you do not."
)
_TRACKER = (
    "For comparison, these pages also tell a pretended tracker what you do, as pages with third-party cookies would. "
    "It needs no batch and no noise, because it follows you."
)


def _form(action: str, *content: Node) -> Markup:
    return tag("form", content, method="post", action=action)


def _button(name: str, *, disabled: bool) -> Markup:
    return tag("p", tag("button", name, class_="primary", disabled=disabled), class_="actions")


def _batch_field(batch: Batch) -> Markup:
    return tag("input", type="hidden", name="batch", value=batch.number)


def _refused(error: TrefoilError) -> Markup:
    """Show the same sentence as on a terminal, with each helper's own words behind a disclosure."""
    message = f"{str(error)[:1].upper()}{str(error)[1:]}".removesuffix(".")
    lines = error.details if isinstance(error, QueryFailed) else ()
    # What was counted before stays counted: there is nothing to try.
    final = isinstance(error, QueryFailed) and error.shortfall is not None and not error.shortfall.accepted
    details = tag("details", tag("summary", "What each helper says"), tag("ul", [tag("li", line) for line in lines]))
    return notice(
        [tag("p", f"{message}. {'' if final else error.hint}".rstrip()), details if lines else None], kind="warn"
    )


def verdict_line(result: QueryResult) -> Markup:
    """Return how much exhausted budgets may have left out, and whether the answer is acceptable, as on a terminal."""
    sentence = judge(result, CUTOFF).sentence()
    verdict = f"{sentence[:1].upper()}{sentence[1:]}"
    if result.bias is None:
        return tag("p", verdict)
    moved = f"at most {result.bias.bound:,.0f} in total, with probability {1 - result.bias.beta:.0%}"
    return tag("p", f"Weeks without budget have moved the answer by {moved}. {verdict}")


async def _number(request: web.Request, name: str, most: int) -> int:
    """Return a number from a form, or refuse one that is not from 1 to `most`."""
    text = str((await request.post()).get(name, ""))
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= most):
        raise web.HTTPBadRequest(text=f"{name} must be a number from 1 to {most}.\n")
    return int(text)

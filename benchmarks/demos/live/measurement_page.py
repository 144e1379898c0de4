"""The advertiser's website: how many people buy, the query she may ask, and its answer beside a tracker's list.

The slider goes from you alone to a crowd; each question is put to the three helpers with fresh reports. An answer is
shown as one sentence, as a chart with the noise as a band around zero, and as a table. The chart is drawn for a width
of 440, so that on a screen of 390 pixels its text is still 12 pixels high.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from aiohttp import web

from benchmarks.demos.live.measurement import CROWD, SIZES, Batch, Measurement
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
from device.dashboard.markup import Markup, Node, fold, notice, section, table, tag
from protocol.errors import TrefoilError
from protocol.querier.failure import QueryFailed
from protocol.querier.result import CONFIDENCE, QueryResult, judge


def bounds_of(answer: Sequence[int], half_width: int, reports: int) -> list[tuple[int, int]]:
    """Return the least and most that each bucket can have, by its interval and by the size of the batch.

    Purchases that one bucket surely has, no other can have. The list is empty if no histogram of this many purchases
    lies within all intervals: then some noise is larger than its half width.
    """
    lows = [max(0, value - half_width) for value in answer]
    spare = reports - sum(lows)
    highs = [min(value + half_width, low + spare) for value, low in zip(answer, lows, strict=True)]
    bounds = list(zip(lows, highs, strict=True))
    return bounds if all(low <= max(0, high) for low, high in bounds) and spare >= 0 else []


def best_campaign(answer: Sequence[int], half_width: int, reports: int) -> int | None:
    """Return the bucket that has more than any other can have, or None.

    A batch that the noise could hide says nothing, whatever its answer: one in ten has a number beyond the half width.
    """
    bounds = bounds_of(answer, half_width, reports)
    if reports <= half_width or not bounds:
        return None
    best = max(range(len(answer)), key=lambda at: answer[at])
    others = [high for at, (_, high) in enumerate(bounds) if at != best]
    return best if bounds[best][0] > max(0, *others) else None


def one_line(labels: Sequence[str], answer: Sequence[int], half_width: int, reports: int) -> str:
    """Return which campaign sold most, as far as the noise and the size of the batch allow."""
    counted, bounds = plural(reports, "purchase"), bounds_of(answer, half_width, reports)
    if reports <= half_width:
        hidden = "cannot stand out" if reports == 1 else "cannot stand out, not even together,"
        return f"Noise. {counted} {hidden} from ± {half_width:,}: whatever shows here is chance."
    if not bounds:
        return f"Noise: {counted} cannot add up to this, so that some of it is more than ± {half_width:,}."
    if (best := best_campaign(answer, half_width, reports)) is not None:
        low, high = bounds[best]
        return f"“{labels[best]}” sold most: {low:,} to {high:,} of {counted}."
    (most, name), (second, other) = sorted(zip(answer, labels, strict=True), reverse=True)[:2]
    if most <= half_width:
        return f"Noise: of {counted} no campaign stands out from ± {half_width:,}."
    return (
        f"“{name}” ({signed(most)}) and “{other}” ({signed(second)}) are too close to tell apart at ± {half_width:,}. "
        "More people would part them."
    )


def signed(value: int) -> str:
    """Return a number with thousands separators and a true minus sign."""
    return f"{value:,}".replace("-", "−")


WIDTH, LEFT, RIGHT, TOP = 440, 28, 28, 8
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
        """Return an axis that spans all values and zero. It ends at a round number, and begins where it must."""
        low, high = min(0.0, *values), max(1.0, *values)
        rough = (high - low) / TICKS
        magnitude = 10 ** max(0, math.floor(math.log10(rough)))
        step = next(int(magnitude * factor) for factor in (1, 2, 5, 10) if magnitude * factor >= rough)
        return cls(math.floor(low), math.ceil(high / step) * step, step)

    @property
    def ticks(self) -> range:
        return range(math.ceil(self.low / self.step) * self.step, self.high + 1, self.step)

    def x(self, value: float) -> float:
        return LEFT + (value - self.low) / (self.high - self.low) * (WIDTH - LEFT - RIGHT)


def histogram_chart(
    labels: Sequence[str], exact: Sequence[int], answer: Sequence[int], half_width: int, confidence: float
) -> Markup:
    """Draw exact bars in grey and noisy ones in the accent colour with their intervals, and the same as a table."""
    legend = _legend(
        ("exact", "what a tracker counts, person by person"),
        ("noisy", f"what the helpers answer, with its {confidence:.0%} interval"),
        ("band", f"where noise alone lies, ± {half_width:,}"),
    )
    numbers = fold("numbers", "The same in numbers", _table(labels, exact, answer, half_width, confidence))
    return tag("figure", _picture(labels, exact, answer, half_width), legend, numbers)


def _picture(labels: Sequence[str], exact: Sequence[int], answer: Sequence[int], half_width: int) -> Markup:
    ends = [end for value in (0, *answer) for end in (value - half_width, value + half_width)]
    axis = Axis.around([*exact, *ends])
    bottom = TOP + ROW * len(labels)
    left, right = axis.x(-half_width), axis.x(half_width)
    shapes = [
        tag("rect", x=f"{left:.1f}", y=TOP, width=f"{right - left:.1f}", height=bottom - TOP, class_="band"),
        *(_gridline(axis, value, bottom) for value in axis.ticks),
    ]
    for place, label in enumerate(labels):
        top = TOP + place * ROW
        shapes.append(tag("text", label, x=LEFT, y=top + LABEL - 5, class_="name"))
        middle = top + LABEL + BAR + 2
        shapes += [
            _bar(axis, top + LABEL, exact[place], "exact"),
            _bar(axis, middle, answer[place], "noisy"),
            _interval(axis, middle + BAR / 2, answer[place], half_width),
        ]
    summary = f"Bars for {len(labels)} campaigns; the numbers are in a table below."
    height = bottom + FOOT
    return tag("svg", shapes, viewBox=f"0 0 {WIDTH} {height}", role="img", aria_label=summary, class_="chart")


def small_picture(answer: Sequence[int], half_width: int) -> Markup:
    """Draw an answer without words, for a row of them: the band of the noise, and a bar for each campaign."""
    reach = max(half_width, *(abs(value) + half_width for value in answer))
    low = min(-half_width, *(value - half_width for value in answer))
    scale, zero = 100 / (reach - low), -low * 100 / (reach - low)
    shapes = [
        tag(
            "rect",
            x=f"{zero - half_width * scale:.1f}",
            width=f"{2 * half_width * scale:.1f}",
            height=52,
            class_="band",
        )
    ]
    for place, value in enumerate(answer):
        left, width = min(zero, zero + value * scale), abs(value) * scale
        shapes.append(tag("rect", x=f"{left:.1f}", y=4 + 12 * place, width=f"{width:.1f}", height=8, class_="noisy"))
    shapes.append(tag("line", x1=f"{zero:.1f}", x2=f"{zero:.1f}", y2=52, class_="zero"))
    return tag("svg", shapes, viewBox="0 0 100 52", class_="small-chart", aria_hidden="true")


def _gridline(axis: Axis, value: int, bottom: int) -> Markup:
    x = f"{axis.x(value):.1f}"
    line = tag("line", x1=x, x2=x, y1=TOP, y2=bottom, class_="zero" if value == 0 else "grid")
    return tag("g", line, tag("text", signed(value), x=x, y=bottom + 18, text_anchor="middle"))


def _bar(axis: Axis, y: float, value: float, kind: str) -> Markup:
    """Return a bar from zero; a fresh one grows out of the line at zero."""
    left, right = sorted((axis.x(value), axis.x(0)))
    size = {"width": f"{right - left:.1f}", "height": f"{BAR}"}
    return tag("rect", x=f"{left:.1f}", y=f"{y:.1f}", **size, class_=kind, transform_origin=f"{axis.x(0):.1f} 0")


def _interval(axis: Axis, y: float, value: float, half_width: int) -> Markup:
    left, right = axis.x(value - half_width), axis.x(value + half_width)
    path = f"M{left:.1f} {y:.1f}H{right:.1f}M{left:.1f} {y - 6:.1f}v12M{right:.1f} {y - 6:.1f}v12"
    return tag("path", d=path, class_="interval")


def _legend(*entries: tuple[str, str]) -> Markup:
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
            signed(answer[place]),
            f"{signed(answer[place] - half_width)} to {signed(answer[place] + half_width)}",
        ]
        for place, label in enumerate(labels)
    ]
    return table("Purchases by campaign", columns, rows, numbers=columns[1:])


SHOWN_SIGHTINGS = 8


class MeasurementPage:
    """Serve the page. Its forms start jobs of `measurement`, and it shows their outcomes."""

    def __init__(self, where: Map, measurement: Measurement, tracker: Tracker, local_time: LocalTime) -> None:
        self._frame = Frame(Place.MEASUREMENT, where)
        self._measurement = measurement
        self._tracker = tracker
        self._local_time = local_time

    def app(self) -> web.Application:
        """Return the application of the advertiser's website."""
        app = self._frame.app(scripts=True)
        app.router.add_get("/", self._show)
        app.router.add_post("/ask", self._ask)
        app.router.add_post("/retry", self._retry)
        app.router.add_post("/again", self._again)
        return app

    async def _ask(self, request: web.Request) -> web.Response:
        people = SIZES[await _number(request, "position", range(len(SIZES)))]
        return self._started(lambda: self._measurement.ask(people))

    async def _retry(self, request: web.Request) -> web.Response:
        batch = await _number(request, "batch", range(1, len(self._measurement.batches) + 1))
        return self._started(lambda: self._measurement.retry(batch))

    async def _again(self, request: web.Request) -> web.Response:
        batch = await _number(request, "batch", range(1, len(self._measurement.batches) + 1))
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
        answered = [batch for batch in measurement.batches if batch.outcome is not None]
        main = [
            tag("h1", "Which ads sold shoes?"),
            self._people(answered),
            tag("div", self._latest(answered), self._tracked(), class_="beside"),
            self._so_far(answered),
            section("about", "What happens here", tag("p", _INTRODUCTION)),
        ]
        title, busy = "Which ads sold shoes?", bool(measurement.busy)
        return self._frame.show(title, main, scripts=("story.js",), refresh=busy)

    def _people(self, answered: Sequence[Batch]) -> Markup:
        """Return the slider with its button, and why a part of them is greyed."""
        yours, busy = len(self._measurement.collecting.yours), bool(self._measurement.busy)
        position, again = self._position(answered, yours), " again" if answered else ""
        button = tag("button", f"Ask the three helpers{again}", class_="primary", disabled=busy, aria_describedby="why")
        content = [
            tag("label", "How many people buy shoes? ", tag("output", _people_at(position)), for_="position"),
            _slider(position, 0 if yours or busy else 1, busy=busy),
            tag("p", button, class_="actions"),
        ]
        form = tag("form", content, method="post", action="/ask", id="ask", autocomplete="off")
        return section("people", "Ask the helpers", form, self._state(yours, busy))

    def _position(self, answered: Sequence[Batch], yours: int) -> int:
        """Return where the slider stands: at first at you alone, and after that at a crowd."""
        if self._measurement.busy and self._measurement.crowd_size is not None:
            return SIZES.index(self._measurement.crowd_size)
        if not answered and yours:
            return 0
        return SIZES.index(next((batch.people for batch in reversed(answered) if batch.people), CROWD))

    def _state(self, yours: int, busy: bool) -> Markup:
        """Return what is going on, or why a part of the form is greyed."""
        if busy:
            return tag("div", self._progress(), id="why", role="status", class_="notice")
        if yours:
            text = f"You have {plural(yours, 'report')} here that no query has counted yet. It goes into the next one."
            return tag("p", text if yours == 1 else text.replace("It goes", "They go"), id="why", class_="soft")
        why = "The slider does not reach “You alone” now, as no report of yours waits here; a report counts once. "
        return tag("p", why, self._frame.link(Place.SHOP, "Buy shoes to be asked about."), id="why", class_="soft")

    def _progress(self) -> Node:
        measurement = self._measurement
        people, bought = measurement.crowd_size, measurement.bought
        text = [tag("p", f"{measurement.busy}. The button is greyed until the answer is here.")]
        if people:
            bar = tag("progress", max=people, value=bought, aria_label="People who have bought")
            text.append(tag("p", bar, f" {bought:,} of {people:,} people have bought and sent their reports."))
        states = [f"helper {party + 1}: {status.state.value}" for party, status in sorted(measurement.statuses.items())]
        return [text, tag("p", "; ".join(states)) if states else None]

    def _latest(self, answered: Sequence[Batch]) -> Markup:
        if not answered:
            return section("answer", "The answer", tag("p", _NONE, class_="empty"))
        batch, busy = answered[-1], bool(self._measurement.busy)
        content: Node = None
        if isinstance(batch.outcome, QueryResult):
            content = [self._answer(batch, batch.outcome), self._replay(batch)]
        elif batch.outcome is not None:
            again = _form("/retry", _batch_field(batch), _button("Ask again", busy=busy))
            content = [_refused(batch.outcome), again]
        name = f"The answer to question {batch.number}, about {plural(len(batch.credited), 'person', 'people')}"
        # Bars of an answer that has just come grow out of zero.
        return section("answer", name, content, class_=None if busy else "fresh")

    def _answer(self, batch: Batch, result: QueryResult) -> Node:
        answer, yours = result.answer, len(batch.yours)
        one = ("your purchase" if yours == 1 else "your purchases") if yours else "any one person"
        paragraph = (
            f"{plural(answer.counted, 'report')} counted. Each number carries noise with a standard deviation of "
            f"{result.noise_sd:.1f}; without {one} no number would differ by more than {yours or 1}."
        )
        exact = exact_histogram(list(batch.credited.values()))
        chart = histogram_chart(CAMPAIGNS, exact, answer.histogram, result.half_width, CONFIDENCE)
        sentence = one_line(CAMPAIGNS, answer.histogram, result.half_width, answer.counted)
        return [tag("p", sentence, class_="verdict"), chart, tag("p", paragraph), verdict_line(result)]

    def _replay(self, batch: Batch) -> Node:
        if isinstance(batch.replayed, TrefoilError):
            return [tag("p", "Asked once more about the same reports:"), _refused(batch.replayed)]
        paragraph = "Every answer has fresh noise, and the mean of many would have none. So a report counts once:"
        button = _button("Ask about the same reports once more", busy=bool(self._measurement.busy))
        return [tag("p", paragraph), _form("/again", _batch_field(batch), button)]

    def _so_far(self, answered: Sequence[Batch]) -> Markup | None:
        """Return all answers so far, by the size of the crowd: the band of the noise shrinks beside the campaigns."""
        results = [(batch, batch.outcome) for batch in answered if isinstance(batch.outcome, QueryResult)]
        results.sort(key=lambda pair: (pair[1].answer.counted, pair[0].number))
        items = [
            tag(
                "li",
                tag("strong", plural(result.answer.counted, "person", "people")),
                small_picture(result.answer.histogram, result.half_width),
                _short(result),
            )
            for _, result in results
        ]
        text = "The band is the noise. It is as wide for one person as for thousands; only the campaigns grow."
        listing = tag("ul", items, class_="so-far")
        return section("so-far", "Out of the noise", tag("p", text), listing) if len(items) > 1 else None

    def _tracked(self) -> Markup:
        latest = list(reversed(self._tracker.sightings))[:SHOWN_SIGHTINGS]
        rows = [[self._local_time.moment(seen.time), f"You {seen.text}"] for seen in latest]
        listing = table("What it has written down about you", ["When", "What"], rows)
        nothing = tag("p", "Nothing yet: you have not clicked or bought anything.", class_="empty")
        return section("tracked", "And with a tracker", tag("p", _TRACKER), listing if rows else nothing)


_NONE = "Nothing has been asked yet. The answer will stand here."
_INTRODUCTION = (
    "You are the advertiser now. You hold reports that you cannot read. Three helpers can add them up together, "
    "without any of them reading one either, and they add noise before you see the sum. Everyone in the crowd has a "
    "device of their own, and the helpers that you ask are three real ones on this machine."
)
_TRACKER = (
    "For comparison, these pages also tell a pretended tracker what you do, as pages with third-party cookies would. "
    "It needs no crowd and no noise, because it follows you and everybody else."
)


def _slider(position: int, least: int, *, busy: bool) -> Markup:
    """Return the slider over the positions from `least`, with its scale."""
    slider = tag(
        "input",
        type="range",
        id="position",
        name="position",
        min=least,
        max=len(SIZES) - 1,
        value=position,
        disabled=busy,
        data_sizes=",".join(map(str, SIZES)),
        aria_valuetext=_people_at(position),
        aria_describedby="why",
    )
    scale = tag("ol", [tag("li", _tick(size)) for size in SIZES[least:]], class_="scale", aria_hidden="true")
    return tag("div", slider, scale, class_=f"slider from-{least}")


def _people_at(position: int) -> str:
    return "You alone" if SIZES[position] == 0 else f"{SIZES[position]:,} people"


def _tick(size: int) -> str:
    return f"{size:,}" if size else "You alone"


def _short(result: QueryResult) -> Markup:
    answer, half_width = result.answer, result.half_width
    best = best_campaign(answer.histogram, half_width, answer.counted)
    noise = answer.counted <= half_width or max(answer.histogram) <= half_width
    said = CAMPAIGNS[best] if best is not None else "noise" if noise else "too close to tell"
    return tag("span", said, class_="soft")


def _form(action: str, *content: Node) -> Markup:
    return tag("form", content, method="post", action=action)


def _button(name: str, *, busy: bool) -> Markup:
    """Return a button; while a question runs it is greyed, and what is going on says so."""
    return tag("p", tag("button", name, disabled=busy, aria_describedby="why" if busy else None), class_="actions")


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


async def _number(request: web.Request, name: str, allowed: range) -> int:
    """Return a number from a form, or refuse one that is not allowed."""
    text = str((await request.post()).get(name, ""))
    if not (text.isascii() and text.isdigit() and len(text) < 9 and int(text) in allowed):
        raise web.HTTPBadRequest(text=f"{name} must be a number from {allowed[0]} to {allowed[-1]}.\n")
    return int(text)

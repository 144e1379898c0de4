"""The advertiser's website: how many people buy, the query she may ask, and its answer beside a tracker's list.

The slider goes from you alone to a crowd; each question is put to the three helpers with fresh reports. An answer is
shown as one sentence, as a chart that `chart.js` draws, with the noise as a band around zero, and as a table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
from device.dashboard.markup import Markup, Node, notice, section, table, tag
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


def numbers_table(exact: Sequence[int], answer: Sequence[int], half_width: int) -> Markup:
    """Return what the chart shows as a table."""
    columns = ["Campaign", "Tracker", "Answer of the helpers", f"{CONFIDENCE:.0%} interval"]
    rows = [
        [label, f"{true:,}", signed(noisy), f"{signed(noisy - half_width)} to {signed(noisy + half_width)}"]
        for label, true, noisy in zip(CAMPAIGNS, exact, answer, strict=True)
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
        yours, busy = len(measurement.collecting.yours), bool(measurement.busy)
        position, least = self._position(answered, yours), 0 if yours or busy else 1
        main = self._frame.fill(
            "advertiser",
            people=_people_at(position),
            position=position,
            least=least,
            most=len(SIZES) - 1,
            sizes=",".join(map(str, SIZES)),
            scale=[tag("li", f"{size:,}" if size else "You alone") for size in SIZES[least:]],
            disabled=" disabled" if busy else "",
            ask=f"Ask the three helpers{' again' if answered else ''}",
            state=self._state(yours, busy),
            latest=self._latest(answered),
            tracked=self._tracked(),
            so_far=self._so_far(answered),
        )
        return self._frame.show("Which ads sold shoes?", main, scripts=("story.js", "chart.js"), refresh=busy)

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
        answer, yours, half_width = result.answer, len(batch.yours), result.half_width
        exact = exact_histogram(list(batch.credited.values()))
        return self._frame.fill(
            "answer",
            verdict=one_line(CAMPAIGNS, answer.histogram, half_width, answer.counted),
            labels="|".join(CAMPAIGNS),
            exact=_listed(exact),
            answer=_listed(answer.histogram),
            half_width=half_width,
            confidence=f"{CONFIDENCE:.0%}",
            table=numbers_table(exact, answer.histogram, half_width),
            counted=plural(answer.counted, "report"),
            noise_sd=f"{result.noise_sd:.1f}",
            whose=("your purchase" if yours == 1 else "your purchases") if yours else "any one person",
            most=yours or 1,
            bias=verdict_line(result),
        )

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
                _small_chart(result),
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
        return listing if rows else tag("p", "Nothing yet: you have not clicked or bought anything.", class_="empty")


_NONE = "Nothing has been asked yet. The answer will stand here."


def _people_at(position: int) -> str:
    return "You alone" if SIZES[position] == 0 else f"{SIZES[position]:,} people"


def _listed(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))


def _small_chart(result: QueryResult) -> Markup:
    answer, half_width = _listed(result.answer.histogram), result.half_width
    size = "0 0 100 52"
    return tag(
        "svg", viewBox=size, class_="small-chart", aria_hidden="true", data_answer=answer, data_half_width=half_width
    )


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

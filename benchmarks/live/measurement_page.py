"""The advertiser's page: what she has, what she may ask, and what comes back."""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web

from benchmarks.live.chart import histogram_chart
from benchmarks.live.crowd import MAX_PEOPLE
from benchmarks.live.measurement import Batch, Measurement
from benchmarks.live.outlook import CROWD, CrowdOutlook, chosen, outlook_section
from benchmarks.live.places import CAMPAIGNS, CUTOFF, Map, Place
from benchmarks.live.tracker import Tracker, exact_histogram
from benchmarks.live.verdict import one_line
from benchmarks.live.web import Frame, see_other
from device.dashboard.layout import notice, section, table
from device.dashboard.markup import Markup, Node, tag
from device.dashboard.words import Clockface, plural
from protocol.errors import TrefoilError
from protocol.querier.query_failed import QueryFailed
from protocol.querier.verdict import judge
from protocol.querier.worth import CONFIDENCE, QueryResult

SHOWN_SIGHTINGS = 30


class MeasurementPage:
    """Forms start jobs of `measurement`; the page shows what came of them."""

    def __init__(self, where: Map, measurement: Measurement, tracker: Tracker, clockface: Clockface) -> None:
        self._frame = Frame(Place.MEASUREMENT, where)
        self._measurement = measurement
        self._tracker = tracker
        self._clockface = clockface

    def app(self) -> web.Application:
        """The advertiser's website."""
        app = self._frame.app(scripts=True)
        app.router.add_get("/", self._show)
        app.router.add_get("/outlook", self._outlook)
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

    async def _outlook(self, request: web.Request) -> web.Response:
        """For the sliders' script: the picture alone."""
        return web.Response(text=_outlook_of(request).picture(), content_type="text/html")

    async def _show(self, request: web.Request) -> web.Response:
        measurement = self._measurement
        answered = [batch for batch in reversed(measurement.batches) if batch.outcome is not None]
        nothing = section("answer", "The answer", tag("p", _NONE, class_="empty"))
        beside = self._answered(answered[0]) if answered else nothing
        main = [
            tag("h1", "Which ads sold shoes?"),
            self._running() if measurement.busy else None,
            tag("div", self._collected(), beside, class_="asking"),
            outlook_section(_outlook_of(request)),
            [self._answered(batch) for batch in answered[1:]],
            section("about", "What happens here", tag("p", _INTRODUCTION), tag("p", _DROWNING)),
            self._tracked(),
        ]
        title, busy = "Which ads sold shoes?", bool(measurement.busy)
        return self._frame.show(title, main, scripts=("outlook.js",), refresh=busy)

    def _running(self) -> Markup:
        statuses = sorted(self._measurement.statuses.items())
        states = [f"helper {party + 1}: {status.state.value}" for party, status in statuses]
        return notice(f"{self._measurement.busy}… {'; '.join(states)}")

    def _collected(self) -> Markup:
        batch, busy = self._measurement.collecting, bool(self._measurement.busy)
        count = len(batch.credited)
        told = f"Batch {batch.number} holds {plural(count, 'sealed report')}, {len(batch.yours)} of them yours."
        people = [
            tag("label", "People", for_="people"),
            tag("input", type="number", id="people", name="people", value=CROWD, min=1, max=MAX_PEOPLE, required=True),
        ]
        crowd = tag("div", people), tag("button", "Let a crowd buy shoes too", disabled=busy)
        return section(
            "collected",
            "Reports collected",
            tag("p", told),
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
        told = (
            f"{plural(answer.counted, 'report')} counted. Each number carries noise with a standard deviation of "
            f"{result.noise_sd:.1f}; without {one} no number would differ by more than {yours or 1}."
        )
        exact = exact_histogram(list(batch.credited.values()))
        chart = histogram_chart(CAMPAIGNS, exact, answer.histogram, result.half_width, CONFIDENCE)
        sentence = tag("p", one_line(CAMPAIGNS, answer.histogram, result.half_width), class_="verdict")
        return [sentence, chart, tag("p", told), verdict_line(result)]

    def _replay(self, batch: Batch) -> Node:
        if isinstance(batch.replayed, TrefoilError):
            return [tag("p", "Asked again about the same reports:"), _refused(batch.replayed)]
        told = "Every answer has fresh noise, and the mean of many would have none. So a report counts once:"
        button = _button("Ask again with the same reports", disabled=bool(self._measurement.busy))
        return [tag("p", told), _form("/again", _batch_field(batch), button)]

    def _tracked(self) -> Markup:
        latest = list(reversed(self._tracker.sightings))[:SHOWN_SIGHTINGS]
        rows = [[self._clockface.moment(seen.time), f"You {seen.text}"] for seen in latest]
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


def _outlook_of(request: web.Request) -> CrowdOutlook:
    return chosen([request.query.get("people", ""), request.query.get("epsilon", "")])


def _form(action: str, *content: Node) -> Markup:
    return tag("form", content, method="post", action=action)


def _button(name: str, *, disabled: bool) -> Markup:
    return tag("p", tag("button", name, class_="primary", disabled=disabled), class_="actions")


def _batch_field(batch: Batch) -> Markup:
    return tag("input", type="hidden", name="batch", value=batch.number)


def _refused(error: TrefoilError) -> Markup:
    """The same sentence as on a terminal, and what each helper says for whoever opens it."""
    message = f"{str(error)[:1].upper()}{str(error)[1:]}".removesuffix(".")
    lines = error.details if isinstance(error, QueryFailed) else ()
    # What was counted before stays counted: there is nothing to try.
    final = isinstance(error, QueryFailed) and error.shortfall is not None and not error.shortfall.accepted
    details = tag("details", tag("summary", "What each helper says"), tag("ul", [tag("li", line) for line in lines]))
    return notice(
        [tag("p", f"{message}. {'' if final else error.hint}".rstrip()), details if lines else None], kind="warn"
    )


def verdict_line(result: QueryResult) -> Markup:
    """How much budgets may have left out, and whether the answer is good enough: the sentence of a terminal."""
    sentence = judge(result, CUTOFF).sentence()
    verdict = f"{sentence[:1].upper()}{sentence[1:]}"
    if result.bias is None:
        return tag("p", verdict)
    moved = f"at most {result.bias.bound:,.0f} in total, with probability {1 - result.bias.beta:.0%}"
    return tag("p", f"Weeks without budget have moved the answer by {moved}. {verdict}")


async def _number(request: web.Request, name: str, most: int) -> int:
    """A number from a form, from 1 to `most`."""
    text = str((await request.post()).get(name, ""))
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= most):
        raise web.HTTPBadRequest(text=f"{name} must be a number from 1 to {most}.\n")
    return int(text)

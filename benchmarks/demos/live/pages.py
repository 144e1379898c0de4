"""The start page, the two publishers and the shop of the demonstration; their HTML is in `templates`.

The websites show every call of the standard's API and every header of theirs as it happens. A click on an ad leads to
another page, so the demonstration's server carries the list of calls over; no site could do that with another's.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from aiohttp import web

from benchmarks.demos.live.web import (
    BUCKETS,
    EPSILON,
    KAPPA,
    SHOP_SITE,
    STEPS,
    Frame,
    Map,
    Place,
    Tracker,
    fill,
    see_other,
)
from device.dashboard.markup import Markup, table, tag
from protocol.collector.limits import ReportRefused
from protocol.collector.server import refusal_of


class Home:
    """Tells the story, and lets the person's browser into the dashboard of the demonstration's own device.

    Any user of this machine may request such a link: it shows only what was clicked in the demonstration.
    """

    def __init__(self, where: Map, invite: Callable[[], str]) -> None:
        self._frame = Frame(Place.HOME, where)
        self._where = where
        self._invite = invite

    def app(self) -> web.Application:
        app = self._frame.app()
        app.router.add_get("/", self._show)
        app.router.add_get("/dashboard", self._dashboard)
        return app

    async def _dashboard(self, _request: web.Request) -> web.Response:
        raise see_other(self._invite())

    async def _show(self, _request: web.Request) -> web.Response:
        steps = [tag("li", self._frame.link(step.place, step.name), f". {step.text}") for step in STEPS]
        rows = [[place.value, tag("code", self._where[place]), place.site or "", _ROLES[place]] for place in Place]
        addresses = table("Everything is on this machine", ["Place", "Address", "Plays the site", "What it is"], rows)
        return self._frame.show("Live demonstration", self._frame.fill("home", steps=steps, addresses=addresses))


_ROLES = {
    Place.HOME: "this page",
    Place.NEWS: "a website with ads",
    Place.BLOG: "another website with ads",
    Place.SHOP: "where you buy, and where reports are collected",
    Place.MEASUREMENT: "asks the three helpers",
    Place.HELPERS: "looks over the shoulders of the three helpers",
    Place.DASHBOARD: "for your eyes only",
    Place.AGENT: "stands in for your browser's part; only the three websites may call it",
}


# How many calls are listed, and how long the text of one may be.
SHOWN_CALLS = 6
MAX_CALL = 1_000


@dataclass(frozen=True, slots=True)
class ApiCall:
    """One call of the standard's API by a script, or one of its headers, and what came of it."""

    site: str
    call: str
    outcome: str

    @classmethod
    def read(cls, site: str, body: str) -> ApiCall:
        """Return what a page says that it has called. It is shown to the person and used for nothing else."""
        try:
            fields = json.loads(body)
            call, outcome = fields["call"], fields["outcome"]
        except (ValueError, TypeError, KeyError):
            raise web.HTTPBadRequest(text="Send a call and its outcome.\n") from None
        if not (isinstance(call, str) and isinstance(outcome, str) and len(call) + len(outcome) <= MAX_CALL):
            raise web.HTTPBadRequest(text=f"A call and its outcome are texts of at most {MAX_CALL} characters.\n")
        return cls(site, call, outcome)


class ApiCalls:
    """The latest calls of all websites, latest first, and the panel that lists them."""

    def __init__(self) -> None:
        self._latest: deque[ApiCall] = deque(maxlen=SHOWN_CALLS)

    def add_route(self, app: web.Application, site: str) -> None:
        """Let the pages of `site` tell their calls."""

        async def note(request: web.Request) -> web.Response:
            self._latest.appendleft(ApiCall.read(site, await request.text()))
            return web.Response(status=204)

        app.router.add_post("/calls", note)

    def panel(self, site: str) -> Markup:
        """Return the panel, which `calls.js` extends as calls happen."""
        items = [tag("li", tag("b", each.site), tag("code", each.call), each.outcome) for each in self._latest]
        return fill("calls", site=site, most=SHOWN_CALLS, items=items, hidden=" hidden" if items else "")


# Takes a posted report and the credited campaign if it is new; returns its digest.
Collect = Callable[[bytes, Callable[[], int | None]], Awaitable[bytes]]
Clock = Callable[[], int]


ADS = {Place.NEWS: (0, 1), Place.BLOG: (2, 3)}


class Publisher:
    """A page with an article and two ads. A click is remembered by the device, and a tracker is told for comparison.

    The news calls `saveImpression` in a script; the blog's server answers with a Save-Impression header.
    """

    def __init__(self, place: Place, where: Map, tracker: Tracker, clock: Clock, calls: ApiCalls) -> None:
        self._frame = Frame(place, where)
        self._site = place.site or ""
        self._calls = calls
        self._tracker = tracker
        self._clock = clock

    def app(self) -> web.Application:
        app = self._frame.app(scripts=True, talks_to_agent=True)
        app.router.add_get("/", self._show)
        app.router.add_post("/clicked", self._clicked)
        self._calls.add_route(app, self._site)
        return app

    async def _show(self, _request: web.Request) -> web.Response:
        place, calls = self._frame.place, self._calls.panel(self._site)
        main = self._frame.fill(place.name.lower(), trail=fill("trail"), city=fill("city"), calls=calls)
        return self._frame.show(place.value, main, scripts=("attribution.js", "calls.js", "publisher.js"))

    async def _clicked(self, request: web.Request) -> web.Response:
        campaign_text = await request.text()
        if campaign_text not in {str(campaign) for campaign in ADS[self._frame.place]}:
            raise web.HTTPBadRequest(text="There is no such ad here.\n")
        self._tracker.clicked(int(campaign_text), self._site, self._clock())
        header = f'histogram-index={campaign_text}, conversion-sites=("{SHOP_SITE}")'
        return web.Response(status=204, headers={"Save-Impression": header} if self._frame.place is Place.BLOG else {})


class Shop:
    """Sells one pair of shoes, and keeps the sealed reports that purchases leave behind."""

    def __init__(self, where: Map, tracker: Tracker, clock: Clock, calls: ApiCalls, collect: Collect) -> None:
        self._frame = Frame(Place.SHOP, where)
        self._calls = calls
        self._tracker = tracker
        self._clock = clock
        self._collect = collect

    def app(self) -> web.Application:
        app = self._frame.app(scripts=True, talks_to_agent=True)
        app.router.add_get("/", self._show)
        app.router.add_post("/reports", self._take_report)
        self._calls.add_route(app, SHOP_SITE)
        return app

    async def _show(self, _request: web.Request) -> web.Response:
        calls = self._calls.panel(SHOP_SITE)
        main = self._frame.fill("shop", buckets=BUCKETS, epsilon=str(EPSILON), kappa=KAPPA, calls=calls)
        return self._frame.show("Shoes", main, scripts=("attribution.js", "calls.js", "shop.js"))

    async def _take_report(self, request: web.Request) -> web.Response:
        """Store a posted report. Respond with its digest once it is durable, or with the reason for a refusal."""
        try:
            digest = await self._collect(await request.read(), lambda: self._tracker.bought(SHOP_SITE, self._clock()))
        except ReportRefused as error:
            return refusal_of(error)
        return web.json_response({"digest": digest.hex()}, status=201)

"""The start page, the two publishers and the shop of the demonstration, with their pictures.

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
    CAMPAIGNS,
    EPSILON,
    KAPPA,
    SHOP_SITE,
    STEPS,
    Frame,
    Map,
    Place,
    Tracker,
    see_other,
)
from device.dashboard.markup import Markup, Node, notice, section, table, tag
from protocol.collector.limits import ReportRefused
from protocol.collector.server import refusal_of

_TRAIL = "M14 62c6-2 12-18 14-32 12 7 22 7 30 3 6 12 20 20 44 23 14 2 20 7 20 15v4H14z"
_CITY = "M14 66c2-10 6-20 10-26 14 8 26 6 36 0 8 12 22 18 42 20 12 1 20 4 20 12v2H14z"


def ad_picture(campaign: int) -> Markup:
    """Draw an ad: even campaigns sell shoes for the trail, odd ones for the city."""
    trail = campaign % 2 == 0
    scene = _hills() if trail else _buildings()
    shapes = [tag("rect", width="136", height="96", class_="sky"), scene, _trail() if trail else _city()]
    return tag("svg", shapes, viewBox="0 0 136 96", class_="picture", aria_hidden="true")


def shoe() -> Markup:
    """Draw the shoe in the shop."""
    return tag("svg", _trail(), viewBox="6 22 124 64", class_="shoe", role="img", aria_label="Drawing of a shoe")


def _trail() -> Markup:
    teeth = "M16 75h110v5l-6 4-7-4-7 4-7-4-7 4-7-4-7 4-7-4-7 4-7-4-7 4-7-4-7 4-7-4-7 4-5-4z"
    laces = tag("path", d="M60 37l-9 8M68 43l-9 8M77 48l-8 8", class_="laces")
    return tag("g", tag("path", d=_TRAIL, class_="upper"), tag("path", d=teeth, class_="sole"), laces)


def _city() -> Markup:
    stripe = tag("path", d="M40 72l8-20M50 72l8-18", class_="laces")
    sole = tag("rect", x="12", y="73", width="112", height="7", rx="3.5", class_="sole")
    return tag("g", tag("path", d=_CITY, class_="upper"), sole, stripe)


def _hills() -> Markup:
    far = tag("path", d="M0 52l26-24 20 18 30-32 32 30 28-18v44H0z", class_="far")
    near = tag("path", d="M0 70c30-14 60-12 84-4s38 4 52-2v32H0z", class_="near")
    return tag("g", tag("circle", cx="112", cy="18", r="8", class_="sun"), far, near)


def _buildings() -> Markup:
    far = tag("path", d="M0 96V40h18V24h20v26h14V18h22v34h16V32h20v20h26v44z", class_="far")
    windows = tag("path", d="M23 30h4m5 0h4M58 24h4m6 0h4M96 38h4m5 0h4M58 34h4m6 0h4", class_="windows")
    return tag("g", far, windows, tag("rect", y="80", width="136", height="16", class_="near"))


class Home:
    """Tells the story, and lets the person's browser into the dashboard of the demonstration's own device.

    Any user of this machine may request such a link: it shows only what was clicked in the demonstration.
    """

    def __init__(self, where: Map, invite: Callable[[], str]) -> None:
        self._frame = Frame(Place.HOME, where)
        self._where = where
        self._invite = invite

    def app(self) -> web.Application:
        """Return the start page's application."""
        app = self._frame.app()
        app.router.add_get("/", self._show)
        app.router.add_get("/dashboard", self._dashboard)
        return app

    async def _dashboard(self, _request: web.Request) -> web.Response:
        raise see_other(self._invite())

    async def _show(self, _request: web.Request) -> web.Response:
        picture = tag("img", src="/static/roles.svg", alt=_PICTURE, class_="roles", width=440, height=378)
        main = [
            tag("h1", "Advertising, measured without watching anyone"),
            tag("p", _INTRODUCTION, class_="lead"),
            picture,
            section("steps", "One story, five steps", tag("ol", self._steps(), class_="steps")),
            section("more", "And then", tag("ul", [tag("li", each) for each in self._more()], class_="steps")),
            self._addresses(),
        ]
        return self._frame.show("Live demonstration", main)

    def _steps(self) -> list[Markup]:
        return [tag("li", self._frame.link(step.place, step.name), f". {step.text}") for step in STEPS]

    def _more(self) -> list[Node]:
        link = self._frame.link
        return [
            "As the advertiser, ask about the same reports once more. The helpers refuse: a report counts once.",
            [
                "Click an ad on ",
                link(Place.BLOG, "the blog"),
                ", which uses a response header in place of a script, and buy shoes five times. Your budget runs out; "
                "the shop is not told.",
            ],
            ["Open your browser's console on the news, the blog or the shop: ", tag("code", TRY), "."],
            "On your dashboard, clear a site, clear your history, or switch measurement off.",
        ]

    def _addresses(self) -> Markup:
        rows = [[place.value, tag("code", self._where[place]), place.site or "", _ROLES[place]] for place in Place]
        columns = ["Place", "Address", "Plays the site", "What it is"]
        return section("addresses", "What is running", table("Everything is on this machine", columns, rows))


_PICTURE = (
    "A person's device makes sealed reports for a shop; the shop hands batches of them to three helpers; the three "
    "helpers give the advertiser one noisy histogram."
)
_INTRODUCTION = (
    "Everything here runs on your machine: two websites with ads, a shop, three helpers, and a device that keeps your "
    "privacy budget. Click through it once as a person and once as the advertiser."
)
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


TRY = "await navigator.attribution.saveImpression({ histogramIndex: 1 })"
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
        listing = tag(
            "ol", items, id="calls", class_="calls", data_site=site, data_most=SHOWN_CALLS, aria_live="polite"
        )
        hint = tag("p", "Open this browser's console and call it yourself: ", tag("code", TRY), class_="soft small")
        nothing = tag("p", "Nothing yet.", class_="empty", id="no-calls", hidden=bool(items))
        return section("asked", "What the pages asked your browser", nothing, listing, hint)


# Takes a posted report and the credited campaign if it is new; returns its digest.
Collect = Callable[[bytes, Callable[[], int | None]], Awaitable[bytes]]
Clock = Callable[[], int]


@dataclass(frozen=True, slots=True)
class Article:
    """The text of a publisher's page."""

    title: str
    lines: tuple[str, ...]


ARTICLES = {
    Place.NEWS: Article(
        "Footpath along the river reopens",
        (
            "After two winters of repairs the path between the mill and the old bridge is open again. The town asks "
            "walkers to mind the nesting birds.",
            "“People have missed it,” says the warden, who counts visitors by hand and writes down no names.",
        ),
    ),
    Place.BLOG: Article(
        "Forty kilometres with the wrong socks",
        (
            "I knew by the second hour. By the fourth I had stopped looking at the view. Here is what I would pack "
            "differently, and why none of it is the tent.",
            "Comments are closed, as ever. Write me a letter.",
        ),
    ),
}
ADS = {Place.NEWS: (0, 1), Place.BLOG: (2, 3)}
_PITCH = (
    "Grip for wet stone.",
    "Quiet soles for loud streets.",
    "Made for the second day.",
    "From platform to office.",
)


class Publisher:
    """A page with an article and two ads. A click is remembered by the device, and a tracker is told for comparison.

    The news calls `saveImpression` in a script; the blog's server answers with a Save-Impression header.
    """

    def __init__(self, place: Place, where: Map, tracker: Tracker, clock: Clock, calls: ApiCalls) -> None:
        self._frame = Frame(place, where)
        self._where = where
        self._site = place.site or ""
        self._calls = calls
        self._tracker = tracker
        self._clock = clock

    def app(self) -> web.Application:
        """Return the application of the publisher's website."""
        app = self._frame.app(scripts=True, talks_to_agent=True)
        app.router.add_get("/", self._show)
        app.router.add_post("/clicked", self._clicked)
        self._calls.add_route(app, self._site)
        return app

    async def _show(self, _request: web.Request) -> web.Response:
        article = ARTICLES[self._frame.place]
        text = tag("article", tag("h1", article.title), [tag("p", line) for line in article.lines], class_="story")
        ads = [self._ad(campaign) for campaign in ADS[self._frame.place]]
        beside = tag("aside", tag("h2", "Advertisements"), ads, aria_label="Advertisements")
        without = tag("noscript", notice("Without scripts the ads are plain links, and nothing is remembered."))
        main = [without, tag("div", text, beside, class_="columns"), self._calls.panel(self._site)]
        return self._frame.show(article.title, main, scripts=("attribution.js", "calls.js", "publisher.js"))

    def _ad(self, campaign: int) -> Markup:
        name = CAMPAIGNS[campaign].partition(",")[0]
        words = [tag("strong", name), tag("span", _PITCH[campaign]), tag("span", f"at {SHOP_SITE}", class_="soft")]
        content = [ad_picture(campaign), tag("span", words, class_="words")]
        address = f"{self._where[Place.SHOP]}/"
        form = "header" if self._frame.place is Place.BLOG else "script"
        return tag("a", content, href=address, class_="ad", data_campaign=campaign, data_shop=SHOP_SITE, data_form=form)

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
        """Return the application of the shop's website."""
        app = self._frame.app(scripts=True, talks_to_agent=True)
        app.router.add_get("/", self._show)
        app.router.add_post("/reports", self._take_report)
        self._calls.add_route(app, SHOP_SITE)
        return app

    async def _show(self, _request: web.Request) -> web.Response:
        lead = tag("p", "A pair of shoes. One size fits nobody in particular.", class_="lead")
        without = tag("noscript", notice("Without scripts you can look at the shoes, but not buy them."))
        sale = [tag("h1", "Shoes"), without, lead, shoe(), self._form(), self._thanks(), _failure()]
        scripts = ("attribution.js", "calls.js", "shop.js")
        return self._frame.show("Shoes", [sale, self._calls.panel(SHOP_SITE)], scripts=scripts)

    def _form(self) -> Markup:
        button = tag("button", "Buy the shoes", class_="primary")
        content = tag("p", button, class_="actions")
        return tag("form", content, id="buy", data_buckets=BUCKETS, data_epsilon=str(EPSILON), data_kappa=KAPPA)

    def _thanks(self) -> Markup:
        """Return what is shown after a purchase: the same words in every case, as the shop cannot know the report."""
        content: list[Node] = [
            tag("h2", "Thank you"),
            tag(
                "p",
                "Your device handed this page a report of ",
                tag("span", id="size"),
                " bytes. It ends like this, and is all the shop gets:",
            ),
            tag("p", id="bytes", class_="bytes"),
            tag(
                "p",
                "It may say which ad you had clicked, or nothing at all. The shop cannot tell. You can: ",
                self._frame.link(Place.DASHBOARD, "look at your dashboard"),
                ". Then see ",
                self._frame.link(Place.MEASUREMENT, "what the advertiser learns"),
                ".",
            ),
        ]
        return tag("section", content, id="told", hidden=True, tabindex="-1", role="status", class_="panel")

    async def _take_report(self, request: web.Request) -> web.Response:
        """Store a posted report. Respond with its digest once it is durable, or with the reason for a refusal."""
        try:
            digest = await self._collect(await request.read(), lambda: self._tracker.bought(SHOP_SITE, self._clock()))
        except ReportRefused as error:
            return refusal_of(error)
        return web.json_response({"digest": digest.hex()}, status=201)


def _failure() -> Markup:
    """Return what is shown if the device does not respond: the purchase succeeds without a report."""
    message = "Your device did not answer, so there is no report. Is the demonstration still running?"
    return tag("p", message, id="failed", hidden=True, role="alert", class_="notice warn")

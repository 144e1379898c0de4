"""The websites of the demonstration: two that show ads, and the shop that wants to know which of them work."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from aiohttp import web

from benchmarks.live.drawings import ad_picture, shoe
from benchmarks.live.places import BUCKETS, CAMPAIGNS, EPSILON, KAPPA, SHOP_SITE, Map, Place
from benchmarks.live.tracker import Tracker
from benchmarks.live.web import Frame
from device.dashboard.layout import notice
from device.dashboard.markup import Markup, Node, tag
from protocol.collector.limits import NotTaken
from protocol.collector.server import refusal_of

# A posted report, and who would be credited if it is new; gives its digest.
Collect = Callable[[bytes, Callable[[], int | None]], Awaitable[bytes]]
Clock = Callable[[], int]


@dataclass(frozen=True, slots=True)
class Article:
    """What a publisher's page has to read."""

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

    def __init__(self, place: Place, where: Map, tracker: Tracker, clock: Clock) -> None:
        self._frame = Frame(place, where)
        self._where = where
        self._tracker = tracker
        self._clock = clock

    def app(self) -> web.Application:
        """The publisher's website."""
        app = self._frame.app(talks_to_agent=True)
        app.router.add_get("/", self._show)
        app.router.add_post("/clicked", self._clicked)
        return app

    async def _show(self, _request: web.Request) -> web.Response:
        article = ARTICLES[self._frame.place]
        text = tag("article", tag("h1", article.title), [tag("p", line) for line in article.lines], class_="story")
        ads = [self._ad(campaign) for campaign in ADS[self._frame.place]]
        beside = tag("aside", tag("h2", "Advertisements"), ads, aria_label="Advertisements")
        without = tag("noscript", notice("Without scripts the ads are plain links, and nothing is remembered."))
        main = [without, tag("div", text, beside, class_="columns")]
        return self._frame.show(article.title, main, scripts=("attribution.js", "publisher.js"))

    def _ad(self, campaign: int) -> Markup:
        name = CAMPAIGNS[campaign].partition(",")[0]
        words = [tag("strong", name), tag("span", _PITCH[campaign]), tag("span", f"at {SHOP_SITE}", class_="soft")]
        content = [ad_picture(campaign), tag("span", words, class_="words")]
        address = f"{self._where[Place.SHOP]}/"
        form = "header" if self._frame.place is Place.BLOG else "script"
        return tag("a", content, href=address, class_="ad", data_campaign=campaign, data_shop=SHOP_SITE, data_form=form)

    async def _clicked(self, request: web.Request) -> web.Response:
        told = await request.text()
        if told not in {str(campaign) for campaign in ADS[self._frame.place]}:
            raise web.HTTPBadRequest(text="There is no such ad here.\n")
        self._tracker.clicked(int(told), self._frame.place.site or "", self._clock())
        header = f'histogram-index={told}, conversion-sites=("{SHOP_SITE}")'
        return web.Response(status=204, headers={"Save-Impression": header} if self._frame.place is Place.BLOG else {})


class Shop:
    """Sells one pair of shoes, and keeps the sealed reports that purchases leave behind."""

    def __init__(self, where: Map, tracker: Tracker, clock: Clock, collect: Collect) -> None:
        self._frame = Frame(Place.SHOP, where)
        self._tracker = tracker
        self._clock = clock
        self._collect = collect

    def app(self) -> web.Application:
        """The shop's website."""
        app = self._frame.app(talks_to_agent=True)
        app.router.add_get("/", self._show)
        app.router.add_post("/reports", self._take_report)
        return app

    async def _show(self, _request: web.Request) -> web.Response:
        told = tag("p", "A pair of shoes. One size fits nobody in particular.", class_="lead")
        without = tag("noscript", notice("Without scripts you can look at the shoes, but not buy them."))
        main = [tag("h1", "Shoes"), without, told, shoe(), self._form(), self._thanks(), _failure()]
        return self._frame.show("Shoes", main, scripts=("attribution.js", "shop.js"))

    def _form(self) -> Markup:
        button = tag("button", "Buy the shoes", class_="primary")
        content = tag("p", button, class_="actions")
        return tag("form", content, id="buy", data_buckets=BUCKETS, data_epsilon=str(EPSILON), data_kappa=KAPPA)

    def _thanks(self) -> Markup:
        """Shown after a purchase. The same words whatever the device found: the shop has no way to know."""
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
        """The collector's answer: the digest of a report that is on disk, or why it was not taken."""
        try:
            digest = await self._collect(await request.read(), lambda: self._tracker.bought(SHOP_SITE, self._clock()))
        except NotTaken as error:
            return refusal_of(error)
        return web.json_response({"digest": digest.hex()}, status=201)


def _failure() -> Markup:
    """Shown when the device cannot be reached: the shoes are sold all the same."""
    told = "Your device did not answer, so there is no report. Is the demonstration still running?"
    return tag("p", told, id="failed", hidden=True, role="alert", class_="notice warn")

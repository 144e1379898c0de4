"""The start page: what to try, in which order, and what stands for what."""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web

from benchmarks.live.places import Map, Place
from benchmarks.live.web import Frame, see_other
from device.dashboard.layout import section, table
from device.dashboard.markup import Markup, Node, tag


class Home:
    """Tells the story, and lets the person's browser into the dashboard of the demonstration's own device.

    Whoever uses this machine may ask for such a link: nothing but what was clicked in the demonstration is behind it.
    """

    def __init__(self, where: Map, invite: Callable[[], str]) -> None:
        self._frame = Frame(Place.HOME, where)
        self._where = where
        self._invite = invite

    def app(self) -> web.Application:
        """The start page's application."""
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
            section(
                "steps", "Try it in this order", tag("ol", [tag("li", step) for step in self._steps()], class_="steps")
            ),
            self._addresses(),
        ]
        return self._frame.show("Live demonstration", main)

    def _steps(self) -> list[Node]:
        link = self._frame.link
        return [
            ["Read ", link(Place.NEWS, "the news"), " and click an ad. Your device remembers it; nobody else does."],
            ["At ", link(Place.SHOP, "the shop"), ", buy the shoes. Your device hands over a report nobody can read."],
            [
                "Look at ",
                link(Place.DASHBOARD, "your dashboard"),
                ": what the purchase has cost you, and what is left.",
            ],
            ["As ", link(Place.MEASUREMENT, "the advertiser"), ", ask the helpers about it. Alone, you get noise."],
            "Buy another pair, let a crowd buy too, and ask again: now the campaigns stand out, and you do not.",
            "Ask about the same reports a second time. The helpers refuse.",
            ["See ", link(Place.HELPERS, "what each helper sees"), " of your report."],
            [
                "Click an ad on ",
                link(Place.BLOG, "the blog"),
                ", which uses a response header in place of a script, and buy shoes five times. Your budget runs out; "
                "the shop is not told.",
            ],
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

"""What all pages of the demonstration share: the guard, the frame, the way from one place to the next."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from aiohttp import web

from benchmarks.live.places import Map, Place
from device.dashboard.guard import MAX_BODY, content_policy, guarded
from device.dashboard.layout import STATIC, page
from device.dashboard.markup import Markup, Node, tag

_LIVE = Path(__file__).parent / "static"
ROLES = Path(__file__).parents[2] / "protocol" / "pictures" / "roles.svg"
_TYPES = {".css": "text/css", ".svg": "image/svg+xml", ".js": "text/javascript"}
_FILES = {path.name: path for path in (*STATIC.iterdir(), *_LIVE.iterdir(), ROLES)}

STEPS = (
    (Place.NEWS, "Click an ad"),
    (Place.SHOP, "Buy shoes"),
    (Place.DASHBOARD, "See what it cost you"),
    (Place.MEASUREMENT, "Ask as the advertiser"),
    (Place.HELPERS, "Look at the helpers"),
)
_STEP_OF = {Place.BLOG: Place.NEWS}


class Frame:
    """The outside of every page at one place, and the application that serves it."""

    def __init__(self, place: Place, where: Map) -> None:
        self.place = place
        self._where = where

    def app(self, *, talks_to_agent: bool = False, scripts: bool = False) -> web.Application:
        """An application behind the guard. Pages of websites may reach the agent and show what it says in a frame;
        other pages with `scripts` may ask their own server.
        """
        more: Mapping[str, str] = {}
        if talks_to_agent:
            agent = self._where[Place.AGENT]
            more = {"script-src": "'self'", "connect-src": f"'self' {agent}", "frame-src": agent}
        elif scripts:
            more = {"script-src": "'self'", "connect-src": "'self'"}
        guard = guarded(self._where[self.place], policy=content_policy(more))
        app = web.Application(middlewares=[guard], client_max_size=MAX_BODY)
        app.router.add_get("/static/{name}", _static_file)
        return app

    def show(self, title: str, main: Node, *, scripts: tuple[str, ...] = (), refresh: bool = False) -> web.Response:
        """A page. `scripts` are names of static files; `refresh` loads it again in a second, without any script."""
        head = [
            tag("link", rel="stylesheet", href="/static/live.css"),
            tag("meta", http_equiv="refresh", content="1") if refresh else None,
            tag("meta", name="trefoil-agent", content=self._where[Place.AGENT]) if scripts else None,
            [tag("script", src=f"/static/{name}", defer=True) for name in scripts],
        ]
        shown = page(
            title,
            [self._banner(), main],
            links=self._links(),
            links_label="Places",
            current=self.place.value,
            below=self.steps_bar(),
            root="/",
            head=head,
        )
        return web.Response(text=shown, content_type="text/html")

    def steps_bar(self) -> Markup:
        """The story in five steps, with the one that is open."""
        here = _STEP_OF.get(self.place, self.place)
        items = [
            tag(
                "li",
                self.link(place, name, current="step" if place is here else None),
                class_="here" if place is here else None,
            )
            for place, name in STEPS
        ]
        return tag("nav", tag("ol", items), class_="steps-bar", aria_label="Steps")

    def device_strip(self) -> Markup:
        """What your device says, in a frame of its own origin: this page cannot read it."""
        address = f"{self._where[Place.AGENT]}/says"
        return tag("iframe", src=address, title="Your device says", class_="device-says", id="device-says")

    def _links(self) -> list[tuple[str, str]]:
        links = [(place.value, f"{self._where[place]}/") for place in Place if place is not Place.AGENT]
        # The dashboard lets in who comes with a fresh link, and the start page hands those out.
        return [(name, self.dashboard_link() if name == Place.DASHBOARD.value else address) for name, address in links]

    def dashboard_link(self) -> str:
        """Where a fresh start URL of the dashboard is to be had."""
        return f"{self._where[Place.HOME]}/dashboard"

    def link(self, place: Place, text: str, *, current: str | None = None) -> Markup:
        """A link to another place; `current` says in which sense it is open already."""
        address = self.dashboard_link() if place is Place.DASHBOARD else f"{self._where[place]}/"
        return tag("a", text, href=address, aria_current=current)

    def _banner(self) -> Node:
        if self.place.site is None:
            return None
        told = f"This page plays {self.place.site}; its real address is {self._where[self.place]}."
        return [tag("p", told, class_="plays"), self.device_strip()]


async def _static_file(request: web.Request) -> web.Response:
    path = _FILES.get(request.match_info["name"])
    if path is None:
        raise web.HTTPNotFound(text="There is no such file.\n")
    return web.Response(body=path.read_bytes(), content_type=_TYPES[path.suffix], charset="utf-8")


def see_other(address: str = "/") -> web.HTTPSeeOther:
    """After a form: go and look."""
    return web.HTTPSeeOther(address)

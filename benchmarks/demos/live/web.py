"""What all pages of the demonstration share: origins, the frame of a page, the guard, and a tracker to compare with.

Ports of this machine are origins, which a browser keeps apart. Devices count in sites, and this machine is none, so the
agent maps each origin to the made-up site that it plays. The tracker sees every click and purchase with the person's
name and counts exactly; nothing of Trefoil uses it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from socket import socket
from string import Template
from typing import NamedTuple

from aiohttp import web

from device.browser.install import EXTENSION
from device.dashboard.markup import STATIC, Markup, Node, join, page, tag
from device.dashboard.security import MAX_BODY, bind_loopback, content_security_policy, origin_of, security_middleware

SHOP_SITE = "shoes.example"
CAMPAIGNS = (
    "Trail shoes, in the news",
    "City shoes, in the news",
    "Trail shoes, on the blog",
    "City shoes, on the blog",
)
BUCKETS = len(CAMPAIGNS)
# With the bias side query a purchase costs the week of the ad 0.2·(2 + κ)/2 = 0.3 of its budget, and every other week
# of the window 0.1: the fourth purchase finds nothing left, and its report says so to the side query.
EPSILON = 0.2
KAPPA = 1
# The relative error that the advertiser accepts.
CUTOFF = 0.1


class Place(Enum):
    """Everything that has an address of its own. The order is the order of ports."""

    HOME = "Start"
    NEWS = "News"
    BLOG = "Blog"
    SHOP = "Shop"
    MEASUREMENT = "Advertiser"
    HELPERS = "Helpers"
    DASHBOARD = "Your dashboard"
    AGENT = "Your device"

    @property
    def site(self) -> str | None:
        """The site whose pages live here, as the device takes it; None for what is no website."""
        return _SITES.get(self)


_SITES = {Place.NEWS: "news.example", Place.BLOG: "blog.example", Place.SHOP: SHOP_SITE}


class Map(dict[Place, str]):
    """The origin of every place."""

    def sites(self) -> dict[str, str]:
        return {self[place]: place.site for place in Place if place.site is not None}


@contextlib.contextmanager
def ports_taken(first: int) -> Iterator[tuple[Map, dict[Place, socket]]]:
    """Bind a socket for every place, on consecutive ports from `first`, or on any free ports if it is 0."""
    with contextlib.ExitStack() as held:
        sockets = {
            place: held.enter_context(bind_loopback(first + offset if first else 0))
            for offset, place in enumerate(Place)
        }
        yield Map({place: origin_of(bound) for place, bound in sockets.items()}), sockets


@dataclass(frozen=True, slots=True)
class Sighting:
    """One thing a person did, as a tracker would file it."""

    time: int
    text: str


@dataclass(slots=True)
class Tracker:
    """Follows you through all pages, and the crowd too."""

    sightings: list[Sighting] = field(default_factory=list)
    _last_click: int | None = None

    def clicked(self, campaign: int, site: str, time: int) -> None:
        self._last_click = campaign
        self.sightings.append(Sighting(time, f"clicked “{CAMPAIGNS[campaign]}” on {site}"))

    def bought(self, site: str, time: int) -> int | None:
        """Record a purchase, and return the credited campaign, if any."""
        credit = self._last_click
        because = "no ad before it" if credit is None else f"because of “{CAMPAIGNS[credit]}”"
        self.sightings.append(Sighting(time, f"bought shoes on {site}, {because}"))
        return credit


def exact_histogram(credited: Sequence[int | None]) -> list[int]:
    """Return what a tracker counts: exact numbers, by person."""
    return [sum(credit == campaign for credit in credited) for campaign in range(BUCKETS)]


_LIVE = Path(__file__).parent / "static"
ROLES = Path(__file__).parents[3] / "protocol" / "pictures" / "roles.svg"
_TYPES = {".css": "text/css", ".svg": "image/svg+xml", ".js": "text/javascript"}
# The object in the page is the extension's own; `loopback.js` brings its calls to the agent of the demonstration.
_FILES = {path.name: path for path in (*STATIC.iterdir(), *_LIVE.iterdir(), ROLES, EXTENSION / "attribution.js")}


class Step(NamedTuple):
    """One step of the guided story."""

    place: Place
    name: str
    text: str


STEPS = (
    Step(Place.NEWS, "Click an ad", "Your device remembers it. Nobody else does."),
    Step(Place.SHOP, "Buy shoes", "Your device hands the shop a report that nobody can read."),
    Step(Place.DASHBOARD, "See what it cost you", "Your device counts what a purchase may reveal, week by week."),
    Step(
        Place.MEASUREMENT,
        "Ask as the advertiser",
        "Ask about yourself alone and get noise. Then pull the slider: campaigns rise out of it, and you stay hidden.",
    ),
    Step(Place.HELPERS, "Look at the helpers", "See what each of the three holds of your report, and add it up."),
)
_STEP_OF = {Place.BLOG: Place.NEWS}


def fill(template: str, **values: Node) -> Markup:
    """Return a file of `templates` with its $names filled in: text is escaped, markup is not."""
    text = (_LIVE.parent / "templates" / f"{template}.html").read_text(encoding="utf-8")
    return Markup(Template(text).substitute({name: join(value) for name, value in values.items()}))


class Frame:
    """The outside of every page at one place, and the application that serves it."""

    def __init__(self, place: Place, where: Map) -> None:
        self.place = place
        self._where = where

    def app(self, *, scripts: bool = False, talks_to_agent: bool = False) -> web.Application:
        """Return an application behind the guard. Websites may reach the agent and show its words in a frame."""
        more: Mapping[str, str] = {"script-src": "'self'"} if scripts else {}
        if talks_to_agent:
            agent = self._where[Place.AGENT]
            more = {"script-src": "'self'", "connect-src": f"'self' {agent}", "frame-src": agent}
        guard = security_middleware(self._where[self.place], csp=content_security_policy(more))
        app = web.Application(middlewares=[guard], client_max_size=MAX_BODY)
        app.router.add_get("/static/{name}", _static_file)
        return app

    def fill(self, template: str, **values: Node) -> Markup:
        """Return a template that also may name the address of every place, and a fresh link to the dashboard."""
        addresses = {place.name.lower(): self._where[place] for place in Place}
        return fill(template, **addresses | {"dashboard": self.dashboard_link()} | values)

    def show(self, title: str, main: Node, *, scripts: tuple[str, ...] = (), refresh: bool = False) -> web.Response:
        """Return a page. `scripts` are names of static files; `refresh` reloads it after a second, without a script."""
        if scripts:
            scripts = ("loopback.js", *scripts)
        head = [
            tag("link", rel="stylesheet", href="/static/live.css"),
            tag("meta", http_equiv="refresh", content="1") if refresh else None,
            tag("meta", name="trefoil-agent", content=self._where[Place.AGENT]) if scripts else None,
            [tag("script", src=f"/static/{name}", defer=True) for name in scripts],
        ]
        document = page(
            title,
            [self._banner(), main],
            links=self._links(),
            links_label="Places",
            current=self.place.value,
            below=self.steps_bar(),
            root="/",
            head=head,
        )
        return web.Response(text=document, content_type="text/html")

    def steps_bar(self) -> Markup:
        """Return the story in five steps: the current one marked and explained, with a link to the next."""
        here = _STEP_OF.get(self.place, self.place)
        items = [
            tag(
                "li",
                self.link(step.place, step.name, current="step" if step.place is here else None),
                class_="here" if step.place is here else None,
            )
            for step in STEPS
        ]
        number = next((number for number, step in enumerate(STEPS) if step.place is here), -1)
        guide: list[Node] = [tag("strong", f"{STEPS[number].name}. "), STEPS[number].text] if number >= 0 else []
        if number + 1 < len(STEPS):
            following = STEPS[number + 1]
            guide += [
                " ",
                self.link(following.place, f"{'Next' if guide else 'Begin'}: {following.name}", class_="next"),
            ]
        return tag("nav", tag("ol", items), tag("p", guide, class_="guide"), class_="steps-bar", aria_label="Steps")

    def device_strip(self) -> Markup:
        """Return the frame in which the device speaks. It has its own origin, so this page cannot read it."""
        address = f"{self._where[Place.AGENT]}/says"
        return tag("iframe", src=address, title="Your device says", class_="device-says", id="device-says")

    def _links(self) -> list[tuple[str, str]]:
        links = [(place.value, f"{self._where[place]}/") for place in Place if place is not Place.AGENT]
        # The dashboard lets in who comes with a fresh link, and the start page has one.
        return [(name, self.dashboard_link() if name == Place.DASHBOARD.value else address) for name, address in links]

    def dashboard_link(self) -> str:
        """Return the link to a fresh start URL of the dashboard."""
        return f"{self._where[Place.HOME]}/dashboard"

    def link(self, place: Place, text: str, *, current: str | None = None, class_: str | None = None) -> Markup:
        """Return a link to another place; `current` is its `aria-current` value if it is open already."""
        address = self.dashboard_link() if place is Place.DASHBOARD else f"{self._where[place]}/"
        return tag("a", text, href=address, aria_current=current, class_=class_)

    def _banner(self) -> Node:
        if self.place.site is None:
            return None
        paragraph = f"This page plays {self.place.site}; its real address is {self._where[self.place]}."
        return [tag("p", paragraph, class_="plays"), self.device_strip()]


async def _static_file(request: web.Request) -> web.Response:
    path = _FILES.get(request.match_info["name"])
    if path is None:
        raise web.HTTPNotFound(text="There is no such file.\n")
    return web.Response(body=path.read_bytes(), content_type=_TYPES[path.suffix], charset="utf-8")


def see_other(address: str = "/") -> web.HTTPSeeOther:
    """Redirect to the page after a form was posted."""
    return web.HTTPSeeOther(address)

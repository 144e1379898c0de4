"""The device agent: one person's device, called from the websites by the standard's two calls and one of its headers.

It stands in for the browser. A page states its request, never its identity: that is the browser's Origin header, and an
unknown origin is rejected. It has no tabs, so no user activation is required. Calls wait for answers in the agent's
own threads, so that other work of the program cannot delay when one leaves.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from aiohttp import web

from benchmarks.demos.live.web import CAMPAIGNS
from device.agent import Report, system_clock
from device.browser.host import sealed_bytes
from device.conversion import ConversionOptions
from device.dashboard.formatting import plural
from device.dashboard.markup import bare_page, tag
from device.dashboard.security import MAX_BODY, content_security_policy, security_middleware
from device.dashboard.server import static_file
from device.device import Device
from device.errors import StandardError
from device.events import ImpressionOptions
from device.overview import Overview
from device.web.browser import Browser, Page
from device.web.dictionaries import WrongType, read_options
from device.web.http_headers import parse_save_impression
from protocol.errors import TrefoilError

# Calls that are in their turns at the same time, and calls that may wait for that.
THREADS = 32
MOST_WAITING = 200
T = TypeVar("T")
Call = Callable[[str, object], Awaitable[dict[str, object]]]


class Agent:
    """Serves `device` at `origin` to the pages of `sites`, which maps their origins to the sites they stand for."""

    def __init__(self, device: Device[Report], origin: str, sites: Mapping[str, str]) -> None:
        self._device = device
        self._browser = Browser(device, system_clock)
        self._origin = origin
        self._sites = sites
        self._pages = {site: Page(f"https://{site}") for site in sites.values()}
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="agent")
        self._calls = 0

    def app(self) -> web.Application:
        """Return the application. The guard rejects requests of other origins before their bodies are read."""
        guard = security_middleware(self._origin, allowed_origins=frozenset(self._sites))
        app = web.Application(middlewares=[guard], client_max_size=MAX_BODY)
        calls = {"saveImpression": self._save, "measureConversion": self._measure, "responseHeaders": self._headers}
        app.router.add_get("/says", self._says)
        app.router.add_get("/static/{name}", static_file)
        for name, call in calls.items():
            app.router.add_post(f"/{name}", self._handler(call))
            app.router.add_route("OPTIONS", f"/{name}", self._preflight)
        app.on_cleanup.append(self._close)
        return app

    async def _close(self, _: web.Application) -> None:
        await asyncio.to_thread(self._threads.shutdown, cancel_futures=True)

    async def _in_a_thread(self, call: Callable[..., T], *passed: object) -> T:
        """Run a call in one of the agent's threads; the number of waiting calls is bounded."""
        if self._calls - THREADS >= MOST_WAITING:
            raise web.HTTPServiceUnavailable(text="Refused. Too many calls are waiting.\n")
        self._calls += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, call, *passed)
        finally:
            self._calls -= 1

    def _handler(self, call: Call) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handle(request: web.Request) -> web.Response:
            origin, site = self._caller(request)
            try:
                answer = await call(site, await _dictionary(request))
            except StandardError as error:
                return _json(origin, {"error": error.name, "message": str(error)}, status=400)
            return _json(origin, answer)

        return handle

    async def _says(self, _request: web.Request) -> web.Response:
        """Serve the device's message to the person, in a frame on the websites, as a browser would show it."""
        overview = await asyncio.to_thread(self._device.overview)
        ancestors = " ".join(self._sites)
        headers = {"Content-Security-Policy": content_security_policy({"frame-ancestors": ancestors})}
        # Browsers heed the policy's word on framing before that of the older X-Frame-Options.
        return web.Response(text=says_page(overview), content_type="text/html", headers=headers)

    async def _preflight(self, request: web.Request) -> web.Response:
        """Answer the CORS preflight of a page of another origin."""
        origin, _ = self._caller(request)
        allowed = {"Access-Control-Allow-Methods": "POST", "Access-Control-Allow-Headers": "content-type"}
        return web.Response(status=204, headers={**_shared_with(origin), **allowed})

    def _caller(self, request: web.Request) -> tuple[str, str]:
        """Return the calling origin as the browser states it, never as the page does."""
        origin = request.headers.get("Origin", "")
        if origin not in self._sites:
            raise web.HTTPForbidden(text="Refused. This origin is no site that this device knows.\n")
        return origin, self._sites[origin]

    async def _save(self, site: str, passed: object) -> dict[str, object]:
        options = read_options(ImpressionOptions, passed)
        await self._in_a_thread(self._browser.save_impression, self._pages[site], options)
        return {}

    async def _measure(self, site: str, passed: object) -> dict[str, object]:
        options = read_options(ConversionOptions, passed)
        report = await self._in_a_thread(self._browser.measure_conversion, self._pages[site], options)
        return {"report": base64.b64encode(sealed_bytes(report)).decode()}

    async def _headers(self, site: str, passed: object) -> dict[str, object]:
        """Process the Save-Impression header of a response of `site`; no site here sends the standard's other one.

        A rejected header is ignored: no script could be told.
        """
        if not isinstance(passed, dict):
            raise WrongType("headers must be a dictionary")
        with contextlib.suppress(TrefoilError):
            if isinstance(header := passed.get("saveImpression"), str):
                await self._in_a_thread(self._browser.save_impression, self._pages[site], parse_save_impression(header))
        return {}


def says_page(overview: Overview) -> str:
    """Return a page of one line: the last ad that the device remembered, if any."""
    if not overview.enabled:
        said = "Measurement is off. I remember nothing, and no page can tell."
    elif not overview.impressions:
        said = "I have remembered no ad yet."
    else:
        last = overview.impressions[-1].impression
        name = CAMPAIGNS[last.histogram_index] if last.histogram_index < len(CAMPAIGNS) else "an ad"
        said = f"I have remembered this ad: “{name}”. No page is told."
    made = f" I have made {plural(len(overview.reports), 'report')}." if overview.reports else ""
    return bare_page("Your device", [tag("h1", "Your device: "), tag("p", said + made)])


async def _dictionary(request: web.Request) -> object:
    if request.content_type != "application/json":
        raise web.HTTPUnsupportedMediaType(text="Send JSON.\n")
    try:
        return json.loads(await request.read())
    except ValueError:
        raise WrongType("options must be a dictionary") from None


def _shared_with(origin: str) -> dict[str, str]:
    return {"Access-Control-Allow-Origin": origin, "Vary": "Origin"}


def _json(origin: str, answer: dict[str, object], status: int = 200) -> web.Response:
    return web.json_response(answer, status=status, headers=_shared_with(origin))

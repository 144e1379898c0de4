"""The device agent: one person's device, reached from the pages they visit by the standard's two calls.

It stands in for the browser. A page says what it wants and never who it is: the browser's own Origin header says that,
and an origin that is no site of the demonstration is refused.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Awaitable, Callable, Mapping

from aiohttp import web

from benchmarks.live.idl import WrongType, read_options
from device.agent import Report
from device.conversion import ConversionOptions
from device.dashboard.guard import MAX_BODY, guarded
from device.device import Device
from device.errors import DOMException, StandardError
from device.impression import ImpressionOptions
from protocol.report import SealedReport

Call = Callable[[str, object], Awaitable[dict[str, object]]]


class Agent:
    """Serves `device` at `origin` to the pages of `sites`, which maps their origins to the sites they stand for."""

    def __init__(self, device: Device[Report], origin: str, sites: Mapping[str, str]) -> None:
        self._device = device
        self._origin = origin
        self._sites = sites

    def app(self) -> web.Application:
        """The application. Requests of other origins end in the guard, before anything is read."""
        guard = guarded(self._origin, allowed=frozenset(self._sites))
        app = web.Application(middlewares=[guard], client_max_size=MAX_BODY)
        for name, call in {"saveImpression": self._save, "measureConversion": self._measure}.items():
            app.router.add_post(f"/{name}", self._handler(call))
            app.router.add_route("OPTIONS", f"/{name}", self._preflight)
        return app

    def _handler(self, call: Call) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handle(request: web.Request) -> web.Response:
            origin, site = self._caller(request)
            try:
                answer = await call(site, await _dictionary(request))
            except StandardError as error:
                return _json(origin, {"error": _name(error), "message": str(error)}, status=400)
            return _json(origin, answer)

        return handle

    async def _preflight(self, request: web.Request) -> web.Response:
        """What a browser asks before it lets a page of another origin send JSON here."""
        origin, _ = self._caller(request)
        allowed = {"Access-Control-Allow-Methods": "POST", "Access-Control-Allow-Headers": "content-type"}
        return web.Response(status=204, headers={**_shared_with(origin), **allowed})

    def _caller(self, request: web.Request) -> tuple[str, str]:
        """Who is asking, in the browser's words, never the page's."""
        origin = request.headers.get("Origin", "")
        if origin not in self._sites:
            raise web.HTTPForbidden(text="Refused. This origin is no site that this device knows.\n")
        return origin, self._sites[origin]

    async def _save(self, site: str, passed: object) -> dict[str, object]:
        options = read_options(ImpressionOptions, passed)
        await asyncio.to_thread(self._device.save_impression, site, options)
        return {}

    async def _measure(self, site: str, passed: object) -> dict[str, object]:
        options = read_options(ConversionOptions, passed)
        report = await asyncio.to_thread(self._device.measure_conversion, site, options)
        sealed = report if isinstance(report, SealedReport) else report.sealed
        return {"report": base64.b64encode(sealed.encode()).decode()}


async def _dictionary(request: web.Request) -> object:
    if request.content_type != "application/json":
        raise web.HTTPUnsupportedMediaType(text="Send JSON.\n")
    try:
        return json.loads(await request.read())
    except ValueError:
        raise WrongType("options must be a dictionary") from None


def _name(error: StandardError) -> str:
    return error.name if isinstance(error, DOMException) else str(error.standard_name)


def _shared_with(origin: str) -> dict[str, str]:
    return {"Access-Control-Allow-Origin": origin, "Vary": "Origin"}


def _json(origin: str, answer: dict[str, object], status: int = 200) -> web.Response:
    return web.json_response(answer, status=status, headers=_shared_with(origin))

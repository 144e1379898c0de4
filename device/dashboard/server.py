"""Serve the dashboard over HTTP to one browser on this machine.

A login URL with a single-use token sets the session cookie, which every other page requires.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import webbrowser
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from socket import socket
from typing import Any, TypeAlias, TypeVar
from urllib.parse import quote

from aiohttp import web

from device import agent
from device.dashboard.formatting import LocalTime
from device.dashboard.markup import STATIC, Link, Node, page, tag
from device.dashboard.pages import Action, dashboard_page, perform
from device.dashboard.security import MAX_BODY, Session, bind_loopback, origin_of, security_middleware
from device.device import Device
from device.errors import DatabaseUnavailable, StandardError
from protocol.cli.console import say, write_json
from protocol.cli.stopping import stop_event

AnyDevice: TypeAlias = Device[Any]
T = TypeVar("T")
# Do not wait for open connections: Ctrl-C should stop the command at once.
SHUTDOWN_SECONDS = 1.0
_TYPES = {".css": "text/css", ".svg": "image/svg+xml", ".js": "text/javascript"}
_FILES = {path.name: path for path in STATIC.iterdir()}


class Dashboard:
    """The dashboard of `device` at `origin` (http://127.0.0.1:port): `app` serves it, `login_url` lets a browser in."""

    def __init__(
        self,
        device: AnyDevice,
        origin: str,
        *,
        local_time: LocalTime | None = None,
        back_link: Link | None = None,
        below: Node = None,
    ) -> None:
        self._device = device
        self._origin = origin
        self._local_time = local_time or LocalTime()
        self._back_link = back_link
        self._below = below
        self._session = Session()

    def login_url(self) -> str:
        """Return a single-use URL that sets the session cookie in one browser."""
        return f"{self._origin}/open?token={quote(self._session.new_login_token())}"

    def app(self) -> web.Application:
        app = web.Application(middlewares=[security_middleware(self._origin)], client_max_size=MAX_BODY)
        base = self._session.path
        app.router.add_get("/open", self._log_in)
        app.router.add_get("/static/{name}", static_file)
        app.router.add_get(f"{base}/static/{{name}}", static_file)
        app.router.add_get(f"{base}/{{action:[^/]*}}", self._show)
        app.router.add_post(f"{base}/{{action:[^/]*}}", self._perform)
        app.router.add_get("/{rest:.*}", self._without_login)
        return app

    async def _log_in(self, request: web.Request) -> web.Response:
        """Redeem the login token and set the cookie.

        Continue by a refresh in the page, not by a redirect: after a redirect that began outside this origin the
        browser would withhold a SameSite=Strict cookie.
        """
        if not self._session.redeem(request.query.get("token", "")):
            return _forbidden("This link has been used, or is not ours. Start the dashboard again for a new one.")
        onward = f"{self._session.path}/"
        text = tag("p", "Opening. ", tag("a", "Go on to the dashboard", href=onward))
        refresh = tag("meta", http_equiv="refresh", content=f"0; url={onward}")
        response = _html(page("Opening", [tag("h1", "Your privacy dashboard"), text], head=refresh, root="/"))
        self._session.set_cookie(response)
        return response

    async def _show(self, request: web.Request) -> web.Response:
        self._require_cookie(request)
        wanted = functools.partial(
            dashboard_page,
            self._device,
            _action(request),
            request.query,
            self._local_time,
            csrf_token=self._session.csrf_token,
            back_link=self._back_link,
            below=self._below,
        )
        return _html(await _in_thread(wanted))

    async def _perform(self, request: web.Request) -> web.Response:
        self._require_cookie(request)
        action = _action(request)
        form = await request.post()
        if not self._session.csrf_token_matches(form.get("token")):
            raise web.HTTPForbidden(text="Refused. This form is not one of this page's.\n")
        if action is None:
            raise web.HTTPMethodNotAllowed("POST", ["GET"])
        onward = await _in_thread(functools.partial(perform, self._device, action, form))
        raise web.HTTPSeeOther(f"{self._session.path}/{onward}")

    async def _without_login(self, _request: web.Request) -> web.Response:
        return _forbidden("Open the dashboard with the link that the command has printed.")

    def _require_cookie(self, request: web.Request) -> None:
        if not self._session.is_authenticated(request):
            raise web.HTTPForbidden(text="Refused. Open the dashboard with the link that the command has printed.\n")


async def static_file(request: web.Request) -> web.Response:
    """Return a style sheet or image. Needs no cookie, as none of them is private."""
    path = _FILES.get(request.match_info["name"])
    if path is None:
        raise web.HTTPNotFound(text="There is no such file.\n")
    return web.Response(body=path.read_bytes(), content_type=_TYPES[path.suffix], charset="utf-8")


async def _in_thread(call: Callable[[], T]) -> T:
    """Call the device without blocking the event loop; answer 503 if its database is locked, 400 if a site is none."""
    try:
        return await asyncio.to_thread(call)
    except StandardError:
        raise web.HTTPBadRequest(text="This is not the name of a site.\n") from None
    except DatabaseUnavailable:
        raise web.HTTPServiceUnavailable(
            text="The device's database is busy. Reload this page in a moment.\n"
        ) from None


def _action(request: web.Request) -> Action | None:
    """Return the action that an address names; the overview's names none."""
    name = request.match_info["action"]
    try:
        return Action(name) if name else None
    except ValueError:
        raise web.HTTPNotFound(text="There is no such page.\n") from None


def _html(text: str, status: int = 200) -> web.Response:
    return web.Response(text=text, status=status, content_type="text/html")


def _forbidden(why: str) -> web.Response:
    return _html(page("Refused", [tag("h1", "Nothing to see here"), tag("p", why)], root="/"), status=403)


@contextlib.asynccontextmanager
async def serve(app: web.Application, bound: socket) -> AsyncIterator[None]:
    """Serve `app` on a bound socket while the block runs."""
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=SHUTDOWN_SECONDS)
    await runner.setup()
    try:
        await web.SockSite(runner, bound).start()
        yield
    finally:
        await runner.cleanup()


def run(path: Path, *, port: int, open_browser: bool, json_file: Path | None) -> None:
    """Serve the dashboard of the database at `path` until Ctrl-C or SIGTERM; print its login URL."""
    with agent.opened(path) as device, bind_loopback(port) as bound:
        dashboard = Dashboard(device, origin_of(bound))
        asyncio.run(_until_stopped(path, dashboard, bound, open_browser=open_browser, json_file=json_file))


async def _until_stopped(
    path: Path, dashboard: Dashboard, bound: socket, *, open_browser: bool, json_file: Path | None
) -> None:
    stop = stop_event()
    async with serve(dashboard.app(), bound):
        url = dashboard.login_url()
        say(f"The privacy dashboard of {path}, for this machine only:\n")
        say(f"  {url}\n\nThe link works once. Press Ctrl-C to stop.")
        write_json(json_file, {"url": url})
        if open_browser:
            webbrowser.open(url)
        await stop.wait()

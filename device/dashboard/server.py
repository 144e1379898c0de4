"""The dashboard's HTTP side: one person, one browser, one machine.

A start URL with a one-time token gives the browser a cookie; without the cookie there is nothing to see.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar
from urllib.parse import quote

from aiohttp import web

from device.dashboard.confirmation import Action, AnyDevice, Choice, confirmation_page
from device.dashboard.guard import MAX_BODY, Session, guarded
from device.dashboard.layout import STATIC, Link, page
from device.dashboard.markup import Node, tag
from device.dashboard.pages import OverviewPage
from device.dashboard.words import Clockface
from device.errors import DatabaseUnavailable, StandardError
from device.site import parse_site

T = TypeVar("T")
_TYPES = {".css": "text/css", ".svg": "image/svg+xml", ".js": "text/javascript"}
_FILES = {path.name: path for path in STATIC.iterdir()}


class Dashboard:
    """Serves `device` at `origin` (http://127.0.0.1:port). Make an app with `app`, and let people in with `invite`."""

    def __init__(
        self,
        device: AnyDevice,
        origin: str,
        *,
        clockface: Clockface | None = None,
        way_back: Link | None = None,
        steps: Node = None,
    ) -> None:
        self._device = device
        self._origin = origin
        self._clockface = clockface or Clockface()
        self._way_back = way_back
        self._steps = steps
        self._session = Session()

    def invite(self) -> str:
        """A start URL that lets one browser in, once."""
        return f"{self._origin}/open?token={quote(self._session.invite())}"

    def app(self) -> web.Application:
        """The application, behind its guard."""
        app = web.Application(middlewares=[guarded(self._origin)], client_max_size=MAX_BODY)
        base = self._session.path
        app.router.add_get("/open", self._open)
        app.router.add_get("/static/{name}", static_file)
        app.router.add_get(f"{base}/", self._show)
        app.router.add_get(f"{base}/static/{{name}}", static_file)
        app.router.add_get(f"{base}/{{action}}", self._ask)
        app.router.add_post(f"{base}/{{action}}", self._do)
        app.router.add_get("/{rest:.*}", self._lost)
        return app

    async def _open(self, request: web.Request) -> web.Response:
        """The start URL. The page moves on by itself, so that the browser takes the next request for one of ours:
        after a redirect from a terminal or another page, a SameSite=Strict cookie would be held back.
        """
        if not self._session.accept(request.query.get("token", "")):
            return _refusal("This link has been used, or is not ours. Start the dashboard again for a new one.")
        onward = f"{self._session.path}/"
        text = tag("p", "Opening. ", tag("a", "Go on to the dashboard", href=onward))
        refresh = tag("meta", http_equiv="refresh", content=f"0; url={onward}")
        response = _html(page("Opening", [tag("h1", "Your privacy dashboard"), text], head=refresh, root="/"))
        self._session.admit(response)
        return response

    async def _show(self, request: web.Request) -> web.Response:
        self._require_cookie(request)
        overview = await _used(self._device.overview)
        done = _action_or_none(request.query.get("done", ""))
        shown = OverviewPage(
            overview,
            self._clockface,
            done=done.done if done else "",
            all_rows=request.query.get("all") == "1",
            way_back=self._way_back,
            steps=self._steps,
        )
        return _html(shown.render())

    async def _ask(self, request: web.Request) -> web.Response:
        self._require_cookie(request)
        action = _action(request)
        site = _site(request.query.get("site", "")) if action is Action.CLEAR_SITE else ""
        return _html(confirmation_page(action, self._session.form_token, site=site))

    async def _do(self, request: web.Request) -> web.Response:
        self._require_cookie(request)
        action = _action(request)
        form = await request.post()
        if not self._session.sent_from_our_form(form.get("token")):
            raise web.HTTPForbidden(text="Refused. This form is not one of this page's.\n")
        site = _site(str(form.get("site", ""))) if action is Action.CLEAR_SITE else ""
        choice = Choice(action, site, close_past=form.get("close_past") == "yes")
        await _used(lambda: choice.run(self._device))
        raise web.HTTPSeeOther(f"{self._session.path}/?done={action.value}")

    async def _lost(self, _request: web.Request) -> web.Response:
        return _refusal("Open the dashboard with the link that the command has printed.")

    def _require_cookie(self, request: web.Request) -> None:
        if not self._session.knows(request):
            raise web.HTTPForbidden(text="Refused. Open the dashboard with the link that the command has printed.\n")


async def static_file(request: web.Request) -> web.Response:
    """A style sheet or picture of the dashboard's own; nothing in it is private."""
    path = _FILES.get(request.match_info["name"])
    if path is None:
        raise web.HTTPNotFound(text="There is no such file.\n")
    return web.Response(body=path.read_bytes(), content_type=_TYPES[path.suffix], charset="utf-8")


async def _used(call: Callable[[], T]) -> T:
    """Use the device without holding up the server; a locked database is no error page of ours."""
    try:
        return await asyncio.to_thread(call)
    except DatabaseUnavailable:
        raise web.HTTPServiceUnavailable(
            text="The device's database is busy. Reload this page in a moment.\n"
        ) from None


def _action(request: web.Request) -> Action:
    action = _action_or_none(request.match_info["action"])
    if action is None:
        raise web.HTTPNotFound(text="There is no such page.\n")
    return action


def _action_or_none(name: str) -> Action | None:
    return next((action for action in Action if action.value == name), None)


def _site(name: str) -> str:
    try:
        return parse_site(name)
    except StandardError:
        raise web.HTTPBadRequest(text="This is not the name of a site.\n") from None


def _html(text: str, status: int = 200) -> web.Response:
    return web.Response(text=text, status=status, content_type="text/html")


def _refusal(why: str) -> web.Response:
    return _html(page("Refused", [tag("h1", "Nothing to see here"), tag("p", why)], root="/"), status=403)

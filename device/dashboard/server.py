"""Serve the dashboard over HTTP to one browser on this machine.

A login URL with a single-use token sets the session cookie, which every other page requires. Each action has
a confirmation page that says what will happen.
"""

from __future__ import annotations

import asyncio
import contextlib
import webbrowser
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from socket import socket
from typing import Any, NamedTuple, TypeAlias, TypeVar, assert_never
from urllib.parse import quote

from aiohttp import web

from device import agent
from device.dashboard.formatting import LocalTime, describe_clearing
from device.dashboard.markup import STATIC, Link, Node, button_link, page, tag
from device.dashboard.pages import OverviewPage
from device.dashboard.security import MAX_BODY, Session, bind_loopback, origin_of, security_middleware
from device.device import Device
from device.errors import DatabaseUnavailable, StandardError
from device.site import parse_site
from protocol.cli.console import say, write_json
from protocol.cli.stopping import stop_event

AnyDevice: TypeAlias = Device[Any]
T = TypeVar("T")
# Do not wait for open connections: Ctrl-C should stop the command at once.
SHUTDOWN_SECONDS = 1.0
_TYPES = {".css": "text/css", ".svg": "image/svg+xml", ".js": "text/javascript"}
_FILES = {path.name: path for path in STATIC.iterdir()}


class Action(Enum):
    """What the person can change here; the values are URL paths."""

    CLEAR_SITE = "clear-site"
    CLEAR_HISTORY = "clear-history"
    SWITCH_OFF = "switch-off"
    SWITCH_ON = "switch-on"

    @property
    def notice(self) -> str:
        """Return the status message on the overview after the action."""
        return f"Done: {_TEXTS[self].done}"


@dataclass(frozen=True, slots=True)
class ConfirmedAction:
    """An action with the choices that the person made on its confirmation page."""

    action: Action
    site: str = ""

    def run(self, device: AnyDevice) -> None:
        match self.action:
            case Action.CLEAR_SITE:
                device.clear_site(self.site)
            case Action.CLEAR_HISTORY:
                device.clear_browsing_history(forget_visits=True)
            case Action.SWITCH_OFF:
                device.disable()
            case Action.SWITCH_ON:
                device.enable()
            case _:
                assert_never(self.action)


class _Text(NamedTuple):
    """A confirmation page: the question, what will happen, and the button; and what is said afterwards."""

    title: str
    consequences: tuple[str, ...]
    button: str
    done: str


_TEXTS = {
    Action.CLEAR_SITE: _Text(
        "Clear {site}?",
        ("This means: {clearing}.", "It gets no new budget by this, and no site is told."),
        "Clear this site",
        "the site is cleared.",
    ),
    Action.CLEAR_HISTORY: _Text(
        "Clear your history?",
        (
            "Everything goes: impressions, conversions, what each site has spent, and the log of reports.",
            "Since nobody knows any more what these weeks have paid, they are closed: no site measures anything "
            "that happened before now. This cannot be undone.",
        ),
        "Clear everything",
        "your history is cleared, and every week so far is closed to all sites.",
    ),
    Action.SWITCH_OFF: _Text(
        "Switch measurement off?",
        (
            "From now on no impression is stored, and every report is empty. Sites go on getting reports and "
            "cannot tell.",
            "What is stored stays until you clear it.",
        ),
        "Switch off",
        "measurement is off. Sites get empty reports, and cannot tell.",
    ),
    Action.SWITCH_ON: _Text(
        "Switch measurement on?",
        ("Sites can have ads remembered again and measure purchases, within the budgets.",),
        "Switch on",
        "measurement is on.",
    ),
}


def confirmation_page(action: Action, csrf_token: str, *, site: str = "") -> str:
    """Return the page whose form performs `action`."""
    text, names = _TEXTS[action], {"site": site, "clearing": describe_clearing(site)}
    title = text.title.format(**names)
    fields = [
        tag("input", type="hidden", name="token", value=csrf_token),
        tag("input", type="hidden", name="site", value=site) if site else None,
    ]
    kind = "primary" if action is Action.SWITCH_ON else "primary danger"
    buttons = tag("p", tag("button", text.button, class_=kind), button_link("No, go back", "./"), class_="actions")
    form = tag("form", fields, buttons, method="post", action=action.value)
    paragraphs = [tag("p", each.format(**names)) for each in text.consequences]
    return page(title, [tag("h1", title), paragraphs, form])


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
        app.router.add_get(f"{base}/", self._overview)
        app.router.add_get(f"{base}/static/{{name}}", static_file)
        app.router.add_get(f"{base}/{{action}}", self._confirm)
        app.router.add_post(f"{base}/{{action}}", self._perform)
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

    async def _overview(self, request: web.Request) -> web.Response:
        self._require_cookie(request)
        overview = await _in_thread(self._device.overview)
        performed = _action_or_none(request.query.get("done", ""))
        rendered = OverviewPage(
            overview,
            self._local_time,
            done=performed.notice if performed else "",
            all_rows=request.query.get("all") == "1",
            back_link=self._back_link,
            below=self._below,
        )
        return _html(rendered.render())

    async def _confirm(self, request: web.Request) -> web.Response:
        self._require_cookie(request)
        action = _action(request)
        site = _site(request.query.get("site", "")) if action is Action.CLEAR_SITE else ""
        return _html(confirmation_page(action, self._session.csrf_token, site=site))

    async def _perform(self, request: web.Request) -> web.Response:
        self._require_cookie(request)
        action = _action(request)
        form = await request.post()
        if not self._session.csrf_token_matches(form.get("token")):
            raise web.HTTPForbidden(text="Refused. This form is not one of this page's.\n")
        site = _site(str(form.get("site", ""))) if action is Action.CLEAR_SITE else ""
        confirmed = ConfirmedAction(action, site)
        await _in_thread(lambda: confirmed.run(self._device))
        raise web.HTTPSeeOther(f"{self._session.path}/?done={action.value}")

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
    """Call the device without blocking the event loop; answer 503 if its database is locked."""
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

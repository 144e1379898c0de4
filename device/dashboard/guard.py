"""Who may talk to a page on this machine: loopback only, by its own name, from itself.

A website in the person's browser can send requests here: under a name it has pointed at 127.0.0.1 (DNS rebinding), or
across origins with the person's cookies. So the Host must be exactly ours, whatever changes anything must come from
our own Origin, and no page of ours may be framed, scripted or read from elsewhere.
"""

from __future__ import annotations

import hmac
import secrets
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from aiohttp import web
from aiohttp.typedefs import Middleware

HOST = "127.0.0.1"
SECRET_BYTES = 24
MAX_INVITATIONS = 16
MAX_BODY = 64 * 1024
_CHANGES_NOTHING = ("GET", "HEAD")
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    # A page must name its origin to itself: under no-referrer its own forms would come from "null".
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_POLICY = {
    "default-src": "'none'",
    "style-src": "'self'",
    "img-src": "'self'",
    "form-action": "'self'",
    "frame-ancestors": "'none'",
    "base-uri": "'none'",
}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def listen(port: int) -> socket.socket:
    """A socket on the loopback address and nowhere else; port 0 takes any that is free."""
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((HOST, port))
    except OSError:
        bound.close()
        raise
    return bound


def origin_of(bound: socket.socket) -> str:
    """The origin that pages behind this socket have in a browser."""
    return f"http://{HOST}:{bound.getsockname()[1]}"


def content_policy(more: Mapping[str, str] | None = None) -> str:
    """The Content-Security-Policy: our own style sheets and nothing else, unless a page needs `more`."""
    return "; ".join(f"{name} {value}" for name, value in {**_POLICY, **(more or {})}.items())


def guarded(origin: str, *, policy: str | None = None, allowed: frozenset[str] = frozenset()) -> Middleware:
    """Middleware for everything served at `origin`. Pages of `allowed` origins may send what changes things too."""
    host = origin.removeprefix("http://")
    headers = {**_HEADERS, "Content-Security-Policy": policy or content_policy()}

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        # A rebound name still shows in Host, since the browser fills it in from the address bar.
        if request.host != host:
            response: web.StreamResponse = _refused("This address has another name here.")
        elif not _sender_allowed(request, allowed | {origin}):
            response = _refused("Only this page itself may ask for that.")
        else:
            response = await _answered(request, handler)
        for name, value in headers.items():
            response.headers.setdefault(name, value)
        return response

    return guard


async def _answered(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPException as error:
        # Returned rather than raised, so that it gets the headers of every other page.
        return web.Response(status=error.status, text=error.text, headers=_without_type(error))


def _without_type(error: web.HTTPException) -> dict[str, str]:
    return {name: value for name, value in error.headers.items() if name not in ("Content-Type", "Content-Length")}


def _sender_allowed(request: web.Request, origins: frozenset[str]) -> bool:
    """Whatever changes something names its origin, and any request that names one names ours."""
    sender = request.headers.get("Origin")
    if sender is None:
        return request.method in _CHANGES_NOTHING
    return sender in origins


def _refused(why: str) -> web.Response:
    return web.Response(status=403, text=f"Refused. {why}\n")


@dataclass(slots=True)
class Session:
    """Who holds the cookie may look: one person's browser, let in by a link that works once.

    Browsers send cookies to every port of a host, so the cookie is bound to a path that no other port knows.
    """

    _invitations: deque[str] = field(default_factory=lambda: deque(maxlen=MAX_INVITATIONS), repr=False)
    _cookie: str = field(default_factory=lambda: secrets.token_urlsafe(SECRET_BYTES), repr=False)
    _form_token: str = field(default_factory=lambda: secrets.token_urlsafe(SECRET_BYTES), repr=False)
    path: str = field(default_factory=lambda: f"/{secrets.token_hex(8)}", repr=False)

    COOKIE = "trefoil_dashboard"

    def invite(self) -> str:
        """A new token for a start URL."""
        token = secrets.token_urlsafe(SECRET_BYTES)
        self._invitations.append(token)
        return token

    def accept(self, token: str) -> bool:
        """Whether `token` lets someone in. It never does so again."""
        match = next((known for known in self._invitations if _same(known, token)), None)
        if match is not None:
            self._invitations.remove(match)
        return match is not None

    def admit(self, response: web.Response) -> None:
        """Give the browser its cookie."""
        response.set_cookie(self.COOKIE, self._cookie, httponly=True, samesite="Strict", path=self.path)

    def knows(self, request: web.Request) -> bool:
        """Whether a request comes with the cookie."""
        return _same(self._cookie, request.cookies.get(self.COOKIE, ""))

    @property
    def form_token(self) -> str:
        """What every form of ours carries, and a form on someone else's page cannot."""
        return self._form_token

    def sent_from_our_form(self, token: object) -> bool:
        """Whether a form was one of ours."""
        return isinstance(token, str) and _same(self._form_token, token)


def _same(known: str, given: str) -> bool:
    return hmac.compare_digest(known.encode(), given.encode())

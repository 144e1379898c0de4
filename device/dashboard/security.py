"""Protect a page served on this machine: loopback, exact Host, same-origin writes, CSP, session cookie, CSRF token.

A website in the person's browser can send requests here: under a name that it points at 127.0.0.1 (DNS rebinding), or
cross-origin with the person's cookies. So the Host must be exactly ours, a request that changes anything must carry our
own Origin, and no page of ours may be framed, scripted or read from elsewhere.
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

from protocol.errors import ErrorKind, TrefoilError

HOST = "127.0.0.1"
SECRET_BYTES = 24
MAX_LOGIN_TOKENS = 16
MAX_BODY = 64 * 1024
_SAFE_METHODS = ("GET", "HEAD")
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    # Not no-referrer: under it the page's own forms would carry the Origin "null".
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_CSP = {
    "default-src": "'none'",
    "style-src": "'self'",
    "img-src": "'self'",
    "form-action": "'self'",
    "frame-ancestors": "'none'",
    "base-uri": "'none'",
}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def bind_loopback(port: int) -> socket.socket:
    """Return a socket bound to the loopback address; port 0 picks a free one."""
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((HOST, port))
    except OSError as error:
        bound.close()
        message = f"cannot listen on {HOST}:{port}: {error.strerror}"
        raise TrefoilError(message, "Choose another --port.", kind=ErrorKind.BUSY) from None
    return bound


def origin_of(bound: socket.socket) -> str:
    """Return the web origin of pages behind this socket."""
    return f"http://{HOST}:{bound.getsockname()[1]}"


def content_security_policy(more: Mapping[str, str] | None = None) -> str:
    """Return the Content-Security-Policy: our own style sheets and images only, plus the directives in `more`."""
    return "; ".join(f"{name} {value}" for name, value in {**_CSP, **(more or {})}.items())


def security_middleware(
    origin: str, *, csp: str | None = None, allowed_origins: frozenset[str] = frozenset()
) -> Middleware:
    """Return middleware that rejects foreign requests at `origin` and sets the security headers.

    Pages of `allowed_origins` may send requests that change state, too.
    """
    host = origin.removeprefix("http://")
    headers = {**_HEADERS, "Content-Security-Policy": csp or content_security_policy()}

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        # DNS rebinding shows in Host, which the browser fills in from the address bar.
        if request.host != host:
            response: web.StreamResponse = _forbidden("This address has another name here.")
        elif not _origin_allowed(request, allowed_origins | {origin}):
            response = _forbidden("Only this page itself may ask for that.")
        else:
            response = await _call(handler, request)
        for name, value in headers.items():
            response.headers.setdefault(name, value)
        return response

    return check


async def _call(handler: Handler, request: web.Request) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPException as error:
        # Return it instead of raising, so that error pages get the security headers as well.
        kept = {name: value for name, value in error.headers.items() if name not in ("Content-Type", "Content-Length")}
        return web.Response(status=error.status, text=error.text, headers=kept)


def _origin_allowed(request: web.Request, origins: frozenset[str]) -> bool:
    """Require an allowed Origin header on unsafe methods, and on any request that has the header."""
    origin = request.headers.get("Origin")
    if origin is None:
        return request.method in _SAFE_METHODS
    return origin in origins


def _forbidden(why: str) -> web.Response:
    return web.Response(status=403, text=f"Refused. {why}\n")


@dataclass(slots=True)
class Session:
    """One browser's session: single-use login tokens, the session cookie and the CSRF token.

    Browsers send cookies to every port of a host, so the cookie is bound to a path that no other port knows.
    """

    _login_tokens: deque[str] = field(default_factory=lambda: deque(maxlen=MAX_LOGIN_TOKENS), repr=False)
    _cookie: str = field(default_factory=lambda: secrets.token_urlsafe(SECRET_BYTES), repr=False)
    csrf_token: str = field(default_factory=lambda: secrets.token_urlsafe(SECRET_BYTES), repr=False)
    path: str = field(default_factory=lambda: f"/{secrets.token_hex(8)}", repr=False)

    COOKIE = "trefoil_dashboard"

    def new_login_token(self) -> str:
        """Return a new single-use token for a login URL."""
        token = secrets.token_urlsafe(SECRET_BYTES)
        self._login_tokens.append(token)
        return token

    def redeem(self, token: str) -> bool:
        """Return whether `token` is a valid login token, and invalidate it."""
        match = next((valid for valid in self._login_tokens if _equal(valid, token)), None)
        if match is not None:
            self._login_tokens.remove(match)
        return match is not None

    def set_cookie(self, response: web.Response) -> None:
        """Attach the session cookie to a response."""
        response.set_cookie(self.COOKIE, self._cookie, httponly=True, samesite="Strict", path=self.path)

    def is_authenticated(self, request: web.Request) -> bool:
        """Return whether a request carries the session cookie."""
        return _equal(self._cookie, request.cookies.get(self.COOKIE, ""))

    def csrf_token_matches(self, token: object) -> bool:
        """Return whether a form carries this session's CSRF token."""
        return isinstance(token, str) and _equal(self.csrf_token, token)


def _equal(secret: str, candidate: str) -> bool:
    return hmac.compare_digest(secret.encode(), candidate.encode())

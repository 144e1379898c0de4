"""What a browser checks before a page's call reaches the device: the Permissions-Policy header, then user activation.

A device knows sites, not pages or tabs. An embedder that does puts `Browser` in front of it. A refused call raises the
standard's NotAllowedError, which depends on the page and its user's input alone, before the options are validated.

Activation (drafts of 2026): a tab records when its user last acted in it, by an input event or an address they entered.
The first call after that consumes the activation and opens the tab to calls of its site until the tab navigates to
another, so that a chain of redirects through many sites gets one caller. A tab without a recorded activation may not
call. A tab is open to the site that opened it and to no other: the news of a navigation may come after the first call
of the new document.

Permissions policy: both features are allowed to all frames by default, as in the standard. A document inherits a
feature from the one that holds it, if that one has it for itself, its header allows the document's origin, and so does
the `allow` attribute of the frame; then the document's own header must allow itself.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import Generic, TypeVar
from urllib.parse import urlsplit

from http_sf import Token

from device.conversion import ConversionOptions
from device.device import Device
from device.errors import DOMException
from device.events import ConversionEventOptions, ImpressionOptions
from device.labelling import LabelOptions
from device.limits import DeviceLimits
from device.site import parse_site
from device.web.http_headers import Member, parse_dictionary
from protocol.errors import ErrorKind, ProtocolError


@dataclass(slots=True)
class _Tab:
    """When its user last acted (None if consumed), the site that may call, and the action's name."""

    activated: int | None = None
    open_to: str | None = None
    # A name for the user's last action, for devices that count sites per action.
    action: str = ""


class Activations:
    """The activation state of a browser's tabs, by the browser's own ids. Thread-safe."""

    def __init__(self, clock: Callable[[], int], lifetime: int) -> None:
        self._clock = clock
        self._lifetime = lifetime
        self._tabs: dict[str, _Tab] = {}
        self._mutex = threading.Lock()

    def user_acted(self, tab: str) -> None:
        """Record that the user sent an input event to `tab`, or entered an address in it."""
        with self._mutex:
            state = self._tabs.setdefault(tab, _Tab())
            state.activated, state.action = self._clock(), secrets.token_hex(16)

    def navigated(self, tab: str, host: str) -> None:
        """Record that `tab` shows a page of `host` now. A site other than the one before needs its own activation."""
        with self._mutex:
            state = self._tabs.setdefault(tab, _Tab())
            if state.open_to != _site(host):
                state.open_to = None

    def closed(self, tab: str) -> None:
        """Forget `tab`."""
        with self._mutex:
            self._tabs.pop(tab, None)

    def check(self, tab: str, host: str, *, acted: bool = False) -> str:
        """Raise NotAllowedError unless a page of `host` in `tab` may call now; if it may, consume the activation.

        `acted` is the browser's own note that the user acted in the calling document a moment ago. It counts only where
        it is needed: beside an action that is recorded it would be the same one again, left over for the next site.
        Return the name of the user's last action in the tab.
        """
        site = _site(host)
        with self._mutex:
            state = self._tabs.setdefault(tab, _Tab())
            if state.open_to == site:
                return state.action
            recent = state.activated is not None and 0 <= self._clock() - state.activated <= self._lifetime
            if acted and not recent:
                state.action = secrets.token_hex(16)
            elif not recent:
                raise DOMException("NotAllowedError", "the user has not acted in this tab recently")
            state.activated, state.open_to = None, site
            return state.action


def _site(host: str) -> str:
    """Return the site of a host; a host without one is its own site."""
    try:
        return parse_site(host)
    except DOMException:
        return host


R = TypeVar("R")
# As browsers write the origin of a document that shares none with any other.
OPAQUE = "null"
_PORTS = {"https": 443, "http": 80}


class Feature(Enum):
    """The policy-controlled features, by the standard's names."""

    SAVE_IMPRESSION = "save-impression"
    MEASURE_CONVERSION = "measure-conversion"


@dataclass(frozen=True, slots=True)
class Allowlist:
    """The origins that may use a feature: any (`*`), the page's own (`self`), and those listed."""

    any_origin: bool = False
    own_origin: bool = False
    origins: frozenset[str] = frozenset()

    @classmethod
    def of(cls, member: Member) -> Allowlist:
        """Return the allowlist that a list or a token declares. As in browsers, any other value allows no origin."""
        items = member if type(member) is tuple else (member,) if type(member) is Token else ()
        tokens = {str(item) for item in items if type(item) is Token}
        origins = {origin_of(item) for item in items if type(item) is str}
        return cls("*" in tokens, "self" in tokens, frozenset(origins - {OPAQUE}))

    @classmethod
    def declared(cls, header: str, feature: Feature) -> Allowlist:
        """Return what a Permissions-Policy header declares. As in browsers, a malformed one counts as absent."""
        try:
            members = parse_dictionary(header)
        except ProtocolError:
            members = {}
        return cls.of(members[feature.value]) if feature.value in members else cls(any_origin=True)

    def allows(self, page: str, caller: str) -> bool:
        return self.any_origin or caller in self.origins or (self.own_origin and caller == page)


@dataclass(frozen=True, slots=True)
class Container:
    """The frame element that holds a document: its `allow` attribute, its `src` if it has one, whether it is sandboxed
    into an opaque origin.
    """

    allow: str = ""
    src: str | None = None
    sandboxed: bool = False

    def allows(self, feature: Feature, holder: str, child: str) -> bool:
        """Return whether all declarations of `feature` allow the origin `child`; without any, it is allowed."""
        declarations = (part.split() for part in self.allow.split(";"))
        allowlists = [words[1:] or ["'src'"] for words in declarations if words and words[0].lower() == feature.value]
        return all(any(self._matches(word.lower(), holder, child) for word in words) for words in allowlists)

    def _matches(self, word: str, holder: str, child: str) -> bool:
        if word in ("*", "'self'"):
            return word == "*" or child == holder
        # A frame without an address of its own has its holder's origin.
        own = holder if self.src is None or self.src.startswith("about:") else origin_of(self.src)
        allowed = own if word == "'src'" and not self.sandboxed else origin_of(word)
        return allowed != OPAQUE and child == allowed


@dataclass(frozen=True, slots=True)
class Document:
    """One document, with its Permissions-Policy header and the frame elements, one of which holds it."""

    origin: str
    policy: str = ""
    containers: tuple[Container, ...] = ()


def check_policy(feature: Feature, documents: Sequence[Document]) -> None:
    """Raise NotAllowedError unless the first of `documents` may use `feature`. Each is held by the next, up to the top.

    These are the steps of "define an inherited policy" and "is feature enabled" (Permissions Policy §9).
    """
    allowed = all(
        _allows(holder, feature, holder.origin)
        and _allows(holder, feature, child.origin)
        and all(one.allows(feature, holder.origin, child.origin) for one in child.containers)
        for child, holder in pairwise(documents)
    )
    if not allowed or not _allows(documents[0], feature, documents[0].origin):
        origin = documents[0].origin[:255]
        raise DOMException("NotAllowedError", f"a permissions policy forbids {feature.value} to {origin}")


def _allows(document: Document, feature: Feature, origin: str) -> bool:
    return Allowlist.declared(document.policy, feature).allows(document.origin, origin)


def origin_of(url: str) -> str:
    """Return the origin of an http or https URL in the browser's own spelling, or "null" for any other."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        return OPAQUE
    if parts.scheme not in _PORTS or not host:
        return OPAQUE
    name = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{name}" + ("" if port in (None, _PORTS[parts.scheme]) else f":{port}")


@dataclass(frozen=True, slots=True)
class Page:
    """The caller: the origin of the page, that of the calling frame if it is another, the tab and the policy header.

    Without a tab, activation is not required. An embedder with nested frames names all `documents` instead of the
    header, from the calling one to the page.
    """

    origin: str
    frame: str | None = None
    tab: str | None = None
    permissions_policy: str = ""
    documents: tuple[Document, ...] = ()

    @property
    def chain(self) -> tuple[Document, ...]:
        """Return the documents from the calling one to the page."""
        frame = () if self.frame is None else (Document(self.frame),)
        return self.documents or (*frame, Document(self.origin, self.permissions_policy))

    @property
    def site(self) -> str:
        """Return the host of the page, from which the device derives the site."""
        return _host(self.origin)

    @property
    def intermediary(self) -> str | None:
        return None if self.frame is None else _host(self.frame)


class Browser(Generic[R]):
    """A device behind web pages. Report what users do in their tabs to `activations`."""

    def __init__(self, device: Device[R], clock: Callable[[], int], limits: DeviceLimits | None = None) -> None:
        self.device = device
        self.activations = Activations(clock, (limits or DeviceLimits()).activation_seconds)

    def save_impression(self, page: Page, options: ImpressionOptions) -> None:
        """Call `Device.save_impression` if the page is allowed to."""
        action = self.check(page, Feature.SAVE_IMPRESSION)
        self.device.save_impression(page.site, options, intermediary=page.intermediary, action=action)

    def measure_conversion(self, page: Page, options: ConversionOptions) -> R:
        """Call `Device.measure_conversion` if the page is allowed to."""
        action = self.check(page, Feature.MEASURE_CONVERSION)
        return self.device.measure_conversion(page.site, options, intermediary=page.intermediary, action=action)

    def save_conversion(self, page: Page, options: ConversionEventOptions) -> None:
        """Call `Device.save_conversion` if the page may save: the display side has no policy of its own."""
        action = self.check(page, Feature.SAVE_IMPRESSION)
        self.device.save_conversion(page.site, options, intermediary=page.intermediary, action=action)

    def measure_impression(self, page: Page, options: LabelOptions) -> R:
        """Call `Device.measure_impression` if the page may measure."""
        action = self.check(page, Feature.MEASURE_CONVERSION)
        return self.device.measure_impression(page.site, options, intermediary=page.intermediary, action=action)

    def check(self, page: Page, feature: Feature, *, acted: bool = False) -> str | None:
        """Raise NotAllowedError if an insecure context, the page's policy or a missing activation forbids the call.

        `acted` is explained at `Activations.check`. Return the name of the user's action, or None if the page names no
        tab.
        """
        for origin in {page.origin, page.frame or page.origin, *(each.origin for each in page.chain)}:
            if "://" in origin and not origin.lower().startswith("https://"):
                raise DOMException(
                    "NotAllowedError", f"{origin[:255]!r} is no secure context", kind=ErrorKind.FORBIDDEN
                )
        check_policy(feature, page.chain)
        return None if page.tab is None else self.activations.check(page.tab, page.site, acted=acted)


def _host(origin: str) -> str:
    """Return the host of an origin, or the origin itself if malformed: the device refuses it as no site."""
    try:
        return urlsplit(origin).hostname or origin
    except ValueError:
        return origin

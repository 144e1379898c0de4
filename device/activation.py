"""Activation: a page may use a device only in a tab whose user has acted lately, and one site each time they act.

As in the drafts of 2026. A tab remembers when its user last acted: an input event, or an address they chose themselves.
The first call after that uses the action up, and opens the tab to calls until it is taken to another site. A chain of
redirects through many sites has one action of its user's, and so one site that may call. Browsers know their tabs; who
embeds a device tells it about them here. A tab that nobody was seen to act in may not call at all.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from device.errors import DOMException
from device.site import parse_site


@dataclass(slots=True)
class _Tab:
    """When its user last acted, unless that was used up, and whether its present site may call."""

    acted: int | None = None
    is_open: bool = False


class Activations:
    """The tabs of one browser, by whatever name it has for each. Safe to use from several threads."""

    def __init__(self, clock: Callable[[], int], lasts: int) -> None:
        self._clock = clock
        self._lasts = lasts
        self._tabs: dict[str, _Tab] = {}
        self._mutex = threading.Lock()

    def user_acted(self, tab: str) -> None:
        """An input event of the user's in a page of `tab`, or an address they chose in the browser itself."""
        with self._mutex:
            self._tabs.setdefault(tab, _Tab()).acted = self._clock()

    def navigated(self, tab: str, before: str | None, after: str) -> None:
        """`tab` was taken from a page of the host `before` to one of `after`: another site needs its own action."""
        if before is None or _site(before) != _site(after):
            with self._mutex:
                self._tabs.setdefault(tab, _Tab()).is_open = False

    def closed(self, tab: str) -> None:
        """There is no such tab any more."""
        with self._mutex:
            self._tabs.pop(tab, None)

    def check(self, tab: str) -> None:
        """NotAllowedError unless the page in `tab` may call now; if so, its user's action is used up."""
        with self._mutex:
            known = self._tabs.setdefault(tab, _Tab())
            if known.is_open:
                return
            if known.acted is None or not 0 <= self._clock() - known.acted <= self._lasts:
                raise DOMException("NotAllowedError", "the user has not acted in this tab lately")
            known.acted, known.is_open = None, True


def _site(host: str) -> str:
    """A host that belongs to no site is a site of its own."""
    try:
        return parse_site(host)
    except DOMException:
        return host

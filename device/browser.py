"""The browser's part: what is asked of a page before its call reaches the device. Permissions policy, then activation.

A device itself knows sites, not pages. Who embeds one and knows tabs and headers goes through here; the answers are
errors of the standard, and depend on the page and its user's clicks alone. They come before the options are looked at.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar
from urllib.parse import urlsplit

from device.activation import Activations
from device.conversion import ConversionOptions
from device.device import Device
from device.impression import ImpressionOptions
from device.limits import DeviceLimits
from device.permissions_policy import Feature, PermissionsPolicy

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Page:
    """Who calls: the origins of the page and of the frame on it that calls, if another; and what the browser knows.

    Without a tab nothing is known of its user, and activation is not asked for; without a policy everything is allowed.
    """

    origin: str
    frame: str | None = None
    tab: str | None = None
    permissions_policy: str = ""

    @property
    def site(self) -> str:
        """The host, which stands for its site."""
        return _host(self.origin)

    @property
    def intermediary(self) -> str | None:
        """The host of the frame."""
        return None if self.frame is None else _host(self.frame)


class Browser(Generic[R]):
    """A device behind pages. Tell `activations` what users do in their tabs."""

    def __init__(self, device: Device[R], clock: Callable[[], int], limits: DeviceLimits | None = None) -> None:
        self._device = device
        self.activations = Activations(clock, (limits or DeviceLimits()).activation_seconds)

    def save_impression(self, page: Page, options: ImpressionOptions) -> None:
        """As `Device.save_impression`, if the page may."""
        self.check(page, Feature.SAVE_IMPRESSION)
        self._device.save_impression(page.site, options, intermediary=page.intermediary)

    def measure_conversion(self, page: Page, options: ConversionOptions) -> R:
        """As `Device.measure_conversion`, if the page may."""
        self.check(page, Feature.MEASURE_CONVERSION)
        return self._device.measure_conversion(page.site, options, intermediary=page.intermediary)

    def check(self, page: Page, feature: Feature) -> None:
        """NotAllowedError if the page's policy or its user do not let it call."""
        PermissionsPolicy.parse(page.permissions_policy).check(feature, page.origin, page.frame or page.origin)
        if page.tab is not None:
            self.activations.check(page.tab)


def _host(origin: str) -> str:
    """The host of an origin. What is none is refused later, as no site."""
    try:
        return urlsplit(origin).hostname or origin
    except ValueError:
        return origin

"""Calls: who calls a device, when, and on which action of its user.

A device may bound how many sites act on one click or key, against many of them draining it together. Which sites acted
is noted twice, for saves and for measurements: what is saved on an action must not decide what is measured on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from device.errors import DOMException
from device.limits import DeviceLimits
from device.site import parse_site
from device.storage import Store
from protocol.errors import TrefoilError

# Far more than any calendar needs, and far less than a file can hold: a clock beyond it is no clock.
TIMES = range(-(2**40), 2**40)


class Register(Enum):
    """For what a site has acted on an action."""

    SAVES = "saves"
    MEASUREMENTS = "measurements"


@dataclass(frozen=True, slots=True)
class DeviceCall:
    """One call. `site` is the top-level site, which pays; `caller` the intermediary on it, or the site itself.

    `came` is the moment of the ticker's clock at which it came, and `now` the device's time.
    """

    came: float
    now: int
    site: str
    caller: str
    action: str | None = None

    @classmethod
    def checked(
        cls, came: float, now: int, site: str, intermediary: str | None, action: str | None, limits: DeviceLimits
    ) -> DeviceCall:
        """Where actions are counted every call must name its own; this is asked before anything is on or off."""
        if type(now) is not int or now not in TIMES:
            raise TrefoilError("the clock of this device gives no time in whole seconds since 1970", "Set it right.")
        if limits.sites_per_action is not None and (type(action) is not str or not action):
            raise DOMException(
                "NotAllowedError", "this device counts sites per user action, and the call comes of no action"
            )
        top_level = parse_site(site)
        return cls(came, now, top_level, top_level if intermediary is None else parse_site(intermediary), action)

    @property
    def queue(self) -> tuple[str, str]:
        """Calls of one caller on one site follow one another."""
        return self.site, self.caller

    def is_admitted(self, register: Register, store: Store, limits: DeviceLimits) -> bool:
        """Whether its site may still act on its action: by who calls, never by what is found. In a transaction."""
        if limits.sites_per_action is None or self.action is None:
            return True
        return store.admit_to_action(f"{register.value}: {self.action}", self.site, limits.sites_per_action, self.now)

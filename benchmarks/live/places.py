"""Where everything in the demonstration is: one origin each, and the made-up site that it stands for.

A browser keeps origins apart, and ports of this machine are origins. Devices count in sites, and this machine is
none; so the agent takes each origin for the site it plays.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from socket import socket

from device.dashboard.guard import origin_of
from device.dashboard.serve import take_port

SHOP_SITE = "shoes.example"
CAMPAIGNS = (
    "Trail shoes, in the news",
    "City shoes, in the news",
    "Trail shoes, on the blog",
    "City shoes, on the blog",
)
BUCKETS = len(CAMPAIGNS)
# With the bias side query a purchase costs the week of the ad 0.2·(2 + κ)/2 = 0.3 of its budget, and every other week
# of the window 0.1: the fourth purchase finds nothing left, and its report says so to the side query.
EPSILON = 0.2
KAPPA = 1
# The relative error that the advertiser accepts.
CUTOFF = 0.1


class Place(Enum):
    """Everything that has an address of its own. The order is the order of ports."""

    HOME = "Start"
    NEWS = "News"
    BLOG = "Blog"
    SHOP = "Shop"
    MEASUREMENT = "Advertiser"
    HELPERS = "Helpers"
    DASHBOARD = "Your dashboard"
    AGENT = "Your device"

    @property
    def site(self) -> str | None:
        """The site whose pages live here, as the device takes it; None for what is no website."""
        return _SITES.get(self)


_SITES = {Place.NEWS: "news.example", Place.BLOG: "blog.example", Place.SHOP: SHOP_SITE}


@dataclass(frozen=True, slots=True)
class Map:
    """The origin of every place."""

    origins: Mapping[Place, str]

    def __getitem__(self, place: Place) -> str:
        return self.origins[place]

    def sites(self) -> dict[str, str]:
        """Which site each origin with pages of a website stands for."""
        return {self.origins[place]: place.site for place in Place if place.site is not None}


@contextlib.contextmanager
def ports_taken(first: int) -> Iterator[tuple[Map, dict[Place, socket]]]:
    """A bound socket for every place, on neighbouring ports from `first`, or on any that are free if it is 0."""
    with contextlib.ExitStack() as held:
        sockets = {
            place: held.enter_context(take_port(first + offset if first else 0)) for offset, place in enumerate(Place)
        }
        yield Map({place: origin_of(bound) for place, bound in sockets.items()}), sockets

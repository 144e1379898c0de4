"""What a tracker would have seen: every click and purchase with the person's name on it, and exact counts for ever.

Nothing of Trefoil uses this. It is here to be compared with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.live.places import BUCKETS, CAMPAIGNS


@dataclass(frozen=True, slots=True)
class Sighting:
    """One thing a person did, as a tracker would file it."""

    time: int
    text: str


@dataclass(slots=True)
class Tracker:
    """Follows you through all pages, and the crowd too."""

    sightings: list[Sighting] = field(default_factory=list)
    _last_click: int | None = None

    def clicked(self, campaign: int, site: str, time: int) -> None:
        """You clicked an ad."""
        self._last_click = campaign
        self.sightings.append(Sighting(time, f"clicked “{CAMPAIGNS[campaign]}” on {site}"))

    def bought(self, site: str, time: int) -> int | None:
        """You bought something: the campaign that gets the credit, if any."""
        credit = self._last_click
        because = "no ad before it" if credit is None else f"because of “{CAMPAIGNS[credit]}”"
        self.sightings.append(Sighting(time, f"bought shoes on {site}, {because}"))
        return credit


def exact_histogram(credited: Sequence[int | None]) -> list[int]:
    """What the tracker counts, without noise and without asking."""
    return [sum(credit == campaign for credit in credited) for campaign in range(BUCKETS)]

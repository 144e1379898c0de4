"""Checked requests: what the engine's page needs to know of a request, whichever side asks.

A `Conversion` is asked by the site on which it happened, about impressions on other sites. A `Labelling` is asked by
the site that showed an impression, about conversions on other sites. One engine, one charge and one path for both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from device.attribution import AttributionFunction, most_buckets
from device.epoch import EpochCalendar
from device.limits import TREFOIL_SERVICE
from device.privacy_filter import FilterKind
from device.privacy_loss import LossTerms, report_sensitivity
from device.side_query import SideQuery
from device.storage import Side, Store
from protocol.shape import MAX_SPREAD

# By epoch; impressions or conversions, whichever a request is about.
Events = Mapping[int, Sequence[Any]]
Read = Callable[[Collection[int]], Events]


def no_events(_: Collection[int]) -> Events:
    """Of any epochs."""
    return {}


class RelevantEvents(NamedTuple):
    """The sites of relevant events, by epoch, and how to read the events of some epochs, while the store allows it."""

    sites: Mapping[int, Collection[str]]
    read: Read
    # Epochs that the querier's own functions were not shown, because they could not have paid for it.
    hidden: Collection[int] = ()
    # How to read what the querier itself has shown, where that is free: F ∩ P, which no epoch has to pay for.
    own: Read = no_events


# Which of some epochs, with events of these sites, could not pay for the worst that a report may say.
Unable = Callable[[Mapping[int, Collection[str]]], Collection[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedRequest(ABC):
    """A checked request, for one querier. `site` pays, also when an intermediary (`caller`) asks.

    `quota` is whose events a request uses up, beside the querier's own filter and everyone's.
    """

    quota: ClassVar[FilterKind]
    side: ClassVar[Side]

    site: str
    caller: str
    loss_terms: LossTerms
    buckets: int
    value: int
    function: AttributionFunction
    unit: str
    coins: int = 0
    side_query: SideQuery | None = None
    # Δ(ρ) where it is known without looking; None lets Theorem 18 decide by buckets and epochs.
    fixed_sensitivity: int | None = None
    # The largest value of any report in the query, which helpers check; 0 stands for the query's sensitivity.
    max_value: int = 0
    # Whose helpers the report is sealed to. It decides nothing else: what a report costs is the same for all.
    service: str = TREFOIL_SERVICE

    @property
    def cap(self) -> int:
        """What helpers let this report add to the answer at most: a constant of the query, never this value."""
        return self.max_value or self.loss_terms.query_sensitivity

    @property
    def spread(self) -> int:
        """In how many buckets the histogram may lie, from function and request alone, never from what it gives."""
        return min(most_buckets(self.function), self.buckets, self.cap, MAX_SPREAD)

    @property
    def kappa(self) -> int:
        """κ, or 0 without a side query."""
        return self.side_query.kappa if self.side_query else 0

    @property
    def worst_output(self) -> int:
        """How far one report can be from what costs nothing, where the window is one epoch."""
        return self.value

    @abstractmethod
    def window(self, calendar: EpochCalendar, now: int) -> Sequence[int]:
        """The epochs that are asked for, earliest first."""

    @abstractmethod
    def match(
        self, store: Store, calendar: EpochCalendar, epochs: Sequence[int], now: int, unable: Unable
    ) -> RelevantEvents:
        """What of `epochs` is relevant. Run inside the store's transaction."""

    def sensitivity(self, window: Sequence[int]) -> int:
        """Δ(ρ) of this report over `window`."""
        if self.fixed_sensitivity is not None:
            return self.fixed_sensitivity
        return report_sensitivity(self.value, self.buckets, len(window))

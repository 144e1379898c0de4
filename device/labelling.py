"""Labellings: a publisher asks whether a conversion followed an impression that it showed (paper, Appendix A).

It hands in the impression's features X and a window of days that has closed. The report is X if an allowed conversion
fell into the window, in an epoch that could pay for it, and zeros otherwise. Everything about the impression comes from
the publisher: to look it up would tell it what other sites have stored.

What an epoch pays. Taking an epoch with a relevant conversion away turns X into X or into zeros, so it can move the
report by ‖X‖₁ and by nothing else; nothing moves from one bucket to another, and Theorem 18's factor of 2 does not
apply. Every epoch with a relevant conversion pays that in full, also where another one would have given the same
report: if only the first paid, one epoch's events would decide what another can still pay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from device.attribution import Features
from device.checked_request import CheckedRequest, RelevantEvents, Unable
from device.conversion import check_epsilon, floor_micros
from device.conversion_event import ConversionEvent, EventSelection
from device.epoch import EpochCalendar
from device.errors import RangeError
from device.impression import U32, parse_sites
from device.limits import DeviceLimits
from device.option import whole, wholes, word
from device.privacy_filter import FilterKind
from device.privacy_loss import LossTerms
from device.side_query import SideQuery, SideQueryForm
from device.storage import Side, Store
from protocol.epsilon import MAX_SENSITIVITY
from protocol.seconds import DAY


@dataclass(frozen=True, slots=True, kw_only=True)
class Labelling(CheckedRequest):
    """A publisher's checked request. Its window is `length` seconds from the impression, `shown_ago` seconds ago."""

    quota: ClassVar[FilterKind] = FilterKind.ADVERTISER
    side: ClassVar[Side] = Side.PUBLISHER

    shown_ago: int
    length: int
    advertisers: frozenset[str]
    labels: frozenset[int] = frozenset()

    def window(self, calendar: EpochCalendar, now: int) -> Sequence[int]:
        """The epochs from the impression to the window's last second."""
        shown = now - self.shown_ago
        return calendar.window(shown, shown + self.length - 1)

    def match(
        self,
        store: Store,
        calendar: EpochCalendar,
        epochs: Sequence[int],
        now: int,
        unable: Unable,  # noqa: ARG002 - a publisher brings no functions
    ) -> RelevantEvents:
        """Conversions in the window that this publisher may learn of."""
        events: dict[int, list[ConversionEvent]] = {}
        for event in store.conversions.matching(self.selection(calendar, epochs, now)):
            events.setdefault(calendar.index(event.time), []).append(event)
        sites = {epoch: {event.site for event in found} for epoch, found in events.items()}
        return RelevantEvents(sites, lambda chosen: {epoch: events[epoch] for epoch in chosen})

    def selection(self, calendar: EpochCalendar, epochs: Sequence[int], now: int) -> EventSelection:
        """Which conversions of `epochs` may be looked at."""
        shown = now - self.shown_ago
        return EventSelection(
            since=max(shown, calendar.first_second(epochs[0])),
            until=min(shown + self.length, calendar.first_second(epochs[-1] + 1)),
            now=now,
            publisher=self.site,
            advertisers=self.advertisers,
            labels=self.labels,
        )


@dataclass(frozen=True, slots=True)
class LabelOptions:
    """What a publisher passes to `measure_impression`, once the window after the impression has closed.

    `features` are whole numbers of at least 0 with a sum from 1 to `cap`, the query's Δ: the same for every report in
    it. `unit` names how features are encoded, so that helpers never add up reports that mean different things.
    """

    aggregation_service: str
    features: Sequence[int]
    cap: int
    epsilon: float
    shown_ago: int
    advertisers: Sequence[str]
    window_days: int = 7
    labels: Sequence[int] = ()
    side_query: SideQuery | None = None
    unit: str = "features"

    def checked(self, site: str, caller: str, limits: DeviceLimits) -> Labelling:
        """The request to run, or an error that depends on nothing but these options and the device's limits."""
        service = limits.known_service(word("aggregation_service", self.aggregation_service))
        epsilon = check_epsilon(self.epsilon)
        cap = whole("cap", self.cap, 1, MAX_SENSITIVITY)
        features = wholes("features", self.features, limits.max_histogram_size, range(cap + 1))
        norm = sum(features)
        if not 1 <= norm <= cap:
            raise RangeError(f"the features add up to {norm}, and must to 1 or more, and at most the cap ({cap})")
        days = whole("window_days", self.window_days, 1, limits.max_lookback_days)
        shown_ago = whole("shown_ago", self.shown_ago, 0, limits.max_lookback)
        if shown_ago < days * DAY:
            raise RangeError(
                f"the window of {days} days after the impression has not closed: shown_ago is in seconds",
                f"Ask at a visit {days} days after the impression, or later.",
            )
        side_query = self._side_query()
        return Labelling(
            site=site,
            caller=caller,
            service=service,
            loss_terms=LossTerms(epsilon, floor_micros(epsilon), cap, side_query.kappa if side_query else 0),
            fixed_sensitivity=norm,
            buckets=len(features),
            value=norm,
            function=Features(features),
            unit=word("unit", self.unit),
            shown_ago=shown_ago,
            length=days * DAY,
            advertisers=self._advertisers(site, limits),
            labels=frozenset(wholes("labels", self.labels, limits.max_labels, U32)),
            side_query=side_query,
        )

    def _advertisers(self, site: str, limits: DeviceLimits) -> frozenset[str]:
        advertisers = parse_sites("advertisers", self.advertisers, limits.max_advertisers)
        if not advertisers:
            raise RangeError("advertisers names nobody whose conversions are asked about", "Name at least one.")
        if site in advertisers:
            raise RangeError(f"advertisers names {site} itself, which knows of its own conversions")
        return advertisers

    def _side_query(self) -> SideQuery | None:
        if self.side_query is None:
            return None
        side_query = SideQuery.checked(self.side_query)
        if side_query.form is SideQueryForm.LAST_TOUCH:
            raise RangeError("the last-touch side query is for last touch alone (Theorem 16)", "Use the form ANY.")
        return side_query

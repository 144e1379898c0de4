"""Labellings: a publisher asks whether a conversion followed an impression that it showed (paper, Appendix A).

It passes the impression's features X and a window of days that has closed. The report is X if an allowed conversion
fell into the window, in an epoch that could pay for it, and zeros otherwise. Everything about the impression comes from
the publisher: a lookup would reveal to it what other sites have stored.

What an epoch pays. Removing an epoch with a relevant conversion leaves X as it is or turns it into zeros, so it moves
the report by 0 or ‖X‖₁; nothing moves from one bucket to another, and Theorem 18's factor of 2 does not
apply. Every epoch with a relevant conversion pays that in full, also where another one would have led to the same
report: if only the first paid, one epoch's events would decide what another can still pay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from device.attribution import Features
from device.budget import FilterKind, LossTerms
from device.conversion import check_epsilon, floor_micros
from device.epoch import EpochCalendar
from device.errors import RangeError
from device.events import U32, ConversionEvent, EventSelection, parse_sites
from device.limits import DeviceLimits
from device.option import whole, wholes, word
from device.request import CannotPay, CheckedRequest, Match, SideQuery, SideQueryForm
from device.stores.storage import Side, Store
from device.weeks import Reach
from protocol.errors import ErrorKind
from protocol.units import DAY, MAX_SENSITIVITY


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
        """Return the epochs from the impression to the window's last second."""
        impression_time = now - self.shown_ago
        return calendar.window(impression_time, impression_time + self.length - 1)

    def match(
        self,
        store: Store,
        reach: Reach,
        now: int,
        cannot_pay: CannotPay,  # noqa: ARG002 - a publisher brings no functions
    ) -> Match:
        """Return the conversions in the window that this publisher may learn of."""
        events: dict[int, list[ConversionEvent]] = {}
        for event in store.conversions.matching(self.selection(reach.calendar, reach.usable, now)):
            events.setdefault(reach.calendar.index(event.time), []).append(event)
        sites = {epoch: {event.site for event in group} for epoch, group in events.items()}
        return Match(reach, sites, lambda chosen: {epoch: events[epoch] for epoch in chosen})

    def selection(self, calendar: EpochCalendar, epochs: Sequence[int], now: int) -> EventSelection:
        """Return which conversions of `epochs` may be read."""
        impression_time = now - self.shown_ago
        return EventSelection(
            since=max(impression_time, calendar.first_second(epochs[0])),
            until=min(impression_time + self.length, calendar.first_second(epochs[-1] + 1)),
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
        """Return the request to run, or raise an error that depends on these options and the device's limits alone."""
        service = limits.check_service(word("aggregation_service", self.aggregation_service))
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
                kind=ErrorKind.NOT_YET_VALID,
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
            raise RangeError(
                "advertisers is empty", "Name at least one site whose conversions count.", kind=ErrorKind.TOO_FEW
            )
        if site in advertisers:
            raise RangeError(
                f"advertisers names {site} itself, which knows of its own conversions", kind=ErrorKind.INCONSISTENT
            )
        return advertisers

    def _side_query(self) -> SideQuery | None:
        if self.side_query is None:
            return None
        side_query = SideQuery.checked(self.side_query)
        if side_query.form is SideQueryForm.LAST_TOUCH:
            raise RangeError(
                "the last-touch side query is for last touch alone (Theorem 16)",
                "Use the form ANY.",
                kind=ErrorKind.CONFLICTING_OPTIONS,
            )
        return side_query

"""Conversions: what a querier requests of a device, in the standard's terms or the paper's, checked before it runs.

`ConversionOptions` is the W3C call; `AttributionRequest` is the paper's general request (§3.3). Both become the same
`Conversion`, so there is one engine, one charge and one path.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import ClassVar

from device.attribution import AttributionFunction, LastNTouch, LastTouch, Need, is_interrupt, is_ours, needs
from device.budget import FilterKind, LossTerms, report_sensitivity
from device.epoch import EpochCalendar
from device.errors import RangeError
from device.events import ANY_DAYS, I32, U32, Impression, Selection, parse_sites
from device.limits import MAX_EPOCHS, TREFOIL_SERVICE, DeviceLimits, OwnSite
from device.option import entries, real, whole, wholes, word
from device.request import CannotPay, CheckedRequest, Match, SideQuery, SideQueryForm
from device.stores.storage import Side, Store
from device.weeks import Reach
from protocol.errors import ErrorKind
from protocol.units import DAY, MAX_EPSILON, MAX_SENSITIVITY, MICROS


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion(CheckedRequest):
    """A checked request of the site on which the conversion happened.

    The window is either `lookback` seconds before the conversion or the named `epochs`.
    """

    quota: ClassVar[FilterKind] = FilterKind.IMPRESSION_SITE
    side: ClassVar[Side] = Side.ADVERTISER

    lookback: int | None = None
    epochs: tuple[int, ...] = ()
    match_values: frozenset[int] = frozenset()
    impression_sites: frozenset[str] = frozenset()
    impression_callers: frozenset[str] = frozenset()
    relevant: Callable[[Impression], bool] | None = None
    # Impressions on the querier's own site, and those that the querier or its caller saved elsewhere, are left out.
    hides_own: bool = False

    @property
    def brings_functions(self) -> bool:
        """Return whether the querier's own code sees impressions: a relevance test, or a custom function."""
        return self.relevant is not None or not is_ours(self.function)

    def untested(self) -> Conversion:
        return replace(self, relevant=None)

    def window(self, calendar: EpochCalendar, now: int) -> Sequence[int]:
        return self.epochs if self.lookback is None else calendar.window(now - self.lookback, now)

    def match(self, store: Store, reach: Reach, now: int, cannot_pay: CannotPay) -> Match:
        """Return the impressions that this conversion may use: all selected, or those that pass the querier's test.

        Epochs that could not pay the worst case are withheld from the querier's own functions: what a function does
        with an impression that it has seen cannot be undone.
        """
        calendar, selection = reach.calendar, self.selection(reach.calendar, reach.usable, now)
        matched = store.matched_sites(selection, calendar)
        sites = {epoch: matched[epoch] for epoch in reach.usable if epoch in matched}
        withheld = cannot_pay(sites) if self.brings_functions else frozenset[int]()
        sites = {epoch: event_sites for epoch, event_sites in sites.items() if epoch not in withheld}
        if self.relevant is None:
            need = needs(self.function, self.buckets)
            return Match(reach, sites, lambda chosen: _read(store, selection, need, calendar, chosen), withheld)
        # The querier's own test of relevance has to see every impression of the other epochs.
        everything, test = _read(store, selection, Need(), calendar, sites), self.relevant
        passed = {epoch: [one for one in events if _passes(test, one)] for epoch, events in everything.items()}
        sites = {epoch: {one.site for one in events} for epoch, events in passed.items() if events}
        return Match(reach, sites, lambda chosen: {epoch: passed[epoch] for epoch in chosen}, withheld)

    def selection(self, calendar: EpochCalendar, window: Sequence[int], now: int) -> Selection:
        """Return which impressions may be read. A lookback includes its own last second."""
        since = calendar.first_second(window[0])
        return Selection(
            since=since if self.lookback is None else max(since, now - self.lookback),
            until=calendar.first_second(window[-1] + 1),
            now=now,
            conversion_site=self.site,
            conversion_caller=self.caller,
            match_values=self.match_values,
            impression_sites=self.impression_sites,
            impression_callers=self.impression_callers,
            hidden=frozenset({self.site, self.caller}) if self.hides_own else frozenset(),
        )


@dataclass(frozen=True, slots=True)
class ConversionOptions:
    """What a site passes to `measure_conversion`: the standard's members, and two extensions.

    `unit` names the unit of its values; `kappa` above 0 requests the side query in its general form. (The form for last
    touch is not offered: with the standard's priorities an earlier epoch may hold the touch that counts.)

    >>> trefoil.ConversionOptions(trefoil.TREFOIL_SERVICE, epsilon=0.25, histogram_size=4, value=3, max_value=3).value
    3
    """

    aggregation_service: str
    histogram_size: int
    epsilon: float = 1.0
    value: int = 1
    max_value: int = 1
    credit: Sequence[float] = (1.0,)
    lookback_days: int | None = None
    match_values: Sequence[int] = ()
    impression_sites: Sequence[str] = ()
    impression_callers: Sequence[str] = ()
    unit: str = "count"
    kappa: int = 0

    def checked(self, site: str, caller: str, limits: DeviceLimits) -> Conversion:
        """Return the conversion to run, or raise the standard's error, checked in the standard's order."""
        service = limits.check_service(word("aggregation_service", self.aggregation_service))
        epsilon = check_epsilon(self.epsilon)
        buckets = whole("histogram_size", self.histogram_size, 1, limits.max_histogram_size)
        max_value = whole("max_value", self.max_value, 1, U32[-1])
        value = whole("value", self.value, 1, max_value)
        function = last_n_touch(self.credit, limits)
        longest = limits.max_lookback_days
        lookback = longest if self.lookback_days is None else whole("lookback_days", self.lookback_days, 1, ANY_DAYS)
        match_values = wholes("match_values", self.match_values, limits.max_match_values, U32)
        kappa = whole("kappa", self.kappa, 0, MAX_SENSITIVITY)
        return Conversion(
            site=site,
            caller=caller,
            service=service,
            # Noise of scale 2·max_value/ε, and 2·value of it for a full report: Theorem 18's factor on both sides.
            loss_terms=LossTerms(epsilon, floor_micros(epsilon), 2 * max_value, kappa),
            fixed_sensitivity=2 * value,
            max_value=max_value,
            buckets=buckets,
            value=value,
            function=function,
            coins=len(function.credit) - 1,
            unit=word("unit", self.unit),
            lookback=min(lookback, longest) * DAY,
            match_values=frozenset(match_values),
            impression_sites=parse_sites("impression_sites", self.impression_sites, limits.max_impression_sites),
            impression_callers=parse_sites(
                "impression_callers", self.impression_callers, limits.max_impression_callers
            ),
            side_query=SideQuery(kappa) if kappa else None,
            hides_own=limits.own_site is OwnSite.HIDDEN,
        )


@dataclass(frozen=True, slots=True)
class AttributionRequest:
    """The paper's attribution request, with the querier's own relevance test and attribution function.

    `value` caps the report's 1-norm; the report's sensitivity follows from it (Theorem 18), and `query_sensitivity`
    must cover it. `function` sees no impression that the querier itself showed or saved, and its output is clipped.

    >>> trefoil.AttributionRequest([0], epsilon=0.5, buckets=4, value=3, query_sensitivity=3).unit
    'count'
    """

    epochs: Sequence[int]
    epsilon: float
    buckets: int
    value: int
    query_sensitivity: int
    function: AttributionFunction = field(default_factory=LastTouch)
    relevant: Callable[[Impression], bool] | None = None
    match_values: Sequence[int] = ()
    side_query: SideQuery | None = None
    unit: str = "count"
    aggregation_service: str = TREFOIL_SERVICE

    def checked(self, site: str, caller: str, limits: DeviceLimits) -> Conversion:
        """Return the conversion to run, or raise a RangeError that says what to change."""
        service = limits.check_service(word("aggregation_service", self.aggregation_service))
        epsilon = check_epsilon(self.epsilon)
        epochs = tuple(sorted(set(wholes("epochs", self.epochs, MAX_EPOCHS, I32))))
        if not epochs or epochs[-1] - epochs[0] >= MAX_EPOCHS:
            raise RangeError(
                f"a request names 1 to {MAX_EPOCHS} epochs, all within {MAX_EPOCHS} of each other",
                kind=ErrorKind.OUT_OF_RANGE if epochs else ErrorKind.TOO_FEW,
            )
        buckets = whole("buckets", self.buckets, 1, limits.max_histogram_size)
        value = whole("value", self.value, 1, MAX_SENSITIVITY)
        query_sensitivity = whole("query_sensitivity", self.query_sensitivity, 1, MAX_SENSITIVITY)
        sensitivity = report_sensitivity(value, buckets, len(epochs))
        if sensitivity > query_sensitivity:
            raise RangeError(
                f"the report's sensitivity {sensitivity} must be at most query_sensitivity ({query_sensitivity})",
                "Twice the value cap for several buckets and epochs, the value cap for one of either (Theorem 18).",
                kind=ErrorKind.INCONSISTENT,
            )
        side_query = None if self.side_query is None else SideQuery.checked(self.side_query)
        function = self._function(side_query, limits)
        return Conversion(
            site=site,
            caller=caller,
            service=service,
            loss_terms=LossTerms(
                epsilon, floor_micros(epsilon), query_sensitivity, side_query.kappa if side_query else 0
            ),
            buckets=buckets,
            value=value,
            function=function,
            # A custom function draws its own coins.
            coins=len(function.credit) - 1 if type(function) is LastNTouch else 0,
            unit=word("unit", self.unit),
            epochs=epochs,
            match_values=frozenset(wholes("match_values", self.match_values, limits.max_match_values, U32)),
            relevant=self.relevant,
            side_query=side_query,
            hides_own=True,
        )

    def _function(self, side_query: SideQuery | None, limits: DeviceLimits) -> AttributionFunction:
        """Return the attribution function if it is compatible; a built-in one rebuilt from plain numbers."""
        function = self.function
        if not callable(function) or not (self.relevant is None or callable(self.relevant)):
            raise RangeError(
                "the attribution function and the relevance test must be functions", kind=ErrorKind.WRONG_TYPE
            )
        form = None if side_query is None else side_query.form
        if form is SideQueryForm.ANY:
            raise RangeError(
                "the side query of the form ANY is for labels of impressions",
                "Use the form GENERAL.",
                kind=ErrorKind.CONFLICTING_OPTIONS,
            )
        if form is SideQueryForm.LAST_TOUCH and type(function) is not LastTouch:
            raise RangeError(
                "the last-touch side query is sound for last-touch attribution only (Theorem 16)",
                kind=ErrorKind.CONFLICTING_OPTIONS,
            )
        return last_n_touch(function.credit, limits) if type(function) is LastNTouch else function


def last_n_touch(credit: object, limits: DeviceLimits) -> LastNTouch:
    """Return last-n-touch with plain numbers: a custom number or list could observe how many impressions exist."""
    shares = entries("credit", credit, limits.max_credit_size)
    return LastNTouch(tuple(real("credit", share) for share in shares))


def check_epsilon(epsilon: object) -> float:
    """Return ε as a double within the standard's range, or raise its error. NaN and infinities are refused."""
    number = real("epsilon", epsilon)
    if not 0 < number <= MAX_EPSILON:
        raise RangeError(f"epsilon must be above 0 and at most {MAX_EPSILON}, not {number}")
    return number


def floor_micros(epsilon: float) -> int:
    """Return ⌊ε·10⁶⌋ for the header, exactly."""
    return math.floor(Fraction(epsilon) * MICROS)


def _read(
    store: Store, selection: Selection, need: Need, calendar: EpochCalendar, epochs: Collection[int]
) -> Mapping[int, Sequence[Impression]]:
    """Return as many of the selected impressions of `epochs` as are needed, by epoch."""
    events: dict[int, list[Impression]] = {}
    for run in _runs(epochs):
        since = max(selection.since, calendar.first_second(run[0]))
        part = replace(selection, since=since, until=calendar.first_second(run[-1] + 1))
        for impression in store.matching(part, need):
            events.setdefault(calendar.index(impression.time), []).append(impression)
    return events


def _runs(epochs: Iterable[int]) -> Iterator[Sequence[int]]:
    """Yield the runs of consecutive epochs, earliest first."""
    run: list[int] = []
    for epoch in sorted(epochs):
        if run and epoch != run[-1] + 1:
            yield run
            run = []
        run.append(epoch)
    if run:
        yield run


def _passes(test: Callable[[Impression], bool], impression: Impression) -> bool:
    """Return the result of the querier's own test, and False if it raises: an error would reveal what it saw.

    Impression by impression, so that one epoch's impressions cannot decide what another epoch is charged for.
    """
    try:
        return bool(test(impression))
    except BaseException as error:
        if is_interrupt(error):
            raise
        return False

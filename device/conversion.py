"""Conversions: what a querier asks of a device, in the standard's words or the paper's, checked before anything runs.

`ConversionOptions` is the W3C call; `AttributionRequest` is the paper's general request (§3.3). Both become the same
`Conversion`, so there is one engine, one charge and one path.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import ClassVar

from device.attribution import AttributionFunction, LastNTouch, LastTouch, Need, is_ours, needs
from device.checked_request import CheckedRequest, RelevantEvents, Unable
from device.epoch import EpochCalendar
from device.errors import RangeError
from device.impression import ANY_DAYS, I32, U32, Impression, Selection, parse_sites
from device.limits import MAX_EPOCHS, TREFOIL_SERVICE, DeviceLimits, OwnSite
from device.option import entries, real, whole, wholes, word
from device.privacy_filter import FilterKind
from device.privacy_loss import LossTerms, report_sensitivity
from device.side_query import SideQuery, SideQueryForm
from device.storage import Side, Store
from protocol.epsilon import MAX_EPSILON, MAX_SENSITIVITY, MICROS
from protocol.seconds import DAY


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
    # The querier's own events stay hidden from the functions it supplies; the standard has no such functions.
    hides_own_site: bool = False
    # Impressions on the querier's own site cost nothing and are always counted; others are charged for what they add.
    own_site_is_free: bool = False

    @property
    def worst_output(self) -> int:
        """What the querier's own impressions give can be taken from one bucket and put into another."""
        return 2 * self.value if self.own_site_is_free else self.value

    @property
    def brings_functions(self) -> bool:
        """Whether code of the querier's own is to look at impressions."""
        return self.relevant is not None or not is_ours(self.function)

    def window(self, calendar: EpochCalendar, now: int) -> Sequence[int]:
        """The epochs that are asked for, earliest first."""
        return self.epochs if self.lookback is None else calendar.window(now - self.lookback, now)

    def match(
        self, store: Store, calendar: EpochCalendar, epochs: Sequence[int], now: int, unable: Unable
    ) -> RelevantEvents:
        """Impressions that this conversion may use: all that are selected, or those that pass the querier's test.

        Epochs that could not pay for the worst that a report may say are not shown to functions of the querier's: what
        one does with what it has seen cannot be taken back.
        """
        selection = self.selection(calendar, epochs, now)
        sites = store.matched_sites(selection, calendar)
        asked = {epoch: sites[epoch] for epoch in epochs if epoch in sites}
        hidden = unable(asked) if self.brings_functions else frozenset[int]()
        shown = {epoch: found for epoch, found in asked.items() if epoch not in hidden}
        if self.relevant is None:
            need = needs(self.function, self.buckets)
            found = RelevantEvents(shown, lambda chosen: _read(store, selection, need, calendar, chosen), hidden)
            return self._without_own(store, selection, calendar, found) if self.own_site_is_free else found
        # The querier's own test of relevance has to see every impression of what it is shown.
        everything, test = _read(store, selection, Need(), calendar, shown), self.relevant
        passed = {epoch: [one for one in found if _passes(test, one)] for epoch, found in everything.items()}
        tested = {epoch: {one.site for one in found} for epoch, found in passed.items() if found}
        return RelevantEvents(tested, lambda chosen: {epoch: passed[epoch] for epoch in chosen}, hidden)

    def _without_own(
        self, store: Store, selection: Selection, calendar: EpochCalendar, found: RelevantEvents
    ) -> RelevantEvents:
        """The same where only epochs with impressions of other sites owe anything."""
        own = replace(selection, impression_sites=frozenset({self.site}))
        having = {epoch for epoch, sites in found.sites.items() if self.site in sites}
        others = {epoch: set(sites) - {self.site} for epoch, sites in found.sites.items()}
        need = needs(self.function, self.buckets)
        return found._replace(
            sites={epoch: sites for epoch, sites in others.items() if sites},
            own=lambda epochs: _read(store, own, need, calendar, having & set(epochs)),
        )

    def selection(self, calendar: EpochCalendar, window: Sequence[int], now: int) -> Selection:
        """Which impressions may be looked at. A lookback reaches its own last second."""
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
            hidden_site=self.site if self.hides_own_site else "",
        )


@dataclass(frozen=True, slots=True)
class ConversionOptions:
    """What a site passes to `measure_conversion`, as the standard has it, and two members of ours.

    `unit` is a name for the unit of its values; `kappa` above 0 asks for the side query in its general form. (The form
    for last touch is not offered: with the standard's priorities an earlier epoch may hold the touch that counts.)
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
        """The conversion to run, or the standard's error, checked in the standard's order."""
        service = limits.known_service(word("aggregation_service", self.aggregation_service))
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
            own_site_is_free=limits.own_site is OwnSite.CHARGED,
        )


@dataclass(frozen=True, slots=True)
class AttributionRequest:
    """The paper's attribution request, with the querier's own relevance test and attribution function.

    `value` caps the report's 1-norm; the report's sensitivity follows from it (Theorem 18), and `query_sensitivity`
    must cover it. `function` sees impressions of other sites only, and what it answers is clipped.
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
        """The conversion to run, or a RangeError that says what to change."""
        service = limits.known_service(word("aggregation_service", self.aggregation_service))
        epsilon = check_epsilon(self.epsilon)
        epochs = tuple(sorted(set(wholes("epochs", self.epochs, MAX_EPOCHS, I32))))
        if not epochs or epochs[-1] - epochs[0] >= MAX_EPOCHS:
            raise RangeError(f"a request names 1 to {MAX_EPOCHS} epochs, all within {MAX_EPOCHS} of each other")
        buckets = whole("buckets", self.buckets, 1, limits.max_histogram_size)
        value = whole("value", self.value, 1, MAX_SENSITIVITY)
        covered = whole("query_sensitivity", self.query_sensitivity, 1, MAX_SENSITIVITY)
        sensitivity = report_sensitivity(value, buckets, len(epochs))
        if sensitivity > covered:
            raise RangeError(
                f"the report's sensitivity {sensitivity} must be at most query_sensitivity ({covered})",
                "Twice the value cap for several buckets and epochs, the value cap for one of either (Theorem 18).",
            )
        side_query = None if self.side_query is None else SideQuery.checked(self.side_query)
        function = self._function(side_query, limits)
        return Conversion(
            site=site,
            caller=caller,
            service=service,
            loss_terms=LossTerms(epsilon, floor_micros(epsilon), covered, side_query.kappa if side_query else 0),
            buckets=buckets,
            value=value,
            function=function,
            # One that is not ours draws its own.
            coins=len(function.credit) - 1 if type(function) is LastNTouch else 0,
            unit=word("unit", self.unit),
            epochs=epochs,
            match_values=frozenset(wholes("match_values", self.match_values, limits.max_match_values, U32)),
            relevant=self.relevant,
            side_query=side_query,
            hides_own_site=True,
        )

    def _function(self, side_query: SideQuery | None, limits: DeviceLimits) -> AttributionFunction:
        """The attribution function, if it goes with the other functions. One of ours is made of numbers of ours."""
        function = self.function
        if not callable(function) or not (self.relevant is None or callable(self.relevant)):
            raise RangeError("the attribution function and the relevance test must be functions")
        form = None if side_query is None else side_query.form
        if form is SideQueryForm.ANY:
            raise RangeError("the side query of the form ANY is for labels of impressions", "Use the form GENERAL.")
        if form is SideQueryForm.LAST_TOUCH and type(function) is not LastTouch:
            raise RangeError("the last-touch side query is sound for last-touch attribution only (Theorem 16)")
        return last_n_touch(function.credit, limits) if type(function) is LastNTouch else function


def last_n_touch(credit: object, limits: DeviceLimits) -> LastNTouch:
    """Of plain numbers: an entry, or a list, of a class of its own would see how many impressions there are."""
    shares = entries("credit", credit, limits.max_credit_size)
    return LastNTouch(tuple(real("credit", share) for share in shares))


def check_epsilon(epsilon: object) -> float:
    """ε as a double within the standard's range, or its error. NaN and infinities are refused."""
    number = real("epsilon", epsilon)
    if not 0 < number <= MAX_EPSILON:
        raise RangeError(f"epsilon must be above 0 and at most {MAX_EPSILON}, not {number}")
    return number


def floor_micros(epsilon: float) -> int:
    """⌊ε·10⁶⌋ for the header, exactly."""
    return math.floor(Fraction(epsilon) * MICROS)


def _read(
    store: Store, selection: Selection, need: Need, calendar: EpochCalendar, epochs: Collection[int]
) -> Mapping[int, Sequence[Impression]]:
    """As many of the selected impressions of `epochs` as are needed, by epoch."""
    found: dict[int, list[Impression]] = {}
    for run in _runs(epochs):
        since = max(selection.since, calendar.first_second(run[0]))
        part = replace(selection, since=since, until=calendar.first_second(run[-1] + 1))
        for impression in store.matching(part, need):
            found.setdefault(calendar.index(impression.time), []).append(impression)
    return found


def _runs(epochs: Iterable[int]) -> Iterator[Sequence[int]]:
    """Epochs that follow one another, together; earliest first."""
    run: list[int] = []
    for epoch in sorted(epochs):
        if run and epoch != run[-1] + 1:
            yield run
            run = []
        run.append(epoch)
    if run:
        yield run


def _passes(test: Callable[[Impression], bool], impression: Impression) -> bool:
    """The querier's own test, impression by impression. One that fails finds nothing: an error would tell what it saw.

    It must not take other impressions with it: then one epoch would decide what another is charged for.
    """
    try:
        return bool(test(impression))
    except KeyboardInterrupt:
        raise
    except BaseException:
        return False

"""Conversions: what a querier asks of a device, in the standard's words or the paper's, checked before anything runs.

`ConversionOptions` is the W3C call; `AttributionRequest` is the paper's general request (§3.3). Both become the same
`Conversion`, so there is one engine, one charge and one path.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from device import errors
from device.attribution import AttributionFunction, LastNTouch, LastTouch, is_ours, most_buckets
from device.epoch import EpochCalendar
from device.errors import RangeError
from device.impression import ANY_DAYS, I32, U32, Impression, Selection, parse_sites
from device.limits import MAX_EPOCHS, DeviceLimits, OwnSite
from device.option import entries, real, whole, wholes, word
from device.privacy_loss import LossTerms, report_sensitivity
from device.side_query import SideQuery, SideQueryForm
from protocol.epsilon import MAX_EPSILON, MAX_SENSITIVITY, MICROS
from protocol.seconds import DAY
from protocol.shape import MAX_SPREAD


@dataclass(frozen=True, slots=True)
class Conversion:
    """A checked request, for one querier. `site` pays, also when an intermediary (`caller`) asks.

    The window is either `lookback` seconds before the conversion or the named `epochs`.
    """

    site: str
    caller: str
    loss_terms: LossTerms
    buckets: int
    value: int
    function: AttributionFunction
    coins: int
    unit: str
    lookback: int | None = None
    epochs: tuple[int, ...] = ()
    match_values: frozenset[int] = frozenset()
    impression_sites: frozenset[str] = frozenset()
    impression_callers: frozenset[str] = frozenset()
    relevant: Callable[[Impression], bool] | None = None
    side_query: SideQuery | None = None
    # What the standard charges for a full report; None lets Theorem 18 decide by buckets and epochs.
    fixed_sensitivity: int | None = None
    # The querier's own events stay hidden from the functions it supplies; the standard has no such functions.
    hides_own_site: bool = False
    # The largest value of any conversion in the query, which helpers check; 0 stands for the query's sensitivity.
    max_value: int = 0
    # Impressions on the querier's own site cost nothing and are always counted; others are charged for what they add.
    own_site_is_free: bool = False

    @property
    def cap(self) -> int:
        """What helpers let this report add to the answer at most: a constant of the query, never this value."""
        return self.max_value or self.loss_terms.query_sensitivity

    @property
    def spread(self) -> int:
        """In how many buckets the histogram may lie, from function and request alone, never from what it gives."""
        return min(most_buckets(self.function), self.buckets, self.cap, MAX_SPREAD)

    @property
    def brings_functions(self) -> bool:
        """Whether code of the querier's own is to look at impressions."""
        return self.relevant is not None or not is_ours(self.function)

    @property
    def kappa(self) -> int:
        """κ, or 0 without a side query."""
        return self.side_query.kappa if self.side_query else 0

    def window(self, calendar: EpochCalendar, now: int) -> Sequence[int]:
        """The epochs that are asked for, earliest first."""
        return self.epochs if self.lookback is None else calendar.window(now - self.lookback, now)

    def sensitivity(self, window: Sequence[int]) -> int:
        """Δ(ρ) of this report over `window`."""
        if self.fixed_sensitivity is not None:
            return self.fixed_sensitivity
        return report_sensitivity(self.value, self.buckets, len(window))

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
        if word("aggregation_service", self.aggregation_service) not in limits.aggregation_services:
            raise errors.ReferenceError(f"this device knows no aggregation service {self.aggregation_service!r}")
        epsilon = check_epsilon(self.epsilon)
        buckets = whole("histogram_size", self.histogram_size, 1, limits.max_histogram_size)
        max_value = whole("max_value", self.max_value, 1, U32[-1])
        value = whole("value", self.value, 1, max_value)
        function = self._last_n_touch(limits)
        longest = limits.max_lookback_days
        lookback = longest if self.lookback_days is None else whole("lookback_days", self.lookback_days, 1, ANY_DAYS)
        match_values = wholes("match_values", self.match_values, limits.max_match_values, U32)
        kappa = whole("kappa", self.kappa, 0, MAX_SENSITIVITY)
        return Conversion(
            site=site,
            caller=caller,
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

    def _last_n_touch(self, limits: DeviceLimits) -> LastNTouch:
        credit = entries("credit", self.credit, limits.max_credit_size)
        return LastNTouch(tuple(real("credit", share) for share in credit))


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

    def checked(self, site: str, caller: str, limits: DeviceLimits) -> Conversion:
        """The conversion to run, or a RangeError that says what to change."""
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
        self._check_functions()
        side_query = self.side_query.checked() if self.side_query else None
        return Conversion(
            site=site,
            caller=caller,
            loss_terms=LossTerms(epsilon, floor_micros(epsilon), covered, side_query.kappa if side_query else 0),
            buckets=buckets,
            value=value,
            function=self.function,
            coins=self._coins(limits),
            unit=word("unit", self.unit),
            epochs=epochs,
            match_values=frozenset(wholes("match_values", self.match_values, limits.max_match_values, U32)),
            relevant=self.relevant,
            side_query=side_query,
            hides_own_site=True,
        )

    def _check_functions(self) -> None:
        if not callable(self.function) or not (self.relevant is None or callable(self.relevant)):
            raise RangeError("the attribution function and the relevance test must be functions")
        if self._last_touch_form() and type(self.function) is not LastTouch:
            raise RangeError("the last-touch side query is sound for last-touch attribution only (Theorem 16)")

    def _coins(self, limits: DeviceLimits) -> int:
        """How many coins the function needs. One that is not ours draws its own."""
        if type(self.function) is not LastNTouch:
            return 0
        return len(entries("credit", self.function.credit, limits.max_credit_size)) - 1

    def _last_touch_form(self) -> bool:
        return self.side_query is not None and self.side_query.form is SideQueryForm.LAST_TOUCH


def check_epsilon(epsilon: object) -> float:
    """ε as a double within the standard's range, or its error. NaN and infinities are refused."""
    number = real("epsilon", epsilon)
    if not 0 < number <= MAX_EPSILON:
        raise RangeError(f"epsilon must be above 0 and at most {MAX_EPSILON}, not {number}")
    return number


def floor_micros(epsilon: float) -> int:
    """⌊ε·10⁶⌋ for the header, exactly."""
    return math.floor(Fraction(epsilon) * MICROS)

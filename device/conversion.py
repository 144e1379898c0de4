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
from device.attribution import AttributionFunction, LastNTouch, LastTouch
from device.epoch import DAY, EpochCalendar
from device.errors import RangeError
from device.impression import U32, Impression, Selection, parse_sites
from device.limits import DeviceLimits
from device.privacy_loss import LossTerms, report_sensitivity
from device.side_query import SideQuery, SideQueryForm
from protocol.epsilon import MAX_EPSILON, MAX_SENSITIVITY, MICROS

# More epochs than any device keeps; a bound so that a request cannot make one work for hours.
MAX_EPOCHS = 1000


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
    """What a site passes to `measure_conversion`, as the standard has it, and a name for the unit of its values."""

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

    def checked(self, site: str, caller: str, limits: DeviceLimits) -> Conversion:
        """The conversion to run, or the standard's error, checked in the standard's order."""
        if self.aggregation_service not in limits.aggregation_services:
            raise errors.ReferenceError(f"this device knows no aggregation service {self.aggregation_service!r}")
        epsilon_micros = check_epsilon(self.epsilon)
        if not 0 < self.histogram_size <= limits.max_histogram_size:
            raise RangeError(f"histogram_size must be 1 to {limits.max_histogram_size}, not {self.histogram_size}")
        if self.max_value not in U32 or not 0 < self.value <= self.max_value:
            raise RangeError(f"value must be 1 to max_value ({self.max_value}), not {self.value}")
        function = self._last_n_touch(limits)
        lookback = limits.max_lookback_days if self.lookback_days is None else self.lookback_days
        if lookback <= 0:
            raise RangeError(f"lookback_days must be at least 1, not {lookback}")
        if len(self.match_values) > limits.max_match_values or not all(value in U32 for value in self.match_values):
            raise RangeError(f"match_values must be at most {limits.max_match_values} numbers of 32 bits")
        return Conversion(
            site=site,
            caller=caller,
            # Noise of scale 2·max_value/ε, and 2·value of it for a full report: Theorem 18's factor on both sides.
            loss_terms=LossTerms(self.epsilon, epsilon_micros, 2 * self.max_value),
            fixed_sensitivity=2 * self.value,
            buckets=self.histogram_size,
            value=self.value,
            function=function,
            coins=len(function.credit) - 1,
            unit=self.unit,
            lookback=min(lookback, limits.max_lookback_days) * DAY,
            match_values=frozenset(self.match_values),
            impression_sites=parse_sites("impression_sites", self.impression_sites, limits.max_impression_sites),
            impression_callers=parse_sites(
                "impression_callers", self.impression_callers, limits.max_impression_callers
            ),
        )

    def _last_n_touch(self, limits: DeviceLimits) -> LastNTouch:
        if len(self.credit) > limits.max_credit_size:
            raise RangeError(f"credit has {len(self.credit)} entries; this device allows {limits.max_credit_size}")
        return LastNTouch(tuple(self.credit))


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
        epsilon_micros = check_epsilon(self.epsilon)
        epochs = tuple(sorted(set(self.epochs)))
        if not 0 < len(epochs) <= MAX_EPOCHS or epochs[-1] - epochs[0] >= MAX_EPOCHS:
            raise RangeError(f"a request names 1 to {MAX_EPOCHS} epochs, all within {MAX_EPOCHS} of each other")
        if not 0 < self.buckets <= limits.max_histogram_size:
            raise RangeError(f"buckets must be 1 to {limits.max_histogram_size}, not {self.buckets}")
        sensitivity = report_sensitivity(self.value, self.buckets, len(epochs))
        if not 0 < sensitivity <= self.query_sensitivity <= MAX_SENSITIVITY:
            raise RangeError(
                f"the report's sensitivity {sensitivity} must be 1 to query_sensitivity ({self.query_sensitivity})",
                "Twice the value cap for several buckets and epochs, the value cap for one of either (Theorem 18).",
            )
        if self._last_touch_form() and not isinstance(self.function, LastTouch):
            raise RangeError("the last-touch side query is sound for last-touch attribution only (Theorem 16)")
        kappa = self.side_query.kappa if self.side_query else 0
        return Conversion(
            site=site,
            caller=caller,
            loss_terms=LossTerms(self.epsilon, epsilon_micros, self.query_sensitivity, kappa),
            buckets=self.buckets,
            value=self.value,
            function=self.function,
            coins=len(self.function.credit) - 1 if isinstance(self.function, LastNTouch) else 0,
            unit=self.unit,
            epochs=epochs,
            match_values=frozenset(self.match_values),
            relevant=self.relevant,
            side_query=self.side_query,
            hides_own_site=True,
        )

    def _last_touch_form(self) -> bool:
        return self.side_query is not None and self.side_query.form is SideQueryForm.LAST_TOUCH


def check_epsilon(epsilon: float) -> int:
    """⌊ε·10⁶⌋ for the header, exactly; or the standard's error. NaN and infinities are refused."""
    # Written so that NaN, for which every comparison is false, fails.
    if not (0 < epsilon <= MAX_EPSILON):
        raise RangeError(f"epsilon must be above 0 and at most {MAX_EPSILON}, not {epsilon}")
    return math.floor(Fraction(epsilon) * MICROS)

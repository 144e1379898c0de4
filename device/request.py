"""Checked requests: what the engine needs to know of a request, whichever side asks, and what *Match* returns for it.

A `Conversion` is requested by the site on which it happened, about impressions on other sites. A `Labelling` is
requested by the site that showed an impression, about conversions on other sites. Both run on one engine and pay by one
rule.

Either may have a bias side query: a flag, worth κ, that says a report may be missing something (paper §3.4, App. F). It
travels as one more bucket, so the querier learns only a noisy count of reports that may be biased; what that count
bounds is the querier's part (`protocol.querier.result`). The flag follows from which epochs could pay, never from data
alone. Closed epochs pay nothing and are left out: a flag for them would reveal in every report, for no charge, that the
person cleared their history.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar, assert_never

from device.attribution import AttributionFunction, most_buckets
from device.budget import FilterKind, LossTerms, report_sensitivity
from device.epoch import EpochCalendar
from device.errors import RangeError
from device.limits import TREFOIL_SERVICE
from device.option import whole
from device.stores.storage import Side, Store
from device.weeks import Reach
from protocol.errors import ErrorKind
from protocol.shape import MAX_SPREAD
from protocol.units import MAX_SENSITIVITY


class SideQueryForm(Enum):
    """Which reports are flagged: if any epoch could not pay (`GENERAL`), or only if that epoch could have mattered.

    `LAST_TOUCH`: no later epoch that paid holds the last touch. `ANY`, for labels: no epoch that paid has an event.
    """

    GENERAL = "general"
    LAST_TOUCH = "last touch"
    ANY = "any"


@dataclass(frozen=True, slots=True)
class SideQuery:
    """A request for the flag. A larger κ makes the count sharper and costs more budget."""

    kappa: int
    form: SideQueryForm = SideQueryForm.GENERAL

    def __post_init__(self) -> None:
        object.__setattr__(self, "kappa", whole("κ", self.kappa, 1, MAX_SENSITIVITY))
        if type(self.form) is not SideQueryForm:
            raise RangeError("the form of a side query is a SideQueryForm", kind=ErrorKind.WRONG_TYPE)

    @staticmethod
    def checked(requested: object) -> SideQuery:
        """Return the same side query as an object of this very class, so that the engine computes its flag.

        A static method: an instance method could be one that the querier has overridden.
        """
        if not isinstance(requested, SideQuery):
            raise RangeError("side_query must be a SideQuery", kind=ErrorKind.WRONG_TYPE)
        return SideQuery(requested.kappa, requested.form)

    def flag(self, epochs: Collection[int], paid: Collection[int], relevant: Collection[int]) -> int:
        """Return κ or 0. `paid` are the epochs that could pay; `relevant` those of them that have relevant events."""
        unpaid = [epoch for epoch in epochs if epoch not in paid]
        match self.form:
            case SideQueryForm.GENERAL:
                # Theorem 15: any epoch that was dropped may have held something.
                biased = bool(unpaid)
            case SideQueryForm.LAST_TOUCH:
                # Theorem 16: a dropped epoch changes nothing if a later one that paid holds the last touch.
                last_touch = max(relevant, default=None)
                biased = any(last_touch is None or epoch > last_touch for epoch in unpaid)
            case SideQueryForm.ANY:
                # A label is 1 if any epoch that paid holds a conversion: then a dropped one cannot have changed it.
                biased = bool(unpaid) and not relevant
            case _:
                assert_never(self.form)
        return self.kappa if biased else 0


# By epoch: impressions or conversions, depending on the request.
Events = Mapping[int, Sequence[Any]]
Read = Callable[[Collection[int]], Events]


def _no_events(_: Collection[int]) -> Events:
    return {}


@dataclass(frozen=True, slots=True, repr=False)
class Match:
    """The result of *Match*: the sites of relevant events, by epoch, and how to read the events of some epochs.

    The reader works inside the store's transaction only.
    """

    reach: Reach
    sites: Mapping[int, Collection[str]] = field(default_factory=dict)
    read: Read = _no_events
    # Epochs that were withheld from the querier's own functions, because they could not have paid the worst case.
    withheld: Collection[int] = ()

    @property
    def relevant(self) -> Events:
        """Return the events of all matching epochs."""
        return self.read(self.sites)


# Given epochs with the sites of their events, returns those that could not pay the worst case.
CannotPay = Callable[[Mapping[int, Collection[str]]], Collection[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedRequest(ABC):
    """A checked request of one querier. `site` pays, also when an intermediary (`caller`) calls.

    `quota` is the kind of filter that the sites of matching events have, beside the querier's own and everyone's.
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
    # The service whose helpers the report is sealed to. It decides nothing else: all services cost the same.
    service: str = TREFOIL_SERVICE

    @property
    def cap(self) -> int:
        """Return the most that helpers let this report add to the answer: a constant of the query, never its value."""
        return self.max_value or self.loss_terms.query_sensitivity

    @property
    def spread(self) -> int:
        """Return in how many buckets the histogram may lie: from function and request alone, never from its output."""
        return min(most_buckets(self.function), self.buckets, self.cap, MAX_SPREAD)

    @property
    def kappa(self) -> int:
        """Return κ, or 0 without a side query."""
        return self.side_query.kappa if self.side_query else 0

    @property
    def brings_functions(self) -> bool:
        """Return whether the querier's own code sees events."""
        return False

    def untested(self) -> CheckedRequest:
        """Return the same request without the querier's own test of relevance."""
        return self

    @abstractmethod
    def window(self, calendar: EpochCalendar, now: int) -> Sequence[int]:
        """Return the requested epochs, earliest first."""

    @abstractmethod
    def match(self, store: Store, reach: Reach, now: int, cannot_pay: CannotPay) -> Match:
        """Return the relevant events of the usable epochs, at least one. Run inside the store's transaction."""

    def sensitivity(self, window: Sequence[int]) -> int:
        """Return Δ(ρ) of this report over `window`."""
        if self.fixed_sensitivity is not None:
            return self.fixed_sensitivity
        return report_sensitivity(self.value, self.buckets, len(window))

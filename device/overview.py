"""The overview: everything a person may know about their own device at one moment. It never leaves the device.

`shortfall` explains a null report that no week could pay for. To a site such a report looks like any other; to the
person who runs a device or a demonstration, a table of zeros without an explanation would look like a fault.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from device.budget import FilterKind, FilterState
from device.epoch import EpochCalendar
from device.events import SavedConversion, SavedImpression
from device.limits import DeviceLimits
from device.request import CheckedRequest
from device.stores.storage import EpochOutcome, ReportRecord
from protocol.units import show


@dataclass(frozen=True, slots=True)
class Overview:
    """One device at `now`. Without a calendar no conversion was ever measured, and no filter has paid anything.

    `barrier` is the moment up to whose epoch nothing is usable any more.
    """

    now: int
    enabled: bool
    debug: bool
    limits: DeviceLimits
    calendar: EpochCalendar | None
    barrier: int | None
    filters: Sequence[FilterState]
    reports: Sequence[ReportRecord]
    impressions: Sequence[SavedImpression]
    conversions: Sequence[SavedConversion] = ()

    def remaining(self, site: str, epoch: int) -> int:
        """Return what `epoch` still has for the querier `site`, in micro-epsilons."""
        own = (FilterKind.SITE, site, epoch)
        spent = (state.remaining for state in self.filters if (state.kind, state.site, state.epoch) == own)
        return min(spent, default=self.limits.site_budget)


def lacked_budget(record: ReportRecord) -> bool:
    """Return whether some week of the request could not pay, and none that had relevant events could."""
    outcomes = {entry.outcome for entry in record.epochs}
    return EpochOutcome.OUT_OF_BUDGET in outcomes and EpochOutcome.PAID not in outcomes


def shortfall(conversion: CheckedRequest, overview: Overview) -> str | None:
    """Explain why the report just made for `conversion` is null, or return None if some week has enough left for it."""
    record = next((one for one in reversed(overview.reports) if one.site == conversion.site), None)
    if record is None or not record.epochs:
        return None
    outcomes = {entry.outcome for entry in record.epochs}
    if EpochOutcome.PAID in outcomes or EpochOutcome.NOT_MEASURED in outcomes:
        return None
    price, left = _price(conversion, len(record.epochs)), _most_remaining(conversion.site, record, overview)
    request = f"this report is null: it asks for ε = {show(price)} of every week with a relevant impression"
    if price > left:
        return f"{request}, and no week has more than {show(left)} left for {conversion.site}"
    if lacked_budget(record):
        return f"{request}, and none of these weeks has that much left in all of its budgets"
    return None


def _price(conversion: CheckedRequest, weeks: int) -> int:
    """Return what a week with an impression owes the querier's filter for a full report (Theorem 4, cases 2 and 3)."""
    full = conversion.value if weeks == 1 else conversion.sensitivity(range(weeks))
    return conversion.loss_terms.loss(full + conversion.kappa)


def _most_remaining(site: str, record: ReportRecord, overview: Overview) -> int:
    """Return the most that one week of the request still has for `site`. Closed weeks have nothing."""
    usable = [entry.epoch for entry in record.epochs if entry.outcome is not EpochOutcome.CLOSED]
    return max((overview.remaining(site, epoch) for epoch in usable), default=0)

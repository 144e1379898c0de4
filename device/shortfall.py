"""Shortfall: what to tell a person whose report is null because no week could pay for it. It never leaves the device.

To a site such a report looks like any other. To whoever runs a device or a demonstration, a table of zeros without a
word would look like a fault.
"""

from __future__ import annotations

from collections.abc import Collection

from device.checked_request import CheckedRequest
from device.overview import Overview
from device.privacy_filter import FilterKind, FilterState
from device.storage import EpochOutcome, ReportRecord
from protocol.epsilon import show


def lacked_budget(record: ReportRecord) -> bool:
    """Whether some week of the request held what was asked for, and none that did could pay."""
    outcomes = {entry.outcome for entry in record.epochs}
    return EpochOutcome.OUT_OF_BUDGET in outcomes and EpochOutcome.PAID not in outcomes


def shortfall(conversion: CheckedRequest, overview: Overview) -> str | None:
    """What to say about the report just made for `conversion`, or None if some week has enough left for it."""
    record = next((one for one in reversed(overview.reports) if one.site == conversion.site), None)
    if record is None or not record.epochs:
        return None
    outcomes = {entry.outcome for entry in record.epochs}
    if EpochOutcome.PAID in outcomes or EpochOutcome.NOT_MEASURED in outcomes:
        return None
    asked, left = _asked(conversion, len(record.epochs)), _most_left(conversion.site, record, overview)
    request = f"this report is null: it asks for ε = {show(asked)} of every week with a relevant impression"
    if asked > left:
        return f"{request}, and no week has more than {show(left)} left for {conversion.site}"
    if lacked_budget(record):
        return f"{request}, and none of these weeks has that much left in all of its budgets"
    return None


def _asked(conversion: CheckedRequest, weeks: int) -> int:
    """What a week with an impression owes to the querier's own filter for a full report (Theorem 4, cases 2 and 3)."""
    full = conversion.value if weeks == 1 else conversion.sensitivity(range(weeks))
    return conversion.loss_terms.loss(full + conversion.kappa)


def _most_left(site: str, record: ReportRecord, overview: Overview) -> int:
    """The most that one week of the request still has for `site`. Closed weeks have nothing."""
    usable = [entry.epoch for entry in record.epochs if entry.outcome is not EpochOutcome.CLOSED]
    return max((_left(site, epoch, overview.filters, overview.limits.site_budget) for epoch in usable), default=0)


def _left(site: str, epoch: int, filters: Collection[FilterState], capacity: int) -> int:
    own = (one for one in filters if one.kind is FilterKind.SITE and one.site == site and one.epoch == epoch)
    return min((one.remaining for one in own), default=capacity)

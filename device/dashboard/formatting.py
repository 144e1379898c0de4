"""Format a device's numbers for its person: amounts of ε, what a spent budget means, times and weeks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime, tzinfo
from typing import assert_never

from device.budget import FilterKind
from device.dashboard.markup import Markup, tag
from device.epoch import EpochCalendar
from device.overview import Overview
from device.stores.storage import EpochEntry, EpochOutcome
from protocol.units import DAY, MICROS, show


def epsilon(micros: int) -> str:
    return f"{show(micros)} ε"


def plural(count: int, one: str, many: str | None = None) -> str:
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def odds_factor(micros: int) -> str:
    """Return e^ε rounded up, the factor by which ε can move the odds of a guess. For display only."""
    return f"×{math.ceil(math.exp(min(micros / MICROS, 20)) * 100) / 100:,.2f}"


def guess_probability(micros: int) -> str:
    """Return e^ε/(1 + e^ε) rounded up, the probability that a guess with even odds can reach. For display only."""
    odds = math.exp(min(micros / MICROS, 20))
    return f"{math.ceil(1000 * odds / (1 + odds)) / 10:g} %"


def describe_usage(spent: int, capacity: int) -> str:
    """Describe how far one filter of one epoch is spent."""
    if spent <= 0:
        return "untouched"
    if spent >= capacity:
        return "nothing left: from this week come empty reports only, and no site can tell"
    share = round(100 * spent / capacity) or "less than 1"
    return f"{share} % used; by itself this moved the odds of any guess about this week by at most {odds_factor(spent)}"


# What each kind of filter bounds.
FILTER_MEANINGS = {
    FilterKind.SITE: "What this site may learn",
    FilterKind.GLOBAL: "What all sites together may learn",
    FilterKind.IMPRESSION_SITE: "What may be learnt from ads this site showed",
    FilterKind.ADVERTISER: "What publishers may learn from conversions on this site",
    FilterKind.SIDE_QUERY: "What all sites together may spend on asking how many reports were empty",
}


def describe_outcome(entry: EpochEntry) -> str:
    """Describe what one epoch paid for one report, or why it paid nothing."""
    match entry.outcome:
        case EpochOutcome.PAID:
            return epsilon(entry.paid)
        case EpochOutcome.NOTHING_FOUND:
            return f"{epsilon(entry.paid)}, though no ad matched" if entry.paid else "nothing, as no ad matched"
        case EpochOutcome.OUT_OF_BUDGET:
            return "nothing, as the budget is used up"
        case EpochOutcome.CLOSED:
            return "nothing, as the past is closed"
        case EpochOutcome.NOT_MEASURED:
            return "nothing, as measurement was off"
        case EpochOutcome.FAULT:
            reason = "as something went wrong"
            return f"{epsilon(entry.paid)} for an empty report, {reason}" if entry.paid else f"nothing, {reason}"
        case _:
            assert_never(entry.outcome)


def describe_cost(entries: Sequence[EpochEntry]) -> str:
    """Describe the cost of one report in one line."""
    if paid := [entry.paid for entry in entries if entry.paid]:
        # Charges of different weeks are not added up: each week has its own budget.
        each = epsilon(max(paid)) if len(set(paid)) == 1 else f"up to {epsilon(max(paid))}"
        cost = f"{each} in {'one week' if len(paid) == 1 else f'each of {len(paid)} weeks'}"
        exhausted = sum(entry.outcome is EpochOutcome.OUT_OF_BUDGET for entry in entries)
        return f"{cost}; {plural(exhausted, 'week')} had too little left and added nothing" if exhausted else cost
    outcomes = {entry.outcome for entry in entries}
    if EpochOutcome.NOT_MEASURED in outcomes:
        return "Nothing. Measurement was off: an empty report"
    if EpochOutcome.OUT_OF_BUDGET in outcomes:
        return "Nothing. The budget is used up: an empty report"
    if EpochOutcome.FAULT in outcomes:
        return "Nothing. Something went wrong: an empty report"
    if outcomes == {EpochOutcome.CLOSED}:
        return "Nothing. All of these weeks are closed: an empty report"
    return "Nothing. No stored ad matched: an empty report"


class LocalTime:
    """Formats times in the person's own time zone."""

    def __init__(self, zone: tzinfo | None = None) -> None:
        self._zone = zone

    def _local(self, moment: int) -> datetime:
        return datetime.fromtimestamp(moment, UTC).astimezone(self._zone)

    def moment(self, moment: int) -> Markup:
        local = self._local(moment)
        return tag("time", f"{local.day} {local:%b %Y, %H:%M}", datetime=local.isoformat())

    def day(self, moment: int) -> str:
        local = self._local(moment)
        return f"{local.day} {local:%b}"

    def week(self, calendar: EpochCalendar, epoch: int, now: int) -> str:
        """Return the days of an epoch, with a mark if it is the current one."""
        first = calendar.first_second(epoch)
        name = f"{self.day(first)} to {self.day(first + calendar.length)}"
        return f"{name} (now)" if calendar.index(now) == epoch else name

    def zone_name(self, moment: int) -> str:
        return self._local(moment).tzname() or "local time"


def describe_barrier(overview: Overview, times: LocalTime) -> str:
    """Return since when the device has a record, or nothing if no week within its reach is closed."""
    barrier = overview.barrier
    # What lies further back than any request may look is closed on every device, and is no news.
    if barrier is None or barrier < overview.now - overview.limits.max_lookback:
        return ""
    return (
        f"Cleared, or restored from a copy, on {times.day(barrier)}: that week and earlier ones are closed, so no site "
        "measures anything of them, and there is no record of what they cost."
    )


def describe_clearing(site: str) -> str:
    """Return what clearing a site means, on the page and on the command line."""
    return (
        f"what {site} had stored is deleted, also what others had stored for it alone, and its budgets of the weeks up "
        "to now are zero, so it measures nothing more of them"
    )


def describe_epoch_length(length: int) -> str:
    days = length // DAY
    return "week" if days == 7 else plural(days, "day")

"""Plain words for the numbers of a device: times, weeks, and what a spent budget means for the person."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime, tzinfo
from typing import assert_never

from device.dashboard.markup import Markup, tag
from device.epoch import EpochCalendar
from device.privacy_filter import FilterKind
from device.storage import EpochEntry, EpochOutcome
from protocol.epsilon import MICROS, show
from protocol.seconds import DAY


def epsilon(micros: int) -> str:
    """An amount of privacy budget."""
    return f"{show(micros)} ε"


def plural(count: int, one: str, many: str | None = None) -> str:
    """A count with its noun."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def factor(micros: int) -> str:
    """How far ε can move the odds of a guess: e^ε, rounded up. For reading only; it decides nothing."""
    return f"×{math.ceil(math.exp(min(micros / MICROS, 20)) * 100) / 100:,.2f}"


def sureness(micros: int) -> str:
    """How sure a guess can become that was as good as tossing a coin: e^ε/(1 + e^ε), rounded up. For reading only."""
    odds = math.exp(min(micros / MICROS, 20))
    return f"{math.ceil(1000 * odds / (1 + odds)) / 10:g} %"


def used(spent: int, capacity: int) -> str:
    """What has become of one filter of one epoch, in words."""
    if spent <= 0:
        return "untouched"
    if spent >= capacity:
        return "nothing left: from this week come empty reports only, and no site can tell"
    share = f"{round(100 * spent / capacity)} % used"
    return f"{share}; by itself this moved the odds of any guess about this week by at most {factor(spent)}"


def filter_words(kind: FilterKind) -> str:
    """What a kind of filter bounds."""
    match kind:
        case FilterKind.SITE:
            return "What this site may learn"
        case FilterKind.GLOBAL:
            return "What all sites together may learn"
        case FilterKind.IMPRESSION_SITE:
            return "What may be learnt from ads this site showed"
        case FilterKind.ADVERTISER:
            return "What publishers may learn from conversions on this site"
        case _:
            assert_never(kind)


def outcome_words(entry: EpochEntry) -> str:
    """What one epoch paid for one report, or why it paid nothing."""
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
            wrong = "as something went wrong"
            return f"{epsilon(entry.paid)} for an empty report, {wrong}" if entry.paid else f"nothing, {wrong}"
        case _:
            assert_never(entry.outcome)


def cost_words(entries: Sequence[EpochEntry]) -> str:
    """One report in one line."""
    if paid := [entry.paid for entry in entries if entry.paid]:
        # Weeks are budgets of their own, so what they paid is not added up.
        each = epsilon(max(paid)) if len(set(paid)) == 1 else f"up to {epsilon(max(paid))}"
        told = f"{each} in {'one week' if len(paid) == 1 else f'each of {len(paid)} weeks'}"
        left_out = sum(entry.outcome is EpochOutcome.OUT_OF_BUDGET for entry in entries)
        return f"{told}; {plural(left_out, 'week')} had too little left and added nothing" if left_out else told
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


class Clockface:
    """Shows moments in the person's own time zone."""

    def __init__(self, zone: tzinfo | None = None) -> None:
        self._zone = zone

    def _local(self, moment: int) -> datetime:
        return datetime.fromtimestamp(moment, UTC).astimezone(self._zone)

    def moment(self, moment: int) -> Markup:
        """A date and time of day."""
        local = self._local(moment)
        return tag("time", f"{local.day} {local:%b %Y, %H:%M}", datetime=local.isoformat())

    def day(self, moment: int) -> str:
        """A date."""
        local = self._local(moment)
        return f"{local.day} {local:%b}"

    def week(self, calendar: EpochCalendar, epoch: int, now: int) -> str:
        """An epoch by its days; the running one says so."""
        first = calendar.first_second(epoch)
        name = f"{self.day(first)} to {self.day(first + calendar.length)}"
        return f"{name} (now)" if calendar.index(now) == epoch else name

    def zone_name(self, moment: int) -> str:
        """The zone that times are shown in."""
        return self._local(moment).tzname() or "local time"


def epoch_length_words(length: int) -> str:
    """How long an epoch lasts."""
    days = length // DAY
    return "week" if days == 7 else plural(days, "day")

"""The device: one person's impressions, what each conversion is worth, and what it costs them (paper, Listing 1).

`_report` is the whole of it on one page, whichever side asks. Its public face is W3C Attribution Level 1 in Python
names. The paper's general request runs on the same engine through `measure`; a publisher's, by `measure_impression`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import Generic, NamedTuple, TypeVar

from device.attribution import Award, attribute
from device.checked_request import CheckedRequest, Events, Read, no_events
from device.coins import DeviceCoins
from device.conversion import AttributionRequest, ConversionOptions
from device.conversion_event import ConversionEventOptions
from device.epoch import EpochCalendar, draw_start
from device.errors import DatabaseBusy, DOMException
from device.impression import ImpressionOptions, SavedImpression
from device.labelling import LabelOptions
from device.limits import DeviceLimits
from device.overview import Overview
from device.privacy_filter import (
    Charges,
    FilterKind,
    FilterOwner,
    FilterState,
    capacities,
    charges_of,
    check_and_consume,
    states,
)
from device.privacy_loss import epoch_loss
from device.report import Seal
from device.room import make_room
from device.site import parse_site
from device.storage import LOGGED_EPOCHS, EpochEntry, EpochOutcome, ReportRecord, Store
from device.tick import AtOnce, Ticker
from protocol.errors import TrefoilError

R = TypeVar("R")


class Register(Enum):
    """Who acts on a user's action is noted twice: what is saved on it must not decide what is measured on it."""

    SAVES = "saves"
    MEASUREMENTS = "measurements"


class Reach(NamedTuple):
    """What a request reaches: the epochs asked for, and those of them that may be used at all, earliest first."""

    calendar: EpochCalendar
    window: Sequence[int]
    usable: Sequence[int]
    measuring: bool


@dataclass(frozen=True, slots=True)
class Found:
    """What *Match* found: where it looked, the sites of relevant events by epoch, and how to read those."""

    reach: Reach
    sites: Mapping[int, Collection[str]]
    # The events of some epochs that the attribution function needs to see; inside the transaction only.
    read: Read
    # Epochs that the querier's own functions were not shown, because they could not have paid for it.
    hidden: Collection[int] = ()
    # The same for what the querier itself has shown, where that is free: F ∩ P, which no epoch has to pay for.
    own: Read = no_events

    @property
    def relevant(self) -> Events:
        """All of them."""
        return self.read(self.sites)


@dataclass(frozen=True, slots=True)
class Settled:
    """What *Charge* settled: what each epoch that could pay has paid to the querier's own filter, and the report's
    histogram where the charge had to know it. After a `fault` there is no report to know.
    """

    paid: Mapping[int, int]
    output: tuple[int, ...] | None
    fault: bool = False
    # What the report is if its one epoch cannot pay.
    free: tuple[int, ...] = ()


class Device(Generic[R]):
    """One person's device. `seal` decides what a report is: a SealedReport, or plain numbers in a simulation.

    Safe to use from several threads; several processes may share one database.
    """

    def __init__(
        self,
        store: Store,
        seal: Seal[R],
        *,
        clock: Callable[[], int],
        limits: DeviceLimits | None = None,
        coins: DeviceCoins | None = None,
        ticker: Ticker | None = None,
    ) -> None:
        if seal.reveals and not store.debug:
            raise TrefoilError(
                "only a debug device shows what is in its reports", "Debug is chosen when a database is created."
            )
        self._store = store
        self._seal = seal
        self._clock = clock
        self._limits = limits or DeviceLimits()
        self._capacities = capacities(self._limits)
        self._coins = coins or DeviceCoins()
        self._ticker = ticker or AtOnce()
        # Up to which moment the store was pruned, as far as this object knows.
        self._pruned: int | None = None

    def measure_conversion(
        self,
        site: str,
        options: ConversionOptions | AttributionRequest,
        *,
        intermediary: str | None = None,
        action: str | None = None,
    ) -> R:
        """A report of what led to a conversion on `site`, by the page itself or by an `intermediary` on it.

        `action` names the user's action that led here, for devices that bound how many sites may measure on one action.
        """
        return self._report(site, options, intermediary, action)

    def measure_impression(
        self, site: str, options: LabelOptions, *, intermediary: str | None = None, action: str | None = None
    ) -> R:
        """A report of whether a conversion followed an impression that `site` showed (`labelling`): the other side."""
        return self._report(site, options, intermediary, action)

    def _report(
        self,
        site: str,
        options: ConversionOptions | AttributionRequest | LabelOptions,
        intermediary: str | None,
        action: str | None,
    ) -> R:
        """Match · Charge · Attribute · Share · Seal. Always a report; errors depend on the options alone."""
        now = self._clock()
        self._check_action(action)
        request = options.checked(*_parties(site, intermediary), self._limits)
        seal = self._seal.prepare(request, now, debug=self._store.debug)
        # Drawn once: the charge must be for exactly what is reported.
        award = Award(request.value, request.buckets, [self._coins.credit() for _ in range(request.coins)])

        def page() -> tuple[int, ...]:
            with self._store.transaction():
                # Match: which epochs of the window have relevant events.
                found = self._match(request, now, action)
                # Charge: each of them pays its individual privacy loss, from all of its filters or from none.
                settled = self._charge(request, found, award)
                # Attribute: divide the value among the events of epochs that paid.
                numbers = self._attribute(request, found, settled, award)
                record = _record(request, now, found.reach, settled, {*found.sites, *found.hidden})
                self._store.log(record, self._limits.max_log_records)
            return numbers

        with self._ticker.turn((request.site, request.caller), self._limits.work_seconds) as turn:
            # The turn ends when it was going to end. What is not ready by then is charged for, and not in the report.
            numbers = turn.run(lambda: self._or_null(page, request, now, action), late=_zeros(request))
            # Share, Seal: only now, when the charge is on disk.
            return seal(numbers)

    def measure(self, site: str, request: AttributionRequest, *, intermediary: str | None = None) -> R:
        """The paper's general attribution request, for the querier `site`: the same engine, the same page."""
        return self.measure_conversion(site, request, intermediary=intermediary)

    def save_impression(
        self,
        site: str,
        options: ImpressionOptions,
        *,
        intermediary: str | None = None,
        action: str | None = None,
    ) -> None:
        """Remember an impression on `site`. Options are checked also when measurement is off; then nothing is kept."""
        now = self._clock()
        self._check_action(action)
        parties = _parties(site, intermediary)
        saved = options.saved(*parties, now, self._limits)

        def save() -> None:
            self._make_room(saved)
            self._store.save(saved)

        self._keep(save, parties, action, now)

    def save_conversion(
        self,
        site: str,
        options: ConversionEventOptions,
        *,
        intermediary: str | None = None,
        action: str | None = None,
    ) -> None:
        """Remember a conversion on `site`, for the publishers that it names. Checked, kept and answered as above."""
        now = self._clock()
        self._check_action(action)
        parties = _parties(site, intermediary)
        saved = options.saved(*parties, now, self._limits)

        def save() -> None:
            self._make_room_for_conversion(now)
            self._store.conversions.save(saved)

        self._keep(save, parties, action, now)

    def _keep(self, save: Callable[[], None], parties: tuple[str, str], action: str | None, now: int) -> None:
        """Run `save` if measurement is on and the site may still act on this action; in a turn of its own."""

        def page() -> None:
            # A site must not learn what the device holds, nor what else it is doing: if this fails, it is not told.
            with suppress(Exception), self._store.transaction():
                if self._store.enabled and self._admits(Register.SAVES, action, parties[0], now):
                    save()

        with self._ticker.turn(parties, self._limits.work_seconds) as turn:
            turn.run(page, late=None)

    def clear_impressions_for_site(self, site: str) -> None:
        """Remove what `site` has stored on this device. Budgets stay: a site cannot wash its own spending off."""
        cleared = parse_site(site)
        with self._store.transaction():
            self._store.clear_caller(cleared)

    def clear_browsing_history(self, sites: Iterable[str] = (), *, forget_visits: bool) -> None:
        """Run when the person clears their history of `sites`, or of all of them if none are named.

        With `forget_visits` their state goes, and every epoch so far is closed to everyone, since what it had paid is
        no longer known. Otherwise the sites' budgets up to now become zero and everything else stays.
        """
        now = self._clock()
        cleared = frozenset(parse_site(site) for site in sites)
        with self._store.transaction():
            if forget_visits:
                self._store.raise_barrier(max(now, self._last_payment(now)))
                self._store.forget(cleared)
            elif cleared:
                # The standard looks the earliest epoch up first, which matters if nothing has been looked up before.
                earliest = now - self._limits.max_lookback
                reachable = self._calendar(earliest).window(earliest, now)
                filters = self._store.filters_of([FilterOwner(FilterKind.SITE, site) for site in cleared])
                for epoch in reachable:
                    for ledger in filters.values():
                        ledger.empty(epoch)
                self._store.keep(filters)

    def enable(self) -> None:
        """Switch measurement on."""
        with self._store.transaction():
            self._store.set_enabled(True)

    def disable(self) -> None:
        """Switch measurement off: nothing is saved, and every report is null. No site can tell."""
        with self._store.transaction():
            self._store.set_enabled(False)

    def budget(self) -> list[FilterState]:
        """What every filter has paid, for the person's own eyes."""
        with self._store.transaction():
            return states(self._store.filters(), self._limits)

    def reports(self) -> Sequence[ReportRecord]:
        """Who asked for reports and when, oldest first, for the person's own eyes."""
        with self._store.transaction():
            return self._store.reports()

    def overview(self) -> Overview:
        """All of it at one moment, for the person's dashboard. Looking changes nothing, not even where epochs start."""
        now, limits = self._clock(), self._limits
        with self._store.transaction():
            start = self._store.epoch_start
            return Overview(
                now=now,
                enabled=self._store.enabled,
                debug=self._store.debug,
                limits=limits,
                calendar=None if start is None else EpochCalendar(start, limits.epoch_length),
                barrier=self._store.barrier,
                filters=states(self._store.filters(), limits),
                reports=self._store.reports(),
                impressions=self._store.impressions(),
                conversions=self._store.conversions.all(),
            )

    def calendar(self) -> EpochCalendar:
        """This device's epochs. Looking fixes where they start, as a first conversion does."""
        with self._store.transaction():
            return self._calendar(self._clock())

    def _or_null(
        self, page: Callable[[], tuple[int, ...]], request: CheckedRequest, now: int, action: str | None
    ) -> tuple[int, ...]:
        """What `page` gives, or a null report if it ends as nobody foresaw; if the program is being ended, the charge.

        What went wrong may have to do with what was found, so every epoch pays as if its data were to blame: for the
        worst that a report could have said. Before the transaction had begun nothing was found, and nothing is owed.
        """
        try:
            return page()
        except DatabaseBusy:
            return _zeros(request)
        except BaseException as fault:
            with suppress(Exception), self._store.transaction():
                reach = self._reach(request, now, action)
                owed = dict.fromkeys(reach.usable, self._worst(request, reach.window))
                settled = Settled(self._pay(request, owed), None, fault=True)
                self._store.log(_record(request, now, reach, settled, ()), self._limits.max_log_records)
            if not isinstance(fault, Exception):
                raise
            return _zeros(request)

    def _reach(self, request: CheckedRequest, now: int, action: str | None) -> Reach:
        """Which epochs are asked for, and which of them may be used. While measurement is off, epochs of no device."""
        if not self._store.enabled:
            calendar = EpochCalendar(now, self._limits.epoch_length)
            return Reach(calendar, request.window(calendar, now), (), measuring=False)
        calendar = self._calendar(now)
        window = request.window(calendar, now)
        if not self._admits(Register.MEASUREMENTS, action, request.site, now):
            return Reach(calendar, window, (), measuring=False)
        self._close_unreachable(calendar, now)
        return Reach(calendar, window, self._usable(calendar, window, now), measuring=True)

    def _match(self, request: CheckedRequest, now: int, action: str | None) -> Found:
        """Step 1 of Listing 1. Which epochs have relevant events, and on which sites they happened."""
        reach = self._reach(request, now, action)
        if not reach.usable:
            return Found(reach, {}, no_events)

        def unable(asked: Collection[int]) -> Collection[int]:
            worst = self._worst(request, reach.window)
            filters = self._store.filters_of(worst)
            return {epoch for epoch in asked if not check_and_consume(epoch, worst, filters, self._capacities)}

        return Found(reach, *request.match(self._store, reach.calendar, reach.usable, now, unable))

    def _charge(self, request: CheckedRequest, found: Found, award: Award) -> Settled:
        """Steps 2 and 3: check every filter of an epoch, then consume every filter of that epoch, epoch by epoch."""
        single = len(found.reach.window) == 1
        if not single:
            return Settled(self._pay(request, self._owed(request, found, None)), None)
        output = attribute(request.function, found.relevant, award)
        free = attribute(request.function, found.own(found.reach.usable), award)
        moved = sum(abs(part - without) for part, without in zip(output, free, strict=True))
        return Settled(self._pay(request, self._owed(request, found, moved)), output, free=free)

    def _pay(self, request: CheckedRequest, owed: Mapping[int, Charges]) -> Mapping[int, int]:
        """What each epoch that could pay has paid to the querier's own filter."""
        filters = self._store.filters_of({owner for charges in owed.values() for owner in charges})
        own = FilterOwner(FilterKind.SITE, request.site)
        paid = {
            epoch: charges[own]
            for epoch, charges in owed.items()
            if check_and_consume(epoch, charges, filters, self._capacities)
        }
        self._store.keep(filters)
        return paid

    def _worst(self, request: CheckedRequest, window: Sequence[int]) -> Charges:
        """What the epochs of a window owe for the worst that a report could say, whatever they hold."""
        output = request.worst_output if len(window) == 1 else None
        sensitivity = request.sensitivity(window)
        loss = epoch_loss(request.loss_terms, relevant=True, sensitivity=sensitivity, output=output)
        return charges_of(request.site, (), loss, request.quota)

    def _owed(self, request: CheckedRequest, found: Found, output: int | None) -> dict[int, Charges]:
        """What every usable epoch owes to each of its filters (Theorem 4; two cases at most in one window)."""
        sensitivity, terms = request.sensitivity(found.reach.window), request.loss_terms
        nothing = epoch_loss(terms, relevant=False, sensitivity=sensitivity, output=output)
        something = epoch_loss(terms, relevant=True, sensitivity=sensitivity, output=output)
        return {
            epoch: charges_of(
                request.site,
                found.sites.get(epoch, ()),
                something if epoch in found.sites else nothing,
                request.quota,
            )
            for epoch in found.reach.usable
            if epoch not in found.hidden and (epoch in found.sites or request.kappa)
        }

    def _attribute(self, request: CheckedRequest, found: Found, settled: Settled, award: Award) -> tuple[int, ...]:
        """Step 4. An epoch that could not pay gives exactly the report of an absent one, or of what is free in it."""
        if not found.reach.measuring:
            return _zeros(request)
        kept = [epoch for epoch in found.sites if epoch in settled.paid]
        if settled.output is not None:
            histogram = settled.output if kept else settled.free or (0,) * request.buckets
        else:
            free = found.own([epoch for epoch in found.reach.usable if epoch not in kept])
            histogram = attribute(request.function, {**free, **found.read(kept)}, award)
        if request.side_query is None:
            return histogram
        return (*histogram, request.side_query.flag(found.reach.usable, settled.paid, kept))

    def _calendar(self, now: int) -> EpochCalendar:
        """This device's epochs; the first lookup fixes where they start."""
        if self._store.epoch_start is None:
            start = draw_start(now, self._limits.epoch_length, self._coins.epoch_start())
            self._store.fix_epoch_start(start)
            return EpochCalendar(start, self._limits.epoch_length)
        return EpochCalendar(self._store.epoch_start, self._limits.epoch_length)

    def _usable(self, calendar: EpochCalendar, window: Sequence[int], now: int) -> Sequence[int]:
        """The epochs between the barrier and now. What lies below has lost its record of spending for ever."""
        barrier, current = self._store.barrier, calendar.index(now)
        closed = window[0] - 1 if barrier is None else calendar.index(barrier)
        return [epoch for epoch in window if closed < epoch <= current]

    def _last_payment(self, now: int) -> int:
        """A moment of the last epoch that paid anything, which lies after `now` if the clock was set back."""
        paid = [epoch for ledger in self._store.filters().values() for epoch, _ in ledger.entries()]
        return self._calendar(now).first_second(max(paid)) if paid else now

    def _close_unreachable(self, calendar: EpochCalendar, now: int) -> None:
        """Delete what is out of reach, behind a barrier: a clock set back must find no fresh budget."""
        first = calendar.index(now - self._limits.max_lookback)
        last_closed = calendar.first_second(first) - 1
        self._store.raise_barrier(last_closed)
        if self._pruned != last_closed and self._store.prune(first, last_closed + 1):
            self._pruned = last_closed

    def _make_room(self, saved: SavedImpression) -> None:
        """Evict what must go for `saved` to be kept. What lies behind the barrier is nobody's any more; it goes too."""
        if self._store.epoch_start is None:
            # No conversion was ever measured, and an impression must not decide where epochs begin.
            return
        calendar = EpochCalendar(self._store.epoch_start, self._limits.epoch_length)
        if self._store.barrier is not None:
            self._store.drop_impressions_before(calendar.first_second(calendar.index(self._store.barrier) + 1))
        make_room(self._store, saved, calendar, self._limits)

    def _make_room_for_conversion(self, now: int) -> None:
        """Evict within this epoch only, as for impressions. The two kinds of events never take each other's room."""
        if self._store.epoch_start is None:
            return
        calendar = EpochCalendar(self._store.epoch_start, self._limits.epoch_length)
        if self._store.barrier is not None:
            self._store.conversions.drop_before(calendar.first_second(calendar.index(self._store.barrier) + 1))
        since = calendar.first_second(calendar.index(now))
        until = since + calendar.length
        if self._store.conversions.count_between(since, until) >= self._limits.max_conversions_per_epoch:
            self._store.conversions.evict_between(since, until)

    def _admits(self, register: Register, action: str | None, site: str, now: int) -> bool:
        """Whether `site` may still act on this user action. Decided by who calls, never by what is found."""
        limit = self._limits.sites_per_action
        if limit is None or action is None:
            return True
        return self._store.admit_to_action(f"{register.value}: {action}", site, limit, now)

    def _check_action(self, action: str | None) -> None:
        """Where actions are counted, every call must name its own; checked before anything that is on or off."""
        if self._limits.sites_per_action is not None and (type(action) is not str or not action):
            raise DOMException(
                "NotAllowedError", "this device counts sites per user action, and the call comes of no action"
            )


def _parties(site: str, intermediary: str | None) -> tuple[str, str]:
    """The top-level site, which pays, and the caller: the intermediary if there is one."""
    top_level = parse_site(site)
    return top_level, top_level if intermediary is None else parse_site(intermediary)


def _zeros(request: CheckedRequest) -> tuple[int, ...]:
    return (0,) * (request.buckets + (1 if request.side_query else 0))


def _record(
    request: CheckedRequest, now: int, reach: Reach, settled: Settled, relevant: Collection[int]
) -> ReportRecord:
    """The line in the log: as long for a null report as for any other."""
    terms = request.loss_terms

    def outcome(epoch: int) -> EpochOutcome:
        """What the person is told about one epoch of a request."""
        if not reach.measuring:
            return EpochOutcome.NOT_MEASURED
        if epoch not in reach.usable:
            return EpochOutcome.CLOSED
        if settled.fault:
            return EpochOutcome.FAULT
        if epoch not in relevant and request.side_query is None:
            return EpochOutcome.NOTHING_FOUND
        return EpochOutcome.PAID if epoch in settled.paid else EpochOutcome.OUT_OF_BUDGET

    epochs = tuple(
        EpochEntry(epoch, outcome(epoch), settled.paid.get(epoch, 0)) for epoch in reach.window[-LOGGED_EPOCHS:]
    )
    asked = (terms.epsilon_micros, terms.query_sensitivity, request.site, request.caller)
    return ReportRecord(now, *asked, epochs, request.side)

"""The device: one person's impressions, what each conversion is worth, and what it costs them (paper, Listing 1).

`measure_conversion` is the whole of it on one page. Its public face is W3C Attribution Level 1 in Python names; the
paper's general request runs on the same engine through `measure`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import wraps
from typing import Concatenate, Generic, NamedTuple, ParamSpec, TypeVar

from device.attribution import Award, attribute
from device.coins import DeviceCoins
from device.conversion import AttributionRequest, Conversion, ConversionOptions
from device.epoch import EpochCalendar, draw_start
from device.errors import RangeError
from device.impression import Impression, ImpressionOptions, SavedImpression
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
from device.site import parse_site
from device.storage import LOGGED_EPOCHS, EpochEntry, EpochOutcome, ReportRecord, Store
from device.tick import no_tick
from protocol.errors import TrefoilError

R = TypeVar("R")
P = ParamSpec("P")


class Register(Enum):
    """Who acts on a user's action is noted twice: what is saved on it must not decide what is measured on it."""

    SAVES = "saves"
    MEASUREMENTS = "measurements"


class Reach(NamedTuple):
    """What a request reaches: the epochs asked for, and those of them that may be used at all."""

    calendar: EpochCalendar
    window: Sequence[int]
    usable: Collection[int]
    measuring: bool


@dataclass(frozen=True, slots=True)
class Found:
    """What *Match* found: the epochs asked for, those of them that may be used at all, and their impressions."""

    window: Sequence[int]
    usable: Collection[int]
    relevant: Mapping[int, Sequence[Impression]]
    measuring: bool


@dataclass(frozen=True, slots=True)
class Settled:
    """What *Charge* settled: what each epoch that could pay has paid to the querier's own filter, and the report's
    histogram where the charge had to know it. After a `fault` there is no report to know.
    """

    paid: Mapping[int, int]
    output: tuple[int, ...] | None
    fault: bool = False


def at_the_tick(page: Callable[Concatenate[Device[R], P], R]) -> Callable[Concatenate[Device[R], P], R]:
    """Hand out what `page` gives at the device's next tick. Errors are about the options alone, and need not wait.

    Around the page, not at its end: by the tick all that it found must be freed, which takes longer the more it was
    (22 µs after the tick for 10 impressions, 45 µs for 100, when it was not).
    """

    @wraps(page)
    def held(device: Device[R], /, *given: P.args, **named: P.kwargs) -> R:
        release = device._tick()
        report = page(device, *given, **named)
        release()
        return report

    return held


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
        tick: Callable[[], Callable[[], None]] = no_tick,
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
        self._tick = tick

    @at_the_tick
    def measure_conversion(
        self,
        site: str,
        options: ConversionOptions | AttributionRequest,
        *,
        intermediary: str | None = None,
        action: str | None = None,
    ) -> R:
        """Match · Charge · Attribute · Share · Seal. Always a report; errors depend on the options alone.

        Run for a page of `site`, by the page itself or by an `intermediary` on it. `action` names the user's action
        that led here, for devices that bound how many sites may measure on one action.
        """
        now = self._clock()
        self._check_action(action)
        conversion = options.checked(*_parties(site, intermediary), self._limits)
        seal = self._seal.prepare(conversion, now, debug=self._store.debug)
        # Drawn once: the charge must be for exactly what is reported.
        award = Award(conversion.value, conversion.buckets, [self._coins.credit() for _ in range(conversion.coins)])
        begun = False
        try:
            with self._store.transaction():
                begun = True
                # Match: the relevant impressions of every epoch in the window.
                found = self._match(conversion, now, action)
                # Charge: each epoch pays its individual privacy loss, from all of its filters or from none.
                settled = self._charge(conversion, found, award)
                # Attribute: divide the value among the impressions of epochs that paid.
                numbers = self._attribute(conversion, found, settled, award)
                self._store.log(_record(conversion, now, found, settled), self._limits.max_log_records)
        except BaseException as fault:
            numbers = self._null(conversion, now, action, fault, begun=begun)
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
        saved = options.saved(*_parties(site, intermediary), now, self._limits)
        try:
            with self._store.transaction():
                if self._store.enabled and self._admits(Register.SAVES, action, saved.impression.site, now):
                    self._make_room(saved)
                    self._store.save(saved)
        except Exception:
            # A site must not learn what the device holds, nor what else it is doing; the impression is lost.
            return

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
            )

    def calendar(self) -> EpochCalendar:
        """This device's epochs. Looking fixes where they start, as a first conversion does."""
        with self._store.transaction():
            return self._calendar(self._clock())

    def _null(
        self, conversion: Conversion, now: int, action: str | None, fault: BaseException, *, begun: bool
    ) -> tuple[int, ...]:
        """A null report for a call that nobody foresaw the end of; if the program is being ended, only the charge.

        What went wrong may have to do with what was found, so every epoch pays as if its data were to blame: for the
        worst that a report could have said. Before the transaction had begun nothing was found, and nothing is owed.
        """
        if begun:
            with suppress(Exception), self._store.transaction():
                reach = self._reach(conversion, now, action)
                owed = dict.fromkeys(reach.window, self._worst(conversion, reach.window))
                paid = self._pay(conversion, owed, reach.usable)
                nothing = Found(reach.window, reach.usable, {}, reach.measuring)
                record = _record(conversion, now, nothing, Settled(paid, None, fault=True))
                self._store.log(record, self._limits.max_log_records)
        if not isinstance(fault, Exception):
            raise fault
        return _zeros(conversion)

    def _reach(self, conversion: Conversion, now: int, action: str | None) -> Reach:
        """Which epochs are asked for, and which of them may be used. While measurement is off, epochs of no device."""
        measuring = self._store.enabled and self._admits(Register.MEASUREMENTS, action, conversion.site, now)
        calendar = self._calendar(now) if self._store.enabled else EpochCalendar(now, self._limits.epoch_length)
        if measuring:
            self._close_unreachable(calendar, now)
        window = conversion.window(calendar, now)
        usable = self._usable(calendar, window, now) if measuring else frozenset[int]()
        return Reach(calendar, window, usable, measuring)

    def _match(self, conversion: Conversion, now: int, action: str | None) -> Found:
        """Step 1 of Listing 1. While measurement is off the same work is done on epochs that nothing is kept of."""
        calendar, window, usable, measuring = self._reach(conversion, now, action)
        impressions = self._store.matching(conversion.selection(calendar, window, now))
        if conversion.relevant is not None:
            impressions = [impression for impression in impressions if _passes(conversion.relevant, impression)]
        by_epoch = _by_epoch(impressions, calendar, window)
        relevant = {epoch: found for epoch, found in by_epoch if found and epoch in usable}
        return Found(window, usable, relevant, measuring)

    def _charge(self, conversion: Conversion, found: Found, award: Award) -> Settled:
        """Steps 2 and 3: check every filter of an epoch, then consume every filter of that epoch, epoch by epoch."""
        single = len(found.window) == 1
        output = attribute(conversion.function, found.relevant, award) if single else None
        owed = self._owed(conversion, found, None if output is None else sum(output))
        return Settled(self._pay(conversion, owed, found.usable), output)

    def _pay(self, conversion: Conversion, owed: Mapping[int, Charges], usable: Collection[int]) -> Mapping[int, int]:
        """What each of the `usable` epochs that could pay has paid to the querier's own filter."""
        filters = self._store.filters_of({owner for charges in owed.values() for owner in charges})
        own = FilterOwner(FilterKind.SITE, conversion.site)
        paid = {
            epoch: charges[own]
            for epoch, charges in owed.items()
            if epoch in usable and check_and_consume(epoch, charges, filters, self._capacities)
        }
        # Written back also where nothing was paid, so that the work says little about what was found.
        self._store.keep(filters)
        return paid

    def _worst(self, conversion: Conversion, window: Sequence[int]) -> Charges:
        """What the epochs of a window owe for the worst that a report could say, whatever they hold."""
        output = conversion.value if len(window) == 1 else None
        sensitivity = conversion.sensitivity(window)
        loss = epoch_loss(conversion.loss_terms, relevant=True, sensitivity=sensitivity, output=output)
        return charges_of(conversion.site, (), loss)

    def _owed(self, conversion: Conversion, found: Found, output: int | None) -> dict[int, Charges]:
        """What every epoch of the window owes to each of its filters (Theorem 4; two cases at most in one window)."""
        sensitivity = conversion.sensitivity(found.window)
        terms = conversion.loss_terms
        nothing = epoch_loss(terms, relevant=False, sensitivity=sensitivity, output=output)
        something = epoch_loss(terms, relevant=True, sensitivity=sensitivity, output=output)
        owed = {}
        for epoch in found.window:
            sites = {impression.site for impression in found.relevant.get(epoch, ())}
            owed[epoch] = charges_of(conversion.site, sites, something if sites else nothing)
        return owed

    def _attribute(self, conversion: Conversion, found: Found, settled: Settled, award: Award) -> tuple[int, ...]:
        """Step 4. An epoch that could not pay gives exactly the report of an absent one."""
        if not found.measuring:
            return _zeros(conversion)
        kept = {epoch: impressions for epoch, impressions in found.relevant.items() if epoch in settled.paid}
        if settled.output is not None:
            histogram = settled.output if kept else (0,) * conversion.buckets
        else:
            histogram = attribute(conversion.function, kept, award)
        if conversion.side_query is None:
            return histogram
        return (*histogram, conversion.side_query.flag(found.usable, settled.paid, kept))

    def _calendar(self, now: int) -> EpochCalendar:
        """This device's epochs; the first lookup fixes where they start."""
        if self._store.epoch_start is None:
            start = draw_start(now, self._limits.epoch_length, self._coins.epoch_start())
            self._store.fix_epoch_start(start)
            return EpochCalendar(start, self._limits.epoch_length)
        return EpochCalendar(self._store.epoch_start, self._limits.epoch_length)

    def _usable(self, calendar: EpochCalendar, window: Sequence[int], now: int) -> Collection[int]:
        """The epochs between the barrier and now. What lies below has lost its record of spending for ever."""
        barrier, current = self._store.barrier, calendar.index(now)
        closed = window[0] - 1 if barrier is None else calendar.index(barrier)
        return {epoch for epoch in window if closed < epoch <= current}

    def _last_payment(self, now: int) -> int:
        """A moment of the last epoch that paid anything, which lies after `now` if the clock was set back."""
        paid = [epoch for ledger in self._store.filters().values() for epoch, _ in ledger.entries()]
        return self._calendar(now).first_second(max(paid)) if paid else now

    def _close_unreachable(self, calendar: EpochCalendar, now: int) -> None:
        """Once per epoch, delete what is out of reach, behind a barrier: a clock set back must find no fresh budget."""
        first = calendar.index(now - self._limits.max_lookback)
        last_closed = calendar.first_second(first) - 1
        if self._store.barrier is None or self._store.barrier < last_closed:
            self._store.raise_barrier(last_closed)
            self._store.prune(first, last_closed + 1)

    def _make_room(self, saved: SavedImpression) -> None:
        """Evict within the epoch of `saved` only: one epoch's events must not decide what is left of another's.

        A site that has its share loses its own oldest. A full epoch loses the oldest of whoever would have most. What
        lies behind the barrier is nobody's any more.
        """
        start, barrier, length = self._store.epoch_start, self._store.barrier, self._limits.epoch_length
        if start is None:
            # No conversion was ever measured, and an impression must not decide where epochs begin.
            return
        calendar = EpochCalendar(start, length)
        if barrier is not None:
            self._store.drop_impressions_before(calendar.first_second(calendar.index(barrier) + 1))
        since, site = calendar.first_second(calendar.index(saved.impression.time)), saved.impression.site
        until = since + length
        own = self._store.count_between(since, until, site)
        if own >= self._limits.max_impressions_per_site:
            self._store.evict_oldest_between(since, until, own - self._limits.max_impressions_per_site + 1, site)
        elif (surplus := self._store.count_between(since, until) - self._limits.max_impressions_per_epoch) >= 0:
            busiest = self._store.busiest_site_between(since, until)
            loses = site if own >= self._store.count_between(since, until, busiest) else busiest
            self._store.evict_oldest_between(since, until, surplus + 1, loses)

    def _admits(self, register: Register, action: str | None, site: str, now: int) -> bool:
        """Whether `site` may still act on this user action. Decided by who calls, never by what is found."""
        limit = self._limits.sites_per_action
        if limit is None or action is None:
            return True
        return self._store.admit_to_action(f"{register.value}: {action}", site, limit, now)

    def _check_action(self, action: str | None) -> None:
        """Where actions are counted, every call must name its own; checked before anything that is on or off."""
        if self._limits.sites_per_action is not None and not action:
            raise RangeError("this device bounds how many sites act on one user action, and the call names no action")


def _by_epoch(
    impressions: Sequence[Impression], calendar: EpochCalendar, window: Sequence[int]
) -> Iterator[tuple[int, Sequence[Impression]]]:
    """Cut impressions, which come by time, where epochs begin: work for every epoch, hardly any per impression."""
    times = [impression.time for impression in impressions]
    for epoch in window:
        first, last = (bisect_left(times, calendar.first_second(edge)) for edge in (epoch, epoch + 1))
        yield epoch, impressions[first:last]


def _parties(site: str, intermediary: str | None) -> tuple[str, str]:
    """The top-level site, which pays, and the caller: the intermediary if there is one."""
    top_level = parse_site(site)
    return top_level, top_level if intermediary is None else parse_site(intermediary)


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


def _zeros(conversion: Conversion) -> tuple[int, ...]:
    return (0,) * (conversion.buckets + (1 if conversion.side_query else 0))


def _record(conversion: Conversion, now: int, found: Found, settled: Settled) -> ReportRecord:
    """The line in the log: as long for a null report as for any other."""
    terms = conversion.loss_terms
    epochs = tuple(
        EpochEntry(epoch, _outcome(conversion, epoch, found, settled), settled.paid.get(epoch, 0))
        for epoch in found.window[-LOGGED_EPOCHS:]
    )
    return ReportRecord(now, terms.epsilon_micros, terms.query_sensitivity, conversion.site, conversion.caller, epochs)


def _outcome(conversion: Conversion, epoch: int, found: Found, settled: Settled) -> EpochOutcome:
    """What the person is told about one epoch of a request."""
    if not found.measuring:
        return EpochOutcome.NOT_MEASURED
    if settled.fault:
        return EpochOutcome.FAULT
    if epoch not in found.usable:
        return EpochOutcome.CLOSED
    owes = epoch in found.relevant or conversion.side_query is not None
    if owes and epoch not in settled.paid:
        return EpochOutcome.OUT_OF_BUDGET
    return EpochOutcome.PAID if owes else EpochOutcome.NOTHING_FOUND

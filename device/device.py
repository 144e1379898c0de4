"""The device: one person's impressions, what each conversion is worth, and what it costs them (paper, Listing 1).

Sites call the first half of `Device`, which is W3C Attribution Level 1 in Python names; the paper's general request
(`measure`) and a publisher's (`measure_impression`) run on the same engine. `_report` is that engine: read it and the
methods below it from top to bottom. The last part of the class is for the person, or for the browser on their behalf.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import Generic, TypeVar

from device.attribution import Award, attribute
from device.budget import (
    Charges,
    FilterKind,
    FilterOwner,
    FilterState,
    capacities,
    charges_of,
    check_and_consume,
    epoch_loss,
    states,
)
from device.conversion import AttributionRequest, ConversionOptions
from device.epoch import DeviceCoins, EpochCalendar
from device.errors import DatabaseUnavailable, DOMException
from device.events import ConversionEventOptions, ImpressionOptions, SavedConversion, SavedImpression
from device.labelling import LabelOptions
from device.limits import DeviceLimits
from device.option import check_kind
from device.overview import Overview
from device.report import Seal
from device.request import CheckedRequest, Match
from device.schedule import AtOnce, Caller, Schedule
from device.site import parse_site
from device.stores.storage import LOGGED_EPOCHS, EpochEntry, EpochOutcome, ReportRecord, Store
from device.weeks import Reach, Weeks, evict_for_conversion, evict_for_impression
from protocol.errors import ErrorKind, TrefoilError

R = TypeVar("R")
_LOG = logging.getLogger(__name__)

# Far more than any calendar needs, and far less than a file can hold: a clock beyond it is no clock.
TIMES = range(-(2**40), 2**40)


class Device(Generic[R]):
    """One person's device. `seal` decides what a report is: a SealedReport, or plain numbers in a simulation.

    Safe to use from several threads; several processes may share one database.

    >>> ann = trefoil.Device(trefoil.MemoryStore(debug=True), trefoil.PlainSeal(), clock=lambda: 1_900_000_800)
    >>> ann.save_impression("news.example", trefoil.ImpressionOptions(histogram_index=2))
    >>> purchase = trefoil.ConversionOptions(trefoil.TREFOIL_SERVICE, histogram_size=4, value=3, max_value=3)
    >>> ann.measure_conversion("shop.example", purchase)
    (0, 0, 3, 0)
    """

    def __init__(
        self,
        store: Store,
        seal: Seal[R],
        *,
        clock: Callable[[], int],
        limits: DeviceLimits | None = None,
        coins: DeviceCoins | None = None,
        schedule: Schedule | None = None,
    ) -> None:
        if seal.reveals and not store.debug:
            raise TrefoilError(
                "only a debug device shows what is in its reports",
                "Debug is chosen when a database is created.",
                kind=ErrorKind.FORBIDDEN,
            )
        self._store = store
        self._seal = seal
        self._clock = clock
        self._limits = limits or DeviceLimits()
        self._coins = coins or DeviceCoins()
        self._schedule = schedule or AtOnce()
        self._weeks = Weeks(store, self._limits, self._coins.epoch_start)
        self._capacities = capacities(self._limits)

    def measure_conversion(
        self,
        site: str,
        options: ConversionOptions | AttributionRequest,
        *,
        intermediary: str | None = None,
        action: str | None = None,
    ) -> R:
        """Return a report of what led to a conversion on `site`, for the page itself or for an `intermediary` on it.

        `action` names the user's action that led here, for devices that bound how many sites may measure on one action.
        """
        with self._call(site, intermediary, action) as call:
            check_kind(options, ConversionOptions, AttributionRequest)
            return self._report(call, options)

    def measure(self, site: str, request: AttributionRequest, *, intermediary: str | None = None) -> R:
        """Return a report for the paper's general attribution request of the querier `site`."""
        return self.measure_conversion(site, request, intermediary=intermediary)

    def measure_impression(
        self, site: str, options: LabelOptions, *, intermediary: str | None = None, action: str | None = None
    ) -> R:
        """Return a report of whether a conversion followed an impression that `site` showed (`labelling`)."""
        with self._call(site, intermediary, action) as call:
            check_kind(options, LabelOptions)
            return self._report(call, options)

    @contextmanager
    def _call(
        self,
        site: str,
        intermediary: str | None,
        action: str | None,
        *,
        saves: bool = False,
        leave: Callable[[float], None] | None = None,
    ) -> Iterator[DeviceCall]:
        """Yield the call. A save returns soon after it came, and so does an error."""
        # The arrival time comes first, so that every part of the call falls into its delay.
        came = self._schedule.now()
        leave = leave or self._schedule.wait_until
        try:
            call = DeviceCall.checked(came, self._clock(), site, intermediary, action, self._limits)
            came = self._schedule.arrival(call.who, came)
            yield replace(call, came=came)
        except Exception:
            leave(self._schedule.leaves_soon(came))
            raise
        if saves:
            leave(self._schedule.leaves_soon(came))

    def _report(self, call: DeviceCall, options: ConversionOptions | AttributionRequest | LabelOptions) -> R:
        """Match · Charge · Attribute · Share · Seal. Always return a report; errors depend on the options alone."""
        request = options.checked(call.site, call.caller, self._limits)
        # Refuse what cannot be sealed before anything is charged.
        seal = self._seal.prepare(request, call.now, debug=self._store.debug)
        # Draw the coins once: the charge must be for exactly what is reported.
        award = Award(request.value, request.buckets, [self._coins.credit() for _ in range(request.coins)])
        # The time of the answer is fixed before the work begins, and is that of the null report sealed meanwhile.
        return self._schedule.measure(
            call.who,
            call.came,
            # Share, Seal: only when the charge is durable.
            lambda: seal(self._match_charge_attribute(request, call, award)),
            fallback=lambda: seal(_zeros(request)),
        )

    def _match_charge_attribute(self, request: CheckedRequest, call: DeviceCall, award: Award) -> tuple[int, ...]:
        """Run the data-dependent steps of Listing 1 in one transaction and return the report's plain numbers.

        On an unexpected exception charge every epoch the worst case and return zeros, a null report; on `BaseException`
        charge and re-raise. A transaction that could not begin has read nothing, so nothing is owed for it. Whether it
        began decides that, never the class of the exception: a querier's function may raise any.
        """
        began = False
        try:
            with self._store.transaction():
                began, measuring = True, self._store.enabled
                # Switched off, a device does the same work, since its duration could be seen, and discards it.
                with nullcontext() if measuring else self._store.discarded():
                    # Match: which epochs of the window have relevant events.
                    match = self._match(request, call)
                    # Charge: each of them pays its individual privacy loss, from all of its filters or from none.
                    payment = self._charge(request, match, award)
                    # Attribute: divide the value among the events of epochs that paid.
                    numbers = self._attribute(request, match, payment, award)
                if not measuring:
                    match, payment, numbers = Match(self._unmeasured(request, call)), Payment({}, None), _zeros(request)
                self._store.log(_record_of(request, call.now, match, payment), self._limits.max_log_records)
            return numbers
        except BaseException as fault:
            if began:
                self._charge_worst_case(request, call)
            if not isinstance(fault, Exception):
                raise
            return _zeros(request)

    def _match(self, request: CheckedRequest, call: DeviceCall) -> Match:
        """Step 1 of Listing 1: return which usable epochs have relevant events, and on which sites these happened."""
        reach = self._reach(request, call)
        # What the querier's own functions see they could keep: nothing while measurement is off.
        if not reach.usable or (request.brings_functions and not self._store.enabled):
            return Match(reach)
        return request.match(self._store, reach, call.now, partial(self._cannot_pay, request, reach.window))

    def _reach(self, request: CheckedRequest, call: DeviceCall) -> Reach:
        """Return the requested epochs and those of them that may be used."""
        now = call.now
        calendar = self._weeks.calendar(now)
        window = request.window(calendar, now)
        if not call.is_admitted(Register.MEASUREMENTS, self._store, self._limits, calendar):
            return Reach(calendar, window, (), measuring=False)
        if self._store.enabled:
            self._weeks.close_unreachable(calendar, now)
        return Reach(calendar, window, self._weeks.usable(calendar, window, now), measuring=True)

    def _unmeasured(self, request: CheckedRequest, call: DeviceCall) -> Reach:
        """Return what a request reaches while measurement is off: nothing. Prune all the same."""
        calendar, now = self._weeks.fixed_calendar(), call.now
        if calendar is None:
            # A calendar of no device: to read its own would fix where its epochs start.
            calendar = EpochCalendar(now, self._limits.epoch_length)
        else:
            self._weeks.close_unreachable(calendar, now)
        return Reach(calendar, request.window(calendar, now), (), measuring=False)

    def _charge(self, request: CheckedRequest, match: Match, award: Award) -> Payment:
        """Steps 2 and 3: check every filter of an epoch, then consume every filter of that epoch, epoch by epoch.

        A window of one epoch pays for the report's own sum, which must be computed first.
        """
        if len(match.reach.window) > 1:
            return Payment(self._pay(request, self._owed(request, match, None)), None)
        output = attribute(request.function, match.relevant, award)
        return Payment(self._pay(request, self._owed(request, match, sum(map(abs, output)))), output)

    def _owed(self, request: CheckedRequest, match: Match, output: int | None) -> dict[int, Charges]:
        """Return what every usable epoch owes to each of its filters (Theorem 4; at most two cases in one window)."""
        sensitivity, terms = request.sensitivity(match.reach.window), request.loss_terms
        nothing = epoch_loss(terms, relevant=False, sensitivity=sensitivity, output=output)
        something = epoch_loss(terms, relevant=True, sensitivity=sensitivity, output=output)
        return {
            epoch: charges_of(
                request.site,
                match.sites.get(epoch, ()),
                something if epoch in match.sites else nothing,
                request.quota,
            )
            for epoch in match.reach.usable
            if epoch not in match.withheld and (epoch in match.sites or request.kappa)
        }

    def _pay(self, request: CheckedRequest, owed: Mapping[int, Charges]) -> Mapping[int, int]:
        """Charge every epoch that can pay all it owes. Return what each of them paid to the querier's own filter."""
        filters = self._store.filters_of({owner for charges in owed.values() for owner in charges})
        own = FilterOwner(FilterKind.SITE, request.site)
        paid = {
            epoch: charges[own]
            for epoch, charges in owed.items()
            if check_and_consume(epoch, charges, filters, self._capacities)
        }
        self._store.keep(filters)
        return paid

    def _attribute(self, request: CheckedRequest, match: Match, payment: Payment, award: Award) -> tuple[int, ...]:
        """Step 4: return the report's numbers. An epoch that could not pay contributes what an absent one would."""
        if not match.reach.measuring:
            return _zeros(request)
        kept = [epoch for epoch in match.sites if epoch in payment.paid]
        if payment.output is not None:
            histogram = payment.output if kept else (0,) * request.buckets
        else:
            histogram = attribute(request.function, match.read(kept), award)
        if request.side_query is None:
            return histogram
        return (*histogram, request.side_query.flag(match.reach.usable, payment.paid, kept))

    def _charge_worst_case(self, request: CheckedRequest, call: DeviceCall) -> None:
        """Charge every usable epoch for the worst report, best effort: a fault may depend on any epoch's data.

        The quotas pay that would have if the querier's own test had let everything pass: they bound what a function
        that raises can take of the budget of all sites.
        """
        with suppress(Exception), self._store.transaction():
            reach = self._reach(request, call) if self._store.enabled else self._unmeasured(request, call)
            match = Match(reach)
            if reach.usable:
                match = request.untested().match(self._store, reach, call.now, lambda _: ())
            owed = {epoch: self._worst(request, reach.window, match.sites.get(epoch, ())) for epoch in reach.usable}
            payment = Payment(self._pay(request, owed), None, fault=True)
            self._store.log(_record_of(request, call.now, match, payment), self._limits.max_log_records)

    def _cannot_pay(
        self, request: CheckedRequest, window: Sequence[int], sites: Mapping[int, Collection[str]]
    ) -> Collection[int]:
        """Return the epochs, given with the sites of their events, that could not pay the worst case. Pays nothing."""
        worst = {epoch: self._worst(request, window, event_sites) for epoch, event_sites in sites.items()}
        # A copy of the filters that is not written back.
        filters = self._store.filters_of({owner for charges in worst.values() for owner in charges})
        return {epoch for epoch, owed in worst.items() if not check_and_consume(epoch, owed, filters, self._capacities)}

    def _worst(self, request: CheckedRequest, window: Sequence[int], sites: Collection[str]) -> Charges:
        """Return what an epoch of `window`, with events of `sites`, owes for the worst that a report could say."""
        output = request.value if len(window) == 1 else None
        sensitivity = request.sensitivity(window)
        loss = epoch_loss(request.loss_terms, relevant=True, sensitivity=sensitivity, output=output)
        return charges_of(request.site, sites, loss, request.quota)

    def save_impression(
        self,
        site: str,
        options: ImpressionOptions,
        *,
        intermediary: str | None = None,
        action: str | None = None,
        kept: Future[bool] | None = None,
        leave: Callable[[float], None] | None = None,
    ) -> None:
        """Save an impression on `site`. Options are checked even while measurement is off; then nothing is stored.

        Return before it is stored, in the order of calls. `kept` is for the person: whether it was stored in the end.
        `leave` is for a program that answers many callers from one thread: it is passed when the answer, or the error,
        may leave, and the call does not sleep until then.
        """
        with self._call(site, intermediary, action, saves=True, leave=leave) as call:
            check_kind(options, ImpressionOptions)
            self._save(call, options.saved(call.site, call.caller, call.now, self._limits), kept)

    def save_conversion(
        self,
        site: str,
        options: ConversionEventOptions,
        *,
        intermediary: str | None = None,
        action: str | None = None,
        kept: Future[bool] | None = None,
    ) -> None:
        """Save a conversion on `site` for the publishers that it names, under the rules of `save_impression`."""
        with self._call(site, intermediary, action, saves=True) as call:
            check_kind(options, ConversionEventOptions)
            self._save(call, options.saved(call.site, call.caller, call.now, self._limits), kept)

    def _save(self, call: DeviceCall, saved: SavedImpression | SavedConversion, kept: Future[bool] | None) -> None:
        def work() -> None:
            stored = self._evict_and_save(call, saved)
            if kept is not None:
                kept.set_result(stored)

        if not self._schedule.save(call.who, work) and kept is not None:
            kept.set_result(False)

    def _evict_and_save(self, call: DeviceCall, saved: SavedImpression | SavedConversion) -> bool:
        """Store `saved` if measurement is on and the site may still act on this action; return whether it is stored.

        A failure is silent to the site, which must learn neither what the device holds nor what else it is doing. The
        person's own terminal says so.
        """
        try:
            with self._store.transaction():
                calendar, measuring = self._weeks.fixed_calendar(), self._store.enabled
                # Switched off, a device does the same work and discards it.
                with nullcontext() if measuring else self._store.discarded():
                    if not call.is_admitted(Register.SAVES, self._store, self._limits, calendar):
                        return False
                    self._store_event(call, saved, calendar)
        except Exception as error:
            _LOG.warning("an event was not kept: %s", type(error).__name__)
            return False
        return measuring

    def _store_event(
        self, call: DeviceCall, saved: SavedImpression | SavedConversion, calendar: EpochCalendar | None
    ) -> None:
        if isinstance(saved, SavedImpression):
            evict_for_impression(self._store, saved, calendar, self._limits)
            self._store.save(saved)
        else:
            evict_for_conversion(self._store, calendar, call.now, self._limits)
            self._store.conversions.save(saved)

    # For the person, or the browser on their behalf. No site calls what follows.

    def clear_impressions_for_site(self, site: str) -> None:
        """Remove what `site` has stored on this device. Budgets stay: a site cannot erase its own spending."""
        cleared = parse_site(site)
        self._finish_pending()
        with self._store.transaction():
            self._store.clear_caller(cleared)

    def clear_site(self, site: str) -> None:
        """Clear a site as a person means it: delete what it stored, and set its budgets up to now to zero."""
        self.clear_impressions_for_site(site)
        self.clear_browsing_history([site], forget_visits=False)

    def _finish_pending(self) -> None:
        """Wait for the calls made so far: a save applied after its site was cleared would bring it back."""
        if not self._schedule.drain():
            raise DatabaseUnavailable("sites have called faster than this device works", "Retry later.")

    def clear_browsing_history(self, sites: Iterable[str] = (), *, forget_visits: bool) -> None:
        """Clear the history of `sites`. With `forget_visits` and none named, clear that of all sites.

        With `forget_visits` delete their state and close every epoch so far to every querier, since what it had paid is
        no longer known. Otherwise set the sites' budgets up to now to zero and keep everything else.
        """
        now = self._clock()
        cleared = frozenset(parse_site(site) for site in sites)
        self._finish_pending()
        with self._store.transaction():
            if forget_visits:
                self._store.raise_barrier(max(now, self._weeks.last_payment(now)))
                self._store.forget(cleared)
            elif cleared:
                self._empty_budgets(cleared, now)

    def _empty_budgets(self, sites: Iterable[str], now: int) -> None:
        # The standard looks the earliest epoch up first, which matters if nothing has been looked up before.
        earliest = now - self._limits.max_lookback
        reachable = self._weeks.calendar(earliest).window(earliest, now)
        filters = self._store.filters_of([FilterOwner(FilterKind.SITE, site) for site in sites])
        for epoch in reachable:
            for ledger in filters.values():
                ledger.empty(epoch)
        self._store.keep(filters)

    def enable(self) -> None:
        self._schedule.drain()
        with self._store.transaction():
            self._store.set_enabled(True)

    def disable(self) -> None:
        """Switch measurement off: nothing is saved, and every report is null. No site can tell."""
        self._schedule.drain()
        with self._store.transaction():
            self._store.set_enabled(False)

    def delete_expired(self) -> None:
        """Delete all events whose lifetime is over. Run when a device is opened, and once an hour while it is open.

        No call of a site does, as it could not delete them all: under a clock that is set back later, one week's events
        would decide what is left of others'.
        """
        now, is_finished = self._clock(), False
        while not is_finished:
            with self._store.transaction():
                is_finished = self._store.drop_expired(now)

    def budget(self) -> list[FilterState]:
        """Return what every filter has paid, for the person alone."""
        self._schedule.drain()
        with self._store.transaction():
            return states(self._store.filters(), self._limits)

    def reports(self) -> Sequence[ReportRecord]:
        """Return the log of reports, oldest first, for the person alone."""
        self._schedule.drain()
        with self._store.transaction():
            return self._store.reports()

    def overview(self) -> Overview:
        """Return a consistent snapshot for the person's dashboard. Read-only: it does not fix where epochs start."""
        now, limits = self._clock(), self._limits
        self._schedule.drain()
        with self._store.transaction():
            return Overview(
                now=now,
                enabled=self._store.enabled,
                debug=self._store.debug,
                limits=limits,
                calendar=self._weeks.fixed_calendar(),
                barrier=self._store.barrier,
                filters=states(self._store.filters(), limits),
                reports=self._store.reports(),
                impressions=self._store.impressions(),
                conversions=self._store.conversions.all(),
            )

    def calendar(self) -> EpochCalendar:
        """Return this device's calendar. The first lookup fixes its start, as a first conversion does."""
        self._schedule.drain()
        with self._store.transaction():
            return self._weeks.calendar(self._clock())


class Register(Enum):
    """The two lists of sites that have acted on an action of the user, for devices that bound their number.

    Two, because what is saved on an action must not decide what is measured on it.
    """

    SAVES = "saves"
    MEASUREMENTS = "measurements"


@dataclass(frozen=True, slots=True)
class DeviceCall:
    """One call. `site` is the top-level site, which pays; `caller` the intermediary on it, or the site itself.

    `came` is the arrival time on the schedule's clock, and `now` the device's wall clock.
    """

    came: float
    now: int
    site: str
    caller: str
    action: str | None = None

    @property
    def who(self) -> Caller:
        return Caller(self.site, self.caller)

    @classmethod
    def checked(
        cls, came: float, now: int, site: str, intermediary: str | None, action: str | None, limits: DeviceLimits
    ) -> DeviceCall:
        """Return the call, or raise. Where actions are counted every call must name one, with measurement on or off."""
        if type(now) is not int or now not in TIMES:
            raise TrefoilError(
                "the clock of this device returns no time in whole seconds since 1970",
                "Set it right.",
                kind=ErrorKind.CLOCK,
            )
        if limits.sites_per_action is not None and (type(action) is not str or not action):
            raise DOMException(
                "NotAllowedError",
                "this device counts sites per user action, and the call names no action",
                kind=ErrorKind.FORBIDDEN,
            )
        top_level = parse_site(site)
        return cls(came, now, top_level, top_level if intermediary is None else parse_site(intermediary), action)

    def is_admitted(
        self, register: Register, store: Store, limits: DeviceLimits, calendar: EpochCalendar | None
    ) -> bool:
        """Return whether its site may still act on its action: by who calls, never by the data. In a transaction.

        Each epoch has a list of its own: what was done before its edge must not decide what is done after it.
        """
        if limits.sites_per_action is None or self.action is None:
            return True
        epoch = "" if calendar is None else calendar.index(self.now)
        action = f"{register.value}: {epoch}: {self.action}"
        return store.admit_to_action(action, self.site, limits.sites_per_action, self.now)


@dataclass(frozen=True, slots=True, repr=False)
class Payment:
    """The result of *Charge*: what each epoch that could pay has paid to the querier's own filter.

    Without a repr, like `Match`: it would show the person's data in a traceback.
    """

    paid: Mapping[int, int]
    # The report's histogram, where the charge depends on it (a window of one epoch).
    output: tuple[int, ...] | None
    # The worst case was charged after an exception; there is no histogram.
    fault: bool = False


def _record_of(request: CheckedRequest, now: int, match: Match, payment: Payment) -> ReportRecord:
    """Return the log's record of a request: as long for a null report as for any other."""
    terms = request.loss_terms
    epochs = tuple(
        EpochEntry(epoch, _outcome(request, epoch, match, payment), payment.paid.get(epoch, 0))
        for epoch in _logged(match, payment)
    )
    public = (terms.epsilon_micros, terms.query_sensitivity, request.site, request.caller)
    return ReportRecord(now, *public, epochs, request.side)


def _logged(match: Match, payment: Payment) -> Sequence[int]:
    """Return the epochs to log: those that paid, then the latest. To name future ones must not hide spending."""
    chosen = sorted(match.reach.window, key=lambda epoch: (epoch in payment.paid, epoch))[-LOGGED_EPOCHS:]
    return sorted(chosen)


def _outcome(request: CheckedRequest, epoch: int, match: Match, payment: Payment) -> EpochOutcome:
    """Return what the person is told about one epoch of a request."""
    if not match.reach.measuring:
        return EpochOutcome.NOT_MEASURED
    if epoch not in match.reach.usable:
        return EpochOutcome.CLOSED
    if payment.fault:
        return EpochOutcome.FAULT
    has_ads = epoch in match.sites or epoch in match.withheld
    # A side query is paid for without ads too. Where that cannot be paid, the person is told so.
    if not has_ads and (request.side_query is None or epoch in payment.paid):
        return EpochOutcome.NOTHING_FOUND
    return EpochOutcome.PAID if epoch in payment.paid else EpochOutcome.OUT_OF_BUDGET


def _zeros(request: CheckedRequest) -> tuple[int, ...]:
    """Return the numbers of a null report."""
    return (0,) * (request.buckets + (1 if request.side_query else 0))

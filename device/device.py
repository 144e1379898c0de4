"""The device: one person's impressions, what each conversion is worth, and what it costs them (paper, Listing 1).

`_report` is the whole of it on one page, whichever side asks. Its public face is W3C Attribution Level 1 in Python
names. The paper's general request runs on the same engine through `measure`; a publisher's, by `measure_impression`.
What the person does with their device is in `controls`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Generic, TypeVar

from device.attribution import Award, attribute
from device.call import DeviceCall, Register
from device.checked_request import CheckedRequest, no_events
from device.coins import DeviceCoins
from device.controls import Controls
from device.conversion import AttributionRequest, ConversionOptions
from device.conversion_event import ConversionEventOptions
from device.epoch import EpochCalendar
from device.errors import DatabaseBusy
from device.impression import ImpressionOptions
from device.labelling import LabelOptions
from device.limits import DeviceLimits
from device.option import check_kind
from device.privacy_filter import Charges, FilterKind, FilterOwner, capacities, charges_of, check_and_consume
from device.privacy_loss import epoch_loss
from device.reach import Reach, Weeks
from device.report import Seal
from device.room import make_room, make_room_for_conversion
from device.settlement import Found, Settled, record_of
from device.storage import Store
from device.tick import AtOnce, Ticker
from protocol.errors import TrefoilError

R = TypeVar("R")


class Device(Controls, Generic[R]):
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
        self._coins = coins or DeviceCoins()
        limits = limits or DeviceLimits()
        super().__init__(store, Weeks(store, limits, self._coins.epoch_start), clock, limits)
        self._seal = seal
        self._capacities = capacities(limits)
        self._ticker = ticker or AtOnce()

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
        call = self._call(site, intermediary, action)
        check_kind(options, ConversionOptions, AttributionRequest)
        return self._report(call, options)

    def measure_impression(
        self, site: str, options: LabelOptions, *, intermediary: str | None = None, action: str | None = None
    ) -> R:
        """A report of whether a conversion followed an impression that `site` showed (`labelling`): the other side."""
        call = self._call(site, intermediary, action)
        check_kind(options, LabelOptions)
        return self._report(call, options)

    def _report(self, call: DeviceCall, options: ConversionOptions | AttributionRequest | LabelOptions) -> R:
        """Match · Charge · Attribute · Share · Seal. Always a report; errors depend on the options alone."""
        request = options.checked(call.site, call.caller, self._limits)
        seal = self._seal.prepare(request, call.now, debug=self._store.debug)
        # Drawn once: the charge must be for exactly what is reported.
        award = Award(request.value, request.buckets, [self._coins.credit() for _ in range(request.coins)])

        def page() -> tuple[int, ...]:
            with self._store.transaction():
                # Match: which epochs of the window have relevant events.
                found = self._match(request, call)
                # Charge: each of them pays its individual privacy loss, from all of its filters or from none.
                settled = self._charge(request, found, award)
                # Attribute: divide the value among the events of epochs that paid.
                numbers = self._attribute(request, found, settled, award)
                self._store.log(record_of(request, call.now, found, settled), self._limits.max_log_records)
            return numbers

        with self._ticker.turn(call.queue, self._limits.work_seconds, call.came) as turn:
            # The turn ends when it was going to end. What is not ready by then is charged for, and not in the report.
            numbers = turn.run(lambda: self._or_null(page, request, call), late=_zeros(request))
            # Share, Seal: only now, when the charge is on disk.
            return seal(numbers)

    def measure(self, site: str, request: AttributionRequest, *, intermediary: str | None = None) -> R:
        """The paper's general attribution request, for the querier `site`: the same engine, the same page."""
        return self.measure_conversion(site, request, intermediary=intermediary)

    def save_impression(
        self, site: str, options: ImpressionOptions, *, intermediary: str | None = None, action: str | None = None
    ) -> None:
        """Remember an impression on `site`. Options are checked also when measurement is off; then nothing is kept."""
        call = self._call(site, intermediary, action)
        check_kind(options, ImpressionOptions)
        saved = options.saved(call.site, call.caller, call.now, self._limits)

        def save() -> None:
            make_room(self._store, saved, self._weeks.known(), self._limits)
            self._store.save(saved)

        self._keep(call, save)

    def save_conversion(
        self, site: str, options: ConversionEventOptions, *, intermediary: str | None = None, action: str | None = None
    ) -> None:
        """Remember a conversion on `site`, for the publishers that it names. Checked, kept and answered as above."""
        call = self._call(site, intermediary, action)
        check_kind(options, ConversionEventOptions)
        saved = options.saved(call.site, call.caller, call.now, self._limits)

        def save() -> None:
            make_room_for_conversion(self._store, self._weeks.known(), call.now, self._limits)
            self._store.conversions.save(saved)

        self._keep(call, save)

    def _call(self, site: str, intermediary: str | None, action: str | None) -> DeviceCall:
        """The call that is being made. When it came is noted first: all that follows is in its turn."""
        came = self._ticker.now()
        return DeviceCall.checked(came, self._clock(), site, intermediary, action, self._limits)

    def _keep(self, call: DeviceCall, save: Callable[[], None]) -> None:
        """Run `save` if measurement is on and the site may still act on this action; in a turn of its own."""

        def page() -> None:
            # A site must not learn what the device holds, nor what else it is doing: if this fails, it is not told.
            with suppress(Exception), self._store.transaction():
                if self._store.enabled and call.is_admitted(Register.SAVES, self._store, self._limits):
                    save()

        with self._ticker.turn(call.queue, self._limits.work_seconds, call.came) as turn:
            turn.run(page, late=None)

    def _or_null(
        self, page: Callable[[], tuple[int, ...]], request: CheckedRequest, call: DeviceCall
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
                reach = self._reach(request, call)
                owed = dict.fromkeys(reach.usable, self._worst(request, reach.window))
                settled = Settled(self._pay(request, owed), None, fault=True)
                record = record_of(request, call.now, Found(reach, {}, no_events), settled)
                self._store.log(record, self._limits.max_log_records)
            if not isinstance(fault, Exception):
                raise
            return _zeros(request)

    def _reach(self, request: CheckedRequest, call: DeviceCall) -> Reach:
        """Which epochs are asked for, and which of them may be used. While measurement is off, epochs of no device."""
        now = call.now
        if not self._store.enabled:
            calendar = EpochCalendar(now, self._limits.epoch_length)
            return Reach(calendar, request.window(calendar, now), (), measuring=False)
        calendar = self._weeks.calendar(now)
        window = request.window(calendar, now)
        if not call.is_admitted(Register.MEASUREMENTS, self._store, self._limits):
            return Reach(calendar, window, (), measuring=False)
        self._weeks.close_unreachable(calendar, now)
        return Reach(calendar, window, self._weeks.usable(calendar, window, now), measuring=True)

    def _match(self, request: CheckedRequest, call: DeviceCall) -> Found:
        """Step 1 of Listing 1. Which epochs have relevant events, and on which sites they happened."""
        reach = self._reach(request, call)
        if not reach.usable:
            return Found(reach, {}, no_events)

        def unable(asked: Mapping[int, Collection[str]]) -> Collection[int]:
            worst = {epoch: self._worst(request, reach.window, sites) for epoch, sites in asked.items()}
            filters = self._store.filters_of({owner for charges in worst.values() for owner in charges})
            capacity = self._capacities
            return {epoch for epoch, owed in worst.items() if not check_and_consume(epoch, owed, filters, capacity)}

        return Found(reach, *request.match(self._store, reach.calendar, reach.usable, call.now, unable))

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

    def _worst(self, request: CheckedRequest, window: Sequence[int], sites: Collection[str] = ()) -> Charges:
        """What an epoch of a window, with events of `sites`, owes for the worst that a report could say."""
        output = request.worst_output if len(window) == 1 else None
        sensitivity = request.sensitivity(window)
        loss = epoch_loss(request.loss_terms, relevant=True, sensitivity=sensitivity, output=output)
        return charges_of(request.site, sites, loss, request.quota)

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


def _zeros(request: CheckedRequest) -> tuple[int, ...]:
    return (0,) * (request.buckets + (1 if request.side_query else 0))

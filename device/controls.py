"""The person's side of a device: switching it, clearing it, and looking at what it has paid. No site calls this."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from device.epoch import EpochCalendar
from device.limits import DeviceLimits
from device.overview import Overview
from device.privacy_filter import FilterKind, FilterOwner, FilterState, states
from device.reach import Weeks
from device.site import parse_site
from device.storage import ReportRecord, Store


class Controls:
    """What a person, or the browser on their behalf, may do with their device."""

    def __init__(self, store: Store, weeks: Weeks, clock: Callable[[], int], limits: DeviceLimits) -> None:
        self._store = store
        self._weeks = weeks
        self._clock = clock
        self._limits = limits

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
            return Overview(
                now=now,
                enabled=self._store.enabled,
                debug=self._store.debug,
                limits=limits,
                calendar=self._weeks.known(),
                barrier=self._store.barrier,
                filters=states(self._store.filters(), limits),
                reports=self._store.reports(),
                impressions=self._store.impressions(),
                conversions=self._store.conversions.all(),
            )

    def calendar(self) -> EpochCalendar:
        """This device's epochs. Looking fixes where they start, as a first conversion does."""
        with self._store.transaction():
            return self._weeks.calendar(self._clock())

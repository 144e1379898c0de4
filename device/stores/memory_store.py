"""A device's state in memory, for simulation and tests: thread-safe, and gone when the program ends.

It is not `SqliteStore(":memory:")` because of its cost, measured on 2026-11-18 in alternating runs. 5,000 devices with
one impression and one conversion each take 0.7 to 1.2 s of processor time here, and 4.2 to 6.2 s (and 200 kB of memory
a device) there. `trefoil experiment microbenchmark --function last` at a twentieth of its scale takes 0.8 s and 2.1 s;
at most 1.3 times was acceptable. `tests/device/test_stores.py` holds both stores to the same results.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from device.attribution import Need, Order
from device.budget import FilterOwner, PrivacyFilter
from device.epoch import EpochCalendar
from device.errors import DatabaseUnavailable
from device.events import ConversionEvent, EventSelection, Impression, SavedConversion, SavedImpression, Selection
from device.stores.storage import CLEANUP_LIMIT, EVERYTHING, MAX_LOG_RECORDS, ReportRecord, SiteCount
from protocol.errors import ErrorKind


class MemoryStore:
    """A store whose lists are in the order of saving.

    Only a debug device reveals plain histograms, and only debug queries accept its reports: debug must be requested.

    >>> trefoil.MemoryStore().debug
    False
    """

    def __init__(self, *, debug: bool = False) -> None:
        self.debug = debug
        self.enabled = True
        self.epoch_start: int | None = None
        self.barrier: int | None = None
        self.conversions = ConversionList()
        self.services = ServiceList()
        self._impressions: list[SavedImpression] = []
        self._filters: dict[FilterOwner, PrivacyFilter] = {}
        self._log: list[ReportRecord] = []
        self._actions: dict[str, tuple[int, frozenset[str]]] = {}
        self._lock = threading.RLock()
        self._inside = False

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Run the block atomically: lists grow at their end or are replaced, everything else is replaced."""
        with self._lock:
            if self._inside:
                # A custom function calls the device again: a rollback of the outer call would undo the inner charge.
                raise DatabaseUnavailable("a transaction is under way", kind=ErrorKind.BUSY)
            restore = self._snapshot()
            self._inside = True
            try:
                yield
            except BaseException:
                restore()
                raise
            finally:
                self._inside = False

    @contextmanager
    def discarded(self) -> Iterator[None]:
        restore = self._snapshot()
        try:
            yield
        finally:
            restore()

    def _snapshot(self) -> Callable[[], None]:
        """Return a function that restores the present state."""
        before = dict(vars(self))
        impressions, records = len(self._impressions), len(self._log)
        events, services = self.conversions.saved, self.services.sets

        def restore() -> None:
            vars(self).update(before)
            del self._impressions[impressions:], self._log[records:]
            self.conversions.saved, self.services.sets = events, services

        return restore

    def set_enabled(self, enabled: bool) -> None:
        self.enabled = enabled

    def fix_epoch_start(self, start: int) -> None:
        if self.epoch_start is None:
            self.epoch_start = start

    def raise_barrier(self, moment: int) -> None:
        self.barrier = moment if self.barrier is None else max(self.barrier, moment)

    def save(self, saved: SavedImpression) -> None:
        self._impressions.append(saved)

    def matched_sites(self, selection: Selection, calendar: EpochCalendar) -> Mapping[int, Collection[str]]:
        sites: dict[int, set[str]] = {}
        for saved in self._impressions:
            if selection.accepts(saved):
                sites.setdefault(calendar.index(saved.impression.time), set()).add(saved.impression.site)
        return sites

    def matching(self, selection: Selection, need: Need = EVERYTHING) -> Sequence[Impression]:
        accepted = [saved.impression for saved in self._impressions if selection.accepts(saved)]
        return sorted(accepted, key=_ORDERS[need.order])[: need.most]

    def impressions(self) -> Sequence[SavedImpression]:
        return sorted(self._impressions, key=lambda saved: saved.impression.time)

    def census(self, since: int, until: int) -> Sequence[SiteCount]:
        times: dict[str, list[int]] = {}
        for saved in self._between(since, until):
            times.setdefault(saved.impression.site, []).append(saved.impression.time)
        return [SiteCount(site, len(moments), min(moments), max(moments)) for site, moments in times.items()]

    def evict_oldest_between(self, since: int, until: int, count: int, site: str | None = None) -> None:
        inside = self._between(since, until, site)
        evicted = {id(saved) for saved in sorted(inside, key=lambda saved: saved.impression.time)[:count]}
        self._impressions = [saved for saved in self._impressions if id(saved) not in evicted]

    def _between(self, since: int, until: int, site: str | None = None) -> list[SavedImpression]:
        return [
            saved
            for saved in self._impressions
            if since <= saved.impression.time < until and (site is None or saved.impression.site == site)
        ]

    def drop_impressions_before(self, moment: int) -> None:
        # Saving happens far more often than expiry; the first saved is not always the oldest, as clocks are set back.
        if any(saved.impression.time < moment for saved in self._impressions):
            self._impressions = [saved for saved in self._impressions if saved.impression.time >= moment]

    def clear_caller(self, site: str) -> None:
        others = (saved for saved in self._impressions if saved.impression.caller != site)
        stripped = (_without(saved, site) for saved in others)
        self._impressions = [saved for saved in stripped if saved is not None]
        self.conversions.clear_caller(site)

    def filters_of(self, owners: Collection[FilterOwner]) -> dict[FilterOwner, PrivacyFilter]:
        return {owner: self._filters[owner].copy() if owner in self._filters else PrivacyFilter() for owner in owners}

    def keep(self, filters: Mapping[FilterOwner, PrivacyFilter]) -> None:
        self._filters = {**self._filters, **filters}

    def filters(self) -> Mapping[FilterOwner, PrivacyFilter]:
        return self._filters

    def forget(self, sites: Collection[str]) -> None:
        self._log = []
        self.conversions.forget(sites)
        if not sites:
            self._impressions = []
            self._filters = {}
            self._actions = {}
            return
        self._impressions = [saved for saved in self._impressions if saved.impression.site not in sites]
        self._filters = {owner: ledger for owner, ledger in self._filters.items() if owner.site not in sites}
        self._actions = {name: (began, acted.difference(sites)) for name, (began, acted) in self._actions.items()}

    def prune(self, first_epoch: int, before: int) -> bool:
        kept = self.filters_of(self._filters)
        for ledger in kept.values():
            ledger.forget_before(first_epoch)
        self._filters = {owner: ledger for owner, ledger in kept.items() if ledger.paid}
        self._impressions = [saved for saved in self._impressions if saved.impression.time >= before]
        self.conversions.drop_before(before)
        self._log = [record for record in self._log if record.time >= before]
        self._actions = {action: noted for action, noted in self._actions.items() if noted[0] >= before}
        return True

    def drop_expired(self, now: int) -> bool:
        if any(saved.expires < now for saved in self._impressions):
            self._impressions = [saved for saved in self._impressions if saved.expires >= now]
        return self.conversions.drop_expired(now)

    def log(self, record: ReportRecord, most: int = MAX_LOG_RECORDS) -> None:
        self._log.append(record)
        if len(self._log) > most:
            self._log = self._log[-most:]

    def reports(self) -> Sequence[ReportRecord]:
        return tuple(self._log)

    def admit_to_action(self, action: str, site: str, limit: int, now: int) -> bool:
        began, sites = self._actions.get(action, (now, frozenset()))
        if site not in sites and len(sites) < limit:
            sites |= {site}
            self._actions = {**self._actions, action: (began, sites)}
        return site in sites


class ConversionList:
    """Conversion events in the order of saving. The tuple is replaced, never changed, so that rollback restores it."""

    def __init__(self) -> None:
        self.saved: tuple[SavedConversion, ...] = ()

    def save(self, saved: SavedConversion) -> None:
        self.saved = (*self.saved, saved)

    def matching(self, selection: EventSelection) -> Sequence[ConversionEvent]:
        return sorted((saved.event for saved in self.saved if selection.accepts(saved)), key=lambda event: event.time)

    def all(self) -> Sequence[SavedConversion]:
        return sorted(self.saved, key=lambda saved: saved.event.time)

    def count_between(self, since: int, until: int) -> int:
        return len(self._between(since, until))

    def evict_between(self, since: int, until: int) -> None:
        inside = sorted(self._between(since, until), key=lambda saved: saved.event.time)
        if inside:
            held = Counter(saved.event.site for saved in inside)
            first = {saved.event.site: saved.event.time for saved in reversed(inside)}
            loses = min(held, key=lambda site: (-held[site], first[site], site))
            oldest = next(saved for saved in inside if saved.event.site == loses)
            self.saved = tuple(saved for saved in self.saved if saved is not oldest)

    def drop_before(self, moment: int, most: int = CLEANUP_LIMIT) -> bool:
        old = sorted((saved for saved in self.saved if saved.event.time < moment), key=lambda saved: saved.event.time)
        gone = {id(saved) for saved in old[:most]}
        self.saved = tuple(saved for saved in self.saved if id(saved) not in gone)
        return len(old) < most

    def drop_expired(self, now: int) -> bool:
        self.saved = tuple(saved for saved in self.saved if saved.expires >= now)
        return True

    def clear_caller(self, site: str) -> None:
        others = (saved for saved in self.saved if saved.event.caller != site)
        stripped = (replace(saved, publishers=saved.publishers - {site}) for saved in others)
        self.saved = tuple(saved for saved in stripped if saved.publishers)

    def forget(self, sites: Collection[str]) -> None:
        self.saved = tuple(saved for saved in self.saved if sites and saved.event.site not in sites)

    def _between(self, since: int, until: int) -> list[SavedConversion]:
        return [saved for saved in self.saved if since <= saved.event.time < until]


class ServiceList:
    """Helper sets by name. The mapping is replaced, never changed, so that a rollback restores it."""

    def __init__(self) -> None:
        self.sets: Mapping[str, bytes] = {}

    def all(self) -> Mapping[str, bytes]:
        return dict(sorted(self.sets.items()))

    def keep(self, name: str, signed_set: bytes) -> None:
        self.sets = {**self.sets, name: signed_set}

    def remove(self, name: str) -> None:
        self.sets = {other: signed_set for other, signed_set in self.sets.items() if other != name}


# Sorting keeps equals in the order in which they were saved.
_ORDERS: Mapping[Order, Callable[[Impression], tuple[int, ...]]] = {
    Order.EARLIEST: lambda impression: (impression.time,),
    Order.LATEST: lambda impression: (-impression.time,),
    Order.PRECEDENCE: lambda impression: (-impression.priority, -impression.time),
}


def _without(saved: SavedImpression, site: str) -> SavedImpression | None:
    """Return `saved` with `site` removed from its lists, or None if that empties one."""
    stripped = replace(
        saved,
        conversion_sites=saved.conversion_sites - {site},
        conversion_callers=saved.conversion_callers - {site},
    )
    emptied_sites = saved.conversion_sites and not stripped.conversion_sites
    emptied_callers = saved.conversion_callers and not stripped.conversion_callers
    return None if emptied_sites or emptied_callers else stripped

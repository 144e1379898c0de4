"""A device's state in memory, for simulation and tests: lean, thread-safe, and gone when the program ends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from device.attribution import Need, Order
from device.conversion_store import ConversionList
from device.epoch import EpochCalendar
from device.errors import DatabaseBusy
from device.impression import Impression, SavedImpression, Selection
from device.privacy_filter import FilterOwner, PrivacyFilter
from device.service_store import ServiceList
from device.storage import EVERYTHING, MAX_LOG_RECORDS, ReportRecord, SiteCount


class MemoryStore:
    """Kept in the order of saving.

    Only a debug device shows its plain histograms, and only debug queries take its reports: debug has to be asked for.
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
        """One at a time, whole or not at all: lists grow at their end or are replaced; all else is replaced."""
        with self._lock:
            if self._inside:
                # A function that asks again from inside: what is undone with its own call would be undone for that too.
                raise DatabaseBusy("a transaction is under way")
            before = {**vars(self), "_inside": False}
            self._inside = True
            impressions, records = len(self._impressions), len(self._log)
            events, services = self.conversions.saved, self.services.held
            try:
                yield
            except BaseException:
                vars(self).update(before)
                del self._impressions[impressions:], self._log[records:]
                self.conversions.saved, self.services.held = events, services
                raise
            finally:
                self._inside = False

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
        found: dict[int, set[str]] = {}
        for saved in self._impressions:
            if selection.accepts(saved):
                found.setdefault(calendar.index(saved.impression.time), set()).add(saved.impression.site)
        return found

    def matching(self, selection: Selection, need: Need = EVERYTHING) -> Sequence[Impression]:
        found = [saved.impression for saved in self._impressions if selection.accepts(saved)]
        return sorted(found, key=_ORDERS[need.order])[: need.most]

    def impressions(self) -> Sequence[SavedImpression]:
        return sorted(self._impressions, key=lambda saved: saved.impression.time)

    def census(self, since: int, until: int) -> Sequence[SiteCount]:
        times: dict[str, list[int]] = {}
        for saved in self._between(since, until):
            times.setdefault(saved.impression.site, []).append(saved.impression.time)
        return [SiteCount(site, len(seen), min(seen), max(seen)) for site, seen in times.items()]

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
            return
        self._impressions = [saved for saved in self._impressions if saved.impression.site not in sites]
        self._filters = {owner: ledger for owner, ledger in self._filters.items() if owner.site not in sites}

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


# Sorting keeps equals in the order in which they were saved.
_ORDERS: Mapping[Order, Callable[[Impression], tuple[int, ...]]] = {
    Order.EARLIEST: lambda impression: (impression.time,),
    Order.LATEST: lambda impression: (-impression.time,),
    Order.PRECEDENCE: lambda impression: (-impression.priority, -impression.time),
}


def _without(saved: SavedImpression, site: str) -> SavedImpression | None:
    """`saved` with `site` struck from its lists, or None if that empties one."""
    stripped = replace(
        saved,
        conversion_sites=saved.conversion_sites - {site},
        conversion_callers=saved.conversion_callers - {site},
    )
    emptied_sites = saved.conversion_sites and not stripped.conversion_sites
    emptied_callers = saved.conversion_callers and not stripped.conversion_callers
    return None if emptied_sites or emptied_callers else stripped

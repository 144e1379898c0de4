"""What a device keeps, as the engine sees it. `MemoryStore` serves simulation, `SqliteStore` a person's device.

All access is inside `transaction()`: what happens in one is kept whole or not at all, and transactions of threads and
processes follow one another. Nothing here decides anything; that is the engine's part.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, Protocol

from device.attribution import Need
from device.conversion_store import ConversionStore
from device.epoch import EpochCalendar
from device.impression import Impression, SavedImpression, Selection
from device.privacy_filter import FilterOwner, PrivacyFilter
from device.service_store import ServiceStore

# More epochs than a window of the standard has; of a longer one the log keeps the latest.
LOGGED_EPOCHS = 16
MAX_LOG_RECORDS = 10_000
# All that is accepted, by time.
EVERYTHING = Need()
_RECORD = struct.Struct(">qqqB253sB253sB")
_EPOCH = struct.Struct(">qBq")
# Of the byte that counts epochs, so that records of before the display side read as what they are.
_SIDE_BIT = 7


class EpochOutcome(IntEnum):
    """What became of one epoch in one request. Numbers are stored; add at the end."""

    PAID = 1
    NOTHING_FOUND = 2
    OUT_OF_BUDGET = 3
    CLOSED = 4
    NOT_MEASURED = 5
    FAULT = 6


class SiteCount(NamedTuple):
    """How many impressions a site has in some time, the first of them and the last."""

    site: str
    held: int
    first: int
    last: int


class Side(IntEnum):
    """Which side asked: the site of a conversion, about impressions, or that of an impression, about conversions."""

    ADVERTISER = 0
    PUBLISHER = 1


class EpochEntry(NamedTuple):
    """One epoch of a logged request: what became of it, and what the querier's own filter paid, in micros."""

    epoch: int
    outcome: EpochOutcome
    paid: int


@dataclass(frozen=True, slots=True)
class ReportRecord:
    """One line in the log of reports: who asked, when, what the request allowed, and what it cost each epoch.

    The same size whatever happened, and for the person's own eyes: it never leaves the device.
    """

    time: int
    epsilon_micros: int
    query_sensitivity: int
    site: str
    caller: str
    epochs: tuple[EpochEntry, ...] = ()
    side: Side = Side.ADVERTISER

    def encode(self) -> bytes:
        """Always of one size, so that the database grows alike for real and null reports."""
        site, caller, epochs = self.site.encode(), self.caller.encode(), self.epochs[-LOGGED_EPOCHS:]
        head = (self.time, self.epsilon_micros, self.query_sensitivity, len(site), site, len(caller), caller)
        entries = b"".join(_EPOCH.pack(*entry) for entry in epochs)
        return _RECORD.pack(*head, len(epochs) | self.side << _SIDE_BIT) + entries.ljust(
            LOGGED_EPOCHS * _EPOCH.size, b"\0"
        )

    @classmethod
    def decode(cls, data: bytes) -> ReportRecord:
        """The record in `data`."""
        time, epsilon, sensitivity, site_length, site, caller_length, caller, last = _RECORD.unpack_from(data)
        side, count = divmod(last, 1 << _SIDE_BIT)
        entries = list(_EPOCH.iter_unpack(data[_RECORD.size :]))[:count]
        epochs = tuple(EpochEntry(epoch, EpochOutcome(outcome), paid) for epoch, outcome, paid in entries)
        parties = (site[:site_length].decode(), caller[:caller_length].decode())
        return cls(time, epsilon, sensitivity, *parties, epochs, Side(side))


class Store(Protocol):
    """The state of one device. Epochs here are indices; a barrier is a moment, and it only ever moves forward."""

    @property
    def debug(self) -> bool:
        """Whether this device makes debug reports only. Fixed at creation."""
        ...

    def transaction(self) -> AbstractContextManager[None]:
        """Everything inside happens at once, durably, or not at all. Raises DatabaseUnavailable after a deadline."""
        ...

    @property
    def enabled(self) -> bool:
        """Whether the person has measurement switched on."""
        ...

    def set_enabled(self, enabled: bool) -> None: ...

    @property
    def epoch_start(self) -> int | None:
        """Where epoch 0 begins, once it has been looked up."""
        ...

    def fix_epoch_start(self, start: int) -> None:
        """Set the start, once and for ever."""
        ...

    @property
    def barrier(self) -> int | None:
        """The moment up to whose epoch, inclusive, nothing is usable any more."""
        ...

    def raise_barrier(self, moment: int) -> None:
        """Move the barrier forward to `moment`; never back."""
        ...

    @property
    def conversions(self) -> ConversionStore:
        """The conversion events; used inside this store's transaction."""
        ...

    @property
    def services(self) -> ServiceStore:
        """The helper sets that the device trusts, by name. Clearing history leaves them alone."""
        ...

    def save(self, saved: SavedImpression) -> None: ...

    def matched_sites(self, selection: Selection, calendar: EpochCalendar) -> Mapping[int, Collection[str]]:
        """The sites of impressions that `selection` accepts, by epoch."""
        ...

    def matching(self, selection: Selection, need: Need = EVERYTHING) -> Sequence[Impression]:
        """Impressions that `selection` accepts, as many as `need` says, in its order."""
        ...

    def impressions(self) -> Sequence[SavedImpression]:
        """All impressions, by time, for the person to see."""
        ...

    def census(self, since: int, until: int) -> Sequence[SiteCount]:
        """Every site with impressions in [since, until)."""
        ...

    def evict_oldest_between(self, since: int, until: int, count: int, site: str | None = None) -> None:
        """Delete the oldest `count` impressions in [since, until), on `site` or anywhere; of very many, some."""
        ...

    def drop_impressions_before(self, moment: int) -> None:
        """Delete impressions dated before `moment`; if there are very many, some of them, and the next call more."""
        ...

    def clear_caller(self, site: str) -> None:
        """Remove what `site` saved as caller, of either kind; strike it from lists, deleting whose that empties."""
        ...

    def filters_of(self, owners: Collection[FilterOwner]) -> dict[FilterOwner, PrivacyFilter]:
        """The filters of these owners, new ones for those who never paid. What is changed must be handed to `keep`."""
        ...

    def keep(self, filters: Mapping[FilterOwner, PrivacyFilter]) -> None:
        """Write these filters back."""
        ...

    def filters(self) -> Mapping[FilterOwner, PrivacyFilter]:
        """All filters, for the person to see."""
        ...

    def forget(self, sites: Collection[str]) -> None:
        """Delete the sites' events and filters, or everything if none are named, and the log of reports."""
        ...

    def prune(self, first_epoch: int, before: int) -> bool:
        """Delete filters of epochs below `first_epoch`, and everything else that is dated before `before`.

        If there is very much, some of it; whether all of it is gone.
        """
        ...

    def log(self, record: ReportRecord, most: int = MAX_LOG_RECORDS) -> None:
        """Add to the log of reports, and keep the last `most` of it."""
        ...

    def reports(self) -> Sequence[ReportRecord]:
        """The log of reports, oldest first."""
        ...

    def admit_to_action(self, action: str, site: str, limit: int, now: int) -> bool:
        """Note that `site` acts within one user action; whether it is among the first `limit` sites to do so."""
        ...

"""The state of one device as the engine sees it: the records, and the interface that both stores implement.

`MemoryStore` is for simulation, `SqliteStore` for a person's device. All access is inside `transaction()`, which is
atomic; transactions of threads and processes are serialised. A store decides nothing; that is the engine's part.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, Protocol

from device.attribution import Need
from device.budget import FilterOwner, PrivacyFilter
from device.epoch import EpochCalendar
from device.events import ConversionEvent, EventSelection, Impression, SavedConversion, SavedImpression, Selection

# More epochs than a window of the standard has; of a longer one the log has those that paid, then the latest.
LOGGED_EPOCHS = 16
MAX_LOG_RECORDS = 10_000
# All accepted impressions, by time.
EVERYTHING = Need()
# The most rows that one call cleans up: no call may take long because much was left to do.
CLEANUP_LIMIT = 200
_RECORD = struct.Struct(">qqqB253sB253sB")
_EPOCH = struct.Struct(">qBq")
# The side is in the byte that counts epochs.
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
    """How many impressions a site has in an interval, and the times of the first and the last."""

    site: str
    held: int
    first: int
    last: int


class Side(IntEnum):
    """Which side requested the report: the site of a conversion, or the publisher of an impression."""

    ADVERTISER = 0
    PUBLISHER = 1


class EpochEntry(NamedTuple):
    """One epoch of a logged request: what became of it, and what the querier's own filter paid, in micros."""

    epoch: int
    outcome: EpochOutcome
    paid: int


@dataclass(frozen=True, slots=True)
class ReportRecord:
    """One record in the log of reports: who requested it, when, under which terms, and what it cost each epoch.

    Of one size whatever happened. For the person alone: it never leaves the device.
    """

    time: int
    epsilon_micros: int
    query_sensitivity: int
    site: str
    caller: str
    epochs: tuple[EpochEntry, ...] = ()
    side: Side = Side.ADVERTISER

    def encode(self) -> bytes:
        """Return bytes of one size, so that the database grows alike for real and null reports."""
        site, caller, epochs = self.site.encode(), self.caller.encode(), self.epochs[-LOGGED_EPOCHS:]
        head = (self.time, self.epsilon_micros, self.query_sensitivity, len(site), site, len(caller), caller)
        entries = b"".join(_EPOCH.pack(*entry) for entry in epochs)
        return _RECORD.pack(*head, len(epochs) | self.side << _SIDE_BIT) + entries.ljust(
            LOGGED_EPOCHS * _EPOCH.size, b"\0"
        )

    @classmethod
    def decode(cls, data: bytes) -> ReportRecord:
        time, epsilon, sensitivity, site_length, site, caller_length, caller, last = _RECORD.unpack_from(data)
        side, count = divmod(last, 1 << _SIDE_BIT)
        entries = list(_EPOCH.iter_unpack(data[_RECORD.size :]))[:count]
        epochs = tuple(EpochEntry(epoch, EpochOutcome(outcome), paid) for epoch, outcome, paid in entries)
        parties = (site[:site_length].decode(), caller[:caller_length].decode())
        return cls(time, epsilon, sensitivity, *parties, epochs, Side(side))


class Store(Protocol):
    """The state of one device. Epochs here are indices; a barrier is a moment, and it only moves forward."""

    @property
    def debug(self) -> bool:
        """Return whether this device makes debug reports only. Fixed at creation."""

    def transaction(self) -> AbstractContextManager[None]:
        """Run the block atomically and durably. Raise DatabaseUnavailable after a timeout."""

    def discarded(self) -> AbstractContextManager[None]:
        """Run the block inside a transaction, and undo what it changed."""

    @property
    def enabled(self) -> bool:
        """Return whether the person has measurement switched on."""

    def set_enabled(self, enabled: bool) -> None: ...

    @property
    def epoch_start(self) -> int | None:
        """Return where epoch 0 begins, or None before the first lookup."""

    def fix_epoch_start(self, start: int) -> None:
        """Set the start if it is not set yet; it never changes afterwards."""

    @property
    def barrier(self) -> int | None:
        """Return the moment up to whose epoch, inclusive, nothing is usable any more."""

    def raise_barrier(self, moment: int) -> None:
        """Move the barrier forward to `moment`; never back."""

    @property
    def conversions(self) -> ConversionStore:
        """Return the store of conversion events, for use inside this store's transaction."""

    @property
    def services(self) -> ServiceStore:
        """Return the store of helper sets that the device trusts. Clearing history does not touch it."""

    def save(self, saved: SavedImpression) -> None: ...

    def matched_sites(self, selection: Selection, calendar: EpochCalendar) -> Mapping[int, Collection[str]]:
        """Return the sites of impressions that `selection` accepts, by epoch."""

    def matching(self, selection: Selection, need: Need = EVERYTHING) -> Sequence[Impression]:
        """Return impressions that `selection` accepts, as many as `need` says, in its order."""

    def impressions(self) -> Sequence[SavedImpression]:
        """Return all impressions, by time."""

    def census(self, since: int, until: int) -> Sequence[SiteCount]:
        """Return every site with impressions in [since, until)."""

    def evict_oldest_between(self, since: int, until: int, count: int, site: str | None = None) -> None:
        """Delete the oldest `count` impressions in [since, until), on `site` or anywhere.

        All of them at once, or an epoch would stay above its limits; what it may hold bounds the work.
        """

    def drop_impressions_before(self, moment: int) -> None:
        """Delete impressions dated before `moment`, in bounded work; the next call continues."""

    def clear_caller(self, site: str) -> None:
        """Delete what `site` saved as caller, of either kind, and every event whose list naming it becomes empty."""

    def filters_of(self, owners: Collection[FilterOwner]) -> dict[FilterOwner, PrivacyFilter]:
        """Return copies of these owners' filters, empty ones for those that never paid. Write changes with `keep`."""

    def keep(self, filters: Mapping[FilterOwner, PrivacyFilter]) -> None:
        """Write these filters back."""

    def filters(self) -> Mapping[FilterOwner, PrivacyFilter]:
        """Return all filters."""

    def forget(self, sites: Collection[str]) -> None:
        """Delete the sites' events, filters and actions, or everything if none are named, and the log of reports."""

    def prune(self, first_epoch: int, before: int) -> bool:
        """Delete filters of epochs below `first_epoch`, and everything else that is dated before `before`.

        In bounded work; return whether nothing is left to delete.
        """

    def drop_expired(self, now: int) -> bool:
        """Delete events of either kind that expired before `now`, in bounded work; return whether none is left."""

    def log(self, record: ReportRecord, most: int = MAX_LOG_RECORDS) -> None:
        """Append to the log of reports, and keep its last `most` records."""

    def reports(self) -> Sequence[ReportRecord]:
        """Return the log of reports, oldest first."""

    def admit_to_action(self, action: str, site: str, limit: int, now: int) -> bool:
        """Record that `site` acts on a user action. Return whether it is among the first `limit` sites to do so."""


class ConversionStore(Protocol):
    """The conversion events of one device."""

    def save(self, saved: SavedConversion) -> None: ...

    def matching(self, selection: EventSelection) -> Sequence[ConversionEvent]:
        """Return events that `selection` accepts, by time; within one second in the order of saving."""

    def all(self) -> Sequence[SavedConversion]:
        """Return every event, by time."""

    def count_between(self, since: int, until: int) -> int:
        """Return how many events happened in [since, until)."""

    def evict_between(self, since: int, until: int) -> None:
        """Delete the oldest event in [since, until) of the site that has most: a flood evicts its own events."""

    def drop_before(self, moment: int, most: int = CLEANUP_LIMIT) -> bool:
        """Delete at most `most` events dated before `moment`. Return whether none is left."""


class ServiceStore(Protocol):
    """The aggregation services of one device: a signed helper set under each name, verified by `services`."""

    def all(self) -> Mapping[str, bytes]:
        """Return every signed set as its file holds it, by name, in the order of names."""

    def keep(self, name: str, signed_set: bytes) -> None:
        """Store this set under this name, replacing any other."""

    def remove(self, name: str) -> None: ...

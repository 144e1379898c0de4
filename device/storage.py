"""What a device keeps, as the engine sees it. `MemoryStore` serves simulation, `SqliteStore` a person's device.

All access is inside `transaction()`: what happens in one is kept whole or not at all, and transactions of threads and
processes follow one another. Nothing here decides anything; that is the engine's part.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from device.impression import Impression, SavedImpression, Selection
from device.privacy_filter import Owner, PrivacyFilter

_RECORD = struct.Struct(">qqqB253sB253s")


@dataclass(frozen=True, slots=True)
class ReportRecord:
    """One line in the log of reports: who asked, when, and what the request allowed. The same size whatever happened.

    It says nothing about what was found: only the person's own filters know what a report cost.
    """

    time: int
    epsilon_micros: int
    query_sensitivity: int
    site: str
    caller: str

    def encode(self) -> bytes:
        """Always `_RECORD.size` bytes, so that the database grows alike for real and null reports."""
        site, caller = self.site.encode(), self.caller.encode()
        return _RECORD.pack(
            self.time, self.epsilon_micros, self.query_sensitivity, len(site), site, len(caller), caller
        )

    @classmethod
    def decode(cls, data: bytes) -> ReportRecord:
        """The record in `data`."""
        time, epsilon, sensitivity, site_length, site, caller_length, caller = _RECORD.unpack(data)
        return cls(time, epsilon, sensitivity, site[:site_length].decode(), caller[:caller_length].decode())


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

    def save(self, saved: SavedImpression) -> None: ...

    def matching(self, selection: Selection) -> Sequence[Impression]:
        """Impressions that `selection` accepts, in the order they were saved within one second, by time."""
        ...

    def count_between(self, since: int, until: int) -> int:
        """How many impressions were saved in [since, until)."""
        ...

    def evict_oldest_between(self, since: int, until: int, count: int) -> None: ...

    def drop_impressions_before(self, moment: int) -> None: ...

    def clear_caller(self, site: str) -> None:
        """Remove what `site` saved as caller; strike it from all lists, deleting whose list that empties."""
        ...

    def filters_of(self, owners: Collection[Owner]) -> dict[Owner, PrivacyFilter]:
        """The filters of these owners, new ones for those who never paid. What is changed must be handed to `keep`."""
        ...

    def keep(self, filters: Mapping[Owner, PrivacyFilter]) -> None:
        """Write these filters back."""
        ...

    def filters(self) -> Mapping[Owner, PrivacyFilter]:
        """All filters, for the person to see."""
        ...

    def forget(self, sites: Collection[str]) -> None:
        """Delete the sites' impressions and filters, or everything if none are named, and the log of reports."""
        ...

    def prune(self, first_epoch: int, before: int) -> None:
        """Delete filters of epochs below `first_epoch`, and everything else that is dated before `before`."""
        ...

    def log(self, record: ReportRecord) -> None: ...

    def reports(self) -> Sequence[ReportRecord]:
        """The log of reports, oldest first."""
        ...

    def admit_to_action(self, action: str, site: str, limit: int, now: int) -> bool:
        """Note that `site` acts within one user action; whether it is among the first `limit` sites to do so."""
        ...

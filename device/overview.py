"""The overview: everything a person may know about their own device at one moment. It never leaves the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from device.conversion_event import SavedConversion
from device.epoch import EpochCalendar
from device.impression import SavedImpression
from device.limits import DeviceLimits
from device.privacy_filter import FilterState
from device.storage import ReportRecord


@dataclass(frozen=True, slots=True)
class Overview:
    """One device at `now`. Without a calendar no conversion was ever measured, and no filter has paid anything.

    `barrier` is the moment up to whose epoch nothing is usable any more.
    """

    now: int
    enabled: bool
    debug: bool
    limits: DeviceLimits
    calendar: EpochCalendar | None
    barrier: int | None
    filters: Sequence[FilterState]
    reports: Sequence[ReportRecord]
    impressions: Sequence[SavedImpression]
    conversions: Sequence[SavedConversion] = ()

"""A person's device on either store, for tests that must hold on both: in memory and on disk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any, Self

from benchmarks.experiments.small_worlds import QUERIER, START, WEEK, PlainDevice
from device.budget import FilterKind
from device.conversion import AttributionRequest, ConversionOptions
from device.device import Device
from device.epoch import DeviceCoins
from device.events import ImpressionOptions
from device.limits import TREFOIL_SERVICE, DeviceLimits
from device.report import PlainSeal
from device.stores.memory_store import MemoryStore
from device.stores.sqlite_store import SqliteStore
from device.stores.storage import Store
from tests.support.small_worlds import quick_folder


class Kind(Enum):
    """Where a device keeps its state."""

    MEMORY = "memory"
    DISK = "disk"


@contextmanager
def fresh_store(kind: Kind, epoch_length: int = WEEK, wait: float = 2.0) -> Iterator[Store]:
    """Yield an empty store in which epoch 0 begins at START."""
    with quick_folder() as folder:
        if kind is Kind.MEMORY:
            memory = MemoryStore(debug=True)
            memory.fix_epoch_start(START)
            yield memory
            return
        path = folder / "device.db"
        SqliteStore.create(path, epoch_length=epoch_length, debug=True)
        disk = SqliteStore.open(path, epoch_length=epoch_length, clock=lambda: START, wait=wait)
        try:
            with disk.transaction():
                disk.fix_epoch_start(START)
            yield disk
        finally:
            disk.close()


class Ann:
    """One person: a device without sealing, whose clock the test sets by epoch. The first site is the querier's."""

    def __init__(self, store: Store, **limits: Any) -> None:
        self.now = START
        self.store = store
        self.limits = DeviceLimits(**limits)
        coins = DeviceCoins(lambda: 0.0, lambda: 0.5)
        self.device: PlainDevice = Device(store, PlainSeal(), clock=lambda: self.now, limits=self.limits, coins=coins)

    def at(self, epoch: float) -> Self:
        """Set the clock to this part of an epoch."""
        self.now = START + int(epoch * WEEK)
        return self

    def see(self, epoch: float, bucket: int = 0, site: str = "news.example", **options: Any) -> Self:
        """Save an impression at this time."""
        caller, action = options.pop("caller", None), options.pop("action", None)
        given = ImpressionOptions(bucket, **options)
        self.at(epoch).device.save_impression(site, given, intermediary=caller, action=action)
        return self

    def convert(self, site: str = QUERIER, buckets: int = 2, **options: Any) -> tuple[int, ...]:
        """Make the standard's call."""
        caller, action = options.pop("caller", None), options.pop("action", None)
        given = ConversionOptions(TREFOIL_SERVICE, buckets, **options)
        return self.device.measure_conversion(site, given, intermediary=caller, action=action)

    def ask(self, *epochs: int, site: str = QUERIER, **request: Any) -> tuple[int, ...]:
        """Make the paper's request, for all of a week's budget unless `request` says otherwise."""
        terms = {"epsilon": 1.0, "buckets": 2, "value": 1, "query_sensitivity": 2}
        return self.device.measure(site, AttributionRequest(epochs, **{**terms, **request}))

    def spent(self, kind: FilterKind = FilterKind.SITE, site: str = QUERIER) -> dict[int, int]:
        """Return what each epoch has paid to one filter."""
        wanted = "" if kind is FilterKind.GLOBAL else site
        return {one.epoch: one.spent for one in self.device.budget() if one.kind is kind and one.site == wanted}

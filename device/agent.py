"""Create and open a device on a real machine: with its database, the system's clock and the schedule.

Used by the command line and the dashboard; simulations construct a `Device` themselves. An open device has the
aggregation services that it held when it was opened: a set added or renewed meanwhile takes effect at the next opening.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

from device import services
from device.device import Device
from device.epoch import draw_start, fair_coin
from device.limits import TREFOIL_SERVICE, DeviceLimits
from device.report import DebugReport, DebugSeal, HelperSetSeal, ServicesSeal
from device.schedule import Delayed, Schedule
from device.site import load_tables
from device.stores.schema import read_settings
from device.stores.sqlite_store import SqliteStore
from protocol.helper_set import HelperSet
from protocol.report import SealedReport
from protocol.units import HOUR

Report = SealedReport | DebugReport


def system_clock() -> int:
    """Return the wall clock in seconds since 1970, UTC.

    >>> trefoil.system_clock() > 1_700_000_000
    True
    """
    return int(time.time())  # noqa: TID251 - the edge of the device: this is where its clock comes from


def create(
    path: Path | str,
    *,
    debug: bool = False,
    limits: DeviceLimits | None = None,
    clock: Callable[[], int] = system_clock,
) -> None:
    """Create a device database. Debug, chosen limits and where its epochs start are fixed here, permanently.

    >>> trefoil.create_device("alice.db", limits=trefoil.DeviceLimits(epoch_days=1))  # doctest: +SKIP
    """
    limits = limits or DeviceLimits()
    start = draw_start(clock(), limits.epoch_length, fair_coin())
    settings = limits.settings()
    SqliteStore.create(Path(path), epoch_length=limits.epoch_length, epoch_start=start, debug=debug, settings=settings)


def stored_limits(path: Path | str) -> DeviceLimits:
    """Return the limits that were chosen when the database was created."""
    return DeviceLimits.from_settings(read_settings(Path(path)))


@contextmanager
def opened(
    path: Path | str,
    helper_set: HelperSet | None = None,
    *,
    service: str = TREFOIL_SERVICE,
    limits: DeviceLimits | None = None,
    clock: Callable[[], int] = system_clock,
    schedule: Schedule | None = None,
) -> Iterator[Device[Report]]:
    """Open the device whose database is at `path`. Its reports are sealed to the helpers of their service.

    The services are those that the device holds and, while it is open, `helper_set` under the name `service`. Closing
    the device waits, for a limited time, until every accepted save is applied.

    >>> with trefoil.opened_device("alice.db") as device:  # doctest: +SKIP
    ...     device.save_impression("news.example", trefoil.ImpressionOptions(histogram_index=1))
    """
    limits = limits or stored_limits(path)
    with opened_store(path, limits=limits, clock=clock) as store:
        with store.transaction():
            sets = services.trusted_sets(store.services)
        if helper_set is not None:
            sets = services.with_given(sets, service, helper_set)
        seals = {name: DebugSeal(each) if store.debug else HelperSetSeal(each) for name, each in sets.items()}
        limits = replace(limits, aggregation_services=frozenset(sets))
        seal: ServicesSeal[Report] = ServicesSeal(seals)
        load_tables()
        schedule = schedule or Delayed.within(limits)
        try:
            device = Device(store, seal, clock=clock, limits=limits, schedule=schedule)
            device.delete_expired()
            schedule.every(HOUR, device.delete_expired)
            yield device
        finally:
            # Before the database is closed: accepted saves are applied now or lost.
            schedule.close()


def opened_store(
    path: Path | str, *, limits: DeviceLimits | None = None, clock: Callable[[], int] = system_clock
) -> closing[SqliteStore]:
    """Open the database at `path` for a `with` block."""
    length = (limits or stored_limits(path)).epoch_length
    return closing(SqliteStore.open(Path(path), epoch_length=length, clock=clock))

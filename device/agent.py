"""The agent: a device on a real machine, with its database, the system's clock and the tick.

What the command line and the dashboard run. Simulations build a `Device` of their own. A device knows the aggregation
services that it held when it was opened; a set that is added or renewed meanwhile counts from the next opening.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from device import services
from device.coins import fair_coin
from device.device import Device
from device.epoch import draw_start
from device.limits import TREFOIL_SERVICE, DeviceLimits
from device.report import DebugReport, DebugSeal, HelperSetSeal, ServicesSeal
from device.sqlite_store import SqliteStore
from device.tick import Ticker, Ticks
from protocol.helper_set import HelperSet
from protocol.report import SealedReport

Report = SealedReport | DebugReport


def system_clock() -> int:
    """Seconds since 1970, UTC."""
    return int(time.time())  # noqa: TID251 - the edge of the device: this is where its clock comes from


def create(
    path: Path | str,
    *,
    debug: bool = False,
    limits: DeviceLimits | None = None,
    clock: Callable[[], int] = system_clock,
) -> None:
    """Make a new device database. Whether it is a debug device and where its epochs begin is decided here, for ever."""
    length = (limits or DeviceLimits()).epoch_length
    SqliteStore.create(
        Path(path), epoch_length=length, epoch_start=draw_start(clock(), length, fair_coin()), debug=debug
    )


@contextmanager
def opened(
    path: Path | str,
    helper_set: HelperSet | None = None,
    *,
    service: str = TREFOIL_SERVICE,
    limits: DeviceLimits | None = None,
    clock: Callable[[], int] = system_clock,
    ticker: Ticker | None = None,
) -> Iterator[Device[Report]]:
    """The device with its database at `path`. Reports leave at the tick, sealed to the helpers of the chosen service.

    Services are those that the device holds, and `helper_set` as `service` for as long as it is open.
    """
    limits = limits or DeviceLimits()
    with opened_store(path, limits=limits, clock=clock) as store:
        with store.transaction():
            sets = services.held(store.services)
        if helper_set is not None:
            sets = services.with_given(sets, service, helper_set)
        seals = {name: DebugSeal(known) if store.debug else HelperSetSeal(known) for name, known in sets.items()}
        limits = replace(limits, aggregation_services=frozenset(sets))
        seal: ServicesSeal[Report] = ServicesSeal(seals)
        yield Device(store, seal, clock=clock, limits=limits, ticker=ticker or Ticks(limits.tick_seconds))


@contextmanager
def opened_store(
    path: Path | str, *, limits: DeviceLimits | None = None, clock: Callable[[], int] = system_clock
) -> Iterator[SqliteStore]:
    """The database at `path`, with epochs that have a beginning."""
    length = (limits or DeviceLimits()).epoch_length
    store = SqliteStore.open(Path(path), epoch_length=length, clock=clock)
    try:
        with store.transaction():
            # Of a database that an older version made, and that no conversion was measured on.
            store.fix_epoch_start(draw_start(clock(), length, fair_coin()))
        yield store
    finally:
        store.close()

"""The agent: a device on a real machine, with its database, the system's clock and the tick.

What the command line and the dashboard run. Simulations build a `Device` of their own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from device.checked_request import CheckedRequest
from device.coins import fair_coin
from device.device import Device
from device.epoch import draw_start
from device.limits import DeviceLimits
from device.report import DebugReport, DebugSeal, HelperSetSeal
from device.sqlite_store import SqliteStore
from device.tick import Ticker, Ticks
from protocol.errors import TrefoilError
from protocol.helper_set import HelperSet
from protocol.report import SealedReport

Report = SealedReport | DebugReport


def system_clock() -> int:
    """Seconds since 1970, UTC."""
    return int(time.time())  # noqa: TID251 - the edge of the device: this is where its clock comes from


@dataclass(frozen=True, slots=True)
class NoHelpers:
    """For uses of a device that make no report."""

    reveals: bool = field(default=False, init=False)

    def prepare(self, request: CheckedRequest, now: int, *, debug: bool) -> Callable[[Sequence[int]], SealedReport]:  # noqa: ARG002 - the protocol's shape
        raise TrefoilError("a report needs a helper set to be sealed to", "Name the file with --helpers.")


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
    limits: DeviceLimits | None = None,
    clock: Callable[[], int] = system_clock,
    ticker: Ticker | None = None,
) -> Iterator[Device[Report]]:
    """The device with its database at `path`; reports leave at the tick, sealed to `helper_set`."""
    limits = limits or DeviceLimits()
    store = SqliteStore.open(Path(path), epoch_length=limits.epoch_length, clock=clock)
    try:
        with store.transaction():
            # Of a database that an older version made, and that no conversion was measured on.
            store.fix_epoch_start(draw_start(clock(), limits.epoch_length, fair_coin()))
        seal = _seal(helper_set, debug=store.debug)
        yield Device(store, seal, clock=clock, limits=limits, ticker=ticker or Ticks(limits.tick_seconds))
    finally:
        store.close()


def _seal(helper_set: HelperSet | None, *, debug: bool) -> HelperSetSeal | DebugSeal | NoHelpers:
    if helper_set is None:
        return NoHelpers()
    return DebugSeal(helper_set) if debug else HelperSetSeal(helper_set)

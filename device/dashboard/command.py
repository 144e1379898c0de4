"""`trefoil device dashboard`: serve one device's dashboard until it is interrupted."""

from __future__ import annotations

import asyncio
import contextlib
import time
import webbrowser
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from socket import socket

from aiohttp import web

from device.conversion import Conversion
from device.dashboard.guard import HOST, listen, origin_of
from device.dashboard.server import Dashboard
from device.device import Device
from device.limits import Limits
from device.sqlite_store import SqliteStore
from protocol.console import out, write_json
from protocol.errors import TrefoilError

# Ends of connections are not waited for: whoever stops the command wants it to stop.
SHUTDOWN_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class LookingOnly:
    """The seal of a device that makes no reports: the dashboard only looks, clears and switches."""

    reveals: bool = field(default=False, init=False)

    def prepare(self, conversion: Conversion, now: int, *, debug: bool) -> Callable[[Sequence[int]], None]:  # noqa: ARG002 - the protocol's shape
        raise TrefoilError("a dashboard makes no reports", "Use: trefoil device conversion")


@contextlib.contextmanager
def opened_device(path: Path, limits: Limits, clock: Callable[[], int]) -> Iterator[Device[None]]:
    """The device whose database is at `path`, to look at."""
    store = SqliteStore.open(path, epoch_length=limits.epoch_length, clock=clock)
    try:
        yield Device(store, LookingOnly(), clock=clock, limits=limits)
    finally:
        store.close()


@contextlib.asynccontextmanager
async def serving(app: web.Application, bound: socket) -> AsyncIterator[None]:
    """Serve `app` on a socket that is bound already."""
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=SHUTDOWN_SECONDS)
    await runner.setup()
    try:
        await web.SockSite(runner, bound).start()
        yield
    finally:
        await runner.cleanup()


def take_port(port: int) -> socket:
    """A listening socket on this machine's own address, or what to do about it."""
    try:
        return listen(port)
    except OSError as error:
        raise TrefoilError(f"cannot listen on {HOST}:{port}: {error.strerror}", "Choose another --port.") from None


def run(path: Path, *, port: int, browser: bool, json_file: Path | None, limits: Limits | None = None) -> None:
    """Until Ctrl-C. The start URL is printed, and opened if the person wants."""
    with opened_device(path, limits or Limits(), _now) as device, take_port(port) as bound:
        dashboard = Dashboard(device, origin_of(bound))
        start = dashboard.invite()
        out.print(f"The privacy dashboard of {path}, for this machine only:\n", markup=False, soft_wrap=True)
        out.print(f"  {start}\n\nThe link works once. Press Ctrl-C to stop.", markup=False, soft_wrap=True)
        write_json(json_file, {"url": start})
        if browser:
            webbrowser.open(start)
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(_serve(dashboard, bound))


async def _serve(dashboard: Dashboard, bound: socket) -> None:
    async with serving(dashboard.app(), bound):
        await asyncio.Event().wait()


def _now() -> int:
    return int(time.time())  # noqa: TID251 - the edge of the program: a person's clock

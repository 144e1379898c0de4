"""Everything together: three helpers, one device, six places to visit, until it is interrupted."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import webbrowser
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from socket import socket

from aiohttp import web

from benchmarks.live.agent import Agent
from benchmarks.live.helper_views import HelperViews
from benchmarks.live.home import Home
from benchmarks.live.measurement import Measurement
from benchmarks.live.measurement_page import MeasurementPage
from benchmarks.live.places import SHOP_SITE, Map, Place, ports_taken
from benchmarks.live.tracker import Tracker
from benchmarks.live.web import Frame
from benchmarks.live.websites import Publisher, Shop
from device import agent as device_agent
from device.agent import Report, system_clock
from device.dashboard.serve import serving
from device.dashboard.server import Dashboard
from device.dashboard.words import Clockface
from device.device import Device
from device.tick import Ticker
from mpc_helpers.local.launcher import Trio, launched, prepare
from protocol.console import err, out, write_json
from protocol.keys import load_identity
from protocol.stopping import stop_event


class Demonstration:
    """The places of one demonstration. The helpers need not run before someone asks them something."""

    def __init__(self, folder: Path, where: Map, trio: Trio, device: Device[Report], seed: int) -> None:
        self.where = where
        self._trio = trio
        self._device = device
        self._tracker = Tracker()
        self._dashboard = Dashboard(
            device,
            where[Place.DASHBOARD],
            way_back=("Back to the demonstration", f"{where[Place.HOME]}/"),
            steps=Frame(Place.DASHBOARD, where).steps_bar(),
        )
        key = load_identity(trio.site_key_path(SHOP_SITE))
        self._measurement = Measurement(folder, trio.helper_set, key, system_clock, seed)

    @contextlib.asynccontextmanager
    async def serving(self, sockets: Mapping[Place, socket]) -> AsyncIterator[None]:
        """All places are open inside."""
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(self._measurement.running())
            for place, app in self._apps().items():
                await stack.enter_async_context(serving(app, sockets[place]))
            yield

    def _apps(self) -> Mapping[Place, web.Application]:
        where, tracker, measurement = self.where, self._tracker, self._measurement
        return {
            Place.HOME: Home(where, self._dashboard.invite).app(),
            Place.NEWS: Publisher(Place.NEWS, where, tracker, system_clock).app(),
            Place.BLOG: Publisher(Place.BLOG, where, tracker, system_clock).app(),
            Place.SHOP: Shop(where, tracker, system_clock, measurement.collect).app(),
            Place.MEASUREMENT: MeasurementPage(where, measurement, tracker, Clockface()).app(),
            Place.HELPERS: HelperViews(where, measurement, self._trio).app(),
            Place.DASHBOARD: self._dashboard.app(),
            Place.AGENT: Agent(self._device, where[Place.AGENT], where.sites()).app(),
        }


@contextlib.contextmanager
def prepared(
    folder: Path, trio: Trio, port: int, seed: int, ticker: Ticker | None = None
) -> Iterator[tuple[Demonstration, dict[Place, socket]]]:
    """A new device in `folder`, and a demonstration with it whose ports are taken."""
    path = folder / "device.sqlite"
    device_agent.create(path)
    with ports_taken(port) as (where, sockets), device_agent.opened(path, trio.helper_set, ticker=ticker) as device:
        yield Demonstration(folder, where, trio, device, seed), sockets


def run(*, port: int, seed: int, open_browser: bool, json_file: Path | None) -> None:
    """Start everything, say where it is, and stop it all together at Ctrl-C or SIGTERM. Nothing is kept."""
    with tempfile.TemporaryDirectory(prefix="trefoil-live-") as name:
        folder = Path(name)
        trio = prepare(folder / "helpers", now=system_clock(), sites={SHOP_SITE: [SHOP_SITE]})
        with prepared(folder, trio, port, seed) as (shown, sockets):
            err.print("starting three helpers…", markup=False)
            with launched(trio):
                asyncio.run(_until_stopped(shown, sockets, open_browser=open_browser, json_file=json_file))
        err.print("stopped", markup=False)


async def _until_stopped(
    shown: Demonstration, sockets: Mapping[Place, socket], *, open_browser: bool, json_file: Path | None
) -> None:
    stop = stop_event()
    async with shown.serving(sockets):
        start = f"{shown.where[Place.HOME]}/"
        out.print(f"\nOpen this in your browser:\n\n  {start}\n\nPress Ctrl-C to stop; nothing is kept.", markup=False)
        write_json(json_file, {place.name.lower(): shown.where[place] for place in Place})
        if open_browser:
            webbrowser.open(start)
        await stop.wait()

"""`trefoil live`: three helpers, one device and six places to visit, until Ctrl-C or SIGTERM. Nothing is kept."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import webbrowser
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from socket import socket
from typing import Annotated

import typer
from aiohttp import web

from benchmarks.demos.live.agent import Agent
from benchmarks.demos.live.helper_views import HelperViews
from benchmarks.demos.live.measurement import Measurement
from benchmarks.demos.live.measurement_page import MeasurementPage
from benchmarks.demos.live.pages import ApiCalls, Home, Publisher, Shop
from benchmarks.demos.live.web import SHOP_SITE, Frame, Map, Place, Tracker, ports_taken
from device import agent as device_agent
from device.agent import Report, system_clock
from device.dashboard.formatting import LocalTime
from device.dashboard.server import Dashboard, serve
from device.device import Device
from device.schedule import Schedule
from mpc_helpers.local.launcher import Trio, launched, prepare
from protocol.cli.console import err, out, write_json
from protocol.cli.options import JsonFile
from protocol.cli.stopping import stop_event
from protocol.keys import load_identity


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
            back_link=("Back to the demonstration", f"{where[Place.HOME]}/"),
            below=Frame(Place.DASHBOARD, where).steps_bar(),
        )
        key = load_identity(trio.site_key_path(SHOP_SITE))
        self._measurement = Measurement(folder, trio.helper_set, key, system_clock, seed)

    @contextlib.asynccontextmanager
    async def serving(self, sockets: Mapping[Place, socket]) -> AsyncIterator[None]:
        """Serve all websites while the block runs."""
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(self._measurement.running())
            for place, app in self._apps().items():
                await stack.enter_async_context(serve(app, sockets[place]))
            yield

    def _apps(self) -> Mapping[Place, web.Application]:
        where, tracker, measurement = self.where, self._tracker, self._measurement
        calls = ApiCalls()
        return {
            Place.HOME: Home(where, self._dashboard.login_url).app(),
            Place.NEWS: Publisher(Place.NEWS, where, tracker, system_clock, calls).app(),
            Place.BLOG: Publisher(Place.BLOG, where, tracker, system_clock, calls).app(),
            Place.SHOP: Shop(where, tracker, system_clock, calls, measurement.collect).app(),
            Place.MEASUREMENT: MeasurementPage(where, measurement, tracker, LocalTime()).app(),
            Place.HELPERS: HelperViews(where, measurement, self._trio).app(),
            Place.DASHBOARD: self._dashboard.app(),
            Place.AGENT: Agent(self._device, where[Place.AGENT], where.sites()).app(),
        }


@contextlib.contextmanager
def prepared(
    folder: Path, trio: Trio, port: int, seed: int, schedule: Schedule | None = None
) -> Iterator[tuple[Demonstration, dict[Place, socket]]]:
    """Create a device in `folder`; yield a demonstration with it, and its bound sockets."""
    path = folder / "device.sqlite"
    device_agent.create(path)
    with ports_taken(port) as (where, sockets), device_agent.opened(path, trio.helper_set, schedule=schedule) as device:
        yield Demonstration(folder, where, trio, device, seed), sockets


async def _until_stopped(
    demonstration: Demonstration, sockets: Mapping[Place, socket], *, open_browser: bool, json_file: Path | None
) -> None:
    stop = stop_event()
    async with demonstration.serving(sockets):
        start = f"{demonstration.where[Place.HOME]}/"
        out.print(f"\nOpen this in your browser:\n\n  {start}\n\nPress Ctrl-C to stop; nothing is kept.", markup=False)
        write_json(json_file, {place.name.lower(): demonstration.where[place] for place in Place})
        if open_browser:
            webbrowser.open(start)
        await stop.wait()


def live(
    port: Annotated[
        int, typer.Option(min=0, max=65_528, help="The first of eight neighbouring ports; 0 takes any that are free.")
    ] = 8730,
    seed: Annotated[
        int, typer.Option(min=0, help="What the simulated crowd clicks and buys. Never used for keys or noise.")
    ] = 1,
    open_browser: Annotated[bool, typer.Option("--open", help="Open the start page in your browser at once.")] = False,
    json_file: JsonFile = None,
) -> None:
    """Click an ad, buy the shoes, and watch the report, the three helpers and your budget, in your own browser.

    Example: trefoil live --open
    """
    with tempfile.TemporaryDirectory(prefix="trefoil-live-") as name:
        folder = Path(name)
        trio = prepare(folder / "helpers", now=system_clock(), sites={SHOP_SITE: [SHOP_SITE]})
        with prepared(folder, trio, port, seed) as (demonstration, sockets):
            err.print("starting three helpers…", markup=False)
            with launched(trio):
                asyncio.run(_until_stopped(demonstration, sockets, open_browser=open_browser, json_file=json_file))
        err.print("stopped", markup=False)

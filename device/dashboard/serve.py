"""Serving a dashboard until it is stopped, for `trefoil device dashboard` and the live demonstration."""

from __future__ import annotations

import asyncio
import contextlib
import webbrowser
from collections.abc import AsyncIterator
from pathlib import Path
from socket import socket

from aiohttp import web

from device import agent
from device.dashboard.guard import HOST, listen, origin_of
from device.dashboard.server import Dashboard
from protocol.console import say, write_json
from protocol.errors import TrefoilError
from protocol.stopping import stop_event

# Ends of connections are not waited for: whoever stops the command wants it to stop.
SHUTDOWN_SECONDS = 1.0


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
    """A socket on this machine's own address, or what to do about it."""
    try:
        return listen(port)
    except OSError as error:
        raise TrefoilError(f"cannot listen on {HOST}:{port}: {error.strerror}", "Choose another --port.") from None


def run(path: Path, *, port: int, open_browser: bool, json_file: Path | None) -> None:
    """Until Ctrl-C or SIGTERM. The start URL is printed, and opened if the person wants."""
    with agent.opened(path) as device, take_port(port) as bound:
        dashboard = Dashboard(device, origin_of(bound))
        asyncio.run(_until_stopped(path, dashboard, bound, open_browser=open_browser, json_file=json_file))


async def _until_stopped(
    path: Path, dashboard: Dashboard, bound: socket, *, open_browser: bool, json_file: Path | None
) -> None:
    stop = stop_event()
    async with serving(dashboard.app(), bound):
        start = dashboard.invite()
        say(f"The privacy dashboard of {path}, for this machine only:\n")
        say(f"  {start}\n\nThe link works once. Press Ctrl-C to stop.")
        write_json(json_file, {"url": start})
        if open_browser:
            webbrowser.open(start)
        await stop.wait()

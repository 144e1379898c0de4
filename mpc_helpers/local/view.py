"""`trefoil launch` as a person sees it: a live table on a terminal, a line per change otherwise."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.live import Live
from rich.table import Table

from mpc_helpers.local.launcher import DEFAULT_SITE, Launched, Trio, health, launched_helpers
from protocol.console import folded, out, say, write_json
from protocol.errors import TrefoilError
from protocol.shares import PARTIES
from protocol.stopping import stop_flag

LOOK_SECONDS = 1.0


def launch_and_watch(
    folder: Path, *, sites: Sequence[str], ports: Sequence[int], now: int, json: Path | None = None
) -> None:
    """Run until Ctrl-C or SIGTERM, or until one helper ends by itself; then stop those that run, in order."""
    if ports and len(ports) != PARTIES:
        raise TrefoilError(
            f"three helpers need three ports, not {len(ports)}", "Give --port three times, or not at all."
        )
    wanted = {site: [site] for site in sites or [DEFAULT_SITE]}
    with stop_flag() as stop:
        say(f"starting three helpers from {folder}")
        with launched_helpers(folder, now=now, sites=wanted, ports=ports or None) as running:
            _introduce(running, list(wanted))
            write_json(json, _described(running.trio, list(wanted)))
            try:
                _watch_live(running, stop) if out.is_terminal else _watch_plain(running, stop)
            finally:
                say("stopping")
        say(f"stopped; keys, ledgers and logs are kept in {folder}, and the same command goes on with them")


def _introduce(running: Launched, sites: Sequence[str]) -> None:
    say(f"helper set:  {running.trio.helper_set_path}")
    for site in sites:
        say(f"site key:    {running.trio.site_key_path(site)}")
    say("Query them from another terminal; Ctrl-C stops them.")


def _described(trio: Trio, sites: Sequence[str]) -> dict[str, object]:
    return {
        "helper_set": str(trio.helper_set_path),
        "site_keys": {site: str(trio.site_key_path(site)) for site in sites},
        "addresses": [helper.address for helper in trio.helper_set.helpers],
    }


def _watch_live(running: Launched, stop: threading.Event) -> None:
    with Live(_table(running), console=out, auto_refresh=False) as live:
        while not stop.wait(LOOK_SECONDS):
            running.check_running()
            live.update(_table(running), refresh=True)


def _watch_plain(running: Launched, stop: threading.Event) -> None:
    last = ""
    while not stop.wait(LOOK_SECONDS):
        running.check_running()
        lines = [f"{name}: {state} {queries}".rstrip() for name, _, state, queries in _rows(running)]
        if (text := " | ".join(lines)) != last:
            last = text
            say(text)


def _table(running: Launched) -> Table:
    table = Table(title="Three helpers on this machine")
    for heading in ("helper", "address", "state", "queries"):
        table.add_column(heading)
    for row in _rows(running):
        table.add_row(*row)
    return folded(table)


def _rows(running: Launched) -> list[tuple[str, str, str, str]]:
    rows = []
    for helper in running.trio.helper_set.helpers:
        page = health(helper)
        state = "up" if page else "does not answer"
        queries = page.get("queries", {}) if page else {}
        shown = (
            ", ".join(f"{count} {state}" for state, count in queries.items()) if isinstance(queries, Mapping) else ""
        )
        rows.append((helper.name, helper.address, state, shown))
    return rows

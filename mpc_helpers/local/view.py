"""Views of helpers for the command line: health and `trefoil doctor`, and `trefoil launch` with its live table."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rich.live import Live
from rich.table import Table

from mpc_helpers.identity.config import HelperConfig
from mpc_helpers.local.doctor import HERE, Examination, Severity, Subject, reasons_on
from mpc_helpers.local.launcher import DEFAULT_SITE, Launched, health, launched_helpers
from mpc_helpers.service.daemon import request_reload
from mpc_helpers.service.health import Concern
from protocol.cli.console import fold, out, say, write_json
from protocol.cli.stopping import stop_flag
from protocol.errors import ErrorKind, TrefoilError, printable
from protocol.helper_set import HelperEntry, HelperSet
from protocol.shares import PARTIES

SECONDS = 10.0
RELOAD_SECONDS = 60.0
LOOK_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class HelperHealth:
    """The health page of one helper; None if it does not respond under its pinned certificate."""

    helper: HelperEntry
    page: Mapping[str, object] | None

    @property
    def ready(self) -> bool:
        return self.page is not None and self.page.get("ready") is True

    @property
    def status(self) -> str:
        return "does not respond" if self.page is None else printable(str(self.page.get("status", "unknown")), 40)

    def reasons(self) -> list[str]:
        return [text for _, text, _ in reasons_on(self.page)]

    def queries(self) -> str:
        states = self.page.get("queries", {}) if self.page else {}
        counts = states.items() if isinstance(states, dict) else ()
        return printable(", ".join(f"{count} {state}" for state, count in counts), 300)

    def opens(self) -> str:
        return printable(str(self.page.get("opens", "")), 40) if self.page else ""

    def to_json(self) -> dict[str, object]:
        return {"name": self.helper.name, "address": self.helper.address, "ready": self.ready, "health": self.page}


def look_at(helper_set: HelperSet, which: Sequence[int]) -> list[HelperHealth]:
    """Fetch the health of helpers 1, 2 and 3, or of those in `which`, concurrently."""
    for number in which:
        if number not in range(1, PARTIES + 1):
            raise TrefoilError(f"there is no helper {number}", "Helpers are 1, 2 and 3.", kind=ErrorKind.OUT_OF_RANGE)
    chosen = [helper_set.helpers[number - 1] for number in which or range(1, PARTIES + 1)]
    with ThreadPoolExecutor(PARTIES) as threads:
        pages = list(threads.map(lambda helper: health(helper, SECONDS), chosen))
    return [HelperHealth(helper, page) for helper, page in zip(chosen, pages, strict=True)]


def table_of(helpers: Sequence[HelperHealth]) -> Table:
    table = Table()
    for heading in ("helper", "address", "status", "queries", "opens", "look at"):
        table.add_column(heading)
    for each in helpers:
        cells = (each.helper.name, each.helper.address, each.status, each.queries(), each.opens())
        table.add_row(*cells, "\n".join(each.reasons()))
    return table


def show_examination(examination: Examination) -> None:
    places = dict.fromkeys([HERE, *(each.place for each in examination.findings)])
    severities: dict[Subject, dict[str, Severity]] = {subject: {} for subject in Subject}
    for each in examination.findings:
        row, ranks = severities[each.subject], list(Severity)
        row[each.place] = max(row.get(each.place, Severity.OK), each.severity, key=ranks.index)
    table = Table()
    for heading in ("checked", *places):
        table.add_column(heading)
    for subject, row in severities.items():
        if row:
            table.add_row(subject.value, *(row[place].value if place in row else "" for place in places))
    out.print(table)
    problems = [each for each in examination.findings if each.severity is not Severity.OK]
    for each in sorted(problems, key=lambda each: each.severity is not Severity.FAULT):
        say(f"{each.severity.value}, {each.place}, {each.subject.value}: {each.text}")
        say(f"    {each.remedy}")
    if not examination.faults:
        say("nothing stops a query" if problems else "nothing is wrong")


def reload_and_report(config: HelperConfig, helper: HelperEntry) -> str:
    """Have a running helper reload its sites, and return a sentence about the outcome."""
    before = health(helper, SECONDS)
    pid = request_reload(config)
    deadline = time.monotonic() + RELOAD_SECONDS
    while before is not None and time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)
        page = health(helper, SECONDS)
        if page is None or page.get("reloads") == before.get("reloads"):
            continue
        problems = [text for concern, text, _ in reasons_on(page) if concern == Concern.CONFIGURATION.value]
        if problems:
            hint = "Only sites are reloaded; a restart resumes every query."
            raise TrefoilError(f"{helper.name}: {problems[0]}", hint, kind=ErrorKind.REFUSED)
        return f"{helper.name} has reloaded its sites"
    return f"process {pid} was signalled to reload its sites; see its log for the outcome"


VIEW_SECONDS = 1.0


def launch_and_watch(
    folder: Path, *, sites: Sequence[str], ports: Sequence[int], now: int, json: Path | None = None
) -> None:
    """Run three helpers until Ctrl-C or SIGTERM, or until one of them exits; then stop the others."""
    if ports and len(ports) != PARTIES:
        raise TrefoilError(
            f"three helpers need three ports, not {len(ports)}",
            "Give --port three times, or not at all.",
            kind=ErrorKind.INVALID_VALUE,
        )
    wanted = {site: [site] for site in sites or [DEFAULT_SITE]}
    with stop_flag() as stop:
        say(f"starting three helpers from {folder}")
        with launched_helpers(folder, now=now, sites=wanted, ports=ports or None) as running:
            say(f"helper set:  {running.trio.helper_set_path}")
            for site in wanted:
                say(f"site key:    {running.trio.site_key_path(site)}")
            say("Query them from another terminal; Ctrl-C stops them.")
            described = {
                "helper_set": str(running.trio.helper_set_path),
                "site_keys": {site: str(running.trio.site_key_path(site)) for site in wanted},
                "addresses": [helper.address for helper in running.helper_set.helpers],
            }
            write_json(json, described)
            try:
                _watch_live(running, stop) if out.is_terminal else _watch_plain(running, stop)
            finally:
                say("stopping")
        say(f"stopped; keys, ledgers and logs are kept in {folder}; run the same command to continue")


def _watch_live(running: Launched, stop: threading.Event) -> None:
    with Live(_table(running), console=out, auto_refresh=False) as live:
        while not stop.wait(VIEW_SECONDS):
            running.check_running()
            live.update(_table(running), refresh=True)


def _watch_plain(running: Launched, stop: threading.Event) -> None:
    last = ""
    while not stop.wait(VIEW_SECONDS):
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
    return fold(table)


def _rows(running: Launched) -> list[tuple[str, str, str, str]]:
    rows = []
    for helper in running.trio.helper_set.helpers:
        page = health(helper)
        state = "up" if page else "does not respond"
        rows.append((helper.name, helper.address, state, HelperHealth(helper, page).queries()))
    return rows

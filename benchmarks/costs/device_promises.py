"""What a device promises about saves, and to an honest site while others flood it, measured for `trefoil bench device`.

Each figure comes from the real path: a durable database, sealing to three helpers, and for first saves the command that
a person types, in a process of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from rich.table import Table

from benchmarks.costs.report_cost import BENCH_TIME, Helpers
from benchmarks.results.origin import ROOT
from device.conversion import ConversionOptions
from device.device import Device
from device.events import ImpressionOptions
from device.limits import TREFOIL_SERVICE, DeviceLimits
from device.report import DebugReport, DebugSeal
from device.schedule import SPREAD, Delayed
from device.site import load_tables
from device.stores.sqlite_store import SqliteStore
from protocol.cli.console import plain_table

MOST_FIRST_SAVES = 100
SAVES_OF_A_PAGE = 20
PAGES = 20
# Commands that run at the same time.
COMMANDS = 8
HOSTILE_CALLERS = 50
REPORTS_IN_A_FLOOD = 10
# Hostile callers ask for so little that no budget runs out: a null report is then one that was not ready in time.
SHOPS_EPSILON, LITTLE = 0.01, 0.00002
# An answer may leave so many seconds after its delay and its random part.
ON_TIME = 0.1
_COMMAND_SECONDS = 120
# How long a flood goes on before the shop calls.
_FLOODED = 0.2
_WEEK = DeviceLimits().epoch_length


@dataclass(frozen=True, slots=True)
class Promises:
    """Seconds of twenty saves, first saves that were kept, and the shop's reports beside fifty hostile callers."""

    page_seconds: list[float]
    first_saves: int
    first_saves_kept: int
    flood_seconds: list[float]
    flood_real: int
    flood_calls: int
    delay: float

    @property
    def late(self) -> int:
        """Return how many of the shop's reports were late."""
        return sum(seconds > self.delay + SPREAD + ON_TIME for seconds in self.flood_seconds)

    def to_json(self) -> dict[str, object]:
        return {
            "saves_of_a_page": SAVES_OF_A_PAGE,
            "page_median_ms": float(np.median(self.page_seconds)) * 1000,
            "page_slowest_ms": max(self.page_seconds) * 1000,
            "first_saves": self.first_saves,
            "first_saves_kept": self.first_saves_kept,
            "hostile_callers": HOSTILE_CALLERS,
            "hostile_calls": self.flood_calls,
            "reports_in_flood": len(self.flood_seconds),
            "reports_in_flood_real": self.flood_real,
            "reports_in_flood_late": self.late,
            "flood_median_ms": float(np.median(self.flood_seconds)) * 1000,
            "flood_slowest_ms": max(self.flood_seconds) * 1000,
        }

    def table(self) -> Table:
        """Return the figures as a table."""
        pages, flooded = (np.array(each) * 1000 for each in (self.page_seconds, self.flood_seconds))
        columns = ("promise", "figure")
        table = plain_table("what a device promises", columns, words=set(columns))
        table.add_row("20 saves of a page", f"{np.median(pages):.1f} ms; slowest of {PAGES} {pages.max():.1f} ms")
        table.add_row("first saves of a process that were kept", f"{self.first_saves_kept} of {self.first_saves}")
        reports = f"{self.flood_real} of {flooded.size} real, {self.late} late, slowest {flooded.max():.0f} ms"
        table.add_row(f"a shop's reports beside {HOSTILE_CALLERS} callers ({self.flood_calls} calls)", reports)
        return table


def keep_promises(folder: Path, first_saves: int, delay_ms: int) -> Promises:
    """Measure all of them, one after another."""
    with opened_device(folder / "pages.db", delay_ms) as device:
        pages = [_page(device, number) for number in range(PAGES)]
    with ThreadPoolExecutor(COMMANDS) as commands:
        kept = list(commands.map(partial(_first_save, folder), range(first_saves)))
    with opened_device(folder / "flood.db", delay_ms) as device:
        flooded, calls = _flooded(device)
    real = sum(any(report.histogram) for report, _ in flooded)
    return Promises(pages, first_saves, sum(kept), [seconds for _, seconds in flooded], real, calls, delay_ms / 1000)


@contextmanager
def opened_device(path: Path, delay_ms: int) -> Iterator[Device[DebugReport]]:
    """Open a debug device, whose reports show whether they are real, with the real schedule."""
    load_tables()
    SqliteStore.create(path, epoch_length=_WEEK, epoch_start=BENCH_TIME, debug=True)
    with closing(SqliteStore.open(path, epoch_length=_WEEK, clock=lambda: BENCH_TIME)) as store:
        schedule = Delayed.within(DeviceLimits(delay_ms=delay_ms))
        with closing(schedule):
            seal = DebugSeal(Helpers.fresh().helper_set)
            yield Device(store, seal, clock=lambda: BENCH_TIME, schedule=schedule)


def _page(device: Device[DebugReport], number: int) -> float:
    """Return the seconds that a page waits for its saves, one after another."""
    begun = time.perf_counter()
    for bucket in range(SAVES_OF_A_PAGE):
        device.save_impression(f"news{number}.example", ImpressionOptions(bucket))
    return time.perf_counter() - begun


def _first_save(folder: Path, number: int) -> bool:
    """Save an impression by the command, in a new process and on a new device. Return whether it is there."""
    database, result = folder / f"first{number}.db", folder / f"first{number}.json"
    command = [sys.executable, str(ROOT / "trefoil.py"), "device", "impression", "news.example", "--db", str(database)]
    command += ["--bucket", "1", "--json", str(result)]
    done = subprocess.run(command, capture_output=True, timeout=_COMMAND_SECONDS, check=False)
    if done.returncode or json.loads(result.read_text())["kept"] is not True:
        return False
    with closing(SqliteStore.open(database, epoch_length=_WEEK, clock=lambda: 0)) as store, store.transaction():
        return len(store.impressions()) == 1


def _flooded(device: Device[DebugReport]) -> tuple[list[tuple[DebugReport, float]], int]:
    """Return the shop's reports with their seconds, and how many calls the hostile callers made meanwhile.

    Each of these saves in one thread and measures in another, and neither ever pauses.
    """
    device.save_impression("news.example", ImpressionOptions(1))
    device.calendar()
    over, calls = threading.Event(), [0] * HOSTILE_CALLERS
    shop, bad = (ConversionOptions(TREFOIL_SERVICE, 128, epsilon=epsilon) for epsilon in (SHOPS_EPSILON, LITTLE))

    def save(number: int) -> None:
        while not over.is_set():
            device.save_impression(f"bad{number}.example", ImpressionOptions(1))
            calls[number] += 1

    def measure(number: int) -> None:
        while not over.is_set():
            device.measure_conversion(f"bad{number}.example", bad)
            calls[number] += 1

    with ThreadPoolExecutor(2 * HOSTILE_CALLERS) as callers:
        running = [callers.submit(call, number) for number in range(HOSTILE_CALLERS) for call in (save, measure)]
        try:
            time.sleep(_FLOODED)
            reports = []
            for _ in range(REPORTS_IN_A_FLOOD):
                begun = time.perf_counter()
                reports.append((device.measure_conversion("shop.example", shop), time.perf_counter() - begun))
        finally:
            over.set()
        for each in running:
            each.result(_COMMAND_SECONDS)
    return reports, sum(calls)

"""Measure what a page can infer from the time of its calls, in real Chromium: `trefoil bench browser`.

Four browsers have four devices: an empty one, two full ones, and a full one that is switched off. Three hosts without a
browser have the first, the second and the last of these states, and are called at their pipes. A round calls every one
of them once in random order, and again devices in the same states without the delay, one by one. A page's times are by
its own `performance.now()`. The two full devices of pages are a control.
"""

from __future__ import annotations

import base64
import json
import os
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple, Protocol, cast

import numpy as np
from rich.table import Table

from benchmarks.costs.areas import Area, Samples, area_between
from benchmarks.costs.device_timing import BUCKETS, EPSILON, LIMITS, SITE, State, device_in
from benchmarks.workloads.chromium import CHROMIUM, Installation, launched
from benchmarks.workloads.seeded import generator
from device.browser.host import VERSION, Answer, Host, Pipe
from device.conversion import ConversionOptions
from device.device import Device
from device.limits import TREFOIL_SERVICE
from device.schedule import Delayed
from device.web.browser import Page as CallingPage
from protocol.errors import ErrorKind, TrefoilError
from protocol.report import SealedReport

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext, Page

# A call with this epsilon, as small as the other, is answered by the host's second device, which has no delay.
AT_ONCE = EPSILON / 2
# Between two calls with the delay: longer than a device computes for one on a free processor.
APART = 0.12
# A page asks again as long as it has no API: the extension offers it when its host has answered.
READY_SECONDS = 120
CALL_SECONDS = 60
_LENGTH = struct.Struct("=I")
_OPTIONS = {"aggregationService": TREFOIL_SERVICE, "histogramSize": BUCKETS, "credit": [1.0] * 10}
_OPTIONS |= {"value": 100, "maxValue": 100}
_START = """(options) => {
  const begun = performance.now();
  window.made = navigator.attribution.measureConversion(options).then(() => (performance.now() - begun) / 1000);
}"""


class CalledDevice(NamedTuple):
    """A device, and where it is called: in a page, or at the pipe of its host."""

    where: str
    state: State
    number: int = 1


DEVICES = (
    *(CalledDevice("page", state) for state in (State.EMPTY, State.FULL, State.FULL_OFF)),
    CalledDevice("page", State.FULL, 2),
    *(CalledDevice("pipe", state) for state in (State.EMPTY, State.FULL, State.FULL_OFF)),
)
QUESTIONS = {
    "page: a full device, or an empty one": (DEVICES[0], DEVICES[1]),
    "page: switched on, or off": (DEVICES[2], DEVICES[1]),
    "pipe: a full device, or an empty one": (DEVICES[4], DEVICES[5]),
    "pipe: switched on, or off": (DEVICES[6], DEVICES[5]),
}
# Of devices with the delay alone.
CONTROLS = {"control, page: two full devices": (DEVICES[3], DEVICES[1])}


class MeasuredHost(Host[SealedReport]):
    """The native messaging host with a second device in the same state, which has no delay."""

    def __init__(self, pipe: Pipe, delayed: Device[SealedReport], at_once: Device[SealedReport]) -> None:
        super().__init__(pipe, lambda _: nullcontext(delayed), SealedReport.encode)
        self._at_once = at_once

    def _report(self, page: CallingPage, options: ConversionOptions, action: str | None) -> Answer:
        if options.epsilon != AT_ONCE:
            return super()._report(page, options, action)
        report = self._at_once.measure_conversion(page.site, options, action=action)
        return {"report": base64.b64encode(report.encode()).decode()}


def serve(state: State) -> None:
    """Run as a host: serve devices in `state` until standard input is closed."""
    sink = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    with tempfile.TemporaryDirectory(prefix="trefoil-bench-") as name, ExitStack() as stack:
        schedule = Delayed.within(LIMITS)
        delayed = stack.enter_context(device_in(state, Path(name) / "delayed.db", schedule=schedule))
        at_once = stack.enter_context(device_in(state, Path(name) / "at-once.db"))
        MeasuredHost(Pipe(sys.stdin.buffer, sink), delayed, at_once).run()


class DeviceCaller(Protocol):
    """Calls one device, and says how long that took."""

    def greet(self) -> None: ...

    def start(self, epsilon: float) -> None: ...

    def seconds(self) -> float: ...


class PageCaller:
    """A page of a browser whose host has the device."""

    def __init__(self, context: BrowserContext) -> None:
        # Every request is answered here, so no site is needed; the document's origin is https all the same.
        context.route("**/*", lambda route: route.fulfill(content_type="text/html", body="<!doctype html>"))
        self._page: Page = context.new_page()

    def greet(self) -> None:
        deadline = time.monotonic() + READY_SECONDS
        self._page.goto(f"https://{SITE}/")
        while not self._page.evaluate("'attribution' in navigator"):
            if time.monotonic() > deadline:
                raise TrefoilError("no page was given the API", kind=ErrorKind.TIMEOUT)
            time.sleep(1)
            self._page.goto(f"https://{SITE}/")

    def start(self, epsilon: float) -> None:
        self._page.evaluate(_START, _OPTIONS | {"epsilon": epsilon})

    def seconds(self) -> float:
        return float(self._page.evaluate("made"))


class PipeCaller:
    """A process that runs the host as a browser does."""

    def __init__(self, program: list[str], stack: ExitStack) -> None:
        host = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        stack.callback(host.wait, CALL_SECONDS)
        self._in, self._out = cast("BinaryIO", host.stdin), cast("BinaryIO", host.stdout)
        stack.callback(self._in.close)
        self._thread = stack.enter_context(ThreadPoolExecutor(1))
        self._made: Future[float] = Future()

    def greet(self) -> None:
        self._exchange({"id": 1, "kind": "hello", "profile": "bench", "version": VERSION})

    def _exchange(self, message: Mapping[str, object]) -> float:
        """Send one frame, and return the seconds until the last byte of the next one."""
        data = json.dumps(message).encode()
        begun = time.perf_counter()
        self._in.write(_LENGTH.pack(len(data)) + data)
        self._in.flush()
        (size,) = _LENGTH.unpack(self._out.read(_LENGTH.size))
        answer = self._out.read(size)
        seconds = time.perf_counter() - begun
        if b'"error"' in answer:
            raise TrefoilError(f"the host refused: {answer.decode()}", kind=ErrorKind.REFUSED)
        return seconds

    def start(self, epsilon: float) -> None:
        chain = [{"origin": f"https://{SITE}", "policy": ""}]
        wanted = {"id": 2, "kind": "measure", "tab": 1, "acted": True, "chain": chain}
        self._made = self._thread.submit(self._exchange, wanted | {"options": _OPTIONS | {"epsilon": epsilon}})

    def seconds(self) -> float:
        return self._made.result(CALL_SECONDS)


@contextmanager
def all_callers() -> Iterator[list[DeviceCaller]]:
    """Start every browser and host, and yield callers in the order of `DEVICES`."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        missing = "playwright", "Install it: pip install playwright"
    else:
        missing = ("Chromium", "Install it: apt install chromium") if CHROMIUM is None else ("", "")
    if missing[0]:
        raise TrefoilError(f"{missing[0]} is not installed", missing[1], kind=ErrorKind.MISSING_DEPENDENCY)
    with tempfile.TemporaryDirectory(prefix="trefoil-bench-") as name, ExitStack() as stack:
        playwright = stack.enter_context(sync_playwright())
        callers: list[DeviceCaller] = []
        for number, place in enumerate(DEVICES):
            host = f"benchmarks.costs.browser_timing {place.state.name}"
            if place.where == "pipe":
                callers.append(PipeCaller([sys.executable, "-m", *host.split()], stack))
            else:
                folder = Path(name) / str(number)
                folder.mkdir()
                context = stack.enter_context(launched(playwright, Installation(folder, host)))
                callers.append(PageCaller(context))
        for caller in callers:
            caller.greet()
        yield callers


@dataclass(frozen=True, slots=True)
class BrowserTiming:
    """Seconds of calls by place, with the delay and without."""

    delayed: Mapping[CalledDevice, Samples]
    at_once: Mapping[CalledDevice, Samples]
    busy_loops: int

    def _answers(self) -> Iterator[tuple[str, str, Area, list[float]]]:
        """Yield the schedule and text of every question, with the area and the medians in milliseconds."""
        schedules = [("with_delay", self.delayed, QUESTIONS | CONTROLS), ("without_delay", self.at_once, QUESTIONS)]
        for schedule, times, questions in schedules:
            for text, places in questions.items():
                first, second = (times[place] for place in places)
                medians = [float(1000 * np.median(side)) for side in (first, second)]
                yield schedule, text, area_between(first, second), medians

    def to_json(self) -> dict[str, object]:
        answers: dict[str, dict[str, object]] = {"with_delay": {}, "without_delay": {}}
        for schedule, text, area, medians in self._answers():
            answers[schedule][text] = {"median_ms": medians, **area.to_json()}
        return {
            "samples": len(self.delayed[DEVICES[0]]),
            "busy_loops": self.busy_loops,
            "delay_ms": LIMITS.delay_ms,
            "questions": len(QUESTIONS),
            **answers,
        }

    def table(self) -> Table:
        title = f"what the time of a call tells, beside {self.busy_loops} busy loops: area, 95 % interval"
        table = Table("schedule", "question", "area", "interval", "a coin?", "medians, ms", title=title)
        for schedule, text, area, medians in self._answers():
            low, high = area.interval()
            coin = "yes" if area.is_a_coin else "no"
            times = " and ".join(f"{median:.1f}" for median in medians)
            table.add_row(
                schedule.replace("_", " "), text, f"{area.value:.3f}", f"{low:.3f} to {high:.3f}", coin, times
            )
        return table


def measure(samples: int, busy: int, seed: int, advance: Callable[[int], None]) -> BrowserTiming:
    """Measure `samples` calls of each place, with the delay and without, beside `busy` busy loops."""
    draw = generator(seed)
    delayed = {place: np.empty(samples) for place in DEVICES}
    at_once = {place: np.empty(samples) for pair in QUESTIONS.values() for place in pair}
    with all_callers() as callers, ExitStack() as stack:
        for _ in range(busy):
            # In a session of its own, as browsers are: where Linux shares processors by session, ten loops in one
            # session would starve nobody.
            command = [sys.executable, "-c", "while True: pass"]
            loop = stack.enter_context(subprocess.Popen(command, start_new_session=True))
            stack.callback(loop.kill)
        for number in range(samples):
            for place in draw.permutation(len(DEVICES)):
                callers[place].start(EPSILON)
                time.sleep(APART)
            # Nobody is asked for a time while another's call is under way.
            time.sleep(LIMITS.delay_ms / 1000 + APART)
            for place, caller in zip(DEVICES, callers, strict=True):
                delayed[place][number] = caller.seconds()
            for place in draw.permutation(len(DEVICES)):
                if DEVICES[place] in at_once:
                    callers[place].start(AT_ONCE)
                    at_once[DEVICES[place]][number] = callers[place].seconds()
            advance(1)
    return BrowserTiming(delayed, at_once, busy)


if __name__ == "__main__":
    serve(State[sys.argv[1]])

"""The native messaging host: the device that the extension asks, over standard input and output.

It is told what the browser knows (origins, tabs, policies, input events) and what pages claim (options); what
follows from it is decided here. The reading thread checks policy and activation in the order of messages, accepts
saves, and answers neither them nor a refusal before it may leave (`device.schedule`): it never sleeps, so no page waits
for another's. A measurement then waits for one of the threads of its top-level site, which the callers on it share by
turns: a flood delays the site that holds it. Nothing is logged: a log would hold sites that a person visited.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import os
import signal
import struct
import sys
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, suppress
from functools import partial
from typing import Any, BinaryIO, Generic, TypeVar
from urllib.parse import parse_qsl, urlsplit

from device import agent
from device.browser.profiles import data_folder, opened_profile
from device.budget import FilterKind
from device.conversion import ConversionOptions
from device.device import Device
from device.errors import StandardError
from device.events import ImpressionOptions
from device.overview import Overview
from device.schedule import DRAIN_SECONDS, random_spread, soon
from device.site import parse_site
from device.web.browser import Browser, Container, Document, Feature, Page, origin_of
from device.web.dictionaries import read_options
from device.web.http_headers import clears_impressions, parse_measure_conversion, parse_save_impression
from protocol.errors import ErrorKind, ProtocolError, TrefoilError
from protocol.net.json_message import decode_json
from protocol.report import SealedReport

# The browser refuses longer messages of a host, and ends it.
MAX_FRAME = 1 << 20
# More documents than a browser nests.
MAX_DOCUMENTS = 64
# Calls of one site that wait for their answers at the same time, those that may wait behind them, and all threads. A
# site is bound to a tab in which the person acts, so sixteen must flood at once before any other has to wait.
SIDE_BY_SIDE = 16
MAX_WAITING = 1000
THREADS = 256
# The messages that a page causes.
OF_PAGES = ("save", "measure", "response")
# What the extension must say to be understood.
VERSION = 1
_LENGTH = struct.Struct("=I")

Message = Mapping[str, Any]  # Any: checked where a field is read
Answer = dict[str, object]
# Is passed the moment at which an answer may leave.
Leave = Callable[[float], None]
UNAVAILABLE: Answer = {"error": "OperationError", "message": "The device cannot do that now."}
R = TypeVar("R")


class Pipe:
    """Frames of JSON: four bytes of length in the machine's own order, then that many bytes."""

    def __init__(self, source: BinaryIO, sink: BinaryIO) -> None:
        self._source = source
        self._sink = sink
        self._mutex = threading.Lock()

    def messages(self) -> Iterator[Message]:
        """Yield every message with an id until the browser closes the pipe. Anything else is answered as refused."""
        while len(head := self._source.read(_LENGTH.size)) == _LENGTH.size:
            (size,) = _LENGTH.unpack(head)
            try:
                message = self._body(size)
            except ProtocolError:
                self.write(None, UNAVAILABLE)
                continue
            if message is None:
                return
            yield message

    def _body(self, size: int) -> Message | None:
        if size > MAX_FRAME:
            while size > 0 and (skipped := self._source.read(min(size, MAX_FRAME))):
                size -= len(skipped)
            raise ProtocolError("a message is too long", kind=ErrorKind.TOO_LARGE)
        data = self._source.read(size)
        if len(data) < size:
            return None
        message = decode_json(data)
        if not isinstance(message, dict) or type(message.get("id")) is not int:
            raise ProtocolError("a message has no id", kind=ErrorKind.MISSING_FIELD)
        return message

    def write(self, identifier: int | None, answer: Mapping[str, object]) -> None:
        """Send one answer. A browser that has gone away is no error: nobody is left to hear it."""
        data = json.dumps({"id": identifier, **answer}, separators=(",", ":")).encode()
        if len(data) > MAX_FRAME:
            data = json.dumps({"id": identifier, **UNAVAILABLE}).encode()
        with self._mutex, suppress(BrokenPipeError):
            self._sink.write(_LENGTH.pack(len(data)) + data)
            self._sink.flush()


class CallQueues:
    """Runs calls a few side by side for each site; on it one caller after another, each in the order of its calls."""

    def __init__(self, threads: int, side_by_side: int) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="calls")
        self._side_by_side = side_by_side
        # By site and caller. Dictionaries keep the order of insertion: a caller that had its turn goes to the end.
        self._waiting: dict[str, dict[str, deque[Callable[[], None]]]] = {}
        self._running: dict[str, int] = {}
        self._mutex = threading.Lock()

    def submit(self, site: str, caller: str, work: Callable[[], None]) -> bool:
        """Accept `work`, which must not raise, or return False if too much of this site waits."""
        with self._mutex:
            callers = self._waiting.setdefault(site, {})
            if sum(map(len, callers.values())) >= MAX_WAITING:
                return False
            callers.setdefault(caller, deque()).append(work)
            if self._running.get(site, 0) < self._side_by_side:
                self._running[site] = self._running.get(site, 0) + 1
                self._threads.submit(self._run, site)
        return True

    def _run(self, site: str) -> None:
        while (work := self._next(site)) is not None:
            work()

    def _next(self, site: str) -> Callable[[], None] | None:
        with self._mutex:
            callers = self._waiting[site]
            if callers:
                caller = next(iter(callers))
                jobs = callers.pop(caller)
                work = jobs.popleft()
                if jobs:
                    callers[caller] = jobs
                return work
            self._running[site] -= 1
            if not self._running[site]:
                del self._running[site], self._waiting[site]
            return None

    def close(self, *, drop: bool = False) -> None:
        """Wait for what runs and what waits, or, with `drop`, for what runs."""
        with self._mutex:
            for callers in self._waiting.values() if drop else ():
                callers.clear()
        self._threads.shutdown()


class Timer:
    """Runs each piece of work at its own moment of the monotonic clock. What is left at the end is dropped."""

    def __init__(self) -> None:
        # Its clock is `time.monotonic`.
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="answers", daemon=True)
        self._thread.start()

    def at(self, moment: float, work: Callable[[], None]) -> None:
        self._loop.call_soon_threadsafe(self._loop.call_at, moment, work)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        # It may be writing to a browser that no longer reads.
        self._thread.join(DRAIN_SECONDS)
        if not self._thread.is_alive():
            self._loop.close()


OpenProfile = Callable[[str], AbstractContextManager[Device[R]]]


class Host(Generic[R]):
    """Answers the extension. `open_profile` opens the device of a profile, and `encode` writes its reports as bytes."""

    def __init__(self, pipe: Pipe, open_profile: OpenProfile[R], encode: Callable[[R], bytes]) -> None:
        self._pipe = pipe
        self._open_profile = open_profile
        self._encode = encode
        self._calls = CallQueues(THREADS, SIDE_BY_SIDE)
        self._timer = Timer()
        # What the person asks, and what a site asks to clear, is done one by one and waits for no call.
        self._commands = CallQueues(2, side_by_side=1)
        # The sites of which a Clear-Site-Data header waits to be heeded.
        self._to_clear: set[str] = set()
        self._browser: Browser[R] | None = None
        self._opened = ExitStack()
        # What is answered by the reading thread, and what by the person's queue.
        self._immediate = {
            "hello": self._hello,
            "acted": self._acted,
            "navigated": self._navigated,
            "closed": self._closed,
        }
        self._in_person = {
            "forget": self._forget,
            "overview": self._overview,
            "switch": self._switch,
            "page": self._page,
        }

    def run(self) -> None:
        """Serve until the browser closes the pipe. What was accepted is applied if the browser leaves time for it."""
        with self._opened:
            for message in self._pipe.messages():
                self.dispatch(message)
            self._commands.close()
            self._calls.close(drop=True)
            self._timer.close()

    def dispatch(self, message: Message) -> None:
        """Answer one message: now, from a queue, or, if a page asks, when a save or an error leaves."""
        leaves = [time.monotonic() + soon(random_spread())]
        answer: Answer | None = self._attempt(partial(self._start, message, leaves.append))
        if answer is None:
            return
        if message.get("kind") in OF_PAGES:
            self._timer.at(leaves[-1], partial(self._pipe.write, message["id"], answer))
        else:
            self._pipe.write(message["id"], answer)

    def _start(self, message: Message, leave: Leave) -> Answer | None:
        kind = message.get("kind")
        if kind in self._immediate:
            return self._immediate[kind](message) or {}
        if kind == "save":
            return self._save(message, leave)
        if kind == "measure":
            return self._measure(message)
        if kind == "response":
            return self._response(message, leave)
        if kind == "clear":
            return self._clear(message)
        if kind in self._in_person:
            work = partial(self._in_person[kind], message)
            return self._enqueue(message, self._commands, "person", "person", work)
        raise ProtocolError("the host knows no such message", kind=ErrorKind.UNKNOWN_NAME)

    def _enqueue(
        self, message: Message, queues: CallQueues, site: str, caller: str, work: Callable[[], Answer | None]
    ) -> Answer | None:
        """Let a queue answer the message, or return the answer that it has no place."""

        def run() -> None:
            self._pipe.write(message["id"], self._attempt(work) or {})

        return None if queues.submit(site, caller, run) else UNAVAILABLE

    @staticmethod
    def _attempt(work: Callable[[], Answer | None]) -> Answer | None:
        """Run `work`. A page learns of the standard's errors, and of any other only that there was one."""
        try:
            return work()
        except StandardError as error:
            return {"error": error.name, "message": str(error)}
        except Exception:
            # Whatever it is, it must not end the host, which a site could then do to all others.
            return UNAVAILABLE

    @property
    def device(self) -> Device[R]:
        return self.browser.device

    @property
    def browser(self) -> Browser[R]:
        if self._browser is None:
            raise ProtocolError("the extension must say hello first", kind=ErrorKind.NOT_OPENED)
        return self._browser

    def _hello(self, message: Message) -> Answer:
        """Open the device of the profile. A worker that starts again under the same host says it again."""
        if message.get("version") != VERSION:
            raise ProtocolError("the extension is of another version", kind=ErrorKind.UNKNOWN_VERSION)
        if self._browser is None:
            device = self._opened.enter_context(self._open_profile(_text(message, "profile")))
            self._browser = Browser(device, agent.system_clock)
        overview = self.device.overview()
        return {"services": sorted(overview.limits.aggregation_services), "enabled": overview.enabled}

    def _acted(self, message: Message) -> None:
        self.browser.activations.user_acted(_tab(message))

    def _navigated(self, message: Message) -> None:
        """Record a navigation. An address that the person chose in the browser is an action of theirs."""
        self.browser.activations.navigated(_tab(message), _host_of(_text(message, "url")))
        if message.get("chosen") is True:
            self.browser.activations.user_acted(_tab(message))

    def _closed(self, message: Message) -> None:
        self.browser.activations.closed(_tab(message))

    def _save(self, message: Message, leave: Leave) -> Answer:
        page = _page_of(message, caller=None)
        action = self.browser.check(page, Feature.SAVE_IMPRESSION, acted=message.get("acted") is True)
        self._save_impression(page, read_options(ImpressionOptions, message.get("options")), action, leave)
        return {}

    def _save_impression(self, page: Page, options: ImpressionOptions, action: str | None, leave: Leave) -> None:
        self.device.save_impression(page.site, options, intermediary=page.intermediary, action=action, leave=leave)

    def _measure(self, message: Message) -> Answer | None:
        page = _page_of(message, caller=None)
        action = self.browser.check(page, Feature.MEASURE_CONVERSION, acted=message.get("acted") is True)
        options = read_options(ConversionOptions, message.get("options"))
        return self._wait_for_report(message, page, partial(self._report, page, options, action))

    def _report(self, page: Page, options: ConversionOptions, action: str | None) -> Answer:
        report = self.device.measure_conversion(page.site, options, intermediary=page.intermediary, action=action)
        return {"report": base64.b64encode(self._encode(report)).decode()}

    def _wait_for_report(self, message: Message, page: Page, work: Callable[[], Answer]) -> Answer | None:
        return self._enqueue(message, self._calls, parse_site(page.site), page.intermediary or "", work)

    def _response(self, message: Message, leave: Leave) -> Answer | None:
        """Heed the headers of a response. A refused header is ignored: no script could be told."""
        url = _text(message, "url")
        page = _page_of(message, caller=origin_of(url))
        with suppress(TrefoilError):
            if message.get("save") is not None:
                impression = parse_save_impression(_text(message, "save"))
                self._save_impression(page, impression, self.browser.check(page, Feature.SAVE_IMPRESSION), leave)
        with suppress(TrefoilError):
            if message.get("measure") is not None:
                wanted = parse_measure_conversion(_text(message, "measure"), url)
                action = self.browser.check(page, Feature.MEASURE_CONVERSION)
                work = partial(self._report_to, wanted.report_url, page, wanted.options, action)
                return self._wait_for_report(message, page, work)
        return {}

    def _report_to(self, url: str, page: Page, options: ConversionOptions, action: str | None) -> Answer:
        return {**self._report(page, options, action), "reportUrl": url}

    def _clear(self, message: Message) -> Answer | None:
        """Heed a Clear-Site-Data header."""
        host = _host_of(_text(message, "url"))
        if not clears_impressions(_text(message, "header")):
            return {}
        site = parse_site(host)
        # One that waits will clear whatever this one would: so a site that floods leaves room for the others.
        if site in self._to_clear:
            return {}
        self._to_clear.add(site)
        refused = self._enqueue(message, self._commands, "sites", site, partial(self._clear_now, site))
        if refused is not None:
            self._to_clear.discard(site)
        return refused

    def _clear_now(self, site: str) -> None:
        # First: what is saved from here on belongs to the next header.
        self._to_clear.discard(site)
        self.device.clear_impressions_for_site(site)

    def _forget(self, message: Message) -> None:
        """Forget all visits, or those to sites of which no visit is left in the browser's history.

        Forgetting closes every week so far to all sites. So sites of which nothing is stored are left alone: browsers
        drop old visits from their history by themselves.
        """
        hosts = message.get("hosts")
        if hosts is None:
            self.device.clear_browsing_history(forget_visits=True)
        elif sites := (_sites_of(hosts) - _sites_of(message.get("kept"))) & sites_in(self.device.overview()):
            self.device.clear_browsing_history(sorted(sites), forget_visits=True)

    def _switch(self, message: Message) -> Answer:
        (self.device.enable if message.get("on") is True else self.device.disable)()
        return {"enabled": self.device.overview().enabled}

    def _overview(self, message: Message) -> Answer:
        try:
            site = parse_site(_host_of(_text(message, "origin")))
        except StandardError:
            site = None
        return summary(self.device.overview(), site)

    def _page(self, message: Message) -> Answer:
        fields = message.get("fields")
        return page_at(self.device, _text(message, "path"), fields if isinstance(fields, dict) else None)


def page_at(device: Device[R], path: str, fields: Mapping[str, object] | None) -> Answer:
    """Return a page of the dashboard, compressed, or where to go on after its form was sent with `fields`."""
    # Imported here: only a person who opens the dashboard needs it.
    from device.dashboard.formatting import LocalTime
    from device.dashboard.pages import Action, dashboard_page, perform

    address = urlsplit(path)
    name = address.path.strip("./")
    action = Action(name) if name else None
    if action is not None and fields is not None:
        return {"path": f"./{perform(device, action, fields)}"}
    return _compressed(dashboard_page(device, action, dict(parse_qsl(address.query)), LocalTime()))


def _compressed(page: str) -> Answer:
    """Return a page for one frame: ten thousand rows are megabytes of HTML, and a few hundred kilobytes so."""
    return {"page": base64.b64encode(zlib.compress(page.encode())).decode()}


def sites_in(overview: Overview) -> set[str]:
    """Return every site of which the device has any record."""
    impressions = [(one.impression.site, one.impression.caller) for one in overview.impressions]
    conversions = [(one.event.site, one.event.caller) for one in overview.conversions]
    reports = [(record.site, record.caller) for record in overview.reports]
    filters = {state.site for state in overview.filters}
    return (filters | {site for pair in (*impressions, *conversions, *reports) for site in pair}) - {""}


def _sites_of(hosts: object) -> set[str]:
    """Return the sites of hosts, without those that have none."""
    sites = set()
    for host in hosts if isinstance(hosts, list) else []:
        with suppress(StandardError):
            sites.add(parse_site(host))
    return sites


def summary(overview: Overview, site: str | None) -> Answer:
    """Return what the popup shows of one site and of all together, amounts in micro-epsilons of this week."""
    week = None if overview.calendar is None else overview.calendar.index(overview.now)

    def spent(kind: FilterKind, owner: str | None = None) -> int:
        states = (state for state in overview.filters if state.kind is kind and state.epoch == week)
        return sum(state.spent for state in states if owner is None or state.site == owner)

    reports = [record for record in overview.reports if site in (record.site, record.caller)]
    saved = [one.impression for one in overview.impressions if site in (one.impression.site, one.impression.caller)]
    callers = {record.caller for record in reports} | {impression.caller for impression in saved}
    return {
        "enabled": overview.enabled,
        "site": site,
        "ads": len(saved),
        "reports": len(reports),
        "callers": sorted(callers - {site})[:5],
        "spent": 0 if site is None else spent(FilterKind.SITE, site),
        "capacity": overview.limits.site_budget,
        "spentByAll": spent(FilterKind.GLOBAL),
        "capacityOfAll": overview.limits.global_budget,
        "services": sorted(overview.limits.aggregation_services),
    }


def _page_of(message: Message, *, caller: str | None) -> Page:
    """Return the page of a call, from the chain of documents that the browser names, innermost first."""
    chain = message.get("chain")
    if not isinstance(chain, list) or not 0 < len(chain) <= MAX_DOCUMENTS:
        raise ProtocolError("a call names no documents", kind=ErrorKind.MALFORMED)
    documents = tuple(_document(each) for each in chain)
    frame = caller or documents[0].origin
    return Page(documents[-1].origin, frame, _tab(message), documents=documents)


def _document(fields: object) -> Document:
    if not isinstance(fields, dict):
        raise ProtocolError("a document is an object", kind=ErrorKind.WRONG_TYPE)
    containers = fields.get("containers", [])
    if not isinstance(containers, list):
        raise ProtocolError("containers are a list", kind=ErrorKind.WRONG_TYPE)
    return Document(_text(fields, "origin"), _text(fields, "policy"), tuple(_container(each) for each in containers))


def _container(fields: object) -> Container:
    if not isinstance(fields, dict):
        raise ProtocolError("a container is an object", kind=ErrorKind.WRONG_TYPE)
    source = None if fields.get("src") is None else _text(fields, "src")
    return Container(_text(fields, "allow"), source, fields.get("sandboxed") is not False)


def _text(message: Message, name: str) -> str:
    value = message.get(name)
    if type(value) is not str:
        raise ProtocolError(f"{name} must be text", kind=ErrorKind.WRONG_TYPE)
    return value


def _tab(message: Message) -> str:
    tab = message.get("tab")
    if type(tab) is not int:
        raise ProtocolError("a tab has a number", kind=ErrorKind.WRONG_TYPE)
    return str(tab)


def _host_of(url: str) -> str:
    """Return the host of an https URL, and an empty one for any other: only https pages are of a site here."""
    origin = origin_of(url)
    return (urlsplit(origin).hostname or "") if origin.startswith("https:") else ""


def sealed_bytes(report: agent.Report) -> bytes:
    return (report if isinstance(report, SealedReport) else report.sealed).encode()


def main() -> None:
    """Serve the browser that has started this process."""
    # What anything prints must not get between the frames, and what is logged must not reach the browser's own log.
    sink = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    logging.disable()
    # Ctrl-C in the terminal of a browser is meant for the browser, which then closes the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Host(Pipe(sys.stdin.buffer, sink), partial(opened_profile, data_folder()), sealed_bytes).run()


if __name__ == "__main__":
    main()

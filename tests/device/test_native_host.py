"""The native messaging host, asked over its pipe as the extension asks: what it decides, refuses and survives."""

from __future__ import annotations

import base64
import io
import json
import os
import sqlite3
import struct
import subprocess
import sys
import threading
import zlib
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import IO, Any

import pytest

from device import agent
from device.browser import profiles
from device.browser.host import MAX_FRAME, MAX_WAITING, SIDE_BY_SIDE, VERSION, CallQueues, Host, Pipe, sealed_bytes
from device.browser.profiles import DATABASE, databases, opened_profile, profiles_folder, services_folder
from device.device import Device
from device.limits import DeviceLimits
from device.report import PlainSeal
from device.schedule import BURST, Delayed
from device.stores.memory_store import MemoryStore
from protocol.errors import ErrorKind
from protocol.report import SealedReport
from tests.support.processes import ROOT
from tests.support.protocol_samples import HELPER_SET, NOW
from tests.support.raising import raises

PROFILE, OTHER = "0" * 32, "f" * 32
NEWS, SHOP, ADS = "https://news.example", "https://shop.example", "https://ads.example"
AD = {"histogramIndex": 1}
SALE = {"aggregationService": "trefoil", "histogramSize": 2, "epsilon": 0.25}
WAIT_SECONDS = 30


class Extension:
    """The browser's end of a pipe."""

    def __init__(self, to_host: IO[bytes], from_host: IO[bytes]) -> None:
        self._to_host, self._from_host = to_host, from_host
        self._last = 0

    def send(self, data: bytes) -> None:
        self._to_host.write(struct.pack("=I", len(data)) + data)
        self._to_host.flush()

    def receive(self) -> dict[str, Any]:
        (size,) = struct.unpack("=I", self._from_host.read(4))
        answer: dict[str, Any] = json.loads(self._from_host.read(size))
        return answer

    def post(self, kind: str, **fields: object) -> int:
        self._last += 1
        self.send(json.dumps({"id": self._last, "kind": kind, **fields}).encode())
        return self._last

    def ask(self, kind: str, **fields: object) -> dict[str, Any]:
        number = self.post(kind, **fields)
        answer = self.receive()
        assert answer.pop("id") == number
        return answer

    def hello(self, profile: str) -> dict[str, Any]:
        return self.ask("hello", profile=profile, version=VERSION)

    def call(self, kind: str, *origins: str, tab: int = 1, acted: bool = True, **options: Any) -> dict[str, Any]:
        """A call by a document of the first origin, held by the next ones."""
        chain = [{"origin": origin, "policy": ""} for origin in origins]
        passed = {**(AD if kind == "save" else SALE), **options}
        return self.ask(kind, tab=tab, chain=chain, options=passed, acted=acted)

    def numbers(self, *origins: str, **options: Any) -> list[int]:
        """The numbers of a measurement, by a host whose device does not seal."""
        numbers: list[int] = json.loads(base64.b64decode(self.call("measure", *origins, **options)["report"]))
        return numbers


@contextmanager
def served(host_of: Any) -> Iterator[Extension]:
    """A host in a thread, and a pipe to it."""
    incoming, outgoing = os.pipe(), os.pipe()
    with (
        os.fdopen(incoming[0], "rb") as source,
        os.fdopen(outgoing[1], "wb") as sink,
        os.fdopen(outgoing[0], "rb") as from_host,
        os.fdopen(incoming[1], "wb") as to_host,
    ):
        thread = threading.Thread(target=host_of(Pipe(source, sink)).run, daemon=True)
        thread.start()
        yield Extension(to_host, from_host)
        to_host.close()
        thread.join(WAIT_SECONDS)
        assert not thread.is_alive()


@pytest.fixture
def device() -> Device[tuple[int, ...]]:
    return Device(MemoryStore(debug=True), PlainSeal(), clock=lambda: 1_900_000_000)


@pytest.fixture
def extension(device: Device[tuple[int, ...]]) -> Iterator[Extension]:
    """A host before a plain device, which has been greeted."""

    @contextmanager
    def opened(_: str) -> Iterator[Device[tuple[int, ...]]]:
        yield device

    with served(lambda pipe: Host(pipe, opened, lambda report: json.dumps(report).encode())) as asking:
        assert asking.hello(PROFILE) == {"services": ["trefoil"], "enabled": True}
        yield asking


def error(answer: dict[str, Any]) -> str:
    name: str = answer["error"]
    return name


def test_an_ad_and_a_purchase(extension: Extension, device: Device[tuple[int, ...]]) -> None:
    assert extension.call("save", ADS, NEWS) == {}
    assert extension.numbers(SHOP) == [0, 1]
    (saved,) = device.overview().impressions
    assert (saved.impression.site, saved.impression.caller) == ("news.example", "ads.example")


def test_no_site_waits_for_the_answers_of_another() -> None:
    """A page that has called too often waits for seconds; what another asks next is answered before. Nobody sleeps."""

    def sleep(_: float) -> None:
        raise AssertionError("the host has slept")

    schedule = Delayed(1.0, 0.1, sleep=sleep)
    device = Device(MemoryStore(debug=True), PlainSeal(), clock=lambda: 1_900_000_000, schedule=schedule)
    with (
        closing(schedule),
        served(lambda pipe: Host(pipe, lambda _: nullcontext(device), lambda report: b"")) as extension,
    ):
        extension.hello(PROFILE)
        ad = {"acted": True, "options": AD}
        for _ in range(BURST + 90):
            last = extension.post("save", tab=1, chain=[{"origin": NEWS, "policy": ""}], **ad)
        other = [
            extension.post("save", tab=2, chain=[{"origin": SHOP, "policy": ""}], **ad),
            # Refused: the tab serves another site.
            extension.post("save", tab=1, chain=[{"origin": SHOP, "policy": ""}], acted=False, options=AD),
        ]
        answered = set[int]()
        while not answered.issuperset(other):
            answered.add(extension.receive()["id"])
        assert last not in answered
    assert len(device.overview().impressions) == BURST + 91


@pytest.mark.parametrize(
    ("kind", "origins", "options", "expected"),
    [
        ("save", [NEWS], {"histogramIndex": None}, "TypeError"),
        ("save", [NEWS], {"histogramIndex": "1"}, "TypeError"),
        ("save", [NEWS], {"histogramIndex": 4_294_967_295}, "RangeError"),
        ("save", [NEWS], {"conversionSites": ["a.example"] * 10_000}, "RangeError"),
        ("save", [NEWS], {"conversionSites": [":"]}, "SyntaxError"),
        ("measure", [NEWS], {"aggregationService": "no such service"}, "ReferenceError"),
        ("measure", [NEWS], {"epsilon": 0}, "RangeError"),
        ("save", ["null", NEWS], {}, "SyntaxError"),
        ("save", ["https://localhost"], {}, "SyntaxError"),
        ("save", ["https://192.0.2.1"], {}, "SyntaxError"),
        ("save", ["https://co.uk"], {}, "SyntaxError"),
        ("save", ["http://news.example"], {}, "NotAllowedError"),
        ("save", [NEWS, "http://news.example"], {}, "NotAllowedError"),
    ],
)
def test_what_a_page_is_told(
    extension: Extension, kind: str, origins: list[str], options: dict[str, Any], expected: str
) -> None:
    assert error(extension.call(kind, *origins, **options)) == expected


def test_policy_and_activation_come_before_the_options(extension: Extension) -> None:
    chain = [{"origin": NEWS, "policy": "save-impression=()"}]
    assert error(extension.ask("save", tab=1, chain=chain, options=None, acted=True)) == "NotAllowedError"
    assert error(extension.call("save", SHOP, tab=9, acted=False, histogramIndex="1")) == "NotAllowedError"


def test_activation_by_tab_and_site(extension: Extension) -> None:
    """One action, one site; an address that the person entered is an action."""
    extension.ask("acted", tab=1)
    assert extension.call("save", NEWS, acted=False) == {}
    assert error(extension.call("save", NEWS, tab=2, acted=False)) == "NotAllowedError"
    extension.ask("navigated", tab=1, url=f"{SHOP}/buy", chosen=False)
    assert error(extension.call("measure", SHOP, acted=False)) == "NotAllowedError"
    extension.ask("navigated", tab=1, url=f"{SHOP}/buy", chosen=True)
    assert "report" in extension.call("measure", SHOP, acted=False)
    extension.ask("closed", tab=1)
    assert error(extension.call("measure", SHOP, acted=False)) == "NotAllowedError"


def test_headers_of_responses(extension: Extension, device: Device[tuple[int, ...]]) -> None:
    """The caller is whose response it is. What is refused is ignored, and costs no action."""
    extension.ask("acted", tab=1)
    chain = [{"origin": NEWS, "policy": ""}]
    pixel = f"{ADS}/pixel"
    answer = extension.ask("response", tab=1, chain=chain, url=pixel, save="histogram-index=x", measure=None)
    assert answer == {} and not device.overview().impressions
    answer = extension.ask("response", tab=1, chain=chain, url=pixel, save="histogram-index=1", measure=None)
    assert answer == {} and device.overview().impressions[0].impression.caller == "ads.example"
    wanted = 'aggregation-service="trefoil", histogram-size=2, report-url="/r"'
    extension.ask("acted", tab=2)
    answer = extension.ask(
        "response", tab=2, chain=[{"origin": SHOP, "policy": ""}], url=f"{SHOP}/x", save=None, measure=wanted
    )
    assert answer["reportUrl"] == f"{SHOP}/r" and json.loads(base64.b64decode(answer["report"])) == [0, 1]
    assert extension.ask("clear", url=f"{ADS}/", header='"impressions"') == {}
    assert not device.overview().impressions


def test_a_site_that_floods_with_clearing_leaves_room_for_others(
    extension: Extension, device: Device[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """More headers than may wait, of one site; then one of another, which is heeded."""
    begun, go, cleared = threading.Event(), threading.Event(), []

    def slowly(site: str) -> None:
        begun.set()
        assert go.wait(WAIT_SECONDS)
        cleared.append(site)

    monkeypatch.setattr(device, "clear_impressions_for_site", slowly)
    posted = {extension.post("clear", url=f"{ADS}/", header='"impressions"')}
    assert begun.wait(WAIT_SECONDS)
    posted |= {extension.post("clear", url=f"{ADS}/", header='"impressions"') for _ in range(MAX_WAITING + 100)}
    posted.add(extension.post("clear", url=f"{NEWS}/", header='"impressions"'))
    answers = [extension.receive() for _ in range(MAX_WAITING + 99)]
    go.set()
    answers += [extension.receive() for _ in range(len(posted) - len(answers))]
    assert {answer["id"] for answer in answers} == posted and not [one for one in answers if "error" in one]
    # That one waited while the first was at work, and what came meanwhile is cleared by it.
    assert cleared == ["ads.example", "ads.example", "news.example"]


def test_what_leaves_the_browsers_history_is_forgotten(extension: Extension, device: Device[tuple[int, ...]]) -> None:
    """A host of which nothing is stored closes no week: browsers drop old visits by themselves."""
    extension.call("save", NEWS)
    extension.ask("forget", hosts=["old.example", "localhost", 5])
    assert device.overview().barrier is None
    # Another host of the same site has visits left.
    extension.ask("forget", hosts=["m.news.example"], kept=["www.news.example", "old.example"])
    assert device.overview().barrier is None
    extension.ask("forget", hosts=["www.news.example"], kept=["old.example"])
    assert device.overview().barrier is not None and not device.overview().impressions


def test_the_popup_and_the_dashboard(extension: Extension, device: Device[tuple[int, ...]]) -> None:
    extension.call("save", NEWS)
    extension.call("save", ADS, SHOP)
    extension.call("measure", SHOP, tab=2)
    told = extension.ask("overview", origin=SHOP)
    assert (told["site"], told["ads"], told["reports"], told["callers"]) == ("shop.example", 1, 1, ["ads.example"])
    assert (told["spent"], told["capacity"], told["spentByAll"]) == (250_000, 1_000_000, 250_000)
    assert extension.ask("overview", origin="chrome://newtab")["site"] is None

    page = zlib.decompress(base64.b64decode(extension.ask("page", path="./")["page"])).decode()
    assert "What measurement has cost you" in page and "shop.example" in page
    asked = zlib.decompress(base64.b64decode(extension.ask("page", path="switch-off")["page"])).decode()
    assert "Switch measurement off?" in asked and device.overview().enabled
    assert extension.ask("page", path="switch-off", fields={}) == {"path": "./?done=switch-off"}
    assert not device.overview().enabled
    assert extension.ask("page", path="clear-site", fields={"site": "shop.example"})["path"] == "./?done=clear-site"
    assert extension.ask("switch", on=True) == {"enabled": True}


GARBAGE = {
    "no JSON": b"\xff\xfe{",
    "no object": b"[1]",
    "no id": b'{"kind": "acted"}',
    "a field twice": b'{"id": 1, "id": 2}',
    "NaN": b'{"id": 1, "x": NaN}',
    "deep": b"[" * 100_000,
    "empty": b"",
}


@pytest.mark.parametrize("data", [*GARBAGE.values(), b" " * (2 * MAX_FRAME)], ids=[*GARBAGE, "two MiB"])
def test_garbage_is_answered_and_survived(extension: Extension, data: bytes) -> None:
    extension.send(data)
    assert extension.receive() == {"id": None, "error": "OperationError", "message": "The device cannot do that now."}
    assert extension.call("save", NEWS) == {}


@pytest.mark.parametrize(
    "message",
    [
        {"kind": "no such"},
        {"kind": ["acted"]},
        {"kind": "acted", "tab": "1"},
        {"kind": "acted", "tab": True},
        {"kind": "save", "tab": 1, "chain": []},
        {"kind": "save", "tab": 1, "chain": [{"origin": NEWS, "policy": ""}] * 65},
        {"kind": "save", "tab": 1, "chain": [NEWS]},
        {"kind": "save", "tab": 1, "chain": [{"origin": NEWS}]},
        {"kind": "save", "tab": 1, "chain": [{"origin": NEWS, "policy": "", "containers": {}}]},
        {"kind": "page", "path": 5},
        {"kind": "clear", "url": None, "header": "*"},
    ],
)
def test_a_wrong_field_is_refused(extension: Extension, message: dict[str, object]) -> None:
    assert error(extension.ask(**message)) == "OperationError"  # type: ignore[arg-type]
    assert extension.call("save", NEWS) == {}


def test_nothing_is_answered_before_hello(tmp_path: Path) -> None:
    def host(pipe: Pipe) -> Host[agent.Report]:
        return Host(pipe, lambda profile: opened_profile(tmp_path, profile), sealed_bytes)

    with served(host) as extension:
        for kind in ("save", "measure"):
            assert error(extension.call(kind, NEWS)) == "OperationError"
        assert error(extension.ask("overview", origin=NEWS)) == "OperationError"
        assert error(extension.hello("../../elsewhere")) == "OperationError"
        assert error(extension.ask("hello", profile=PROFILE, version=VERSION + 1)) == "OperationError"
    assert list(tmp_path.iterdir()) == []


def test_a_flood_of_one_site_delays_that_site() -> None:
    """However many callers it has. Another site's call runs while the flood's wait, which has its limit."""
    queues = CallQueues(2 * SIDE_BY_SIDE, SIDE_BY_SIDE)
    gate, other, running = threading.Event(), threading.Event(), threading.Semaphore(0)

    def hold() -> None:
        running.release()
        gate.wait(WAIT_SECONDS)

    def flood(calls: int) -> list[bool]:
        return [queues.submit("flood", f"caller {number % 50}", hold) for number in range(calls)]

    # Those first, or a call that begins late would make place for one of the last.
    assert all(flood(SIDE_BY_SIDE)) and all(running.acquire(timeout=WAIT_SECONDS) for _ in range(SIDE_BY_SIDE))
    accepted = flood(2 * MAX_WAITING)
    served = queues.submit("other", "other", other.set) and other.wait(WAIT_SECONDS)
    gate.set()
    queues.close()
    assert served and accepted == [True] * MAX_WAITING + [False] * MAX_WAITING


@pytest.mark.parametrize("drop", [False, True])
def test_closing_a_queue_runs_or_drops_what_waits(drop: bool) -> None:
    """What the person asked for is done; a page that is gone needs no report."""
    queues, done = CallQueues(1, side_by_side=1), list[int]()
    gate, closing = threading.Event(), threading.Thread(target=lambda: queues.close(drop=drop))
    queues.submit("site", "caller", lambda: (gate.wait(WAIT_SECONDS), None)[1])
    queues.submit("site", "caller", lambda: done.append(1))
    closing.start()
    closing.join(0.1)
    gate.set()
    closing.join(WAIT_SECONDS)
    assert not closing.is_alive() and done == ([] if drop else [1])


def test_callers_on_a_site_take_turns_and_keep_their_order() -> None:
    queues, order = CallQueues(1, side_by_side=1), list[str]()
    gate, done = threading.Event(), threading.Event()
    queues.submit("site", "first", lambda: (gate.wait(WAIT_SECONDS), None)[1])
    for number in range(3):
        queues.submit("site", "flood", lambda number=number: order.append(f"flood {number}"))  # type: ignore[misc]
    queues.submit("site", "late", lambda: order.append("late"))
    queues.submit("site", "last", lambda: None)
    queues.submit("site", "last", done.set)
    gate.set()
    assert done.wait(WAIT_SECONDS)
    queues.close()
    assert order == ["flood 0", "late", "flood 1", "flood 2"]


def test_a_browsers_note_of_an_action_is_not_left_over_for_the_next_site(extension: Extension) -> None:
    """One click, two calls that both say that the person has just acted, then another site by script."""
    extension.ask("acted", tab=1)
    assert extension.call("save", NEWS) == extension.call("save", NEWS) == {}
    extension.ask("navigated", tab=1, url=f"{SHOP}/", chosen=False)
    assert error(extension.call("measure", SHOP, acted=False)) == "NotAllowedError"


def test_an_answer_that_no_browser_takes_is_refused() -> None:
    """A browser ends a host that sends more than a frame may hold, and every site would lose its calls."""
    source, sink = io.BytesIO(), io.BytesIO()
    Pipe(source, sink).write(7, {"page": "x" * MAX_FRAME})
    answer = json.loads(sink.getvalue()[4:])
    assert (answer["id"], answer["error"]) == (7, "OperationError")


def test_a_new_device_is_off_and_private(tmp_path: Path) -> None:
    with opened_profile(tmp_path, PROFILE) as device:
        assert not device.overview().enabled and device.overview().barrier is None
        device.enable()
    (database,) = databases(tmp_path)
    assert {path.stat().st_mode & 0o777 for path in (database, database.with_name(f"{DATABASE}.instance"))} == {0o600}
    assert {path.stat().st_mode & 0o777 for path in (database.parent, profiles_folder(tmp_path))} == {0o700}
    with opened_profile(tmp_path, PROFILE) as device:
        assert device.overview().enabled


def test_a_device_that_is_made_again_begins_closed(tmp_path: Path) -> None:
    """What the first one has spent this week is unknown to the second."""
    with opened_profile(tmp_path, PROFILE):
        pass
    with opened_profile(tmp_path, OTHER) as device:
        assert device.overview().barrier is not None and not device.overview().enabled
    assert len(databases(tmp_path)) == 2
    databases(tmp_path)[0].unlink()
    with opened_profile(tmp_path, PROFILE) as device:
        assert device.overview().barrier is not None


def test_a_crash_while_a_device_is_made_leaves_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(self: Device[agent.Report]) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Device, "disable", crash)
        with opened_profile(tmp_path, PROFILE):
            pass
    assert databases(tmp_path) == []
    with opened_profile(tmp_path, PROFILE) as device:
        assert not device.overview().enabled


def test_one_host_for_one_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiles, "LOCK_SECONDS", 0.1)
    with opened_profile(tmp_path, PROFILE):
        with raises(ErrorKind.BUSY), opened_profile(tmp_path, PROFILE):
            pass
        with opened_profile(tmp_path, OTHER):
            pass


def test_installed_helper_sets_are_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "system_clock", lambda: NOW)
    services_folder(tmp_path).mkdir()
    (services_folder(tmp_path) / "north.json").write_text(json.dumps(HELPER_SET.to_json()))
    (services_folder(tmp_path) / "damaged.json").write_text("{")
    for _ in range(2):
        with opened_profile(tmp_path, PROFILE) as device:
            assert device.overview().limits.aggregation_services == {"north"}


@contextmanager
def process(data: Path) -> Iterator[tuple[subprocess.Popen[bytes], Extension]]:
    """The host as a browser starts it."""
    command = [sys.executable, "-m", "device.browser.host", "chrome-extension://someone/"]
    environment = {**os.environ, "XDG_DATA_HOME": str(data)}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT, env=environment
    ) as host:
        assert host.stdin and host.stdout
        try:
            yield host, Extension(host.stdin, host.stdout)
        finally:
            host.kill()


def test_the_real_host(tmp_path: Path) -> None:
    """Off, then on; a report with a locked database too; killed, it keeps what was durable. It prints nothing."""
    trefoil = tmp_path / "trefoil"
    services_folder(trefoil).mkdir(parents=True)
    from tests.support.browser import idle_helpers  # here: it imports the demonstrations

    helper_set = idle_helpers(tmp_path / "helpers").helper_set_path
    (services_folder(trefoil) / "trefoil.json").write_bytes(helper_set.read_bytes())
    with process(tmp_path) as (host, extension):
        assert extension.hello(PROFILE) == {"services": ["trefoil"], "enabled": False}
        null = base64.b64decode(extension.call("measure", SHOP)["report"])
        largest = extension.call("measure", SHOP, histogramSize=DeviceLimits().max_histogram_size, kappa=1)["report"]
        assert len(largest) < MAX_FRAME // 2
        assert extension.ask("switch", on=True) == {"enabled": True}
        extension.call("save", NEWS, tab=2)
        assert extension.ask("overview", origin=NEWS)["ads"] == 1
        (database,) = databases(trefoil)
        locked = sqlite3.connect(database, isolation_level=None)
        locked.execute("BEGIN IMMEDIATE")
        report = base64.b64decode(extension.call("measure", SHOP)["report"])
        locked.execute("ROLLBACK")
        locked.close()
        assert len(SealedReport.decode(report).encode()) == len(null)
        host.kill()
        assert host.stderr is not None and host.stderr.read() == b""
    with process(tmp_path) as (host, extension):
        assert extension.hello(PROFILE)["enabled"] is True
        assert extension.ask("overview", origin=NEWS)["ads"] == 1
        assert host.stdin is not None and host.stderr is not None
        host.stdin.close()
        assert host.wait(WAIT_SECONDS) == 0 and host.stderr.read() == b""

"""The extension in real Chromium: the standard's scenarios through pages, Web IDL, frames, headers and input."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from playwright.sync_api import Frame, Page, Playwright, sync_playwright

from device.web.conformance import CONFIG, whole
from tests.support.browser import needs_chromium
from tests.support.extension import (
    Answer,
    Installation,
    Person,
    Request,
    Sites,
    browser_with,
    call,
    https_sites,
    wait_for,
)

pytestmark = needs_chromium
OURS = Path(__file__).parents[1] / "data" / "scenarios"
STANDARD = Path(__file__).parents[3] / "shared" / "w3c" / "e2e-tests"
AD = {"histogramIndex": 1}
SALE = {"aggregationService": "trefoil", "histogramSize": 4, "epsilon": 0.1}
PIXEL = bytes.fromhex("47494638396101000100800000000000ffffff21f90401000000002c00000000010001000002024401003b")
NOT_ALLOWED = {"error": "DOMException", "name": "NotAllowedError"}


@pytest.fixture(scope="module")
def playwright() -> Iterator[Playwright]:
    with sync_playwright() as started:
        yield started


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sites]:
    with https_sites(tmp_path_factory.mktemp("sites")) as served:
        served.pages["/top"] = page_with_frames
        served.pages["/clear"] = Answer(headers=[("Clear-Site-Data", '"impressions"')])
        yield served


@pytest.fixture(scope="module")
def person(playwright: Playwright, sites: Sites, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Person]:
    """One browser for all tests of this file, before a device that does not seal."""
    with browser_with(playwright, sites, Installation(tmp_path_factory.mktemp("person"))) as opened:
        opened.wait_ready()
        yield opened
        assert opened.installation.errors == ""
        assert len(opened.installation.processes) == 1


@pytest.fixture(autouse=True)
def empty_device(person: Person) -> None:
    person.ask("control", scenarios="")


def page_with_frames(request: Request) -> Answer:
    """A page with a frame for each address in its query."""
    frames = parse_qs(urlsplit(request.path).query).get("frame", [])
    elements = (f"<iframe src='{each}'></iframe>" for each in frames)
    return Answer("<!doctype html><title>A page</title>" + "".join(elements))


def stored(person: Person) -> list[tuple[int, str, str]]:
    return [tuple(each) for each in person.ask("stored")["stored"]]


# The standard's scenarios, and ours.


def scenarios() -> list[Path]:
    folders = [folder for folder in (STANDARD, OURS) if folder.is_dir()]
    return [path for folder in folders for path in sorted(folder.glob("*.json")) if path.name != CONFIG]


def test_the_standards_scenarios_are_here() -> None:
    if not STANDARD.is_dir():
        pytest.skip("the standard's scenarios (../shared/w3c) are not here: only ours are played")
    assert len([path for path in scenarios() if path.parent == STANDARD]) >= 16


@pytest.mark.parametrize("path", scenarios(), ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_scenario_through_pages(person: Person, path: Path) -> None:
    """Calls by pages and frames, clearing by a real header; what the person does is told to the host."""
    events = json.loads(path.read_text())["events"]
    if any("topLevelTraversable" in event for event in events):
        pytest.skip("it names tabs and their activation by itself; see the tests of input below")
    person.ask("control", scenarios=str(path.parent))
    for number, event in enumerate(events, start=1):
        person.ask("control", now=whole(event["seconds"]))
        expected = event.get("expected" if event["event"] == "measureConversion" else "expectedError")
        wanted = [whole(each) for each in expected] if isinstance(expected, list) else expected
        assert play(person, event) == wanted, f"event {number} of {path.name}: {event}"


def play(person: Person, event: dict[str, Any]) -> Any:
    match event["event"]:
        case "saveImpression" | "measureConversion":
            options = {name: value for name, value in event["options"].items() if name != "$comment"}
            return call(calling_frame(person, event), event["event"], options)
        case "clearImpressionsForSite":
            clear_by_header(person, event["site"])
        case "clearBrowsingHistoryForAttribution":
            person.ask("history", sites=event["sites"], forgetVisits=event["forgetVisits"])
        case "enableAPI" | "disableAPI":
            person.ask("switch", on=event["event"] == "enableAPI")
        case unknown:
            raise AssertionError(f"unknown event: {unknown}")
    return None


def calling_frame(person: Person, event: dict[str, Any]) -> Page | Frame:
    caller = event.get("intermediarySite")
    query = f"?frame={address(person, caller)}/" if caller else ""
    page = person.tab(f"{address(person, event['site'])}/top{query}")
    return page.frames[1] if caller else page


def address(person: Person, site: str) -> str:
    return f"https://{site}:{person.sites.port}" if site.endswith("localhost") else f"https://{site}"


def clear_by_header(person: Person, site: str) -> None:
    """Fetch a response with Clear-Site-Data, and wait until the host has heeded it."""
    seen = person.worker.evaluate("globalThis.clears ??= 0")
    hook = """globalThis.hooked ??= (() => { const ask = device.ask;
      device.ask = async function (message, tab) { const answer = await ask.call(this, message, tab);
        if (message.kind === "clear") globalThis.clears++; return answer; }; return true; })()"""
    person.worker.evaluate(hook)
    person.tab(f"https://{site}/top").evaluate("fetch('/clear').then((response) => response.text())")
    wait_for(lambda: person.worker.evaluate("globalThis.clears") > seen)

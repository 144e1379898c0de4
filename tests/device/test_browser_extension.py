"""The extension in real Chromium: the standard's scenarios through pages, Web IDL, frames and headers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from playwright.sync_api import Frame, Page, Playwright

from benchmarks.workloads.chromium import Installation
from device.web.conformance import CONFIG, whole
from tests.support.browser import needs_chromium
from tests.support.extension import PLAIN_HOST, SAVE, Answer, Person, Request, Sites, browser_with, call, wait_for

pytestmark = needs_chromium
OURS = Path(__file__).parents[1] / "data" / "scenarios"
STANDARD = Path(__file__).parents[3] / "shared" / "w3c" / "e2e-tests"
AD = {"histogramIndex": 1}
SALE = {"aggregationService": "trefoil", "histogramSize": 4, "epsilon": 0.1}
PIXEL = bytes.fromhex("47494638396101000100800000000000ffffff21f90401000000002c00000000010001000002024401003b")
NOT_ALLOWED = {"error": "DOMException", "name": "NotAllowedError"}


@pytest.fixture(scope="module")
def person(playwright: Playwright, sites: Sites, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Person]:
    """One browser for all tests of this file, before a device that does not seal."""
    sites.pages["/top"] = page_with_frames
    sites.pages["/clear"] = Answer(headers=[("Clear-Site-Data", '"impressions"')])
    with browser_with(playwright, sites, Installation(tmp_path_factory.mktemp("person"), PLAIN_HOST)) as opened:
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
        pytest.skip("it names tabs and their activation by itself; see test_browser_hostile")
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


# The object in the page.

IDL = r"""async () => {
  const attribution = navigator.attribution, services = attribution.aggregationServices;
  const descriptor = (object, key) => {
    const { enumerable, configurable, writable } = Object.getOwnPropertyDescriptor(object, key);
    return [enumerable, configurable, writable ?? null];
  };
  const getter = Object.getOwnPropertyDescriptor(Navigator.prototype, "attribution").get;
  const fails = (work) => { try { work(); return "no error"; } catch (error) { return error.name; } };
  return {
    accessor: descriptor(Navigator.prototype, "attribution"),
    interfaces: [descriptor(globalThis, "Attribution"), descriptor(globalThis, "AttributionAggregationServices")],
    method: descriptor(Attribution.prototype, "saveImpression"),
    same: [attribution === navigator.attribution, services === attribution.aggregationServices],
    tags: [String(attribution), String(services)],
    lengths: [Attribution, attribution.saveImpression, attribution.measureConversion, services.get]
      .map((each) => each.length),
    names: [Attribution.name, attribution.saveImpression.name],
    native: [attribution.saveImpression, Attribution, services.get, getter].every(
      (each) => Function.prototype.toString.call(each).includes("[native code]")),
    constructors: [fails(() => new Attribution()), fails(() => Attribution()), fails(() => new services.constructor())],
    brand: [() => Navigator.prototype.attribution, () => Attribution.prototype.aggregationServices,
      () => services.has.call(new Map(), "x")].map(fails),
    chain: [attribution instanceof Attribution, Attribution.prototype.constructor === Attribution],
    keys: Object.keys(Attribution.prototype),
    maplike: [services.size, services.has("trefoil"), services.get("none") ?? null, [...services.keys()],
      JSON.stringify([...services]), services[Symbol.iterator] === services.entries],
    fresh: services.get("trefoil") !== services.get("trefoil"),
    each: (() => {
      const seen = [];
      services.forEach(function (value, key, map) {
        seen.push(key, value.protocol, map === services, this.mark);
      }, { mark: 1 });
      return seen;
    })(),
    left: Object.getOwnPropertyNames(globalThis).filter((name) => /trefoil/i.test(name)),
  };
}"""


def test_the_object_is_as_web_idl_has_it(person: Person) -> None:
    assert person.tab("https://idl.example/").evaluate(IDL) == {
        "accessor": [True, True, None],
        "interfaces": [[False, True, True]] * 2,
        "method": [True, True, True],
        "same": [True, True],
        "tags": ["[object Attribution]", "[object AttributionAggregationServices]"],
        "lengths": [0, 1, 1, 1],
        "names": ["Attribution", "saveImpression"],
        "native": True,
        "constructors": ["TypeError"] * 3,
        "brand": ["TypeError"] * 3,
        "chain": [True, True],
        "keys": ["aggregationServices", "saveImpression", "measureConversion"],
        "maplike": [1, True, None, ["trefoil"], '[["trefoil",{"protocol":"trefoil"}]]', True],
        "fresh": True,
        "each": ["trefoil", "trefoil", True, 1],
        "left": [],
    }


SAVES = {
    # What is passed as the histogram's index, and what is stored; or the error.
    "2": 2,
    "'3'": 3,
    "true": 1,
    "NaN": 0,
    "null": 0,
    "[4]": 4,
    "5.9": 5,
    "{ valueOf: () => 6 }": 6,
    "4294967296 + 7": 7,
    "-1": "RangeError",
    "undefined": "TypeError",
    "1n": "TypeError",
    "Symbol()": "TypeError",
    "{ valueOf() { throw new EvalError(); } }": "EvalError",
}


def test_numbers_are_converted_as_web_idl_says(person: Person) -> None:
    page = person.tab("https://idl.example/")
    outcomes = {
        passed: page.evaluate(
            f"navigator.attribution.saveImpression({{ histogramIndex: {passed} }}).then(() => 0, (e) => e.name)"
        )
        for passed in SAVES
    }
    assert {passed: error for passed, error in outcomes.items() if error} == {
        passed: wanted for passed, wanted in SAVES.items() if isinstance(wanted, str)
    }
    assert [index for index, *_ in person.stored()] == [wanted for wanted in SAVES.values() if isinstance(wanted, int)]


CALLS = [
    ("saveImpression()", "TypeError"),
    ("saveImpression(5)", "TypeError"),
    ("saveImpression(null)", "TypeError"),
    ("saveImpression.call({}, { histogramIndex: 1 })", "TypeError"),
    ("saveImpression({ histogramIndex: 1, conversionSites: 'a.example' })", "TypeError"),
    ("saveImpression({ histogramIndex: 1, conversionSites: null })", "TypeError"),
    ("saveImpression({ histogramIndex: 1, conversionSites: new Set(['a.example']) })", None),
    ("saveImpression({ histogramIndex: 1, conversionSites: ['localhost'] })", "SyntaxError"),
    ("saveImpression({ histogramIndex: 1, conversionSites: Array(10000).fill('a.example') })", "RangeError"),
    ("saveImpression({ histogramIndex: 1, conversionSites: ['\\ud800.example'] })", "SyntaxError"),
    ("saveImpression({ histogramIndex: 1, priority: -3, unknown: () => {} })", None),
    ("measureConversion({ histogramSize: 4 })", "TypeError"),
    ("measureConversion({ aggregationService: 'none', histogramSize: 4 })", "ReferenceError"),
    ("measureConversion({ aggregationService: 'trefoil', histogramSize: 0 })", "RangeError"),
    ("measureConversion({ aggregationService: 'trefoil', histogramSize: 4, epsilon: Infinity })", "TypeError"),
    ("measureConversion({ aggregationService: 'trefoil', histogramSize: 4, matchValues: [1, '2', true] })", None),
]


def test_every_error_of_a_call_rejects_with_its_own_name(person: Person) -> None:
    page = person.tab("https://idl.example/")
    wrapped = (
        "(() => { const made = navigator.attribution.%s; return made.then(() => null, (error) => error.name); })()"
    )
    assert [(text, page.evaluate(wrapped % text)) for text, _ in CALLS] == CALLS


def test_members_are_read_once_and_in_their_order(person: Person) -> None:
    script = """() => { const read = [];
      const get = (target, name) => { read.push(name); return target[name]; };
      const options = new Proxy({ aggregationService: "trefoil", histogramSize: 4 }, { get });
      return navigator.attribution.measureConversion(options).then(() => read); }"""
    read = person.tab("https://idl.example/").evaluate(script)
    assert read == sorted(read) and len(set(read)) == len(read) == 11


# Frames and policies.

NONE, SELF = [("Permissions-Policy", "save-impression=()")], [("Permissions-Policy", "save-impression=(self)")]
FRAMES = {
    "plain": ("<iframe src='https://ads.example/'></iframe>", None),
    "none": ("<iframe src='https://ads.example/' allow=\"save-impression 'none'\"></iframe>", NOT_ALLOWED),
    "another feature": ("<iframe src='https://ads.example/' allow=\"measure-conversion 'none'\"></iframe>", None),
    "named": ("<iframe src='https://ads.example/' allow='save-impression https://ads.example'></iframe>", None),
    "another": ("<iframe src='https://ads.example/' allow='save-impression https://x.example'></iframe>", NOT_ALLOWED),
    "src": ("<iframe src='https://ads.example/' allow='save-impression'></iframe>", None),
    "src, and elsewhere by now": (
        "<iframe src='https://ads.example/moves' allow='save-impression'></iframe>",
        NOT_ALLOWED,
    ),
    "subdomain": ("<iframe src='https://www.news.example/'></iframe>", None),
    "same origin": ("<iframe src='/'></iframe>", None),
    "its own header": ("<iframe src='https://ads.example/none'></iframe>", NOT_ALLOWED),
    "no scripts of its own": ("<iframe src='https://ads.example/strict'></iframe>", None),
    "sandboxed by its own header": (
        "<iframe src='https://ads.example/boxed'></iframe>",
        {"error": "DOMException", "name": "SyntaxError"},
    ),
    "about:blank": ("<iframe></iframe>", None),
    "srcdoc": ("<iframe srcdoc='<p>hello</p>'></iframe>", None),
    "sandboxed": (
        "<iframe sandbox='allow-scripts' src='https://ads.example/'></iframe>",
        {"error": "DOMException", "name": "SyntaxError"},
    ),
    "sandboxed, same origin kept": (
        "<iframe sandbox='allow-scripts allow-same-origin' src='https://ads.example/'></iframe>",
        None,
    ),
    "an attribute that is too long": (
        f"<iframe src='https://ads.example/' allow='{'x; ' * 2000}'></iframe>",
        NOT_ALLOWED,
    ),
    # Last: its document comes later than those of frames.
    "an object": ("<object data='https://ads.example/' type='text/html'></object>", None),
}


def test_frames_and_their_allow_attributes(person: Person) -> None:
    policy = "Content-Security-Policy"
    person.sites.pages |= {
        "/none": Answer(headers=NONE),
        "/strict": Answer(headers=[(policy, "script-src 'none'")]),
        "/boxed": Answer(headers=[(policy, "sandbox allow-scripts")]),
        "/moves": Answer("<!doctype html><script>location.replace('https://other.example/')</script>"),
    }
    person.sites.pages["news.example/frames"] = Answer(
        "<!doctype html><title>Frames</title>" + "".join(element for element, _ in FRAMES.values())
    )
    page = person.open("https://news.example/frames")
    outcomes = dict(
        zip(FRAMES, (call(frame, "saveImpression", AD) for frame in page.main_frame.child_frames), strict=True)
    )
    assert outcomes == {name: expected for name, (_, expected) in FRAMES.items()}
    callers = {caller for _, site, caller in person.stored() if site == "news.example"}
    assert callers == {"news.example", "ads.example"}
    page.close()


def test_insecure_pages_and_the_frames_in_them_have_no_api(person: Person) -> None:
    """http, https inside http, and data: inside https."""
    page = person.open("https://secure.example/")
    inside = "<!doctype html><iframe src='https://ads.example/'></iframe>"
    page.route("http://insecure.example/", lambda route: route.fulfill(body=inside, content_type="text/html"))
    page.goto("http://insecure.example/")
    assert [call(frame, "saveImpression", AD) for frame in page.frames] == ["no API"] * 2
    person.sites.pages["secure.example/data"] = Answer("<!doctype html><iframe src='data:text/html,hello'></iframe>")
    page.goto("https://secure.example/data")
    assert [call(frame, "saveImpression", AD) for frame in page.frames] == [None, "no API"]
    page.close()


def test_nested_frames_and_headers_of_holders(person: Person) -> None:
    """The chain counts: a holder without the feature has none to pass on, however its own frames are marked."""
    person.sites.pages["/holds"] = Answer(
        "<!doctype html><title>Holds</title><iframe src='https://deep.example/'></iframe>"
    )
    outer = [
        ("<iframe src='https://ads.example/holds'></iframe>", None),
        ("<iframe src='https://ads.example/holds' allow=\"save-impression 'none'\"></iframe>", NOT_ALLOWED),
        ("<iframe src='https://ads.example/holds' allow='save-impression https://ads.example'></iframe>", None),
    ]
    person.sites.pages["news.example/nested"] = Answer("<!doctype html>" + "".join(element for element, _ in outer))
    page = person.open("https://news.example/nested")
    outcomes = [call(frame.child_frames[0], "saveImpression", AD) for frame in page.main_frame.child_frames]
    assert outcomes == [expected for _, expected in outer]
    assert {(site, caller) for _, site, caller in person.stored()} == {("news.example", "deep.example")}
    page.close()

    frames = "<!doctype html><iframe src='https://ads.example/'></iframe><iframe src='/'></iframe>"
    person.sites.pages["strict.example/self"] = Answer(frames, SELF)
    page = person.open("https://strict.example/self")
    outcomes = [call(frame, "saveImpression", AD) for frame in page.frames]
    assert outcomes == [None, NOT_ALLOWED, None]
    page.close()


def test_frames_in_closed_shadow_trees(person: Person) -> None:
    """No index tells which of them calls, so all of them must allow it."""
    attach = """(frames) => { const host = document.createElement("div"); document.body.append(host);
      const root = host.attachShadow({ mode: "closed" });
      for (const attributes of frames) root.append(Object.assign(document.createElement("iframe"), attributes)); }"""
    for allow, expected in (("", None), ("save-impression 'none'", NOT_ALLOWED)):
        page = person.open("https://shadow.example/")
        frames = [{"src": "https://ads.example/"}, {"src": "https://other.example/", "allow": allow}]
        with page.expect_event("framenavigated", lambda frame: "ads.example" in frame.url) as navigated:
            page.evaluate(attach, frames)
        frame = navigated.value
        frame.wait_for_load_state()
        assert call(frame, "saveImpression", AD) == expected
        page.close()


def test_a_header_holds_for_the_first_script(person: Person) -> None:
    script = f"<script>window.outcome = {SAVE}</script>"
    person.sites.pages["/first"] = Answer(f"<!doctype html>{script}", NONE)
    person.sites.pages["/free"] = Answer(f"<!doctype html>{script}")
    page = person.open("https://race.example/free")
    assert page.evaluate("outcome") == "saved"
    outcomes = []
    for number in range(10):
        page.goto(f"https://race.example/first?{number}")
        outcomes.append(page.evaluate("outcome"))
    assert outcomes == ["NotAllowedError"] * 10
    page.close()


# Headers of responses.


def test_headers_of_responses(person: Person) -> None:
    """By whom each response was, over redirects; not from the cache, not of documents and style sheets."""
    image, sheet = ("Content-Type", "image/gif"), ("Content-Type", "text/css")

    def save(index: int) -> tuple[str, str]:
        return "Save-Impression", f"histogram-index={index}"

    person.sites.pages |= {
        "ads.example/cached.gif": Answer(PIXEL, [save(1), image, ("Cache-Control", "max-age=1000")]),
        "ads.example/redirect": Answer("", [save(2), ("Location", "https://track.example/pixel.gif")], 302),
        "track.example/pixel.gif": Answer(PIXEL, [save(3), image]),
        "ads.example/sheet.css": Answer("a {}", [save(4), sheet]),
        "ads.example/document": Answer("<!doctype html><img src='https://track.example/deep.gif'>", [save(5)]),
        "track.example/deep.gif": Answer(PIXEL, [save(6), image]),
        "ads.example/wrong.gif": Answer(PIXEL, [("Save-Impression", "histogram-index=x"), image]),
        "blog.example/headers": Answer(
            "<!doctype html><link rel='stylesheet' href='https://ads.example/sheet.css'>"
            "<img src='https://ads.example/cached.gif'><img src='https://ads.example/redirect'>"
            "<img src='https://ads.example/wrong.gif'><iframe src='https://ads.example/document'></iframe>",
            [save(7)],
        ),
    }
    wanted = {
        (1, "blog.example", "ads.example"),
        (2, "blog.example", "ads.example"),
        (3, "blog.example", "track.example"),
    }
    wanted |= {(6, "blog.example", "track.example")}
    page = person.open("https://blog.example/headers")
    wait_for(lambda: len(person.stored()) >= len(wanted))
    assert set(person.stored()) == wanted
    page.reload()
    wait_for(lambda: len(person.stored()) >= 2 * len(wanted) - 1)
    assert sorted(person.stored()) == sorted([*wanted, *(each for each in wanted if each[0] != 1)])
    page.close()


def test_a_report_by_header_is_sent_by_the_page(person: Person) -> None:
    header = 'aggregation-service="trefoil", histogram-size=4, epsilon=0.1, report-url="/reports"'
    shared = [("Access-Control-Allow-Origin", "*"), ("Access-Control-Allow-Headers", "content-type")]
    person.sites.pages["ads.example/measure.gif"] = Answer(
        PIXEL, [("Measure-Conversion", header), ("Content-Type", "image/gif")]
    )
    person.sites.pages["ads.example/reports"] = Answer("", shared)
    person.sites.pages["shop.example/measure"] = Answer("<!doctype html><img src='https://ads.example/measure.gif'>")
    page = person.open("https://shop.example/measure")

    def delivered() -> list[Request]:
        return [one for one in person.sites.requests if one.path == "/reports" and one.method == "POST"]

    wait_for(lambda: bool(delivered()))
    (request,) = delivered()
    assert request.headers["origin"] == "https://shop.example" and json.loads(request.body) == [0, 0, 0, 0]
    assert not {"cookie", "referer"} & set(request.headers)
    assert request.headers["content-type"] == "application/octet-stream"
    page.close()


def test_a_report_for_a_place_that_does_not_take_it_is_dropped(person: Person) -> None:
    """Without CORS the browser asks first, and sends nothing. The page learns nothing of it, and goes on."""
    header = 'aggregation-service="trefoil", histogram-size=4, epsilon=0.1, report-url="/closed"'
    image = ("Content-Type", "image/gif")
    person.sites.pages["ads.example/closed.gif"] = Answer(PIXEL, [("Measure-Conversion", header), image])
    person.sites.pages["ads.example/closed"] = Answer("")
    person.sites.pages["shop.example/closed"] = Answer(
        "<!doctype html><script>window.seen = []; for (const type of ['error', 'unhandledrejection'])"
        " addEventListener(type, () => seen.push(type));</script><img src='https://ads.example/closed.gif'>"
    )
    page = person.open("https://shop.example/closed")

    def asked() -> list[str]:
        return [one.method for one in person.sites.requests if (one.host, one.path) == ("ads.example", "/closed")]

    wait_for(lambda: bool(asked()))
    assert call(page, "measureConversion", SALE) == [0, 0, 0, 0]
    assert asked() == ["OPTIONS"]
    entries = page.evaluate("performance.getEntriesByType('resource').map(({ name }) => name)")
    assert page.evaluate("seen") == [] and not [name for name in entries if name.endswith("/closed")]
    page.close()


def test_the_header_of_a_response_that_was_not_sent_again_is_ignored(person: Person) -> None:
    """With a 304 the browser takes what it has kept, as from its cache."""

    def unchanged(request: Request) -> Answer:
        kept = [("Save-Impression", "histogram-index=1"), ("Content-Type", "image/gif"), ("ETag", '"a"')]
        kept.append(("Cache-Control", "no-cache"))
        return Answer("", kept, 304) if "if-none-match" in request.headers else Answer(PIXEL, kept)

    person.sites.pages["ads.example/kept.gif"] = unchanged
    person.sites.pages["ads.example/after.gif"] = Answer(
        PIXEL, [("Save-Impression", "histogram-index=2"), ("Content-Type", "image/gif")]
    )
    page = person.open("https://blog.example/")
    load = """(name) => new Promise((done) => { const image = new Image(); image.onload = () => done(true);
      image.src = `https://ads.example/${name}`; })"""
    page.evaluate(load, "kept.gif")
    wait_for(lambda: len(person.stored()) == 1)
    page.reload()
    page.evaluate(load, "kept.gif")
    asked = [one for one in person.sites.requests if one.path == "/kept.gif"]
    assert ["if-none-match" in one.headers for one in asked] == [False, True]
    page.evaluate(load, "after.gif")
    wait_for(lambda: len(person.stored()) >= 2)
    assert [index for index, *_ in person.stored()] == [1, 2]
    page.close()


def test_a_beacon_of_a_document_that_is_gone_is_ignored(person: Person) -> None:
    """There is no document left to ask for its frames and its policy, so nobody to save for."""
    person.sites.pages["ads.example/beacon"] = Answer("", [("Save-Impression", "histogram-index=1")], 200)
    page = person.open("https://left.example/")
    send = "navigator.sendBeacon('https://ads.example/beacon')"
    page.evaluate(send)
    wait_for(lambda: len(person.stored()) == 1)
    page.evaluate(f"() => addEventListener('unload', () => {send})")
    page.goto("https://next.example/")
    wait_for(lambda: sum(one.path == "/beacon" for one in person.sites.requests) == 2)
    # What the new document asks comes later, and is heeded.
    page.evaluate(send)
    wait_for(lambda: len(person.stored()) >= 2)
    assert {site for _, site, _ in person.stored()} == {"left.example", "next.example"} and len(person.stored()) == 2
    page.close()

"""The extension in real Chromium before hostile pages and broken hosts; and the pages that the person sees."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from playwright.sync_api import Playwright, expect, sync_playwright

from device.browser.profiles import databases, services_folder
from protocol.header import Header
from protocol.report import SealedReport
from tests.support.browser import (
    axe_findings,
    axe_source,
    idle_helpers,
    misfits,
    needs_chromium,
    own_findings,
    picture,
    stretched,
    too_wide,
)
from tests.support.extension import (
    ID,
    REAL_HOST,
    Answer,
    Installation,
    Person,
    Sites,
    browser_with,
    call,
    https_sites,
    quietly,
    wait_for,
)

pytestmark = needs_chromium
LONG = "TREFOIL_LOAD" in os.environ
SAVE = "navigator.attribution.saveImpression({ histogramIndex: 1 }).then(() => 'saved', (error) => error.name)"
SALE = '{ aggregationService: "trefoil", histogramSize: 4, epsilon: 0.001 }'
MEASURE = f"""navigator.attribution.measureConversion({SALE})
  .then((result) => result.report.length, (error) => error.name)"""

OTHER_WORKER = "other.js"
OTHER_EXTENSION = {
    "manifest_version": 3,
    "name": "Another",
    "version": "1",
    "permissions": ["nativeMessaging", "scripting", "tabs"],
    "host_permissions": ["https://*/*"],
    "background": {"service_worker": OTHER_WORKER},
}


@pytest.fixture(scope="module")
def playwright() -> Iterator[Playwright]:
    with sync_playwright() as started:
        yield started


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sites]:
    with https_sites(tmp_path_factory.mktemp("sites")) as served:
        yield served


@pytest.fixture(scope="module")
def plain(playwright: Playwright, sites: Sites, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Person]:
    """A browser before a device that does not seal, with another extension that may do anything on all sites."""
    folder = tmp_path_factory.mktemp("plain")
    other = folder / "other"
    other.mkdir()
    (other / "manifest.json").write_text(json.dumps(OTHER_EXTENSION))
    (other / OTHER_WORKER).write_text("")
    with browser_with(playwright, sites, Installation(folder, others=[other])) as opened:
        opened.wait_ready()
        yield opened
        assert opened.installation.errors == ""


@pytest.fixture(scope="module")
def real(playwright: Playwright, sites: Sites, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Person]:
    """A browser before the real host, on a machine with one helper set. Nobody has agreed to anything yet."""
    folder = tmp_path_factory.mktemp("real")
    installation = Installation(folder, REAL_HOST)
    services_folder(installation.data).mkdir(parents=True)
    helper_set = idle_helpers(folder / "helpers").helper_set_path.read_bytes()
    (services_folder(installation.data) / "trefoil.json").write_bytes(helper_set)
    with browser_with(playwright, sites, installation) as opened:
        opened.wait_ready()
        yield opened
        assert installation.errors == ""


# Hostile pages.


def test_forged_input_is_no_action(plain: Person) -> None:
    with plain.context.expect_page() as opened:
        plain.worker.evaluate("chrome.tabs.create({ url: 'https://forger.example/' }).then(() => null)")
    page = opened.value
    page.wait_for_url("https://forger.example/")
    forge = """(() => {
      document.body.click();
      for (const type of ["keydown", "mousedown", "pointerdown", "pointerup", "touchend"]) {
        dispatchEvent(Object.assign(new Event(type, { bubbles: true }), { key: "a", pointerType: "mouse" }));
      }
      Object.defineProperty(Object.getPrototypeOf(navigator.userActivation), "isActive", { get: () => true });
      Object.defineProperty(Event.prototype, "isTrusted", { get: () => true });
      document.dispatchEvent(new Event("load"));
    })()"""
    quietly(page, forge)
    assert quietly(page, SAVE) == "NotAllowedError"
    # A page that stops every event it gets does not keep the extension from seeing the person's own.
    stop = "addEventListener(type, (event) => event.stopImmediatePropagation(), true)"
    quietly(page, f"for (const type of ['pointerdown', 'mousedown']) {stop}")
    page.mouse.click(5, 5)
    assert quietly(page, SAVE) == "saved"
    page.close()


POLLUTE = """(() => {
  const options = { histogramIndex: 2, conversionSites: new Set(["a.example"]) };
  const bad = () => { throw new Error("polluted"); };
  const save = navigator.attribution.saveImpression.bind(navigator.attribution);
  MessagePort.prototype.postMessage = Reflect.apply = Object.defineProperty = Reflect.defineProperty = bad;
  Array.prototype[Symbol.iterator] = Array.prototype.push = String.prototype.toWellFormed = Object.hasOwn = bad;
  Object.defineProperties(Object.prototype, {
    id: { value: 5, configurable: true }, error: { value: "RangeError", configurable: true },
    report: { value: "x", configurable: true }, get: { value: undefined, configurable: true },
  });
  Promise.prototype.catch = bad;
  window.Promise = window.Map = window.Uint8Array = bad;
  return save(options).then((result) => Object.keys(result).length, (error) => String(error));
})()"""


def test_polluted_prototypes_harm_the_page_alone(plain: Person) -> None:
    page, other = plain.open("https://polluter.example/"), plain.open("https://other.example/")
    assert quietly(page, POLLUTE) == 0
    assert call(other, "saveImpression", {"histogramIndex": 1}) is None
    page.close()
    other.close()


def test_a_page_sees_and_reaches_nothing_but_the_api(plain: Person) -> None:
    """The hand-over was before its first script; the extension's files and messages are out of its reach."""
    # A window's own load event comes to no document, so what a document sees of that type is ours.
    listen = "<script>window.seen = []; for (const type of ['load', 'message']) "
    listen += "document.addEventListener(type, ({ target }) => target === document && seen.push(type), true);"
    listen += "addEventListener('message', () => seen.push('message'), true)</script>"
    plain.sites.pages["/listens"] = Answer(f"<!doctype html>{listen}")
    page = plain.open("https://listener.example/listens")
    look = f"""async () => {{
      const fetched = await fetch("chrome-extension://{ID}/popup.html").then(() => "fetched", (error) => error.name);
      const image = await new Promise((done) => {{
        const drawn = new Image();
        drawn.onload = () => done("loaded");
        drawn.onerror = () => done("error");
        drawn.src = "chrome-extension://{ID}/trefoil.svg";
      }});
      const source = URL.createObjectURL(new Blob(["postMessage(typeof navigator.attribution)"]));
      const inWorker = await new Promise((done) => {{ new Worker(source).onmessage = (event) => done(event.data); }});
      await navigator.attribution.saveImpression({{ histogramIndex: 1 }});
      return [window.seen, fetched, image, inWorker, typeof globalThis.chrome?.runtime];
    }}"""
    assert page.evaluate(look) == [[], "TypeError", "error", "undefined", "undefined"]
    page.close()


def test_the_window_of_a_frame_sees_no_hand_over(plain: Person) -> None:
    """A frame's document has the window of the empty one before it, to which its holder may have put listeners."""
    look = """async () => {
      const frame = Object.assign(document.createElement("iframe"), { src: "/?framed" });
      document.body.append(frame);
      const { contentWindow } = frame, seen = [];
      const note = (event) => { if (!event.isTrusted) seen.push(event.type); };
      // Whatever the type of the event is. A page that does this sees what is dispatched, in its own frame alone.
      const { prototype } = contentWindow.EventTarget, { dispatchEvent } = prototype;
      prototype.dispatchEvent = function (event) {
        contentWindow.addEventListener(event.type, note, true);
        return Reflect.apply(dispatchEvent, this, [event]);
      };
      contentWindow.mark = true;
      await new Promise((done) => { frame.onload = done; });
      const made = frame.contentWindow.navigator.attribution.saveImpression({ histogramIndex: 1 });
      return [frame.contentWindow.mark, seen, await made.then(() => "saved")];
    }"""
    page = plain.open("https://holder.example/")
    assert page.evaluate(look) == [True, [], "saved"]
    page.close()


def test_a_stack_does_not_name_the_extension(plain: Person) -> None:
    look = """async () => {
      const stacks = [await navigator.attribution.saveImpression().catch(({ stack }) => stack)];
      const options = { get histogramIndex() { stacks.push(new Error().stack); return -1; } };
      stacks.push(await navigator.attribution.saveImpression(options).catch(({ stack }) => stack));
      return stacks;
    }"""
    page = plain.open("https://stack.example/")
    stacks = page.evaluate(look)
    assert len(stacks) == 3 and "saveImpression" in stacks[1]
    assert not [stack for stack in stacks if "chrome-extension" in stack]
    page.close()


def test_policies_outlast_the_cache_and_nothing_outlasts_its_tab(plain: Person) -> None:
    """A document to which the browser goes back has its header still; one that never came leaves nothing."""
    forbids = [("Permissions-Policy", "save-impression=()")]
    plain.sites.pages["/forbids"], plain.sites.pages["/nothing"] = Answer(headers=forbids), Answer("", forbids, 204)
    page = plain.open("https://cached.example/forbids")
    page.evaluate("window.mark = 1")
    page.goto("https://elsewhere.example/")
    frames = "for (let each = 0; each < 20; each++) document.body.append(document.createElement('iframe'));"
    page.evaluate(f"() => {{ {frames} for (const one of document.querySelectorAll('iframe')) one.src = '/nothing'; }}")
    wait_for(lambda: sum(one.path == "/nothing" for one in plain.sites.requests) == 20)
    wait_for(lambda: plain.worker.evaluate("arriving.size") == 0)
    plain.worker.evaluate("forgetPolicies(-1)")
    page.go_back(wait_until="commit")
    refused = {"error": "DOMException", "name": "NotAllowedError"}
    assert page.evaluate("window.mark") == 1 and call(page, "saveImpression", {"histogramIndex": 1}) == refused
    page.close()
    kept = "chrome.storage.session.get(null).then((kept) => Object.keys(kept).length + policies.size)"
    wait_for(lambda: plain.worker.evaluate(kept) == 0)


def test_another_extension_calls_as_the_site_and_reaches_no_more(plain: Person) -> None:
    """What may do anything on a site may call as it. The worker and the host hear nothing of it."""
    page = plain.open("https://visited.example/")
    plain.ask("control", scenarios="")
    (address,) = (one.url for one in plain.context.service_workers if one.url.endswith(f"/{OTHER_WORKER}"))
    other = plain.worker_at(address)
    save = """() => chrome.tabs.query({ url: "https://visited.example/*" }).then(async ([{ id }]) => {
      const func = () => navigator.attribution.saveImpression({ histogramIndex: 9 }).then(() => "saved", String);
      return (await chrome.scripting.executeScript({ target: { tabId: id }, world: "MAIN", func }))[0].result; })"""
    assert other.evaluate(save) == "saved"
    assert plain.ask("stored")["stored"] == [[9, "visited.example", "visited.example"]]
    send = "(ours) => chrome.runtime.sendMessage(ours, { kind: 'overview', origin: '' }).then(() => 'heard', String)"
    assert "Receiving end does not exist" in other.evaluate(send, ID)
    hosts = len(plain.installation.processes)
    connect = """() => new Promise((done) => {
      const port = chrome.runtime.connectNative("org.trefoil.device");
      port.onMessage.addListener(() => done("answered"));
      port.onDisconnect.addListener(() => done(chrome.runtime.lastError.message));
      port.postMessage({ id: 1, kind: "hello", profile: "0".repeat(32), version: 1 });
    })"""
    assert "forbidden" in other.evaluate(connect)
    assert len(plain.installation.processes) == hosts
    page.close()


def test_a_content_script_may_call_and_no_more(plain: Person) -> None:
    """As a compromised renderer would ask: what is the person's gets no answer."""
    page = plain.open("https://renderer.example/")
    tab = plain.worker.evaluate("chrome.tabs.query({ url: 'https://renderer.example/*' }).then(([tab]) => tab.id)")
    ask = """([tab, message]) => chrome.scripting.executeScript({ target: { tabId: tab }, args: [message],
      func: (message) => chrome.runtime.sendMessage(message).then((answer) => answer ?? null, () => null) })
      .then(([{ result }]) => result)"""
    for kind in ("overview", "switch", "page", "forget", "hello", "closed", "navigated", "control"):
        message = {"kind": kind, "on": False, "origin": "", "path": "./", "profile": "0" * 32, "tab": tab}
        assert plain.worker.evaluate(ask, [tab, message]) is None
    refused = plain.worker.evaluate(ask, [tab, {"kind": "call", "call": "switch", "on": False}])
    assert refused["error"] == "NotAllowedError"
    assert plain.ask("overview", origin="")["enabled"] is True
    # The device's name, the same on all sites.
    look = """(tab) => chrome.scripting.executeScript({ target: { tabId: tab },
      func: () => chrome.storage.local.get().then(Object.keys, () => "refused") }).then(([{ result }]) => result)"""
    assert plain.worker.evaluate("chrome.storage.local.get().then(Object.keys)") == ["profile"]
    assert plain.worker.evaluate(look, tab) == "refused"
    page.close()


def test_a_document_that_is_written_anew_keeps_its_api_and_its_input(plain: Person) -> None:
    with plain.context.expect_page() as opened:
        plain.worker.evaluate("chrome.tabs.create({ url: 'https://writer.example/' }).then(() => null)")
    page = opened.value
    page.wait_for_url("https://writer.example/")
    quietly(page, "document.open(); document.write('<!doctype html><button>again</button>'); document.close();")
    assert quietly(page, SAVE) == "NotAllowedError"
    page.get_by_role("button").click()
    # Longer than the browser's own note of an action lasts: the listener must have told of it.
    page.wait_for_timeout(5500)
    assert quietly(page, SAVE) == "saved"
    page.close()


def test_back_and_forth_to_a_document_that_the_browser_kept(plain: Person) -> None:
    page = plain.open("https://kept.example/")
    assert call(page, "saveImpression", {"histogramIndex": 1}) is None
    page.goto("https://elsewhere.example/")
    page.go_back(wait_until="commit")
    assert call(page, "saveImpression", {"histogramIndex": 1}) is None
    page.close()


def test_a_frame_that_is_removed_in_its_call_harms_nobody(plain: Person) -> None:
    page = plain.open("https://remover.example/")
    script = """() => { const frame = document.body.appendChild(document.createElement("iframe"));
      frame.contentWindow.navigator.attribution.saveImpression({ histogramIndex: 1 });
      frame.remove(); }"""
    for _ in range(20):
        page.evaluate(script)
    assert call(page, "saveImpression", {"histogramIndex": 1}) is None
    page.close()


def test_a_page_that_floods_harms_itself(plain: Person) -> None:
    """So many calls wait in one tab, and further ones are refused; another tab has its answer all the same."""
    flooder, other = plain.open("https://flooder.example/"), plain.open("https://patient.example/")
    assert flooder.evaluate(SAVE) == "saved"
    host = plain.installation.processes[-1]
    os.kill(host, signal.SIGSTOP)
    try:
        flooder.evaluate(f"() => {{ window.flood = Promise.all(Array.from({{ length: 1200 }}, () => {SAVE})); }}")
        wait_for(lambda: plain.worker.evaluate("device.pending.size") >= 1100)
        other.evaluate(f"() => {{ window.own = {SAVE}; }}")
        wait_for(lambda: plain.worker.evaluate("device.pending.size") >= 1101)
    finally:
        os.kill(host, signal.SIGCONT)
    assert other.evaluate("own") == "saved"
    outcomes = flooder.evaluate("flood")
    assert outcomes.count("saved") >= 1100 and set(outcomes) == {"saved", "OperationError"}
    flooder.close()
    other.close()


def test_a_call_that_is_too_long_for_the_host_is_refused(plain: Person) -> None:
    """Two MiB would be dropped by the host without an answer, and the next silence would drop the host."""
    answer = plain.worker.evaluate("device.ask({ kind: 'overview', origin: 'x'.repeat(2 << 20) })")
    assert answer["error"] == "OperationError"
    page = plain.open("https://long.example/")
    long = "{ histogramIndex: 1, conversionSites: Array(200).fill('x'.repeat(20000)) }"
    outcome = page.evaluate(f"navigator.attribution.saveImpression({long}).then(() => 'saved', (error) => error.name)")
    assert outcome == "RangeError"
    assert len(plain.installation.processes) == 1
    page.close()


@pytest.mark.parametrize("lifecycle", ["prerender", "cached", "pending_deletion"])
def test_a_document_that_the_person_does_not_see_may_not_call(plain: Person, lifecycle: str) -> None:
    """It has the tab of the page that began it, which may be open to its site. The worker is asked as the browser asks
    it: with a debugger attached, as here, Chromium prerenders nothing.
    """
    page = plain.open("https://prerender.example/")
    assert call(page, "saveImpression", {"histogramIndex": 1}) is None
    ask = """(documentLifecycle) => chrome.tabs.query({ url: "https://prerender.example/*" }).then(async ([tab]) => {
      const { documentId } = await chrome.webNavigation.getFrame({ tabId: tab.id, frameId: 0 });
      const origin = "https://prerender.example";
      const sender = { tab, frameId: 0, documentId, documentLifecycle, origin, url: tab.url };
      const message = { call: "save", options: { histogramIndex: 1 }, place: null, acted: false };
      return (await onCall(message, sender)).error ?? "saved"; })"""
    assert plain.worker.evaluate(ask, "active") == "saved"
    assert plain.worker.evaluate(ask, lifecycle) == "NotAllowedError"
    page.close()


# Broken hosts.


def test_without_a_host_pages_see_a_plain_browser(playwright: Playwright, sites: Sites, tmp_path: Path) -> None:
    """One that ends at once, one that is for another extension, and none."""
    installation = Installation(tmp_path)
    installation.prepare()
    host = tmp_path / "host.sh"
    working, manifest = host.read_text(), installation.user_data / "NativeMessagingHosts" / "org.trefoil.device.json"
    host.write_text("#!/bin/sh\nexit 1\n")
    with browser_with(playwright, sites, installation) as person:
        page = person.open("https://bare.example/")
        assert call(page, "saveImpression", {"histogramIndex": 1}) == "no API"
        # The person opens the popup when the host is there again: then pages have it, too.
        host.write_text(working)
        person.own_page("popup.html", tab_url="https://bare.example/").wait_for_selector("#here:not([hidden])")
        person.wait_ready()
        page.reload()
        assert call(page, "saveImpression", {"histogramIndex": 1}) is None
        # Gone in a call, and gone for good.
        manifest.unlink()
        os.kill(installation.processes[-1], signal.SIGKILL)
        wait_for(lambda: person.worker.evaluate("device.port === null"))
        operation = {"error": "DOMException", "name": "OperationError"}
        assert call(page, "saveImpression", {"histogramIndex": 1}) == operation
        person.wait_ready(scripts=0)
        page.reload()
        assert call(page, "saveImpression", {"histogramIndex": 1}) == "no API"


@pytest.mark.skipif(not LONG, reason="half a minute, by the worker's own watch: make load")
def test_a_host_that_never_answers_is_dropped(plain: Person) -> None:
    """Stopped in a call, by the system: every call that waits is refused at once, and the next has a new host."""
    page = plain.open("https://silent.example/")
    assert call(page, "saveImpression", {"histogramIndex": 1}) is None
    (silent,) = plain.installation.processes[-1:]
    os.kill(silent, signal.SIGSTOP)
    try:
        page.evaluate(f"() => {{ window.calls = Promise.all([{SAVE}, {SAVE}, {MEASURE}]); }}")
        wait_for(lambda: plain.worker.evaluate("device.pending.size") >= 3)
        # Thirty seconds later, by the worker's own watch.
        assert page.evaluate("calls") == ["OperationError"] * 3
    finally:
        os.kill(silent, signal.SIGCONT)
    assert call(page, "saveImpression", {"histogramIndex": 1}) is None
    assert len(plain.installation.processes) == 2
    page.close()


@pytest.mark.parametrize("moment", ["before", "while it waits", "with many"] if LONG else ["with many"])
def test_a_host_that_is_killed_in_a_call(real: Person, moment: str) -> None:
    """The call is refused, never asked again, and the next one has a new host."""
    page = real.open("https://killer.example/")
    assert page.evaluate(MEASURE) > 100
    host = real.installation.processes[-1]
    if moment == "before":
        os.kill(host, signal.SIGKILL)
        wait_for(lambda: real.worker.evaluate("device.port === null"))
    else:
        count = 1 if moment == "while it waits" else 50
        page.evaluate(f"() => {{ window.calls = Promise.all(Array.from({{ length: {count} }}, () => {MEASURE})); }}")
        wait_for(lambda: real.worker.evaluate("device.pending.size") == count)
        os.kill(host, signal.SIGKILL)
        assert set(page.evaluate("calls")) == {"OperationError"}
    assert page.evaluate(MEASURE) > 100
    assert real.installation.processes[-1] != host
    page.close()


def test_a_locked_database_and_a_full_disk_show_in_no_answer(real: Person) -> None:
    """Null reports of the same size, and saves that are not kept; nothing is said of why."""
    (database,) = databases(real.installation.data)
    real.ask("switch", on=True)
    page = real.open("https://locked.example/")
    size = page.evaluate(MEASURE)
    locking = sqlite3.connect(database, isolation_level=None)
    locking.execute("BEGIN IMMEDIATE")
    assert page.evaluate(MEASURE) == size
    locking.execute("ROLLBACK")
    locking.close()
    assert page.evaluate(SAVE) == "saved" and ads(real) == 1
    # As on a full disk: the host may not write beyond the first byte of any file.
    host = real.installation.processes[-1]
    most, hard = resource.prlimit(host, resource.RLIMIT_FSIZE)
    resource.prlimit(host, resource.RLIMIT_FSIZE, (1, hard))
    # The report leaves after its time, when the save before it was tried.
    assert page.evaluate(SAVE) == "saved" and page.evaluate(MEASURE) == size
    resource.prlimit(host, resource.RLIMIT_FSIZE, (most, hard))
    assert ads(real) == 1
    assert page.evaluate(SAVE) == "saved" and ads(real) == 2
    assert real.installation.processes[-1] == host
    real.ask("switch", on=False)
    page.close()


def ads(person: Person) -> int:
    count: int = person.ask("overview", origin="https://locked.example")["ads"]
    return count


# What the person sees.


def test_nothing_happens_until_the_person_agrees(real: Person) -> None:
    """A new device is off; sites get reports all the same."""
    page = real.open("https://shop.example/")
    null = page.evaluate(MEASURE)
    assert page.evaluate(SAVE) == "saved" and real.ask("overview", origin="https://shop.example")["ads"] == 0
    welcome = real.own_page("welcome.html")
    expect(welcome.locator("#services")).to_have_text("trefoil")
    welcome.get_by_role("button", name="Switch measurement on").click()
    expect(welcome.get_by_role("status")).to_contain_text("Measurement is on")
    assert page.evaluate(SAVE) == "saved" and real.ask("overview", origin="https://shop.example")["ads"] == 1
    assert page.evaluate(MEASURE) == null
    welcome.close()
    page.close()


ALL_THAT_A_PAGE_SEES = """async ([sale, calls]) => {
  const outcomes = [];
  for (const [method, options] of calls) {
    outcomes.push(await navigator.attribution[method](options).then(
      (result) => Object.keys(result), (error) => [error.name, error.message]));
  }
  const { report } = await navigator.attribution.measureConversion(sale);
  return [outcomes, [...navigator.attribution.aggregationServices.keys()], [...report]];
}"""


def test_off_and_on_are_the_same_to_a_page(real: Person) -> None:
    """Outcomes and errors word for word; of the report every byte that is not random, with an ad there to be found."""
    sale = {"aggregationService": "trefoil", "histogramSize": 4, "epsilon": 0.001, "value": 2, "maxValue": 3}
    calls = [["saveImpression", {"histogramIndex": index}] for index in (1, -1, 2**31)]
    calls += [["measureConversion", {**sale, **wrong}] for wrong in ({}, {"histogramSize": 0}, {"epsilon": -1})]
    page = real.open("https://same.example/")
    seen = []
    for on in (True, False):
        real.ask("switch", on=on)
        outcomes, services, report = page.evaluate(ALL_THAT_A_PAGE_SEES, [sale, calls])
        header = Header.decode(SealedReport.decode(bytes(report)).header)
        # The rest is a nonce, hashes and proofs of random values, of a size that the terms decide.
        terms = replace(header.terms, time=3600)
        seen.append((outcomes, services, len(report), terms, header.helper_set, header.key_ids, header.suite))
    assert seen[0] == seen[1]
    real.ask("switch", on=True)
    page.close()


def test_the_popup_shows_a_site_and_switches(real: Person) -> None:
    real.ask("switch", on=True)
    page = real.open("https://popup.example/")
    page.evaluate(SAVE)
    page.evaluate(MEASURE)
    popup = real.own_page("popup.html", tab_url="https://popup.example/", width=360)
    expect(popup.get_by_role("heading", level=1)).to_have_text("popup.example")
    expect(popup.locator("#facts")).to_contain_text("1 ad remembered")
    expect(popup.locator("#facts")).to_contain_text("1 sealed report")
    switch = popup.get_by_role("switch")
    expect(switch).to_have_attribute("aria-checked", "true")
    switch.click()
    expect(switch).to_have_attribute("aria-checked", "false")
    assert real.ask("overview", origin="")["enabled"] is False
    switch.click()
    expect(switch).to_have_attribute("aria-checked", "true")
    popup.close()
    nowhere = real.own_page("popup.html", tab_url="chrome://newtab/", width=360)
    expect(nowhere.get_by_role("heading", level=1)).to_have_text("This page is no site")
    nowhere.close()
    page.close()


def test_the_dashboard_without_a_port(real: Person) -> None:
    real.ask("switch", on=True)
    page = real.open("https://listed.example/")
    page.evaluate(SAVE)
    dashboard = real.own_page("dashboard.html")
    expect(dashboard.get_by_role("heading", level=1)).to_have_text("What measurement has cost you")
    expect(dashboard.locator("main")).to_contain_text("listed.example")
    dashboard.get_by_text("Switch measurement off…").click()
    dashboard.get_by_role("button", name="Switch off").click()
    expect(dashboard.locator(".notice").first).to_contain_text("measurement is off")
    assert real.ask("overview", origin="")["enabled"] is False
    real.ask("switch", on=True)
    dashboard.close()
    page.close()


def test_two_profiles_have_two_devices(real: Person, playwright: Playwright, sites: Sites, tmp_path: Path) -> None:
    """Of one person: what the one remembers the other does not, and neither renews the other's budgets."""
    real.ask("switch", on=True)
    page = real.open("https://profile.example/")
    page.evaluate(SAVE)
    shared = {"XDG_DATA_HOME": str(real.installation.folder)}
    (first,) = databases(real.installation.data)
    with browser_with(playwright, sites, Installation(tmp_path, REAL_HOST, environment=shared)) as second:
        second.wait_ready()
        assert len(databases(real.installation.data)) == 2 and databases(second.installation.data) == []
        overviews = [one.ask("overview", origin="https://profile.example") for one in (real, second)]
    assert [(one["enabled"], one["ads"]) for one in overviews] == [(True, 1), (False, 0)]
    (other,) = {*databases(real.installation.data)} - {first}
    shutil.rmtree(other.parent)
    page.close()


@pytest.mark.parametrize("name", ["popup", "welcome", "dashboard"])
def test_the_pages_fit_small_screens_and_are_accessible(real: Person, name: str) -> None:
    """Screenshots of each width, light and dark, are kept among the artefacts."""
    findings: list[str] = []
    axe = axe_source() if LONG else None
    for width in (320, 390, 1280):
        for dark in (False, True):
            page = real.own_page(f"{name}.html", tab_url="https://popup.example/", width=width, dark=dark)
            page.wait_for_selector({"popup": "#here:not([hidden])", "welcome": "#on", "dashboard": "header.bar"}[name])
            findings += misfits(page) + own_findings(page)
            findings += axe_findings(page, axe) if axe else []
            picture(page, f"browser-{name}-{width}{'-dark' if dark else ''}")
            page.close()
    page = real.own_page(f"{name}.html", tab_url="https://popup.example/")
    page.wait_for_selector({"popup": "#here:not([hidden])", "welcome": "#on", "dashboard": "header.bar"}[name])
    findings += too_wide(stretched(page))
    page.close()
    assert findings == []

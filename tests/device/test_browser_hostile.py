"""The extension in real Chromium before hostile pages and broken hosts, and the input that it trusts."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Playwright

from benchmarks.workloads.chromium import Installation
from device.browser import install
from tests.support.browser import needs_chromium
from tests.support.extension import (
    ID,
    MEASURE,
    PLAIN_HOST,
    SAVE,
    Answer,
    Person,
    Sites,
    browser_with,
    call,
    go,
    quietly,
    unwatched_browser,
    wait_for,
)

pytestmark = needs_chromium

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
def plain(playwright: Playwright, sites: Sites, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Person]:
    """A browser before a device that does not seal, with another extension that may do anything on all sites."""
    folder = tmp_path_factory.mktemp("plain")
    other = folder / "other"
    other.mkdir()
    (other / "manifest.json").write_text(json.dumps(OTHER_EXTENSION))
    (other / OTHER_WORKER).write_text("")
    with browser_with(playwright, sites, Installation(folder, PLAIN_HOST, others=[other])) as opened:
        opened.wait_ready()
        yield opened
        assert opened.installation.errors == ""


# Hostile pages.


def test_forged_input_is_no_action(plain: Person) -> None:
    page = plain.open_by_script("https://forger.example/")
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
    # As in a worker that has started again.
    plain.worker.evaluate("() => { forgetPolicies(-1); policies.clear(); }")
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


def test_a_frame_that_lies_about_its_place_has_none(plain: Person) -> None:
    """As a compromised renderer would, so that its holder does not find the frame that forbids the call."""
    plain.sites.pages["/forbids-frame"] = Answer(
        "<!doctype html><iframe src='https://ads.example/' allow=\"save-impression 'none'\"></iframe>"
    )
    page = plain.open("https://strict-holder.example/forbids-frame")
    forge = """async (places) => {
      const [tab] = await chrome.tabs.query({ url: "https://strict-holder.example/*" });
      const { frameId } = (await chrome.webNavigation.getAllFrames({ tabId: tab.id })).find((one) => one.frameId);
      const func = (places) => Promise.all(places.map((place) => chrome.runtime.sendMessage(
        { kind: "call", call: "save", options: { histogramIndex: 1 }, place, acted: true })));
      const target = { tabId: tab.id, frameIds: [frameId] };
      return (await chrome.scripting.executeScript({ target, args: [places], func }))[0].result; }"""
    places: list[object] = [0, None, -1, -7, 99, "x", "parent", "0", {}, [], True, 1e99]
    assert [answer["error"] for answer in plain.worker.evaluate(forge, places)] == ["NotAllowedError"] * len(places)
    page.close()


def test_notes_of_input_that_flood_leave_room_for_the_person(plain: Person) -> None:
    """As a compromised renderer would send them, while the host is at work."""
    page = plain.open("https://noted.example/")
    assert page.evaluate(SAVE) == "saved"
    host = plain.installation.processes[-1]
    os.kill(host, signal.SIGSTOP)
    try:
        flood = """async () => {
          const [{ id }] = await chrome.tabs.query({ url: "https://noted.example/*" });
          const func = () => { for (let one = 0; one < 1200; one++) chrome.runtime.sendMessage({ kind: "acted" }); };
          await chrome.scripting.executeScript({ target: { tabId: id }, func }); }"""
        plain.worker.evaluate(flood)
        wait_for(lambda: plain.worker.evaluate("device.pending.size") >= 1100)
        plain.worker.evaluate("() => { globalThis.asked = device.ask({ kind: 'overview', origin: '' }); }")
    finally:
        os.kill(host, signal.SIGCONT)
    assert plain.worker.evaluate("asked")["enabled"] is True
    page.close()


def test_a_document_that_is_written_anew_keeps_its_api_and_its_input(plain: Person) -> None:
    page = plain.open_by_script("https://writer.example/")
    quietly(page, "document.open(); document.write('<!doctype html><button>again</button>'); document.close();")
    assert quietly(page, SAVE) == "NotAllowedError"
    page.get_by_role("button").click()
    # The browser's own note of an action stays with the old document: the listener must have told of it.
    go(page, "https://writer.example/?next")
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


PRERENDERED = f"""<!doctype html><title>Told</title><script>
  const save = () => {SAVE}
    .then((outcome) => fetch("/told", {{ method: "POST", body: JSON.stringify([document.prerendering, outcome]) }}));
</script>"""
# The browser prerenders what its rules name; whoever goes there by a link then activates it.
PRERENDERS = f"""{PRERENDERED}<script>
  const rules = {{ prerender: [{{ source: "list", urls: ["/prerendered"], eagerness: "immediate" }}] }};
  const script = {{ type: "speculationrules", textContent: JSON.stringify(rules) }};
  const isTime = async () => (await (await fetch("/go")).text()) === "go";
  const until = async () => {{ while (!(await isTime())) await new Promise((done) => setTimeout(done, 50)); }};
  if (!navigator.attribution) setTimeout(() => location.reload(), 100);
  else save().then(() => document.head.append(Object.assign(document.createElement("script"), script)))
    .then(until).then(() => {{ location.href = "/prerendered"; }});
</script>"""


def test_a_prerendered_document_may_not_call_until_it_is_shown(sites: Sites, tmp_path: Path) -> None:
    """It has the tab of the page that began it, which is open to its site. With a debugger nothing is prerendered."""

    def told() -> list[object]:
        return [json.loads(request.body) for request in sites.requests if request.path == "/told"]

    sites.pages["/told"] = Answer("")
    sites.pages["/go"] = lambda _: Answer("go" if len(told()) == 2 else "wait")
    sites.pages["/first"] = Answer(PRERENDERS)
    sites.pages["/prerendered"] = Answer(
        f"{PRERENDERED}<script>save(); document.addEventListener('prerenderingchange', save);</script>"
    )
    with unwatched_browser(sites, Installation(tmp_path, PLAIN_HOST)) as open_tab:
        open_tab("https://prerender.example/first")
        wait_for(lambda: len(told()) == 3)
    assert told() == [[False, "saved"], [True, "NotAllowedError"], [False, "saved"]]


# The person's input. Playwright's `goto` is an address that the person entered, and its `evaluate` a gesture.


def test_one_action_serves_one_site_until_the_tab_leaves_it(plain: Person) -> None:
    plain.sites.pages["/text"] = Answer("<!doctype html><p>text</p>")
    plain.sites.pages["/button"] = Answer("<!doctype html><button>b</button><iframe src='/text'></iframe>")
    page = plain.open_by_script("https://one.example/button")
    assert quietly(page, SAVE) == "NotAllowedError"
    page.get_by_role("button").click()
    assert [quietly(page, SAVE) for _ in range(3)] == ["saved"] * 3
    # A second after the press a note of it that was held back would have come.
    page.wait_for_timeout(1500)
    go(page, "https://two.example/button")
    assert quietly(page, SAVE) == "NotAllowedError"
    go(page, "https://one.example/button")
    assert quietly(page, SAVE) == "NotAllowedError"
    # An action in a frame is one in its tab, and an action that was not used goes along to the next site.
    page.frames[1].get_by_text("text").click()
    go(page, "https://three.example/button")
    assert quietly(page, SAVE) == "saved"
    go(page, "https://four.example/button")
    assert quietly(page, SAVE) == "NotAllowedError"
    page.close()


def test_two_tabs_have_two_activations(plain: Person) -> None:
    acted, other = (plain.open_by_script(f"https://tab{number}.example/") for number in (1, 2))
    acted.mouse.click(5, 5)
    assert (quietly(other, SAVE), quietly(acted, SAVE)) == ("NotAllowedError", "saved")
    acted.close()
    other.close()


def test_a_tab_that_a_page_opens_has_no_action_of_its_own(plain: Person) -> None:
    """Neither by a link nor by a script, and the action of the first tab is not used by them."""
    plain.sites.pages["/opens"] = Answer("<!doctype html><a href='https://opened.example/' target='_blank'>Go</a>")
    page = plain.open_by_script("https://opener.example/opens")
    with plain.context.expect_page() as opened:
        page.get_by_role("link").click()
    opened.value.wait_for_load_state()
    assert quietly(opened.value, SAVE) == "NotAllowedError"
    with plain.context.expect_page() as written:
        quietly(page, "void (window.other = open('about:blank'))")
    # It has its opener's origin, and no secure context where that has none.
    assert quietly(page, SAVE.replace("navigator", "other.navigator")) == "NotAllowedError"
    assert quietly(page, SAVE) == "saved"
    for each in (written.value, opened.value, page):
        each.close()


def test_a_private_window_has_no_api(plain: Person) -> None:
    plain.sites.pages["/tells"] = Answer("<!doctype html><script>fetch('/is-' + ('attribution' in navigator))</script>")
    plain.worker.evaluate(
        "chrome.windows.create({ incognito: true, url: 'https://private.example/tells' }).then(() => 0)"
    )
    wait_for(lambda: any(one.path.startswith("/is-") for one in plain.sites.requests))
    assert [one.path for one in plain.sites.requests if one.path.startswith("/is-")] == ["/is-false"]


def test_an_address_that_was_entered_is_an_action_and_a_reload_is_none(plain: Person) -> None:
    page = plain.open("https://entered.example/")
    assert quietly(page, SAVE) == "saved"
    page.close()
    page = plain.open_by_script("https://reloaded.example/")
    with page.expect_navigation():
        quietly(page, "void setTimeout(() => location.reload())")
    assert quietly(page, SAVE) == "NotAllowedError"
    page.close()


def test_the_badge_counts_the_reports_of_a_site(plain: Person) -> None:
    page = plain.open("https://badge.example/")
    for _ in range(2):
        call(page, "measureConversion", {"aggregationService": "trefoil", "histogramSize": 4})
    text = """chrome.tabs.query({ url: "https://badge.example/*" })
      .then(([tab]) => chrome.action.getBadgeText({ tabId: tab.id }))"""
    wait_for(lambda: plain.worker.evaluate(text) == "2")
    page.goto("https://badge.example/?again")
    assert plain.worker.evaluate(text) == "2"
    page.goto("https://other.example/")
    wait_for(lambda: plain.worker.evaluate(text.replace("badge.example", "other.example")) == "")
    page.close()


# Keeps what the device is asked to forget, and refuses it once.
WATCH_FORGET = """() => {
  const ask = device.ask;
  device.forgot = [];
  device.restore = () => { device.ask = ask; };
  device.ask = async function (message, tab) {
    if (message.kind !== "forget") return await ask.call(this, message, tab);
    this.forgot.push(message.hosts ?? "all");
    return this.forgot.length === 1 ? { error: "OperationError" } : await ask.call(this, message, tab);
  };
}"""


def test_clearing_the_browsers_history_clears_the_device(plain: Person) -> None:
    call(plain.tab("https://old.example/"), "saveImpression", {"histogramIndex": 1})
    assert plain.stored()
    plain.worker.evaluate("chrome.history.deleteUrl({ url: 'https://never.example/' })")
    assert plain.stored()
    # A device that is busy is asked again.
    plain.worker.evaluate(WATCH_FORGET)
    plain.worker.evaluate("chrome.history.deleteAll()")
    wait_for(lambda: not plain.stored())
    assert plain.worker.evaluate("device.forgot") == ["all", "all"]
    plain.worker.evaluate("device.restore()")


def test_a_site_is_forgotten_with_the_last_visit_to_any_of_its_hosts(plain: Person) -> None:
    def is_stored() -> bool:
        return "left.example" in {site for _, site, _ in plain.stored()}

    plain.tab("https://m.left.example/")
    call(plain.tab("https://www.left.example/"), "saveImpression", {"histogramIndex": 1})
    assert is_stored()
    delete = "(url) => chrome.history.deleteUrl({ url })"
    plain.worker.evaluate(WATCH_FORGET)
    plain.worker.evaluate(delete, "https://m.left.example/")
    wait_for(lambda: len(plain.worker.evaluate("device.forgot")) == 2)
    assert is_stored()
    plain.worker.evaluate(delete, "https://www.left.example/")
    wait_for(lambda: not is_stored())
    assert plain.worker.evaluate("device.forgot") == [["m.left.example"]] * 2 + [["www.left.example"]]
    plain.worker.evaluate("device.restore()")


# Broken hosts.


def test_without_a_host_pages_see_a_plain_browser(playwright: Playwright, sites: Sites, tmp_path: Path) -> None:
    """One that ends at once, and none."""
    installation = Installation(tmp_path, PLAIN_HOST)
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
        # A set that was installed meanwhile shows when the host starts again.
        services = install.extension_folder(installation.data) / "services.js"
        services.write_text(install.services_script(["north", "trefoil"]))
        os.kill(installation.processes[-1], signal.SIGKILL)
        wait_for(lambda: person.worker.evaluate("device.port === null"))
        call(page, "saveImpression", {"histogramIndex": 1})
        page.reload()
        assert page.evaluate("[...navigator.attribution.aggregationServices.keys()]") == ["north", "trefoil"]
        # Gone in a call, and gone for good.
        manifest.unlink()
        os.kill(installation.processes[-1], signal.SIGKILL)
        wait_for(lambda: person.worker.evaluate("device.port === null"))
        operation = {"error": "DOMException", "name": "OperationError"}
        assert call(page, "saveImpression", {"histogramIndex": 1}) == operation
        person.wait_ready(scripts=0)
        page.reload()
        assert call(page, "saveImpression", {"histogramIndex": 1}) == "no API"


def test_a_host_that_never_answers_is_dropped(plain: Person) -> None:
    """Stopped in a call, by the system: every call that waits is refused at once, and the next has a new host."""
    page = plain.open("https://silent.example/")
    assert call(page, "saveImpression", {"histogramIndex": 1}) is None
    hosts = len(plain.installation.processes)
    silent = plain.installation.processes[-1]
    # The worker's half a minute, in half a second.
    plain.worker.evaluate("globalThis.kept = setTimeout; setTimeout = (work, ms) => kept(work, ms / 60); 0")
    os.kill(silent, signal.SIGSTOP)
    try:
        assert page.evaluate(f"Promise.all([{SAVE}, {SAVE}, {MEASURE}])") == ["OperationError"] * 3
    finally:
        plain.worker.evaluate("setTimeout = kept; 0")
        os.kill(silent, signal.SIGCONT)
    assert call(page, "saveImpression", {"histogramIndex": 1}) is None
    assert len(plain.installation.processes) == hosts + 1
    page.close()

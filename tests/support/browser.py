"""Real Chromium for the tests, and demonstrations for it to visit."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import subprocess
import tarfile
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from benchmarks.demos.live.live import prepared
from benchmarks.demos.live.measurement import SIZES
from benchmarks.demos.live.web import SHOP_SITE, Map, Place
from benchmarks.workloads.chromium import CHROMIUM
from device.agent import system_clock
from device.schedule import AtOnce
from mpc_helpers.local.launcher import Trio, prepare
from tests.support.processes import IN_BACKGROUND, TREFOIL, started

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="Debian's chromium is not installed: apt install chromium")
ARTEFACTS = Path(__file__).parents[2] / "artefacts"
WAIT_SECONDS = 30
# Only an end to waiting: a start takes seconds, and longer than the launcher's own deadlines where those have passed.
START_SECONDS = 200
ANSWER_MS = 1000 * START_SECONDS
AXE_VERSION = "4.14.0"
_FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser without a window."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(_FLAGS))
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def person(browser: Browser, *, dark: bool = False, scripts: bool = True, width: int = 1100) -> Iterator[Page]:
    """One person's fresh browser. Any console message of a page, and any error in its scripts, fails the test."""
    context: BrowserContext = browser.new_context(
        color_scheme="dark" if dark else "light",
        java_script_enabled=scripts,
        viewport={"width": width, "height": 900},
        reduced_motion="reduce",
    )
    context.set_default_timeout(WAIT_SECONDS * 1000)
    page = context.new_page()
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: complaints.append(f"error: {error}"))
    try:
        yield page
        assert complaints == []
    finally:
        context.close()


def idle_helpers(folder: Path) -> Trio:
    """Three helpers with keys that do not run."""
    return prepare(folder, now=system_clock(), sites={SHOP_SITE: [SHOP_SITE]})


@contextmanager
def demonstration(folder: Path, trio: Trio) -> Iterator[Map]:
    """All places of a demonstration, with a fresh device, in a thread."""
    with prepared(folder, trio, 0, 1, AtOnce()) as (shown, sockets):
        loop = asyncio.new_event_loop()
        ready, stop = threading.Event(), asyncio.Event()

        async def serve() -> None:
            async with shown.serving(sockets):
                ready.set()
                await stop.wait()

        thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
        thread.start()
        try:
            assert ready.wait(WAIT_SECONDS)
            yield shown.where
        finally:
            loop.call_soon_threadsafe(stop.set)
            thread.join(WAIT_SECONDS)
            loop.close()


@contextmanager
def live_demonstration(folder: Path) -> Iterator[Map]:
    """`trefoil live` as a person starts it, with three helpers, on any free ports; stopped as Ctrl-C does."""
    addresses = folder / "addresses.json"
    with started([*IN_BACKGROUND, *TREFOIL, "live", "--port", "0", "--json", str(addresses)]) as process:
        deadline = time.monotonic() + START_SECONDS
        while not addresses.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                process.terminate()
                pytest.fail(f"the demonstration did not start: {process.communicate(timeout=START_SECONDS)[0]}")
            time.sleep(0.1)
        yield Map({Place[name.upper()]: origin for name, origin in json.loads(addresses.read_text()).items()})
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=START_SECONDS)
        assert process.returncode == 0, said


def address(where: Map, place: Place) -> str:
    """The page that a place shows first."""
    return f"{where[place]}/"


def settle(page: Page) -> None:
    """Until the advertiser's page has stopped reloading itself."""
    expect(page.locator("meta[http-equiv=refresh]")).to_have_count(0, timeout=ANSWER_MS)


def pull_slider(page: Page, people: int) -> None:
    """Drag the thumb to the place of this crowd and let go; that alone asks."""
    slider = page.locator("#position")
    slider.scroll_into_view_if_needed()
    least, now = (int(slider.get_attribute(name) or 0) for name in ("min", "value"))
    box = slider.bounding_box()
    assert box is not None
    # The middle of the thumb stops half its width, 8 pixels, before either end.
    step, y = (box["width"] - 16) / (len(SIZES) - 1 - least), box["y"] + box["height"] / 2
    from_x, to_x = (box["x"] + 8 + step * (place - least) for place in (now, SIZES.index(people)))
    page.mouse.move(from_x, y)
    page.mouse.down()
    page.mouse.move(to_x, y, steps=5)
    expect(page.locator("#ask output")).to_have_text(f"{people:,} people")
    page.mouse.up()
    expect(page.locator("#why[role=status]")).to_contain_text("The button is greyed until the answer is here")


def picture(page: Page, name: str) -> None:
    """Keep a screenshot as an artefact of the run."""
    folder = ARTEFACTS / "screenshots"
    folder.mkdir(parents=True, exist_ok=True)
    loaded(page).screenshot(path=folder / f"{name}.png", full_page=True)


def axe_source() -> str | None:
    """axe-core from the npm registry, kept among the artefacts; None where there is no npm or no registry."""
    kept = ARTEFACTS / f"axe-core-{AXE_VERSION}.tgz"
    if not kept.exists():
        npm = shutil.which("npm")
        if npm is None:
            return None
        ARTEFACTS.mkdir(exist_ok=True)
        # Moved there whole: another worker may be reading.
        with tempfile.TemporaryDirectory(dir=ARTEFACTS) as name:
            command = [npm, "pack", f"axe-core@{AXE_VERSION}", "--silent", "--pack-destination", name]
            try:
                subprocess.run(command, check=True, capture_output=True, timeout=60, cwd=name)
                (Path(name) / kept.name).replace(kept)
            except (subprocess.SubprocessError, OSError):
                return None
    with tarfile.open(kept) as package:
        member = package.extractfile("package/axe.min.js")
        return None if member is None else member.read().decode()


def axe_findings(page: Page, source: str, rules: tuple[str, ...] = ()) -> list[str]:
    """What axe-core finds, by all of its rules or by those named."""
    loaded(page).evaluate(source)
    # A frame of another origin cannot be looked into; its page is looked at alone.
    options: dict[str, object] = {"iframes": False} | ({"runOnly": list(rules)} if rules else {})
    result = page.evaluate("async (options) => JSON.stringify((await axe.run(options)).violations)", options)
    return [
        f"{page.url}: {violation['id']} at {node['target']}: {violation['help']}"
        for violation in json.loads(result)
        for node in violation["nodes"]
    ]


# Text as a person sees it: what a picture shrinks is smaller than its style says.
_SMALL = """(least) => {
  const found = [];
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    if (!own || !element.getBoundingClientRect().width) continue;
    const svg = element.closest("svg");
    const scale = svg ? svg.getBoundingClientRect().width / svg.viewBox.baseVal.width : 1;
    const size = parseFloat(getComputedStyle(element).fontSize) * scale;
    if (size < least) found.push(`${size.toFixed(1)} px: ${element.textContent.trim().slice(0, 40)}`);
  }
  return found;
}"""


# What sticks out to the right, text by its own lines. What lies in a box that scrolls or clips cannot widen the page.
_STICKING_OUT = """() => {
  const edge = document.documentElement.clientWidth + 0.5;
  const clipped = (element) => {
    for (let box = element; box && box !== document.body; box = box.parentElement)
      if (getComputedStyle(box).overflowX !== "visible") return true;
    return false;
  };
  const rights = (node) => [...node.getClientRects()].map((line) => line.right + scrollX);
  const found = [];
  for (const element of document.querySelectorAll("body *")) {
    const texts = [...element.childNodes].filter((node) => node.nodeType === 3).flatMap((node) => {
      const range = document.createRange();
      range.selectNodeContents(node);
      return rights(range);
    });
    const right = Math.max(...rights(element), ...texts);
    if (right > edge && !clipped(element.parentElement)) found.push([right, element]);
  }
  return found.sort((one, other) => other[0] - one[0]).slice(0, 5).map(([right, element]) => {
    const name = element.localName + [...element.classList].map((each) => `.${each}`).join("");
    return `<${name}> ends at ${right.toFixed(0)}: ${element.textContent.trim().slice(0, 40)}`;
  });
}"""
# Text of a picture that its frame cuts off.
_CUT_OFF = """() => [...document.querySelectorAll("svg text")].flatMap((text) => {
  const [inner, outer] = [text.getBoundingClientRect(), text.closest("svg").getBoundingClientRect()];
  const outside = inner.left < outer.left - 0.5 || inner.right > outer.right + 0.5 || inner.bottom > outer.bottom + 0.5;
  return outside ? [`cut off: ${text.textContent}`] : [];
})"""
_EDGES = "[document.documentElement.scrollWidth, document.documentElement.clientWidth]"


def loaded(page: Page) -> Page:
    """The page once its style sheets are there. A page that moves on by itself, as the one that opens the dashboard
    does, is shown before: the browser's `goto` has waited for the first of the two only.
    """
    page.wait_for_load_state("load")
    return page


def too_wide(page: Page) -> list[str]:
    """Whether the page is wider than the screen, and by what."""
    content, screen = loaded(page).evaluate(_EDGES)
    if content <= screen:
        return []
    return [f"{page.url}: {content - screen} pixels wider than the screen; {'; '.join(page.evaluate(_STICKING_OUT))}"]


def misfits(page: Page, least: float = 11.0) -> list[str]:
    """What does not fit: a page wider than the screen, text smaller than `least` pixels, or cut off by its picture."""
    findings = page.evaluate(_SMALL, least) + page.evaluate(_CUT_OFF)
    return too_wide(page) + [f"{page.url}: {finding}" for finding in findings]


# As the widest fonts and the longest names make it: every text gains a word of 250 letters, all of it in wide letters.
_STRETCH = """() => {
  for (const element of document.querySelectorAll("body *")) {
    if (element.closest("svg")) continue;
    element.style.setProperty("font-family", "monospace", "important");
    for (const node of element.childNodes)
      if (node.nodeType === 3 && node.textContent.trim()) node.textContent += " " + "W".repeat(250);
  }
}"""


def stretched(page: Page) -> Page:
    """The page with long words everywhere, on the narrowest screen that is still sold."""
    loaded(page).evaluate(_STRETCH)
    page.set_viewport_size({"width": 320, "height": 900})
    return page


def own_findings(page: Page) -> list[str]:
    """Our own check of what matters most, for machines without npm: see `accessibility.js`."""
    script = (Path(__file__).parent / "accessibility.js").read_text()
    return [f"{page.url}: {finding}" for finding in loaded(page).evaluate(script)]

"""Real Chromium for the tests, and demonstrations for it to visit."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import tarfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

from benchmarks.live.live import prepared
from benchmarks.live.places import SHOP_SITE, Map, Place
from device.agent import system_clock
from mpc_helpers.local.launcher import Trio, prepare
from tests.support.virtual_ticks import virtual_ticks

CHROMIUM = shutil.which("chromium")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="Debian's chromium is not installed: apt install chromium")
ARTEFACTS = Path(__file__).parents[2] / "artefacts"
WAIT_SECONDS = 30
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
    with prepared(folder, trio, 0, 1, virtual_ticks()) as (shown, sockets):
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


def address(where: Map, place: Place) -> str:
    """The page that a place shows first."""
    return f"{where[place]}/"


def picture(page: Page, name: str) -> None:
    """Keep a screenshot as an artefact of the run."""
    folder = ARTEFACTS / "screenshots"
    folder.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=folder / f"{name}.png", full_page=True)


def axe_source() -> str | None:
    """axe-core from the npm registry, kept among the artefacts; None where there is no npm or no registry."""
    kept = ARTEFACTS / f"axe-core-{AXE_VERSION}.tgz"
    if not kept.exists():
        npm = shutil.which("npm")
        if npm is None:
            return None
        ARTEFACTS.mkdir(exist_ok=True)
        command = [npm, "pack", f"axe-core@{AXE_VERSION}", "--silent", "--pack-destination", str(ARTEFACTS)]
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=60, cwd=ARTEFACTS)
        except (subprocess.SubprocessError, OSError):
            return None
    with tarfile.open(kept) as package:
        member = package.extractfile("package/axe.min.js")
        return None if member is None else member.read().decode()


def axe_findings(page: Page, source: str, rules: tuple[str, ...] = ()) -> list[str]:
    """What axe-core finds serious or critical, by all of its rules or by those named."""
    page.evaluate(source)
    # A frame of another origin cannot be looked into; its page is looked at alone.
    options: dict[str, object] = {"iframes": False} | ({"runOnly": list(rules)} if rules else {})
    result = page.evaluate("async (options) => JSON.stringify((await axe.run(options)).violations)", options)
    return [
        f"{page.url}: {violation['id']} at {node['target']}: {violation['help']}"
        for violation in json.loads(result)
        if violation["impact"] in ("serious", "critical")
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


def misfits(page: Page, least: float = 11.0) -> list[str]:
    """What does not fit the screen: a page that is wider than it, and text smaller than `least` pixels."""
    over = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    wide = [f"{page.url}: {over} pixels wider than the screen"] if over > 0 else []
    return wide + [f"{page.url}: {small}" for small in page.evaluate(_SMALL, least)]


def own_findings(page: Page) -> list[str]:
    """Our own check of what matters most, for machines without npm: see `accessibility.js`."""
    script = (Path(__file__).parent / "accessibility.js").read_text()
    return [f"{page.url}: {finding}" for finding in page.evaluate(script)]

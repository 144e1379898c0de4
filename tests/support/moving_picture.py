"""Record the live demonstration as a moving picture for the README: `python -m tests.support.moving_picture`.

It clicks through `trefoil live` in Chromium and keeps what the window shows, each frame with its time. The answers come
from three real helpers, so that no two recordings are the same.
"""

from __future__ import annotations

import io
import tempfile
from contextlib import closing
from pathlib import Path

from PIL import Image
from playwright.sync_api import Locator, Page, expect

from benchmarks.demos.live.measurement import SIZES
from benchmarks.demos.live.web import Map, Place
from protocol.cli.console import say
from tests.support.browser import address, chromium, live_demonstration, loaded, pull_slider, settle

PICTURE = Path(__file__).parents[2] / "benchmarks" / "results" / "screenshots" / "live.webp"
WIDTH, HEIGHT = 900, 800
# Frames in milliseconds: of a movement, and of what is to be read.
BRIEF, LONG = 120, 2_200
# A screenshot has no mouse pointer, so that the recording draws one.
_POINT = """([x, y]) => {
  const dot = document.createElement("div");
  dot.id = "pointer";
  Object.assign(dot.style, {
    position: "fixed", left: `${x - 11}px`, top: `${y - 11}px`, width: "22px", height: "22px", borderRadius: "50%",
    background: "#d9480fb0", border: "2px solid #fff", zIndex: 9, pointerEvents: "none",
  });
  document.querySelector("#pointer")?.remove();
  document.body.append(dot);
}"""


class Recording:
    """The frames so far. A frame that looks like the last one prolongs it."""

    def __init__(self, page: Page) -> None:
        self._page = page
        self._frames: list[Image.Image] = []
        self._times: list[int] = []

    def frame(self, milliseconds: int) -> None:
        shot = Image.open(io.BytesIO(loaded(self._page).screenshot())).convert("RGB")
        if self._frames and shot.tobytes() == self._frames[-1].tobytes():
            self._times[-1] += milliseconds
            return
        self._frames.append(shot)
        self._times.append(milliseconds)

    def click(self, target: Locator) -> None:
        """Show the pointer on its target for a moment, then click."""
        target.scroll_into_view_if_needed()
        box = target.bounding_box()
        assert box is not None
        self._page.evaluate(_POINT, [box["x"] + min(box["width"] / 2, 90), box["y"] + box["height"] / 2])
        self.frame(LONG // 2)
        target.click()

    def answer(self) -> None:
        """Wait for the answer; show how its bars grow, and then the answer."""
        self._scroll_to("#people")
        self.frame(LONG // 3)
        settle(self._page)
        self._scroll_to("#people")
        for _ in range(3):
            self.frame(BRIEF)
        self._page.wait_for_timeout(1_500)
        self.frame(LONG)

    def _scroll_to(self, selector: str) -> None:
        self._page.locator(selector).evaluate("(element) => scrollTo(0, element.offsetTop - 12)")

    def write(self, path: Path) -> None:
        first, *rest = self._frames
        # Lossless and small: of each frame only what differs from the one before. The quality is the encoder's effort.
        size = {"lossless": True, "minimize_size": True, "quality": 60, "method": 3}
        first.save(path, None, save_all=True, append_images=rest, duration=self._times, loop=0, **size)


def record(page: Page, where: Map, recording: Recording) -> None:
    """Play the story: an ad, a purchase, noise, the crowds, and the three parts of one report."""
    page.goto(address(where, Place.NEWS))
    recording.click(page.locator("a.ad").first)
    page.wait_for_url(address(where, Place.SHOP))
    recording.click(page.get_by_role("button", name="Buy the shoes"))
    expect(page.get_by_role("status")).to_contain_text("Thank you")
    page.locator("#told").evaluate("(element) => scrollTo(0, element.offsetTop - 12)")
    recording.frame(LONG)
    page.goto(address(where, Place.MEASUREMENT))
    recording.click(page.get_by_role("button", name="Ask the three helpers"))
    recording.answer()
    for people in (SIZES[1], SIZES[3], SIZES[-1]):
        pull_slider(page, people)
        recording.answer()
    page.goto(address(where, Place.HELPERS))
    recording.click(page.get_by_role("button", name="Add up the three parts"))
    expect(page.locator("#sums .verdict")).to_be_visible()
    page.locator("#sums").evaluate("(element) => scrollTo(0, element.offsetTop - 12)")
    recording.frame(LONG + LONG)


def main() -> None:
    """Record the story and write the picture."""
    with (
        tempfile.TemporaryDirectory() as folder,
        live_demonstration(Path(folder)) as where,
        chromium() as browser,
        closing(browser.new_context(viewport={"width": WIDTH, "height": HEIGHT})) as context,
    ):
        page = context.new_page()
        recording = Recording(page)
        record(page, where, recording)
    PICTURE.parent.mkdir(exist_ok=True)
    recording.write(PICTURE)
    say(f"{PICTURE} has {PICTURE.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()

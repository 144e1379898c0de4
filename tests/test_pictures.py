"""The drawn pictures of the documents: read on a telephone, on light and dark pages, and by those who cannot see."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parent.parent
PICTURES = sorted(ROOT.glob("*/pictures/*.svg"))
SVG = "{http://www.w3.org/2000/svg}"
TELEPHONE = 390
SMALLEST_TEXT = 11


def smallest_text_on_a_telephone(svg: str) -> float:
    """In pixels, when the picture is as wide as the screen of a telephone."""
    sizes = [
        float(size) for size in re.findall(r"(?:font-size: |font: |font-size=\")(?:\d{3} )?([\d.]+)(?:px|\")", svg)
    ]
    width = float(ElementTree.fromstring(svg).attrib["viewBox"].split()[2])  # noqa: S314 - our own file
    return min(sizes) * min(1.0, TELEPHONE / width)


def test_there_are_pictures() -> None:
    assert {path.stem for path in PICTURES} >= {"attempt", "processes", "query", "report", "roles"}


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.stem)
def test_text_can_be_read_on_a_telephone(path: Path) -> None:
    assert smallest_text_on_a_telephone(path.read_text()) >= SMALLEST_TEXT


def test_small_text_is_noticed() -> None:
    assert smallest_text_on_a_telephone(PICTURES[0].read_text().replace("font: 14px", "font: 9px")) < SMALLEST_TEXT


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.stem)
def test_a_picture_has_its_own_page_and_colours_for_the_dark(path: Path) -> None:
    """Its background is drawn, so that text is never on a page of its own colour."""
    root = ElementTree.fromstring(path.read_text())  # noqa: S314 - our own file
    page = root.find(f"{SVG}rect[@class='page']")
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    assert page is not None
    assert (float(page.attrib["width"]), float(page.attrib["height"])) == (width - 1, height - 1)
    assert "prefers-color-scheme: dark" in path.read_text()


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.stem)
def test_a_picture_says_in_words_what_it_shows(path: Path) -> None:
    root = ElementTree.fromstring(path.read_text())  # noqa: S314 - our own file
    for element in ("title", "desc"):
        assert root.findtext(f"{SVG}{element}")


def test_the_report_has_the_offsets_of_the_specification() -> None:
    specified = re.findall(
        r"^\| (\d+) \| [\d×… ]+ \| [\w ,εΔκ]+ \|", (ROOT / "protocol" / "SPEC.md").read_text(), re.MULTILINE
    )
    drawn = re.findall(
        r'<text x="52" y="[\d.]+" class="end">(\d+)</text>', (ROOT / "protocol/pictures/report.svg").read_text()
    )
    assert len(drawn) > 10
    # The first four fields share a row.
    assert [offset for offset in specified if offset not in ("2", "4", "6")] == drawn

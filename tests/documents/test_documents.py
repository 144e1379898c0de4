"""What documents say and name: references that lead somewhere, plain sentences, evidence for every promise, pictures.

The repository stands alone: whatever a document, a module or a test names is in it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from mpc_helpers.ledger.attempt import Failpoint
from mpc_helpers.service.policy import RefusalReason
from protocol.cli import app as cli
from protocol.errors import Rejection

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("protocol", "device", "mpc_helpers", "benchmarks", "tests")
SUFFIXES = {".py", ".md", ".js", ".css", ".svg", ".toml", ".json"}
# Runs of the standard's own cases, for whoever has them beside the repository.
MAY_NAME_SHARED = {
    "tests/device/test_browser_extension.py",
    "tests/device/test_conformance.py",
    "tests/device/test_http_headers.py",
}

_DOCUMENT = re.compile(r"[\w./-]*\w\.md\b")
_SECTION = re.compile(r"([\w./-]*\w\.md),\s+\"([^\"\n]+)\"")
_NUMBER = re.compile(r"SPEC(?:\.md)?[`\]]* §(\d+)")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_CODE = re.compile(r"```.*?^```|^    .*?$", re.MULTILINE | re.DOTALL)
_PATH = re.compile(rf"`((?:{'|'.join(FOLDERS)})/[\w./-]+)`")
_TESTS = re.compile(r"(?:\(\*?|\| |[:;] )T ([a-z_0-9]+(?:,\s+[a-z_0-9]+)*)")


@cache
def texts() -> dict[Path, str]:
    """Every text file of the project but this one, which plants dead references."""
    paths = [path for path in ROOT.iterdir() if path.suffix in SUFFIXES | {""} and path.is_file()]
    for folder in FOLDERS:
        paths += [path for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES]
    return {path: path.read_text() for path in set(paths) - {Path(__file__).resolve()}}


def documents() -> list[Path]:
    return sorted(path for path in texts() if path.suffix == ".md")


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def found(document: str, named_in: Path) -> list[Path]:
    """Where a reader would look: beside the file, in the folders above it, and then for the only one of that name."""
    above = [folder / document for folder in named_in.parents if folder.is_relative_to(ROOT)]
    here = [path for path in above if path.is_file()]
    return here[:1] or [path for path in documents() if "/" not in document and path.name == document]


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE), re.MULTILINE)
    return {slug(heading) for heading in headings}


def slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def headings(document: Path) -> list[str]:
    return re.findall(r"^#+ (.+)$", document.read_text(), re.MULTILINE)


def missing_documents(path: Path, text: str) -> Iterator[str]:
    # Most of a text is in files of numbers, which name no document: they need no search for names.
    for document in _DOCUMENT.findall(text) if ".md" in text else ():
        if len(found(document.removeprefix("./"), path)) != 1:
            yield f"{name(path)} names {document}"


def missing_sections(path: Path, text: str) -> Iterator[str]:
    for document, section in _SECTION.findall(text) if ".md" in text else ():
        for place in found(document, path):
            if section not in headings(place):
                yield f'{name(path)} names {document}, "{section}"'
    for number in _NUMBER.findall(text):
        if not any(heading.startswith(f"{number}. ") for heading in headings(ROOT / "protocol" / "SPEC.md")):
            yield f"{name(path)} names SPEC §{number}"


def broken_links(path: Path, text: str) -> Iterator[str]:
    for target in _LINK.findall(_CODE.sub("", text)):
        if target.startswith(("http://", "https://")):
            continue
        file, _, anchor = target.partition("#")
        place = (path.parent / file).resolve() if file else path
        if not place.exists():
            yield f"{name(path)} links to {target}: no such file"
        elif anchor and anchor not in anchors(place.read_text()):
            yield f"{name(path)} links to {target}: no such heading"


def missing_paths(path: Path, text: str) -> Iterator[str]:
    for named in _PATH.findall(text):
        if not (ROOT / named).exists():
            yield f"{name(path)} names {named}"
    for listed in _TESTS.findall(text):
        for test in re.split(r",\s+", listed):
            if not list((ROOT / "tests").glob(f"*/test_{test}.py")):
                yield f"{name(path)} names T {test}"


def test_every_document_that_is_named_exists() -> None:
    assert [line for path, text in texts().items() for line in missing_documents(path, text)] == []


def test_every_section_that_is_named_exists() -> None:
    assert [line for path, text in texts().items() for line in missing_sections(path, text)] == []


def test_every_link_and_anchor_leads_somewhere() -> None:
    assert [line for path in documents() for line in broken_links(path, texts()[path])] == []


def test_every_file_that_a_document_names_exists() -> None:
    assert [line for path in documents() for line in missing_paths(path, texts()[path])] == []


def test_nothing_points_outside_the_repository() -> None:
    outside = re.compile(r"\.\./shared|\bshared/\w|\bDESIGN\b(?!\.md|\]\()|\bthe issue\b")
    named = {name(path) for path, text in texts().items() if outside.search(text)}
    assert named <= MAY_NAME_SHARED


def test_every_status_code_and_every_rejection_is_in_the_specification() -> None:
    text = (ROOT / "protocol" / "SPEC.md").read_text()
    codes = {
        int(code) for row in re.findall(r"^\| (\d{3}(?:, \d{3})*) \|", text, re.MULTILINE) for code in row.split(", ")
    }
    assert codes >= {200, 400, 405, 500, 503, 507, *(reason.value[0] for reason in RefusalReason)}
    listed = re.findall(r"(\d+) \| ([a-z ]+) \|", text[text.index("| number | reason") :].split("\n\n")[0])
    assert {(reason.number, reason.name.lower().replace("_", " ")) for reason in Rejection} == {
        (int(number), reason) for number, reason in listed
    }


def test_every_crash_point_is_in_the_document() -> None:
    rows = dict(
        re.findall(r"^\| ([a-z ]+) \| (.+) \|$", (ROOT / "mpc_helpers" / "COMMIT.md").read_text(), re.MULTILINE)
    )
    listed = {f"{part}: {point}" for part, points in rows.items() for point in points.split("; ")}
    assert {step.value for step in Failpoint} <= listed


@pytest.mark.parametrize(
    "text",
    [
        "see [it](nowhere.md)",
        "see [it](SPEC.md#99-nothing)",
        "see [it](#no-such-heading)",
        "as NOWHERE.md says",
        'as in DESIGN.md, "No such section"',
        "as in SPEC.md §99",
        "in `protocol/nothing.py`",
        "it holds (T nothing)",
        "| it holds | T report, nothing |",
    ],
)
def test_a_planted_dead_reference_is_noticed(text: str) -> None:
    place = ROOT / "protocol" / "SPEC.md"
    checks = (missing_documents, missing_sections, broken_links, missing_paths)
    assert [line for check in checks for line in check(place, text)]


DOCUMENTS = sorted([*ROOT.glob("*.md"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.md"))])
MOST_WORDS = 40
LONGEST_README = 1450  # words

_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_LINK_TEXT = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
_CODE_SPAN = re.compile(r"`[^`]*`")
_END = re.compile(r"(?<=[.!?])[)*\"]*\s+(?=[\"(*\[`]*[A-Z0-9γεδκ])")
_WORD = re.compile(r"\w")
_IDIOM = re.compile(r"\b(?:anew|reckon\w*|told|worth)\b", re.IGNORECASE)


def paragraphs(text: str) -> Iterator[str]:
    """The running text of a page: its paragraphs and the items of its lists, without code, tables and headings."""
    for block in re.split(r"\n\s*\n", _FENCE.sub("", text)):
        lines = block.splitlines()
        if not lines or lines[0].startswith(("    ", "|", "#", "![")):
            continue
        for item in re.split(r"\n(?=\s*(?:[-*]|\d+\.) )", block):
            yield " ".join(line.strip() for line in item.splitlines() if not line.startswith(("|", "    ")))


def sentences(text: str) -> list[str]:
    found = []
    for paragraph in paragraphs(text):
        plain = _CODE_SPAN.sub("code", _LINK_TEXT.sub(r"\1", paragraph))
        found += _END.split(plain)
    return found


def words(sentence: str) -> int:
    return sum(bool(_WORD.search(word)) for word in sentence.split())


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_sentence_is_over_forty_words(page: Path) -> None:
    long = [
        f"{words(sentence)}: {sentence}" for sentence in sentences(page.read_text()) if words(sentence) > MOST_WORDS
    ]
    assert not long, "\n".join(long)


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_private_idiom(page: Path) -> None:
    text = _CODE_SPAN.sub("code", _FENCE.sub("", page.read_text()))
    assert not (found := sorted(set(_IDIOM.findall(text)))), f"{page.name} says {', '.join(found)}"


def test_the_front_page_is_short() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= LONGEST_README


def test_a_long_sentence_is_noticed_wherever_it_stands() -> None:
    long = "word " * 41
    for text in (f"{long}.", f"Short. {long}.", f"- item\n- {long}\n  and more", f"It is `code`. {long}!"):
        assert max(map(words, sentences(text))) > MOST_WORDS
    for text in (f"```\n{long}\n```", f"| {long} |", f"    {long}", "One two. " * 30):
        assert max(map(words, sentences(text)), default=0) <= MOST_WORDS


README = (ROOT / "README.md").read_text()
SPEC = (ROOT / "protocol" / "SPEC.md").read_text()
# The theorems of the paper; Theorem 18 is its last.
THEOREMS = {str(number) for number in range(1, 19)}
_LINK_TARGET = re.compile(r"\]\(([^)]+)\)")
_COMMAND = re.compile(r"`trefoil ([a-z0-9 ]+)`")
_THEOREM = re.compile(r"Theorem (\d+)")
_NAMED = re.compile(r"\bT ((?:[a-z_]+(?:, )?)+)")


def rows(text: str, heading: str) -> list[list[str]]:
    """The table that begins with `heading`, without its first two lines."""
    lines = text[text.index(heading) :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


PROTECTION = rows(README, "| against | it holds that | shown by |")
BAD_HELPER = rows(SPEC, "| attack | what happens | shown by |")
SITES = rows(SPEC, "| who asks, and how | bound | because |")


def is_command(words: str) -> bool:
    """Whether `trefoil` has this command."""
    return CliRunner().invoke(cli.app, [*words.split(), "--help"]).exit_code == 0


def evidence(cell: str) -> list[str]:
    """What a cell names: links, commands and theorems. Each must exist."""
    links, commands, theorems = _LINK_TARGET.findall(cell), _COMMAND.findall(cell), _THEOREM.findall(cell)
    assert all(link.startswith("https://") or (ROOT / link).is_file() for link in links), cell
    assert all(map(is_command, commands)), cell
    assert set(theorems) <= THEOREMS, cell
    return [*links, *commands, *theorems]


@pytest.mark.parametrize("row", PROTECTION, ids=lambda row: row[0])
def test_every_row_of_the_readme_names_what_is_behind_it(row: list[str]) -> None:
    assert len(row) == 3
    assert evidence(row[2])


@pytest.mark.parametrize("row", BAD_HELPER, ids=lambda row: row[0])
def test_every_attack_in_the_specification_names_its_test(row: list[str]) -> None:
    names = [name for found in _NAMED.findall(row[-1]) for name in found.strip(", ").split(", ")]
    assert names
    for name in names:
        assert list((ROOT / "tests").glob(f"*/test_{name}.py")), name


def test_every_bound_on_sites_names_its_theorem_or_follows_from_the_row_above() -> None:
    assert len(SITES) == 8
    assert [bool(evidence(row[2]) or _NAMED.search(row[2])) for row in SITES] == [
        *[True] * 5,
        False,
        True,
        True,
    ]


@pytest.mark.parametrize(
    "cell", ["[gone](tests/test_gone.py)", "`trefoil experiment nothing`", "`trefoil nothing`", "Theorem 19"]
)
def test_what_does_not_exist_is_found(cell: str) -> None:
    with pytest.raises(AssertionError):
        evidence(cell)


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

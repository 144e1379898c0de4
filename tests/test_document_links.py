"""The repository stands alone: whatever a document, a module or a test names is in it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from mpc_helpers.ledger.attempt import Step
from mpc_helpers.service import server
from protocol.errors import Rejection

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("protocol", "device", "mpc_helpers", "benchmarks", "tests")
SUFFIXES = {".py", ".md", ".js", ".css", ".svg", ".toml", ".json"}
# Runs of the standard's own cases, for whoever has them beside the repository.
MAY_NAME_SHARED = {"tests/test_conformance.py", "tests/test_http_headers.py"}

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
    for document in _DOCUMENT.findall(text):
        if len(found(document.removeprefix("./"), path)) != 1:
            yield f"{name(path)} names {document}"


def missing_sections(path: Path, text: str) -> Iterator[str]:
    for document, section in _SECTION.findall(text):
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
            if not (ROOT / "tests" / f"test_{test}.py").exists():
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
    assert codes >= {200, 400, 405, 500, 503, 507, *server._STATUS.values()}
    listed = re.findall(r"(\d+) \| ([a-z ]+) \|", text[text.index("| number | reason") :].split("\n\n")[0])
    assert {(reason.number, reason.name.lower().replace("_", " ")) for reason in Rejection} == {
        (int(number), reason) for number, reason in listed
    }


def test_every_crash_point_is_in_the_document() -> None:
    rows = dict(
        re.findall(r"^\| ([a-z ]+) \| (.+) \|$", (ROOT / "mpc_helpers" / "COMMIT.md").read_text(), re.MULTILINE)
    )
    listed = {f"{part}: {point}" for part, points in rows.items() for point in points.split("; ")}
    assert {step.value for step in Step} <= listed


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

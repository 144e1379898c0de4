"""Plain English in every document: no sentence over 40 words, and no word that only we understand."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("protocol", "device", "mpc_helpers", "benchmarks", "tests")
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.md"))])
MOST_WORDS = 40
LONGEST_README = 90

_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
_CODE = re.compile(r"`[^`]*`")
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
        plain = _CODE.sub("code", _LINK.sub(r"\1", paragraph))
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
    text = _CODE.sub("code", _FENCE.sub("", page.read_text()))
    assert not (found := sorted(set(_IDIOM.findall(text)))), f"{page.name} says {', '.join(found)}"


def test_the_front_page_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= LONGEST_README


def test_a_long_sentence_is_noticed_wherever_it_stands() -> None:
    long = "word " * 41
    for text in (f"{long}.", f"Short. {long}.", f"- item\n- {long}\n  and more", f"It is `code`. {long}!"):
        assert max(map(words, sentences(text))) > MOST_WORDS
    for text in (f"```\n{long}\n```", f"| {long} |", f"    {long}", "One two. " * 30):
        assert max(map(words, sentences(text)), default=0) <= MOST_WORDS

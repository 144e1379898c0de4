"""Hold docstrings, comments, error messages, log lines and `--help` texts to the glossary of CONTRIBUTING.md."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from protocol.cli import app as cli

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("protocol", "device", "mpc_helpers", "benchmarks")
SOURCES = sorted([ROOT / "trefoil.py", *(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))])

# The glossary's right-hand column: words that hide a term of the field, and the term to use.
FORBIDDEN = {
    r"what (?:\w+ ){1,4}gives": "return",
    r"hand(?:s|ed)? (?:\w+ )?out": "return, attach, issue",
    r"whoever": "name the role",
    r"ever (?:longer|later)": "exponential backoff",
    r"until it works": "retry until it succeeds",
    r"until when": "deadline",
    r"steady clock": "monotonic clock",
    r"the same again": "idempotent",
    r"say(?:s|ing)? NO\b": "vote ABORTED",
    r"two different things": "equivocate",
    r"liars?": "malicious helper, dishonest device",
    r"bad helpers?": "malicious helper",
    r"cheats?": "adversary",
    r"put (?:their|the) answers together": "collude",
    r"should be dead": "fence",
    r"one copy at a time": "single-flight",
    r"make(?:s)? room": "evict",
    r"trickl\w+": "slowloris",
    r"as suits": "best effort",
    r"make(?:s)? it last": "persist",
    r"for ever": "permanently",
    r"try again later": "retry later",
    r"cannot be reached since": "has not responded for",
    r"as nobody foresaw": "unexpected exception",
    r"surroundings": "context",
    r"rehears\w+": "warm-up",
    r"nursery": "pool",
    r"anew": "again",
    r"reckon\w*": "compute",
}
_FORBIDDEN = {re.compile(rf"\b{pattern}\b", re.IGNORECASE): term for pattern, term in FORBIDDEN.items()}
# Participles as nouns, and metaphors, in names of functions, classes and parameters.
FORBIDDEN_NAMES = re.compile(
    r"^_?(?:found|known|shown|asked|told|settled)$|(?:^|_)(?:room|door|house)s?(?:_|$)|^floors?$"
)


def prose(source: str) -> Iterator[tuple[int, str]]:
    """Yield each docstring, comment and text of several words, with its line."""
    for node in ast.walk(ast.parse(source)):
        # The text of a trigger is part of a ledger's format: one that differs is not opened.
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "CREATE TRIGGER" not in node.value:
            yield node.lineno, node.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def forbidden_in(text: str) -> list[str]:
    return [
        f"{match.group()!r} (use: {term})" for pattern, term in _FORBIDDEN.items() if (match := pattern.search(text))
    ]


def names(source: str) -> Iterator[tuple[int, str]]:
    """Yield each name that a module, class or function defines."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield node.lineno, name
            case ast.arg(arg=name):
                yield node.lineno, name
            case ast.Name(id=name, ctx=ast.Store()):
                yield node.lineno, name


def help_texts() -> Iterator[tuple[str, str]]:
    """Yield each text of the help tree, by the command that shows it."""

    def below(command: Any, path: str) -> Iterator[tuple[str, str]]:  # Any: typer's class differs by version
        yield path, command.help or ""
        for parameter in command.params:
            yield path, getattr(parameter, "help", None) or ""
        for name, each in getattr(command, "commands", {}).items():
            yield from below(each, f"{path} {name}")

    yield from below(cli.tree(), "trefoil")


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_prose_uses_the_fields_terms(path: Path) -> None:
    lines = [f"{line}: {word}" for line, text in prose(path.read_text()) for word in forbidden_in(text)]
    assert not lines, "\n".join(sorted(set(lines)))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_names_are_neither_participles_nor_metaphors(path: Path) -> None:
    assert not [f"{line}: {name}" for line, name in names(path.read_text()) if FORBIDDEN_NAMES.search(name)]


def test_help_uses_the_fields_terms() -> None:
    assert not [f"{path}: {word}" for path, text in help_texts() for word in forbidden_in(text)]


def test_planted_words_are_noticed() -> None:
    planted = 'def f():\n    """Return what it gives."""\n    # Whoever asks.\n    raise E("try again later")\n'
    assert [word for _, text in prose(planted) for word in forbidden_in(text)] == [
        "'what it gives' (use: return)",
        "'try again later' (use: retry later)",
        "'Whoever' (use: name the role)",
    ]
    assert [name for _, name in names("def front_door(found): pass") if FORBIDDEN_NAMES.search(name)] == [
        "front_door",
        "found",
    ]

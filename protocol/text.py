"""Text from someone else, made fit to be shown: a terminal obeys escape sequences, so none may reach it."""

from __future__ import annotations

MAX_SHOWN = 2000
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def printable(text: str, limit: int = MAX_SHOWN) -> str:
    """`text` with every character that is not printable replaced, and cut at `limit` characters."""
    shown = "".join(character if character.isprintable() else _REPLACEMENT for character in text[:limit])
    return shown if len(text) <= limit else shown + "…"

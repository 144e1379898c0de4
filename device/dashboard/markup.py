"""HTML as values: text is escaped unless it was built here, so that no site's name can become part of the page."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import TypeAlias

_VOID = frozenset({"meta", "link", "input", "br", "img", "hr"})


class Markup(str):
    """Text that is HTML already. Only `tag` and `document` make it."""

    __slots__ = ()


Node: TypeAlias = "str | int | Iterable[Node] | None"
Attribute: TypeAlias = "str | int | bool | None"


def tag(element: str, *children: Node, **attributes: Attribute) -> Markup:
    """One element. `class_` and `aria_label` stand for class and aria-label; True is a bare attribute, None is none."""
    shown = "".join(_attribute(name, value) for name, value in attributes.items())
    if element in _VOID:
        return Markup(f"<{element}{shown}>")
    return Markup(f"<{element}{shown}>{join(children)}</{element}>")


def join(children: Node) -> Markup:
    """Children one after another: HTML as it is, text escaped, None left out."""
    if children is None:
        return Markup("")
    if isinstance(children, Markup):
        return children
    if isinstance(children, str | int):
        return Markup(escape(str(children)))
    return Markup("".join(join(child) for child in children))


def document(head: Node, body: Node) -> str:
    """A whole page, in English."""
    return f'<!doctype html>\n<html lang="en"><head>{join(head)}</head><body>{join(body)}</body></html>\n'


def _attribute(name: str, value: Attribute) -> str:
    if value is None or value is False:
        return ""
    written = name.rstrip("_").replace("_", "-")
    return f" {written}" if value is True else f' {written}="{escape(str(value))}"'

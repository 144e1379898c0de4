"""Build HTML from Python values, and the page template: header, navigation, sections, tables.

All text is escaped except `Markup`, which comes from this module and from templates of our own, so that a site's name
cannot inject HTML.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TypeAlias

_VOID = frozenset({"meta", "link", "input", "br", "img", "hr"})


class Markup(str):
    """Text that is HTML and must not be escaped."""

    __slots__ = ()


Node: TypeAlias = "str | int | Iterable[Node] | None"
Attribute: TypeAlias = "str | int | bool | None"


def tag(element: str, *children: Node, **attributes: Attribute) -> Markup:
    """Return one element. `class_` becomes class, `aria_label` aria-label; True is a bare attribute, None omits it."""
    written = "".join(_attribute(name, value) for name, value in attributes.items())
    if element in _VOID:
        return Markup(f"<{element}{written}>")
    return Markup(f"<{element}{written}>{join(children)}</{element}>")


def join(children: Node) -> Markup:
    """Concatenate children: markup as it is, text escaped and each amount on one line with its ε, None omitted."""
    if children is None:
        return Markup("")
    if isinstance(children, Markup):
        return children
    if isinstance(children, str | int):
        return Markup(escape(str(children)).replace(" ε", "&nbsp;ε"))
    return Markup("".join(join(child) for child in children))


def document(title: str, body: Node, *, root: str, head: Node = None) -> str:
    """Return an HTML document with our style sheet; `root` is prefixed to the addresses of static files."""
    heads = [
        tag("meta", charset="utf-8"),
        tag("title", title),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("link", rel="stylesheet", href=f"{root}static/style.css"),
        tag("link", rel="icon", type="image/svg+xml", href=f"{root}static/trefoil.svg"),
        head,
    ]
    return f'<!doctype html>\n<html lang="en"><head>{join(heads)}</head><body>{join(body)}</body></html>\n'


def _attribute(name: str, value: Attribute) -> str:
    if value is None or value is False:
        return ""
    written = name.rstrip("_").replace("_", "-")
    return f" {written}" if value is True else f' {written}="{escape(str(value))}"'


STATIC = Path(__file__).parent / "static"
Link = tuple[str, str]


def page(
    title: str,
    main: Node,
    *,
    links: Sequence[Link] = (),
    links_label: str = "On this page",
    current: str = "",
    below: Node = None,
    root: str = "",
    head: Node = None,
) -> str:
    """Return a page from the common template.

    `links` are the (name, address) pairs of the navigation and `current` the name of the open one; `below` goes between
    the header and the content; `root` is prefixed to the addresses of static files.
    """
    body = [
        tag("a", "Skip to the content", href="#content", class_="skip"),
        tag("header", _brand(), _navigation(links, links_label, current), class_="bar"),
        below,
        tag("main", main, id="content", tabindex="-1"),
    ]
    return document(f"{title} · Trefoil", body, root=root, head=head)


def bare_page(title: str, main: Node) -> str:
    """Return a page without header or navigation, to be embedded in a frame."""
    return document(title, tag("main", main, class_="bare"), root="/")


def _brand() -> Markup:
    leaves = [tag("circle", cx=x, cy=y, r="5") for x, y in (("12", "7.5"), ("7", "15.5"), ("17", "15.5"))]
    picture = tag("svg", leaves, class_="leaf", viewBox="0 0 24 24", width="22", height="22", aria_hidden="true")
    return tag("p", picture, tag("span", "Trefoil"), class_="brand")


def _navigation(links: Sequence[Link], label: str, current: str) -> Markup | None:
    if not links:
        return None
    items = [
        tag("li", tag("a", name, href=address, aria_current="page" if name == current else None))
        for name, address in links
    ]
    return tag("nav", tag("ul", items), aria_label=label)


def section(identifier: str, heading: str, *content: Node, class_: str | None = None) -> Markup:
    """Return a section labelled by its own heading, for screen readers."""
    name = f"{identifier}-heading"
    return tag("section", tag("h2", heading, id=name), content, id=identifier, aria_labelledby=name, class_=class_)


def fold(identifier: str, heading: Node, *content: Node, unfolded: bool = False, class_: str = "fold") -> Markup:
    """Return content that its heading shows and hides, by the browser itself."""
    return tag("details", tag("summary", heading), content, id=identifier, class_=class_, open=unfolded)


def table(
    caption: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[Node]],
    *,
    numbers: Collection[str] = (),
    class_: str | None = None,
) -> Markup:
    """Return a table whose first column holds the row headers; columns in `numbers` are right-aligned.

    Wide tables scroll on their own, also by keyboard. On a narrow screen the style sheet turns each row into a card,
    with `data-label` as its headings; the explicit roles keep it a table for screen readers.
    """
    kinds = {column: "number" if column in numbers else None for column in columns}
    headings = [tag("th", column, scope="col", role="columnheader", class_=kinds[column]) for column in columns]
    head = tag("thead", tag("tr", headings, role="row"), role="rowgroup")
    body = tag("tbody", [_row(row, columns, kinds) for row in rows], role="rowgroup")
    inner = tag("table", tag("caption", caption), head, body, class_=class_, role="table")
    return tag("div", inner, class_="scroll", tabindex="0", role="group", aria_label=caption)


def _row(row: Sequence[Node], columns: Sequence[str], kinds: Mapping[str, str | None]) -> Markup:
    cells = [
        tag("td", cell, role="cell", class_=kinds[column], data_label=column)
        for column, cell in zip(columns[1:], row[1:], strict=True)
    ]
    return tag("tr", tag("th", row[0], scope="row", role="rowheader"), cells, role="row")


def budget_bar(spent: int, capacity: int) -> Markup:
    """Return a bar of the spent budget up to its capacity. Hidden from screen readers: text says the same."""
    filled = min(100.0, 100 * spent / capacity) if capacity else 0.0
    shapes = [
        tag("rect", class_="track", x="0", y="3", width="100", height="8", rx="1"),
        tag("rect", class_="full" if spent >= capacity else "spent", x="0", y="3", width=f"{filled:.2f}", height="8"),
        tag("rect", class_="capacity", x="99", y="0", width="1", height="14"),
    ]
    return tag("svg", shapes, class_="budget", viewBox="0 0 100 14", preserveAspectRatio="none", aria_hidden="true")


def button_link(name: str, address: str, *, danger: bool = False) -> Markup:
    """Return a link styled as a button."""
    return tag("a", name, href=address, class_="button danger" if danger else "button")


def notice(text: Node, *, kind: str = "") -> Markup:
    """Return a status message, which screen readers announce."""
    return tag("div", text, class_=f"notice {kind}".strip(), role="status")

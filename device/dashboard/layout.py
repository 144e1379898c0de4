"""The frame around every page: title, way to the content, landmarks, one style sheet, no script."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from device.dashboard.markup import Markup, Node, document, tag

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
    """A whole page. `links` are (name, address) of the navigation and `current` the name of the one that is open;
    `below` is a second bar; `root` is where its static files are.
    """
    heads = [
        tag("meta", charset="utf-8"),
        tag("title", f"{title} · Trefoil"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("link", rel="stylesheet", href=f"{root}static/style.css"),
        tag("link", rel="icon", type="image/svg+xml", href=f"{root}static/trefoil.svg"),
        head,
    ]
    body = [
        tag("a", "Skip to the content", href="#content", class_="skip"),
        tag("header", _brand(), _navigation(links, links_label, current), class_="bar"),
        below,
        tag("main", main, id="content", tabindex="-1"),
    ]
    return document(heads, body)


def bare_page(title: str, main: Node) -> str:
    """A page without anything around it, to be shown in a frame."""
    head = [
        tag("meta", charset="utf-8"),
        tag("title", title),
        tag("meta", name="color-scheme", content="light dark"),
        tag("link", rel="stylesheet", href="/static/style.css"),
        tag("link", rel="icon", type="image/svg+xml", href="/static/trefoil.svg"),
    ]
    return document(head, tag("main", main, class_="bare"))


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
    """A part of a page under its own heading, which names it for screen readers."""
    name = f"{identifier}-heading"
    return tag("section", tag("h2", heading, id=name), content, id=identifier, aria_labelledby=name, class_=class_)


def table(
    caption: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[Node]],
    *,
    numbers: Collection[str] = (),
    class_: str | None = None,
) -> Markup:
    """A table whose first column names its rows; columns in `numbers` are right-aligned.

    Wide ones scroll on their own, also by keyboard. On a narrow screen each row becomes a card that names its columns
    itself; the roles keep it a table for screen readers, whatever the style sheet makes of it.
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
    """Spent budget as a bar up to its capacity, which is marked at the end. The same is in words beside it."""
    filled = min(100.0, 100 * spent / capacity) if capacity else 0.0
    shapes = [
        tag("rect", class_="track", x="0", y="3", width="100", height="8", rx="1"),
        tag("rect", class_="full" if spent >= capacity else "spent", x="0", y="3", width=f"{filled:.2f}", height="8"),
        tag("rect", class_="capacity", x="99", y="0", width="1", height="14"),
    ]
    return tag("svg", shapes, class_="budget", viewBox="0 0 100 14", preserveAspectRatio="none", aria_hidden="true")


def button_link(name: str, address: str, *, danger: bool = False) -> Markup:
    """A link that looks like a button: it leads to a page that asks first."""
    return tag("a", name, href=address, class_="button danger" if danger else "button")


def notice(text: Node, *, kind: str = "") -> Markup:
    """What just happened, said at once by a screen reader."""
    return tag("div", text, class_=f"notice {kind}".strip(), role="status")

"""The pictures of the demonstration, drawn by hand: a shoe for the hills, a shoe for the street, and where they go."""

from __future__ import annotations

from device.dashboard.markup import Markup, tag

_TRAIL = "M14 62c6-2 12-18 14-32 12 7 22 7 30 3 6 12 20 20 44 23 14 2 20 7 20 15v4H14z"
_CITY = "M14 66c2-10 6-20 10-26 14 8 26 6 36 0 8 12 22 18 42 20 12 1 20 4 20 12v2H14z"


def ad_picture(campaign: int) -> Markup:
    """What an ad shows: even campaigns sell shoes for the trail, odd ones for the city."""
    trail = campaign % 2 == 0
    scene = _hills() if trail else _houses()
    shapes = [tag("rect", width="136", height="96", class_="sky"), scene, _trail() if trail else _city()]
    return tag("svg", shapes, viewBox="0 0 136 96", class_="picture", aria_hidden="true")


def shoe() -> Markup:
    """The shoe in the shop."""
    return tag("svg", _trail(), viewBox="6 22 124 64", class_="shoe", role="img", aria_label="Drawing of a shoe")


def _trail() -> Markup:
    teeth = "M16 75h110v5l-6 4-7-4-7 4-7-4-7 4-7-4-7 4-7-4-7 4-7-4-7 4-7-4-7 4-7-4-7 4-5-4z"
    laces = tag("path", d="M60 37l-9 8M68 43l-9 8M77 48l-8 8", class_="laces")
    return tag("g", tag("path", d=_TRAIL, class_="upper"), tag("path", d=teeth, class_="sole"), laces)


def _city() -> Markup:
    stripe = tag("path", d="M40 72l8-20M50 72l8-18", class_="laces")
    sole = tag("rect", x="12", y="73", width="112", height="7", rx="3.5", class_="sole")
    return tag("g", tag("path", d=_CITY, class_="upper"), sole, stripe)


def _hills() -> Markup:
    far = tag("path", d="M0 52l26-24 20 18 30-32 32 30 28-18v44H0z", class_="far")
    near = tag("path", d="M0 70c30-14 60-12 84-4s38 4 52-2v32H0z", class_="near")
    return tag("g", tag("circle", cx="112", cy="18", r="8", class_="sun"), far, near)


def _houses() -> Markup:
    far = tag("path", d="M0 96V40h18V24h20v26h14V18h22v34h16V32h20v20h26v44z", class_="far")
    windows = tag("path", d="M23 30h4m5 0h4M58 24h4m6 0h4M96 38h4m5 0h4M58 34h4m6 0h4", class_="windows")
    return tag("g", far, windows, tag("rect", y="80", width="136", height="16", class_="near"))

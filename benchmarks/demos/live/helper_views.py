"""What each helper sees of one report: two vectors of uniform numbers. Nothing but noise, whatever is in it.

Your own report can be added up: any two parts are still noise, and all three are what your device has put in. The
demonstration runs all three helpers on this machine and so holds all three keys. That is the one thing that must
never be true of helpers that measure real people.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from aiohttp import web

from benchmarks.demos.live.measurement import Measurement
from benchmarks.demos.live.web import CAMPAIGNS, Frame, Map, Place
from device.dashboard.formatting import epsilon
from device.dashboard.markup import Markup, Node, fold, section, table, tag
from mpc_helpers.local.launcher import Trio
from protocol.field import P, Vector, add, lift
from protocol.hpke import PrivateKey
from protocol.keys import load_hpke_key
from protocol.report import SealedReport, open_report
from protocol.shares import PARTIES, SEEDS_OF
from protocol.validity import histogram_in


@dataclass(frozen=True, slots=True)
class View:
    """One helper's two components of a report."""

    party: int
    components: Mapping[int, Vector]


def views_of(report: SealedReport, keys: Sequence[Mapping[bytes, PrivateKey]]) -> list[View]:
    """Return what every helper sees when it opens its payload with its own keys."""
    return [View(party, open_report(party, report, keys[party])) for party in range(PARTIES)]


def helper_keys(trio: Trio) -> list[dict[bytes, PrivateKey]]:
    """Load the keys of the three helpers from their folders."""
    return [_keys_in(trio.helper_folder(party) / "hpke") for party in range(PARTIES)]


def _keys_in(folder: Path) -> dict[bytes, PrivateKey]:
    keys = [load_hpke_key(path) for path in folder.glob("*.key")]
    return {key.public.key_id: key for key in keys}


class HelperViews:
    """A page that walks through the collected reports, one at a time."""

    def __init__(self, where: Map, measurement: Measurement, trio: Trio) -> None:
        self._frame = Frame(Place.HELPERS, where)
        self._measurement = measurement
        self._keys = helper_keys(trio)

    def app(self) -> web.Application:
        app = self._frame.app()
        app.router.add_get("/", self._show)
        return app

    async def _show(self, request: web.Request) -> web.Response:
        digests = [digest for batch in self._measurement.batches for digest in batch.credited]
        yours = {digest for batch in self._measurement.batches for digest in batch.yours}
        mine = [number for number, digest in enumerate(digests, 1) if digest in yours]
        if not digests:
            return self._page(
                tag("p", "No report has been collected yet. ", self._frame.link(Place.SHOP, "Buy something."))
            )
        chosen = _chosen(request.query.get("report", ""), mine[-1] if mine else len(digests), len(digests))
        report = await asyncio.to_thread(self._measurement.report, digests[chosen - 1])
        if report is None:
            raise web.HTTPNotFound(text="This report is kept no longer.\n")
        views, is_yours = views_of(report, self._keys), chosen in mine
        panels = tag("div", [_panel(view) for view in views], class_="three")
        return self._page(
            _walk(chosen, len(digests), mine),
            _sums(report, views, chosen, is_yours=is_yours, added="add" in request.query),
            section("views", "The same report, at each helper", panels),
            _public(report),
        )

    def _page(self, *report: Node) -> web.Response:
        return self._frame.show("What a helper sees", self._frame.fill("helpers", report=report))


_TOGETHER = (
    "Only the sum of all three parts means anything, and no helper has all three. They add up their parts over all "
    "reports first, put noise on the sum, and open only that, to the advertiser alone. This page has all three keys, "
    "so it can do here what no helper can:"
)
_ADDED = (
    "Any two parts together are as random as each one: two of three are noise. Only all three are your report, and no "
    "helper ever adds them up for one person."
)


def _chosen(text: str, otherwise: int, count: int) -> int:
    number = int(text) if text.isascii() and text.isdigit() and len(text) < 9 else otherwise
    return min(max(number, 1), count)


def _walk(chosen: int, count: int, mine: Sequence[int]) -> Markup:
    """Show the place of this report in the batch, and whether it is yours. No helper could know."""
    steps = [("Report before", chosen - 1), ("Report after", chosen + 1)]
    if mine and chosen not in mine:
        steps.append(("Show yours", mine[-1]))
    links = [
        tag("a", name, href=f"?report={number}", class_="button") for name, number in steps if 1 <= number <= count
    ]
    whose = "This one is yours" if chosen in mine else "Somebody else's"
    mark = tag("span", whose, class_="pill on" if chosen in mine else "pill")
    return tag("p", tag("span", f"Report {chosen:,} of {count:,}"), mark, links, class_="actions")


def _public(report: SealedReport) -> Markup:
    terms = report.terms()
    facts = [
        ["For the site", terms.site],
        ["Noise paid for", f"{epsilon(terms.epsilon_micros)} at a sensitivity of {terms.sensitivity}"],
        ["Numbers inside", str(terms.buckets)],
        ["Size", f"{len(report.encode()):,} bytes"],
        ["Its name", tag("code", report.digest.hex())],
    ]
    return section(
        "public", "What everyone may know about it", table("The header of the report", ["What", "Value"], facts)
    )


def _panel(view: View) -> Markup:
    first, second = SEEDS_OF[view.party]
    columns = ["No.", f"Part {first + 1}", f"Part {second + 1}"]
    rows: list[list[Node]] = [
        [at, *(tag("code", f"{int(view.components[part][at]):016x}") for part in (first, second))]
        for at in range(len(CAMPAIGNS))
    ]
    name = f"Helper {view.party + 1}"
    visible = len(CAMPAIGNS)
    parts = [view.components[part][:visible] for part in (first, second)]
    # A checked report has more numbers: those that prove it, just as uniform.
    caption = f"The first {visible} of {len(view.components[first])} numbers that {name.lower()} holds"
    return tag("div", tag("h3", name), _picture(parts), table(caption, columns, rows), class_="panel")


def sums_of(report: SealedReport, views: Sequence[View]) -> tuple[dict[str, Vector], list[int]]:
    """Return the histogram in the sum of every two parts of a report, and the numbers in the sum of all three."""
    parts = {index: part for view in views for index, part in view.components.items()}
    pairs = {
        f"Parts {one + 1} and {other + 1}": _visible(report, add(parts[one], parts[other]))
        for one, other in combinations(range(PARTIES), 2)
    }
    return pairs, lift(_visible(report, add(add(parts[0], parts[1]), parts[2])))


def _visible(report: SealedReport, shared: Vector) -> Vector:
    return histogram_in(shared, report.terms().shape)[: len(CAMPAIGNS)]


def _sums(report: SealedReport, views: Sequence[View], chosen: int, *, is_yours: bool, added: bool) -> Markup:
    """Return the button that adds the parts of your own report up, or the sums."""
    if is_yours and added:
        pairs, numbers = sums_of(report, views)
        panels = [*(_pair_panel(name, total) for name, total in pairs.items()), _sum_panel(numbers)]
        return section("sums", "Your report, added up", tag("p", _ADDED), tag("div", panels, class_="three four"))
    why = "Only your own report can be added up here, so the button is greyed out for this one."
    button = tag("button", "Add up the three parts", class_="primary", disabled=not is_yours, aria_describedby="why")
    message = tag("p", _TOGETHER if is_yours else why, id="why", class_=None if is_yours else "soft")
    fields = [tag("input", type="hidden", name=name, value=value) for name, value in (("report", chosen), ("add", 1))]
    form = tag("form", fields, tag("p", button, class_="actions"), action="/#sums")
    return section("sums", "Add your report up", message, form)


def _pair_panel(name: str, total: Vector) -> Markup:
    rows = [[label, tag("code", f"{int(number):016x}")] for label, number in zip(CAMPAIGNS, total, strict=True)]
    listing = table("Any number is as likely as any other", ["Campaign", "Sum"], rows)
    numbers = fold(name.lower().replace(" ", "-"), "Noise, in numbers", listing)
    return tag("div", tag("h3", name), _picture([total]), numbers, class_="panel")


def _sum_panel(numbers: Sequence[int]) -> Markup:
    credited = [label for label, number in zip(CAMPAIGNS, numbers, strict=True) if number]
    said = f"Your purchase counts for “{credited[0]}”." if credited else "It is empty: it counts for no campaign."
    rows = [[label, f"{number:,}"] for label, number in zip(CAMPAIGNS, numbers, strict=True)]
    listing = table("What your device has put in", ["Campaign", "Sum"], rows, numbers=("Sum",))
    return tag("div", tag("h3", "All three parts"), tag("p", said, class_="verdict"), listing, class_="panel")


def _picture(parts: Sequence[Vector]) -> Markup:
    """Draw bars of the two components, relative to the field's size."""
    bars = [
        tag(
            "rect",
            x=f"{at * 10 + which * 4 + 1}",
            y=f"{20 * (1 - int(value) / P):.2f}",
            width="3.6",
            height=f"{20 * int(value) / P:.2f}",
            class_="first" if which == 0 else "second",
        )
        for which, part in enumerate(parts)
        for at, value in enumerate(part)
    ]
    width = 10 * len(CAMPAIGNS)
    return tag("svg", bars, viewBox=f"0 0 {width} 20", preserveAspectRatio="none", class_="view", aria_hidden="true")
